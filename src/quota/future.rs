//! The future of a metered call.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::SystemTime,
};

use http::{Response, StatusCode};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use super::{
    dialect,
    service::{QuotaGate, Reserved},
};
use crate::outcome::Stamp;

pin_project! {
    /// The future of a call through [`QuotaHeader`](super::QuotaHeader). Dropped before it is sent, it gives back what it
    /// reserved; after that the call counts as made until an answer says otherwise.
    pub struct QuotaFuture<S, Req>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, S::Future>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // Rare and large, so on the heap: the common future stays small.
        Waiting { unsent: Option<Box<Unsent<S, Req>>>, sleep: Pin<Box<Sleep>> },
        Calling { #[pin] future: F, sent: Option<Sent> },
        Done,
    }
}

/// A request that proved dearer than what was reserved for it: it waits, first in line, since nobody else is admitted while
/// the bucket is overdrawn by it.
struct Unsent<S, Req> {
    inner: S,
    request: Req,
    reserved: Reserved,
}

/// A call that was sent and not answered yet.
pub(super) struct Sent {
    gate: Arc<QuotaGate>,
    call: u64,
    answered: bool,
}

impl Sent {
    pub(super) fn new(gate: Arc<QuotaGate>, call: u64) -> Self {
        Sent { gate, call, answered: false }
    }

    /// Learns from an answer's headers, whatever its status.
    fn answered<RB>(mut self, response: &Response<RB>) {
        self.answered = true;
        let readings = dialect::read_amounts(response.headers());
        let usage = response.extensions().get::<Stamp>().and_then(|stamp| stamp.usage);
        let refused = response.status() == StatusCode::TOO_MANY_REQUESTS;
        let organisation = dialect::organisation(response.headers());
        let (impatient, identified) = self.gate.update(|quota, now| {
            // Resets cost a date each, and are of use only until they have told how large the buckets are.
            let readings =
                if quota.is_sized() { readings } else { dialect::read(response.headers(), SystemTime::now()) };
            quota.answered(self.call, &readings, refused, usage, now);
            (quota.impatient(), organisation.and_then(|id| quota.identify(id)))
        });
        impatient.into_iter().for_each(Waker::wake);
        if let Some(org) = identified {
            org.tell_identity();
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if !self.answered {
            self.gate.update(|quota, now| quota.close(self.call, now));
        }
    }
}

impl<S, Req> QuotaFuture<S, Req>
where
    S: Service<Req>,
{
    pub(super) fn calling(future: S::Future, sent: Sent) -> Self {
        QuotaFuture { state: State::Calling { future, sent: Some(sent) } }
    }

    pub(super) fn waiting(inner: S, request: Req, reserved: Reserved, sleep: Sleep) -> Self {
        let unsent = Some(Box::new(Unsent { inner, request, reserved }));
        QuotaFuture { state: State::Waiting { unsent, sleep: Box::pin(sleep) } }
    }
}

impl<S, Req, RB> Future for QuotaFuture<S, Req>
where
    S: Service<Req, Response = Response<RB>>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Waiting { unsent, sleep } => {
                    let Unsent { mut inner, request, reserved } =
                        *unsent.take().expect("taken only when the state is left");
                    match reserved.send(cx.waker()) {
                        Ok(sent) => {
                            let future = inner.call(request);
                            this.state.set(State::Calling { future, sent: Some(sent) });
                        }
                        Err((reserved, at)) => {
                            *unsent = Some(Box::new(Unsent { inner, request, reserved }));
                            sleep.as_mut().reset(at);
                            ready!(sleep.as_mut().poll(cx));
                        }
                    }
                }
                StateProj::Calling { future, sent } => {
                    let result = ready!(future.poll(cx));
                    let sent = sent.take();
                    this.state.set(State::Done);
                    if let (Some(sent), Ok(response)) = (sent, &result) {
                        sent.answered(response);
                    }
                    return Poll::Ready(result);
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

impl<S, Req> std::fmt::Debug for QuotaFuture<S, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuotaFuture").finish_non_exhaustive()
    }
}
