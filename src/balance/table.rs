//! What all clones of a balancer share: the fleets by family, made when first asked for, and the count of unbound calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::{Context, Poll, Waker},
};

use super::{
    fleet::Fleet,
    member::Member,
    queue::Queue,
    roster::Roster,
    spares::{Moves, crier},
};
use crate::{
    line::Ticket,
    org::{BuildError, Dialect, Family, Membership, Org, Orgs, Spare},
};

/// More families than this share [`Family::default`]: a list of models is short, and a mistake must not eat memory.
const FAMILIES_MAX: usize = 64;

pub(crate) struct Table<M> {
    /// What an org is asked before it joins.
    pub(super) check: Arc<Check>,
    pub(super) fleets: Mutex<Fleets<M>>,
    /// An org has said something that nobody has looked at yet.
    pub(super) news: AtomicBool,
    /// What the orgs wake; None where spares are not looked for.
    pub(super) crier: Option<Waker>,
    ages: AtomicU64,
    pub(crate) unbound: Arc<Unbound>,
}

pub(super) struct Fleets<M> {
    pub(super) orgs: Vec<Enrolled>,
    /// Whether a second key of an organisation is a spare.
    pub(super) spares: bool,
    /// Of the next organisation id that is learnt.
    pub(super) ranks: u64,
    pub(super) dialect: Dialect,
    pub(super) by_family: BTreeMap<Family, Arc<Fleet<M>>>,
    pub(super) make: Box<dyn FnMut(&Org) -> M + Send>,
}

/// Whether an org may join.
pub(crate) type Check = dyn Fn(&Org) -> Result<(), BuildError> + Send + Sync;

/// An org of the pool.
pub(super) struct Enrolled {
    pub(super) org: Org,
    /// Whether somebody has disabled it.
    pub(super) closed: bool,
    /// The organisation id, as it was last looked at, and whose was known first.
    pub(super) id: Option<Arc<str>>,
    pub(super) rank: u64,
    /// What its board says of that.
    pub(super) spare: Spare,
    /// The id for which the log has it that it is a spare.
    pub(super) said: Option<Arc<str>>,
}

impl Enrolled {
    /// A member from now on. It may have left another pool.
    pub(super) fn new(org: &Org) -> Self {
        org.write_membership(Membership::In);
        org.write_spare(Spare::default());
        Enrolled { org: org.clone(), closed: false, id: None, rank: 0, spare: Spare::default(), said: None }
    }
}

impl<M> Table<M> {
    pub(crate) fn new(
        orgs: &Orgs,
        max_unbound: usize,
        spares: bool,
        make: Box<dyn FnMut(&Org) -> M + Send>,
        check: Arc<Check>,
    ) -> Arc<Self>
    where
        M: Clone + Send + 'static,
    {
        let dialect = orgs.dialect();
        let orgs: Vec<_> = orgs.iter().map(Enrolled::new).collect();
        Arc::new_cyclic(|table| {
            let crier = spares.then(|| crier(table.clone()));
            for enrolled in &orgs {
                crier.iter().for_each(|crier| enrolled.org.watch_identity(crier));
            }
            Table {
                check,
                fleets: Mutex::new(Fleets { orgs, spares, ranks: 0, dialect, by_family: BTreeMap::new(), make }),
                news: AtomicBool::new(false),
                crier,
                ages: AtomicU64::new(0),
                unbound: Arc::new(Unbound { max: max_unbound, calls: AtomicUsize::new(0), queue: Queue::default() }),
            }
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Fleets<M>> {
        // A panic of the user's `make` leaves the map as it was.
        self.fleets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fleet(&self, family: &Family) -> Arc<Fleet<M>>
    where
        M: Clone,
    {
        let (fleet, moves) = self.with(|fleets| fleets.fleet(family));
        moves.into_iter().for_each(Moves::finish);
        fleet
    }

    /// The next age: lower is older.
    pub(crate) fn age(&self) -> u64 {
        self.ages.fetch_add(1, Relaxed)
    }
}

impl<M> Drop for Table<M> {
    fn drop(&mut self) {
        for enrolled in &self.lock().orgs {
            self.crier.iter().for_each(|crier| enrolled.org.unwatch_identity(crier));
        }
    }
}

impl<M> Fleets<M> {
    /// The family's fleet; made, if there is none yet, and then there is something to finish.
    fn fleet(&mut self, family: &Family) -> (Arc<Fleet<M>>, Option<Moves<M>>) {
        if let Some(fleet) = self.by_family.get(family) {
            return (fleet.clone(), None);
        }
        let shared = Family::default();
        let family = if self.by_family.len() < FAMILIES_MAX { family } else { &shared };
        if let Some(fleet) = self.by_family.get(family) {
            return (fleet.clone(), None);
        }
        let Fleets { orgs, make, .. } = self;
        let fleet = Roster::fleet(|queue| {
            let member = |enrolled: &Enrolled| {
                let org = enrolled.org.family(family);
                let own = make(&org);
                Member::new(org, own, queue)
            };
            orgs.iter().map(member).collect()
        });
        self.by_family.insert(family.clone(), fleet.clone());
        (fleet, Some(self.review()))
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
        self.queue.wait(&mut place.ticket, 0, &None, cx.waker());
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
