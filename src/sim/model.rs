//! One org during a run, as pure arithmetic. No runtime and no clock: `now` comes in as the time since the start.

use std::time::Duration;

use super::bucket::{Bucket, PerResource, View};
use super::config::{Config, OrgConfig, RetryAfter, Step};
use super::draw::{Latency, lognormal, seconds};
use super::marker::Marker;
use super::truth::{Ledger, Levels};
use crate::org::Dialect;

/// What of a request counts here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ask {
    pub(super) body_bytes: usize,
    pub(super) max_tokens: Option<u64>,
    /// Embeddings put out no tokens.
    pub(super) puts_out: bool,
    /// Where answers are as long as their items say.
    pub(super) item: u64,
    pub(super) marker: Option<Marker>,
}

/// How long answers are, in tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    p50: f64,
    range: Option<[u64; 2]>,
}

impl Lengths {
    pub(super) fn of(rules: &OrgConfig) -> Self {
        Lengths { p50: rules.output_tokens_p50, range: rules.output_tokens_range }
    }

    fn draw(&self, rng: &mut fastrand::Rng) -> u64 {
        match self.range {
            Some([shortest, longest]) => rng.u64(shortest..=longest),
            None => (self.p50 * lognormal(0.5, rng)).round() as u64,
        }
    }

    /// What this item is answered with, and whether it was cut.
    pub(super) fn of_item(&self, seed: u64, ask: Ask) -> (u64, bool) {
        cut(ask, || self.draw(&mut fastrand::Rng::with_seed(seed ^ ask.item)))
    }
}

/// The output that is charged, of an answer of this length.
fn cut(ask: Ask, length: impl FnOnce() -> u64) -> (u64, bool) {
    if !ask.puts_out {
        return (0, false);
    }
    let (length, most) = (length(), ask.max_tokens.unwrap_or(64));
    match ask.marker {
        Some(Marker::MaxTokens) => (most, true),
        _ => (length.max(1).min(most), length > most),
    }
}

pub(super) fn input_tokens(body_bytes: usize) -> u64 {
    (body_bytes as u64).div_ceil(4)
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    Unauthorised,
    Refused {
        wait: Duration,
        form: RetryAfter,
        what: &'static str,
        /// Without a word on the quota.
        bare: bool,
    },
    Overloaded {
        status: u16,
    },
    ServerError,
    /// The error that the request asked for.
    Marked {
        marker: Marker,
        status: u16,
    },
    Reset,
    Hang,
    Answer {
        latency: Duration,
        input_tokens: u64,
        output_tokens: u64,
        cut: bool,
        flaw: Option<Flaw>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    Truncated,
    Empty,
    InBand,
}

/// How a call ended that was let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Ok {
        id: u64,
    },
    Empty,
    Truncated,
    InBand,
    /// A call that manages batches was answered with this status.
    Managed {
        status: u16,
    },
    /// What was done is done, but the reply is lost.
    Lost,
    /// The client went away first.
    Abandoned,
    /// Already counted on arrival: an error.
    Counted,
}

#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub(super) verdict: Verdict,
    /// The buckets right after this call.
    pub(super) views: PerResource<Option<View>>,
    /// Counts the org's calls from 1.
    pub(super) number: u64,
    /// Occupies a place of `max_concurrency` until it leaves.
    pub(super) admitted: bool,
}

/// One org during a run.
#[derive(Debug)]
pub(super) struct OrgModel {
    rules: OrgConfig,
    default_latency: Latency,
    unlimited: bool,
    dialect: Dialect,
    /// The seed of lengths, where items say them.
    by_item: Option<u64>,
    steps: std::vec::IntoIter<Step>,
    next_step: Option<Step>,
    /// The time up to which the buckets are refilled.
    refilled: Duration,
    buckets: PerResource<Option<Bucket>>,
    admitted: usize,
    rng: fastrand::Rng,
    pub(super) ledger: Ledger,
}

impl OrgModel {
    pub(super) fn new(config: &Config, index: usize) -> Self {
        let rules = config.orgs[index].clone();
        let mut steps = rules.steps().into_iter();
        let next_step = steps.next();
        OrgModel {
            buckets: rules.limits().map(|l| l.map(Bucket::full)),
            default_latency: config.latency,
            unlimited: config.unlimited,
            dialect: config.dialect,
            by_item: config.lengths_by_item.then_some(config.seed),
            steps,
            next_step,
            refilled: Duration::ZERO,
            admitted: 0,
            // An own generator for each org: what other orgs get moves none of its draws.
            rng: fastrand::Rng::with_seed(config.seed ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
            ledger: Ledger::new(rules.name.clone(), config.record_arrivals),
            rules,
        }
    }

    fn advance(&mut self, now: Duration) {
        while let Some(step) = self.next_step.take_if(|s| s.at_s <= now.as_secs_f64()) {
            self.refill(seconds(step.at_s));
            self.rules.apply(&step.set);
            for (bucket, limit) in self.buckets.iter_mut().zip(self.rules.limits()) {
                *bucket = limit.map(|limit| {
                    let level = bucket.as_ref().map_or(limit.capacity, |b| b.level.min(limit.capacity));
                    Bucket { limit, level }
                });
            }
            self.next_step = self.steps.next();
        }
        self.refill(now);
    }

    fn refill(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.refilled).as_secs_f64();
        self.refilled = self.refilled.max(now);
        for bucket in self.buckets.iter_mut().flatten() {
            bucket.refill(elapsed);
        }
    }

    pub(super) fn arrive(&mut self, now: Duration, ask: Ask) -> Arrival {
        self.advance(now);
        let verdict = self.judge(ask);
        let admitted = !matches!(verdict, Verdict::Unauthorised | Verdict::Refused { .. } | Verdict::Overloaded { .. });
        self.admitted += usize::from(admitted);
        let number = self.ledger.arrived(now, &verdict);
        let views = match self.unlimited {
            true => PerResource::default(),
            false => self.buckets.each_ref().map(|bucket| bucket.as_ref().map(Bucket::view)),
        };
        Arrival { verdict, views, number, admitted }
    }

    fn judge(&mut self, ask: Ask) -> Verdict {
        let form = self.rules.retry_after;
        let latency = self.rules.latency.unwrap_or(self.default_latency);
        if self.rules.unauthorised.strikes(&mut self.rng) {
            return Verdict::Unauthorised;
        }
        if self.rules.black_hole.strikes(&mut self.rng) {
            let wait = seconds(self.rules.black_hole_wait_s);
            return Verdict::Refused { wait, form, what: "requests per minute", bare: false };
        }
        if self.rules.overloaded.strikes(&mut self.rng) {
            let status = if self.dialect == Dialect::Anthropic { 529 } else { 503 };
            return Verdict::Overloaded { status };
        }
        let input = input_tokens(ask.body_bytes);
        let failure = ask.marker.and_then(|marker| Some((marker, marker.failure(self.dialect)?.status.as_u16())));
        let lengths = Lengths::of(&self.rules);
        let (output, cut) = match (failure, self.by_item) {
            (Some(_), _) => (0, false),
            (None, Some(seed)) => lengths.of_item(seed, ask),
            (None, None) => cut(ask, || lengths.draw(&mut self.rng)),
        };
        if !self.unlimited {
            if self.rules.max_concurrency.is_some_and(|max| self.admitted >= max) {
                let wait = seconds(latency.p50_ms / 1e3);
                return Verdict::Refused { wait, form, what: "number of concurrent connections", bare: false };
            }
            let costs = [1.0, input as f64, output as f64, (input + output) as f64];
            let names =
                ["requests per minute", "input tokens per minute", "output tokens per minute", "tokens per minute"];
            let mut refused: Option<(Duration, &'static str)> = None;
            for ((bucket, cost), what) in self.buckets.iter().zip(costs).zip(names) {
                let Some(bucket) = bucket.as_ref().filter(|b| !b.fits(cost)) else {
                    continue;
                };
                let wait = bucket.until(cost);
                if refused.is_none_or(|(longest, _)| wait > longest) {
                    refused = Some((wait, what));
                }
            }
            if let Some((wait, what)) = refused {
                return Verdict::Refused { wait, form, what, bare: self.rules.bare_429.strikes(&mut self.rng) };
            }
            for (bucket, cost) in self.buckets.iter_mut().zip(costs) {
                if let Some(bucket) = bucket {
                    bucket.take(cost);
                }
            }
        }
        if let Some((marker, status)) = failure {
            return Verdict::Marked { marker, status };
        }
        if self.rules.error_5xx.strikes(&mut self.rng) {
            return Verdict::ServerError;
        }
        if self.rules.reset.strikes(&mut self.rng) {
            return Verdict::Reset;
        }
        if self.rules.hang.strikes(&mut self.rng) {
            return Verdict::Hang;
        }
        let flaw = if self.rules.truncate.strikes(&mut self.rng) {
            Some(Flaw::Truncated)
        } else if self.rules.empty.strikes(&mut self.rng) {
            Some(Flaw::Empty)
        } else if self.rules.in_band.strikes(&mut self.rng) {
            Some(Flaw::InBand)
        } else {
            None
        };
        let flaw = match ask.marker {
            Some(Marker::Empty) => Some(Flaw::Empty),
            Some(Marker::InBand) => Some(Flaw::InBand),
            _ => flaw,
        };
        let latency = latency.draw(&mut self.rng);
        Verdict::Answer { latency, input_tokens: input, output_tokens: output, cut, flaw }
    }

    pub(super) fn lengths(&self) -> Lengths {
        Lengths::of(&self.rules)
    }

    pub(super) fn levels(&mut self, now: Duration) -> Levels {
        self.advance(now);
        if self.unlimited {
            return Levels::default();
        }
        let [requests, input_tokens, output_tokens, tokens] =
            self.buckets.each_ref().map(|bucket| bucket.as_ref().map(|bucket| bucket.level));
        Levels { requests, input_tokens, output_tokens, tokens }
    }

    pub(super) fn leave(&mut self, now: Duration, admitted: bool, ending: Ending) {
        self.admitted -= usize::from(admitted);
        self.ledger.left(now, ending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::config::Change;

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn model(org: OrgConfig) -> OrgModel {
        OrgModel::new(&Config::default().org(org), 0)
    }

    fn org() -> OrgConfig {
        OrgConfig::new("o", "k").requests_per_minute(60.0)
    }

    /// Embeddings of no length: they cost one request and nothing else.
    fn ask() -> Ask {
        Ask::default()
    }

    /// The wait of a refusal, or `None` where it was admitted.
    fn wait(model: &mut OrgModel, now: f64, ask: Ask) -> Option<Duration> {
        match model.arrive(s(now), ask).verdict {
            Verdict::Refused { wait, .. } => Some(wait),
            Verdict::Answer { .. } => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_bucket_starts_full_empties_and_refills_without_a_break() {
        let mut m = model(org());
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), Some(s(1.0)));
        assert_eq!(wait(&mut m, 0.25, ask()), Some(s(0.75)));
        assert_eq!(wait(&mut m, 1.0, ask()), None);
        assert_eq!(wait(&mut m, 1.5, ask()), Some(s(0.5)), "a refusal charges nothing, an admission does");
        // Long after, it holds its capacity and no more.
        let admitted = (0..5).filter(|_| wait(&mut m, 100.0, ask()).is_none()).count();
        assert_eq!(admitted, 2);
    }

    #[test]
    fn the_request_bucket_holds_at_least_one() {
        let mut m = model(org().requests_per_minute(6.0));
        assert_eq!(wait(&mut m, 0.0, ask()), None);
        assert_eq!(wait(&mut m, 0.0, ask()), Some(s(10.0)));
    }

    #[test]
    fn a_call_is_refused_by_the_bucket_that_lacks_most_and_charges_none() {
        let mut m = model(org().requests_capacity(10.0).input_tokens_per_minute(60.0).input_tokens_capacity(10.0));
        let big = Ask { body_bytes: 33, ..ask() }; // 9 tokens
        assert_eq!(wait(&mut m, 0.0, big), None);
        assert_eq!(wait(&mut m, 0.0, big), Some(s(8.0)));
        let view = m.arrive(s(0.0), Ask { body_bytes: 4, ..ask() }).views;
        assert_eq!(view[0].map(|v| v.remaining), Some(8));
        assert_eq!(view[1].map(|v| v.remaining), Some(0));
        // One that is larger than the bucket never fits; it is told when the bucket is full.
        let huge = Ask { body_bytes: 44, ..ask() };
        assert_eq!(wait(&mut m, 0.0, huge), Some(s(10.0)));
        assert_eq!(wait(&mut m, 60.0, huge), Some(s(0.0)));
        // Where both lack, the longer wait is told.
        let both = OrgConfig::new("o", "k").requests_per_minute(60.0).requests_capacity(1.0);
        let mut m = model(both.input_tokens_per_minute(60.0).input_tokens_capacity(9.0));
        assert_eq!(wait(&mut m, 0.0, big), None);
        assert_eq!(wait(&mut m, 0.0, big), Some(s(9.0)));
    }

    #[test]
    fn output_is_charged_at_its_drawn_length_but_never_above_max_tokens() {
        let ask = |max_tokens| Ask { body_bytes: 4, max_tokens, puts_out: true, ..Ask::default() };
        let mut m = model(OrgConfig::new("o", "k").output_tokens_per_minute(60e6).output_tokens_p50(1e4));
        for (max, expected) in [(Some(7), 7), (None, 64)] {
            let before = m.arrive(s(0.0), ask(Some(0))).views[2].unwrap().remaining;
            let arrival = m.arrive(s(0.0), ask(max));
            let Verdict::Answer { output_tokens, cut, .. } = arrival.verdict else { panic!("refused") };
            assert_eq!((output_tokens, cut), (expected, true));
            assert_eq!(before - arrival.views[2].unwrap().remaining, expected);
        }
        let mut m = model(OrgConfig::new("o", "k").output_tokens_p50(100.0));
        let mut lengths: Vec<u64> = (0..1001)
            .map(|_| match m.arrive(s(0.0), ask(Some(100_000))).verdict {
                Verdict::Answer { output_tokens, .. } => output_tokens,
                other => panic!("{other:?}"),
            })
            .collect();
        lengths.sort_unstable();
        assert!((90..=110).contains(&lengths[500]), "median {}", lengths[500]);
    }

    #[test]
    fn answers_of_a_range_are_anything_between_its_ends() {
        let ask = |max_tokens| Ask { body_bytes: 4, max_tokens: Some(max_tokens), puts_out: true, ..Ask::default() };
        let mut m = model(OrgConfig::new("o", "k").output_tokens_range([3, 6]));
        let mut seen = [0; 8];
        for _ in 0..400 {
            let Verdict::Answer { output_tokens, cut, .. } = m.arrive(s(0.0), ask(100)).verdict else { panic!() };
            assert!(!cut);
            seen[output_tokens as usize] += 1;
        }
        assert_eq!(seen.map(|count| count > 50), [false, false, false, true, true, true, true, false], "{seen:?}");
        for _ in 0..20 {
            let Verdict::Answer { output_tokens, .. } = m.arrive(s(0.0), ask(2)).verdict else { panic!() };
            assert_eq!(output_tokens, 2);
        }
    }

    #[test]
    fn the_schedule_changes_rate_and_capacity_and_clips_the_level() {
        let change = Change { quota_factor: Some(0.5), ..Change::default() };
        let mut m = model(org().requests_per_minute(600.0).at(10.0, change)); // holds 20, then 10
        assert_eq!(m.arrive(s(9.0), ask()).views[0].unwrap().remaining, 19);
        let view = m.arrive(s(10.0), ask()).views[0].unwrap();
        assert_eq!((view.limit, view.remaining), (300, 9));
        assert_eq!(view.full_in, s(0.2));
    }

    #[test]
    fn a_step_takes_effect_at_its_own_time_even_if_nobody_calls_then() {
        let change = Change { requests_per_minute: Some(0.0), ..Change::default() };
        let mut m = model(org().requests_capacity(100.0).at(3.0, change));
        for _ in 0..100 {
            assert_eq!(wait(&mut m, 0.0, ask()), None);
        }
        // Three seconds at one a second, and nothing since.
        let admitted = (0..10).filter(|_| wait(&mut m, 50.0, ask()).is_none()).count();
        assert_eq!(admitted, 3);
    }

    #[test]
    fn steps_of_one_time_apply_in_their_order_and_a_black_hole_can_end() {
        let hole = |on: bool| Change { black_hole: Some(on.into()), ..Change::default() };
        let o = org().requests_capacity(1e3).at(2.0, hole(false)).at(1.0, hole(true)).at(2.0, hole(true));
        let mut m = model(o.at(4.0, hole(false)).black_hole_wait_s(0.5));
        assert_eq!(wait(&mut m, 0.9, ask()), None);
        assert_eq!(wait(&mut m, 1.0, ask()), Some(s(0.5)));
        assert_eq!(wait(&mut m, 2.0, ask()), Some(s(0.5)));
        assert_eq!(wait(&mut m, 4.0, ask()), None);
    }

    #[test]
    fn concurrency_counts_admitted_calls_until_they_leave() {
        let mut m = model(OrgConfig::new("o", "k").max_concurrency(1).latency(Latency::new(80.0, 1.0)));
        assert!(m.arrive(s(0.0), ask()).admitted);
        let second = m.arrive(s(0.0), ask());
        assert!(!second.admitted);
        assert!(matches!(second.verdict, Verdict::Refused { wait, .. } if wait == s(0.08)));
        m.leave(s(0.0), false, Ending::Counted);
        assert!(!m.arrive(s(0.0), ask()).admitted, "a refused call held no place");
        m.leave(s(0.1), true, Ending::Empty);
        assert!(m.arrive(s(0.1), ask()).admitted);
    }

    #[test]
    fn chances_strike_about_as_often_as_they_say() {
        let mut m = model(OrgConfig::new("o", "k").error_5xx(0.2).overloaded(0.1));
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            counts[match m.arrive(s(0.0), ask()).verdict {
                Verdict::Overloaded { status: 529 } => 0,
                Verdict::ServerError => 1,
                _ => 2,
            }] += 1;
        }
        assert!((900..1100).contains(&counts[0]) && (1650..1950).contains(&counts[1]), "{counts:?}");
    }
}
