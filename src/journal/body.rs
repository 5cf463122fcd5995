//! The body of an answer: one that is there, or one that is handed through.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};

/// The body of a [`Journal`](super::Journal)'s answer: kept or gathered whole, or handed through as it comes.
///
/// A body that proved larger than the ceiling, or broke off, while it was gathered is handed through too: first what was read of it, then the
/// rest or its error. Dropping it drops what is left of the inner body.
pub struct JournalBody<B: Body> {
    state: State<B>,
}

enum State<B: Body> {
    // Trailers are rare and large, so on the heap.
    Whole { bytes: Option<Bytes>, trailers: Option<Box<HeaderMap>> },
    Through { read: VecDeque<Bytes>, rest: Rest<B> },
}

enum Rest<B: Body> {
    Body(B),
    Error(Option<B::Error>),
}

impl<B: Body> JournalBody<B> {
    pub(super) fn whole(bytes: Bytes, trailers: Option<Box<HeaderMap>>) -> Self {
        JournalBody { state: State::Whole { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), trailers } }
    }

    pub(super) fn through(body: B) -> Self {
        JournalBody { state: State::Through { read: VecDeque::new(), rest: Rest::Body(body) } }
    }
}

impl<B> Body for JournalBody<B>
where
    B: Body + Unpin,
    B::Error: Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match &mut self.state {
            State::Whole { bytes, trailers } => {
                let data = bytes.take().map(Frame::data);
                Poll::Ready(data.or_else(|| trailers.take().map(|trailers| Frame::trailers(*trailers))).map(Ok))
            }
            State::Through { read, rest } => match (read.pop_front(), rest) {
                (Some(data), _) => Poll::Ready(Some(Ok(Frame::data(data)))),
                (None, Rest::Body(body)) => poll_bytes(body, cx),
                (None, Rest::Error(error)) => Poll::Ready(error.take().map(Err)),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            State::Whole { bytes, trailers } => bytes.is_none() && trailers.is_none(),
            State::Through { read, rest } => {
                read.is_empty()
                    && match rest {
                        Rest::Body(body) => body.is_end_stream(),
                        Rest::Error(error) => error.is_none(),
                    }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            State::Whole { bytes, .. } => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            State::Through { read, rest } => {
                let read = read.iter().map(|part| part.len() as u64).sum::<u64>();
                let Rest::Body(body) = rest else { return SizeHint::new() };
                let (rest, mut hint) = (body.size_hint(), SizeHint::new());
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
                    hint.set_upper(upper);
                }
                hint.set_lower(rest.lower().saturating_add(read));
                hint
            }
        }
    }
}

impl<B: Body> fmt::Debug for JournalBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalBody")
            .field("is_whole", &matches!(self.state, State::Whole { .. }))
            .finish_non_exhaustive()
    }
}

/// The next frame, its data in one piece: nothing is copied where that is what it was.
fn poll_bytes<B: Body + Unpin>(body: &mut B, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
    let frame = ready!(Pin::new(body).poll_frame(cx));
    Poll::Ready(frame.map(|frame| Ok(frame?.map_data(|mut data| data.copy_to_bytes(data.remaining())))))
}

/// A body that is read to its end, if that comes before the ceiling.
pub(super) struct Gathering<B: Body> {
    body: Option<B>,
    read: VecDeque<Bytes>,
    length: u64,
    trailers: Option<Box<HeaderMap>>,
}

/// What became of it.
pub(super) enum Gathered<B: Body> {
    Whole(Bytes, Option<Box<HeaderMap>>),
    /// It is too large.
    Beyond(JournalBody<B>),
    /// It broke off.
    Broken(JournalBody<B>),
}

impl<B: Body + Unpin> Gathering<B> {
    pub(super) fn new(body: B) -> Self {
        Gathering { body: Some(body), read: VecDeque::new(), length: 0, trailers: None }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>, ceiling: u64) -> Poll<Gathered<B>> {
        let through = |read: &mut VecDeque<Bytes>, rest| JournalBody {
            state: State::Through { read: std::mem::take(read), rest },
        };
        loop {
            let body = self.body.as_mut().expect("not polled again after its end");
            let frame = match ready!(poll_bytes(body, cx)) {
                None => return Poll::Ready(Gathered::Whole(join(&mut self.read, self.length), self.trailers.take())),
                Some(Err(error)) => {
                    self.body = None;
                    return Poll::Ready(Gathered::Broken(through(&mut self.read, Rest::Error(Some(error)))));
                }
                Some(Ok(frame)) => frame,
            };
            match frame.into_data() {
                Ok(data) => {
                    self.length += data.len() as u64;
                    self.read.push_back(data);
                    if self.length > ceiling {
                        let rest = Rest::Body(self.body.take().expect("it was polled"));
                        return Poll::Ready(Gathered::Beyond(through(&mut self.read, rest)));
                    }
                }
                Err(other) => self.trailers = other.into_trailers().ok().map(Box::new).or(self.trailers.take()),
            }
        }
    }
}

fn join(read: &mut VecDeque<Bytes>, length: u64) -> Bytes {
    if read.len() <= 1 {
        return read.pop_front().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(usize::try_from(length).unwrap_or_default());
    read.drain(..).for_each(|part| whole.extend_from_slice(&part));
    whole.freeze()
}
