//! Where entries are kept: a trait.

use std::{error::Error as StdError, fmt, sync::Arc};

use bytes::Bytes;

use super::Key;
use crate::outcome::BoxError;

/// Where entries are kept. [`FileStore`](super::FileStore) is one; one over a network is as well possible.
///
/// The layer hands over bytes that carry a checksum of their own: a store that loses or garbles an entry costs a call, never a wrong answer.
pub trait Store: Clone + Send + Sync + 'static {
    /// The future of [`get`](Store::get).
    type Get: Future<Output = Result<Option<Bytes>, BoxError>> + Send;
    /// The future of [`put`](Store::put).
    type Put: Future<Output = Result<(), BoxError>> + Send;

    /// What was last put under `key`, to the byte. What cannot be read any more is `None`, so that it is sent again; an error fails the
    /// request, and nothing is sent. Dropping the future ends the search.
    fn get(&self, key: &Key) -> Self::Get;

    /// Keeps `entry` under `key`. The future resolves once it is safe: when nothing that may happen to this process can take it back. It
    /// need not be polled for that: the entry of a future that was dropped is kept all the same, if it can be.
    fn put(&self, key: Key, entry: Bytes) -> Self::Put;

    /// Why nothing more can be kept, if so. The layer asks before it sends anything: what cannot be kept is not paid for.
    fn broken(&self) -> Option<StoreError>;
}

/// Why the store does not keep or find answers any more. Cheap to clone; the cause is its [`source`](StdError::source).
#[derive(Clone)]
pub struct StoreError(Arc<BoxError>);

impl StoreError {
    /// For this reason.
    pub fn new(cause: impl Into<BoxError>) -> Self {
        StoreError(Arc::new(cause.into()))
    }

    /// Takes a `StoreError` out of a box unchanged; any other error becomes the cause of one.
    #[must_use]
    pub fn from_box(error: BoxError) -> Self {
        match error.downcast::<StoreError>() {
            Ok(error) => *error,
            Err(cause) => StoreError::new(cause),
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the journal does not work, so nothing is sent that it could not keep")
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreError").field(&**self.0).finish()
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&**self.0)
    }
}
