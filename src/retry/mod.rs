//! Retries what may pass, from two purses, and hands the request back when it cannot go on.
//!
//! It stands *above* the balancer and the limiters: one attempt is one permit and one sample there, no slot is held while a
//! request backs off, and the next attempt may go to another org. It stands *below* whatever bounds the requests alive
//! ([`drive`](crate::drive)), since nothing here does. Let it be the only owner of retries: switch off those of the client.
//!
//! What an answer costs is read from the one table, [`Class::implies`](crate::outcome::Class::implies):
//!
//! | purse | what happens |
//! |---|---|
//! | `Errors` | one of few attempts (5); exponential backoff with full jitter (500 ms, doubling, up to 30 s), never before the provider's hint; then a token of the budget that all calls share |
//! | `Throttles` | not an attempt: no limit but the stall verdict (below) and the count of calls (1,000) |
//! | `Once` | one more attempt, whatever else has failed; a second answer of that class is returned |
//! | `Elsewhere` | at once and free, if the org is out below; else the answer is returned |
//! | `Closed` | the answer is returned: a terminal one stays `Ok(response)` |
//!
//! Whether a 429 is slept out here depends on who else knows. If the answer's [`Stamp`](crate::outcome::Stamp) says that the
//! org is *held below*, the request goes back at once, and the balancer gives it to a sibling or lets it wait: no call pays
//! twice for one hint. Otherwise the hint is slept out here (and up to one backoff base more, so that those refused together
//! do not return together); without a useful hint the wait grows from 429 to 429, and a `Retry-After: 0` does not reset it.
//! A 429 for this request alone is always slept out here.
//!
//! The *budget* keeps retries after errors from outgrowing traffic when everybody fails: each first attempt brings 0.2 of a
//! token, each second ten, each such retry takes one. An empty budget delays a retry, it never fails it.
//!
//! *The stall verdict:* a request is given up for waiting only when it has waited for its patience (ten minutes, from its first
//! 429; without one, from when it began to wait for its turn in the balancer's line or for readiness) **and** no request of the
//! layer has had its answer for as long. It is the same for the wait up here and the wait below. A wait that would end
//! too late (a hint longer than the patience) is not begun while nobody gets anywhere.
//!
//! A *deadline* ([`RateLimitRetryBuilder::deadline`], or a [`Deadline`] in the extensions of one request) covers everything from the
//! call of the service on. Who is to be [told](crate::observe) of retries and of requests that are given up:
//! [`RateLimitRetryBuilder::observer`].
//!
//! The kept request is the caller's: each attempt is that with two additions, a [`CallMemory`](crate::call::CallMemory)
//! (so that it keeps its place in line) and an `idempotency-key`, the same over all attempts; the caller's own if it set one.
//! It is an `http::Request<B>` with `B: Clone`; the answer and the error may be anything that the classifier understands.
//!
//! ```
//! use http::{Request, Response};
//! use std::{convert::Infallible, time::Duration};
//! use tower::{Layer, Service, ServiceExt};
//! use tower_quota::{outcome::ByStatus, retry::{RateLimitRetryLayer, RetryError}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A provider that has had enough. In a real stack: the balancer, and the default classifier.
//! let provider = tower::service_fn(|_: Request<String>| async {
//!     Ok::<_, Infallible>(Response::builder().status(429).header("retry-after-ms", "5").body(()).unwrap())
//! });
//! let layer = RateLimitRetryLayer::builder()
//!     .classify(ByStatus)
//!     .backoff_base(Duration::from_millis(1))
//!     .patience(Duration::from_millis(50))
//!     .build()?;
//! let request = Request::post("/v1/messages").body("Hello".to_owned())?;
//!
//! match layer.layer(provider).oneshot(request).await {
//!     Ok(response) => println!("answered: {}", response.status()),
//!     // "rate limited 9 times over 46ms: try again later (the provider asked for 5ms)"
//!     Err(error) if error.is_rate_limited() => {
//!         eprintln!("{error}");
//!         let request = error.into_request().expect("an exhausted request comes back");
//!         assert_eq!(request.body(), "Hello");
//!     }
//!     Err(RetryError::Exhausted(failed)) => panic!("{} after {} calls", failed.last, failed.wire_calls),
//!     Err(error) => panic!("{error}"),
//! }
//! # Ok(())
//! # }
//! ```

mod budget;
mod error;
mod future;
mod kept;
mod layer;
mod policy;
mod purse;
mod service;
mod stall;

use std::sync::Arc;

use http::HeaderName;
use tokio::time::Instant;

pub use self::{
    error::{Cause, Exhausted, RetryError},
    future::RetryFuture,
    layer::{RateLimitRetryBuilder, RateLimitRetryLayer},
    purse::{Counts, Exhaustion},
    service::RateLimitRetry,
};

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A request extension: when one request is given up, whatever it waits for; see
/// [`deadline`](RateLimitRetryBuilder::deadline). The request comes back with it, so set a later one before it is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(pub Instant);

/// What all services of one layer share.
#[derive(Clone)]
struct Shared {
    policy: policy::Policy,
    budget: Arc<crate::gate::Gate<budget::Budget>>,
    progress: Arc<stall::Progress>,
    dice: policy::Dice,
    observers: crate::observe::Observers,
}

#[cfg(test)]
mod tests;
