//! What calls have proved to cost, and what the next one is taken to cost. Pure.

use super::{cost::Cost, ledger::PerResource, quantile::Lately};
use crate::{dialect::Resource, outcome::Usage};

/// An answer is taken to be so long, in tokens, before the first one has told.
const FIRST_OUTPUT: f64 = 256.0;
/// And a request whose estimate says nothing.
const FIRST_INPUT: f64 = 256.0;

/// No call has so many tokens. Beyond some such bound sums lose what is small.
const TOKENS_MAX: f64 = 1e9;

/// So many answers tell how far off estimates may be; before that an input may be so much smaller than its estimate.
const TELLING: u64 = 20;
const UNKNOWN_RATIO: f64 = 0.25;

/// Until calls say what they used, so much of what they are taken to cost on average is replaced by the next one's.
const LEARN: f64 = 0.2;

#[derive(Debug)]
pub(super) struct Experience {
    /// Which part of calls is not to cost more than it was taken to.
    quantile: f64,
    input: Lately,
    output: Lately,
    /// Input used ÷ input estimated.
    input_ratio: Lately,
    /// The mean of calls.
    usual: PerResource,
    /// What few calls exceed.
    large: PerResource,
    /// What an estimate of the input is multiplied by.
    factor: f64,
    /// Sums of what calls were taken to cost, and of what they used.
    taken: PerResource,
    used: PerResource,
}

impl Experience {
    pub(super) fn new(quantile: f64) -> Self {
        let first = price(FIRST_INPUT, FIRST_OUTPUT);
        Experience {
            quantile,
            input: Lately::default(),
            output: Lately::default(),
            input_ratio: Lately::default(),
            usual: first,
            large: first,
            factor: 1.0,
            taken: PerResource::default(),
            used: PerResource::default(),
        }
    }

    /// What calls cost on average.
    pub(super) fn usual(&self) -> &PerResource {
        &self.usual
    }

    /// What few calls exceed.
    pub(super) fn large(&self) -> &PerResource {
        &self.large
    }

    /// What a call is taken to cost.
    pub(super) fn price(&self, cost: &Cost) -> PerResource {
        let sound = |tokens: &f64| tokens.is_finite() && *tokens >= 0.0;
        // An estimate that makes no sense (an average over nothing is NaN) is none: it must not spoil what is known.
        let input = cost.input_tokens.filter(sound).map(|input| if cost.exact { input } else { input * self.factor });
        let output = cost.output_tokens.filter(sound).unwrap_or(self.large[Resource::OutputTokens.index()]);
        let output = cost.output_bound.filter(sound).map_or(output, |bound| output.min(bound));
        price(input.unwrap_or(self.large[Resource::InputTokens.index()]), output)
    }

    /// A call is made. While none has said what it used, what they are taken to cost is all there is.
    pub(super) fn asked(&mut self, price: &PerResource) {
        if self.input.seen() > 0 {
            return;
        }
        for (usual, asked) in self.usual.iter_mut().zip(price) {
            *usual += LEARN * (asked - *usual);
        }
    }

    /// An answer says what its call used, which was taken to cost `taken`, its input estimated at `estimate`.
    pub(super) fn used(&mut self, usage: Usage, estimate: Option<f64>, taken: Option<&PerResource>) {
        let (input, output) = (tokens(usage.input_tokens), tokens(usage.output_tokens));
        self.input.note(input);
        self.output.note(output);
        if let Some(estimate) = estimate.filter(|estimate| *estimate > 0.0) {
            self.input_ratio.note(input / estimate);
        }
        if let Some(taken) = taken {
            let used = price(input, output);
            for ((sum, of), (other, one)) in self.taken.iter_mut().zip(taken).zip(self.used.iter_mut().zip(&used)) {
                *sum = 0.99 * *sum + of;
                *other = 0.99 * *other + one;
            }
        }
        let mean = |lately: &Lately| lately.mean().unwrap_or(0.0);
        let large = |lately: &Lately| cautious(lately, self.quantile).unwrap_or(0.0);
        self.usual = price(mean(&self.input), mean(&self.output));
        self.large = price(large(&self.input), large(&self.output));
        self.factor = cautious(&self.input_ratio, self.quantile).unwrap_or(1.0);
    }

    /// What calls were taken to cost ÷ what they used, lately; `None` before any has said so.
    pub(super) fn taken_to_used(&self, resource: Resource) -> Option<f64> {
        let used = self.used[resource.index()];
        (used > 0.0).then(|| self.taken[resource.index()] / used)
    }

    /// What a call used.
    pub(super) fn cost_of(usage: Usage) -> PerResource {
        price(tokens(usage.input_tokens), tokens(usage.output_tokens))
    }

    /// The least that a call may cost: nearly all have used more of what they were estimated at.
    pub(super) fn least(&self, cost: &Cost) -> PerResource {
        let ratio = match self.input_ratio.seen() {
            _ if cost.exact => 1.0,
            ..TELLING => UNKNOWN_RATIO,
            _ => self.input_ratio.quantile(1.0 - self.quantile).unwrap_or(UNKNOWN_RATIO),
        };
        let sound = |tokens: &f64| tokens.is_finite() && *tokens >= 0.0;
        let input = cost.input_tokens.filter(sound).unwrap_or(0.0) * ratio;
        price(input, cost.output_tokens.filter(sound).unwrap_or(0.0))
    }
}

/// A high quantile, with something added while only few are known: the highest of three is exceeded by the next one time in
/// four.
fn cautious(lately: &Lately, quantile: f64) -> Option<f64> {
    Some(lately.quantile(quantile)? * (1.0 + 1.0 / lately.seen() as f64))
}

fn tokens(count: u64) -> f64 {
    (count as f64).min(TOKENS_MAX)
}

fn price(input: f64, output: f64) -> PerResource {
    let (input, output) = (input.min(TOKENS_MAX), output.min(TOKENS_MAX));
    let mut price = PerResource::default();
    price[Resource::Requests.index()] = 1.0;
    price[Resource::InputTokens.index()] = input;
    price[Resource::OutputTokens.index()] = output;
    price[Resource::Tokens.index()] = input + output;
    price
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INPUT: usize = Resource::InputTokens.index();
    const OUTPUT: usize = Resource::OutputTokens.index();
    const TOKENS: usize = Resource::Tokens.index();

    fn learnt(used: impl IntoIterator<Item = (u64, u64)>) -> Experience {
        let mut experience = Experience::new(0.95);
        for (input, output) in used {
            experience.used(Usage::new(input, output), Some(100.0), None);
        }
        experience
    }

    fn cost(input: Option<f64>, output: Option<f64>, bound: Option<f64>) -> Cost {
        Cost::tokens(input, output).output_bound(bound)
    }

    #[test]
    fn an_estimate_is_never_zero_before_anything_is_known() {
        let price = Experience::new(0.95).price(&Cost::default());
        assert!(price.iter().all(|cost| *cost >= 1.0), "{price:?}");
    }

    #[test]
    fn output_is_what_answers_had_and_never_the_bare_bound() {
        let experience = learnt(std::iter::repeat_n((100, 200), 100));
        let output = |bound| experience.price(&cost(Some(100.0), None, bound))[OUTPUT];
        assert!((200.0..215.0).contains(&output(Some(4_096.0))), "{}", output(Some(4_096.0)));
        assert_eq!(output(Some(150.0)), 150.0, "it cannot have more");
        assert!((200.0..215.0).contains(&output(None)));
        assert_eq!(experience.price(&cost(None, Some(7.0), None))[OUTPUT], 7.0, "who knows better says so");
    }

    #[test]
    fn an_estimate_that_was_wrong_is_set_right() {
        // An image is a hundred times as many bytes as tokens; prose in other scripts has more tokens than bytes tell.
        for ratio in [0.01, 0.5, 1.0, 3.0] {
            let used = (100.0 * ratio) as u64;
            let price = learnt(std::iter::repeat_n((used, 10), 200)).price(&cost(Some(1_000.0), None, None));
            assert!((1.0..1.06).contains(&(price[INPUT] / (1_000.0 * ratio))), "{ratio}: {price:?}");
            assert_eq!(price[TOKENS], price[INPUT] + price[OUTPUT]);
            let counted = learnt(std::iter::repeat_n((used, 10), 200)).price(&cost(Some(1_000.0), None, None).exact());
            assert_eq!(counted[INPUT], 1_000.0, "what was counted is no estimate");
        }
    }

    #[test]
    fn a_few_answers_are_not_taken_for_all() {
        let large = |n| learnt(std::iter::repeat_n((100, 100), n)).large()[OUTPUT];
        assert!(large(1) > 190.0 && large(2) > 145.0 && large(100) < 110.0);
    }

    #[test]
    fn what_is_taken_and_what_is_used_are_compared() {
        let mut experience = Experience::new(0.95);
        assert_eq!(experience.taken_to_used(Resource::InputTokens), None);
        let taken = [1.0, 200.0, 100.0, 300.0];
        experience.used(Usage::new(100, 100), Some(1.0), Some(&taken));
        assert_eq!(experience.taken_to_used(Resource::InputTokens), Some(2.0));
        assert_eq!(experience.taken_to_used(Resource::OutputTokens), Some(1.0));
    }

    proptest! {
        #[test]
        fn few_calls_cost_more_than_they_are_taken_to(seed: u64, sigma in 0.1f64..1.0) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut draw = || {
                let normal: f64 = (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
                (200.0 * (sigma * normal).exp()) as u64
            };
            let experience = learnt((0..500).map(|_| (100, draw())));
            let taken = experience.price(&Cost::default())[OUTPUT];
            let above = (0..2_000).filter(|_| draw() as f64 > taken).count();
            prop_assert!(above < 250, "{above} of 2,000 where 100 are expected");
        }

        #[test]
        fn whatever_is_said_prices_are_sound(
            used in proptest::collection::vec((any::<u64>(), any::<u64>(), proptest::option::of(any::<f64>())), 0..50),
            input in proptest::option::of(any::<f64>()), output in proptest::option::of(any::<f64>()),
            bound in proptest::option::of(any::<f64>()),
        ) {
            let mut experience = Experience::new(0.95);
            for (input, output, estimate) in used {
                experience.used(Usage::new(input, output), estimate, None);
            }
            for price in [experience.price(&cost(input, output, bound)), *experience.usual(), *experience.large()] {
                prop_assert!(price.iter().all(|cost| cost.is_finite() && *cost >= 0.0), "{price:?}");
            }
        }
    }
}
