//! A judge, moved over from a dispatcher of its own making. Its callers see what they saw: items in, one verdict for each id out, four
//! categories, the model fixed. What it did for that is the stack's now: keys, caps, backoff, 429s, the cache.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, response::Parts};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};
use tower::{Layer, Service};
use tower_quota::{
    client,
    drive::{Drive, DriveError},
    journal::{FileStore, JournalError, JournalLayer, Salt},
    judge::JudgeLayer,
    org::{Family, Orgs},
    outcome::{BoxError, Class, Stamp},
    retry::{RateLimitRetryLayer, RetryError},
    stack::Stack,
};

/// The model was chosen once, and its verdicts are compared with one another: no caller and no planner changes it.
const MODEL: &str = "claude-haiku-4-5";

const RUBRIC: &str = "Judge whether the answer is aligned with what was asked. Say why in one sentence, and end with two hexadecimal \
    digits and nothing after them: 00 is not at all, ef is entirely.";

/// How often what was refused for want of quota is taken up again.
const PASSES: usize = 5;

/// What is judged.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) id: String,
    pub(crate) question: String,
    pub(crate) answer: String,
}

/// What became of an item.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// 0 to 1; none unless the category is `Ok`.
    pub(crate) score: Option<f64>,
    pub(crate) category: Category,
    /// In words, where there is no score.
    pub(crate) reason: Option<String>,
    /// Who judged; none where it was in the cache, or nobody did.
    pub(crate) org: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Category {
    Ok,
    /// For good: no score could be read, or the request was refused.
    Error,
    /// May be sent again later.
    RateLimitedExhausted,
    TransportExhausted,
}

/// Judges all items with the keys in the environment, as its callers have always called it.
///
/// # Errors
/// If there is no key, an id comes twice, or the cache cannot be opened. What befalls one item is in its verdict.
pub(crate) async fn judge_all(items: Vec<Item>) -> Result<BTreeMap<String, Verdict>, BoxError> {
    let settings = Settings { orgs: Orgs::from_env()?, patience: Duration::from_secs(600) };
    judge_all_with(items, settings, Path::new("judge.journal"), client::https()).await
}

/// What a test, or somebody with keys of their own, sets.
pub(crate) struct Settings {
    pub(crate) orgs: Orgs,
    /// How long a 429 is waited out while nothing at all is served.
    pub(crate) patience: Duration,
}

/// The same with these orgs, this cache and this HTTP client.
///
/// # Errors
/// As [`judge_all`].
pub(crate) async fn judge_all_with<C, B>(
    items: Vec<Item>,
    settings: Settings,
    cache: &Path,
    client: C,
) -> Result<BTreeMap<String, Verdict>, BoxError>
where
    C: Service<Request<Full<Bytes>>, Response = Response<B>, Error: Into<BoxError>, Future: Send + 'static>
        + Clone
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    let mut ids = BTreeSet::new();
    if let Some(item) = items.iter().find(|item| !ids.insert(&item.id)) {
        return Err(format!("the id {:?} comes twice: its verdicts could not be told apart", item.id).into());
    }
    if items.is_empty() {
        return Ok(BTreeMap::new());
    }
    let family = Family::of_model(MODEL);
    let stack = Stack::new(settings.orgs)
        .timeout(Duration::from_secs(60))
        // An answer without a score is asked for again; the org is none the worse for it, and it is not kept.
        .judge(JudgeLayer::new().validate(|_: &Parts, body: &Bytes| score(body).map(drop)))
        .retry(RateLimitRetryLayer::builder().max_attempts(3).patience(settings.patience).build()?);
    let bound = stack.live_bound(&family);
    let service = JournalLayer::new(FileStore::open(cache)?).layer(stack.build(client)?);

    let mut verdicts = BTreeMap::new();
    let first = items.iter().map(|item| (item.id.clone(), request(item, &family)));
    let mut left: Vec<(String, Request<Full<Bytes>>)> = vec![];
    for pass in 0..PASSES {
        // The first pass makes its requests as they are taken, the others have the few that came back.
        let again = std::mem::take(&mut left).into_iter();
        let todo: Box<dyn Iterator<Item = _> + Send + '_> =
            if pass == 0 { Box::new(first.clone()) } else { Box::new(again) };
        let mut drive = Drive::iter(service.clone(), todo, bound)?;
        let mut not_before = Instant::now() + Duration::from_secs(1);
        while let Some((id, result)) = drive.next().await {
            let error = match result {
                Ok(answer) => {
                    verdicts.insert(id, of_answer(answer).await?);
                    continue;
                }
                Err(DriveError::Service(JournalError::Inner(error))) => error,
                // The cache does not work: what could not be kept is not paid for.
                Err(error) => return Err(error.into_box()),
            };
            verdicts.insert(id.clone(), without_answer(&error));
            // Nothing is wrong with what was only refused. What was answered without a score has had its attempts.
            let again = error.is_rate_limited() || error.is_redrivable() && error.class() != Some(Class::Rejected);
            if let (true, RetryError::Exhausted(exhausted)) = (again, error) {
                not_before = exhausted.not_before.map_or(not_before, |at| at.max(not_before));
                left.push((id, exhausted.into_request()));
            }
        }
        if left.is_empty() {
            break;
        }
        sleep_until(not_before.min(Instant::now() + Duration::from_secs(60))).await;
    }
    Ok(verdicts)
}

/// The request of an item, the same at every call, so that the cache knows it.
fn request(item: &Item, family: &Family) -> Request<Full<Bytes>> {
    let text = format!("Question: {}\n\nAnswer: {}", item.question, item.answer);
    let body = json!({
        "model": MODEL,
        "max_tokens": 128,
        "system": RUBRIC,
        "messages": [{ "role": "user", "content": text }],
    });
    let mut request = Request::new(Full::new(Bytes::from(body.to_string())));
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::from_static("/v1/messages");
    request.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    request.extensions_mut().insert(family.clone());
    // Two items with one text are two draws, as they were.
    request.extensions_mut().insert(Salt(item.id.clone()));
    request
}

/// The score in an answer, if there is one.
fn score(body: &[u8]) -> Result<f64, BoxError> {
    let answer: Value = serde_json::from_slice(body)?;
    if answer["stop_reason"] != "end_turn" {
        return Err(format!("the answer stopped early: {}", answer["stop_reason"]).into());
    }
    let text = answer["content"][0]["text"].as_str().unwrap_or_default().trim_end();
    let digits = text.get(text.len().saturating_sub(2)..).filter(|end| end.len() == 2).unwrap_or_default();
    match u8::from_str_radix(digits, 16) {
        Ok(score) if score <= 0xef => Ok(f64::from(score) / f64::from(0xef)),
        _ => Err(format!("no score at the end of {text:?}").into()),
    }
}

async fn of_answer<B>(answer: Response<B>) -> Result<Verdict, BoxError>
where
    B: Body<Error: Into<BoxError>>,
{
    let (head, body) = answer.into_parts();
    let org = head.extensions.get::<Stamp>().and_then(|stamp| stamp.org.as_ref()).map(|org| org.name().to_owned());
    let body = body.collect().await.map_err(Into::into)?.to_bytes();
    let judged = match head.status.is_success() {
        true => score(&body).map_err(|error| error.to_string()),
        // A refusal for good comes as an answer.
        false => Err(format!("refused: {}", head.status)),
    };
    Ok(match judged {
        Ok(score) => Verdict { score: Some(score), category: Category::Ok, reason: None, org },
        Err(reason) => Verdict { score: None, category: Category::Error, reason: Some(reason), org: None },
    })
}

fn without_answer<E>(error: &RetryError<Request<Full<Bytes>>, E>) -> Verdict
where
    E: std::error::Error + 'static,
{
    let category = match error.class() {
        _ if error.is_rate_limited() => Category::RateLimitedExhausted,
        // It was answered each time, and no score could be read.
        Some(Class::Rejected) => Category::Error,
        _ if error.is_redrivable() => Category::TransportExhausted,
        _ => Category::Error,
    };
    Verdict { score: None, category, reason: Some(error.to_string()), org: None }
}
