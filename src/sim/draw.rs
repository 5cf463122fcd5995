//! What is left to chance: faults and how long a call takes.

use std::time::Duration;

use serde::Deserialize;

/// A probability per request, from 0 (never) to 1 (always). In a file also `true` or `false`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "FlagOrChance")]
pub struct Chance(pub f64);

impl Chance {
    pub(super) fn always(self) -> bool {
        self.0 >= 1.0
    }

    /// Draws only where the outcome is open, so that a fault nobody asked for moves no other draw.
    pub(super) fn strikes(self, rng: &mut fastrand::Rng) -> bool {
        self.always() || (self.0 > 0.0 && rng.f64() < self.0)
    }
}

impl From<bool> for Chance {
    fn from(flag: bool) -> Self {
        Chance(if flag { 1.0 } else { 0.0 })
    }
}

impl From<f64> for Chance {
    fn from(chance: f64) -> Self {
        Chance(chance)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FlagOrChance {
    Flag(bool),
    Chance(f64),
}

impl From<FlagOrChance> for Chance {
    fn from(value: FlagOrChance) -> Self {
        match value {
            FlagOrChance::Flag(flag) => flag.into(),
            FlagOrChance::Chance(chance) => Chance(chance),
        }
    }
}

/// How long an admitted call takes: lognormal.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latency {
    /// The median, in milliseconds; default 50. Zero answers at once.
    pub p50_ms: f64,
    /// The standard deviation of the logarithm; default 0.3. Zero makes every call take the median.
    pub sigma: f64,
}

impl Default for Latency {
    fn default() -> Self {
        Latency { p50_ms: 50.0, sigma: 0.3 }
    }
}

impl Latency {
    /// A median in milliseconds and a sigma.
    pub fn new(p50_ms: f64, sigma: f64) -> Self {
        Latency { p50_ms, sigma }
    }

    /// The mean of the distribution: the median times e^(σ²/2).
    pub fn mean(&self) -> Duration {
        seconds(self.mean_s())
    }

    pub(super) fn mean_s(&self) -> f64 {
        self.p50_ms / 1e3 * (self.sigma * self.sigma / 2.0).exp()
    }

    pub(super) fn draw(&self, rng: &mut fastrand::Rng) -> Duration {
        seconds(self.p50_ms / 1e3 * lognormal(self.sigma, rng)).min(DAY)
    }
}

pub(super) const DAY: Duration = Duration::from_secs(86_400);

pub(super) fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or(if s > 0.0 { Duration::MAX } else { Duration::ZERO })
}

/// A lognormal of median 1, by Box and Muller.
pub(super) fn lognormal(sigma: f64, rng: &mut fastrand::Rng) -> f64 {
    if sigma == 0.0 {
        return 1.0;
    }
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    (sigma * radius * (std::f64::consts::TAU * rng.f64()).cos()).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_is_lognormal_about_its_median() {
        let mut rng = fastrand::Rng::with_seed(7);
        let latency = Latency::new(100.0, 0.5);
        let mut draws: Vec<f64> = (0..10_001).map(|_| latency.draw(&mut rng).as_secs_f64() * 1e3).collect();
        draws.sort_unstable_by(f64::total_cmp);
        assert!((97.0..103.0).contains(&draws[5000]), "median {}", draws[5000]);
        // One sigma above the median: 84.13 % lie below.
        assert!((158.0..172.0).contains(&draws[8413]), "p84 {}", draws[8413]);
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean / 1e3 - latency.mean().as_secs_f64()).abs() < 0.003, "mean {mean}");
    }
}
