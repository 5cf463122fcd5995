//! The rows of what a refusal means: by its status, by its type and code, and by whole sentences.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Response, header::CONTENT_TYPE};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_quota::{
    org::Orgs,
    outcome::{Class, Outcome, Stamp},
    retry::RateLimitRetryLayer,
    stack::Stacked,
};

use crate::{Body, Client, Req, SECOND, Wire, board, open, orgs, post, say, stack};

/// An answer with such a body.
pub(crate) fn json(status: u16, body: impl Into<String>) -> Response<Body> {
    let mut response = say(status);
    response.headers_mut().insert(CONTENT_TYPE, "application/json".parse().unwrap());
    *response.body_mut() = Body::from(Bytes::from(body.into()));
    response
}

/// As Anthropic refuses.
fn anthropic(status: u16, kind: &str, message: &str) -> Response<Body> {
    json(status, format!(r#"{{"type":"error","error":{{"type":"{kind}","message":"{message}"}}}}"#))
}

/// As OpenAI refuses.
fn openai(status: u16, kind: &str, code: &str, message: &str) -> Response<Body> {
    json(status, format!(r#"{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{code}"}}}}"#))
}

/// A stack of these orgs, of which A answers as told, by the number of the call, and any other one well.
fn a_answers(
    names: &[&str],
    answer: impl Fn(usize) -> Response<Body> + Clone + Send + Sync + 'static,
) -> (Stacked<Client>, Wire, Orgs) {
    fastrand::seed(7);
    let orgs = orgs(&names.iter().map(|name| (*name, 10)).collect::<Vec<_>>());
    let (service, wire) = stack(
        &orgs,
        |stack| stack.limit(open().build().unwrap()),
        move |name, nth| {
            let answer = if name == "a" { answer(nth) } else { say(200) };
            async { Ok(answer) }
        },
    );
    (service, wire, orgs)
}

/// What a lone org's answer means, and what is told of it, where nobody tries again.
async fn judged(answer: Response<Body>, request: Req) -> (Outcome, Option<String>) {
    let client = tower::service_fn(move |_: Req| {
        let answer = answer.clone();
        async { Ok::<_, tower::BoxError>(answer) }
    });
    let layer = tower_quota::judge::JudgeLayer::new();
    let answer = tower::Layer::layer(&layer, client).oneshot(request).await.unwrap();
    let stamp = answer.extensions().get::<Stamp>().unwrap();
    (stamp.outcome, stamp.said.as_deref().map(str::to_owned))
}

#[tokio::test(start_paused = true)]
async fn b29_a_quota_that_is_used_up_takes_the_org_out_and_no_call() {
    // How A refuses; whether it is out after its first refusal.
    for (answer, out) in [
        (openai(429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota"), true),
        (openai(429, "", "insufficient_quota", ""), true),
        (openai(429, "insufficient_quota", "", ""), true),
        (anthropic(402, "billing_error", "pay"), true),
        (anthropic(400, "invalid_request_error", "Your credit balance is too low to access the API."), true),
        // Its neighbours: a throttle, however it is worded.
        (openai(429, "requests", "rate_limit_exceeded", "You exceeded your current quota"), false),
        (openai(429, "", "insufficient_quotas", ""), false),
        (json(429, r#"{"error":{"message":"insufficient_quota"}}"#), false),
    ] {
        let refusal = answer.clone();
        let (service, wire, orgs) = a_answers(&["a", "b"], move |_| refusal.clone());
        for _ in 0..20 {
            assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), 200);
            tokio::time::advance(SECOND).await;
        }
        assert_eq!(wire.of("b"), 20);
        let row = answer.body();
        assert_eq!(board(&orgs, "a").is_out(), out, "{row:?}");
        assert!(if out { wire.of("a") == 1 } else { wire.of("a") > 1 }, "{row:?}: {}", wire.of("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn b31_a_date_of_return_is_read_by_the_answers_own_clock() {
    let day = Duration::from_secs(86_400);
    let limits = "You have reached your specified API usage limits. You will regain access on";
    let date = |name: &'static str| {
        move |mut answer: Response<Body>| {
            answer.headers_mut().insert("date", name.parse().unwrap());
            answer
        }
    };
    let eve = date("Sat, 31 Oct 2026 00:00:00 GMT");
    for (answer, class, wait) in [
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 2026-11-01 at 00:00 UTC."))),
            Class::OutOfQuota,
            Some(day),
        ),
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 2026-10-31 at 00:01 UTC."))),
            Class::OutOfQuota,
            Some(60 * SECOND),
        ),
        // Now, or past: late, and not lost. Far off: a year.
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 2026-10-31 at 00:00 UTC."))),
            Class::OutOfQuota,
            Some(Duration::ZERO),
        ),
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 2026-10-30 at 00:00 UTC."))),
            Class::OutOfQuota,
            Some(Duration::ZERO),
        ),
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 2027-10-31 at 00:00 UTC."))),
            Class::OutOfQuota,
            Some(365 * day),
        ),
        (
            eve(anthropic(400, "invalid_request_error", &format!("{limits} 9999-12-31 at 23:59 UTC."))),
            Class::OutOfQuota,
            Some(365 * day),
        ),
        // No date, or none that can be read.
        (eve(anthropic(400, "invalid_request_error", &format!("{limits} Sunday."))), Class::OutOfQuota, None),
        // Its neighbours.
        (
            eve(anthropic(400, "invalid_request_error", "regain access on 2026-11-01 at 00:00 UTC.")),
            Class::Terminal,
            None,
        ),
        (
            eve(anthropic(429, "rate_limit_error", &format!("{limits} 2026-11-01 at 00:00 UTC."))),
            Class::Throttled,
            None,
        ),
    ] {
        let row = answer.body().clone();
        let now = Instant::now();
        let (outcome, _) = judged(answer, post()).await;
        assert_eq!((outcome.class, outcome.not_before.map(|at| at - now)), (class, wait), "{row:?}");
    }
    // Without a `Date` by this machine's clock, and the item goes elsewhere.
    let tomorrow = humantime::format_rfc3339_seconds(SystemTime::now() + day).to_string();
    let message = format!("{limits} {} at {} UTC.", &tomorrow[..10], &tomorrow[11..16]);
    let (outcome, _) = judged(anthropic(400, "invalid_request_error", &message), post()).await;
    let wait = outcome.not_before.unwrap() - Instant::now();
    assert!(day - 120 * SECOND < wait && wait <= day, "{wait:?}");
    let (service, wire, _) = a_answers(&["a", "b"], move |_| anthropic(400, "invalid_request_error", &message));
    for _ in 0..20 {
        assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), 200);
    }
    assert_eq!((wire.of("a"), wire.of("b")), (1, 20));
}

#[tokio::test(start_paused = true)]
async fn b32_what_a_message_mentions_benches_no_org() {
    for message in [
        "prompt mentions usage credits",
        "messages.0: Your credit balance is too low to access the API is no valid role",
        "your credit balance is too low to access the API",
        "insufficient_quota",
        "billing_error: you have reached your specified API usage limits",
    ] {
        let refusal = message.to_owned();
        let (service, wire, orgs) =
            a_answers(
                &["a"],
                move |nth| {
                    if nth == 0 { anthropic(400, "invalid_request_error", &refusal) } else { say(200) }
                },
            );
        let answer = service.clone().oneshot(post()).await.unwrap();
        assert_eq!((answer.status().as_u16(), wire.len()), (400, 1), "{message}: final");
        assert!(!board(&orgs, "a").is_out());
        assert_eq!(service.oneshot(post()).await.unwrap().status(), 200, "{message}: and the next is served");
    }
}

/// Of an org that says so once and then serves: how many calls, the last status, and whether the limiter counts a refusal.
async fn once(answer: Response<Body>) -> (usize, u16, bool) {
    let (service, wire, orgs) = a_answers(&["a"], move |nth| match nth {
        0 => say(200),
        1 => answer.clone(),
        _ => say(200),
    });
    service.clone().oneshot(post()).await.unwrap();
    let refusals = || board(&orgs, "a").snapshot().limit.unwrap().throttled;
    let before = refusals();
    let answer = service.oneshot(post()).await.unwrap();
    (wire.len() - 1, answer.status().as_u16(), refusals() > before)
}

#[tokio::test(start_paused = true)]
async fn b34_what_asks_for_more_than_the_limit_is_asked_once() {
    for figures in ["Limit 30000, Requested 45411", "Limit 30000, Requested 30001", "Limit 30,000, Requested 45,411"] {
        let message = format!("Request too large for gpt-4o on tokens per min (TPM): {figures}. Visit");
        let answer = openai(429, "tokens", "rate_limit_exceeded", &message);
        assert_eq!(once(answer).await, (1, 429, false), "{figures}: final, and no cut");
    }
}

#[tokio::test(start_paused = true)]
async fn b35_the_same_words_where_it_fits_are_a_throttle() {
    for figures in
        ["Limit 250000, Requested 546", "Limit 30000, Requested 30000", "Limit 1,000,000, Requested 45,411", ""]
    {
        let message = format!("Request too large for gpt-4o on tokens per min (TPM): {figures}. Visit");
        let (calls, status, _) = once(openai(429, "tokens", "rate_limit_exceeded", &message)).await;
        assert_eq!((calls, status), (2, 200), "{figures}");
    }
}

#[tokio::test(start_paused = true)]
async fn b37_what_is_too_large_is_asked_once_and_its_size_is_told() {
    let size = |bytes: usize| http::Request::post("/v1/messages").body(Body::from(vec![b'x'; bytes])).unwrap();
    for (answer, bytes, told) in [
        (
            anthropic(413, "request_too_large", "Request exceeds the maximum size"),
            40_000,
            "request_too_large: Request exceeds the maximum size (the request's body has 40000 bytes; Anthropic takes 32 MB)",
        ),
        (json(413, r#"{"error":{"message":"too large"}}"#), 7, "too large (the request's body has 7 bytes)"),
        (json(413, "<html>"), 0, "413 Payload Too Large (the request's body has 0 bytes)"),
    ] {
        assert_eq!(once(answer.clone()).await, (1, 413, false), "{told}: final, and no cut");
        let (outcome, said) = judged(answer, size(bytes)).await;
        assert_eq!((outcome.class, said.as_deref()), (Class::TooLarge, Some(told)));
    }
}

#[tokio::test(start_paused = true)]
async fn b38_an_overload_passes_and_cuts_no_limit() {
    for answer in [
        anthropic(529, "overloaded_error", "Overloaded"),
        json(529, ""),
        anthropic(500, "api_error", "Internal server error"),
        openai(503, "server_error", "server_is_overloaded", ""),
        json(504, ""),
        json(408, ""),
        json(409, ""),
        // What contradicts the status is not believed.
        anthropic(529, "rate_limit_error", ""),
    ] {
        assert_eq!(once(answer.clone()).await, (2, 200, false), "{answer:?}");
    }
    // Its neighbour.
    let (calls, status, _) = once(anthropic(404, "not_found_error", "")).await;
    assert_eq!((calls, status), (1, 404));
}

#[tokio::test(start_paused = true)]
async fn b40_a_429_is_a_throttle_whatever_its_code() {
    for code in ["rate_limit_exceeded", "429", "server_error", "invalid_api_key", "tokens", "", "quota"] {
        let once_only = RateLimitRetryLayer::builder().max_calls(1).build().unwrap();
        let orgs = orgs(&[("a", 10)]);
        let (service, _) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()).retry(once_only),
            move |_, _| async move { Ok(openai(429, code, code, "slow")) },
        );
        let error = service.oneshot(post()).await.unwrap_err();
        assert_eq!((error.class(), error.is_rate_limited()), (Some(Class::Throttled), true), "{code}");
        let (calls, status, _) = once(openai(429, code, code, "slow")).await;
        assert_eq!((calls, status), (2, 200), "{code}");
    }
    // Its neighbours: the same words with another status are none.
    for status in [400, 404, 422] {
        assert_eq!(once(openai(status, "requests", "rate_limit_exceeded", "")).await, (1, status, false));
    }
}

#[tokio::test(start_paused = true)]
async fn b41_a_request_that_was_cut_short_on_its_way_is_sent_once_more() {
    let parse = "We could not parse the JSON body of your request";
    for (message, times, calls, status) in [
        (format!("{parse}. (HINT: This likely means …)"), 1, 2, 200),
        (parse.to_owned(), 2, 2, 400),
        ("The request body is not valid JSON: unexpected end of data: line 1".to_owned(), 1, 2, 200),
        ("The request body is not valid JSON: no low surrogate in string".to_owned(), 1, 1, 400),
        (format!("tools.0: {parse}"), 1, 1, 400),
    ] {
        let refusal = json(400, format!(r#"{{"error":{{"message":"{message}","type":"invalid_request_error"}}}}"#));
        let (service, wire, orgs) = a_answers(&["a"], move |nth| if nth < times { refusal.clone() } else { say(200) });
        let answer = service.oneshot(post()).await.unwrap();
        assert_eq!((wire.len(), answer.status().as_u16()), (calls, status), "{message}, {times} times");
        assert!(!board(&orgs, "a").is_out());
    }
}
