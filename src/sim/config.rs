//! The provider as it is described: its orgs, their quotas and faults, and what changes during a run.

use std::fmt;

use serde::Deserialize;

use super::batch::BatchConfig;
use super::bucket::{Limit, PerResource};
use super::draw::{Chance, Latency};
use crate::org::Dialect;

/// Which quota headers are sent. The org's id, the request id and the date are sent in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Headers {
    /// Every limited resource.
    #[default]
    All,
    /// None at all.
    None,
    /// Requests only, no tokens.
    RequestsOnly,
}

/// In which form a 429 says when to come back.
///
/// The true wait is the time until the refused cost fits; for a refusal by `max_concurrency` it is the median latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RetryAfter {
    /// Not at all.
    None,
    /// `retry-after: 2`: whole seconds, rounded up, at least 1.
    #[default]
    Seconds,
    /// `retry-after: 0.125`: seconds with milliseconds, rounded up.
    Fraction,
    /// `retry-after-ms: 125`, rounded up.
    Ms,
    /// `retry-after: Wed, 21 Oct 2015 07:28:00 GMT`, rounded up to a whole second.
    HttpDate,
    /// `retry-after: 0`, whatever the true wait.
    Zero,
}

/// A key the provider accepts. Its `Debug` does not show it.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Key(String);

impl Key {
    /// The key in plain text.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl<S: Into<String>> From<S> for Key {
    fn from(key: S) -> Self {
        Key(key.into())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The whole provider.
///
/// Every field has a default; unknown fields are refused.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Whose headers and bodies; default Anthropic's.
    pub dialect: Dialect,
    /// Seeds every draw; default 0. The same arrivals in the same order per org draw the same values.
    pub seed: u64,
    /// Ignore every quota and `max_concurrency`; default false.
    pub unlimited: bool,
    /// Latency of orgs that have none of their own.
    pub latency: Latency,
    /// Batches of orgs that have no rules of their own.
    pub batch: BatchConfig,
    /// How long an answer is, the item and the seed alone say: the same request gets the same usage at any time and from any
    /// org of the same lengths, as rows of batches always do. Default false: each call draws.
    pub lengths_by_item: bool,
    /// Which quota headers are sent; default all.
    pub headers: Headers,
    /// Round remaining tokens to the nearest thousand, as Anthropic does; default true. OpenAI's are never rounded.
    pub round_tokens: bool,
    /// Whether a 429 names the input tokens too; default true. A real provider has been seen to
    /// leave them out.
    pub input_on_429: bool,
    /// Keep the time of every arrival; default false.
    pub record_arrivals: bool,
    /// The wall clock at the start, in seconds since 1970; default the real one.
    pub wall_start_s: Option<u64>,
    /// The orgs.
    pub orgs: Vec<OrgConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            dialect: Dialect::default(),
            seed: 0,
            unlimited: false,
            latency: Latency::default(),
            batch: BatchConfig::default(),
            lengths_by_item: false,
            headers: Headers::default(),
            round_tokens: true,
            input_on_429: true,
            record_arrivals: false,
            wall_start_s: None,
            orgs: Vec::new(),
        }
    }
}

/// Writes setters of the same names as the fields, for construction in plain Rust.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $kind:ty => $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $name: $kind) -> Self {
                self.$name = $value;
                self
            }
        )*
    };
}

pub(super) use setters;

impl Config {
    /// A provider without orgs.
    pub fn new(dialect: Dialect) -> Self {
        Config { dialect, ..Config::default() }
    }

    /// Adds an org.
    #[must_use]
    pub fn org(mut self, org: OrgConfig) -> Self {
        self.orgs.push(org);
        self
    }

    setters! {
        /// Sets [`seed`](Self::seed).
        seed: u64 => seed;
        /// Sets [`unlimited`](Self::unlimited).
        unlimited: bool => unlimited;
        /// Sets [`latency`](Self::latency).
        latency: Latency => latency;
        /// Sets [`batch`](Self::batch).
        batch: BatchConfig => batch;
        /// Sets [`lengths_by_item`](Self::lengths_by_item).
        lengths_by_item: bool => lengths_by_item;
        /// Sets [`headers`](Self::headers).
        headers: Headers => headers;
        /// Sets [`round_tokens`](Self::round_tokens).
        round_tokens: bool => round_tokens;
        /// Sets [`input_on_429`](Self::input_on_429).
        input_on_429: bool => input_on_429;
        /// Sets [`record_arrivals`](Self::record_arrivals).
        record_arrivals: bool => record_arrivals;
        /// Sets [`wall_start_s`](Self::wall_start_s).
        wall_start_s: u64 => Some(wall_start_s);
    }

    /// Looks for what cannot be meant: two orgs with one name or key, a negative rate, a chance above one.
    ///
    /// # Errors
    ///
    /// The first such thing.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.latency.validate("latency")?;
        self.batch.validate().map_err(|wrong| ConfigError(format!("batch: {wrong}")))?;
        for (i, org) in self.orgs.iter().enumerate() {
            let earlier = &self.orgs[..i];
            if earlier.iter().any(|o| o.key == org.key) {
                return Err(ConfigError(format!("org {:?}: the key is another org's too", org.name)));
            }
            if earlier.iter().any(|o| o.name == org.name) {
                return Err(ConfigError(format!("org {:?}: the name is another org's too", org.name)));
            }
            org.validate()?;
        }
        Ok(())
    }
}

/// One org: its key, its quota, its faults.
///
/// Every field has a default; unknown fields are refused. The faults are [`Chance`]s per request, decided in the order
/// in which they stand here.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OrgConfig {
    /// The name it has in the ground truth.
    pub name: String,
    /// The key it accepts.
    pub key: Key,
    /// The id in its answers; default the name.
    pub organization_id: Option<String>,
    /// Requests per minute; default no limit.
    pub requests_per_minute: Option<f64>,
    /// Input tokens per minute; default no limit. A call costs a quarter of its body's bytes, rounded up.
    pub input_tokens_per_minute: Option<f64>,
    /// Output tokens per minute; default no limit. A call is charged on arrival for what it will answer.
    pub output_tokens_per_minute: Option<f64>,
    /// Input and output tokens together per minute, as OpenAI counts them; default no limit.
    pub tokens_per_minute: Option<f64>,
    /// A bucket holds what so many seconds refill; default 2. The request bucket never holds less than one.
    pub capacity_s: f64,
    /// Holds so many requests instead.
    pub requests_capacity: Option<f64>,
    /// Holds so many input tokens instead.
    pub input_tokens_capacity: Option<f64>,
    /// Holds so many output tokens instead.
    pub output_tokens_capacity: Option<f64>,
    /// Holds so many tokens of both instead.
    pub tokens_capacity: Option<f64>,
    /// A 429 for whoever comes while so many admitted calls are unanswered; default no limit.
    pub max_concurrency: Option<usize>,
    /// Median length of an answer in tokens, lognormal with σ = 0.5; default 32. The call's `max_tokens` (64 where it
    /// names none) cuts it: such an answer says so (`stop_reason` or `finish_reason`), and a journal does not keep it.
    pub output_tokens_p50: f64,
    /// The shortest and the longest answer in tokens, all between equally likely, instead of the lognormal.
    pub output_tokens_range: Option<[u64; 2]>,
    /// Its own latency instead of the provider's.
    pub latency: Option<Latency>,
    /// Its own rules of batches instead of the provider's.
    pub batch: Option<BatchConfig>,
    /// In which form a 429 says when to come back; default whole seconds.
    pub retry_after: RetryAfter,
    /// The key is dead: 401 at once, nothing charged.
    pub unauthorised: Chance,
    /// 429 at once, whatever the buckets hold; nothing charged.
    pub black_hole: Chance,
    /// The wait a black hole announces, in seconds; default 1.
    pub black_hole_wait_s: f64,
    /// 529 (503 in OpenAI's dialect) at once, nothing charged.
    pub overloaded: Chance,
    /// Admitted and charged, then a 500 at once.
    pub error_5xx: Chance,
    /// Admitted and charged, then the connection is dropped at once without an answer.
    pub reset: Chance,
    /// Admitted and charged, then never answered.
    pub hang: Chance,
    /// The body ends before its announced length.
    pub truncate: Chance,
    /// A 200 with an empty list for an answer.
    pub empty: Chance,
    /// A 200 with an error for an answer: alone in the body, or in a stream half way, which then ends.
    pub in_band: Chance,
    /// A refusal for want of quota comes without a wait and without quota headers.
    pub bare_429: Chance,
    /// What changes during the run.
    pub schedule: Vec<Step>,
}

impl Default for OrgConfig {
    fn default() -> Self {
        OrgConfig {
            name: String::new(),
            key: Key::default(),
            organization_id: None,
            requests_per_minute: None,
            input_tokens_per_minute: None,
            output_tokens_per_minute: None,
            tokens_per_minute: None,
            capacity_s: 2.0,
            requests_capacity: None,
            input_tokens_capacity: None,
            output_tokens_capacity: None,
            tokens_capacity: None,
            max_concurrency: None,
            output_tokens_p50: 32.0,
            output_tokens_range: None,
            latency: None,
            batch: None,
            retry_after: RetryAfter::default(),
            unauthorised: Chance::default(),
            black_hole: Chance::default(),
            black_hole_wait_s: 1.0,
            overloaded: Chance::default(),
            error_5xx: Chance::default(),
            reset: Chance::default(),
            hang: Chance::default(),
            truncate: Chance::default(),
            empty: Chance::default(),
            in_band: Chance::default(),
            bare_429: Chance::default(),
            schedule: Vec::new(),
        }
    }
}

impl OrgConfig {
    /// An org without limits or faults.
    pub fn new(name: impl Into<String>, key: impl Into<Key>) -> Self {
        OrgConfig { name: name.into(), key: key.into(), ..OrgConfig::default() }
    }

    /// Sets [`organization_id`](Self::organization_id).
    #[must_use]
    pub fn organization_id(mut self, id: impl Into<String>) -> Self {
        self.organization_id = Some(id.into());
        self
    }

    /// From `at_s` seconds after the start on, what `set` names is so. Adds to [`schedule`](Self::schedule).
    #[must_use]
    pub fn at(mut self, at_s: f64, set: Change) -> Self {
        self.schedule.push(Step { at_s, set });
        self
    }

    setters! {
        /// Sets [`requests_per_minute`](Self::requests_per_minute).
        requests_per_minute: f64 => Some(requests_per_minute);
        /// Sets [`input_tokens_per_minute`](Self::input_tokens_per_minute).
        input_tokens_per_minute: f64 => Some(input_tokens_per_minute);
        /// Sets [`output_tokens_per_minute`](Self::output_tokens_per_minute).
        output_tokens_per_minute: f64 => Some(output_tokens_per_minute);
        /// Sets [`tokens_per_minute`](Self::tokens_per_minute).
        tokens_per_minute: f64 => Some(tokens_per_minute);
        /// Sets [`capacity_s`](Self::capacity_s).
        capacity_s: f64 => capacity_s;
        /// Sets [`requests_capacity`](Self::requests_capacity).
        requests_capacity: f64 => Some(requests_capacity);
        /// Sets [`input_tokens_capacity`](Self::input_tokens_capacity).
        input_tokens_capacity: f64 => Some(input_tokens_capacity);
        /// Sets [`output_tokens_capacity`](Self::output_tokens_capacity).
        output_tokens_capacity: f64 => Some(output_tokens_capacity);
        /// Sets [`tokens_capacity`](Self::tokens_capacity).
        tokens_capacity: f64 => Some(tokens_capacity);
        /// Sets [`max_concurrency`](Self::max_concurrency).
        max_concurrency: usize => Some(max_concurrency);
        /// Sets [`output_tokens_p50`](Self::output_tokens_p50).
        output_tokens_p50: f64 => output_tokens_p50;
        /// Sets [`output_tokens_range`](Self::output_tokens_range).
        output_tokens_range: [u64; 2] => Some(output_tokens_range);
        /// Sets [`latency`](Self::latency).
        latency: Latency => Some(latency);
        /// Sets [`batch`](Self::batch).
        batch: BatchConfig => Some(batch);
        /// Sets [`retry_after`](Self::retry_after).
        retry_after: RetryAfter => retry_after;
        /// Sets [`unauthorised`](Self::unauthorised).
        unauthorised: impl Into<Chance> => unauthorised.into();
        /// Sets [`black_hole`](Self::black_hole).
        black_hole: impl Into<Chance> => black_hole.into();
        /// Sets [`black_hole_wait_s`](Self::black_hole_wait_s).
        black_hole_wait_s: f64 => black_hole_wait_s;
        /// Sets [`overloaded`](Self::overloaded).
        overloaded: impl Into<Chance> => overloaded.into();
        /// Sets [`error_5xx`](Self::error_5xx).
        error_5xx: impl Into<Chance> => error_5xx.into();
        /// Sets [`reset`](Self::reset).
        reset: impl Into<Chance> => reset.into();
        /// Sets [`hang`](Self::hang).
        hang: impl Into<Chance> => hang.into();
        /// Sets [`truncate`](Self::truncate).
        truncate: impl Into<Chance> => truncate.into();
        /// Sets [`empty`](Self::empty).
        empty: impl Into<Chance> => empty.into();
        /// Sets [`in_band`](Self::in_band).
        in_band: impl Into<Chance> => in_band.into();
        /// Sets [`bare_429`](Self::bare_429).
        bare_429: impl Into<Chance> => bare_429.into();
    }

    pub(super) fn id(&self) -> &str {
        self.organization_id.as_deref().unwrap_or(&self.name)
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let wrong = |what: &str| Err(ConfigError(format!("org {:?}: {what}", self.name)));
        if self.name.is_empty() || self.key.0.is_empty() {
            return wrong("name and key must not be empty");
        }
        if http::HeaderValue::from_str(self.id()).is_err() {
            return wrong("the organization id does not fit into a header");
        }
        if let Some(Err(what)) = self.batch.as_ref().map(BatchConfig::validate) {
            return wrong(&format!("batch: {what}"));
        }
        let mut rules = self.clone();
        let mut steps = self.steps().into_iter();
        loop {
            let numbers = [
                rules.requests_per_minute,
                rules.input_tokens_per_minute,
                rules.output_tokens_per_minute,
                rules.tokens_per_minute,
                rules.requests_capacity,
                rules.input_tokens_capacity,
                rules.output_tokens_capacity,
                rules.tokens_capacity,
                Some(rules.capacity_s),
                Some(rules.output_tokens_p50),
                Some(rules.black_hole_wait_s),
            ];
            if numbers.into_iter().flatten().any(|x| x.is_nan() || x < 0.0) {
                return wrong("rates, capacities and waits must be zero or more");
            }
            if rules.output_tokens_range.is_some_and(|[shortest, longest]| shortest > longest) {
                return wrong("the shortest answer must not be longer than the longest");
            }
            if !rules.faults().iter().chain([&rules.bare_429]).all(|c| (0.0..=1.0).contains(&c.0)) {
                return wrong("a chance must lie between 0 and 1");
            }
            rules.latency.unwrap_or_default().validate(&self.name)?;
            let Some(step) = steps.next() else {
                return Ok(());
            };
            if step.at_s.is_nan() || step.at_s < 0.0 {
                return wrong("a step's time must be zero or more");
            }
            rules.apply(&step.set);
        }
    }

    pub(super) fn faults(&self) -> [Chance; 9] {
        [
            self.unauthorised,
            self.black_hole,
            self.overloaded,
            self.error_5xx,
            self.reset,
            self.hang,
            self.truncate,
            self.empty,
            self.in_band,
        ]
    }

    /// The schedule in order of time; steps of the same time stay in their order.
    pub(super) fn steps(&self) -> Vec<Step> {
        let mut steps = self.schedule.clone();
        steps.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        steps
    }

    pub(super) fn apply(&mut self, set: &Change) {
        macro_rules! take {
            ($($name:ident),*; $($optional:ident),*) => {
                $(if let Some(value) = set.$name { self.$name = value; })*
                $(if set.$optional.is_some() { self.$optional = set.$optional; })*
            };
        }
        take!(
            capacity_s, output_tokens_p50, retry_after, unauthorised, black_hole, black_hole_wait_s, overloaded,
            error_5xx, reset, hang, truncate, empty, in_band, bare_429;
            requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, tokens_per_minute,
            requests_capacity, input_tokens_capacity, output_tokens_capacity, tokens_capacity, output_tokens_range,
            max_concurrency, latency
        );
        if let Some(factor) = set.quota_factor {
            for value in [
                &mut self.requests_per_minute,
                &mut self.input_tokens_per_minute,
                &mut self.output_tokens_per_minute,
                &mut self.tokens_per_minute,
                &mut self.requests_capacity,
                &mut self.input_tokens_capacity,
                &mut self.output_tokens_capacity,
                &mut self.tokens_capacity,
            ] {
                *value = value.map(|v| v * factor);
            }
        }
    }

    /// `None` is no limit.
    pub(super) fn limits(&self) -> PerResource<Option<Limit>> {
        let limit = |per_minute: Option<f64>, absolute: Option<f64>, least: f64| {
            let rate = per_minute.filter(|p| p.is_finite())? / 60.0;
            Some(Limit { rate, capacity: absolute.unwrap_or((rate * self.capacity_s).max(least)) })
        };
        [
            limit(self.requests_per_minute, self.requests_capacity, 1.0),
            limit(self.input_tokens_per_minute, self.input_tokens_capacity, 0.0),
            limit(self.output_tokens_per_minute, self.output_tokens_capacity, 0.0),
            limit(self.tokens_per_minute, self.tokens_capacity, 0.0),
        ]
    }
}

/// From `at_s` on, what `set` names is so.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Step {
    /// Seconds since the start.
    pub at_s: f64,
    /// What changes.
    pub set: Change,
}

/// What a [`Step`] changes; what is `None` stays.
///
/// A bucket keeps its level, as far as the new capacity holds it; one that had no limit before is full. An infinite
/// rate lifts a limit.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Change {
    /// Multiplies all rates in force, and the capacities with them.
    pub quota_factor: Option<f64>,
    /// See [`OrgConfig::requests_per_minute`].
    pub requests_per_minute: Option<f64>,
    /// See [`OrgConfig::input_tokens_per_minute`].
    pub input_tokens_per_minute: Option<f64>,
    /// See [`OrgConfig::output_tokens_per_minute`].
    pub output_tokens_per_minute: Option<f64>,
    /// See [`OrgConfig::tokens_per_minute`].
    pub tokens_per_minute: Option<f64>,
    /// See [`OrgConfig::capacity_s`].
    pub capacity_s: Option<f64>,
    /// See [`OrgConfig::requests_capacity`].
    pub requests_capacity: Option<f64>,
    /// See [`OrgConfig::input_tokens_capacity`].
    pub input_tokens_capacity: Option<f64>,
    /// See [`OrgConfig::output_tokens_capacity`].
    pub output_tokens_capacity: Option<f64>,
    /// See [`OrgConfig::tokens_capacity`].
    pub tokens_capacity: Option<f64>,
    /// See [`OrgConfig::max_concurrency`].
    pub max_concurrency: Option<usize>,
    /// See [`OrgConfig::output_tokens_p50`].
    pub output_tokens_p50: Option<f64>,
    /// See [`OrgConfig::output_tokens_range`].
    pub output_tokens_range: Option<[u64; 2]>,
    /// See [`OrgConfig::latency`].
    pub latency: Option<Latency>,
    /// See [`OrgConfig::retry_after`].
    pub retry_after: Option<RetryAfter>,
    /// See [`OrgConfig::unauthorised`].
    pub unauthorised: Option<Chance>,
    /// See [`OrgConfig::black_hole`].
    pub black_hole: Option<Chance>,
    /// See [`OrgConfig::black_hole_wait_s`].
    pub black_hole_wait_s: Option<f64>,
    /// See [`OrgConfig::overloaded`].
    pub overloaded: Option<Chance>,
    /// See [`OrgConfig::error_5xx`].
    pub error_5xx: Option<Chance>,
    /// See [`OrgConfig::reset`].
    pub reset: Option<Chance>,
    /// See [`OrgConfig::hang`].
    pub hang: Option<Chance>,
    /// See [`OrgConfig::truncate`].
    pub truncate: Option<Chance>,
    /// See [`OrgConfig::empty`].
    pub empty: Option<Chance>,
    /// See [`OrgConfig::in_band`].
    pub in_band: Option<Chance>,
    /// See [`OrgConfig::bare_429`].
    pub bare_429: Option<Chance>,
}

impl Latency {
    pub(super) fn validate(&self, whose: &str) -> Result<(), ConfigError> {
        let sound = |x: f64| x.is_finite() && x >= 0.0;
        if sound(self.p50_ms) && sound(self.sigma) {
            Ok(())
        } else {
            Err(ConfigError(format!("{whose}: p50_ms and sigma must be finite and zero or more")))
        }
    }
}

/// A [`Config`] that cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub(super) String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn org() -> OrgConfig {
        OrgConfig::new("o", "k").requests_per_minute(60.0)
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let with = |o: OrgConfig| Config::default().org(o).validate();
        assert!(with(org().output_tokens_range([2, 2])).is_ok());
        for bad in [
            OrgConfig::new("", "k"),
            OrgConfig::new("o", ""),
            org().organization_id("a\nb"),
            org().requests_per_minute(-1.0),
            org().capacity_s(f64::NAN),
            org().black_hole(1.5),
            org().in_band(1.5),
            org().bare_429(-0.5),
            org().latency(Latency::new(f64::INFINITY, 0.3)),
            org().tokens_per_minute(-1.0),
            org().tokens_capacity(f64::NAN),
            org().output_tokens_range([2, 1]),
            org().at(-1.0, Change::default()),
            org().at(1.0, Change { hang: Some(Chance(2.0)), ..Change::default() }),
        ] {
            assert!(with(bad.clone()).is_err(), "{bad:?}");
        }
        let twice = |second| Config::default().org(org()).org(second).validate();
        assert!(twice(OrgConfig::new("p", "k")).is_err());
        assert!(twice(OrgConfig::new("o", "l")).is_err());
        assert!(twice(OrgConfig::new("p", "l")).is_ok());
        assert!(Config::default().latency(Latency::new(1.0, -1.0)).validate().is_err());
    }
}
