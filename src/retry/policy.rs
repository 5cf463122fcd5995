//! The numbers one retry layer lives by, and the dice for its jitter.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::HeaderValue;

/// What the builder has validated.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// Attempts that may end in an error, the first call included.
    pub(crate) max_attempts: u32,
    pub(crate) backoff: Backoff,
    /// How long a request waits while nothing goes on, from its first 429 or for its turn.
    pub(crate) patience: Duration,
    /// Wire calls of one request, whatever they ended in.
    pub(crate) max_calls: u32,
    /// Whether a POST or PATCH without an `idempotency-key` is given one.
    pub(crate) idempotency_key: bool,
    /// How long a request may take, all in all.
    pub(crate) deadline: Option<Duration>,
}

/// Longer than any run, and short enough to be added to any instant: a longer wait must not become none.
const FAR: Duration = Duration::from_secs(365 * 86_400);

/// Exponential growth under a cap. `roll` is a draw from `0.0..1.0`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    pub(crate) base: Duration,
    pub(crate) factor: f64,
    pub(crate) cap: Duration,
}

impl Backoff {
    /// The longest wait before the `nth` retry, counted from 1.
    pub(crate) fn longest(&self, nth: u32) -> Duration {
        let exponent = i32::try_from(nth.saturating_sub(1)).unwrap_or(i32::MAX);
        let seconds = self.base.as_secs_f64() * self.factor.powi(exponent);
        // An overflow to infinity is a number beyond the cap too.
        Duration::try_from_secs_f64(seconds).map_or(self.cap, |span| span.min(self.cap))
    }

    /// Full jitter: anything up to the longest wait. Spreads best those who failed together.
    pub(crate) fn full(&self, nth: u32, roll: f64) -> Duration {
        self.longest(nth).min(FAR).mul_f64(roll)
    }

    /// Equal jitter: at least half of the longest wait, so that a provider which names no time is never hammered by luck.
    pub(crate) fn equal(&self, nth: u32, roll: f64) -> Duration {
        self.longest(nth).min(FAR).mul_f64(0.5 + 0.5 * roll)
    }
}

/// One draw per wait, from the thread's generator or from one seeded for a test, which clones share.
#[derive(Clone, Debug)]
pub(crate) struct Dice(Option<Arc<Mutex<fastrand::Rng>>>);

impl Dice {
    pub(crate) fn new(seed: Option<u64>) -> Self {
        Dice(seed.map(|seed| Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)))))
    }

    /// A draw from `0.0..1.0`.
    pub(crate) fn roll(&self) -> f64 {
        match &self.0 {
            None => fastrand::f64(),
            Some(rng) => rng.lock().unwrap_or_else(PoisonError::into_inner).f64(),
        }
    }

    /// A fresh idempotency key.
    pub(crate) fn key(&self) -> Key {
        let bits = match &self.0 {
            None => fastrand::u128(..),
            Some(rng) => rng.lock().unwrap_or_else(PoisonError::into_inner).u128(..),
        };
        Key(bits.to_be_bytes())
    }
}

/// An idempotency key: `tq-` and 128 random bits. Unique, not secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 16]);

impl Key {
    /// The header, made anew for every attempt: most requests have but one, and it costs less than to share it.
    pub(crate) fn header(self) -> HeaderValue {
        // By hand: a formatter costs ten times as much.
        let mut key = *b"tq-00000000000000000000000000000000";
        for (digits, byte) in key[3..].chunks_exact_mut(2).zip(self.0) {
            digits.copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
        HeaderValue::from_bytes(&key).expect("hex digits may stand in a header")
    }
}

const HEX: [u8; 16] = *b"0123456789abcdef";

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn backoff(base: Duration) -> Backoff {
        Backoff { base, factor: 2.0, cap: Duration::from_secs(30) }
    }

    #[test]
    fn the_longest_wait_doubles_up_to_the_cap_and_never_overflows() {
        let backoff = backoff(Duration::from_millis(500));
        let longest: Vec<_> = (1..=8).map(|nth| backoff.longest(nth).as_millis()).collect();
        assert_eq!(longest, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
        assert_eq!(backoff.longest(u32::MAX), Duration::from_secs(30));
        assert_eq!(Backoff { cap: Duration::MAX, ..backoff }.longest(u32::MAX), Duration::MAX);
    }

    #[test]
    fn a_hundred_sessions_draw_a_hundred_waits_whatever_the_base() {
        for base in [1, 10, 100, 500, 999, 1_000, 2_000, 8_000, 30_000].map(Duration::from_millis) {
            for dice in [Dice::new(None), Dice::new(Some(7))] {
                let backoff = backoff(base);
                let waits: BTreeSet<_> = (0..100).map(|_| backoff.full(1, dice.roll())).collect();
                assert!(waits.len() >= 95, "{} distinct waits of 100 at base {base:?}", waits.len());
                assert!(waits.last() < Some(&base), "a jittered wait is below the longest");
                assert!(waits.first() < Some(&(base / 4)), "the jitter is full: it starts at zero");
            }
        }
    }

    #[test]
    fn equal_jitter_keeps_half_of_the_wait() {
        let backoff = backoff(Duration::from_secs(1));
        assert_eq!(backoff.equal(1, 0.0), Duration::from_millis(500));
        assert_eq!(backoff.equal(3, 0.5), Duration::from_secs(3));
    }

    #[test]
    fn keys_differ_and_a_seed_repeats_them() {
        let dice = Dice::new(None);
        assert_ne!(dice.key(), dice.key());
        assert_eq!(Dice::new(Some(1)).key(), Dice::new(Some(1)).key());
        let bits = fastrand::Rng::with_seed(1).u128(..);
        assert_eq!(Dice::new(Some(1)).key().header(), format!("tq-{bits:032x}"));
        assert_eq!(Key([0; 16]).header(), format!("tq-{:032x}", 0));
    }
}
