//! OpenAI's Batch API.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use memchr::memmem;
use serde_json::{Value, value::RawValue};

use super::{
    ApiError, BatchApi, Bounds, Counts, Ending, Group, Match, Page, Remote, RemoteState, Row, RowEnd, RowError,
    RowResult, Submission,
    body::{self, Body, Members},
    check_custom_id, read, wire,
};

/// "The file can contain up to 50,000 requests, and can be up to 200 MB in size. Note that /v1/embeddings batches are also restricted to a
/// maximum of 50,000 embedding inputs across all requests in the batch" (the API's specification, `createBatch`). Whether a MB is 10⁶
/// bytes is not said; the margin is for the rest of the upload.
const BOUNDS: Bounds = Bounds::new(50_000, 195_000_000);

const BATCHES: &str = "/v1/batches";
const FILES: &str = "/v1/files";

/// What a batch may have rows of (`createBatch`, `endpoint`). Images and videos are left out.
const ENDPOINTS: [&str; 5] =
    ["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions", "/v1/moderations"];

const EMBEDDINGS: &str = ENDPOINTS[2];

/// Where in a batch's metadata our token is. "Keys are strings with a maximum length of 64 characters. Values are strings with a maximum
/// length of 512 characters."
const TOKEN: &str = "tower_quota";
const TOKEN_MOST: usize = 512;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The queue of enqueued tokens is full, as a batch's errors say it:
/// `BatchError(code='token_limit_exceeded', message='Enqueued token limit reached for gpt-4o-mini in organization …')`
/// (<https://github.com/openai/openai-python/issues/2084>).
const QUEUE_FULL: &str = "token_limit_exceeded";
const QUEUE_FULL_SENTENCE: &str = "Enqueued token limit reached";

/// OpenAI's [Batch API](https://platform.openai.com/docs/guides/batch): a file of up to 50,000 requests to one endpoint for one model,
/// answered within 24 hours, in a file of answers and one of errors.
///
/// Of an API that speaks it, other than OpenAI's own, it is asked that it keeps a batch's metadata, or at least tells its input file: by
/// them a batch is found again whose creation's reply was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenAi;

impl BatchApi for OpenAi {
    fn bounds(&self) -> Bounds {
        BOUNDS
    }

    fn row(&self, custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError> {
        check_custom_id(custom_id)?;
        let path = request.uri().path();
        // Before a base URL that ends in the version a path may be without it.
        let asked = |endpoint: &&&str| **endpoint == path || endpoint.strip_prefix("/v1") == Some(path);
        let Some(endpoint) = ENDPOINTS.iter().find(asked) else {
            return Err(RowError::NotBatchable(format!("no batch has requests to {path}")));
        };
        if request.uri().query().is_some_and(|query| !query.is_empty()) {
            return Err(RowError::NotBatchable("a row cannot carry its query".to_owned()));
        }
        let body = Body::of(request, "openai-", &[], BOUNDS.bytes)?;
        // "Each input file can only include requests to a single model": one without would have the whole file refused.
        let Some(model) = body.model() else {
            return Err(RowError::NotBatchable("its body names no `model`".to_owned()));
        };
        let weight = if *endpoint == EMBEDDINGS { inputs(body.members.get("input")) } else { 1 };
        if weight > BOUNDS.rows {
            return Err(RowError::NotBatchable(format!("it has {weight} inputs, and a batch up to {}", BOUNDS.rows)));
        }
        let group = Group::new(*endpoint, body::family(request, Some(&model))).with_model(model);
        let mut line =
            format!(r#"{{"custom_id":"{custom_id}","method":"POST","url":"{endpoint}","body":"#).into_bytes();
        line.reserve_exact(body.text.len() + 1);
        body.push_onto(&mut line);
        line.push(b'}');
        let bytes = body::fitting(unbreakable(line), BOUNDS.bytes)?;
        Ok(Row { weight, ..Row::new(group, bytes) })
    }

    fn upload(&self, token: &str, rows: &[Bytes]) -> Option<Request<Bytes>> {
        let boundary = boundary(rows);
        let name: String = token.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(64).collect();
        let head = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
             --{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}.jsonl\"\r\n\
             Content-Type: application/jsonl\r\n\r\n"
        );
        let tail = format!("\r\n--{boundary}--\r\n");
        let rows_len = rows.iter().map(|row| row.len() + 1).sum::<usize>();
        let mut body = Vec::with_capacity(head.len() + rows_len + tail.len());
        body.extend_from_slice(head.as_bytes());
        for row in rows {
            body.extend_from_slice(row);
            body.push(b'\n');
        }
        body.extend_from_slice(tail.as_bytes());
        let kind = HeaderValue::try_from(format!("multipart/form-data; boundary={boundary}"));
        Some(wire::post(FILES, kind.expect("a boundary has letters, digits and dashes"), body.into()))
    }

    fn uploaded(&self, answer: &Response<Bytes>) -> Result<String, ApiError> {
        read::own_id(&success(answer)?)
    }

    fn create(&self, group: &Group, token: &str, file: Option<&str>, _rows: &[Bytes]) -> Request<Bytes> {
        let token: String = token.chars().take(TOKEN_MOST).collect();
        let body = serde_json::json!({
            "input_file_id": file,
            "endpoint": group.path(),
            "completion_window": "24h",
            "metadata": {TOKEN: token},
        });
        let mut request = wire::post(BATCHES, wire::JSON, body.to_string().into());
        for (name, value) in group.headers() {
            request.headers_mut().append(name, value.clone());
        }
        request
    }

    fn created(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        remote(&success(answer)?)
    }

    fn retrieve(&self, id: &str) -> Request<Bytes> {
        wire::bare(Method::GET, &format!("{BATCHES}/{}", wire::encoded(id)))
    }

    fn retrieved(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        remote(&success(answer)?)
    }

    fn cancel(&self, id: &str) -> Request<Bytes> {
        wire::bare(Method::POST, &format!("{BATCHES}/{}/cancel", wire::encoded(id)))
    }

    fn list(&self, after: Option<&str>) -> Request<Bytes> {
        // "Limit can range between 1 and 100" (`listBatches`).
        let after = after.map_or_else(String::new, |after| format!("&after={}", wire::encoded(after)));
        wire::bare(Method::GET, &format!("{BATCHES}?limit=100{after}"))
    }

    fn listed(&self, answer: &Response<Bytes>) -> Result<Page, ApiError> {
        read::page(answer, remote)
    }

    fn matches(&self, remote: &Remote, submission: &Submission<'_>) -> Match {
        let token = submission.token.chars().take(TOKEN_MOST);
        let by_token = remote.token.as_deref().is_some_and(|theirs| theirs.chars().eq(token));
        let by_file = submission.file.is_some() && remote.input.as_deref() == submission.file;
        if by_token || by_file { Match::Certain } else { Match::No }
    }

    fn results(&self, remote: &Remote) -> Vec<Request<Bytes>> {
        let of = |id: &String| wire::bare(Method::GET, &format!("{FILES}/{}/content", wire::encoded(id)));
        match remote.state {
            RemoteState::Ended(_) | RemoteState::Failed { .. } => remote.files.iter().map(of).collect(),
            RemoteState::Processing | RemoteState::Canceling => Vec::new(),
        }
    }

    fn result(&self, line: &[u8]) -> Result<Option<RowResult>, ApiError> {
        let Some((custom_id, members)) = read::row(line)? else { return Ok(None) };
        let response = read::members(members.get("response"));
        let error = members.get("error").filter(|error| error.get() != "null");
        let end = response.and_then(|response| answered(&response, error.copied()));
        Ok(Some(RowResult { custom_id, end: end.unwrap_or_else(|| unanswered(error.copied())) }))
    }
}

/// JSON allows line separators of Unicode within a text, and some readers of lines split at them: they are escaped.
fn unbreakable(line: Vec<u8>) -> Vec<u8> {
    const BREAKS: [(&str, &str); 3] = [("\u{2028}", "\\u2028"), ("\u{2029}", "\\u2029"), ("\u{85}", "\\u0085")];
    if !BREAKS.iter().any(|(separator, _)| memmem::find(&line, separator.as_bytes()).is_some()) {
        return line;
    }
    let text = String::from_utf8_lossy(&line);
    let escaped = BREAKS.iter().fold(text.into_owned(), |text, (separator, escaped)| text.replace(separator, escaped));
    escaped.into_bytes()
}

/// A boundary that no row has in it.
fn boundary(rows: &[Bytes]) -> String {
    let mut boundary = "tower-quota".to_owned();
    for turn in 0_u64.. {
        let finder = memmem::Finder::new(&boundary);
        if rows.iter().all(|row| finder.find(row).is_none()) {
            break;
        }
        boundary = format!("tower-quota-{turn}");
    }
    boundary
}

/// How many inputs an `input` of embeddings has: a text and a list of tokens are one.
fn inputs(input: Option<&&RawValue>) -> usize {
    let list = input.and_then(|input| serde_json::from_str::<Vec<&RawValue>>(input.get()).ok()).unwrap_or_default();
    let is_tokens = list.first().is_some_and(|first| first.get().starts_with(|c: char| c == '-' || c.is_ascii_digit()));
    if is_tokens { 1 } else { list.len().max(1) }
}

/// The JSON of a success, or what the refusal means; here it can mean that the queue is full.
fn success(answer: &Response<Bytes>) -> Result<Value, ApiError> {
    read::success(answer).map_err(|error| match error {
        ApiError::Refused { .. } if is_queue_full(&read::error_of(answer)) => {
            ApiError::QueueFull(QUEUE_FULL.to_owned())
        }
        error => error,
    })
}

fn is_queue_full(error: &Value) -> bool {
    error["code"] == QUEUE_FULL
        || read::text(&error["message"]).is_some_and(|said| said.starts_with(QUEUE_FULL_SENTENCE))
}

/// What a response within a row is, if it is one.
fn answered(response: &Members<'_>, error: Option<&RawValue>) -> Option<RowEnd> {
    let status = response.get("status_code")?.get().parse::<u16>().ok().filter(|status| *status >= 200)?;
    let status = StatusCode::from_u16(status).ok()?;
    let body = response.get("body").map(|body| body.get()).filter(|body| *body != "null");
    let body = match (body, error) {
        (Some(body), _) if !status.is_success() || body.starts_with('{') => body.to_owned(),
        (None, Some(error)) if !status.is_success() => format!(r#"{{"error":{}}}"#, error.get()),
        (None, None) if !status.is_success() => String::new(),
        _ => return Some(RowEnd::Missing(format!("it was answered with {status}, and there is no body"))),
    };
    let request_id = read::raw_text(response.get("request_id"));
    Some(RowEnd::Answered(read::answer(status, body.into(), REQUEST_ID, request_id)))
}

/// Why a row has no response (`BatchRequestOutput`, `error.code`: `batch_expired`, `batch_cancelled`, `request_timeout`).
fn unanswered(error: Option<&RawValue>) -> RowEnd {
    let error: Value = error.and_then(|error| serde_json::from_str(error.get()).ok()).unwrap_or_default();
    match read::text(&error["code"]) {
        Some("batch_expired") => RowEnd::Expired,
        Some("batch_cancelled") => RowEnd::Canceled,
        _ => RowEnd::Missing(
            said(&error).unwrap_or_else(|| "it has neither a response nor an error that is named".to_owned()),
        ),
    }
}

/// An error's type and code, as far as they are there: no message, which may quote a key.
fn said(error: &Value) -> Option<String> {
    let words: Vec<_> = ["type", "code"].into_iter().filter_map(|name| read::text(&error[name])).collect();
    (!words.is_empty()).then(|| read::short(&words.join(": ")))
}

fn remote(batch: &Value) -> Result<Remote, ApiError> {
    let id = read::own_id(batch)?;
    let state = match read::text(&batch["status"]) {
        Some("completed") => RemoteState::Ended(Ending::Completed),
        Some("expired") => RemoteState::Ended(Ending::Expired),
        Some("cancelled") => RemoteState::Ended(Ending::Canceled),
        Some("cancelling") => RemoteState::Canceling,
        Some("failed") => failed(&batch["errors"]["data"]),
        _ => RemoteState::Processing,
    };
    let created_at = read::unix(&batch["created_at"]);
    let mut files: Vec<_> =
        ["output_file_id", "error_file_id"].iter().filter_map(|name| read::id(&batch[name])).collect();
    files.dedup();
    Ok(Remote {
        counts: counts(&batch["request_counts"], &state),
        expires_at: read::expires_at(created_at, read::unix(&batch["expires_at"])),
        created_at,
        token: read::text(&batch["metadata"][TOKEN]).map(str::to_owned),
        input: read::id(&batch["input_file_id"]),
        files,
        ..Remote::new(id, state)
    })
}

/// Refused at validation: why, and for which rows. The file's lines count from 1
/// (`BatchError(code="invalid_json_line", line=1, …)` of a file with one line).
fn failed(errors: &Value) -> RemoteState {
    let errors = errors.as_array().map_or(&[][..], Vec::as_slice);
    let mut words: Vec<_> = errors.iter().filter_map(said).collect();
    words.dedup();
    words.truncate(3);
    let reason =
        if words.is_empty() { "it failed, and does not say why".to_owned() } else { read::short(&words.join("; ")) };
    let lines = errors.iter().filter_map(|error| error["line"].as_u64()?.checked_sub(1)?.try_into().ok());
    let mut rows: Vec<usize> = lines.collect();
    rows.sort_unstable();
    rows.dedup();
    RemoteState::Failed { reason, queue_full: errors.iter().any(is_queue_full), rows }
}

/// Its three counts as five: what is neither completed nor failed when the batch has ended, ended as it did.
fn counts(counts: &Value, state: &RemoteState) -> Option<Counts> {
    counts.as_object().filter(|counts| !counts.is_empty())?;
    let of = |name| read::count(&counts[name]);
    let (total, succeeded, failed) = (of("total")?, of("completed")?, of("failed")?);
    let rest = total.saturating_sub(succeeded.saturating_add(failed));
    let counts = Counts { succeeded, failed, ..Counts::default() };
    match state {
        RemoteState::Ended(Ending::Expired) => Some(Counts { expired: rest, ..counts }),
        RemoteState::Ended(Ending::Canceled) => Some(Counts { canceled: rest, ..counts }),
        // Not counted yet.
        RemoteState::Processing if total == 0 && counts.total() == 0 => None,
        _ => Some(Counts { processing: rest, ..counts }),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::json;

    use super::*;
    use crate::org::Family;

    const CREATED: u64 = 1_796_040_000;

    fn request(path: &str, body: &str) -> Request<Bytes> {
        Request::post(path).body(Bytes::from(body.to_owned())).unwrap()
    }

    fn row(path: &str, body: &str) -> Row {
        OpenAi.row("a", &request(path, body)).unwrap()
    }

    fn batch(change: impl FnOnce(&mut Value)) -> Remote {
        let mut batch = json!({
            "id": "batch_1", "object": "batch", "endpoint": "/v1/chat/completions", "errors": null,
            "input_file_id": "file-in", "completion_window": "24h", "status": "in_progress",
            "output_file_id": null, "error_file_id": null, "created_at": CREATED, "expires_at": CREATED + 86_400,
            "request_counts": {"total": 10, "completed": 0, "failed": 0}, "metadata": {"tower_quota": "t1"},
        });
        change(&mut batch);
        OpenAi.retrieved(&Response::new(Bytes::from(batch.to_string()))).unwrap()
    }

    fn uris(remote: &Remote) -> Vec<String> {
        OpenAi.results(remote).iter().map(|request| format!("{} {}", request.method(), request.uri())).collect()
    }

    fn end(line: &Value) -> RowEnd {
        let mut line = line.clone();
        line["custom_id"] = "a".into();
        let row = OpenAi.result(line.to_string().as_bytes()).unwrap().unwrap();
        assert_eq!(row.custom_id, "a");
        row.end
    }

    #[test]
    fn rows_go_up_as_a_file_and_the_batch_names_it_and_our_token() {
        let bodies = ["{\"model\":\"gpt-5\",\r\n \"n\": 1.0}", r#"{"model":"gpt-5"}"#];
        let rows: Vec<_> = bodies.iter().map(|body| row("/v1/chat/completions", body).bytes).collect();
        let upload = OpenAi.upload("to/k\"en", &rows).unwrap();
        assert_eq!((upload.method(), upload.uri().path()), (&Method::POST, "/v1/files"));
        assert_eq!(upload.headers()["content-type"], "multipart/form-data; boundary=tower-quota");
        let part =
            |body: &str| format!(r#"{{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{body}}}"#);
        let expected = format!(
            "--tower-quota\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--tower-quota\r\n\
             Content-Disposition: form-data; name=\"file\"; filename=\"to-k-en.jsonl\"\r\nContent-Type: application/jsonl\r\n\r\n\
             {}\n{}\n\r\n--tower-quota--\r\n",
            part("{\"model\":\"gpt-5\",   \"n\": 1.0}"),
            part(bodies[1])
        );
        assert_eq!(upload.body(), expected.as_bytes());

        let file =
            OpenAi.uploaded(&Response::new(r#"{"id":"file-in","object":"file","purpose":"batch"}"#.into())).unwrap();
        let group = row("/v1/chat/completions", bodies[0]).group;
        let create = OpenAi.create(&group, "t1", Some(&file), &rows);
        assert_eq!((create.method(), create.uri().path()), (&Method::POST, "/v1/batches"));
        let body: Value = serde_json::from_slice(create.body()).unwrap();
        assert_eq!(
            body,
            json!({
                "input_file_id": "file-in", "endpoint": "/v1/chat/completions", "completion_window": "24h",
                "metadata": {"tower_quota": "t1"},
            })
        );
        let long = OpenAi.create(&group, &"é".repeat(600), Some(&file), &rows);
        let body: Value = serde_json::from_slice(long.body()).unwrap();
        assert_eq!(body["metadata"]["tower_quota"].as_str().unwrap().chars().count(), 512);
    }

    #[test]
    fn no_row_has_the_boundary_in_it() {
        let rows = ["--tower-quota", "tower-quota-0", "tower-quota-2"].map(Bytes::from);
        assert_eq!(boundary(&rows), "tower-quota-1");
        let kind = OpenAi.upload("t", &rows).unwrap().headers()["content-type"].clone();
        assert_eq!(kind, "multipart/form-data; boundary=tower-quota-1");
    }

    #[test]
    fn a_file_is_for_one_endpoint_and_one_model() {
        let chat = row("/v1/chat/completions", r#"{"model":"gpt-4o"}"#).group;
        assert_eq!(
            row("/chat/completions", r#"{"n":1,"model":"gpt-4o"}"#).group,
            chat,
            "before a base URL with the version"
        );
        assert_eq!(
            (chat.path(), chat.model(), chat.family()),
            ("/v1/chat/completions", Some("gpt-4o"), &Family::new("gpt-4o"))
        );
        assert_ne!(row("/v1/responses", r#"{"model":"gpt-4o"}"#).group, chat);
        // One family, two models.
        let dated = row("/v1/chat/completions", r#"{"model":"gpt-4o-2024-08-06"}"#).group;
        assert_eq!(dated.family(), chat.family());
        assert_ne!(dated, chat);
    }

    #[test]
    fn what_would_lose_something_in_a_batch_or_have_it_refused_is_no_row() {
        let why = |path: &str, header: &'static str, body: &str| {
            let mut request = request(path, body);
            if !header.is_empty() {
                request.headers_mut().insert(header, "1".parse().unwrap());
            }
            match OpenAi.row("a", &request) {
                Err(RowError::NotBatchable(why)) => why,
                other => panic!("{other:?}"),
            }
        };
        let (chat, body) = ("/v1/chat/completions", r#"{"model":"gpt-5"}"#);
        for (found, expected) in [
            (why("/v1/audio/speech", "", body), "no batch has requests to /v1/audio/speech"),
            (why("/v1/batches", "", body), "no batch has requests to /v1/batches"),
            (why("/v1/chat/completions?api-version=1", "", body), "a row cannot carry its query"),
            (why(chat, "openai-project", body), "a row cannot carry its header `openai-project`"),
            (why(chat, "", "{}"), "its body names no `model`"),
            (why(chat, "", r#"{"model":7}"#), "its body names no `model`"),
            (why(chat, "", r#"{"model":"gpt-5","stream":true}"#), "it asks for a stream"),
        ] {
            assert_eq!(found, expected);
        }
        let many = format!(r#"{{"model":"e","input":[{}""]}}"#, "\"\",".repeat(50_000));
        assert_eq!(why("/v1/embeddings", "", &many), "it has 50001 inputs, and a batch up to 50000");
    }

    #[test]
    fn embeddings_count_by_their_inputs() {
        for (input, weight) in
            [(r#""text""#, 1), (r#"["a","b","c"]"#, 3), ("[1,2,3]", 1), ("[[1,2],[3]]", 2), ("[]", 1), ("null", 1)]
        {
            assert_eq!(row("/v1/embeddings", &format!(r#"{{"model":"e","input":{input}}}"#)).weight, weight, "{input}");
        }
        assert_eq!(row("/v1/responses", r#"{"model":"m","input":["a","b"]}"#).weight, 1);
    }

    #[test]
    fn no_reader_of_lines_splits_a_row() {
        let bytes =
            row("/v1/responses", "{\"model\":\"m\",\"input\":\"a\u{2028}b\u{2029}c\u{85}d\",\r\n\"n\":1}").bytes;
        let text = std::str::from_utf8(&bytes).unwrap();
        assert!(!text.contains(['\u{2028}', '\u{2029}', '\u{85}', '\r', '\n']), "{text}");
        let body: Value = serde_json::from_str::<Value>(text).unwrap()["body"].take();
        assert_eq!(body["input"], "a\u{2028}b\u{2029}c\u{85}d");
    }

    #[test]
    fn a_batch_of_nothing_but_errors_has_its_error_file_fetched() {
        // B107
        let all_errors = batch(|batch| {
            batch["status"] = "completed".into();
            batch["error_file_id"] = "file-err".into();
            batch["request_counts"] = json!({"completed": 0, "failed": 9, "total": 9});
        });
        assert_eq!(all_errors.state, RemoteState::Ended(Ending::Completed));
        assert_eq!(uris(&all_errors), ["GET /v1/files/file-err/content"]);
        assert_eq!(all_errors.counts.map(|counts| (counts.failed, counts.total())), Some((9, 9)));
        // Its neighbours: both files, the same twice, none at all, ids that are none.
        let files = |output: Value, error: Value| {
            uris(&batch(|batch| {
                batch["status"] = "completed".into();
                batch["output_file_id"] = output;
                batch["error_file_id"] = error;
            }))
        };
        let (out, err) = ("GET /v1/files/o/content", "GET /v1/files/e/content");
        assert_eq!(files("o".into(), "e".into()), [out, err]);
        assert_eq!(files("o".into(), Value::Null), [out]);
        assert_eq!(files("o".into(), "o".into()), [out]);
        assert_eq!(files("".into(), 7.into()), [""; 0]);
    }

    #[test]
    fn an_error_row_has_the_answer_that_a_direct_call_gets() {
        let body = r#"{"error":{"message":"no such model","type":"invalid_request_error","code":"model_not_found"}}"#;
        let line = format!(
            "{{\"id\":\"b\",\"custom_id\":\"a\",\"response\":{{\"status_code\":404,\"request_id\":\"r1\",\"body\":{body}}},\"error\":null}}\r"
        );
        let RowEnd::Answered(answer) = OpenAi.result(line.as_bytes()).unwrap().unwrap().end else { panic!() };
        assert_eq!((answer.status().as_u16(), answer.body()), (404, &Bytes::from(body)));
        assert_eq!(
            (&answer.headers()["x-request-id"], &answer.headers()["content-type"]),
            (&"r1".parse().unwrap(), &wire::JSON)
        );
    }

    #[test]
    fn a_row_is_what_its_response_is_and_else_what_its_error_says() {
        let good = json!({"choices": []});
        for (line, expected) in [
            (json!({"response": {"status_code": 200, "body": good}, "error": null}), "Answered(200 OK, 14 bytes)"),
            (
                json!({"response": {"status_code": 200, "body": good}, "error": {"code": "x"}}),
                "Answered(200 OK, 14 bytes)",
            ),
            (json!({"response": {"status_code": 429, "body": good}}), "Answered(429 Too Many Requests, 14 bytes)"),
            (
                json!({"response": {"status_code": 500, "body": null}, "error": null}),
                "Answered(500 Internal Server Error, 0 bytes)",
            ),
            (json!({"response": {"status_code": 500}}), "Answered(500 Internal Server Error, 0 bytes)"),
            (json!({"response": {"status_code": 502, "body": "bad"}}), "Answered(502 Bad Gateway, 5 bytes)"),
            (json!({"response": {"status_code": 400}, "error": {"code": "x"}}), "Answered(400 Bad Request, 22 bytes)"),
            (
                json!({"response": {"status_code": 200, "body": null}}),
                "Missing(\"it was answered with 200 OK, and there is no body\")",
            ),
            (
                json!({"response": {"status_code": 200, "body": "text"}}),
                "Missing(\"it was answered with 200 OK, and there is no body\")",
            ),
            (json!({"response": null, "error": {"code": "batch_expired", "message": "…"}}), "Expired"),
            (json!({"response": null, "error": {"code": "batch_cancelled"}}), "Canceled"),
            (json!({"response": {"status_code": 0, "body": ""}, "error": {"code": "batch_expired"}}), "Expired"),
            (json!({"error": {"code": "request_timeout", "message": "sk-secret"}}), "Missing(\"request_timeout\")"),
            (json!({"error": {"code": "two\nlines"}}), "Missing(\"two lines\")"),
            (
                json!({"error": {"message": "sk-secret"}}),
                "Missing(\"it has neither a response nor an error that is named\")",
            ),
            (json!({"error": "text"}), "Missing(\"it has neither a response nor an error that is named\")"),
            (
                json!({"response": null, "error": null}),
                "Missing(\"it has neither a response nor an error that is named\")",
            ),
            (json!({"response": 7}), "Missing(\"it has neither a response nor an error that is named\")"),
            (
                json!({"response": {"status_code": "200", "body": {}}}),
                "Missing(\"it has neither a response nor an error that is named\")",
            ),
            (
                json!({"response": {"status_code": 70_000, "body": {}}}),
                "Missing(\"it has neither a response nor an error that is named\")",
            ),
            (
                json!({"response": {"status_code": 100, "body": {}}}),
                "Missing(\"it has neither a response nor an error that is named\")",
            ),
        ] {
            assert_eq!(format!("{:?}", end(&line)), expected, "{line}");
        }
    }

    #[test]
    fn what_an_expired_batch_has_finished_is_fetched() {
        // B106
        for (status, ending) in [("expired", Ending::Expired), ("cancelled", Ending::Canceled)] {
            let remote = batch(|batch| {
                batch["status"] = status.into();
                batch["output_file_id"] = "o".into();
                batch["request_counts"] = json!({"total": 10, "completed": 1, "failed": 0});
            });
            assert_eq!(remote.state, RemoteState::Ended(ending), "the other nine ended so");
            assert_eq!(uris(&remote), ["GET /v1/files/o/content"]);
            let counts = remote.counts.unwrap();
            assert_eq!((counts.succeeded, counts.expired + counts.canceled, counts.total()), (1, 9, 10));
        }
    }

    #[test]
    fn a_full_queue_is_no_rows_fault() {
        // B110
        let full = json!({
            "code": "token_limit_exceeded", "line": null, "param": null,
            "message": "Enqueued token limit reached for gpt-4o-mini in organization org-1. Limit: 2,000,000 enqueued tokens.",
        });
        let bad =
            |line: Value| json!({"code": "invalid_json_line", "line": line, "message": "This line is not parseable."});
        let failed = |errors: Value| match batch(|batch| {
            batch["status"] = "failed".into();
            batch["errors"] = errors;
        }) {
            Remote { state: RemoteState::Failed { reason, queue_full, rows }, .. } => (reason, queue_full, rows),
            other => panic!("{other:?}"),
        };
        let (reason, queue_full, rows) = failed(json!({"object": "list", "data": [full]}));
        assert_eq!(reason, "token_limit_exceeded", "no message, which may quote a key");
        assert_eq!((queue_full, rows), (true, vec![]));
        let by_sentence = json!({"message": full["message"]});
        assert!(failed(json!({"data": [by_sentence]})).1);

        // Its neighbours: rows that are to blame, and reasons that are none.
        let data: Vec<_> =
            [7.into(), 1.into(), 1.into(), Value::Null, 0.into(), (-1).into(), "2".into()].map(bad).into();
        let (reason, queue_full, rows) = failed(json!({"data": data}));
        assert_eq!((queue_full, rows), (false, vec![0, 6]));
        assert_eq!(reason, "invalid_json_line");
        for none in [Value::Null, json!({}), json!({"data": null}), json!({"data": [null, 7, {}]}), json!([])] {
            assert_eq!(failed(none), ("it failed, and does not say why".to_owned(), false, vec![]));
        }
        let long = failed(json!({"data": [{"code": "x".repeat(10_000)}]})).0;
        assert_eq!(long.len(), 300);
    }

    #[test]
    fn a_create_that_finds_the_queue_full_says_so() {
        let refused = |status: u16, error: Value| {
            let body = json!({"error": error}).to_string();
            OpenAi.created(&Response::builder().status(status).body(body.into()).unwrap()).unwrap_err()
        };
        let code = json!({"code": "token_limit_exceeded", "type": "invalid_request_error"});
        assert_eq!(refused(400, code.clone()), ApiError::QueueFull("token_limit_exceeded".to_owned()));
        assert_eq!(refused(429, code), ApiError::QueueFull("token_limit_exceeded".to_owned()));
        let other = json!({"code": "rate_limit_exceeded", "message": "for key sk-secret"});
        let refused = refused(429, other);
        assert_eq!(
            refused.to_string(),
            "refused: 429 Too Many Requests: rate_limit_exceeded",
            "no message, which may quote a key"
        );
    }

    #[test]
    fn states_are_read_and_a_new_one_is_still_processing() {
        for (status, state) in [
            ("validating", RemoteState::Processing),
            ("in_progress", RemoteState::Processing),
            ("finalizing", RemoteState::Processing),
            ("cancelling", RemoteState::Canceling),
            ("completed", RemoteState::Ended(Ending::Completed)),
            ("expired", RemoteState::Ended(Ending::Expired)),
            ("cancelled", RemoteState::Ended(Ending::Canceled)),
            ("paused", RemoteState::Processing),
            ("", RemoteState::Processing),
        ] {
            let remote = batch(|batch| {
                batch["status"] = status.into();
                batch["output_file_id"] = "o".into();
            });
            let ended = matches!(state, RemoteState::Ended(_));
            assert_eq!(remote.state, state, "{status}");
            assert_eq!(uris(&remote).len(), usize::from(ended), "{status}: half a file is not read");
        }
    }

    #[test]
    fn counts_are_unknown_until_the_provider_counts() {
        let counts = |status: &str, counts: Value| {
            batch(|batch| {
                batch["status"] = status.into();
                batch["request_counts"] = counts;
            })
            .counts
        };
        let nothing = json!({"total": 0, "completed": 0, "failed": 0});
        assert_eq!(counts("validating", nothing.clone()), None);
        assert_eq!(counts("completed", nothing), Some(Counts::default()));
        let some = json!({"total": 10, "completed": 3, "failed": 2});
        assert_eq!(
            counts("in_progress", some.clone()).map(|counts| (counts.processing, counts.total())),
            Some((5, 10))
        );
        assert_eq!(counts("cancelling", some).unwrap().processing, 5);
        // A total that is too small is not believed over its parts.
        assert_eq!(counts("completed", json!({"total": 1, "completed": 3})).unwrap().total(), 3);
        for unknown in [Value::Null, json!({}), json!([1]), json!({"total": -1}), json!({"completed": 1.5})] {
            assert_eq!(counts("in_progress", unknown.clone()), None, "{unknown}");
        }
    }

    #[test]
    fn a_date_that_cannot_be_is_none() {
        let dates = |created: Value, expires: Value| {
            let remote = batch(|batch| {
                batch["created_at"] = created;
                batch["expires_at"] = expires;
            });
            (remote.created_at, remote.expires_at)
        };
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        for (created, expires, known) in [
            (json!(CREATED), json!(CREATED + 86_400), (at(CREATED), at(CREATED + 86_400))),
            (json!(CREATED as f64), json!(CREATED + 1), (at(CREATED), at(CREATED + 1))),
            (json!(CREATED), json!(CREATED), (at(CREATED), None)),
            (json!(CREATED), json!(CREATED - 1), (at(CREATED), None)),
            (json!(CREATED), json!(0), (at(CREATED), None)),
            (json!(CREATED), json!(-1), (at(CREATED), None)),
            (json!(CREATED), json!((CREATED + 86_400) * 1000), (at(CREATED), None)),
            (json!(CREATED), json!(u64::MAX), (at(CREATED), None)),
            (json!(CREATED), json!(1e19), (at(CREATED), None)),
            (json!(CREATED), json!(1e300), (at(CREATED), None)),
            (json!(CREATED), Value::Null, (at(CREATED), None)),
            (json!(CREATED), json!("2026-12-01T12:00:00Z"), (at(CREATED), None)),
            (Value::Null, json!(CREATED), (None, None)),
        ] {
            assert_eq!(dates(created.clone(), expires.clone()), known, "{created} {expires}");
        }
    }

    #[test]
    fn a_lost_batch_is_found_by_our_token_or_by_its_file() {
        // B113
        let one = batch(|_| ());
        let submission =
            |token, file| Submission { token, file, since: SystemTime::now(), until: SystemTime::now(), rows: 3 };
        let long = "é".repeat(600);
        for (remote, token, file, found) in [
            (&one, "t1", None, Match::Certain),
            (&one, "t", None, Match::No),
            (&one, "t2", None, Match::No),
            (&one, "t2", Some("file-in"), Match::Certain),
            (&one, "t2", Some("file-other"), Match::No),
            (&batch(|batch| batch["metadata"] = Value::Null), "t1", None, Match::No),
            (&batch(|batch| batch["metadata"] = Value::Null), "t1", Some("file-in"), Match::Certain),
            (&batch(|batch| batch["metadata"] = json!({"tower_quota": "é".repeat(512)})), &long, None, Match::Certain),
            (&batch(|batch| batch["metadata"] = json!({"tower_quota": ""})), "", None, Match::No),
            (&Remote::new("batch_2", RemoteState::Processing), "t1", None, Match::No),
        ] {
            assert_eq!(OpenAi.matches(remote, &submission(token, file)), found, "{token} {file:?}");
        }
    }

    #[test]
    fn every_call_goes_where_the_api_wants_it() {
        for (request, expected) in [
            (OpenAi.retrieve("batch_1"), "GET /v1/batches/batch_1"),
            (OpenAi.cancel("batch_1"), "POST /v1/batches/batch_1/cancel"),
            (OpenAi.list(None), "GET /v1/batches?limit=100"),
            (OpenAi.list(Some("batch_1")), "GET /v1/batches?limit=100&after=batch_1"),
        ] {
            assert_eq!(format!("{} {}", request.method(), request.uri()), expected);
        }
    }
}
