//! The members of one model family, and the line of calls that wait for one of them.

use std::{
    cell::LazyCell,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll},
};

use tokio::time::Instant;
use tower_service::Service;

use super::{
    member::{Asked, Member, Seat},
    pick::{Ranked, Tier, pick, pick_well},
    queue::{Model, Queue},
    roster::Roster,
};
use crate::{
    call::CallMemory,
    line::Ticket,
    org::{Org, OutReason},
};

pub(crate) struct Fleet<M> {
    members: Vec<Arc<Member<M>>>,
    queue: Arc<Queue>,
    /// Members have joined or gone: the roster knows the fleet as it is now.
    stale: AtomicBool,
    roster: Arc<Roster<M>>,
}

/// How a call's search for a member ended.
pub(crate) enum Bound<M, F, E> {
    Called(F, Seat<M>),
    Failed(E, Org),
    NoneLeft(NoOrgLeft),
}

impl<M> Fleet<M> {
    /// Made by the roster alone.
    pub(super) fn new(roster: &Arc<Roster<M>>, members: Vec<Arc<Member<M>>>) -> Self {
        Fleet { members, queue: roster.queue.clone(), stale: AtomicBool::new(false), roster: roster.clone() }
    }

    pub(crate) fn members(&self) -> &[Arc<Member<M>>] {
        &self.members
    }

    pub(crate) fn roster(&self) -> &Arc<Roster<M>> {
        &self.roster
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.stale.load(SeqCst)
    }

    pub(super) fn mark_stale(&self) {
        self.stale.store(true, SeqCst);
    }

    /// Takes the fleet as it is now.
    pub(crate) fn refresh(self: &mut Arc<Self>) {
        if self.is_stale() {
            *self = self.roster.latest();
        }
    }

    /// Whether somebody who waits has reason to look: a member may be ready, or none ever will be.
    fn has_news(&self) -> bool {
        self.members.iter().any(|member| member.is_open()) || self.none_left()
    }

    /// Whether nobody is left, or all who are will not come back by themselves. Whoever is disabled can be enabled again.
    pub(crate) fn none_left(&self) -> bool {
        self.members.iter().all(|member| member.org.is_out())
    }

    /// The same for whoever waits for this model.
    fn has_news_for(&self, model: Option<&str>) -> bool {
        self.members.iter().any(|member| member.is_open() && member.allows(model)) || self.none_left_for(model)
    }

    /// Whether nobody is left who may be asked for this model.
    fn none_left_for(&self, model: Option<&str>) -> bool {
        self.members.iter().all(|member| member.org.is_out() || !member.allows(model))
    }

    fn refuses_any(&self) -> bool {
        self.members.iter().any(|member| member.org.refuses_any())
    }

    /// After a change of who takes calls, by somebody who is not in line: calls whoever has reason to look.
    pub(crate) fn tell(&self) {
        // Where some refuse a model, whoever has gone may have been the last who does not.
        if self.none_left() || self.refuses_any() {
            self.queue.call(usize::MAX);
        } else if self.has_news() {
            self.queue.call(1);
        }
    }

    /// Somebody may be ready: calls who is next of those who may have them, and was not called before; those who were may not come.
    fn call_next(&self) {
        if !self.refuses_any() {
            return self.queue.call(1);
        }
        let open = self.members.iter().filter(|member| member.is_open());
        self.queue.call_for_models(&open.map(|member| member.org.refused_models()).collect::<Vec<_>>());
    }

    /// Gives the request to a ready member of those that are asked, if there is one: the best tier is asked first.
    fn ask<Req>(
        &self,
        asks: impl Fn(&Member<M>) -> bool,
        model: Option<&str>,
        memory: Option<&CallMemory>,
        slot: &mut Option<Req>,
    ) -> Option<Bound<M, M::Future, M::Error>>
    where
        M: Service<Req> + Clone,
    {
        // All is weighed at one time, once: health that changes meanwhile must hide nobody who is ready.
        let now = LazyCell::new(Instant::now);
        let health = |member: &Member<M>| member.org.health_at(|| *now);
        let failures = |member: &Member<M>| memory.map_or(0, |memory| memory.failures_of(&member.org));
        let best_untried = LazyCell::new(|| {
            let may_serve = |member: &Member<M>| member.serves() && member.allows(model);
            let untried = self.members.iter().filter(|member| may_serve(member) && failures(member) == 0);
            untried.map(|member| health(member)).reduce(f64::max)
        });
        let tier = |i: usize| {
            let member: &Member<M> = &self.members[i];
            (asks(member) && member.allows(model)).then(|| Tier::of(health(member), failures(member), || *best_untried))
        };
        let load = |i: usize| self.members[i].org.load_at(|| *now);
        let mut well = pick_well(self.members.len(), |i| tier(i) == Some(Tier::Credible), load);
        // All others are looked at only where that finds nobody.
        let (mut asked, mut open) = (None, None::<Ranked>);
        loop {
            let picked = match well.take() {
                Some(well) => *asked.insert(well),
                None => {
                    let others = || Ranked::of(self.members.len(), |i| if asked == Some(i) { None } else { tier(i) });
                    pick(open.get_or_insert_with(others).best(), load)?
                }
            };
            let member = &self.members[picked];
            match member.ask(slot) {
                Asked::Called(future, seat) => return Some(Bound::Called(future, seat)),
                Asked::Failed(error) => return Some(Bound::Failed(error, member.org.clone())),
                Asked::Pending => open.iter_mut().for_each(|open| open.remove(picked)),
            }
        }
    }

    /// Asks whom this call may ask, whether or not somebody waits.
    ///
    /// Who waits may ask anybody once it was called, and so may a newcomer where nobody waits. Where somebody does, a newcomer
    /// joins the line, for what becomes free is for the oldest; but not where all who wait have been called already and some
    /// member is [plentiful](Member::is_plentiful). Without that a line, once there is one, would be joined by everyone who
    /// comes and never dissolve, though slots are free. Nobody starves by it: whatever a member that was pending has next is
    /// given to one who waits, so whoever finds nothing when it comes, because newcomers took the rest of what was plentiful,
    /// is first for what comes then.
    fn try_bind<Req>(
        &self,
        is_its_turn: bool,
        model: Option<&str>,
        memory: Option<&CallMemory>,
        slot: &mut Option<Req>,
    ) -> Option<Bound<M, M::Future, M::Error>>
    where
        M: Service<Req> + Clone,
    {
        match is_its_turn {
            false if self.queue.has_uncalled() => None,
            false if !self.queue.is_empty() => self.ask(Member::is_plentiful, model, memory, slot),
            _ => self.ask(Member::is_open, model, memory, slot),
        }
    }

    /// Binds the request in `slot` to a member, or waits in line for one.
    pub(crate) fn poll_bind<Req>(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        place: &mut Place<M>,
        memory: Option<&CallMemory>,
        slot: &mut Option<Req>,
    ) -> Poll<Bound<M, M::Future, M::Error>>
    where
        M: Service<Req> + Clone,
    {
        let wanted = place.model.clone();
        let model = wanted.as_deref();
        // Twice: once as one comes, once more when written into the line, so that no bell rings unheard between.
        for _ in 0..2 {
            if self.none_left_for(model) {
                // Whoever's turn it is.
                place.give_up(self);
                let orgs = self.members.iter().map(|member| &member.org);
                return Poll::Ready(Bound::NoneLeft(NoOrgLeft::of(orgs, model)));
            }
            if place.ticket.is_none_or(|ticket| self.queue.may_try_or_waits(ticket, cx.waker())) {
                if let Some(bound) = self.try_bind(place.ticket.is_some(), model, memory, slot) {
                    self.bound(place, &bound);
                    return Poll::Ready(bound);
                }
                self.queue.wait(&mut place.ticket, place.age, &wanted, cx.waker());
            }
            if !self.has_news_for(model) {
                break;
            }
        }
        if self.has_news() {
            // Somebody is open, and it is another's turn, who may have been called and not come, or they may not be asked for this
            // model: the call is passed on.
            self.call_next();
        }
        Poll::Pending
    }

    /// A call has its member, or its failure.
    fn bound<Req>(&self, place: &mut Place<M>, bound: &Bound<M, M::Future, M::Error>)
    where
        M: Service<Req> + Clone,
    {
        if let Some(ticket) = place.ticket.take() {
            self.queue.leave(ticket);
        }
        if let (false, Bound::Called(_, seat)) = (self.queue.is_empty(), bound) {
            seat.member().enlist();
        }
        self.left();
    }

    /// Whoever leaves calls the next two while there is something for them; the last one out turns off the lights.
    ///
    /// Whether the line is empty is asked now and not when the place was given up: somebody else may have been the last since,
    /// and have turned them off before we turned one on.
    fn left(&self)
    where
        M: Clone,
    {
        if self.is_stale() {
            // It is the members of now that whoever comes next may find reserved, or pending.
            return self.roster.latest().left();
        }
        if self.queue.is_empty() {
            for member in &self.members {
                member.stand_down();
            }
        }
        if !self.queue.is_empty() && self.has_news() {
            self.call_next();
        }
    }
}

/// A place in the line of a fleet.
pub(crate) struct Place<M> {
    ticket: Option<Ticket>,
    age: u64,
    model: Model,
    // Only the pointer's type is needed; the fleet is passed in.
    fleet: std::marker::PhantomData<fn() -> M>,
}

impl<M> Place<M> {
    pub(crate) fn new(age: u64, model: Model) -> Self {
        Place { ticket: None, age, model, fleet: std::marker::PhantomData }
    }

    /// The model that the call is for.
    pub(crate) fn take_model(&mut self) -> Model {
        self.model.take()
    }

    /// Gives the place up, if it has one, and calls whoever is next.
    pub(crate) fn give_up(&mut self, fleet: &Fleet<M>)
    where
        M: Clone,
    {
        if let Some(ticket) = self.ticket.take() {
            fleet.queue.leave(ticket);
            fleet.left();
        }
    }
}

/// No org is left to ask: all are out, or out for this model, or were removed, and none comes back by itself. The source of an error of class
/// [`NoOrg`](crate::outcome::Class::NoOrg).
#[derive(Clone, Debug)]
pub struct NoOrgLeft {
    orgs: Vec<(Arc<str>, Option<OutReason>)>,
}

impl NoOrgLeft {
    fn of<'a>(orgs: impl Iterator<Item = &'a Org>, model: Option<&str>) -> Self {
        let refused =
            |org: &Org| model.filter(|_| org.refuses(model)).map(|model| OutReason::ForbiddenModel(model.into()));
        let why = |org: &Org| org.out_reason().or_else(|| refused(org));
        NoOrgLeft { orgs: orgs.map(|org| (org.shared_name(), why(org))).collect() }
    }

    /// Each org's name, and why it is out; the model that it refuses, if it is out for that alone.
    pub fn reasons(&self) -> impl Iterator<Item = (&str, &OutReason)> {
        self.orgs.iter().filter_map(|(name, reason)| Some((&**name, reason.as_ref()?)))
    }
}

impl fmt::Display for NoOrgLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.orgs.is_empty() {
            return f.write_str("no org is left to ask: all were removed");
        }
        f.write_str("no org is left to ask:")?;
        for (i, (name, reason)) in self.reasons().enumerate() {
            write!(f, "{} {name}: {reason}", if i == 0 { "" } else { ";" })?;
        }
        Ok(())
    }
}

impl std::error::Error for NoOrgLeft {}
