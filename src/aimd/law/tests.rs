use super::*;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

fn settings() -> Settings {
    Settings::builder().spread(Duration::ZERO).build().unwrap()
}

fn law(cap: usize, start: f64) -> Law {
    let settings = Settings::builder().spread(Duration::ZERO).start(start).build().unwrap();
    let mut law = Law::new(settings, cap, fastrand::Rng::with_seed(7));
    law.quota_told(true);
    law
}

/// The same where nothing tells the quota.
fn untold(cap: usize, start: f64) -> (Law, Instant) {
    let (mut law, now) = open(cap, start);
    law.quota_told(false);
    (law, now)
}

impl Law {
    /// An answer was read, and gave its slot back.
    fn ended(&mut self, call: Admitted, outcome: Outcome, in_flight: usize, now: Instant) -> bool {
        let moved = self.answered(call, outcome, false, in_flight, now);
        self.left(call);
        moved
    }

    /// It was refused, though the quota that is told had room for it.
    fn ended_hidden(&mut self, call: Admitted, outcome: Outcome, in_flight: usize, now: Instant) -> bool {
        let moved = self.answered(call, outcome, true, in_flight, now);
        self.left(call);
        moved
    }

    /// How many may be in flight, of those that reopen it.
    fn slots(&self, now: Instant) -> usize {
        if self.not_before(now).is_some() { 0 } else { self.width() }
    }
}

/// A law whose depth has been sounded.
fn open(cap: usize, start: f64) -> (Law, Instant) {
    let now = Instant::now();
    let mut law = law(cap, start);
    let call = law.admitted(1, now);
    law.ended(call, ok(), 1, now);
    (law, now)
}

fn ok() -> Outcome {
    Outcome::of(Class::Ok)
}

fn bare() -> Outcome {
    Outcome::of(Class::Throttled)
}

fn hinted(now: Instant, wait: Duration) -> Outcome {
    bare().not_before(Some(now + wait))
}

/// One full window: as many in flight as allowed, all answered well, a second later.
fn full_window(law: &mut Law, now: &mut Instant) {
    let slots = law.slots(*now);
    let calls: Vec<_> = (1..=slots).map(|n| law.admitted(n, *now)).collect();
    *now += SECOND;
    for call in calls {
        law.ended(call, ok(), slots, *now);
    }
}

#[test]
fn the_first_call_travels_alone_then_a_quarter_of_the_cap_is_open() {
    let now = Instant::now();
    let mut law = Law::new(settings(), 100, fastrand::Rng::with_seed(1));
    assert_eq!(law.slots(now), 1);
    let call = law.admitted(1, now);
    law.ended(call, ok(), 1, now);
    assert_eq!(law.slots(now), 25);
}

#[test]
fn a_lone_call_that_got_no_answer_leaves_the_depth_unsounded() {
    let now = Instant::now();
    for class in [Class::Transport, Class::Overloaded, Class::Unauthorised, Class::Local] {
        let mut law = law(100, 0.25);
        let call = law.admitted(1, now);
        law.ended(call, Outcome::of(class), 1, now);
        assert_eq!(law.slots(now), 1, "{class}");
    }
    for class in [Class::Rejected, Class::Terminal, Class::TooLarge] {
        let mut law = law(100, 0.25);
        let call = law.admitted(1, now);
        law.ended(call, Outcome::of(class), 1, now);
        assert_eq!(law.slots(now), 25, "{class}");
    }
}

#[test]
fn it_doubles_per_full_window_until_the_first_cut_then_adds_one() {
    let (mut law, mut now) = open(100, 0.1);
    for expected in [20, 40, 80, 100, 100] {
        full_window(&mut law, &mut now);
        assert_eq!(law.slots(now), expected);
    }
    let call = law.admitted(100, now);
    law.ended(call, bare(), 100, now);
    let cut = law.slots(now);
    full_window(&mut law, &mut now);
    assert_eq!(law.slots(now), cut + 1);
}

#[test]
fn from_four_to_four_hundred_takes_seven_windows() {
    let (mut law, mut now) = open(400, 0.01);
    let windows = (1..20).find(|_| {
        full_window(&mut law, &mut now);
        law.slots(now) == 400
    });
    assert_eq!(windows, Some(7));
}

#[test]
fn it_does_not_grow_while_it_is_not_reached() {
    let (mut law, mut now) = open(100, 0.2);
    for _ in 0..1_000 {
        let call = law.admitted(2, now);
        now += SECOND / 10;
        law.ended(call, ok(), 2, now);
    }
    assert_eq!(law.slots(now), 20);
}

#[test]
fn a_limit_of_one_that_is_used_grows() {
    let (mut law, mut now) = open(100, 0.01);
    full_window(&mut law, &mut now);
    assert_eq!(law.slots(now), 2);
}

#[test]
fn a_hundred_refusals_of_one_epoch_are_one_cut() {
    let (mut law, now) = open(100, 1.0);
    let epochs: Vec<_> = (1..=100).map(|n| law.admitted(n, now)).collect();
    law.ended(epochs[0], ok(), 100, now);
    for (i, epoch) in epochs.into_iter().enumerate() {
        law.ended(epoch, hinted(now, SECOND), 100 - i, now);
    }
    assert_eq!(law.limit(), 50.0);
    assert_eq!(law.epoch(), 1);
}

#[test]
fn a_bare_refusal_stays_near_the_point_of_refusal_and_holds_nothing() {
    let (mut law, mut now) = open(100, 1.0);
    full_window(&mut law, &mut now);
    let call = law.admitted(40, now);
    law.ended(call, bare(), 40, now);
    assert_eq!(law.limit(), 36.0);
    assert_eq!(law.slots(now), 36);
}

#[test]
fn a_window_refused_as_a_whole_falls_back_to_one_call_and_a_pause() {
    let (mut law, now) = open(100, 0.25);
    let call = law.admitted(25, now);
    law.ended(call, bare(), 25, now);
    assert!(law.slots(now) > 1, "the epoch had been served");
    let call = law.admitted(20, now);
    law.ended(call, bare(), 20, now);
    assert_eq!(law.slots(now), 0);
    assert_eq!(law.slots(now + SECOND), 1);
}

#[test]
fn a_hold_ends_at_its_hint_and_one_call_goes_first_then_the_window_doubles() {
    let (mut law, now) = open(100, 0.4);
    let call = law.admitted(40, now);
    law.ended(call, hinted(now, 30 * SECOND), 40, now);
    let before = now + 30 * SECOND - Duration::from_millis(1);
    assert_eq!(law.slots(before), 0);
    let mut then = now + 30 * SECOND;
    assert_eq!(law.slots(then), 1);
    let mut seen = vec![];
    let call = law.admitted(1, then);
    law.ended(call, ok(), 1, then);
    for _ in 0..6 {
        seen.push(law.slots(then));
        full_window(&mut law, &mut then);
    }
    assert_eq!(seen, [1, 2, 4, 8, 16, 20], "spread up to the halved limit");
}

#[test]
fn only_an_answer_of_the_current_epoch_ends_the_sounding() {
    let (mut law, now) = open(100, 0.4);
    let old = law.admitted(40, now);
    law.ended(old, hinted(now, SECOND), 40, now);
    let mut then = now + 2 * SECOND;
    law.ended(old, ok(), 39, then);
    assert_eq!(law.slots(then), 1, "an answer from before the hold says nothing");
    let call = law.admitted(1, then);
    law.ended(call, ok(), 1, then);
    full_window(&mut law, &mut then);
    assert_eq!(law.slots(then), 2);
}

#[test]
fn the_longest_hint_wins() {
    let (mut law, now) = open(100, 0.4);
    let call = law.admitted(40, now);
    for wait in [5, 20, 1] {
        law.ended(call, hinted(now, wait * SECOND), 40, now);
    }
    assert_eq!(law.held_until(now), Some(now + 20 * SECOND));
}

#[test]
fn a_hint_beyond_the_ceiling_parks_the_org_until_a_probe() {
    let (mut law, now) = open(100, 0.4);
    let call = law.admitted(40, now);
    law.ended(call, hinted(now, Duration::from_secs(999_999)), 40, now);
    let hold = law.hold().unwrap();
    assert_eq!(hold.reason, HoldReason::Parked);
    assert_eq!(hold.until, now + crate::outcome::HINT_CEILING);
    assert_eq!(law.slots(hold.until), 1);
    let call = law.admitted(1, hold.until);
    law.ended(call, ok(), 1, hold.until);
    assert!(law.held_until(hold.until).is_none(), "one good answer reopens it long before the hint");
}

#[test]
fn a_hint_cut_down_to_the_ceiling_by_its_reader_parks_too() {
    let read = Instant::now();
    let now = read + Duration::from_millis(3);
    for (wait, reason) in [(300, HoldReason::Parked), (298, HoldReason::Hint)] {
        let mut law = law(100, 0.25);
        let call = law.admitted(1, now);
        law.ended(call, hinted(read, wait * SECOND), 1, now);
        assert_eq!(law.hold().unwrap().reason, reason, "{wait}");
    }
}

#[test]
fn a_hold_is_spread_later_never_earlier() {
    let settings = Settings::builder().spread(SECOND).build().unwrap();
    let mut ends = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let now = Instant::now();
        let mut law = Law::new(settings.clone(), 100, fastrand::Rng::with_seed(seed));
        let call = law.admitted(1, now);
        law.ended(call, hinted(now, 30 * SECOND), 1, now);
        let wait = law.held_until(now).unwrap() - now;
        assert!((30 * SECOND..=31 * SECOND).contains(&wait), "{wait:?}");
        ends.insert(wait);
    }
    assert!(ends.len() > 45);
}

#[test]
fn a_lone_black_hole_gets_few_calls_with_growing_pauses() {
    let start = Instant::now();
    let (mut law, mut now, mut calls) = (law(100, 0.25), start, vec![]);
    while now < start + 20 * SECOND {
        match law.held_until(now) {
            Some(until) => now = until,
            None => {
                let call = law.admitted(1, now);
                calls.push(now - start);
                // `retry-after: 0` and a date in the past are no hint, so they look like this too.
                law.ended(call, bare(), 1, now);
            }
        }
    }
    assert!(calls.iter().filter(|at| **at < SECOND).count() <= 4, "{calls:?}");
    for second in 1..20u32 {
        let range = second * SECOND..(second + 1) * SECOND;
        assert!(calls.iter().filter(|at| range.contains(at)).count() <= 1, "{calls:?}");
    }
}

#[test]
fn a_good_answer_forgets_the_strikes() {
    let now = Instant::now();
    let mut law = law(100, 0.25);
    let mut at = now;
    for _ in 0..5 {
        let call = law.admitted(1, at);
        law.ended(call, bare(), 1, at);
        at = law.held_until(at).unwrap();
    }
    let call = law.admitted(1, at);
    law.ended(call, ok(), 1, at);
    assert_eq!(law.strikes, 0);
}

#[test]
fn a_cut_never_raises_a_limit_and_a_cap_below_the_floor_wins() {
    let now = Instant::now();
    let settings = Settings::builder().floor(4).spread(Duration::ZERO).build().unwrap();
    let mut law = Law::new(settings, 1, fastrand::Rng::with_seed(1));
    let call = law.admitted(1, now);
    law.ended(call, ok(), 1, now);
    let call = law.admitted(1, now);
    law.ended(call, hinted(now, SECOND), 1, now);
    assert_eq!(law.limit(), 1.0);
    assert_eq!(law.slots(now + SECOND), 1);
}

fn fly(law: &mut Law, n: usize, now: Instant) -> Vec<Admitted> {
    (1..=n).map(|n| law.admitted(n, now)).collect()
}

#[test]
fn untold_a_burst_comes_down_to_what_fitted_whichever_of_it_was_refused() {
    let (mut law, now) = untold(100, 0.25);
    let calls = fly(&mut law, 25, now);
    law.ended(calls[24], ok(), 25, now);
    for (i, refused) in [7, 0, 23, 3, 11].into_iter().enumerate() {
        law.ended(calls[refused], bare(), 25 - i, now);
    }
    assert_eq!((law.limit(), law.epoch()), (20.0, 1));
    let why: Vec<_> = law.changes().map(|change| change.why).collect();
    assert_eq!(why, [Why::Refused, Why::Refined, Why::Refined, Why::Refined, Why::Refined]);
}

#[test]
fn untold_a_burst_takes_half_at_most() {
    let (mut law, now) = untold(100, 1.0);
    let calls = fly(&mut law, 100, now);
    for (i, call) in calls.into_iter().enumerate() {
        law.ended(call, bare(), 100 - i, now);
    }
    assert_eq!((law.limit(), law.epoch()), (50.0, 1));
}

#[test]
fn untold_it_rests_below_the_point_of_refusal_then_probes_by_one_two_four() {
    let (mut law, mut now) = untold(100, 0.25);
    full_window(&mut law, &mut now);
    assert_eq!(law.limit(), 50.0);
    let calls = fly(&mut law, 50, now);
    law.ended(calls[0], ok(), 50, now);
    law.ended(calls[49], bare(), 49, now);
    let mut seen = vec![];
    for _ in 0..5 {
        seen.push(law.limit());
        full_window(&mut law, &mut now);
    }
    assert_eq!(seen, [49.0, 50.0, 52.0, 56.0, 64.0], "a window of a second outlasts the first rest");
    // Refused again five seconds later: it rests for ten.
    let calls = fly(&mut law, 72, now);
    law.ended(calls[0], ok(), 72, now);
    law.ended(calls[71], bare(), 72, now);
    let cut = law.limit();
    for _ in 0..9 {
        full_window(&mut law, &mut now);
        assert_eq!(law.limit(), cut);
    }
    full_window(&mut law, &mut now);
    assert_eq!(law.limit(), cut + 1.0);
}

#[test]
fn untold_a_second_refusal_before_anything_was_served_halves_and_a_third_pauses() {
    let (mut law, now) = untold(100, 0.2);
    let first = law.admitted(20, now);
    law.ended(first, bare(), 20, now);
    let second = law.admitted(19, now);
    law.ended(second, bare(), 19, now);
    assert_eq!((law.limit(), law.slots(now)), (9.5, 9));
    let third = law.admitted(9, now);
    law.ended(third, bare(), 9, now);
    assert_eq!(law.slots(now), 0);
    assert_eq!(law.slots(now + SECOND), 1);
}

#[test]
fn untold_lone_calls_refused_after_others_were_served_start_a_pace() {
    let (mut law, start) = untold(100, 0.01);
    let at = |ms: u64| start + Duration::from_millis(ms);
    // Ten a second, one at a time, then a refusal: nothing but the rate can be too high.
    for i in 0..20 {
        let call = law.admitted(1, at(100 * i));
        law.ended(call, ok(), 1, at(100 * i + 50));
    }
    let call = law.admitted(1, at(2_000));
    assert_eq!(law.cell().pace, None);
    law.ended(call, bare(), 1, at(2_000));
    let pace = law.cell().pace.unwrap();
    assert!((9.7..=10.3).contains(&pace), "{pace}");
    assert_eq!(law.slots(at(2_000)), 0, "no start before its turn");
    let opens = law.opens_at(0, at(2_000)).unwrap();
    assert_eq!(law.free(0, opens), 1);
    assert_eq!(law.opens_at(law.width(), at(2_000)), None, "time alone frees no slot");
    law.quota_told(true);
    assert_eq!(law.cell().pace, None, "headers know better");
}

#[test]
fn untold_a_refusal_just_above_a_low_concurrency_limit_starts_no_pace() {
    let (mut law, mut now) = untold(100, 0.01);
    while law.limit() < 3.0 {
        full_window(&mut law, &mut now);
    }
    let calls = fly(&mut law, 3, now);
    law.ended(calls[2], bare(), 3, now);
    assert_eq!((law.cell().pace, law.limit()), (None, 2.0));
}

#[test]
fn untold_after_a_hint_it_rests_long_enough_that_holds_cost_a_twenty_fifth() {
    let (mut law, mut now) = untold(100, 0.2);
    let calls = fly(&mut law, 20, now);
    law.ended(calls[19], hinted(now, SECOND), 20, now);
    assert_eq!(law.limit(), 19.0, "a refusal with a hint is a point of refusal too");
    let refused = now;
    now += SECOND;
    let lone = law.admitted(1, now);
    law.ended(lone, ok(), 1, now);
    assert_eq!(law.slots(now), 9, "after a short hold half is open at once");
    while law.limit() < 19.5 {
        full_window(&mut law, &mut now);
    }
    assert_eq!(now - refused, 26 * SECOND);
}

#[test]
fn told_a_refusal_that_no_quota_explains_teaches_as_much_as_where_nothing_is_told() {
    for hint in [None, Some(SECOND)] {
        let outcome = |now| hint.map_or(bare(), |wait| hinted(now, wait));
        let (mut told, now) = open(100, 0.25);
        let (mut untold, _) = untold(100, 0.25);
        for law in [&mut told, &mut untold] {
            let calls = fly(law, 25, now);
            law.ended(calls[24], ok(), 25, now);
            law.ended_hidden(calls[7], outcome(now), 24, now);
            calls[..24].iter().filter(|call| **call != calls[7]).for_each(|call| law.left(*call));
            assert_eq!(law.limit(), 23.0, "one below what was in flight");
            let mut now = now + SECOND;
            if hint.is_some() {
                assert_eq!(law.slots(now), 1, "after a hold one goes first");
                let first = law.admitted(1, now);
                law.ended(first, ok(), 1, now);
                assert_eq!(law.slots(now), 11, "and then half of what was open");
            }
            for _ in 0..200 {
                full_window(law, &mut now);
            }
        }
        assert_eq!(told.limit(), untold.limit(), "and above it is probed in the same steps");
        assert!(told.limit() > 25.0 && told.cell().pace.is_none());
    }
}

#[test]
fn told_a_refusal_that_its_quota_explains_is_a_cut_as_ever_whatever_was_hidden_before() {
    let (mut law, now) = open(100, 0.25);
    let calls = fly(&mut law, 25, now);
    law.ended(calls[24], ok(), 25, now);
    law.ended_hidden(calls[23], bare(), 24, now);
    assert_eq!(law.limit(), 23.0);
    let call = law.admitted(24, now);
    law.ended(call, hinted(now, SECOND), 24, now);
    assert_eq!(law.limit(), 11.5);
    let first = law.admitted(1, now + SECOND);
    law.ended(first, ok(), 1, now + SECOND);
    assert_eq!(law.open, 1.0, "it opens by doubling, from one");
}

#[test]
fn told_lone_calls_that_no_quota_explains_the_refusal_of_start_no_pace() {
    let (mut law, mut now) = open(100, 0.01);
    for _ in 0..20 {
        let call = law.admitted(1, now);
        law.ended(call, ok(), 1, now);
        let call = law.admitted(1, now);
        law.ended_hidden(call, hinted(now, SECOND), 1, now);
        now += SECOND;
    }
    assert_eq!((law.cell().pace, law.limit()), (None, 1.0));
}

/// A limit that was hidden once, and since then has let the limit grow up to the cap.
fn once_hidden(cap: usize) -> (Law, Instant) {
    let (mut law, mut now) = open(cap, 0.25);
    let calls = fly(&mut law, cap / 4, now);
    law.ended(calls[0], ok(), cap / 4, now);
    law.ended_hidden(calls[1], bare(), cap / 4 - 1, now);
    calls[2..].iter().for_each(|call| law.left(*call));
    while law.limit() < cap as f64 {
        full_window(&mut law, &mut now);
    }
    (law, now)
}

#[test]
fn told_a_burst_that_its_quota_explains_is_one_cut_whatever_was_hidden_before() {
    let (mut law, now) = once_hidden(100);
    let calls = fly(&mut law, 100, now);
    for (n, call) in calls.into_iter().enumerate() {
        law.ended(call, hinted(now, SECOND), 100 - n, now);
    }
    assert_eq!(law.limit(), 50.0);
}

#[test]
fn told_after_a_cut_that_its_quota_explains_growth_begins_with_small_steps_whatever_was_hidden_before() {
    let (mut law, now) = once_hidden(1_000);
    let call = law.admitted(1, now);
    law.ended(call, hinted(now, SECOND), 1, now);
    let mut now = now + SECOND;
    while law.limit() <= 500.0 {
        full_window(&mut law, &mut now);
    }
    assert_eq!(law.limit(), 501.0);
}

/// No pace begins there, so lone calls would be refused one after the other as fast as answers come.
#[test]
fn told_a_lone_call_that_no_quota_explains_the_refusal_of_is_followed_by_a_pause() {
    let (mut law, now) = open(100, 0.01);
    let call = law.admitted(1, now);
    law.ended(call, ok(), 1, now);
    let call = law.admitted(1, now);
    law.ended_hidden(call, bare(), 1, now);
    assert_eq!(law.slots(now), 0);
    assert_eq!(law.hold().unwrap().reason, HoldReason::Backoff);
}

#[test]
fn growth_is_bounded_by_time_however_fast_the_answers() {
    let settings = Settings::builder().start(0.01).growth_per_second(16.0).build().unwrap();
    let start = Instant::now();
    let mut law = Law::new(settings, 10_000, fastrand::Rng::with_seed(1));
    let sound = law.admitted(1, start);
    law.ended(sound, ok(), 1, start);
    for ms in 0..1_000 {
        let now = start + Duration::from_millis(ms);
        let slots = law.slots(now);
        for call in fly(&mut law, slots, now) {
            law.ended(call, ok(), 1, now);
        }
        let bound = 100.0 * 16f64.powf(ms as f64 / 1e3);
        assert!(law.limit() <= bound.max(100.0) + 1e-6, "{} after {ms} ms", law.limit());
    }
    assert_eq!(law.limit(), 800.0);
}

/// A quarter of 71 is 17.75: with 17 in flight it is as busy as it may be.
#[test]
fn an_org_whose_slots_are_all_taken_is_not_idle_where_the_start_is_no_whole_number() {
    let mut law = law(71, 0.25);
    let mut now = Instant::now();
    let first = law.admitted(1, now);
    now += 8 * SECOND;
    law.ended(first, ok(), 1, now);
    assert_eq!(law.slots(now), 17);
    let calls: Vec<_> = (1..=17).map(|n| law.admitted(n, now)).collect();
    now += 6 * SECOND;
    for call in calls {
        law.ended(call, ok(), 17, now);
        law.admitted(17, now);
    }
    assert_eq!(law.slots(now), 35);
}

#[test]
fn after_an_idle_phase_a_burst_begins_with_the_warm_up_and_the_limit_stays() {
    let (mut law, mut now) = open(100, 0.25);
    full_window(&mut law, &mut now);
    full_window(&mut law, &mut now);
    assert_eq!(law.slots(now), 100);
    // Two a second for ten minutes: in use, but no more than before a burst.
    for _ in 0..1_200 {
        now += SECOND / 2;
        let call = law.admitted(1, now);
        law.ended(call, ok(), 1, now);
    }
    assert_eq!((law.limit(), law.slots(now)), (100.0, 25));
    full_window(&mut law, &mut now);
    assert_eq!(law.slots(now), 50);
}

#[test]
fn what_was_in_use_a_short_while_ago_is_taken_up_at_once() {
    let (mut law, mut now) = open(100, 0.25);
    full_window(&mut law, &mut now);
    full_window(&mut law, &mut now);
    now += 4 * SECOND;
    law.admitted(1, now);
    assert_eq!(law.slots(now), 100);
}

#[test]
fn a_limit_that_only_the_cap_stops_doubles_again_once_the_cap_is_raised_whatever_was_refused_before() {
    let (mut law, mut now) = open(40, 0.5);
    let calls: Vec<_> = (1..=20).map(|n| law.admitted(n, now)).collect();
    for call in calls {
        law.ended(call, ok(), 20, now);
    }
    let call = law.admitted(20, now);
    law.ended(call, bare(), 20, now);
    assert_eq!(law.limit(), 18.0);
    law.retune(Tuning::new().cap(4), now);
    assert_eq!((law.limit(), law.slots(now)), (4.0, 4));
    law.retune(Tuning::new().cap(12), now);
    assert_eq!((law.limit(), law.slots(now)), (6.0, 6), "the starting fraction");
    full_window(&mut law, &mut now);
    assert_eq!(law.limit(), 12.0, "doubled");
}

#[test]
fn a_raised_floor_opens_no_window_that_a_hold_has_closed() {
    let (mut law, now) = open(8, 0.125);
    let call = law.admitted(1, now);
    law.ended(call, hinted(now, SECOND), 1, now);
    law.retune(Tuning::new().floor(8), now);
    let after = now + SECOND;
    assert_eq!((law.limit(), law.slots(after)), (8.0, 1), "one call goes first");
    let call = law.admitted(1, after);
    law.ended(call, ok(), 1, after);
    assert_eq!(law.slots(after), 1, "then it opens by doubling");
    let mut now = after;
    full_window(&mut law, &mut now);
    assert_eq!(law.slots(now), 2);
}

#[derive(Clone, Debug)]
enum Event {
    Admit,
    Answer { call: usize, class: Class, hint_ms: Option<u64>, hidden: bool },
    Drop { call: usize },
    Wait { ms: u64 },
    Retune { cap: Option<usize>, floor: Option<usize>, ceiling_ms: Option<u64> },
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => Just(Event::Admit),
        4 => (any::<usize>(), proptest::sample::select(&Class::ALL[..]), proptest::option::of(0..100_000u64), any::<bool>())
            .prop_map(|(call, class, hint_ms, hidden)| Event::Answer { call, class, hint_ms, hidden }),
        1 => any::<usize>().prop_map(|call| Event::Drop { call }),
        1 => (0..40_000u64).prop_map(|ms| Event::Wait { ms }),
        1 => (
            proptest::option::of(1..300usize),
            proptest::option::of(1..20usize),
            proptest::option::of(1..300_000u64),
        )
            .prop_map(|(cap, floor, ceiling_ms)| Event::Retune { cap, floor, ceiling_ms }),
    ]
}

#[test]
fn calls_from_before_a_hold_do_not_keep_it_shut_however_long_they_last() {
    let (mut law, mut now) = open(20, 0.5);
    let mut old: Vec<_> = (1..=10).map(|n| law.admitted(n, now)).collect();
    let refused = old.pop().unwrap();
    law.ended(refused, hinted(now, SECOND), 10, now);
    assert_eq!((law.limit(), law.free(9, now)), (5.0, 0));
    now += SECOND;
    assert_eq!(law.free(9, now), 0, "more fly than are allowed altogether");
    for call in old.drain(3..) {
        law.left(call);
    }
    assert_eq!(law.free(3, now), 1, "one goes first, beside those that still fly");
    let first = law.admitted(4, now);
    assert_eq!(law.free(4, now), 0);
    law.ended(first, ok(), 4, now);
    assert_eq!(law.free(3, now), 1);
    let next = law.admitted(4, now);
    now += SECOND;
    law.ended(next, ok(), 4, now);
    assert_eq!((law.open, law.free(3, now)), (2.0, 2), "it opens by doubling");
    let calls = [law.admitted(4, now), law.admitted(5, now)];
    assert_eq!(law.free(5, now), 0, "all together stay within the limit");
    // An old one gives its slot back, and takes nothing from the new ones' count.
    law.left(old.pop().unwrap());
    assert_eq!(law.free(4, now), 0);
    for call in calls {
        law.left(call);
    }
    assert_eq!(law.free(2, now), 2);
}

proptest! {
    #[test]
    fn the_limit_stays_in_bounds_cuts_are_fewer_than_epochs_and_something_can_always_move(
        cap in 1..300usize,
        floor in 1..10usize,
        start in 0.001..1.0f64,
        cut in 0.01..0.99f64,
        told: bool,
        events in proptest::collection::vec(event(), 1..400),
    ) {
        let settings = Settings::builder().floor(floor).start(start).cut(cut).build().unwrap();
        let mut law = Law::new(settings, cap, fastrand::Rng::with_seed(3));
        law.quota_told(told);
        let mut now = Instant::now();
        let mut flying: Vec<Admitted> = vec![];
        let (mut cuts, mut cut_by) = (0u64, std::collections::BTreeSet::new());
        let (mut cap, mut floor) = (cap, floor);
        for event in events {
            let limit_before = law.limit();
            match event {
                Event::Admit => if law.free(flying.len(), now) > 0 {
                    let n = flying.len() + 1;
                    flying.push(law.admitted(n, now));
                },
                Event::Answer { call, class, hint_ms, hidden } => if !flying.is_empty() {
                    let in_flight = flying.len();
                    let call = flying.swap_remove(call % in_flight);
                    let at = hint_ms.map(|ms| now + Duration::from_millis(ms));
                    law.answered(call, Outcome::of(class).not_before(at), hidden, in_flight, now);
                    law.left(call);
                    if law.limit() < limit_before {
                        prop_assert_eq!(class, Class::Throttled);
                    }
                    // What refines a cut by the rest of its burst is no cut of its own.
                    let is_cut = |change: &Change| change.to < change.from && change.why != Why::Refined;
                    let cut = law.changes().filter(is_cut).count() as u64;
                    cuts += cut;
                    prop_assert!(cut == 0 || cut == 1 && cut_by.insert(call.epoch), "a second cut by one epoch's calls");
                },
                Event::Drop { call } => if !flying.is_empty() {
                    let n = flying.len();
                    law.left(flying.swap_remove(call % n));
                    prop_assert_eq!(law.limit(), limit_before);
                },
                Event::Wait { ms } => now += Duration::from_millis(ms),
                Event::Retune { cap: new_cap, floor: new_floor, ceiling_ms } => {
                    let ceiling = ceiling_ms.map(Duration::from_millis);
                    law.retune(Tuning { cap: new_cap, floor: new_floor, ceiling, weight: None }, now);
                    (cap, floor) = (new_cap.unwrap_or(cap), new_floor.unwrap_or(floor));
                    prop_assert!(law.limit() >= floor.min(cap) as f64);
                    let moved = law.changes().all(|change| change.why == Why::Retuned && change.from == limit_before);
                    prop_assert!(moved);
                    let latest = ceiling.filter(|_| law.hold().is_some_and(|hold| hold.reason != HoldReason::Backoff));
                    prop_assert!(latest.is_none_or(|ceiling| law.held_until(now).is_none_or(|until| until <= now + ceiling)));
                }
            }
            prop_assert!(law.limit().is_finite());
            prop_assert!(law.limit() >= 1.0 && law.limit() <= cap as f64);
            prop_assert!(law.open <= law.limit && law.open >= 1.0);
            prop_assert!(cuts <= law.epoch());
            prop_assert!(law.slots(now) <= cap);
            // Progress: free now, or at a known time, or when what flies comes back.
            let mut landed = law.clone();
            flying.iter().for_each(|call| landed.left(*call));
            let opens = landed.opens_at(0, now).unwrap_or(now);
            prop_assert!(opens <= now + Duration::from_secs(301));
            prop_assert!(landed.free(0, opens) >= 1);
            prop_assert!(law.young <= flying.len());
            prop_assert!(law.cell().pace.is_none_or(|pace| pace.is_finite() && pace > 0.0));
        }
    }

    #[test]
    fn told_the_time_only_where_it_asks_it_does_the_same(
        cap in 1..60usize,
        floor in 1..10usize,
        start in prop_oneof![Just(1.0), Just(0.25), 0.001..1.0f64],
        told: bool,
        // Mostly good answers: else no window is ever full.
        events in proptest::collection::vec(
            prop_oneof![
                4 => event(),
                8 => Just(Event::Admit),
                8 => any::<usize>().prop_map(|call| Event::Answer { call, class: Class::Ok, hint_ms: None, hidden: false }),
                1 => (0..1_000u64).prop_map(|ms| Event::Wait { ms }),
            ],
            1..600,
        ),
    ) {
        let settings = Settings::builder().floor(floor).start(start).build().unwrap();
        let mut law = Law::new(settings, cap, fastrand::Rng::with_seed(3));
        law.quota_told(told);
        let mut lazy = law.clone();
        let (mut now, mut seen) = (Instant::now(), Instant::now());
        let mut flying: Vec<Admitted> = vec![];
        for event in events {
            match event {
                Event::Admit => if law.free(flying.len(), now) > 0 {
                    if lazy.admits_by_time(flying.len(), seen) {
                        seen = now;
                    }
                    let n = flying.len() + 1;
                    let call = law.admitted(n, now);
                    prop_assert_eq!(call, lazy.admitted(n, seen));
                    flying.push(call);
                },
                Event::Answer { call, class, hint_ms, hidden } => if !flying.is_empty() {
                    let in_flight = flying.len();
                    let call = flying.swap_remove(call % in_flight);
                    let at = hint_ms.map(|ms| now + Duration::from_millis(ms));
                    let outcome = Outcome::of(class).not_before(at);
                    let moved = law.answered(call, outcome, hidden, in_flight, now);
                    if lazy.counted(call, outcome) {
                        prop_assert!(!moved);
                    } else {
                        seen = now;
                        prop_assert_eq!(moved, lazy.answered(call, outcome, hidden, in_flight, now));
                    }
                    law.left(call);
                    lazy.left(call);
                },
                Event::Drop { call } => if !flying.is_empty() {
                    let n = flying.len();
                    let call = flying.swap_remove(call % n);
                    law.left(call);
                    lazy.left(call);
                },
                Event::Wait { ms } => now += Duration::from_millis(ms),
                Event::Retune { cap, floor, ceiling_ms } => {
                    let ceiling = ceiling_ms.map(Duration::from_millis);
                    let tuning = Tuning { cap, floor, ceiling, weight: None };
                    law.retune(tuning, now);
                    lazy.retune(tuning, now);
                    seen = now;
                }
            }
            let at = if lazy.opens_by_time(seen) { now } else { seen };
            prop_assert_eq!(law.free(flying.len(), now), lazy.free(flying.len(), at));
            prop_assert_eq!(law.opens_at(flying.len(), now), lazy.opens_at(flying.len(), at));
            prop_assert_eq!(law.cell(), lazy.cell());
            prop_assert_eq!((law.open, law.clean, law.served), (lazy.open, lazy.clean, lazy.served));
            prop_assert_eq!(law.young, flying.iter().filter(|call| call.epoch >= law.reopened).count());
            prop_assert_eq!(law.young, lazy.young);
        }
    }
}
