//! Where records are kept: a trait, and one that keeps them in memory.

use std::{
    collections::BTreeMap,
    fmt,
    future::{Ready, ready},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

use super::Token;
use crate::{journal::StoreError, outcome::BoxError};

/// Where the records of batches are kept, and the bodies of their rows. The journal's [`FileStore`](crate::journal::FileStore) is one;
/// [`MemoryBatches`] forgets with the process.
///
/// What was written must outlive whatever happens to this process: a batch whose record is lost is submitted, and paid for, a second time.
pub trait BatchStore: Clone + Send + Sync + 'static {
    /// The future of [`load`](BatchStore::load).
    type Load: Future<Output = Result<Vec<(Token, Bytes)>, BoxError>> + Send;
    /// The future of [`row`](BatchStore::row).
    type Row: Future<Output = Result<Option<Bytes>, BoxError>> + Send;
    /// The future of [`write`](BatchStore::write).
    type Write: Future<Output = Result<(), BoxError>> + Send;

    /// All records, in whatever order.
    fn load(&self) -> Self::Load;

    /// The body of a row, if it is there.
    fn row(&self, token: Token, place: u32) -> Self::Row;

    /// Makes a change: all of it or nothing. The future resolves once it is safe; it need not be polled for that. Changes are made in the
    /// order in which they are asked for.
    fn write(&self, change: BatchChange) -> Self::Write;
}

/// A change to what is kept of one batch.
#[non_exhaustive]
#[derive(Clone)]
pub struct BatchChange {
    /// Which one.
    pub token: Token,
    /// Its record from now on; `None` if there is none any more.
    pub record: Option<Bytes>,
    /// What becomes of the bodies of its rows.
    pub rows: BatchRows,
}

impl BatchChange {
    /// The record, while the rows stay as they are.
    #[must_use]
    pub const fn new(token: Token, record: Option<Bytes>, rows: BatchRows) -> Self {
        BatchChange { token, record, rows }
    }
}

impl fmt::Debug for BatchChange {
    /// Says how much there is, never what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchChange")
            .field("token", &self.token)
            .field("record", &self.record.as_ref().map(Bytes::len))
            .field("rows", &self.rows)
            .finish()
    }
}

/// What becomes of the bodies of a batch's rows.
#[non_exhaustive]
#[derive(Clone)]
pub enum BatchRows {
    /// They stay as they are.
    Keep,
    /// They are these from now on, from place 0.
    Put(Vec<Bytes>),
    /// There are none any more.
    Drop,
}

impl fmt::Debug for BatchRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchRows::Keep => f.write_str("Keep"),
            BatchRows::Put(rows) => write!(f, "Put({})", rows.len()),
            BatchRows::Drop => f.write_str("Drop"),
        }
    }
}

/// Records in memory: for tests, and for whoever does not mind that batches which run when the process ends are lost to the next.
///
/// All clones are one store.
#[derive(Clone, Default)]
pub struct MemoryBatches(Arc<Mutex<Kept>>);

#[derive(Default)]
struct Kept {
    records: BTreeMap<Token, Bytes>,
    rows: BTreeMap<Token, Vec<Bytes>>,
}

impl MemoryBatches {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        MemoryBatches::default()
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BatchStore for MemoryBatches {
    type Load = Ready<Result<Vec<(Token, Bytes)>, BoxError>>;
    type Row = Ready<Result<Option<Bytes>, BoxError>>;
    type Write = Ready<Result<(), BoxError>>;

    fn load(&self) -> Self::Load {
        ready(Ok(self.lock().records.iter().map(|(token, record)| (*token, record.clone())).collect()))
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        ready(Ok(self.lock().rows.get(&token).and_then(|rows| rows.get(place)).cloned()))
    }

    fn write(&self, BatchChange { token, record, rows }: BatchChange) -> Self::Write {
        let mut kept = self.lock();
        match record {
            Some(record) => kept.records.insert(token, record),
            None => kept.records.remove(&token),
        };
        match rows {
            BatchRows::Keep => {}
            BatchRows::Put(rows) => drop(kept.rows.insert(token, rows)),
            BatchRows::Drop => drop(kept.rows.remove(&token)),
        }
        ready(Ok(()))
    }
}

impl fmt::Debug for MemoryBatches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBatches").field("records", &self.lock().records.len()).finish_non_exhaustive()
    }
}

type Boxed<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A store of whatever type.
pub(super) trait AnyStore: Send + Sync {
    fn load(&self) -> Boxed<Vec<(Token, Bytes)>>;
    fn row(&self, token: Token, place: u32) -> Boxed<Option<Bytes>>;
    fn write(&self, change: BatchChange) -> Boxed<()>;
}

impl<S: BatchStore> AnyStore for S {
    fn load(&self) -> Boxed<Vec<(Token, Bytes)>> {
        let load = BatchStore::load(self);
        // The store is kept as long as it is asked.
        let kept = self.clone();
        Box::pin(async move {
            let found = load.await.map_err(StoreError::from_box);
            drop(kept);
            found
        })
    }

    fn row(&self, token: Token, place: u32) -> Boxed<Option<Bytes>> {
        let row = BatchStore::row(self, token, place);
        Box::pin(async move { row.await.map_err(StoreError::from_box) })
    }

    fn write(&self, change: BatchChange) -> Boxed<()> {
        // Begun now, so that it is made even if nobody waits for it.
        let write = BatchStore::write(self, change);
        Box::pin(async move { write.await.map_err(StoreError::from_box) })
    }
}
