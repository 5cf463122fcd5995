//! Whose turn it is: a line behind its own small lock, whose length can be read without it.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Waker,
};

use crate::line::{Line, Ticket};

#[derive(Debug, Default)]
pub(crate) struct Queue {
    line: Mutex<Line>,
    len: AtomicUsize,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Line> {
        // No user's code runs under this lock.
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(SeqCst) == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(SeqCst)
    }

    /// Whether whoever holds `ticket` (or none yet) may try to claim.
    pub(crate) fn may_try(&self, ticket: Option<Ticket>) -> bool {
        match ticket {
            None => self.is_empty(),
            Some(_) => self.lock().may_try(ticket),
        }
    }

    /// Takes or keeps a place.
    pub(crate) fn wait(&self, ticket: &mut Option<Ticket>, age: u64, waker: &Waker) {
        let mut line = self.lock();
        let old_waker = line.wait(ticket, age, waker);
        self.len.store(line.len(), SeqCst);
        drop(line);
        drop(old_waker);
    }

    /// Gives a place up; true if it had been called.
    pub(crate) fn leave(&self, ticket: Ticket) -> bool {
        let mut line = self.lock();
        let (was_called, waker) = line.leave(ticket);
        self.len.store(line.len(), SeqCst);
        drop(line);
        drop(waker);
        was_called
    }

    /// Sees to it that two are called, and that `at_least` so many are who were not before. Two: a strict head-only line
    /// convoys, and one who does not come must not keep the slot from the rest.
    pub(crate) fn call(&self, at_least: usize) {
        if self.is_empty() {
            return;
        }
        let calls = self.lock().call_for(1, at_least);
        calls.wake();
    }
}
