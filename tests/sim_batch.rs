//! The batches of the simulated provider, in virtual time and over real HTTP.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tower::ServiceExt;
use tower_quota::sim::{BatchConfig, BatchState, Config, Dialect, Latency, OrgConfig, RowSeen, Sim, SimError};

const WALL: u64 = 1_700_000_000; // 2023-11-14T22:13:20Z

/// A batch takes 100 s, a call no time.
fn rules() -> BatchConfig {
    BatchConfig::new().delay(Latency::new(100_000.0, 0.0)).expires_after_s(1000.0)
}

fn config(dialect: Dialect, batch: BatchConfig) -> Config {
    Config::new(dialect)
        .latency(Latency::new(0.0, 0.0))
        .wall_start_s(WALL)
        .lengths_by_item(true)
        .batch(batch)
        .org(OrgConfig::new("one", "key-1"))
        .org(OrgConfig::new("two", "key-2"))
}

fn sim(dialect: Dialect, batch: BatchConfig) -> Sim {
    Sim::new(config(dialect, batch)).unwrap()
}

fn request(key: &str, method: &str, uri: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri(uri)
        .header("x-api-key", key)
        .header("authorization", format!("Bearer {key}"))
        .body(Full::new(body.into()))
        .unwrap()
}

async fn text<B>(response: Response<B>) -> String
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

async fn raw(sim: &Sim, request: Request<Full<Bytes>>) -> (StatusCode, String) {
    let response = sim.service().oneshot(request).await.unwrap();
    (response.status(), text(response).await)
}

async fn call_as(sim: &Sim, key: &str, method: &str, uri: &str, body: impl Into<Bytes>) -> (u16, Value) {
    let (status, text) = raw(sim, request(key, method, uri, body)).await;
    (status.as_u16(), serde_json::from_str(&text).unwrap())
}

async fn call(sim: &Sim, method: &str, uri: &str, body: impl Into<Bytes>) -> (u16, Value) {
    call_as(sim, "key-1", method, uri, body).await
}

async fn get(sim: &Sim, uri: &str) -> Value {
    let (status, value) = call(sim, "GET", uri, "").await;
    assert_eq!(status, 200, "{value}");
    value
}

fn params(item: usize) -> String {
    format!(r#"{{"model":"m","max_tokens":100,"messages":[{{"role":"user","content":"item {item}"}}]}}"#)
}

/// Anthropic's body of rows `r<item>`.
fn requests(rows: impl IntoIterator<Item = (String, String)>) -> String {
    let rows: Vec<String> =
        rows.into_iter().map(|(id, params)| format!(r#"{{"custom_id":"{id}","params":{params}}}"#)).collect();
    format!(r#"{{"requests":[{}]}}"#, rows.join(","))
}

fn plain(rows: usize) -> String {
    requests((0..rows).map(|i| (format!("r{i}"), params(i))))
}

/// OpenAI's file of rows.
fn jsonl(rows: impl IntoIterator<Item = (String, String)>) -> String {
    rows.into_iter()
        .map(|(id, body)| {
            format!("{{\"custom_id\":\"{id}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{body}}}\n")
        })
        .collect()
}

fn form(file: &str) -> String {
    format!(
        "--frontier\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --frontier\r\nContent-Disposition: form-data; name=\"file\"; filename=\"rows.jsonl\"\r\n\
         Content-Type: application/jsonl\r\n\r\n{file}\r\n--frontier--\r\n"
    )
}

fn upload(key: &str, uri: &str, file: &str) -> Request<Full<Bytes>> {
    let mut request = request(key, "POST", uri, form(file));
    request.headers_mut().insert("content-type", "multipart/form-data; boundary=frontier".parse().unwrap());
    request
}

async fn create_openai(sim: &Sim, file: &str) -> Value {
    let (status, uploaded) = raw(sim, upload("key-1", "/v1/files", file)).await;
    assert_eq!(status, 200, "{uploaded}");
    let uploaded: Value = serde_json::from_str(&uploaded).unwrap();
    let create = json!({
        "input_file_id": uploaded["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"chunk": "7"},
    });
    let (status, batch) = call(sim, "POST", "/v1/batches", create.to_string()).await;
    assert_eq!(status, 200, "{batch}");
    batch
}

async fn create(sim: &Sim, rows: usize) -> String {
    let batch = match sim.config().dialect {
        Dialect::Anthropic => call(sim, "POST", "/v1/messages/batches", plain(rows)).await.1,
        _ => create_openai(sim, &jsonl((0..rows).map(|i| (format!("r{i}"), params(i))))).await,
    };
    batch["id"].as_str().unwrap_or_else(|| panic!("{batch}")).to_owned()
}

fn path(sim: &Sim, id: &str) -> String {
    match sim.config().dialect {
        Dialect::Anthropic => format!("/v1/messages/batches/{id}"),
        _ => format!("/v1/batches/{id}"),
    }
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All results by their `custom_id`, and the order in which they came.
async fn results(sim: &Sim, id: &str) -> (BTreeMap<String, Value>, Vec<String>) {
    let batch = get(sim, &path(sim, id)).await;
    let uris: Vec<String> = match sim.config().dialect {
        Dialect::Anthropic => vec![batch["results_url"].as_str().unwrap().to_owned()],
        _ => ["output_file_id", "error_file_id"]
            .iter()
            .filter_map(|field| Some(format!("/v1/files/{}/content", batch[field].as_str()?)))
            .collect(),
    };
    let mut all = BTreeMap::new();
    let mut order = Vec::new();
    for uri in uris {
        let (status, text) = raw(sim, request("key-1", "GET", &uri, "")).await;
        assert_eq!(status, 200);
        for line in lines(&text) {
            let id = line["custom_id"].as_str().unwrap().to_owned();
            order.push(id.clone());
            assert!(all.insert(id, line).is_none(), "a row is told once");
        }
    }
    (all, order)
}

async fn pass(seconds: f64) {
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn an_anthropic_batch_has_its_shape_from_beginning_to_end() {
    let sim = sim(Dialect::Anthropic, rules());
    let (status, batch) = call(&sim, "POST", "/v1/messages/batches", plain(3)).await;
    let id = batch["id"].as_str().unwrap().to_owned();
    let expected = json!({
        "id": id, "type": "message_batch", "processing_status": "in_progress",
        "request_counts": {"processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
        "ended_at": null, "created_at": "2023-11-14T22:13:20.000000Z", "expires_at": "2023-11-14T22:30:00.000000Z",
        "archived_at": null, "cancel_initiated_at": null, "results_url": null,
    });
    assert_eq!((status, &batch), (200, &expected));
    assert!(id.starts_with("msgbatch_"));
    pass(99.0).await;
    assert_eq!(get(&sim, &path(&sim, &id)).await, expected, "its counts stay until it ends");
    let (status, early) = call(&sim, "GET", &format!("{}/results", path(&sim, &id)), "").await;
    assert_eq!((status, &early["error"]["type"]), (400, &json!("invalid_request_error")));
    pass(1.0).await;
    let ended = get(&sim, &path(&sim, &id)).await;
    assert_eq!(ended["processing_status"], "ended");
    assert_eq!(ended["ended_at"], "2023-11-14T22:15:00.000000Z");
    assert_eq!(
        ended["request_counts"],
        json!({"processing": 0, "succeeded": 3, "errored": 0, "canceled": 0, "expired": 0})
    );
    assert_eq!(ended["results_url"], format!("http://localhost/v1/messages/batches/{id}/results"));
    let (rows, _) = results(&sim, &id).await;
    assert_eq!(rows.keys().collect::<Vec<_>>(), ["r0", "r1", "r2"]);
    assert_eq!(rows["r1"]["result"]["type"], "succeeded");
    assert_eq!(rows["r1"]["result"]["message"]["type"], "message");
}

#[tokio::test(start_paused = true)]
async fn an_openai_batch_goes_through_its_statuses() {
    let sim = sim(Dialect::OpenAi, rules());
    let file = jsonl((0..10).map(|i| (format!("r{i}"), params(i))));
    let batch = create_openai(&sim, &file).await;
    let id = batch["id"].as_str().unwrap().to_owned();
    let input = batch["input_file_id"].clone();
    assert_eq!(
        batch,
        json!({
            "id": id, "object": "batch", "endpoint": "/v1/chat/completions", "errors": null, "input_file_id": input,
            "completion_window": "24h", "status": "validating", "output_file_id": null, "error_file_id": null,
            "created_at": WALL, "in_progress_at": null, "expires_at": WALL + 1000, "finalizing_at": null,
            "completed_at": null, "failed_at": null, "expired_at": null, "cancelling_at": null, "cancelled_at": null,
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": {"chunk": "7"},
        })
    );
    let uploaded = get(&sim, &format!("/v1/files/{}", input.as_str().unwrap())).await;
    assert_eq!(
        uploaded,
        json!({"id": input, "object": "file", "bytes": file.len(), "created_at": WALL, "filename": "rows.jsonl",
               "purpose": "batch", "status": "processed"})
    );
    let mut seen = Vec::new();
    for _ in 0..4 {
        let batch = get(&sim, &path(&sim, &id)).await;
        seen.push((batch["status"].as_str().unwrap().to_owned(), batch["request_counts"]["completed"].clone()));
        pass(32.0).await;
    }
    let seen: Vec<(&str, i64)> = seen.iter().map(|(status, done)| (status.as_str(), done.as_i64().unwrap())).collect();
    assert_eq!(seen, [("validating", 0), ("in_progress", 3), ("in_progress", 6), ("finalizing", 10)]);
    let batch = get(&sim, &path(&sim, &id)).await;
    assert_eq!((&batch["status"], &batch["completed_at"]), (&json!("completed"), &json!(WALL + 100)));
    assert_eq!(batch["error_file_id"], Value::Null);
    let (rows, _) = results(&sim, &id).await;
    assert_eq!(rows.len(), 10);
    let row = &rows["r3"];
    assert_eq!((&row["error"], &row["response"]["status_code"]), (&Value::Null, &json!(200)));
    assert_eq!(row["response"]["body"]["object"], "chat.completion");
    let output = batch["output_file_id"].as_str().unwrap();
    let file = get(&sim, &format!("/v1/files/{output}")).await;
    let (_, content) = raw(&sim, request("key-1", "GET", &format!("/v1/files/{output}/content"), "")).await;
    assert_eq!((&file["bytes"], &file["purpose"]), (&json!(content.len()), &json!("batch_output")));
}

/// Every way in which a request's content decides its answer, and `""` for none.
const MARKERS: [&str; 15] = [
    "",
    "",
    "invalid_request",
    "not_found",
    "too_large",
    "forbidden",
    "out_of_quota",
    "rate_limited",
    "overloaded",
    "api_error",
    "timeout",
    "refusal",
    "empty",
    "max_tokens",
    "in_band",
];

fn marked(item: usize) -> String {
    let marker = MARKERS[item % MARKERS.len()];
    let metadata = if marker.is_empty() { String::new() } else { format!(r#","metadata":{{"simulate":"{marker}"}}"#) };
    format!(r#"{{"model":"m","max_tokens":1000,"messages":["item {item}"]{metadata}}}"#)
}

/// All of an answer but the ids that differ from call to call.
fn told(status: u64, body: &Value) -> (u64, String) {
    let mut body = body.clone();
    if let Some(fields) = body.as_object_mut() {
        fields.remove("id");
    }
    (status, body.to_string())
}

#[tokio::test(start_paused = true)]
async fn a_row_gets_the_answer_it_would_have_had_directly() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let sim = sim(dialect, rules());
        let rows = || (0..150).map(|i| (format!("r{i}"), marked(i)));
        let id = match dialect {
            Dialect::Anthropic => call(&sim, "POST", "/v1/messages/batches", requests(rows())).await.1["id"].clone(),
            _ => create_openai(&sim, &jsonl(rows())).await["id"].clone(),
        };
        pass(100.0).await;
        let (batched, _) = results(&sim, id.as_str().unwrap()).await;
        let direct_path = if dialect == Dialect::Anthropic { "/v1/messages" } else { "/v1/chat/completions" };
        let mut statuses = BTreeMap::<u64, usize>::new();
        for (custom_id, params) in rows() {
            let (status, body) = call(&sim, "POST", direct_path, params).await;
            let row = &batched[&custom_id];
            let found = match dialect {
                Dialect::Anthropic => match row["result"]["type"].as_str().unwrap() {
                    "succeeded" => told(200, &row["result"]["message"]),
                    // The status is not told, but the words decide it.
                    "errored" => told(status.into(), &row["result"]["error"]),
                    other => panic!("{other}"),
                },
                _ => told(row["response"]["status_code"].as_u64().unwrap(), &row["response"]["body"]),
            };
            assert_eq!(found, told(status.into(), &body), "{custom_id}");
            *statuses.entry(status.into()).or_default() += 1;
        }
        let overloaded = if dialect == Dialect::Anthropic { 529 } else { 503 };
        for status in [200, 400, 404, 413, 403, 429, 500, 504, overloaded] {
            assert!(statuses.contains_key(&status), "{dialect:?} {statuses:?}");
        }
        let (truth, usage) = (sim.truth(), sim.truth().batch());
        assert_eq!((usage.rows_succeeded, usage.rows_errored), (60, 90));
        assert_eq!((truth.answered_once, truth.answered_more), (0, 40), "by both paths; the empty and in-band by none");
        let direct = &truth.orgs[0];
        assert_eq!((usage.input_tokens, usage.output_tokens), (direct.input_tokens, direct.output_tokens));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_as_long_as_its_item_says_only_if_told_so() {
    async fn lengths(by_item: bool, items: impl Iterator<Item = usize>) -> Vec<u64> {
        let sim = Sim::new(config(Dialect::Anthropic, rules()).lengths_by_item(by_item)).unwrap();
        let mut lengths = Vec::new();
        for item in items {
            let (_, body) = call(&sim, "POST", "/v1/messages", params(item)).await;
            lengths.push(body["usage"]["output_tokens"].as_u64().unwrap());
        }
        lengths
    }
    let mut first = lengths(true, 0..50).await;
    let mut again = lengths(true, (0..50).rev()).await;
    again.reverse();
    assert_eq!(first, again);
    first.sort_unstable();
    first.dedup();
    assert!(first.len() > 20, "{first:?}");
    assert_ne!(lengths(false, [1, 1, 1].into_iter()).await, [again[1]; 3]);
}

#[tokio::test(start_paused = true)]
async fn embeddings_have_batches_in_openais_dialect() {
    let sim = sim(Dialect::OpenAi, rules());
    let body = r#"{"model":"e","input":["a","b","c"]}"#;
    let file = jsonl([("r".to_owned(), body.to_owned())]).replace("/v1/chat/completions", "/v1/embeddings");
    let (_, file) = raw(&sim, upload("key-1", "/v1/files", &file)).await;
    let file: Value = serde_json::from_str(&file).unwrap();
    let create = json!({"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"});
    let (_, batch) = call(&sim, "POST", "/v1/batches", create.to_string()).await;
    pass(100.0).await;
    let (rows, _) = results(&sim, batch["id"].as_str().unwrap()).await;
    let (_, direct) = call(&sim, "POST", "/v1/embeddings", body).await;
    assert_eq!(direct["data"].as_array().unwrap().len(), 3);
    assert_eq!(rows["r"]["response"]["body"], direct);
    let truth = sim.truth().batch();
    assert_eq!((truth.input_tokens, truth.output_tokens), (body.len().div_ceil(4) as u64, 0));
}

#[tokio::test(start_paused = true)]
async fn what_content_asks_for_has_its_shape() {
    let sim = sim(Dialect::Anthropic, rules());
    let ask = |word: &str| format!(r#"{{"max_tokens":9,"metadata":{{"simulate":"{word}","x":[1]}}}}"#);
    let (_, refusal) = call(&sim, "POST", "/v1/messages", ask("refusal")).await;
    assert_eq!(refusal["stop_reason"], "refusal");
    let long = ask("max_tokens").replace(":9,", ":5000,");
    let (_, cut) = call(&sim, "POST", "/v1/messages", long).await;
    assert_eq!((&cut["stop_reason"], &cut["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(5000)));
    let (_, empty) = call(&sim, "POST", "/v1/messages", ask("empty")).await;
    assert_eq!(empty["content"], json!([]));
    let (status, unknown) = call(&sim, "POST", "/v1/messages", ask("overlaoded")).await;
    assert_eq!((status, &unknown["error"]["type"]), (400, &json!("invalid_request_error")), "a slip is noticed");
    for other in ["null", "[]", "{}", r#"{"simulate":7}"#, r#"{"user_id":"u"}"#] {
        let (status, _) = call(&sim, "POST", "/v1/messages", format!(r#"{{"metadata":{other},"max_tokens":9}}"#)).await;
        assert_eq!(status, 200, "{other}");
    }
    let openai = self::sim(Dialect::OpenAi, rules());
    let (_, refusal) = call(&openai, "POST", "/v1/chat/completions", ask("refusal")).await;
    let message = &refusal["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert!(message["refusal"].is_string());
    // Charged like any other: it is decided after the quota.
    let truth = sim.truth();
    assert_eq!(truth.orgs[0].errors[&400], 1);
}

#[tokio::test(start_paused = true)]
async fn one_bad_row_refuses_the_whole_anthropic_batch() {
    let sim = sim(Dialect::Anthropic, rules().max_rows(10).max_bytes(10_000));
    let one = |id: &str, params: &str| requests([(id.to_owned(), params.to_owned())]);
    let long = "a".repeat(65);
    for (status, body) in [
        (400, r#"{"requests":[]}"#.to_owned()),
        (400, "{".to_owned()),
        (400, "{}".to_owned()),
        (400, one(&long, "{}")),
        (400, one("a/b", "{}")),
        (400, one("", "{}")),
        (400, one("a", "[]")),
        (400, requests([("a".to_owned(), "{}".to_owned()), ("a".to_owned(), params(1))])),
        (400, plain(11)),
        (413, one("a", &format!(r#"{{"x":"{}"}}"#, "y".repeat(10_000)))),
    ] {
        let (found, answer) = call(&sim, "POST", "/v1/messages/batches", body.clone()).await;
        assert_eq!(found, status, "{body}");
        let kind = if status == 413 { "request_too_large" } else { "invalid_request_error" };
        assert_eq!(answer["error"]["type"], kind, "{body}");
    }
    assert_eq!((sim.truth().batch().created, sim.truth().rows.submitted_once), (0, 0));
    let fitting = requests([(long[1..].to_owned(), "{}".to_owned()), ("-_Z9".to_owned(), "{}".to_owned())]);
    assert_eq!(call(&sim, "POST", "/v1/messages/batches", fitting).await.0, 200);
    assert_eq!(sim.truth().orgs[0].errors, BTreeMap::from([(400, 9), (413, 1)]));
}

#[tokio::test(start_paused = true)]
async fn an_openai_file_is_judged_at_validation() {
    let line = |id: &str| jsonl([(id.to_owned(), "{}".to_owned())]);
    let embeddings = line("e").replace("chat/completions", "embeddings");
    let sim = sim(Dialect::OpenAi, rules().max_rows(3));
    for (file, code, at) in [
        (String::new(), "empty_file", None),
        (format!("{}\nno json\n", line("a").trim()), "invalid_json_line", Some(2)),
        (line("a") + &line("b") + &line("a"), "duplicate_custom_id", Some(3)),
        (line("a") + &embeddings, "url_mismatch", Some(2)),
        (embeddings.clone(), "url_mismatch", None),
        (line("a").replace("POST", "GET"), "invalid_request", Some(1)),
        (["a", "b", "c", "d"].map(line).concat(), "too_many_tasks", None),
    ] {
        let id = create_openai(&sim, &file).await["id"].as_str().unwrap().to_owned();
        pass(4.9).await;
        assert_eq!(get(&sim, &path(&sim, &id)).await["status"], "validating");
        pass(0.1).await;
        let batch = get(&sim, &path(&sim, &id)).await;
        assert_eq!((&batch["status"], &batch["errors"]["data"][0]["code"]), (&json!("failed"), &json!(code)));
        assert_eq!(batch["errors"]["data"][0]["line"], json!(at), "{code}");
        assert!(batch["failed_at"].is_u64() && batch["output_file_id"].is_null() && batch["error_file_id"].is_null());
    }
    let truth = sim.truth().batch();
    assert_eq!((truth.created, truth.failed, truth.rows), (7, 7, 0));
    assert_eq!(sim.row("a"), RowSeen::default());
}

#[tokio::test(start_paused = true)]
async fn only_the_creating_org_sees_a_batch() {
    let sim = sim(Dialect::Anthropic, rules().delay(Latency::new(0.0, 0.0)));
    let id = create(&sim, 2).await;
    let path = path(&sim, &id);
    for (method, uri) in [("GET", path.clone()), ("POST", format!("{path}/cancel")), ("GET", format!("{path}/results"))]
    {
        let (status, answer) = call_as(&sim, "key-2", method, &uri, "").await;
        assert_eq!((status, &answer["error"]["type"]), (404, &json!("not_found_error")), "{uri}");
    }
    assert_eq!(call_as(&sim, "key-2", "GET", "/v1/messages/batches", "").await.1["data"], json!([]));
    assert_eq!(sim.truth().org("one").unwrap().batch.cancelled, 0);
    assert_eq!(call(&sim, "GET", &path, "").await.0, 200);

    let sim = self::sim(Dialect::OpenAi, rules().delay(Latency::new(0.0, 0.0)));
    let id = create(&sim, 2).await;
    let batch = get(&sim, &self::path(&sim, &id)).await;
    let (input, output) = (batch["input_file_id"].as_str().unwrap(), batch["output_file_id"].as_str().unwrap());
    for uri in [
        self::path(&sim, &id),
        format!("/v1/files/{input}"),
        format!("/v1/files/{output}"),
        format!("/v1/files/{output}/content"),
    ] {
        assert_eq!(call_as(&sim, "key-2", "GET", &uri, "").await.0, 404, "{uri}");
    }
    // A second key of one org sees what the first has made.
    let both = config(Dialect::Anthropic, rules());
    let both = both.org(OrgConfig::new("one again", "key-3").organization_id("one"));
    let sim = Sim::new(both).unwrap();
    let id = create(&sim, 2).await;
    assert_eq!(call_as(&sim, "key-3", "GET", &self::path(&sim, &id), "").await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn a_stuck_or_starved_batch_does_nothing_until_it_expires() {
    let sim = sim(Dialect::Anthropic, rules().starve_above(5).counts_while_running(true));
    let (small, large) = (create(&sim, 5).await, create(&sim, 6).await);
    pass(50.0).await;
    assert!(get(&sim, &path(&sim, &small)).await["request_counts"]["succeeded"].as_u64().unwrap() > 0);
    pass(949.0).await;
    assert_eq!(get(&sim, &path(&sim, &small)).await["processing_status"], "ended");
    let counts = json!({"processing": 6, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0});
    assert_eq!(get(&sim, &path(&sim, &large)).await["request_counts"], counts);
    pass(1.0).await;
    let counts = json!({"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 6});
    assert_eq!(get(&sim, &path(&sim, &large)).await["request_counts"], counts);
    let (rows, _) = results(&sim, &large).await;
    assert!(rows.len() == 6 && rows.values().all(|row| row["result"] == json!({"type": "expired"})));
    let states: Vec<BatchState> = sim.batches().iter().map(|batch| batch.state).collect();
    assert_eq!(states, [BatchState::Completed, BatchState::Expired]);
}

#[tokio::test(start_paused = true)]
async fn an_expired_batch_keeps_what_it_had_finished() {
    let sim = sim(Dialect::OpenAi, rules().expired(true).expired_part(0.1));
    let id = create(&sim, 10).await;
    pass(1000.0).await;
    let batch = get(&sim, &path(&sim, &id)).await;
    assert_eq!(batch["status"], "expired");
    assert_eq!(batch["expired_at"], json!(WALL + 1000));
    assert_eq!(batch["request_counts"], json!({"total": 10, "completed": 1, "failed": 0}));
    let (rows, _) = results(&sim, &id).await;
    let expired = rows.values().filter(|row| row["error"]["code"] == "batch_expired" && row["response"].is_null());
    assert_eq!((rows.len(), expired.count()), (10, 9));
    let truth = sim.truth().batch();
    assert_eq!((truth.expired, truth.rows_succeeded, truth.rows_expired), (1, 1, 9));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_batch_is_canceling_first_and_keeps_what_was_done() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let sim = sim(dialect, rules().cancel_takes_s(20.0));
        let id = create(&sim, 10).await;
        pass(50.0).await;
        let cancel = format!("{}/cancel", path(&sim, &id));
        let (_, batch) = call(&sim, "POST", &cancel, "").await;
        let (status, cancelling) = match dialect {
            Dialect::Anthropic => (&batch["processing_status"], "canceling"),
            _ => (&batch["status"], "cancelling"),
        };
        assert_eq!(status, cancelling);
        pass(20.0).await;
        let batch = get(&sim, &path(&sim, &id)).await;
        let (rows, _) = results(&sim, &id).await;
        assert_eq!(rows.len(), 10);
        let undone = match dialect {
            Dialect::Anthropic => {
                let counts = json!({"processing": 0, "succeeded": 5, "errored": 0, "canceled": 5, "expired": 0});
                assert_eq!((&batch["processing_status"], &batch["request_counts"]), (&json!("ended"), &counts));
                assert_eq!(batch["cancel_initiated_at"], "2023-11-14T22:14:10.000000Z");
                rows.values().filter(|row| row["result"]["type"] == "canceled").count()
            }
            _ => {
                assert_eq!(batch["status"], "cancelled");
                assert_eq!((&batch["cancelling_at"], &batch["cancelled_at"]), (&json!(WALL + 50), &json!(WALL + 70)));
                rows.values().filter(|row| row["error"]["code"] == "batch_cancelled").count()
            }
        };
        assert_eq!(undone, 5);
        assert_eq!(call(&sim, "POST", &cancel, "").await.0, 200, "once more is no harm");
        let truth = sim.truth().batch();
        assert_eq!((truth.cancelled, truth.rows_succeeded, truth.rows_canceled), (1, 5, 5));
        // What has completed cannot be cancelled.
        let id = create(&sim, 1).await;
        pass(100.0).await;
        let (status, _) = call(&sim, "POST", &format!("{}/cancel", path(&sim, &id)), "").await;
        assert_eq!(status, if dialect == Dialect::Anthropic { 400 } else { 409 });
    }
}

#[tokio::test(start_paused = true)]
async fn an_openai_batch_of_errors_alone_has_no_output_file() {
    let sim = sim(Dialect::OpenAi, rules().all_error(true));
    let id = create(&sim, 9).await;
    pass(100.0).await;
    let batch = get(&sim, &path(&sim, &id)).await;
    assert_eq!((&batch["status"], &batch["output_file_id"]), (&json!("completed"), &Value::Null));
    assert!(batch["error_file_id"].is_string());
    assert_eq!(batch["request_counts"], json!({"total": 9, "completed": 0, "failed": 9}));
    let (rows, _) = results(&sim, &id).await;
    assert!(rows.values().all(|row| row["response"]["status_code"] == 500 && row["error"].is_null()));
    assert_eq!(sim.truth().rows.billed_once, 0);
}

#[tokio::test(start_paused = true)]
async fn rows_meet_errors_as_often_as_told_and_an_invalid_one_stays_so() {
    let sim = sim(Dialect::Anthropic, rules().row_invalid(0.1).row_api_error(0.1).row_overloaded(0.1));
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let id = create(&sim, 1000).await;
        pass(100.0).await;
        let (rows, _) = results(&sim, &id).await;
        let kind = |row: &Value| row["result"]["error"]["error"]["type"].as_str().unwrap_or("none").to_owned();
        kinds.push(rows.into_iter().map(|(id, row)| (id, kind(&row))).collect::<BTreeMap<_, _>>());
    }
    let of = |kind: &str, of: &BTreeMap<String, String>| -> Vec<String> {
        of.iter().filter(|(_, found)| *found == kind).map(|(id, _)| id.clone()).collect()
    };
    for (kind, is_same) in [("invalid_request_error", true), ("api_error", false), ("overloaded_error", false)] {
        let (first, second) = (of(kind, &kinds[0]), of(kind, &kinds[1]));
        assert!((60..140).contains(&first.len()), "{kind} {}", first.len());
        assert_eq!(first == second, is_same, "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn results_come_in_another_order_unless_told_otherwise() {
    for shuffle in [true, false] {
        let sim = sim(Dialect::Anthropic, rules().shuffle(shuffle));
        let id = create(&sim, 50).await;
        pass(100.0).await;
        let (_, order) = results(&sim, &id).await;
        let came: Vec<String> = (0..50).map(|i| format!("r{i}")).collect();
        assert_eq!(order == came, !shuffle);
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_batch_is_not_found_and_not_listed_for_a_while() {
    let sim = sim(Dialect::Anthropic, rules().not_found_after_create_s(10.0).not_listed_after_create_s(20.0));
    let id = create(&sim, 1).await;
    pass(9.9).await;
    assert_eq!(call(&sim, "GET", &path(&sim, &id), "").await.0, 404);
    pass(0.1).await;
    assert_eq!(call(&sim, "GET", &path(&sim, &id), "").await.0, 200);
    assert_eq!(get(&sim, "/v1/messages/batches").await["data"], json!([]));
    pass(10.0).await;
    assert_eq!(get(&sim, "/v1/messages/batches").await["data"][0]["id"], *id);
    let truth = sim.truth().batch();
    assert_eq!((truth.polls, truth.hidden, truth.lists), (1, 1, 2));
    let never = self::sim(Dialect::Anthropic, rules().not_found(true));
    let id = create(&never, 1).await;
    pass(500.0).await;
    assert_eq!(call(&never, "GET", &path(&never, &id), "").await.0, 404);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_is_a_429_or_a_batch_that_fails() {
    let sim = sim(Dialect::Anthropic, rules().queue_rows(10));
    create(&sim, 6).await;
    let (status, answer) = call(&sim, "POST", "/v1/messages/batches", plain(5)).await;
    assert_eq!((status, &answer["error"]["type"]), (429, &json!("rate_limit_error")));
    assert_eq!(sim.truth().throttled_429(), 1);
    create(&sim, 4).await;
    let other = call_as(&sim, "key-2", "POST", "/v1/messages/batches", plain(5)).await;
    assert_eq!(other.0, 200, "each org has a queue of its own");
    pass(100.0).await;
    create(&sim, 10).await;
    let truth = sim.truth().org("one").unwrap().batch.clone();
    assert_eq!((truth.created, truth.peak_open, truth.peak_open_rows), (3, 2, 10));

    let body = params(0).len().div_ceil(4) as u64;
    let sim = self::sim(Dialect::OpenAi, rules().queue_tokens(10 * body));
    create(&sim, 6).await;
    let id = create(&sim, 5).await;
    pass(5.0).await;
    let batch = get(&sim, &path(&sim, &id)).await;
    let error = &batch["errors"]["data"][0];
    assert_eq!((&batch["status"], &error["code"]), (&json!("failed"), &json!("token_limit_exceeded")));
    assert!(error["message"].as_str().unwrap().starts_with("Enqueued token limit reached for m in organization one."));
    pass(100.0).await;
    let id = create(&sim, 5).await;
    pass(100.0).await;
    assert_eq!(get(&sim, &path(&sim, &id)).await["status"], "completed");
}

#[tokio::test(start_paused = true)]
async fn a_batch_whose_reply_was_lost_is_in_the_list() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let sim = sim(dialect, rules().lost_reply(true));
        let request = match dialect {
            Dialect::Anthropic => request("key-1", "POST", "/v1/messages/batches", plain(3)),
            _ => {
                let (_, file) = raw(&sim, upload("key-1", "/v1/files", &jsonl([("a".into(), params(1))]))).await;
                let file: Value = serde_json::from_str(&file).unwrap();
                let create = json!({"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"});
                request("key-1", "POST", "/v1/batches", create.to_string())
            }
        };
        let lost = sim.service().oneshot(request).await;
        assert_eq!(lost.unwrap_err(), SimError::Reset);
        let list = get(&sim, path(&sim, "").trim_end_matches('/')).await;
        assert_eq!(list["data"].as_array().unwrap().len(), 1);
        let truth = sim.truth();
        assert_eq!((truth.batch().created, truth.batch().lost_replies, truth.orgs[0].resets), (1, 1, 1));
        assert!(sim.batches()[0].lost_reply);
    }
}

#[tokio::test(start_paused = true)]
async fn lists_are_newest_first_and_have_pages() {
    let ids = |list: &Value| -> Vec<String> {
        list["data"].as_array().unwrap().iter().map(|batch| batch["id"].as_str().unwrap().to_owned()).collect()
    };
    for (dialect, after) in [(Dialect::Anthropic, "after_id"), (Dialect::OpenAi, "after")] {
        let sim = sim(dialect, rules());
        let mut newest_first = Vec::new();
        for _ in 0..5 {
            newest_first.insert(0, create(&sim, 1).await);
        }
        let base = path(&sim, "").trim_end_matches('/').to_owned();
        let all = get(&sim, &base).await;
        assert_eq!((ids(&all), &all["has_more"]), (newest_first.clone(), &json!(false)));
        let first = get(&sim, &format!("{base}?limit=2")).await;
        assert_eq!((ids(&first), &first["has_more"]), (newest_first[..2].to_vec(), &json!(true)));
        assert_eq!((&first["first_id"], &first["last_id"]), (&json!(newest_first[0]), &json!(newest_first[1])));
        let next = get(&sim, &format!("{base}?limit=3&{after}={}", newest_first[1])).await;
        assert_eq!((ids(&next), &next["has_more"]), (newest_first[2..].to_vec(), &json!(false)));
        if dialect == Dialect::Anthropic {
            let before = get(&sim, &format!("{base}?limit=2&before_id={}", newest_first[3])).await;
            assert_eq!((ids(&before), &before["has_more"]), (newest_first[1..3].to_vec(), &json!(true)));
        }
        assert_eq!(call(&sim, "GET", &format!("{base}?{after}=nonsense"), "").await.0, 400);
    }
}

#[tokio::test(start_paused = true)]
async fn managing_calls_cost_one_request_each_and_rows_cost_none() {
    let org = OrgConfig::new("one", "key-1").requests_per_minute(60.0).input_tokens_per_minute(1.0).capacity_s(4.0);
    let sim =
        Sim::new(Config::new(Dialect::Anthropic).latency(Latency::new(0.0, 0.0)).batch(rules()).org(org)).unwrap();
    let response = sim.service().oneshot(request("key-1", "POST", "/v1/messages/batches", plain(100))).await.unwrap();
    assert_eq!(response.headers()["anthropic-ratelimit-requests-remaining"], "3");
    let batch: Value = serde_json::from_str(&text(response).await).unwrap();
    let path = path(&sim, batch["id"].as_str().unwrap());
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(call(&sim, "GET", &path, "").await.0);
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
    let one = &sim.truth().orgs[0];
    assert_eq!((one.calls, one.managed, one.throttled_429, one.ok, one.in_flight), (5, 4, 1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_submitted_or_billed_twice_is_counted_across_orgs() {
    let sim = sim(Dialect::Anthropic, rules());
    create(&sim, 4).await;
    pass(100.0).await;
    call_as(&sim, "key-2", "POST", "/v1/messages/batches", plain(2)).await;
    let truth = sim.truth();
    assert_eq!((truth.rows.submitted_once, truth.rows.submitted_more), (2, 2));
    assert_eq!((truth.rows.billed_once, truth.rows.billed_more), (4, 0));
    let two = &truth.org("two").unwrap().batch;
    assert_eq!((two.rows_again_after_billed, two.rows_again_while_open), (2, 0));
    call_as(&sim, "key-2", "POST", "/v1/messages/batches", plain(1)).await;
    assert_eq!(sim.truth().batch().rows_again_while_open, 1);
    pass(100.0).await;
    let truth = sim.truth();
    assert_eq!((truth.rows.billed_once, truth.rows.billed_more), (2, 2));
    assert_eq!((truth.answered_once, truth.answered_more), (2, 2));
    let row = sim.row("r0");
    assert_eq!((row.submitted, row.billed, row.open), (3, 3, 0));
    // And by the direct path: the same body is the same item.
    call(&sim, "POST", "/v1/messages", params(3)).await;
    assert_eq!(sim.truth().answered_more, 3);
}

#[tokio::test(start_paused = true)]
async fn the_same_seed_gives_the_same_batches() {
    async fn run(seed: u64, direct: usize) -> Vec<Value> {
        let rules = BatchConfig::new().stuck(0.2).expired(0.2).all_error(0.2).row_overloaded(0.1);
        let sim = Sim::new(config(Dialect::Anthropic, rules).seed(seed)).unwrap();
        for i in 0..direct {
            call(&sim, "POST", "/v1/messages", params(i)).await;
        }
        for _ in 0..20 {
            create(&sim, 10).await;
        }
        pass(90_000.0).await;
        get(&sim, "/v1/messages/batches").await["data"].as_array().unwrap().clone()
    }
    let first = run(1, 0).await;
    assert_eq!(first, run(1, 0).await);
    assert_eq!(first, run(1, 5).await, "direct calls move no draw");
    assert_ne!(first, run(2, 0).await);
}

#[tokio::test(start_paused = true)]
async fn faults_of_calls_strike_those_that_manage_batches_too() {
    let sim = Sim::new(
        Config::new(Dialect::Anthropic)
            .latency(Latency::new(0.0, 0.0))
            .batch(rules().delay(Latency::new(0.0, 0.0)))
            .org(OrgConfig::new("one", "key-1"))
            .org(OrgConfig::new("bad", "key-2").organization_id("one").truncate(true))
            .org(OrgConfig::new("down", "key-3").error_5xx(true)),
    )
    .unwrap();
    let id = create(&sim, 10).await;
    let results = request("key-2", "GET", &format!("{}/results", path(&sim, &id)), "");
    let mut body = sim.service().oneshot(results).await.unwrap().into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(lines(std::str::from_utf8(&first).unwrap()).len(), 5);
    assert_eq!(body.frame().await.unwrap().unwrap_err(), SimError::Truncated);
    assert_eq!(call_as(&sim, "key-3", "POST", "/v1/messages/batches", plain(2)).await.0, 500);
    assert_eq!(sim.truth().batch().created, 1, "a call that failed has made nothing");
    let delete = request("key-1", "DELETE", &path(&sim, &id), "");
    assert_eq!(raw(&sim, delete).await.0, 405);
}

#[tokio::test(start_paused = true)]
async fn a_hundred_thousand_rows_are_answered_and_streamed() {
    let sim = sim(Dialect::Anthropic, rules());
    let id = create(&sim, 100_000).await;
    pass(100.0).await;
    let results = request("key-1", "GET", &format!("{}/results", path(&sim, &id)), "");
    let mut body = sim.service().oneshot(results).await.unwrap().into_body();
    let (mut frames, mut rows, mut largest) = (0, 0, 0);
    while let Some(frame) = body.frame().await {
        let data = frame.unwrap().into_data().unwrap();
        frames += 1;
        largest = largest.max(data.len());
        rows += data.iter().filter(|b| **b == b'\n').count();
    }
    assert_eq!(rows, 100_000);
    assert!(frames > 100 && largest < 100_000, "{frames} frames of at most {largest} bytes");
    assert_eq!(sim.truth().rows.billed_once, 100_000);
    let too_many = requests((0..100_001).map(|i| (format!("{i}"), "{}".to_owned())));
    let (status, _) = call(&sim, "POST", "/v1/messages/batches", too_many).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn an_anthropic_batch_over_http() {
    let sim = sim(Dialect::Anthropic, rules().delay(Latency::new(50.0, 0.0)));
    let server = sim.serve().await.unwrap();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let base = format!("http://{}/v1/messages/batches", server.addr());
    let created = client.request(request("key-1", "POST", &base, plain(2000))).await.unwrap();
    let batch: Value = serde_json::from_str(&text(created).await).unwrap();
    let mut batch = batch;
    while batch["processing_status"] != "ended" {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let uri = format!("{base}/{}", batch["id"].as_str().unwrap());
        let polled = client.request(request("key-1", "GET", &uri, "")).await.unwrap();
        batch = serde_json::from_str(&text(polled).await).unwrap();
    }
    let results_url = batch["results_url"].as_str().unwrap();
    assert!(results_url.starts_with(&base), "{results_url}");
    let results = client.request(request("key-1", "GET", results_url, "")).await.unwrap();
    assert_eq!(results.headers()["content-type"], "application/x-jsonl");
    assert_eq!(lines(&text(results).await).len(), 2000);
    let other = client.request(request("key-1", "GET", &format!("http://{}/v1/batches", server.addr()), "")).await;
    assert_eq!(other.unwrap().status(), 404);
    let wrong = client.request(request("key-1", "PUT", &base, "")).await.unwrap();
    assert_eq!(wrong.status(), 405);
    server.shutdown().await;
}

#[tokio::test]
async fn an_openai_batch_over_http() {
    let sim = sim(Dialect::OpenAi, rules().delay(Latency::new(50.0, 0.0)).row_api_error(0.5));
    let server = sim.serve().await.unwrap();
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let base = format!("http://{}/v1", server.addr());
    let file = jsonl((0..200).map(|i| (format!("r{i}"), params(i))));
    let uploaded = client.request(upload("key-1", &format!("{base}/files"), &file)).await.unwrap();
    let uploaded: Value = serde_json::from_str(&text(uploaded).await).unwrap();
    let create =
        json!({"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"});
    let create = request("key-1", "POST", &format!("{base}/batches"), create.to_string());
    let mut batch: Value = serde_json::from_str(&text(client.request(create).await.unwrap()).await).unwrap();
    while batch["status"] != "completed" {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let uri = format!("{base}/batches/{}", batch["id"].as_str().unwrap());
        let polled = client.request(request("key-1", "GET", &uri, "")).await.unwrap();
        batch = serde_json::from_str(&text(polled).await).unwrap();
    }
    let mut rows = 0;
    for field in ["output_file_id", "error_file_id"] {
        let uri = format!("{base}/files/{}/content", batch[field].as_str().unwrap());
        let content = client.request(request("key-1", "GET", &uri, "")).await.unwrap();
        rows += lines(&text(content).await).len();
    }
    assert_eq!(rows, 200);
    let input = format!("{base}/files/{}", uploaded["id"].as_str().unwrap());
    let deleted = client.request(request("key-1", "DELETE", &input, "")).await.unwrap();
    assert_eq!(deleted.status(), 200);
    assert_eq!(client.request(request("key-1", "GET", &input, "")).await.unwrap().status(), 404);
    server.shutdown().await;
}

#[test]
fn a_file_configures_batches_for_all_orgs_or_one() {
    let config: Config = toml::from_str(
        r#"
        batch = { delay = { p50_ms = 10 }, stuck = 0.1, starve_above = 7, queue_rows = 9, shuffle = false, lost_reply = true }
        [[orgs]]
        name = "one"
        key = "k"
        batch = { expired = 1.0 }
        "#,
    )
    .unwrap();
    let expected = BatchConfig::new().delay(Latency::new(10.0, 0.3)).stuck(0.1).starve_above(7).queue_rows(9);
    assert_eq!(config.batch, expected.shuffle(false).lost_reply(true));
    assert_eq!(config.orgs[0].batch, Some(BatchConfig::new().expired(true)));
    assert!(toml::from_str::<Config>("batch = { stuk = 1 }").is_err());
    let wrong = |config: Config| Sim::new(config).unwrap_err().to_string();
    assert_eq!(wrong(Config::default().batch(BatchConfig::new().stuck(2.0))), "batch: stuck must lie between 0 and 1");
    let org = OrgConfig::new("one", "k").batch(BatchConfig::new().expired_part(2.0));
    assert_eq!(wrong(Config::default().org(org)), "org \"one\": batch: expired_part must lie between 0 and 1");
}
