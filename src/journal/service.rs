//! The tower service.

use std::{
    error::Error as StdError,
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use http::{Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::{JournalBody, JournalFuture, Key, Store, StoreError, layer::Rules};
use crate::frame;

/// Answers from the store what was answered before. Made by [`JournalLayer`](super::JournalLayer).
///
/// `poll_ready` is always ready and reserves nothing: what is below is readied only for a request that is to be sent, on an instance of its
/// own, inside the response future. So it does not stop callers; let [`drive`](crate::drive) bound the requests alive.
#[derive(Clone)]
pub struct Journal<S, St> {
    inner: S,
    store: St,
    rules: Arc<Rules>,
}

impl<S, St> Journal<S, St> {
    pub(super) const fn new(inner: S, store: St, rules: Arc<Rules>) -> Self {
        Journal { inner, store, rules }
    }

    /// The service it stands over.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, St, B, RB> Service<Request<B>> for Journal<S, St>
where
    S: Service<Request<B>, Response = Response<RB>> + Clone,
    St: Store,
    B: Body + Clone,
    RB: Body + Unpin,
    RB::Error: Unpin,
{
    type Response = Response<JournalBody<RB>>;
    type Error = JournalError<S::Error>;
    type Future = JournalFuture<S, St, B, RB>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let is_asked = request.method() == Method::POST;
        let key = is_asked
            .then(|| frame::whole(request.body(), |body| Some(Key::of(&request, body, &self.rules.headers))))
            .flatten();
        let ticket = key.map(|key| self.rules.flights.join(key));
        JournalFuture::new(self.inner.clone(), self.store.clone(), self.rules.clone(), request, ticket)
    }
}

impl<S: fmt::Debug, St> fmt::Debug for Journal<S, St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// Why there is no answer. It reads as the error that it holds, and has the same source.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalError<E> {
    /// The store does not work, so nothing was sent.
    Store(StoreError),
    /// The service below has failed.
    Inner(E),
}

impl<E> JournalError<E> {
    /// The error of the service below, if it is one.
    pub fn into_inner(self) -> Option<E> {
        match self {
            JournalError::Store(_) => None,
            JournalError::Inner(error) => Some(error),
        }
    }
}

impl<E: fmt::Display> fmt::Display for JournalError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JournalError::Store(error) => error.fmt(f),
            JournalError::Inner(error) => error.fmt(f),
        }
    }
}

impl<E: StdError> StdError for JournalError<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            JournalError::Store(error) => error.source(),
            JournalError::Inner(error) => error.source(),
        }
    }
}
