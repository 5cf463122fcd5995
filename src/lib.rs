//! skeleton
#![forbid(unsafe_code)]
#![deny(missing_docs)]

#[cfg(feature = "sim")]
pub mod sim;
