//! The retry layer seen from outside: real waits under a paused clock, probes below it.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

use std::{
    collections::VecDeque,
    convert::Infallible,
    error::Error as StdError,
    future::{Ready, ready},
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready_ok, task};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, limit::ConcurrencyLimitLayer};
use tower_quota::{
    outcome::{ByStatus, Class, Outcome, Purse, Stamp, classify_fn},
    retry::{Exhaustion, RateLimitRetryBuilder, RateLimitRetryLayer, RetryError},
};

type Body = Full<Bytes>;

/// One answer of the provider.
#[derive(Clone)]
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    stamp: Option<Stamp>,
}

fn say(status: u16) -> Answer {
    Answer { status, headers: Vec::new(), stamp: None }
}

impl Answer {
    fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }

    /// As a balancer would: the org is held, or out, for now.
    fn held_below(mut self, class: Class) -> Self {
        let mut stamp = Stamp::new(Outcome::of(class));
        stamp.held_below = true;
        self.stamp = Some(stamp);
        self
    }

    fn response(self) -> Response<Body> {
        let mut response = Response::builder().status(self.status).body(Body::default()).unwrap();
        for (name, value) in self.headers {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
        if let Some(stamp) = self.stamp {
            response.extensions_mut().insert(stamp);
        }
        response
    }
}

type Seen = (Instant, Request<Body>);

/// Gives the answers in turn, then the last one for ever. Keeps what it was sent, and when. Its clone is not ready, and its
/// call insists on readiness.
struct Provider {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    ready: bool,
}

impl Provider {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        Provider { answers: Arc::new(Mutex::new(answers.into_iter().collect())), seen: Arc::default(), ready: false }
    }

    fn calls(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    /// The times of the calls, from the first.
    fn times(&self) -> Vec<Duration> {
        let seen = self.seen.lock().unwrap();
        seen.iter().map(|(at, _)| at.duration_since(seen[0].0)).collect()
    }

    fn keys(&self) -> Vec<Option<HeaderValue>> {
        let seen = self.seen.lock().unwrap();
        seen.iter().map(|(_, request)| request.headers().get("idempotency-key").cloned()).collect()
    }
}

impl Clone for Provider {
    fn clone(&self) -> Self {
        Provider { answers: self.answers.clone(), seen: self.seen.clone(), ready: false }
    }
}

impl Service<Request<Body>> for Provider {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without readiness");
        self.seen.lock().unwrap().push((Instant::now(), request));
        let mut answers = self.answers.lock().unwrap();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        ready(Ok(answer.expect("a provider has an answer").response()))
    }
}

fn builder() -> RateLimitRetryBuilder<ByStatus> {
    RateLimitRetryLayer::builder().classify(ByStatus)
}

fn request() -> Request<Body> {
    Request::post("/v1/messages?key=sk-secret")
        .header("x-api-key", "sk-secret")
        .header("content-type", "application/json")
        .body(Body::from("{\"prompt\":\"sk-secret\"}"))
        .unwrap()
}

type Ended = Result<Response<Body>, RetryError<Request<Body>, Infallible>>;

async fn run(builder: RateLimitRetryBuilder<ByStatus>, provider: &Provider) -> Ended {
    builder.build().unwrap().layer(provider.clone()).oneshot(request()).await
}

/// What, answers (the last for ever), the end, wire calls (0: not counted), not faster than, not slower than.
type Row = (&'static str, Vec<Answer>, End, usize, Duration, Duration);

enum End {
    Answered(u16),
    Exhausted(Exhaustion),
}

#[tokio::test(start_paused = true)]
async fn each_kind_of_refusal_ends_as_the_field_has_learnt_it_should() {
    use End::{Answered, Exhausted};
    let n = std::iter::repeat_n::<Answer>;
    let ms = Duration::from_millis;
    let rows: Vec<Row> = vec![
        ("500 for ever is five calls", vec![say(500)], Exhausted(Exhaustion::Attempts), 5, ms(0), ms(7_510)),
        ("one 500", vec![say(500), say(200)], Answered(200), 2, ms(0), ms(510)),
        ("one 529 is a passing failure", vec![say(529), say(200)], Answered(200), 2, ms(0), ms(510)),
        ("a bare 429", vec![say(429), say(200)], Answered(200), 2, ms(250), ms(510)),
        (
            "a 429 of 61 seconds is waited out, once",
            vec![say(429).header("retry-after", 61), say(200)],
            Answered(200),
            2,
            ms(61_000),
            ms(61_510),
        ),
        (
            "half a second is half a second",
            vec![say(429).header("retry-after", "0.5"), say(200)],
            Answered(200),
            2,
            ms(500),
            ms(1_010),
        ),
        (
            "a 503 may name its wait",
            vec![say(503).header("retry-after", 9), say(200)],
            Answered(200),
            2,
            ms(9_000),
            ms(9_010),
        ),
        (
            "3 errors and 50 429s",
            n(say(429).header("retry-after", 1), 25)
                .chain(n(say(500), 3))
                .chain(n(say(429).header("retry-after", 1), 25))
                .chain([say(200)])
                .collect(),
            Answered(200),
            54,
            ms(50_000),
            ms(79_000),
        ),
        ("a refused key is nobody else's business here", vec![say(401)], Answered(401), 1, ms(0), ms(0)),
        (
            "a refused key whose org is out below goes elsewhere at once",
            vec![say(401).held_below(Class::Unauthorised), say(200)],
            Answered(200),
            2,
            ms(0),
            ms(0),
        ),
        ("a final refusal", vec![say(400)], Answered(400), 1, ms(0), ms(0)),
        ("too large", vec![say(413)], Answered(413), 1, ms(0), ms(0)),
        (
            "the provider's word that a 500 is final",
            vec![say(500).header("x-should-retry", "false")],
            Answered(500),
            1,
            ms(0),
            ms(0),
        ),
        (
            "an org held below is not waited for up here",
            vec![say(429).header("retry-after", 300).held_below(Class::Throttled), say(200)],
            Answered(200),
            2,
            ms(0),
            ms(0),
        ),
        (
            "a request refused for itself is waited for up here",
            vec![say(429).held_below(Class::ThrottledRequest), say(200)],
            Answered(200),
            2,
            ms(250),
            ms(510),
        ),
        (
            "held below for ever ends by count",
            vec![say(429).held_below(Class::Throttled)],
            Exhausted(Exhaustion::Calls),
            1_000,
            ms(0),
            ms(0),
        ),
        (
            "429 for ever, and nobody is served, ends by patience",
            vec![say(429)],
            Exhausted(Exhaustion::Stalled),
            0,
            ms(570_000),
            ms(600_000),
        ),
    ];
    for (what, answers, end, calls, fastest, slowest) in rows {
        let provider = Provider::new(answers);
        let began = Instant::now();
        let ended = run(builder(), &provider).await;
        let took = began.elapsed();
        match (&ended, end) {
            (Ok(response), Answered(status)) => assert_eq!(response.status(), status, "{what}"),
            (Err(RetryError::Exhausted(exhausted)), Exhausted(reason)) => {
                assert_eq!(exhausted.reason, reason, "{what}");
                assert_eq!(exhausted.wire_calls as usize, provider.calls(), "{what}");
            }
            (other, _) => panic!("{what}: {other:?}"),
        }
        assert!(calls == 0 || calls == provider.calls(), "{what}: {} calls", provider.calls());
        assert!(fastest <= took && took <= slowest, "{what}: took {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_minute_of_429s_without_hints_is_outlasted() {
    for seed in 0..50 {
        let began = Instant::now();
        let provider = tower::service_fn(move |_: Request<Body>| {
            let open = began.elapsed() >= Duration::from_secs(60);
            ready(Ok::<_, Infallible>(say(if open { 200 } else { 429 }).response()))
        });
        let response = builder().seed(seed).build().unwrap().layer(provider).oneshot(request()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(began.elapsed() < Duration::from_secs(95), "{:?}", began.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_after_of_zero_is_no_invitation() {
    for seed in 0..50 {
        let zeros = std::iter::repeat_n(say(429).header("retry-after", 0), 10);
        let provider = Provider::new(zeros.chain([say(200)]));
        run(builder().seed(seed), &provider).await.unwrap();
        let times = provider.times();
        assert_eq!(times.len(), 11);
        let in_the_first_second = times.iter().filter(|at| **at < Duration::from_secs(1)).count();
        assert!(in_the_first_second <= 3, "{times:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_but_429s_ends_rate_limited_and_the_request_comes_back_as_it_was() {
    let provider = Provider::new([say(429).header("retry-after", 20)]);
    let mut original = request();
    original.extensions_mut().insert("the caller's");
    let before = (original.method().clone(), original.uri().clone(), original.headers().clone());
    let error = builder().build().unwrap().layer(provider.clone()).oneshot(original).await.unwrap_err();

    assert!(error.is_rate_limited(), "by a method");
    assert!(error.is_redrivable());
    assert_eq!(error.class(), Some(Class::Throttled));
    assert!(matches!(&error, RetryError::Exhausted(e) if e.reason == Exhaustion::Stalled), "and by a match");
    let text = error.to_string();
    assert!(text.starts_with("rate limited ") && text.contains(": try again later"), "{text}");
    assert!(text.ends_with("(the provider asked for 20s)"), "{text}");
    assert!(error.source().is_none(), "there was an answer each time, and no error");
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!(exhausted.counts.paid_by(Purse::Errors), 0, "the purse of errors is untouched");
    assert_eq!(exhausted.counts.of(Class::Throttled) as usize, provider.calls());
    assert!(exhausted.elapsed <= Duration::from_secs(600));

    let again = exhausted.request;
    assert_eq!(before, (again.method().clone(), again.uri().clone(), again.headers().clone()));
    assert_eq!(again.extensions().len(), 1);
    assert_eq!(again.extensions().get(), Some(&"the caller's"));
    assert!(
        exhausted.idempotency_key.is_some_and(|key| provider.keys().iter().all(|sent| sent.as_ref() == Some(&key)))
    );

    let recovered = Provider::new([say(200)]);
    builder().build().unwrap().layer(recovered.clone()).oneshot(again).await.unwrap();
    let seen = recovered.seen.lock().unwrap();
    let sent = format!("{:?}", seen[0].1.body());
    assert_eq!(sent, format!("{:?}", request().body()), "byte for byte");
}

#[tokio::test(start_paused = true)]
async fn the_first_and_the_last_cause_and_the_counts_are_kept() {
    let answers = [500, 500, 429, 429, 429, 429, 429, 429].map(say);
    let error = run(builder().max_calls(8), &Provider::new(answers)).await.unwrap_err();
    assert!(error.is_rate_limited(), "the last thing that stopped it was a 429");
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!(exhausted.counts.iter().collect::<Vec<_>>(), [(Class::Throttled, 6), (Class::Overloaded, 2)]);
    assert_eq!(exhausted.first.class, Class::Overloaded);
    assert_eq!(exhausted.first.status, Some(StatusCode::INTERNAL_SERVER_ERROR));
    assert_eq!(exhausted.last.message, "429 Too Many Requests");
    assert_eq!(exhausted.reason, Exhaustion::Calls);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_ends_in_errors_is_not_called_rate_limited() {
    let answers = [429, 500].map(say);
    let error = run(builder(), &Provider::new(answers)).await.unwrap_err();
    assert!(!error.is_rate_limited());
    assert!(error.is_redrivable());
    assert!(error.to_string().starts_with("failed 5 times over "), "{error}");
}

#[tokio::test(start_paused = true)]
async fn the_last_hint_is_told_as_the_provider_gave_it() {
    for (seconds, within) in [(120, 120), (999_999, 300)] {
        let began = Instant::now();
        let provider = Provider::new([say(429).header("retry-after", seconds)]);
        let error = run(builder().patience(Duration::from_secs(100)), &provider).await.unwrap_err();
        assert_eq!(began.elapsed(), Duration::ZERO, "a wait that would outlast the patience is not begun");
        let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
        assert_eq!(exhausted.last_hint, Some(Duration::from_secs(seconds)));
        assert_eq!(exhausted.not_before, Some(began + Duration::from_secs(within)), "under the reader's ceiling");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_wait_is_begun_while_others_are_served_and_given_up_when_nobody_is_any_more() {
    let second = Duration::from_secs(1);
    let patient = outcome_with_any_hint();
    let layer = RateLimitRetryLayer::builder().classify(patient).patience(100 * second).seed(1).build().unwrap();
    let others = Provider::new([say(200)]);
    layer.layer(others.clone()).oneshot(request()).await.unwrap();
    tokio::time::advance(10 * second).await;

    // Nobody was served for 100 seconds after the last one.
    let mut call = task::spawn(layer.layer(Provider::new([say(429).header("retry-after", 3_600)])).oneshot(request()));
    assert_pending!(call.poll(), "somebody was served ten seconds ago");
    tokio::time::advance(50 * second).await;
    layer.layer(others.clone()).oneshot(request()).await.unwrap();
    tokio::time::advance(99 * second).await;
    assert_pending!(call.poll(), "somebody was served 99 seconds ago");
    tokio::time::advance(2 * second).await;
    assert!(call.is_woken());
    let ended = call.poll();
    let Poll::Ready(Err(RetryError::Exhausted(exhausted))) = ended else { panic!("{ended:?}") };
    assert_eq!((exhausted.reason, exhausted.wire_calls), (Exhaustion::Stalled, 1));
    assert_eq!(exhausted.last_hint, Some(3_600 * second));

    // While somebody always is, it is waited out.
    let begin = Instant::now();
    let mut call =
        task::spawn(layer.layer(Provider::new([say(429).header("retry-after", 3_600), say(200)])).oneshot(request()));
    layer.layer(others.clone()).oneshot(request()).await.unwrap();
    while call.poll().is_pending() {
        tokio::time::advance(50 * second).await;
        layer.layer(others.clone()).oneshot(request()).await.unwrap();
    }
    assert!((3_600..=3_651).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
}

/// Believes hints of any length.
fn outcome_with_any_hint() -> impl tower_quota::outcome::Classify<Response<Body>, Infallible> + Clone {
    classify_fn(|result: Result<&Response<Body>, &Infallible>| match result {
        Ok(response) => Outcome::of_head(response.status(), response.headers(), Duration::MAX),
        Err(never) => match *never {},
    })
}

#[tokio::test(start_paused = true)]
async fn the_provider_is_quoted_in_the_last_cause_on_one_line() {
    let said = |status: u16, class: Class, words: &str| {
        let mut stamp = Stamp::new(Outcome::of(class));
        stamp.said = Some(words.into());
        Answer { stamp: Some(stamp), ..say(status) }
    };
    let provider = Provider::new([
        said(429, Class::Throttled, "rate_limit_error: too many"),
        said(529, Class::Overloaded, "overloaded_error: Overloaded"),
    ]);
    let error = run(builder(), &provider).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("last: 529 <unknown status code>: overloaded_error: Overloaded;"), "{text}");
    assert!(!text.contains('\n'), "{text}");
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!(exhausted.first.message, "429 Too Many Requests: rate_limit_error: too many");
}

#[tokio::test(start_paused = true)]
async fn what_the_provider_could_not_read_twice_is_its_answer() {
    let garbled = || Answer { stamp: Some(Stamp::new(Outcome::of(Class::Garbled))), ..say(400) };
    for (answers, status, calls) in [
        (vec![garbled(), say(200)], 200, 2),
        (vec![garbled(), garbled()], 400, 2),
        (vec![garbled(), say(500), say(429), garbled()], 400, 4),
        (vec![say(500), say(500), say(500), say(500), garbled(), say(200)], 200, 6),
    ] {
        let provider = Provider::new(answers);
        assert_eq!(run(builder(), &provider).await.unwrap().status(), status);
        assert_eq!(provider.calls(), calls);
    }
}

#[tokio::test(start_paused = true)]
async fn sleepers_with_one_hint_do_not_wake_as_a_herd_and_none_wakes_early() {
    let layer = builder().build().unwrap();
    let mut times: Vec<u128> = Vec::new();
    for _ in 0..100 {
        let provider = Provider::new([say(429).header("retry-after", 30), say(200)]);
        layer.layer(provider.clone()).oneshot(request()).await.unwrap();
        times.push(provider.times()[1].as_millis());
    }
    assert!(times.iter().all(|at| (30_000..=30_501).contains(at)), "{times:?}");
    times.sort_unstable();
    times.dedup();
    assert!(times.len() > 60, "only {} of 100 wake at a time of their own", times.len());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_backs_off_holds_no_slot() {
    let provider = Provider::new([say(429).header("retry-after", 10), say(200)]);
    let retry = builder().build().unwrap();
    let mut service = ServiceBuilder::new().layer(retry).layer(ConcurrencyLimitLayer::new(1)).service(provider);
    let mut first = task::spawn(service.ready().await.unwrap().call(request()));
    assert_pending!(first.poll());
    let mut second = task::spawn(service.ready().await.unwrap().call(request()));
    assert_ready_ok!(second.poll(), "the only slot is free while the first backs off");
    drop(second);
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(first.is_woken());
    assert_ready_ok!(first.poll());
}

#[tokio::test(start_paused = true)]
async fn the_answer_is_dropped_before_the_wait() {
    let alive = Arc::new(());
    let body = alive.clone();
    let provider = tower::service_fn(move |_: Request<()>| {
        ready(Ok::<_, Infallible>(Response::builder().status(429).body(body.clone()).unwrap()))
    });
    let mut call = task::spawn(builder().build().unwrap().layer(provider).oneshot(Request::new(())));
    let at_rest = Arc::strong_count(&alive);
    assert_pending!(call.poll());
    assert_eq!(Arc::strong_count(&alive), at_rest, "no body is kept");
}

#[tokio::test(start_paused = true)]
async fn readiness_is_the_inner_services_own_and_wakes_who_waits_for_it() {
    let (mock, mut handle) = tower_test::mock::pair::<Request<()>, Response<()>>();
    handle.allow(0);
    let mut service = task::spawn(builder().build().unwrap().layer(mock));
    assert_pending!(service.enter(|cx, mut service| Service::<Request<()>>::poll_ready(&mut *service, cx)));
    handle.allow(1);
    assert!(service.is_woken());
    assert_ready_ok!(service.enter(|cx, mut service| Service::<Request<()>>::poll_ready(&mut *service, cx)));

    let mut call = task::spawn(service.enter(|_, mut service| service.call(Request::new(()))));
    assert_pending!(call.poll());
    let (_, answer) = handle.next_request().await.unwrap();
    answer.send_response(Response::builder().status(429).body(()).unwrap());
    assert!(call.is_woken());
    assert_pending!(call.poll());
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(call.is_woken());
    assert_pending!(call.poll(), "the second attempt waits for readiness of its own");
    handle.allow(1);
    assert!(call.is_woken());
    assert_pending!(call.poll());
    let (_, answer) = handle.next_request().await.unwrap();
    answer.send_response(Response::new(()));
    assert!(call.is_woken());
    assert_ready_ok!(call.poll());
}

#[tokio::test(start_paused = true)]
async fn a_service_that_cannot_be_readied_again_ends_it() {
    let (mock, mut handle) = tower_test::mock::pair::<Request<()>, Response<()>>();
    let mut call = task::spawn(builder().build().unwrap().layer(mock).oneshot(Request::new(())));
    assert_pending!(call.poll());
    let (_, answer) = handle.next_request().await.unwrap();
    answer.send_response(Response::builder().status(500).body(()).unwrap());
    assert_pending!(call.poll());
    handle.send_error("closed");
    tokio::time::advance(Duration::from_secs(1)).await;
    let error = match call.poll() {
        Poll::Ready(Err(error)) => error.map_inner(tower_quota::outcome::Error::from_box),
        other => panic!("{other:?}"),
    };
    assert!(matches!(error, RetryError::Inner(_)));
    assert_eq!(error.class(), Some(Class::Transport));
}

#[derive(Clone)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Relaxed);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_written_on_one_attempt_does_not_reach_the_next() {
    let alive = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (a, m) = (alive.clone(), most.clone());
    // A layer below that marks each attempt, as a slot or a span would.
    let marking = tower::service_fn(move |mut request: Request<Body>| {
        assert!(request.extensions().get::<Counted>().is_none(), "a mark of an earlier attempt");
        request.extensions_mut().insert(Counted::new(&a));
        m.fetch_max(a.load(Relaxed), Relaxed);
        ready(Ok::<_, Infallible>(say(429).response()))
    });
    let layer = builder().max_calls(20).build().unwrap();
    let error = layer.layer(marking).oneshot(request()).await.unwrap_err();
    assert_eq!(most.load(Relaxed), 1);
    assert_eq!(alive.load(Relaxed), 0, "and none is left in the request that comes back");
    assert!(error.into_request().unwrap().extensions().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_idempotency_key_goes_with_all_attempts() {
    let keys = async |builder: RateLimitRetryBuilder<ByStatus>, method: Method, own: Option<&'static str>| {
        let provider = Provider::new([say(500), say(429), say(200)]);
        let mut request = request();
        *request.method_mut() = method;
        if let Some(own) = own {
            request.headers_mut().insert("idempotency-key", HeaderValue::from_static(own));
        }
        builder.build().unwrap().layer(provider.clone()).oneshot(request).await.unwrap();
        let keys = provider.keys();
        assert_eq!(keys.len(), 3);
        assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
        keys[0].clone().map(|key| key.to_str().unwrap().to_owned())
    };
    for method in [Method::POST, Method::PATCH] {
        let made = keys(builder(), method.clone(), None).await.unwrap();
        assert!(made.starts_with("tq-") && made.len() == 35, "{made}");
        assert_ne!(Some(made), keys(builder(), method, None).await);
    }
    assert_eq!(keys(builder(), Method::POST, Some("mine")).await.as_deref(), Some("mine"));
    assert_eq!(keys(builder().idempotency_key(false), Method::POST, Some("mine")).await.as_deref(), Some("mine"));
    assert_eq!(keys(builder().idempotency_key(false), Method::POST, None).await, None);
    assert_eq!(keys(builder(), Method::GET, None).await, None);
}

#[tokio::test(start_paused = true)]
async fn when_all_fail_retries_do_not_outgrow_traffic_and_nothing_is_lost() {
    let layer = builder().build().unwrap();
    let began = Instant::now();
    let calls: Vec<_> = (0..1_000)
        .map(|_| {
            let (layer, provider) = (layer.clone(), Provider::new([say(500), say(200)]));
            tokio::spawn(async move {
                layer.layer(provider.clone()).oneshot(request()).await.unwrap();
                provider.seen.lock().unwrap()[1].0
            })
        })
        .collect();
    let mut retried = Vec::new();
    for call in calls {
        retried.push(call.await.unwrap().duration_since(began).as_secs_f64());
    }
    retried.sort_by(f64::total_cmp);
    for (already, at) in retried.iter().enumerate() {
        // The bucket is full when the traffic comes, so what that brings does not fit.
        assert!(already as f64 <= 100.0 + 10.0 * at, "{already} retries within {at} s");
    }
    assert!((89.0..=90.6).contains(retried.last().unwrap()), "the rest come as time brings tokens: {retried:?}");
}

#[tokio::test(start_paused = true)]
async fn no_formatting_shows_what_the_request_holds() {
    let error = run(builder().max_calls(1), &Provider::new([say(429)])).await.unwrap_err();
    for text in [format!("{error:?}"), format!("{error:#?}"), error.to_string()] {
        assert!(!text.contains("sk-secret"), "{text}");
    }
    assert!(format!("{error:?}").contains("POST /v1/messages"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn it_stands_alone_around_what_is_not_http() {
    // Any response, any error: a closure says what they mean.
    let classify = classify_fn(|result: Result<_, &io::Error>| {
        Outcome::of(match result {
            Ok(0) => Class::Throttled,
            Ok(_) => Class::Ok,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Class::Transport,
            Err(_) => Class::Terminal,
        })
    });
    let answers = Arc::new(Mutex::new(VecDeque::from([
        Err(io::ErrorKind::ConnectionReset),
        Ok(0),
        Ok(7),
        Err(io::ErrorKind::PermissionDenied),
    ])));
    let foreign = tower::service_fn(move |_: Request<u8>| {
        ready(answers.lock().unwrap().pop_front().unwrap().map_err(io::Error::from))
    });
    let mut service = RateLimitRetryLayer::builder().classify(classify).build().unwrap().layer(foreign);
    assert_eq!(service.ready().await.unwrap().call(Request::new(1)).await.unwrap(), 7);
    let error = service.ready().await.unwrap().call(Request::new(1)).await.unwrap_err();
    assert_eq!(error.class(), None);
    let RetryError::Inner(inner) = error else { panic!("a final error is the caller's own: {error}") };
    assert_eq!(inner.kind(), io::ErrorKind::PermissionDenied);
}

#[test]
fn the_builder_names_the_field_that_is_wrong() {
    let ms = Duration::from_millis;
    let wrong = [
        ("max_attempts", builder().max_attempts(0)),
        ("backoff_base", builder().backoff_base(ms(0))),
        ("backoff_factor", builder().backoff_factor(0.9)),
        ("backoff_factor", builder().backoff_factor(f64::NAN)),
        ("backoff_cap", builder().backoff_cap(ms(499))),
        ("retry_ratio", builder().retry_ratio(-0.1)),
        ("min_retries_per_second", builder().min_retries_per_second(0.0)),
        ("min_retries_per_second", builder().min_retries_per_second(f64::INFINITY)),
        ("patience", builder().patience(ms(0))),
        ("max_calls", builder().max_calls(0)),
        ("deadline", builder().deadline(ms(0))),
    ];
    for (field, builder) in wrong {
        assert_eq!(builder.build().unwrap_err().field(), field);
    }
    assert!(builder().build().is_ok());
}

#[test]
fn its_future_travels_between_threads_and_its_error_boxes() {
    use tower_quota::{outcome, retry::RetryFuture};
    type Below = tower::util::BoxCloneSyncService<Request<Body>, Response<Body>, outcome::Error>;

    fn travels<T: Send>() {}
    fn boxes<E: Into<outcome::BoxError>>() {}
    travels::<RetryFuture<Below, Body, outcome::Stamped>>();
    boxes::<RetryError<Request<Body>, outcome::Error>>();
}
