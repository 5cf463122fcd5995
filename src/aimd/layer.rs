//! The limiting layer.

use std::{fmt, marker::PhantomData, sync::Arc};

use tower_layer::Layer;

use super::{
    AimdLimit, AtBodyEnd, AtHead,
    settings::Settings,
    slots::{SlotGate, slots},
};
use crate::{org::Org, outcome::ByStatus};

/// Limits concurrent calls to one org. All services that one layer (or a clone of it) makes share one limit.
pub struct AimdLimitLayer<C = ByStatus, R = AtBodyEnd> {
    gate: Arc<SlotGate>,
    classify: C,
    release: PhantomData<fn() -> R>,
}

impl AimdLimitLayer {
    /// A limit for this org's handle (org and model family), with the default [`Settings`]. It writes the limit's cell of the
    /// org's board, so make one layer a handle.
    #[must_use]
    pub fn new(org: &Org) -> Self {
        AimdLimitLayer::with_settings(org, &Settings::default())
    }

    /// The same with your settings.
    #[must_use]
    pub fn with_settings(org: &Org, settings: &Settings) -> Self {
        AimdLimitLayer { gate: slots(org, settings), classify: ByStatus, release: PhantomData }
    }
}

impl<C, R> AimdLimitLayer<C, R> {
    /// Classifies answers by `classify` instead of by status.
    #[must_use]
    pub fn classify<D>(self, classify: D) -> AimdLimitLayer<D, R> {
        AimdLimitLayer { gate: self.gate, classify, release: PhantomData }
    }

    /// Gives the slot back at the head of an answer instead of the end of its body. Needed where answers are not HTTP.
    #[must_use]
    pub fn release_at_head(self) -> AimdLimitLayer<C, AtHead> {
        AimdLimitLayer { gate: self.gate, classify: self.classify, release: PhantomData }
    }
}

impl<S, C: Clone, R> Layer<S> for AimdLimitLayer<C, R> {
    type Service = AimdLimit<S, C, R>;

    fn layer(&self, inner: S) -> Self::Service {
        AimdLimit::new(inner, self.gate.clone(), self.classify.clone())
    }
}

impl<C: Clone, R> Clone for AimdLimitLayer<C, R> {
    fn clone(&self) -> Self {
        AimdLimitLayer { gate: self.gate.clone(), classify: self.classify.clone(), release: PhantomData }
    }
}

impl<C, R> fmt::Debug for AimdLimitLayer<C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AimdLimitLayer").finish_non_exhaustive()
    }
}
