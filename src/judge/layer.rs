//! The layer, and the rules it gives to its services.

use std::{
    fmt,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{StatusCode, response::Parts};
use tower_layer::Layer;

use super::{JudgeService, fault, scrub::Keys};
use crate::{
    org::Org,
    outcome::{self, BoxError, Error},
};

/// The largest body that is gathered unless told otherwise: 32 MiB. Anthropic's documented limit for a *request* is 32 MB, and
/// answers are smaller.
pub const BODY_CEILING: u64 = 32 << 20;

/// A shorter one is looked for in bodies, but not in the errors of a client, in bytes.
const SHORTEST_KEY: usize = 8;

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

/// What an answer means that has nothing in it: no choices, no content, no events.
///
/// One that says itself why it is empty is an answer under either: cut short by the caller's own bound (`max_tokens`, `length`,
/// `stop_sequence`) or declined (`refusal`, `content_filter`). It would come out the same, and be paid for, again.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmptyPolicy {
    /// It is a failure that may pass, [`Class::Empty`](outcome::Class::Empty): asked again, models nearly always answer.
    #[default]
    Transient,
    /// It is an answer as any other, and is not looked for.
    Accept,
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

#[derive(Clone)]
pub(super) struct Rules {
    gather: Gather,
    pub(super) empty: EmptyPolicy,
    pub(super) ceiling: u64,
    pub(super) hint_ceiling: Duration,
    pub(super) timeout: Option<Duration>,
    pub(super) keys: Keys,
    pub(super) check: Option<Arc<Check>>,
    /// Whether it has been said that the client is not the right one.
    told: Arc<AtomicBool>,
}

pub(super) type Check = dyn Fn(&Parts, &Bytes) -> Result<(), BoxError> + Send + Sync;

impl fmt::Debug for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rules")
            .field("gather", &self.gather)
            .field("empty", &self.empty)
            .field("ceiling", &self.ceiling)
            .field("hint_ceiling", &self.hint_ceiling)
            .field("timeout", &self.timeout)
            .field("keys", &self.keys)
            .field("check", &self.check.is_some())
            .finish_non_exhaustive()
    }
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            gather: Gather::default(),
            empty: EmptyPolicy::default(),
            ceiling: BODY_CEILING,
            hint_ceiling: outcome::HINT_CEILING,
            timeout: None,
            keys: Keys::default(),
            check: None,
            told: Arc::default(),
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

    /// What it means that no answer came. What is wrong with the set-up is said at once, by the first call that finds it.
    pub(super) fn fault(&self, error: BoxError) -> Error {
        let error = fault::fault(error);
        if let Some(said) = &error.stamp().said {
            if !self.told.swap(true, Relaxed) {
                tracing::error!("{said}");
            }
        }
        self.without_key(error)
    }

    /// A client's error may quote what it was to send. Then a text takes its place that does not.
    pub(super) fn without_key(&self, error: Error) -> Error {
        let mut texts = vec![];
        let mut next = std::error::Error::source(&error);
        while let Some(cause) = next {
            texts.extend([cause.to_string(), format!("{cause:?}")]);
            next = cause.source();
        }
        // What is shorter is no key, and stands in many a word.
        let clean: Vec<_> = texts.iter().map(|text| self.keys.scrub_text(text, SHORTEST_KEY)).collect();
        if clean == texts {
            return error;
        }
        let told = clean[0].clone().into_owned();
        error.caused_by(told)
    }

    /// What the caller's own check has against an answer.
    pub(super) fn objection(&self, head: &Parts, body: &Bytes) -> Option<String> {
        let check = self.check.as_ref()?;
        // Nothing of ours is in the closure.
        match panic::catch_unwind(AssertUnwindSafe(|| check(head, body))) {
            Ok(Ok(())) => None,
            Ok(Err(objection)) => Some(objection.to_string()),
            Err(_) => {
                tracing::error!("the check of answers panicked; the answer counts as rejected");
                Some("the check panicked".to_owned())
            }
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

    /// Sets what an answer means that has nothing in it, instead of [`EmptyPolicy::Transient`].
    #[must_use]
    pub fn empty(mut self, policy: EmptyPolicy) -> Self {
        Arc::make_mut(&mut self.rules).empty = policy;
        self
    }

    /// Adds a check of the caller's own: whether the answer can be parsed, say. It is asked once about each answer that is
    /// gathered whole and is [`Class::Ok`](outcome::Class::Ok) by all else, and never about one that is handed through as a stream. One that it refuses is
    /// [`Class::Rejected`](outcome::Class::Rejected): the org is healthy, and the call is made again on the purse of errors. What it used counts, and the
    /// error's text is kept in [`Stamp::said`](outcome::Stamp::said). The last one that is set holds.
    ///
    /// It runs on the caller's task and must not block. One that panics is logged and has refused the answer: the call goes on.
    #[must_use]
    pub fn validate<F>(mut self, check: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Result<(), BoxError> + Send + Sync + 'static,
    {
        Arc::make_mut(&mut self.rules).check = Some(Arc::new(check));
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
    /// and such bodies end up in logs: whatever stands around it, and also where it is quoted, percent-encoded or escaped as in
    /// JSON, all of it or in part. `content-length` follows. Said again, it adds another org's key. No effect for an org without a
    /// key, nor on a body that is not gathered (too large, or by [`Gather`]).
    #[must_use]
    pub fn scrub(mut self, org: &Org) -> Self {
        let keys = self.rules.keys.apart();
        keys.add(org);
        Arc::make_mut(&mut self.rules).keys = keys;
        self
    }

    /// Its keys, to be added to.
    pub(crate) fn keys(&self) -> Keys {
        self.rules.keys.apart()
    }

    /// The same with these keys, and whichever are added to them later.
    pub(crate) fn scrub_all(mut self, keys: &Keys) -> Self {
        Arc::make_mut(&mut self.rules).keys = keys.clone();
        self
    }
}

impl<S> Layer<S> for JudgeLayer {
    type Service = JudgeService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        JudgeService::new(inner, self.rules.clone())
    }
}
