//! The future of a limited call.

use std::{
    fmt,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

use super::{Permit, Release};
use crate::outcome::{Class, Classify};

pin_project! {
    /// The future of a call through [`AimdLimit`](super::AimdLimit). Dropped, it gives its slot back and reports nothing.
    pub struct AimdFuture<F, C, R> {
        #[pin]
        state: State<F>,
        classify: C,
        release: PhantomData<fn() -> R>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F, permit: Option<Permit> },
        // A finished future that is still held keeps neither slot nor inner future.
        Done,
    }
}

/// Says nothing of the inner future: a client's may quote what it sends.
impl<F, C, R> fmt::Debug for AimdFuture<F, C, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AimdFuture").finish_non_exhaustive()
    }
}

impl<F, C, R> AimdFuture<F, C, R> {
    pub(super) fn new(future: F, permit: Permit, classify: C) -> Self {
        AimdFuture { state: State::Calling { future, permit: Some(permit) }, classify, release: PhantomData }
    }
}

impl<F, C, R, Res, E> Future for AimdFuture<F, C, R>
where
    F: Future<Output = Result<Res, E>>,
    C: Classify<Res, E>,
    R: Release<Res>,
{
    type Output = Result<R::Response, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let StateProj::Calling { future, permit } = this.state.as_mut().project() else {
            panic!("polled after completion");
        };
        let result = ready!(future.poll(cx));
        let permit = permit.take().expect("the permit is taken only here, and the state is left at once");
        this.state.set(State::Done);
        let outcome = this.classify.classify(result.as_ref());
        let hidden = outcome.class.implies().cuts
            && this.classify.stamp(result.as_ref()).is_some_and(|stamp| stamp.within_quota);
        let permit = if result.as_ref().is_ok_and(R::keeps) {
            permit.report(outcome, hidden);
            let stamp = this.classify.stamp(result.as_ref()).filter(|_| outcome.class == Class::Ok);
            if let Some(tail) = stamp.and_then(|stamp| stamp.tail.as_ref()) {
                permit.report_at_the_end(tail);
            }
            Some(permit)
        } else {
            permit.finish(outcome, hidden);
            None
        };
        Poll::Ready(result.map(|response| R::attach(response, permit)))
    }
}
