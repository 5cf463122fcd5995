//! The body of a judged answer.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

use super::watch::{Ending, Watch};
use crate::outcome::{BoxError, Error};

/// The body of a judged answer: gathered whole, or a stream.
///
/// A body that proved larger than the ceiling while it was gathered is a stream too: first the parts read so far, then the
/// rest as it comes. Dropping it drops what is left of the inner body.
///
/// A stream is read as it passes, nothing is held back or copied for it, and what it has used is told at its end: see
/// [`Tail`](crate::outcome::Tail).
///
/// A stream that breaks off ends in an [`Error`] of [`Class::Transport`](crate::outcome::Class::Transport), with the inner
/// body's own as its source.
pub struct Answer<B> {
    body: State<B>,
}

enum State<B> {
    // Trailers are rare and large, so on the heap.
    Whole { bytes: Option<Bytes>, trailers: Option<Box<HeaderMap>> },
    Stream { read: VecDeque<Bytes>, rest: B, watch: Watch },
}

impl<B> Answer<B> {
    pub(super) fn whole(bytes: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        Answer { body: State::Whole { bytes: Some(bytes), trailers } }
    }

    pub(super) fn stream(read: VecDeque<Bytes>, rest: B, mut watch: Watch) -> Self
    where
        B: Body,
    {
        if read.is_empty() && rest.is_end_stream() {
            // Nobody need ask it for what there is not.
            watch.end(Ending::ByItself);
        }
        Answer { body: State::Stream { read, rest, watch } }
    }

    /// The gathered body; `None` if this is a stream, or if the body was polled out already.
    #[must_use]
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.body {
            State::Whole { bytes, .. } => bytes.as_ref(),
            State::Stream { .. } => None,
        }
    }

    /// Takes the gathered body, without its trailers.
    ///
    /// # Errors
    /// Gives the answer back, untouched, where [`bytes`](Self::bytes) is `None`.
    pub fn into_bytes(mut self) -> Result<Bytes, Self> {
        match &mut self.body {
            State::Whole { bytes, .. } => bytes.take().ok_or(self),
            State::Stream { .. } => Err(self),
        }
    }
}

/// Nothing, gathered whole: for layers above the judge that make up an answer, as tower-http's timeout does.
impl<B> Default for Answer<B> {
    fn default() -> Self {
        Answer::whole(Bytes::new(), None)
    }
}

/// All of it, gathered: for answers that come by another way than over the wire, out of a batch for instance.
impl<B> From<Bytes> for Answer<B> {
    fn from(bytes: Bytes) -> Self {
        Answer::whole(bytes, None)
    }
}

impl<B> Body for Answer<B>
where
    B: Body + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match &mut self.body {
            State::Whole { bytes, trailers } => {
                let data = bytes.take().filter(|bytes| !bytes.is_empty()).map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(|trailers| Frame::trailers(*trailers))).map(Ok))
            }
            State::Stream { read, rest, watch } => {
                let frame = match read.pop_front() {
                    Some(data) => Some(Ok(Frame::data(data))),
                    None => ready!(poll_bytes(rest, cx)),
                };
                match &frame {
                    Some(Ok(frame)) => {
                        if let Some(data) = frame.data_ref() {
                            watch.part(data);
                        }
                        // Nobody need ask again.
                        if read.is_empty() && rest.is_end_stream() {
                            watch.end(Ending::ByItself);
                        }
                    }
                    Some(Err(_)) => watch.end(Ending::BrokenOff),
                    None => watch.end(Ending::ByItself),
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Error::from_box)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            State::Whole { bytes, trailers } => bytes.as_ref().is_none_or(Bytes::is_empty) && trailers.is_none(),
            State::Stream { read, rest, .. } => read.is_empty() && rest.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            State::Whole { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            State::Stream { read, rest, .. } => {
                let read = read.iter().map(|part| part.len() as u64).sum::<u64>();
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower().saturating_add(read));
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
                    hint.set_upper(upper);
                }
                hint
            }
        }
    }
}

/// The next frame, its data as `Bytes` (without a copy where they are `Bytes` already).
pub(super) fn poll_bytes<B>(body: &mut B, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>>
where
    B: Body + Unpin,
    B::Error: Into<BoxError>,
{
    let frame = ready!(Pin::new(body).poll_frame(cx));
    Poll::Ready(frame.map(|frame| match frame {
        Ok(frame) => Ok(frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))),
        Err(error) => Err(error.into()),
    }))
}

/// What was read of a body so far.
///
/// The first part is kept as it came, since most bodies have no other. From the second on all are copied together, so that a
/// body in many small parts takes no more memory than one in a few large ones.
#[derive(Default)]
pub(super) struct Read {
    first: Bytes,
    all: BytesMut,
}

impl Read {
    pub(super) fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }

    pub(super) fn push(&mut self, part: Bytes) {
        if self.len() == 0 {
            self.first = part;
            return;
        }
        self.all.extend_from_slice(&std::mem::take(&mut self.first));
        self.all.extend_from_slice(&part);
    }

    /// All of it, as it came where it came in one part.
    pub(super) fn join(self) -> Bytes {
        if self.all.is_empty() { self.first } else { self.all.freeze() }
    }

    /// All of it, in memory of its own: a part is a window on the connection's read buffer, and an answer that is kept would
    /// keep the whole buffer (8 KiB or more with hyper) for a few hundred bytes.
    pub(super) fn own(self) -> Bytes {
        if self.all.is_empty() { Bytes::copy_from_slice(&self.first) } else { self.all.freeze() }
    }
}

impl<B> fmt::Debug for Answer<B> {
    /// Says how much there is, never what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.body {
            State::Whole { bytes: Some(bytes), .. } => write!(f, "Answer(whole, {} bytes)", bytes.len()),
            State::Whole { bytes: None, .. } => f.write_str("Answer(whole, taken)"),
            State::Stream { .. } => f.write_str("Answer(stream)"),
        }
    }
}
