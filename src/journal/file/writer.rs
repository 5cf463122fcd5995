//! The one writer: a thread that writes what has piled up, group by group.

use std::{
    mem,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock},
    thread::{self, JoinHandle},
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{
    salvaged,
    tables::{Fault, Recent, Tables, View},
};
use crate::journal::{Key, StoreError};

/// With so many there is no wait for more.
const FULL: usize = 1_024;

/// An entry on its way, and whom to tell.
struct Put {
    key: Key,
    entry: Bytes,
    done: oneshot::Sender<Result<(), StoreError>>,
}

/// What else is to be done with the tables, by the one who writes; with none if they are not open.
type Job = Box<dyn FnOnce(Option<&Tables>) + Send>;

#[derive(Default)]
struct Queue {
    puts: Vec<Put>,
    jobs: Vec<Job>,
    /// The last handle is gone: what is here is the last group.
    closing: bool,
    /// Nobody takes anything from here any more.
    ended: bool,
}

/// What the writer and the handles share.
pub(super) struct Shared {
    pub(super) path: PathBuf,
    cache: usize,
    index_after: usize,
    linger: Duration,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// The file after the last commit; none once it is broken beyond reading.
    pub(super) view: RwLock<Option<Arc<View>>>,
    /// The keys that the index of that view lacks.
    pub(super) recent: RwLock<Recent>,
    pub(super) broken: OnceLock<StoreError>,
}

impl Shared {
    pub(super) fn new(path: PathBuf, cache: usize, index_after: usize, linger: Duration, recent: Recent) -> Self {
        Shared {
            path,
            cache,
            index_after,
            linger,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            view: RwLock::default(),
            recent: RwLock::new(recent),
            broken: OnceLock::new(),
        }
    }

    pub(super) fn put(&self, key: Key, entry: Bytes) -> oneshot::Receiver<Result<(), StoreError>> {
        let (done, told) = oneshot::channel();
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.ended {
            return told;
        }
        queue.puts.push(Put { key, entry, done });
        let wakes = matches!(queue.puts.len(), 1 | FULL);
        drop(queue);
        if wakes {
            self.arrived.notify_one();
        }
        told
    }

    /// Does something else with the file, between two groups.
    #[cfg(feature = "batch")]
    pub(super) fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&redb::Database) -> Result<T, redb::Error> + Send + 'static,
    ) -> oneshot::Receiver<Result<T, StoreError>> {
        let (done, told) = oneshot::channel();
        let path = self.path.display().to_string();
        let job = move |tables: Option<&Tables>| {
            let not_open = Fault::Damaged("it is not open".to_owned());
            let asked = tables.map_or(Err(not_open), |tables| tables.ask(ask));
            let _ = done.send(asked.map_err(|fault| StoreError::new(format!("{path} does not work: {fault:?}"))));
        };
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.ended {
            return told;
        }
        queue.jobs.push(Box::new(job));
        drop(queue);
        self.arrived.notify_one();
        told
    }

    /// The next group, and what else is to be done; none once there is nothing more to come.
    fn group(&self) -> Option<(Vec<Put>, Vec<Job>)> {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let mut queue = self
            .arrived
            .wait_while(queue, |queue| queue.puts.is_empty() && queue.jobs.is_empty() && !queue.closing)
            .unwrap_or_else(PoisonError::into_inner);
        // Whoever asks for something else is alone with it.
        let more = |queue: &mut Queue| !queue.closing && queue.jobs.is_empty() && queue.puts.len() < FULL;
        if !self.linger.is_zero() && more(&mut queue) {
            let waited = self.arrived.wait_timeout_while(queue, self.linger, more);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let (puts, jobs) = (mem::take(&mut queue.puts), mem::take(&mut queue.jobs));
        (!puts.is_empty() || !jobs.is_empty()).then_some((puts, jobs))
    }

    /// Readers have the file as it is now.
    fn show(&self, tables: &Tables) -> Result<(), Fault> {
        let view = Arc::new(tables.view()?);
        let before = self.view.write().unwrap_or_else(PoisonError::into_inner).replace(view);
        drop(before);
        Ok(())
    }

    /// Readers have no file for now: all is a miss.
    fn hide(&self) {
        let view = self.view.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(view);
        mem::take(&mut *self.recent.write().unwrap_or_else(PoisonError::into_inner));
    }

    fn write(&self, tables: &mut Option<Tables>, group: &[Put]) -> Result<(), Fault> {
        let Some(open) = tables else { return Err(Fault::Damaged("it is not open".to_owned())) };
        let group = group.iter().map(|put| (&put.key, &put.entry[..]));
        let written = open.write(group, &self.recent, self.index_after)?;
        self.show(open)?;
        // After the view: who finds a key there, or no longer, has a view that knows its entry.
        written.note(&self.recent);
        Ok(())
    }

    /// Writes a group; if the file proves to be damaged, once more into one with what could be saved.
    fn write_somehow(&self, tables: &mut Option<Tables>, group: &[Put]) -> Result<(), Fault> {
        match self.write(tables, group) {
            Err(Fault::Damaged(why)) => {
                self.hide();
                *tables = None;
                let (saved, recent) = salvaged(&self.path, self.cache, self.index_after, &why)?;
                self.show(&saved)?;
                *self.recent.write().unwrap_or_else(PoisonError::into_inner) = recent;
                *tables = Some(saved);
                self.write(tables, group)
            }
            written => written,
        }
    }
}

/// The thread, joined when this is dropped.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(shared: Shared, tables: Tables) -> Result<Self, Fault> {
        let shared = Arc::new(shared);
        shared.show(&tables)?;
        let run = {
            let shared = shared.clone();
            move || run(&shared, tables)
        };
        let thread = thread::Builder::new()
            .name("journal".to_owned())
            .spawn(run)
            .map_err(|error| Fault::Failed(redb::Error::Io(error)))?;
        Ok(Writer { shared, thread: Some(thread) })
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).closing = true;
        self.shared.arrived.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(shared: &Shared, tables: Tables) {
    let mut tables = Some(tables);
    let _end = End(shared);
    while let Some((group, jobs)) = shared.group() {
        let written = match shared.broken.get() {
            Some(broken) => Err(broken.clone()),
            None if group.is_empty() => Ok(()),
            None => shared.write_somehow(&mut tables, &group).map_err(|fault| shared.broken_by(fault)),
        };
        for put in group {
            let _ = put.done.send(written.clone());
        }
        jobs.into_iter().for_each(|job| job(tables.as_ref()));
    }
    // Before the file is closed nobody may read it.
    shared.hide();
}

/// However the thread ends, nobody waits for it after that.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.broken.get_or_init(|| StoreError::new("the journal's writer has panicked"));
        }
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.ended = true;
        let left = (mem::take(&mut queue.puts), mem::take(&mut queue.jobs));
        drop(queue);
        drop(left);
    }
}

impl Shared {
    /// From now on nothing is kept. Said once.
    fn broken_by(&self, fault: Fault) -> StoreError {
        let file = self.path.display();
        let why = match fault {
            Fault::InUse => format!("{file} is in use by another process"),
            Fault::NotOurs => format!("{file} is another program's by now"),
            Fault::Damaged(why) => format!("{file} is damaged, and cannot be mended: {why}"),
            Fault::Failed(redb::Error::Io(error)) => format!("{file} cannot be written: {error}"),
            Fault::Failed(error) => format!("{file} cannot be written: {error}"),
        };
        tracing::error!("the journal {why}; what it has is kept, and nothing is sent that it could not keep");
        self.broken.get_or_init(|| StoreError::new(why)).clone()
    }
}
