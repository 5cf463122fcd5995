//! How providers tell a quota in the headers of their answers: what a bucket allows, what is left in it, and when it is full
//! again.
//!
//! A *dialect* is one provider's way to say so: a [`ReadQuota`], with a file and a table of names of its own. By default
//! [`Detect`] reads them all, answer by answer, so nobody has to say which provider answers, nor when a gateway begins to speak
//! another dialect half-way through a run. Nothing is kept here: what is absent from an answer is `None`, which means
//! *unchanged*, never zero and never full.
//!
//! Which API an org *speaks* is another question: [`org::Dialect`](crate::org::Dialect) says how its key is sent and where. A
//! gateway may speak OpenAI's API and tell quotas in anybody's headers.
//!
//! ```
//! use http::HeaderMap;
//! use std::time::{Duration, SystemTime};
//! use tower_quota::dialect::{Detect, ReadQuota, Resource};
//!
//! let mut headers = HeaderMap::new();
//! headers.insert("x-ratelimit-limit-tokens", "150000".parse()?);
//! headers.insert("x-ratelimit-remaining-tokens", "149984".parse()?);
//! headers.insert("x-ratelimit-reset-tokens", "6m0s".parse()?);
//! let readings = Detect.read(&headers, Some(SystemTime::now()));
//! let tokens = readings.get(Resource::Tokens).expect("three headers of it are there");
//! assert_eq!(tokens.remaining, Some(149_984.0));
//! assert_eq!(tokens.reset, Some(Duration::from_secs(360)));
//! assert_eq!(readings.get(Resource::Requests), None);
//! # Ok::<(), http::header::InvalidHeaderValue>(())
//! ```
//!
//! # What is read
//!
//! | dialect | headers | of |
//! |---|---|---|
//! | [`Anthropic`] | `anthropic-ratelimit-<of>-{limit,remaining,reset}` | `requests`, `input-tokens`, `output-tokens`, `tokens` |
//! | [`OpenAi`] | `x-ratelimit-{limit,remaining,reset}-<of>` | the same, and `project-tokens` as tokens |
//! | [`Azure`] | OpenAI's, and `x-ratelimit-renewalperiod-<of>`, `x-rate-limit-{limit,remaining,reset}-<of>` | the same |
//! | [`Plain`] | `x-ratelimit-{remaining,reset}`, `ratelimit-{remaining,reset}` | requests |
#![cfg_attr(
    feature = "ietf",
    doc = "| [`Ietf`] | `RateLimit`, `RateLimit-Policy`, `RateLimit-{Limit,Remaining,Reset}` (feature `ietf`) | requests |"
)]
//! | [`NoHeaders`] | none | |
//! | [`Detect`] | all of the above | |
//!
//! A limit is per minute. That of [`Plain`] headers is not read, since nobody knows per what it is.
//!
//! A number that is negative, not finite or no number is unknown, and so are a limit of 0 and a reset that is zero or past.
//! Resets have any of the [forms of a wait](crate::hint::parse_span). The waits of refusals (`Retry-After`, `retry-after-ms`,
//! `x-ms-retry-after-ms`) are no quota: [`hint`] reads them, whatever the dialect.
//!
//! # Where an answer says several things of one resource
//!
//! In several dialects, in several policies, or in several lines of one header: the most restrictive counts. That is
//! [`Reading::stricter`]: what leaves least counts, and what it does not say is taken from the others. So a gateway's own
//! quota counts while it is the tighter one, and the provider's behind it while that is.
//!
//! # A provider of your own
//!
//! One type, and a table of names. Groq sends OpenAI's names, but its requests are counted per day:
//!
//! ```
//! use http::HeaderMap;
//! use std::time::SystemTime;
//! use tower_quota::{dialect::{OpenAi, ReadQuota, Readings, Resource}, org::Org, quota::QuotaHeaderLayer};
//!
//! struct Groq;
//!
//! impl ReadQuota for Groq {
//!     fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
//!         let mut readings = OpenAi.read(headers, wall);
//!         let requests = readings.entry(Resource::Requests);
//!         requests.limit = requests.limit.map(|per_day| per_day / (24.0 * 60.0));
//!         readings
//!     }
//! }
//!
//! let mut headers = HeaderMap::new();
//! headers.insert("x-ratelimit-limit-requests", "14400".parse()?);
//! let requests = Groq.read(&headers, None).get(Resource::Requests);
//! assert_eq!(requests.and_then(|requests| requests.limit), Some(10.0));
//!
//! let layer = QuotaHeaderLayer::new(&Org::new("research")).dialect(Groq);
//! # drop(layer);
//! # Ok::<(), http::header::InvalidHeaderValue>(())
//! ```
//!
//! Headers of your own are read with [`amount`] and [`reset`] into [`Readings::entry`]. A pair of dialects is one too, so
//! `(Detect, Mine)` adds yours to all the others.

mod anthropic;
mod azure;
mod detect;
#[cfg(feature = "ietf")]
mod ietf;
mod openai;
mod plain;
mod reading;

#[cfg(feature = "ietf")]
pub use self::ietf::Ietf;
pub use self::{
    anthropic::Anthropic,
    azure::Azure,
    detect::Detect,
    openai::OpenAi,
    plain::Plain,
    reading::{Reading, Readings, Resource},
};

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::hint;

/// A provider's way to tell quotas in headers. See [the module](self).
pub trait ReadQuota: Send + Sync {
    /// What these headers say of each resource.
    ///
    /// It must not panic, whatever the provider sends. `wall` is for resets that are a moment, where the answer has no `Date`;
    /// `None` means that nobody asks for resets, which cost a date each. Pass it on to [`reset`].
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings;
}

/// Reads nothing: for a provider that sends no quota headers, or such as are not to be believed. Limits are then found by
/// refusals alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHeaders;

impl ReadQuota for NoHeaders {
    fn read(&self, _: &HeaderMap, _: Option<SystemTime>) -> Readings {
        Readings::default()
    }
}

/// The same one, shared.
impl<D: ReadQuota + ?Sized> ReadQuota for Arc<D> {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        (**self).read(headers, wall)
    }
}

/// Both: the [stricter](Reading::stricter) of what each reads.
impl<A: ReadQuota, B: ReadQuota> ReadQuota for (A, B) {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        self.0.read(headers, wall).stricter(self.1.read(headers, wall))
    }
}

static ANTHROPIC_ORGANIZATION: HeaderName = HeaderName::from_static("anthropic-organization-id");
static OPENAI_ORGANIZATION: HeaderName = HeaderName::from_static("openai-organization");

/// The organisation that the provider says it charged: `anthropic-organization-id`, then
/// `openai-organization`. Two keys with one organisation share one quota.
///
/// ```
/// let mut headers = http::HeaderMap::new();
/// headers.insert("openai-organization", "acme".parse()?);
/// assert_eq!(tower_quota::dialect::organisation(&headers), Some("acme"));
/// # Ok::<(), http::header::InvalidHeaderValue>(())
/// ```
#[must_use]
pub fn organisation(headers: &HeaderMap) -> Option<&str> {
    let named = |name| headers.get(name).and_then(text).filter(|id| !id.is_empty());
    named(&ANTHROPIC_ORGANIZATION).or_else(|| named(&OPENAI_ORGANIZATION))
}

/// A number as quota headers have it: finite and not negative, else `None`.
#[must_use]
pub fn amount(value: &HeaderValue) -> Option<f64> {
    digits(value.as_bytes()).or_else(|| number(value))
}

#[cold]
fn number(value: &HeaderValue) -> Option<f64> {
    let number: f64 = text(value)?.parse().ok()?;
    // A negative zero is a zero.
    (number.is_finite() && number >= 0.0).then_some(number.abs())
}

/// Digits alone, as nearly all numbers are here. A double holds up to 15 of them exactly.
fn digits(digits: &[u8]) -> Option<f64> {
    if !(1..=15).contains(&digits.len()) {
        return None;
    }
    let mut number = 0;
    for digit in digits {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        number = number * 10 + i64::from(digit);
    }
    Some(number as f64)
}

/// A reset as quota headers have it, in any of the [forms of a wait](hint::parse_span): how long it is, from the answer's
/// `Date` on or, without one, from `wall`. `None` where it is zero, past or unreadable, or where `wall` says that nobody asks.
#[must_use]
pub fn reset(headers: &HeaderMap, value: &HeaderValue, wall: Option<SystemTime>) -> Option<Duration> {
    hint::parse_span(text(value)?, hint::reference(headers, wall?))
}

/// The longest wait that these headers of a refusal name by their resets: those of buckets that are exhausted.
pub(crate) fn exhausted(headers: &HeaderMap, wall: SystemTime) -> Option<Duration> {
    let readings = Detect.read(headers, Some(wall));
    let readings = Resource::ALL.into_iter().filter_map(|resource| readings.get(resource));
    let resets = readings.filter(|reading| reading.remaining == Some(0.0)).filter_map(|reading| reading.reset);
    let longest = resets.max().max(azure::refused(headers, wall));
    #[cfg(feature = "ietf")]
    let longest = longest.max(ietf::exhausted(headers));
    longest
}

fn text(value: &HeaderValue) -> Option<&str> {
    value.to_str().ok().map(str::trim)
}

/// What a header has for its value.
#[derive(Clone, Copy)]
enum Figure {
    Limit,
    Remaining,
    Reset,
}

impl Figure {
    fn named(name: &[u8]) -> Option<Self> {
        // Lengths first: whole words are compared with one of their length only.
        match name.len() {
            5 if name == b"limit" => Some(Figure::Limit),
            9 if name == b"remaining" => Some(Figure::Remaining),
            5 if name == b"reset" => Some(Figure::Reset),
            _ => None,
        }
    }
}

/// The answer whose resets are read, or are not.
#[derive(Clone, Copy)]
struct Clock<'a> {
    headers: &'a HeaderMap,
    wall: Option<SystemTime>,
}

impl Reading {
    /// Reads one header more. Of several lines the most restrictive counts.
    // A tenth of the work of reading an answer's headers was to call it.
    #[inline(always)]
    fn note(&mut self, figure: Figure, value: &HeaderValue, clock: Clock<'_>) {
        match figure {
            Figure::Limit => self.limit = least(self.limit, above_zero(amount(value))),
            Figure::Remaining => self.remaining = least(self.remaining, amount(value)),
            Figure::Reset if clock.wall.is_some() => self.note_reset(value, clock),
            Figure::Reset => {}
        }
    }

    /// Most often nobody asks.
    #[cold]
    fn note_reset(&mut self, value: &HeaderValue, clock: Clock<'_>) {
        self.reset = self.reset.max(reset(clock.headers, value, clock.wall));
    }
}

/// The lesser of what is known.
fn least(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        _ => one.or(other),
    }
}

/// `None` where it makes no sense.
fn per_minute(limit: f64, seconds: f64) -> Option<f64> {
    above_zero(Some(limit * 60.0 / seconds).filter(|limit| limit.is_finite()))
}

fn above_zero(number: Option<f64>) -> Option<f64> {
    number.filter(|number| *number > 0.0)
}

#[cfg(test)]
mod tests;
