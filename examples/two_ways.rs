//! A journal above a route above both paths: what is urgent goes at once, the rest in the provider's batches at half the price. Run twice
//! over the same file, it sends nothing the second time.
//!
//! ```sh
//! cargo run --example two_ways
//! ```

use std::{collections::BTreeMap, error::Error, path::Path, time::Duration};

use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::Full;
use tower::ServiceBuilder;
use tower_quota::{
    batch::{BatchService, Batched, Route, Way},
    client,
    drive::Drive,
    journal::{FileStore, JournalLayer, Restored},
    org::{Credential, Family, Org, Orgs},
    sim::{BatchConfig, Config, Dialect, Latency, OrgConfig, Sim},
    stack::Stack,
};

const REQUESTS: u64 = 100;

/// What a request of ours has in its extensions if somebody waits for it.
#[derive(Clone, Copy)]
struct Urgent;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The provider: a batch takes a second there, not hours.
    let provider = Config::new(Dialect::Anthropic)
        .batch(BatchConfig::new().delay(Latency::new(1_000.0, 0.0)))
        .org(OrgConfig::new("large", "key-of-large").requests_per_minute(6_000.0))
        .org(OrgConfig::new("small", "key-of-small").requests_per_minute(3_000.0));
    let server = Sim::new(provider)?.serve().await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("answers.journal");

    let first = run(&server.base_url(), &file).await?;
    println!("first run: {first:?}");
    assert_eq!(first, BTreeMap::from([("at once", REQUESTS / 4), ("in a batch", REQUESTS - REQUESTS / 4)]));

    let calls = server.truth().calls();
    let second = run(&server.base_url(), &file).await?;
    println!("second run: {second:?}, {} calls", server.truth().calls() - calls);
    assert_eq!(second, BTreeMap::from([("from the journal", REQUESTS)]));
    assert_eq!(server.truth().calls(), calls, "nothing is sent again");

    let truth = server.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (REQUESTS, 0), "each is answered and paid for once");
    Ok(())
}

/// Sends all of them, and counts which way they were answered.
async fn run(provider: &Uri, file: &Path) -> Result<BTreeMap<&'static str, u64>, Box<dyn Error>> {
    let org =
        |name: &str| Org::new(name).credential(Credential::new(&format!("key-of-{name}"))).base_url(provider.clone());
    let orgs = Orgs::new([org("large"), org("small")])?;
    let family = Family::of_model("claude-haiku-4-5");

    let client = client::http::<Full<Bytes>>();
    let stack = Stack::new(orgs.clone());
    // Answers, and the records of batches, are in one file.
    let store = FileStore::open(file)?;
    let batch = BatchService::builder(orgs, store.clone())
        .chunk_rows(25)
        .linger(Duration::from_millis(200))
        .poll(Duration::from_secs(1), Duration::from_secs(1))
        .open(client.clone())
        .await?;
    let handle = batch.handle();
    // Room for what goes either way, or urgent requests would stand in line behind rows of batches.
    let bound = stack.live_bound(&family) + batch.live_bound();
    let way = |request: &Request<Full<Bytes>>| match request.extensions().get::<Urgent>() {
        Some(Urgent) => Way::Direct,
        None => Way::Batch,
    };
    let route = Route::new(stack.build(client)?, batch, way);
    let service = ServiceBuilder::new().layer(JournalLayer::new(store)).service(route);

    let requests = (0..REQUESTS).map(move |n| {
        let body = format!(
            r#"{{"model":"claude-haiku-4-5","max_tokens":512,"messages":[{{"role":"user","content":"{n}"}}]}}"#
        );
        let request = Request::post("/v1/messages").extension(family.clone()).body(Full::new(Bytes::from(body)));
        let mut request = request.expect("a literal path");
        if n % 4 == 0 {
            request.extensions_mut().insert(Urgent);
        }
        (n, request)
    });
    let mut ways = BTreeMap::new();
    let mut drive = Drive::iter(service, requests, bound)?;
    while let Some((n, result)) = drive.next().await {
        let answer = result.map_err(|error| format!("request {n}: {error}"))?;
        let way = match (answer.extensions().get::<Restored>(), answer.extensions().get::<Batched>()) {
            (Some(_), _) => "from the journal",
            (None, Some(_)) => "in a batch",
            (None, None) => "at once",
        };
        *ways.entry(way).or_default() += 1;
    }
    // What is still to be written down of the last batch; and it says what is left running, and billed.
    let ended = handle.shutdown().await;
    assert!(ended.left.is_empty(), "nothing is left running");
    Ok(ways)
}
