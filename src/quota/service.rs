//! The metering service.

use std::{
    any::Any,
    fmt,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::SystemTime,
};

use http::{HeaderMap, Request, Response};
use tokio::time::Instant;
use tower_service::Service;

use super::{
    ByBody, Cost, Estimate, QuotaFuture, TooLarge,
    future::Sent,
    ledger::{Grant, Quota},
};
use crate::{
    dialect::{Detect, ReadQuota, Readings},
    gate::{Gate, Place},
    org::{Meters, ResourceQuota},
    outcome::{BoxError, Class, Error, Outcome},
};

pub(crate) type QuotaGate = Gate<Quota>;

impl Meters for QuotaGate {
    fn read(&self) -> Vec<ResourceQuota> {
        self.look(|quota, now| quota.meters(now))
    }
}

/// Whose headers are read: all, unless told.
#[derive(Clone, Default)]
pub(super) struct Reader(Option<Arc<dyn ReadQuota>>);

impl Reader {
    pub(super) fn of(dialect: impl ReadQuota + 'static) -> Self {
        Reader(Some(Arc::new(dialect)))
    }

    pub(super) fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        match &self.0 {
            None => Detect.read(headers, wall),
            Some(dialect) => dialect.read(headers, wall).sound(),
        }
    }
}

/// Paces calls to an org by what its answers say remains. See [the module](super).
pub struct QuotaHeader<S, E = ByBody> {
    inner: S,
    gate: Arc<QuotaGate>,
    reader: Reader,
    place: Place<Quota>,
    reserved: Option<Reserved>,
    estimate: E,
}

/// What was taken off for a call that has not been sent. Dropped, it is given back.
pub(super) struct Reserved {
    gate: Option<Arc<QuotaGate>>,
    taken: Grant,
    /// What its input was estimated at.
    estimate: Option<f64>,
    /// The call is made, and waits until its cost is covered.
    unsent: bool,
    reader: Reader,
}

impl Reserved {
    /// Sends the call if its cost is covered; else gives itself back, and when to ask again. `waker` is woken where that
    /// comes earlier.
    pub(super) fn send(mut self, waker: &Waker) -> Result<Sent, (Self, Instant)> {
        let gate = self.gate.take().expect("taken only by sending, which consumes it");
        let sent = gate.update(|quota, now| {
            let sent = quota.send(self.taken.cost, now);
            if sent.is_err() {
                quota.wake_when_more(waker);
            }
            sent.map(|call| (call, !quota.is_sized()))
        });
        match sent {
            Ok((call, resets)) => Ok(self.sent(gate, call, resets)),
            Err(at) => {
                self.gate = Some(gate);
                Err((self, at))
            }
        }
    }

    fn sent(mut self, gate: Arc<QuotaGate>, call: u64, resets: bool) -> Sent {
        Sent::new(gate, call, self.estimate, std::mem::take(&mut self.reader), resets)
    }

    /// The same for a call whose cost has only now become known.
    fn call(mut self, cost: &Cost) -> Result<Sent, (Self, Instant)> {
        let gate = self.gate.take().expect("taken only by sending, which consumes it");
        self.estimate = cost.input_tokens.filter(|_| !cost.exact);
        let (cost, sent, impatient) = gate.update(|quota, now| {
            let (cost, sent) = quota.call(&self.taken.cost, cost, now);
            let is_cheaper = self.taken.cost.iter().zip(&cost).any(|(reserved, cost)| cost < reserved);
            let impatient = if is_cheaper { quota.impatient() } else { vec![] };
            (cost, sent.map(|call| (call, !quota.is_sized())), impatient)
        });
        let sent = match sent {
            Ok((call, resets)) => Ok(self.sent(gate, call, resets)),
            Err(at) => {
                (self.taken.cost, self.unsent) = (cost, true);
                self.gate = Some(gate);
                Err((self, at))
            }
        };
        impatient.into_iter().for_each(Waker::wake);
        sent
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            let impatient = gate.update(|quota, now| {
                quota.give_back(&self.taken.cost, self.unsent, now);
                quota.impatient()
            });
            impatient.into_iter().for_each(Waker::wake);
        }
    }
}

impl<S, E> QuotaHeader<S, E> {
    pub(super) fn new(inner: S, gate: Arc<QuotaGate>, reader: Reader, estimate: E) -> Self {
        QuotaHeader { inner, gate, reader, place: Place::new(), reserved: None, estimate }
    }

    /// The service inside.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside; what was reserved is given back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

/// The error as the services around it want it; none where it does not go into their kind of error: then the provider says so.
fn refusal<E: 'static>(too_large: TooLarge) -> Option<E> {
    let mut ours = Some(Error::new(Outcome::of(Class::TooLarge), too_large));
    if let Some(theirs) = (&mut ours as &mut dyn Any).downcast_mut::<Option<E>>() {
        return theirs.take();
    }
    let mut boxed = ours.map(BoxError::from);
    (&mut boxed as &mut dyn Any).downcast_mut::<Option<E>>()?.take()
}

impl<S, B, RB, E> Service<Request<B>> for QuotaHeader<S, E>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone,
    S::Error: 'static,
    E: Estimate<Request<B>>,
{
    type Response = Response<RB>;
    type Error = S::Error;
    type Future = QuotaFuture<S, Request<B>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        ready!(self.inner.poll_ready(cx))?;
        if self.reserved.is_none() {
            let grant = ready!(self.gate.poll_pass(cx, &mut self.place));
            let (gate, reader) = (Some(self.gate.clone()), self.reader.clone());
            self.reserved = Some(Reserved { gate, taken: grant, estimate: None, unsent: false, reader });
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let reserved = self.reserved.take().expect("`poll_ready` must say that the call is paced before `call`");
        // Where calls alone are counted, nobody need look into a body.
        let Grant { meters_tokens, has_hard, .. } = reserved.taken;
        let cost = if meters_tokens || has_hard { self.estimate.cost(&request) } else { Cost::default() };
        let too_large = if has_hard { self.gate.look(|quota, _| quota.too_large(&cost)) } else { None };
        if let Some(error) = too_large.and_then(refusal) {
            return QuotaFuture::refused(error);
        }
        match reserved.call(&cost) {
            Ok(sent) => QuotaFuture::calling(self.inner.call(request), sent),
            Err((reserved, at)) => {
                let clone = self.inner.clone();
                let readied = std::mem::replace(&mut self.inner, clone);
                QuotaFuture::waiting(readied, request, reserved, tokio::time::sleep_until(at))
            }
        }
    }
}

impl<S: Clone, E: Clone> Clone for QuotaHeader<S, E> {
    /// The clone shares what is known of the quota and starts without a reservation.
    fn clone(&self) -> Self {
        QuotaHeader::new(self.inner.clone(), self.gate.clone(), self.reader.clone(), self.estimate.clone())
    }
}

impl<S: fmt::Debug, E> fmt::Debug for QuotaHeader<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuotaHeader")
            .field("inner", &self.inner)
            .field("reserved", &self.reserved.is_some())
            .finish_non_exhaustive()
    }
}
