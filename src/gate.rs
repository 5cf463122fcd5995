//! A gate: a law that says who may pass, the line of those who wait for it, and the alarm that the *state* owns, so that no
//! waiter is needed to keep time. The slots of a limiter and the pace of a quota are both gates.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll, Wake, Waker},
};

use tokio::time::{Instant, Sleep};

use crate::line::{Calls, Line, Ticket};

/// What a gate asks its law. Pure: the time is passed in.
pub(crate) trait Admission: Send + 'static {
    /// What whoever passes takes along.
    type Grant;

    /// Lets one pass, if one may.
    fn admit(&mut self, now: Instant) -> Option<Self::Grant>;

    /// Whether [`admit`](Admission::admit) would do something else at a later time than `seen`. Where it would not, the clock
    /// is not read.
    fn admits_by_time(&self, _seen: Instant) -> bool {
        true
    }

    /// How many could pass now.
    fn free(&self, now: Instant) -> usize;

    /// When time alone lets the next one pass; `None` when only a change of state can. Asked when nothing is free.
    fn opens_at(&self, now: Instant) -> Option<Instant>;

    /// Whether [`free`](Admission::free) and [`opens_at`](Admission::opens_at) would say something else at a later time than
    /// `seen`.
    fn opens_by_time(&self, _seen: Instant) -> bool {
        true
    }

    /// How many wait, told after every change.
    fn waiting(&mut self, waiters: usize);
}

/// The clock, and when it was last read: reading it is dear beside all else that a gate does.
pub(crate) struct Clock {
    seen: Instant,
}

impl Clock {
    /// The time now.
    pub(crate) fn read(&mut self) -> Instant {
        self.seen = Instant::now();
        self.seen
    }

    /// The time now if it matters, else when it was last read.
    fn read_if(&mut self, matters: bool) -> Instant {
        if matters { self.read() } else { self.seen }
    }
}

struct State<A> {
    law: A,
    line: Line,
    clock: Clock,
    /// When the alarm rings, if it is set or somebody is about to set it.
    armed: Option<Instant>,
    /// How often it was armed.
    arming: u64,
    /// The alarm. Never polled under this lock, though it lives here: a timer that is due meanwhile rings from within its own
    /// poll, and the bell wants the lock.
    sleep: Option<Alarm>,
}

type Alarm = Pin<Box<Sleep>>;

pub(crate) struct Gate<A> {
    state: Mutex<State<A>>,
    bell: Waker,
}

/// What is to be done once the state's lock is released.
#[derive(Default)]
#[must_use = "a call that is not woken is lost"]
struct Next {
    calls: Calls,
    /// To be set, and the how many-eth it is.
    alarm: Option<(Alarm, u64)>,
}

impl<A: Admission> Gate<A> {
    pub(crate) fn new(law: A) -> Arc<Self> {
        Arc::new_cyclic(|gate| Gate {
            state: Mutex::new(State {
                law,
                line: Line::default(),
                clock: Clock { seen: Instant::now() },
                armed: None,
                arming: 0,
                sleep: None,
            }),
            bell: Waker::from(Arc::new(Bell(gate.clone()))),
        })
    }

    /// No user's code runs under this lock, so what it guards is whole even if poisoned.
    fn lock(&self) -> MutexGuard<'_, State<A>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes, or waits in line. `place` is the caller's place; it is given up on passing and on drop.
    ///
    /// Whoever was called may pass, and so may the first where nobody is. A newcomer passes by those who wait only where
    /// more is free than there are of them: then nobody is kept from anything by it, and a line that is no longer needed
    /// dissolves instead of being joined by everyone who comes.
    pub(crate) fn poll_pass(self: &Arc<Self>, cx: &mut Context<'_>, place: &mut Place<A>) -> Poll<A::Grant> {
        let mut guard = self.lock();
        let state = &mut *guard;
        if let Some(grant) = state.pass(place.ticket) {
            let (mut old_waker, mut next) = (None, Next::default());
            if !state.line.is_empty() {
                if let Some(ticket) = place.ticket.take() {
                    place.gate = None;
                    (_, old_waker) = state.line.leave(ticket);
                    state.count();
                }
                next = state.announce(0);
            }
            drop(guard);
            self.see_to(next);
            drop(old_waker);
            return Poll::Ready(grant);
        }
        if place.ticket.is_none() {
            place.gate = Some(self.clone());
        }
        let old_waker = state.line.wait(&mut place.ticket, 0, cx.waker());
        state.count();
        // Whoever waits is polled in a runtime that runs; the one that kept the time so far may not run any more.
        state.armed = None;
        let old_alarm = state.sleep.take();
        // Somebody before us may have been called and not come: whoever has to wait passes the call on.
        let next = state.announce(1);
        drop(guard);
        self.see_to(next);
        drop((old_waker, old_alarm));
        Poll::Pending
    }

    /// Looks at the state, and changes nothing.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&A, Instant) -> T) -> T {
        look(&self.lock().law, Instant::now())
    }

    /// Changes the state; then those are called who can pass now, or the alarm is set for when the next can.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut A, Instant) -> T) -> T {
        self.update_by(|law, clock| change(law, clock.read()))
    }

    /// The same for a change that may need no time.
    pub(crate) fn update_by<T>(&self, change: impl FnOnce(&mut A, &mut Clock) -> T) -> T {
        let mut guard = self.lock();
        let state = &mut *guard;
        let value = change(&mut state.law, &mut state.clock);
        if !state.line.is_empty() {
            let next = state.announce(0);
            drop(guard);
            self.see_to(next);
        }
        value
    }

    /// Reads the state.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&A) -> T) -> T {
        look(&self.lock().law)
    }

    fn leave(&self, ticket: Ticket) {
        let mut state = self.lock();
        let (was_called, waker) = state.line.leave(ticket);
        state.count();
        let next = if was_called { state.announce(0) } else { Next::default() };
        drop(state);
        self.see_to(next);
        drop(waker);
    }

    /// Wakes who is called, and sets the alarm. Under no lock.
    fn see_to(&self, Next { calls, alarm }: Next) {
        calls.wake();
        if let Some((mut alarm, arming)) = alarm {
            // Outside the coop budget, which would have it ring at once.
            let mut sleep = tokio::task::unconstrained(alarm.as_mut());
            let due = Pin::new(&mut sleep).poll(&mut Context::from_waker(&self.bell)).is_ready();
            let mut state = self.lock();
            // It may have rung meanwhile, or somebody has set it anew.
            let is_ours = state.armed.is_some() && state.arming == arming;
            let calls = if is_ours && due {
                state.armed = None;
                state.line.call(1)
            } else {
                Calls::default()
            };
            let spare = if is_ours && !due { state.sleep.replace(alarm) } else { Some(alarm) };
            drop(state);
            drop(spare);
            calls.wake();
        }
    }
}

impl<A: Admission> State<A> {
    /// Lets whoever has this ticket, or none, pass if it may.
    fn pass(&mut self, ticket: Option<Ticket>) -> Option<A::Grant> {
        let by_itself = ticket.is_none() && !self.line.is_empty() && self.free() > self.line.len();
        if !by_itself && !self.line.may_try(ticket) {
            return None;
        }
        let now = self.clock.read_if(self.law.admits_by_time(self.clock.seen));
        self.law.admit(now)
    }

    fn free(&mut self) -> usize {
        let now = self.clock.read_if(self.law.opens_by_time(self.clock.seen));
        self.law.free(now)
    }

    fn count(&mut self) {
        self.law.waiting(self.line.len());
    }

    /// Calls those who can pass, or has the alarm set.
    fn announce(&mut self, at_least: usize) -> Next {
        if self.line.uncalled() == 0 {
            return Next::default();
        }
        let free = self.free();
        if free > 0 {
            return Next { calls: self.line.call_for(free, at_least), alarm: None };
        }
        match self.law.opens_at(self.clock.seen) {
            None => Next::default(),
            Some(at) if self.armed == Some(at) => Next::default(),
            // A slot given back outside a runtime: no timer can be had here, so a waiter has to set it.
            Some(_) if tokio::runtime::Handle::try_current().is_err() => Next { calls: self.line.call(1), alarm: None },
            Some(at) => {
                // Always a new timer, of the runtime that is here.
                let alarm = Box::pin(tokio::time::sleep_until(at));
                self.armed = Some(at);
                self.arming += 1;
                Next { calls: Calls::default(), alarm: Some((alarm, self.arming)) }
            }
        }
    }
}

/// A place at a gate. Dropped while waiting, it hands its call on.
pub(crate) struct Place<A: Admission> {
    gate: Option<Arc<Gate<A>>>,
    ticket: Option<Ticket>,
}

impl<A: Admission> Place<A> {
    /// At the end of the line, in order of arrival.
    pub(crate) const fn new() -> Self {
        Place { gate: None, ticket: None }
    }
}

impl<A: Admission> Drop for Place<A> {
    fn drop(&mut self) {
        if let (Some(gate), Some(ticket)) = (self.gate.take(), self.ticket.take()) {
            gate.leave(ticket);
        }
    }
}

/// What the alarm rings: the state, never a particular waiter.
struct Bell<A>(Weak<Gate<A>>);

impl<A: Admission> Wake for Bell<A> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(gate) = self.0.upgrade() else { return };
        let mut state = gate.lock();
        state.armed = None;
        let now = state.clock.read();
        let calls = match state.law.free(now) {
            // It rang early: the runtime that kept the time is ending. Whoever still waits lives in another and sets it there.
            0 => {
                let all = state.line.len();
                state.line.call(all)
            }
            free => state.line.call_for(free, 0),
        };
        drop(state);
        calls.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio_test::{assert_pending, assert_ready, task};

    /// Lets `tokens` pass, no earlier than `from`.
    struct Tokens {
        tokens: usize,
        from: Instant,
        waiting: usize,
    }

    impl Admission for Tokens {
        type Grant = ();

        fn admit(&mut self, now: Instant) -> Option<()> {
            if self.free(now) == 0 {
                return None;
            }
            self.tokens -= 1;
            Some(())
        }

        fn opens_at(&self, now: Instant) -> Option<Instant> {
            (now < self.from).then_some(self.from)
        }

        fn free(&self, now: Instant) -> usize {
            if now < self.from { 0 } else { self.tokens }
        }

        fn waiting(&mut self, waiters: usize) {
            self.waiting = waiters;
        }
    }

    type Waiter = task::Spawn<Place<Tokens>>;

    fn gate(tokens: usize, wait: u64) -> Arc<Gate<Tokens>> {
        Gate::new(Tokens { tokens, from: Instant::now() + Duration::from_secs(wait), waiting: 0 })
    }

    fn waiter() -> Waiter {
        task::spawn(Place::new())
    }

    fn poll(gate: &Arc<Gate<Tokens>>, waiter: &mut Waiter) -> Poll<()> {
        waiter.enter(|cx, mut place| gate.poll_pass(cx, &mut place))
    }

    // `Place` is moved into a test task, which wants a pinned value it can reach.
    impl Unpin for Place<Tokens> {}

    #[tokio::test(start_paused = true)]
    async fn a_freed_token_calls_two_and_serves_one() {
        let gate = gate(0, 0);
        let mut waiters: Vec<_> = (0..3).map(|_| waiter()).collect();
        for waiter in &mut waiters {
            assert_pending!(poll(&gate, waiter));
        }
        assert_eq!(gate.read(|law| law.waiting), 3);
        gate.update(|law, _| law.tokens = 1);
        assert_eq!(waiters.iter().map(|w| w.is_woken()).collect::<Vec<_>>(), [true, true, false]);
        assert_ready!(poll(&gate, &mut waiters[0]));
        assert_pending!(poll(&gate, &mut waiters[1]));
        assert_eq!(gate.read(|law| law.waiting), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_waiter_delays_nobody() {
        let gate = gate(0, 0);
        let (mut abandoned, mut second) = (waiter(), waiter());
        assert_pending!(poll(&gate, &mut abandoned));
        assert_pending!(poll(&gate, &mut second));
        gate.update(|law, _| law.tokens = 1);
        assert!(second.is_woken(), "called beside the first, which never comes");
        assert_ready!(poll(&gate, &mut second));
    }

    #[tokio::test(start_paused = true)]
    async fn a_called_waiter_that_is_dropped_hands_its_call_on() {
        let gate = gate(0, 0);
        let mut waiters: Vec<_> = (0..3).map(|_| waiter()).collect();
        for waiter in &mut waiters {
            assert_pending!(poll(&gate, waiter));
        }
        gate.update(|law, _| law.tokens = 1);
        assert!(!waiters[2].is_woken());
        drop(waiters.remove(0));
        drop(waiters.remove(0));
        assert!(waiters[0].is_woken());
        assert_ready!(poll(&gate, &mut waiters[0]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_is_served_though_it_is_always_polled_last() {
        let gate = gate(0, 0);
        let mut oldest = waiter();
        assert_pending!(poll(&gate, &mut oldest));
        let mut others: Vec<_> = (0..3).map(|_| waiter()).collect();
        for other in &mut others {
            assert_pending!(poll(&gate, other));
        }
        for event in 0.. {
            assert!(event < 6, "it is passed over again and again");
            gate.update(|law, _| law.tokens = 1);
            let mut served = false;
            while !served {
                for other in &mut others {
                    if other.is_woken() && poll(&gate, other).is_ready() {
                        served = true;
                        // It comes back at once.
                        assert_pending!(poll(&gate, other));
                    }
                }
                if oldest.is_woken() && poll(&gate, &mut oldest).is_ready() {
                    return;
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_passes_the_call_on_when_those_called_do_not_come() {
        let gate = gate(0, 0);
        let mut gone: Vec<_> = (0..2).map(|_| waiter()).collect();
        for waiter in &mut gone {
            assert_pending!(poll(&gate, waiter));
        }
        gate.update(|law, _| law.tokens = 1);
        let mut newcomer = waiter();
        assert_pending!(poll(&gate, &mut newcomer));
        assert!(newcomer.is_woken());
        assert_ready!(poll(&gate, &mut newcomer));
    }

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_passes_by_a_line_that_all_of_which_could_pass_too() {
        let gate = gate(0, 0);
        let mut waiters: Vec<_> = (0..2).map(|_| waiter()).collect();
        for waiter in &mut waiters {
            assert_pending!(poll(&gate, waiter));
        }
        gate.update(|law, _| law.tokens = 4);
        let (mut first, mut second, mut third) = (waiter(), waiter(), waiter());
        assert_ready!(poll(&gate, &mut first));
        assert_ready!(poll(&gate, &mut second));
        assert_pending!(poll(&gate, &mut third));
        assert_eq!(gate.read(|law| law.tokens), 2, "what is left is theirs");
        for waiter in &mut waiters {
            assert_ready!(poll(&gate, waiter));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_clock_is_read_only_where_it_matters() {
        /// Counts on its fingers whatever the time is.
        struct Timeless(usize, Option<Instant>);
        impl Admission for Timeless {
            type Grant = Instant;
            fn admit(&mut self, now: Instant) -> Option<Instant> {
                self.0 = self.0.checked_sub(1)?;
                Some(now)
            }
            fn admits_by_time(&self, seen: Instant) -> bool {
                self.opens_by_time(seen)
            }
            fn free(&self, now: Instant) -> usize {
                if self.1.is_some_and(|from| now < from) { 0 } else { self.0 }
            }
            fn opens_at(&self, now: Instant) -> Option<Instant> {
                self.1.filter(|from| now < *from)
            }
            fn opens_by_time(&self, seen: Instant) -> bool {
                self.1.is_some_and(|from| seen < from)
            }
            fn waiting(&mut self, _: usize) {}
        }
        impl Unpin for Place<Timeless> {}
        let start = Instant::now();
        let gate = Gate::new(Timeless(3, None));
        let mut pass = task::spawn(Place::new());
        let mut pass = || pass.enter(|cx, mut place| gate.poll_pass(cx, &mut place));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(assert_ready!(pass()), start, "as it was when last read");
        gate.update_by(|law, _| law.1 = Some(start + Duration::from_secs(2)));
        assert_eq!(assert_ready!(pass()), start + Duration::from_secs(1));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(assert_ready!(pass()), start + Duration::from_secs(6));
    }

    #[tokio::test(start_paused = true)]
    async fn the_alarm_outlives_the_waiter_that_set_it() {
        let gate = gate(1, 30);
        let (mut first, mut second) = (waiter(), waiter());
        assert_pending!(poll(&gate, &mut first));
        assert_pending!(poll(&gate, &mut second));
        drop(first);
        assert!(!second.is_woken());
        tokio::time::advance(Duration::from_secs(31)).await;
        assert!(second.is_woken(), "woken by the state's alarm");
        assert_ready!(poll(&gate, &mut second));
    }

    #[tokio::test(start_paused = true)]
    async fn a_later_caller_is_woken_after_the_only_waiter_was_dropped() {
        let gate = gate(1, 30);
        let mut first = waiter();
        assert_pending!(poll(&gate, &mut first));
        drop(first);
        let mut later = waiter();
        assert_pending!(poll(&gate, &mut later));
        tokio::time::advance(Duration::from_secs(31)).await;
        assert!(later.is_woken());
        assert_ready!(poll(&gate, &mut later));
    }

    #[tokio::test(start_paused = true)]
    async fn an_alarm_that_is_due_when_it_is_set_calls_one() {
        let gate = gate(1, 30);
        let mut waiters = [waiter(), waiter()];
        gate.update(|law, _| law.from = Instant::now());
        let next = {
            let mut guard = gate.lock();
            // The clock went on between the look at it and this.
            guard.armed = Some(Instant::now());
            guard.arming += 1;
            Next {
                calls: Calls::default(),
                alarm: Some((Box::pin(tokio::time::sleep_until(Instant::now())), guard.arming)),
            }
        };
        gate.update(|law, _| law.from += Duration::from_secs(60));
        for waiter in &mut waiters {
            let mut ticket = None;
            waiter.enter(|cx, _| drop(gate.lock().line.wait(&mut ticket, 0, cx.waker())));
        }
        gate.see_to(next);
        assert_eq!(waiters.each_ref().map(|waiter| waiter.is_woken()), [true, false]);
        assert_eq!(gate.lock().armed, None);
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_who_set_the_alarm_at_once_the_last_counts() {
        let gate = gate(1, 9);
        let mut first = waiter();
        assert_pending!(poll(&gate, &mut first));
        gate.lock().armed = None;
        let late = gate.lock().announce(0);
        gate.update(|law, _| law.from = Instant::now() + Duration::from_secs(3));
        gate.see_to(late);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(first.is_woken());
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_alarm_one_more_is_called_than_can_pass() {
        let gate = gate(2, 30);
        let mut waiters: Vec<_> = (0..10).map(|_| waiter()).collect();
        for waiter in &mut waiters {
            assert_pending!(poll(&gate, waiter));
        }
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(waiters.iter().filter(|w| w.is_woken()).count(), 3);
    }
}
