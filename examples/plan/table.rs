//! The decision table: a row for each number of calls, model and objective; as Markdown and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};
use tower_quota::plan::{Estimate, Fleet, Objective, Plan, PlanError, Route, Workload, plan};

use crate::words;

pub(crate) const NUMBERS: [u64; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];
pub(crate) const OBJECTIVES: [Objective; 2] = [Objective::Latency, Objective::Cost];

/// The plans of one model, by number and objective.
///
/// # Errors
/// The planner's.
pub(crate) fn of_model(model: &str, fleet: &Fleet) -> Result<Vec<Plan>, PlanError> {
    let each = NUMBERS.into_iter().flat_map(|n| OBJECTIVES.map(|objective| (n, objective)));
    each.map(|(n, objective)| plan(&Workload::new(n, model).objective(objective), fleet)).collect()
}

/// `1,000,000`; whole thousands and millions are said so.
fn number(n: u64) -> String {
    match n {
        n if n >= 1_000_000 && n % 1_000_000 == 0 => format!("{}M", n / 1_000_000),
        n if n >= 1_000 && n % 1_000 == 0 => format!("{}k", n / 1_000),
        n => words::thousands(n),
    }
}

/// The same figure for all, or each org's.
fn of_each(plan: &Plan, figure: impl Fn(&tower_quota::plan::OrgShare) -> usize) -> String {
    let all: Vec<usize> = plan.orgs.iter().map(figure).filter(|figure| *figure > 0).collect();
    match all.as_slice() {
        [] => String::new(),
        [first, rest @ ..] if rest.iter().all(|other| other == first) => first.to_string(),
        all => all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" / "),
    }
}

/// `1,000 × 4`: rows a batch, and batches an org.
fn chunk(plan: &Plan) -> String {
    let Some(chunk) = plan.chunk else { return String::new() };
    format!("{} × {}", words::thousands(chunk), of_each(plan, |org| org.batches))
}

pub(crate) fn time(time: &Estimate) -> String {
    time.to_string().replace(" .. ", " to ")
}

pub(crate) fn cost(cost: Option<f64>) -> String {
    cost.map_or("unknown".to_owned(), words::money)
}

/// The table of one model.
pub(crate) fn markdown(plans: &[Plan]) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "| N | objective | route | tier | orgs | chunk × batches an org | concurrency an org | wall-clock | cost | binds |"
    );
    let _ = writeln!(text, "|---:|---|---|---|---|---|---|---|---:|---|");
    for plan in plans {
        let orgs: Vec<_> = plan.orgs.iter().map(|org| org.name.as_str()).collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            number(plan.n),
            plan.objective.name(),
            plan.route.name(),
            plan.route.tier(),
            orgs.join(", "),
            chunk(plan),
            of_each(plan, |org| org.concurrency),
            time(&plan.time),
            cost(plan.cost),
            plan.binds.name(),
        );
    }
    text
}

/// One plan, for programs.
pub(crate) fn json(plan: &Plan) -> Value {
    let seconds = |time: &Estimate| {
        json!({
            "p10": round(time.p10.as_secs_f64()),
            "median": round(time.median.as_secs_f64()),
            "p90": round(time.p90.as_secs_f64()),
            "mean": round(time.mean.as_secs_f64()),
        })
    };
    let orgs =
        plan.orgs.iter().map(|org| json!({ "name": org.name, "concurrency": org.concurrency, "batches": org.batches }));
    let orgs: Vec<_> = orgs.collect();
    let (direct, batch) = match plan.route {
        Route::Batch => (0, plan.n),
        Route::Split { direct, batch } => (direct, batch),
        _ => (plan.n, 0),
    };
    json!({
        "n": plan.n,
        "model": plan.model,
        "objective": plan.objective.name(),
        "route": plan.route.name(),
        "rows_direct": direct,
        "rows_in_batches": batch,
        "tier": plan.route.tier(),
        "orgs": orgs,
        "chunk": plan.chunk,
        "wall_s": seconds(&plan.time),
        "cost_usd": plan.cost.map(|cost| (cost * 1e6).round() / 1e6),
        "binds": plan.binds.name(),
        "crossover_n": plan.crossover,
        "direct_wall_s": seconds(&plan.direct.time),
        "batch_wall_s": plan.batch.as_ref().map(|batch| seconds(&batch.time)),
        "reason": plan.reason(),
    })
}

fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
