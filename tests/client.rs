//! The ready-made client over real HTTP on loopback.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{error::Error as _, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::{io::AsyncReadExt, sync::Barrier};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_quota::{
    auth::OrgAuthLayer,
    client,
    judge::JudgeLayer,
    org::{Credential, Org},
    outcome::Class,
};

/// A server that answers once `together` calls are there at the same time, with the head of the request as its body.
async fn serve(together: usize) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let barrier = Arc::new(Barrier::new(together));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let barrier = barrier.clone();
            let answer = hyper::service::service_fn(move |request: Request<Incoming>| {
                let barrier = barrier.clone();
                async move {
                    barrier.wait().await;
                    let (host, key) = (&request.headers()["host"], &request.headers()["x-api-key"]);
                    let head = format!("{} {host:?} {key:?}", request.uri());
                    Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from(head))))
                }
            });
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, answer));
        }
    });
    address
}

fn org(address: SocketAddr) -> Org {
    let base = format!("http://{address}/base").parse().unwrap();
    Org::new("a").credential(Credential::new("sk-1")).base_url(base)
}

fn request() -> Request<Full<Bytes>> {
    Request::post("/v1/messages").header("host", "evil.example").body(Full::default()).unwrap()
}

#[tokio::test]
async fn a_request_without_a_host_reaches_its_org() {
    let address = serve(1).await;
    let layers = ServiceBuilder::new().layer(JudgeLayer::new()).layer(OrgAuthLayer::new(&org(address)).unwrap());
    let expected = format!("/base/v1/messages \"{address}\" \"sk-1\"");
    let answer = layers.clone().service(client::http::<Full<Bytes>>()).oneshot(request()).await.unwrap();
    assert_eq!(answer.into_body().into_bytes().unwrap(), expected);
    let answer = layers.service(client::https::<Full<Bytes>>()).oneshot(request()).await.unwrap();
    assert_eq!(answer.into_body().into_bytes().unwrap(), expected, "the TLS client speaks plain HTTP where told");
}

#[tokio::test]
async fn the_plain_client_speaks_no_https() {
    let error =
        client::http::<Full<Bytes>>().oneshot(Request::get("https://127.0.0.1:1/").body(Full::default()).unwrap());
    assert!(error.await.unwrap_err().is_connect());
}

#[tokio::test]
async fn the_tls_client_begins_with_a_handshake_and_one_that_fails_is_transport_and_unsent() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let uri = format!("https://localhost:{}/", listener.local_addr().unwrap().port());
    let judged = JudgeLayer::new().layer(client::https::<Full<Bytes>>());
    let mut call = tokio::spawn(judged.oneshot(Request::get(uri).body(Full::default()).unwrap()));
    let (mut stream, _) = tokio::select! {
        accepted = listener.accept() => accepted.unwrap(),
        answer = &mut call => panic!("no connection was opened: {answer:?}"),
    };
    assert_eq!(stream.read_u8().await.unwrap(), 0x16, "the record type of a handshake");
    drop(stream);
    let error = call.await.unwrap().unwrap_err();
    // It never came to a request: sent again it is paid for once.
    assert_eq!((error.class(), error.stamp().unsent), (Class::Transport, true));
    let cause = error.source().unwrap().downcast_ref::<hyper_util::client::legacy::Error>().unwrap();
    assert!(cause.is_connect());
}

#[tokio::test]
async fn as_many_calls_run_at_once_as_are_made() {
    const CALLS: usize = 300;
    let address = serve(CALLS).await;
    let service = ServiceBuilder::new()
        .layer(JudgeLayer::new())
        .layer(OrgAuthLayer::new(&org(address)).unwrap())
        .service(client::http::<Full<Bytes>>());
    let calls = (0..CALLS).map(|_| {
        let mut service = service.clone();
        tokio::spawn(async move { service.ready().await.unwrap().call(request()).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(call.await.unwrap().unwrap().status(), 200);
    }
}
