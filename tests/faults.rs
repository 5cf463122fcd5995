//! Faults of every kind, in virtual time: the scenarios `examples/scenarios/faults*.toml` with their bars.
//!
//! The figures are printed: `cargo test --test faults -- --nocapture`.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "../examples/scenarios/colleague.rs"]
mod colleague;
#[path = "../examples/scenarios/copy.rs"]
mod copy;
#[path = "../examples/scenarios/measured.rs"]
#[allow(dead_code, reason = "over HTTP more of it is used")]
mod measured;
#[path = "../examples/scenarios/scenario.rs"]
#[allow(dead_code, reason = "over HTTP more of it is used")]
mod scenario;
#[path = "../examples/scenarios/twin.rs"]
mod twin;

use std::path::Path;

use measured::missed;
use scenario::Scenario;

async fn meets(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scenarios").join(name).with_extension("toml");
    let scenario: Scenario = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut all = vec![];
    for variant in scenario.variants(name) {
        let run = twin::run(&variant, 1).await.unwrap();
        println!(
            "{:<28} {:>6.1} s  {:.4} x  {}  {}",
            variant.name,
            run.wall.as_secs_f64(),
            run.ratio.unwrap_or(f64::NAN),
            run.by_org(),
            run.notes().join("; "),
        );
        all.extend(missed(&scenario, &[run]).into_iter().map(|what| format!("{}: {what}", variant.name)));
    }
    assert!(all.is_empty(), "{all:#?}");
}

#[tokio::test(start_paused = true)]
async fn every_item_is_answered_whatever_becomes_of_single_calls() {
    meets("faults").await;
}

#[tokio::test(start_paused = true)]
async fn so_it_is_where_answers_are_streams() {
    meets("faults-streams").await;
}

#[tokio::test(start_paused = true)]
async fn an_org_that_dies_on_the_way_takes_no_item_with_it() {
    meets("faults-dies").await;
}
