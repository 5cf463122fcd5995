//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod aimd;
pub mod auth;
pub mod balance;
pub mod call;
#[cfg(feature = "client")]
pub mod client;
pub mod drive;
mod gate;
pub mod hint;
pub mod judge;
mod line;
pub mod org;
pub mod outcome;
mod pool;
pub mod quota;
pub mod retry;
#[cfg(feature = "sim")]
pub mod sim;
pub mod stack;
