//! What only shows from inside: whose memory, whose tokens, whose place.

use std::{
    convert::Infallible,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Method, Request, Response, Version};
use tokio_test::{assert_pending, assert_ready, assert_ready_ok, task};
use tower_layer::Layer;
use tower_service::Service;

use super::*;
use crate::{
    call::CallMemory,
    gate::Admission,
    org::{Family, Org},
    outcome::{ByStatus, Class, Error, Outcome, Stamped},
};

fn layer(
    build: impl FnOnce(RateLimitRetryBuilder<ByStatus>) -> RateLimitRetryBuilder<ByStatus>,
) -> RateLimitRetryLayer<ByStatus> {
    build(RateLimitRetryLayer::builder().classify(ByStatus).seed(1)).build().unwrap()
}

fn tokens<C>(layer: &RateLimitRetryLayer<C>) -> usize {
    let now = tokio::time::Instant::now();
    layer.shared.budget.read(|budget| budget.free(now))
}

/// Answers each call with the next status, and is ready only while `open` says so.
#[derive(Clone)]
struct Script {
    statuses: Arc<Mutex<Vec<u16>>>,
    seen: Arc<Mutex<Vec<Request<()>>>>,
    blocked: Arc<AtomicUsize>,
}

impl Script {
    fn new(statuses: &[u16]) -> Self {
        let statuses = Arc::new(Mutex::new(statuses.iter().rev().copied().collect()));
        Script { statuses, seen: Arc::default(), blocked: Arc::default() }
    }
}

impl Service<Request<()>> for Script {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.blocked.load(Ordering::Relaxed) > 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        self.seen.lock().unwrap().push(request);
        let status = self.statuses.lock().unwrap().pop().expect("no call beyond the script");
        std::future::ready(Ok(Response::builder().status(status).body(()).unwrap()))
    }
}

#[tokio::test(start_paused = true)]
async fn every_attempt_carries_the_one_memory_which_lives_as_long_as_the_request() {
    let script = Script::new(&[500, 429, 200]);
    let mut service = layer(|l| l).layer(script.clone());
    let mut call = task::spawn(service.call(Request::new(())));
    assert_pending!(call.poll());
    let first = script.seen.lock().unwrap()[0].extensions().get::<CallMemory>().unwrap().clone();
    assert_eq!(first.age_or(|| 41), 41);
    script.seen.lock().unwrap().clear();
    assert!(first.is_live(), "kept while the request is backing off");
    while call.poll().is_pending() {
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    for attempt in script.seen.lock().unwrap().drain(..) {
        assert_eq!(attempt.extensions().get::<CallMemory>().unwrap().age_or(|| 99), 41);
    }
    assert!(!first.is_live(), "a finished future that is still held keeps nothing");
}

#[tokio::test(start_paused = true)]
async fn a_further_attempt_and_the_request_that_comes_back_are_as_the_caller_gave_it() {
    #[derive(Clone, Debug, PartialEq)]
    struct Foreign(u8);

    let lines = |request: &Request<()>| {
        let lines = request.headers().iter().map(|(name, value)| (name.clone(), value.clone(), value.is_sensitive()));
        lines.collect::<Vec<_>>()
    };
    for foreign in [None, Some(Foreign(7))] {
        for (family, memory) in [(false, false), (true, false), (false, true), (true, true)] {
            let given = || {
                let mut secret = HeaderValue::from_static("secret");
                secret.set_sensitive(true);
                let mut given = Request::patch("https://host/path?query").version(Version::HTTP_2);
                for (name, value) in [("b", "1"), ("a", "2"), ("b", "3"), ("accept", "4")] {
                    given = given.header(name, value);
                }
                let mut given = given.header("c", secret).body(()).unwrap();
                foreign.clone().map(|foreign| given.extensions_mut().insert(foreign));
                family.then(|| given.extensions_mut().insert(Family::new("haiku")));
                memory.then(|| given.extensions_mut().insert(CallMemory::new()));
                given
            };
            let script = Script::new(&[500, 500]);
            let mut service = layer(|l| l.max_attempts(2)).layer(script.clone());
            let back = service.call(given()).await.unwrap_err().into_request().unwrap();
            let seen = script.seen.lock().unwrap();
            let [first, second] = seen.as_slice() else { panic!("two attempts") };
            assert_eq!(lines(first), lines(second));
            assert_eq!(lines(&back), lines(&given()));
            assert_eq!(lines(first)[..5], lines(&given()));
            assert_eq!(lines(first)[5].0, "idempotency-key");
            for request in [first, second, &back] {
                assert_eq!((request.method(), request.version()), (&Method::PATCH, Version::HTTP_2));
                assert_eq!(request.uri(), "https://host/path?query");
                assert_eq!(request.extensions().get(), foreign.as_ref());
                assert_eq!(request.extensions().get::<Family>().is_some(), family);
            }
            assert_eq!(back.extensions().get::<CallMemory>().is_some(), memory);
            assert_eq!(first.extensions().len(), second.extensions().len());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_comes_with_a_memory_keeps_its_age() {
    let script = Script::new(&[200]);
    let memory = CallMemory::new();
    memory.age_or(|| 7);
    let mut request = Request::new(());
    request.extensions_mut().insert(memory);
    layer(|l| l).layer(script.clone()).call(request).await.unwrap();
    let seen = script.seen.lock().unwrap();
    assert_eq!(seen[0].extensions().get::<CallMemory>().unwrap().age_or(|| 99), 7);
}

#[tokio::test(start_paused = true)]
async fn errors_take_tokens_and_429s_take_none() {
    let layer = layer(|l| l.retry_ratio(0.0).min_retries_per_second(1e-3));
    assert_eq!(tokens(&layer), 1);
    let statuses: Vec<_> = [429; 30].into_iter().chain([200]).collect();
    layer.layer(Script::new(&statuses)).call(Request::new(())).await.unwrap();
    assert_eq!(tokens(&layer), 1);
    layer.layer(Script::new(&[500, 200])).call(Request::new(())).await.unwrap();
    assert_eq!(tokens(&layer), 0);
}

#[tokio::test(start_paused = true)]
async fn an_empty_budget_delays_a_retry_until_there_is_a_token_and_wakes_it() {
    let layer = layer(|l| l.retry_ratio(0.5).min_retries_per_second(1e-3));
    layer.layer(Script::new(&[500, 200])).call(Request::new(())).await.unwrap();
    assert_eq!(tokens(&layer), 0);

    let mut late = task::spawn(layer.layer(Script::new(&[500, 200])).call(Request::new(())));
    assert_pending!(late.poll());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(late.is_woken(), "the backoff is over");
    assert_pending!(late.poll(), "one token is half there");
    tokio::time::advance(Duration::from_secs(60)).await;
    assert!(!late.is_woken());
    layer.layer(Script::new(&[200])).call(Request::new(())).await.unwrap();
    assert!(late.is_woken(), "traffic brought the rest");
    assert_ready_ok!(late.poll());
}

#[tokio::test(start_paused = true)]
async fn time_alone_brings_the_token() {
    let layer = layer(|l| l.retry_ratio(0.0).min_retries_per_second(0.1));
    layer.layer(Script::new(&[500, 200])).call(Request::new(())).await.unwrap();
    let began = tokio::time::Instant::now();
    layer.layer(Script::new(&[500, 200])).call(Request::new(())).await.unwrap();
    let waited = began.elapsed();
    assert!((Duration::from_millis(9_400)..=Duration::from_millis(10_010)).contains(&waited), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn dropped_in_any_state_it_gives_everything_back() {
    let layer = layer(|l| l.retry_ratio(0.0).min_retries_per_second(0.1));

    // Backing off.
    let mut call = task::spawn(layer.layer(Script::new(&[500])).call(Request::new(())));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!(tokens(&layer), 1, "a token is taken only when the retry is about to go");

    // Waiting for readiness, the token in hand.
    let script = Script::new(&[500]);
    script.blocked.store(1, Ordering::Relaxed);
    let mut call = task::spawn(layer.layer(script).call(Request::new(())));
    assert_pending!(call.poll());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_pending!(call.poll());
    assert_eq!(tokens(&layer), 0);

    // Waiting for the budget behind it.
    let mut behind = task::spawn(layer.layer(Script::new(&[500, 200])).call(Request::new(())));
    assert_pending!(behind.poll());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_pending!(behind.poll());
    let mut third = task::spawn(layer.layer(Script::new(&[500, 200])).call(Request::new(())));
    assert_pending!(third.poll());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_pending!(third.poll());
    drop(behind);

    drop(call);
    assert!(third.is_woken(), "the token came back, and the place before it is empty");
    assert_ready_ok!(third.poll());
}

#[tokio::test(start_paused = true)]
async fn the_org_and_the_source_of_an_error_are_kept() {
    let failing = tower::service_fn(|_: Request<()>| async {
        let mut error = Error::new(Outcome::of(Class::Transport), "connection reset");
        error.stamp_mut().org = Some(Org::new("a"));
        Err::<Response<()>, _>(error)
    });
    let layer = RateLimitRetryLayer::<Stamped>::builder().seed(1).build().unwrap();
    let error = layer.layer(failing).call(Request::new(())).await.unwrap_err();
    assert!(!error.is_rate_limited());
    assert!(error.is_redrivable());
    assert_eq!(error.class(), Some(Class::Transport));
    let source = std::error::Error::source(&error).unwrap();
    assert_eq!(source.downcast_ref::<Error>().unwrap().class(), Class::Transport);
    let text = error.to_string();
    assert!(text.starts_with("failed 5 times over ") && text.contains("connection reset"), "{text}");
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!(exhausted.reason, Exhaustion::Attempts);
    assert_eq!(exhausted.last.org.as_deref(), Some("a"));
    assert_eq!(exhausted.last.status, None);
    assert_eq!(exhausted.last.message, "no whole answer (org a): connection reset");
}

#[tokio::test(start_paused = true)]
async fn an_error_held_below_goes_back_at_once() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let held = tower::service_fn(move |_: Request<()>| {
        let first = counted.fetch_add(1, Ordering::Relaxed) == 0;
        let mut error = Error::new(Outcome::of(Class::Throttled), "429");
        error.stamp_mut().held_below = true;
        std::future::ready(if first { Err(error) } else { Ok(Response::new(())) })
    });
    let mut call = task::spawn(RateLimitRetryLayer::new().layer(held).call(Request::new(())));
    assert_ready!(call.poll()).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}
