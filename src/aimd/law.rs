//! How a limit moves: pure, no runtime, `now` passed in.
//!
//! Additive increase, multiplicative decrease, with what a quota asks for besides: the first call travels alone; a burst of
//! refusals is one cut (each call carries the epoch it was admitted in, and how many were in flight then); the limit grows
//! only when it was reached, and no faster than so much a second; a hint holds the org; and after a hold one call goes first,
//! then the window opens by doubling.
//!
//! Where the answers do not tell what refuses, refusals are all there is: [`Plateau`] finds how many calls fit, and [`Pace`] how
//! many a second when no number of slots is right.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    pace::{Meter, Pace, Turn},
    plateau::Plateau,
    settings::Settings,
};
use crate::{
    org::{Change, Hold, HoldReason, LimitCell, Tuning, Why},
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
    /// The epoch that began with the last hold.
    reopened: u64,
    /// Calls in flight that were admitted since then. Those from before it are not what reopens the org, however long they last.
    young: usize,
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
    /// The last refusal was by a limit that they do not tell.
    hidden: bool,
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
            reopened: 0,
            young: 0,
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
            hidden: false,
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
            floor: self.settings.floor.min(self.cap),
            ceiling: self.settings.ceiling,
            epoch: self.epoch,
            throttled: self.throttled,
            pace: self.pace.as_ref().map(Pace::rate),
        }
    }

    /// The changes since they were last asked for.
    pub(crate) fn news(&self) -> &[Change] {
        &self.changes
    }

    pub(crate) fn changes(&mut self) -> std::vec::Drain<'_, Change> {
        self.changes.drain(..)
    }

    fn note(&mut self, from: f64, to: f64, why: Why, now: Instant) {
        if from != to {
            self.changes.push(Change::new(now, from, to, why));
        }
    }

    /// The bounds change. No call in flight is lost by it: where there are more than are allowed now, none is admitted.
    pub(crate) fn retune(&mut self, tuning: Tuning, now: Instant) {
        let from = self.limit;
        if self.warm_up() >= self.cap as f64 {
            // When it was busy was of no consequence so far, and not noted.
            self.busy = None;
        }
        // After a hold the window opens from one call whatever the limit is.
        let fully_open = self.open >= self.limit && (self.epoch == 0 || !self.sounding);
        self.settings.floor = tuning.floor.unwrap_or(self.settings.floor);
        if let Some(cap) = tuning.cap.map(|cap| cap.max(1)) {
            let bound = self.limit >= self.cap as f64;
            let raised = cap > self.cap;
            self.cap = cap;
            // Nothing is known of the levels above, as at the start. A limit that was found by refusals is known.
            self.slow_start |= raised && bound;
            if raised && self.slow_start {
                self.limit = self.limit.max(self.warm_up());
            }
        }
        self.limit = self.within(self.limit);
        self.open = if fully_open { self.limit } else { self.open.min(self.limit) };
        self.note(from, self.limit, Why::Retuned, now);
        if let Some(ceiling) = tuning.ceiling {
            self.settings.ceiling = ceiling;
            let latest = now + ceiling.min(FAR);
            if let Some(hold) = &mut self.hold {
                if hold.until > latest && hold.reason != HoldReason::Backoff {
                    *hold = Hold::new(latest, HoldReason::Parked);
                }
            }
        }
    }

    /// From now on the answers tell the quota, or do not.
    pub(crate) fn quota_told(&mut self, told: bool) {
        self.told = told;
        if told {
            self.pace = None;
        }
    }

    /// How many admitted since the last hold may be in flight.
    fn width(&self) -> usize {
        // At least 1 and at most the cap: the cast loses only the fraction.
        if self.sounding { 1 } else { self.open as usize }
    }

    /// How many more may be in flight when neither a hold nor the pace forbids it.
    fn room(&self, in_flight: usize) -> usize {
        self.width().saturating_sub(self.young).min((self.limit as usize).saturating_sub(in_flight))
    }

    /// How many may be admitted now: by a pace, one at a time.
    pub(crate) fn free(&self, in_flight: usize, now: Instant) -> usize {
        if self.not_before(now).is_some() {
            return 0;
        }
        let free = self.room(in_flight);
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
        self.not_before(now).filter(|_| self.room(in_flight) > 0)
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
        // Of a start that is no whole number as many are in flight as ever can be.
        if self.busy.is_none() || in_flight as f64 >= start.floor() {
            self.busy = Some(now);
        }
        self.young += 1;
        if self.room(in_flight) == 0 {
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

    /// A call gives its slot back.
    pub(crate) fn left(&mut self, call: Admitted) {
        if call.epoch >= self.reopened {
            self.young = self.young.saturating_sub(1);
        }
    }

    /// Whether [`free`](Law::free) or [`admitted`](Law::admitted) would do something else at a later time than `seen`.
    pub(crate) fn admits_by_time(&self, in_flight: usize, seen: Instant) -> bool {
        let start = self.warm_up();
        // Being idle is of no consequence for a limit that begins where it ends.
        let idles = self.open > start || start < self.cap as f64 && in_flight as f64 + 1.0 >= start.floor();
        idles || self.busy.is_none() || self.meter.is_none() || self.opens_by_time(seen)
    }

    /// Whether [`free`](Law::free) or [`opens_at`](Law::opens_at) would say something else at a later time than `seen`.
    pub(crate) fn opens_by_time(&self, seen: Instant) -> bool {
        self.pace.is_some() || self.hold.is_some_and(|hold| hold.until > seen)
    }

    /// Counts an answer that moves nothing, as most do, for which no time is needed. False if it is one that has to be
    /// [`answered`](Law::answered).
    pub(crate) fn counted(&mut self, call: Admitted, outcome: Outcome) -> bool {
        if self.sounding || self.pace.is_some() || call.epoch != self.epoch {
            return false;
        }
        let grows = matches!(outcome.class, Class::Ok | Class::Rejected) && self.clean + 1 < self.open as usize;
        if grows {
            self.clean += 1;
            self.answered_well();
        }
        grows
    }

    /// An answer was read of a call; `in_flight` still counts it. A refusal is by a `hidden` limit where the quota that is told does
    /// not explain it. True if limit, pace or hold moved.
    pub(crate) fn answered(
        &mut self,
        call: Admitted,
        outcome: Outcome,
        hidden: bool,
        in_flight: usize,
        now: Instant,
    ) -> bool {
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
                if current {
                    // Where one goes alone, or may, it was not for the company.
                    self.hidden = hidden && level > 1 && self.open >= 2.0;
                }
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
        self.answered_well();
        if self.sounding {
            self.sounding = false;
            if self.is_blind() {
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

    /// Refusals in a row begin anew.
    fn answered_well(&mut self) {
        self.served = true;
        self.strikes = 0;
        self.missed = 0;
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
            } else if self.told && !self.plateau.is_found() {
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
            if !self.is_blind() {
                // A call that went alone says nothing about how many may go together.
                if !self.sounding {
                    self.cut_as_told(self.limit * self.settings.cut, Why::Held, now);
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
        if !self.is_blind() {
            if self.sounding || whole || self.open < 2.0 {
                if !self.sounding {
                    self.cut_as_told(self.limit * self.settings.cut, Why::Refused, now);
                }
                self.pause(now);
            } else {
                self.cut_as_told(self.limit.min(in_flight as f64) * self.settings.bare_cut, Why::Refused, now);
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

    /// Nothing tells what the last refusal was for.
    fn is_blind(&self) -> bool {
        !self.told || self.hidden
    }

    /// What a refusal teaches where nothing tells the limit.
    fn learn(&mut self, level: usize, why: Why, hold: Duration, now: Instant) {
        let meter = self.meter.unwrap_or(Meter::new(now));
        // A concurrency limit refuses the first call above it. One that refuses what it has just accepted limits the rate.
        let enough = if level == 1 { 1 } else { ENOUGH };
        // Nor does it hold an org for long, and then refuse fewer than fitted before.
        let held_long = self.hold.is_some_and(|hold| hold.reason != HoldReason::Backoff) && self.familiar == 0.0;
        let rate = held_long && self.open < self.limit || level <= FEW && self.sent[level.max(1) - 1] > enough;
        let rate = rate && self.served && !self.told;
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

    /// For a refusal that the quota explains: the rest of its burst says no more, and the plateau is left.
    fn cut_as_told(&mut self, to: f64, why: Why, now: Instant) {
        self.refines = false;
        self.plateau.left();
        self.cut(to, why, now);
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
        // None of this epoch flies yet: while the org is held none is admitted.
        (self.reopened, self.young) = (self.epoch, 0);
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
mod tests;
