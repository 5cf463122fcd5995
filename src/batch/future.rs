//! One request: gathered, in a batch, and answered.

use std::{
    fmt,
    marker::PhantomData,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response, request};
use http_body::Body;
use pin_project_lite::pin_project;

use super::{
    BatchError, BatchFailure, record,
    service::Owner,
    state::{End, Told},
    works::Waiter,
};
use crate::{
    journal::{Key, Restored},
    outcome::{BoxError, Stamp},
};

pin_project! {
    /// The future of a [`BatchService`](super::BatchService).
    ///
    /// Polled, it drives whatever is to be done for all that wait: keep polling it, or drop it. Dropped at any time it leaves the batch that
    /// its row is in as it is, and the others go on without it; who asks for the same again has the answer of that batch. A row that is not
    /// submitted yet, and that nobody else waits for, is not submitted. It costs a waiting caller its request's head, and no body.
    ///
    /// # Panics
    /// If polled again after it has finished.
    pub struct BatchFuture<B, RB> {
        // Before the owner, whose last one ends everything.
        #[pin]
        step: Step<B>,
        owner: Option<Arc<Owner>>,
        body: PhantomData<fn() -> RB>,
    }
}

pin_project! {
    #[project = StepProj]
    enum Step<B> {
        // Its body is read.
        Reading { head: Option<request::Parts>, #[pin] body: B, read: BytesMut, first: Option<Bytes> },
        Waiting { head: Option<request::Parts>, place: Place },
        Done,
    }
}

/// A caller's place at its row.
struct Place {
    owner: Arc<Owner>,
    key: Key,
    waiter: Waiter,
    told: bool,
}

impl<B, RB> BatchFuture<B, RB> {
    pub(super) fn new(owner: Arc<Owner>, request: Request<B>) -> Self {
        let (head, body) = request.into_parts();
        let step = Step::Reading { head: Some(head), body, read: BytesMut::new(), first: None };
        BatchFuture { step, owner: Some(owner), body: PhantomData }
    }
}

impl<B, RB> Future for BatchFuture<B, RB>
where
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
{
    type Output = Result<Response<RB>, BatchError<Request<B>>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = ready!(self.as_mut().poll_steps(cx));
        let mut this = self.project();
        this.step.set(Step::Done);
        *this.owner = None;
        Poll::Ready(result)
    }
}

impl<B, RB> BatchFuture<B, RB>
where
    B: Body + From<Bytes>,
    B::Error: Into<BoxError>,
    RB: From<Bytes>,
{
    fn poll_steps(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<RB>, BatchError<Request<B>>>> {
        let mut this = self.project();
        loop {
            match this.step.as_mut().project() {
                StepProj::Reading { head, mut body, read, first } => {
                    while let Some(frame) = ready!(body.as_mut().poll_frame(cx)) {
                        let data = match frame {
                            Ok(frame) => frame.into_data(),
                            Err(error) => {
                                let failure = BatchFailure::Body(Arc::new(error.into()));
                                return Poll::Ready(Err(BatchError::new(failure, None)));
                            }
                        };
                        let Ok(mut data) = data else { continue };
                        let data = data.copy_to_bytes(data.remaining());
                        match first {
                            // Nothing is copied where it comes in one piece.
                            None => *first = Some(data),
                            Some(first) => {
                                if read.is_empty() {
                                    read.extend_from_slice(first);
                                }
                                read.extend_from_slice(&data);
                            }
                        }
                    }
                    let head = head.take().expect("it goes on to the next step with the end of its body");
                    let whole =
                        if read.is_empty() { first.take().unwrap_or_default() } else { std::mem::take(read).freeze() };
                    let owner = this.owner.clone().expect("not polled again after it has finished");
                    let lean = Request::from_parts(head, whole);
                    let key = Key::of(&lean, lean.body(), &owner.0.headers);
                    let (head, whole) = lean.into_parts();
                    let joined = owner.0.join(key, || record::lean(&head, whole.clone()));
                    if let Err(failure) = joined {
                        let request = Request::from_parts(head, B::from(whole));
                        return Poll::Ready(Err(BatchError::new(failure, Some(request))));
                    }
                    let waiter = owner.0.works.waiter();
                    let place = Place { owner, key, waiter, told: false };
                    this.step.set(Step::Waiting { head: Some(head), place });
                }
                StepProj::Waiting { head, place } => {
                    let Told { end, again } = ready!(place.poll(cx));
                    let head = head.take().expect("it has finished by then");
                    return Poll::Ready(match end {
                        End::Answer(answer) => Ok(answered(answer, again)),
                        End::Back(failure, body) => {
                            let request = body.map(|body| Request::from_parts(head, B::from(body)));
                            Err(BatchError::new(failure, request))
                        }
                    });
                }
                StepProj::Done => panic!("polled again after it has finished"),
            }
        }
    }
}

impl Place {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Told> {
        self.waiter.poll(cx);
        match self.owner.0.told(self.key, self.waiter.number()) {
            Some(told) => {
                self.told = true;
                Poll::Ready(told)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.told {
            self.owner.0.leave(self.key, self.waiter.number());
        }
    }
}

fn answered<RB: From<Bytes>>(mut answer: Response<Bytes>, again: bool) -> Response<RB> {
    if again {
        answer.extensions_mut().insert(Restored::Shared);
        if let Some(stamp) = answer.extensions_mut().get_mut::<Stamp>() {
            (stamp.org, stamp.usage) = (None, None);
        }
    }
    answer.map(RB::from)
}

impl<B, RB> fmt::Debug for BatchFuture<B, RB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchFuture").finish_non_exhaustive()
    }
}
