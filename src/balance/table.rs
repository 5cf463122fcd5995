//! What all clones of a balancer share: the fleets by family, made when first asked for, and the count of unbound calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::{Context, Poll},
};

use super::{fleet::Fleet, member::Member, queue::Queue, roster::Roster};
use crate::{
    line::Ticket,
    org::{BuildError, Dialect, Family, Membership, Org, Orgs},
};

/// More families than this share [`Family::default`]: a list of models is short, and a mistake must not eat memory.
const FAMILIES_MAX: usize = 64;

pub(crate) struct Table<M> {
    /// What an org is asked before it joins.
    pub(super) check: Arc<Check>,
    fleets: Mutex<Fleets<M>>,
    ages: AtomicU64,
    pub(crate) unbound: Arc<Unbound>,
}

pub(super) struct Fleets<M> {
    pub(super) orgs: Vec<Enrolled>,
    pub(super) dialect: Dialect,
    pub(super) by_family: BTreeMap<Family, Arc<Fleet<M>>>,
    pub(super) make: Box<dyn FnMut(&Org) -> M + Send>,
}

/// Whether an org may join.
pub(crate) type Check = dyn Fn(&Org) -> Result<(), BuildError> + Send + Sync;

/// An org of the pool.
pub(super) struct Enrolled {
    pub(super) org: Org,
    /// Whether it takes no new calls: its members of families to come begin so.
    pub(super) closed: bool,
}

impl<M> Table<M> {
    pub(crate) fn new(
        orgs: &Orgs,
        max_unbound: usize,
        make: Box<dyn FnMut(&Org) -> M + Send>,
        check: Arc<Check>,
    ) -> Self {
        let dialect = orgs.dialect();
        // They may have left another pool.
        orgs.iter().for_each(|org| org.write_membership(Membership::In));
        let orgs = orgs.iter().map(|org| Enrolled { org: org.clone(), closed: false }).collect();
        Table {
            check,
            fleets: Mutex::new(Fleets { orgs, dialect, by_family: BTreeMap::new(), make }),
            ages: AtomicU64::new(0),
            unbound: Arc::new(Unbound { max: max_unbound, calls: AtomicUsize::new(0), queue: Queue::default() }),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Fleets<M>> {
        // A panic of the user's `make` leaves the map as it was.
        self.fleets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fleet(&self, family: &Family) -> Arc<Fleet<M>> {
        let mut fleets = self.lock();
        if let Some(fleet) = fleets.by_family.get(family) {
            return fleet.clone();
        }
        let shared = Family::default();
        let family = if fleets.by_family.len() < FAMILIES_MAX { family } else { &shared };
        if let Some(fleet) = fleets.by_family.get(family) {
            return fleet.clone();
        }
        let Fleets { orgs, make, .. } = &mut *fleets;
        let fleet = Roster::fleet(|queue| {
            let member = |enrolled: &Enrolled| {
                let org = enrolled.org.family(family);
                let own = make(&org);
                Member::new(org, own, queue, enrolled.closed)
            };
            orgs.iter().map(member).collect()
        });
        fleets.by_family.insert(family.clone(), fleet.clone());
        fleet
    }

    /// The next age: lower is older.
    pub(crate) fn age(&self) -> u64 {
        self.ages.fetch_add(1, Relaxed)
    }
}

/// Calls made and not yet bound to an org, and those who wait until there are fewer.
pub(crate) struct Unbound {
    max: usize,
    calls: AtomicUsize,
    queue: Queue,
}

impl Unbound {
    pub(crate) fn poll_ready(self: &Arc<Self>, cx: &mut Context<'_>, place: &mut GatePlace) -> Poll<()> {
        if self.has_room() {
            place.leave();
            return Poll::Ready(());
        }
        if place.ticket.is_none() {
            place.unbound = Some(self.clone());
        }
        self.queue.wait(&mut place.ticket, 0, cx.waker());
        // Once more, now that whoever makes room would see us.
        if self.has_room() {
            place.leave();
            return Poll::Ready(());
        }
        Poll::Pending
    }

    fn has_room(&self) -> bool {
        self.calls.load(SeqCst) < self.max
    }

    pub(crate) fn count(self: &Arc<Self>) -> Counted {
        self.calls.fetch_add(1, SeqCst);
        Counted(self.clone())
    }
}

/// One unbound call. Dropped when it is bound, or given up.
pub(crate) struct Counted(Arc<Unbound>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, SeqCst);
        self.0.queue.call(1);
    }
}

/// A place among those who wait to call.
#[derive(Default)]
pub(crate) struct GatePlace {
    unbound: Option<Arc<Unbound>>,
    ticket: Option<Ticket>,
}

impl GatePlace {
    fn leave(&mut self) {
        if let (Some(unbound), Some(ticket)) = (self.unbound.take(), self.ticket.take()) {
            let was_called = unbound.queue.leave(ticket);
            // Nothing is reserved by being ready, so whoever leaves passes the call on while there is room.
            if was_called && unbound.has_room() {
                unbound.queue.call(0);
            }
        }
    }
}

impl Drop for GatePlace {
    fn drop(&mut self) {
        self.leave();
    }
}
