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
use http::header::{HeaderMap, HeaderName};
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

/// The headers of one bucket.
struct Names {
    resource: Resource,
    limit: HeaderName,
    remaining: HeaderName,
    reset: HeaderName,
}

static NAMES: [Names; 6] = [
    Names {
        resource: Resource::Requests,
        limit: HeaderName::from_static("anthropic-ratelimit-requests-limit"),
        remaining: HeaderName::from_static("anthropic-ratelimit-requests-remaining"),
        reset: HeaderName::from_static("anthropic-ratelimit-requests-reset"),
    },
    Names {
        resource: Resource::InputTokens,
        limit: HeaderName::from_static("anthropic-ratelimit-input-tokens-limit"),
        remaining: HeaderName::from_static("anthropic-ratelimit-input-tokens-remaining"),
        reset: HeaderName::from_static("anthropic-ratelimit-input-tokens-reset"),
    },
    Names {
        resource: Resource::OutputTokens,
        limit: HeaderName::from_static("anthropic-ratelimit-output-tokens-limit"),
        remaining: HeaderName::from_static("anthropic-ratelimit-output-tokens-remaining"),
        reset: HeaderName::from_static("anthropic-ratelimit-output-tokens-reset"),
    },
    Names {
        resource: Resource::Tokens,
        limit: HeaderName::from_static("anthropic-ratelimit-tokens-limit"),
        remaining: HeaderName::from_static("anthropic-ratelimit-tokens-remaining"),
        reset: HeaderName::from_static("anthropic-ratelimit-tokens-reset"),
    },
    Names {
        resource: Resource::Requests,
        limit: HeaderName::from_static("x-ratelimit-limit-requests"),
        remaining: HeaderName::from_static("x-ratelimit-remaining-requests"),
        reset: HeaderName::from_static("x-ratelimit-reset-requests"),
    },
    Names {
        resource: Resource::Tokens,
        limit: HeaderName::from_static("x-ratelimit-limit-tokens"),
        remaining: HeaderName::from_static("x-ratelimit-remaining-tokens"),
        reset: HeaderName::from_static("x-ratelimit-reset-tokens"),
    },
];

static ANTHROPIC_ORGANIZATION: HeaderName = HeaderName::from_static("anthropic-organization-id");
static OPENAI_ORGANIZATION: HeaderName = HeaderName::from_static("openai-organization");

/// Reads both dialects at once. `wall` is used only where the answer has no `Date` and a reset is a moment.
///
/// Never panics; allocates only for a reset with an offset such as `+02:00`, and reads no date where no reset
/// is announced. Should an answer speak both dialects, the first one that names a figure counts.
#[must_use]
pub fn read(headers: &HeaderMap, wall: SystemTime) -> Readings {
    let mut readings = Readings::default();
    let mut reference = None;
    for names in &NAMES {
        let said = Reading {
            limit: amount(headers, &names.limit),
            remaining: amount(headers, &names.remaining),
            reset: text(headers, &names.reset).and_then(|value| {
                let reference = *reference.get_or_insert_with(|| hint::reference(headers, wall));
                hint::parse_span(value, reference)
            }),
        };
        if said == Reading::default() {
            continue;
        }
        let reading = readings.0[names.resource.index()].get_or_insert_default();
        reading.limit = reading.limit.or(said.limit);
        reading.remaining = reading.remaining.or(said.remaining);
        reading.reset = reading.reset.or(said.reset);
    }
    readings
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
    let named = |name| text(headers, name).filter(|id| !id.is_empty());
    named(&ANTHROPIC_ORGANIZATION).or_else(|| named(&OPENAI_ORGANIZATION))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok().map(str::trim)
}

fn amount(headers: &HeaderMap, name: &HeaderName) -> Option<f64> {
    let number: f64 = text(headers, name)?.parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number)
}
