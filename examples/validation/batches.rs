//! The earlier dispatcher's batch path: batches of 8,000 rows, four at once, and what is known of how long such batches took. Nothing is sent:
//! hours of waiting are drawn from a model, and the model is stated here.
//!
//! Published: 500 rows took about five minutes; one batch of 8,000 was still at nothing after 8 to 9 hours; the whole of 141,600 calls took about
//! 14 hours. So:
//!
//! - A batch that moves takes five minutes for each 500 rows in the median, as a lognormal of σ = 0.5.
//! - One batch in [`Model::stuck`] does not move for 8 to 9 hours, and then takes as long as one that moves.
//! - With the escape of the later version such a batch is canceled after four hours without a row, and its rows go out directly, at the
//!   rate that the process manages.

use std::time::Duration;

use super::work::MISSION;

const ROWS: u64 = 8_000;
const AT_ONCE: usize = 4;
const ESCAPE_H: f64 = 4.0;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    /// How many of so many batches do not move.
    pub(crate) stuck: f64,
    /// The rate of what goes out directly instead, if batches are given up.
    pub(crate) escape_per_minute: Option<f64>,
}

/// The tenth, the middle and the ninetieth of a hundred runs of the mission.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) p10: Duration,
    pub(crate) median: Duration,
    pub(crate) p90: Duration,
}

pub(crate) fn spread(model: Model, seed: u64) -> Spread {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut walls: Vec<f64> = (0..2_001).map(|_| hours(MISSION, model, &mut rng)).collect();
    walls.sort_by(f64::total_cmp);
    let at = |part: f64| Duration::from_secs_f64(walls[(part * (walls.len() - 1) as f64) as usize] * 3_600.0);
    Spread { p10: at(0.1), median: at(0.5), p90: at(0.9) }
}

/// How long a mean batch may take for the whole to be done in this time: what would have to be true for batches to be as quick.
pub(crate) fn a_batch_in(wall: Duration) -> Duration {
    let waves = MISSION.div_ceil(ROWS) as f64 / AT_ONCE as f64;
    wall.div_f64(waves)
}

/// One run: whichever of the four lanes is free takes the next batch.
fn hours(rows: u64, model: Model, rng: &mut fastrand::Rng) -> f64 {
    let mut lanes = [0.0_f64; AT_ONCE];
    let (mut left, mut direct) = (rows, 0);
    let mut direct_from: f64 = 0.0;
    while left > 0 {
        let batch = left.min(ROWS);
        left -= batch;
        let next = (0..AT_ONCE).min_by(|&a, &b| lanes[a].total_cmp(&lanes[b])).unwrap_or(0);
        let moving = batch as f64 / 500.0 * 5.0 / 60.0 * lognormal(0.5, rng);
        let stuck = rng.f64() < model.stuck;
        lanes[next] += match (stuck, model.escape_per_minute) {
            (false, _) => moving,
            (true, None) => 8.0 + rng.f64() + moving,
            (true, Some(_)) => {
                direct += batch;
                direct_from = direct_from.max(lanes[next] + ESCAPE_H);
                ESCAPE_H
            }
        };
    }
    let batches = lanes.into_iter().fold(0.0, f64::max);
    let directly = model.escape_per_minute.map_or(0.0, |rate| direct as f64 / rate / 60.0);
    batches.max(direct_from + directly)
}

fn lognormal(sigma: f64, rng: &mut fastrand::Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    (sigma * radius * (std::f64::consts::TAU * rng.f64()).cos()).exp()
}
