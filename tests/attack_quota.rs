//! Attacks on the metering: odd figures, calls cut off at every point, foreign code that misbehaves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use support::{Probe, Reply, Script, answer, ask};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
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

async fn readied(layer: &Layered, probe: &Probe) -> QuotaHeader<Probe, ByHeader> {
    let mut service = layer.layer(probe.clone());
    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
    service
}

fn cost(tokens: f64) -> Request<Script> {
    Request::builder().header("x-cost", tokens.to_string()).body(Script::default()).unwrap()
}

fn requests(limit: f64, remaining: f64) -> Response<Script> {
    let (limit, remaining) = (limit.to_string(), remaining.to_string());
    answer(
        200,
        &[("anthropic-ratelimit-requests-limit", &*limit), ("anthropic-ratelimit-requests-remaining", &*remaining)],
    )
}

fn tokens(limit: f64, remaining: f64, used: Option<u64>) -> Response<Script> {
    let (limit, remaining) = (limit.to_string(), remaining.to_string());
    let mut answer = answer(
        200,
        &[
            ("anthropic-ratelimit-input-tokens-limit", &*limit),
            ("anthropic-ratelimit-input-tokens-remaining", &*remaining),
        ],
    );
    let mut stamp = Stamp::new(Outcome::of(Class::Ok));
    stamp.usage = used.map(|input| Usage::new(input, 0));
    answer.extensions_mut().insert(stamp);
    answer
}

/// A bucket as a provider keeps it, in virtual time.
struct Truth {
    capacity: f64,
    per_second: f64,
    level: f64,
    at: Instant,
    refused: usize,
}

impl Truth {
    fn new(capacity: f64, per_second: f64) -> Self {
        Truth { capacity, per_second, level: capacity, at: Instant::now(), refused: 0 }
    }

    /// What is left after this call, or that it is refused.
    fn take(&mut self, cost: f64) -> Option<f64> {
        let now = Instant::now();
        self.level = (self.level + self.per_second * (now - self.at).as_secs_f64()).min(self.capacity);
        self.at = now;
        if self.level < cost {
            self.refused += 1;
            return None;
        }
        self.level -= cost;
        Some(self.level.floor())
    }
}

/// A provider of requests; `odd` may put another figure in the place of what remains.
fn provider(capacity: f64, per_second: f64, odd: impl Fn(usize) -> Option<f64> + Send + Sync + 'static) -> (Probe, Arc<Mutex<Truth>>) {
    let truth = Arc::new(Mutex::new(Truth::new(capacity, per_second)));
    let inner = truth.clone();
    let probe = Probe::new(move |n| {
        let reply = match inner.lock().unwrap().take(1.0) {
            Some(left) => requests(per_second * 60.0, odd(n).unwrap_or(left)),
            None => {
                let mut refused = requests(per_second * 60.0, 0.0);
                *refused.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
                refused
            }
        };
        Reply::After(50 * MS, reply)
    });
    (probe, truth)
}

/// How many calls one after another get through in this time, by so many callers.
async fn served(layer: &Layered, probe: &Probe, callers: usize, time: Duration) -> usize {
    let tasks = tokio::task::LocalSet::new();
    let count = std::rc::Rc::new(std::cell::Cell::new(0));
    for _ in 0..callers {
        let (mut service, count) = (layer.layer(probe.clone()), count.clone());
        tasks.spawn_local(async move {
            loop {
                let answer = ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
                count.set(count.get() + usize::from(answer.status().is_success()));
            }
        });
    }
    tasks.run_until(tokio::time::sleep(time)).await;
    count.get()
}

#[tokio::test(start_paused = true)]
async fn one_figure_that_is_far_too_high_does_not_slow_an_org_down_for_good() {
    for odd in [1_000.0, 1e9, 1e15] {
        let (probe, truth) = provider(100.0, 10.0, move |n| (n == 5).then_some(odd));
        let layer = QuotaHeaderLayer::new(&Org::new("a")).estimate(ByHeader);
        // Not much to do for two minutes.
        for _ in 0..240 {
            readied(&layer, &probe).await.call(ask()).await.unwrap();
            advance(450 * MS).await;
        }
        let served = served(&layer, &probe, 20, 60 * SECOND).await;
        let refused = truth.lock().unwrap().refused;
        println!("{odd}: {served} served, {refused} refused");
        assert!(served > 600, "{odd}: {served} served in a minute, {refused} refused, where 700 are there");
    }
}

#[tokio::test(start_paused = true)]
async fn a_usage_that_no_call_can_have_does_not_stop_the_org() {
    for used in [10_000_000, 1_000_000_000, u64::MAX] {
        let org = Org::new("a");
        let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
        let truth = Mutex::new(Truth::new(100_000.0, 10_000.0));
        let probe = Probe::new(move |n| {
            let left = truth.lock().unwrap().take(100.0).unwrap();
            Reply::After(50 * MS, tokens(600_000.0, left + 1.0, Some(if n == 5 { used } else { 100 })))
        });
        for _ in 0..10 {
            readied(&layer, &probe).await.call(cost(100.0)).await.unwrap();
        }
        let served = served(&layer, &probe, 10, 60 * SECOND).await;
        println!("{used}: {served}, {:?}", org.snapshot().quota);
        assert!(served > 1_000, "{used}: {served} served in a minute");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_that_makes_no_sense_delays_the_calls_after_it_no_longer_than_it_is_there() {
    for odd in [1e7, 1e300, f64::INFINITY] {
        let org = Org::new("a");
        let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
        let truth = Mutex::new(Truth::new(100_000.0, 1_000.0));
        let probe = Probe::new(move |n| {
            let cost = if n == 0 { 80_000.0 } else { 100.0 };
            let left = truth.lock().unwrap().take(cost).unwrap();
            Reply::After(50 * MS, tokens(60_000.0, left + 1.0, None))
        });
        readied(&layer, &probe).await.call(cost(80_000.0)).await.unwrap();
        advance(81 * SECOND).await;
        readied(&layer, &probe).await.call(cost(odd)).await.unwrap();
        let start = Instant::now();
        for _ in 0..10 {
            readied(&layer, &probe).await.call(cost(100.0)).await.unwrap();
        }
        println!("{odd}: {:?}", start.elapsed());
        assert!(start.elapsed() < 10 * SECOND, "{odd}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_goes_as_soon_as_another_proves_cheaper_than_what_it_had_reserved() {
    let org = Org::new("a");
    let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
    let probe = Probe::new(|n| match n {
        ..29 => Reply::Now(Ok(tokens(60_000.0, 97_001.0 - 3_000.0 * n as f64, Some(3_000)))),
        _ => Reply::Released,
    });
    for _ in 0..29 {
        readied(&layer, &probe).await.call(cost(3_000.0)).await.unwrap();
        advance(10 * MS).await;
    }
    let mut dear = readied(&layer, &probe).await;
    let mut cheap = readied(&layer, &probe).await;
    // Both have reserved 3,000; of what the dear one needs 1,500 are missing.
    let left = org.snapshot().quota[0].remaining;
    let mut dear = task::spawn(dear.call(cost(3_000.0 + left + 1_500.0)));
    assert_pending!(dear.poll());
    assert_eq!(probe.calls(), 29, "it waits");
    let mut newcomer = metered(&layer, &probe);
    assert_pending!(poll(&mut newcomer));
    let _cheap = cheap.call(cost(0.0));
    assert!(dear.is_woken());
    assert_pending!(dear.poll());
    assert_eq!(probe.calls(), 31, "both are sent");
}

/// Whether a retried request is the same, and what it carries.
#[tokio::test(start_paused = true)]
async fn a_request_that_was_refused_is_sent_again_exactly_as_it_was() {
    use http::{Method, Version, header::HeaderName};
    use tower_quota::retry::RateLimitRetryLayer;

    #[derive(Clone, Debug, PartialEq)]
    struct Mine(u32);
    type Seen = (Method, String, Version, Vec<(HeaderName, Vec<u8>, bool)>, Option<Mine>, String);
    for (method, own_key, other) in [
        (Method::POST, false, true),
        (Method::POST, true, true),
        (Method::PATCH, false, false),
        (Method::GET, false, true),
        (Method::PUT, false, false),
    ] {
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let see = seen.clone();
        let calls = Arc::new(AtomicUsize::new(0));
        let client = tower::service_fn(move |request: Request<String>| {
            let (parts, body) = request.into_parts();
            let headers = parts.headers.iter().map(|(name, value)| (name.clone(), value.as_bytes().to_vec(), value.is_sensitive()));
            see.lock().unwrap().push((
                parts.method,
                parts.uri.to_string(),
                parts.version,
                headers.collect(),
                parts.extensions.get::<Mine>().cloned(),
                body,
            ));
            let status = if calls.fetch_add(1, SeqCst) < 3 { 429 } else { 200 };
            std::future::ready(Ok::<_, io::Error>(answer(status, &[])))
        });
        let layer = RateLimitRetryLayer::builder().classify(tower_quota::outcome::ByStatus).build().unwrap();
        let mut request = Request::builder()
            .method(method.clone())
            .uri("https://example.com:8443/a/b?c=d&e=%20")
            .version(Version::HTTP_2)
            .header("x-b", "1")
            .header("x-a", "1")
            .header("x-b", "2")
            .header("x-c", http::HeaderValue::from_bytes(b"\xff\x80").unwrap());
        if own_key {
            request = request.header("Idempotency-Key", "mine");
        }
        if other {
            request = request.extension(Mine(7));
        }
        let mut secret = http::HeaderValue::from_static("s");
        secret.set_sensitive(true);
        let request = request.header("authorization", secret).body("body".to_owned()).unwrap();
        let answer = layer.layer(client).oneshot(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 4);
        for again in &seen[1..] {
            assert_eq!(again, &seen[0]);
        }
        assert_eq!(seen[0].4, other.then_some(Mine(7)));
    }
}
