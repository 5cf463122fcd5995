//! Members under a test's hand: ready, pending or failing as it says, and calls that end when it says.
//!
//! A member is strict: its clone is not ready, and its `call` panics unless this very instance was readied. Above it stands the health
//! layer, which takes dead orgs out and marks failures; its circuit never opens here.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tokio_test::task::{self, Spawn};
use tower::{Layer, Service};
use tower_quota::{
    balance::{BalanceFuture, OrgBalance, OrgBalanceLayer},
    health::{Breaker, OrgHealth, OrgHealthLayer},
    org::{Family, Org, Orgs},
    outcome::{Class, Error, Outcome, Stamp},
};

pub type Req = Request<u32>;
pub type Guarded = OrgHealth<Member>;
pub type Balance = OrgBalance<Guarded>;
pub type Call = Spawn<BalanceFuture<Guarded, Req>>;
pub type Answer = Result<Response<u32>, Error>;

/// What the test saw of a member so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// `poll_ready`, of any instance.
    pub polls: usize,
    /// How often an instance went pending and kept a waker.
    pub registrations: usize,
    pub calls: usize,
    /// Calls that were dropped before they ended.
    pub dropped_calls: usize,
    /// Instances alive.
    pub instances: usize,
}

#[derive(Default)]
struct State {
    slots: usize,
    used: usize,
    held: bool,
    /// So many `poll_ready` fail.
    errors: usize,
    /// So many `poll_ready` ring before they return `Pending`, as one out of its coop budget does.
    rings: usize,
    /// Takes a token before it waits for a slot, as a limiter over a pacing layer does.
    greedy: bool,
    tokens: usize,
    next: u64,
    registered: BTreeMap<u64, Waker>,
    flights: BTreeMap<u32, Arc<Mutex<Flight>>>,
    counts: Counts,
}

#[derive(Default)]
struct Flight {
    result: Option<Result<Response<u32>, Broken>>,
    waker: Option<Waker>,
}

/// The error of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken(pub &'static str);

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Broken {}

/// The test's handle to one member (an org for one family).
#[derive(Clone, Default)]
pub struct Hand(Arc<Mutex<State>>);

impl Hand {
    /// A test that has failed still drops its members.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then wakes all that wait, under no lock.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (value, wakers) = {
            let mut state = self.lock();
            let value = change(&mut state);
            let open = !state.held && state.used < state.slots;
            (value, if open { std::mem::take(&mut state.registered) } else { BTreeMap::new() })
        };
        wakers.into_values().for_each(Waker::wake);
        value
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.lock())
    }

    pub fn slots(&self, slots: usize) -> &Self {
        self.change(|state| state.slots = slots);
        self
    }

    pub fn held(&self, held: bool) -> &Self {
        self.change(|state| state.held = held);
        self
    }

    pub fn greedy(&self) -> &Self {
        self.change(|state| state.greedy = true);
        self
    }

    /// The next `n` readiness polls fail.
    pub fn fail(&self, n: usize) -> &Self {
        self.change(|state| state.errors = n);
        self
    }

    /// The next `n` readiness polls ring while they are polled, and are pending.
    pub fn ring_while_polled(&self, n: usize) -> &Self {
        self.change(|state| state.rings = n);
        self
    }

    /// Rings without there being anything.
    pub fn ring(&self) {
        let wakers = std::mem::take(&mut self.lock().registered);
        wakers.into_values().for_each(Waker::wake);
    }

    /// Slots in use: reserved, or in flight.
    pub fn used(&self) -> usize {
        self.read(|state| state.used)
    }

    pub fn free(&self) -> usize {
        self.read(|state| if state.held { 0 } else { state.slots.saturating_sub(state.used) })
    }

    /// Tokens that idle instances keep.
    pub fn tokens(&self) -> usize {
        self.read(|state| state.tokens)
    }

    /// Instances that wait for a wake.
    pub fn registered(&self) -> usize {
        self.read(|state| state.registered.len())
    }

    pub fn counts(&self) -> Counts {
        self.read(|state| state.counts)
    }

    pub fn in_flight(&self) -> Vec<u32> {
        self.read(|state| state.flights.keys().copied().collect())
    }

    pub fn has(&self, id: u32) -> bool {
        self.read(|state| state.flights.contains_key(&id))
    }

    pub fn end(&self, id: u32, result: Result<Response<u32>, Broken>) {
        let flight = self.read(|state| state.flights.get(&id).cloned()).expect("no such call is in flight here");
        let waker = {
            let mut flight = flight.lock().unwrap();
            flight.result = Some(result);
            flight.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub fn answer(&self, id: u32, status: u16) {
        self.end(id, Ok(answer(id, status)));
    }

    pub fn member(&self) -> Member {
        self.change(|state| {
            state.counts.instances += 1;
            state.next += 1;
            Member { hand: self.clone(), id: state.next, readied: false, failed: false, token: false }
        })
    }

    /// Nothing is kept by anybody: no slot, no token, no waker.
    #[track_caller]
    pub fn assert_at_rest(&self) {
        let kept = self.read(|state| (state.used, state.tokens, state.registered.len(), state.flights.len()));
        assert_eq!(kept, (0, 0, 0, 0), "slots, tokens, wakers, calls are kept at rest");
    }
}

pub fn answer(id: u32, status: u16) -> Response<u32> {
    let mut response = Response::new(id);
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// One instance of a member.
pub struct Member {
    hand: Hand,
    id: u64,
    readied: bool,
    failed: bool,
    token: bool,
}

impl Clone for Member {
    fn clone(&self) -> Self {
        self.hand.member()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let (id, readied, token) = (self.id, self.readied, self.token);
        self.hand.change(|state| {
            state.counts.instances -= 1;
            state.registered.remove(&id);
            state.used -= usize::from(readied);
            state.tokens -= usize::from(token);
        });
    }
}

impl Service<Req> for Member {
    type Response = Response<u32>;
    type Error = Broken;
    type Future = FlightFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        assert!(!self.failed, "an instance is asked again that has failed");
        let mut state = self.hand.lock();
        state.counts.polls += 1;
        if self.readied {
            return Poll::Ready(Ok(()));
        }
        if state.errors > 0 {
            state.errors -= 1;
            self.failed = true;
            return Poll::Ready(Err(Broken("not ready for once")));
        }
        if state.greedy && !self.token {
            self.token = true;
            state.tokens += 1;
        }
        if state.rings > 0 {
            state.rings -= 1;
            drop(state);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if state.held || state.used >= state.slots {
            state.counts.registrations += 1;
            state.registered.insert(self.id, cx.waker().clone());
            return Poll::Pending;
        }
        state.used += 1;
        self.readied = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> FlightFuture {
        assert!(std::mem::take(&mut self.readied), "an instance is called that was not readied");
        let id = *request.body();
        let model = request.extensions().get().and_then(Family::model).map(Arc::from);
        let flight = Arc::new(Mutex::new(Flight::default()));
        let token = std::mem::take(&mut self.token);
        self.hand.change(|state| {
            state.counts.calls += 1;
            state.tokens -= usize::from(token);
            assert!(state.flights.insert(id, flight.clone()).is_none(), "call {id} is in flight already");
        });
        FlightFuture { hand: self.hand.clone(), id, model, flight: Some(flight) }
    }
}

/// A call in flight: it keeps its slot until it has ended or is dropped.
pub struct FlightFuture {
    hand: Hand,
    id: u32,
    model: Option<Arc<str>>,
    flight: Option<Arc<Mutex<Flight>>>,
}

impl FlightFuture {
    /// Says which model is refused, as a judge does.
    fn stamped(&mut self, mut response: Response<u32>) -> Response<u32> {
        if response.status() == StatusCode::FORBIDDEN {
            let mut stamp = Stamp::new(Outcome::of(Class::Forbidden));
            stamp.model = self.model.take();
            response.extensions_mut().insert(stamp);
        }
        response
    }

    fn land(&mut self, dropped: bool) {
        let id = self.id;
        if self.flight.take().is_some() {
            self.hand.change(|state| {
                state.used -= 1;
                state.flights.remove(&id);
                state.counts.dropped_calls += usize::from(dropped);
            });
        }
    }
}

impl Future for FlightFuture {
    type Output = Result<Response<u32>, Broken>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = {
            let mut flight = self.flight.as_ref().expect("polled after it had ended").lock().unwrap();
            if flight.result.is_none() {
                flight.waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            flight.result.take().unwrap()
        };
        self.land(false);
        Poll::Ready(result.map(|response| self.stamped(response)))
    }
}

impl Drop for FlightFuture {
    fn drop(&mut self) {
        self.land(true);
    }
}

/// Never opens.
struct Never;

impl Breaker for Never {
    fn succeeded(&mut self, _: u64, _: Instant, _: Instant) {}

    fn failed(&mut self, _: Instant) -> Option<Instant> {
        None
    }

    fn probe_failed(&mut self, now: Instant) -> Instant {
        now
    }
}

/// Some orgs, and a hand for each of them and each family.
#[derive(Clone)]
pub struct Desk {
    pub orgs: Orgs,
    hands: Arc<Mutex<BTreeMap<(String, String), Hand>>>,
    slots: usize,
}

impl Desk {
    /// Each member has so many slots, until its hand says otherwise.
    pub fn new(names: &[&str], slots: usize) -> Self {
        let orgs = Orgs::new(names.iter().map(|name| Org::new(name))).unwrap();
        Desk { orgs, hands: Arc::default(), slots }
    }

    pub fn hand_of(&self, org: &str, family: &str) -> Hand {
        let mut hands = self.hands.lock().unwrap();
        let hand = hands.entry((org.to_owned(), family.to_owned())).or_insert_with(|| {
            let hand = Hand::default();
            hand.slots(self.slots);
            hand
        });
        hand.clone()
    }

    /// The hand for requests that name no family.
    pub fn hand(&self, org: &str) -> Hand {
        self.hand_of(org, Family::default().as_str())
    }

    pub fn hands(&self) -> Vec<Hand> {
        self.hands.lock().unwrap().values().cloned().collect()
    }

    pub fn org(&self, name: &str) -> Org {
        self.orgs.get(name).unwrap().clone()
    }

    /// A member, as the balancer asks for it.
    pub fn guarded(&self, org: &Org) -> Guarded {
        let member = self.hand_of(org.name(), org.model_family().as_str()).member();
        OrgHealthLayer::with_breaker(org, Never).layer(member)
    }

    fn layer(&self) -> OrgBalanceLayer<impl Fn(&Org, ()) -> Guarded + use<>> {
        let desk = self.clone();
        OrgBalanceLayer::new(self.orgs.clone(), move |org: &Org, ()| desk.guarded(org))
    }

    pub fn balance(&self) -> Balance {
        self.layer().layer(())
    }

    pub fn balance_with(&self, max_unbound: usize) -> Balance {
        self.layer().max_unbound(max_unbound).unwrap().layer(())
    }

    pub fn balance_without_spares(&self) -> Balance {
        self.layer().spares(false).layer(())
    }

    #[track_caller]
    pub fn assert_at_rest(&self) {
        self.hands().iter().for_each(Hand::assert_at_rest);
    }
}

/// Calls through an instance that has been found ready, without polling the call.
#[track_caller]
pub fn call_with(balance: &Balance, request: Req) -> Call {
    let mut balance = balance.clone();
    let ready = task::spawn(()).enter(|cx, _| balance.poll_ready(cx));
    assert!(matches!(ready, Poll::Ready(Ok(()))), "not ready for another call");
    task::spawn(balance.call(request))
}

#[track_caller]
pub fn call(balance: &Balance, id: u32) -> Call {
    call_with(balance, Request::new(id))
}

pub fn of_family(id: u32, family: &str) -> Req {
    let mut request = Request::new(id);
    request.extensions_mut().insert(Family::new(family));
    request
}

/// Polls every call that has been woken until none is; those that end are taken out and returned.
pub fn settle(calls: &mut BTreeMap<u32, Call>) -> Vec<(u32, Answer)> {
    let mut ended = Vec::new();
    loop {
        let woken: Vec<u32> = calls.iter().filter(|(_, call)| call.is_woken()).map(|(id, _)| *id).collect();
        if woken.is_empty() {
            return ended;
        }
        for id in woken {
            if let Poll::Ready(answer) = calls.get_mut(&id).unwrap().poll() {
                calls.remove(&id);
                ended.push((id, answer));
            }
        }
    }
}
