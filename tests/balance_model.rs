//! The balancer against a plain reference: 120,000 random steps, and a stress on real threads.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support_balance;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use support_balance::{Balance, Broken, Call, Desk, Hand, Req, answer};
use tokio_test::task;
use tower::{Layer, Service, service_fn};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    balance::OrgBalanceLayer,
    call::CallMemory,
    org::{Drained, Family, Org, Orgs, OutReason},
    outcome::{Class, Stamp},
};

const STEPS: usize = 120_000;
const STEPS_A_RUN: usize = 2_000;
const FAMILIES: [&str; 2] = ["sonnet", "haiku"];
/// Of either family; the first call of a request that names its family alone.
const MODELS: [&str; 3] = ["", "1", "2"];
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
/// How often a younger call may go first while an older one is awake: two are called at a time, and come in any order.
const OVERTAKEN_MOST: usize = 60;

/// What the reference knows of one call.
struct Known {
    call: Call,
    family: usize,
    model: usize,
    memory: Option<CallMemory>,
    retried: bool,
    /// Is not polled, whatever wakes it.
    asleep: bool,
    /// Its last poll was pending, and it had no org.
    in_line: bool,
    overtaken: usize,
}

struct World {
    rng: fastrand::Rng,
    desk: Desk,
    balance: Balance,
    max_unbound: usize,
    names: Vec<&'static str>,
    /// Org and family: the hand, and whether the member is shut, with the calls it had by then.
    members: BTreeMap<(usize, usize), (Hand, Option<usize>)>,
    /// Org and family.
    out: BTreeSet<(usize, usize)>,
    /// Org, family and model.
    refused: BTreeSet<(usize, usize, usize)>,
    disabled: BTreeSet<usize>,
    removed: BTreeSet<usize>,
    drains: Vec<(usize, task::Spawn<Drained>)>,
    calls: BTreeMap<u32, Known>,
    next: u32,
    ended: BTreeMap<&'static str, usize>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        fastrand::seed(seed);
        let names: Vec<_> = NAMES[..rng.usize(1..=NAMES.len())].to_vec();
        let desk = Desk::new(&names, 1);
        let max_unbound = rng.usize(1..40);
        let balance = desk.balance_with(max_unbound);
        let mut members = BTreeMap::new();
        for (org, name) in names.iter().enumerate() {
            for (family, label) in FAMILIES.into_iter().enumerate() {
                let hand = desk.hand_of(name, label);
                hand.slots(rng.usize(0..4));
                if rng.bool() {
                    hand.greedy();
                }
                members.insert((org, family), (hand, None));
            }
        }
        World {
            rng,
            desk,
            balance,
            max_unbound,
            names,
            members,
            out: BTreeSet::new(),
            refused: BTreeSet::new(),
            disabled: BTreeSet::new(),
            removed: BTreeSet::new(),
            drains: vec![],
            calls: BTreeMap::new(),
            next: 0,
            ended: BTreeMap::new(),
        }
    }

    fn hand(&mut self) -> Hand {
        let at = (self.rng.usize(..self.names.len()), self.rng.usize(..FAMILIES.len()));
        self.members[&at].0.clone()
    }

    fn some_call(&mut self, fits: impl Fn(&Known) -> bool) -> Option<u32> {
        let ids: Vec<u32> = self.calls.iter().filter(|(_, known)| fits(known)).map(|(id, _)| *id).collect();
        self.rng.choice(ids)
    }

    fn is_bound(&self, id: u32) -> Option<(usize, usize)> {
        self.members.iter().find(|(_, (hand, _))| hand.has(id)).map(|(at, _)| *at)
    }

    /// Calls that count at the gate.
    fn unbound(&self) -> usize {
        self.calls.iter().filter(|(id, known)| !known.retried && self.is_bound(**id).is_none()).count()
    }

    fn model(family: usize, model: usize) -> String {
        format!("{}-{}", FAMILIES[family], MODELS[model])
    }

    fn request(id: u32, family: usize, model: usize, memory: Option<&CallMemory>) -> Req {
        let mut request = Request::new(id);
        let family = match model {
            0 => Family::new(FAMILIES[family]),
            _ => Family::of_model(&Self::model(family, model)),
        };
        request.extensions_mut().insert(family);
        if let Some(memory) = memory {
            request.extensions_mut().insert(memory.clone());
        }
        request
    }

    fn gate_is_open(&self) -> bool {
        let mut instance = task::spawn(self.balance.clone());
        match instance.enter(|cx, mut balance| Service::<Req>::poll_ready(&mut *balance, cx)) {
            Poll::Ready(ready) => {
                ready.expect("readiness never fails");
                true
            }
            Poll::Pending => false,
        }
    }

    fn arrive(&mut self) {
        if self.unbound() >= self.max_unbound {
            return;
        }
        let (id, family) = (self.next, self.rng.usize(..FAMILIES.len()));
        let model = self.rng.usize(..MODELS.len());
        self.next += 1;
        let memory = self.rng.bool().then(CallMemory::new);
        let call = task::spawn(self.balance.clone().call(Self::request(id, family, model, memory.as_ref())));
        let asleep = self.rng.u8(..8) == 0 && self.asleep(family) == 0;
        let known = Known { call, family, model, memory, retried: false, asleep, in_line: false, overtaken: 0 };
        self.calls.insert(id, known);
        if !asleep {
            self.poll(id);
        }
    }

    fn asleep(&self, family: usize) -> usize {
        self.calls.values().filter(|known| known.family == family && known.asleep).count()
    }

    /// How often the call has failed at each org.
    fn failures(&self, id: u32) -> Vec<u32> {
        let tried = self.calls[&id].memory.as_ref().map(CallMemory::tried).unwrap_or_default();
        let of = |name: &&str| tried.iter().filter(|t| t.org.name() == *name).map(|t| t.failures).sum();
        self.names.iter().map(of).collect()
    }

    fn allows(&self, at: (usize, usize), model: usize) -> bool {
        !self.refused.contains(&(at.0, at.1, model))
    }

    /// Members with a slot that have not failed the call, and how often each was asked; none where others wait, who go first.
    fn untried_and_free(&self, id: u32, failures: &[u32]) -> Vec<((usize, usize), usize)> {
        let family = self.calls[&id].family;
        if self.calls.iter().any(|(other, known)| *other != id && known.family == family && known.in_line) {
            return vec![];
        }
        let of_family = self.members.iter().filter(|((_, of), _)| *of == family);
        let model = self.calls[&id].model;
        // Whose health is low is junk, for which nobody yields.
        let health = |org: usize| self.desk.org(self.names[org]).family(&Family::new(FAMILIES[family])).health();
        let allowed = of_family.filter(|(at, _)| self.allows(**at, model) && health(at.0) >= 0.5);
        let free = allowed.filter(|((org, _), (hand, shut))| failures[*org] == 0 && shut.is_none() && hand.free() > 0);
        free.map(|(at, (hand, _))| (*at, hand.counts().polls)).collect()
    }

    fn poll(&mut self, id: u32) {
        let bound_before = self.is_bound(id);
        let failures = self.failures(id);
        let untried = self.untried_and_free(id, &failures);
        let known = self.calls.get_mut(&id).unwrap();
        let (family, model) = (known.family, known.model);
        let polled = known.call.poll();
        let bound = self.is_bound(id);
        if let (None, Some((org, of))) = (bound_before, bound) {
            assert_eq!(of, family, "call {id} is with another family");
            assert!(self.members[&(org, of)].1.is_none(), "call {id} went to an org that is shut");
            assert!(self.allows((org, of), model), "call {id} went to an org that refuses its model");
            if failures[org] >= 2 {
                for (at, polls) in untried {
                    let asked = self.members[&at].0.counts().polls > polls;
                    assert!(asked, "call {id} went to {org}, which failed it twice, before {at:?}");
                }
                self.ended("failed twice, and nobody else had a slot");
            } else if failures.iter().any(|failures| *failures >= 2) {
                self.ended("failed twice, and went to another");
            }
            for (other, known) in &mut self.calls {
                let might = !self.refused.contains(&(org, of, known.model));
                if *other < id && known.family == family && known.in_line && !known.asleep && might {
                    known.overtaken += 1;
                    assert!(known.overtaken <= OVERTAKEN_MOST, "call {other} is overtaken again and again");
                }
            }
        }
        let known = self.calls.get_mut(&id).unwrap();
        known.in_line = polled.is_pending() && bound.is_none();
        let Poll::Ready(answer) = polled else { return };
        let mut known = self.calls.remove(&id).unwrap();
        match answer {
            Ok(response) => {
                let (org, _) = bound_before.expect("an answer comes from an org");
                let stamp = response.extensions().get::<Stamp>().unwrap();
                assert_eq!(stamp.org.as_ref().unwrap().name(), self.names[org]);
                assert_eq!(*response.body(), id);
                self.ended("answered");
                if response.status() != 200 && known.memory.is_some() {
                    self.ended("retried");
                    let request = Self::request(id, family, model, known.memory.as_ref());
                    known.call = task::spawn(self.balance.clone().call(request));
                    (known.retried, known.overtaken) = (true, 0);
                    self.calls.insert(id, known);
                    self.poll(id);
                }
            }
            Err(error) if error.class() == Class::NoOrg => {
                assert!(self.none_left(family, model), "call {id}: {error}");
                self.ended("without an org");
            }
            Err(error) => {
                assert_eq!(error.class(), Class::Transport);
                assert!(error.org().is_some());
                self.ended("failed");
            }
        }
    }

    fn ended(&mut self, how: &'static str) {
        *self.ended.entry(how).or_default() += 1;
    }

    fn none_left(&self, family: usize, model: usize) -> bool {
        let gone = |org| {
            let at = (org, family);
            self.removed.contains(&org) || self.out.contains(&at) || !self.allows(at, model)
        };
        (0..self.names.len()).all(gone)
    }

    /// Polls whoever is awake and woken, in any order, until nobody is.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            let Some(id) = self.some_call(|known| !known.asleep && known.call.is_woken()) else { return };
            self.poll(id);
        }
        panic!("it never comes to rest");
    }

    /// Some member, and its org as it is now.
    fn some_member(&mut self) -> Option<(usize, Org)> {
        let org = self.rng.usize(..self.names.len());
        Some((org, self.balance.members().get(self.names[org])?))
    }

    fn put_out(&mut self) {
        let family = self.rng.usize(..FAMILIES.len());
        let Some((org, handle)) = self.some_member() else { return };
        if self.rng.bool() {
            handle.put_out(OutReason::OutOfQuota);
            self.out.extend((0..FAMILIES.len()).map(|family| (org, family)));
        } else {
            handle.family(&Family::new(FAMILIES[family])).put_family_out(OutReason::Unauthorised);
            self.out.insert((org, family));
        }
        self.shut();
    }

    fn refuse(&mut self) {
        let (family, model) = (self.rng.usize(..FAMILIES.len()), self.rng.usize(1..MODELS.len()));
        let Some((org, handle)) = self.some_member() else { return };
        handle.family(&Family::new(FAMILIES[family])).put_model_out(&Self::model(family, model));
        self.refused.insert((org, family, model));
        self.ended("refused a model");
    }

    /// Notes the calls of whoever has been shut, and forgets them of whoever was opened.
    fn shut(&mut self) {
        for (at @ (org, _), (hand, shut)) in &mut self.members {
            let is_shut = self.out.contains(at) || self.disabled.contains(org) || self.removed.contains(org);
            *shut = is_shut.then(|| shut.unwrap_or(hand.counts().calls));
        }
    }

    fn change_the_pool(&mut self) {
        let members = self.balance.members();
        let org = self.rng.usize(..self.names.len());
        let name = self.names[org];
        let known = members.get(name).is_some();
        assert_eq!(known, !self.removed.contains(&org));
        match self.rng.u8(..8) {
            0..3 => {
                assert_eq!(members.disable(name).is_ok(), known);
                self.disabled.extend(known.then_some(org));
            }
            3 => {
                if let Ok(drained) = members.drain(name) {
                    let mut drained = task::spawn(drained);
                    self.disabled.insert(org);
                    if drained.poll().is_pending() {
                        self.drains.push((org, drained));
                    }
                }
            }
            4..6 => {
                assert_eq!(members.enable(name).is_ok(), known);
                if known {
                    self.disabled.remove(&org);
                    self.out.retain(|(other, _)| *other != org);
                    self.refused.retain(|(other, ..)| *other != org);
                }
            }
            6 if self.rng.bool() => {
                assert_eq!(members.remove(name).is_ok(), known);
                self.removed.insert(org);
                self.drains.retain(|(other, _)| *other != org);
            }
            _ => {
                assert_eq!(members.add(Org::new(name)).is_ok(), !known);
                if !known {
                    self.removed.remove(&org);
                    self.disabled.remove(&org);
                    self.out.retain(|(other, _)| *other != org);
                    self.refused.retain(|(other, ..)| *other != org);
                }
            }
        }
        self.shut();
    }

    /// A drain is over once nothing is in flight, and it is woken for that.
    fn check_drains(&mut self) {
        let drains = std::mem::take(&mut self.drains);
        for (org, mut drain) in drains {
            let flying: usize =
                self.members.range((org, 0)..(org + 1, 0)).map(|(_, (hand, _))| hand.in_flight().len()).sum();
            let over = !self.disabled.contains(&org) || flying == 0;
            assert!(drain.is_woken() || !over, "nobody has told that {} is drained", self.names[org]);
            if drain.is_woken() && drain.poll().is_ready() {
                assert!(over, "{} of {} are in flight", flying, self.names[org]);
                self.ended(if flying == 0 { "drained" } else { "enabled first" });
            } else {
                assert!(!over);
                self.drains.push((org, drain));
            }
        }
    }

    fn step(&mut self) {
        match self.rng.u32(..1_000) {
            0..300 => self.arrive(),
            300..360 => {
                let Some(id) = self.some_call(|_| true) else { return };
                drop(self.calls.remove(&id));
            }
            360..430 => {
                let Some(id) = self.some_call(|_| true) else { return };
                self.calls.get_mut(&id).unwrap().asleep = false;
                self.poll(id);
            }
            430..460 => {
                let Some(id) = self.some_call(|known| !known.asleep) else { return };
                let family = self.calls[&id].family;
                if self.asleep(family) < 3 {
                    self.calls.get_mut(&id).unwrap().asleep = true;
                }
            }
            460..500 => {
                // Wakes up, and is polled if it was woken meanwhile.
                let Some(id) = self.some_call(|known| known.asleep) else { return };
                let known = self.calls.get_mut(&id).unwrap();
                known.asleep = false;
                if !known.in_line {
                    self.poll(id);
                }
            }
            500..800 => {
                let hand = self.hand();
                let Some(id) = self.rng.choice(hand.in_flight()) else { return };
                match self.rng.u8(..6) {
                    0 => hand.end(id, Err(Broken("reset"))),
                    1 => hand.answer(id, 503),
                    2 if self.calls.get(&id).is_some_and(|known| known.retried) => hand.answer(id, 500),
                    _ => hand.answer(id, 200),
                }
            }
            800..880 => {
                let slots = self.rng.usize(0..5);
                self.hand().slots(slots);
            }
            880..940 => {
                let held = self.rng.u8(..3) == 0;
                self.hand().held(held);
            }
            940..970 => self.hand().ring(),
            970..980 => {
                let rings = self.rng.usize(1..5);
                self.hand().ring_while_polled(rings);
            }
            980..985 => {
                self.hand().fail(1);
            }
            985..996 => self.change_the_pool(),
            996..999 => self.refuse(),
            // Twice in a run or so.
            _ => self.put_out(),
        }
    }

    fn check(&self) {
        for (at, (hand, shut)) in &self.members {
            let (used, flying) = (hand.used(), hand.in_flight().len());
            let waits = self.calls.values().any(|known| known.family == at.1 && known.in_line);
            assert!(used - flying <= usize::from(waits), "{at:?} keeps {} slots for nobody", used - flying);
            if !waits {
                assert_eq!((hand.registered(), hand.tokens()), (0, 0), "{at:?} waits for nobody");
            }
            let most = usize::from(!self.removed.contains(&at.0));
            assert!(hand.counts().instances <= most, "{at:?}: one instance each, once its family is asked for");
            if let Some(calls) = shut {
                assert_eq!(hand.counts().calls, *calls, "{at:?} was called after it was shut");
            }
            if self.disabled.contains(&at.0) || self.removed.contains(&at.0) {
                assert_eq!(
                    (used - flying, hand.registered(), hand.tokens()),
                    (0, 0, 0),
                    "{at:?} waits though disabled"
                );
            }
        }
        for family in 0..FAMILIES.len() {
            if self.asleep(family) > 1 {
                continue;
            }
            let waiting = self.calls.iter();
            let waiting = waiting.filter(|(_, known)| known.family == family && known.in_line && !known.asleep);
            for (id, known) in waiting {
                assert!(!self.none_left(family, known.model), "{id} waits for orgs that are all out for it");
                for (at, (hand, shut)) in &self.members {
                    let free = at.1 == family && shut.is_none() && hand.free() > 0 && self.allows(*at, known.model);
                    assert!(!free, "{id} waits while {at:?} has {} free", hand.free());
                }
            }
        }
        assert_eq!(self.gate_is_open(), self.unbound() < self.max_unbound, "{} are unbound", self.unbound());
    }

    /// Whoever sleeps wakes up, everybody is answered, and everything is returned.
    fn finish(&mut self) {
        for known in self.calls.values_mut() {
            known.asleep = false;
        }
        for name in &self.names {
            let members = self.balance.members();
            if members.enable(name).is_err() {
                members.add(Org::new(name)).unwrap();
            }
        }
        (self.out, self.disabled, self.removed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        self.refused.clear();
        self.shut();
        for (hand, _) in self.members.values() {
            hand.fail(0).ring_while_polled(0).held(false).slots(2);
        }
        let all: Vec<u32> = self.calls.keys().copied().collect();
        for id in all {
            if self.calls.contains_key(&id) {
                self.poll(id);
            }
        }
        self.settle();
        while !self.calls.is_empty() {
            self.check();
            let before = self.calls.len();
            let hands: Vec<Hand> = self.members.values().map(|(hand, _)| hand.clone()).collect();
            for hand in hands {
                for id in hand.in_flight() {
                    hand.answer(id, 200);
                }
            }
            self.settle();
            assert!(self.calls.len() < before, "{before} calls, and none ends");
        }
        self.check();
        self.check_drains();
        self.desk.assert_at_rest();
    }
}

#[test]
fn whatever_happens_nobody_waits_for_what_is_free_and_everything_is_returned() {
    let mut ended: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in 0..(STEPS / STEPS_A_RUN) as u64 {
        let mut world = World::new(seed);
        for step in 0..=STEPS_A_RUN {
            let ran = catch_unwind(AssertUnwindSafe(|| {
                if step == STEPS_A_RUN {
                    world.finish();
                } else {
                    world.step();
                    world.settle();
                    world.check();
                    world.check_drains();
                }
            }));
            if let Err(panic) = ran {
                eprintln!("seed {seed}, step {step} of {STEPS_A_RUN}");
                resume_unwind(panic);
            }
        }
        for (how, count) in world.ended {
            *ended.entry(how).or_default() += count;
        }
    }
    // The walk has been everywhere.
    for how in [
        "answered",
        "retried",
        "without an org",
        "failed",
        "drained",
        "failed twice, and went to another",
        "failed twice, and nobody else had a slot",
    ] {
        assert!(ended.get(how).copied().unwrap_or(0) > 25, "{ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_real_threads_every_call_is_answered_and_everything_is_returned() {
    const TASKS: u32 = 100;
    const CALLS: u32 = 200;
    let orgs = Orgs::new([("a", 1), ("b", 2), ("c", 5)].map(|(name, cap)| Org::new(name).cap(cap))).unwrap();
    let (alive, peak, calls) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (of_alive, of_peak, of_calls) = (alive.clone(), peak.clone(), calls.clone());
    let settings = Settings::builder().start(1.0).build().unwrap();
    let layer = OrgBalanceLayer::new(orgs.clone(), move |org: &Org, ()| {
        let (alive, peak, calls) = (of_alive.clone(), of_peak.clone(), of_calls.clone());
        let wire = service_fn(move |request: Request<u32>| {
            struct Alive(Arc<AtomicUsize>);
            impl Drop for Alive {
                fn drop(&mut self) {
                    self.0.fetch_sub(1, SeqCst);
                }
            }
            calls.fetch_add(1, SeqCst);
            peak.fetch_max(alive.fetch_add(1, SeqCst) + 1, SeqCst);
            let alive = Alive(alive.clone());
            async move {
                for _ in 0..fastrand::u8(..4) {
                    tokio::task::yield_now().await;
                }
                drop(alive);
                Ok::<_, Infallible>(answer(*request.body(), if fastrand::u8(..10) == 0 { 500 } else { 200 }))
            }
        });
        AimdLimitLayer::with_settings(org, &settings).release_at_head().layer(wire)
    });
    let balance = layer.max_unbound(40).unwrap().layer(());
    let tasks: Vec<_> = (0..TASKS)
        .map(|caller| {
            let mut balance = balance.clone();
            tokio::spawn(async move {
                let mut answered = 0;
                for n in 0..CALLS {
                    let id = caller * CALLS + n;
                    std::future::poll_fn(|cx| Service::<Request<u32>>::poll_ready(&mut balance, cx)).await.unwrap();
                    let mut call = Box::pin(balance.call(Request::new(id)));
                    if fastrand::u8(..4) == 0 {
                        // Polled a few times, or never, and given up.
                        for _ in 0..fastrand::u8(..3) {
                            let polled = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
                            if polled.is_ready() {
                                break;
                            }
                            tokio::task::yield_now().await;
                        }
                    } else {
                        let response: Response<u32> = call.await.unwrap();
                        assert_eq!(*response.body(), id);
                        answered += 1;
                    }
                }
                answered
            })
        })
        .collect();
    let mut answered = 0;
    for task in tasks {
        // No measure of speed: it turns a lost wake-up into a failure.
        let done = tokio::time::timeout(Duration::from_secs(60), task).await;
        answered += done.expect("a call waits for ever").unwrap();
    }
    assert!(answered > TASKS * CALLS / 2);
    assert_eq!(alive.load(SeqCst), 0);
    assert!(peak.load(SeqCst) <= 8, "{} at once, of 8 slots", peak.load(SeqCst));
    assert!(calls.load(SeqCst) >= answered as usize);
    for org in &orgs {
        let snapshot = org.snapshot();
        assert_eq!((snapshot.in_flight, snapshot.waiting), (0, 0), "{}", org.name());
    }
}
