//! Retries what may pass, from two purses, and hands the request back when it cannot go on.

mod budget;
mod error;
mod future;
mod layer;
mod policy;
mod purse;
mod service;

use std::sync::Arc;

use http::HeaderName;

pub use self::{
    error::{Cause, Exhausted, RetryError},
    future::RetryFuture,
    layer::{RateLimitRetryBuilder, RateLimitRetryLayer},
    purse::{Counts, Exhaustion},
    service::RateLimitRetry,
};

static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What all services of one layer share.
struct Shared {
    policy: policy::Policy,
    budget: Arc<crate::gate::Gate<budget::Budget>>,
    dice: policy::Dice,
}
