//! One layer alone: `AimdLimitLayer` in a stack that has nothing else of this crate, around HTTP and around what is no HTTP at
//! all. What is below takes six calls at once, does not say so, and refuses the rest; the limit finds the number. Refused
//! calls go back to the caller, since nothing here retries.
//!
//! ```sh
//! cargo run --example one_layer
//! ```

use std::{error::Error, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Full;
use tokio::sync::Semaphore;
use tower::{Service, ServiceBuilder, service_fn};
use tower_quota::{
    aimd::AimdLimitLayer,
    client,
    drive::{Drive, DriveError},
    org::Org,
    outcome::{Class, Outcome, classify_fn},
    sim::{Config, Dialect, Headers, OrgConfig, RetryAfter, Sim},
};

const CALLS: u64 = 400;
const AT_ONCE: usize = 6;

/// HTTP needs no classifier: status and headers are read.
async fn around_http() -> Result<(), Box<dyn Error>> {
    let silent = OrgConfig::new("one", "key").max_concurrency(AT_ONCE).retry_after(RetryAfter::None);
    let server = Sim::new(Config::new(Dialect::Anthropic).headers(Headers::None).org(silent))?.serve().await?;
    let url = format!("http://{}/v1/messages", server.addr());

    let org = Org::new("one").cap(40);
    let service = ServiceBuilder::new()
        .timeout(Duration::from_secs(30)) // any layer of anybody's
        .layer(AimdLimitLayer::new(&org))
        .service(client::http());
    let requests = (0..CALLS).map(|n| {
        let body = Full::new(Bytes::from(format!(r#"{{"item":{n}}}"#)));
        (n, Request::post(&url).header("x-api-key", "key").body(body).expect("a URL and a key"))
    });
    let mut drive = Drive::iter(service, requests, 80)?;
    let mut refused = 0;
    while let Some((n, result)) = drive.next().await {
        let answer = result.map_err(|error| format!("call {n}: {error}"))?;
        // The slot is kept until the body has ended or is dropped: here, at the end of this turn.
        refused += u64::from(answer.status() == StatusCode::TOO_MANY_REQUESTS);
    }
    report("over HTTP", &org, refused)
}

struct Query(u64);
struct Rows(u64);

#[derive(Debug)]
enum DbError {
    TooManyConnections,
    Deadlock,
}

async fn around_a_database() -> Result<(), Box<dyn Error>> {
    let connections = Arc::new(Semaphore::new(AT_ONCE));
    let database = service_fn(move |Query(n)| {
        let connections = connections.clone();
        async move {
            let _connection = connections.try_acquire().map_err(|_| DbError::TooManyConnections)?;
            tokio::time::sleep(Duration::from_millis(10)).await;
            if n % 100 == 7 { Err(DbError::Deadlock) } else { Ok(Rows(n)) }
        }
    });
    println!("a database, no limit: {} of {CALLS} refused", queries_refused(database.clone()).await?);

    let org = Org::new("database").cap(40);
    let classify = classify_fn(|result| {
        Outcome::of(match result {
            Ok(_) => Class::Ok,
            Err(DbError::TooManyConnections) => Class::Throttled,
            Err(DbError::Deadlock) => Class::Overloaded, // a failure, but no reason to send less
        })
    });
    // There is no body to wait for: the slot is free as soon as the call has returned.
    let limit = AimdLimitLayer::new(&org).classify(classify).release_at_head();
    let refused = queries_refused(ServiceBuilder::new().layer(limit).service(database)).await?;
    report("a database", &org, refused)
}

async fn queries_refused<S>(service: S) -> Result<u64, Box<dyn Error>>
where
    S: Service<Query, Response = Rows, Error = DbError>,
{
    let mut drive = Drive::iter(service, (0..CALLS).map(|n| (n, Query(n))), 80)?;
    let mut refused = 0;
    while let Some((n, result)) = drive.next().await {
        match result {
            Ok(Rows(rows)) => assert_eq!(rows, n),
            Err(DriveError::Service(DbError::TooManyConnections)) => refused += 1,
            Err(error) => assert_eq!(n % 100, 7, "{error:?}"),
        }
    }
    Ok(refused)
}

fn report(what: &str, org: &Org, refused: u64) -> Result<(), Box<dyn Error>> {
    let board = org.snapshot();
    let limit = board.limit.ok_or("the limiter writes the board")?.limit;
    println!("{what}, limited: {refused} of {CALLS} refused; the limit came to {limit:.1}");
    for change in &board.history {
        println!("    {change}");
    }
    assert_eq!(board.in_flight, 0, "every slot is back");
    assert!((AT_ONCE as f64 - limit).abs() <= 2.0 && refused < CALLS / 10, "the number was found");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    around_http().await?;
    around_a_database().await
}
