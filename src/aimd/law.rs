//! How a limit moves: pure, no runtime, `now` passed in.
//!
//! Additive increase, multiplicative decrease, with what a quota asks for besides: the first call travels alone; a burst of
//! refusals is one cut (each call carries the epoch it was admitted in, and how many were in flight then); the limit grows
//! only when it was reached, and no faster than so much a second; a hint holds the org; and after a hold one call goes first,
//! then the window opens by doubling.
//!
//! Where the answers do not tell the quota, refusals are all there is: [`Plateau`] finds how many calls fit, and [`Pace`] how
//! many a second when no number of slots is right.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    pace::{Meter, Pace, Turn},
    plateau::Plateau,
    settings::Settings,
};
use crate::{
    org::{Change, Hold, HoldReason, LimitCell, Why},
    outcome::{Class, Outcome},
};

/// Longer than any run, and short enough to be added to any instant.
const FAR: Duration = Duration::from_secs(365 * 86_400);
/// What may pass between the reading of a hint and its arrival here.
const READING: Duration = Duration::from_secs(1);
/// With so few in flight, a slot more or less is too coarse a step for a rate.
const FEW: usize = 4;
/// So many calls sent at a level, and then one refused: the level was not what was wrong with it.
const ENOUGH: u32 = 3;
/// How long no pace is tried again after one that was of no use.
const NO_PACE: Duration = Duration::from_secs(60);

/// What a call carries from its admission to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    pub(crate) epoch: u64,
    /// Calls in flight at its admission, itself included.
    level: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Law {
    settings: Settings,
    cap: usize,
    /// What is allowed when fully open.
    limit: f64,
    /// What is allowed now: below `limit` only while reopening after a hold or an idle phase.
    open: f64,
    epoch: u64,
    /// One call alone, until an answer of the current epoch has been read.
    sounding: bool,
    /// Doubling until the first cut.
    slow_start: bool,
    /// Whether `open` was reached in this window.
    reached: bool,
    /// Clean answers in this window.
    clean: usize,
    /// Whether any call of the current epoch was answered well: if none was, the whole window was refused.
    served: bool,
    /// Refusals without a hint in a row that a lone call got.
    strikes: u32,
    throttled: u64,
    hold: Option<Hold>,
    /// No growth before this, beyond `familiar`.
    grow_from: Option<Instant>,
    /// What was in use a short while ago may be taken up again at once.
    familiar: f64,
    /// When as many as the starting fraction were last in flight.
    busy: Option<Instant>,
    /// The answers tell the quota.
    told: bool,
    plateau: Plateau,
    pace: Option<Pace>,
    no_pace_until: Option<Instant>,
    /// What was sent since the last refusal.
    meter: Option<Meter>,
    /// How many were sent since the last refusal as the first, the second, … in flight or a later one.
    sent: [u32; FEW],
    /// Refusals in a row without anything served in between.
    missed: u32,
    /// The last cut may be refined by the rest of its burst.
    refines: bool,
    changes: Vec<Change>,
    rng: fastrand::Rng,
}

impl Law {
    pub(crate) fn new(settings: Settings, cap: usize, rng: fastrand::Rng) -> Self {
        let mut law = Law {
            cap: cap.max(1),
            limit: 0.0,
            open: 0.0,
            epoch: 0,
            sounding: true,
            slow_start: true,
            reached: false,
            clean: 0,
            served: false,
            strikes: 0,
            throttled: 0,
            hold: None,
            grow_from: None,
            familiar: 0.0,
            busy: None,
            told: false,
            plateau: Plateau::new(),
            pace: None,
            no_pace_until: None,
            meter: None,
            sent: [0; FEW],
            missed: 0,
            refines: false,
            changes: vec![],
            rng,
            settings,
        };
        law.limit = law.warm_up();
        law.open = law.limit;
        law
    }

    /// A limit within its bounds: a cap below the floor wins.
    fn within(&self, limit: f64) -> f64 {
        limit.max(self.settings.floor as f64).min(self.cap as f64)
    }

    fn warm_up(&self) -> f64 {
        self.within(self.cap as f64 * self.settings.start)
    }

    pub(crate) fn limit(&self) -> f64 {
        self.limit
    }

    #[cfg(test)]
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) fn hold(&self) -> Option<Hold> {
        self.hold
    }

    pub(crate) fn cell(&self) -> LimitCell {
        LimitCell {
            limit: self.limit,
            cap: self.cap,
            epoch: self.epoch,
            throttled: self.throttled,
            pace: self.pace.as_ref().map(Pace::rate),
        }
    }

    /// The changes since this was last asked.
    pub(crate) fn changes(&mut self) -> std::vec::Drain<'_, Change> {
        self.changes.drain(..)
    }

    fn note(&mut self, from: f64, to: f64, why: Why, now: Instant) {
        if from != to {
            self.changes.push(Change::new(now, from, to, why));
        }
    }

    /// From now on the answers tell the quota, or do not.
    pub(crate) fn quota_told(&mut self, told: bool) {
        self.told = told;
        if told {
            self.pace = None;
        }
    }

    /// How many may be in flight when neither a hold nor the pace forbids it.
    fn width(&self) -> usize {
        // At least 1 and at most the cap: the cast loses only the fraction.
        if self.sounding { 1 } else { self.open as usize }
    }

    /// How many may be in flight now.
    pub(crate) fn slots(&self, now: Instant) -> usize {
        if self.not_before(now).is_some() { 0 } else { self.width() }
    }

    /// How many may be admitted now: by a pace, one at a time.
    pub(crate) fn free(&self, in_flight: usize, now: Instant) -> usize {
        let free = self.slots(now).saturating_sub(in_flight);
        if self.pace.is_some() { free.min(1) } else { free }
    }

    /// When the hold ends, if one is open.
    pub(crate) fn held_until(&self, now: Instant) -> Option<Instant> {
        self.hold.map(|hold| hold.until).filter(|until| *until > now)
    }

    /// Before when none may start, by a hold or by the pace.
    fn not_before(&self, now: Instant) -> Option<Instant> {
        self.held_until(now).max(self.pace.as_ref().map(Pace::next).filter(|next| *next > now))
    }

    /// When time alone admits the next call.
    pub(crate) fn opens_at(&self, in_flight: usize, now: Instant) -> Option<Instant> {
        self.not_before(now).filter(|_| in_flight < self.width())
    }

    /// A call was admitted; `in_flight` counts it. Gives what it carries.
    pub(crate) fn admitted(&mut self, in_flight: usize, now: Instant) -> Admitted {
        let start = self.warm_up();
        if self.open > start && self.busy.is_some_and(|busy| now.saturating_duration_since(busy) > self.settings.idle) {
            self.open = start;
            self.familiar = 0.0;
            self.busy = Some(now);
            self.grow_later(2.0, now);
        }
        if self.busy.is_none() || in_flight as f64 >= start {
            self.busy = Some(now);
        }
        if in_flight >= self.width() {
            self.reached = true;
        }
        if let Some(pace) = &mut self.pace {
            pace.started(now);
        }
        self.meter.get_or_insert(Meter::new(now)).started();
        for sent in &mut self.sent[..in_flight.min(FEW)] {
            *sent = sent.saturating_add(1);
        }
        Admitted { epoch: self.epoch, level: in_flight }
    }

    /// An answer was read of a call; `in_flight` still counts it. True if limit, pace or hold moved.
    pub(crate) fn answered(&mut self, call: Admitted, outcome: Outcome, in_flight: usize, now: Instant) -> bool {
        let current = call.epoch == self.epoch;
        match outcome.class {
            Class::Throttled => {
                self.throttled = self.throttled.saturating_add(1);
                let until = outcome.not_before.filter(|at| *at > now);
                if !current {
                    self.refine(call, now);
                }
                // Calls in flight are permuted on their way, so the most there were is the level that was refused.
                let level = call.level.max(in_flight);
                match until {
                    Some(until) => self.refused_until(until, current, level, now),
                    None if current => self.refused(in_flight, level, now),
                    None => {}
                }
                true
            }
            Class::Ok | Class::Rejected if current => self.served(true, now),
            // The org looked at the request: the depth is sounded, though nothing is learnt about room.
            Class::Terminal | Class::TooLarge if current => self.served(false, now),
            _ => false,
        }
    }

    fn served(&mut self, grow: bool, now: Instant) -> bool {
        self.served = true;
        self.strikes = 0;
        self.missed = 0;
        if self.sounding {
            self.sounding = false;
            if !self.told {
                self.open = self.open.max((self.familiar / 2.0).floor().min(self.limit));
            }
            self.new_window();
            self.grow_later(2.0, now);
            return true;
        }
        if !grow {
            return false;
        }
        let paced = self.pace_served(now);
        self.clean += 1;
        if self.clean < self.open as usize {
            return paced;
        }
        let reached = self.reached;
        self.new_window();
        self.full_window(reached, now) || paced
    }

    fn pace_served(&mut self, now: Instant) -> bool {
        let Some(pace) = &mut self.pace else { return false };
        let from = pace.rate();
        match pace.served(now) {
            Turn::Kept => false,
            Turn::Grew => {
                let to = pace.rate();
                self.note(from, to, Why::PaceGrown, now);
                true
            }
            // With so many slots their number is the finer measure.
            Turn::Idle if self.reached && self.limit >= FEW as f64 => {
                self.pace = None;
                self.note(from, f64::INFINITY, Why::PaceEnded, now);
                true
            }
            Turn::Idle => false,
        }
    }

    /// A window of as many clean answers as calls are allowed. True if anything grew.
    fn full_window(&mut self, reached: bool, now: Instant) -> bool {
        if self.open >= self.limit {
            self.plateau.clean();
        }
        let from = self.open;
        if !reached || from >= self.familiar && self.grow_from.is_some_and(|at| now < at) {
            return false;
        }
        if self.open < self.limit {
            self.open = (self.open * 2.0).min(self.limit);
        } else {
            let grown = if self.slow_start {
                self.limit * 2.0
            } else if self.told {
                self.limit + self.settings.step
            } else {
                let Some(grown) = self.plateau.grown(self.limit, now) else { return false };
                grown
            };
            self.limit = self.within(grown);
            self.open = self.limit;
            self.note(from, self.limit, Why::Grown, now);
        }
        self.grow_later(self.open / from, now);
        true
    }

    /// After growth by this factor: none for as long as it should have taken.
    fn grow_later(&mut self, factor: f64, now: Instant) {
        let seconds = factor.ln() / self.settings.growth.ln();
        self.grow_from = Duration::try_from_secs_f64(seconds).ok().and_then(|wait| now.checked_add(wait.min(FAR)));
    }

    /// Refused with a time: the org is held, and then one call goes first.
    fn refused_until(&mut self, until: Instant, current: bool, level: usize, now: Instant) {
        let ceiling = now + self.settings.ceiling.min(FAR);
        // A hint that its reader cut down to the same ceiling was cut a moment ago.
        let parked = ceiling.checked_sub(READING.min(self.settings.ceiling / 2)).is_some_and(|at| until >= at);
        let reason = if parked { HoldReason::Parked } else { HoldReason::Hint };
        if current {
            if self.told {
                // A call that went alone says nothing about how many may go together.
                if !self.sounding {
                    self.cut(self.limit * self.settings.cut, Why::Held, now);
                }
            } else {
                self.learn(level, Why::Held, until.min(ceiling) - now, now);
            }
        }
        // Whoever flies was admitted before this hold, so its answer must not end the sounding that follows.
        if current || self.held_until(now).is_none() {
            self.new_epoch();
        }
        let spread = self.settings.spread.min(FAR).mul_f64(self.rng.f64());
        self.hold_until(until.min(ceiling) + spread, reason, now);
    }

    /// Refused without a time.
    fn refused(&mut self, in_flight: usize, level: usize, now: Instant) {
        let whole = !self.served;
        if self.told {
            if self.sounding || whole || self.open < 2.0 {
                if !self.sounding {
                    self.cut(self.limit * self.settings.cut, Why::Refused, now);
                }
                self.pause(now);
            } else {
                self.cut(self.limit.min(in_flight as f64) * self.settings.bare_cut, Why::Refused, now);
                self.new_epoch();
            }
            return;
        }
        self.missed = if whole { self.missed + 1 } else { 0 };
        if self.sounding || self.missed > 1 {
            self.pause(now);
        } else {
            self.learn(level, Why::Refused, Duration::ZERO, now);
            self.new_epoch();
        }
    }

    /// Even one call was too many, or everything is: a pause that grows.
    fn pause(&mut self, now: Instant) {
        let pause = self.settings.backoff.saturating_mul(1 << self.strikes.min(16)).min(self.settings.backoff_max);
        self.strikes = self.strikes.saturating_add(1);
        self.new_epoch();
        let pause = pause.min(FAR).mul_f64(1.0 + 0.25 * self.rng.f64());
        self.hold_until(now + pause, HoldReason::Backoff, now);
    }

    /// What a refusal teaches where nothing tells the limit.
    fn learn(&mut self, level: usize, why: Why, hold: Duration, now: Instant) {
        let meter = self.meter.unwrap_or(Meter::new(now));
        // A concurrency limit refuses the first call above it. One that refuses what it has just accepted limits the rate.
        let enough = if level == 1 { 1 } else { ENOUGH };
        // Nor does it hold an org for long, and then refuse fewer than fitted before.
        let held_long = self.hold.is_some_and(|hold| hold.reason != HoldReason::Backoff) && self.familiar == 0.0;
        let rate = held_long && self.open < self.limit || level <= FEW && self.sent[level.max(1) - 1] > enough;
        let rate = rate && self.served;
        if let Some(pace) = &mut self.pace {
            let from = pace.rate();
            if pace.refused(&meter, now) {
                let to = pace.rate();
                self.note(from, to, Why::PaceRefused, now);
            } else {
                self.pace = None;
                self.no_pace_until = now.checked_add(NO_PACE);
                self.note(from, f64::INFINITY, Why::PaceFutile, now);
            }
        } else if rate && self.no_pace_until.is_none_or(|until| until <= now) {
            let pace = Pace::new(&meter, self.settings.backoff_max, now);
            self.note(f64::INFINITY, pace.rate(), Why::PaceBegan, now);
            self.pace = Some(pace);
            self.plateau.forget();
        } else if self.sounding {
            // A call that went alone says nothing about how many may go together.
        } else if self.served || why == Why::Held {
            let to = self.plateau.refused(self.limit, level, hold, &self.settings, now);
            self.cut(to, why, now);
            self.refines = true;
        } else {
            let to = self.plateau.refused_again(self.limit, &self.settings, now);
            self.cut(to, Why::RefusedAgain, now);
        }
        self.meter = Some(Meter::new(now));
        self.sent = [0; FEW];
    }

    /// Another refusal of the burst that the last cut was for: what is left in flight is what fitted.
    fn refine(&mut self, call: Admitted, now: Instant) {
        if self.refines && call.epoch + 1 == self.epoch {
            let to = self.plateau.refined(self.limit);
            self.cut(to, Why::Refined, now);
        }
    }

    fn cut(&mut self, to: f64, why: Why, now: Instant) {
        let from = self.limit;
        // Never upwards, whatever the floor says.
        self.limit = self.within(to).min(self.limit);
        self.open = self.open.min(self.limit);
        self.slow_start = false;
        self.note(from, self.limit, why, now);
    }

    fn new_epoch(&mut self) {
        self.epoch += 1;
        self.served = false;
        self.new_window();
    }

    fn new_window(&mut self) {
        self.clean = 0;
        self.reached = false;
    }

    fn hold_until(&mut self, until: Instant, reason: HoldReason, now: Instant) {
        self.sounding = true;
        self.open = 1.0;
        self.familiar = if until - now > self.settings.idle { 0.0 } else { self.limit };
        if let Some(meter) = &mut self.meter {
            meter.held(until, now);
        }
        // The longest wins.
        if self.hold.is_none_or(|hold| hold.until < until) {
            self.hold = Some(Hold::new(until, reason));
        }
    }
}

#[cfg(test)]
mod tests {
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

    /// A law whose depth has been sounded.
    fn open(cap: usize, start: f64) -> (Law, Instant) {
        let now = Instant::now();
        let mut law = law(cap, start);
        let call = law.admitted(1, now);
        law.answered(call, ok(), 1, now);
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
            law.answered(call, ok(), slots, *now);
        }
    }

    #[test]
    fn the_first_call_travels_alone_then_a_quarter_of_the_cap_is_open() {
        let now = Instant::now();
        let mut law = Law::new(settings(), 100, fastrand::Rng::with_seed(1));
        assert_eq!(law.slots(now), 1);
        let call = law.admitted(1, now);
        law.answered(call, ok(), 1, now);
        assert_eq!(law.slots(now), 25);
    }

    #[test]
    fn a_lone_call_that_got_no_answer_leaves_the_depth_unsounded() {
        let now = Instant::now();
        for class in [Class::Transport, Class::Overloaded, Class::Unauthorised, Class::Local] {
            let mut law = law(100, 0.25);
            let call = law.admitted(1, now);
            law.answered(call, Outcome::of(class), 1, now);
            assert_eq!(law.slots(now), 1, "{class}");
        }
        for class in [Class::Rejected, Class::Terminal, Class::TooLarge] {
            let mut law = law(100, 0.25);
            let call = law.admitted(1, now);
            law.answered(call, Outcome::of(class), 1, now);
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
        law.answered(call, bare(), 100, now);
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
        let (mut law, now) = open(100, 0.2);
        for _ in 0..1_000 {
            let call = law.admitted(2, now);
            law.answered(call, ok(), 2, now);
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
        law.answered(epochs[0], ok(), 100, now);
        for (i, epoch) in epochs.into_iter().enumerate() {
            law.answered(epoch, hinted(now, SECOND), 100 - i, now);
        }
        assert_eq!(law.limit(), 50.0);
        assert_eq!(law.epoch(), 1);
    }

    #[test]
    fn a_bare_refusal_stays_near_the_point_of_refusal_and_holds_nothing() {
        let (mut law, mut now) = open(100, 1.0);
        full_window(&mut law, &mut now);
        let call = law.admitted(40, now);
        law.answered(call, bare(), 40, now);
        assert_eq!(law.limit(), 36.0);
        assert_eq!(law.slots(now), 36);
    }

    #[test]
    fn a_window_refused_as_a_whole_falls_back_to_one_call_and_a_pause() {
        let (mut law, now) = open(100, 0.25);
        let call = law.admitted(25, now);
        law.answered(call, bare(), 25, now);
        assert!(law.slots(now) > 1, "the epoch had been served");
        let call = law.admitted(20, now);
        law.answered(call, bare(), 20, now);
        assert_eq!(law.slots(now), 0);
        assert_eq!(law.slots(now + SECOND), 1);
    }

    #[test]
    fn a_hold_ends_at_its_hint_and_one_call_goes_first_then_the_window_doubles() {
        let (mut law, now) = open(100, 0.4);
        let call = law.admitted(40, now);
        law.answered(call, hinted(now, 30 * SECOND), 40, now);
        let before = now + 30 * SECOND - Duration::from_millis(1);
        assert_eq!(law.slots(before), 0);
        let mut then = now + 30 * SECOND;
        assert_eq!(law.slots(then), 1);
        let mut seen = vec![];
        let call = law.admitted(1, then);
        law.answered(call, ok(), 1, then);
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
        law.answered(old, hinted(now, SECOND), 40, now);
        let mut then = now + 2 * SECOND;
        law.answered(old, ok(), 39, then);
        assert_eq!(law.slots(then), 1, "an answer from before the hold says nothing");
        let call = law.admitted(1, then);
        law.answered(call, ok(), 1, then);
        full_window(&mut law, &mut then);
        assert_eq!(law.slots(then), 2);
    }

    #[test]
    fn the_longest_hint_wins() {
        let (mut law, now) = open(100, 0.4);
        let call = law.admitted(40, now);
        for wait in [5, 20, 1] {
            law.answered(call, hinted(now, wait * SECOND), 40, now);
        }
        assert_eq!(law.held_until(now), Some(now + 20 * SECOND));
    }

    #[test]
    fn a_hint_beyond_the_ceiling_parks_the_org_until_a_probe() {
        let (mut law, now) = open(100, 0.4);
        let call = law.admitted(40, now);
        law.answered(call, hinted(now, Duration::from_secs(999_999)), 40, now);
        let hold = law.hold().unwrap();
        assert_eq!(hold.reason, HoldReason::Parked);
        assert_eq!(hold.until, now + crate::outcome::DEFAULT_CEILING);
        assert_eq!(law.slots(hold.until), 1);
        let call = law.admitted(1, hold.until);
        law.answered(call, ok(), 1, hold.until);
        assert!(law.held_until(hold.until).is_none(), "one good answer reopens it long before the hint");
    }

    #[test]
    fn a_hint_cut_down_to_the_ceiling_by_its_reader_parks_too() {
        let read = Instant::now();
        let now = read + Duration::from_millis(3);
        for (wait, reason) in [(300, HoldReason::Parked), (298, HoldReason::Hint)] {
            let mut law = law(100, 0.25);
            let call = law.admitted(1, now);
            law.answered(call, hinted(read, wait * SECOND), 1, now);
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
            law.answered(call, hinted(now, 30 * SECOND), 1, now);
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
                    law.answered(call, bare(), 1, now);
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
            law.answered(call, bare(), 1, at);
            at = law.held_until(at).unwrap();
        }
        let call = law.admitted(1, at);
        law.answered(call, ok(), 1, at);
        assert_eq!(law.strikes, 0);
    }

    #[test]
    fn a_cut_never_raises_a_limit_and_a_cap_below_the_floor_wins() {
        let now = Instant::now();
        let settings = Settings::builder().floor(4).spread(Duration::ZERO).build().unwrap();
        let mut law = Law::new(settings, 1, fastrand::Rng::with_seed(1));
        let call = law.admitted(1, now);
        law.answered(call, ok(), 1, now);
        let call = law.admitted(1, now);
        law.answered(call, hinted(now, SECOND), 1, now);
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
        law.answered(calls[24], ok(), 25, now);
        for (i, refused) in [7, 0, 23, 3, 11].into_iter().enumerate() {
            law.answered(calls[refused], bare(), 25 - i, now);
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
            law.answered(call, bare(), 100 - i, now);
        }
        assert_eq!((law.limit(), law.epoch()), (50.0, 1));
    }

    #[test]
    fn untold_it_rests_below_the_point_of_refusal_then_probes_by_one_two_four() {
        let (mut law, mut now) = untold(100, 0.25);
        full_window(&mut law, &mut now);
        assert_eq!(law.limit(), 50.0);
        let calls = fly(&mut law, 50, now);
        law.answered(calls[0], ok(), 50, now);
        law.answered(calls[49], bare(), 49, now);
        let mut seen = vec![];
        for _ in 0..5 {
            seen.push(law.limit());
            full_window(&mut law, &mut now);
        }
        assert_eq!(seen, [49.0, 50.0, 52.0, 56.0, 64.0], "a window of a second outlasts the first rest");
        // Refused again five seconds later: it rests for ten.
        let calls = fly(&mut law, 72, now);
        law.answered(calls[0], ok(), 72, now);
        law.answered(calls[71], bare(), 72, now);
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
        law.answered(first, bare(), 20, now);
        let second = law.admitted(19, now);
        law.answered(second, bare(), 19, now);
        assert_eq!((law.limit(), law.slots(now)), (9.5, 9));
        let third = law.admitted(9, now);
        law.answered(third, bare(), 9, now);
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
            law.answered(call, ok(), 1, at(100 * i + 50));
        }
        let call = law.admitted(1, at(2_000));
        assert_eq!(law.cell().pace, None);
        law.answered(call, bare(), 1, at(2_000));
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
        law.answered(calls[2], bare(), 3, now);
        assert_eq!((law.cell().pace, law.limit()), (None, 2.0));
    }

    #[test]
    fn untold_after_a_hint_it_rests_long_enough_that_holds_cost_a_twenty_fifth() {
        let (mut law, mut now) = untold(100, 0.2);
        let calls = fly(&mut law, 20, now);
        law.answered(calls[19], hinted(now, SECOND), 20, now);
        assert_eq!(law.limit(), 19.0, "a refusal with a hint is a point of refusal too");
        let refused = now;
        now += SECOND;
        let lone = law.admitted(1, now);
        law.answered(lone, ok(), 1, now);
        assert_eq!(law.slots(now), 9, "after a short hold half is open at once");
        while law.limit() < 19.5 {
            full_window(&mut law, &mut now);
        }
        assert_eq!(now - refused, 26 * SECOND);
    }

    #[test]
    fn growth_is_bounded_by_time_however_fast_the_answers() {
        let settings = Settings::builder().start(0.01).growth_per_second(16.0).build().unwrap();
        let start = Instant::now();
        let mut law = Law::new(settings, 10_000, fastrand::Rng::with_seed(1));
        let sound = law.admitted(1, start);
        law.answered(sound, ok(), 1, start);
        for ms in 0..1_000 {
            let now = start + Duration::from_millis(ms);
            let slots = law.slots(now);
            for call in fly(&mut law, slots, now) {
                law.answered(call, ok(), 1, now);
            }
            let bound = 100.0 * 16f64.powf(ms as f64 / 1e3);
            assert!(law.limit() <= bound.max(100.0) + 1e-6, "{} after {ms} ms", law.limit());
        }
        assert_eq!(law.limit(), 800.0);
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
            law.answered(call, ok(), 1, now);
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

    #[derive(Clone, Debug)]
    enum Event {
        Admit,
        Answer { call: usize, class: Class, hint_ms: Option<u64> },
        Drop { call: usize },
        Wait { ms: u64 },
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => Just(Event::Admit),
            4 => (any::<usize>(), proptest::sample::select(&Class::ALL[..]), proptest::option::of(0..100_000u64))
                .prop_map(|(call, class, hint_ms)| Event::Answer { call, class, hint_ms }),
            1 => any::<usize>().prop_map(|call| Event::Drop { call }),
            1 => (0..40_000u64).prop_map(|ms| Event::Wait { ms }),
        ]
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
            let mut cuts = 0u64;
            for event in events {
                let limit_before = law.limit();
                match event {
                    Event::Admit => if law.free(flying.len(), now) > 0 {
                        let n = flying.len() + 1;
                        flying.push(law.admitted(n, now));
                    },
                    Event::Answer { call, class, hint_ms } => if !flying.is_empty() {
                        let in_flight = flying.len();
                        let call = flying.swap_remove(call % in_flight);
                        let at = hint_ms.map(|ms| now + Duration::from_millis(ms));
                        law.answered(call, Outcome::of(class).not_before(at), in_flight, now);
                        if law.limit() < limit_before {
                            prop_assert_eq!(class, Class::Throttled);
                        }
                        // What refines a cut by the rest of its burst is no cut of its own.
                        cuts += law.changes().filter(|change| change.to < change.from && change.why != Why::Refined).count() as u64;
                    },
                    Event::Drop { call } => if !flying.is_empty() {
                        let n = flying.len();
                        flying.swap_remove(call % n);
                        prop_assert_eq!(law.limit(), limit_before);
                    },
                    Event::Wait { ms } => now += Duration::from_millis(ms),
                }
                prop_assert!(law.limit().is_finite());
                prop_assert!(law.limit() >= 1.0 && law.limit() <= cap as f64);
                prop_assert!(law.open <= law.limit && law.open >= 1.0);
                prop_assert!(cuts <= law.epoch());
                prop_assert!(law.slots(now) <= cap);
                // Progress: free now, or at a known time, or when what flies comes back.
                let opens = law.opens_at(0, now).unwrap_or(now);
                prop_assert!(opens <= now + Duration::from_secs(301));
                prop_assert!(law.slots(opens) >= 1);
                prop_assert!(law.cell().pace.is_none_or(|pace| pace.is_finite() && pace > 0.0));
            }
        }
    }
}
