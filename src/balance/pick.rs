//! Which of several members: the power of two choices. Pure.

/// Two different members at random, the lower load wins; the only one where there is but one. `load` is asked at most twice.
/// Drawn from the thread's own generator.
pub(crate) fn pick(open: &[usize], load: impl Fn(usize) -> f64) -> Option<usize> {
    match open {
        [] => None,
        [only] => Some(*only),
        _ => {
            let first = fastrand::usize(..open.len());
            // One of the others, all equally likely.
            let second = (first + fastrand::usize(1..open.len())) % open.len();
            let (a, b) = (open[first], open[second]);
            Some(if load(b) < load(a) { b } else { a })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn of_two_the_lower_load_always_wins() {
        fastrand::seed(1);
        for _ in 0..1_000 {
            assert_eq!(pick(&[3, 8], |i| i as f64), Some(3));
        }
    }

    #[test]
    fn the_worst_of_many_is_never_picked_and_the_best_most_often() {
        fastrand::seed(1);
        let mut seen = [0; 4];
        for _ in 0..6_000 {
            seen[pick(&[0, 1, 2, 3], |i| i as f64).unwrap()] += 1;
        }
        // Half, a third, a sixth: the chances that each is the better of two different ones.
        assert_eq!(seen[3], 0);
        for (i, expected) in [3_000, 2_000, 1_000].into_iter().enumerate() {
            assert!((expected - 200..=expected + 200).contains(&seen[i]), "{seen:?}");
        }
    }

    #[test]
    fn equal_loads_share_alike() {
        fastrand::seed(1);
        let mut seen = [0; 3];
        for _ in 0..6_000 {
            seen[pick(&[0, 1, 2], |_| 1.0).unwrap()] += 1;
        }
        assert!(seen.iter().all(|n| (1_800..=2_200).contains(n)), "{seen:?}");
    }

    proptest! {
        #[test]
        fn whatever_is_picked_was_open(open in proptest::collection::vec(any::<usize>(), 0..40), seed: u64, loads: Vec<f64>) {
            fastrand::seed(seed);
            let picked = pick(&open, |i| loads.get(i % 40).copied().unwrap_or(f64::NAN));
            prop_assert_eq!(picked.is_none(), open.is_empty());
            prop_assert!(picked.is_none_or(|picked| open.contains(&picked)));
        }
    }
}
