//! Sorting what does not fit into memory: sorted runs in a temporary file, merged.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
};

/// How many records are sorted in memory at once: 3 MB.
const BATCH: usize = 1 << 16;
/// How many runs of one size are merged into one of the next.
const FAN: usize = 64;
/// How many records are read of a run at once.
const READ: usize = 256;
const SIZE: usize = 40;

/// What is sorted: by the key, then by the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Record {
    pub(crate) key: u128,
    pub(crate) number: u64,
    pub(crate) more: u128,
}

impl Record {
    fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..16].copy_from_slice(&self.key.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.number.to_le_bytes());
        bytes[24..].copy_from_slice(&self.more.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut parts = ([0; 16], [0; 8], [0; 16]);
        parts.0.copy_from_slice(&bytes[..16]);
        parts.1.copy_from_slice(&bytes[16..24]);
        parts.2.copy_from_slice(&bytes[24..SIZE]);
        Record {
            key: u128::from_le_bytes(parts.0),
            number: u64::from_le_bytes(parts.1),
            more: u128::from_le_bytes(parts.2),
        }
    }
}

/// Records in sorted order.
struct Run {
    /// Where it stands in the file.
    bytes: Range<u64>,
    /// How many times it was merged.
    level: u32,
}

/// Takes records in any order. Memory does not grow with their number; the file takes 40 bytes of each, and as much again for every 64
/// times as many.
pub(crate) struct Sorter {
    batch: Vec<Record>,
    /// How long a batch is.
    limit: usize,
    runs: Vec<Run>,
    file: Option<File>,
    end: u64,
    folder: PathBuf,
}

/// A file without a name, gone with the process: in this folder, where there is as much room as for the answers, else in the system's.
pub(crate) fn nameless(folder: &Path) -> io::Result<File> {
    tempfile::tempfile_in(folder).or_else(|_| tempfile::tempfile())
}

impl Sorter {
    /// Its file, if one is needed at all, is made in this folder.
    pub(crate) fn new(folder: &Path) -> Self {
        Sorter::with_batch(folder, BATCH)
    }

    /// With batches of so many records.
    pub(crate) fn with_batch(folder: &Path, limit: usize) -> Self {
        Sorter { batch: Vec::new(), limit, runs: Vec::new(), file: None, end: 0, folder: folder.to_owned() }
    }

    pub(crate) fn push(&mut self, record: Record) -> io::Result<()> {
        self.batch.push(record);
        if self.batch.len() < self.limit {
            return Ok(());
        }
        self.batch.sort_unstable();
        let batch = std::mem::take(&mut self.batch);
        self.append(batch.iter().copied().map(Ok), 0)?;
        self.batch = batch;
        self.batch.clear();
        loop {
            let level = self.runs.last().map_or(0, |run| run.level);
            let same = self.runs.iter().rev().take_while(|run| run.level == level).count();
            let (Some(file), true) = (&self.file, same >= FAN) else { return Ok(()) };
            let runs = self.runs.split_off(self.runs.len() - same);
            let merged = Merged::new(file.try_clone()?, &[], &runs)?;
            self.append(merged, level + 1)?;
        }
    }

    /// Writes a run behind all others.
    fn append(&mut self, records: impl Iterator<Item = io::Result<Record>>, level: u32) -> io::Result<()> {
        let mut file = match &self.file {
            Some(file) => file,
            None => self.file.insert(nameless(&self.folder)?),
        };
        let start = self.end;
        let mut chunk = Vec::with_capacity(READ * SIZE);
        let mut write = |chunk: &mut Vec<u8>| {
            // Whoever reads meanwhile moves the same place in the file.
            file.seek(SeekFrom::Start(self.end))?;
            file.write_all(chunk)?;
            self.end += chunk.len() as u64;
            chunk.clear();
            io::Result::Ok(())
        };
        for record in records {
            chunk.extend_from_slice(&record?.to_bytes());
            if chunk.len() >= READ * SIZE {
                write(&mut chunk)?;
            }
        }
        write(&mut chunk)?;
        self.runs.push(Run { bytes: start..self.end, level });
        Ok(())
    }

    /// There are no more.
    pub(crate) fn finish(mut self) -> Sorted {
        self.batch.sort_unstable();
        Sorted { batch: self.batch, runs: self.runs, file: self.file }
    }
}

/// All records; they can be gone through as often as needed, once at a time.
pub(crate) struct Sorted {
    batch: Vec<Record>,
    runs: Vec<Run>,
    file: Option<File>,
}

impl Sorted {
    /// All of them in their order.
    pub(crate) fn iter(&mut self) -> io::Result<Merged<'_>> {
        let file = match &self.file {
            Some(file) => Some(file.try_clone()?),
            None => None,
        };
        Merged::over(file, &self.batch, &self.runs)
    }
}

/// A run that is being read.
struct Cursor<'a> {
    /// What of it was read and not handed out, last first.
    read: Vec<Record>,
    left: Range<u64>,
    memory: std::slice::Iter<'a, Record>,
}

/// All records of several runs, in their order.
pub(crate) struct Merged<'a> {
    file: Option<File>,
    cursors: Vec<Cursor<'a>>,
    /// The first of each run.
    heads: BinaryHeap<Reverse<(Record, usize)>>,
}

impl<'a> Merged<'a> {
    fn new(file: File, batch: &'a [Record], runs: &[Run]) -> io::Result<Self> {
        Merged::over(Some(file), batch, runs)
    }

    fn over(file: Option<File>, batch: &'a [Record], runs: &[Run]) -> io::Result<Self> {
        let on_disk = runs.iter().map(|run| Cursor { read: Vec::new(), left: run.bytes.clone(), memory: [].iter() });
        let in_memory = Cursor { read: Vec::new(), left: 0..0, memory: batch.iter() };
        let cursors = on_disk.chain([in_memory]).collect();
        let mut merged = Merged { file, cursors, heads: BinaryHeap::new() };
        for run in 0..merged.cursors.len() {
            merged.advance(run)?;
        }
        Ok(merged)
    }

    fn advance(&mut self, run: usize) -> io::Result<()> {
        let cursor = &mut self.cursors[run];
        if let (true, false, Some(file)) = (cursor.read.is_empty(), cursor.left.is_empty(), &mut self.file) {
            let mut bytes = [0; READ * SIZE];
            let bytes = &mut bytes[..(cursor.left.end - cursor.left.start).min((READ * SIZE) as u64) as usize];
            file.seek(SeekFrom::Start(cursor.left.start))?;
            file.read_exact(bytes)?;
            cursor.left.start += bytes.len() as u64;
            cursor.read.extend(bytes.chunks_exact(SIZE).rev().map(Record::from_bytes));
        }
        if let Some(record) = cursor.read.pop().or_else(|| cursor.memory.next().copied()) {
            self.heads.push(Reverse((record, run)));
        }
        Ok(())
    }
}

impl Iterator for Merged<'_> {
    type Item = io::Result<Record>;

    fn next(&mut self) -> Option<io::Result<Record>> {
        let Reverse((record, run)) = self.heads.pop()?;
        Some(self.advance(run).map(|()| record))
    }
}
