//! The provider as pure arithmetic: buckets, faults, the schedule and the fluid limit. No runtime and no clock:
//! `now` comes in as the time since the start.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::truth::Ledger;
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

/// A probability per request, from 0 (never) to 1 (always). In a file also `true` or `false`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "FlagOrChance")]
pub struct Chance(pub f64);

impl Chance {
    fn always(self) -> bool {
        self.0 >= 1.0
    }

    /// Draws only where the outcome is open, so that a fault nobody asked for moves no other draw.
    fn strikes(self, rng: &mut fastrand::Rng) -> bool {
        self.always() || (self.0 > 0.0 && rng.f64() < self.0)
    }
}

impl From<bool> for Chance {
    fn from(flag: bool) -> Self {
        Chance(if flag { 1.0 } else { 0.0 })
    }
}

impl From<f64> for Chance {
    fn from(chance: f64) -> Self {
        Chance(chance)
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FlagOrChance {
    Flag(bool),
    Chance(f64),
}

impl From<FlagOrChance> for Chance {
    fn from(value: FlagOrChance) -> Self {
        match value {
            FlagOrChance::Flag(flag) => flag.into(),
            FlagOrChance::Chance(chance) => Chance(chance),
        }
    }
}

/// How long an admitted call takes: lognormal.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latency {
    /// The median, in milliseconds; default 50. Zero answers at once.
    pub p50_ms: f64,
    /// The standard deviation of the logarithm; default 0.3. Zero makes every call take the median.
    pub sigma: f64,
}

impl Default for Latency {
    fn default() -> Self {
        Latency { p50_ms: 50.0, sigma: 0.3 }
    }
}

impl Latency {
    /// A median in milliseconds and a sigma.
    pub fn new(p50_ms: f64, sigma: f64) -> Self {
        Latency { p50_ms, sigma }
    }

    /// The mean of the distribution: the median times e^(σ²/2).
    pub fn mean(&self) -> Duration {
        seconds(self.mean_s())
    }

    fn mean_s(&self) -> f64 {
        self.p50_ms / 1e3 * (self.sigma * self.sigma / 2.0).exp()
    }

    fn draw(&self, rng: &mut fastrand::Rng) -> Duration {
        seconds(self.p50_ms / 1e3 * lognormal(self.sigma, rng)).min(DAY)
    }
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
    /// Which quota headers are sent; default all.
    pub headers: Headers,
    /// Round remaining tokens to the nearest thousand, as Anthropic does; default true. OpenAI's are never rounded.
    pub round_tokens: bool,
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
            headers: Headers::default(),
            round_tokens: true,
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
        /// Sets [`headers`](Self::headers).
        headers: Headers => headers;
        /// Sets [`round_tokens`](Self::round_tokens).
        round_tokens: bool => round_tokens;
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

    /// What a fresh provider would take at once: the capacities of the request buckets, added up. Infinite where one
    /// has no limit.
    pub fn capacity_total(&self) -> f64 {
        if self.unlimited {
            return f64::INFINITY;
        }
        self.orgs.iter().map(|o| o.limits()[0].map_or(f64::INFINITY, |l| l.capacity)).sum()
    }

    /// The least time in which the provider could take `n` calls, if they came as a fluid: the least `t` at which the
    /// orgs' request-bucket capacities plus their refill up to `t` reach `n`. No client can be faster; see
    /// [`fluid_limit_for`](Self::fluid_limit_for) for the rules.
    pub fn fluid_limit(&self, n: u64) -> Option<Duration> {
        self.fluid_limit_for(n, Cost::default())
    }

    /// As [`fluid_limit`](Self::fluid_limit), where each call also costs tokens.
    ///
    /// The schedule is followed. An org yields nothing while a fault of it is certain (a black hole, a dead key, ...),
    /// though its buckets fill up meanwhile, nor while a bucket cannot hold one call. An org with `max_concurrency`
    /// yields at most that many per mean latency. Chances below one are not discounted. The latency of the last call
    /// is not added.
    ///
    /// `None` where some org has no limit at all from the start; [`Duration::MAX`] where `n` is never reached.
    pub fn fluid_limit_for(&self, n: u64, cost: Cost) -> Option<Duration> {
        let cost = [1.0, cost.input_tokens, cost.output_tokens];
        let curves: Vec<Vec<Piece>> = self.orgs.iter().map(|o| o.admitted(self.latency, cost)).collect();
        if self.unlimited || curves.iter().any(|c| c[0].value.is_infinite()) {
            return None;
        }
        Some(reach(&curves, n as f64).map_or(Duration::MAX, seconds))
    }
}

/// What a call costs besides one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Input tokens per call.
    pub input_tokens: f64,
    /// Output tokens per call.
    pub output_tokens: f64,
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
    /// A bucket holds what so many seconds refill; default 2. The request bucket never holds less than one.
    pub capacity_s: f64,
    /// Holds so many requests instead.
    pub requests_capacity: Option<f64>,
    /// Holds so many input tokens instead.
    pub input_tokens_capacity: Option<f64>,
    /// Holds so many output tokens instead.
    pub output_tokens_capacity: Option<f64>,
    /// A 429 for whoever comes while so many admitted calls are unanswered; default no limit.
    pub max_concurrency: Option<usize>,
    /// Median length of an answer in tokens, lognormal with σ = 0.5; default 32. The call's `max_tokens` (64 where it
    /// names none) cuts it.
    pub output_tokens_p50: f64,
    /// Its own latency instead of the provider's.
    pub latency: Option<Latency>,
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
            capacity_s: 2.0,
            requests_capacity: None,
            input_tokens_capacity: None,
            output_tokens_capacity: None,
            max_concurrency: None,
            output_tokens_p50: 32.0,
            latency: None,
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
        /// Sets [`capacity_s`](Self::capacity_s).
        capacity_s: f64 => capacity_s;
        /// Sets [`requests_capacity`](Self::requests_capacity).
        requests_capacity: f64 => Some(requests_capacity);
        /// Sets [`input_tokens_capacity`](Self::input_tokens_capacity).
        input_tokens_capacity: f64 => Some(input_tokens_capacity);
        /// Sets [`output_tokens_capacity`](Self::output_tokens_capacity).
        output_tokens_capacity: f64 => Some(output_tokens_capacity);
        /// Sets [`max_concurrency`](Self::max_concurrency).
        max_concurrency: usize => Some(max_concurrency);
        /// Sets [`output_tokens_p50`](Self::output_tokens_p50).
        output_tokens_p50: f64 => output_tokens_p50;
        /// Sets [`latency`](Self::latency).
        latency: Latency => Some(latency);
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
        let mut rules = self.clone();
        let mut steps = self.steps().into_iter();
        loop {
            let numbers = [
                rules.requests_per_minute,
                rules.input_tokens_per_minute,
                rules.output_tokens_per_minute,
                rules.requests_capacity,
                rules.input_tokens_capacity,
                rules.output_tokens_capacity,
                Some(rules.capacity_s),
                Some(rules.output_tokens_p50),
                Some(rules.black_hole_wait_s),
            ];
            if numbers.into_iter().flatten().any(|x| x.is_nan() || x < 0.0) {
                return wrong("rates, capacities and waits must be zero or more");
            }
            if !rules.faults().iter().all(|c| (0.0..=1.0).contains(&c.0)) {
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

    fn faults(&self) -> [Chance; 8] {
        [
            self.unauthorised,
            self.black_hole,
            self.overloaded,
            self.error_5xx,
            self.reset,
            self.hang,
            self.truncate,
            self.empty,
        ]
    }

    /// The schedule in order of time; steps of the same time stay in their order.
    fn steps(&self) -> Vec<Step> {
        let mut steps = self.schedule.clone();
        steps.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        steps
    }

    fn apply(&mut self, set: &Change) {
        macro_rules! take {
            ($($name:ident),*; $($optional:ident),*) => {
                $(if let Some(value) = set.$name { self.$name = value; })*
                $(if set.$optional.is_some() { self.$optional = set.$optional; })*
            };
        }
        take!(
            capacity_s, output_tokens_p50, retry_after, unauthorised, black_hole, black_hole_wait_s, overloaded,
            error_5xx, reset, hang, truncate, empty;
            requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, requests_capacity,
            input_tokens_capacity, output_tokens_capacity, max_concurrency, latency
        );
        if let Some(factor) = set.quota_factor {
            for value in [
                &mut self.requests_per_minute,
                &mut self.input_tokens_per_minute,
                &mut self.output_tokens_per_minute,
                &mut self.requests_capacity,
                &mut self.input_tokens_capacity,
                &mut self.output_tokens_capacity,
            ] {
                *value = value.map(|v| v * factor);
            }
        }
    }

    /// Requests, input tokens, output tokens; `None` is no limit.
    fn limits(&self) -> [Option<Limit>; 3] {
        let limit = |per_minute: Option<f64>, absolute: Option<f64>, least: f64| {
            let rate = per_minute.filter(|p| p.is_finite())? / 60.0;
            Some(Limit { rate, capacity: absolute.unwrap_or((rate * self.capacity_s).max(least)) })
        };
        [
            limit(self.requests_per_minute, self.requests_capacity, 1.0),
            limit(self.input_tokens_per_minute, self.input_tokens_capacity, 0.0),
            limit(self.output_tokens_per_minute, self.output_tokens_capacity, 0.0),
        ]
    }

    /// How many calls of this cost a fluid could have had admitted by each moment: pieces of straight line.
    fn admitted(&self, default_latency: Latency, cost: [f64; 3]) -> Vec<Piece> {
        let mut rules = self.clone();
        let mut steps = self.steps().into_iter().peekable();
        let mut levels: [Option<f64>; 3] = [None; 3];
        let mut pieces = Vec::new();
        let (mut from, mut total) = (0.0, 0.0);
        loop {
            while let Some(step) = steps.next_if(|s| s.at_s <= from) {
                rules.apply(&step.set);
            }
            let length = steps.peek().map_or(f64::INFINITY, |s| s.at_s - from);
            let limits = rules.limits();
            // A bucket that is new is full; one that shrank spills.
            for (level, limit) in levels.iter_mut().zip(limits) {
                *level = limit.map(|l| level.unwrap_or(l.capacity).min(l.capacity));
            }
            let too_small = limits.iter().zip(cost).any(|(l, c)| l.is_some_and(|l| l.capacity < c));
            let shut = too_small || rules.max_concurrency == Some(0) || rules.faults().iter().any(|f| f.always());
            let mut gain = 0.0;
            if shut {
                pieces.push(Piece { from, value: total, slope: 0.0 });
            } else {
                let mut lines: Vec<(f64, f64)> = Vec::with_capacity(4);
                for ((level, limit), cost) in levels.iter().zip(limits).zip(cost) {
                    if let (Some(level), Some(limit), true) = (level, limit, cost > 0.0) {
                        lines.push((level / cost, limit.rate / cost));
                    }
                }
                let mean = rules.latency.unwrap_or(default_latency).mean_s();
                if let (Some(max), true) = (rules.max_concurrency, mean > 0.0) {
                    lines.push((0.0, max as f64 / mean));
                }
                if lines.is_empty() {
                    pieces.push(Piece { from, value: f64::INFINITY, slope: 0.0 });
                    return pieces;
                }
                gain = lower_envelope(&lines, length, |at, value, slope| {
                    pieces.push(Piece { from: from + at, value: total + value, slope });
                });
            }
            if length.is_infinite() {
                return pieces;
            }
            for ((level, limit), cost) in levels.iter_mut().zip(limits).zip(cost) {
                if let (Some(level), Some(limit)) = (level, limit) {
                    *level = (*level + limit.rate * length - gain * cost).clamp(0.0, limit.capacity);
                }
            }
            total += gain;
            from += length;
        }
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
    /// See [`OrgConfig::capacity_s`].
    pub capacity_s: Option<f64>,
    /// See [`OrgConfig::requests_capacity`].
    pub requests_capacity: Option<f64>,
    /// See [`OrgConfig::input_tokens_capacity`].
    pub input_tokens_capacity: Option<f64>,
    /// See [`OrgConfig::output_tokens_capacity`].
    pub output_tokens_capacity: Option<f64>,
    /// See [`OrgConfig::max_concurrency`].
    pub max_concurrency: Option<usize>,
    /// See [`OrgConfig::output_tokens_p50`].
    pub output_tokens_p50: Option<f64>,
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
}

impl Latency {
    fn validate(&self, whose: &str) -> Result<(), ConfigError> {
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
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// A rate per second and what the bucket holds.
#[derive(Clone, Copy, Debug)]
struct Limit {
    rate: f64,
    capacity: f64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    from: f64,
    /// The value at `from`, after a jump there.
    value: f64,
    slope: f64,
}

/// Walks the minimum of straight lines `(value at 0, slope)` up to `length`; returns its value there.
fn lower_envelope(lines: &[(f64, f64)], length: f64, mut piece: impl FnMut(f64, f64, f64)) -> f64 {
    let at = |line: &(f64, f64), t: f64| line.0 + line.1 * t;
    let mut current = lines[0];
    for line in &lines[1..] {
        if (line.0, line.1) < (current.0, current.1) {
            current = *line;
        }
    }
    let mut t = 0.0;
    loop {
        piece(t, at(&current, t), current.1);
        // The next to become the least is the flatter line that is met first.
        let mut next: Option<(f64, (f64, f64))> = None;
        for line in lines.iter().filter(|l| l.1 < current.1) {
            let meets = ((line.0 - current.0) / (current.1 - line.1)).max(t);
            if next.is_none_or(|(m, n)| (meets, line.1) < (m, n.1)) {
                next = Some((meets, *line));
            }
        }
        match next {
            Some((meets, line)) if meets < length => {
                t = meets;
                current = line;
            }
            _ if length.is_infinite() => return f64::INFINITY,
            _ => return at(&current, length),
        }
    }
}

/// The least time at which the curves add up to `n`.
fn reach(curves: &[Vec<Piece>], n: f64) -> Option<f64> {
    let mut corners: Vec<f64> = curves.iter().flatten().map(|p| p.from).collect();
    corners.sort_by(f64::total_cmp);
    corners.dedup();
    if n <= 0.0 {
        return Some(0.0);
    }
    for (i, &corner) in corners.iter().enumerate() {
        let (mut value, mut slope) = (0.0, 0.0);
        for curve in curves {
            let piece = &curve[curve.partition_point(|p| p.from <= corner) - 1];
            value += piece.value + piece.slope * (corner - piece.from);
            slope += piece.slope;
        }
        if value >= n {
            return Some(corner);
        }
        let at = corner + (n - value) / slope;
        if slope > 0.0 && corners.get(i + 1).is_none_or(|&next| at <= next) {
            return Some(at);
        }
    }
    None
}

const DAY: Duration = Duration::from_secs(86_400);

pub(super) fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap_or(if s > 0.0 { Duration::MAX } else { Duration::ZERO })
}

/// A lognormal of median 1, by Box and Muller.
fn lognormal(sigma: f64, rng: &mut fastrand::Rng) -> f64 {
    if sigma == 0.0 {
        return 1.0;
    }
    let radius = (-2.0 * (1.0 - rng.f64()).ln()).sqrt();
    (sigma * radius * (std::f64::consts::TAU * rng.f64()).cos()).exp()
}

/// A token bucket: full at first, refilled without a break.
#[derive(Clone, Debug)]
struct Bucket {
    limit: Limit,
    level: f64,
}

/// What rounding may have lost on the way to a whole unit.
const DUST: f64 = 1e-6;

impl Bucket {
    fn full(limit: Limit) -> Self {
        Bucket { limit, level: limit.capacity }
    }

    fn refill(&mut self, elapsed_s: f64) {
        self.level = (self.level + self.limit.rate * elapsed_s).min(self.limit.capacity);
    }

    fn fits(&self, cost: f64) -> bool {
        self.level + DUST >= cost
    }

    fn take(&mut self, cost: f64) {
        self.level = (self.level - cost).max(0.0);
    }

    /// Until `level` is reached, or the bucket is full; at most a day.
    fn until(&self, level: f64) -> Duration {
        let lacking = level.min(self.limit.capacity) - self.level;
        if lacking <= 0.0 { Duration::ZERO } else { seconds(lacking / self.limit.rate).min(DAY) }
    }

    fn view(&self) -> View {
        View {
            limit: (self.limit.rate * 60.0).round() as u64,
            remaining: (self.level + DUST) as u64,
            full_in: self.until(self.limit.capacity),
        }
    }
}

/// What the headers say of one bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct View {
    /// Per minute.
    pub(super) limit: u64,
    pub(super) remaining: u64,
    pub(super) full_in: Duration,
}

/// What of a request counts here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) body_bytes: usize,
    pub(super) max_tokens: Option<u64>,
    /// Embeddings put out no tokens.
    pub(super) puts_out: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Unauthorised,
    Refused { wait: Duration, form: RetryAfter, what: &'static str },
    Overloaded { status: u16 },
    ServerError,
    Reset,
    Hang,
    Answer { latency: Duration, input_tokens: u64, output_tokens: u64, cut: bool, flaw: Option<Flaw> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    Truncated,
    Empty,
}

/// How a call ended that was let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Ok {
        id: u64,
    },
    Empty,
    Truncated,
    /// The client went away first.
    Abandoned,
    /// Already counted on arrival: an error.
    Counted,
}

#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub(super) verdict: Verdict,
    /// Requests, input tokens, output tokens: the buckets right after this call.
    pub(super) views: [Option<View>; 3],
    /// Counts the org's calls from 1.
    pub(super) number: u64,
    /// Occupies a place of `max_concurrency` until it leaves.
    pub(super) admitted: bool,
}

/// One org during a run.
#[derive(Debug)]
pub(super) struct OrgModel {
    rules: OrgConfig,
    default_latency: Latency,
    unlimited: bool,
    overloaded_status: u16,
    steps: std::vec::IntoIter<Step>,
    next_step: Option<Step>,
    /// The time up to which the buckets are refilled.
    refilled: Duration,
    buckets: [Option<Bucket>; 3],
    admitted: usize,
    rng: fastrand::Rng,
    pub(super) ledger: Ledger,
}

impl OrgModel {
    pub(super) fn new(config: &Config, index: usize) -> Self {
        let rules = config.orgs[index].clone();
        let mut steps = rules.steps().into_iter();
        let next_step = steps.next();
        OrgModel {
            buckets: rules.limits().map(|l| l.map(Bucket::full)),
            default_latency: config.latency,
            unlimited: config.unlimited,
            overloaded_status: if config.dialect == Dialect::Anthropic { 529 } else { 503 },
            steps,
            next_step,
            refilled: Duration::ZERO,
            admitted: 0,
            // An own generator for each org: what other orgs get moves none of its draws.
            rng: fastrand::Rng::with_seed(config.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            ledger: Ledger::new(rules.name.clone(), config.record_arrivals),
            rules,
        }
    }

    fn advance(&mut self, now: Duration) {
        while let Some(step) = self.next_step.take_if(|s| s.at_s <= now.as_secs_f64()) {
            self.refill(seconds(step.at_s));
            self.rules.apply(&step.set);
            for (bucket, limit) in self.buckets.iter_mut().zip(self.rules.limits()) {
                *bucket = limit.map(|limit| {
                    let level = bucket.as_ref().map_or(limit.capacity, |b| b.level.min(limit.capacity));
                    Bucket { limit, level }
                });
            }
            self.next_step = self.steps.next();
        }
        self.refill(now);
    }

    fn refill(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.refilled).as_secs_f64();
        self.refilled = self.refilled.max(now);
        for bucket in self.buckets.iter_mut().flatten() {
            bucket.refill(elapsed);
        }
    }

    pub(super) fn arrive(&mut self, now: Duration, ask: Ask) -> Arrival {
        self.advance(now);
        let verdict = self.judge(ask);
        let admitted = !matches!(verdict, Verdict::Unauthorised | Verdict::Refused { .. } | Verdict::Overloaded { .. });
        self.admitted += usize::from(admitted);
        let number = self.ledger.arrived(now, &verdict);
        let views = match self.unlimited {
            true => [None; 3],
            false => [0, 1, 2].map(|i| self.buckets[i].as_ref().map(Bucket::view)),
        };
        Arrival { verdict, views, number, admitted }
    }

    fn judge(&mut self, ask: Ask) -> Verdict {
        let form = self.rules.retry_after;
        let latency = self.rules.latency.unwrap_or(self.default_latency);
        if self.rules.unauthorised.strikes(&mut self.rng) {
            return Verdict::Unauthorised;
        }
        if self.rules.black_hole.strikes(&mut self.rng) {
            let wait = seconds(self.rules.black_hole_wait_s);
            return Verdict::Refused { wait, form, what: "requests per minute" };
        }
        if self.rules.overloaded.strikes(&mut self.rng) {
            return Verdict::Overloaded { status: self.overloaded_status };
        }
        let input = (ask.body_bytes as u64).div_ceil(4);
        let (output, cut) = match ask.puts_out {
            true => {
                let length = (self.rules.output_tokens_p50 * lognormal(0.5, &mut self.rng)).round() as u64;
                let most = ask.max_tokens.unwrap_or(64);
                (length.max(1).min(most), length > most)
            }
            false => (0, false),
        };
        if !self.unlimited {
            if self.rules.max_concurrency.is_some_and(|max| self.admitted >= max) {
                let wait = seconds(latency.p50_ms / 1e3);
                return Verdict::Refused { wait, form, what: "number of concurrent connections" };
            }
            let costs = [1.0, input as f64, output as f64];
            let names = ["requests per minute", "input tokens per minute", "output tokens per minute"];
            let mut refused: Option<(Duration, &'static str)> = None;
            for ((bucket, cost), what) in self.buckets.iter().zip(costs).zip(names) {
                let Some(bucket) = bucket.as_ref().filter(|b| !b.fits(cost)) else {
                    continue;
                };
                let wait = bucket.until(cost);
                if refused.is_none_or(|(longest, _)| wait > longest) {
                    refused = Some((wait, what));
                }
            }
            if let Some((wait, what)) = refused {
                return Verdict::Refused { wait, form, what };
            }
            for (bucket, cost) in self.buckets.iter_mut().zip(costs) {
                if let Some(bucket) = bucket {
                    bucket.take(cost);
                }
            }
        }
        if self.rules.error_5xx.strikes(&mut self.rng) {
            return Verdict::ServerError;
        }
        if self.rules.reset.strikes(&mut self.rng) {
            return Verdict::Reset;
        }
        if self.rules.hang.strikes(&mut self.rng) {
            return Verdict::Hang;
        }
        let flaw = if self.rules.truncate.strikes(&mut self.rng) {
            Some(Flaw::Truncated)
        } else if self.rules.empty.strikes(&mut self.rng) {
            Some(Flaw::Empty)
        } else {
            None
        };
        let latency = latency.draw(&mut self.rng);
        Verdict::Answer { latency, input_tokens: input, output_tokens: output, cut, flaw }
    }

    pub(super) fn leave(&mut self, now: Duration, admitted: bool, ending: Ending) {
        self.admitted -= usize::from(admitted);
        self.ledger.left(now, ending);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn model(org: OrgConfig) -> OrgModel {
        OrgModel::new(&Config::default().org(org), 0)
    }

    fn org() -> OrgConfig {
        OrgConfig::new("o", "k").requests_per_minute(60.0)
    }

    /// Embeddings of no length: they cost one request and nothing else.
    fn ask() -> Ask {
        Ask { body_bytes: 0, max_tokens: None, puts_out: false }
    }

    /// The wait of a refusal, or `None` where it was admitted.
    fn wait(model: &mut OrgModel, now: f64, ask: Ask) -> Option<Duration> {
        match model.arrive(s(now), ask).verdict {
            Verdict::Refused { wait, .. } => Some(wait),
            Verdict::Answer { .. } => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_bucket_starts_full_empties_and_refills_without_a_break() {
        let mut m = model(org());
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), Some(s(1.0)));
        assert_eq!(wait(&mut m, 0.25, ask()), Some(s(0.75)));
        assert_eq!(wait(&mut m, 1.0, ask()), None);
        assert_eq!(wait(&mut m, 1.5, ask()), Some(s(0.5)), "a refusal charges nothing, an admission does");
        // Long after, it holds its capacity and no more.
        let admitted = (0..5).filter(|_| wait(&mut m, 100.0, ask()).is_none()).count();
        assert_eq!(admitted, 2);
    }

    #[test]
    fn the_request_bucket_holds_at_least_one() {
        let mut m = model(org().requests_per_minute(6.0));
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), Some(s(10.0)));
    }

    #[test]
    fn a_call_is_refused_by_the_bucket_that_lacks_most_and_charges_none() {
        let mut m = model(org().requests_capacity(10.0).input_tokens_per_minute(60.0).input_tokens_capacity(10.0));
        let big = Ask { body_bytes: 33, ..ask() }; // 9 tokens
        assert_eq!(wait(&mut m, 0.0, big), None);
        assert_eq!(wait(&mut m, 0.0, big), Some(s(8.0)));
        let view = m.arrive(s(0.0), Ask { body_bytes: 4, ..ask() }).views;
        assert_eq!(view[0].map(|v| v.remaining), Some(8));
        assert_eq!(view[1].map(|v| v.remaining), Some(0));
        // One that is larger than the bucket never fits; it is told when the bucket is full.
        let huge = Ask { body_bytes: 44, ..ask() };
        assert_eq!(wait(&mut m, 0.0, huge), Some(s(10.0)));
        assert_eq!(wait(&mut m, 60.0, huge), Some(s(0.0)));
        // Where both lack, the longer wait is told.
        let both = OrgConfig::new("o", "k").requests_per_minute(60.0).requests_capacity(1.0);
        let mut m = model(both.input_tokens_per_minute(60.0).input_tokens_capacity(9.0));
        assert_eq!(wait(&mut m, 0.0, big), None);
        assert_eq!(wait(&mut m, 0.0, big), Some(s(9.0)));
    }

    #[test]
    fn output_is_charged_at_its_drawn_length_but_never_above_max_tokens() {
        let ask = |max_tokens| Ask { body_bytes: 4, max_tokens, puts_out: true };
        let mut m = model(OrgConfig::new("o", "k").output_tokens_per_minute(60e6).output_tokens_p50(1e4));
        for (max, expected) in [(Some(7), 7), (None, 64)] {
            let before = m.arrive(s(0.0), ask(Some(0))).views[2].unwrap().remaining;
            let arrival = m.arrive(s(0.0), ask(max));
            let Verdict::Answer { output_tokens, cut, .. } = arrival.verdict else { panic!("refused") };
            assert_eq!((output_tokens, cut), (expected, true));
            assert_eq!(before - arrival.views[2].unwrap().remaining, expected);
        }
        let mut m = model(OrgConfig::new("o", "k").output_tokens_p50(100.0));
        let mut lengths: Vec<u64> = (0..1001)
            .map(|_| match m.arrive(s(0.0), ask(Some(100_000))).verdict {
                Verdict::Answer { output_tokens, .. } => output_tokens,
                other => panic!("{other:?}"),
            })
            .collect();
        lengths.sort_unstable();
        assert!((90..=110).contains(&lengths[500]), "median {}", lengths[500]);
    }

    #[test]
    fn latency_is_lognormal_about_its_median() {
        let mut rng = fastrand::Rng::with_seed(7);
        let latency = Latency::new(100.0, 0.5);
        let mut draws: Vec<f64> = (0..10_001).map(|_| latency.draw(&mut rng).as_secs_f64() * 1e3).collect();
        draws.sort_unstable_by(f64::total_cmp);
        assert!((97.0..103.0).contains(&draws[5000]), "median {}", draws[5000]);
        // One sigma above the median: 84.13 % lie below.
        assert!((158.0..172.0).contains(&draws[8413]), "p84 {}", draws[8413]);
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        assert!((mean / 1e3 - latency.mean().as_secs_f64()).abs() < 0.003, "mean {mean}");
    }

    #[test]
    fn the_schedule_changes_rate_and_capacity_and_clips_the_level() {
        let change = Change { quota_factor: Some(0.5), ..Change::default() };
        let mut m = model(org().requests_per_minute(600.0).at(10.0, change)); // holds 20, then 10
        assert_eq!(m.arrive(s(9.0), ask()).views[0].unwrap().remaining, 19);
        let view = m.arrive(s(10.0), ask()).views[0].unwrap();
        assert_eq!((view.limit, view.remaining), (300, 9));
        assert_eq!(view.full_in, s(0.2));
    }

    #[test]
    fn a_step_takes_effect_at_its_own_time_even_if_nobody_calls_then() {
        let change = Change { requests_per_minute: Some(0.0), ..Change::default() };
        let mut m = model(org().requests_capacity(100.0).at(3.0, change));
        for _ in 0..100 {
            assert_eq!(wait(&mut m, 0.0, ask()), None);
        }
        // Three seconds at one a second, and nothing since.
        let admitted = (0..10).filter(|_| wait(&mut m, 50.0, ask()).is_none()).count();
        assert_eq!(admitted, 3);
    }

    #[test]
    fn steps_of_one_time_apply_in_their_order_and_a_black_hole_can_end() {
        let hole = |on: bool| Change { black_hole: Some(on.into()), ..Change::default() };
        let o = org().requests_capacity(1e3).at(2.0, hole(false)).at(1.0, hole(true)).at(2.0, hole(true));
        let mut m = model(o.at(4.0, hole(false)).black_hole_wait_s(0.5));
        assert_eq!(wait(&mut m, 0.9, ask()), None);
        assert_eq!(wait(&mut m, 1.0, ask()), Some(s(0.5)));
        assert_eq!(wait(&mut m, 2.0, ask()), Some(s(0.5)));
        assert_eq!(wait(&mut m, 4.0, ask()), None);
    }

    #[test]
    fn concurrency_counts_admitted_calls_until_they_leave() {
        let mut m = model(OrgConfig::new("o", "k").max_concurrency(1).latency(Latency::new(80.0, 1.0)));
        assert!(m.arrive(s(0.0), ask()).admitted);
        let second = m.arrive(s(0.0), ask());
        assert!(!second.admitted);
        assert!(matches!(second.verdict, Verdict::Refused { wait, .. } if wait == s(0.08)));
        m.leave(s(0.0), false, Ending::Counted);
        assert!(!m.arrive(s(0.0), ask()).admitted, "a refused call held no place");
        m.leave(s(0.1), true, Ending::Empty);
        assert!(m.arrive(s(0.1), ask()).admitted);
    }

    #[test]
    fn chances_strike_about_as_often_as_they_say() {
        let mut m = model(OrgConfig::new("o", "k").error_5xx(0.2).overloaded(0.1));
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            counts[match m.arrive(s(0.0), ask()).verdict {
                Verdict::Overloaded { status: 529 } => 0,
                Verdict::ServerError => 1,
                _ => 2,
            }] += 1;
        }
        assert!((900..1100).contains(&counts[0]) && (1650..1950).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let with = |o: OrgConfig| Config::default().org(o).validate();
        assert!(with(org()).is_ok());
        for bad in [
            OrgConfig::new("", "k"),
            OrgConfig::new("o", ""),
            org().organization_id("a\nb"),
            org().requests_per_minute(-1.0),
            org().capacity_s(f64::NAN),
            org().black_hole(1.5),
            org().latency(Latency::new(f64::INFINITY, 0.3)),
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

    #[test]
    fn the_fluid_limit_of_plain_buckets_is_capacity_then_rate() {
        let config = Config::default().org(org()).org(OrgConfig::new("p", "l").requests_per_minute(120.0));
        assert_eq!(config.capacity_total(), 6.0);
        assert_eq!(config.fluid_limit(0), Some(s(0.0)));
        assert_eq!(config.fluid_limit(6), Some(s(0.0)));
        assert_eq!(config.fluid_limit(9), Some(s(1.0)));
        let tokens = OrgConfig::new("t", "m").requests_per_minute(6000.0).input_tokens_per_minute(6000.0);
        let cost = Cost { input_tokens: 50.0, output_tokens: 0.0 };
        assert_eq!(Config::default().org(tokens.clone()).fluid_limit_for(4, cost), Some(s(0.0)));
        assert_eq!(Config::default().org(tokens.clone()).fluid_limit_for(6, cost), Some(s(1.0)));
        let cost = Cost { input_tokens: 500.0, output_tokens: 0.0 };
        assert_eq!(Config::default().org(tokens).fluid_limit_for(1, cost), Some(Duration::MAX));
    }

    #[test]
    fn the_fluid_limit_follows_the_schedule_concurrency_and_unlimited_orgs() {
        let hole = |on: bool| Change { black_hole: Some(on.into()), ..Change::default() };
        let config = Config::default().org(org().black_hole(true).at(5.0, hole(false)));
        assert_eq!(config.fluid_limit(1), Some(s(5.0)));
        assert_eq!(config.fluid_limit(4), Some(s(7.0)));
        // What a bucket could not hold while it was shut is lost, even if it grows when it opens.
        let open = Change { black_hole: Some(false.into()), capacity_s: Some(100.0), ..Change::default() };
        let config = Config::default().org(org().black_hole(true).at(10.0, open));
        assert_eq!(config.fluid_limit(3), Some(s(11.0)));
        let config = Config::default().org(org().at(1.0, hole(true)));
        assert_eq!(config.fluid_limit(3), Some(s(1.0)));
        assert_eq!(config.fluid_limit(4), Some(Duration::MAX));
        let flat = Latency::new(100.0, 0.0);
        let config = Config::default().latency(flat).org(OrgConfig::new("c", "k").max_concurrency(5));
        assert_eq!(config.fluid_limit(100), Some(s(2.0)));
        let free = Config::default().org(org()).org(OrgConfig::new("free", "f"));
        assert_eq!(free.fluid_limit(1000), None);
        assert_eq!(Config::default().unlimited(true).org(org()).fluid_limit(1), None);
        let lifted = Change { requests_per_minute: Some(f64::INFINITY), ..Change::default() };
        assert_eq!(Config::default().org(org().at(3.0, lifted)).fluid_limit(1000), Some(s(3.0)));
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (10.0..3000.0).prop_map(|r| Change { requests_per_minute: Some(r), ..Change::default() }),
            (0.1..2.0).prop_map(|f| Change { quota_factor: Some(f), ..Change::default() }),
            (0.5..4.0).prop_map(|c| Change { capacity_s: Some(c), ..Change::default() }),
            (100.0..30_000.0).prop_map(|r| Change { input_tokens_per_minute: Some(r), ..Change::default() }),
            any::<bool>().prop_map(|on| Change { black_hole: Some(on.into()), ..Change::default() }),
        ]
    }

    fn orgs(concurrency: bool) -> impl Strategy<Value = Config> {
        let one = (
            10.0..3000.0,
            0.5..4.0,
            proptest::option::of(100.0..30_000.0),
            proptest::option::of(1usize..20),
            proptest::collection::vec((0.0..10.0, change()), 0..4),
        )
            .prop_map(move |(rate, capacity, tokens, max, schedule)| {
                let mut o = OrgConfig::new("o", "k").requests_per_minute(rate).capacity_s(capacity);
                o.input_tokens_per_minute = tokens;
                o.max_concurrency = max.filter(|_| concurrency);
                o.schedule = schedule.into_iter().map(|(at_s, set)| Step { at_s, set }).collect();
                o
            });
        proptest::collection::vec(one, 1..4).prop_map(|orgs| Config { orgs, ..Config::default() })
    }

    /// What all orgs together could have admitted by `end`, drained greedily in small steps.
    fn integrate(config: &Config, cost: [f64; 3], end: f64, dt: f64) -> f64 {
        let mut total = 0.0;
        for org in &config.orgs {
            let mut steps = org.steps().into_iter().peekable();
            let mut rules = org.clone();
            let mut levels = rules.limits().map(|l| l.map(|l| l.capacity));
            for i in 0..=(end / dt) as u64 {
                while let Some(step) = steps.next_if(|s| s.at_s <= i as f64 * dt) {
                    rules.apply(&step.set);
                }
                let limits = rules.limits();
                for r in 0..3 {
                    levels[r] = limits[r].map(|l| levels[r].unwrap_or(l.capacity).min(l.capacity));
                }
                let mut gain = match rules.max_concurrency {
                    Some(max) => max as f64 / rules.latency.unwrap_or(config.latency).mean_s() * dt,
                    None => f64::INFINITY,
                };
                for r in 0..3 {
                    if let (Some(limit), Some(level)) = (limits[r], levels[r]) {
                        if cost[r] > 0.0 {
                            gain = if limit.capacity < cost[r] { 0.0 } else { gain.min(level / cost[r]) };
                        }
                    }
                    if gain == 0.0 {
                        break;
                    }
                }
                if rules.black_hole.always() {
                    gain = 0.0;
                }
                total += gain;
                for r in 0..3 {
                    if let (Some(limit), Some(level)) = (limits[r], levels[r].as_mut()) {
                        *level = (*level - gain * cost[r] + limit.rate * dt).min(limit.capacity);
                    }
                }
            }
        }
        total
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn the_fluid_limit_is_what_integration_finds(config in orgs(true), n in 1u64..300, tokens in 0.0..200.0) {
            let cost = Cost { input_tokens: tokens, output_tokens: 0.0 };
            let costs = [1.0, tokens, 0.0];
            let t = config.fluid_limit_for(n, cost).expect("all are limited");
            let dt = 1e-3;
            // What a step's width can shift: at each corner, at most the fastest rate for some steps.
            let slack = 0.01 * n as f64 + 1.0;
            if t == Duration::MAX {
                prop_assert!(integrate(&config, costs, 30.0, dt) < n as f64 + slack);
            } else {
                let t = t.as_secs_f64();
                // Long tails cost much time here and teach nothing.
                prop_assume!(t < 60.0);
                prop_assert!(integrate(&config, costs, t + 2.0 * dt, dt) > n as f64 - slack);
                if t > 3.0 * dt {
                    prop_assert!(integrate(&config, costs, t - 3.0 * dt, dt) < n as f64 + slack);
                }
            }
        }

        #[test]
        fn no_client_beats_the_fluid_limit(config in orgs(false), bytes in 0usize..400) {
            let ask = Ask { body_bytes: bytes, ..ask() };
            let cost = Cost { input_tokens: bytes.div_ceil(4) as f64, output_tokens: 0.0 };
            let mut models: Vec<OrgModel> = (0..config.orgs.len()).map(|i| OrgModel::new(&config, i)).collect();
            let mut n = 0;
            for ms in (0..12_000).step_by(7) {
                let now = Duration::from_millis(ms);
                let before = n;
                for m in &mut models {
                    while m.arrive(now, ask).admitted {
                        n += 1;
                    }
                }
                if n > before {
                    let limit = config.fluid_limit_for(n, cost).expect("all are limited");
                    prop_assert!(limit <= now + Duration::from_micros(10), "{n} by {now:?}, fluid {limit:?}");
                }
            }
            // And a greedy one comes within a call per org of it, as far as its steps of 7 ms let it see a refill.
            let limit = config.fluid_limit_for(n + 2 * config.orgs.len() as u64, cost).expect("all are limited");
            prop_assert!(limit >= Duration::from_millis(11_000) || !config.orgs.iter().all(|o| o.schedule.is_empty()));
        }
    }
}
