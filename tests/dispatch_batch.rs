//! `dispatch --route batch` as a whole: the built binary, against the simulated provider over real HTTP.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "support/program.rs"]
mod program;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Output, Stdio},
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, BufReader},
    process::{Child, Command},
};
use tower_quota::sim::{BatchConfig, BatchState, Config, Dialect, Latency, OrgConfig, Server, Sim};

use self::program::command;

const ORGS: [&str; 2] = ["first", "second"];

/// A provider, and a folder with an input and the orgs.
struct Bench {
    dir: TempDir,
    server: Server,
    dialect: Dialect,
}

impl Bench {
    async fn new(dialect: Dialect, batch: BatchConfig) -> Self {
        let config = Config::new(dialect).unlimited(true).latency(Latency::new(5.0, 0.0)).lengths_by_item(true);
        let config = ORGS
            .iter()
            .fold(config.batch(batch), |config, name| config.org(OrgConfig::new(*name, format!("sk-of-{name}"))));
        let server = Sim::new(config).unwrap().serve().await.unwrap();
        let bench = Bench { dir: tempfile::tempdir().unwrap(), server, dialect };
        let spoken = if dialect == Dialect::Anthropic { "anthropic" } else { "openai" };
        let mut toml = format!("dialect = \"{spoken}\"\nbase_url = \"{}\"\n", bench.server.base_url());
        for name in ORGS {
            toml.push_str(&format!("[[org]]\nname = \"{name}\"\nkey = \"sk-of-{name}\"\n"));
        }
        std::fs::write(bench.path("orgs.toml"), toml).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An input of so many ids, with a word for what is to happen to one.
    fn input(&self, ids: usize, word: impl Fn(usize) -> Option<&'static str>) -> &Self {
        let line = |n: usize| {
            let word = word(n);
            let model = match (self.dialect, word) {
                // It holds the orgs, so it is of another family.
                (Dialect::Anthropic, Some("rate_limited")) => "claude-haiku-4-5",
                (Dialect::Anthropic, _) => "claude-sonnet-4-5",
                (_, Some("rate_limited")) => "gpt-4.1",
                _ => "gpt-4o-mini",
            };
            let mut body = json!({ "model": model, "max_tokens": 64, "messages": [{ "role": "user", "content": format!("item {n}") }] });
            if let Some(word) = word {
                body["metadata"] = json!({ "simulate": word });
            }
            let id = format!("id-{n}");
            match self.dialect {
                Dialect::Anthropic => format!("{}\n", json!({ "custom_id": id, "params": body })),
                _ => format!(
                    "{}\n",
                    json!({ "custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": body })
                ),
            }
        };
        std::fs::write(self.path("in.jsonl"), (0..ids).map(line).collect::<String>()).unwrap();
        self
    }

    /// The program, reading `in.jsonl`, writing `NAME.jsonl` and `NAME.json`.
    fn run(&self, name: &str, more: &[&str]) -> Command {
        let (output, report) = (format!("{name}.jsonl"), format!("{name}.json"));
        let mut args = vec!["--input", "in.jsonl", "--orgs", "orgs.toml", "--output", &output, "--report", &report];
        args.extend(more);
        let mut command = command(&args);
        command.current_dir(self.dir.path()).stderr(Stdio::piped());
        command
    }

    async fn batched(&self, name: &str, more: &[&str]) -> (i32, String) {
        let mut args = vec!["--route", "batch", "--batch-poll", "1s"];
        args.extend(more);
        told(self.run(name, &args).output().await.unwrap())
    }

    /// The same, to be interrupted, once so many batches are at the provider and the program knows of them.
    async fn interrupted(&self, more: &[&str], batches: usize) -> (i32, String) {
        let mut args = vec!["--route", "batch", "--batch-poll", "1s", "--batch-rows", "10"];
        args.extend(more);
        let mut child = self.run("out", &args).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let known = format!("{batches} submitted");
        while let Some(line) = lines.next_line().await.unwrap() {
            said.push_str(&line);
            if line.contains(&known) {
                break;
            }
        }
        interrupt(&child);
        lines.into_inner().read_to_string(&mut said).await.unwrap();
        (child.wait().await.unwrap().code().unwrap(), said)
    }

    fn lines(&self, name: &str) -> BTreeMap<String, Value> {
        let text = std::fs::read_to_string(self.path(&format!("{name}.jsonl"))).unwrap();
        let mut lines = BTreeMap::new();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let id = line["custom_id"].as_str().unwrap().to_owned();
            assert!(lines.insert(id.clone(), line).is_none(), "{id} has two lines");
        }
        lines
    }

    fn report(&self, name: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.path(&format!("{name}.json"))).unwrap()).unwrap()
    }

    fn states(&self) -> Vec<BatchState> {
        self.server.sim().batches().iter().map(|batch| batch.state).collect()
    }
}

fn told(output: Output) -> (i32, String) {
    let said = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap_or_else(|| panic!("{:?}: {said}", output.status)), said)
}

fn interrupt(child: &Child) {
    let id = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

fn quick() -> BatchConfig {
    BatchConfig::new().delay(Latency::new(200.0, 0.3))
}

/// For as long as nobody ends them.
fn slow() -> BatchConfig {
    BatchConfig::new().delay(Latency::new(3_600e3, 0.0))
}

/// What became of an id, without what differs between two calls.
fn end(mut line: Value) -> Value {
    let body = line["response"].take();
    let body = match body {
        Value::Object(mut body) => {
            for one_time in ["id", "created", "request_id", "system_fingerprint"] {
                body.remove(one_time);
            }
            Value::Object(body)
        }
        other => other,
    };
    let error = line["error"].as_str().map(|error| {
        let last = error.rsplit_once("last: ").map_or(error, |(_, last)| last);
        ORGS.iter().fold(last.to_owned(), |text, org| text.replace(&format!(" (org {org})"), ""))
    });
    // How long it was waited for differs, and so may whether the last call was still answered.
    let (status, error) = match line["outcome"].as_str().unwrap() {
        "rate_limited" => (Value::Null, None),
        _ => (line["status"].take(), error),
    };
    json!({ "outcome": line["outcome"], "status": status, "error": error, "response": body })
}

/// Answered for good, by either path.
const FOR_GOOD: [&str; 5] = ["invalid_request", "not_found", "too_large", "refusal", "max_tokens"];
/// Tried again, by either path. Few, since they end on the direct path all at once, and open its breakers.
const FOR_NOW: [&str; 6] = ["rate_limited", "overloaded", "api_error", "timeout", "empty", "in_band"];
/// Those take the org out, so each is asked for by itself.
const OUT: [&str; 2] = ["forbidden", "out_of_quota"];

#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_requests_end_alike_directly_and_in_batches_and_batches_cost_half() {
    tokio::join!(end_alike(Dialect::Anthropic), end_alike(Dialect::OpenAi));
}

async fn end_alike(dialect: Dialect) {
    let bench = Bench::new(dialect, quick()).await;
    // A fifth of them.
    let word = |n: usize| if n < 60 { FOR_NOW[n / 5 % 6] } else { FOR_GOOD[n / 5 % 5] };
    bench.input(500, |n| (n % 5 == 0).then(|| word(n)));
    let few = ["--max-attempts", "2", "--patience", "10s"];
    let (code, said) = told(bench.run("direct", &few).output().await.unwrap());
    assert_eq!(code, 1, "{said}");
    let (code, said) = bench.batched("batch", &[&few[..], &["--batch-rows", "100"]].concat()).await;
    assert_eq!(code, 1, "{said}");
    let (direct, batch) = (bench.lines("direct"), bench.lines("batch"));
    assert_eq!((direct.len(), batch.len()), (500, 500));
    let mut outcomes = BTreeMap::<_, u64>::new();
    for (id, line) in &direct {
        // On a slow machine the patience may end before the attempts do.
        let (outcome, other) = (line["outcome"].as_str().unwrap(), batch[id]["outcome"].as_str().unwrap());
        let is_again = |outcome| matches!(outcome, "rate_limited" | "transient");
        *outcomes.entry(if is_again(outcome) { "again" } else { outcome }).or_default() += 1;
        if outcome == other || !is_again(outcome) || !is_again(other) {
            assert_eq!(end(line.clone()), end(batch[id].clone()), "{dialect:?}, {id}: {line}, {}", batch[id]);
        }
    }
    let all = [("again", 12), ("ok", 436), ("terminal", 34), ("too_large", 18)];
    assert_eq!(outcomes, BTreeMap::from(all), "{dialect:?}");
    let mut answered = batch.values().filter(|line| line["outcome"] != "rate_limited");
    assert!(answered.all(|line| line["org"].is_string()), "by an org each");

    // The rows for now were in two batches before they went directly, and were billed in none.
    let (direct, batch) = (bench.report("direct"), bench.report("batch"));
    // Whose patience has ended by then is not sent any more.
    let rows = &batch["batches"]["rows"];
    assert!(rows["batch"] == 488 && rows["direct"].as_u64().is_some_and(|direct| direct <= 12), "{rows}");
    assert!(direct.get("batches").is_none(), "{direct}");
    let (full, half) = (direct["cost_usd"].as_f64().unwrap(), batch["batches"]["cost_usd"]["batch"].as_f64().unwrap());
    assert!(full > 0.0 && (half / full - 0.5).abs() < 0.01, "{full} {half}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_an_org_out_ends_alike_directly_and_in_a_batch() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        for word in OUT {
            let bench = Bench::new(dialect, quick()).await;
            bench.input(1, |_| Some(word));
            let (_, direct) = told(bench.run("direct", &[]).output().await.unwrap());
            let (_, batch) = bench.batched("batch", &[]).await;
            println!("{direct}{batch}{}{}", bench.lines("direct")["id-0"], bench.lines("batch")["id-0"]);
            let outcome = |name: &str| bench.lines(name)["id-0"]["outcome"].clone();
            assert_eq!(outcome("direct"), outcome("batch"), "{dialect:?}, {word}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_input_sends_what_is_gathered() {
    let bench = Bench::new(Dialect::OpenAi, quick()).await;
    bench.input(25, |_| None);
    let (code, said) = bench.batched("out", &["--batch-rows", "10", "--batch-linger", "1h"]).await;
    assert_eq!(code, 0, "{said}");
    let sizes: Vec<_> = bench.server.sim().batches().iter().map(|batch| batch.rows).collect();
    assert_eq!(sizes.iter().sum::<u64>(), 25);
    assert_eq!(sizes.len(), 3, "{sizes:?}");
    // Of those that go on with it nothing is sent.
    let (code, said) = bench.batched("out", &["--batch-rows", "10"]).await;
    assert_eq!((code, bench.server.sim().batches().len()), (0, 3), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_leaves_batches_running_and_the_same_command_has_their_answers() {
    let batch = BatchConfig::new().delay(Latency::new(6_000.0, 0.0));
    let bench = Bench::new(Dialect::Anthropic, batch).await;
    bench.input(40, |_| None);
    let (code, said) = bench.interrupted(&[], 4).await;
    assert_eq!(code, 130, "{said}");
    assert!(said.contains("4 batches at the provider will be left running, and billed: batch msgbatch_"), "{said}");
    assert!(said.contains("4 batches left running, and billed: batch msgbatch_"), "{said}");
    assert!(said.contains("to have what they answer, at no further cost: "), "{said}");
    assert!(said.contains("--route batch --batch-poll 1s --batch-rows 10"), "{said}");
    let (lines, report) = (bench.lines("out"), bench.report("out"));
    assert_eq!(lines.len(), 40);
    assert!(lines.values().all(|line| line["outcome"] == "cancelled"), "{lines:?}");
    let left = report["batches"]["left"].as_array().unwrap();
    assert_eq!((left.len(), &report["ended_by"]), (4, &json!("ctrl-c")));

    let (code, said) = bench.batched("out", &["--batch-rows", "10"]).await;
    assert_eq!(code, 0, "{said}");
    assert_eq!(bench.states(), [BatchState::Completed; 4]);
    let report = bench.report("out");
    assert_eq!((&report["batches"]["submitted"], &report["batches"]["resumed"]), (&json!(0), &json!(4)));
    assert_eq!(report["batches"]["rows"], json!({ "direct": 0, "batch": 40 }));
    assert_eq!(bench.server.truth().rows.billed_more, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_cancel_on_exit_ctrl_c_cancels_what_runs_and_the_rest_is_sent_again() {
    let bench = Bench::new(Dialect::OpenAi, slow()).await;
    bench.input(40, |_| None);
    let (code, said) = bench.interrupted(&["--cancel-on-exit"], 4).await;
    assert_eq!(code, 130, "{said}");
    assert!(said.contains("4 batches at the provider will be cancelled: batch batch_"), "{said}");
    assert!(said.contains("4 batches cancelled; what was done by then is billed: batch batch_"), "{said}");
    assert!(bench.states().iter().all(|state| matches!(state, BatchState::Cancelling | BatchState::Cancelled)));
    assert_eq!(bench.report("out")["batches"]["cancelled"].as_array().unwrap().len(), 4);
    let (code, said) = bench.interrupted(&["--cancel-on-exit"], 4).await;
    assert_eq!((code, bench.states().len()), (130, 8), "each row was cancelled, and went into a new one: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_leaves_batches_running_and_says_so() {
    let bench = Bench::new(Dialect::Anthropic, slow()).await;
    bench.input(20, |_| None);
    let (code, said) = bench.batched("out", &["--batch-rows", "10", "--deadline", "2s", "--quiet"]).await;
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("2 batches left running, and billed: batch msgbatch_"), "{said}");
    assert!(bench.lines("out").values().all(|line| line["outcome"] == "deadline"));
    assert_eq!(bench.states(), [BatchState::Open; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_how_many_go_at_once_and_what_they_cost_at_most_and_sends_nothing() {
    let bench = Bench::new(Dialect::Anthropic, quick()).await;
    bench.input(30, |_| None);
    let (code, direct) = told(bench.run("out", &["--dry-run"]).output().await.unwrap());
    assert_eq!(code, 0, "{direct}");
    let (code, said) = bench.batched("out", &["--dry-run", "--batch-rows", "10", "--batch-in-flight", "2"]).await;
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("in batches of at most 10, 2 at once an org, so 40 ids at once"), "{said}");
    assert!(said.contains("(half of list prices"), "{said}");
    assert!(!bench.path("out.jsonl.journal").exists());
    assert_eq!((bench.server.truth().calls(), bench.states().len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_command_line_is_refused_by_the_names_of_its_arguments() {
    let bench = Bench::new(Dialect::Anthropic, quick()).await;
    bench.input(3, |_| None);
    for (args, problem) in [
        (&["--route", "batch", "--no-journal"][..], "--no-journal and --route batch or auto: "),
        (&["--batch-rows", "10"], "--batch-rows needs --route batch or auto"),
        (&["--route", "direct", "--cancel-on-exit"], "--cancel-on-exit needs --route batch"),
        (&["--route", "batch", "--batch-rows", "200000"], "--batch-rows: "),
        (&["--route", "batch", "--batch-poll", "0.5"], "--batch-poll: "),
        (&["--route", "batch", "--output", "-"], "--journal FILE"),
        (&["--route", "batch", "--objective", "cost"], "--objective needs --route auto"),
    ] {
        // A later output counts.
        let args = if args.contains(&"--output") { args.to_vec() } else { [&["--output", "out.jsonl"], args].concat() };
        let mut command = command(&[&["--input", "in.jsonl", "--orgs", "orgs.toml"], &args[..]].concat());
        let (code, said) = told(command.current_dir(bench.dir.path()).stdout(Stdio::null()).output().await.unwrap());
        assert!(code == 2 && said.contains(problem), "{args:?}: {code}: {said}");
        assert!(!bench.path("out.jsonl").exists(), "{args:?}");
    }
    assert_eq!(bench.server.truth().calls(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_the_route_then_what_stands_in_a_batch_is_answered_by_it() {
    for route in ["direct", "auto"] {
        let bench = Bench::new(Dialect::OpenAi, BatchConfig::new().delay(Latency::new(5_000.0, 0.0))).await;
        bench.input(20, |_| None);
        let (code, said) = bench.interrupted(&[], 2).await;
        assert_eq!(code, 130, "{said}");
        // It is not told how often it asks about batches.
        while bench.states() != [BatchState::Completed; 2] {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        // Ten more, which are in no batch.
        bench.input(30, |_| None);
        let (code, said) = told(bench.run("out", &["--route", route]).output().await.unwrap());
        assert_eq!((code, bench.states().len()), (0, 2), "{said}");
        let lines = bench.lines("out");
        let out_of_batches = lines.values().filter(|line| line["batch"].is_string()).count();
        assert_eq!((lines.len(), out_of_batches), (30, 20), "{said}");
        let truth = bench.server.truth();
        assert_eq!((truth.answered_once, truth.answered_more), (30, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_planner_decides_by_what_is_not_answered_yet() {
    let bench = Bench::new(Dialect::Anthropic, quick()).await;
    let auto = ["--route", "auto", "--objective", "cost", "--dry-run"];
    bench.input(300, |_| None);
    let (code, said) = told(bench.run("out", &auto).output().await.unwrap());
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("route: claude-sonnet-4-5: N=300 | route=batch | objective=cost | binds="), "{said}");
    let quick = ["--route", "auto", "--objective", "latency", "--dry-run"];
    let (_, said) = told(bench.run("out", &quick).output().await.unwrap());
    assert!(said.contains("N=300 | route=direct | objective=latency"), "{said}");
    bench.input(250, |_| None);
    let (code, said) = told(bench.run("out", &[]).output().await.unwrap());
    assert_eq!(code, 0, "{said}");
    bench.input(300, |_| None);
    let (code, said) = told(bench.run("out", &auto).output().await.unwrap());
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("route: claude-sonnet-4-5: N=50 | route=direct | objective=cost"), "{said}");

    // And it goes as it was said.
    let (code, said) = told(bench.run("out", &auto[..4]).output().await.unwrap());
    assert_eq!((code, bench.states().len()), (0, 0), "{said}");
    assert!(said.contains("N=50 | route=direct"), "{said}");
    let more = ["--fresh", "--batch-poll", "1s"];
    let (code, said) = told(bench.run("out", &[&auto[..4], &more[..]].concat()).output().await.unwrap());
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("N=300 | route=batch"), "{said}");
    assert_eq!(bench.report("out")["batches"]["rows"], json!({ "direct": 0, "batch": 300 }));
}
