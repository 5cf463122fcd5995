//! The provider as a tower `Service`, in tokio's time.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, Request, Response, StatusCode, request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::Collect;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

use super::batch::{Answer, BatchSeen, Call, Desk, Lines, Routed, RowSeen, Rules};
use super::bucket::{PerResource, View};
use super::config::{Config, ConfigError, RetryAfter};
use super::marker::Marker;
use super::model::{Ask, Ending, Flaw, OrgModel, Verdict};
use super::truth::{Levels, Truth};
use super::wire::{self, Asked, Failure, Head, Success};

/// A simulated provider. Clones are the same provider.
///
/// Its time starts at the first arrival, or when [`start`](Self::start) is called before that.
#[derive(Clone)]
pub struct Sim {
    state: Arc<State>,
}

struct State {
    config: Config,
    orgs: Vec<(http::HeaderValue, Mutex<OrgModel>)>,
    by_key: HashMap<Vec<u8>, usize>,
    desk: Desk,
    start: OnceLock<(Instant, SystemTime)>,
    unknown_key: AtomicU64,
    not_found: AtomicU64,
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim").field("config", &self.state.config).finish_non_exhaustive()
    }
}

impl Sim {
    /// A fresh provider with full buckets.
    ///
    /// # Errors
    ///
    /// See [`Config::validate`].
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut orgs = Vec::with_capacity(config.orgs.len());
        let mut by_key = HashMap::with_capacity(config.orgs.len());
        for (i, org) in config.orgs.iter().enumerate() {
            let id = http::HeaderValue::from_str(org.id()).expect("validated above");
            orgs.push((id, Mutex::new(OrgModel::new(&config, i))));
            by_key.insert(org.key.expose().as_bytes().to_vec(), i);
        }
        Ok(Sim {
            state: Arc::new(State {
                desk: Desk::new(&config),
                config,
                orgs,
                by_key,
                start: OnceLock::new(),
                unknown_key: AtomicU64::new(0),
                not_found: AtomicU64::new(0),
            }),
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &Config {
        &self.state.config
    }

    /// Starts its time now, unless it has started.
    pub fn start(&self) {
        self.state.start();
    }

    /// Its time; zero before the start.
    pub fn elapsed(&self) -> Duration {
        self.state.start.get().map_or(Duration::ZERO, |(start, _)| start.elapsed())
    }

    /// The provider as a service. It answers any path and method: those of [batches](crate::sim#batches) as such, one that ends in
    /// `/embeddings` with embeddings, all else with a message.
    pub fn service(&self) -> SimService {
        SimService { sim: self.clone() }
    }

    /// What has happened up to now.
    pub fn truth(&self) -> Truth {
        let mut answers = HashMap::new();
        let (batches, rows) = self.state.desk.report(self.elapsed(), &mut answers);
        let report = |(i, batch)| self.state.org(i).ledger.report(&mut answers, batch);
        let orgs = batches.into_iter().enumerate().map(report).collect();
        let answered_more = answers.values().filter(|&&n| n > 1).count() as u64;
        Truth {
            orgs,
            unknown_key: self.state.unknown_key.load(Ordering::Relaxed),
            not_found: self.state.not_found.load(Ordering::Relaxed),
            answered_once: answers.len() as u64 - answered_more,
            answered_more,
            rows,
        }
    }

    /// All batches of all orgs, in the order in which they were created.
    pub fn batches(&self) -> Vec<BatchSeen> {
        self.state.desk.batches(self.elapsed())
    }

    /// What became of this `custom_id` in all batches; all zero if it was in none.
    pub fn row(&self, custom_id: &str) -> RowSeen {
        self.state.desk.row(self.elapsed(), custom_id)
    }

    /// What the buckets of the org of this name hold now: what the next request meets. `None` if there is no such org.
    pub fn levels(&self, org: &str) -> Option<Levels> {
        let place = self.state.config.orgs.iter().position(|candidate| candidate.name == org)?;
        let mut model = self.state.org(place);
        Some(model.levels(self.elapsed()))
    }

    /// The answer to a request whose path or method is not the provider's.
    pub(super) fn misdirected(&self, headers: &HeaderMap, failure: Failure<'_>) -> Response<SimBody> {
        self.state.misdirected(headers, failure)
    }
}

impl State {
    /// The time since the start, and the wall clock.
    fn start(&self) -> (Duration, SystemTime) {
        let (start, wall) = self.start.get_or_init(|| {
            let wall = match self.config.wall_start_s {
                Some(s) => SystemTime::UNIX_EPOCH + Duration::from_secs(s),
                None => SystemTime::now(),
            };
            (Instant::now(), wall)
        });
        let elapsed = start.elapsed();
        (elapsed, *wall + elapsed)
    }

    fn org(&self, place: usize) -> MutexGuard<'_, OrgModel> {
        // A panic in between can at worst leave a count off; the others' test should still end in its own words.
        self.orgs[place].1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn head(&self, place: Option<usize>, number: u64, views: PerResource<Option<View>>, wall: SystemTime) -> Head<'_> {
        let Config { dialect, headers, round_tokens, .. } = self.config;
        let org = place.map(|p| (&self.orgs[p].0, p));
        Head { dialect, headers, round_tokens, hide_input: false, wall, org, number, views }
    }

    fn failure(
        &self,
        place: Option<usize>,
        number: u64,
        views: PerResource<Option<View>>,
        wall: SystemTime,
        failure: Failure<'_>,
        flight: Option<Flight>,
    ) -> Response<SimBody> {
        let hide_input = failure.status == StatusCode::TOO_MANY_REQUESTS && !self.config.input_on_429;
        let headers = Head { hide_input, ..self.head(place, number, views, wall) }.write(Success::CONTENT);
        let body = SimBody { kind: Kind::Whole(failure.body(self.config.dialect)), flight };
        respond(failure.status, headers, body)
    }

    fn misdirected(&self, headers: &HeaderMap, failure: Failure<'_>) -> Response<SimBody> {
        let (_, wall) = self.start();
        let place = wire::key(self.config.dialect, headers).and_then(|key| self.by_key.get(key));
        let number = self.not_found.fetch_add(1, Ordering::Relaxed) + 1;
        self.failure(place.copied(), number, PerResource::default(), wall, failure, None)
    }

    /// Decides about a request that has arrived whole.
    fn decide(self: &Arc<Self>, head: &request::Parts, body: &[u8]) -> Decision {
        let dialect = self.config.dialect;
        let call = match Call::route(dialect, &head.method, &head.uri) {
            Routed::Batch(call) => Some(call),
            Routed::Elsewhere => None,
            Routed::WrongMethod => {
                return Decision::Now(Ok(self.misdirected(&head.headers, Failure::wrong_method())));
            }
        };
        let embeddings = head.uri.path().ends_with("/embeddings");
        let (item, asked) = match call {
            // A body of perhaps hundreds of megabytes.
            Some(_) => Default::default(),
            None => (item_id(head, body), Asked::read(body)),
        };
        let ask = match call {
            // One request, and no tokens.
            Some(_) => Ask::default(),
            None => Ask {
                body_bytes: body.len(),
                max_tokens: asked.max_tokens(),
                puts_out: !embeddings,
                item,
                marker: asked.marker(),
            },
        };
        let place = wire::key(dialect, &head.headers).and_then(|key| self.by_key.get(key)).copied();
        let Some(place) = place else {
            let (_, wall) = self.start();
            let number = self.unknown_key.fetch_add(1, Ordering::Relaxed) + 1;
            let response = self.failure(None, number, PerResource::default(), wall, Failure::unauthorised(), None);
            return Decision::Now(Ok(response));
        };
        let (now, wall, lengths, arrival) = {
            let mut org = self.org(place);
            // Read under the lock, so that an org's arrivals are in order.
            let (now, wall) = self.start();
            let arrival = org.arrive(now, ask);
            (now, wall, org.lengths(), arrival)
        };
        let arrived = Instant::now();
        let (number, views) = (arrival.number, arrival.views);
        let flight = |ending| {
            let (state, admitted) = (self.clone(), arrival.admitted);
            Some(Flight { state, place, admitted, ending, sent: false })
        };
        let fail = |failure| {
            let response = self.failure(Some(place), number, views, wall, failure, flight(Ending::Counted));
            Decision::Now(Ok(response))
        };
        if let (Some(call), &Verdict::Answer { latency, flaw, .. }) = (&call, &arrival.verdict) {
            let host = head.headers.get(HOST).and_then(|host| host.to_str().ok());
            let host = host.or(head.uri.authority().map(|authority| authority.as_str())).unwrap_or("localhost");
            let rules = Rules { place, lengths, now, wall: wall - now, base: format!("http://{host}") };
            let answer = self.desk.answer(call, &head.headers, body, rules);
            let flight = |status: StatusCode| flight(Ending::Managed { status: status.as_u16() });
            let (end, cut) = (arrived + latency, flaw == Some(Flaw::Truncated));
            let head = self.head(Some(place), number, views, wall);
            return match answer {
                Answer::Lost => {
                    drop(Flight {
                        state: self.clone(),
                        place,
                        admitted: arrival.admitted,
                        ending: Ending::Lost,
                        sent: true,
                    });
                    Decision::Now(Err(SimError::Reset))
                }
                Answer::Failure(failure) => {
                    let flight = flight(failure.status);
                    Decision::At(end, self.failure(Some(place), number, views, wall, failure, flight))
                }
                Answer::Json(value) => {
                    let body =
                        SimBody { kind: Kind::of(value.to_string().into(), end, cut), flight: flight(StatusCode::OK) };
                    Decision::At(end, respond(StatusCode::OK, head.write(Success::CONTENT), body))
                }
                Answer::Lines(mut lines) => {
                    if cut {
                        lines.cut();
                    }
                    let kind = Kind::Lines { lines, cut };
                    let body = SimBody { kind, flight: flight(StatusCode::OK) };
                    Decision::At(end, respond(StatusCode::OK, head.write(Success::LINES), body))
                }
            };
        }
        match arrival.verdict {
            Verdict::Unauthorised => fail(Failure::unauthorised()),
            Verdict::Overloaded { status } => fail(Failure::overloaded(status)),
            Verdict::ServerError => fail(Failure::internal()),
            Verdict::Refused { wait, form, what, bare } => {
                let flight = flight(Ending::Counted);
                let views = if bare { PerResource::default() } else { views };
                let mut response = self.failure(Some(place), number, views, wall, Failure::refused(what), flight);
                wire::write_wait(response.headers_mut(), if bare { RetryAfter::None } else { form }, wait, wall);
                Decision::Now(Ok(response))
            }
            Verdict::Marked { marker, .. } => fail(marker.failure(dialect).unwrap_or(Failure::internal())),
            Verdict::Reset => {
                drop(flight(Ending::Counted));
                Decision::Now(Err(SimError::Reset))
            }
            Verdict::Hang => Decision::Never(flight(Ending::Abandoned)),
            Verdict::Answer { latency, input_tokens, output_tokens, cut, flaw } => {
                let success = Success {
                    dialect,
                    embeddings,
                    model: &asked.model,
                    inputs: if embeddings { wire::inputs(body) } else { 0 },
                    item,
                    number,
                    input_tokens,
                    output_tokens,
                    cut,
                    empty: flaw == Some(Flaw::Empty),
                    refusal: asked.marker() == Some(Marker::Refusal),
                    include_usage: asked.include_usage(),
                };
                let flight = flight(match flaw {
                    None => Ending::Ok { id: item },
                    Some(Flaw::Empty) => Ending::Empty,
                    Some(Flaw::Truncated) => Ending::Truncated,
                    Some(Flaw::InBand) => Ending::InBand,
                });
                let head = self.head(Some(place), number, views, wall);
                let end = arrived + latency;
                let cut_short = flaw == Some(Flaw::Truncated);
                if asked.stream && !embeddings {
                    let events = success.events();
                    let steps = events.len() as u32;
                    let times = (1..=steps).map(|i| arrived + latency * i / steps);
                    let mut parts: Vec<(Instant, Bytes)> = times.zip(events).collect();
                    if cut_short {
                        parts.truncate(parts.len() / 2);
                    }
                    if flaw == Some(Flaw::InBand) {
                        let half = parts.len() / 2;
                        parts.truncate(half + 1);
                        parts[half].1 = wire::error_event(dialect);
                    }
                    let first = parts.first().map_or(end, |p| p.0);
                    let kind = Kind::Parts { parts: parts.into_iter(), length: None, cut: cut_short, timer: None };
                    let headers = head.write(Success::EVENTS);
                    return Decision::At(first, respond(StatusCode::OK, headers, SimBody { kind, flight }));
                }
                let text = match flaw {
                    Some(Flaw::InBand) => Failure::overloaded(529).body(dialect),
                    _ => success.json(),
                };
                let headers = head.write(Success::CONTENT);
                let kind = Kind::of(text, end, cut_short);
                Decision::At(end, respond(StatusCode::OK, headers, SimBody { kind, flight }))
            }
        }
    }
}

fn respond(status: StatusCode, mut headers: HeaderMap, body: SimBody) -> Response<SimBody> {
    if let Some(length) = body.size_hint().exact() {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// The header `x-item-id`, or else the body, as 64 bits.
fn item_id(head: &request::Parts, body: &[u8]) -> u64 {
    item_of(head.headers.get("x-item-id").map_or(body, |id| id.as_bytes()))
}

pub(super) fn item_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

enum Decision {
    Now(Result<Response<SimBody>, SimError>),
    At(Instant, Response<SimBody>),
    /// The flight lasts until the caller gives up.
    Never(Option<Flight>),
}

/// One request at the provider, from its arrival until its answer is sent or dropped.
struct Flight {
    state: Arc<State>,
    place: usize,
    admitted: bool,
    /// How it ends if it is answered completely.
    ending: Ending,
    sent: bool,
}

impl Drop for Flight {
    fn drop(&mut self) {
        let ending = match self.ending {
            ending @ (Ending::Counted | Ending::Lost) => ending,
            ending if self.sent => ending,
            _ => Ending::Abandoned,
        };
        let mut org = self.state.org(self.place);
        let (now, _) = self.state.start();
        org.leave(now, self.admitted, ending);
    }
}

/// The provider as a service, in tokio's time: a paused clock drives it.
///
/// Always ready. It takes requests with any body, reads it whole, and only then does the request arrive.
#[derive(Clone, Debug)]
pub struct SimService {
    sim: Sim,
}

impl<B: Body> Service<Request<B>> for SimService {
    type Response = Response<SimBody>;
    type Error = SimError;
    type Future = SimFuture<B>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), SimError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> SimFuture<B> {
        let (head, body) = request.into_parts();
        SimFuture { state: self.sim.state.clone(), head, stage: Stage::Reading { body: body.collect() } }
    }
}

pin_project! {
    /// The answer of a [`SimService`]. Dropped early, the call counts as abandoned.
    pub struct SimFuture<B: Body> {
        state: Arc<State>,
        head: request::Parts,
        #[pin]
        stage: Stage<B>,
    }
}

pin_project! {
    #[project = StageProjection]
    enum Stage<B: Body> {
        Reading { #[pin] body: Collect<B> },
        Waiting { #[pin] sleep: Sleep, response: Option<Response<SimBody>> },
        Hanging { flight: Option<Flight> },
    }
}

impl<B: Body> fmt::Debug for SimFuture<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimFuture").finish_non_exhaustive()
    }
}

impl<B: Body> Future for SimFuture<B> {
    type Output = Result<Response<SimBody>, SimError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.stage.as_mut().project() {
                StageProjection::Reading { body } => {
                    let Ok(body) = ready!(body.poll(cx)) else {
                        return Poll::Ready(Err(SimError::RequestBody));
                    };
                    match this.state.decide(this.head, &body.to_bytes()) {
                        Decision::Now(answer) => return Poll::Ready(answer),
                        Decision::Never(flight) => Stage::Hanging { flight },
                        Decision::At(at, response) => {
                            if at <= Instant::now() {
                                return Poll::Ready(Ok(response));
                            }
                            Stage::Waiting { sleep: tokio::time::sleep_until(at), response: Some(response) }
                        }
                    }
                }
                StageProjection::Waiting { sleep, response } => {
                    ready!(sleep.poll(cx));
                    return Poll::Ready(Ok(response.take().expect("polled after it had answered")));
                }
                StageProjection::Hanging { .. } => return Poll::Pending,
            };
            this.stage.set(next);
        }
    }
}

/// The body of an answer.
pub struct SimBody {
    kind: Kind,
    flight: Option<Flight>,
}

enum Kind {
    Whole(Bytes),
    Parts {
        parts: std::vec::IntoIter<(Instant, Bytes)>,
        length: Option<u64>,
        /// Ends with an error.
        cut: bool,
        timer: Option<Pin<Box<Sleep>>>,
    },
    /// The results of a batch.
    Lines {
        lines: Box<Lines>,
        cut: bool,
    },
    Done,
}

impl Kind {
    /// All of it at `end`, or half of it and no more.
    fn of(text: Bytes, end: Instant, cut: bool) -> Self {
        match cut {
            false => Kind::Whole(text),
            true => {
                let half = vec![(end, text.slice(..text.len() / 2))].into_iter();
                Kind::Parts { parts: half, length: Some(text.len() as u64), cut: true, timer: None }
            }
        }
    }
}

/// Lets what was sent before the cut leave before the connection breaks.
const BEFORE_CUT: Duration = Duration::from_millis(5);

impl SimBody {
    fn done(&mut self) {
        self.kind = Kind::Done;
        if let Some(flight) = &mut self.flight {
            flight.sent = true;
        }
        self.flight = None;
    }
}

impl fmt::Debug for SimBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimBody").finish_non_exhaustive()
    }
}

impl Body for SimBody {
    type Data = Bytes;
    type Error = SimError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, SimError>>> {
        let this = &mut *self;
        match &mut this.kind {
            Kind::Done => Poll::Ready(None),
            Kind::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                this.done();
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Kind::Lines { lines, cut } => match lines.chunk() {
                Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                None if *cut => {
                    let timer = Some(Box::pin(tokio::time::sleep(BEFORE_CUT)));
                    this.kind = Kind::Parts { parts: Vec::new().into_iter(), length: None, cut: true, timer };
                    self.poll_frame(cx)
                }
                None => {
                    this.done();
                    Poll::Ready(None)
                }
            },
            Kind::Parts { parts, cut, timer, .. } => {
                let due = match parts.as_slice().first() {
                    Some((at, _)) => *at,
                    None => timer.as_ref().map_or_else(Instant::now, |t| t.deadline()),
                };
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
                ready!(timer.as_mut().poll(cx));
                match parts.next() {
                    Some((_, bytes)) => {
                        match parts.as_slice().first() {
                            Some((at, _)) => timer.as_mut().reset(*at),
                            None if *cut => timer.as_mut().reset(Instant::now() + BEFORE_CUT),
                            None => this.done(),
                        }
                        Poll::Ready(Some(Ok(Frame::data(bytes))))
                    }
                    None => {
                        this.done();
                        Poll::Ready(Some(Err(SimError::Truncated)))
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.kind, Kind::Done)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Done => SizeHint::with_exact(0),
            Kind::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Kind::Lines { .. } => SizeHint::default(),
            Kind::Parts { length, .. } => length.map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

/// A call that got no (whole) answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SimError {
    /// The connection was dropped without an answer.
    Reset,
    /// The answer's body broke off.
    Truncated,
    /// The caller's own body failed; the request never arrived.
    RequestBody,
}

impl fmt::Display for SimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SimError::Reset => "connection reset",
            SimError::Truncated => "the answer broke off",
            SimError::RequestBody => "the request body failed",
        })
    }
}

impl std::error::Error for SimError {}
