//! `dispatch --route batch` killed with SIGKILL at random instants, or ended by Ctrl-C, and started again with the same command until it is done: over real HTTP,
//! against the simulated provider of both dialects, whose own count is believed.
//!
//! `TOWER_QUOTA_KILLED_RUNS=50 cargo test --release --test batch_killed` makes more runs than CI does;
//! `cargo test --release --test batch_killed -- --ignored --nocapture` runs 20,000 rows of each dialect with 50 kills, three times.
//!
//! As many batches are submitted as are needed: none is [wasteful](waste). Of rows that are all answered at once it is as many as they fill;
//! what did not come out of a batch has to go into another one.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "support/program.rs"]
mod program;
#[path = "support/waste.rs"]
mod waste;

use std::{collections::BTreeMap, os::unix::process::ExitStatusExt, path::PathBuf, process::Stdio, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, process::Child, time::Instant};
use tower::ServiceExt;
use tower_quota::sim::{BatchConfig, BatchTruth, Config, Dialect, Latency, OrgConfig, Server, Sim};

const ORGS: [&str; 2] = ["a", "b"];

/// How large a run is.
#[derive(Clone, Copy)]
struct Size {
    ids: usize,
    /// Of a batch.
    rows: usize,
    in_flight: usize,
    kills: usize,
    /// The longest that is waited before a kill, in milliseconds.
    life_ms: u64,
}

const SMALL: Size = Size { ids: 60, rows: 8, in_flight: 2, kills: 3, life_ms: 3_000 };
const BIG: Size = Size { ids: 20_000, rows: 250, in_flight: 4, kills: 50, life_ms: 2_000 };

/// What goes wrong with the batches of an org, beside what costs no row: lost replies, batches that are not there as yet, shuffled results.
fn faults(org: &str, kind: Kind) -> BatchConfig {
    let batch = BatchConfig::new()
        .delay(Latency::new(500.0, 0.5))
        .counts_while_running(true)
        .cancel_takes_s(0.2)
        .not_found_after_create_s(0.5)
        .not_listed_after_create_s(0.3)
        .lost_reply(0.15)
        .not_found(0.02);
    match (kind, org) {
        (Kind::Sound | Kind::Faulty, _) => batch,
        // A stuck batch is cancelled by us before it expires; but not one whose reply was lost, of which that is not certain.
        (Kind::Mixed, "a") => batch.stuck(0.15).all_error(0.1).row_overloaded(0.03).expires_after_s(12.0),
        (Kind::Mixed, _) => batch.expired(0.3).row_api_error(0.05).expires_after_s(1.5),
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Every row of every batch is answered.
    Sound,
    /// The same, but calls about batches fail in whatever way.
    Faulty,
    /// Batches are stuck or expire, rows meet errors.
    Mixed,
}

/// One run, in a folder of its own.
struct Run {
    dir: tempfile::TempDir,
    server: Server,
    dialect: Dialect,
    kind: Kind,
    size: Size,
    rng: fastrand::Rng,
    name: String,
    /// The answers, by id.
    texts: Vec<String>,
}

impl Run {
    async fn new(dialect: Dialect, kind: Kind, size: Size, seed: u64) -> Self {
        let config =
            Config::new(dialect).seed(seed).unlimited(true).latency(Latency::new(5.0, 0.5)).lengths_by_item(true);
        let org = |name: &str| {
            let org = OrgConfig::new(name, format!("key-of-{name}")).batch(faults(name, kind));
            match kind {
                Kind::Faulty => org.overloaded(0.05).error_5xx(0.06).reset(0.06).truncate(0.06).hang(0.03),
                _ => org,
            }
        };
        let config = ORGS.iter().fold(config, |config, name| config.org(org(name)));
        // Another one of the same seed says the same.
        let sound = config.clone().latency(Latency::new(0.0, 0.0));
        let other = Sim::new(ORGS.iter().fold(Config { orgs: vec![], ..sound }, |config, name| {
            config.org(OrgConfig::new(*name, format!("key-of-{name}")))
        }));
        let other = other.unwrap();
        let texts: Vec<String> = stream::iter(0..size.ids).then(|n| text_by(other.clone(), dialect, n)).collect().await;
        let server = Sim::new(config).unwrap().serve().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        let spoken = if dialect == Dialect::Anthropic { "anthropic" } else { "openai" };
        let mut orgs = format!("dialect = \"{spoken}\"\nbase_url = \"{}\"\n", server.base_url());
        for org in ORGS {
            orgs.push_str(&format!("[[org]]\nname = \"{org}\"\nkey = \"key-of-{org}\"\n"));
        }
        std::fs::write(dir.path().join("orgs.toml"), orgs).unwrap();
        let line = |n| match dialect {
            Dialect::Anthropic => json!({ "custom_id": id(n), "params": body(dialect, n) }),
            _ => json!({ "custom_id": id(n), "method": "POST", "url": path(dialect), "body": body(dialect, n) }),
        };
        let lines: String = (0..size.ids).map(|n| format!("{}\n", line(n))).collect();
        std::fs::write(dir.path().join("in.jsonl"), lines).unwrap();
        let name = format!("{spoken}, run {seed}");
        Run { dir, server, dialect, kind, size, rng: fastrand::Rng::with_seed(seed), name, texts }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// With `more` arguments.
    fn start(&self, more: &[&str]) -> Child {
        let (rows, in_flight) = (self.size.rows.to_string(), self.size.in_flight.to_string());
        let mut args = vec!["--quiet", "--input", "in.jsonl", "--output", "out.jsonl", "--orgs", "orgs.toml"];
        args.extend(["--route", "batch", "--batch-rows", &rows, "--batch-in-flight", &in_flight]);
        // None is stuck but among the mixed; and what fails to be submitted for as long goes directly.
        let stuck_after = if self.kind == Kind::Mixed { "4s" } else { "1h" };
        args.extend(["--batch-poll", "1s", "--batch-stuck-after", stuck_after, "--batch-look-again", "1s"]);
        args.extend(["--report", "report.json", "--grace", "5s", "--timeout", "2s"]);
        args.extend(more);
        let mut command = program::command(&args);
        command.current_dir(self.dir.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn batch_truth(&self) -> BatchTruth {
        self.server.truth().batch()
    }

    /// Kills the program: some time after its start, or in the moment after one of its calls. True if it was not done before.
    async fn kill(&mut self, mut child: Child, polite: bool) -> bool {
        let watched: Option<fn(&BatchTruth) -> u64> = match self.rng.u8(0..6) {
            0 | 1 => None,
            2 => Some(|truth| truth.created),
            3 => Some(|truth| truth.results),
            4 => Some(|truth| truth.polls + truth.lists + truth.hidden),
            _ => Some(|truth| truth.uploads + truth.cancelled + truth.created),
        };
        let end = Instant::now() + Duration::from_millis(self.rng.u64(0..self.size.life_ms));
        let (mut more, pause) = (self.rng.u64(1..4), Duration::from_micros(self.rng.u64(0..8_000)));
        let mut before = watched.map(|of| of(&self.batch_truth()));
        while Instant::now() < end {
            if let Ok(Some(_)) = child.try_wait() {
                break;
            }
            if let (Some(of), Some(seen)) = (watched, &mut before) {
                let now = of(&self.batch_truth());
                if now > *seen {
                    *seen = now;
                    more -= 1;
                    if more == 0 {
                        tokio::time::sleep(pause).await;
                        break;
                    }
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if polite {
            let id = child.id().map(|id| id.to_string());
            id.iter().for_each(|id| drop(std::process::Command::new("kill").args(["-INT", id]).status()));
        } else {
            let _ = child.start_kill();
        }
        let status = child.wait().await.unwrap();
        // A signal may come before it is listened to.
        if matches!(status.signal(), Some(9 | 2)) || status.code() == Some(130) {
            return true;
        }
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).await.unwrap();
        assert!(status.success() || self.may_be_in_doubt(status.code()), "{}: {status}: {said}", self.name);
        false
    }

    /// Rows of a stuck batch whose reply was lost are handed back after a while, to be asked for again: whose it is, is certain only at its end.
    fn may_be_in_doubt(&self, code: Option<i32>) -> bool {
        self.kind == Kind::Mixed && self.dialect == Dialect::Anthropic && code == Some(1)
    }

    /// Kills it as often as it may be, and lets it finish: every id has one line, with its own answer.
    async fn campaign(&mut self) -> Told {
        let mut told = Told { runs: 1, ..Told::default() };
        for _ in 0..self.size.kills {
            // Ctrl-C ends a run too, and may cancel what runs.
            let polite = self.kind == Kind::Mixed && self.rng.u8(0..3) == 0;
            let cancels: &[&str] = if polite && self.rng.bool() { &["--cancel-on-exit"] } else { &[] };
            let child = self.start(cancels);
            if !self.kill(child, polite).await {
                break;
            }
            told.kills += 1;
        }
        let mut output = self.start(&[]).wait_with_output().await.unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while self.may_be_in_doubt(output.status.code()) && Instant::now() < end {
            output = self.start(&[]).wait_with_output().await.unwrap();
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {}: {said}\n{:?}", self.name, output.status, self.batch_truth());
        let rows = self.rows();
        assert_eq!(rows.len(), self.size.ids, "{}: every id has its line", self.name);
        for (n, row) in &rows {
            let said = said_in(self.dialect, &row["response"]);
            assert_eq!(said, self.texts[*n], "{}: the answer to {n} is its own", self.name);
        }
        let truth = self.server.truth();
        let batch = truth.batch();
        let name = &self.name;
        assert_eq!(truth.rows.billed_more, 0, "{name}: a row is billed twice: {batch:?}");
        assert_eq!((batch.rows_again_while_open, batch.rows_again_after_billed), (0, 0), "{name}: {batch:?}");
        let batches = self.server.sim().batches();
        let wasteful = waste::wasteful(&batches, self.size.rows);
        assert!(wasteful.is_empty(), "{name}: {wasteful:?}: {batches:#?}");
        told.batches = batch.created;
        told.lost = batch.lost_replies;
        (told.cancelled, told.expired) = (batch.cancelled, batch.expired);
        told.submitted_more = truth.rows.submitted_more;
        told.directly = rows.values().filter(|row| row.get("batch").is_none() && !row["org"].is_null()).count() as u64;
        told.twice = truth.answered_more;
        told
    }

    /// The lines by the numbers of their ids, each once, and `ok`.
    fn rows(&self) -> BTreeMap<usize, Value> {
        let output = std::fs::read_to_string(self.path("out.jsonl")).unwrap();
        let mut rows = BTreeMap::new();
        for line in output.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let n = row["custom_id"].as_str().unwrap().strip_prefix("id-").unwrap().parse().unwrap();
            assert_eq!(row["outcome"], "ok", "{}: {line}", self.name);
            assert!(rows.insert(n, row).is_none(), "{}: {n} has two lines", self.name);
        }
        rows
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Told {
    runs: u64,
    kills: u64,
    batches: u64,
    lost: u64,
    cancelled: u64,
    expired: u64,
    /// Rows that were in more than one batch.
    submitted_more: u64,
    /// Ids answered by a call of their own.
    directly: u64,
    /// Ids answered twice: by calls of their own that a kill broke off.
    twice: u64,
}

impl std::ops::AddAssign for Told {
    fn add_assign(&mut self, other: Told) {
        self.runs += other.runs;
        self.kills += other.kills;
        self.batches += other.batches;
        self.lost += other.lost;
        self.cancelled += other.cancelled;
        self.expired += other.expired;
        self.submitted_more += other.submitted_more;
        self.directly += other.directly;
        self.twice += other.twice;
    }
}

/// As many runs as are asked for, some at a time: they wait more than they work.
async fn campaigns(first: u64, kind: Kind) -> Told {
    let runs = std::env::var("TOWER_QUOTA_KILLED_RUNS").map_or(4, |runs| runs.parse().unwrap());
    let run = |seed: u64| async move {
        let dialect = if seed % 2 == 0 { Dialect::Anthropic } else { Dialect::OpenAi };
        let mut run = Run::new(dialect, kind, SMALL, seed).await;
        let told = run.campaign().await;
        if kind != Kind::Mixed {
            assert_eq!((told.submitted_more, told.directly, told.twice), (0, 0, 0), "{}", run.name);
            assert_eq!(told.batches, SMALL.ids.div_ceil(SMALL.rows) as u64, "{}: {told:?}", run.name);
        }
        told
    };
    let mut all = Told::default();
    let mut done = stream::iter((first..first + runs).map(run)).buffer_unordered(4);
    while let Some(told) = done.next().await {
        all += told;
    }
    println!("{all:?}");
    assert!(all.kills >= runs, "{all:?}");
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_batch_is_submitted_twice_whenever_it_is_killed() {
    campaigns(1, Kind::Sound).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_id_has_one_answer_and_none_is_billed_twice_whatever_goes_wrong_with_batches() {
    let all = campaigns(10_001, Kind::Mixed).await;
    assert!(all.expired > 0 && all.submitted_more > 0 && all.directly > 0, "{all:?}");
    // Those in flight at a kill, as without batches.
    assert!(all.twice <= all.kills * SMALL.rows as u64, "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_batch_is_submitted_twice_whatever_goes_wrong_with_calls_about_batches() {
    campaigns(20_001, Kind::Faulty).await;
}

/// The rows of a stuck batch end on the direct path, in a run that nobody kills.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rows_of_a_stuck_batch_are_answered_directly() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let mut run = Run::new(dialect, Kind::Mixed, Size { kills: 0, ..SMALL }, 5).await;
        let stuck = BatchConfig::new().stuck(1.0).cancel_takes_s(0.2);
        let config = ORGS.iter().fold(Config::new(dialect).seed(5).unlimited(true), |config, name| {
            config.org(OrgConfig::new(*name, format!("key-of-{name}")).batch(stuck.clone()))
        });
        let server =
            Sim::new(config.latency(Latency::new(5.0, 0.0)).lengths_by_item(true)).unwrap().serve().await.unwrap();
        let orgs = std::fs::read_to_string(run.path("orgs.toml")).unwrap();
        let orgs = orgs.replace(&run.server.base_url().to_string(), &server.base_url().to_string());
        std::fs::write(run.path("orgs.toml"), orgs).unwrap();
        run.server = server;
        let told = run.campaign().await;
        assert_eq!((told.directly, told.cancelled, told.twice), (60, 8, 0), "{told:?}");
        let report: Value = serde_json::from_slice(&std::fs::read(run.path("report.json")).unwrap()).unwrap();
        assert_eq!(report["batches"]["rows"], json!({ "direct": 60, "batch": 0 }));
        assert_eq!((&report["batches"]["submitted"], &report["batches"]["ended"]), (&json!(8), &json!(8)));
        assert_eq!(run.batch_truth().rows_succeeded, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "20,000 rows of each dialect"]
async fn twenty_thousand_rows_and_fifty_kills() {
    for (dialect, seed) in
        [Dialect::Anthropic, Dialect::OpenAi].into_iter().flat_map(|of| (77..80).map(move |seed| (of, seed)))
    {
        let started = Instant::now();
        let mut run = Run::new(dialect, Kind::Mixed, BIG, seed).await;
        let told = run.campaign().await;
        let (seconds, truth) = (started.elapsed().as_secs_f64(), run.server.truth());
        println!("{dialect:?}, seed {seed}: {seconds:.0} s, {told:?}, {:?}, {:?}", truth.batch(), truth.rows);
        let batches = run.server.sim().batches();
        let sizes: Vec<_> = batches.iter().map(|batch| batch.rows).filter(|rows| *rows < BIG.rows as u64).collect();
        println!(
            "{dialect:?}, seed {seed}: {} batches submitted, and needed; not full: {sizes:?}; {} kills",
            told.batches, told.kills
        );
    }
}

/// What a provider says to this one.
async fn text_by(sim: Sim, dialect: Dialect, n: usize) -> String {
    let request =
        Request::post(path(dialect)).header("x-api-key", "key-of-a").header("authorization", "Bearer key-of-a");
    let request = request.body(Full::new(Bytes::from(body(dialect, n).to_string()))).unwrap();
    let answer = sim.service().oneshot(request).await.unwrap();
    assert!(answer.status().is_success());
    said_in(dialect, &serde_json::from_slice(&answer.into_body().collect().await.unwrap().to_bytes()).unwrap())
}

fn said_in(dialect: Dialect, answer: &Value) -> String {
    let text = match dialect {
        Dialect::Anthropic => &answer["content"][0]["text"],
        _ => &answer["choices"][0]["message"]["content"],
    };
    text.as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

fn id(n: usize) -> String {
    format!("id-{n}")
}

const fn path(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Anthropic => "/v1/messages",
        _ => "/v1/chat/completions",
    }
}

fn body(dialect: Dialect, n: usize) -> Value {
    let model = if dialect == Dialect::Anthropic { "claude-sonnet-4-5" } else { "gpt-4o-mini" };
    json!({ "model": model, "max_tokens": 64, "messages": [{ "role": "user", "content": format!("item {n}") }] })
}
