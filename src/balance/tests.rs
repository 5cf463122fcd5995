//! A pool of five in plain code: whom the pick finds for a call's third attempt, where most orgs are junk.
//!
//! Members answer after a second, well or not by chance, and have ten slots each. Their health is the moving average of how
//! their answers were; what it lacks, and the penalty for failures, goes by itself as it does on a board. Five failures in a row
//! open a circuit, after which one call at a time probes.

use std::{cell::Cell, cmp::Reverse, collections::BinaryHeap, collections::VecDeque};

use super::pick::{Ranked, Tier, pick};

const SLOTS: usize = 10;
/// The chance of each member to answer, and calls a second: with their retries the good ones are at 70 % of their slots.
const FIVE: (&[f64], f64) = (&[0.9, 0.85, 0.1, 0.1, 0.05], 12.2);
/// How much one answer counts in a member's health.
const WEIGHT: f64 = 0.15;
const ATTEMPTS: usize = 5;

/// What becomes of a member that failed the call twice.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Law {
    /// As built: it yields to another that is half as well or better, ranks before junk, and is asked where it alone is ready.
    AsBuilt,
    /// The same, but the call waits where it alone is ready.
    Waits,
    /// It yields to nobody.
    Never,
}

#[derive(Default)]
struct Member {
    busy: usize,
    /// What it lacks, and the penalty, as of a time.
    lacks: Cell<f64>,
    penalty: Cell<f64>,
    at: Cell<f64>,
    failed_in_a_row: u32,
    /// How often in a row the circuit has opened, and until when it is.
    opened: i32,
    open_until: f64,
}

impl Member {
    fn age(&self, now: f64) {
        let age = now - self.at.replace(now);
        self.lacks.set(self.lacks.get() * (-age / 10.0).exp2());
        self.penalty.set(self.penalty.get() * (-age).exp2());
    }

    fn health(&self, now: f64) -> f64 {
        self.age(now);
        1.0 - self.lacks.get()
    }

    fn load(&self, now: f64) -> f64 {
        self.age(now);
        (self.busy as f64 + 1.0) / SLOTS as f64 + self.penalty.get()
    }

    fn answered(&mut self, now: f64, well: bool) {
        self.age(now);
        let lack = if well { 0.0 } else { 1.0 };
        self.lacks.set(self.lacks.get() + WEIGHT * (lack - self.lacks.get()));
        self.penalty.set(if well { self.penalty.get() } else { (self.penalty.get() + 1.0).min(16.0) });
        self.busy -= 1;
        if well {
            (self.failed_in_a_row, self.opened) = (0, 0);
            return;
        }
        self.failed_in_a_row += 1;
        if self.failed_in_a_row >= 5 && now >= self.open_until {
            self.open_until = now + (0.5 * 2f64.powi(self.opened)).min(4.0);
            self.opened += 1;
        }
    }

    fn has_slot(&self, now: f64) -> bool {
        now >= self.open_until && self.busy < if self.opened > 0 { 1 } else { SLOTS }
    }
}

#[derive(Clone, Default)]
struct Call {
    attempts: usize,
    failures: [u32; 5],
    /// Some calls are such that a member fails them whenever it is asked.
    hates: Option<usize>,
}

enum Event {
    Comes(Call),
    Answers { member: usize, call: Call },
}

#[derive(Debug, Default)]
struct Seen {
    third: usize,
    third_answered: usize,
    /// The part of the seconds that good slots were in use.
    good_busy: f64,
}

struct Pool {
    law: Law,
    rng: fastrand::Rng,
    success: &'static [f64],
    members: Vec<Member>,
    line: VecDeque<Call>,
    events: BinaryHeap<Reverse<(u64, usize)>>,
    pending: Vec<Option<Event>>,
    seen: Seen,
}

impl Pool {
    fn after(&mut self, now: f64, wait: f64, event: Event) {
        self.pending.push(Some(event));
        self.events.push(Reverse((((now + wait) * 1e9) as u64, self.pending.len() - 1)));
    }

    /// The member that the call gets now.
    fn pick(&self, call: &Call, now: f64) -> Option<usize> {
        let health = |i: usize| self.members[i].health(now);
        let untried = (0..self.members.len()).filter(|i| call.failures[*i] == 0);
        let best = untried.map(health).reduce(f64::max);
        let tier = |i: usize| {
            let failures = if self.law == Law::Never { 0 } else { call.failures[i] };
            Tier::of(health(i), failures, || best)
        };
        let mut ranked = Ranked::of(self.members.len(), |i| self.members[i].has_slot(now).then(|| tier(i)));
        let picked = pick(ranked.best(), |i| self.members[i].load(now))?;
        if self.law == Law::Waits && tier(picked) == Tier::Demoted {
            return None;
        }
        ranked.remove(picked);
        Some(picked)
    }

    fn bind(&mut self, now: f64) {
        for _ in 0..self.line.len() {
            let Some(call) = self.line.pop_front() else { return };
            match self.pick(&call, now) {
                Some(member) => {
                    self.members[member].busy += 1;
                    self.after(now, 1.0, Event::Answers { member, call });
                }
                None => self.line.push_back(call),
            }
        }
    }

    fn answers(&mut self, now: f64, member: usize, mut call: Call) {
        let well = call.hates != Some(member) && self.rng.f64() < self.success[member];
        self.members[member].answered(now, well);
        call.attempts += 1;
        self.seen.good_busy += if self.success[member] > 0.5 { 1.0 } else { 0.0 };
        if call.attempts == 3 {
            self.seen.third += 1;
            self.seen.third_answered += usize::from(well);
        }
        if !well {
            call.failures[member] += 1;
            if call.attempts < ATTEMPTS {
                let backoff = self.rng.f64() * 0.5 * 2f64.powi(call.attempts as i32 - 1);
                self.after(now, backoff, Event::Comes(call));
            }
        }
    }

    fn run((success, calls_a_second): (&'static [f64], f64), law: Law, hated: f64, seed: u64) -> Seen {
        fastrand::seed(seed);
        let rng = fastrand::Rng::with_seed(seed);
        let mut pool = Pool {
            law,
            rng,
            success,
            members: success.iter().map(|_| Member::default()).collect(),
            line: VecDeque::new(),
            events: BinaryHeap::new(),
            pending: vec![],
            seen: Seen::default(),
        };
        let seconds = 1_000.0;
        let mut comes = 0.0;
        while comes < seconds {
            let hates = (pool.rng.f64() < hated).then(|| pool.rng.usize(..2));
            pool.after(comes, 0.0, Event::Comes(Call { hates, ..Call::default() }));
            comes += -(1.0 - pool.rng.f64()).ln() / calls_a_second;
        }
        while let Some(Reverse((at, which))) = pool.events.pop() {
            let now = at as f64 / 1e9;
            match pool.pending[which].take() {
                Some(Event::Comes(call)) => pool.line.push_back(call),
                Some(Event::Answers { member, call }) => pool.answers(now, member, call),
                None => unreachable!("an event happens once"),
            }
            pool.bind(now);
        }
        let good = success.iter().filter(|chance| **chance > 0.5).count();
        pool.seen.good_busy /= (good * SLOTS) as f64 * seconds;
        pool.seen
    }
}

/// The part of third attempts that is answered, over some runs. `hated` of the calls are such that one good member always fails
/// them.
fn thirds(pool: (&'static [f64], f64), law: Law, hated: f64) -> f64 {
    let seen: Vec<_> = (0..5).map(|seed| Pool::run(pool, law, hated, seed)).collect();
    let busy: f64 = seen.iter().map(|seen| seen.good_busy).sum::<f64>() / seen.len() as f64;
    assert!((0.67..0.78).contains(&busy), "the good are at {busy} of their slots");
    let (third, answered) = seen.iter().fold((0, 0), |(a, b), seen| (a + seen.third, b + seen.third_answered));
    assert!(third > 100, "{third} third attempts");
    answered as f64 / third as f64
}

#[test]
fn third_attempts_in_a_pool_of_mostly_junk_are_answered() {
    let built = thirds(FIVE, Law::AsBuilt, 0.0);
    assert!(built >= 0.8, "{built} of the third attempts");
    // Where all failures are of chance, waiting for the other one would gain nothing.
    let waits = thirds(FIVE, Law::Waits, 0.0);
    assert!((built - waits).abs() < 0.05, "{built}, and {waits} if they waited");
}

#[test]
fn a_call_that_one_member_always_fails_is_sent_to_another() {
    let (built, never) = (thirds(FIVE, Law::AsBuilt, 0.1), thirds(FIVE, Law::Never, 0.1));
    assert!(built > never + 0.01, "{built} of the third attempts, and {never} if nobody yielded");
}
