//! What is remembered of one logical request over all its attempts.

use std::{
    num::NonZeroU64,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use crate::{
    org::Org,
    outcome::{Class, Purse},
};

/// The memory of one logical request: a request extension, made by whoever retries and read by the balancer. It carries the
/// request's age, so that a retried request keeps its place in line, and which orgs have failed it, so that they yield to others.
/// First attempts need none.
///
/// Put a clone of the same memory into the extensions of every attempt, and keep one until the request is done.
#[derive(Clone, Debug, Default)]
pub struct CallMemory(Arc<Memory>);

#[derive(Debug, Default)]
struct Memory {
    /// One more than the age; zero until it is set. An atomic of its own costs a third of a `OnceLock`.
    age: AtomicU64,
    /// Whether the attempt under way has an org.
    bound: AtomicBool,
    /// Whether anything is in `tried`, so that whoever looks mostly need not lock.
    any: AtomicBool,
    tried: Mutex<Vec<Tried>>,
}

/// An org that was asked for one request and did not answer it.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Tried {
    /// Which org, for which model family.
    pub org: Org,
    /// Attempts it did not answer, of whatever class.
    pub attempts: u32,
    /// Those of them that a request pays for as errors: 429s and refused keys are none.
    pub failures: u32,
}

impl Memory {
    fn age(&self) -> Option<u64> {
        NonZeroU64::new(self.age.load(Relaxed)).map(|written| written.get() - 1)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Tried>> {
        // Nothing that can panic runs under it.
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallMemory {
    /// An empty memory, for a request that has not been tried.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The orgs that were asked and did not answer, in the order in which they were first asked.
    #[must_use]
    pub fn tried(&self) -> Vec<Tried> {
        if self.has_tried() { self.0.lock().clone() } else { vec![] }
    }

    /// The age, set by the first balancer that is asked: lower is older.
    pub(crate) fn age_or(&self, next: impl FnOnce() -> u64) -> u64 {
        if let Some(age) = self.0.age() {
            return age;
        }
        let age = next();
        match self.0.age.compare_exchange(0, age.saturating_add(1), Relaxed, Relaxed) {
            Ok(_) => age,
            Err(first) => first - 1,
        }
    }

    /// Whether an earlier attempt has been made.
    pub(crate) fn was_called(&self) -> bool {
        self.0.age().is_some()
    }

    /// Whether anybody else still holds this memory: the logical request is not done.
    pub(crate) fn is_live(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// The attempt under way has an org, or is looking for one.
    pub(crate) fn set_bound(&self, bound: bool) {
        self.0.bound.store(bound, SeqCst);
    }

    /// Whether the attempt under way has an org: then it waits for its answer, and no longer for its turn.
    pub(crate) fn is_bound(&self) -> bool {
        self.0.bound.load(SeqCst)
    }

    /// Whether the attempt under way stands in a balancer's line. Where there is no balancer nobody says so.
    pub(crate) fn is_in_line(&self) -> bool {
        self.was_called() && !self.is_bound()
    }

    /// The org was asked, and this was no answer.
    pub(crate) fn write_tried(&self, org: &Org, class: Class) {
        let failed = u32::from(matches!(class.implies().purse, Purse::Errors | Purse::Once) && class != Class::Local);
        let mut all = self.0.lock();
        match all.iter_mut().find(|tried| tried.org.same_board(org)) {
            Some(tried) => {
                tried.attempts = tried.attempts.saturating_add(1);
                tried.failures = tried.failures.saturating_add(failed);
            }
            None => all.push(Tried { org: org.clone(), attempts: 1, failures: failed }),
        }
        self.0.any.store(true, SeqCst);
    }

    /// Whether any org was asked and did not answer.
    pub(crate) fn has_tried(&self) -> bool {
        self.0.any.load(SeqCst)
    }

    /// How often this org has failed this request.
    pub(crate) fn failures_of(&self, org: &Org) -> u32 {
        if !self.has_tried() {
            return 0;
        }
        self.0.lock().iter().find(|tried| tried.org.same_board(org)).map_or(0, |tried| tried.failures)
    }
}
