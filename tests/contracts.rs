//! What every layer keeps, where no other test of that layer shows it. `docs/contracts.md` is the whole matrix.
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support;

use std::{
    fs,
    future::Future,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use http::Request;
use support::{Probe, Reply, Script, answer, ask};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    auth::OrgAuthLayer,
    balance::OrgBalanceLayer,
    health::OrgHealthLayer,
    judge::{Gather, JudgeLayer},
    org::{Org, Orgs, OutReason},
    outcome::ByStatus,
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    stack::Stack,
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// A service on a mock task that knows whether it was woken.
type Mocked<S> = tower_test::mock::Spawn<S>;

fn open() -> Settings {
    Settings::builder().start(1.0).spread(Duration::ZERO).build().unwrap()
}

fn pool(orgs: &[(&str, usize)]) -> Orgs {
    Orgs::new(orgs.iter().map(|(name, cap)| Org::new(name).cap(*cap))).unwrap()
}

fn retry() -> RateLimitRetryLayer<ByStatus> {
    RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap()
}

fn poll<S: Service<Request<Script>>>(service: &mut Mocked<S>) -> Poll<Result<(), S::Error>> {
    service.poll_ready::<Request<Script>>()
}

/// Runs a check of each layer, and of the whole stack, over a probe of its own. `$checks` is given a name, the service and the
/// probe.
macro_rules! over_each_layer {
    ($probe:expr, $check:ident) => {
        let org = || Org::new("a").cap(4);
        let probe: Probe = $probe;
        $check("auth", OrgAuthLayer::new(&org()).unwrap().layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("judge", JudgeLayer::new().layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("quota", QuotaHeaderLayer::new(&org()).layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("aimd", AimdLimitLayer::with_settings(&org(), &open()).layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        let at_head = AimdLimitLayer::with_settings(&org(), &open()).release_at_head();
        $check("aimd, at the head", at_head.layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("health", OrgHealthLayer::new(&org()).layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("retry", retry().layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        let orgs = || pool(&[("a", 4), ("b", 4)]);
        let balance = OrgBalanceLayer::new(orgs(), |_: &Org, probe: Probe| probe);
        $check("balance", balance.layer(probe.clone()), &probe).await;
        let probe: Probe = $probe;
        $check("stack", Stack::new(orgs()).build(probe.clone()).unwrap(), &probe).await;
    };
}

/// Those whose readiness is no member's: they bind where the request is known.
fn binds_late(name: &str) -> bool {
    matches!(name, "balance" | "stack")
}

// 1. `poll_ready` is idempotent.

#[tokio::test(start_paused = true)]
async fn a_second_poll_ready_readies_nothing_more() {
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        let mut service = Mocked::new(service);
        for _ in 0..5 {
            assert_ready!(poll(&mut service)).unwrap();
        }
        assert_eq!(probe.readies(), usize::from(!binds_late(name)), "{name}");
        drop(service.call(ask()).await);
        assert_eq!((probe.readies(), probe.calls()), (1, 1), "{name}");
    }
    over_each_layer!(Probe::good(), check);
}

// 2. `Ready` is honest.

#[tokio::test(start_paused = true)]
async fn what_a_meter_has_reserved_stays_reserved_whatever_an_answer_tells_meanwhile() {
    let told = |remaining| {
        let headers =
            [("anthropic-ratelimit-requests-limit", "60"), ("anthropic-ratelimit-requests-remaining", remaining)];
        answer(200, &headers)
    };
    let layer = QuotaHeaderLayer::new(&Org::new("a"));
    let probe = Probe::new(move |n| Reply::Now(Ok(told(if n == 0 { "30" } else { "0" }))));
    let service = layer.layer(probe.clone());
    drop(service.clone().oneshot(ask()).await.unwrap());
    let mut early: Vec<_> = (0..3).map(|_| Mocked::new(service.clone())).collect();
    for service in &mut early {
        assert_ready!(poll(service)).unwrap();
    }
    drop(service.clone().oneshot(ask()).await.unwrap());
    assert_pending!(poll(&mut Mocked::new(service.clone())), "nothing is left");
    for service in &mut early {
        assert_ready!(poll(service)).unwrap();
        drop(service.call(ask()).await.unwrap());
    }
    assert_eq!(probe.calls(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_gates_overshoot_is_the_readiness_that_is_out() {
    for readied in [1, 2, 5] {
        let layer = OrgBalanceLayer::new(pool(&[("a", 1)]), |_: &Org, probe: Probe| probe).max_unbound(1).unwrap();
        let probe = Probe::good();
        probe.close(true);
        let balance = layer.layer(probe.clone());
        let mut early: Vec<_> = (0..readied).map(|_| Mocked::new(balance.clone())).collect();
        for service in &mut early {
            assert_ready!(poll(service)).unwrap();
        }
        let mut calls: Vec<_> = early.iter_mut().map(|service| task::spawn(service.call(ask()))).collect();
        assert_pending!(poll(&mut Mocked::new(balance.clone())), "full, and over");
        calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
        probe.close(false);
        for call in calls {
            drop(call.await.unwrap());
        }
        assert_eq!(probe.calls(), readied);
        assert_ready!(poll(&mut Mocked::new(balance.clone()))).unwrap();
    }
}

// 3. A clone starts with nothing; dropping gives back what was held.

#[tokio::test(start_paused = true)]
async fn a_call_that_is_dropped_drops_the_one_below() {
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        for polled in [false, true] {
            let mut service = Mocked::new(service.clone());
            assert_ready!(poll(&mut service)).unwrap();
            let mut call = task::spawn(service.call(ask()));
            if polled {
                assert!(call.poll().is_pending(), "{name}");
                assert_eq!((probe.open(), probe.futures()), (1, 1), "{name}");
            }
            drop(call);
            assert_eq!((probe.open(), probe.futures()), (0, 0), "{name}, polled {polled}");
        }
    }
    over_each_layer!(Probe::new(|_| Reply::Released), check);
}

#[tokio::test(start_paused = true)]
async fn a_readied_service_that_is_dropped_leaves_room_for_as_many_as_before() {
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        drop(service.clone().oneshot(ask()).await);
        for round in 0..20 {
            let mut readied = Mocked::new(service.clone());
            assert_ready!(poll(&mut readied), "{} in round {}", name, round).unwrap();
            let mut clone = Mocked::new(readied.get_ref().clone());
            drop(readied);
            assert_ready!(poll(&mut clone), "{} in round {}", name, round).unwrap();
        }
        assert_eq!(probe.open(), 0, "{name}");
    }
    over_each_layer!(Probe::good(), check);
}

// 4. Nothing is kept longer than the answer.

#[tokio::test(start_paused = true)]
async fn a_finished_call_that_is_kept_keeps_nothing_below() {
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        let mut service = Mocked::new(service);
        assert_ready!(poll(&mut service)).unwrap();
        let mut call = task::spawn(service.call(ask()));
        drop(assert_ready!(call.poll()).unwrap());
        // The call of `auth` is the one below itself.
        assert_eq!(probe.futures(), usize::from(name == "auth"), "{name}");
        assert_eq!(probe.open(), 0, "{name}");
        drop(call);
        assert_eq!(probe.futures(), 0, "{name}");
    }
    over_each_layer!(Probe::good(), check);
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_given_back_at_the_end_of_the_body_through_every_layer_above() {
    use http_body_util::BodyExt;
    use support::{Step, streaming};

    for read in [true, false] {
        let orgs = pool(&[("a", 1)]);
        let probe = Probe::new(|_| Reply::Now(Ok(streaming([Step::Data("one"), Step::Data("two")]))));
        let stack = Stack::new(orgs.clone()).limit(open()).judge(JudgeLayer::new().gather(Gather::Nothing));
        let stack = stack.build(probe).unwrap();
        let in_flight = || orgs.iter().flat_map(Org::families).map(|org| org.snapshot().in_flight).sum::<usize>();
        let mut response = stack.clone().oneshot(ask()).await.unwrap();
        assert_eq!(in_flight(), 1);
        let mut next = task::spawn(stack.clone().oneshot(ask()));
        assert_pending!(next.poll());
        assert!(response.frame().await.unwrap().is_ok());
        assert_eq!(in_flight(), 1);
        assert!(!next.is_woken());
        if read {
            assert!(response.frame().await.unwrap().is_ok());
            assert!(next.is_woken(), "at the last frame, though the body is kept");
        }
        drop(response);
        assert!(next.is_woken());
        drop(next.await.unwrap());
        assert_eq!(in_flight(), 0);
    }
}

// 5. No wake is lost.

#[tokio::test(start_paused = true)]
async fn a_wake_from_below_reaches_whoever_waits_for_it() {
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        for _ in 0..3 {
            probe.close(true);
            let mut service = Mocked::new(service.clone());
            if binds_late(name) {
                assert_ready!(poll(&mut service)).unwrap();
                let mut call = task::spawn(service.call(ask()));
                assert!(call.poll().is_pending(), "{name}");
                assert!(!call.is_woken(), "{name}");
                probe.close(false);
                assert!(call.is_woken(), "{name}");
                drop(call.await.unwrap());
                continue;
            }
            assert_pending!(poll(&mut service));
            assert!(!service.is_woken(), "{name}");
            probe.close(false);
            assert!(service.is_woken(), "{name}");
            assert_ready!(poll(&mut service)).unwrap();
            drop(service.call(ask()).await);
        }
    }
    over_each_layer!(Probe::good(), check);
}

// 6. Readiness fails for no state that can pass.

#[tokio::test(start_paused = true)]
async fn no_readiness_fails_for_a_state_that_can_pass() {
    // Whatever was answered before, readiness is there or is waited for.
    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone,
        S::Error: std::fmt::Debug,
    {
        let mut pended = 0;
        for _ in 0..12 {
            let mut service = Mocked::new(service.clone());
            match poll(&mut service) {
                Poll::Pending => {
                    pended += 1;
                    advance(SECOND).await;
                }
                Poll::Ready(ready) => {
                    ready.unwrap();
                    let mut call = task::spawn(service.call(ask()));
                    let _ = call.poll();
                }
            }
        }
        let paces = matches!(name, "quota" | "aimd" | "aimd, at the head");
        assert_eq!(pended > 0, paces, "{name}: what cannot be called now is not ready: {pended}");
        assert!(probe.calls() > 0);
    }
    let spent = || {
        Probe::new(|n| {
            let headers = [
                ("retry-after", "5"),
                ("anthropic-ratelimit-requests-limit", "6"),
                ("anthropic-ratelimit-requests-remaining", "0"),
            ];
            Reply::Now(Ok(answer([429, 401, 402, 403, 500, 529, 200][n % 7], &headers)))
        })
    };
    over_each_layer!(spent(), check);
    // Nor where no org is left: then it is the call that fails.
    async fn last_words<S>(mut service: Mocked<S>, orgs: &Orgs)
    where
        S: Service<Request<Script>>,
        S::Error: std::fmt::Debug,
    {
        assert_ready!(poll(&mut service)).unwrap();
        assert!(service.call(ask()).await.is_ok());
        orgs.get("a").unwrap().put_out(OutReason::Unauthorised);
        for _ in 0..2 {
            assert_ready!(poll(&mut service)).unwrap();
            assert!(service.call(ask()).await.is_err());
        }
    }
    let orgs = pool(&[("a", 1)]);
    last_words(Mocked::new(Stack::new(orgs.clone()).build(Probe::good()).unwrap()), &orgs).await;
    let orgs = pool(&[("a", 1)]);
    let balance = OrgBalanceLayer::new(orgs.clone(), |_: &Org, probe: Probe| probe);
    last_words(Mocked::new(balance.layer(Probe::good())), &orgs).await;
}

// 7. No task, no global state.

#[test]
fn no_source_keeps_state_of_the_whole_process() {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut statics = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            let code = source.split("#[cfg(test)]\nmod tests").next().unwrap();
            for line in code.lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
                // A constant that takes a while to make.
                let made_once =
                    line.contains("LazyLock<Finder<'static>>") || line.starts_with("use std::sync::LazyLock;");
                for word in ["thread_local!", "static mut", "LazyLock", "lazy_static", "OnceCell"] {
                    assert!(!line.contains(word) || made_once, "{}: {line}", path.display());
                }
                if made_once {
                    continue;
                }
                // A `static` wherever it stands, and no lifetime.
                statics.extend(
                    line.match_indices("static ")
                        .filter(|(at, _)| !line[..*at].ends_with('\''))
                        .map(|(at, _)| line[at..].to_owned()),
                );
            }
        }
    }
    assert!(!statics.is_empty(), "the names of headers");
    for declared in statics {
        assert!(declared.contains("HeaderName"), "it may change: {declared}");
    }
}

#[tokio::test(start_paused = true)]
async fn two_stacks_over_orgs_of_one_name_share_nothing() {
    let make = |status: u16| {
        let orgs = pool(&[("a", 4)]);
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(status, &[("retry-after", "30")]))));
        (Stack::new(orgs.clone()).build(probe).unwrap(), orgs)
    };
    let (refused, held) = make(429);
    let (served, free) = make(200);
    let (dead, out) = make(401);
    assert_pending!(task::spawn(refused.oneshot(ask())).poll());
    assert!(task::spawn(dead.oneshot(ask())).poll().is_ready());
    assert!(held.get("a").unwrap().is_held() && out.get("a").unwrap().is_out());
    assert!(!free.get("a").unwrap().is_held());
    assert_eq!(assert_ready!(task::spawn(served.oneshot(ask())).poll()).unwrap().status(), 200);
}

// 8. Time is tokio's, and deadlines are deadlines.

#[tokio::test(start_paused = true)]
async fn a_wait_ends_at_its_time_however_late_it_is_looked_at() {
    // The wait begins at the refusal; it is polled for the first time so much later.
    for late in [0u32, 1, 10, 29, 30, 100] {
        let probe = || {
            Probe::new(|n| {
                Reply::Now(Ok(if n == 0 { answer(429, &[("retry-after", "30")]) } else { answer(200, &[]) }))
            })
        };
        let until = |begin: Instant| (begin + 30 * SECOND).max(begin + late * SECOND);
        // A limiter: nobody waits for it yet.
        let limiter = AimdLimitLayer::with_settings(&Org::new("a"), &open()).layer(probe());
        let begin = Instant::now();
        drop(limiter.clone().oneshot(ask()).await.unwrap());
        advance(late * SECOND).await;
        drop(limiter.oneshot(ask()).await.unwrap());
        let ended = Instant::now();
        assert!(until(begin) <= ended && ended <= until(begin) + 2 * MS, "limiter, {late}: {:?}", ended - begin);
        // A retry: its call is not polled.
        let exact = RateLimitRetryLayer::builder().classify(ByStatus).backoff_base(MS).build().unwrap();
        let mut call = task::spawn(exact.layer(probe()).oneshot(ask()));
        let begin = Instant::now();
        assert_pending!(call.poll());
        advance(late * SECOND).await;
        drop(call.await.unwrap());
        let ended = Instant::now();
        assert!(until(begin) <= ended && ended <= until(begin) + 3 * MS, "retry, {late}: {:?}", ended - begin);
    }
}

// 9. An idle balancer strands nothing, and nobody's code runs under a lock.

#[tokio::test(start_paused = true)]
async fn readying_many_clones_of_the_whole_stack_reserves_nothing() {
    let orgs = pool(&[("a", 1), ("b", 1)]);
    let probe = Probe::good();
    let stack = Stack::new(orgs.clone()).build(probe.clone()).unwrap();
    let mut idle: Vec<_> = (0..1_000).map(|_| Mocked::new(stack.clone())).collect();
    for service in &mut idle {
        assert_ready!(poll(service)).unwrap();
    }
    assert_eq!((probe.readies(), probe.calls()), (0, 0));
    for _ in 0..4 {
        drop(stack.clone().oneshot(ask()).await.unwrap());
        for org in orgs.iter().flat_map(Org::families) {
            assert_eq!((org.snapshot().in_flight, org.snapshot().waiting), (0, 0), "though a thousand are ready");
        }
    }
}

/// A waker that owns something, and drops it when it is dropped itself.
struct Owns<T>(Mutex<Option<T>>);

impl<T: Send + 'static> Wake for Owns<T> {
    fn wake(self: Arc<Self>) {}
}

/// A deadlock shows as a test that fails, not as one that hangs.
fn ends<F: Future<Output = ()>>(what: &'static str, run: impl FnOnce() -> F + Send + 'static) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(run());
        done.send(()).unwrap();
    });
    ended.recv_timeout(20 * SECOND).unwrap_or_else(|_| panic!("{what} has come to no end"));
}

#[test]
fn a_waker_that_is_dropped_may_give_back_what_it_owns() {
    ends("the drop of a limiter's waker", || async {
        let org = Org::new("a").cap(2);
        let limiter = AimdLimitLayer::with_settings(&org, &open()).layer(Probe::good());
        drop(limiter.clone().oneshot(ask()).await.unwrap());
        // Replaced at the next poll; dropped with its place.
        for replaced in [true, false] {
            let mut slots: Vec<_> = (0..2).map(|_| Mocked::new(limiter.clone())).collect();
            for slot in &mut slots {
                assert_ready!(poll(slot)).unwrap();
            }
            let waker = Waker::from(Arc::new(Owns(Mutex::new(slots.pop()))));
            let mut waiting = limiter.clone();
            let mut look =
                |waker: &Waker| Service::<Request<Script>>::poll_ready(&mut waiting, &mut Context::from_waker(waker));
            assert!(look(&waker).is_pending());
            drop(waker);
            assert_eq!(org.snapshot().in_flight, 2);
            if replaced {
                let _ = look(Waker::noop());
            }
            drop(waiting);
            assert_eq!(org.snapshot().in_flight, 1, "its slot came back with it");
        }
    });
    ends("the drop of a meter's waker", || async {
        let told = [("anthropic-ratelimit-requests-limit", "60"), ("anthropic-ratelimit-requests-remaining", "0")];
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(200, &told))));
        let meter = QuotaHeaderLayer::new(&Org::new("a")).layer(probe);
        drop(meter.clone().oneshot(ask()).await.unwrap());
        let mut reserved = meter.clone();
        ServiceExt::<Request<Script>>::ready(&mut reserved).await.unwrap();
        let waker = Waker::from(Arc::new(Owns(Mutex::new(Some(reserved)))));
        let mut waiting = meter.clone();
        let mut look =
            |waker: &Waker| Service::<Request<Script>>::poll_ready(&mut waiting, &mut Context::from_waker(waker));
        assert!(look(&waker).is_pending());
        drop(waker);
        let _ = look(Waker::noop());
        drop(waiting);
    });
}

#[tokio::test(start_paused = true)]
async fn a_waker_may_ask_whatever_wakes_it() {
    struct Asks<S>(Mutex<S>, AtomicUsize);

    impl<S> Wake for Asks<S>
    where
        S: Service<Request<Script>> + Clone + Send + 'static,
    {
        fn wake(self: Arc<Self>) {
            let service = self.0.lock().unwrap().clone();
            let mut call = Box::pin(service.oneshot(ask()));
            let _ = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            self.1.fetch_add(1, SeqCst);
        }
    }

    async fn check<S>(name: &str, service: S, probe: &Probe)
    where
        S: Service<Request<Script>> + Clone + Send + 'static,
        S::Error: std::fmt::Debug,
    {
        let asks = Arc::new(Asks(Mutex::new(service.clone()), AtomicUsize::new(0)));
        let waker = Waker::from(asks.clone());
        for round in 1..4 {
            probe.close(true);
            let mut call = Box::pin(service.clone().oneshot(ask()));
            assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "{name}");
            probe.close(false);
            assert!(asks.1.load(SeqCst) >= round, "{name}");
            drop(call.await.unwrap());
        }
    }
    over_each_layer!(Probe::good(), check);
}
