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

    /// Whether nothing that is brought makes a difference, now or later.
    pub(crate) fn is_full(&self) -> bool {
        self.tokens >= self.capacity
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
        self.tokens = self.level(now) + tokens;
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn drain(budget: &mut Budget, now: Instant) -> usize {
        std::iter::from_fn(|| budget.admit(now)).count()
    }

    #[test]
    fn time_refills_it_up_to_ten_seconds_worth() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut budget = Budget::new(0.2, 10.0, start);
        assert_eq!(drain(&mut budget, start), 100, "it starts full");
        assert_eq!(drain(&mut budget, at(99)), 0);
        assert_eq!(drain(&mut budget, at(100)), 1);
        assert_eq!(drain(&mut budget, at(1_100)), 10);
        assert_eq!(drain(&mut budget, at(3_600_000)), 100, "no more than it holds");
        (0..10_000).for_each(|_| budget.deposit(at(3_600_000)));
        assert_eq!(drain(&mut budget, at(3_600_000)), 100, "whoever brings it");
    }

    #[test]
    fn five_first_attempts_bring_one_retry() {
        let now = Instant::now();
        let mut budget = Budget::new(0.2, 1e-6, now);
        assert_eq!(drain(&mut budget, now), 1, "a bucket always holds one");
        for first_attempt in 1..=50 {
            budget.deposit(now);
            assert_eq!(drain(&mut budget, now), usize::from(first_attempt % 5 == 0), "{first_attempt}");
        }
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_and_takes_nothing() {
        let start = Instant::now();
        let mut budget = Budget::new(0.0, 10.0, start);
        drain(&mut budget, start);
        assert_eq!(drain(&mut budget, start + Duration::from_secs(1)), 10);
        assert_eq!(drain(&mut budget, start), 0);
        assert_eq!(drain(&mut budget, start + Duration::from_secs(1)), 0, "the second was spent already");
        budget.refund(start);
        assert_eq!(drain(&mut budget, start), 1);
        assert_eq!(drain(&mut budget, start + Duration::from_secs(1)), 0, "and is not given again");
    }

    proptest! {
        #[test]
        fn it_never_grants_more_than_traffic_and_time_have_brought(
            ratio in 0.0..2.0f64,
            per_second in prop_oneof![Just(1.0), Just(10.0), 0.01..1000.0f64],
            events in proptest::collection::vec((0u64..2_000, 0u8..4), 1..300),
        ) {
            let start = Instant::now();
            let mut budget = Budget::new(ratio, per_second, start);
            let (mut now, mut brought, mut taken) = (start, budget.capacity, 0.0);
            for (millis, event) in events {
                now += Duration::from_millis(millis);
                brought += per_second * millis as f64 / 1e3;
                match event {
                    0 => {
                        budget.deposit(now);
                        brought += ratio;
                    }
                    1 if taken > 0.0 => {
                        budget.refund(now);
                        taken -= 1.0;
                    }
                    _ => taken += drain(&mut budget, now) as f64,
                }
                prop_assert!(taken <= brought + 1e-3, "took {taken} of {brought}");
                prop_assert!(budget.level(now) <= budget.capacity);
            }
        }

        #[test]
        fn it_opens_when_it_says_so_and_not_a_grain_before(
            per_second in 0.01..1000.0f64,
            passed in 0u64..5_000,
        ) {
            let mut budget = Budget::new(0.2, per_second, Instant::now());
            let now = budget.at;
            drain(&mut budget, now);
            let now = now + Duration::from_millis(passed);
            drain(&mut budget, now);
            let opens = budget.opens_at(now).unwrap();
            prop_assert!(opens > now);
            prop_assert!(budget.free(opens + GRAIN) >= 1);
            if opens > now + GRAIN {
                prop_assert_eq!(budget.free(opens - GRAIN), 0);
            }
        }
    }
}
