//! The judge at work: every mode, every edge of the ceiling, broken and hanging bodies, cancelling, and tower's contract.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::VecDeque,
    convert::Infallible,
    error::Error as _,
    future::{Future, Ready, pending, ready},
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    judge::{Answer, Elapsed, EmptyPolicy, Gather, JudgeLayer},
    org::{Credential, Org},
    outcome::{Class, Error, Outcome, Stamp, Usage},
};

const KEY: &str = "sk-ant-secret-0123456789";

// A body that does as it is told.

enum Step {
    Data(&'static str),
    Trailers,
    Break,
    Hang,
}
use Step::{Break, Data, Hang, Trailers};

#[derive(Default)]
struct Script {
    steps: VecDeque<Step>,
    size: SizeHint,
    polled: Arc<AtomicUsize>,
    alive: Arc<()>,
}

impl Script {
    fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Script { steps: steps.into_iter().collect(), ..Script::default() }
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.polled.fetch_add(1, SeqCst);
        match self.steps.pop_front() {
            None => Poll::Ready(None),
            Some(Data(text)) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(text.as_bytes()))))),
            Some(Trailers) => Poll::Ready(Some(Ok(Frame::trailers(trailers())))),
            Some(Break) => Poll::Ready(Some(Err(io::ErrorKind::ConnectionReset.into()))),
            Some(Hang) => {
                self.steps.push_front(Hang);
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.size
    }
}

fn trailers() -> HeaderMap {
    HeaderMap::from_iter([("x-checksum".parse().unwrap(), "1".parse().unwrap())])
}

type Judged = Result<Response<Answer<Script>>, Error>;

fn response(status: u16, headers: &[(&'static str, &'static str)], body: Script) -> Response<Script> {
    let mut response = Response::new(body);
    *response.status_mut() = status.try_into().unwrap();
    for (name, value) in headers {
        response.headers_mut().append(*name, value.parse().unwrap());
    }
    response
}

/// The layer around a client that gives this one answer.
fn judging(layer: JudgeLayer, response: Response<Script>) -> impl Future<Output = Judged> {
    let mut response = Some(response);
    let mut service =
        layer.layer(service_fn(move |_: Request<String>| ready(Ok::<_, io::Error>(response.take().unwrap()))));
    service.call(Request::default())
}

async fn judge(layer: JudgeLayer, status: u16, headers: &[(&'static str, &'static str)], body: Script) -> Judged {
    judging(layer, response(status, headers, body)).await
}

fn stamp<B>(response: &Response<B>) -> &Stamp {
    response.extensions().get::<Stamp>().expect("stamped")
}

async fn drain(answer: Answer<Script>) -> Vec<Result<Frame<Bytes>, String>> {
    let mut answer = answer;
    let mut frames = Vec::new();
    while let Some(frame) = answer.frame().await {
        frames.push(frame.map_err(|error| error.to_string()));
    }
    assert!(answer.is_end_stream());
    frames
}

async fn text(answer: Answer<Script>) -> String {
    let frames = drain(answer).await;
    frames
        .into_iter()
        .filter_map(|frame| frame.unwrap().into_data().ok())
        .map(|b| String::from_utf8(b.to_vec()).unwrap())
        .collect()
}

// What is gathered.

#[tokio::test]
async fn by_default_every_body_is_gathered_and_stamped_whole() {
    for (status, class) in [(200, Class::Ok), (429, Class::Throttled), (500, Class::Overloaded), (404, Class::Terminal)]
    {
        let answer =
            judge(JudgeLayer::new(), status, &[], Script::new([Data("ab"), Data(""), Data("cd")])).await.unwrap();
        assert_eq!((stamp(&answer).outcome.class, stamp(&answer).whole), (class, true), "{status}");
        assert_eq!(answer.body().bytes().unwrap(), "abcd");
        assert_eq!(answer.into_body().into_bytes().unwrap(), "abcd");
    }
}

#[tokio::test]
async fn errors_only_hands_successes_through_untouched() {
    let layer = JudgeLayer::new().gather(Gather::ErrorsOnly);
    let body = Script::new([Data("ab"), Data("cd"), Trailers]);
    let polled = body.polled.clone();
    let answer = judge(layer.clone(), 201, &[], body).await.unwrap();
    assert_eq!(polled.load(SeqCst), 0, "nobody read it yet");
    assert_eq!((stamp(&answer).outcome.class, stamp(&answer).whole), (Class::Ok, false));
    assert!(answer.body().bytes().is_none() && !answer.body().is_end_stream());
    let body = answer.into_body().into_bytes().expect_err("a stream is given back");
    assert_eq!(drain(body).await.len(), 3);

    for status in [302, 400, 429, 503] {
        let answer = judge(layer.clone(), status, &[], Script::new([Data("no")])).await.unwrap();
        assert!(stamp(&answer).whole, "{status}");
        assert_eq!(answer.body().bytes().unwrap(), "no");
    }
}

#[tokio::test]
async fn gathering_nothing_judges_by_the_head() {
    let layer = JudgeLayer::new().gather(Gather::Nothing);
    let answer = judge(layer, 429, &[("retry-after", "7")], Script::new([Data("try again in 90s")])).await.unwrap();
    assert_eq!((stamp(&answer).outcome.class, stamp(&answer).whole), (Class::Throttled, false));
    assert!(stamp(&answer).outcome.not_before.unwrap() <= Instant::now() + Duration::from_secs(7));
    assert_eq!(text(answer.into_body()).await, "try again in 90s");
}

#[tokio::test]
async fn an_empty_body_is_whole() {
    for status in [200, 204, 429] {
        let answer = judge(JudgeLayer::new().ceiling(0), status, &[], Script::default()).await.unwrap();
        assert!(stamp(&answer).whole);
        assert!(answer.body().is_end_stream());
        assert_eq!(answer.body().size_hint().exact(), Some(0));
        assert_eq!(answer.body().bytes().unwrap(), "");
        assert!(drain(answer.into_body()).await.is_empty());
    }
}

#[tokio::test]
async fn a_gathered_body_is_one_frame_and_its_trailers() {
    let answer = judge(JudgeLayer::new(), 200, &[], Script::new([Data("ab"), Data("cd"), Trailers])).await.unwrap();
    let mut body = answer.into_body();
    assert_eq!(body.size_hint().exact(), Some(4));
    assert!(!body.is_end_stream());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "abcd");
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(!body.is_end_stream(), "the trailers are still to come");
    assert!(body.bytes().is_none(), "polled out");
    assert_eq!(body.frame().await.unwrap().unwrap().into_trailers().unwrap(), trailers());
    assert!(body.is_end_stream());
    assert!(body.frame().await.is_none());
    assert!(body.into_bytes().is_err());
}

#[tokio::test]
async fn an_answer_that_is_kept_does_not_keep_the_connections_read_buffer() {
    let buffer = Bytes::from(vec![b'x'; 8192]);
    let part = buffer.slice(..100);
    let service =
        service_fn(move |_: Request<String>| ready(Ok::<_, Infallible>(Response::new(Full::new(part.clone())))));
    let answer = JudgeLayer::new().layer(service).oneshot(Request::new(String::new())).await.unwrap();
    assert_eq!(answer.body().bytes().unwrap().len(), 100);
    assert!(buffer.is_unique(), "nobody else holds the buffer");
}

// The ceiling.

#[tokio::test]
async fn a_body_exactly_at_the_ceiling_is_whole_and_one_byte_more_is_a_stream() {
    let layer = JudgeLayer::new().ceiling(4);
    for status in [200, 429] {
        let answer = judge(layer.clone(), status, &[], Script::new([Data("ab"), Data("cd"), Data("")])).await.unwrap();
        assert!(stamp(&answer).whole);
        assert_eq!(answer.into_body().into_bytes().unwrap(), "abcd");

        let answer = judge(layer.clone(), status, &[], Script::new([Data("ab"), Data("cd"), Data("e"), Data("f")]))
            .await
            .unwrap();
        assert!(!stamp(&answer).whole, "{status}");
        assert_eq!(text(answer.into_body()).await, "abcdef", "nothing is lost");
    }
}

#[tokio::test]
async fn a_body_beyond_the_ceiling_is_read_no_further_than_one_frame() {
    let body = Script::new([Data("ab"), Data("cde"), Data("fg"), Trailers]);
    let polled = body.polled.clone();
    let answer = judge(JudgeLayer::new().ceiling(4), 200, &[], body).await.unwrap();
    assert_eq!(polled.load(SeqCst), 2);
    let frames = drain(answer.into_body()).await;
    assert_eq!(frames.iter().filter(|frame| frame.as_ref().unwrap().is_data()).count(), 3);
    assert!(frames.last().unwrap().as_ref().unwrap().is_trailers());
}

#[tokio::test]
async fn what_was_read_counts_into_the_size_of_a_stream() {
    let mut body = Script::new([Data("ab"), Data("cde"), Data("fg")]);
    body.size.set_lower(2);
    let answer = judge(JudgeLayer::new().ceiling(4), 200, &[], body).await.unwrap();
    let mut body = answer.into_body();
    assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (7, None));
    body.frame().await;
    assert_eq!(body.size_hint().lower(), 5);

    let mut body = Script::new([Data("abcde"), Data("fg")]);
    body.size.set_upper(u64::MAX);
    let answer = judge(JudgeLayer::new().ceiling(4), 200, &[], body).await.unwrap();
    assert_eq!(answer.body().size_hint().upper(), None, "no overflow");
}

#[tokio::test]
async fn a_body_announced_beyond_the_ceiling_is_not_touched() {
    let layer = JudgeLayer::new().ceiling(4);
    // By its length header, by what the body itself says; the header may even lie.
    let mut sized = Script::new([Data("abcde")]);
    sized.size.set_exact(5);
    let honest = ("5", Script::new([Data("abcde")]));
    let lying = ("18446744073709551615", Script::new([Data("abcde")]));
    for (length, body) in [honest, lying, ("nonsense", sized)] {
        let polled = body.polled.clone();
        let answer = judge(layer.clone(), 200, &[("content-length", length)], body).await.unwrap();
        assert_eq!(polled.load(SeqCst), 0, "{length}");
        assert!(!stamp(&answer).whole);
        assert_eq!(text(answer.into_body()).await, "abcde");
    }
}

#[tokio::test]
async fn a_body_that_announces_too_little_is_still_bounded() {
    let body = Script::new([Data("ab"), Data("cde"), Data("f")]);
    let answer = judge(JudgeLayer::new().ceiling(4), 200, &[("content-length", "3")], body).await.unwrap();
    assert!(!stamp(&answer).whole);
    assert_eq!(text(answer.into_body()).await, "abcdef");
}

#[tokio::test]
async fn the_answer_to_a_head_request_is_whole_whatever_length_it_names() {
    let answer = judge(JudgeLayer::new(), 200, &[("content-length", "99999999999")], Script::default()).await.unwrap();
    assert!(stamp(&answer).whole);
    assert_eq!(answer.headers()["content-length"], "99999999999");
}

#[tokio::test]
async fn many_small_parts_make_one_body() {
    let answer = judge(JudgeLayer::new(), 200, &[], Script::new((0..10_000).map(|_| Data("x")))).await.unwrap();
    assert_eq!(answer.into_body().into_bytes().unwrap(), "x".repeat(10_000));
}

// What breaks off.

#[tokio::test]
async fn a_success_that_breaks_off_is_a_transport_error_with_its_cause() {
    for status in [200, 201] {
        let error = judge(JudgeLayer::new(), status, &[], Script::new([Data("ab"), Break])).await.unwrap_err();
        assert_eq!(error.class(), Class::Transport);
        let cause = error.source().unwrap().downcast_ref::<io::Error>().unwrap();
        assert_eq!(cause.kind(), io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn a_refusal_that_breaks_off_is_still_that_refusal() {
    for (status, class) in [(429, Class::Throttled), (401, Class::Unauthorised), (529, Class::Overloaded)] {
        let body = Script::new([Data("try again in 9s, "), Break]);
        let answer = judge(JudgeLayer::new(), status, &[("content-length", "400")], body).await.unwrap();
        assert_eq!(stamp(&answer).outcome.class, class);
        assert!(stamp(&answer).whole, "nothing more will come");
        assert_eq!(stamp(&answer).outcome.not_before.is_some(), status == 429, "what was read counts");
        assert_eq!(answer.headers()["content-length"], "17");
        assert_eq!(text(answer.into_body()).await, "try again in 9s, ");
    }
}

#[tokio::test]
async fn a_stream_breaks_for_whoever_reads_it() {
    let layer = JudgeLayer::new().gather(Gather::ErrorsOnly);
    let answer = judge(layer, 200, &[], Script::new([Data("ab"), Break])).await.unwrap();
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    let error: Error = body.frame().await.unwrap().unwrap_err();
    assert_eq!(error.class(), Class::Transport);
    let cause = error.source().unwrap().downcast_ref::<io::Error>().unwrap();
    assert_eq!(cause.kind(), io::ErrorKind::ConnectionReset);
    let answer = judge(JudgeLayer::new().ceiling(1), 200, &[], Script::new([Data("ab"), Break])).await.unwrap();
    let frames = drain(answer.into_body()).await;
    assert!(frames[0].is_ok() && frames[1].is_err());
}

#[tokio::test]
async fn a_failed_call_is_transport_and_a_judged_error_stays_as_it_is() {
    let mut service = JudgeLayer::new().layer(service_fn(|_: Request<String>| {
        ready(Err::<Response<Script>, _>(io::Error::from(io::ErrorKind::ConnectionRefused)))
    }));
    let error = service.call(Request::default()).await.unwrap_err();
    assert_eq!(error.class(), Class::Transport);
    assert!(error.source().unwrap().is::<io::Error>());

    let mut service = JudgeLayer::new().layer(service_fn(|_: Request<String>| {
        ready(Err::<Response<Script>, _>(Error::new(Outcome::of(Class::Rejected), "said below")))
    }));
    assert_eq!(service.call(Request::default()).await.unwrap_err().class(), Class::Rejected);
}

#[cfg(unix)]
#[tokio::test]
async fn a_machine_out_of_sockets_is_not_the_orgs_fault() {
    let mut service = JudgeLayer::new()
        .layer(service_fn(|_: Request<String>| ready(Err::<Response<Script>, _>(io::Error::from_raw_os_error(24)))));
    assert_eq!(service.call(Request::default()).await.unwrap_err().class(), Class::Local);
}

// What a body makes of a status.

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn a_refusal_means_what_its_body_says_and_tells_it() {
    for (status, body, class, told) in [
        (
            429,
            r#"{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}"#,
            Class::OutOfQuota,
            "insufficient_quota: You exceeded your current quota",
        ),
        (
            529,
            r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
            Class::Overloaded,
            "overloaded_error: Overloaded",
        ),
        (400, r#"{"error":{"message":"a\nb\u0000c"}}"#, Class::Terminal, "a b c"),
        (400, r#"{"message":"at the top"}"#, Class::Terminal, "at the top"),
        (502, "<html>Bad gateway</html>", Class::Overloaded, "502 Bad Gateway"),
        (429, "", Class::Throttled, "429 Too Many Requests"),
        (401, "{\"error\":{\"type\":\"billing_err", Class::Unauthorised, "401 Unauthorized"),
    ] {
        let answer = judge(JudgeLayer::new(), status, &[], Script::new([Data(body)])).await.unwrap();
        assert_eq!(stamp(&answer).outcome.class, class, "{body}");
        assert_eq!(stamp(&answer).said.as_deref(), Some(told), "{body}");
        assert_eq!(answer.into_body().into_bytes().unwrap(), body, "unchanged");
    }
    let text = [("content-type", "text/plain")];
    let answer = judge(JudgeLayer::new(), 503, &text, Script::new([Data("no healthy upstream\n")])).await.unwrap();
    assert_eq!(stamp(&answer).said.as_deref(), Some("503 Service Unavailable: no healthy upstream"));
    let answer = judge(JudgeLayer::new(), 200, &[JSON], Script::new([Data("{}")])).await.unwrap();
    assert_eq!(stamp(&answer).said, None, "nothing is wrong");
}

#[tokio::test(start_paused = true)]
async fn what_the_headers_say_of_another_attempt_holds_for_what_the_body_makes_of_it() {
    let quota = r#"{"error":{"code":"insufficient_quota"}}"#;
    let date = "You have reached your specified API usage limits.";
    let limits: &str = String::leak(format!(r#"{{"error":{{"message":"{date}"}}}}"#));
    for (status, header, body, class) in [
        (400, ("x-should-retry", "true"), "{}", Class::Overloaded),
        (400, ("x-should-retry", "true"), limits, Class::OutOfQuota),
        (500, ("x-should-retry", "false"), "{}", Class::Terminal),
        (429, ("x-should-retry", "false"), quota, Class::OutOfQuota),
        (429, ("grpc-retry-pushback-ms", "-1"), "{}", Class::Terminal),
        (429, ("grpc-retry-pushback-ms", "-1"), quota, Class::OutOfQuota),
        (200, ("x-should-retry", "false"), r#"{"error":{"code":500}}"#, Class::Terminal),
    ] {
        let answer = judge(JudgeLayer::new(), status, &[header, JSON], Script::new([Data(body)])).await.unwrap();
        assert_eq!(stamp(&answer).outcome.class, class, "{status} {header:?} {body}");
    }
    let waited = [("retry-after", "20")];
    assert_eq!(wait(JudgeLayer::new(), 429, &waited, quota).await, None, "the quota is not there again by then");
    let one = r#"{"error":{"type":"rate_limit_error","message":"Extra usage is required for long context requests."}}"#;
    assert_eq!(wait(JudgeLayer::new(), 429, &waited, one).await, Some(Duration::from_secs(20)));
}

#[tokio::test(start_paused = true)]
async fn an_error_in_a_success_is_one_and_the_answer_stays_as_it_is() {
    for (body, class) in [
        (r#"{"error":{"code":502,"message":"Provider returned error"}}"#, Class::Overloaded),
        (r#"{"error":{"code":429,"message":"try again in 9s"},"usage":{"input_tokens":3}}"#, Class::Throttled),
        (r#"{"choices":[]}"#, Class::Empty),
        (r#"{"choices":[{"mess"#, Class::Transport),
        (r#"{"choices":[{"message":{"content":"a"}}],"error":null}"#, Class::Ok),
    ] {
        let answer = judge(JudgeLayer::new(), 200, &[JSON], Script::new([Data(body)])).await.unwrap();
        let judged = stamp(&answer).outcome;
        assert_eq!((answer.status().as_u16(), judged.class), (200, class), "{body}");
        assert_eq!(stamp(&answer).usage.is_some(), body.contains("usage"));
        let wait = judged.not_before.map(|at| at - Instant::now());
        assert_eq!(wait, (class == Class::Throttled).then(|| Duration::from_secs(9)));
        assert_eq!(answer.into_body().into_bytes().unwrap(), body);
    }
    // What it says of when to come again is believed where it says that at all.
    let headers = [JSON, ("retry-after", "20")];
    let wait = |body| wait(JudgeLayer::new(), 200, &headers, body);
    assert_eq!(wait(r#"{"error":{"code":429}}"#).await, Some(Duration::from_secs(20)));
    assert_eq!(wait(r#"{"error":{"code":400}}"#).await, None);
    assert_eq!(wait(r#"{"error":null}"#).await, None);
    // Of another kind, or in another encoding, it is not looked at.
    for headers in [[("content-type", "text/plain"), JSON], [JSON, ("content-encoding", "gzip")]] {
        let headers = if headers[0].1 == "text/plain" { &headers[..1] } else { &headers[..] };
        let answer = judge(JudgeLayer::new(), 200, headers, Script::new([Data(r#"{"choices":[]}"#)])).await.unwrap();
        assert_eq!(stamp(&answer).outcome.class, Class::Ok, "{headers:?}");
    }
    let accepting = JudgeLayer::new().empty(EmptyPolicy::Accept);
    let answer = judge(accepting, 200, &[JSON], Script::new([Data(r#"{"choices":[]}"#)])).await.unwrap();
    assert_eq!(stamp(&answer).outcome.class, Class::Ok);
}

// The caller's own check.

#[tokio::test]
async fn the_callers_check_is_asked_once_of_each_good_answer_that_is_gathered() {
    let asked = Arc::new(AtomicUsize::new(0));
    let layer = |gather| {
        let asked = asked.clone();
        JudgeLayer::new().gather(gather).scrub(&org()).validate(move |head, body| {
            asked.fetch_add(1, SeqCst);
            assert_ne!(body, "panic", "as a parser does");
            match body.as_ref() {
                b"bad" => Err(format!("no {} for {KEY}\nand {:?}", head.status, head.headers["x"]).into()),
                _ => Ok(()),
            }
        })
    };
    for (status, gather, body, times, class) in [
        (200, Gather::Whole, "good", 1, Class::Ok),
        (200, Gather::Whole, "bad", 1, Class::Rejected),
        (200, Gather::Whole, "panic", 1, Class::Rejected),
        (500, Gather::Whole, "bad", 0, Class::Overloaded),
        (200, Gather::Whole, r#"{"choices":[]}"#, 0, Class::Empty),
        (200, Gather::ErrorsOnly, "bad", 0, Class::Ok),
    ] {
        asked.store(0, SeqCst);
        let answer = judge(layer(gather), status, &[JSON, ("x", "1")], Script::new([Data(body)])).await.unwrap();
        assert_eq!((stamp(&answer).outcome.class, asked.load(SeqCst)), (class, times), "{status} {gather:?} {body}");
        let said = stamp(&answer).said.as_deref();
        match body {
            "bad" if class == Class::Rejected => {
                assert!(
                    said.is_some_and(|said| said.starts_with("no ") && said.ends_with(" for *** and \"1\"")),
                    "{said:?}"
                );
            }
            "panic" => assert_eq!(said, Some("the check panicked")),
            _ => assert!(said.is_none() || class == Class::Overloaded, "{said:?}"),
        }
        drop(answer);
    }
    let used = r#"{"usage":{"input_tokens":3}}"#;
    let refusing = JudgeLayer::new().validate(|_, _| Err("no".into()));
    let answer = judge(refusing, 200, &[JSON], Script::new([Data(used)])).await.unwrap();
    assert_eq!(stamp(&answer).usage, Some(Usage::new(3, 0)), "it was paid for");
}

// Faults.

#[tokio::test]
async fn a_client_that_cannot_speak_what_the_url_wants_is_said_at_once() {
    let request = || Request::get("https://127.0.0.1:1/").body(String::new()).unwrap();
    let service = JudgeLayer::new().layer(tower_quota::client::http::<String>());
    let error = service.clone().oneshot(request()).await.unwrap_err();
    assert_eq!((error.class(), error.stamp().unsent), (Class::Local, true));
    assert!(error.stamp().said.as_deref().is_some_and(|said| said.contains("client::https")));
    // Its neighbour: nobody is there.
    let request = Request::get("http://127.0.0.1:1/").body(String::new()).unwrap();
    let error = service.oneshot(request).await.unwrap_err();
    assert_eq!((error.class(), error.stamp().unsent, error.stamp().said.is_none()), (Class::Transport, true, true));
}

/// A server of HTTP/2 on loopback that reads one request, and then does this with the connection. It ends with its client.
async fn http2(end: &'static [u8]) -> http::Uri {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        let (mut wire, _) = listener.accept().await.unwrap();
        wire.read_exact(&mut [0; PREFACE]).await.unwrap();
        wire.write_all(&frame::<9>(0, 4, 0, &[])).await.unwrap();
        // Up to the head of the request.
        loop {
            let mut head = [0; 9];
            wire.read_exact(&mut head).await.unwrap();
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            wire.read_exact(&mut vec![0; length]).await.unwrap();
            if head[3] == HEADERS {
                break;
            }
        }
        wire.write_all(end).await.unwrap();
    });
    uri
}

/// `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n`.
const PREFACE: usize = 24;
const HEADERS: u8 = 1;

const fn frame<const N: usize>(length: u8, kind: u8, stream: u8, payload: &[u8]) -> [u8; N] {
    let mut frame = [0; N];
    frame[2] = length;
    frame[3] = kind;
    frame[8] = stream;
    let mut at = 0;
    while at < payload.len() {
        frame[9 + at] = payload[at];
        at += 1;
    }
    frame
}

/// A stream is reset, for a reason.
const fn reset(reason: u8) -> [u8; 13] {
    frame(4, 3, 1, &[0, 0, 0, reason])
}

/// No more than streams up to `last` will be answered, for a reason.
const fn go_away(last: u8, reason: u8) -> [u8; 17] {
    frame(8, 7, 0, &[0, 0, 0, last, 0, 0, 0, reason])
}

#[tokio::test]
async fn what_http2_says_was_not_processed_is_told_from_what_broke() {
    const NO_ERROR: u8 = 0;
    const INTERNAL_ERROR: u8 = 2;
    const REFUSED_STREAM: u8 = 7;
    const ENHANCE_YOUR_CALM: u8 = 11;
    static ROWS: [(&str, &[u8], Class); 8] = [
        ("REFUSED_STREAM", &reset(REFUSED_STREAM), Class::Unprocessed),
        ("another reason", &reset(INTERNAL_ERROR), Class::Transport),
        ("its neighbour by number", &reset(REFUSED_STREAM + 1), Class::Transport),
        ("GOAWAY before it", &go_away(0, NO_ERROR), Class::Unprocessed),
        ("GOAWAY before it, for a reason", &go_away(0, ENHANCE_YOUR_CALM), Class::Unprocessed),
        ("GOAWAY after it, then closed", &go_away(1, NO_ERROR), Class::Transport),
        ("GOAWAY after it, for a reason, then closed", &go_away(1, ENHANCE_YOUR_CALM), Class::Transport),
        ("closed", &[], Class::Transport),
    ];
    for (row, end, class) in ROWS {
        let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
            .http2_only(true)
            .build_http::<Full<Bytes>>();
        let request = Request::post(http2(end).await).body(Full::from("{}")).unwrap();
        let error = JudgeLayer::new().layer(client).oneshot(request).await.unwrap_err();
        assert_eq!(error.class(), class, "{row}: {error:?}");
        assert_eq!(error.stamp().unsent, class == Class::Unprocessed, "{row}");
    }
}

#[tokio::test]
async fn a_server_of_h2_that_refuses_a_stream_has_not_processed_it() {
    for (reason, class) in [(h2::Reason::REFUSED_STREAM, Class::Unprocessed), (h2::Reason::CANCEL, Class::Transport)] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri: http::Uri = format!("http://{}/", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(async move {
            let (wire, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(wire).await.unwrap();
            while let Some(Ok((_, mut answer))) = connection.accept().await {
                answer.send_reset(reason);
            }
        });
        let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
            .http2_only(true)
            .build_http::<Full<Bytes>>();
        let request = Request::post(uri).body(Full::from("{}")).unwrap();
        let error = JudgeLayer::new().layer(client).oneshot(request).await.unwrap_err();
        assert_eq!((error.class(), error.stamp().unsent), (class, class == Class::Unprocessed), "{reason}");
    }
}

// Hints.

async fn wait(
    layer: JudgeLayer,
    status: u16,
    headers: &[(&'static str, &'static str)],
    body: &'static str,
) -> Option<Duration> {
    let answer = judge(layer, status, headers, Script::new([Data(body)])).await.unwrap();
    stamp(&answer).outcome.not_before.map(|at| at - Instant::now())
}

#[tokio::test(start_paused = true)]
async fn the_text_of_a_429_can_only_make_its_wait_longer() {
    let text = r#"{"error":{"message":"Rate limit reached. Please try again in 8.71s."}}"#;
    let seconds = |seconds| Some(Duration::from_secs_f64(seconds));
    assert_eq!(wait(JudgeLayer::new(), 429, &[], text).await, seconds(8.71));
    assert_eq!(wait(JudgeLayer::new(), 429, &[("retry-after", "2")], text).await, seconds(8.71));
    assert_eq!(wait(JudgeLayer::new(), 429, &[("retry-after", "20")], text).await, seconds(20.0));
    assert_eq!(wait(JudgeLayer::new(), 429, &[], "slow down").await, None);
    assert_eq!(wait(JudgeLayer::new(), 503, &[], text).await, None, "a failing server's words are no hint");
    assert_eq!(wait(JudgeLayer::new(), 200, &[], text).await, None, "nor is what a model wrote");
}

#[tokio::test(start_paused = true)]
async fn hints_are_believed_up_to_the_ceiling() {
    let short = JudgeLayer::new().hint_ceiling(Duration::from_secs(5));
    assert_eq!(wait(short.clone(), 429, &[("retry-after", "20")], "").await, Some(Duration::from_secs(5)));
    assert_eq!(wait(short, 429, &[], "try again in 9s").await, Some(Duration::from_secs(5)));
    assert_eq!(wait(JudgeLayer::new(), 429, &[("retry-after", "999")], "").await, Some(Duration::from_secs(300)));
    let endless = JudgeLayer::new().hint_ceiling(Duration::MAX);
    let asked = &[("retry-after", "99999999999999999h")];
    assert_eq!(wait(endless, 429, asked, "try again in 9999999999d").await, Some(Duration::from_secs(365 * 24 * 3600)));
}

#[tokio::test(start_paused = true)]
async fn a_hint_counts_from_the_head_not_from_the_end_of_the_body() {
    for header in [&[][..], &[("retry-after", "3")]] {
        let mut call = task::spawn(judging(
            JudgeLayer::new().timeout(Duration::from_secs(4)),
            response(429, header, Script::new([Data("try again in 9s"), Hang])),
        ));
        assert_pending!(call.poll());
        advance(Duration::from_secs(4)).await;
        let answer = assert_ready!(call.poll()).unwrap();
        assert_eq!(stamp(&answer).outcome.not_before.unwrap() - Instant::now(), Duration::from_secs(5));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hint_is_looked_for_in_the_first_64_kib() {
    let fill = |kib: usize| Data(String::leak("x".repeat(kib << 10)));
    for (kib, found) in [(63, true), (64, false)] {
        let body = Script::new([fill(kib), Data(" try again in 9s")]);
        let answer = judge(JudgeLayer::new(), 429, &[], body).await.unwrap();
        assert_eq!(stamp(&answer).outcome.not_before.is_some(), found, "{kib}");
    }
}

// Usage and keys.

#[tokio::test]
async fn a_gathered_success_tells_its_usage() {
    let json = &[("content-type", "application/json; charset=utf-8")];
    let anthropic = r#"{"usage":{"input_tokens":10,"cache_creation_input_tokens":3,"cache_read_input_tokens":500,"output_tokens":20}}"#;
    let openai = r#"{"usage":{"prompt_tokens":7,"completion_tokens":8,"total_tokens":15}}"#;
    let usage = |layer: JudgeLayer, status, headers, body| async move {
        stamp(&judge(layer, status, headers, Script::new([Data(body)])).await.unwrap()).usage
    };
    let mut cached = Usage::new(13, 20);
    (cached.uncached_tokens, cached.cache_read_tokens, cached.cache_write_tokens) = (10, 500, 3);
    assert_eq!(usage(JudgeLayer::new(), 200, json, anthropic).await, Some(cached));
    assert_eq!(usage(JudgeLayer::new(), 200, json, openai).await, Some(Usage::new(7, 8)));
    assert_eq!(usage(JudgeLayer::new(), 200, &[("content-type", "text/plain")], openai).await, None);
    assert_eq!(usage(JudgeLayer::new(), 200, json, "{").await, None);
    assert_eq!(usage(JudgeLayer::new(), 429, json, openai).await, None);
    assert_eq!(usage(JudgeLayer::new().ceiling(5), 200, json, openai).await, None);
    assert_eq!(usage(JudgeLayer::new().gather(Gather::ErrorsOnly), 200, json, openai).await, None);
}

fn org() -> Org {
    Org::new("a").credential(Credential::new(KEY))
}

#[tokio::test]
async fn a_key_in_an_error_body_is_replaced_even_across_parts() {
    let layer = JudgeLayer::new().scrub(&org());
    let steps =
        || [Data("Incorrect API key provided: sk-ant-sec"), Data("ret-0123456789. You sent sk-ant-secret-0123456789")];
    let answer = judge(layer.clone(), 401, &[("content-length", "87")], Script::new(steps())).await.unwrap();
    assert_eq!(answer.headers()["content-length"], "45");
    assert_eq!(answer.into_body().into_bytes().unwrap(), "Incorrect API key provided: ***. You sent ***");

    let broken = Script::new(steps().into_iter().chain([Break]));
    let answer = judge(layer.clone(), 401, &[("content-length", "999")], broken).await.unwrap();
    assert_eq!(answer.headers()["content-length"], "45");
    assert_eq!(answer.into_body().into_bytes().unwrap(), "Incorrect API key provided: ***. You sent ***");

    let answer = judge(layer.clone(), 401, &[("content-length", "2")], Script::new([Data("no")])).await.unwrap();
    assert_eq!(
        (answer.headers()["content-length"].to_str().unwrap(), answer.body().bytes().unwrap().as_ref()),
        ("2", &b"no"[..])
    );
    let answer = judge(layer, 200, &[], Script::new([Data(KEY)])).await.unwrap();
    assert_eq!(answer.into_body().into_bytes().unwrap(), KEY, "an answer is the caller's own");
}

#[tokio::test]
async fn an_org_without_a_key_or_with_a_blank_one_scrubs_nothing() {
    for org in [Org::new("a"), Org::new("a").credential(Credential::new(" "))] {
        let answer = judge(JudgeLayer::new().scrub(&org), 401, &[], Script::new([Data("no")])).await.unwrap();
        assert_eq!(answer.into_body().into_bytes().unwrap(), "no");
    }
}

#[tokio::test]
async fn no_formatting_prints_a_key_or_a_body() {
    let layer = JudgeLayer::new().scrub(&org());
    let answer = judge(layer.clone(), 401, &[], Script::new([Data(KEY)])).await.unwrap();
    let stream = judge(layer.clone().ceiling(1), 401, &[], Script::new([Data(KEY)])).await.unwrap();
    let service = layer.layer(Probe::default());
    let error = judge(layer.clone(), 200, &[], Script::new([Data(KEY), Break])).await.unwrap_err();
    let printed = format!("{layer:?} {answer:?} {stream:?} {service:?} {error:?} {error}");
    assert!(!printed.contains("secret"), "{printed}");
    assert!(printed.contains("Answer(whole, 3 bytes)") && printed.contains("Answer(stream)"), "{printed}");
}

#[tokio::test]
async fn a_made_up_answer_is_empty_and_whole() {
    let answer = Answer::<Script>::default();
    assert!(answer.is_end_stream() && answer.size_hint().exact() == Some(0));
    assert_eq!(answer.bytes(), Some(&Bytes::new()));
    assert!(drain(answer).await.is_empty());
}

// Time.

fn hanging(layer: JudgeLayer) -> impl Future<Output = Judged> {
    let mut service = layer.layer(service_fn(|_: Request<String>| pending::<Result<Response<Script>, io::Error>>()));
    service.call(Request::default())
}

#[track_caller]
fn assert_elapsed(result: Judged, after: Duration) {
    let error = result.unwrap_err();
    assert_eq!(error.class(), Class::Transport);
    assert_eq!(error.source().unwrap().downcast_ref::<Elapsed>().unwrap().after(), after);
}

const TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn a_call_without_an_answer_ends_at_the_timeout_and_not_before() {
    let mut call = task::spawn(hanging(JudgeLayer::new().timeout(TIMEOUT)));
    assert_pending!(call.poll());
    advance(TIMEOUT - Duration::from_millis(5)).await;
    assert!(!call.is_woken());
    assert_pending!(call.poll());
    advance(Duration::from_millis(5)).await;
    assert!(call.is_woken());
    assert_elapsed(assert_ready!(call.poll()), TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_counts_from_the_call_not_from_the_first_poll() {
    let mut call = task::spawn(hanging(JudgeLayer::new().timeout(TIMEOUT)));
    advance(TIMEOUT).await;
    assert_elapsed(assert_ready!(call.poll()), TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn without_a_timeout_a_call_waits_for_ever() {
    let mut call = task::spawn(hanging(JudgeLayer::new()));
    assert_pending!(call.poll());
    advance(TIMEOUT * 100_000).await;
    assert_pending!(call.poll());
}

#[tokio::test(start_paused = true)]
async fn the_longest_timeout_overflows_nothing() {
    assert_pending!(task::spawn(hanging(JudgeLayer::new().timeout(Duration::MAX))).poll());
}

#[tokio::test(start_paused = true)]
async fn the_timeout_covers_a_body_that_is_gathered() {
    let layer = JudgeLayer::new().timeout(TIMEOUT);
    let mut call = task::spawn(judging(layer.clone(), response(200, &[], Script::new([Data("ab"), Hang]))));
    assert_pending!(call.poll());
    advance(TIMEOUT).await;
    assert!(call.is_woken());
    assert_elapsed(assert_ready!(call.poll()), TIMEOUT);

    let mut call = task::spawn(judging(layer, response(429, &[], Script::new([Data("try again in 1m"), Hang]))));
    assert_pending!(call.poll());
    advance(TIMEOUT).await;
    let answer = assert_ready!(call.poll()).unwrap();
    assert_eq!((answer.status().as_u16(), stamp(&answer).whole), (429, true), "a 429 is a 429");
    assert_eq!(stamp(&answer).outcome.not_before, Some(Instant::now() + TIMEOUT));
    assert_eq!(answer.into_body().into_bytes().unwrap(), "try again in 1m");
}

#[tokio::test(start_paused = true)]
async fn the_timeout_does_not_cover_a_body_that_is_handed_through() {
    let layer = JudgeLayer::new().timeout(TIMEOUT);
    for layer in [layer.clone().gather(Gather::ErrorsOnly), layer.ceiling(1)] {
        let mut call = task::spawn(judging(layer, response(200, &[], Script::new([Data("ab"), Hang]))));
        let mut body = assert_ready!(call.poll()).unwrap().into_body();
        advance(TIMEOUT * 2).await;
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "ab");
        assert_pending!(task::spawn(body.frame()).poll());
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_there_at_the_timeout_is_taken() {
    let layer = JudgeLayer::new().timeout(TIMEOUT);
    let mut call = task::spawn(judging(layer, response(200, &[], Script::new([Data("ab")]))));
    advance(TIMEOUT * 2).await;
    assert!(assert_ready!(call.poll()).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_spends_the_whole_coop_budget_is_still_timed_out() {
    /// Always ready, as a fast connection is: it stops only when the runtime makes it.
    struct Flood;
    impl Body for Flood {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let coop = std::pin::pin!(tokio::task::coop::consume_budget());
            coop.poll(cx).map(|()| Some(Ok(Frame::data(Bytes::from_static(b"x")))))
        }
    }
    let mut service = JudgeLayer::new()
        .timeout(TIMEOUT)
        .layer(service_fn(|_: Request<String>| ready(Ok::<_, Infallible>(Response::new(Flood)))));
    let call = tokio::spawn(service.call(Request::default()));
    tokio::task::yield_now().await;
    advance(TIMEOUT).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(error.source().unwrap().is::<Elapsed>());
}

// Cancelling.

#[tokio::test]
async fn dropping_the_call_while_it_waits_for_the_head_drops_the_exchange() {
    let alive = Arc::new(());
    let held = alive.clone();
    let mut service = JudgeLayer::new().layer(service_fn(move |_: Request<String>| {
        let held = held.clone();
        async move {
            let _held = held;
            pending::<Result<Response<Script>, io::Error>>().await
        }
    }));
    let mut call = task::spawn(service.call(Request::default()));
    drop(service);
    assert_pending!(call.poll());
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(call);
    assert_eq!(Arc::strong_count(&alive), 1);
}

#[tokio::test]
async fn dropping_the_call_or_the_answer_drops_the_body() {
    let script = || Script::new([Data("ab"), Hang]);

    let body = script();
    let alive = body.alive.clone();
    let mut call = task::spawn(judging(JudgeLayer::new(), response(200, &[], body)));
    assert_pending!(call.poll());
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(call);
    assert_eq!(Arc::strong_count(&alive), 1, "while it was gathered");

    let body = script();
    let alive = body.alive.clone();
    let answer = judge(JudgeLayer::new().ceiling(1), 200, &[], body).await.unwrap();
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(answer);
    assert_eq!(Arc::strong_count(&alive), 1, "while it was handed on");
}

#[tokio::test(start_paused = true)]
async fn a_finished_but_still_held_call_keeps_nothing() {
    let layer = JudgeLayer::new().timeout(TIMEOUT);
    let timed_out = [Data("ab"), Hang];
    for (status, steps) in
        [(200, timed_out), (429, [Data("ab"), Hang]), (200, [Data("ab"), Break]), (200, [Data("ab"), Data("c")])]
    {
        let body = Script::new(steps);
        let alive = body.alive.clone();
        let mut call = task::spawn(judging(layer.clone(), response(status, &[], body)));
        if call.poll().is_pending() {
            advance(TIMEOUT).await;
            assert!(call.is_woken());
            drop(assert_ready!(call.poll()));
        }
        assert_eq!(Arc::strong_count(&alive), 1);
        drop(call);
    }
}

#[tokio::test]
async fn a_gathered_answer_has_let_go_of_the_body() {
    let body = Script::new([Data("ab")]);
    let alive = body.alive.clone();
    let answer = judge(JudgeLayer::new(), 200, &[], body).await.unwrap();
    assert_eq!(Arc::strong_count(&alive), 1);
    drop(answer);
}

// Tower's contract.

/// A service that insists on it: readiness belongs to one instance and one call, and a clone has none.
#[derive(Debug, Default)]
struct Probe {
    ready: bool,
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Probe { ready: false }
    }
}

impl Service<Request<String>> for Probe {
    type Response = Response<Script>;
    type Error = io::Error;
    type Future = Ready<io::Result<Response<Script>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<String>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without being ready");
        ready(Ok(Response::new(Script::new([Data("ok")]))))
    }
}

#[tokio::test]
async fn the_instance_that_was_made_ready_is_the_one_called() {
    let mut service = JudgeLayer::new().layer(Probe::default());
    for _ in 0..3 {
        let mut clone = service.clone();
        service.ready().await.unwrap().call(Request::default()).await.unwrap();
        clone.ready().await.unwrap().call(Request::default()).await.unwrap();
        assert!(!service.get_ref().ready);
    }
}

#[tokio::test]
async fn readiness_is_that_of_the_client() {
    let (mut service, mut client) =
        tower_test::mock::spawn_layer::<Request<String>, Response<Script>, _>(JudgeLayer::new());
    client.allow(0);
    assert_pending!(service.poll_ready());
    client.allow(1);
    assert!(service.is_woken());
    assert_ready!(service.poll_ready()).unwrap();
    client.send_error(io::Error::from(io::ErrorKind::ConnectionRefused));
    let error = assert_ready!(service.poll_ready()).unwrap_err();
    assert_eq!(error.class(), Class::Transport);
}

// Over real HTTP.

#[tokio::test]
async fn refusals_with_bodies_reuse_their_connection() {
    const CALLS: usize = 100;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    let server = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            counted.fetch_add(1, SeqCst);
            let refuse = hyper::service::service_fn(|_| async {
                let body = Full::new(Bytes::from(vec![b'x'; 64 << 10]));
                Response::builder().status(429).body(body)
            });
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, refuse));
        }
    });
    let mut service = JudgeLayer::new().layer(tower_quota::client::http::<Full<Bytes>>());
    for _ in 0..CALLS {
        let request = Request::get(format!("http://{address}/")).body(Full::default()).unwrap();
        let answer = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!((answer.status().as_u16(), stamp(&answer).whole), (429, true));
    }
    server.abort();
    let connections = connections.load(SeqCst);
    assert!(connections <= CALLS / 10, "{connections} connections for {CALLS} calls");
}
