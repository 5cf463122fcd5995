//! The two purses of one request: what an answer costs it, and what it may do next. Pure.

use std::fmt;

use tokio::time::Instant;

use super::policy::Policy;
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
    /// The purse of 429s: refused, or about to wait, for longer than the patience.
    Patience,
    /// The count of wire calls.
    Calls,
}

/// What the purses are told of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) class: Class,
    pub(crate) not_before: Option<Instant>,
    pub(crate) held_below: bool,
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
            Purse::Errors => self.error(policy, said, now, roll),
            Purse::Throttles => self.throttle(policy, said, now, roll),
        };
        let again = matches!(verdict, Verdict::AtOnce | Verdict::Wait { .. });
        if again && self.wire_calls >= policy.max_calls { Verdict::GiveUp(Exhaustion::Calls) } else { verdict }
    }

    fn error(&self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        let errors = self.counts.paid_by(Purse::Errors);
        if errors >= policy.max_attempts {
            return Verdict::GiveUp(Exhaustion::Attempts);
        }
        let until = later(now, policy.backoff.full(errors, roll));
        Verdict::Wait { until: said.not_before.map_or(until, |hint| hint.max(until)), pays: true }
    }

    fn throttle(&mut self, policy: &Policy, said: Said, now: Instant, roll: f64) -> Verdict {
        let since = *self.refused_since.get_or_insert(now);
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
        if Self::lost_patience(policy, since, until) {
            return Verdict::GiveUp(Exhaustion::Patience);
        }
        if at_once { Verdict::AtOnce } else { Verdict::Wait { until, pays: false } }
    }

    /// The one place that says when 429s have gone on for too long. A wait that would end too late is not begun.
    fn lost_patience(policy: &Policy, since: Instant, until: Instant) -> bool {
        until.saturating_duration_since(since) >= policy.patience
    }
}

/// Saturating: a wait beyond what the clock can say leaves the time as it is.
fn later(at: Instant, by: std::time::Duration) -> Instant {
    at.checked_add(by).unwrap_or(at)
}
