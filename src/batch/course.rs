//! The course of one batch, from its intent to its last row: what is done in which order, and what is written before each step.
//!
//! It is a [work](super::works): whoever waits for any row drives it, and it goes on when that one is dropped. Where it ends early, by a
//! panic or with the service, its record says how far it has come.

use std::{
    collections::{HashMap, HashSet},
    future::poll_fn,
    ops::ControlFlow,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    task::Poll,
    time::{Duration, SystemTime},
};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use tokio::time::Instant;

use super::{
    ApiError, BatchChange, BatchFailure, BatchRows, Counts, Ending, Match, Remote, RemoteBatch, RemoteState, RowEnd,
    Submission, Token, answer,
    api::SKEW,
    law::{self, jittered},
    record::{self, Phase, Record, RowHead, Why},
    state::{Chunk, Closing, End, Gathered, SPLITS, Seen, Shared, State},
    wire::{self, Verdict},
};
use crate::{
    journal::{Key, StoreError},
    outcome::{BoxError, Class, Purse, in_one_line},
};

/// In so many batches a row may be without an answer.
const TRIES: u8 = 2;

/// How often a file of results that cannot be had is asked for.
const FETCHES: u32 = 6;

/// So many pages of an org's batches are looked through for a lost one.
const PAGES: usize = 50;

/// One batch.
pub(super) struct Course {
    shared: Arc<Shared>,
    org: usize,
    record: Record,
    /// What it is made of, until it is submitted.
    chunk: Option<Chunk>,
    /// How its chunk has fared.
    splits: Arc<AtomicU32>,
    crowded: u32,
    clock: Clock,
    met_a_full_queue: bool,
    /// Set when nothing is left to be told of its rows.
    over: bool,
}

/// When it began, and how old it was when.
struct Clock {
    born: SystemTime,
    at: Instant,
    age: Duration,
}

/// How a call is made.
#[derive(Default)]
struct Patience {
    /// Not again where it may have been done.
    once: bool,
    /// Even if the service closes.
    closing: bool,
    /// Until when it may fail.
    until: Option<Instant>,
}

/// What came of a call.
enum Called {
    Answer(Response<Bytes>),
    Out(Class),
    /// It may have been done.
    Unknown,
    /// It has failed for too long.
    Late(String),
    Closing,
}

/// What came of a submission.
enum Created {
    Batch(Box<Remote>),
    Not(Not),
    Unknown,
}

/// Why there is certainly no batch.
enum Not {
    Out(Class),
    Crowded(String),
    Refused(ApiError),
    Unwritten(StoreError),
    Closing,
}

/// What came of the search for a batch whose reply was lost.
enum Found {
    Batch(Box<Remote>),
    Nothing,
    Out(Class),
    /// The org's batches cannot be listed.
    Unlisted(String),
    Closing,
}

/// How the watch over a batch ends.
enum Over {
    Ended(Box<Remote>, Ending),
    Failed { reason: String, queue_full: bool, rows: Vec<usize> },
    Out(Class),
    Deadline,
    Vanished,
    Unread(String),
    Closing,
}

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
struct Undone {
    class: Class,
    said: Arc<str>,
    counted: Counts,
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
    /// A chunk that an org has a place for.
    pub(super) fn fresh(shared: Arc<Shared>, token: Token, org: usize, chunk: Chunk, state: &mut State) -> Self {
        let record = Record {
            token,
            phase: Phase::Intent,
            order: state.next_order(),
            since: (shared.wall)(),
            created: None,
            expires: None,
            org: shared.lines[org].name.to_string(),
            id: None,
            file: None,
            head: RowHead::of(&chunk.group),
            keys: chunk.rows.iter().map(|row| row.key).collect(),
        };
        let clock = Clock { born: record.since, at: Instant::now(), age: Duration::ZERO };
        let (splits, crowded) = (chunk.splits.clone(), chunk.crowded);
        let course = Course {
            shared,
            org,
            record,
            chunk: Some(chunk),
            splits,
            crowded,
            clock,
            met_a_full_queue: false,
            over: false,
        };
        course.enter(state);
        course
    }

    /// A batch of an earlier time, by its record.
    pub(super) async fn resume(shared: Arc<Shared>, token: Token, record: Option<Record>) {
        let record = match record {
            Some(record) => Some(record),
            // Most are in memory.
            None => match shared.store.load().await {
                Ok(all) => all.into_iter().find(|(of, _)| *of == token).and_then(|(_, record)| Record::read(&record)),
                Err(error) => {
                    tracing::warn!(%token, %error, "the record of a batch cannot be read");
                    shared.hand_back_all(token, &BatchFailure::Store(error), false);
                    shared.gone(token, None, false);
                    return;
                }
            },
        };
        let Some(record) = record else {
            tracing::error!(%token, "the record of a batch is gone");
            shared.hand_back_all(token, &BatchFailure::Broken(None), true);
            shared.gone(token, None, false);
            return;
        };
        let Some(org) = shared.line_of(&record.org) else {
            let batch = RemoteBatch { org: record.org.as_str().into(), id: record.id.as_deref().unwrap_or("?").into() };
            tracing::warn!(%batch, "a row is in a batch of an org that is not in the pool");
            shared.hand_back_record(&record, &BatchFailure::OrgOut { batch, class: Class::NoOrg });
            shared.gone(token, Some(&record.keys), false);
            return;
        };
        // Our clock may have been wrong then.
        let born = record.created.unwrap_or(record.since).max(record.since);
        let age = (shared.wall)().duration_since(born).unwrap_or_default();
        let clock = Clock { born, at: Instant::now(), age };
        let splits = Arc::new(AtomicU32::new(SPLITS));
        let course = Course {
            shared: shared.clone(),
            org,
            record,
            chunk: None,
            splits,
            crowded: 0,
            clock,
            met_a_full_queue: false,
            over: false,
        };
        course.enter(&mut shared.lock());
        course.run().await;
    }

    fn enter(&self, state: &mut State) {
        let seen = Seen {
            org: self.org,
            id: self.record.id.as_deref().map(Into::into),
            rows: self.record.keys.len(),
            phase: self.record.phase,
            counts: None,
            age: self.clock.age,
            since: self.clock.at,
            next_poll: None,
            trouble: None,
        };
        state.enter(self.record.token, seen);
    }

    pub(super) async fn run(mut self) {
        match self.chunk.take() {
            Some(chunk) => self.submit(chunk).await,
            None => self.take_up().await,
        }
        self.over = true;
    }

    async fn take_up(&mut self) {
        tracing::info!(batch = %self.name(), phase = ?self.record.phase, rows = self.record.keys.len(), "goes on with a batch of an earlier time");
        if self.record.phase == Phase::Intent {
            let found = self.find().await;
            self.found(found, None).await;
        } else {
            self.shared.lock().batches_so_far[1] += 1;
            self.follow(None).await;
        }
    }

    // Submission.

    async fn submit(&mut self, mut chunk: Chunk) {
        let bodies = chunk.rows.iter().map(|row| row.body.clone()).collect();
        if let Err(error) = self.write(BatchRows::Put(bodies)).await {
            for row in chunk.rows {
                self.end(row.key, End::Back(BatchFailure::Store(error.clone()), Some(row.body)));
            }
            return;
        }
        // What is in the store need not be here.
        chunk.rows.iter_mut().for_each(|row| row.body = Bytes::new());
        tracing::debug!(batch = %self.name(), rows = chunk.rows.len(), "about to submit a batch");
        match self.create(&chunk).await {
            Created::Batch(remote) => {
                drop(chunk);
                self.adopt(&remote).await;
                self.follow(Some(*remote)).await;
            }
            Created::Not(not) => self.not_created(chunk, not).await,
            Created::Unknown => {
                tracing::warn!(batch = %self.name(), "the reply to a submission was lost: looks for the batch");
                let found = self.find().await;
                self.found(found, Some(chunk)).await;
            }
        }
    }

    async fn create(&mut self, chunk: &Chunk) -> Created {
        let api = self.shared.api.clone();
        let token = self.record.token.to_string();
        let lines: Vec<_> = chunk.rows.iter().map(|row| row.line.clone()).collect();
        let mut failed = 0;
        if let Some(upload) = api.upload(&token, &lines) {
            let file = loop {
                let answer = match self.call_until(&upload, Patience::default()).await {
                    Called::Answer(answer) => answer,
                    Called::Out(class) => return Created::Not(Not::Out(class)),
                    Called::Unknown | Called::Late(_) | Called::Closing => return Created::Not(Not::Closing),
                };
                match api.uploaded(&answer) {
                    Ok(file) => break file,
                    // One file too many is not billed.
                    Err(ApiError::Unreadable(why)) => {
                        failed += 1;
                        if self.pause(failed, None, &why).await {
                            return Created::Not(Not::Closing);
                        }
                    }
                    Err(error) => return Created::Not(not(error)),
                }
            };
            self.record.file = Some(file);
            // Where a batch keeps no token it is found by its file.
            if let Err(error) = self.write(BatchRows::Keep).await {
                return Created::Not(Not::Unwritten(error));
            }
        }
        let create = api.create(&chunk.group, &token, self.record.file.as_deref(), &lines);
        drop(lines);
        // The time from which it is looked for.
        let answer = match self.call_until(&create, Patience { once: true, ..Patience::default() }).await {
            Called::Answer(answer) => answer,
            Called::Out(class) => return Created::Not(Not::Out(class)),
            Called::Late(_) | Called::Closing => return Created::Not(Not::Closing),
            Called::Unknown => return Created::Unknown,
        };
        match api.created(&answer) {
            Ok(remote) => Created::Batch(Box::new(remote)),
            Err(ApiError::Unreadable(why)) => {
                self.trouble(&why);
                Created::Unknown
            }
            Err(error) => Created::Not(not(error)),
        }
    }

    /// Nothing is at the provider: its rows go elsewhere, or wait, or are handed back.
    async fn not_created(&mut self, mut chunk: Chunk, not: Not) {
        self.fill(&mut chunk).await;
        let org = self.shared.lines[self.org].name.clone();
        // Before its rows are in another one.
        self.void().await;
        match not {
            Not::Out(class) => {
                self.org_is_out(class);
                self.shared.requeue(self.record.token, [chunk]);
            }
            Not::Crowded(said) => {
                tracing::info!(org = &*org, said, "the org's queue of batches is full: its rows wait");
                self.met_a_full_queue = true;
                self.shared.crowded(self.org);
                self.requeue_smaller(chunk);
            }
            Not::Refused(error) => self.refused(chunk, &error.to_string(), status_of(&error)),
            Not::Unwritten(error) => {
                for row in chunk.rows {
                    self.end(row.key, End::Back(BatchFailure::Store(error.clone()), Some(row.body)));
                }
            }
            Not::Closing => {
                for row in chunk.rows {
                    self.end(row.key, End::Back(BatchFailure::Closed(None), Some(row.body)));
                }
            }
        }
    }

    fn requeue_smaller(&self, mut chunk: Chunk) {
        chunk.crowded += 1;
        if chunk.crowded > 1 && chunk.rows.len() > 1 {
            self.shared.requeue(self.record.token, chunk.halves().into_iter().rev());
        } else {
            self.shared.requeue(self.record.token, [chunk]);
        }
    }

    /// One row may be to blame: it is looked for.
    fn refused(&self, chunk: Chunk, said: &str, status: Option<http::StatusCode>) {
        let org = self.shared.lines[self.org].name.clone();
        tracing::warn!(org = &*org, rows = chunk.rows.len(), said, "a batch was refused as a whole");
        let may_split = || chunk.splits.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        if chunk.rows.len() > 1 && may_split() {
            self.shared.requeue(self.record.token, chunk.halves().into_iter().rev());
            return;
        }
        let said: Arc<str> = said.into();
        for row in chunk.rows {
            let failure = BatchFailure::Refused { org: org.clone(), status, said: said.clone() };
            self.end(row.key, End::Back(failure, Some(row.body)));
        }
    }

    async fn adopt(&mut self, remote: &Remote) {
        let id: Arc<str> = remote.id.as_str().into();
        self.record.id = Some(remote.id.clone());
        self.record.created = remote.created_at;
        self.record.expires = remote.expires_at;
        self.record.phase = Phase::Submitted;
        {
            let mut state = self.shared.lock();
            state.known.insert(id.clone(), self.record.token);
            state.batches_so_far[0] += 1;
            if let Some(seen) = state.batches.get_mut(&self.record.token) {
                (seen.id, seen.phase) = (Some(id), Phase::Submitted);
            }
        }
        // Without it the intent leads there.
        self.written(BatchRows::Keep).await;
        tracing::info!(batch = %self.name(), rows = self.record.keys.len(), "a batch is submitted");
    }

    /// Where a lost reply leads to.
    async fn found(&mut self, found: Found, chunk: Option<Chunk>) {
        match found {
            Found::Batch(remote) => {
                drop(chunk);
                self.adopt(&remote).await;
                self.follow(Some(*remote)).await;
            }
            Found::Nothing => {
                tracing::info!(batch = %self.name(), "it was not submitted: its rows go into another batch");
                let chunk = match chunk {
                    Some(mut chunk) => {
                        self.fill(&mut chunk).await;
                        Some(chunk)
                    }
                    None => self.rebuilt().await,
                };
                self.void().await;
                self.shared.requeue(self.record.token, chunk);
            }
            Found::Out(class) => {
                self.org_is_out(class);
                let batch = self.remaining();
                self.hand_back_all(&BatchFailure::OrgOut { batch, class }).await;
            }
            Found::Unlisted(said) => {
                let org = self.shared.lines[self.org].name.clone();
                self.hand_back_all(&BatchFailure::Unlisted { org, said: said.into() }).await;
            }
            Found::Closing => {
                self.shared.lock().left.push(self.remaining());
                self.hand_back_all(&BatchFailure::Closed(Some(self.remaining()))).await;
            }
        }
    }

    async fn find(&mut self) -> Found {
        let (mut refuted, mut looks, mut wait) = (HashSet::new(), 0, None);
        let until = (self.shared.wall)();
        loop {
            let candidates = match self.look(&refuted, until).await {
                Ok(candidates) => candidates,
                Err(found) => return found,
            };
            if candidates.is_empty() {
                looks += 1;
                // It may take a while until a batch is listed.
                if looks >= 2 {
                    return Found::Nothing;
                }
                if self.nap(self.shared.law.look_again).await {
                    return Found::Closing;
                }
                continue;
            }
            let (mut runs, mut stuck) = (false, None);
            for remote in candidates {
                if self.ending_of(&remote).is_some() {
                    match self.holds_ours(&remote).await {
                        Ok(true) => return Found::Batch(Box::new(remote)),
                        Ok(false) => drop(refuted.insert(remote.id)),
                        Err(found) => return found,
                    }
                } else if matches!(remote.state, RemoteState::Failed { .. }) {
                    refuted.insert(remote.id);
                } else if self.shared.law.is_stuck(self.age(), &remote) {
                    stuck = Some(remote.id);
                } else {
                    runs = true;
                }
            }
            if let (false, Some(id)) = (runs, stuck) {
                // It may be another's, so that it is not cancelled.
                return Found::Unlisted(format!("batch {id} may be it, and has not ended"));
            }
            if runs {
                self.trouble("its reply was lost; a batch that may be it has to end before that is certain");
                wait = Some(self.shared.law.next_poll(wait));
                if self.nap(jittered(wait.unwrap_or_default(), fastrand::f64())).await {
                    return Found::Closing;
                }
            }
        }
    }

    /// Looks through the org's batches: those that may be it, if none is it for certain.
    async fn look(&mut self, refuted: &HashSet<String>, until: SystemTime) -> Result<Vec<Remote>, Found> {
        let api = self.shared.api.clone();
        let oldest = self.record.since.checked_sub(SKEW);
        let (mut candidates, mut after, mut failed) = (vec![], None::<String>, 0);
        // Where they are listed newest first no page after an old one has what is looked for.
        let (mut pages, mut last, mut falls, mut rises) = (0, None, false, false);
        loop {
            let answer = match self.call(&api.list(after.as_deref())).await {
                Called::Answer(answer) => answer,
                Called::Out(class) => return Err(Found::Out(class)),
                Called::Late(said) => return Err(Found::Unlisted(said)),
                Called::Unknown | Called::Closing => return Err(Found::Closing),
            };
            let page = match api.listed(&answer) {
                Ok(page) => page,
                Err(error) => {
                    failed += 1;
                    if failed >= FETCHES {
                        return Err(Found::Unlisted(error.to_string()));
                    }
                    if self.pause(failed, None, &error.to_string()).await {
                        return Err(Found::Closing);
                    }
                    continue;
                }
            };
            pages += 1;
            for remote in page.batches {
                falls |= last.is_some() && remote.created_at < last;
                rises |= remote.created_at.is_none() || last.is_some() && remote.created_at > last;
                last = remote.created_at;
                let other = |token: &Token| *token != self.record.token;
                if refuted.contains(&remote.id) || self.shared.lock().known.get(&*remote.id).is_some_and(other) {
                    continue;
                }
                let token = self.record.token.to_string();
                let submission = Submission {
                    token: &token,
                    file: self.record.file.as_deref(),
                    since: self.record.since,
                    until,
                    rows: self.record.keys.len(),
                };
                match api.matches(&remote, &submission) {
                    Match::Certain => return Err(Found::Batch(Box::new(remote))),
                    Match::Perhaps => candidates.push(remote),
                    Match::No => {}
                }
            }
            let is_past = falls && !rises && last.is_some_and(|last| oldest.is_some_and(|oldest| last < oldest));
            match page.next {
                None => return Ok(candidates),
                Some(_) if is_past => return Ok(candidates),
                Some(next) if pages < PAGES && after.as_ref() != Some(&next) => after = Some(next),
                // Those that were seen may hold it.
                Some(_) if !candidates.is_empty() => return Ok(candidates),
                Some(_) => return Err(Found::Unlisted(format!("after {pages} pages there are more of them"))),
            }
        }
    }

    /// Whether a row of ours is in its results. That none is has to be read: it is not known of a page of a gateway, or of nothing.
    async fn holds_ours(&mut self, remote: &Remote) -> Result<bool, Found> {
        let api = self.shared.api.clone();
        let keys: HashSet<Key> = self.record.keys.iter().copied().collect();
        for fetched in 1..=FETCHES {
            let (mut found, mut strangers, mut unreadable) = (false, false, false);
            for request in api.results(remote) {
                let mut look = |line: &[u8]| {
                    match api.result(line) {
                        Ok(Some(row)) if record::key_of(&row.custom_id).is_some_and(|key| keys.contains(&key)) => {
                            found = true;
                            return ControlFlow::Break(());
                        }
                        Ok(Some(_)) => strangers = true,
                        Ok(None) => {}
                        Err(_) => unreadable = true,
                    }
                    ControlFlow::Continue(true)
                };
                match self.lines_of(&request, &mut look).await {
                    Ok(()) => {}
                    Err(Over::Out(class)) => return Err(Found::Out(class)),
                    Err(Over::Unread(said)) => return Err(Found::Unlisted(said)),
                    Err(_) => return Err(Found::Closing),
                }
                if found {
                    return Ok(true);
                }
            }
            if strangers && !unreadable {
                return Ok(false);
            }
            if fetched < FETCHES
                && self.pause(fetched, None, "the results of what may be it do not say whose they are").await
            {
                return Err(Found::Closing);
            }
        }
        Err(Found::Unlisted(format!("the results of batch {} do not say whose they are", remote.id)))
    }

    // The watch.

    async fn follow(&mut self, first: Option<Remote>) {
        let over = match self.watch(first).await {
            Over::Ended(remote, ending) => match self.harvest(&remote, ending).await {
                Ok(()) => return,
                Err(over) => over,
            },
            over => over,
        };
        match over {
            Over::Failed { reason, queue_full, rows } => self.failed(&reason, queue_full, &rows).await,
            Over::Out(class) => {
                self.org_is_out(class);
                let batch = self.remaining();
                tracing::warn!(%batch, %class, "the org is out, but its batch may still be worked on and billed");
                self.hand_back_all(&BatchFailure::OrgOut { batch, class }).await;
            }
            Over::Deadline | Over::Ended(..) => {
                tracing::warn!(batch = %self.name(), "a batch has not ended in its time");
                self.hand_back_all(&BatchFailure::Deadline(self.remaining())).await;
            }
            Over::Unread(said) => {
                tracing::warn!(batch = %self.name(), said, "a batch has ended, and its results cannot be had");
                self.hand_back_all(&BatchFailure::Unread { batch: self.remaining(), said: said.into() }).await;
            }
            Over::Vanished => {
                tracing::warn!(batch = %self.name(), "a batch is not there any more");
                self.hand_back_all(&BatchFailure::Vanished(self.remaining())).await;
            }
            Over::Closing => {
                let cancels = self.shared.lock().closing == Some(Closing::Cancelling);
                let why = match self.record.phase {
                    Phase::Submitted => Some(Why::Exit),
                    Phase::CancelIntent(why) => Some(why),
                    _ => None,
                };
                if let Some(why) = why.filter(|_| cancels) {
                    let _ = self.cancel(why).await;
                }
                {
                    let is_cancelled = matches!(self.record.phase, Phase::Cancelled(_));
                    let mut state = self.shared.lock();
                    let list = if is_cancelled { &mut state.cancelled } else { &mut state.left };
                    list.push(self.remaining());
                }
                self.hand_back_all(&BatchFailure::Closed(Some(self.remaining()))).await;
            }
        }
    }

    async fn watch(&mut self, first: Option<Remote>) -> Over {
        let (mut remote, mut wait, mut unseen, mut asked) = (first, None, None, false);
        asked |= remote.is_some();
        let mut deadline = self.deadline();
        loop {
            if let Some(now) = &remote {
                self.saw(now);
                deadline = self.deadline();
                if let Some(ending) = self.ending_of(now) {
                    return Over::Ended(Box::new(now.clone()), ending);
                }
                if let RemoteState::Failed { reason, queue_full, rows } = &now.state {
                    let (reason, queue_full, rows) = (reason.clone(), *queue_full, rows.clone());
                    return Over::Failed { reason, queue_full, rows };
                }
                let is_stuck = self.record.phase == Phase::Submitted && self.shared.law.is_stuck(self.age(), now);
                let why = match self.record.phase {
                    // It was interrupted between the intent and the call.
                    Phase::CancelIntent(why) if now.state == RemoteState::Processing => Some(why),
                    _ => is_stuck.then_some(Why::Stuck),
                };
                if let Some(why) = why {
                    if let Err(over) = self.cancel(why).await {
                        return over;
                    }
                    wait = None;
                }
            }
            if self.is_closing() {
                return Over::Closing;
            }
            let now = Instant::now();
            if asked && now >= deadline {
                return Over::Deadline;
            }
            if asked {
                let next = self.shared.law.next_poll(wait);
                wait = Some(next);
                let next = now + jittered(next, fastrand::f64());
                // Once more at the very end.
                let next = next.min(deadline);
                self.shared.see(self.record.token, |seen| seen.next_poll = Some(next));
                if self.nap(next - now).await {
                    return Over::Closing;
                }
            }
            asked = true;
            let id = self.record.id.clone().unwrap_or_default();
            let answer = match self.call(&self.shared.api.retrieve(&id)).await {
                Called::Answer(answer) => answer,
                Called::Out(class) => return Over::Out(class),
                Called::Late(_) => return Over::Deadline,
                Called::Unknown | Called::Closing => return Over::Closing,
            };
            remote = match self.shared.api.retrieved(&answer) {
                Ok(now) => {
                    unseen = None;
                    Some(now)
                }
                Err(ApiError::NotFound) => {
                    let since = *unseen.get_or_insert_with(Instant::now);
                    if !self.shared.law.may_appear(self.age(), since.elapsed()) {
                        return Over::Vanished;
                    }
                    self.trouble("the batch is not there (404); it may appear");
                    None
                }
                Err(error) => {
                    self.trouble(&error.to_string());
                    None
                }
            };
        }
    }

    /// Cancels it: never before the intent is written, and not again once the provider has said that it does.
    async fn cancel(&mut self, why: Why) -> Result<(), Over> {
        let before = std::mem::replace(&mut self.record.phase, Phase::CancelIntent(why));
        if let Err(error) = self.write(BatchRows::Keep).await {
            self.record.phase = before;
            self.trouble(&format!("it is not cancelled: {error}"));
            return Ok(());
        }
        self.shared.see(self.record.token, |seen| seen.phase = Phase::CancelIntent(why));
        tracing::warn!(batch = %self.name(), age = ?self.age(), ?why, "cancels a batch");
        let id = self.record.id.clone().unwrap_or_default();
        match self.call_anyhow(&self.shared.api.cancel(&id)).await {
            Called::Out(class) => return Err(Over::Out(class)),
            Called::Answer(answer) if self.shared.api.retrieved(&answer).is_ok() => {}
            // One that has ended meanwhile refuses it: how it stands is seen at the next poll.
            _ => return Ok(()),
        }
        self.record.phase = Phase::Cancelled(why);
        self.written(BatchRows::Keep).await;
        self.shared.see(self.record.token, |seen| seen.phase = Phase::Cancelled(why));
        Ok(())
    }

    /// How it has ended, if there may be results: one that has failed may have some too.
    fn ending_of(&self, remote: &Remote) -> Option<Ending> {
        match remote.state {
            RemoteState::Ended(ending) => Some(ending),
            RemoteState::Failed { .. } => {
                let has_done = remote.counts.is_some_and(|counts| counts.succeeded > 0);
                (has_done || !self.shared.api.results(remote).is_empty()).then_some(Ending::Completed)
            }
            _ => None,
        }
    }

    fn saw(&mut self, remote: &Remote) {
        self.record.created = remote.created_at.or(self.record.created);
        self.record.expires = remote.expires_at.or(self.record.expires);
        tracing::debug!(batch = %self.name(), state = ?remote.state, counts = ?remote.counts, "a batch was asked about");
        self.shared.see(self.record.token, |seen| {
            seen.counts = remote.counts;
            seen.trouble = None;
        });
    }

    fn age(&self) -> Duration {
        self.clock.age + self.clock.at.elapsed()
    }

    fn deadline(&self) -> Instant {
        let end = self.shared.law.deadline(self.record.created.unwrap_or(self.record.since), self.record.expires);
        let lived = end.duration_since(self.clock.born).unwrap_or_default();
        self.clock.at + lived.saturating_sub(self.clock.age)
    }

    // The end.

    /// It was refused before any row was worked on.
    async fn failed(&mut self, reason: &str, queue_full: bool, blamed: &[usize]) {
        let chunk = self.rebuilt().await;
        self.void().await;
        let Some(mut chunk) = chunk else { return };
        if queue_full {
            tracing::info!(batch = %self.name(), reason, "the org's queue of batches is full: its rows wait");
            self.met_a_full_queue = true;
            self.shared.crowded(self.org);
            self.requeue_smaller(chunk);
            return;
        }
        let blamed: HashSet<_> = blamed.iter().filter_map(|place| self.record.keys.get(*place)).collect();
        if blamed.is_empty() {
            self.refused(chunk, reason, None);
            return;
        }
        let org = self.shared.lines[self.org].name.clone();
        let (guilty, rows): (Vec<_>, Vec<_>) = chunk.rows.into_iter().partition(|row| blamed.contains(&row.key));
        chunk.rows = rows;
        for row in guilty {
            let failure = BatchFailure::Refused { org: org.clone(), status: None, said: reason.into() };
            self.end(row.key, End::Back(failure, Some(row.body)));
        }
        self.shared.requeue(self.record.token, [chunk]);
    }

    async fn harvest(&mut self, remote: &Remote, ending: Ending) -> Result<(), Over> {
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
        let mut counted = Counts::default();
        counted.add(&row.end);
        tally.counts.add(&row.end);
        let why = match row.end {
            RowEnd::Answered(answer) => self.answered(key, answer, tally),
            RowEnd::Expired => Some((Class::Overloaded, "it was not worked on in time".into())),
            RowEnd::Canceled => Some((Class::Overloaded, CANCELED.into())),
            RowEnd::Missing(why) => Some((Class::Transport, why.into())),
        };
        tally.ends.insert(key, why.map(|(class, said)| Undone { class, said, counted }));
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
        let mut group = None;
        for place in 0..self.record.keys.len() {
            let key = self.record.keys[place];
            let end = match tally.ends.get(&key) {
                Some(None) => continue,
                Some(Some(end)) => Some((end.class, end.said.clone())),
                None => None,
            };
            if let (None, Some(said)) = (&end, &tally.lack) {
                let body = self.body(place).await;
                let failure = BatchFailure::Unread { batch: self.remaining(), said: said.clone() };
                self.shared.hand_back(self.record.token, key, failure, body);
                tally.unclaimed.insert(key);
                continue;
            }
            if end.is_none() {
                let end = match ending {
                    Ending::Completed => RowEnd::Missing(String::new()),
                    Ending::Expired => RowEnd::Expired,
                    Ending::Canceled => RowEnd::Canceled,
                };
                tally.counts.add(&end);
            }
            let Some(tries) = self.shared.lock().waits(self.record.token, key) else {
                tally.unclaimed.insert(key);
                continue;
            };
            let was_canceled = match &end {
                Some((_, said)) => &**said == CANCELED,
                None => ending == Ending::Canceled,
            };
            let (class, said) = end.unwrap_or_else(|| match ending {
                Ending::Completed => (Class::Transport, "the results do not name it".into()),
                Ending::Expired => (Class::Overloaded, "it was not worked on in time".into()),
                Ending::Canceled => (Class::Overloaded, CANCELED.into()),
            });
            let body = self.body(place).await;
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
            let request = body.and_then(|body| self.record.head.request(body));
            let row = request.and_then(|request| {
                let row = self.shared.api.row(&record::custom_id(key), &request).ok()?;
                Some((row, request.into_body()))
            });
            let Some((row, body)) = row else {
                self.end(key, End::Back(BatchFailure::Unanswered { batch: self.remaining(), class, said }, None));
                continue;
            };
            self.shared.lock().tried(key);
            group.get_or_insert(row.group);
            again.push(Gathered { key, line: row.bytes, body, weight: row.weight });
        }
        if let Some(group) = group {
            tracing::info!(batch = %self.name(), rows = again.len(), "rows without an answer go into the next batch");
            self.shared.regather(self.record.token, &group, again);
        }
    }

    // Rows.

    fn end(&self, key: Key, end: End) -> bool {
        self.shared.end(self.record.token, key, end)
    }

    async fn body(&self, place: usize) -> Option<Bytes> {
        let place = u32::try_from(place).ok()?;
        let body = self.shared.store.row(self.record.token, place).await;
        body.inspect_err(|error| tracing::warn!(%error, "a row's body cannot be read")).ok().flatten()
    }

    /// All rows that are waited for are handed back; who asks for one again finds the batch.
    async fn hand_back_all(&mut self, failure: &BatchFailure) {
        loop {
            for place in 0..self.record.keys.len() {
                let key = self.record.keys[place];
                if self.shared.lock().waits(self.record.token, key).is_some() {
                    let body = self.body(place).await;
                    self.shared.hand_back(self.record.token, key, failure.clone(), body);
                }
            }
            let keys = self.record.keys.clone();
            if self.shared.finish(&self.record, &keys) {
                return;
            }
        }
    }

    /// All its rows, from the store: who waits for them is seen when they are queued.
    async fn rebuilt(&mut self) -> Option<Chunk> {
        let (mut rows, mut group) = (vec![], None);
        for place in 0..self.record.keys.len() {
            let key = self.record.keys[place];
            let body = self.body(place).await;
            let request = body.and_then(|body| self.record.head.request(body));
            let row = request.and_then(|request| {
                let row = self.shared.api.row(&record::custom_id(key), &request).ok()?;
                Some((row, request.into_body()))
            });
            match row {
                Some((row, body)) => {
                    group.get_or_insert(row.group);
                    rows.push(Gathered { key, line: row.bytes, body, weight: row.weight });
                }
                None => drop(self.end(key, End::Back(BatchFailure::Broken(None), None))),
            }
        }
        Some(Chunk { group: group?, rows, splits: self.splits.clone(), crowded: self.crowded })
    }

    /// Bodies that were left to the store.
    async fn fill(&self, chunk: &mut Chunk) {
        let places: HashMap<Key, usize> = self.record.keys.iter().enumerate().map(|(at, key)| (*key, at)).collect();
        for row in &mut chunk.rows {
            // No row has an empty one.
            if let (true, Some(place)) = (row.body.is_empty(), places.get(&row.key)) {
                row.body = self.body(*place).await.unwrap_or_default();
            }
        }
        chunk.rows.retain(|row| {
            let is_there = !row.body.is_empty();
            if !is_there {
                self.end(row.key, End::Back(BatchFailure::Broken(None), None));
            }
            is_there
        });
    }

    // Records.

    fn write(&self, rows: BatchRows) -> impl Future<Output = Result<(), StoreError>> + Send + 'static {
        self.shared.store.write(BatchChange::new(self.record.token, Some(self.record.write()), rows))
    }

    /// What is written late, or not at all, costs a look at the provider, no row.
    async fn written(&self, rows: BatchRows) {
        if let Err(error) = self.write(rows).await {
            tracing::warn!(batch = %self.name(), %error, "the record of a batch is not kept");
        }
    }

    /// There is no such batch.
    async fn void(&self) {
        let gone = BatchChange::new(self.record.token, None, BatchRows::Drop);
        if let Err(error) = self.shared.store.write(gone).await {
            tracing::warn!(batch = %self.name(), %error, "the record of a batch that is none is still kept");
        }
        let mut state = self.shared.lock();
        self.record.keys.iter().for_each(|key| state.forget_recorded(*key, self.record.token));
    }

    // Calls.

    /// Makes a call about a batch until it is answered, or the batch's time is up.
    async fn call(&self, request: &Request<Bytes>) -> Called {
        self.call_until(request, Patience { until: Some(self.patience()), ..Patience::default() }).await
    }

    /// Even if the service closes meanwhile.
    async fn call_anyhow(&self, request: &Request<Bytes>) -> Called {
        let patience = Patience { until: Some(self.patience()), closing: true, ..Patience::default() };
        self.call_until(request, patience).await
    }

    /// Until when calls about a batch may fail. One of long ago is given some time too.
    fn patience(&self) -> Instant {
        self.deadline().max(Instant::now() + self.shared.law.grace)
    }

    async fn call_until(&self, request: &Request<Bytes>, Patience { once, closing, until }: Patience) -> Called {
        let mut failed = 0;
        loop {
            let line = &self.shared.lines[self.org];
            let (verdict, said) = match line.wire.send(request.clone()).await {
                Ok(answer) => {
                    let verdict = Verdict::of_answer(&answer);
                    let status = answer.status();
                    match (verdict, wire::gathered(answer).await) {
                        (Verdict::Read, Ok(answer)) => return Called::Answer(answer),
                        // A throttle is waited out here; for a place in its queue the rows need not wait at this org.
                        (Verdict::Again { .. }, Ok(answer)) if once && self.is_crowded(&answer) => {
                            return Called::Answer(answer);
                        }
                        (Verdict::Read, Err(error)) => {
                            (Verdict::Again { not_before: None, maybe_done: true }, in_one_line(&*error))
                        }
                        (verdict, _) => (verdict, status.to_string()),
                    }
                }
                Err(error) => (Verdict::of_error(&error), in_one_line(&error)),
            };
            match verdict {
                Verdict::Again { maybe_done: true, .. } if once => {
                    self.trouble(&said);
                    return Called::Unknown;
                }
                Verdict::Again { not_before, .. } => {
                    failed += 1;
                    if failed >= FETCHES && until.is_some_and(|until| Instant::now() >= until) {
                        return Called::Late(said);
                    }
                    if self.pause(failed, not_before, &said).await && !closing {
                        return Called::Closing;
                    }
                    // It would go round without a pause.
                    if self.is_closing() && failed > 3 {
                        return Called::Closing;
                    }
                }
                Verdict::Out(class) => return Called::Out(class),
                Verdict::Read => {}
            }
        }
    }

    fn is_crowded(&self, answer: &Response<Bytes>) -> bool {
        matches!(self.shared.api.created(answer), Err(ApiError::QueueFull(_)))
    }

    /// Reads a file of results line by line. `read` says whether a line told anything; where the last one did not, the file was cut off.
    async fn lines_of(
        &self,
        request: &Request<Bytes>,
        read: &mut (dyn FnMut(&[u8]) -> ControlFlow<(), bool> + Send),
    ) -> Result<(), Over> {
        let (mut failed, mut refused, until) = (0, 0, self.patience());
        loop {
            let line = &self.shared.lines[self.org];
            let mut not_before = None;
            let said = match line.wire.send(request.clone()).await {
                Ok(answer) if answer.status().is_success() => match lines_in(answer.into_body(), read).await {
                    Ok(None) => return Ok(()),
                    Ok(Some(cut)) => {
                        refused += 1;
                        cut.to_owned()
                    }
                    Err(error) => in_one_line(&*error),
                },
                Ok(answer) => {
                    match Verdict::of_answer(&answer) {
                        Verdict::Out(class) => return Err(Over::Out(class)),
                        Verdict::Again { not_before: at, .. } => not_before = at,
                        Verdict::Read => refused += 1,
                    }
                    answer.status().to_string()
                }
                Err(error) => {
                    match Verdict::of_error(&error) {
                        Verdict::Out(class) => return Err(Over::Out(class)),
                        Verdict::Again { not_before: at, .. } => not_before = at,
                        Verdict::Read => refused += 1,
                    }
                    in_one_line(&error)
                }
            };
            failed += 1;
            if refused >= FETCHES || failed >= FETCHES && Instant::now() >= until {
                // They were paid for: nothing of it is sent again.
                return Err(Over::Unread(said));
            }
            if self.pause(failed, not_before, &said).await {
                return Err(Over::Closing);
            }
        }
    }

    /// Waits before another attempt; true if the service closes.
    async fn pause(&self, failed: u32, not_before: Option<Instant>, said: &str) -> bool {
        self.trouble(said);
        let hint = not_before.map(|at| at.saturating_duration_since(Instant::now()));
        self.nap(law::backoff(failed, hint, fastrand::f64())).await
    }

    /// Sleeps; true if the service closes.
    async fn nap(&self, span: Duration) -> bool {
        let mut sleep = pin!(tokio::time::sleep(span));
        poll_fn(|cx| {
            if self.is_closing() {
                return Poll::Ready(true);
            }
            sleep.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    fn is_closing(&self) -> bool {
        self.shared.lock().closing.is_some()
    }

    fn trouble(&self, said: &str) {
        tracing::debug!(batch = %self.name(), said, "a call about a batch");
        self.shared.see(self.record.token, |seen| seen.trouble = Some(said.into()));
    }

    fn org_is_out(&self, class: Class) {
        let line = &self.shared.lines[self.org];
        let mut state = self.shared.lock();
        let before = state.orgs.get_mut(self.org).and_then(|places| places.out.replace(class));
        drop(state);
        if before.is_none() {
            tracing::error!(org = &*line.name, %class, "an org takes no batches any more");
        }
    }

    fn remaining(&self) -> RemoteBatch {
        let id = self.record.id.as_deref().unwrap_or("of an unknown id");
        RemoteBatch { org: self.shared.lines[self.org].name.clone(), id: id.into() }
    }

    fn name(&self) -> RemoteBatch {
        let token = self.record.token.to_string();
        let id = self.record.id.as_deref().unwrap_or(&token);
        RemoteBatch { org: self.shared.lines[self.org].name.clone(), id: id.into() }
    }
}

/// What a row that was cancelled is said to have.
const CANCELED: &str = "its batch was cancelled";

fn not(error: ApiError) -> Not {
    match error {
        ApiError::QueueFull(said) => Not::Crowded(said),
        error => Not::Refused(error),
    }
}

fn status_of(error: &ApiError) -> Option<http::StatusCode> {
    match error {
        ApiError::Refused { status, .. } => Some(*status),
        ApiError::TooLarge => Some(http::StatusCode::PAYLOAD_TOO_LARGE),
        ApiError::NotFound => Some(http::StatusCode::NOT_FOUND),
        _ => None,
    }
}

/// Gives each line to `read`; says so if they are cut off: if the last one told nothing, or has no end.
async fn lines_in(
    mut body: wire::WireBody,
    read: &mut (dyn FnMut(&[u8]) -> ControlFlow<(), bool> + Send),
) -> Result<Option<&'static str>, BoxError> {
    let (mut rest, mut searched) = (BytesMut::new(), 0);
    while let Some(data) = wire::next_data(&mut body).await? {
        rest.extend_from_slice(&data);
        while let Some(at) = memchr::memchr(b'\n', &rest[searched..]) {
            let line = rest.split_to(searched + at + 1);
            searched = 0;
            if read(&line[..line.len() - 1]).is_break() {
                return Ok(None);
            }
        }
        searched = rest.len();
        if searched > wire::GATHERED_MOST {
            return Ok(Some("a line of the results is too long"));
        }
    }
    if rest.is_empty() {
        return Ok(None);
    }
    Ok(match read(&rest) {
        ControlFlow::Continue(false) => Some("the results end before their end"),
        _ => None,
    })
}

impl Drop for Course {
    fn drop(&mut self) {
        if !self.over {
            let batch = self.record.id.is_some().then(|| self.remaining());
            self.shared.hand_back_record(&self.record, &BatchFailure::Broken(batch));
        }
        self.shared.gone(self.record.token, Some(&self.record.keys), !self.met_a_full_queue);
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    #[tokio::test]
    async fn a_line_without_an_end_is_not_kept_for_ever() {
        static PIECE: [u8; 1 << 20] = [b'x'; 1 << 20];
        let pieces = std::iter::repeat_with(|| Ok(http_body::Frame::data(Bytes::from_static(&PIECE)))).take(80);
        let body = Box::pin(StreamBody::new(futures_util::stream::iter(pieces)).map_err(|error: BoxError| error));
        let mut lines = 0;
        let mut read = |_: &[u8]| {
            lines += 1;
            ControlFlow::Continue(true)
        };
        assert_eq!(lines_in(body, &mut read).await.unwrap(), Some("a line of the results is too long"));
        assert_eq!(lines, 0);
    }
}
