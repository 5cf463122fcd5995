//! What is said before, during and after a run: the plan, the panel, the report, the picture; and what this machine allows.

use std::{collections::HashMap, process::Stdio, time::Duration};

use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    time::Instant,
};
use tower_quota::{
    dialect::Resource,
    org::Family,
    outcome::Usage,
    sim::{Dialect, Latency},
};

use super::{
    Bench, KEYS, answers, code, command,
    descriptors::level,
    forecast::{Limit, Work},
    headroom_file, interrupt, org, outcomes,
    pace::{Counted, Ids, Pace, roughly},
    prices::{Prices, Tokens},
    program, said,
    samples::Samples,
    scripted,
};

// Before: what a run will take.

fn body(model: &str, more: &str) -> Vec<u8> {
    format!(r#"{{"model":"{model}"{more}}}"#).into_bytes()
}

/// Dollars a million: input 4, from a cache 1, into a cache 5, output 20; and embeddings, which have no output.
const TABLE: &str = r#"
dated = "2026-01-31"
[[model]]
name = "claude-sonnet-4-5"
input = 4.0
cached_input = 1.0
cache_write = 5.0
output = 20.0
[[model]]
name = "embed"
input = 2.0
output = 0.0
"#;

fn prices() -> Prices {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), TABLE).unwrap();
    Prices::load(Some(file.path())).unwrap()
}

#[test]
fn the_cost_at_most_is_that_of_the_input_as_estimated_and_of_the_largest_output() {
    // What else is in the request; how many of it; the output of one, at 20 dollars a million. The input is at 4, four bytes a token.
    for (more, requests, output) in [
        (r#","max_tokens":1000"#, 1, Some(1_000)),
        (r#","max_tokens":1000"#, 100, Some(1_000)),
        (r#","max_completion_tokens":7,"max_tokens":9,"n":3"#, 1, Some(27)),
        (r#","max_output_tokens":5,"n":0"#, 1, Some(5)),
        ("", 1, None),
    ] {
        let (mut work, body) = (Work::default(), body("claude-sonnet-4-5", more));
        work.add(&body, requests);
        assert_eq!(work.requests(), requests);
        let cost = work.cost(&prices());
        let input = (requests * body.len() as u64).div_ceil(4);
        match output {
            Some(output) => {
                let millionths = (4 * input + 20 * requests * output) as f64;
                assert!((cost.clone().unwrap() * 1e6 - millionths).abs() < 1e-6, "{more}: {cost:?}");
            }
            None => assert!(cost.unwrap_err().contains("1 of claude-sonnet-4-5 set no max_tokens")),
        }
    }
    let mut work = Work::default();
    work.add(&body("embed", ""), 4);
    assert!(work.cost(&prices()).is_ok_and(|cost| cost > 0.0), "what has no output needs no bound");
    work.add(&body("new-model", r#","max_tokens":1"#), 1);
    assert!(work.cost(&prices()).unwrap_err().contains("no price for new-model"));
}

#[test]
fn the_time_is_that_of_the_tightest_limit_of_each_org_all_orgs_together() {
    let limit = |org: &str, resource, per_minute| Limit {
        org: org.to_owned(),
        family: Family::new("sonnet"),
        resource,
        per_minute,
    };
    let mut work = Work::default();
    // 400 bytes, so a hundred tokens.
    let text = "x".repeat(400 - body("claude-sonnet-4-5", r#","a":"""#).len());
    work.add(&body("claude-sonnet-4-5", &format!(r#","a":"{text}""#)), 600);
    for (limits, seconds) in [
        (vec![], None),
        (vec![limit("a", Resource::Requests, 600.0)], Some(60)),
        (vec![limit("a", Resource::Requests, 600.0), limit("b", Resource::Requests, 600.0)], Some(30)),
        (vec![limit("a", Resource::Requests, 600.0), limit("a", Resource::InputTokens, 30_000.0)], Some(120)),
        (vec![limit("a", Resource::Tokens, 30_000.0)], Some(120)),
        // How much of its bound an answer uses nobody knows.
        (vec![limit("a", Resource::OutputTokens, 1.0)], None),
        (vec![Limit { family: Family::new("haiku"), ..limit("a", Resource::Requests, 600.0) }], None),
    ] {
        assert_eq!(work.time(&limits), seconds.map(Duration::from_secs), "{limits:?}");
    }
    work.add(&body("claude-haiku-4-5", ""), 1);
    assert_eq!(work.time(&[limit("a", Resource::Requests, 600.0)]), None, "of haiku nothing is known");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_is_one_line_before_the_first_call_and_a_dry_run_stops_there() {
    let bench = Bench::new(Dialect::Anthropic, [org(0), org(1)]).await;
    std::fs::write(bench.path("prices.toml"), TABLE).unwrap();
    bench.input(&bench.lines(0..20));
    let output = bench.files(&["--dry-run", "--prices", "prices.toml"]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let said = said(&output);
    let plan = said.lines().next().unwrap();
    assert!(
        plan.starts_with("plan: 20 requests, 1.3 KB, from in.jsonl, 20 sonnet; 0 answered already, 20 to send; "),
        "{plan}"
    );
    assert!(plan.contains("over first at http://") && plan.contains(", second at http://"), "{plan}");
    assert!(plan.contains("limits: unknown until the first answer; time: unknown; "), "{plan}");
    // 1290 bytes, and 8 tokens of output 191 times: the `n` of these requests is 0 to 19.
    assert!(
        plan.ends_with("cost: at most about $0.0319 (prices of prices.toml, dated 2026-01-31: check yours)"),
        "{plan}"
    );
    assert_eq!(said.lines().count(), 2, "{said}");
    assert_eq!(bench.server.truth().calls(), 0);

    let output = bench.files(&[]).output().await.unwrap();
    assert!(super::said(&output).starts_with("plan: 20 requests"), "{}", super::said(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_plan_knows_limits_from_the_headroom_file_and_nothing_of_a_pipe() {
    let bench = Bench::new(Dialect::Anthropic, [org(0), org(1)]).await;
    // What `first` is allowed: 1000 tokens a minute; of somebody else's org nothing is said.
    let (ours, theirs) = (headroom_file("first", 5), headroom_file("elsewhere", 5));
    std::fs::write(bench.path("h.json"), ours).unwrap();
    std::fs::write(bench.path("theirs.json"), theirs).unwrap();
    bench.input(&bench.lines(0..200));
    let plan = async |file: &str| {
        let output = bench.files(&["--dry-run", "--headroom-file", file]).output().await.unwrap();
        said(&output).lines().next().unwrap().to_owned()
    };
    let known = plan("h.json").await;
    // 13,090 bytes at four a token.
    assert!(
        known.contains("limits: first sonnet 1.0k itpm, of second unknown until the first answer; time: about 3m"),
        "{known}"
    );
    let unknown = plan("theirs.json").await;
    assert!(unknown.contains("limits: unknown until the first answer; time: unknown"), "{unknown}");

    let mut child = bench.pipes(&["--dry-run"]);
    child.stdin.take().unwrap().write_all(bench.lines(0..3).as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let said = said(&output);
    assert!(
        said.starts_with("plan: unknown requests from standard input; answered already and to send: unknown; "),
        "{said}"
    );
    assert!(said.lines().next().unwrap().ends_with("time: unknown; cost: unknown"), "{said}");
}

// During: the panel.

#[tokio::test(start_paused = true)]
async fn b136_what_was_restored_is_done_and_says_nothing_of_the_rate() {
    let started = Instant::now();
    for (restored, here, seconds, eta) in [
        (130, 1, 24, Some("8h 8m")),
        // A run that begins anew is as fast.
        (0, 1, 24, Some("9h 0m")),
        (130, 2, 24, Some("4h 3m")),
        (130, 0, 24, None),
        (1_350, 1, 24, Some("0s")),
        (1_349, 1, 24, Some("24s")),
    ] {
        let mut pace = Pace::new(started);
        for second in 0..=seconds {
            let ids = if second == seconds { here } else { 0 };
            pace.note(started + Duration::from_secs(second), Counted { ids, ..Counted::default() });
        }
        let ids = Ids { total: Some(1_351), restored, here };
        assert_eq!(ids.done(), restored + here);
        assert!(ids.text().starts_with(&format!("{}/1351 done", restored + here)), "{}", ids.text());
        assert_eq!(ids.text().contains("from before"), restored > 0, "{}", ids.text());
        assert_eq!(pace.left(ids.left().unwrap()).map(roughly).as_deref(), eta, "{restored} and {here}");
    }
}

#[tokio::test(start_paused = true)]
async fn rates_are_those_of_ten_seconds_and_of_the_whole_run_in_bounded_memory() {
    let started = Instant::now();
    let mut pace = Pace::new(started);
    // Two an eighth of a second for an hour, then one.
    let mut ids = 0;
    for eighth in 1..=8 * 3_600_u64 + 8 * 60 {
        ids += if eighth <= 8 * 3_600 { 2 } else { 1 };
        let counted = Counted { ids, calls: 2 * ids, input_tokens: 10 * ids, output_tokens: 3 * ids };
        pace.note(started + Duration::from_millis(125 * eighth), counted);
    }
    let (now, average) = (pace.now(), pace.average());
    assert_eq!((now.ids, now.calls, now.input_tokens, now.output_tokens), (480.0, 960.0, 4_800.0, 1_440.0));
    assert!((average.ids - (2 * 8 * 3_600 + 8 * 60) as f64 / 61.0).abs() < 1e-6, "{average:?}");
    // As in the last five minutes: four at the old rate, one at the new one.
    let left = pace.left(864).unwrap();
    assert!((59..=61).contains(&left.as_secs()), "{left:?}");
    assert!(format!("{pace:?}").matches("Counted").count() < 310);
    // Then nothing comes for an hour: as in all.
    pace.note(started + Duration::from_secs(3_660 + 3_600), Counted { ids, ..Counted::default() });
    assert_eq!((pace.now().ids, pace.left(ids).map(|left| left.as_secs())), (0.0, Some(7_260)));
}

/// A provider that gives one answer to everything.
async fn answering(head: &'static str, body: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut asked = Vec::new();
                while !asked.ends_with(b"}") {
                    if stream.read_buf(&mut asked).await.unwrap() == 0 {
                        return;
                    }
                }
                let head = format!("HTTP/1.1 {head}\r\nconnection: close\r\ncontent-type: application/json\r\n");
                let answer = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(answer.as_bytes()).await.unwrap();
            });
        }
    });
    base_url
}

#[tokio::test(flavor = "multi_thread")]
async fn b137_a_row_says_the_limit_the_hold_its_reason_and_the_bucket() {
    const OUTPUT: &str = "429 -\r\nretry-after: 14\r\nanthropic-ratelimit-output-tokens-limit: 1000\r\n\
        anthropic-ratelimit-output-tokens-remaining: 0\r\nanthropic-ratelimit-requests-limit: 1000\r\n\
        anthropic-ratelimit-requests-remaining: 900";
    for (head, longest, reason) in [
        (OUTPUT, 14, "s (429 otpm)"),
        ("429 -\r\nretry-after: 14", 14, "s (429)"),
        ("429 -\r\nretry-after: 120", 120, "s (429)"),
        ("400 -\r\nretry-after: 14", 0, ""),
    ] {
        let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
        let base_url = answering(head, "{}").await;
        // A pipe that stays open: the run goes on until it is ended.
        let mut child = bench.pipes(&["--base-url", &base_url, "--cap", "50", "--grace", "1ms"]);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(bench.lines(0..1).as_bytes()).await.unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut lines = vec![];
        let seen = loop {
            let line = stderr.next_line().await.unwrap().unwrap();
            lines.push(line.clone());
            if line.contains(" | first sonnet ") {
                break line;
            }
        };
        interrupt(&child);
        while let Some(line) = stderr.next_line().await.unwrap() {
            lines.push(line);
        }
        // What keeps a run for long is told besides, and not at every look.
        let told = lines.iter().filter(|line| line.contains("org is held for another ")).count();
        assert_eq!(told, usize::from(longest == 120), "{lines:?}");
        let (_, row) = seen.split_once("first sonnet 12/50").unwrap();
        if longest == 0 {
            assert!(row.starts_with(", 0 in flight") || row.starts_with(", 1 in flight"), "{seen}");
        } else {
            let (left, rest) = row.strip_prefix(" hold ").unwrap().split_at(row[6..].find('s').unwrap());
            let left: u64 = left.parse().unwrap();
            assert!((1..longest).contains(&left) && rest.starts_with(reason), "{head}: {seen}");
        }
        assert!(seen.contains("calls/min ") && seen.contains(" (avg "), "{seen}");
        child.wait().await.unwrap();
        drop(stdin);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b140_standard_output_carries_lines_of_json_and_nothing_else() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).unauthorised(true), org(1)]).await;
    let mut child = bench.pipes(&["--plot", "run.svg"]);
    child.stdin.take().unwrap().write_all(bench.lines(0..50).as_bytes()).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let lines = answers(std::str::from_utf8(&output.stdout).unwrap());
    assert_eq!(outcomes(&lines).get("ok"), Some(&50));
    let said = said(&output);
    for word in ["plan: ", "org is out", "50 of 50 ok", "\n  cost "] {
        assert_eq!(said.matches(word).count(), 1, "{word:?} is told once, on standard error: {said}");
    }
}

// After: the report.

#[tokio::test(flavor = "multi_thread")]
async fn b139_what_failed_attempts_used_is_counted_and_what_was_cached_is_cheaper() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    std::fs::write(bench.path("prices.toml"), TABLE).unwrap();
    let used = |content: &str, usage: &str| format!(r#"{{"type":"message","content":{content},"usage":{usage}}}"#);
    let plain = r#"{"input_tokens":90,"output_tokens":10}"#;
    let cached =
        r#"{"input_tokens":40,"cache_creation_input_tokens":20,"cache_read_input_tokens":30,"output_tokens":10}"#;
    let text = r#"[{"type":"text","text":"a"}]"#;
    for (first, second, tokens, millionths) in [
        // One that is no answer has used a hundred, and so has the one that is.
        (used("[]", plain), used(text, plain), (180, 0, 0, 20), 180.0 * 4.0 + 20.0 * 20.0),
        (used("[]", plain), used(text, cached), (130, 30, 20, 20), 130.0 * 4.0 + 30.0 + 20.0 * 5.0 + 20.0 * 20.0),
        // A refusal uses nothing; one that does not say, nobody knows.
        (r#"{"type":"message","content":[]}"#.to_owned(), used(text, plain), (90, 0, 0, 10), 90.0 * 4.0 + 10.0 * 20.0),
    ] {
        let base_url = scripted(vec![(200, first.clone()), (200, second)]).await;
        let more = ["--base-url", &base_url, "--prices", "prices.toml", "--no-journal"];
        let output = bench.input(&bench.lines(0..1)).files(&more).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
        let report = bench.report();
        let (input, cached, cache_written, output_tokens) = tokens;
        let expected =
            json!({ "input": input, "cached": cached, "cache_written": cache_written, "output": output_tokens });
        assert_eq!((&report["tokens"], &report["orgs"][0]["tokens"]), (&expected, &expected));
        let cost = report["cost_usd"].as_f64().unwrap();
        assert!((cost * 1e6 - millionths).abs() < 0.6, "{cost}");
        assert_eq!(report["orgs"][0]["cost_usd"], report["cost_usd"]);
        assert_eq!((&report["wire_calls"], &report["amplification"]), (&json!(2), &json!(2.0)));
        let unsaid = u64::from(!first.contains("usage"));
        assert_eq!(report["without_usage"], unsaid);
        assert_eq!(said(&output).contains("; 1 answer did not say"), unsaid == 1, "{}", said(&output));
        assert!(said(&output).contains("prices of prices.toml, dated 2026-01-31: check yours"), "{}", said(&output));
        std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_a_provider_quotes_is_in_no_file_however_it_is_written() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let key = "sk-ant/te/st+key=";
    let orgs = bench.text("orgs.toml").replace(KEYS[0], key);
    std::fs::write(bench.path("orgs.toml"), orgs).unwrap();
    for quoted in [key.to_owned(), key.replace('/', "\\/"), key.replace('k', "\\u006b")] {
        for status in [200, 400] {
            let body = format!(
                r#"{{"type":"message","content":[{{"type":"text","text":"{quoted}"}}],"error":null,"stop_reason":"end_turn"}}"#
            );
            let base_url = scripted(vec![(status, body)]).await;
            let output = bench.input(&bench.lines(0..1)).files(&["--base-url", &base_url]).output().await.unwrap();
            assert_eq!(code(&output), i32::from(status == 400), "{}", said(&output));
            assert_eq!(bench.answers()["id-0"]["response"]["content"][0]["text"], "***", "{quoted}");
            for file in ["out.jsonl", "out.jsonl.journal", "report.json"] {
                let bytes = std::fs::read(bench.path(file)).unwrap();
                let found = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
                assert!(!found(key) && !found(&quoted), "{file} has {quoted}");
            }
            for file in ["out.jsonl", "out.jsonl.journal"] {
                std::fs::remove_file(bench.path(file)).unwrap();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_write_does_nothing_to_a_terminal() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let refusal = r#"{"type":"error","error":{"type":"invalid_request_error","message":"\u001b[31mred\u0007"}}"#;
    let base_url = scripted(vec![(400, refusal.to_owned())]).await;
    let line = bench.lines(0..1).replace("id-0", "\\u001b]0;title\\u0007");
    let output = bench.input(&line).files(&["--base-url", &base_url]).output().await.unwrap();
    let text = said(&output);
    assert!(text.contains("title") && text.contains("red"), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_there_and_no_file_is_written_to_and_a_link_is_followed() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    std::os::unix::fs::symlink("real.json", bench.path("link.json")).unwrap();
    std::fs::write(bench.path("real.json"), "").unwrap();
    bench.input(&bench.lines(0..1));
    for report in ["link.json", "/dev/null"] {
        let args = ["--input", "in.jsonl", "--output", "out.jsonl", "--orgs", "orgs.toml", "--report", report];
        let output = command(&args).current_dir(bench.dir.path()).output().await.unwrap();
        assert_eq!(code(&output), 0, "{}", said(&output));
    }
    assert!(bench.path("link.json").is_symlink() && bench.text("real.json").contains("expected"));
    use std::os::unix::fs::FileTypeExt;
    assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_a_price_has_no_cost_and_is_named_once() {
    let bench = Bench::new(Dialect::OpenAi, [org(0), org(1)]).await;
    // The same requests to a model that no table knows, and two to one that the program's own does.
    let known = bench.lines(0..2).replace("claude-sonnet-4-5", "gpt-4o-mini-2024-07-18");
    let unknown = bench.lines(2..20).replace("claude-sonnet-4-5", "nobody-1");
    let output = bench.input(&unknown).files(&[]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let report = bench.report();
    assert_eq!((&report["cost_usd"], &report["unpriced_models"]), (&Value::Null, &json!(["nobody-1"])));
    assert!(report["tokens"]["output"].as_u64().unwrap() > 0);
    assert_eq!(said(&output).matches("without a price, and not counted: nobody-1").count(), 1, "{}", said(&output));

    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    let output = bench.input(&format!("{known}{unknown}")).files(&[]).output().await.unwrap();
    let report = bench.report();
    assert!(report["cost_usd"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!(report["unpriced_models"], json!(["nobody-1"]));
    assert!(said(&output).contains("list prices, dated "), "{}", said(&output));
    let by_org = report["orgs"].as_array().unwrap().iter().filter_map(|org| org["cost_usd"].as_f64()).sum::<f64>();
    assert!((by_org - report["cost_usd"].as_f64().unwrap()).abs() < 2e-6, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_adds_up() {
    let bench = Bench::new(Dialect::OpenAi, [org(0).overloaded(true)]).await;
    let wrong = r#"{"custom_id":"wrong","method":"POST","url":"/v1/nowhere","body":{"model":"m"}}"#;
    // One org: it fails at everything but what it does not know.
    let output =
        bench.input(&format!("{}{wrong}\n", bench.lines(0..2))).files(&["--max-attempts", "2"]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let report = bench.report();
    let n = |field: &str| report[field].as_u64().unwrap();
    assert_eq!(n("ok") + n("terminal") + n("redrivable") + n("missing"), n("expected"), "{report}");
    assert_eq!((n("redrivable") + n("terminal"), n("duplicates"), n("restored")), (3, 0, 0), "{report}");
    assert_eq!(n("terminal"), report["outcomes"].get("terminal").map_or(0, |count| count.as_u64().unwrap()));
    // The provider does not count what goes nowhere.
    assert_eq!((n("wire_calls"), bench.server.truth().calls()), (5, 4));
    assert!(said(&output).contains(&format!(
        "failed   {} for good, {} may be sent again",
        n("terminal"),
        n("redrivable")
    )));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_five_most_frequent_errors_are_told_with_the_id_that_met_each_first() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    let of = ["cedar", "alder", "beech", "alder", "cedar", "alder", "elm", "fir", "ginkgo"];
    let refusal = |word: &&str| {
        let error =
            json!({ "type": "error", "error": { "type": "invalid_request_error", "message": format!("no {word}") } });
        (400, error.to_string())
    };
    let base_url = scripted(of.iter().map(refusal).collect()).await;
    let mut command = bench.input(&bench.lines(0..of.len())).files(&["--base-url", &base_url, "--cap", "1"]);
    let output = command.output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let report = bench.report();
    let errors = report["errors"].as_array().unwrap();
    // As often: by their texts.
    let told =
        [("alder", 3, "id-1"), ("cedar", 2, "id-0"), ("beech", 1, "id-2"), ("elm", 1, "id-6"), ("fir", 1, "id-7")];
    assert_eq!(errors.len(), told.len(), "{report}");
    for (error, (word, count, example)) in errors.iter().zip(told) {
        assert!(error["error"].as_str().unwrap().contains(&format!("no {word}")), "{error}");
        assert_eq!((&error["count"], &error["example"]), (&json!(count), &json!(example)), "{error}");
        assert!(said(&output).contains(&format!("{count} x terminal: ")), "{}", said(&output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_is_the_time_in_the_line_of_all_attempts_and_no_part_of_a_call() {
    // One slot and twenty ids, 20 ms each at least: the last one has waited for nineteen of them.
    let bench = Bench::new(Dialect::Anthropic, [org(0).latency(Latency::new(20.0, 0.0))]).await;
    let output = bench.input(&bench.lines(0..20)).files(&["--cap", "1"]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let report = bench.report();
    // Percentiles are right to two per cent. Two are alive at once: one in flight, and one that waits.
    let at = |what: &str, share: &str| report[what][share].as_f64().unwrap();
    assert!(at("waiting_ms", "p50") > 0.9 * at("latency_ms", "p50"), "{report}");
    assert!(at("waiting_ms", "p50") < 3.0 * at("latency_ms", "p99"), "{report}");

    // Refused for a second: that is waiting too, and a hold.
    let bench = Bench::new(Dialect::Anthropic, [org(0).black_hole(true).black_hole_wait_s(1.0)]).await;
    let output = bench.input(&bench.lines(0..1)).files(&["--patience", "3"]).output().await.unwrap();
    assert_eq!(code(&output), 1, "{}", said(&output));
    let report = bench.report();
    assert!(report["waiting_ms"]["p50"].as_f64().unwrap() > 980.0, "{report}");
    assert!(report["held_s"].as_f64().unwrap() >= 0.5, "{report}");
    assert_eq!(report["held_s"], report["orgs"][0]["held_s"]);
}

// Prices.

#[test]
fn a_price_is_found_by_name_and_by_name_without_a_date() {
    let prices = prices();
    for (model, found) in [
        ("claude-sonnet-4-5", true),
        ("claude-sonnet-4-5-20250929", true),
        ("claude-sonnet-4-5@20250929", true),
        ("claude-sonnet-4-5-2025-09-29", true),
        ("claude-sonnet-4-5-latest", true),
        ("embed", true),
        ("claude-sonnet-4", false),
        ("claude-sonnet-4-5-fast", false),
        ("claude-sonnet-4-5-2025092", false),
        ("claude-sonnet-4-520250929", false),
        ("-20250929", false),
        ("20250929", false),
        ("é0250929", false),
        ("", false),
    ] {
        assert_eq!(prices.of(model).is_some(), found, "{model}");
    }
}

#[test]
fn each_token_is_paid_once_at_the_price_of_its_kind() {
    let mut usage = Usage::new(1_000, 10);
    (usage.uncached_tokens, usage.cache_read_tokens, usage.cache_write_tokens) = (700, 5_000, 300);
    let mut tokens = Tokens::from(usage);
    assert_eq!(tokens.all_input(), 6_000);
    tokens += Tokens::from(Usage::new(50, 0));
    let of = |model| prices().of(model).unwrap().cost(&tokens) * 1e6;
    assert!((of("claude-sonnet-4-5") - (750.0 * 4.0 + 5_000.0 + 300.0 * 5.0 + 10.0 * 20.0)).abs() < 1e-6);
    assert!((of("embed") - 6_050.0 * 2.0).abs() < 1e-6, "without a price of its own, as other input");
}

#[test]
fn the_programs_own_table_is_good_and_knows_what_the_demonstration_sends() {
    let own = Prices::load(None).unwrap();
    assert!(["claude-sonnet-4-5", "gpt-4o-mini"].iter().all(|model| own.of(model).is_some()));
    assert!(own.what.starts_with("list prices, dated 20"), "{}", own.what);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_none_is_named_with_what_is_wrong() {
    let bench = Bench::new(Dialect::Anthropic, [org(0)]).await;
    bench.input(&bench.lines(0..1));
    let model = |fields: &str| format!("dated = \"x\"\n[[model]]\nname = \"a\"\n{fields}\n");
    for (table, why) in [
        ("[[model]]\nname = \"a\"\ninput = 1.0\noutput = 1.0".to_owned(), "dated"),
        (model("input = 1.0"), "output"),
        (model("input = -1.0\noutput = 1.0"), "model \"a\": -1 is no price"),
        (model("input = nan\noutput = 1.0"), "model \"a\": NaN is no price"),
        (model("input = 1.0\noutput = 1.0\noutptu = 2.0"), "outptu"),
        (
            model("input = 1.0\noutput = 1.0\n[[model]]\nname = \"a\"\ninput = 1.0\noutput = 1.0"),
            "\"a\" stands there twice",
        ),
    ] {
        std::fs::write(bench.path("prices.toml"), &table).unwrap();
        let output = bench.files(&["--prices", "prices.toml"]).output().await.unwrap();
        assert_eq!(code(&output), 2, "{table}: {}", said(&output));
        assert!(said(&output).contains("--prices prices.toml: ") && said(&output).contains(why), "{}", said(&output));
    }
    let output = bench.files(&["--prices", "none.toml"]).output().await.unwrap();
    assert!(code(&output) == 2 && said(&output).contains("--prices none.toml: "), "{}", said(&output));
    assert_eq!(bench.server.truth().calls(), 0);
}

// The picture.

#[tokio::test(flavor = "multi_thread")]
async fn the_picture_shows_every_org_and_what_was_refused() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).black_hole(true), org(1)]).await;
    let output = bench.input(&bench.lines(0..100)).files(&["--plot", "run.svg"]).output().await.unwrap();
    assert_eq!(code(&output), 0, "{}", said(&output));
    let svg = bench.text("run.svg");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let refused = bench.server.truth().throttled_429();
    for word in ["\nfirst\n", "\nsecond\n", &format!(", {refused} refused"), ", 0 refused", "concurrent calls"] {
        assert!(svg.contains(word), "{word}: {svg}");
    }
    // An empty run has a picture too, and one that cannot be written is said before anything is sent.
    let output = bench.files(&["--plot", "none/run.svg"]).output().await.unwrap();
    assert!(code(&output) == 2 && said(&output).contains("--plot none/run.svg"), "{}", said(&output));
}

proptest! {
    #[test]
    fn samples_are_bounded_evenly_apart_and_begin_with_the_first(most in 2_usize..50, ticks in 1_u64..3_000) {
        let mut samples = Samples::new(most);
        (0..ticks).for_each(|tick| samples.tick(|| tick));
        let kept = samples.kept();
        prop_assert!(kept.len() <= most && kept.first() == Some(&0));
        let step = if kept.len() > 1 { kept[1] - kept[0] } else { 1 };
        prop_assert!(kept.windows(2).all(|two| two[1] - two[0] == step), "{:?}", kept);
        // Nothing is thrown away without need: half are there always, and up to the end.
        prop_assert!(step == 1 || kept.len() >= most / 2, "{:?}", kept);
        prop_assert!(kept[kept.len() - 1] + step >= ticks, "{:?}", kept);
        samples.last(ticks);
        prop_assert!(samples.kept().len() <= most && samples.kept().last() == Some(&ticks));
    }

    #[test]
    fn caps_are_brought_down_to_what_there_is_room_for_and_no_further(
        caps in proptest::collection::vec(1_usize..300, 1..20), room in 0_usize..2_000,
    ) {
        let level = level(&caps, room);
        let sum = |level: usize| caps.iter().map(|cap| level.min(*cap)).sum::<usize>();
        prop_assert!(level >= 1);
        prop_assert!(level == 1 || sum(level) <= room, "{level}");
        // One more would be too many, where it would be more at all.
        prop_assert!(sum(level + 1) > room || sum(level + 1) == sum(level), "{level}");
    }
}

// File descriptors.

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn b133_too_few_descriptors_lower_the_caps_with_one_warning_and_blame_no_org() {
    for (limit, clamped) in [("-n 64", true), ("-Sn 64", false), ("-n 1024", false)] {
        let slow = |i| org(i).latency(Latency::new(40.0, 0.0));
        let bench = Bench::new(Dialect::Anthropic, [slow(0), slow(1)]).await;
        bench.input(&bench.lines(0..400));
        let mut command = tokio::process::Command::new("sh");
        command.arg("-c").arg(format!(r#"ulimit {limit} && exec "$0" "$@""#)).arg(program());
        command.args([
            "--input",
            "in.jsonl",
            "--output",
            "out.jsonl",
            "--orgs",
            "orgs.toml",
            "--report",
            "report.json",
        ]);
        let output = command.args(["--cap", "100"]).current_dir(bench.dir.path()).stdin(Stdio::null()).output().await;
        let output = output.unwrap();
        assert_eq!(code(&output), 0, "{limit}: {}", said(&output));
        let warnings = said(&output).matches("this process may have 64 files open").count();
        assert_eq!(warnings, usize::from(clamped), "{limit}: {}", said(&output));
        let report = bench.report();
        assert_eq!((&report["ok"], &report["wire_calls"]), (&json!(400), &json!(400)), "{limit}: {report}");
        let caps: HashMap<&str, u64> = report["orgs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|org| {
                assert_eq!((&org["unanswered"], &org["out"]), (&json!(0), &Value::Null), "{limit}: {org}");
                (org["name"].as_str().unwrap(), org["cap"].as_u64().unwrap())
            })
            .collect();
        let peak: usize = bench.server.truth().orgs.iter().map(|org| org.peak_in_flight).sum();
        if clamped {
            assert!(caps.values().all(|cap| (5..30).contains(cap)) && peak < 64, "{limit}: {caps:?}, {peak} at once");
        } else {
            assert!(caps.values().all(|cap| *cap == 100), "{limit}: {caps:?}");
        }
    }
}
