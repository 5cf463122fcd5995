//! What layers tell one another about an answer.

use std::sync::Arc;

use super::{Outcome, Tail};
use crate::org::Org;

/// Tokens that the provider says a call used.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Input (prompt) tokens as the quota counts them: Anthropic's without what was [read from a cache](Usage::cache_read_tokens),
    /// OpenAI's with it.
    pub input_tokens: u64,
    /// Output (completion) tokens.
    pub output_tokens: u64,
    /// Input tokens that had nothing to do with a cache: neither read from one nor written to one. For prices; with
    /// [`cache_read_tokens`](Usage::cache_read_tokens) and [`cache_write_tokens`](Usage::cache_write_tokens) it is the whole
    /// input, each token in one of the three.
    pub uncached_tokens: u64,
    /// Input tokens that were read from a cache: Anthropic's `cache_read_input_tokens`, OpenAI's `cached_tokens`. Cheaper.
    pub cache_read_tokens: u64,
    /// Input tokens that were written to a cache: Anthropic's `cache_creation_input_tokens`. They are among
    /// [`input_tokens`](Usage::input_tokens), and dearer.
    pub cache_write_tokens: u64,
}

impl Usage {
    /// So many input and output tokens, and no cache.
    #[must_use]
    pub const fn new(input_tokens: u64, output_tokens: u64) -> Self {
        Usage {
            input_tokens,
            output_tokens,
            uncached_tokens: input_tokens,
            cache_read_tokens: 0,
            cache_write_tokens: 0,
        }
    }
}

/// What layers tell one another about an answer: written into the response's extensions by the judge, completed by the
/// balancer with who served it.
///
/// ```
/// # use http::Response;
/// use tower_quota::outcome::Stamp;
/// # let response = Response::new(());
/// if let Some(stamp) = response.extensions().get::<Stamp>() {
///     println!("{:?} by {:?}", stamp.outcome.class, stamp.org.as_ref().map(|org| org.name()));
/// }
/// ```
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Stamp {
    /// What the answer means.
    pub outcome: Outcome,
    /// Whether the body was gathered whole: nothing more will come over the wire, so its slot is free already.
    pub whole: bool,
    /// What the call used, where the answer says so and was gathered whole. Of one that is handed through as a stream its
    /// [`tail`](Stamp::tail) tells.
    pub usage: Option<Usage>,
    /// The end of an answer that is handed through as a stream; `None` for one that was gathered whole.
    pub tail: Option<Tail>,
    /// The org that served it; set by the balancer.
    pub org: Option<Org>,
    /// Whether that org does not admit calls for now (held, or out): whoever retries need not sleep, the next attempt waits
    /// below or goes elsewhere. Set by the balancer.
    pub held_below: bool,
    /// Nothing of the call was sent (no connection came about), or nothing of it was processed: no provider has counted it.
    pub unsent: bool,
    /// Of a 429: its own headers say that there was quota for this call, so that it was refused by a limit that nobody tells, such as
    /// one of calls at once. Set by the quota layer.
    pub within_quota: bool,
    /// The model that was asked for, where the request's [`Family`](crate::org::Family::of_model) was made of one: a
    /// [`Forbidden`](super::Class::Forbidden) is about that one alone. Set by the judge on such an answer, and on one that is handed through.
    pub model: Option<Arc<str>>,
    /// What went wrong in the provider's own words, or in those of the caller's check: short, on one line, no key in it.
    pub said: Option<Arc<str>>,
}

impl Stamp {
    /// A stamp that says only what the answer means.
    #[must_use]
    pub const fn new(outcome: Outcome) -> Self {
        Stamp {
            outcome,
            whole: false,
            usage: None,
            tail: None,
            org: None,
            held_below: false,
            unsent: false,
            within_quota: false,
            model: None,
            said: None,
        }
    }
}
