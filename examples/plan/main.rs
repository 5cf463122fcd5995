//! How long a job takes, what it costs, and which way it should go, before the first call: the planner of `tower_quota::plan`
//! over measured limits.
//!
//! ```text
//! cargo run --example plan                                             # the decision table
//! cargo run --example plan -- --n 39512 --model sonnet --objective cost --deadline 6h
//! cargo run --example plan -- --n 100000 --report report.json          # from what a run of `dispatch` measured
//! cargo run --example plan -- --write docs/throughput-guidelines.md    # the page's tables
//! cargo run --release --example plan -- --validate                     # plans against simulated runs
//! ```

mod args;
mod feedback;
mod limits;
mod page;
#[path = "../dispatch/prices.rs"]
#[allow(dead_code, reason = "the dispatcher uses more of it")]
mod prices;
mod published;
mod table;
mod validate;
#[path = "../dispatch/words.rs"]
#[allow(dead_code, reason = "the dispatcher uses more of it")]
mod words;

use std::process::ExitCode;

use clap::Parser;
use tower_quota::plan::plan;

use crate::{args::Args, limits::Measured, prices::Prices};

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<ExitCode, String> {
    if args.validate {
        return validate::bars::all(args.cases).map_err(|error| error.to_string());
    }
    let measured = Measured::load(args.limits.as_deref())?;
    let prices = Prices::load(args.prices.as_deref())?;
    if let Some(path) = &args.write {
        let problem = |error: std::io::Error| format!("{}: {error}", path.display());
        let page = std::fs::read_to_string(path).map_err(problem)?;
        std::fs::write(path, page::fill(&page, &measured, &prices)?).map_err(problem)?;
        return Ok(ExitCode::SUCCESS);
    }
    let fleet = measured.fleet(&prices);
    let models = measured.models();
    let word = args.model.to_ascii_lowercase();
    let model =
        models.iter().find(|model| **model == args.model).or_else(|| models.iter().find(|model| model.contains(&word)));
    let known = || format!("no model {:?} in the limits; there are {}", args.model, models.join(", "));
    let plans = match args.workload(model.ok_or_else(known)?) {
        Some(mut work) => {
            let mut fleet = fleet;
            if let Some(report) = &args.report {
                (work, fleet) = feedback::read(report)?.apply(&work, &fleet);
            }
            vec![plan(&work, &fleet).map_err(|error| error.to_string())?]
        }
        None if args.report.is_some() => return Err("--report wants --n: how many calls are left?".to_owned()),
        None => {
            let all = models.iter().map(|model| table::of_model(model, &fleet));
            all.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?.concat()
        }
    };
    if args.json {
        let all: Vec<_> = plans.iter().map(table::json).collect();
        println!("{}", serde_json::to_string_pretty(&all).map_err(|error| error.to_string())?);
    } else if args.n.is_some() {
        plans.iter().for_each(|plan| println!("{plan}"));
    } else {
        for model in models {
            let of: Vec<_> = plans.iter().filter(|plan| plan.model == model).cloned().collect();
            println!("### {model}\n\n{}", table::markdown(&of));
        }
        println!("{}", prices.what);
    }
    Ok(ExitCode::SUCCESS)
}
