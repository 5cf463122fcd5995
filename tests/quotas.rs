//! The quota law, and a run amid faults, against what they must show: the scenarios `examples/scenarios/quota-*.toml` and
//! `faults*.toml` in virtual time, with their bars.
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

use std::{path::Path, time::Duration};

use futures_util::FutureExt as _;
use http_body::Body as _;
use http_body_util::BodyExt as _;

use colleague::ColleagueReport;
use measured::{Measured, missed};
use scenario::{Scenario, fluid, without};

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

// The rig itself.

#[tokio::test(start_paused = true)]
async fn a_colleague_alone_takes_what_it_was_given_and_is_refused_nothing() {
    let scenario = Scenario { requests: 0, ..file("quota-colleague") };
    let run = twin::run(&scenario.variants("alone")[0], 1).await.unwrap();
    let did = run.colleague.unwrap();
    assert_eq!((did.calls, did.ok, did.refused), (672, 672, 0), "84 a second for eight seconds");
}

#[test]
fn what_a_colleague_took_is_not_asked_of_us() {
    let scenario = file("quota-colleague");
    let variant = &scenario.variants("")[0];
    let config = variant.provider(0);
    // 440 at once and 220 a second: 3,080 in 12 s.
    assert_eq!(fluid(&config, 3_080, 0, 0).unwrap().as_secs_f64(), 12.0);
    // Of these it took 84 a second for six of them.
    let left = without(&config, "a", 672, 6.0, 14.0);
    assert_eq!(fluid(&left, 3_080 - 504, 0, 0).unwrap().as_secs_f64(), 12.0);
    assert_eq!(fluid(&left, 3_080 - 672 + 2_200, 0, 0).unwrap().as_secs_f64(), 22.0, "and gave it back");
}

#[test]
fn a_fluid_of_tokens_takes_the_mean_call() {
    let scenario = file("quota-tokens");
    let config = scenario.variants("")[0].provider(0);
    let all = |calls: u64| fluid(&config, calls, 250 * calls, 150 * calls).unwrap().as_secs_f64();
    // 120 + 100 + 60 a second, and two seconds' worth at once.
    assert_eq!((all(560), all(840), all(4_760)), (0.0, 1.0, 15.0));
}

#[test]
fn a_prompt_is_as_long_as_it_is_said_to_be_and_the_same_for_all_copies() {
    for name in ["quota-tokens", "quota-embeddings"] {
        let scenario = file(name);
        let variant = &scenario.variants("")[0];
        let task = variant.task(&variant.provider(3), 3_000, 0);
        let bytes = |item| task.request(item).body().size_hint().exact().unwrap();
        let lengths: Vec<u64> = (0..3_000).map(bytes).collect();
        assert!(lengths.iter().all(|bytes| (400..=1_600).contains(bytes) && bytes % 4 == 0));
        let mean = lengths.iter().sum::<u64>() as f64 / 4.0 / 3_000.0;
        assert!((243.0..257.0).contains(&mean), "{mean}");
        assert!(lengths.iter().any(|bytes| *bytes <= 408) && lengths.iter().any(|bytes| *bytes >= 1_592));
        let other = variant.task(&variant.provider(3), 3_000, 0);
        assert_eq!(bytes(7), other.request(7).body().size_hint().exact().unwrap());
        let body: serde_json::Value =
            serde_json::from_slice(&task.request(0).into_body().collect().now_or_never().unwrap().unwrap().to_bytes())
                .unwrap();
        assert!(body["model"].is_string());
    }
}

/// A run that misses nothing, to be made worse.
fn fine() -> Measured {
    Measured {
        wall: Duration::from_secs(10),
        fluid: Some(Duration::from_secs(10)),
        ratio: Some(1.0),
        refused: 0.0,
        refused_at_first: 0.0,
        lost: 0,
        twice: 0,
        live: 1,
        memory: Some(1.0),
        rate: Some(1.0),
        black_hole: Some((1, 1)),
        shared: Some((0.97, vec![0.45, 0.55])),
        colleague: Some(ColleagueReport { calls: 1_000, ok: 990, refused: 10 }),
        requests: 90,
        calls: 100,
        wasted: 5,
        faults: 10,
        expected: 10.0,
        ambiguous: 0,
        refused_keys: 1,
        peak_kib: 1,
        cpu_us: None,
        orgs: vec![],
    }
}

#[test]
fn every_bar_can_be_missed() {
    let bars = r#"
        ratio = 1.01
        refused = 0.01
        colleague_refused = 0.01
        together = 0.97
        unequal = 0.19
        black_hole = { org = "a", first_second = 1, each_second = 1 }
        live = 1
        memory = 1.1
        rate = 0.8
        wire = 1.1
        refused_keys = 1
    "#;
    let scenario = Scenario { bars: toml::from_str(bars).unwrap(), ..file("quota-requests") };
    assert_eq!(missed(&scenario, &[fine()]), Vec::<String>::new());
    let worse: [fn(&mut Measured); 15] = [
        |run| run.ratio = Some(1.011),
        |run| run.ratio = None,
        |run| run.refused = 0.011,
        |run| run.lost = 1,
        |run| run.twice = 1,
        |run| run.live = 2,
        |run| run.memory = Some(1.11),
        |run| run.rate = Some(0.79),
        |run| run.black_hole = Some((2, 1)),
        |run| run.black_hole = Some((1, 2)),
        |run| run.colleague.as_mut().unwrap().refused = 11,
        |run| run.shared.as_mut().unwrap().0 = 0.969,
        |run| run.shared.as_mut().unwrap().1 = vec![0.44, 0.56],
        |run| run.calls = 111,
        |run| run.refused_keys = 2,
    ];
    for (nth, worse) in worse.iter().enumerate() {
        let mut run = fine();
        worse(&mut run);
        assert_eq!(missed(&scenario, std::slice::from_ref(&run)).len(), 1, "{nth}");
        let of_three = missed(&scenario, &[fine(), run, fine()]).len();
        // What must never happen is asked of every run, the rest of the median.
        let of_each = [3, 4, 5, 8, 9].contains(&nth);
        assert_eq!(of_three, usize::from(of_each), "{nth}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_sum_of_tokens_is_but_one_of_them_calls_cost_no_more_of_it() {
    // 7.3 calls a second, and 30 at once: 50 s, and some seconds for the slowest of the last. A call's input is nearly as much as the
    // bucket of the output holds.
    let scenario = r#"
        about = "Answers cost output tokens; what is left of tokens is what is left of output."
        requests = 400
        prompt_tokens = [854, 866]
        bars = { ratio = 1.2, refused = 0.01 }
        [provider]
        round_tokens = false
        latency = { p50_ms = 808.0, sigma = 0.65 }
        [[provider.orgs]]
        name = "a"
        key = "key-a"
        requests_per_minute = 4713.0
        output_tokens_per_minute = 16034.0
        output_tokens_range = [5, 68]
        capacity_s = 4.1
    "#;
    meets("output alone", &toml::from_str(scenario).unwrap()).await;
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
    faults_of_every_kind: "faults";
    the_same_in_streams: "faults-streams";
    an_org_that_dies_on_the_way: "faults-dies";
}
