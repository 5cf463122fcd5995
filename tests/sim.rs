//! The simulated provider, in virtual time and over real HTTP.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tower::{Service, ServiceExt};
use tower_quota::sim::{
    Change, Config, Cost, Dialect, Headers, Latency, OrgConfig, RetryAfter, Server, Sim, SimBody, SimError, SimService,
};

type HttpClient = Client<HttpConnector, Full<Bytes>>;

const WALL: u64 = 1_700_000_000; // 2023-11-14T22:13:20Z

fn config(dialect: Dialect, org: OrgConfig) -> Config {
    Config::new(dialect).latency(Latency::new(100.0, 0.0)).wall_start_s(WALL).org(org)
}

fn org() -> OrgConfig {
    OrgConfig::new("one", "key-1").organization_id("org-id-1").requests_per_minute(60.0)
}

fn url(server: &Server, path: &str) -> String {
    format!("http://{}{path}", server.addr())
}

fn post(uri: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(uri)
        .header("x-api-key", "key-1")
        .header("authorization", "Bearer key-1")
        .body(Full::new(body.into()))
        .unwrap()
}

async fn call(service: &SimService, body: &str) -> Result<Response<SimBody>, SimError> {
    service.clone().oneshot(post("/v1/messages", body.to_owned())).await
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|v| v.to_str().unwrap())
}

fn client() -> HttpClient {
    Client::builder(TokioExecutor::new()).build_http()
}

async fn json<B>(response: Response<B>) -> serde_json::Value
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_message_is_answered_after_its_latency() {
    let sim = Sim::new(config(Dialect::Anthropic, org())).unwrap();
    let response = call(&sim.service(), r#"{"model":"m","max_tokens":5}"#).await.unwrap();
    assert_eq!(sim.elapsed(), Duration::from_millis(100));
    assert_eq!(response.status(), 200);
    let body = json(response).await;
    assert_eq!(body["type"], "message");
    assert_eq!(body["model"], "m");
    assert_eq!(body["content"][0]["type"], "text");
    assert_eq!(body["usage"]["input_tokens"], 7);
    assert_eq!(body["usage"]["output_tokens"], 5);
    assert_eq!(body["stop_reason"], "max_tokens");
    assert_eq!(sim.truth().ok(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_levels_are_what_the_next_request_meets() {
    let org = org().output_tokens_per_minute(600.0).capacity_s(4.0);
    let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
    let levels = || sim.levels("one").unwrap();
    assert_eq!((levels().requests, levels().output_tokens), (Some(4.0), Some(40.0)), "full before the start");
    assert_eq!((levels().input_tokens, levels().tokens), (None, None), "not limited");
    assert_eq!(sim.elapsed(), Duration::ZERO, "to look does not start it");
    let answer = call(&sim.service(), r#"{"max_tokens":5}"#).await.unwrap();
    // The answer took 100 ms.
    assert_eq!(header(answer.headers(), "anthropic-ratelimit-requests-remaining"), Some("3"));
    assert!((levels().requests.unwrap() - 3.1).abs() < 1e-9 && (levels().output_tokens.unwrap() - 36.0).abs() < 1e-9);
    tokio::time::advance(Duration::from_millis(250)).await;
    assert!((levels().requests.unwrap() - 3.35).abs() < 1e-9);
    assert_eq!(sim.levels("another"), None);
}

#[tokio::test]
async fn both_dialects_answer_over_real_http() {
    for (dialect, path) in [(Dialect::Anthropic, "/v1/messages"), (Dialect::OpenAi, "/v1/chat/completions")] {
        let sim = Sim::new(config(dialect, org()).latency(Latency::new(1.0, 0.0))).unwrap();
        let server = sim.serve().await.unwrap();
        let client = client();
        let mut statuses = Vec::new();
        for i in 0..3 {
            let url = url(&server, path);
            let response = client.request(post(&url, format!("{i}"))).await.unwrap();
            statuses.push(response.status().as_u16());
            response.into_body().collect().await.unwrap();
        }
        assert_eq!(statuses, [200, 200, 429]);
        let truth = server.truth();
        assert_eq!((truth.ok(), truth.throttled_429(), truth.answered_once), (2, 1, 2));
        server.shutdown().await;
    }
}

/// Until the provider has seen what is asked for; the client's side is always a little ahead of it.
async fn until(sim: &Sim, seen: impl Fn(&tower_quota::sim::Truth) -> bool) {
    let waiting = async {
        while !seen(&sim.truth()) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(10), waiting).await;
    assert!(in_time.is_ok(), "{:?}", sim.truth());
}

#[tokio::test(start_paused = true)]
async fn anthropic_headers_say_the_buckets_at_arrival() {
    let org = org().input_tokens_per_minute(600_000.0).output_tokens_per_minute(90_000.0);
    let sim = Sim::new(config(Dialect::Anthropic, org.clone())).unwrap();
    let service = sim.service();
    let response = call(&service, r#"{"model":"m","max_tokens":1}"#).await.unwrap();
    let expected = [
        ("anthropic-ratelimit-requests-limit", "60"),
        ("anthropic-ratelimit-requests-remaining", "1"),
        ("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:21Z"),
        ("anthropic-ratelimit-input-tokens-limit", "600000"),
        ("anthropic-ratelimit-input-tokens-remaining", "20000"),
        ("anthropic-ratelimit-input-tokens-reset", "2023-11-14T22:13:21Z"),
        ("anthropic-ratelimit-output-tokens-limit", "90000"),
        ("anthropic-ratelimit-output-tokens-remaining", "3000"),
        ("anthropic-ratelimit-output-tokens-reset", "2023-11-14T22:13:21Z"),
        ("anthropic-ratelimit-tokens-limit", "690000"),
        ("anthropic-ratelimit-tokens-remaining", "23000"),
        ("anthropic-ratelimit-tokens-reset", "2023-11-14T22:13:21Z"),
        ("anthropic-organization-id", "org-id-1"),
        ("request-id", "req_00000000000000000001"),
        ("date", "Tue, 14 Nov 2023 22:13:20 GMT"),
        ("content-type", "application/json"),
    ];
    for (name, value) in expected {
        assert_eq!(header(response.headers(), name), Some(value), "{name}");
    }
    let length: usize = header(response.headers(), "content-length").unwrap().parse().unwrap();
    assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), length);

    // A refusal has them too: 0.1 s of refill later, after the second call.
    call(&service, "x").await.unwrap();
    let refused = call(&service, "x").await.unwrap();
    assert_eq!(refused.status(), 429);
    assert_eq!(header(refused.headers(), "anthropic-ratelimit-requests-remaining"), Some("0"));
    assert_eq!(header(refused.headers(), "anthropic-ratelimit-requests-reset"), Some("2023-11-14T22:13:22Z"));
    assert_eq!(header(refused.headers(), "retry-after"), Some("1"));

    let exact = Sim::new(config(Dialect::Anthropic, org).round_tokens(false)).unwrap();
    let response = call(&exact.service(), r#"{"model":"m","max_tokens":1}"#).await.unwrap();
    assert_eq!(header(response.headers(), "anthropic-ratelimit-input-tokens-remaining"), Some("19993"));
    assert_eq!(header(response.headers(), "anthropic-ratelimit-output-tokens-remaining"), Some("2999"));
    assert_eq!(header(response.headers(), "anthropic-ratelimit-tokens-remaining"), Some("22992"));
}

#[tokio::test(start_paused = true)]
async fn openai_headers_are_go_durations_and_the_scarcer_tokens() {
    let org = org().requests_capacity(400.0).input_tokens_per_minute(60_000.0).output_tokens_per_minute(600.0);
    let sim = Sim::new(config(Dialect::OpenAi, org)).unwrap();
    let service = sim.service();
    let response = call(&service, r#"{"max_completion_tokens":8}"#).await.unwrap();
    assert_eq!(header(response.headers(), "x-ratelimit-limit-requests"), Some("60"));
    assert_eq!(header(response.headers(), "x-ratelimit-remaining-requests"), Some("399"));
    assert_eq!(header(response.headers(), "x-ratelimit-reset-requests"), Some("1s"));
    assert_eq!(header(response.headers(), "x-ratelimit-limit-tokens"), Some("600"));
    assert_eq!(header(response.headers(), "x-ratelimit-remaining-tokens"), Some("12"));
    assert_eq!(header(response.headers(), "x-ratelimit-reset-tokens"), Some("800ms"));
    assert_eq!(header(response.headers(), "openai-organization"), Some("org-id-1"));
    assert_eq!(header(response.headers(), "x-request-id"), Some("req_00000000000000000001"));
    let (mut reset, mut last) = (String::new(), None);
    for _ in 0..361 {
        let response = service.clone().oneshot(post("/v1/embeddings", "")).await.unwrap();
        last = header(response.headers(), "x-ratelimit-reset-requests").map(str::to_owned);
        if last.as_deref().is_some_and(|r| r.starts_with("5m")) {
            reset = last.clone().unwrap();
        }
    }
    // 362 calls less the refill of 361 latencies of 100 ms, of which the last is the call's own.
    assert_eq!(last.as_deref(), Some("5m25.9s"), "{reset}");
}

#[tokio::test(start_paused = true)]
async fn a_429_may_leave_the_input_tokens_out() {
    for told in [true, false] {
        let org = org().input_tokens_per_minute(600_000.0).output_tokens_per_minute(90_000.0);
        let sim = Sim::new(config(Dialect::Anthropic, org).input_on_429(told)).unwrap();
        for (status, input) in [(200, true), (200, true), (429, told)] {
            let response = call(&sim.service(), "x").await.unwrap();
            assert_eq!(response.status(), status);
            for (resource, there) in
                [("requests", true), ("input-tokens", input), ("output-tokens", true), ("tokens", input)]
            {
                for what in ["limit", "remaining", "reset"] {
                    let name = format!("anthropic-ratelimit-{resource}-{what}");
                    assert_eq!(header(response.headers(), &name).is_some(), there, "{status} {name}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_of_both_together_are_charged_and_told() {
    let body = r#"{"max_tokens":5}"#; // 4 tokens in, and 5 out
    for (dialect, name) in [
        (Dialect::Anthropic, "anthropic-ratelimit-tokens-remaining"),
        (Dialect::OpenAi, "x-ratelimit-remaining-tokens"),
    ] {
        let org = org().tokens_per_minute(60.0).tokens_capacity(20.0).output_tokens_p50(1e4);
        let sim = Sim::new(config(dialect, org).round_tokens(false)).unwrap();
        let service = sim.service();
        let response = call(&service, body).await.unwrap();
        assert_eq!(header(response.headers(), name), Some("11"), "{dialect:?}");
        let embedded = service.clone().oneshot(post("/v1/embeddings", body)).await.unwrap();
        assert_eq!(header(embedded.headers(), name), Some("7"), "{dialect:?}: an embedding is input alone");
        tokio::time::advance(Duration::from_millis(1_700)).await;
        assert_eq!(call(&service, body).await.unwrap().status(), 429, "8.9 are there");
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(call(&service, body).await.unwrap().status(), 200, "9");
    }
}

#[tokio::test(start_paused = true)]
async fn headers_can_be_left_out_but_not_the_identity() {
    let org = org().input_tokens_per_minute(600.0);
    for (headers, requests, tokens) in [(Headers::None, false, false), (Headers::RequestsOnly, true, false)] {
        for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
            let sim = Sim::new(config(dialect, org.clone()).headers(headers)).unwrap();
            let response = call(&sim.service(), "").await.unwrap();
            let any = |part: &str| response.headers().keys().any(|k| k.as_str().contains(part));
            assert_eq!((any("requests"), any("tokens")), (requests, tokens), "{headers:?} {dialect:?}");
            assert!(any("organization") && any("request-id") && any("date"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_429_hints_in_the_form_that_was_asked_for() {
    let forms = [
        (RetryAfter::None, None, None),
        (RetryAfter::Seconds, Some("2"), None),
        (RetryAfter::Fraction, Some("1.500"), None),
        (RetryAfter::Ms, None, Some("1500")),
        (RetryAfter::HttpDate, Some("Tue, 14 Nov 2023 22:13:22 GMT"), None),
        (RetryAfter::Zero, Some("0"), None),
    ];
    for (form, plain, ms) in forms {
        for hole in [true, false] {
            let org = match hole {
                true => org().black_hole(true).black_hole_wait_s(1.5),
                false => org().requests_per_minute(40.0).requests_capacity(1.0),
            };
            let sim =
                Sim::new(config(Dialect::Anthropic, org.retry_after(form).latency(Latency::new(0.0, 0.3)))).unwrap();
            if !hole {
                assert_eq!(call(&sim.service(), "").await.unwrap().status(), 200);
            }
            let response = call(&sim.service(), "").await.unwrap();
            assert_eq!(response.status(), 429);
            assert_eq!(header(response.headers(), "retry-after"), plain, "{form:?}");
            assert_eq!(header(response.headers(), "retry-after-ms"), ms, "{form:?}");
            let body = json(response).await;
            assert_eq!(body["type"], "error");
            assert_eq!(body["error"]["type"], "rate_limit_error");
            assert_eq!(sim.elapsed(), Duration::ZERO, "a refusal takes no time");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_as_long_as_told_is_admitted() {
    let sim = Sim::new(config(Dialect::Anthropic, org().retry_after(RetryAfter::Ms))).unwrap();
    let service = sim.service();
    let mut refused = 0;
    for _ in 0..20 {
        let mut response = call(&service, "").await.unwrap();
        if response.status() == 429 {
            refused += 1;
            let ms = header(response.headers(), "retry-after-ms").unwrap().parse().unwrap();
            tokio::time::sleep(Duration::from_millis(ms)).await;
            response = call(&service, "").await.unwrap();
        }
        assert_eq!(response.status(), 200);
    }
    assert!(refused > 10);
}

#[tokio::test(start_paused = true)]
async fn the_schedule_runs_in_virtual_time() {
    let hole = |on: bool| Change { black_hole: Some(on.into()), ..Change::default() };
    let org = org().requests_capacity(100.0).at(10.0, hole(true)).at(20.0, hole(false));
    let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
    // Its clock starts with the first call, not before.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let mut statuses = Vec::new();
    for _ in 0..5 {
        statuses.push(call(&sim.service(), "").await.unwrap().status().as_u16());
        tokio::time::sleep(Duration::from_secs(6)).await;
    }
    assert_eq!(statuses, [200, 200, 429, 429, 200]);
}

#[tokio::test(start_paused = true)]
async fn concurrency_is_held_until_the_body_is_read() {
    let sim = Sim::new(config(Dialect::Anthropic, OrgConfig::new("one", "key-1").max_concurrency(1))).unwrap();
    let service = sim.service();
    let first = call(&service, "").await.unwrap();
    let second = call(&service, "").await.unwrap();
    assert_eq!((first.status(), second.status()), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS));
    assert_eq!(sim.truth().orgs[0].in_flight, 2, "an unread refusal is in flight as well");
    drop(second);
    first.into_body().collect().await.unwrap();
    assert_eq!(sim.truth().orgs[0].in_flight, 0);
    assert_eq!(call(&service, "").await.unwrap().status(), 200);
    let one = sim.truth().orgs[0].clone();
    assert_eq!((one.calls, one.ok, one.throttled_429, one.abandoned, one.peak_in_flight), (3, 1, 1, 1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_at_any_point_gives_its_place_back() {
    let sim = Sim::new(config(Dialect::Anthropic, OrgConfig::new("one", "key-1").max_concurrency(1))).unwrap();
    let service = sim.service();
    let mut waiting = tokio_test::task::spawn(call(&service, ""));
    assert!(waiting.poll().is_pending());
    assert_eq!(sim.truth().orgs[0].in_flight, 1);
    drop(waiting);
    let mut streaming = call(&service, r#"{"stream":true}"#).await.unwrap().into_body();
    streaming.frame().await.unwrap().unwrap();
    drop(streaming);
    let one = sim.truth().orgs[0].clone();
    assert_eq!((one.in_flight, one.abandoned, one.ok), (0, 2, 0));
    assert_eq!(call(&service, "").await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn the_truth_counts_items_bins_and_arrivals() {
    let org = OrgConfig::new("one", "key-1");
    let other = OrgConfig::new("two", "key-2").black_hole(true);
    let sim = Sim::new(config(Dialect::Anthropic, org).org(other).record_arrivals(true)).unwrap();
    let mut service = sim.service();
    for (item, key) in [(Some("a"), "key-1"), (Some("a"), "key-1"), (None, "key-1"), (Some("b"), "key-2")] {
        let mut request = Request::post("/v1/messages").header("x-api-key", key);
        if let Some(item) = item {
            request = request.header("x-item-id", item);
        }
        let request = request.body("the same body".to_owned()).unwrap();
        service.call(request).await.unwrap().into_body().collect().await.unwrap();
    }
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (1, 1));
    assert_eq!((truth.calls(), truth.ok(), truth.throttled_429()), (4, 3, 1));
    let one = truth.org("one").unwrap();
    let ms = Duration::from_millis;
    assert_eq!(one.arrivals, [ms(0), ms(100), ms(200)]);
    assert_eq!(one.timeline.iter().map(|b| b.ok).collect::<Vec<_>>(), [0, 1, 1, 1]);
    assert_eq!(one.first_call, Some(ms(0)));
    let two = truth.org("two").unwrap();
    assert_eq!(two.first_call, Some(ms(300)));
    assert_eq!(two.timeline.iter().map(|b| b.throttled_429).collect::<Vec<_>>(), [0, 0, 0, 1]);
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_and_order_give_the_same_run() {
    async fn run(seed: u64) -> Vec<String> {
        let org = org().requests_per_minute(600.0).error_5xx(0.2).reset(0.1).truncate(0.1);
        let config = config(Dialect::Anthropic, org).latency(Latency::new(80.0, 0.5)).seed(seed);
        let sim = Sim::new(config).unwrap();
        let mut seen = Vec::new();
        for i in 0..60 {
            let answer = call(&sim.service(), &format!(r#"{{"i":{i}}}"#)).await;
            let at = sim.elapsed();
            let body = match answer {
                Ok(r) => format!("{:?} {:?} {:?}", r.status(), r.headers().clone(), r.into_body().collect().await),
                Err(e) => format!("{e:?}"),
            };
            seen.push(format!("{at:?} {body}"));
        }
        seen
    }
    let first = run(1).await;
    assert_eq!(first, run(1).await);
    assert_ne!(first, run(2).await);
}

#[tokio::test(start_paused = true)]
async fn callers_that_wait_as_told_meet_the_fluid_limit_and_do_not_beat_it() {
    let at_once = Latency::new(0.0, 0.0);
    let one = org().requests_per_minute(1200.0).retry_after(RetryAfter::Ms);
    let two = OrgConfig::new("two", "key-2").requests_per_minute(600.0).retry_after(RetryAfter::Ms);
    let change = Change { quota_factor: Some(0.5), ..Change::default() };
    let config = config(Dialect::Anthropic, one.at(4.0, change)).org(two).latency(at_once);
    let sim = Sim::new(config).unwrap();
    let n = 300;
    // 60 at once, 120 in four seconds, the rest at 20 a second.
    let limit = sim.config().fluid_limit(n).unwrap();
    assert_eq!(limit, Duration::from_secs(10));
    let caller = |key: &'static str| {
        let sim = sim.clone();
        async move {
            while sim.truth().ok() < n {
                let request = Request::post("/v1/messages").header("x-api-key", key);
                let request = request.body(String::new()).unwrap();
                let response = sim.service().call(request).await.unwrap();
                let told = header(response.headers(), "retry-after-ms").map(|ms| ms.parse().unwrap());
                response.into_body().collect().await.unwrap();
                if let Some(ms) = told {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                }
            }
        }
    };
    tokio::join!(caller("key-1"), caller("key-2"));
    let took = sim.elapsed();
    // A caller may notice the end one wait late.
    let late = Duration::from_millis(150);
    assert!(took >= limit && took <= limit + late, "{took:?} for a limit of {limit:?}");
}

#[tokio::test]
async fn over_http_errors_have_status_headers_and_real_bodies() {
    let cases = [
        (org().black_hole(true), 429, "rate_limit_error", "rate_limit_exceeded"),
        (org().unauthorised(true), 401, "authentication_error", "invalid_api_key"),
        (org().error_5xx(true), 500, "api_error", "server_error"),
        (org().overloaded(true), 529, "overloaded_error", "server_is_overloaded"),
    ];
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        for (org, status, anthropic, openai) in cases.clone() {
            let server = Sim::new(config(dialect, org)).unwrap().serve().await.unwrap();
            let (path, id, remaining) = match dialect {
                Dialect::Anthropic => {
                    ("/v1/messages", "anthropic-organization-id", "anthropic-ratelimit-requests-remaining")
                }
                _ => ("/v1/embeddings", "openai-organization", "x-ratelimit-remaining-requests"),
            };
            let status = if dialect == Dialect::OpenAi && status == 529 { 503 } else { status };
            let response = client().request(post(&url(&server, path), "")).await.unwrap();
            assert_eq!(response.status(), status);
            assert_eq!(header(response.headers(), id), Some("org-id-1"));
            // Only what is admitted is charged, and of these that is the 500.
            let left = if status == 500 { "1" } else { "2" };
            assert_eq!(header(response.headers(), remaining), Some(left), "{status}");
            let body = json(response).await;
            match dialect {
                Dialect::Anthropic => assert_eq!(body["error"]["type"], anthropic),
                _ => assert_eq!(body["error"]["code"], openai),
            }
            let seen = server.truth().orgs[0].clone();
            match status {
                429 => assert_eq!(seen.throttled_429, 1),
                _ => assert_eq!(seen.errors, [(status, 1)].into()),
            }
            assert_eq!(seen.in_flight, 0);
        }
    }
}

#[tokio::test]
async fn over_http_unknown_keys_paths_and_methods_are_refused() {
    let server = Sim::new(config(Dialect::Anthropic, org())).unwrap().serve().await.unwrap();
    assert_eq!(server.base_url(), *url(&server, ""));
    let (client, base) = (client(), url(&server, ""));
    let mut request = post(&format!("{base}/v1/messages"), "");
    request.headers_mut().insert("x-api-key", "key-2".parse().unwrap());
    let response = client.request(request).await.unwrap();
    assert_eq!(response.status(), 401);
    assert!(header(response.headers(), "anthropic-organization-id").is_none());
    let response = client.request(post(&format!("{base}/v1/embeddings"), "")).await.unwrap();
    assert_eq!(response.status(), 404);
    assert_eq!(header(response.headers(), "anthropic-organization-id"), Some("org-id-1"));
    assert_eq!(json(response).await["error"]["type"], "not_found_error");
    let mut request = post(&format!("{base}/v1/messages"), "");
    *request.method_mut() = http::Method::GET;
    assert_eq!(client.request(request).await.unwrap().status(), 405);
    let truth = server.truth();
    assert_eq!((truth.unknown_key, truth.not_found, truth.calls()), (1, 2, 0));
}

#[tokio::test]
async fn over_http_a_reset_is_a_connection_without_an_answer() {
    let sim = Sim::new(config(Dialect::Anthropic, org().reset(true))).unwrap();
    let server = sim.serve().await.unwrap();
    let answer = client().request(post(&url(&server, "/v1/messages"), "")).await;
    assert!(answer.is_err());
    assert_eq!(server.truth().orgs[0].resets, 1);
    assert_eq!(call(&sim.service(), "").await.unwrap_err(), SimError::Reset);
}

#[tokio::test]
async fn over_http_a_hanging_call_ends_when_the_client_gives_up() {
    let sim = Sim::new(config(Dialect::Anthropic, org().hang(true))).unwrap();
    let server = sim.serve().await.unwrap();
    let client = client();
    let request = client.request(post(&url(&server, "/v1/messages"), ""));
    let mut request = Box::pin(request);
    tokio::select! {
        answer = &mut request => panic!("answered: {answer:?}"),
        () = until(&sim, |t| t.orgs[0].in_flight == 1) => {}
    }
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut request).await.is_err());
    drop(request);
    until(&sim, |t| t.orgs[0].in_flight == 0).await;
    assert_eq!(sim.truth().orgs[0].abandoned, 1);
}

#[tokio::test]
async fn over_http_a_truncated_body_breaks_off_before_its_length() {
    for body in ["", r#"{"stream":true}"#] {
        let org = org().truncate(true).latency(Latency::new(0.0, 0.0));
        let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
        let server = sim.serve().await.unwrap();
        let response = client().request(post(&url(&server, "/v1/messages"), body)).await.unwrap();
        assert_eq!(response.status(), 200);
        let announced = header(response.headers(), "content-length").map(|l| l.parse::<usize>().unwrap());
        let mut body = response.into_body();
        let mut got = 0;
        let end = loop {
            match body.frame().await {
                Some(Ok(frame)) => got += frame.data_ref().map_or(0, Bytes::len),
                Some(Err(e)) => break e,
                None => panic!("the body ended well after {got} bytes"),
            }
        };
        assert!(got > 0, "{end}");
        assert!(announced.is_none_or(|length| got < length));
        until(&sim, |t| t.orgs[0].truncated == 1).await;
        assert_eq!((server.truth().ok(), server.truth().answered_once), (0, 0));
    }
}

#[tokio::test]
async fn over_http_an_empty_answer_is_a_200_without_content() {
    for (dialect, path, list) in [
        (Dialect::Anthropic, "/v1/messages", "content"),
        (Dialect::OpenAi, "/v1/chat/completions", "choices"),
        (Dialect::OpenAi, "/v1/embeddings", "data"),
    ] {
        let org = org().empty(true).latency(Latency::new(0.0, 0.0));
        let server = Sim::new(config(dialect, org)).unwrap().serve().await.unwrap();
        let response = client().request(post(&url(&server, path), "")).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(json(response).await[list], serde_json::json!([]));
        let one = server.truth().orgs[0].clone();
        assert_eq!((one.empty, one.ok, server.truth().answered_once), (1, 0, 0));
    }
}

#[tokio::test]
async fn over_http_openai_chat_and_embeddings_have_their_shape() {
    let org = OrgConfig::new("one", "key-1").latency(Latency::new(0.0, 0.0));
    let server = Sim::new(config(Dialect::OpenAi, org)).unwrap().serve().await.unwrap();
    let (client, base) = (client(), url(&server, ""));
    let body = r#"{"model":"m \"x\"","max_tokens":3}"#;
    let chat = json(client.request(post(&format!("{base}/v1/chat/completions"), body)).await.unwrap()).await;
    assert_eq!(chat["object"], "chat.completion");
    assert_eq!(chat["model"], "m \"x\"");
    assert_eq!(chat["choices"][0]["message"]["role"], "assistant");
    assert_eq!(chat["choices"][0]["finish_reason"], "length");
    assert_eq!(chat["usage"], serde_json::json!({"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}));
    for (input, count) in [(r#"["a","b","c"]"#, 3), (r#""a""#, 1), ("[1,2,3]", 1), ("[[1],[2]]", 2)] {
        let body = format!(r#"{{"input":{input}}}"#);
        let list = json(client.request(post(&format!("{base}/v1/embeddings"), body)).await.unwrap()).await;
        let data = list["data"].as_array().unwrap();
        assert_eq!(data.len(), count);
        assert!(data.iter().enumerate().all(|(i, d)| d["index"] == i && d["embedding"].is_array()));
        assert!(list["usage"]["prompt_tokens"].as_u64().unwrap() > 0);
    }
}

/// The events of a stream: name and data.
fn events(text: &str) -> Vec<(Option<&str>, &str)> {
    text.split_terminator("\n\n")
        .map(|event| {
            let name = event.lines().find_map(|l| l.strip_prefix("event: "));
            (name, event.lines().find_map(|l| l.strip_prefix("data: ")).unwrap())
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_spread_over_the_latency() {
    let sim = Sim::new(config(Dialect::Anthropic, org())).unwrap();
    let response = call(&sim.service(), r#"{"stream":true,"max_tokens":4}"#).await.unwrap();
    assert_eq!(header(response.headers(), "content-type"), Some("text/event-stream"));
    let (mut body, mut times, mut text) = (response.into_body(), Vec::new(), String::new());
    while let Some(frame) = body.frame().await {
        times.push(sim.elapsed().as_millis());
        text += std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap();
    }
    assert_eq!(times, [20, 40, 60, 80, 100]);
    let events = events(&text);
    let names: Vec<_> = events.iter().map(|e| e.0.unwrap()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[2..5], ["content_block_delta"; 3]);
    assert_eq!(names[5..], ["content_block_stop", "message_delta", "message_stop"]);
    for (name, data) in &events {
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name.unwrap());
        if *name == Some("message_delta") {
            assert_eq!(data["usage"]["output_tokens"], 4);
        }
    }
    assert_eq!(sim.truth().ok(), 1);
}

#[tokio::test]
async fn over_http_streams_end_with_their_terminal_event() {
    for empty in [false, true] {
        let org = OrgConfig::new("one", "key-1").latency(Latency::new(5.0, 0.0)).empty(empty);
        let server = Sim::new(config(Dialect::OpenAi, org)).unwrap().serve().await.unwrap();
        let url = url(&server, "/v1/chat/completions");
        let response = client().request(post(&url, r#"{"stream":true}"#)).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let events = events(std::str::from_utf8(&body).unwrap());
        assert_eq!(events.last().unwrap().1, "[DONE]");
        let mut content = String::new();
        for (_, data) in &events[..events.len() - 1] {
            let data: serde_json::Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["object"], "chat.completion.chunk");
            content += data["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        }
        assert_eq!(content.starts_with("simulated answer "), !empty, "{content}");
        assert_eq!(server.truth().ok(), u64::from(!empty));
    }
}

#[tokio::test]
async fn over_http_an_answer_may_turn_out_to_be_an_error() {
    for (dialect, path, stream) in [
        (Dialect::Anthropic, "/v1/messages", false),
        (Dialect::Anthropic, "/v1/messages", true),
        (Dialect::OpenAi, "/v1/chat/completions", false),
        (Dialect::OpenAi, "/v1/chat/completions", true),
    ] {
        let org = org().in_band(true).latency(Latency::new(5.0, 0.0));
        let server = Sim::new(config(dialect, org)).unwrap().serve().await.unwrap();
        let ask = if stream { r#"{"stream":true}"# } else { "{}" };
        let response = client().request(post(&url(&server, path), ask)).await.unwrap();
        assert_eq!(response.status(), 200);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&body).unwrap();
        let error = if stream {
            let events = events(text);
            assert!(events.len() > 1, "it comes on the way: {text}");
            events.last().unwrap().1
        } else {
            text
        };
        let error: serde_json::Value = serde_json::from_str(error).unwrap();
        assert_eq!(error["error"]["message"], "Overloaded");
        let one = server.truth().orgs[0].clone();
        assert_eq!((one.in_band, one.ok, server.truth().answered_once), (1, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_429_may_come_without_any_word_on_the_quota() {
    for (bare, told) in [(false, true), (true, false)] {
        let org = org().requests_per_minute(60.0).requests_capacity(1.0).bare_429(bare);
        let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
        assert_eq!(call(&sim.service(), "{}").await.unwrap().status(), 200);
        let refused = call(&sim.service(), "{}").await.unwrap();
        assert_eq!(refused.status(), 429);
        for name in ["retry-after", "anthropic-ratelimit-requests-remaining"] {
            assert_eq!(header(refused.headers(), name).is_some(), told, "{name}");
        }
        assert!(header(refused.headers(), "anthropic-organization-id").is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_in_openais_dialect_tells_its_usage_only_where_it_is_asked_for() {
    let sim = Sim::new(config(Dialect::OpenAi, org().requests_per_minute(6_000.0))).unwrap();
    for (options, asked) in [
        ("", false),
        (r#","stream_options":null"#, false),
        (r#","stream_options":{}"#, false),
        (r#","stream_options":{"include_usage":false}"#, false),
        (r#","stream_options":{"include_usage":true}"#, true),
    ] {
        let request = format!(r#"{{"stream":true,"max_tokens":4{options}}}"#);
        let body = call(&sim.service(), &request).await.unwrap().into_body().collect().await.unwrap().to_bytes();
        let events = events(std::str::from_utf8(&body).unwrap());
        let (done, chunks) = events.split_last().unwrap();
        assert_eq!(done.1, "[DONE]");
        let chunks: Vec<serde_json::Value> =
            chunks.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_some() == asked), "{options}");
        let said: Vec<_> = chunks.iter().filter(|chunk| chunk["usage"].is_object()).collect();
        assert_eq!(said.len(), usize::from(asked), "{options}");
        for said in said {
            assert_eq!(
                (said["choices"].as_array().unwrap().len(), &said["usage"]["completion_tokens"]),
                (0, &4.into())
            );
            assert_eq!(said["usage"]["prompt_tokens"], request.len().div_ceil(4));
        }
        let finished = chunks.iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "length");
        assert_eq!(finished.count(), 1, "{options}");
    }
}

#[tokio::test]
async fn over_http_many_connections_are_kept_alive() {
    let org = OrgConfig::new("one", "key-1").latency(Latency::new(1.0, 0.3));
    let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
    let server = sim.serve().await.unwrap();
    let (client, url) = (client(), url(&server, "/v1/messages"));
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..100 {
        let (client, url) = (client.clone(), url.clone());
        callers.spawn(async move {
            for i in 0..20 {
                let response = client.request(post(&url, format!("{caller} {i}"))).await.unwrap();
                assert_eq!(response.status(), 200);
                response.into_body().collect().await.unwrap();
            }
        });
    }
    callers.join_all().await;
    let truth = server.truth();
    assert_eq!((truth.ok(), truth.answered_once, truth.answered_more), (2000, 2000, 0));
    assert_eq!(truth.orgs[0].in_flight, 0);
    let peak = truth.orgs[0].peak_in_flight;
    assert!((2..=100).contains(&peak), "{peak}");
}

#[tokio::test]
async fn a_dropped_server_takes_no_more_connections_and_lets_calls_end() {
    let org = OrgConfig::new("one", "key-1").latency(Latency::new(50.0, 0.0));
    let sim = Sim::new(config(Dialect::Anthropic, org)).unwrap();
    let server = sim.serve().await.unwrap();
    let (url, addr) = (url(&server, "/v1/messages"), server.addr());
    let open = tokio::spawn(client().request(post(&url, "")));
    until(&sim, |t| t.orgs[0].in_flight == 1).await;
    drop(server);
    let response = open.await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.into_body().collect().await.is_ok());
    let refused = async {
        while tokio::net::TcpStream::connect(addr).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(10), refused).await.is_ok());
}

#[tokio::test]
async fn a_shutdown_does_not_wait_for_calls_that_hang() {
    let sim = Sim::new(config(Dialect::Anthropic, org().hang(true))).unwrap();
    let server = sim.serve().await.unwrap();
    let open = tokio::spawn(client().request(post(&url(&server, "/v1/messages"), "")));
    until(&sim, |t| t.orgs[0].in_flight == 1).await;
    let stopped = tokio::time::timeout(Duration::from_secs(10), server.shutdown()).await;
    assert!(stopped.is_ok());
    assert!(open.await.unwrap().is_err());
    assert_eq!(sim.truth().orgs[0].in_flight, 0);
}

#[test]
fn a_file_configures_all_of_it_and_unknown_fields_are_refused() {
    let text = r#"
        dialect = "openai"
        seed = 7
        latency = { p50_ms = 80, sigma = 0.5 }
        headers = "requests_only"
        round_tokens = false
        record_arrivals = true

        [[orgs]]
        name = "one"
        key = "secret-1"
        organization_id = "org-1"
        requests_per_minute = 600
        input_tokens_per_minute = 1e6
        capacity_s = 4
        max_concurrency = 20
        retry_after = "http_date"
        latency = { p50_ms = 10 }
        error_5xx = 0.01
        black_hole = false
        schedule = [
            { at_s = 10, set = { quota_factor = 0.3, max_concurrency = 5 } },
            { at_s = 20, set = { black_hole = true, retry_after = "ms" } },
        ]

        [[orgs]]
        name = "two"
        key = "secret-2"
    "#;
    let config: Config = toml::from_str(text).unwrap();
    assert!(config.validate().is_ok());
    assert_eq!(config.dialect, Dialect::OpenAi);
    assert_eq!(config.capacity_total(), f64::INFINITY);
    let one = &config.orgs[0];
    assert_eq!(one.requests_per_minute, Some(600.0));
    assert_eq!((one.error_5xx.0, one.black_hole.0), (0.01, 0.0));
    assert_eq!(one.latency, Some(Latency::new(10.0, 0.3)));
    assert_eq!(one.schedule[1].set.black_hole.unwrap().0, 1.0);
    assert_eq!(config.orgs[1].capacity_s, 2.0);
    let mut burst = Config { orgs: vec![one.clone()], ..config.clone() };
    assert_eq!(burst.capacity_total(), 40.0);
    burst.orgs[0].max_concurrency = None;
    assert_eq!(burst.fluid_limit_for(40, Cost::default()), Some(Duration::ZERO));
    for (old, new) in
        [("seed", "sede"), ("capacity_s", "capacity"), ("at_s = 20", "at = 20"), ("black_hole = true", "hole = true")]
    {
        let broken = text.replace(old, new);
        assert!(toml::from_str::<Config>(&broken).is_err(), "{new}");
    }
    let shown = format!("{config:?} {:?}", Sim::new(config.clone()).unwrap());
    assert!(!shown.contains("secret"), "{shown}");
}
