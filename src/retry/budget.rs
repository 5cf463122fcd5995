//! The budget of retries after errors, shared by all calls of a layer: retries cannot outgrow traffic. Pure.
//!
//! A token bucket. Every first attempt brings a fraction of a token, time brings some a second, and every retry after an
//! error takes a whole one. An empty bucket delays a retry and never fails it: nothing is lost because others fail too.

use std::time::Duration;

use tokio::time::Instant;

use crate::gate::Admission;

/// Seconds of [`Budget::per_second`] that the bucket holds, full at the start.
const SECONDS_HELD: f64 = 10.0;
/// A level this near to a whole token is one: sums of fractions do not come out even.
const ROUNDING: f64 = 1e-6;
/// The clock's grain: no alarm is set for less.
const GRAIN: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(crate) struct Budget {
    ratio: f64,
    per_second: f64,
    capacity: f64,
    tokens: f64,
    at: Instant,
}

impl Budget {
    /// A full one. `ratio` is what a first attempt brings; both finite, `ratio ≥ 0`, `per_second > 0`.
    pub(crate) fn new(ratio: f64, per_second: f64, now: Instant) -> Self {
        let capacity = (per_second * SECONDS_HELD).max(1.0);
        Budget { ratio, per_second, capacity, tokens: capacity, at: now }
    }

    /// A first attempt was made.
    pub(crate) fn deposit(&mut self, now: Instant) {
        self.add(self.ratio, now);
    }

    /// A retry that had been paid for was not made.
    pub(crate) fn refund(&mut self, now: Instant) {
        self.add(1.0, now);
    }

    fn add(&mut self, tokens: f64, now: Instant) {
        self.tokens = (self.level(now) + tokens).min(self.capacity);
        self.at = self.at.max(now);
    }

    fn level(&self, now: Instant) -> f64 {
        let grown = now.saturating_duration_since(self.at).as_secs_f64() * self.per_second;
        (self.tokens + grown).min(self.capacity)
    }
}

impl Admission for Budget {
    type Grant = ();

    fn admit(&mut self, now: Instant) -> Option<()> {
        if self.free(now) == 0 {
            return None;
        }
        self.add(-1.0, now);
        self.tokens = self.tokens.max(0.0);
        Some(())
    }

    fn free(&self, now: Instant) -> usize {
        // Saturates where it is too large for an integer.
        (self.level(now) + ROUNDING) as usize
    }

    fn opens_at(&self, now: Instant) -> Option<Instant> {
        let wait = Duration::try_from_secs_f64((1.0 - self.level(now)) / self.per_second).ok()?;
        now.checked_add(wait.max(GRAIN))
    }

    fn waiting(&mut self, _waiters: usize) {}
}
