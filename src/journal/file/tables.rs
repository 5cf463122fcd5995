//! The file's tables, and everything that is asked of its engine: no panic and no error of its own comes out of here.

use std::{
    io::ErrorKind,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use bytes::Bytes;
use redb::{Database, ReadOnlyTable, ReadableDatabase, ReadableTable, TableDefinition, TableHandle, WriteTransaction};

use super::batches;
use crate::journal::{Key, seal};

/// Entries one after another, block by block, under a running number.
const BLOCKS: TableDefinition<u64, &[u8]> = TableDefinition::new("blocks");
/// Where entries stand, by the [`Short`]s of their keys.
const INDEX: TableDefinition<u64, u64> = TableDefinition::new("index");

/// The first bytes of a key: enough to find an entry by, which then shows its whole key. Two keys that begin alike share a place, and one of
/// them is a miss; of a million one pair does with a chance of one to thirty million. Writing the index is most of what the tables cost,
/// and so it is two and a half times shorter.
pub(super) type Short = u64;

pub(super) fn short(key: &Key) -> Short {
    let (first, _) = key.as_bytes().split_first_chunk().expect("a key has 32 bytes");
    u64::from_be_bytes(*first)
}

/// How long a block may be that holds more than one entry. The engine keeps it in a page whose size is a power of two, with what it
/// says of the page itself: a little less than that wastes least.
const BLOCK: usize = (64 << 10) - 128;

/// Where an entry stands: in which block, and how many bytes from its begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64);

/// So many blocks have a position.
const MOST_BLOCKS: u64 = 1 << (u64::BITS - Position::OFFSET_BITS);

impl Position {
    const OFFSET_BITS: u32 = BLOCK.ilog2() + 1;

    const fn new(block: u64, offset: usize) -> Self {
        Position(block << Self::OFFSET_BITS | offset as u64)
    }

    const fn block(self) -> u64 {
        self.0 >> Self::OFFSET_BITS
    }

    const fn offset(self) -> usize {
        (self.0 & ((1 << Self::OFFSET_BITS) - 1)) as usize
    }
}

/// What went wrong with the file.
#[derive(Debug)]
pub(super) enum Fault {
    /// Somebody else has it open.
    InUse,
    /// It is whole, and somebody else's.
    NotOurs,
    /// What is in it makes no sense.
    Damaged(String),
    /// The system does not let us: the disk is full, say.
    Failed(redb::Error),
}

impl<E: Into<redb::Error>> From<E> for Fault {
    fn from(error: E) -> Self {
        use redb::Error;
        match error.into() {
            Error::DatabaseAlreadyOpen | Error::LockProtocolMismatch => Fault::InUse,
            Error::Io(error) if !matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData) => {
                Fault::Failed(Error::Io(error))
            }
            // An error of the system itself comes as such the first time, and breaks the store: what is remembered of one (`PreviousIo`)
            // was damage.
            other => Fault::Damaged(other.to_string()),
        }
    }
}

/// Runs what asks the engine. It is well kept, but bytes that make no sense may yet make it panic; what it was about is dropped then.
fn caught<T>(run: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|said| (*said).to_owned()));
        Err(Fault::Damaged(said.unwrap_or_else(|| "the file's engine panicked".to_owned())))
    })
}

/// What is dropped without a panic, whatever the file has become.
struct Held<T>(Option<T>);

impl<T> Held<T> {
    fn get(&self) -> &T {
        self.0.as_ref().expect("taken only when it is dropped")
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        let held = self.0.take();
        let _ = caught(|| {
            drop(held);
            Ok(())
        });
    }
}

/// An open file, for its one writer.
pub(super) struct Tables {
    database: Held<Database>,
    /// The number of the next block.
    next: u64,
}

/// The file as of one moment, for readers.
pub(super) struct View(Held<Reading>);

struct Reading {
    blocks: ReadOnlyTable<u64, &'static [u8]>,
    index: ReadOnlyTable<u64, u64>,
}

impl Tables {
    /// Opens a file, or makes one.
    pub(super) fn open(path: &Path, cache: usize) -> Result<Self, Fault> {
        caught(|| {
            let database = Held(Some(Database::builder().set_cache_size(cache).create(path)?));
            let before = database.get().begin_read()?;
            let names: Vec<String> = before.list_tables()?.map(|table| table.name().to_owned()).collect();
            let [records, copies, bodies] = batches::names();
            let ours = [BLOCKS.name(), INDEX.name(), records, copies, bodies];
            // One of them may have a flipped bit.
            let known = names.iter().filter(|name| ours.contains(&name.as_str())).count();
            if (known == 0 && !names.is_empty()) || before.list_multimap_tables()?.next().is_some() {
                return Err(Fault::NotOurs);
            }
            before.close()?;
            if names.is_empty() {
                let making = database.get().begin_write()?;
                making.open_table(BLOCKS)?;
                making.open_table(INDEX)?;
                batches::make(&making)?;
                making.commit()?;
            } else if known < ours.len() || names.len() > ours.len() {
                // A table that has lost its name would be taken for one in which nothing was ever written.
                return Err(Fault::Damaged("its tables have other names".to_owned()));
            }
            let reading = database.get().begin_read()?;
            reading.open_table(INDEX)?;
            let next = match reading.open_table(BLOCKS)?.last()? {
                Some((last, _)) => last.value().checked_add(1).ok_or_else(out_of_order)?,
                None => 0,
            };
            Ok(Tables { database, next })
        })
    }

    /// The file as it is now.
    pub(super) fn view(&self) -> Result<View, Fault> {
        caught(|| {
            let reading = self.database.get().begin_read()?;
            let blocks = reading.open_table(BLOCKS)?;
            Ok(View(Held(Some(Reading { blocks, index: reading.open_table(INDEX)? }))))
        })
    }

    /// Begins to write: all that is pushed, or nothing. So many entries at most, as far as is known.
    pub(super) fn begin(&self, at_most: usize) -> Result<Bulk, Fault> {
        caught(|| {
            let mut writing = self.database.get().begin_write()?;
            // The state of the file goes with the commit, so that opening it after a kill takes no walk through all of it.
            writing.set_quick_repair(true);
            let keys = Vec::with_capacity(at_most.min(1 << 16));
            Ok(Bulk { writing: Held(Some(writing)), next: self.next, block: Vec::with_capacity(BLOCK), keys, kept: 0 })
        })
    }
}

/// Entries on their way into the file. Dropped, nothing of it was.
pub(super) struct Bulk {
    writing: Held<WriteTransaction>,
    next: u64,
    block: Vec<u8>,
    keys: Vec<(Short, Position)>,
    /// How much there is of batches.
    kept: usize,
}

impl Bulk {
    pub(super) fn len(&self) -> usize {
        self.keys.len() + self.kept
    }

    /// What was found of a batch.
    pub(super) fn keep(&mut self, token: &[u8; 16], place: u32, found: &[u8]) -> Result<(), Fault> {
        self.kept += 1;
        caught(|| batches::keep(self.writing.get(), token, place, found))
    }

    pub(super) fn push(&mut self, key: Key, entry: &[u8]) -> Result<(), Fault> {
        if !self.block.is_empty() && self.block.len() + entry.len() > BLOCK {
            self.write_block()?;
        }
        self.keys.push((short(&key), Position::new(self.next, self.block.len())));
        self.block.extend_from_slice(entry);
        Ok(())
    }

    fn write_block(&mut self) -> Result<(), Fault> {
        if self.next >= MOST_BLOCKS {
            return Err(out_of_order());
        }
        let Bulk { writing, next, block, .. } = self;
        caught(|| {
            writing.get().open_table(BLOCKS)?.insert(*next, &block[..])?;
            Ok(())
        })?;
        *next += 1;
        block.clear();
        block.shrink_to(BLOCK);
        Ok(())
    }

    /// Waits until the disk has it.
    pub(super) fn commit(mut self, tables: &mut Tables) -> Result<(), Fault> {
        if self.len() == 0 {
            return Ok(());
        }
        if !self.keys.is_empty() {
            self.write_block()?;
        }
        let (first, Bulk { mut writing, next, mut keys, .. }) = (tables.next, self);
        caught(|| {
            // In order, so that each page of the index is written once. The later of two comes last, and stays.
            keys.sort_unstable();
            let mut index = writing.get().open_table(INDEX)?;
            for (key, position) in &keys {
                index.insert(key, position.0)?;
            }
            // A tree that is damaged takes what it does not give back: better now than when it is asked for.
            keys.dedup_by(|later, earlier| {
                let same = later.0 == earlier.0;
                if same {
                    *earlier = *later;
                }
                same
            });
            let blocks = writing.get().open_table(BLOCKS)?;
            for (key, position) in &keys {
                if index.get(key)?.is_none_or(|found| found.value() != position.0) {
                    return Err(out_of_order());
                }
            }
            for block in first..next {
                if blocks.get(block)?.is_none() {
                    return Err(out_of_order());
                }
            }
            drop((index, blocks));
            if let Some(writing) = writing.0.take() {
                writing.commit()?;
            }
            Ok(())
        })?;
        tables.next = next;
        Ok(())
    }
}

impl View {
    /// Where the index has a key.
    pub(super) fn position(&self, key: &Key) -> Result<Option<Position>, Fault> {
        caught(|| Ok(self.0.get().index.get(short(key))?.map(|position| Position(position.value()))))
    }

    /// The entry that stands there, if it is one of this key.
    pub(super) fn entry(&self, position: Position, key: &Key) -> Result<Option<Bytes>, Fault> {
        caught(|| {
            let block = self.0.get().blocks.get(position.block())?;
            let entry = |block: &[u8]| {
                let entry = block.get(position.offset()..)?;
                let (_, content) = seal::open(entry).filter(|(of, _)| of == key)?;
                Some(Bytes::copy_from_slice(&entry[..seal::HEAD + content.len()]))
            };
            Ok(block.and_then(|block| entry(block.value())))
        })
    }
}

fn out_of_order() -> Fault {
    Fault::Damaged("its entries are out of order".to_owned())
}

impl Tables {
    /// Runs what asks the engine for something else than entries.
    pub(super) fn ask<T>(&self, ask: impl FnOnce(&Database) -> Result<T, Fault>) -> Result<T, Fault> {
        caught(|| ask(self.database.get()))
    }
}
