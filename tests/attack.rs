//! Attempts to break it. Each test states what must hold however the caller, the provider or the clock behaves.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Body as _;
use http_body_util::Full;
use tokio::time::Instant;
use tokio_test::task;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimitLayer, Caps, Settings},
    auth::OrgAuthLayer,
    balance::{OrgBalance, OrgBalanceLayer},
    drive::{Drive, DriveError},
    health::OrgHealthLayer,
    judge::{Gather, JudgeLayer},
    org::{Credential, Dialect, Family, Org, Orgs, OutReason},
    outcome::{Class, Outcome, Stamped},
    quota::{Cost, Estimate, QuotaHeaderLayer},
    retry::{RateLimitRetry, RateLimitRetryLayer},
    sim::{self, Change, Config, Latency, OrgConfig, RetryAfter, Sim, SimService},
    stack::{Member, Stack, Stacked},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

type Body = Full<Bytes>;

fn ask(item: usize) -> Request<Body> {
    Request::post("/v1/messages").body(Full::new(format!("{{\"item\":{item}}}").into())).unwrap()
}

fn stream(item: usize) -> Request<Body> {
    Request::post("/v1/messages").body(Full::new(format!("{{\"stream\":true,\"item\":{item}}}").into())).unwrap()
}

fn key(name: &str) -> String {
    format!("key-{name}")
}

fn pool(names: &[&str]) -> Orgs {
    Orgs::new(names.iter().map(|name| Org::new(name).credential(Credential::new(&key(name))))).unwrap()
}

/// Counts its wakes.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

// ---------------------------------------------------------------- 1. cancellation

/// The ready-made stack but for a gate that a test can fill.
type Tight = RateLimitRetry<OrgBalance<Member<SimService>>>;

const UNBOUND: usize = 3;

fn tight(sim: &Sim, orgs: &Orgs, cap: usize, gather: Gather) -> (Tight, OrgBalance<Member<SimService>>) {
    let settings = Settings::builder().caps(Caps::default().family("any", cap).unwrap()).build().unwrap();
    let judge = JudgeLayer::new().gather(gather).timeout(2 * SECOND);
    let layer = OrgBalanceLayer::new(orgs.clone(), move |org: &Org, client: SimService| {
        let client = OrgAuthLayer::new(org).unwrap().layer(client);
        let judged = judge.clone().scrub(org).layer(client);
        let metered = QuotaHeaderLayer::new(org).layer(judged);
        let limited = AimdLimitLayer::with_settings(org, &settings).classify(Stamped).layer(metered);
        OrgHealthLayer::new(org).classify(Stamped).layer(limited)
    });
    let balance = layer.max_unbound(UNBOUND).unwrap().layer(sim.service());
    (RateLimitRetryLayer::builder().seed(3).build().unwrap().layer(balance.clone()), balance)
}

/// Exactly no call is counted as unbound, and exactly `UNBOUND` may be.
fn assert_no_call_is_unbound(balance: &OrgBalance<Member<SimService>>, why: &str) {
    let mut calls = Vec::new();
    for n in 0..=UNBOUND {
        let mut clone = balance.clone();
        let ready = clone.poll_ready_now();
        assert_eq!(ready, n < UNBOUND, "{why}: with {n} unbound");
        if ready {
            calls.push(clone.call(ask(n)));
        }
    }
}

trait ReadyNow {
    fn poll_ready_now(&mut self) -> bool;
}

impl ReadyNow for OrgBalance<Member<SimService>> {
    fn poll_ready_now(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        Service::<Request<Body>>::poll_ready(self, &mut cx).is_ready()
    }
}

fn at_rest(orgs: &Orgs, why: &str) {
    for org in orgs {
        for org in org.families() {
            let seen = org.snapshot();
            assert_eq!((seen.in_flight, seen.waiting), (0, 0), "{why}: {seen:?}");
        }
    }
}

/// How the org fares for its first five seconds.
fn faulty(fault: &str) -> OrgConfig {
    let well = Change {
        black_hole: Some(false.into()),
        overloaded: Some(false.into()),
        error_5xx: Some(false.into()),
        hang: Some(false.into()),
        truncate: Some(false.into()),
        reset: Some(false.into()),
        ..Change::default()
    };
    let org = OrgConfig::new("a", key("a")).requests_per_minute(6_000.0);
    let org = match fault {
        "ok" | "stream" => org,
        "429 hinted" => org.black_hole(true).retry_after(RetryAfter::Ms),
        "429 bare" => org.black_hole(true).retry_after(RetryAfter::None),
        "503" => org.overloaded(true),
        "500" => org.error_5xx(true),
        "hang" => org.hang(true),
        "truncated" => org.truncate(true),
        "reset" => org.reset(true),
        _ => unreachable!("{fault}"),
    };
    org.at(5.0, well)
}

/// Drops the victim after its `k`th poll, or after the `k`th millisecond whether it was woken or not; false once it ends by itself
/// before.
async fn cancelled_at(fault: &str, k: usize, by_time: bool, queued: bool) -> bool {
    let why = format!("{fault}, dropped at {k} by {}, queued {queued}", if by_time { "time" } else { "poll" });
    let sim = Sim::new(Config::new(Dialect::Anthropic).org(faulty(fault)).seed(k as u64)).unwrap();
    let orgs = pool(&["a"]);
    let gather = if fault == "stream" { Gather::ErrorsOnly } else { Gather::Whole };
    let (service, balance) = tight(&sim, &orgs, 1, gather);
    let request = |n| if fault == "stream" { stream(n) } else { ask(n) };

    let one = |n| {
        let service = service.clone();
        let request = request(n);
        async move {
            let response = service.oneshot(request).await?;
            let mut body = response.into_body();
            while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                frame.map_err(|error| error.to_string())?;
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }
    };
    let before = queued.then(|| tokio::spawn(one(0)));
    if queued {
        tokio::task::yield_now().await;
    }
    let mut victim = Some(task::spawn(one(1)));
    let mut others: Vec<_> = Vec::new();
    if queued {
        others.push(tokio::spawn(one(2)));
    }
    let (mut polls, mut steps, mut ended) = (0, 0, false);
    while let Some(call) = &mut victim {
        let due = if by_time { steps } else { polls };
        if due == k {
            victim = None;
            break;
        }
        if polls == 0 || call.is_woken() {
            polls += 1;
            if call.poll().is_ready() {
                ended = true;
                victim = None;
            }
            continue;
        }
        tokio::time::sleep(MS).await;
        steps += 1;
        assert!(steps < 60_000, "{why}: it never ends; {:?}", orgs.get("a").unwrap().snapshot());
    }
    drop(victim);
    let patience = 120 * SECOND;
    for n in 3..6 {
        others.push(tokio::spawn(one(n)));
    }
    for other in others.into_iter().chain(before) {
        let ended = tokio::time::timeout(patience, other).await;
        let ended =
            ended.unwrap_or_else(|_| panic!("{why}: others do not go on; {:?}", orgs.get("a").unwrap().snapshot()));
        // A request may use up its attempts on an org that fails for five seconds; it may not hang.
        drop(ended.unwrap());
    }
    at_rest(&orgs, &why);
    assert_no_call_is_unbound(&balance, &why);
    tokio::task::yield_now().await;
    at_rest(&orgs, &why);
    let truth = sim.truth();
    assert!(truth.orgs[0].in_flight == 0, "{why}");
    assert!(truth.answered_more <= u64::from(fault == "truncated"), "{why}: answered twice");
    !ended
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_after_any_poll_leaves_all_at_rest() {
    for fault in ["ok", "stream", "429 hinted", "429 bare", "503", "500", "hang", "truncated", "reset"] {
        for queued in [false, true] {
            let mut k = 0;
            while cancelled_at(fault, k, false, queued).await {
                k += 1;
            }
            assert!(k > 1, "{fault}: {k}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_after_any_step_of_time_leaves_all_at_rest() {
    for fault in ["ok", "stream", "429 hinted", "429 bare", "503", "hang", "truncated"] {
        for queued in [false, true] {
            let (mut k, mut step) = (0, 1);
            while cancelled_at(fault, k, true, queued).await {
                k += step;
                if k > 60 {
                    step = 331;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_dropped_midway_gives_its_slot_back() {
    for frames in 0..3 {
        let sim = Sim::new(Config::new(Dialect::Anthropic).org(faulty("ok"))).unwrap();
        let orgs = pool(&["a"]);
        let (service, balance) = tight(&sim, &orgs, 1, Gather::ErrorsOnly);
        let response = service.clone().oneshot(stream(0)).await.unwrap();
        let mut body = response.into_body();
        for _ in 0..frames {
            let frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await;
            assert!(frame.unwrap().is_ok(), "{frames}");
        }
        let mut next = task::spawn(service.clone().oneshot(stream(1)));
        assert!(next.poll().is_pending());
        assert_eq!(orgs.get("a").unwrap().snapshot().in_flight, 1);
        drop(body);
        assert!(next.is_woken(), "{frames}");
        drop(next);
        at_rest(&orgs, "body dropped");
        assert_no_call_is_unbound(&balance, "body dropped");
    }
}

#[test]
fn what_outlives_its_runtime_may_be_dropped_and_serves_in_another() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    for fault in ["ok", "429 hinted", "429 bare", "503", "hang"] {
        let orgs = pool(&["a"]);
        let sim = Sim::new(Config::new(Dialect::Anthropic).org(faulty(fault))).unwrap();
        let (service, balance) = tight(&sim, &orgs, 1, Gather::Whole);
        let first = runtime();
        let mut calls: Vec<_> = (0..UNBOUND).map(|n| task::spawn(service.clone().oneshot(ask(n)))).collect();
        first.block_on(async {
            for _ in 0..3 {
                for call in &mut calls {
                    let _ = call.poll();
                }
                tokio::time::sleep(20 * MS).await;
            }
        });
        drop(first);
        drop(calls);
        at_rest(&orgs, fault);
        assert_no_call_is_unbound(&balance, fault);
        runtime().block_on(async {
            let ended = tokio::time::timeout(600 * SECOND, service.clone().oneshot(ask(9))).await;
            assert!(ended.is_ok(), "{fault}");
        });
        at_rest(&orgs, fault);
    }
}

// ---------------------------------------------------------------- 2. odd headers

/// A stack of one org over a client that answers at once, with whatever headers a function gives.
fn over<F>(
    headers: F,
) -> (
    Stacked<
        impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static,
    >,
    Orgs,
)
where
    F: Fn(usize) -> (u16, HeaderMap) + Clone + Send + Sync + 'static,
{
    let orgs = pool(&["a"]);
    let calls = Arc::new(AtomicUsize::new(0));
    let client = service_fn(move |_: Request<Body>| {
        let (status, headers) = headers(calls.fetch_add(1, SeqCst));
        async move {
            tokio::time::sleep(10 * MS).await;
            let mut response = Response::new(Full::new(Bytes::from_static(b"{}")));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            *response.headers_mut() = headers;
            Ok::<_, Infallible>(response)
        }
    });
    (Stack::new(orgs.clone()).build(client).unwrap(), orgs)
}

fn lines(lines: &[(&'static str, &[u8])]) -> HeaderMap {
    lines
        .iter()
        .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap()))
        .collect()
}

/// Polls `call` to its end by wakes alone; panics where it is polled more often than time can explain.
async fn polled_to_its_end<F: Future>(call: F, within: Duration, most: usize) -> (F::Output, usize) {
    let mut call = task::spawn(call);
    let (mut polls, begin) = (0, Instant::now());
    loop {
        if polls == 0 || call.is_woken() {
            polls += 1;
            assert!(polls <= most, "polled {polls} times in {:?}", begin.elapsed());
            if let Poll::Ready(output) = call.poll() {
                return (output, polls);
            }
            continue;
        }
        assert!(begin.elapsed() <= within, "no end after {within:?} and {polls} polls");
        let step = match begin.elapsed().as_secs() {
            0..1 => MS,
            1..60 => 100 * MS,
            _ => 5 * SECOND,
        };
        tokio::time::sleep(step).await;
    }
}

const NUMBERS: &[&[u8]] = &[
    b"",
    b" ",
    b"0",
    b"-1",
    b"-0",
    b"1e308",
    b"1e-308",
    b"-1e308",
    b"NaN",
    b"nan",
    b"inf",
    b"-inf",
    b"infinity",
    b"99999999999999999999999999",
    b"1.5",
    b"0.0001",
    b"1,000",
    b"\xff\xfe",
    b"0x10",
    b"1e9",
    b"\x80",
    b"18446744073709551616",
    b"+5",
    b"5 ",
    b"1_000",
    b".5",
    b"5.",
    b"true",
];

const TIMES: &[&[u8]] = &[
    b"",
    b"0",
    b"-1",
    b"1",
    b"1e400",
    b"NaN",
    b"0.0000001",
    b"18446744073709551615",
    b"18446744073709551616s",
    b"Fri, 31 Dec 9999 23:59:59 GMT",
    b"Mon, 01 Jan 0001 00:00:00 GMT",
    b"0001-01-01T00:00:00Z",
    b"9999-12-31T23:59:59Z",
    b"9999-12-31T23:59:59+23:59",
    b"1s1s1s",
    b"999999999h",
    b"1792567710",
    b"99999999999999",
    b"-5s",
    b"1ns",
    b"\xff",
    b"Thu, 01 Jan 1970 00:00:00 GMT",
    b"2026-02-30T00:00:00Z",
    b"1e9",
    b"999999999",
];

#[tokio::test(start_paused = true)]
async fn no_number_in_a_quota_header_stalls_an_org() {
    let mut worst = (0, Duration::ZERO, String::new());
    for limit in NUMBERS {
        for remaining in NUMBERS {
            let (limit, remaining) = (limit.to_vec(), remaining.to_vec());
            let why = format!(
                "limit {:?}, remaining {:?}",
                String::from_utf8_lossy(&limit),
                String::from_utf8_lossy(&remaining)
            );
            let (service, orgs) = over(move |_| {
                let headers = lines(&[
                    ("anthropic-ratelimit-requests-limit", &limit),
                    ("anthropic-ratelimit-requests-remaining", &remaining),
                    ("anthropic-ratelimit-input-tokens-limit", &remaining),
                    ("anthropic-ratelimit-input-tokens-remaining", &limit),
                ]);
                (200, headers)
            });
            for n in 0..5 {
                let begin = Instant::now();
                let (ended, polls) = polled_to_its_end(service.clone().oneshot(ask(n)), 3_600 * SECOND, 20_000).await;
                assert!(ended.is_ok(), "{why}");
                if begin.elapsed() > worst.1 {
                    worst = (polls, begin.elapsed(), why.clone());
                }
            }
            at_rest(&orgs, &why);
        }
    }
    println!("longest wait: {worst:?}");
}

#[tokio::test(start_paused = true)]
async fn no_time_in_a_refusal_stalls_an_org_or_spins() {
    for status in [429, 503] {
        for name in
            ["retry-after", "retry-after-ms", "x-ms-retry-after-ms", "date", "anthropic-ratelimit-requests-reset"]
        {
            for time in TIMES {
                let time = time.to_vec();
                let why = format!("{status} {name}: {:?}", String::from_utf8_lossy(&time));
                let (service, orgs) = over(move |n| match n {
                    0..3 => {
                        let mut headers = lines(&[
                            (name, &time),
                            ("anthropic-ratelimit-requests-limit", b"60"),
                            ("anthropic-ratelimit-requests-remaining", b"0"),
                        ]);
                        if name == "date" {
                            headers.insert("retry-after", HeaderValue::from_static("Fri, 31 Dec 9999 23:59:59 GMT"));
                        }
                        (status, headers)
                    }
                    _ => (200, HeaderMap::new()),
                });
                let (ended, _) = polled_to_its_end(service.clone().oneshot(ask(0)), 1_200 * SECOND, 5_000).await;
                // A refusal whose time lies beyond the patience may end; nothing may hang.
                drop(ended);
                at_rest(&orgs, &why);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn headers_that_flip_with_every_answer_stall_nothing() {
    let mut rng = fastrand::Rng::with_seed(11);
    for _ in 0..60 {
        let seed = rng.u64(..);
        let (service, orgs) = over(move |n| {
            let mut rng = fastrand::Rng::with_seed(seed ^ n as u64);
            let mut headers = HeaderMap::new();
            for name in [
                "anthropic-ratelimit-requests-limit",
                "anthropic-ratelimit-requests-remaining",
                "anthropic-ratelimit-requests-reset",
                "x-ratelimit-limit-requests",
                "x-ratelimit-remaining-requests",
                "x-ratelimit-limit-tokens",
                "x-ratelimit-remaining-tokens",
                "x-ratelimit-reset-tokens",
            ] {
                for _ in 0..rng.usize(0..3) {
                    let value = if rng.bool() {
                        rng.u32(60..6_000).to_string().into_bytes()
                    } else {
                        NUMBERS[rng.usize(..NUMBERS.len())].to_vec()
                    };
                    headers.append(name, HeaderValue::from_bytes(&value).unwrap());
                }
            }
            (200, headers)
        });
        for n in 0..20 {
            let (ended, _) = polled_to_its_end(service.clone().oneshot(ask(n)), 3_600 * SECOND, 20_000).await;
            assert!(ended.is_ok());
        }
        at_rest(&orgs, "flips");
    }
}

#[tokio::test(start_paused = true)]
async fn headers_of_a_hundred_kilobytes_are_read_in_no_time() {
    for byte in [b'9', b'.', b' ', b'm', b'-', b'z'] {
        let long = vec![byte; 100_000];
        let (service, _) = over(move |n| {
            let headers = lines(&[
                ("retry-after", &long),
                ("retry-after-ms", &long),
                ("date", &long),
                ("anthropic-ratelimit-requests-limit", &long),
                ("anthropic-ratelimit-requests-remaining", &long),
                ("anthropic-ratelimit-requests-reset", &long),
                ("anthropic-organization-id", &long),
            ]);
            (if n < 2 { 429 } else { 200 }, headers)
        });
        let (ended, _) = polled_to_its_end(service.oneshot(ask(0)), 1_200 * SECOND, 5_000).await;
        assert!(ended.is_ok());
    }
}

#[test]
fn a_wait_under_no_ceiling_overflows_no_clock() {
    for value in
        ["1e8", "999999999", "18446744073709551615", "9999-12-31T23:59:59Z", "999999999999h", "3000000000000000h"]
    {
        let mut headers = HeaderMap::new();
        headers.insert("retry-after", value.parse().unwrap());
        for status in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE] {
            let _ = Outcome::of_head(status, &headers, Duration::MAX);
        }
    }
}

// ---------------------------------------------------------------- 4. orgs that die

#[tokio::test(start_paused = true)]
async fn when_the_last_org_dies_all_who_wait_are_told_though_the_oldest_do_not_come() {
    let orgs = pool(&["a", "b"]);
    let client = service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
    let service = Stack::new(orgs.clone()).build(client).unwrap();
    // Two travel alone, the rest wait in line.
    let mut calls: Vec<_> = (0..50).map(|n| task::spawn(service.clone().oneshot(ask(n)))).collect();
    for call in &mut calls {
        assert!(call.poll().is_pending());
    }
    orgs.get("a").unwrap().put_out(OutReason::OutOfQuota);
    orgs.get("b").unwrap().put_out(OutReason::OutOfQuota);
    // Those at the head of the line are kept, and not polled.
    let mut rest = calls.split_off(10);
    loop {
        let woken: Vec<_> = (0..rest.len()).filter(|i| rest[*i].is_woken()).collect();
        if woken.is_empty() {
            break;
        }
        for i in woken.into_iter().rev() {
            let error = match rest[i].poll() {
                Poll::Ready(ended) => ended.unwrap_err(),
                Poll::Pending => continue,
            };
            assert_eq!(error.class(), Some(Class::NoOrg));
            drop(rest.remove(i));
        }
    }
    assert_eq!(rest.len(), 0, "so many were never told");
}

#[tokio::test(start_paused = true)]
async fn three_hundred_in_line_survive_an_org_that_answers_401() {
    for order in 0..6 {
        let names =
            [["a", "b", "c"], ["a", "c", "b"], ["b", "a", "c"], ["b", "c", "a"], ["c", "a", "b"], ["c", "b", "a"]]
                [order];
        let dead = Change { unauthorised: Some(true.into()), ..Change::default() };
        let mut config = Config::new(Dialect::Anthropic).seed(order as u64);
        for (i, name) in names.iter().enumerate() {
            let org = OrgConfig::new(*name, key(name)).requests_per_minute(3_000.0);
            config = config.org(match i {
                0 => org.unauthorised(true),
                1 => org.at(0.5, dead.clone()),
                _ => org,
            });
        }
        let sim = Sim::new(config).unwrap();
        let orgs = pool(&["a", "b", "c"]);
        let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
        let calls: Vec<_> = (0..300).map(|n| tokio::spawn(service.clone().oneshot(ask(n)))).collect();
        for call in calls {
            let answer = tokio::time::timeout(300 * SECOND, call).await.unwrap().unwrap().unwrap();
            assert_eq!(answer.status(), 200);
        }
        let truth = sim.truth();
        assert_eq!((truth.answered_once, truth.answered_more), (300, 0));
        assert!(truth.org(names[0]).unwrap().errors.get(&401).copied() == Some(1), "the sounding call alone was lost");
        at_rest(&orgs, "dead orgs");
    }
}

#[tokio::test(start_paused = true)]
async fn an_org_dead_for_one_family_serves_the_others_and_hundreds_of_families_are_served() {
    let orgs = pool(&["a", "b"]);
    let client = service_fn(|request: Request<Body>| async move {
        tokio::time::sleep(5 * MS).await;
        let family = request.extensions().get::<Family>().cloned().unwrap_or_default();
        let refused = family.as_str() == "forbidden" && request.headers()["x-api-key"] == "key-a";
        let mut response = Response::new(Body::default());
        *response.status_mut() = if refused { StatusCode::FORBIDDEN } else { StatusCode::OK };
        Ok::<_, Infallible>(response)
    });
    let service = Stack::new(orgs.clone()).build(client).unwrap();
    let mut calls = Vec::new();
    for n in 0..1_200 {
        let mut request = ask(n);
        match n % 400 {
            0 => {}
            1..50 => {
                request.extensions_mut().insert(Family::new("forbidden"));
            }
            n => {
                request.extensions_mut().insert(Family::new(&format!("family {n}")));
            }
        }
        calls.push(tokio::spawn(service.clone().oneshot(request)));
    }
    for call in calls {
        assert_eq!(tokio::time::timeout(60 * SECOND, call).await.unwrap().unwrap().unwrap().status(), 200);
    }
    assert!(!orgs.get("a").unwrap().is_out());
    assert!(orgs.get("a").unwrap().family(&Family::new("forbidden")).is_out());
    at_rest(&orgs, "families");
}

#[test]
fn an_org_put_out_from_another_thread_ends_every_call() {
    for round in 0..20u64 {
        let orgs = pool(&["a", "b", "c"]);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let sim = Sim::new(
            Config::new(Dialect::Anthropic)
                .latency(Latency::new(2.0, 0.5))
                .org(OrgConfig::new("a", key("a")))
                .org(OrgConfig::new("b", key("b")))
                .org(OrgConfig::new("c", key("c"))),
        )
        .unwrap();
        let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
        let killer = {
            let orgs = orgs.clone();
            std::thread::spawn(move || {
                for name in ["a", "b", "c"] {
                    std::thread::sleep(Duration::from_micros(700 * round));
                    orgs.get(name).unwrap().put_out(OutReason::Disabled("test".into()));
                }
            })
        };
        runtime.block_on(async {
            let calls: Vec<_> = (0..500).map(|n| tokio::spawn(service.clone().oneshot(ask(n)))).collect();
            for call in calls {
                let ended = tokio::time::timeout(60 * SECOND, call).await.expect("every call ends").unwrap();
                if let Err(error) = ended {
                    assert_eq!(error.class(), Some(Class::NoOrg));
                }
            }
        });
        killer.join().unwrap();
        at_rest(&orgs, "put out");
    }
}

// ---------------------------------------------------------------- 8. memory

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

fn calls_one_after_another(headers: HeaderMap, calls: usize) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = service_fn(move |_: Request<Body>| {
            let mut response = Response::new(Body::default());
            *response.headers_mut() = headers.clone();
            std::future::ready(Ok::<_, Infallible>(response))
        });
        let service = Stack::new(pool(&["a", "b"])).build(client).unwrap();
        let run = async |n| {
            for item in 0..n {
                let answer = service.clone().oneshot(ask(item)).await.unwrap();
                assert_eq!(answer.status(), 200);
            }
        };
        run(calls / 10).await;
        let before = resident();
        run(calls).await;
        resident().saturating_sub(before)
    })
}

#[test]
fn calls_one_after_another_leave_nothing_in_memory() {
    let calls = std::env::var("ATTACK_CALLS").ok().and_then(|n| n.parse().ok()).unwrap_or(40_000);
    let said = lines(&[
        ("anthropic-ratelimit-requests-limit", b"6000000000"),
        ("anthropic-ratelimit-requests-remaining", b"60000000"),
    ]);
    for (what, headers) in [("with quota headers", said), ("without", HeaderMap::new())] {
        let grown = calls_one_after_another(headers, calls);
        println!("{what}: {calls} calls, {grown} bytes more");
        // A ledger that is never swept keeps some ninety bytes a call.
        assert!(grown < 40 * calls, "{what}: {grown} bytes more after {calls} calls");
    }
}

// ---------------------------------------------------------------- 9. numbers

#[tokio::test(start_paused = true)]
async fn the_largest_settings_overflow_nothing() {
    let settings = Settings::builder()
        .caps(Caps::default().family("any", usize::MAX).unwrap())
        .floor(usize::MAX)
        .step(f64::MAX)
        .hold_ceiling(Duration::MAX)
        .spread(Duration::MAX)
        .backoff(Duration::MAX, Duration::MAX)
        .start(1.0)
        .build()
        .unwrap();
    let orgs = pool(&["a", "b"]);
    let stack = Stack::new(orgs.clone())
        .limit(settings)
        .judge(JudgeLayer::new().hint_ceiling(Duration::MAX).ceiling(u64::MAX).timeout(Duration::MAX));
    assert_eq!(stack.live_bound(&Family::default()), usize::MAX);
    let calls = Arc::new(AtomicUsize::new(0));
    let service = stack
        .build(service_fn(move |_: Request<Body>| {
            let n = calls.fetch_add(1, SeqCst);
            let mut response = Response::builder();
            if n < 2 {
                response = response.status(429).header("retry-after", "1e18");
            }
            std::future::ready(response.body(Body::default()))
        }))
        .unwrap();
    let mut call = task::spawn(service.oneshot(ask(0)));
    let _ = call.poll();
}

#[tokio::test(start_paused = true)]
async fn the_longest_backoff_is_a_wait_and_no_loop() {
    for status in [429, 503] {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let client = service_fn(move |_: Request<Body>| {
            counted.fetch_add(1, SeqCst);
            std::future::ready(Response::builder().status(status).body(Body::default()))
        });
        let retry = RateLimitRetryLayer::builder()
            .classify(tower_quota::outcome::ByStatus)
            .backoff_base(Duration::MAX)
            .backoff_cap(Duration::MAX)
            .patience(Duration::MAX)
            .seed(1)
            .build()
            .unwrap();
        let mut call = task::spawn(retry.layer(client).oneshot(ask(0)));
        assert!(call.poll().is_pending());
        for _ in 0..100 {
            tokio::time::sleep(SECOND).await;
            if call.is_woken() {
                assert!(call.poll().is_pending());
            }
        }
        assert_eq!(calls.load(SeqCst), 1, "{status}: a wait without end is not no wait");
    }
}

#[tokio::test(start_paused = true)]
async fn the_longest_guard_overflows_no_clock() {
    let org = Org::new("a");
    let client = service_fn(|_: Request<Body>| {
        std::future::ready(
            Response::builder()
                .header("anthropic-ratelimit-requests-limit", "60")
                .header("anthropic-ratelimit-requests-remaining", "59")
                .body(Body::default()),
        )
    });
    let service = QuotaHeaderLayer::with_guard(&org, Duration::MAX).layer(client);
    for n in 0..3 {
        service.clone().oneshot(ask(n)).await.unwrap();
    }
}

/// Says what it is told to.
#[derive(Clone, Copy)]
struct Says(f64);

impl<B> Estimate<Request<B>> for Says {
    fn cost(&self, _: &Request<B>) -> Cost {
        Cost::tokens(Some(self.0), Some(self.0))
    }
}

#[tokio::test(start_paused = true)]
async fn an_estimate_that_makes_no_sense_spoils_no_quota() {
    for estimate in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e9, 1e300, f64::MAX, -0.0] {
        let org = Org::new("a");
        let client = service_fn(|_: Request<Body>| async {
            tokio::time::sleep(10 * MS).await;
            Response::builder()
                .header("anthropic-ratelimit-input-tokens-limit", "60000")
                .header("anthropic-ratelimit-input-tokens-remaining", "999")
                .body(Body::default())
        });
        let layer = QuotaHeaderLayer::new(&org);
        let odd = layer.clone().estimate(Says(estimate)).layer(client);
        let plain = layer.estimate(Says(10.0)).layer(client);
        for n in 0..4 {
            plain.clone().oneshot(ask(n)).await.unwrap();
            tokio::time::timeout(60 * SECOND, odd.clone().oneshot(ask(n)))
                .await
                .expect("goes when the bucket is full")
                .unwrap();
        }
        let begin = Instant::now();
        for n in 0..4 {
            tokio::time::timeout(60 * SECOND, plain.clone().oneshot(ask(n)))
                .await
                .expect("the quota is not spoilt")
                .unwrap();
        }
        println!("{estimate}: {:?}", begin.elapsed());
        // A bucket of a thousand that refills a thousand a second.
        assert!(begin.elapsed() < 5 * SECOND, "{estimate}: {:?}", begin.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_was_thought_far_too_dear_is_not_learnt_as_capacity() {
    // A picture in a body: four megabytes of text, a million tokens by its length, a thousand in truth.
    let org = Org::new("a");
    let bucket = Arc::new(Mutex::new((30_000.0, Instant::now())));
    let client = service_fn(move |_: Request<Body>| {
        let bucket = bucket.clone();
        async move {
            tokio::time::sleep(SECOND).await;
            let mut bucket = bucket.lock().unwrap();
            let level: f64 = (bucket.0 + bucket.1.elapsed().as_secs_f64() * 500.0).min(30_000.0) - 1_500.0;
            *bucket = (level, Instant::now());
            Response::builder()
                .header("anthropic-ratelimit-input-tokens-limit", "30000")
                .header("anthropic-ratelimit-input-tokens-remaining", format!("{}", level as u64))
                .body(Body::default())
        }
    });
    let service = QuotaHeaderLayer::new(&org).estimate(Says(1e6)).layer(client);
    let begin = Instant::now();
    for n in 0..5 {
        service.clone().oneshot(ask(n)).await.unwrap();
    }
    assert!(begin.elapsed() < 61 * SECOND * 4, "each waits for a full bucket at most: {:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_call_larger_than_the_bucket_that_gets_no_answer_leaves_no_debt_beyond_a_bucket() {
    let org = Org::new("a");
    let client = service_fn(|request: Request<Body>| async move {
        if request.uri().path() == "/broken" {
            return Err(std::io::Error::other("broken"));
        }
        let response = Response::builder()
            .header("anthropic-ratelimit-input-tokens-limit", "30000")
            .header("anthropic-ratelimit-input-tokens-remaining", "29999");
        Ok(response.body(Body::default()).unwrap())
    });
    let layer = QuotaHeaderLayer::new(&org);
    let large = layer.clone().estimate(Says(1e6)).layer(client);
    let small = layer.estimate(Says(10.0)).layer(client);
    small.clone().oneshot(ask(0)).await.unwrap();
    let broken = Request::post("/broken").body(Body::default()).unwrap();
    tokio::time::timeout(61 * SECOND, large.oneshot(broken)).await.expect("goes when the bucket is full").unwrap_err();
    tokio::time::timeout(121 * SECOND, small.oneshot(ask(1))).await.expect("the quota comes back").unwrap();
}

// ---------------------------------------------------------------- 12. the quota promise

struct Run {
    calls: u64,
    refused: u64,
    ratio: f64,
    what: String,
}

/// One random provider, driven to its end in virtual time.
async fn random_run(seed: u64) -> Run {
    let mut rng = fastrand::Rng::with_seed(seed);
    let between = |rng: &mut fastrand::Rng, low: f64, high: f64| low * (high / low).powf(rng.f64());
    let dialect = if rng.bool() { Dialect::Anthropic } else { Dialect::OpenAi };
    let mut config = Config::new(dialect).seed(seed);
    let orgs = rng.usize(1..=4);
    let typical = between(&mut rng, 3.0, 33_000.0);
    let mut names = Vec::new();
    let mut what = format!("seed {seed}:");
    for i in 0..orgs {
        let name = format!("org{i}");
        let per_minute = (typical * between(&mut rng, 0.3, 3.0)).clamp(3.0, 100_000.0).round();
        let latency = Latency::new(between(&mut rng, 5.0, 800.0), rng.f64() * 0.5);
        let forms = [
            RetryAfter::Seconds,
            RetryAfter::Fraction,
            RetryAfter::Ms,
            RetryAfter::HttpDate,
            RetryAfter::None,
            RetryAfter::Zero,
        ];
        let mut org = OrgConfig::new(name.clone(), key(&name))
            .requests_per_minute(per_minute)
            .latency(latency)
            .retry_after(forms[rng.usize(..forms.len())]);
        let capacity = if rng.f64() < 0.3 {
            let n = rng.u32(1..=3);
            org = org.requests_capacity(f64::from(n));
            format!("{n} req")
        } else {
            // No more than the run takes, or nothing is left to pace.
            let s = between(&mut rng, 0.2, 20.0);
            org = org.capacity_s(s);
            format!("{s:.1} s")
        };
        let mut changes = Vec::new();
        if rng.f64() < 0.5 {
            let mut at = 0.0;
            for _ in 0..rng.usize(1..=2) {
                at += between(&mut rng, 2.0, 30.0);
                // Whole, since that is how it is announced.
                let changed = (per_minute * between(&mut rng, 0.3, 3.0)).max(1.0).round();
                org = org.at(at, Change { requests_per_minute: Some(changed), ..Change::default() });
                changes.push(format!("{changed}@{at:.0}s"));
            }
        }
        what += &format!(
            " [{per_minute}/min cap {capacity} {:.0} ms σ{:.1} {:?} {changes:?}]",
            latency.p50_ms, latency.sigma, org.retry_after
        );
        names.push(name);
        config = config.org(org);
    }
    // As many calls as take some half a minute, and no fewer than 30.
    let mut n = 30;
    while n < 15_000 && config.fluid_limit(n).unwrap() < 40 * SECOND {
        n = n * 5 / 4;
    }
    let fluid = config.fluid_limit(n).unwrap();
    // Nobody is faster than the last call's own latency.
    let slowest = config
        .orgs
        .iter()
        .filter_map(|org| org.latency)
        .map(|l| l.mean().mul_f64((2.0 * l.sigma).exp()))
        .max()
        .unwrap();
    let pool =
        Orgs::new(names.iter().map(|name| Org::new(name).credential(Credential::new(&key(name))).dialect(dialect)))
            .unwrap();
    let settings = Settings::builder().caps(Caps::default().family("any", 1_500).unwrap()).build().unwrap();
    let stack = Stack::new(pool.clone()).limit(settings);
    let sim = Sim::new(config).unwrap();
    let service = stack.build(sim.service()).unwrap();
    let begin = Instant::now();
    let mut drive = Drive::iter(service, (0..n as usize).map(|item| (item, ask(item))), 4_000).unwrap();
    let mut last = Instant::now();
    loop {
        let next = tokio::time::timeout(900 * SECOND, drive.next()).await;
        let next = next.unwrap_or_else(|_| {
            panic!("{what}: stalled after {:?}, {:?}", last - begin, pool.iter().map(Org::snapshot).collect::<Vec<_>>())
        });
        let Some((_, result)) = next else { break };
        assert_eq!(result.unwrap_or_else(|error| panic!("{what}: {error}")).status(), 200);
        last = Instant::now();
    }
    let took = last - begin;
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (n, 0), "{what}");
    at_rest(&pool, &what);
    let ratio = took.as_secs_f64() / (fluid + slowest).as_secs_f64();
    what += &format!(" n {n} fluid {fluid:.1?} took {took:.1?} 429s {}", truth.throttled_429());
    Run { calls: truth.calls(), refused: truth.throttled_429(), ratio, what }
}

#[test]
fn random_quotas_are_kept_busy_and_not_crossed() {
    let seeds = std::env::var("ATTACK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    let from = std::env::var("ATTACK_FROM").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut runs: Vec<_> = (from..from + seeds)
        .map(|seed| {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
            let run = runtime.block_on(random_run(seed));
            if std::env::var("ATTACK_VERBOSE").is_ok() {
                println!("{:.3} {}", run.ratio, run.what);
            }
            run
        })
        .collect();
    runs.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
    let at = |part: f64| runs[((runs.len() - 1) as f64 * part) as usize].ratio;
    println!(
        "time / fluid: min {:.3} median {:.3} p90 {:.3} p99 {:.3} max {:.3}",
        at(0.0),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
    let median = at(0.5);
    println!("beyond 1.10: {} of {}", runs.iter().filter(|run| run.ratio > 1.10).count(), runs.len());
    let (calls, refused) = runs.iter().fold((0, 0), |sum, run| (sum.0 + run.calls, sum.1 + run.refused));
    println!("429s: {refused} of {calls}");
    for run in runs.iter().rev().take(8) {
        println!("slow {:.3}: {}", run.ratio, run.what);
    }
    runs.sort_by(|a, b| (b.refused as f64 / b.calls as f64).total_cmp(&(a.refused as f64 / a.calls as f64)));
    for run in runs.iter().take(8) {
        println!("refused {:.2} %: {}", 100.0 * run.refused as f64 / run.calls as f64, run.what);
    }
    println!("beyond 1 %: {} of {}", runs.iter().filter(|run| run.refused * 100 > run.calls).count(), runs.len());
    // Few of these buckets are so small that they refill in a tick of the clock.
    assert!(median < 1.10, "{median}");
    assert!(refused * 100 <= calls, "{refused} of {calls}");
}

// ---------------------------------------------------------------- 3. clocks

#[tokio::test(start_paused = true)]
async fn a_clock_that_leaps_costs_no_call_and_no_quota() {
    for leap in [MS, SECOND, 60 * SECOND, 3_600 * SECOND, 86_400 * SECOND, 40 * 86_400 * SECOND] {
        for fault in ["ok", "429 hinted", "429 bare", "503"] {
            let sim = Sim::new(Config::new(Dialect::Anthropic).org(faulty(fault))).unwrap();
            let orgs = pool(&["a"]);
            let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
            let calls: Vec<_> = (0..40).map(|n| tokio::spawn(service.clone().oneshot(ask(n)))).collect();
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            tokio::time::advance(leap).await;
            for call in calls {
                let ended = tokio::time::timeout(700 * SECOND, call).await.expect("nothing stalls").unwrap();
                if fault == "ok" || leap >= 60 * SECOND {
                    assert_eq!(ended.unwrap().status(), 200, "{fault}, {leap:?}");
                }
            }
            at_rest(&orgs, fault);
            if fault == "ok" {
                assert_eq!(sim.truth().throttled_429(), 0, "{leap:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_long_after_its_hold_is_an_answer() {
    let calls = Arc::new(AtomicUsize::new(0));
    let client = service_fn(move |_: Request<Body>| {
        let n = calls.fetch_add(1, SeqCst);
        async move {
            let (wait, status) = match n {
                0 => (1, 200),
                1 => (400, 429), // the refusal itself takes longer than its hold
                2 => (2, 429),
                3 => (900, 200),
                _ => (1, 200),
            };
            tokio::time::sleep(wait * SECOND).await;
            Response::builder().status(status).header("retry-after", "5").body(Body::default())
        }
    });
    let orgs = pool(&["a"]);
    let service = Stack::new(orgs.clone()).build(client).unwrap();
    service.clone().oneshot(ask(0)).await.unwrap();
    let calls: Vec<_> = (1..9).map(|n| tokio::spawn(service.clone().oneshot(ask(n)))).collect();
    for call in calls {
        let answer = tokio::time::timeout(1_500 * SECOND, call).await.unwrap().unwrap().unwrap();
        assert_eq!(answer.status(), 200);
    }
    at_rest(&orgs, "late");
}

// ---------------------------------------------------------------- 5. executors

/// A service whose calls end when they are polled after a millisecond.
fn quick(
    orgs: &Orgs,
    cap: usize,
    wait: Duration,
) -> Stacked<
    impl Service<Request<Body>, Response = Response<Body>, Error = http::Error, Future: Send> + Clone + Send + 'static,
> {
    let settings = Settings::builder().start(1.0).caps(Caps::default().family("any", cap).unwrap()).build().unwrap();
    let client = service_fn(move |_: Request<Body>| async move {
        tokio::time::sleep(wait).await;
        Response::builder().body(Body::default())
    });
    Stack::new(orgs.clone()).limit(settings).build(client).unwrap()
}

#[tokio::test(start_paused = true)]
async fn thousands_joined_in_one_task_are_all_served() {
    let orgs = pool(&["a", "b"]);
    let service = quick(&orgs, 5, MS);
    let begin = Instant::now();
    let calls = (0..3_000).map(|n| service.clone().oneshot(ask(n)));
    let answers = futures_util::future::join_all(calls).await;
    assert!(answers.iter().all(Result::is_ok));
    println!("3,000 calls over ten slots of two milliseconds: {:?}", begin.elapsed());
    assert!(begin.elapsed() < 2 * SECOND);
    at_rest(&orgs, "join_all");
    let mut set: futures_util::stream::FuturesUnordered<_> =
        (0..3_000).map(|n| service.clone().oneshot(ask(n))).collect();
    let mut served = 0;
    while let Some(answer) = futures_util::StreamExt::next(&mut set).await {
        answer.unwrap();
        served += 1;
    }
    assert_eq!(served, 3_000);
    at_rest(&orgs, "FuturesUnordered");
}

/// Futures polled only when an adversary likes: some late, some for no reason, some by another waker than the last time.
#[tokio::test(start_paused = true)]
async fn an_executor_that_dawdles_serves_all_in_the_end() {
    for seed in 0..30 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let orgs = pool(&["a", "b"]);
        let service = quick(&orgs, rng.usize(1..4), 3 * MS);
        let mut calls: Vec<_> = (0..60)
            .map(|n| {
                let count = Arc::new(Count::default());
                (Box::pin(service.clone().oneshot(ask(n))), count, 0usize, true)
            })
            .collect();
        let mut polls = 0;
        let begin = Instant::now();
        while !calls.is_empty() {
            assert!(begin.elapsed() < 60 * SECOND, "seed {seed}: {} left", calls.len());
            let mut i = 0;
            while i < calls.len() {
                let (call, count, seen, first) = &mut calls[i];
                let woken = *first || count.0.load(SeqCst) > *seen;
                // Woken ones dawdle; now and then one is polled for no reason.
                if (woken && rng.f64() < 0.2) || rng.f64() < 0.01 {
                    *first = false;
                    if rng.f64() < 0.1 {
                        *count = Arc::new(Count::default());
                    }
                    *seen = count.0.load(SeqCst);
                    polls += 1;
                    let waker = Waker::from(count.clone());
                    if let Poll::Ready(answer) = call.as_mut().poll(&mut Context::from_waker(&waker)) {
                        answer.unwrap();
                        calls.swap_remove(i);
                        continue;
                    }
                }
                i += 1;
            }
            tokio::time::sleep(MS).await;
        }
        assert!(polls < 20_000, "seed {seed}: {polls} polls");
        at_rest(&orgs, "dawdling");
    }
}

/// A waker that makes, polls and drops another call there and then.
struct CallsBack<S> {
    service: Mutex<S>,
    wakes: AtomicUsize,
}

impl<S> Wake for CallsBack<S>
where
    S: Service<Request<Body>> + Clone + Send + 'static,
{
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, SeqCst);
        let service = self.service.lock().unwrap().clone();
        let mut call = Box::pin(service.oneshot(ask(1)));
        let _ = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_waker_may_call_into_the_service() {
    let orgs = pool(&["a"]);
    let service = quick(&orgs, 1, 2 * MS);
    let waker = Arc::new(CallsBack { service: Mutex::new(service.clone()), wakes: AtomicUsize::new(0) });
    let mut calls: Vec<_> = (0..20).map(|n| Box::pin(service.clone().oneshot(ask(n)))).collect();
    let begin = Instant::now();
    while !calls.is_empty() {
        assert!(begin.elapsed() < 60 * SECOND);
        let cx_waker = Waker::from(waker.clone());
        calls.retain_mut(|call| call.as_mut().poll(&mut Context::from_waker(&cx_waker)).is_pending());
        tokio::time::sleep(MS).await;
    }
    assert!(waker.wakes.load(SeqCst) > 0);
    at_rest(&orgs, "calls back");
}

#[test]
fn a_call_may_move_between_threads_at_every_poll() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let orgs = pool(&["a", "b"]);
    let service = quick(&orgs, 1, MS);
    runtime.block_on(async {
        let mut calls = Vec::new();
        for n in 0..200 {
            let mut call = Box::pin(service.clone().oneshot(ask(n)));
            calls.push(tokio::spawn(async move {
                loop {
                    // Each poll in a task of its own, which may run on another thread.
                    let (back, ended) = tokio::spawn(async move {
                        let ended = tokio::time::timeout(Duration::from_millis(3), &mut call).await;
                        (call, ended)
                    })
                    .await
                    .unwrap();
                    match ended {
                        Ok(answer) => return answer.is_ok(),
                        Err(_) => call = back,
                    }
                }
            }));
        }
        for call in calls {
            assert!(tokio::time::timeout(60 * SECOND, call).await.expect("it ends").unwrap());
        }
    });
    at_rest(&orgs, "threads");
}

// ---------------------------------------------------------------- 6. fairness

#[tokio::test(start_paused = true)]
async fn a_thousand_callers_for_one_slot_are_served_by_age() {
    let orgs = pool(&["a"]);
    let served = Arc::new(Mutex::new(Vec::new()));
    let settings = Settings::builder().start(1.0).caps(Caps::default().family("any", 1).unwrap()).build().unwrap();
    let order = served.clone();
    let client = service_fn(move |request: Request<Body>| {
        let order = order.clone();
        async move {
            order.lock().unwrap().push(request.headers()["x-number"].to_str().unwrap().parse::<usize>().unwrap());
            tokio::time::sleep(MS).await;
            Response::builder().body(Body::default())
        }
    });
    let service = Stack::new(orgs.clone()).limit(settings).build(client).unwrap();
    let calls: Vec<_> = (0..1_000)
        .map(|n| {
            let mut request = ask(n);
            request.headers_mut().insert("x-number", n.to_string().parse().unwrap());
            tokio::spawn(service.clone().oneshot(request))
        })
        .collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let served = served.lock().unwrap();
    let off = served.iter().enumerate().map(|(place, n)| place.abs_diff(*n)).max();
    println!("furthest from its place: {off:?}");
    // Two are called for one slot, so neighbours may change places.
    assert!(off <= Some(2), "{off:?}");
}

#[tokio::test(start_paused = true)]
async fn closed_loop_callers_at_a_full_gate_are_all_served_alike() {
    let orgs = pool(&["a"]);
    let settings = Settings::builder().start(1.0).caps(Caps::default().family("any", 2).unwrap()).build().unwrap();
    let client = service_fn(|_: Request<u32>| async {
        tokio::time::sleep(MS).await;
        Response::builder().body(String::new())
    });
    let layer = OrgBalanceLayer::new(orgs, move |org: &Org, client| {
        AimdLimitLayer::with_settings(org, &settings).layer(client)
    });
    let balance = layer.max_unbound(2).unwrap().layer(client);
    let counts: Vec<_> = (0..50).map(|_| Arc::new(AtomicUsize::new(0))).collect();
    let tasks: Vec<_> = counts
        .iter()
        .map(|count| {
            let (mut balance, count) = (balance.clone(), count.clone());
            tokio::spawn(async move {
                loop {
                    let call = ServiceExt::<Request<u32>>::ready(&mut balance).await.unwrap().call(Request::new(0));
                    call.await.unwrap();
                    count.fetch_add(1, SeqCst);
                }
            })
        })
        .collect();
    tokio::time::sleep(5 * SECOND).await;
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let counts: Vec<_> = counts.iter().map(|count| count.load(SeqCst)).collect();
    let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
    println!("least {least}, most {most}");
    assert!(*least * 2 > *most, "{counts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_org_does_not_slow_the_fast_one() {
    let orgs = pool(&["a", "b"]);
    let settings = Settings::builder().start(1.0).caps(Caps::default().family("any", 10).unwrap()).build().unwrap();
    let client = service_fn(|request: Request<Body>| async move {
        let slow = request.headers()["x-api-key"] == "key-a";
        tokio::time::sleep(if slow { 5 * SECOND } else { 10 * MS }).await;
        Response::builder().body(Body::default())
    });
    let service = Stack::new(orgs.clone()).limit(settings).build(client).unwrap();
    let begin = Instant::now();
    let calls: Vec<_> = (0..5_000).map(|n| tokio::spawn(service.clone().oneshot(ask(n)))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    println!("{:?}", begin.elapsed());
    assert!(begin.elapsed() < 11 * SECOND);
}

// ---------------------------------------------------------------- 7. the driver

#[tokio::test(start_paused = true)]
async fn a_driver_of_one_survives_whatever_is_done_to_it() {
    let orgs = pool(&["a"]);
    let service = quick(&orgs, 1, 5 * MS);
    let items = |n| (0..n).map(|item| (item, ask(item)));

    let mut past =
        Drive::iter(service.clone(), items(5), 1).unwrap().deadline(Instant::now().checked_sub(SECOND).unwrap());
    let mut seen = Vec::new();
    while let Some((id, result)) = past.next().await {
        assert!(matches!(result, Err(DriveError::Deadline)));
        seen.push(id);
    }
    assert_eq!(seen, [0, 1, 2, 3, 4]);
    for _ in 0..3 {
        assert!(past.next().await.is_none(), "after the end it stays at its end");
    }

    let mut aborted = Drive::iter(service.clone(), items(50), 5).unwrap();
    let mut seen: Vec<_> = vec![aborted.next().await.unwrap().0];
    aborted.abort();
    while let Some((id, result)) = aborted.next().await {
        assert!(matches!(result, Err(DriveError::Stopped)));
        seen.push(id);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..seen.len()).collect::<Vec<_>>(), "every id once that was taken");
    assert!(seen.len() > 1 && seen.len() <= 8);
    assert!(aborted.next().await.is_none());
    at_rest(&orgs, "aborted");

    // Stopped while an item waits for readiness.
    let never = service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
    let mut stopped = task::spawn(Drive::iter(tower::limit::ConcurrencyLimit::new(never, 1), items(5), 3).unwrap());
    assert!(stopped.poll_next().is_pending());
    assert_eq!(stopped.live(), 2);
    stopped.stop();
    assert!(matches!(stopped.poll_next(), Poll::Ready(Some((1, Err(DriveError::Stopped))))));
    assert!(stopped.poll_next().is_pending(), "the one in flight finishes");
    stopped.abort();
    assert!(matches!(stopped.poll_next(), Poll::Ready(Some((0, Err(DriveError::Stopped))))));
    assert!(matches!(stopped.poll_next(), Poll::Ready(None)));
    assert!(matches!(stopped.poll_next(), Poll::Ready(None)));

    // An input that pends between items and ends for good only once.
    let input = futures_util::stream::unfold(0, |n| async move {
        tokio::time::sleep(3 * MS).await;
        (n < 20).then(|| ((n, ask(n)), n + 1))
    });
    let mut pending = Drive::new(service.clone(), input, 1).unwrap();
    let mut n = 0;
    while let Some((_, result)) = pending.next().await {
        result.unwrap();
        n += 1;
    }
    assert_eq!(n, 20);
    assert!(pending.next().await.is_none());
    at_rest(&orgs, "driver");
}

// ---------------------------------------------------------------- 10. secrets

#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Said {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn no_key_is_ever_said() {
    const KEY: &str = "sk-ant-SECRET-0123456789";
    let said = Said::default();
    let writer = said.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut text = String::new();
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        for status in [200u16, 400, 401, 402, 403, 404, 413, 429, 500, 503, 529] {
            for broken in [false, true] {
                let org = Org::new("a").credential(Credential::new(KEY)).dialect(dialect);
                let orgs = Orgs::new([org.clone()]).unwrap();
                let client = service_fn(move |request: Request<Body>| {
                    let auth = request
                        .headers()
                        .iter()
                        .map(|(name, value)| format!("{name}: {value:?}\n"))
                        .collect::<String>();
                    assert!(!auth.contains(KEY), "the header is marked: {auth}");
                    async move {
                        if broken {
                            return Err(std::io::Error::other("connection reset"));
                        }
                        let body =
                            format!("{{\"error\":{{\"message\":\"Incorrect API key provided: {KEY}. Retry in 2s\"}}}}");
                        let response = Response::builder().status(status).header("content-length", body.len());
                        Ok(response.body(Full::new(Bytes::from(body))).unwrap())
                    }
                });
                let retry = RateLimitRetryLayer::builder().patience(20 * SECOND).build().unwrap();
                let stack = Stack::new(orgs.clone()).retry(retry.clone());
                text += &format!("{stack:?} {retry:?}");
                let service = stack.build(client).unwrap();
                text += &format!("{service:?}");
                let mut call = task::spawn(service.clone().oneshot(ask(0)));
                let _ = call.poll();
                text += &format!("{call:?}");
                drop(call);
                match service.clone().oneshot(ask(0)).await {
                    Ok(response) => {
                        if status != 200 {
                            let body = response.body().get_ref().bytes().unwrap().clone();
                            text += &String::from_utf8_lossy(&body);
                        }
                        text += &format!("{response:?}");
                    }
                    Err(error) => {
                        text += &format!("{error} {error:?}");
                        let mut source = std::error::Error::source(&error);
                        while let Some(error) = source {
                            text += &format!("{error} {error:?}");
                            source = error.source();
                        }
                    }
                }
                text += &format!("{service:?} {org:?} {:?} {orgs:?} {:?}", org.snapshot(), org.key());
                text += &format!("{:?}", OrgAuthLayer::new(&org).unwrap());
                text += &format!("{:?}", JudgeLayer::new().scrub(&org));
            }
        }
    }
    for url in ["https://user:hunter2@host", "https://host/?key=hunter2", "hunter2", "http://user@host/hunter2"] {
        let org = Org::new("a").credential(Credential::new(KEY)).base_url(url.parse().unwrap());
        text += &format!("{:?} {:?}", org, org.snapshot());
        let refused = OrgAuthLayer::new(&org).unwrap_err();
        text += &format!("{refused} {refused:?}");
    }
    let bad = OrgAuthLayer::new(&Org::new("a").credential(Credential::new(&format!("{KEY}\u{e9}")))).unwrap_err();
    text += &format!("{bad} {bad:?}");
    for secret in [KEY, "hunter2"] {
        assert!(!text.contains(secret), "{}", &text[text.find(secret).unwrap_or(0).saturating_sub(200)..][..300]);
        assert!(!String::from_utf8_lossy(&said.0.lock().unwrap()).contains(secret));
    }
    assert!(!said.0.lock().unwrap().is_empty(), "something was logged");
}

// ---------------------------------------------------------------- 11. the retry's promise

#[derive(Clone)]
struct Guarded(#[expect(dead_code, reason = "it is only counted")] Arc<()>);

#[tokio::test(start_paused = true)]
async fn what_is_handed_back_is_what_came_and_every_copy_is_gone() {
    for (status, attempts) in [(429, 1), (429, 3), (503, 1), (503, 4)] {
        let alive = Arc::new(());
        let keys = Arc::new(Mutex::new(Vec::new()));
        let seen = keys.clone();
        let client = service_fn(move |request: Request<Body>| {
            seen.lock().unwrap().push(request.headers().get("idempotency-key").cloned());
            async move {
                tokio::time::sleep(MS).await;
                drop(request);
                Response::builder().status(status).header("retry-after", "1").body(Body::default())
            }
        });
        let retry =
            RateLimitRetryLayer::builder().max_attempts(attempts).max_calls(4).patience(50 * SECOND).build().unwrap();
        let service = Stack::new(pool(&["a"])).retry(retry).build(client).unwrap();
        let mut request = Request::put("/v1/x?y=z")
            .version(http::Version::HTTP_10)
            .body(Full::new(Bytes::from_static(b"\x00\xffbody")))
            .unwrap();
        request.headers_mut().append("x-a", HeaderValue::from_bytes(b"\xfa\xfb").unwrap());
        request.headers_mut().append("x-a", HeaderValue::from_static("2"));
        request.headers_mut().insert("host", HeaderValue::from_static("mine"));
        request.headers_mut().insert("authorization", HeaderValue::from_static("mine"));
        request.extensions_mut().insert(Guarded(alive.clone()));
        request.extensions_mut().insert(Family::new("f"));
        let expected = request.clone();
        let before = Arc::strong_count(&alive);
        let error = service.clone().oneshot(request).await.unwrap_err();
        let back = error.into_request().expect("it comes back");
        assert_eq!(Arc::strong_count(&alive), before, "{status}: attempts keep nothing");
        assert_eq!(back.method(), expected.method());
        assert_eq!(back.uri(), expected.uri());
        assert_eq!(back.version(), expected.version());
        assert_eq!(back.headers(), expected.headers());
        assert_eq!(back.extensions().get::<Family>(), expected.extensions().get::<Family>());
        assert_eq!(back.extensions().len(), expected.extensions().len());
        let body = http_body_util::BodyExt::collect(back.into_body()).await.unwrap().to_bytes();
        assert_eq!(&body[..], b"\x00\xffbody");
        drop(expected);
        assert_eq!(Arc::strong_count(&alive), 1);
        let keys = keys.lock().unwrap();
        assert!(keys.iter().all(Option::is_none), "a PUT is given none");
        let calls = if status == 503 { attempts } else { 4 };
        assert_eq!(keys.len(), calls as usize);
    }
}

fn sized(item: usize, bytes: usize) -> Request<Body> {
    let mut text = format!("{{\"max_tokens\":16,\"item\":{item},\"text\":\"");
    text.extend(std::iter::repeat_n('x', bytes.saturating_sub(text.len() + 2)));
    text.push_str("\"}");
    Request::post("/v1/messages").body(Full::new(text.into())).unwrap()
}

/// Calls whose tokens are worth `parts` of the bucket, drawn at random; gives time ÷ fluid limit and the refusals.
async fn token_run(seed: u64, capacity_s: f64, parts: [f64; 2], requests: Option<f64>) -> (f64, u64, String) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let per_minute = 60_000.0;
    let capacity = per_minute / 60.0 * capacity_s;
    let mut org = OrgConfig::new("a", key("a"))
        .input_tokens_per_minute(per_minute)
        .capacity_s(capacity_s)
        .latency(Latency::new(400.0, 0.3))
        .retry_after(RetryAfter::Ms);
    if let Some(requests) = requests {
        org = org.requests_per_minute(requests);
    }
    let config = Config::new(Dialect::Anthropic).seed(seed).org(org);
    let sizes: Vec<usize> =
        (0..60).map(|_| (4.0 * capacity * (parts[0] + (parts[1] - parts[0]) * rng.f64())) as usize).collect();
    let mean = sizes.iter().map(|bytes| bytes.div_ceil(4) as f64).sum::<f64>() / sizes.len() as f64;
    let cost = sim::Cost { input_tokens: mean, output_tokens: 0.0 };
    let fluid = config.fluid_limit_for(sizes.len() as u64, cost).unwrap();
    let sim = Sim::new(config).unwrap();
    let orgs = pool(&["a"]);
    let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
    let begin = Instant::now();
    let mut drive =
        Drive::iter(service, sizes.into_iter().enumerate().map(|(item, bytes)| (item, sized(item, bytes))), 80)
            .unwrap();
    while let Some((_, result)) = drive.next().await {
        assert_eq!(result.unwrap().status(), 200);
    }
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (60, 0));
    let ratio = begin.elapsed().as_secs_f64() / (fluid.as_secs_f64() + 1.0);
    let what = format!(
        "capacity {capacity_s} s, parts {parts:?}, fluid {fluid:?}, took {:?}, 429s {}",
        begin.elapsed(),
        truth.throttled_429()
    );
    (ratio, truth.throttled_429(), what)
}

#[tokio::test(start_paused = true)]
async fn a_few_large_calls_keep_a_token_quota_busy() {
    let mut all = Vec::new();
    for seed in 0..2 {
        for capacity_s in [2.0, 15.0, 60.0] {
            for parts in [[0.01, 0.05], [0.05, 0.2], [0.2, 0.5], [0.3, 0.9], [0.02, 0.9]] {
                for requests in [None, Some(600.0)] {
                    let (ratio, refused, what) = token_run(seed, capacity_s, parts, requests).await;
                    println!("{ratio:.3} {refused} {what}");
                    all.push(ratio);
                }
            }
        }
    }
    let worst = all.iter().copied().fold(0.0, f64::max);
    assert!(worst < 1.5, "{worst}");
}

#[tokio::test(start_paused = true)]
async fn a_bucket_of_one_request_is_used_as_it_refills() {
    for (per_minute, capacity) in
        [(9.0, 1.0), (5.0, 1.0), (60.0, 1.0), (60.0, 2.0), (60.0, 3.0), (1_900.0, 1.0), (1_900.0, 3.0)]
    {
        let org = OrgConfig::new("a", key("a"))
            .requests_per_minute(per_minute)
            .requests_capacity(capacity)
            .latency(Latency::new(80.0, 0.1));
        let config = Config::new(Dialect::Anthropic).record_arrivals(true).org(org);
        let n = if per_minute > 100.0 { 1_000 } else { 30 };
        let fluid = config.fluid_limit(n).unwrap();
        let sim = Sim::new(config).unwrap();
        let service = Stack::new(pool(&["a"])).build(sim.service()).unwrap();
        let mut drive = Drive::iter(service, (0..n as usize).map(|item| (item, ask(item))), 80).unwrap();
        let begin = Instant::now();
        while let Some((_, result)) = drive.next().await {
            assert_eq!(result.unwrap().status(), 200);
        }
        let ratio = begin.elapsed().as_secs_f64() / (fluid.as_secs_f64() + 0.1);
        let arrivals = &sim.truth().orgs[0].arrivals;
        let gaps: Vec<_> = arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).take(12).collect();
        println!("{per_minute}/min, {capacity}: {ratio:.3}, 429s {}, {gaps:.2?}", sim.truth().throttled_429());
        assert!(ratio < 1.45, "{per_minute}/min, {capacity}: {ratio}");
        assert_eq!(sim.truth().throttled_429(), 0);
    }
}
