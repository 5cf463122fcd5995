//! What becomes of a batch, drawn when it is created. Pure: a batch's age goes in, its phase and progress come out.

use std::time::Duration;

use super::config::BatchConfig;
use super::rows::Row;
use crate::sim::draw::seconds;
use crate::sim::marker::Marker;

/// Where a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Validating,
    Failed,
    InProgress,
    Finalizing,
    Cancelling,
    Completed,
    Expired,
    Cancelled,
}

impl Phase {
    pub(super) fn has_ended(self) -> bool {
        matches!(self, Phase::Failed | Phase::Completed | Phase::Expired | Phase::Cancelled)
    }
}

/// When what happens, since the batch was created.
#[derive(Clone, Debug)]
pub(super) struct Fate {
    pub(super) rows: usize,
    /// How long it takes, if nothing comes in between.
    work: Duration,
    pub(super) expires: Duration,
    /// So many rows are finished if nobody cancels.
    most: usize,
    cancel_takes: Duration,
    /// It does not survive validation.
    pub(super) refused: bool,
    pub(super) lost_reply: bool,
    pub(super) cancelled: Option<Duration>,
    fortunes: Fortunes,
}

/// What becomes of single rows.
#[derive(Clone, Debug)]
struct Fortunes {
    /// Of this batch.
    seed: u64,
    /// Of the provider.
    global: u64,
    config: BatchConfig,
    all_error: bool,
}

/// Two seeds that differ in a bit become two that have nothing to do with each other.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    fastrand::Rng::with_seed(a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15)).u64(..)
}

impl Fate {
    /// Of a batch with this seed of its own, and the provider's.
    pub(super) fn draw(config: &BatchConfig, global: u64, seed: u64, rows: usize) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let work = config.delay.draw(&mut rng).saturating_add(seconds(config.delay_per_row_ms / 1e3 * rows as f64));
        let is_stuck = config.stuck.strikes(&mut rng) || config.starve_above.is_some_and(|most| rows > most);
        let expires_early = config.expired.strikes(&mut rng);
        let most = match (is_stuck, expires_early) {
            (true, _) => 0,
            // At least one row is missing, else it would be complete.
            (false, true) => ((rows as f64 * config.expired_part) as usize).min(rows.saturating_sub(1)),
            (false, false) => rows,
        };
        let all_error = config.all_error.strikes(&mut rng);
        let lost_reply = config.lost_reply.strikes(&mut rng);
        Fate {
            rows,
            work,
            expires: seconds(config.expires_after_s),
            most,
            cancel_takes: seconds(config.cancel_takes_s),
            refused: false,
            lost_reply,
            cancelled: None,
            fortunes: Fortunes { seed, global, config: config.clone(), all_error },
        }
    }

    pub(super) fn validated(&self) -> Duration {
        (self.work / 20).min(self.expires)
    }

    pub(super) fn finalizing(&self) -> Duration {
        self.work - self.work / 20
    }

    fn completes(&self) -> bool {
        self.most == self.rows && self.work <= self.expires
    }

    /// When it ends.
    pub(super) fn ends(&self) -> Duration {
        match self.cancelled {
            _ if self.refused => self.validated(),
            Some(at) => at.saturating_add(self.cancel_takes),
            None if self.completes() => self.work,
            None => self.expires,
        }
    }

    pub(super) fn phase(&self, age: Duration) -> Phase {
        let has_ended = age >= self.ends();
        match self.cancelled {
            _ if self.refused && has_ended => Phase::Failed,
            _ if self.refused => Phase::Validating,
            Some(_) if has_ended => Phase::Cancelled,
            Some(_) => Phase::Cancelling,
            None if has_ended && self.completes() => Phase::Completed,
            None if has_ended => Phase::Expired,
            None if age < self.validated() => Phase::Validating,
            None if self.completes() && age >= self.finalizing() => Phase::Finalizing,
            None => Phase::InProgress,
        }
    }

    /// How many rows are finished, in the order in which they are.
    pub(super) fn done(&self, age: Duration) -> usize {
        if self.refused {
            return 0;
        }
        let age = age.min(self.cancelled.unwrap_or(Duration::MAX)).min(self.expires);
        let (first, last) = (self.validated(), self.finalizing());
        if age >= last {
            return self.most;
        }
        let part = age.saturating_sub(first).as_secs_f64() / (last - first).as_secs_f64();
        ((self.rows as f64 * part) as usize).min(self.most)
    }

    /// The rows in the order in which they are finished.
    pub(super) fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.rows as u32).collect();
        if self.fortunes.config.shuffle {
            fastrand::Rng::with_seed(mix(self.fortunes.seed, 1)).shuffle(&mut order);
        }
        order
    }

    /// What the row at this place asked for, or met.
    pub(super) fn marker(&self, place: u32, row: &Row) -> Option<Marker> {
        let Fortunes { seed, global, ref config, all_error } = self.fortunes;
        if row.marker.is_some() {
            return row.marker;
        }
        let mut rng = fastrand::Rng::with_seed(mix(global, row.item));
        if config.row_invalid.strikes(&mut rng) {
            return Some(Marker::InvalidRequest);
        }
        let mut rng = fastrand::Rng::with_seed(mix(seed, u64::from(place) + 2));
        if all_error || config.row_api_error.strikes(&mut rng) {
            return Some(Marker::ApiError);
        }
        config.row_overloaded.strikes(&mut rng).then_some(Marker::Overloaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::draw::Latency;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn config() -> BatchConfig {
        BatchConfig::new().delay(Latency::new(100_000.0, 0.0)).expires_after_s(1000.0).cancel_takes_s(3.0)
    }

    fn fate(config: BatchConfig) -> Fate {
        Fate::draw(&config, 7, 8, 90)
    }

    #[test]
    fn a_batch_is_validated_makes_progress_is_finalized_and_completes() {
        let fate = fate(config());
        for (at, phase, done) in [
            (0.0, Phase::Validating, 0),
            (4.9, Phase::Validating, 0),
            (5.0, Phase::InProgress, 0),
            (6.1, Phase::InProgress, 1),
            (50.1, Phase::InProgress, 45),
            (94.9, Phase::InProgress, 89),
            (95.0, Phase::Finalizing, 90),
            (99.9, Phase::Finalizing, 90),
            (100.0, Phase::Completed, 90),
        ] {
            assert_eq!((fate.phase(s(at)), fate.done(s(at))), (phase, done), "{at}");
        }
        assert_eq!(fate.ends(), s(100.0));
    }

    #[test]
    fn rows_take_their_time_too() {
        assert_eq!(fate(config().delay_per_row_ms(1000.0)).ends(), s(190.0));
    }

    #[test]
    fn a_stuck_or_starved_batch_does_nothing_and_expires() {
        for config in [config().stuck(true), config().starve_above(89), config().stuck(true).expired(true)] {
            let fate = fate(config);
            assert_eq!((fate.phase(s(999.9)), fate.done(s(999.9))), (Phase::InProgress, 0));
            assert_eq!((fate.phase(s(1000.0)), fate.done(s(1000.0))), (Phase::Expired, 0));
        }
        assert_eq!(fate(config().starve_above(90)).ends(), s(100.0), "it has no more rows than that");
    }

    #[test]
    fn a_batch_expires_with_a_part_of_its_rows_or_because_it_is_slow() {
        let part = fate(config().expired(true).expired_part(0.5));
        assert_eq!(
            (part.phase(s(999.0)), part.done(s(999.0)), part.phase(s(1000.0))),
            (Phase::InProgress, 45, Phase::Expired)
        );
        assert_eq!(fate(config().expired(true).expired_part(1.0)).done(s(2000.0)), 89, "else it would be complete");
        let slow = fate(config().expires_after_s(50.1));
        assert_eq!((slow.phase(s(60.0)), slow.done(s(60.0))), (Phase::Expired, 45));
    }

    #[test]
    fn a_cancelled_batch_keeps_what_was_done_by_then() {
        let mut fate = fate(config());
        fate.cancelled = Some(s(50.1));
        assert_eq!((fate.phase(s(53.0)), fate.done(s(53.0))), (Phase::Cancelling, 45));
        assert_eq!((fate.phase(s(53.1)), fate.done(s(900.0))), (Phase::Cancelled, 45));
    }

    #[test]
    fn a_refused_batch_fails_when_it_is_validated() {
        let mut fate = fate(config());
        fate.refused = true;
        assert_eq!((fate.phase(s(4.9)), fate.phase(s(5.0)), fate.done(s(99.0))), (Phase::Validating, Phase::Failed, 0));
    }

    #[test]
    fn rows_are_finished_in_another_order_unless_told_otherwise() {
        let in_order: Vec<u32> = (0..90).collect();
        assert_eq!(fate(config().shuffle(false)).order(), in_order);
        let mut order = fate(config()).order();
        assert_ne!(order, in_order);
        order.sort_unstable();
        assert_eq!(order, in_order);
    }

    #[test]
    fn a_batch_without_any_duration_is_over_at_once() {
        let fate = fate(config().delay(Latency::new(0.0, 0.0)));
        assert_eq!((fate.phase(s(0.0)), fate.done(s(0.0))), (Phase::Completed, 90));
    }
}
