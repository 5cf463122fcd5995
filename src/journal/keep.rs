//! Which answers are kept.

use http::{
    StatusCode,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    response,
};
use memchr::memmem;
use serde_json::Value;

use crate::outcome::{Class, Stamp};

/// Says whether an answer is kept, to be given again for the same request. What is not kept is handed up without a word: whoever
/// wants to know asks here.
///
/// A closure `Fn(&response::Parts, &[u8]) -> bool` is one. It is shown what was gathered whole, and must not block.
pub trait Keep: Send + Sync + 'static {
    /// Whether an answer with this head and this body is kept.
    fn keep(&self, head: &response::Parts, body: &[u8]) -> bool;
}

impl<F: Fn(&response::Parts, &[u8]) -> bool + Send + Sync + 'static> Keep for F {
    fn keep(&self, head: &response::Parts, body: &[u8]) -> bool {
        self(head, body)
    }
}

/// Keeps answers that are answers, to their end. The default.
///
/// * The judge's [`Stamp`] says [`Ok`](Class::Ok), and the status is of success; `202` and `206` are none, and what is compressed cannot be
///   looked into. Without a stamp, in a stack without the judge, the
///   body must be whole JSON with no `error` at its top.
/// * It was not cut short: no `stop_reason` of `max_tokens` or `model_context_window_exceeded` (Anthropic), no `finish_reason` of `length`,
///   `model_length` or `content_filter` (OpenAI and those who speak like it), no `status` of `incomplete`, `queued`, `in_progress` or
///   `cancelled` (OpenAI's Responses), no `finishReason` of `MAX_TOKENS` (Gemini, also in a list of parts). Of a stream that was gathered, its events are read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Finished;

impl Keep for Finished {
    fn keep(&self, head: &response::Parts, body: &[u8]) -> bool {
        let is_part = matches!(head.status, StatusCode::ACCEPTED | StatusCode::PARTIAL_CONTENT);
        if !head.status.is_success() || is_part || head.headers.contains_key(CONTENT_ENCODING) {
            return false;
        }
        let judged = match head.extensions.get::<Stamp>() {
            Some(stamp) => stamp.outcome.class == Class::Ok,
            None => is_answer(body),
        };
        let is_stream =
            head.headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        judged && !is_cut_short(body, is_stream)
    }
}

/// Whether a body may be an answer by itself.
fn is_answer(body: &[u8]) -> bool {
    serde_json::from_slice::<Value>(body).is_ok_and(|answer| answer.get("error").is_none_or(Value::is_null))
}

/// What an answer says that was not finished, wherever each of them may stand.
const WORDS: [&str; 10] = [
    "\"max_tokens\"",
    "\"model_context_window_exceeded\"",
    "\"length\"",
    "\"model_length\"",
    "\"content_filter\"",
    "\"incomplete\"",
    "\"queued\"",
    "\"in_progress\"",
    "\"cancelled\"",
    "\"MAX_TOKENS\"",
];

fn is_cut_short(body: &[u8], is_stream: bool) -> bool {
    // Most have none of these words, and need not be taken apart.
    if !WORDS.iter().any(|word| memmem::find(body, word.as_bytes()).is_some()) {
        return false;
    }
    let says_so = |json: &[u8]| serde_json::from_slice(json).is_ok_and(|answer: Value| is_unfinished(&answer));
    if !is_stream {
        // What cannot be taken apart is not known to be finished.
        return serde_json::from_slice(body).map_or(true, |answer: Value| is_unfinished(&answer));
    }
    body.split(|byte| matches!(byte, b'\n' | b'\r')).filter_map(|line| line.strip_prefix(b"data:")).any(says_so)
}

fn is_unfinished(answer: &Value) -> bool {
    if let Some(parts) = answer.as_array() {
        return parts.iter().any(is_unfinished);
    }
    let is_one = |reason: &Value, of: &[&str]| reason.as_str().is_some_and(|reason| of.contains(&reason));
    let any_of = |list: &Value, name: &str, of: &[&str]| {
        list.as_array().is_some_and(|items| items.iter().any(|item| is_one(&item[name], of)))
    };
    // The answer itself, or what an event has within it.
    [answer, &answer["delta"], &answer["message"], &answer["response"]].into_iter().any(|part| {
        is_one(&part["stop_reason"], &["max_tokens", "model_context_window_exceeded"])
            || is_one(&part["status"], &["incomplete", "queued", "in_progress", "cancelled"])
            || any_of(&part["choices"], "finish_reason", &["length", "model_length", "content_filter"])
            || any_of(&part["candidates"], "finishReason", &["MAX_TOKENS"])
    })
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;
    use crate::outcome::Outcome;

    fn head(status: u16, kind: &str, class: Option<Class>) -> response::Parts {
        let (mut head, ()) =
            Response::builder().status(status).header("content-type", kind).body(()).unwrap().into_parts();
        if let Some(class) = class {
            head.extensions.insert(Stamp::new(Outcome::of(class)));
        }
        head
    }

    fn judged(body: &str) -> bool {
        Finished.keep(&head(200, "application/json", Some(Class::Ok)), body.as_bytes())
    }

    #[test]
    fn only_what_was_finished_is_kept() {
        for (body, kept) in [
            (r#"{"type":"message","content":[{"type":"text","text":"a"}],"stop_reason":"end_turn"}"#, true),
            (r#"{"type":"message","content":[],"stop_reason":"refusal"}"#, true),
            (r#"{"type":"message","content":[],"stop_reason":"tool_use"}"#, true),
            (
                r#"{"type":"message","content":[{"text":"\"stop_reason\":\"max_tokens\""}],"stop_reason":"end_turn"}"#,
                true,
            ),
            (
                r#"{"type":"message","content":[{"text":"max_tokens","input":{"stop_reason":"max_tokens"}}],"stop_reason":"end_turn"}"#,
                true,
            ),
            (r#"{"type":"message","content":[{"text":"a"}],"stop_reason":"max_tokens"}"#, false),
            (r#"{"stop_reason" : "model_context_window_exceeded","content":[]}"#, false),
            (r#"{"choices":[{"finish_reason":"stop"}]}"#, true),
            (r#"{"choices":[{"finish_reason":"tool_calls","message":{"content":"length"}}]}"#, true),
            (r#"{"choices":[{"finish_reason":"stop"},{"finish_reason":"length"}]}"#, false),
            (r#"{"choices":[{"finish_reason":"content_filter"}]}"#, false),
            (r#"{"status":"completed","incomplete_details":null}"#, true),
            (r#"{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}"#, false),
            (r#"{"status":"queued","error":null}"#, false),
            (r#"{"status":"in_progress"}"#, false),
            (r#"{"status":"cancelled"}"#, false),
            (r#"[{"candidates":[{}]},{"candidates":[{"finishReason":"STOP"}]}]"#, true),
            (r#"[{"candidates":[{}]},{"candidates":[{"finishReason":"MAX_TOKENS"}]}]"#, false),
            (r#"{"finish_reason":"length""#, false),
            (r#"{"candidates":[{"finishReason":"STOP"}]}"#, true),
            (r#"{"candidates":[{"finishReason":"MAX_TOKENS"}]}"#, false),
            (r#"{"object":"list","data":[{"embedding":[0.1]}],"usage":{"length":1}}"#, true),
        ] {
            assert_eq!(judged(body), kept, "{body}");
        }
    }

    #[test]
    fn a_gathered_stream_is_read_by_its_events() {
        let keep = |events: &str| {
            Finished.keep(&head(200, "text/event-stream; charset=utf-8", Some(Class::Ok)), events.as_bytes())
        };
        let anthropic = |reason: &str| {
            format!(
                "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"stop_reason\":null}}}}\n\nevent: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{reason}\"}}}}\n\n"
            )
        };
        assert!(keep(&anthropic("end_turn")));
        assert!(!keep(&anthropic("max_tokens")));
        let openai = |reason: &str| {
            format!(
                "data: {{\"choices\":[{{\"finish_reason\":null}}]}}\r\n\r\ndata:{{\"choices\":[{{\"finish_reason\":\"{reason}\"}}]}}\r\n\r\ndata: [DONE]\r\n\r\n"
            )
        };
        assert!(keep(&openai("stop")));
        assert!(!keep(&openai("length")));
        assert!(!keep(
            "event: response.incomplete\ndata: {\"type\":\"response.incomplete\",\"response\":{\"status\":\"incomplete\"}}\n\n"
        ));
    }

    #[test]
    fn what_is_no_answer_is_not_kept() {
        let good = r#"{"choices":[{"finish_reason":"stop"}]}"#;
        for class in Class::ALL {
            let kept = Finished.keep(&head(200, "application/json", Some(class)), good.as_bytes());
            assert_eq!(kept, class.implies().may_store, "{class}");
        }
        for status in [202, 204, 206, 304, 400, 401, 429, 500, 529] {
            let kept = Finished.keep(&head(status, "application/json", None), good.as_bytes());
            assert_eq!(kept, status == 204, "{status}");
            assert!(
                status == 204 || !Finished.keep(&head(status, "application/json", Some(Class::Ok)), good.as_bytes())
            );
        }
        let mut packed = head(200, "application/json", Some(Class::Ok));
        packed.headers.insert(CONTENT_ENCODING, http::HeaderValue::from_static("gzip"));
        assert!(!Finished.keep(&packed, good.as_bytes()), "nobody has looked into it");
        // Nobody has judged these.
        let unjudged = |body: &str| Finished.keep(&head(200, "application/json", None), body.as_bytes());
        assert!(unjudged(good) && unjudged(r#"{"error":null,"choices":[]}"#));
        for body in [r#"{"error":{"type":"rate_limit_error"}}"#, r#"{"choices":[{"mess"#, "", "<html>", "data: {}\n\n"]
        {
            assert!(!unjudged(body), "{body}");
        }
    }
}
