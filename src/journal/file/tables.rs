//! The file's tables, and everything that is asked of its engine: no panic and no error of its own comes out of here.

use std::{
    collections::HashMap,
    io::ErrorKind,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{PoisonError, RwLock},
};

use bytes::Bytes;
use redb::{Database, ReadOnlyTable, ReadableDatabase, ReadableTable, TableDefinition, TableHandle};

use crate::journal::{Key, seal};

/// The entries, under a running number.
const ENTRIES: TableDefinition<u64, &[u8]> = TableDefinition::new("entries");
/// The numbers of entries by their keys, up to a number.
const INDEX: TableDefinition<[u8; 32], u64> = TableDefinition::new("index");
/// Up to which number the index goes.
const INDEXED: TableDefinition<(), u64> = TableDefinition::new("indexed");

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
    /// The number of the next entry.
    next: u64,
}

/// The numbers of entries whose keys the index lacks.
pub(super) type Recent = HashMap<Key, u64>;

/// The file as of one moment, for readers.
pub(super) struct View(Held<Reading>);

struct Reading {
    entries: ReadOnlyTable<u64, &'static [u8]>,
    index: ReadOnlyTable<[u8; 32], u64>,
}

impl Tables {
    /// Opens a file, or makes one.
    pub(super) fn open(path: &Path, cache: usize) -> Result<(Self, Recent), Fault> {
        caught(|| {
            let database = Held(Some(Database::builder().set_cache_size(cache).create(path)?));
            let before = database.get().begin_read()?;
            let names: Vec<String> = before.list_tables()?.map(|table| table.name().to_owned()).collect();
            let ours = [ENTRIES.name(), INDEX.name(), INDEXED.name()];
            // One of them may have a flipped bit.
            let known = names.iter().filter(|name| ours.contains(&name.as_str())).count() >= 2;
            if !(names.is_empty() || known) || before.list_multimap_tables()?.next().is_some() {
                return Err(Fault::NotOurs);
            }
            before.close()?;
            let making = database.get().begin_write()?;
            making.open_table(ENTRIES)?;
            making.open_table(INDEX)?;
            let is_new = making.open_table(INDEXED)?.get(())?.is_none();
            if is_new {
                making.open_table(INDEXED)?.insert((), 0)?;
                making.commit()?;
            } else {
                making.abort()?;
            }
            let reading = database.get().begin_read()?;
            let entries = reading.open_table(ENTRIES)?;
            let indexed = reading.open_table(INDEXED)?.get(())?.map_or(0, |number| number.value());
            let next = match entries.last()? {
                Some((last, _)) => last.value().checked_add(1).ok_or_else(out_of_order)?,
                None => 0,
            };
            if indexed > next {
                return Err(out_of_order());
            }
            let mut recent = Recent::new();
            let mut before = None;
            for entry in entries.range(indexed..)? {
                let (number, entry) = entry?;
                let number = number.value();
                // Pages that point to one another would be walked for ever.
                if before.is_some_and(|before| before >= number) || number >= next {
                    return Err(out_of_order());
                }
                before = Some(number);
                if let Some((key, ..)) = seal::head(entry.value()) {
                    recent.insert(key, number);
                }
            }
            Ok((Tables { database, next }, recent))
        })
    }

    /// The file as it is now.
    pub(super) fn view(&self) -> Result<View, Fault> {
        caught(|| {
            let reading = self.database.get().begin_read()?;
            let entries = reading.open_table(ENTRIES)?;
            Ok(View(Held(Some(Reading { entries, index: reading.open_table(INDEX)? }))))
        })
    }

    /// Writes a group and waits until the disk has it: all or nothing. Those of its keys that the index lacks then are added to `recent`;
    /// if that would be `index_after` or more, they and all the others go into the index in the same stroke.
    pub(super) fn write<'a>(
        &mut self,
        group: impl ExactSizeIterator<Item = (&'a Key, &'a [u8])>,
        recent: &RwLock<Recent>,
        index_after: usize,
    ) -> Result<Written, Fault> {
        let next = self.next.checked_add(group.len() as u64).ok_or_else(out_of_order)?;
        let mut keys = Vec::with_capacity(group.len());
        let recent = recent.read().unwrap_or_else(PoisonError::into_inner);
        let indexed = recent.len() + group.len() >= index_after;
        caught(|| {
            let mut writing = self.database.get().begin_write()?;
            // The state of the file goes with every commit, so that opening it after a kill takes no walk through all of it.
            writing.set_quick_repair(true);
            {
                let mut entries = writing.open_table(ENTRIES)?;
                for (number, (key, entry)) in (self.next..).zip(group) {
                    entries.insert(number, entry)?;
                    keys.push((*key, number));
                }
            }
            if indexed {
                keys.extend(recent.iter().map(|(key, number)| (*key, *number)));
                // In order, so that each of its pages is written once. The later of two comes last, and stays.
                keys.sort_unstable();
                let mut index = writing.open_table(INDEX)?;
                for (key, number) in keys.drain(..) {
                    index.insert(key.as_bytes(), number)?;
                }
                drop(index);
                writing.open_table(INDEXED)?.insert((), next)?;
            }
            writing.commit()?;
            Ok(())
        })?;
        self.next = next;
        Ok(Written { keys, indexed })
    }
}

/// What became of the keys of a group.
pub(super) struct Written {
    /// Those that the index lacks.
    keys: Vec<(Key, u64)>,
    /// Whether it lacks none but these.
    indexed: bool,
}

impl Written {
    /// Once readers have a view with the group in it.
    pub(super) fn note(self, recent: &RwLock<Recent>) {
        let mut recent = recent.write().unwrap_or_else(PoisonError::into_inner);
        if self.indexed {
            *recent = Recent::new();
        }
        recent.extend(self.keys);
    }
}

impl View {
    /// The number under which the index has a key.
    pub(super) fn number(&self, key: &Key) -> Result<Option<u64>, Fault> {
        caught(|| Ok(self.0.get().index.get(key.as_bytes())?.map(|number| number.value())))
    }

    /// The entry of a number, if it is one of this key.
    pub(super) fn entry(&self, number: u64, key: &Key) -> Result<Option<Bytes>, Fault> {
        caught(|| {
            let entry = self.0.get().entries.get(number)?;
            let is_its_own = |entry: &&[u8]| seal::open(entry).is_some_and(|(of, _)| of == *key);
            Ok(entry.and_then(|entry| Some(entry.value()).filter(is_its_own).map(Bytes::copy_from_slice)))
        })
    }
}

fn out_of_order() -> Fault {
    Fault::Damaged("its entries are out of order".to_owned())
}

#[cfg(feature = "batch")]
impl Tables {
    /// Runs what asks the engine for something else than entries.
    pub(super) fn ask<T>(&self, ask: impl FnOnce(&Database) -> Result<T, redb::Error>) -> Result<T, Fault> {
        caught(|| ask(self.database.get()).map_err(Fault::from))
    }
}
