//! The service.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{Answer, JudgeFuture, future::Asked, layer::Rules};
use crate::{
    org::Family,
    outcome::{BoxError, Error},
};

/// Judges every answer of the service it wraps. Made by [`JudgeLayer`](super::JudgeLayer).
///
/// Readiness is the inner service's own, and a clone is a clone of the inner service: no reservation is kept here. The inner
/// body must be `Unpin`, since one that proves too large is moved into the answer; box one that is not.
#[derive(Clone, Debug)]
pub struct JudgeService<S> {
    inner: S,
    rules: Arc<Rules>,
}

impl<S> JudgeService<S> {
    pub(super) fn new(inner: S, rules: Arc<Rules>) -> Self {
        JudgeService { inner, rules }
    }

    /// The service that is wrapped.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, B, RB> Service<Request<B>> for JudgeService<S>
where
    S: Service<Request<B>, Response = Response<RB>>,
    B: Body,
    S::Error: Into<BoxError>,
    RB: Body + Unpin,
    RB::Error: Into<BoxError>,
{
    type Response = Response<Answer<RB>>;
    type Error = Error;
    type Future = JudgeFuture<S::Future, RB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx).map_err(|error| self.rules.fault(error.into()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let model = request.extensions().get().and_then(Family::shared_model);
        let asked = Asked { size: request.body().size_hint().exact(), model };
        JudgeFuture::new(self.rules.clone(), asked, || self.inner.call(request))
    }
}
