//! What the benches share: the in-memory provider, the stacks that are compared over it, and the callers.
//!
//! `benches/README.md` says what is compared and why that is fair.
#![allow(dead_code, reason = "each bench uses a part")]
#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

pub(crate) mod callers;
pub(crate) mod stacks;
pub(crate) mod wire;
