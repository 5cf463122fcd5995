//! Single rules, at the law itself.

use super::{GUARD, Law, MS, SECOND, requests, said, verdict};
use crate::{
    dialect::{Readings, Resource},
    gate::Admission,
    outcome::Usage,
    quota::Cost,
};

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
    law.wait(GUARD);
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

#[test]
fn there_is_no_window_at_whose_edge_the_quota_can_be_spent_twice() {
    let mut law = Law::told(&[("requests-limit", 60.0), ("requests-remaining", 60.0)]);
    let sends = |law: &mut Law| (0..1_000).take_while(|_| law.admits_and_sends(0.0)).count();
    let mut sent = sends(&mut law);
    assert!(sent >= 50, "{sent}: a burst is spent");
    // Past every edge of a tenth of a second, of a second and of a minute that there may be.
    for tenth in 1..=700 {
        law.wait(100 * MS);
        sent += sends(&mut law);
        assert!(sent <= 60 + tenth / 10 + 1, "{sent} in {tenth} tenths of a second, at one a second");
    }
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

#[test]
fn a_call_that_waited_longer_than_it_had_to_has_filled_nothing_meanwhile() {
    // It lacks 460 tokens of 2,500, at a thousand a second; and is polled so long after.
    for (late, left) in [(0, 0.0), (100, 100.0), (539, 539.0), (541, 540.0), (60_000, 540.0)] {
        let mut law = Law::told(&[("tokens-limit", 60_000.0), ("tokens-remaining", 2_500.5)]);
        law.call(Cost::tokens(Some(1_000.0), Some(0.0)).exact()).unwrap();
        let grant = law.quota.admit(law.now).unwrap();
        let (price, sent) = law.quota.call(&grant, &Cost::tokens(Some(1_960.0), Some(0.0)).exact(), law.now);
        law.now = sent.unwrap_err();
        law.wait(late * MS);
        law.quota.send(price, law.now).unwrap();
        law.wait(MS);
        let quota = law.quota.meters(law.now);
        let seen = quota.iter().find(|one| one.resource == Resource::Tokens).unwrap().remaining;
        assert!((left..left + 3.0).contains(&seen), "{late} ms late: {seen} are left, not {left}");
    }
}

#[test]
fn what_empties_a_bucket_does_not_tell_what_it_held() {
    // What is left after a call that used 3,000 of a bucket in which 2,000 were seen, and what it is then taken to hold.
    for (left, holds) in [(0.0, 2_000.5), (1.5, 3_001.5)] {
        let mut law = Law::told(&[("tokens-limit", 60_000.0), ("tokens-remaining", 2_000.5)]);
        let grant = law.quota.admit(law.now).unwrap();
        let call = law.quota.call(&grant, &Cost::tokens(Some(1_000.0), Some(0.0)), law.now).1.unwrap();
        let readings = said(&[("tokens-limit", 60_000.0), ("tokens-remaining", left)]);
        law.quota.answered(call, &readings, verdict(false, Some(Usage::new(3_000, 0))), law.now);
        assert_eq!(law.capacity(Resource::Tokens), holds, "{left} are left");
    }
}

/// Input, output and tokens, each its limit and what remains.
fn of_both(input: Option<(f64, f64)>, output: Option<(f64, f64)>, tokens: (f64, f64)) -> Readings {
    let names = [
        ("input-tokens-limit", "input-tokens-remaining"),
        ("output-tokens-limit", "output-tokens-remaining"),
        ("tokens-limit", "tokens-remaining"),
    ];
    let told = names.into_iter().zip([input, output, Some(tokens)]);
    let lines = told.filter_map(|((limit, left), said)| said.map(|said| [(limit, said.0), (left, said.1)]));
    said(&lines.flatten().collect::<Vec<_>>())
}

#[test]
fn a_sum_of_input_and_output_is_no_bucket_and_anything_less_is() {
    let (input, output) = (Some((60_000.0, 7_001.0)), Some((6_000.0, 1_002.0)));
    let rounded = (Some((60_000.0, 7_000.0)), Some((6_000.0, 1_000.0)));
    for (input, output, tokens, is_one) in [
        (input, output, (66_000.0, 8_003.0), false),
        (input, output, (66_000.0, 8_004.0), false),
        (input, output, (66_000.0, 8_001.0), true),
        (input, output, (50_000.0, 8_003.0), true),
        (rounded.0, rounded.1, (66_000.0, 9_000.0), false),
        (rounded.0, rounded.1, (66_000.0, 7_000.0), false),
        (rounded.0, rounded.1, (66_000.0, 6_000.0), true),
        (input, None, (60_000.0, 7_001.0), false),
        (input, None, (60_000.0, 7_000.0), true),
        (None, output, (6_000.0, 1_002.0), false),
        (None, output, (60_000.0, 1_002.0), true),
        (rounded.0, None, (60_000.0, 6_000.0), true),
        (None, None, (60_000.0, 7_000.0), true),
    ] {
        let mut law = Law::new();
        let call = law.call(Cost::default()).unwrap();
        law.answer(call, &of_both(input, output, tokens));
        let meters = law.quota.meters(law.now);
        let seen = meters.iter().any(|one| one.resource == Resource::Tokens);
        assert_eq!(seen, is_one, "{input:?} and {output:?} beside {tokens:?}");
    }
}

#[test]
fn what_was_a_bucket_of_both_until_it_was_told_as_a_sum_holds_nobody_back() {
    let full = (60_000.0, 60_000.0);
    let input = Some(full);
    let call = |law: &mut Law| law.call(Cost::tokens(Some(100.0), Some(50.0)).exact()).unwrap();
    let mut law = Law::new();
    let (early, first) = (call(&mut law), call(&mut law));
    law.wait(10 * MS);
    law.answer(first, &of_both(input, None, (6_000.0, 0.0)));
    assert!(!law.admits(), "of both nothing is left");
    let opens = |law: &mut Law| law.now = law.quota.opens_at(law.now).expect("so it takes time");
    opens(&mut law);
    let second = call(&mut law);
    opens(&mut law);
    let reserved = law.quota.admit(law.now).unwrap();
    law.answer(second, &of_both(input, None, full));
    assert!(law.admitted() > 20, "only input counts");
    law.quota.give_back(&reserved, false, law.now);
    law.answer(early, &of_both(input, None, (6_000.0, 0.0)));
    assert!(!law.quota.meters(law.now).iter().any(|one| one.resource == Resource::Tokens), "that was before");
    let third = call(&mut law);
    law.answer(third, &of_both(input, None, (6_000.0, 0.0)));
    assert!(!law.admits(), "and there may be one again");
}
