//! The store that is one file.
//!
//! # Why redb, and how
//!
//! [redb](https://docs.rs/redb) is one file, pure Rust, transactional: a file that was killed, or whose machine was, is as it was after
//! its last commit. Measured with a million answers of 600 bytes under random keys (one machine with an SSD whose fsync takes 0.26 ms, groups
//! of 256 unless said otherwise):
//!
//! | | time | peak memory |
//! |---|---|---|
//! | redb, entries under a running number, the index of keys written in bulks | 25 s (groups of 64: 35 s) | 26 MB |
//! | redb, keys written at once (groups of 64) | 18.8 s for each 200,000, and growing: every commit rewrites as many pages as it has keys | |
//! | SQLite (WAL, groups of 64) | 14 s for each 200,000 | |
//! | fjall 3 (a folder of files, several threads) | 18 s | 154 MB |
//!
//! A commit costs what it costs, however little is in it. So what is put goes into a *tail* first, a plain file beside this one to which
//! entries are appended; when there are [`index_after`](FileStoreBuilder::index_after) of them they go into the tables in one stroke, in
//! blocks of 64 KiB, and their keys in order. At open, and when the store is closed, what is in the tail goes there too, so that a store
//! that is closed is one file.
//!
//! `cargo bench --bench journal` measures a million requests through the layer; what was measured is in `docs/measured.md`.
//!
//! # What it promises
//!
//! A put resolves when its entry is in the tail's file: no kill takes an entry that a caller has seen. A power cut may take those of the last
//! [`sync_every`](FileStoreBuilder::sync_every); they are sent again, as is what is damaged. What has gone into the tables is synced before
//! the tail lets go of it.

mod batches;
mod salvage;
mod tables;
mod tail;
mod writer;

use std::{
    error::Error as StdError,
    fmt,
    future::{Ready, ready},
    io,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::oneshot;

use self::{
    tables::{Fault, Tables},
    writer::{Shared, Writer},
};
use crate::{
    journal::{Key, Store, StoreError},
    org::BuildError,
    outcome::BoxError,
};

/// Entries in one file, kept by a writer thread of its own.
///
/// All clones are one store; the thread ends, and the file is closed, when the last one is dropped: what was put is written before that,
/// and the drop waits for it, blocking its thread. Reads are made in place, on the caller's thread: from the cache, or one or two pages from
/// the disk.
///
/// While it is open there is a second file beside it, `NAME.tail`, with what was put last; a kill leaves it there, and it belongs to the first.
///
/// The file is for one process at a time; one that died does not keep it. A file that was damaged is set aside as `NAME.damaged` (then
/// `.damaged.2`, and so on) when that shows, at open or when it is written to; what is whole in it goes into a fresh one, and a warning is
/// logged. An entry that cannot be read is a miss.
///
/// ```
/// use bytes::Bytes;
/// use http::Request;
/// use tower_quota::journal::{FileStore, Key, KeyHeaders, Store};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// # let folder = tempfile::tempdir()?;
/// let store = FileStore::open(folder.path().join("answers.journal"))?;
/// let key = Key::of(&Request::post("/v1/messages").body(())?, b"{}", &KeyHeaders::default());
/// assert_eq!(store.get(&key).await?, None);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct FileStore {
    writer: Arc<Writer>,
}

impl FileStore {
    /// Opens the file at `path`, or makes one, with the defaults of [`FileStoreBuilder`]. It blocks: what a killed process has left is
    /// taken in first, and a damaged file is read from end to end.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, OpenError> {
        FileStore::builder(path).open()
    }

    /// Starts from the defaults.
    pub fn builder(path: impl Into<PathBuf>) -> FileStoreBuilder {
        FileStoreBuilder {
            path: path.into(),
            cache: 16 << 20,
            index_after: 65_536,
            linger: Duration::from_millis(2),
            sync_every: Duration::from_millis(100),
        }
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared().path
    }

    fn shared(&self) -> &Shared {
        self.writer.shared()
    }

    fn find(&self, key: &Key) -> Result<Option<Bytes>, Fault> {
        let shared = self.shared();
        let in_tail = shared.places.lock().unwrap_or_else(PoisonError::into_inner).entry(key);
        if let Some(entry) = in_tail.map_err(salvage::failed)? {
            return Ok(Some(entry));
        }
        // After the tail: what has left it is in the tables by now.
        let Some(view) = shared.view.read().unwrap_or_else(PoisonError::into_inner).clone() else { return Ok(None) };
        view.position(key)?.map_or(Ok(None), |position| view.entry(position, key))
    }
}

/// What is kept of batches is asked for and written on the thread that writes, in the order in which it is asked. Where that shows damage, the
/// file is salvaged, and asked again.
#[cfg(feature = "batch")]
impl FileStore {
    /// All records.
    pub(crate) fn batches<T: Send + 'static>(&self, each: fn([u8; 16], Bytes) -> T) -> FileAsk<Vec<T>> {
        let all = move |found: Vec<_>| found.into_iter().map(|(token, record)| each(token, record)).collect();
        self.ask(move |database| batches::load(database).map(all))
    }

    /// The body of a row.
    pub(crate) fn batch_body(&self, token: [u8; 16], place: u32) -> FileAsk<Option<Bytes>> {
        self.ask(move |database| batches::body(database, &token, place))
    }

    /// A batch has this record from now on, or none, and these bodies, or those that it has. What has been committed is safe.
    pub(crate) fn change_batch(
        &self,
        token: [u8; 16],
        record: Option<Bytes>,
        bodies: Option<Vec<Bytes>>,
    ) -> FileAsk<()> {
        let longest = record.iter().chain(bodies.iter().flatten()).map(Bytes::len).max();
        if longest.is_some_and(|longest| longest > batches::MOST) {
            let (refuse, done) = oneshot::channel();
            let _ = refuse.send(Err(StoreError::new(format!("more than {} bytes are not kept", batches::MOST))));
            return FileAsk { done };
        }
        self.ask(move |database| batches::write(database, &token, record.as_ref(), bodies.as_deref()))
    }

    fn ask<T: Send + 'static>(&self, ask: impl Fn(&redb::Database) -> Result<T, Fault> + Send + 'static) -> FileAsk<T> {
        FileAsk { done: self.shared().ask(ask) }
    }
}

/// Resolves when what was asked of the file is done. Dropped, it is done all the same.
#[cfg(feature = "batch")]
pub struct FileAsk<T> {
    done: oneshot::Receiver<Result<T, StoreError>>,
}

#[cfg(feature = "batch")]
impl<T> Future for FileAsk<T> {
    type Output = Result<T, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match ready!(Pin::new(&mut self.done).poll(cx)) {
            Ok(done) => done.map_err(Into::into),
            Err(_) => Err("the journal's writer has ended".into()),
        })
    }
}

#[cfg(feature = "batch")]
impl<T> fmt::Debug for FileAsk<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileAsk").finish_non_exhaustive()
    }
}

impl Store for FileStore {
    type Get = Ready<Result<Option<Bytes>, BoxError>>;
    type Put = FilePut;

    fn get(&self, key: &Key) -> Self::Get {
        ready(match self.find(key) {
            Ok(found) => Ok(found),
            // The disk, not the entry: what it holds is not paid for again, and the engine reads no more of it.
            Err(Fault::Failed(error)) => {
                let why = format!("{} cannot be read: {error}", self.path().display());
                Err(self.shared().broken.get_or_init(|| StoreError::new(why)).clone().into())
            }
            Err(fault) => {
                tracing::debug!(?fault, %key, "an entry cannot be read: it is sent again");
                Ok(None)
            }
        })
    }

    fn put(&self, key: Key, entry: Bytes) -> FilePut {
        FilePut { done: self.shared().put(key, entry) }
    }

    fn broken(&self) -> Option<StoreError> {
        self.shared().broken.get().cloned()
    }
}

impl fmt::Debug for FileStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStore").field("path", &self.path()).field("broken", &self.broken()).finish_non_exhaustive()
    }
}

/// Resolves when the entry is in the file, where no kill takes it back. Dropped, it is written all the same.
pub struct FilePut {
    done: oneshot::Receiver<Result<(), StoreError>>,
}

impl Future for FilePut {
    type Output = Result<(), BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let done = ready!(Pin::new(&mut self.done).poll(cx));
        Poll::Ready(match done {
            Ok(written) => written.map_err(Into::into),
            Err(_) => Err("the journal's writer has ended".into()),
        })
    }
}

impl fmt::Debug for FilePut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FilePut").finish_non_exhaustive()
    }
}

/// What may be said about a [`FileStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct FileStoreBuilder {
    path: PathBuf,
    cache: usize,
    index_after: usize,
    linger: Duration,
    sync_every: Duration,
}

impl FileStoreBuilder {
    /// How many bytes of the file are held in memory at most. Default 16 MiB; at least 1 MiB.
    pub fn cache(mut self, bytes: usize) -> Self {
        self.cache = bytes;
        self
    }

    /// After how many entries the tail goes into the tables; until then each takes some 30 bytes of memory. The more at once, the less is
    /// written. Default 65,536; at least 1. A tail of 64 MiB goes in any case.
    pub fn index_after(mut self, entries: usize) -> Self {
        self.index_after = entries;
        self
    }

    /// How long an entry waits for others that may be written with it. Default 2 ms, which is nothing beside an answer; at most 1 s.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// How far back a power cut may reach, or whatever else stops the machine and not only the process: what was put within this time
    /// before it may be lost, and is sent again. Default 100 ms; at most an hour. With zero every put waits for the disk.
    pub fn sync_every(mut self, time: Duration) -> Self {
        self.sync_every = time;
        self
    }

    /// Opens the file, or makes one.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(self) -> Result<FileStore, OpenError> {
        let FileStoreBuilder { path, cache, index_after, linger, sync_every } = self;
        // Wherever the process goes to later.
        let path = std::path::absolute(&path).unwrap_or(path);
        let checks = [
            ("cache", cache >= 1 << 20, "must be at least 1 MiB"),
            ("index_after", index_after >= 1, "must be at least 1"),
            ("linger", linger <= Duration::from_secs(1), "must be at most a second: callers wait for it"),
            ("sync_every", sync_every <= Duration::from_secs(3600), "must be at most an hour"),
        ];
        if let Some((field, _, problem)) = checks.into_iter().find(|(_, fine, _)| !fine) {
            return Err(OpenError::Config(BuildError::new(field, problem)));
        }
        let problem = |fault: Fault| OpenError::of(&path, fault);
        let failed = |source| OpenError::Io { path: path.clone(), source };
        let tail = tail::path(&path);
        if !tail::is_ours(&tail).map_err(failed)? {
            return Err(OpenError::NotAJournal { path: tail });
        }
        salvage::finish(&path).map_err(failed)?;
        let tables = match Tables::open(&path, cache) {
            Err(Fault::NotOurs) if salvage::has_entry(&path).map_err(failed)? => {
                salvaged(&path, cache, index_after, "its tables have other names").map_err(problem)?
            }
            Err(Fault::Damaged(why)) => {
                if !salvage::is_ours(&path).map_err(failed)? {
                    return Err(OpenError::NotAJournal { path });
                }
                salvaged(&path, cache, index_after, &why).map_err(problem)?
            }
            opened => opened.map_err(problem)?,
        };
        // A power cut leaves its name too.
        salvage::synced_folder(&path);
        let shared = Shared::new(path.clone(), cache, index_after, linger, sync_every);
        let writer = Writer::start(shared, tables).map_err(problem)?;
        Ok(FileStore { writer: Arc::new(writer) })
    }
}

/// Sets a damaged file aside, and says so.
fn salvaged(path: &Path, cache: usize, index_after: usize, why: &str) -> Result<Tables, Fault> {
    let saved = salvage::salvage(path, cache, index_after)?;
    let (file, aside) = (path.display(), saved.aside.display());
    tracing::warn!(%file, %aside, entries = saved.entries, batches = saved.batches, why, "the journal was damaged: what was whole in it is kept, the rest will be sent again");
    Ok(saved.tables)
}

/// Why a [`FileStore`] cannot be opened.
#[non_exhaustive]
#[derive(Debug)]
pub enum OpenError {
    /// Another process has the file open, or another store in this one.
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// The file holds something else. Nothing in it was changed.
    NotAJournal {
        /// The file.
        path: PathBuf,
    },
    /// The system does not allow it.
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file does not work, though the system has not refused anything.
    Broken {
        /// The file.
        path: PathBuf,
        /// Why.
        source: BoxError,
    },
    /// A setting is out of its range.
    Config(BuildError),
}

impl OpenError {
    fn of(path: &Path, fault: Fault) -> Self {
        let path = path.to_owned();
        match fault {
            Fault::InUse => OpenError::InUse { path },
            Fault::NotOurs => OpenError::NotAJournal { path },
            Fault::Failed(redb::Error::Io(source)) => OpenError::Io { path, source },
            Fault::Failed(error) => OpenError::Broken { path, source: error.into() },
            Fault::Damaged(why) => OpenError::Broken { path, source: why.into() },
        }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::InUse { path } => write!(
                f,
                "the journal {} is in use: another process has it open; wait for its end, or name another file",
                path.display()
            ),
            OpenError::NotAJournal { path } => {
                write!(f, "{} is no journal, and is left as it is: name another file", path.display())
            }
            OpenError::Io { path, .. } => write!(f, "the journal {} cannot be opened", path.display()),
            OpenError::Broken { path, .. } => write!(f, "the journal {} does not work", path.display()),
            OpenError::Config(_) => f.write_str("the journal's settings"),
        }
    }
}

impl StdError for OpenError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            OpenError::Io { source, .. } => Some(source),
            OpenError::Broken { source, .. } => Some(&**source),
            OpenError::Config(source) => Some(source),
            OpenError::InUse { .. } | OpenError::NotAJournal { .. } => None,
        }
    }
}
