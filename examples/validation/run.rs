//! What one run came to, whoever made it.

use std::{collections::HashSet, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tower_quota::sim::Truth;

/// Answers by id.
#[derive(Debug)]
pub(crate) struct Answers {
    /// How many each id has.
    of: Vec<u8>,
    /// The provider gives each item a text of its own: an answer to another item would be there twice.
    texts: HashSet<u64>,
    /// Ids that ended without an answer, with the reason of the first.
    pub(crate) failed: u64,
    pub(crate) first_failure: Option<String>,
}

impl Answers {
    pub(crate) fn new(calls: u64) -> Self {
        Answers { of: vec![0; calls as usize], texts: HashSet::new(), failed: 0, first_failure: None }
    }

    /// Notes a good answer.
    pub(crate) fn good(&mut self, id: u64, body: &Bytes) {
        self.of[id as usize] = self.of[id as usize].saturating_add(1);
        self.texts.insert(text_of(body));
    }

    pub(crate) fn bad(&mut self, why: String) {
        self.failed += 1;
        self.first_failure.get_or_insert(why);
    }

    /// Ids with exactly one answer.
    pub(crate) fn once(&self) -> u64 {
        self.of.iter().filter(|&&answers| answers == 1).count() as u64
    }

    /// Ids without one.
    pub(crate) fn lost(&self) -> u64 {
        self.of.iter().filter(|&&answers| answers == 0).count() as u64
    }

    /// Answers that are different from one another.
    pub(crate) fn different(&self) -> u64 {
        self.texts.len() as u64
    }
}

/// The text of an answer, as a number: usage and the message's own id differ from call to call.
fn text_of(body: &Bytes) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let answer: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    answer["content"][0]["text"].as_str().unwrap_or_default().hash(&mut hasher);
    hasher.finish()
}

/// A run, counted on both sides.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) wall: Duration,
    pub(crate) once: u64,
    pub(crate) lost: u64,
    /// Answers that are different from one another.
    pub(crate) different: u64,
    pub(crate) failed: u64,
    pub(crate) first_failure: Option<String>,
    /// By the provider's own count: calls, 429s, ids answered more than once, tokens charged.
    pub(crate) calls: u64,
    pub(crate) refused: u64,
    pub(crate) twice: u64,
    pub(crate) input_tokens: u64,
    pub(crate) output_tokens: u64,
    /// The most calls that were in flight, by org.
    pub(crate) peaks: Vec<usize>,
}

impl Run {
    pub(crate) fn new(wall: Duration, answers: &Answers, truth: &Truth) -> Self {
        Run {
            wall,
            once: answers.once(),
            lost: answers.lost(),
            different: answers.different(),
            failed: answers.failed,
            first_failure: answers.first_failure.clone(),
            calls: truth.calls(),
            refused: truth.throttled_429(),
            twice: truth.answered_more,
            input_tokens: truth.orgs.iter().map(|org| org.input_tokens).sum(),
            output_tokens: truth.orgs.iter().map(|org| org.output_tokens).sum(),
            peaks: truth.orgs.iter().map(|org| org.peak_in_flight).collect(),
        }
    }
}
