//! What a call costs, before it is sent.

use std::fmt;

use http::Request;
use http_body::Body;

use super::dialect::Resource;

/// What a call is expected to cost besides being one request. `None` where only experience can tell.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Input tokens.
    pub input_tokens: Option<f64>,
    /// Output tokens.
    pub output_tokens: Option<f64>,
    /// The most output tokens that the answer may have.
    pub output_bound: Option<f64>,
}

impl Cost {
    /// A cost of so many tokens; `None` stands for what calls have used lately.
    #[must_use]
    pub const fn tokens(input_tokens: Option<f64>, output_tokens: Option<f64>) -> Self {
        Cost { input_tokens, output_tokens, output_bound: None }
    }
}

/// Estimates a call's cost from its request.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not tell what a `{Req}` will cost",
    label = "is no `Estimate<{Req}>`",
    note = "`ByBytes`, the default, takes an `http::Request` whose body is an `http_body::Body`",
    note = "for others hand a type that implements `Estimate<{Req}>` to the layer: `.estimate(…)`"
)]
pub trait Estimate<Req>: Clone {
    /// The cost of `request`. Called once per attempt, on the caller's task; must not block.
    fn cost(&self, request: &Req) -> Cost;
}

/// A simple estimate: a token for every four bytes of the body (the rule of thumb that providers give for English text), and
/// as much output as calls have had lately.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByBytes;

impl<B: Body> Estimate<Request<B>> for ByBytes {
    fn cost(&self, request: &Request<B>) -> Cost {
        let hint = request.body().size_hint();
        let bytes = hint.exact().unwrap_or(hint.lower());
        Cost::tokens(if bytes == 0 { None } else { Some((bytes as f64 / 4.0).ceil()) }, None)
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
        write!(f, "it needs at least {:.0} {what}, and no more than {:.0} are ever taken: make it smaller", self.asked, self.limit)
    }
}

impl std::error::Error for TooLarge {}
