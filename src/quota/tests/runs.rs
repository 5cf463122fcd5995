//! Runs against a provider that refuses: a token bucket, in virtual time, without a runtime.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use tokio::time::Instant;

use super::{GUARD, MS, Provider, requests, verdict};
use crate::{
    dialect::{Readings, Resource},
    gate::Admission,
    org::Org,
    quota::{Cost, ledger::Quota},
};

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

#[derive(Clone, Copy, PartialEq, PartialOrd, Eq, Ord)]
enum Event {
    Arrive { copy: usize, call: u64 },
    Answer { copy: usize, call: u64, refused: bool, remaining: u32, limit: u32 },
    Wake { copy: usize },
    Change { rate: u32 },
}

/// A run of one or more copies of the law on one key.
struct Run {
    rate: f64,
    /// How many seconds' refill the bucket holds.
    span: f64,
    copies: usize,
    guard: Duration,
    /// Another announced rate from some second on.
    change: Option<(f64, f64)>,
    /// From this second on answers say nothing.
    silent_from: f64,
    length: f64,
    seed: u64,
}

impl Default for Run {
    fn default() -> Self {
        Run {
            rate: 50.0,
            span: 2.0,
            copies: 1,
            guard: GUARD,
            change: None,
            silent_from: f64::INFINITY,
            length: 60.0,
            seed: 1,
        }
    }
}

#[derive(Debug, Default)]
struct Seen {
    /// When calls were served and refused, in seconds.
    served: Vec<f64>,
    refused: Vec<f64>,
    /// Which copies have seen in the end that somebody else spends too.
    shared: Vec<bool>,
}

impl Seen {
    /// The part of all calls that was refused.
    fn refusals(&self) -> f64 {
        self.refused.len() as f64 / (self.refused.len() + self.served.len()).max(1) as f64
    }

    fn served_between(&self, from: f64, to: f64) -> f64 {
        self.served.iter().filter(|at| (from..to).contains(*at)).count() as f64
    }

    fn refused_between(&self, from: f64, to: f64) -> usize {
        self.refused.iter().filter(|at| (from..to).contains(*at)).count()
    }
}

impl Run {
    fn go(&self) -> Seen {
        let start = Instant::now();
        let at = |s: f64| start + seconds(s);
        let end = at(self.length);
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let mut provider = Provider::new(self.rate, self.span, start);
        let mut copies: Vec<_> = (0..self.copies).map(|_| Quota::new(Org::new("a"), self.guard, 0.95, start)).collect();
        let mut flying = vec![0usize; self.copies];
        let mut sounded = vec![false; self.copies];
        let mut alarm: Vec<Option<Instant>> = vec![None; self.copies];
        // Enough callers to keep the quota busy.
        let callers = 8 + (self.rate.max(self.change.map_or(0.0, |(_, rate)| rate)) * 0.3) as usize;
        let mut queue: BinaryHeap<Reverse<(Instant, u64, Event)>> = BinaryHeap::new();
        let mut order = 0;
        let mut push = |queue: &mut BinaryHeap<_>, at, event| {
            order += 1;
            queue.push(Reverse((at, order, event)));
        };
        for copy in 0..self.copies {
            push(&mut queue, start + MS * copy as u32, Event::Wake { copy });
        }
        if let Some((when, rate)) = self.change {
            push(&mut queue, at(when), Event::Change { rate: rate as u32 });
        }
        let mut seen = Seen::default();
        while let Some(Reverse((now, _, event))) = queue.pop() {
            if now >= end {
                break;
            }
            match event {
                Event::Arrive { copy, call } => {
                    let (refused, remaining) = provider.arrive(now);
                    let list = if refused { &mut seen.refused } else { &mut seen.served };
                    list.push((now - start).as_secs_f64());
                    // Most answers come fast, some late.
                    let latency = seconds(0.04 + 0.11 * rng.f64() * rng.f64());
                    let answer = Event::Answer {
                        copy,
                        call,
                        refused,
                        remaining: remaining as u32,
                        limit: (provider.rate * 60.0) as u32,
                    };
                    push(&mut queue, now + latency, answer);
                }
                Event::Answer { copy, call, refused, remaining, limit } => {
                    flying[copy] -= 1;
                    sounded[copy] = true;
                    let readings = if now < start + seconds(self.silent_from.min(1e6)) {
                        requests(f64::from(limit), f64::from(remaining))
                    } else {
                        Readings::default()
                    };
                    copies[copy].answered(call, &readings, verdict(refused, None), now);
                    push(&mut queue, now, Event::Wake { copy });
                }
                Event::Change { rate } => provider.set(f64::from(rate), now),
                Event::Wake { copy } => {
                    let quota = &mut copies[copy];
                    // The first call goes alone, as a limiter sees to.
                    while flying[copy] < if sounded[copy] { callers } else { 1 } {
                        let Some(reserved) = quota.admit(now) else {
                            let opens = quota.opens_at(now).expect("refused by time alone");
                            assert!(opens > now && opens <= now + Duration::from_secs(86_400));
                            // A timer's grain.
                            let wait = (opens - now).as_secs_f64() * 1e3;
                            let ring = now + seconds(wait.ceil() / 1e3);
                            if alarm[copy].is_none_or(|set| set <= now || ring < set) {
                                alarm[copy] = Some(ring);
                                push(&mut queue, ring, Event::Wake { copy });
                            }
                            break;
                        };
                        let (_, sent) = quota.call(&reserved, &Cost::default(), now);
                        let call = sent.expect("what was admitted costs what was reserved");
                        flying[copy] += 1;
                        // Over many connections calls overtake one another.
                        push(&mut queue, now + seconds(0.001 + 0.0005 * rng.f64()), Event::Arrive { copy, call });
                    }
                }
            }
        }
        seen.shared = copies.iter().map(|quota| quota.bucket(Resource::Requests).state().3).collect();
        seen
    }
}

// The four facts, and what a run keeps.

#[test]
fn alone_it_is_never_refused_and_spends_the_burst_and_the_whole_refill() {
    for rate in [10.0, 50.0, 400.0] {
        for span in [0.2, 1.0, 2.0, 10.0, 60.0] {
            let seen = Run { rate, span, ..Run::default() }.go();
            assert_eq!(seen.refused.len(), 0, "rate {rate}, span {span}");
            let steady = seen.served_between(30.0, 60.0) / (rate * 30.0);
            assert!(steady >= 0.97, "rate {rate}, span {span}: {steady}");
            let all = seen.served_between(0.0, 60.0) / (rate * (60.0 + span));
            assert!(all >= 0.97, "rate {rate}, span {span}: {all}");
        }
    }
}

#[test]
fn without_the_guard_some_are_refused_and_with_it_none() {
    let refused = |guard| {
        let run = |seed| Run { rate: 2_000.0, span: 0.1, length: 10.0, guard, seed, ..Run::default() }.go();
        (1..4).map(|seed| run(seed).refusals()).sum::<f64>() / 3.0
    };
    let (without, with) = (refused(Duration::ZERO), refused(GUARD));
    assert!(without > 0.001, "{without}");
    assert_eq!(with, 0.0);
}

#[test]
fn more_caution_than_needed_costs_a_part_of_the_first_burst_only() {
    let run = |guard| Run { guard, span: 2.0, rate: 100.0, ..Run::default() }.go();
    let (usual, careful) = (run(GUARD), run(MS * 100));
    assert_eq!(careful.refused.len(), 0);
    let early = |seen: &Seen| seen.served_between(0.0, 10.0);
    let late = |seen: &Seen| seen.served_between(20.0, 60.0);
    assert!(early(&careful) > 0.8 * early(&usual), "{} of {}", early(&careful), early(&usual));
    assert!(late(&careful) > 0.99 * late(&usual), "{} of {}", late(&careful), late(&usual));
}

#[test]
fn two_copies_on_one_key_are_rarely_refused_and_spend_nearly_all() {
    for (rate, span) in [(10.0, 2.0), (50.0, 1.0), (50.0, 2.0), (50.0, 10.0), (400.0, 1.0), (400.0, 10.0)] {
        let seen = Run { rate, span, copies: 2, ..Run::default() }.go();
        assert!(seen.refusals() < 0.025, "rate {rate}, span {span}: {}", seen.refusals());
        let all = seen.served_between(0.0, 60.0) / (rate * (60.0 + span));
        assert!(all > 0.97, "rate {rate}, span {span}: {all}");
        assert_eq!(seen.shared, [true, true], "rate {rate}, span {span}");
        assert_eq!(Run { rate, span, ..Run::default() }.go().shared, [false], "rate {rate}, span {span}");
    }
}

#[test]
fn a_quota_that_is_cut_or_raised_mid_run_is_followed() {
    for span in [1.0, 10.0] {
        for rate in [30.0, 300.0] {
            let seen = Run { rate: 100.0, span, change: Some((20.0, rate)), ..Run::default() }.go();
            assert!(seen.refusals() < 0.01, "to {rate}, span {span}: {}", seen.refusals());
            assert_eq!(seen.refused_between(21.0, 60.0), 0, "to {rate}, span {span}");
            let steady = seen.served_between(40.0, 60.0) / (rate * 20.0);
            assert!(steady >= 0.97, "to {rate}, span {span}: {steady}");
        }
    }
}

#[test]
fn when_answers_fall_silent_the_last_known_refill_goes_on() {
    for span in [0.2, 2.0, 60.0] {
        let seen = Run { rate: 50.0, span, silent_from: 20.0, ..Run::default() }.go();
        let late = seen.served_between(40.0, 60.0) / (50.0 * 20.0);
        assert!(late >= 0.95, "span {span}: {late}");
        assert!(seen.refusals() < 0.01, "span {span}: {}", seen.refusals());
    }
}
