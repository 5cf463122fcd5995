//! The simulated provider over real HTTP, in a process of its own.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdin, Command, Stdio},
};

use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::Full;
use tower_quota::{
    client::{HttpClient, http},
    org::{Org, Orgs},
    sim::{Config, Latency, OrgConfig, Sim},
    stack::Stack,
};

use super::{
    stacks::{self, Callable},
    wire::{Ask, Body, request},
};

/// The flag that makes a bench the provider.
pub(crate) const SERVE: &str = "--serve";

/// Serves until whoever started this process closes its input.
pub(crate) fn serve() {
    let orgs = stacks::orgs(3);
    let config = orgs.iter().fold(Config::default().latency(Latency::new(0.0, 0.0)), |config, org| {
        let key = org.key().unwrap().reveal();
        // So large that nothing is refused or paced, and told in every answer.
        config.org(OrgConfig::new(org.name(), key).requests_per_minute(6e9).input_tokens_per_minute(6e11))
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let server = runtime.block_on(async { Sim::new(config).unwrap().serve().await.unwrap() });
    println!("{}", server.base_url());
    let _ = std::io::stdin().read_to_end(&mut vec![]);
}

/// The provider's process; it ends when this is dropped.
pub(crate) struct Provider {
    pub(crate) base_url: Uri,
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Provider {
    pub(crate) fn start() -> Self {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(program).arg(SERVE).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Provider { base_url: line.trim().parse().unwrap(), stdin: child.stdin.take(), child }
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}

fn client() -> HttpClient<Full<Bytes>> {
    http()
}

/// The whole stack over hyper-util's client.
pub(crate) fn ours(base_url: &Uri) -> impl Callable<Ask> + use<> {
    let orgs = stacks::orgs(3);
    let orgs = orgs.iter().cloned().map(|org: Org| org.base_url(base_url.clone()));
    Stack::new(Orgs::new(orgs).unwrap()).limit(stacks::settings()).build(client()).unwrap()
}

/// hyper-util's client alone.
pub(crate) fn bare() -> impl Callable<Ask> {
    client()
}

/// A request that needs no stack: its address and its key are in it.
pub(crate) fn bare_request(base_url: &Uri) -> Ask {
    let (mut head, body) = request().into_parts();
    head.uri = format!("{base_url}v1/messages").parse().unwrap();
    let orgs = stacks::orgs(3);
    head.headers.insert("x-api-key", orgs.iter().next().unwrap().key().unwrap().header("").unwrap());
    head.headers.insert("anthropic-version", "2023-06-01".parse().unwrap());
    Request::<Body>::from_parts(head, body)
}
