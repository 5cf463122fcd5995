//! The balancing service.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Request, Response};
use tower_service::Service;

use super::{
    BalanceFuture, Members,
    fleet::Fleet,
    table::{GatePlace, Table},
};
use crate::{
    call::CallMemory,
    org::Family,
    outcome::{BoxError, Error},
};

/// Balances calls over orgs. See [the module](super).
pub struct OrgBalance<M> {
    table: Arc<Table<M>>,
    place: GatePlace,
    /// The memory of the last call made through this instance: while that call lives on, its next attempt passes.
    last: Option<CallMemory>,
    /// The fleet asked last: most callers keep to one family.
    fleet: Option<(Option<Family>, Arc<Fleet<M>>)>,
}

impl<M> OrgBalance<M> {
    pub(super) fn new(table: Arc<Table<M>>) -> Self {
        OrgBalance { table, place: GatePlace::default(), last: None, fleet: None }
    }

    fn fleet(&mut self, family: Option<&Family>) -> Arc<Fleet<M>>
    where
        M: Clone,
    {
        match &mut self.fleet {
            Some((last, fleet)) if last.as_ref() == family => {
                fleet.refresh();
                fleet.clone()
            }
            _ => {
                let fleet = match family {
                    Some(family) => self.table.fleet(family),
                    None => self.table.fleet(&Family::default()),
                };
                self.fleet = Some((family.cloned(), fleet.clone()));
                fleet
            }
        }
    }
}

impl<M: Clone + Send + 'static> OrgBalance<M> {
    /// A handle to the pool while it runs: who is a member, and who takes calls.
    #[must_use]
    pub fn members(&self) -> Members {
        Members::of(self.table.clone())
    }
}

impl<M, B, RB> Service<Request<B>> for OrgBalance<M>
where
    M: Service<Request<B>, Response = Response<RB>> + Clone,
    M::Error: Into<BoxError>,
{
    type Response = Response<RB>;
    type Error = Error;
    type Future = BalanceFuture<M, Request<B>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        // A retried call has passed already.
        if self.last.as_ref().is_some_and(CallMemory::is_live) {
            return Poll::Ready(Ok(()));
        }
        self.table.unbound.poll_ready(cx, &mut self.place).map(Ok)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let family = request.extensions().get::<Family>();
        let (fleet, model) = (self.fleet(family), family.and_then(Family::shared_model));
        let memory = request.extensions().get::<CallMemory>().cloned();
        let retried = memory.as_ref().is_some_and(CallMemory::was_called);
        let age = match &memory {
            Some(memory) => memory.age_or(|| self.table.age()),
            None => self.table.age(),
        };
        if let (true, Some(memory)) = (retried, &memory) {
            memory.set_bound(false);
        }
        self.last = memory.clone();
        let counted = (!retried).then(|| self.table.unbound.count());
        BalanceFuture::new(fleet, age, model, request, memory, counted)
    }
}

impl<M> Clone for OrgBalance<M> {
    /// The clone shares the orgs and the line, and starts without any member's reservation.
    fn clone(&self) -> Self {
        OrgBalance { table: self.table.clone(), place: GatePlace::default(), last: None, fleet: self.fleet.clone() }
    }
}

impl<M> fmt::Debug for OrgBalance<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrgBalance").finish_non_exhaustive()
    }
}
