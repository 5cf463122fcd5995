//! The rows of successes that are none: errors in the body or the stream, nothing in it, or not all of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Uri, header::CONTENT_TYPE};
use http_body_util::Full;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::ServiceExt;
use tower_quota::{
    client,
    judge::{EmptyPolicy, JudgeLayer},
    org::{Credential, Org, Orgs},
    outcome::{Class, Stamp},
    retry::RetryError,
    stack::Stack,
};

use crate::{Body, SECOND, Wire, board, cl::json, open, orgs, post, say, stack, within};

const START: &str = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n";
const PARTIAL: &str =
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"Partial\"}}\n\n";
const STOP: &str = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";

fn events(body: impl Into<String>) -> Response<Body> {
    let mut response = json(200, body);
    response.headers_mut().insert(CONTENT_TYPE, "text/event-stream".parse().unwrap());
    response
}

fn error(kind: &str) -> String {
    format!("event: error\ndata: {{\"type\":\"error\",\"error\":{{\"type\":\"{kind}\",\"message\":\"m\"}}}}\n\n")
}

/// What becomes of a call whose first answer is this, and whose later ones are good.
struct Became {
    /// As the judge has it, of the answer that the caller gets.
    class: Option<Class>,
    calls: usize,
    out: bool,
    took: Duration,
}

async fn first(answer: Response<Body>, judge: JudgeLayer) -> Became {
    let orgs = orgs(&[("a", 10)]);
    let (service, wire): (_, Wire) = stack(
        &orgs,
        |stack| stack.limit(open().build().unwrap()).judge(judge),
        move |_, nth| {
            let answer = if nth == 0 { answer.clone() } else { say(200) };
            async { Ok(answer) }
        },
    );
    let begin = tokio::time::Instant::now();
    let class = match service.oneshot(post()).await {
        Ok(answer) => Some(answer.extensions().get::<Stamp>().unwrap().outcome.class),
        Err(error) => error.class(),
    };
    Became { class, calls: wire.len(), out: board(&orgs, "a").is_out(), took: begin.elapsed() }
}

async fn became(answer: Response<Body>) -> (Option<Class>, usize) {
    let Became { class, calls, .. } = first(answer, JudgeLayer::new()).await;
    (class, calls)
}

#[tokio::test(start_paused = true)]
async fn b52_an_error_in_a_stream_has_the_class_of_its_type() {
    for (kind, class, calls) in [
        // It passes: the next answer is taken.
        ("overloaded_error", Class::Ok, 2),
        ("api_error", Class::Ok, 2),
        ("rate_limit_error", Class::Ok, 2),
        ("anything", Class::Ok, 2),
        // It does not.
        ("invalid_request_error", Class::Terminal, 1),
        ("request_too_large", Class::TooLarge, 1),
        ("not_found_error", Class::Terminal, 1),
    ] {
        for stream in [error(kind), START.to_owned() + PARTIAL + &error(kind)] {
            assert_eq!(became(events(stream)).await, (Some(class), calls), "{kind}");
        }
    }
    for kind in ["authentication_error", "billing_error"] {
        let became = first(events(error(kind)), JudgeLayer::new()).await;
        assert!(became.out, "{kind}");
        assert_eq!(became.calls, 1, "{kind}");
    }
    // Its neighbour: the same in what a model writes.
    let text = serde_json::to_string(&(error("overloaded_error"))).unwrap();
    let wrote = format!("{START}event: content_block_delta\ndata: {{\"delta\":{{\"text\":{text}}}}}\n\n{STOP}");
    assert_eq!(became(events(wrote)).await, (Some(Class::Ok), 1));
}

#[tokio::test(start_paused = true)]
async fn b53_a_stream_without_its_end_is_no_answer() {
    for (stream, calls) in [
        (START.to_owned() + PARTIAL + STOP, 1),
        (START.to_owned() + PARTIAL, 2),
        (START.to_owned(), 2),
        (START.to_owned() + PARTIAL + &error("overloaded_error"), 2),
        (START.to_owned() + PARTIAL + &error("overloaded_error") + STOP, 2),
        (String::new(), 2),
        // Of no known kind: it ends as it likes.
        (PARTIAL.to_owned(), 1),
        ("data: {\"object\":\"chat.completion.chunk\"}\n\n".to_owned(), 2),
        ("data: {\"object\":\"chat.completion.chunk\"}\n\ndata: [DONE]\n\n".to_owned(), 1),
    ] {
        assert_eq!(became(events(stream.clone())).await, (Some(Class::Ok), calls), "{stream}");
    }
}

#[tokio::test]
async fn b55_a_body_that_breaks_off_is_asked_for_again() {
    // What the server sends the first time; it closes the connection then.
    for (sent, calls) in [
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", 2),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", 2),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 1),
        ("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello", 2),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", 1),
        // Nobody announced a length: only what is in it tells.
        ("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello", 1),
        ("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n{\"id\":\"x\",", 2),
        ("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n{\"id\":\"x\"}", 1),
    ] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base: Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let seen = Arc::new(AtomicUsize::new(0));
        let see = seen.clone();
        let server = tokio::spawn(async move {
            for nth in 0.. {
                let (mut wire, _) = listener.accept().await.unwrap();
                let mut head = vec![];
                while !head.ends_with(b"{}") {
                    head.push(wire.read_u8().await.unwrap());
                }
                let answer = if nth == 0 { sent } else { "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" };
                wire.write_all(answer.as_bytes()).await.unwrap();
                see.fetch_add(1, SeqCst);
            }
        });
        let org = Org::new("a").credential(Credential::new("sk-1")).base_url(base);
        let service = Stack::new(Orgs::new([org]).unwrap()).build(client::http::<Full<Bytes>>()).unwrap();
        let request = Request::post("/v1/messages").body(Full::from("{}")).unwrap();
        let answer = service.oneshot(request).await.unwrap();
        assert_eq!(answer.extensions().get::<Stamp>().unwrap().outcome.class, Class::Ok);
        assert_eq!(seen.load(SeqCst), calls, "{sent}");
        server.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn b56_an_error_in_a_success_is_one() {
    let good = r#""choices":[{"message":{"content":"a"}}]"#;
    for (body, class, calls) in [
        (r#"{"error":{"code":502,"message":"Provider returned error"}}"#.to_owned(), Class::Ok, 2),
        (r#"{"error":{"code":500}}"#.to_owned(), Class::Ok, 2),
        (r#"{"error":{"code":"504"}}"#.to_owned(), Class::Ok, 2),
        (r#"{"error":{"code":429}}"#.to_owned(), Class::Ok, 2),
        (r#"{"error":"upstream"}"#.to_owned(), Class::Ok, 2),
        (r#"{"type":"error","error":{"type":"overloaded_error"}}"#.to_owned(), Class::Ok, 2),
        (format!(r#"{{"error":{{"code":502}},{good}}}"#), Class::Ok, 2),
        (r#"{"error":{"code":400,"message":"bad"}}"#.to_owned(), Class::Terminal, 1),
        (r#"{"error":{"code":413}}"#.to_owned(), Class::TooLarge, 1),
        // None at the top.
        (format!(r#"{{"error":null,{good}}}"#), Class::Ok, 1),
        (format!(r#"{{{good},"x":{{"error":{{"code":502}}}}}}"#), Class::Ok, 1),
        (r#"{"choices":[{"message":{"content":"{\"error\":{\"code\":502}}"}}]}"#.to_owned(), Class::Ok, 1),
    ] {
        assert_eq!(became(json(200, &body)).await, (Some(class), calls), "{body}");
    }
    // A throttle's wait is waited out.
    let became = first(json(200, r#"{"error":{"code":429,"message":"try again in 7s"}}"#), JudgeLayer::new()).await;
    assert!(within(became.took, 7 * SECOND, 8 * SECOND), "{:?}", became.took);
}

/// Empty answers are asked for again, or taken where the policy is to; the others are answers under either.
async fn check_empty(empty: &[&str], not: &[&str]) {
    for (bodies, again) in [(empty, true), (not, false)] {
        for body in bodies {
            let asked = first(json(200, *body), JudgeLayer::new()).await;
            let calls = if again { 2 } else { 1 };
            assert_eq!((asked.class, asked.calls, asked.out), (Some(Class::Ok), calls, false), "{body}");
            let taken = first(json(200, *body), JudgeLayer::new().empty(EmptyPolicy::Accept)).await;
            assert_eq!((taken.class, taken.calls), (Some(Class::Ok), 1), "{body}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b42_an_empty_completion_is_asked_for_again() {
    check_empty(
        &[
            r#"{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"message":{"content":null},"finish_reason":"stop"}]}"#,
            r#"{"type":"message","content":[],"stop_reason":"end_turn"}"#,
            r#"{"type":"message","content":[{"type":"text","text":""}],"stop_reason":"end_turn"}"#,
        ],
        &[
            r#"{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"message":{"content":null,"tool_calls":[{"id":"c"}]},"finish_reason":"tool_calls"}]}"#,
            r#"{"type":"message","content":[{"type":"tool_use","input":{}}],"stop_reason":"tool_use"}"#,
            // It says why.
            r#"{"choices":[{"message":{"content":""},"finish_reason":"length"}]}"#,
            r#"{"type":"message","content":[],"stop_reason":"max_tokens"}"#,
            r#"{"type":"message","content":[],"stop_reason":"refusal"}"#,
        ],
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn b58_a_list_with_nothing_in_it_is_asked_for_again() {
    check_empty(
        &[r#"{"choices":[]}"#, r#"{"choices":null}"#, r#"{"object":"list","data":[],"model":"e"}"#],
        &[
            r#"{"choices":[{"message":{"content":"a"}}]}"#,
            r#"{"object":"list","data":[{"embedding":[0.5]}],"model":"e"}"#,
            r#"{"object":"list","data":[]}"#,
            r#"{"input_tokens":3}"#,
        ],
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn b42_an_org_that_answers_nothing_is_asked_as_often_as_errors_are() {
    let orgs = orgs(&[("a", 10)]);
    let (service, wire) =
        stack(&orgs, |stack| stack.limit(open().build().unwrap()), |_, _| async { Ok(json(200, r#"{"choices":[]}"#)) });
    let RetryError::Exhausted(exhausted) = service.oneshot(post()).await.unwrap_err() else { panic!("empty") };
    assert_eq!((exhausted.last.class, exhausted.counts.of(Class::Empty) as usize), (Class::Empty, wire.len()));
    assert!(wire.len() > 1 && !board(&orgs, "a").is_out(), "the org is healthy");
}
