//! The stack, and what its answers mean for an id.

use std::{
    collections::HashMap,
    error::Error as StdError,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{
    Extensions, HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_TYPE, response::Parts,
    uri::PathAndQuery,
};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Either, Full, Limited};
use serde::Deserialize;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxService};
use tower_quota::{
    aimd::{Caps, Settings},
    batch::{BatchFailure, Batched, Route, RouteError},
    client,
    journal::{FileStore, Finished, JournalError, JournalLayer, Keep, Restored, Salt},
    judge::{Gather, JudgeLayer},
    org::{BuildError, Family, Org, Orgs, Tuning},
    outcome::{BoxError, Class, HINT_CEILING, Outcome, Stamp},
    retry::{RateLimitRetryLayer, RetryError},
    stack::Stack,
};

use crate::{
    Failure,
    args::Args,
    batches::{self, Arrival, Arrivals, Batches, Setting},
    descriptors::{self, Room},
    forecast::Asked,
    output::{Scrubber, Verdict},
    route::Ways,
    tally::{CountLayer, Model, Tally, Tries},
};

/// The largest answer that is taken.
const LARGEST: usize = 256 << 20;

/// The way to the provider.
pub(crate) struct Wire {
    /// Its error is a verdict too.
    pub(crate) service: BoxService<Request<Full<Bytes>>, Verdict, Verdict>,
    /// Where answers are kept, if they are.
    pub(crate) journal: Option<FileStore>,
    /// Whether ids that ask the same share an answer.
    pub(crate) shared: bool,
    /// How many ids may be worked on at once.
    pub(crate) bound: usize,
    /// The batch path, if that is the way.
    pub(crate) batches: Option<Batches>,
    pub(crate) all: Arc<Tally>,
    /// Each org's own count, by its name.
    pub(crate) tallies: HashMap<Arc<str>, Arc<Tally>>,
}

impl Wire {
    /// The ready-made stack over these orgs, for requests of these families.
    pub(crate) async fn new(
        args: &Args,
        orgs: &Orgs,
        families: &[Family],
        journal: Option<FileStore>,
        setting: Option<(&Setting, &Ways)>,
    ) -> Result<Self, Failure> {
        let mut retry = RateLimitRetryLayer::builder();
        if let Some(attempts) = args.max_attempts {
            retry = retry.max_attempts(attempts.get());
        }
        if let Some(patience) = args.patience {
            retry = retry.patience(patience);
        }
        // A cap of the command line is each org's own by now, and nothing may beat it.
        let caps = if args.cap.is_some() { Caps::default() } else { Caps::from_env()? };
        // In the demonstration the provider's end of each connection is ours too.
        heed_descriptors(orgs, families, &caps, if args.input.is_some() { 1 } else { 2 })?;
        let limit = Settings::builder().caps(caps).build()?;
        let stack = Stack::new(orgs.clone()).limit(limit).retry(retry.build()?).timeout(args.timeout);
        let mut bound = families.iter().map(|family| stack.live_bound(family)).sum();

        let all = Arc::new(Tally::default());
        let counts: HashMap<Arc<str>, CountLayer> = orgs
            .iter()
            .map(|org| {
                let name: Arc<str> = Arc::from(org.name());
                (name.clone(), CountLayer { org: name, tallies: [Arc::default(), all.clone()] })
            })
            .collect();
        let tallies = counts.iter().map(|(name, count)| (name.clone(), count.tallies[0].clone())).collect();
        let client = client::https();
        let batch_client = client.clone();
        // It gathers nothing: it reads what passes, and tells at the end what each attempt used.
        let client = JudgeLayer::new().gather(Gather::Nothing).layer(client);
        let stack = stack.build_with(move |org: &Org| counts[org.name()].layer(client.clone()))?;
        let Some((setting, ways)) = setting else {
            let service = journaled(stack.map_err(Verdict::from), journal.clone(), orgs)?;
            return Ok(Wire { service, journal, shared: args.share_answers, bound, batches: None, all, tallies });
        };
        let tally = Arc::new(Tally::default());
        let count = CountLayer { org: "batches".into(), tallies: [Arc::default(), tally.clone()] };
        // A call about a batch must not wait for ever either.
        let patient = JudgeLayer::new().gather(Gather::Nothing).timeout(args.timeout);
        let client = patient.layer(count.layer(batch_client));
        let batch = setting.builder(orgs, journal.as_ref()).open(client).await;
        let batch = batch.map_err(|error| batches::failure(&error))?;
        // So many that all batches fill, and those that go directly meanwhile.
        bound = batch.live_bound().saturating_add(bound);
        let handle = batch.handle();
        let batches = Batches {
            arrivals: Arrivals::new(handle.clone()),
            handle,
            tally: tally.clone(),
            cancel_on_exit: args.cancel_on_exit,
            ways: ways.clone(),
        };
        let ways = ways.clone();
        let direct = stack.map_response(|answer| answer.map(|body| PathBody(Either::Left(body))));
        let route = Route::new(direct, batch, move |request: &Request<Full<Bytes>>| ways.of(request));
        let counted = service_fn(move |request: Request<Full<Bytes>>| {
            let (extensions, tally) = (request.extensions().clone(), tally.clone());
            // It is always ready.
            let call = route.clone().call(request);
            async move { counted(call, &extensions, &tally).await }
        });
        let service = journaled(counted, journal.clone(), orgs)?;
        Ok(Wire { service, journal, shared: args.share_answers, bound, batches: Some(batches), all, tallies })
    }
}

/// What the journal has is not sent; what is answered is kept before anybody sees it.
fn journaled<S, RB>(
    service: S,
    journal: Option<FileStore>,
    orgs: &Orgs,
) -> Result<BoxService<Request<Full<Bytes>>, Verdict, Verdict>, BuildError>
where
    S: Service<Request<Full<Bytes>>, Response = Response<RB>, Error = Verdict> + Clone + Send + 'static,
    S::Future: Send,
    RB: Body + Unpin + Send + 'static,
    RB::Data: Send,
    RB::Error: Into<BoxError> + Unpin + Send,
{
    Ok(match journal {
        Some(store) => {
            // An answer that quotes a key is not kept: no file has one.
            let scrubber = Scrubber::of(orgs);
            let keep = move |head: &Parts, body: &[u8]| Finished.keep(head, body) && !scrubber.finds(body);
            let journal = JournalLayer::builder(store).keep(keep).build()?;
            journal.layer(service).map_err(without_answer).then(verdict).boxed()
        }
        None => service.then(verdict).boxed(),
    })
}

/// Waits for an answer of either path, and counts it if it comes out of a batch.
async fn counted<RB, E: Into<Verdict>>(
    call: impl Future<Output = Result<Response<RB>, E>>,
    extensions: &Extensions,
    tally: &Tally,
) -> Result<Response<RB>, Verdict> {
    let mut call = pin!(call);
    // The first poll puts it where it is gathered.
    let first = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
    if let Some(arrival) = extensions.get::<Arrival>() {
        arrival.arrived();
    }
    let answer = match first {
        Poll::Ready(answer) => answer,
        Poll::Pending => call.await,
    };
    let answer = answer.map_err(Into::into)?;
    if let Some(Batched(batch)) = answer.extensions().get() {
        if let Some(tries) = extensions.get::<Tries>() {
            tries.batched(batch.org.clone(), batch.id.clone(), answer.status().as_u16());
        }
        let usage = answer.extensions().get::<Stamp>().and_then(|stamp| stamp.usage);
        tally.row(extensions.get(), usage, answer.status().is_success());
    }
    Ok(answer)
}

/// The body of an answer of either path.
struct PathBody<D>(Either<D, Full<Bytes>>);

impl<D> From<Bytes> for PathBody<D> {
    fn from(body: Bytes) -> Self {
        PathBody(Either::Right(Full::new(body)))
    }
}

impl<D> Body for PathBody<D>
where
    D: Body<Data = Bytes> + Unpin,
    D::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

/// Raises the limit of open files to what so many calls need, or lowers the orgs' caps to what it allows, and says so.
fn heed_descriptors(orgs: &Orgs, families: &[Family], caps: &Caps, each: usize) -> Result<(), BuildError> {
    let boards: Vec<Org> = orgs.iter().flat_map(|org| families.iter().map(|family| org.family(family))).collect();
    let wanted: Vec<usize> = boards.iter().map(|board| caps.of(board)).collect();
    let calls = wanted.iter().fold(0, |sum: usize, cap| sum.saturating_add(*cap));
    let Some(Room { may, calls: room }) = descriptors::room(calls, each) else { return Ok(()) };
    let level = descriptors::level(&wanted, room);
    for (board, cap) in boards.iter().zip(&wanted) {
        board.retune_family(Tuning::new().cap(level.min(*cap)))?;
    }
    let allowed: usize = wanted.iter().map(|cap| level.min(*cap)).sum();
    tracing::warn!(
        "this process may have {may} files open, so at most {allowed} calls run at once instead of {calls}: raise its hard limit (ulimit -Hn) for more"
    );
    Ok(())
}

/// A request of an item; every attempt at it is counted in `tries`. With a `salt` it has an answer of its own, though another item asks
/// the same.
pub(crate) fn request(
    path: PathAndQuery,
    family: Family,
    body: Bytes,
    tries: Tries,
    salt: Option<String>,
) -> Request<Full<Bytes>> {
    let model = Model(Asked::of(&body).model.as_deref().unwrap_or_default().into());
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = path.into();
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.extensions_mut().insert(family);
    request.extensions_mut().insert(tries);
    if let Some(salt) = salt {
        request.extensions_mut().insert(Salt(salt));
    }
    request.extensions_mut().insert(model);
    request
}

/// The outcome's word for a class.
const fn word(class: Class) -> &'static str {
    match class {
        Class::Throttled | Class::ThrottledRequest => "rate_limited",
        Class::Overloaded | Class::Transport | Class::Unprocessed => "transient",
        Class::Empty | Class::Rejected | Class::Local => "transient",
        other => other.name(),
    }
}

impl<Req, E> From<RetryError<Req, E>> for Verdict
where
    E: StdError + 'static,
    RetryError<Req, E>: StdError + 'static,
{
    fn from(error: RetryError<Req, E>) -> Self {
        let outcome =
            if error.is_rate_limited() { "rate_limited" } else { word(error.class().unwrap_or(Class::Local)) };
        Verdict::without_answer(outcome, in_one_line(&error))
    }
}

impl<E: Into<Verdict>, B: 'static> From<RouteError<E, Request<B>>> for Verdict {
    fn from(error: RouteError<E, Request<B>>) -> Self {
        match error {
            RouteError::Direct(error) => error.into(),
            RouteError::Batch(error) => {
                let outcome = match error.failure() {
                    // It is an end of ours, not of the provider's.
                    BatchFailure::Closed(_) | BatchFailure::Store(_) => "cancelled",
                    failure => word(failure.class()),
                };
                Verdict::without_answer(outcome, in_one_line(&error))
            }
            _ => Verdict::without_answer("transient", "neither path has an answer"),
        }
    }
}

/// What an error of the journal, or below it, means.
fn without_answer<E: Into<Verdict>>(error: JournalError<E>) -> Verdict {
    match error {
        JournalError::Inner(error) => error.into(),
        JournalError::Store(error) => Verdict::without_answer("cancelled", in_one_line(&error)),
        _ => Verdict::without_answer("cancelled", "the journal does not work"),
    }
}

async fn verdict<B>(result: Result<Response<B>, Verdict>) -> Result<Verdict, Verdict>
where
    B: Body,
    B::Error: Into<BoxError>,
{
    let response = result?;
    let status = response.status();
    let class = match response.extensions().get::<Stamp>() {
        Some(stamp) => stamp.outcome.class,
        None => Outcome::of_head(status, response.headers(), HINT_CEILING).class,
    };
    let restored = response.extensions().get::<Restored>() == Some(&Restored::Kept);
    Ok(match Limited::new(response.into_body(), LARGEST).collect().await {
        Err(error) => Verdict::without_answer("transient", format!("the answer broke off: {}", in_one_line(&*error))),
        Ok(body) => {
            let body = body.to_bytes();
            let error = (class != Class::Ok).then(|| refusal(status, &body));
            Verdict { outcome: word(class), body: Some(body), error, restored }
        }
    })
}

/// An error and its sources.
pub(crate) fn in_one_line(error: &(dyn StdError + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        // Many errors quote their source.
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = source.source();
    }
    line
}

/// What a provider says when it refuses, in the form that both use.
fn refusal(status: StatusCode, body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        error: Details,
    }
    #[derive(Deserialize)]
    struct Details {
        #[serde(rename = "type")]
        kind: Option<String>,
        message: Option<String>,
    }
    let mut text = status.to_string();
    if let Ok(Said { error: Details { kind, message } }) = serde_json::from_slice(body) {
        for part in [kind, message].into_iter().flatten() {
            text.push_str(": ");
            text.push_str(&part);
        }
    }
    text
}
