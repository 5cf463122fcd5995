//! The ready-made stack around hyper-util's pooled client: 450 requests over real HTTP to a provider simulated on loopback.
//!
//! Two organisations, one with twice the quota of the other. `drive` keeps as many requests alive as the stack can use; the
//! stack spends both quotas and crosses neither.
//!
//! ```sh
//! cargo run --example hyper_client
//! ```

use std::collections::BTreeMap;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower_quota::{
    client,
    drive::Drive,
    org::{Credential, Family, Org, Orgs},
    outcome::Stamp,
    sim::{Config, Dialect, OrgConfig, Sim},
    stack::Stack,
};

const REQUESTS: u64 = 450;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The provider: each org may burst for two seconds' worth, then goes at its rate.
    let provider = Config::new(Dialect::Anthropic)
        .org(OrgConfig::new("large", "key-of-large").requests_per_minute(6_000.0))
        .org(OrgConfig::new("small", "key-of-small").requests_per_minute(3_000.0));
    let least = provider.fluid_limit(REQUESTS).unwrap_or_default();
    let server = Sim::new(provider)?.serve().await?;

    // The client. In earnest: `Orgs::from_env()?` and `client::https()`; any `hyper_util` client of your own will do too.
    let org =
        |name: &str| Org::new(name).credential(Credential::new(&format!("key-of-{name}"))).base_url(server.base_url());
    let stack = Stack::new(Orgs::new([org("large"), org("small")])?);
    let family = Family::of_model("claude-haiku-4-5");
    let bound = stack.live_bound(&family);
    let service = stack.build(client::http())?;

    let requests = (0..REQUESTS).map(|n| {
        let body =
            format!(r#"{{"model":"claude-haiku-4-5","max_tokens":16,"messages":[{{"role":"user","content":"{n}"}}]}}"#);
        let request = Request::post("/v1/messages").extension(family.clone()).body(Full::new(Bytes::from(body)));
        (n, request.expect("a literal path"))
    });
    let start = tokio::time::Instant::now();
    let mut served = BTreeMap::<String, u64>::new();
    let mut drive = Drive::iter(service, requests, bound)?;
    while let Some((n, result)) = drive.next().await {
        let answer = result.map_err(|error| format!("request {n}: {error}"))?;
        let stamp = answer.extensions().get::<Stamp>().ok_or("every answer says who served it")?;
        let org = stamp.org.as_ref().map_or("?", Org::name);
        *served.entry(org.to_owned()).or_default() += 1;
    }

    let truth = server.truth();
    println!("{REQUESTS} requests in {:.2?}; the quotas allow no less than {least:.2?}", start.elapsed());
    println!("served by {served:?}; {} calls were answered 429", truth.throttled_429());
    assert_eq!((truth.answered_once, truth.answered_more), (REQUESTS, 0), "each is answered once");
    assert!(served["large"] > served["small"], "the larger quota serves more");
    assert!(truth.throttled_429() <= REQUESTS / 50, "quotas are spent, not crossed");
    Ok(())
}
