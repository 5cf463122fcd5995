//! One request: looked up, sent if need be, kept, and only then answered.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, header::CONTENT_TYPE, response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::{
    JournalBody, JournalError, Key, Restored, Store, StoreError, Unkept,
    body::{Gathered, Gathering},
    entry::Entry,
    flight::{Ticket, Turn},
    layer::Rules,
};
use crate::outcome::{Class, Outcome, Stamp};

/// What those who wait are given of another's answer.
#[derive(Clone)]
pub(super) struct Shared {
    answer: Arc<Answer>,
    unkept: Option<Unkept>,
}

struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    /// As the judge has it, but without who served it and what it used: that is told once.
    stamp: Option<Stamp>,
}

type Ended<RB, E> = Result<Response<JournalBody<RB>>, JournalError<E>>;

/// What only who has sent the request gets: the rest of the head, and trailers.
struct Own {
    head: response::Parts,
    trailers: Option<Box<HeaderMap>>,
}

pin_project! {
    #[project = StepProj]
    enum Step<F, G, P, RB: Body> {
        // Somebody else may have sent it.
        Joining,
        Looking { #[pin] get: G },
        Readying,
        Calling { #[pin] call: F },
        Gathering { head: Option<response::Parts>, body: Gathering<RB> },
        Keeping { #[pin] put: P, answer: Arc<Answer>, own: Option<Own> },
        Done,
    }
}

pin_project! {
    /// The future of [`Journal`](super::Journal).
    ///
    /// Who is called while the same request is on its way waits for that one: keep polling the other, or drop it, or give one of them a
    /// [`Salt`](super::Salt).
    ///
    /// Dropped at any time it drops what it has below, and those who wait for the same answer go on without it: one of them sends for
    /// itself. What had come whole by then is kept all the same, and given to them. Once finished it holds nothing.
    ///
    /// # Panics
    /// If polled again after it has finished.
    pub struct JournalFuture<S, St, B, RB>
    where
        S: Service<Request<B>>,
        St: Store,
        RB: Body,
    {
        // First: what is below is given up before the store, whose last handle waits for its writer.
        #[pin]
        step: Step<S::Future, St::Get, St::Put, RB>,
        // None for what is not kept, and once the others know.
        ticket: Option<Ticket<Shared>>,
        request: Option<Request<B>>,
        // None once it has finished.
        service: Option<S>,
        store: Option<St>,
        rules: Arc<Rules>,
    }
}

impl<S, St, B, RB> JournalFuture<S, St, B, RB>
where
    S: Service<Request<B>>,
    St: Store,
    RB: Body,
{
    pub(super) fn new(
        service: S,
        store: St,
        rules: Arc<Rules>,
        request: Request<B>,
        ticket: Option<Ticket<Shared>>,
    ) -> Self {
        let step = if ticket.is_some() { Step::Joining } else { Step::Readying };
        JournalFuture { step, ticket, request: Some(request), service: Some(service), store: Some(store), rules }
    }
}

impl<S, St, B, RB> Future for JournalFuture<S, St, B, RB>
where
    S: Service<Request<B>, Response = Response<RB>>,
    St: Store,
    RB: Body + Unpin,
    RB::Error: Unpin,
{
    type Output = Ended<RB, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = ready!(self.as_mut().poll_steps(cx));
        let mut this = self.project();
        this.step.set(Step::Done);
        // After an error one of those who wait tries for itself.
        *this.ticket = None;
        *this.request = None;
        *this.service = None;
        *this.store = None;
        Poll::Ready(result)
    }
}

impl<S, St, B, RB> JournalFuture<S, St, B, RB>
where
    S: Service<Request<B>, Response = Response<RB>>,
    St: Store,
    RB: Body + Unpin,
    RB::Error: Unpin,
{
    fn poll_steps(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Ended<RB, S::Error>> {
        let mut this = self.project();
        let (service, store) = match (&mut *this.service, &*this.store) {
            (Some(service), Some(store)) => (service, store),
            _ => panic!("polled again after it has finished"),
        };
        loop {
            let next = match this.step.as_mut().project() {
                StepProj::Joining => {
                    let ticket = this.ticket.as_mut().expect("who joins has one");
                    match ready!(ticket.poll(cx)) {
                        Turn::Lead(None) => Step::Looking { get: store.get(&ticket.key()) },
                        Turn::Lead(Some(Shared { answer, .. })) => match keep(store, &ticket.key(), &answer) {
                            Some(put) => Step::Keeping { put, answer, own: None },
                            None => return Poll::Ready(Ok(shared(Shared { answer, unkept: None }))),
                        },
                        Turn::Answered(answer) => return Poll::Ready(Ok(shared(answer))),
                        Turn::Apart => {
                            *this.ticket = None;
                            Step::Readying
                        }
                    }
                }
                StepProj::Looking { get } => {
                    let found =
                        ready!(get.poll(cx)).map_err(|error| JournalError::Store(StoreError::from_box(error)))?;
                    let key = this.ticket.as_ref().expect("who looks leads").key();
                    if let Some(entry) = found.and_then(|bytes| Entry::read(&key, &bytes)) {
                        let answer = Shared { answer: Arc::new(Answer::kept(entry)), unkept: None };
                        end(this.ticket, |ticket| ticket.answered(answer.clone()));
                        return Poll::Ready(Ok(restored(&answer.answer, Restored::Kept)));
                    }
                    if let Some(broken) = store.broken() {
                        return Poll::Ready(Err(JournalError::Store(broken)));
                    }
                    Step::Readying
                }
                StepProj::Readying => {
                    ready!(service.poll_ready(cx)).map_err(JournalError::Inner)?;
                    // It may have broken meanwhile.
                    if let Some(broken) = this.ticket.as_ref().and_then(|_| store.broken()) {
                        return Poll::Ready(Err(JournalError::Store(broken)));
                    }
                    let request = this.request.take().expect("not polled again after it has finished");
                    Step::Calling { call: service.call(request) }
                }
                StepProj::Calling { call } => {
                    let response = ready!(call.poll(cx)).map_err(JournalError::Inner)?;
                    if this.ticket.is_none() || !is_wanted(&response, this.rules.ceiling) {
                        end(this.ticket, Ticket::apart);
                        return Poll::Ready(Ok(response.map(JournalBody::through)));
                    }
                    let (head, body) = response.into_parts();
                    Step::Gathering { head: Some(head), body: Gathering::new(body) }
                }
                StepProj::Gathering { head, body } => {
                    let gathered = ready!(body.poll(cx, this.rules.ceiling));
                    let head = head.take().expect("taken only here");
                    let (body, trailers) = match gathered {
                        Gathered::Whole(body, trailers) => (body, trailers),
                        Gathered::Beyond(body) => {
                            end(this.ticket, Ticket::apart);
                            return Poll::Ready(Ok(Response::from_parts(head, body)));
                        }
                        // An error, if a late one: one of those who wait tries for itself.
                        Gathered::Broken(body) => return Poll::Ready(Ok(Response::from_parts(head, body))),
                    };
                    let is_kept = this.rules.keep.keep(&head, &body);
                    let answer = Arc::new(Answer::of(&head, body));
                    let ticket = this.ticket.as_ref().expect("what has none is not gathered");
                    let put = is_kept.then(|| keep(store, &ticket.key(), &answer)).flatten();
                    let own = Own { head, trailers };
                    match put {
                        Some(put) => {
                            ticket.paid(Shared { answer: answer.clone(), unkept: None });
                            Step::Keeping { put, answer, own: Some(own) }
                        }
                        None => {
                            let all = Shared { answer, unkept: None };
                            end(this.ticket, |ticket| ticket.answered(all.clone()));
                            return Poll::Ready(Ok(own.with(&all)));
                        }
                    }
                }
                StepProj::Keeping { put, answer, own } => {
                    let unkept = ready!(put.poll(cx)).err().map(|error| Unkept(StoreError::from_box(error)));
                    let all = Shared { answer: answer.clone(), unkept };
                    let own = own.take();
                    end(this.ticket, |ticket| ticket.answered(all.clone()));
                    return Poll::Ready(Ok(own.map_or_else(|| shared(all.clone()), |own| own.with(&all))));
                }
                StepProj::Done => panic!("polled again after it has finished"),
            };
            this.step.set(next);
        }
    }
}

impl<S, St, B, RB> fmt::Debug for JournalFuture<S, St, B, RB>
where
    S: Service<Request<B>>,
    St: Store,
    RB: Body,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalFuture").finish_non_exhaustive()
    }
}

impl Answer {
    fn of(head: &response::Parts, body: Bytes) -> Self {
        let stamp = head.extensions.get::<Stamp>().map(|of| Stamp {
            whole: true,
            said: of.said.clone(),
            ..Stamp::new(of.outcome)
        });
        Answer { status: head.status, headers: head.headers.clone(), body, stamp }
    }

    fn kept(entry: Entry) -> Self {
        // What else somebody chose to keep speaks by its status.
        let stamp = entry.status.is_success().then(|| Stamp { whole: true, ..Stamp::new(Outcome::of(Class::Ok)) });
        Answer { status: entry.status, headers: entry.headers, body: entry.body, stamp }
    }
}

impl Own {
    fn with<RB: Body>(self, all: &Shared) -> Response<JournalBody<RB>> {
        let mut response = Response::from_parts(self.head, JournalBody::whole(all.answer.body.clone(), self.trailers));
        response.extensions_mut().extend(extension(all.unkept.clone()));
        response
    }
}

/// Begins to keep an answer, if it can be written at all.
fn keep<St: Store>(store: &St, key: &Key, answer: &Answer) -> Option<St::Put> {
    let entry = Entry::of(answer.status, &answer.headers, answer.body.clone()).write(key)?;
    Some(store.put(*key, entry))
}

fn restored<RB: Body>(answer: &Answer, how: Restored) -> Response<JournalBody<RB>> {
    let mut response = Response::new(JournalBody::whole(answer.body.clone(), None));
    *response.status_mut() = answer.status;
    *response.headers_mut() = answer.headers.clone();
    response.extensions_mut().insert(how);
    response.extensions_mut().extend(extension(answer.stamp.clone()));
    response
}

fn shared<RB: Body>(all: Shared) -> Response<JournalBody<RB>> {
    let mut response = restored(&all.answer, Restored::Shared);
    response.extensions_mut().extend(extension(all.unkept));
    response
}

fn extension<T: Clone + Send + Sync + 'static>(value: Option<T>) -> http::Extensions {
    let mut extensions = http::Extensions::new();
    if let Some(value) = value {
        extensions.insert(value);
    }
    extensions
}

/// Tells the others.
fn end(ticket: &mut Option<Ticket<Shared>>, tell: impl FnOnce(Ticket<Shared>)) {
    if let Some(ticket) = ticket.take() {
        tell(ticket);
    }
}

/// Whether an answer is gathered: a stream is not held up, and what is too large is not begun.
fn is_wanted<RB: Body>(response: &Response<RB>, ceiling: u64) -> bool {
    let size = response.body().size_hint();
    let stamp = response.extensions().get::<Stamp>();
    let is_events = || {
        let kind = response.headers().get(CONTENT_TYPE);
        kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) && size.exact().is_none()
    };
    let streams = stamp.map_or_else(is_events, |stamp| stamp.tail.is_some());
    !streams && size.lower() <= ceiling
}
