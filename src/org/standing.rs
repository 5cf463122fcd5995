//! Whether an org takes calls at all: out, disabled, draining, gone, and who wants to know when nothing of it is in flight.

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{
            AtomicBool, AtomicU8, AtomicU64,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
    task::{Context, Poll, Waker},
};

use super::{Org, OutReason, lock};
use crate::observe::Event;

/// An org that refuses so many models of a family is asked for none: a list of models is short, and a mistake must not eat memory.
const MODELS_MAX: usize = 64;

/// Whether an org takes new calls, as its pool has it. An org that is out (a refused key, no credit) is so besides:
/// [`Org::out_reason`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It takes calls. So does an org that is in no balancer.
    Enabled,
    /// It takes no new calls for now, since another member of its pool has the same organisation id, so the same quota, and
    /// serves: [`Org::spare_of`]. It takes over when that one is out, disabled or removed. What it had in flight when this was
    /// found out ends as it would have.
    Spare,
    /// It takes no new calls, and some that it took before are in flight, of whichever model family.
    Draining,
    /// It takes no new calls, and nothing of it is in flight.
    Disabled,
    /// It was removed from its pool for good. What it had in flight ends as it would have.
    Removed,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Standing::Enabled => "enabled",
            Standing::Spare => "spare",
            Standing::Draining => "draining",
            Standing::Disabled => "disabled",
            Standing::Removed => "removed",
        })
    }
}

/// What a balancer says of an org.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Membership {
    /// It takes calls.
    In,
    /// It takes none until it is opened again.
    Closed,
    /// It was removed.
    Gone,
}

/// The cell of an identity.
#[derive(Default)]
pub(super) struct Cell {
    /// A [`Membership`].
    membership: AtomicU8,
    /// Whether anybody waits for nothing to be in flight.
    awaited: AtomicBool,
    numbers: AtomicU64,
    waiting: Mutex<Vec<(u64, Waker)>>,
}

impl Cell {
    fn membership(&self) -> Membership {
        let written = self.membership.load(SeqCst);
        let all = [Membership::In, Membership::Closed];
        all.into_iter().find(|one| *one as u8 == written).unwrap_or(Membership::Gone)
    }

    fn wait(&self, number: u64, waker: &Waker) {
        let _dropped_later;
        let mut waiting = lock(&self.waiting);
        match waiting.iter_mut().find(|(other, _)| *other == number) {
            Some((_, old)) if old.will_wake(waker) => {}
            Some((_, old)) => _dropped_later = std::mem::replace(old, waker.clone()),
            None => waiting.push((number, waker.clone())),
        }
        self.awaited.store(true, SeqCst);
    }

    fn leave(&self, number: u64) {
        let mut waiting = lock(&self.waiting);
        let at = waiting.iter().position(|(other, _)| *other == number);
        let _dropped_later = at.map(|at| waiting.swap_remove(at));
        self.awaited.store(!waiting.is_empty(), SeqCst);
        drop(waiting);
    }

    /// Under no lock. Whoever still waits comes back.
    fn wake(&self) {
        let waiting = {
            let mut waiting = lock(&self.waiting);
            self.awaited.store(false, SeqCst);
            std::mem::take(&mut *waiting)
        };
        waiting.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

impl Org {
    /// Whether it takes new calls, as its pool has it. Spare, of a whole org, is who serves no model family.
    #[must_use]
    pub fn standing(&self) -> Standing {
        match self.identity.standing.membership() {
            Membership::In if self.spare_of().is_some() => Standing::Spare,
            Membership::In => Standing::Enabled,
            Membership::Closed if self.is_idle() => Standing::Disabled,
            Membership::Closed => Standing::Draining,
            Membership::Gone => Standing::Removed,
        }
    }

    /// Whether it is out: for this handle's model family, or as a whole. A whole org is out when all its families are, that of
    /// requests that name none included.
    #[must_use]
    pub fn is_out(&self) -> bool {
        // A call writes itself into the line, then looks here; whoever puts the org out says so here, then looks at the line.
        self.board.is_out.load(SeqCst) && (!self.whole || self.boards().iter().all(|board| board.is_out.load(SeqCst)))
    }

    /// Why it is out, if it is.
    #[must_use]
    pub fn out_reason(&self) -> Option<OutReason> {
        if !self.is_out() {
            return None;
        }
        let own = self.board.out();
        own.or_else(|| lock(&self.identity.out).clone())
    }

    /// Takes the org out of the run, for all families: no further call goes to it, and its waiting calls go to siblings.
    /// Says so once in the log, by name.
    pub fn put_out(&self, reason: OutReason) {
        let boards: Vec<_> = {
            let families = lock(&self.identity.families);
            let mut out = lock(&self.identity.out);
            if out.is_some() {
                return;
            }
            *out = Some(reason.clone());
            families.values().inspect(|board| board.mark_out(true)).cloned().collect()
        };
        tracing::warn!(org = self.name(), %reason, "org is out");
        self.tell(&Event::Out { org: self.of_whole(), reason });
        // First whoever may put another in its place.
        self.tell_identity();
        boards.iter().for_each(|board| board.tell_out());
    }

    /// Takes the org out for this model family alone.
    pub fn put_family_out(&self, reason: OutReason) {
        {
            let _families = lock(&self.identity.families);
            if !self.board.put_out(&reason) {
                return;
            }
            self.board.mark_out(true);
        }
        tracing::warn!(org = self.name(), family = self.model_family().as_str(), %reason, "org is out for this model family");
        self.tell(&Event::Out { org: self.family(self.model_family()), reason });
        self.tell_identity();
        self.board.tell_out();
    }

    /// Takes the org out for this one model of this family, by its id in any case: its key is not allowed it. For the others it is
    /// asked as before.
    pub fn put_model_out(&self, model: &str) {
        let model: Arc<str> = Arc::from(model.trim().to_ascii_lowercase());
        let refused = {
            let _families = lock(&self.identity.families);
            self.board.refuse(&model)
        };
        match refused {
            None => return,
            Some(MODELS_MAX) => return self.put_family_out(OutReason::Forbidden),
            Some(_) => {}
        }
        let reason = OutReason::ForbiddenModel(model);
        tracing::warn!(org = self.name(), family = self.model_family().as_str(), %reason, "org is out for this model");
        self.tell(&Event::Out { org: self.family(self.model_family()), reason });
        self.tell_identity();
        self.board.tell_out();
    }

    /// The models that it is [out](Org::put_model_out) for, in the order in which it refused them, in lower case. Of a whole org those of
    /// all families.
    #[must_use]
    pub fn refused_models(&self) -> Vec<Arc<str>> {
        match self.whole {
            false => self.board.refused(),
            true => self.boards().iter().flat_map(|board| board.refused()).collect(),
        }
    }

    /// Whether it is out for this model, whose id is in lower case, of this handle's family; of a whole org, of any.
    pub(crate) fn refuses(&self, model: Option<&str>) -> bool {
        model.is_some_and(|model| match self.whole {
            false => self.board.refuses(model),
            true => self.boards().iter().any(|board| board.refuses(model)),
        })
    }

    /// Whether it is out for any model of this handle's family; of a whole org, of any.
    pub(crate) fn refuses_any(&self) -> bool {
        match self.whole {
            false => self.board.refuses_any(),
            true => self.boards().iter().any(|board| board.refuses_any()),
        }
    }

    /// Brings it back, for all families and models, if it was out: its key works again, or there is credit. Calls that wait look at it
    /// at once. If it is still refused, the first answer puts it out again. True if it was out for anything.
    pub fn bring_back(&self) -> bool {
        let boards: Vec<_> = {
            let families = lock(&self.identity.families);
            let all = lock(&self.identity.out).take().is_some();
            // Of each both are taken.
            let back = families.values().filter(|board| board.take_out() | board.allow_all() | all);
            back.inspect(|board| board.mark_out(false)).cloned().collect()
        };
        if boards.is_empty() {
            return false;
        }
        tracing::info!(org = self.name(), "org is brought back");
        self.tell(&Event::Back { org: self.of_whole() });
        self.tell_identity();
        boards.iter().for_each(|board| board.tell_out());
        true
    }

    /// Whether nothing is in flight, of any family.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.identity.families).values().all(|board| board.is_idle())
    }

    /// Whether somebody runs the pool without it.
    pub(super) fn is_closed(&self) -> bool {
        self.identity.standing.membership() != Membership::In
    }

    /// What the balancer makes of it. Afterwards whoever waits for it to be drained is to be told.
    pub(crate) fn write_membership(&self, membership: Membership) {
        self.identity.standing.membership.store(membership as u8, SeqCst);
    }

    /// A count has reached zero: true if somebody waits for that, who is to be told by [`tell_idle`](Org::tell_idle), under
    /// no lock.
    pub(super) fn idle_is_awaited(&self) -> bool {
        self.identity.standing.awaited.load(SeqCst)
    }

    /// Whoever waits for it to be drained looks again.
    pub(crate) fn tell_idle(&self) {
        self.identity.standing.wake();
    }

    /// Resolves when nothing of it is in flight.
    pub(crate) fn drained(&self) -> Drained {
        let number = self.identity.standing.numbers.fetch_add(1, Relaxed);
        Drained { org: self.clone(), number }
    }
}

/// Resolves when nothing of an org is in flight any more, in any model family: no call that has been given to it and not
/// answered, and no body that still keeps its slot. Made by
/// [`Members::drain`](crate::balance::Members::drain), which has stopped new calls by then; the future only watches.
///
/// It is woken by the event: the last call that ends or is dropped. It spawns nothing and needs no runtime.
///
/// **Cancel safety:** dropped, it leaves nothing, and the org stays disabled.
#[must_use = "it tells nothing unless it is awaited"]
pub struct Drained {
    org: Org,
    number: u64,
}

impl Drained {
    /// The org that is drained.
    #[must_use]
    pub fn org(&self) -> &Org {
        &self.org
    }
}

impl Future for Drained {
    type Output = Result<(), EnabledAgain>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let cell = &self.org.identity.standing;
        cell.wait(self.number, cx.waker());
        // The limiter's count is stored without one.
        fence(SeqCst);
        let result = match cell.membership() {
            Membership::In => Err(EnabledAgain),
            _ if self.org.is_idle() => Ok(()),
            _ => return Poll::Pending,
        };
        cell.leave(self.number);
        Poll::Ready(result)
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        self.org.identity.standing.leave(self.number);
    }
}

impl fmt::Debug for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drained").field("org", &self.org).finish_non_exhaustive()
    }
}

/// An org was enabled again before it was drained, and takes new calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnabledAgain;

impl fmt::Display for EnabledAgain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the org was enabled again before it was drained")
    }
}

impl std::error::Error for EnabledAgain {}
