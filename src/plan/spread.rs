//! Distributions of durations: lognormal, or a mixture of two. Pure arithmetic in seconds.

/// The distribution function of the normal.
///
/// Abramowitz and Stegun, 7.1.26: within 1.5e-7, far below what latencies are known to.
pub(crate) fn normal(z: f64) -> f64 {
    let upper = above(z.abs());
    if z < 0.0 { upper } else { 1.0 - upper }
}

/// The quantile of the normal.
pub(crate) fn normal_quantile(part: f64) -> f64 {
    rising(-8.0, 8.0, 40, |z| normal(z) >= part)
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
}

/// How long something takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    main: Part,
    /// The few that take much longer.
    tail: Option<Part>,
}

impl Spread {
    pub(crate) fn lognormal(median: f64, sigma: f64) -> Self {
        Spread { main: Part::new(1.0, median, sigma), tail: None }
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
            self.tail = Some(Part::new(share, median, self.main.sigma));
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
        let ln = x.ln();
        self.sum(|part| normal((ln - part.mu) / part.sigma))
    }

    /// The integral from 0 to `x` of the chance that it takes longer: what of something that began within the last `x` seconds,
    /// one a second, is still going on.
    pub(crate) fn going_on(&self, x: f64) -> f64 {
        if x <= 0.0 {
            return 0.0;
        }
        let ln = x.ln();
        self.sum(|part| {
            let z = (ln - part.mu) / part.sigma;
            x * (1.0 - normal(z)) + part.mean * normal(z - part.sigma)
        })
    }

    /// The time by which this part of all has ended.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let least = self.main.mu - 8.0 * self.main.sigma;
        let most = self.tail.unwrap_or(self.main);
        let most = most.mu.max(self.main.mu) + 8.0 * most.sigma;
        rising(least, most, 40, |ln| self.below(ln.exp()) >= part).exp()
    }

    /// A time that all but one in a billion keep.
    pub(crate) fn far(&self) -> f64 {
        let of = |part: &Part| (part.mu + 6.0 * part.sigma).exp();
        self.tail.as_ref().map_or(0.0, of).max(of(&self.main))
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

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!((spread.going_on(x) - sum).abs() < 1e-4, "{x}");
        }
        assert!((spread.going_on(1e4) - spread.mean()).abs() < 1e-4, "in the end all of it");
    }
}
