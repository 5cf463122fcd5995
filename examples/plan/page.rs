//! The tables of `docs/throughput-guidelines.md`: made here, and put between the page's marks.

use std::fmt::Write as _;

use tower_quota::plan::{Objective, PlanError, Workload, plan};

use crate::{limits::Measured, prices::Prices, published, table, words};

/// What stands between which marks.
///
/// # Errors
/// The planner's.
fn parts(measured: &Measured, prices: &Prices) -> Result<Vec<(&'static str, String)>, PlanError> {
    let fleet = measured.fleet(prices);
    let mut tables = format!("Limits: {}. Prices: {}.\n", measured.source, prices.what);
    let mut crossovers = String::from(
        "| model | balanced goes in batches from | direct, at that number or at a million | in batches |\n|---|---:|---|---|\n",
    );
    for model in measured.models() {
        let _ = write!(tables, "\n### {model}\n\n{}", table::markdown(&table::of_model(model, &fleet)?));
        let of = |n| plan(&Workload::new(n, model).objective(Objective::Balanced), &fleet);
        let crossover = of(1)?.crossover;
        let there = of(crossover.unwrap_or(1_000_000))?;
        let _ = writeln!(
            crossovers,
            "| {model} | {} | {} | {} |",
            crossover.map_or("never".to_owned(), words::thousands),
            table::time(&there.direct.time),
            there.batch.as_ref().map_or(String::new(), |batch| table::time(&batch.time)),
        );
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
