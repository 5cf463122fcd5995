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
//! The simulated provider runs here; each client runs as a process of its own, so that its memory and its share of the
//! machine are its own. Exit code 1 when a bar is missed. Those that would take too long say so, and run in virtual time
//! in `tests/quotas.rs`, as do all `quota-*`.

mod client;
mod colleague;
mod copy;
mod measured;
mod scenario;

use std::{
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
};

use serde::de::DeserializeOwned;
use tower_quota::{
    outcome::BoxError,
    sim::{Config, Server, Sim, Truth},
};

use client::Part;
use colleague::ColleagueReport;
use copy::CopyReport;
use measured::{Measured, median, missed};
use scenario::{Scenario, Variant};

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
        "{:<36} {:>8} {:>8} {:>7} {:>8} {:>5} {:>6} {:>5}  verdict",
        "scenario", "fluid s", "wall s", "ratio", "429s", "lost", "twice", "live"
    );
    let (mut all_met, mut any) = (true, false);
    for file in files {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file)?;
        let scenario: Scenario = toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        for variant in scenario.variants(&stem) {
            let name = &variant.name;
            if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter.as_str())) {
                continue;
            }
            any = true;
            if scenario.virtual_only {
                println!("{name:<36} in virtual time only: cargo test --test quotas");
                continue;
            }
            let mut measured = vec![];
            for run in 0..runs {
                measured.push(measure(&variant, run, show)?);
            }
            let unharmed = measured.iter().all(|run| run.lost == 0 && run.twice == 0);
            all_met &= verdict(&variant, &measured) || report_only && unharmed;
        }
    }
    if !any {
        return Err("no scenario has such a name".into());
    }
    Ok(all_met)
}

/// One run: a fresh provider, fresh client processes.
fn measure(variant: &Variant<'_>, run: u64, show: bool) -> Result<Measured, BoxError> {
    let scenario = variant.scenario;
    let config = variant.provider(run);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let go = |requests, bare| runtime.block_on(attempt(variant, &config, requests, bare));
    let (copies, colleague, truth) = go(scenario.requests, false)?;
    let mut measured = Measured::new(variant, &config, scenario.requests, &copies, colleague, &truth);
    if scenario.against_bare {
        let sum = |copies: &[CopyReport], of: fn(&CopyReport) -> f64| copies.iter().map(of).sum::<f64>();
        let (small, _, _) = go(scenario.requests / 10, false)?;
        let (bare, _, _) = go(scenario.requests, true)?;
        let kib = |copies: &[CopyReport]| sum(copies, |copy| copy.peak_kib as f64);
        measured.memory = Some(kib(&copies) / kib(&small).max(1.0));
        let each = |copies: &[CopyReport]| sum(copies, |copy| copy.cpu_s) * 1e6 / scenario.requests as f64;
        measured.cpu_us = Some((each(&copies), each(&bare)));
        measured.rate = Some(sum(&bare, |copy| copy.wall_s) / sum(&copies, |copy| copy.wall_s));
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

type Attempt = (Vec<CopyReport>, Option<ColleagueReport>, Truth);

async fn attempt(variant: &Variant<'_>, config: &Config, requests: u64, bare: bool) -> Result<Attempt, BoxError> {
    let server = Sim::new(config.clone())?.serve().await?;
    let colleague = variant.scenario.colleague.as_ref().filter(|_| !bare);
    let colleague =
        colleague.map(|colleague| spawn(&server, &Part::Colleague(colleague.orders(config)))).transpose()?;
    let mut copies = vec![];
    for copy in 0..variant.scenario.copies {
        let task = variant.task(config, requests, copy);
        copies.push(spawn(&server, &if bare { Part::Bare(task) } else { Part::Copy(task) })?);
    }
    let mut reports = vec![];
    for copy in copies {
        reports.push(report(copy).await?);
    }
    let colleague = match colleague {
        Some(colleague) => Some(report(colleague).await?),
        None => None,
    };
    Ok((reports, colleague, server.truth()))
}

fn spawn(server: &Server, part: &Part) -> Result<tokio::process::Child, BoxError> {
    // The keys are the simulation's own, so they may stand on a command line.
    let child = tokio::process::Command::new(std::env::current_exe()?)
        .arg("--client")
        .arg(server.base_url().to_string())
        .arg(serde_json::to_string(part)?)
        .stdout(Stdio::piped())
        .spawn()?;
    Ok(child)
}

async fn report<R: DeserializeOwned>(child: tokio::process::Child) -> Result<R, BoxError> {
    let output = child.wait_with_output().await?;
    if !output.status.success() {
        return Err(format!("a client failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn verdict(variant: &Variant<'_>, runs: &[Measured]) -> bool {
    let scenario = variant.scenario;
    let missed = missed(scenario, runs);
    let mut notes = vec![];
    let wall = median(runs.iter().map(|run| run.wall)).unwrap_or_default();
    let ratio = median(runs.iter().filter_map(|run| run.ratio));
    let refused = median(runs.iter().map(|run| run.refused)).unwrap_or(0.0);
    if let Some(memory) = median(runs.iter().filter_map(|run| run.memory)) {
        notes.push(format!("memory {memory:.3} x, {} KiB", runs.first().map_or(0, |run| run.peak_kib)));
    }
    if let Some(rate) = median(runs.iter().filter_map(|run| run.rate)) {
        notes.push(format!("rate {rate:.3} of bare, {:.0}/s", scenario.requests as f64 / wall.as_secs_f64()));
    }
    if let Some((ours, bare)) = runs.iter().find_map(|run| run.cpu_us) {
        notes.push(format!("processor {ours:.1} us a call, bare {bare:.1}"));
    }
    if scenario.after_s > 0.0 {
        let first = median(runs.iter().map(|run| run.refused_at_first)).unwrap_or(0.0);
        notes.push(format!("{:.3} % in the first {} s", first * 100.0, scenario.after_s));
    }
    if scenario.bars.black_hole.is_some() {
        let worst = runs.iter().filter_map(|run| run.black_hole).fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        notes.push(format!("black hole {} then {} a second", worst.0, worst.1));
    }
    let fluid = median(runs.iter().filter_map(|run| run.fluid)).unwrap_or_default();
    println!(
        "{:<36} {:>8.3} {:>8.3} {:>7} {:>7.3}% {:>5} {:>6} {:>5}  {} {}",
        variant.name,
        fluid.as_secs_f64(),
        wall.as_secs_f64(),
        ratio.map_or("-".into(), |ratio| format!("{ratio:.4}")),
        refused * 100.0,
        runs.iter().map(|run| run.lost).sum::<u64>(),
        runs.iter().map(|run| run.twice).sum::<u64>(),
        runs.iter().map(|run| run.live).max().unwrap_or(0),
        if missed.is_empty() { "met".to_owned() } else { format!("MISSED: {}", missed.join(", ")) },
        if notes.is_empty() { String::new() } else { format!("({})", notes.join("; ")) },
    );
    println!("{:<36} {}", "", scenario.about);
    for run in runs {
        let mut notes = vec![run.by_org()];
        notes.extend(run.notes());
        println!(
            "{:<36} {:.4} x, {:.3} % of {} calls refused; {}",
            "",
            run.ratio.unwrap_or(0.0),
            run.refused * 100.0,
            run.calls,
            notes.join("; ")
        );
    }
    missed.is_empty()
}
