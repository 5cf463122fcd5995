//! The future of a balanced call: it looks for an org, then waits for that org's answer.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    fleet::{Bound, Fleet, Place},
    member::Seat,
    queue::Model,
    table::Counted,
};
use crate::{
    call::CallMemory,
    org::Org,
    outcome::{BoxError, ByStatus, Class, Classify, Error, Outcome, Stamp},
};

pin_project! {
    /// The future of a call through [`OrgBalance`](super::OrgBalance). Dropped, it leaves the line, or drops the call.
    pub struct BalanceFuture<M, Req>
    where
        M: Service<Req>,
        M: Clone,
    {
        #[pin]
        state: State<M, Req, M::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<M, Req, F>
    where
        M: Clone,
    {
        Unbound { search: Search<M, Req> },
        Calling { #[pin] future: F, seat: Seat<M>, model: Model, memory: Option<CallMemory> },
        Done,
    }
}

/// A call that has no org yet.
struct Search<M: Clone, Req> {
    fleet: Arc<Fleet<M>>,
    place: Place<M>,
    request: Option<Req>,
    memory: Option<CallMemory>,
    // Counted only until it is bound; a retried call is not.
    _counted: Option<Counted>,
}

impl<M: Clone, Req> Drop for Search<M, Req> {
    fn drop(&mut self) {
        self.place.give_up(&self.fleet);
    }
}

impl<M, Req> BalanceFuture<M, Req>
where
    M: Service<Req> + Clone,
{
    pub(super) fn new(
        fleet: Arc<Fleet<M>>,
        age: u64,
        model: Model,
        request: Req,
        memory: Option<CallMemory>,
        counted: Option<Counted>,
    ) -> Self {
        let search = Search { fleet, place: Place::new(age, model), request: Some(request), memory, _counted: counted };
        BalanceFuture { state: State::Unbound { search } }
    }
}

impl<M, B, RB> Future for BalanceFuture<M, Request<B>>
where
    M: Service<Request<B>, Response = Response<RB>> + Clone,
    M::Error: Into<BoxError>,
{
    type Output = Result<Response<RB>, Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Unbound { search } => {
                    let Search { fleet, place, request, memory, .. } = search;
                    let bound = ready!(Fleet::poll_bind_latest(fleet, cx, place, memory.as_ref(), request));
                    let (memory, model) = (memory.take(), place.take_model());
                    match bound {
                        Bound::Called(future, seat) => {
                            if let Some(memory) = &memory {
                                memory.set_bound(true);
                            }
                            this.state.set(State::Calling { future, seat, model, memory });
                        }
                        Bound::Failed(error, org) => {
                            this.state.set(State::Done);
                            return Poll::Ready(Err(signed(error.into(), &org, model.as_deref(), memory.as_ref())));
                        }
                        Bound::NoneLeft(none_left) => {
                            this.state.set(State::Done);
                            return Poll::Ready(Err(Error::new(Outcome::of(Class::NoOrg), none_left)));
                        }
                    }
                }
                StateProj::Calling { future, seat, model, memory } => {
                    let result = ready!(future.poll(cx));
                    let (org, model, memory) = (seat.org().clone(), model.take(), memory.take());
                    this.state.set(State::Done);
                    return Poll::Ready(match result {
                        Ok(mut response) => {
                            sign(&mut response, org, model.as_deref(), memory.as_ref());
                            Ok(response)
                        }
                        Err(error) => Err(signed(error.into(), &org, model.as_deref(), memory.as_ref())),
                    });
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

/// Writes into the answer who served it, and into the call's memory who did not.
fn sign<RB>(response: &mut Response<RB>, org: Org, model: Option<&str>, memory: Option<&CallMemory>) {
    let write = |stamp: &mut Stamp| {
        stamp.held_below = stamp.outcome.class != Class::Ok && is_held(&org, model);
        if let (Some(memory), true) = (memory, stamp.outcome.class != Class::Ok) {
            memory.write_tried(&org, stamp.outcome.class);
        }
        stamp.org = Some(org);
    };
    if let Some(stamp) = response.extensions_mut().get_mut::<Stamp>() {
        return write(stamp);
    }
    let mut stamp = Stamp::new(Classify::<_, Error>::classify(&ByStatus, Ok(response)));
    write(&mut stamp);
    response.extensions_mut().insert(stamp);
}

/// Whether the org does not admit a call for this model for now, or at all.
fn is_held(org: &Org, model: Option<&str>) -> bool {
    org.is_held() || org.refuses(model)
}

fn signed(error: BoxError, org: &Org, model: Option<&str>, memory: Option<&CallMemory>) -> Error {
    let mut error = Error::from_box(error);
    if let Some(memory) = memory {
        memory.write_tried(org, error.class());
    }
    let stamp = error.stamp_mut();
    stamp.held_below = is_held(org, model);
    stamp.org = Some(org.clone());
    error
}

impl<M, Req> std::fmt::Debug for BalanceFuture<M, Req>
where
    M: Service<Req> + Clone,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BalanceFuture").finish_non_exhaustive()
    }
}
