//! One exchange: the head, then the body as far as it is gathered, under one deadline.

use std::{
    error::Error as StdError,
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header::CONTENT_LENGTH, response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};

use super::{
    Answer,
    body::{Read, poll_bytes},
    inband::Found,
    layer::Rules,
    read,
    refusal::{self, Words},
    said,
    watch::Watch,
};
use crate::{
    hint,
    outcome::{BoxError, CEILING_MAX, Class, Error, Outcome, Stamp},
};

/// How much of a refusal's text is searched for a hint, and the most that is taken apart, in bytes: it stands in a sentence or two, and a search through megabytes
/// would keep the whole thread busy.
const HINT_TEXT: usize = 64 << 10;

/// The attempt took longer than the judge's timeout: the source of an [`Error`] of
/// [`Class::Transport`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed {
    after: Duration,
}

impl Elapsed {
    /// The timeout that passed.
    #[must_use]
    pub fn after(&self) -> Duration {
        self.after
    }
}

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no whole answer within {:?}", self.after)
    }
}

impl StdError for Elapsed {}

pin_project! {
    /// The future of [`JudgeService`](super::JudgeService). Dropping it drops the exchange, and nothing else is held; once it
    /// has given its answer it holds nothing either.
    ///
    /// # Panics
    /// If polled again after it has given its answer.
    pub struct JudgeFuture<F, RB> {
        // First the answer's head is awaited, then its body is gathered: at most one of the two is there.
        #[pin]
        head: Option<F>,
        // On the heap: it is large, as a timer is, and a future is moved a few times on its way up.
        gathering: Option<Box<Gathering<RB>>>,
        deadline: Option<Pin<Box<Sleep>>>,
        rules: Arc<Rules>,
        asked: Asked,
    }
}

/// What is known of the request.
pub(super) struct Asked {
    /// How large it is, where it says so.
    pub(super) size: Option<u64>,
    /// The model it is for, where it says so.
    pub(super) model: Option<Arc<str>>,
}

impl<F, RB> JudgeFuture<F, RB> {
    /// The clock starts before `call` does.
    pub(super) fn new(rules: Arc<Rules>, asked: Asked, call: impl FnOnce() -> F) -> Self {
        let deadline = rules.timeout.map(|timeout| Box::pin(tokio::time::sleep(timeout)));
        JudgeFuture { head: Some(call()), gathering: None, deadline, rules, asked }
    }
}

/// Says nothing of the inner future: a client's may quote what it sends.
impl<F, RB> fmt::Debug for JudgeFuture<F, RB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JudgeFuture").finish_non_exhaustive()
    }
}

impl<F, RB, E> Future for JudgeFuture<F, RB>
where
    F: Future<Output = Result<Response<RB>, E>>,
    E: Into<BoxError>,
    RB: Body + Unpin,
    RB::Error: Into<BoxError>,
{
    type Output = Result<Response<Answer<RB>>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match self.as_mut().poll_exchange(cx) {
            Poll::Ready(result) => result,
            Poll::Pending => {
                let mut this = self.as_mut().project();
                let Some(deadline) = this.deadline.as_mut() else { return Poll::Pending };
                // Outside the coop budget, which a busy body may have used up: the time would never come.
                ready!(Pin::new(&mut tokio::task::unconstrained(deadline.as_mut())).poll(cx));
                this.head.set(None);
                let elapsed = Elapsed { after: this.rules.timeout.unwrap_or_default() };
                match this.gathering.take() {
                    Some(gathering) => gathering.broken(this.rules, elapsed.into()),
                    None => Err(Error::new(Outcome::of(Class::Transport), elapsed)),
                }
            }
        };
        *self.project().deadline = None;
        Poll::Ready(result)
    }
}

impl<F, RB, E> JudgeFuture<F, RB>
where
    F: Future<Output = Result<Response<RB>, E>>,
    E: Into<BoxError>,
    RB: Body + Unpin,
    RB::Error: Into<BoxError>,
{
    fn poll_exchange(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<Answer<RB>>, Error>> {
        let mut this = self.project();
        let Some(head) = this.head.as_mut().as_pin_mut() else {
            let gathering = this.gathering.as_mut().expect("not polled again after it has given its answer");
            let end = ready!(gathering.poll(cx, this.rules));
            let gathering = this.gathering.take().expect("it was polled");
            return Poll::Ready(gathering.ended(end, this.rules));
        };
        let head = ready!(head.poll(cx));
        this.head.set(None);
        let mut gathering = match head {
            Ok(response) => Gathering::new(response, this.asked, this.rules),
            Err(error) => return Poll::Ready(Err(this.rules.fault(error.into()))),
        };
        // Most bodies are there at once: what is large is put by only where it has to wait.
        match gathering.poll(cx, this.rules) {
            Poll::Ready(end) => Poll::Ready(gathering.ended(end, this.rules)),
            Poll::Pending => {
                *this.gathering = Some(Box::new(gathering));
                Poll::Pending
            }
        }
    }
}

/// An answer whose body is read to its end, if that comes before the ceiling.
struct Gathering<B> {
    head: response::Parts,
    /// Of a refusal alone: its hints count from then.
    arrived: Option<Instant>,
    outcome: Outcome,
    asked: Asked,
    wanted: bool,
    body: B,
    read: Read,
    // Rare and large, so on the heap.
    trailers: Option<Box<HeaderMap>>,
    /// The part that would not go under the ceiling.
    beyond: Option<Bytes>,
}

enum End {
    /// There is no more.
    Whole,
    /// The rest is not to be gathered.
    HandOn,
}

impl<B> Gathering<B>
where
    B: Body + Unpin,
    B::Error: Into<BoxError>,
{
    fn new(response: Response<B>, asked: &mut Asked, rules: &Rules) -> Self {
        let (head, body) = response.into_parts();
        let outcome = Outcome::of_head(head.status, &head.headers, rules.hint_ceiling);
        let arrived = (outcome.class != Class::Ok).then(Instant::now);
        let announced = read::content_length(&head.headers).unwrap_or(0).max(body.size_hint().lower());
        // What ends at once is whole, whatever it announces: the answer to a HEAD gives the length of another one's body.
        let wanted = rules.gathers(head.status) && (announced <= rules.ceiling || body.is_end_stream());
        let asked = Asked { size: asked.size, model: asked.model.take() };
        Gathering { head, arrived, outcome, asked, wanted, body, read: Read::default(), trailers: None, beyond: None }
    }

    fn poll(&mut self, cx: &mut Context<'_>, rules: &Rules) -> Poll<Result<End, BoxError>> {
        if !self.wanted {
            return Poll::Ready(Ok(End::HandOn));
        }
        while !self.body.is_end_stream() {
            let Some(frame) = ready!(poll_bytes(&mut self.body, cx)) else { break };
            match frame?.into_data() {
                Ok(data) if (self.read.len() + data.len()) as u64 > rules.ceiling => {
                    self.beyond = Some(data);
                    return Poll::Ready(Ok(End::HandOn));
                }
                Ok(data) => self.read.push(data),
                Err(other) => self.trailers = other.into_trailers().ok().map(Box::new).or(self.trailers.take()),
            }
        }
        Poll::Ready(Ok(End::Whole))
    }

    #[inline]
    fn ended(self, end: Result<End, BoxError>, rules: &Rules) -> Result<Response<Answer<B>>, Error> {
        match end {
            Ok(End::Whole) => Ok(self.whole(rules)),
            Ok(End::HandOn) => Ok(self.hand_on(rules)),
            Err(error) => self.broken(rules, error),
        }
    }

    /// The rest was lost with `error`: that is no answer, unless the head has said already that it is a refusal.
    fn broken(mut self, rules: &Rules, error: BoxError) -> Result<Response<Answer<B>>, Error> {
        if self.outcome.class == Class::Ok {
            return Err(rules.without_key(Error::new(Outcome::of(Class::Transport), error)));
        }
        self.trailers = None;
        set_content_length(&mut self.head.headers, self.read.len());
        Ok(self.whole(rules))
    }

    fn whole(self, rules: &Rules) -> Response<Answer<B>> {
        let Gathering { mut head, arrived, outcome, asked: Asked { size: sent, model }, read, trailers, .. } = self;
        let mut body = read.own();
        let mut stamp = Stamp::new(outcome);
        stamp.whole = true;
        let mut is_refusal = !head.status.is_success();
        if let Some(arrived) = arrived {
            refused(&mut stamp, &head, &body, Refusal { arrived, sent }, rules);
        } else if !is_refusal {
            let (usage, found) = read::answered(&head.headers, &body, rules.empty);
            stamp.usage = usage;
            is_refusal = found_out(&mut stamp, found, &head, &body, sent, rules);
        }
        if is_refusal {
            if let Some(clean) = rules.keys.scrub(&body, 0) {
                set_content_length(&mut head.headers, clean.len());
                body = clean;
            }
        }
        if stamp.outcome.class == Class::Ok {
            if let Some(objection) = rules.objection(&head, &body) {
                stamp.outcome = Outcome::of(Class::Rejected);
                stamp.said = said::line(&objection, "", &rules.keys);
            }
        }
        if stamp.outcome.class == Class::Forbidden {
            stamp.model = model;
        }
        stamped(head, stamp, Answer::whole(body, trailers))
    }

    fn hand_on(self, rules: &Rules) -> Response<Answer<B>> {
        let read = [self.read.join()].into_iter().filter(|read| !read.is_empty()).chain(self.beyond);
        let (watch, tail) = Watch::new(&self.head, self.outcome, rules);
        let mut stamp = Stamp::new(self.outcome);
        stamp.tail = Some(tail);
        stamp.model = self.asked.model;
        stamped(self.head, stamp, Answer::stream(read.collect(), self.body, watch))
    }
}

/// What is known of a refused call besides its answer.
struct Refusal {
    /// When the head came: hints count from then.
    arrived: Instant,
    sent: Option<u64>,
}

/// Refines what a refusal means by its body.
fn refused(stamp: &mut Stamp, head: &response::Parts, body: &[u8], refusal: Refusal, rules: &Rules) {
    let words = if body.len() <= HINT_TEXT { Words::of_body(body) } else { None };
    let by_status = Class::of_status(head.status);
    let class = words.as_ref().map_or(by_status, |words| refusal::class(head.status, words));
    if class != by_status {
        settle(stamp, class, head, refusal.arrived, rules);
    }
    let words = words.unwrap_or_else(|| Words { message: Some(read::plain(head, body)), ..Words::default() });
    read_words(stamp, &words, head, body, refusal, rules);
}

/// What a success proves to be by its body. Whether that is an error.
fn found_out(
    stamp: &mut Stamp,
    found: Found,
    head: &response::Parts,
    body: &[u8],
    sent: Option<u64>,
    rules: &Rules,
) -> bool {
    match found {
        Found::Good => return false,
        Found::Empty => stamp.outcome = Outcome::of(Class::Empty),
        Found::CutOff => {
            stamp.outcome = Outcome::of(Class::Transport);
            stamp.said = Some("the answer ends before its end".into());
        }
        Found::Failed(words) => {
            let refusal = Refusal { arrived: Instant::now(), sent };
            settle(stamp, refusal::class_in_band(&words), head, refusal.arrived, rules);
            read_words(stamp, &words, head, body, refusal, rules);
            return true;
        }
    }
    false
}

fn settle(stamp: &mut Stamp, class: Class, head: &response::Parts, arrived: Instant, rules: &Rules) {
    let (class, wait) = Outcome::settle(class, &head.headers, rules.hint_ceiling);
    stamp.outcome = Outcome::of(class).not_before(wait.map(|wait| arrived + wait));
}

/// What the words say besides the class: when to come again, and what is to be told.
fn read_words(
    stamp: &mut Stamp,
    words: &Words,
    head: &response::Parts,
    body: &[u8],
    Refusal { arrived, sent }: Refusal,
    rules: &Rules,
) {
    let keys = &rules.keys;
    let outcome = stamp.outcome;
    stamp.said = match outcome.class {
        Class::TooLarge => said::too_large(words, sent, keys),
        _ => said::words(words, keys),
    };
    match outcome.class {
        Class::Throttled | Class::ThrottledRequest => {
            let header = outcome.not_before.map(|at| at.saturating_duration_since(arrived));
            let text =
                hint::from_text(&String::from_utf8_lossy(&body[..body.len().min(HINT_TEXT)]), rules.hint_ceiling);
            stamp.outcome = outcome.not_before(hint::combine(header, text).map(|wait| arrived + wait));
        }
        Class::OutOfQuota => {
            let clock = hint::reference(&head.headers, SystemTime::now());
            // One that has passed is a date too: it is late, and not lost.
            let wait = words.regained().map(|date| date.duration_since(clock).unwrap_or_default());
            stamp.outcome = outcome.not_before(wait.map(|wait| arrived + wait.min(CEILING_MAX)));
        }
        _ => {}
    }
}

fn stamped<B>(mut head: response::Parts, stamp: Stamp, body: Answer<B>) -> Response<Answer<B>> {
    head.extensions.insert(stamp);
    Response::from_parts(head, body)
}

/// Corrects a length that was announced, where one was.
fn set_content_length(headers: &mut HeaderMap, length: usize) {
    if let Some(announced) = headers.get_mut(CONTENT_LENGTH) {
        *announced = HeaderValue::from(length);
    }
}
