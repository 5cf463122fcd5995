//! Attacks on health, giving up and the judge: whatever is done to them, no call hangs, nothing panics, every request ends in one
//! result, nothing is in flight at rest, and no healthy answer is lost.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, advance, sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    health::Breaker,
    judge::{Gather, JudgeLayer},
    observe::Event,
    org::{Circuit, Org, Orgs},
    outcome::{Class, Stamp},
    retry::{Deadline, Exhaustion, RateLimitRetryLayer, RetryError},
    stack::{Stack, Stacked},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";

type Req = Request<Full<Bytes>>;
type Res = Response<Full<Bytes>>;

fn ask() -> Req {
    Request::post("http://x/v1/messages").body(Full::new(Bytes::from_static(b"{}"))).unwrap()
}

fn answer(status: u16, kind: &str, body: impl Into<Bytes>) -> Res {
    let mut response = Response::builder().status(status);
    if !kind.is_empty() {
        response = response.header("content-type", kind);
    }
    response.body(Full::new(body.into())).unwrap()
}

/// What the judge makes of an answer.
async fn class(status: u16, headers: &[(&str, &str)], body: &str) -> Class {
    class_by(JudgeLayer::new(), status, headers, body).await
}

async fn class_by(layer: JudgeLayer, status: u16, headers: &[(&str, &str)], body: &str) -> Class {
    let mut response = Response::builder().status(status);
    for (name, value) in headers {
        response = response.header(*name, *value);
    }
    let mut response = Some(response.body(Full::new(Bytes::from(body.to_owned()))).unwrap());
    let client = service_fn(move |_: Req| std::future::ready(Ok::<_, Infallible>(response.take().unwrap())));
    let answer = layer.layer(client).oneshot(ask()).await.unwrap();
    let stamp = answer.extensions().get::<Stamp>().unwrap().clone();
    match stamp.tail {
        None => stamp.outcome.class,
        Some(tail) => {
            let told = Arc::new(Mutex::new(None));
            let tell = told.clone();
            tail.on_end(move |ended| *tell.lock().unwrap() = ended.outcome);
            let _ = answer.into_body().collect().await;
            let told = told.lock().unwrap().expect("told");
            told.class
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_healthy_answer_is_taken_for_another() {
    let json = &[("content-type", JSON)][..];
    let events = &[("content-type", EVENTS)][..];
    let braces = format!(r#"{{"type":"message","content":[{{"type":"text","text":"{}"}}]}}"#, "{".repeat(1 << 20));
    let marked = r#"\"error\":{\"message\":1} event: error \"choices\":[] \"chat.completion.chunk\" data: [DONE] \n\nevent: error\ndata: x\n\n"#;
    let said_by_chat = format!(
        r#"{{"object":"chat.completion","choices":[{{"message":{{"role":"assistant","content":"{marked}"}},"finish_reason":"stop"}}]}}"#
    );
    let said_by_claude = format!(
        r#"{{"type":"message","role":"assistant","content":[{{"type":"text","text":"{marked}"}}],"stop_reason":"end_turn"}}"#
    );
    let tool = r#"{"type":"message","role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":{"error":{"message":"m"},"choices":[],"content":[]}}],"stop_reason":"tool_use"}"#;
    let openai_tool = r#"{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}],"refusal":null},"finish_reason":"tool_calls"}]}"#;
    let streamed = format!(
        "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"text\":\"{marked}\"}}}}\n\nevent: message_stop\ndata: {{}}\n\n"
    );
    let cr = streamed.replace('\n', "\r");
    for (headers, body) in [
        (json, braces.as_str()),
        (json, &said_by_chat),
        (json, &said_by_claude),
        (json, tool),
        (json, openai_tool),
        (events, &streamed),
        (events, &cr),
        (events, "\u{feff}data: hello\n\n"),
        (json, r#"{"error":{}}"#),
        (json, r#"{"error":""}"#),
        (json, r#"{"error":false}"#),
        (json, r#"{"error":null,"content":[]}"#),
        (json, r#"{"content":[]}"#),
        (json, "[]"),
        (json, "[1,2"),
        (json, "\u{feff}{\"a\":1}"),
        (json, "null"),
        (json, ""),
        (json, "{\"a\":1}\u{0}"),
        (json, "{\"a\":1}\n;"),
        (json, "{\"a\":1}\n[1]"),
        (json, "{\"a\":1}\n\"x\""),
        (json, ")]}',\n{\"a\":1}"),
        (json, "{\"choices\":[{\"message\":{\"content\":\"a\"}}]}\n\n<!-- served by x -->"),
        (json, "{{name}} is a template"),
        (&[("content-type", "application/x-ndjson")], "{\"a\":1}\n{\"b\":"),
        (&[], "{\"a\":"),
        (&[("content-type", JSON), ("content-encoding", "gzip")], "{\u{1}\u{2}"),
        (json, r#"{"question":"which?","choices":[{"id":1,"label":"red"},{"id":2,"label":"blue"}]}"#),
        (json, r#"{"data":{"choices":[]}}"#),
        (json, r#"{"object":"list","data":[]}"#),
        (json, r#"{"result":{"error":{"message":"m"}}}"#),
    ] {
        for gather in [Gather::Whole, Gather::ErrorsOnly] {
            let layer = JudgeLayer::new().gather(gather);
            let shown: String = body.chars().take(80).collect();
            assert_eq!(class_by(layer, 200, headers, body).await, Class::Ok, "{gather:?} {headers:?} {shown:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_cut_off_is_told_from_what_has_more_after_it() {
    let json = &[("content-type", JSON)][..];
    for (body, expected) in [
        (r#"{"a":"x"#, Class::Transport),
        (r#"{"a":"x\"#, Class::Transport),
        (r#"{"a":"x\u00"#, Class::Transport),
        (r#"{"a":tr"#, Class::Transport),
        (r#"{"a":-"#, Class::Transport),
        (r#"{"a":1."#, Class::Transport),
        (r#"{"a":1e"#, Class::Transport),
        (r#"{"a":1"#, Class::Transport),
        (r#"{"a":[1,"#, Class::Transport),
        (r#"{"a":1,"#, Class::Transport),
        ("{", Class::Transport),
        (r#"{"a":1}x"#, Class::Ok),
    ] {
        assert_eq!(class(200, json, body).await, expected, "{body}");
    }
}

/// A usage limit that ends at that date.
fn limits(date: SystemTime) -> Res {
    let date = humantime::format_rfc3339_seconds(date).to_string();
    let body = format!(
        r#"{{"type":"error","error":{{"type":"invalid_request_error","message":"You have reached your specified API usage limits. You will regain access on {} at {} UTC."}}}}"#,
        &date[..10],
        &date[11..16]
    );
    answer(400, JSON, body)
}

struct Rig {
    stack: Stacked<tower::util::BoxCloneSyncService<Req, Res, Infallible>>,
    orgs: Orgs,
    calls: Arc<Mutex<Vec<(String, Instant)>>>,
    /// Calls that found the circuit open.
    trespassed: Arc<AtomicUsize>,
}

/// A stack whose orgs answer by this, after a tenth of a second.
fn rig(
    names: &[&str],
    of_stack: impl FnOnce(Stack) -> Stack,
    answers: impl Fn(&Org, usize) -> Res + Send + Sync + 'static,
) -> Rig {
    let orgs = Orgs::new(names.iter().map(|name| Org::new(name).cap(8))).unwrap();
    let (calls, trespassed) = (Arc::new(Mutex::new(vec![])), Arc::new(AtomicUsize::new(0)));
    let (seen, over, answers) = (calls.clone(), trespassed.clone(), Arc::new(answers));
    let stack = of_stack(Stack::new(orgs.clone()))
        .build_with(move |org| {
            let (org, seen, over, answers) = (org.clone(), seen.clone(), over.clone(), answers.clone());
            let client = service_fn(move |_: Req| {
                let n = {
                    let mut seen = seen.lock().unwrap();
                    seen.push((org.name().to_owned(), Instant::now()));
                    seen.len() - 1
                };
                if matches!(org.circuit(), Circuit::Open { until } if until > Instant::now()) {
                    over.fetch_add(1, SeqCst);
                }
                let (org, answers) = (org.clone(), answers.clone());
                async move {
                    sleep(100 * MS).await;
                    Ok::<_, Infallible>(answers(&org, n))
                }
            });
            tower::util::BoxCloneSyncService::new(client)
        })
        .unwrap();
    Rig { stack, orgs, calls, trespassed }
}

#[derive(Debug, PartialEq)]
enum End {
    Ok,
    Refused(u16),
    Exhausted(Exhaustion, Class),
    Inner(Class),
}

impl Rig {
    async fn ask(&self) -> End {
        self.send(ask()).await
    }

    async fn send(&self, request: Req) -> End {
        match self.stack.clone().oneshot(request).await {
            Ok(answer) if answer.status().is_success() => End::Ok,
            Ok(answer) => End::Refused(answer.status().as_u16()),
            Err(RetryError::Exhausted(e)) => End::Exhausted(e.reason, e.last.class),
            Err(RetryError::Inner(e)) => End::Inner(e.class()),
            Err(other) => panic!("{other}"),
        }
    }

    fn calls(&self) -> usize {
        self.calls.lock().unwrap().len()
    }

    #[track_caller]
    fn assert_at_rest(&self) {
        for org in self.orgs.iter() {
            let at = org.family(&tower_quota::org::Family::default()).snapshot();
            assert_eq!((at.in_flight, at.waiting), (0, 0), "{}", org.name());
        }
    }
}

async fn all<F: Future<Output = End>>(futures: impl IntoIterator<Item = F>) -> Vec<End> {
    futures_util::future::join_all(futures).await
}

fn tally(ends: &[End]) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for end in ends {
        *counts.entry(format!("{end:?}")).or_insert(0) += 1;
    }
    format!("{counts:?}")
}

#[tokio::test(start_paused = true)]
async fn hundreds_who_wait_while_all_circuits_are_open_all_end() {
    let begin = Instant::now();
    let rig = rig(
        &["a", "b", "c"],
        |s| s,
        move |_, _| {
            if begin.elapsed() < 20 * SECOND { answer(500, "", "") } else { answer(200, "", "ok") }
        },
    );
    let ends = timeout(3_600 * SECOND, all((0..400).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(
        ends.iter().all(|end| matches!(end, End::Ok | End::Exhausted(Exhaustion::Attempts, _))),
        "{}",
        tally(&ends)
    );
    assert_eq!(rig.trespassed.load(SeqCst), 0, "no org is called while its circuit is open");
    rig.assert_at_rest();
    assert_eq!(rig.ask().await, End::Ok, "it serves again");
}

#[tokio::test(start_paused = true)]
async fn a_lone_org_that_fails_for_a_minute_is_back_within_five_seconds() {
    let begin = Instant::now();
    let rig = rig(
        &["a"],
        |s| s,
        move |_, _| {
            let at = begin.elapsed();
            if at > 2 * SECOND && at < 62 * SECOND { answer(500, "", "") } else { answer(200, "", "ok") }
        },
    );
    let ends = timeout(3_600 * SECOND, all((0..500).map(|_| rig.ask()))).await.expect("nobody hangs");
    let after = rig.calls.lock().unwrap().iter().map(|c| c.1 - begin).find(|at| *at >= 62 * SECOND);
    assert!(
        ends.iter().all(|end| matches!(end, End::Ok | End::Exhausted(Exhaustion::Attempts, _))),
        "{}",
        tally(&ends)
    );
    assert!(ends.iter().filter(|end| **end != End::Ok).count() < 10, "the run is not lost: {}", tally(&ends));
    assert!(after.unwrap() < 67 * SECOND, "{after:?}");
    assert_eq!(rig.trespassed.load(SeqCst), 0);
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn an_org_that_dies_while_it_is_probed_ends_all_who_wait() {
    let begin = Instant::now();
    let rig = rig(&["a"], |s| s, move |_, n| if n < 5 { answer(500, "", "") } else { answer(401, "", "") });
    let ends = timeout(3_600 * SECOND, all((0..100).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(ends.iter().all(|end| *end == End::Inner(Class::NoOrg)), "{}", tally(&ends));
    assert!(begin.elapsed() < 5 * SECOND);
    rig.assert_at_rest();
    let org = rig.orgs.get("a").unwrap();
    assert!(org.is_out());
    assert!(org.bring_back());
    let end = timeout(60 * SECOND, rig.ask()).await.unwrap();
    assert_eq!(end, End::Inner(Class::NoOrg), "asked once more, and refused");
}

#[tokio::test(start_paused = true)]
async fn a_lone_parked_org_ends_calls_after_patience_and_comes_back_after_its_date() {
    let system = SystemTime::now();
    let begin = Instant::now();
    // Whole minutes are all that it names.
    let lasts = Duration::from_secs(2 * 3_600);
    let rig = rig(
        &["a"],
        |s| s,
        move |_, _| {
            if begin.elapsed() < lasts { limits(system + lasts) } else { answer(200, "", "ok") }
        },
    );
    let ends = timeout(3_600 * SECOND, all((0..50).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(ends.iter().all(|end| matches!(end, End::Exhausted(Exhaustion::Stalled, _))), "{}", tally(&ends));
    assert_eq!(rig.calls(), 1);
    rig.assert_at_rest();
    assert!(!rig.orgs.get("a").unwrap().is_out());
    advance(2 * 3_600 * SECOND).await;
    assert_eq!(timeout(120 * SECOND, rig.ask()).await.expect("it is asked again"), End::Ok);
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn an_org_that_names_a_date_that_has_passed_is_asked_again_and_not_out_for_good() {
    let past = SystemTime::now() - 30 * SECOND;
    let rig = rig(&["a"], |s| s, move |_, n| if n == 0 { limits(past) } else { answer(200, "", "ok") });
    let first = timeout(3_600 * SECOND, rig.ask()).await.unwrap();
    assert_eq!(first, End::Ok);
    assert!(!rig.orgs.get("a").unwrap().is_out());
    advance(120 * SECOND).await;
    assert_eq!(rig.ask().await, End::Ok);
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn clock_leaps_while_open_half_open_or_parked_hang_nobody() {
    for leap in [3_600, 40 * 24 * 3_600] {
        for stand in ["open", "half-open", "parked"] {
            let system = SystemTime::now();
            let rig = rig(
                &["a"],
                |s| s,
                move |_, n| match (stand, n) {
                    ("parked", 0) => limits(system + 1_800 * SECOND),
                    ("parked", _) => answer(200, "", "ok"),
                    (_, 0..5) => answer(500, "", ""),
                    _ => answer(200, "", "ok"),
                },
            );
            let wait = match stand {
                "open" => 700 * MS,
                "half-open" => 1_300 * MS,
                _ => 5 * SECOND,
            };
            let driver = all((0..50).map(|_| rig.ask()));
            tokio::pin!(driver);
            let _ = timeout(wait, &mut driver).await;
            advance(leap * SECOND).await;
            let ends = timeout(3_600 * SECOND, driver).await.expect("nobody hangs");
            assert!(ends.iter().all(|end| *end == End::Ok), "{leap} while {stand}: {}", tally(&ends));
            rig.assert_at_rest();
        }
    }
}

type Until = fn(Instant) -> Instant;

/// Says what it is told to.
struct Absurd {
    until: Until,
    probes: usize,
}

impl Breaker for Absurd {
    fn succeeded(&mut self, _: u64, _: Instant, _: Instant) {}

    fn failed(&mut self, now: Instant) -> Option<Instant> {
        Some((self.until)(now))
    }

    fn probe_failed(&mut self, now: Instant) -> Instant {
        (self.until)(now)
    }

    fn probes(&self) -> usize {
        self.probes
    }
}

#[tokio::test(start_paused = true)]
async fn absurd_breakers_hang_nobody() {
    let kinds: [(&str, Until); 4] = [
        ("past", |now| now.checked_sub(SECOND).unwrap_or(now)),
        ("now", |now| now),
        ("a century", |now| now + Duration::from_secs(100 * 365 * 24 * 3_600)),
        ("as far as it goes", |now| {
            let mut far = now;
            for bits in (0..63).rev() {
                far = far.checked_add(Duration::from_secs(1 << bits)).unwrap_or(far);
            }
            far
        }),
    ];
    for (kind, until) in kinds {
        for probes in [0, 1, usize::MAX] {
            let rig = rig(
                &["a"],
                |s| s.breaker(move |_| Box::new(Absurd { until, probes })),
                |_, n| if n % 2 == 0 { answer(500, "", "") } else { answer(200, "", "ok") },
            );
            let ends = timeout(7_200 * SECOND, all((0..30).map(|_| rig.ask()))).await.expect("nobody hangs");
            assert!(
                ends.iter().all(|end| *end == End::Ok || matches!(end, End::Exhausted(..))),
                "{kind}, {probes}: {}",
                tally(&ends)
            );
            rig.assert_at_rest();
        }
    }
}

/// Panics the first time a probe is told of.
struct Panics(Arc<AtomicUsize>, &'static str);

impl Panics {
    fn at(&self, place: &str) {
        if place == self.1 && self.0.fetch_add(1, SeqCst) == 0 {
            panic!("the breaker's own fault");
        }
    }
}

impl Breaker for Panics {
    fn succeeded(&mut self, _: u64, _: Instant, _: Instant) {
        self.at("succeeded");
    }

    fn failed(&mut self, now: Instant) -> Option<Instant> {
        self.at("failed");
        Some(now + SECOND)
    }

    fn probe_failed(&mut self, now: Instant) -> Instant {
        self.at("probe_failed");
        now + SECOND
    }

    fn closed(&mut self, _: Instant) {
        self.at("closed");
    }
}

#[tokio::test(start_paused = true)]
async fn a_breaker_that_panics_fails_its_call_and_keeps_no_probes_place() {
    for place in ["failed", "succeeded", "probe_failed", "closed"] {
        let rig = rig(
            &["a"],
            |s| s.breaker(move |_| Box::new(Panics(Arc::default(), place))),
            |_, n| if n < 2 { answer(500, "", "") } else { answer(200, "", "ok") },
        );
        let rig = Arc::new(rig);
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let rig = rig.clone();
                tokio::spawn(async move { rig.ask().await })
            })
            .collect();
        let mut panicked = 0;
        for task in tasks {
            match timeout(300 * SECOND, task).await.unwrap_or_else(|_| panic!("{place}: it hangs")) {
                Ok(end) => assert_eq!(end, End::Ok, "{place}"),
                Err(_) => panicked += 1,
            }
        }
        assert!(panicked <= 1, "{place}: {panicked}");
        rig.assert_at_rest();
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_at_every_await_nothing_is_kept() {
    // Calls fail, are throttled, are probed; one call is dropped after each so-many milliseconds.
    for drop_at in (0..6_000).step_by(50) {
        let rig = rig(
            &["a"],
            |s| s,
            move |_, n| match n {
                0..7 => answer(500, "", ""),
                7 => answer(429, "", ""),
                _ => answer(200, "", "ok"),
            },
        );
        let mut doomed = Box::pin(all((0..20).map(|_| rig.ask())));
        let _ = timeout(drop_at * MS, &mut doomed).await;
        drop(doomed);
        rig.assert_at_rest();
        let ends = timeout(600 * SECOND, all((0..10).map(|_| rig.ask()))).await.expect("nobody hangs");
        assert!(
            ends.iter().all(|end| *end == End::Ok || matches!(end, End::Exhausted(Exhaustion::Attempts, _))),
            "{drop_at}: {}",
            tally(&ends)
        );
        rig.assert_at_rest();
        assert_eq!(rig.trespassed.load(SeqCst), 0, "{drop_at}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_probes_stream_that_is_dropped_gives_its_place_back() {
    let rig = rig(
        &["a"],
        |s| s.judge(JudgeLayer::new().gather(Gather::ErrorsOnly)),
        |_, n| if n < 5 { answer(500, "", "") } else { answer(200, EVENTS, "data: x\n\n") },
    );
    let mut ends = vec![];
    for _ in 0..5 {
        ends.push(timeout(60 * SECOND, rig.ask()).await.unwrap());
    }
    assert_eq!(ends.iter().filter(|end| **end == End::Ok).count(), 4, "{}", tally(&ends));
    // `ask` drops the body unread.
    rig.assert_at_rest();
    let answer = timeout(60 * SECOND, rig.stack.clone().oneshot(ask())).await.unwrap().unwrap();
    let family = tower_quota::org::Family::default();
    let org = rig.orgs.get("a").unwrap().family(&family);
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        frame.unwrap();
    }
    drop(body);
    assert_eq!(org.circuit(), Circuit::Closed);
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn observers_and_checks_that_panic_or_call_back_break_nothing() {
    let rig = rig(
        &["a"],
        |s| {
            s.judge(JudgeLayer::new().validate(|_, bytes| {
                assert!(bytes != "panic", "the check's own fault");
                Ok(())
            }))
        },
        |_, n| match n {
            0..5 => answer(500, "", ""),
            5 => answer(200, "", "panic"),
            _ => answer(200, "", "ok"),
        },
    );
    let org = rig.orgs.get("a").unwrap().clone();
    org.observe(|_: &Event| panic!("the observer's own fault"));
    let told = Arc::new(AtomicUsize::new(0));
    org.observe({
        let (org, told, stack) = (org.clone(), told.clone(), Mutex::new(rig.stack.clone()));
        move |event: &Event| {
            told.fetch_add(1, SeqCst);
            let _ = (org.snapshot(), org.health(), org.circuit(), org.is_held(), event.to_string());
            org.bring_back();
            if let Ok(mut stack) = stack.try_lock() {
                drop(stack.call(ask()));
            }
        }
    });
    let ends = timeout(600 * SECOND, all((0..20).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(ends.iter().all(|end| *end == End::Ok), "{}", tally(&ends));
    assert!(told.load(SeqCst) > 0);
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn a_deadline_of_zero_and_one_attempt_end_at_once() {
    let rig = rig(
        &["a"],
        |s| s.retry(RateLimitRetryLayer::builder().max_attempts(1).build().unwrap()),
        |_, _| answer(500, "", ""),
    );
    assert_eq!(rig.ask().await, End::Exhausted(Exhaustion::Attempts, Class::Overloaded));
    for at in [Instant::now(), Instant::now() - 50 * MS] {
        let mut request = ask();
        request.extensions_mut().insert(Deadline(at));
        assert_eq!(rig.send(request).await, End::Exhausted(Exhaustion::Deadline, Class::Local));
    }
    let ends = timeout(600 * SECOND, all((0..50).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(ends.iter().all(|end| matches!(end, End::Exhausted(Exhaustion::Attempts, _))), "{}", tally(&ends));
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn orgs_that_come_and_go_lose_nobody() {
    let rig = rig(
        &["a"],
        |s| s,
        move |org, n| match org.name() {
            "a" => answer(500, "", ""),
            "b" if n % 30 == 0 => answer(429, "", ""),
            "b" => answer(200, "", "ok"),
            _ => answer(401, "", ""),
        },
    );
    let members = rig.stack.members();
    let driver = all((0..100).map(|_| rig.ask()));
    let changes = async {
        for name in ["c", "d", "b"] {
            sleep(200 * MS).await;
            members.add(Org::new(name).cap(4)).unwrap();
        }
        sleep(300 * MS).await;
        drop(members.remove("a"));
        sleep(100 * MS).await;
        drop(members.remove("c"));
    };
    let got = timeout(3_600 * SECOND, async { tokio::join!(driver, changes) }).await;
    let (ends, ()) = got.expect("nobody hangs");
    assert!(
        ends.iter().all(|end| matches!(end, End::Ok | End::Exhausted(Exhaustion::Attempts, _))),
        "{}",
        tally(&ends)
    );
    rig.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn patience_shorter_than_a_hold_gives_up_at_once_and_leaves_nothing() {
    let rig = rig(
        &["a"],
        |s| s.retry(RateLimitRetryLayer::builder().patience(5 * SECOND).build().unwrap()),
        |_, n| {
            let mut refused = answer(if n == 0 { 429 } else { 200 }, "", "");
            if n == 0 {
                refused.headers_mut().insert("retry-after", "60".parse().unwrap());
            }
            refused
        },
    );
    let begin = Instant::now();
    let ends = timeout(600 * SECOND, all((0..20).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(ends.iter().all(|end| matches!(end, End::Exhausted(Exhaustion::Stalled, _))), "{}", tally(&ends));
    assert!(begin.elapsed() < 6 * SECOND);
    rig.assert_at_rest();
    advance(61 * SECOND).await;
    assert_eq!(rig.ask().await, End::Ok);
}

#[tokio::test(start_paused = true)]
async fn an_observer_may_call_and_poll_the_stack_that_tells_it() {
    let rig = rig(
        &["a"],
        |s| s.retry(RateLimitRetryLayer::builder().max_attempts(1).build().unwrap()),
        |_, n| if n < 5 { answer(500, "", "") } else { answer(200, "", "ok") },
    );
    let org = rig.orgs.get("a").unwrap().clone();
    let (told, kept) = (Arc::new(Mutex::new(vec![])), Arc::new(Mutex::new(vec![])));
    org.observe({
        let (told, kept, stack) = (told.clone(), kept.clone(), Mutex::new(rig.stack.clone()));
        move |event: &Event| {
            told.lock().unwrap().push(event.to_string());
            let stack = stack.lock().unwrap().clone();
            let mut call = Box::pin(stack.oneshot(ask()));
            let _ = call.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
            kept.lock().unwrap().push(call);
        }
    });
    for _ in 0..5 {
        assert_ne!(rig.ask().await, End::Ok);
    }
    // Nobody waits when the circuit may be probed.
    kept.lock().unwrap().clear();
    advance(SECOND).await;
    assert_eq!(timeout(600 * SECOND, rig.ask()).await.unwrap(), End::Ok);
    assert!(told.lock().unwrap().iter().any(|event| event.contains("half-open")), "{:?}", told.lock().unwrap());
}

#[tokio::test(start_paused = true)]
async fn whatever_is_answered_and_whoever_is_dropped_every_call_ends_and_nothing_is_kept() {
    for seed in 0..150 {
        let dice = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
        let names = &["a", "b", "c"][..1 + seed as usize % 3];
        let system = SystemTime::now();
        let gather = if seed % 2 == 0 { Gather::Whole } else { Gather::ErrorsOnly };
        let rig = {
            let dice = dice.clone();
            rig(
                names,
                |s| s.judge(JudgeLayer::new().gather(gather)),
                move |_, _| match dice.lock().unwrap().u32(0..60) {
                    0..15 => answer(500, "", ""),
                    15..19 => answer(529, JSON, r#"{"error":{"type":"overloaded_error"}}"#),
                    19..22 => {
                        let mut refused = answer(429, "", "");
                        refused.headers_mut().insert("retry-after-ms", "300".parse().unwrap());
                        refused
                    }
                    22 => answer(401, "", ""),
                    23 => limits(system + 600 * SECOND),
                    24..26 => answer(200, JSON, r#"{"choices":[]}"#),
                    26..28 => answer(200, JSON, r#"{"error":{"code":500}}"#),
                    28..30 => answer(200, EVENTS, ""),
                    30..32 => answer(400, "", ""),
                    32 => answer(403, "", ""),
                    33..40 => answer(200, EVENTS, "data: x\n\n"),
                    _ => answer(200, JSON, "{}"),
                },
            )
        };
        let roll = |n: u32| dice.lock().unwrap().u32(0..n);
        let members = rig.stack.members();
        let started = AtomicUsize::new(0);
        let jobs = (0..60).map(|_| async {
            sleep(roll(5_000) * MS).await;
            started.fetch_add(1, SeqCst);
            let mut request = ask();
            if roll(10) == 0 {
                request.extensions_mut().insert(Deadline(Instant::now() + roll(3_000) * MS));
            }
            let patience = if roll(3) == 0 { roll(4_000) * MS } else { 100_000 * SECOND };
            timeout(patience, async {
                let end = rig.stack.clone().oneshot(request).await;
                if let Ok(answer) = end {
                    let hold = roll(3_000) * MS;
                    let mut body = answer.into_body();
                    let _ = body.frame().await;
                    sleep(hold).await;
                    if hold.as_millis() % 2 == 0 {
                        let _ = body.collect().await;
                    }
                }
            })
            .await
            .is_ok()
        });
        let meddler = async {
            for _ in 0..20 {
                sleep(roll(700) * MS).await;
                let name = names[roll(names.len() as u32) as usize];
                match roll(5) {
                    0 => drop(members.disable(name)),
                    1 => drop(members.drain(name)),
                    _ => drop(members.enable(name)),
                }
            }
            sleep(60 * SECOND).await;
            names.iter().for_each(|name| drop(members.enable(name)));
        };
        let all = async { tokio::join!(futures_util::future::join_all(jobs), meddler) };
        timeout(50_000 * SECOND, all)
            .await
            .unwrap_or_else(|_| panic!("{seed}: somebody hangs: {:?}", members.snapshots()));
        for org in rig.orgs.iter() {
            let at = org.family(&tower_quota::org::Family::default()).snapshot();
            assert_eq!((at.in_flight, at.waiting), (0, 0), "{seed} {}", org.name());
        }
        assert_eq!(rig.trespassed.load(SeqCst), 0, "{seed}");
        assert!(members.waiting().values().all(|waiting| *waiting == 0), "{seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_parked_org_whose_provider_is_late_is_asked_every_minute_until_it_serves() {
    let (system, begin) = (SystemTime::now(), Instant::now());
    let late = 600 * SECOND;
    // The date in its words stays; the clock that it names it by is the answer's.
    let rig = rig(
        &["a"],
        |s| s,
        move |_, _| {
            if begin.elapsed() > late {
                return answer(200, "", "ok");
            }
            let mut refused = limits(system + 120 * SECOND);
            let now = httpdate::fmt_http_date(system + begin.elapsed());
            refused.headers_mut().insert("date", now.parse().unwrap());
            refused
        },
    );
    timeout(3_600 * SECOND, all((0..10).map(|_| rig.ask()))).await.expect("nobody hangs");
    assert!(rig.calls() > 5, "{}", rig.calls());
    rig.assert_at_rest();
    advance(120 * SECOND).await;
    assert_eq!(timeout(120 * SECOND, rig.ask()).await.expect("it is asked again"), End::Ok);
}
