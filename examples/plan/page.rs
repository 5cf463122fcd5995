//! The tables of `docs/throughput-guidelines.md`: made here, and put between the page's marks.

use std::fmt::Write as _;

use tower_quota::plan::{Fleet, Objective, PlanError, Workload, plan};

use crate::{limits::Measured, prices::Prices, published, table, words};

/// What stands between which marks.
///
/// # Errors
/// The planner's.
fn parts(measured: &Measured, prices: &Prices) -> Result<Vec<(&'static str, String)>, PlanError> {
    let fleet = measured.fleet(prices);
    let mut tables = format!("Limits: {}. Prices: {}.\n", measured.source, prices.what);
    let mut sixteen = fleet.clone();
    sixteen.orgs.iter_mut().for_each(|org| org.batches = 16);
    let slow = |fleet: &Fleet| fleet.clone().client_rate(3_200.0 / 60.0);
    let fleets = [fleet.clone(), slow(&fleet), sixteen.clone(), slow(&sixteen)];
    let mut crossovers = String::from(
        "| model | as measured | a client of 3,200 calls a minute | 16 batches an org at once | both | a million: direct | in batches |\n\
         |---|---:|---:|---:|---:|---|---|\n",
    );
    for model in measured.models() {
        let _ = write!(tables, "\n### {model}\n\n{}", table::markdown(&table::of_model(model, &fleet)?));
        let _ = write!(crossovers, "| {model} |");
        let work = Workload::new(1_000_000, model).objective(Objective::Balanced);
        for fleet in &fleets {
            let from = plan(&work, fleet)?.crossover;
            let _ = write!(crossovers, " {} |", from.map_or("never".to_owned(), |from| words::about(from as f64)));
        }
        let plan = plan(&work, &fleet)?;
        let batch = plan.batch.as_ref().map_or(String::new(), |batch| table::time(&batch.time));
        let _ = writeln!(crossovers, " {} | {batch} |", table::time(&plan.direct.time));
    }
    Ok(vec![("decisions", tables), ("crossovers", crossovers), ("published", published::markdown(measured, &fleet)?)])
}

/// The page with its tables made anew.
///
/// # Errors
/// If a mark is missing, or the planner's.
pub(crate) fn fill(page: &str, measured: &Measured, prices: &Prices) -> Result<String, String> {
    let mut page = page.to_owned();
    for (name, text) in parts(measured, prices).map_err(|error| error.to_string())? {
        let (begin, end) = (format!("<!-- made by the program: {name} -->\n"), format!("<!-- end of {name} -->"));
        let from = page.find(&begin).ok_or_else(|| format!("the page has no mark {begin:?}"))? + begin.len();
        let to = page[from..].find(&end).ok_or_else(|| format!("the page has no mark {end:?}"))? + from;
        page.replace_range(from..to, &format!("\n{text}\n"));
    }
    Ok(page)
}
