//! The dispatcher's JSON report, as far as the planner learns from it.

use std::{path::Path, time::Duration};

use serde::Deserialize;
use tower_quota::plan::Measured;

/// What `dispatch` writes with `--report`.
#[derive(Debug, Deserialize)]
struct Report {
    ok: u64,
    restored: u64,
    from_journal: u64,
    wire_calls: u64,
    wall_s: f64,
    latency_ms: Latency,
    tokens: Tokens,
    orgs: Vec<OrgReport>,
}

#[derive(Debug, Deserialize)]
struct Latency {
    p50: Option<f64>,
    p95: Option<f64>,
}

impl Latency {
    fn both(&self) -> Option<(Duration, Duration)> {
        let of = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok().filter(|took| !took.is_zero());
        let (p50, p95) = (of(self.p50?)?, of(self.p95?)?);
        Some((p50, p95.max(p50)))
    }
}

#[derive(Debug, Deserialize)]
struct Tokens {
    input: u64,
    cached: u64,
    cache_written: u64,
    output: u64,
}

#[derive(Debug, Deserialize)]
struct OrgReport {
    name: String,
    latency_ms: Latency,
}

/// What a report says was measured.
///
/// # Errors
/// If it cannot be read, or says of no row that was answered; the text names it.
pub(crate) fn read(path: &Path) -> Result<Measured, String> {
    let problem = |what: String| format!("{}: {what}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
    of(&text).map_err(problem)
}

fn of(text: &str) -> Result<Measured, String> {
    let report: Report = serde_json::from_str(text).map_err(|error| error.to_string())?;
    // What was answered before cost this run nothing.
    let rows = report.ok.saturating_sub(report.restored + report.from_journal);
    let wall = Duration::try_from_secs_f64(report.wall_s).map_err(|error| error.to_string())?;
    if rows == 0 || report.wire_calls == 0 {
        return Err("the run answered no row, so there is nothing to learn from".to_owned());
    }
    let mut measured = Measured::new(rows, report.wire_calls, wall);
    if let Some((p50, p95)) = report.latency_ms.both() {
        measured = measured.latency(p50, p95);
    }
    for org in &report.orgs {
        if let Some((p50, p95)) = org.latency_ms.both() {
            measured = measured.latency_of(&org.name, p50, p95);
        }
    }
    let Tokens { input, cached, cache_written, output } = report.tokens;
    let input = (input + cached + cache_written) as f64;
    if input > 0.0 {
        measured = measured.tokens(input / rows as f64, output as f64 / rows as f64);
    }
    Ok(measured)
}
