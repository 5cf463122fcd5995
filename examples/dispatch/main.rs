//! Sends many requests to a provider's API over all your organisations' quotas at once: a batch of any size in, one line per
//! id out.
//!
//! ```text
//! cargo run --release --example dispatch                       # a demonstration against a simulated provider
//! cargo run --release --example dispatch -- --input requests.jsonl --output answers.jsonl --orgs orgs.toml
//! ```
//!
//! `--help` says all the rest. Data goes to standard output only with `--output -`; progress, warnings and the report go to
//! standard error.

mod args;
mod demo;
mod input;
mod output;
mod panel;
mod report;
mod run;
mod tally;
mod wire;

use std::{
    fmt,
    io::{self, BufReader},
    path::Path,
    process::ExitCode,
};

use clap::Parser;
use tower_quota::org::{Dialect, Org, Orgs};
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, is_standard},
    input::{BadInput, Items, Survey},
    output::{Output, write_atomically},
    panel::{Stderr, say},
    report::Report,
    run::{Feed, Run},
    wire::Wire,
};

/// Why a run does not begin. Exit code 2.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(problem: impl fmt::Display) -> Self {
        Failure(problem.to_string())
    }
}

impl From<BadInput> for Failure {
    fn from(bad: BadInput) -> Self {
        Failure(bad.to_string())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let quiet = if args.quiet { "error" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(quiet));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Stderr).without_time().with_target(false).init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("error: no runtime: {error}"));
            return ExitCode::from(2);
        }
    };
    match runtime.block_on(dispatch(&args)) {
        Ok(code) => ExitCode::from(code),
        Err(Failure(problem)) => {
            say(&format!("error: {problem}"));
            ExitCode::from(2)
        }
    }
}

async fn dispatch(args: &Args) -> Result<u8, Failure> {
    match &args.input {
        None => demonstrate(args).await,
        Some(input) => work(args, input).await,
    }
}

/// Sends made-up requests to the simulated provider.
async fn demonstrate(args: &Args) -> Result<u8, Failure> {
    let demo = demo::start(args).await?;
    let orgs = chosen(args, demo.orgs)?;
    let (dialect, total) = (orgs.dialect(), args.demo_requests);
    if !args.quiet {
        let what = if args.dry_run { "would be sent" } else { "go" };
        say(&format!("{total} requests {what} to a simulated provider at {}", demo.server.base_url()));
        introduce(&orgs);
    }
    if args.dry_run {
        return Ok(0);
    }
    let mut numbers = 1..=total;
    let feed = Feed::new(Some(total), move || Ok(numbers.next().map(|number| demo::item(dialect, number))));
    let code = start(args, feed, orgs, demo.fluid_limit).await?;
    demo.server.shutdown().await;
    Ok(code)
}

/// Sends what the input holds.
async fn work(args: &Args, input: &Path) -> Result<u8, Failure> {
    if let Some(output) = args.output.as_deref().filter(|output| !is_standard(output)) {
        if input.canonicalize().is_ok_and(|input| output.canonicalize().is_ok_and(|output| input == output)) {
            return Err(Failure::new("--output would overwrite --input"));
        }
    }
    let orgs = match &args.orgs {
        Some(path) => Some(from_file(path)?),
        None => None,
    };
    let spoken = args.dialect.map(Dialect::from);
    if let (Some(orgs), Some(dialect)) = (&orgs, spoken) {
        if orgs.dialect() != dialect {
            return Err(Failure::new(format!("--dialect {}: the orgs speak {}", dialect.name(), orgs.dialect().name())));
        }
    }
    let form = orgs.as_ref().map(Orgs::dialect).or(spoken);

    // Only what stays the same can be read twice.
    let whole = std::fs::metadata(input).is_ok_and(|metadata| metadata.is_file()) && !is_standard(input);
    let (form, survey, feed) = if whole {
        let survey = input::survey(input, form)?;
        let mut items = input::open(input, form)?;
        (survey.form, Some(survey), Box::new(move || items.next_item()) as Box<dyn FnMut() -> _ + Send>)
    } else {
        let source: Box<dyn io::Read + Send> = match is_standard(input) {
            true => Box::new(io::stdin()),
            false => Box::new(std::fs::File::open(input).map_err(|error| Failure::new(format!("{}: {error}", input.display())))?),
        };
        let name = if is_standard(input) { "standard input".to_owned() } else { input.display().to_string() };
        let mut items = Items::new(BufReader::with_capacity(1 << 16, source), &name, form).refusing_duplicates();
        let mut first = items.next_item()?;
        (items.form(), None, Box::new(move || first.take().map_or_else(|| items.next_item(), |item| Ok(Some(item)))) as _)
    };
    todo!()
}
