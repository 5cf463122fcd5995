//! The service.

use std::{
    sync::Arc,
    task::{Context, Poll},
};

use http::Request;
use tower_service::Service;

use super::layer::Address;

/// Sends every request to one org, with its key. Made by [`OrgAuthLayer`](super::OrgAuthLayer).
///
/// Readiness, response, error and future are the inner service's own. It keeps no reservation, so a clone is a clone of the
/// inner service.
#[derive(Clone, Debug)]
pub struct OrgAuth<S> {
    inner: S,
    address: Arc<Address>,
}

impl<S> OrgAuth<S> {
    pub(super) fn new(inner: S, address: Arc<Address>) -> Self {
        OrgAuth { inner, address }
    }

    /// The service that is wrapped.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, B> Service<Request<B>> for OrgAuth<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        *request.uri_mut() = self.address.place(request.uri());
        self.address.sign(request.headers_mut());
        self.inner.call(request)
    }
}
