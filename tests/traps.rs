//! What others have fallen into, one test a trap where no other test shows it. The ids are this project's own labels;
//! `docs/traps.md` says what each trap is and which tests, here and elsewhere, keep it closed.
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support;
mod support_balance;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as _;
use http_body_util::Full;
use support::{Probe, Reply, Script, Step, answer, ask};
use support_balance::{Call, Desk, call, call_with, of_family, settle};
use tokio::time::{Instant, sleep, timeout};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    auth::OrgAuthLayer,
    balance::{NoOrgLeft, OrgBalanceLayer},
    drive::Drive,
    judge::JudgeLayer,
    org::{Org, Orgs, OutReason},
    outcome::{ByStatus, Class, Stamp},
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    stack::Stack,
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn open() -> Settings {
    Settings::builder().start(1.0).spread(Duration::ZERO).build().unwrap()
}

fn pool(orgs: &[(&str, usize)]) -> Orgs {
    Orgs::new(orgs.iter().map(|(name, cap)| Org::new(name).cap(*cap))).unwrap()
}

fn served_by<B>(response: &Response<B>) -> &str {
    response.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name()
}

// P1

/// Calls through a service and its clones in turn. The probe below panics if an instance is called that was not readied.
async fn call_through<S>(mut service: S)
where
    S: Service<Request<Script>> + Clone,
    S::Error: std::fmt::Debug,
{
    for _ in 0..3 {
        let mut clone = service.clone();
        drop(service.ready().await.unwrap().call(ask()).await.unwrap());
        // Readied early, called late, with a clone of it made in between.
        let early = service.ready().await.unwrap();
        let mut later = early.clone();
        drop(clone.ready().await.unwrap().call(ask()).await.unwrap());
        drop(early.call(ask()).await.unwrap());
        drop(later.ready().await.unwrap().call(ask()).await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn p01_through_each_layer_and_the_whole_stack_the_readied_instance_is_the_one_called() {
    let org = Org::new("a");
    // Every third call fails and, where nobody holds an org for it, every fifth is refused: retries have something to ready.
    let failing = || Probe::new(|n| Reply::Now(Ok(answer(if n % 3 == 2 { 503 } else { 200 }, &[]))));
    let probe = || {
        Probe::new(|n| match n {
            n if n % 3 == 2 => Reply::Now(Ok(answer(503, &[]))),
            n if n % 5 == 4 => Reply::Now(Ok(answer(429, &[("retry-after-ms", "20")]))),
            _ => Reply::Now(Ok(answer(200, &[]))),
        })
    };
    call_through(OrgAuthLayer::new(&org).unwrap().layer(probe())).await;
    call_through(JudgeLayer::new().layer(probe())).await;
    call_through(QuotaHeaderLayer::new(&org).layer(failing())).await;
    call_through(AimdLimitLayer::with_settings(&Org::new("a"), &open()).layer(failing())).await;
    call_through(RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap().layer(probe())).await;
    let two = pool(&[("a", 4), ("b", 4)]);
    call_through(OrgBalanceLayer::new(two.clone(), |_: &Org, probe: Probe| probe).layer(probe())).await;
    let last = probe();
    call_through(Stack::new(two).limit(open()).build(last.clone()).unwrap()).await;
    assert!(last.calls() > 12, "some were made again: {}", last.calls());
}

// P2

#[tokio::test(start_paused = true)]
async fn p02_readiness_that_is_never_used_keeps_no_retry_from_its_slot() {
    for idle in [0, 1, 5] {
        let orgs = pool(&[("a", 1)]);
        let probe = Probe::new(|n| Reply::Now(Ok(answer(if n == 0 { 503 } else { 200 }, &[]))));
        let stack = Stack::new(orgs).limit(open()).build(probe.clone()).unwrap();
        let mut first = task::spawn(stack.clone().oneshot(ask()));
        assert_pending!(first.poll(), "it backs off");
        let mut readied: Vec<_> = (0..idle).map(|_| stack.clone()).collect();
        for service in &mut readied {
            ServiceExt::<Request<Script>>::ready(service).await.unwrap();
        }
        let begin = Instant::now();
        assert_eq!(first.await.unwrap().status(), 200);
        assert!(begin.elapsed() <= 500 * MS, "within its backoff: {:?}", begin.elapsed());
        assert_eq!(probe.calls(), 2);
    }
    // With a limiter that reserves right under the retry one idle instance is enough.
    let probe = Probe::new(|n| Reply::Now(Ok(answer(if n == 0 { 503 } else { 200 }, &[]))));
    let limiter = AimdLimitLayer::with_settings(&Org::new("a").cap(1), &open()).layer(probe.clone());
    let retrying = RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap().layer(limiter);
    let mut first = task::spawn(retrying.clone().oneshot(ask()));
    assert!(first.poll().is_pending());
    let mut idle = retrying.clone();
    ServiceExt::<Request<Script>>::ready(&mut idle).await.unwrap();
    assert!(timeout(599 * SECOND, &mut first).await.is_err(), "its retry waits for the slot until it is given up");
    drop(idle);
    assert_eq!(timeout(SECOND, first).await.unwrap().unwrap().status(), 200);
}

// P6

#[tokio::test(start_paused = true)]
async fn p06_no_orgs_at_all_is_an_error_at_build() {
    let error = Orgs::new([]).unwrap_err();
    assert_eq!(error.field(), "orgs");
    assert_eq!(Orgs::new([Org::new("a")]).unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn p06_where_all_are_held_a_call_goes_when_the_first_hold_ends_and_a_deadline_is_kept() {
    // The holds of two orgs, a time-out around the call if any, and after how many milliseconds it ends, and how.
    for (holds, deadline, ends, answered) in [
        ([30, 40], None, 30_000, true),
        ([40, 30], None, 30_000, true),
        ([30, 40], Some(5), 5_000, false),
        ([30, 40], Some(29), 29_000, false),
        ([30, 40], Some(31), 30_000, true),
    ] {
        let orgs = pool(&[("a", 4), ("b", 4)]);
        let begin = Instant::now();
        let stack = Stack::new(orgs.clone()).limit(open()).build_with(move |org| {
            let hold = holds[usize::from(org.name() == "b")].to_string();
            Probe::new(move |n| {
                Reply::Now(Ok(if n == 0 { answer(429, &[("retry-after", &hold)]) } else { answer(200, &[]) }))
            })
        });
        let call = stack.unwrap().oneshot(ask());
        let ended = match deadline {
            Some(seconds) => timeout(seconds * SECOND, call).await.ok().map(Result::unwrap),
            None => Some(call.await.unwrap()),
        };
        let took = begin.elapsed().as_millis();
        assert!((ends..=ends + 2).contains(&took), "{holds:?}, {deadline:?}: {took}");
        assert_eq!(ended.is_some_and(|answer| answer.status() == 200), answered, "{holds:?}, {deadline:?}");
        for org in orgs.iter().flat_map(Org::families) {
            assert_eq!((org.snapshot().in_flight, org.snapshot().waiting), (0, 0));
        }
    }
}

#[test]
fn p06_where_all_are_gone_a_call_ends_at_once_and_says_so() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    for (out, left) in [("a", true), ("b", false)] {
        desk.org(out).put_out(OutReason::Disabled("it is not ours any more".into()));
        let mut call = call(&balance, 1);
        let poll = call.poll();
        assert_eq!(poll.is_pending(), left);
        if let Poll::Ready(ended) = poll {
            let error = ended.unwrap_err();
            assert_eq!(error.class(), Class::NoOrg);
            let none_left = std::error::Error::source(&error).unwrap().downcast_ref::<NoOrgLeft>().unwrap();
            assert_eq!(none_left.reasons().count(), 2);
        }
    }
}

// P7

#[tokio::test(start_paused = true)]
async fn p07_readiness_from_before_a_hold_sends_nothing_to_the_held_org() {
    for readied in [1, 3, 8] {
        let orgs = pool(&[("a", 8), ("b", 8)]);
        let probes: Arc<Mutex<BTreeMap<String, Probe>>> = Arc::default();
        let seen = probes.clone();
        let layer = OrgBalanceLayer::new(orgs.clone(), move |org: &Org, ()| {
            let refuses = org.name() == "a";
            let probe = Probe::new(move |_| {
                let answer = if refuses { answer(429, &[("retry-after", "30")]) } else { answer(200, &[]) };
                Reply::After(10 * MS, answer)
            });
            seen.lock().unwrap().insert(org.name().to_owned(), probe.clone());
            AimdLimitLayer::with_settings(org, &open()).layer(probe)
        });
        let balance = layer.layer(());
        let mut early: Vec<_> = (0..readied).map(|_| balance.clone()).collect();
        for service in &mut early {
            ServiceExt::<Request<Script>>::ready(service).await.unwrap();
        }
        // Whoever meets `a` first has it held.
        while !orgs.get("a").unwrap().is_held() {
            drop(balance.clone().oneshot(ask()).await.unwrap());
        }
        let calls = |org: &str| probes.lock().unwrap()[org].calls();
        let before = (calls("a"), calls("b"));
        for mut service in early {
            let response = Service::<Request<Script>>::call(&mut service, ask()).await.unwrap();
            assert_eq!((response.status().as_u16(), served_by(&response)), (200, "b"));
        }
        assert_eq!((calls("a"), calls("b")), (before.0, before.1 + readied), "not one of {readied} went to `a`");
    }
}

// P8

#[test]
fn p08_an_org_that_goes_moves_no_call_of_the_others() {
    let names = ["a", "b", "c"];
    for how in ["put out", "removed", "disabled"] {
        for gone in names {
            for seed in 0..30 {
                fastrand::seed(seed);
                let desk = Desk::new(&names, 2);
                let balance = desk.balance();
                // Two are in flight at each, and two wait: whatever is chosen is chosen by number.
                let mut calls: BTreeMap<u32, Call> = (0..8).map(|id| (id, call(&balance, id))).collect();
                calls.values_mut().for_each(|call| assert_pending!(call.poll()));
                match how {
                    "put out" => desk.org(gone).put_out(OutReason::Unauthorised),
                    "removed" => drop(balance.members().remove(gone).unwrap()),
                    _ => balance.members().disable(gone).unwrap(),
                }
                assert!(settle(&mut calls).is_empty());
                let before = desk.hand(gone).counts().calls;
                // One after another ends, and others come: all that is said of who served is what that member saw.
                for id in 10..30 {
                    let mut fresh = call(&balance, id);
                    assert_pending!(fresh.poll());
                    calls.insert(id, fresh);
                    let flying = |org: &&str| desk.hand(org).in_flight().first().map(|id| ((*org).to_owned(), *id));
                    let (org, id) = names.iter().find_map(flying).unwrap();
                    desk.hand(&org).answer(id, 200);
                    for (id, ended) in settle(&mut calls) {
                        let response = ended.unwrap();
                        assert_eq!((served_by(&response), *response.body()), (&*org, id), "{gone} {how}");
                    }
                }
                assert_eq!(desk.hand(gone).counts().calls, before, "{gone} {how}: it gets nothing any more");
                let others: usize =
                    names.iter().filter(|org| **org != gone).map(|org| desk.hand(org).in_flight().len()).sum();
                assert_eq!(others, 4, "{gone} {how}: and the others are full");
            }
        }
    }
}

// P15

#[tokio::test(start_paused = true)]
async fn p15_thirty_two_callers_hit_a_black_hole_ten_times_at_most() {
    for (hint, seconds) in [(None, 10), (Some("1"), 10), (Some("0"), 10), (Some("60"), 10)] {
        for seed in 0..3 {
            fastrand::seed(seed);
            let orgs = pool(&[("a", 40), ("b", 40)]);
            let refused = Arc::new(AtomicUsize::new(0));
            let good = Arc::new(AtomicUsize::new(0));
            let (bad, well) = (refused.clone(), good.clone());
            let stack = Stack::new(orgs).build_with(move |org| {
                let (bad, well, refuses) = (bad.clone(), well.clone(), org.name() == "a");
                Probe::new(move |_| {
                    if !refuses {
                        well.fetch_add(1, SeqCst);
                        return Reply::After(100 * MS, answer(200, &[]));
                    }
                    bad.fetch_add(1, SeqCst);
                    Reply::After(5 * MS, hint.map_or(answer(429, &[]), |hint| answer(429, &[("retry-after", hint)])))
                })
            });
            let stack = stack.unwrap();
            let callers: Vec<_> = (0..32)
                .map(|_| {
                    let stack = stack.clone();
                    tokio::spawn(async move {
                        loop {
                            assert_eq!(stack.clone().oneshot(ask()).await.unwrap().status(), 200);
                        }
                    })
                })
                .collect();
            sleep(seconds * SECOND).await;
            callers.iter().for_each(tokio::task::JoinHandle::abort);
            let (refused, good) = (refused.load(SeqCst), good.load(SeqCst));
            assert!((1..=10).contains(&refused), "hint {hint:?}: {refused} refused");
            assert!(good > 2_000, "hint {hint:?}: and the good org is kept busy: {good}");
        }
    }
}

// P18

#[test]
fn p18_there_is_no_buffer_and_no_worker_to_stand_behind() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest: toml::Table = toml::from_str(&fs::read_to_string(root.join("Cargo.toml")).unwrap()).unwrap();
    let dependencies = manifest["dependencies"].as_table().unwrap();
    assert!(!dependencies.contains_key("tower"), "traits alone: no Buffer, no Balance, no ReadyCache");
    let mut folders = vec![root.join("src")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            let source = fs::read_to_string(&path).unwrap();
            let code = source.split("#[cfg(test)]\nmod tests").next().unwrap();
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                for word in ["Buffer", "ReadyCache", "mpsc"] {
                    assert!(!line.contains(word), "{}: {line}", path.display());
                }
            }
        }
    }
    assert!(files > 40);
}

#[test]
fn p18_a_thousand_clones_flow_past_one_whose_family_is_held() {
    let desk = Desk::new(&["a", "b"], 1_000);
    desk.hand_of("a", "pinned").held(true);
    desk.hand_of("b", "pinned").held(true);
    let balance = desk.balance();
    let clones: Vec<_> = (0..1_000).map(|_| balance.clone()).collect();
    let mut pinned = call_with(&clones[0], of_family(0, "pinned"));
    assert_pending!(pinned.poll());
    for (id, clone) in clones.iter().enumerate().skip(1) {
        let id = u32::try_from(id).unwrap();
        let mut call = call_with(clone, Request::new(id));
        assert_pending!(call.poll());
        let org = ["a", "b"].into_iter().find(|org| desk.hand(org).has(id)).expect("bound in its first poll");
        desk.hand(org).answer(id, 200);
        assert_ready!(call.poll()).unwrap();
    }
    assert!(!pinned.is_woken());
    desk.hand_of("b", "pinned").held(false);
    assert!(pinned.is_woken());
}

// P25

#[test]
fn p25_the_lint_forbids_the_clock_that_cannot_be_paused() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| toml::from_str::<toml::Table>(&fs::read_to_string(root.join(name)).unwrap()).unwrap();
    let clippy = read("clippy.toml");
    let types = clippy["disallowed-types"].as_array().unwrap();
    assert!(types.iter().any(|entry| entry["path"].as_str() == Some("std::time::Instant")));
    assert_eq!(read("Cargo.toml")["lints"]["clippy"]["disallowed_types"].as_str(), Some("deny"));
}

#[tokio::test(start_paused = true)]
async fn p25_a_wait_is_never_cut_short_and_never_a_loop() {
    // From a microsecond on: a timer's grain is a millisecond, upwards.
    for micros in [1u32, 999, 1_000, 1_001, 30_000_000] {
        let org = Org::new("a").cap(1);
        let wait = format!("{}", f64::from(micros) / 1e6);
        let probe = Probe::new(move |n| {
            Reply::Now(Ok(if n == 0 { answer(429, &[("retry-after", &wait)]) } else { answer(200, &[]) }))
        });
        let polls = Arc::new(AtomicUsize::new(0));
        let mut limiter = AimdLimitLayer::with_settings(&org, &open()).layer(probe);
        let begin = Instant::now();
        drop(ServiceExt::<Request<Script>>::ready(&mut limiter).await.unwrap().call(ask()).await.unwrap());
        let count = polls.clone();
        std::future::poll_fn(|cx| {
            count.fetch_add(1, SeqCst);
            Service::<Request<Script>>::poll_ready(&mut limiter, cx)
        })
        .await
        .unwrap();
        let waited = begin.elapsed();
        let hold = Duration::from_micros(micros.into());
        assert!(hold <= waited && waited <= hold + 2 * MS, "{micros} us: {waited:?}");
        assert!(polls.load(SeqCst) <= 3, "{micros} us: polled {} times", polls.load(SeqCst));
    }
}

// P26

#[tokio::test(start_paused = true)]
async fn p26_every_attempt_sends_the_whole_body_though_the_last_one_was_read_in_part() {
    let whole = [Step::Data("one "), Step::Data("two "), Step::Data("three")];
    // So many frames are read before an attempt breaks off.
    for read in 0..=3 {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let client = service_fn(move |request: Request<Script>| {
            let log = log.clone();
            async move {
                let attempt = log.lock().unwrap().len();
                log.lock().unwrap().push(String::new());
                let mut body = request.into_body();
                let mut frames = 0;
                while attempt == 2 || frames < read {
                    let frame = std::future::poll_fn(|cx| std::pin::Pin::new(&mut body).poll_frame(cx)).await;
                    let Some(frame) = frame else { break };
                    let data = frame.unwrap().into_data().unwrap();
                    log.lock().unwrap()[attempt].push_str(std::str::from_utf8(&data).unwrap());
                    frames += 1;
                }
                if attempt < 2 {
                    return Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
                }
                Ok(Response::new(Full::<Bytes>::default()))
            }
        });
        let stack = Stack::new(pool(&[("a", 1)])).build(client).unwrap();
        let request = Request::post("/v1/messages").body(Script::new(whole.clone())).unwrap();
        assert_eq!(stack.oneshot(request).await.unwrap().status(), 200);
        let seen = seen.lock().unwrap();
        let part = ["", "one ", "one two ", "one two three"][read];
        assert_eq!(*seen, [part, part, "one two three"], "{read} frames are read");
    }
}

// P28

#[tokio::test(start_paused = true)]
async fn p28_under_a_steady_stream_nobody_waits_twice_the_mean() {
    const CALLERS: usize = 40;
    let orgs = pool(&[("a", 1)]);
    let attempts: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let client = service_fn(move |request: Request<Full<Bytes>>| {
        let id = request.headers()["x-id"].to_str().unwrap().to_owned();
        let nth = {
            let mut attempts = attempts.lock().unwrap();
            let nth = attempts.entry(id.clone()).or_default();
            *nth += 1;
            *nth
        };
        // One in ten fails three times.
        let fails = id.ends_with('7') && nth <= 3;
        async move {
            sleep(10 * MS).await;
            Ok::<_, Infallible>(
                Response::builder().status(if fails { 503 } else { 200 }).body(Full::<Bytes>::default()).unwrap(),
            )
        }
    });
    let retry = RateLimitRetryLayer::builder().backoff_base(MS).backoff_cap(MS).build().unwrap();
    let stack = Stack::new(orgs).limit(open()).retry(retry).build(client).unwrap();
    let ages = Arc::new(Mutex::new(Vec::new()));
    let callers: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (stack, ages) = (stack.clone(), ages.clone());
            tokio::spawn(async move {
                for n in 0..30 {
                    let id = n * CALLERS + caller;
                    let request = Request::post("/").header("x-id", id).body(Full::<Bytes>::default()).unwrap();
                    let begin = Instant::now();
                    assert_eq!(stack.clone().oneshot(request).await.unwrap().status(), 200);
                    if (5..25).contains(&n) {
                        ages.lock().unwrap().push((begin.elapsed(), id % 10 == 7));
                    }
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    let ages = ages.lock().unwrap();
    let mean = ages.iter().map(|(age, _)| *age).sum::<Duration>() / u32::try_from(ages.len()).unwrap();
    let oldest = |failed| ages.iter().filter(|(_, f)| *f == failed).map(|(age, _)| *age).max().unwrap();
    let (fresh, retried) = (oldest(false), oldest(true));
    assert!(fresh <= 2 * mean, "{fresh:?} where {mean:?} is the mean");
    assert!(retried <= 2 * mean, "{retried:?} where {mean:?} is the mean, three retries included");
}

// P29

#[tokio::test(start_paused = true)]
async fn p29_whoever_is_woken_finds_the_lock_free() {
    /// At its wake it asks the very limiter that wakes it, there and then.
    struct Asks(Mutex<tower_quota::aimd::AimdLimit<Probe>>, AtomicUsize);

    impl std::task::Wake for Asks {
        fn wake(self: Arc<Self>) {
            // Were the lock held, this would be the end of the test.
            let limiter = self.0.lock().unwrap().clone();
            let mut limiter = limiter;
            let _ = Service::<Request<Script>>::poll_ready(&mut limiter, &mut Context::from_waker(Waker::noop()));
            self.1.fetch_add(1, SeqCst);
        }
    }

    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let org = Org::new("a").cap(1);
            let limiter = AimdLimitLayer::with_settings(&org, &open()).layer(Probe::good());
            let asks = Arc::new(Asks(Mutex::new(limiter.clone()), AtomicUsize::new(0)));
            let waker = Waker::from(asks.clone());
            for _ in 0..5 {
                let mut holder = limiter.clone();
                ServiceExt::<Request<Script>>::ready(&mut holder).await.unwrap();
                let mut waiter = limiter.clone();
                let poll = Service::<Request<Script>>::poll_ready(&mut waiter, &mut Context::from_waker(&waker));
                assert!(poll.is_pending());
                drop(holder);
            }
            assert!(asks.1.load(SeqCst) >= 5);
        });
        done.send(()).unwrap();
    });
    ended.recv_timeout(20 * SECOND).expect("no wake under the lock");
}

// P30

#[tokio::test(start_paused = true)]
async fn p30_with_all_at_one_slot_and_refusing_the_run_goes_on_when_they_recover() {
    // All refuse for twenty seconds, with the second or with nothing named.
    for hint in [Some("1"), None] {
        let orgs = pool(&[("a", 1), ("b", 1), ("c", 1)]);
        let begin = Instant::now();
        let refused = Arc::new(AtomicUsize::new(0));
        let count = refused.clone();
        let stack = Stack::new(orgs.clone()).limit(open()).build_with(move |_| {
            let count = count.clone();
            Probe::new(move |_| {
                if begin.elapsed() >= 20 * SECOND {
                    return Reply::After(10 * MS, answer(200, &[]));
                }
                count.fetch_add(1, SeqCst);
                Reply::After(10 * MS, hint.map_or(answer(429, &[]), |hint| answer(429, &[("retry-after", hint)])))
            })
        });
        let mut drive = Drive::iter(stack.unwrap(), (0..30).map(|id| (id, ask())), 6).unwrap();
        let mut done = 0;
        while let Some((_, result)) = drive.next().await {
            assert_eq!(result.unwrap().status(), 200);
            done += 1;
        }
        assert_eq!(done, 30);
        let refused = refused.load(SeqCst);
        assert!((3..=60).contains(&refused), "one call an org and second: {refused}");
        assert!(begin.elapsed() < 40 * SECOND, "{hint:?}: {:?}", begin.elapsed());
        for org in orgs.iter().flat_map(Org::families) {
            assert_eq!((org.snapshot().in_flight, org.snapshot().waiting), (0, 0));
        }
    }
}
