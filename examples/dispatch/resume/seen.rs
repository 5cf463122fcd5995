//! The ids of a stream, on disk: nothing is known of them beforehand, so each is looked up as it comes.

use std::{collections::HashMap, io, path::Path};

use redb::{Builder, Database, ReadOnlyTable, ReadableDatabase, TableDefinition, backends::FileBackend};

use super::{
    bits::Bits,
    join::{Fate, Mark, better},
    sorted::{Record, Sorted, nameless},
};

/// By id: what is known of it.
const IDS: TableDefinition<u128, (u64, u128)> = TableDefinition::new("ids");
/// How many ids are written at once, and kept in memory until then.
const BULK: usize = 1 << 14;
/// How much of the file is kept in memory, in bytes.
const CACHE: usize = 8 << 20;

/// What is known of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// It has a row in the output of an earlier run.
    Row { mark: Mark, fingerprint: u128 },
    /// It has come, on this line, as the item of this number.
    Come { line: u64, number: u64 },
}

impl Known {
    fn pack(self) -> (u64, u128) {
        match self {
            Known::Row { mark, fingerprint } => (mark.pack() << 1, fingerprint),
            Known::Come { line, number } => (line << 1 | 1, u128::from(number)),
        }
    }

    fn unpack((number, more): (u64, u128)) -> Self {
        match number & 1 {
            0 => Known::Row { mark: Mark::unpack(number >> 1), fingerprint: more },
            _ => Known::Come { line: number >> 1, number: more as u64 },
        }
    }
}

/// What an id that comes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Met {
    /// To be sent; with what became of its row, if it has one.
    New(Option<Fate>),
    /// Answered, or refused for good, by an earlier run.
    Kept(Fate),
    /// It came before, on this line.
    Twice { line: u64 },
}

/// All ids that have come, and those of an earlier run. Memory does not grow with them, but for a bit of each earlier row.
pub(crate) struct Seen {
    ids: Database,
    /// As of the last bulk; `None` before the first.
    table: Option<ReadOnlyTable<u128, (u64, u128)>>,
    bulk: HashMap<u128, Known>,
    /// How many are written at once.
    limit: usize,
    /// Rows to be taken out at the end: there are better ones.
    out: Bits,
    replaced: Option<u64>,
    doubled: u64,
    come: u64,
    retry_failed: bool,
}

impl Seen {
    /// With the rows of an earlier output, sorted by id. Its file is made in this folder.
    pub(crate) fn new(folder: &Path, rows: Option<&mut Sorted>, retry_failed: bool) -> io::Result<Self> {
        Seen::with_bulk(folder, rows, retry_failed, BULK)
    }

    /// With bulks of so many ids.
    pub(crate) fn with_bulk(
        folder: &Path,
        rows: Option<&mut Sorted>,
        retry_failed: bool,
        limit: usize,
    ) -> io::Result<Self> {
        let file = FileBackend::new(nameless(folder)?).map_err(io::Error::other)?;
        let ids = Builder::new().set_cache_size(CACHE).create_with_backend(file).map_err(io::Error::other)?;
        let (out, bulk) = (Bits::default(), HashMap::new());
        let mut seen = Seen { ids, table: None, bulk, limit, out, replaced: None, doubled: 0, come: 0, retry_failed };
        if let Some(rows) = rows {
            seen.remember(rows)?;
        }
        Ok(seen)
    }

    /// Writes down the better row of each id.
    fn remember(&mut self, rows: &mut Sorted) -> io::Result<()> {
        let mut best: Option<Record> = None;
        for row in rows.iter()? {
            let row = row?;
            match best {
                Some(known) if known.key == row.key => {
                    let (winner, loser) =
                        if better(&row, None) > better(&known, None) { (row, known) } else { (known, row) };
                    self.out.set(Mark::unpack(loser.number).row);
                    self.doubled += 1;
                    best = Some(winner);
                }
                earlier => {
                    best = Some(row);
                    if let Some(row) = earlier {
                        self.put(row.key, Known::Row { mark: Mark::unpack(row.number), fingerprint: row.more })?;
                    }
                }
            }
        }
        if let Some(row) = best {
            self.put(row.key, Known::Row { mark: Mark::unpack(row.number), fingerprint: row.more })?;
        }
        Ok(())
    }

    /// An id comes, with this fingerprint, on this line.
    pub(crate) fn meet(&mut self, id: u128, fingerprint: u128, line: u64) -> io::Result<Met> {
        self.replaced = None;
        let known = match (self.bulk.get(&id), &self.table) {
            (Some(known), _) => Some(*known),
            (None, Some(table)) => {
                let written = table.get(id).map_err(io::Error::other)?;
                written.map(|written| Known::unpack(written.value()))
            }
            (None, None) => None,
        };
        let met = match known {
            Some(Known::Come { line, .. }) => return Ok(Met::Twice { line }),
            Some(Known::Row { mark, fingerprint: then }) => {
                match Fate::of(mark, then, fingerprint, self.retry_failed) {
                    fate @ Fate::Kept(_) => Met::Kept(fate),
                    fate => {
                        self.replaced = Some(mark.row);
                        Met::New(Some(fate))
                    }
                }
            }
            None => Met::New(None),
        };
        self.put(id, Known::Come { line, number: self.come })?;
        self.come += 1;
        Ok(met)
    }

    fn put(&mut self, id: u128, known: Known) -> io::Result<()> {
        self.bulk.insert(id, known);
        if self.bulk.len() >= self.limit { self.write() } else { Ok(()) }
    }

    fn write(&mut self) -> io::Result<()> {
        self.table = None;
        let mut bulk: Vec<_> = self.bulk.drain().collect();
        bulk.sort_unstable_by_key(|(id, _)| *id);
        let write = || -> Result<_, redb::Error> {
            let transaction = self.ids.begin_write()?;
            let mut table = transaction.open_table(IDS)?;
            for (id, known) in bulk {
                table.insert(id, known.pack())?;
            }
            drop(table);
            transaction.commit()?;
            Ok(self.ids.begin_read()?.open_table(IDS)?)
        };
        self.table = Some(write().map_err(io::Error::other)?);
        Ok(())
    }

    /// The row of the id that came last, if it is to be sent again: out as soon as there is another.
    pub(crate) const fn replaced(&self) -> Option<u64> {
        self.replaced
    }

    /// Rows that there are better ones of.
    pub(crate) fn out(&self) -> &Bits {
        &self.out
    }

    /// How many rows of an earlier run were of an id with a better one.
    pub(crate) fn doubled(&self) -> u64 {
        self.doubled
    }

    /// The ids that came, in the order of their keys; the number is the item's.
    pub(crate) fn order(&mut self) -> io::Result<impl Iterator<Item = io::Result<Record>> + use<>> {
        self.write()?;
        let table = self.table.as_ref().ok_or_else(|| io::Error::other("no table"))?;
        let all = table.range::<u128>(..).map_err(io::Error::other)?;
        Ok(all.filter_map(|entry| match entry {
            Err(error) => Some(Err(io::Error::other(error))),
            Ok((id, known)) => match Known::unpack(known.value()) {
                Known::Come { number, .. } => Some(Ok(Record { key: id.value(), number, more: 0 })),
                Known::Row { .. } => None,
            },
        }))
    }
}
