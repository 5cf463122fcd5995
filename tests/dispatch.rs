//! The example program `dispatch` as a whole: the built binary, against the simulated provider over real HTTP.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{ExitStatus, Output, Stdio},
    time::SystemTime,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
};
use tower_quota::sim::{Config, Dialect, Latency, OrgConfig, Server, Sim};

use self::program::{command, program};

// Parts of the program by themselves, since they cannot be reached from outside.
#[path = "../examples/dispatch/claim.rs"]
#[allow(dead_code)]
mod claim;
#[path = "../examples/dispatch/descriptors.rs"]
#[allow(dead_code)]
mod descriptors;
#[path = "../examples/dispatch/ending.rs"]
mod ending;
#[path = "../examples/dispatch/fingerprint.rs"]
mod fingerprint;
#[path = "../examples/dispatch/forecast.rs"]
#[allow(dead_code)]
mod forecast;
#[path = "../examples/dispatch/input/mod.rs"]
#[allow(dead_code)]
mod input;
#[path = "../examples/dispatch/pace.rs"]
#[allow(dead_code)]
mod pace;
#[path = "../examples/dispatch/prices.rs"]
#[allow(dead_code)]
mod prices;
#[path = "../examples/dispatch/resume/mod.rs"]
#[allow(dead_code)]
mod resume;
#[path = "../examples/dispatch/samples.rs"]
mod samples;
#[path = "../examples/dispatch/whole.rs"]
mod whole;
#[path = "../examples/dispatch/words.rs"]
#[allow(dead_code)]
mod words;

#[path = "support/program.rs"]
mod program;

/// What a run takes, however long it is.
#[cfg(target_os = "linux")]
#[path = "dispatch/memory.rs"]
mod memory;
/// Runs that are ended and started again.
#[path = "dispatch/resuming.rs"]
mod resuming;

/// What is said before, during and after a run.
#[path = "dispatch/report.rs"]
mod report;

const KEYS: [&str; 2] = ["sk-key-of-the-first", "sk-key-of-the-second"];

/// A provider, and files around it.
struct Bench {
    dir: TempDir,
    server: Server,
    dialect: Dialect,
}

fn org(number: usize) -> OrgConfig {
    OrgConfig::new(["first", "second"][number], KEYS[number])
}

impl Bench {
    async fn new(dialect: Dialect, orgs: impl IntoIterator<Item = OrgConfig>) -> Self {
        let mut config = Config::new(dialect).latency(Latency::new(5.0, 0.0));
        for org in orgs {
            config = config.org(org);
        }
        let names: Vec<String> = config.orgs.iter().map(|org| org.name.clone()).collect();
        let server = Sim::new(config).unwrap().serve().await.unwrap();
        let bench = Bench { dir: tempfile::tempdir().unwrap(), server, dialect };
        let dialect = if dialect == Dialect::Anthropic { "anthropic" } else { "openai" };
        let mut toml = format!("dialect = \"{dialect}\"\nbase_url = \"{}\"\n", bench.server.base_url());
        for (name, key) in names.iter().zip(KEYS) {
            toml.push_str(&format!("[[org]]\nname = \"{name}\"\nkey = \"{key}\"\n"));
        }
        std::fs::write(bench.path("orgs.toml"), toml).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Good lines for so many ids.
    fn lines(&self, ids: std::ops::Range<usize>) -> String {
        ids.map(|id| {
            let body = json!({ "model": "claude-sonnet-4-5", "max_tokens": 8, "messages": [], "n": id });
            let line = match self.dialect {
                Dialect::Anthropic => json!({ "custom_id": format!("id-{id}"), "params": body }),
                _ => json!({ "custom_id": format!("id-{id}"), "method": "POST", "url": "/v1/chat/completions", "body": body }),
            };
            format!("{line}\n")
        })
        .collect()
    }

    fn input(&self, text: &str) -> &Self {
        std::fs::write(self.path("in.jsonl"), text).unwrap();
        self
    }

    /// The program, reading `in.jsonl`, writing `out.jsonl` and `report.json`.
    fn files(&self, more: &[&str]) -> Command {
        let mut args = vec!["--input", "in.jsonl", "--output", "out.jsonl"];
        args.extend(["--orgs", "orgs.toml", "--report", "report.json"]);
        args.extend(more);
        let mut command = command(&args);
        command.current_dir(self.dir.path());
        command
    }

    /// The same through standard input and output.
    fn pipes(&self, more: &[&str]) -> Child {
        let mut args = vec!["--input", "-", "--output", "-"];
        args.extend(["--orgs", "orgs.toml", "--report", "report.json"]);
        args.extend(more);
        let mut command = command(&args);
        command.current_dir(self.dir.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn report(&self) -> Value {
        let report: Value = serde_json::from_str(&self.text("report.json")).unwrap();
        let n = |field: &str| report[field].as_u64().unwrap();
        assert_eq!(n("ok") + n("terminal") + n("redrivable") + n("missing"), n("expected"), "{report}");
        assert_eq!(n("ok") + n("rate_limited") + n("failed") + n("missing"), n("expected"), "{report}");
        report
    }

    fn answers(&self) -> BTreeMap<String, Value> {
        answers(&self.text("out.jsonl"))
    }
}

/// The lines by id; every id once.
fn answers(text: &str) -> BTreeMap<String, Value> {
    let mut answers = BTreeMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let id = line["custom_id"].as_str().unwrap().to_owned();
        assert!(answers.insert(id.clone(), line).is_none(), "{id} has two lines");
    }
    answers
}

fn outcomes(answers: &BTreeMap<String, Value>) -> BTreeMap<&str, usize> {
    let mut outcomes = BTreeMap::new();
    for answer in answers.values() {
        *outcomes.entry(answer["outcome"].as_str().unwrap()).or_default() += 1;
    }
    outcomes
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn code(output: &Output) -> i32 {
    let code = output.status.code();
    code.unwrap_or_else(|| panic!("{:?}: {}", output.status, said(output)))
}

fn interrupt(child: &Child) {
    let id = child.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

async fn until(what: impl Fn() -> bool) {
    while !what() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn good_input_in_either_dialect_gives_one_ok_line_per_id() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let bench =
            Bench::new(dialect, [org(0).requests_per_minute(60_000.0), org(1).requests_per_minute(60_000.0)]).await;
        let output = bench.input(&bench.lines(0..300)).files(&[]).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert!(output.stdout.is_empty(), "data goes to the file alone");

        let answers = bench.answers();
        assert_eq!(answers.len(), 300);
        for answer in answers.values() {
            assert_eq!(answer["outcome"], "ok");
            assert_eq!((&answer["status"], &answer["attempts"]), (&json!(200), &json!(1)));
            assert!(["first", "second"].contains(&answer["org"].as_str().unwrap()));
            let said = if dialect == Dialect::Anthropic {
                &answer["response"]["content"]
            } else {
                &answer["response"]["choices"]
            };
            assert!(said.is_array(), "{answer}");
            assert!(answer.get("error").is_none());
        }
        let report = bench.report();
        assert_eq!((&report["ok"], &report["missing"], &report["wire_calls"]), (&json!(300), &json!(0), &json!(300)));
        let by_org: u64 = report["orgs"].as_array().unwrap().iter().map(|org| org["ok"].as_u64().unwrap()).sum();
        assert_eq!(by_org, 300);
        assert_eq!(bench.server.truth().ok(), 300);
        assert_eq!(bench.server.truth().answered_once, 300, "every body went out as it was, once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pipes_carry_answers_while_the_input_is_still_open() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let mut child = bench.pipes(&[]);
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap()).lines();
    for id in 0..3 {
        stdin.write_all(bench.lines(id..id + 1).as_bytes()).await.unwrap();
        let line = stdout.next_line().await.unwrap().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["custom_id"], format!("id-{id}"));
    }
    drop(stdin);
    assert_eq!(stdout.next_line().await.unwrap(), None);
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
    assert_eq!(bench.report()["expected"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_is_refused_makes_the_exit_code_one_and_is_counted() {
    let bench = Bench::new(Dialect::OpenAi, [org(0)]).await;
    let wrong = r#"{"custom_id":"wrong","method":"POST","url":"/v1/nowhere","body":{"model":"m"}}"#;
    let output = bench.input(&format!("{}{wrong}\n", bench.lines(0..9))).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 1);
    assert!(said(&output).contains("9 of 10 ok, 1 terminal, 0 missing"), "{}", said(&output));
    let answers = bench.answers();
    let wrong = &answers["wrong"];
    assert_eq!((&wrong["outcome"], &wrong["status"], &wrong["attempts"]), (&json!("terminal"), &json!(404), &json!(1)));
    assert!(wrong["error"].as_str().unwrap().contains("404"), "{wrong}");
    assert_eq!(outcomes(&answers), BTreeMap::from([("ok", 9), ("terminal", 1)]));
}

/// Runs over an input that is bad, and gives back what is said.
async fn refused(text: &str) -> String {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let output = bench.input(text).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 2, "{}", said(&output));
    assert_eq!(bench.server.truth().calls(), 0, "all of a file is checked before anything is sent");
    assert!(!bench.path("out.jsonl").exists() && !bench.path("report.json").exists());
    said(&output)
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_named_with_file_line_and_column() {
    let good = r#"{"custom_id":"a","params":{}}"#;
    for (bad, place, why) in [
        (r#"{"custom_id":"b","params":{},}"#, 30, "not valid JSON: trailing comma, but here stands `}`"),
        (r#"{"custom_id":"b","params":tru,"more":"é and more"}"#, 30, "here stands `,\"more\":\"é and m…`"),
        (r#"{"custom_id":"b""#, 16, "it ends too early (EOF"),
        ("[]", 1, "JSON object"),
        (r#"{"params":{}}"#, 1, "`custom_id` is missing"),
        (r#"{"custom_id":7,"params":{}}"#, 14, "must be a string"),
        (r#"{"custom_id":"","params":{}}"#, 14, "empty"),
        (r#"{"custom_id":"b"}"#, 1, "neither"),
        (r#"{"custom_id":"b","params":[]}"#, 27, "JSON object"),
        (r#"{"custom_id":"b","params":{"model":1}}"#, 36, "`model` must be a string"),
        (r#"{"custom_id":"b","params":{"stream":true}}"#, 37, "`stream`"),
        (r#"{"custom_id":"é","params":{"stream":true}}"#, 37, "`stream`"),
        (r#"{"custom_id":"b","params":{"stream":1}}"#, 37, "`stream` must be a boolean"),
        (r#"{"custom_id":"b","params":{},"body":{}}"#, 37, "both"),
        (r#"{"custom_id":"b","method":"POST","url":"/v1/x","body":{}}"#, 55, "OpenAi's form"),
        (r#"{"custom_id":"a","params":{"model":"m"}}"#, 14, "line 1 already"),
    ] {
        // A blank line and a carriage return count for nothing but the line's number.
        let said = refused(&format!("{good}\r\n  \n{bad}\n{good}")).await.to_lowercase();
        let expected = format!("in.jsonl: line 3, column {place}: ");
        assert!(said.contains(&expected) && said.contains(&why.to_lowercase()), "{bad}\n{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_lines_must_be_posts_to_a_path() {
    let bench = Bench::new(Dialect::OpenAi, [org(0)]).await;
    for (line, place) in [
        (r#"{"custom_id":"a","method":"GET","url":"/v1/x","body":{}}"#, 27),
        (r#"{"custom_id":"a","url":"/v1/x","body":{}}"#, 1),
        (r#"{"custom_id":"a","method":"POST","url":"https://elsewhere.example/","body":{}}"#, 40),
        (r#"{"custom_id":"a","method":"POST","url":"/a b","body":{}}"#, 40),
        (r#"{"custom_id":"a","params":{}}"#, 27),
    ] {
        let output = bench.input(line).files(&[]).output().await.unwrap();
        assert_eq!(code(&output), 2);
        assert!(said(&output).contains(&format!("line 1, column {place}: ")), "{line}\n{}", said(&output));
    }
    assert_eq!(bench.server.truth().calls(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_line_of_a_stream_ends_the_run_after_what_was_read_is_answered() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    for (bad, place) in [("{\"custom_id\":x}", 14), ("{\"custom_id\":\"id-2\",\"params\":{}}", 14)] {
        let mut child = bench.pipes(&[]);
        let text = format!("{}{bad}\n{}", bench.lines(0..5), bench.lines(6..9));
        child.stdin.take().unwrap().write_all(text.as_bytes()).await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        assert_eq!(code(&output), 2);
        assert!(said(&output).contains(&format!("standard input: line 6, column {place}: ")), "{}", said(&output));
        let answers = answers(&String::from_utf8(output.stdout).unwrap());
        assert_eq!(outcomes(&answers), BTreeMap::from([("ok", 5)]));
        assert_eq!((&bench.report()["expected"], &bench.report()["ended_by"]), (&json!(5), &json!("input")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_input_is_done_at_once() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    for text in ["", "\n \r\n", "\u{feff}"] {
        let output = bench.input(text).files(&[]).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert_eq!(bench.text("out.jsonl"), "");
        assert_eq!(bench.report()["expected"], 0);
        let without_orgs = command(&["--input", "-", "--quiet"]).output().await.unwrap();
        assert_eq!((code(&without_orgs), without_orgs.stdout.len()), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_command_line_is_exit_code_two_and_says_what() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    bench.input(&bench.lines(0..1));
    std::fs::write(bench.path("bad.toml"), format!("[[org]]\nname = \"x\"\nkey = \"{}\"\ncap = 0\n", KEYS[0])).unwrap();
    for (args, why) in [
        (&["--input", "in.jsonl", "--orgs", "none.toml"][..], "none.toml"),
        (&["--input", "none.jsonl", "--orgs", "orgs.toml"], "none.jsonl"),
        (&["--input", "in.jsonl", "--orgs", "bad.toml"], "cap"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--single-org", "third"], "first"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--dialect", "openai"], "anthropic"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--cap", "0"], "--cap"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--timeout", "soon"], "--timeout"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--deadline", "0"], "--deadline"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--base-url", "ftp://x"], "--base-url"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--output", "in.jsonl"], "--output"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--output", "none/out.jsonl"], "none/out.jsonl"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--output", "x", "--report", "x"], "--report"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--grace", "1e300"], "--grace"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--grace", "999999999d"], "ten years"),
        (&["--input", "in.jsonl"], "ANTHROPIC_API_KEY"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--report", "none/report.json"], "none/report.json"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--dry-run", "--output", "none/out.jsonl"], "none/out.jsonl"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--headroom-file", "orgs.toml"], "--headroom-file"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--headroom-file", "none/h.json"], "none/h.json"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--headroom-file", "."], "--headroom-file"),
        (&["--status", "--input", "in.jsonl"], "--input"),
        (&["--json"], "--status"),
        (&["--orgs", "orgs.toml"], "--input"),
        (&["--template", "t.json"], "--input"),
        (&["--input", "in.jsonl", "--form", "text"], "--template"),
        (&["--input", "in.jsonl", "--path", "v1/x"], "--path"),
        (&["--input", "in.jsonl", "--orgs", "orgs.toml", "--template", "none.json"], "--template none.json"),
        (
            &["--input", "in.jsonl", "--orgs", "orgs.toml", "--template", "bad.toml"],
            "--template bad.toml: line 1, column 1",
        ),
        (&["--orgs", "orgs.toml", "--demo-requests", "5"], "--demo-requests"),
        (&["--base-url", "http://x.test", "--demo-requests", "5"], "--demo-requests"),
        (&["--nonsense"], "--nonsense"),
    ] {
        let output = command(args).current_dir(bench.dir.path()).output().await.unwrap();
        assert_eq!(code(&output), 2, "{args:?}: {}", said(&output));
        assert!(said(&output).contains(why), "{args:?}: {}", said(&output));
        assert!(!said(&output).contains(KEYS[0]));
    }
    assert_eq!(bench.server.truth().calls(), 0);
    assert_eq!(bench.text("in.jsonl"), bench.lines(0..1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_sends_and_writes_nothing() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let output = bench.input(&bench.lines(0..7)).files(&["--dry-run"]).output().await.unwrap();
    assert_eq!(code(&output), 0);
    assert!(said(&output).contains("7 requests are good; nothing was sent"), "{}", said(&output));
    assert!(!bench.path("out.jsonl").exists());
    assert_eq!(bench.server.truth().calls(), 0);
    let output = bench.input("").files(&["--dry-run"]).output().await.unwrap();
    assert_eq!((code(&output), said(&output).trim_end()), (0, "the input is empty; nothing was sent"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_single_org_takes_everything_and_keys_come_from_the_environment() {
    let bench = Bench::new(Dialect::Anthropic, [org(0), org(1)]).await;
    bench.input(&bench.lines(0..20));
    let args = ["--input", "in.jsonl", "--output", "out.jsonl", "--single-org", "batch", "--cap", "2", "--quiet"];
    let mut command = command(&args);
    command.env("ANTHROPIC_API_KEY", KEYS[0]).env("ANTHROPIC_BATCH_KEY", KEYS[1]);
    command.env("ANTHROPIC_BASE_URL", bench.server.base_url().to_string()).env("TOWER_QUOTA_CAP_SONNET", "9");
    let output = command.current_dir(bench.dir.path()).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!(said(&output).lines().count(), 1, "quiet is one line: {}", said(&output));
    let truth = bench.server.truth();
    assert_eq!((truth.org("first").unwrap().calls, truth.org("second").unwrap().calls), (0, 20));
    assert!(truth.org("second").unwrap().peak_in_flight <= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_org_with_a_refused_key_leaves_its_share_to_its_sibling() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).unauthorised(true), org(1)]).await;
    let output = bench.input(&bench.lines(0..50)).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert!(bench.answers().values().all(|answer| answer["org"] == "second"));
    let report = bench.report();
    let first = &report["orgs"][0];
    assert_eq!((&first["wire_calls"], &first["ok"]), (&json!(1), &json!(0)), "it is asked once");
    assert!(first["out"].as_str().unwrap().contains("key"), "{first}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_key_of_one_organisation_is_shown_as_a_spare() {
    let of = |i| org(i).organization_id("acme");
    let bench = Bench::new(Dialect::Anthropic, [of(0), of(1)]).await;
    let output = bench.input(&bench.lines(0..50)).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 50)]));
    let report = bench.report();
    // Which of the two answers first is chance.
    let spare = usize::from(report["orgs"][0]["spare_of"].is_null());
    let (spare, serves) = (&report["orgs"][spare], &report["orgs"][1 - spare]);
    assert_eq!((&spare["spare_of"], &serves["spare_of"]), (&serves["name"], &json!(null)), "{report}");
    assert!(spare["ok"].as_u64() <= Some(2), "it has served until it was known: {spare}");
    let serves = serves["name"].as_str().unwrap();
    assert!(said(&output).contains(&format!("spare of {serves}: the same organisation")), "{}", said(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_no_org_left_every_id_fails_at_once() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).unauthorised(true), org(1).unauthorised(true)]).await;
    let output = bench.input(&bench.lines(0..50)).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("no_org", 50)]));
    assert!(bench.server.truth().calls() <= 4);
    assert_eq!((&bench.report()["failed"], &bench.report()["missing"]), (&json!(50), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_org_that_refuses_everything_costs_few_calls_and_no_id() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).black_hole(true), org(1)]).await;
    let output = bench.input(&bench.lines(0..100)).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 100)]));
    let report = bench.report();
    let refused = bench.server.truth().throttled_429();
    assert_eq!(report["http_429"], refused, "counted as the provider counts");
    assert!((1..=5).contains(&refused), "{refused} calls to an org that refuses all");
    assert!(bench.answers().values().any(|answer| answer["attempts"] == 2), "who met it was sent twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_refused_for_longer_than_its_patience_is_rate_limited() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).black_hole(true).black_hole_wait_s(0.2)]).await;
    let output = bench.input(&bench.lines(0..3)).files(&["--patience", "1"]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("rate_limited", 3)]));
    assert_eq!(bench.report()["rate_limited"], 3);
    let answers = bench.answers();
    assert!(answers.values().any(|answer| answer["status"] == 429));
    // Some have only waited for their turn.
    assert!(answers.values().all(|answer| answer["status"] == 429 || answer["status"].is_null()));
    assert!(answers.values().all(|answer| answer["error"].is_string()));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_tried_as_often_as_is_said() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).overloaded(true)]).await;
    let output = bench.input(&bench.lines(0..2)).files(&["--max-attempts", "2"]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    for answer in bench.answers().values() {
        assert_eq!((&answer["outcome"], &answer["attempts"]), (&json!("transient"), &json!(2)), "{answer}");
    }
    assert_eq!((bench.server.truth().calls(), &bench.report()["wire_calls"]), (4, &json!(4)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_hangs_is_ended_by_its_timeout() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    let more = ["--max-attempts", "1", "--timeout", "300ms"];
    let output = bench.input(&bench.lines(0..1)).files(&more).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let answer = &bench.answers()["id-0"];
    assert_eq!((&answer["outcome"], &answer["status"]), (&json!("transient"), &Value::Null), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_deadline_every_id_of_a_file_has_its_line() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    let output = bench.input(&bench.lines(0..1_000)).files(&["--deadline", "500ms"]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let answers = bench.answers();
    assert_eq!(outcomes(&answers), BTreeMap::from([("deadline", 1_000)]));
    assert!(
        answers.values().any(|answer| answer["attempts"] == 1)
            && answers.values().any(|answer| answer["attempts"] == 0)
    );
    assert_eq!((&bench.report()["missing"], &bench.report()["ended_by"]), (&json!(0), &json!("deadline")));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_first_ctrl_c_calls_in_flight_end_and_nothing_more_is_sent() {
    // Two calls at once, and a quota that lets few through: most of what is alive waits.
    let slow = org(0).requests_per_minute(600.0).latency(Latency::new(300.0, 0.0));
    let bench = Bench::new(Dialect::Anthropic, [slow]).await;
    bench.input(&bench.lines(0..2_000));
    let child = bench.files(&["--cap", "2", "--grace", "1h"]).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.server.truth().orgs[0].in_flight == 2).await;
    interrupt(&child);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 130, "{}", said(&output));
    let (truth, answers) = (bench.server.truth(), bench.answers());
    assert_eq!(answers.len(), 2_000);
    let outcomes = outcomes(&answers);
    assert_eq!(outcomes.keys().copied().collect::<Vec<_>>(), ["cancelled", "ok"]);
    assert_eq!(outcomes["ok"] as u64, truth.ok(), "nothing that was answered is lost");
    assert_eq!(truth.calls(), truth.ok(), "nothing that was sent is given up");
    assert!(truth.calls() <= 5, "{} calls: one alone, then two at once, and then the stop", truth.calls());
    assert_eq!((&bench.report()["missing"], &bench.report()["ended_by"]), (&json!(0), &json!("ctrl-c")));
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_on_a_stream_ends_with_the_ids_that_were_read() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let mut child = bench.pipes(&[]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(bench.lines(0..5).as_bytes()).await.unwrap();
    let server = &bench.server;
    until(|| server.truth().ok() == 5).await;
    interrupt(&child);
    // Standard input stays open: nobody waits for its end.
    let output = child.wait_with_output().await.unwrap();
    drop(stdin);
    assert_eq!(code(&output), 130, "{}", said(&output));
    assert_eq!(answers(&String::from_utf8(output.stdout).unwrap()).len(), 5);
    assert_eq!((&bench.report()["expected"], &bench.report()["missing"]), (&json!(5), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_outlast_the_grace_are_given_up() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    bench.input(&bench.lines(0..10));
    let child = bench.files(&["--grace", "200ms"]).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.server.truth().calls() > 0).await;
    interrupt(&child);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 130, "{}", said(&output));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("cancelled", 10)]));
    assert_eq!(bench.report()["missing"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_ctrl_c_ends_at_once() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    bench.input(&bench.lines(0..10));
    let mut child = bench.files(&["--grace", "1h"]).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.server.truth().calls() > 0).await;
    interrupt(&child);
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    while !stderr.next_line().await.unwrap().unwrap().starts_with("stopping") {}
    interrupt(&child);
    let status: ExitStatus = child.wait().await.unwrap();
    assert_eq!(status.code(), Some(130));
    assert!(!bench.path("report.json").exists(), "the grace was not waited for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_goes_away_ends_the_run_without_a_panic() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).requests_per_minute(60_000.0)]).await;
    bench.input(&bench.lines(0..5_000));
    let mut command = command(&["--input", "in.jsonl", "--orgs", "orgs.toml", "--report", "report.json"]);
    let mut child =
        command.current_dir(bench.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).await.unwrap();
    drop(stdout);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 1, "not every id has reached anybody: {}", said(&output));
    assert!(
        said(&output).contains("nobody reads the output") && !said(&output).contains("panicked"),
        "{}",
        said(&output)
    );
    assert!(bench.report()["missing"].as_u64().unwrap() > 0);
    assert!(bench.server.truth().calls() < 5_000, "and nothing more is sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_standard_error_is_no_reason_to_stop() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let mut child = bench.input(&bench.lines(0..20)).files(&[]).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().await.unwrap().code(), Some(0));
    assert_eq!(bench.answers().len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_earlier_output_is_kept_where_a_run_begins_anew() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    std::fs::write(bench.path("out.jsonl"), "dear\n").unwrap();
    let output = bench.input(&bench.lines(0..1)).files(&["--fresh"]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!((bench.answers().len(), bench.text("out.jsonl.old").as_str()), (1, "dear\n"));
    // Nor is what was kept written over.
    std::fs::write(bench.path("out.jsonl"), "dearer\n").unwrap();
    for _ in 0..2 {
        assert_eq!(code(&bench.files(&["--fresh"]).output().await.unwrap()), 0);
    }
    assert_eq!(bench.text("out.jsonl.old"), "dear\n");
    assert_eq!(bench.text("out.jsonl.old.2"), "dearer\n");
    assert_eq!(bench.text("out.jsonl.old.3").lines().count(), 1);
}

/// A provider that gives these answers in turn, whatever it is asked; an empty one is a connection cut off.
async fn scripted(answers: Vec<(u16, String)>) -> String {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        for (status, body) in answers {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            // The body of every request here ends with the line's own.
            while !asked.ends_with(b"}") {
                assert_ne!(stream.read_buf(&mut asked).await.unwrap(), 0);
            }
            if !body.is_empty() {
                let head = format!("HTTP/1.1 {status} -\r\nconnection: close\r\ncontent-type: application/json\r\n");
                let answer = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        }
    });
    base_url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_goes_nowhere_but_onto_the_wire() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let key = KEYS[0];
    let refusal = format!("{{\r\n \"error\": {{\"type\": \"strange\",\n \"message\": \"you are {key}\"}} }}\n");
    let base_url = scripted(vec![(200, format!("{{\"content\": [\"{key}\"]}}")), (400, refusal)]).await;
    let mut command = bench.input(&bench.lines(0..2)).files(&["--base-url", &base_url, "--cap", "1"]);
    let output = command.env("RUST_LOG", "trace").output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let answers = bench.answers();
    assert_eq!(answers["id-0"]["response"]["content"][0], "***");
    assert_eq!(answers["id-1"]["response"]["error"]["message"], "you are ***");
    assert!(answers["id-1"]["error"].as_str().unwrap().contains("you are ***"));
    for text in [said(&output), bench.text("out.jsonl"), bench.text("report.json")] {
        assert!(!text.contains(key), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_is_that_of_the_last_call() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let base_url = scripted(vec![(500, "{}".into()), (0, String::new())]).await;
    let more = ["--base-url", &base_url, "--max-attempts", "2"];
    let output = bench.input(&bench.lines(0..1)).files(&more).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let answer = &bench.answers()["id-0"];
    assert_eq!((&answer["attempts"], &answer["status"]), (&json!(2), &Value::Null), "{answer}");
}

/// A headroom file with a row as many seconds old.
fn headroom_file(org: &str, age: u64) -> String {
    let observed_at = SystemTime::now() - std::time::Duration::from_secs(age);
    let row = json!({
        "org": org, "api": "anthropic", "family": "sonnet", "resource": "input_tokens", "limit_per_minute": 1000,
        "capacity": 800, "remaining": 200, "writer_pid": 1,
        "observed_at": humantime::format_rfc3339_millis(observed_at).to_string(),
    });
    format!("{}", json!({ "format": "tower-quota headroom", "version": 1, "rows": [row] }))
}

/// What `--status` says, with the exit code, standard output and standard error.
async fn status(bench: &Bench, more: &[&str]) -> (i32, String, String) {
    let args: Vec<_> = ["--status", "--headroom-file", "h.json"].iter().chain(more).copied().collect();
    let output = command(&args).current_dir(bench.dir.path()).output().await.unwrap();
    (code(&output), String::from_utf8(output.stdout.clone()).unwrap(), said(&output))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_a_missing_file_is_a_note() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let (code, out, said) = status(&bench, &[]).await;
    assert_eq!((code, out.as_str()), (0, ""));
    assert!(said.contains("h.json: there is no headroom file"), "{said}");
    let (code, out, said) = status(&bench, &["--json"]).await;
    assert_eq!((code, serde_json::from_str::<Value>(&out).unwrap()), (0, json!({ "file": "h.json", "rows": [] })));
    assert!(said.contains("there is no headroom file"), "{said}");
    let nowhere = command(&["--status"]).output().await.unwrap();
    assert_eq!((self::code(&nowhere), nowhere.stdout.len()), (0, 0));
    assert!(self::said(&nowhere).contains("TOWER_QUOTA_HEADROOM_FILE"), "{}", self::said(&nowhere));
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_tell_their_neighbours_what_is_left() {
    let bench = Bench::new(Dialect::Anthropic, [org(0), org(1)].map(|org| org.requests_per_minute(600.0))).await;
    let run = async |org: &str, more: &[&str]| {
        let mut command = bench.input(&bench.lines(0..5)).files(&["--single-org", org, "--fresh"]);
        let output = command.args(more).env("TOWER_QUOTA_HEADROOM_FILE", "h.json").output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
    };
    run("first", &["--dry-run"]).await;
    assert!(!bench.path("h.json").exists());
    run("first", &[]).await;
    run("second", &["--headroom-file", "other.json"]).await;
    assert_eq!(bench.text("h.json").matches("\"org\":").count(), 1, "the command line goes before the environment");
    run("second", &[]).await;
    let (code, out, said) = status(&bench, &["--json"]).await;
    assert_eq!((code, said.as_str()), (0, ""));
    let rows = serde_json::from_str::<Value>(&out).unwrap()["rows"].clone();
    for (row, org) in rows.as_array().unwrap().iter().zip(["first", "second"]) {
        assert_eq!((&row["org"], &row["api"], &row["family"]), (&json!(org), &json!("anthropic"), &json!("sonnet")));
        assert_eq!((&row["resource"], &row["state"]), (&json!("requests"), &json!("fresh")), "{row}");
        assert!((0.0..1.0).contains(&row["left"].as_f64().unwrap()), "{row}");
        assert!(row["remaining"].as_f64() < row["capacity"].as_f64(), "{row}");
        assert!(row["age_s"].as_u64().unwrap() < 60, "{row}");
    }
    assert_eq!(rows.as_array().unwrap().len(), 2, "each keeps what the other wrote");
    assert!(KEYS.iter().all(|key| !bench.text("h.json").contains(key)));
    let names = std::fs::read_dir(bench.dir.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
    let names: Vec<_> = names.filter(|name| name.starts_with("h.json")).collect();
    assert_eq!(names, ["h.json"], "nothing is left lying about");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_is_a_table_that_tells_how_old_it_is() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    for (age, state) in [(2, "fresh"), (70, "stale"), (3590, "stale"), (3600, "very stale")] {
        std::fs::write(bench.path("h.json"), headroom_file("größe\u{1b}[2J", age)).unwrap();
        let (code, out, said) = status(&bench, &[]).await;
        assert_eq!((code, said.as_str()), (0, ""));
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines.len(), 2, "{out}");
        assert!(lines[0].starts_with("org") && lines[0].contains("remaining"), "{out}");
        let words: Vec<_> = lines[1].split_whitespace().collect();
        let age = words[10..].join(" ");
        assert!(["s", "m", "h"].iter().any(|unit| age.ends_with(&format!("{unit} {state}"))), "{age}");
        assert_eq!(words[1..9], ["anthropic", "sonnet", "input", "tokens", "200", "800", "25", "%"], "{out}");
        assert_eq!(words[0], "größe\u{fffd}[2J", "a name does nothing to the terminal");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_status_of_a_file_that_cannot_be_read_is_exit_code_one() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let good = headroom_file("a", 1);
    for (text, why) in [
        ("", "line 1 column 0"),
        (&good[..40], "line 1 column 40"),
        ("[[org]]", "remove this one"),
        (&good.replace("\"version\":1", "\"version\":7"), "version 7"),
    ] {
        std::fs::write(bench.path("h.json"), text).unwrap();
        let (code, out, said) = status(&bench, &["--json"]).await;
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(said.starts_with("error: h.json: ") && said.contains(why), "{said}");
        assert_eq!(bench.text("h.json"), text, "looking changes nothing");
    }
    std::fs::remove_file(bench.path("h.json")).unwrap();
    std::fs::create_dir(bench.path("h.json")).unwrap();
    let (code, _, said) = status(&bench, &[]).await;
    assert!(code == 1 && said.contains("not a regular file"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn neighbours_that_cannot_be_told_are_a_warning() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).requests_per_minute(600.0)]).await;
    for name in ["h.json", "h.json.old"] {
        std::fs::write(bench.path(name), "dear\n").unwrap();
    }
    let output = bench.input(&bench.lines(0..5)).files(&["--headroom-file", "h.json"]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!(said(&output).matches("--headroom-file h.json: it is no headroom file").count(), 1, "{}", said(&output));
    assert_eq!((bench.text("h.json"), bench.text("h.json.old")), ("dear\n".to_owned(), "dear\n".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_says_which_quota_binds_and_how_good_the_estimates_are() {
    // A burst of 40, and 20 a second.
    let tight = org(0).requests_per_minute(1_200.0).input_tokens_per_minute(1e6);
    let bench = Bench::new(Dialect::Anthropic, [tight]).await;
    let output = bench.input(&bench.lines(0..50)).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let sonnet = &bench.report()["orgs"][0]["families"]["sonnet"];
    assert_eq!(sonnet["binds"], "requests", "{sonnet}");
    let of = |name: &str| {
        let quota = sonnet["quota"].as_array().unwrap().iter().find(|quota| quota["resource"] == name);
        quota.unwrap_or_else(|| panic!("{sonnet}")).clone()
    };
    let (requests, input) = (of("requests"), of("input_tokens"));
    assert_eq!((&requests["limit_per_minute"], &input["limit_per_minute"]), (&json!(1_200.0), &json!(1e6)));
    assert!(requests["left"].as_f64() < input["left"].as_f64(), "{sonnet}");
    assert!(input["estimate_to_actual"].as_f64().unwrap() > 0.0, "{sonnet}");
    assert!(requests["said"].is_number() && requests["remaining"].is_number(), "{sonnet}");
    let line = said(&output).lines().find(|line| line.contains("sonnet: ")).unwrap().to_owned();
    assert!(line.contains("requests bind first: ") && line.contains(" left; estimate/actual: input tokens "), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_is_no_plural_and_little_is_no_megabyte() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    for (ids, words) in [(1, "1 request, 64 bytes, from in.jsonl"), (20, "20 requests, 1.3 KB, from in.jsonl")] {
        let output = bench.input(&bench.lines(0..ids)).files(&["--dry-run"]).output().await.unwrap();
        assert!(said(&output).contains(words), "{}", said(&output));
        assert!(ids > 1 || said(&output).contains("1 request is good"), "{}", said(&output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demonstration_answers_everything_near_the_fluid_limit() {
    for dialect in ["anthropic", "openai"] {
        let dir = tempfile::tempdir().unwrap();
        // The buckets hold 440, so the refill is needed too.
        let args = ["--demo-requests", "600", "--dialect", dialect, "--report", "report.json"];
        let output = command(&args).current_dir(dir.path()).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert!(output.stdout.is_empty());
        assert!(said(&output).contains("the fluid limit is 0.73 s"), "{}", said(&output));
        let report: Value = serde_json::from_slice(&std::fs::read(dir.path().join("report.json")).unwrap()).unwrap();
        assert_eq!((&report["ok"], &report["missing"]), (&json!(600), &json!(0)));
        assert!(report["fluid_limit_s"].as_f64().unwrap() > 0.7);
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// The program reading a file of this name.
fn reading(bench: &Bench, name: &str, content: &[u8], more: &[&str]) -> Command {
    std::fs::write(bench.path(name), content).unwrap();
    let mut args = vec!["--input", name, "--output", "out.jsonl", "--orgs", "orgs.toml", "--report", "report.json"];
    args.extend(more);
    let mut command = command(&args);
    command.current_dir(bench.dir.path());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_of_requests_is_sent_like_the_file_in_it() {
    let bench = Bench::new(Dialect::Anthropic, [org(0), org(1)]).await;
    // Two archives, joined.
    let packed = [gzip(&bench.lines(0..200)), gzip(&bench.lines(200..500))].concat();
    let output = reading(&bench, "in.jsonl.gz", &packed, &[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert!(said(&output).contains("500 requests, "), "{}", said(&output));
    assert_eq!((bench.answers().len(), outcomes(&bench.answers())), (500, BTreeMap::from([("ok", 500)])));
    assert_eq!(bench.server.truth().answered_once, 500);

    let mut child = bench.pipes(&[]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&gzip(&bench.lines(0..9))).await.unwrap();
    drop(stdin);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert_eq!(answers(&String::from_utf8(output.stdout).unwrap()).len(), 9);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_is_cut_off_sends_nothing_of_a_file_whatever_is_done_with_bad_lines() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let packed = gzip(&bench.lines(0..500));
    let cut = packed.len() - 9;
    let output = reading(&bench, "in.jsonl.gz", &packed[..cut], &["--on-bad-input", "skip"]).output().await.unwrap();
    assert_eq!(code(&output), 2, "{}", said(&output));
    let why = format!("cannot be read: the gzip archive is cut off: it ends after {cut} bytes");
    assert!(said(&output).contains("in.jsonl.gz: line ") && said(&output).contains(&why), "{}", said(&output));
    assert_eq!(bench.server.truth().calls(), 0);
    assert!(!bench.path("out.jsonl").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_put_into_the_template_and_sent() {
    for (dialect, template) in [
        (
            Dialect::Anthropic,
            r#"{"model":"claude-haiku-4-5","max_tokens":8,"messages":[{"role":"user","content":"{{prompt}}"}]}"#,
        ),
        (Dialect::OpenAi, r#"{"model":"text-embedding-3-small","input":"{{prompt}}"}"#),
    ] {
        let bench = Bench::new(dialect, [org(0)]).await;
        std::fs::write(bench.path("t.json"), template).unwrap();
        let text = "\u{feff}a \"quoted\" \\ prompt\r\n\r\nanother\u{2028}one\r\na \"quoted\" \\ prompt, and more";
        let output = reading(&bench, "in.txt", text.as_bytes(), &["--template", "t.json"]).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert_eq!(bench.answers().keys().collect::<Vec<_>>(), ["line-1", "line-3", "line-4"]);
        assert_eq!(bench.server.truth().answered_once, 3, "three bodies, each its own");

        std::fs::remove_file(bench.path("out.jsonl")).unwrap();
        let lists = "[\"one\", \"two\"]\n[\"three\"]\n";
        let output = reading(&bench, "in.json", lists.as_bytes(), &["--template", "t.json"]).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        assert_eq!(bench.answers().keys().collect::<Vec<_>>(), ["list-1-0", "list-1-1", "list-2-0"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_comes_back_with_the_answer_of_every_outcome() {
    let bench = Bench::new(Dialect::OpenAi, [org(0)]).await;
    let line = |metadata: &str, path: &str| {
        format!("{{\"model\":\"gpt-4o-mini\",\"{path}\":[\"x\"],\"metadata\":{metadata}}}\n")
    };
    let text = [
        line("{\"row\": 1.50}", "messages"),
        line(&format!("{{\"custom_id\":\"mine\",\"key\":\"{}\"}}", KEYS[0]), "input"),
        "{\"model\":\"gpt-4o-mini\",\"messages\":[]}\n".to_owned(),
    ];
    let output = reading(&bench, "in.jsonl", text.concat().as_bytes(), &[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    assert!(bench.text("out.jsonl").contains(r#""metadata":{"row": 1.50}"#), "as it was written");
    let answers = bench.answers();
    assert_eq!(answers["mine"]["metadata"]["key"], "***", "a key stays out of the output");
    assert!(answers["line-3"].get("metadata").is_none());

    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    let more = ["--path", "/v1/nowhere"];
    let output = reading(&bench, "in.jsonl", text.concat().as_bytes(), &more).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let answer = &bench.answers()["line-1"];
    assert_eq!((&answer["outcome"], &answer["metadata"]["row"]), (&json!("terminal"), &json!(1.5)), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_lines_that_are_skipped_are_named_counted_and_make_the_exit_code_one() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let bad = "{\"custom_id\":\"b\"}\n".repeat(12);
    let text = format!("{}{bad}{}", bench.lines(0..5), bench.lines(5..9));
    let skip = ["--on-bad-input", "skip"];
    let output = reading(&bench, "in.jsonl", text.as_bytes(), &skip).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    for line in 6..16 {
        let expected = format!("skipped: in.jsonl: line {line}, column 1: neither");
        assert_eq!(said(&output).matches(&expected).count(), 1, "{}", said(&output));
    }
    assert!(!said(&output).contains("line 16"), "ten are named");
    assert!(said(&output).contains("9 of 9 ok, 0 missing, 12 bad lines skipped"), "{}", said(&output));
    assert_eq!((&bench.report()["bad_input"], &bench.report()["exit_code"]), (&json!(12), &json!(1)));
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 9)]));

    let output = bench.files(&["--on-bad-input", "skip", "--dry-run"]).output().await.unwrap();
    assert_eq!(code(&output), 1);
    assert!(said(&output).contains("9 requests are good, 12 bad lines skipped; nothing was sent"), "{}", said(&output));

    let mut child = bench.pipes(&["--on-bad-input", "skip", "--quiet"]);
    child.stdin.take().unwrap().write_all(text.as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert_eq!((code(&output), said(&output).lines().count()), (1, 1), "{}", said(&output));
    assert_eq!((&bench.report()["bad_input"], &bench.report()["ok"]), (&json!(12), &json!(9)));

    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    let output = reading(&bench, "in.jsonl", bad.as_bytes(), &skip).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    assert!(said(&output).contains("no good line"), "{}", said(&output));
    assert_eq!((&bench.report()["bad_input"], &bench.report()["expected"]), (&json!(12), &json!(0)));
}

mod reader {
    use super::{
        input::{BadInput, Items, Reading},
        resume::{Resume, Wish},
    };
    use proptest::prelude::*;
    use std::io::{Cursor, Write};
    use tower_quota::org::{Dialect, Family};

    fn read(bytes: &[u8]) -> Result<Vec<String>, BadInput> {
        let mut items = Items::new(Cursor::new(bytes), "x", Reading::default());
        let mut ids = Vec::new();
        while let Some(item) = items.next_item()? {
            ids.push(item.custom_id);
        }
        Ok(ids)
    }

    #[test]
    fn the_body_is_kept_byte_for_byte_and_the_family_read() {
        let line = br#" {"custom_id":"\u0061","params": {"model" : "claude-haiku-4-5", "big": 12345678901234567890.10} , "more":1}"#;
        let mut items = Items::new(Cursor::new(&line[..]), "x", Reading::default());
        let item = items.next_item().unwrap().unwrap();
        assert_eq!((item.custom_id.as_str(), item.path.as_str()), ("a", "/v1/messages"));
        assert_eq!(item.body, &br#"{"model" : "claude-haiku-4-5", "big": 12345678901234567890.10}"#[..]);
        assert_eq!(item.family, Family::new("haiku"));
        assert_eq!(items.dialect(), Some(Dialect::Anthropic));
        assert!(items.next_item().unwrap().is_none());
    }

    #[test]
    fn a_byte_order_mark_and_carriage_returns_are_no_part_of_a_line() {
        let ids = read(b"\xef\xbb\xbf{\"custom_id\":\"a\",\"params\":{}}\r\n\r\n{\"custom_id\":\"b\",\"params\":{}}");
        assert_eq!(ids.unwrap(), ["a", "b"]);
        assert_eq!(read(b"\xef\xbb\xbf[").unwrap_err().place, Some((1, 1)));
        assert_eq!(read(b"{\"custom_id\":\"a\xff\",\"params\":{}}").unwrap_err().place, Some((1, 16)));
    }

    #[test]
    fn a_line_beyond_the_bound_is_refused_without_being_read_whole() {
        let endless = std::io::BufReader::new(std::io::repeat(b' '));
        let error = Items::new(endless, "x", Reading::default()).next_item().unwrap_err();
        assert!(error.to_string().contains("line 1, column 67108865: the line is longer than 64 MiB"), "{error}");
    }

    #[test]
    fn a_file_with_both_forms_names_the_line_that_differs() {
        let error = read(
            b"{\"custom_id\":\"a\",\"params\":{}}\n{\"custom_id\":\"b\",\"method\":\"POST\",\"url\":\"/v1/x\",\"body\":{}}",
        )
        .unwrap_err();
        assert_eq!(error.place, Some((2, 55)));
        assert!(error.problem.contains("line 1"), "{error}");
    }

    fn id() -> impl Strategy<Value = String> {
        "[a-zé\"\\\\\n☃]{1,6}"
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        #[test]
        fn no_damage_to_a_good_line_makes_it_panic(at in 0usize..70, byte in any::<u8>(), cut in any::<bool>()) {
            let mut line = br#"{"custom_id":"a","method":"POST","url":"/v1/x","body":{"stream":false}}"#.to_vec();
            line[at] = byte;
            if cut { line.truncate(at + 1); }
            if let Err(error) = read(&line) {
                let (_, column) = error.place.unwrap();
                prop_assert!((1..=line.len() + 1).contains(&column), "{}", error);
            }
        }

        #[test]
        fn the_line_and_column_of_a_fault_are_right(ids in proptest::collection::hash_set(id(), 1..8), at in any::<prop::sample::Index>()) {
            let ids: Vec<String> = ids.into_iter().collect();
            let at = at.index(ids.len());
            let mut text = String::new();
            let mut column = 0;
            for (i, id) in ids.iter().enumerate() {
                let before = format!("{{\"custom_id\":{},\"params\":{{\"stream\":", serde_json::to_string(id).unwrap());
                if i == at { column = before.chars().count() + 1; }
                text.push_str(&format!("{before}{}}}}}\n", i == at));
            }
            let error = read(text.as_bytes()).unwrap_err();
            prop_assert_eq!(error.place, Some((at as u64 + 1, column)));
        }

        #[test]
        fn a_file_is_refused_exactly_if_an_id_comes_twice(ids in proptest::collection::vec("[ab]{1,4}", 0..12)) {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            for id in &ids {
                writeln!(file, "{{\"custom_id\":\"{id}\",\"params\":{{}}}}").unwrap();
            }
            let first = (0..ids.len()).find_map(|i| {
                let earlier = ids[..i].iter().position(|id| *id == ids[i])?;
                Some((earlier + 1, i + 1))
            });
            let read = Resume::of_file(file.path(), &Reading::default(), None, file.path().parent().unwrap(), Wish::default(), |_, _| {});
            match (read.map(|(survey, ..)| survey), first) {
                (Ok(survey), None) => prop_assert_eq!(survey.items, ids.len() as u64),
                (Err(error), Some((earlier, line))) => {
                    prop_assert_eq!(error.place, Some((line as u64, 14)));
                    prop_assert!(error.problem.ends_with(&format!("line {earlier} already")), "{}", error);
                }
                (found, expected) => prop_assert!(false, "{:?} instead of {:?}", found, expected),
            }
        }
    }
}
