//! Every way a provider says "not before": one parser.
//!
//! A refusal may name the wait in a header (`retry-after-ms`, `x-ms-retry-after-ms`, `Retry-After`,
//! `grpc-retry-pushback-ms`), only by the resets of its buckets (`anthropic-ratelimit-*-reset`, `x-ratelimit-reset-*`, and with the feature
//! `ietf` the IETF `RateLimit` field), or only in the words of its body. The value may be seconds, a Go
//! duration, any of the HTTP dates, RFC 3339 or a unix epoch. This module reads them all.
//!
//! All functions are pure: the wall clock is an argument. None of them panics, whatever the provider sends.
//! A wait of zero, a moment that is past and a value that cannot be read all mean the same, *no useful
//! hint*, and give `None`: the caller's own backoff goes on growing, and a `Retry-After: 0` never resets it.
//! What is returned is therefore above zero and at most `ceiling`; the caller who must show what the provider
//! said, however long, asks [`advertised`].
//!
//! # Precedence
//!
//! 1. An explicit wait ([`retry_after`]) wins over resets.
//! 2. Without one, the longest reset among the *exhausted* buckets ([`reset`]), over all [dialects](crate::dialect) at once.
//! 3. What the body says ([`from_text`]) can only make a wait longer ([`combine`]).
//!
//! ```
//! use http::HeaderMap;
//! use std::time::{Duration, SystemTime};
//! use tower_quota::hint;
//!
//! let ceiling = Duration::from_secs(300);
//! let mut headers = HeaderMap::new();
//! headers.insert("x-ratelimit-remaining-requests", "4999".parse()?);
//! headers.insert("x-ratelimit-reset-requests", "120ms".parse()?);
//! headers.insert("x-ratelimit-remaining-tokens", "0".parse()?);
//! headers.insert("x-ratelimit-reset-tokens", "41s".parse()?);
//! let header = hint::from_headers(&headers, SystemTime::now(), ceiling);
//! assert_eq!(header, Some(Duration::from_secs(41)));
//!
//! let text = hint::from_text("Rate limit reached. Please try again in 8.71s.", ceiling);
//! assert_eq!(text, Some(Duration::from_millis(8710)));
//! assert_eq!(hint::combine(header, text), Some(Duration::from_secs(41)));
//! # Ok::<(), http::header::InvalidHeaderValue>(())
//! ```

use http::header::{DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use std::time::{Duration, SystemTime};

use crate::dialect;

/// A plain number from here on (seconds) is a moment since the unix epoch, not a wait: as a wait it would be
/// 31 years, as a moment it is September 2001.
const EPOCH_SECONDS_FROM: f64 = 1e9;
/// From here on the epoch is counted in milliseconds: as seconds it would be the year 5138, as milliseconds
/// it is March 1973.
const EPOCH_MILLIS_FROM: f64 = 1e11;
/// From here on (the year 5138 in milliseconds) a number is no moment either.
const EPOCH_MILLIS_UNTIL: f64 = 1e14;

static RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
static X_MS_RETRY_AFTER_MS: HeaderName = HeaderName::from_static("x-ms-retry-after-ms");
static PUSHBACK_MS: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// What stands before the wait in an error body, in lower case.
const PHRASES: [&str; 5] = ["try again in", "try again after", "retry in", "retry after", "reset after"];

/// The moment against which the answer's absolute times are to be read: its own `Date` header where that is
/// present and valid, else `wall`.
///
/// The provider's two clock readings stand in one answer, so a skewed local clock cannot bend the wait.
#[must_use]
pub fn reference(headers: &HeaderMap, wall: SystemTime) -> SystemTime {
    headers.get(DATE).and_then(text).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(wall)
}

/// Reads one value in any of the known forms and gives the wait from `reference` on.
///
/// | form | example |
/// |---|---|
/// | seconds, with a fraction or not | `30`, `0.5` |
/// | Go duration, also with blanks and long unit names | `1h2m3s`, `59.998s`, `20ms`, `2m 13s`, `20 seconds` |
/// | HTTP date: IMF-fixdate, RFC 850, asctime | `Wed, 21 Oct 2026 07:28:30 GMT` |
/// | RFC 3339 with `Z` or an offset | `2026-10-21T07:28:30Z`, `2026-10-21T09:28:30.5+02:00` |
/// | unix epoch in seconds or milliseconds | `1792567710`, `1792567710000` |
///
/// A plain number of 10⁹ or more is an epoch (as a wait it would be 31 years): seconds below 10¹¹,
/// milliseconds below 10¹⁴, and from there on nothing at all.
///
/// `None` where nothing useful can be read: empty, malformed, negative, zero, not finite, or a moment that is
/// not after `reference`. There is no ceiling here: a date can be thousands of years away.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
/// use tower_quota::hint::parse_span;
///
/// let now = UNIX_EPOCH + Duration::from_secs(1_792_567_680); // 2026-10-21T07:28:00Z
/// assert_eq!(parse_span("1m30.5s", now), Some(Duration::from_millis(90_500)));
/// assert_eq!(parse_span("Wed, 21 Oct 2026 07:28:30 GMT", now), Some(Duration::from_secs(30)));
/// assert_eq!(parse_span("1792567710", now), Some(Duration::from_secs(30)));
/// assert_eq!(parse_span("0", now), None);
/// ```
#[must_use]
pub fn parse_span(value: &str, reference: SystemTime) -> Option<Duration> {
    let value = value.trim();
    let span = if let Ok(number) = value.parse::<f64>() {
        number_span(number, reference)
    } else if let Ok(date) = httpdate::parse_http_date(value) {
        date.duration_since(reference).ok()
    } else if let Some(date) = rfc3339(value) {
        date.duration_since(reference).ok()
    } else {
        leading_span(value).filter(|(_, rest)| rest.is_empty()).map(|(span, _)| span)
    };
    span.filter(|span| !span.is_zero())
}

/// The explicit wait of an answer, at most `ceiling`: `retry-after-ms`, then `x-ms-retry-after-ms`, then
/// `Retry-After`, then gRPC's `grpc-retry-pushback-ms`.
///
/// A header that is present but useless falls through to the next one. Of a repeated header the longest useful
/// line counts. A plain number in the first two is milliseconds; any other form means there what it means in
/// [`parse_span`].
#[must_use]
pub fn retry_after(headers: &HeaderMap, wall: SystemTime, ceiling: Duration) -> Option<Duration> {
    let reference = reference(headers, wall);
    let millis = |value: &str| match value.trim().parse::<f64>() {
        Ok(number) => number_span(number / 1e3, reference).filter(|span| !span.is_zero()),
        Err(_) => parse_span(value, reference),
    };
    let span = longest(headers, &RETRY_AFTER_MS, millis)
        .or_else(|| longest(headers, &X_MS_RETRY_AFTER_MS, millis))
        .or_else(|| longest(headers, &RETRY_AFTER, |value| parse_span(value, reference)))
        .or_else(|| longest(headers, &PUSHBACK_MS, |value| Some(Duration::from_millis(pushback(value)?.into()))));
    bounded(span, ceiling)
}

/// Whether `grpc-retry-pushback-ms` forbids another attempt: by a negative number, or by none at all
/// ([gRFC A6](https://github.com/grpc/proposal/blob/master/A6-client-retries.md), "Pushback").
pub(crate) fn pushed_back(headers: &HeaderMap) -> bool {
    headers.get_all(&PUSHBACK_MS).iter().any(|value| text(value).and_then(pushback).is_none())
}

/// A wait in milliseconds: a number of 32 bits that is not negative.
fn pushback(value: &str) -> Option<u32> {
    value.trim().parse::<i32>().ok()?.try_into().ok()
}

/// The longest reset among the buckets that a refusal calls exhausted, at most `ceiling`.
///
/// A bucket is exhausted where its `remaining` is 0. Where `remaining` is absent, negative (Azure sends `-1`
/// for "unknown") or unreadable it is not: a full bucket announces a reset as well. Read are the headers of all
/// [dialects](crate::dialect#what-is-read) at once, with the feature `ietf` also the `RateLimit` field of the IETF draft
/// `draft-ietf-httpapi-ratelimit-headers`, policies of any unit with `r=0` and a `t`. Where they disagree the longest wins. Azure's
/// `x-rate-limit-reset-{requests,tokens}`, which stands in the place of `Retry-After` in some refusals, counts whatever
/// remains.
#[must_use]
pub fn reset(headers: &HeaderMap, wall: SystemTime, ceiling: Duration) -> Option<Duration> {
    bounded(dialect::exhausted(headers, wall), ceiling)
}

/// What the headers of a refusal say, at most `ceiling`: [`retry_after`], and without a useful one [`reset`].
///
/// An explicit wait wins even over a longer reset, because the two answer different questions: a reset says
/// when a bucket is *full* again, `Retry-After` says when this call may come again. Buckets refill all the
/// time, so that moment is nearly always the earlier one.
#[must_use]
pub fn from_headers(headers: &HeaderMap, wall: SystemTime, ceiling: Duration) -> Option<Duration> {
    retry_after(headers, wall, ceiling).or_else(|| reset(headers, wall, ceiling))
}

/// What the headers of a refusal say, without a ceiling: the same as [`from_headers`], for reports. A hold may be
/// capped, but the user is told what the provider asked for.
#[must_use]
pub fn advertised(headers: &HeaderMap, wall: SystemTime) -> Option<Duration> {
    from_headers(headers, wall, Duration::MAX)
}

/// The wait that the text of an error body names, at most `ceiling`.
///
/// It stands after one of a few phrases, in any case: "try again in", "try again after", "retry in",
/// "retry after", "reset after"; and it has a unit: `8.71s`, `718ms`, `1m30s`, `2m 13s`, `20 seconds`. Where
/// several waits are named the longest counts. The time taken is linear in the length of `body`.
///
/// Give it the body of a *refusal* only, never the text that a model wrote.
#[must_use]
pub fn from_text(body: &str, ceiling: Duration) -> Option<Duration> {
    let span =
        PHRASES.iter().flat_map(|phrase| after_each(body, phrase)).filter_map(leading_span).map(|(span, _)| span).max();
    bounded(span, ceiling)
}

/// The longer of what the headers and the text say.
#[must_use]
pub fn combine(header: Option<Duration>, text: Option<Duration>) -> Option<Duration> {
    header.max(text)
}

/// The units of a span in seconds, under every name in use: Go's, and the long ones of error texts.
const UNITS: [(&[&str], f64); 7] = [
    (&["ns"], 1e-9),
    (&["us", "\u{b5}s", "\u{3bc}s"], 1e-6),
    (&["ms", "msec", "millisecond", "milliseconds"], 1e-3),
    (&["s", "sec", "secs", "second", "seconds"], 1.0),
    (&["m", "min", "mins", "minute", "minutes"], 60.0),
    (&["h", "hr", "hrs", "hour", "hours"], 3600.0),
    (&["d", "day", "days"], 86400.0),
];
const MICRO_SIGN: char = '\u{b5}';
const GREEK_MU: char = '\u{3bc}';

fn bounded(span: Option<Duration>, ceiling: Duration) -> Option<Duration> {
    span.map(|span| span.min(ceiling)).filter(|span| !span.is_zero())
}

fn text(value: &HeaderValue) -> Option<&str> {
    value.to_str().ok()
}

/// The longest useful line of one header.
fn longest(headers: &HeaderMap, name: &HeaderName, parse: impl Fn(&str) -> Option<Duration>) -> Option<Duration> {
    let values = headers.get_all(name).iter();
    values.filter_map(|value| parse(text(value)?)).max()
}

/// A plain number: a wait in seconds, or an epoch.
fn number_span(number: f64, reference: SystemTime) -> Option<Duration> {
    if number < EPOCH_SECONDS_FROM {
        return Duration::try_from_secs_f64(number).ok();
    }
    let seconds = if number < EPOCH_MILLIS_FROM {
        number
    } else if number < EPOCH_MILLIS_UNTIL {
        number / 1e3
    } else {
        return None; // not a number too
    };
    let date = SystemTime::UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
    date.duration_since(reference).ok()
}

/// RFC 3339. `humantime` reads `Z` only (behind a fraction it even takes `+05:00` for UTC), so the offset is
/// taken off first.
pub(crate) fn rfc3339(value: &str) -> Option<SystemTime> {
    let (local, offset) = value.split_at_checked(value.len().checked_sub("+00:00".len())?)?;
    let east = match offset.as_bytes()[0] {
        b'+' => true,
        b'-' => false,
        _ => return humantime::parse_rfc3339(value).ok(),
    };
    let (hours, minutes) = offset[1..].split_once(':')?;
    let two_digits = |digits: &str, below: u64| match digits.as_bytes() {
        [b'0'..=b'9', b'0'..=b'9'] => digits.parse::<u64>().ok().filter(|n| *n < below),
        _ => None,
    };
    let offset = two_digits(hours, 24)? * 3600 + two_digits(minutes, 60)? * 60;
    let offset = Duration::from_secs(offset);
    let local = humantime::parse_rfc3339_weak(local).ok()?;
    if east { local.checked_sub(offset) } else { local.checked_add(offset) }
}

/// The span at the head of `text` (`1h2m3s`, `2m 13s`, `20 seconds`), and what follows it.
///
/// Not `humantime::parse_duration`: that refuses long fractions (`1.2000000000000002s`, as a float is printed;
/// in older releases any fraction), panics at `18446744073709551615s 1000000000ns`, and cannot say where in a
/// sentence a span ends.
fn leading_span(text: &str) -> Option<(Duration, &str)> {
    let (mut span, mut rest) = leading_term(text)?;
    while let Some((term, behind)) = leading_term(rest) {
        span = span.saturating_add(term);
        rest = behind;
    }
    Some((span, rest))
}

/// One number with its unit at the head of `text`, and what follows it.
fn leading_term(text: &str) -> Option<(Duration, &str)> {
    let (number, text) = split_where(text.trim_start(), |c| !c.is_ascii_digit() && c != '.');
    let number: f64 = number.parse().ok()?;
    let (unit, rest) = split_where(text.trim_start(), |c| !c.is_ascii_alphabetic() && c != MICRO_SIGN && c != GREEK_MU);
    let (_, seconds) = UNITS.iter().find(|(names, _)| names.iter().any(|name| name.eq_ignore_ascii_case(unit)))?;
    Some((Duration::try_from_secs_f64(number * seconds).ok()?, rest))
}

fn split_where(text: &str, end: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(end).unwrap_or(text.len()))
}

/// What follows each place in `body` where `phrase` (ASCII, lower case) stands and no word runs into it.
fn after_each<'a>(body: &'a str, phrase: &'a str) -> impl Iterator<Item = &'a str> {
    let bytes = body.as_bytes();
    bytes
        .windows(phrase.len())
        .enumerate()
        .filter(|(_, window)| window.eq_ignore_ascii_case(phrase.as_bytes()))
        .filter(|(at, _)| *at == 0 || !bytes[at - 1].is_ascii_alphanumeric())
        .filter_map(|(at, _)| body.get(at + phrase.len()..))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    #[test]
    fn a_number_turns_from_wait_to_epoch_at_the_documented_thresholds() {
        let wait = |number| number_span(number, NOW).map(|span| span.as_secs());
        assert_eq!(wait(999_999_999.0), Some(999_999_999));
        let late = SystemTime::UNIX_EPOCH + Duration::from_secs(999_999_999);
        let from = |number| number_span(number, late).map(|span| span.as_secs());
        assert_eq!(from(999_999_999.0), Some(999_999_999));
        assert_eq!(from(1e9), Some(1));
        assert_eq!(wait(99_999_999_999.0), Some(99_999_999_999));
        assert_eq!(wait(1e11), Some(100_000_000));
        assert_eq!(wait(99_999_999_999_999.0), Some(99_999_999_999));
        assert_eq!(wait(1e14), None);
        assert_eq!(wait(f64::INFINITY), None);
        assert_eq!(wait(f64::NAN), None);
        assert_eq!(wait(-1.0), None);
    }

    #[test]
    fn a_pushback_is_a_wait_only_where_nothing_else_names_one() {
        let wait = |lines: &[(&'static str, &str)]| {
            let headers = lines.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()));
            let wait = retry_after(&headers.collect(), NOW, Duration::from_secs(300));
            wait.map(|wait| wait.as_millis())
        };
        let pushback = "grpc-retry-pushback-ms";
        assert_eq!(wait(&[(pushback, "1500")]), Some(1_500));
        assert_eq!(wait(&[(pushback, "2147483647")]), Some(300_000));
        assert_eq!(wait(&[(pushback, "1500"), ("retry-after", "7")]), Some(7_000));
        assert_eq!(wait(&[(pushback, "1500"), ("retry-after", "0")]), Some(1_500));
        assert_eq!([wait(&[(pushback, "0")]), wait(&[(pushback, "-1")]), wait(&[(pushback, "2147483648")])], [None; 3]);
    }

    #[test]
    fn a_span_ends_where_the_sentence_goes_on() {
        let cases = [
            ("8.71s. Visit", Some((8710, ". Visit"))),
            (" 2m 13s.", Some((133_000, "."))),
            ("1h5", Some((3_600_000, "5"))),
            ("1s 2 calls", Some((1000, " 2 calls"))),
            ("2 calls", None),
            ("", None),
        ];
        for (text, expected) in cases {
            let expected = expected.map(|(millis, rest)| (Duration::from_millis(millis), rest));
            assert_eq!(leading_span(text), expected, "{text:?}");
        }
    }

    #[test]
    fn an_offset_is_taken_off_and_never_ignored() {
        let utc = humantime::parse_rfc3339("2026-10-21T07:28:30.5Z").expect("valid");
        for value in ["2026-10-21T07:28:30.5Z", "2026-10-21T12:28:30.5+05:00", "2026-10-21T02:58:30.5-04:30"] {
            assert_eq!(rfc3339(value), Some(utc), "{value}");
        }
        for value in ["", "+00:00", "Z", "2026-10-21T07:28:30+5:000", "\u{20ac}\u{20ac}\u{20ac}"] {
            assert_eq!(rfc3339(value), None, "{value}");
        }
    }

    #[test]
    fn a_phrase_is_found_at_every_place_and_only_as_words() {
        let rests = |body| after_each(body, "retry in").collect::<Vec<_>>();
        assert_eq!(rests("Retry in 1s, RETRY IN 2s"), [" 1s, RETRY IN 2s", " 2s"]);
        assert_eq!(rests("\u{e9}retry in"), [""]);
        assert!(rests("noretry in 1s").is_empty());
        assert!(rests("retry").is_empty());
    }
}
