//! The ready-made stack around reqwest: all it takes is a `Service` of some fifteen lines. 300 requests over real HTTP to a
//! provider simulated on loopback, which speaks OpenAI's dialect and fails now and then; failures are retried, none is lost.
//!
//! ```sh
//! cargo run --example reqwest_client
//! ```

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::Service;
use tower_quota::{
    drive::Drive,
    org::{Credential, Dialect, Family, Org, Orgs},
    sim::{Chance, Config, OrgConfig, Sim},
    stack::Stack,
};

/// reqwest as a service of the `http` crate's types. The request's body can be cloned, since a retried request is sent again.
#[derive(Clone)]
struct Reqwest(reqwest::Client);

impl Service<Request<Full<Bytes>>> for Reqwest {
    type Response = Response<reqwest::Body>;
    type Error = reqwest::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Full<Bytes>>) -> Self::Future {
        let request = reqwest::Request::try_from(request.map(reqwest::Body::wrap));
        let client = self.0.clone();
        Box::pin(async move { client.execute(request?).await.map(Into::into) })
    }
}

const REQUESTS: u64 = 300;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let provider = Config::new(Dialect::OpenAi)
        .org(OrgConfig::new("steady", "key-1").requests_per_minute(6_000.0))
        .org(OrgConfig::new("flaky", "key-2").requests_per_minute(6_000.0).error_5xx(Chance(0.05)));
    let server = Sim::new(provider)?.serve().await?;

    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none()) // a key never follows a redirect
        .retry(reqwest::retry::never()) // the stack alone retries
        .no_proxy()
        .connect_timeout(Duration::from_secs(10))
        .build()?;

    let org = |name, key| {
        Org::new(name).dialect(Dialect::OpenAi).credential(Credential::new(key)).base_url(server.base_url())
    };
    let stack =
        Stack::new(Orgs::new([org("steady", "key-1"), org("flaky", "key-2")])?).timeout(Duration::from_secs(30));
    let family = Family::of_model("gpt-4o-mini");
    let bound = stack.live_bound(&family);
    let service = stack.build(Reqwest(client))?;

    let requests = (0..REQUESTS).map(|n| {
        let body = format!(r#"{{"model":"gpt-4o-mini","messages":[{{"role":"user","content":"{n}"}}]}}"#);
        let request =
            Request::post("/v1/chat/completions").extension(family.clone()).body(Full::new(Bytes::from(body)));
        (n, request.expect("a literal path"))
    });
    let mut drive = Drive::iter(service, requests, bound)?;
    let mut answered = 0;
    while let Some((n, result)) = drive.next().await {
        let answer = result.map_err(|error| format!("request {n}: {error}"))?;
        let bytes = answer.body().get_ref().bytes().ok_or("the judge gathers every answer")?;
        let json: serde_json::Value = serde_json::from_slice(bytes)?;
        assert!(json["choices"][0]["message"]["content"].is_string(), "{json}");
        answered += 1;
    }

    let truth = server.truth();
    let (calls, refused) = (truth.calls(), truth.throttled_429());
    let failed: u64 = truth.orgs.iter().flat_map(|org| org.errors.values()).sum();
    println!(
        "{answered} requests answered in {calls} calls: {failed} failed with a 500, {refused} were refused with a 429"
    );
    assert_eq!((answered, truth.answered_once, truth.answered_more), (REQUESTS, REQUESTS, 0));
    assert!(failed > 0, "what failed was sent again");
    Ok(())
}
