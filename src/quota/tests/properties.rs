//! Whatever comes.

use std::{collections::HashMap, time::Duration};

use proptest::prelude::*;
use tokio::time::Instant;

use super::{GUARD, Law, Provider, SECOND, requests, said, verdict};
use crate::{
    dialect::Resource,
    gate::Admission,
    org::Org,
    outcome::Usage,
    quota::{
        Cost,
        bucket::{Bucket, Said},
        ledger::{Quota, Verdict},
    },
};

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
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A request larger than the bucket goes when that is full, and empties it.
    #[test]
    fn whatever_calls_cost_none_is_sent_that_the_provider_has_not(
        rate in 100.0..10_000f64, capacity in 2_000.0..50_000f64,
        steps in proptest::collection::vec((0..6u8, 0.0..1f64), 1..300),
    ) {
        let mut law = Law::new();
        let (mut level, mut at) = (capacity, law.now);
        // Takes the call and tells what remains; `None` where it refuses.
        let mut arrive = |cost: f64, now: Instant| {
            level = (level + rate * now.saturating_duration_since(at).as_secs_f64()).min(capacity);
            at = now;
            // A unit is what figures and sums are rounded to.
            (level >= cost.min(capacity) - 1.0).then(|| {
                level = (level - cost).max(0.0);
                if level >= 1.0 { level.floor() + 0.5 } else { 0.0 }
            })
        };
        let tokens = |remaining| said(&[("tokens-limit", rate * 60.0), ("tokens-remaining", remaining)]);
        let answer = |law: &mut Law, call, cost: f64, remaining| {
            let usage = Some(Usage::new(cost as u64, 0));
            law.quota.answered(call, &tokens(remaining), verdict(false, usage), law.now);
        };
        let first = law.call(Cost::tokens(Some(1.0), Some(0.0)).exact()).unwrap();
        let remaining = arrive(1.0, law.now).unwrap();
        law.wait(Duration::from_millis(20));
        answer(&mut law, first, 1.0, remaining);
        let mut flying: Vec<(u64, f64, f64)> = vec![];
        let mut waiting: Vec<([f64; 4], f64)> = vec![];
        for (step, x) in steps {
            match step {
                // A call: most are small, some larger than the bucket.
                0..=2 => if let Some(grant) = law.quota.admit(law.now) {
                    let cost = (1.5 * capacity * x * x * x).ceil();
                    match law.quota.call(&grant, &Cost::tokens(Some(cost), Some(0.0)).exact(), law.now) {
                        (_, Ok(call)) => {
                            let remaining = arrive(cost, law.now);
                            prop_assert!(remaining.is_some(), "refused {cost}: {:?}", law.quota.bucket(Resource::Tokens));
                            flying.push((call, cost, remaining.unwrap()));
                        }
                        (price, Err(_)) => waiting.push((price, cost)),
                    }
                },
                // An answer, of whichever call.
                3 if !flying.is_empty() => {
                    let (call, cost, remaining) = flying.swap_remove((x * flying.len() as f64) as usize);
                    answer(&mut law, call, cost, remaining);
                }
                _ => law.wait(Duration::from_secs_f64(x * x * capacity / rate)),
            }
            let mut still = vec![];
            for (price, cost) in waiting.drain(..) {
                match law.quota.send(price, law.now) {
                    Ok(call) => {
                        let remaining = arrive(cost, law.now);
                        prop_assert!(remaining.is_some(), "refused {cost} that had waited: {:?}", law.quota.bucket(Resource::Tokens));
                        flying.push((call, cost, remaining.unwrap()));
                    }
                    Err(_) => still.push((price, cost)),
                }
            }
            waiting = still;
        }
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
