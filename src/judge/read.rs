//! What is read in an answer besides its status and hints. Pure.

use std::collections::HashMap;

use bytes::Bytes;
use http::{
    HeaderMap,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
};
use serde_json::value::{RawValue, Value};

use crate::outcome::Usage;

/// What stands in place of a key.
const SCRUBBED: &[u8] = b"***";

/// The length the head announces.
pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// The tokens a success says it used, in either dialect; `None` where it is not JSON or does not say.
///
/// Only the `usage` object is taken apart; the rest is passed over without being built.
pub(super) fn usage(headers: &HeaderMap, body: &[u8]) -> Option<Usage> {
    if !is_json(headers) {
        return None;
    }
    let answer: HashMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
    let usage: HashMap<String, Value> = serde_json::from_str(answer.get("usage")?.get()).ok()?;
    let count = |names: [&str; 2]| names.iter().find_map(|name| usage.get(*name)?.as_u64());
    let input = count(["input_tokens", "prompt_tokens"]);
    let output = count(["output_tokens", "completion_tokens"]);
    if input.is_none() && output.is_none() {
        return None;
    }
    // Written to the cache means read from the input quota; read from the cache does not.
    let cached = usage.get("cache_creation_input_tokens").and_then(Value::as_u64).unwrap_or(0);
    Some(Usage::new(input.unwrap_or(0).saturating_add(cached), output.unwrap_or(0)))
}

/// `application/json`, and the types built on it (`application/problem+json`).
fn is_json(headers: &HeaderMap) -> bool {
    let Some(kind) = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()) else { return false };
    let kind = kind.split(';').next().unwrap_or(kind).trim().to_ascii_lowercase();
    kind.ends_with("/json") || kind.ends_with("+json")
}

/// The body with every `secret` in it replaced; `None` if there is none. `secret` is not empty.
pub(super) fn scrub(body: &[u8], secret: &[u8]) -> Option<Bytes> {
    let mut clean = Vec::new();
    let mut rest = body;
    while let Some(at) = rest.windows(secret.len()).position(|window| window == secret) {
        clean.extend_from_slice(&rest[..at]);
        clean.extend_from_slice(SCRUBBED);
        rest = &rest[at + secret.len()..];
    }
    if clean.is_empty() {
        return None;
    }
    clean.extend_from_slice(rest);
    Some(Bytes::from(clean))
}
