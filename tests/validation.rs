//! The validation of the mission, small: up to 3,000 of its 141,600 judge calls, in virtual time. The whole of it, and over HTTP:
//! `cargo run --release --example validation`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../examples/validation/batches.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod batches;
#[path = "../examples/validation/earlier.rs"]
mod earlier;
#[path = "../examples/validation/ours.rs"]
mod ours;
#[path = "../examples/validation/run.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod run;
#[path = "../examples/validation/simulated.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod simulated;
#[path = "../examples/validation/work.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod work;

use std::time::Duration;

use run::Run;
use work::Work;

const CALLS: u64 = 3_000;

#[track_caller]
fn whole(run: &Run, calls: u64) {
    assert_eq!((run.once, run.lost, run.failed, run.twice), (calls, 0, 0, 0), "{run:?}");
    assert_eq!(run.different, calls, "an answer went to another id: {run:?}");
    assert!(run.peaks.iter().all(|&peak| peak <= 100), "{:?}", run.peaks);
}

#[tokio::test(start_paused = true)]
async fn ours_is_as_quick_as_the_caps_allow_and_loses_nothing() {
    let work = Work::new(CALLS);
    let ours = simulated::ours(&work).await.unwrap();
    whole(&ours, CALLS);
    assert_eq!(ours.refused, 0);
    // The first windows, and the last calls' own latency, are all that comes on top.
    let more = ours.wall.saturating_sub(work.by_caps());
    assert!(more < Duration::from_secs(15), "{:?} beside {:?}", ours.wall, work.by_caps());
}

#[tokio::test(start_paused = true)]
async fn the_earlier_rules_through_one_process_take_five_times_as_long_where_that_process_was_slowest() {
    let work = Work::new(CALLS);
    let earlier = simulated::earlier(&work, Some(1_414.0)).await.unwrap();
    whole(&earlier, CALLS);
    let ours = simulated::ours(&work).await.unwrap();
    // Of so few calls the start and the end are a larger part: of 141,600 it is 7.3 times.
    let ratio = earlier.wall.as_secs_f64() / ours.wall.as_secs_f64();
    assert!(ratio > 4.0, "{ratio}");
}

#[tokio::test(start_paused = true)]
async fn the_model_of_the_earlier_rules_takes_as_long_as_they_were_measured_to() {
    // 2,500 calls over one org took 48.9 s.
    let work = Work { calls: 2_500, orgs: 1, ..Work::new(CALLS) };
    let run = simulated::earlier(&work, None).await.unwrap();
    assert_eq!(run.once, 2_500);
    assert!((44.0..54.0).contains(&run.wall.as_secs_f64()), "{:?}", run.wall);
}

#[tokio::test(start_paused = true)]
async fn killed_midway_and_begun_again_nothing_that_was_answered_is_sent_again() {
    // Each answer is synced to a real disk, so fewer of them.
    let work = Work::new(1_200);
    let folder = tempfile::tempdir().unwrap();
    let until = Duration::from_secs(7);
    let resumed = simulated::resumed(&work, until, &folder.path().join("answers.journal")).await.unwrap();
    whole(&resumed.run, work.calls);
    assert!(resumed.before > 200 && resumed.before < work.calls, "{resumed:?}");
    // What was on its way is all that is paid for again.
    assert!(resumed.abandoned <= resumed.alive as u64, "{resumed:?}");
    assert!(resumed.after <= work.calls - resumed.before + 10, "{resumed:?}");
}

#[test]
fn the_model_of_the_batch_path_meets_the_published_run() {
    let model = batches::Model { stuck: 0.1, escape_per_minute: None };
    let hours = batches::spread(model, 1).median.as_secs_f64() / 3_600.0;
    assert!((12.0..16.0).contains(&hours), "about 14 hours were published: {hours}");
    let unstuck = batches::spread(batches::Model { stuck: 0.0, ..model }, 1);
    assert!(unstuck.p90 < batches::spread(model, 1).median);
}
