//! Reads a stream of server-sent events as it passes: what it used, whether its last event came, and whether an error did. Pure.

use memchr::memmem::Finder;

use super::{
    inband::{Found, error_of_event, names_error, names_finish, says_something},
    layer::EmptyPolicy,
    refusal::Words,
    usage::{Said, said_by_event},
};
use crate::outcome::Usage;

/// Of a longer event only the name is read: 256 KiB. Events of a few hundred bytes are usual; OpenAI's `response.completed` repeats the
/// whole answer. Only one that came in parts takes memory, until its last part is there.
const EVENT_MAX: usize = 256 << 10;

/// The events that end a stream of Anthropic's, and of OpenAI's Responses API.
const LAST_EVENTS: [&[u8]; 4] = [b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"];

/// What ends a stream of OpenAI's Chat Completions API.
const LAST_DATA: &[u8] = b"[DONE]";

/// The events that are an error, whatever is in them: of both providers, and of OpenAI's Responses API.
const ERRORS: [&[u8]; 2] = [b"error", b"response.failed"];

/// Reads what it is fed, in whatever parts that comes.
pub(super) struct Events {
    /// The event that has not ended yet, up to what is being fed.
    event: Vec<u8>,
    /// It is too long.
    skipped: bool,
    /// ... and by its name the last.
    skipped_last: bool,
    /// Nothing of the line has been fed that is being fed.
    line_is_blank: bool,
    /// What was fed last is a carriage return: a line feed belongs to it.
    after_cr: bool,
    finder: Finder<'static>,
    chunk: Finder<'static>,
    said: Said,
    terminal: bool,
    /// An event has come with something in it.
    began: bool,
    /// It is of a kind whose last event is known.
    known: bool,
    /// Something has come that is an answer, or the reason for which there is none.
    answered: bool,
    /// It has said why it ends. Not every provider that speaks OpenAI's dialect sends the last event after that.
    finished: bool,
    /// The first error in it.
    failed: Option<Box<Words>>,
}

impl Events {
    pub(super) fn new() -> Self {
        Events {
            event: vec![],
            skipped: false,
            skipped_last: false,
            line_is_blank: true,
            after_cr: false,
            finder: Finder::new(b"\"usage\""),
            chunk: Finder::new(b"\"chat.completion.chunk\""),
            said: Said::default(),
            terminal: false,
            began: false,
            known: false,
            answered: false,
            finished: false,
            failed: None,
        }
    }

    /// Reads on.
    pub(super) fn feed(&mut self, part: &[u8]) {
        let (mut begin, mut line) = (0, 0);
        for at in memchr::memchr2_iter(b'\n', b'\r', part) {
            let after_cr = if at == 0 { self.after_cr } else { part[at - 1] == b'\r' };
            if !(part[at] == b'\n' && after_cr) {
                if line == at && self.line_is_blank {
                    self.end_event(&part[begin..at]);
                    begin = at + 1;
                }
                self.line_is_blank = true;
            }
            line = at + 1;
        }
        if let Some(last) = part.last() {
            self.line_is_blank &= line == part.len();
            self.after_cr = *last == b'\r';
        }
        let rest = &part[begin..];
        if !self.skipped && self.event.len() + rest.len() > EVENT_MAX {
            self.skip(rest);
        }
        if self.skipped {
            self.event = vec![];
        } else {
            self.event.extend_from_slice(rest);
        }
    }

    /// There is no more. What has come of an event is taken for all of it: not every provider ends the last one.
    pub(super) fn finish(&mut self) {
        self.end_event(&[]);
    }

    /// What the stream has said that it used, the last word of each count.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.said.usage()
    }

    /// Whether the event has come that is the last.
    pub(super) fn is_complete(&self) -> bool {
        self.terminal
    }

    /// The words of the first error in it.
    pub(super) fn failed(&self) -> Option<&Words> {
        self.failed.as_deref()
    }

    /// What a stream proves to be that has ended by itself. One of no known kind may end as it likes.
    pub(super) fn found(&self, empty: EmptyPolicy) -> Found {
        match &self.failed {
            Some(words) => Found::Failed(words.clone()),
            None if !self.began && empty == EmptyPolicy::Transient => Found::Empty,
            None if self.known && !self.terminal && !self.finished => Found::CutOff,
            None if self.known && !self.answered && empty == EmptyPolicy::Transient => Found::Empty,
            None => Found::Good,
        }
    }

    /// The event ends with `rest`. Most come in one part, and are not copied.
    fn end_event(&mut self, rest: &[u8]) {
        if !self.skipped && self.event.len() + rest.len() > EVENT_MAX {
            self.skip(rest);
        }
        if std::mem::take(&mut self.skipped) {
            self.terminal |= std::mem::take(&mut self.skipped_last);
            self.event.clear();
        } else if self.event.is_empty() {
            self.read(rest);
        } else {
            self.event.extend_from_slice(rest);
            let mut event = std::mem::take(&mut self.event);
            self.read(&event);
            event.clear();
            self.event = event;
        }
    }

    /// It goes on with `rest` and is too long. Of such a one only the name is read, which comes first.
    fn skip(&mut self, rest: &[u8]) {
        let longest = b"event: response.incomplete\n".len();
        // The line feed after a carriage return may be of the line before.
        let event = self.event.iter().chain(rest).copied().skip_while(|byte| *byte == b'\n');
        let begin: Vec<u8> = event.take(longest).collect();
        let line = begin.split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
        let name = field(line, b"event").unwrap_or_default();
        self.skipped = true;
        self.skipped_last = LAST_EVENTS.contains(&name);
        self.began = true;
        self.answered = true;
        self.named(name);
        if ERRORS.contains(&name) && self.failed.is_none() {
            self.failed = Some(Box::default());
        }
    }

    /// An event of this name tells what kind of stream this is.
    fn named(&mut self, name: &[u8]) {
        self.known |= name == b"message_start" || name.starts_with(b"response.");
    }

    fn read(&mut self, event: &[u8]) {
        // A stream may begin with a byte order mark.
        let event = if self.began { event } else { event.strip_prefix(b"\xef\xbb\xbf").unwrap_or(event) };
        let mut data: Option<&[u8]> = None;
        let mut name: &[u8] = b"";
        let mut joined = vec![];
        let mut begin = 0;
        for end in memchr::memchr2_iter(b'\n', b'\r', event).chain([event.len()]) {
            let line = &event[begin..end];
            begin = end + 1;
            if let Some(value) = field(line, b"event") {
                name = value;
                self.terminal |= LAST_EVENTS.contains(&name);
            } else if let Some(line) = field(line, b"data") {
                match data {
                    None => data = Some(line),
                    Some(first) => {
                        if joined.is_empty() {
                            joined.extend_from_slice(first);
                        }
                        joined.push(b'\n');
                        joined.extend_from_slice(line);
                    }
                }
            }
        }
        let data = if joined.is_empty() { data.unwrap_or_default() } else { &joined };
        self.terminal |= data == LAST_DATA;
        self.began |= !data.is_empty() || !name.is_empty();
        if !self.known {
            self.named(name);
            self.known |= self.chunk.find(data).is_some();
        }
        if !self.answered {
            self.answered = says_something(name, data);
        }
        self.finished |= self.known && !self.finished && names_finish(data);
        if self.failed.is_none() && (ERRORS.contains(&name) || names_error(data)) {
            self.failed = error_of_event(name, data).map(Box::new);
        }
        // Within what a model writes its quotes would be escaped, and OpenAI has a null in all chunks but the last: so hardly any
        // other event is taken apart.
        let name = self.finder.needle().len();
        if self.finder.find_iter(data).any(|at| !data[at + name..].starts_with(b":null")) {
            if let Some(said) = said_by_event(data) {
                self.said.update(said);
            }
        }
    }
}

/// The value of a line that is this field.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let value = line.strip_prefix(name)?.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    type Told = (Option<(u64, u64)>, bool);

    fn found<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Found {
        let mut events = Events::new();
        parts.into_iter().for_each(|part| events.feed(part));
        events.finish();
        events.found(EmptyPolicy::Transient)
    }

    fn failed(kind: Option<&str>, message: Option<&str>) -> Found {
        let own = |word: Option<&str>| word.map(str::to_owned);
        let is_anthropic = kind.is_some();
        Found::Failed(Box::new(Words { kind: own(kind), code: None, message: own(message), is_anthropic }))
    }

    #[test]
    fn what_a_stream_proves_to_be_is_told_whatever_the_parts() {
        let before = |text: &str, end: &str| text[..text.find(end).unwrap()].to_owned();
        let error =
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n";
        let overloaded = || failed(Some("overloaded_error"), Some("m"));
        let chunk = "data: {\"object\":\"chat.completion.chunk\",\"choices\":[{\"delta\":{\"content\":\"x\"}}],\"error\":null}\n\n";
        for (text, expected) in [
            (ANTHROPIC.to_owned(), Found::Good),
            (OPENAI.to_owned(), Found::Good),
            (RESPONSES.to_owned(), Found::Good),
            // An error, first or later, and whatever comes after it.
            (error.to_owned(), overloaded()),
            (error.replace("event: error\n", ""), overloaded()),
            (error.replace('\n', "\r\n"), overloaded()),
            (before(ANTHROPIC, "event: message_delta") + error, overloaded()),
            (before(ANTHROPIC, "event: message_delta") + error + "event: error\ndata: x\n\n", overloaded()),
            (ANTHROPIC.to_owned() + error, overloaded()),
            ("event: error\ndata: gone\n\n".to_owned(), failed(None, Some("gone"))),
            ("event: error\n\n".to_owned(), failed(None, None)),
            (chunk.to_owned() + "data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n", failed(None, Some("m"))),
            (chunk.replace("null", "{\"message\":\"m\"}"), failed(None, Some("m"))),
            (
                "event: response.failed\ndata: {\"response\":{\"error\":{\"message\":\"m\"}}}\n\n".to_owned(),
                failed(None, Some("m")),
            ),
            // Of a known kind, without its end.
            (before(ANTHROPIC, "event: message_stop"), Found::CutOff),
            (before(ANTHROPIC, "event: content_block_start"), Found::CutOff),
            (before(OPENAI, "data: [DONE]") + chunk, Found::CutOff),
            (chunk.to_owned(), Found::CutOff),
            (chunk.to_owned() + "data: [DONE]\n\n", Found::Good),
            // It has said why it ends.
            (chunk.replace("}}]", "},\"finish_reason\":null}]"), Found::CutOff),
            (chunk.replace("}}]", "},\"finish_reason\": \"stop\"}]"), Found::Good),
            (chunk.replace("\"x\"", "\"\\\"finish_reason\\\":\\\"stop\\\"\""), Found::CutOff),
            (before(RESPONSES, "event: response.completed"), Found::CutOff),
            // Of none.
            ("data: hello\n\n".to_owned(), Found::Good),
            (before(OPENAI, "data: [DONE]"), Found::Good),
            ("event: message_started\ndata: x\n\n".to_owned(), Found::Good),
            // What a model writes is no event and no error.
            (
                "data: {\"delta\":{\"text\":\"\\n\\nevent: error\\ndata: {\\\"error\\\":{\\\"message\\\":1}}\"}}\n\n"
                    .to_owned(),
                Found::Good,
            ),
            ("data: {\"delta\":{\"text\":\"\\\"chat.completion.chunk\\\"\"}}\n\n".to_owned(), Found::Good),
            ("data: {\"delta\":{\"error\":{\"message\":\"m\"}}}\n\n".to_owned(), Found::Good),
            ("data: {\"choices\":[{\"finish_reason\":\"error\"}]}\n\n".to_owned(), Found::Good),
            ("\u{feff}data: hello\n\n".to_owned(), Found::Good),
            ("\u{feff}".to_owned() + error, overloaded()),
            // Nothing.
            (String::new(), Found::Empty),
            ("\n\n: keep-alive\n\n".to_owned(), Found::Empty),
        ] {
            let bytes = text.as_bytes();
            assert_eq!(found([bytes]), expected, "{text}");
            assert_eq!(found(bytes.chunks(1)), expected, "byte by byte: {text}");
            assert_eq!(found(bytes.chunks(7)), expected, "by sevens: {text}");
        }
        let mut none = Events::new();
        none.finish();
        assert_eq!(none.found(EmptyPolicy::Accept), Found::Good);
    }

    #[test]
    fn a_stream_that_brings_nothing_is_empty_unless_it_says_why() {
        let anthropic = |events: &[(&str, &str)]| {
            let all = [
                &[("message_start", r#"{"message":{"content":[],"stop_reason":null}}"#)],
                events,
                &[("message_stop", "{}")],
            ];
            all.concat().iter().map(|(name, data)| format!("event: {name}\ndata: {data}\n\n")).collect::<String>()
        };
        let openai = |choices: &[&str]| {
            let chunk =
                |choice: &&str| format!("data: {{\"object\":\"chat.completion.chunk\",\"choices\":[{choice}]}}\n\n");
            choices.iter().map(chunk).collect::<String>() + "data: [DONE]\n\n"
        };
        let begin = ("content_block_start", r#"{"content_block":{"type":"text","text":""}}"#);
        let first = r#"{"delta":{"role":"assistant","content":"","refusal":null},"finish_reason":null}"#;
        let delta = |delta: &'static str| ("content_block_delta", delta);
        for (text, expected) in [
            (anthropic(&[]), Found::Empty),
            (anthropic(&[begin, ("content_block_stop", "{}"), ("ping", "{}")]), Found::Empty),
            (anthropic(&[("message_delta", r#"{"delta":{"stop_reason":"end_turn"}}"#)]), Found::Empty),
            (anthropic(&[("message_delta", r#"{"delta":{"stop_reason":"max_tokens"}}"#)]), Found::Good),
            (anthropic(&[("message_delta", r#"{"delta":{"stop_reason":"refusal"}}"#)]), Found::Good),
            (anthropic(&[begin, delta(r#"{"delta":{"type":"text_delta","text":""}}"#)]), Found::Empty),
            (anthropic(&[begin, delta(r#"{"delta":{"type":"text_delta","text":"x"}}"#)]), Found::Good),
            (anthropic(&[("content_block_start", r#"{"content_block":{"type":"tool_use","input":{}}}"#)]), Found::Good),
            (anthropic(&[delta(r#"{"delta":{"type":"input_json_delta","partial_json":"{"}}"#)]), Found::Good),
            (anthropic(&[("something_new", "{}")]), Found::Good),
            (openai(&[]), Found::Good),
            (openai(&[first]), Found::Empty),
            (openai(&[first, r#"{"delta":{},"finish_reason":"stop"}"#]), Found::Empty),
            (openai(&[first, r#"{"delta":{},"finish_reason":"length"}"#]), Found::Good),
            (openai(&[first, r#"{"delta":{"content":"x"},"finish_reason":null}"#]), Found::Good),
            (openai(&[first, r#"{"delta":{"refusal":"x"}}"#]), Found::Good),
            (openai(&[first, r#"{"delta":{"tool_calls":[]}}"#]), Found::Empty),
            (openai(&[first, r#"{"delta":{"tool_calls":[{"index":0}]}}"#]), Found::Good),
            (openai(&[r#"{"text":"x"}"#]), Found::Good),
            (openai(&[r#"{"text":""}"#]), Found::Empty),
        ] {
            assert_eq!(found([text.as_bytes()]), expected, "{text}");
            assert_eq!(found(text.as_bytes().chunks(9)), expected, "in parts: {text}");
        }
        let mut accepted = Events::new();
        accepted.feed(anthropic(&[]).as_bytes());
        assert_eq!(accepted.found(EmptyPolicy::Accept), Found::Good);
    }

    #[test]
    fn an_error_that_is_too_long_is_an_error_by_its_name() {
        let data = format!("data: {{\"x\":\"{}\"}}", "x".repeat(EVENT_MAX));
        for (name, expected) in [
            ("error", failed(None, None)),
            ("response.failed", failed(None, None)),
            ("response.created", Found::CutOff),
            ("message_start", Found::CutOff),
            ("errors", Found::Good),
        ] {
            let text = format!("event: {name}\n{data}\n\n");
            for size in [usize::MAX, 70_000, 999] {
                assert_eq!(found(text.as_bytes().chunks(size)), expected, "{name} in parts of {size}");
            }
        }
    }

    fn read<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Told {
        let mut events = Events::new();
        parts.into_iter().for_each(|part| events.feed(part));
        events.finish();
        (events.usage().map(|usage| (usage.input_tokens, usage.output_tokens)), events.is_complete())
    }

    const ANTHROPIC: &str = concat!(
        "event: message_start\n",
        r#"data: {"type":"message_start","message":{"id":"msg_1","content":[],"usage":{"input_tokens":25,"cache_creation_input_tokens":5,"cache_read_input_tokens":900,"output_tokens":1}}}"#,
        "\n\nevent: content_block_start\n",
        r#"data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
        "\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\nevent: content_block_delta\n",
        r#"data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}"#,
        "\n\nevent: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\nevent: message_delta\n",
        r#"data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}"#,
        "\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );

    const OPENAI: &str = concat!(
        r#"data: {"id":"c","choices":[{"delta":{"role":"assistant"}}],"usage":null}"#,
        "\n\n",
        r#"data: {"id":"c","choices":[{"delta":{"content":"Hello"}}],"usage":null}"#,
        "\n\n",
        r#"data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":12,"total_tokens":21,"completion_tokens_details":{"reasoning_tokens":0}}}"#,
        "\n\ndata: [DONE]\n\n",
    );

    const RESPONSES: &str = concat!(
        "event: response.created\n",
        r#"data: {"type":"response.created","response":{"id":"r","output":[],"usage":null}}"#,
        "\n\nevent: response.output_text.delta\n",
        r#"data: {"type":"response.output_text.delta","delta":"Hello"}"#,
        "\n\nevent: response.completed\n",
        r#"data: {"type":"response.completed","response":{"id":"r","usage":{"input_tokens":37,"output_tokens":11,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":48}}}"#,
        "\n\n",
    );

    fn streams() -> Vec<(String, Told)> {
        let crlf = |text: &str, end: &str| text.replace('\n', end);
        let start = r#"data: {"message":{"usage":{"input_tokens":3,"output_tokens":1}}}"#;
        let delta = |output| format!(r#"data: {{"usage":{{"output_tokens":{output}}}}}"#);
        let mut streams = vec![];
        for (text, told) in [(ANTHROPIC, (30, 15)), (OPENAI, (9, 12)), (RESPONSES, (37, 11))] {
            for end in ["\n", "\r\n", "\r"] {
                streams.push((crlf(text, end), (Some(told), true)));
            }
        }
        for (text, usage, complete) in [
            // Cut off: what was known, and not complete.
            (ANTHROPIC[..ANTHROPIC.find("event: message_delta").unwrap()].to_owned(), Some((30, 1)), false),
            (ANTHROPIC[..ANTHROPIC.find("event: message_stop").unwrap()].to_owned(), Some((30, 15)), false),
            (ANTHROPIC[..20].to_owned(), None, false),
            (OPENAI[..OPENAI.find("data: [DONE]").unwrap()].to_owned(), Some((9, 12)), false),
            (OPENAI[..OPENAI.find(",\"total").unwrap()].to_owned(), None, false),
            (RESPONSES[..RESPONSES.find("event: response.completed").unwrap()].to_owned(), None, false),
            // The last event need not be ended.
            (format!("{start}\n\n{}", delta(7)), Some((3, 7)), false),
            ("data: [DONE]".to_owned(), None, true),
            ("event: message_stop\n".to_owned(), None, true),
            ("event:response.incomplete\n\n".to_owned(), None, true),
            ("event: response.failed\n\n".to_owned(), None, true),
            // The last word counts, for each count apart, and null is none.
            (format!("{start}\n\n{}\n\n{}\n\n", delta(7), delta(9)), Some((3, 9)), false),
            (format!("{start}\n\ndata: {{\"usage\":null}}\n\n"), Some((3, 1)), false),
            (
                format!("{start}\n\ndata: {{\"usage\":{{\"input_tokens\":4,\"output_tokens\":5}}}}\n\n"),
                Some((4, 5)),
                false,
            ),
            // Fields, comments, blanks.
            (format!(": \"usage\"\nid: 1\nretry: 5\n{start}\n:\n\n\n\n\n"), Some((3, 1)), false),
            (format!("\r\n\r\r\n\n{start}\r\n\r\n"), Some((3, 1)), false),
            (start.replace("data: ", "data:"), Some((3, 1)), false),
            (start.replace("data: ", "data"), None, false),
            (start.replace("data: ", " data: "), None, false),
            (start.replace("data: ", "datas: "), None, false),
            (start.replace("data: ", "event: "), None, false),
            // Data in several lines is one.
            (
                "data: {\"usage\"\ndata: :{\"output_tokens\"\nid: 1\ndata:\ndata: :8}}\n\n".to_owned(),
                Some((0, 8)),
                false,
            ),
            ("data: {\"usage\":\r\ndata: {\"output_tokens\":8}}\r\n\r\n".to_owned(), Some((0, 8)), false),
            ("data: {\"usage\":\n\ndata: {\"output_tokens\":8}}\n\n".to_owned(), None, false),
            ("data: [DO\ndata: NE]\n\n".to_owned(), None, false),
            // What a model writes, and what is elsewhere, is not read.
            (r#"data: {"delta":{"text":"{\"usage\":{\"output_tokens\":8}}"}}"#.to_owned(), None, false),
            (
                r#"data: {"delta":{"text":"\n\ndata: {\"usage\":{\"output_tokens\":8}}\n\nevent: message_stop"}}"#
                    .to_owned(),
                None,
                false,
            ),
            (r#"data: {"delta":{"text":"usage"},"x":{"usage":{"output_tokens":8}}}"#.to_owned(), None, false),
            (r#"data: {"message":{"message":{"usage":{"output_tokens":8}}}}"#.to_owned(), None, false),
            (
                r#"data: {"message":"usage","response":["usage"],"usage":{"output_tokens":8}}"#.to_owned(),
                Some((0, 8)),
                false,
            ),
            (r#"data: {"usage":{"output_tokens":8}} {"#.to_owned(), None, false),
            (r#"data: {"usage":{"output_tokens":8}"#.to_owned(), None, false),
            (r#"data: [{"usage":{"output_tokens":8}}]"#.to_owned(), None, false),
            (String::new(), None, false),
        ] {
            streams.push((text, (usage, complete)));
        }
        streams
    }

    #[test]
    fn usage_and_the_last_event_are_read_whatever_the_parts() {
        for (text, told) in streams() {
            let bytes = text.as_bytes();
            assert_eq!(read([bytes]), told, "{text}");
            assert_eq!(read(bytes.chunks(1)), told, "byte by byte: {text}");
            for cut in 0..=bytes.len() {
                assert_eq!(read([&bytes[..cut], &bytes[cut..]]), told, "cut at {cut}: {text}");
            }
        }
    }

    #[test]
    fn a_stream_cut_off_at_any_byte_tells_what_it_has_said() {
        for (text, first, last) in [(ANTHROPIC, (30, 1), (30, 15)), (OPENAI, (9, 12), (9, 12))] {
            // After the line of the last event that ends it, whatever else there is.
            let done = text.rfind("message_stop\ndata").map_or(text.trim_end().len(), |at| at + "message_stop".len());
            for cut in 0..text.len() {
                let (usage, complete) = read([&text.as_bytes()[..cut]]);
                assert!(usage.is_none_or(|usage| usage == first || usage == last), "{cut}: {usage:?}");
                assert_eq!(complete, cut >= done, "{cut}");
            }
        }
    }

    #[test]
    fn an_event_that_is_too_long_is_passed_over_and_the_next_is_read() {
        let usage = r#"data: {"usage":{"output_tokens":8},"x":""#;
        let event = |length: usize| format!("{usage}{}\"}}", "x".repeat(length - usage.len() - 2));
        for (length, told) in [(EVENT_MAX, Some((0, 8))), (EVENT_MAX + 1, None)] {
            // The end of its line is of the event, the blank line after it is not.
            let text = event(length - 1) + "\n\n";
            for size in [usize::MAX, 70_000, 999] {
                assert_eq!(read(text.as_bytes().chunks(size)).0, told, "{length} in parts of {size}");
                let both = text.clone() + "data: {\"usage\":{\"input_tokens\":5}}\n\ndata: [DONE]\n\n";
                let expected = (Some((5, told.map_or(0, |told| told.1))), true);
                assert_eq!(read(both.as_bytes().chunks(size)), expected, "{length} in parts of {size}");
            }
        }
    }

    #[test]
    fn the_last_event_is_the_last_however_long_it_is() {
        let data = format!("data: {{\"response\":\"{}\"}}", "x".repeat(EVENT_MAX));
        for (name, complete) in [
            ("response.completed", true),
            ("response.incomplete", true),
            ("response.failed", true),
            ("response.completed.not", false),
            ("response.created", false),
        ] {
            for end in ["\n", "\r\n", "\r"] {
                let text = format!("data: 1{end}{end}event: {name}{end}{data}{end}{end}");
                for size in [usize::MAX, 70_000, 999, 7] {
                    assert_eq!(read(text.as_bytes().chunks(size)), (None, complete), "{name} in parts of {size}");
                }
                let more = format!("{text}event: ping{end}{data}{end}{end}");
                assert_eq!(read([more.as_bytes()]), (None, complete), "{name}, and more");
            }
        }
        let text = format!("{data}\nevent: response.completed\n\n");
        assert_eq!(read([text.as_bytes()]), (None, false), "a name that comes last is not read");
    }

    #[test]
    fn what_is_too_long_takes_no_memory_and_what_comes_in_one_part_none_either() {
        let mut events = Events::new();
        for _ in 0..100 {
            events.feed(&[b'x'; 10_000]);
            assert!(events.event.capacity() <= 2 * EVENT_MAX);
        }
        assert_eq!((events.event.capacity(), events.skipped), (0, true));

        let mut events = Events::new();
        for event in ANTHROPIC.split_inclusive("\n\n") {
            events.feed(event.as_bytes());
        }
        assert_eq!(events.event.capacity(), 0, "not copied");
    }

    /// The same by the book, with everything built.
    fn by_the_book(text: &str) -> Told {
        let text = text.replace("\r\n", "\n").replace('\r', "\n");
        let mut counts = [None; 5];
        let mut complete = false;
        for event in text.lines().collect::<Vec<_>>().split(|line| line.is_empty()) {
            let values = |name| {
                let lines = event.iter().filter_map(move |line| line.strip_prefix(name)?.strip_prefix(':'));
                lines.map(|value| value.strip_prefix(' ').unwrap_or(value)).collect::<Vec<_>>()
            };
            let data = values("data").join("\n");
            complete |= data == "[DONE]" || values("event").contains(&"message_stop");
            let Ok(event @ Value::Object(_)) = serde_json::from_str::<Value>(&data) else { continue };
            for usage in [&event["message"]["usage"], &event["usage"]] {
                let names = [
                    "input_tokens",
                    "prompt_tokens",
                    "output_tokens",
                    "completion_tokens",
                    "cache_creation_input_tokens",
                ];
                for (count, name) in counts.iter_mut().zip(names) {
                    *count = usage[name].as_u64().or(*count);
                }
            }
        }
        let [input, prompt, output, completion, cached] = counts;
        let (input, output) = (input.or(prompt), output.or(completion));
        let told = (input.is_some() || output.is_some())
            .then(|| (input.unwrap_or(0) + cached.unwrap_or(0), output.unwrap_or(0)));
        (told, complete)
    }

    fn stream() -> impl Strategy<Value = String> {
        let pieces = vec![
            "\n",
            "\n",
            "\r\n",
            "\r",
            "\n\n",
            "\r\n\r\n",
            "data: ",
            "data:",
            "event: ",
            "message_stop",
            "[DONE]",
            ": ",
            "x",
            "{\"usage\":{\"input_tokens\":1,\"output_tokens\":2}}",
            "{\"usage\":{\"prompt_tokens\":3}}",
            "data: {\"usage\":{\"output_tokens\":4}}\n\n",
            "data: {\"message\":{\"usage\":{\"input_tokens\":5,\"cache_creation_input_tokens\":6}}}\r\n\r\n",
            "data: {\"usage\":null}\n",
            "{\"usage\":",
            "{\"completion_tokens\":7}}",
            "{\"text\":\"\\\"usage\\\":{}\"}",
        ];
        prop::collection::vec(prop::sample::select(pieces), 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn parts_never_change_what_is_read_and_it_is_what_the_book_says(
            text in stream(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let told = read(cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]));
            prop_assert_eq!(told, by_the_book(&text));
            prop_assert_eq!(told, read([text.as_bytes()]));
        }
    }
}
