//! A member: an org's stack for one model family, and the bell that its readiness rings.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
};

use tower_service::Service;

use super::queue::Queue;
use crate::org::{Membership, Org};

/// Only this one instance ever stays registered for a wake: it is polled, and called, under its own lock.
pub(crate) struct Member<M> {
    pub(crate) org: Org,
    /// None once it is gone.
    own: Mutex<Option<M>>,
    /// A [`Membership`], as this balancer has it.
    membership: AtomicU8,
    /// Whether the instance was polled and not called since: it may be registered, and keep what it needs or part of it.
    waits: AtomicBool,
    bell: Arc<Bell>,
    waker: Waker,
    knell: Waker,
}

/// A call that a member has taken, and that has not ended.
pub(crate) struct Seat<M>(Arc<Member<M>>);

impl<M> Seat<M> {
    fn take(member: &Arc<Member<M>>) -> Self {
        member.org.bind();
        Seat(member.clone())
    }

    pub(crate) fn member(&self) -> &Member<M> {
        &self.0
    }

    pub(crate) fn org(&self) -> &Org {
        &self.0.org
    }
}

impl<M> Drop for Seat<M> {
    fn drop(&mut self) {
        self.0.org.unbind();
    }
}

/// Rung when the member may have become ready.
struct Bell {
    pending: AtomicBool,
    /// It has rung, or is new, and nobody was admitted since: the first whom it admits shall be one who waits.
    owed: AtomicBool,
    generation: AtomicU64,
    /// The member is being polled or called, under its lock. Whoever does that looks for news afterwards, so that nobody is
    /// woken from within.
    busy: AtomicBool,
    queue: Arc<Queue>,
    org: Org,
}

impl Bell {
    /// Calls who is next of those who may have what there may be.
    fn call(&self) {
        if self.org.refuses_any() {
            self.queue.call_for_models(&[self.org.refused_models()]);
        } else {
            self.queue.call(1);
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.generation.fetch_add(1, SeqCst);
        // First owed, then open: no newcomer sees the one without the other.
        self.owed.store(true, SeqCst);
        self.pending.store(false, SeqCst);
        if !self.busy.load(SeqCst) {
            self.call();
        }
    }
}

/// Rung when the org is put out, or brought back, for whatever models. It may have been the last one, and then nothing will happen any more that
/// would call those who are not called now: so all are.
struct Knell(Arc<Bell>);

impl Wake for Knell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_by_ref();
        self.0.queue.call(usize::MAX);
    }
}

/// The member's instance, locked for a poll or a call.
struct Own<'a, M> {
    instance: MutexGuard<'a, Option<M>>,
    bell: &'a Bell,
}

impl<M> Drop for Own<'_, M> {
    fn drop(&mut self) {
        self.bell.busy.store(false, SeqCst);
    }
}

pub(crate) enum Asked<M, F, E> {
    /// It took the call.
    Called(F, Seat<M>),
    /// It is not ready; its bell will ring.
    Pending,
    /// It failed at being ready.
    Failed(E),
}

impl<M> Member<M> {
    /// It takes no calls until it is told to.
    pub(crate) fn new(org: Org, own: M, queue: &Arc<Queue>) -> Arc<Self> {
        let bell = Arc::new(Bell {
            pending: AtomicBool::new(false),
            owed: AtomicBool::new(true),
            generation: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            queue: queue.clone(),
            org: org.clone(),
        });
        let waker = Waker::from(bell.clone());
        let knell = Waker::from(Arc::new(Knell(bell.clone())));
        org.watch(&knell);
        Arc::new(Member {
            org,
            own: Mutex::new(Some(own)),
            membership: AtomicU8::new(Membership::Closed as u8),
            waits: AtomicBool::new(false),
            bell,
            waker,
            knell,
        })
    }

    fn lock(&self) -> Own<'_, M> {
        // A panic in a user's `poll_ready` or `call` is the user's; the instance is still there.
        let instance = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.busy.store(true, SeqCst);
        Own { instance, bell: &self.bell }
    }

    fn is(&self, membership: Membership) -> bool {
        self.membership.load(SeqCst) == membership as u8
    }

    pub(crate) fn takes_calls(&self) -> bool {
        self.is(Membership::In)
    }

    /// Whether it may have a slot, now or later: not closed, not out.
    pub(crate) fn serves(&self) -> bool {
        self.takes_calls() && !self.org.is_out()
    }

    /// Whether it may be asked for this model at all.
    pub(crate) fn allows(&self, model: Option<&str>) -> bool {
        !self.org.refuses(model)
    }

    /// Whether it is worth asking: not closed, not out, and not known to be pending.
    pub(crate) fn is_open(&self) -> bool {
        self.takes_calls() && !self.bell.pending.load(SeqCst) && !self.org.is_out()
    }

    /// Whether a newcomer may ask it though others wait, all of whom have been called: since it last rang it has admitted
    /// somebody, and has not been pending. So it has enough, as far as anybody knows; and what it has next when it has been
    /// short is for those who wait.
    pub(crate) fn is_plentiful(&self) -> bool {
        self.is_open() && !self.bell.owed.load(SeqCst)
    }

    /// From now on it takes calls, or takes none. Afterwards, under no lock: [`settle`](Member::settle).
    pub(crate) fn set(&self, membership: Membership) {
        self.membership.store(membership as u8, SeqCst);
    }

    /// After a change of its membership: who is closed keeps no reservation, who is gone no instance; who is in again
    /// rings. Afterwards look for news.
    ///
    /// It may be called from within the member's own poll, by whatever the user does there; then the poll sees to it, once
    /// it has ended.
    pub(crate) fn settle(&self)
    where
        M: Clone,
    {
        if self.takes_calls() {
            self.bell.wake_by_ref();
        } else if !self.bell.busy.load(SeqCst) {
            self.tidy();
        }
    }

    /// Whoever has polled it, or put another instance in, looks whether it was closed meanwhile: whoever closed it may have
    /// left the rest to us.
    fn tidy(&self)
    where
        M: Clone,
    {
        if self.takes_calls() {
            return;
        }
        if self.is(Membership::Gone) {
            let own = self.lock();
            if own.instance.is_some() {
                self.renew(own);
            }
        } else {
            self.stand_down();
        }
    }

    /// Asks it to take the call in `slot`, which it does in the same poll in which it is ready. Afterwards look for news.
    pub(crate) fn ask<Req>(self: &Arc<Self>, slot: &mut Option<Req>) -> Asked<M, M::Future, M::Error>
    where
        M: Service<Req> + Clone,
    {
        // Before the lock, so that it is dropped after it: its drop may wake somebody.
        let seat;
        let mut own = self.lock();
        let asked = match self.poll(&mut own) {
            Poll::Ready(Ok(())) => {
                // First taken, then looked: whoever closes it and then finds nothing in flight is right.
                seat = Seat::take(self);
                if self.takes_calls() {
                    self.waits.store(false, SeqCst);
                    self.bell.owed.store(false, SeqCst);
                    let instance = own.instance.as_mut().expect("it was polled, under this lock");
                    let request = slot.take().expect("a call is offered only until a member has taken it");
                    Asked::Called(instance.call(request), seat)
                } else {
                    Asked::Pending
                }
            }
            Poll::Ready(Err(error)) => {
                self.renew(own);
                return Asked::Failed(error);
            }
            Poll::Pending => Asked::Pending,
        };
        drop(own);
        self.tidy();
        asked
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
            return self.renew(own);
        }
        drop(own);
        self.tidy();
    }

    fn poll<Req>(&self, own: &mut Own<'_, M>) -> Poll<Result<(), M::Error>>
    where
        M: Service<Req>,
    {
        let Some(instance) = &mut *own.instance else { return Poll::Pending };
        let generation = self.bell.generation.load(SeqCst);
        self.waits.store(true, SeqCst);
        let ready = instance.poll_ready(&mut Context::from_waker(&self.waker));
        if ready.is_pending() {
            self.bell.pending.store(true, SeqCst);
            if self.bell.generation.load(SeqCst) != generation {
                // The bell rang between the poll and the note.
                self.bell.pending.store(false, SeqCst);
            }
        }
        ready
    }

    /// Puts a clone in the instance's place (nothing, once it is gone), and drops that under no lock: its drop may wake
    /// whoever it likes.
    fn renew(&self, mut own: Own<'_, M>)
    where
        M: Clone,
    {
        self.waits.store(false, SeqCst);
        let fresh = if self.is(Membership::Gone) { None } else { own.instance.clone() };
        let old = std::mem::replace(&mut *own.instance, fresh);
        self.bell.owed.store(true, SeqCst);
        self.bell.pending.store(false, SeqCst);
        drop(own);
        drop(old);
        self.tidy();
    }

    /// Nobody waits any more: whatever the instance has reserved or waits for is given up. Whether it has rung makes no
    /// difference: it may have taken the one half and been told of the other.
    ///
    /// Whoever polls it right now looks whether anybody waits once that is done. It may be us: a member's own poll may drop the
    /// last call in line.
    pub(crate) fn stand_down(&self)
    where
        M: Clone,
    {
        if !self.waits.load(SeqCst) || self.bell.busy.load(SeqCst) {
            return;
        }
        self.renew(self.lock());
    }
}

impl<M> Drop for Member<M> {
    fn drop(&mut self) {
        self.org.unwatch(&self.knell);
    }
}
