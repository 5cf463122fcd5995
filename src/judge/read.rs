//! What is read in an answer besides its status and hints. Pure.

use std::{error::Error as StdError, fmt, io};

use bytes::Bytes;
use http::{
    HeaderMap,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use crate::outcome::{BoxError, Class, Error, Outcome, Usage};

/// What stands in place of a key.
const SCRUBBED: &[u8] = b"***";

/// What it means that no answer came: [`Class::Transport`], unless this machine had no socket to spare for the call. No org is
/// to blame for that.
pub(super) fn fault(error: BoxError) -> Error {
    let mut error = Error::from_box(error);
    let mut cause = error.source();
    while let Some(found) = cause {
        if error.class() == Class::Transport && found.downcast_ref().is_some_and(is_local) {
            error.stamp_mut().outcome = Outcome::of(Class::Local);
            break;
        }
        // What an `io::Error` was made from is not among its sources.
        let made_from =
            found.downcast_ref().and_then(io::Error::get_ref).map(|inner| inner as &(dyn StdError + 'static));
        cause = made_from.or_else(|| found.source());
    }
    error
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

/// The tokens a success says it used, in either dialect; `None` where it is not JSON or does not say.
///
/// Only the `usage` object is taken apart; the rest is passed over without being built.
pub(super) fn usage(headers: &HeaderMap, body: &[u8]) -> Option<Usage> {
    if !is_json(headers) {
        return None;
    }
    let answer: Answered = serde_json::from_slice(body).ok()?;
    let usage = answer.usage?;
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

/// An answer of which only the top-level `usage` is built; all else is passed over in place.
struct Answered {
    usage: Option<Value>,
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
                while let Some(IsUsage(is_usage)) = fields.next_key()? {
                    if is_usage {
                        usage = Some(fields.next_value()?);
                    } else {
                        let _: IgnoredAny = fields.next_value()?;
                    }
                }
                Ok(Answered { usage })
            }
        }

        deserializer.deserialize_map(Fields)
    }
}

/// A key, of which only that is of interest: so no key is copied.
struct IsUsage(bool);

impl<'de> Deserialize<'de> for IsUsage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = IsUsage;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<IsUsage, E> {
                Ok(IsUsage(name == "usage"))
            }
        }

        deserializer.deserialize_identifier(Name)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

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
        usage(&headers, body.as_bytes())
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
            assert_eq!(scrub(body.as_bytes(), b"sk-1").as_deref(), expected.map(str::as_bytes), "{body}");
        }
        assert_eq!(scrub(b"\xff\xfesk-1", b"sk-1").as_deref(), Some(&b"\xff\xfe***"[..]), "whatever the bytes are");
    }
}
