//! The layer and its builder.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;
use tower_layer::Layer;

use super::{
    RateLimitRetry, Shared,
    budget::Budget,
    policy::{Backoff, Dice, Policy},
    stall::Progress,
};
use crate::{
    gate::Gate,
    observe::{Observer, Observers},
    org::BuildError,
    outcome::Stamped,
};

/// Wraps a service in [`RateLimitRetry`]. All services of one layer, and all clones of these, share one budget, and what one of
/// them gets done counts as progress for all.
#[derive(Clone)]
pub struct RateLimitRetryLayer<C = Stamped> {
    classifier: C,
    pub(super) shared: Arc<Shared>,
}

impl RateLimitRetryLayer {
    /// The defaults of [`RateLimitRetryBuilder`], reading the judge's stamp.
    #[must_use]
    pub fn new() -> Self {
        RateLimitRetryBuilder::default().finish()
    }

    /// Starts from the defaults.
    pub fn builder() -> RateLimitRetryBuilder {
        RateLimitRetryBuilder::default()
    }
}

impl<C> RateLimitRetryLayer<C> {
    /// The same layer, with the same budget, that tells one more.
    pub(crate) fn tells(self, observer: Arc<dyn Observer>) -> Self {
        let mut shared = (*self.shared).clone();
        shared.observers.add(observer);
        RateLimitRetryLayer { shared: Arc::new(shared), ..self }
    }
}

impl Default for RateLimitRetryLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<S, C: Clone> Layer<S> for RateLimitRetryLayer<C> {
    type Service = RateLimitRetry<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        RateLimitRetry::new(inner, self.classifier.clone(), self.shared.clone())
    }
}

impl<C> fmt::Debug for RateLimitRetryLayer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitRetryLayer").field("policy", &self.shared.policy).finish_non_exhaustive()
    }
}

/// What may be said about a [`RateLimitRetryLayer`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RateLimitRetryBuilder<C = Stamped> {
    classifier: C,
    policy: Policy,
    ratio: f64,
    per_second: f64,
    seed: Option<u64>,
    observers: Observers,
}

impl Default for RateLimitRetryBuilder {
    fn default() -> Self {
        RateLimitRetryBuilder {
            classifier: Stamped,
            policy: Policy {
                max_attempts: 5,
                backoff: Backoff { base: Duration::from_millis(500), factor: 2.0, cap: Duration::from_secs(30) },
                patience: Duration::from_secs(600),
                max_calls: 1_000,
                idempotency_key: true,
                deadline: None,
            },
            ratio: 0.2,
            per_second: 10.0,
            seed: None,
            observers: Observers::default(),
        }
    }
}

impl<C> RateLimitRetryBuilder<C> {
    /// Who says what an answer means. Default: [`Stamped`]; in a foreign stack [`ByStatus`](crate::outcome::ByStatus), or
    /// your own.
    pub fn classify<D>(self, classifier: D) -> RateLimitRetryBuilder<D> {
        let RateLimitRetryBuilder { classifier: _, policy, ratio, per_second, seed, observers } = self;
        RateLimitRetryBuilder { classifier, policy, ratio, per_second, seed, observers }
    }

    /// Attempts that may end in an error, the first call included; 429s are not attempts. Default 5, at least 1.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.policy.max_attempts = attempts;
        self
    }

    /// The longest wait before the first retry; the wait is drawn between zero and this. Default 500 ms, above zero.
    pub fn backoff_base(mut self, base: Duration) -> Self {
        self.policy.backoff.base = base;
        self
    }

    /// By what the longest wait grows with every retry. Default 2, at least 1.
    pub fn backoff_factor(mut self, factor: f64) -> Self {
        self.policy.backoff.factor = factor;
        self
    }

    /// What no backoff exceeds; a provider's hint may. Default 30 s, at least the base.
    pub fn backoff_cap(mut self, cap: Duration) -> Self {
        self.policy.backoff.cap = cap;
        self
    }

    /// How many retries after errors each first attempt allows, over all calls. Default 0.2: one in five; at least 0.
    pub fn retry_ratio(mut self, ratio: f64) -> Self {
        self.ratio = ratio;
        self
    }

    /// How many retries after errors are allowed each second, over all calls, however little traffic there is; ten seconds'
    /// worth are saved up. Default 10, above zero.
    pub fn min_retries_per_second(mut self, per_second: f64) -> Self {
        self.per_second = per_second;
        self
    }

    /// How long a request may wait while nothing goes on: it is given up when it has waited for as long (from its first 429, or for
    /// its turn from when it began to) *and* no request of this layer's services has had its answer for as long. Whoever waits
    /// while others are served goes on waiting. Default ten minutes, above zero: it outlasts any window of a minute.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.policy.patience = patience;
        self
    }

    /// Wire calls of one request, whatever they ended in. Default 1,000, at least 1.
    pub fn max_calls(mut self, calls: u32) -> Self {
        self.policy.max_calls = calls;
        self
    }

    /// How long a request may take, all in all: waiting for its turn, holds, backoff, and the call itself, which is dropped. It
    /// is given up then, as [`Exhaustion::Deadline`](super::Exhaustion::Deadline), and may be sent again. A request may bring a
    /// [`Deadline`](super::Deadline) of its own; the earlier one counts. Default: none; above zero.
    ///
    /// The time begins when the service is called: what a caller waits for its readiness is not in it.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.policy.deadline = Some(deadline);
        self
    }

    /// Who is told of retries and of requests that are given up ([`Event::Retry`](crate::observe::Event::Retry),
    /// [`Event::Exhausted`](crate::observe::Event::Exhausted)): in the caller's task, under no lock. Another call adds another.
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observers.add(Arc::new(observer));
        self
    }

    /// Whether a POST or PATCH that comes without an `idempotency-key` header is given one. A caller's own key is kept over
    /// all attempts either way. Default true.
    pub fn idempotency_key(mut self, make: bool) -> Self {
        self.policy.idempotency_key = make;
        self
    }

    /// Seeds the jitter and the keys, for tests. Default: the thread's generator.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the layer.
    ///
    /// # Errors
    /// Names the first field that is out of its range.
    pub fn build(self) -> Result<RateLimitRetryLayer<C>, BuildError> {
        let Policy { max_attempts, backoff, patience, max_calls, deadline, .. } = &self.policy;
        let checks = [
            ("max_attempts", *max_attempts >= 1, "must be at least 1: the first call counts"),
            ("backoff_base", !backoff.base.is_zero(), "must be above zero"),
            ("backoff_factor", backoff.factor.is_finite() && backoff.factor >= 1.0, "must be a number of at least 1"),
            ("backoff_cap", backoff.cap >= backoff.base, "must be at least backoff_base"),
            ("retry_ratio", self.ratio.is_finite() && self.ratio >= 0.0, "must be a number of at least 0"),
            (
                "min_retries_per_second",
                self.per_second.is_finite() && self.per_second > 0.0,
                "must be a number above 0; to retry no error, set max_attempts to 1",
            ),
            ("patience", !patience.is_zero(), "must be above zero"),
            ("max_calls", *max_calls >= 1, "must be at least 1"),
            ("deadline", *deadline != Some(Duration::ZERO), "must be above zero"),
        ];
        match checks.into_iter().find(|(_, fine, _)| !fine) {
            Some((field, _, problem)) => Err(BuildError::new(field, problem)),
            None => Ok(self.finish()),
        }
    }

    fn finish(self) -> RateLimitRetryLayer<C> {
        let now = Instant::now();
        let shared = Shared {
            policy: self.policy,
            budget: Gate::new(Budget::new(self.ratio, self.per_second, now)),
            progress: Arc::new(Progress::new(now)),
            dice: Dice::new(self.seed),
            observers: self.observers,
        };
        RateLimitRetryLayer { classifier: self.classifier, shared: Arc::new(shared) }
    }
}
