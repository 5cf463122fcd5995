//! What the ledger keeps and lets go, and how long figures stay good.

use std::time::Duration;

use super::{Law, MS, Provider, SECOND, requests, verdict};
use crate::{
    dialect::{Readings, Resource},
    gate::Admission,
    quota::{
        Cost,
        bucket::{Bucket, Said},
        ledger::Verdict,
    },
};

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
                out.drain(..).for_each(|cost| bucket.sent(cost, now));
            } else {
                out.pop_front().into_iter().for_each(|cost| bucket.give_back(cost, now));
            }
        }
        out.drain(..).for_each(|cost| bucket.sent(cost, now));
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
