//! Pacing by what the provider says remains.

pub mod dialect;
