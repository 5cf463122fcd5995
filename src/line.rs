//! A line of waiters, oldest first: who is called next, and what becomes of a call that nobody answers.
//!
//! A waiter is *called* (its waker is woken) when there may be something for it, and claims when it is polled; nothing is
//! ever assigned to a waiter that might not come. A waiter that was called and is not polled keeps its place, but the next
//! event goes to the first one not yet called. The line holds no lock: it lives inside its owner's.

use std::{
    collections::{BTreeMap, BTreeSet},
    task::Waker,
};

/// A place in a line: by age, then by arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket {
    age: u64,
    number: u64,
}

/// The wakers to wake once the owner's lock is released.
#[must_use = "a call that is not woken is lost"]
#[derive(Debug, Default)]
pub(crate) struct Calls {
    // Most events call two: no allocation for those.
    few: [Option<Waker>; 2],
    more: Vec<Waker>,
}

impl Calls {
    fn push(&mut self, waker: Waker) {
        match self.few.iter_mut().find(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(waker),
            None => self.more.push(waker),
        }
    }

    /// Wakes them, oldest first. Never under a lock.
    pub(crate) fn wake(self) {
        for waker in self.few.into_iter().flatten().chain(self.more) {
            waker.wake();
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Line {
    waiting: BTreeMap<Ticket, Waker>,
    called: BTreeSet<Ticket>,
    arrivals: u64,
}

impl Line {
    /// How many wait, called or not.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.called.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.called.is_empty()
    }

    /// Whether whoever is polled now may try to claim: it was called, or nobody is before it.
    pub(crate) fn may_try(&self, ticket: Option<Ticket>) -> bool {
        match ticket {
            None => self.is_empty(),
            Some(ticket) => {
                self.called.contains(&ticket)
                    || (self.called.is_empty()
                        && self.waiting.first_key_value().map(|(first, _)| *first) == Some(ticket))
            }
        }
    }

    /// Takes a place (a new one by `age` where there is none yet), or keeps it with a fresh waker, uncalled. Gives the waker
    /// that is replaced: its drop is somebody else's code too, so it is not for under the owner's lock.
    #[must_use = "dropped under no lock"]
    pub(crate) fn wait(&mut self, ticket: &mut Option<Ticket>, age: u64, waker: &Waker) -> Option<Waker> {
        let ticket = *ticket.get_or_insert_with(|| {
            self.arrivals += 1;
            Ticket { age, number: self.arrivals }
        });
        self.called.remove(&ticket);
        match self.waiting.get_mut(&ticket) {
            Some(old) if old.will_wake(waker) => None,
            Some(old) => Some(std::mem::replace(old, waker.clone())),
            None => self.waiting.insert(ticket, waker.clone()),
        }
    }

    /// Gives the place up; true if it had been called, so that the call must go on to somebody else. The waker is for dropping
    /// under no lock.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> (bool, Option<Waker>) {
        (self.called.remove(&ticket), self.waiting.remove(&ticket))
    }

    /// Calls the next `n` not yet called.
    pub(crate) fn call(&mut self, n: usize) -> Calls {
        let mut calls = Calls::default();
        for _ in 0..n {
            match self.waiting.pop_first() {
                Some((ticket, waker)) => {
                    self.called.insert(ticket);
                    calls.push(waker);
                }
                None => break,
            }
        }
        calls
    }

    /// Sees to it that one more has been called than `free` can serve, so that one who does not come costs nothing; and
    /// calls `at_least` so many who were not called before.
    pub(crate) fn call_for(&mut self, free: usize, at_least: usize) -> Calls {
        if free == 0 {
            return Calls::default();
        }
        self.call(free.saturating_add(1).saturating_sub(self.called.len()).max(at_least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_test::task;

    fn waiter(line: &mut Line, age: u64) -> (task::Spawn<std::future::Pending<()>>, Option<Ticket>) {
        let mut task = task::spawn(std::future::pending::<()>());
        let mut ticket = None;
        task.enter(|cx, _| drop(line.wait(&mut ticket, age, cx.waker())));
        (task, ticket)
    }

    #[test]
    fn the_oldest_is_called_first_whenever_it_came() {
        let mut line = Line::default();
        let (young, _) = waiter(&mut line, 9);
        let (old, _) = waiter(&mut line, 3);
        line.call(1).wake();
        assert!(old.is_woken());
        assert!(!young.is_woken());
    }

    #[test]
    fn a_called_waiter_that_does_not_come_does_not_swallow_the_next_event() {
        let mut line = Line::default();
        let (first, _) = waiter(&mut line, 1);
        let (second, _) = waiter(&mut line, 2);
        line.call(1).wake();
        assert!(first.is_woken() && !second.is_woken());
        line.call(1).wake();
        assert!(second.is_woken());
    }

    #[test]
    fn one_more_is_called_than_can_be_served() {
        let mut line = Line::default();
        let waiters: Vec<_> = (0..5).map(|age| waiter(&mut line, age)).collect();
        line.call_for(2, 0).wake();
        assert_eq!(waiters.iter().filter(|(task, _)| task.is_woken()).count(), 3);
        assert_eq!(line.len(), 5, "who is called keeps its place");
    }

    #[test]
    fn nobody_is_called_when_nothing_is_free() {
        let mut line = Line::default();
        let (only, _) = waiter(&mut line, 1);
        line.call_for(0, 1).wake();
        assert!(!only.is_woken());
    }

    #[test]
    fn a_newcomer_may_try_only_where_nobody_waits() {
        let mut line = Line::default();
        assert!(line.may_try(None));
        let (_first, ticket) = waiter(&mut line, 1);
        assert!(!line.may_try(None));
        assert!(line.may_try(ticket), "the first in line may");
        let (_second, second) = waiter(&mut line, 2);
        assert!(!line.may_try(second));
        assert!(!line.leave(second.unwrap()).0, "it had not been called");
        let _ = line.call(1);
        assert!(line.leave(ticket.unwrap()).0, "it had");
        assert!(line.is_empty());
    }

    #[test]
    fn a_second_wait_keeps_the_place_and_takes_the_new_waker() {
        let mut line = Line::default();
        let (old_task, mut ticket) = waiter(&mut line, 1);
        let before = ticket;
        let mut new_task = task::spawn(std::future::pending::<()>());
        new_task.enter(|cx, _| drop(line.wait(&mut ticket, 1, cx.waker())));
        assert_eq!(before, ticket);
        line.call(1).wake();
        assert!(new_task.is_woken() && !old_task.is_woken());
    }
}
