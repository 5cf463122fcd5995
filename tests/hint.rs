//! What providers really send, row by row, each with its neighbours; and properties over arbitrary input.

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tower_quota::dialect::{Detect, ReadQuota, Resource};
use tower_quota::hint;

/// 2026-10-21T07:28:00Z, the moment at which every answer of this file arrives.
const T0: u64 = 1_792_567_680;
/// Higher than any wait of the table that is not there to be cut.
const CEILING: Duration = Duration::from_secs(1_000_000_000);
/// A wait that is longer than that, in a table.
const CUT: Option<u64> = Some(1_000_000_000_000);

fn wall() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(T0)
}

/// A header a line, as on the wire.
fn headers(lines: &str) -> HeaderMap {
    lines
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            let (name, value) = line.split_once(':').expect("a line is `name: value`");
            let name: HeaderName = name.trim().parse().expect("the name is valid");
            (name, HeaderValue::from_str(value.trim()).expect("the value is visible ASCII"))
        })
        .collect()
}

fn millis(millis: u64) -> Option<Duration> {
    Some(Duration::from_millis(millis))
}

/// Runs a table of (header lines, the wait in milliseconds or none) through `from_headers`.
fn check(row: &str, table: &[(&str, Option<u64>)]) {
    for (lines, wait) in table {
        let expected = wait.map(Duration::from_millis);
        let seen = hint::from_headers(&headers(lines), wall(), CEILING);
        assert_eq!(seen, expected, "{row}: {lines:?}");
    }
}

fn check_text(row: &str, table: &[(&str, Option<u64>)]) {
    for (body, wait) in table {
        let expected = wait.map(Duration::from_millis);
        assert_eq!(hint::from_text(body, CEILING), expected, "{row}: {body:?}");
    }
}

#[test]
fn b01_an_http_date_is_read_in_all_three_forms() {
    check(
        "B01",
        &[
            ("retry-after: Wed, 21 Oct 2026 07:28:30 GMT", Some(30_000)),
            ("Retry-After:   Wed, 21 Oct 2026 07:28:30 GMT  ", Some(30_000)),
            ("retry-after: Wednesday, 21-Oct-26 07:28:30 GMT", Some(30_000)),
            ("retry-after: Wed Oct 21 07:28:30 2026", Some(30_000)),
            ("retry-after: Thu, 22 Oct 2026 07:28:00 GMT", Some(86_400_000)),
            ("retry-after: Wed, 21 Oct 2026 07:28:00 GMT", None), // now
            ("retry-after: Wed, 21 Oct 2026 07:27:59 GMT", None),
            ("retry-after: Sun, 06 Nov 1994 08:49:37 GMT", None),
            ("retry-after: Thu, 21 Oct 2026 07:28:30 GMT", None), // not a Thursday
            ("retry-after: 21 Oct 2026 07:28:30 GMT", None),
            ("retry-after: Wed, 21 Oct 2026", None),
            ("retry-after: Wed, 32 Oct 2026 07:28:30 GMT", None),
        ],
    );
}

#[test]
fn b02_a_date_is_never_replaced_by_a_default() {
    let answer = headers("retry-after: Wed, 21 Oct 2026 07:30:00 GMT");
    assert_eq!(hint::advertised(&answer, wall()), millis(120_000));
    assert_eq!(hint::retry_after(&answer, wall(), CEILING), millis(120_000));
    assert_eq!(hint::from_headers(&answer, wall(), CEILING), millis(120_000));
}

#[test]
fn b04_what_cannot_be_read_is_no_hint() {
    check(
        "B04",
        &[
            ("retry-after: Fri, 31 Dec 99999 23:59:59 GMT", None),
            ("retry-after: Fri, 31 Dec 9999 23:59:59 GMT", CUT),
            ("retry-after: 99999-12-31T23:59:59Z", None),
            ("retry-after: 0000-00-00T00:00:00Z", None),
            ("retry-after: 2026-02-30T00:00:00Z", None),
            ("retry-after:", None),
            ("retry-after: soon", None),
            ("retry-after: 30 bananas", None),
            ("retry-after: s", None),
            ("retry-after: .", None),
            ("retry-after: -", None),
            ("retry-after: NaN", None),
            ("retry-after: inf", None),
            ("retry-after: -infinity", None),
            ("retry-after: 1e400", None),
            ("retry-after: 0x10", None),
            ("retry-after: 1,5", None),
            ("retry-after: 1.2.3", None),
            ("retry-after: 18446744073709551615s 1000000000ns", None),
            ("retry-after: 18446744073709549568s 18446744073709549568s", CUT),
            ("retry-after: 999999999999999999999999999999h", None),
            ("", None),
        ],
    );
    let mut answer = HeaderMap::new();
    answer.insert("retry-after", HeaderValue::from_bytes(b"30\xff").expect("obs-text"));
    assert_eq!(hint::from_headers(&answer, wall(), CEILING), None);
    answer.append("retry-after", HeaderValue::from_static("7"));
    assert_eq!(hint::from_headers(&answer, wall(), CEILING), millis(7000));
}

#[test]
fn b05_a_fraction_is_not_cut_to_zero() {
    check(
        "B05",
        &[
            ("retry-after: 0.5", Some(500)),
            ("retry-after: .5", Some(500)),
            ("retry-after: 0.001", Some(1)),
            ("retry-after: 1.25", Some(1250)),
            ("retry-after: 5.", Some(5000)),
            ("retry-after: +5", Some(5000)),
            ("retry-after: 005", Some(5000)),
            ("retry-after: -0.5", None),
            ("retry-after: 0.0000000000001", None), // less than a nanosecond
        ],
    );
}

#[test]
fn b07_zero_and_the_past_are_no_hint() {
    check(
        "B07",
        &[
            ("retry-after: 0", None),
            ("retry-after: 0.0", None),
            ("retry-after: -0", None),
            ("retry-after: -1", None),
            ("retry-after: 0s", None),
            ("retry-after: 0m0s", None),
            ("retry-after: 2026-10-21T07:27:00Z", None),
            ("retry-after: 1792567680", None),
            ("retry-after-ms: 0", None),
            // useless, so the next one is asked
            ("retry-after-ms: 0\nretry-after: 3", Some(3000)),
            ("retry-after: 0\nx-ratelimit-remaining: 0\nx-ratelimit-reset: 4", Some(4000)),
            ("retry-after: 0\nretry-after: 2", Some(2000)),
        ],
    );
}

#[test]
fn b08_a_huge_wait_is_capped_and_reported_uncapped() {
    let ceiling = Duration::from_secs(300);
    for (value, advertised) in
        [("999999", 999_999), ("3600", 3600), ("999999999", 999_999_999), ("300000h", 300_000 * 3600), ("301", 301)]
    {
        let answer = headers(&format!("retry-after: {value}"));
        assert_eq!(hint::from_headers(&answer, wall(), ceiling), Some(ceiling), "{value}");
        let said = Some(Duration::from_secs(advertised));
        assert_eq!(hint::advertised(&answer, wall()), said, "{value}");
    }
    let reset = headers("x-ratelimit-remaining: 0\nx-ratelimit-reset: 999999");
    assert_eq!(hint::reset(&reset, wall(), ceiling), Some(ceiling));
    assert_eq!(hint::from_text("try again in 999999s", ceiling), Some(ceiling));
    let any = headers("retry-after: 5");
    assert_eq!(hint::from_headers(&any, wall(), Duration::ZERO), None);
}

#[test]
fn b10_a_wait_of_a_minute_is_not_refused() {
    check(
        "B10",
        &[
            ("retry-after: 60", Some(60_000)),
            ("retry-after: 61", Some(61_000)),
            ("retry-after: 120", Some(120_000)),
            ("retry-after: 1m1s", Some(61_000)),
        ],
    );
}

#[test]
fn b11_milliseconds_come_before_seconds() {
    check(
        "B11",
        &[
            ("retry-after-ms: 250\nretry-after: 1", Some(250)),
            ("retry-after: 1\nretry-after-ms: 250", Some(250)),
            ("x-ms-retry-after-ms: 250\nretry-after: 1", Some(250)),
            ("x-ms-retry-after-ms: 100\nretry-after-ms: 250", Some(250)),
            ("Retry-After-Ms: 1500", Some(1500)),
            ("retry-after-ms: -1\nx-ms-retry-after-ms: 70\nretry-after: 1", Some(70)),
            ("retry-after-ms: x\nx-ms-retry-after-ms: \nretry-after: 1", Some(1000)),
            ("retry-after-ms: NaN\nretry-after: 1", Some(1000)),
            ("retry-after-ms: 250ms\nretry-after: 1", Some(250)),
            ("retry-after-ms: 60000", Some(60_000)),
            ("retry-after-ms: 1792567710000", Some(30_000)),
            ("retry-after-ms: 10\nretry-after-ms: 30\nretry-after-ms: 20", Some(30)),
            // In some of Azure's refusals this stands in the place of all of them.
            ("x-rate-limit-reset-tokens: 55\nx-ratelimit-remaining-tokens: 2675", Some(55_000)),
            ("x-rate-limit-reset-requests: 55\nretry-after: 1", Some(1000)),
            ("x-ratelimit-reset-tokens: 55\nx-ratelimit-remaining-tokens: 2675", None),
        ],
    );
    let fraction = headers("retry-after-ms: 250.5\nretry-after: 1");
    let expected = Some(Duration::from_micros(250_500));
    assert_eq!(hint::from_headers(&fraction, wall(), CEILING), expected);
}

#[test]
fn b13_the_longest_reset_of_the_exhausted_buckets_counts() {
    check(
        "B13",
        &[
            (
                "x-ratelimit-remaining-requests: 4999\nx-ratelimit-reset-requests: 120ms\n\
                 x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 41s",
                Some(41_000),
            ),
            (
                "x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 41s\n\
                 x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: 120ms",
                Some(41_000),
            ),
            (
                "x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: 120ms\n\
                 x-ratelimit-remaining-tokens: 7\nx-ratelimit-reset-tokens: 41s",
                Some(120),
            ),
            // Nothing is exhausted: unknown, unreadable, absent.
            ("x-ratelimit-remaining-tokens: 1\nx-ratelimit-reset-tokens: 41s", None),
            ("x-ratelimit-remaining-tokens: -1\nx-ratelimit-reset-tokens: 41s", None),
            ("x-ratelimit-remaining-tokens: none\nx-ratelimit-reset-tokens: 41s", None),
            ("x-ratelimit-remaining-tokens:\nx-ratelimit-reset-tokens: 41s", None),
            ("x-ratelimit-reset-tokens: 41s", None),
            // Exhausted, but nobody says until when.
            ("x-ratelimit-remaining-tokens: 0", None),
            ("x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 0", None),
            ("x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: -1", None),
            ("x-ratelimit-remaining-tokens: 0.0\nx-ratelimit-reset-tokens: 41s", Some(41_000)),
            // A reset of one bucket is not that of another.
            ("x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-requests: 41s", None),
            ("x-ratelimit-remaining: 0\nx-ratelimit-reset: 7", Some(7000)),
            ("x-ratelimit-remaining: 0\nx-ratelimit-reset: 1792567690", Some(10_000)),
            ("ratelimit-remaining: 0\nratelimit-reset: 7", Some(7000)),
            ("ratelimit-remaining: 3\nratelimit-reset: 7", None),
            (
                "x-ratelimit-remaining: 0\nx-ratelimit-reset: 7\nx-ratelimit-reset: 9\n\
                 x-ratelimit-reset: x",
                Some(9000),
            ),
            ("x-ratelimit-remaining: 5\nx-ratelimit-remaining: 0\nx-ratelimit-reset: 7", Some(7000)),
        ],
    );
}

#[test]
fn b14_durations_and_rfc_3339_are_read() {
    check(
        "B14",
        &[
            ("retry-after: 1h2m3s", Some(3_723_000)),
            ("retry-after: 6m0s", Some(360_000)),
            ("retry-after: 1.2s", Some(1200)),
            ("retry-after: 500ms", Some(500)),
            ("retry-after: 1m30.5s", Some(90_500)),
            ("retry-after: 20ms", Some(20)),
            ("retry-after: 59.998s", Some(59_998)),
            ("retry-after: 1.5h", Some(5_400_000)),
            ("retry-after: 0.5m", Some(30_000)),
            ("retry-after: 2000us", Some(2)),
            ("retry-after: 3000000ns", Some(3)),
            ("retry-after: 24h0m0s", Some(86_400_000)),
            ("retry-after: 3s2m1h", Some(3_723_000)), // out of order
            ("retry-after: 1m 30s", Some(90_000)),
            ("retry-after: 20 seconds", Some(20_000)),
            ("retry-after: 1H2M3S", Some(3_723_000)),
            ("retry-after: -5s", None),
            ("retry-after: 5s-3s", None),
            ("retry-after: 5s, 3s", None),
            ("retry-after: 1month", None),
            ("retry-after: 1y", None),
            ("retry-after: 5s3", None),
            ("retry-after: 2026-10-21T07:28:30Z", Some(30_000)),
            ("retry-after: 2026-10-21T07:28:30.250Z", Some(30_250)),
            ("retry-after: 2026-10-21T07:28:30+00:00", Some(30_000)),
            ("retry-after: 2026-10-21T07:28:30-00:00", Some(30_000)),
            ("retry-after: 2026-10-21T09:28:30+02:00", Some(30_000)),
            ("retry-after: 2026-10-21T09:28:30.5+02:00", Some(30_500)),
            ("retry-after: 2026-10-21T01:58:30-05:30", Some(30_000)),
            ("retry-after: 2026-10-20T23:28:30-08:00", Some(30_000)),
            ("retry-after: 2026-10-21T07:28:30", None), // where?
            ("retry-after: 2026-10-21T07:28:30+0200", None),
            ("retry-after: 2026-10-21T07:28:30-24:00", None),
            ("retry-after: 2026-10-21T07:28:30-02:60", None),
            ("retry-after: 2026-10-21T07:28:30+ 2:00", None),
            ("retry-after: 2026-10-21", None),
            ("retry-after: 1970-01-01T00:00:00+23:59", None), // before the epoch
            ("retry-after: 1792567710", Some(30_000)),
            ("retry-after: 1792567710.5", Some(30_500)),
            ("retry-after: 1792567710000", Some(30_000)),
            ("retry-after: 1792567710500", Some(30_500)),
            ("retry-after: 1000000000", None), // September 2001
            ("retry-after: 999999999", Some(999_999_999_000)),
            ("retry-after: 100000000000", None), // in milliseconds: 1973
            ("retry-after: 99999999999999", CUT),
            ("retry-after: 100000000000000", None),
        ],
    );
    // What has no whole number of milliseconds.
    let float = hint::parse_span("1.2000000000000002s", wall());
    assert_eq!(float, millis(1200));
    let micro = Some(Duration::from_micros(7));
    for value in ["7us", "7\u{b5}s", "7\u{3bc}s"] {
        assert_eq!(hint::parse_span(value, wall()), micro, "{value}");
    }
}

#[test]
fn b16_moments_are_read_against_the_clock_of_the_answer() {
    let ten_minutes = Duration::from_secs(600);
    let date = "date: Wed, 21 Oct 2026 07:28:00 GMT";
    for wall in [wall() + ten_minutes, wall(), wall() - ten_minutes] {
        for (value, wait) in [
            ("Wed, 21 Oct 2026 07:28:20 GMT", millis(20_000)),
            ("2026-10-21T07:28:20Z", millis(20_000)),
            ("1792567700", millis(20_000)),
            ("20", millis(20_000)),
            ("Wed, 21 Oct 2026 07:28:00 GMT", None),
            ("Wed, 21 Oct 2026 07:27:40 GMT", None),
        ] {
            let answer = headers(&format!("{date}\nretry-after: {value}"));
            assert_eq!(hint::from_headers(&answer, wall, CEILING), wait, "{value}");
            let answer = headers(&format!(
                "anthropic-ratelimit-tokens-remaining: 0\n\
                 anthropic-ratelimit-tokens-reset: {value}\n{date}"
            ));
            assert_eq!(hint::from_headers(&answer, wall, CEILING), wait, "{value}");
            let readings = Detect.read(&answer, Some(wall));
            let tokens = readings.get(Resource::Tokens).expect("it is mentioned");
            assert_eq!(tokens.reset, wait, "{value}");
        }
    }
    // Without a valid `Date` the wall clock it is.
    for date in ["", "date:", "date: yesterday", "date: 1792567080"] {
        let answer = headers(&format!("{date}\nretry-after: 2026-10-21T07:28:20Z"));
        assert_eq!(hint::reference(&answer, wall()), wall());
        assert_eq!(hint::from_headers(&answer, wall(), CEILING), millis(20_000), "{date}");
    }
}

#[test]
fn b17_the_body_names_the_wait() {
    check_text(
        "B17",
        &[
            (r#"{"error":{"message":"... Please try again in 8.71s"}}"#, Some(8710)),
            ("Please try again in 8.71s. Visit https://example.com to learn more.", Some(8710)),
            ("Please try again in 718ms.", Some(718)),
            ("try again in 1m30s", Some(90_000)),
            ("TRY AGAIN IN 1M30S", Some(90_000)),
            ("Your quota will reset after 2m 13s.", Some(133_000)),
            ("reset after 18h31m10s", Some(66_670_000)),
            ("Please retry after 20 seconds.", Some(20_000)),
            ("Please retry after 1 second", Some(1000)),
            ("Please retry in 37.556s.", Some(37_556)),
            ("Please try again after 2 minutes", Some(120_000)),
            ("try again in 6m0s", Some(360_000)),
            ("try again in 1.2000000000000002s", Some(1200)),
            ("try again in 3 s, 40 requests are waiting", Some(3000)),
            ("try again in 3s\u{540e}", Some(3000)),
            ("\u{8bf7}try again in 3s", Some(3000)),
            // The longest of several, in any order.
            ("try again in 3s, or retry after 5s", Some(5000)),
            ("try again in 5s, or try again in 3s", Some(5000)),
            ("try again in a while, then try again in 3s", Some(3000)),
            ("try again in 0s", None),
            ("try again in -3s", None),
            ("try again in 20", None), // of what?
            ("try again in 5 months", None),
            ("try again in 5 sparrows", None),
            ("try again in 1.2.3s", None),
            ("try again in", None),
            ("try again in ", None),
            ("try again in s", None),
            ("try again later", None),
            ("it took 5s", None),
            ("poetry again in 5s", None), // another word
            ("", None),
        ],
    );
    assert_eq!(hint::combine(millis(5), millis(7)), millis(7));
    assert_eq!(hint::combine(millis(7), millis(5)), millis(7));
    assert_eq!(hint::combine(None, millis(5)), millis(5));
    assert_eq!(hint::combine(millis(5), None), millis(5));
    assert_eq!(hint::combine(None, None), None);
}

#[test]
fn b17_a_long_body_takes_linear_time() {
    // Quadratic work over it would take minutes.
    for piece in ["try again in ", "try again in 1", "retry in 1s ", "1s1m", "      ", "ssss"] {
        let body = piece.repeat(200_000 / piece.len());
        let _ = hint::from_text(&body, CEILING);
        let _ = hint::from_text(&format!("retry in {body}"), CEILING);
    }
}

#[cfg(feature = "ietf")]
#[test]
fn b22_all_policies_of_the_ietf_field_are_read() {
    check(
        "B22",
        &[
            (r#"ratelimit: "day";r=900;t=3000, "minute";r=0;t=20"#, Some(20_000)),
            (r#"ratelimit: "minute";r=0;t=20, "day";r=900;t=3000"#, Some(20_000)),
            ("ratelimit: \"day\";r=900;t=3000\nratelimit: \"minute\";r=0;t=20", Some(20_000)),
            ("ratelimit: \"minute\";r=0;t=20\nratelimit: \"day\";r=900;t=3000", Some(20_000)),
            ("RateLimit: minute;r=0;t=20", Some(20_000)),
            (r#"ratelimit: "a";t=20;r=0"#, Some(20_000)),
            (r#"ratelimit: "a";r=0;t=20;pk=:cHNsZWRmb29l:"#, Some(20_000)),
            (r#"ratelimit: "a, b";r=0;t=20"#, Some(20_000)),
            (r#"ratelimit: "a";r=0;t=20, "b";r=0;t=70"#, Some(70_000)),
            (r#"ratelimit: "a";r=0;t=2.5"#, Some(2500)),
            (r#"ratelimit: "a";r=0, "b";r=0;t=20"#, Some(20_000)),
            (r#"ratelimit: "a";r=0"#, None),
            (r#"ratelimit: "a";r=1;t=20"#, None),
            (r#"ratelimit: "a";t=20"#, None),
            (r#"ratelimit: "a";r=0;t=0"#, None),
            (r#"ratelimit: "a";r=0;t=-20"#, None),
            (r#"ratelimit: "a";r=-1;t=20"#, None),
            (r#"ratelimit: "a";r="0";t=20"#, None),
            (r#"ratelimit: ("a" "b");r=0;t=20"#, None),
            (r#"ratelimit: "a;r=0;t=20"#, None),
            ("ratelimit: limit=100, remaining=0, reset=5", Some(5000)), // an earlier draft
            ("ratelimit: limit=100, remaining=1, reset=5", None),
            ("ratelimit-policy: \"a\";q=9;w=60;qu=\"content-bytes\"\nratelimit: \"a\";r=0;t=20", Some(20_000)),
            ("ratelimit:", None),
            // A malformed line spoils no other.
            ("ratelimit: \"a;r=0;t=90\nratelimit: \"b\";r=0;t=20", Some(20_000)),
        ],
    );
}

#[cfg(feature = "ietf")]
#[test]
fn b23_where_the_dialects_disagree_the_exhausted_and_longest_wins() {
    check(
        "B23",
        &[
            (
                "ratelimit: \"m\";r=5;t=10\nx-ratelimit-remaining-requests: 0\n\
                 x-ratelimit-reset-requests: 30s",
                Some(30_000),
            ),
            (
                "ratelimit: \"m\";r=0;t=10\nx-ratelimit-remaining-requests: 0\n\
                 x-ratelimit-reset-requests: 30s",
                Some(30_000),
            ),
            (
                "ratelimit: \"m\";r=0;t=50\nx-ratelimit-remaining-requests: 0\n\
                 x-ratelimit-reset-requests: 30s",
                Some(50_000),
            ),
            (
                "ratelimit: \"m\";r=0;t=50\nx-ratelimit-remaining-requests: 1\n\
                 x-ratelimit-reset-requests: 90s",
                Some(50_000),
            ),
            // An explicit wait wins over every reset, also over a longer one.
            ("ratelimit: \"m\";r=0;t=50\nretry-after: 2", Some(2000)),
        ],
    );
}

#[test]
fn b23_an_explicit_wait_wins_over_a_reset() {
    check(
        "B23",
        &[
            ("x-ratelimit-remaining: 0\nx-ratelimit-reset: 60\nretry-after: 2", Some(2000)),
            ("x-ratelimit-remaining: 0\nx-ratelimit-reset: 1\nretry-after: 2", Some(2000)),
            ("x-ratelimit-remaining: 0\nx-ratelimit-reset: 60\nretry-after: x", Some(60_000)),
        ],
    );
}

#[test]
fn b25_absent_is_not_zero_and_not_full() {
    let refusal = headers(
        "anthropic-ratelimit-requests-limit: 4000\n\
         anthropic-ratelimit-requests-remaining: 3990\n\
         anthropic-ratelimit-requests-reset: 2026-10-21T07:28:01Z\n\
         anthropic-ratelimit-output-tokens-remaining: 0",
    );
    let readings = Detect.read(&refusal, Some(wall()));
    let requests = readings.get(Resource::Requests).expect("it is mentioned");
    assert_eq!(requests.limit, Some(4000.0));
    assert_eq!(requests.remaining, Some(3990.0));
    assert_eq!(requests.reset, millis(1000));
    let output = readings.get(Resource::OutputTokens).expect("it is mentioned");
    assert_eq!(output.remaining, Some(0.0));
    assert_eq!((output.limit, output.reset), (None, None));
    assert_eq!(readings.get(Resource::InputTokens), None);
    assert_eq!(readings.get(Resource::Tokens), None);
    assert!(!readings.is_empty());

    let not_found = headers("content-type: application/json\nanthropic-organization-id: acme");
    assert!(Detect.read(&not_found, Some(wall())).is_empty());
}

#[test]
fn b26_without_retry_after_the_reset_of_the_empty_bucket_is_the_hint() {
    for resource in ["requests", "input-tokens", "output-tokens", "tokens"] {
        let lines = |remaining: &str, reset: &str| {
            headers(&format!(
                "anthropic-ratelimit-{resource}-remaining: {remaining}\n\
                 anthropic-ratelimit-{resource}-reset: {reset}"
            ))
        };
        for (remaining, reset, wait) in [
            ("0", "2026-10-21T07:28:12Z", millis(12_000)),
            ("0", "2026-10-21T07:28:12+00:00", millis(12_000)),
            ("0", "12", millis(12_000)),
            ("1", "2026-10-21T07:28:12Z", None),
            ("0", "2026-10-21T07:27:12Z", None),
            ("0", "", None),
        ] {
            let seen = hint::from_headers(&lines(remaining, reset), wall(), CEILING);
            assert_eq!(seen, wait, "{resource} {remaining} {reset}");
        }
    }
}

#[test]
fn b28_a_very_long_hint_is_read_whole() {
    check("B28", &[("retry-after: 13262", Some(13_262_000))]);
    let answer = headers("retry-after: 13262");
    let cut = hint::from_headers(&answer, wall(), Duration::from_secs(900));
    assert_eq!(cut, millis(900_000));
    assert_eq!(hint::advertised(&answer, wall()), millis(13_262_000));
}

/// The pieces of which values are made, and what breaks them.
fn value() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[0-9]{1,25}",
        "[0-9]{1,4}\\.[0-9]{1,20}",
        Just("-".to_owned()),
        Just("+02:00".to_owned()),
        Just("Z".to_owned()),
        Just(" ".to_owned()),
        Just("0".to_owned()),
        Just("\u{b5}s".to_owned()),
        Just("inf".to_owned()),
        Just("2026-10-21T07:28:30".to_owned()),
        Just("Wed, 21 Oct 2026 07:28:30 GMT".to_owned()),
        Just("Wed Oct 21 07:28:30 2026".to_owned()),
        Just("\"m\";r=0;t=".to_owned()),
        Just(", ".to_owned()),
        Just("try again in ".to_owned()),
        Just("Retry After ".to_owned()),
        "(h|m|s|ms|ns|d|seconds|y|month)",
        "\\PC{0,3}",
    ];
    proptest::collection::vec(piece, 0..7).prop_map(|pieces| pieces.concat())
}

/// Single-edit damage to a valid date.
fn damaged_date() -> impl Strategy<Value = String> {
    let date = prop_oneof![
        Just("2026-10-21T07:28:30.5+02:00"),
        Just("2026-10-21T07:28:30Z"),
        Just("Wed, 21 Oct 2026 07:28:30 GMT"),
        Just("Wednesday, 21-Oct-26 07:28:30 GMT"),
        Just("Wed Oct 21 07:28:30 2026"),
    ];
    (date, any::<prop::sample::Index>(), any::<char>()).prop_map(|(date, at, other)| {
        let at = at.index(date.len());
        format!("{}{other}{}", &date[..at], &date[at + 1..])
    })
}

const NAMES: [&str; 14] = [
    "date",
    "retry-after",
    "retry-after-ms",
    "x-ms-retry-after-ms",
    "ratelimit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset",
    "anthropic-ratelimit-requests-limit",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "ratelimit-remaining",
    "ratelimit-reset",
];

fn some_headers() -> impl Strategy<Value = HeaderMap> {
    let bytes = prop_oneof![
        4 => value().prop_map(String::into_bytes),
        1 => damaged_date().prop_map(String::into_bytes),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
    ];
    let line = (prop::sample::select(&NAMES[..]), bytes);
    proptest::collection::vec(line, 0..10).prop_map(|lines| {
        let mut headers = HeaderMap::new();
        for (name, bytes) in lines {
            if let Ok(value) = HeaderValue::from_bytes(&bytes) {
                headers.append(name, value);
            }
        }
        headers
    })
}

fn some_wall() -> impl Strategy<Value = SystemTime> {
    prop_oneof![
        3 => Just(wall()),
        1 => (0..300_000_000_000_u64).prop_map(|s| UNIX_EPOCH + Duration::from_secs(s)),
        1 => (0..300_000_000_000_u64).prop_map(|s| UNIX_EPOCH - Duration::from_secs(s)),
    ]
}

fn some_ceiling() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::MAX),
        (0..10_000_u64).prop_map(Duration::from_secs),
        (0..10_000_u64).prop_map(Duration::from_nanos),
    ]
}

/// None, or above zero and at most the ceiling.
fn useful(span: Option<Duration>, ceiling: Duration) -> bool {
    span.is_none_or(|span| !span.is_zero() && span <= ceiling)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn any_headers_give_none_or_a_wait_within_the_ceiling(
        headers in some_headers(),
        wall in some_wall(),
        ceiling in some_ceiling(),
    ) {
        let explicit = hint::retry_after(&headers, wall, ceiling);
        let reset = hint::reset(&headers, wall, ceiling);
        let both = hint::from_headers(&headers, wall, ceiling);
        prop_assert!(useful(explicit, ceiling));
        prop_assert!(useful(reset, ceiling));
        prop_assert_eq!(both, explicit.or(reset));
        let said = hint::advertised(&headers, wall);
        prop_assert!(useful(said, Duration::MAX));
        if !ceiling.is_zero() {
            prop_assert_eq!(both, said.map(|said| said.min(ceiling)));
        }
    }

    #[test]
    fn any_value_gives_none_or_a_wait_above_zero(
        value in prop_oneof![value(), damaged_date(), any::<String>()],
        wall in some_wall(),
    ) {
        prop_assert!(useful(hint::parse_span(&value, wall), Duration::MAX));
    }

    #[test]
    fn any_text_gives_none_or_a_wait_within_the_ceiling(
        body in prop_oneof![value(), any::<String>(), value().prop_map(|v| format!("retry in {v}"))],
        ceiling in some_ceiling(),
    ) {
        prop_assert!(useful(hint::from_text(&body, ceiling), ceiling));
    }

    #[test]
    fn any_quota_headers_give_finite_figures_from_zero_up(
        headers in some_headers(),
        wall in some_wall(),
    ) {
        let readings = Detect.read(&headers, Some(wall));
        for resource in Resource::ALL {
            let Some(reading) = readings.get(resource) else { continue };
            for amount in [reading.limit, reading.remaining].into_iter().flatten() {
                prop_assert!(amount.is_finite() && amount >= 0.0);
            }
            prop_assert!(useful(reading.reset, Duration::MAX));
        }
    }

    #[test]
    fn a_go_duration_is_read_to_the_nanosecond(h in 0..100_u64, m in 0..60_u64, ms in 1..60_000_u64) {
        let value = format!("{h}h{m}m{}.{:03}s", ms / 1000, ms % 1000);
        let expected = Duration::from_secs(h * 3600 + m * 60) + Duration::from_millis(ms);
        prop_assert_eq!(hint::parse_span(&value, wall()), Some(expected));
        let body = format!("Limit reached. Please try again in {value}. Sorry.");
        prop_assert_eq!(hint::from_text(&body, Duration::MAX), Some(expected));
    }

    #[test]
    fn every_form_of_a_moment_says_the_same(ahead in 1..10_000_000_u64, minutes in -1439..1440_i64) {
        let date = wall() + Duration::from_secs(ahead);
        let shifted = (T0 + ahead).checked_add_signed(minutes * 60).expect("far from the epoch");
        let shifted = UNIX_EPOCH + Duration::from_secs(shifted);
        let local = humantime::format_rfc3339_seconds(shifted).to_string();
        let sign = if minutes < 0 { '-' } else { '+' };
        let offset = minutes.unsigned_abs();
        let forms = [
            httpdate::fmt_http_date(date),
            humantime::format_rfc3339(date).to_string(),
            format!("{}{sign}{:02}:{:02}", &local[..19], offset / 60, offset % 60),
            (T0 + ahead).to_string(),
            ((T0 + ahead) * 1000).to_string(),
            ahead.to_string(),
        ];
        for form in forms {
            let span = hint::parse_span(&form, wall());
            prop_assert_eq!(span, Some(Duration::from_secs(ahead)), "{}", form);
        }
    }
}
