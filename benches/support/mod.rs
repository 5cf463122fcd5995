//! What the benches share: the in-memory provider, the stacks that are compared over it, and the callers.
//!
//! `benches/README.md` says what is compared and why that is fair.
#![allow(dead_code, reason = "each bench uses a part")]
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

pub(crate) mod callers;
pub(crate) mod loopback;
pub(crate) mod stacks;
pub(crate) mod wire;

use std::time::Duration;

/// Lets every caller make as many calls as it takes for `calls` altogether, and gives the time for just these.
pub(crate) fn per_call(calls: u64, callers: usize, run: impl FnOnce(usize) -> Duration) -> Duration {
    let each = (calls as usize).div_ceil(callers);
    run(each).mul_f64(calls as f64 / (each * callers) as f64)
}
