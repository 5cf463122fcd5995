//! The two dialects: which headers and bodies an answer has.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, DATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::bucket::{PerResource, View};
use super::config::{Headers, RetryAfter};
use super::marker::Marker;
use crate::org::Dialect;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_ORGANIZATION_ID: HeaderName = HeaderName::from_static("anthropic-organization-id");
const OPENAI_ORGANIZATION: HeaderName = HeaderName::from_static("openai-organization");
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const EVENTS: HeaderValue = HeaderValue::from_static("text/event-stream");
const LINES: HeaderValue = HeaderValue::from_static("application/x-jsonl");

/// Limit, remaining, reset of one resource.
type Trio = [HeaderName; 3];

macro_rules! trio {
    ($limit:literal, $remaining:literal, $reset:literal) => {
        [HeaderName::from_static($limit), HeaderName::from_static($remaining), HeaderName::from_static($reset)]
    };
}

const A_REQUESTS: Trio = trio!(
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset"
);
const A_INPUT: Trio = trio!(
    "anthropic-ratelimit-input-tokens-limit",
    "anthropic-ratelimit-input-tokens-remaining",
    "anthropic-ratelimit-input-tokens-reset"
);
const A_OUTPUT: Trio = trio!(
    "anthropic-ratelimit-output-tokens-limit",
    "anthropic-ratelimit-output-tokens-remaining",
    "anthropic-ratelimit-output-tokens-reset"
);
const A_TOKENS: Trio = trio!(
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset"
);
const O_REQUESTS: Trio =
    trio!("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests");
const O_TOKENS: Trio = trio!("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens");

/// The key a request carries.
pub(super) fn key(dialect: Dialect, headers: &HeaderMap) -> Option<&[u8]> {
    match dialect {
        Dialect::Anthropic => headers.get(X_API_KEY).map(HeaderValue::as_bytes),
        Dialect::OpenAi => headers.get(AUTHORIZATION)?.as_bytes().strip_prefix(b"Bearer "),
    }
}

/// What the provider reads of a request body. A body that is no JSON, or strange JSON, is taken for one that names
/// nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked<'a> {
    #[serde(borrow)]
    pub(super) model: Cow<'a, str>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    pub(super) stream: bool,
    stream_options: Option<StreamOptions>,
    #[serde(deserialize_with = "marker")]
    metadata: Option<Marker>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

/// The marker in `metadata`. Metadata of any other shape names none.
fn marker<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Marker>, D::Error> {
    #[derive(Deserialize)]
    struct Metadata {
        simulate: String,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Read {
        Marked(Metadata),
        Other(IgnoredAny),
    }
    Ok(match Read::deserialize(deserializer)? {
        Read::Marked(metadata) => Some(Marker::named(&metadata.simulate)),
        Read::Other(_) => None,
    })
}

impl<'a> Asked<'a> {
    pub(super) fn read(body: &'a [u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    pub(super) fn max_tokens(&self) -> Option<u64> {
        self.max_tokens.or(self.max_completion_tokens)
    }

    pub(super) fn marker(&self) -> Option<Marker> {
        self.metadata
    }

    /// Whether a stream in OpenAI's dialect is to tell what it used.
    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage)
    }
}

/// How many inputs an embeddings request has: a list of texts or of token lists is many, all else is one.
pub(super) fn inputs(body: &[u8]) -> usize {
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    match value["input"].as_array() {
        Some(list) if !list.first().is_some_and(serde_json::Value::is_number) => list.len(),
        _ => 1,
    }
}

/// Which headers an answer gets, whatever its status.
#[derive(Debug)]
pub(super) struct Head<'a> {
    pub(super) dialect: Dialect,
    pub(super) headers: Headers,
    pub(super) round_tokens: bool,
    /// Names neither the input tokens nor a sum with them.
    pub(super) hide_input: bool,
    pub(super) wall: SystemTime,
    pub(super) org: Option<(&'a HeaderValue, usize)>,
    pub(super) number: u64,
    pub(super) views: PerResource<Option<View>>,
}

impl Head<'_> {
    pub(super) fn write(&self, content: HeaderValue) -> HeaderMap {
        let mut map = HeaderMap::with_capacity(20);
        map.insert(CONTENT_TYPE, content);
        map.insert(DATE, text(&httpdate::fmt_http_date(self.wall)));
        let (org_name, id_name) = match self.dialect {
            Dialect::Anthropic => (ANTHROPIC_ORGANIZATION_ID, REQUEST_ID),
            Dialect::OpenAi => (OPENAI_ORGANIZATION, X_REQUEST_ID),
        };
        let place = self.org.map_or(u64::MAX, |(_, place)| place as u64);
        map.insert(id_name, text(&format!("req_{:08x}{:012x}", place & 0xffff_ffff, self.number)));
        if let Some((id, _)) = self.org {
            map.insert(org_name, id.clone());
        }
        if self.headers == Headers::None {
            return map;
        }
        let [requests, mut input, mut output, mut both] = self.views;
        match self.dialect {
            Dialect::Anthropic => {
                if self.round_tokens {
                    for view in [&mut input, &mut output, &mut both].into_iter().flatten() {
                        view.remaining = (view.remaining + 500) / 1000 * 1000;
                    }
                }
                self.write_trio(&mut map, A_REQUESTS, requests);
                if self.headers == Headers::All {
                    self.write_trio(&mut map, A_OUTPUT, output);
                    if self.hide_input {
                        return map;
                    }
                    self.write_trio(&mut map, A_INPUT, input);
                    let sum = match (input, output) {
                        (Some(i), Some(o)) => Some(View {
                            limit: i.limit + o.limit,
                            remaining: i.remaining + o.remaining,
                            full_in: i.full_in.max(o.full_in),
                        }),
                        (one, other) => one.or(other),
                    };
                    self.write_trio(&mut map, A_TOKENS, both.or(sum));
                }
            }
            Dialect::OpenAi => {
                self.write_trio(&mut map, O_REQUESTS, requests);
                if self.headers == Headers::All {
                    let scarcer = match (input, output) {
                        (Some(i), Some(o)) => {
                            let output_is = u128::from(o.remaining) * u128::from(i.limit)
                                < u128::from(i.remaining) * u128::from(o.limit);
                            Some(if output_is { o } else { i })
                        }
                        (one, other) => one.or(other),
                    };
                    self.write_trio(&mut map, O_TOKENS, both.or(scarcer));
                }
            }
        }
        map
    }

    fn write_trio(&self, map: &mut HeaderMap, names: Trio, view: Option<View>) {
        let Some(view) = view else { return };
        let [limit, remaining, reset] = names;
        map.insert(limit, view.limit.into());
        map.insert(remaining, view.remaining.into());
        let value = match self.dialect {
            Dialect::Anthropic => {
                let at = up_to_second(self.wall + view.full_in);
                format!("{}", humantime::format_rfc3339_seconds(at))
            }
            Dialect::OpenAi => go_duration(view.full_in),
        };
        map.insert(reset, text(&value));
    }
}

/// Adds what a 429 says about when to come back.
pub(super) fn write_wait(map: &mut HeaderMap, form: RetryAfter, wait: Duration, wall: SystemTime) {
    let ms = up_to_ms(wait);
    match form {
        RetryAfter::None => {}
        RetryAfter::Seconds => {
            map.insert(RETRY_AFTER, ms.div_ceil(1000).max(1).into());
        }
        RetryAfter::Fraction => {
            map.insert(RETRY_AFTER, text(&format!("{}.{:03}", ms / 1000, ms % 1000)));
        }
        RetryAfter::Ms => {
            map.insert(RETRY_AFTER_MS, ms.into());
        }
        RetryAfter::HttpDate => {
            map.insert(RETRY_AFTER, text(&httpdate::fmt_http_date(up_to_second(wall + wait))));
        }
        RetryAfter::Zero => {
            map.insert(RETRY_AFTER, HeaderValue::from_static("0"));
        }
    }
}

fn text(value: &str) -> HeaderValue {
    HeaderValue::from_str(value).expect("dates, numbers and hex digits are visible ASCII")
}

fn up_to_ms(d: Duration) -> u64 {
    u64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

fn up_to_second(at: SystemTime) -> SystemTime {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs() + u64::from(since.subsec_nanos() > 0))
}

/// As Go prints a duration, rounded up to a millisecond: `0s`, `20ms`, `1.5s`, `6m0s`, `1h0m0s`.
fn go_duration(d: Duration) -> String {
    let ms = up_to_ms(d);
    if ms > 0 && ms < 1000 {
        return format!("{ms}ms");
    }
    let mut out = String::new();
    let (hours, minutes) = (ms / 3_600_000, ms / 60_000 % 60);
    // Writing to a String cannot fail.
    let _ = match (hours, minutes) {
        (0, 0) => Ok(()),
        (0, _) => write!(out, "{minutes}m"),
        _ => write!(out, "{hours}h{minutes}m"),
    };
    let _ = write!(out, "{}", ms % 60_000 / 1000);
    let fraction = ms % 1000;
    if fraction > 0 {
        let digits = format!("{fraction:03}");
        let _ = write!(out, ".{}", digits.trim_end_matches('0'));
    }
    out.push('s');
    out
}

/// An error of the provider's own.
#[derive(Clone, Debug)]
pub(super) struct Failure<'a> {
    pub(super) status: StatusCode,
    /// Anthropic's `error.type`.
    kind: &'static str,
    /// OpenAI's `error.type` and `error.code`.
    openai: (&'static str, &'static str),
    message: Cow<'a, str>,
}

impl<'a> Failure<'a> {
    pub(super) fn new(
        status: StatusCode,
        kind: &'static str,
        openai: (&'static str, &'static str),
        message: impl Into<Cow<'a, str>>,
    ) -> Self {
        Failure { status, kind, openai, message: message.into() }
    }

    /// A request that is wrong, in the provider's words.
    pub(super) fn invalid(status: StatusCode, message: impl Into<Cow<'a, str>>) -> Self {
        Failure::new(status, "invalid_request_error", ("invalid_request_error", "invalid_value"), message)
    }

    pub(super) fn too_large(message: impl Into<Cow<'a, str>>) -> Self {
        let openai = ("invalid_request_error", "request_too_large");
        Failure::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", openai, message)
    }

    pub(super) fn unauthorised() -> Self {
        Failure {
            status: StatusCode::UNAUTHORIZED,
            kind: "authentication_error",
            openai: ("invalid_request_error", "invalid_api_key"),
            message: "invalid api key".into(),
        }
    }

    pub(super) fn refused(what: &str) -> Self {
        Failure {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: "rate_limit_error",
            openai: ("requests", "rate_limit_exceeded"),
            message: format!("This request would exceed your organization's rate limit: {what}").into(),
        }
    }

    pub(super) fn overloaded(status: u16) -> Self {
        Failure {
            status: StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
            kind: "overloaded_error",
            openai: ("server_error", "server_is_overloaded"),
            message: "Overloaded".into(),
        }
    }

    pub(super) fn internal() -> Self {
        Failure {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "api_error",
            openai: ("server_error", "server_error"),
            message: "Internal server error".into(),
        }
    }

    pub(super) fn not_found() -> Self {
        Failure {
            status: StatusCode::NOT_FOUND,
            kind: "not_found_error",
            openai: ("invalid_request_error", "unknown_url"),
            message: "Not found".into(),
        }
    }

    pub(super) fn wrong_method() -> Self {
        Failure { status: StatusCode::METHOD_NOT_ALLOWED, message: "Method Not Allowed".into(), ..Self::not_found() }
    }

    pub(super) fn body(&self, dialect: Dialect) -> Bytes {
        let message = quoted(&self.message);
        match dialect {
            Dialect::Anthropic => {
                let kind = self.kind;
                format!(r#"{{"type":"error","error":{{"type":"{kind}","message":{message}}}}}"#)
            }
            Dialect::OpenAi => {
                let (kind, code) = self.openai;
                format!(r#"{{"error":{{"message":{message},"type":"{kind}","param":null,"code":"{code}"}}}}"#)
            }
        }
        .into()
    }
}

/// A successful answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Success<'a> {
    pub(super) dialect: Dialect,
    pub(super) embeddings: bool,
    pub(super) model: &'a str,
    /// How many inputs were to be embedded.
    pub(super) inputs: usize,
    /// Of the item.
    pub(super) item: u64,
    pub(super) number: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    /// The answer was cut by `max_tokens`.
    pub(super) cut: bool,
    pub(super) empty: bool,
    /// The model declines.
    pub(super) refusal: bool,
    /// A stream in OpenAI's dialect tells what it used.
    pub(super) include_usage: bool,
}

/// An answer that turns out to be an error: the one event of a stream that says so.
pub(super) fn error_event(dialect: Dialect) -> Bytes {
    let data = Failure::overloaded(529).body(dialect);
    let data = String::from_utf8_lossy(&data);
    match dialect {
        Dialect::Anthropic => event("error", &data),
        Dialect::OpenAi => format!("data: {data}\n\n"),
    }
    .into()
}

impl Success<'_> {
    pub(super) const CONTENT: HeaderValue = JSON;
    pub(super) const EVENTS: HeaderValue = EVENTS;
    pub(super) const LINES: HeaderValue = LINES;

    fn stop(&self) -> &'static str {
        // What is cut has something in it.
        match (self.dialect, self.cut && !self.empty) {
            (Dialect::Anthropic, _) if self.refusal => "refusal",
            (Dialect::Anthropic, true) => "max_tokens",
            (Dialect::Anthropic, false) => "end_turn",
            (Dialect::OpenAi, true) => "length",
            (Dialect::OpenAi, false) => "stop",
        }
    }

    fn content(&self) -> String {
        match self.refusal {
            true => "I cannot help with that.".to_owned(),
            false => format!("simulated answer {:016x}", self.item),
        }
    }

    pub(super) fn json(&self) -> Bytes {
        let Success { item, number, input_tokens: input, output_tokens: output, .. } = *self;
        let (model, stop, total) = (quoted(self.model), self.stop(), input + output);
        let full = !self.empty;
        let content = self.content();
        match self.dialect {
            _ if self.embeddings => {
                let count = if full { self.inputs } else { 0 };
                let mut out = String::from(r#"{"object":"list","data":["#);
                for i in 0..count {
                    let comma = if i > 0 { "," } else { "" };
                    // Four numbers, of which the first two tell item and index apart.
                    let first = (item >> 40) as f64 / f64::from(1 << 24);
                    let _ = write!(
                        out,
                        r#"{comma}{{"object":"embedding","index":{i},"embedding":[{first},{i}.0,0.5,-0.5]}}"#
                    );
                }
                let _ = write!(
                    out,
                    r#"],"model":{model},"usage":{{"prompt_tokens":{input},"total_tokens":{input}}}}}"#
                );
                out
            }
            Dialect::Anthropic => {
                let content = match full {
                    true => format!(r#"{{"type":"text","text":"{content}"}}"#),
                    false => String::new(),
                };
                format!(
                    r#"{{"id":"msg_{number:016x}","type":"message","role":"assistant","model":{model},"content":[{content}],"stop_reason":"{stop}","stop_sequence":null,"usage":{{"input_tokens":{input},"output_tokens":{output}}}}}"#
                )
            }
            Dialect::OpenAi => {
                let message = match self.refusal {
                    true => format!(r#""content":null,"refusal":"{content}""#),
                    false => format!(r#""content":"{content}""#),
                };
                let choice = match full {
                    true => {
                        format!(
                            r#"{{"index":0,"message":{{"role":"assistant",{message}}},"finish_reason":"{stop}"}}"#
                        )
                    }
                    false => String::new(),
                };
                format!(
                    r#"{{"id":"chatcmpl-{number:016x}","object":"chat.completion","created":0,"model":{model},"choices":[{choice}],"usage":{{"prompt_tokens":{input},"completion_tokens":{output},"total_tokens":{total}}}}}"#
                )
            }
        }
        .into()
    }

    /// The same answer in server-sent events: what is sent first, some deltas, what is sent last.
    pub(super) fn events(&self) -> Vec<Bytes> {
        let Success { number, input_tokens: input, output_tokens: output, .. } = *self;
        let (model, stop, total) = (quoted(self.model), self.stop(), input + output);
        let content = self.content();
        let words: Vec<&str> = if self.empty { Vec::new() } else { content.split_inclusive(' ').collect() };
        let words = &words[..];
        let mut events = Vec::with_capacity(words.len() + 2);
        match self.dialect {
            Dialect::Anthropic => {
                let mut first = event(
                    "message_start",
                    &format!(
                        r#"{{"type":"message_start","message":{{"id":"msg_{number:016x}","type":"message","role":"assistant","model":{model},"content":[],"stop_reason":null,"stop_sequence":null,"usage":{{"input_tokens":{input},"output_tokens":1}}}}}}"#
                    ),
                );
                let mut last = String::new();
                if !self.empty {
                    first += &event(
                        "content_block_start",
                        r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
                    );
                    last += &event("content_block_stop", r#"{"type":"content_block_stop","index":0}"#);
                }
                events.push(first.into());
                for word in words {
                    let delta = format!(
                        r#"{{"type":"content_block_delta","index":0,"delta":{{"type":"text_delta","text":"{word}"}}}}"#
                    );
                    events.push(event("content_block_delta", &delta).into());
                }
                last += &event(
                    "message_delta",
                    &format!(
                        r#"{{"type":"message_delta","delta":{{"stop_reason":"{stop}","stop_sequence":null}},"usage":{{"output_tokens":{output}}}}}"#
                    ),
                );
                last += &event("message_stop", r#"{"type":"message_stop"}"#);
                events.push(last.into());
            }
            Dialect::OpenAi => {
                // Where usage is asked for, every chunk has the field, and one more without choices says it.
                let none = if self.include_usage { r#","usage":null"# } else { "" };
                let chunk = |choices: &str, usage: &str| {
                    format!(
                        "data: {{\"id\":\"chatcmpl-{number:016x}\",\"object\":\"chat.completion.chunk\",\"created\":0,\"model\":{model},\"choices\":[{choices}]{usage}}}\n\n"
                    )
                };
                let choice = |delta: &str, finish: &str| {
                    format!(r#"{{"index":0,"delta":{{{delta}}},"finish_reason":{finish}}}"#)
                };
                if self.empty {
                    events.push(chunk("", none).into());
                } else {
                    events.push(chunk(&choice(r#""role":"assistant","content":"""#, "null"), none).into());
                }
                for word in words {
                    let field = if self.refusal { "refusal" } else { "content" };
                    events.push(chunk(&choice(&format!(r#""{field}":"{word}""#), "null"), none).into());
                }
                let finish = if self.empty { String::new() } else { choice("", &format!("\"{stop}\"")) };
                let mut last = chunk(&finish, none);
                if self.include_usage {
                    let usage = format!(
                        r#","usage":{{"prompt_tokens":{input},"completion_tokens":{output},"total_tokens":{total}}}"#
                    );
                    last += &chunk("", &usage);
                }
                events.push((last + "data: [DONE]\n\n").into());
            }
        }
        events
    }
}

fn event(name: &str, data: &str) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_are_written_as_go_writes_them() {
        for (ms, text) in [
            (0, "0s"),
            (1, "1ms"),
            (20, "20ms"),
            (999, "999ms"),
            (1_000, "1s"),
            (1_050, "1.05s"),
            (1_001, "1.001s"),
            (59_998, "59.998s"),
            (360_000, "6m0s"),
            (3_600_000, "1h0m0s"),
            (7_261_500, "2h1m1.5s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(ms)), text);
        }
        assert_eq!(go_duration(Duration::from_micros(19_001)), "20ms", "rounded up");
    }
}
