//! What is read in an answer besides its status and hints. Pure.

use std::{error::Error as StdError, fmt, io};

use bytes::Bytes;
use http::{
    HeaderMap,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
    response::Parts,
};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{
    inband::{self, Found},
    layer::EmptyPolicy,
    sse::Events,
    watch::{is_events, is_plain},
};
use crate::outcome::{BoxError, Class, Error, Outcome, Usage};

/// What stands in place of a key.
pub(super) const SCRUBBED: &str = "***";

/// What it means that no answer came: [`Class::Transport`], unless the connection says that the request was not processed, or it is
/// the fault of this machine: it had no socket to spare for the call, or the client does not speak what the URL wants. No org is
/// to blame for those. Where no connection came about, nothing was sent.
pub(super) fn fault(error: BoxError) -> Error {
    let mut error = Error::from_box(error);
    if error.class() != Class::Transport {
        return error;
    }
    let (mut class, mut unsent, mut said) = (Class::Transport, false, None);
    let mut cause = error.source();
    while let Some(found) = cause {
        let io = found.downcast_ref::<io::Error>();
        if io.is_some_and(is_local) {
            class = Class::Local;
        } else if is_unprocessed(found) {
            class = Class::Unprocessed;
        } else if is_connect(found) && found.source().is_some_and(|why| why.to_string() == NOT_HTTP) {
            class = Class::Local;
            said = Some(WRONG_CLIENT.into());
        }
        unsent |= class != Class::Transport || io.is_some_and(is_unconnected) || is_connect(found);
        // What an `io::Error` was made from is not among its sources.
        let made_from =
            found.downcast_ref().and_then(io::Error::get_ref).map(|inner| inner as &(dyn StdError + 'static));
        cause = made_from.or_else(|| found.source());
    }
    let stamp = error.stamp_mut();
    stamp.unsent = unsent;
    stamp.said = said;
    if class != Class::Transport {
        stamp.outcome = Outcome::of(class);
    }
    error
}

/// What hyper-util's plain connector says of a URL that begins with `https`. Its error has no other mark.
const NOT_HTTP: &str = "invalid URL, scheme is not http";

const WRONG_CLIENT: &str = "the HTTP client speaks no https, and the org's base URL wants it: take `client::https` (feature `rustls`), or a client of your own that does";

/// Whether the other side says that it has not processed the request: HTTP/2's `REFUSED_STREAM`, or a `GOAWAY` that leaves it out
/// (h2 tells only those streams of it that were left out; those that were not, and are lost with the connection, see it broken).
#[cfg(feature = "http2")]
fn is_unprocessed(error: &(dyn StdError + 'static)) -> bool {
    error.downcast_ref::<h2::Error>().is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
    })
}

#[cfg(not(feature = "http2"))]
fn is_unprocessed(_: &(dyn StdError + 'static)) -> bool {
    false
}

/// Nobody was reached.
fn is_unconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
}

#[cfg(feature = "client")]
fn is_connect(error: &(dyn StdError + 'static)) -> bool {
    error.downcast_ref().is_some_and(hyper_util::client::legacy::Error::is_connect)
}

#[cfg(not(feature = "client"))]
fn is_connect(_: &(dyn StdError + 'static)) -> bool {
    false
}

fn is_local(error: &io::Error) -> bool {
    let out_of_files = match error.raw_os_error() {
        Some(code) if cfg!(unix) => code == 23 || code == 24, // ENFILE, EMFILE: the same numbers on every Unix
        Some(code) if cfg!(windows) => code == 10024,         // WSAEMFILE
        _ => false,
    };
    // A connection that finds no free local port.
    out_of_files || error.kind() == io::ErrorKind::AddrNotAvailable
}

/// The length the head announces.
pub(super) fn content_length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

/// What a gathered success says it used, in either dialect, and what it proves to be.
pub(super) fn answered(headers: &HeaderMap, body: &[u8], empty: EmptyPolicy) -> (Option<Usage>, Found) {
    let (usage, found) = if is_json(headers) {
        (usage(body), if is_plain(headers) { inband::json(body, empty) } else { Found::Good })
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

/// The tokens that JSON says were used; `None` where it does not say.
///
/// Only the `usage` object is taken apart; the rest is passed over without being built.
fn usage(body: &[u8]) -> Option<Usage> {
    usage_at_the_end(body).or_else(|| serde_json::from_slice::<Answered>(body).ok()?.usage)?.usage()
}

/// A refusal that is no JSON, in words: its status, and its text where that is one.
pub(super) fn plain(head: &Parts, body: &[u8]) -> String {
    let is_text = head.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    match std::str::from_utf8(body) {
        Ok(text) if is_text && !text.trim().is_empty() => format!("{}: {text}", head.status),
        _ => head.status.to_string(),
    }
}

/// The tokens a JSON success says it used, of which only the last [`NEAR`] bytes were kept.
pub(super) fn usage_near_the_end(end: &[u8]) -> Option<Usage> {
    usage_at_the_end(end)?.usage()
}

/// What one event of a stream says. Said of the whole answer so far, in the event itself (Anthropic's `message_delta`, OpenAI's
/// last chunk) or in the answer that it brings (Anthropic's `message_start`, OpenAI's `response.completed`).
pub(super) fn said_by_event(data: &[u8]) -> Option<Said> {
    let Event { own, brought } = serde_json::from_slice(data).ok()?;
    let mut said = brought.unwrap_or_default();
    said.update(own.unwrap_or_default());
    Some(said)
}

/// Both providers say the usage last or nearly so, after all that is long: looked for from the end it costs the same for an
/// answer of any length. `None` where it may not be a field of the answer itself: then the whole has to be read.
fn usage_at_the_end(body: &[u8]) -> Option<Said> {
    let near = &body[body.len().saturating_sub(NEAR)..];
    // Its own brace is the last but for those of what is told in detail within it.
    for brace in memchr::memrchr_iter(b'{', near) {
        let before = near[..brace].trim_ascii_end().strip_suffix(b":").map(<[u8]>::trim_ascii_end);
        let Some(before) = before.and_then(|before| before.strip_suffix(b"\"usage\"")) else { continue };
        // Within a string its quotes would be escaped; and no string ends right before a word.
        if !matches!(before.last(), Some(last) if *last != b'\\') {
            return None;
        }
        let mut values = serde_json::Deserializer::from_slice(&near[brace..]).into_iter();
        let said = values.next()?.ok()?;
        // What encloses it ends with the body, and nothing begins between: so it is the answer itself.
        let after = near[brace..].get(values.byte_offset()..)?.trim_ascii_end().strip_suffix(b"}")?;
        // Said once more after it, the last word counts; escaped, it may be that too.
        let again = memchr::memchr(b'\\', after).is_some() || memchr::memmem::find(after, b"\"usage\"").is_some();
        return (!again && memchr::memchr3(b'{', b'}', b'[', after).is_none()).then_some(said);
    }
    None
}

/// How far from the end the usage is looked for, in bytes.
pub(super) const NEAR: usize = 1024;

/// What a visitor does with whatever it is not there for: nothing.
macro_rules! nothing_else {
    ($said:expr; $($visit:ident: $kind:ty),+) => {
        $(
            fn $visit<E>(self, _: $kind) -> Result<Self::Value, E> {
                Ok($said)
            }
        )+

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($said)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
            while items.next_element::<IgnoredAny>()?.is_some() {}
            Ok($said)
        }
    };
}

/// An answer of which only the top-level `usage` is built; all else is passed over in place.
#[derive(Default)]
struct Answered {
    usage: Option<Said>,
}

impl<'de> Deserialize<'de> for Answered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Answered;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Answered, A::Error> {
                let mut usage = None;
                while let Some(name) = fields.next_key()? {
                    match name {
                        Name::Usage => usage = Some(fields.next_value()?),
                        _ => drop(fields.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Answered { usage })
            }

            nothing_else!(Answered::default(); visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_bool: bool, visit_str: &str);
        }

        deserializer.deserialize_any(Fields)
    }
}

/// One event of a stream: what it says itself, and what the answer says that it brings.
struct Event {
    own: Option<Said>,
    brought: Option<Said>,
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Event;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an event")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Event, A::Error> {
                let mut event = Event { own: None, brought: None };
                while let Some(name) = fields.next_key()? {
                    match name {
                        Name::Usage => event.own = Some(fields.next_value()?),
                        Name::Message | Name::Response => event.brought = fields.next_value::<Answered>()?.usage,
                        _ => drop(fields.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(event)
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// What a `usage` says. What is no count is as if it were not there, and whatever is no object says nothing.
#[derive(Default)]
pub(super) struct Said {
    input_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    output_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

impl Said {
    /// What is said later of the same answer counts instead: counts of a stream are of all of it so far.
    pub(super) fn update(&mut self, later: Said) {
        let Said { input_tokens, prompt_tokens, output_tokens, completion_tokens, cache_creation_input_tokens } = later;
        for (count, later) in [
            (&mut self.input_tokens, input_tokens),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.output_tokens, output_tokens),
            (&mut self.completion_tokens, completion_tokens),
            (&mut self.cache_creation_input_tokens, cache_creation_input_tokens),
        ] {
            *count = later.or(*count);
        }
    }

    pub(super) fn usage(&self) -> Option<Usage> {
        let input = self.input_tokens.or(self.prompt_tokens);
        let output = self.output_tokens.or(self.completion_tokens);
        if input.is_none() && output.is_none() {
            return None;
        }
        // Written to the cache means read from the input quota; read from the cache does not.
        let cached = self.cache_creation_input_tokens.unwrap_or(0);
        Some(Usage::new(input.unwrap_or(0).saturating_add(cached), output.unwrap_or(0)))
    }
}

impl<'de> Deserialize<'de> for Said {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Counts;

        impl<'de> Visitor<'de> for Counts {
            type Value = Said;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("counts of tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Said, A::Error> {
                let mut said = Said::default();
                while let Some(name) = fields.next_key()? {
                    let count = match name {
                        Name::InputTokens => &mut said.input_tokens,
                        Name::PromptTokens => &mut said.prompt_tokens,
                        Name::OutputTokens => &mut said.output_tokens,
                        Name::CompletionTokens => &mut said.completion_tokens,
                        Name::CacheCreationInputTokens => &mut said.cache_creation_input_tokens,
                        Name::Usage | Name::Message | Name::Response | Name::Other => {
                            let _: IgnoredAny = fields.next_value()?;
                            continue;
                        }
                    };
                    *count = fields.next_value::<Count>()?.0;
                }
                Ok(said)
            }

            nothing_else!(Said::default(); visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_bool: bool, visit_str: &str);
        }

        deserializer.deserialize_any(Counts)
    }
}

/// A count of tokens; `None` where it is none.
struct Count(Option<u64>);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;

        impl<'de> Visitor<'de> for Whole {
            type Value = Count;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a count")
            }

            fn visit_u64<E>(self, count: u64) -> Result<Count, E> {
                Ok(Count(Some(count)))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Count, A::Error> {
                while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Count(None))
            }

            nothing_else!(Count(None); visit_i64: i64, visit_f64: f64, visit_bool: bool, visit_str: &str);
        }

        deserializer.deserialize_any(Whole)
    }
}

/// A key, told apart without being copied.
enum Name {
    Usage,
    Message,
    Response,
    InputTokens,
    PromptTokens,
    OutputTokens,
    CompletionTokens,
    CacheCreationInputTokens,
    Other,
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Word;

        impl Visitor<'_> for Word {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                Ok(match name {
                    "usage" => Name::Usage,
                    "message" => Name::Message,
                    "response" => Name::Response,
                    "input_tokens" => Name::InputTokens,
                    "prompt_tokens" => Name::PromptTokens,
                    "output_tokens" => Name::OutputTokens,
                    "completion_tokens" => Name::CompletionTokens,
                    "cache_creation_input_tokens" => Name::CacheCreationInputTokens,
                    _ => Name::Other,
                })
            }
        }

        deserializer.deserialize_identifier(Word)
    }
}

/// `application/json`, and the types built on it (`application/problem+json`).
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let Some(kind) = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()) else { return false };
    let kind = kind.split(';').next().unwrap_or(kind).trim().as_bytes();
    kind.last_chunk::<5>().is_some_and(|end| end.eq_ignore_ascii_case(b"/json") || end.eq_ignore_ascii_case(b"+json"))
}

/// The body with every `secret` in it replaced; `None` if there is none. `secret` is not empty.
pub(super) fn scrub(body: &[u8], key: &str) -> Option<Bytes> {
    let mut clean = None;
    for key in spellings(key) {
        let body = clean.as_deref().unwrap_or(body);
        clean = without(body, key.as_bytes()).or(clean);
    }
    clean
}

/// A key as it is, and as JSON and Rust quote it.
pub(super) fn spellings(key: &str) -> Vec<String> {
    let json = serde_json::Value::from(key).to_string();
    let mut all = vec![key.to_owned(), json[1..json.len() - 1].to_owned(), key.escape_debug().to_string()];
    all.dedup();
    // The longest first: it may have a shorter one in it.
    all.sort_by_key(|key| std::cmp::Reverse(key.len()));
    all
}

fn without(body: &[u8], secret: &[u8]) -> Option<Bytes> {
    let mut clean = Vec::new();
    let mut rest = body;
    while let Some(at) = rest.windows(secret.len()).position(|window| window == secret) {
        clean.extend_from_slice(&rest[..at]);
        clean.extend_from_slice(SCRUBBED.as_bytes());
        rest = &rest[at + secret.len()..];
    }
    if clean.is_empty() {
        return None;
    }
    clean.extend_from_slice(rest);
    Some(Bytes::from(clean))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug)]
    struct Wrapped(io::Error);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("client error (Connect)")
        }
    }

    impl StdError for Wrapped {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&self.0)
        }
    }

    fn class(error: io::Error) -> Class {
        fault(Box::new(Wrapped(error))).class()
    }

    #[test]
    fn a_machine_out_of_sockets_is_local_and_any_other_fault_is_transport() {
        #[cfg(unix)]
        assert_eq!([23, 24].map(|code| class(io::Error::from_raw_os_error(code))), [Class::Local; 2]);
        assert_eq!(class(io::ErrorKind::AddrNotAvailable.into()), Class::Local);
        assert_eq!(class(io::ErrorKind::ConnectionRefused.into()), Class::Transport);
        let terminal = Error::new(Outcome::of(Class::Rejected), io::Error::from(io::ErrorKind::AddrNotAvailable));
        assert_eq!(fault(Box::new(terminal)).class(), Class::Rejected, "what is said already stays");
    }

    fn used(kind: &'static str, body: &str) -> Option<Usage> {
        let mut headers = HeaderMap::new();
        if !kind.is_empty() {
            headers.insert(CONTENT_TYPE, kind.parse().unwrap());
        }
        answered(&headers, body.as_bytes(), EmptyPolicy::Transient).0
    }

    #[test]
    fn usage_is_read_in_both_dialects() {
        let json = "application/json";
        for (body, expected) in [
            (r#"{"usage":{"input_tokens":10,"output_tokens":20}}"#, Some((10, 20))),
            (
                r#"{"usage":{"input_tokens":10,"cache_creation_input_tokens":5,"cache_read_input_tokens":900,"output_tokens":20}}"#,
                Some((15, 20)),
            ),
            (r#"{"usage":{"input_tokens":10,"cache_creation_input_tokens":null,"output_tokens":20}}"#, Some((10, 20))),
            (r#"{"id":"x","usage":{"prompt_tokens":7,"completion_tokens":8,"total_tokens":15},"z":[1]}"#, Some((7, 8))),
            (r#"{"usage":{"prompt_tokens":7,"total_tokens":7}}"#, Some((7, 0))),
            (r#"{"usage":{"output_tokens":3}}"#, Some((0, 3))),
            (r#"{"usage":{"output_tokens":3}}"#, Some((0, 3))),
            (r#"{"usage":{"input_tokens":18446744073709551615,"cache_creation_input_tokens":1}}"#, Some((u64::MAX, 0))),
            (r#"{"usage":{"input_tokens":-1,"output_tokens":1.5}}"#, None),
            (r#"{"usage":{}}"#, None),
            (r#"{"usage":null}"#, None),
            (r#"{"usage":[1]}"#, None),
            (r#"{"usage":7}"#, None),
            (r#"{"usage":{"input_tokens":[1,{}],"prompt_tokens":{"a":1},"output_tokens":2}}"#, Some((0, 2))),
            (r#"{"usage":{"input_tokens":"1","prompt_tokens":true,"completion_tokens":2}}"#, Some((0, 2))),
            // As far from the end as it may be, and in every place where it is not the answer's own.
            (r#"{"usage":{"input_tokens":1,"d":{"e":[2]},"output_tokens":2},"id":"x","n":null} "#, Some((1, 2))),
            (r#"{"usage":{"input_tokens":1},"tier":{"usage":{"input_tokens":9}}}"#, Some((1, 0))),
            (r#"{"usage":{"input_tokens":1},"tier":[{"usage":{"input_tokens":9}}]}"#, Some((1, 0))),
            (r#"{"usage":{"input_tokens":1},"text":"\"usage\":{\"input_tokens\":9}}"}"#, Some((1, 0))),
            (r#"{"usage":{"input_tokens":1},"text":"\\","a":"usage"}"#, Some((1, 0))),
            (r#"{"message":{"id":"x","usage":{"input_tokens":1}}}"#, None),
            (r#"{"usage":{"input_tokens":1},"usage":{"input_tokens":2}}"#, Some((2, 0))),
            // Said twice, the last word counts, whatever it is and however it is written.
            (r#"{"usage":{"input_tokens":1},"usage":null}"#, None),
            (r#"{"usage":{"input_tokens":1},"\u0075s\u0061ge" : 7,"id":"x"}"#, None),
            (r#"{"usage":7,"usage":{"input_tokens":1},"id":"x"}"#, Some((1, 0))),
            (r#"{"usage":"no","usage":{"input_tokens":1},"z":[]}"#, Some((1, 0))),
            (r#"{"usage":{"input_tokens":1},"id":"usage","text":"\u0075"}"#, Some((1, 0))),
            (r#"{"message":{"usage":{"input_tokens":1}}}"#, None),
            (r#"[{"usage":{"input_tokens":1}}]"#, None),
            (r#"{"usage":{"input_tokens":1"#, None),
            ("", None),
        ] {
            assert_eq!(used(json, body), expected.map(|(input, output)| Usage::new(input, output)), "{body}");
        }
    }

    #[test]
    fn usage_is_looked_for_in_json_alone() {
        let body = r#"{"usage":{"input_tokens":1,"output_tokens":2}}"#;
        for kind in ["application/json", "Application/JSON ; charset=utf-8", "application/vnd.x+json", "text/json"] {
            assert!(used(kind, body).is_some(), "{kind}");
        }
        for kind in ["", "text/event-stream", "text/plain", "application/jsonl", "application/x-ndjson"] {
            assert!(used(kind, body).is_none(), "{kind}");
        }
    }

    #[test]
    fn every_occurrence_of_a_secret_is_replaced_and_only_those() {
        for (body, expected) in [
            ("key sk-1 and sk-1", Some("key *** and ***")),
            ("sk-1", Some("***")),
            ("sk-1sk-1", Some("******")),
            ("ssk-1x", Some("s***x")),
            ("sk-", None),
            ("", None),
        ] {
            assert_eq!(scrub(body.as_bytes(), "sk-1").as_deref(), expected.map(str::as_bytes), "{body}");
        }
        assert_eq!(scrub(b"\xff\xfesk-1", "sk-1").as_deref(), Some(&b"\xff\xfe***"[..]), "whatever the bytes are");
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        use serde_json::Value;
        let word =
            prop::sample::select(vec!["usage", "input_tokens", "output_tokens", "prompt_tokens", "id", "\"usage\":{"]);
        let leaf = prop_oneof![
            any::<i32>().prop_map(Value::from),
            word.clone().prop_map(Value::from),
            "[a-z\"{}:\\\\,\\[]{0,9}".prop_map(Value::from),
            Just(Value::Null),
        ];
        leaf.prop_recursive(4, 40, 5, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((word.clone(), inner), 0..5)
                    .prop_map(|fields| fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
            ]
        })
    }

    /// An answer as a writer may set it down who says things twice, in escapes, and with blanks.
    fn written() -> impl Strategy<Value = String> {
        let blank = || prop::sample::select(vec!["", "", "", " ", "\n\t"]);
        let key = || {
            prop::sample::select(vec![
                r#""usage""#,
                r#""usage""#,
                r#""\u0075sage""#,
                r#""usag\u0065""#,
                r#""input_tokens""#,
                r#""input\u005ftokens""#,
                r#""output_tokens""#,
                r#""completion_tokens""#,
                r#""a""#,
                r#""\\usage""#,
                r#""\"usage""#,
                r#""u\"usage\"""#,
                r#"":{""#,
            ])
        };
        let leaf = prop_oneof![
            3 => (0..99u32).prop_map(|n| n.to_string()),
            1 => prop::sample::select(vec![
                "null", "true", "-1", "1.5", "1e3", "99999999999999999999", "-0", "{}", "[]", "[{}]",
                r#""usage""#, r#""\"usage\":{\"input_tokens\":9}}""#, r#""\u0022usage\u0022:{""#, r#"",""#, r#""}""#, r#""\\""#, r#""\u0000""#,
            ]).prop_map(str::to_owned),
        ];
        let object = move |value: BoxedStrategy<String>| {
            prop::collection::vec((key(), blank(), blank(), value, blank()), 0..5).prop_map(|fields| {
                let fields: Vec<_> = fields.iter().map(|(k, a, b, v, c)| format!("{c}{k}{a}:{b}{v}{c}")).collect();
                format!("{{{}}}", fields.join(","))
            })
        };
        let value = leaf.prop_recursive(2, 12, 4, move |inner| {
            prop_oneof![
                1 => prop::collection::vec(inner.clone(), 0..3).prop_map(|items| format!("[{}]", items.join(","))),
                4 => object(inner.boxed()),
            ]
        });
        let top = prop_oneof![1 => value.clone(), 9 => object(value.boxed())];
        let garbage = prop::sample::select(vec!["}", "x", "\0", "{}", ",", "]"]);
        let end = prop_oneof![9 => blank(), 1 => garbage];
        (top, end).prop_map(|(value, end)| value + end)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn however_an_answer_is_written_its_end_says_what_the_whole_says(text in written(), before in prop_oneof![3 => Just(0), 1 => 0..1_200_usize]) {
            let text = " ".repeat(before) + &text;
            let counts = |said: Option<Said>| said.map(|said| {
                (said.input_tokens, said.prompt_tokens, said.output_tokens, said.completion_tokens)
            });
            // What is no JSON need not be told from what is.
            if serde_json::from_str::<IgnoredAny>(&text).is_ok() {
                if let Some(found) = usage_at_the_end(text.as_bytes()) {
                    let whole = serde_json::from_str::<Answered>(&text).expect("it is JSON");
                    prop_assert_eq!(counts(Some(found)), counts(whole.usage));
                }
            }
        }

        #[test]
        fn what_is_found_from_the_end_is_what_the_whole_says(answer in json(), pretty: bool, before in 0_usize..1_200) {
            let text = if pretty { serde_json::to_string_pretty(&answer) } else { serde_json::to_string(&answer) }.unwrap();
            // Blanks at the end take the usage out of reach.
            let text = text + &" ".repeat(before);
            let count = |names: [&str; 2]| names.iter().find_map(|name| answer.get("usage")?.get(*name)?.as_u64());
            let (input, output) = (count(["input_tokens", "prompt_tokens"]), count(["output_tokens", "completion_tokens"]));
            let expected =
                (input.is_some() || output.is_some()).then(|| Usage::new(input.unwrap_or(0), output.unwrap_or(0)));
            prop_assert_eq!(used("application/json", &text), expected);
        }
    }
}
