//! The guarding layer.

use std::{fmt, sync::Arc};

use tower_layer::Layer;

use super::{Breaker, CircuitBreaker, OrgHealth, shared::Shared};
use crate::{org::Org, outcome::ByStatus};

/// Keeps calls from one org while it fails, and for good once it is dead. All services that one layer (or a clone of it) makes
/// share one circuit.
pub struct OrgHealthLayer<C = ByStatus> {
    shared: Arc<Shared>,
    classify: C,
}

impl OrgHealthLayer {
    /// For this org's handle (org and model family), with the default [`CircuitBreaker`]. It writes health and circuit on the org's
    /// board, so make one layer a handle.
    #[must_use]
    pub fn new(org: &Org) -> Self {
        OrgHealthLayer::with_breaker(org, CircuitBreaker::default())
    }

    /// The same with a breaker of yours.
    #[must_use]
    pub fn with_breaker(org: &Org, breaker: impl Breaker) -> Self {
        OrgHealthLayer { shared: Shared::new(org, Box::new(breaker)), classify: ByStatus }
    }
}

impl<C> OrgHealthLayer<C> {
    /// Classifies answers by `classify` instead of by status.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> OrgHealthLayer<D> {
        OrgHealthLayer { shared: self.shared, classify }
    }
}

impl<S, C: Clone> Layer<S> for OrgHealthLayer<C> {
    type Service = OrgHealth<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        OrgHealth::new(inner, self.shared.clone(), self.classify.clone())
    }
}

impl<C: Clone> Clone for OrgHealthLayer<C> {
    fn clone(&self) -> Self {
        OrgHealthLayer { shared: self.shared.clone(), classify: self.classify.clone() }
    }
}

impl<C> fmt::Debug for OrgHealthLayer<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrgHealthLayer").finish_non_exhaustive()
    }
}

#[cfg(test)]
impl<C> OrgHealthLayer<C> {
    /// Runs this while the circuit's lock is held.
    pub(super) fn shared_gate_locked(&self, run: impl FnOnce()) {
        self.shared.gate.read(|_| run());
    }
}
