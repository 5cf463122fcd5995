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
    /// Whether the instance was polled and not called since: it may be registered, and keep what it needs or part of it.
    waits: AtomicBool,
    bell: Arc<Bell>,
    waker: Waker,
}

/// Rung when the member may have become ready.
struct Bell {
    pending: AtomicBool,
    generation: AtomicU64,
    /// The member is being polled or called, under its lock. Whoever does that looks for news afterwards, so that nobody is
    /// woken from within.
    busy: AtomicBool,
    queue: Arc<Queue>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.generation.fetch_add(1, SeqCst);
        self.pending.store(false, SeqCst);
        if !self.busy.load(SeqCst) {
            self.queue.call(1);
        }
    }
}

/// The member's instance, locked for a poll or a call.
struct Own<'a, M> {
    instance: MutexGuard<'a, M>,
    bell: &'a Bell,
}

impl<M> Drop for Own<'_, M> {
    fn drop(&mut self) {
        self.bell.busy.store(false, SeqCst);
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
        let bell = Arc::new(Bell {
            pending: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            queue: queue.clone(),
        });
        let waker = Waker::from(bell.clone());
        org.watch(waker.clone());
        Member { org, own: Mutex::new(own), waits: AtomicBool::new(false), bell, waker }
    }

    fn lock(&self) -> Own<'_, M> {
        // A panic in a user's `poll_ready` or `call` is the user's; the instance is still there.
        let instance = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.busy.store(true, SeqCst);
        Own { instance, bell: &self.bell }
    }

    /// Whether it is worth asking: not out, and not known to be pending.
    pub(crate) fn is_open(&self) -> bool {
        !self.bell.pending.load(SeqCst) && !self.org.is_out()
    }

    /// Asks it to take the call, which it does in the same poll in which it is ready. Afterwards look for news.
    pub(crate) fn ask<Req>(&self, request: Req) -> Asked<Req, M::Future, M::Error>
    where
        M: Service<Req> + Clone,
    {
        let mut own = self.lock();
        match self.poll(&mut own) {
            Poll::Ready(Ok(())) => {
                self.waits.store(false, SeqCst);
                Asked::Called(own.instance.call(request))
            }
            Poll::Ready(Err(error)) => {
                self.renew(own);
                Asked::Failed(error)
            }
            Poll::Pending => Asked::Pending(request),
        }
    }

    /// It has just taken a call, and others wait: it is polled once more, so that its next slot is known to them, or its bell
    /// rings for it. Nobody has to come first for that. Afterwards look for news.
    pub(crate) fn enlist<Req>(&self)
    where
        M: Service<Req> + Clone,
    {
        let mut own = self.lock();
        if let Poll::Ready(Err(_)) = self.poll(&mut own) {
            // Nobody's call has failed by it; the next one finds out by itself.
            self.renew(own);
        }
    }

    fn poll<Req>(&self, own: &mut Own<'_, M>) -> Poll<Result<(), M::Error>>
    where
        M: Service<Req>,
    {
        let generation = self.bell.generation.load(SeqCst);
        self.waits.store(true, SeqCst);
        let ready = own.instance.poll_ready(&mut Context::from_waker(&self.waker));
        if ready.is_pending() {
            self.bell.pending.store(true, SeqCst);
            if self.bell.generation.load(SeqCst) != generation {
                // The bell rang between the poll and the note.
                self.bell.pending.store(false, SeqCst);
            }
        }
        ready
    }

    /// Puts a clone in the instance's place, and drops that under no lock: its drop may wake whoever it likes.
    fn renew(&self, mut own: Own<'_, M>)
    where
        M: Clone,
    {
        self.waits.store(false, SeqCst);
        let fresh = own.instance.clone();
        let old = std::mem::replace(&mut *own.instance, fresh);
        self.bell.pending.store(false, SeqCst);
        drop(own);
        drop(old);
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
        self.renew(self.lock());
    }
}
