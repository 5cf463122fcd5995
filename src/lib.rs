//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod auth;
pub mod call;
#[cfg(feature = "client")]
pub mod client;
mod gate;
pub mod hint;
pub mod judge;
mod line;
pub mod org;
pub mod outcome;
mod pool;
pub mod quota;
