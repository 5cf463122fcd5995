//! The slots of one limit, and the permit that is one of them.

use std::sync::Arc;

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
}

pub(crate) type SlotGate = Gate<Slots>;

pub(crate) fn slots(org: &Org, settings: &Settings) -> Arc<SlotGate> {
    let law = Law::new(settings.clone(), settings.caps.of(org), fastrand::Rng::new());
    org.write_limit(law.cell(), law.hold(), []);
    Gate::new(Slots { law, in_flight: 0, org: org.clone() })
}

impl Admission for Slots {
    type Grant = Admitted;

    fn admit(&mut self, now: Instant) -> Option<Admitted> {
        if self.in_flight >= self.law.slots(now) {
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
                slots.org.write_limit(slots.law.cell(), slots.law.hold(), slots.law.changes());
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
        self.gate.update(|slots, _| {
            slots.in_flight -= 1;
            slots.org.write_in_flight(slots.in_flight);
        });
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit").field("epoch", &self.admitted.epoch).finish_non_exhaustive()
    }
}
