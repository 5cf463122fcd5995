//! The slots of one limit, and the permit that is one of them.

use std::{
    sync::{Arc, Weak},
    task::{Wake, Waker},
};

use tokio::time::Instant;

use super::{
    law::{Admitted, Law},
    settings::Settings,
};
use crate::{
    gate::{Admission, Gate},
    org::Org,
    outcome::Outcome,
};

pub(crate) struct Slots {
    law: Law,
    in_flight: usize,
    org: Org,
    /// Woken when the org is retuned.
    tuner: Option<Waker>,
}

pub(crate) type SlotGate = Gate<Slots>;

pub(crate) fn slots(org: &Org, settings: &Settings) -> Arc<SlotGate> {
    let law = Law::new(settings.clone(), settings.caps.of(org), fastrand::Rng::new());
    let gate = Gate::new(Slots { law, in_flight: 0, org: org.clone(), tuner: None });
    let tuner = Waker::from(Arc::new(Tuner(Arc::downgrade(&gate))));
    org.watch_tuning(&tuner);
    gate.update(|slots, now| {
        slots.tuner = Some(tuner);
        slots.retune(now);
    });
    gate
}

/// Brings what was tuned from the board to the law.
struct Tuner(Weak<SlotGate>);

impl Wake for Tuner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(gate) = self.0.upgrade() {
            gate.update(Slots::retune);
        }
    }
}

impl Slots {
    fn retune(&mut self, now: Instant) {
        self.law.retune(self.org.tuning(), now);
        self.write();
    }

    fn write(&mut self) {
        self.org.write_limit(self.law.cell(), self.law.hold(), self.law.changes());
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if let Some(tuner) = &self.tuner {
            self.org.unwatch_tuning(tuner);
        }
    }
}

impl Admission for Slots {
    type Grant = Admitted;

    fn admit(&mut self, now: Instant) -> Option<Admitted> {
        if self.law.free(self.in_flight, now) == 0 {
            return None;
        }
        self.in_flight += 1;
        self.org.write_in_flight(self.in_flight);
        Some(self.law.admitted(self.in_flight, now))
    }

    fn free(&self, now: Instant) -> usize {
        self.law.free(self.in_flight, now)
    }

    fn opens_at(&self, now: Instant) -> Option<Instant> {
        self.law.opens_at(self.in_flight, now)
    }

    fn waiting(&mut self, waiters: usize) {
        self.org.write_waiting(waiters);
    }
}

/// A slot, from `poll_ready` until the answer's body has ended: it owns the count, and the circumstances of its
/// admission, which the outcome is reported for. Dropped without a report, it counts as neither success nor overload.
pub struct Permit {
    gate: Arc<SlotGate>,
    admitted: Admitted,
}

impl Permit {
    pub(crate) fn new(gate: &Arc<SlotGate>, admitted: Admitted) -> Self {
        Permit { gate: gate.clone(), admitted }
    }

    /// Reports what the answer means, once.
    pub(crate) fn report(&self, outcome: Outcome) {
        let (moved, limit) = self.gate.update(|slots, now| {
            slots.law.quota_told(slots.org.quota_told());
            let moved = slots.law.answered(self.admitted, outcome, slots.in_flight, now);
            // The count of refusals is on the board too, also of those that moved nothing.
            if moved || outcome.class.implies().cuts {
                slots.write();
            }
            (moved, slots.law.limit())
        });
        if moved && outcome.class.implies().cuts {
            self.gate.read(|slots| {
                tracing::debug!(
                    org = slots.org.name(),
                    family = slots.org.model_family().as_str(),
                    limit,
                    hint = outcome.not_before.is_some(),
                    "throttled"
                );
            });
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let idle = self.gate.update(|slots, _| {
            slots.in_flight -= 1;
            slots.law.left(self.admitted);
            slots.org.write_in_flight(slots.in_flight).then(|| slots.org.clone())
        });
        if let Some(org) = idle {
            org.tell_idle();
        }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit").field("epoch", &self.admitted.epoch).finish_non_exhaustive()
    }
}
