//! Balances calls over organisations: each goes to an org that has a slot *now*.
//!
//! **Where it stands:** inside the retry (a retried call must be free to go elsewhere), around one stack per org: limiter,
//! quota, judge, key. A [`Layer`](tower_layer::Layer) for any `S: Clone`; given the orgs and a function from an org and `S`
//! to that org's stack, it makes one `Clone` service. It needs no `Buffer` and spawns nothing.
//!
//! - Members are org × model [`Family`](crate::org::Family), because quotas are. A request names its family by an extension;
//!   each family has its own line, so that a held family blocks no other (while its calls do not fill
//!   [`max_unbound`](OrgBalanceLayer::max_unbound)).
//! - Among the members that are ready, the most trusted are asked first: those whose [health](crate::org::Org::health) is ½ or
//!   more; of these last those that have failed this very call twice, where another that has not is at least half as well (the
//!   call's [memory](crate::call::CallMemory) says so); then the rest. Of these two are drawn at random and the less
//!   loaded one takes the call (power of two choices over [`Org::load`](crate::org::Org::load)).
//! - A call is bound in the poll in which a member is ready: no request waits behind one org while a sibling is free, and no
//!   member's slot is reserved for a request that is not there.
//! - The line is ordered by age. A retried call keeps its place through its [`CallMemory`](crate::call::CallMemory) and does
//!   not wait to be let in again.
//! - The answer's [`Stamp`](crate::outcome::Stamp), or the [`Error`](crate::outcome::Error), says which org served.
//! - The calls of an org that is out go to its siblings: [`health`](crate::health) puts it out when its key is refused, and for one
//!   [model](crate::org::Family::model) when that is. When none is left for a call, it fails at once with [`NoOrgLeft`].
//! - Orgs join, go, are disabled and drained while calls run: see [below](#live-control).
//! - Two keys of one organisation are one quota: one serves, the other is a [spare](#spares).
//!
//! **Readiness:** it reserves nothing. `Ready` means that fewer than `max_unbound` calls are made and not yet bound. It never
//! fails.
//!
//! **Cancel safety:** a dropped call leaves the line and hands its turn on, or drops the call it was bound to.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use http::{Request, Response};
//! use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{
//!     aimd::AimdLimitLayer,
//!     balance::OrgBalanceLayer,
//!     org::{Org, Orgs},
//!     outcome::Stamp,
//! };
//!
//! let orgs = Orgs::new([Org::new("research"), Org::new("batch")])?;
//! let mut client = ServiceBuilder::new()
//!     .layer(OrgBalanceLayer::new(orgs, |org: &Org, client| AimdLimitLayer::new(org).layer(client)))
//!     .service(service_fn(async |_: Request<String>| Ok::<_, std::io::Error>(Response::new(String::new()))));
//!
//! let answer = client.ready().await?.call(Request::new("hello".into())).await?;
//! let served_by = answer.extensions().get::<Stamp>().and_then(|stamp| stamp.org.clone()).ok_or("no stamp")?;
//! assert!(["research", "batch"].contains(&served_by.name()));
//! # Ok(()) }
//! ```
//!
//! # Live control
//!
//! What an org is doing is read of its handle: [`Org::snapshot`](crate::org::Org::snapshot) says limit, cap, floor,
//! ceiling, weight, calls in flight, services that wait, the hold and why, epoch, headroom, history and standing, summed over
//! its model families; [`Org::families`](crate::org::Org::families) gives a handle to each. The same handle retunes it:
//! [`Org::retune`](crate::org::Org::retune). Who is a member is changed through [`Members`], got from
//! [`OrgBalance::members`] (or from the ready-made stack's own `members`). All of it may be done from any task, at any
//! time.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use http::{Request, Response};
//! # use tower::{Layer, ServiceExt, service_fn};
//! # use tower_quota::{aimd::AimdLimitLayer, balance::OrgBalanceLayer};
//! # let client = service_fn(async |_: Request<String>| Ok::<_, std::io::Error>(Response::new(String::new())));
//! use tower_quota::org::{Org, Orgs, Standing, Tuning};
//!
//! let orgs = Orgs::new([Org::new("research"), Org::new("batch")])?;
//! let balance = OrgBalanceLayer::new(orgs, |org: &Org, client| AimdLimitLayer::new(org).layer(client)).layer(client);
//! let members = balance.members();
//! # balance.clone().oneshot(Request::new(String::new())).await?;
//!
//! // Read.
//! for now in members.snapshots() {
//!     println!("{} {}: {} in flight, {}, held: {:?}", now.name, now.family, now.in_flight, now.standing, now.hold);
//! }
//! println!("calls that wait, by family: {:?}", members.waiting());
//!
//! // Retune: half as many calls at most, and twice the share of the load that its sibling attracts.
//! let research = members.get("research").ok_or("no such org")?;
//! research.retune(Tuning::new().cap(20).weight(2.0))?; // in every family; the whole org's snapshot shows their sum, here of one
//! assert_eq!(research.snapshot().limit.ok_or("no limiter yet")?.cap, 20);
//!
//! // One org goes, when its last call has ended; another comes.
//! members.drain("batch")?.await?;
//! let gone = members.remove("batch")?;
//! members.add(Org::new("spare"))?;
//! assert_eq!(gone.standing(), Standing::Removed);
//! assert_eq!(members.orgs().len(), 2);
//! # Ok(()) }
//! ```
//!
//! # Spares
//!
//! Providers count by organisation, not by key, and say which one in every answer (`anthropic-organization-id`,
//! `openai-organization`; read by the [quota](crate::quota) layer). When two members of a pool turn out to have one id, the
//! one whose id was known first stays, and the other is parked as its *spare*: it takes no new calls, what it has in
//! flight ends as it would have, and the log has it once, with both names. The rule holds for every model family by itself:
//!
//! - Of the members of one id that are neither out nor disabled exactly one serves. It is the one that does already; if that is
//!   out, disabled, drained or removed, or names another id, the next one in the order in which their ids were known takes over,
//!   at once: whoever waits is woken. A key that is refused for one family or one of its models alone (403) is replaced for that family,
//!   if another is allowed more; where each is refused another model, both serve.
//! - Whoever is brought back, enabled or added while another serves is the spare of that one. To change over, disable the
//!   one that serves.
//! - When all are out, calls fail as ever with [`NoOrgLeft`]; the first to be brought back serves.
//! - An answer without an id, or with an empty one, changes nothing; a member that never named one is no spare. One that names
//!   another id than before is looked at anew.
//!
//! An id is known with an org's first answer. Under the ready-made stack's limiter first calls travel alone, so a call or two go
//! over both keys before.
//! [`Standing::Spare`](crate::org::Standing::Spare) shows it, and [`Org::spare_of`](crate::org::Org::spare_of) says of whom. What
//! the spare knew of limit and quota is its own: it begins where it left off.
//!
//! Some gateways name one id for all keys, or another one with each answer. For these turn it off:
//! [`OrgBalanceLayer::spares`], [`Stack::spares`](crate::stack::Stack::spares).

mod fleet;
mod future;
mod layer;
mod member;
mod members;
mod pick;
mod queue;
mod roles;
mod roster;
mod service;
mod spares;
mod table;

pub use self::{
    fleet::NoOrgLeft,
    future::BalanceFuture,
    layer::{MAX_UNBOUND, OrgBalanceLayer},
    members::{MemberError, Members},
    service::OrgBalance,
};

#[cfg(test)]
mod tests;
