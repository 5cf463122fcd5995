//! The future of a guarded call.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project_lite::pin_project;

use super::shared::Pass;
use crate::outcome::{Class, Classify};

pin_project! {
    /// The future of a call through [`OrgHealth`](super::OrgHealth). Dropped, it gives a probe's place back and reports nothing.
    pub struct HealthFuture<F, C> {
        #[pin]
        state: State<F>,
        classify: C,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F> {
        Calling { #[pin] future: F, pass: Option<Pass> },
        // A finished future that is still held keeps neither a probe's place nor the inner future.
        Done,
    }
}

/// Says nothing of the inner future: a client's may quote what it sends.
impl<F, C> fmt::Debug for HealthFuture<F, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HealthFuture").finish_non_exhaustive()
    }
}

impl<F, C> HealthFuture<F, C> {
    pub(super) fn new(future: F, pass: Pass, classify: C) -> Self {
        HealthFuture { state: State::Calling { future, pass: Some(pass) }, classify }
    }
}

impl<F, C, Res, E> Future for HealthFuture<F, C>
where
    F: Future<Output = Result<Res, E>>,
    C: Classify<Res, E>,
{
    type Output = Result<Res, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let StateProj::Calling { future, pass } = this.state.as_mut().project() else {
            panic!("polled after completion");
        };
        pass.iter_mut().for_each(Pass::called);
        let result = ready!(future.poll(cx));
        let pass = pass.take().expect("the pass is taken only here, and the state is left at once");
        this.state.set(State::Done);
        let outcome = this.classify.classify(result.as_ref());
        let stamp = match outcome.class {
            Class::Ok | Class::Forbidden => this.classify.stamp(result.as_ref()),
            _ => None,
        };
        let model = stamp.and_then(|stamp| stamp.model.clone());
        // Whatever comes after a head that is a refusal, the refusal is what the answer means.
        match stamp.filter(|_| outcome.class == Class::Ok).and_then(|stamp| stamp.tail.as_ref()) {
            Some(tail) => tail.on_end(move |ended| pass.ended(ended, model)),
            None => pass.report(outcome, model),
        }
        Poll::Ready(result)
    }
}
