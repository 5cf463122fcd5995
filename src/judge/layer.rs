//! The layer, and the rules it gives to its services.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use tower_layer::Layer;

use super::JudgeService;
use crate::{
    org::{Credential, Org},
    outcome,
};

/// The largest body that is gathered unless told otherwise: 32 MiB. Anthropic's documented limit for a *request* is 32 MB, and
/// answers are smaller.
pub const BODY_CEILING: u64 = 32 << 20;

/// Which bodies are gathered.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gather {
    /// All of them: usage is read, and a body that breaks off is a failed call.
    #[default]
    Whole,
    /// Those of errors (any status but 2xx); successes are handed through as they come.
    ErrorsOnly,
    /// None: status and headers alone decide.
    Nothing,
}

/// Judges every answer of an HTTP client. See the [module](super) for where it stands and why.
///
/// ```
/// use std::time::Duration;
/// use tower_quota::{judge::{Gather, JudgeLayer}, org::{Credential, Org}};
///
/// let org = Org::new("research").credential(Credential::new("sk-secret"));
/// let layer = JudgeLayer::new()
///     .gather(Gather::ErrorsOnly)
///     .timeout(Duration::from_secs(120))
///     .scrub(&org);
/// # let _ = layer;
/// ```
#[derive(Clone, Debug, Default)]
pub struct JudgeLayer {
    rules: Arc<Rules>,
}

#[derive(Clone, Debug)]
pub(super) struct Rules {
    gather: Gather,
    pub(super) ceiling: u64,
    pub(super) hint_ceiling: Duration,
    pub(super) timeout: Option<Duration>,
    pub(super) scrub: Option<Credential>,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            gather: Gather::default(),
            ceiling: BODY_CEILING,
            hint_ceiling: outcome::HINT_CEILING,
            timeout: None,
            scrub: None,
        }
    }
}

impl Rules {
    pub(super) fn gathers(&self, status: StatusCode) -> bool {
        match self.gather {
            Gather::Whole => true,
            Gather::ErrorsOnly => !status.is_success(),
            Gather::Nothing => false,
        }
    }
}

impl JudgeLayer {
    /// A judge that gathers every body up to [`BODY_CEILING`], believes hints up to
    /// [`outcome::HINT_CEILING`], and has no timeout.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets which bodies are gathered, instead of all.
    #[must_use]
    pub fn gather(mut self, gather: Gather) -> Self {
        Arc::make_mut(&mut self.rules).gather = gather;
        self
    }

    /// Sets the largest body, in bytes, that is gathered. One whose `content-length` is larger is not gathered at all; one that
    /// proves larger is handed on from there as a stream. At most this, and one frame more, is in memory.
    #[must_use]
    pub fn ceiling(mut self, bytes: u64) -> Self {
        Arc::make_mut(&mut self.rules).ceiling = bytes;
        self
    }

    /// Sets the longest "not before" that is believed, instead of [`outcome::HINT_CEILING`]. More than a year is taken as a
    /// year.
    #[must_use]
    pub fn hint_ceiling(mut self, ceiling: Duration) -> Self {
        Arc::make_mut(&mut self.rules).hint_ceiling = ceiling.min(outcome::CEILING_MAX);
        self
    }

    /// Sets how long one attempt may take, from `call` until the body is gathered; where it is handed through, until the head.
    /// There is none by default. After it the exchange is dropped and the call fails as
    /// [`Class::Transport`](outcome::Class::Transport) with [`Elapsed`](super::Elapsed) as its source; an error status that has
    /// arrived by then is kept.
    ///
    /// `call` then panics outside a tokio runtime with time enabled.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        Arc::make_mut(&mut self.rules).timeout = Some(timeout);
        self
    }

    /// Replaces every occurrence of this org's key in a gathered error body by `***`, since providers quote keys they refuse
    /// and such bodies end up in logs. `content-length` follows. No effect for an org without a key, nor on a body that is not
    /// gathered (too large, or by [`Gather`]).
    #[must_use]
    pub fn scrub(mut self, org: &Org) -> Self {
        Arc::make_mut(&mut self.rules).scrub = org.key().filter(|key| !key.reveal().is_empty()).cloned();
        self
    }
}

impl<S> Layer<S> for JudgeLayer {
    type Service = JudgeService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        JudgeService::new(inner, self.rules.clone())
    }
}
