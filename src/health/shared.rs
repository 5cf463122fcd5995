//! What all services of one layer share: the circuit behind a gate, what the board is told of it, and the pass that a call
//! carries.

use std::sync::{
    Arc,
    atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use tokio::time::Instant;

use super::{
    Breaker,
    law::{Admitted, Law, Made, Verdict},
};
use crate::{
    gate::{Admission, Gate},
    observe::Event,
    org::{Circuit, Hold, HoldReason, Org, OutReason},
    outcome::{Class, Ended, Out, Outcome},
};

/// The weight of the last answer in the score. Five failures in a row, which open a circuit, leave 0.44: less than half, so that
/// others are preferred, and half again by itself in two seconds.
const WEIGHT: f64 = 0.15;
/// What is so near to 1 is 1.
const NEAR: f64 = 0.99;
/// The least after a good probe: it may be asked like others.
const PROVED: f64 = 0.5;

/// What a failure adds to the penalty: the first since the last success, the second, and any further one. Who has only failed of
/// late is asked ever more rarely, until its circuit opens; who fails now and then is hardly ever in a second row.
const PENALTIES: [f64; 3] = [1.0, 2.0, 4.0];

/// No call may pass unasked.
const SHUT: u64 = 1;
/// A call failed not long ago: successes are news too.
const TROUBLED: u64 = 2;
/// The epoch stands above these.
const EPOCH: u32 = 2;

/// What a call of a healthy org looks at instead of the circuit.
struct Word {
    state: AtomicU64,
    /// Successes that nobody has looked at.
    well: AtomicU64,
}

pub(crate) struct State {
    law: Law,
    org: Org,
    word: Arc<Word>,
    /// When those successes were last looked at.
    looked: Instant,
    troubled: bool,
    /// Failures since the last success.
    row: u32,
}

impl State {
    /// What is said after every change.
    fn write(&self) {
        let flags = u64::from(self.troubled) * TROUBLED + u64::from(!self.law.is_closed()) * SHUT;
        self.word.state.store(self.law.epoch() << EPOCH | flags, Release);
    }

    fn write_circuit(&self) {
        self.write();
        self.org.write_circuit(self.law.circuit(), self.law.parked());
    }

    fn score(&mut self, now: Instant, change: impl FnOnce(f64) -> f64) {
        let health = change(self.org.health_at(|| now));
        self.troubled = health < NEAR;
        self.org.write_health(if self.troubled { health } else { 1.0 });
    }

    fn answered(&mut self, call: Admitted, verdict: Verdict, date: Option<Instant>, now: Instant) -> Option<Told> {
        let unseen = self.word.well.swap(0, Relaxed);
        if unseen > 0 {
            self.law.succeeded(unseen, self.looked, now);
            self.row = 0;
        }
        self.looked = now;
        let parked = date.and_then(|date| self.law.park(call, date, now));
        // Itself is among them still.
        let others = self.org.in_flight().saturating_sub(1);
        let made = if parked.is_some() { Made::Nothing } else { self.law.answered(call, verdict, others, now) };
        self.law.give_back(call);
        let better = |health: f64| health + WEIGHT * (1.0 - health);
        let worse = |health: f64| health * (1.0 - WEIGHT);
        match made {
            Made::Nothing => {}
            Made::Succeeded => {
                self.row = 0;
                self.score(now, better);
                self.write();
            }
            Made::Failed => {
                self.org.add_penalty(PENALTIES[PENALTIES.len().min(self.row as usize + 1) - 1]);
                self.row = self.row.saturating_add(1);
                self.score(now, worse);
                self.write();
            }
            Made::Opened { .. } => {
                // The circuit keeps calls out, and a penalty would keep out the probe.
                self.org.lift_penalty();
                self.row = 0;
                self.score(now, worse);
                self.write_circuit();
            }
            Made::Closed { well } => {
                self.score(now, |health| if well { better(health) } else { health }.max(PROVED));
                self.write_circuit();
            }
        }
        if let Some(until) = parked {
            self.write_circuit();
            return Some(Told::Parked(until));
        }
        match made {
            Made::Opened { until, again } => Some(Told::Opened { until, again }),
            Made::Closed { .. } => Some(Told::Closed),
            _ => None,
        }
    }
}

impl Admission for State {
    type Grant = Admitted;

    fn admit(&mut self, now: Instant) -> Option<Admitted> {
        let admitted = self.law.admit(now)?;
        if admitted.first {
            self.write_circuit();
        }
        Some(admitted)
    }

    fn admits_by_time(&self, seen: Instant) -> bool {
        self.opens_by_time(seen)
    }

    fn free(&self, now: Instant) -> usize {
        self.law.free(now)
    }

    fn opens_at(&self, now: Instant) -> Option<Instant> {
        self.law.opens_at(now)
    }

    fn opens_by_time(&self, seen: Instant) -> bool {
        self.law.until().is_some_and(|until| seen < until)
    }

    // They are counted by the limiter, below which nobody waits for this.
    fn waiting(&mut self, _: usize) {}
}

/// What is to be told of under no lock.
#[derive(Clone, Copy)]
enum Told {
    Opened { until: Instant, again: bool },
    Probed,
    Closed,
    Parked(Instant),
}

pub(crate) struct Shared {
    pub(super) gate: Arc<Gate<State>>,
    word: Arc<Word>,
    org: Org,
}

impl Shared {
    pub(super) fn new(org: &Org, breaker: Box<dyn Breaker>) -> Arc<Self> {
        // What is written for a whole org is written for requests that name no family, and read back as such.
        let org = org.family(org.model_family());
        let word = Arc::new(Word { state: AtomicU64::new(0), well: AtomicU64::new(0) });
        let state = State {
            law: Law::new(breaker),
            org: org.clone(),
            word: word.clone(),
            looked: Instant::now(),
            troubled: false,
            row: 0,
        };
        Arc::new(Shared { gate: Gate::new(state), word, org })
    }

    /// A pass for the asking, while the circuit is closed.
    pub(super) fn pass(self: &Arc<Self>) -> Option<Pass> {
        let state = self.word.state.load(Acquire);
        (state & SHUT == 0).then(|| self.admitted(Admitted::closed(state >> EPOCH)))
    }

    /// The pass of one whom the gate has let through.
    pub(super) fn admitted(self: &Arc<Self>, admitted: Admitted) -> Pass {
        Pass { shared: self.clone(), admitted }
    }

    /// What is inside has failed at being ready: nothing was asked, so the circuit learns nothing, but others are preferred.
    pub(super) fn unready(&self, outcome: Outcome) {
        if Verdict::of(outcome.class) == Verdict::Failed {
            self.org.add_penalty(PENALTIES[0]);
        }
    }

    /// Counts a success of which there is nothing to say. False if there is.
    fn counted(&self) -> bool {
        let calm = self.word.state.load(Relaxed) & (SHUT | TROUBLED) == 0;
        if calm {
            self.word.well.fetch_add(1, Relaxed);
        }
        calm
    }

    /// Under no lock.
    fn tell(&self, told: Told) {
        let (org, name, family) = (&self.org, self.org.name(), self.org.model_family().as_str());
        let circuit = match told {
            Told::Opened { until, again } => {
                let wait = until.saturating_duration_since(Instant::now());
                if again {
                    tracing::debug!(org = name, family, ?wait, "circuit is open again: the probe failed");
                } else {
                    tracing::warn!(org = name, family, ?wait, "circuit is open: the org fails");
                }
                Circuit::Open { until }
            }
            Told::Probed => {
                tracing::debug!(org = name, family, "circuit is probed");
                Circuit::HalfOpen
            }
            Told::Closed => {
                tracing::info!(org = name, family, "circuit is closed: the org answers");
                Circuit::Closed
            }
            Told::Parked(until) => {
                let wait = until.saturating_duration_since(Instant::now());
                tracing::warn!(org = name, family, ?wait, "org is parked: its quota is used up until a date");
                return org.tell(&Event::Held { org: org.clone(), hold: Hold::new(until, HoldReason::OutOfQuota) });
            }
        };
        org.tell(&Event::Circuit { org: org.clone(), circuit });
    }
}

/// Leave to make one call, from `poll_ready` until its answer is read, or its stream has ended. Dropped without a report it
/// counts as neither success nor failure; a probe's place is given back.
pub(crate) struct Pass {
    shared: Arc<Shared>,
    admitted: Admitted,
}

impl Pass {
    /// Its call is under way. Who is ready may be so under a balancer's lock, where nobody can be told that it is a probe.
    pub(super) fn called(&mut self) {
        if std::mem::take(&mut self.admitted.first) {
            self.shared.tell(Told::Probed);
        }
    }

    /// Reports what the answer means, and of which model, where that is known.
    pub(super) fn report(mut self, outcome: Outcome, model: Option<Arc<str>>) {
        let verdict = Verdict::of(outcome.class);
        if verdict == Verdict::Well && !self.admitted.probe && self.shared.counted() {
            return;
        }
        self.put_out(outcome, model);
        let date = outcome.not_before.filter(|_| outcome.class == Class::OutOfQuota);
        let counts = matches!(verdict, Verdict::Well | Verdict::Failed) || date.is_some();
        if !counts && !self.admitted.probe {
            return;
        }
        let (call, admitted) = (self.admitted, &mut self.admitted);
        let told = self.shared.gate.update(|state, now| {
            let told = state.answered(call, verdict, date, now);
            // Given back with the report, but not by a breaker that has panicked.
            admitted.probe = false;
            told
        });
        if let Some(told) = told {
            self.shared.tell(told);
        }
    }

    /// Reports what a stream has proved to be. Whoever reads it may have dropped it, and then nobody knows.
    pub(super) fn ended(self, ended: &Ended, model: Option<Arc<str>>) {
        if let Some(outcome) = ended.outcome {
            self.report(outcome, model);
        }
    }

    /// Takes a dead org out: first, so that no probe follows.
    fn put_out(&self, outcome: Outcome, model: Option<Arc<str>>) {
        let org = &self.shared.org;
        match (outcome.class.implies().out, outcome.class) {
            (Out::No, _) => {}
            (Out::Model, _) => match model {
                Some(model) => org.put_model_out(&model),
                None => org.put_family_out(OutReason::Forbidden),
            },
            (Out::Org, Class::OutOfQuota) if outcome.not_before.is_some() => {}
            (Out::Org, Class::OutOfQuota) => org.put_out(OutReason::OutOfQuota),
            (Out::Org, _) => org.put_out(OutReason::Unauthorised),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.admitted.probe {
            self.shared.gate.update_by(|state, _| state.law.give_back(self.admitted));
        }
    }
}

impl std::fmt::Debug for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pass").field("probe", &self.admitted.probe).finish_non_exhaustive()
    }
}
