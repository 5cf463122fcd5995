//! Watches an answer that is handed through, and tells its end.

use std::{any::Any, panic, time::Duration};

use http::{
    HeaderMap,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    response::Parts,
};
use tokio::time::Instant;

use super::{
    inband::{self, Found},
    layer::{EmptyPolicy, Rules},
    read,
    refusal::{self, Words},
    sse::Events,
    usage,
};
use crate::{
    hint,
    outcome::{Class, Outcome},
    tail::{Ended, Tail},
};

/// Sees every part of a stream as it is handed on. Dropped before the end has been told, it tells of one that is not complete.
// Most answers are whole, and none need be as large as what is kept of a stream.
pub(super) struct Watch(Box<Watching>);

struct Watching {
    reader: Reader,
    tail: Option<Tail>,
    /// What the head means.
    outcome: Outcome,
    /// What an error in it means, from when it came.
    failed: Option<Outcome>,
    empty: EmptyPolicy,
    hint_ceiling: Duration,
}

/// How a body has come to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Ending {
    ByItself,
    BrokenOff,
    Dropped,
}

#[allow(clippy::large_enum_variant, reason = "it is on the heap already")]
enum Reader {
    Events(Events),
    /// The last that came of a JSON body, since all of it may be far too much; and how much came.
    Json(Vec<u8>, usize),
    /// Anything else is not looked at.
    Nothing,
}

impl Watch {
    /// A watch over the body of this head, and what it will be told through.
    pub(super) fn new(head: &Parts, outcome: Outcome, rules: &Rules) -> (Self, Tail) {
        let is_plain = head.status.is_success() && is_plain(&head.headers);
        let reader = if is_plain && is_events(&head.headers) {
            Reader::Events(Events::new())
        } else if is_plain && read::is_json(&head.headers) {
            Reader::Json(vec![], 0)
        } else {
            Reader::Nothing
        };
        let tail = Tail::new();
        let (empty, hint_ceiling) = (rules.empty, rules.hint_ceiling);
        let watching = Watching { reader, tail: Some(tail.clone()), outcome, failed: None, empty, hint_ceiling };
        (Watch(Box::new(watching)), tail)
    }

    /// A part is handed on.
    pub(super) fn part(&mut self, part: &[u8]) {
        self.0.part(part);
    }

    /// The body has ended by itself, or has broken off.
    ///
    /// # Panics
    /// If a listener does.
    pub(super) fn end(&mut self, ending: Ending) {
        if let Err(panic) = self.0.tell(ending) {
            panic::resume_unwind(panic);
        }
    }
}

impl Watching {
    fn part(&mut self, part: &[u8]) {
        match &mut self.reader {
            Reader::Events(events) => {
                events.feed(part);
                self.see_error();
            }
            Reader::Json(last, seen) => {
                keep_last(last, part);
                *seen = seen.saturating_add(part.len());
            }
            Reader::Nothing => {}
        }
    }

    /// Tells the end, once.
    fn tell(&mut self, ending: Ending) -> Result<(), Box<dyn Any + Send>> {
        let Some(tail) = self.tail.take() else { return Ok(()) };
        let by_itself = ending == Ending::ByItself;
        if let Reader::Events(events) = &mut self.reader {
            events.finish();
            self.see_error();
        }
        let (ended, found) = match &self.reader {
            Reader::Events(events) => {
                // With its last event all is said, whatever becomes of it then.
                let done = by_itself || events.is_complete();
                (Ended::new(events.usage(), events.is_complete()), done.then(|| events.found(self.empty)))
            }
            // Cut off, it may end with what looks like its end.
            Reader::Json(last, seen) if by_itself => {
                let found = if *seen <= usage::NEAR { inband::json(last, self.empty) } else { Found::Good };
                (Ended::new(usage::usage_near_the_end(last), true), Some(found))
            }
            Reader::Json(..) | Reader::Nothing => (Ended::new(None, by_itself), by_itself.then_some(Found::Good)),
        };
        let outcome = match (self.failed, found) {
            _ if self.outcome.class != Class::Ok => Some(self.outcome),
            (Some(failed), _) => Some(failed),
            (None, Some(Found::Good)) => Some(self.outcome),
            (None, Some(Found::Failed(words))) => Some(failure(&words, self.hint_ceiling)),
            (None, Some(Found::Empty)) => Some(Outcome::of(Class::Empty)),
            (None, Some(Found::CutOff)) => Some(Outcome::of(Class::Transport)),
            (None, None) => (ending == Ending::BrokenOff).then(|| Outcome::of(Class::Transport)),
        };
        tail.end(Ended { outcome, ..ended })
    }

    /// A hint counts from when the error came, not from when whoever reads has had enough.
    fn see_error(&mut self) {
        if self.failed.is_none() {
            if let Reader::Events(events) = &self.reader {
                self.failed = events.failed().map(|words| failure(words, self.hint_ceiling));
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // In a panic of the reader's, that of a listener would end the process.
        drop(self.0.tell(Ending::Dropped));
    }
}

/// What an error in a stream means. Its wait can only be in its words.
fn failure(words: &Words, ceiling: Duration) -> Outcome {
    let class = refusal::class_in_band(words);
    let wait = (class == Class::Throttled).then(|| hint::from_text(words.message.as_deref()?, ceiling)).flatten();
    Outcome::of(class).not_before(wait.map(|wait| Instant::now() + wait))
}

/// Whether its bytes are what they seem.
pub(super) fn is_plain(headers: &HeaderMap) -> bool {
    !headers.contains_key(CONTENT_ENCODING)
}

/// `text/event-stream`.
pub(super) fn is_events(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or(kind).trim_ascii();
    kind.eq_ignore_ascii_case(b"text/event-stream")
}

/// Keeps as much of the end as is read there.
fn keep_last(last: &mut Vec<u8>, part: &[u8]) {
    let part = &part[part.len().saturating_sub(usage::NEAR)..];
    let surplus = (last.len() + part.len()).saturating_sub(usage::NEAR);
    // In place: the end of what there is goes to the front.
    last.copy_within(surplus.., 0);
    last.truncate(last.len() - surplus);
    last.extend_from_slice(part);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_that_is_kept_is_that_of_all_parts() {
        let all: Vec<u8> = (0..5_000_u32).map(|i| i as u8).collect();
        for length in [0, 1, usage::NEAR - 1, usage::NEAR, usage::NEAR + 1, 5_000] {
            for size in [1, 7, 1_000, usage::NEAR, usage::NEAR + 1, 5_000] {
                let mut last = vec![];
                all[..length].chunks(size).for_each(|part| keep_last(&mut last, part));
                assert_eq!(last, all[length.saturating_sub(usage::NEAR)..length], "{length} in parts of {size}");
            }
        }
    }

    #[test]
    fn events_are_told_by_their_content_type() {
        let is = |kind: &'static str| is_events(&HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())]));
        for kind in ["text/event-stream", "Text/Event-Stream; charset=utf-8", " text/event-stream ;x"] {
            assert!(is(kind), "{kind}");
        }
        for kind in ["", "text/plain", "text/event-streams", "application/json", "x;text/event-stream"] {
            assert!(!is(kind), "{kind}");
        }
        assert!(!is_events(&HeaderMap::new()));
    }
}
