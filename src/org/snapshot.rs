//! What a board says: holds, limits, how they changed, and all of it at one moment.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Family, ResourceQuota, Standing};

/// Why an org is not asked any more.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutReason {
    /// Its key is refused (401).
    Unauthorised,
    /// Its key is not allowed this model (403). Of a model family whose requests do not say of which model they are.
    Forbidden,
    /// Its key is not allowed this model (403), and is asked for the others of its family.
    ForbiddenModel(Arc<str>),
    /// Its money or hard quota is used up.
    OutOfQuota,
    /// Somebody said so through [`Org::put_out`](super::Org::put_out).
    Disabled(Arc<str>),
}

impl fmt::Display for OutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OutReason::Unauthorised => f.write_str("its key is refused: check or rotate it"),
            OutReason::Forbidden => f.write_str("its key is not allowed this model: ask for access, or remove it"),
            OutReason::ForbiddenModel(model) => {
                write!(f, "its key is not allowed {model}: ask for access, or remove it")
            }
            OutReason::OutOfQuota => f.write_str("its quota or credit is used up"),
            OutReason::Disabled(why) => f.write_str(why),
        }
    }
}

/// Why an org is held.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldReason {
    /// The provider named a time.
    Hint,
    /// It refused without naming a time, when one call alone was already too many.
    Backoff,
    /// The provider named a time beyond the ceiling: the org is parked, and asked by one call now and then.
    Parked,
    /// Its quota or credit is used up, and the provider named the date on which access comes back.
    OutOfQuota,
}

impl fmt::Display for HoldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HoldReason::Hint => "refused with a hint",
            HoldReason::Backoff => "refused without a hint",
            HoldReason::Parked => "refused with a hint beyond the ceiling",
            HoldReason::OutOfQuota => "its quota or credit is used up until a date",
        })
    }
}

/// An org's circuit: whether it fails too often to be asked. See [`health`](crate::health).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Circuit {
    /// It is asked.
    #[default]
    Closed,
    /// It failed too often, and is not asked until then.
    Open {
        /// When it is probed.
        until: Instant,
    },
    /// It is probed: a few calls at a time, until their answers tell.
    HalfOpen,
}

impl fmt::Display for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Circuit::Closed => "closed",
            Circuit::Open { .. } => "open",
            Circuit::HalfOpen => "half-open",
        })
    }
}

/// An org that is not to be called before some time.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// When the next call may go.
    pub until: Instant,
    /// Why.
    pub reason: HoldReason,
}

impl Hold {
    pub(crate) const fn new(until: Instant, reason: HoldReason) -> Self {
        Hold { until, reason }
    }
}

/// The limiter's cell of a board.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitCell {
    /// Concurrent calls allowed now, as the law has it (a real number).
    pub limit: f64,
    /// The most it may ever be.
    pub cap: usize,
    /// The least it may ever be.
    pub floor: usize,
    /// The longest hold: a longer hint parks the org, and one call probes it each time this has passed.
    pub ceiling: Duration,
    /// How many congestion epochs have begun: cuts and holds.
    pub epoch: u64,
    /// Throttled answers seen.
    pub throttled: u64,
    /// Calls started a second at most, where even one call at a time proved too many.
    pub pace: Option<f64>,
}

/// Why a limit or a pace changed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// Full, clean windows: consecutive ones are one change.
    Grown,
    /// A refusal (of HTTP, a 429) without a hint.
    Refused,
    /// A refusal with a hint.
    Held,
    /// More refusals of the burst that the last change was for: it came nearer to what had fitted.
    Refined,
    /// Refused again before anything that was sent after the last change was answered: the limit has dropped.
    RefusedAgain,
    /// Calls were refused though almost nothing else was in flight: it is the rate that is limited, so starts are paced.
    PaceBegan,
    /// A pace was kept for a while without a refusal: consecutive ones are one change.
    PaceGrown,
    /// A refusal though paced.
    PaceRefused,
    /// Starts no longer waited for the pace: slots limit alone.
    PaceEnded,
    /// Slower calls were refused as often: it is not the rate that is limited, so slots limit alone.
    PaceFutile,
    /// Somebody changed its bounds: [`Org::retune`](super::Org::retune).
    Retuned,
}

impl Why {
    /// Whether the change speaks of the pace, in calls a second, and not of the limit, in slots.
    #[must_use]
    pub const fn is_pace(self) -> bool {
        matches!(self, Why::PaceBegan | Why::PaceGrown | Why::PaceRefused | Why::PaceEnded | Why::PaceFutile)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Grown => "full and clean",
            Why::Refused => "refused without a hint",
            Why::Held => "refused with a hint",
            Why::Refined => "more of the same burst refused",
            Why::RefusedAgain => "refused again, nothing answered since",
            Why::PaceBegan => "refused with almost nothing in flight: the rate is limited",
            Why::PaceGrown => "pace kept without a refusal",
            Why::PaceRefused => "refused at this pace",
            Why::PaceEnded => "pace no longer binds",
            Why::PaceFutile => "slower calls were refused as often",
            Why::Retuned => "retuned",
        })
    }
}

/// One change of a limit or of a pace.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// When: for growth the last step of it.
    pub at: Instant,
    /// From what: slots, or calls a second where [`Why::is_pace`]. A pace that begins comes from infinity.
    pub from: f64,
    /// To what. A pace that ends goes to infinity.
    pub to: f64,
    /// Why.
    pub why: Why,
}

impl Change {
    pub(crate) const fn new(at: Instant, from: f64, to: f64, why: Why) -> Self {
        Change { at, from, to, why }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.why.is_pace() { "calls/s" } else { "slots" };
        write!(f, "{:.1} to {:.1} {unit}: {}", self.from, self.to, self.why)
    }
}

impl LimitCell {
    /// Both limits together.
    pub(super) fn and(self, other: LimitCell) -> LimitCell {
        LimitCell {
            limit: self.limit + other.limit,
            cap: self.cap.saturating_add(other.cap),
            floor: self.floor.saturating_add(other.floor),
            ceiling: self.ceiling.max(other.ceiling),
            epoch: self.epoch + other.epoch,
            throttled: self.throttled + other.throttled,
            pace: self.pace.zip(other.pace).map(|(one, other)| one + other),
        }
    }
}

/// All that is known of an org at one moment: of one model family, or of the whole org, as the handle is that was asked.
///
/// Of a whole org, what is counted is summed over its families: calls in flight and waiting, the limit with its cap and floor.
/// [`Org::families`](super::Org::families) gives the handles to look at each.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The org's name.
    pub name: Arc<str>,
    /// The model family; of a whole org [`Family::default`], which reads `any`.
    pub family: Family,
    /// Whether it speaks of the whole org, all families together.
    pub whole: bool,
    /// Whether it takes new calls, as whoever runs its pool has it: the same for all families, but that a spare may be one for
    /// some of them only.
    pub standing: Standing,
    /// Calls in flight, reservations included.
    pub in_flight: usize,
    /// Services that wait for one of its slots.
    pub waiting: usize,
    /// The limiter's cell; `None` where there is no limiter. Of a whole org the sums, the longest ceiling, and a pace only if
    /// every family has one.
    pub limit: Option<LimitCell>,
    /// How well it has done lately, `0.0..=1.0`: 1 where nothing is known, and again some time after the last failure. Of a whole org
    /// that of its worst family.
    pub health: f64,
    /// Its circuit; of a whole org that of the family that is worst off.
    pub circuit: Circuit,
    /// The hold, if one is open; of a whole org the first to end, if every family with a limiter is held.
    pub hold: Option<Hold>,
    /// The last 32 changes of limit and pace, oldest first; of a whole org each is of one of its families.
    pub history: Vec<Change>,
    /// How much of the load it attracts, against the others' weights: [`Tuning::weight`](super::Tuning::weight). What was
    /// [tuned for one family](super::Org::retune_family) is not in that of the whole org.
    pub weight: f64,
    /// Whether the provider's answers tell its quota (of a whole org: any); where they do not, the limiter has to find out.
    pub quota_told: bool,
    /// The least fraction left of any of its quotas, `0.0..=1.0`; 1 where nothing is known.
    pub headroom: f64,
    /// Each resource of its quota that answers tell of; of a whole org those of all its families. Empty once every service of the
    /// stack, and every handle to its pool, is dropped.
    pub quota: Vec<ResourceQuota>,
    /// Why it is out, if it is.
    pub out: Option<OutReason>,
    /// The models that its key is not allowed, and that it is not asked for, in the order in which it refused them.
    pub refused_models: Vec<Arc<str>>,
    /// The provider's own id for the org, from its answers: two keys with one id share one quota.
    pub organisation: Option<Arc<str>>,
    /// Which org of the pool serves in its place, if it is a [spare](Standing::Spare); of a whole org, if it serves no family.
    pub spare_of: Option<Arc<str>>,
}

impl Snapshot {
    /// The resource of which the least part is left at this moment: the one that binds first. Ask while calls run; when all buckets
    /// are full again it says little.
    #[must_use]
    pub fn binds(&self) -> Option<&ResourceQuota> {
        self.quota.iter().min_by(|one, other| one.headroom().total_cmp(&other.headroom()))
    }
}
