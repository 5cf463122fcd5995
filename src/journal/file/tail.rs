//! The tail: what was put since the tables were last written, entry after entry in a file beside them.
//!
//! To be written there costs an entry next to nothing, and no wait for the disk; once it is in the file no kill takes it back. The file
//! is read like a damaged journal, by what its entries show of themselves, so that a torn end is no matter.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    salvage,
    tables::{Fault, Short, Tables, short},
};
use crate::journal::{Key, seal};

/// Above this it goes into the tables, however few entries it has.
const LONGEST: u64 = 64 << 20;

/// The file of a journal's tail: beside the file itself, by whatever link that is reached.
pub(super) fn path(journal: &Path) -> PathBuf {
    let real = fs::canonicalize(journal).unwrap_or_else(|_| journal.to_owned());
    salvage::beside(&real, ".tail")
}

/// Whether there is no such file, or one that begins as an entry does, by and large, or has one in it. Nobody else's file is touched, nor
/// another journal.
pub(super) fn is_ours(tail: &Path) -> io::Result<bool> {
    let mut begin = vec![];
    match File::open(tail) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        file => file?.take(salvage::ENGINE.len() as u64).read_to_end(&mut begin)?,
    };
    if begin == salvage::ENGINE {
        return Ok(false);
    }
    begin.truncate(seal::MAGIC.len());
    // A power cut may leave its length and not what was in it.
    if begin.iter().all(|byte| *byte == 0) {
        return Ok(true);
    }
    let alike = begin.iter().zip(seal::MAGIC).filter(|(is, was)| **is == *was).count();
    let enough = if begin.len() < seal::MAGIC.len() { begin.len() } else { seal::MAGIC.len() * 2 / 3 };
    Ok(alike >= enough || salvage::has_entry(tail)?)
}

/// Its one writer.
pub(super) struct Tail {
    path: PathBuf,
    file: File,
    length: u64,
    entries: usize,
    /// Since when something in it is not synced.
    unsynced: Option<Instant>,
    buffer: Vec<u8>,
}

/// How many bytes stand before an entry, and how many it has.
#[derive(Clone, Copy)]
pub(super) struct Place {
    at: u64,
    length: u32,
}

/// Where the tail's entries stand, for readers.
#[derive(Default)]
pub(super) struct Places {
    places: HashMap<Short, Place>,
    file: Option<File>,
}

/// What an earlier process has left goes into the tables.
pub(super) fn take_in(journal: &Path, tables: &mut Tables, index_after: usize) -> Result<(), Fault> {
    let path = path(journal);
    if !path.try_exists().map_err(salvage::failed)? {
        return Ok(());
    }
    salvage::each_into(&path, tables, index_after)?;
    salvage::remove(&path)
}

impl Tail {
    /// An empty one, for whoever has the journal to himself. What cannot be made or read is better known before anything is paid for.
    pub(super) fn make(journal: &Path, places: &mut Places) -> io::Result<Self> {
        let path = path(journal);
        let file = make(&path, journal)?;
        places.file = Some(File::open(&path)?);
        Ok(Tail { path, file, length: 0, entries: 0, unsynced: None, buffer: vec![] })
    }

    /// Appends these, and says where they stand. Once this has returned, no kill takes them back.
    pub(super) fn append<'a>(
        &mut self,
        group: impl Iterator<Item = (&'a Key, &'a [u8])>,
    ) -> Result<Vec<(Short, Place)>, Fault> {
        let mut at = self.length;
        let mut places = vec![];
        self.buffer.clear();
        for (key, entry) in group {
            places.push((short(key), Place { at, length: u32::try_from(entry.len()).unwrap_or(u32::MAX) }));
            at += entry.len() as u64;
            self.buffer.extend_from_slice(entry);
        }
        if let Err(error) = self.file.write_all(&self.buffer) {
            // A part of an entry would be passed over, but nothing is gained by it.
            let _ = self.file.set_len(self.length).and_then(|()| self.file.seek(SeekFrom::Start(self.length)));
            return Err(salvage::failed(error));
        }
        self.length = at;
        self.entries += places.len();
        self.unsynced.get_or_insert_with(Instant::now);
        // A large group does not keep its room.
        self.buffer.shrink_to(1 << 20);
        Ok(places)
    }

    /// How long until it is to be synced, if something in it is not.
    pub(super) fn sync_in(&self, every: Duration) -> Option<Duration> {
        self.unsynced.map(|since| every.saturating_sub(since.elapsed()))
    }

    pub(super) fn sync(&mut self) -> Result<(), Fault> {
        self.file.sync_data().map_err(salvage::failed)?;
        self.unsynced = None;
        Ok(())
    }

    pub(super) fn is_full(&self, index_after: usize) -> bool {
        self.entries >= index_after || self.length >= LONGEST
    }

    /// Puts all of it into the tables, safely on the disk. It is there still, until it is [cleared](Tail::clear).
    pub(super) fn put_into(&self, tables: &mut Tables) -> Result<(), Fault> {
        if self.entries == 0 {
            return Ok(());
        }
        // In one stroke: it is bounded, and the rest of it alone would cost as much.
        salvage::each_into(&self.path, tables, self.entries).map(drop)
    }

    /// Forgets what is in the tables by now.
    pub(super) fn clear(&mut self) -> Result<(), Fault> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(salvage::failed)?;
        (self.length, self.entries, self.unsynced) = (0, 0, None);
        Ok(())
    }

    /// The file is not needed any more, if it is empty.
    pub(super) fn close(self) -> Result<(), Fault> {
        let Tail { path, file, entries, .. } = self;
        drop(file);
        if entries == 0 { salvage::remove(&path) } else { Ok(()) }
    }
}

/// Makes the file, for those who may read the journal; a power cut leaves its name too.
fn make(path: &Path, journal: &Path) -> io::Result<File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    file.set_permissions(fs::metadata(journal)?.permissions())?;
    salvage::synced_folder(path);
    Ok(file)
}

impl Places {
    pub(super) fn note(&mut self, places: Vec<(Short, Place)>) {
        self.places.extend(places);
    }

    /// Of what is in the tables by now.
    pub(super) fn clear(&mut self) {
        // Its room is kept: what is given back and asked for again leaves the heap in pieces.
        self.places.clear();
    }

    /// The entry of this key, if it is in the tail and whole.
    pub(super) fn entry(&mut self, key: &Key) -> io::Result<Option<Bytes>> {
        let Some(Place { at, length }) = self.places.get(&short(key)).copied() else { return Ok(None) };
        let Some(file) = &mut self.file else { return Ok(None) };
        let mut entry = vec![0; length as usize];
        file.seek(SeekFrom::Start(at))?;
        match file.read_exact(&mut entry) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        Ok(seal::open(&entry).is_some_and(|(of, _)| of == *key).then(|| entry.into()))
    }
}
