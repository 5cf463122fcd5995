//! The quota law against what it must show: the scenarios `examples/scenarios/quota-*.toml` in virtual time, with their bars.
//!
//! The figures are printed: `cargo test --test quotas -- --nocapture`.
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

use measured::{Measured, missed};
use scenario::Scenario;

fn file(name: &str) -> Scenario {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scenarios").join(name).with_extension("toml");
    toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Three runs, and one of each further variant; panics where their medians miss a bar.
async fn meets(name: &str, scenario: &Scenario) {
    let mut all = vec![];
    for (nth, variant) in scenario.variants(name).into_iter().enumerate() {
        let mut runs = vec![];
        for seed in 1..=if nth == 0 { 3 } else { 1 } {
            let run = twin::run(&variant, seed).await.unwrap();
            show(&format!("{} {seed}", variant.name), &run);
            runs.push(run);
        }
        all.extend(missed(scenario, &runs).into_iter().map(|what| format!("{}: {what}", variant.name)));
    }
    assert!(all.is_empty(), "{all:#?}");
}

fn show(name: &str, run: &Measured) {
    println!(
        "{name:<42} {:>8.1} s  {:.4} x  {:.3} %  {}  {}",
        run.wall.as_secs_f64(),
        run.ratio.unwrap_or(f64::NAN),
        run.refused * 100.0,
        run.by_org(),
        run.notes().join("; "),
    );
}

macro_rules! scenarios {
    ($($(#[$attr:meta])* $test:ident: $file:literal;)*) => {
        $(
            $(#[$attr])*
            #[tokio::test(start_paused = true)]
            async fn $test() {
                meets($file, &file($file)).await;
            }
        )*
    };
}

scenarios! {
    where_requests_bind: "quota-requests";
    where_tokens_bind: "quota-tokens";
    ten_a_second: "quota-10-a-second";
    twenty_six_a_minute: "quota-26-a-minute";
    a_colleague_comes_and_goes: "quota-colleague";
    two_copies: "quota-two-copies";
    two_copies_on_buckets_of_ten: "quota-two-copies-of-ten";
    embeddings: "quota-embeddings";
}
