//! The simulated provider, in virtual time and over real HTTP.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tower::{Service, ServiceExt};
use tower_quota::sim::{
    Change, Config, Cost, Dialect, Headers, Latency, OrgConfig, RetryAfter, Sim, SimBody, SimError,
    SimService,
};

type HttpClient = Client<HttpConnector, Full<Bytes>>;

const WALL: u64 = 1_700_000_000; // 2023-11-14T22:13:20Z

fn config(dialect: Dialect, org: OrgConfig) -> Config {
    Config::new(dialect)
        .latency(Latency::new(100.0, 0.0))
        .wall_start_s(WALL)
        .org(org)
}

fn org() -> OrgConfig {
    OrgConfig::new("one", "key-1")
        .organization_id("org-id-1")
        .requests_per_minute(60.0)
}

fn post(uri: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::post(uri)
        .header("x-api-key", "key-1")
        .header("authorization", "Bearer key-1")
        .body(Full::new(body.into()))
        .unwrap()
}

async fn call(service: &SimService, body: &str) -> Result<Response<SimBody>, SimError> {
    service
        .clone()
        .oneshot(post("/v1/messages", body.to_owned()))
        .await
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
    let response = call(&sim.service(), r#"{"model":"m","max_tokens":5}"#)
        .await
        .unwrap();
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

#[tokio::test]
async fn both_dialects_answer_over_real_http() {
    for (dialect, path) in [
        (Dialect::Anthropic, "/v1/messages"),
        (Dialect::OpenAi, "/v1/chat/completions"),
    ] {
        let sim = Sim::new(config(dialect, org()).latency(Latency::new(1.0, 0.0))).unwrap();
        let server = sim.serve().await.unwrap();
        let client = client();
        let mut statuses = Vec::new();
        for i in 0..3 {
            let url = server.base_url() + path;
            let response = client.request(post(&url, format!("{i}"))).await.unwrap();
            statuses.push(response.status().as_u16());
            response.into_body().collect().await.unwrap();
        }
        assert_eq!(statuses, [200, 200, 429]);
        let truth = server.truth();
        assert_eq!(
            (truth.ok(), truth.throttled_429(), truth.answered_once),
            (2, 1, 2)
        );
        server.shutdown().await;
    }
}
