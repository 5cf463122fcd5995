//! The limiting service.

use std::{
    marker::PhantomData,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tower_service::Service;

use super::{AimdFuture, AtBodyEnd, Permit, Release, slots::SlotGate};
use crate::{
    gate::Place,
    outcome::{ByStatus, Classify},
};

/// Limits concurrent calls to an org by an AIMD law. See [the module](super).
pub struct AimdLimit<S, C = ByStatus, R = AtBodyEnd> {
    inner: S,
    gate: Arc<SlotGate>,
    place: Place<super::slots::Slots>,
    permit: Option<Permit>,
    classify: C,
    release: PhantomData<fn() -> R>,
}

impl<S, C, R> AimdLimit<S, C, R> {
    pub(super) fn new(inner: S, gate: Arc<SlotGate>, classify: C) -> Self {
        AimdLimit { inner, gate, place: Place::new(), permit: None, classify, release: PhantomData }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside; a reserved slot is given back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, C, R> Service<Req> for AimdLimit<S, C, R>
where
    S: Service<Req>,
    C: Classify<S::Response, S::Error> + Clone,
    R: Release<S::Response>,
{
    type Response = R::Response;
    type Error = S::Error;
    type Future = AimdFuture<S::Future, C, R>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        // The inner service first: it may pace, and a slot must not be kept while it does.
        ready!(self.inner.poll_ready(cx))?;
        if self.permit.is_none() {
            let admitted = ready!(self.gate.poll_pass(cx, &mut self.place));
            self.permit = Some(Permit::new(&self.gate, admitted));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let permit = self.permit.take().expect("`poll_ready` must say that a slot is reserved before `call`");
        AimdFuture::new(self.inner.call(request), permit, self.classify.clone())
    }
}

impl<S: Clone, C: Clone, R> Clone for AimdLimit<S, C, R> {
    /// The clone shares the limit and starts without a slot.
    fn clone(&self) -> Self {
        AimdLimit::new(self.inner.clone(), self.gate.clone(), self.classify.clone())
    }
}

impl<S: std::fmt::Debug, C, R> std::fmt::Debug for AimdLimit<S, C, R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AimdLimit")
            .field("inner", &self.inner)
            .field("reserved", &self.permit.is_some())
            .finish_non_exhaustive()
    }
}
