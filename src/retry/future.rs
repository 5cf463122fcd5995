//! One request on its way: attempt, weigh the answer, wait, attempt again.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, SystemTime},
};

use http::Request;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

use super::{
    Exhaustion, RetryError, Shared,
    budget::Budget,
    error::{Cause, Exhausted, in_one_line},
    kept::Kept,
    purse::{Purses, Said, Verdict},
};
use crate::{
    gate::{Gate, Place},
    hint,
    outcome::{BoxError, Classify, Purse},
};

/// All that is kept of a request while it is not answered.
pub(super) struct Logical<S, B, C> {
    /// Called for every attempt; readied in here after the first.
    service: S,
    classifier: C,
    shared: Arc<Shared>,
    kept: Kept<B>,
    began: Instant,
    /// On the heap and only once something has gone wrong: most requests never need it, and every one is moved about.
    trouble: Option<Box<Trouble>>,
}

/// What has gone wrong so far.
#[derive(Default)]
struct Trouble {
    purses: Purses,
    first: Option<Cause>,
    last_hint: Option<Duration>,
    not_before: Option<Instant>,
}

/// Why the last attempt was not the answer.
struct Failure {
    cause: Cause,
    source: Option<BoxError>,
}

enum Weighed<Res, E> {
    Return(Result<Res, E>),
    /// The answer is dropped by now: whoever waits holds no slot.
    Again(Next),
    GiveUp(Exhaustion, Failure),
}

enum Next {
    AtOnce,
    Wait { until: Instant, pays: bool },
}

impl<S, B, C> Logical<S, B, C>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
    B: Clone,
    C: Classify<S::Response, S::Error>,
{
    /// Makes a further attempt. The service is ready.
    fn call(&mut self) -> S::Future {
        self.service.call(self.kept.again(&self.shared))
    }

    fn weigh(&mut self, result: Result<S::Response, S::Error>) -> Weighed<S::Response, S::Error> {
        let outcome = self.classifier.classify(result.as_ref());
        if outcome.class.implies().purse == Purse::Closed {
            return Weighed::Return(result);
        }
        let now = Instant::now();
        let stamp = self.classifier.stamp(result.as_ref());
        let head = self.classifier.head(result.as_ref());
        let said = Said {
            class: outcome.class,
            not_before: outcome.not_before,
            held_below: stamp.is_some_and(|stamp| stamp.held_below),
        };
        let trouble = self.trouble.get_or_insert_default();
        let verdict = trouble.purses.pay(&self.shared.policy, said, now, self.shared.dice.roll());
        if verdict == Verdict::Return {
            return Weighed::Return(result);
        }
        if let Some(at) = outcome.not_before.filter(|at| *at > now) {
            let advertised = head.and_then(|(_, headers)| match outcome.class.implies().purse {
                Purse::Throttles => hint::advertised(headers, SystemTime::now()),
                _ => hint::retry_after(headers, SystemTime::now(), Duration::MAX),
            });
            // The body may have said more than the headers; then the reader's time is all there is.
            trouble.last_hint = advertised.max(Some(at.saturating_duration_since(now)));
            trouble.not_before = Some(at);
        }
        let status = head.map(|(status, _)| status);
        let org = stamp.and_then(|stamp| stamp.org.as_ref()).map(crate::org::Org::shared_name);
        let (message, source) = match result {
            Ok(_) => (status.map_or_else(|| outcome.class.to_string(), |status| status.to_string()), None),
            Err(error) => {
                let error: BoxError = error.into();
                (in_one_line(&*error), Some(error))
            }
        };
        let cause = Cause { class: outcome.class, status, org, message };
        tracing::debug!(class = %cause.class, org = cause.org.as_deref(), next = verdict.in_words(now), calls = trouble.purses.wire_calls, "no answer yet");
        if trouble.first.is_none() {
            trouble.first = Some(cause.clone());
        }
        match verdict {
            Verdict::Return | Verdict::AtOnce => Weighed::Again(Next::AtOnce),
            Verdict::Wait { until, pays } => Weighed::Again(Next::Wait { until, pays }),
            Verdict::GiveUp(reason) => Weighed::GiveUp(reason, Failure { cause, source }),
        }
    }

    fn exhausted(self, reason: Exhaustion, failure: Failure) -> Exhausted<Request<B>> {
        let trouble = *self.trouble.unwrap_or_default();
        Exhausted {
            idempotency_key: self.kept.idempotency_key(),
            request: self.kept.into_request(),
            first: trouble.first.unwrap_or_else(|| failure.cause.clone()),
            last: failure.cause,
            counts: trouble.purses.counts,
            wire_calls: trouble.purses.wire_calls,
            last_hint: trouble.last_hint,
            not_before: trouble.not_before,
            elapsed: Instant::now().saturating_duration_since(self.began),
            reason,
            source: failure.source,
        }
    }
}

/// A token of the budget, given back unless the retry is made.
struct Token(Option<Arc<Gate<Budget>>>);

impl Token {
    fn spend(&mut self) {
        self.0 = None;
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        if let Some(budget) = self.0.take() {
            budget.update(|law, now| law.refund(now));
        }
    }
}

pin_project! {
    #[project = StepProj]
    enum Step<F> {
        Calling { #[pin] attempt: F },
        Waiting { #[pin] sleep: Sleep, pays: bool },
        Paying { place: Place<Budget> },
        Readying { token: Token },
        Done,
    }
}

pin_project! {
    /// The future of [`RateLimitRetry`](super::RateLimitRetry).
    ///
    /// Dropped at any time it gives everything back: the attempt in flight, its place in a line, a token of the budget. Once
    /// finished it holds nothing.
    pub struct RetryFuture<S, B, C>
    where
        S: Service<Request<B>>,
    {
        logical: Option<Logical<S, B, C>>,
        #[pin]
        step: Step<S::Future>,
    }
}

impl<S, B, C> RetryFuture<S, B, C>
where
    S: Service<Request<B>>,
{
    /// The first attempt is made, by this very service.
    pub(super) fn new(
        service: S,
        classifier: C,
        shared: Arc<Shared>,
        kept: Kept<B>,
        began: Instant,
        attempt: S::Future,
    ) -> Self {
        let logical = Logical { service, classifier, shared, kept, began, trouble: None };
        RetryFuture { logical: Some(logical), step: Step::Calling { attempt } }
    }
}

impl<S, B, C> Future for RetryFuture<S, B, C>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
    B: Clone,
    C: Classify<S::Response, S::Error>,
{
    type Output = Result<S::Response, RetryError<Request<B>, S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let logical = this.logical.as_mut().expect("polled after it had finished");
            let next = match this.step.as_mut().project() {
                StepProj::Calling { attempt } => match logical.weigh(ready!(attempt.poll(cx))) {
                    Weighed::Again(Next::AtOnce) => Step::Readying { token: Token(None) },
                    Weighed::Again(Next::Wait { until, pays }) => {
                        Step::Waiting { sleep: tokio::time::sleep_until(until), pays }
                    }
                    Weighed::Return(result) => {
                        this.step.set(Step::Done);
                        *this.logical = None;
                        return Poll::Ready(result.map_err(RetryError::Inner));
                    }
                    Weighed::GiveUp(reason, failure) => {
                        this.step.set(Step::Done);
                        let logical = this.logical.take().expect("taken above");
                        let exhausted = logical.exhausted(reason, failure);
                        return Poll::Ready(Err(RetryError::Exhausted(Box::new(exhausted))));
                    }
                },
                StepProj::Waiting { sleep, pays } => {
                    ready!(sleep.poll(cx));
                    if *pays { Step::Paying { place: Place::new() } } else { Step::Readying { token: Token(None) } }
                }
                StepProj::Paying { place } => {
                    let budget = &logical.shared.budget;
                    ready!(budget.poll_pass(cx, place));
                    Step::Readying { token: Token(Some(budget.clone())) }
                }
                StepProj::Readying { token } => match ready!(logical.service.poll_ready(cx)) {
                    Ok(()) => {
                        let attempt = logical.call();
                        token.spend();
                        Step::Calling { attempt }
                    }
                    Err(error) => {
                        this.step.set(Step::Done);
                        *this.logical = None;
                        return Poll::Ready(Err(RetryError::Inner(error)));
                    }
                },
                StepProj::Done => unreachable!("it holds no request once it has finished"),
            };
            this.step.set(next);
        }
    }
}

impl<S, B, C> fmt::Debug for RetryFuture<S, B, C>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = match &self.step {
            Step::Calling { .. } => "calling",
            Step::Waiting { .. } => "backing off",
            Step::Paying { .. } => "waiting for the budget",
            Step::Readying { .. } => "waiting for readiness",
            Step::Done => "done",
        };
        let purses = self.logical.as_ref().and_then(|logical| Some(&logical.trouble.as_ref()?.purses));
        f.debug_struct("RetryFuture").field("step", &step).field("purses", &purses).finish_non_exhaustive()
    }
}
