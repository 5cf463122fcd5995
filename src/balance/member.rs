//! A member: an org's stack for one model family, and the bell that its readiness rings.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
};

use tower_service::Service;

use super::queue::Queue;
use crate::org::Org;

/// Only this one instance ever stays registered for a wake: it is polled, and called, under its own lock.
pub(crate) struct Member<M> {
    pub(crate) org: Org,
    own: Mutex<M>,
    /// Whether the instance has gone pending and not been called since: it may be registered, and keep part of what it needs.
    waits: AtomicBool,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Rung when the member may have become ready.
struct Bell {
    pending: AtomicBool,
    generation: AtomicU64,
    queue: Arc<Queue>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.generation.fetch_add(1, SeqCst);
        self.pending.store(false, SeqCst);
        self.queue.call(1);
    }
}

pub(crate) enum Asked<Req, F, E> {
    /// It took the call.
    Called(F),
    /// It is not ready; its bell will ring.
    Pending(Req),
    /// It failed at being ready.
    Failed(E),
}

impl<M> Member<M> {
    pub(crate) fn new(org: Org, own: M, queue: &Arc<Queue>) -> Self {
        let bell =
            Arc::new(Bell { pending: AtomicBool::new(false), generation: AtomicU64::new(0), queue: queue.clone() });
        let waker = Waker::from(bell.clone());
        org.watch(waker.clone());
        Member { org, own: Mutex::new(own), waits: AtomicBool::new(false), bell, waker }
    }

    fn lock(&self) -> MutexGuard<'_, M> {
        // A panic in a user's `poll_ready` or `call` is the user's; the instance is still there.
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is worth asking: not out, and not known to be pending.
    pub(crate) fn is_open(&self) -> bool {
        !self.bell.pending.load(SeqCst) && !self.org.is_out()
    }

    /// Asks it to take the call, which it does in the same poll in which it is ready.
    pub(crate) fn ask<Req>(&self, request: Req) -> Asked<Req, M::Future, M::Error>
    where
        M: Service<Req> + Clone,
    {
        let mut own = self.lock();
        let generation = self.bell.generation.load(SeqCst);
        match own.poll_ready(&mut Context::from_waker(&self.waker)) {
            Poll::Ready(Ok(())) => {
                self.waits.store(false, SeqCst);
                Asked::Called(own.call(request))
            }
            Poll::Ready(Err(error)) => {
                self.waits.store(false, SeqCst);
                // A failed instance must not be asked again; its clone may be.
                let fresh = own.clone();
                let failed = std::mem::replace(&mut *own, fresh);
                drop(own);
                drop(failed);
                Asked::Failed(error)
            }
            Poll::Pending => {
                self.waits.store(true, SeqCst);
                self.bell.pending.store(true, SeqCst);
                if self.bell.generation.load(SeqCst) != generation {
                    // The bell rang between the poll and the note.
                    self.bell.pending.store(false, SeqCst);
                }
                Asked::Pending(request)
            }
        }
    }

    /// Nobody waits any more: whatever the instance has reserved or waits for is given up. Whether it has rung makes no
    /// difference: it may have taken the one half and been told of the other.
    pub(crate) fn stand_down(&self)
    where
        M: Clone,
    {
        if !self.waits.load(SeqCst) {
            return;
        }
        let mut own = self.lock();
        self.waits.store(false, SeqCst);
        let fresh = own.clone();
        let idle = std::mem::replace(&mut *own, fresh);
        self.bell.pending.store(false, SeqCst);
        drop(own);
        // Dropped outside the lock: its drop may wake whoever it likes.
        drop(idle);
    }
}
