//! What is remembered of one logical request over all its attempts.

use std::{
    num::NonZeroU64,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The memory of one logical request: a request extension, made by whoever retries and read by the balancer. It carries the
/// request's age, so that a retried request keeps its place in line. First attempts need none.
///
/// Put a clone of the same memory into the extensions of every attempt, and keep one until the request is done.
#[derive(Clone, Debug, Default)]
pub struct CallMemory(Arc<Age>);

/// One more than the age; zero until it is set. An atomic of its own costs a third of a `OnceLock`.
#[derive(Debug, Default)]
struct Age(AtomicU64);

impl Age {
    fn get(&self) -> Option<u64> {
        NonZeroU64::new(self.0.load(Relaxed)).map(|written| written.get() - 1)
    }
}

impl CallMemory {
    /// An empty memory, for a request that has not been tried.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The age, set by the first balancer that is asked: lower is older.
    pub(crate) fn age_or(&self, next: impl FnOnce() -> u64) -> u64 {
        if let Some(age) = self.0.get() {
            return age;
        }
        let age = next();
        match self.0.0.compare_exchange(0, age.saturating_add(1), Relaxed, Relaxed) {
            Ok(_) => age,
            Err(first) => first - 1,
        }
    }

    /// Whether an earlier attempt has been made.
    pub(crate) fn was_called(&self) -> bool {
        self.0.get().is_some()
    }

    /// Whether anybody else still holds this memory: the logical request is not done.
    pub(crate) fn is_live(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}
