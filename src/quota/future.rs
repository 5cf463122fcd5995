//! The future of a metered call.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use http::{Response, StatusCode};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use super::{
    dialect,
    ledger::PerResource,
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
        gate: Arc<QuotaGate>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F> {
        // The request proved dearer than what was reserved for it: it waits here, first in line, since nobody else is
        // admitted while the bucket is overdrawn by it.
        Waiting { inner: S, request: Option<Req>, reserved: Option<Reserved>, #[pin] sleep: Sleep },
        Calling { #[pin] future: F, call: u64 },
        Done,
    }
}

impl<S, Req> QuotaFuture<S, Req>
where
    S: Service<Req>,
{
    pub(super) fn calling(future: S::Future, call: u64, gate: Arc<QuotaGate>) -> Self {
        QuotaFuture { state: State::Calling { future, call }, gate }
    }

    pub(super) fn waiting(inner: S, request: Req, reserved: Reserved, sleep: Sleep, gate: Arc<QuotaGate>) -> Self {
        QuotaFuture { state: State::Waiting { inner, request: Some(request), reserved: Some(reserved), sleep }, gate }
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
                StateProj::Waiting { inner, request, reserved, mut sleep } => {
                    ready!(sleep.as_mut().poll(cx));
                    let cost = *reserved.as_ref().expect("taken only when the state is left").cost();
                    if let Some(at) = wait_until(this.gate, &cost) {
                        sleep.as_mut().reset(at);
                        continue;
                    }
                    let request = request.take().expect("taken only when the state is left");
                    let reserved = reserved.take().expect("taken only when the state is left");
                    let call = reserved.send();
                    let future = inner.call(request);
                    this.state.set(State::Calling { future, call });
                }
                StateProj::Calling { future, call } => {
                    let result = ready!(future.poll(cx));
                    let call = *call;
                    this.state.set(State::Done);
                    if let Ok(response) = &result {
                        read(this.gate, call, response);
                    }
                    return Poll::Ready(result);
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

/// When the call may be sent, if not now.
pub(super) fn wait_until(gate: &QuotaGate, cost: &PerResource) -> Option<tokio::time::Instant> {
    let now = tokio::time::Instant::now();
    let at = gate.read(|quota| quota.covered_at(cost, now));
    (at > now).then_some(at)
}

/// Learns from an answer's headers, whatever its status.
fn read<RB>(gate: &QuotaGate, call: u64, response: &Response<RB>) {
    let readings = dialect::read(response.headers(), SystemTime::now());
    let usage = response.extensions().get::<Stamp>().and_then(|stamp| stamp.usage);
    let refused = response.status() == StatusCode::TOO_MANY_REQUESTS;
    let organisation = dialect::organisation(response.headers());
    gate.update(|quota, now| {
        quota.answered(call, &readings, refused, usage, now);
        if let Some(id) = organisation {
            quota.identify(id);
        }
    });
}

impl<S, Req> std::fmt::Debug for QuotaFuture<S, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuotaFuture").finish_non_exhaustive()
    }
}
