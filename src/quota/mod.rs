//! Paces calls to an org by what its answers say remains: the whole refill is spent, and a 429 is rare.
//!
//! **Where it stands:** around the judge and the client, *inside* the limiter (which readies this layer first and takes its
//! slot last), one for each org and model family. It reads headers on every answer, refusals too, and needs no judge; where
//! one has stamped the answer, it learns from the stamp what calls use.
//!
//! - Per resource (requests, input tokens, output tokens, tokens) it keeps what the provider last said, plus the refill
//!   since, minus every call that the answer says nothing certain about.
//! - While more than a mark is left, calls go freely: a burst is spent, not saved. Below it they are paced at
//!   `2 · refill · level / mark`, so one copy of us settles at half the mark and spends the whole refill, and a colleague on
//!   the same key finds a reserve. Where the refill shows that somebody else spends too, the mark is higher and the burst is
//!   paced as well.
//! - `poll_ready` cannot see the request, so it reserves what calls cost on average, and only while a large one would fit;
//!   `call` trues it up. A request that proves too dear waits in its own future, first in line; one larger than the bucket goes
//!   when the bucket is full.
//! - What a request will cost is [estimated](Estimate) from its body, and the estimate set right by what calls have used; an
//!   answer is taken to be as long as 19 of 20 have been, never as `max_tokens` allows. When the answer says what it used, the
//!   difference is settled: of a stream, when it ends. What the provider refused, or never saw, costs nothing.
//! - Nothing is limited before the first answer that tells a limit.
//! - Which headers tell it is a matter of the provider's [dialect](crate::dialect), known from each answer unless
//!   [told](QuotaHeaderLayer::dialect).
//!
//! `docs/quotas.md` explains the law in plain words, with pictures made by the simulation.
//!
//! **Readiness:** `Ready` is a reservation, taken off what is left. A clone starts without one.
//!
//! **Cancel safety:** a reservation that is not sent is given back. A call that was sent counts as made until an answer
//! says otherwise.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use http::{Request, Response};
//! use http_body_util::Empty;
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{org::Org, quota::QuotaHeaderLayer};
//!
//! let org = Org::new("research");
//! let mut client = ServiceBuilder::new()
//!     .layer(QuotaHeaderLayer::new(&org))
//!     .service(service_fn(async |_: Request<Empty<&'static [u8]>>| {
//!         let answer = Response::builder()
//!             .header("anthropic-ratelimit-requests-limit", "60")
//!             .header("anthropic-ratelimit-requests-remaining", "0");
//!         answer.body(())
//!     }));
//!
//! client.ready().await?.call(Request::new(Empty::new())).await?;
//! assert!(org.headroom() < 0.01, "it comes back as fast as the quota does");
//! # Ok(()) }
//! ```

mod bucket;
mod by_body;
mod cost;
mod experience;
mod future;
mod layer;
mod ledger;
mod quantile;
mod service;
#[cfg(test)]
mod tests;

pub use self::{
    by_body::ByBody,
    cost::{ByBytes, Cost, Estimate, TooLarge},
    future::QuotaFuture,
    layer::QuotaHeaderLayer,
    service::QuotaHeader,
};
