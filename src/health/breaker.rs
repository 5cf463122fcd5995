//! When a circuit opens, and for how long: the trait, and the breaker that is used unless you bring your own. Pure.

use std::{fmt, time::Duration};

use tokio::time::Instant;

use crate::{org::BuildError, outcome::CEILING_MAX};

/// Decides when an org's circuit opens, and for how long.
///
/// The layer does the rest, whatever a breaker says: it lets no call pass while the circuit is open, then no more than
/// [`probes`](Breaker::probes) at a time, each of which gives its place back when it is dropped; a probe that the provider
/// answers closes the circuit, one that fails opens it again. Calls that were admitted before it opened are not told of: they
/// were told of by those that opened it.
///
/// It is asked under the lock of its circuit. It must not block, nor call the service that it guards.
///
/// ```
/// use std::time::Duration;
/// use tokio::time::Instant;
/// use tower_quota::health::Breaker;
///
/// /// Opens for a second at every failure.
/// struct Nervous;
///
/// impl Breaker for Nervous {
///     fn succeeded(&mut self, _calls: u64, _since: Instant, _now: Instant) {}
///
///     fn failed(&mut self, now: Instant) -> Option<Instant> {
///         Some(now + Duration::from_secs(1))
///     }
///
///     fn probe_failed(&mut self, now: Instant) -> Instant {
///         now + Duration::from_secs(1)
///     }
/// }
/// ```
pub trait Breaker: Send + 'static {
    /// So many calls, at least one, have succeeded since then. They are told of before the next failure, and not each by itself.
    fn succeeded(&mut self, calls: u64, since: Instant, now: Instant);

    /// A call has failed (5xx, timeout, transport) while the circuit was closed. `Some` opens it until then.
    fn failed(&mut self, now: Instant) -> Option<Instant>;

    /// The same, while so many more of the org's calls are under way, as far as the [limiter](crate::aimd) counts them. What fails is often
    /// quicker than what succeeds, so of the first answers to many calls more are failures than of all. Default: asks
    /// [`failed`](Breaker::failed).
    fn failed_among(&mut self, _under_way: usize, now: Instant) -> Option<Instant> {
        self.failed(now)
    }

    /// A probe has failed: until when the circuit is open again.
    fn probe_failed(&mut self, now: Instant) -> Instant;

    /// The provider has answered a probe, and the circuit is closed. Default: nothing.
    fn closed(&mut self, _now: Instant) {}

    /// How many probes may be out at once; 0 counts as 1. Default: 1.
    fn probes(&self) -> usize {
        1
    }
}

impl<B: Breaker + ?Sized> Breaker for Box<B> {
    fn succeeded(&mut self, calls: u64, since: Instant, now: Instant) {
        (**self).succeeded(calls, since, now);
    }

    fn failed(&mut self, now: Instant) -> Option<Instant> {
        (**self).failed(now)
    }

    fn failed_among(&mut self, under_way: usize, now: Instant) -> Option<Instant> {
        (**self).failed_among(under_way, now)
    }

    fn probe_failed(&mut self, now: Instant) -> Instant {
        (**self).probe_failed(now)
    }

    fn closed(&mut self, now: Instant) {
        (**self).closed(now);
    }

    fn probes(&self) -> usize {
        (**self).probes()
    }
}

/// Of a cooldown as much again at random, so that several processes do not come back at one instant. Drawn from the thread's own
/// generator.
const SPREAD: f64 = 0.2;

/// What a success leaves of the next cooldown: seven halve it. One good probe amid failures is little news.
const DECAY: f64 = 0.9;

/// Opens after so many failures in a row, or at such a rate of failures over a window. As long as more calls are under way than have failed
/// in a row, it waits for their answers: they are taken for successes.
///
/// Open, it cools down for half a second, or as long as all calls had failed by then, twice as long each time it opens again, four
/// seconds at most, and up to a fifth more at random: an org that has recovered is asked within five seconds, so a lone org is never
/// benched for long. What the next
/// cooldown would be decays with every success, by a tenth, and is not forgotten at the first.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::health::CircuitBreaker;
///
/// let breaker = CircuitBreaker::builder().consecutive(3).cooldown(Duration::from_millis(100), Duration::from_secs(1)).build()?;
/// # let _ = breaker;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CircuitBreaker {
    settings: Settings,
    window: Window,
    consecutive: u32,
    /// Since when all have failed.
    failing: Option<Instant>,
    /// How long it is open next.
    next: Duration,
}

#[derive(Clone, Debug)]
struct Settings {
    consecutive: u32,
    rate: f64,
    window: Duration,
    min_calls: u32,
    probes: usize,
    first: Duration,
    max: Duration,
}

impl CircuitBreaker {
    /// Starts from the defaults.
    #[must_use]
    pub fn builder() -> CircuitBreakerBuilder {
        CircuitBreakerBuilder {
            settings: Settings {
                consecutive: 5,
                rate: 0.5,
                window: Duration::from_secs(10),
                min_calls: 10,
                probes: 1,
                first: Duration::from_millis(500),
                max: Duration::from_secs(4),
            },
        }
    }

    fn of(settings: Settings) -> Self {
        CircuitBreaker {
            window: Window::new(settings.window),
            consecutive: 0,
            failing: None,
            next: settings.first,
            settings,
        }
    }

    fn open(&mut self, now: Instant) -> Instant {
        let lasts = self.next;
        self.next = lasts.saturating_mul(2).min(self.settings.max);
        (self.consecutive, self.failing) = (0, None);
        self.window.clear();
        now + lasts.mul_f64(1.0 + SPREAD * fastrand::f64())
    }
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        CircuitBreaker::of(CircuitBreaker::builder().settings)
    }
}

impl Clone for CircuitBreaker {
    /// A breaker with the same settings that has seen nothing.
    fn clone(&self) -> Self {
        CircuitBreaker::of(self.settings.clone())
    }
}

impl fmt::Debug for CircuitBreaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CircuitBreaker").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Breaker for CircuitBreaker {
    fn succeeded(&mut self, calls: u64, since: Instant, now: Instant) {
        (self.consecutive, self.failing) = (0, None);
        self.window.succeeded(calls, since, now);
        if self.next > self.settings.first {
            let left = DECAY.powf(calls as f64);
            self.next = self.next.mul_f64(left).max(self.settings.first);
        }
    }

    fn failed(&mut self, now: Instant) -> Option<Instant> {
        self.failed_among(0, now)
    }

    fn failed_among(&mut self, under_way: usize, now: Instant) -> Option<Instant> {
        self.consecutive += 1;
        let failing = now.saturating_duration_since(*self.failing.get_or_insert(now));
        self.window.failed(now);
        let (failed, calls) = self.window.counts();
        // Those under way may all succeed: no row of failures is long while it is shorter than they are many.
        let row = self.consecutive as usize;
        let often =
            calls >= f64::from(self.settings.min_calls) && failed >= self.settings.rate * (calls + under_way as f64);
        if !often && row < under_way.max(self.settings.consecutive as usize) {
            return None;
        }
        // Who has failed for so long already is not likely to be back sooner.
        self.next = self.next.max(failing.min(self.settings.max));
        Some(self.open(now))
    }

    fn probe_failed(&mut self, now: Instant) -> Instant {
        self.open(now)
    }

    fn probes(&self) -> usize {
        self.settings.probes
    }
}

/// Builds a [`CircuitBreaker`]; what is wrong is said by [`build`](CircuitBreakerBuilder::build).
#[derive(Clone, Debug)]
pub struct CircuitBreakerBuilder {
    settings: Settings,
}

impl CircuitBreakerBuilder {
    /// So many failures in a row open the circuit, at least 1. Default 5: of an org that fails 2 % of its calls that is one
    /// row in three hundred million.
    #[must_use]
    pub fn consecutive(mut self, failures: u32) -> Self {
        self.settings.consecutive = failures;
        self
    }

    /// Such a part of the calls in the [window](CircuitBreakerBuilder::window), in `(0, 1]`, opens the circuit, if there are
    /// [enough](CircuitBreakerBuilder::min_calls). Default 0.5: every other attempt is wasted.
    #[must_use]
    pub fn failure_rate(mut self, rate: f64) -> Self {
        self.settings.rate = rate;
        self
    }

    /// How far back calls count for the rate, longer than zero. It slides by tenths. Default 10 s.
    #[must_use]
    pub fn window(mut self, window: Duration) -> Self {
        self.settings.window = window;
        self
    }

    /// With fewer calls than these in the window there is no rate, at least 1. Default 10.
    #[must_use]
    pub fn min_calls(mut self, calls: u32) -> Self {
        self.settings.min_calls = calls;
        self
    }

    /// So many probes may be out at once, at least 1. Default 1.
    #[must_use]
    pub fn probes(mut self, probes: usize) -> Self {
        self.settings.probes = probes;
        self
    }

    /// How long the circuit is open the first time (longer, where calls had failed in a row for longer), and at most; up to a fifth
    /// is added at random. Longer than zero, at most a
    /// year. Default 500 ms and 4 s.
    #[must_use]
    pub fn cooldown(mut self, first: Duration, max: Duration) -> Self {
        self.settings.first = first;
        self.settings.max = max;
        self
    }

    /// The breaker.
    ///
    /// # Errors
    /// Names the field that is out of range.
    pub fn build(self) -> Result<CircuitBreaker, BuildError> {
        let s = &self.settings;
        if !(s.rate > 0.0 && s.rate <= 1.0) {
            return Err(BuildError::new("failure_rate", format!("{} is not above 0 and at most 1", s.rate)));
        }
        for (field, value) in [("consecutive", s.consecutive), ("min_calls", s.min_calls)] {
            if value == 0 {
                return Err(BuildError::new(field, "must be at least 1"));
            }
        }
        if s.probes == 0 {
            return Err(BuildError::new("probes", "must be at least 1: a circuit that opens would never close"));
        }
        if s.window.is_zero() || s.window > CEILING_MAX {
            return Err(BuildError::new("window", "must be longer than zero, and at most a year"));
        }
        if s.first.is_zero() || s.max < s.first || s.max > CEILING_MAX {
            return Err(BuildError::new(
                "cooldown",
                "the first must be longer than zero and not longer than the longest, which is at most a year",
            ));
        }
        Ok(CircuitBreaker::of(self.settings))
    }
}

/// Into how many parts a window is divided.
const PARTS: usize = 10;

/// What came of the calls of the last so-and-so long, part by part.
struct Window {
    part: Duration,
    /// When the newest part began.
    begun: Option<Instant>,
    /// The newest first. Successes are no whole numbers where they are spread.
    parts: [Part; PARTS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Part {
    succeeded: f64,
    failed: f64,
}

impl Window {
    fn new(length: Duration) -> Self {
        let part = (length / PARTS as u32).max(Duration::from_nanos(1));
        Window { part, begun: None, parts: [Part::default(); PARTS] }
    }

    fn clear(&mut self) {
        (self.begun, self.parts) = (None, [Part::default(); PARTS]);
    }

    fn slide(&mut self, now: Instant) {
        let begun = *self.begun.get_or_insert(now);
        let passed = now.saturating_duration_since(begun);
        let steps = usize::try_from(passed.as_nanos() / self.part.as_nanos()).unwrap_or(usize::MAX);
        if steps >= PARTS {
            self.clear();
            self.begun = Some(now);
        } else if steps > 0 {
            self.parts.rotate_right(steps);
            self.parts[..steps].fill(Part::default());
            self.begun = Some(begun + self.part * steps as u32);
        }
    }

    /// Nobody has noted when, so they are spread evenly over that time.
    fn succeeded(&mut self, calls: u64, since: Instant, now: Instant) {
        self.slide(now);
        let each = calls as f64 * self.part.as_secs_f64() / now.saturating_duration_since(since).as_secs_f64();
        let mut left = calls as f64;
        for part in &mut self.parts {
            let here = left.min(each);
            part.succeeded += here;
            left -= here;
        }
    }

    fn failed(&mut self, now: Instant) {
        self.slide(now);
        self.parts[0].failed += 1.0;
    }

    /// Failures, and all calls.
    fn counts(&self) -> (f64, f64) {
        let sum = |of: fn(&Part) -> f64| self.parts.iter().map(of).sum::<f64>();
        let failed = sum(|part| part.failed);
        (failed, failed + sum(|part| part.succeeded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    fn b() -> CircuitBreakerBuilder {
        CircuitBreaker::builder()
    }

    /// Which failure of these opens it: `.` succeeds, `x` fails, `_` is a second.
    fn opens(mut breaker: CircuitBreaker, calls: &str) -> Option<usize> {
        let mut now = Instant::now();
        for (i, call) in calls.chars().enumerate() {
            match call {
                '.' => breaker.succeeded(1, now, now),
                '_' => now += SECOND,
                _ if breaker.failed(now).is_some() => return Some(i),
                _ => {}
            }
        }
        None
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not_count_as_one() {
        let rowdy = || b().failure_rate(1.0).min_calls(1_000).build().unwrap();
        for (calls, at) in [
            ("xxxx", None),
            ("xxxxx", Some(4)),
            ("xxxx.xxxx", None),
            ("xxxx.xxxxx", Some(9)),
            ("x_x_x_x_x", Some(8)),
            ("..........", None),
        ] {
            assert_eq!(opens(rowdy(), calls), at, "{calls}");
        }
        assert_eq!(opens(b().consecutive(1).build().unwrap(), "x"), Some(0));
    }

    #[test]
    fn a_rate_of_failures_opens_it_once_there_are_enough_calls_in_the_window() {
        for (calls, at) in [
            // Nine are not enough; ten are.
            (".x.x.x.x.", None),
            (".x.x.x.x.x", Some(9)),
            // Four of ten are not half.
            (".x.x.x.x..", None),
            (".x.x.x.x..xx", Some(11)),
            // The first ones are out of the window when the last ones come.
            (".x.x.x.x.__________x", None),
            (".x.x.x.x._________x", Some(18)),
        ] {
            assert_eq!(opens(b().consecutive(1_000).build().unwrap(), calls), at, "{calls}");
        }
    }

    #[test]
    fn successes_that_come_all_at_once_are_spread_over_their_time() {
        // So many in so many seconds, and how many of them are in the ten of the window.
        for (calls, seconds, counted) in
            [(100, 0, 100.0), (100, 5, 100.0), (100, 10, 100.0), (100, 20, 50.0), (1_000, 1_000, 10.0)]
        {
            let mut window = Window::new(10 * SECOND);
            let start = Instant::now();
            window.succeeded(calls, start, start + seconds * SECOND);
            assert!((window.counts().1 - counted).abs() < 0.01, "{calls} in {seconds} s: {:?}", window.counts());
        }
        // An hour of good calls does not outweigh the failures of these seconds.
        let mut breaker = b().consecutive(1_000).build().unwrap();
        let (start, now) = (Instant::now(), Instant::now() + 3_600 * SECOND);
        breaker.succeeded(3_600, start, now);
        assert_eq!((0..20).position(|_| breaker.failed(now).is_some()), Some(9), "ten of twenty");
    }

    #[test]
    fn cooldowns_double_up_to_the_longest_and_every_success_takes_a_tenth_off() {
        let mut breaker = CircuitBreaker::default();
        let now = Instant::now();
        let lasts = |breaker: &mut CircuitBreaker| breaker.probe_failed(now) - now;
        for least in [500, 1_000, 2_000, 4_000, 4_000, 4_000] {
            let lasted = lasts(&mut breaker);
            assert!(least * MS <= lasted && lasted <= least * MS * 6 / 5, "{least}: {lasted:?}");
        }
        breaker.succeeded(1, now, now);
        assert!((3_600 * MS..4_320 * MS).contains(&lasts(&mut breaker)), "one success is little news");
        breaker.succeeded(100, now, now);
        assert!(lasts(&mut breaker) <= 600 * MS, "a hundred are enough");
    }

    #[test]
    fn a_circuit_is_open_at_first_for_as_long_as_all_had_failed_before() {
        // How far apart its five failures in a row come, and whether a success stands before the last five.
        for (apart, least) in
            [(0, 500), (100, 500), (125, 500), (250, 1_000), (600, 2_400), (1_000, 4_000), (60_000, 4_000)]
        {
            for after_a_success in [false, true] {
                let mut breaker = CircuitBreaker::default();
                let mut now = Instant::now();
                if after_a_success {
                    (0..4).for_each(|_| assert_eq!(breaker.failed(now), None));
                    now += 60 * SECOND;
                    breaker.succeeded(1, now, now);
                }
                for _ in 0..4 {
                    assert_eq!(breaker.failed(now), None, "{apart}");
                    now += apart * MS;
                }
                let lasts = breaker.failed(now).unwrap() - now;
                assert!((least * MS..=least * MS * 6 / 5).contains(&lasts), "{apart}: {lasts:?}");
                let again = breaker.probe_failed(now) - now;
                assert!(again >= (2 * least * MS).min(4 * SECOND), "{apart}: then {again:?}");
            }
        }
    }

    #[test]
    fn of_a_thousand_processes_no_two_come_back_at_one_instant_and_they_fill_the_fifth() {
        fastrand::seed(7);
        let now = Instant::now();
        for least in [500 * MS, 4 * SECOND] {
            let breaker = b().cooldown(least, least).build().unwrap();
            let mut lasted: Vec<_> = (0..1_000).map(|_| breaker.clone().probe_failed(now) - now).collect();
            lasted.sort();
            assert!(lasted.windows(2).filter(|pair| pair[0] == pair[1]).count() <= 1, "{least:?}");
            for tenth in 0..10 {
                let from = least.mul_f64(1.0 + f64::from(tenth) / 50.0);
                let here = lasted.iter().filter(|lasted| (from..from + least / 50).contains(lasted)).count();
                assert!((60..=140).contains(&here), "{here} of a thousand within {tenth} tenths of {least:?}");
            }
        }
    }

    #[test]
    fn a_bad_setting_names_its_field() {
        let year = CEILING_MAX;
        for (builder, field) in [
            (b().consecutive(0), "consecutive"),
            (b().failure_rate(0.0), "failure_rate"),
            (b().failure_rate(1.01), "failure_rate"),
            (b().failure_rate(f64::NAN), "failure_rate"),
            (b().min_calls(0), "min_calls"),
            (b().probes(0), "probes"),
            (b().window(Duration::ZERO), "window"),
            (b().window(year + MS), "window"),
            (b().cooldown(Duration::ZERO, SECOND), "cooldown"),
            (b().cooldown(2 * SECOND, SECOND), "cooldown"),
            (b().cooldown(SECOND, year + MS), "cooldown"),
        ] {
            assert_eq!(builder.build().unwrap_err().field(), field);
        }
        for good in
            [b(), b().failure_rate(1.0), b().window(Duration::from_nanos(1)), b().cooldown(year, year).window(year)]
        {
            let mut breaker = good.build().unwrap();
            let now = Instant::now();
            breaker.succeeded(u64::MAX, now, now + MS);
            assert!(breaker.probe_failed(now + SECOND) > now, "nothing overflows");
        }
    }

    #[test]
    fn a_clone_has_seen_nothing() {
        let mut breaker = CircuitBreaker::default();
        let now = Instant::now();
        assert!((0..4).all(|_| breaker.failed(now).is_none()));
        assert!((0..4).all(|_| breaker.clone().failed(now).is_none()));
        assert!(breaker.failed(now).is_some());
    }

    proptest! {
        #[test]
        fn it_is_never_open_for_longer_than_the_longest_cooldown_and_its_spread(
            steps in proptest::collection::vec((0..3u8, 0..3_000u64), 1..200),
            first in 1..2_000u64,
            more in 0..10_000u64,
        ) {
            let max = (first + more) * MS.as_millis() as u64;
            let mut breaker = b().cooldown(Duration::from_millis(first), Duration::from_millis(max)).build().unwrap();
            let mut now = Instant::now();
            for (step, wait) in steps {
                let before = now;
                now += Duration::from_millis(wait);
                let until = match step {
                    0 => { breaker.succeeded(wait + 1, before, now); None }
                    1 => breaker.failed(now),
                    _ => Some(breaker.probe_failed(now)),
                };
                if let Some(until) = until {
                    prop_assert!(now + Duration::from_millis(first) <= until);
                    prop_assert!(until <= now + Duration::from_millis(max).mul_f64(1.0 + SPREAD));
                }
            }
        }
    }
}
