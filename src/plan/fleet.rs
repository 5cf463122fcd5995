//! What there is to do it with: orgs, what they allow, how long calls and batches take, and what tokens cost.

use std::time::Duration;

use super::spread::Spread;
use crate::{
    aimd::Caps,
    dialect::Resource,
    org::{BuildError, Family, Org},
};

/// How long a call takes from its sending to the end of its answer: lognormal, with a tail of calls that take much longer if one
/// is set.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Latency {
    /// The median.
    pub p50: Duration,
    /// The 95th percentile, of calls that are not in the tail.
    pub p95: Duration,
    /// The part of calls in the tail, from 0 to 1. Default 0.
    pub tail_share: f64,
    /// The median of those.
    pub tail_p50: Duration,
}

impl Default for Latency {
    /// 1.52 s and 3.50 s: 2,500 calls of up to 64 tokens at 100 in flight, measured on 2026-06-25 (claude-sonnet-4-5).
    fn default() -> Self {
        Latency::new(Duration::from_millis(1_520), Duration::from_millis(3_500))
    }
}

/// The 95th percentile of the normal.
const Z95: f64 = 1.644_853_6;

impl Latency {
    /// By median and 95th percentile.
    #[must_use]
    pub fn new(p50: Duration, p95: Duration) -> Self {
        Latency { p50, p95, tail_share: 0.0, tail_p50: Duration::ZERO }
    }

    /// By the median and the standard deviation of the logarithm.
    #[must_use]
    pub fn lognormal(p50: Duration, sigma: f64) -> Self {
        let factor = (Z95 * sigma.clamp(0.0, 5.0)).exp();
        Latency::new(p50, if factor.is_finite() { p50.mul_f64(factor) } else { p50 })
    }

    /// This part of calls takes so long in the median instead.
    #[must_use]
    pub fn tail(mut self, share: f64, p50: Duration) -> Self {
        self.tail_share = share;
        self.tail_p50 = p50;
        self
    }

    fn check(&self) -> Result<(), BuildError> {
        if self.p50.is_zero() || self.p95 < self.p50 {
            return Err(BuildError::new("latency", "the median must be above zero and not above the 95th percentile"));
        }
        match (0.0..1.0).contains(&self.tail_share) {
            true => Ok(()),
            false => Err(BuildError::new("latency", format!("a tail of {} is not from 0 to 1", self.tail_share))),
        }
    }

    pub(crate) fn spread(&self) -> Spread {
        let (p50, p95) = (self.p50.as_secs_f64(), self.p95.as_secs_f64());
        Spread::lognormal(p50, (p95 / p50).ln() / Z95).with_tail(self.tail_share, self.tail_p50.as_secs_f64())
    }
}

/// What one org allows of one model, and how it answers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// A minute, in the order of [`Resource::ALL`]; `None` is no limit.
    pub per_minute: [Option<f64>; 4],
    /// How much of a resource may be spent at once, as the time in which so much comes back. Default a minute: of 30,000
    /// requests a minute 29,982 were seen to remain after the first calls.
    pub burst: Duration,
    /// The most calls in flight: manners, not the provider's limit. Default by the model's family, that of
    /// [`aimd::Caps`](crate::aimd::Caps).
    pub cap: Option<usize>,
    /// How long its calls take. Default: [`Latency::default`].
    pub latency: Latency,
}

impl Default for Limits {
    /// No limit but the family's cap.
    fn default() -> Self {
        Limits { per_minute: [None; 4], burst: Duration::from_secs(60), cap: None, latency: Latency::default() }
    }
}

impl Limits {
    /// No limit but the family's cap.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// So much of a resource a minute.
    #[must_use]
    pub fn per_minute(mut self, resource: Resource, limit: f64) -> Self {
        self.per_minute[resource.index()] = Some(limit);
        self
    }

    /// Sets [`burst`](Self::burst).
    #[must_use]
    pub fn burst(mut self, burst: Duration) -> Self {
        self.burst = burst;
        self
    }

    /// Sets [`cap`](Self::cap).
    #[must_use]
    pub fn cap(mut self, cap: usize) -> Self {
        self.cap = Some(cap);
        self
    }

    /// Sets [`latency`](Self::latency).
    #[must_use]
    pub fn latency(mut self, latency: Latency) -> Self {
        self.latency = latency;
        self
    }

    fn check(&self, org: &str) -> Result<(), BuildError> {
        let wrong = |problem: String| Err(BuildError::new(format!("limits of {org}"), problem));
        if let Some(bad) = self.per_minute.iter().flatten().find(|limit| !(limit.is_finite() && **limit > 0.0)) {
            return wrong(format!("{bad} a minute is not a number above zero"));
        }
        if self.cap == Some(0) {
            return wrong("a cap of 0 would never let a call go".to_owned());
        }
        if self.burst.is_zero() {
            return wrong("the burst must be longer than zero".to_owned());
        }
        self.latency.check().map_err(|error| BuildError::new(format!("limits of {org}"), error.to_string()))
    }

    /// Calls in flight at most.
    pub(crate) fn slots(&self, model: &str) -> usize {
        self.cap.unwrap_or_else(|| Caps::default().of(&Org::new("any").family(&Family::of_model(model))))
    }
}

/// An org: what it allows of each model, and of batches.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OrgPlan {
    /// Its name, as in reports.
    pub name: String,
    /// By model id.
    pub models: Vec<(String, Limits)>,
    /// Batches at work at once, at most; 0 where the org takes none. Default 4, an earlier dispatcher's.
    pub batches: usize,
    /// Rows that may be queued in batches at once. Default 100,000, a first tier's; a tenth of it is left to colleagues.
    pub queue_rows: u64,
}

impl OrgPlan {
    /// An org that serves no model yet.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        OrgPlan { name: name.into(), models: Vec::new(), batches: 4, queue_rows: 100_000 }
    }

    /// It serves this model, within these limits.
    #[must_use]
    pub fn serves(mut self, model: impl Into<String>, limits: Limits) -> Self {
        self.models.push((model.into(), limits));
        self
    }

    /// Sets [`batches`](Self::batches).
    #[must_use]
    pub fn batches(mut self, most: usize) -> Self {
        self.batches = most;
        self
    }

    /// Sets [`queue_rows`](Self::queue_rows).
    #[must_use]
    pub fn queue_rows(mut self, rows: u64) -> Self {
        self.queue_rows = rows;
        self
    }

    /// What it allows of a model: of that very name, or of its family.
    #[must_use]
    pub fn limits(&self, model: &str) -> Option<&Limits> {
        let family = Family::of_model(model);
        let exact = self.models.iter().find(|(name, _)| name == model);
        exact
            .or_else(|| self.models.iter().find(|(name, _)| Family::of_model(name) == family))
            .map(|(_, limits)| limits)
    }
}

/// Dollars per million tokens of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Price {
    /// Of input.
    pub input: f64,
    /// Of output.
    pub output: f64,
}

impl Price {
    /// Dollars per million tokens.
    #[must_use]
    pub fn per_million(input: f64, output: f64) -> Self {
        Price { input, output }
    }
}

/// How the provider's batch API behaves.
///
/// The defaults are fitted to three observations of 2026, and are to be replaced by your own: batches of 500 rows came back in
/// about five minutes; of some twenty batches of 2,001 rows one had no row done after sixteen hours; and one of 8,000 rows had none
/// after eight.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BatchModel {
    /// The median time from creation to the end of a small batch. Default 2 minutes.
    pub base: Duration,
    /// What each row adds to that. Default 0.36 s: then 500 rows take 5 minutes.
    pub per_row: Duration,
    /// The standard deviation of the logarithm of that time. Default 0.5; nobody has measured it.
    pub sigma: f64,
    /// A batch of so many rows is *wedged* with a chance of 1 − 1/e: it is accepted and no row of it is ever served. The chance grows
    /// with the square of the rows. Default 9,600: 1 % of 1,000 rows, 4 % of 2,000, half of 8,000. `f64::INFINITY`: never.
    pub wedge_rows: f64,
    /// A batch with no row done for so long is cancelled, and its rows go direct. Default 4 hours.
    pub stuck_after: Duration,
    /// The longest pause between two polls. Default 2 minutes.
    pub poll: Duration,
    /// What a batched token costs, as a part of its price. Default 0.5.
    pub discount: f64,
    /// Rows that the provider takes in a batch. Default 50,000, the lower of the two large providers' limits.
    pub max_rows: u64,
    /// Bytes that it takes in a batch. Default 200 MB, the lower again.
    pub max_bytes: u64,
    /// Fewer rows than these are not worth a batch, whatever is saved. Default 200, an earlier dispatcher's floor.
    pub least_rows: u64,
    /// Rows a batch, within what the provider and the queues take, instead of the planner's choice. Default none.
    pub chunk: Option<u64>,
}

impl Default for BatchModel {
    fn default() -> Self {
        BatchModel {
            base: Duration::from_secs(120),
            per_row: Duration::from_millis(360),
            sigma: 0.5,
            wedge_rows: 9_600.0,
            stuck_after: Duration::from_secs(4 * 3_600),
            poll: Duration::from_secs(120),
            discount: 0.5,
            max_rows: 50_000,
            max_bytes: 200_000_000,
            least_rows: 200,
            chunk: None,
        }
    }
}

impl BatchModel {
    /// Sets [`base`](Self::base) and [`per_row`](Self::per_row).
    #[must_use]
    pub fn turnaround(mut self, base: Duration, per_row: Duration) -> Self {
        (self.base, self.per_row) = (base, per_row);
        self
    }

    /// Sets [`sigma`](Self::sigma).
    #[must_use]
    pub fn sigma(mut self, sigma: f64) -> Self {
        self.sigma = sigma;
        self
    }

    /// Sets [`wedge_rows`](Self::wedge_rows).
    #[must_use]
    pub fn wedge_rows(mut self, rows: f64) -> Self {
        self.wedge_rows = rows;
        self
    }

    /// Sets [`stuck_after`](Self::stuck_after).
    #[must_use]
    pub fn stuck_after(mut self, after: Duration) -> Self {
        self.stuck_after = after;
        self
    }

    /// Sets [`poll`](Self::poll).
    #[must_use]
    pub fn poll(mut self, poll: Duration) -> Self {
        self.poll = poll;
        self
    }

    /// Sets [`discount`](Self::discount).
    #[must_use]
    pub fn discount(mut self, part: f64) -> Self {
        self.discount = part;
        self
    }

    /// Sets [`max_rows`](Self::max_rows) and [`max_bytes`](Self::max_bytes).
    #[must_use]
    pub fn most(mut self, rows: u64, bytes: u64) -> Self {
        (self.max_rows, self.max_bytes) = (rows, bytes);
        self
    }

    /// Sets [`least_rows`](Self::least_rows).
    #[must_use]
    pub fn least_rows(mut self, rows: u64) -> Self {
        self.least_rows = rows;
        self
    }

    /// Sets [`chunk`](Self::chunk).
    #[must_use]
    pub fn chunk(mut self, rows: u64) -> Self {
        self.chunk = Some(rows);
        self
    }

    fn check(&self) -> Result<(), BuildError> {
        let wrong = |field: &str, problem: &str| Err(BuildError::new(format!("batch {field}"), problem));
        if !(0.0..=5.0).contains(&self.sigma) {
            return wrong("sigma", "must be from 0 to 5");
        }
        if self.wedge_rows.is_nan() || self.wedge_rows <= 0.0 {
            return wrong("wedge_rows", "must be above zero");
        }
        if !(0.0..=1.0).contains(&self.discount) {
            return wrong("discount", "must be from 0 to 1");
        }
        if self.base.is_zero() {
            return wrong("base", "must be longer than zero");
        }
        if self.max_rows == 0 || self.max_bytes == 0 {
            return wrong("max_rows", "and max_bytes must be above zero");
        }
        if self.chunk == Some(0) {
            return wrong("chunk", "must be at least 1");
        }
        Ok(())
    }

    /// The median time of a batch, polls not counted.
    pub(crate) fn median(&self, rows: f64) -> f64 {
        self.base.as_secs_f64() + self.per_row.as_secs_f64() * rows
    }

    /// The chance that a batch is wedged.
    pub(crate) fn wedged(&self, rows: f64) -> f64 {
        -(-(rows / self.wedge_rows).powi(2)).exp_m1()
    }
}

/// What there is to do it with.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Fleet {
    /// The orgs, the preferred first.
    pub orgs: Vec<OrgPlan>,
    /// Prices by the very id of the model, not by its family as limits are; without one a plan has no cost.
    pub prices: Vec<(String, Price)>,
    /// How batches behave.
    pub batch: BatchModel,
    /// What one client process gets out whatever the quota, in calls a second. Default no limit: this library's own is tens of
    /// thousands (`docs/measured.md`). Another client's is a figure to measure: 24 to 53 a second were seen.
    pub client_rate: Option<f64>,
}

impl Fleet {
    /// No orgs yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an org.
    #[must_use]
    pub fn org(mut self, org: OrgPlan) -> Self {
        self.orgs.push(org);
        self
    }

    /// Adds a price of the model with this very id.
    #[must_use]
    pub fn price(mut self, model: impl Into<String>, price: Price) -> Self {
        self.prices.push((model.into(), price));
        self
    }

    /// Sets [`batch`](Self::batch).
    #[must_use]
    pub fn batch(mut self, batch: BatchModel) -> Self {
        self.batch = batch;
        self
    }

    /// Sets [`client_rate`](Self::client_rate).
    #[must_use]
    pub fn client_rate(mut self, per_second: f64) -> Self {
        self.client_rate = Some(per_second);
        self
    }

    pub(crate) fn check(&self, model: &str) -> Result<(), BuildError> {
        for org in &self.orgs {
            if let Some(limits) = org.limits(model) {
                limits.check(&org.name)?;
            }
        }
        if self.client_rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
            return Err(BuildError::new("client_rate", "must be a number above zero"));
        }
        for (name, price) in &self.prices {
            if ![price.input, price.output].iter().all(|price| price.is_finite() && *price >= 0.0) {
                return Err(BuildError::new(format!("price of {name}"), "must be finite and zero or more"));
            }
        }
        self.batch.check()
    }

    /// Dollars for one row sent direct.
    pub(crate) fn dollars(&self, model: &str, input: f64, output: f64) -> Option<f64> {
        let (_, price) = self.prices.iter().find(|(name, _)| name == model)?;
        Some((input * price.input + output * price.output) / 1e6)
    }
}
