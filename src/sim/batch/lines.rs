//! The results of a batch: made line by line as they are read.

use std::sync::Arc;

use bytes::Bytes;

use super::fate::{Fate, Phase};
use super::rows::{EMBEDDINGS, Input};
use crate::org::Dialect;
use crate::sim::marker::Marker;
use crate::sim::model::Lengths;
use crate::sim::wire::{Failure, Success};

/// Which rows are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// Anthropic's results.
    All,
    /// OpenAI's output file.
    Answers,
    /// OpenAI's error file.
    Errors,
}

/// What a row is answered with.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    pub(super) dialect: Dialect,
    pub(super) seed: u64,
    pub(super) lengths: Lengths,
}

/// The lines that are still to be told.
#[derive(Clone, Debug)]
pub(in crate::sim) struct Lines {
    pub(super) batch: u64,
    pub(super) input: Arc<Input>,
    pub(super) order: Arc<[u32]>,
    pub(super) fate: Fate,
    pub(super) answers: Answers,
    /// How the batch ended, and how many rows it had finished by then.
    pub(super) phase: Phase,
    pub(super) done: usize,
    pub(super) which: Which,
    pub(super) next: usize,
}

/// Lines are handed over together, about so many bytes at once.
const CHUNK: usize = 64 << 10;

impl Lines {
    /// Ends after half of its rows.
    pub(in crate::sim) fn cut(&mut self) {
        let half = self.order.len() / 2;
        self.order = self.order[..half].into();
        self.done = self.done.min(half);
    }

    /// The next lines; `None` after the last.
    pub(in crate::sim) fn chunk(&mut self) -> Option<Bytes> {
        let mut out = String::new();
        while self.next < self.order.len() && out.len() < CHUNK {
            self.line(self.next, &mut out);
            self.next += 1;
        }
        (!out.is_empty()).then(|| out.into())
    }

    /// How long all of it is.
    pub(super) fn bytes(&self) -> u64 {
        let mut all = self.clone();
        std::iter::from_fn(|| all.chunk()).map(|chunk| chunk.len() as u64).sum()
    }

    fn line(&self, nth: usize, out: &mut String) {
        let place = self.order[nth];
        let row = &self.input.rows.rows[place as usize];
        let number = (self.batch << 32) | u64::from(place);
        let marker = self.fate.marker(place, row);
        let custom_id = serde_json::Value::from(&*row.custom_id);
        let failure = marker.and_then(|marker| marker.failure(self.answers.dialect));
        let is_done = nth < self.done;
        let is_answer = is_done && failure.is_none();
        match self.which {
            Which::Answers if !is_answer => return,
            Which::Errors if is_answer => return,
            _ => {}
        }
        let text = |body: &[u8]| String::from_utf8_lossy(body).into_owned();
        let line = match (self.answers.dialect, is_done) {
            (Dialect::Anthropic, true) => {
                let result = match failure {
                    Some(failure) => format!(r#"{{"type":"errored","error":{}}}"#, text(&self.error(&failure))),
                    None => format!(r#"{{"type":"succeeded","message":{}}}"#, text(&self.success(place, marker))),
                };
                format!(r#"{{"custom_id":{custom_id},"result":{result}}}"#)
            }
            (Dialect::Anthropic, false) => {
                let kind = if self.phase == Phase::Cancelled { "canceled" } else { "expired" };
                format!(r#"{{"custom_id":{custom_id},"result":{{"type":"{kind}"}}}}"#)
            }
            (_, true) => {
                let (status, body) = match failure {
                    Some(failure) => (failure.status.as_u16(), self.error(&failure)),
                    None => (200, self.success(place, marker)),
                };
                let body = text(&body);
                format!(
                    r#"{{"id":"batch_req_{number:016x}","custom_id":{custom_id},"response":{{"status_code":{status},"request_id":"req_{number:016x}","body":{body}}},"error":null}}"#
                )
            }
            (_, false) => {
                let (code, message) = match self.phase {
                    Phase::Cancelled => {
                        ("batch_cancelled", "This request could not be executed because the batch was cancelled.")
                    }
                    _ => ("batch_expired", "This request could not be executed before the completion window expired."),
                };
                format!(
                    r#"{{"id":"batch_req_{number:016x}","custom_id":{custom_id},"response":null,"error":{{"code":"{code}","message":"{message}"}}}}"#
                )
            }
        };
        out.push_str(&line);
        out.push('\n');
    }

    fn error(&self, failure: &Failure<'_>) -> Bytes {
        failure.body(self.answers.dialect)
    }

    fn success(&self, place: u32, marker: Option<Marker>) -> Bytes {
        let row = &self.input.rows.rows[place as usize];
        let embeddings = self.input.url == Some(EMBEDDINGS);
        if marker == Some(Marker::InBand) {
            return Failure::overloaded(529).body(self.answers.dialect);
        }
        let (output_tokens, cut) = self.answers.lengths.of_item(self.answers.seed, row.ask(!embeddings));
        let success = Success {
            dialect: self.answers.dialect,
            embeddings,
            model: self.input.rows.model(row),
            inputs: row.inputs as usize,
            item: row.item,
            number: (self.batch << 32) | u64::from(place),
            input_tokens: row.input_tokens(),
            output_tokens,
            cut,
            empty: marker == Some(Marker::Empty),
            refusal: marker == Some(Marker::Refusal),
            include_usage: false,
        };
        success.json()
    }
}
