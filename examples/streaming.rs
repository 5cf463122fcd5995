//! Server-sent events handed through as they come: the judge gathers errors only, and the slot stays taken until the stream
//! has ended or is dropped. Real HTTP to a provider simulated on loopback, which speaks Anthropic's event stream.
//!
//! ```sh
//! cargo run --example streaming
//! ```

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use tokio::time::Instant;
use tower::{Service, ServiceExt};
use tower_quota::{
    client,
    judge::{Gather, JudgeLayer},
    org::{Credential, Family, Org, Orgs},
    outcome::Stamp,
    sim::{Config, Dialect, Latency, OrgConfig, Sim},
    stack::Stack,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // An answer takes two seconds; its events are spread over them.
    let provider =
        Config::new(Dialect::Anthropic).latency(Latency::new(2_000.0, 0.0)).org(OrgConfig::new("one", "key"));
    let server = Sim::new(provider)?.serve().await?;

    let org = Org::new("one").credential(Credential::new("key")).base_url(server.base_url());
    // With a timeout the judge bounds the time to the head; the stream itself may take as long as it likes.
    let judge = JudgeLayer::new().gather(Gather::ErrorsOnly).timeout(Duration::from_secs(30));
    let mut service = Stack::new(Orgs::new([org.clone()])?).judge(judge).build(client::http())?;

    let family = Family::of_model("claude-haiku-4-5");
    let request = || {
        let body =
            r#"{"model":"claude-haiku-4-5","max_tokens":64,"stream":true,"messages":[{"role":"user","content":"?"}]}"#;
        Request::post("/v1/messages").extension(family.clone()).body(Full::new(Bytes::from(body)))
    };

    println!("before:  {} in flight", org.snapshot().in_flight);
    assert_eq!(org.snapshot().in_flight, 0);
    let start = Instant::now();
    let mut answer = service.ready().await?.call(request()?).await?;
    let (at, in_flight) = (start.elapsed().as_millis(), org.snapshot().in_flight);
    println!("{at:>4} ms, {in_flight} in flight  {} {:?}", answer.status(), answer.headers()["content-type"]);
    // What it used is known when it has ended. Whoever only wants to know then may register a closure: `tail.on_end(…)`.
    let tail = |answer: &Response<_>| answer.extensions().get::<Stamp>().and_then(|stamp| stamp.tail.clone());
    let end = tail(&answer).ok_or("it is handed through")?;

    let mut chunks = 0;
    while let Some(frame) = answer.body_mut().frame().await {
        let Ok(chunk) = frame?.into_data() else { continue };
        let (at, in_flight) = (start.elapsed().as_millis(), org.snapshot().in_flight);
        for line in String::from_utf8_lossy(&chunk).lines().filter(|line| line.starts_with("data")) {
            println!("{at:>4} ms, {in_flight} in flight  {line}");
        }
        chunks += 1;
        if chunks == 1 {
            assert_eq!(server.truth().ok(), 0, "it arrives while the provider is still sending");
            assert_eq!(org.snapshot().in_flight, 1, "the slot is kept meanwhile");
        }
    }
    println!("after:   {} in flight, though the answer is still kept", org.snapshot().in_flight);
    let ended = end.ended().ok_or("it was read to its end")?;
    println!("         {:?}, complete: {}", ended.usage, ended.complete);
    assert!(chunks > 1 && ended.complete && ended.usage.is_some());
    assert_eq!((server.truth().ok(), org.snapshot().in_flight), (1, 0));

    let mut answer = service.ready().await?.call(request()?).await?;
    answer.body_mut().frame().await.ok_or("a stream has a beginning")??;
    assert_eq!(org.snapshot().in_flight, 1);
    let end = tail(&answer).ok_or("it is handed through")?;
    drop(answer);
    println!("another, dropped half-way: {} in flight, {:?}", org.snapshot().in_flight, end.ended());
    assert_eq!(org.snapshot().in_flight, 0);
    Ok(())
}
