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
    error::{Cause, Exhausted},
    kept::Kept,
    purse::{Purses, Said, Verdict},
    stall::Waiting,
};
use crate::{
    gate::{Gate, Place},
    hint,
    observe::Event,
    org::Org,
    outcome::{BoxError, Class, Classify, Purse, in_one_line},
};

/// All that is kept of a request while it is not answered.
pub(super) struct Logical<S, B, C> {
    /// Called for every attempt; readied in here after the first.
    service: S,
    classifier: C,
    shared: Arc<Shared>,
    kept: Kept<B>,
    began: Instant,
    /// When the attempt under way was made; or, once it has waited for an org, when it got one.
    attempt_from: Instant,
    /// There only while the attempt under way waits for its turn: most never do.
    watch: Option<Pin<Box<Sleep>>>,
    deadline: Option<Box<Alarm>>,
    /// On the heap and only once something has gone wrong: most requests never need it, and every one is moved about.
    trouble: Option<Box<Trouble>>,
}

/// What has gone wrong so far.
#[derive(Default)]
struct Trouble {
    purses: Purses,
    first: Option<Cause>,
    last: Option<Cause>,
    /// The org of the last.
    org: Option<Org>,
    last_hint: Option<Duration>,
    not_before: Option<Instant>,
    /// The time that orgs had calls of it.
    in_calls: Duration,
}

/// The deadline.
struct Alarm {
    at: Instant,
    /// Made at the first poll, where a runtime is at hand.
    sleep: Option<Pin<Box<Sleep>>>,
}

enum Weighed<Res, E> {
    Return(Result<Res, E>),
    /// The answer is dropped by now: whoever waits holds no slot.
    Again(Next),
    GiveUp(Exhaustion, Option<BoxError>),
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
        self.attempt_from = Instant::now();
        self.service.call(self.kept.again(&self.shared))
    }

    fn weigh(&mut self, result: Result<S::Response, S::Error>) -> Weighed<S::Response, S::Error> {
        let outcome = self.classifier.classify(result.as_ref());
        if outcome.class.implies().purse == Purse::Closed {
            if outcome.class != Class::NoOrg {
                self.shared.progress.note(Instant::now());
            }
            return Weighed::Return(result);
        }
        let now = Instant::now();
        let stamp = self.classifier.stamp(result.as_ref());
        let head = self.classifier.head(result.as_ref());
        let said = Said {
            class: outcome.class,
            not_before: outcome.not_before,
            held_below: stamp.is_some_and(|stamp| stamp.held_below),
            progress: self.shared.progress.last(),
        };
        let in_call = self.in_call(now);
        let trouble = self.trouble.get_or_insert_default();
        trouble.in_calls += in_call;
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
        trouble.org = stamp.and_then(|stamp| stamp.org.clone());
        let words = stamp.and_then(|stamp| stamp.said.clone());
        let (mut message, source) = match result {
            Ok(answer) => {
                // Nobody is told of it while it keeps a slot.
                drop(answer);
                (status.map_or_else(|| outcome.class.to_string(), |status| status.to_string()), None)
            }
            Err(error) => {
                let error: BoxError = error.into();
                (in_one_line(&*error), Some(error))
            }
        };
        // An error may have them in its own words already.
        if let Some(words) = words.filter(|words| !message.contains(&**words)) {
            message = format!("{message}: {words}");
        }
        let org = trouble.org.as_ref().map(Org::shared_name);
        let cause = Cause { class: outcome.class, status, org, message };
        tracing::debug!(class = %cause.class, org = cause.org.as_deref(), next = verdict.in_words(now), calls = trouble.purses.wire_calls, "no answer yet");
        trouble.first.get_or_insert_with(|| cause.clone());
        trouble.last = Some(cause);
        let wait = match verdict {
            Verdict::GiveUp(reason) => return Weighed::GiveUp(reason, source),
            Verdict::Return | Verdict::AtOnce => None,
            Verdict::Wait { until, pays } => Some((until, pays)),
        };
        self.shared.observers.tell(&Event::Retry {
            org: trouble.org.clone(),
            class: outcome.class,
            calls: trouble.purses.wire_calls,
            wait: wait.map_or(Duration::ZERO, |(until, _)| until.saturating_duration_since(now)),
        });
        Weighed::Again(wait.map_or(Next::AtOnce, |(until, pays)| Next::Wait { until, pays }))
    }

    /// The next attempt is due as soon as it may be made.
    fn readying(&mut self, token: Token) -> TurnOf<S, Request<B>> {
        self.attempt_from = Instant::now();
        Turn::Go(Step::Readying { token })
    }

    fn exhausted(mut self, reason: Exhaustion, source: Option<BoxError>) -> Exhausted<Request<B>> {
        let trouble = *self.trouble.take().unwrap_or_default();
        let never_its_turn = || Cause {
            class: Class::Local,
            status: None,
            org: None,
            message: "nothing was sent: it was not its turn yet".to_owned(),
        };
        let last = trouble.last.unwrap_or_else(never_its_turn);
        tracing::debug!(class = %last.class, reason = reason.in_words(), calls = trouble.purses.wire_calls, "given up");
        self.shared.observers.tell(&Event::Exhausted {
            org: trouble.org,
            class: last.class,
            calls: trouble.purses.wire_calls,
            reason: reason.in_words(),
        });
        let elapsed = Instant::now().saturating_duration_since(self.began);
        Exhausted {
            idempotency_key: self.kept.idempotency_key(),
            tried: self.kept.memory().tried(),
            request: self.kept.into_request(),
            first: trouble.first.unwrap_or_else(|| last.clone()),
            last,
            counts: trouble.purses.counts,
            wire_calls: trouble.purses.wire_calls,
            waited: elapsed.saturating_sub(trouble.in_calls),
            last_hint: trouble.last_hint,
            not_before: trouble.not_before,
            elapsed,
            reason,
            source,
        }
    }
}

impl<S, B, C> Logical<S, B, C> {
    /// How long an org has had the attempt under way.
    fn in_call(&self, now: Instant) -> Duration {
        match &self.watch {
            Some(_) => Duration::ZERO,
            None => now.saturating_duration_since(self.attempt_from),
        }
    }

    /// How it waits, whether for its turn or up here.
    fn waiting(&self) -> Waiting {
        let progress = self.shared.progress.last();
        let purses = self.trouble.as_ref().map(|trouble| trouble.purses).unwrap_or_default();
        purses.waiting(&self.shared.policy, self.attempt_from, progress)
    }

    /// The attempt is not answered yet. While it waits for its turn, it is given up if nothing goes on.
    fn poll_unanswered(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.kept.memory().is_in_line() {
            return self.poll_lost(cx);
        }
        if self.watch.take().is_some() {
            self.attempt_from = Instant::now();
        }
        Poll::Pending
    }

    /// Whether it is given up, looked at when that was due; with nothing to come before `until`, if that is known.
    fn is_lost(&mut self, due: Option<Instant>, until: Option<Instant>) -> bool {
        let (waiting, now) = (self.waiting(), Instant::now());
        if !waiting.is_lost(now, until.unwrap_or(now)) {
            return false;
        }
        if due.is_some_and(|due| waiting.is_blind(due, now)) {
            self.attempt_from = now;
            self.trouble.iter_mut().for_each(|trouble| trouble.purses.wait_anew(now));
            return false;
        }
        true
    }

    /// Ready once it has waited for its turn for too long.
    fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.watch.is_none() {
                let Some(at) = self.waiting().lost_at() else { return Poll::Pending };
                if tokio::runtime::Handle::try_current().is_err() {
                    return Poll::Pending; // There is no timer to be had: it waits.
                }
                self.watch = Some(Box::pin(tokio::time::sleep_until(at)));
            }
            ready!(self.watch.as_mut().expect("made above").as_mut().poll(cx));
            let due = self.watch.take().map(|watch| watch.deadline());
            if self.is_lost(due, None) {
                return Poll::Ready(());
            }
        }
    }

    /// Whether the deadline has passed. The clock is read only where there is one.
    fn is_late(&self) -> bool {
        self.deadline.as_ref().is_some_and(|alarm| Instant::now() >= alarm.at)
    }

    /// Whether nothing of it was polled yet.
    fn is_new(&self) -> bool {
        self.deadline.as_ref().is_some_and(|alarm| alarm.sleep.is_none())
    }

    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(Alarm { at, sleep }) = self.deadline.as_deref_mut() else { return Poll::Pending };
        sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(*at))).as_mut().poll(cx)
    }

    /// The deadline has come while an org had the call: most likely it went over the wire.
    fn cut_off(&mut self) {
        let in_call = self.in_call(Instant::now());
        let trouble = self.trouble.get_or_insert_default();
        trouble.in_calls += in_call;
        trouble.purses.cut_off();
        trouble.org = None;
        let message = "no answer by its deadline".to_owned();
        let cause = Cause { class: Class::Transport, status: None, org: None, message };
        trouble.first.get_or_insert_with(|| cause.clone());
        trouble.last = Some(cause);
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
        // The timer may ring before that, to see whether it is still worth waiting.
        Waiting { #[pin] sleep: Sleep, until: Instant, pays: bool },
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
        deadline: Option<Instant>,
        attempt: S::Future,
    ) -> Self {
        let deadline = deadline.map(|at| Box::new(Alarm { at, sleep: None }));
        let (attempt_from, watch, trouble) = (began, None, None);
        let logical = Logical { service, classifier, shared, kept, began, attempt_from, watch, deadline, trouble };
        RetryFuture { logical: Some(logical), step: Step::Calling { attempt } }
    }
}

/// What follows a step.
enum Turn<F, Res, E> {
    Go(Step<F>),
    Return(Result<Res, E>),
    GiveUp(Exhaustion, Option<BoxError>),
}

type TurnOf<S, Req> = Turn<<S as Service<Req>>::Future, <S as Service<Req>>::Response, <S as Service<Req>>::Error>;

fn poll_step<S, B, C>(
    step: Pin<&mut Step<S::Future>>,
    logical: &mut Logical<S, B, C>,
    cx: &mut Context<'_>,
) -> Poll<TurnOf<S, Request<B>>>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
    B: Clone,
    C: Classify<S::Response, S::Error>,
{
    let stalled = Turn::GiveUp(Exhaustion::Stalled, None);
    Poll::Ready(match step.project() {
        StepProj::Calling { attempt } => match attempt.poll(cx) {
            Poll::Pending => {
                ready!(logical.poll_unanswered(cx));
                stalled
            }
            Poll::Ready(result) => {
                let weighed = logical.weigh(result);
                logical.watch = None;
                match weighed {
                    Weighed::Again(Next::AtOnce) => logical.readying(Token(None)),
                    Weighed::Again(Next::Wait { until, pays }) => {
                        let look = if pays { None } else { logical.waiting().lost_at() };
                        let sleep = tokio::time::sleep_until(look.map_or(until, |look| look.min(until)));
                        Turn::Go(Step::Waiting { sleep, until, pays })
                    }
                    Weighed::Return(result) => Turn::Return(result),
                    Weighed::GiveUp(reason, source) => Turn::GiveUp(reason, source),
                }
            }
        },
        StepProj::Waiting { mut sleep, until, pays } => loop {
            ready!(sleep.as_mut().poll(cx));
            if sleep.deadline() >= *until || Instant::now() >= *until {
                break if *pays {
                    Turn::Go(Step::Paying { place: Place::new() })
                } else {
                    logical.readying(Token(None))
                };
            }
            if logical.is_lost(Some(sleep.deadline()), Some(*until)) {
                break stalled;
            }
            let look = logical.waiting().lost_at().unwrap_or(*until);
            sleep.as_mut().reset(look.min(*until));
        },
        StepProj::Paying { place } => {
            let budget = logical.shared.budget.clone();
            ready!(budget.poll_pass(cx, place));
            logical.readying(Token(Some(budget)))
        }
        StepProj::Readying { token } => match logical.service.poll_ready(cx) {
            Poll::Pending => {
                ready!(logical.poll_lost(cx));
                stalled
            }
            Poll::Ready(Ok(())) => {
                logical.watch = None;
                let attempt = logical.call();
                token.spend();
                Turn::Go(Step::Calling { attempt })
            }
            Poll::Ready(Err(error)) => Turn::Return(Err(error)),
        },
        StepProj::Done => unreachable!("it holds no request once it has finished"),
    })
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
            let is_calling = matches!(&*this.step, Step::Calling { .. });
            // An answer that has come in time is not lost because it is looked at late; but nothing more is sent.
            let too_late = (!is_calling || logical.is_new()) && logical.is_late();
            let turn = if too_late {
                Turn::GiveUp(Exhaustion::Deadline, None)
            } else {
                match poll_step(this.step.as_mut(), logical, cx) {
                    Poll::Ready(turn) => turn,
                    Poll::Pending => {
                        ready!(logical.poll_deadline(cx));
                        if is_calling && logical.watch.is_none() {
                            logical.cut_off();
                        }
                        Turn::GiveUp(Exhaustion::Deadline, None)
                    }
                }
            };
            match turn {
                Turn::Go(next) => this.step.set(next),
                Turn::Return(result) => {
                    this.step.set(Step::Done);
                    *this.logical = None;
                    return Poll::Ready(result.map_err(RetryError::Inner));
                }
                Turn::GiveUp(reason, source) => {
                    this.step.set(Step::Done);
                    let logical = this.logical.take().expect("taken above");
                    return Poll::Ready(Err(RetryError::Exhausted(Box::new(logical.exhausted(reason, source)))));
                }
            }
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
