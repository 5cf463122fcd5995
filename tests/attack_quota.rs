//! Attacks on the metering: odd figures, calls cut off at every point, foreign code that misbehaves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;
mod support_quota;

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use support::{Probe, Reply, Script, answer, ask};
use support_quota::{ByHeader, Layered, cost, metered, poll};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    balance::Members,
    dialect::{Detect, ReadQuota, Readings},
    judge::{Gather, JudgeLayer},
    org::{Org, Orgs},
    outcome::{Class, Outcome, Stamp, Usage},
    quota::{QuotaHeader, QuotaHeaderLayer},
    stack::Stack,
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

async fn readied(layer: &Layered, probe: &Probe) -> QuotaHeader<Probe, ByHeader> {
    let mut service = layer.layer(probe.clone());
    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
    service
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
fn provider(
    capacity: f64,
    per_second: f64,
    odd: impl Fn(usize) -> Option<f64> + Send + Sync + 'static,
) -> (Probe, Arc<Mutex<Truth>>) {
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
                let answer =
                    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
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
        assert!(served > 600, "{odd}: {served} served in a minute, {refused} refused, where 700 are there");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bucket_that_has_become_smaller_is_found_out_though_no_limit_says_so() {
    // 1,000 at first, and a tenth of it from the sixth call on.
    let (probe, truth) = provider(1_000.0, 10.0, |_| None);
    let layer = QuotaHeaderLayer::new(&Org::new("a")).estimate(ByHeader);
    for n in 0..400 {
        if n == 5 {
            truth.lock().unwrap().capacity = 100.0;
        }
        readied(&layer, &probe).await.call(ask()).await.unwrap();
        advance(450 * MS).await;
    }
    let served = served(&layer, &probe, 20, 60 * SECOND).await;
    assert!(served > 600, "{served} served in a minute, where 700 are there");
}

#[tokio::test(start_paused = true)]
async fn a_colleague_who_keeps_a_bucket_low_is_not_taken_for_a_smaller_bucket() {
    // Somebody else takes what is there, but for a few, whenever we look away.
    for floor in [3.0, 20.0] {
        let (probe, truth) = provider(1_000.0, 10.0, |_| None);
        let org = Org::new("a");
        let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
        let mut rng = fastrand::Rng::with_seed(1);
        for n in 0..400 {
            readied(&layer, &probe).await.call(ask()).await.unwrap();
            advance(450 * MS).await;
            let mut truth = truth.lock().unwrap();
            if n > 5 {
                truth.take(0.0);
                truth.level = truth.level.min(floor + 4.0 * rng.f64());
            }
        }
        let quota = &org.snapshot().quota[0];
        assert!(quota.shared && quota.capacity >= 900.0, "{floor}: {quota:?}");
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

fn quotas(org: &Org) -> Vec<tower_quota::org::ResourceQuota> {
    org.snapshot().quota
}

#[tokio::test(start_paused = true)]
async fn whatever_is_done_and_said_nothing_stays_reserved_and_nothing_stalls() {
    const ODD: [&str; 14] = [
        "0",
        "1",
        "7",
        "100",
        "1000",
        "5000",
        "60000",
        "1e9",
        "1e308",
        "-1",
        "NaN",
        "inf",
        "999999999999999999999",
        "0.5",
    ];
    const USED: [u64; 6] = [0, 1, 100, 5_000, 10_000_000, u64::MAX];
    const COSTS: [f64; 8] = [0.0, 1.0, 100.0, 5_000.0, 1e9, 1e300, f64::INFINITY, f64::NAN];
    for seed in 0..60 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let org = Org::new("a");
        let layer = QuotaHeaderLayer::new(&org).estimate(ByHeader);
        let probe = Probe::new(|_| Reply::Released);
        let mut ready = vec![];
        let mut flying: Vec<task::Spawn<_>> = vec![];
        let mut bodies: Vec<Response<Script>> = vec![];
        let mut sent = 0;
        let mut open: Vec<usize> = vec![];
        for _ in 0..rng.usize(10..150) {
            match rng.u32(0..12) {
                0..=3 => {
                    let mut service = metered(&layer, &probe);
                    if poll(&mut service).is_ready() || rng.bool() {
                        ready.push(service);
                    }
                }
                4..=6 if !ready.is_empty() => {
                    let mut service = ready.swap_remove(rng.usize(..ready.len()));
                    if poll(&mut service).is_ready() {
                        let mut call = task::spawn(service.call(cost(COSTS[rng.usize(..COSTS.len())])));
                        if rng.u32(0..4) > 0 {
                            assert!(call.poll().is_pending());
                        }
                        flying.push(call);
                    }
                }
                7 if !flying.is_empty() => drop(flying.swap_remove(rng.usize(..flying.len()))),
                8 => advance(Duration::from_millis(1 << rng.u32(0..17))).await,
                9 if !bodies.is_empty() => drop(bodies.swap_remove(rng.usize(..bodies.len()))),
                _ if !open.is_empty() => {
                    let n = open.swap_remove(rng.usize(..open.len()));
                    let mut lines = vec![];
                    for name in [
                        "anthropic-ratelimit-requests-limit",
                        "anthropic-ratelimit-requests-remaining",
                        "anthropic-ratelimit-input-tokens-limit",
                        "anthropic-ratelimit-input-tokens-remaining",
                        "x-ratelimit-limit-tokens",
                        "x-ratelimit-remaining-tokens",
                        "x-ratelimit-reset-tokens",
                    ] {
                        if rng.bool() {
                            lines.push((name, ODD[rng.usize(..ODD.len())]));
                        }
                    }
                    let status = [200, 200, 200, 429, 500][rng.usize(..5)];
                    let mut reply = answer(status, &lines);
                    if rng.bool() {
                        let mut stamp = Stamp::new(Outcome::of(Class::Ok));
                        stamp.usage = Some(Usage::new(USED[rng.usize(..USED.len())], USED[rng.usize(..USED.len())]));
                        reply.extensions_mut().insert(stamp);
                    }
                    probe.release(
                        n,
                        if rng.u32(0..8) == 0 { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(reply) },
                    );
                }
                _ => {}
            }
            for at in (0..flying.len()).rev() {
                if flying[at].is_woken() {
                    if let Poll::Ready(result) = flying[at].poll() {
                        drop(flying.swap_remove(at));
                        bodies.extend(result.ok());
                    }
                }
            }
            open.extend(sent..probe.calls());
            sent = probe.calls();
            for quota in quotas(&org) {
                let figures =
                    [quota.per_minute, quota.capacity, quota.remaining, quota.refill_per_minute, quota.reserved];
                assert!(figures.iter().all(|figure| figure.is_finite()), "{seed}: {quota:?}");
            }
        }
        drop((ready, flying, bodies));
        for quota in quotas(&org) {
            assert!(quota.reserved.abs() < 1e-3, "{seed}: {quota:?}");
        }
        for _ in 0..3 {
            let start = Instant::now();
            let mut service = readied(&layer, &probe).await;
            let mut call = task::spawn(service.call(cost(1.0)));
            let before = probe.calls();
            assert!(call.poll().is_pending());
            while probe.calls() < before.max(sent + 1) {
                advance(SECOND).await;
                assert!(call.poll().is_pending());
                assert!(start.elapsed() < 700 * SECOND, "{seed}: {:?}", quotas(&org));
            }
            sent = probe.calls();
            probe.release(sent - 1, Ok(answer(200, &[])));
            assert!(call.poll().is_ready());
            assert!(start.elapsed() < 700 * SECOND, "{seed}: {:?}", quotas(&org));
        }
    }
}

// The whole stack.

/// A body whose first frame does something, where it is asked for it by the estimate.
#[derive(Clone)]
struct Foreign {
    act: Arc<dyn Fn() + Send + Sync>,
    left: bool,
}

impl Body for Foreign {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::convert::Infallible>>> {
        (self.act)();
        // Whoever asks may be woken from within.
        cx.waker().wake_by_ref();
        let left = std::mem::take(&mut self.left);
        Poll::Ready(left.then(|| Ok(Frame::data(Bytes::from_static(br#"{"max_tokens":5}"#)))))
    }

    fn is_end_stream(&self) -> bool {
        !self.left
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(16)
    }
}

fn foreign(act: impl Fn() + Send + Sync + 'static) -> Request<Foreign> {
    Request::post("/v1/messages").body(Foreign { act: Arc::new(act), left: true }).unwrap()
}

fn told_tokens() -> http::response::Builder {
    Response::builder()
        .header("content-type", "application/json")
        .header("anthropic-organization-id", "x")
        .header("anthropic-ratelimit-requests-limit", "600")
        .header("anthropic-ratelimit-requests-remaining", "99")
        .header("anthropic-ratelimit-tokens-limit", "600000")
        .header("anthropic-ratelimit-tokens-remaining", "99999")
}

const USED: &str = r#"{"usage":{"input_tokens":3,"output_tokens":4}}"#;

#[tokio::test(start_paused = true)]
async fn a_body_that_panics_when_it_is_estimated_leaves_neither_slot_nor_reservation() {
    let orgs = Orgs::new([Org::new("a")]).unwrap();
    let wire = service_fn(async |_: Request<Foreign>| {
        Ok::<_, io::Error>(told_tokens().body(Full::<Bytes>::from(USED)).unwrap())
    });
    let stack = Stack::new(orgs.clone()).build(wire).unwrap();
    stack.clone().oneshot(foreign(|| ())).await.unwrap();
    for n in 0..20 {
        let mut waiting = task::spawn(stack.clone().oneshot(foreign(|| ())));
        let mut call = task::spawn(stack.clone().oneshot(foreign(|| panic!("estimated"))));
        assert!(catch_unwind(AssertUnwindSafe(|| call.poll().is_ready())).is_err());
        drop(call);
        assert!(assert_ready!(waiting.poll()).unwrap().status().is_success(), "{n}");
        drop(waiting);
        for snapshot in stack.members().snapshots() {
            assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0), "{n}");
            assert!(snapshot.quota.iter().all(|quota| quota.reserved == 0.0), "{n}: {:?}", snapshot.quota);
        }
    }
}

/// Looks at everything there is to look at, from wherever it is called.
struct Looks(Mutex<Option<(Orgs, Members)>>, AtomicUsize);

impl Looks {
    fn look(&self) {
        let look = self.0.lock().unwrap().clone();
        if let Some((orgs, members)) = look {
            self.1.fetch_add(1, SeqCst);
            orgs.iter().for_each(|org| drop((org.snapshot(), org.standing(), org.headroom(), org.load())));
            drop((members.snapshots(), members.waiting()));
        }
    }
}

impl ReadQuota for Looks {
    fn read(&self, headers: &http::HeaderMap, wall: Option<std::time::SystemTime>) -> Readings {
        self.look();
        Detect.read(headers, wall)
    }
}

impl std::task::Wake for Looks {
    fn wake(self: Arc<Self>) {
        self.look();
    }
}

#[tokio::test(start_paused = true)]
async fn foreign_code_may_look_at_orgs_and_pool_from_wherever_it_is_called() {
    let orgs = Orgs::new([Org::new("a"), Org::new("b")]).unwrap();
    let looks = Arc::new(Looks(Mutex::default(), AtomicUsize::new(0)));
    let in_call = looks.clone();
    let wire = service_fn(move |_: Request<Foreign>| {
        in_call.look();
        let looks = in_call.clone();
        async move {
            looks.look();
            tokio::time::sleep(MS).await;
            Ok::<_, io::Error>(told_tokens().body(Full::<Bytes>::from(USED)).unwrap())
        }
    });
    let judge = JudgeLayer::new().gather(Gather::ErrorsOnly);
    let stack = Stack::new(orgs.clone()).dialect(looks.clone()).judge(judge).build(wire).unwrap();
    *looks.0.lock().unwrap() = Some((orgs, stack.members()));
    let waker = std::task::Waker::from(looks.clone());
    let mut cx = Context::from_waker(&waker);
    for _ in 0..3 {
        let request = || {
            let looks = looks.clone();
            foreign(move || looks.look())
        };
        let mut calls: Vec<_> = (0..5).map(|_| Box::pin(stack.clone().oneshot(request()))).collect();
        let mut answers = vec![];
        while !calls.is_empty() {
            calls.retain_mut(|call| match call.as_mut().poll(&mut cx) {
                Poll::Ready(answer) => {
                    answers.push(answer.unwrap());
                    false
                }
                Poll::Pending => true,
            });
            advance(10 * MS).await;
        }
        for answer in answers {
            let tail = answer.extensions().get::<Stamp>().unwrap().tail.clone().unwrap();
            let looks = looks.clone();
            tail.on_end(move |_| looks.look());
            drop(answer);
        }
    }
    assert!(looks.1.load(SeqCst) > 60, "{:?}", looks.1);
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
            let headers = parts
                .headers
                .iter()
                .map(|(name, value)| (name.clone(), value.as_bytes().to_vec(), value.is_sensitive()));
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

#[tokio::test(start_paused = true)]
async fn a_request_with_more_header_lines_than_a_map_has_room_for_names_is_sent_again_too() {
    let calls = Arc::new(AtomicUsize::new(0));
    let client = service_fn(move |request: Request<String>| {
        let lines = request.headers().len();
        let status = if calls.fetch_add(1, SeqCst) < 1 { 429 } else { 200 };
        std::future::ready(Ok::<_, io::Error>(answer(status, &[("x-lines", &*lines.to_string())])))
    });
    let layer = tower_quota::retry::RateLimitRetryLayer::builder().classify(tower_quota::outcome::ByStatus);
    let mut request = Request::new(String::new());
    for _ in 0..30_000 {
        request.headers_mut().append("x-a", http::HeaderValue::from_static("1"));
    }
    let answer = layer.build().unwrap().layer(client).oneshot(request).await.unwrap();
    assert_eq!(answer.headers()["x-lines"], "30000");
}
