//! The metering layer alone: what it reserves and gives back, who waits where and is woken when, and what it reads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;
mod support_quota;

use std::{
    error::Error as _,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::Full;
use support::{Probe, Reply, Script, Step, answer, ask};
use support_quota::{ByHeader, Layered, Metered, cost, metered, poll};
use tokio::time::{Instant, advance, sleep};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    dialect::{Anthropic, Azure, Detect, NoHeaders, OpenAi, Plain, ReadQuota, Readings, Resource},
    judge::JudgeLayer,
    org::Org,
    outcome::{Class, Outcome, Stamp, Usage},
    quota::{Cost, QuotaHeaderLayer, TooLarge},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn readied(layer: &Layered, probe: &Probe) -> Metered {
    let mut service = metered(layer, probe);
    assert_ready!(poll(&mut service)).unwrap();
    service
}

/// How many would be admitted now.
fn free(layer: &Layered, probe: &Probe) -> usize {
    let mut reserved = vec![];
    loop {
        let mut service = metered(layer, probe);
        if poll(&mut service).is_pending() {
            return reserved.len();
        }
        reserved.push(service);
    }
}

fn requests(limit: &str, remaining: &str) -> Response<Script> {
    answer(200, &[("anthropic-ratelimit-requests-limit", limit), ("anthropic-ratelimit-requests-remaining", remaining)])
}

fn tokens(limit: &str, remaining: &str) -> Response<Script> {
    answer(
        200,
        &[("anthropic-ratelimit-input-tokens-limit", limit), ("anthropic-ratelimit-input-tokens-remaining", remaining)],
    )
}

/// A layer whose first call used one token and was answered by `first`; all others wait to be released.
async fn told(mut first: Response<Script>) -> (Org, Layered, Probe) {
    let mut stamp = Stamp::new(Outcome::of(Class::Ok));
    stamp.usage = Some(Usage::new(1, 0));
    first.extensions_mut().insert(stamp);
    let org = Org::new("a");
    let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
    let first = Mutex::new(Some(first));
    let probe = Probe::new(move |_| match first.lock().unwrap().take() {
        Some(answer) => Reply::Now(Ok(answer)),
        None => Reply::Released,
    });
    readied(&layer, &probe).call(ask()).await.unwrap();
    (org, layer, probe)
}

#[tokio::test(start_paused = true)]
async fn a_second_poll_ready_keeps_the_one_reservation() {
    let (_, layer, probe) = told(requests("60", "20")).await;
    let all = free(&layer, &probe);
    assert!((14..=20).contains(&all), "{all}");
    let mut service = readied(&layer, &probe);
    for _ in 0..10 {
        assert_ready!(poll(&mut service)).unwrap();
    }
    assert_eq!(free(&layer, &probe), all - 1);
    let mut rest: Vec<_> = (1..all).map(|_| readied(&layer, &probe)).collect();
    assert_pending!(poll(&mut metered(&layer, &probe)));
    for service in &mut rest {
        assert_ready!(poll(service)).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_clone_starts_without_a_reservation() {
    let (_, layer, probe) = told(requests("60", "20")).await;
    let all = free(&layer, &probe);
    let service = readied(&layer, &probe);
    let mut clone = service.clone();
    assert_eq!(free(&layer, &probe), all - 1);
    assert_ready!(poll(&mut clone)).unwrap();
    assert_eq!(free(&layer, &probe), all - 2);
    drop(clone);
    assert_eq!(free(&layer, &probe), all - 1);
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "`poll_ready` must say that the call is paced before `call`")]
async fn calling_a_clone_that_was_not_made_ready_panics() {
    let (_, layer, probe) = told(requests("60", "20")).await;
    drop(readied(&layer, &probe).clone().call(ask()));
}

#[tokio::test(start_paused = true)]
async fn a_reservation_that_is_not_sent_is_given_back_and_a_call_that_was_sent_is_not() {
    let (_, layer, probe) = told(requests("60", "20")).await;
    let all = free(&layer, &probe);
    drop(readied(&layer, &probe));
    assert_eq!(free(&layer, &probe), all, "a service dropped");
    drop(readied(&layer, &probe).into_inner().into_inner());
    assert_eq!(free(&layer, &probe), all, "an inner service taken out");
    drop(readied(&layer, &probe).call(ask()));
    assert_eq!(probe.calls(), 2);
    assert_eq!(free(&layer, &probe), all - 1, "sent: it counts as made");
    let call = readied(&layer, &probe).call(ask());
    probe.release(2, Err(io::ErrorKind::ConnectionReset.into()));
    assert!(call.await.is_err());
    assert_eq!(free(&layer, &probe), all - 2, "an error says nothing");
    let call = readied(&layer, &probe).call(ask());
    probe.release(3, Ok(answer(429, &[])));
    assert_eq!(call.await.unwrap().status(), 429);
    assert_eq!(free(&layer, &probe), all - 2, "refused: it was not counted");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_given_back_wakes_who_waits_for_it() {
    let (_, layer, probe) = told(requests("1", "0")).await;
    // One call's worth comes back in a minute.
    let mut first = metered(&layer, &probe);
    assert_pending!(poll(&mut first));
    advance(61 * SECOND).await;
    assert!(first.is_woken());
    assert_ready!(poll(&mut first)).unwrap();
    let mut second = metered(&layer, &probe);
    assert_pending!(poll(&mut second));
    assert!(!second.is_woken());
    drop(first);
    assert!(second.is_woken());
    assert_ready!(poll(&mut second)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn with_a_capacity_of_one_every_call_waits_for_the_refill() {
    let (_, layer, probe) = told(requests("60", "0")).await;
    let start = Instant::now();
    for n in 1..=5 {
        let mut service = metered(&layer, &probe).into_inner();
        drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()));
        let waited = start.elapsed();
        assert!(waited >= n * SECOND - 10 * MS, "call {n} after {waited:?}");
    }
    assert!(start.elapsed() < 12 * SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_inner_service_is_made_ready_first_and_while_it_is_not_nothing_is_reserved() {
    let (_, layer, probe) = told(requests("60", "20")).await;
    let all = free(&layer, &probe);
    probe.close(true);
    let mut service = metered(&layer, &probe);
    assert_pending!(poll(&mut service));
    probe.close(false);
    assert!(service.is_woken());
    assert_eq!(free(&layer, &probe), all);
}

// Calls that prove too dear.

/// 10,000 tokens, a thousand back a second; 9,000 have just been spent by a call that flies.
async fn nearly_spent() -> (Layered, Probe, impl Future<Output = io::Result<Response<Script>>>) {
    let (_, layer, probe) = told(tokens("60000", "10001")).await;
    let flying = readied(&layer, &probe).call(cost(9_000));
    assert_eq!(probe.calls(), 2);
    (layer, probe, flying)
}

#[tokio::test(start_paused = true)]
async fn a_call_too_dear_waits_in_its_own_future_until_it_is_covered() {
    let (layer, probe, _flying) = nearly_spent().await;
    let mut dear = task::spawn(readied(&layer, &probe).call(cost(5_000)));
    assert_pending!(dear.poll());
    let mut newcomer = metered(&layer, &probe);
    assert_pending!(poll(&mut newcomer), "nobody goes before it");
    // 4,000 are missing, less one that was there.
    advance(3_990 * MS).await;
    assert!(!dear.is_woken() && !newcomer.is_woken());
    assert_eq!(probe.calls(), 2);
    advance(12 * MS).await;
    assert!(dear.is_woken());
    assert_pending!(dear.poll());
    assert_eq!((probe.calls(), probe.open()), (3, 2), "sent, on the instance that had been made ready");
    assert!(newcomer.is_woken());
    assert_ready!(poll(&mut newcomer)).unwrap();
    probe.release(2, Ok(answer(200, &[])));
    assert_ready!(dear.poll()).unwrap();
    assert_eq!(probe.futures(), 1, "finished, it keeps nothing though it is held");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_call_that_is_dropped_gives_back_and_wakes_the_next_at_once() {
    let (layer, probe, _flying) = nearly_spent().await;
    let mut reserved = readied(&layer, &probe);
    let mut dear = task::spawn(readied(&layer, &probe).call(cost(8_000)));
    let mut second = task::spawn(reserved.call(cost(900)));
    assert_pending!(dear.poll());
    assert_pending!(second.poll());
    advance(100 * MS).await;
    let mut newcomer = metered(&layer, &probe);
    assert_pending!(poll(&mut newcomer));
    drop(dear);
    assert!(second.is_woken() && newcomer.is_woken());
    assert_pending!(second.poll());
    assert_eq!(probe.calls(), 3, "sent");
    assert_ready!(poll(&mut newcomer)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waiting_call_goes_as_soon_as_an_answer_tells_that_more_is_there() {
    let (layer, probe, flying) = nearly_spent().await;
    advance(10 * MS).await;
    let mut dear = task::spawn(readied(&layer, &probe).call(cost(8_000)));
    assert_pending!(dear.poll());
    probe.release(1, Ok(tokens("60000", "9500")));
    flying.await.unwrap();
    assert!(dear.is_woken());
    assert_pending!(dear.poll());
    assert_eq!(probe.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_call_waits_on_where_an_answer_tells_that_less_is_there() {
    let (layer, probe, flying) = nearly_spent().await;
    advance(10 * MS).await;
    let mut dear = task::spawn(readied(&layer, &probe).call(cost(3_000)));
    assert_pending!(dear.poll());
    probe.release(1, Ok(tokens("60000", "1")));
    flying.await.unwrap();
    assert!(dear.is_woken());
    assert_pending!(dear.poll());
    advance(2_500 * MS).await;
    assert_pending!(dear.poll());
    assert_eq!(probe.calls(), 2);
    advance(500 * MS).await;
    assert!(dear.is_woken());
    assert_pending!(dear.poll());
    assert_eq!(probe.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_call_larger_than_the_bucket_is_not_starved_by_small_ones() {
    let org = Org::new("a");
    let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
    let probe =
        Probe::new(|n| Reply::After(100 * MS, if n == 0 { tokens("60000", "10001") } else { answer(200, &[]) }));
    readied(&layer, &probe).call(ask()).await.unwrap();
    let start = Instant::now();
    let tasks = tokio::task::LocalSet::new();
    for _ in 0..10 {
        let mut service = metered(&layer, &probe).into_inner();
        tasks.spawn_local(async move {
            loop {
                drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(cost(500)).await);
            }
        });
    }
    let mut service = metered(&layer, &probe).into_inner();
    let took = tasks
        .run_until(async move {
            sleep(10 * SECOND).await;
            ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
            let asked = Instant::now();
            service.call(cost(50_000)).await.unwrap();
            asked.elapsed()
        })
        .await;
    assert!(took < 16 * SECOND, "{took:?} where ten seconds fill the bucket");
    let before = probe.times().iter().filter(|at| **at - start < 10 * SECOND).count();
    assert!((35..=41).contains(&before), "20 for the burst, 2 a second: {before}");
}

// What is read.

#[tokio::test(start_paused = true)]
async fn headers_are_read_whatever_the_status() {
    for status in [200, 400, 404, 429, 500, 503, 529] {
        let mut first = requests("60", "0");
        *first.status_mut() = http::StatusCode::from_u16(status).unwrap();
        let (org, layer, probe) = told(first).await;
        assert!(org.headroom() < 0.01, "{status}: {}", org.headroom());
        assert_pending!(poll(&mut metered(&layer, &probe)), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_says_whether_the_quota_that_it_tells_explains_it() {
    const REQUESTS: &str = "anthropic-ratelimit-requests-remaining";
    const INPUT: &str = "anthropic-ratelimit-input-tokens-remaining";
    // Of a call of 2,000 tokens: status, what remains, and whether another limit must have refused it.
    type Case<'a> = (u16, &'a [(&'a str, &'a str)], bool);
    let table: &[Case<'_>] = &[
        (429, &[(REQUESTS, "1"), (INPUT, "2000")], true),
        (429, &[(REQUESTS, "1")], true),
        (429, &[(INPUT, "50000")], true),
        (429, &[(REQUESTS, "0"), (INPUT, "50000")], false),
        (429, &[(REQUESTS, "40"), (INPUT, "1999")], false),
        (429, &[(REQUESTS, "40"), (INPUT, "0")], false),
        (429, &[(REQUESTS, "many")], false),
        (429, &[("anthropic-ratelimit-requests-limit", "60")], false),
        (429, &[], false),
        // Only a refusal needs to be explained.
        (200, &[(REQUESTS, "40")], false),
        (503, &[(REQUESTS, "40")], false),
    ];
    for (status, remaining, expected) in table {
        let (_, layer, probe) = told(tokens("60000", "50000")).await;
        let mut call = task::spawn(readied(&layer, &probe).call(cost(2_000)));
        assert_pending!(call.poll());
        let mut refusal = answer(*status, remaining);
        refusal.extensions_mut().insert(Stamp::new(Outcome::of(Class::Throttled)));
        probe.release(1, Ok(refusal));
        let answer = assert_ready!(call.poll()).unwrap();
        assert_eq!(answer.extensions().get::<Stamp>().unwrap().within_quota, *expected, "{status} {remaining:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_an_answer_does_not_mention_is_unchanged() {
    let first = answer(
        429,
        &[
            ("anthropic-ratelimit-requests-limit", "1000"),
            ("anthropic-ratelimit-requests-remaining", "999"),
            ("anthropic-ratelimit-output-tokens-limit", "8000"),
            ("anthropic-ratelimit-output-tokens-remaining", "0"),
        ],
    );
    let (org, layer, probe) = told(first).await;
    assert_eq!(org.headroom(), 0.0, "the output is spent");
    assert_pending!(poll(&mut metered(&layer, &probe)), "what calls use is not known, but not nothing");
    advance(10 * SECOND).await;
    let before = org.headroom();
    let mut call = task::spawn(readied(&layer, &probe).call(ask()));
    assert_pending!(call.poll());
    probe.release(1, Ok(answer(404, &[])));
    assert_ready!(call.poll()).unwrap();
    assert_eq!(org.headroom(), before);
}

#[tokio::test(start_paused = true)]
async fn headroom_comes_back_though_nobody_asks() {
    for (dialect, names) in [
        (
            "anthropic",
            [
                "anthropic-ratelimit-requests-limit",
                "anthropic-ratelimit-requests-remaining",
                "anthropic-ratelimit-requests-reset",
            ],
        ),
        ("openai", ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]),
    ] {
        let first = answer(200, &[(names[0], "1000"), (names[1], "10"), (names[2], "20s")]);
        let (org, _layer, _probe) = told(first).await;
        assert!(org.headroom() < 0.1, "{dialect}: {}", org.headroom());
        advance(10 * SECOND).await;
        assert!((0.3..0.7).contains(&org.headroom()), "{dialect}: {}", org.headroom());
        advance(10 * SECOND).await;
        assert!(org.headroom() >= 0.9, "{dialect}: {}", org.headroom());
        assert!(org.snapshot().headroom >= 0.9);
        advance(3_600 * SECOND).await;
        assert_eq!(org.headroom(), 1.0);
    }
}

#[tokio::test(start_paused = true)]
async fn the_dialect_that_is_told_is_read_and_no_other() {
    // Of its hundred, by Anthropic's headers none is left, by OpenAI's all are.
    let headers = [
        ("anthropic-ratelimit-requests-limit", "100"),
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("x-ratelimit-limit-requests", "100"),
        ("x-ratelimit-remaining-requests", "100"),
    ];
    let dialects: [(Arc<dyn ReadQuota>, bool); 8] = [
        (Arc::new(Detect), true),
        (Arc::new(Anthropic), true),
        (Arc::new((OpenAi, Anthropic)), true),
        (Arc::new(OpenAi), false),
        (Arc::new(Azure), false),
        (Arc::new((OpenAi, NoHeaders)), false),
        (Arc::new(Plain), false),
        (Arc::new(NoHeaders), false),
    ];
    for (nth, (dialect, spent)) in dialects.into_iter().enumerate() {
        let org = Org::new("a");
        let layer = QuotaHeaderLayer::new(&org).dialect(dialect).estimate(ByHeader);
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(200, &headers))));
        readied(&layer.clone(), &probe).call(ask()).await.unwrap();
        assert_eq!(org.headroom() < 0.01, spent, "{nth}");
        assert_eq!(poll(&mut metered(&layer, &probe)).is_pending(), spent, "{nth}");
    }
}

/// A dialect of one's own.
struct By<F>(F);

impl<F: Fn(Option<SystemTime>) -> Readings + Send + Sync> ReadQuota for By<F> {
    fn read(&self, _: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        (self.0)(wall)
    }
}

#[tokio::test(start_paused = true)]
async fn resets_are_asked_for_until_they_have_told_how_large_the_buckets_are() {
    let asked = Arc::new(Mutex::new(vec![]));
    let seen = asked.clone();
    let layer =
        QuotaHeaderLayer::new(&Org::new("a")).estimate(ByHeader).dialect(By(move |wall: Option<SystemTime>| {
            let mut seen = seen.lock().unwrap();
            seen.push(wall.is_some());
            let mut readings = Readings::default();
            let requests = readings.entry(Resource::Requests);
            (requests.limit, requests.remaining) = (Some(600.0), Some(500.0));
            // The third answer is the first that has one.
            requests.reset = wall.filter(|_| seen.len() >= 3).map(|_| SECOND * 10);
            readings
        }));
    let probe = Probe::good();
    for _ in 0..5 {
        readied(&layer, &probe).call(ask()).await.unwrap();
    }
    assert_eq!(*asked.lock().unwrap(), [true, true, true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn a_foreign_dialect_that_makes_no_sense_stalls_nothing() {
    for figure in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, f64::MIN, f64::MAX, 0.0, f64::MIN_POSITIVE] {
        for known in [false, true] {
            let org = Org::new("a");
            let turn = Mutex::new(0);
            let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader).dialect(By(move |_| {
                let mut turn = turn.lock().unwrap();
                *turn += 1;
                let mut readings = Readings::default();
                for resource in Resource::ALL {
                    let reading = readings.entry(resource);
                    (reading.limit, reading.remaining) = match *turn {
                        1 if known => (Some(600.0), Some(500.0)),
                        2 => (Some(figure), Some(500.0)),
                        3 => (Some(600.0), Some(figure)),
                        _ => (Some(figure), Some(figure)),
                    };
                }
                readings
            }));
            let probe = Probe::good();
            for _ in 0..10 {
                let mut service = layer.layer(probe.clone());
                let readied = ServiceExt::<Request<Script>>::ready(&mut service);
                // As long as a figure is believed without another answer.
                tokio::time::timeout(301 * SECOND, readied)
                    .await
                    .expect("it goes on")
                    .unwrap()
                    .call(ask())
                    .await
                    .unwrap();
            }
            assert!((0.0..=1.0).contains(&org.headroom()), "{figure}: {}", org.headroom());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_figure_of_a_foreign_dialect_that_makes_no_sense_is_none() {
    // Ten a second, nothing left; then it says this of either figure.
    for (figure, unchanged) in [
        (f64::NAN, true),
        (f64::INFINITY, true),
        (f64::NEG_INFINITY, true),
        (-1.0, true),
        (f64::MIN, true),
        (0.0, true),
        (1_000.0, false),
    ] {
        let org = Org::new("a");
        let turn = Mutex::new(0);
        let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader).dialect(By(move |_| {
            let mut turn = turn.lock().unwrap();
            *turn += 1;
            let mut readings = Readings::default();
            let requests = readings.entry(Resource::Requests);
            (requests.limit, requests.remaining) = match *turn {
                1 => (Some(600.0), Some(100.0)),
                2 => (Some(600.0), Some(0.0)),
                _ => (Some(figure), Some(figure)),
            };
            readings
        }));
        let probe = Probe::good();
        for _ in 0..3 {
            let mut service = layer.layer(probe.clone());
            ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
        }
        assert_eq!(org.headroom() < 0.1, unchanged, "{figure}: {}", org.headroom());
    }
}

#[tokio::test(start_paused = true)]
async fn a_foreign_dialect_that_panics_leaves_the_others_alone() {
    let turn = Mutex::new(0);
    let layer = QuotaHeaderLayer::new(&Org::new("a")).estimate(ByHeader).dialect(By(move |_| {
        let nth = {
            let mut turn = turn.lock().unwrap();
            *turn += 1;
            *turn
        };
        assert!(nth != 1, "a fault of the dialect's own");
        Readings::default()
    }));
    let probe = Probe::good();
    let mut call = task::spawn(readied(&layer, &probe).call(ask()));
    assert!(catch_unwind(AssertUnwindSafe(|| call.poll())).is_err());
    drop(call);
    readied(&layer, &probe).call(ask()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_organisation_that_an_answer_names_is_on_the_board() {
    for (name, status) in
        [("anthropic-organization-id", 200), ("anthropic-organization-id", 404), ("openai-organization", 429)]
    {
        let (org, _layer, _probe) = told(answer(status, &[(name, "org-x")])).await;
        assert_eq!(org.snapshot().organisation.as_deref(), Some("org-x"));
    }
    // Two keys of one organisation show one id.
    let one = told(answer(200, &[("anthropic-organization-id", "org-x")])).await.0;
    let two = told(answer(200, &[("anthropic-organization-id", "org-x")])).await.0;
    assert_eq!(one.snapshot().organisation, two.snapshot().organisation);
}

#[tokio::test(start_paused = true)]
async fn answers_and_bodies_pass_unchanged() {
    let mut first = requests("60", "20");
    *first.body_mut() = Script::new([Step::Data("a"), Step::Trailers]);
    let org = Org::new("a");
    let layer = QuotaHeaderLayer::new(&org);
    let first = Mutex::new(Some(first));
    let probe = Probe::new(move |_| Reply::Now(Ok(first.lock().unwrap().take().unwrap())));
    let mut service = layer.layer(probe);
    let answer: Response<Script> =
        ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
    assert_eq!(answer.body().steps.len(), 2);
    assert_eq!(answer.headers().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_longest_guard_overflows_nothing() {
    let org = Org::new("a");
    let layer = QuotaHeaderLayer::with_guard(&org, Duration::MAX).estimate(ByHeader);
    let probe = Probe::new(|_| Reply::Now(Ok(requests("60", "20"))));
    for _ in 0..3 {
        readied(&layer, &probe).call(ask()).await.unwrap();
    }
    assert!(org.headroom() > 0.5);
}

#[test]
fn what_is_sent_between_tasks_can_be() {
    fn check<T: Send + Sync + Unpin>(_: &T) {}
    let service = QuotaHeaderLayer::new(&Org::new("a")).layer(Probe::good());
    check(&service);
    fn future<S: Service<Request<Script>>>(_: &S)
    where
        S::Future: Send,
    {
    }
    future(&service);
}

// What was never sent, what is lost, and what can never be.

fn asking(tokens: f64) -> Request<Full<Bytes>> {
    let cost = Cost::tokens(Some(tokens), Some(0.0));
    Request::builder().extension(cost).body(Full::default()).unwrap()
}

fn left(org: &Org) -> (f64, f64) {
    let quota = org.snapshot().quota;
    let of = |resource| quota.iter().find(|one| one.resource == resource).unwrap().remaining;
    (of(Resource::Requests), of(Resource::Tokens))
}

#[tokio::test(start_paused = true)]
async fn what_found_no_connection_is_given_back_and_what_may_have_arrived_is_not() {
    type Row = (fn() -> io::Error, bool);
    let rows: [Row; 6] = [
        (|| io::ErrorKind::ConnectionRefused.into(), true),
        (|| io::ErrorKind::NetworkUnreachable.into(), true),
        (|| io::Error::from_raw_os_error(24), true),
        (|| io::ErrorKind::ConnectionReset.into(), false),
        (|| io::ErrorKind::TimedOut.into(), false),
        (|| io::ErrorKind::BrokenPipe.into(), false),
    ];
    for (fails, given_back) in rows {
        let org = Org::new("a");
        // Tells a quota of a hundred requests and 10,001 tokens; then fails.
        let told = Arc::new(AtomicBool::new(false));
        let client = service_fn(move |_: Request<Full<Bytes>>| {
            let first = !told.swap(true, Relaxed);
            async move {
                if !first {
                    return Err(fails());
                }
                let answer = Response::builder()
                    .header("anthropic-ratelimit-requests-limit", "1")
                    .header("anthropic-ratelimit-requests-remaining", "100")
                    .header("anthropic-ratelimit-tokens-limit", "1")
                    .header("anthropic-ratelimit-tokens-remaining", "10001");
                Ok::<_, io::Error>(answer.body(Full::new(Bytes::new())).unwrap())
            }
        });
        let service = QuotaHeaderLayer::new(&org).layer(JudgeLayer::new().layer(client));
        service.clone().oneshot(asking(1.0)).await.unwrap();
        let before = left(&org);
        let error = service.clone().oneshot(asking(1_000.0)).await.unwrap_err();
        let after = left(&org);
        let spent = (before.0 - after.0, before.1 - after.1);
        let expected = if given_back { (0.0, 0.0) } else { (1.0, 1_000.0) };
        assert!((spent.0 - expected.0).abs() < 0.1 && (spent.1 - expected.1).abs() < 0.1, "{error:?}: {spent:?}");
        assert_eq!(error.stamp().unsent, given_back, "{error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_larger_than_a_hard_limit_ends_at_once_and_is_not_sent() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let client = service_fn(move |_: Request<Full<Bytes>>| {
        counted.fetch_add(1, Relaxed);
        async { Ok::<_, tower::BoxError>(Response::new(Full::new(Bytes::new()))) }
    });
    let org = Org::new("a");
    let service =
        QuotaHeaderLayer::new(&org).hard_limit(Resource::InputTokens, 1_000.0).layer(JudgeLayer::new().layer(client));
    for (tokens, sent) in [(999.0, true), (1_000.0, true), (1_001.0, false), (1e12, false)] {
        let before = calls.load(Relaxed);
        let result = service.clone().oneshot(asking(tokens)).await;
        assert_eq!(calls.load(Relaxed) - before, usize::from(sent), "{tokens}");
        let Err(error) = result else { continue };
        assert_eq!(error.class(), Class::TooLarge);
        let too_large = error.source().unwrap().downcast_ref::<TooLarge>().unwrap();
        assert_eq!((too_large.resource(), too_large.limit()), (Resource::InputTokens, 1_000.0));
        assert!(too_large.to_string().contains("no more than 1000"), "{too_large}");
    }
    // An estimate may be four times too high before answers have told; then nothing is refused that might fit.
    let body = |bytes: usize| Request::new(Full::new(Bytes::from(vec![b' '; bytes])));
    assert!(service.clone().oneshot(body(16_000)).await.is_ok());
    assert_eq!(service.oneshot(body(16_008)).await.unwrap_err().class(), Class::TooLarge);
}

#[tokio::test(start_paused = true)]
async fn where_errors_are_of_another_kind_the_provider_says_what_is_too_large() {
    let client = service_fn(async |_: Request<Full<Bytes>>| Ok::<_, io::Error>(Response::new(())));
    let service = QuotaHeaderLayer::new(&Org::new("a")).hard_limit(Resource::Tokens, 1.0).layer(client);
    assert!(service.oneshot(asking(1_000.0)).await.is_ok());
    let client = service_fn(async |_: Request<Full<Bytes>>| Ok::<_, tower::BoxError>(Response::new(())));
    let service = QuotaHeaderLayer::new(&Org::new("a")).hard_limit(Resource::Tokens, 1.0).layer(client);
    let error = service.oneshot(asking(1_000.0)).await.unwrap_err();
    assert!(error.is::<tower_quota::outcome::Error>(), "a box holds it");
}

#[tokio::test(start_paused = true)]
async fn the_handle_says_which_resource_binds_and_how_good_estimates_are() {
    let org = Org::new("a");
    let client = service_fn(async |_: Request<Full<Bytes>>| {
        let mut stamp = Stamp::new(Outcome::of(Class::Ok));
        stamp.usage = Some(Usage::new(50, 10));
        let answer = Response::builder()
            .header("anthropic-ratelimit-requests-limit", "60")
            .header("anthropic-ratelimit-requests-remaining", "40")
            .header("anthropic-ratelimit-input-tokens-limit", "60000")
            .header("anthropic-ratelimit-input-tokens-remaining", "101")
            .extension(stamp);
        Ok::<_, io::Error>(answer.body(()).unwrap())
    });
    let service = QuotaHeaderLayer::new(&org).layer(client);
    assert!(org.snapshot().binds().is_none(), "nothing is told yet");
    service.clone().oneshot(asking(100.0)).await.unwrap();
    let snapshot = org.snapshot();
    let [requests, input] = &snapshot.quota[..] else { panic!("{snapshot:?}") };
    assert_eq!((requests.resource, requests.per_minute, requests.capacity), (Resource::Requests, 60.0, 41.0));
    assert_eq!(requests.said.map(|(said, _)| said), Some(40.0));
    assert_eq!((input.resource, input.per_minute, input.capacity), (Resource::InputTokens, 60_000.0, 151.0));
    assert_eq!((input.remaining, requests.reserved, requests.shared), (101.0, 0.0, false));
    assert_eq!(snapshot.binds().map(|one| one.resource), Some(Resource::InputTokens));
    drop(service);
    assert!(org.snapshot().binds().is_none(), "whoever kept the account is gone");
}
