//! How an org is asked: a member of whatever type, and what an answer to a call about batches means.

use std::{
    future::poll_fn,
    marker::PhantomData,
    pin::Pin,
    sync::{Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

use crate::{
    outcome::{BoxError, Class, Error, HINT_CEILING, Outcome, Stamp},
    quota::Cost,
};

/// The largest answer that is gathered; results are not, they are read line by line. A line is no larger either.
pub(super) const GATHERED_MOST: usize = 64 << 20;

pub(super) type WireBody = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;
type Sending = Pin<Box<dyn Future<Output = Result<Response<WireBody>, Error>> + Send>>;

/// An org's own service, of whatever type.
pub(super) trait Wire: Send + Sync {
    fn send(&self, request: Request<Bytes>) -> Sending;
}

/// A service that takes bodies of the type `B`.
pub(super) struct Member<M, B> {
    service: Mutex<M>,
    timeout: Duration,
    body: PhantomData<fn(B)>,
}

impl<M, B> Member<M, B> {
    pub(super) fn new(service: M, timeout: Duration) -> Self {
        Member { service: Mutex::new(service), timeout, body: PhantomData }
    }
}

fn silent(timeout: Duration) -> BoxError {
    format!("nothing came for {}", humantime::format_duration(timeout)).into()
}

impl<M, B, RB> Wire for Member<M, B>
where
    M: Service<Request<B>, Response = Response<RB>> + Clone + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send,
    B: From<Bytes> + Send + 'static,
    RB: Body + Send + 'static,
    RB::Error: Into<BoxError>,
{
    fn send(&self, mut request: Request<Bytes>) -> Sending {
        // A batch does not count on the quotas of tokens, however large it is.
        request.extensions_mut().insert(Cost::tokens(Some(0.0), Some(0.0)));
        let timeout = self.timeout;
        // An instance of its own, readied and called: it starts without a reservation.
        let mut service = self.service.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Box::pin(async move {
            let ready = poll_fn(|cx| service.poll_ready(cx)).await;
            ready.map_err(|error| Error::from_box(error.into()))?;
            // Not before it may go: a hold is no silence.
            let answer = tokio::time::timeout(timeout, service.call(request.map(B::from))).await;
            let answer = answer.map_err(|_| Error::from_box(silent(timeout)))?;
            let answer = answer.map_err(|error| Error::from_box(error.into()))?;
            Ok(answer.map(|body| Box::pin(InBytes { body, timeout, silence: None }) as WireBody))
        })
    }
}

pin_project! {
    /// A body in pieces of one type, which ends in an error where it is silent for too long.
    struct InBytes<B> {
        #[pin]
        body: B,
        timeout: Duration,
        silence: Option<Pin<Box<Sleep>>>,
    }
}

impl<B> Body for InBytes<B>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        let Poll::Ready(frame) = this.body.poll_frame(cx) else {
            let silence = this.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(*this.timeout)));
            ready!(silence.as_mut().poll(cx));
            return Poll::Ready(Some(Err(silent(*this.timeout))));
        };
        *this.silence = None;
        let frame =
            frame.map(|frame| Ok(frame.map_err(Into::into)?.map_data(|mut data| data.copy_to_bytes(data.remaining()))));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The next data of a body; `None` at its end.
pub(super) async fn next_data(body: &mut WireBody) -> Result<Option<Bytes>, BoxError> {
    loop {
        let Some(frame) = poll_fn(|cx| body.as_mut().poll_frame(cx)).await else { return Ok(None) };
        if let Ok(data) = frame?.into_data() {
            return Ok(Some(data));
        }
    }
}

/// All of an answer.
pub(super) async fn gathered(answer: Response<WireBody>) -> Result<Response<Bytes>, BoxError> {
    let (head, mut body) = answer.into_parts();
    let mut whole = BytesMut::new();
    while let Some(data) = next_data(&mut body).await? {
        if whole.len() + data.len() > GATHERED_MOST {
            return Err("the answer is too large".into());
        }
        whole.extend_from_slice(&data);
    }
    Ok(Response::from_parts(head, whole.freeze()))
}

/// What an answer to a call about batches means.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// It is for the provider's [`BatchApi`](super::BatchApi) to read.
    Read,
    /// It is to be tried again, perhaps not before some time.
    Again {
        not_before: Option<Instant>,
        /// The call may have been done all the same.
        maybe_done: bool,
    },
    /// The org is out, of batches at least.
    Out(Class),
}

impl Verdict {
    pub(super) fn of(status: StatusCode, stamp: Option<&Stamp>, by_head: impl FnOnce() -> Outcome) -> Self {
        // A batch has an `error` in it that is none, and a conflict says that it has ended: the provider's own words are read.
        if status.is_success() || status == StatusCode::CONFLICT {
            return Verdict::Read;
        }
        let outcome = stamp.map_or_else(by_head, |stamp| stamp.outcome);
        // These are said before anything is done; of any other failure that is not known: a proxy says 503 of what it has forwarded.
        let undone = matches!(status.as_u16(), 429 | 529);
        Verdict::of_outcome(outcome, !undone)
    }

    /// Whether the call may have been done though it was answered so, whatever else the answer says: that it is not to be tried again does
    /// not mean that it was not done.
    pub(super) fn leaves_open(status: StatusCode) -> bool {
        matches!(status, StatusCode::CONFLICT | StatusCode::REQUEST_TIMEOUT)
            || status.is_server_error() && status.as_u16() != 529
    }

    pub(super) fn of_error(error: &Error) -> Self {
        let untouched = matches!(error.class(), Class::Local | Class::Unprocessed | Class::NoOrg);
        Verdict::of_outcome(error.outcome(), !untouched && !error.stamp().unsent)
    }

    fn of_outcome(outcome: Outcome, maybe_done: bool) -> Self {
        match outcome.class {
            Class::Unauthorised | Class::Forbidden | Class::OutOfQuota => Verdict::Out(outcome.class),
            Class::Ok | Class::Terminal | Class::TooLarge | Class::Garbled => Verdict::Read,
            _ => Verdict::Again { not_before: outcome.not_before, maybe_done },
        }
    }

    pub(super) fn of_answer<B>(answer: &Response<B>) -> Self {
        let by_head = || Outcome::of_head(answer.status(), answer.headers(), HINT_CEILING);
        Verdict::of(answer.status(), answer.extensions().get(), by_head)
    }
}
