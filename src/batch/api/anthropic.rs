//! Anthropic's Message Batches.

use bytes::Bytes;
use http::{HeaderName, Method, Request, Response, StatusCode};
use serde_json::{Value, value::RawValue};

use super::{
    ApiError, BatchApi, Bounds, Counts, Ending, Group, Match, Page, Remote, RemoteState, Row, RowEnd, RowError,
    RowResult, Submission,
    body::{self, Body, Members},
    check_custom_id, read, wire,
};
use crate::hint;

/// "Batches may contain up to 100,000 requests and be up to 256 MB in total size"
/// (<https://docs.claude.com/en/api/creating-message-batches>). Whether a MB is 10⁶ bytes is not said; the margin is for the rest of the
/// request.
const BOUNDS: Bounds = Bounds::new(100_000, 250_000_000);

const BATCHES: &str = "/v1/messages/batches";

/// The only path that a batch has rows of, as it stands before a base URL, with its version or without.
const PATHS: [&str; 2] = ["/v1/messages", "/messages"];

/// The headers that the creation of a batch carries for all its rows ("All features available in the Messages API, including beta
/// features").
const SHARED: [HeaderName; 2] =
    [HeaderName::from_static("anthropic-version"), HeaderName::from_static("anthropic-beta")];

const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The status that a direct answer has with an error of this type (<https://docs.claude.com/en/api/errors>).
const STATUSES: [(&str, u16); 10] = [
    ("invalid_request_error", 400),
    ("authentication_error", 401),
    ("billing_error", 402),
    ("permission_error", 403),
    ("not_found_error", 404),
    ("request_too_large", 413),
    ("rate_limit_error", 429),
    ("api_error", 500),
    ("timeout_error", 504),
    ("overloaded_error", 529),
];

/// Anthropic's [Message Batches](https://docs.claude.com/en/docs/build-with-claude/batch-processing): up to 100,000 requests to
/// `/v1/messages`, answered within 24 hours, their results kept for 29 days.
///
/// Rows of any models may share a batch; here those of one family do, since quotas are counted so. A batch keeps nothing of ours but the
/// custom ids, so one whose creation's reply was lost is found by its time and size, and made certain by its results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anthropic;

impl BatchApi for Anthropic {
    fn bounds(&self) -> Bounds {
        BOUNDS
    }

    fn row(&self, custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError> {
        check_custom_id(custom_id)?;
        let (path, query) = (request.uri().path(), request.uri().query().filter(|query| !query.is_empty()));
        if !PATHS.contains(&path) {
            return Err(RowError::NotBatchable(format!("only requests to {} are rows, not to {path}", PATHS[0])));
        }
        // What the SDKs add for beta features, to the creation of batches as well.
        if query.is_some_and(|query| query != "beta=true") {
            return Err(RowError::NotBatchable("a row cannot carry its query".to_owned()));
        }
        let body = Body::of(request, "anthropic-", &SHARED, BOUNDS.bytes)?;
        let model = body.model();
        let mut group = Group::new(PATHS[0], body::family(request, model.as_deref()));
        group = group.with_headers(request.headers(), &SHARED);
        // Whether an org may be asked for it is a matter of the model, not of its family.
        group = model.into_iter().fold(group, Group::with_model);
        if let Some(query) = query {
            group = group.with_query(query);
        }
        let mut line = format!(r#"{{"custom_id":"{custom_id}","params":"#).into_bytes();
        line.reserve_exact(body.text.len() + 1);
        body.push_onto(&mut line);
        line.push(b'}');
        Ok(Row::new(group, body::fitting(line, BOUNDS.bytes)?))
    }

    fn upload(&self, _token: &str, _rows: &[Bytes]) -> Option<Request<Bytes>> {
        None
    }

    fn uploaded(&self, _answer: &Response<Bytes>) -> Result<String, ApiError> {
        Err(ApiError::Unreadable("Message Batches have no files".to_owned()))
    }

    fn create(&self, group: &Group, _token: &str, _file: Option<&str>, rows: &[Bytes]) -> Request<Bytes> {
        let head = br#"{"requests":["#;
        let mut body = Vec::with_capacity(head.len() + rows.iter().map(|row| row.len() + 1).sum::<usize>() + 2);
        body.extend_from_slice(head);
        for (at, row) in rows.iter().enumerate() {
            if at > 0 {
                body.push(b',');
            }
            body.extend_from_slice(row);
        }
        body.extend_from_slice(b"]}");
        let uri = group.query().map_or_else(|| BATCHES.to_owned(), |query| format!("{BATCHES}?{query}"));
        let mut request = wire::post(&uri, wire::JSON, body.into());
        for (name, value) in group.headers() {
            request.headers_mut().append(name, value.clone());
        }
        request
    }

    fn created(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        remote(&read::success(answer)?)
    }

    fn retrieve(&self, id: &str) -> Request<Bytes> {
        wire::bare(Method::GET, &format!("{BATCHES}/{}", wire::encoded(id)))
    }

    fn retrieved(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        remote(&read::success(answer)?)
    }

    fn cancel(&self, id: &str) -> Request<Bytes> {
        wire::bare(Method::POST, &format!("{BATCHES}/{}/cancel", wire::encoded(id)))
    }

    fn list(&self, after: Option<&str>) -> Request<Bytes> {
        // Up to 1000 a page (https://platform.claude.com/docs/en/api/listing-message-batches).
        let after = after.map_or_else(String::new, |after| format!("&after_id={}", wire::encoded(after)));
        wire::bare(Method::GET, &format!("{BATCHES}?limit=100{after}"))
    }

    fn listed(&self, answer: &Response<Bytes>) -> Result<Page, ApiError> {
        read::page(answer, remote)
    }

    fn matches(&self, remote: &Remote, submission: &Submission<'_>) -> Match {
        read::resembles(remote, submission)
    }

    fn results(&self, remote: &Remote) -> Vec<Request<Bytes>> {
        // Not at `results_url`: a base URL may lead over a gateway, and a key goes nowhere else.
        let of = |id: &String| wire::bare(Method::GET, &format!("{BATCHES}/{}/results", wire::encoded(id)));
        remote.files.iter().map(of).collect()
    }

    fn result(&self, line: &[u8]) -> Result<Option<RowResult>, ApiError> {
        let Some((custom_id, members)) = read::row(line)? else { return Ok(None) };
        let result = read::members(members.get("result")).unwrap_or_default();
        let kind = read::raw_text(result.get("type")).unwrap_or_default();
        let end = match kind.as_str() {
            "succeeded" => match result.get("message").filter(|message| message.get().starts_with('{')) {
                Some(message) => RowEnd::Answered(read::answer(
                    StatusCode::OK,
                    Bytes::copy_from_slice(message.get().as_bytes()),
                    REQUEST_ID,
                    None,
                )),
                None => RowEnd::Missing("it succeeded, and there is no message".to_owned()),
            },
            "errored" => match result.get("error") {
                Some(error) => errored(error),
                None => RowEnd::Missing("it errored, and does not say how".to_owned()),
            },
            "expired" => RowEnd::Expired,
            "canceled" => RowEnd::Canceled,
            other => RowEnd::Missing(format!("a result of type `{}`", read::short(other))),
        };
        Ok(Some(RowResult { custom_id, end }))
    }
}

/// The answer that an error is: in its envelope (`{"type":"error","error":{…}}`) as it came, or put into one.
fn errored(error: &RawValue) -> RowEnd {
    let Some(outer) = read::members(Some(&error)) else {
        return RowEnd::Missing("it errored, and the error is no object".to_owned());
    };
    let enveloped = read::members(outer.get("error"));
    let kind = |error: &Members<'_>| read::raw_text(error.get("type"));
    let (kind, body) = match &enveloped {
        Some(inner) => (kind(inner), error.get().to_owned()),
        None => (kind(&outer), format!(r#"{{"type":"error","error":{}}}"#, error.get())),
    };
    let request_id = read::raw_text(outer.get("request_id"));
    RowEnd::Answered(read::answer(status_of(kind.as_deref()), body.into(), REQUEST_ID, request_id))
}

/// One that is not known may pass: "the `type` values may expand over time".
fn status_of(kind: Option<&str>) -> StatusCode {
    let known = STATUSES.iter().find(|(known, _)| kind == Some(known));
    known.and_then(|(_, status)| StatusCode::from_u16(*status).ok()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

fn remote(batch: &Value) -> Result<Remote, ApiError> {
    let id = read::own_id(batch)?;
    let state = match read::text(&batch["processing_status"]) {
        Some("ended") => RemoteState::Ended(Ending::Completed),
        Some("canceling") => RemoteState::Canceling,
        _ => RemoteState::Processing,
    };
    let date = |name| read::text(&batch[name]).and_then(hint::rfc3339);
    let created_at = date("created_at");
    // 29 days after its creation a batch is archived: it can be seen, its results cannot.
    let there = matches!(state, RemoteState::Ended(_)) && batch["archived_at"].is_null();
    let files = if there { vec![id.clone()] } else { Vec::new() };
    Ok(Remote {
        counts: counts(&batch["request_counts"]),
        expires_at: read::expires_at(created_at, date("expires_at")),
        created_at,
        files,
        ..Remote::new(id, state)
    })
}

fn counts(counts: &Value) -> Option<Counts> {
    counts.as_object().filter(|counts| !counts.is_empty())?;
    let of = |name| read::count(&counts[name]);
    Some(Counts {
        processing: of("processing")?,
        succeeded: of("succeeded")?,
        failed: of("errored")?,
        canceled: of("canceled")?,
        expired: of("expired")?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::org::Family;

    const MESSAGE: &str =
        r#"{"id":"msg_1","type":"message","content":[{"type":"text","text":"{}\n\u2028 "}],"new": 1.0}"#;

    fn request(body: &str) -> Request<Bytes> {
        Request::post("/v1/messages").body(Bytes::from(body.to_owned())).unwrap()
    }

    fn ok(body: &Value) -> Response<Bytes> {
        Response::new(Bytes::from(body.to_string()))
    }

    fn batch(change: impl FnOnce(&mut Value)) -> Remote {
        let mut batch = json!({
            "id": "msgbatch_01", "type": "message_batch", "processing_status": "in_progress",
            "request_counts": {"processing": 2, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
            "created_at": "2026-11-30T18:37:24.100435Z", "expires_at": "2026-12-01T18:37:24.100435Z",
            "ended_at": null, "archived_at": null, "cancel_initiated_at": null, "results_url": null,
        });
        change(&mut batch);
        Anthropic.retrieved(&ok(&batch)).unwrap()
    }

    fn end(result: &Value) -> RowEnd {
        let line = json!({"custom_id": "a", "result": result}).to_string();
        let row = Anthropic.result(line.as_bytes()).unwrap().unwrap();
        assert_eq!(row.custom_id, "a");
        row.end
    }

    #[test]
    fn a_batch_is_created_with_the_bodies_as_they_are_and_the_headers_that_all_rows_share() {
        let bodies =
            [r#"{"model":"claude-haiku-4-5","max_tokens":1.0}"#, r#"{"model":"claude-haiku-4-5","stream":false}"#];
        let rows: Vec<_> = bodies
            .iter()
            .zip(["a", "b"])
            .map(|(body, id)| {
                let mut request = request(body);
                *request.uri_mut() = "/v1/messages?beta=true".parse().unwrap();
                for (name, value) in [
                    ("anthropic-beta", "one"),
                    ("anthropic-beta", "two"),
                    ("anthropic-version", "2023-06-01"),
                    ("x-api-key", "sk-secret"),
                    ("authorization", "Bearer sk-secret"),
                    ("idempotency-key", id),
                ] {
                    request.headers_mut().append(name, value.parse().unwrap());
                }
                Anthropic.row(id, &request).unwrap()
            })
            .collect();
        assert_eq!(rows[0].group, rows[1].group, "what differs is not theirs");
        assert_eq!(rows[0].group.family(), &Family::new("haiku"));
        assert!(!format!("{rows:?} {:?}", rows[0].group).contains("sk-secret"));

        let bytes: Vec<_> = rows.iter().map(|row| row.bytes.clone()).collect();
        assert_eq!(Anthropic.upload("t", &bytes).map(|_| ()), None);
        let create = Anthropic.create(&rows[0].group, "t", None, &bytes);
        assert_eq!(
            (create.method(), create.uri().to_string().as_str()),
            (&Method::POST, "/v1/messages/batches?beta=true")
        );
        let expected = format!(
            r#"{{"requests":[{{"custom_id":"a","params":{}}},{{"custom_id":"b","params":{}}}]}}"#,
            bodies[0], bodies[1]
        );
        assert_eq!(create.body(), expected.as_bytes());
        let headers: Vec<_> =
            create.headers().iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let mut sorted = headers.clone();
        sorted.sort_unstable();
        assert_eq!(
            sorted,
            [
                ("anthropic-beta", "one"),
                ("anthropic-beta", "two"),
                ("anthropic-version", "2023-06-01"),
                ("content-type", "application/json")
            ]
        );
    }

    #[test]
    fn only_rows_that_want_the_same_of_the_api_share_a_batch() {
        let group = |change: fn(&mut Request<Bytes>)| {
            let mut request = request(r#"{"model":"claude-haiku-4-5"}"#);
            change(&mut request);
            Anthropic.row("a", &request).unwrap().group
        };
        let plain = group(|_| ());
        for same in [
            group(|r| *r.uri_mut() = "/messages?".parse().unwrap()),
            group(|r| drop(r.extensions_mut().insert(Family::new("haiku")))),
        ] {
            assert_eq!(same, plain, "it is the same family, and the same model");
        }
        let others = [
            plain,
            group(|r| *r.body_mut() = r#"{"model":"claude-opus-4-5"}"#.into()),
            group(|r| *r.body_mut() = r#"{"model":"claude-3-haiku-20240307"}"#.into()),
            group(|r| *r.body_mut() = "{}".into()),
            group(|r| *r.uri_mut() = "/v1/messages?beta=true".parse().unwrap()),
            group(|r| drop(r.headers_mut().insert("anthropic-beta", "a".parse().unwrap()))),
            group(|r| drop(r.headers_mut().insert("anthropic-version", "a".parse().unwrap()))),
            group(|r| drop(r.extensions_mut().insert(Family::new("mine")))),
        ];
        for (at, group) in others.iter().enumerate() {
            assert!(!others[..at].contains(group), "the {at}th");
        }
    }

    #[test]
    fn what_would_lose_something_in_a_batch_is_no_row() {
        let why = |change: fn(&mut Request<Bytes>)| {
            let mut request = request(r#"{"model":"claude-haiku-4-5"}"#);
            change(&mut request);
            match Anthropic.row("a", &request) {
                Err(RowError::NotBatchable(why)) => why,
                other => panic!("{other:?}"),
            }
        };
        for (found, expected) in [
            (why(|r| *r.method_mut() = Method::GET), "its method is GET"),
            (why(|r| *r.uri_mut() = "/v1/messages/count_tokens".parse().unwrap()), "only requests to /v1/messages"),
            (why(|r| *r.uri_mut() = "/v1/complete".parse().unwrap()), "only requests to /v1/messages"),
            (why(|r| *r.uri_mut() = "/v1/messages?key=sk-secret".parse().unwrap()), "a row cannot carry its query"),
            (
                why(|r| drop(r.headers_mut().insert("anthropic-new", "1".parse().unwrap()))),
                "a row cannot carry its header",
            ),
            (
                why(|r| drop(r.headers_mut().insert("content-encoding", "gzip".parse().unwrap()))),
                "its body is compressed",
            ),
            (why(|r| *r.body_mut() = r#"{"stream":true}"#.into()), "it asks for a stream"),
            (why(|r| *r.body_mut() = r#"{"stream":1}"#.into()), "it asks for a stream"),
            (why(|r| *r.body_mut() = "".into()), "its body is no JSON object"),
            (why(|r| *r.body_mut() = "[]".into()), "its body is no JSON object"),
            (why(|r| *r.body_mut() = "{}{}".into()), "its body is no JSON object"),
            (why(|r| *r.body_mut() = "{\"a\":\"\n\"}".into()), "its body is no JSON object"),
            (why(|r| *r.body_mut() = "\u{feff}{}".into()), "its body is no JSON object"),
            (why(|r| *r.body_mut() = Bytes::from_static(b"{\"a\":\"\xff\"}")), "its body is no JSON object"),
        ] {
            assert!(found.starts_with(expected) && !found.contains("sk-"), "{found}: {expected}");
        }
    }

    #[test]
    fn a_batch_is_read_as_it_stands() {
        let there = vec!["msgbatch_01".to_owned()];
        for (status, archived, state, files) in [
            ("in_progress", Value::Null, RemoteState::Processing, vec![]),
            ("canceling", Value::Null, RemoteState::Canceling, vec![]),
            ("ended", Value::Null, RemoteState::Ended(Ending::Completed), there.clone()),
            ("ended", "2026-12-29T18:37:24Z".into(), RemoteState::Ended(Ending::Completed), vec![]),
            ("a new one", Value::Null, RemoteState::Processing, vec![]),
        ] {
            let remote = batch(|batch| {
                batch["processing_status"] = status.into();
                batch["archived_at"] = archived;
                batch["results_url"] = "https://elsewhere.example/steal".into();
            });
            assert_eq!((remote.state.clone(), &remote.files), (state, &files), "{status}");
            let results = Anthropic.results(&remote);
            let uris: Vec<_> = results.iter().map(|request| request.uri().to_string()).collect();
            assert_eq!(uris, files.iter().map(|id| format!("/v1/messages/batches/{id}/results")).collect::<Vec<_>>());
        }
    }

    #[test]
    fn all_five_buckets_make_the_total() {
        // B115
        let counts = |counts: Value| batch(|batch| batch["request_counts"] = counts).counts;
        let ended = json!({"processing": 0, "succeeded": 10, "errored": 2, "canceled": 3, "expired": 5});
        assert_eq!(counts(ended).unwrap().total(), 20);
        assert_eq!(counts(json!({"processing": 7})).unwrap().total(), 7);
        assert_eq!(counts(json!({"succeeded": u64::MAX, "errored": 1})).unwrap().total(), u64::MAX);
        for unknown in
            [Value::Null, json!({}), json!([]), json!("20"), json!({"succeeded": -1}), json!({"succeeded": "1"})]
        {
            assert_eq!(counts(unknown.clone()), None, "{unknown}");
        }
    }

    #[test]
    fn a_date_that_cannot_be_is_none() {
        let dates = |created: Value, expires: Value| {
            let remote = batch(|batch| {
                batch["created_at"] = created;
                batch["expires_at"] = expires;
            });
            (remote.created_at.is_some(), remote.expires_at.is_some())
        };
        let noon = "2026-11-30T12:00:00Z";
        for (created, expires, known) in [
            (json!(noon), json!("2026-12-01T12:00:00Z"), (true, true)),
            (json!(noon), json!("2026-12-01T12:00:00.123456+00:00"), (true, true)),
            (json!(noon), json!("2026-12-01T13:00:00+01:00"), (true, true)),
            (json!(noon), json!("2026-12-30T12:00:00Z"), (true, true)),
            (json!(noon), json!("2026-12-30T12:00:01Z"), (true, false)),
            (json!(noon), json!("9999-12-31T23:59:59Z"), (true, false)),
            (json!(noon), json!(noon), (true, false)),
            (json!(noon), json!("1970-01-01T00:00:00Z"), (true, false)),
            (json!(noon), json!("tomorrow"), (true, false)),
            (json!(noon), json!(""), (true, false)),
            (json!(noon), Value::Null, (true, false)),
            (json!(noon), json!(1_796_040_000), (true, false)),
            (Value::Null, json!("2026-12-01T12:00:00Z"), (false, false)),
            (json!("2026-13-01T12:00:00Z"), json!(noon), (false, false)),
        ] {
            assert_eq!(dates(created.clone(), expires.clone()), known, "{created} {expires}");
        }
    }

    #[test]
    fn an_errored_row_is_the_answer_that_a_direct_call_gets() {
        for (kind, status) in [
            ("invalid_request_error", 400),
            ("authentication_error", 401),
            ("billing_error", 402),
            ("permission_error", 403),
            ("not_found_error", 404),
            ("request_too_large", 413),
            ("rate_limit_error", 429),
            ("api_error", 500),
            ("timeout_error", 504),
            ("overloaded_error", 529),
            ("a_new_error", 500),
            ("", 500),
        ] {
            let error = json!({"type": kind, "message": "why"});
            let enveloped = json!({"type": "error", "error": error, "request_id": "req_1"});
            let RowEnd::Answered(answer) = end(&json!({"type": "errored", "error": enveloped})) else {
                panic!("{kind}")
            };
            assert_eq!(
                (answer.status().as_u16(), answer.body()),
                (status, &Bytes::from(enveloped.to_string())),
                "{kind}"
            );
            assert_eq!(answer.headers()["request-id"], "req_1");
            // As older answers had it.
            let RowEnd::Answered(bare) = end(&json!({"type": "errored", "error": error})) else { panic!("{kind}") };
            let expected = json!({"type": "error", "error": error});
            assert_eq!((bare.status(), serde_json::from_slice(bare.body()).ok()), (answer.status(), Some(expected)));
        }
    }

    #[test]
    fn a_succeeded_row_is_the_message_to_the_byte() {
        let line =
            format!(r#"{{"result":{{"message":{MESSAGE},"type":"succeeded","new":[]}},"custom_id":"a","new":{{}}}}"#);
        let RowEnd::Answered(answer) = Anthropic.result(line.as_bytes()).unwrap().unwrap().end else { panic!() };
        assert_eq!((answer.status(), answer.body()), (StatusCode::OK, &Bytes::from(MESSAGE)));
        assert_eq!(answer.headers()["content-type"], "application/json");
    }

    #[test]
    fn a_row_without_an_answer_says_what_it_is() {
        for (result, expected) in [
            (json!({"type": "expired"}), "Expired"),
            (json!({"type": "canceled"}), "Canceled"),
            (json!({"type": "paused"}), "Missing(\"a result of type `paused`\")"),
            (json!({"type": "succeeded"}), "Missing(\"it succeeded, and there is no message\")"),
            (json!({"type": "succeeded", "message": null}), "Missing(\"it succeeded, and there is no message\")"),
            (json!({"type": "errored"}), "Missing(\"it errored, and does not say how\")"),
            (json!({"type": "errored", "error": "why"}), "Missing(\"it errored, and the error is no object\")"),
            (json!({}), "Missing(\"a result of type ``\")"),
            (json!(7), "Missing(\"a result of type ``\")"),
            (Value::Null, "Missing(\"a result of type ``\")"),
        ] {
            assert_eq!(format!("{:?}", end(&result)), expected, "{result}");
        }
    }

    #[test]
    fn a_lost_batch_is_looked_for_among_those_of_its_time_and_size() {
        // B113
        let created = hint::rfc3339("2026-11-30T18:37:24.100435Z").unwrap();
        let seconds = Duration::from_secs;
        let one = batch(|_| ());
        let hours = |hours: u64| seconds(hours * 3_600);
        let submission = |since, rows| Submission { token: "t", file: None, since, until: since + seconds(10), rows };
        for (since, rows, found) in [
            (created - seconds(10), 2, Match::Perhaps),
            (created + hours(1), 2, Match::Perhaps),
            (created + hours(1) + seconds(1), 2, Match::No),
            (created - hours(1) - seconds(10), 2, Match::Perhaps),
            (created - hours(1) - seconds(11), 2, Match::No),
            (created - seconds(10), 3, Match::No),
        ] {
            assert_eq!(Anthropic.matches(&one, &submission(since, rows)), found, "{since:?} {rows}");
        }
        let uncounted = Remote { counts: Some(Counts::default()), ..one };
        assert_eq!(Anthropic.matches(&uncounted, &submission(created, 2)), Match::Perhaps, "it is not counted yet");
        let vague = Remote::new("msgbatch_02", RemoteState::Processing);
        assert_eq!(Anthropic.matches(&vague, &submission(created, 2)), Match::Perhaps, "it cannot be ruled out");
    }

    #[test]
    fn every_call_goes_where_the_api_wants_it() {
        let seen = |request: Request<Bytes>| format!("{} {}", request.method(), request.uri());
        for (request, expected) in [
            (Anthropic.retrieve("msgbatch_01"), "GET /v1/messages/batches/msgbatch_01"),
            (Anthropic.cancel("msgbatch_01"), "POST /v1/messages/batches/msgbatch_01/cancel"),
            (Anthropic.list(None), "GET /v1/messages/batches?limit=100"),
            (Anthropic.list(Some("a&b")), "GET /v1/messages/batches?limit=100&after_id=a%26b"),
            (Anthropic.retrieve("../../v1/files"), "GET /v1/messages/batches/%2E%2E%2F%2E%2E%2Fv1%2Ffiles"),
        ] {
            assert_eq!(seen(request), expected);
        }
    }
}
