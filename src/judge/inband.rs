//! What a success says that is none: an error in it, nothing in it, or not all of it. Pure.
//!
//! Most answers are good, and long. So a look at a few bytes comes first, for what proves one good; only where that finds
//! nothing is the answer taken apart. A model's own text cannot be mistaken for structure: in JSON its quotes are escaped.

use std::sync::LazyLock; // a search is made once: a constant that takes a while

use memchr::memmem::Finder;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::{layer::EmptyPolicy, refusal::Words};

/// What a success proves to be.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    Good,
    /// There is an error in it.
    Failed(Box<Words>),
    /// There is nothing in it.
    Empty,
    /// Its end did not come.
    CutOff,
}

/// The reasons for which a model has written nothing that are an answer. It was cut short by the caller's own bound, or it declined:
/// asked again it would be the same, and paid for again.
const REASONS: [&str; 7] = [
    "max_tokens",
    "stop_sequence",
    "refusal",
    "pause_turn",
    "model_context_window_exceeded",
    // OpenAI
    "length",
    "content_filter",
];

/// What a JSON body proves to be.
pub(super) fn json(body: &[u8], empty: EmptyPolicy) -> Found {
    let body = body.trim_ascii();
    if body.first() != Some(&b'{') {
        return Found::Good;
    }
    if body.last() != Some(&b'}') {
        return if is_cut_off(body) { Found::CutOff } else { Found::Good };
    }
    if !names_error(body) && (empty == EmptyPolicy::Accept || has_content(body)) {
        return Found::Good;
    }
    match serde_json::from_slice::<Value>(body) {
        Ok(answer) => found_in(&answer, empty),
        Err(error) if error.is_eof() => Found::CutOff,
        // Not JSON, or more than one.
        Err(_) => Found::Good,
    }
}

/// Whether the end of the object is missing, where the body does not end as one does. Else something follows it, or it is no JSON.
fn is_cut_off(body: &[u8]) -> bool {
    // Half a number is no end but an error of its own: it is left out.
    let end = body.iter().rposition(|byte| !b"+-.0123456789Ee".contains(byte)).map_or(0, |last| last + 1);
    let first = serde_json::Deserializer::from_slice(&body[..end]).into_iter::<IgnoredAny>().next();
    first.is_none_or(|first| first.is_err_and(|error| error.is_eof()))
}

/// The error in an event of this name, if there is one.
pub(super) fn error_of_event(name: &[u8], data: &[u8]) -> Option<Words> {
    let is_error = name == b"error";
    let Ok(event) = serde_json::from_slice::<Value>(data) else {
        return is_error.then(|| Words::of(&Value::from(String::from_utf8_lossy(data))));
    };
    let is = |kind: &str| event["type"] == kind;
    if let Some(words) = error(&event["error"], is("error")) {
        return Some(words);
    }
    if name == b"response.failed" || is("response.failed") {
        return Some(error(&event["response"]["error"], false).unwrap_or_default());
    }
    // OpenAI's Responses API has it in the event itself.
    (is_error || is("error")).then(|| Words { kind: None, ..Words::of(&event) })
}

/// Whether an event, or an answer, may have an error in it. OpenAI has a null in those that have none.
pub(super) fn names_error(data: &[u8]) -> bool {
    keyed(&ERROR, data, |end| value_of(data, end) != Some(b'n'))
}

/// Whether an event of a stream brings something of an answer, or the reason for which there is none; of a kind that is not known,
/// it does.
pub(super) fn says_something(name: &[u8], data: &[u8]) -> bool {
    let text = |key| keyed(key, data, |end| text_of(data, end));
    let reason = |key| keyed(key, data, |end| REASONS.iter().any(|reason| is_text(data, end, reason)));
    match name {
        // A block of text begins empty, and any other is something.
        b"content_block_start" => TEXT.find(data).is_none(),
        b"content_block_delta" => TEXT.find(data).is_none() || text(&TEXT),
        b"message_delta" => reason(&STOP_REASON),
        b"message_start" | b"content_block_stop" | b"message_stop" | b"ping" | b"error" => false,
        b"" if data.is_empty() || data == b"[DONE]" => false,
        b"" if CHOICES.find(data).is_some() => {
            [&CONTENT, &TEXT, &REFUSAL].into_iter().any(|key| text(key))
                || keyed(&TOOL_CALLS, data, |end| item_of(data, end))
                || keyed(&FUNCTION_CALL, data, |end| value_of(data, end) == Some(b'{'))
                || reason(&FINISH_REASON)
        }
        _ => true,
    }
}

/// Whether a chunk of OpenAI's says why its choice ends. All but the last have a null.
pub(super) fn names_finish(data: &[u8]) -> bool {
    keyed(&FINISH_REASON, data, |end| value_of(data, end) == Some(b'"'))
}

/// A word in quotes as it stands in a body. Built once: building one takes as long as a search.
macro_rules! finders {
    ($($name:ident: $word:literal),+) => {
        $(static $name: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new($word));)+
    };
}

finders! {
    ERROR: "\"error\"", CONTENT: "\"content\"", TEXT: "\"text\"", CHOICES: "\"choices\"", DATA: "\"data\"",
    TOOL_USE: "\"tool_use\"", TOOL_CALLS: "\"tool_calls\"", REFUSAL: "\"refusal\"", FUNCTION_CALL: "\"function_call\"",
    STOP_REASON: "\"stop_reason\"", FINISH_REASON: "\"finish_reason\""
}

/// Whether this word is there and it is so of where it ends.
fn keyed(word: &Finder<'_>, data: &[u8], is: impl Fn(usize) -> bool) -> bool {
    let mut from = 0;
    // An iterator would be a copy of the finder.
    while let Some(at) = word.find(&data[from..]) {
        from += at + word.needle().len();
        if is(from) {
            return true;
        }
    }
    false
}

/// Whether there is something in it, or nothing that would have to be there: as far as a look can tell.
fn has_content(body: &[u8]) -> bool {
    let Some(at) = CONTENT.find(body) else {
        // An answer of embeddings; or of none of the known kinds.
        return match DATA.find(body) {
            Some(at) => item_of(body, at + DATA.needle().len()),
            None => CHOICES.find(body).is_none(),
        };
    };
    let content = at + CONTENT.needle().len();
    if CHOICES.find(&body[..at]).is_some() {
        let called = || {
            let rest = &body[content..];
            TOOL_CALLS.find(rest).is_some_and(|at| item_of(rest, at + TOOL_CALLS.needle().len()))
        };
        return text_of(body, content) || called();
    }
    // Anthropic's blocks.
    let blocks = &body[content..];
    item_of(body, content) && (keyed(&TEXT, blocks, |end| text_of(blocks, end)) || TOOL_USE.find(blocks).is_some())
}

/// The first byte of the value of the key that ends at `end`; `None` if that is no key.
fn value_of(body: &[u8], end: usize) -> Option<u8> {
    let rest = body[end..].trim_ascii_start().strip_prefix(b":")?;
    rest.trim_ascii_start().first().copied()
}

/// Whether the key that ends at `end` has a text that is not empty.
fn text_of(body: &[u8], end: usize) -> bool {
    two_of(body, end).is_some_and(|(first, second)| first == b'"' && second != b'"')
}

/// Whether it has just this text.
fn is_text(body: &[u8], end: usize, text: &str) -> bool {
    let value = || body[end..].trim_ascii_start().strip_prefix(b":")?.trim_ascii_start().strip_prefix(b"\"");
    value().is_some_and(|value| value.strip_prefix(text.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'"')))
}

/// Whether it has an array that is not empty.
fn item_of(body: &[u8], end: usize) -> bool {
    two_of(body, end).is_some_and(|(first, second)| first == b'[' && second != b']')
}

/// The first two bytes of a value, blanks left out but for those in a text.
fn two_of(body: &[u8], end: usize) -> Option<(u8, u8)> {
    let rest = body[end..].trim_ascii_start().strip_prefix(b":")?;
    let (first, rest) = rest.trim_ascii_start().split_first()?;
    let rest = if *first == b'"' { rest } else { rest.trim_ascii_start() };
    Some((*first, *rest.first()?))
}

/// The words of an error that is one: no null, and something is said in it.
fn error(error: &Value, is_anthropic: bool) -> Option<Words> {
    let words = Words::of(error);
    (words != Words::default()).then_some(Words { is_anthropic, ..words })
}

/// What an answer proves to be that has been taken apart.
fn found_in(answer: &Value, empty: EmptyPolicy) -> Found {
    match error(&answer["error"], answer["type"] == "error") {
        Some(words) => Found::Failed(Box::new(words)),
        None if empty == EmptyPolicy::Transient && is_empty(answer) => Found::Empty,
        None => Found::Good,
    }
}

fn is_empty(answer: &Value) -> bool {
    if let Some(choices) = answer.get("choices") {
        return match choices {
            Value::Null => true,
            Value::Array(choices) => choices.iter().all(is_empty_choice),
            _ => false,
        };
    }
    if answer["type"] == "message" {
        let blank = |block: &Value| block["type"] == "text" && block["text"] == "";
        let is_blank = answer["content"].as_array().is_some_and(|blocks| blocks.iter().all(blank));
        return is_blank && !explains(&answer["stop_reason"]);
    }
    // A list of files may be empty; one that a model has made may not.
    let made = answer["object"] == "list" && answer.get("model").is_some();
    made && answer["data"].as_array().is_some_and(Vec::is_empty)
}

fn is_empty_choice(choice: &Value) -> bool {
    // Others than models give choices too.
    if ["message", "text", "finish_reason"].iter().all(|name| choice.get(name).is_none()) {
        return false;
    }
    let message = &choice["message"];
    let said = [&message["content"], &message["refusal"], &message["tool_calls"], &choice["text"]];
    let is_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    };
    let called = [&message["function_call"], &message["audio"]];
    said.into_iter().all(is_nothing) && called.into_iter().all(Value::is_null) && !explains(&choice["finish_reason"])
}

fn explains(reason: &Value) -> bool {
    reason.as_str().is_some_and(|reason| REASONS.contains(&reason))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn found(body: &str) -> Found {
        json(body.as_bytes(), EmptyPolicy::Transient)
    }

    fn failed(kind: Option<&str>, code: Option<&str>, message: Option<&str>) -> Found {
        let own = |word: Option<&str>| word.map(str::to_owned);
        Found::Failed(Box::new(Words { kind: own(kind), code: own(code), message: own(message), is_anthropic: false }))
    }

    #[test]
    fn an_error_at_the_top_is_one_wherever_it_stands() {
        for (body, expected) in [
            (r#"{"error":{"code":502,"message":"m"}}"#, failed(None, Some("502"), Some("m"))),
            (r#" {"id":"x","error" : {"type":"t"},"choices":[]} "#, failed(Some("t"), None, None)),
            (r#"{"choices":[{"message":{"content":"a"}}],"error":{"message":"m"}}"#, failed(None, None, Some("m"))),
            (r#"{"error":"m"}"#, failed(None, None, Some("m"))),
            (r#"{"error":null,"error":"m"}"#, failed(None, None, Some("m"))),
            // None.
            (r#"{"error":null}"#, Found::Good),
            (r#"{"error" :  null,"x":1}"#, Found::Good),
            (r#"{"error":""}"#, Found::Good),
            (r#"{"error":{}}"#, Found::Good),
            (r#"{"error":{"code":null,"message":null,"param":null}}"#, Found::Good),
            (r#"{"error":false}"#, Found::Good),
            (r#"{"error":[{"message":"m"}]}"#, Found::Good),
            (r#"{"errors":{"message":"m"}}"#, Found::Good),
            (r#"{"result":{"error":{"message":"m"}}}"#, Found::Good),
            (r#"{"results":[{"error":{"message":"m"}}]}"#, Found::Good),
            (r#"{"finish":"error","x":{"message":"m"}}"#, Found::Good),
            (r#"[{"error":{"message":"m"}}]"#, Found::Good),
            (r#"{"text":"\"error\":{\"message\":\"m\"}"}"#, Found::Good),
            (r#"{"text":"{\"error\":{\"message\":\"m\"}}"}"#, Found::Good),
            ("", Found::Good),
            ("hello", Found::Good),
            // Not all of it.
            (r#"{"error":{"message":"m"}"#, Found::CutOff),
            (r#"{"id":"x","cho"#, Found::CutOff),
            (r#"{"choices":[{"message":{"content":"a"}}]"#, Found::CutOff),
            ("{", Found::CutOff),
            (r#"{"a":-"#, Found::CutOff),
            (r#"{"a":1.5e+"#, Found::CutOff),
            (r#"{"a":tru"#, Found::CutOff),
            (r#"{"a":"\"#, Found::CutOff),
            // More than all of it.
            ("{\"a\":1}\u{0}", Found::Good),
            ("{\"a\":1}\n[1]", Found::Good),
            (r#"{"a":1}1"#, Found::Good),
            ("{{a}} is no JSON", Found::Good),
            // Lines of JSON.
            ("{\"error\":{\"message\":\"m\"}}\n{\"b\":1}", Found::Good),
        ] {
            assert_eq!(found(body), expected, "{body}");
        }
        let Found::Failed(words) = found(r#"{"type":"error","error":{"type":"api_error"}}"#) else { panic!() };
        assert!(words.is_anthropic);
    }

    #[test]
    fn empty_is_what_ought_to_hold_something_and_does_not() {
        let choice = |message: &str, reason: &str| {
            format!(r#"{{"choices":[{{"index":0,"message":{message},"finish_reason":{reason}}}]}}"#)
        };
        let message = |content: &str, reason: &str| {
            format!(r#"{{"id":"m","type":"message","content":{content},"stop_reason":{reason}}}"#)
        };
        let (stop, end) = ("\"stop\"", "\"end_turn\"");
        for (body, empty) in [
            (r#"{"choices":[]}"#.to_owned(), true),
            (r#"{"choices":null}"#.to_owned(), true),
            (r#"{"choices" : [ ] , "usage":{}}"#.to_owned(), true),
            (r#"{"choices":{}}"#.to_owned(), false),
            (choice(r#"{"content":null}"#, stop), true),
            (choice(r#"{"content":""}"#, stop), true),
            (choice(r#"{"content":""}"#, "null"), true),
            (choice(r#"{"content":[]}"#, stop), true),
            (choice("{}", stop), true),
            (choice(r#"{"content":"","tool_calls":[],"refusal":null}"#, stop), true),
            (choice(r#"{"content":"","reasoning_content":"hm"}"#, stop), true),
            (choice(r#"{"content":" "}"#, stop), false),
            (choice(r#"{ "content" : "a"}"#, stop), false),
            (choice(r#"{"content":[{"type":"text","text":"a"}]}"#, stop), false),
            (choice(r#"{"content":null,"tool_calls":[{"id":"c"}]}"#, "\"tool_calls\""), false),
            (choice(r#"{"tool_calls":[{"id":"c"}]}"#, "\"tool_calls\""), false),
            (choice(r#"{"content":null,"function_call":{"name":"f"}}"#, stop), false),
            (choice(r#"{"content":null,"refusal":"no"}"#, stop), false),
            (choice(r#"{"content":null,"audio":{"id":"a"}}"#, stop), false),
            (r#"{"choices":[{"text":""}]}"#.to_owned(), true),
            (r#"{"choices":[{"text":"a"}]}"#.to_owned(), false),
            // No model's.
            (r#"{"choices":[{"id":1,"label":"red"}]}"#.to_owned(), false),
            (r#"{"choices":["red"]}"#.to_owned(), false),
            (r#"{"choices":[{"finish_reason":"stop"}]}"#.to_owned(), true),
            // One of several is enough.
            (r#"{"choices":[{"message":{"content":""}},{"message":{"content":"a"}}]}"#.to_owned(), false),
            (r#"{"choices":[{"message":{"content":""}},{"message":{"content":""}}]}"#.to_owned(), true),
            // Why there is nothing is an answer.
            (choice(r#"{"content":""}"#, "\"length\""), false),
            (choice(r#"{"content":""}"#, "\"content_filter\""), false),
            (choice(r#"{"content":""}"#, "\"error\""), true),
            (message("[]", end), true),
            (message("[]", "null"), true),
            (message("[ ]", end), true),
            (message(r#"[{"type":"text","text":""}]"#, end), true),
            (message(r#"[{"type":"text","text":""},{"type":"text","text":""}]"#, end), true),
            (message(r#"[{"type":"text","text":""},{"type":"text","text":"a"}]"#, end), false),
            (message(r#"[ { "type" : "text" , "text" : "a" } ]"#, end), false),
            (message(r#"[{"type":"tool_use","id":"t","name":"f","input":{}}]"#, "\"tool_use\""), false),
            (message(r#"[{"type":"thinking","thinking":"hm"}]"#, end), false),
            (message("[]", "\"max_tokens\""), false),
            (message("[]", "\"refusal\""), false),
            (message("[]", "\"stop_sequence\""), false),
            (message("[]", "\"tool_use\""), true),
            (message("null", end), false),
            (r#"{"content":[]}"#.to_owned(), false),
            (r#"{"type":"other","content":[]}"#.to_owned(), false),
            // Embeddings, and lists of other things.
            (r#"{"object":"list","data":[],"model":"e"}"#.to_owned(), true),
            (r#"{"object":"list","data":[{"embedding":[0.1]}],"model":"e"}"#.to_owned(), false),
            (r#"{"object":"list","data":[],"has_more":false}"#.to_owned(), false),
            (r#"{"input_tokens":7}"#.to_owned(), false),
            ("{}".to_owned(), false),
            // What is within a text is none of it.
            (r#"{"note":"\"choices\":[]"}"#.to_owned(), false),
            (r#"{"note":{"choices":[]}}"#.to_owned(), false),
        ] {
            assert_eq!(found(&body), if empty { Found::Empty } else { Found::Good }, "{body}");
            assert_eq!(json(body.as_bytes(), EmptyPolicy::Accept), Found::Good, "{body}");
        }
    }

    #[test]
    fn an_event_is_an_error_by_its_name_or_by_what_is_at_its_top() {
        let words = |name: &str, data: &str| {
            error_of_event(name.as_bytes(), data.as_bytes()).map(|words| [words.kind, words.code, words.message])
        };
        let own = |words: [Option<&str>; 3]| Some(words.map(|word| word.map(str::to_owned)));
        let anthropic = r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#;
        for name in ["error", "", "message"] {
            assert_eq!(words(name, anthropic), own([Some("overloaded_error"), None, Some("Overloaded")]));
        }
        let responses = r#"{"type":"error","code":"server_error","message":"m","param":null}"#;
        assert_eq!(words("error", responses), own([None, Some("server_error"), Some("m")]));
        assert_eq!(words("", responses), own([None, Some("server_error"), Some("m")]));
        let failed = r#"{"type":"response.failed","response":{"error":{"code":"rate_limit_exceeded","message":"m"}}}"#;
        assert_eq!(words("response.failed", failed), own([None, Some("rate_limit_exceeded"), Some("m")]));
        assert_eq!(words("response.failed", r#"{"response":{"error":null}}"#), own([None; 3]));
        assert_eq!(words("error", "gone"), own([None, None, Some("gone")]));
        assert_eq!(words("error", ""), own([None; 3]));
        for data in [
            r#"{"error":null,"choices":[]}"#,
            r#"{"choices":[{"finish_reason":"error"}]}"#,
            r#"{"delta":{"error":{"message":"m"}}}"#,
            r#"{"delta":{"text":"\"error\":{\"message\":\"m\"}"}}"#,
            r#"{"error":{"message":"m"}"#,
            "[]",
            "gone",
        ] {
            assert_eq!(words("message", data), None, "{data}");
        }
    }

    /// What a model may write to look like an answer itself.
    fn text() -> impl Strategy<Value = String> {
        let pieces = vec![
            r#""error":{"message":"m"}"#,
            r#"{"error":"m"}"#,
            r#""choices":[]"#,
            r#""content":"""#,
            r#""content":[]"#,
            "\"",
            "\\",
            "}",
            "{",
            "]",
            "event: error\ndata: {}\n\n",
            "\n\n",
            "data: [DONE]",
            r#""data":[],"model":"x","object":"list""#,
            r#"\","error":"m""#,
            "null",
            r#""tool_calls":[{"#,
            r#""text":"a""#,
            "\u{0}",
            "é",
        ];
        let piece = prop_oneof![4 => prop::sample::select(pieces).prop_map(str::to_owned), 1 => ".{1,9}"];
        prop::collection::vec(piece, 1..6).prop_map(|pieces| pieces.concat())
    }

    fn written(answer: &Value, pretty: bool) -> String {
        if pretty { serde_json::to_string_pretty(answer) } else { serde_json::to_string(answer) }.unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        #[test]
        fn whatever_a_model_writes_a_good_answer_is_good(text in text(), pretty: bool) {
            let finish = if pretty { "stop" } else { "length" };
            for answer in [
                json!({"id": "m", "type": "message", "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"}),
                json!({"type": "message", "content": [{"type": "thinking", "thinking": text}, {"type": "text", "text": text}]}),
                json!({"type": "message", "content": [{"type": "tool_use", "name": text, "input": {"a": text}}]}),
                json!({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}], "error": null}),
                json!({"choices": [{"message": {"content": null, "tool_calls": [{"function": {"arguments": text}}]}}]}),
                json!({"choices": [{"text": text}]}),
                json!({"object": "list", "data": [{"embedding": [0.5]}], "model": text}),
                json!({"note": text}),
            ] {
                prop_assert_eq!(found(&written(&answer, pretty)), Found::Good, "{}", answer);
            }
        }

        #[test]
        fn a_look_finds_what_the_whole_says(
            text in prop_oneof![Just(String::new()), text()],
            other in text(),
            tools in 0_usize..2,
            blocks in 0_usize..3,
            pretty: bool,
        ) {
            let tools = vec![json!({"function": {"arguments": other}}); tools];
            let blocks: Vec<Value> = (0..blocks).map(|nth| json!({"type": "text", "text": if nth == 0 { "" } else { &text }})).collect();
            for answer in [
                json!({"type": "message", "id": other, "content": blocks, "stop_reason": "end_turn"}),
                json!({"a": other, "choices": [{"message": {"content": text, "tool_calls": tools}, "finish_reason": "stop"}], "z": other}),
                json!({"choices": [{"message": {"tool_calls": tools}}], "z": other}),
                json!({"object": "list", "data": tools, "model": other}),
            ] {
                let whole = found_in(&answer, EmptyPolicy::Transient);
                prop_assert_eq!(found(&written(&answer, pretty)), whole, "{}", answer);
            }
        }
    }
}
