//! What a plan says.

use std::{fmt, time::Duration};

use super::workload::Objective;
use crate::{dialect::Resource, org::BuildError};

/// Which way the calls go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// Each call at once, over all orgs.
    Direct,
    /// In the provider's batches.
    Batch,
    /// So many rows each way, at the same time: where a deadline leaves room for some of the saving, or for nothing else.
    Split {
        /// Rows sent direct.
        direct: u64,
        /// Rows sent in batches.
        batch: u64,
    },
}

impl Route {
    /// `direct`, `batch` or `split`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Route::Direct => "direct",
            Route::Batch => "batch",
            Route::Split { .. } => "split",
        }
    }

    /// Which service tier it is paid at: `standard`, `batch` or `standard + batch`.
    #[must_use]
    pub fn tier(self) -> &'static str {
        match self {
            Route::Direct => "standard",
            Route::Batch => "batch",
            Route::Split { .. } => "standard + batch",
        }
    }
}

/// What limits the time: doubling it would shorten the run most.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Binds {
    /// There is nothing to do.
    Nothing,
    /// No limit: the run is over before one is met, and single calls and the start take most of it.
    Latency,
    /// A quota.
    Quota {
        /// Of what.
        resource: Resource,
        /// The org of which it holds back most.
        org: String,
    },
    /// Slots: the orgs would take more calls at once than the caps allow.
    Concurrency {
        /// The org of which they hold back most.
        org: String,
    },
    /// The client process, whatever the quotas.
    Client,
    /// How long one batch takes.
    BatchTurnaround,
    /// How many batches may be at work at once.
    BatchesInFlight,
    /// How many rows may be queued at once: else more batches would be at work.
    BatchQueue,
    /// That some batch is wedged, more likely than not: until it is given up the others have long ended.
    WedgedBatch,
    /// The deadline: without it the cheaper way would take all.
    Deadline,
}

impl Binds {
    /// What binds, in a word for tables and programs: `requests`, `concurrency`, `batch turnaround`, ...
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Binds::Nothing => "nothing",
            Binds::Latency => "latency",
            Binds::Quota { resource: Resource::Requests, .. } => "requests",
            Binds::Quota { resource: Resource::InputTokens, .. } => "input tokens",
            Binds::Quota { resource: Resource::OutputTokens, .. } => "output tokens",
            Binds::Quota { resource: Resource::Tokens, .. } => "tokens",
            Binds::Concurrency { .. } => "concurrency",
            Binds::Client => "client",
            Binds::BatchTurnaround => "batch turnaround",
            Binds::BatchesInFlight => "batches in flight",
            Binds::BatchQueue => "batch queue",
            Binds::WedgedBatch => "a wedged batch",
            Binds::Deadline => "deadline",
        }
    }
}

impl fmt::Display for Binds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Binds::Quota { org, .. } | Binds::Concurrency { org } => write!(f, " ({org})"),
            _ => Ok(()),
        }
    }
}

/// A time that is not certain.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Estimate {
    /// It is sooner once in ten times.
    pub p10: Duration,
    /// It is sooner every second time.
    pub median: Duration,
    /// It is later once in ten times.
    pub p90: Duration,
    /// The mean: what the choice goes by, since a rare wedged batch is not in the median.
    pub mean: Duration,
}

impl fmt::Display for Estimate {
    /// `14.2 min (13.9..14.6 min)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [median, p10, p90] = [self.median, self.p10, self.p90].map(|time| Short(time).to_string());
        if p10 == p90 { write!(f, "{median}") } else { write!(f, "{median} ({p10} .. {p90})") }
    }
}

/// A duration in three digits or so.
struct Short(Duration);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        let (figure, unit) = match seconds {
            ..99.95 => (seconds, "s"),
            ..5_997.0 => (seconds / 60.0, "min"),
            ..259_200.0 => (seconds / 3_600.0, "h"),
            _ => (seconds / 86_400.0, "d"),
        };
        if figure < 9.95 { write!(f, "{figure:.1} {unit}") } else { write!(f, "{figure:.0} {unit}") }
    }
}

/// What one way would take.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Forecast {
    /// From the start to the last answer.
    pub time: Estimate,
    /// In dollars; `None` without a price.
    pub cost: Option<f64>,
    /// What limits the time.
    pub binds: Binds,
}

/// One org's part in a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrgShare {
    /// Its name.
    pub name: String,
    /// Direct calls in flight; 0 where none go direct.
    pub concurrency: usize,
    /// Batches at work at once; 0 where there are none.
    pub batches: usize,
}

/// Which way, how wide, how long, at what cost, and why.
///
/// `Display` is the one line of [`reason`](Plan::reason).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// How many calls: the unanswered remainder.
    pub n: u64,
    /// Of which model.
    pub model: String,
    /// What the plan is to be good at.
    pub objective: Objective,
    /// Which way they go.
    pub route: Route,
    /// The orgs that take part.
    pub orgs: Vec<OrgShare>,
    /// Rows a batch; `None` where there are none.
    pub chunk: Option<u64>,
    /// From the start to the last answer.
    pub time: Estimate,
    /// In dollars, list price less the batch discount; `None` without a price.
    pub cost: Option<f64>,
    /// What limits the time.
    pub binds: Binds,
    /// From so many calls on a [`Balanced`](Objective::Balanced) plan of this workload without a deadline goes in batches, over this fleet;
    /// `None`: at no number.
    pub crossover: Option<u64>,
    /// What all of it would take directly.
    pub direct: Forecast,
    /// What all of it would take in batches; `None` where no org takes any.
    pub batch: Option<Forecast>,
    /// Why this way, in half a sentence.
    pub why: String,
}

impl Plan {
    /// The plan in one line: `N=… | route=… | objective=… | binds=… | time=… | cost=… | why`.
    #[must_use]
    pub fn reason(&self) -> String {
        let cost = self.cost.map_or("unknown".to_owned(), |cost| format!("${cost:.2}"));
        let route = match self.route {
            Route::Split { direct, batch } => format!("split ({direct} direct, {batch} in batches)"),
            route => route.name().to_owned(),
        };
        format!(
            "N={} | route={route} | objective={} | binds={} | time={} | cost={cost} | {}",
            self.n,
            self.objective.name(),
            self.binds,
            self.time,
            self.why
        )
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason())
    }
}

/// Why there is no plan.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// A figure that cannot be meant; it names the field.
    Invalid(BuildError),
    /// No org serves the model, or a call is larger than the buckets of all that do.
    NoOrg {
        /// The model.
        model: String,
    },
    /// No way is likely enough to be done by then: nine times in ten.
    Deadline {
        /// What was asked for.
        deadline: Duration,
        /// The soonest plan, without a deadline.
        soonest: Box<Plan>,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::Invalid(error) => write!(f, "{error}"),
            PlanError::NoOrg { model } => {
                write!(f, "no org serves {model}, or none has room for a single call of it: give some org its limits")
            }
            PlanError::Deadline { deadline, soonest } => write!(
                f,
                "not likely to be done within {}: the soonest is {}, and {} binds; allow more time, or more of that",
                Short(*deadline),
                soonest.time,
                soonest.binds
            ),
        }
    }
}

impl std::error::Error for PlanError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            PlanError::Invalid(error) => Some(error),
            _ => None,
        }
    }
}

impl From<BuildError> for PlanError {
    fn from(error: BuildError) -> Self {
        PlanError::Invalid(error)
    }
}
