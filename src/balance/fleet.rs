//! The members of one model family, and the line of calls that wait for one of them.

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use tower_service::Service;

use super::{
    member::{Asked, Member},
    pick::pick,
    queue::Queue,
};
use crate::{
    line::Ticket,
    org::{Org, OutReason},
};

pub(crate) struct Fleet<M> {
    members: Vec<Member<M>>,
    queue: Arc<Queue>,
}

/// How a call's search for a member ended.
pub(crate) enum Bound<F, E> {
    Called(F, Org),
    Failed(E, Org),
    NoneLeft(NoOrgLeft),
}

impl<M> Fleet<M> {
    pub(crate) fn new(members: impl IntoIterator<Item = (Org, M)>) -> Self {
        let queue = Arc::new(Queue::default());
        Fleet { members: members.into_iter().map(|(org, own)| Member::new(org, own, &queue)).collect(), queue }
    }

    /// Whether a waiter has reason to look: somebody may be ready, or nobody ever will be.
    fn has_news(&self) -> bool {
        self.members.iter().any(Member::is_open) || self.none_left()
    }

    fn none_left(&self) -> bool {
        self.members.iter().all(|member| member.org.is_out())
    }

    /// Gives the request to a ready member, or gives it back.
    fn ask<Req>(&self, mut request: Req) -> Result<Bound<M::Future, M::Error>, Req>
    where
        M: Service<Req> + Clone,
    {
        let mut open = Open::of(&self.members);
        while let Some(picked) = pick(open.as_slice(), |i| self.members[i].org.load()) {
            let member = &self.members[picked];
            match member.ask(request) {
                Asked::Called(future) => return Ok(Bound::Called(future, member.org.clone())),
                Asked::Failed(error) => return Ok(Bound::Failed(error, member.org.clone())),
                Asked::Pending(back) => {
                    request = back;
                    open.remove(picked);
                }
            }
        }
        Err(request)
    }

    /// Binds the request in `slot` to a member, or waits in line for one.
    pub(crate) fn poll_bind<Req>(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        place: &mut Place<M>,
        slot: &mut Option<Req>,
    ) -> Poll<Bound<M::Future, M::Error>>
    where
        M: Service<Req> + Clone,
    {
        // Twice: once as one comes, once more when written into the line, so that no bell rings unheard between.
        for _ in 0..2 {
            if self.none_left() {
                // Whoever's turn it is.
                place.give_up(self);
                return Poll::Ready(Bound::NoneLeft(NoOrgLeft::of(self.members.iter().map(|member| &member.org))));
            }
            if self.queue.may_try(place.ticket) {
                let request = slot.take().expect("a call is polled for a member only until it has one");
                match self.ask(request) {
                    Ok(bound) => {
                        self.bound(place, &bound);
                        return Poll::Ready(bound);
                    }
                    Err(back) => *slot = Some(back),
                }
            }
            self.queue.wait(&mut place.ticket, place.age, cx.waker());
            if !self.has_news() {
                return Poll::Pending;
            }
        }
        // Somebody is open and it is another's turn, who may have been called and not come: the call is passed on.
        self.queue.call(1);
        Poll::Pending
    }

    /// A call has its member, or its failure.
    fn bound<Req>(&self, place: &mut Place<M>, bound: &Bound<M::Future, M::Error>)
    where
        M: Service<Req> + Clone,
    {
        let was_last = match place.ticket.take() {
            Some(ticket) => self.queue.leave(ticket).1,
            // Served at once: the members asked in vain on the way wait for nobody.
            None => self.queue.is_empty(),
        };
        if let (false, Bound::Called(_, org)) = (was_last, bound) {
            if let Some(member) = self.members.iter().find(|member| member.org.same_board(org)) {
                member.enlist();
            }
        }
        self.left(was_last);
    }

    /// Whoever leaves calls the next two while there is something for them; the last one out turns off the lights.
    fn left(&self, was_last: bool)
    where
        M: Clone,
    {
        if was_last {
            for member in &self.members {
                member.stand_down();
            }
        }
        if !self.queue.is_empty() && self.has_news() {
            // One who was not called before: those who were may not come.
            self.queue.call(1);
        }
    }
}

/// The numbers of the members worth asking: on the stack for up to 32, which is more orgs than most people hold.
struct Open {
    few: [usize; 32],
    len: usize,
    many: Vec<usize>,
}

impl Open {
    fn of<M>(members: &[Member<M>]) -> Self {
        let mut open = Open { few: [0; 32], len: 0, many: Vec::new() };
        let numbers = members.iter().enumerate().filter(|(_, member)| member.is_open()).map(|(i, _)| i);
        if members.len() > open.few.len() {
            open.many = numbers.collect();
            return open;
        }
        for i in numbers {
            open.few[open.len] = i;
            open.len += 1;
        }
        open
    }

    fn as_slice(&self) -> &[usize] {
        if self.many.is_empty() { &self.few[..self.len] } else { &self.many }
    }

    fn remove(&mut self, member: usize) {
        self.many.retain(|i| *i != member);
        if let Some(at) = self.few[..self.len].iter().position(|i| *i == member) {
            self.len -= 1;
            self.few.swap(at, self.len);
        }
    }
}

/// A place in the line of a fleet.
pub(crate) struct Place<M> {
    ticket: Option<Ticket>,
    age: u64,
    // Only the pointer's type is needed; the fleet is passed in.
    fleet: std::marker::PhantomData<fn() -> M>,
}

impl<M> Place<M> {
    pub(crate) fn new(age: u64) -> Self {
        Place { ticket: None, age, fleet: std::marker::PhantomData }
    }

    /// Gives the place up, if it has one, and calls whoever is next.
    pub(crate) fn give_up(&mut self, fleet: &Fleet<M>)
    where
        M: Clone,
    {
        if let Some(ticket) = self.ticket.take() {
            let (_, was_last) = fleet.queue.leave(ticket);
            fleet.left(was_last);
        }
    }
}

/// No org is left to ask: all are out, and none comes back by itself. The source of an error of class
/// [`NoOrg`](crate::outcome::Class::NoOrg).
#[derive(Clone, Debug)]
pub struct NoOrgLeft {
    orgs: Vec<(Arc<str>, Option<OutReason>)>,
}

impl NoOrgLeft {
    fn of<'a>(orgs: impl Iterator<Item = &'a Org>) -> Self {
        NoOrgLeft { orgs: orgs.map(|org| (org.shared_name(), org.out_reason())).collect() }
    }

    /// Each org's name, and why it is out.
    pub fn reasons(&self) -> impl Iterator<Item = (&str, &OutReason)> {
        self.orgs.iter().filter_map(|(name, reason)| Some((&**name, reason.as_ref()?)))
    }
}

impl fmt::Display for NoOrgLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no org is left to ask:")?;
        for (i, (name, reason)) in self.reasons().enumerate() {
            write!(f, "{} {name}: {reason}", if i == 0 { "" } else { ";" })?;
        }
        Ok(())
    }
}

impl std::error::Error for NoOrgLeft {}
