//! A circuit: who may pass, and what an answer makes of it. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::Breaker;
use crate::{org::Circuit, outcome::Class};

/// An org whose quota is used up says so again, after the date that it named itself: how long until it is asked once more.
const AGAIN: Duration = Duration::from_secs(60);

/// What an answer says of an org's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It does its work.
    Well,
    /// It fails.
    Failed,
    /// It has answered, though not with what was wanted: it lives. What came of the call is others' business.
    Alive,
    /// Nothing was learnt of it.
    Nothing,
}

impl Verdict {
    pub(crate) fn of(class: Class) -> Self {
        match class {
            _ if class.implies().breaker => Verdict::Failed,
            Class::Ok => Verdict::Well,
            Class::Local | Class::NoOrg | Class::Unprocessed => Verdict::Nothing,
            _ => Verdict::Alive,
        }
    }
}

/// What a call carries from its admission to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) epoch: u64,
    /// It is a probe, and its place is to be given back.
    pub(crate) probe: bool,
    /// The first one since the circuit was open.
    pub(crate) first: bool,
}

impl Admitted {
    pub(crate) const fn closed(epoch: u64) -> Self {
        Admitted { epoch, probe: false, first: false }
    }
}

/// What an answer has made of the circuit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Made {
    /// Nothing, and nothing of the org's health.
    Nothing,
    /// A call succeeded, as most do.
    Succeeded,
    /// A call failed, and it is closed still.
    Failed,
    /// It is open: for the first time, or again after a probe.
    Opened { until: Instant, again: bool },
    /// It is closed.
    Closed { well: bool },
}

enum Stand {
    Closed,
    Shut {
        until: Instant,
        /// Its quota is used up until then.
        parked: bool,
    },
    Probed,
}

pub(crate) struct Law {
    breaker: Box<dyn Breaker>,
    stand: Stand,
    /// Counts how often it was shut. Of calls from before that only what is said of the org for ever is believed.
    epoch: u64,
    /// Probes whose place has not come back, of whichever epoch.
    out: usize,
}

impl Law {
    pub(crate) fn new(breaker: Box<dyn Breaker>) -> Self {
        Law { breaker, stand: Stand::Closed, epoch: 0, out: 0 }
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(self.stand, Stand::Closed)
    }

    pub(crate) fn circuit(&self) -> Circuit {
        match self.stand {
            // It does not fail: its quota is used up.
            Stand::Closed | Stand::Shut { parked: true, .. } => Circuit::Closed,
            Stand::Shut { until, parked: false } => Circuit::Open { until },
            Stand::Probed => Circuit::HalfOpen,
        }
    }

    /// When its quota is back, if it is used up.
    pub(crate) fn parked(&self) -> Option<Instant> {
        match self.stand {
            Stand::Shut { until, parked: true } => Some(until),
            _ => None,
        }
    }

    /// Before when nobody may pass.
    pub(crate) fn until(&self) -> Option<Instant> {
        match self.stand {
            Stand::Shut { until, .. } => Some(until),
            _ => None,
        }
    }

    pub(crate) fn free(&self, now: Instant) -> usize {
        match self.stand {
            Stand::Closed => usize::MAX,
            Stand::Shut { until, .. } if now < until => 0,
            _ => self.breaker.probes().max(1).saturating_sub(self.out),
        }
    }

    /// When time alone lets the next one pass.
    pub(crate) fn opens_at(&self, now: Instant) -> Option<Instant> {
        // Where all probes are out, it is them that are waited for.
        self.until().filter(|until| now < *until)
    }

    pub(crate) fn admit(&mut self, now: Instant) -> Option<Admitted> {
        if self.free(now) == 0 {
            return None;
        }
        if self.is_closed() {
            return Some(Admitted::closed(self.epoch));
        }
        let first = !matches!(self.stand, Stand::Probed);
        self.stand = Stand::Probed;
        self.out += 1;
        Some(Admitted { epoch: self.epoch, probe: true, first })
    }

    /// The call has ended, or will not be made.
    pub(crate) fn give_back(&mut self, call: Admitted) {
        if call.probe {
            self.out -= 1;
        }
    }

    /// So many calls, at least one, that nobody has looked at, since nothing was the matter.
    pub(crate) fn succeeded(&mut self, calls: u64, since: Instant, now: Instant) {
        self.breaker.succeeded(calls, since, now);
    }

    /// An answer was read. Whatever it says, a probe's place is still to be [given back](Law::give_back).
    /// `under_way` are the org's other calls.
    pub(crate) fn answered(&mut self, call: Admitted, verdict: Verdict, under_way: usize, now: Instant) -> Made {
        if call.epoch != self.epoch {
            return Made::Nothing;
        }
        match (&self.stand, verdict) {
            (Stand::Closed, Verdict::Well) => {
                self.breaker.succeeded(1, now, now);
                Made::Succeeded
            }
            (Stand::Closed, Verdict::Failed) => match self.breaker.failed_among(under_way, now) {
                None => Made::Failed,
                Some(until) => {
                    self.shut(until, false);
                    Made::Opened { until, again: false }
                }
            },
            (Stand::Probed, Verdict::Failed) => {
                let until = self.breaker.probe_failed(now);
                self.shut(until, false);
                Made::Opened { until, again: true }
            }
            (Stand::Probed, Verdict::Well | Verdict::Alive) => {
                let well = verdict == Verdict::Well;
                self.breaker.closed(now);
                if well {
                    self.breaker.succeeded(1, now, now);
                }
                self.stand = Stand::Closed;
                Made::Closed { well }
            }
            // Calls of this epoch are admitted closed, or as probes.
            (Stand::Shut { .. }, _) | (_, Verdict::Alive | Verdict::Nothing) => Made::Nothing,
        }
    }

    /// The org's quota is used up until `date`: from when on it is asked again, if it is news.
    pub(crate) fn park(&mut self, call: Admitted, date: Instant, now: Instant) -> Option<Instant> {
        // An old answer may name a date that has passed, and the org has served since.
        if call.epoch != self.epoch && date <= now {
            return None;
        }
        let until = if date > now { date } else { now + AGAIN };
        if self.parked().is_some_and(|parked| parked >= until) {
            return None;
        }
        // Who parks an org that is open holds it no shorter.
        let until = self.until().map_or(until, |open| open.max(until));
        self.shut(until, true);
        Some(until)
    }

    fn shut(&mut self, until: Instant, parked: bool) {
        self.epoch += 1;
        self.stand = Stand::Shut { until, parked };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::CircuitBreaker;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn law(consecutive: u32, probes: usize) -> Law {
        let breaker = CircuitBreaker::builder().consecutive(consecutive).probes(probes);
        Law::new(Box::new(breaker.build().unwrap()))
    }

    fn answer(law: &mut Law, call: Admitted, verdict: Verdict, now: Instant) -> Made {
        let made = law.answered(call, verdict, 0, now);
        law.give_back(call);
        made
    }

    /// Opened by its first failure, and when.
    fn open(probes: usize) -> (Law, Instant, Instant) {
        let mut law = law(1, probes);
        let now = Instant::now();
        let call = law.admit(now).unwrap();
        let Made::Opened { until, again: false } = answer(&mut law, call, Verdict::Failed, now) else { panic!("open") };
        (law, now, until)
    }

    #[test]
    fn every_class_is_a_success_a_failure_a_sign_of_life_or_nothing() {
        for class in Class::ALL {
            let verdict = match class {
                Class::Ok => Verdict::Well,
                Class::Overloaded | Class::Transport => Verdict::Failed,
                Class::Unprocessed | Class::Local | Class::NoOrg => Verdict::Nothing,
                _ => Verdict::Alive,
            };
            assert_eq!(Verdict::of(class), verdict, "{class}");
        }
    }

    #[test]
    fn an_open_circuit_admits_nobody_before_its_time_and_then_so_many_probes() {
        for probes in [1, 2, 5] {
            let (mut law, now, until) = open(probes);
            assert_eq!((law.free(now), law.opens_at(now)), (0, Some(until)));
            let before = until - Duration::from_nanos(1);
            assert!(law.admit(before).is_none() && law.circuit() == Circuit::Open { until });
            assert_eq!((law.free(until), law.opens_at(until)), (probes, None));
            let out: Vec<_> = (0..probes).map(|_| law.admit(until).unwrap()).collect();
            assert_eq!(out.iter().filter(|call| call.first).count(), 1, "it is news once");
            assert!(law.admit(until).is_none() && law.circuit() == Circuit::HalfOpen);
            assert_eq!(law.opens_at(until), None, "it is probes that are waited for");
            law.give_back(out[0]);
            assert_eq!(law.free(until), 1, "a probe that is dropped makes room for another");
            assert!(!law.admit(until).unwrap().first);
        }
    }

    #[test]
    fn whatever_the_provider_answers_to_a_probe_closes_the_circuit() {
        for (verdict, made) in [
            (Verdict::Well, Made::Closed { well: true }),
            (Verdict::Alive, Made::Closed { well: false }),
            (Verdict::Nothing, Made::Nothing),
        ] {
            let (mut law, _, until) = open(1);
            let probe = law.admit(until).unwrap();
            assert_eq!(answer(&mut law, probe, verdict, until), made, "{verdict:?}");
            assert_eq!(law.is_closed(), made != Made::Nothing, "{verdict:?}");
            assert!(law.free(until) > 0, "{verdict:?}: the next may pass");
        }
    }

    #[test]
    fn calls_from_before_it_opened_do_not_count_again() {
        let mut law = law(2, 1);
        let now = Instant::now();
        let calls: Vec<_> = (0..10).map(|_| law.admit(now).unwrap()).collect();
        answer(&mut law, calls[0], Verdict::Failed, now);
        let Made::Opened { until, .. } = answer(&mut law, calls[1], Verdict::Failed, now) else { panic!("open") };
        for call in &calls[2..6] {
            assert_eq!(answer(&mut law, *call, Verdict::Failed, now), Made::Nothing);
            assert_eq!(law.until(), Some(until), "the cooldown is what it was");
        }
        let probe = law.admit(until).unwrap();
        answer(&mut law, calls[6], Verdict::Failed, until);
        answer(&mut law, calls[7], Verdict::Well, until);
        assert_eq!(law.circuit(), Circuit::HalfOpen, "nor for the probe's answer");
        answer(&mut law, probe, Verdict::Well, until);
        for call in &calls[8..] {
            assert_eq!(answer(&mut law, *call, Verdict::Failed, until), Made::Nothing, "nor once it is closed");
        }
    }

    #[test]
    fn of_several_probes_the_first_answer_decides_and_none_is_out_twice() {
        let (mut law, _, until) = open(2);
        let (one, other) = (law.admit(until).unwrap(), law.admit(until).unwrap());
        let Made::Opened { until, again: true } = answer(&mut law, one, Verdict::Failed, until) else { panic!("open") };
        assert_eq!(law.free(until), 1, "the other one is out still");
        let third = law.admit(until).unwrap();
        assert_eq!(answer(&mut law, other, Verdict::Failed, until), Made::Nothing, "it is from before");
        assert_eq!(answer(&mut law, third, Verdict::Well, until), Made::Closed { well: true });
    }

    #[test]
    fn an_org_without_quota_is_asked_again_by_one_call_after_the_date() {
        let mut law = law(5, 1);
        let now = Instant::now();
        let (call, late) = (law.admit(now).unwrap(), law.admit(now).unwrap());
        let date = now + 1_000 * SECOND;
        assert_eq!(law.park(call, date, now), Some(date));
        assert_eq!((law.parked(), law.circuit(), law.free(now)), (Some(date), Circuit::Closed, 0));
        assert_eq!(law.park(late, date, now), None, "no news");
        assert_eq!(law.park(late, date - SECOND, now), None, "the later date counts");
        assert_eq!(law.park(late, date + SECOND, now), Some(date + SECOND), "whoever names it");
        let date = date + SECOND;
        let probe = law.admit(date).unwrap();
        assert!(probe.first && law.admit(date).is_none());
        assert_eq!((law.parked(), law.circuit()), (None, Circuit::HalfOpen));
        assert_eq!(law.park(late, date, date), None, "an old answer's date has passed");
        // Its own word, that it is not back yet, for want of another date: a minute.
        assert_eq!(law.park(probe, date, date), Some(date + AGAIN));
        law.give_back(probe);
        let probe = law.admit(date + AGAIN).unwrap();
        assert_eq!(answer(&mut law, probe, Verdict::Well, date + AGAIN), Made::Closed { well: true });
        assert_eq!(law.parked(), None);
    }

    #[test]
    fn who_is_open_is_parked_no_shorter() {
        let (mut law, now, until) = open(1);
        assert_eq!(law.park(Admitted::closed(0), now + Duration::from_nanos(1), now), Some(until));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Admit,
        Answer(usize, Verdict),
        Drop(usize),
        Park(usize, u64),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let verdict = prop_oneof![
            4 => Just(Verdict::Failed),
            2 => Just(Verdict::Well),
            1 => Just(Verdict::Alive),
            1 => Just(Verdict::Nothing),
        ];
        prop_oneof![
            6 => Just(Step::Admit),
            4 => (any::<usize>(), verdict).prop_map(|(who, verdict)| Step::Answer(who, verdict)),
            1 => any::<usize>().prop_map(Step::Drop),
            1 => (any::<usize>(), 0..20_000u64).prop_map(|(who, wait)| Step::Park(who, wait)),
            3 => (0..6_000u64).prop_map(Step::Wait),
        ]
    }

    proptest! {
        #[test]
        fn whatever_happens_no_more_probes_are_out_than_may_be_and_successes_close_it(
            steps in proptest::collection::vec(step(), 1..300),
            probes in 1..4usize,
        ) {
            let mut law = law(2, probes);
            let mut now = Instant::now();
            let mut calls: Vec<Admitted> = vec![];
            for step in steps {
                let shut = law.until().is_some_and(|until| now < until);
                match step {
                    Step::Admit => {
                        let (free, closed) = (law.free(now), law.is_closed());
                        let admitted = law.admit(now);
                        prop_assert_eq!(admitted.is_some(), free > 0);
                        prop_assert!(!shut || admitted.is_none());
                        prop_assert!(admitted.is_none_or(|call| call.probe != closed));
                        calls.extend(admitted);
                    }
                    Step::Answer(who, verdict) if !calls.is_empty() => {
                        let call = calls.swap_remove(who % calls.len());
                        let (closed, current) = (law.is_closed(), call.epoch == law.epoch());
                        let made = law.answered(call, verdict, 0, now);
                        law.give_back(call);
                        prop_assert!(current || made == Made::Nothing);
                        let closes = matches!(made, Made::Closed { .. });
                        prop_assert!(!closes || !closed && call.probe);
                    }
                    Step::Park(who, wait) if !calls.is_empty() => {
                        let call = calls.swap_remove(who % calls.len());
                        let date = now + Duration::from_millis(wait);
                        let until = law.park(call, date, now);
                        law.give_back(call);
                        prop_assert!(until.is_none_or(|until| until >= date && until > now && law.parked() == Some(until)));
                    }
                    Step::Drop(who) if !calls.is_empty() => {
                        let call = calls.swap_remove(who % calls.len());
                        law.give_back(call);
                    }
                    Step::Wait(millis) => now += Duration::from_millis(millis),
                    Step::Answer(..) | Step::Park(..) | Step::Drop(_) => {}
                }
                let out = calls.iter().filter(|call| call.probe).count();
                prop_assert_eq!(law.out, out);
                prop_assert!(out <= probes);
                if law.free(now) == 0 {
                    prop_assert!(law.opens_at(now).is_some() || out == probes, "somebody is waited for");
                }
            }
            calls.drain(..).for_each(|call| law.give_back(call));
            prop_assert_eq!(law.out, 0);
            now = law.until().unwrap_or(now).max(now);
            let call = law.admit(now);
            prop_assert!(call.is_some(), "nothing is in the way");
            law.answered(call.unwrap(), Verdict::Well, 0, now);
            prop_assert!(law.is_closed());
        }
    }
}
