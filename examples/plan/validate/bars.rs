//! All cases, and the bars they must meet.

use std::{process::ExitCode, time::SystemTime};

use tower_quota::{outcome::BoxError, plan::plan};

use super::{Judged, cases::Case, starved};

/// Calls of a case on the direct path.
pub(crate) const CALLS: std::ops::Range<u64> = 800..4_000;

/// Runs so many cases, prints each and then the bars; exit code 1 if one is missed.
///
/// # Errors
/// If a run fails.
pub(crate) fn all(cases: u64) -> Result<ExitCode, BoxError> {
    let asked: Vec<_> =
        (0..cases).map(|seed| Case::random(seed, CALLS)).map(|case| (case.workload(), case.fleet())).collect();
    let begin = SystemTime::now();
    let planned = asked.iter().filter(|(work, fleet)| plan(work, fleet).is_ok()).count();
    let each = begin.elapsed().unwrap_or_default().as_secs_f64() * 1e6 / planned.max(1) as f64;
    let mut judged = vec![];
    for seed in 0..cases {
        let one = Judged::new(Case::random(seed, CALLS), true)?;
        println!("{}", one.line());
        judged.push(one);
    }
    let count = judged.len() as f64;
    let part = |is: &dyn Fn(&Judged) -> bool| judged.iter().filter(|one| is(one)).count() as f64 / count;
    let within = judged.iter().map(|one| one.within).sum::<f64>() / count;
    let (of_large, of_own) = starved(100)?;
    let mut missed = false;
    println!("\n| what | figure | bar |\n|---|---|---|");
    let mut bar = |what: &str, figure: f64, least: f64, most: f64| {
        let met = (least..=most).contains(&figure);
        missed |= !met;
        let bar = if most < 1.0 { format!("{least} to {most}") } else { format!("at least {least}") };
        println!("| {what} | {figure:.3} | {bar}{} |", if met { "" } else { ": **missed**" });
    };
    bar("direct time within 15 %", part(&|one| one.off().abs() <= 0.15), 0.9, 1.0);
    bar("batch time within the predicted 80 % range", within, 0.75, 0.85);
    bar("binding limit right, or one that binds alike", part(&|one| one.binds().2), 0.9, 1.0);
    bar("chosen route at most 5 % worse than the better", part(&|one| one.regret() <= 0.05), 0.9, 1.0);
    bar(
        "of 100 runs in batches of 8,000 at a provider that starves them, some batch given up",
        of_large as f64 / 100.0,
        1.0,
        1.0,
    );
    bar("of the same in the planner's own, none given up", 1.0 - of_own as f64 / 100.0, 1.0, 1.0);
    let mean = judged.iter().map(|one| one.off()).sum::<f64>() / count;
    println!(
        "\nof {cases} cases: a plan takes {each:.0} µs; direct within 10 % {:.3}, within 5 % {:.3}, in the mean {:+.1} % off; binding limit right to the letter {:.3}; refused calls {:.3} % in the mean",
        part(&|one| one.off().abs() <= 0.10),
        part(&|one| one.off().abs() <= 0.05),
        mean * 100.0,
        part(&|one| one.binds().1),
        judged.iter().map(|one| one.refused).sum::<f64>() / count * 100.0,
    );
    Ok(ExitCode::from(u8::from(missed)))
}
