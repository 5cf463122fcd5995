//! What a call costs, before it is sent.

use http::Request;
use http_body::Body;

/// What a call is expected to cost besides being one request. `None` where only experience can tell.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Input tokens.
    pub input_tokens: Option<f64>,
    /// Output tokens.
    pub output_tokens: Option<f64>,
}

impl Cost {
    /// A cost of so many tokens; `None` stands for what calls have used lately.
    #[must_use]
    pub const fn tokens(input_tokens: Option<f64>, output_tokens: Option<f64>) -> Self {
        Cost { input_tokens, output_tokens }
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
