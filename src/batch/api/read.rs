//! Reads answers: statuses, words of refusals, ids, dates, counts. Pure.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, header::CONTENT_TYPE};
use serde_json::{Value, value::RawValue};

use super::{ApiError, Match, Page, Remote, SKEW, Submission, body::Members, wire};
use crate::outcome::Stamp;

/// A batch that is given longer than this has a date that cannot be right: the providers give a day.
const WINDOW_MOST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Words of others are cut here.
const WORDS_MOST: usize = 300;

const BOM: &[u8] = b"\xef\xbb\xbf";

/// The JSON of a success, or what the refusal means.
pub(super) fn success(answer: &Response<Bytes>) -> Result<Value, ApiError> {
    match answer.status() {
        status if status.is_success() => {
            let body = answer.body().strip_prefix(BOM).unwrap_or(answer.body());
            serde_json::from_slice(body).map_err(|error| {
                let kind = answer.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("no type");
                ApiError::Unreadable(format!("{} bytes of {kind}: {error}", answer.body().len()))
            })
        }
        StatusCode::NOT_FOUND => Err(ApiError::NotFound),
        StatusCode::PAYLOAD_TOO_LARGE => Err(ApiError::TooLarge),
        status => Err(ApiError::Refused { status, said: said(answer) }),
    }
}

/// The words of a refusal: the judge's, which have no key in them; else type and code alone, since a message may quote one.
fn said(answer: &Response<Bytes>) -> String {
    if let Some(said) = answer.extensions().get::<Stamp>().and_then(|stamp| stamp.said.as_deref()) {
        return said.to_owned();
    }
    let error = error_of(answer);
    let words = ["type", "code"].into_iter().filter_map(|name| text(&error[name]));
    short(&words.collect::<Vec<_>>().join(": "))
}

/// The `error` of a refusal's body, if there is one.
pub(super) fn error_of(answer: &Response<Bytes>) -> Value {
    let body = serde_json::from_slice::<Value>(answer.body()).ok();
    body.and_then(|mut body| body.get_mut("error").map(Value::take)).unwrap_or_default()
}

/// On one line, and not longer than anybody reads.
pub(super) fn short(words: &str) -> String {
    words.chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS_MOST).collect()
}

/// A text that is not empty.
pub(super) fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

/// An id, which will be part of a path.
pub(super) fn id(value: &Value) -> Option<String> {
    text(value).filter(|id| id.len() <= wire::ID_MOST && !id.contains(char::is_control)).map(str::to_owned)
}

/// The id of what was asked for; without one nothing else is of use.
pub(super) fn own_id(value: &Value) -> Result<String, ApiError> {
    id(&value["id"]).ok_or_else(|| ApiError::Unreadable("it has no `id`".to_owned()))
}

/// When the provider gives up, if that can be.
pub(super) fn expires_at(created: Option<SystemTime>, expires: Option<SystemTime>) -> Option<SystemTime> {
    let window = expires?.duration_since(created?).ok()?;
    expires.filter(|_| !window.is_zero() && window <= WINDOW_MOST)
}

/// Seconds since 1970, whole or not.
pub(super) fn unix(value: &Value) -> Option<SystemTime> {
    let since = Duration::try_from_secs_f64(value.as_f64()?).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(since)
}

/// A count: 0 if it is absent, `None` if it is none.
pub(super) fn count(value: &Value) -> Option<u64> {
    if value.is_null() { Some(0) } else { value.as_u64() }
}

/// A page in the form that both providers have.
pub(super) fn page(answer: &Response<Bytes>, read: fn(&Value) -> Result<Remote, ApiError>) -> Result<Page, ApiError> {
    let body = success(answer)?;
    let Value::Array(entries) = &body["data"] else {
        return Err(ApiError::Unreadable("it has no list `data`".to_owned()));
    };
    let batches = entries.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let last = || id(&body["last_id"]).or_else(|| batches.last().map(|last| last.id.clone()));
    let next = if body["has_more"] == true { last() } else { None };
    Ok(Page { batches, next })
}

/// Whether it has as many rows and is of the time of the submission.
pub(super) fn resembles(remote: &Remote, submission: &Submission<'_>) -> Match {
    let since = submission.since.checked_sub(SKEW).unwrap_or(SystemTime::UNIX_EPOCH);
    let until = submission.until.checked_add(SKEW);
    let is_other = |created: SystemTime| created < since || until.is_some_and(|until| created > until);
    // At first they may all be zero.
    let counts = remote.counts.filter(|counts| counts.total() > 0);
    let other_size = counts.is_some_and(|counts| counts.total() != submission.rows as u64);
    if remote.created_at.is_some_and(is_other) || other_size { Match::No } else { Match::Perhaps }
}

/// A line of results as an object, with the custom id of the row; `None` if it is blank.
pub(super) fn row(line: &[u8]) -> Result<Option<(String, Members<'_>)>, ApiError> {
    let line = line.strip_prefix(BOM).unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return Ok(None);
    }
    let members = serde_json::from_slice::<Members<'_>>(line)
        .map_err(|error| ApiError::Unreadable(format!("a line of {} bytes: {error}", line.len())))?;
    let custom_id = members.get("custom_id").and_then(|id| serde_json::from_str::<String>(id.get()).ok());
    match custom_id.filter(|id| !id.is_empty()) {
        Some(custom_id) => Ok(Some((custom_id, members))),
        None => Err(ApiError::Unreadable("a line without a `custom_id`".to_owned())),
    }
}

/// An object's members, if it is one.
pub(super) fn members<'a>(value: Option<&&'a RawValue>) -> Option<Members<'a>> {
    serde_json::from_str(value?.get()).ok()
}

/// A text that is not empty.
pub(super) fn raw_text(value: Option<&&RawValue>) -> Option<String> {
    serde_json::from_str::<String>(value?.get()).ok().filter(|text| !text.is_empty())
}

/// The answer that a direct call would have got.
pub(super) fn answer(status: StatusCode, body: Bytes, id_name: HeaderName, id: Option<String>) -> Response<Bytes> {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, wire::JSON);
    if let Some(id) = id.and_then(|id| HeaderValue::try_from(id).ok()) {
        answer.headers_mut().insert(id_name, id);
    }
    answer
}
