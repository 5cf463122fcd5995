//! Streams through the judge: handed on as they come, and what they have used told at their end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    future::ready,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    client,
    judge::{Answer, EmptyPolicy, Gather, JudgeLayer},
    org::{Credential, Org, Orgs},
    outcome::{Class, Ended, Error, Outcome, Stamp, Tail, Usage},
    sim::{Config, Dialect, Latency, OrgConfig, Sim, SimService},
    stack::Stack,
};

use support::{
    Script,
    Step::{self, Break, Data, Hang, Trailers},
};

const EVENTS: &str = "text/event-stream";
const JSON: &str = "application/json";

const START: &str = concat!(
    "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n",
    "event: content_block_delta\ndata: {\"delta\":{\"type\":\"text_delta\",\"text\":\"a\"}}\n\n",
);
const DELTA: &str = "event: message_delta\ndata: {\"usage\":{\"output_tokens\":15}}\n\n";
const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

fn used(input: u64, output: u64) -> Option<Usage> {
    Some(Usage::new(input, output))
}

/// What is told at the end of a stream, each time that it is.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Ended>>>);

impl Told {
    fn by(tail: &Tail) -> Self {
        let told = Told::default();
        let tell = told.clone();
        tail.on_end(move |ended| tell.0.lock().unwrap().push(*ended));
        told
    }

    fn all(&self) -> Vec<Ended> {
        self.0.lock().unwrap().clone()
    }

    #[track_caller]
    fn assert(&self, usage: Option<Usage>, complete: bool) {
        let told: Vec<_> = self.all().iter().map(|ended| (ended.usage, ended.complete)).collect();
        assert_eq!(told, [(usage, complete)]);
    }

    /// What the stream as a whole means; `None` if nobody is to blame for how it ended.
    #[track_caller]
    fn class(&self) -> Option<Class> {
        let told = self.all();
        assert_eq!(told.len(), 1);
        told[0].outcome.map(|outcome| outcome.class)
    }
}

fn stamp<B>(response: &Response<B>) -> &Stamp {
    response.extensions().get().expect("stamped")
}

fn tail<B>(response: &Response<B>) -> &Tail {
    stamp(response).tail.as_ref().expect("handed through")
}

fn through() -> JudgeLayer {
    JudgeLayer::new().gather(Gather::ErrorsOnly)
}

async fn judge(layer: &JudgeLayer, kind: &str, body: Script) -> Response<Answer<Script>> {
    let mut response = Response::builder().header("content-type", kind).body(body).ok();
    let client = service_fn(move |_: Request<String>| ready(Ok::<_, io::Error>(response.take().unwrap())));
    layer.layer(client).oneshot(Request::new(String::new())).await.unwrap()
}

/// The body of a stream that is handed through, and what is told at its end.
async fn stream(kind: &str, steps: impl IntoIterator<Item = Step>) -> (Answer<Script>, Told) {
    let answer = judge(&through(), kind, Script::new(steps).coy()).await;
    let told = Told::by(tail(&answer));
    (answer.into_body(), told)
}

// A stream as it passes.

#[tokio::test]
async fn every_part_is_handed_on_at_once_and_is_the_very_one_that_came() {
    // Cut within events and lines, and nothing more comes for now.
    let parts: [&'static str; 5] = [&START[..30], &START[30..], "data", ": {\"usage\":{\"outp", "ut_tokens\":15}}\n\n"];
    let (mut body, told) = stream(EVENTS, parts.map(Data).into_iter().chain([Hang])).await;
    for part in parts {
        let frame = assert_ready!(task::spawn(body.frame()).poll()).unwrap().unwrap();
        let data = frame.into_data().unwrap();
        assert_eq!(data, part);
        assert_eq!(data.as_ptr(), part.as_ptr(), "not copied");
    }
    assert_pending!(task::spawn(body.frame()).poll());
    assert_eq!(told.all(), []);
    drop(body);
    told.assert(used(25, 15), false);
}

#[tokio::test]
async fn the_end_is_told_with_the_last_part_if_the_body_knows_it_to_be_the_last() {
    for coy in [false, true] {
        let script = Script::new([Data(START), Data(STOP)]);
        let answer = judge(&through(), EVENTS, if coy { script.coy() } else { script }).await;
        let told = Told::by(tail(&answer));
        let mut body = answer.into_body();
        body.frame().await.unwrap().unwrap();
        assert_eq!(told.all(), []);
        body.frame().await.unwrap().unwrap();
        assert_eq!(told.all().len(), usize::from(!coy));
        assert!(body.frame().await.is_none());
        drop(body);
        told.assert(used(25, 1), true);
    }
}

#[tokio::test]
async fn the_end_is_told_after_trailers() {
    let answer = judge(&through(), EVENTS, Script::new([Data(START), Data(STOP), Trailers])).await;
    let told = Told::by(tail(&answer));
    let mut body = answer.into_body();
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
        assert_eq!(told.all(), []);
    }
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    told.assert(used(25, 1), true);
}

#[tokio::test]
async fn a_stream_that_breaks_off_tells_what_it_has_said() {
    for (steps, usage, complete) in [
        (vec![Break], None, false),
        (vec![Data(START), Break], used(25, 1), false),
        (vec![Data(START), Data(DELTA), Break], used(25, 15), false),
        (vec![Data(START), Data(DELTA), Data(STOP), Break], used(25, 15), true),
    ] {
        let (mut body, told) = stream(EVENTS, steps).await;
        let error: Error = loop {
            if let Err(error) = body.frame().await.unwrap() {
                break error;
            }
        };
        assert_eq!(error.class(), Class::Transport);
        told.assert(usage, complete);
        drop(body);
        told.assert(usage, complete);
    }
}

#[tokio::test]
async fn a_stream_that_ends_without_its_last_event_is_not_complete() {
    let (body, told) = stream(EVENTS, [Data(START), Data(DELTA)]).await;
    body.collect().await.unwrap();
    told.assert(used(25, 15), false);
}

#[tokio::test]
async fn a_stream_that_is_dropped_tells_what_it_has_said() {
    for (read, usage, complete) in
        [(0, None, false), (1, used(25, 1), false), (2, used(25, 15), false), (3, used(25, 15), true)]
    {
        let (mut body, told) = stream(EVENTS, [Data(START), Data(DELTA), Data(STOP), Hang]).await;
        for _ in 0..read {
            body.frame().await.unwrap().unwrap();
        }
        assert_eq!(told.all(), []);
        drop(body);
        told.assert(usage, complete);
    }
    // With its head, and with a frame that is being waited for.
    let answer = judge(&through(), EVENTS, Script::new([Hang])).await;
    let told = Told::by(tail(&answer));
    drop(answer);
    told.assert(None, false);
    let (mut body, told) = stream(EVENTS, [Data(START), Hang]).await;
    body.frame().await.unwrap().unwrap();
    let mut waiting = task::spawn(async move { body.frame().await.map(drop) });
    assert_pending!(waiting.poll());
    drop(waiting);
    told.assert(used(25, 1), false);
}

#[tokio::test]
async fn whoever_listens_after_the_end_is_told_at_once() {
    let answer = judge(&through(), EVENTS, Script::new([Data(START), Data(STOP)])).await;
    let tail = tail(&answer).clone();
    assert_eq!(tail.ended(), None);
    answer.into_body().collect().await.unwrap();
    let whole = Ended::new(used(25, 1), true).outcome(Outcome::of(Class::Ok));
    assert_eq!(tail.ended(), Some(whole));
    Told::by(&tail).assert(used(25, 1), true);
}

#[tokio::test]
async fn a_listener_that_panics_does_so_once_and_spoils_nothing() {
    let answer = judge(&through(), EVENTS, Script::new([Data(START), Break])).await;
    tail(&answer).on_end(|_| panic!("in the listener"));
    let told = Told::by(tail(&answer));
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    let polled = catch_unwind(AssertUnwindSafe(|| task::spawn(body.frame()).poll().map(drop)));
    assert_eq!(polled.unwrap_err().downcast_ref(), Some(&"in the listener"));
    assert!(body.frame().await.is_none());
    drop(body);
    told.assert(used(25, 1), false);

    // Where it is dropped, not even once: a second panic would end the process.
    let answer = judge(&through(), EVENTS, Script::new([Data(START)])).await;
    tail(&answer).on_end(|_| panic!("in the listener"));
    let told = Told::by(tail(&answer));
    let read = catch_unwind(AssertUnwindSafe(|| {
        let _answer = answer;
        panic!("in the reader");
    }));
    assert_eq!(read.unwrap_err().downcast_ref(), Some(&"in the reader"));
    told.assert(None, false);
}

// What is no stream of events.

#[tokio::test]
async fn a_json_body_that_is_handed_through_is_read_from_its_end() {
    let text = "x".repeat(5_000);
    let json = format!(r#"{{"content":"{text}","usage":{{"input_tokens":3,"output_tokens":4}}}}"#);
    for cut in [1, 100, json.len() - 50, json.len() - 1] {
        let (one, other) = String::leak(json.clone()).split_at(cut);
        let (body, told) = stream(JSON, [Data(one), Data(other)]).await;
        assert_eq!(body.collect().await.unwrap().to_bytes(), json);
        told.assert(used(3, 4), true);
    }
    // Broken off or dropped, its end is not its end.
    let nested = r#"{"x":{"usage":{"input_tokens":3}}"#;
    let (mut body, told) = stream(JSON, [Data(nested), Break]).await;
    assert!(body.frame().await.unwrap().is_ok() && body.frame().await.unwrap().is_err());
    told.assert(None, false);
    let (mut body, told) = stream(JSON, [Data(r#"{"usage":{"input_tokens":3}}"#), Hang]).await;
    body.frame().await.unwrap().unwrap();
    drop(body);
    told.assert(None, false);
}

#[tokio::test]
async fn other_bodies_only_tell_whether_they_came_whole() {
    for kind in ["", "text/plain", "application/x-ndjson"] {
        let (body, told) = stream(kind, [Data(START), Data(STOP)]).await;
        body.collect().await.unwrap();
        told.assert(None, true);
        let (mut body, told) = stream(kind, [Data(START), Data(STOP)]).await;
        body.frame().await.unwrap().unwrap();
        drop(body);
        told.assert(None, false);
    }
}

#[tokio::test]
async fn neither_refusals_nor_what_is_compressed_is_read() {
    for (status, encoding, read) in
        [(200, None, true), (201, None, true), (429, None, false), (200, Some("gzip"), false)]
    {
        let mut response = Response::builder().status(status).header("content-type", EVENTS);
        if let Some(encoding) = encoding {
            response = response.header("content-encoding", encoding);
        }
        let mut response = Some(response.body(Script::new([Data(START), Data(STOP)])).unwrap());
        let client = service_fn(move |_: Request<String>| ready(Ok::<_, io::Error>(response.take().unwrap())));
        let layer = JudgeLayer::new().gather(Gather::Nothing);
        let answer = layer.layer(client).oneshot(Request::new(String::new())).await.unwrap();
        let told = Told::by(tail(&answer));
        answer.into_body().collect().await.unwrap();
        told.assert(if read { used(25, 1) } else { None }, true);
    }
}

#[tokio::test]
async fn a_body_that_is_empty_has_ended_before_anybody_reads_it() {
    let answer = judge(&through(), "", Script::default()).await;
    Told::by(tail(&answer)).assert(None, true);
    let answer = judge(&through(), EVENTS, Script::default()).await;
    Told::by(tail(&answer)).assert(None, false);
}

// What it means.

const ERROR: &str =
    "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";
const CHUNK: &str = "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const CHUNK_ERROR: &str = "data: {\"error\":{\"code\":429,\"message\":\"try again in 7s\"}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

/// What a stream means that is read to its end, that is dropped after its last part, and that breaks off after it.
async fn meanings(kind: &str, parts: &[&'static str]) -> [Option<Class>; 3] {
    let parts = || parts.iter().copied().map(Data);
    let (body, read) = stream(kind, parts()).await;
    body.collect().await.unwrap();
    let (mut body, dropped) = stream(kind, parts().chain([Hang])).await;
    for _ in parts() {
        body.frame().await.unwrap().unwrap();
    }
    drop(body);
    let (body, broken) = stream(kind, parts().chain([Break])).await;
    body.collect().await.unwrap_err();
    [read, dropped, broken].map(|told| told.class())
}

#[tokio::test(start_paused = true)]
async fn a_stream_means_what_is_in_it_and_how_it_ends() {
    let (ok, transport, overloaded) = (Some(Class::Ok), Some(Class::Transport), Some(Class::Overloaded));
    for (kind, parts, expected) in [
        // All of it: whatever becomes of it then.
        (EVENTS, &[START, DELTA, STOP][..], [ok, ok, ok]),
        (EVENTS, &[CHUNK, DONE], [ok, ok, ok]),
        // Its end is missing. Whoever has read enough is not to blame, nor is the org.
        (EVENTS, &[START, DELTA], [transport, None, transport]),
        (EVENTS, &[CHUNK], [transport, None, transport]),
        // An error, first or later.
        (EVENTS, &[ERROR], [overloaded; 3]),
        (EVENTS, &[START, DELTA, ERROR], [overloaded; 3]),
        (EVENTS, &[START, ERROR, STOP], [overloaded; 3]),
        (EVENTS, &[START, &ERROR[..20], &ERROR[20..]], [overloaded; 3]),
        (EVENTS, &[START, &ERROR[..ERROR.len() - 2]], [overloaded; 3]),
        (EVENTS, &[CHUNK, CHUNK_ERROR, DONE], [Some(Class::Throttled); 3]),
        // Of no known kind: it ends as it likes.
        (EVENTS, &["data: hello\n\n"], [ok, None, transport]),
        ("text/plain", &["event: error\n", ERROR], [ok, None, transport]),
        (JSON, &[r#"{"id":"x","#, r#""content":[{"type":"text","text":"a"}]}"#], [ok, None, transport]),
        (JSON, &[r#"{"error":{"#, r#""code":502}}"#], [overloaded, None, transport]),
        (JSON, &[r#"{"choices":"#, r"[]}"], [Some(Class::Empty), None, transport]),
        // Nothing at all, and all of it but an answer.
        (EVENTS, &[&START[..START.find("event: content").unwrap()], STOP], [Some(Class::Empty); 3]),
        (EVENTS, &[": hello\n\n"], [Some(Class::Empty), None, transport]),
    ] {
        assert_eq!(meanings(kind, parts).await, expected, "{parts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_in_a_stream_says_when_to_come_again_from_when_it_came() {
    let (mut body, told) = stream(EVENTS, [Data(CHUNK), Data(CHUNK_ERROR), Hang]).await;
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
    }
    let again = tokio::time::Instant::now() + Duration::from_secs(7);
    tokio::time::advance(Duration::from_secs(3)).await;
    drop(body);
    assert_eq!(told.all()[0].outcome.unwrap().not_before, Some(again));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_is_handed_through_means_what_its_head_says() {
    for steps in [vec![Data(START), Data(STOP)], vec![Data(START), Break], vec![Data(START), Hang]] {
        let mut response =
            Some(Response::builder().status(503).header("content-type", EVENTS).body(Script::new(steps)).unwrap());
        let client = service_fn(move |_: Request<String>| ready(Ok::<_, io::Error>(response.take().unwrap())));
        let answer =
            JudgeLayer::new().gather(Gather::Nothing).layer(client).oneshot(Request::new(String::new())).await.unwrap();
        let told = Told::by(tail(&answer));
        let mut body = answer.into_body();
        for _ in 0..2 {
            drop(tokio::time::timeout(Duration::from_millis(1), body.frame()).await);
        }
        drop(body);
        assert_eq!(told.class(), Some(Class::Overloaded));
    }
}

// What is gathered.

#[tokio::test]
async fn events_that_are_gathered_whole_mean_what_is_in_them() {
    for (parts, class) in [
        (&[START, DELTA, STOP][..], Class::Ok),
        (&[START, DELTA], Class::Transport),
        (&[START, ERROR], Class::Overloaded),
        (&[ERROR], Class::Overloaded),
        (&[CHUNK, CHUNK_ERROR], Class::Throttled),
        (&["data: hello\n\n"], Class::Ok),
        (&[], Class::Empty),
    ] {
        let answer = judge(&JudgeLayer::new(), EVENTS, Script::new(parts.iter().copied().map(Data))).await;
        assert_eq!(stamp(&answer).outcome.class, class, "{parts:?}");
        let used = parts.contains(&START).then(|| used(25, if parts.contains(&DELTA) { 15 } else { 1 })).flatten();
        assert_eq!(stamp(&answer).usage, used, "what it used counts");
        assert_eq!(answer.into_body().into_bytes().unwrap(), parts.concat(), "unchanged");
    }
    let layer = JudgeLayer::new().empty(EmptyPolicy::Accept);
    let answer = judge(&layer, EVENTS, Script::default()).await;
    assert_eq!(stamp(&answer).outcome.class, Class::Ok);
}

#[tokio::test]
async fn events_that_are_gathered_whole_are_read_too_and_leave_no_tail() {
    let layer = JudgeLayer::new();
    let answer =
        judge(&layer, EVENTS, Script::new([Data(&START[..40]), Data(&START[40..]), Data(DELTA), Data(STOP)])).await;
    assert_eq!((stamp(&answer).usage, stamp(&answer).whole), (used(25, 15), true));
    assert!(stamp(&answer).tail.is_none());
    let answer = judge(&layer, JSON, Script::new([Data(r#"{"usage":{"input_tokens":3}}"#)])).await;
    assert!(stamp(&answer).usage.is_some() && stamp(&answer).tail.is_none());
}

#[tokio::test]
async fn what_was_gathered_up_to_the_ceiling_is_read_with_the_rest() {
    for (ceiling, kind, parts, complete) in [
        (70, EVENTS, [&START[..60], &START[60..], STOP], true),
        (0, EVENTS, [&START[..60], &START[60..], STOP], true),
        (10, JSON, [r#"{"usage":{"#, r#""input_tokens":25,"#, r#""output_tokens":1}}"#], true),
        (70, EVENTS, [&START[..60], &START[60..], ": no more"], false),
    ] {
        let layer = JudgeLayer::new().ceiling(ceiling);
        let answer = judge(&layer, kind, Script::new(parts.map(Data))).await;
        assert!(stamp(&answer).usage.is_none() && !stamp(&answer).whole);
        let told = Told::by(tail(&answer));
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), parts.concat());
        told.assert(used(25, 1), complete);
    }
}

// By the simulated provider.

fn config(dialect: Dialect, org: OrgConfig) -> Config {
    Config::new(dialect).latency(Latency::new(100.0, 0.0)).org(org)
}

fn org() -> OrgConfig {
    OrgConfig::new("one", "key-1")
}

/// A body of 100 bytes, that is of 25 input tokens. Answers are cut to four tokens, shorter than any.
fn ask(uri: &str, more: &str) -> Request<Full<Bytes>> {
    let body = format!(r#"{{"model":"m","max_tokens":4,"stream":true{more}}}"#);
    let body = format!("{body:<100}");
    assert_eq!(body.len(), 100);
    let request = Request::post(uri).header("x-api-key", "key-1").header("authorization", "Bearer key-1");
    request.body(Full::new(body.into())).unwrap()
}

const INCLUDE_USAGE: &str = r#","stream_options":{"include_usage":true}"#;

#[tokio::test(start_paused = true)]
async fn what_the_provider_counts_is_told_in_both_dialects() {
    for (dialect, more, usage) in [
        (Dialect::Anthropic, "", used(25, 4)),
        (Dialect::OpenAi, INCLUDE_USAGE, used(25, 4)),
        (Dialect::OpenAi, "", None),
    ] {
        let sim = Sim::new(config(dialect, org())).unwrap();
        let answer = through().layer(sim.service()).oneshot(ask("/v1/x", more)).await.unwrap();
        let told = Told::by(tail(&answer));
        let mut body = answer.into_body();
        let mut times = vec![];
        while let Some(frame) = body.frame().await {
            frame.unwrap();
            times.push((sim.elapsed().as_millis(), told.all().len()));
        }
        assert_eq!(
            times,
            [(20, 0), (40, 0), (60, 0), (80, 0), (100, 1)],
            "spread over the latency; told with the last"
        );
        told.assert(usage, true);
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_judge_hands_on_is_what_the_provider_sends() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let service = Sim::new(config(dialect, org())).unwrap().service();
        let raw = frames(service.clone().oneshot(ask("/v1/x", INCLUDE_USAGE)).await.unwrap().into_body()).await;
        let judged = through().layer(Sim::new(config(dialect, org())).unwrap().service());
        let judged = frames(judged.oneshot(ask("/v1/x", INCLUDE_USAGE)).await.unwrap().into_body()).await;
        assert_eq!(raw, judged);
    }
}

async fn frames<B>(mut body: B) -> Vec<Bytes>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Debug,
{
    let mut frames = vec![];
    while let Some(frame) = body.frame().await {
        frames.push(frame.unwrap().into_data().unwrap());
    }
    frames
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_the_provider_cuts_off_tells_its_input() {
    let sim = Sim::new(config(Dialect::Anthropic, org().truncate(true))).unwrap();
    let answer = through().layer(sim.service()).oneshot(ask("/v1/x", "")).await.unwrap();
    let told = Told::by(tail(&answer));
    assert!(answer.into_body().collect().await.is_err());
    told.assert(used(25, 1), false);
}

async fn through_the_stack<S, RB>(org: Org, client: S)
where
    S: Service<Request<Full<Bytes>>, Response = Response<RB>> + Clone + Send + 'static,
    S::Error: Into<tower_quota::outcome::BoxError>,
    S::Future: Send,
    RB: Body + Unpin,
    RB::Error: Into<tower_quota::outcome::BoxError>,
{
    let mut service = Stack::new(Orgs::new([org.clone()]).unwrap()).judge(through()).build(client).unwrap();
    let request = || ask("/v1/messages", "");
    let answer = ServiceExt::<Request<Full<Bytes>>>::ready(&mut service).await.unwrap().call(request()).await;
    let answer = answer.map_err(|error| error.to_string()).unwrap();
    let told = Told::by(tail(&answer));
    assert_eq!((told.all(), org.snapshot().in_flight), (vec![], 1));
    let mut body = answer.into_body();
    while let Some(frame) = body.frame().await {
        frame.unwrap();
    }
    told.assert(used(25, 4), true);
    assert_eq!(org.snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn whoever_calls_the_whole_stack_is_told() {
    let provider: SimService = Sim::new(config(Dialect::Anthropic, org())).unwrap().service();
    through_the_stack(Org::new("one").credential(Credential::new("key-1")), provider).await;
}

#[tokio::test]
async fn whoever_calls_the_whole_stack_over_http_is_told() {
    let sim = Sim::new(config(Dialect::Anthropic, org()).latency(Latency::new(20.0, 0.0))).unwrap();
    let server = sim.serve().await.unwrap();
    let org = Org::new("one").credential(Credential::new("key-1")).base_url(server.base_url());
    through_the_stack(org, client::http()).await;
    tokio::time::timeout(Duration::from_secs(10), server.shutdown()).await.unwrap();
}
