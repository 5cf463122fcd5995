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
    salvage, salvaged,
    tables::{Fault, Tables, View},
    tail::{self, Places, Tail},
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
type Job = Box<dyn FnOnce(&Shared, &mut Option<Tables>) + Send>;

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
    sync_every: Duration,
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// The tables after the last commit; none once they are broken beyond reading.
    pub(super) view: RwLock<Option<Arc<View>>>,
    /// What that view lacks.
    pub(super) places: Mutex<Places>,
    pub(super) broken: OnceLock<StoreError>,
}

impl Shared {
    pub(super) fn new(path: PathBuf, cache: usize, index_after: usize, linger: Duration, sync_every: Duration) -> Self {
        Shared {
            path,
            cache,
            index_after,
            linger,
            sync_every,
            queue: Mutex::default(),
            arrived: Condvar::new(),
            view: RwLock::default(),
            places: Mutex::default(),
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

    /// Does something else with the file, between two groups; once more, if that shows damage, with what could be saved.
    #[cfg(feature = "batch")]
    pub(super) fn ask<T: Send + 'static>(
        &self,
        ask: impl Fn(&redb::Database) -> Result<T, Fault> + Send + 'static,
    ) -> oneshot::Receiver<Result<T, StoreError>> {
        let (done, told) = oneshot::channel();
        let job = move |shared: &Shared, tables: &mut Option<Tables>| {
            let asked = match shared.broken.get() {
                None => shared.somehow(tables, |open| open.ask(&ask)),
                // After an error of the system the engine takes all that follows for damage, which it is not.
                Some(_) => tables.as_ref().ok_or_else(not_open).and_then(|open| open.ask(&ask)),
            };
            let breaks = |fault: &Fault| matches!(fault, Fault::Failed(_)) || tables.is_none();
            // The store is broken before anybody is told, or he would send what it cannot keep.
            let told = asked.map_err(|fault| match shared.broken.get() {
                Some(broken) => broken.clone(),
                None if breaks(&fault) => shared.broken_by(fault),
                None => StoreError::new(format!("{} does not work: {fault:?}", shared.path.display())),
            });
            let _ = done.send(told);
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

    /// What comes next. `sync_in` is how long the disk may wait.
    fn next(&self, sync_in: Option<Duration>) -> Next {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = |queue: &mut Queue| queue.puts.is_empty() && queue.jobs.is_empty() && !queue.closing;
        let mut queue = match sync_in {
            None => self.arrived.wait_while(queue, idle).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.arrived.wait_timeout_while(queue, left, idle).unwrap_or_else(PoisonError::into_inner).0,
        };
        if idle(&mut queue) {
            return Next::Sync;
        }
        // Whoever asks for something else is alone with it.
        let more = |queue: &mut Queue| !queue.closing && queue.jobs.is_empty() && queue.puts.len() < FULL;
        if !self.linger.is_zero() && more(&mut queue) {
            let waited = self.arrived.wait_timeout_while(queue, self.linger, more);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let (puts, jobs) = (mem::take(&mut queue.puts), mem::take(&mut queue.jobs));
        if puts.is_empty() && jobs.is_empty() { Next::End } else { Next::Group(puts, jobs) }
    }

    /// Readers have the tables as they are now.
    fn show(&self, tables: &Tables) -> Result<(), Fault> {
        let view = Arc::new(tables.view()?);
        let before = self.view.write().unwrap_or_else(PoisonError::into_inner).replace(view);
        drop(before);
        Ok(())
    }

    /// Readers have no tables for now: what is in them is a miss.
    fn hide(&self) {
        let view = self.view.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(view);
    }

    /// Writes a group to the tail.
    fn append(&self, tail: &mut Tail, group: &[Put]) -> Result<(), Fault> {
        let places = tail.append(group.iter().map(|put| (&put.key, &put.entry[..])))?;
        self.sync(tail)?;
        self.places.lock().unwrap_or_else(PoisonError::into_inner).note(places);
        Ok(())
    }

    /// Waits for the disk, if it has had its time.
    fn sync(&self, tail: &mut Tail) -> Result<(), Fault> {
        if tail.sync_in(self.sync_every).is_some_and(|left| left.is_zero()) { tail.sync() } else { Ok(()) }
    }

    /// The tail goes into the tables.
    fn fold(&self, tables: &mut Option<Tables>, tail: &mut Tail) -> Result<(), Fault> {
        self.somehow(tables, |tables| {
            tail.put_into(tables)?;
            self.show(tables)
        })?;
        // Whoever finds nothing in the tail from now on has a view that knows it.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.clear();
        tail.clear()
    }

    /// Does something with the tables; if they prove to be damaged, once more with what could be saved of them.
    pub(super) fn somehow<T>(
        &self,
        tables: &mut Option<Tables>,
        run: impl Fn(&mut Tables) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let once = |tables: &mut Option<Tables>| tables.as_mut().ok_or_else(not_open).and_then(&run);
        match once(tables) {
            Err(Fault::Damaged(why)) => {
                self.hide();
                *tables = None;
                self.show(tables.insert(salvaged(&self.path, self.cache, self.index_after, &why)?))?;
                once(tables)
            }
            done => done,
        }
    }
}

fn not_open() -> Fault {
    Fault::Damaged("it is not open".to_owned())
}

/// What the writer does next.
enum Next {
    Group(Vec<Put>, Vec<Job>),
    Sync,
    End,
}

/// The thread, joined when this is dropped.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    pub(super) fn start(shared: Shared, tables: Tables) -> Result<Self, Fault> {
        let shared = Arc::new(shared);
        let mut tables = Some(tables);
        shared.somehow(&mut tables, |tables| {
            tail::take_in(&shared.path, tables, shared.index_after)?;
            shared.show(tables)
        })?;
        let tail = {
            let mut places = shared.places.lock().unwrap_or_else(PoisonError::into_inner);
            Tail::make(&shared.path, &mut places).map_err(salvage::failed)?
        };
        let run = {
            let shared = shared.clone();
            move || run(&shared, tables, tail)
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

fn run(shared: &Shared, mut tables: Option<Tables>, mut tail: Tail) {
    let _end = End(shared);
    let told = |done: Result<(), Fault>| match shared.broken.get() {
        Some(broken) => Err(broken.clone()),
        None => done.map_err(|fault| shared.broken_by(fault)),
    };
    loop {
        let sync_in = tail.sync_in(shared.sync_every).filter(|_| shared.broken.get().is_none());
        match shared.next(sync_in) {
            Next::End => break,
            Next::Sync => drop(told(shared.sync(&mut tail))),
            Next::Group(group, jobs) => {
                let written = match shared.broken.get() {
                    Some(broken) => Err(broken.clone()),
                    None if group.is_empty() => told(shared.sync(&mut tail)),
                    None => told(shared.append(&mut tail, &group)),
                };
                for put in group {
                    let _ = put.done.send(written.clone());
                }
                if written.is_ok() && tail.is_full(shared.index_after) {
                    drop(told(shared.fold(&mut tables, &mut tail)));
                }
                for job in jobs {
                    job(shared, &mut tables);
                }
            }
        }
    }
    // What cannot go into the tables now does so when the file is opened the next time.
    if shared.broken.get().is_none() {
        drop(told(shared.fold(&mut tables, &mut tail).and_then(|()| tail.close())));
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
