//! Which way a request goes: directly, or in a batch.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{BatchError, BatchFuture, BatchService};
use crate::outcome::BoxError;

/// A way.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// At once.
    Direct,
    /// In a batch: cheaper, and within a day.
    Batch,
}

/// Says which way a request goes. A [`Way`] is one, for all requests; so is a closure `Fn(&Request<B>) -> Way`, which must not block.
pub trait Choose<B>: Send + Sync + 'static {
    /// Which way this one goes.
    fn way(&self, request: &Request<B>) -> Way;
}

impl<B> Choose<B> for Way {
    fn way(&self, _: &Request<B>) -> Way {
        *self
    }
}

impl<B, F: Fn(&Request<B>) -> Way + Send + Sync + 'static> Choose<B> for F {
    fn way(&self, request: &Request<B>) -> Way {
        self(request)
    }
}

/// Sends each request its way: to `D`, or into a batch. What [may](super::BatchFailure::goes_direct) go directly after it came to nothing in a
/// batch, goes directly then: rows of a stuck batch, rows that two batches have not answered, requests that no batch takes.
///
/// `poll_ready` is always ready and reserves nothing: the way is chosen in `call`, and only that one is waited for, in the response future,
/// on an instance of its own (tower's `Steer` waits for all). So it does not stop callers; let [`drive`](crate::drive) bound the requests alive.
pub struct Route<D, RB, P = Way> {
    direct: D,
    batch: BatchService<RB>,
    choose: Arc<P>,
}

impl<D, RB, P> Route<D, RB, P> {
    /// Between these two.
    #[must_use]
    pub fn new(direct: D, batch: BatchService<RB>, choose: P) -> Self {
        Route { direct, batch, choose: Arc::new(choose) }
    }

    /// The direct path.
    pub const fn direct(&self) -> &D {
        &self.direct
    }

    /// The batch path.
    pub const fn batch(&self) -> &BatchService<RB> {
        &self.batch
    }
}

impl<D, B, RB, P> Service<Request<B>> for Route<D, RB, P>
where
    D: Service<Request<B>, Response = Response<RB>> + Clone,
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
    P: Choose<B>,
{
    type Response = Response<RB>;
    type Error = RouteError<D::Error, Request<B>>;
    type Future = RouteFuture<D, B, RB>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let step = match self.choose.way(&request) {
            Way::Direct => Step::Readying { request: Some(request) },
            Way::Batch => Step::Batch { call: self.batch.call(request) },
        };
        RouteFuture { step, direct: Some(self.direct.clone()) }
    }
}

impl<D: Clone, RB, P> Clone for Route<D, RB, P> {
    fn clone(&self) -> Self {
        Route { direct: self.direct.clone(), batch: self.batch.clone(), choose: self.choose.clone() }
    }
}

impl<D: fmt::Debug, RB, P> fmt::Debug for Route<D, RB, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").field("direct", &self.direct).field("batch", &self.batch).finish_non_exhaustive()
    }
}

pin_project! {
    /// The future of a [`Route`]. Dropped, it drops what it waits for.
    ///
    /// # Panics
    /// If polled again after it has finished.
    pub struct RouteFuture<D, B, RB>
    where
        D: Service<Request<B>>,
    {
        #[pin]
        step: Step<D::Future, B, RB>,
        direct: Option<D>,
    }
}

pin_project! {
    #[project = StepProj]
    enum Step<F, B, RB> {
        Batch { #[pin] call: BatchFuture<B, RB> },
        Readying { request: Option<Request<B>> },
        Direct { #[pin] call: F },
        Done,
    }
}

impl<D, B, RB> Future for RouteFuture<D, B, RB>
where
    D: Service<Request<B>, Response = Response<RB>>,
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
{
    type Output = Result<Response<RB>, RouteError<D::Error, Request<B>>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = ready!(self.as_mut().poll_steps(cx));
        let mut this = self.project();
        this.step.set(Step::Done);
        *this.direct = None;
        Poll::Ready(result)
    }
}

impl<D, B, RB> RouteFuture<D, B, RB>
where
    D: Service<Request<B>, Response = Response<RB>>,
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
{
    #[expect(clippy::type_complexity, reason = "it is the output of a future")]
    fn poll_steps(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Response<RB>, RouteError<D::Error, Request<B>>>> {
        let mut this = self.project();
        loop {
            let next = match this.step.as_mut().project() {
                StepProj::Batch { call } => match ready!(call.poll(cx)) {
                    Ok(answer) => return Poll::Ready(Ok(answer)),
                    Err(error) if error.failure().goes_direct() && error.request().is_some() => {
                        tracing::debug!(why = %error, "a request goes directly instead");
                        Step::Readying { request: error.into_request() }
                    }
                    Err(error) => return Poll::Ready(Err(RouteError::Batch(error))),
                },
                StepProj::Readying { request } => {
                    let direct = this.direct.as_mut().expect("not polled again after it has finished");
                    ready!(direct.poll_ready(cx)).map_err(RouteError::Direct)?;
                    let request = request.take().expect("it goes on to the next step at once");
                    Step::Direct { call: direct.call(request) }
                }
                StepProj::Direct { call } => return call.poll(cx).map_err(RouteError::Direct),
                StepProj::Done => panic!("polled again after it has finished"),
            };
            this.step.set(next);
        }
    }
}

impl<D, B, RB> fmt::Debug for RouteFuture<D, B, RB>
where
    D: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RouteFuture").finish_non_exhaustive()
    }
}

/// Why there is no answer. It reads as the error that it holds, and has the same source.
#[non_exhaustive]
pub enum RouteError<E, Req> {
    /// On the direct path.
    Direct(E),
    /// On the batch path.
    Batch(BatchError<Req>),
}

impl<E: fmt::Debug, B> fmt::Debug for RouteError<E, Request<B>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RouteError::Direct(error) => f.debug_tuple("Direct").field(error).finish(),
            RouteError::Batch(error) => f.debug_tuple("Batch").field(error).finish(),
        }
    }
}

impl<E: fmt::Display, Req> fmt::Display for RouteError<E, Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RouteError::Direct(error) => error.fmt(f),
            RouteError::Batch(error) => error.fmt(f),
        }
    }
}

impl<E: StdError, B> StdError for RouteError<E, Request<B>> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            RouteError::Direct(error) => error.source(),
            RouteError::Batch(error) => error.source(),
        }
    }
}
