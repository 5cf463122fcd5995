//! A pace below one slot: where an account may start so many calls a second, no number of slots is right. Pure.
//!
//! Such a provider is a token bucket. When it refuses, it is empty; what it admitted between two refusals is what it was
//! refilled with in between, so accepted ÷ time *is* the rate. A little above it is the probe: a bucket forgives a small
//! excess for capacity ÷ excess.

use std::time::Duration;

use tokio::time::Instant;

/// How far below a measured rate a pace begins.
const BELOW: f64 = 0.97;
const BELOW_PROVEN: f64 = 0.985;
/// The first step of a probe; it doubles with every step that is not refused, up to the largest.
const STEP: f64 = 0.02;
const STEP_MAX: f64 = 0.25;
/// How many clean calls a step of a probe takes, or as many as go in a second if that is more.
const PROBE: f64 = 16.0;
/// How many of them show that a pace can be kept, whatever was measured before.
const PROVES: f64 = 8.0;
/// How many clean calls, or seconds if that is longer, a pace rests at most before it is probed.
const REST_CALLS: f64 = 64.0;
/// A start up to this late does not put off the next: timers are not exact.
const GRAIN: Duration = Duration::from_millis(4);

/// What an accepted call did to a pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing yet.
    Kept,
    /// It grew.
    Grew,
    /// Starts did not wait for it lately.
    Idle,
}

/// What was accepted since the last refusal, and since when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    since: Instant,
    started: f64,
}

impl Meter {
    pub(crate) fn new(since: Instant) -> Self {
        Meter { since, started: 0.0 }
    }

    pub(crate) fn started(&mut self) {
        self.started += 1.0;
    }

    /// All that were started but the one that was refused: refusals come fast, so what is in flight yet was accepted.
    fn accepted(&self) -> f64 {
        (self.started - 1.0).max(0.0)
    }

    /// Nothing that happened before this counts: a bucket that stands still longer runs over.
    pub(crate) fn not_before(&mut self, at: Instant) {
        self.since = self.since.max(at);
    }

    /// Calls a second. The bucket held something between none and one at either end.
    fn rate(&self, now: Instant) -> f64 {
        self.accepted().max(0.5) / now.saturating_duration_since(self.since).as_secs_f64().max(1e-3)
    }

    /// How wrong the rate may be, as a part of it.
    fn doubt(&self) -> f64 {
        (1.0 / (self.accepted() + 1.0)).clamp(STEP, STEP_MAX)
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Pace {
    rate: f64,
    /// Never slower.
    floor: f64,
    /// When the next call may start.
    next: Instant,
    /// The next step of growth. It halves while the measure is in doubt, then doubles.
    step: f64,
    doubtful: bool,
    /// Clean calls in this window, and how many make it.
    clean: f64,
    window: f64,
    /// Starts in this window that waited for the pace.
    bound: f64,
    /// The fastest that stayed clean for a window since the last refusal.
    proven: f64,
}

impl Pace {
    /// A pace by what was measured up to this refusal.
    pub(crate) fn new(meter: &Meter, slowest: Duration, now: Instant) -> Self {
        let mut pace = Pace {
            rate: f64::INFINITY,
            floor: 1.0 / slowest.as_secs_f64(),
            next: now,
            step: STEP,
            doubtful: false,
            clean: 0.0,
            window: PROBE,
            bound: 0.0,
            proven: 0.0,
        };
        pace.refused(meter, now);
        pace
    }

    /// Calls a second.
    pub(crate) fn rate(&self) -> f64 {
        self.rate
    }

    /// When the next call may start.
    pub(crate) fn next(&self) -> Instant {
        self.next
    }

    fn turn(&self, turns: f64) -> Duration {
        // The floor keeps it short of what a duration holds.
        Duration::from_secs_f64(turns / self.rate)
    }

    pub(crate) fn started(&mut self, now: Instant) {
        let turn = self.turn(1.0);
        let late = now.saturating_duration_since(self.next);
        if late <= turn.max(GRAIN) {
            self.bound += 1.0;
        }
        let from = if late <= GRAIN { self.next } else { now };
        self.next = from + turn;
    }

    /// A call was accepted.
    pub(crate) fn served(&mut self, now: Instant) -> Turn {
        self.clean += 1.0;
        if self.clean < self.window {
            return Turn::Kept;
        }
        let bound = self.bound >= self.clean / 2.0;
        let shown = self.clean >= PROVES;
        self.window = self.window.min(PROBE.max(self.rate));
        self.new_window();
        if !bound {
            return Turn::Idle;
        }
        if shown {
            self.proven = self.rate;
        }
        self.rate *= 1.0 + self.step;
        self.step = (self.step * if self.doubtful { 0.5 } else { 2.0 }).clamp(STEP, STEP_MAX);
        self.doubtful &= self.step > STEP;
        self.next = self.next.min(now + self.turn(1.0));
        Turn::Grew
    }

    /// A call was refused. The meter begins anew after this.
    pub(crate) fn refused(&mut self, meter: &Meter, now: Instant) {
        // Where the bucket ran over meanwhile the measure is too low, but then a clean window has shown better.
        let measured = meter.rate(now);
        let rate = (BELOW * measured).max(BELOW_PROVEN * self.proven.min(measured * 1.25));
        self.rate = rate.min(BELOW * self.rate).max(self.floor);
        self.step = meter.doubt();
        self.doubtful = self.step > STEP;
        // It rests as long as it lasted: a place that is found again and again is probed ever more rarely.
        self.window = meter.accepted().clamp(4.0, REST_CALLS.max(self.rate * 10.0));
        self.proven = 0.0;
        self.new_window();
        // One turn and a half: the bucket may be anywhere below one.
        self.next = now + self.turn(1.5);
    }

    fn new_window(&mut self) {
        self.clean = 0.0;
        self.bound = 0.0;
    }
}
