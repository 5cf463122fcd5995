//! The provider in memory: an answer such as Anthropic's, after a turn through the scheduler.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
};
use http_body_util::Full;
use tower::Service;
use tower_quota::org::Family;

pub(crate) type Body = Full<Bytes>;
pub(crate) type Ask = Request<Body>;

/// What every caller sends: a clone of it a call.
pub(crate) fn request() -> Ask {
    let body = r#"{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{"role":"user","content":"judge item 42"}]}"#;
    // Nothing that is counted by reference: two threads would quarrel over the counts, under any stack.
    Request::post(Uri::from_static("/v1/messages"))
        .header(CONTENT_TYPE, HeaderValue::from_static("application/json"))
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .unwrap()
}

/// The same for a stack that keeps families apart.
pub(crate) fn request_of_family() -> Ask {
    let mut request = request();
    request.extensions_mut().insert(Family::of_model("claude-haiku-4-5"));
    request
}

const ORGANISATION: &str = "anthropic-organization-id";

/// The headers of a large quota that is nearly full: read and settled, never binding.
const HEADERS: [(&str, &str); 17] = [
    ("content-type", "application/json"),
    ("date", "Thu, 27 Nov 2025 09:00:00 GMT"),
    ("request-id", "req_011CSHoEeqs5C35K2UUqR7Fy"),
    (ORGANISATION, "7d1b4f2e-3f0a-4c57-9d0e-2f6f0b1c8a55"),
    ("anthropic-ratelimit-requests-limit", "6000000000"),
    ("anthropic-ratelimit-requests-remaining", "5900000000"),
    ("anthropic-ratelimit-requests-reset", "2025-11-27T09:00:01Z"),
    ("anthropic-ratelimit-input-tokens-limit", "600000000000"),
    ("anthropic-ratelimit-input-tokens-remaining", "590000000000"),
    ("anthropic-ratelimit-input-tokens-reset", "2025-11-27T09:00:01Z"),
    ("anthropic-ratelimit-output-tokens-limit", "600000000000"),
    ("anthropic-ratelimit-output-tokens-remaining", "590000000000"),
    ("anthropic-ratelimit-output-tokens-reset", "2025-11-27T09:00:01Z"),
    ("anthropic-ratelimit-tokens-limit", "1200000000000"),
    ("anthropic-ratelimit-tokens-remaining", "1180000000000"),
    ("anthropic-ratelimit-tokens-reset", "2025-11-27T09:00:01Z"),
    ("content-length", "326"),
];

const ANSWER: &str = r#"{"id":"msg_01XFDUDYJgAACzvnptvVoYEL","type":"message","role":"assistant","model":"claude-haiku-4-5","content":[{"type":"text","text":"{\"verdict\":\"pass\",\"score\":4}"}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":412,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":17}}"#;

static HEAD: LazyLock<HeaderMap> = LazyLock::new(|| {
    let lines = HEADERS.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let head: HeaderMap = lines.collect();
    assert_eq!(head[CONTENT_LENGTH], HeaderValue::from(ANSWER.len()));
    head
});

/// Answers every call after `turns` turns through the scheduler. With none it answers in the first poll, and no slot is ever
/// held while somebody else runs.
#[derive(Clone)]
pub(crate) struct Wire {
    turns: u32,
    head: &'static HeaderMap,
    gauge: Option<Arc<Gauge>>,
}

/// How many calls are in flight, and were at most. Only where somebody asks: two threads would pay for the count.
#[derive(Default)]
pub(crate) struct Gauge {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }
}

impl Wire {
    pub(crate) fn new(turns: u32) -> Self {
        Wire { turns, head: &HEAD, gauge: None }
    }

    /// The same for an org of its own: two that answer by one id share a quota, and one of them would be a spare.
    pub(crate) fn of_org(&self, name: &str) -> Self {
        let mut head = HEAD.clone();
        // Not counted by reference either.
        head.insert(ORGANISATION, HeaderValue::from_static(Box::leak(name.to_owned().into_boxed_str())));
        Wire { head: Box::leak(Box::new(head)), ..self.clone() }
    }

    /// The same with a gauge.
    pub(crate) fn gauged(turns: u32) -> (Self, Arc<Gauge>) {
        let gauge = Arc::new(Gauge::default());
        (Wire { gauge: Some(gauge.clone()), ..Wire::new(turns) }, gauge)
    }
}

impl Service<Ask> for Wire {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Ask) -> Answering {
        drop(std::hint::black_box(request));
        if let Some(gauge) = &self.gauge {
            let now = gauge.now.fetch_add(1, Relaxed) + 1;
            gauge.peak.fetch_max(now, Relaxed);
        }
        Answering { wire: self.clone(), turns: Turns(self.turns) }
    }
}

pub(crate) struct Answering {
    wire: Wire,
    turns: Turns,
}

impl Future for Answering {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if Pin::new(&mut self.turns).poll(cx).is_pending() {
            return Poll::Pending;
        }
        if let Some(gauge) = &self.wire.gauge {
            gauge.now.fetch_sub(1, Relaxed);
        }
        let mut response = Response::new(Full::new(Bytes::from_static(ANSWER.as_bytes())));
        *response.headers_mut() = self.wire.head.clone();
        Poll::Ready(Ok(response))
    }
}

/// So many turns through the scheduler. Not tokio's `yield_now`, which lets the timer and the sockets go first: with one
/// caller that would be a system call a turn, and nothing else would be seen.
pub(crate) struct Turns(pub(crate) u32);

impl Future for Turns {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.0 == 0 {
            return Poll::Ready(());
        }
        self.0 -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// The least a service can be, for what is not HTTP: a number, after its turns.
#[derive(Clone)]
pub(crate) struct Plain(pub(crate) u32);

impl Service<u64> for Plain {
    type Response = u64;
    type Error = Infallible;
    type Future = PlainAnswer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: u64) -> PlainAnswer {
        PlainAnswer(request, Turns(self.0))
    }
}

pub(crate) struct PlainAnswer(u64, Turns);

impl Future for PlainAnswer {
    type Output = Result<u64, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.1).poll(cx).map(|()| Ok(self.0))
    }
}
