//! `dispatch` killed with SIGKILL at random instants, and started again with the same command until it is done: over real HTTP, with
//! the provider's own account of what it was asked.
//!
//! A run is killed three times at most. `TOWER_QUOTA_KILLED_RUNS=100 cargo test --release --test killed` makes more runs than CI does.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "support/program.rs"]
mod program;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{Ipv4Addr, SocketAddr},
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, net::TcpListener, process::Child, sync::Notify};
use tower::ServiceExt;
use tower_quota::{
    journal::{FileStore, Key, KeyHeaders, Salt, Store},
    sim::{Config, Dialect, Latency, OrgConfig, Sim},
};

/// Ids of a run.
const IDS: usize = 300;
/// Slots of each of the two orgs. No more than twice as many ids are alive at once.
const CAP: usize = 10;
/// The journal, and what was put into it last.
const JOURNAL: [&str; 2] = ["out.jsonl.journal", "out.jsonl.journal.tail"];
/// Kills of a run, at most.
const KILLS: usize = 3;

/// The provider, which takes down who asked for what.
#[derive(Default)]
struct Account {
    /// Calls by item, those that the program's death broke off included.
    calls: Mutex<HashMap<u64, u64>>,
    /// Answers that were made, by item: what they said.
    answers: Mutex<HashMap<u64, (u64, String)>>,
    seen: AtomicUsize,
    /// How many calls are seen before somebody is to be woken.
    wanted: AtomicUsize,
    reached: Notify,
}

impl Account {
    fn called(&self, item: u64) {
        *self.calls.lock().unwrap().entry(item).or_default() += 1;
        if self.seen.fetch_add(1, Relaxed) + 1 == self.wanted.load(Relaxed) {
            self.reached.notify_one();
        }
    }

    fn answered(&self, item: u64, said: String) {
        let mut answers = self.answers.lock().unwrap();
        let (times, text) = answers.entry(item).or_insert_with(|| (0, said.clone()));
        *times += 1;
        assert_eq!(*text, said, "the provider says the same to the same");
    }
}

async fn serve(sim: Sim, account: Arc<Account>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let (sim, account) = (sim.clone(), account.clone());
            let service = service_fn(move |request: Request<Incoming>| answer(sim.clone(), account.clone(), request));
            // Broken off where the program is killed.
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    addr
}

type Broken = Box<dyn std::error::Error + Send + Sync>;

async fn answer(sim: Sim, account: Arc<Account>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Broken> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let item = serde_json::from_slice::<Value>(&body)?["n"].as_u64().unwrap();
    account.called(item);
    let response = sim.service().oneshot(Request::from_parts(head, Full::new(body))).await?;
    let (head, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    if head.status.is_success() {
        account.answered(item, text(&serde_json::from_slice(&body)?));
    }
    Ok(Response::from_parts(head, Full::new(body)))
}

/// What an answer says.
fn text(answer: &Value) -> String {
    answer["content"][0]["text"].as_str().unwrap().to_owned()
}

/// One run, in a folder of its own.
struct Run {
    dir: tempfile::TempDir,
    account: Arc<Account>,
    rng: fastrand::Rng,
    name: String,
}

impl Run {
    async fn new(seed: u64) -> Self {
        let config = Config::new(Dialect::Anthropic).seed(seed).unlimited(true).latency(Latency::new(8.0, 0.3));
        let config =
            ["a", "b"].iter().fold(config, |config, org| config.org(OrgConfig::new(*org, format!("key-of-{org}"))));
        let account = Arc::new(Account::default());
        let addr = serve(Sim::new(config).unwrap(), account.clone()).await;
        let dir = tempfile::tempdir().unwrap();
        let mut orgs = format!("dialect = \"anthropic\"\nbase_url = \"http://{addr}\"\n");
        for org in ["a", "b"] {
            orgs.push_str(&format!("[[org]]\nname = \"{org}\"\nkey = \"key-of-{org}\"\ncap = {CAP}\n"));
        }
        std::fs::write(dir.path().join("orgs.toml"), orgs).unwrap();
        let lines: String = (0..IDS)
            .map(|n| format!("{}\n", json!({ "custom_id": id(n as u64), "params": params(n as u64) })))
            .collect();
        std::fs::write(dir.path().join("in.jsonl"), lines).unwrap();
        Run { dir, account, rng: fastrand::Rng::with_seed(seed), name: format!("run {seed}") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(&self) -> Child {
        let args =
            ["--input", "in.jsonl", "--output", "out.jsonl", "--ordered", "ordered.jsonl", "--orgs", "orgs.toml"];
        let mut command = program::command(&[&["--quiet"][..], &args].concat());
        command.current_dir(self.dir.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Kills the program: at its start, within its work by the count of calls, or near its end. True if it was not done before.
    async fn kill(&mut self, mut child: Child) -> bool {
        let seen = self.account.seen.load(Relaxed);
        let more = self.rng.usize(0..IDS - self.done().len().min(IDS - 1));
        let pause = Duration::from_micros(self.rng.u64(0..20_000));
        if more == 0 || self.rng.u8(0..5) == 0 {
            tokio::time::sleep(pause * 5).await;
        } else {
            self.account.wanted.store(seen + more, Relaxed);
            tokio::select! {
                () = self.account.reached.notified() => tokio::time::sleep(pause).await,
                status = child.wait() => {
                    self.ended(status.unwrap(), child).await;
                    return false;
                }
            }
        }
        child.start_kill().unwrap();
        let status = child.wait().await.unwrap();
        match status.signal() {
            Some(9) => true,
            _ => {
                self.ended(status, child).await;
                false
            }
        }
    }

    /// A run that was not killed has come to a good end.
    async fn ended(&self, status: ExitStatus, mut child: Child) {
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).await.unwrap();
        assert!(status.success(), "{}: {status}: {said}", self.name);
    }

    /// The ids that the output has an answer to, each in one line that parses.
    fn done(&self) -> BTreeMap<u64, Value> {
        let Ok(output) = std::fs::read(self.path("out.jsonl")) else { return BTreeMap::new() };
        let whole = output.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let mut done = BTreeMap::new();
        for line in output[..whole].split_inclusive(|byte| *byte == b'\n') {
            let row: Value = serde_json::from_slice(line).unwrap_or_else(|error| {
                panic!("{}: {error}: {}", self.name, String::from_utf8_lossy(line));
            });
            let n = number(row["custom_id"].as_str().unwrap());
            if row["outcome"] == "ok" {
                assert!(done.insert(n, row).is_none(), "{}: {n} has two lines", self.name);
            }
        }
        done
    }

    /// The copy in the input's order is whole, or not there: a run that is killed leaves no part of one.
    fn ordered(&self) -> Option<Vec<String>> {
        let text = std::fs::read_to_string(self.path("ordered.jsonl")).ok()?;
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let rows = lines.iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let order: Vec<u64> = rows.map(|row| number(row["custom_id"].as_str().unwrap())).collect();
        assert!(order.iter().copied().eq(0..IDS as u64), "{}: {order:?}", self.name);
        Some(lines)
    }

    /// None of those that were kept has been asked for since.
    fn asked_again(&self, settled: Option<(BTreeSet<u64>, HashMap<u64, u64>)>) {
        let Some((kept, before)) = settled else { return };
        let now = self.calls();
        for n in kept {
            assert_eq!(now.get(&n), before.get(&n), "{}: {n} was kept, and is asked for again", self.name);
        }
    }

    fn torn_tail(&self) -> bool {
        std::fs::read(self.path("out.jsonl")).is_ok_and(|output| output.last().is_some_and(|last| *last != b'\n'))
    }

    /// The ids whose answers the journal holds.
    async fn journalled(&self) -> BTreeSet<u64> {
        let path = self.path("out.jsonl.journal");
        if !path.exists() {
            return BTreeSet::new();
        }
        let store = FileStore::builder(path).open().unwrap();
        let headers = KeyHeaders::default();
        let mut kept = BTreeSet::new();
        for n in 0..IDS as u64 {
            let request = Request::post("/v1/messages").extension(Salt(id(n))).body(()).unwrap();
            let key = Key::of(&request, params(n).to_string().as_bytes(), &headers);
            if store.get(&key).await.unwrap().is_some() {
                kept.insert(n);
            }
        }
        kept
    }

    fn calls(&self) -> HashMap<u64, u64> {
        self.account.calls.lock().unwrap().clone()
    }

    /// Every id has one line, with the provider's own answer to it.
    async fn finish(&mut self) {
        let output = self.start().wait_with_output().await.unwrap();
        assert!(output.status.success(), "{}: {}", self.name, String::from_utf8_lossy(&output.stderr));
        let done = self.done();
        assert_eq!(done.len(), IDS, "{}: every id has its line", self.name);
        let mut ordered = self.ordered().unwrap();
        ordered.sort_unstable();
        let output = std::fs::read_to_string(self.path("out.jsonl")).unwrap();
        let mut lines: Vec<_> = output.lines().collect();
        lines.sort_unstable();
        assert_eq!(ordered, lines, "{}: the copy has the output's own lines", self.name);
        let answers = self.account.answers.lock().unwrap();
        for (n, row) in &done {
            assert_eq!(text(&row["response"]), answers[n].1, "{}: the answer to {n} is its own", self.name);
        }
    }
}

/// Kills a run up to three times and finishes it. After each kill `damage` has its way with what is kept, and says whether the journal may
/// still be relied upon.
async fn campaign(seed: u64, damage: impl Fn(&mut Run) -> bool) -> Told {
    let mut run = Run::new(seed).await;
    let mut told = Told::default();
    let mut intact = true;
    let mut settled: Option<(BTreeSet<u64>, HashMap<u64, u64>)> = None;
    for _ in 0..KILLS {
        let child = run.start();
        if !run.kill(child).await {
            break;
        }
        told.kills += 1;
        told.torn += u64::from(run.torn_tail());
        told.ordered += u64::from(run.ordered().is_some());
        run.asked_again(settled.take());
        let whole = damage(&mut run);
        let mut kept: BTreeSet<u64> = run.done().into_keys().collect();
        intact &= whole;
        if whole {
            let journalled = run.journalled().await;
            told.only_journalled += journalled.difference(&kept).count() as u64;
            kept.extend(journalled);
        }
        settled = Some((kept, run.calls()));
    }
    run.finish().await;
    run.asked_again(settled);
    let answers = run.account.answers.lock().unwrap();
    told.twice = answers.values().map(|(times, _)| times - 1).sum();
    // Twice as many ids as slots are alive.
    let alive = 2 * 2 * CAP as u64;
    assert!(!intact || told.twice <= told.kills * alive, "{}: {told:?}, {alive} alive", run.name);
    told
}

#[derive(Clone, Copy, Debug, Default)]
struct Told {
    kills: u64,
    /// Unterminated tails that a kill has left.
    torn: u64,
    /// Kills after which the copy in order was there, whole.
    ordered: u64,
    /// Answers that only the journal had.
    only_journalled: u64,
    twice: u64,
}

impl std::ops::AddAssign for Told {
    fn add_assign(&mut self, other: Told) {
        self.kills += other.kills;
        self.torn += other.torn;
        self.ordered += other.ordered;
        self.only_journalled += other.only_journalled;
        self.twice += other.twice;
    }
}

fn runs() -> u64 {
    std::env::var("TOWER_QUOTA_KILLED_RUNS").map_or(8, |runs| runs.parse().unwrap())
}

async fn campaigns(first: u64, damage: impl Fn(&mut Run) -> bool) -> Told {
    let mut all = Told::default();
    for seed in first..first + runs() {
        all += campaign(seed, &damage).await;
    }
    println!("{} runs: {all:?}", runs());
    assert!(all.kills >= runs() / 2, "{all:?}");
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_id_has_one_line_and_nothing_that_was_kept_is_asked_for_again() {
    campaigns(1, |_| true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_cut_off_anywhere_costs_calls_and_nothing_else() {
    campaigns(10_001, |run| {
        for kept in JOURNAL {
            if let Ok(length) = std::fs::metadata(run.path(kept)).map(|it| it.len()) {
                let file = std::fs::OpenOptions::new().write(true).open(run.path(kept)).unwrap();
                file.set_len(run.rng.u64(0..=length)).unwrap();
            }
        }
        false
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flipped_bits_in_the_journal_cost_calls_and_nothing_else() {
    campaigns(20_001, |run| {
        for kept in JOURNAL {
            let Ok(mut bytes) = std::fs::read(run.path(kept)) else { continue };
            for _ in 0..run.rng.usize(1..20) {
                let at = run.rng.usize(0..bytes.len().max(1));
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << run.rng.u8(0..8);
                }
            }
            std::fs::write(run.path(kept), bytes).unwrap();
        }
        // The answers that only the journal has must come from it, or from the provider again.
        let _ = std::fs::remove_file(run.path("out.jsonl")).and_then(|()| std::fs::write(run.path("out.jsonl"), ""));
        false
    })
    .await;
}

fn id(n: u64) -> String {
    format!("id-{n}")
}

fn number(id: &str) -> u64 {
    id.strip_prefix("id-").unwrap().parse().unwrap()
}

fn params(n: u64) -> Value {
    json!({ "model": "claude-sonnet-4-5", "max_tokens": 4096, "messages": [{ "role": "user", "content": "?" }], "n": n })
}
