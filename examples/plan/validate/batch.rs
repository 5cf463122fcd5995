//! The batch path as it might go: every batch drawn, polled and given up one by one. It knows nothing of the planner's formulas.

use std::time::Duration;

use tower_quota::plan::BatchModel;

/// Where batches are sent.
#[derive(Clone, Debug)]
pub(crate) struct Provider {
    pub(crate) model: BatchModel,
    /// It never begins a batch of more rows.
    pub(crate) starves_above: Option<u64>,
    /// Rows a second that the direct path takes, for those of wedged batches.
    pub(crate) direct: f64,
}

/// What one run came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) wall_s: f64,
    /// Rows that were paid in full.
    pub(crate) went_direct: u64,
}

/// A normal, by Marsaglia's polar method.
fn normal(rng: &mut fastrand::Rng) -> f64 {
    loop {
        let (x, y) = (2.0 * rng.f64() - 1.0, 2.0 * rng.f64() - 1.0);
        let s = x * x + y * y;
        if s > 0.0 && s < 1.0 {
            return x * (-2.0 * s.ln() / s).sqrt();
        }
    }
}

/// The first poll that is not before `at`: pauses of 30 s, growing by half up to the longest, each a tenth more or less.
fn polled(at: f64, longest: Duration, rng: &mut fastrand::Rng) -> f64 {
    let longest = longest.as_secs_f64();
    let mut pause = longest.min(30.0);
    let mut time = 0.0;
    loop {
        time += pause * (0.9 + 0.2 * rng.f64());
        if time >= at || pause <= 0.0 {
            return time.max(at);
        }
        pause = (pause * 1.5).min(longest);
    }
}

/// One run of so many rows in batches of `chunk`, so many batches at once: whenever one ends the next begins.
pub(crate) fn run(provider: &Provider, rows: u64, chunk: u64, lanes: usize, rng: &mut fastrand::Rng) -> Ended {
    let model = &provider.model;
    let mut free = vec![0.0_f64; lanes];
    let mut ended = Ended { wall_s: 0.0, went_direct: 0 };
    let mut left = rows;
    while left > 0 {
        let size = left.min(chunk);
        left -= size;
        let lane = (0..lanes).min_by(|a, b| free[*a].total_cmp(&free[*b])).unwrap_or(0);
        let chance = 1.0 - (-(size as f64 / model.wedge_rows).powi(2)).exp();
        let starved = provider.starves_above.is_some_and(|most| size > most);
        let wedged = rng.f64() < chance || starved;
        let takes = if wedged {
            model.stuck_after.as_secs_f64()
        } else {
            let median = model.base.as_secs_f64() + model.per_row.as_secs_f64() * size as f64;
            median * (model.sigma * normal(rng)).exp()
        };
        free[lane] += polled(takes, model.poll, rng);
        let mut done = free[lane];
        if wedged {
            ended.went_direct += size;
            done += size as f64 / provider.direct;
        }
        ended.wall_s = ended.wall_s.max(done);
    }
    ended
}
