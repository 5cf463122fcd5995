//! Who is a member of a family's fleet: it changes while calls are bound and wait.
//!
//! A [`Fleet`] never changes; whoever has one looks without a lock. When somebody joins or goes, the roster puts another in
//! its place and marks the old one stale, and whoever still has that asks here.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
};

use tower_service::Service;

use super::{
    fleet::{Bound, Fleet, Place},
    member::Member,
    queue::Queue,
};
use crate::call::CallMemory;

pub(crate) struct Roster<M> {
    pub(crate) queue: Arc<Queue>,
    now: Mutex<Now<M>>,
}

struct Now<M> {
    members: Vec<Arc<Member<M>>>,
    // Weak, for a fleet keeps its roster: a call may outlive the balancer that made it.
    fleet: Weak<Fleet<M>>,
}

impl<M> Roster<M> {
    /// A new family: its fleet, whose line the members ring for.
    pub(crate) fn fleet(members: impl FnOnce(&Arc<Queue>) -> Vec<Arc<Member<M>>>) -> Arc<Fleet<M>> {
        let queue = Arc::default();
        let now = Now { members: members(&queue), fleet: Weak::new() };
        Arc::new(Roster { queue, now: Mutex::new(now) }).latest()
    }

    fn lock(&self) -> MutexGuard<'_, Now<M>> {
        // Nothing that can panic runs under this lock.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fleet as it is now.
    pub(crate) fn latest(self: &Arc<Self>) -> Arc<Fleet<M>> {
        let mut now = self.lock();
        now.fleet.upgrade().unwrap_or_else(|| {
            let fleet = Arc::new(Fleet::new(self, now.members.clone()));
            now.fleet = Arc::downgrade(&fleet);
            fleet
        })
    }

    /// Changes who is a member. Afterwards whoever waits may have to be called. Gives the fleet from now on.
    pub(crate) fn change(self: &Arc<Self>, change: impl FnOnce(&mut Vec<Arc<Member<M>>>)) -> Arc<Fleet<M>> {
        // Dropped under no lock.
        let _old;
        let mut now = self.lock();
        change(&mut now.members);
        let fleet = Arc::new(Fleet::new(self, now.members.clone()));
        _old = std::mem::replace(&mut now.fleet, Arc::downgrade(&fleet)).upgrade();
        // Before anybody is called: whoever writes itself into the line and is not called sees this.
        if let Some(old) = &_old {
            old.mark_stale();
        }
        drop(now);
        fleet
    }
}

impl<M> Fleet<M> {
    /// As [`poll_bind`](Fleet::poll_bind), by the fleet as it is now.
    pub(crate) fn poll_bind_latest<Req>(
        fleet: &mut Arc<Self>,
        cx: &mut Context<'_>,
        place: &mut Place<M>,
        memory: Option<&CallMemory>,
        slot: &mut Option<Req>,
    ) -> Poll<Bound<M, M::Future, M::Error>>
    where
        M: Service<Req> + Clone,
    {
        loop {
            fleet.refresh();
            let bound = fleet.poll_bind(cx, place, memory, slot);
            // Somebody who joined before we were in line has called those who were.
            if bound.is_ready() || !fleet.is_stale() {
                return bound;
            }
        }
    }
}
