//! Which of several members: the best tier of those that are there, and in it the power of two choices. Pure.

/// Health from which a member is trusted with any call.
const CREDIBLE: f64 = 0.5;
/// So many failures of one call, and a member yields to others.
const YIELDS_AFTER: u32 = 2;
/// But only to one that has not failed the call and whose health is at least this part of its own: in an uneven pool it would
/// yield to junk.
const YIELDS_TO: f64 = 0.5;

/// How far a member is trusted with one call. The best is the least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    Credible,
    /// It is well, but has failed this very call twice, and there is another to try. Not last: where that other has no slot,
    /// the call must not fall through to junk.
    Demoted,
    /// Its health is low.
    Rest,
}

impl Tier {
    /// `failures` of this very call; `best_untried` is the health of the best of those that have not failed it and take calls,
    /// whether or not they have a slot now. It is asked only where it matters.
    pub(crate) fn of(health: f64, failures: u32, best_untried: impl FnOnce() -> Option<f64>) -> Tier {
        if health < CREDIBLE {
            return Tier::Rest;
        }
        let yields = failures >= YIELDS_AFTER && best_untried().is_some_and(|best| best >= health * YIELDS_TO);
        if yields { Tier::Demoted } else { Tier::Credible }
    }
}

/// The numbers of the members worth asking, the best tier first: on the stack for up to 32, which is more orgs than most people
/// hold.
pub(crate) struct Ranked {
    few: [usize; 32],
    many: Vec<usize>,
    /// Where each tier ends; the last is how many there are.
    ends: [usize; 3],
}

impl Ranked {
    /// Of so many members those that have a tier.
    pub(crate) fn of(members: usize, tier: impl Fn(usize) -> Option<Tier>) -> Self {
        let mut ranked = Ranked { few: [0; 32], many: Vec::new(), ends: [0; 3] };
        if members > ranked.few.len() {
            ranked.many = vec![0; members];
        }
        for member in 0..members {
            if let Some(tier) = tier(member) {
                ranked.insert(member, tier as usize);
            }
        }
        ranked
    }

    fn numbers(&mut self) -> &mut [usize] {
        if self.many.is_empty() { &mut self.few } else { &mut self.many }
    }

    /// Behind those that are as good or better.
    fn insert(&mut self, member: usize, tier: usize) {
        let (at, end) = (self.ends[tier], self.ends[2]);
        let numbers = self.numbers();
        // Nearly always there is nothing to move.
        if at < end {
            numbers.copy_within(at..end, at + 1);
        }
        numbers[at] = member;
        self.ends[tier..].iter_mut().for_each(|end| *end += 1);
    }

    /// The best tier that anybody is in.
    fn best_tier(&self) -> usize {
        self.ends.iter().position(|end| *end > 0).unwrap_or(2)
    }

    /// Those of the best tier that anybody is in.
    pub(crate) fn best(&self) -> &[usize] {
        let numbers = if self.many.is_empty() { &self.few[..] } else { &self.many };
        &numbers[..self.ends[self.best_tier()]]
    }

    /// Takes out one of the best.
    pub(crate) fn remove(&mut self, member: usize) {
        let Some(at) = self.best().iter().position(|i| *i == member) else { return };
        let tier = self.best_tier();
        let (last, end) = (self.ends[tier] - 1, self.ends[2]);
        let numbers = self.numbers();
        numbers.swap(at, last);
        numbers.copy_within(last + 1..end, last);
        self.ends[tier..].iter_mut().for_each(|end| *end -= 1);
    }
}

/// Two different members at random, the lower load wins; the only one where there is but one. `load` is asked at most twice.
/// Drawn from the thread's own generator.
pub(crate) fn pick(open: &[usize], load: impl Fn(usize) -> f64) -> Option<usize> {
    match open {
        [] => None,
        [only] => Some(*only),
        _ => {
            let (first, second) = two_of(open.len());
            let (a, b) = (open[first], open[second]);
            Some(if load(b) < load(a) { b } else { a })
        }
    }
}

/// The same of so many members of which most are `well`, that is in the best tier there can be: where the first two that are
/// drawn both are, nobody else need be looked at. Any two that are well are as likely to be drawn so as by [`pick`] from all
/// that are. `None` where one of them is not, or there are no two.
pub(crate) fn pick_well(members: usize, well: impl Fn(usize) -> bool, load: impl Fn(usize) -> f64) -> Option<usize> {
    if members < 2 {
        return None;
    }
    let (a, b) = two_of(members);
    (well(a) && well(b)).then(|| if load(b) < load(a) { b } else { a })
}

/// Two different ones of so many, which are more than one.
fn two_of(many: usize) -> (usize, usize) {
    let first = fastrand::usize(..many);
    // One of the others, all equally likely.
    (first, (first + fastrand::usize(1..many)) % many)
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
    fn whoever_is_well_is_drawn_as_often_by_a_look_at_two_as_by_a_look_at_all() {
        fastrand::seed(1);
        let (well, load) = (|i: usize| i != 1 && i != 4, |i: usize| i as f64);
        let all: Vec<_> = (0..6).filter(|i| well(*i)).collect();
        let (mut by_two, mut by_all) = ([0_i32; 6], [0_i32; 6]);
        for _ in 0..12_000 {
            by_two[pick_well(6, well, load).or_else(|| pick(&all, load)).unwrap()] += 1;
            by_all[pick(&all, load).unwrap()] += 1;
        }
        assert!(by_two.iter().zip(by_all).all(|(two, all)| (two - all).abs() < 300), "{by_two:?} {by_all:?}");
        assert_eq!((by_two[1], by_two[4]), (0, 0));
        assert_eq!((pick_well(0, well, load), pick_well(1, well, load)), (None, None));
        assert_eq!(pick_well(2, |_| true, load), Some(0));
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

    /// Health, failures of this call, whether it takes calls, whether it is worth asking now.
    type Known = (f64, u32, bool, bool);

    fn best_untried(members: &[Known]) -> Option<f64> {
        let untried = members.iter().filter(|(_, failures, takes_calls, _)| *takes_calls && *failures == 0);
        untried.map(|(health, ..)| *health).reduce(f64::max)
    }

    fn tier(members: &[Known], i: usize) -> Tier {
        Tier::of(members[i].0, members[i].1, || best_untried(members))
    }

    fn ranked(members: &[Known]) -> Ranked {
        Ranked::of(members.len(), |i| members[i].3.then(|| tier(members, i)))
    }

    #[test]
    fn who_failed_the_call_twice_yields_to_another_that_is_at_least_half_as_well() {
        use Tier::{Credible, Demoted, Rest};
        // Its health, its failures of this call; the others, each with its health, failures and whether it takes calls.
        for (health, failures, others, expected) in [
            (1.0, 0, &[(1.0, 0, true)][..], Credible),
            (1.0, 1, &[(1.0, 0, true)], Credible),
            (1.0, 2, &[(1.0, 0, true)], Demoted),
            (1.0, 9, &[(1.0, 0, true)], Demoted),
            (1.0, 2, &[], Credible),
            (1.0, 2, &[(1.0, 1, true)], Credible),
            (1.0, 2, &[(1.0, 0, false)], Credible),
            (0.9, 2, &[(0.45, 0, true)], Demoted),
            (0.9, 2, &[(0.44, 0, true)], Credible),
            (0.9, 2, &[(0.44, 0, true), (0.9, 1, true)], Credible),
            (0.9, 2, &[(0.1, 0, true), (0.45, 0, true), (0.1, 0, true)], Demoted),
            (0.5, 0, &[], Credible),
            (0.499, 0, &[], Rest),
            // Low health is not raised by failing.
            (0.499, 2, &[(1.0, 0, true)], Rest),
        ] {
            let others = others.iter().map(|(health, failures, takes_calls)| (*health, *failures, *takes_calls, true));
            let members: Vec<Known> = [(health, failures, true, true)].into_iter().chain(others).collect();
            assert_eq!(tier(&members, 0), expected, "{members:?}");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_picked_was_open(open in proptest::collection::vec(any::<usize>(), 0..40), seed: u64, loads: Vec<f64>) {
            fastrand::seed(seed);
            let picked = pick(&open, |i| loads.get(i % 40).copied().unwrap_or(f64::NAN));
            prop_assert_eq!(picked.is_none(), open.is_empty());
            prop_assert!(picked.is_none_or(|picked| open.contains(&picked)));
        }

        /// Members are asked one after the other, as if all were pending in the end, against the law read from above.
        #[test]
        fn nobody_is_asked_before_a_better_tier_nor_twice_and_all_are(
            members in proptest::collection::vec(
                (prop_oneof![Just(1.0), 0.0..1.0f64], 0u32..4, any::<bool>(), any::<bool>()), 0..40,
            ),
            seed: u64,
        ) {
            fastrand::seed(seed);
            let mut ranked = ranked(&members);
            let mut left: Vec<usize> = (0..members.len()).filter(|i| members[*i].3).collect();
            while let Some(picked) = pick(ranked.best(), |i| i as f64) {
                prop_assert!(left.contains(&picked), "it is worth asking, and was not asked yet");
                let (health, failures, ..) = members[picked];
                let is_credible = |i: &usize| {
                    let (health, failures, ..) = members[*i];
                    let another = |(other, failed, takes_calls, _): &Known| {
                        *takes_calls && *failed == 0 && *other >= health / 2.0
                    };
                    health >= 0.5 && !(failures >= 2 && members.iter().any(another))
                };
                if left.iter().any(is_credible) {
                    prop_assert!(is_credible(&picked), "{health}, failed it {failures} times, before a credible one");
                } else if left.iter().any(|i| members[*i].0 >= 0.5) {
                    prop_assert!(health >= 0.5, "junk goes before one that was only demoted");
                }
                ranked.remove(picked);
                left.retain(|i| *i != picked);
            }
            prop_assert!(left.is_empty(), "{:?} were never asked", left);
        }

        #[test]
        fn where_nothing_has_failed_it_is_the_plain_choice_of_two(
            open in proptest::collection::vec(any::<bool>(), 0..40), failed in 0u32..2, seed: u64,
        ) {
            let members: Vec<Known> = open.iter().map(|open| (1.0, failed, true, *open)).collect();
            let mut ranked = ranked(&members);
            let mut plain: Vec<usize> = (0..open.len()).filter(|i| open[*i]).collect();
            while !plain.is_empty() {
                prop_assert_eq!(ranked.best(), &plain[..]);
                fastrand::seed(seed);
                let picked = pick(&plain, |i| i as f64);
                fastrand::seed(seed);
                prop_assert_eq!(pick(ranked.best(), |i| i as f64), picked);
                let Some(picked) = picked else { unreachable!("there is one") };
                ranked.remove(picked);
                let at = plain.iter().position(|i| *i == picked).unwrap();
                plain.swap_remove(at);
            }
            prop_assert!(ranked.best().is_empty());
        }
    }
}
