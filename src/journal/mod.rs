//! Answers that are kept: what was answered is not sent again.

mod body;
mod entry;
mod file;
mod flight;
mod future;
mod keep;
mod key;
mod layer;
mod seal;
mod service;
mod store;

pub use self::{
    body::JournalBody,
    file::{FilePut, FileStore, FileStoreBuilder, OpenError},
    future::JournalFuture,
    keep::{Finished, Keep},
    key::{Key, KeyHeaders, Salt},
    layer::{BODY_CEILING, JournalBuilder, JournalLayer},
    service::{Journal, JournalError},
    store::{Store, StoreError},
};

/// A response extension: the answer is not from a call that was made for this request. It carries a [`Stamp`](crate::outcome::Stamp)
/// without an org and without usage, so that nothing is counted twice.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Restored {
    /// It was kept: nothing was sent.
    Kept,
    /// It is that of a call that was made for the same request at the same time.
    Shared,
}

/// A response extension: the answer is good and paid for, but the store could not keep it. A later run will send its request again.
#[derive(Clone, Debug)]
pub struct Unkept(pub StoreError);
