//! The quota headers of an answer: what the provider says a bucket holds, and when it is full again.
//!
//! Two dialects are read at once: `anthropic-ratelimit-<resource>-{limit,remaining,reset}` and
//! `x-ratelimit-{limit,remaining,reset}-<resource>` (OpenAI and the many that copy it). Nothing is kept here:
//! what is absent from an answer is `None`, which means *unchanged*, never zero and never full.
//!
//! ```
//! use http::HeaderMap;
//! use std::time::{Duration, SystemTime};
//! use tower_quota::quota::dialect::{self, Resource};
//!
//! let mut headers = HeaderMap::new();
//! headers.insert("x-ratelimit-limit-tokens", "150000".parse()?);
//! headers.insert("x-ratelimit-remaining-tokens", "149984".parse()?);
//! headers.insert("x-ratelimit-reset-tokens", "6m0s".parse()?);
//! let readings = dialect::read(&headers, SystemTime::now());
//! let tokens = readings.get(Resource::Tokens).expect("three headers of it are there");
//! assert_eq!(tokens.remaining, Some(149_984.0));
//! assert_eq!(tokens.reset, Some(Duration::from_secs(360)));
//! assert_eq!(readings.get(Resource::Requests), None);
//! # Ok::<(), http::header::InvalidHeaderValue>(())
//! ```

use crate::hint;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use std::time::{Duration, SystemTime};

/// What a provider meters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Calls.
    Requests,
    /// Tokens of the prompt.
    InputTokens,
    /// Tokens of the answer.
    OutputTokens,
    /// Tokens of both, counted together.
    Tokens,
}

impl Resource {
    /// Every resource, in the order of [`Resource::index`].
    pub const ALL: [Self; 4] = [Self::Requests, Self::InputTokens, Self::OutputTokens, Self::Tokens];

    /// Those that are counted in tokens.
    pub(crate) const TOKENS: [Self; 3] = [Self::InputTokens, Self::OutputTokens, Self::Tokens];

    /// The place of this resource in [`Resource::ALL`], for tables by resource.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// What one answer says of one resource. A field is `None` where the answer says nothing, or nothing that
/// makes sense (a negative or unreadable number: Azure sends `-1` for "unknown").
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// What the provider allows per minute.
    pub limit: Option<f64>,
    /// What may still be spent now.
    pub remaining: Option<f64>,
    /// How long until the bucket is full again, counted from the answer's `Date`. Above zero and not capped.
    pub reset: Option<Duration>,
}

/// What one answer says of every resource. `None` means that the answer did not mention it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Readings([Option<Reading>; Resource::ALL.len()]);

impl Readings {
    /// What the answer says of this resource.
    #[must_use]
    pub fn get(&self, resource: Resource) -> Option<Reading> {
        self.0[resource.index()]
    }

    /// Whether the answer says nothing about any resource.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }
}

static ANTHROPIC_ORGANIZATION: HeaderName = HeaderName::from_static("anthropic-organization-id");
static OPENAI_ORGANIZATION: HeaderName = HeaderName::from_static("openai-organization");

/// Reads both dialects at once. `wall` is used only where the answer has no `Date` and a reset is a moment.
///
/// Never panics, allocates nothing, and reads no date where no reset is announced. Should an answer speak both
/// dialects, Anthropic's figure counts where both name one; of a repeated header the first readable line counts.
#[must_use]
pub fn read(headers: &HeaderMap, wall: SystemTime) -> Readings {
    let mut reference = None;
    pass(headers, |value| {
        let reference = *reference.get_or_insert_with(|| hint::reference(headers, wall));
        hint::parse_span(text(value)?, reference)
    })
}

/// The same without the resets, which cost a date each.
pub(crate) fn read_amounts(headers: &HeaderMap) -> Readings {
    pass(headers, |_| None)
}

/// One pass over the headers: cheaper than a look-up for each of the names.
fn pass(headers: &HeaderMap, mut reset: impl FnMut(&HeaderValue) -> Option<Duration>) -> Readings {
    let mut anthropic = Readings::default();
    let mut openai = Readings::default();
    for (name, value) in headers {
        let (readings, place) = if let Some(name) = name.as_str().strip_prefix("anthropic-ratelimit-") {
            (&mut anthropic, anthropic_place(name))
        } else if let Some(name) = name.as_str().strip_prefix("x-ratelimit-") {
            (&mut openai, openai_place(name))
        } else {
            continue;
        };
        let Some((resource, field)) = place else { continue };
        let reading = readings.0[resource.index()].get_or_insert_default();
        match field {
            Field::Limit => reading.limit = reading.limit.or_else(|| amount(value)),
            Field::Remaining => reading.remaining = reading.remaining.or_else(|| amount(value)),
            Field::Reset => reading.reset = reading.reset.or_else(|| reset(value)),
        }
    }
    for (ours, theirs) in anthropic.0.iter_mut().zip(openai.0) {
        let (Some(ours), Some(theirs)) = (ours.as_mut(), theirs) else {
            *ours = ours.or(theirs);
            continue;
        };
        ours.limit = ours.limit.or(theirs.limit);
        ours.remaining = ours.remaining.or(theirs.remaining);
        ours.reset = ours.reset.or(theirs.reset);
    }
    for reading in &mut anthropic.0 {
        *reading = reading.filter(|reading| *reading != Reading::default());
    }
    anthropic
}

enum Field {
    Limit,
    Remaining,
    Reset,
}

fn anthropic_place(name: &str) -> Option<(Resource, Field)> {
    Some(match name {
        "requests-limit" => (Resource::Requests, Field::Limit),
        "requests-remaining" => (Resource::Requests, Field::Remaining),
        "requests-reset" => (Resource::Requests, Field::Reset),
        "input-tokens-limit" => (Resource::InputTokens, Field::Limit),
        "input-tokens-remaining" => (Resource::InputTokens, Field::Remaining),
        "input-tokens-reset" => (Resource::InputTokens, Field::Reset),
        "output-tokens-limit" => (Resource::OutputTokens, Field::Limit),
        "output-tokens-remaining" => (Resource::OutputTokens, Field::Remaining),
        "output-tokens-reset" => (Resource::OutputTokens, Field::Reset),
        "tokens-limit" => (Resource::Tokens, Field::Limit),
        "tokens-remaining" => (Resource::Tokens, Field::Remaining),
        "tokens-reset" => (Resource::Tokens, Field::Reset),
        _ => return None,
    })
}

fn openai_place(name: &str) -> Option<(Resource, Field)> {
    Some(match name {
        "limit-requests" => (Resource::Requests, Field::Limit),
        "remaining-requests" => (Resource::Requests, Field::Remaining),
        "reset-requests" => (Resource::Requests, Field::Reset),
        "limit-tokens" => (Resource::Tokens, Field::Limit),
        "remaining-tokens" => (Resource::Tokens, Field::Remaining),
        "reset-tokens" => (Resource::Tokens, Field::Reset),
        _ => return None,
    })
}

/// The organisation that the provider says it charged: `anthropic-organization-id`, then
/// `openai-organization`. Two keys with one organisation share one quota.
///
/// ```
/// let mut headers = http::HeaderMap::new();
/// headers.insert("openai-organization", "acme".parse()?);
/// assert_eq!(tower_quota::quota::dialect::organisation(&headers), Some("acme"));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
#[must_use]
pub fn organisation(headers: &HeaderMap) -> Option<&str> {
    let named = |name| headers.get(name).and_then(text).filter(|id| !id.is_empty());
    named(&ANTHROPIC_ORGANIZATION).or_else(|| named(&OPENAI_ORGANIZATION))
}

fn text(value: &HeaderValue) -> Option<&str> {
    value.to_str().ok().map(str::trim)
}

fn amount(value: &HeaderValue) -> Option<f64> {
    // Digits alone, as nearly all are; a double holds up to 15 of them exactly.
    let digits = value.as_bytes();
    if (1..=15).contains(&digits.len()) {
        let mut number = 0;
        if digits.iter().all(|digit| {
            number = number * 10 + u64::from(digit.wrapping_sub(b'0'));
            digit.is_ascii_digit()
        }) {
            return Some(number as f64);
        }
    }
    let number: f64 = text(value)?.parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                let name = HeaderName::from_static(name);
                (name, HeaderValue::from_static(value))
            })
            .collect()
    }

    #[test]
    fn every_header_goes_to_its_own_place() {
        // Each header alone, so that a swapped name cannot hide behind another.
        let mut table = Vec::new();
        for (resource, name) in [
            (Resource::Requests, "requests"),
            (Resource::InputTokens, "input-tokens"),
            (Resource::OutputTokens, "output-tokens"),
            (Resource::Tokens, "tokens"),
        ] {
            for field in ["limit", "remaining", "reset"] {
                let header = format!("anthropic-ratelimit-{name}-{field}");
                table.push((header, resource, field));
            }
        }
        for (resource, name) in [(Resource::Requests, "requests"), (Resource::Tokens, "tokens")] {
            for field in ["limit", "remaining", "reset"] {
                table.push((format!("x-ratelimit-{field}-{name}"), resource, field));
            }
        }
        for (header, resource, field) in table {
            let mut answer = HeaderMap::new();
            let name: HeaderName = header.parse().expect("valid");
            answer.insert(name, HeaderValue::from_static("17"));
            let readings = read(&answer, WALL);
            let expected = Reading {
                limit: (field == "limit").then_some(17.0),
                remaining: (field == "remaining").then_some(17.0),
                reset: (field == "reset").then_some(Duration::from_secs(17)),
            };
            for other in Resource::ALL {
                let expected = (other == resource).then_some(expected);
                assert_eq!(readings.get(other), expected, "{header} {other:?}");
            }
        }
    }

    #[test]
    fn b97_input_is_input_and_output_is_output() {
        let readings = read(
            &headers(&[
                ("anthropic-ratelimit-input-tokens-limit", "8000000"),
                ("anthropic-ratelimit-output-tokens-limit", "800000"),
            ]),
            WALL,
        );
        let limit = |resource| readings.get(resource).and_then(|reading| reading.limit);
        assert_eq!(limit(Resource::InputTokens), Some(8_000_000.0));
        assert_eq!(limit(Resource::OutputTokens), Some(800_000.0));
        assert_eq!(limit(Resource::Tokens), None);
    }

    #[test]
    fn what_makes_no_sense_is_unknown() {
        for value in ["-1", "-0.5", "", "many", "NaN", "inf", "1e400", "8,000"] {
            let answer = headers(&[
                ("x-ratelimit-limit-requests", value),
                ("x-ratelimit-remaining-requests", value),
                ("x-ratelimit-reset-requests", value),
            ]);
            assert!(read(&answer, WALL).is_empty(), "{value:?}");
        }
        let answer = headers(&[("x-ratelimit-remaining-requests", "-1"), ("x-ratelimit-limit-requests", " 60 ")]);
        let reading = read(&answer, WALL).get(Resource::Requests).expect("a limit");
        assert_eq!((reading.limit, reading.remaining), (Some(60.0), None));
    }

    #[test]
    fn of_a_repeated_header_the_first_line_that_can_be_read_counts() {
        let lines = ["-1", "many", "7", "8"].map(|value| ("x-ratelimit-remaining-requests", value));
        let reading = read(&headers(&lines), WALL).get(Resource::Requests).expect("a figure");
        assert_eq!(reading.remaining, Some(7.0));
    }

    proptest! {
        #[test]
        fn digits_are_read_as_any_number_is(
            value in prop_oneof![
                "[0-9]{1,40}",
                "0{0,20}[0-9]{1,17}",
                "[ \t]{0,2}[+-]?[0-9]{0,17}[.]?[0-9]{0,3}([eE][+-]?[0-9]{0,3})?[ \t]{0,2}",
            ].prop_map(String::into_bytes).boxed().prop_union(proptest::collection::vec(32u8..=255, 0..18).boxed()),
        ) {
            let Ok(header) = HeaderValue::from_bytes(&value) else { return Ok(()) };
            let plain = header.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
            prop_assert_eq!(amount(&header), plain.filter(|number| number.is_finite() && *number >= 0.0));
        }
    }

    #[test]
    fn zero_is_a_figure_and_a_reset_of_zero_is_none() {
        let answer = headers(&[
            ("x-ratelimit-limit-requests", "0"),
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "0"),
        ]);
        let reading = read(&answer, WALL).get(Resource::Requests).expect("figures");
        assert_eq!((reading.limit, reading.remaining), (Some(0.0), Some(0.0)));
        assert_eq!(reading.reset, None);
    }

    #[test]
    fn two_dialects_in_one_answer_complete_each_other() {
        let answer = headers(&[
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "5"),
            ("x-ratelimit-reset-requests", "9"),
            ("anthropic-ratelimit-requests-remaining", "7"),
            ("anthropic-ratelimit-tokens-limit", "1"),
            ("anthropic-ratelimit-tokens-reset", "2"),
            ("x-ratelimit-limit-tokens", "3"),
            ("x-ratelimit-remaining-tokens", "4"),
            ("x-ratelimit-reset-tokens", "5"),
        ]);
        let readings = read(&answer, WALL);
        let expected = |limit, remaining, reset| {
            Some(Reading { limit: Some(limit), remaining: Some(remaining), reset: Some(Duration::from_secs(reset)) })
        };
        assert_eq!(readings.get(Resource::Requests), expected(60.0, 7.0, 9));
        assert_eq!(readings.get(Resource::Tokens), expected(1.0, 4.0, 2));
    }

    #[test]
    fn an_index_is_the_place_in_the_list() {
        for (place, resource) in Resource::ALL.into_iter().enumerate() {
            assert_eq!(resource.index(), place);
        }
    }

    #[test]
    fn the_organisation_is_named_by_either_dialect() {
        let both = [("openai-organization", "o"), ("anthropic-organization-id", "a")];
        assert_eq!(organisation(&headers(&both)), Some("a"));
        assert_eq!(organisation(&headers(&both[..1])), Some("o"));
        assert_eq!(organisation(&headers(&both[1..])), Some("a"));
        assert_eq!(organisation(&HeaderMap::new()), None);
        let empty = [("openai-organization", "o"), ("anthropic-organization-id", " ")];
        assert_eq!(organisation(&headers(&empty)), Some("o"));
    }
}
