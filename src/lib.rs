//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod call;
pub mod drive;
mod gate;
pub mod hint;
mod line;
pub mod org;
pub mod outcome;
pub mod quota;
pub mod retry;
