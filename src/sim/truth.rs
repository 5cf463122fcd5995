//! What really happened at the provider, counted where it happened.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::batch::{BatchTruth, RowsTruth};
use super::model::{Ending, Verdict};

/// The width of a bin of [`OrgTruth::timeline`].
pub const BIN: Duration = Duration::from_millis(100);

/// Everything the provider saw up to now. All times are since the start.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Truth {
    /// The orgs, in the order of the configuration.
    pub orgs: Vec<OrgTruth>,
    /// Calls with a key of no org: answered 401.
    pub unknown_key: u64,
    /// Calls to an unknown path or with a wrong method: answered 404 or 405, and counted nowhere else.
    pub not_found: u64,
    /// Items that got one complete 200. An item is the value of the header `x-item-id`, or else the request body. A row of a batch that
    /// succeeded is an answer to its item, which is its body.
    pub answered_once: u64,
    /// Items that got more than one.
    pub answered_more: u64,
    /// The rows of all batches by their `custom_id`.
    pub rows: RowsTruth,
}

impl Truth {
    /// The org of this name.
    pub fn org(&self, name: &str) -> Option<&OrgTruth> {
        self.orgs.iter().find(|o| o.name == name)
    }

    /// [`OrgTruth::calls`] of all orgs.
    pub fn calls(&self) -> u64 {
        self.orgs.iter().map(|o| o.calls).sum()
    }

    /// [`OrgTruth::ok`] of all orgs.
    pub fn ok(&self) -> u64 {
        self.orgs.iter().map(|o| o.ok).sum()
    }

    /// [`OrgTruth::batch`] of all orgs together; of the peaks the largest.
    pub fn batch(&self) -> BatchTruth {
        self.orgs.iter().fold(BatchTruth::default(), |sum, org| sum.with(&org.batch))
    }

    /// [`OrgTruth::throttled_429`] of all orgs.
    pub fn throttled_429(&self) -> u64 {
        self.orgs.iter().map(|o| o.throttled_429).sum()
    }
}

/// What one org saw.
///
/// Once nothing is in flight, `calls` is the sum of `ok`, `empty`, `truncated`, `in_band`, `abandoned`, `throttled_429`,
/// `resets`, `managed` and all `errors`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OrgTruth {
    /// The org's name.
    pub name: String,
    /// Requests that arrived with its key.
    pub calls: u64,
    /// Complete 200 answers, counted when the last byte is handed over.
    pub ok: u64,
    /// 429 answers, counted on arrival.
    pub throttled_429: u64,
    /// Other error answers by status, counted on arrival; those of calls that manage batches, when they are sent.
    pub errors: BTreeMap<u16, u64>,
    /// Connections dropped without an answer, lost replies to `create` among them.
    pub resets: u64,
    /// 200 answers with an empty list, completely sent. They do not count as `ok`, nor as answers to their items.
    pub empty: u64,
    /// 200 answers cut short by the fault.
    pub truncated: u64,
    /// 200 answers with an error in them, completely sent. They do not count as `ok`, nor as answers to their items.
    pub in_band: u64,
    /// Calls that manage batches and files, answered completely and with no error.
    pub managed: u64,
    /// Its batches.
    pub batch: BatchTruth,
    /// Calls the client left before they were answered completely; calls that hang end so.
    pub abandoned: u64,
    /// Requests from their arrival until their answer is fully sent, now. Refused ones count too.
    pub in_flight: usize,
    /// The most there were at once.
    pub peak_in_flight: usize,
    /// When the first request arrived.
    pub first_call: Option<Duration>,
    /// Input tokens of admitted calls that are to be answered; rows of batches are counted in `batch`.
    pub input_tokens: u64,
    /// Output tokens of the same.
    pub output_tokens: u64,
    /// Answers per [`BIN`] since the start.
    pub timeline: Vec<Bin>,
    /// When each request arrived, if `record_arrivals` is on.
    pub arrivals: Vec<Duration>,
}

/// What an org's buckets hold at one moment, in fractions of a request or a token; `None` for what is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Levels {
    /// Requests.
    pub requests: Option<f64>,
    /// Input tokens.
    pub input_tokens: Option<f64>,
    /// Output tokens.
    pub output_tokens: Option<f64>,
    /// Tokens of both directions together.
    pub tokens: Option<f64>,
}

/// Answers within 100 ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bin {
    /// Complete 200 answers.
    pub ok: u64,
    /// 429 answers.
    pub throttled_429: u64,
}

#[derive(Debug)]
pub(super) struct Ledger {
    seen: OrgTruth,
    record_arrivals: bool,
    answers: HashMap<u64, u32>,
}

impl Ledger {
    pub(super) fn new(name: String, record_arrivals: bool) -> Self {
        Ledger { seen: OrgTruth { name, ..OrgTruth::default() }, record_arrivals, answers: HashMap::new() }
    }

    /// Counts an arrival; returns its number, from 1.
    pub(super) fn arrived(&mut self, now: Duration, verdict: &Verdict) -> u64 {
        let seen = &mut self.seen;
        seen.calls += 1;
        seen.in_flight += 1;
        seen.peak_in_flight = seen.peak_in_flight.max(seen.in_flight);
        seen.first_call.get_or_insert(now);
        if self.record_arrivals {
            seen.arrivals.push(now);
        }
        match *verdict {
            Verdict::Unauthorised => *seen.errors.entry(401).or_default() += 1,
            Verdict::ServerError => *seen.errors.entry(500).or_default() += 1,
            Verdict::Overloaded { status } => *seen.errors.entry(status).or_default() += 1,
            Verdict::Reset => seen.resets += 1,
            Verdict::Marked { status, .. } if status != 429 => *seen.errors.entry(status).or_default() += 1,
            Verdict::Refused { .. } | Verdict::Marked { .. } => {
                seen.throttled_429 += 1;
                if let Some(bin) = bin(&mut seen.timeline, now) {
                    bin.throttled_429 += 1;
                }
            }
            Verdict::Answer { input_tokens, output_tokens, .. } => {
                seen.input_tokens += input_tokens;
                seen.output_tokens += output_tokens;
            }
            Verdict::Hang => {}
        }
        seen.calls
    }

    pub(super) fn left(&mut self, now: Duration, ending: Ending) {
        self.seen.in_flight -= 1;
        match ending {
            Ending::Ok { id } => {
                self.seen.ok += 1;
                if let Some(bin) = bin(&mut self.seen.timeline, now) {
                    bin.ok += 1;
                }
                *self.answers.entry(id).or_default() += 1;
            }
            Ending::Empty => self.seen.empty += 1,
            Ending::Truncated => self.seen.truncated += 1,
            Ending::InBand => self.seen.in_band += 1,
            Ending::Managed { status: 429 } => self.seen.throttled_429 += 1,
            Ending::Managed { status } if status >= 400 => *self.seen.errors.entry(status).or_default() += 1,
            Ending::Managed { .. } => self.seen.managed += 1,
            Ending::Lost => self.seen.resets += 1,
            Ending::Abandoned => self.seen.abandoned += 1,
            Ending::Counted => {}
        }
    }

    /// What it saw beside its batches, and its answers per item added to `answers`.
    pub(super) fn report(&self, answers: &mut HashMap<u64, u32>, batch: BatchTruth) -> OrgTruth {
        for (&id, &count) in &self.answers {
            *answers.entry(id).or_default() += count;
        }
        OrgTruth { batch, ..self.seen.clone() }
    }
}

/// The bin of this moment. After ten days the timeline ends, rather than eat the memory of a run whose clock leapt.
fn bin(timeline: &mut Vec<Bin>, now: Duration) -> Option<&mut Bin> {
    const MOST: usize = 10 * 86_400 * 10;
    let index = usize::try_from(now.as_millis() / BIN.as_millis()).ok().filter(|&i| i < MOST)?;
    if timeline.len() <= index {
        timeline.resize(index + 1, Bin::default());
    }
    timeline.get_mut(index)
}
