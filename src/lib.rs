//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod aimd;
pub mod balance;
pub mod call;
mod gate;
pub mod hint;
mod line;
pub mod org;
pub mod outcome;
pub mod quota;
#[cfg(feature = "sim")]
pub mod sim;
