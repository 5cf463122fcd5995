//! A line of waiters, oldest first: who is called next, and what becomes of a call that nobody answers.
//!
//! A waiter is *called* (its waker is woken) when there may be something for it, and claims when it is polled; nothing is
//! ever assigned to a waiter that might not come. A waiter that was called and is not polled keeps its place, but the next
//! event goes to the first one not yet called. The line holds no lock: it lives inside its owner's.
//!
//! Whoever comes is nearly always the youngest, and whoever was called and waits again is among the oldest. So those who
//! wait are a linked list in a slab, searched from both ends, and waiting allocates nothing once the line has been so long
//! before. Where a place is far from either end (somebody old comes back into the midst of many like it), a tree keeps
//! it: no order of arrivals makes a wait dearer than the logarithm of the line.

use std::{collections::BTreeMap, task::Waker};

/// How far from either end of the list a place is looked for.
const NEAR: usize = 8;
/// Whoever came so often in vain is waited for when it is called the next time.
const PATIENCE: u8 = 4;
/// ... while the others are polled so often. Tokio polls 61 tasks before it looks at the future that it blocks on.
const YIELDS: u8 = 128;
/// No spot.
const NONE: usize = usize::MAX;

/// A place in a line, until it is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(usize);

/// The wakers to wake once the owner's lock is released.
#[must_use = "a call that is not woken is lost"]
#[derive(Debug, Default)]
pub(crate) struct Calls {
    // Most events call nobody, one or two: no allocation for those.
    first: Option<Waker>,
    second: Option<Waker>,
    more: Vec<Waker>,
}

impl Calls {
    fn push(&mut self, waker: Waker) {
        if self.first.is_none() {
            self.first = Some(waker);
        } else if self.second.is_none() {
            self.second = Some(waker);
        } else {
            self.more.push(waker);
        }
    }

    /// Wakes them, oldest first. Never under a lock.
    #[inline]
    pub(crate) fn wake(self) {
        let Some(first) = self.first else { return };
        first.wake();
        let Some(second) = self.second else { return };
        second.wake();
        self.more.into_iter().for_each(Waker::wake);
    }
}

/// Older is less: by age, then by arrival.
type Rank = (u64, u64);

#[derive(Debug)]
struct Spot<T> {
    rank: Rank,
    /// What it waits for.
    want: T,
    /// None once it was called.
    waker: Option<Waker>,
    stand: Stand,
    /// How often it came when it was called, and found nothing.
    in_vain: u8,
    /// Its neighbours in the list; of a free one, the next free one is after it.
    before: usize,
    after: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    Free,
    /// Waits, in the list.
    Listed,
    /// Waits, in the tree.
    Strayed,
    Called,
}

#[derive(Debug)]
pub(crate) struct Line<T = ()> {
    spots: Vec<Spot<T>>,
    free: usize,
    first: usize,
    last: usize,
    strays: BTreeMap<Rank, usize>,
    len: usize,
    called: usize,
    /// The oldest of those called who have come in vain too often.
    favoured: usize,
    /// How often younger ones have given way to it.
    yields: u8,
    arrivals: u64,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Line {
            spots: vec![],
            free: NONE,
            first: NONE,
            last: NONE,
            strays: BTreeMap::new(),
            len: 0,
            called: 0,
            favoured: NONE,
            yields: 0,
            arrivals: 0,
        }
    }
}

impl Line {
    /// As [`wait_for`](Line::wait_for), where all want the same.
    #[must_use = "dropped under no lock"]
    pub(crate) fn wait(&mut self, ticket: &mut Option<Ticket>, age: u64, waker: &Waker) -> Option<Waker> {
        self.wait_for(ticket, age, || (), waker)
    }
}

impl<T> Line<T> {
    /// How many wait, called or not.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many have not been called.
    pub(crate) fn uncalled(&self) -> usize {
        self.len - self.called
    }

    /// Whether whoever is polled now may try to claim: it was called, or nobody is before it.
    ///
    /// Of those called whoever is polled first has it, and an executor may poll them in one order always: whoever blocks on a
    /// future polls that after a whole batch of tasks. So whoever has come in vain [too often](PATIENCE) goes first, and a younger
    /// one waits again, to be called again by whoever asks: for [so long](YIELDS) that the older one, if it is alive, has come.
    pub(crate) fn may_try(&mut self, ticket: Option<Ticket>) -> bool {
        let Some(Ticket(at)) = ticket else { return self.is_empty() };
        let spot = &self.spots[at];
        if spot.stand != Stand::Called {
            return self.called == 0 && self.oldest() == Some(at);
        }
        if self.favoured == NONE || self.spots[self.favoured].rank >= spot.rank {
            return true;
        }
        self.yields += 1;
        if self.yields >= YIELDS {
            self.favoured = NONE;
        }
        false
    }

    /// Takes a place (a new one by `age` where there is none yet), or keeps it with a fresh waker, uncalled. Gives the waker
    /// that is replaced: its drop is somebody else's code too, so it is not for under the owner's lock.
    #[must_use = "dropped under no lock"]
    pub(crate) fn wait_for(
        &mut self,
        ticket: &mut Option<Ticket>,
        age: u64,
        want: impl FnOnce() -> T,
        waker: &Waker,
    ) -> Option<Waker> {
        let Some(Ticket(at)) = *ticket else {
            self.arrivals += 1;
            let spot = Spot {
                rank: (age, self.arrivals),
                want: want(),
                waker: Some(waker.clone()),
                stand: Stand::Free,
                in_vain: 0,
                before: NONE,
                after: NONE,
            };
            let at = self.seat(spot);
            *ticket = Some(Ticket(at));
            self.enqueue(at);
            return None;
        };
        let spot = &mut self.spots[at];
        match &mut spot.waker {
            Some(old) if old.will_wake(waker) => None,
            Some(old) => Some(std::mem::replace(old, waker.clone())),
            None => {
                debug_assert_eq!(spot.stand, Stand::Called);
                spot.waker = Some(waker.clone());
                spot.in_vain = spot.in_vain.saturating_add(1);
                self.disfavour(at);
                self.called -= 1;
                self.enqueue(at);
                None
            }
        }
    }

    /// Gives the place up; true if it had been called, so that the call must go on to somebody else. The waker is for dropping
    /// under no lock.
    pub(crate) fn leave(&mut self, Ticket(at): Ticket) -> (bool, Option<Waker>) {
        let was_called = self.spots[at].stand == Stand::Called;
        if was_called {
            self.called -= 1;
            self.disfavour(at);
        } else {
            self.dequeue(at);
        }
        let spot = &mut self.spots[at];
        spot.stand = Stand::Free;
        spot.after = self.free;
        let waker = spot.waker.take();
        self.free = at;
        self.len -= 1;
        (was_called, waker)
    }

    /// Calls the next `n` not yet called.
    pub(crate) fn call(&mut self, n: usize) -> Calls {
        let mut calls = Calls::default();
        for _ in 0..n {
            let Some(at) = self.oldest() else { break };
            self.call_one(at, &mut calls);
        }
        calls
    }

    fn call_one(&mut self, at: usize, calls: &mut Calls) {
        self.dequeue(at);
        let spot = &mut self.spots[at];
        let rank = spot.rank;
        spot.stand = Stand::Called;
        self.called += 1;
        if spot.in_vain >= PATIENCE && (self.favoured == NONE || self.spots[self.favoured].rank > rank) {
            self.favoured = at;
            self.yields = 0;
        }
        calls.push(self.spots[at].waker.take().expect("whoever waits has a waker"));
    }

    /// Sees to it that one more has been called than `free` can serve, so that one who does not come costs nothing; and
    /// calls `at_least` so many who were not called before.
    pub(crate) fn call_for(&mut self, free: usize, at_least: usize) -> Calls {
        if free == 0 {
            return Calls::default();
        }
        self.call(free.saturating_add(1).saturating_sub(self.called).max(at_least))
    }

    /// The same among those whose want may be met. They are looked for one by one, from the oldest on.
    pub(crate) fn call_where(&mut self, free: usize, at_least: usize, may: impl Fn(&T) -> bool) -> Calls {
        let was_called = |spot: &&Spot<T>| spot.stand == Stand::Called && may(&spot.want);
        let called = self.spots.iter().filter(was_called).count();
        let n = free.saturating_add(1).saturating_sub(called).max(at_least);
        let (mut listed, mut strays, mut found) = (self.first, self.strays.iter().peekable(), vec![]);
        while found.len() < n {
            let at = match strays.peek() {
                Some((rank, stray)) if listed == NONE || self.spots[listed].rank > **rank => {
                    let at = **stray;
                    strays.next();
                    at
                }
                _ if listed == NONE => break,
                _ => {
                    let at = listed;
                    listed = self.spots[at].after;
                    at
                }
            };
            if may(&self.spots[at].want) {
                found.push(at);
            }
        }
        let mut calls = Calls::default();
        found.into_iter().for_each(|at| self.call_one(at, &mut calls));
        calls
    }

    fn disfavour(&mut self, at: usize) {
        if self.favoured == at {
            self.favoured = NONE;
        }
    }

    /// The oldest who has not been called.
    fn oldest(&self) -> Option<usize> {
        let listed = (self.first != NONE).then_some(self.first);
        let Some((rank, stray)) = self.strays.first_key_value() else { return listed };
        match listed {
            Some(at) if self.spots[at].rank < *rank => Some(at),
            _ => Some(*stray),
        }
    }

    /// Puts a spot into the slab.
    fn seat(&mut self, spot: Spot<T>) -> usize {
        self.len += 1;
        let at = self.free;
        if at == NONE {
            self.spots.push(spot);
            return self.spots.len() - 1;
        }
        self.free = self.spots[at].after;
        self.spots[at] = spot;
        at
    }

    /// Lets a spot wait where its rank says.
    fn enqueue(&mut self, at: usize) {
        let rank = self.spots[at].rank;
        let (mut front, mut back) = (self.first, self.last);
        for _ in 0..NEAR {
            if back == NONE || self.spots[back].rank < rank {
                let after = if back == NONE { self.first } else { self.spots[back].after };
                return self.link(back, at, after);
            }
            if self.spots[front].rank > rank {
                return self.link(self.spots[front].before, at, front);
            }
            // Neither search can run off its end: the other would have found the place before.
            (front, back) = (self.spots[front].after, self.spots[back].before);
        }
        self.spots[at].stand = Stand::Strayed;
        self.strays.insert(rank, at);
    }

    fn link(&mut self, before: usize, at: usize, after: usize) {
        let spot = &mut self.spots[at];
        (spot.stand, spot.before, spot.after) = (Stand::Listed, before, after);
        self.set_after(before, at);
        self.set_before(after, at);
    }

    fn dequeue(&mut self, at: usize) {
        let Spot { stand, rank, before, after, .. } = self.spots[at];
        if stand == Stand::Strayed {
            self.strays.remove(&rank);
        } else {
            self.set_after(before, after);
            self.set_before(after, before);
        }
    }

    fn set_after(&mut self, at: usize, after: usize) {
        if at == NONE { self.first = after } else { self.spots[at].after = after }
    }

    fn set_before(&mut self, at: usize, before: usize) {
        if at == NONE { self.last = before } else { self.spots[at].before = before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio_test::task;

    fn waiter(line: &mut Line, age: u64) -> (task::Spawn<std::future::Pending<()>>, Option<Ticket>) {
        let mut task = task::spawn(std::future::pending::<()>());
        let mut ticket = None;
        task.enter(|cx, _| drop(line.wait(&mut ticket, age, cx.waker())));
        (task, ticket)
    }

    #[test]
    fn of_those_whose_want_may_be_met_the_oldest_is_called_first_wherever_it_stands() {
        // Ages in the order of arrival; the middle of so many old ones strays into the tree.
        let ages: Vec<u64> = (0..40).chain(100..140).chain([70, 71, 72]).collect();
        for may in [|want: &u64| *want % 2 == 0, |want: &u64| *want % 7 == 0, |want: &u64| *want == 71, |_: &u64| true]
        {
            let mut line = Line::<u64>::default();
            let mut waiting = vec![];
            for age in &ages {
                let mut task = task::spawn(std::future::pending::<()>());
                task.enter(|cx, _| drop(line.wait_for(&mut None, *age, || *age, cx.waker())));
                waiting.push((*age, task));
            }
            assert!(!line.strays.is_empty());
            waiting.sort_by_key(|(age, _)| *age);
            let woken = |waiting: &[(u64, task::Spawn<std::future::Pending<()>>)]| {
                waiting.iter().filter(|(_, task)| task.is_woken()).map(|(age, _)| *age).collect::<Vec<_>>()
            };
            let mut expected: Vec<u64> = waiting.iter().map(|(age, _)| *age).filter(may).collect();
            line.call_where(1, 1, may).wake();
            assert_eq!(woken(&waiting), expected[..2.min(expected.len())], "one more than may be served");
            line.call_where(1, 1, may).wake();
            assert_eq!(woken(&waiting), expected[..3.min(expected.len())], "and one who was not called before");
            line.call_where(usize::MAX, 0, may).wake();
            assert_eq!(woken(&waiting), expected);
            // What is left stands as before.
            expected = waiting.iter().map(|(age, _)| *age).filter(|age| !may(age)).collect();
            let before = woken(&waiting).len();
            assert_eq!(line.uncalled(), expected.len());
            line.call(1).wake();
            assert_eq!(woken(&waiting).len(), before + expected.len().min(1));
            assert!(expected.first().is_none_or(|oldest| woken(&waiting).contains(oldest)));
        }
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
    fn who_came_in_vain_too_often_goes_first_if_it_comes() {
        let mut line = Line::default();
        let (first, mut ticket) = waiter(&mut line, 1);
        let (_second, second) = waiter(&mut line, 2);
        line.call(2).wake();
        for _ in 0..PATIENCE {
            assert!(line.may_try(second), "the older one does not come");
            first.is_woken();
            let mut again = task::spawn(std::future::pending::<()>());
            again.enter(|cx, _| drop(line.wait(&mut ticket, 1, cx.waker())));
            line.call(1).wake();
            assert!(again.is_woken());
        }
        for _ in 0..YIELDS {
            assert!(!line.may_try(second), "it came before, and will come");
        }
        assert!(line.may_try(second), "or will not");
        assert!(line.may_try(ticket));
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

    /// What a line is, said plainly: ranks in order, each with whether it was called.
    type Plain = BTreeMap<Rank, bool>;

    #[derive(Clone, Debug)]
    enum Step {
        Come { age: u64 },
        WaitAgain { who: usize },
        Leave { who: usize },
        Call { n: usize },
        CallFor { free: usize, at_least: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            // In order, nearly in order, and any.
            4 => Just(Step::Come { age: 500 }),
            2 => (495..505u64).prop_map(|age| Step::Come { age }),
            4 => (0..1_000u64).prop_map(|age| Step::Come { age }),
            3 => any::<usize>().prop_map(|who| Step::WaitAgain { who }),
            3 => any::<usize>().prop_map(|who| Step::Leave { who }),
            2 => (0..4usize).prop_map(|n| Step::Call { n }),
            1 => (0..3usize, 0..3usize).prop_map(|(free, at_least)| Step::CallFor { free, at_least }),
            1 => Just(Step::Call { n: 25 }),
        ]
    }

    proptest! {
        #[test]
        fn in_whatever_order_they_come_and_go_the_oldest_uncalled_is_next(
            steps in proptest::collection::vec(step(), 1..600),
        ) {
            let mut line = Line::default();
            let mut plain = Plain::new();
            let mut waiters: Vec<(Rank, Ticket, task::Spawn<std::future::Pending<()>>)> = vec![];
            for (arrival, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Come { age } => {
                        let (task, ticket) = waiter(&mut line, age);
                        let rank = (age, arrival as u64);
                        plain.insert(rank, false);
                        waiters.push((rank, ticket.unwrap(), task));
                    }
                    Step::WaitAgain { who } if !waiters.is_empty() => {
                        let n = waiters.len();
                        let (rank, ticket, task) = &mut waiters[who % n];
                        // Another task's waker counts from now on.
                        *task = task::spawn(std::future::pending());
                        let mut kept = Some(*ticket);
                        task.enter(|cx, _| drop(line.wait(&mut kept, rank.0, cx.waker())));
                        prop_assert_eq!(kept, Some(*ticket));
                        plain.insert(*rank, false);
                    }
                    Step::Leave { who } if !waiters.is_empty() => {
                        let (rank, ticket, _) = waiters.swap_remove(who % waiters.len());
                        prop_assert_eq!(line.leave(ticket).0, plain.remove(&rank).unwrap());
                    }
                    Step::WaitAgain { .. } | Step::Leave { .. } => {}
                    Step::Call { .. } | Step::CallFor { .. } => {
                        let called = plain.values().filter(|called| **called).count();
                        let n = match step {
                            Step::Call { n } => {
                                line.call(n).wake();
                                n
                            }
                            Step::CallFor { free, at_least } => {
                                line.call_for(free, at_least).wake();
                                if free == 0 { 0 } else { (free + 1).saturating_sub(called).max(at_least) }
                            }
                            _ => unreachable!(),
                        };
                        plain.values_mut().filter(|called| !**called).take(n).for_each(|called| *called = true);
                    }
                }
                prop_assert_eq!(line.len(), plain.len());
                prop_assert_eq!(line.is_empty(), plain.is_empty());
                let called = plain.values().filter(|called| **called).count();
                prop_assert_eq!(line.uncalled(), plain.len() - called);
                for (rank, ticket, task) in &waiters {
                    prop_assert_eq!(task.is_woken(), plain[rank]);
                    let first = called == 0 && plain.keys().next() == Some(rank);
                    // In the end: at first it may give way to somebody older.
                    let may_try = (0..=YIELDS).any(|_| line.may_try(Some(*ticket)));
                    prop_assert_eq!(may_try, plain[rank] || first);
                }
            }
        }
    }

    #[test]
    fn who_comes_back_into_the_midst_of_many_is_found_a_place_without_a_search() {
        let mut line = Line::default();
        let mut waiters: Vec<_> = (0..100).map(|age| waiter(&mut line, 2 * age)).collect();
        waiters.push(waiter(&mut line, 101));
        assert_eq!(line.strays.len(), 1);
        line.call(51).wake();
        assert!(waiters[50].0.is_woken() && !waiters[100].0.is_woken() && !waiters[51].0.is_woken());
        line.call(1).wake();
        assert!(waiters[100].0.is_woken() && !waiters[51].0.is_woken());
    }

    #[test]
    fn a_place_that_was_left_is_taken_again() {
        let mut line = Line::default();
        let mut held: Vec<_> = (0..10).map(|age| waiter(&mut line, age)).collect();
        for age in 10..1_000 {
            let (_, ticket) = held.remove(0);
            let _ = line.leave(ticket.unwrap());
            held.push(waiter(&mut line, age));
        }
        assert_eq!(line.spots.len(), 10);
    }
}
