//! The service.

use std::{
    fmt,
    marker::PhantomData,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{
    BatchBody, BatchError, BatchFuture, BatchHandle,
    state::{Closing, Shared},
};
use crate::outcome::BoxError;

/// Answers requests out of batches. Made by [`BatchService::builder`](super::BatchBuilder); see [the module](super).
///
/// `poll_ready` is always ready and reserves nothing: a request is gathered when its future is first polled. So it does not stop callers; let
/// [`drive`](crate::drive) bound the requests alive, at [`live_bound`](BatchService::live_bound). All clones share everything.
///
/// `RB` is the body of answers, any that can be made of [`Bytes`]: that of the direct path, where the two stand in one
/// [`Route`](super::Route).
pub struct BatchService<RB = BatchBody> {
    owner: Arc<Owner>,
    body: PhantomData<fn() -> RB>,
}

/// All who are left of the service; its works end with the last of them.
pub(super) struct Owner(pub(super) Arc<Shared>);

impl<RB> BatchService<RB> {
    pub(super) fn new(shared: Shared) -> Self {
        BatchService { owner: Arc::new(Owner(Arc::new(shared))), body: PhantomData }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.owner.0
    }

    /// The same service with answers of another body.
    #[must_use]
    pub fn answering<Other>(&self) -> BatchService<Other> {
        BatchService { owner: self.owner.clone(), body: PhantomData }
    }

    /// A handle for whoever flushes, watches or shuts down.
    #[must_use]
    pub fn handle(&self) -> BatchHandle {
        BatchHandle::new(self.owner.clone())
    }

    /// How many logical requests a driver should keep alive, so that batches fill: the rows of a batch × orgs × one more than the batches
    /// that an org has in flight, since the next one is gathered meanwhile. Where requests of several models are mixed, each model gathers
    /// apart: add the rows of a batch for every further one.
    #[must_use]
    pub fn live_bound(&self) -> usize {
        let shared = self.shared();
        shared.most.rows.saturating_mul(shared.in_flight.saturating_add(1)).saturating_mul(shared.lines.len())
    }
}

impl<B, RB> Service<Request<B>> for BatchService<RB>
where
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
{
    type Response = Response<RB>;
    type Error = BatchError<Request<B>>;
    type Future = BatchFuture<B, RB>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        BatchFuture::new(self.owner.clone(), request)
    }
}

impl<RB> Clone for BatchService<RB> {
    fn clone(&self) -> Self {
        self.answering()
    }
}

impl<RB> fmt::Debug for BatchService<RB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchService").field("api", &self.shared().api).finish_non_exhaustive()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let shared = &self.0;
        let before = shared.lock().closing.replace(Closing::Leaving);
        if before.is_none() {
            let left = shared.running();
            if !left.is_empty() {
                let left: Vec<_> = left.iter().map(ToString::to_string).collect();
                tracing::warn!(
                    batches = left.join(", "),
                    "these batches are left running and are billed: send the same requests again with the same store to have their answers"
                );
            }
        }
        shared.works.close();
    }
}
