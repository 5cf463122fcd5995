//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod hint;
pub mod quota;
