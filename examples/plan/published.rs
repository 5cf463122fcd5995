//! What was run and published before there was a planner, beside what it would have said.

use std::{fmt::Write as _, time::Duration};

use tower_quota::plan::{
    BatchModel, Fleet, Forecast, Measured as Report, Objective, PlanError, Tokens, Workload, plan,
};

use crate::{limits::Measured, table, words};

const SONNET: &str = "claude-sonnet-4-5-20250929";

/// One row.
struct Row {
    what: String,
    happened: String,
    said: Vec<(String, Forecast)>,
}

fn only(fleet: &Fleet, names: &[String]) -> Fleet {
    let mut fleet = fleet.clone();
    fleet.orgs.retain(|org| names.contains(&org.name));
    fleet
}

fn capped(fleet: &Fleet, cap: usize) -> Fleet {
    let mut fleet = fleet.clone();
    for (_, limits) in fleet.orgs.iter_mut().flat_map(|org| &mut org.models) {
        limits.cap = Some(cap);
    }
    fleet
}

fn direct(work: &Workload, fleet: &Fleet) -> Result<Forecast, PlanError> {
    Ok(plan(work, fleet)?.direct)
}

fn batch(work: &Workload, fleet: &Fleet) -> Result<Forecast, PlanError> {
    let plan = plan(work, fleet)?;
    Ok(plan.batch.unwrap_or(plan.direct))
}

/// The runs of the file, and those of two issues.
fn rows(measured: &Measured, fleet: &Fleet) -> Result<Vec<Row>, PlanError> {
    let mut rows = vec![];
    for run in &measured.runs {
        let ours = only(fleet, &run.config.orgs);
        // Answers were cut at 64 tokens.
        let work = Workload::new(run.config.n, &run.config.model).output(Tokens::between(16.0, 64.0));
        let mut said = vec![("caps of 100".to_owned(), direct(&work, &ours)?)];
        let most = run.ramp().iter().copied().max().unwrap_or(100);
        if most > 100 {
            said.push((format!("caps of {most}"), direct(&work, &capped(&ours, most))?));
        }
        // What the run itself teaches, asked for the same again.
        let wall = Duration::from_secs_f64(run.wall_s);
        let (work, held) = Report::new(run.config.n, run.config.n, wall).apply(&work, &ours);
        if held.client_rate.is_some() {
            said.push(("fed back".to_owned(), direct(&work, &held)?));
        }
        let orgs = run.config.orgs.join(" and ");
        rows.push(Row {
            what: format!("{} calls, {orgs}, {} in flight an org", words::thousands(run.config.n), steps(run.ramp())),
            happened: format!(
                "{:.1} s, {} a minute",
                run.wall_s,
                words::thousands((run.config.n as f64 / run.wall_s * 60.0) as u64)
            ),
            said,
        });
    }
    let work = Workload::new(141_600, SONNET).objective(Objective::Latency);
    let plateau = fleet.clone().client_rate(3_200.0 / 60.0);
    let of_rows = |rows| fleet.clone().batch(BatchModel::default().chunk(rows));
    rows.push(Row {
        what: "141,600 calls, in batches of 8,000".to_owned(),
        happened: "about 14 h; a batch had no row done after 8 to 9 h, others of 500 took about 5 min".to_owned(),
        said: vec![
            ("batches of 8,000".to_owned(), batch(&work, &of_rows(8_000))?),
            ("batches of 1,000".to_owned(), batch(&work, &of_rows(1_000))?),
            ("direct, a client of 3,200 a minute".to_owned(), direct(&work, &plateau)?),
            ("direct".to_owned(), direct(&work, fleet)?),
        ],
    });
    let work = Workload::new(39_512, SONNET).objective(Objective::Latency);
    rows.push(Row {
        what: "39,512 calls, direct, while a batch of 2,001 had no row done for 16 h".to_owned(),
        happened: "18 min, 2,200 a minute".to_owned(),
        said: vec![
            (
                "direct, a client of 2,200 a minute".to_owned(),
                direct(&work, &fleet.clone().client_rate(2_200.0 / 60.0))?,
            ),
            ("direct".to_owned(), direct(&work, fleet)?),
        ],
    });
    Ok(rows)
}

fn steps(ramp: &[usize]) -> String {
    ramp.iter().map(ToString::to_string).collect::<Vec<_>>().join(", then ")
}

/// All of them, as a table.
///
/// # Errors
/// The planner's.
pub(crate) fn markdown(measured: &Measured, fleet: &Fleet) -> Result<String, PlanError> {
    let mut text = String::from("| run | what happened | the planner, for | says | binds |\n|---|---|---|---|---|\n");
    for row in rows(measured, fleet)? {
        for (nth, (given, said)) in row.said.iter().enumerate() {
            let (what, happened) = if nth == 0 { (row.what.as_str(), row.happened.as_str()) } else { ("", "") };
            let _ = writeln!(
                text,
                "| {what} | {happened} | {given} | {} | {} |",
                table::time(&said.time),
                said.binds.name()
            );
        }
    }
    Ok(text)
}
