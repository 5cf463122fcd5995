//! The client process of a scenario: the real stack, or the bare client, against a base URL.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::{BodyExt, Full};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tower_quota::{
    drive::Drive,
    org::{Credential, Dialect, Family, Org, Orgs},
    stack::Stack,
};

use super::BoxError;

#[derive(Serialize, Deserialize)]
pub(crate) struct ClientTask {
    pub(crate) base_url: String,
    pub(crate) openai: bool,
    pub(crate) requests: u64,
    pub(crate) bare: bool,
    pub(crate) cap: Option<usize>,
    pub(crate) orgs: Vec<(String, String)>,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct ClientReport {
    pub(crate) wall_s: f64,
    pub(crate) ok: u64,
    pub(crate) peak_live: usize,
    pub(crate) peak_kib: u64,
    pub(crate) cpu_s: f64,
}

impl ClientReport {
    pub(crate) fn wall(&self) -> Duration {
        Duration::from_secs_f64(self.wall_s)
    }
}

/// Runs one task and prints its report.
pub(crate) fn run(args: &[String]) -> Result<bool, BoxError> {
    let task: ClientTask = serde_json::from_str(args.first().ok_or("--client takes a task")?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async { if task.bare { bare(&task).await } else { stacked(&task).await } })?;
    println!("{}", serde_json::to_string(&report)?);
    Ok(true)
}

fn requests(task: &ClientTask) -> impl Iterator<Item = (u64, Request<Full<Bytes>>)> + Send + Unpin + 'static {
    let (path, model) =
        if task.openai { ("/v1/chat/completions", "gpt-4o") } else { ("/v1/messages", "claude-sonnet-4-5") };
    let family = Family::of_model(model);
    (0..task.requests).map(move |item| {
        let body = format!(
            r#"{{"model":"{model}","max_tokens":64,"messages":[{{"role":"user","content":"judge item {item}"}}]}}"#
        );
        let mut request =
            Request::post(path).header("content-type", "application/json").body(Full::new(Bytes::from(body)));
        if let Ok(request) = &mut request {
            request.extensions_mut().insert(family.clone());
        }
        (item, request.expect("a literal path and header"))
    })
}

/// Keeps as many idle connections as calls can be in flight: a connection more is opened now and then when none is idle at that
/// instant, and need not stay.
fn http_client(task: &ClientTask) -> tower_quota::client::HttpClient<Full<Bytes>> {
    let mut connector = hyper_util::client::legacy::connect::HttpConnector::new();
    connector.set_nodelay(true);
    let in_flight = task.orgs.len() * task.cap.unwrap_or(if task.openai { 40 } else { 100 });
    hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
        .pool_max_idle_per_host(in_flight)
        .build(connector)
}

fn pool(task: &ClientTask) -> Result<Orgs, BoxError> {
    let base_url: Uri = task.base_url.parse()?;
    let dialect = if task.openai { Dialect::OpenAi } else { Dialect::Anthropic };
    let orgs = task.orgs.iter().map(|(name, key)| {
        let org = Org::new(name).credential(Credential::new(key)).base_url(base_url.clone()).dialect(dialect);
        task.cap.into_iter().fold(org, Org::cap)
    });
    Ok(Orgs::new(orgs)?)
}

async fn stacked(task: &ClientTask) -> Result<ClientReport, BoxError> {
    let stack = Stack::new(pool(task)?);
    let family = Family::of_model(if task.openai { "gpt-4o" } else { "claude-sonnet-4-5" });
    let bound = stack.live_bound(&family);
    let service = stack.build(http_client(task))?;
    drive(service, task, bound).await
}

/// The same driver over the client alone, the orgs in turn.
async fn bare(task: &ClientTask) -> Result<ClientReport, BoxError> {
    use tower::Layer as _;
    let orgs = pool(task)?;
    let family = Family::of_model(if task.openai { "gpt-4o" } else { "claude-sonnet-4-5" });
    let bound = Stack::new(orgs.clone()).live_bound(&family);
    let client = http_client(task);
    let mut members = vec![];
    for org in &orgs {
        members.push(tower_quota::auth::OrgAuthLayer::new(org)?.layer(client.clone()));
    }
    let turn = std::sync::atomic::AtomicUsize::new(0);
    let service = tower::service_fn(move |request| {
        let mut member = members[turn.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % members.len()].clone();
        async move {
            let answer = tower::Service::call(&mut member, request).await?;
            let (head, body) = answer.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, BoxError>(http::Response::from_parts(head, body))
        }
    });
    // As many as the limits let the stack have in flight: half its bound.
    drive(service, task, bound / 2).await
}

async fn drive<S, RB>(service: S, task: &ClientTask, bound: usize) -> Result<ClientReport, BoxError>
where
    S: tower::Service<Request<Full<Bytes>>, Response = http::Response<RB>>,
    S::Error: std::fmt::Display,
{
    let mut drive = Drive::iter(service, requests(task), bound)?;
    let begin = Instant::now();
    let (mut ok, mut shown) = (0, 0);
    while let Some((item, result)) = drive.next().await {
        match result {
            Ok(answer) if answer.status().is_success() => ok += 1,
            Ok(answer) => eprintln!("item {item}: {}", answer.status()),
            Err(error) => {
                shown += 1;
                if shown <= 5 {
                    eprintln!("item {item}: {error}");
                }
            }
        }
    }
    let wall_s = begin.elapsed().as_secs_f64();
    Ok(ClientReport { wall_s, ok, peak_live: drive.peak_live(), peak_kib: peak_kib(), cpu_s: cpu_s() })
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
