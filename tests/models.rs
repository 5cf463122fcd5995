//! A 403 takes an org out for the model that was asked for, and for no other: under the balancer, whose members are in the test's
//! hand, and through the whole stack.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support_balance;

use std::{
    collections::BTreeMap,
    error::Error as _,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use support_balance::{Answer, Balance, Call, Desk, Req, call_with, settle};
use tokio_test::{assert_pending, assert_ready};
use tower::{BoxError, service_fn};
use tower_quota::{
    aimd::Settings,
    balance::NoOrgLeft,
    drive::Drive,
    org::{Family, Org, Orgs, OutReason},
    outcome::{Class, Stamp},
    stack::Stack,
};

const SONNET: &str = "sonnet";
const OLD: &str = "claude-sonnet-4-0";
const NEW: &str = "claude-sonnet-4-5";

fn of_model(id: u32, model: &str) -> Req {
    let mut request = Request::new(id);
    request.extensions_mut().insert(Family::of_model(model));
    request
}

fn ask(balance: &Balance, id: u32, model: &str) -> Call {
    call_with(balance, of_model(id, model))
}

/// Calls that wait in the order of their ids.
fn waiting(balance: &Balance, calls: impl IntoIterator<Item = (u32, &'static str)>) -> BTreeMap<u32, Call> {
    let mut waiting: BTreeMap<u32, Call> = calls.into_iter().map(|(id, model)| (id, ask(balance, id, model))).collect();
    waiting.values_mut().for_each(|call| assert_pending!(call.poll()));
    waiting
}

fn hold_all(desk: &Desk) {
    for org in &desk.orgs {
        desk.hand_of(org.name(), SONNET).held(true);
    }
}

/// The org is asked for this model, and refuses it.
fn refuse(balance: &Balance, desk: &Desk, org: &str, model: &str) {
    let others: Vec<_> = desk.orgs.iter().filter(|other| other.name() != org).map(Org::name).collect();
    let others: Vec<_> = others.into_iter().map(|other| desk.hand_of(other, SONNET)).collect();
    for hand in &others {
        hand.held(true);
    }
    let mut call = ask(balance, 9_999, model);
    assert_pending!(call.poll());
    desk.hand_of(org, SONNET).answer(9_999, 403);
    assert_eq!(assert_ready!(call.poll()).unwrap().status(), 403);
    for hand in &others {
        hand.held(false);
    }
}

fn none_left(answer: Answer) -> String {
    let error = answer.unwrap_err();
    assert_eq!(error.class(), Class::NoOrg);
    error.source().unwrap().downcast_ref::<NoOrgLeft>().unwrap().to_string()
}

#[test]
fn a_refused_model_leaves_the_orgs_other_models_of_its_family() {
    let desk = Desk::new(&["a", "b"], 10);
    let balance = desk.balance();
    let serve = |id: u32, model: &str| {
        let mut call = ask(&balance, id, model);
        assert_pending!(call.poll());
        let org = ["a", "b"].into_iter().find(|org| desk.hand_of(org, SONNET).has(id)).unwrap();
        desk.hand_of(org, SONNET).answer(id, 200);
        assert_eq!(assert_ready!(call.poll()).unwrap().status(), 200);
        org
    };
    refuse(&balance, &desk, "a", OLD);
    for id in 0..20 {
        assert_eq!(serve(id, OLD), "b", "refused");
    }
    // However it is written.
    assert!((20..30).all(|id| serve(id, " Claude-Sonnet-4-0") == "b"));
    assert!((30..60).any(|id| serve(id, NEW) == "a"), "another model of the family");
    assert!(
        (60..90).any(|id| serve(id, "claude-sonnet-4-0-20250514") == "a"),
        "by another id it is not known to be refused"
    );
    assert!(!desk.org("a").family(&Family::new(SONNET)).is_out());
    desk.assert_at_rest();
}

#[test]
fn where_no_model_is_known_it_is_the_family() {
    let desk = Desk::new(&["a", "b"], 10);
    let balance = desk.balance();
    desk.hand_of("b", SONNET).held(true);
    let mut call = call_with(&balance, support_balance::of_family(0, SONNET));
    assert_pending!(call.poll());
    desk.hand_of("a", SONNET).answer(0, 403);
    assert_ready!(call.poll()).unwrap();
    assert_eq!(desk.org("a").family(&Family::new(SONNET)).out_reason(), Some(OutReason::Forbidden));
}

#[test]
fn when_every_org_refuses_a_model_whoever_asks_for_it_fails_at_once_and_the_other_goes_on() {
    let desk = Desk::new(&["a", "b"], 0);
    let balance = desk.balance();
    for org in ["a", "b"] {
        desk.hand_of(org, SONNET).slots(1);
    }
    refuse(&balance, &desk, "a", OLD);
    hold_all(&desk);
    let mut calls = waiting(&balance, (0..20).map(|id| (id, if id % 2 == 0 { OLD } else { NEW })));
    desk.hand_of("b", SONNET).held(false);
    settle(&mut calls);
    let served = desk.hand_of("b", SONNET).in_flight();
    assert_eq!(served, [0], "the oldest");
    desk.hand_of("b", SONNET).answer(0, 403);
    let mut ended = settle(&mut calls);
    assert_eq!(ended.remove(0).1.unwrap().status(), 403);
    let failed: Vec<u32> = ended.iter().map(|(id, _)| *id).collect();
    assert_eq!(failed, [2, 4, 6, 8, 10, 12, 14, 16, 18], "those who waited, all of them");
    let mut fresh = ask(&balance, 50, OLD);
    for answer in ended.into_iter().map(|(_, answer)| answer).chain([assert_ready!(fresh.poll())]) {
        let said = none_left(answer);
        assert!(said.contains(&format!("a: its key is not allowed {OLD}")), "{said}");
        assert!(said.contains(&format!("b: its key is not allowed {OLD}")), "{said}");
    }
    assert_eq!(desk.hand_of("b", SONNET).in_flight(), [1], "the other model goes on");
    desk.hand_of("a", SONNET).held(false);
    settle(&mut calls);
    assert_eq!(desk.hand_of("a", SONNET).in_flight(), [3], "at either");
    drop(calls);
    desk.assert_at_rest();
}

#[test]
fn a_dead_org_is_dead_for_every_model() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    refuse(&balance, &desk, "a", OLD);
    desk.org("a").put_out(OutReason::Unauthorised);
    desk.hand_of("b", SONNET).held(true);
    let mut calls = waiting(&balance, [(0, OLD), (1, NEW)]);
    assert!(settle(&mut calls).is_empty() && desk.hand_of("a", SONNET).in_flight().is_empty());
    // It says why it is dead, not what it refused.
    desk.org("b").put_out(OutReason::OutOfQuota);
    let ended = settle(&mut calls);
    assert_eq!(ended.len(), 2);
    for (_, answer) in ended {
        let said = none_left(answer);
        assert!(said.contains("a: its key is refused") && said.contains("b: its quota"), "{said}");
    }
}

#[test]
fn whoever_waits_for_a_refused_model_keeps_no_slot_from_those_behind() {
    // How many stand in front who may not have what becomes free, and how many behind who may.
    for (front, behind) in [(1, 1), (2, 1), (3, 3), (50, 2)] {
        let desk = Desk::new(&["a", "b"], 1);
        let balance = desk.balance();
        refuse(&balance, &desk, "a", OLD);
        hold_all(&desk);
        let all = (0..front).map(|id| (id, OLD)).chain((front..front + behind).map(|id| (id, NEW)));
        let mut calls = waiting(&balance, all);
        settle(&mut calls);
        assert_eq!(desk.hand_of("a", SONNET).registered(), 1, "{front}: somebody waits for it");
        desk.hand_of("a", SONNET).held(false);
        assert!(calls.range(..front).all(|(_, call)| !call.is_woken()), "{front}: nothing came for them");
        for id in front..front + behind {
            settle(&mut calls);
            assert_eq!(desk.hand_of("a", SONNET).in_flight(), [id], "{front}, {behind}: in turn");
            desk.hand_of("a", SONNET).answer(id, 200);
        }
        settle(&mut calls);
        // A newcomer passes those who may not.
        let mut new = ask(&balance, 900, NEW);
        if new.poll().is_pending() && !desk.hand_of("a", SONNET).has(900) {
            assert!(new.is_woken(), "{front}: it is called");
            assert_pending!(new.poll());
        }
        assert!(desk.hand_of("a", SONNET).has(900), "{front}");
        // And what they may have goes to them.
        desk.hand_of("b", SONNET).held(false);
        for id in 0..front {
            settle(&mut calls);
            assert_eq!(desk.hand_of("b", SONNET).in_flight(), [id], "{front}, {behind}");
            desk.hand_of("b", SONNET).answer(id, 200);
        }
        settle(&mut calls);
        assert!(calls.is_empty());
        drop(new);
        desk.assert_at_rest();
    }
}

#[test]
fn whoever_waits_for_a_refused_model_and_finds_nothing_hands_its_call_on() {
    let desk = Desk::new(&["a", "b"], 1);
    let balance = desk.balance();
    refuse(&balance, &desk, "a", OLD);
    hold_all(&desk);
    let mut calls = waiting(&balance, [(0, OLD), (1, OLD), (2, NEW)]);
    settle(&mut calls);
    // Those in front are called for b, which has nothing after all; a has.
    desk.hand_of("b", SONNET).ring();
    desk.hand_of("a", SONNET).held(false);
    settle(&mut calls);
    assert_eq!(desk.hand_of("a", SONNET).in_flight(), [2]);
    // One that was called and is not polled takes nothing from the others.
    desk.hand_of("b", SONNET).ring();
    let mut late = waiting(&balance, [(3, NEW), (4, NEW)]);
    desk.hand_of("a", SONNET).answer(2, 200);
    assert_ready!(calls.remove(&2).unwrap().poll()).unwrap();
    settle(&mut late);
    assert_eq!(desk.hand_of("a", SONNET).in_flight(), [3]);
    // Dropped while they are called, they leave their turn to the next.
    drop(calls);
    desk.hand_of("a", SONNET).answer(3, 200);
    settle(&mut late);
    assert_eq!(desk.hand_of("a", SONNET).in_flight(), [4]);
    drop(late);
    desk.assert_at_rest();
}

#[test]
fn the_last_org_that_allows_a_model_goes_and_those_who_wait_for_it_fail_at_once() {
    type Goes = fn(&Desk, &Balance);
    let ways: [(&str, Goes); 3] = [
        ("put out", |desk, _| desk.org("b").put_out(OutReason::OutOfQuota)),
        ("out for the family", |desk, _| {
            desk.org("b").family(&Family::new(SONNET)).put_family_out(OutReason::Forbidden)
        }),
        ("removed", |_, balance| drop(balance.members().remove("b").unwrap())),
    ];
    for (way, goes) in ways {
        let desk = Desk::new(&["a", "b"], 1);
        let balance = desk.balance();
        refuse(&balance, &desk, "a", OLD);
        hold_all(&desk);
        let mut calls = waiting(&balance, [(0, OLD), (1, NEW), (2, OLD), (3, OLD), (4, OLD)]);
        goes(&desk, &balance);
        let ended: Vec<u32> = settle(&mut calls).iter().map(|(id, _)| *id).collect();
        assert_eq!(ended, [0, 2, 3, 4], "{way}");
        desk.hand_of("a", SONNET).held(false);
        settle(&mut calls);
        assert_eq!(desk.hand_of("a", SONNET).in_flight(), [1], "{way}");
    }
}

#[test]
fn whoever_brings_the_org_back_brings_back_the_model() {
    type Back = fn(&Desk, &Balance);
    let ways: [(&str, Back); 2] = [
        ("brought back", |desk, _| assert!(desk.org("a").bring_back())),
        ("enabled", |_, balance| balance.members().enable("a").unwrap()),
    ];
    for (way, back) in ways {
        let desk = Desk::new(&["a", "b"], 1);
        let balance = desk.balance();
        refuse(&balance, &desk, "a", OLD);
        desk.hand_of("b", SONNET).held(true);
        let mut calls = waiting(&balance, [(0, OLD), (1, OLD)]);
        back(&desk, &balance);
        settle(&mut calls);
        assert_eq!(desk.hand_of("a", SONNET).in_flight(), [0], "{way}: those who wait look at it at once");
        assert!(!desk.org("a").bring_back(), "{way}: it was back");
        // Refused once more, it is out for it once more.
        desk.hand_of("a", SONNET).answer(0, 403);
        settle(&mut calls);
        assert!(desk.hand_of("a", SONNET).in_flight().is_empty(), "{way}");
        drop(calls);
        desk.assert_at_rest();
    }
}

// Through the whole stack.

type Body = Full<Bytes>;

fn post(model: &str) -> Request<Body> {
    let mut request = Request::post("/v1/messages").header("x-model", model).body(Body::from("{}")).unwrap();
    request.extensions_mut().insert(Family::of_model(model));
    request
}

/// Who refuses what, and how: everything else is answered in 50 ms.
type Refuses = fn(&str, &str) -> Option<(u16, &'static str)>;

const PERMISSION: &str = r#"{"type":"error","error":{"type":"permission_error","message":"no access to this model"}}"#;
const OPENAI: &str = r#"{"error":{"message":"Project `p` does not have access to model `m`","type":"invalid_request_error","code":"model_not_found"}}"#;

#[tokio::test(start_paused = true)]
async fn b43_a_refused_model_costs_what_was_in_flight_and_its_ids_go_to_a_sibling() {
    // Who refuses what; the models that are then served by b alone; and whether a is out for the family.
    let rows: [(&str, Refuses, &[&str], bool); 6] = [
        ("nothing", |_, _| None, &[], false),
        ("one model", |org, model| (org == "a" && model == OLD).then_some((403, PERMISSION)), &[OLD], false),
        ("by OpenAI's words", |org, model| (org == "a" && model == OLD).then_some((403, OPENAI)), &[OLD], false),
        ("by no words", |org, model| (org == "a" && model == OLD).then_some((403, "")), &[OLD], false),
        ("in a 400", |org, model| (org == "a" && model == OLD).then_some((400, PERMISSION)), &[OLD], false),
        ("both", |org, _| (org == "a").then_some((403, PERMISSION)), &[OLD, NEW], false),
    ];
    for (row, refuses, only_b, out) in rows {
        fastrand::seed(7);
        let orgs = Orgs::new(["a", "b"].map(|name| Org::new(name).cap(10))).unwrap();
        let wire = Arc::new(Mutex::new(vec![]));
        let seen = wire.clone();
        let limit = Settings::builder().start(1.0).build().unwrap();
        let service = Stack::new(orgs.clone()).limit(limit).build_with(move |org| {
            let (name, seen) = (org.name().to_owned(), seen.clone());
            service_fn(move |request: Request<Body>| {
                let model = request.headers()["x-model"].to_str().unwrap().to_owned();
                let refusal = refuses(&name, &model);
                seen.lock().unwrap().push((name.clone(), model, refusal.is_some()));
                async move {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    let (status, body) = refusal.unwrap_or((200, "{}"));
                    Ok::<_, BoxError>(
                        Response::builder()
                            .status(status)
                            .header("content-type", "application/json")
                            .body(Body::from(body))
                            .unwrap(),
                    )
                }
            })
        });
        let items = (0..400u64).map(|id| (id, post(if id % 2 == 0 { OLD } else { NEW })));
        let mut drive = Drive::iter(service.unwrap(), items, 16).unwrap();
        let mut by: BTreeMap<(String, &str), u32> = BTreeMap::new();
        while let Some((id, result)) = drive.next().await {
            let answer = result.unwrap_or_else(|error| panic!("{row}: {id}: {error}"));
            assert_eq!(answer.status(), 200, "{row}");
            let org = answer.extensions().get::<Stamp>().unwrap().org.clone().unwrap();
            *by.entry((org.name().to_owned(), if id % 2 == 0 { OLD } else { NEW })).or_default() += 1;
        }
        let served = |org: &str, model| by.get(&(org.to_owned(), model)).copied().unwrap_or(0);
        for model in [OLD, NEW] {
            assert_eq!(served("a", model) + served("b", model), 200, "{row}: {model}");
            assert_eq!(served("a", model) == 0, only_b.contains(&model), "{row}: {model}: {by:?}");
        }
        let refused = wire.lock().unwrap().iter().filter(|(.., refused)| *refused).count();
        assert!((only_b.len()..=only_b.len() * 10).contains(&refused), "{row}: {refused} refused");
        let a = orgs.get("a").unwrap().family(&Family::new(SONNET));
        assert_eq!((a.is_out(), orgs.get("a").unwrap().is_out()), (out, false), "{row}");
    }
}
