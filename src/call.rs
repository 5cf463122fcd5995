//! What is remembered of one logical request over all its attempts.

use std::sync::{Arc, OnceLock};

/// The memory of one logical request: a request extension, made by whoever retries and read by the balancer. It carries the
/// request's age, so that a retried request keeps its place in line. First attempts need none.
///
/// Put a clone of the same memory into the extensions of every attempt, and keep one until the request is done.
#[derive(Clone, Debug, Default)]
pub struct CallMemory(Arc<OnceLock<u64>>);

impl CallMemory {
    /// An empty memory, for a request that has not been tried.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The age, set by the first balancer that is asked: lower is older.
    pub(crate) fn age_or(&self, next: impl FnOnce() -> u64) -> u64 {
        *self.0.get_or_init(next)
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
