//! The metering layer alone: what it reserves and gives back, who waits where and is woken when, and what it reads.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    task::Poll,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, Request, Response};
use support::{Probe, Reply, Script, Step, answer, ask};
use tokio::time::{Instant, advance, sleep};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    dialect::{Anthropic, Azure, Detect, NoHeaders, OpenAi, Plain, ReadQuota, Readings, Resource},
    org::Org,
    outcome::{Class, Outcome, Stamp, Usage},
    quota::{Cost, Estimate, QuotaHeader, QuotaHeaderLayer},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// So many input tokens as the header `x-cost` says.
#[derive(Clone, Copy)]
struct ByHeader;

impl<B> Estimate<Request<B>> for ByHeader {
    fn cost(&self, request: &Request<B>) -> Cost {
        let cost = request.headers().get("x-cost").map(|value| value.to_str().unwrap().parse().unwrap());
        Cost::tokens(Some(cost.unwrap_or(0.0)), Some(0.0))
    }
}

type Metered = tower_test::mock::Spawn<QuotaHeader<Probe, ByHeader>>;
type Layered = QuotaHeaderLayer<ByHeader>;

fn metered(layer: &Layered, probe: &Probe) -> Metered {
    Metered::new(layer.layer(probe.clone()))
}

fn poll(service: &mut Metered) -> Poll<io::Result<()>> {
    service.poll_ready::<Request<Script>>()
}

fn readied(layer: &Layered, probe: &Probe) -> Metered {
    let mut service = metered(layer, probe);
    assert_ready!(poll(&mut service)).unwrap();
    service
}

fn cost(tokens: u32) -> Request<Script> {
    Request::builder().header("x-cost", tokens).body(Script::default()).unwrap()
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
    let mut call = task::spawn({
        let mut service = metered(&layer, &probe);
        // Nothing is known of what calls use, so nothing waits for output.
        assert_ready!(poll(&mut service)).unwrap();
        service.call(ask())
    });
    assert_pending!(call.poll());
    probe.release(1, Ok(answer(404, &[])));
    assert_ready!(call.poll()).unwrap();
    assert_eq!(org.headroom(), 0.0);
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
