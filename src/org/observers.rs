//! Who is told of what happens to an org.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{Org, lock};
use crate::observe::{Event, Observer, Observers};

/// The cell of an identity.
#[derive(Default)]
pub(super) struct Cell {
    /// Whether there is any, so that whoever has news mostly need not lock.
    any: AtomicBool,
    observers: Mutex<Observers>,
}

impl Org {
    /// Tells `observer` from now on of what happens to this org, whichever model family it concerns: see
    /// [`observe`](crate::observe). It is kept as long as the org.
    pub fn observe(&self, observer: impl Observer) {
        self.observe_shared(Arc::new(observer));
    }

    pub(crate) fn observe_shared(&self, observer: Arc<dyn Observer>) {
        let cell = &self.identity.observers;
        lock(&cell.observers).add(observer);
        cell.any.store(true, Relaxed);
    }

    /// Whether anybody wants to be told.
    pub(crate) fn is_observed(&self) -> bool {
        self.identity.observers.any.load(Relaxed)
    }

    /// Something has happened. Under no lock.
    pub(crate) fn tell(&self, event: &Event) {
        if self.is_observed() {
            let observers = lock(&self.identity.observers.observers).clone();
            observers.tell(event);
        }
    }
}
