//! A limit on concurrent calls that finds its own height: cut when the org refuses, grown while it is full and clean.
//!
//! **Where it stands:** directly around whatever makes one wire call, *inside* any retry (one permit is one attempt is one
//! sample; a limiter around a retry would hold its slot through the backoff and see only the last answer), and above anything
//! that paces: it readies the inner service first and takes its slot last.
//!
//! - An org's first call travels alone: it sounds the depth (a dead key, an org that refuses everything) for one call. Then
//!   the limit starts at a quarter of the cap, doubles per full window until the first cut, and grows by one after it.
//! - A 429 with a hint *holds* the org: it is not ready until the hint has passed. Then one call goes first, and the window
//!   opens by doubling. Where the answers tell the quota, it also halves the limit, once per epoch however many come.
//! - A 429 without a hint, where the answers tell the quota, cuts to nine tenths of what was in flight. When even one call alone
//!   is refused, the limit becomes a pause that doubles.
//! - It grows no faster than [`growth_per_second`](SettingsBuilder::growth_per_second), and after an
//!   [`idle`](SettingsBuilder::idle) phase a burst begins with the starting fraction again.
//!
//! **Where nothing tells the limit** (no quota headers) refusals are all there is. So they are where the answers tell a quota that had room
//! for the call they refuse ([`Stamp::within_quota`](crate::outcome::Stamp::within_quota)): another limit has refused it, and the plateau is
//! searched for; no pace is, since the quota is one.
//!
//! - *Plateau.* A refusal at n in flight makes the limit n − 1, and each further refusal of the same burst one less, so that what
//!   is left in flight is what fitted. Refused again before anything sent since was answered, it halves. It
//!   rests there, ever longer up to [`rest`](SettingsBuilder::rest), then probes by one, two, four, … slots a window.
//! - *Pace.* Calls that are refused though almost nothing else is in flight meet a limited rate. Then starts are spaced:
//!   accepted ÷ time between two refusals is the rate, a little above it is the probe, and the pace rests as long as the last one
//!   lasted. It ends when slots are the bottleneck, or when slower calls prove to be refused as often.
//!
//! What was learnt is on the board, with the reason of each change: [`Snapshot::history`](crate::org::Snapshot::history).
//!
//! - A slot is kept until the answer's body has ended ([`AtBodyEnd`]) or until its head is there ([`AtHead`]).
//! - Waiters are served in order of arrival. One that is woken and not polled does not keep the slot from the others.
//!
//! **Readiness:** `Ready` is a reserved slot and counts as in flight. A cut or hold that comes between `poll_ready` and
//! `call` does not take the reservation back: at most as many calls overshoot as reservations are out.
//!
//! **Cancel safety:** dropping the service, the future or the body gives the slot back; it counts as neither success nor
//! overload.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use http::{Request, Response};
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{aimd::AimdLimitLayer, org::Org};
//!
//! let org = Org::new("research").cap(8);
//! let mut client = ServiceBuilder::new().layer(AimdLimitLayer::new(&org)).service(service_fn(async |_: Request<String>| {
//!     Response::builder().status(429).header("retry-after", "30").body(String::new())
//! }));
//!
//! client.ready().await?.call(Request::new(String::new())).await?;
//! assert!(org.is_held(), "the org is held for thirty seconds: `client` is not ready");
//! # Ok(()) }
//! ```
//!
//! Above a judge, classify by its stamp, so that errors keep their class: `.classify(Stamped)`. Around something that is not
//! HTTP, say what a result means, with a closure or a type of your own, and give the slot back at the head, since there is no
//! body.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{aimd::AimdLimitLayer, org::Org, outcome::{Class, Outcome, classify_fn}};
//!
//! #[derive(Debug)]
//! struct Busy;
//!
//! let org = Org::new("database").cap(8);
//! let limit = AimdLimitLayer::new(&org)
//!     .classify(classify_fn(|result| Outcome::of(if result.is_ok() { Class::Ok } else { Class::Throttled })))
//!     .release_at_head();
//! let mut queries = ServiceBuilder::new().layer(limit).service(service_fn(async |n: u64| if n < 3 { Ok(n) } else { Err(Busy) }));
//!
//! for n in 0..3 {
//!     assert_eq!(queries.ready().await.map_err(|_| "busy")?.call(n).await.map_err(|_| "busy")?, n);
//! }
//! assert!(queries.ready().await.map_err(|_| "busy")?.call(3).await.is_err());
//! assert_eq!(org.snapshot().limit.ok_or("no limit")?.throttled, 1);
//! # Ok(()) }
//! ```
//!
//! Where one of the two is missing, the compiler finds no `ready` on the service. Name the request, and it says what to do:
//!
//! ```compile_fail
//! # use tower::{Layer, ServiceExt, service_fn};
//! # use tower_quota::{aimd::AimdLimitLayer, org::Org};
//! # async fn missing() {
//! let limit = AimdLimitLayer::new(&Org::new("database")).release_at_head();
//! let mut queries = limit.layer(service_fn(async |n: u64| Ok::<_, String>(n)));
//! ServiceExt::<u64>::ready(&mut queries).await; // error: `ByStatus` does not say what a `Result<u64, String>` means
//! # }
//! ```

mod future;
mod law;
mod layer;
mod pace;
mod plateau;
mod release;
mod service;
mod settings;
mod slots;

pub use self::{
    future::AimdFuture,
    layer::AimdLimitLayer,
    release::{AtBodyEnd, AtHead, Held, Release},
    service::AimdLimit,
    settings::{Caps, Settings, SettingsBuilder},
    slots::Permit,
};
