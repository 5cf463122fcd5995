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
    gate::{Admission, Clock, Gate},
    observe::Event,
    org::{Hold, Org},
    outcome::{Outcome, Tail},
};

pub(crate) struct Slots {
    law: Law,
    in_flight: usize,
    org: Org,
    /// Woken when the org is retuned.
    tuner: Option<Waker>,
    /// The hold that observers were told of last.
    told: Option<Hold>,
}

pub(crate) type SlotGate = Gate<Slots>;

pub(crate) fn slots(org: &Org, settings: &Settings) -> Arc<SlotGate> {
    let law = Law::new(settings.clone(), settings.caps.of(org), fastrand::Rng::new());
    let gate = Gate::new(Slots { law, in_flight: 0, org: org.clone(), tuner: None, told: None });
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
            let news = gate.update(Slots::retune);
            news.tell();
        }
    }
}

impl Slots {
    fn retune(&mut self, now: Instant) -> News {
        self.law.retune(self.org.tuning(), now);
        self.write()
    }

    /// An answer was read. The limit, if a refusal moved it.
    fn report(&mut self, admitted: Admitted, outcome: Outcome, hidden: bool, clock: &mut Clock) -> (Option<f64>, News) {
        self.law.quota_told(self.org.quota_told());
        if self.law.counted(admitted, outcome) {
            return (None, News::default());
        }
        let moved = self.law.answered(admitted, outcome, hidden, self.in_flight, clock.read());
        let cuts = outcome.class.implies().cuts;
        // The count of refusals is on the board too, also of those that moved nothing.
        let news = if moved || cuts { self.write() } else { News::default() };
        ((moved && cuts).then(|| self.law.limit()), news)
    }

    /// A slot is free again. The org, if somebody waits for it to be idle.
    fn give_back(&mut self, admitted: Admitted) -> Option<Org> {
        self.in_flight -= 1;
        self.law.left(admitted);
        self.org.write_in_flight(self.in_flight).then(|| self.org.clone())
    }

    /// Writes it all on the board. What is new is for telling, under no lock.
    fn write(&mut self) -> News {
        let mut news = News::default();
        if self.org.is_observed() {
            let org = &self.org;
            news.0.extend(self.law.news().iter().map(|change| Event::Limit { org: org.clone(), change: *change }));
            let hold = self.law.hold().filter(|hold| self.told != Some(*hold));
            news.0.extend(hold.map(|hold| Event::Held { org: org.clone(), hold }));
            self.told = self.law.hold();
        }
        self.org.write_limit(self.law.cell(), self.law.hold(), self.law.changes());
        news
    }
}

/// What observers are to be told, under no lock.
#[derive(Default)]
struct News(Vec<Event>);

impl News {
    fn tell(self) {
        for event in self.0 {
            if let Event::Limit { org, .. } | Event::Held { org, .. } = &event {
                org.tell(&event);
            }
        }
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

    fn admits_by_time(&self, seen: Instant) -> bool {
        self.law.admits_by_time(self.in_flight, seen)
    }

    fn opens_by_time(&self, seen: Instant) -> bool {
        self.law.opens_by_time(seen)
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
    /// None once the slot is given back.
    gate: Option<Arc<SlotGate>>,
    admitted: Admitted,
}

/// What is to be done under no lock once an answer is reported, or a slot given back.
struct After {
    throttled: Option<f64>,
    news: News,
    idle: Option<Org>,
}

impl Permit {
    pub(crate) fn new(gate: &Arc<SlotGate>, admitted: Admitted) -> Self {
        Permit { gate: Some(gate.clone()), admitted }
    }

    /// Reports what the answer means, once, and keeps the slot. A refusal is by a `hidden` limit where no quota explains it.
    pub(crate) fn report(&self, outcome: Outcome, hidden: bool) {
        if let Some(gate) = &self.gate {
            report(gate, self.admitted, outcome, hidden);
        }
    }

    /// An answer that was well at its head is a refusal if its stream says so, however far it had come.
    pub(crate) fn report_at_the_end(&self, tail: &Tail) {
        let (Some(gate), admitted) = (self.gate.clone(), self.admitted) else { return };
        tail.on_end(move |ended| {
            if let Some(outcome) = ended.outcome.filter(|outcome| outcome.class.implies().cuts) {
                report(&gate, admitted, outcome, false);
            }
        });
    }

    /// Reports what the answer means and gives the slot back, in one.
    pub(crate) fn finish(mut self, outcome: Outcome, hidden: bool) {
        let Some(gate) = self.gate.take() else { return };
        let after = gate.update_by(|slots, clock| {
            let (throttled, news) = slots.report(self.admitted, outcome, hidden, clock);
            After { throttled, news, idle: slots.give_back(self.admitted) }
        });
        after.see_to(&gate, outcome);
    }
}

fn report(gate: &SlotGate, admitted: Admitted, outcome: Outcome, hidden: bool) {
    let (throttled, news) = gate.update_by(|slots, clock| slots.report(admitted, outcome, hidden, clock));
    After { throttled, news, idle: None }.see_to(gate, outcome);
}

impl After {
    fn see_to(self, gate: &SlotGate, outcome: Outcome) {
        if let Some(limit) = self.throttled {
            // Whoever reads the log may call back into the org.
            let org = gate.read(|slots| slots.org.clone());
            tracing::debug!(
                org = org.name(),
                family = org.model_family().as_str(),
                limit,
                hint = outcome.not_before.is_some(),
                "throttled"
            );
        }
        self.news.tell();
        if let Some(org) = self.idle {
            org.tell_idle();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let Some(gate) = self.gate.take() else { return };
        if let Some(org) = gate.update_by(|slots, _| slots.give_back(self.admitted)) {
            org.tell_idle();
        }
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit").field("epoch", &self.admitted.epoch).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use bytes::Bytes;
    use http::{Request, Response};
    use tower::{Layer, ServiceExt, service_fn};

    use super::*;
    use crate::{
        aimd::AimdLimitLayer,
        outcome::{Class, Ended, Stamp},
    };

    /// The head of a stream that was well so far.
    fn head(tail: &Tail) -> Response<http_body_util::combinators::BoxBody<Bytes, Infallible>> {
        let mut stamp = Stamp::new(Outcome::of(Class::Ok));
        stamp.tail = Some(tail.clone());
        // It never says by itself that it has ended.
        let body = http_body_util::StreamBody::new(futures_util::stream::pending());
        let mut response = Response::new(http_body_util::BodyExt::boxed(body));
        response.extensions_mut().insert(stamp);
        response
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_refused_in_its_course_cuts_the_limit_of_its_epoch() {
        for (ends, throttled, held) in [
            (Some(Outcome::of(Class::Throttled).not_before(Some(Instant::now() + Duration::from_secs(9)))), 1, true),
            (Some(Outcome::of(Class::Throttled)), 1, false),
            (Some(Outcome::of(Class::Ok)), 0, false),
            (Some(Outcome::of(Class::Overloaded)), 0, false),
            (None, 0, false),
        ] {
            let org = Org::new("a").cap(8);
            let settings = Settings::builder().start(1.0).spread(Duration::ZERO).build().unwrap();
            org.write_quota_told();
            let tails: Vec<_> = (0..3).map(|_| Tail::new()).collect();
            let given = std::sync::Mutex::new(tails.clone());
            let service = AimdLimitLayer::with_settings(&org, &settings).layer(service_fn(|_: Request<()>| {
                let response = head(&given.lock().unwrap().pop().unwrap());
                async { Ok::<_, Infallible>(response) }
            }));
            let mut answers = vec![];
            for _ in 0..3 {
                answers.push(service.clone().oneshot(Request::new(())).await.unwrap());
            }
            let before = org.snapshot().limit.unwrap();
            assert_eq!((before.limit, before.throttled), (8.0, 0), "their heads were well");
            for tail in &tails {
                tail.end(ends.into_iter().fold(Ended::new(None, false), Ended::outcome)).unwrap();
            }
            let after = org.snapshot().limit.unwrap();
            assert_eq!(after.throttled, 3 * throttled, "{ends:?}");
            assert_eq!(after.limit < 8.0, throttled > 0, "{ends:?}");
            assert_eq!(org.not_before().is_some(), held, "{ends:?}");
            if held {
                assert_eq!(after.limit, 4.0, "three refusals of one epoch are one cut");
            }
            drop(answers);
            assert_eq!(org.snapshot().in_flight, 0);
        }
    }
}
