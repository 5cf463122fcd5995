//! A second key of an organisation is a spare: found out by the id that answers name, parked, and put in the place of the
//! first when that dies.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support_balance;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    error::Error as _,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
};

use http::{Request, Response};
use support_balance::{Balance, Call, Desk, answer, call, call_with, of_family, settle};
use tokio_test::{assert_pending, assert_ready, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    balance::{Members, NoOrgLeft, OrgBalanceLayer},
    org::{Family, Org, Orgs, OutReason, Standing},
    outcome::{Class, Stamp},
    quota::QuotaHeaderLayer,
};

/// An answer of `org` names this id; none, if it is `None`.
fn names<'a>(org: &Org, id: impl Into<Option<&'a str>>) {
    let id = id.into().map(str::to_owned);
    let wire = service_fn(move |_: Request<String>| {
        let mut response = Response::new(String::new());
        if let Some(id) = &id {
            response.headers_mut().insert("anthropic-organization-id", id.parse().unwrap());
        }
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let mut call = task::spawn(QuotaHeaderLayer::new(org).layer(wire).oneshot(Request::new(String::new())));
    assert_ready_ok!(call.poll());
}

fn standings(members: &Members) -> Vec<(String, Standing)> {
    members.orgs().iter().map(|org| (org.name().to_owned(), org.standing())).collect()
}

/// Which of these orgs take a call now, found by making calls until all would wait. Every member has one slot.
fn takers(balance: &Balance, desk: &Desk, names: &[&str]) -> BTreeSet<String> {
    let mut calls: Vec<_> = (0..8).map(|id| call(balance, 1_000 + id)).collect();
    for call in &mut calls {
        let _ = call.poll().is_ready();
    }
    let took = |name: &&&str| (1_000..1_008).any(|id| desk.hand(name).has(id));
    names.iter().filter(took).map(|name| (*name).to_owned()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Orgs of one organisation, known in this order; the family that names none has been asked for.
fn pool(names_of: &[&str], slots: usize) -> (Desk, Balance, Members) {
    let desk = Desk::new(names_of, slots);
    let balance = desk.balance();
    let members = balance.members();
    drop(call(&balance, 999));
    names_of.iter().for_each(|name| names(&desk.org(name), "x"));
    (desk, balance, members)
}

#[track_caller]
fn served_by(answer: &Response<u32>) -> String {
    answer.extensions().get::<Stamp>().unwrap().org.as_ref().unwrap().name().to_owned()
}

// Found out.

#[test]
fn a_second_key_of_an_organisation_takes_no_calls_and_says_so() {
    let desk = Desk::new(&["a", "b", "c"], 1);
    let balance = desk.balance();
    let members = balance.members();
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["a", "b", "c"]));
    for (org, id) in [("a", "x"), ("c", "z"), ("b", "x")] {
        assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["a", "b", "c"]), "before {org} is known");
        names(&desk.org(org), id);
    }
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["a", "c"]));
    assert_eq!(format!("{members:?}"), r#"[("a", Enabled), ("b", Spare), ("c", Enabled)]"#);
    let b = desk.org("b");
    assert_eq!((b.standing().to_string(), b.spare_of().as_deref()), ("spare".to_owned(), Some("a")));
    assert!(b.is_held(), "it admits nothing for now");
    for now in members.snapshots() {
        let spare = (&*now.name == "b").then_some("a");
        assert_eq!(now.spare_of.as_deref(), spare);
        assert_eq!(now.standing, if spare.is_some() { Standing::Spare } else { Standing::Enabled });
        assert_eq!(now.organisation.as_deref(), Some(if &*now.name == "c" { "z" } else { "x" }));
    }
    desk.assert_at_rest();
}

#[test]
fn whose_id_was_known_first_stays() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    drop(call(&balance, 1));
    names(&desk.org("b"), "x");
    names(&desk.org("a"), "x");
    assert_eq!(standings(&balance.members()), [("a".into(), Standing::Spare), ("b".into(), Standing::Enabled)]);
    assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["b"]));
}

#[test]
fn what_a_spare_has_in_flight_ends_as_it_would_have_and_nothing_more_is_bound_to_it() {
    let desk = Desk::new(&["a", "b"], 2);
    let balance = desk.balance();
    let mut calls: BTreeMap<u32, Call> = (0..6).map(|id| (id, call(&balance, id))).collect();
    calls.values_mut().for_each(|call| assert_pending!(call.poll()));
    let flying = desk.hand("b").in_flight();
    assert_eq!((flying.len(), desk.hand("a").used()), (2, 2));
    names(&desk.org("a"), "x");
    names(&desk.org("b"), "x");
    assert_eq!((desk.org("b").standing(), desk.org("b").snapshot().in_flight), (Standing::Spare, 2));
    assert_eq!(desk.hand("b").registered(), 0, "it waits for no slot any more");
    let bound = desk.hand("b").counts().calls;
    for id in flying {
        desk.hand("b").answer(id, 200);
        let mut call = calls.remove(&id).unwrap();
        assert!(call.is_woken());
        assert_eq!(served_by(&assert_ready_ok!(call.poll())), "b");
        assert!(settle(&mut calls).is_empty());
    }
    assert_eq!((desk.hand("b").used(), desk.hand("b").counts().calls), (0, bound), "its slots are for nobody");
    while !calls.is_empty() {
        let id = *desk.hand("a").in_flight().first().expect("those that wait go to the other");
        desk.hand("a").answer(id, 200);
        assert_eq!(settle(&mut calls).len(), 1);
    }
    assert_eq!(desk.hand("b").counts().dropped_calls, 0);
    desk.assert_at_rest();
}

#[test]
fn a_reservation_of_a_spare_is_given_up() {
    let desk = Desk::new(&["a", "b"], 0);
    let balance = desk.balance();
    desk.hand("b").greedy();
    let mut waits = call(&balance, 1);
    assert_pending!(waits.poll());
    assert_eq!((desk.hand("b").registered(), desk.hand("b").tokens()), (1, 1));
    names(&desk.org("a"), "x");
    names(&desk.org("b"), "x");
    assert_eq!((desk.hand("b").registered(), desk.hand("b").tokens()), (0, 0));
    assert_eq!(desk.hand("a").registered(), 1);
    desk.hand("b").slots(5);
    assert!(!waits.is_woken());
    desk.hand("a").slots(1);
    assert!(waits.is_woken());
    assert_pending!(waits.poll());
    assert!(desk.hand("a").has(1));
}

#[test]
fn who_names_no_id_or_an_empty_one_is_no_spare() {
    for ids in [[None, None], [Some("x"), None], [Some(""), Some("")], [Some(" "), Some("x")], [Some("x"), Some("X")]] {
        let desk = Desk::new(&["a", "b"], 1);
        let balance = desk.balance();
        drop(call(&balance, 1));
        names(&desk.org("a"), ids[0]);
        names(&desk.org("b"), ids[1]);
        assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a", "b"]), "{ids:?}");
        // An answer that names none changes nothing.
        names(&desk.org("a"), "y");
        names(&desk.org("b"), "y");
        let before = standings(&balance.members());
        assert_eq!(before[1].1, Standing::Spare, "{ids:?}");
        for silent in [None, Some(""), Some("  ")] {
            names(&desk.org("a"), silent);
            names(&desk.org("b"), silent);
        }
        assert_eq!(standings(&balance.members()), before);
    }
}

#[test]
fn an_id_that_changes_is_looked_at_anew() {
    let (desk, balance, members) = pool(&["a", "b", "c"], 1);
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["a"]));
    let spare_of = |name: &str| desk.org(name).spare_of().map(|of| of.to_string());
    // The spare is another organisation's.
    names(&desk.org("b"), "y");
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["a", "b"]));
    // Then the first is too: who was that before stays, and the third takes over from it.
    let mut waits: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    names(&desk.org("a"), "y");
    assert!(waits[2].is_woken());
    assert_pending!(waits[2].poll());
    assert!(desk.hand("c").has(2));
    drop(waits);
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["b", "c"]));
    assert_eq!(["a", "b", "c"].map(spare_of), [Some("b".to_owned()), None, None]);
    // And all one again.
    names(&desk.org("c"), "y");
    assert_eq!(takers(&balance, &desk, &["a", "b", "c"]), set(&["b"]));
    assert_eq!(standings(&members)[1], ("b".into(), Standing::Enabled));
}

#[test]
fn where_spares_are_not_looked_for_every_key_takes_calls() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance_without_spares();
    drop(call(&balance, 1));
    names(&desk.org("a"), "x");
    names(&desk.org("b"), "x");
    assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a", "b"]));
    let all = [("a".into(), Standing::Enabled), ("b".into(), Standing::Enabled)];
    assert_eq!(standings(&balance.members()), all);
    balance.members().disable("a").unwrap();
    balance.members().enable("a").unwrap();
    desk.org("b").put_out(OutReason::Unauthorised);
    desk.org("b").bring_back();
    assert_eq!(standings(&balance.members()), all);
    assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a", "b"]));
}

/// What the log says.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn it_is_said_once_with_both_names_and_no_id() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    // While there is but one, a place in the code that another test's thread comes to first is silent for good.
    let _other = tracing::Dispatch::new(tracing_subscriber::registry());
    let lines = |what: &str| {
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(what)).map(str::to_owned).collect::<Vec<_>>()
    };
    let desk = Desk::new(&["one", "two", "three"], 1);
    let balance = desk.balance();
    let members = balance.members();
    drop(call(&balance, 1));
    drop(call_with(&balance, of_family(2, "sonnet")));
    for name in ["one", "two", "three"] {
        names(&desk.org(name), "acme-org-id");
    }
    let said = lines("is a spare");
    assert_eq!(said.len(), 2, "{said:?}");
    for (line, name) in said.iter().zip(["two", "three"]) {
        assert!(line.contains("WARN") && line.contains(&format!("org={name} serves=one")), "{line}");
    }
    // Another family, another answer, another go: that is said already.
    drop(call_with(&balance, of_family(3, "haiku")));
    names(&desk.org("two"), "acme-org-id");
    members.disable("two").unwrap();
    members.enable("two").unwrap();
    names(&desk.org("two"), "another");
    names(&desk.org("two"), "acme-org-id");
    assert_eq!(lines("is a spare").len(), 2);
    assert!(lines("takes over").is_empty());
    desk.org("one").put_out(OutReason::Unauthorised);
    let said = lines("takes over");
    assert!(said.len() == 1 && said[0].contains("org=three parked_for=one"), "{said:?}");
    assert_eq!(lines("is a spare").len(), 2 + 1, "what is out is a spare for the first time");
    assert!(lines("acme-org-id").is_empty());
}

// The first dies.

/// What ends the first key, and whether that is for every family.
type Blow = (&'static str, fn(&Desk, &Members));

const BLOWS: [Blow; 7] = [
    ("out", |desk, _| desk.org("a").put_out(OutReason::OutOfQuota)),
    ("out for this family", |desk, _| desk.org("a").put_family_out(OutReason::Unauthorised)),
    ("out for a model", |desk, _| desk.org("a").family(&Family::default()).put_model_out("m")),
    ("disabled", |_, members| members.disable("a").unwrap()),
    ("drained", |_, members| drop(members.drain("a").unwrap())),
    ("removed", |_, members| drop(members.remove("a").unwrap())),
    ("of another id", |desk, _| names(&desk.org("a"), "y")),
];

#[test]
fn when_the_first_dies_the_spare_takes_over_at_once() {
    for (blow, strike) in BLOWS {
        let (desk, balance, members) = pool(&["a", "b"], 1);
        let mut flies = call(&balance, 1);
        assert_pending!(flies.poll());
        assert!(desk.hand("a").has(1));
        let mut waits: Vec<_> = (2..4).map(|id| call(&balance, id)).collect();
        waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
        strike(&desk, &members);
        assert!(waits[0].is_woken(), "{blow}");
        assert_pending!(waits[0].poll());
        assert!(desk.hand("b").has(2), "{blow}");
        assert_eq!(desk.org("b").standing(), Standing::Enabled, "{blow}");
        // What the first has in flight ends as it would have.
        desk.hand("a").answer(1, 200);
        assert_eq!(served_by(&assert_ready_ok!(flies.poll())), "a", "{blow}");
        desk.hand("b").answer(2, 200);
        assert_ready_ok!(waits[0].poll());
        assert!(waits[1].is_woken(), "{blow}");
        assert_pending!(waits[1].poll());
        let by = if blow == "of another id" {
            desk.hand("a").has(3) || desk.hand("b").has(3)
        } else {
            desk.hand("b").has(3)
        };
        assert!(by, "{blow}");
        drop((flies, waits));
        desk.assert_at_rest();
    }
}

/// By its status alone, of an answer through the balancer.
#[test]
fn a_refused_key_hands_over_to_its_spare() {
    for (status, everywhere) in [(401, true), (402, true), (403, false)] {
        let (desk, balance, _members) = pool(&["a", "b"], 1);
        let mut sonnet = call_with(&balance, of_family(1, "sonnet"));
        let mut haiku = call_with(&balance, of_family(2, "haiku"));
        assert_pending!(sonnet.poll());
        assert_pending!(haiku.poll());
        let mut waits = [call_with(&balance, of_family(3, "sonnet")), call_with(&balance, of_family(4, "haiku"))];
        waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
        desk.hand_of("a", "sonnet").answer(1, status);
        assert_eq!(assert_ready_ok!(sonnet.poll()).status(), status);
        assert!(waits[0].is_woken(), "{status}");
        assert_pending!(waits[0].poll());
        assert!(desk.hand_of("b", "sonnet").has(3));
        assert_eq!(waits[1].is_woken(), everywhere, "{status}");
        let standing = |family: &str| ["a", "b"].map(|org| desk.org(org).family(&Family::new(family)).standing());
        let (first, second) = ([Standing::Enabled, Standing::Spare], [Standing::Spare, Standing::Enabled]);
        assert_eq!(standing("sonnet"), second, "{status}");
        assert_eq!(standing("haiku"), if everywhere { second } else { first }, "{status}");
        let whole = if everywhere { second } else { [Standing::Enabled; 2] };
        assert_eq!(
            ["a", "b"].map(|org| desk.org(org).standing()),
            whole,
            "spare, of a whole org, is who serves nothing"
        );
        // The other family's call is served as well, by whoever serves that.
        desk.hand_of("a", "haiku").answer(2, 200);
        assert_ready_ok!(haiku.poll());
        assert!(waits[1].is_woken());
        assert_pending!(waits[1].poll());
        assert!(desk.hand_of(if everywhere { "b" } else { "a" }, "haiku").has(4), "{status}");
        // A family that nobody has asked for before follows the same rule.
        let mut opus = call_with(&balance, of_family(5, "opus"));
        assert_pending!(opus.poll());
        assert!(desk.hand_of(if everywhere { "b" } else { "a" }, "opus").has(5), "{status}");
    }
}

#[test]
fn who_comes_back_is_the_spare_of_whoever_serves() {
    type Blow = (&'static str, fn(&Desk, &Members), fn(&Desk, &Members));
    let blows: [Blow; 4] = [
        ("out", |desk, _| desk.org("a").put_out(OutReason::OutOfQuota), |desk, _| assert!(desk.org("a").bring_back())),
        ("out", |desk, _| desk.org("a").put_out(OutReason::OutOfQuota), |_, members| members.enable("a").unwrap()),
        ("disabled", |_, members| members.disable("a").unwrap(), |_, members| members.enable("a").unwrap()),
        (
            "removed",
            |_, members| drop(members.remove("a").unwrap()),
            |desk, members| {
                members.add(desk.org("a")).unwrap();
            },
        ),
    ];
    for (blow, strike, heal) in blows {
        let (desk, balance, members) = pool(&["a", "b"], 1);
        strike(&desk, &members);
        assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["b"]), "{blow}");
        let mut calls: Vec<_> = (1..3).map(|id| call(&balance, id)).collect();
        calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
        heal(&desk, &members);
        calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
        assert!(desk.hand("b").has(1) && desk.hand("a").used() == 0, "{blow}: never both");
        assert_eq!(desk.org("a").standing(), Standing::Spare, "{blow}");
        drop(calls);
        // And the other way round.
        members.disable("b").unwrap();
        assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a"]), "{blow}");
        members.enable("b").unwrap();
        assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a"]), "{blow}");
        desk.assert_at_rest();
    }
}

#[test]
fn a_disabled_spare_takes_over_from_nobody_until_it_is_enabled() {
    let (desk, balance, members) = pool(&["a", "b"], 1);
    members.disable("b").unwrap();
    assert_eq!((desk.org("b").standing(), desk.org("b").spare_of()), (Standing::Disabled, None));
    members.disable("a").unwrap();
    let mut waits = call(&balance, 1);
    assert_pending!(waits.poll());
    assert!(desk.hands().iter().all(|hand| hand.used() == 0), "all disabled waits");
    members.enable("b").unwrap();
    assert!(waits.is_woken());
    assert_pending!(waits.poll());
    assert!(desk.hand("b").has(1));
    members.enable("a").unwrap();
    assert_eq!(desk.org("a").standing(), Standing::Spare);
}

#[test]
fn of_three_keys_two_are_spares_and_one_of_them_takes_over() {
    let (desk, balance, members) = pool(&["a", "b", "c"], 1);
    let all = ["a", "b", "c"];
    assert_eq!(takers(&balance, &desk, &all), set(&["a"]));
    let spare_of = || all.map(|name| desk.org(name).spare_of().map(|of| of.to_string()).unwrap_or_default());
    assert_eq!(spare_of(), ["", "a", "a"]);
    let mut waits: Vec<_> = (1..4).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.org("a").put_out(OutReason::Unauthorised);
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    assert!(desk.hand("b").has(2) && desk.hand("c").used() == 0);
    assert_eq!(spare_of(), ["b", "", "b"]);
    members.remove("b").unwrap();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    assert!(desk.hand("c").has(3));
    assert_eq!(spare_of(), ["c", "", ""]);
    drop(waits);
    desk.assert_at_rest();
}

#[test]
fn when_all_have_died_every_call_fails_and_says_why() {
    let (desk, balance, _members) = pool(&["a", "b", "c"], 1);
    let mut waits: Vec<_> = (1..6).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    desk.org("a").put_out(OutReason::Unauthorised);
    desk.org("b").put_out(OutReason::OutOfQuota);
    let served: Vec<u32> = ["a", "b", "c"].iter().flat_map(|name| desk.hand(name).in_flight()).collect();
    assert_eq!(served, [1], "nobody has looked meanwhile");
    desk.org("c").put_out(OutReason::Unauthorised);
    let mut failed = 0;
    for (id, call) in (1..6).zip(&mut waits).skip(1) {
        assert!(call.is_woken(), "{id}");
        let error = assert_ready!(call.poll()).unwrap_err();
        assert_eq!(error.outcome().class, Class::NoOrg);
        let none_left = error.source().unwrap().downcast_ref::<NoOrgLeft>().unwrap();
        let reasons: Vec<_> = none_left.reasons().map(|(name, reason)| (name.to_owned(), reason.clone())).collect();
        let expected = [OutReason::Unauthorised, OutReason::OutOfQuota, OutReason::Unauthorised];
        assert_eq!(reasons, ["a", "b", "c"].map(str::to_owned).into_iter().zip(expected).collect::<Vec<_>>());
        failed += 1;
    }
    assert_eq!(failed, 4);
    // Whoever comes back first serves.
    desk.org("b").bring_back();
    desk.org("a").bring_back();
    assert_eq!(takers(&balance, &desk, &["b", "c"]), set(&["b"]));
    assert_eq!(desk.org("a").spare_of().as_deref(), Some("b"));
}

// Who joins, and where.

#[test]
fn who_joins_with_a_known_id_is_a_spare_from_the_start() {
    let (desk, balance, members) = pool(&["a"], 1);
    let late = Org::new("late");
    names(&late, "x");
    members.add(late.clone()).unwrap();
    assert_eq!((late.standing(), late.spare_of().as_deref()), (Standing::Spare, Some("a")));
    assert_eq!(takers(&balance, &desk, &["a", "late"]), set(&["a"]));
    members.remove("late").unwrap();
    assert_eq!((late.standing(), late.spare_of()), (Standing::Removed, None));
    // Its pool of its own has it as any other.
    let own = OrgBalanceLayer::new(Orgs::new([late.clone()]).unwrap(), |_: &Org, ()| {
        service_fn(async |request: Request<u32>| Ok::<_, Infallible>(Response::new(request.into_body())))
    });
    assert_ready_ok!(task::spawn(own.layer(()).oneshot(Request::new(1))).poll());
    assert_eq!(late.standing(), Standing::Enabled);
}

#[test]
fn ids_known_before_the_pool_is_made_count_in_its_order() {
    let desk = Desk::new(&["a", "b"], 1);
    names(&desk.org("b"), "x");
    names(&desk.org("a"), "x");
    let balance = desk.balance();
    assert_eq!(takers(&balance, &desk, &["a", "b"]), set(&["a"]));
    assert_eq!(desk.org("b").spare_of().as_deref(), Some("a"));
}

// From within a user's own code.

/// Puts an org out from within the function that makes members, which runs under the pool's lock.
#[test]
fn an_org_may_be_put_out_from_within_the_function_that_makes_members() {
    let orgs = Orgs::new([Org::new("a"), Org::new("b")]).unwrap();
    let (a, b) = (orgs.get("a").unwrap().clone(), orgs.get("b").unwrap().clone());
    names(&a, "x");
    names(&b, "x");
    let strike = a.clone();
    let layer = OrgBalanceLayer::new(orgs, move |org: &Org, ()| {
        if org.name() == "b" {
            strike.put_out(OutReason::Disabled("found to be wrong".into()));
        }
        let name = org.name().to_owned();
        service_fn(move |_: Request<u32>| std::future::ready(Ok::<_, Infallible>(Response::new(name.clone()))))
    });
    let answer = assert_ready_ok!(task::spawn(layer.layer(()).oneshot(Request::new(1))).poll());
    assert_eq!(answer.body(), "b");
    assert_eq!((a.standing(), b.standing()), (Standing::Spare, Standing::Enabled));
}

/// Where that panics as well, nothing is made; but the spare takes over all the same.
#[test]
fn what_is_said_from_within_the_function_that_makes_members_is_seen_to_though_it_panics() {
    let desk = Desk::new(&["a", "b"], 1);
    let (hands, strike) = (desk.clone(), desk.org("a"));
    let layer = OrgBalanceLayer::new(desk.orgs.clone(), move |org: &Org, ()| {
        if org.model_family().as_str() == "evil" {
            strike.put_out(OutReason::Unauthorised);
            panic!("a user's own");
        }
        hands.guarded(org)
    });
    let balance = layer.layer(());
    let mut waits: Vec<_> = (0..3).map(|id| call(&balance, id)).collect();
    waits.iter_mut().for_each(|call| assert_pending!(call.poll()));
    names(&desk.org("a"), "x");
    names(&desk.org("b"), "x");
    let id = desk.hand("b").in_flight()[0];
    desk.hand("b").answer(id, 200);
    drop(waits.remove(usize::try_from(id).unwrap()));
    assert_eq!(desk.hand("b").used(), 0);
    let evil = std::panic::AssertUnwindSafe(|| call_with(&balance, of_family(9, "evil")));
    assert!(std::panic::catch_unwind(evil).is_err());
    let waits = &mut waits[1];
    assert!(waits.is_woken());
    assert_pending!(waits.poll());
    assert!(desk.hand("b").has(2));
}

/// Says something of the orgs from within a member's own poll and call.
#[derive(Clone)]
struct Talkative {
    org: Org,
    says: Arc<dyn Fn(&Org) + Send + Sync>,
    ready: bool,
}

impl Service<Request<u32>> for Talkative {
    type Response = Response<u32>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<u32>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        (self.says)(&self.org);
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<u32>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready));
        (self.says)(&self.org);
        std::future::ready(Ok(answer(request.into_body(), 200)))
    }
}

#[test]
fn an_id_may_be_learnt_and_a_key_may_die_from_within_a_members_own_poll() {
    let orgs = Orgs::new([Org::new("a"), Org::new("b")]).unwrap();
    let named = Arc::new(AtomicBool::new(false));
    let turns = Arc::new(AtomicUsize::new(0));
    let says: Arc<dyn Fn(&Org) + Send + Sync> = {
        let orgs = orgs.clone();
        Arc::new(move |_: &Org| {
            if !named.swap(true, SeqCst) {
                orgs.iter().for_each(|org| names(org, "x"));
            }
            // Now the one is out, now the other.
            let turn = turns.fetch_add(1, SeqCst) % 4;
            let (out, back) = if turn < 2 { ("a", "b") } else { ("b", "a") };
            orgs.get(back).unwrap().bring_back();
            orgs.get(out).unwrap().put_out(OutReason::OutOfQuota);
        })
    };
    let layer = OrgBalanceLayer::new(orgs.clone(), move |org: &Org, ()| Talkative {
        org: org.clone(),
        says: says.clone(),
        ready: false,
    });
    let balance = layer.layer(());
    let mut ok = 0;
    for id in 0..100 {
        let mut call = task::spawn(balance.clone().oneshot(Request::new(id)));
        while call.poll().is_pending() {
            assert!(call.is_woken(), "{id} sleeps, though one of them serves");
        }
        ok += 1;
        assert!(orgs.iter().all(|org| org.family(&Family::default()).snapshot().in_flight == 0));
    }
    assert_eq!(ok, 100);
}

#[test]
fn a_balancer_that_is_gone_is_told_nothing() {
    let (desk, balance, members) = pool(&["a", "b"], 1);
    drop((balance, members));
    names(&desk.org("b"), "y");
    desk.org("a").put_out(OutReason::Unauthorised);
    assert!(desk.hands().iter().all(|hand| hand.counts().instances == 0), "nothing keeps it alive");
}

// On real threads.

/// Answers after a few polls, and names its org's id.
async fn tells(id: &'static str, request: Request<String>) -> Result<Response<String>, Infallible> {
    for _ in 0..fastrand::u8(..3) {
        tokio::task::yield_now().await;
    }
    let mut response = Response::new(request.into_body());
    response.headers_mut().insert("anthropic-organization-id", id.parse().unwrap());
    Ok(response)
}

#[test]
fn while_keys_die_and_come_back_on_another_thread_no_call_is_lost() {
    const CALLERS: u32 = 8;
    const CALLS: u32 = 500;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let orgs = Orgs::new(["a", "b", "c"].map(Org::new)).unwrap();
    let layer = OrgBalanceLayer::new(orgs.clone(), |org: &Org, ()| {
        // One call at a time, so that others wait.
        let slots = tower::limit::ConcurrencyLimit::new(service_fn(|request| tells("x", request)), 1);
        QuotaHeaderLayer::new(org).layer(slots)
    });
    let balance = layer.layer(());
    let members = balance.members();
    let over = Arc::new(AtomicBool::new(false));
    let attack = {
        let (over, orgs, members) = (over.clone(), orgs.clone(), members.clone());
        std::thread::spawn(move || {
            let mut acts = 0;
            while !over.load(SeqCst) {
                // Always another one than the last, which comes back first: so one is alive at any time.
                let (next, last) = (["a", "b", "c"][acts % 3], ["c", "a", "b"][acts % 3]);
                members.enable(last).unwrap();
                match fastrand::u8(..3) {
                    0 => orgs.get(next).unwrap().put_out(OutReason::Unauthorised),
                    1 => orgs.get(next).unwrap().family(&Family::default()).put_family_out(OutReason::Unauthorised),
                    _ => members.disable(next).unwrap(),
                }
                acts += 1;
            }
            acts
        })
    };
    runtime.block_on(async {
        let caller = |caller: u32| {
            let mut balance = balance.clone();
            tokio::spawn(async move {
                for call in 0..CALLS {
                    let id = (caller * CALLS + call).to_string();
                    let ready = ServiceExt::<Request<String>>::ready(&mut balance).await.unwrap();
                    assert_eq!(ready.call(Request::new(id.clone())).await.unwrap().into_body(), id);
                }
            })
        };
        for caller in (0..CALLERS).map(caller).collect::<Vec<_>>() {
            caller.await.unwrap();
        }
    });
    over.store(true, SeqCst);
    assert!(attack.join().unwrap() > 10);
    for org in &orgs {
        members.enable(org.name()).unwrap();
        assert_eq!(org.snapshot().in_flight, 0);
    }
    let serving = orgs.iter().filter(|org| org.standing() == Standing::Enabled).count();
    assert_eq!(serving, 1, "{members:?}");
}

// Whatever comes, in whatever order.

const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
const FAMILIES: [&str; 2] = ["sonnet", "haiku"];

/// A pool under attack, and what must hold of it between any two acts.
struct World {
    desk: Desk,
    balance: Balance,
    members: Members,
    /// By number, with the family of each.
    calls: BTreeMap<u32, Call>,
    family: BTreeMap<u32, &'static str>,
    gone: Vec<Org>,
    next: u32,
}

impl World {
    fn new() -> Self {
        let desk = Desk::new(&NAMES, 2);
        let balance = desk.balance();
        let members = balance.members();
        let mut world =
            World { desk, balance, members, calls: BTreeMap::new(), family: BTreeMap::new(), gone: vec![], next: 0 };
        FAMILIES.iter().for_each(|family| world.call_of(family));
        world
    }

    fn call_of(&mut self, family: &'static str) {
        let id = self.next;
        self.next += 1;
        let mut call = call_with(&self.balance, of_family(id, family));
        if call.poll().is_pending() {
            self.calls.insert(id, call);
            self.family.insert(id, family);
        }
    }

    /// Where each call flies.
    fn flying(&self) -> BTreeMap<u32, &'static str> {
        let mut flying = BTreeMap::new();
        for name in NAMES {
            for family in FAMILIES {
                flying.extend(self.desk.hand_of(name, family).in_flight().into_iter().map(|id| (id, name)));
            }
        }
        flying
    }

    fn act(&mut self) {
        let name = NAMES[fastrand::usize(..NAMES.len())];
        let family = Family::new(FAMILIES[fastrand::usize(..2)]);
        let org = self.members.get(name);
        match fastrand::u8(..20) {
            0..=4 => self.call_of(FAMILIES[fastrand::usize(..2)]),
            5..=8 => {
                let ids: Vec<_> = self.flying().into_iter().collect();
                if let Some((id, at)) = fastrand::choice(ids) {
                    let status = fastrand::choice([200, 200, 200, 429, 500, 401, 402, 403]).unwrap();
                    self.desk.hand_of(at, self.family[&id]).answer(id, status);
                }
            }
            9..=10 => {
                let id = fastrand::choice(self.calls.keys().copied().collect::<Vec<_>>());
                drop(id.and_then(|id| self.calls.remove(&id)));
            }
            11..=12 => org
                .iter()
                .for_each(|org| names(org, fastrand::choice([None, Some("x"), Some("x"), Some("y")]).unwrap())),
            13 => org.iter().for_each(|org| org.put_out(OutReason::OutOfQuota)),
            14 => org.iter().for_each(|org| org.family(&family).put_family_out(OutReason::Unauthorised)),
            15 => org.iter().for_each(|org| assert!(org.bring_back() || !org.is_out())),
            16 => drop(self.members.disable(name)),
            17 => drop(self.members.enable(name)),
            18 => self.gone.extend(self.members.remove(name).ok()),
            _ => {
                let old = self.gone.iter().rposition(|org| org.name() == name);
                let old = old.filter(|_| fastrand::bool()).map(|at| self.gone.remove(at));
                // It may be there, or have calls in flight.
                drop(self.members.add(old.unwrap_or_else(|| Org::new(name))));
            }
        }
    }

    /// Who takes new calls of this family, with the id that it is known by.
    fn serving(&self, family: &str) -> Vec<(String, Option<Arc<str>>)> {
        let of_family = self.members.orgs().into_iter().map(|org| org.family(&Family::new(family)));
        let serves = |org: &Org| org.standing() == Standing::Enabled && !org.is_out();
        of_family.filter(serves).map(|org| (org.name().to_owned(), org.snapshot().organisation)).collect()
    }

    fn step(&mut self) {
        let before = self.flying();
        self.act();
        settle(&mut self.calls);
        let calls = &self.calls;
        self.family.retain(|id, _| calls.contains_key(id));
        for family in FAMILIES {
            let serving = self.serving(family);
            let known = |id: &&Org| id.snapshot().organisation.is_some();
            let ids: Vec<_> = serving.iter().filter_map(|(_, id)| id.clone()).collect();
            assert_eq!(ids.len(), ids.iter().collect::<BTreeSet<_>>().len(), "two of one id serve: {serving:?}");
            let may_serve = self.members.orgs().into_iter().map(|org| org.family(&Family::new(family)));
            for org in may_serve.filter(|org| known(&org)) {
                let (id, standing) = (org.snapshot().organisation, org.standing());
                let alive = !org.is_out() && matches!(standing, Standing::Enabled | Standing::Spare);
                assert!(!alive || serving.iter().any(|(_, other)| *other == id), "nobody serves in its place: {org:?}");
            }
            let waiting = self.calls.keys().any(|id| self.family[id] == family && !self.flying().contains_key(id));
            if waiting {
                for (name, _) in &serving {
                    assert_eq!(self.desk.hand_of(name, family).free(), 0, "a call sleeps, and {name} admits");
                }
                let orgs = self.members.orgs();
                let out = orgs.iter().all(|org| org.family(&Family::new(family)).is_out());
                assert!(!out, "none is left, and a call sleeps");
            }
            let new: BTreeSet<_> = self.flying().into_iter().filter(|(id, _)| !before.contains_key(id)).collect();
            for (id, name) in new.iter().filter(|(id, _)| self.family.get(id) == Some(&family)) {
                assert!(serving.iter().any(|(other, _)| other == name), "call {id} was bound to {name} of {serving:?}");
            }
        }
    }

    fn end(mut self) {
        while let Some((id, at)) = self.flying().into_iter().next() {
            self.desk.hand_of(at, self.family[&id]).answer(id, 200);
            settle(&mut self.calls);
        }
        self.calls.clear();
        self.desk.assert_at_rest();
        for org in self.members.orgs().into_iter().chain(self.gone) {
            let now = org.snapshot();
            assert_eq!((now.in_flight, now.waiting), (0, 0), "{now:?}");
        }
    }
}

#[test]
fn whatever_happens_one_of_each_id_serves_and_nobody_sleeps_beside_a_free_slot() {
    for seed in 0..80 {
        fastrand::seed(seed);
        let mut world = World::new();
        for _ in 0..150 {
            world.step();
        }
        world.end();
    }
}
