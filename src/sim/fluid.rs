//! The fluid limit: the least time in which a provider could take so many calls.

use std::time::Duration;

use super::bucket::PerResource;
use super::config::{Config, OrgConfig};
use super::draw::{Latency, seconds};

impl Config {
    /// What a fresh provider would take at once: the capacities of the request buckets, added up. Infinite where one
    /// has no limit.
    pub fn capacity_total(&self) -> f64 {
        if self.unlimited {
            return f64::INFINITY;
        }
        self.orgs.iter().map(|o| o.limits()[0].map_or(f64::INFINITY, |l| l.capacity)).sum()
    }

    /// The least time in which the provider could take `n` calls, if they came as a fluid: the least `t` at which the
    /// orgs' request-bucket capacities plus their refill up to `t` reach `n`. No client can be faster; see
    /// [`fluid_limit_for`](Self::fluid_limit_for) for the rules.
    pub fn fluid_limit(&self, n: u64) -> Option<Duration> {
        self.fluid_limit_for(n, Cost::default())
    }

    /// As [`fluid_limit`](Self::fluid_limit), where each call also costs tokens.
    ///
    /// The schedule is followed. An org yields nothing while a fault of it is certain (a black hole, a dead key, ...),
    /// though its buckets fill up meanwhile, nor while a bucket cannot hold one call. An org with `max_concurrency`
    /// yields at most that many per mean latency. Chances below one are not discounted. The latency of the last call
    /// is not added.
    ///
    /// `None` where some org has no limit at all from the start; [`Duration::MAX`] where `n` is never reached.
    pub fn fluid_limit_for(&self, n: u64, cost: Cost) -> Option<Duration> {
        let cost = [1.0, cost.input_tokens, cost.output_tokens, cost.input_tokens + cost.output_tokens];
        let curves: Vec<Vec<Piece>> = self.orgs.iter().map(|o| o.admitted(self.latency, cost)).collect();
        if self.unlimited || curves.iter().any(|c| c[0].value.is_infinite()) {
            return None;
        }
        Some(reach(&curves, n as f64).map_or(Duration::MAX, seconds))
    }
}

/// What a call costs besides one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Input tokens per call.
    pub input_tokens: f64,
    /// Output tokens per call.
    pub output_tokens: f64,
}

impl OrgConfig {
    /// How many calls of this cost a fluid could have had admitted by each moment: pieces of straight line.
    fn admitted(&self, default_latency: Latency, cost: PerResource<f64>) -> Vec<Piece> {
        let mut rules = self.clone();
        let mut steps = self.steps().into_iter().peekable();
        let mut levels: PerResource<Option<f64>> = Default::default();
        let mut pieces = Vec::new();
        let (mut from, mut total) = (0.0, 0.0);
        loop {
            while let Some(step) = steps.next_if(|s| s.at_s <= from) {
                rules.apply(&step.set);
            }
            let length = steps.peek().map_or(f64::INFINITY, |s| s.at_s - from);
            let limits = rules.limits();
            // A bucket that is new is full; one that shrank spills.
            for (level, limit) in levels.iter_mut().zip(limits) {
                *level = limit.map(|l| level.unwrap_or(l.capacity).min(l.capacity));
            }
            let too_small = limits.iter().zip(cost).any(|(l, c)| l.is_some_and(|l| l.capacity < c));
            let shut = too_small || rules.max_concurrency == Some(0) || rules.faults().iter().any(|f| f.always());
            let mut gain = 0.0;
            if shut {
                pieces.push(Piece { from, value: total, slope: 0.0 });
            } else {
                let mut lines: Vec<(f64, f64)> = Vec::with_capacity(5);
                for ((level, limit), cost) in levels.iter().zip(limits).zip(cost) {
                    if let (Some(level), Some(limit), true) = (level, limit, cost > 0.0) {
                        lines.push((level / cost, limit.rate / cost));
                    }
                }
                let mean = rules.latency.unwrap_or(default_latency).mean_s();
                if let (Some(max), true) = (rules.max_concurrency, mean > 0.0) {
                    lines.push((0.0, max as f64 / mean));
                }
                if lines.is_empty() {
                    pieces.push(Piece { from, value: f64::INFINITY, slope: 0.0 });
                    return pieces;
                }
                gain = lower_envelope(&lines, length, |at, value, slope| {
                    pieces.push(Piece { from: from + at, value: total + value, slope });
                });
            }
            if length.is_infinite() {
                return pieces;
            }
            for ((level, limit), cost) in levels.iter_mut().zip(limits).zip(cost) {
                if let (Some(level), Some(limit)) = (level, limit) {
                    *level = (*level + limit.rate * length - gain * cost).clamp(0.0, limit.capacity);
                }
            }
            total += gain;
            from += length;
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    from: f64,
    /// The value at `from`, after a jump there.
    value: f64,
    slope: f64,
}

/// Walks the minimum of straight lines `(value at 0, slope)` up to `length`; returns its value there.
fn lower_envelope(lines: &[(f64, f64)], length: f64, mut piece: impl FnMut(f64, f64, f64)) -> f64 {
    let at = |line: &(f64, f64), t: f64| line.0 + line.1 * t;
    let mut current = lines[0];
    for line in &lines[1..] {
        if (line.0, line.1) < (current.0, current.1) {
            current = *line;
        }
    }
    let mut t = 0.0;
    loop {
        piece(t, at(&current, t), current.1);
        // The next to become the least is the flatter line that is met first.
        let mut next: Option<(f64, (f64, f64))> = None;
        for line in lines.iter().filter(|l| l.1 < current.1) {
            let meets = ((line.0 - current.0) / (current.1 - line.1)).max(t);
            if next.is_none_or(|(m, n)| (meets, line.1) < (m, n.1)) {
                next = Some((meets, *line));
            }
        }
        match next {
            Some((meets, line)) if meets < length => {
                t = meets;
                current = line;
            }
            _ if length.is_infinite() => return f64::INFINITY,
            _ => return at(&current, length),
        }
    }
}

/// The least time at which the curves add up to `n`.
fn reach(curves: &[Vec<Piece>], n: f64) -> Option<f64> {
    let mut corners: Vec<f64> = curves.iter().flatten().map(|p| p.from).collect();
    corners.sort_by(f64::total_cmp);
    corners.dedup();
    if n <= 0.0 {
        return Some(0.0);
    }
    for (i, &corner) in corners.iter().enumerate() {
        let (mut value, mut slope) = (0.0, 0.0);
        for curve in curves {
            let piece = &curve[curve.partition_point(|p| p.from <= corner) - 1];
            value += piece.value + piece.slope * (corner - piece.from);
            slope += piece.slope;
        }
        if value >= n {
            return Some(corner);
        }
        let at = corner + (n - value) / slope;
        if slope > 0.0 && corners.get(i + 1).is_none_or(|&next| at <= next) {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sim::config::{Change, Step};
    use crate::sim::model::{Ask, OrgModel};

    fn s(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn org() -> OrgConfig {
        OrgConfig::new("o", "k").requests_per_minute(60.0)
    }

    #[test]
    fn the_fluid_limit_of_plain_buckets_is_capacity_then_rate() {
        let config = Config::default().org(org()).org(OrgConfig::new("p", "l").requests_per_minute(120.0));
        assert_eq!(config.capacity_total(), 6.0);
        assert_eq!(config.fluid_limit(0), Some(s(0.0)));
        assert_eq!(config.fluid_limit(6), Some(s(0.0)));
        assert_eq!(config.fluid_limit(9), Some(s(1.0)));
        let tokens = OrgConfig::new("t", "m").requests_per_minute(6000.0).input_tokens_per_minute(6000.0);
        let cost = Cost { input_tokens: 50.0, output_tokens: 0.0 };
        assert_eq!(Config::default().org(tokens.clone()).fluid_limit_for(4, cost), Some(s(0.0)));
        assert_eq!(Config::default().org(tokens.clone()).fluid_limit_for(6, cost), Some(s(1.0)));
        let both = OrgConfig::new("t", "m").requests_per_minute(6000.0).tokens_per_minute(6000.0);
        let cost = Cost { input_tokens: 30.0, output_tokens: 20.0 };
        assert_eq!(Config::default().org(both.clone()).fluid_limit_for(4, cost), Some(s(0.0)));
        assert_eq!(Config::default().org(both).fluid_limit_for(6, cost), Some(s(1.0)));
        let cost = Cost { input_tokens: 500.0, output_tokens: 0.0 };
        assert_eq!(Config::default().org(tokens).fluid_limit_for(1, cost), Some(Duration::MAX));
    }

    #[test]
    fn the_fluid_limit_follows_the_schedule_concurrency_and_unlimited_orgs() {
        let hole = |on: bool| Change { black_hole: Some(on.into()), ..Change::default() };
        let config = Config::default().org(org().black_hole(true).at(5.0, hole(false)));
        assert_eq!(config.fluid_limit(1), Some(s(5.0)));
        assert_eq!(config.fluid_limit(4), Some(s(7.0)));
        // What a bucket could not hold while it was shut is lost, even if it grows when it opens.
        let open = Change { black_hole: Some(false.into()), capacity_s: Some(100.0), ..Change::default() };
        let config = Config::default().org(org().black_hole(true).at(10.0, open));
        assert_eq!(config.fluid_limit(3), Some(s(11.0)));
        let config = Config::default().org(org().at(1.0, hole(true)));
        assert_eq!(config.fluid_limit(3), Some(s(1.0)));
        assert_eq!(config.fluid_limit(4), Some(Duration::MAX));
        let flat = Latency::new(100.0, 0.0);
        let config = Config::default().latency(flat).org(OrgConfig::new("c", "k").max_concurrency(5));
        assert_eq!(config.fluid_limit(100), Some(s(2.0)));
        let free = Config::default().org(org()).org(OrgConfig::new("free", "f"));
        assert_eq!(free.fluid_limit(1000), None);
        assert_eq!(Config::default().unlimited(true).org(org()).fluid_limit(1), None);
        let lifted = Change { requests_per_minute: Some(f64::INFINITY), ..Change::default() };
        assert_eq!(Config::default().org(org().at(3.0, lifted)).fluid_limit(1000), Some(s(3.0)));
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            (10.0..3000.0).prop_map(|r| Change { requests_per_minute: Some(r), ..Change::default() }),
            (0.1..2.0).prop_map(|f| Change { quota_factor: Some(f), ..Change::default() }),
            (0.5..4.0).prop_map(|c| Change { capacity_s: Some(c), ..Change::default() }),
            (100.0..30_000.0).prop_map(|r| Change { input_tokens_per_minute: Some(r), ..Change::default() }),
            any::<bool>().prop_map(|on| Change { black_hole: Some(on.into()), ..Change::default() }),
        ]
    }

    fn orgs(concurrency: bool) -> impl Strategy<Value = Config> {
        let one = (
            10.0..3000.0,
            0.5..4.0,
            proptest::option::of(100.0..30_000.0),
            proptest::option::of(1usize..20),
            proptest::collection::vec((0.0..10.0, change()), 0..4),
        )
            .prop_map(move |(rate, capacity, tokens, max, schedule)| {
                let mut o = OrgConfig::new("o", "k").requests_per_minute(rate).capacity_s(capacity);
                o.input_tokens_per_minute = tokens;
                o.max_concurrency = max.filter(|_| concurrency);
                o.schedule = schedule.into_iter().map(|(at_s, set)| Step { at_s, set }).collect();
                o
            });
        proptest::collection::vec(one, 1..4).prop_map(|orgs| Config { orgs, ..Config::default() })
    }

    /// What all orgs together could have admitted by `end`, drained greedily in small steps.
    fn integrate(config: &Config, cost: PerResource<f64>, end: f64, dt: f64) -> f64 {
        let mut total = 0.0;
        for org in &config.orgs {
            let mut steps = org.steps().into_iter().peekable();
            let mut rules = org.clone();
            let mut levels = rules.limits().map(|l| l.map(|l| l.capacity));
            for i in 0..=(end / dt) as u64 {
                while let Some(step) = steps.next_if(|s| s.at_s <= i as f64 * dt) {
                    rules.apply(&step.set);
                }
                let limits = rules.limits();
                for r in 0..cost.len() {
                    levels[r] = limits[r].map(|l| levels[r].unwrap_or(l.capacity).min(l.capacity));
                }
                let mut gain = match rules.max_concurrency {
                    Some(max) => max as f64 / rules.latency.unwrap_or(config.latency).mean_s() * dt,
                    None => f64::INFINITY,
                };
                for r in 0..cost.len() {
                    if let (Some(limit), Some(level)) = (limits[r], levels[r]) {
                        if cost[r] > 0.0 {
                            gain = if limit.capacity < cost[r] { 0.0 } else { gain.min(level / cost[r]) };
                        }
                    }
                    if gain == 0.0 {
                        break;
                    }
                }
                if rules.black_hole.always() {
                    gain = 0.0;
                }
                total += gain;
                for r in 0..cost.len() {
                    if let (Some(limit), Some(level)) = (limits[r], levels[r].as_mut()) {
                        *level = (*level - gain * cost[r] + limit.rate * dt).min(limit.capacity);
                    }
                }
            }
        }
        total
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn the_fluid_limit_is_what_integration_finds(config in orgs(true), n in 1u64..300, tokens in 0.0..200.0) {
            let cost = Cost { input_tokens: tokens, output_tokens: 0.0 };
            let costs = [1.0, tokens, 0.0, tokens];
            let t = config.fluid_limit_for(n, cost).expect("all are limited");
            let dt = 1e-3;
            // What a step's width can shift: at each corner, at most the fastest rate for some steps.
            let slack = 0.01 * n as f64 + 1.0;
            if t == Duration::MAX {
                prop_assert!(integrate(&config, costs, 30.0, dt) < n as f64 + slack);
            } else {
                let t = t.as_secs_f64();
                // Long tails cost much time here and teach nothing.
                prop_assume!(t < 60.0);
                prop_assert!(integrate(&config, costs, t + 2.0 * dt, dt) > n as f64 - slack);
                if t > 3.0 * dt {
                    prop_assert!(integrate(&config, costs, t - 3.0 * dt, dt) < n as f64 + slack);
                }
            }
        }

        #[test]
        fn no_client_beats_the_fluid_limit(config in orgs(false), bytes in 0usize..400) {
            let ask = Ask { body_bytes: bytes, max_tokens: None, puts_out: false, ..Ask::default() };
            let cost = Cost { input_tokens: bytes.div_ceil(4) as f64, output_tokens: 0.0 };
            let mut models: Vec<OrgModel> = (0..config.orgs.len()).map(|i| OrgModel::new(&config, i)).collect();
            let mut n = 0;
            for ms in (0..12_000).step_by(7) {
                let now = Duration::from_millis(ms);
                let before = n;
                for m in &mut models {
                    while m.arrive(now, ask).admitted {
                        n += 1;
                    }
                }
                if n > before {
                    let limit = config.fluid_limit_for(n, cost).expect("all are limited");
                    prop_assert!(limit <= now + Duration::from_micros(10), "{n} by {now:?}, fluid {limit:?}");
                }
            }
            // And a greedy one comes within a call per org of it, as far as its steps of 7 ms let it see a refill.
            let limit = config.fluid_limit_for(n + 2 * config.orgs.len() as u64, cost).expect("all are limited");
            prop_assert!(limit >= Duration::from_millis(11_000) || !config.orgs.iter().all(|o| o.schedule.is_empty()));
        }
    }
}
