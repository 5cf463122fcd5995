//! What a gathered answer says besides its status and hints, by the kind of body it has. Pure.

use http::{
    HeaderMap,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
    response::Parts,
};

use super::{
    inband::{self, Found},
    layer::EmptyPolicy,
    sse::Events,
    usage,
    watch::{is_events, is_plain},
};
use crate::outcome::Usage;

/// The length the head announces.
pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// What a gathered success says it used, in either dialect, and what it proves to be.
pub(super) fn answered(headers: &HeaderMap, body: &[u8], empty: EmptyPolicy) -> (Option<Usage>, Found) {
    let (usage, found) = if is_json(headers) {
        (usage::usage(body), if is_plain(headers) { inband::json(body, empty) } else { Found::Good })
    } else if is_events(headers) {
        let mut events = Events::new();
        events.feed(body);
        events.finish();
        (events.usage(), if is_plain(headers) { events.found(empty) } else { Found::Good })
    } else {
        (None, Found::Good)
    };
    (usage, found)
}

/// A refusal that is no JSON, in words: its status, and its text where that is one.
pub(super) fn plain(head: &Parts, body: &[u8]) -> String {
    let is_text = head.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    match std::str::from_utf8(body) {
        Ok(text) if is_text && !text.trim().is_empty() => format!("{}: {text}", head.status),
        _ => head.status.to_string(),
    }
}

/// `application/json`, and the types built on it (`application/problem+json`).
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return false };
    // As nearly all have it.
    if kind == "application/json" {
        return true;
    }
    let Ok(kind) = kind.to_str() else { return false };
    let kind = kind.split(';').next().unwrap_or(kind).trim().as_bytes();
    kind.last_chunk::<5>().is_some_and(|end| end.eq_ignore_ascii_case(b"/json") || end.eq_ignore_ascii_case(b"+json"))
}
