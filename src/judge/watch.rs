//! Watches an answer that is handed through, and tells its end.

use std::{any::Any, panic};

use http::{
    HeaderMap, StatusCode,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};

use super::{read, sse::Events};
use crate::tail::{Ended, Tail};

/// Sees every part of a stream as it is handed on. Dropped before the end has been told, it tells of one that is not complete.
pub(super) struct Watch {
    reader: Reader,
    tail: Option<Tail>,
}

enum Reader {
    // Most answers are whole, and none need be as large as this.
    Events(Box<Events>),
    /// The last that came of a JSON body: all of it may be far too much.
    Json(Vec<u8>),
    /// What tells no usage is not looked at.
    Nothing,
}

impl Watch {
    /// A watch over the body of this head, and what it will be told through.
    pub(super) fn new(status: StatusCode, headers: &HeaderMap) -> (Self, Tail) {
        let is_plain = status.is_success() && !headers.contains_key(CONTENT_ENCODING);
        let reader = if is_plain && is_events(headers) {
            Reader::Events(Box::new(Events::new()))
        } else if is_plain && read::is_json(headers) {
            Reader::Json(vec![])
        } else {
            Reader::Nothing
        };
        let tail = Tail::new();
        (Watch { reader, tail: Some(tail.clone()) }, tail)
    }

    /// A part is handed on.
    pub(super) fn part(&mut self, part: &[u8]) {
        match &mut self.reader {
            Reader::Events(events) => events.feed(part),
            Reader::Json(last) => keep_last(last, part),
            Reader::Nothing => {}
        }
    }

    /// The body has ended by itself, or has broken off.
    ///
    /// # Panics
    /// If a listener does.
    pub(super) fn end(&mut self, by_itself: bool) {
        if let Err(panic) = self.tell(by_itself) {
            panic::resume_unwind(panic);
        }
    }

    fn tell(&mut self, by_itself: bool) -> Result<(), Box<dyn Any + Send>> {
        let Some(tail) = self.tail.take() else { return Ok(()) };
        tail.end(match &mut self.reader {
            Reader::Events(events) => {
                events.finish();
                Ended::new(events.usage(), events.is_complete())
            }
            // Cut off, it may end with what looks like its end.
            Reader::Json(last) if by_itself => Ended::new(read::usage_near_the_end(last), true),
            Reader::Json(_) | Reader::Nothing => Ended::new(None, by_itself),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // In a panic of the reader's, that of a listener would end the process.
        drop(self.tell(false));
    }
}

/// `text/event-stream`.
pub(super) fn is_events(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
    let kind = kind.split(|byte| *byte == b';').next().unwrap_or(kind).trim_ascii();
    kind.eq_ignore_ascii_case(b"text/event-stream")
}

/// Keeps as much of the end as is read there.
fn keep_last(last: &mut Vec<u8>, part: &[u8]) {
    let part = &part[part.len().saturating_sub(read::NEAR)..];
    let surplus = (last.len() + part.len()).saturating_sub(read::NEAR);
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
        for length in [0, 1, read::NEAR - 1, read::NEAR, read::NEAR + 1, 5_000] {
            for size in [1, 7, 1_000, read::NEAR, read::NEAR + 1, 5_000] {
                let mut last = vec![];
                all[..length].chunks(size).for_each(|part| keep_last(&mut last, part));
                assert_eq!(last, all[length.saturating_sub(read::NEAR)..length], "{length} in parts of {size}");
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
