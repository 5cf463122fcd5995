//! The tower service and its future.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::Check;
use crate::outcome::{BoxError, Class, Error, Outcome};

/// Refuses what its check refuses. Made by [`GuardLayer`](super::GuardLayer).
#[derive(Clone)]
pub struct Guard<S, C> {
    inner: S,
    check: Option<C>,
}

impl<S, C> Guard<S, C> {
    pub(super) const fn new(inner: S, check: Option<C>) -> Self {
        Guard { inner, check }
    }

    /// The service it stands over.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, Req, C> Service<Req> for Guard<S, C>
where
    S: Service<Req, Error = Error>,
    C: Check<Req>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = GuardFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        match self.check.as_ref().map_or(Ok(()), |check| check.check(&request)) {
            Ok(()) => GuardFuture { state: State::Sent { future: self.inner.call(request) } },
            Err(why) => GuardFuture { state: State::Refused { why: Some(why) } },
        }
    }
}

impl<S: fmt::Debug, C> fmt::Debug for Guard<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("inner", &self.inner).finish_non_exhaustive()
    }
}

pin_project! {
    /// The future of a call through [`Guard`]: the inner service's own, or a refusal.
    ///
    /// # Panics
    /// If polled again after it has ended, where the inner future does, or where it was a refusal.
    pub struct GuardFuture<F> {
        #[pin]
        state: State<F>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Sent { #[pin] future: F },
        Refused { why: Option<BoxError> },
    }
}

impl<F, Res> Future for GuardFuture<F>
where
    F: Future<Output = Result<Res, Error>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProj::Sent { future } => future.poll(cx),
            StateProj::Refused { why } => {
                let why = why.take().expect("not polled again after it has ended");
                Poll::Ready(Err(Error::new(Outcome::of(Class::Terminal), why)))
            }
        }
    }
}

impl<F> fmt::Debug for GuardFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardFuture").finish_non_exhaustive()
    }
}
