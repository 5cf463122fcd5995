//! The answer to a row, as the direct path would have given it: read by the same judge, stamped, and with a body that is there.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tower_layer::Layer;
use tower_service::Service;

use super::RemoteBatch;
use crate::{
    judge::JudgeLayer,
    org::Org,
    outcome::{Class, Outcome, Stamp},
};

/// A body that is there: that of an answer from a batch, where nothing else is asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchBody(Option<Bytes>);

impl BatchBody {
    /// All of it; `None` once it was polled out.
    #[must_use]
    pub fn bytes(&self) -> Option<&Bytes> {
        self.0.as_ref()
    }
}

impl From<Bytes> for BatchBody {
    fn from(bytes: Bytes) -> Self {
        BatchBody(Some(bytes))
    }
}

impl Body for BatchBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().filter(|bytes| !bytes.is_empty()).map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Bytes::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, Bytes::len) as u64)
    }
}

/// A response extension: the answer came out of a batch, at a batch's price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batched(pub RemoteBatch);

/// What the judge is asked around: an answer that has come already.
struct Echo(Option<Response<BatchBody>>);

impl Service<Request<BatchBody>> for Echo {
    type Response = Response<BatchBody>;
    type Error = Infallible;
    type Future = Ready<Result<Response<BatchBody>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<BatchBody>) -> Self::Future {
        ready(Ok(self.0.take().unwrap_or_default()))
    }
}

/// The same answer, stamped with what it means.
pub(super) fn judged(judge: &JudgeLayer, answer: Response<Bytes>, org: &Org, batch: &RemoteBatch) -> Response<Bytes> {
    let unjudged = answer.clone();
    let mut echo = judge.layer(Echo(Some(answer.map(BatchBody::from))));
    // Nothing in it waits.
    let judged = echo.call(Request::new(BatchBody::default())).now_or_never();
    let whole = judged.and_then(Result::ok).and_then(|answer| {
        let (head, body) = answer.into_parts();
        Some(Response::from_parts(head, body.into_bytes().ok()?))
    });
    let mut answer = whole.unwrap_or(unjudged);
    let by_head = Outcome::of_head(answer.status(), answer.headers(), crate::outcome::HINT_CEILING);
    let stamp = answer.extensions_mut().get_or_insert_with(|| Stamp { whole: true, ..Stamp::new(by_head) });
    stamp.org = Some(org.clone());
    answer.extensions_mut().insert(Batched(batch.clone()));
    answer
}

/// What an answer that was judged means, and what was said.
pub(super) fn meaning(answer: &Response<Bytes>) -> (Class, Arc<str>) {
    match answer.extensions().get::<Stamp>() {
        Some(stamp) => {
            let said = stamp.said.clone().unwrap_or_else(|| answer.status().to_string().into());
            (stamp.outcome.class, said)
        }
        None => (Class::of_status(answer.status()), answer.status().to_string().into()),
    }
}
