use super::*;
use std::{
    collections::{HashMap, HashSet},
    os::unix::process::ExitStatusExt,
    time::Duration,
};

/// A row of an earlier run, as an earlier version wrote it: without a fingerprint.
fn row(id: usize, outcome: &str) -> String {
    format!("{{\"custom_id\":\"id-{id}\",\"outcome\":\"{outcome}\",\"org\":\"first\",\"attempts\":1,\"status\":200}}\n")
}

fn rows(ids: std::ops::Range<usize>, outcome: &str) -> String {
    ids.map(|id| row(id, outcome)).collect()
}

impl Bench {
    /// Runs to the end, and gives the exit code and what was said.
    async fn run(&self, more: &[&str]) -> (i32, String) {
        let output = self.files(more).output().await.unwrap();
        (code(&output), said(&output))
    }

    fn output(&self, text: &str) {
        std::fs::write(self.path("out.jsonl"), text).unwrap();
    }

    fn calls(&self) -> u64 {
        self.server.truth().calls()
    }

    /// The program where no file may grow beyond so many blocks of 512 or 1024 bytes.
    async fn within(&self, blocks: u32, more: &str) -> Output {
        let program = program().display();
        let script =
            format!("trap '' XFSZ; ulimit -f {blocks}; exec {program} --input in.jsonl --orgs orgs.toml {more}");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).current_dir(self.dir.path()).output().await.unwrap()
    }

    /// The same through pipes, but for the output.
    async fn stream(&self, text: &str, more: &[&str]) -> (i32, String) {
        let mut args = vec!["--input", "-", "--output", "out.jsonl", "--orgs", "orgs.toml", "--report", "report.json"];
        args.extend(more);
        let mut command = command(&args);
        command.current_dir(self.dir.path()).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).await.unwrap();
        let output = child.wait_with_output().await.unwrap();
        (code(&output), said(&output))
    }
}

async fn bench() -> Bench {
    Bench::new(Dialect::Anthropic, [org(0).requests_per_minute(60_000.0)]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_resume_of_a_complete_run_sends_nothing_and_changes_nothing() {
    let bench = bench().await;
    bench.input(&bench.lines(0..30));
    assert_eq!(bench.run(&[]).await.0, 0);
    let before = bench.text("out.jsonl");
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls(), bench.text("out.jsonl")), (0, 30, before), "{said}");
    assert!(said.contains("found 30 answered, 0 failed for good, 0 to be sent again, 0 changed; sending 0"), "{said}");
    assert!(said.contains("30 of 30 ok, 30 from before, 0 missing"), "{said}");
    let report = bench.report();
    assert_eq!(
        (&report["restored"], &report["wire_calls"], &report["rate_per_s"]),
        (&json!(30), &json!(0), &json!(0.0))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_answered_or_refused_for_good_is_kept_and_all_else_is_sent_again() {
    let bench = bench().await;
    let redrivable =
        ["rate_limited", "transient", "cancelled", "deadline", "no_org", "unauthorised", "of_a_later_version"];
    let last = ["terminal", "too_large", "garbled"];
    let mut text = rows(0..20, "ok");
    for (id, outcome) in (20..).zip(redrivable.iter().chain(&last)) {
        text.push_str(&row(id, outcome));
    }
    bench.input(&bench.lines(0..40)).output(&text);
    let (code, said) = bench.run(&[]).await;
    assert_eq!(code, 1, "some were refused for good: {said}");
    assert!(said.contains("found 20 answered, 3 failed for good, 7 to be sent again, 0 changed; sending 17"), "{said}");
    assert_eq!(bench.calls(), 17);
    let answers = bench.answers();
    assert_eq!(outcomes(&answers), BTreeMap::from([("garbled", 1), ("ok", 37), ("terminal", 1), ("too_large", 1)]));
    assert!(bench.text("out.jsonl").starts_with(&rows(0..20, "ok")), "what is kept stays as it is");
    let report = bench.report();
    assert_eq!((&report["restored"], &report["terminal"], &report["redrivable"]), (&json!(23), &json!(3), &json!(0)));

    let (code, said) = bench.run(&["--retry-failed"]).await;
    assert_eq!((code, bench.calls()), (0, 20), "{said}");
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 40)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn b116_a_torn_tail_is_cut_and_its_id_is_sent_again() {
    let bench = bench().await;
    bench.input(&bench.lines(0..4));
    assert_eq!(bench.run(&[]).await.0, 0);
    let whole = bench.text("out.jsonl");
    let last = whole.trim_end().rfind('\n').unwrap() + 1;
    let mut calls = bench.calls();
    // From its first byte to its last: whole but for the line feed it is an answer still.
    for (cut, sent) in [(last + 1, 1), (last + 20, 1), (whole.len() - 2, 1), (whole.len() - 1, 0), (last, 1)] {
        bench.output(&whole[..cut]);
        let (code, said) = bench.run(&[]).await;
        assert_eq!((code, bench.calls() - calls), (0, sent), "{cut}: {said}");
        let torn = said.contains("out.jsonl: line 4 was cut short while it was written: it is cut off");
        assert_eq!(torn, sent == 1 && cut != last, "{cut}: {said}");
        assert!(bench.text("out.jsonl").starts_with(&whole[..last]));
        assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 4)]), "nothing is glued to anything");
        calls = bench.calls();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b116_damage_elsewhere_is_named_with_line_and_column_and_nothing_is_done() {
    let bench = bench().await;
    bench.input(&bench.lines(0..9));
    let good = row(0, "ok");
    for (bad, place, why) in [
        ("{\"custom_id\":\"id-1\",\"outco{\"custom_id\":\"id-2\",\"outcome\":\"ok\"}", "line 2, column 29", "expected"),
        ("{\"custom_id\":\"é\",\"outcome\":7}", "line 2, column 28", "invalid type"),
        ("{\"custom_id\":\"id-1\"}", "line 2, column 20", "missing field `outcome`"),
        (
            "{\"custom_id\":\"a\",\"outcome\":\"ok\",\"fingerprint\":\"12\"}",
            "line 2, column 33",
            "32 hexadecimal digits",
        ),
        ("[\"id-1\",\"ok\",null]", "line 2, column 1", "a JSON object"),
        ("\0\0\0\0", "line 2, column 1", "a JSON object"),
    ] {
        let text = format!("{good}{bad}\n{}{}", row(3, "transient"), "{\"custom_id\":\"id-4\",\"outc");
        bench.output(&text);
        let (code, said) = bench.run(&[]).await;
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(&format!("out.jsonl: {place}: ")) && said.contains(why), "{bad}\n{said}");
        assert!(said.contains("--fresh"), "what to do is said: {said}");
        assert_eq!((bench.calls(), bench.text("out.jsonl")), (0, text));
    }
    let mut bytes = good.clone().into_bytes();
    bytes.extend(b"{\"custom_id\":\"\xff\",\"outcome\":\"ok\"}\n");
    std::fs::write(bench.path("out.jsonl"), bytes).unwrap();
    let (code, said) = bench.run(&[]).await;
    assert!(code == 2 && said.contains("line 2, column 15: not UTF-8"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_line_feed_ends_a_row() {
    let bench = bench().await;
    let ids = ["a\u{2028}b", "a\u{2029}b", "a\u{85}b", "a\\u000bb", "a\\rb"];
    let lines =
        ids.map(|id| format!("{{\"custom_id\":\"{id}\",\"params\":{{\"model\":\"claude-sonnet-4-5\"}}}}\n")).concat();
    let rows = ids.map(|id| format!("{{\"custom_id\":\"{id}\",\"outcome\":\"ok\",\"x\":\"\u{2028}\"}}\r\n\n")).concat();
    bench.input(&lines).output(&rows);
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls(), bench.text("out.jsonl")), (0, 0, rows), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn b118_the_same_prompt_under_two_ids_gives_two_rows() {
    let bench = bench().await;
    let line = |id: &str| {
        format!("{{\"custom_id\":\"{id}\",\"params\":{{\"model\":\"claude-sonnet-4-5\",\"messages\":[]}}}}\n")
    };
    bench.input(&(line("a") + &line("b")));
    assert_eq!(bench.run(&[]).await.0, 0);
    let answers = bench.answers();
    assert_eq!(answers.keys().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(answers["a"]["fingerprint"], answers["b"]["fingerprint"]);
    // Nor does the answer to the one stand for the other later.
    bench.input(&["a", "b", "c"].map(line).concat());
    assert_eq!(bench.run(&[]).await.0, 0);
    assert_eq!((bench.answers().len(), bench.calls()), (3, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn b119_after_an_edit_of_the_input_only_what_has_changed_is_sent() {
    let bench = bench().await;
    bench.input(&bench.lines(0..10));
    assert_eq!(bench.run(&[]).await.0, 0);
    let before = bench.text("out.jsonl");
    // Row 3 goes, and with it all others move.
    let lines: Vec<_> = bench.lines(0..10).lines().map(|line| format!("{line}\n")).collect();
    let edited = [&lines[..2], &lines[3..]].concat().concat();
    bench.input(&edited);
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls(), bench.text("out.jsonl")), (0, 10, before), "{said}");
    assert!(said.contains("1 id that the input does not have: kept"), "{said}");
    assert_eq!(bench.report()["expected"], 9);

    // Another request under an id is another request; the same one written otherwise is the same.
    let changed =
        edited.replace("\"n\":7", "\"n\":70").replace("\"n\":8", "\"n\":80").replace("{\"custom_id\":\"id-9\",", "{ ");
    let changed = changed.replace("}}\n{ ", "}}\n{\"custom_id\" : \"id-9\" , ");
    assert_eq!(changed.matches("\"custom_id\" : ").count(), 1);
    bench.input(&changed);
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls()), (0, 12), "{said}");
    assert!(said.contains("found 7 answered, 0 failed for good, 0 to be sent again, 2 changed; sending 2"), "{said}");
    assert!(said.contains("2 requests have changed since, and are sent again: \"id-7\" is the first"), "{said}");
    assert_eq!(bench.answers().len(), 10);
    assert_eq!(bench.run(&[]).await.0, 0);
    assert_eq!(bench.calls(), 12, "and now they are answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_rows_with_one_id_the_best_stays() {
    let bench = bench().await;
    let other = row(2, "ok").replace("{", &format!("{{\"fingerprint\":\"{}\",", "0".repeat(32)));
    bench.input(&bench.lines(0..4)).output(
        &[
            row(0, "ok"),
            row(0, "transient"),
            row(1, "terminal"),
            row(1, "cancelled"),
            row(2, "terminal"),
            other,
            row(3, "cancelled"),
            row(3, "deadline"),
            row(7, "ok"),
            row(7, "cancelled"),
        ]
        .concat(),
    );
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls()), (1, 1), "{said}");
    assert!(said.contains("5 rows of an id that has a better one: taken out"), "{said}");
    let answers = bench.answers();
    let of = |id: &str| answers[id]["outcome"].as_str().unwrap();
    assert_eq!(["id-0", "id-1", "id-2", "id-3", "id-7"].map(of), ["ok", "terminal", "terminal", "ok", "ok"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn b121_a_kill_at_any_instant_of_a_rewrite_leaves_the_old_file_or_the_new_one() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    bench.input(&bench.lines(0..3_000));
    // Long enough that writing them takes its time.
    let long = "x".repeat(4_000);
    let row = |id: usize, outcome: &str| row(id, outcome).replace("first", &long);
    let old: String = (0..3_000).map(|id| row(id, if id % 2 == 0 { "ok" } else { "transient" })).collect();
    let new: String = (0..3_000).step_by(2).map(|id| row(id, "ok")).collect();
    let mut seen = HashSet::new();
    for instant in 0..20 {
        bench.output(&old);
        let mut child = bench.files(&[]).stderr(Stdio::null()).spawn().unwrap();
        let rewriting = || bench.path("out.jsonl.rewriting").exists();
        let mut until = |so: &dyn Fn() -> bool| {
            while !so() {
                assert_eq!(child.try_wait().unwrap(), None, "it runs until it is killed");
                std::thread::yield_now();
            }
        };
        // What the last kill left is taken away first, or it would pass for a rewriting that has begun.
        until(&|| !rewriting());
        // Killed when the rewriting has begun, or a little later.
        until(&|| rewriting() || std::fs::metadata(bench.path("out.jsonl")).unwrap().len() != old.len() as u64);
        std::thread::sleep(Duration::from_millis(instant));
        child.start_kill().unwrap();
        assert_eq!(child.wait().await.unwrap().signal(), Some(9));
        let found = bench.text("out.jsonl");
        assert!(found == old || found == new, "{} bytes, neither {} nor {}", found.len(), old.len(), new.len());
        seen.insert(found == new);
    }
    assert!(seen.contains(&false), "some were killed early enough");
}

#[tokio::test(flavor = "multi_thread")]
async fn b122_one_exhausted_id_of_a_hundred_is_counted_and_makes_the_exit_code_one() {
    let bench = bench().await;
    let good = (200, "{\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}".to_owned());
    let mut answers = vec![good.clone(); 100];
    answers[50] = (500, "{}".to_owned());
    let base_url = scripted(answers).await;
    let alone = ["--base-url", &base_url, "--cap", "1", "--max-attempts", "1"];
    bench.input(&bench.lines(0..100));
    let (code, said) = bench.run(&alone).await;
    assert!(code == 1 && said.contains("99 of 100 ok, 1 re-drivable"), "{said}");
    assert_eq!((&bench.report()["ok"], &bench.report()["redrivable"]), (&json!(99), &json!(1)));
    // And the next run sends that one.
    let base_url = scripted(vec![good]).await;
    let (code, said) = bench.run(&["--base-url", &base_url]).await;
    assert!(code == 0 && said.contains("100 of 100 ok, 99 from before"), "{said}");
    assert_eq!(bench.report()["wire_calls"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_killed_at_random_and_started_again_end_with_one_row_of_each_id() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).requests_per_minute(60_000.0)]).await;
    bench.input(&bench.lines(0..1_500));
    let (mut answered, mut runs) = (0, 0);
    loop {
        let mut child = bench.files(&["--cap", "8"]).stderr(Stdio::null()).spawn().unwrap();
        let sent = bench.calls();
        let ended = tokio::select! {
            ended = child.wait() => Some(ended.unwrap()),
            () = until(|| bench.calls() >= sent + 150) => None,
        };
        runs += 1;
        if let Some(ended) = ended {
            assert_eq!(ended.code(), Some(0));
            break;
        }
        child.start_kill().unwrap();
        child.wait().await.unwrap();
        // Every whole row is one.
        let text = bench.text("out.jsonl");
        let whole = &text[..text.rfind('\n').map_or(0, |at| at + 1)];
        let now = answers(whole).len();
        assert!(now >= answered, "what was written stays");
        answered = now;
    }
    assert!(runs > 3, "{runs} runs");
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 1_500)]));
    assert!(bench.calls() <= 1_500 + 9 * runs, "{} calls in {runs} runs", bench.calls());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_skips_what_is_answered_and_sends_the_rest() {
    let bench = bench().await;
    let other = row(3, "ok").replace("{", &format!("{{\"fingerprint\":\"{}\",", "0".repeat(32)));
    bench.output(&[rows(0..3, "ok"), other, row(4, "terminal"), row(5, "transient"), row(77, "cancelled")].concat());
    let (code, said) = bench.stream(&bench.lines(0..8), &["--ordered", "ordered.jsonl"]).await;
    assert_eq!((code, bench.calls()), (1, 4), "{said}");
    assert!(said.contains("found 7 rows in out.jsonl; what is answered there is not sent again"), "{said}");
    let report = bench.report();
    assert_eq!((&report["expected"], &report["restored"], &report["ok"]), (&json!(8), &json!(4), &json!(7)));
    let kept = answers(&bench.text("out.jsonl"));
    assert_eq!(outcomes(&kept), BTreeMap::from([("cancelled", 1), ("ok", 7), ("terminal", 1)]));
    assert_ne!(kept["id-3"]["fingerprint"], "0".repeat(32), "the answer to another request has made room");
    let ordered: Vec<Value> =
        bench.text("ordered.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        ordered.iter().map(|row| row["custom_id"].clone()).collect::<Vec<_>>(),
        (0..8).map(|id| json!(format!("id-{id}"))).collect::<Vec<_>>()
    );

    let (code, said) = bench.stream(&bench.lines(0..8), &["--retry-failed"]).await;
    assert_eq!((code, bench.calls()), (0, 5), "{said}");
    let twice = bench.lines(0..8) + &bench.lines(2..3);
    let (code, said) = bench.stream(&twice, &[]).await;
    assert!(
        code == 2
            && said.contains("standard input: line 9, column 14: `custom_id` \"id-2\" was given on line 3 already"),
        "{said}"
    );
    assert_eq!((bench.calls(), bench.answers().len()), (5, 9));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_in_the_order_of_the_input_has_each_row_as_it_is() {
    let bench = bench().await;
    bench.input(&bench.lines(0..200)).output(&[row(7, "ok"), row(199, "ok"), row(500, "ok"), row(0, "ok")].concat());
    let (code, said) = bench.run(&["--ordered", "ordered.jsonl"]).await;
    assert_eq!(code, 0, "{said}");
    let text = bench.text("ordered.jsonl");
    let ids: Vec<_> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["custom_id"].clone()).collect();
    assert_eq!(ids, (0..200).map(|id| json!(format!("id-{id}"))).collect::<Vec<_>>());
    let output = bench.text("out.jsonl");
    let (copied, all): (HashSet<_>, HashSet<_>) = (text.lines().collect(), output.lines().collect());
    assert!(copied.is_subset(&all) && all.len() == 201);
    for args in
        [&["--output", "-", "--ordered", "x"][..], &["--output", "out.jsonl", "--ordered", "-"], &["--ordered", "x"]]
    {
        let args = [&["--input", "in.jsonl", "--orgs", "orgs.toml"], args].concat();
        let output = command(&args).current_dir(bench.dir.path()).output().await.unwrap();
        assert_eq!((super::code(&output), output.stdout.len()), (2, 0), "{args:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_prints_the_command_that_goes_on() {
    let slow = org(0).requests_per_minute(600.0).latency(Latency::new(200.0, 0.0));
    let bench = Bench::new(Dialect::Anthropic, [slow]).await;
    // Names that a shell would take apart.
    std::fs::create_dir(bench.path("it's $HOME")).unwrap();
    bench.input(&bench.lines(0..40));
    let out = "it's $HOME/out; put.jsonl";
    let args = ["--input", "in.jsonl", "--fresh", "--output", out, "--orgs", "orgs.toml", "--cap", "4", "--quiet"];
    let mut command = command(&args);
    let child = command.current_dir(bench.dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.server.truth().ok() >= 2).await;
    interrupt(&child);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 130, "{}", said(&output));
    let said = said(&output);
    let again = said.lines().find_map(|line| line.strip_prefix("to go on later: ")).unwrap_or_else(|| panic!("{said}"));
    assert!(!again.contains("--fresh"), "{again}");
    let mut shell = Command::new("sh");
    let output = shell.args(["-c", again]).current_dir(bench.dir.path()).output().await.unwrap();
    assert_eq!(code(&output), 0, "{again}: {}", super::said(&output));
    assert_eq!(outcomes(&answers(&bench.text(out))), BTreeMap::from([("ok", 40)]));
    assert_eq!(bench.calls(), 40, "what was answered before is not sent again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_stops_the_run_and_a_later_one_goes_on() {
    let bench = bench().await;
    bench.input(&bench.lines(0..2_000));
    let output = bench.within(32, "--output out.jsonl --no-journal").await;
    let said = said(&output);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.contains("error: out.jsonl cannot be written: ") && said.contains("make room and go on: "), "{said}");
    let (calls, kept) = (bench.calls(), bench.text("out.jsonl"));
    assert!(calls < 2_000, "{calls} calls: admission stops");
    let whole = kept.matches('\n').count() as u64;
    assert!(whole > 10 && !kept.ends_with('\n'), "there is something, and it ends within a row");
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls()), (0, calls + 2_000 - whole), "{said}");
    assert!(bench.text("out.jsonl").starts_with(&kept[..kept.rfind('\n').unwrap()]), "what is written stays");
    assert_eq!(bench.answers().len(), 2_000);
    // A device that is always full can be an output too.
    let full = ["--input", "in.jsonl", "--output", "/dev/full", "--orgs", "orgs.toml"];
    let output = command(&full).current_dir(bench.dir.path()).output().await.unwrap();
    assert!(
        super::code(&output) == 1 && super::said(&output).contains("/dev/full cannot be written"),
        "{}",
        super::said(&output)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn b128_a_slow_reader_of_the_output_slows_admission() {
    let bench = bench().await;
    bench.input(&bench.lines(0..5_000));
    let mut command = command(&["--input", "in.jsonl", "--orgs", "orgs.toml", "--quiet"]);
    let mut child = command.current_dir(bench.dir.path()).stdout(Stdio::piped()).spawn().unwrap();
    // Nobody reads: sooner or later nothing more is sent.
    let (mut calls, mut still) = (0, 0);
    while calls == 0 || still < 10 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        still = if bench.calls() == calls { still + 1 } else { 0 };
        calls = bench.calls();
    }
    // A pipe and a chunk, in rows of 350 bytes or more; the queue, what is worked on, what was read ahead.
    assert!(calls < (65_536 + 262_144) / 350 + 256 + 64 + 1_000, "{calls} calls");
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).await.unwrap();
    assert_eq!((child.wait().await.unwrap().code(), answers(&text).len()), (Some(0), 5_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_that_cannot_grow_stops_the_run_and_a_later_one_goes_on() {
    let bench = bench().await;
    bench.input(&bench.lines(0..3_000).replace("\"max_tokens\":8", "\"max_tokens\":4096"));
    // More than an empty journal, and less than it would take.
    let output = bench.within(1_024, "--output - --journal kept.journal").await;
    let said = said(&output);
    assert_eq!(code(&output), 1, "{said}");
    assert!(said.contains("kept.journal cannot be written: ") && said.contains("Nothing more is sent"), "{said}");
    let calls = bench.calls();
    assert!(calls > 100 && calls < 3_000, "{calls} calls: admission stops");
    bench.output(std::str::from_utf8(&output.stdout).unwrap());
    let answered = bench.answers().values().filter(|row| row["outcome"] == "ok").count() as u64;
    assert!(answered + 20 >= calls, "{answered} of {calls}: what was paid for has its row, though it is not kept");
    let (code, said) = bench.run(&["--journal", "kept.journal"]).await;
    assert_eq!(code, 0, "{said}");
    assert_eq!(bench.calls(), calls + 3_000 - answered, "what has its row is not sent again");
    assert_eq!(outcomes(&bench.answers()), BTreeMap::from([("ok", 3_000)]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_journal_answers_where_the_output_is_gone_and_fresh_sets_it_aside() {
    let bench = bench().await;
    bench.input(&bench.lines(0..5).replace("\"max_tokens\":8", "\"max_tokens\":4096"));
    assert_eq!(bench.run(&[]).await.0, 0);
    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls()), (0, 5), "{said}");
    assert!(said.contains("5 from the journal"), "{said}");
    assert_eq!((&bench.report()["from_journal"], &bench.report()["restored"]), (&json!(5), &json!(0)));
    // What is to be thrown away does not come back, whether this run keeps a journal or not.
    for (more, calls) in [(&["--fresh"][..], 10), (&["--fresh", "--no-journal"], 15), (&["--fresh"], 20)] {
        assert_eq!((bench.run(more).await.0, bench.calls()), (0, calls), "{more:?}");
    }
    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    // Hardly a call goes within this time.
    let (code, said) = bench.run(&["--fresh", "--no-journal", "--deadline", "1ms"]).await;
    assert!(code == 1 && (20..25).contains(&bench.calls()), "{code}, {} calls: {said}", bench.calls());
    std::fs::remove_file(bench.path("out.jsonl")).unwrap();
    let (_, said) = bench.run(&[]).await;
    assert!(!said.contains("from the journal"), "{said}");
    // A run that does not begin leaves it where it is.
    let before = std::fs::read_dir(bench.dir.path()).unwrap().count();
    assert_eq!(bench.run(&["--fresh", "--plot", "no/such/folder.svg"]).await.0, 2);
    assert_eq!(std::fs::read_dir(bench.dir.path()).unwrap().count(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_are_not_there_yet_are_known_to_be_the_same() {
    let bench = bench().await;
    bench.input(&bench.lines(0..2));
    let same = [
        ["--plot", "./out.jsonl"],
        ["--plot", "./out.jsonl.journal"],
        ["--plot", "./out.jsonl.journal.tail"],
        ["--journal", "./out.jsonl"],
    ];
    for more in same {
        let (code, said) = bench.run(&more).await;
        assert!(code == 2 && said.contains("are the same file"), "{more:?}: {said}");
    }
    assert_eq!((bench.calls(), bench.path("out.jsonl").exists()), (0, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_changes_while_it_is_read_ends_the_run() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).requests_per_minute(600.0)]).await;
    bench.input(&bench.lines(0..400));
    let child = bench.files(&["--cap", "4"]).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.server.truth().ok() >= 2).await;
    let mut text = bench.lines(0..400);
    text.push('\n');
    bench.input(&text);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(code(&output), 2, "{}", said(&output));
    assert!(said(&output).contains("in.jsonl: it was changed while it was read"), "{}", said(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_runs_never_write_to_one_output() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    bench.input(&bench.lines(0..10)).output(&(rows(0..2, "ok") + &rows(2..4, "transient")));
    let first = bench.files(&["--grace", "100ms"]).stderr(Stdio::piped()).spawn().unwrap();
    until(|| bench.calls() > 0).await;
    let before = bench.text("out.jsonl");
    // A deadline, so that a run that gets through ends.
    for more in [&["--deadline", "300ms"][..], &["--deadline", "300ms", "--fresh"]] {
        let (code, said) = bench.run(more).await;
        assert!(code == 2 && said.contains("--output out.jsonl: another run is writing to this file"), "{said}");
    }
    let (code, said) = bench.run(&["--dry-run"]).await;
    assert_eq!((code, bench.text("out.jsonl")), (0, before), "looking is free: {said}");
    // A run that is killed leaves no lock.
    let pid = first.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-KILL", &pid]).status().unwrap().success());
    drop(first.wait_with_output().await);
    let (code, said) = bench.run(&["--deadline", "300ms"]).await;
    assert_eq!((code, outcomes(&bench.answers())), (1, BTreeMap::from([("deadline", 8), ("ok", 2)])), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_row_goes_only_where_there_is_a_new_one_also_at_ctrl_c() {
    let bench = Bench::new(Dialect::Anthropic, [org(0).hang(true)]).await;
    bench.output(&rows(0..200, "transient"));
    let args = ["--input", "-", "--output", "out.jsonl", "--orgs", "orgs.toml", "--cap", "4", "--grace", "100ms"];
    let mut command = command(&args);
    command.current_dir(bench.dir.path()).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // More than are alive and read ahead: one has been read and waits for its place. The input does not end.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(bench.lines(0..200).as_bytes()).await.unwrap();
    until(|| bench.calls() > 0).await;
    interrupt(&child);
    let output = child.wait_with_output().await.unwrap();
    drop(stdin);
    assert_eq!(code(&output), 130, "{}", said(&output));
    let ids: Vec<_> = bench.text("out.jsonl").lines().map(|line| line.split('"').nth(3).unwrap().to_owned()).collect();
    let different: HashSet<_> = ids.iter().collect();
    assert_eq!((ids.len(), different.len()), (200, 200), "{}", said(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_to_an_output_stays_a_link() {
    let bench = bench().await;
    std::fs::create_dir(bench.path("there")).unwrap();
    std::fs::write(bench.path("there/real.jsonl"), row(0, "ok") + &row(1, "transient")).unwrap();
    std::os::unix::fs::symlink("there/real.jsonl", bench.path("out.jsonl")).unwrap();
    bench.input(&bench.lines(0..3));
    let (code, said) = bench.run(&[]).await;
    assert_eq!((code, bench.calls()), (0, 2), "{said}");
    assert!(bench.path("out.jsonl").is_symlink());
    assert_eq!(answers(&bench.text("there/real.jsonl")).len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_says_what_would_be_sent_and_changes_nothing() {
    let bench = bench().await;
    let text = rows(0..2, "ok") + &rows(2..4, "transient") + "{\"custom_id\":\"id-4";
    bench.input(&bench.lines(0..9)).output(&text);
    let (code, said) = bench.run(&["--dry-run"]).await;
    assert!(
        code == 0 && said.contains("found 2 answered, 0 failed for good, 2 to be sent again, 0 changed; sending 7"),
        "{said}"
    );
    assert_eq!((bench.calls(), bench.text("out.jsonl")), (0, text));
}

/// The parts by themselves.
mod parts {
    use super::{
        super::{
            ending::Ending,
            resume::{
                bits::Bits,
                command::again,
                join::{Fate, Found, Mark, join},
                seen::{Met, Seen},
                sorted::{Record, Sorter},
            },
        },
        *,
    };
    use proptest::{collection::vec, prelude::*};

    fn sorted(records: Vec<Record>) -> impl Iterator<Item = std::io::Result<Record>> {
        let folder = tempfile::tempdir().unwrap();
        // So small that there are runs of runs.
        let mut sorter = Sorter::with_batch(folder.path(), 2);
        for record in records {
            sorter.push(record).unwrap();
        }
        sorter.finish().iter().unwrap().collect::<Vec<_>>().into_iter()
    }

    fn ending() -> impl Strategy<Value = Ending> {
        prop_oneof![Just(Ending::Ok), Just(Ending::Terminal), Just(Ending::Redrivable)]
    }

    /// What becomes of one id: the row that stays or is sent again, by a plain search.
    fn best(rows: &[(u64, Ending, Option<u128>)], now: Option<u128>) -> Option<(u64, Ending, Option<u128>)> {
        let fits = |print: Option<u128>| now.is_none() || print.is_none() || print == now;
        for ours in [true, false] {
            for ending in [Ending::Ok, Ending::Terminal, Ending::Redrivable] {
                for printed in [true, false] {
                    let fit = |row: &&(u64, Ending, Option<u128>)| {
                        fits(row.2) == ours && row.1 == ending && (now.is_none() || row.2.is_some() == printed)
                    };
                    if let Some(row) = rows.iter().rev().find(fit) {
                        return Some(*row);
                    }
                }
            }
        }
        None
    }

    proptest! {
        #[test]
        fn sorting_on_disk_is_sorting(keys in vec((0u128..50, 0u64..4), 0..700)) {
            let records: Vec<_> = keys.iter().map(|(key, number)| Record { key: *key, number: *number, more: 7 }).collect();
            let mut expected = records.clone();
            expected.sort_unstable();
            let found: Vec<_> = sorted(records).map(Result::unwrap).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn the_join_finds_what_a_map_in_memory_finds(
            items in vec((0u128..12, 0u128..2), 0..14),
            rows in vec((0u128..16, ending(), proptest::option::of(0u128..2)), 0..40),
            retry_failed: bool,
        ) {
            let on_disk = join(
                sorted(items.iter().zip(0..).map(|((id, print), number)| Record { key: *id, number, more: *print }).collect()),
                sorted(rows.iter().zip(0..).map(|((id, ending, print), row)| {
                    let number = Mark { row, ending: *ending, printed: print.is_some() }.pack();
                    Record { key: *id, number, more: print.unwrap_or_default() }
                }).collect()),
                retry_failed,
            ).unwrap();

            let mut by_id: HashMap<u128, Vec<_>> = HashMap::new();
            for ((id, ending, print), row) in rows.iter().zip(0u64..) {
                by_id.entry(*id).or_default().push((row, *ending, *print));
            }
            let mut first: HashMap<u128, (u64, u128)> = HashMap::new();
            let mut twice = None;
            for ((id, print), number) in items.iter().zip(0u64..) {
                match first.get(id) {
                    Some((earlier, _)) => twice = twice.or(Some((number, *earlier))),
                    None => { first.insert(*id, (number, *print)); }
                }
            }
            prop_assert_eq!(on_disk.twice, twice);
            let (mut found, mut done, mut out, mut changed) = (Found::default(), Bits::default(), Bits::default(), None);
            for (id, rows) in &by_id {
                let now = first.get(id).map(|(_, print)| *print);
                let (row, ending, print) = best(rows, now).unwrap();
                for (other, ..) in rows.iter().filter(|other| other.0 != row) {
                    out.set(*other);
                    found.doubled += 1;
                }
                let Some((number, now)) = first.get(id) else { found.gone += 1; continue };
                if print.is_some_and(|print| print != *now) {
                    found.changed += 1;
                    out.set(row);
                    changed = Some(changed.map_or(*number, |known: u64| known.min(*number)));
                } else if ending == Ending::Ok {
                    found.ok += 1;
                    done.set(*number);
                } else if ending == Ending::Terminal && !retry_failed {
                    found.terminal += 1;
                    done.set(*number);
                } else {
                    found.again += 1;
                    out.set(row);
                }
            }
            prop_assert_eq!(on_disk.found, found);
            prop_assert_eq!(on_disk.changed, changed);
            for bit in 0..64 {
                prop_assert_eq!((on_disk.done.get(bit), on_disk.out.get(bit)), (done.get(bit), out.get(bit)), "{}", bit);
            }
            prop_assert_eq!((on_disk.done.ones(), on_disk.out.ones()), (done.ones(), out.ones()));
        }

        #[test]
        fn a_stream_meets_what_a_map_in_memory_would_meet(
            items in vec((0u128..12, 0u128..2), 0..20),
            rows in vec((0u128..12, ending(), proptest::option::of(0u128..2)), 0..20),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let mut sorter = Sorter::with_batch(folder.path(), 3);
            let mut known: HashMap<u128, Vec<_>> = HashMap::new();
            for ((id, ending, print), row) in rows.iter().zip(0u64..) {
                let number = Mark { row, ending: *ending, printed: print.is_some() }.pack();
                sorter.push(Record { key: *id, number, more: print.unwrap_or_default() }).unwrap();
                known.entry(*id).or_default().push((row, *ending, *print));
            }
            let mut seen = Seen::with_bulk(folder.path(), Some(&mut sorter.finish()), false, 3).unwrap();
            let mut lines: HashMap<u128, u64> = HashMap::new();
            for ((id, print), line) in items.iter().zip(1u64..) {
                let met = seen.meet(*id, *print, line).unwrap();
                let expected = match (lines.get(id), known.get(id)) {
                    (Some(earlier), _) => Met::Twice { line: *earlier },
                    (None, None) => Met::New(None),
                    (None, Some(rows)) => match best(rows, None).unwrap() {
                        (_, _, Some(then)) if then != *print => Met::New(Some(Fate::Changed)),
                        (_, Ending::Redrivable, _) => Met::New(Some(Fate::Again)),
                        (_, ending, _) => Met::Kept(Fate::Kept(ending)),
                    },
                };
                prop_assert_eq!(met, expected);
                lines.entry(*id).or_insert(line);
            }
            let order: Vec<_> = seen.order().unwrap().map(|record| record.unwrap().key).collect();
            let mut come: Vec<_> = lines.keys().copied().collect();
            come.sort_unstable();
            prop_assert_eq!(order, come);
        }

        #[test]
        fn a_shell_reads_the_command_as_it_was(words in vec("[ -~é\n]{0,8}", 1..6)) {
            let command = again(["printf".into(), "%s\\0".into()].into_iter().chain(words.iter().map(Into::into)));
            let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
            let expected: String = words.iter().map(|word| format!("{word}\0")).collect();
            prop_assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
        }
    }
}
