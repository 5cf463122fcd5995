//! Answers that are kept: what was answered is not sent again.

mod key;

pub use self::key::{Key, KeyHeaders, Salt};
