//! Looks into a request's body without taking it.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Buf;
use http_body::Body;

/// What `read` finds in a body that gives all of itself at once and in one piece: a clone of it is asked for its first frame, which
/// costs nothing for a `Full<Bytes>`. `None` where it does not.
pub(crate) fn whole<B: Body + Clone, T>(body: &B, read: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
    let mut clone = pin!(body.clone());
    let polled = clone.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Some(Ok(frame))) = polled else { return None };
    let data = frame.into_data().ok()?;
    let whole = clone.is_end_stream() && data.chunk().len() == data.remaining();
    if whole { read(data.chunk()) } else { None }
}
