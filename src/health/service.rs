//! The guarding service.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
};

use tower_service::Service;

use super::{
    HealthFuture,
    shared::{Pass, Shared, State},
};
use crate::{
    gate::Place,
    outcome::{ByStatus, Classify},
};

/// Keeps calls from an org that fails or is dead. See [the module](super).
pub struct OrgHealth<S, C = ByStatus> {
    inner: S,
    shared: Arc<Shared>,
    place: Place<State>,
    pass: Option<Pass>,
    classify: C,
}

impl<S, C> OrgHealth<S, C> {
    pub(super) fn new(inner: S, shared: Arc<Shared>, classify: C) -> Self {
        OrgHealth { inner, shared, place: Place::new(), pass: None, classify }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside; a probe's reserved place is given back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, C> Service<Req> for OrgHealth<S, C>
where
    S: Service<Req>,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = HealthFuture<S::Future, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        // The inner service first: a probe's place must not be kept while that waits.
        if let Err(error) = ready!(self.inner.poll_ready(cx)) {
            self.shared.unready(self.classify.classify(Err(&error)));
            return Poll::Ready(Err(error));
        }
        if self.pass.is_none() {
            self.pass = match self.shared.pass() {
                Some(pass) => {
                    // Whoever waited does not any more.
                    self.place = Place::new();
                    Some(pass)
                }
                None => {
                    let admitted = ready!(self.shared.gate.poll_pass(cx, &mut self.place));
                    Some(self.shared.admitted(admitted))
                }
            };
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let pass = self.pass.take().expect("`poll_ready` must say that the org may be asked before `call`");
        HealthFuture::new(self.inner.call(request), pass, self.classify.clone())
    }
}

impl<S: Clone, C: Clone> Clone for OrgHealth<S, C> {
    /// The clone shares the circuit and starts without leave to call.
    fn clone(&self) -> Self {
        OrgHealth::new(self.inner.clone(), self.shared.clone(), self.classify.clone())
    }
}

impl<S: std::fmt::Debug, C> std::fmt::Debug for OrgHealth<S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OrgHealth")
            .field("inner", &self.inner)
            .field("reserved", &self.pass.is_some())
            .finish_non_exhaustive()
    }
}
