//! The metering layer.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::Instant;
use tower_layer::Layer;

use super::{ByBody, QuotaHeader, ledger::Quota, service::QuotaGate};
use crate::{gate::Gate, org::Org};

/// How far apart two calls must be sent to be sure that they arrive in that order: 5 ms.
///
/// Without it 4.4 % of calls were refused in a simulation with half a millisecond of reordering, and 0.2–0.4 % over real
/// HTTP; with it none.
const GUARD: Duration = Duration::from_millis(5);

/// A longer guard is taken as this one: no call is on its way for so long, and it must be added to the clock.
const GUARD_MAX: Duration = Duration::from_secs(3_600);

/// Paces calls to one org by the quota headers of its answers. All services that one layer (or a clone of it) makes share
/// what is known.
pub struct QuotaHeaderLayer<E = ByBody> {
    gate: Arc<QuotaGate>,
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
        QuotaHeaderLayer { gate: Gate::new(Quota::new(org.clone(), guard, Instant::now())), estimate: ByBody }
    }
}

impl<E> QuotaHeaderLayer<E> {
    /// Estimates costs by `estimate` instead of [by body](ByBody).
    #[must_use]
    pub fn estimate<F>(self, estimate: F) -> QuotaHeaderLayer<F> {
        QuotaHeaderLayer { gate: self.gate, estimate }
    }
}

impl<S, E: Clone> Layer<S> for QuotaHeaderLayer<E> {
    type Service = QuotaHeader<S, E>;

    fn layer(&self, inner: S) -> Self::Service {
        QuotaHeader::new(inner, self.gate.clone(), self.estimate.clone())
    }
}

impl<E: Clone> Clone for QuotaHeaderLayer<E> {
    fn clone(&self) -> Self {
        QuotaHeaderLayer { gate: self.gate.clone(), estimate: self.estimate.clone() }
    }
}

impl<E> fmt::Debug for QuotaHeaderLayer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuotaHeaderLayer").finish_non_exhaustive()
    }
}
