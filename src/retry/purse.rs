//! The two purses of one request: what an answer costs it, and what it may do next. Pure.

use std::fmt;

use tokio::time::Instant;

use super::{error::spoken, policy::Policy, stall::Waiting};
use crate::outcome::{Class, Purse};

/// How many answers of each class.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts([u32; Class::ALL.len()]);

impl Counts {
    pub(crate) fn add(&mut self, class: Class) {
        let count = &mut self.0[class as usize];
        *count = count.saturating_add(1);
    }

    /// Answers of this class.
    #[must_use]
    pub fn of(&self, class: Class) -> u32 {
        self.0[class as usize]
    }

    /// Answers that this purse paid for.
    #[must_use]
    pub fn paid_by(&self, purse: Purse) -> u32 {
        self.iter().filter(|(class, _)| class.implies().purse == purse).map(|(_, count)| count).sum()
    }

    /// The classes that occurred, in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = (Class, u32)> + '_ {
        Class::ALL.into_iter().map(|class| (class, self.of(class))).filter(|(_, count)| *count > 0)
    }
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// Which bound ended it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exhaustion {
    /// The purse of errors: every allowed attempt ended in one.
    Attempts,
    /// It has waited for longer than the patience, refused or for its turn, and no other request has got anywhere for as long.
    Stalled,
    /// The count of wire calls.
    Calls,
    /// Its [deadline](super::Deadline).
    Deadline,
}

impl Exhaustion {
    /// In words, for the log and for observers.
    pub(crate) const fn in_words(self) -> &'static str {
        match self {
            Exhaustion::Attempts => "no attempt left",
            Exhaustion::Stalled => "waited too long, and nothing else got anywhere",
            Exhaustion::Calls => "no call left",
            Exhaustion::Deadline => "not done by its deadline",
        }
    }
}

/// What the purses are told of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) class: Class,
    pub(crate) not_before: Option<Instant>,
    pub(crate) held_below: bool,
    /// When any request of the layer last had its answer.
    pub(crate) progress: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The answer goes to the caller as it is.
    Return,
    /// Again at once: whoever is below waits, or asks another org.
    AtOnce,
    /// Again, not before this; an error pays the shared budget then.
    Wait { until: Instant, pays: bool },
    /// No more.
    GiveUp(Exhaustion),
}

impl Verdict {
    /// What follows, for the log.
    pub(crate) fn in_words(self, now: Instant) -> String {
        match self {
            Verdict::Return => "returned".to_owned(),
            Verdict::AtOnce => "again at once".to_owned(),
            Verdict::Wait { until, .. } => format!("again in {}", spoken(until.saturating_duration_since(now))),
            Verdict::GiveUp(reason) => format!("given up: {}", reason.in_words()),
        }
    }
}

/// The state of one request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Purses {
    pub(crate) counts: Counts,
    pub(crate) wire_calls: u32,
    /// The first 429.
    refused_since: Option<Instant>,
    /// 429s waited out up here. Never reset: not by a hint of zero, not by an error between.
    waits: u32,
}

impl Purses {
    /// How long it waits for what nobody is to blame for: from the first 429; until there is one, from when it began to wait
    /// for its turn.
    pub(crate) fn waiting(&self, policy: &Policy, began: Instant, progress: Option<Instant>) -> Waiting {
        Waiting { since: self.refused_since.unwrap_or(began), progress, patience: policy.patience }
    }

    /// Its wait was not seen: it begins anew.
    pub(crate) fn wait_anew(&mut self, now: Instant) {
        self.refused_since = self.refused_since.map(|_| now);
    }

    /// Counts an attempt that was given up in flight.
    pub(crate) fn cut_off(&mut self) {
        self.counts.add(Class::Transport);
        self.wire_calls = self.wire_calls.saturating_add(1);
    }

    /// Counts an answer and says what follows. `roll` is a draw from `0.0..1.0`.
    pub(crate) fn pay(&mut self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        self.counts.add(said.class);
        if !matches!(said.class, Class::Local | Class::NoOrg) {
            self.wire_calls = self.wire_calls.saturating_add(1);
        }
        let verdict = match said.class.implies().purse {
            Purse::Closed => Verdict::Return,
            Purse::Elsewhere if said.held_below => Verdict::AtOnce,
            Purse::Elsewhere => Verdict::Return,
            Purse::Once => return self.once(policy, said, now, roll),
            Purse::Errors => self.error(policy, said, now, roll),
            Purse::Throttles => self.throttle(policy, said, now, roll),
        };
        let again = matches!(verdict, Verdict::AtOnce | Verdict::Wait { .. });
        if again && self.wire_calls >= policy.max_calls { Verdict::GiveUp(Exhaustion::Calls) } else { verdict }
    }

    /// Where there may be no other attempt the answer tells more than that it was given up.
    fn once(&self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        let is_second = self.counts.of(said.class) > 1;
        if is_second || policy.max_attempts == 1 || self.wire_calls >= policy.max_calls {
            return Verdict::Return;
        }
        Self::backoff(policy, said, now, 1, roll)
    }

    fn error(&self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        let errors = self.counts.paid_by(Purse::Errors);
        if errors >= policy.max_attempts {
            return Verdict::GiveUp(Exhaustion::Attempts);
        }
        Self::backoff(policy, said, now, errors, roll)
    }

    fn backoff(policy: &Policy, said: Said, now: Instant, errors: u32, roll: f64) -> Verdict {
        let until = later(now, policy.backoff.full(errors, roll));
        Verdict::Wait { until: said.not_before.map_or(until, |hint| hint.max(until)), pays: true }
    }

    fn throttle(&mut self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        self.refused_since.get_or_insert(now);
        let at_once = said.class == Class::Throttled && said.held_below;
        let until = if at_once {
            now
        } else {
            self.waits = self.waits.saturating_add(1);
            match said.not_before.filter(|hint| *hint > now) {
                // Later than told by up to one base, never earlier: those refused together do not come back together.
                Some(hint) => later(hint, policy.backoff.full(1, roll)),
                None => later(now, policy.backoff.equal(self.waits, roll)),
            }
        };
        if self.waiting(policy, now, said.progress).is_lost(now, until) {
            return Verdict::GiveUp(Exhaustion::Stalled);
        }
        if at_once { Verdict::AtOnce } else { Verdict::Wait { until, pays: false } }
    }
}

/// Saturating: a wait beyond what the clock can say leaves the time as it is.
fn later(at: Instant, by: std::time::Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retry::policy::Backoff;
    use proptest::prelude::*;
    use std::time::Duration;

    fn policy() -> Policy {
        Policy {
            max_attempts: 5,
            backoff: Backoff { base: Duration::from_millis(500), factor: 2.0, cap: Duration::from_secs(30) },
            patience: Duration::from_secs(600),
            max_calls: 1_000,
            idempotency_key: true,
            deadline: None,
        }
    }

    fn said(class: Class) -> Said {
        Said { class, not_before: None, held_below: false, progress: None }
    }

    #[test]
    fn the_table_decides_whose_purse_pays() {
        let now = Instant::now();
        for class in Class::ALL {
            for held_below in [false, true] {
                let verdict = Purses::default().pay(&policy(), Said { held_below, ..said(class) }, now, 0.5);
                let expected = match (class.implies().purse, class, held_below) {
                    (Purse::Closed, ..) | (Purse::Elsewhere, _, false) => Verdict::Return,
                    (Purse::Elsewhere, _, true) | (_, Class::Throttled, true) => Verdict::AtOnce,
                    (Purse::Throttles, ..) => Verdict::Wait { until: now + Duration::from_millis(375), pays: false },
                    (Purse::Errors | Purse::Once, ..) => {
                        Verdict::Wait { until: now + Duration::from_millis(250), pays: true }
                    }
                };
                assert_eq!(verdict, expected, "{class}, held below: {held_below}");
            }
        }
    }

    #[test]
    fn the_log_says_how_long_not_until_when() {
        let now = Instant::now();
        let wait = |millis| Verdict::Wait { until: now + Duration::from_millis(millis), pays: true }.in_words(now);
        assert_eq!((wait(503), wait(7_900)), ("again in 503ms".to_owned(), "again in 7s".to_owned()));
        assert_eq!(Verdict::AtOnce.in_words(now), "again at once");
        assert_eq!(Verdict::GiveUp(Exhaustion::Attempts).in_words(now), "given up: no attempt left");
    }

    #[test]
    fn a_hint_is_a_floor() {
        let now = Instant::now();
        let hint = now + Duration::from_secs(7);
        for roll in [0.0, 0.999] {
            for class in [Class::Overloaded, Class::Throttled, Class::ThrottledRequest] {
                let Verdict::Wait { until, .. } =
                    Purses::default().pay(&policy(), Said { not_before: Some(hint), ..said(class) }, now, roll)
                else {
                    panic!("{class} is retried");
                };
                assert!(until >= hint, "{class}");
                assert!(until <= hint + Duration::from_millis(500), "{class}");
            }
        }
    }

    #[test]
    fn a_hint_that_is_past_does_not_reset_the_growth() {
        let start = Instant::now();
        let mut purses = Purses::default();
        let mut now = start;
        let mut within_a_second = 1;
        for _ in 0..10 {
            // The shortest draw there is.
            let verdict = purses.pay(&policy(), Said { not_before: Some(now), ..said(Class::Throttled) }, now, 0.0);
            let Verdict::Wait { until, .. } = verdict else { panic!("{verdict:?}") };
            now = until;
            within_a_second += u32::from(now < start + Duration::from_secs(1));
        }
        assert_eq!(within_a_second, 3, "at 0, 250 and 750 ms at the earliest");
        assert_eq!(
            now.duration_since(start),
            Duration::from_millis(250 + 500 + 1_000 + 2_000 + 4_000 + 8_000 + 4 * 15_000)
        );
    }

    #[test]
    fn a_wait_that_would_outlast_the_patience_is_not_begun() {
        let now = Instant::now();
        let hinted = |wait| Said { not_before: Some(now + Duration::from_secs(wait)), ..said(Class::Throttled) };
        assert_eq!(Purses::default().pay(&policy(), hinted(600), now, 0.0), Verdict::GiveUp(Exhaustion::Stalled));
        assert!(matches!(Purses::default().pay(&policy(), hinted(599), now, 0.0), Verdict::Wait { .. }));
        let mut purses = Purses::default();
        let held = Said { held_below: true, ..said(Class::Throttled) };
        assert_eq!(purses.pay(&policy(), held, now, 0.0), Verdict::AtOnce);
        assert_eq!(purses.pay(&policy(), held, now + Duration::from_secs(599), 0.0), Verdict::AtOnce);
        assert_eq!(
            purses.pay(&policy(), held, now + Duration::from_secs(600), 0.0),
            Verdict::GiveUp(Exhaustion::Stalled)
        );
    }

    #[test]
    fn what_could_not_be_read_is_sent_once_more_whatever_else_has_failed() {
        use Class::{Garbled, Overloaded, Throttled};
        // Attempts and calls that are allowed, the answers, and whether each but the last is followed by another attempt.
        for (max_attempts, max_calls, answers, ends) in [
            (5, 1_000, &[Garbled, Garbled][..], Verdict::Return),
            (5, 1_000, &[Garbled, Throttled, Overloaded, Garbled], Verdict::Return),
            // It takes nothing from the purse of errors, nor that from it.
            (2, 1_000, &[Garbled, Overloaded, Overloaded], Verdict::GiveUp(Exhaustion::Attempts)),
            (2, 1_000, &[Overloaded, Garbled, Overloaded], Verdict::GiveUp(Exhaustion::Attempts)),
            (3, 1_000, &[Overloaded, Overloaded, Garbled, Garbled], Verdict::Return),
            // Where there is no retry of errors at all, the answer is the answer.
            (1, 1_000, &[Garbled], Verdict::Return),
            (5, 1, &[Garbled], Verdict::Return),
            (5, 2, &[Throttled, Garbled], Verdict::Return),
            (5, 2, &[Garbled, Overloaded], Verdict::GiveUp(Exhaustion::Calls)),
        ] {
            let policy = Policy { max_attempts, max_calls, ..policy() };
            let (mut purses, now) = (Purses::default(), Instant::now());
            let verdicts: Vec<_> = answers.iter().map(|class| purses.pay(&policy, said(*class), now, 0.5)).collect();
            let (last, before) = verdicts.split_last().unwrap();
            assert_eq!(*last, ends, "{answers:?} of {max_attempts}");
            assert!(before.iter().all(|verdict| matches!(verdict, Verdict::Wait { .. })), "{answers:?}: {before:?}");
        }
    }

    #[test]
    fn a_wait_beyond_the_window_is_begun_while_others_are_served() {
        let now = Instant::now();
        let hinted = Said { not_before: Some(now + Duration::from_secs(3_600)), ..said(Class::Throttled) };
        let ago = |seconds| now.checked_sub(Duration::from_secs(seconds));
        for (progress, begun) in [(None, false), (ago(0), true), (ago(599), true), (ago(600), false)] {
            let verdict = Purses::default().pay(&policy(), Said { progress, ..hinted }, now, 0.0);
            assert_eq!(matches!(verdict, Verdict::Wait { .. }), begun, "{progress:?}");
            assert_eq!(verdict == Verdict::GiveUp(Exhaustion::Stalled), !begun);
        }
    }

    #[test]
    fn what_never_left_the_machine_is_no_wire_call() {
        let mut purses = Purses::default();
        for class in [Class::Local, Class::Transport, Class::Throttled, Class::NoOrg] {
            let _ = purses.pay(&policy(), said(class), Instant::now(), 0.0);
        }
        assert_eq!(purses.wire_calls, 2);
    }

    #[test]
    fn the_count_of_calls_bounds_everything() {
        let policy = Policy { max_calls: 3, ..policy() };
        for class in [Class::Throttled, Class::Unauthorised, Class::Overloaded] {
            let mut purses = Purses::default();
            let held = Said { held_below: true, ..said(class) };
            let verdicts = [(); 3].map(|()| purses.pay(&policy, held, Instant::now(), 0.0));
            assert!(matches!(verdicts[1], Verdict::AtOnce | Verdict::Wait { .. }), "{class}");
            assert_eq!(verdicts[2], Verdict::GiveUp(Exhaustion::Calls), "{class}");
        }
    }

    proptest! {
        /// Whatever stands between the errors, they fare as if they stood alone.
        #[test]
        fn throttles_never_touch_the_purse_of_errors(
            errors in 1usize..6,
            throttles in 0usize..60,
            order in any::<u64>(),
            roll in 0.0..1.0f64,
        ) {
            let policy = Policy { patience: Duration::MAX, ..policy() };
            let mut classes = vec![Class::Overloaded; errors];
            classes.extend((0..throttles).map(|n| [Class::Throttled, Class::ThrottledRequest][n % 2]));
            fastrand::Rng::with_seed(order).shuffle(&mut classes);

            let now = Instant::now();
            let (mut mixed, mut alone) = (Purses::default(), Purses::default());
            for class in classes {
                let verdict = mixed.pay(&policy, said(class), now, roll);
                if class == Class::Overloaded {
                    prop_assert_eq!(verdict, alone.pay(&policy, said(class), now, roll));
                } else {
                    let waits = matches!(verdict, Verdict::Wait { pays: false, .. });
                    prop_assert!(waits, "a 429 costs no budget and no attempt: {:?}", verdict);
                }
            }
            prop_assert_eq!(mixed.counts.paid_by(Purse::Errors), alone.counts.paid_by(Purse::Errors));
        }

        #[test]
        fn every_request_ends(
            answers in proptest::collection::vec((0usize..Class::ALL.len(), any::<bool>(), 0u64..400), 20),
        ) {
            let policy = Policy { max_calls: 50, ..policy() };
            let mut purses = Purses::default();
            let mut now = Instant::now();
            let mut calls = 0;
            for (class, held_below, hint) in answers.into_iter().cycle() {
                let not_before = Some(now + Duration::from_secs(hint));
                let verdict = purses.pay(&policy, Said { not_before, held_below, ..said(Class::ALL[class]) }, now, 0.5);
                calls += 1;
                match verdict {
                    Verdict::Return | Verdict::GiveUp(_) => break,
                    Verdict::AtOnce => {}
                    Verdict::Wait { until, .. } => {
                        prop_assert!(until > now, "no wait is empty");
                        now = until;
                    }
                }
            }
            prop_assert!(calls <= 54, "{} calls: the bound, and errors that never left the machine", calls);
        }
    }
}
