//! What a request can ask to happen to itself: errors that are decided by content, and so are the same by every path.

use http::StatusCode;

use super::wire::Failure;
use crate::org::Dialect;

/// The word of `"metadata":{"simulate":"…"}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Marker {
    /// Also for a word that is none of these.
    InvalidRequest,
    NotFound,
    TooLarge,
    Forbidden,
    OutOfQuota,
    RateLimited,
    Overloaded,
    ApiError,
    Timeout,
    Refusal,
    Empty,
    MaxTokens,
    InBand,
}

impl Marker {
    pub(super) fn named(word: &str) -> Self {
        match word {
            "not_found" => Marker::NotFound,
            "too_large" => Marker::TooLarge,
            "forbidden" => Marker::Forbidden,
            "out_of_quota" => Marker::OutOfQuota,
            "rate_limited" => Marker::RateLimited,
            "overloaded" => Marker::Overloaded,
            "api_error" => Marker::ApiError,
            "timeout" => Marker::Timeout,
            "refusal" => Marker::Refusal,
            "empty" => Marker::Empty,
            "max_tokens" => Marker::MaxTokens,
            "in_band" => Marker::InBand,
            _ => Marker::InvalidRequest,
        }
    }

    /// The error it asks for; `None` if it is a success.
    pub(super) fn failure(self, dialect: Dialect) -> Option<Failure<'static>> {
        let invalid = "invalid_request_error";
        Some(match self {
            Marker::Refusal | Marker::Empty | Marker::MaxTokens | Marker::InBand => return None,
            Marker::InvalidRequest => Failure::new(
                StatusCode::BAD_REQUEST,
                invalid,
                (invalid, "invalid_value"),
                "messages: asked to be invalid",
            ),
            Marker::NotFound => {
                Failure::new(StatusCode::NOT_FOUND, "not_found_error", (invalid, "model_not_found"), "model: not found")
            }
            Marker::TooLarge => Failure::too_large("Request exceeds the maximum size"),
            Marker::Forbidden => {
                let openai = (invalid, "permission_denied");
                Failure::new(StatusCode::FORBIDDEN, "permission_error", openai, "no access to this model")
            }
            Marker::OutOfQuota => {
                let status = match dialect {
                    Dialect::OpenAi => StatusCode::TOO_MANY_REQUESTS,
                    _ => StatusCode::PAYMENT_REQUIRED,
                };
                let openai = ("insufficient_quota", "insufficient_quota");
                Failure::new(status, "billing_error", openai, "You exceeded your current quota")
            }
            Marker::RateLimited => Failure::refused("asked to be refused"),
            Marker::Overloaded if dialect == Dialect::Anthropic => Failure::overloaded(529),
            Marker::Overloaded => Failure::overloaded(503),
            Marker::ApiError => Failure::internal(),
            Marker::Timeout => {
                let openai = ("server_error", "timeout");
                Failure::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", openai, "The request timed out")
            }
        })
    }

    /// Whether it is a success with an answer in it.
    pub(super) fn answers(self) -> bool {
        matches!(self, Marker::Refusal | Marker::MaxTokens)
    }
}
