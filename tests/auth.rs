//! Org auth: what a request looks like when it leaves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    convert::Infallible,
    future::{Ready, ready},
    io,
    task::{Context, Poll},
};

use http::{HeaderMap, Request, Response, Uri};
use tokio_test::{assert_pending, assert_ready};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    auth::OrgAuthLayer,
    org::{Credential, Dialect, Org},
};

const KEY: &str = "sk-ant-secret-0123456789";

fn anthropic() -> Org {
    Org::new("a").credential(Credential::new(KEY))
}

fn openai() -> Org {
    anthropic().dialect(Dialect::OpenAi)
}

fn at(org: Org, base: &'static str) -> Org {
    org.base_url(Uri::from_static(base))
}

/// The request as the client below sees it.
async fn sent(org: &Org, uri: &str, headers: &[(&'static str, &'static str)]) -> Request<()> {
    let mut request = Request::get(uri).body(()).unwrap();
    for (name, value) in headers {
        request.headers_mut().append(*name, value.parse().unwrap());
    }
    let client = service_fn(|request: Request<()>| ready(Ok::<_, Infallible>(request)));
    OrgAuthLayer::new(org).unwrap().layer(client).oneshot(request).await.unwrap()
}

fn shown(headers: &HeaderMap) -> Vec<String> {
    let mut shown: Vec<_> =
        headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    shown.sort();
    shown
}

#[tokio::test]
async fn each_dialect_sets_its_own_headers_and_removes_the_others() {
    let bearer = format!("authorization: Bearer {KEY}");
    let x_api_key = format!("x-api-key: {KEY}");
    let stale =
        &[("authorization", "Bearer mine"), ("authorization", "Basic x"), ("x-api-key", "mine"), ("x-api-key", "2")];
    let version = "anthropic-version: 2023-06-01";
    for (org, headers, expected) in [
        (anthropic(), &[][..], vec![version, &x_api_key]),
        (anthropic(), stale, vec![version, &x_api_key]),
        (anthropic(), &[("anthropic-version", "2099-01-01")], vec!["anthropic-version: 2099-01-01", &x_api_key]),
        (openai(), &[], vec![&bearer]),
        (openai(), stale, vec![&bearer]),
        (openai(), &[("accept", "*/*"), ("accept", "text/plain")], vec!["accept: */*", "accept: text/plain", &bearer]),
        (Org::new("a"), &[("x-api-key", "mine"), ("host", "x")], vec!["x-api-key: mine"]),
        (Org::new("a"), &[], vec![]),
    ] {
        let request = sent(&org, "/v1/messages", headers).await;
        assert_eq!(shown(request.headers()), expected, "{:?} {headers:?}", org.speaks());
    }
}

#[tokio::test]
async fn the_base_url_wins_over_whatever_the_request_names() {
    for (org, asked, expected) in [
        (anthropic(), "/v1/messages", "https://api.anthropic.com/v1/messages"),
        (openai(), "/v1/responses?a=b", "https://api.openai.com/v1/responses?a=b"),
        (anthropic(), "http://evil.example:8080/v1/messages?x=1", "https://api.anthropic.com/v1/messages?x=1"),
        (anthropic(), "https://api.anthropic.com@evil.example/v1", "https://api.anthropic.com/v1"),
        (anthropic(), "evil.example:443", "https://api.anthropic.com/"),
        (anthropic(), "*", "https://api.anthropic.com/"),
        (anthropic(), "http://evil.example?x=1", "https://api.anthropic.com/?x=1"),
        (at(anthropic(), "http://gate.way/one"), "http://evil.example?x=1", "http://gate.way/one/?x=1"),
        (at(anthropic(), "http://127.0.0.1:4000"), "/v1/messages", "http://127.0.0.1:4000/v1/messages"),
        (at(anthropic(), "http://127.0.0.1:4000/"), "/v1/messages", "http://127.0.0.1:4000/v1/messages"),
        (at(anthropic(), "http://gate.way/one/two//"), "/v1/messages", "http://gate.way/one/two/v1/messages"),
        (at(anthropic(), "http://gate.way/one"), "/one/x", "http://gate.way/one/one/x"),
        (at(anthropic(), "http://gate.way/one"), "/", "http://gate.way/one/"),
        (at(openai(), "http://gate.way/one"), "http://evil.example/x", "http://gate.way/one/x"),
        (at(openai(), "http://gate.way/v1"), "/v1/responses", "http://gate.way/v1/responses"),
        (at(openai(), "http://gate.way/p/v1/"), "/v1", "http://gate.way/p/v1"),
        (at(openai(), "http://gate.way/v1"), "/v1?x", "http://gate.way/v1?x"),
        (at(openai(), "http://gate.way/v1"), "/responses", "http://gate.way/v1/responses"),
        (at(openai(), "http://gate.way/v1"), "/v10/responses", "http://gate.way/v1/v10/responses"),
        (at(openai(), "http://gate.way/av1"), "/v1/responses", "http://gate.way/av1/v1/responses"),
    ] {
        assert_eq!(sent(&org, asked, &[]).await.uri().to_string(), expected, "{asked}");
    }
}

#[tokio::test]
async fn a_path_too_long_to_prefix_still_goes_to_the_right_host() {
    let asked = format!("/{}", "x".repeat(65_530));
    let request = sent(&at(anthropic(), "http://gate.way/one"), &asked, &[]).await;
    assert_eq!(request.uri().host(), Some("gate.way"));
}

#[tokio::test]
async fn the_host_header_is_left_to_the_client() {
    let request = sent(&anthropic(), "/v1/messages", &[("host", "evil.example")]).await;
    assert!(!request.headers().contains_key("host"));
}

#[tokio::test]
async fn everything_else_of_a_request_passes_unchanged() {
    #[derive(Clone, Debug, PartialEq)]
    struct Mark;
    let client = service_fn(|request: Request<&'static str>| ready(Ok::<_, Infallible>(request)));
    let request = Request::put("/x").version(http::Version::HTTP_2).extension(Mark).body("body").unwrap();
    let sent = OrgAuthLayer::new(&anthropic()).unwrap().layer(client).oneshot(request).await.unwrap();
    assert_eq!((sent.method().as_str(), sent.version(), *sent.body()), ("PUT", http::Version::HTTP_2, "body"));
    assert_eq!(sent.extensions().get::<Mark>(), Some(&Mark));
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_is_not_followed() {
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let client = service_fn(|_: Request<()>| {
        calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        ready(Response::builder().status(307).header("location", "http://evil.example/").body(()))
    });
    let answer = OrgAuthLayer::new(&anthropic()).unwrap().layer(client).oneshot(Request::new(())).await.unwrap();
    assert_eq!((answer.status().as_u16(), calls.into_inner()), (307, 1));
}

#[test]
fn what_cannot_work_is_refused_at_build_without_quoting_it() {
    for (org, field) in [
        (Org::new("a").credential(Credential::new("  ")), "org \"a\": key"),
        (Org::new("a").credential(Credential::new("secret\nsecret")), "org \"a\": key"),
        (Org::new("a").credential(Credential::new("secretß")), "org \"a\": key"),
        (Org::new("a").credential(Credential::new("secret secret")), "org \"a\": key"),
        (at(anthropic(), "/secret"), "org \"a\": base_url"),
        (at(anthropic(), "secret:80"), "org \"a\": base_url"),
        (at(anthropic(), "*"), "org \"a\": base_url"),
        (at(anthropic(), "https://user:secret@gate.way/"), "org \"a\": base_url"),
        (at(anthropic(), "https://gate.way/?key=secret"), "org \"a\": base_url"),
    ] {
        let error = OrgAuthLayer::new(&org).unwrap_err();
        assert_eq!(error.field(), field);
        assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn no_formatting_prints_a_key() {
    for org in [anthropic(), openai()] {
        let layer = OrgAuthLayer::new(&org).unwrap();
        let request = sent(&org, "/v1/messages", &[]).await;
        let printed = format!("{org:?} {layer:?} {:?} {request:?}", layer.layer(Probe::default()));
        assert!(!printed.contains("secret"), "{printed}");
        let mine = [request.headers().get("x-api-key"), request.headers().get("authorization")];
        assert!(mine.into_iter().flatten().all(http::HeaderValue::is_sensitive));
    }
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

impl Service<Request<()>> for Probe {
    type Response = ();
    type Error = io::Error;
    type Future = Ready<io::Result<()>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without being ready");
        ready(Ok(()))
    }
}

#[tokio::test]
async fn the_instance_that_was_made_ready_is_the_one_called() {
    let mut service = OrgAuthLayer::new(&anthropic()).unwrap().layer(Probe::default());
    for _ in 0..3 {
        let mut clone = service.clone();
        service.ready().await.unwrap().call(Request::default()).await.unwrap();
        clone.ready().await.unwrap().call(Request::default()).await.unwrap();
        assert!(!service.get_ref().ready);
    }
}

#[tokio::test]
async fn readiness_is_that_of_the_client() {
    let layer = OrgAuthLayer::new(&anthropic()).unwrap();
    let (mut service, mut client) = tower_test::mock::spawn_layer::<Request<()>, Response<()>, _>(layer);
    client.allow(0);
    assert_pending!(service.poll_ready());
    client.allow(1);
    assert!(service.is_woken());
    assert_ready!(service.poll_ready()).unwrap();
    client.send_error(io::Error::from(io::ErrorKind::ConnectionRefused));
    assert!(assert_ready!(service.poll_ready()).is_err());
}
