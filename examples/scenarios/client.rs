//! A client process of a scenario: a copy of our program, the bare client, or a colleague, against a base URL.

use std::time::SystemTime;

use bytes::Bytes;
use http::Uri;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, Serialize};
use tower_quota::stack::Stack;

use super::{
    BoxError,
    colleague::{self, Orders},
    copy::{self, Call, CopyReport},
    scenario::Task,
};

/// What a process is to do; it prints its report.
#[derive(Serialize, Deserialize)]
pub(crate) enum Part {
    Copy(Task),
    /// The same driver over the client alone, the orgs in turn.
    Bare(Task),
    Colleague(Orders),
}

/// Plays one part.
pub(crate) fn run(args: &[String]) -> Result<bool, BoxError> {
    let [base_url, part] = args else { return Err("--client takes a base URL and a part".into()) };
    let (base_url, part): (Uri, Part) = (base_url.parse()?, serde_json::from_str(part)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        let begin_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64();
        let report = match part {
            Part::Copy(task) => copy::stacked(&task, &base_url, http_client(&task)).await?,
            Part::Bare(task) => bare(&task, &base_url).await?,
            Part::Colleague(orders) => {
                let client = Client::builder(TokioExecutor::new()).build(connector());
                return Ok(serde_json::to_string(&colleague::work(&orders, &base_url, client).await)?);
            }
        };
        let report = CopyReport { begin_s, peak_kib: peak_kib(), cpu_s: cpu_s(), ..report };
        Ok::<_, BoxError>(serde_json::to_string(&report)?)
    })?;
    println!("{report}");
    Ok(true)
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector
}

/// Keeps as many idle connections as calls can be in flight: a connection more is opened now and then when none is idle at that
/// instant, and need not stay.
fn http_client(task: &Task) -> Client<HttpConnector, Full<Bytes>> {
    let in_flight = task.orgs.len() * task.cap.unwrap_or(if task.openai { 40 } else { 100 });
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(in_flight).build(connector())
}

async fn bare(task: &Task, base_url: &Uri) -> Result<CopyReport, BoxError> {
    use tower::Layer as _;
    let orgs = task.pool(base_url)?;
    let bound = task.bound(&Stack::new(orgs.clone()));
    let client = http_client(task);
    let mut members = vec![];
    for org in &orgs {
        members.push(tower_quota::auth::OrgAuthLayer::new(org)?.layer(client.clone()));
    }
    let turn = std::sync::atomic::AtomicUsize::new(0);
    let service = tower::service_fn(move |request: Call| {
        let mut member = members[turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % members.len()].clone();
        async move {
            let answer = tower::Service::call(&mut member, request).await?;
            let (head, body) = answer.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, BoxError>(http::Response::from_parts(head, Full::new(body)))
        }
    });
    // As many as the limits let the stack have in flight: half its bound.
    copy::drive(service, task, bound / 2).await
}

/// The process's peak resident memory, from the kernel; 0 where it does not say.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.trim().trim_end_matches("kB").trim().parse().unwrap_or(0)
}

/// The processor time that this process has used, user and system, from the kernel; 0 where it does not say.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields after the parenthesised name; the 12th and 13th of them are ticks of a hundredth of a second.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
