//! Keeps the members to their [roles](super::roles): looked at when somebody joins, goes, is disabled or enabled, and when
//! an org says that its organisation id was learnt, or that it is out or back. No call looks at any of this: a spare is a
//! member that is closed.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError, TryLockError, Weak, atomic::Ordering::SeqCst},
    task::{Wake, Waker},
};

use super::{
    fleet::Fleet,
    member::Member,
    roles::{Key, Role, roles},
    table::{Enrolled, Fleets, Table},
};
use crate::org::{Family, Membership, Spare};

/// Woken by the orgs of a table. It knows the table weakly, for their boards may outlive it.
struct Crier<M>(Weak<Table<M>>);

impl<M: Clone + Send + 'static> Wake for Crier<M> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(table) = self.0.upgrade() {
            table.news.store(true, SeqCst);
            table.catch_up();
        }
    }
}

pub(super) fn crier<M: Clone + Send + 'static>(table: Weak<Table<M>>) -> Waker {
    Waker::from(Arc::new(Crier(table)))
}

/// What has changed, and is to be [finished](Moves::finish) under no lock.
#[must_use = "whoever waits is to be told"]
pub(super) struct Moves<M> {
    members: Vec<Arc<Member<M>>>,
    fleets: Vec<Arc<Fleet<M>>>,
    said: Vec<Said>,
}

enum Said {
    Parked { org: Arc<str>, serves: Arc<str> },
    TakesOver { org: Arc<str>, parked_for: Arc<str> },
}

impl<M: Clone> Moves<M> {
    /// Whoever takes no calls any more keeps no reservation; whoever does rings, and those who wait look at it.
    pub(super) fn finish(self) {
        for said in self.said {
            match said {
                Said::Parked { org, serves } => tracing::warn!(
                    %org,
                    %serves,
                    "two keys of one organisation share one quota: one serves, the other is a spare"
                ),
                Said::TakesOver { org, parked_for } => tracing::warn!(%org, %parked_for, "the spare takes over"),
            }
        }
        self.members.iter().for_each(|member| member.settle());
        self.fleets.iter().for_each(|fleet| fleet.tell());
    }
}

/// Sees to it when the lock has been released, also by a panic of the user's.
struct CatchUp<'a, M: Clone>(&'a Table<M>);

impl<M: Clone> Drop for CatchUp<'_, M> {
    fn drop(&mut self) {
        self.0.catch_up();
    }
}

impl<M> Table<M> {
    /// Works under the lock; then sees to what the orgs have said meanwhile.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut Fleets<M>) -> T) -> T
    where
        M: Clone,
    {
        let _after = CatchUp(self);
        let mut fleets = self.lock();
        work(&mut fleets)
    }

    /// Sees to what the orgs have said. Whoever has the lock does so once it is released, so nobody waits for it here: an org
    /// may be put out from within the function that makes members, which runs under it.
    fn catch_up(&self)
    where
        M: Clone,
    {
        while self.news.load(SeqCst) {
            let moves = {
                let mut fleets = match self.fleets.try_lock() {
                    Ok(fleets) => fleets,
                    Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
                    Err(TryLockError::WouldBlock) => return,
                };
                // Before it is looked, so that whatever is said meanwhile is looked at again.
                self.news.store(false, SeqCst);
                fleets.review()
            };
            moves.finish();
        }
    }
}

impl<M> Fleets<M> {
    /// Gives every member its role. In every family by itself, for a key may be refused for one alone.
    pub(super) fn review(&mut self) -> Moves<M> {
        self.learn_ids();
        let mut spares = vec![Spare::default(); self.orgs.len()];
        let mut moves = Moves { members: vec![], fleets: vec![], said: vec![] };
        let (mut opened, mut take_over) = (vec![], BTreeSet::new());
        for (family, fleet) in &self.by_family {
            // Members stand in the order of the orgs.
            let members = fleet.members();
            let keys: Vec<_> = self.orgs.iter().zip(members).map(|(org, member)| org.key(member)).collect();
            let before = (opened.len(), moves.members.len());
            for (at, role) in roles(&keys).into_iter().enumerate() {
                if let Role::SpareOf(first) = role {
                    spares[at].of.insert(family.clone(), self.orgs[first].org.shared_name());
                }
                match (role == Role::Serves, keys[at].serves) {
                    (true, false) => {
                        opened.push(members[at].clone());
                        take_over.extend(self.orgs[at].parked_for(family).map(|parked_for| (at, parked_for)));
                    }
                    (false, true) => moves.members.push(members[at].clone()),
                    _ => {}
                }
            }
            if before != (opened.len(), moves.members.len()) {
                moves.fleets.push(fleet.clone());
            }
        }
        // No two serve even now.
        moves.members.iter().for_each(|member| member.set(Membership::Closed));
        opened.iter().for_each(|member| member.set(Membership::In));
        moves.members.append(&mut opened);
        for (at, (enrolled, mut spare)) in self.orgs.iter_mut().zip(spares).enumerate() {
            spare.everywhere = spare.of.len() == self.by_family.len();
            moves.said.extend(enrolled.becomes(spare));
            let parked_for = take_over.iter().find(|(other, _)| *other == at).map(|(_, parked_for)| parked_for.clone());
            let org = enrolled.org.shared_name();
            moves.said.extend(parked_for.map(|parked_for| Said::TakesOver { org, parked_for }));
        }
        moves
    }

    /// Whose id was known first.
    fn learn_ids(&mut self) {
        if !self.spares {
            return;
        }
        for enrolled in &mut self.orgs {
            let id = enrolled.org.organisation();
            if enrolled.id != id {
                enrolled.id = id;
                enrolled.rank = self.ranks;
                self.ranks += 1;
            }
        }
    }
}

impl Enrolled {
    fn key<M>(&self, member: &Member<M>) -> Key<'_> {
        Key {
            id: self.id.as_deref(),
            rank: self.rank,
            closed: self.closed,
            out: member.org.is_out(),
            refused: member.org.refused_models(),
            serves: member.takes_calls(),
        }
    }

    /// In whose place it takes calls now. One whose own id has changed takes nobody's.
    fn parked_for(&self, family: &Family) -> Option<Arc<str>> {
        self.spare.of.get(family).filter(|_| self.id == self.said).cloned()
    }

    /// Notes it on the board. It is said once of an org and an id.
    fn becomes(&mut self, spare: Spare) -> Option<Said> {
        if self.spare == spare {
            return None;
        }
        self.spare = spare;
        self.org.write_spare(self.spare.clone());
        let serves = self.spare.of.values().next()?.clone();
        if self.said == self.id {
            return None;
        }
        self.said = self.id.clone();
        Some(Said::Parked { org: self.org.shared_name(), serves })
    }
}
