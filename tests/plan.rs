//! The planner against simulated runs, and its program and page: a sample of what `cargo run --release --example plan -- --validate` does.
//!
//! The figures are printed: `cargo test --test plan -- --nocapture`.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "../examples/plan/feedback.rs"]
mod feedback;
#[path = "../examples/plan/limits.rs"]
mod limits;
#[path = "../examples/plan/page.rs"]
mod page;
#[path = "../examples/dispatch/prices.rs"]
#[allow(dead_code, reason = "the dispatcher uses more of it")]
mod prices;
#[path = "../examples/plan/published.rs"]
mod published;
#[path = "../examples/plan/table.rs"]
mod table;
#[path = "../examples/plan/validate/mod.rs"]
#[allow(dead_code, reason = "the program uses more of it")]
mod validate;
#[path = "../examples/dispatch/words.rs"]
#[allow(dead_code, reason = "the dispatcher uses more of it")]
mod words;

use std::{fs, path::Path, time::Duration};

use limits::Measured;
use prices::Prices;
use tower_quota::plan::{Objective, Route, Workload, plan};
use validate::{Judged, cases::Case, starved};

#[test]
fn twelve_direct_runs_take_what_the_plan_says() {
    let judged: Vec<_> = (0..12).map(|seed| Judged::new(Case::random(seed, 400..800), false).unwrap()).collect();
    let off: Vec<_> = judged.iter().map(Judged::off).collect();
    println!("{off:.3?}");
    let close = off.iter().filter(|off| off.abs() <= 0.15).count();
    assert!(close >= 11, "{close} of 12 within 15 %: {off:.3?}");
    let within = judged.iter().map(|one| one.within).sum::<f64>() / 12.0;
    assert!((0.65..0.92).contains(&within), "{within} of all batch runs were in the range for eight in ten");
}

#[test]
fn a_large_batch_starves_where_the_planners_own_does_not() {
    assert_eq!(starved(20).unwrap(), (20, 0));
}

#[test]
fn the_guidelines_are_what_the_program_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/throughput-guidelines.md");
    let page = fs::read_to_string(path).unwrap();
    let made = page::fill(&page, &Measured::load(None).unwrap(), &Prices::load(None).unwrap()).unwrap();
    // Line by line, so that it is seen which.
    for (page, made) in page.lines().zip(made.lines()) {
        assert_eq!(page, made, "cargo run --example plan -- --write docs/throughput-guidelines.md");
    }
    assert_eq!(page.lines().count(), made.lines().count());
}

#[test]
fn a_page_without_a_mark_is_not_written() {
    let fill = |page: &str| page::fill(page, &Measured::load(None).unwrap(), &Prices::load(None).unwrap());
    assert!(fill("# A page\n").unwrap_err().contains("decisions"));
}

/// Of the dispatcher's own report, its other fields included.
#[test]
fn a_report_of_the_dispatcher_changes_the_next_plan() {
    let report = r#"{"expected":12000,"ok":11000,"restored":900,"from_journal":100,"terminal":1,"wire_calls":10500,"wall_s":600.0,
        "latency_ms":{"p50":2000.0,"p95":4000.0,"p99":9000.0},"tokens":{"input":2000000,"cached":500000,"cache_written":100000,"output":900000},
        "orgs":[{"name":"high_prio","ok":5000,"latency_ms":{"p50":1000.0,"p95":1500.0,"p99":null}},
                {"name":"batch","ok":6000,"latency_ms":{"p50":null,"p95":null,"p99":null}}]}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.json");
    fs::write(&path, report).unwrap();
    let measured = feedback::read(&path).unwrap();
    assert_eq!((measured.rows, measured.calls, measured.wall), (10_000, 10_500, Duration::from_secs(600)));
    let fleet = Measured::load(None).unwrap().fleet(&Prices::load(None).unwrap());
    let before = Workload::new(50_000, "claude-sonnet-4-5-20250929").objective(Objective::Latency);
    let (work, held) = measured.apply(&before, &fleet);
    assert_eq!((work.input.mean, work.output.mean, work.calls_a_row), (260.0, 90.0, 1.05));
    let limits = |name: &str| held.orgs.iter().find(|org| org.name == name).unwrap().models[0].1.clone();
    assert_eq!(limits("high_prio").latency.p50, Duration::from_secs(1));
    assert_eq!(limits("batch").latency.p50, Duration::from_secs(2));
    assert_eq!(plan(&work, &held).unwrap().binds.name(), "client", "17 a second, where the orgs take a hundred");
    fs::write(&path, r#"{"ok":0}"#).unwrap();
    assert!(feedback::read(&path).unwrap_err().contains("report.json"));
}

#[test]
fn the_measured_limits_are_three_orgs_and_three_models() {
    let measured = Measured::load(None).unwrap();
    assert_eq!(measured.models(), ["claude-haiku-4-5-20251001", "claude-opus-4-8", "claude-sonnet-4-5-20250929"]);
    let fleet = measured.fleet(&Prices::load(None).unwrap());
    for model in measured.models() {
        let plans = table::of_model(model, &fleet).unwrap();
        assert_eq!(plans.len(), 12);
        assert!(plans.iter().all(|plan| !plan.orgs.is_empty() && plan.cost.is_some()), "{model}");
        for plan in plans {
            let batches = plan.objective == Objective::Cost && plan.n >= 1_000;
            assert_eq!(plan.route == Route::Batch, batches, "{plan}");
            let orgs = if batches && plan.n == 1_000 { 1 } else { 3 };
            assert_eq!(plan.orgs.len(), orgs, "one batch goes to one org: {plan}");
            assert_eq!(table::json(&plan)["route"], plan.route.name());
        }
    }
}
