//! A composition of one's own: tower-http's `TraceLayer` and `TimeoutLayer` between this crate's layers, and a classifier that
//! has empty answers sent again.
//!
//! One org of the provider on loopback never answers, the other at times with nothing in it. The log shows each attempt's
//! org, status and latency. All thirty requests get an answer.
//!
//! ```sh
//! cargo run --example custom_stack
//! ```

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::Full;
use tower::ServiceBuilder;
use tower_http::{timeout::TimeoutLayer, trace::TraceLayer};
use tower_quota::{
    aimd::{AimdLimitLayer, Held},
    auth::OrgAuthLayer,
    balance::OrgBalanceLayer,
    client,
    drive::Drive,
    health::OrgHealthLayer,
    judge::{Answer, JudgeLayer},
    org::{Credential, Org, Orgs},
    outcome::{Class, Classify, Error, Outcome, Stamp, Stamped},
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    sim::{Chance, Config, Dialect, OrgConfig, Sim},
};
use tracing_subscriber::fmt::writer::MakeWriterExt;

/// What the judge says, except that an answer without content is refused; then the retry layer sends the request again.
#[derive(Clone)]
struct NotEmpty;

type Judged<B> = Response<Held<Answer<B>>>;

impl<B> Classify<Judged<B>, Error> for NotEmpty {
    fn classify(&self, result: Result<&Judged<B>, &Error>) -> Outcome {
        let empty = br#""content":[]"#;
        let bytes = result.ok().and_then(|answer| answer.body().get_ref().bytes());
        if bytes.is_some_and(|bytes| bytes.windows(empty.len()).any(|part| part == empty)) {
            tracing::info!("an empty answer: refused");
            return Outcome::of(Class::Rejected);
        }
        Stamped.classify(result)
    }

    // The judge's stamp says which org was asked and whether it is held. Forward it: without, holds are slept out twice.
    fn stamp<'a>(&self, result: Result<&'a Judged<B>, &'a Error>) -> Option<&'a Stamp> {
        Stamped.stamp(result)
    }

    fn head<'a>(&self, result: Result<&'a Judged<B>, &'a Error>) -> Option<(StatusCode, &'a HeaderMap)> {
        Stamped.head(result)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The log goes to the terminal, and to a file that is counted at the end.
    let log = tempfile::NamedTempFile::new()?;
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stdout.and(log.reopen()?)).init();

    let provider = Config::new(Dialect::Anthropic)
        .org(OrgConfig::new("terse", "terse").requests_per_minute(6_000.0).empty(Chance(0.2)))
        .org(OrgConfig::new("mute", "mute").requests_per_minute(6_000.0).hang(Chance(1.0)));
    let server = Sim::new(provider)?.serve().await?;
    let org = |name| Org::new(name).credential(Credential::new(name)).base_url(server.base_url());

    let member = |org: &Org, client| {
        let name = org.name().to_owned();
        let trace = TraceLayer::new_for_http()
            .make_span_with(move |_: &Request<_>| tracing::info_span!("attempt", org = name))
            .on_request(|_: &Request<_>, _: &tracing::Span| tracing::info!("sent"))
            .on_response(|answer: &Response<_>, latency: Duration, _: &tracing::Span| {
                tracing::info!(status = answer.status().as_u16(), ?latency, "answered");
            });
        ServiceBuilder::new()
            .layer(OrgHealthLayer::new(org).classify(Stamped))
            .layer(AimdLimitLayer::new(org).classify(Stamped))
            .layer(QuotaHeaderLayer::new(org))
            // It makes up an answer, and above the judge there is a body for it.
            .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_millis(500)))
            .layer(JudgeLayer::new().scrub(org))
            .layer(trace)
            .layer(OrgAuthLayer::new(org).expect("this key can go into a header"))
            .service(client)
    };
    let service = ServiceBuilder::new()
        .layer(RateLimitRetryLayer::builder().classify(NotEmpty).max_attempts(10).build()?)
        .layer(OrgBalanceLayer::new(Orgs::new([org("terse"), org("mute")])?, member))
        .service(client::http());

    let requests = (0..30).map(|n| {
        let body = format!(r#"{{"max_tokens":16,"messages":[{{"role":"user","content":"{n}"}}]}}"#);
        (n, Request::post("/v1/messages").body(Full::new(Bytes::from(body))).expect("a literal path"))
    });
    let mut drive = Drive::iter(service, requests, 60)?;
    let mut answered = 0;
    while let Some((n, result)) = drive.next().await {
        result.map_err(|error| format!("request {n}: {error}"))?;
        answered += 1;
    }

    let log = std::fs::read_to_string(log.path())?;
    let lines = |what: &str| log.lines().filter(|line| line.contains(what)).count() as u64;
    let (sent, empty) = (lines(": sent"), lines("an empty answer"));
    let late = sent - lines(": answered");
    println!("{answered} requests in {sent} attempts: {late} timed out, {empty} were answered with nothing");
    let truth = server.truth();
    assert_eq!(answered, 30);
    assert_eq!(empty, truth.orgs.iter().map(|org| org.empty).sum::<u64>(), "each empty answer was refused");
    assert!(late > 0 && sent >= truth.calls(), "every attempt is in the log");
    Ok(())
}
