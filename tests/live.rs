//! Live control: what is read of a running pool, what is retuned, and orgs that come and go while calls run.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support;
mod support_balance;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    error::Error as _,
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::Full;
use support::{Probe, Reply, Step, ask, streaming};
use support_balance::{Call, Desk, call, call_with, of_family, settle};
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimit, AimdLimitLayer, Caps, Settings},
    balance::{MemberError, Members, NoOrgLeft, OrgBalance, OrgBalanceLayer},
    drive::Drive,
    org::{Credential, Dialect, EnabledAgain, Family, HoldReason, Org, Orgs, OutReason, Standing, Tuning, Why},
    outcome::{Class, Stamp},
    sim::{Config, Latency, OrgConfig, Sim},
    stack::Stack,
};

const SECOND: Duration = Duration::from_secs(1);

fn settings() -> Settings {
    Settings::builder().spread(Duration::ZERO).build().unwrap()
}

/// A limiter around what answers call `n`, counted from 0, as told; its depth has been sounded.
async fn sounded(
    org: &Org,
    settings: &Settings,
    answers: impl Fn(usize) -> Reply + Send + Sync + 'static,
) -> AimdLimit<Probe> {
    let good = move |n| if n == 0 { Reply::Now(Ok(support::answer(200, &[]))) } else { answers(n) };
    let limit = AimdLimitLayer::with_settings(org, settings).layer(Probe::new(good));
    limit.clone().oneshot(ask()).await.unwrap();
    limit
}

/// Another service of the same limit that waits for a slot, or has one.
struct Waiter(task::Spawn<AimdLimit<Probe>>);

impl Waiter {
    fn of(limit: &AimdLimit<Probe>) -> Self {
        Waiter(task::spawn(limit.clone()))
    }

    fn ready(&mut self) -> bool {
        let ready = self.0.enter(|cx, mut limit| Service::<Request<support::Script>>::poll_ready(&mut *limit, cx));
        ready.map(Result::unwrap).is_ready()
    }
}

/// How many have a slot at once.
fn admitted(limit: &AimdLimit<Probe>) -> usize {
    let mut waiters: Vec<_> = (0..500).map(|_| Waiter::of(limit)).collect();
    waiters.iter_mut().map(Waiter::ready).take_while(|ready| *ready).count()
}

// Reading.

#[tokio::test(start_paused = true)]
async fn all_that_a_board_knows_can_be_read_of_each_family() {
    let org = Org::new("a");
    let (sonnet, haiku) = (org.family(&Family::new("sonnet")), org.family(&Family::new("haiku")));
    let tuned = Settings::builder().spread(Duration::ZERO).floor(2).hold_ceiling(60 * SECOND).build().unwrap();
    let hint = |n| Reply::Now(Ok(support::answer(if n == 2 { 429 } else { 200 }, &[("retry-after", "30")])));
    let limit = sounded(&sonnet, &tuned, hint).await;
    let _other = sounded(&haiku, &tuned, hint).await;
    org.retune(Tuning::new().weight(1.5)).unwrap();

    limit.clone().oneshot(ask()).await.unwrap();
    let before = sonnet.snapshot();
    assert_eq!((before.limit.unwrap().limit, before.limit.unwrap().epoch), (25.0, 0));
    let mut reserved = Waiter::of(&limit);
    assert!(reserved.ready());
    limit.clone().oneshot(ask()).await.unwrap();
    let mut waits = Waiter::of(&limit);
    assert!(!waits.ready());

    let now = sonnet.snapshot();
    assert_eq!((&*now.name, now.family.as_str(), now.standing, now.weight), ("a", "sonnet", Standing::Enabled, 1.5));
    assert_eq!((now.in_flight, now.waiting, now.headroom), (1, 1, 1.0));
    let cell = now.limit.unwrap();
    assert_eq!((cell.cap, cell.floor, cell.ceiling), (100, 2, 60 * SECOND));
    assert_eq!((cell.epoch, cell.throttled), (1, 1));
    let hold = now.hold.unwrap();
    assert_eq!((hold.until, hold.reason), (Instant::now() + 30 * SECOND, HoldReason::Hint));
    assert_eq!(now.history.last().unwrap().why, Why::Held);

    let other = haiku.snapshot();
    assert_eq!((other.limit.unwrap().cap, other.in_flight, other.waiting), (120, 0, 0));
    assert!(other.hold.is_none() && other.history.is_empty(), "the other family has a board of its own");
    assert_eq!(other.weight, 1.5);
}

#[tokio::test(start_paused = true)]
async fn the_whole_org_is_read_as_the_sum_of_its_families() {
    let org = Org::new("a");
    let (sonnet, haiku) = (org.family(&Family::new("sonnet")), org.family(&Family::new("haiku")));
    let tuned = Settings::builder().spread(Duration::ZERO).floor(2).build().unwrap();
    let hint = |wait: &'static str| {
        move |n| Reply::Now(Ok(support::answer(if n == 3 { 429 } else { 200 }, &[("retry-after", wait)])))
    };
    assert!(org.snapshot().limit.is_none(), "no limiter yet");
    let first = sounded(&sonnet, &tuned, hint("30")).await;
    let second = sounded(&haiku, &tuned, hint("10")).await;
    let revision = org.revision();
    let sum = sonnet.snapshot().limit.unwrap().limit + haiku.snapshot().limit.unwrap().limit;

    let mut reserved = [Waiter::of(&first), Waiter::of(&second), Waiter::of(&second)];
    assert!(reserved.iter_mut().all(Waiter::ready));
    let now = org.snapshot();
    assert!(now.whole && !sonnet.snapshot().whole);
    assert_eq!((&*now.name, now.family.as_str(), now.in_flight, now.waiting), ("a", "any", 3, 0));
    let cell = now.limit.unwrap();
    assert_eq!((cell.limit, cell.cap, cell.floor, cell.pace), (sum, 220, 4, None));
    assert_eq!([&sonnet, &haiku].map(|org| org.snapshot().in_flight), [1, 2]);

    // One family held is not the org held.
    drop(reserved);
    let refused = |limit: &AimdLimit<Probe>| {
        let limit = limit.clone();
        async move {
            for _ in 0..3 {
                limit.clone().oneshot(ask()).await.unwrap();
            }
        }
    };
    refused(&first).await;
    assert!(sonnet.is_held() && !haiku.is_held() && !org.is_held());
    assert!(org.snapshot().hold.is_none() && org.revision() > revision);
    assert_eq!(org.snapshot().limit.unwrap().throttled, 1);
    tokio::time::advance(SECOND).await;
    refused(&second).await;
    assert!(org.is_held());
    assert_eq!(org.not_before(), haiku.not_before(), "whichever ends first");
    assert_eq!(org.snapshot().hold.unwrap().until, Instant::now() + 10 * SECOND);
    let mut waits = [Waiter::of(&first), Waiter::of(&second)];
    assert!(!waits.iter_mut().any(Waiter::ready));
    assert_eq!(org.snapshot().waiting, 2);
    haiku.retune_family(Tuning::new().cap(10)).unwrap();
    tokio::time::advance(SECOND).await;
    sonnet.retune_family(Tuning::new().cap(8)).unwrap();
    let history = org.snapshot().history;
    assert!(history.is_sorted_by_key(|change| change.at));
    let retuned = history.iter().filter(|change| change.why == Why::Retuned).map(|change| (change.at, change.to));
    assert_eq!(
        retuned.collect::<Vec<_>>(),
        [(Instant::now() - SECOND, 10.0), (Instant::now(), 8.0)],
        "of either, oldest first"
    );

    // Nor is one family out the org out; but who is out does not count among those that are held.
    haiku.put_family_out(OutReason::OutOfQuota);
    assert!(haiku.is_out() && !org.is_out() && org.snapshot().out.is_none());
    assert_eq!(org.not_before(), sonnet.not_before());
    sonnet.put_family_out(OutReason::OutOfQuota);
    assert!(!org.is_out(), "requests that name no family may still pass");
    org.put_family_out(OutReason::OutOfQuota);
    assert_eq!((org.is_out(), org.snapshot().out), (true, Some(OutReason::OutOfQuota)));
    assert!(org.bring_back() && !org.is_out());
    org.put_family_out(OutReason::OutOfQuota);
    assert!(!org.is_out(), "only those that name none");
}

#[test]
fn members_say_who_they_are_and_how_many_calls_wait_for_which_family() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    let members = balance.members();
    assert!(members.waiting().is_empty(), "no family was asked for");
    let mut calls: Vec<_> = (0..5).map(|id| call_with(&balance, of_family(id, "sonnet"))).collect();
    calls.push(call_with(&balance, of_family(9, "haiku")));
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    let waiting = BTreeMap::from([(Family::new("sonnet"), 3), (Family::new("haiku"), 0)]);
    assert_eq!(members.waiting(), waiting);
    assert_eq!(members.orgs().iter().map(Org::name).collect::<Vec<_>>(), ["a", "b"]);
    assert!(members.get("b").unwrap().same_board(&desk.org("b")) && members.get("c").is_none());
    let read: Vec<_> =
        members.snapshots().iter().map(|all| (all.name.to_string(), all.family.to_string(), all.in_flight)).collect();
    let flying = |org: &str, family: &str| desk.hand_of(org, family).in_flight().len();
    let expected = ["a", "b"].map(|org| ["haiku", "sonnet"].map(|of| (org.to_owned(), of.to_owned(), flying(org, of))));
    assert_eq!(read, expected.concat(), "without a limiter too, calls in flight are counted");
    assert_eq!(format!("{members:?}"), r#"[("a", Enabled), ("b", Enabled)]"#);
}

#[test]
fn without_a_limiter_the_number_of_calls_is_the_load() {
    let desk = Desk::new(&["a", "b"], 100);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..40).map(|id| call(&balance, id)).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    assert_eq!((desk.hand("a").used(), desk.hand("b").used()), (20, 20), "of two, the less loaded one takes each");
}

// Retuning.

#[tokio::test(start_paused = true)]
async fn what_is_out_of_range_is_named_and_nothing_is_changed() {
    let org = Org::new("a");
    let _limit = sounded(&org, &settings(), |_| Reply::Released).await;
    org.retune(Tuning::new().cap(8)).unwrap();
    let before = (org.snapshot().limit, org.snapshot().weight, org.revision());
    let good = Tuning::new().cap(4).floor(2).ceiling(SECOND).weight(2.0);
    for (tuning, field) in [
        (good.cap(0), "cap"),
        (good.floor(0), "floor"),
        (good.floor(5), "floor"),
        (Tuning::new().weight(2.0).floor(9), "floor"),
        (good.ceiling(Duration::ZERO), "ceiling"),
        (good.weight(0.0), "weight"),
        (good.weight(-1.0), "weight"),
        (good.weight(f64::NAN), "weight"),
        (good.weight(f64::INFINITY), "weight"),
    ] {
        assert_eq!(org.retune(tuning).unwrap_err().field(), field, "{tuning:?}");
        assert_eq!(org.retune_family(tuning).unwrap_err().field(), field, "{tuning:?}");
        assert_eq!((org.snapshot().limit, org.snapshot().weight, org.revision()), before, "{tuning:?}");
    }
    org.retune(good).unwrap();
    let now = org.snapshot();
    assert_eq!(now.limit.map(|cell| (cell.cap, cell.floor, cell.ceiling)), Some((4, 2, SECOND)));
    assert_eq!(now.weight, 2.0);
}

#[tokio::test(start_paused = true)]
async fn a_raised_cap_gives_slots_at_once_to_those_who_wait() {
    let org = Org::new("a").cap(4);
    let limit = sounded(&org, &settings(), |_| Reply::Released).await;
    let mut waiters: Vec<_> = (0..4).map(|_| Waiter::of(&limit)).collect();
    assert!(waiters[0].ready(), "a quarter of 4");
    assert!(!waiters[1].ready() && !waiters[2].ready() && !waiters[3].ready());
    org.retune(Tuning::new().cap(8)).unwrap();
    assert!(waiters[1].0.is_woken(), "a quarter of 8 is 2");
    assert!(waiters[1].ready() && !waiters[2].ready());
    org.retune(Tuning::new().floor(4)).unwrap();
    assert!(waiters[2].0.is_woken() && waiters[3].0.is_woken());
    assert!(waiters[2].ready() && waiters[3].ready());
    let history: Vec<_> = org.snapshot().history.iter().map(|change| (change.from, change.to, change.why)).collect();
    assert_eq!(history, [(1.0, 2.0, Why::Retuned), (2.0, 4.0, Why::Retuned)]);
}

#[tokio::test(start_paused = true)]
async fn a_raised_cap_frees_a_limit_that_only_the_cap_had_stopped() {
    let org = Org::new("a").cap(4);
    let start_full = Settings::builder().start(1.0).spread(Duration::ZERO).build().unwrap();
    let limit = sounded(&org, &start_full, |_| Reply::Released).await;
    assert_eq!(admitted(&limit), 4);
    org.retune(Tuning::new().cap(40)).unwrap();
    assert_eq!(admitted(&limit), 40);
}

#[tokio::test(start_paused = true)]
async fn a_raised_cap_leaves_a_limit_that_refusals_have_found() {
    let org = Org::new("a").cap(40);
    let limit =
        sounded(&org, &settings(), |n| Reply::After(SECOND, support::answer(if n == 10 { 429 } else { 200 }, &[])))
            .await;
    let calls: Vec<_> = (0..10).map(|_| tokio::spawn(limit.clone().oneshot(ask()))).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let found = org.snapshot().limit.unwrap().limit;
    assert!(found < 10.0, "{found}");
    org.retune(Tuning::new().cap(400)).unwrap();
    let now = org.snapshot().limit.unwrap();
    assert_eq!((now.limit, now.cap), (found, 400));
}

#[tokio::test(start_paused = true)]
async fn a_lowered_cap_drops_no_call_and_admits_none_until_enough_have_ended() {
    let org = Org::new("a").cap(8);
    let start_full = Settings::builder().start(1.0).build().unwrap();
    let mut limit = sounded(&org, &start_full, |_| Reply::Released).await;
    let mut calls = Vec::new();
    for _ in 0..6 {
        calls.push(task::spawn(ServiceExt::<Request<support::Script>>::ready(&mut limit).await.unwrap().call(ask())));
    }
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    org.retune(Tuning::new().cap(2)).unwrap();
    assert_eq!(org.snapshot().limit.unwrap().limit, 2.0);
    assert_eq!((org.snapshot().in_flight, limit.get_ref().open()), (6, 6), "those in flight fly on");
    let mut waiter = Waiter::of(&limit);
    assert!(!waiter.ready());
    for n in 1..=4 {
        limit.get_ref().release(n, Ok(support::answer(200, &[])));
        assert!(assert_ready!(calls[n - 1].poll()).is_ok());
        assert!(!waiter.ready(), "{} are in flight", 6 - n);
    }
    limit.get_ref().release(5, Ok(support::answer(200, &[])));
    assert_ready_ok!(calls[4].poll());
    assert!(waiter.0.is_woken() && waiter.ready(), "one of two");
}

#[tokio::test(start_paused = true)]
async fn a_cap_below_the_floor_wins_and_the_floor_is_back_with_the_cap() {
    let org = Org::new("a").cap(20);
    let high = Settings::builder().floor(6).build().unwrap();
    let limit = sounded(&org, &high, |_| Reply::Released).await;
    assert_eq!(admitted(&limit), 6);
    org.retune(Tuning::new().cap(2)).unwrap();
    let cell = org.snapshot().limit.unwrap();
    assert_eq!((cell.cap, cell.floor, cell.limit), (2, 2, 2.0));
    assert_eq!(admitted(&limit), 2);
    org.retune(Tuning::new().cap(10)).unwrap();
    assert_eq!((org.snapshot().limit.unwrap().floor, admitted(&limit)), (6, 6));
}

#[tokio::test(start_paused = true)]
async fn a_tuning_reaches_limits_and_families_that_come_later() {
    let org = Org::new("a");
    org.retune(Tuning::new().cap(3).weight(4.0)).unwrap();
    for family in ["any", "sonnet", "new"] {
        let handle = org.family(&Family::new(family));
        let caps = Caps::default().family("sonnet", 50).unwrap();
        assert_eq!(caps.of(&handle), 3, "it wins over what was set for the family");
        let set = Settings::builder().caps(caps).start(1.0).build().unwrap();
        let limit = sounded(&handle, &set, |_| Reply::Released).await;
        assert_eq!((admitted(&limit), handle.snapshot().weight), (3, 4.0), "{family}");
    }
    let built = org.cap(70);
    assert_eq!((Caps::default().of(&built), built.snapshot().weight), (3, 4.0), "a building step keeps what was tuned");
}

#[tokio::test(start_paused = true)]
async fn one_family_is_retuned_alone_and_the_last_word_counts() {
    let org = Org::new("a");
    let families = ["sonnet", "haiku"].map(|family| org.family(&Family::new(family)));
    let full = Settings::builder().start(1.0).build().unwrap();
    let sonnet = sounded(&families[0], &full, |_| Reply::Released).await;
    let haiku = sounded(&families[1], &full, |_| Reply::Released).await;
    families[0].retune_family(Tuning::new().cap(5)).unwrap();
    assert_eq!((admitted(&sonnet), admitted(&haiku)), (5, 120));
    org.retune(Tuning::new().cap(7)).unwrap();
    assert_eq!((admitted(&sonnet), admitted(&haiku)), (7, 7));
    families[1].retune_family(Tuning::new().cap(9)).unwrap();
    assert_eq!((admitted(&sonnet), admitted(&haiku)), (7, 9));
}

#[tokio::test(start_paused = true)]
async fn a_lowered_ceiling_ends_an_open_hold_earlier_and_parks_what_is_longer() {
    let org = Org::new("a");
    let limit = sounded(&org, &settings(), |_| Reply::Now(Ok(support::answer(429, &[("retry-after", "200")])))).await;
    limit.clone().oneshot(ask()).await.unwrap();
    let begin = Instant::now();
    assert_eq!(org.snapshot().hold.unwrap().until, begin + 200 * SECOND);
    let mut waiter = Waiter::of(&limit);
    assert!(!waiter.ready());
    org.retune(Tuning::new().ceiling(20 * SECOND)).unwrap();
    let hold = org.snapshot().hold.unwrap();
    assert_eq!((hold.until, hold.reason), (begin + 20 * SECOND, HoldReason::Parked));
    tokio::time::advance(19_900 * SECOND / 1_000).await;
    assert!(!waiter.0.is_woken());
    tokio::time::advance(SECOND / 5).await;
    assert!(waiter.0.is_woken() && waiter.ready(), "one call probes");
    assert!(!Waiter::of(&limit).ready());
    drop(waiter);
    limit.clone().oneshot(ask()).await.unwrap();
    assert_eq!(org.snapshot().hold.unwrap().until, Instant::now() + 20 * SECOND, "parked for as long again");
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_is_gone_is_retuned_no_more() {
    let org = Org::new("a");
    drop(sounded(&org, &settings(), |_| Reply::Released).await);
    org.retune(Tuning::new().cap(3)).unwrap();
    assert_eq!(org.snapshot().limit.unwrap().cap, 40, "the board says what was last");
    let full = Settings::builder().start(1.0).build().unwrap();
    assert_eq!(admitted(&sounded(&org, &full, |_| Reply::Released).await), 3);
}

/// How many of so many calls each of two orgs has, both with a hundred slots.
fn shares(balance: &OrgBalance<support_balance::Guarded>, desk: &Desk, calls: u32) -> [usize; 2] {
    let mut calls: Vec<_> = (0..calls).map(|id| call(balance, id)).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    ["a", "b"].map(|org| desk.hand(org).used())
}

#[test]
fn free_slots_are_used_by_weight_and_all_of_them_whatever_the_weight() {
    let desk = Desk::new(&["a", "b"], 100);
    let balance = desk.balance();
    assert_eq!(shares(&balance, &desk, 120), [60, 60]);
    desk.org("b").retune(Tuning::new().weight(3.0)).unwrap();
    assert_eq!(shares(&balance, &desk, 120), [30, 90], "at once");
    assert_eq!(shares(&balance, &desk, 200), [100, 100]);
    desk.org("a").retune(Tuning::new().weight(3.0)).unwrap();
    assert_eq!(shares(&balance, &desk, 120), [60, 60]);
}

// Members: disabled and enabled.

fn stamped(answer: &Response<u32>) -> &str {
    answer.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name()
}

#[test]
fn a_disabled_org_gets_no_new_call_and_ends_those_it_has() {
    let desk = Desk::new(&["a", "b"], 10);
    let balance = desk.balance();
    let members = balance.members();
    desk.hand("b").slots(0);
    let mut served = call(&balance, 1);
    assert_pending!(served.poll());
    desk.hand("b").slots(10);
    members.disable("a").unwrap();
    members.disable("a").unwrap();
    assert_eq!(desk.org("a").standing(), Standing::Draining);
    assert!(desk.org("a").is_held());
    let mut others: Vec<_> = (2..8).map(|id| call(&balance, id)).collect();
    others.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    assert_eq!((desk.hand("a").in_flight(), desk.hand("b").used()), (vec![1], 6));
    desk.hand("a").answer(1, 200);
    assert_eq!(stamped(&assert_ready_ok!(served.poll())), "a");
    assert_eq!(desk.org("a").standing(), Standing::Disabled);
    members.enable("a").unwrap();
    assert_eq!(desk.org("a").standing(), Standing::Enabled);
    let mut again = call(&balance, 9);
    assert_pending!(again.poll());
    assert!(desk.hand("a").has(9), "the less loaded one");
}

#[test]
fn who_waits_goes_to_a_sibling_and_the_disabled_org_keeps_nothing_for_anybody() {
    let desk = Desk::new(&["a", "b"], 1);
    desk.hand("a").greedy();
    let balance = desk.balance();
    let members = balance.members();
    let mut calls: BTreeMap<u32, Call> = (0..5).map(|id| (id, call(&balance, id))).collect();
    for id in 0..5 {
        assert_pending!(calls.get_mut(&id).unwrap().poll());
    }
    assert_eq!((desk.hand("a").registered(), desk.hand("a").tokens()), (1, 1), "three wait for it, too");
    let [of_a, of_b] = ["a", "b"].map(|org| desk.hand(org).in_flight()[0]);
    members.disable("a").unwrap();
    assert_eq!((desk.hand("a").registered(), desk.hand("a").tokens()), (0, 0));
    desk.hand("a").answer(of_a, 200);
    assert_eq!(settle(&mut calls).len(), 1);
    assert_eq!(desk.hand("a").used(), 0, "its slot is free, and stays so");
    desk.hand("b").answer(of_b, 200);
    assert_eq!(settle(&mut calls).len(), 1);
    assert!(desk.hand("b").has(2), "the oldest of those who wait");
}

#[test]
fn a_slot_that_was_reserved_for_whoever_is_next_is_given_back_when_its_org_is_disabled() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    // One more than is polled: the member readies itself for the next in line.
    desk.hand("a").slots(3);
    assert!(calls[1].is_woken());
    assert_pending!(calls[1].poll());
    assert_eq!((desk.hand("a").in_flight().len(), desk.hand("a").used()), (2, 3));
    balance.members().disable("a").unwrap();
    assert_eq!(desk.hand("a").used(), 2);
    assert_pending!(calls[2].poll());
    assert_eq!(desk.hand("a").used(), 2);
}

#[test]
fn an_enabled_org_wakes_those_who_wait() {
    let desk = Desk::new(&["a"], 2);
    let balance = desk.balance();
    let members = balance.members();
    members.disable("a").unwrap();
    let mut calls: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
        assert!(!call.is_woken(), "a pool that is disabled waits");
    }
    assert_eq!(desk.hand("a").counts().polls, 0);
    members.enable("a").unwrap();
    assert!(calls[0].is_woken());
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    assert_eq!(desk.hand("a").in_flight(), [0, 1]);
}

#[test]
fn an_org_is_disabled_for_families_that_come_later() {
    let desk = Desk::new(&["a", "b"], 5);
    let balance = desk.balance();
    balance.members().disable("a").unwrap();
    let mut calls: Vec<_> = (0..8).map(|id| call_with(&balance, of_family(id, "new"))).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    assert_eq!((desk.hand_of("a", "new").used(), desk.hand_of("b", "new").used()), (0, 5));
    balance.members().enable("a").unwrap();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    assert_eq!(desk.hand_of("a", "new").used(), 3);
}

#[test]
fn enabling_brings_back_an_org_that_was_out() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    let members = balance.members();
    let mut refused = call(&balance, 1);
    desk.hand("b").slots(0);
    assert_pending!(refused.poll());
    desk.hand("a").answer(1, 401);
    assert_ready_ok!(refused.poll());
    desk.org("b").family(&Family::default()).put_family_out(OutReason::OutOfQuota);
    assert!(assert_ready_err!(call(&balance, 2).poll()).class() == Class::NoOrg);
    members.disable("b").unwrap();
    assert!(assert_ready_err!(call(&balance, 3).poll()).class() == Class::NoOrg, "out is out, disabled or not");
    members.enable("a").unwrap();
    assert!(!desk.org("a").is_out() && desk.org("a").out_reason().is_none());
    let mut served = call(&balance, 4);
    assert_pending!(served.poll());
    assert!(desk.hand("a").has(4));
    assert!(!members.get("a").unwrap().bring_back(), "it was not out");
    assert!(desk.org("b").bring_back() && !desk.org("b").is_out());
}

#[test]
fn a_pool_of_orgs_disabled_or_out_waits_while_one_can_be_enabled() {
    let desk = Desk::new(&["a", "b"], 0);
    let balance = desk.balance();
    let members = balance.members();
    members.disable("a").unwrap();
    let mut waits = call(&balance, 1);
    assert_pending!(waits.poll());
    desk.org("b").put_out(OutReason::Unauthorised);
    assert_pending!(waits.poll());
    assert_pending!(call(&balance, 2).poll());
    members.remove("a").unwrap();
    assert!(waits.is_woken(), "now none is left that could come back");
    let error = assert_ready_err!(waits.poll());
    let none = error.source().unwrap().downcast_ref::<NoOrgLeft>().unwrap();
    assert_eq!(none.reasons().map(|(name, _)| name).collect::<Vec<_>>(), ["b"]);
}

// Drained.

#[test]
fn a_drain_is_over_when_the_last_call_has_ended_however_it_ends() {
    let desk = Desk::new(&["a"], 9);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..3).map(|id| call_with(&balance, of_family(id, ["x", "y", "z"][id as usize]))).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    let mut drains: Vec<_> = (0..2).map(|_| task::spawn(balance.members().drain("a").unwrap())).collect();
    drains.iter_mut().for_each(|drain| assert!(drain.poll().is_pending()));
    assert_eq!((drains[0].org().name(), desk.org("a").standing()), ("a", Standing::Draining));
    desk.hand_of("a", "x").answer(0, 500);
    assert!(calls[0].poll().is_ready());
    desk.hand_of("a", "y").end(1, Err(support_balance::Broken("reset")));
    assert!(calls[1].poll().is_ready());
    for drain in &mut drains {
        assert_pending!(drain.poll());
        assert!(!drain.is_woken());
    }
    drop(calls.pop());
    for drain in &mut drains {
        assert!(drain.is_woken());
        assert_eq!(assert_ready!(drain.poll()), Ok(()));
    }
    assert_eq!(desk.org("a").standing(), Standing::Disabled);
    assert_eq!(assert_ready!(task::spawn(balance.members().drain("a").unwrap()).poll()), Ok(()), "nothing to drain");
}

#[test]
fn a_drain_that_is_dropped_leaves_the_org_disabled_and_nothing_else() {
    let desk = Desk::new(&["a"], 9);
    let balance = desk.balance();
    let mut calls: Vec<_> = (0..2).map(|id| call(&balance, id)).collect();
    assert_pending!(calls[0].poll());
    let mut waker = task::spawn(());
    let mut other = task::spawn(balance.members().drain("a").unwrap());
    let mut dropped = Box::pin(balance.members().drain("a").unwrap());
    waker.enter(|cx, _| assert!(dropped.as_mut().poll(cx).is_pending()));
    assert_pending!(other.poll());
    drop(dropped);
    assert_pending!(calls[1].poll());
    desk.hand("a").answer(0, 200);
    assert_ready_ok!(calls[0].poll());
    assert!(!waker.is_woken(), "whoever has gone is not told");
    assert_eq!(assert_ready!(other.poll()), Ok(()), "and whoever has not is");
    assert_pending!(calls[1].poll());
    assert_eq!(desk.hand("a").used(), 0);
}

#[test]
fn enabling_ends_a_drain_with_an_error_and_removing_does_not() {
    let desk = Desk::new(&["a", "b"], 9);
    let balance = desk.balance();
    let members = balance.members();
    let mut calls: Vec<_> = (0..2).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    let [mut a, mut b] = ["a", "b"].map(|org| task::spawn(members.drain(org).unwrap()));
    assert!(a.poll().is_pending() && b.poll().is_pending());
    members.enable("a").unwrap();
    assert!(a.is_woken());
    assert_eq!(assert_ready!(a.poll()), Err(EnabledAgain));
    members.remove("b").unwrap();
    assert_pending!(b.poll());
    let id = desk.hand("b").in_flight()[0];
    desk.hand("b").answer(id, 200);
    assert_ready_ok!(calls[id as usize].poll());
    assert!(b.is_woken());
    assert_eq!(assert_ready!(b.poll()), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_keeps_its_slot_keeps_its_org_from_being_drained() {
    let orgs = Orgs::new([Org::new("a")]).unwrap();
    let probe = Probe::new(|_| Reply::Now(Ok(streaming([Step::Data("x"), Step::Hang]))));
    let layer = OrgBalanceLayer::new(orgs, |org: &Org, probe| AimdLimitLayer::new(org).layer(probe));
    let balance = layer.layer(probe);
    let answer = balance.clone().oneshot(ask()).await.unwrap();
    let mut drain = task::spawn(balance.members().drain("a").unwrap());
    assert_pending!(drain.poll());
    drop(answer);
    assert!(drain.is_woken());
    assert_eq!(assert_ready!(drain.poll()), Ok(()));
}

// Removed.

#[test]
fn a_removed_org_ends_its_calls_and_keeps_neither_an_instance_nor_a_waker() {
    let desk = Desk::new(&["a", "b"], 2);
    let balance = desk.balance();
    // Keeps the fleet as it was.
    let idle = balance.clone();
    let mut calls: BTreeMap<u32, Call> = (0..6).map(|id| (id, call(&balance, id))).collect();
    (0..6).for_each(|id| assert!(calls.get_mut(&id).unwrap().poll().is_pending()));
    let idle_too = balance.clone();
    let org = balance.members().remove("a").unwrap();
    assert!(org.same_board(&desk.org("a")));
    assert_eq!((org.standing(), org.snapshot().in_flight), (Standing::Removed, 2));
    let hand = desk.hand("a");
    assert_eq!((hand.counts().instances, hand.registered(), hand.in_flight().len()), (0, 0, 2));
    for id in hand.in_flight() {
        hand.answer(id, 200);
        assert_eq!(stamped(&assert_ready_ok!(calls.remove(&id).unwrap().poll())), "a");
    }
    assert!(settle(&mut calls).is_empty() && hand.used() == 0, "its free slots are nobody's");
    assert_eq!(org.snapshot().in_flight, 0);
    for old in [idle, idle_too] {
        let mut late = call(&old, 9);
        assert_pending!(late.poll());
        assert_eq!(hand.counts().calls, 2);
    }
    drop(calls);
    assert_eq!(balance.members().orgs().len(), 1);
    desk.assert_at_rest();
}

#[test]
fn when_the_last_org_is_removed_all_who_wait_are_told_and_every_call_fails_at_once() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    let members = balance.members();
    let mut calls: Vec<_> = (0..9).map(|id| call(&balance, id)).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    members.remove("a").unwrap();
    members.remove("b").unwrap();
    assert!(calls[2..].iter().all(|waits| waits.is_woken()), "not two of them: nothing will happen any more");
    for waits in &mut calls[2..] {
        let error = assert_ready_err!(waits.poll());
        assert_eq!(error.class(), Class::NoOrg);
        assert_eq!(
            error.source().unwrap().downcast_ref::<NoOrgLeft>().unwrap().to_string(),
            "no org is left to ask: all were removed"
        );
    }
    for org in ["a", "b"] {
        let id = desk.hand(org).in_flight()[0];
        desk.hand(org).answer(id, 200);
        assert_ready_ok!(calls[id as usize].poll());
    }
    for family in ["any", "new"] {
        assert_eq!(assert_ready_err!(call_with(&balance, of_family(99, family)).poll()).class(), Class::NoOrg);
    }
    members.add(Org::new("c")).unwrap();
    let mut served = call(&balance, 100);
    assert_pending!(served.poll());
    assert!(desk.hand("c").has(100));
}

#[test]
fn a_call_outlives_its_balancer_and_hears_of_the_last_change() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits = call(&balance, 1);
    assert_pending!(waits.poll());
    balance.members().add(Org::new("b")).unwrap();
    balance.members().remove("a").unwrap();
    drop(balance);
    assert_pending!(waits.poll());
    desk.hand("b").slots(1);
    assert!(waits.is_woken());
    assert_pending!(waits.poll());
    desk.hand("b").answer(1, 200);
    assert_eq!(stamped(&assert_ready_ok!(waits.poll())), "b");
    drop(waits);
    assert!(desk.hands().iter().all(|hand| hand.counts().instances == 0));
}

// Added.

#[test]
fn an_added_org_joins_every_family_and_wakes_those_who_wait() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let members = balance.members();
    let mut calls: Vec<_> = (0..6).map(|id| call_with(&balance, of_family(id, ["x", "y"][id as usize % 2]))).collect();
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    for family in ["x", "y", "z"] {
        desk.hand_of("b", family).slots(2);
    }
    members.add(Org::new("b")).unwrap();
    assert!(calls[0].is_woken() && calls[1].is_woken(), "one of each family");
    calls.iter_mut().for_each(|call| assert!(call.poll().is_pending()));
    assert_eq!((desk.hand_of("b", "x").in_flight(), desk.hand_of("b", "y").in_flight()), (vec![0, 2], vec![1, 3]));
    let mut later = call_with(&balance, of_family(9, "z"));
    assert_pending!(later.poll());
    assert!(desk.hand_of("b", "z").has(9));
    assert_eq!(members.orgs().iter().map(Org::name).collect::<Vec<_>>(), ["a", "b"]);
    drop((calls, later));
    desk.assert_at_rest();
}

#[test]
fn an_org_that_joins_while_a_call_is_in_line_is_stood_down_by_the_last_one_out() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut first = call(&balance, 1);
    assert_pending!(first.poll());
    desk.hand("b").slots(0).greedy();
    balance.members().add(Org::new("b")).unwrap();
    let mut second = call(&balance, 2);
    assert_pending!(second.poll());
    assert!(second.is_woken(), "whoever comes and has to wait passes the call on");
    assert_pending!(second.poll());
    assert_eq!(desk.hand("b").registered(), 1);
    drop(second);
    // It has never looked at the fleet as it is now.
    drop(first);
    desk.assert_at_rest();
}

#[test]
fn whoever_cannot_join_is_told_why_and_nothing_is_changed() {
    let desk = Desk::new(&["a"], 1);
    let balance = desk.balance();
    let members = balance.members();
    let mut flying = call(&balance, 1);
    assert_pending!(flying.poll());
    let names = || members.orgs().iter().map(|org| org.name().to_owned()).collect::<Vec<_>>();
    assert_eq!(members.add(Org::new("a")).unwrap_err(), MemberError::Twice { name: "a".into() });
    for (org, field) in
        [(Org::new("b").dialect(Dialect::OpenAi), "org \"b\""), (Org::new("b").cap(0), "org \"b\": cap")]
    {
        match members.add(org).unwrap_err() {
            MemberError::Refused(error) => assert_eq!(error.field(), field),
            other => panic!("{other}"),
        }
    }
    let unknown = MemberError::Unknown { name: "z".into(), known: vec!["a".into()] };
    assert_eq!(unknown.to_string(), "no org \"z\"; there are: a");
    assert_eq!(members.remove("z").unwrap_err(), unknown);
    assert_eq!(members.disable("z").unwrap_err(), unknown);
    assert_eq!(members.enable("z").unwrap_err(), unknown);
    assert_eq!(members.drain("z").unwrap_err(), unknown);
    assert_eq!(names(), ["a"]);

    let old = members.remove("a").unwrap();
    assert_eq!(
        members.add(old.clone()).unwrap_err(),
        MemberError::Busy { name: "a".into() },
        "its board counts a call"
    );
    assert!(names().is_empty() && old.standing() == Standing::Removed);
    desk.hand("a").answer(1, 200);
    assert_ready_ok!(flying.poll());
    members.add(old.clone()).unwrap();
    assert_eq!((names(), old.standing()), (vec!["a".to_owned()], Standing::Enabled));
    members.remove("a").unwrap();
    members.add(Org::new("a")).unwrap();
    assert_eq!(old.standing(), Standing::Removed, "another org of that name has joined");
}

#[tokio::test(start_paused = true)]
async fn the_stack_refuses_an_org_whose_key_no_header_may_carry() {
    let wire =
        service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("{}")))));
    let pool = Orgs::new([Org::new("a").credential(Credential::new("sk-1"))]).unwrap();
    let stack = Stack::new(pool).build(wire).unwrap();
    stack.clone().oneshot(Request::post("/v1/messages").body(Full::default()).unwrap()).await.unwrap();
    let members = stack.members();
    match members.add(Org::new("b").credential(Credential::new("sk\n1"))).unwrap_err() {
        MemberError::Refused(error) => assert_eq!(error.field(), "org \"b\": key"),
        other => panic!("{other}"),
    }
    assert_eq!(members.orgs().len(), 1);
    members.add(Org::new("b").credential(Credential::new("sk-2"))).unwrap();
    members.disable("a").unwrap();
    let answer = stack.oneshot(Request::post("/v1/messages").body(Full::default()).unwrap()).await.unwrap();
    assert_eq!(answer.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name(), "b");
}

// From within, and at length.

type Act = fn(&Members);

/// Does something in its `poll_ready` or its `call`, the first time.
#[derive(Clone)]
struct Meddler {
    members: Arc<Mutex<Option<Members>>>,
    act: Act,
    in_poll: bool,
    /// Is never ready.
    busy: bool,
}

impl Meddler {
    fn meddle(&self) {
        let members = self.members.lock().unwrap().take();
        if let Some(members) = members {
            (self.act)(&members);
        }
    }
}

impl Service<Request<u32>> for Meddler {
    type Response = Response<u32>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<u32>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.in_poll {
            self.meddle();
        }
        if self.busy { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn call(&mut self, request: Request<u32>) -> Self::Future {
        self.meddle();
        std::future::ready(Ok(Response::new(request.into_body())))
    }
}

#[test]
fn a_members_own_poll_or_call_may_change_the_pool() {
    let acts: [(Act, Standing); 3] = [
        (|members| members.disable("a").unwrap(), Standing::Disabled),
        (|members| drop(members.drain("a").unwrap()), Standing::Disabled),
        (|members| drop(members.remove("a").unwrap()), Standing::Removed),
    ];
    for (act, standing) in acts {
        for in_poll in [true, false] {
            let (send, done) = std::sync::mpsc::channel();
            // A thread of its own: what fails here hangs.
            std::thread::spawn(move || {
                let a = Org::new("a");
                let hand = Arc::new(Mutex::new(None));
                let meddler = Meddler { members: hand.clone(), act, in_poll, busy: false };
                let layer = OrgBalanceLayer::new(Orgs::new([a.clone()]).unwrap(), move |org: &Org, ()| {
                    AimdLimitLayer::new(org).release_at_head().layer(meddler.clone())
                });
                let mut balance = layer.layer(());
                balance.members().add(Org::new("b")).unwrap();
                balance.members().disable("b").unwrap();
                *hand.lock().unwrap() = Some(balance.members());
                let mut call = task::spawn(balance.call(Request::new(1)));
                // Knows the fleet as it was.
                let _idle = balance.clone();
                // In its poll it is closed before it has taken the call, in its call after that.
                assert_eq!(call.poll().is_ready(), !in_poll);
                assert_eq!(a.standing(), standing);
                assert_eq!(a.snapshot().in_flight, 0, "no slot is kept for a call that did not come");
                assert_pending!(task::spawn(balance.call(Request::new(2))).poll());
                // Ours, that of whoever makes members, b's, and a's unless it was removed.
                let instances = if standing == Standing::Removed { 3 } else { 4 };
                assert_eq!(Arc::strong_count(&hand), instances);
                send.send(()).unwrap();
            });
            done.recv_timeout(Duration::from_secs(20)).expect("it hangs, or has failed above");
        }
    }
}

#[test]
fn an_org_that_joins_between_a_calls_look_and_its_place_in_line_is_seen() {
    let hand = Arc::new(Mutex::new(None));
    let meddler = Meddler {
        members: hand.clone(),
        act: |members| members.add(Org::new("b")).unwrap(),
        in_poll: true,
        busy: false,
    };
    let layer = OrgBalanceLayer::new(Orgs::new([Org::new("a")]).unwrap(), move |org: &Org, ()| Meddler {
        busy: org.name() == "a",
        ..meddler.clone()
    });
    let mut balance = layer.layer(());
    *hand.lock().unwrap() = Some(balance.members());
    let mut call = task::spawn(balance.call(Request::new(1)));
    assert_eq!(stamped(&assert_ready_ok!(call.poll())), "b");
}

#[test]
fn a_thousand_changes_leave_one_instance_a_member() {
    let desk = Desk::new(&["a"], 0);
    let balance = desk.balance();
    let mut waits = call(&balance, 0);
    assert_pending!(waits.poll());
    let mut idle = vec![];
    for _ in 0..1_000 {
        idle.push(balance.clone());
        balance.members().add(Org::new("b")).unwrap();
        let mut other = call(&balance, 1);
        assert_pending!(other.poll());
        balance.members().remove("b").unwrap();
    }
    assert_eq!((desk.hand("a").counts().instances, desk.hand("b").counts().instances), (1, 0));
    desk.hand("a").slots(1);
    assert!(waits.is_woken());
    assert_pending!(waits.poll());
    assert!(desk.hand("a").has(0));
    drop((waits, idle));
    desk.assert_at_rest();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_real_threads_nobody_is_forgotten_while_orgs_come_and_go() {
    const TASKS: u32 = 60;
    const CALLS: u32 = 250;
    let orgs = Orgs::new(["a", "b", "c"].map(|name| Org::new(name).cap(2))).unwrap();
    let settings = Settings::builder().start(1.0).build().unwrap();
    let layer = OrgBalanceLayer::new(orgs, move |org: &Org, ()| {
        let wire = service_fn(async |request: Request<u32>| {
            for _ in 0..fastrand::u8(..3) {
                tokio::task::yield_now().await;
            }
            Ok::<_, Infallible>(Response::new(request.into_body()))
        });
        AimdLimitLayer::with_settings(org, &settings).release_at_head().layer(wire)
    });
    let balance = layer.layer(());
    let members = balance.members();
    let over = Arc::new(AtomicBool::new(false));
    let drained = Arc::new(AtomicUsize::new(0));
    let changer = tokio::spawn({
        let (members, over, drained) = (members.clone(), over.clone(), drained.clone());
        async move {
            while !over.load(SeqCst) {
                // One stays, so that no call fails.
                let name = ["b", "c"][fastrand::usize(..2)];
                match fastrand::u8(..5) {
                    0 => drop(members.remove(name)),
                    1 => drop(members.add(Org::new(name).cap(2))),
                    2 => drop(members.disable(name)),
                    3 => drop(members.enable(name)),
                    _ => {
                        if let Ok(drain) = members.drain(name) {
                            drain.await.unwrap();
                            drained.fetch_add(1, SeqCst);
                        }
                    }
                }
                tokio::task::yield_now().await;
            }
        }
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|caller| {
            let mut balance = balance.clone();
            tokio::spawn(async move {
                for n in 0..CALLS {
                    let id = caller * CALLS + n;
                    let ready = std::future::poll_fn(|cx| Service::<Request<u32>>::poll_ready(&mut balance, cx));
                    ready.await.unwrap();
                    let mut call = Box::pin(balance.call(Request::new(id)));
                    if fastrand::u8(..5) == 0 {
                        let _ = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
                    } else {
                        assert_eq!(call.await.unwrap().into_body(), id);
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        // No measure of speed: it turns a lost wake-up into a failure.
        tokio::time::timeout(Duration::from_secs(60), task).await.expect("a call waits for ever").unwrap();
    }
    over.store(true, SeqCst);
    tokio::time::timeout(Duration::from_secs(60), changer).await.expect("a drain waits for ever").unwrap();
    assert!(drained.load(SeqCst) > 0);
    for snapshot in members.snapshots() {
        assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0), "{}", snapshot.name);
    }
}

// Under load, against the simulated provider.

fn provider() -> Config {
    let org = |name: &str| OrgConfig::new(name, format!("key-{name}")).requests_per_minute(3_000.0);
    let config = Config::new(Dialect::Anthropic).latency(Latency::new(60.0, 0.3));
    config.org(org("a")).org(org("b")).org(org("c"))
}

fn org(name: &str) -> Org {
    Org::new(name)
        .credential(Credential::new(&format!("key-{name}")))
        .base_url(Uri::from_static("http://provider.test"))
}

fn item(id: u64) -> Request<Full<Bytes>> {
    let mut request =
        Request::post("/v1/messages").body(Full::new(Bytes::from(format!(r#"{{"item":{id}}}"#)))).unwrap();
    request.extensions_mut().insert(Family::new(["sonnet", "haiku"][id as usize % 2]));
    request
}

#[tokio::test(start_paused = true)]
async fn while_orgs_come_and_go_nothing_is_lost_and_nothing_is_sent_twice() {
    const ITEMS: u64 = 4_000;
    let sim = Sim::new(provider()).unwrap();
    let stack = Stack::new(Orgs::new([org("a"), org("b")]).unwrap()).build(sim.service()).unwrap();
    let members = stack.members();
    let mut drive = Drive::iter(stack, (0..ITEMS).map(|id| (id, item(id))), 200).unwrap();
    let calls = |org: &str| sim.truth().org(org).unwrap().calls;
    let mut seen = BTreeSet::new();
    let mut at_rest = [0; 2];
    let mut drain = None;
    while let Some((id, result)) = drive.next().await {
        assert!(result.unwrap().status().is_success());
        assert!(seen.insert(id));
        match seen.len() {
            500 => members.add(org("c")).unwrap(),
            900 => {
                assert!(calls("c") > 100, "it has taken its part: {}", calls("c"));
                drain = Some(members.drain("a").unwrap());
            }
            1_300 => {
                drain.take().unwrap().await.unwrap();
                at_rest[0] = calls("a");
                assert_eq!(sim.truth().org("a").unwrap().in_flight, 0);
                members.remove("a").unwrap();
            }
            1_600 => members.disable("b").unwrap(),
            2_000 => {
                at_rest[1] = calls("b");
                members.get("c").unwrap().retune(Tuning::new().cap(3)).unwrap();
            }
            2_300 => {
                let c = sim.truth().org("c").unwrap().clone();
                assert!(c.in_flight <= 6, "three of each family: {}", c.in_flight);
                assert_eq!(calls("b"), at_rest[1], "disabled, and what was in flight has ended");
                members.get("c").unwrap().retune(Tuning::new().cap(60)).unwrap();
                members.enable("b").unwrap();
            }
            2_800 => {
                assert!(calls("b") > at_rest[1] + 100);
                assert_eq!(calls("a"), at_rest[0], "removed");
                members.add(org("a")).unwrap();
            }
            3_300 => {
                assert!(calls("a") > at_rest[0] + 100);
                members.remove("c").unwrap();
            }
            _ => {}
        }
    }
    let truth = sim.truth();
    assert_eq!((seen.len() as u64, truth.answered_once, truth.answered_more), (ITEMS, ITEMS, 0));
    assert!(truth.throttled_429() * 100 < ITEMS, "{} refused", truth.throttled_429());
    for org in members.orgs() {
        for family in org.families() {
            let now = family.snapshot();
            assert_eq!((now.in_flight, now.waiting), (0, 0), "{} {}", now.name, now.family);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_is_disabled_under_load_waits_and_one_that_is_emptied_fails_what_is_left() {
    let sim = Sim::new(provider()).unwrap();
    // For an hour nothing goes on, and nobody is to be given up for that.
    let patient = tower_quota::retry::RateLimitRetryLayer::builder().patience(Duration::MAX).build().unwrap();
    let stack = Stack::new(Orgs::new([org("a"), org("b")]).unwrap()).retry(patient).build(sim.service()).unwrap();
    let members = stack.members();
    let mut drive = Drive::iter(stack, (0..600).map(|id| (id, item(id))), 100).unwrap();
    let (mut ok, mut none_left) = (0, 0);
    for _ in 0..200 {
        ok += usize::from(drive.next().await.unwrap().1.unwrap().status().is_success());
    }
    members.disable("a").unwrap();
    members.disable("b").unwrap();
    let mut idle = 0;
    while let Ok(next) = tokio::time::timeout(3_600 * SECOND, drive.next()).await {
        ok += usize::from(next.unwrap().1.unwrap().status().is_success());
        idle += 1;
    }
    assert!(idle < 200, "an hour passes, and those that wait still wait");
    members.remove("a").unwrap();
    members.remove("b").unwrap();
    while let Some((_, result)) = drive.next().await {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no org left to ask"), "{error}");
        none_left += 1;
    }
    let truth = sim.truth();
    assert_eq!((ok + none_left, truth.answered_once as usize, truth.answered_more), (600, ok, 0));
    assert!(none_left > 200);
}
