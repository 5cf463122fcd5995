//! Batches: requests handed in together, answered some time later, at the provider's leisure.

mod call;
mod config;
mod desk;
mod fate;
mod lines;
mod multipart;
mod object;
mod rows;
mod truth;

pub(super) use self::call::{Call, Routed};
pub use self::config::BatchConfig;
pub(super) use self::desk::{Answer, Desk, Rules};
pub(super) use self::lines::Lines;
pub use self::truth::{BatchSeen, BatchState, BatchTruth, RowSeen, RowsTruth};
