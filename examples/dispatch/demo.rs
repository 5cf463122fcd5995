//! The demonstration: a simulated provider on loopback, and requests for it.

use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use tower_quota::{
    org::{Credential, Dialect, Family, Org, Orgs},
    sim::{self, OrgConfig, Server, Sim},
};

use crate::{
    Failure,
    args::{Args, RouteArg},
    input::Item,
};

/// Names and requests per minute. The buckets hold two seconds' worth, which is the simulator's default.
const ORGS: [(&str, f64); 3] = [("large", 7_200.0), ("medium", 4_800.0), ("small", 1_200.0)];
/// The median time of a call, in milliseconds.
const P50_MS: f64 = 50.0;
/// The median time of a batch, in milliseconds.
const BATCH_P50_MS: f64 = 5_000.0;
/// How many requests are sent unless the command line says otherwise.
pub(crate) const REQUESTS: u64 = 6_000;

/// A running provider and the way to it.
pub(crate) struct Demo {
    pub(crate) server: Server,
    pub(crate) orgs: Orgs,
    pub(crate) fluid_limit: Option<Duration>,
}

fn key(name: &str) -> String {
    format!("demo-key-of-{name}")
}

/// Starts the provider.
pub(crate) async fn start(args: &Args) -> Result<Demo, Failure> {
    let dialect = args.dialect.map(Dialect::from).unwrap_or_default();
    let mut config = sim::Config::new(dialect)
        .seed(args.seed.unwrap_or(1))
        .latency(sim::Latency::new(P50_MS, 0.3))
        .batch(sim::BatchConfig::new().delay(sim::Latency::new(BATCH_P50_MS, 0.3)))
        .unlimited(args.demo_unlimited);
    for (name, rpm) in ORGS.iter().filter(|(name, _)| args.single_org.as_deref().is_none_or(|only| only == *name)) {
        config = config.org(OrgConfig::new(*name, key(name)).requests_per_minute(*rpm));
    }
    // Batches are at no such limit.
    let directly = args.route != Some(RouteArg::Batch);
    let fluid_limit = config.fluid_limit(args.demo_requests.unwrap_or(REQUESTS)).filter(|_| directly);
    let server = Sim::new(config)
        .map_err(Failure::new)?
        .serve()
        .await
        .map_err(|error| Failure::new(format!("no socket: {error}")))?;
    let orgs = ORGS.iter().map(|(name, _)| {
        Org::new(name).credential(Credential::new(&key(name))).base_url(server.base_url()).dialect(dialect)
    });
    let orgs = Orgs::new(orgs).map_err(Failure::new)?;
    Ok(Demo { server, orgs, fluid_limit })
}

/// The request of this number.
pub(crate) fn item(dialect: Dialect, number: u64) -> Item {
    let (path, model) = match dialect {
        Dialect::OpenAi => ("/v1/chat/completions", "gpt-4o-mini"),
        _ => ("/v1/messages", "claude-sonnet-4-5"),
    };
    let message = format!("Say the number {number}.");
    let body = serde_json::json!({
        "model": model,
        "max_tokens": 16,
        "messages": [{ "role": "user", "content": message }],
    });
    Item {
        custom_id: format!("demo-{number}"),
        path: PathAndQuery::from_static(path),
        family: Family::of_model(model),
        body: Bytes::from(body.to_string()),
        metadata: None,
        replaces: None,
    }
}
