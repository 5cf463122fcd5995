//! Means and quantiles of what was seen lately: every figure counts a little less with each one after it. Pure.

/// How much of its weight a figure keeps when another one comes: the last two hundred count for nearly two thirds.
const KEPT: f64 = 0.995;
/// The bins of the histogram are so much wider each than the last: a quantile is at most so much too high, never too low.
const WIDER: f64 = 1.05;
/// From here ...
const LEAST: f64 = 1e-3;
/// ... the bins reach to two hundred million, beyond any call's tokens.
const BINS: usize = 536;
/// Weights grow instead of shrinking one by one; beyond this all are scaled down.
const HEAVY: f64 = 1e12;

/// Figures above zero, seen one after another.
#[derive(Clone, Debug)]
pub(super) struct Lately {
    /// What was seen of each magnitude; there is none before the first figure.
    bins: Vec<f64>,
    /// No bin from here on has anything.
    end: usize,
    weight: f64,
    total: f64,
    sum: f64,
    seen: u64,
}

impl Default for Lately {
    fn default() -> Self {
        Lately { bins: vec![], end: 0, weight: 1.0, total: 0.0, sum: 0.0, seen: 0 }
    }
}

impl Lately {
    /// Takes note of a figure; zero counts as the least, and what is no number not at all.
    pub(super) fn note(&mut self, figure: f64) {
        if !figure.is_finite() || figure < 0.0 {
            return;
        }
        if self.bins.is_empty() {
            self.bins = vec![0.0; BINS];
        }
        let bin = bin(figure);
        self.bins[bin] += self.weight;
        self.end = self.end.max(bin + 1);
        self.total += self.weight;
        self.sum += self.weight * figure.min(edge(BINS - 1));
        self.seen = self.seen.saturating_add(1);
        self.weight /= KEPT;
        if self.weight > HEAVY {
            let scale = 1.0 / self.weight;
            self.bins.iter_mut().for_each(|bin| *bin *= scale);
            (self.total, self.sum, self.weight) = (self.total * scale, self.sum * scale, 1.0);
            // What is as light as this was seen thousands of figures ago.
            while self.end > 1 && self.bins[self.end - 1] < 1e-6 {
                self.end -= 1;
                self.bins[self.end] = 0.0;
            }
        }
    }

    /// How many figures were ever seen.
    pub(super) fn seen(&self) -> u64 {
        self.seen
    }

    /// `None` before the first figure.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.seen > 0).then(|| self.sum / self.total)
    }

    /// What the part `q` of all figures does not exceed; `None` before the first one.
    pub(super) fn quantile(&self, q: f64) -> Option<f64> {
        if self.seen == 0 {
            return None;
        }
        let mut above = (1.0 - q.clamp(0.0, 1.0)) * self.total;
        for bin in (0..self.end).rev() {
            // Rounding must not take the highest for something above it.
            above -= self.bins[bin];
            if above < 0.0 || bin == 0 {
                return Some(edge(bin));
            }
        }
        None
    }
}

/// Where a figure is counted.
fn bin(figure: f64) -> usize {
    // Above the edge below, by less than rounding can tell, belongs to it.
    let nth = ((figure / LEAST).max(1.0).ln() / WIDER.ln() - 1e-9).ceil();
    (nth as usize).min(BINS - 1)
}

/// The most that is counted there.
fn edge(bin: usize) -> f64 {
    LEAST * WIDER.powi(i32::try_from(bin).expect("a few hundred bins"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(figures: impl IntoIterator<Item = f64>) -> Lately {
        let mut lately = Lately::default();
        figures.into_iter().for_each(|figure| lately.note(figure));
        lately
    }

    #[test]
    fn before_the_first_figure_nothing_is_known() {
        assert_eq!((of([]).mean(), of([]).quantile(0.95)), (None, None));
        assert_eq!(of([f64::NAN, -1.0, f64::INFINITY]).mean(), None, "what is no figure is none");
    }

    #[test]
    fn a_lone_figure_is_mean_and_quantile() {
        for figure in [0.5, 1.0, 200.0, 4_096.0, 1e6] {
            let lately = of([figure]);
            assert!((lately.mean().unwrap() / figure - 1.0).abs() < 1e-9, "{figure}");
            let quantile = lately.quantile(0.95).unwrap();
            assert!((1.0..=WIDER).contains(&(quantile / figure * (1.0 + 1e-9))), "{figure}: {quantile}");
        }
        assert!(of([0.0]).quantile(0.95).unwrap() <= LEAST * 1.001);
    }

    #[test]
    fn what_was_seen_long_ago_is_forgotten() {
        let lately = of(std::iter::repeat_n(1_000.0, 5_000).chain(std::iter::repeat_n(10.0, 1_000)));
        assert!(lately.quantile(0.95).unwrap() < 11.0, "1,000 figures weigh as 0.7 % of all");
        let lately = of(std::iter::repeat_n(10.0, 20_000).chain(std::iter::repeat_n(1_000.0, 20)));
        assert!(lately.quantile(0.95).unwrap() > 900.0, "20 of the last count as a tenth");
    }

    proptest! {
        #[test]
        fn a_quantile_is_what_so_many_figures_do_not_exceed(
            figures in proptest::collection::vec(1e-2f64..1e8, 1..300), q in 0.0f64..=1.0,
        ) {
            let lately = of(figures.clone());
            let found = lately.quantile(q).unwrap();
            // The plain way: sort, and add up weights.
            let mut weighed: Vec<_> = figures.iter().rev().enumerate().map(|(age, f)| (*f, KEPT.powi(age as i32))).collect();
            weighed.sort_by(|a, b| a.0.total_cmp(&b.0));
            let total: f64 = weighed.iter().map(|(_, w)| w).sum();
            let not_above = |limit: f64| weighed.iter().filter(|(f, _)| *f <= limit).map(|(_, w)| w).sum::<f64>() / total;
            prop_assert!(not_above(found * (1.0 + 1e-9)) >= q - 1e-9, "{} of them", not_above(found));
            prop_assert!(not_above(found / WIDER / (1.0 + 1e-9)) <= q + 1e-9, "a bin lower would do");
            let mean = weighed.iter().map(|(f, w)| f * w).sum::<f64>() / total;
            prop_assert!((lately.mean().unwrap() / mean - 1.0).abs() < 1e-6);
        }

        #[test]
        fn whatever_comes_it_stays_finite(figures in proptest::collection::vec(any::<f64>(), 1..50), n in 1usize..100) {
            let mut lately = Lately::default();
            for _ in 0..n {
                figures.iter().for_each(|figure| lately.note(*figure));
            }
            for known in [lately.mean(), lately.quantile(0.95), lately.quantile(0.0), lately.quantile(1.0)].into_iter().flatten() {
                prop_assert!(known.is_finite() && known >= 0.0);
            }
        }
    }
}
