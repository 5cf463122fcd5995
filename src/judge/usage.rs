//! The tokens that an answer says it used. Pure.

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::counts;
use crate::outcome::Usage;

/// The tokens that JSON says were used; `None` where it does not say.
///
/// Only the `usage` object is taken apart; the rest is passed over without being built.
pub(super) fn usage(body: &[u8]) -> Option<Usage> {
    usage_at_the_end(body).or_else(|| serde_json::from_slice::<Answered>(body).ok()?.usage)?.usage()
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
        let (said, end) = counts::said(&near[brace..]).or_else(|| parsed(&near[brace..]))?;
        // What encloses it ends with the body, and nothing begins between: so it is the answer itself.
        let after = near[brace..].get(end..)?.trim_ascii_end().strip_suffix(b"}")?;
        // Said once more after it, the last word counts; escaped, it may be that too.
        let again = memchr::memchr(b'\\', after).is_some() || memchr::memmem::find(after, b"\"usage\"").is_some();
        return (!again && memchr::memchr3(b'{', b'}', b'[', after).is_none()).then_some(said);
    }
    None
}

/// What the object says that `text` begins with, and where that ends.
fn parsed(text: &[u8]) -> Option<(Said, usize)> {
    let mut values = serde_json::Deserializer::from_slice(text).into_iter();
    let said = values.next()?.ok()?;
    Some((said, values.byte_offset()))
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
#[cfg_attr(test, derive(Debug, PartialEq))]
pub(super) struct Said {
    input_tokens: Option<u64>,
    prompt_tokens: Option<u64>,
    output_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    /// Of `input_tokens_details` or `prompt_tokens_details`: among the input.
    pub(super) cached_tokens: Option<u64>,
}

impl Said {
    /// Where the count of this name is kept, if it is one.
    pub(super) fn count_of(&mut self, name: &[u8]) -> Option<&mut Option<u64>> {
        Some(match name {
            b"input_tokens" => &mut self.input_tokens,
            b"prompt_tokens" => &mut self.prompt_tokens,
            b"output_tokens" => &mut self.output_tokens,
            b"completion_tokens" => &mut self.completion_tokens,
            b"cache_creation_input_tokens" => &mut self.cache_creation_input_tokens,
            b"cache_read_input_tokens" => &mut self.cache_read_input_tokens,
            _ => return None,
        })
    }

    /// What is said later of the same answer counts instead: counts of a stream are of all of it so far.
    pub(super) fn update(&mut self, later: Said) {
        let Said {
            input_tokens,
            prompt_tokens,
            output_tokens,
            completion_tokens,
            cache_creation_input_tokens,
            cache_read_input_tokens,
            cached_tokens,
        } = later;
        for (count, later) in [
            (&mut self.input_tokens, input_tokens),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.output_tokens, output_tokens),
            (&mut self.completion_tokens, completion_tokens),
            (&mut self.cache_creation_input_tokens, cache_creation_input_tokens),
            (&mut self.cache_read_input_tokens, cache_read_input_tokens),
            (&mut self.cached_tokens, cached_tokens),
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
        let input = input.unwrap_or(0);
        // Written to the cache means read from the input quota; read from the cache does not. OpenAI's are among the input.
        let written = self.cache_creation_input_tokens.unwrap_or(0);
        let within = self.cached_tokens.unwrap_or(0).min(input);
        let mut usage = Usage::new(input.saturating_add(written), output.unwrap_or(0));
        usage.uncached_tokens = input - within;
        usage.cache_read_tokens = self.cache_read_input_tokens.unwrap_or(0).saturating_add(within);
        usage.cache_write_tokens = written;
        Some(usage)
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
                        Name::CacheReadInputTokens => &mut said.cache_read_input_tokens,
                        Name::InputDetails => {
                            said.cached_tokens = fields.next_value::<Details>()?.0;
                            continue;
                        }
                        Name::Usage | Name::Message | Name::Response | Name::CachedTokens | Name::Other => {
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

/// What is told of the input in detail: how much of it was cached.
struct Details(Option<u64>);

impl<'de> Deserialize<'de> for Details {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Details;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("details")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Details, A::Error> {
                let mut cached = None;
                while let Some(name) = fields.next_key()? {
                    match name {
                        Name::CachedTokens => cached = fields.next_value::<Count>()?.0,
                        _ => drop(fields.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Details(cached))
            }

            nothing_else!(Details(None); visit_u64: u64, visit_i64: i64, visit_f64: f64, visit_bool: bool, visit_str: &str);
        }

        deserializer.deserialize_any(Fields)
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
    CacheReadInputTokens,
    InputDetails,
    CachedTokens,
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
                    "cache_read_input_tokens" => Name::CacheReadInputTokens,
                    "input_tokens_details" | "prompt_tokens_details" => Name::InputDetails,
                    "cached_tokens" => Name::CachedTokens,
                    _ => Name::Other,
                })
            }
        }

        deserializer.deserialize_identifier(Word)
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, header::CONTENT_TYPE};
    use proptest::prelude::*;

    use super::*;
    use crate::judge::{EmptyPolicy, read::answered};

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
            let counted = used(json, body).map(|usage| (usage.input_tokens, usage.output_tokens));
            assert_eq!(counted, expected, "{body}");
        }
    }

    #[test]
    fn what_was_cached_is_told_apart_and_nothing_of_the_input_is_counted_twice() {
        // The quota's input; of the whole input what no cache had to do with, what was read from one, what was written to one.
        for (usage, expected) in [
            (r#"{"input_tokens":10,"output_tokens":1}"#, (10, 10, 0, 0)),
            (
                r#"{"input_tokens":10,"cache_creation_input_tokens":5,"cache_read_input_tokens":900,"output_tokens":20}"#,
                (15, 10, 900, 5),
            ),
            (
                r#"{"input_tokens":10,"cache_creation":{"ephemeral_5m_input_tokens":5},"cache_read_input_tokens":null}"#,
                (10, 10, 0, 0),
            ),
            (
                r#"{"prompt_tokens":100,"completion_tokens":1,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":64}}"#,
                (100, 36, 64, 0),
            ),
            (r#"{"input_tokens":100,"input_tokens_details":{"cached_tokens":64},"output_tokens":1}"#, (100, 36, 64, 0)),
            // More than there was: what is told of it in detail is not believed beyond that.
            (r#"{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":64}}"#, (10, 0, 10, 0)),
            (r#"{"prompt_tokens":10,"prompt_tokens_details":null}"#, (10, 10, 0, 0)),
            (r#"{"prompt_tokens":10,"prompt_tokens_details":[64]}"#, (10, 10, 0, 0)),
            (r#"{"prompt_tokens":10,"prompt_tokens_details":{"cached_tokens":"64"}}"#, (10, 10, 0, 0)),
            // Of the output's details nothing is meant.
            (r#"{"prompt_tokens":10,"completion_tokens_details":{"cached_tokens":3}}"#, (10, 10, 0, 0)),
            (r#"{"prompt_tokens":10,"cached_tokens":3}"#, (10, 10, 0, 0)),
        ] {
            let used = used("application/json", &format!(r#"{{"usage":{usage}}}"#)).unwrap();
            let counts = (used.input_tokens, used.uncached_tokens, used.cache_read_tokens, used.cache_write_tokens);
            assert_eq!(counts, expected, "{usage}");
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
