//! The metering layer around a probe, its calls' cost as a header says.

#![allow(unreachable_pub, reason = "each test file uses it")]
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

use std::{io, task::Poll};

use http::Request;
use tower::Layer;
use tower_quota::quota::{Cost, Estimate, QuotaHeader, QuotaHeaderLayer};

use crate::support::{Probe, Script};

/// So many input tokens as the header `x-cost` says.
#[derive(Clone, Copy)]
pub struct ByHeader;

impl<B> Estimate<Request<B>> for ByHeader {
    fn cost(&self, request: &Request<B>) -> Cost {
        let cost = request.headers().get("x-cost").map(|value| value.to_str().unwrap().parse().unwrap());
        Cost::tokens(Some(cost.unwrap_or(0.0)), Some(0.0))
    }
}

pub type Metered = tower_test::mock::Spawn<QuotaHeader<Probe, ByHeader>>;
pub type Layered = QuotaHeaderLayer<ByHeader>;

pub fn metered(layer: &Layered, probe: &Probe) -> Metered {
    Metered::new(layer.layer(probe.clone()))
}

pub fn poll(service: &mut Metered) -> Poll<io::Result<()>> {
    service.poll_ready::<Request<Script>>()
}

/// A request of so many input tokens.
pub fn cost(tokens: impl ToString) -> Request<Script> {
    Request::builder().header("x-cost", tokens.to_string()).body(Script::default()).unwrap()
}
