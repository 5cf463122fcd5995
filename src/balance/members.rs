//! Who is a member while the balancer runs: orgs join, go, are disabled and drained.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{
    fleet::Fleet,
    member::Member,
    table::{Enrolled, Fleets, Table},
};
use crate::org::{BuildError, Drained, Family, Membership, Org, Snapshot, Spare};

/// A handle to a running balancer's pool: reads it, and changes who is a member and who takes calls. Cheap to clone; got
/// from [`OrgBalance::members`](super::OrgBalance::members), and it keeps the pool alive.
///
/// | | new calls | calls in flight | back by |
/// |---|---|---|---|
/// | [`disable`](Members::disable) | none; those that wait go to siblings | end as they would have | [`enable`](Members::enable) |
/// | [`drain`](Members::drain) | the same | the same, and its future says when the last has ended | [`enable`](Members::enable) |
/// | [`remove`](Members::remove) | the same | the same | [`add`](Members::add) |
///
/// When a method returns, it holds: whoever waits and can go on has been woken, and no call is given to an org that was
/// disabled or removed. A call that was given to it before goes on, also where its stack still waits below the balancer.
///
/// Of several keys of one organisation one serves, and the others are [spares](super#spares): whichever of these is enabled or
/// added takes no calls while another serves, and takes over when that one is disabled or removed.
///
/// A pool whose orgs are all disabled *waits*, since they can be enabled again. A pool that has none left, because all were
/// removed or are out, *fails* every call with [`NoOrgLeft`](super::NoOrgLeft), and those that wait too.
///
/// Where one org is in two balancers, each has its own word on it: the board shows the last one, and a drain waits for the
/// calls of both.
///
/// An org that joins or goes changes no bound that was set when the stack was built, such as that of a driver
/// ([`Stack::live_bound`](crate::stack::Stack::live_bound)).
#[derive(Clone)]
pub struct Members(Arc<dyn Pool>);

/// What the handle needs of a table, whatever its members are.
trait Pool: Send + Sync {
    fn add(&self, org: Org) -> Result<(), MemberError>;
    fn remove(&self, name: &str) -> Result<Org, MemberError>;
    fn set(&self, name: &str, membership: Membership) -> Result<Org, MemberError>;
    fn orgs(&self) -> Vec<Org>;
    fn waiting(&self) -> BTreeMap<Family, usize>;
}

impl Members {
    pub(super) fn of<M: Clone + Send + 'static>(table: Arc<Table<M>>) -> Self {
        Members(table)
    }

    /// Adds an org. It becomes a member of every model family that was asked for so far, and of those to come; calls that
    /// wait are woken and may go to it at once.
    ///
    /// # Errors
    /// If a member has this name, if the org cannot be called (another dialect, a cap of 0, or what the balancer was told
    /// to [check](super::OrgBalanceLayer::check); in the stack: its base URL and credential), or if it was a member before
    /// and has calls in flight. Then nothing has changed.
    ///
    /// # Panics
    /// If the function that makes members does; then nothing has changed either.
    pub fn add(&self, org: Org) -> Result<(), MemberError> {
        self.0.add(org)
    }

    /// Takes the org of this name out for good, and gives its handle. Its calls in flight end as they would have; what its
    /// members had reserved and waited for is dropped. Its board stays readable.
    ///
    /// # Errors
    /// If no member has this name.
    pub fn remove(&self, name: &str) -> Result<Org, MemberError> {
        self.0.remove(name)
    }

    /// Gives the org of this name no new calls, until it is [enabled](Members::enable). What it has in flight ends as it
    /// would have. Disabled twice is disabled.
    ///
    /// # Errors
    /// If no member has this name.
    pub fn disable(&self, name: &str) -> Result<(), MemberError> {
        self.0.set(name, Membership::Closed).map(drop)
    }

    /// Gives the org of this name calls again, and wakes those that wait; but if another member serves its quota meanwhile, it
    /// is that one's [spare](super#spares). An org that was out (its key was refused, its
    /// credit used up) is brought back as well, as by [`Org::bring_back`].
    ///
    /// # Errors
    /// If no member has this name.
    pub fn enable(&self, name: &str) -> Result<(), MemberError> {
        self.0.set(name, Membership::In).map(drop)
    }

    /// [Disables](Members::disable) the org of this name, now, and gives a future that resolves when nothing of it is in
    /// flight. The org stays disabled, whether the future is awaited or dropped.
    ///
    /// # Errors
    /// If no member has this name.
    pub fn drain(&self, name: &str) -> Result<Drained, MemberError> {
        Ok(self.0.set(name, Membership::Closed)?.drained())
    }

    /// The members, in the order in which they joined: the handles as they were given. [`Org::family`] gives those of other
    /// families.
    #[must_use]
    pub fn orgs(&self) -> Vec<Org> {
        self.0.orgs()
    }

    /// The member of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Org> {
        self.orgs().into_iter().find(|org| org.name() == name)
    }

    /// The model families that were asked for so far, each with how many calls wait for an org.
    #[must_use]
    pub fn waiting(&self) -> BTreeMap<Family, usize> {
        self.0.waiting()
    }

    /// What the boards say now, of each member and each model family that was asked for so far: none before the first call
    /// ([`orgs`](Self::orgs) names the members from the start).
    #[must_use]
    pub fn snapshots(&self) -> Vec<Snapshot> {
        let families = self.waiting();
        let of_org = |org: Org| families.keys().map(|family| org.family(family).snapshot()).collect::<Vec<_>>();
        self.orgs().into_iter().flat_map(of_org).collect()
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.orgs().iter().map(|org| (org.name().to_owned(), org.standing()))).finish()
    }
}

/// Why the pool was not changed.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberError {
    /// No member has this name.
    Unknown {
        /// The name.
        name: Arc<str>,
        /// The names there are.
        known: Vec<Arc<str>>,
    },
    /// A member has this name already.
    Twice {
        /// The name.
        name: Arc<str>,
    },
    /// This very org was a member before, and calls of it are still in flight, which its board counts. Wait until it is
    /// drained, or add a new org of the same name.
    Busy {
        /// The name.
        name: Arc<str>,
    },
    /// The org cannot be called.
    Refused(BuildError),
}

impl fmt::Display for MemberError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemberError::Unknown { name, known } if known.is_empty() => write!(f, "no org {name:?}: there is none"),
            MemberError::Unknown { name, known } => write!(f, "no org {name:?}; there are: {}", known.join(", ")),
            MemberError::Twice { name } => write!(f, "an org {name:?} is there already"),
            MemberError::Busy { name } => write!(f, "the org {name:?} has calls in flight from before it was removed"),
            MemberError::Refused(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for MemberError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            MemberError::Refused(error) => Some(error),
            _ => None,
        }
    }
}

impl From<BuildError> for MemberError {
    fn from(error: BuildError) -> Self {
        MemberError::Refused(error)
    }
}

impl<M> Fleets<M> {
    fn find(&self, name: &str) -> Result<usize, MemberError> {
        self.orgs.iter().position(|enrolled| enrolled.org.name() == name).ok_or_else(|| MemberError::Unknown {
            name: Arc::from(name),
            known: self.orgs.iter().map(|enrolled| enrolled.org.shared_name()).collect(),
        })
    }

    /// Puts another fleet in the place of each family's. Gives the old ones, for dropping under no lock.
    fn change(&mut self, mut change: impl FnMut(&Family, &mut Vec<Arc<Member<M>>>)) -> Vec<Arc<Fleet<M>>> {
        let change = |(family, fleet): (&Family, &mut Arc<Fleet<M>>)| {
            let new = fleet.roster().change(|members| change(family, members));
            std::mem::replace(fleet, new)
        };
        self.by_family.iter_mut().map(change).collect()
    }

    fn fleets(&self) -> Vec<Arc<Fleet<M>>> {
        self.by_family.values().cloned().collect()
    }
}

/// Under the table's lock it is decided what is, and noted; what is dropped and who is woken comes after it.
impl<M: Clone + Send + 'static> Pool for Table<M> {
    fn add(&self, org: Org) -> Result<(), MemberError> {
        (self.check)(&org)?;
        let (moves, fleets, _old) = self.with(|table| -> Result<_, MemberError> {
            if table.find(org.name()).is_ok() {
                return Err(MemberError::Twice { name: org.shared_name() });
            }
            org.may_join(table.dialect)?;
            if !org.is_idle() {
                return Err(MemberError::Busy { name: org.shared_name() });
            }
            // All are made before any is a member.
            let Fleets { by_family, make, .. } = table;
            let member = |(family, fleet): (&Family, &Arc<Fleet<M>>)| {
                let org = org.family(family);
                let own = make(&org);
                (family.clone(), Member::new(org, own, &fleet.roster().queue))
            };
            let mut new: BTreeMap<_, _> = by_family.iter().map(member).collect();
            let old = table.change(|family, members| members.extend(new.remove(family)));
            table.orgs.push(Enrolled::new(&org));
            self.crier.iter().for_each(|crier| org.watch_identity(crier));
            Ok((table.review(), table.fleets(), old))
        })?;
        tracing::info!(org = org.name(), "org joins the pool");
        moves.finish();
        fleets.iter().for_each(|fleet| fleet.tell());
        org.tell_idle();
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<Org, MemberError> {
        let mut gone = Vec::new();
        let (org, moves, fleets, _old) = self.with(|table| -> Result<_, MemberError> {
            let at = table.find(name)?;
            let org = table.orgs.remove(at).org;
            let old = table.change(|_, members| {
                let at = members.iter().position(|member| member.org.name() == name);
                gone.extend(at.map(|at| members.remove(at)));
            });
            gone.iter().for_each(|member| member.set(Membership::Gone));
            org.write_membership(Membership::Gone);
            org.write_spare(Spare::default());
            self.crier.iter().for_each(|crier| org.unwatch_identity(crier));
            Ok((org, table.review(), table.fleets(), old))
        })?;
        tracing::info!(org = org.name(), "org leaves the pool");
        gone.iter().for_each(|member| member.settle());
        moves.finish();
        fleets.iter().for_each(|fleet| fleet.tell());
        org.tell_idle();
        Ok(org)
    }

    fn set(&self, name: &str, membership: Membership) -> Result<Org, MemberError> {
        let (org, moves, fleets, members) = self.with(|table| -> Result<_, MemberError> {
            let at = table.find(name)?;
            let enrolled = &mut table.orgs[at];
            enrolled.closed = membership == Membership::Closed;
            let org = enrolled.org.clone();
            org.write_membership(membership);
            let of_org = table.by_family.values().map(|fleet| fleet.members()[at].clone());
            let members: Vec<_> = of_org.collect();
            Ok((org, table.review(), table.fleets(), members))
        })?;
        tracing::info!(org = org.name(), standing = %org.standing(), "org changes its standing");
        if membership == Membership::In {
            org.bring_back();
        }
        moves.finish();
        // Also those that stay as they were: whoever says it again means that it be looked at again.
        members.iter().for_each(|member| member.settle());
        fleets.iter().for_each(|fleet| fleet.tell());
        org.tell_idle();
        Ok(org)
    }

    fn orgs(&self) -> Vec<Org> {
        self.with(|table| table.orgs.iter().map(|enrolled| enrolled.org.clone()).collect())
    }

    fn waiting(&self) -> BTreeMap<Family, usize> {
        let waiting = |(family, fleet): (&Family, &Arc<Fleet<M>>)| (family.clone(), fleet.roster().queue.len());
        self.with(|table| table.by_family.iter().map(waiting).collect())
    }
}
