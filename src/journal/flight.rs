//! Requests that are the same and under way at once: one is sent, and all have its answer.
//!
//! Nothing is spawned: the *leader's* future drives the call. When it is dropped before the end one of those who wait takes over, with a
//! call of its own; or with the answer, where that had come and was only not yet kept.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use super::Key;

/// All that are under way. `A` is an answer that can be shared.
pub(super) struct Flights<A>(Mutex<HashMap<Key, Arc<Flight<A>>>>);

/// One of them: how it stands.
struct Flight<A>(Mutex<State<A>>);

struct State<A> {
    /// Tickets out.
    parties: usize,
    is_led: bool,
    end: Option<End<A>>,
    /// An answer that is still to be kept.
    paid: Option<A>,
    waiting: Vec<(u64, Waker)>,
    /// The next to come.
    number: u64,
}

/// How it ended.
#[derive(Clone)]
enum End<A> {
    Answered(A),
    /// The answer cannot be shared: each for itself.
    Apart,
}

/// What a ticket is told.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn<A> {
    /// It is the one to send the request; or only to keep the answer, if there is one already.
    Lead(Option<A>),
    /// It has the answer.
    Answered(A),
    /// It is to send its request for itself.
    Apart,
}

/// A part in a flight. Dropped while it leads, it wakes those who wait.
pub(super) struct Ticket<A> {
    flights: Arc<Flights<A>>,
    key: Key,
    flight: Arc<Flight<A>>,
    number: u64,
    leads: bool,
}

impl<A> Default for Flights<A> {
    fn default() -> Self {
        Flights(Mutex::default())
    }
}

impl<A> Flights<A> {
    /// Takes part in the flight of `key`: the first one leads.
    pub(super) fn join(self: &Arc<Self>, key: Key) -> Ticket<A> {
        let mut flights = self.lock();
        let flight = flights.entry(key).or_insert_with(|| Arc::new(Flight::new())).clone();
        let mut state = flight.lock();
        state.parties += 1;
        let number = state.number;
        state.number += 1;
        drop(state);
        Ticket { flights: self.clone(), key, flight, number, leads: false }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Flight<A>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.lock().len()
    }
}

impl<A> Flight<A> {
    fn new() -> Self {
        Flight(Mutex::new(State { parties: 0, is_led: false, end: None, paid: None, waiting: vec![], number: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<A: Clone> Ticket<A> {
    pub(super) const fn key(&self) -> Key {
        self.key
    }

    /// Whose turn it is. Whoever waits is woken when the leader has ended, in whatever way.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Turn<A>> {
        // Wakers are others' code: they are cloned and dropped while nothing is locked.
        let mut waker = cx.waker().clone();
        let mut state = self.flight.lock();
        match &state.end {
            Some(End::Answered(answer)) => return Poll::Ready(Turn::Answered(answer.clone())),
            Some(End::Apart) => return Poll::Ready(Turn::Apart),
            None => {}
        }
        if !state.is_led {
            state.is_led = true;
            self.leads = true;
            return Poll::Ready(Turn::Lead(state.paid.clone()));
        }
        match state.waiting.iter_mut().find(|(number, _)| *number == self.number) {
            Some((_, before)) => {
                mem::swap(before, &mut waker);
                drop(state);
                drop(waker);
            }
            None => state.waiting.push((self.number, waker)),
        }
        Poll::Pending
    }

    /// The answer has come: whoever takes over need not send for it.
    pub(super) fn paid(&self, answer: A) {
        self.flight.lock().paid = Some(answer);
    }

    /// All who wait have this answer.
    pub(super) fn answered(self, answer: A) {
        self.end(End::Answered(answer));
    }

    /// There is nothing to share: all who wait send for themselves.
    pub(super) fn apart(self) {
        self.end(End::Apart);
    }

    fn end(self, end: End<A>) {
        // Those who come from now on are another flight.
        self.forget();
        let mut state = self.flight.lock();
        state.end = Some(end);
        let waiting = mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl<A> Ticket<A> {
    fn forget(&self) {
        let mut flights = self.flights.lock();
        if flights.get(&self.key).is_some_and(|flight| Arc::ptr_eq(flight, &self.flight)) {
            flights.remove(&self.key);
        }
    }
}

impl<A> Drop for Ticket<A> {
    fn drop(&mut self) {
        // Under the lock of all: nobody joins meanwhile.
        let mut flights = self.flights.lock();
        let mut state = self.flight.lock();
        state.parties -= 1;
        let own = state.waiting.iter().position(|(number, _)| *number == self.number);
        let own = own.map(|at| state.waiting.remove(at));
        let mut woken = vec![];
        if self.leads {
            state.is_led = false;
        }
        if !state.is_led && state.end.is_none() {
            // All of them, the first to be polled leads: one that was called and is not polled holds up nobody.
            woken = mem::take(&mut state.waiting);
        }
        if state.parties == 0 && flights.get(&self.key).is_some_and(|flight| Arc::ptr_eq(flight, &self.flight)) {
            flights.remove(&self.key);
        }
        drop(state);
        drop(flights);
        drop(own);
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio_test::task;

    use super::*;

    const KEY: Key = Key::from_bytes([1; 32]);

    fn flights() -> Arc<Flights<u8>> {
        Arc::default()
    }

    #[test]
    fn the_first_leads_and_the_others_have_its_answer() {
        let flights = flights();
        let mut tickets = [(); 3].map(|()| Some(flights.join(KEY)));
        let tasks = [(); 3].map(|()| RefCell::new(task::spawn(())));
        let woken = |at: usize| tasks[at].borrow().is_woken();
        let poll = |at: usize, tickets: &mut [Option<Ticket<u8>>; 3]| {
            tasks[at].borrow_mut().enter(|cx, _| tickets[at].as_mut().unwrap().poll(cx))
        };
        assert_eq!(poll(1, &mut tickets), Poll::Ready(Turn::Lead(None)), "the first to be polled");
        assert_eq!(poll(0, &mut tickets), Poll::Pending);
        assert_eq!(poll(2, &mut tickets), Poll::Pending);
        assert_eq!(flights.join(Key::from_bytes([2; 32])).flights.count(), 2, "another key is another flight");
        tickets[1].take().unwrap().answered(7);
        assert_eq!([0, 1, 2].map(woken), [true, false, true]);
        assert_eq!(poll(0, &mut tickets), Poll::Ready(Turn::Answered(7)));
        assert_eq!(poll(2, &mut tickets), Poll::Ready(Turn::Answered(7)));
        assert_eq!(flights.count(), 0);
        assert_eq!(task::spawn(()).enter(|cx, _| flights.join(KEY).poll(cx)), Poll::Ready(Turn::Lead(None)), "anew");
        assert_eq!(flights.count(), 0);
    }

    #[test]
    fn a_dropped_leader_wakes_all_and_the_first_to_be_polled_takes_over() {
        let flights = flights();
        let [mut leader, mut a, mut b] = [(); 3].map(|()| flights.join(KEY));
        let [mut one, mut two, mut three] = [(); 3].map(|()| task::spawn(()));
        assert!(one.enter(|cx, _| leader.poll(cx)).is_ready());
        assert!(two.enter(|cx, _| a.poll(cx)).is_pending() && three.enter(|cx, _| b.poll(cx)).is_pending());
        drop(leader);
        assert!(two.is_woken() && three.is_woken());
        assert_eq!(three.enter(|cx, _| b.poll(cx)), Poll::Ready(Turn::Lead(None)));
        assert_eq!(two.enter(|cx, _| a.poll(cx)), Poll::Pending);
        b.paid(7);
        drop(b);
        assert!(two.is_woken(), "again");
        assert_eq!(two.enter(|cx, _| a.poll(cx)), Poll::Ready(Turn::Lead(Some(7))), "with the answer");
        drop(a);
        assert_eq!(flights.count(), 0);
    }

    #[test]
    fn one_that_was_woken_and_is_dropped_or_never_polled_holds_up_nobody() {
        let flights = flights();
        let [mut leader, mut a, mut b, mut c] = [(); 4].map(|()| flights.join(KEY));
        let mut tasks = [(); 4].map(|()| task::spawn(()));
        assert!(tasks[0].enter(|cx, _| leader.poll(cx)).is_ready());
        for (task, ticket) in tasks[1..].iter_mut().zip([&mut a, &mut b, &mut c]) {
            assert!(task.enter(|cx, _| ticket.poll(cx)).is_pending());
        }
        drop(leader);
        assert!(tasks[1..].iter().all(task::Spawn::is_woken));
        drop(b);
        assert_eq!(tasks[3].enter(|cx, _| c.poll(cx)), Poll::Ready(Turn::Lead(None)), "though `a` was called first");
        c.apart();
        assert_eq!(tasks[1].enter(|cx, _| a.poll(cx)), Poll::Ready(Turn::Apart));
        drop(a);
        assert_eq!(flights.count(), 0);
    }
}
