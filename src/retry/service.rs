//! The tower service.

use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};

use http::Request;
use tokio::time::Instant;
use tower_service::Service;

use super::{Deadline, RetryError, RetryFuture, Shared, kept::Kept};
use crate::outcome::{BoxError, Classify, Stamped};

/// Retries what may pass. Made by [`RateLimitRetryLayer`](super::RateLimitRetryLayer).
///
/// `poll_ready` is the inner service's own, and what it reserves is used by the first attempt; a clone starts without a
/// reservation. Every further attempt readies an instance of its own, inside the response future. So whoever readies this
/// service and then waits for work may keep a slot from a retry: take the work first, as [`Drive`](crate::drive::Drive) does.
#[derive(Clone)]
pub struct RateLimitRetry<S, C = Stamped> {
    inner: S,
    classifier: C,
    shared: Arc<Shared>,
}

impl<S, C> RateLimitRetry<S, C> {
    pub(super) fn new(inner: S, classifier: C, shared: Arc<Shared>) -> Self {
        RateLimitRetry { inner, classifier, shared }
    }

    /// The service it stands over.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, B, C> Service<Request<B>> for RateLimitRetry<S, C>
where
    S: Service<Request<B>> + Clone,
    S::Error: Into<BoxError>,
    B: Clone,
    C: Classify<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = RetryError<Request<B>, S::Error>;
    type Future = RetryFuture<S, B, C>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(RetryError::Inner)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        self.shared.budget.update_by(|law, clock| {
            if !law.is_full() {
                law.deposit(clock.read());
            }
        });
        let began = Instant::now();
        let kept = Kept::first(&mut request, &self.shared);
        let own = self.shared.policy.deadline.and_then(|span| began.checked_add(span));
        let deadline = kept.deadline().map(|Deadline(at)| at).into_iter().chain(own).min();
        let attempt = self.inner.call(request);
        // The one that was called goes with the request; the clone, which is not ready, stays, and knows what the other has learnt.
        let clone = self.inner.clone();
        let called = mem::replace(&mut self.inner, clone);
        RetryFuture::new(called, self.classifier.clone(), self.shared.clone(), kept, began, deadline, attempt)
    }
}

impl<S: fmt::Debug, C> fmt::Debug for RateLimitRetry<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitRetry")
            .field("inner", &self.inner)
            .field("policy", &self.shared.policy)
            .finish_non_exhaustive()
    }
}
