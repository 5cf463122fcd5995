//! A bounded driver: pairs of an id and a request in, pairs of the id and what became of it out, as they complete.
//!
//! It stands on top of a stack, where a program would otherwise spawn a task per item. A request is *alive* from being
//! taken until its result is yielded, and never more than `bound` are, so memory does not grow with the input: it is read
//! one item ahead of what the service admits. An item is taken *before* the driver waits for readiness, and called in the
//! same poll that found the service ready; a slot is never reserved for work that may not come.
//!
//! Everything runs in whoever polls the driver: no task is spawned, and while nobody polls, nothing moves. Take results
//! quickly, or give them to another task.
//!
//! ```
//! use std::convert::Infallible;
//! use tower_quota::drive::Drive;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // In a real program: a journal, a retry layer and a balancer over clients.
//! let service = tower::service_fn(|n: u64| async move { Ok::<_, Infallible>(n * n) });
//! let mut drive = Drive::iter(service, (0..1_000u64).map(|n| (format!("row {n}"), n)), 16)?;
//! let mut sum = 0;
//! while let Some((id, result)) = drive.next().await {
//!     match result {
//!         Ok(square) => sum += square,
//!         Err(error) => eprintln!("{id}: {error}"),
//!     }
//! }
//! assert_eq!(sum, (0..1_000).map(|n| n * n).sum::<u64>());
//! assert!(drive.peak_live() <= 16);
//! # Ok(())
//! # }
//! ```

use std::{
    collections::VecDeque,
    convert::Infallible,
    error::Error as StdError,
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_core::Stream;
use futures_util::stream::{self, FuturesUnordered};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

use crate::{org::BuildError, outcome::BoxError};

/// How many requests are admitted in one poll without a result between, before other tasks are let run.
const ADMITTED_AT_ONCE: usize = 128;

/// Why an item has no response. It is an [`Error`](StdError) where the service's is. A boxed one, as tower's timeout has, is none
/// in the standard library, and so is this around it: [`into_box`](DriveError::into_box) is for that.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveError<E> {
    /// The service's own error, from its readiness or from the call.
    Service(E),
    /// Given up: by [`Drive::abort`], or by [`Drive::stop`] before it was sent.
    Stopped,
    /// Not done at the [deadline](Drive::deadline).
    Deadline,
}

impl<E: Into<BoxError>> DriveError<E> {
    /// Boxes it: the service's own error as it is, with its sources, to be downcast to what it was; else this one.
    ///
    /// ```
    /// # use tower_quota::{drive::{Drive, DriveError}, outcome::BoxError};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
    /// # let service = tower::service_fn(async |n: u64| Ok::<_, BoxError>(n));
    /// # let service = tower::ServiceBuilder::new().timeout(std::time::Duration::from_secs(30)).service(service);
    /// let mut drive = Drive::iter(service, (0..10).map(|n| (n, n)), 4)?; // tower's timeout stands on top of it
    /// while let Some((n, result)) = drive.next().await {
    ///     let answer = result.map_err(DriveError::into_box)?;
    ///     # assert_eq!(answer, n);
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn into_box(self) -> BoxError {
        match self {
            DriveError::Service(error) => error.into(),
            DriveError::Stopped => DriveError::<Infallible>::Stopped.into(),
            DriveError::Deadline => DriveError::<Infallible>::Deadline.into(),
        }
    }
}

impl<E: fmt::Display> fmt::Display for DriveError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DriveError::Service(error) => error.fmt(f),
            DriveError::Stopped => f.write_str("stopped before it was done: send it again in a later run"),
            DriveError::Deadline => f.write_str("not done at the deadline: send it again in a later run"),
        }
    }
}

impl<E: StdError> StdError for DriveError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            DriveError::Service(error) => error.source(),
            DriveError::Stopped | DriveError::Deadline => None,
        }
    }
}

pin_project! {
    struct Call<Id, F> {
        id: Option<Id>,
        #[pin]
        response: F,
    }
}

impl<Id, F: Future> Future for Call<Id, F> {
    type Output = (Id, F::Output);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let output = ready!(this.response.poll(cx));
        Poll::Ready((this.id.take().expect("taken only here, and by giving the call up"), output))
    }
}

/// Why an item is given up.
#[derive(Clone, Copy)]
enum Given {
    Stopped,
    Deadline,
}

impl<E> From<Given> for DriveError<E> {
    fn from(given: Given) -> Self {
        match given {
            Given::Stopped => DriveError::Stopped,
            Given::Deadline => DriveError::Deadline,
        }
    }
}

/// Drives a stream of `(Id, Req)` through a service; a [`Stream`] of `(Id, Result<Response, DriveError>)`.
///
/// Every id that was taken is yielded exactly once, in the order of completion. Ids need not differ; which of two equal ones
/// a result belongs to is then the caller's business. Where the service's readiness fails, the item taken is yielded with
/// that error and the next one tries again.
///
/// Dropped, it drops what is in flight. A panic in a call goes through to whoever polls; the other calls go on if the driver
/// is polled again, and the id of the one that panicked is never yielded.
pub struct Drive<S, I, Id, Req>
where
    S: Service<Req>,
{
    service: S,
    /// `None` once nothing more is to be taken.
    input: Option<Pin<Box<I>>>,
    /// Taken, and waiting for readiness.
    taken: Option<(Id, Req)>,
    in_flight: FuturesUnordered<Call<Id, S::Future>>,
    given_up: VecDeque<(Id, Given)>,
    bound: usize,
    peak_live: usize,
    deadline: Option<Instant>,
    /// Set at the first poll, where a runtime is at hand.
    alarm: Option<Pin<Box<Sleep>>>,
    expired: bool,
}

/// Nothing is pinned in place: the input and the alarm are boxed, calls are pinned by their set.
impl<S: Service<Req>, I, Id, Req> Unpin for Drive<S, I, Id, Req> {}

impl<S, It, Id, Req> Drive<S, stream::Iter<It>, Id, Req>
where
    S: Service<Req>,
    It: Iterator<Item = (Id, Req)>,
{
    /// Drives an iterator, which is advanced only as the service admits.
    ///
    /// # Errors
    /// If `bound` is zero.
    pub fn iter(
        service: S,
        input: impl IntoIterator<IntoIter = It, Item = (Id, Req)>,
        bound: usize,
    ) -> Result<Self, BuildError> {
        Drive::new(service, stream::iter(input), bound)
    }
}

impl<S, I, Id, Req> Drive<S, I, Id, Req>
where
    S: Service<Req>,
    I: Stream<Item = (Id, Req)>,
{
    /// Drives a stream with at most `bound` requests alive. The bound is what limits memory; how many are sent at once is the
    /// service's own affair, so let the bound be a little above what it admits.
    ///
    /// # Errors
    /// If `bound` is zero.
    pub fn new(service: S, input: I, bound: usize) -> Result<Self, BuildError> {
        if bound == 0 {
            return Err(BuildError::new("bound", "must be at least 1: the number of requests alive"));
        }
        Ok(Drive {
            service,
            input: Some(Box::pin(input)),
            taken: None,
            in_flight: FuturesUnordered::new(),
            given_up: VecDeque::new(),
            bound,
            peak_live: 0,
            deadline: None,
            alarm: None,
            expired: false,
        })
    }

    /// Sets a time at which everything ends: what is in flight is dropped, and each of its ids, and each id still in the
    /// input, is yielded with [`DriveError::Deadline`]; nothing more is sent. It covers readiness, holds, backoff and calls.
    #[must_use]
    pub fn deadline(mut self, at: Instant) -> Self {
        self.deadline = Some(at);
        self.alarm = None;
        self
    }

    /// The next result, in the order of completion; `None` when all is done. Cancel safe: nothing is lost if the future is
    /// dropped, but nothing moves either until the driver is polled again.
    pub async fn next(&mut self) -> Option<(Id, Result<S::Response, DriveError<S::Error>>)> {
        std::future::poll_fn(|cx| self.poll_result(cx)).await
    }

    /// Requests alive: taken and not yet yielded. At most the bound.
    #[must_use]
    pub fn live(&self) -> usize {
        self.in_flight.len() + usize::from(self.taken.is_some())
    }

    /// The most that were ever alive at once.
    #[must_use]
    pub fn peak_live(&self) -> usize {
        self.peak_live
    }

    /// Admits no more: the input is dropped unread, an item that was taken but not sent is yielded with
    /// [`DriveError::Stopped`], and what is in flight finishes.
    pub fn stop(&mut self) {
        self.input = None;
        self.give_up_taken(Given::Stopped);
    }

    /// Gives up: [stops](Drive::stop), drops what is in flight, and yields each of its ids with [`DriveError::Stopped`].
    pub fn abort(&mut self) {
        self.give_up_calls(Given::Stopped);
        self.stop();
    }

    fn give_up_taken(&mut self, given: Given) {
        if let Some((id, _)) = self.taken.take() {
            self.given_up.push_back((id, given));
        }
    }

    fn give_up_calls(&mut self, given: Given) {
        let calls = Pin::new(&mut self.in_flight).iter_pin_mut();
        let ids: Vec<_> = calls.filter_map(|call| call.project().id.take()).collect();
        // The set walks from the youngest.
        self.given_up.extend(ids.into_iter().rev().map(|id| (id, given)));
        self.in_flight.clear();
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>) {
        let Some(at) = self.deadline else { return };
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(at)));
        if Instant::now() >= at || alarm.as_mut().poll(cx).is_ready() {
            self.deadline = None;
            self.alarm = None;
            self.expired = true;
            self.give_up_calls(Given::Deadline);
            self.give_up_taken(Given::Deadline);
        }
    }

    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Option<(Id, Req)>> {
        let Some(input) = &mut self.input else { return Poll::Ready(None) };
        let item = ready!(input.as_mut().poll_next(cx));
        if item.is_none() {
            self.input = None;
        }
        Poll::Ready(item)
    }

    /// Takes an item and calls the service with it; `Ok(true)` if that was done, an error if readiness failed.
    fn admit(&mut self, cx: &mut Context<'_>) -> Result<bool, (Id, S::Error)> {
        if self.taken.is_none() && self.in_flight.len() < self.bound {
            if let Poll::Ready(item) = self.poll_input(cx) {
                self.taken = item;
                self.peak_live = self.peak_live.max(self.live());
            }
        }
        if self.taken.is_none() {
            return Ok(false);
        }
        let Poll::Ready(readiness) = self.service.poll_ready(cx) else { return Ok(false) };
        let Some((id, request)) = self.taken.take() else { return Ok(false) };
        match readiness {
            Ok(()) => {
                self.in_flight.push(Call { id: Some(id), response: self.service.call(request) });
                Ok(true)
            }
            Err(error) => Err((id, error)),
        }
    }

    #[expect(clippy::type_complexity, reason = "it is the item, and a poll")]
    fn poll_result(&mut self, cx: &mut Context<'_>) -> Poll<Option<(Id, Result<S::Response, DriveError<S::Error>>)>> {
        self.poll_deadline(cx);
        if let Some((id, given)) = self.given_up.pop_front() {
            return Poll::Ready(Some((id, Err(given.into()))));
        }
        if self.expired {
            let item = ready!(self.poll_input(cx));
            return Poll::Ready(item.map(|(id, _)| (id, Err(DriveError::Deadline))));
        }
        // One item in, then a look for a result: an input that is always ready keeps nothing back, and no more is admitted than
        // whoever polls can keep up with.
        for _ in 0..ADMITTED_AT_ONCE {
            let admitted = match self.admit(cx) {
                Ok(admitted) => admitted,
                Err((id, error)) => return Poll::Ready(Some((id, Err(DriveError::Service(error))))),
            };
            match Pin::new(&mut self.in_flight).poll_next(cx) {
                Poll::Ready(Some((id, result))) => {
                    return Poll::Ready(Some((id, result.map_err(DriveError::Service))));
                }
                _ if admitted => {}
                Poll::Ready(None) if self.input.is_none() && self.taken.is_none() => return Poll::Ready(None),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<S, I, Id, Req> Stream for Drive<S, I, Id, Req>
where
    S: Service<Req>,
    I: Stream<Item = (Id, Req)>,
{
    type Item = (Id, Result<S::Response, DriveError<S::Error>>);

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_result(cx)
    }
}

impl<S, I, Id, Req> fmt::Debug for Drive<S, I, Id, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drive")
            .field("in_flight", &self.in_flight.len())
            .field("taken", &self.taken.is_some())
            .field("bound", &self.bound)
            .field("peak_live", &self.peak_live)
            .field("input_ended", &self.input.is_none())
            .finish_non_exhaustive()
    }
}
