//! What all clones of the service share: rows that wait, chunks that are gathered, orgs and how much they have, batches under way.
//!
//! Its lock is never held over an await, a waker, or anything of others'.

mod gather;

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    fmt, mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use tokio::time::Instant;

use super::{
    BatchApi, BatchFailure, Counts, Group, RemoteBatch, Token,
    course::Course,
    law::{Gathering, Law, Size},
    record::{self, Phase, Record},
    store::AnyStore,
    wire::Wire,
    works::Works,
};
use crate::{
    journal::{Key, KeyHeaders},
    judge::JudgeLayer,
    org::{Family, Org},
    outcome::Class,
};

/// How often a chunk that is refused as a whole is split to find the row that is to blame.
pub(super) const SPLITS: u32 = 24;

/// How an org is asked about batches.
pub(super) struct Line {
    pub(super) org: Org,
    pub(super) name: Arc<str>,
    pub(super) wire: Box<dyn Wire>,
    /// Says of a row's answer what it means.
    pub(super) judge: JudgeLayer,
}

impl Line {
    /// Whether the org is out for the model of these rows.
    fn refuses(&self, group: &Group) -> bool {
        if !self.org.refuses_any() {
            return false;
        }
        let model = group.model().map(Family::of_model);
        self.org.refuses(model.as_ref().and_then(Family::model))
    }

    /// A row was refused for its model: the org is out for that.
    pub(super) fn put_model_out(&self, group: &Group) {
        if let Some(model) = group.model() {
            self.org.family(group.family()).put_model_out(model);
        }
    }
}

/// What all clones share.
pub(super) struct Shared {
    pub(super) works: Arc<Works>,
    pub(super) api: Arc<dyn BatchApi>,
    pub(super) store: Box<dyn AnyStore>,
    pub(super) lines: Vec<Line>,
    pub(super) law: Law,
    pub(super) most: Size,
    pub(super) linger: Duration,
    pub(super) in_flight: usize,
    pub(super) headers: KeyHeaders,
    pub(super) wall: Box<dyn Fn() -> SystemTime + Send + Sync>,
    pub(super) cancel_on_exit: bool,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// All that was asked for and not yet handed out.
    rows: HashMap<Key, Row>,
    open: HashMap<Group, Open>,
    /// Chunks that wait for an org.
    closed: VecDeque<Chunk>,
    opened: u64,
    /// Who knows that more rows come.
    pub(super) holds: usize,
    /// Batches of which it is not known yet whether rows come back at once.
    unsettled: usize,
    pub(super) orgs: Vec<Places>,
    next_org: usize,
    /// The highest [order](Record::order) of a record.
    orders: u64,
    /// Rows of batches that nobody has asked for yet.
    recorded: HashMap<Key, Token>,
    /// Their records; where one is not here it is in the store.
    records: HashMap<Token, Record>,
    /// Batches that somebody has begun to go on with.
    under_way: HashSet<Token>,
    /// Ids of batches that are ours.
    pub(super) known: HashMap<Arc<str>, Token>,
    /// Batches under way.
    pub(super) batches: BTreeMap<Token, Seen>,
    /// Those submitted, those of earlier processes, and those of both that have ended.
    pub(super) batches_so_far: [u64; 3],
    answered: u64,
    handed_back: u64,
    pub(super) closing: Option<Closing>,
    /// Who waits for the end of all.
    pub(super) closers: Vec<u64>,
    pub(super) cancelled: Vec<RemoteBatch>,
    pub(super) left: Vec<RemoteBatch>,
}

/// How the service ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closing {
    Leaving,
    Cancelling,
}

/// A row that is waited for.
struct Row {
    place: Place,
    callers: usize,
    /// Those of them that have been polled.
    waiting: Vec<u64>,
    /// In how many batches it was that have not answered it.
    tries: u8,
    /// Since when the replies to all its submissions were lost, and no batch was there.
    in_vain_since: Option<Instant>,
    end: Option<End>,
    /// Somebody has been given it.
    told: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Gathered,
    Batch(Token),
}

/// How a row ends.
#[derive(Clone)]
pub(super) enum End {
    Answer(Response<Bytes>),
    /// With the body of its request, where it can be had.
    Back(BatchFailure, Option<Bytes>),
}

/// What a caller is told.
pub(super) struct Told {
    pub(super) end: End,
    /// Another caller was told before: what was used is counted there.
    pub(super) again: bool,
}

/// A row on its way into a batch.
#[derive(Clone)]
pub(super) struct Gathered {
    pub(super) key: Key,
    pub(super) line: Bytes,
    pub(super) body: Bytes,
    pub(super) weight: usize,
}

/// A chunk that is gathered.
struct Open {
    rows: Vec<Gathered>,
    size: Size,
    number: u64,
    since: Instant,
    last: Instant,
    flushed: bool,
    /// When it is looked at next.
    timed: Option<Instant>,
}

impl Open {
    fn gathering(&self, holds: usize, unsettled: usize) -> Gathering {
        let Open { since, last, flushed, .. } = *self;
        Gathering { since, last, flushed, held: holds > 0, unsettled: unsettled > 0 }
    }
}

/// Rows that go into one batch.
pub(super) struct Chunk {
    pub(super) group: Group,
    pub(super) rows: Vec<Gathered>,
    /// How often it may still be split.
    pub(super) splits: Arc<AtomicU32>,
    /// How often an org's queue was too full for it.
    pub(super) crowded: u32,
    pub(super) since: Instant,
    /// It waits for no rows.
    pub(super) flushed: bool,
}

impl Chunk {
    fn of(group: Group, rows: Vec<Gathered>) -> Self {
        Chunk {
            group,
            rows,
            splits: Arc::new(AtomicU32::new(SPLITS)),
            crowded: 0,
            since: Instant::now(),
            flushed: false,
        }
    }

    /// Whether it has been made smaller, or may become so.
    fn is_marked(&self) -> bool {
        self.crowded > 0 || self.splits.load(Relaxed) < SPLITS
    }

    /// Both halves of it.
    pub(super) fn halves(mut self) -> [Chunk; 2] {
        let rest = self.rows.split_off(self.rows.len().div_ceil(2));
        let (group, splits) = (self.group.clone(), self.splits.clone());
        let rest = Chunk { group, rows: rest, splits, crowded: self.crowded, since: self.since, flushed: self.flushed };
        [self, rest]
    }
}

/// How much an org has.
#[derive(Default)]
pub(super) struct Places {
    taken: usize,
    pub(super) out: Option<Class>,
    /// Since when it has had a place for which there was no chunk.
    idle_since: Option<Instant>,
    /// Its queue is full until then, or until one of its batches ends.
    full_until: Option<Instant>,
    crowded: u32,
}

/// What is shown of a batch under way.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) org: usize,
    pub(super) id: Option<Arc<str>>,
    pub(super) rows: usize,
    pub(super) phase: Phase,
    pub(super) counts: Option<Counts>,
    /// How old it was then.
    pub(super) age: Duration,
    pub(super) since: Instant,
    pub(super) next_poll: Option<Instant>,
    pub(super) trouble: Option<Arc<str>>,
}

/// Whom to wake, once nothing is locked.
#[must_use]
#[derive(Default)]
pub(super) struct Wakes(Vec<u64>);

impl Wakes {
    pub(super) fn wake(self, works: &Works) {
        if !self.0.is_empty() {
            works.wake(&self.0);
        }
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what earlier processes have left.
    pub(super) fn remember(&self, records: Vec<Record>) {
        let mut state = self.lock();
        let mut records = records;
        // Of a row that was in several the last one counts.
        records.sort_by_key(|record| record.order);
        for record in records {
            state.orders = record.order;
            if let Some(id) = &record.id {
                state.known.insert(id.as_str().into(), record.token);
            }
            for key in &record.keys {
                state.recorded.insert(*key, record.token);
            }
            state.records.insert(record.token, record);
        }
    }

    /// One more caller for `key`.
    pub(super) fn join(
        self: &Arc<Self>,
        key: Key,
        request: impl FnOnce() -> Request<Bytes>,
    ) -> Result<(), BatchFailure> {
        if let Some(joined) = self.join_known(key) {
            return joined;
        }
        let request = request();
        let row = self.api.row(&record::custom_id(key), &request).map_err(BatchFailure::Row)?;
        let gathered = Gathered { key, line: row.bytes, body: request.into_body(), weight: row.weight };
        let mut state = self.lock();
        // Somebody else may have come meanwhile.
        if state.closing.is_some() || state.rows.contains_key(&key) || state.recorded.contains_key(&key) {
            drop(state);
            return self.join_known(key).unwrap_or(Err(BatchFailure::Closed(None)));
        }
        state.rows.insert(key, Row::new(Place::Gathered));
        state.gather(row.group, gathered, self.most);
        drop(state);
        self.pump();
        Ok(())
    }

    /// Whether this is in a batch, or was in one whose record stands.
    pub(super) fn holds(&self, key: &Key) -> bool {
        let state = self.lock();
        state.rows.contains_key(key) || state.recorded.contains_key(key)
    }

    fn join_known(self: &Arc<Self>, key: Key) -> Option<Result<(), BatchFailure>> {
        let mut state = self.lock();
        if state.closing.is_some() {
            return Some(Err(BatchFailure::Closed(None)));
        }
        if let Some(row) = state.rows.get_mut(&key) {
            row.callers += 1;
            return Some(Ok(()));
        }
        let token = *state.recorded.get(&key)?;
        state.rows.insert(key, Row::new(Place::Batch(token)));
        // The first one who wants a row of it goes on with it.
        let begins = state.under_way.insert(token);
        let record = if begins { state.records.remove(&token) } else { None };
        drop(state);
        if begins {
            self.works.add(Course::resume(self.clone(), token, record));
        }
        Some(Ok(()))
    }

    /// Whether an org of this name can be asked; its place.
    pub(super) fn line_of(&self, name: &str) -> Option<usize> {
        self.lines.iter().position(|line| &*line.name == name)
    }

    /// Ends a row of this batch; whether somebody waited for it.
    pub(super) fn end(&self, token: Token, key: Key, end: End) -> bool {
        let (wanted, wakes) = self.lock().end(key, Some(token), end);
        Wakes(wakes).wake(&self.works);
        wanted
    }

    /// Hands back a row of a batch whose record stands.
    pub(super) fn hand_back(&self, token: Token, key: Key, failure: BatchFailure, body: Option<Bytes>) {
        let wakes = self.lock().hand_back(token, key, failure, body);
        Wakes(wakes).wake(&self.works);
    }

    /// Hands back all rows of a batch that are left. Its record stands, unless it is `lost`.
    pub(super) fn hand_back_all(&self, token: Token, failure: &BatchFailure, lost: bool) {
        let mut state = self.lock();
        let left = |(key, row): (&Key, &Row)| (row.place == Place::Batch(token) && row.end.is_none()).then_some(*key);
        let keys: Vec<_> = state.rows.iter().filter_map(left).collect();
        let mut wakes = Wakes::default();
        for key in keys {
            wakes.0.extend(state.hand_back(token, key, failure.clone(), None));
            if lost {
                state.forget_recorded(key, token);
            }
        }
        drop(state);
        wakes.wake(&self.works);
    }

    /// The same of a batch that is to be under way no more: its record is kept for who asks again.
    pub(super) fn hand_back_record(self: &Arc<Self>, record: &Record, failure: &BatchFailure) {
        self.hand_back_all(record.token, failure, false);
        while !self.finish(record, &record.keys) {
            self.hand_back_all(record.token, failure, false);
        }
    }

    /// How a row has ended; else `number` is woken when it has.
    pub(super) fn told(&self, key: Key, number: Option<u64>) -> Option<Told> {
        let mut state = self.lock();
        let row = state.rows.get_mut(&key)?;
        if row.end.is_none() {
            row.waiting.extend(number.filter(|number| !row.waiting.contains(number)));
            return None;
        }
        let again = mem::replace(&mut row.told, true);
        row.callers -= 1;
        let end = if row.callers == 0 { state.rows.remove(&key).and_then(|row| row.end) } else { row.end.clone() };
        Some(Told { end: end?, again })
    }

    /// A caller is gone before it was told.
    pub(super) fn leave(&self, key: Key, number: Option<u64>) {
        let mut state = self.lock();
        let Some(row) = state.rows.get_mut(&key) else { return };
        row.callers -= 1;
        row.waiting.retain(|waiting| Some(*waiting) != number);
        if row.callers > 0 || row.end.is_none() {
            return;
        }
        let gone = state.rows.remove(&key);
        if let Some(Row { place: Place::Batch(token), end: Some(End::Answer(_)), told: false, .. }) = &gone {
            // It is paid for: who asks for it again has it from there.
            state.recorded.insert(key, *token);
        }
        drop(state);
        drop(gone);
    }

    /// Whether all is done that somebody waits for in this batch; then it is under way no more. Its rows in `unclaimed` are found again by
    /// who asks for them.
    pub(super) fn finish(self: &Arc<Self>, record: &Record, unclaimed: &[Key]) -> bool {
        let token = record.token;
        let mut state = self.lock();
        if record.keys.iter().any(|key| state.waits(token, *key).is_some()) {
            return false;
        }
        for key in &record.keys {
            let gone = |row: &Row| row.place == Place::Batch(token) && row.end.is_none();
            if state.rows.get(key).is_some_and(gone) {
                state.rows.remove(key);
            }
        }
        for key in unclaimed {
            // Unless it is in another one by now, or stands in a later one. Of this one a caller may be still to be told.
            if state.rows.get(key).is_none_or(|row| row.place == Place::Batch(token)) {
                state.recorded.entry(*key).or_insert(token);
            }
        }
        let is_recorded = record.keys.iter().any(|key| state.recorded.get(key) == Some(&token));
        if is_recorded {
            state.records.insert(token, record.clone());
        }
        true
    }

    /// A batch of these rows is under way no more; whether it has left room in its org's queue.
    pub(super) fn gone(self: &Arc<Self>, token: Token, keys: Option<&[Key]>, left_room: bool) {
        let mut state = self.lock();
        state.under_way.remove(&token);
        // Somebody may have come since the last look at them.
        let waits = match keys {
            Some(keys) => keys.iter().any(|key| state.waits(token, *key).is_some()),
            None => state.rows.values().any(|row| row.is_waited_for(token)),
        };
        let again = waits.then(|| {
            state.under_way.insert(token);
            state.records.remove(&token)
        });
        let seen = state.batches.remove(&token);
        if let Some(places) = seen.and_then(|seen| state.orgs.get_mut(seen.org)) {
            places.taken = places.taken.saturating_sub(1);
            if left_room {
                places.full_until = None;
            }
        }
        let closers = Wakes(mem::take(&mut state.closers));
        drop(state);
        closers.wake(&self.works);
        if let Some(record) = again {
            self.works.add(Course::resume(self.clone(), token, record));
        }
        self.pump();
    }

    pub(super) fn see(&self, token: Token, change: impl FnOnce(&mut Seen)) {
        if let Some(seen) = self.lock().batches.get_mut(&token) {
            change(seen);
        }
    }

    /// Nothing new is taken, and all works come to their end.
    pub(super) fn close(self: &Arc<Self>, how: Closing) {
        let mut state = self.lock();
        // Who cancels has the last word.
        state.closing = Some(state.closing.map_or(how, |before| if before == how { how } else { Closing::Cancelling }));
        drop(state);
        self.pump();
        self.works.stir();
    }

    /// What runs at the provider now.
    pub(super) fn running(&self) -> Vec<RemoteBatch> {
        let state = self.lock();
        let of = |seen: &Seen| {
            let is_over = seen.phase == Phase::Ended;
            let id = seen.id.clone().filter(|_| !is_over)?;
            Some(RemoteBatch { org: self.lines[seen.org].name.clone(), id })
        };
        state.batches.values().filter_map(of).collect()
    }
}

impl State {
    /// Nothing yet, with so many orgs.
    pub(super) fn of(orgs: usize) -> Self {
        State { orgs: (0..orgs).map(|_| Places::default()).collect(), ..State::default() }
    }

    /// Ends a row, if it is where it is said to be: whether somebody waited for it, and whom to wake.
    fn end(&mut self, key: Key, of: Option<Token>, end: End) -> (bool, Vec<u64>) {
        let place = of.map_or(Place::Gathered, Place::Batch);
        let Some(row) = self.rows.get_mut(&key).filter(|row| row.place == place && row.end.is_none()) else {
            return (false, vec![]);
        };
        if row.callers == 0 {
            self.rows.remove(&key);
            if let (Some(token), End::Answer(_)) = (of, &end) {
                // It is paid for: who asks for it from now on has it from there.
                self.recorded.insert(key, token);
            }
            return (false, vec![]);
        }
        match end {
            End::Answer(_) => self.answered += 1,
            End::Back(..) => self.handed_back += 1,
        }
        row.end = Some(end);
        self.recorded.remove(&key);
        (true, mem::take(&mut row.waiting))
    }

    /// Ends a row of a batch whose record stands: who asks for it again, from this moment on, finds the batch. Whom to wake.
    fn hand_back(&mut self, token: Token, key: Key, failure: BatchFailure, body: Option<Bytes>) -> Vec<u64> {
        let (wanted, wakes) = self.end(key, Some(token), End::Back(failure, body));
        if wanted {
            self.recorded.insert(key, token);
        }
        wakes
    }

    /// Whether a row of this batch is waited for; in how many batches it was before.
    pub(super) fn waits(&self, token: Token, key: Key) -> Option<u8> {
        self.rows.get(&key).filter(|row| row.is_waited_for(token)).map(|row| row.tries)
    }

    /// A submission more, of this time, has come to nothing: when the first one was.
    pub(super) fn in_vain_since(&mut self, key: Key, at: Instant) -> Option<Instant> {
        self.rows.get_mut(&key).map(|row| *row.in_vain_since.get_or_insert(at))
    }

    /// It is in a batch.
    pub(super) fn not_in_vain(&mut self, key: Key) {
        if let Some(row) = self.rows.get_mut(&key) {
            row.in_vain_since = None;
        }
    }

    /// One batch more has not answered it.
    pub(super) fn tried(&mut self, key: Key) {
        if let Some(row) = self.rows.get_mut(&key) {
            row.tries += 1;
        }
        self.recorded.remove(&key);
    }

    /// There is no such batch.
    pub(super) fn forget_recorded(&mut self, key: Key, token: Token) {
        if self.recorded.get(&key) == Some(&token) {
            self.recorded.remove(&key);
        }
    }

    pub(super) fn next_order(&mut self) -> u64 {
        self.orders = self.orders.saturating_add(1);
        self.orders
    }

    /// A batch is under way, and has a place at its org.
    pub(super) fn enter(&mut self, token: Token, seen: Seen) {
        if let Some(places) = self.orgs.get_mut(seen.org) {
            places.taken += 1;
        }
        self.under_way.insert(token);
        self.batches.insert(token, seen);
    }

    pub(super) fn not_crowded(&mut self, org: usize) {
        if let Some(places) = self.orgs.get_mut(org) {
            places.crowded = 0;
        }
    }

    /// Rows that are gathered, that wait for a place, and that are in batches; then what was answered and handed back.
    pub(super) fn figures(&self) -> [u64; 5] {
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let gathered = self.open.values().map(|open| open.rows.len()).sum();
        let queued = self.closed.iter().map(|chunk| chunk.rows.len()).sum();
        let in_batches = self.rows.values().filter(|row| row.place != Place::Gathered && row.end.is_none()).count();
        [count(gathered), count(queued), count(in_batches), self.answered, self.handed_back]
    }
}

impl Row {
    fn new(place: Place) -> Self {
        Row { place, callers: 1, waiting: vec![], tries: 0, in_vain_since: None, end: None, told: false }
    }

    fn is_waited_for(&self, token: Token) -> bool {
        self.place == Place::Batch(token) && self.end.is_none() && self.callers > 0
    }
}

impl Places {
    fn is_free(&self, in_flight: usize, now: Instant) -> bool {
        self.taken < in_flight && self.full_until.is_none_or(|until| until <= now)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("api", &self.api).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::record::RowHead, *};
    use crate::batch::{BatchService, MemoryBatches};

    /// A batch of an earlier process, and who is there to go on with it.
    async fn remembered() -> (BatchService, Record) {
        let orgs = crate::org::Orgs::new([Org::new("a")]).unwrap();
        let silent = tower::service_fn(|_: Request<http_body_util::Full<Bytes>>| {
            std::future::pending::<Result<Response<http_body_util::Full<Bytes>>, std::io::Error>>()
        });
        let service: BatchService = BatchService::builder(orgs, MemoryBatches::new()).open(silent).await.unwrap();
        let token = Token::draw();
        let record = Record {
            token,
            phase: Phase::Submitted,
            order: 1,
            since: SystemTime::now(),
            created: None,
            expires: None,
            org: "a".to_owned(),
            id: Some("msgbatch_1".to_owned()),
            file: None,
            head: RowHead::default(),
            keys: vec![Key::from_bytes([7; 32])],
        };
        (service, record)
    }

    #[tokio::test(start_paused = true)]
    async fn who_comes_between_the_last_look_at_a_batch_and_its_leaving_is_not_left_behind() {
        let (service, record) = remembered().await;
        let (shared, key) = (service.shared(), record.keys[0]);
        shared.remember(vec![record.clone()]);
        // As its course does at its end.
        shared.lock().under_way.insert(record.token);
        assert!(shared.finish(&record, &record.keys));
        shared.join(key, || panic!("it stands in a batch")).unwrap();
        assert_eq!(shared.works.count(), 0, "there is a course yet");
        shared.gone(record.token, Some(&record.keys), true);
        assert_eq!(shared.works.count(), 1, "somebody goes on with it");
        assert!(shared.lock().under_way.contains(&record.token));
    }
}
