//! OpenAI's headers, and those of the many that copy them.

use std::time::SystemTime;

use http::{HeaderMap, HeaderValue};

use super::{Clock, Figure, ReadQuota, Reading, Readings, Resource};

/// `x-ratelimit-{limit,remaining,reset}-{requests,tokens,project-tokens}`, and `-{input,output}-tokens` as some that copy them
/// send.
///
/// Limits are per minute, resets are Go durations such as `6m0s`
/// ([rate limits](https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers)). A project's own limit on tokens
/// is a bound on the same calls, so it counts where it leaves less.
///
/// Some copy the names and not what they mean: Groq's `requests` are per day. Such a provider wants a
/// [dialect of its own](super#a-provider-of-your-own).
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenAi;

impl ReadQuota for OpenAi {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let mut said = Said::default();
        for (name, value) in headers {
            if let Some(name) = name.as_str().strip_prefix("x-ratelimit-") {
                said.note(name, value, Clock { headers, wall });
            }
        }
        said.read()
    }
}

/// What was read so far.
#[derive(Default)]
pub(super) struct Said {
    readings: Readings,
    /// A project's tokens are another bucket than its organisation's.
    project: Option<Reading>,
}

impl Said {
    /// Reads one header more, by its name after the prefix.
    pub(super) fn note(&mut self, name: &str, value: &HeaderValue, clock: Clock<'_>) {
        let (figure, of) = if let Some(of) = name.strip_prefix("limit-") {
            (Figure::Limit, of)
        } else if let Some(of) = name.strip_prefix("remaining-") {
            (Figure::Remaining, of)
        } else if let Some(of) = name.strip_prefix("reset-") {
            (Figure::Reset, of)
        } else {
            return;
        };
        if let Some(resource) = Resource::named(of) {
            self.readings.entry(resource).note(figure, value, clock);
        } else if of == "project-tokens" {
            self.project.get_or_insert_default().note(figure, value, clock);
        }
    }

    pub(super) fn read(mut self) -> Readings {
        if let Some(project) = self.project {
            let tokens = self.readings.entry(Resource::Tokens);
            *tokens = tokens.stricter(project);
        }
        self.readings
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dialect::tests::{Of, every_name_has_its_own_place, headers};

    /// What Azure sends too.
    pub(crate) const NAMES: [(&str, Of); 20] = [
        ("x-ratelimit-limit-requests", Of::Limit(Resource::Requests)),
        ("x-ratelimit-remaining-requests", Of::Remaining(Resource::Requests)),
        ("x-ratelimit-reset-requests", Of::Reset(Resource::Requests)),
        ("x-ratelimit-limit-tokens", Of::Limit(Resource::Tokens)),
        ("x-ratelimit-remaining-tokens", Of::Remaining(Resource::Tokens)),
        ("x-ratelimit-reset-tokens", Of::Reset(Resource::Tokens)),
        ("x-ratelimit-limit-project-tokens", Of::Limit(Resource::Tokens)),
        ("x-ratelimit-remaining-project-tokens", Of::Remaining(Resource::Tokens)),
        ("x-ratelimit-reset-project-tokens", Of::Reset(Resource::Tokens)),
        ("x-ratelimit-limit-input-tokens", Of::Limit(Resource::InputTokens)),
        ("x-ratelimit-remaining-input-tokens", Of::Remaining(Resource::InputTokens)),
        ("x-ratelimit-reset-input-tokens", Of::Reset(Resource::InputTokens)),
        ("x-ratelimit-limit-output-tokens", Of::Limit(Resource::OutputTokens)),
        ("x-ratelimit-remaining-output-tokens", Of::Remaining(Resource::OutputTokens)),
        ("x-ratelimit-reset-output-tokens", Of::Reset(Resource::OutputTokens)),
        ("x-ratelimit-limit-images", Of::Nothing),
        ("x-ratelimit-used-tokens", Of::Nothing),
        ("x-ratelimit-limit-tokens-1h", Of::Nothing),
        ("x-ratelimit-", Of::Nothing),
        ("anthropic-ratelimit-tokens-limit", Of::Nothing),
    ];

    #[test]
    fn every_header_goes_to_its_own_place() {
        every_name_has_its_own_place(&OpenAi, &NAMES);
        every_name_has_its_own_place(
            &OpenAi,
            &[
                ("x-ratelimit-limit", Of::Nothing),
                ("x-ratelimit-remaining", Of::Nothing),
                ("x-ratelimit-renewalperiod-requests", Of::Nothing),
                ("x-rate-limit-remaining-requests", Of::Nothing),
                ("ratelimit-remaining", Of::Nothing),
            ],
        );
    }

    #[test]
    fn of_a_project_and_its_organisation_the_tighter_counts() {
        // What remains of either, and the limit that counts.
        for (own, project, limit) in [(5, 6, 150_000.0), (5, 5, 30_000.0), (6, 5, 30_000.0)] {
            let answer = headers(&format!(
                "x-ratelimit-limit-tokens: 150000\nx-ratelimit-remaining-tokens: {own}\n\
                 x-ratelimit-limit-project-tokens: 30000\nx-ratelimit-remaining-project-tokens: {project}"
            ));
            let tokens = OpenAi.read(&answer, None).get(Resource::Tokens).expect("four headers of it are there");
            assert_eq!((tokens.limit, tokens.remaining), (Some(limit), Some(5.0)), "{own}, {project}");
        }
    }
}
