//! The results are read: answers are handed out, and the other rows go on, or back.

use std::{
    collections::{HashMap, HashSet},
    ops::ControlFlow,
    sync::Arc,
};

use bytes::Bytes;
use http::Response;

use super::{Course, FETCHES, calls::Called, watch::Over};
use crate::{
    batch::{
        BatchFailure, BatchRows, Counts, Ending, Remote, RowEnd, answer,
        record::{self, Phase, Why},
        state::End,
    },
    journal::Key,
    outcome::{Class, Purse},
};

/// In so many batches a row may be without an answer.
const TRIES: u8 = 2;

/// What the results say.
#[derive(Default)]
struct Tally {
    counts: Counts,
    /// Rows with an answer for good, and rows that may be tried again.
    ends: HashMap<Key, Option<Undone>>,
    /// Of these the answers that are refusals for good: handed out once all is read, since a success may follow.
    refusals: HashMap<Key, Response<Bytes>>,
    /// Rows that nobody has waited for.
    unclaimed: HashSet<Key>,
    strangers: u64,
    unreadable: u64,
    /// Why rows that the results do not name may be done all the same.
    lack: Option<Arc<str>>,
}

/// How a row ended that has no answer.
#[derive(Clone)]
struct Undone {
    class: Class,
    said: Arc<str>,
    was_canceled: bool,
    counted: Counts,
}

impl Undone {
    /// By its batch, not by an answer.
    fn by(end: &RowEnd) -> Option<Self> {
        let (class, said) = match end {
            RowEnd::Answered(_) => return None,
            RowEnd::Expired => (Class::Overloaded, "it was not worked on in time"),
            RowEnd::Canceled => (Class::Overloaded, "its batch was cancelled"),
            RowEnd::Missing(why) => (Class::Transport, &**why),
        };
        let was_canceled = matches!(end, RowEnd::Canceled);
        Some(Undone { class, said: said.into(), was_canceled, counted: counted(end) })
    }
}

fn counted(end: &RowEnd) -> Counts {
    let mut counted = Counts::default();
    counted.add(end);
    counted
}

impl Tally {
    /// A success is read after all.
    fn uncount(&mut self, row: &Undone) {
        let (all, Counts { succeeded, failed, canceled, expired, .. }) = (&mut self.counts, row.counted);
        for (all, one) in [
            (&mut all.succeeded, succeeded),
            (&mut all.failed, failed),
            (&mut all.canceled, canceled),
            (&mut all.expired, expired),
        ] {
            *all = all.saturating_sub(one);
        }
    }

    /// Why there must be more in the results of a batch of so many rows than was read of them, if so.
    fn lack_of(&self, remote: &Remote, ending: Ending, rows: usize) -> Option<String> {
        let (ends, read) = (self.ends.len(), self.counts.succeeded);
        if ends >= rows {
            return None;
        }
        match remote.counts.filter(|counts| counts.total() > 0).map(|counts| counts.succeeded) {
            _ if self.unreadable > 0 => Some(format!("{} lines of its results cannot be read", self.unreadable)),
            Some(succeeded) if succeeded > read => {
                Some(format!("{succeeded} rows succeeded, and its results have {read}"))
            }
            None if ending == Ending::Completed => Some(format!("its results have {ends} rows, not {rows}")),
            _ => None,
        }
    }
}

impl Course {
    pub(super) async fn harvest(&mut self, remote: &Remote, ending: Ending) -> Result<(), Over> {
        let shared = self.shared.clone();
        let keys: HashSet<Key> = self.record.keys.iter().copied().collect();
        let why = match self.record.phase {
            Phase::CancelIntent(why) | Phase::Cancelled(why) => Some(why),
            _ => None,
        };
        let mut remote = remote.clone();
        loop {
            let mut tally = self.read(&mut remote, ending, &keys).await?;
            self.redrive(&mut tally, ending, why).await;
            if tally.strangers > 0 || tally.unreadable > 0 {
                let (strangers, unreadable) = (tally.strangers, tally.unreadable);
                tracing::warn!(batch = %self.name(), strangers, unreadable, "results that are nobody's");
            }
            // Until the next batch of its own is written, such a row stands here; and for who asks for it later.
            let unanswered = |key: &Key| !matches!(tally.ends.get(key), Some(None));
            let keeps = self.record.keys.iter().any(unanswered);
            self.record.phase = Phase::Ended;
            self.written(if keeps { BatchRows::Keep } else { BatchRows::Drop }).await;
            let counts = tally.counts;
            shared.see(self.record.token, |seen| (seen.phase, seen.counts) = (Phase::Ended, Some(counts)));
            let unclaimed: Vec<_> = tally.unclaimed.into_iter().collect();
            if shared.finish(&self.record, &unclaimed) {
                {
                    let mut state = shared.lock();
                    state.batches_so_far[2] += 1;
                    state.not_crowded(self.org);
                }
                tracing::info!(batch = %self.name(), rows = keys.len(), ?counts, ?ending, "a batch has ended");
                return Ok(());
            }
            // Somebody has come for a row that was read before.
        }
    }

    /// Reads the results. Where these lack what the batch itself has counted, a page of a gateway was read, or half a file.
    async fn read(&self, remote: &mut Remote, ending: Ending, keys: &HashSet<Key>) -> Result<Tally, Over> {
        let mut tally = Tally::default();
        let read = self.read_into(&mut tally, remote, ending, keys).await;
        for (key, answer) in std::mem::take(&mut tally.refusals) {
            tally.ends.insert(key, None);
            if !self.end(key, End::Answer(answer)) {
                tally.unclaimed.insert(key);
            }
        }
        read.map(|()| tally)
    }

    async fn read_into(
        &self,
        tally: &mut Tally,
        remote: &mut Remote,
        ending: Ending,
        keys: &HashSet<Key>,
    ) -> Result<(), Over> {
        let api = self.shared.api.clone();
        let mut fetched = 0;
        loop {
            (tally.strangers, tally.unreadable) = (0, 0);
            for request in api.results(remote) {
                let mut read = |line: &[u8]| ControlFlow::Continue(self.row(line, keys, tally));
                self.lines_of(&request, &mut read).await?;
            }
            let Some(lack) = tally.lack_of(remote, ending, keys.len()) else { return Ok(()) };
            fetched += 1;
            if fetched >= FETCHES {
                tracing::warn!(batch = %self.name(), lack, "a batch has ended, and not all of its results can be had");
                tally.lack = Some(lack.into());
                return Ok(());
            }
            if self.pause(fetched, None, &lack).await {
                return Err(Over::Closing);
            }
            match self.call(&api.retrieve(&remote.id)).await {
                Called::Answer(answer) => {
                    let now = api.retrieved(&answer).ok();
                    if let Some(now) = now.filter(|now| self.ending_of(now).is_some()) {
                        *remote = now;
                    }
                }
                Called::Out(class) => return Err(Over::Out(class)),
                Called::Late(said) => return Err(Over::Unread(said)),
                Called::Unknown | Called::Closing => return Err(Over::Closing),
            }
        }
    }

    /// Reads a line of results; false if it tells nothing.
    fn row(&self, line: &[u8], keys: &HashSet<Key>, tally: &mut Tally) -> bool {
        let row = match self.shared.api.result(line) {
            Ok(None) => return true,
            Ok(Some(row)) => row,
            Err(_) => {
                tally.unreadable += 1;
                return false;
            }
        };
        let Some(key) = record::key_of(&row.custom_id).filter(|key| keys.contains(key)) else {
            tally.strangers += 1;
            return true;
        };
        // A row has one end: it may be read twice, where a file broke off. A success counts for more than what was said before it.
        let is_success = matches!(&row.end, RowEnd::Answered(answer) if answer.status().is_success());
        match tally.ends.remove(&key) {
            Some(Some(before)) if is_success => {
                tally.uncount(&before);
                tally.refusals.remove(&key);
            }
            Some(before) => {
                tally.ends.insert(key, before);
                return true;
            }
            None => {}
        }
        tally.counts.add(&row.end);
        let counted = counted(&row.end);
        let undone = match row.end {
            RowEnd::Answered(answer) => {
                let why = self.answered(key, answer, tally);
                why.map(|(class, said)| Undone { class, said, was_canceled: false, counted })
            }
            end => Undone::by(&end),
        };
        tally.ends.insert(key, undone);
        true
    }

    /// Hands an answer out, if the direct path would; else says why it is to be asked for again.
    fn answered(&self, key: Key, answer: Response<Bytes>, tally: &mut Tally) -> Option<(Class, Arc<str>)> {
        let line = &self.shared.lines[self.org];
        let answer = answer::judged(&line.judge, answer, &line.org, &self.remaining());
        let (class, said) = answer::meaning(&answer);
        let tries = self.shared.lock().waits(self.record.token, key);
        let is_final = match class.implies().purse {
            Purse::Closed => true,
            Purse::Once => tries.is_some_and(|tries| tries > 0),
            _ => false,
        };
        if !is_final {
            return Some((class, said));
        }
        if !answer.status().is_success() {
            tally.refusals.insert(key, answer);
            return Some((class, said));
        }
        if !self.end(key, End::Answer(answer)) {
            tally.unclaimed.insert(key);
        }
        None
    }

    /// Rows without an answer: into the next batch, or back.
    async fn redrive(&mut self, tally: &mut Tally, ending: Ending, why: Option<Why>) {
        let mut again = vec![];
        for place in 0..self.record.keys.len() {
            let key = self.record.keys[place];
            let end = match tally.ends.get(&key) {
                Some(None) => continue,
                Some(Some(end)) => Some(end.clone()),
                None => None,
            };
            if let (None, Some(said)) = (&end, &tally.lack) {
                let body = self.body(place).await;
                let failure = BatchFailure::Unread { batch: self.remaining(), said: said.clone() };
                self.shared.hand_back(self.record.token, key, failure, body);
                tally.unclaimed.insert(key);
                continue;
            }
            let unnamed = match ending {
                Ending::Completed => RowEnd::Missing("the results do not name it".to_owned()),
                Ending::Expired => RowEnd::Expired,
                Ending::Canceled => RowEnd::Canceled,
            };
            if end.is_none() {
                tally.counts.add(&unnamed);
            }
            let Some(tries) = self.shared.lock().waits(self.record.token, key) else {
                tally.unclaimed.insert(key);
                continue;
            };
            // What ends a batch is no answer.
            let Some(Undone { class, said, was_canceled, .. }) = end.or_else(|| Undone::by(&unnamed)) else { continue };
            let body = self.body(place).await;
            if class == Class::Forbidden {
                if let Some((group, _)) = self.gathered(key, body.clone()) {
                    self.shared.lines[self.org].put_model_out(&group);
                }
            }
            let back = if was_canceled && why == Some(Why::Stuck) {
                Some(BatchFailure::Stuck(self.remaining()))
            } else if tries + 1 >= TRIES {
                Some(BatchFailure::Unanswered { batch: self.remaining(), class, said: said.clone() })
            } else {
                None
            };
            if let Some(failure) = back {
                self.end(key, End::Back(failure, body));
                continue;
            }
            let Some(row) = self.gathered(key, body) else {
                self.end(key, End::Back(BatchFailure::Unanswered { batch: self.remaining(), class, said }, None));
                continue;
            };
            self.shared.lock().tried(key);
            again.push(row);
        }
        if !again.is_empty() {
            tracing::info!(batch = %self.name(), rows = again.len(), "rows without an answer go into the next batch");
            self.shared.regather(self.record.token, again);
        }
    }
}
