//! Where nothing tells the limit: a plateau just below the point of refusal, probed ever more rarely. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::settings::Settings;

/// The shortest rest before a probe.
const REST: Duration = Duration::from_secs(1);
/// A hold costs at most one part in so many.
const HOLD_SHARE: u32 = 25;
/// The longest rest after a hold: added capacity is to be found within half a minute.
const REST_HELD: Duration = Duration::from_secs(25);

#[derive(Clone, Debug)]
pub(crate) struct Plateau {
    refused_at: Option<Instant>,
    /// No growth before this.
    rest_until: Option<Instant>,
    /// The next step up; it doubles with every one that stays clean, so that a doubled capacity is found fast.
    up: f64,
    /// The next step down; it doubles until a whole window has been clean.
    down: f64,
    /// What a burst may bring the limit down to.
    bottom: f64,
}

impl Plateau {
    pub(crate) fn new() -> Self {
        Plateau { refused_at: None, rest_until: None, up: 1.0, down: 1.0, bottom: 1.0 }
    }

    /// The limit after a refusal when `level` calls were in flight; `hold` is how long the provider wants to be left alone.
    pub(crate) fn refused(
        &mut self,
        limit: f64,
        level: usize,
        hold: Duration,
        settings: &Settings,
        now: Instant,
    ) -> f64 {
        let level = limit.min(level as f64).floor();
        self.bottom = level / 2.0;
        let to = (level - self.down).max(self.bottom);
        self.down *= 2.0;
        self.rest(hold, settings, now);
        to
    }

    /// The limit after another refusal of the same burst.
    pub(crate) fn refined(&self, limit: f64) -> f64 {
        (limit - 1.0).max(self.bottom).min(limit)
    }

    /// The limit when nothing sent after the last cut has been answered well.
    pub(crate) fn refused_again(&mut self, limit: f64, settings: &Settings, now: Instant) -> f64 {
        self.bottom = limit / 2.0;
        self.rest(Duration::ZERO, settings, now);
        self.bottom
    }

    fn rest(&mut self, hold: Duration, settings: &Settings, now: Instant) {
        let since = self.refused_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let rest = since.saturating_mul(2).min(settings.rest).max(REST.min(settings.rest));
        let rest = rest.max(hold.saturating_mul(HOLD_SHARE).min(REST_HELD));
        self.refused_at = Some(now);
        self.rest_until = now.checked_add(hold.saturating_add(rest));
        self.up = 1.0;
    }

    /// Whether anything was ever refused.
    pub(crate) fn is_found(&self) -> bool {
        self.refused_at.is_some()
    }

    /// A whole window at the full limit was clean.
    pub(crate) fn clean(&mut self) {
        self.down = 1.0;
    }

    /// The limit after a full, clean window, if it may be probed.
    pub(crate) fn grown(&mut self, limit: f64, now: Instant) -> Option<f64> {
        if self.rest_until.is_some_and(|until| now < until) {
            return None;
        }
        let to = limit + self.up;
        self.up *= 2.0;
        Some(to)
    }

    /// The limit was cut for another reason: above it growth begins with the least step.
    pub(crate) fn left(&mut self) {
        self.up = 1.0;
    }

    /// What was learnt of slots does not count any more.
    pub(crate) fn forget(&mut self) {
        *self = Plateau::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refusals_without_a_clean_window_between_cut_ever_deeper() {
        let (settings, now) = (Settings::default(), Instant::now());
        let mut plateau = Plateau::new();
        let mut limit = 40.0;
        let mut seen = vec![];
        for _ in 0..5 {
            limit = plateau.refused(limit, 40, Duration::ZERO, &settings, now);
            seen.push(limit);
        }
        assert_eq!(seen, [39.0, 37.0, 33.0, 25.0, 12.5], "by one, two, four, eight, and never more than half");
        plateau.clean();
        assert_eq!(plateau.refused(20.0, 20, Duration::ZERO, &settings, now), 19.0);
    }

    #[test]
    fn the_rest_doubles_up_to_its_bound_when_the_same_place_refuses_again_and_again() {
        let settings = Settings::default();
        let start = Instant::now();
        let (mut plateau, mut now, mut rests) = (Plateau::new(), start, vec![]);
        for _ in 0..6 {
            let limit = plateau.refused(21.0, 21, Duration::ZERO, &settings, now);
            let refused = now;
            while plateau.grown(limit, now).is_none() {
                now += Duration::from_millis(100);
            }
            rests.push((now - refused).as_secs());
        }
        assert_eq!(rests, [1, 2, 4, 8, 10, 10]);
    }

    proptest! {
        #[test]
        fn down_means_down_and_up_means_up(
            events in proptest::collection::vec((0u8..5, 1..300usize, 0..10_000u64), 1..200),
        ) {
            let settings = Settings::default();
            let (mut plateau, mut now, mut limit) = (Plateau::new(), Instant::now(), 300.0f64);
            for (event, level, ms) in events {
                now += Duration::from_millis(ms);
                let before = limit;
                match event {
                    0 => limit = plateau.refused(limit, level, Duration::from_millis(ms), &settings, now).min(limit),
                    1 => limit = plateau.refined(limit),
                    2 => limit = plateau.refused_again(limit, &settings, now),
                    3 => plateau.clean(),
                    _ => {
                        let grown = plateau.grown(limit, now);
                        prop_assert!(grown.is_none_or(|grown| grown > limit));
                        limit = grown.unwrap_or(limit).min(300.0);
                    }
                }
                limit = limit.max(1.0);
                prop_assert!(limit.is_finite());
                prop_assert!(event > 2 || limit <= before);
            }
        }
    }
}
