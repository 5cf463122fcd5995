//! The balancer's contracts, over members under the test's hand.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support_balance;

use std::{collections::BTreeMap, task::Poll};

use http::Request;
use support_balance::{Call, Desk, call, settle};
use tokio_test::{assert_pending, assert_ready, task};
use tower::Service;

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
