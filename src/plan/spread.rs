//! Distributions of durations: lognormal, or a mixture of two. Pure arithmetic in seconds.

/// The distribution function of the normal.
///
/// Abramowitz and Stegun, 7.1.26: within 1.5e-7, far below what latencies are known to.
pub(crate) fn normal(z: f64) -> f64 {
    let upper = above(z.abs());
    if z < 0.0 { upper } else { 1.0 - upper }
}

/// The quantile of the normal: Abramowitz and Stegun, 26.2.23, and one step of Halley's from there.
pub(crate) fn normal_quantile(part: f64) -> f64 {
    if part > 0.5 {
        return -normal_quantile(1.0 - part);
    }
    let t = (-2.0 * part.max(1e-15).ln()).sqrt();
    let z =
        (2.515_517 + t * (0.802_853 + t * 0.010_328)) / (1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308))) - t;
    let density = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    let off = (normal(z) - part) / density;
    z - off / (1.0 + 0.5 * z * off)
}

/// The normal's upper tail, from 0 on.
fn above(z: f64) -> f64 {
    let x = z * std::f64::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let poly =
        t * (0.254_829_592 + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    0.5 * poly * (-x * x).exp()
}

#[derive(Clone, Copy, Debug)]
struct Part {
    weight: f64,
    mu: f64,
    sigma: f64,
    mean: f64,
}

impl Part {
    fn new(weight: f64, median: f64, sigma: f64) -> Self {
        let (mu, sigma) = (median.max(1e-9).ln(), sigma.max(1e-4));
        Part { weight, mu, sigma, mean: (mu + sigma * sigma / 2.0).exp() }
    }

    fn far(&self) -> f64 {
        (self.mu + 6.0 * self.sigma).exp()
    }
}

/// How long something takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    main: Part,
    /// The few that take much longer.
    tail: Option<Part>,
    /// What all but one in a billion keep: beyond it nothing is reckoned.
    far: f64,
}

impl Spread {
    pub(crate) fn lognormal(median: f64, sigma: f64) -> Self {
        let main = Part::new(1.0, median, sigma);
        Spread { main, tail: None, far: main.far() }
    }

    /// The lognormal of this mean and standard deviation.
    pub(crate) fn of_moments(mean: f64, deviation: f64) -> Self {
        let mean = mean.max(1e-9);
        let sigma2 = (deviation / mean).powi(2).ln_1p();
        Self::lognormal(mean * (-sigma2 / 2.0).exp(), sigma2.sqrt())
    }

    /// A part of all takes so long in the median instead, with the same sigma.
    pub(crate) fn with_tail(mut self, share: f64, median: f64) -> Self {
        if share > 0.0 {
            self.main.weight = 1.0 - share;
            let tail = Part::new(share, median, self.main.sigma);
            self.tail = Some(tail);
            self.far = self.far.max(tail.far());
        }
        self
    }

    fn sum(&self, of: impl Fn(&Part) -> f64) -> f64 {
        let tail = self.tail.as_ref().map_or(0.0, |part| part.weight * of(part));
        self.main.weight * of(&self.main) + tail
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum(|part| part.mean)
    }

    pub(crate) fn variance(&self) -> f64 {
        (self.sum(|part| part.mean * part.mean * (part.sigma * part.sigma).exp()) - self.mean().powi(2)).max(0.0)
    }

    /// The standard deviation over the mean.
    pub(crate) fn cv(&self) -> f64 {
        self.variance().sqrt() / self.mean()
    }

    /// The chance that it takes no longer than `x`.
    pub(crate) fn below(&self, x: f64) -> f64 {
        if x <= 0.0 {
            return 0.0;
        }
        if x > self.far {
            return 1.0;
        }
        let ln = x.ln();
        self.sum(|part| normal((ln - part.mu) / part.sigma))
    }

    /// The chance that it takes longer than `x`; and the integral of that from 0 to `x`: what of something that began within the last
    /// `x` seconds, one a second, is still going on. What has yet to begin goes on for sure, and counts below zero.
    pub(crate) fn going_on(&self, x: f64) -> (f64, f64) {
        if x <= 0.0 {
            return (1.0, x);
        }
        if x > self.far {
            return (0.0, self.mean());
        }
        let ln = x.ln();
        let of = |part: &Part| {
            let z = (ln - part.mu) / part.sigma;
            let longer = normal(-z);
            (part.weight * longer, part.weight * (x * longer + part.mean * normal(z - part.sigma)))
        };
        let (main, tail) = (of(&self.main), self.tail.as_ref().map_or((0.0, 0.0), of));
        (main.0 + tail.0, main.1 + tail.1)
    }

    /// The time by which this part of all has ended.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let z = normal_quantile(part);
        let of = |of: &Part| of.mu + z * of.sigma;
        let Some(tail) = &self.tail else { return of(&self.main).exp() };
        // That of a mixture lies between its parts'.
        let (one, other) = (of(&self.main), of(tail));
        zero(one.min(other), one.max(other), 1e-9, |ln| self.below(ln.exp()) - part).exp()
    }

    /// A time that all but one in a billion keep.
    pub(crate) fn far(&self) -> f64 {
        self.far
    }

    /// The mean and the standard deviation of its logarithm, the tail left out.
    pub(crate) fn logarithm(&self) -> (f64, f64) {
        (self.main.mu, self.main.sigma)
    }

    /// The sum of so many such durations, as a lognormal of the same moments (Fenton and Wilkinson).
    pub(crate) fn times(&self, count: f64) -> Spread {
        Spread::of_moments(self.mean() * count, (self.variance() * count).sqrt())
    }
}

/// Where between these ends something becomes true and stays it: halved so many times.
pub(crate) fn rising(mut least: f64, mut most: f64, times: u32, is: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..times {
        let half = 0.5 * (least + most);
        if is(half) {
            most = half;
        } else {
            least = half;
        }
    }
    most
}

/// The first of 1 up to `most` for which something is true that stays it; `most` if none before.
pub(crate) fn first(most: u64, is: impl Fn(u64) -> bool) -> u64 {
    let (mut not, mut most) = (0, most);
    while most - not > 1 {
        let half = not + (most - not) / 2;
        if is(half) {
            most = half;
        } else {
            not = half;
        }
    }
    most
}

/// Where between these ends a rising function reaches zero, at most `close` too far: the ITP method of Oliveira and Takahashi. Where the
/// function is smooth it takes a third of the steps that halving does, and elsewhere at most one more.
pub(crate) fn zero(mut least: f64, mut most: f64, close: f64, of: impl Fn(f64) -> f64) -> f64 {
    let whole = most - least;
    if !whole.is_finite() {
        // What ends never is not halved.
        return most;
    }
    let (mut low, mut high, mut slack) = (f64::NEG_INFINITY, f64::INFINITY, whole);
    while most - least > close {
        let (span, half) = (most - least, 0.5 * (least + most));
        let at = if low.is_finite() && high.is_finite() {
            let line = least - low * span / (high - low);
            // A little beyond the line towards the middle, so that both ends come nearer; and so near to it that halving does no better.
            let nudge = (0.2 * span * span / whole).max(0.5 * close).min((half - line).abs());
            let room = (slack - 0.5 * span).max(0.0);
            half + (line + nudge.copysign(half - line) - half).clamp(-room, room)
        } else {
            half
        };
        let value = of(at);
        if value >= 0.0 {
            (most, high) = (at, value);
        } else {
            (least, low) = (at, value);
        }
        slack *= 0.5;
    }
    most
}

/// Where a rising function reaches each of these levels, which rise: each is looked for from where the one before was found, so that
/// they are in order however far `close` is.
pub(crate) fn zeros<const N: usize>(
    mut least: f64,
    most: f64,
    close: f64,
    levels: [f64; N],
    of: impl Fn(f64) -> f64,
) -> [f64; N] {
    levels.map(|level| {
        if of(least) < level {
            least = zero(least, most, close, |at| of(at) - level);
        }
        least
    })
}

/// A chance that rises from 0 to 1, as a number that rises about evenly: Gumbel's, since the last of many ends so.
pub(crate) fn evenly(chance: f64) -> f64 {
    if chance >= 1.0 { f64::INFINITY } else { -(-chance.ln()).ln() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quantile_of_the_normal_is_its_inverse() {
        for part in [1e-6, 1e-4, 0.05, 0.1, 0.3, 0.5, 0.7, 0.95, 0.999] {
            assert!((normal(normal_quantile(part)) - part).abs() < 2e-7, "{part}");
        }
    }

    #[test]
    fn a_zero_is_found_on_lines_curves_plateaus_and_jumps() {
        for at in [0.01, 1.0, 3.3, 9.99] {
            let functions: [&dyn Fn(f64) -> f64; 5] = [
                &|x| x - at,
                &|x: f64| x.exp() - at.exp(),
                &|x: f64| evenly((-(5.0 * (at - x)).exp() * std::f64::consts::LN_2).exp()) - evenly(0.5),
                &|x| if x < at { -1.0 } else { 1e9 },
                &|x| if x < at { f64::NEG_INFINITY } else { f64::INFINITY },
            ];
            for (nth, of) in functions.into_iter().enumerate() {
                let count = std::cell::Cell::new(0);
                let found = zero(0.0, 10.0, 1e-6, |x| {
                    count.set(count.get() + 1);
                    of(x)
                });
                assert!((-1e-9..=1e-6).contains(&(found - at)), "{nth}: {found} for {at}");
                assert!(count.get() <= if nth < 3 { 14 } else { 26 }, "{nth}: {} steps", count.get());
            }
        }
    }

    #[test]
    fn the_first_is_found_and_is_the_last_if_there_is_no_other() {
        for most in [1, 2, 7, 1_000] {
            for from in 1..=most + 1 {
                assert_eq!(first(most, |n| n >= from), from.min(most));
            }
        }
    }

    #[test]
    fn the_normal_is_the_normal() {
        for (z, p) in [(0.0, 0.5), (1.0, 0.841_344_7), (-1.644_853_6, 0.05), (3.0, 0.998_650_1), (-4.0, 3.167e-5)] {
            assert!((normal(z) - p).abs() < 2e-7, "{z}: {}", normal(z));
        }
    }

    #[test]
    fn a_mixture_has_the_moments_and_quantiles_of_its_parts() {
        let plain = Spread::lognormal(2.0, 0.5);
        assert!((plain.mean() - 2.0 * (0.125_f64).exp()).abs() < 1e-12);
        assert!((plain.quantile(0.5) - 2.0).abs() < 1e-6);
        assert!((plain.quantile(0.841_344_7) - 2.0 * (0.5_f64).exp()).abs() < 1e-4);
        let tailed = plain.with_tail(0.1, 30.0);
        assert!((tailed.mean() - 0.9 * plain.mean() - 3.0 * (0.125_f64).exp()).abs() < 1e-9);
        assert!(tailed.quantile(0.95) > 10.0 && tailed.quantile(0.5) < 2.4);
        let again = Spread::of_moments(plain.mean(), plain.variance().sqrt());
        assert!((again.quantile(0.9) - plain.quantile(0.9)).abs() < 1e-6);
    }

    #[test]
    fn what_goes_on_is_the_integral_of_what_has_not_ended() {
        let spread = Spread::lognormal(1.5, 0.6).with_tail(0.02, 20.0);
        for x in [0.3, 1.0, 2.5, 40.0] {
            let step = x / 20_000.0;
            let sum: f64 = (0..20_000).map(|i| (1.0 - spread.below((f64::from(i) + 0.5) * step)) * step).sum();
            assert!((spread.going_on(x).0 - 1.0 + spread.below(x)).abs() < 1e-6, "{x}");
            assert!((spread.going_on(x).1 - sum).abs() < 1e-4, "{x}");
        }
        assert!((spread.going_on(1e4).1 - spread.mean()).abs() < 1e-4, "in the end all of it");
    }
}
