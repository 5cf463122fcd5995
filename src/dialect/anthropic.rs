//! Anthropic's headers.

use std::time::SystemTime;

use http::HeaderMap;

use super::{Clock, Figure, ReadQuota, Readings, Resource};

/// `anthropic-ratelimit-{requests,input-tokens,output-tokens,tokens}-{limit,remaining,reset}`.
///
/// Limits are per minute, resets are RFC 3339, and what remains of tokens is rounded to the nearest thousand
/// ([rate limits](https://platform.claude.com/docs/en/api/rate-limits#response-headers)).
///
/// Not read: `anthropic-priority-*`, an allotment beyond which calls go on in the standard tier; and
/// `anthropic-ratelimit-unified-*`, the shares of a subscription's windows, which have no amounts. What refuses by those names
/// its wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct Anthropic;

impl ReadQuota for Anthropic {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let mut readings = Readings::default();
        for (name, value) in headers {
            if let Some((resource, figure)) = place(name.as_str()) {
                readings.entry(resource).note(figure, value, Clock { headers, wall });
            }
        }
        readings
    }
}

/// Where a header belongs.
// It is called for every header of every answer.
#[inline(always)]
pub(super) fn place(name: &str) -> Option<(Resource, Figure)> {
    // By the first letter, not by looking for a dash: this is done a dozen times in every answer.
    let name = name.as_bytes().strip_prefix(b"anthropic-ratelimit-")?;
    let (resource, figure) = match name.first()? {
        b'r' => (Resource::Requests, name.strip_prefix(b"requests-")?),
        b'i' => (Resource::InputTokens, name.strip_prefix(b"input-tokens-")?),
        b'o' => (Resource::OutputTokens, name.strip_prefix(b"output-tokens-")?),
        _ => (Resource::Tokens, name.strip_prefix(b"tokens-")?),
    };
    Some((resource, Figure::named(figure)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{Of, every_name_has_its_own_place};

    #[test]
    fn every_header_goes_to_its_own_place() {
        every_name_has_its_own_place(
            &Anthropic,
            &[
                ("anthropic-ratelimit-requests-limit", Of::Limit(Resource::Requests)),
                ("anthropic-ratelimit-requests-remaining", Of::Remaining(Resource::Requests)),
                ("anthropic-ratelimit-requests-reset", Of::Reset(Resource::Requests)),
                ("anthropic-ratelimit-input-tokens-limit", Of::Limit(Resource::InputTokens)),
                ("anthropic-ratelimit-input-tokens-remaining", Of::Remaining(Resource::InputTokens)),
                ("anthropic-ratelimit-input-tokens-reset", Of::Reset(Resource::InputTokens)),
                ("anthropic-ratelimit-output-tokens-limit", Of::Limit(Resource::OutputTokens)),
                ("anthropic-ratelimit-output-tokens-remaining", Of::Remaining(Resource::OutputTokens)),
                ("anthropic-ratelimit-output-tokens-reset", Of::Reset(Resource::OutputTokens)),
                ("anthropic-ratelimit-tokens-limit", Of::Limit(Resource::Tokens)),
                ("anthropic-ratelimit-tokens-remaining", Of::Remaining(Resource::Tokens)),
                ("anthropic-ratelimit-tokens-reset", Of::Reset(Resource::Tokens)),
                ("anthropic-ratelimit-tokens-used", Of::Nothing),
                ("anthropic-ratelimit-limit", Of::Nothing),
                ("anthropic-ratelimit-", Of::Nothing),
                ("anthropic-ratelimit-cached-tokens-limit", Of::Nothing),
                ("anthropic-ratelimit-unified-reset", Of::Nothing),
                ("anthropic-ratelimit-unified-5h-reset", Of::Nothing),
                ("anthropic-priority-input-tokens-limit", Of::Nothing),
                ("x-anthropic-ratelimit-tokens-limit", Of::Nothing),
                ("x-ratelimit-limit-requests", Of::Nothing),
                ("ratelimit-remaining", Of::Nothing),
            ],
        );
    }
}
