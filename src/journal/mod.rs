//! Answers that are kept: what was answered is not sent again.

mod entry;
mod file;
mod key;
mod seal;
mod store;

pub use self::{
    file::{FilePut, FileStore, FileStoreBuilder, OpenError},
    key::{Key, KeyHeaders, Salt},
    store::{Store, StoreError},
};
