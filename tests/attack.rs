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
    judge::{Gather, JudgeLayer},
    org::{Credential, Dialect, Family, Org, Orgs, OutReason},
    outcome::{Class, DEFAULT_CEILING, Outcome, Stamped},
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
        AimdLimitLayer::with_settings(org, &settings).classify(Stamped).layer(metered)
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
    let sim = Sim::new(Config::new(sim::Dialect::Anthropic).org(faulty(fault)).seed(k as u64)).unwrap();
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
                if k > 100 {
                    step = 97;
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_dropped_midway_gives_its_slot_back() {
    for frames in 0..3 {
        let sim = Sim::new(Config::new(sim::Dialect::Anthropic).org(faulty("ok"))).unwrap();
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
        let sim = Sim::new(Config::new(sim::Dialect::Anthropic).org(faulty(fault))).unwrap();
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
        let step = if begin.elapsed() < 2 * SECOND { MS } else { 250 * MS };
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
            rest.remove(i);
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
        let mut config = Config::new(sim::Dialect::Anthropic).seed(order as u64);
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
            Config::new(sim::Dialect::Anthropic)
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
    let calls = std::env::var("ATTACK_CALLS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
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
            .classifier(tower_quota::outcome::ByStatus)
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
