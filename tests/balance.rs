//! The balancer's contracts, over members under the test's hand.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support_balance;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    error::Error as _,
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use http::{Request, Response};
use support_balance::{Broken, Call, Desk, Guarded, Req, answer, call, call_with, of_family, settle};
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimit, AimdLimitLayer, AtHead, Caps, Settings},
    balance::{NoOrgLeft, OrgBalance, OrgBalanceLayer},
    call::CallMemory,
    health::{OrgHealth, OrgHealthLayer},
    org::{Org, Orgs, OutReason},
    outcome::{ByStatus, Class, Stamp},
};

const SECOND: Duration = Duration::from_secs(1);

/// Asks an instance whether it is ready, as a task whose waker can be looked at.
struct Gate(task::Spawn<OrgBalance<Guarded>>);

impl Gate {
    fn at(balance: &OrgBalance<Guarded>) -> Self {
        Gate(task::spawn(balance.clone()))
    }

    fn ready(&mut self) -> bool {
        match self.0.enter(|cx, mut balance| Service::<Req>::poll_ready(&mut *balance, cx)) {
            Poll::Ready(ready) => {
                ready.expect("readiness never fails");
                true
            }
            Poll::Pending => false,
        }
    }

    fn call(&mut self, request: Req) -> Call {
        task::spawn(self.0.enter(|_, mut balance| balance.call(request)))
    }
}

fn memory_of(id: u32, memory: &CallMemory) -> Req {
    let mut request = Request::new(id);
    request.extensions_mut().insert(memory.clone());
    request
}

fn is_at(desk: &Desk, id: u32) -> Option<&'static str> {
    ["a", "b", "c"].into_iter().find(|org| desk.orgs.get(org).is_some() && desk.hand(org).has(id))
}

#[test]
fn readying_many_clones_touches_no_member() {
    let desk = Desk::new(&["a", "b", "c"], 1);
    let balance = desk.balance();
    let mut clones: Vec<_> = (0..200).map(|_| balance.clone()).collect();
    for clone in &mut clones {
        for _ in 0..2 {
            let ready = task::spawn(()).enter(|cx, _| Service::<Request<u32>>::poll_ready(clone, cx));
            assert!(matches!(ready, Poll::Ready(Ok(()))));
        }
    }
    assert!(desk.hands().iter().all(|hand| hand.counts().polls == 0), "nobody was asked");
    let mut served = call(&balance, 1);
    assert_pending!(served.poll());
    assert_eq!(desk.hands().iter().map(|hand| hand.used()).sum::<usize>(), 1, "one call takes one slot");
    let org = is_at(&desk, 1).unwrap();
    desk.hand(org).answer(1, 200);
    assert!(served.is_woken());
    assert_eq!(assert_ready!(served.poll()).unwrap().into_body(), 1);
    desk.assert_at_rest();
}

#[test]
fn slots_free_and_in_flight_are_the_limit_whenever_all_is_quiet() {
    let desk = Desk::new(&["a", "b", "c"], 3);
    let balance = desk.balance();
    let balanced = |in_flight: usize| {
        let (mut free, mut used, mut flying) = (0, 0, 0);
        for hand in desk.hands() {
            (free, used, flying) = (free + hand.free(), used + hand.used(), flying + hand.in_flight().len());
        }
        assert_eq!((free, used, flying), (9 - in_flight, in_flight, in_flight));
    };
    let mut calls: BTreeMap<u32, Call> = BTreeMap::new();
    for id in 0..20 {
        calls.insert(id, call(&balance, id));
        assert_pending!(calls.get_mut(&id).unwrap().poll());
        settle(&mut calls);
        balanced(9.min(id as usize + 1));
    }
    for id in 0..20 {
        let org = is_at(&desk, id).expect("the oldest is in flight");
        desk.hand(org).answer(id, 200);
        settle(&mut calls);
        balanced(9.min(19 - id as usize));
    }
    assert!(calls.is_empty());
    desk.assert_at_rest();
}

#[test]
fn who_is_served_at_once_leaves_no_member_waiting_for_nobody() {
    let desk = Desk::new(&["a", "b"], 100);
    desk.hand("a").greedy().held(true);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..20).map(|id| call(&balance, id)).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
        assert_eq!((desk.hand("a").registered(), desk.hand("a").tokens()), (0, 0), "nobody waits for it");
    }
    assert!(desk.hand("a").counts().polls > 0, "it was asked");
    drop(calls);
    desk.assert_at_rest();
}

#[test]
fn the_last_one_out_stands_the_members_down() {
    let desk = Desk::new(&["a", "b"], 0);
    desk.hand("a").greedy();
    desk.hand("b").greedy();
    let balance = desk.balance();
    let (mut first, mut second) = (call(&balance, 1), call(&balance, 2));
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    for org in ["a", "b"] {
        assert_eq!((desk.hand(org).registered(), desk.hand(org).tokens()), (1, 1), "one instance waits for all");
    }
    drop(first);
    assert_eq!(desk.hand("a").registered(), 1, "somebody waits still");
    drop(second);
    desk.assert_at_rest();
}

#[test]
fn the_last_one_out_stands_down_a_member_that_has_rung() {
    let desk = Desk::new(&["a"], 0);
    desk.hand("a").greedy();
    let balance = desk.balance();
    let mut only = call(&balance, 1);
    assert_pending!(only.poll());
    desk.hand("a").slots(1);
    assert!(only.is_woken());
    drop(only);
    desk.assert_at_rest();
}

// The gate: how many calls may be made and not yet bound.

#[test]
fn ready_means_fewer_unbound_calls_than_the_bound() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance_with(2);
    let mut gate = Gate::at(&balance);
    assert!(gate.ready());
    let mut first = gate.call(Request::new(1));
    assert!(gate.ready(), "one is fewer than two");
    let mut second = gate.call(Request::new(2));
    assert!(!gate.ready(), "calls count from the call, not from their first poll");
    assert_pending!(first.poll());
    assert_pending!(second.poll());
    assert!(!gate.ready());
    desk.hand("a").slots(1);
    assert!(first.is_woken());
    assert_pending!(first.poll());
    assert!(gate.0.is_woken(), "the first is bound: there is room");
    assert!(gate.ready());
    desk.hand("a").answer(1, 200);
    assert_ready!(first.poll()).unwrap();
    drop(second);
    assert!(Gate::at(&balance).ready());
}

#[test]
fn a_bound_of_nothing_is_refused_at_build() {
    let layer = OrgBalanceLayer::new(Desk::new(&["a"], 1).orgs, |_: &Org, ()| ());
    assert_eq!(layer.max_unbound(0).unwrap_err().field(), "max_unbound");
}

#[test]
fn whoever_waits_at_the_gate_and_does_not_come_delays_nobody() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance_with(1);
    let held_up = call(&balance, 1);
    let mut gates: Vec<_> = (0..4).map(|_| Gate::at(&balance)).collect();
    assert!(gates.iter_mut().all(|gate| !gate.ready()));
    drop(held_up);
    assert!(gates[0].0.is_woken(), "the first to come is the first to go");
    assert!(gates[1].0.is_woken(), "and one beside it, which goes if the first does not come");
    assert!(gates[1].ready());
    let call = gates[1].call(Request::new(2));
    drop(call);
    assert!(gates[2].0.is_woken());
    assert!(gates[2].ready());
    drop(gates.remove(0));
    assert!(gates.iter_mut().all(Gate::ready));
}

#[test]
fn a_waiter_at_the_gate_that_leaves_hands_its_turn_on() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance_with(1);
    let held_up = call(&balance, 1);
    let mut gates: Vec<_> = (0..3).map(|_| Gate::at(&balance)).collect();
    assert!(gates.iter_mut().all(|gate| !gate.ready()));
    drop(held_up);
    assert!(!gates[2].0.is_woken());
    gates.drain(..2);
    assert!(gates[0].0.is_woken());
    assert!(gates[0].ready());
}

#[test]
fn when_the_bound_is_full_of_one_familys_calls_it_is_full_for_all() {
    let desk = Desk::new(&["a"], 1);
    desk.hand_of("a", "held").held(true);
    let balance = desk.balance_with(10);
    let mut held: Vec<_> = (0..10).map(|id| call_with(&balance, of_family(id, "held"))).collect();
    held.iter_mut().for_each(|call| assert_pending!(call.poll()));
    let mut gate = Gate::at(&balance);
    assert!(!gate.ready(), "readiness cannot see what it is asked for");
    held.pop();
    assert!(gate.0.is_woken());
    assert!(gate.ready());
    let mut other = gate.call(of_family(100, "other"));
    assert_pending!(other.poll());
    assert!(desk.hand_of("a", "other").has(100));
    assert!(gate.ready(), "a bound call makes room at once");
}

// Clones.

#[test]
fn a_clone_starts_with_nothing() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance_with(1);
    let mut gate = Gate::at(&balance);
    assert!(gate.ready());
    let memory = CallMemory::new();
    let unbound = gate.call(memory_of(1, &memory));
    assert!(gate.ready(), "the next attempt of a call that lives has passed");
    let mut clone = Gate(task::spawn(gate.0.enter(|_, balance| balance.clone())));
    assert!(!clone.ready(), "its clone has not");
    drop(clone);
    drop((gate, unbound));
    assert!(Gate::at(&balance).ready(), "nor does a dropped one keep a place");
}

#[test]
fn dropping_a_service_or_a_call_that_was_never_polled_leaves_nothing() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance_with(1);
    let mut gate = Gate::at(&balance);
    assert!(gate.ready());
    drop(gate);
    drop(call(&balance, 1));
    assert!(Gate::at(&balance).ready());
    assert!(desk.hands().iter().all(|hand| hand.counts().polls == 0));
}

// The line.

#[test]
fn those_who_wait_are_served_in_the_order_of_their_calls() {
    let desk = Desk::new(&["a", "b"], 0);
    let balance = desk.balance();
    // Called in order, polled in reverse: age counts from the call.
    let mut calls: BTreeMap<u32, Call> = (0..10).map(|id| (id, call(&balance, id))).collect();
    calls.values_mut().rev().for_each(|call| assert_pending!(call.poll()));
    settle(&mut calls);
    for slots in 1..=5 {
        for org in ["a", "b"] {
            desk.hand(org).slots(slots);
            settle(&mut calls);
        }
        let served: BTreeSet<u32> = ["a", "b"].iter().flat_map(|org| desk.hand(org).in_flight()).collect();
        assert_eq!(served, (0..2 * slots as u32).collect(), "the oldest first");
    }
}

#[test]
fn a_newcomer_does_not_take_what_somebody_waits_for() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits = call(&balance, 1);
    assert_pending!(waits.poll());
    desk.hand("a").slots(1);
    let mut comes = call(&balance, 2);
    assert_pending!(comes.poll());
    assert_eq!(desk.hand("a").in_flight(), [0; 0], "it is the turn of the one who was called");
    assert_pending!(waits.poll());
    assert_eq!(desk.hand("a").in_flight(), [1]);
}

#[test]
fn a_newcomer_passes_by_those_who_have_been_called_where_a_member_has_more() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits: Vec<_> = (0..2).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").slots(3);
    assert!(waits.iter().all(|call| call.is_woken()));
    assert_pending!(waits[0].poll());
    let mut comes = call(&balance, 2);
    assert_pending!(comes.poll());
    assert_eq!(desk.hand("a").in_flight(), [0, 2], "it had more than the first of them needed");
    assert_pending!(waits[1].poll());
    assert!(desk.hand("a").has(1));
}

#[test]
fn a_newcomer_joins_the_line_while_somebody_in_it_is_not_called() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits: Vec<_> = (0..5).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").slots(9);
    assert_pending!(waits[0].poll());
    assert_eq!(waits.iter().filter(|call| call.is_woken()).count(), 2, "the second and the third");
    let mut comes = call(&balance, 5);
    assert_pending!(comes.poll());
    assert_eq!(desk.hand("a").in_flight(), [0]);
}

#[test]
fn whoever_was_too_late_is_first_for_what_a_member_has_next() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits: Vec<_> = (0..2).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").slots(2);
    assert_pending!(waits[0].poll());
    let mut quick = call(&balance, 2);
    assert_pending!(quick.poll());
    assert_pending!(waits[1].poll());
    assert_eq!(desk.hand("a").in_flight(), [0, 2]);
    assert!(!waits[1].is_woken());
    // Somebody is answered, and has its next call ready before the one who waits is polled.
    desk.hand("a").answer(2, 200);
    assert_ready!(quick.poll()).unwrap();
    let mut greedy = call(&balance, 3);
    assert_pending!(greedy.poll());
    assert!(!desk.hand("a").has(3));
    assert!(waits[1].is_woken());
    assert_pending!(waits[1].poll());
    assert_eq!(desk.hand("a").in_flight(), [0, 1]);
}

#[tokio::test]
async fn a_line_dissolves_once_there_are_slots_for_all() {
    const CALLERS: usize = 64;
    async fn turn() {
        let mut waited = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
    let orgs = Orgs::new([("a", 150), ("b", 150)].map(|(name, cap)| Org::new(name).cap(cap))).unwrap();
    // Every org's first call goes alone, so that there is a line to begin with.
    let settings = Settings::builder().start(1.0).build().unwrap();
    let (now, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (of_now, of_peak) = (now.clone(), peak.clone());
    let layer = OrgBalanceLayer::new(orgs.clone(), move |org: &Org, ()| {
        let (now, peak) = (of_now.clone(), of_peak.clone());
        let wire = service_fn(move |request: Request<u32>| {
            let now = now.clone();
            peak.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
            async move {
                turn().await;
                turn().await;
                now.fetch_sub(1, SeqCst);
                Ok::<_, Infallible>(answer(*request.body(), 200))
            }
        });
        AimdLimitLayer::with_settings(org, &settings).release_at_head().layer(wire)
    });
    let balance = layer.layer(());
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..CALLERS {
        let mut balance = balance.clone();
        callers.spawn(async move {
            for id in 0..100 {
                balance.ready().await.unwrap().call(Request::new(id)).await.unwrap();
            }
        });
    }
    callers.join_all().await;
    assert_eq!(peak.load(SeqCst), CALLERS, "nobody waits where there are 300 slots");
}

#[test]
fn a_dropped_waiter_that_had_been_called_hands_its_turn_on() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").slots(1);
    assert_eq!(calls.iter().map(|call| call.is_woken()).collect::<Vec<_>>(), [true, true, false]);
    calls.drain(..2);
    assert!(calls[0].is_woken());
    assert_pending!(calls[0].poll());
    assert!(desk.hand("a").has(2));
}

#[test]
fn a_dropped_waiter_that_had_not_been_called_changes_nothing() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    drop(calls.remove(1));
    assert!(calls.iter().all(|call| !call.is_woken()));
    assert_eq!(desk.hand("a").registered(), 1);
    desk.hand("a").slots(1);
    assert!(calls[0].is_woken());
}

#[test]
fn one_who_is_called_and_does_not_come_does_not_keep_the_slot() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..5).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    // The second never comes; each of the others is served as the slot comes free.
    for (ends, next) in [(0, 2), (2, 3), (3, 4)] {
        desk.hand("a").answer(ends, 200);
        assert_ready!(calls[ends as usize].poll()).unwrap();
        assert!(calls[next].is_woken(), "{next} is called");
        assert_pending!(calls[next].poll());
        assert!(desk.hand("a").has(next as u32));
        // Whoever was called besides finds nothing, and is called again in time.
        for other in calls[next + 1..].iter_mut().filter(|call| call.is_woken()) {
            assert_pending!(other.poll());
        }
    }
    desk.hand("a").answer(4, 200);
    assert_ready!(calls[4].poll()).unwrap();
    assert_pending!(calls[1].poll());
    assert!(desk.hand("a").has(1), "its place was kept");
}

#[test]
fn several_who_were_called_and_do_not_come_do_not_stop_the_line() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..8).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").slots(1);
    assert!(calls[0].is_woken() && calls[1].is_woken(), "neither comes");
    // The next event goes to the first who was not called; from there on the line moves by itself.
    desk.hand("a").slots(4);
    let mut newcomer = call(&balance, 100);
    assert_pending!(newcomer.poll());
    for (next, call) in calls.iter_mut().enumerate().take(6).skip(2) {
        assert!(call.is_woken(), "{next} is called by whoever went before");
        assert_pending!(call.poll());
        assert!(desk.hand("a").has(next as u32), "{next}");
    }
    // All slots are taken. One comes free: there are waiters who have not been called.
    for call in calls[6..].iter_mut().filter(|call| call.is_woken()) {
        assert_pending!(call.poll());
    }
    desk.hand("a").answer(2, 200);
    assert_ready!(calls[2].poll()).unwrap();
    assert!(calls[6].is_woken());
    assert_pending!(calls[6].poll());
    assert!(desk.hand("a").has(6));
}

#[test]
fn a_slot_that_comes_free_while_the_next_in_line_dawdles_goes_to_another() {
    let desk = Desk::new(&["a"], 2);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..6).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").answer(0, 200);
    assert_ready!(calls[0].poll()).unwrap();
    assert!(calls[2].is_woken() && calls[3].is_woken());
    assert_pending!(calls[2].poll());
    // 2 has the slot; 3 has been called, and whoever 2 called in leaving. None of them has come when the next slot is free.
    let before: Vec<_> = calls.iter().map(|call| call.is_woken()).collect();
    desk.hand("a").answer(1, 200);
    assert_ready!(calls[1].poll()).unwrap();
    let after: Vec<_> = calls.iter().map(|call| call.is_woken()).collect();
    assert_ne!(before, after, "the event went to one who had not been called: {before:?}");
}

#[test]
fn a_spuriously_polled_waiter_keeps_its_place_and_gets_nothing_out_of_turn() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..4).map(|id| call(&balance, id)).collect();
    for _ in 0..3 {
        calls.iter_mut().rev().for_each(|call| assert_pending!(call.poll()));
    }
    assert!(calls.iter().all(|call| !call.is_woken()), "a poll is no event");
    assert_eq!(desk.hand("a").registered(), 1);
    desk.hand("a").slots(1);
    assert_pending!(calls[3].poll());
    assert!(!desk.hand("a").has(3), "it was not called, and others are before it");
    assert_pending!(calls[0].poll());
    assert!(desk.hand("a").has(0));
    for _ in 0..3 {
        calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    }
    assert_eq!(desk.hand("a").in_flight(), [0]);
}

#[test]
fn a_waiter_polled_by_another_task_is_woken_there() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut old = call(&balance, 1);
    assert_pending!(old.poll());
    let mut future = old.into_inner();
    let mut new = task::spawn(());
    new.enter(|cx, _| assert_pending!(std::pin::Pin::new(&mut future).poll(cx)));
    desk.hand("a").slots(1);
    assert!(new.is_woken());
}

// The bell.

#[test]
fn a_ring_during_the_members_own_poll_is_not_lost() {
    let desk = Desk::new(&["a"], 1);
    desk.hand("a").ring_while_polled(1);
    let balance = desk.balance();
    let mut only = call(&balance, 1);
    assert_pending!(only.poll());
    assert!(desk.hand("a").has(1) || only.is_woken(), "it rang before it could be noted as pending");
    let mut calls = BTreeMap::from([(1, only)]);
    settle(&mut calls);
    assert!(desk.hand("a").has(1));
}

#[test]
fn a_member_that_rings_at_every_poll_is_asked_again_and_again() {
    for rings in 1..12 {
        let desk = Desk::new(&["a", "b"], 1);
        desk.hand("a").ring_while_polled(rings);
        desk.hand("b").ring_while_polled(rings);
        let balance = desk.balance();
        let mut calls: BTreeMap<u32, Call> = (0..4).map(|id| (id, call(&balance, id))).collect();
        calls.values_mut().for_each(|call| assert_pending!(call.poll()));
        settle(&mut calls);
        let served: usize = ["a", "b"].iter().map(|org| desk.hand(org).in_flight().len()).sum();
        assert_eq!(served, 2, "after {rings} rings");
    }
}

#[test]
fn a_ring_that_brings_nothing_costs_nobody_its_place() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: BTreeMap<u32, Call> = (0..3).map(|id| (id, call(&balance, id))).collect();
    calls.values_mut().for_each(|call| assert_pending!(call.poll()));
    for _ in 0..5 {
        desk.hand("a").ring();
        settle(&mut calls);
        assert_eq!(desk.hand("a").registered(), 1);
    }
    desk.hand("a").slots(1);
    settle(&mut calls);
    assert_eq!(desk.hand("a").in_flight(), [0]);
}

#[test]
fn a_member_that_wakes_while_nobody_waits_serves_whoever_comes() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut gone = call(&balance, 1);
    assert_pending!(gone.poll());
    drop(gone);
    desk.hand("a").slots(1);
    let mut comes = call(&balance, 2);
    assert_pending!(comes.poll());
    assert!(desk.hand("a").has(2));
}

type Unspawned = tower_quota::balance::BalanceFuture<Guarded, Req>;

/// An executor without a queue: whoever wakes a task polls it, there and then.
struct Inline(Mutex<Option<std::pin::Pin<Box<Unspawned>>>>, AtomicBool);

impl Inline {
    fn new(call: Call) -> Arc<Self> {
        Arc::new(Inline(Mutex::new(Some(Box::pin(call.into_inner()))), AtomicBool::new(false)))
    }
}

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        self.1.store(true, SeqCst);
        // Woken from within its own poll, it goes on where it is polled.
        let Some(mut call) = self.0.lock().unwrap().take() else { return };
        while self.1.swap(false, SeqCst) {
            if call.as_mut().poll(&mut Context::from_waker(&Waker::from(self.clone()))).is_ready() {
                return;
            }
        }
        *self.0.lock().unwrap() = Some(call);
    }
}

/// A deadlock shows as a test that fails, not as one that hangs.
fn ends(what: &'static str, run: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        run();
        done.send(()).unwrap();
    });
    ended.recv_timeout(20 * SECOND).unwrap_or_else(|_| panic!("{what} has come to no end"));
}

#[test]
fn a_waker_may_poll_its_call_there_and_then() {
    ends("a wake by a member", || {
        let desk = Desk::new(&["a"], 0);
        let balance = desk.balance();
        let tasks: Vec<_> = (0..9).map(|id| Inline::new(call(&balance, id))).collect();
        tasks.iter().for_each(|task| task.clone().wake());
        desk.hand("a").slots(3);
        // Whoever is woken first is through, and calls the next, before the second is woken: the order is not quite the line's.
        for served in 3..9 {
            let flying = desk.hand("a").in_flight();
            assert_eq!(flying.len(), 3, "{flying:?}");
            desk.hand("a").answer(flying[0], 200);
            assert_eq!(desk.hand("a").counts().calls, served + 1);
        }
    });
}

#[test]
fn a_waker_may_poll_its_call_while_a_member_rings_in_its_own_poll() {
    ends("a ring in a member's own poll", || {
        let desk = Desk::new(&["a"], 0);
        let balance = desk.balance();
        let tasks: Vec<_> = (0..4).map(|id| Inline::new(call(&balance, id))).collect();
        let mut plain = call(&balance, 4);
        assert_pending!(plain.poll());
        tasks.iter().for_each(|task| task.clone().wake());
        for rings in 1..6 {
            desk.hand("a").ring_while_polled(rings).ring();
            assert_pending!(plain.poll());
        }
        desk.hand("a").slots(2);
        assert_eq!(desk.hand("a").in_flight().len(), 2);
    });
}

/// Drops a call when it is dropped itself.
struct DropsACall(Mutex<Option<Call>>);

impl Wake for DropsACall {
    fn wake(self: Arc<Self>) {}
}

impl Drop for DropsACall {
    fn drop(&mut self) {
        drop(self.0.lock().unwrap().take());
    }
}

#[test]
fn a_waker_that_is_dropped_may_drop_another_call() {
    ends("the drop of a waker", || {
        let desk = Desk::new(&["a"], 0);
        let balance = desk.balance();
        let mut other = call(&balance, 1);
        assert_pending!(other.poll());
        let mut call = call(&balance, 2).into_inner();
        let waker = Waker::from(Arc::new(DropsACall(Mutex::new(Some(other)))));
        assert!(std::pin::Pin::new(&mut call).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(waker);
        // The line keeps the last clone of the waker; now it is replaced.
        assert!(std::pin::Pin::new(&mut call).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(call);
        desk.assert_at_rest();
    });
}

#[test]
fn it_works_where_tasks_are_polled_for_no_reason() {
    let desk = Desk::new(&["a", "b", "c"], 2);
    let balance = desk.balance();
    let mut calls: BTreeMap<u32, Call> = (0..60).map(|id| (id, call(&balance, id))).collect();
    let mut rng = fastrand::Rng::with_seed(4);
    let mut done = 0;
    for _ in 0..10_000 {
        let ids: Vec<u32> = calls.keys().copied().collect();
        let Some(id) = rng.choice(ids) else { break };
        if calls.get_mut(&id).unwrap().poll().is_ready() {
            calls.remove(&id);
            done += 1;
        } else if let Some(org) = is_at(&desk, id) {
            desk.hand(org).answer(id, 200);
        }
    }
    assert_eq!(done, 60);
    desk.assert_at_rest();
}

// Holds, and the end of all orgs.

type Wire = tower::util::BoxCloneSyncService<Request<u32>, Response<u32>, Infallible>;

type Limited = OrgHealth<AimdLimit<Wire, ByStatus, AtHead>>;

/// A balancer over real limiters, and the answers' statuses by a function of org and request.
fn limited<F, A>(orgs: &Orgs, settings: Settings, answers: F) -> OrgBalance<Limited>
where
    F: Fn(&str, u32) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<u32>> + Send + 'static,
{
    OrgBalanceLayer::new(orgs.clone(), move |org: &Org, ()| {
        let (answers, name) = (answers.clone(), org.name().to_owned());
        let wire = service_fn(move |request: Request<u32>| {
            let answer = answers(&name, request.into_body());
            async move { Ok(answer.await) }
        });
        let limit = AimdLimitLayer::with_settings(org, &settings).release_at_head();
        OrgHealthLayer::new(org).layer(limit.layer(Wire::new(wire)))
    })
    .layer(())
}

fn two_orgs() -> Orgs {
    Orgs::new([Org::new("a"), Org::new("b")]).unwrap()
}

const SOUNDING: u32 = u32::MAX;

/// Two calls at once, so that each of two orgs has been tried.
async fn sound<B>(balance: &B)
where
    B: Service<Request<u32>, Response = Response<u32>> + Clone,
    B::Error: std::fmt::Debug,
{
    let (one, two) = (balance.clone().oneshot(Request::new(SOUNDING)), balance.clone().oneshot(Request::new(SOUNDING)));
    let answers = tokio::join!(one, two);
    answers.0.unwrap();
    answers.1.unwrap();
}

fn refusal(id: u32, retry_after: u32) -> Response<u32> {
    let mut response = answer(id, 429);
    response.headers_mut().insert("retry-after", retry_after.into());
    response
}

#[tokio::test(start_paused = true)]
async fn when_all_are_held_whoever_waits_is_woken_by_time_alone() {
    let orgs = two_orgs();
    let settings = Settings::builder().spread(Duration::ZERO).build().unwrap();
    let waits = |org: &str| if org == "a" { 40 } else { 30 };
    let begin = Instant::now();
    let balance = limited(&orgs, settings, move |org, id| {
        let answer = if begin.elapsed() < 10 * SECOND { refusal(id, waits(org)) } else { answer(id, 200) };
        async move { answer }
    });
    for id in 0..2 {
        balance.clone().oneshot(Request::new(id)).await.unwrap();
    }
    assert!(orgs.iter().all(Org::is_held));
    let mut ready = balance.clone();
    let mut first = task::spawn(ready.ready().await.unwrap().call(Request::new(10)));
    assert_pending!(first.poll());
    // The one who set the alarm goes away; the alarm stays.
    drop(first);
    let mut later = task::spawn(ready.ready().await.unwrap().call(Request::new(11)));
    assert_pending!(later.poll());
    tokio::time::advance(29_900 * SECOND / 1_000).await;
    assert!(!later.is_woken());
    tokio::time::advance(SECOND / 5).await;
    assert!(later.is_woken(), "the first hold has ended");
    let response = assert_ready!(later.poll()).unwrap();
    assert_eq!(response.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name(), "b");
    assert!(orgs.iter().all(|org| (org.snapshot().in_flight, org.snapshot().waiting) == (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn after_ten_idle_minutes_every_org_is_considered() {
    let mut served = BTreeSet::new();
    for seed in 0..40 {
        fastrand::seed(seed);
        let orgs = two_orgs();
        let begin = Instant::now();
        let balance = limited(&orgs, Settings::default(), move |_, id| {
            let answer = if begin.elapsed() < SECOND { refusal(id, 5) } else { answer(id, 200) };
            async move { answer }
        });
        for id in 0..2 {
            balance.clone().oneshot(Request::new(id)).await.unwrap();
        }
        // Somebody waits, and leaves, so that nobody keeps an eye on them.
        let mut ready = balance.clone();
        let mut gone = task::spawn(ready.ready().await.unwrap().call(Request::new(2)));
        assert_pending!(gone.poll());
        drop(gone);
        tokio::time::advance(600 * SECOND).await;
        let response = balance.oneshot(Request::new(3)).await.unwrap();
        served.insert(response.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name().to_owned());
    }
    assert_eq!(served.len(), 2, "either may take it");
}

#[test]
fn when_no_org_is_left_every_call_fails_at_once_with_each_orgs_reason() {
    let desk = Desk::new(&["a", "b"], 0);
    let balance = desk.balance();
    let mut waiting: BTreeMap<u32, Call> = (0..7).map(|id| (id, call(&balance, id))).collect();
    waiting.values_mut().for_each(|call| assert_pending!(call.poll()));
    desk.org("a").put_out(OutReason::Unauthorised);
    assert!(settle(&mut waiting).is_empty(), "b is left");
    desk.org("b").put_out(OutReason::OutOfQuota);
    let ended = settle(&mut waiting);
    assert_eq!(ended.len(), 7, "those who waited already, all of them");
    let mut fresh = call(&balance, 9);
    for answer in ended.into_iter().map(|(_, answer)| answer).chain([assert_ready!(fresh.poll())]) {
        let error = answer.unwrap_err();
        assert_eq!(error.class(), Class::NoOrg);
        let none_left = error.source().unwrap().downcast_ref::<NoOrgLeft>().unwrap();
        let reasons: Vec<_> = none_left.reasons().collect();
        assert_eq!(reasons, [("a", &OutReason::Unauthorised), ("b", &OutReason::OutOfQuota)]);
        assert!(none_left.to_string().contains("a: ") && none_left.to_string().contains("b: "), "{none_left}");
    }
    assert!(Gate::at(&balance).ready(), "readiness does not fail, and nothing is counted any more");
    desk.assert_at_rest();
}

#[test]
fn those_who_wait_fail_too_where_some_who_were_called_do_not_come() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut gone: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    gone.iter_mut().for_each(|call| assert_pending!(call.poll()));
    let mut waiting: BTreeMap<u32, Call> = (10..20).map(|id| (id, call(&balance, id))).collect();
    waiting.values_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").ring();
    desk.org("a").put_out(OutReason::Unauthorised);
    let mut fresh = call(&balance, 30);
    assert_ready!(fresh.poll()).unwrap_err();
    // One more event, and the line moves by itself.
    drop(gone.remove(0));
    assert_eq!(settle(&mut waiting).len(), 10);
}

#[test]
fn a_family_put_out_leaves_the_orgs_other_families() {
    let desk = Desk::new(&["a", "b"], 10);
    let balance = desk.balance();
    let serve = |id: u32, family: &str, status: u16| {
        let mut call = call_with(&balance, of_family(id, family));
        assert_pending!(call.poll());
        let org = ["a", "b"].into_iter().find(|org| desk.hand_of(org, family).has(id)).unwrap();
        desk.hand_of(org, family).answer(id, status);
        assert_eq!(assert_ready!(call.poll()).unwrap().status(), status);
        org
    };
    let forbidden = serve(0, "opus", 403);
    for id in 1..20 {
        assert_ne!(serve(id, "opus", 200), forbidden, "out for this family");
    }
    assert!((20..80).any(|id| serve(id, "haiku", 200) == forbidden), "in for the other");
    let dead = serve(100, "haiku", 401);
    for id in 101..120 {
        assert_ne!(serve(id, "haiku", 200), dead);
    }
    assert!(desk.org(dead).is_out() && desk.org(dead).family(&tower_quota::org::Family::new("new")).is_out());
}

#[test]
fn a_member_whose_readiness_fails_once_stays_and_is_asked_again() {
    let desk = Desk::new(&["a"], 1);
    desk.hand("a").fail(1);
    let balance = desk.balance();
    let mut failed = call(&balance, 1);
    let error = assert_ready!(failed.poll()).unwrap_err();
    assert_eq!((error.class(), error.org().unwrap().name()), (Class::Transport, "a"));
    assert_eq!(*error.source().unwrap().downcast_ref::<Broken>().unwrap(), Broken("not ready for once"));
    let instances = desk.hand("a").counts().instances;
    assert_eq!(instances, 1, "the failed instance is replaced by its clone");
    let mut next = call(&balance, 2);
    assert_pending!(next.poll());
    assert!(desk.hand("a").has(2));
    desk.hand("a").answer(2, 200);
    assert_ready!(next.poll()).unwrap();
}

#[test]
fn a_failing_readiness_fails_one_call_and_the_line_goes_on() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut calls: BTreeMap<u32, Call> = (0..4).map(|id| (id, call(&balance, id))).collect();
    calls.values_mut().for_each(|call| assert_pending!(call.poll()));
    desk.hand("a").fail(1).slots(1);
    let ended = settle(&mut calls);
    assert_eq!(ended.iter().map(|(id, answer)| (*id, answer.is_err())).collect::<Vec<_>>(), [(0, true)]);
    assert_eq!(desk.hand("a").in_flight(), [1]);
}

// Retried calls.

#[test]
fn a_retried_call_keeps_its_place_and_passes_the_gate() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance_with(2);
    let mut old = Gate::at(&balance);
    let memory = CallMemory::new();
    assert!(old.ready());
    let mut first = old.call(memory_of(0, &memory));
    assert_pending!(first.poll());
    let mut fresh: Vec<_> = (1..3).map(|id| call(&balance, id)).collect();
    fresh.iter_mut().for_each(|call| assert_pending!(call.poll()));
    assert!(!Gate::at(&balance).ready(), "the gate is shut for fresh calls");
    desk.hand("a").answer(0, 503);
    assert_ready!(first.poll()).unwrap();
    // The fresh ones have been called, and are slow. The retry passes the gate, and is older than they.
    assert!(old.ready());
    let mut again = old.call(memory_of(0, &memory));
    assert_pending!(again.poll());
    assert_pending!(again.poll());
    if again.is_woken() {
        assert_pending!(again.poll());
    }
    assert!(desk.hand("a").has(0), "it was before them in line");
    fresh.iter_mut().for_each(|call| assert_pending!(call.poll()));
    assert!(!Gate::at(&balance).ready(), "a retried call does not count, bound or not");
    drop(again);
    drop(first);
    drop(memory);
    assert!(!old.ready(), "once the request is done, its instance waits at the gate like any other");
}

#[test]
fn a_retried_call_in_line_goes_before_all_fresh_ones() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let memory = CallMemory::new();
    // The first attempt gives it its age.
    drop(call_with(&balance, memory_of(0, &memory)));
    let mut fresh: Vec<_> = (1..20).map(|id| call(&balance, id)).collect();
    fresh.iter_mut().for_each(|call| assert_pending!(call.poll()));
    let mut again = call_with(&balance, memory_of(0, &memory));
    assert_pending!(again.poll());
    desk.hand("a").slots(1);
    assert!(again.is_woken());
    assert_pending!(again.poll());
    assert_eq!(desk.hand("a").in_flight(), [0]);
}

#[test]
fn a_steady_stream_of_fresh_calls_does_not_overtake_a_retried_one() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance();
    let memory = CallMemory::new();
    let mut calls: BTreeMap<u32, Call> = BTreeMap::new();
    calls.insert(0, call_with(&balance, memory_of(0, &memory)));
    assert_pending!(calls.get_mut(&0).unwrap().poll());
    let mut served = Vec::new();
    for step in 1..400 {
        // One in, one out: the slot is never idle and the line never empty.
        calls.insert(step, call(&balance, step));
        assert_pending!(calls.get_mut(&step).unwrap().poll());
        let flying = desk.hand("a").in_flight()[0];
        desk.hand("a").answer(flying, if flying == 0 { 503 } else { 200 });
        for (id, answer) in settle(&mut calls) {
            answer.unwrap();
            served.push(id);
            if id == 0 {
                calls.insert(0, call_with(&balance, memory_of(0, &memory)));
                assert_pending!(calls.get_mut(&0).unwrap().poll());
                settle(&mut calls);
            }
        }
    }
    // It is the oldest: it is next whenever it asks, or the one after.
    assert!(served.iter().filter(|id| **id == 0).count() >= 130, "{served:?}");
    let others: Vec<_> = served.iter().filter(|id| **id != 0).collect();
    assert!(others.windows(2).all(|pair| pair[0] < pair[1]), "{others:?}");
}

// Families.

#[test]
fn a_held_family_stops_no_other() {
    let desk = Desk::new(&["a", "b"], 2);
    desk.hand_of("a", "held").held(true);
    desk.hand_of("b", "held").held(true);
    let balance = desk.balance();
    let mut held: BTreeMap<u32, Call> = (0..1_000).map(|id| (id, call_with(&balance, of_family(id, "held")))).collect();
    held.values_mut().for_each(|call| assert_pending!(call.poll()));
    for id in 10_000..10_100 {
        let mut other = call_with(&balance, of_family(id, "other"));
        assert_pending!(other.poll());
        let org = ["a", "b"].into_iter().find(|org| desk.hand_of(org, "other").has(id)).expect("served at once");
        desk.hand_of(org, "other").answer(id, 200);
        assert_ready!(other.poll()).unwrap();
    }
    assert!(held.values().all(|call| !call.is_woken()));
    desk.hand_of("a", "held").held(false);
    let ended = settle(&mut held);
    assert!(ended.is_empty());
    assert_eq!(desk.hand_of("a", "held").in_flight(), [0, 1]);
}

#[test]
fn more_than_64_families_share_one() {
    let desk = Desk::new(&["a"], 1_000);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..200).map(|id| call_with(&balance, of_family(id, &format!("model-{id}")))).collect();
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    assert!((0..64).all(|id| desk.hand_of("a", &format!("model-{id}")).has(id)), "each its own");
    assert_eq!(desk.hand("a").in_flight(), (64..200).collect::<Vec<_>>(), "the rest share the default");
    assert_eq!(desk.hands().len(), 65);
    // A family keeps its own once it has one.
    let mut again = call_with(&balance, of_family(1_000, "model-3"));
    assert_pending!(again.poll());
    assert!(desk.hand_of("a", "model-3").has(1_000));
}

// Who serves.

#[test]
fn in_a_burst_no_call_waits_while_any_org_has_a_slot() {
    for seed in 0..20 {
        fastrand::seed(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        let desk = Desk::new(&["a", "b", "c"], 0);
        for (org, slots) in [("a", 7), ("b", 2), ("c", 1)] {
            desk.hand(org).slots(slots);
        }
        let balance = desk.balance();
        let mut calls: BTreeMap<u32, Call> = (0..200).map(|id| (id, call(&balance, id))).collect();
        let mut left = 200;
        let mut flying: Vec<(&str, u32)> = Vec::new();
        for id in 0..200 {
            assert_pending!(calls.get_mut(&id).unwrap().poll());
        }
        while left > 0 {
            left -= settle(&mut calls).len();
            flying.clear();
            for org in ["a", "b", "c"] {
                flying.extend(desk.hand(org).in_flight().into_iter().map(|id| (org, id)));
            }
            let free: usize = ["a", "b", "c"].iter().map(|org| desk.hand(org).free()).sum();
            assert!(left - flying.len() == 0 || free == 0, "{free} free, {} wait", left - flying.len());
            assert!(["a", "b", "c"].iter().all(|org| desk.hand(org).used() == desk.hand(org).in_flight().len()));
            if let Some((org, id)) = rng.choice(&flying) {
                desk.hand(org).answer(*id, 200);
            }
        }
        desk.assert_at_rest();
    }
}

#[tokio::test(start_paused = true)]
async fn saturated_orgs_share_by_their_limits() {
    fastrand::seed(5);
    let orgs = Orgs::new([("a", 90), ("b", 9), ("c", 1)].map(|(name, cap)| Org::new(name).cap(cap))).unwrap();
    let settings = Settings::builder().start(1.0).caps(Caps::default()).build().unwrap();
    let served = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let counts = served.clone();
    let balance = limited(&orgs, settings, move |org, id| {
        *counts.lock().unwrap().entry(org.to_owned()).or_default() += 1;
        async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer(id, 200)
        }
    });
    let callers: Vec<_> = (0..200)
        .map(|caller| {
            let mut balance = balance.clone();
            tokio::spawn(async move {
                for call in 0..100 {
                    balance.ready().await.unwrap().call(Request::new(caller * 100 + call)).await.unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    let served = served.lock().unwrap();
    for (org, share) in [("a", 0.90), ("b", 0.09), ("c", 0.01)] {
        let part = served[org] as f64 / 20_000.0;
        assert!((part / share - 1.0).abs() < 0.05, "{org}: {part} of {share}");
    }
}

#[tokio::test(start_paused = true)]
async fn of_unsaturated_orgs_the_less_utilised_one_takes_the_call() {
    fastrand::seed(6);
    let orgs = Orgs::new([("a", 100), ("b", 10)].map(|(name, cap)| Org::new(name).cap(cap))).unwrap();
    let settings = Settings::builder().start(1.0).build().unwrap();
    let balance = limited(&orgs, settings, move |_, id| async move {
        tokio::time::sleep(SECOND).await;
        answer(id, 200)
    });
    sound(&balance).await;
    let mut calls = Vec::new();
    for id in 11..66 {
        let mut balance = balance.clone();
        let mut call = task::spawn(balance.ready().await.unwrap().call(Request::new(id)));
        assert_pending!(call.poll());
        calls.push(call);
    }
    let in_flight: Vec<_> = orgs.iter().map(|org| org.snapshot().in_flight).collect();
    assert_eq!(in_flight[0] + in_flight[1], 55);
    assert!((4..=6).contains(&in_flight[1]), "half of each is in use: {in_flight:?}");
}

#[tokio::test(start_paused = true)]
async fn an_org_that_fails_fast_attracts_next_to_nothing() {
    fastrand::seed(7);
    let orgs = two_orgs();
    let calls = Arc::new(Mutex::new(BTreeMap::<String, usize>::new()));
    let counts = calls.clone();
    let settings = Settings::builder().start(1.0).build().unwrap();
    let balance = limited(&orgs, settings, move |org, id| {
        *counts.lock().unwrap().entry(org.to_owned()).or_default() += 1;
        let (wait, status) = if org == "a" { (1, 500) } else { (1_000, 200) };
        async move {
            let (wait, status) = if id == SOUNDING { (1, 200) } else { (wait, status) };
            tokio::time::sleep(Duration::from_millis(wait)).await;
            answer(id, status)
        }
    });
    sound(&balance).await;
    let callers: Vec<_> = (0..20)
        .map(|_| {
            let mut balance = balance.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    balance.ready().await.unwrap().call(Request::new(0)).await.unwrap();
                }
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    let calls = calls.lock().unwrap();
    assert!(calls["a"] <= 50, "{calls:?}");
}

#[test]
fn the_stamp_says_who_served_and_the_error_who_failed() {
    let desk = Desk::new(&["a", "b"], 1);
    desk.hand("b").held(true);
    let balance = desk.balance();
    let serve = |id: u32, result: Result<Response<u32>, Broken>| {
        let mut call = call(&balance, id);
        assert_pending!(call.poll());
        desk.hand("a").end(id, result);
        let answer = assert_ready!(call.poll());
        drop(call);
        answer
    };
    let served = serve(1, Ok(answer(1, 200))).unwrap();
    let stamp = served.extensions().get::<Stamp>().unwrap();
    assert!(stamp.org.as_ref().unwrap().same_board(&desk.org("a")));
    assert_eq!((stamp.outcome.class, stamp.held_below), (Class::Ok, false));
    // A judge below has said what it means; that is kept.
    let mut judged = answer(2, 200);
    judged.extensions_mut().insert(Stamp::new(tower_quota::outcome::Outcome::of(Class::Overloaded)));
    let served = serve(2, Ok(judged)).unwrap();
    let stamp = served.extensions().get::<Stamp>().unwrap();
    assert_eq!((stamp.outcome.class, stamp.org.as_ref().unwrap().name()), (Class::Overloaded, "a"));
    let error = serve(3, Err(Broken("reset"))).unwrap_err();
    assert_eq!((error.class(), error.org().unwrap().name()), (Class::Transport, "a"));
    assert!(error.to_string().contains("org a"), "{error}");
    assert!(error.source().unwrap().is::<Broken>());
    let refused = serve(4, Ok(answer(4, 401))).unwrap();
    assert!(refused.extensions().get::<Stamp>().unwrap().held_below, "the org is out: go elsewhere at once");
}

#[test]
fn a_failure_below_is_remembered_and_a_refusal_is_not_a_failure() {
    let load_after = |status: u16| {
        let desk = Desk::new(&["a"], 1);
        let mut call = call(&desk.balance(), 1);
        assert_pending!(call.poll());
        desk.hand("a").answer(1, status);
        assert_ready!(call.poll()).unwrap();
        desk.org("a").load()
    };
    assert_eq!(load_after(200), 1.0);
    for passing in [500, 503, 529, 408] {
        assert!(load_after(passing) > 1.9, "{passing}");
    }
    for healthy in [429, 400, 404, 413] {
        assert_eq!(load_after(healthy), 1.0, "{healthy}");
    }
}

#[test]
fn a_finished_call_that_is_kept_keeps_nothing() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance_with(1);
    let mut done = call(&balance, 1);
    assert_pending!(done.poll());
    desk.hand("a").answer(1, 200);
    assert_ready!(done.poll()).unwrap();
    desk.assert_at_rest();
    assert!(Gate::at(&balance).ready());
    drop(done);
    assert_eq!(desk.hand("a").counts().dropped_calls, 0);
    let mut dropped = call(&balance, 2);
    assert_pending!(dropped.poll());
    drop(dropped);
    assert_eq!(desk.hand("a").counts().dropped_calls, 1);
    desk.assert_at_rest();
}

// What a call remembers.

#[test]
fn a_call_remembers_who_did_not_answer_it_and_no_other_call_does() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance();
    let memory = CallMemory::new();
    let tried = || memory.tried().iter().map(|t| (t.attempts, t.failures)).collect::<Vec<_>>();
    // The answer, and what is remembered from then on: a 429 and a refused request are no failures.
    for (id, status, seen) in
        [(1, 200, (0, 0)), (2, 429, (1, 0)), (3, 500, (2, 1)), (4, 400, (3, 1)), (5, 0, (4, 2)), (6, 200, (4, 2))]
    {
        let mut of_memory = call_with(&balance, memory_of(id, &memory));
        assert_pending!(of_memory.poll());
        match status {
            0 => desk.hand("a").end(id, Err(Broken("reset"))),
            status => desk.hand("a").answer(id, status),
        }
        drop(assert_ready!(of_memory.poll()));
        assert_eq!(tried(), if seen.0 == 0 { vec![] } else { vec![seen] }, "{status}");
    }
    // Readiness that fails is a failure too; a call that is dropped is none.
    desk.hand("a").fail(1);
    assert!(assert_ready!(call_with(&balance, memory_of(7, &memory)).poll()).is_err());
    assert_eq!(tried(), [(5, 3)]);
    let mut dropped = call_with(&balance, memory_of(8, &memory));
    assert_pending!(dropped.poll());
    drop(dropped);
    assert_eq!(tried(), [(5, 3)]);
    assert_eq!(memory.tried()[0].org.name(), "a");
    assert!(CallMemory::new().tried().is_empty());
    desk.assert_at_rest();
}

/// Has a call fail so often at an org.
fn fail_at(desk: &Desk, balance: &OrgBalance<Guarded>, memory: &CallMemory, org: &str, times: u32) {
    let others: Vec<_> =
        ["a", "b", "c"].into_iter().filter(|other| *other != org && desk.orgs.get(other).is_some()).collect();
    for other in &others {
        desk.hand(other).held(true);
    }
    for nth in 0..times {
        let id = 1_000_000 + nth;
        let mut failing = call_with(balance, memory_of(id, memory));
        assert_pending!(failing.poll());
        desk.hand(org).answer(id, 500);
        drop(assert_ready!(failing.poll()));
    }
    for other in &others {
        desk.hand(other).held(false);
    }
}

/// Where a call goes that is then dropped.
fn goes_to(desk: &Desk, balance: &OrgBalance<Guarded>, request: Req) -> Option<&'static str> {
    let id = *request.body();
    let mut call = call_with(balance, request);
    assert_pending!(call.poll());
    is_at(desk, id)
}

#[tokio::test(start_paused = true)]
async fn who_failed_a_call_twice_yields_to_who_has_not_and_only_for_that_call() {
    // How often A failed the call, and how often of twenty times it is asked again, A being less loaded.
    for (failures, asked_again) in [(0, true), (1, true), (2, false), (3, false)] {
        let desk = Desk::new(&["a", "b"], 100);
        let balance = desk.balance();
        let memory = CallMemory::new();
        fail_at(&desk, &balance, &memory, "a", failures);
        // What failures do to the load of all calls is gone by then.
        tokio::time::advance(600 * SECOND).await;
        desk.hand("a").held(true);
        let mut busy: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
        busy.iter_mut().for_each(|call| assert_pending!(call.poll()));
        desk.hand("a").held(false);
        for id in 10..30 {
            let to = goes_to(&desk, &balance, memory_of(id, &memory));
            assert_eq!(to, Some(if asked_again { "a" } else { "b" }), "after {failures} failures");
            assert_eq!(goes_to(&desk, &balance, Request::new(id + 100)), Some("a"), "another call knows nothing of it");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn who_failed_a_call_twice_is_asked_where_nobody_else_has_a_slot_or_is_left() {
    let desk = Desk::new(&["a", "b", "c"], 1);
    let balance = desk.balance();
    let memory = CallMemory::new();
    fail_at(&desk, &balance, &memory, "a", 2);
    desk.hand("b").slots(0);
    desk.hand("c").slots(0);
    assert_eq!(goes_to(&desk, &balance, memory_of(1, &memory)), Some("a"), "a slot that is there is better than none");
    desk.hand("c").slots(1);
    for id in 2..20 {
        assert_eq!(goes_to(&desk, &balance, memory_of(id, &memory)), Some("c"));
    }
    // Who has failed it once is no other to try, and who is out is none either.
    fail_at(&desk, &balance, &memory, "c", 1);
    desk.org("b").put_out(OutReason::OutOfQuota);
    tokio::time::advance(600 * SECOND).await;
    let went: BTreeSet<_> = (20..60).map(|id| goes_to(&desk, &balance, memory_of(id, &memory))).collect();
    assert_eq!(went, BTreeSet::from([Some("a"), Some("c")]), "there is nobody to yield to");
    desk.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn who_failed_a_call_twice_yields_in_the_line_too() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    let memory = CallMemory::new();
    fail_at(&desk, &balance, &memory, "a", 2);
    // What failures do to the load of all calls is gone by then.
    tokio::time::advance(600 * SECOND).await;
    for id in 0..20 {
        desk.hand("a").slots(0);
        desk.hand("b").slots(0);
        let mut waits = call_with(&balance, memory_of(id, &memory));
        assert_pending!(waits.poll());
        desk.hand("a").slots(1);
        desk.hand("b").slots(1);
        assert_pending!(waits.poll());
        assert_eq!(is_at(&desk, id), Some("b"), "of both it takes the one that has not failed it");
    }
    desk.assert_at_rest();
}
