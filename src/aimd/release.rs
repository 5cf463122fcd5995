//! When an answer gives its slot back: at its head, or at the end of its body.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::Permit;
use crate::outcome::Stamp;

/// Decides how long an answer keeps its slot.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not know when a `{Res}` gives its slot back",
    label = "is no `Release<{Res}>`",
    note = "what is no `http::Response` has no body to wait for: say `.release_at_head()` on the layer"
)]
pub trait Release<Res> {
    /// What becomes of the answer.
    type Response;

    /// Whether an answer that has just been read keeps its slot. One that does not gives it back at once.
    fn keeps(response: &Res) -> bool;

    /// Takes the permit of an answer that [keeps](Release::keeps) its slot; of any other there is none. Dropping the permit
    /// gives the slot back.
    fn attach(response: Res, permit: Option<Permit>) -> Self::Response;
}

/// The slot is free as soon as the answer's head is there. For answers that are not HTTP, and for downloads whose length
/// should not count. What comes after the head, be it a refusal in a stream, is not the limiter's business then.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtHead;

impl<Res> Release<Res> for AtHead {
    type Response = Res;

    fn keeps(_: &Res) -> bool {
        false
    }

    fn attach(response: Res, _: Option<Permit>) -> Res {
        response
    }
}

/// The slot is kept until the body has ended, failed, or is dropped, and a refusal in a stream
/// ([`Stamp::tail`]) counts; an answer that was gathered whole (its [`Stamp`] says
/// so) or has no body gives it back at once, however long it is kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtBodyEnd;

impl<B: Body> Release<Response<B>> for AtBodyEnd {
    type Response = Response<Held<B>>;

    fn keeps(response: &Response<B>) -> bool {
        !response.body().is_end_stream() && !response.extensions().get::<Stamp>().is_some_and(|stamp| stamp.whole)
    }

    fn attach(response: Response<B>, permit: Option<Permit>) -> Self::Response {
        response.map(|inner| Held { inner, permit })
    }
}

pin_project! {
    /// A body that keeps a slot until it has ended, failed, or is dropped. The default one keeps none.
    #[derive(Debug, Default)]
    pub struct Held<B> {
        #[pin]
        inner: B,
        permit: Option<Permit>,
    }
}

impl<B> Held<B> {
    /// The body inside. If the slot is still kept, it is given back now.
    pub fn into_inner(self) -> B {
        self.inner
    }

    /// The body inside.
    pub fn get_ref(&self) -> &B {
        &self.inner
    }
}

/// A body that keeps no slot.
impl<B: From<Bytes>> From<Bytes> for Held<B> {
    fn from(bytes: Bytes) -> Self {
        Held { inner: B::from(bytes), permit: None }
    }
}

impl<B: Body> Body for Held<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.inner.as_mut().poll_frame(cx));
        // HTTP clients stop polling once `is_end_stream` says so, or after trailers: the last frame is an end too.
        let more = matches!(&frame, Some(Ok(frame)) if !frame.is_trailers()) && !this.inner.is_end_stream();
        if !more {
            *this.permit = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
