//! A token bucket.

use std::time::Duration;

use super::draw::{DAY, seconds};

/// Requests, input tokens, output tokens, tokens of both.
pub(super) type PerResource<T> = [T; 4];

/// A rate per second and what the bucket holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    pub(super) rate: f64,
    pub(super) capacity: f64,
}

/// A token bucket: full at first, refilled without a break.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    pub(super) limit: Limit,
    pub(super) level: f64,
}

/// What rounding may have lost on the way to a whole unit.
const DUST: f64 = 1e-6;

impl Bucket {
    pub(super) fn full(limit: Limit) -> Self {
        Bucket { limit, level: limit.capacity }
    }

    pub(super) fn refill(&mut self, elapsed_s: f64) {
        self.level = (self.level + self.limit.rate * elapsed_s).min(self.limit.capacity);
    }

    pub(super) fn fits(&self, cost: f64) -> bool {
        self.level + DUST >= cost
    }

    pub(super) fn take(&mut self, cost: f64) {
        self.level = (self.level - cost).max(0.0);
    }

    /// Until `level` is reached, or the bucket is full; at most a day.
    pub(super) fn until(&self, level: f64) -> Duration {
        let lacking = level.min(self.limit.capacity) - self.level;
        if lacking <= 0.0 { Duration::ZERO } else { seconds(lacking / self.limit.rate).min(DAY) }
    }

    pub(super) fn view(&self) -> View {
        View {
            limit: (self.limit.rate * 60.0).round() as u64,
            remaining: (self.level + DUST) as u64,
            full_in: self.until(self.limit.capacity),
        }
    }
}

/// What the headers say of one bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct View {
    /// Per minute.
    pub(super) limit: u64,
    pub(super) remaining: u64,
    pub(super) full_in: Duration,
}
