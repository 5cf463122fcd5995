//! The rows of waits and resets: what a refusal says of when to come back, through the whole stack.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, Uri};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_quota::{
    dialect::{Anthropic, Detect, OpenAi, ReadQuota, Resource},
    drive::Drive,
    org::{Credential, HoldReason, Org, Orgs},
    outcome::Class,
    retry::{Exhaustion, RateLimitRetryLayer, RetryError},
    sim,
    stack::Stack,
};

use crate::{Body, MS, Req, SECOND, after, board, open, orgs, post, say, stack, told, with, within};

/// When every refusal of this file is sent, by its own clock.
const DATE: &str = "Wed, 21 Oct 2026 07:28:00 GMT";

/// An answer with these header lines. It has a `Date`, so that it does not matter when the test runs.
fn lines(status: u16, lines: &str, body: &'static str) -> Response<Body> {
    let mut response = say(status);
    for line in lines.lines().filter(|line| !line.trim().is_empty()) {
        let (name, value) = line.split_once(':').unwrap();
        response.headers_mut().append(name.trim().parse::<HeaderName>().unwrap(), value.trim().parse().unwrap());
    }
    response.headers_mut().entry("date").or_insert(DATE.parse().unwrap());
    *response.body_mut() = Body::from(Bytes::from_static(body.as_bytes()));
    response
}

/// How long the stack waits after such a refusal, before it asks again.
async fn waited(refusal: &str, body: &'static str) -> Duration {
    let orgs = orgs(&[("a", 10)]);
    let refusal = refusal.to_owned();
    let (service, wire) = stack(
        &orgs,
        |stack| stack.limit(open().build().unwrap()),
        move |_, nth| {
            let answer = if nth == 0 { lines(429, &refusal, body) } else { say(200) };
            async { Ok(answer) }
        },
    );
    assert_eq!(service.oneshot(post()).await.unwrap().status(), 200);
    assert_eq!(wire.len(), 2, "one retry is enough");
    wire.gaps()[0]
}

/// Runs a table of (header lines, the wait in milliseconds). Without one it is the stack's own first pause.
async fn check(table: &[(&str, Option<u64>)]) {
    for (refusal, wait) in table {
        let seen = waited(refusal, "").await;
        let (least, most) = match wait {
            Some(wait) => (Duration::from_millis(*wait), Duration::from_millis(*wait) + 2 * MS),
            None => (250 * MS, 314 * MS),
        };
        assert!(within(seen, least, most), "{refusal:?}: {seen:?}");
    }
}

/// What is told of the wait where no retry is allowed: the last status, and the last hint.
async fn given_up(refusal: &str) -> (u16, Option<Duration>) {
    let once = RateLimitRetryLayer::builder().max_calls(1).build().unwrap();
    let refusal = refusal.to_owned();
    let (service, _) = stack(
        &orgs(&[("a", 10)]),
        |stack| stack.retry(once),
        move |_, _| {
            let answer = lines(429, &refusal, "");
            async { Ok(answer) }
        },
    );
    let Err(RetryError::Exhausted(exhausted)) = service.oneshot(post()).await else { panic!("it was refused") };
    assert_eq!((exhausted.reason, exhausted.last.class), (Exhaustion::Calls, Class::Throttled));
    (exhausted.last.status.unwrap().as_u16(), exhausted.last_hint)
}

#[tokio::test(start_paused = true)]
async fn b01_an_http_date_holds_until_then() {
    check(&[
        ("retry-after: Wed, 21 Oct 2026 07:28:30 GMT", Some(30_000)),
        ("retry-after: Wednesday, 21-Oct-26 07:28:30 GMT", Some(30_000)),
        ("retry-after: Wed Oct 21 07:28:30 2026", Some(30_000)),
        ("retry-after: Wed, 21 Oct 2026 07:28:01 GMT", Some(1_000)),
        ("retry-after: Wed, 21 Oct 2026 07:28:00 GMT", None), // now
        ("retry-after: Wed, 21 Oct 2026 07:27:59 GMT", None),
        ("retry-after: Thu, 21 Oct 2026 07:28:30 GMT", None), // not a Thursday
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn b02_the_error_says_what_the_provider_said() {
    for (refusal, hint) in [
        ("retry-after: Wed, 21 Oct 2026 07:30:00 GMT", Some(120)),
        ("retry-after: Wed, 21 Oct 2026 07:29:59 GMT", Some(119)),
        ("retry-after: 120", Some(120)),
        ("retry-after: 5", Some(5)),
        ("retry-after: Wed, 21 Oct 2026 07:27:00 GMT", None),
        ("", None),
    ] {
        assert_eq!(given_up(refusal).await, (429, hint.map(Duration::from_secs)), "{refusal}");
    }
}

#[tokio::test(start_paused = true)]
async fn b04_what_cannot_be_read_is_no_hint_and_the_refusal_stays() {
    for value in [
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "99999-12-31T23:59:59Z",
        "Wed, 32 Oct 2026 07:28:30 GMT",
        "2026-02-30T00:00:00Z",
        "soon",
        "30 bananas",
        "",
        "NaN",
        "inf",
        "1e400",
        "18446744073709551616h",
    ] {
        let refusal = format!("retry-after: {value}");
        check(&[(&refusal, None)]).await;
        assert_eq!(given_up(&refusal).await, (429, None), "{refusal}");
    }
    // The last year that there is: longer than anybody waits, and said as it is.
    check(&[("retry-after: Fri, 31 Dec 9999 23:59:59 GMT", Some(300_000))]).await;
    let (_, hint) = given_up("retry-after: Fri, 31 Dec 9999 23:59:59 GMT").await;
    assert!(hint.unwrap().as_secs() > 7_000 * 365 * 86_400);
}

#[tokio::test(start_paused = true)]
async fn b05_a_fraction_is_a_fraction() {
    check(&[
        ("retry-after: 0.5", Some(500)),
        ("retry-after: .5", Some(500)),
        ("retry-after: 1.25", Some(1_250)),
        ("retry-after: 0.999", Some(999)),
        ("retry-after: 1", Some(1_000)),
        ("retry-after: 0.0", None),
        ("retry-after: -0.5", None),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn b07_zero_and_the_past_spin_nothing() {
    // What each org's first ten answers say; and whether they keep its callers off for the first second.
    for (hint, useful) in [
        ("retry-after: 0", false),
        ("retry-after: 0.0", false),
        ("retry-after: -1", false),
        ("retry-after: 0s", false),
        ("retry-after-ms: 0", false),
        ("retry-after: Wed, 21 Oct 2026 07:28:00 GMT", false),
        ("retry-after: Wed, 21 Oct 2026 07:18:00 GMT", false),
        ("", false),
        ("retry-after: 1", true),
    ] {
        for names in [&["a"][..], &["a", "b"]] {
            let caps: Vec<_> = names.iter().map(|name| (*name, 40)).collect();
            let begin = Instant::now();
            let (service, wire) = stack(
                &orgs(&caps),
                |stack| stack,
                move |_, nth| async move { Ok(if nth < 10 { lines(429, hint, "") } else { say(200) }) },
            );
            let mut drive = Drive::iter(service, (0..100).map(|id| (id, post())), 40).unwrap();
            while let Some((_, result)) = drive.next().await {
                assert_eq!(result.unwrap().status(), 200, "nothing is lost");
            }
            for name in names {
                let calls = wire.calls();
                let mut times = calls.iter().filter(|call| call.org == *name).map(|call| call.at - begin);
                let early = times.by_ref().take_while(|at| *at < SECOND).count();
                assert!((1..10).contains(&early), "{hint:?}, {name} of {}: {early} calls", names.len());
                assert!(!useful || early == 1, "{hint:?}, {name} of {}: {early} calls", names.len());
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b08_a_huge_wait_keeps_one_org_and_no_item() {
    // What one org of two says; how long it is held at once, and for what reason.
    for (hint, held, reason) in [
        ("60", 60, HoldReason::Hint),
        // A hint that its reader has cut was cut a moment ago, so what is just below the ceiling counts as cut.
        ("298", 298, HoldReason::Hint),
        ("299.5", 299, HoldReason::Parked),
        ("300", 300, HoldReason::Parked),
        ("301", 300, HoldReason::Parked),
        ("3600", 300, HoldReason::Parked),
        ("999999", 300, HoldReason::Parked),
    ] {
        let orgs = orgs(&[("a", 10), ("b", 10)]);
        let begin = Instant::now();
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |org, _| {
                let bad = org == "a";
                after(10 * MS, Ok(if bad { with(429, "retry-after", hint) } else { say(200) }))
            },
        );
        let mut drive = Drive::iter(service, (0..200).map(|id| (id, post())), 40).unwrap();
        while let Some((_, result)) = drive.next().await {
            assert_eq!(result.unwrap().status(), 200);
        }
        assert!(begin.elapsed() < 5 * SECOND, "{hint}: all are done by the other one: {:?}", begin.elapsed());
        assert_eq!((wire.of("a"), wire.of("b")), (1, 200), "{hint}");
        let hold = board(&orgs, "a").snapshot().hold.unwrap();
        assert_eq!(hold.reason, reason, "{hint}");
        let until = hold.until - begin;
        assert!(within(until, held * SECOND, held * SECOND + 520 * MS), "{hint}: {until:?}");
    }
    // With nobody else to ask, the run ends and says what was asked for.
    let begin = Instant::now();
    let (service, wire) =
        stack(&orgs(&[("a", 10)]), |stack| stack, |_, _| async { Ok(with(429, "retry-after", 999_999)) });
    let Err(RetryError::Exhausted(exhausted)) = service.oneshot(post()).await else { panic!("it was refused") };
    assert!(exhausted.is_rate_limited());
    assert_eq!(exhausted.last_hint, Some(999_999 * SECOND), "as it was said");
    assert!(begin.elapsed() <= 640 * SECOND, "{:?}", begin.elapsed());
    assert!((2..=3).contains(&wire.len()), "a probe in five minutes: {}", wire.len());
}

#[tokio::test(start_paused = true)]
async fn b10_a_wait_of_a_minute_is_waited_out() {
    for seconds in [20, 21, 59, 60, 61, 120, 300] {
        let refusal = format!("retry-after: {seconds}");
        check(&[(&refusal, Some(seconds * 1_000))]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn b11_milliseconds_come_before_seconds() {
    check(&[
        ("retry-after-ms: 250\nretry-after: 1", Some(250)),
        ("retry-after: 1\nretry-after-ms: 1500", Some(1_500)),
        ("x-ms-retry-after-ms: 350\nretry-after: 1", Some(350)),
        ("x-ms-retry-after-ms: 350\nretry-after-ms: 450", Some(450)),
        ("retry-after-ms: 0\nx-ms-retry-after-ms: 350\nretry-after: 1", Some(350)),
        ("retry-after-ms: -1\nretry-after: 1", Some(1_000)),
        ("retry-after-ms: x\nretry-after: 1", Some(1_000)),
        ("retry-after-ms: 60000", Some(60_000)),
        // Azure, where it names no wait but this.
        ("x-rate-limit-reset-tokens: 55\nx-ratelimit-remaining-tokens: 2675", Some(55_000)),
        ("x-ratelimit-limit-tokens: -1\nx-ratelimit-remaining-tokens: -1\nx-ratelimit-reset-tokens: 0", None),
        ("x-ratelimit-limit-tokens: -1\nx-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 55", Some(55_000)),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn b13_the_longest_reset_of_the_exhausted_buckets_counts() {
    // What remains of requests (full in 120 ms) and of tokens (full in 41 s).
    for (requests, tokens, wait) in [
        ("4999", "0", Some(41_000)),
        ("0", "0", Some(41_000)),
        ("0", "1", Some(120)),
        ("1", "0", Some(41_000)),
        ("4999", "1", None),
        ("4999", "-1", None),
        ("-1", "0", Some(41_000)),
    ] {
        let a = format!("x-ratelimit-remaining-requests: {requests}\nx-ratelimit-reset-requests: 120ms");
        let b = format!("x-ratelimit-remaining-tokens: {tokens}\nx-ratelimit-reset-tokens: 41s");
        check(&[(&format!("{a}\n{b}"), wait), (&format!("{b}\n{a}"), wait)]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn b14_durations_and_rfc_3339_are_read() {
    for (value, millis) in [
        ("1h2m3s", Some(3_723_000)),
        ("6m0s", Some(360_000)),
        ("1.2s", Some(1_200)),
        ("500ms", Some(500)),
        ("1m30.5s", Some(90_500)),
        ("2026-10-21T07:28:30Z", Some(30_000)),
        ("2026-10-21T09:28:30+02:00", Some(30_000)),
        ("2026-10-21T07:28:00Z", None),
        ("2026-10-21T09:28:30+02:60", None),
        ("1792567710", Some(30_000)),
        ("1792567710000", Some(30_000)),
        ("1m30.5", None),
        ("1.2", Some(1_200)),
    ] {
        let expected = millis.map(Duration::from_millis);
        assert_eq!(given_up(&format!("retry-after: {value}")).await.1, expected, "{value}");
        let reset = format!("x-ratelimit-remaining-requests: 0\nx-ratelimit-reset-requests: {value}");
        assert_eq!(given_up(&reset).await.1, expected, "{value} as a reset");
        if millis.is_none_or(|millis| millis <= 300_000) {
            check(&[(&format!("retry-after: {value}"), millis)]).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b16_a_skewed_clock_bends_no_wait() {
    // By how much the provider's clock is before or behind ours.
    for skew in [-86_400, -600, -21, 0, 21, 600, 86_400_i64] {
        let ours = SystemTime::now();
        let (ahead, by) = (skew > 0, Duration::from_secs(skew.unsigned_abs()));
        let date = if ahead { ours + by } else { ours - by };
        for (later, wait) in [(20, Some(20_000)), (1, Some(1_000)), (0, None), (-20, None)] {
            let apart = Duration::from_secs(i64::unsigned_abs(later));
            let then = httpdate::fmt_http_date(if later < 0 { date - apart } else { date + apart });
            let date = format!("date: {}", httpdate::fmt_http_date(date));
            check(&[
                (&format!("{date}\nretry-after: {then}"), wait),
                (&format!("x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: {then}\n{date}"), wait),
            ])
            .await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b17_the_body_names_the_wait() {
    const MESSAGE: &str = r#"{"error":{"message":"Rate limit reached. Please try again in 8.71s"}}"#;
    for (refusal, body, millis) in [
        ("", MESSAGE, Some(8_710)),
        ("", r#"{"error":{"message":"Please try again in 718ms."}}"#, Some(718)),
        ("", r#"{"error":{"message":"Your quota will reset after 2m 13s."}}"#, Some(133_000)),
        ("", r#"{"error":{"message":"Please try again in 0s."}}"#, None),
        ("", r#"{"error":{"message":"Please try again in 20."}}"#, None),
        ("", r#"{"error":{"message":"Please try again later"}}"#, None),
        ("", "", None),
        // The longer of both.
        ("retry-after: 9", MESSAGE, Some(9_000)),
        ("retry-after: 8", MESSAGE, Some(8_710)),
        ("retry-after: 0", MESSAGE, Some(8_710)),
    ] {
        let seen = waited(refusal, body).await;
        let wait = millis.map(Duration::from_millis);
        let (least, most) = wait.map_or((250 * MS, 314 * MS), |wait| (wait, wait + 2 * MS));
        assert!(within(seen, least, most), "{refusal:?}, {body:?}: {seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn b19_a_bare_refusal_is_a_short_pause_and_at_most_one_cut() {
    // So many are in flight, so many of them refused without a word; and how often the limit is cut.
    for (in_flight, refused, expected) in [(1, 1, 0), (2, 1, 1), (10, 1, 1), (10, 9, 1)] {
        let orgs = orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| {
                // The first one sounds the org, where there are others to follow.
                let bad = if in_flight == 1 { nth == 0 } else { (1..=refused).contains(&nth) };
                // Nothing is told of a quota that would have had room for it.
                after(10 * MS, Ok(if bad { say(429) } else { told(say(200)) }))
            },
        );
        if in_flight > 1 {
            service.clone().oneshot(post()).await.unwrap();
        }
        let (before, begin) = (wire.len(), Instant::now());
        let calls = (0..in_flight).map(|_| service.clone().oneshot(post()));
        for answer in futures_util::future::join_all(calls).await {
            assert_eq!(answer.unwrap().status(), 200);
        }
        let row = format!("{refused} of {in_flight}");
        assert_eq!(wire.len() - before, in_flight + refused, "{row}: one retry for each that was refused");
        assert!(begin.elapsed() < SECOND, "{row}: {:?}", begin.elapsed());
        let cell = board(&orgs, "a").snapshot().limit.unwrap();
        assert_eq!(cell.throttled, refused as u64, "{row}");
        let cuts = board(&orgs, "a").snapshot().history.iter().filter(|change| change.to < change.from).count();
        assert_eq!((cuts, cell.epoch), (expected, 1), "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn b20_a_burst_of_refusals_is_one_episode() {
    // Fifty in flight are all refused with five seconds, over so long.
    for millis in [0, 500, 1_000, 4_000] {
        let orgs = orgs(&[("a", 50)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| match nth {
                0 => after(MS, Ok(told(say(200)))),
                1..=50 => {
                    let after_all = Duration::from_millis(millis) * u32::try_from(nth - 1).unwrap() / 49;
                    after(100 * MS + after_all, Ok(with(429, "retry-after", 5)))
                }
                _ => after(10 * MS, Ok(told(say(200)))),
            },
        );
        service.clone().oneshot(post()).await.unwrap();
        let begin = Instant::now();
        let mut drive = Drive::iter(service, (0..500).map(|id| (id, post())), 100).unwrap();
        while let Some((_, result)) = drive.next().await {
            result.unwrap();
        }
        let cell = board(&orgs, "a").snapshot().limit.unwrap();
        assert_eq!((cell.epoch, cell.throttled), (1, 50), "{millis} ms: one cut");
        assert!(cell.limit > 25.0, "{millis} ms: halved once, and grown since: {}", cell.limit);
        // Nobody goes before the last hint has ended, and then at once.
        let resumed = wire.calls()[51].at - begin;
        let last = Duration::from_millis(5_100 + millis);
        assert!(within(resumed, last, last + 5 * MS), "{millis} ms: {resumed:?}");
    }
}

#[cfg(feature = "ietf")]
#[tokio::test(start_paused = true)]
async fn b22_all_policies_and_lines_of_the_ietf_fields_count() {
    check(&[
        (r#"ratelimit: "day";r=900;t=3000, "minute";r=0;t=20"#, Some(20_000)),
        (r#"ratelimit: "minute";r=0;t=20, "day";r=900;t=3000"#, Some(20_000)),
        ("ratelimit: \"day\";r=900;t=3000\nratelimit: \"minute\";r=0;t=20", Some(20_000)),
        ("ratelimit: minute;r=0;t=20\nratelimit: \"day\";r=900;t=3000", Some(20_000)),
        (r#"ratelimit: "day";r=0;t=70, "minute";r=0;t=20"#, Some(70_000)),
        (r#"ratelimit: "day";r=0, "minute";r=0;t=20"#, Some(20_000)),
        (r#"ratelimit: "day";r=900;t=3000, "minute";r=1;t=20"#, None),
        (r#"ratelimit: "minute";r=0"#, None),
        ("ratelimit: limit=100, remaining=0, reset=20", Some(20_000)),
        ("ratelimit-limit: 100\nratelimit-remaining: 0\nratelimit-reset: 20", Some(20_000)),
    ])
    .await;
}

#[cfg(feature = "ietf")]
#[tokio::test(start_paused = true)]
async fn b22_quotas_are_paced_by_the_tightest_policy() {
    const POLICIES: &str = "ratelimit-policy: \"minute\";q=60;w=60, \"day\";q=144000;w=86400";
    // What remains by either; and how long the next call waits: a second by the minute, 0.6 s by the day.
    for (minute, day, wait) in [(0, 900, 1_000), (900, 0, 600), (0, 0, 1_000), (900, 901, 0)] {
        for remainders in [
            format!("ratelimit: \"minute\";r={minute};t=20, \"day\";r={day};t=3000"),
            format!("ratelimit: \"day\";r={day};t=3000\nratelimit: \"minute\";r={minute};t=20"),
        ] {
            let answer = format!("{POLICIES}\n{remainders}");
            let (service, wire) = stack(
                &orgs(&[("a", 10)]),
                |stack| stack,
                move |_, _| {
                    let answer = lines(200, &answer, "");
                    async { Ok(answer) }
                },
            );
            for _ in 0..2 {
                service.clone().oneshot(post()).await.unwrap();
            }
            let seen = wire.gaps()[0];
            assert!(within(seen, wait * MS, (wait + 10) * MS), "{remainders}: {seen:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b23_where_dialects_disagree_the_most_restrictive_counts() {
    #[cfg(feature = "ietf")]
    for (ietf, remaining, wait) in [
        ("r=5;t=10", 0, Some(30_000)),
        ("r=0;t=10", 0, Some(30_000)),
        ("r=0;t=50", 0, Some(50_000)),
        ("r=0;t=10", 5, Some(10_000)),
        ("r=5;t=10", 5, None),
    ] {
        let openai = format!("x-ratelimit-remaining-requests: {remaining}\nx-ratelimit-reset-requests: 30s");
        let (one, other) = (format!("ratelimit: \"m\";{ietf}\n{openai}"), format!("{openai}\nratelimit: \"m\";{ietf}"));
        check(&[(&one, wait), (&other, wait)]).await;
        // An explicit wait comes before them all.
        check(&[(&format!("{one}\nretry-after: 2"), Some(2_000))]).await;
    }
    // In quotas too: what remains by each, at sixty a minute; and how long the next call waits.
    for (anthropic, openai, wait) in [(0, 900, 1_000), (900, 0, 1_000), (0, 0, 1_000), (900, 900, 0)] {
        let (service, wire) = stack(
            &orgs(&[("a", 10)]),
            |stack| stack,
            move |_, _| {
                let answer = format!(
                    "anthropic-ratelimit-requests-limit: 60\nanthropic-ratelimit-requests-remaining: {anthropic}\n\
                     x-ratelimit-limit-requests: 60\nx-ratelimit-remaining-requests: {openai}"
                );
                async move { Ok(lines(200, &answer, "")) }
            },
        );
        for _ in 0..2 {
            service.clone().oneshot(post()).await.unwrap();
        }
        let seen = wire.gaps()[0];
        assert!(within(seen, wait * MS, (wait + 10) * MS), "{anthropic}, {openai}: {seen:?}");
    }
}

/// In which dialect an answer tells its quota of requests.
#[derive(Clone, Copy, Debug)]
enum Manner {
    Anthropic,
    OpenAi,
    Azure,
    #[cfg(feature = "ietf")]
    Ietf,
    /// In two, of which the second knows of far more than there is.
    Contradicting,
    Silent,
}

fn retold(mut answer: HeaderMap, manner: Manner) -> HeaderMap {
    let of = |figure| HeaderName::try_from(format!("anthropic-ratelimit-requests-{figure}")).unwrap();
    let Some(left) = answer.get(of("remaining")).cloned() else { return answer };
    let limit = answer[of("limit")].clone();
    if !matches!(manner, Manner::Anthropic | Manner::Contradicting) {
        for figure in ["limit", "remaining", "reset"] {
            answer.remove(of(figure));
        }
    }
    match manner {
        Manner::Anthropic | Manner::Silent => {}
        Manner::OpenAi => {
            answer.insert("x-ratelimit-limit-requests", limit);
            answer.insert("x-ratelimit-remaining-requests", left);
        }
        Manner::Azure => {
            // Per ten seconds.
            let limit = limit.to_str().unwrap().parse::<u64>().unwrap() / 6;
            answer.insert("x-ratelimit-limit-requests", limit.into());
            answer.insert("x-ratelimit-renewalperiod-requests", 10.into());
            answer.insert("x-ratelimit-remaining-requests", left);
            answer.insert("x-ratelimit-remaining-tokens", HeaderValue::from_static("-1"));
        }
        #[cfg(feature = "ietf")]
        Manner::Ietf => {
            let (limit, left) = (limit.to_str().unwrap(), left.to_str().unwrap());
            let policies = format!("\"minute\";q={limit};w=60, \"day\";q=1000000;w=86400");
            answer.insert("ratelimit-policy", policies.parse().unwrap());
            answer.insert("ratelimit", format!("\"day\";r=999000, minute;r={left}").parse().unwrap());
        }
        Manner::Contradicting => {
            answer.insert("x-ratelimit-limit-requests", 60_000.into());
            answer.insert("x-ratelimit-remaining-requests", 9_999.into());
        }
    }
    answer
}

/// Four hundred calls to a simulated org of ten a second, which tells its quota in these manners in turn: how many it refused,
/// and how long it took, beside the least that is possible.
async fn run_told(manners: &'static [Manner]) -> (u64, f64) {
    let config = sim::Config::new(sim::Dialect::Anthropic)
        .latency(sim::Latency::new(50.0, 0.3))
        .headers(sim::Headers::RequestsOnly)
        .org(sim::OrgConfig::new("a", "key").requests_per_minute(600.0).requests_capacity(20.0));
    let sim = sim::Sim::new(config.clone()).unwrap();
    let served = Arc::new(AtomicUsize::new(0));
    let client = ServiceExt::<Req>::map_response(sim.service(), move |answer: Response<sim::SimBody>| {
        let (mut head, body) = answer.into_parts();
        let nth = served.fetch_add(1, SeqCst);
        head.headers = retold(head.headers, manners[nth % manners.len()]);
        Response::from_parts(head, body)
    });
    let org =
        Org::new("a").credential(Credential::new("key")).cap(20).base_url(Uri::from_static("http://provider.test"));
    let service = Stack::new(Orgs::new([org]).unwrap()).build(client).unwrap();
    let begin = Instant::now();
    let mut drive = Drive::iter(service, (0..400).map(|id| (id, post())), 40).unwrap();
    while let Some((_, result)) = drive.next().await {
        assert_eq!(result.unwrap().status(), 200);
    }
    let least = config.fluid_limit(400).unwrap();
    (sim.truth().throttled_429(), begin.elapsed().as_secs_f64() / least.as_secs_f64())
}

#[tokio::test(start_paused = true)]
async fn b23_a_run_may_change_its_dialect_and_contradict_itself() {
    use Manner::*;
    let runs: [&[Manner]; 8] = [
        &[Anthropic],
        &[OpenAi],
        &[Azure],
        #[cfg(feature = "ietf")]
        &[Ietf],
        &[Contradicting],
        &[Anthropic, OpenAi],
        &[Anthropic, Silent, OpenAi, Azure, Silent],
        &[
            OpenAi,
            Contradicting,
            #[cfg(feature = "ietf")]
            Ietf,
            Azure,
            Anthropic,
        ],
    ];
    for manners in runs {
        let (refused, times) = run_told(manners).await;
        assert!(refused == 0 && times < 1.02, "{manners:?}: {refused} refused, {times:.3} times the least");
    }
    // Where nothing is told, the limit is found by refusals.
    assert!(run_told(&[Silent]).await.0 > 0);
}

#[tokio::test(start_paused = true)]
async fn b25_what_an_answer_does_not_mention_is_unchanged() {
    const FULL: &str =
        "anthropic-ratelimit-output-tokens-limit: 80000\nanthropic-ratelimit-output-tokens-remaining: 80000";
    const SPENT: &str = "anthropic-ratelimit-requests-limit: 4000\nanthropic-ratelimit-requests-remaining: 3990\n\
                         anthropic-ratelimit-output-tokens-limit: 80000\nanthropic-ratelimit-output-tokens-remaining: 0";
    // What the answer after the refusal mentions, and whether any headroom is left then: the output is spent.
    for (status, second, left) in [
        (404, "", false),
        (200, "", false),
        (200, "anthropic-ratelimit-requests-limit: 4000\nanthropic-ratelimit-requests-remaining: 3989", false),
        (200, "x-ratelimit-limit-requests: 4000\nx-ratelimit-remaining-requests: 3989", false),
        (200, "anthropic-ratelimit-output-tokens-remaining: -1", false),
        (200, "anthropic-ratelimit-output-tokens-remaining: 0", false),
        (200, "anthropic-ratelimit-output-tokens-remaining: 80000", true),
    ] {
        let orgs = orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| match nth {
                0 => after(MS, Ok(lines(200, FULL, ""))),
                1 => after(10 * MS, Ok(lines(429, SPENT, ""))),
                _ => after(20 * MS, Ok(lines(status, second, ""))),
            },
        );
        service.clone().oneshot(post()).await.unwrap();
        assert_eq!(board(&orgs, "a").headroom(), 1.0);
        // Both are on their way when the first of them is refused; what becomes of that one is no matter here.
        let refused = tokio::spawn(service.clone().oneshot(post()));
        tokio::task::yield_now().await;
        assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), status);
        assert_eq!(wire.len(), 3);
        refused.abort();
        let headroom = board(&orgs, "a").headroom();
        assert_eq!(headroom > 0.5, left, "{status}, {second:?}: {headroom}");
        assert!(left || headroom < 0.01, "{status}, {second:?}: {headroom}");
    }
}

#[tokio::test(start_paused = true)]
async fn b26_without_retry_after_the_reset_of_the_empty_bucket_is_the_hint() {
    for resource in ["requests", "input-tokens", "output-tokens", "tokens"] {
        for (remaining, reset, wait) in [
            ("0", "2026-10-21T07:28:12Z", Some(12_000)),
            ("0", "2026-10-21T07:28:13Z", Some(13_000)),
            ("1", "2026-10-21T07:28:12Z", None),
            ("0", "2026-10-21T07:28:00Z", None),
            ("0", "", None),
        ] {
            let name = format!("anthropic-ratelimit-{resource}");
            let refusal = format!("{name}-remaining: {remaining}\n{name}-reset: {reset}");
            check(&[(&refusal, wait), (&format!("{refusal}\nretry-after: 7"), Some(7_000))]).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b28_a_parked_org_is_probed_and_comes_back_early() {
    // What it says, how many answers are refusals; and when it was called.
    for (hint, refusals, times) in [
        (13_262, 1, &[0, 300][..]),
        (13_262, 2, &[0, 300, 600]),
        (13_262, 4, &[0, 300, 600, 900, 1_200]),
        (301, 1, &[0, 300]),
        (299, 1, &[0, 299]),
    ] {
        let orgs = orgs(&[("a", 10)]);
        let patient = RateLimitRetryLayer::builder().patience(7_200 * SECOND).build().unwrap();
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()).retry(patient),
            move |_, nth| {
                let answer = if nth < refusals { with(429, "retry-after", hint) } else { say(200) };
                after(MS, Ok(answer))
            },
        );
        let begin = Instant::now();
        let mut drive = Drive::iter(service, (0..20).map(|id| (id, post())), 20).unwrap();
        while let Some((_, result)) = drive.next().await {
            result.unwrap();
        }
        let seen: Vec<_> = wire.calls().iter().map(|call| (call.at - begin).as_secs()).collect();
        assert_eq!(seen[..times.len()], *times, "{hint}: one at a time");
        let last = *times.last().unwrap();
        assert!(seen[times.len()..].iter().all(|at| *at == last), "{hint}: the others follow at once: {seen:?}");
        assert_eq!(seen.len(), 20 + refusals);
        assert!(!board(&orgs, "a").is_held());
    }
}

#[test]
fn b97_input_is_input_and_output_is_output() {
    let dialects: [(Arc<dyn ReadQuota>, &[&str]); 3] = [
        (Arc::new(Anthropic), &["anthropic-ratelimit-{of}-{figure}"]),
        (Arc::new(OpenAi), &["x-ratelimit-{figure}-{of}"]),
        (Arc::new(Detect), &["anthropic-ratelimit-{of}-{figure}", "x-ratelimit-{figure}-{of}"]),
    ];
    let of = ["input-tokens", "output-tokens", "tokens", "requests"];
    let resources = [Resource::InputTokens, Resource::OutputTokens, Resource::Tokens, Resource::Requests];
    for (dialect, shapes) in dialects {
        for shape in shapes {
            // Some are there and some are not, in any order.
            for there in 0..16 {
                let lines: Vec<_> = (0..4)
                    .filter(|n| there >> n & 1 == 1)
                    .map(|n| {
                        let name = |figure| shape.replace("{of}", of[n]).replace("{figure}", figure);
                        let (limit, remaining) = (8_000_000 / 10_u32.pow(n as u32), 7 + n);
                        format!("{}: {limit}\n{}: {remaining}", name("limit"), name("remaining"))
                    })
                    .collect();
                for lines in [lines.join("\n"), lines.iter().rev().cloned().collect::<Vec<_>>().join("\n")] {
                    let readings = dialect.read(crate::ra::lines(200, &lines, "").headers(), None);
                    for n in 0..4 {
                        let seen = readings.get(resources[n]).map(|reading| (reading.limit, reading.remaining));
                        let limit = [8_000_000.0, 800_000.0, 80_000.0, 8_000.0][n];
                        let expected = (Some(limit), Some(7.0 + n as f64));
                        assert_eq!(seen, (there >> n & 1 == 1).then_some(expected), "{lines}");
                    }
                }
            }
        }
    }
}
