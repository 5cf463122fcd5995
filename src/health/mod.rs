//! Keeps calls from an org that fails, and for good from one that is dead.
//!
//! **Where it stands:** above the limiter and below the balancer, one for each org and model family. It readies what is inside
//! first and takes a probe's place last. An org that must not be asked is *not ready*, so the balancer takes another; nothing
//! fails by an open circuit.
//!
//! - **Dead.** A refused key (401) or spent credit (402) takes the org [out](crate::org::Org::put_out), a 403 takes it out
//!   [for the model](crate::org::Org::put_model_out) that the request's [`Family`](crate::org::Family::of_model) was made of, where
//!   the judge's stamp [says which](crate::outcome::Stamp::model), and else for the family. Said once.
//! - **Parked.** Where the answer names the date on which access comes back, the org is held until then, and then asked by one
//!   call.
//! - **Open.** An org that [fails too often](CircuitBreaker) is asked by no call for a cooldown, then *half-open*: by one call at a
//!   time, a *probe*, until the provider has answered one. Bring a [`Breaker`] of your own to say otherwise.
//!   While its circuit is open a lone org's callers wait, without a word: listen with [`observe`](crate::observe), or set a deadline.
//! - **Health**, `0.0..=1.0`, is on the board ([`Org::health`](crate::org::Org::health)): an average over calls in which the last one
//!   weighs 0.15. What it lacks halves every ten seconds by itself; a good probe makes it at least ½.
//!
//! What counts is in [the one table](crate::outcome::Class). Failures are 5xx, timeouts and transport. 429s are the limiter's; a
//! refused request, a refused answer and an empty one are nobody's fault here: neither is counted. To a probe, any of them
//! proves that the org lives. What was not sent, or was dropped, says nothing.
//!
//! An answer that is handed through as a stream counts when it has ended, by what it proved to be
//! ([`Stamp::tail`](crate::outcome::Stamp::tail)); a probe is out until then.
//!
//! **Readiness:** `Ready` means that the circuit was closed, or is a reserved probe. A circuit that opens between `poll_ready` and
//! `call` does not take it back: at most as many calls overshoot as were ready. Their answers do not count against the org again.
//! Whoever waits for an open circuit keeps what it has reserved below, a limiter's slot perhaps; the balancer has one such waiter
//! at most.
//!
//! **A lone org** is not treated otherwise: whether another one could take the call changes with every hold, so it would have to be
//! asked at each call, while an open circuit costs a lone org no more than five seconds, and no attempt.
//!
//! **Cancel safety:** dropping the service, the future or the body gives a probe's place back, and counts as neither success nor
//! failure. A body that is leaked keeps it.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use http::{Request, Response};
//! use std::time::Duration;
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{aimd::AimdLimitLayer, health::OrgHealthLayer, org::{Circuit, Org}};
//!
//! let org = Org::new("research").cap(8);
//! let mut client = ServiceBuilder::new()
//!     .layer(OrgHealthLayer::new(&org))
//!     .layer(AimdLimitLayer::new(&org))
//!     .service(service_fn(async |_: Request<String>| Response::builder().status(500).body(String::new())));
//!
//! for _ in 0..5 {
//!     client.ready().await?.call(Request::new(String::new())).await?;
//! }
//! assert!(matches!(org.circuit(), Circuit::Open { .. }) && org.health() < 0.5);
//! // `client` is not ready for half a second; then one call may try.
//! tokio::time::timeout(Duration::from_secs(1), client.ready()).await??.call(Request::new(String::new())).await?;
//! assert!(org.is_held(), "it has failed, and the next cooldown is twice as long");
//! # Ok(()) }
//! ```

mod breaker;
mod future;
mod law;
mod layer;
mod service;
mod shared;
#[cfg(test)]
mod tests;

pub use self::{
    breaker::{Breaker, CircuitBreaker, CircuitBreakerBuilder},
    future::HealthFuture,
    layer::OrgHealthLayer,
    service::OrgHealth,
};
