//! The layer and its builder.

use std::{fmt, sync::Arc};

use http::HeaderName;
use tower_layer::Layer;

use super::{Finished, Journal, Keep, KeyHeaders, Store, flight::Flights, future::Shared};
use crate::org::BuildError;

/// The largest body that is gathered to be kept or shared, unless told otherwise: 32 MiB, as the judge has it.
pub const BODY_CEILING: u64 = 32 << 20;

/// What all services of one layer go by.
pub(super) struct Rules {
    pub(super) keep: Box<dyn Keep>,
    pub(super) headers: KeyHeaders,
    pub(super) ceiling: u64,
    pub(super) flights: Arc<Flights<Shared>>,
}

/// Wraps a service in a [`Journal`]. Requests that are the same are sent once over all services of one layer, and all clones of these.
#[derive(Clone)]
pub struct JournalLayer<St> {
    store: St,
    rules: Arc<Rules>,
}

impl<St: Store> JournalLayer<St> {
    /// Keeps what is [finished](Finished) in this store.
    #[must_use]
    pub fn new(store: St) -> Self {
        let rules = Rules {
            keep: Box::new(Finished),
            headers: KeyHeaders::default(),
            ceiling: BODY_CEILING,
            flights: Arc::default(),
        };
        JournalLayer { store, rules: Arc::new(rules) }
    }

    /// Starts from the defaults.
    pub fn builder(store: St) -> JournalBuilder<St> {
        JournalBuilder { store, keep: Box::new(Finished), headers: None, ceiling: BODY_CEILING }
    }
}

impl<S, St: Store> Layer<S> for JournalLayer<St> {
    type Service = Journal<S, St>;

    fn layer(&self, inner: S) -> Self::Service {
        Journal::new(inner, self.store.clone(), self.rules.clone())
    }
}

impl<St> fmt::Debug for JournalLayer<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalLayer")
            .field("key_headers", &self.rules.headers)
            .field("ceiling", &self.rules.ceiling)
            .finish_non_exhaustive()
    }
}

/// What may be said about a [`JournalLayer`].
#[must_use]
pub struct JournalBuilder<St> {
    store: St,
    keep: Box<dyn Keep>,
    headers: Option<Vec<HeaderName>>,
    ceiling: u64,
}

impl<St: Store> JournalBuilder<St> {
    /// Which answers are kept. Default: [`Finished`].
    pub fn keep(mut self, keep: impl Keep) -> Self {
        self.keep = Box::new(keep);
        self
    }

    /// The request headers that change the answer, instead of those of [`KeyHeaders::default`].
    pub fn key_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.headers = Some(names.into_iter().collect());
        self
    }

    /// The largest body that is gathered, in bytes: one that is larger is handed through, not kept and not shared. Default
    /// [`BODY_CEILING`]; at most 512 MiB.
    pub fn ceiling(mut self, bytes: u64) -> Self {
        self.ceiling = bytes;
        self
    }

    /// Builds the layer.
    ///
    /// # Errors
    /// Names the field that is out of its range: a header that holds a key, or a ceiling beyond what an entry can hold.
    pub fn build(self) -> Result<JournalLayer<St>, BuildError> {
        if self.ceiling > 512 << 20 {
            return Err(BuildError::new("ceiling", "must be at most 512 MiB"));
        }
        let headers = self.headers.map_or_else(|| Ok(KeyHeaders::default()), KeyHeaders::new)?;
        let rules = Rules { keep: self.keep, headers, ceiling: self.ceiling, flights: Arc::default() };
        Ok(JournalLayer { store: self.store, rules: Arc::new(rules) })
    }
}

impl<St> fmt::Debug for JournalBuilder<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalBuilder")
            .field("key_headers", &self.headers)
            .field("ceiling", &self.ceiling)
            .finish_non_exhaustive()
    }
}
