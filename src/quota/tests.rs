//! The law against a provider of its own: a token bucket that refuses, in virtual time, without a runtime.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use tokio::time::Instant;

use super::{
    Cost,
    bucket::{Bucket, Said},
    ledger::{Quota, Verdict},
};
use crate::{
    dialect::{Detect, ReadQuota, Readings, Resource},
    gate::Admission,
    org::Org,
    outcome::Usage,
};

const GUARD: Duration = Duration::from_millis(5);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

/// What an answer says, as its headers would.
fn said(lines: &[(&'static str, f64)]) -> Readings {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(format!("anthropic-ratelimit-{name}").as_bytes()).unwrap();
        headers.insert(name, HeaderValue::from_str(&value.to_string()).unwrap());
    }
    Detect.read(&headers, Some(std::time::SystemTime::UNIX_EPOCH))
}

fn requests(limit: f64, remaining: f64) -> Readings {
    said(&[("requests-limit", limit), ("requests-remaining", remaining)])
}

fn verdict(uncounted: bool, usage: Option<Usage>) -> Verdict {
    Verdict { uncounted, usage, ..Verdict::default() }
}

/// The provider: whoever comes in finds the level of that moment.
struct Provider {
    rate: f64,
    capacity: f64,
    level: f64,
    at: Instant,
}

impl Provider {
    fn new(rate: f64, span: f64, now: Instant) -> Self {
        Provider { rate, capacity: rate * span, level: rate * span, at: now }
    }

    fn set(&mut self, rate: f64, now: Instant) {
        self.refill(now);
        self.capacity *= rate / self.rate;
        self.level = self.level.min(self.capacity);
        self.rate = rate;
    }

    fn refill(&mut self, now: Instant) {
        let dt = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + self.rate * dt).min(self.capacity);
        self.at = self.at.max(now);
    }

    /// Whether the call is refused, and what remains.
    fn arrive(&mut self, now: Instant) -> (bool, f64) {
        self.refill(now);
        let refused = self.level < 1.0;
        if !refused {
            self.level -= 1.0;
        }
        (refused, self.level.max(0.0).floor())
    }
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

// Single rules, at the law itself.

struct Law {
    quota: Quota,
    now: Instant,
}

impl Law {
    fn new() -> Self {
        let now = Instant::now();
        Law { quota: Quota::new(Org::new("a"), GUARD, 0.95, now), now }
    }

    /// One that has had an answer to its first call.
    fn told(lines: &[(&'static str, f64)]) -> Self {
        let mut law = Law::new();
        let call = law.call(Cost::default()).unwrap();
        law.wait(100 * MS);
        law.answer(call, &said(lines));
        law
    }

    fn wait(&mut self, span: Duration) {
        self.now += span;
    }

    fn admits(&mut self) -> bool {
        self.quota.admit(self.now).is_some()
    }

    /// How many are admitted at this moment.
    fn admitted(&mut self) -> usize {
        (0..100_000).take_while(|_| self.admits()).count()
    }

    fn call(&mut self, cost: Cost) -> Result<u64, Instant> {
        let reserved = self.quota.admit(self.now).expect("admitted");
        self.quota.call(&reserved, &cost, self.now).1
    }

    fn answer(&mut self, call: u64, readings: &Readings) {
        self.quota.answered(call, readings, verdict(false, None), self.now);
    }

    fn level(&self, resource: Resource) -> f64 {
        self.quota.bucket(resource).state().1
    }

    fn capacity(&self, resource: Resource) -> f64 {
        self.quota.bucket(resource).state().0
    }
}

#[test]
fn nothing_is_limited_before_an_answer_tells_a_limit() {
    let mut law = Law::new();
    assert_eq!(law.admitted(), 100_000);
    let mut law = Law::told(&[("requests-remaining", 0.0)]);
    assert_eq!(law.admitted(), 100_000, "what remains of no known limit says nothing");
    let mut law = Law::told(&[("requests-limit", 60.0)]);
    assert_eq!(law.admitted(), 100_000, "a limit alone says nothing of what remains");
}

#[test]
fn what_remains_is_what_is_admitted() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 20.0)]);
    // Below six calls' worth they are paced.
    assert!((14..=20).contains(&law.admitted()));
    assert!(law.level(Resource::Requests) >= 0.0);
}

#[test]
fn absent_negative_and_unreadable_figures_change_nothing() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 20.0)]);
    for lines in [
        &[][..],
        &[("requests-remaining", -1.0)],
        &[("requests-limit", -1.0), ("requests-remaining", f64::NAN)],
        &[("output-tokens-remaining", 0.0)],
        &[("requests-limit", 60.0)],
        &[("requests-limit", 0.0)],
    ] {
        let call = law.call(Cost::default()).unwrap();
        law.wait(SECOND);
        let before = law.quota.headroom_of(Resource::Requests, law.now);
        law.answer(call, &said(lines));
        let after = law.quota.headroom_of(Resource::Requests, law.now);
        assert_eq!(before, after, "{lines:?}");
    }
}

#[test]
fn each_bucket_is_its_own() {
    let law = Law::told(&[
        ("input-tokens-limit", 8e6),
        ("input-tokens-remaining", 7_999_999.0),
        ("output-tokens-limit", 8e5),
        ("output-tokens-remaining", 799_999.0),
    ]);
    assert_eq!(law.capacity(Resource::InputTokens), 7_999_999.0);
    assert_eq!(law.capacity(Resource::OutputTokens), 799_999.0);
    assert_eq!(law.capacity(Resource::Requests), 0.0);
}

#[test]
fn an_answer_that_was_overtaken_changes_nothing() {
    // Long before, and so close that both are still remembered.
    for apart in [20, 2] {
        let mut law = Law::told(&[("requests-limit", 600.0), ("requests-remaining", 100.0)]);
        let early = law.call(Cost::default()).unwrap();
        law.wait(apart * MS);
        let late = law.call(Cost::default()).unwrap();
        law.wait(100 * MS);
        law.answer(late, &requests(600.0, 50.0));
        let level = law.level(Resource::Requests);
        law.answer(early, &requests(600.0, 99.0));
        assert_eq!(law.level(Resource::Requests), level, "{apart} ms apart");
    }
}

#[test]
fn a_limit_that_shrinks_shrinks_the_burst_and_a_raised_one_has_to_show_a_larger() {
    let mut law = Law::told(&[("requests-limit", 600.0), ("requests-remaining", 99.0)]);
    for (limit, remaining, capacity) in [(180.0, 20.0, 30.0), (1_800.0, 20.0, 30.0), (1_800.0, 299.0, 300.0)] {
        let call = law.call(Cost::default()).unwrap();
        law.wait(100 * MS);
        law.answer(call, &requests(limit, remaining));
        assert!((law.capacity(Resource::Requests) - capacity).abs() < 0.01, "{limit}");
        law.wait(3_600 * SECOND);
        let reserved = law.quota.admit(law.now).unwrap();
        assert!((law.level(Resource::Requests) - (capacity - 1.0)).abs() < 0.01, "{limit}");
        law.quota.give_back(&reserved, false, law.now);
    }
}

#[test]
fn a_call_sent_after_or_at_about_the_same_time_is_not_yet_counted() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 1_000.0)]);
    let mut sent = vec![];
    for _ in 0..4 {
        sent.push(law.call(Cost::default()).unwrap());
        law.wait(4 * MS);
    }
    // The third was sent 4 ms after the second, 8 ms after the first, 4 ms before the last.
    law.wait(GUARD - 4 * MS + 4 * MS);
    law.answer(sent[2], &requests(60.0, 500.0));
    let level = law.level(Resource::Requests);
    assert!((498.0..498.1).contains(&level), "the second and the fourth are taken off: {level}");
}

#[test]
fn a_refused_call_is_given_back() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 100.0)]);
    let (a, b) = (law.call(Cost::default()).unwrap(), law.call(Cost::default()).unwrap());
    let before = law.level(Resource::Requests);
    law.quota.answered(a, &Readings::default(), verdict(true, None), law.now);
    assert_eq!(law.level(Resource::Requests), before + 1.0);
    law.quota.answered(b, &Readings::default(), verdict(false, None), law.now);
    assert_eq!(law.level(Resource::Requests), before + 1.0);
    law.quota.answered(a, &Readings::default(), verdict(true, None), law.now);
    assert!(law.level(Resource::Requests) <= before + 1.0, "once");
}

#[test]
fn token_figures_rounded_to_thousands_may_lack_half_of_one() {
    for (remaining, level) in [(150_000.0, 149_500.0), (149_999.0, 149_999.0), (0.0, 0.0)] {
        let law = Law::told(&[("input-tokens-limit", 60.0), ("input-tokens-remaining", remaining)]);
        let seen = law.level(Resource::InputTokens);
        assert!((level..level + 0.2).contains(&seen), "{remaining}: {seen}");
    }
    let law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 1_000.0)]);
    assert!(law.level(Resource::Requests) >= 1_000.0, "requests are counted one by one");
}

#[test]
fn a_hundred_dear_calls_at_once_do_not_overshoot() {
    let mut law = Law::told(&[("tokens-limit", 6_000.0), ("tokens-remaining", 999.0)]);
    let sent = (0..100).filter(|_| law.admits_and_sends(100.0)).count();
    assert!((4..=10).contains(&sent), "{sent}");
}

impl Law {
    fn admits_and_sends(&mut self, tokens: f64) -> bool {
        self.quota.admit(self.now).is_some_and(|reserved| {
            self.quota.call(&reserved, &Cost::tokens(Some(tokens), Some(0.0)), self.now).1.is_ok()
        })
    }
}

#[test]
fn there_is_no_window_at_whose_edge_the_quota_can_be_spent_twice() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 60.0)]);
    let first = law.admitted();
    for _ in 0..20 {
        law.wait(10 * MS);
        assert!(law.admitted() <= 1);
    }
    assert!(first <= 60);
}

#[test]
fn a_request_larger_than_the_bucket_goes_alone_when_the_bucket_is_full() {
    let mut law = Law::told(&[("tokens-limit", 60_000.0), ("tokens-remaining", 9_999.0)]);
    let first = law.call(Cost::tokens(Some(5_000.0), Some(0.0))).unwrap();
    law.wait(10 * MS);
    law.answer(first, &said(&[("tokens-limit", 60_000.0), ("tokens-remaining", 4_999.0)]));
    let reserved = law.quota.admit(law.now).unwrap();
    let (price, sent) = law.quota.call(&reserved, &Cost::tokens(Some(50_000.0), Some(0.0)), law.now);
    let at = sent.expect_err("it waits for a full bucket");
    let wait = at - law.now;
    assert!((4_990..=5_010).contains(&wait.as_millis()), "{wait:?}");
    assert!(!law.admits(), "first in line: nobody goes before it");
    law.now = at;
    let call = law.quota.send(price, law.now).expect("full");
    law.wait(100 * MS);
    law.answer(call, &said(&[("tokens-limit", 60_000.0), ("tokens-remaining", 0.0)]));
    assert!(!law.admits_and_sends(5_000.0));
}

#[test]
fn a_dear_call_delays_others_no_longer_than_the_refill_needs() {
    // A minute's worth in the bucket, nearly all of it spent by one call while the level is low.
    let mut law = Law::told(&[("tokens-limit", 60_000.0), ("tokens-remaining", 59_999.0)]);
    let first = law.call(Cost::tokens(Some(58_000.0), Some(0.0))).unwrap();
    law.wait(100 * MS);
    law.quota.answered(
        first,
        &said(&[("tokens-limit", 60_000.0), ("tokens-remaining", 1_010.0)]),
        verdict(false, Some(Usage::new(1_000, 0))),
        law.now,
    );
    law.now = law.quota.opens_at(law.now).expect("a large one would not fit");
    let reserved = law.quota.admit(law.now).unwrap();
    let (price, sent) = law.quota.call(&reserved, &Cost::tokens(Some(50_000.0), Some(0.0)), law.now);
    let at = sent.unwrap_err();
    law.now = at;
    let call = law.quota.send(price, law.now).unwrap();
    law.wait(100 * MS);
    law.answer(call, &said(&[("tokens-limit", 60_000.0), ("tokens-remaining", 99.0)]));
    let opens = law.quota.opens_at(law.now).unwrap();
    let wait = (opens - law.now).as_secs_f64();
    assert!(wait < 15.0, "a usual call of a thousand tokens waits {wait} s at a refill of a thousand a second");
    law.wait(30 * SECOND);
    assert!(law.admits(), "the bucket is half full again");
}

#[test]
fn an_empty_first_answer_stalls_nothing() {
    let mut law = Law::new();
    let call = law.call(Cost::default()).unwrap();
    law.wait(100 * MS);
    law.quota.answered(call, &requests(60.0, 0.0), verdict(true, None), law.now);
    let mut sent = 0;
    let end = law.now + 60 * SECOND;
    while law.now < end {
        if law.quota.opens_at(law.now).is_none() {
            law.call(Cost::default()).unwrap();
            sent += 1;
        }
        assert!(!law.admits(), "one at a time while nothing is known to be there");
        law.now = law.quota.opens_at(law.now).unwrap();
    }
    assert!((50..=61).contains(&sent), "{sent}");
}

#[test]
fn a_reservation_that_is_given_back_leaves_no_trace() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 50.0)]);
    let level = law.level(Resource::Requests);
    for _ in 0..1_000 {
        let reserved = law.quota.admit(law.now).unwrap();
        assert_eq!(law.level(Resource::Requests), level - 1.0);
        law.quota.give_back(&reserved, false, law.now);
        assert_eq!(law.level(Resource::Requests), level);
    }
}

#[test]
fn the_usual_cost_is_learnt_and_reserved() {
    let mut law = Law::told(&[("output-tokens-limit", 60_000.0), ("output-tokens-remaining", 10_001.0)]);
    assert!(law.quota.admit(law.now).unwrap()[Resource::OutputTokens.index()] > 0.0, "never nothing");
    for _ in 0..50 {
        let call = law.call(Cost::default()).unwrap();
        law.quota.answered(call, &Readings::default(), verdict(false, Some(Usage::new(30, 200))), law.now);
        law.wait(SECOND);
    }
    let usual = law.quota.admit(law.now).unwrap();
    assert_eq!(Resource::ALL.map(|resource| usual[resource.index()].round()), [1.0, 30.0, 200.0, 230.0]);
}

#[test]
fn headroom_comes_back_by_the_announced_reset() {
    let law = Law::told(&[("requests-limit", 1_000.0), ("requests-remaining", 500.0)]);
    assert!(law.quota.headroom_of(Resource::Requests, law.now + 60 * SECOND) > 0.9);
}

// The ledger's memory.

#[test]
fn calls_that_are_done_are_forgotten() {
    for (headers, overlap) in [(false, 0), (false, 3), (true, 0), (true, 3)] {
        let mut law = Law::new();
        let readings = if headers { requests(6e9, 1e9) } else { Readings::default() };
        let mut open = std::collections::VecDeque::new();
        let mut most = 0;
        let calls = if headers { 50_000 } else { 1_000_000 };
        for n in 0..calls {
            open.push_back(law.call(Cost::default()).unwrap());
            law.wait(MS);
            if open.len() > overlap {
                let call = open.pop_front().unwrap();
                if n % 7 == 0 {
                    law.quota.close(call, Verdict::default(), law.now)
                } else {
                    law.answer(call, &readings)
                }
            }
            most = most.max(law.quota.ledger_len());
        }
        assert!(most < 50, "headers {headers}, {overlap} at once: {most} remembered");
    }
}

#[test]
fn one_call_that_never_ends_keeps_no_more_than_was_sent_meanwhile() {
    let mut law = Law::new();
    let _stuck = law.call(Cost::default()).unwrap();
    for _ in 0..10_000 {
        law.wait(MS);
        let call = law.call(Cost::default()).unwrap();
        law.answer(call, &requests(6e9, 1e9));
    }
    assert!(law.quota.ledger_len() < 50, "what is known is newer than the stuck call: {}", law.quota.ledger_len());
}

#[test]
fn when_nothing_is_reserved_a_full_bucket_takes_a_call_dearer_than_it_holds_however_sums_were_rounded() {
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..100 {
        let mut bucket = Bucket::new(0.0);
        let full = |sent| Said {
            per_minute: Some(600.0),
            remaining: Some(1_000.0),
            sent,
            own: 0.0,
            asked: 1.0,
            reset: None,
            spent: 0.0,
            uncounted: 0.0,
        };
        bucket.learn(full(0.0), std::iter::empty(), 0.005, 0.0);
        let mut now = 0.0;
        let mut out = std::collections::VecDeque::new();
        for _ in 0..rng.usize(1..100) {
            now += rng.f64();
            let (usual, cost) = (rng.f64() * 300.0, rng.f64() * 300.0);
            bucket.reserve(usual, now);
            bucket.true_up(usual, cost, now);
            out.push_back(cost);
            if rng.bool() {
                out.drain(..).for_each(|cost| bucket.sent(cost));
            } else {
                out.pop_front().into_iter().for_each(|cost| bucket.give_back(cost, now));
            }
        }
        out.drain(..).for_each(|cost| bucket.sent(cost));
        now += 3_600.0;
        bucket.learn(full(now - 1.0), std::iter::empty(), 0.005, now);
        assert_eq!(bucket.opens_at(2_000.0, 0.0, false, now), now, "{bucket:?}");
    }
}

#[test]
fn one_call_that_never_ends_keeps_a_bounded_part_of_what_was_sent_meanwhile_where_answers_say_nothing() {
    let mut law = Law::new();
    let stuck = law.call(Cost::default()).unwrap();
    for _ in 0..300_000 {
        law.wait(MS);
        let call = law.call(Cost::default()).unwrap();
        law.answer(call, &Readings::default());
    }
    assert!(law.quota.ledger_len() <= 1 << 16, "{}", law.quota.ledger_len());
    // What it says after all that is too old to be believed, and does no harm.
    law.answer(stuck, &requests(60.0, 0.0));
    assert!(law.admits());
    let call = law.call(Cost::default()).unwrap();
    law.wait(MS);
    law.answer(call, &requests(60.0, 9.0));
    assert_eq!(law.capacity(Resource::Requests), 10.0);
    assert!(law.quota.ledger_len() < 10, "what was kept is let go at once");
}

#[test]
fn years_after_its_beginning_a_quota_is_paced_as_on_the_first_day_and_no_moment_it_names_is_too_early() {
    let day = 86_400 * SECOND;
    let run = |begin: Duration, leap: Duration| {
        let mut law = Law::new();
        law.wait(begin);
        let start = law.now;
        let mut provider = Provider::new(40.0, 0.5, law.now);
        let mut flying = std::collections::VecDeque::new();
        let (mut asked, mut refusals) = (0, 0);
        for n in 0..3_000 {
            if n == 1_500 {
                law.wait(leap);
            }
            while let Some(at) = law.quota.opens_at(law.now) {
                assert!(at > law.now);
                (law.now, asked) = (at, asked + 1);
            }
            let call = law.call(Cost::default()).unwrap();
            let (refused, remaining) = provider.arrive(law.now);
            refusals += usize::from(refused);
            flying.push_back((call, refused, remaining));
            if flying.len() > 3 || n == 0 {
                let (call, refused, remaining) = flying.pop_front().unwrap();
                law.wait(100_u32 * Duration::from_nanos(7));
                law.quota.answered(call, &requests(2_400.0, remaining), verdict(refused, None), law.now);
            }
        }
        (asked, refusals, (law.now - start - leap).as_millis())
    };
    let expected = run(Duration::ZERO, Duration::ZERO);
    assert!(expected.0 <= 3_000 && expected.1 == 0, "{expected:?}");
    for begin in [100 * day, 3_650 * day, 36_500 * day] {
        for leap in [Duration::ZERO, day, 400 * day, 30_000 * day] {
            let seen = run(begin, leap);
            let near = |a: usize, b: usize| a.abs_diff(b) <= 60;
            assert!(near(seen.0, expected.0) && seen.1 == 0, "{begin:?} {leap:?}: {seen:?}, not {expected:?}");
            assert!(seen.2.abs_diff(expected.2) < 1_000, "{begin:?} {leap:?}: {seen:?}, not {expected:?}");
        }
    }
}

#[test]
fn a_call_that_waits_for_its_cost_goes_before_all_who_come_when_it_may_and_keeps_nobody_back_for_long() {
    // A thousand tokens a second and in the bucket, and calls use few of them.
    let mut law = Law::told(&[("tokens-limit", 60_000.0), ("tokens-remaining", 1_001.0)]);
    for _ in 0..50 {
        let call = law.call(Cost::tokens(Some(1.0), Some(0.0))).unwrap();
        law.quota.answered(call, &Readings::default(), verdict(false, Some(Usage::new(1, 0))), law.now);
        law.wait(SECOND);
    }
    let cost = Cost::tokens(Some(600.0), Some(0.0));
    law.call(cost).unwrap();
    let waits = |law: &mut Law| {
        law.now = law.quota.opens_at(law.now).unwrap_or(law.now);
        let reserved = law.quota.admit(law.now).unwrap();
        let (price, sent) = law.quota.call(&reserved, &cost, law.now);
        law.now = sent.unwrap_err();
        price
    };
    let price = waits(&mut law);
    assert!(!law.admits(), "its own timer and the alarm ring together");
    law.wait(MS);
    assert!(!law.admits(), "and it may be polled late");
    law.quota.send(price, law.now).unwrap();
    let price = waits(&mut law);
    law.quota.give_back(&price, true, law.now);
    law.call(cost).unwrap();
    let _does_not_come = waits(&mut law);
    assert!(!law.admits());
    let opens = law.quota.opens_at(law.now).unwrap();
    assert!(opens - law.now <= 160 * MS, "it keeps nobody back longer than the reserve takes to come back");
    law.now = opens;
    assert!(law.admits());
}

// Whatever comes.

#[derive(Clone, Debug)]
enum Act {
    Call { input: Option<f64>, output: Option<f64> },
    Reserve,
    GiveBack(usize),
    Answer { call: usize, lines: Vec<(usize, f64)>, refused: bool, usage: Option<(u32, u32)> },
    Close(usize),
    Send(usize),
    Wait(Duration),
}

const LINES: [&str; 8] = [
    "requests-limit",
    "requests-remaining",
    "input-tokens-limit",
    "input-tokens-remaining",
    "output-tokens-limit",
    "output-tokens-remaining",
    "tokens-limit",
    "tokens-remaining",
];

fn figure() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => 0.0..100_000f64,
        2 => (0..100u32).prop_map(f64::from),
        1 => proptest::sample::select(vec![0.0, 1e-300, 1e-9, 1.0, 1e12, 1e300, f64::MAX, -1.0, f64::NAN]),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let odd = [1e9, f64::NAN, f64::INFINITY, -5.0, f64::MAX];
    let tokens =
        move || proptest::option::of(prop_oneof![9 => 0.0..10_000f64, 1 => proptest::sample::select(odd.to_vec())]);
    prop_oneof![
        6 => (tokens(), tokens()).prop_map(|(input, output)| Act::Call { input, output }),
        2 => Just(Act::Reserve),
        2 => any::<usize>().prop_map(Act::GiveBack),
        5 => (any::<usize>(), proptest::collection::vec((0..LINES.len(), figure()), 0..6), any::<bool>(),
              proptest::option::of((any::<u32>(), any::<u32>())))
            .prop_map(|(call, lines, refused, usage)| Act::Answer { call, lines, refused, usage }),
        1 => any::<usize>().prop_map(Act::Close),
        2 => any::<usize>().prop_map(Act::Send),
        4 => prop_oneof![Just(0), 0..2_000u64, 0..100_000u64].prop_map(|ms| Act::Wait(Duration::from_millis(ms))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn figures_stay_finite_and_something_can_always_move(acts in proptest::collection::vec(act(), 1..200), guard in prop_oneof![Just(0u64), Just(5), Just(u64::MAX)]) {
        let day = Duration::from_secs(86_400);
        let mut now = Instant::now();
        let mut quota = Quota::new(Org::new("a"), Duration::from_millis(guard), 0.95, now);
        let (mut reserved, mut waiting, mut flying) = (vec![], vec![], vec![]);
        for act in acts {
            match act {
                Act::Reserve => reserved.extend(quota.admit(now).map(|grant| *grant)),
                Act::Call { input, output } => {
                    if let Some(grant) = reserved.pop().or_else(|| quota.admit(now).map(|grant| *grant)) {
                        match quota.call(&grant, &Cost::tokens(input, output), now) {
                            (_, Ok(call)) => flying.push(call),
                            (price, Err(at)) => {
                                prop_assert!(at > now && at <= now + day);
                                waiting.push(price);
                            }
                        }
                    }
                }
                Act::GiveBack(k) if !reserved.is_empty() => {
                    let grant = reserved.swap_remove(k % reserved.len());
                    quota.give_back(&grant, false, now);
                }
                Act::GiveBack(k) if !waiting.is_empty() => {
                    let price = waiting.swap_remove(k % waiting.len());
                    quota.give_back(&price, true, now);
                }
                Act::Send(k) if !waiting.is_empty() => {
                    let price = waiting.swap_remove(k % waiting.len());
                    match quota.send(price, now) {
                        Ok(call) => flying.push(call),
                        Err(at) => {
                            prop_assert!(at > now && at <= now + day);
                            waiting.push(price);
                        }
                    }
                }
                Act::Answer { call, lines, refused, usage } if !flying.is_empty() => {
                    let call = flying.swap_remove(call % flying.len());
                    let lines: Vec<_> = lines.into_iter().map(|(name, value)| (LINES[name], value)).collect();
                    let usage = usage.map(|(input, output)| Usage::new(input.into(), output.into()));
                    quota.answered(call, &said(&lines), verdict(refused, usage), now);
                }
                Act::Close(call) if !flying.is_empty() => {
                    let call = flying.swap_remove(call % flying.len());
                    quota.close(call, Verdict::default(), now);
                }
                Act::Wait(span) => now += span,
                _ => {}
            }
            for resource in Resource::ALL {
                let (capacity, level, refill, _) = quota.bucket(resource).state();
                prop_assert!(capacity.is_finite() && level.is_finite() && refill.is_finite(), "{resource:?} {capacity} {level} {refill}");
                prop_assert!(refill >= 0.0 && capacity >= 0.0);
                let headroom = quota.headroom_of(resource, now);
                prop_assert!((0.0..=1.0).contains(&headroom));
            }
            let opens = quota.opens_at(now).unwrap_or(now);
            prop_assert!(opens <= now + day);
            prop_assert_eq!(quota.free(now), usize::from(opens == now));
        }
        // Once all that is out has come back or been given up, the next may go at the time that is told, or at least then the
        // way to it is shorter.
        // (Where something is reserved or waits, it may take that.)
        for (grants, unsent) in [(&reserved, false), (&waiting, true)] {
            grants.iter().for_each(|grant| quota.give_back(grant, unsent, now));
        }
        for call in flying {
            quota.close(call, Verdict::default(), now);
        }
        let opens = quota.opens_at(now).unwrap_or(now);
        prop_assert!(opens <= now + day);
        if opens < now + day {
            prop_assert!(quota.admit(opens).is_some());
        }
    }

    #[test]
    fn alone_it_never_sends_more_than_the_provider_has(
        rate in 2..200u32,
        span in 0.05..20f64,
        steps in proptest::collection::vec((0..4u8, 0..400u64), 1..400),
    ) {
        let mut now = Instant::now();
        let mut provider = Provider::new(f64::from(rate), span, now);
        prop_assume!(provider.capacity >= 1.0);
        let mut quota = Quota::new(Org::new("a"), GUARD, 0.95, now);
        let mut flying: HashMap<u64, f64> = HashMap::new();
        let mut told = false;
        let mut refusals = 0;
        for (step, ms) in steps {
            if step < 2 && (told || flying.is_empty()) {
                // As many as it admits.
                while let Some(grant) = quota.admit(now) {
                    let call = quota.call(&grant, &Cost::default(), now).1.unwrap();
                    let (refused, remaining) = provider.arrive(now);
                    refusals += usize::from(refused && told);
                    flying.insert(call, remaining);
                    if !told {
                        break;
                    }
                }
            } else if step == 2 {
                let call = flying.keys().copied().min_by_key(|call| call ^ ms);
                if let Some(call) = call {
                    let remaining = flying.remove(&call).unwrap();
                    quota.answered(call, &requests(provider.rate * 60.0, remaining), verdict(false, None), now);
                    told = true;
                }
            } else {
                now += Duration::from_millis(ms);
            }
        }
        prop_assert_eq!(refusals, 0);
    }
}

proptest! {
    #[test]
    fn the_calls_around_an_answer_are_counted_in_one_as_they_would_be_one_by_one(
        gaps in proptest::collection::vec(0u64..40, 1..30), costs in proptest::collection::vec(0.0f64..4.0, 30),
        remaining in 0.0f64..110.0, after in 0u64..3_000,
    ) {
        let (begin, guard) = (1.0, 0.005);
        // Holds a hundred, and two come back every second.
        let said = |remaining, sent, uncounted| Said {
            per_minute: Some(120.0), remaining: Some(remaining), sent, own: 0.0, asked: 1.0, reset: None, spent: 0.0, uncounted,
        };
        let mut bucket = Bucket::new(begin);
        bucket.learn(said(100.0, begin, 0.0), std::iter::empty(), guard, begin);
        let mut at = begin + 0.001;
        let sent = at;
        let calls: Vec<_> = gaps.iter().zip(&costs).map(|(gap, cost)| {
            at += *gap as f64 / 1e3;
            (at, *cost)
        }).collect();
        let now = at + after as f64 / 1e3;
        bucket.learn(said(remaining, sent, calls.iter().map(|call| call.1).sum()), calls.iter().copied(), guard, now);
        let (capacity, level, refill, _) = bucket.state();
        let (mut expected, mut then) = (remaining, (sent + guard).min(now));
        for (sent, cost) in &calls {
            expected = (expected + refill * (sent - then).max(0.0)).min(capacity) - cost;
            then = then.max(*sent);
        }
        expected = (expected + refill * (now - then)).min(capacity);
        prop_assert!(level <= expected + 1e-6, "{level} is more than {expected}");
        prop_assert!(level >= (capacity / 2.0).min(expected) - 1e-6, "{level} is so much less than {expected} that it matters");
    }
}

// Settling, against plain sums.

#[derive(Clone, Debug)]
enum Step {
    Reserve,
    GiveBack(usize),
    Call { reserved: usize, input: f64 },
    Answer { call: usize, remaining: [Option<f64>; 2], used: Option<u64>, refused: bool, later: bool },
    End { call: usize, used: Option<u64> },
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let used = || proptest::option::of(100u64..5_000);
    prop_oneof![
        4 => Just(Step::Reserve),
        1 => any::<usize>().prop_map(Step::GiveBack),
        4 => (any::<usize>(), 100.0f64..5_000.0).prop_map(|(reserved, input)| Step::Call { reserved, input }),
        4 => (any::<usize>(), proptest::array::uniform2(proptest::option::of(1e8f64..2e8)), used(), any::<bool>(), any::<bool>())
            .prop_map(|(call, remaining, used, refused, later)| Step::Answer { call, remaining, used, refused, later }),
        2 => (any::<usize>(), used()).prop_map(|(call, used)| Step::End { call, used }),
        3 => (0u64..30).prop_map(Step::Wait),
    ]
}

/// A call as whoever adds up by hand sees it.
struct Plain {
    id: u64,
    sent: Instant,
    cost: f64,
    /// Nothing is to be said of it any more.
    over: bool,
    later: bool,
}

/// Picks one that may still be spoken of.
fn pick(calls: &[Plain], nth: usize, may: impl Fn(&Plain) -> bool) -> Option<usize> {
    let open: Vec<_> = (0..calls.len()).filter(|i| may(&calls[*i])).collect();
    (!open.is_empty()).then(|| open[nth % open.len()])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Where no bucket is ever full, what is left is a sum: what was said, the refill since, less what is not counted there.
    #[test]
    fn whatever_is_reserved_settled_refunded_and_said_in_whatever_order_what_is_left_adds_up(
        steps in proptest::collection::vec(step(), 1..300),
    ) {
        // So little that it is of no account whether all of it is seen.
        const RATE: f64 = 1.0;
        let both = [Resource::InputTokens, Resource::OutputTokens];
        let lines = |remaining: [Option<f64>; 2]| {
            let input = remaining[0].map(|left| [("input-tokens-limit", RATE * 60.0), ("input-tokens-remaining", left)]);
            let output = remaining[1].map(|left| [("output-tokens-limit", RATE * 60.0), ("output-tokens-remaining", left)]);
            said(&input.into_iter().chain(output).flatten().collect::<Vec<_>>())
        };
        let one = Cost::tokens(Some(1.0), Some(1.0)).exact();
        let mut law = Law::new();
        // So full once that they are never full again.
        let mut first = 0;
        for remaining in [4e9 + 0.5, 1e9 + 0.5] {
            first = law.call(one).unwrap();
            law.quota.answered(first, &lines([Some(remaining); 2]), verdict(false, Some(Usage::new(1, 1))), law.now);
            law.wait(SECOND);
        }
        let (mut reserved, mut calls): (Vec<[f64; 4]>, Vec<Plain>) = (vec![], vec![]);
        // The believed answers: whose, sent when, what was left from when on.
        let mut rests_on = [(first, law.now - SECOND, 1e9 + 0.5, law.now - SECOND); 2];
        for step in steps {
            match step {
                Step::Reserve => reserved.extend(law.quota.admit(law.now).map(|grant| *grant)),
                Step::GiveBack(nth) if !reserved.is_empty() => {
                    let cost = reserved.swap_remove(nth % reserved.len());
                    law.quota.give_back(&cost, false, law.now);
                }
                Step::Call { reserved: nth, input } if !reserved.is_empty() => {
                    let cost = reserved.swap_remove(nth % reserved.len());
                    let asked = Cost::tokens(Some(input), Some(input)).exact();
                    let (price, sent) = law.quota.call(&cost, &asked, law.now);
                    prop_assert!(both.iter().all(|resource| price[resource.index()] == input));
                    calls.push(Plain { id: sent.unwrap(), sent: law.now, cost: input, over: false, later: false });
                }
                Step::Answer { call, remaining, used, refused, later } => {
                    let Some(i) = pick(&calls, call, |call| !call.over && !call.later) else { continue };
                    let call = &mut calls[i];
                    let remaining = remaining.map(|remaining| remaining.map(|remaining| remaining.floor() + 0.5));
                    let usage = used.filter(|_| !later && !refused).map(|used| Usage::new(used, used));
                    let verdict = Verdict { uncounted: refused, usage, estimate: None, told_later: later && !refused };
                    law.quota.answered(call.id, &lines(remaining), verdict, law.now);
                    call.later = verdict.told_later;
                    call.over = !verdict.told_later;
                    if refused {
                        call.cost = 0.0;
                    } else if let Some(usage) = usage {
                        call.cost = usage.input_tokens as f64;
                    }
                    for (rests_on, remaining) in rests_on.iter_mut().zip(remaining) {
                        if let Some(remaining) = remaining.filter(|_| call.sent >= rests_on.1) {
                            *rests_on = (call.id, call.sent, remaining, (call.sent + GUARD).min(law.now));
                        }
                    }
                }
                Step::End { call, used } => {
                    let Some(i) = pick(&calls, call, |call| !call.over) else { continue };
                    let call = &mut calls[i];
                    let usage = used.filter(|_| call.later).map(|used| Usage::new(used, used));
                    law.quota.close(call.id, Verdict { usage, ..Verdict::default() }, law.now);
                    call.over = true;
                    if let Some(usage) = usage {
                        call.cost = usage.input_tokens as f64;
                    }
                }
                Step::Wait(ms) => law.wait(Duration::from_millis(ms)),
                _ => continue,
            }
            for (resource, (id, sent, remaining, from)) in both.into_iter().zip(rests_on) {
                let back = RATE * law.now.saturating_duration_since(from).as_secs_f64();
                let uncounted = calls.iter().filter(|call| call.id != id && call.sent + GUARD > sent);
                let pending = reserved.iter().map(|cost| cost[resource.index()]).sum::<f64>();
                let expected = remaining + back - uncounted.map(|call| call.cost).sum::<f64>() - pending;
                let level = law.quota.meters(law.now).iter().find(|one| one.resource == resource).unwrap().remaining;
                prop_assert!((level - expected).abs() < 20.0, "{level} {resource:?} are left, and {expected} by hand");
            }
        }
    }
}
