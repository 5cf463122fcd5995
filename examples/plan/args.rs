//! The command line.

use std::{path::PathBuf, time::Duration};

use clap::Parser;
use tower_quota::plan::{Objective, Tokens, Workload};

/// How long a job takes, what it costs, and which way it should go: before the first call.
///
/// Without --n the decision table of all models; with it the plan of one workload. Limits are those of measured-limits.json beside the
/// program, unless --limits names others.
#[derive(Debug, Parser)]
#[command(name = "plan")]
pub(crate) struct Args {
    /// How many calls are left to be answered; what is answered already does not count.
    #[arg(long)]
    pub(crate) n: Option<u64>,
    /// The model: its id as in the limits, or a word of it (sonnet, haiku, opus).
    #[arg(long, default_value = "sonnet")]
    pub(crate) model: String,
    /// Tokens of a prompt: the mean, and after a colon what 95 in a hundred do not exceed.
    #[arg(long, value_parser = tokens, value_name = "MEAN[:P95]")]
    input: Option<Tokens>,
    /// Tokens of an answer, likewise.
    #[arg(long, value_parser = tokens, value_name = "MEAN[:P95]")]
    output: Option<Tokens>,
    /// latency, cost or balanced.
    #[arg(long, value_parser = objective, default_value = "balanced")]
    objective: Objective,
    /// When all must be answered, from now: 90min, 6h.
    #[arg(long, value_parser = humantime::parse_duration)]
    deadline: Option<Duration>,
    /// What a run of `dispatch` reported (its --report): the plan predicts from what was measured.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Other limits, in the form of measured-limits.json.
    #[arg(long, value_name = "FILE")]
    pub(crate) limits: Option<PathBuf>,
    /// Other prices, in the form of examples/dispatch/prices.toml.
    #[arg(long, value_name = "FILE")]
    pub(crate) prices: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Makes the tables of this page anew (docs/throughput-guidelines.md).
    #[arg(long, value_name = "FILE", conflicts_with_all = ["n", "report", "json"])]
    pub(crate) write: Option<PathBuf>,
    /// Compares plans with simulated runs, and exits with 1 if a bar is missed.
    #[arg(long, conflicts_with_all = ["n", "report", "json", "write"])]
    pub(crate) validate: bool,
    /// How many workloads and fleets.
    #[arg(long, default_value_t = 200, requires = "validate")]
    pub(crate) cases: u64,
}

impl Args {
    /// The workload of the command line, if it names one.
    pub(crate) fn workload(&self, model: &str) -> Option<Workload> {
        let mut work = Workload::new(self.n?, model).objective(self.objective);
        work.input = self.input.unwrap_or(work.input);
        work.output = self.output.unwrap_or(work.output);
        work.deadline = self.deadline;
        Some(work)
    }
}

fn tokens(text: &str) -> Result<Tokens, String> {
    let of = |text: &str| {
        let figure = text.parse::<f64>().ok().filter(|figure| figure.is_finite() && *figure >= 0.0);
        figure.ok_or_else(|| format!("{text:?} is no number of tokens"))
    };
    let Some((mean, p95)) = text.split_once(':') else { return Ok(Tokens::fixed(of(text)?)) };
    let (mean, p95) = (of(mean)?, of(p95)?);
    if p95 < mean {
        return Err(format!("95 in a hundred cannot be below {p95} where the mean is {mean}"));
    }
    Ok(Tokens::new(mean, p95))
}

fn objective(text: &str) -> Result<Objective, String> {
    let all = [Objective::Latency, Objective::Cost, Objective::Balanced];
    all.into_iter().find(|one| one.name() == text).ok_or_else(|| "latency, cost or balanced".to_owned())
}
