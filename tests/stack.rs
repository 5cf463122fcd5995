//! The ready-made stack over the simulated provider, in virtual time.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

use std::{
    collections::{BTreeMap, BTreeSet},
    error::Error as _,
    future::Future,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use serde::Deserialize;
use tokio::time::Instant;
use tokio_test::{assert_pending, task};
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::timeout::TimeoutLayer;
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    balance::NoOrgLeft,
    dialect::{Anthropic, NoHeaders, OpenAi},
    drive::{Drive, DriveError},
    judge::{Gather, JudgeLayer},
    org::{Credential, Dialect, Family, Org, Orgs},
    outcome::{ByStatus, Class, Error, Purse, Stamp, Stamped},
    quota::QuotaHeaderLayer,
    retry::{Exhaustion, RateLimitRetryLayer, RetryError},
    sim::{self, Config, Latency, OrgConfig, RetryAfter, Sim, Truth},
    stack::Stack,
};

type Body = Full<Bytes>;
type Req = Request<Body>;
type Failed = RetryError<Req, Error>;

const SECOND: Duration = Duration::from_secs(1);

fn provider() -> Config {
    Config::new(Dialect::Anthropic).latency(Latency::new(50.0, 0.3))
}

/// The orgs of a simulated provider, as its client knows them.
fn pool(config: &Config) -> Orgs {
    let orgs = config.orgs.iter().map(|org| {
        let org = Org::new(&org.name).credential(Credential::new(org.key.expose()));
        org.base_url(Uri::from_static("http://provider.test")).dialect(config.dialect)
    });
    Orgs::new(orgs).unwrap()
}

fn orgs<const N: usize>(names: [&str; N]) -> Orgs {
    Orgs::new(names.map(|name| Org::new(name).base_url(Uri::from_static("http://provider.test")))).unwrap()
}

fn item(dialect: Dialect, item: u64) -> Req {
    let (path, model) = match dialect {
        Dialect::OpenAi => ("/v1/chat/completions", "gpt-4o"),
        _ => ("/v1/messages", "claude-sonnet-4-5"),
    };
    let text = format!(
        r#"{{"model":"{model}","max_tokens":64,"messages":[{{"role":"user","content":"judge item {item}"}}]}}"#
    );
    let mut request = Request::post(path).header("content-type", "application/json").body(text.into()).unwrap();
    request.extensions_mut().insert(Family::of_model(model));
    request
}

fn message(id: u64) -> Req {
    item(Dialect::Anthropic, id)
}

/// Drives `items` through `service` and counts what became of them; every answer is checked to be a success.
async fn drive<S, RB>(service: S, items: impl Iterator<Item = (u64, Req)>, bound: usize) -> Vec<(u64, Failed)>
where
    S: Service<Req, Response = Response<RB>, Error = Failed>,
{
    let mut failed = Vec::new();
    let mut seen = BTreeSet::new();
    let mut drive = Drive::iter(service, items, bound).unwrap();
    while let Some((id, result)) = drive.next().await {
        assert!(seen.insert(id), "item {id} is yielded twice");
        match result {
            Ok(response) => assert!(response.status().is_success(), "item {id}: {}", response.status()),
            Err(DriveError::Service(error)) => failed.push((id, error)),
            Err(error) => panic!("item {id}: {error}"),
        }
    }
    assert!(drive.peak_live() <= bound);
    failed
}

fn answer(status: u16) -> Response<Body> {
    let body = if status == 200 { r#"{"content":[{"type":"text","text":"yes"}]}"# } else { r#"{"error":{}}"# };
    Response::builder().status(status).header("content-type", "application/json").body(body.into()).unwrap()
}

fn with(status: u16, name: &'static str, value: &'static str) -> Response<Body> {
    let mut response = answer(status);
    response.headers_mut().insert(name, HeaderValue::from_static(value));
    response
}

/// A client whose every call is answered by a function of its number, from 1, and which counts.
type Client = tower::util::BoxCloneSyncService<Req, Response<Body>, BoxError>;
type Counted = Arc<AtomicUsize>;

fn client<F, A>(answers: F) -> (Client, Counted)
where
    F: Fn(usize, Req) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Body>> + Send + 'static,
{
    let calls = Counted::default();
    let count = calls.clone();
    let service = service_fn(move |request: Req| {
        let answer = answers(count.fetch_add(1, Relaxed) + 1, request);
        async move { Ok(answer.await) }
    });
    (tower::util::BoxCloneSyncService::new(service), calls)
}

async fn whole(request: Req) -> Bytes {
    request.into_body().collect().await.unwrap().to_bytes()
}

fn served_by<B>(response: &Response<B>) -> String {
    response.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name().to_owned()
}

// The three findings.

#[tokio::test(start_paused = true)]
async fn a_run_of_nothing_but_429s_ends_rate_limited_and_goes_through_later() {
    let bad = provider()
        .org(OrgConfig::new("a", "key-a").black_hole(true))
        .org(OrgConfig::new("b", "key-b").black_hole(true).retry_after(RetryAfter::None));
    let good = provider().org(OrgConfig::new("a", "key-a")).org(OrgConfig::new("b", "key-b"));
    let request = |id: u64| {
        let mut request = message(id);
        request.headers_mut().insert("x-item-id", id.into());
        request.headers_mut().append("x-tag", HeaderValue::from_static("one"));
        request.headers_mut().append("x-tag", HeaderValue::from_static("two"));
        request
    };
    let patience = RateLimitRetryLayer::builder().patience(60 * SECOND).max_attempts(1).build().unwrap();
    let sim = Sim::new(bad.clone()).unwrap();
    let stack = Stack::new(pool(&bad)).retry(patience).build(sim.service()).unwrap();
    let begin = Instant::now();
    let failed = drive(stack, (0..20).map(|id| (id, request(id))), 64).await;
    assert_eq!(failed.len(), 20, "none is answered, none is lost");
    assert!(begin.elapsed() >= 20 * SECOND);
    let (mut again, mut refused) = (Vec::new(), 0);
    for (id, error) in failed {
        assert!(error.is_rate_limited() && error.is_redrivable());
        let RetryError::Exhausted(exhausted) = &error else { panic!("{error}") };
        assert_eq!(exhausted.reason, Exhaustion::Stalled);
        if exhausted.wire_calls == 0 {
            // It has only waited for its turn, while others were refused.
            assert!(error.to_string().starts_with("waited "), "{error}");
            assert_eq!((exhausted.last.class, exhausted.last.status), (Class::Local, None));
        } else {
            refused += 1;
            assert!(error.to_string().starts_with("rate limited "), "{error}");
            assert_eq!(exhausted.last.class, Class::Throttled);
            assert_eq!(exhausted.last.status, Some(StatusCode::TOO_MANY_REQUESTS));
            assert!(exhausted.last.org.is_some());
            assert!(exhausted.counts.of(Class::Throttled) >= 1);
        }
        assert_eq!(exhausted.counts.paid_by(Purse::Errors), 0, "the purse of errors is untouched");
        let (was, is) = (request(id), error.into_request().unwrap());
        assert_eq!((was.method(), was.uri(), was.headers()), (is.method(), is.uri(), is.headers()));
        assert_eq!(is.extensions().get::<Family>(), was.extensions().get());
        assert_eq!(whole(was).await, whole(is.clone()).await);
        again.push((id, is));
    }
    assert!(refused >= 1);
    assert_eq!(sim.truth().ok(), 0);
    let sim = Sim::new(good.clone()).unwrap();
    let stack = Stack::new(pool(&good)).build(sim.service()).unwrap();
    let failed = drive(stack, again.into_iter(), 64).await;
    assert!(failed.is_empty());
    assert_eq!((sim.truth().answered_once, sim.truth().answered_more), (20, 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_and_what_has_failed_are_told_apart() {
    for (status, refused) in [(429, true), (500, false)] {
        let (client, _) = client(move |_, _| async move { answer(status) });
        let retry = RateLimitRetryLayer::builder().patience(10 * SECOND).build().unwrap();
        let stack = Stack::new(orgs(["a"])).retry(retry).build(client).unwrap();
        let error = stack.oneshot(message(1)).await.unwrap_err();
        assert_eq!(error.is_rate_limited(), refused);
        let matched = match &error {
            RetryError::Exhausted(exhausted) if exhausted.is_rate_limited() => true,
            RetryError::Exhausted(_) => false,
            _ => panic!("{error}"),
        };
        assert_eq!(matched, refused);
        assert!(error.is_redrivable());
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_take_nothing_from_the_budget_of_errors() {
    // Five errors come between two hundred refusals; the budget holds no more than it takes.
    let (client, calls) = client(|call, _| async move {
        match call {
            ..=205 if call % 50 == 0 => answer(500),
            ..=205 => with(429, "retry-after-ms", "20"),
            _ => answer(200),
        }
    });
    let retry = RateLimitRetryLayer::builder().retry_ratio(0.0).min_retries_per_second(0.4).build().unwrap();
    let stack = Stack::new(orgs(["a"])).retry(retry).build(client).unwrap();
    let begin = Instant::now();
    let response = stack.oneshot(message(1)).await.unwrap();
    assert_eq!((response.status(), calls.load(Relaxed)), (StatusCode::OK, 206));
    assert!(begin.elapsed() < 60 * SECOND, "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_hundred_thousand_items_never_are_more_alive_than_the_bound() {
    const ITEMS: u64 = 100_000;
    const BOUND: usize = 200;
    let (in_client, most) = (Counted::default(), Counted::default());
    let (alive, peak) = (in_client.clone(), most.clone());
    let (client, calls) = client(move |_, _| {
        let (alive, peak) = (alive.clone(), peak.clone());
        async move {
            peak.fetch_max(alive.fetch_add(1, Relaxed) + 1, Relaxed);
            tokio::task::yield_now().await;
            alive.fetch_sub(1, Relaxed);
            answer(200)
        }
    });
    let taken = Counted::default();
    let count = taken.clone();
    let input = (0..ITEMS).map(move |id| {
        count.fetch_add(1, Relaxed);
        (id, message(id))
    });
    let stack = Stack::new(orgs(["a", "b", "c"])).build(client).unwrap();
    let mut drive = Drive::iter(stack, input, BOUND).unwrap();
    let mut done = 0;
    while let Some((_, result)) = drive.next().await {
        assert_eq!(result.unwrap().status(), 200);
        done += 1;
        let ahead = taken.load(Relaxed) - done;
        assert!(ahead <= BOUND, "{ahead} are taken and not done");
        assert!(drive.live() <= BOUND);
    }
    assert_eq!((done as u64, calls.load(Relaxed) as u64), (ITEMS, ITEMS));
    assert!((100..=BOUND).contains(&drive.peak_live()), "{}", drive.peak_live());
    assert!(most.load(Relaxed) <= BOUND);
}

#[tokio::test(start_paused = true)]
async fn in_a_burst_no_request_waits_while_any_org_has_a_slot() {
    for seed in 0..2 {
        fastrand::seed(seed);
        let caps = [("a", 20), ("b", 5), ("c", 1)];
        let config = caps.iter().fold(provider().unlimited(true).seed(seed), |all, (name, _)| {
            all.org(OrgConfig::new(*name, format!("k{name}")))
        });
        let orgs = pool(&config);
        let orgs = Orgs::new(orgs.iter().zip(caps).map(|(org, (_, cap))| org.clone().cap(cap))).unwrap();
        let settings = Settings::builder().start(1.0).build().unwrap();
        let sim = Sim::new(config).unwrap();
        let stack = Stack::new(orgs.clone()).limit(settings).build(sim.service()).unwrap();
        let family = Family::of_model("claude-sonnet-4-5");
        let boards: Vec<_> = orgs.iter().map(|org| org.family(&family)).collect();
        let mut drive = Drive::iter(stack, (0..1_000).map(|id| (id, message(id))), 100).unwrap();
        let (mut done, mut looks) = (0, 0);
        loop {
            let next = std::future::poll_fn(|cx| {
                let polled = std::pin::pin!(drive.next()).poll(cx);
                if polled.is_pending() && done >= 30 {
                    // All that could be done has been done; the depth of each org is known by now.
                    looks += 1;
                    let flying: Vec<_> = boards.iter().map(|org| org.snapshot().in_flight).collect();
                    let (all, live): (usize, _) = (flying.iter().sum(), drive.live());
                    assert!(all == 26 || all == live, "{flying:?} of 20, 5, 1 are in flight, {live} are alive");
                }
                polled
            });
            match next.await {
                Some((_, result)) => assert_eq!(result.unwrap().status(), 200),
                None => break,
            }
            done += 1;
        }
        assert_eq!(done, 1_000);
        assert!(looks > 200, "{looks}");
        let peaks: Vec<_> = sim.truth().orgs.iter().map(|org| org.peak_in_flight).collect();
        assert_eq!(peaks, [20, 5, 1]);
        assert!(boards.iter().all(|org| (org.snapshot().in_flight, org.snapshot().waiting) == (0, 0)));
    }
}

// The order of the layers.

/// Over one slot: when the first request, which is told to come back in ten seconds, and the second are done.
async fn first_and_second<S, RB>(over: impl FnOnce(Org, Client) -> S) -> (Duration, Duration)
where
    S: Service<Req, Response = Response<RB>, Error: std::fmt::Debug + Send> + Clone + Send + 'static,
    S::Future: Send,
    RB: Send + 'static,
{
    let (client, _) = client(|call, _| async move {
        tokio::time::sleep(SECOND / 10).await;
        if call == 1 { with(503, "retry-after", "10") } else { answer(200) }
    });
    let service = over(orgs(["a"]).get("a").unwrap().clone().cap(1), client);
    let begin = Instant::now();
    let of = |id: u64, after: Duration| {
        let service = service.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            assert_eq!(service.oneshot(message(id)).await.unwrap().status(), 200);
            begin.elapsed()
        })
    };
    let (first, second) = (of(1, Duration::ZERO), of(2, SECOND / 5));
    (first.await.unwrap(), second.await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn no_slot_is_held_while_a_request_backs_off() {
    let (first, second) =
        first_and_second(|org, client| Stack::new(Orgs::new([org]).unwrap()).build(client).unwrap()).await;
    assert!(first >= 10 * SECOND && second < SECOND, "{first:?}, {second:?}");
}

#[tokio::test(start_paused = true)]
async fn with_the_limit_over_the_retry_the_slot_would_be_held() {
    let (first, second) = first_and_second(|org, client| {
        let retry = RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap();
        AimdLimitLayer::new(&org).layer(retry.layer(client))
    })
    .await;
    assert!(first >= 10 * SECOND && second > first, "{first:?}, {second:?}");
}

#[tokio::test(start_paused = true)]
async fn there_is_one_owner_of_retries() {
    let config = provider().org(OrgConfig::new("a", "key-a").error_5xx(true));
    let sim = Sim::new(config.clone()).unwrap();
    let stack = Stack::new(pool(&config)).build(sim.service()).unwrap();
    let error = stack.oneshot(message(1)).await.unwrap_err();
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!((exhausted.reason, exhausted.last.class), (Exhaustion::Attempts, Class::Overloaded));
    assert_eq!(sim.truth().calls(), 5);
    assert_eq!(exhausted.wire_calls, 5);
}

#[tokio::test(start_paused = true)]
async fn a_slot_is_kept_until_a_streamed_answer_has_ended() {
    let config = provider().org(OrgConfig::new("a", "key-a").latency(Latency::new(1_000.0, 0.0)));
    let sim = Sim::new(config.clone()).unwrap();
    let orgs = Orgs::new(pool(&config).iter().map(|org| org.clone().cap(1))).unwrap();
    let stack = Stack::new(orgs).judge(JudgeLayer::new().gather(Gather::ErrorsOnly)).build(sim.service()).unwrap();
    let streamed = |id: u64| {
        let text = format!(r#"{{"model":"claude-sonnet-4-5","stream":true,"item":{id}}}"#);
        Request::post("/v1/messages").body(Body::from(text)).unwrap()
    };
    for drops in [false, true] {
        let first = stack.clone().oneshot(streamed(1)).await.unwrap();
        let mut second = task::spawn(stack.clone().oneshot(streamed(2)));
        assert_pending!(second.poll());
        tokio::time::advance(10 * SECOND).await;
        assert_pending!(second.poll());
        assert_eq!(sim.truth().org("a").unwrap().in_flight, 1, "the head is there, the body is not read");
        let mut body = first.into_body();
        if !drops {
            while let Some(frame) = body.frame().await {
                frame.unwrap();
            }
            assert!(second.is_woken(), "at the last frame, though the body is kept");
        }
        drop(body);
        assert!(second.is_woken());
        let second = second.await.unwrap();
        second.into_body().collect().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_gathered_whole_gives_its_slot_back_however_long_it_is_kept() {
    let config = provider().org(OrgConfig::new("a", "key-a"));
    let sim = Sim::new(config.clone()).unwrap();
    let orgs = Orgs::new(pool(&config).iter().map(|org| org.clone().cap(1))).unwrap();
    let stack = Stack::new(orgs).build(sim.service()).unwrap();
    let mut kept = Vec::new();
    for id in 0..5 {
        kept.push(stack.clone().oneshot(message(id)).await.unwrap());
    }
    assert_eq!(sim.truth().ok(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_that_makes_up_answers_stands_above_the_judge_and_above_the_limit() {
    /// It has no default, as hyper's has none.
    struct Bare(Body);
    impl http_body::Body for Bare {
        type Data = Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            cx: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
            std::pin::Pin::new(&mut self.0).poll_frame(cx)
        }
    }
    let timeout = || TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, SECOND);
    let hanging = || service_fn(|_: Req| std::future::pending::<Result<Response<Bare>, BoxError>>());

    let org = Org::new("a");
    let mut below = ServiceBuilder::new()
        .layer(AimdLimitLayer::new(&org).classify(Stamped))
        .layer(QuotaHeaderLayer::new(&org))
        .layer(timeout())
        .layer(JudgeLayer::new())
        .service(hanging());
    let answer = below.ready().await.unwrap().call(message(1)).await.unwrap();
    assert_eq!((answer.status(), org.snapshot().in_flight), (StatusCode::REQUEST_TIMEOUT, 0));
    assert_eq!(answer.body().get_ref().bytes(), Some(&Bytes::new()), "an empty body, gathered");

    let mut above = ServiceBuilder::new()
        .layer(timeout())
        .layer(AimdLimitLayer::new(&org).classify(Stamped))
        .layer(JudgeLayer::new())
        .service(hanging());
    let answer = above.ready().await.unwrap().call(message(2)).await.unwrap();
    assert_eq!((answer.status(), org.snapshot().in_flight), (StatusCode::REQUEST_TIMEOUT, 0));
    assert!(answer.into_body().collect().await.unwrap().to_bytes().is_empty());
}

// Dead keys.

#[tokio::test(start_paused = true)]
async fn a_dead_key_costs_one_call_and_no_item() {
    let config = provider().org(OrgConfig::new("a", "key-a").unauthorised(true)).org(OrgConfig::new("b", "key-b"));
    let sim = Sim::new(config.clone()).unwrap();
    let orgs = pool(&config);
    let stack = Stack::new(orgs.clone()).build(sim.service()).unwrap();
    let failed = drive(stack, (0..100).map(|id| (id, message(id))), 100).await;
    assert!(failed.is_empty());
    let truth = sim.truth();
    assert_eq!((truth.org("a").unwrap().calls, truth.org("b").unwrap().ok), (1, 100));
    assert!(orgs.get("a").unwrap().is_out() && !orgs.get("b").unwrap().is_out());
}

#[tokio::test(start_paused = true)]
async fn when_every_key_is_dead_the_run_ends_at_once_and_names_each() {
    let dead = |name: &str| OrgConfig::new(name, format!("key-{name}")).unauthorised(true);
    let config = provider().org(dead("a")).org(dead("b")).org(dead("c"));
    let sim = Sim::new(config.clone()).unwrap();
    let stack = Stack::new(pool(&config)).build(sim.service()).unwrap();
    let begin = Instant::now();
    let failed = drive(stack, (0..200).map(|id| (id, message(id))), 100).await;
    assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
    assert_eq!(failed.len(), 200, "no item is lost");
    for (_, error) in failed {
        assert!(error.is_redrivable(), "with other keys they go through");
        assert!(!error.is_rate_limited());
        let RetryError::Inner(error) = error else { panic!("{error}") };
        assert_eq!(error.class(), Class::NoOrg);
        let none_left: &NoOrgLeft = error.source().unwrap().downcast_ref().unwrap();
        assert_eq!(none_left.reasons().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "b", "c"]);
    }
    assert!(sim.truth().calls() <= 3, "{}", sim.truth().calls());
}

#[tokio::test(start_paused = true)]
async fn a_dead_key_and_a_used_one_are_not_the_same() {
    let config = provider().org(OrgConfig::new("a", "key-a").unauthorised(true)).org(
        OrgConfig::new("b", "key-b")
            .black_hole(true)
            .at(3.0, serde_json::from_str(r#"{ "black_hole": false }"#).unwrap()),
    );
    let sim = Sim::new(config.clone()).unwrap();
    let stack = Stack::new(pool(&config)).build(sim.service()).unwrap();
    let failed = drive(stack, (0..20).map(|id| (id, message(id))), 20).await;
    assert!(failed.is_empty());
    assert_eq!((sim.truth().org("a").unwrap().calls, sim.truth().org("b").unwrap().ok), (1, 20));
}

#[tokio::test(start_paused = true)]
async fn an_org_without_money_is_asked_once() {
    let calls = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let counts = calls.clone();
    let stack = Stack::new(orgs(["a", "b"]))
        .build_with(move |org| {
            let (counts, name) = (counts.clone(), org.name().to_owned());
            service_fn(move |_: Req| {
                *counts.lock().unwrap().entry(name.clone()).or_default() += 1;
                let body = r#"{"error":{"type":"insufficient_quota","code":"insufficient_quota"}}"#;
                let answer = match &*name {
                    "a" => Response::builder().status(429).body(Full::from(body)).unwrap(),
                    _ => answer(200),
                };
                async move {
                    tokio::time::sleep(SECOND / 100).await;
                    Ok::<_, BoxError>(answer)
                }
            })
        })
        .unwrap();
    let failed = drive(stack, (0..1_000).map(|id| (id, message(id))), 100).await;
    assert!(failed.is_empty());
    let calls = calls.lock().unwrap();
    assert_eq!((calls["a"], calls["b"]), (1, 1_000));
}

// Holds.

#[tokio::test(start_paused = true)]
async fn a_long_hint_of_one_org_delays_nothing_while_another_is_idle() {
    for seed in 0..10 {
        fastrand::seed(seed);
        let config = provider()
            .org(OrgConfig::new("a", "key-a").black_hole(true).black_hole_wait_s(300.0))
            .org(OrgConfig::new("b", "key-b"));
        let sim = Sim::new(config.clone()).unwrap();
        let stack = Stack::new(pool(&config)).build(sim.service()).unwrap();
        for id in 0..10 {
            let begin = Instant::now();
            let response = stack.clone().oneshot(message(id)).await.unwrap();
            assert_eq!(served_by(&response), "b");
            assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
        }
        assert!(sim.truth().org("a").unwrap().calls <= 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_org_that_always_refuses_leaves_the_work_to_its_sibling() {
    let config = provider()
        .record_arrivals(true)
        .org(OrgConfig::new("a", "key-a").black_hole(true).black_hole_wait_s(60.0))
        .org(OrgConfig::new("b", "key-b").requests_per_minute(600.0));
    let sim = Sim::new(config.clone()).unwrap();
    let stack = Stack::new(pool(&config)).build(sim.service()).unwrap();
    let failed = drive(stack, (0..1_000).map(|id| (id, message(id))), 100).await;
    assert!(failed.is_empty());
    assert_eq!(sim.truth().org("b").unwrap().ok, 1_000);
    // Some 100 s of work, and a probe a minute.
    assert!(sim.truth().org("a").unwrap().calls <= 3, "{}", sim.truth().org("a").unwrap().calls);
}

#[tokio::test(start_paused = true)]
async fn during_its_hold_an_org_is_not_called_at_all() {
    let times = Arc::new(Mutex::new(Vec::new()));
    let seen = times.clone();
    let (client, _) = client(move |call, _| {
        seen.lock().unwrap().push(Instant::now());
        async move { if call == 1 { with(429, "retry-after", "5") } else { answer(200) } }
    });
    let stack = Stack::new(orgs(["a"])).build(client).unwrap();
    let failed = drive(stack, (0..20).map(|id| (id, message(id))), 20).await;
    assert!(failed.is_empty());
    let times = times.lock().unwrap();
    assert!(times.iter().skip(1).all(|at| *at - times[0] >= 5 * SECOND), "the fresh ones wait too");
    assert!(*times.last().unwrap() - times[0] < 6 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_lone_org_is_soon_asked_again_after_a_bare_429() {
    let (client, calls) = client(|call, _| async move { answer(if call == 1 { 429 } else { 200 }) });
    let stack = Stack::new(orgs(["a"])).build(client).unwrap();
    let begin = Instant::now();
    assert_eq!(stack.oneshot(message(1)).await.unwrap().status(), 200);
    assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
    assert_eq!(calls.load(Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn when_a_hold_ends_one_goes_first_and_the_others_follow_by_doubling() {
    let times = Arc::new(Mutex::new(Vec::new()));
    let seen = times.clone();
    let begin = Instant::now();
    let (client, _) = client(move |call, _| {
        seen.lock().unwrap().push(begin.elapsed());
        async move {
            tokio::time::sleep(SECOND / 10).await;
            if call > 1 && begin.elapsed() < 2 * SECOND { with(429, "retry-after", "30") } else { answer(200) }
        }
    });
    let orgs = Orgs::new(orgs(["a"]).iter().map(|org| org.clone().cap(64))).unwrap();
    let stack = Stack::new(orgs).build(client).unwrap();
    let failed = drive(stack, (0..200).map(|id| (id, message(id))), 200).await;
    assert!(failed.is_empty());
    let times = times.lock().unwrap();
    let after: Vec<_> = times.iter().filter(|at| **at > 2 * SECOND).collect();
    let mut waves = BTreeMap::new();
    for at in &after {
        *waves.entry((at.as_millis() - after[0].as_millis() + 20) / 100).or_insert(0) += 1;
    }
    let waves: Vec<usize> = waves.into_values().collect();
    assert_eq!(waves[0], 1, "one goes first: {waves:?}");
    assert!(waves.windows(2).all(|pair| pair[1] <= 2 * pair[0] + 1), "{waves:?}");
    assert!(*after[0] >= 30 * SECOND, "nobody comes before the time");
}

// The wire.

#[tokio::test(start_paused = true)]
async fn broken_hung_and_reset_calls_are_made_again() {
    fastrand::seed(3);
    let org = |name: &str| OrgConfig::new(name, format!("key-{name}")).truncate(0.1).reset(0.1).hang(0.1);
    let config = provider().org(org("a")).org(org("b")).seed(3);
    let sim = Sim::new(config.clone()).unwrap();
    let retry = RateLimitRetryLayer::builder().max_attempts(10).seed(3).build().unwrap();
    let stack = Stack::new(pool(&config)).timeout(5 * SECOND).retry(retry).build(sim.service()).unwrap();
    let failed = drive(stack, (0..300).map(|id| (id, message(id))), 50).await;
    assert!(failed.is_empty());
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (300, 0));
    let faults = |of: fn(&sim::OrgTruth) -> u64| truth.orgs.iter().map(of).sum::<u64>();
    for seen in [faults(|org| org.truncated), faults(|org| org.resets), faults(|org| org.abandoned)] {
        assert!(seen > 5, "{seen}");
    }
    assert!(truth.orgs.iter().all(|org| org.in_flight == 0));
}

#[tokio::test(start_paused = true)]
async fn the_stacks_timeout_counts_whatever_is_said_of_the_judge_before_or_after() {
    let judge = || JudgeLayer::new().gather(Gather::ErrorsOnly);
    let stack = || Stack::new(orgs(["a"])).retry(RateLimitRetryLayer::builder().max_attempts(1).build().unwrap());
    for (stack, timeout) in [
        (stack().timeout(5 * SECOND).judge(judge()), 5),
        (stack().judge(judge()).timeout(5 * SECOND), 5),
        (stack().judge(judge().timeout(9 * SECOND)).timeout(5 * SECOND), 5),
        (stack().timeout(5 * SECOND).judge(judge().timeout(9 * SECOND)), 5),
        (stack().judge(judge().timeout(9 * SECOND)), 9),
    ] {
        let (client, _) = client(|_, _| std::future::pending());
        let begin = Instant::now();
        let call = stack.build(client).unwrap().oneshot(message(1));
        tokio::time::timeout(20 * SECOND, call).await.expect("a timeout").unwrap_err();
        assert_eq!(begin.elapsed().as_secs(), timeout);
    }
}

#[tokio::test(start_paused = true)]
async fn the_stack_reads_the_dialect_that_it_is_told() {
    // One a minute, and none of it is left.
    let spent = |mut answer: Response<Body>| {
        for (name, value) in [("x-ratelimit-limit-requests", "1"), ("x-ratelimit-remaining-requests", "0")] {
            answer.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        answer
    };
    let of = |shape: fn(Stack) -> Stack| async move {
        let (client, _) = client(move |_, _| async move { spent(answer(200)) });
        let stack = shape(Stack::new(orgs(["a"]))).build(client).unwrap();
        let begin = Instant::now();
        for id in 0..2 {
            stack.clone().oneshot(message(id)).await.unwrap();
        }
        begin.elapsed()
    };
    assert!(of(|stack| stack).await >= 60 * SECOND);
    assert!(of(|stack| stack.dialect(OpenAi)).await >= 60 * SECOND);
    assert!(of(|stack| stack.dialect(Anthropic)).await < SECOND);
    assert!(of(|stack| stack.dialect(NoHeaders)).await < SECOND);
}

#[tokio::test(start_paused = true)]
async fn every_attempt_of_a_request_carries_the_same_idempotency_key() {
    let seen = Arc::new(Mutex::new(BTreeMap::<Bytes, Vec<HeaderMap>>::new()));
    let (log, faults) = (seen.clone(), [503, 429, 500, 401, 200]);
    let stack = Stack::new(orgs(["a", "b"]))
        .build_with(move |_| {
            let log = log.clone();
            service_fn(move |request: Req| {
                let log = log.clone();
                async move {
                    assert_eq!(request.method(), Method::POST);
                    let (head, body) = request.into_parts();
                    let body = body.collect().await?.to_bytes();
                    let mut log = log.lock().unwrap();
                    let attempts = log.entry(body).or_default();
                    attempts.push(head.headers);
                    Ok::<_, BoxError>(answer(faults[attempts.len().min(faults.len()) - 1]))
                }
            })
        })
        .unwrap();
    let mut own = message(1);
    own.headers_mut().insert("idempotency-key", HeaderValue::from_static("mine"));
    for request in [message(0), own] {
        let response = stack.clone().oneshot(request).await;
        // The second one's 401 puts the second org out: none is left for it.
        assert!(response.is_ok_and(|response| response.status() == 200) || seen.lock().unwrap().len() == 2);
    }
    let mut keys = BTreeSet::new();
    for attempts in seen.lock().unwrap().values() {
        assert!(attempts.len() >= 4, "{}", attempts.len());
        let key = attempts[0].get("idempotency-key").unwrap();
        assert!(attempts.iter().all(|headers| headers.get_all("idempotency-key").iter().eq([key])));
        keys.insert(key.clone());
    }
    assert_eq!(keys.len(), 2);
    assert!(keys.contains(&HeaderValue::from_static("mine")));
}

#[tokio::test(start_paused = true)]
async fn many_families_at_once_keep_their_own_limits() {
    let config = provider().org(OrgConfig::new("a", "key-a"));
    let sim = Sim::new(config.clone()).unwrap();
    let orgs = pool(&config);
    let stack = Stack::new(orgs.clone()).build(sim.service()).unwrap();
    let items = (0..600).map(|id| {
        let mut request = message(id);
        request.extensions_mut().insert(Family::new(["sonnet", "haiku", "opus"][id as usize % 3]));
        (id, request)
    });
    assert!(drive(stack, items, 200).await.is_empty());
    for (family, cap) in [("sonnet", 100), ("haiku", 120), ("opus", 40)] {
        let snapshot = orgs.get("a").unwrap().family(&Family::new(family)).snapshot();
        assert_eq!((snapshot.in_flight, snapshot.limit.unwrap().cap), (0, cap));
    }
}

// The scenarios that are run over real HTTP elsewhere, in virtual time.

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    #[serde(rename = "about")]
    _about: String,
    requests: u64,
    #[serde(default)]
    dialects: Vec<Dialect>,
    #[serde(default)]
    bars: Bars,
    #[serde(default)]
    after_s: f64,
    #[serde(default, rename = "against_bare")]
    _against_bare: bool,
    cap: Option<usize>,
    provider: Config,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Bars {
    ratio: Option<f64>,
    refused: Option<f64>,
    black_hole: Option<BlackHole>,
    live: Option<usize>,
    #[serde(rename = "memory")]
    _memory: Option<f64>,
    #[serde(rename = "rate")]
    _rate: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlackHole {
    org: String,
    first_second: u64,
    each_second: u64,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/scenarios")
}

/// Calls in the first second from the first, and the most in any second after.
fn by_second(truth: &Truth, org: &str) -> (u64, u64) {
    let org = truth.org(org).unwrap();
    let first = org.first_call.unwrap_or_default();
    let mut seconds = BTreeMap::new();
    for arrival in &org.arrivals {
        *seconds.entry((*arrival - first).as_secs()).or_insert(0) += 1;
    }
    (seconds.remove(&0).unwrap_or(0), seconds.into_values().max().unwrap_or(0))
}

async fn meets_its_bars(file: &str) {
    let text = std::fs::read_to_string(folder().join(file)).unwrap();
    let scenario: Scenario = toml::from_str(&text).unwrap();
    let dialects = if scenario.dialects.is_empty() { vec![Dialect::Anthropic] } else { scenario.dialects };
    // Rates and memory are nothing for a virtual clock; a tenth of those items shows the rest.
    let requests = if scenario.provider.unlimited { scenario.requests / 10 } else { scenario.requests };
    for dialect in dialects {
        fastrand::seed(1);
        let mut config = scenario.provider.clone();
        config.dialect = dialect;
        let sim = Sim::new(config.clone()).unwrap();
        let capped = |org: &Org| scenario.cap.into_iter().fold(org.clone(), Org::cap);
        let stack = Stack::new(Orgs::new(pool(&config).into_iter().map(capped)).unwrap());
        let family = item(dialect, 0).extensions().get::<Family>().unwrap().clone();
        let bound = stack.live_bound(&family);
        if let Some(live) = scenario.bars.live {
            assert!(bound <= live, "{bound}");
        }
        let service = stack.build(sim.service()).unwrap();
        let begin = Instant::now();
        let failed = drive(service, (0..requests).map(|id| (id, item(dialect, id))), bound).await;
        let wall = begin.elapsed();
        assert!(failed.is_empty(), "{} lost", failed.len());
        let truth = sim.truth();
        assert_eq!((truth.answered_once, truth.answered_more), (requests, 0));
        // What must be found out first is not held against the bars.
        let bins = truth.orgs.iter().flat_map(|org| org.timeline.iter().skip((scenario.after_s * 10.0) as usize));
        let (ok, refused) = bins.fold((0, 0), |sum, bin| (sum.0 + bin.ok, sum.1 + bin.throttled_429));
        let refused = refused as f64 / (ok + refused).max(1) as f64;
        let ratio = config.fluid_limit(requests).map(|fluid| wall.div_duration_f64(fluid));
        println!("{file} ({dialect:?}): {wall:?}, {ratio:?} of the fluid limit, {:.3} % refused", refused * 100.0);
        if let Some(bar) = scenario.bars.ratio {
            assert!(ratio.unwrap() <= bar, "{ratio:?} times the fluid limit");
            assert!(ratio.unwrap() >= 1.0, "{ratio:?}: faster than can be");
        }
        if let Some(bar) = scenario.bars.refused {
            assert!(refused <= bar, "{refused} refused");
        }
        if let Some(bar) = &scenario.bars.black_hole {
            let (first, later) = by_second(&truth, &bar.org);
            assert!(first <= bar.first_second && later <= bar.each_second, "{first} calls, then {later} a second");
            assert!(first >= 1, "it was tried");
        }
    }
}

macro_rules! twins {
    ($($name:ident: $file:literal,)*) => {
        $(
            #[tokio::test(start_paused = true)]
            async fn $name() {
                meets_its_bars($file).await;
            }
        )*

        #[test]
        fn every_scenario_has_its_twin_here() {
            let here = BTreeSet::from([$($file.to_owned()),*]);
            let names = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
            // Those of the quota's law, and those with faults, have theirs in `tests/quotas.rs`.
            let elsewhere = |name: &str| name.starts_with("quota-") && name != "quota-loss.toml" || name.starts_with("faults");
            let names = names.filter(|name| name.ends_with(".toml") && !elsewhere(name));
            assert_eq!(here, names.collect());
        }
    };
}

twins! {
    scenario_black_hole_bare: "black-hole-bare.toml",
    scenario_black_hole_hinted: "black-hole-hinted.toml",
    scenario_capacity_of_a_fifth_of_a_second: "capacity-0.2s.toml",
    scenario_capacity_of_one_second: "capacity-1s.toml",
    scenario_capacity_of_ten_seconds: "capacity-10s.toml",
    scenario_capacity_of_a_minute: "capacity-60s.toml",
    scenario_concurrency_at_20_ms: "concurrency-20ms.toml",
    scenario_concurrency_at_80_ms: "concurrency-80ms.toml",
    scenario_concurrency_at_320_ms: "concurrency-320ms.toml",
    scenario_concurrency_beside_a_quota_that_is_told: "concurrency-told.toml",
    scenario_demo: "demo.toml",
    scenario_doubled: "doubled.toml",
    scenario_halved: "halved.toml",
    scenario_quota_loss: "quota-loss.toml",
    scenario_throttled_bare: "throttled-10s-bare.toml",
    scenario_throttled_hinted: "throttled-10s-hinted.toml",
    scenario_unlimited: "unlimited.toml",
    scenario_unlimited_120_slots: "unlimited-120-slots.toml",
    scenario_unlimited_1ms: "unlimited-1ms.toml",
}

#[tokio::test(start_paused = true)]
async fn as_many_calls_can_be_made_as_a_driver_keeps_alive_however_many_the_orgs() {
    let stack = Stack::new(orgs(["a", "b", "c", "d", "e", "f"]));
    let family = Family::of_model("claude-haiku-4-5");
    let bound = stack.live_bound(&family);
    assert_eq!(bound, 6 * 120 * 2);
    let client = tower::service_fn(|_: Request<Full<Bytes>>| {
        std::future::pending::<Result<Response<Full<Bytes>>, std::io::Error>>()
    });
    let mut service = stack.build(client).unwrap();
    let mut made = vec![];
    for _ in 0..bound {
        // Made and not polled: none of them has an org.
        let request = Request::post("/v1/messages").extension(family.clone()).body(Full::default()).unwrap();
        made.push(service.ready().await.unwrap().call(request));
    }
    let mut ready = tokio_test::task::spawn(service.ready());
    tokio_test::assert_pending!(ready.poll());
}
