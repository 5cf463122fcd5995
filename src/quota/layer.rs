//! The metering layer.

use std::{
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;
use tower_layer::Layer;

use super::{
    ByBody, QuotaHeader,
    ledger::Quota,
    service::{QuotaGate, Reader},
};
use crate::{
    dialect::{ReadQuota, Resource},
    gate::Gate,
    org::{Meters, Org},
};

/// How far apart two calls must be sent to be sure that they arrive in that order: 5 ms.
///
/// Without it 4.4 % of calls were refused in a simulation with half a millisecond of reordering, and 0.2–0.4 % over real
/// HTTP; with it none.
const GUARD: Duration = Duration::from_millis(5);

/// Output in few calls is longer than what 95 % of those before had.
const QUANTILE: f64 = 0.95;

/// A longer guard is taken as this one: no call is on its way for so long, and it must be added to the clock.
const GUARD_MAX: Duration = Duration::from_secs(3_600);

/// Paces calls to one org by the quota headers of its answers. All services that one layer (or a clone of it) makes share
/// what is known.
pub struct QuotaHeaderLayer<E = ByBody> {
    gate: Arc<QuotaGate>,
    reader: Reader,
    estimate: E,
}

impl QuotaHeaderLayer {
    /// A meter for this org's handle (org and model family). It writes the quota's cell of the org's board, so make one layer
    /// a handle.
    #[must_use]
    pub fn new(org: &Org) -> Self {
        QuotaHeaderLayer::with_guard(org, GUARD)
    }

    /// The same, with another idea of how far apart calls must be sent to arrive in order. Longer is more careful; it costs
    /// a part of the first burst only. At most an hour.
    #[must_use]
    pub fn with_guard(org: &Org, guard: Duration) -> Self {
        let guard = guard.min(GUARD_MAX);
        let gate = Gate::new(Quota::new(org.clone(), guard, QUANTILE, Instant::now()));
        let meters: Weak<dyn Meters> = Arc::downgrade(&gate) as Weak<dyn Meters>;
        org.write_meters(meters);
        QuotaHeaderLayer { gate, reader: Reader::default(), estimate: ByBody }
    }
}

impl<E> QuotaHeaderLayer<E> {
    /// Estimates costs by `estimate` instead of [by body](ByBody).
    #[must_use]
    pub fn estimate<F>(self, estimate: F) -> QuotaHeaderLayer<F> {
        QuotaHeaderLayer { gate: self.gate, reader: self.reader, estimate }
    }

    /// Reads the headers of this [dialect](crate::dialect) only. Default: [all of them](crate::dialect::Detect). Say so where a
    /// gateway adds headers that are not to be believed, or where a provider's own way is not known here.
    ///
    /// ```
    /// use tower_quota::{dialect::Anthropic, org::Org, quota::QuotaHeaderLayer};
    ///
    /// let layer = QuotaHeaderLayer::new(&Org::new("research")).dialect(Anthropic);
    /// # drop(layer);
    /// ```
    #[must_use]
    pub fn dialect(mut self, dialect: impl ReadQuota + 'static) -> Self {
        self.reader = Reader::of(dialect);
        self
    }

    /// Which part of calls is not to cost more than it is taken to, `0.5..=1.0`; what is outside is taken as the nearer end.
    /// Default: 0.95. More is more careful with a quota of tokens, and fills it later where answers differ much in length.
    /// Set it before calls are made: what was learnt is forgotten. Shared by the layer's clones.
    #[must_use]
    pub fn quantile(self, quantile: f64) -> Self {
        self.gate.update(|quota, _| quota.set_quantile(quantile));
        self
    }

    /// No request that needs more than so many tokens (or, of a dialect that counts them apart, input or output tokens) is ever
    /// taken by this org: one that does, by the least that its estimate allows, ends at once as
    /// [`Class::TooLarge`](crate::outcome::Class::TooLarge) with a [`TooLarge`](super::TooLarge) as its source, and is not sent. Say
    /// it only where no other org of the pool would take it either. Default: none; what is larger than a bucket goes when the
    /// bucket is full, and the provider decides.
    ///
    /// It needs the error type of the judge, [`outcome::Error`](crate::outcome::Error), or a box; where the services around
    /// have another, such a request is sent all the same.
    #[must_use]
    pub fn hard_limit(self, resource: Resource, limit: f64) -> Self {
        self.gate.update(|quota, _| quota.set_hard(resource, limit));
        self
    }
}

impl<S, E: Clone> Layer<S> for QuotaHeaderLayer<E> {
    type Service = QuotaHeader<S, E>;

    fn layer(&self, inner: S) -> Self::Service {
        QuotaHeader::new(inner, self.gate.clone(), self.reader.clone(), self.estimate.clone())
    }
}

impl<E: Clone> Clone for QuotaHeaderLayer<E> {
    fn clone(&self) -> Self {
        let (reader, estimate) = (self.reader.clone(), self.estimate.clone());
        QuotaHeaderLayer { gate: self.gate.clone(), reader, estimate }
    }
}

impl<E> fmt::Debug for QuotaHeaderLayer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuotaHeaderLayer").finish_non_exhaustive()
    }
}
