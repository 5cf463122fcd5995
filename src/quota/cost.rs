//! What a call costs, before it is sent.

use std::fmt;

use http::{Extensions, Request};
use http_body::Body;

use crate::dialect::Resource;

/// What a call is expected to cost besides being one request. `None` where only experience can tell.
///
/// Whoever knows better than an estimator puts one into a request: [`ByBody`](super::ByBody) and [`ByBytes`] take it as said.
///
/// ```
/// use http::Request;
/// use tower_quota::quota::Cost;
///
/// let prompt = "…";
/// # let count = |_: &str| 1_234.0;
/// let cost = Cost::tokens(Some(count(prompt)), None).output_bound(Some(500.0));
/// let request = Request::post("/v1/messages").extension(cost).body(prompt);
/// # let _ = request;
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Input tokens. The quota multiplies them by what it has learnt to be used for each that is estimated, so that an
    /// estimate that is always off by the same factor is as good as a right one; unless they are [`exact`](Cost::exact), as those
    /// of a `Cost` in a request's extensions always are.
    pub input_tokens: Option<f64>,
    /// Output tokens. `None`: what calls have used lately.
    pub output_tokens: Option<f64>,
    /// The most output tokens that the answer may have: the `max_tokens` of all its choices together. It is never taken for
    /// the cost itself, since few answers come near it, but bounds what is expected.
    pub output_bound: Option<f64>,
    /// Whether `input_tokens` are a count, to be taken as they are. No estimate is judged by such a call.
    pub exact: bool,
}

impl Cost {
    /// A cost of so many tokens; `None` stands for what calls have used lately.
    #[must_use]
    pub const fn tokens(input_tokens: Option<f64>, output_tokens: Option<f64>) -> Self {
        Cost { input_tokens, output_tokens, output_bound: None, exact: false }
    }

    /// The same with the most output tokens that the answer may have; `None` where there is no such bound.
    #[must_use]
    pub const fn output_bound(mut self, tokens: Option<f64>) -> Self {
        self.output_bound = tokens;
        self
    }

    /// The same, its input tokens to be taken as they are.
    #[must_use]
    pub const fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    /// What the caller has said of a request, to be taken as said.
    pub(super) fn said(extensions: &Extensions) -> Option<Cost> {
        extensions.get().copied().map(Cost::exact)
    }

    /// By the rule of thumb that providers give for English text: a token for every four bytes.
    pub(super) fn of_bytes(bytes: u64) -> Cost {
        Cost::tokens(if bytes == 0 { None } else { Some((bytes as f64 / 4.0).ceil()) }, None)
    }
}

/// Estimates a call's cost from its request. [`ByBody`](super::ByBody) is the default of the layer and of the ready-made stack.
///
/// # A tokenizer of your own
///
/// Whatever counts tokens, implement this around it, and hand it to
/// [`QuotaHeaderLayer::estimate`](super::QuotaHeaderLayer::estimate). It is asked on the path of every attempt: one that takes
/// longer than some microseconds belongs before the call, and its count into the request, as a [`Cost`]. Text is the body's
/// business, the bound on the output [`ByBody`](super::ByBody)'s:
///
/// ```
/// use std::sync::Arc;
///
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::Full;
/// use tower_quota::{org::Org, quota::{ByBody, Cost, Estimate, QuotaHeaderLayer}};
///
/// # struct Tokenizer;
/// # impl Tokenizer { fn count(&self, _: &str) -> usize { 3 } }
/// /// The prompt, which whoever makes a request puts into its extensions.
/// #[derive(Clone)]
/// struct Prompt(Arc<str>);
///
/// #[derive(Clone)]
/// struct Counted(Arc<Tokenizer>);
///
/// impl Estimate<Request<Full<Bytes>>> for Counted {
///     fn cost(&self, request: &Request<Full<Bytes>>) -> Cost {
///         let mut cost = ByBody.cost(request);
///         if let Some(Prompt(prompt)) = request.extensions().get() {
///             cost.input_tokens = Some(self.0.count(prompt) as f64);
///         }
///         cost
///     }
/// }
///
/// let layer = QuotaHeaderLayer::new(&Org::new("research")).estimate(Counted(Arc::new(Tokenizer)));
/// # let _ = layer;
/// let request = Request::post("/v1/messages").extension(Prompt("How do tides work?".into()));
/// let request = request.body(Full::new(Bytes::from(r#"{"max_tokens":300,"messages":["How do tides work?"]}"#)));
/// # let cost = Counted(Arc::new(Tokenizer)).cost(&request.unwrap());
/// # assert_eq!((cost.input_tokens, cost.output_bound), (Some(3.0), Some(300.0)));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not tell what a `{Req}` will cost",
    label = "is no `Estimate<{Req}>`",
    note = "`ByBody`, the default, takes an `http::Request` whose body is an `http_body::Body` and `Clone`; `ByBytes` takes one that is not `Clone`: `.estimate(ByBytes)`",
    note = "for others hand a type that implements `Estimate<{Req}>` to the layer: `.estimate(…)`"
)]
pub trait Estimate<Req>: Clone {
    /// The cost of `request`. Called at most once per attempt, on the caller's task; must not block. Not called while no answer
    /// has told of tokens, unless there is a [hard limit](super::QuotaHeaderLayer::hard_limit).
    fn cost(&self, request: &Req) -> Cost;
}

/// Estimates by the length of the body alone, for bodies that are not `Clone`: a token for every four bytes, and as much output
/// as calls have had lately. A [`Cost`] in the request's extensions is taken as said.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByBytes;

impl<B: Body> Estimate<Request<B>> for ByBytes {
    fn cost(&self, request: &Request<B>) -> Cost {
        Cost::said(request.extensions()).unwrap_or_else(|| {
            let hint = request.body().size_hint();
            Cost::of_bytes(hint.exact().unwrap_or(hint.lower()))
        })
    }
}

/// A request is larger than anything that its org will ever take, by a limit that is known to be hard: it was not sent. The source of
/// an [`Error`](crate::outcome::Error) of [`Class::TooLarge`](crate::outcome::Class::TooLarge).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TooLarge {
    resource: Resource,
    limit: f64,
    asked: f64,
}

impl TooLarge {
    pub(super) const fn new(resource: Resource, limit: f64, asked: f64) -> Self {
        TooLarge { resource, limit, asked }
    }

    /// What there is too little of.
    #[must_use]
    pub const fn resource(&self) -> Resource {
        self.resource
    }

    /// The most that is ever taken.
    #[must_use]
    pub const fn limit(&self) -> f64 {
        self.limit
    }

    /// The least that the request costs, as far as can be told before it is sent.
    #[must_use]
    pub const fn asked(&self) -> f64 {
        self.asked
    }
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.resource {
            Resource::InputTokens => "input tokens",
            Resource::OutputTokens => "output tokens",
            Resource::Tokens => "tokens",
            Resource::Requests => "requests",
        };
        write!(
            f,
            "it needs at least {:.0} {what}, and no more than {:.0} are ever taken: make it smaller",
            self.asked, self.limit
        )
    }
}

impl std::error::Error for TooLarge {}
