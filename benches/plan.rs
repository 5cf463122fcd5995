//! What one plan takes: every row of the decision table and of the crossovers, and the 200 workloads and fleets of
//! `examples/plan --validate`. Prints the mean and the worst (the least of 25 of each, processor time), and gives criterion the worst.
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[path = "../examples/plan/validate/cases.rs"]
#[allow(dead_code, reason = "the program uses more of it")]
mod cases;
#[path = "../examples/plan/limits.rs"]
#[allow(dead_code, reason = "the program uses more of it")]
mod limits;
#[path = "../examples/dispatch/prices.rs"]
#[allow(dead_code, reason = "the dispatcher uses more of it")]
mod prices;

use std::{hint::black_box, time::Duration};

use criterion::Criterion;
use rustix::time::{ClockId, clock_gettime};
use tower_quota::plan::{Fleet, Objective, Workload, plan};

use cases::Case;
use limits::Measured;
use prices::Prices;

/// A question, and a name for it.
struct Asked {
    name: String,
    work: Workload,
    fleet: Fleet,
}

fn all() -> Vec<Asked> {
    let mut all = vec![];
    let mut ask = |name: String, work: &Workload, fleet: &Fleet| {
        all.push(Asked { name, work: work.clone(), fleet: fleet.clone() });
    };
    let measured = Measured::load(None).unwrap();
    let fleet = measured.fleet(&Prices::load(None).unwrap());
    let mut wide = fleet.clone();
    wide.orgs.iter_mut().for_each(|org| org.batches = 16);
    for model in measured.models() {
        for n in [10, 100, 1_000, 10_000, 100_000, 1_000_000] {
            for objective in [Objective::Latency, Objective::Cost, Objective::Balanced] {
                let work = Workload::new(n, model).objective(objective);
                ask(format!("{n} of {model}, {}", objective.name()), &work, &fleet);
                ask(format!("the same, 16 batches an org: {n} of {model}"), &work, &wide);
            }
        }
    }
    for seed in 0..200 {
        let case = Case::random(seed, 800..4_000);
        let (mut work, fleet) = (case.workload(), case.fleet());
        ask(format!("case {seed}"), &work, &fleet);
        work.n = case.rows;
        ask(format!("case {seed}, its {} rows in batches", case.rows), &work.objective(Objective::Cost), &fleet);
    }
    all
}

fn took(asked: &Asked) -> Duration {
    let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let begin = now();
    black_box(plan(&asked.work, &asked.fleet)).unwrap();
    now() - begin
}

fn main() {
    let all = all();
    let least = |asked: &Asked| (0..25).map(|_| took(asked)).min().unwrap();
    let times: Vec<_> = all.iter().map(|asked| (least(asked), asked)).collect();
    let (most, worst) = times.iter().max_by_key(|(time, _)| *time).unwrap();
    let mean = times.iter().map(|(time, _)| *time).sum::<Duration>() / all.len() as u32;
    println!("{} plans: {mean:.1?} in the mean, at worst {most:.1?} ({})", all.len(), worst.name);
    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("plan, the worst", |b| b.iter(|| plan(black_box(&worst.work), &worst.fleet)));
    criterion.final_summary();
}
