//! What holds for every provider.

use std::{collections::HashMap, time::SystemTime};

use http_body_util::Full;
use proptest::prelude::*;
use serde_json::{Value, json};
use tower::{Layer, ServiceExt, service_fn};

use super::*;
use crate::{
    judge::JudgeLayer,
    outcome::{Class, Stamp},
};

const APIS: [&dyn BatchApi; 2] = [&Anthropic, &OpenAi];

/// A request that either provider's batches take.
fn request(api: &dyn BatchApi, body: impl Into<Bytes>) -> Request<Bytes> {
    let path = if api.bounds() == Anthropic.bounds() { "/v1/messages" } else { "/v1/chat/completions" };
    Request::post(path).body(body.into()).unwrap()
}

fn answer(status: u16, body: impl Into<Bytes>) -> Response<Bytes> {
    Response::builder().status(status).body(body.into()).unwrap()
}

/// Every reader of an answer that has a batch, or a file, or a page in it.
fn readers(api: &dyn BatchApi, answer: &Response<Bytes>) -> Vec<Result<(), ApiError>> {
    let mut all = vec![api.created(answer).map(drop), api.retrieved(answer).map(drop), api.listed(answer).map(drop)];
    if api.upload("t", &[]).is_some() {
        all.push(api.uploaded(answer).map(drop));
    }
    all
}

#[test]
fn a_custom_id_that_the_provider_would_refuse_is_refused_before_anything_is_sent() {
    // B101
    for api in APIS {
        let request = request(api, r#"{"model":"m"}"#);
        for id in ["", "a/b", "a b", "é", "a.b", "a\n", "a\"", &"a".repeat(65), &"é".repeat(32)] {
            assert_eq!(api.row(id, &request), Err(RowError::CustomId), "{id}");
        }
        for id in ["a", "_", "-", "A-z_0", &"a".repeat(64)] {
            assert!(api.row(id, &request).is_ok(), "{id}");
        }
    }
}

#[test]
fn bounds_are_the_documented_ones_less_a_margin() {
    // B103
    let bounds = APIS.map(BatchApi::bounds);
    assert_eq!(bounds.map(|bounds| bounds.rows), [100_000, 50_000]);
    for (bounds, documented) in bounds.into_iter().zip([256_000_000, 200_000_000]) {
        assert!(bounds.bytes < documented && bounds.bytes > documented / 100 * 95, "{bounds:?}");
    }
    let ninety = 90_000_000;
    assert!(2 * ninety <= bounds[1].bytes && 3 * ninety > bounds[1].bytes, "two files for three rows of 90 MB");
}

#[test]
fn a_row_that_is_larger_than_a_batch_never_goes() {
    // B104
    for api in APIS {
        let most = api.bounds().bytes;
        let huge = api.row("a", &request(api, vec![0; 300_000_000]));
        assert_eq!(huge, Err(RowError::TooLarge { bytes: 300_000_000, most }));
        assert!(api.row("b", &request(api, r#"{"model":"m"}"#)).is_ok(), "the others go");
    }
    // It is the row that must fit, with the byte that separates it from the next.
    assert_eq!(body::fitting(vec![0; 9], 10), Ok(Bytes::from(vec![0; 9])));
    assert_eq!(body::fitting(vec![0; 10], 10), Err(RowError::TooLarge { bytes: 10, most: 10 }));
}

#[test]
fn the_rest_of_an_upload_finds_room_in_the_margin() {
    for (api, documented) in [(APIS[0], 256_000_000), (APIS[1], 200_000_000)] {
        let row = api.row("a", &request(api, r#"{"model":"m"}"#)).unwrap();
        let rest = |rows: usize| {
            let rows = vec![row.bytes.clone(); rows];
            let upload = api.upload("t", &rows).unwrap_or_else(|| api.create(&row.group, "t", None, &rows));
            upload.body().len() - rows.len() * (row.bytes.len() + 1)
        };
        assert_eq!(rest(1), rest(100), "no more than one byte between two rows");
        assert!(api.bounds().bytes + rest(1) + 2 * 64 < documented);
    }
}

#[test]
fn a_refusal_is_read_by_its_status_and_a_success_must_say_something() {
    let html = "<html><body>Bad gateway</body></html>";
    let page = r#"{"data":[],"has_more":false}"#;
    for api in APIS {
        for (status, body, expected) in [
            (404, html, "the batch or file is not there (404)"),
            (
                404,
                r#"{"error":{"type":"not_found_error","message":"sk-secret"}}"#,
                "the batch or file is not there (404)",
            ),
            (413, html, "the batch is too large (413)"),
            (
                401,
                r#"{"error":{"type":"authentication_error","message":"sk-secret"}}"#,
                "refused: 401 Unauthorized: authentication_error",
            ),
            (429, r#"{"error":{"type":"a","code":"b"}}"#, "refused: 429 Too Many Requests: a: b"),
            (429, "", "refused: 429 Too Many Requests"),
            (500, html, "refused: 500 Internal Server Error"),
            (502, "[]", "refused: 502 Bad Gateway"),
            (503, r#"{"error":"busy"}"#, "refused: 503 Service Unavailable"),
            (529, r#"{"error":[{"type":"a"}]}"#, "refused: 529 <unknown status code>"),
            (302, html, "refused: 302 Found"),
            (200, html, "the answer cannot be read: 37 bytes of no type: expected value at line 1 column 1"),
            (200, "", "the answer cannot be read: 0 bytes of no type: EOF while parsing a value at line 1 column 0"),
            (
                200,
                r#"{"id":"batch_1","stat"#,
                "the answer cannot be read: 21 bytes of no type: EOF while parsing a string at line 1 column 21",
            ),
        ] {
            for read in readers(api, &answer(status, body)) {
                assert_eq!(read.unwrap_err().to_string(), expected, "{status} {body}");
            }
        }
        for (body, expected) in [
            ("{}", "it has no `id`"),
            ("null", "it has no `id`"),
            ("[]", "it has no `id`"),
            ("\"batch\"", "it has no `id`"),
            (r#"{"id":""}"#, "it has no `id`"),
            (r#"{"id":7}"#, "it has no `id`"),
            (r#"{"id":"a\nb"}"#, "it has no `id`"),
            (&json!({"id": "a".repeat(513)}).to_string(), "it has no `id`"),
            (page, "it has no `id`"),
        ] {
            let why = format!("the answer cannot be read: {expected}");
            assert_eq!(api.created(&answer(200, body.to_owned())).unwrap_err().to_string(), why, "{body}");
        }
        let bom = api.created(&answer(200, "\u{feff}{\"id\":\"b\"}")).unwrap();
        assert_eq!(bom, Remote { files: bom.files.clone(), ..Remote::new("b", RemoteState::Processing) });
    }
}

#[test]
fn the_judges_words_are_taken_for_what_was_said() {
    for api in APIS {
        let mut refused = answer(400, r#"{"error":{"type":"invalid_request_error"}}"#);
        let mut stamp = Stamp::new(crate::outcome::Outcome::of(Class::Terminal));
        stamp.said = Some("invalid_request_error: key ***".into());
        refused.extensions_mut().insert(stamp);
        let said = api.created(&refused).unwrap_err().to_string();
        assert_eq!(said, "refused: 400 Bad Request: invalid_request_error: key ***");
    }
}

#[test]
fn pages_lead_to_the_next_one_until_there_is_none() {
    for api in APIS {
        let next = |body: Value| api.listed(&answer(200, body.to_string())).map(|page| (page.batches.len(), page.next));
        let two = json!([{"id": "b2"}, {"id": "b1"}]);
        let some = |id: &str| Some(id.to_owned());
        assert_eq!(next(json!({"data": two, "has_more": true, "last_id": "b1"})), Ok((2, some("b1"))));
        assert_eq!(next(json!({"data": two, "has_more": true, "last_id": null})), Ok((2, some("b1"))));
        assert_eq!(next(json!({"data": two, "has_more": false, "last_id": "b1"})), Ok((2, None)));
        assert_eq!(next(json!({"data": two, "last_id": "b1"})), Ok((2, None)));
        assert_eq!(next(json!({"data": [], "has_more": true})), Ok((0, None)));
        let lost = next(json!({"data": [{"id": "b2"}, {"object": "batch"}]}));
        assert!(matches!(lost, Err(ApiError::Unreadable(_))), "it might be the one: {lost:?}");
        for none in [json!({}), json!({"data": null}), json!({"data": {}}), json!([])] {
            assert!(matches!(next(none), Err(ApiError::Unreadable(_))));
        }
    }
}

/// A line of results as the provider would write it.
fn line(api: &dyn BatchApi, id: &str, body: &Value) -> String {
    if api.bounds() == Anthropic.bounds() {
        json!({"custom_id": id, "result": {"type": "succeeded", "message": body}}).to_string()
    } else {
        json!({"id": "r", "custom_id": id, "response": {"status_code": 200, "body": body}, "error": null}).to_string()
    }
}

#[test]
fn results_in_any_order_are_joined_by_id_alone() {
    // B109
    for api in APIS {
        let file = |ids: &mut dyn Iterator<Item = u32>| {
            ids.map(|id| line(api, &format!("id-{id}"), &json!({"is": id}))).collect::<Vec<_>>().join("\n")
        };
        let read = |file: &str| -> HashMap<String, Bytes> {
            let rows = lines(file.as_bytes()).filter_map(|line| api.result(line).unwrap());
            rows.map(|row| match row.end {
                RowEnd::Answered(answer) => (row.custom_id, answer.into_body()),
                other => panic!("{other:?}"),
            })
            .collect()
        };
        let forward = read(&file(&mut (0..100)));
        assert_eq!(forward, read(&file(&mut (0..100).rev())));
        assert_eq!(forward["id-7"], r#"{"is":7}"#);
    }
}

#[test]
fn a_file_is_read_however_its_lines_are_ended() {
    for api in APIS {
        let [one, two] = ["a", "b"].map(|id| line(api, id, &json!({"text": "x\u{2028}y\u{85}z"})));
        for file in [
            format!("{one}\n{two}"),
            format!("{one}\n{two}\n"),
            format!("\u{feff}{one}\r\n{two}\r\n"),
            format!("\n\n{one}\n \t\r\n\n{two}\n\n"),
        ] {
            let ids: Vec<_> =
                lines(file.as_bytes()).filter_map(|line| api.result(line).unwrap()).map(|row| row.custom_id).collect();
            assert_eq!(ids, ["a", "b"], "{file:?}");
        }
    }
}

#[test]
fn a_line_that_does_not_tell_whose_it_is_is_refused() {
    for api in APIS {
        let whole = line(api, "a", &json!({}));
        for line in [
            &whole.as_bytes()[..whole.len() - 1],
            b"<html>",
            b"null",
            b"[]",
            b"{}",
            br#"{"custom_id":null}"#,
            br#"{"custom_id":""}"#,
            br#"{"custom_id":7}"#,
            b"{\"custom_id\":\"a\xff\"}",
            &[whole.as_bytes(), b"x"].concat(),
            &[whole.as_bytes(), whole.as_bytes()].concat(),
        ] {
            let read = api.result(line);
            assert!(matches!(read, Err(ApiError::Unreadable(_))), "{}: {read:?}", String::from_utf8_lossy(line));
        }
        let bare = api.result(br#"{"custom_id":"a"}"#).unwrap().unwrap();
        assert!(matches!(bare.end, RowEnd::Missing(_)), "whose it is, is known: {bare:?}");
    }
}

#[test]
fn totals_are_those_of_the_rows_that_were_seen() {
    // B115
    let mut seen = Counts::default();
    let ends = [
        (10, RowEnd::Answered(answer(200, ""))),
        (1, RowEnd::Answered(answer(400, ""))),
        (1, RowEnd::Missing(String::new())),
        (3, RowEnd::Canceled),
        (5, RowEnd::Expired),
    ];
    for (times, end) in &ends {
        (0..*times).for_each(|_| seen.add(end));
    }
    let Counts { processing, succeeded, failed, canceled, expired } = seen;
    assert_eq!((processing, succeeded, failed, canceled, expired, seen.total()), (0, 10, 2, 3, 5, 20));
}

#[test]
fn the_api_of_an_org_is_that_of_its_dialect() {
    assert_eq!(
        [Dialect::Anthropic, Dialect::OpenAi].map(|dialect| api_of(dialect).bounds()),
        APIS.map(BatchApi::bounds)
    );
}

/// What the judge says of a row's answer.
async fn judged(api: &dyn BatchApi, line: Value) -> Class {
    let RowEnd::Answered(answer) = api.result(line.to_string().as_bytes()).unwrap().unwrap().end else {
        panic!("{line}")
    };
    let client = service_fn(move |_: Request<Full<Bytes>>| {
        let answer = answer.clone();
        async move { Ok::<_, std::io::Error>(answer.map(Full::new)) }
    });
    let judged = JudgeLayer::new().layer(client).oneshot(Request::new(Full::default())).await.unwrap();
    judged.extensions().get::<Stamp>().unwrap().outcome.class
}

#[tokio::test]
async fn the_judge_takes_a_row_for_what_it_takes_a_direct_answer_for() {
    let message = json!({"type": "message", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"});
    let line = json!({"custom_id": "a", "result": {"type": "succeeded", "message": message}});
    assert_eq!(judged(&Anthropic, line).await, Class::Ok);
    let invalid = "invalid_request_error";
    for (kind, message, class) in [
        (invalid, "max_tokens: Field required", Class::Terminal),
        (invalid, "prompt is too long: 208310 tokens > 200000 maximum", Class::Terminal),
        (invalid, "Your credit balance is too low to access the Anthropic API.", Class::OutOfQuota),
        (invalid, "You have reached your specified API usage limits.", Class::OutOfQuota),
        ("authentication_error", "invalid x-api-key", Class::Unauthorised),
        ("billing_error", "", Class::OutOfQuota),
        ("permission_error", "", Class::Forbidden),
        ("not_found_error", "model: x", Class::Terminal),
        ("request_too_large", "", Class::TooLarge),
        ("rate_limit_error", "This request would exceed your rate limit", Class::Throttled),
        ("rate_limit_error", "Extra usage is required for long context requests.", Class::ThrottledRequest),
        ("api_error", "Internal server error", Class::Overloaded),
        ("timeout_error", "", Class::Overloaded),
        ("overloaded_error", "Overloaded", Class::Overloaded),
        ("a_new_error", "", Class::Overloaded),
    ] {
        let error = json!({"type": kind, "message": message});
        for error in [json!({"type": "error", "error": error, "request_id": null}), error] {
            let line = json!({"custom_id": "a", "result": {"type": "errored", "error": error}});
            assert_eq!(judged(&Anthropic, line).await, class, "{kind} {message}");
        }
    }
    let choices = json!({"choices": [{"message": {"role": "assistant", "content": "Hi"}}]});
    for (status, body, class) in [
        (200, choices, Class::Ok),
        (200, json!({"choices": []}), Class::Empty),
        (400, json!({"error": {"type": invalid, "code": "context_length_exceeded", "message": "…"}}), Class::Terminal),
        (401, json!({"error": {"type": invalid, "code": "invalid_api_key"}}), Class::Unauthorised),
        (404, json!({"error": {"type": invalid, "code": "model_not_found"}}), Class::Terminal),
        (429, json!({"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}), Class::OutOfQuota),
        (429, json!({"error": {"type": "tokens", "code": "rate_limit_exceeded"}}), Class::Throttled),
        (429, Value::Null, Class::Throttled),
        (500, json!({"error": {"type": "server_error"}}), Class::Overloaded),
        (503, json!("<html>"), Class::Overloaded),
    ] {
        let line = json!({"custom_id": "a", "response": {"status_code": status, "body": body}});
        assert_eq!(judged(&OpenAi, line.clone()).await, class, "{line}");
    }
}

/// Any JSON, written with any blanks; the number of levels is small.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
        "[\u{2028}\u{2029}\u{85}\r\n\"\\\\é{}]{0,6}".prop_map(Value::from),
        "(sk-|batch_|2026-11-30T12:00:0)[0-9Z+:.-]{0,9}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        let name = prop_oneof![any::<String>(), prop::sample::select(&NAMES[..]).prop_map(str::to_owned),];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name, inner, 0..5).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// The names that are looked at.
const NAMES: [&str; 30] = [
    "id",
    "status",
    "processing_status",
    "request_counts",
    "total",
    "completed",
    "failed",
    "succeeded",
    "created_at",
    "expires_at",
    "archived_at",
    "errors",
    "data",
    "line",
    "code",
    "message",
    "metadata",
    "tower_quota",
    "input_file_id",
    "output_file_id",
    "has_more",
    "last_id",
    "custom_id",
    "result",
    "response",
    "error",
    "type",
    "status_code",
    "body",
    "model",
];

proptest! {
    #[test]
    fn a_request_goes_into_its_row_and_its_answer_comes_back(
        id in "[a-zA-Z0-9_-]{1,64}",
        mut body in prop::collection::btree_map("[a-m\u{2028}\"é]{0,4}", any_json(), 0..5),
        pretty: bool,
    ) {
        body.insert("model".to_owned(), "m".into());
        let body = Value::Object(body.into_iter().collect());
        let text = if pretty { serde_json::to_string_pretty(&body).unwrap().replace('\n', "\r\n") } else { body.to_string() };
        for api in APIS {
            let row = api.row(&id, &request(api, text.clone())).unwrap();
            prop_assert!(!row.bytes.contains(&b'\n') && !row.bytes.contains(&b'\r'));
            // As it stands in what is sent.
            let rows = [row.bytes.clone(), row.bytes.clone()];
            let sent = api.upload("t", &rows).unwrap_or_else(|| api.create(&row.group, "t", None, &rows));
            let at = memchr::memmem::find_iter(sent.body(), &row.bytes).count();
            prop_assert_eq!(at, 2);
            // What the provider reads is what was asked for, and it answers with it.
            let read: Value = serde_json::from_slice(&row.bytes).unwrap();
            let asked = read.get("params").or_else(|| read.get("body")).unwrap();
            prop_assert_eq!((&read["custom_id"], asked), (&json!(id), &body));
            let result = api.result(line(api, &id, asked).as_bytes()).unwrap().unwrap();
            prop_assert_eq!(&result.custom_id, &id);
            let RowEnd::Answered(answer) = result.end else { panic!("{result:?}") };
            prop_assert_eq!(serde_json::from_slice::<Value>(answer.body()).unwrap(), body.clone());
        }
    }

    #[test]
    fn nothing_that_a_provider_sends_is_a_panic(body in any_json(), cut in any::<prop::sample::Index>(), status in 100u16..1000) {
        let text = body.to_string();
        let cut = &text.as_bytes()[..cut.index(text.len() + 1)];
        for api in APIS {
            for text in [text.as_bytes(), cut] {
                let answer = answer(status, text.to_vec());
                drop(readers(api, &answer));
                if let Ok(remote) = api.retrieved(&answer) {
                    let submission = Submission { token: "t", file: None, since: SystemTime::UNIX_EPOCH, until: SystemTime::UNIX_EPOCH, rows: 1 };
                    api.matches(&remote, &submission);
                    api.results(&remote);
                    api.retrieve(&remote.id);
                }
                drop(api.result(text));
            }
        }
    }

    #[test]
    fn no_line_is_a_panic(line: Vec<u8>, result in any_json(), id: String) {
        for api in APIS {
            drop(api.result(&line));
            let line = json!({"custom_id": id, "result": result, "response": result, "error": result}).to_string();
            match api.result(line.as_bytes()) {
                Ok(Some(row)) => prop_assert_eq!(&row.custom_id, &id),
                Ok(None) => prop_assert!(false),
                Err(_) => prop_assert!(id.is_empty()),
            }
        }
    }

    #[test]
    fn no_request_is_a_panic(custom_id: String, path in "/[ -~&&[^#?\"<>\\\\^`{}| ]]{0,20}", body: Vec<u8>, token: String, rows: Vec<Vec<u8>>) {
        for api in APIS {
            let request = Request::post(path.as_str()).body(Bytes::from(body.clone()));
            if let Ok(request) = request {
                prop_assert!(api.row(&custom_id, &request).is_err() || serde_json::from_slice::<Value>(&body).is_ok());
            }
            let rows: Vec<_> = rows.iter().cloned().map(Bytes::from).collect();
            let group = Group::new(token.as_str(), Family::default()).with_query(token.as_str());
            api.create(&group, &token, Some(&token), &rows);
            if let Some(upload) = api.upload(&token, &rows) {
                let kind = upload.headers()["content-type"].to_str().unwrap();
                let boundary = kind.rsplit_once('=').unwrap().1;
                prop_assert_eq!(memchr::memmem::find_iter(upload.body(), boundary).count(), 3);
            }
            api.list(Some(&token));
            api.cancel(&custom_id);
        }
    }
}
