//! Whose turn it is: a line behind its own small lock, whose length can be read without it.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Waker,
};

use crate::line::{Line, Ticket};

/// The model that is asked for, where it is known.
pub(crate) type Model = Option<Arc<str>>;

#[derive(Debug, Default)]
pub(crate) struct Queue {
    line: Mutex<Line<Model>>,
    len: AtomicUsize,
    uncalled: AtomicUsize,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Line<Model>> {
        // No user's code runs under this lock.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what can be read without the lock.
    fn note(&self, line: &Line<Model>) {
        self.len.store(line.len(), SeqCst);
        self.uncalled.store(line.uncalled(), SeqCst);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(SeqCst)
    }

    /// Whether somebody waits who has not been called.
    pub(crate) fn has_uncalled(&self) -> bool {
        self.uncalled.load(SeqCst) > 0
    }

    /// Whether whoever waits with this ticket may try to claim; else it waits on, with this waker.
    pub(crate) fn may_try_or_waits(&self, ticket: Ticket, waker: &Waker) -> bool {
        let mut line = self.lock();
        if line.may_try(Some(ticket)) {
            return true;
        }
        let old_waker = line.wait_for(&mut Some(ticket), 0, || None, waker);
        self.note(&line);
        drop(line);
        drop(old_waker);
        false
    }

    /// Takes or keeps a place.
    pub(crate) fn wait(&self, ticket: &mut Option<Ticket>, age: u64, model: &Model, waker: &Waker) {
        let mut line = self.lock();
        let old_waker = line.wait_for(ticket, age, || model.clone(), waker);
        self.note(&line);
        drop(line);
        drop(old_waker);
    }

    /// Gives a place up; true if it had been called.
    pub(crate) fn leave(&self, ticket: Ticket) -> bool {
        let mut line = self.lock();
        let (was_called, waker) = line.leave(ticket);
        self.note(&line);
        drop(line);
        drop(waker);
        was_called
    }

    /// Sees to it that two are called, and that `at_least` so many are who were not before. Two: a strict head-only line
    /// convoys, and one who does not come must not keep the slot from the rest.
    pub(crate) fn call(&self, at_least: usize) {
        if !self.has_uncalled() {
            return;
        }
        let mut line = self.lock();
        let calls = line.call_for(1, at_least);
        self.note(&line);
        drop(line);
        calls.wake();
    }

    /// The same with one at least, of those for whom there may be something: whose model is not refused by each of these members, of
    /// whom this is what they refuse.
    pub(crate) fn call_for_models(&self, refused: &[Vec<Arc<str>>]) {
        if !self.has_uncalled() {
            return;
        }
        let may =
            |model: &Model| refused.iter().any(|refused| model.as_ref().is_none_or(|model| !refused.contains(model)));
        let mut line = self.lock();
        let calls = line.call_where(1, 1, may);
        self.note(&line);
        drop(line);
        calls.wake();
    }
}
