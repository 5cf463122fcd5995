//! A long run measured: `dispatch` as a program of its own over a million ids, against an unlimited provider in this process.
//!
//! ```text
//! cargo run --release --example long_run -- [ITEMS [RUNS]]      # default 1,000,000 and 3; a tenth of them for the memory's growth
//! ```
//!
//! It prints the peak memory of both, what journal and output add to the time of a run without them (so many of each, in turn), and
//! how long it takes to find that everything is answered. Wants a quiet machine and 4 GB of disk in the system's folder for temporary
//! files; a million takes some twenty minutes.

use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::time::Instant;
use tower_quota::sim::{Config, Dialect, Latency, OrgConfig, Server, Sim};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// How long the provider takes to answer: short, so that the program's own time counts.
const ANSWER_MS: f64 = 1.0;

fn main() -> Fallible<()> {
    let mut args = std::env::args().skip(1);
    let items: u64 = args.next().map_or(Ok(1_000_000), |items| items.parse())?;
    // Of which the median counts.
    let runs: usize = args.next().map_or(Ok(3), |runs| runs.parse())?;
    if runs == 0 {
        return Err("no runs, no figures".into());
    }
    let program = program()?;
    // The provider gets threads of its own beside the one that waits for the program.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let server = runtime.block_on(provider()?.serve())?;
    let bench = Bench { dir: tempfile::tempdir()?, program, server };
    bench.orgs()?;
    bench.input("tenth.jsonl", items / 10)?;
    bench.input("all.jsonl", items)?;

    let tenth = bench.kept("tenth.jsonl", "tenth-answers.jsonl")?;
    println!("{} ids: {tenth}", items / 10);
    let (mut with, mut without) = (vec![], vec![]);
    for run in 0..runs {
        let bare = bench.run("all.jsonl", &["--output", "/dev/null", "--no-journal"])?;
        println!("{items} ids without journal, written nowhere: {bare}");
        without.push(bare.wall);
        let output = format!("answers-{run}.jsonl");
        let kept = bench.kept("all.jsonl", &output)?;
        println!("{items} ids with journal and output: {kept}; {:.3} of the memory of a tenth", kept.peak / tenth.peak);
        with.push(kept.wall);

        let before = bench.server.truth().calls();
        let again = bench.kept("all.jsonl", &output)?;
        let sent = bench.server.truth().calls() - before;
        println!("{items} ids again, all answered: {again}; {sent} calls");
        for made in [output.clone(), format!("{output}.journal")] {
            std::fs::remove_file(bench.dir.path().join(made))?;
        }
    }
    println!("journal and output: {:.3} x the time without, medians of {runs}", median(with) / median(without));
    Ok(())
}

fn median(mut walls: Vec<f64>) -> f64 {
    walls.sort_by(f64::total_cmp);
    walls[walls.len() / 2]
}

fn provider() -> Fallible<Sim> {
    let config = Config::new(Dialect::Anthropic).unlimited(true).latency(Latency::new(ANSWER_MS, 0.0));
    let config = ["a", "b", "c"].iter().fold(config, |config, name| config.org(OrgConfig::new(*name, key(name))));
    Ok(Sim::new(config)?)
}

fn key(name: &str) -> String {
    format!("long-run-key-of-{name}")
}

/// The program, built from what stands there now.
fn program() -> Fallible<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let root = env!("CARGO_MANIFEST_DIR");
    let built = Command::new(cargo).args(["build", "--release", "--example", "dispatch"]).current_dir(root).status()?;
    let here = std::env::current_exe()?;
    match built.success() {
        true => Ok(here.parent().unwrap_or(Path::new(".")).join("dispatch")),
        false => Err("dispatch cannot be built".into()),
    }
}

struct Bench {
    dir: tempfile::TempDir,
    program: PathBuf,
    server: Server,
}

/// What a run was seen to take.
struct Taken {
    wall: f64,
    /// MiB.
    peak: f64,
    /// Processor seconds.
    cpu: f64,
}

impl std::fmt::Display for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.2} s, {:.1} s of processor, {:.1} MiB at most", self.wall, self.cpu, self.peak)
    }
}

impl Bench {
    fn orgs(&self) -> Fallible<()> {
        let mut toml = format!("dialect = \"anthropic\"\nbase_url = \"{}\"\n", self.server.base_url());
        for name in ["a", "b", "c"] {
            toml.push_str(&format!("[[org]]\nname = \"{name}\"\nkey = \"{}\"\ncap = 40\n", key(name)));
        }
        Ok(std::fs::write(self.dir.path().join("orgs.toml"), toml)?)
    }

    fn input(&self, name: &str, items: u64) -> Fallible<()> {
        let mut file = BufWriter::new(File::create(self.dir.path().join(name))?);
        for item in 0..items {
            let messages =
                json!([{ "role": "user", "content": format!("Is {item} a prime number? Answer yes or no.") }]);
            let params = json!({ "model": "claude-sonnet-4-5", "max_tokens": 64, "messages": messages });
            writeln!(file, "{}", json!({ "custom_id": format!("item-{item}"), "params": params }))?;
        }
        Ok(file.flush()?)
    }

    fn kept(&self, input: &str, output: &str) -> Fallible<Taken> {
        self.run(input, &["--output", output])
    }

    /// Runs to the end; every id must be answered.
    fn run(&self, input: &str, more: &[&str]) -> Fallible<Taken> {
        let began = Instant::now();
        let mut child = Command::new(&self.program)
            .args(["--quiet", "--input", input, "--orgs", "orgs.toml", "--report", "report.json"])
            .args(more)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .spawn()?;
        // The kernel keeps the peak; the last look is a moment before the end.
        let (mut peak, mut cpu) = (0.0, 0.0);
        let status = loop {
            if let Ok(text) = std::fs::read_to_string(format!("/proc/{}/status", child.id())) {
                let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
                peak = line
                    .and_then(|line| line.split_whitespace().next()?.parse().ok())
                    .map_or(peak, |kib: f64| kib / 1024.0);
            }
            if let Ok(text) = std::fs::read_to_string(format!("/proc/{}/stat", child.id())) {
                let ticks = text
                    .rsplit(") ")
                    .next()
                    .map(|rest| rest.split(' ').skip(11).take(2).filter_map(|t| t.parse::<f64>().ok()).sum::<f64>());
                cpu = ticks.map_or(cpu, |ticks| if ticks > 0.0 { ticks / 100.0 } else { cpu });
            }
            match child.try_wait()? {
                Some(status) => break status,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let wall = began.elapsed().as_secs_f64();
        let report: Value = serde_json::from_slice(&std::fs::read(self.dir.path().join("report.json"))?)?;
        if !status.success() {
            return Err(format!("dispatch ended with {status}: {report}").into());
        }
        Ok(Taken { wall, peak, cpu })
    }
}
