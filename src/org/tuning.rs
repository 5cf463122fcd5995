//! What may be changed of an org while calls run.

use std::time::Duration;

use super::BuildError;

/// What is to be changed of a running org's limits and of its share of the load; what is not set stays as it is. Given to
/// [`Org::retune`](super::Org::retune) or [`Org::retune_family`](super::Org::retune_family).
///
/// ```
/// use tower_quota::org::{Org, Tuning};
///
/// let org = Org::new("research");
/// org.retune(Tuning::new().cap(20).weight(2.0))?;
/// let refused = org.retune(Tuning::new().cap(0)).unwrap_err();
/// assert_eq!(refused.field(), "cap");
/// # Ok::<_, tower_quota::org::BuildError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[must_use = "it changes nothing until it is given to an org"]
pub struct Tuning {
    pub(crate) cap: Option<usize>,
    pub(crate) floor: Option<usize>,
    pub(crate) ceiling: Option<Duration>,
    pub(crate) weight: Option<f64>,
}

impl Tuning {
    /// Changes nothing.
    pub const fn new() -> Self {
        Tuning { cap: None, floor: None, ceiling: None, weight: None }
    }

    /// The most concurrent calls for one model family, at least 1. It wins over every other source of caps, and over a
    /// floor: where it is the lower one, it is the floor too.
    ///
    /// Lowered, it drops no call in flight: none is admitted until enough have ended. Raised, what was limited by the cap
    /// alone grows from the new cap's starting fraction by doubling, until it is refused; a limit that refusals have found
    /// stays.
    pub const fn cap(mut self, calls: usize) -> Self {
        self.cap = Some(calls);
        self
    }

    /// The lowest limit, at least 1. Where a cap was tuned too, no higher than that.
    pub const fn floor(mut self, calls: usize) -> Self {
        self.floor = Some(calls);
        self
    }

    /// The longest hold, longer than zero: a longer hint parks the org, and one call probes it each time this has passed. A
    /// hold that is open and longer is shortened to it.
    ///
    /// Whoever reads hints has a ceiling of its own (five minutes by default): for more, raise that too, in the stack by
    /// [`JudgeLayer::hint_ceiling`](crate::judge::JudgeLayer::hint_ceiling).
    pub const fn ceiling(mut self, longest_hold: Duration) -> Self {
        self.ceiling = Some(longest_hold);
        self
    }

    /// How much of the load it attracts, against the others' weights; a finite number above 0, 1 where none was set. An org
    /// of weight 2 counts as half as busy as it is: while there are free slots, it has twice the calls in flight. Where
    /// every slot is taken it makes no difference, since whichever slot is free is used.
    pub const fn weight(mut self, weight: f64) -> Self {
        self.weight = Some(weight);
        self
    }

    /// This, and for what it does not set, `earlier`.
    pub(super) fn or(self, earlier: Tuning) -> Tuning {
        Tuning {
            cap: self.cap.or(earlier.cap),
            floor: self.floor.or(earlier.floor),
            ceiling: self.ceiling.or(earlier.ceiling),
            weight: self.weight.or(earlier.weight),
        }
    }

    /// Whether it can come after `earlier`.
    pub(super) fn check(&self, earlier: Tuning) -> Result<(), BuildError> {
        if self.cap == Some(0) {
            return Err(BuildError::new("cap", "must be at least 1; to send an org nothing, disable it"));
        }
        if let Some(floor) = self.floor {
            if floor == 0 {
                return Err(BuildError::new("floor", "must be at least 1: a limit of 0 would never be left"));
            }
            if let Some(cap) = self.or(earlier).cap.filter(|cap| *cap < floor) {
                return Err(BuildError::new("floor", format!("{floor} is above the cap, {cap}")));
            }
        }
        if self.ceiling.is_some_and(|ceiling| ceiling.is_zero()) {
            return Err(BuildError::new("ceiling", "must be longer than zero"));
        }
        match self.weight {
            Some(weight) if !(weight.is_finite() && weight > 0.0) => Err(BuildError::new(
                "weight",
                format!("{weight} is not a finite number above 0; to send an org nothing, disable it"),
            )),
            _ => Ok(()),
        }
    }
}
