//! The course of one batch, from its intent to its last row: what is done in which order, and what is written before each step.
//!
//! It is a [work](super::works): whoever waits for any row drives it, and it goes on when that one is dropped. Where it ends early, by a
//! panic or with the service, its record says how far it has come.

mod calls;
mod find;
mod harvest;
mod submit;
mod watch;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    BatchChange, BatchFailure, BatchRows, Group, RemoteBatch, Token,
    record::{self, Phase, Record, RowHead},
    state::{Chunk, End, Gathered, SPLITS, Seen, Shared, State},
};
use crate::{
    journal::{Key, StoreError},
    outcome::Class,
};

/// How often a file of results that cannot be had is asked for.
const FETCHES: u32 = 6;

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
    /// Its rows may come back in a moment.
    unsettled: bool,
    /// Set when nothing is left to be told of its rows.
    over: bool,
}

/// When it began, and how old it was when.
struct Clock {
    born: SystemTime,
    at: Instant,
    age: Duration,
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
            unsettled: false,
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
            unsettled: false,
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
        self.unsettle();
        if self.record.phase == Phase::Intent {
            let found = self.find().await;
            self.found(found, None).await;
        } else {
            self.shared.lock().batches_so_far[1] += 1;
            self.follow(None).await;
        }
    }

    /// Until it is known how it stands, what is gathered waits for its rows.
    fn unsettle(&mut self) {
        if !std::mem::replace(&mut self.unsettled, true) {
            self.shared.unsettled(true);
        }
    }

    fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            self.shared.unsettled(false);
        }
    }

    fn age(&self) -> Duration {
        self.clock.age + self.clock.at.elapsed()
    }

    fn deadline(&self) -> Instant {
        let end = self.shared.law.deadline(self.record.created.unwrap_or(self.record.since), self.record.expires);
        let lived = end.duration_since(self.clock.born).unwrap_or_default();
        self.clock.at + lived.saturating_sub(self.clock.age)
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

    /// A row of it for another batch, if its body is there.
    fn gathered(&self, key: Key, body: Option<Bytes>) -> Option<(Group, Gathered)> {
        let request = self.record.head.request(body?)?;
        let row = self.shared.api.row(&record::custom_id(key), &request).ok()?;
        Some((row.group, Gathered { key, line: row.bytes, body: request.into_body(), weight: row.weight }))
    }

    /// All its rows, from the store: who waits for them is seen when they are queued.
    async fn rebuilt(&mut self) -> Option<Chunk> {
        let (mut rows, mut group) = (vec![], None);
        for place in 0..self.record.keys.len() {
            let key = self.record.keys[place];
            let body = self.body(place).await;
            match self.gathered(key, body) {
                Some((of, row)) => {
                    group.get_or_insert(of);
                    rows.push(row);
                }
                None => drop(self.end(key, End::Back(BatchFailure::Broken(None), None))),
            }
        }
        Some(Chunk {
            group: group?,
            rows,
            splits: self.splits.clone(),
            crowded: self.crowded,
            since: Instant::now(),
            flushed: false,
        })
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

    // What is told of it.

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

impl Drop for Course {
    fn drop(&mut self) {
        if !self.over {
            let batch = self.record.id.is_some().then(|| self.remaining());
            self.shared.hand_back_record(&self.record, &BatchFailure::Broken(batch));
        }
        self.settle();
        self.shared.gone(self.record.token, Some(&self.record.keys), !self.met_a_full_queue);
    }
}
