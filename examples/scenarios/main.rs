//! Runs the scenarios beside this file over real HTTP on loopback and says whether each bar is met.
//!
//! ```text
//! cargo run --release --example scenarios            all, medians of three
//! cargo run --release --example scenarios -- demo    those whose name contains "demo"
//!                                  --runs 1          one run each
//!                                  --report-only     exit 1 only when an item is lost or answered twice
//!                                  --show            what each org did, tenth by tenth of a second
//! ```
//!
//! The simulated provider runs here; the client runs as a process of its own, so that its memory and its share of the
//! machine are its own. Exit code 1 when a bar is missed.

mod client;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::Duration,
};

use serde::Deserialize;
use tower_quota::sim::{BIN, Config, Dialect, Sim, Truth};

use client::{ClientReport, ClientTask};

type BoxError = Box<dyn Error + Send + Sync>;

/// A scenario file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    about: String,
    requests: u64,
    #[serde(default = "anthropic")]
    dialects: Vec<Dialect>,
    #[serde(default)]
    bars: Bars,
    /// The start, reported apart: what must be found out there is not held against the bars.
    #[serde(default)]
    after_s: f64,
    /// Runs the bare client and a tenth of the items beside, for the bars that compare.
    #[serde(default)]
    against_bare: bool,
    /// The most calls in flight an org, instead of the default.
    cap: Option<usize>,
    provider: Config,
}

fn anthropic() -> Vec<Dialect> {
    vec![Dialect::Anthropic]
}

/// What must be met; what is absent is not asked.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Bars {
    /// The most times the fluid limit.
    ratio: Option<f64>,
    /// The most 429s, as a part of all calls.
    refused: Option<f64>,
    /// This org refuses everything: the most calls in its first second, and in any second after.
    black_hole: Option<BlackHole>,
    /// The most logical requests alive.
    live: Option<usize>,
    /// The most peak memory against a tenth of the items.
    memory: Option<f64>,
    /// The least rate against the bare client.
    rate: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BlackHole {
    org: String,
    first_second: u64,
    each_second: u64,
}

/// One run, or the median of several.
#[derive(Clone, Debug)]
struct Measured {
    wall: Duration,
    fluid: Option<Duration>,
    ratio: Option<f64>,
    refused: f64,
    /// The same in the start that is reported apart.
    refused_at_first: f64,
    lost: u64,
    twice: u64,
    live: usize,
    memory: Option<f64>,
    rate: Option<f64>,
    black_hole: Option<(u64, u64)>,
    calls: u64,
    peak_kib: u64,
    /// Processor time a call of the client process, and of the bare one, in microseconds.
    cpu_us: Option<(f64, f64)>,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match args.first().map(String::as_str) {
        Some("--client") => client::run(&args[1..]),
        _ => scenarios(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("scenarios: {error}");
            ExitCode::from(2)
        }
    }
}

fn scenarios(args: &[String]) -> Result<bool, BoxError> {
    let (mut runs, mut show, mut report_only) = (3, false, false);
    let mut filters = vec![];
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--show" => show = true,
            "--report-only" => report_only = true,
            "--runs" => runs = args.next().ok_or("--runs takes a number")?.parse()?,
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}").into()),
            filter => filters.push(filter.to_owned()),
        }
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scenarios");
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    files.retain(|file| file.extension().is_some_and(|ext| ext == "toml"));
    files.sort();
    println!(
        "{:<34} {:>8} {:>8} {:>7} {:>8} {:>5} {:>6} {:>5}  verdict",
        "scenario", "fluid s", "wall s", "ratio", "429s", "lost", "twice", "live"
    );
    let (mut all_met, mut any) = (true, false);
    for file in files {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file)?;
        let scenario: Scenario = toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        for dialect in &scenario.dialects {
            let name = format!("{stem} ({})", dialect.name());
            if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
                continue;
            }
            any = true;
            let mut measured = vec![];
            for run in 0..runs {
                measured.push(measure(&scenario, *dialect, run, show)?);
            }
            let unharmed = measured.iter().all(|run| run.lost == 0 && run.twice == 0);
            all_met &= verdict(&name, &scenario, &measured) || report_only && unharmed;
        }
    }
    if !any {
        return Err("no scenario has such a name".into());
    }
    Ok(all_met)
}

/// One run: a fresh provider, a fresh client process.
fn measure(scenario: &Scenario, dialect: Dialect, run: u64, show: bool) -> Result<Measured, BoxError> {
    let mut config = scenario.provider.clone();
    config.dialect = dialect;
    config.seed += run;
    let fluid = config.fluid_limit(scenario.requests);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (report, truth) = runtime.block_on(attempt(&config, scenario, scenario.requests, false))?;
    let mut measured = Measured {
        wall: report.wall(),
        fluid,
        ratio: fluid.filter(|fluid| !fluid.is_zero()).map(|fluid| report.wall().div_duration_f64(fluid)),
        refused: refused(&truth, scenario.after_s, f64::INFINITY),
        refused_at_first: refused(&truth, 0.0, scenario.after_s),
        lost: scenario.requests - report.ok,
        twice: truth.answered_more,
        live: report.peak_live,
        memory: None,
        rate: None,
        black_hole: scenario.bars.black_hole.as_ref().map(|bar| black_hole(&truth, &bar.org)),
        calls: truth.calls(),
        peak_kib: report.peak_kib,
        cpu_us: None,
    };
    if scenario.against_bare {
        let (small, _) = runtime.block_on(attempt(&config, scenario, scenario.requests / 10, false))?;
        let (bare, _) = runtime.block_on(attempt(&config, scenario, scenario.requests, true))?;
        measured.memory = Some(report.peak_kib as f64 / small.peak_kib.max(1) as f64);
        let each = |report: &ClientReport| report.cpu_s * 1e6 / scenario.requests as f64;
        measured.cpu_us = Some((each(&report), each(&bare)));
        measured.rate = Some(bare.wall().div_duration_f64(report.wall()));
    }
    if show {
        for org in &truth.orgs {
            println!(
                "    {}: {} calls, {} ok, {} refused, peak {}",
                org.name, org.calls, org.ok, org.throttled_429, org.peak_in_flight
            );
            let bins = org.timeline.iter().map(|bin| match bin.throttled_429 {
                0 => bin.ok.to_string(),
                refused => format!("{}!{refused}", bin.ok),
            });
            println!("      answered in each 0.1 s (! refused): {}", bins.collect::<Vec<_>>().join(" "));
        }
    }
    Ok(measured)
}

async fn attempt(
    config: &Config,
    scenario: &Scenario,
    requests: u64,
    bare: bool,
) -> Result<(ClientReport, Truth), BoxError> {
    let server = Sim::new(config.clone())?.serve().await?;
    let task = ClientTask {
        base_url: server.base_url().to_string(),
        openai: config.dialect == Dialect::OpenAi,
        requests,
        bare,
        cap: scenario.cap,
        orgs: config.orgs.iter().map(|org| (org.name.clone(), org.key.expose().to_owned())).collect(),
    };
    // The keys are the simulation's own, so they may stand on a command line.
    let child = tokio::process::Command::new(std::env::current_exe()?)
        .arg("--client")
        .arg(serde_json::to_string(&task)?)
        .stdout(Stdio::piped())
        .spawn()?;
    let output = child.wait_with_output().await?;
    if !output.status.success() {
        return Err(format!("the client failed: {}", output.status).into());
    }
    Ok((serde_json::from_slice(&output.stdout)?, server.truth()))
}

/// The part of calls answered between these seconds that were refused.
fn refused(truth: &Truth, from: f64, to: f64) -> f64 {
    let bin = |seconds: f64| (seconds / BIN.as_secs_f64()) as usize;
    let bins = truth.orgs.iter().flat_map(|org| org.timeline.iter().take(bin(to)).skip(bin(from)));
    let (ok, refused) = bins.fold((0, 0), |sum, bin| (sum.0 + bin.ok, sum.1 + bin.throttled_429));
    refused as f64 / (ok + refused).max(1) as f64
}

/// Calls to a black hole in its first second, and the most in any second after.
fn black_hole(truth: &Truth, org: &str) -> (u64, u64) {
    let Some(org) = truth.org(org) else { return (u64::MAX, u64::MAX) };
    let first = org.first_call.unwrap_or_default();
    let mut seconds = std::collections::BTreeMap::new();
    for arrival in &org.arrivals {
        *seconds.entry(arrival.saturating_sub(first).as_secs()).or_insert(0) += 1;
    }
    let first_second = seconds.remove(&0).unwrap_or(0);
    (first_second, seconds.into_values().max().unwrap_or(0))
}

fn median<T: PartialOrd + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    values.get(values.len() / 2).copied()
}

fn verdict(name: &str, scenario: &Scenario, runs: &[Measured]) -> bool {
    let bars = &scenario.bars;
    let mut missed = vec![];
    let mut notes = vec![];
    let wall = median(runs.iter().map(|run| run.wall)).unwrap_or_default();
    let ratio = median(runs.iter().filter_map(|run| run.ratio));
    let refused = median(runs.iter().map(|run| run.refused)).unwrap_or(0.0);
    let lost: u64 = runs.iter().map(|run| run.lost).sum();
    let twice: u64 = runs.iter().map(|run| run.twice).sum();
    let live = runs.iter().map(|run| run.live).max().unwrap_or(0);
    // What must never happen is asked of every run, not of the median.
    if lost > 0 {
        missed.push(format!("{lost} lost"));
    }
    if twice > 0 {
        missed.push(format!("{twice} answered twice"));
    }
    let mut at_most = |what: &str, is: f64, bar: Option<f64>| {
        if let Some(bar) = bar.filter(|bar| is > *bar) {
            missed.push(format!("{what} {is:.4} > {bar}"));
        }
    };
    at_most("ratio", ratio.unwrap_or(0.0), bars.ratio);
    at_most("refused", refused, bars.refused);
    at_most("live", live as f64, bars.live.map(|live| live as f64));
    if let Some(memory) = median(runs.iter().filter_map(|run| run.memory)) {
        at_most("memory", memory, bars.memory);
        notes.push(format!("memory {memory:.3} x, {} KiB", runs.first().map_or(0, |run| run.peak_kib)));
    }
    if let Some(rate) = median(runs.iter().filter_map(|run| run.rate)) {
        at_most("bare client's advantage", 1.0 / rate, bars.rate.map(|rate| 1.0 / rate));
        notes.push(format!("rate {rate:.3} of bare, {:.0}/s", scenario.requests as f64 / wall.as_secs_f64()));
    }
    if let Some((ours, bare)) = runs.iter().find_map(|run| run.cpu_us) {
        notes.push(format!("processor {ours:.1} us a call, bare {bare:.1}"));
    }
    if scenario.after_s > 0.0 {
        let first = median(runs.iter().map(|run| run.refused_at_first)).unwrap_or(0.0);
        notes.push(format!("{:.3} % in the first {} s", first * 100.0, scenario.after_s));
    }
    if let Some(bar) = &bars.black_hole {
        let worst = runs.iter().filter_map(|run| run.black_hole).fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        at_most("black hole's first second", worst.0 as f64, Some(bar.first_second as f64));
        at_most("black hole's later seconds", worst.1 as f64, Some(bar.each_second as f64));
        notes.push(format!("black hole {} then {} a second", worst.0, worst.1));
    }
    let fluid = runs.first().and_then(|run| run.fluid).unwrap_or_default();
    println!(
        "{name:<34} {:>8.3} {:>8.3} {:>7} {:>7.3}% {lost:>5} {twice:>6} {live:>5}  {} {}",
        fluid.as_secs_f64(),
        wall.as_secs_f64(),
        ratio.map_or("-".into(), |ratio| format!("{ratio:.4}")),
        refused * 100.0,
        if missed.is_empty() { "met".to_owned() } else { format!("MISSED: {}", missed.join(", ")) },
        if notes.is_empty() { String::new() } else { format!("({})", notes.join("; ")) },
    );
    if runs.len() > 1 {
        let spread: Vec<_> = runs
            .iter()
            .map(|run| format!("{:.4}/{:.3}%/{}", run.ratio.unwrap_or(0.0), run.refused * 100.0, run.calls))
            .collect();
        println!("{:<34} {}  [{}]", "", scenario.about, spread.join("  "));
    }
    missed.is_empty()
}
