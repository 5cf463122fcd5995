//! When a request has waited for too long: one verdict, for the wait up here and for the wait for its turn below. Pure but for
//! the one number that all calls of a layer share.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use tokio::time::Instant;

/// When a request of the layer last got its answer. What nobody else gets either, nobody gets by waiting less.
#[derive(Debug)]
pub(crate) struct Progress {
    born: Instant,
    /// Nanoseconds since birth, and one; zero while there was none.
    at: AtomicU64,
}

impl Progress {
    pub(crate) fn new(now: Instant) -> Self {
        Progress { born: now, at: AtomicU64::new(0) }
    }

    /// A request has its answer.
    pub(crate) fn note(&self, now: Instant) {
        let nanos = now.saturating_duration_since(self.born).as_nanos();
        self.at.store(u64::try_from(nanos).unwrap_or(u64::MAX).saturating_add(1), Relaxed);
    }

    /// When one last had.
    pub(crate) fn last(&self) -> Option<Instant> {
        let nanos = self.at.load(Relaxed).checked_sub(1)?;
        self.born.checked_add(Duration::from_nanos(nanos))
    }
}

/// What the verdict is drawn from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    /// Since when this request has waited: its first 429, else when it began to wait for its turn.
    pub(crate) since: Instant,
    /// When something last went on anywhere in the layer.
    pub(crate) progress: Option<Instant>,
    /// How long nothing may happen.
    pub(crate) patience: Duration,
}

impl Waiting {
    /// Whether it is given up now, with nothing else to come before `until`: its own time is over by then, and nobody has got
    /// anywhere for as long. A wait that ends too late is not begun where nobody gets anywhere; where others do, it is.
    pub(crate) fn is_lost(&self, now: Instant, until: Instant) -> bool {
        let is_over = |since: Instant, at: Instant| at.saturating_duration_since(since) >= self.patience;
        is_over(self.since, until) && self.progress.is_none_or(|last| is_over(last, now))
    }

    /// Whether somebody who meant to look at `due` looks too late to say that it has waited: the clock has leapt, or its task was
    /// not polled, and what was to happen meanwhile happens now. Late by a tenth of the patience, or a second: timers are late by
    /// milliseconds.
    pub(crate) fn is_blind(&self, due: Instant, now: Instant) -> bool {
        now.saturating_duration_since(due) > (self.patience / 10).max(Duration::from_secs(1))
    }

    /// When it will be given up if nothing goes on until then; `None` if never.
    pub(crate) fn lost_at(&self) -> Option<Instant> {
        let last = self.progress.map_or(self.since, |last| last.max(self.since));
        last.checked_add(self.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_request_is_given_up_when_its_own_window_and_everybodys_are_over() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        // Waits since; somebody had an answer at; the time; the end of the wait (the time itself: for its turn); lost?
        for (since, progress, now, until, lost) in [
            (0, None, 599, 599, false),
            (0, None, 600, 600, true),
            (1, None, 600, 600, false),
            (1, None, 601, 601, true),
            // Nobody has progressed: a wait that would end too late is not begun.
            (0, None, 0, 599, false),
            (0, None, 0, 600, true),
            // Others have, just now or long ago.
            (0, Some(1), 600, 600, false),
            (0, Some(1), 601, 601, true),
            (0, Some(0), 600, 600, true),
            (0, Some(599), 1_198, 1_198, false),
            (0, Some(599), 1_199, 1_199, true),
            (700, Some(100), 700, 1_299, false),
            (700, Some(100), 700, 1_300, true),
            (700, Some(101), 700, 1_300, false),
            // A wait of an hour is begun while others progress.
            (0, Some(10), 11, 3_600, false),
            (0, Some(10), 610, 3_600, true),
            // Its own window counts from its own beginning, however long nobody has progressed.
            (5_000, Some(1), 5_599, 5_599, false),
            (5_000, Some(1), 5_600, 5_600, true),
        ] {
            let waiting = Waiting { since: at(since), progress: progress.map(at), patience: Duration::from_secs(600) };
            let row = format!("since {since}, progress {progress:?}, at {now} until {until}");
            assert_eq!(waiting.is_lost(at(now), at(until)), lost, "{row}");
        }
    }

    #[test]
    fn patience_without_end_is_never_lost() {
        let now = Instant::now();
        let waiting = Waiting { since: now, progress: None, patience: Duration::MAX };
        assert_eq!(waiting.lost_at(), None);
        assert!(!waiting.is_lost(now + 1_000_000 * SECOND, now + 1_000_000 * SECOND));
    }

    #[test]
    fn progress_is_what_was_last_noted() {
        let start = Instant::now();
        let progress = Progress::new(start);
        assert_eq!(progress.last(), None);
        progress.note(start);
        assert_eq!(progress.last(), Some(start), "also in the first moment");
        progress.note(start + 7 * SECOND);
        assert_eq!(progress.last(), Some(start + 7 * SECOND));
    }

    #[test]
    fn who_looks_too_late_has_seen_no_wait() {
        let now = Instant::now();
        let waiting = Waiting { since: now, progress: None, patience: Duration::from_secs(600) };
        for (late, blind) in [(0, false), (1, false), (60, false), (61, true), (3_600, true)] {
            assert_eq!(waiting.is_blind(now, now + late * SECOND), blind, "{late} s");
        }
    }

    proptest! {
        #[test]
        fn the_time_it_names_is_the_first_at_which_it_is_lost(
            since in 0u64..5_000, progress in proptest::option::of(0u64..5_000), patience in 1u64..2_000,
        ) {
            let start = Instant::now();
            let at = |ms: u64| start + Duration::from_millis(ms);
            let patience = Duration::from_millis(patience);
            let waiting = Waiting { since: at(since), progress: progress.map(at), patience };
            let lost_at = waiting.lost_at().unwrap();
            prop_assert!(waiting.is_lost(lost_at, lost_at));
            let before = lost_at - Duration::from_millis(1);
            prop_assert!(!waiting.is_lost(before, before));
            prop_assert!(lost_at >= at(since) + patience, "never before its own window");
            prop_assert!(progress.is_none_or(|last| lost_at >= at(last) + patience), "never before everybody's");
        }
    }
}
