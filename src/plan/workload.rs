//! What is to be done.

use std::time::Duration;

use crate::org::BuildError;

/// What a plan is to be good at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Objective {
    /// The least time.
    Latency,
    /// The least money within the deadline, if there is one.
    Cost,
    /// Time and money are weighed: twice as long for half the price is an even trade.
    #[default]
    Balanced,
}

impl Objective {
    /// `latency`, `cost` or `balanced`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Objective::Latency => "latency",
            Objective::Cost => "cost",
            Objective::Balanced => "balanced",
        }
    }
}

/// How many tokens a call has on one side: their mean, and what 95 in a hundred calls do not exceed.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tokens {
    /// The mean: rates and prices go by it.
    pub mean: f64,
    /// The 95th percentile: by it the size of a batch in bytes and the uncertainty of the time.
    pub p95: f64,
}

impl Tokens {
    /// Of this mean and 95th percentile.
    #[must_use]
    pub fn new(mean: f64, p95: f64) -> Self {
        Tokens { mean, p95 }
    }

    /// All calls alike.
    #[must_use]
    pub fn fixed(tokens: f64) -> Self {
        Tokens { mean: tokens, p95: tokens }
    }

    /// Anything between these, equally likely.
    #[must_use]
    pub fn between(least: f64, most: f64) -> Self {
        Tokens { mean: (least + most) / 2.0, p95: least + 0.95 * (most - least) }
    }

    /// Of a sample of calls; zero of an empty one.
    #[must_use]
    pub fn of_sample(tokens: &[f64]) -> Self {
        let mut sorted = tokens.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = (sorted.len() as f64 * 0.95) as usize;
        let p95 = sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(0.0);
        Tokens { mean: sorted.iter().sum::<f64>() / sorted.len().max(1) as f64, p95 }
    }

    /// The standard deviation over the mean, as if it were normal.
    pub(crate) fn cv(&self) -> f64 {
        if self.mean > 0.0 { ((self.p95 / self.mean - 1.0) / 1.645).clamp(0.0, 3.0) } else { 0.0 }
    }

    fn check(&self, field: &str) -> Result<(), BuildError> {
        let sound = |x: f64| x.is_finite() && x >= 0.0;
        match sound(self.mean) && sound(self.p95) {
            true => Ok(()),
            false => Err(BuildError::new(field, "mean and p95 must be finite and zero or more")),
        }
    }
}

/// What is to be done: so many calls of one model, alike in kind.
///
/// **`n` is the unanswered remainder**: what a journal or an earlier run has answered is not sent again, so it must not be
/// counted. A hundred thousand rows of which ninety-nine thousand are answered are a job of a thousand, and another route.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Workload {
    /// How many calls are *left* to be answered.
    pub n: u64,
    /// The model, by the name that the [`Fleet`](super::Fleet)'s limits and prices have.
    pub model: String,
    /// Tokens of a prompt. Default 260 and 386: 120 to 400, a judge's.
    pub input: Tokens,
    /// Tokens of an answer. Default 160 and 246: 64 to 256.
    pub output: Tokens,
    /// What the plan is to be good at. Default [`Objective::Balanced`].
    pub objective: Objective,
    /// When all must be answered, counted from the start. Default none.
    pub deadline: Option<Duration>,
    /// Wire calls an answer takes, failures that are tried again included; at least 1. Default 1.
    pub calls_a_row: f64,
}

impl Workload {
    /// So many unanswered calls of a model.
    #[must_use]
    pub fn new(n: u64, model: impl Into<String>) -> Self {
        Workload {
            n,
            model: model.into(),
            input: Tokens::between(120.0, 400.0),
            output: Tokens::between(64.0, 256.0),
            objective: Objective::default(),
            deadline: None,
            calls_a_row: 1.0,
        }
    }

    /// Sets [`input`](Self::input).
    #[must_use]
    pub fn input(mut self, tokens: Tokens) -> Self {
        self.input = tokens;
        self
    }

    /// Sets [`output`](Self::output).
    #[must_use]
    pub fn output(mut self, tokens: Tokens) -> Self {
        self.output = tokens;
        self
    }

    /// Sets [`objective`](Self::objective).
    #[must_use]
    pub fn objective(mut self, objective: Objective) -> Self {
        self.objective = objective;
        self
    }

    /// Sets [`deadline`](Self::deadline).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Sets [`calls_a_row`](Self::calls_a_row).
    #[must_use]
    pub fn calls_a_row(mut self, calls: f64) -> Self {
        self.calls_a_row = calls;
        self
    }

    pub(crate) fn check(&self) -> Result<(), BuildError> {
        self.input.check("input")?;
        self.output.check("output")?;
        match self.calls_a_row.is_finite() && self.calls_a_row >= 1.0 {
            true => Ok(()),
            false => Err(BuildError::new("calls_a_row", format!("{} is not a number from 1", self.calls_a_row))),
        }
    }

    /// What a call costs of each resource, in the order of `Resource::ALL`.
    pub(crate) fn cost(&self) -> [f64; 4] {
        [1.0, self.input.mean, self.output.mean, self.input.mean + self.output.mean]
    }
}
