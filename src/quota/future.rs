//! The future of a metered call.

use std::{
    any::Any,
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
    ledger::Verdict,
    service::{QuotaGate, Reader, Reserved},
};
use crate::{
    dialect,
    outcome::{BoxError, Ended, Error, Stamp},
};

pin_project! {
    /// The future of a call through [`QuotaHeader`](super::QuotaHeader). Dropped before it is sent, it gives back what it
    /// reserved; after that the call counts as made until an answer says otherwise.
    pub struct QuotaFuture<S, Req>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, S::Future, S::Error>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, F, E> {
        // Rare and large, so on the heap: the common future stays small.
        Waiting { unsent: Option<Box<Unsent<S, Req>>>, sleep: Pin<Box<Sleep>> },
        Calling { #[pin] future: F, sent: Option<Sent> },
        Refused { error: Option<E> },
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
    /// What its input was estimated at.
    estimate: Option<f64>,
    answered: bool,
    reader: Reader,
    /// Whether resets are of use: they cost a date each, and only tell how large the buckets are.
    resets: bool,
}

impl Sent {
    pub(super) fn new(gate: Arc<QuotaGate>, call: u64, estimate: Option<f64>, reader: Reader, resets: bool) -> Self {
        Sent { gate, call, estimate, answered: false, reader, resets }
    }

    /// No answer came. What may have arrived counts as made; what was never sent does not.
    fn failed<E: 'static>(mut self, error: &E) {
        let error = error as &dyn Any;
        let boxed = || error.downcast_ref::<BoxError>()?.downcast_ref::<Error>();
        self.answered = true;
        let uncounted = error.downcast_ref().or_else(boxed).is_some_and(|error: &Error| error.stamp().unsent);
        self.close(Verdict { uncounted, ..Verdict::default() });
    }

    fn close(&self, verdict: Verdict) {
        let impatient = self.gate.update(|quota, now| {
            quota.close(self.call, verdict, now);
            quota.impatient()
        });
        impatient.into_iter().for_each(Waker::wake);
    }

    /// Learns from an answer's headers, whatever its status.
    fn answered<RB>(mut self, response: &mut Response<RB>) {
        // Foreign code, so before any lock.
        let readings = self.reader.read(response.headers(), self.resets.then(SystemTime::now));
        let stamp = response.extensions().get::<Stamp>();
        let usage = stamp.and_then(|stamp| stamp.usage);
        let uncounted = response.status() == StatusCode::TOO_MANY_REQUESTS;
        let tail = stamp.and_then(|stamp| stamp.tail.as_ref()).filter(|_| !uncounted);
        let verdict = Verdict { uncounted, usage, estimate: self.estimate, told_later: tail.is_some() };
        let organisation = dialect::organisation(response.headers());
        let (within, impatient, identified) = self.gate.update(|quota, now| {
            let within = quota.answered(self.call, &readings, verdict, now);
            (within, quota.impatient(), organisation.and_then(|id| quota.identify(id)))
        });
        impatient.into_iter().for_each(Waker::wake);
        if let Some(org) = identified {
            org.tell_identity();
        }
        match tail {
            Some(tail) => tail.on_end(move |ended| self.ended(ended)),
            None => self.answered = true,
        }
        if uncounted && within {
            if let Some(stamp) = response.extensions_mut().get_mut::<Stamp>() {
                stamp.within_quota = true;
            }
        }
    }

    /// The body of an answer that was handed through has ended. What broke off may have used more than it says.
    fn ended(mut self, ended: &Ended) {
        self.answered = true;
        let usage = ended.usage.filter(|_| ended.complete);
        self.close(Verdict { usage, estimate: self.estimate, ..Verdict::default() });
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if !self.answered {
            self.close(Verdict::default());
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

    pub(super) fn refused(error: S::Error) -> Self {
        QuotaFuture { state: State::Refused { error: Some(error) } }
    }

    pub(super) fn waiting(inner: S, request: Req, reserved: Reserved, sleep: Sleep) -> Self {
        let unsent = Some(Box::new(Unsent { inner, request, reserved }));
        QuotaFuture { state: State::Waiting { unsent, sleep: Box::pin(sleep) } }
    }
}

impl<S, Req, RB> Future for QuotaFuture<S, Req>
where
    S: Service<Req, Response = Response<RB>>,
    S::Error: 'static,
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
                    let mut result = ready!(future.poll(cx));
                    let sent = sent.take();
                    this.state.set(State::Done);
                    match (sent, &mut result) {
                        (Some(sent), Ok(response)) => sent.answered(response),
                        (Some(sent), Err(error)) => sent.failed(error),
                        (None, _) => {}
                    }
                    return Poll::Ready(result);
                }
                StateProj::Refused { error } => {
                    let error = error.take().expect("taken only when the state is left");
                    this.state.set(State::Done);
                    return Poll::Ready(Err(error));
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
