//! The stack, and what its answers mean for an id.

use std::{collections::HashMap, error::Error as StdError, sync::Arc};

use bytes::Bytes;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, header::CONTENT_TYPE, response::Parts, uri::PathAndQuery,
};
use http_body::Body;
use http_body_util::{BodyExt, Full, Limited};
use serde::Deserialize;
use tower::{Layer, ServiceExt, util::BoxService};
use tower_quota::{
    aimd::{Caps, Settings},
    client,
    journal::{FileStore, Finished, JournalError, JournalLayer, Keep, Restored, Salt},
    judge::{Gather, JudgeLayer},
    org::{BuildError, Family, Org, Orgs, Tuning},
    outcome::{BoxError, Class, HINT_CEILING, Outcome, Stamp},
    retry::{RateLimitRetryLayer, RetryError},
    stack::Stack,
};

use crate::{
    args::Args,
    descriptors::{self, Room},
    forecast::Asked,
    output::{Scrubber, Verdict},
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
    pub(crate) all: Arc<Tally>,
    /// Each org's own count, by its name.
    pub(crate) tallies: HashMap<Arc<str>, Arc<Tally>>,
}

impl Wire {
    /// The ready-made stack over these orgs, for requests of these families.
    pub(crate) fn new(
        args: &Args,
        orgs: &Orgs,
        families: &[Family],
        journal: Option<FileStore>,
    ) -> Result<Self, BuildError> {
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
        let bound = families.iter().map(|family| stack.live_bound(family)).sum();

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
        // It gathers nothing: it reads what passes, and tells at the end what each attempt used.
        let client = JudgeLayer::new().gather(Gather::Nothing).layer(client);
        let stack = stack.build_with(move |org: &Org| counts[org.name()].layer(client.clone()))?;
        let service = match journal.clone() {
            Some(store) => {
                // An answer that quotes a key is not kept: no file has one.
                let scrubber = Scrubber::of(orgs);
                let keep = move |head: &Parts, body: &[u8]| Finished.keep(head, body) && !scrubber.finds(body);
                let journal = JournalLayer::builder(store).keep(keep).build()?;
                journal.layer(stack).map_err(without_answer).then(verdict).boxed()
            }
            None => stack.map_err(Verdict::from).then(verdict).boxed(),
        };
        Ok(Wire { service, journal, shared: args.share_answers, bound, all, tallies })
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
