//! A provider that speaks Anthropic's Message Batches, in virtual time, and does what it is told to.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio::time::Instant;

/// When virtual time begins.
pub(crate) const EPOCH: u64 = 1_800_000_000;

/// What becomes of the next batch that is created.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// It ends after so long; default a minute.
    pub(crate) takes: Option<Duration>,
    /// It never gets anywhere.
    pub(crate) stuck: bool,
    /// Only so many of its rows are done, the others expire.
    pub(crate) expires: Option<usize>,
    /// Nobody can see it for so long.
    pub(crate) hidden: Duration,
    /// It is created, and the reply is lost.
    pub(crate) lost: bool,
    /// It is not created, and no reply comes.
    pub(crate) swallowed: bool,
    /// It is refused with this.
    pub(crate) refused: Option<(u16, Value)>,
    /// Its results are out of order.
    pub(crate) reversed: bool,
    /// Its results break off in the middle, once.
    pub(crate) torn: bool,
    /// Each row has a line that says that it failed, before the one that says how it ended.
    pub(crate) doubled: bool,
    /// So many times its results have three lines only.
    pub(crate) cut: usize,
    /// It is done, and its results are not to be had any more.
    pub(crate) archived: bool,
}

#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) id: String,
    pub(crate) key: String,
    pub(crate) rows: Vec<(String, Value)>,
    plan: Plan,
    skew: i64,
    pub(crate) created: Instant,
    pub(crate) cancelled: Option<Instant>,
    pub(crate) polls: Vec<Instant>,
    torn: bool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) batches: Vec<Batch>,
    plans: VecDeque<Plan>,
    /// What is answered before anything else: by method and end of the path.
    pub(crate) faults: VecDeque<(Method, &'static str, u16)>,
    /// What is answered instead of what would be: by method and end of the path.
    pub(crate) instead: VecDeque<(Method, &'static str, u16, &'static str)>,
    pub(crate) calls: Vec<(String, Method, String)>,
    pub(crate) dead: BTreeMap<String, u16>,
    /// Keys, each with a model that it is not allowed: rows of it fail.
    pub(crate) forbidden: Vec<(&'static str, &'static str)>,
    /// A batch with a row of which this is said is refused.
    pub(crate) poison: Option<&'static str>,
    pub(crate) cancels: usize,
    /// By so many seconds its clock is ahead.
    pub(crate) skew: i64,
    pub(crate) lists_oldest_first: bool,
    /// Whatever page is asked for.
    pub(crate) lists_same_page: bool,
    /// So many batches are on a page; 0 is all.
    pub(crate) page: usize,
    /// Until a batch has ended its rows are counted as none.
    pub(crate) counts_late: bool,
    /// With what calls to cancel are answered, and nothing is done.
    pub(crate) uncancelled: Vec<(u16, &'static str)>,
    start: Option<Instant>,
    slow: Option<Duration>,
}

#[derive(Clone, Default)]
pub(crate) struct Provider(Arc<Mutex<State>>);

impl Provider {
    pub(crate) fn new() -> Self {
        let provider = Provider::default();
        provider.state().start = Some(Instant::now());
        provider
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// What becomes of the next batches.
    pub(crate) fn plan(&self, plans: impl IntoIterator<Item = Plan>) -> &Self {
        self.state().plans.extend(plans);
        self
    }

    /// The next call of this method to a path with this end fails with a status; 0 is a lost connection.
    pub(crate) fn fault(&self, method: Method, path: &'static str, status: u16) -> &Self {
        self.state().faults.push_back((method, path, status));
        self
    }

    /// So many calls of this method to a path with this end are done, and answered with this all the same.
    pub(crate) fn instead(
        &self,
        times: usize,
        (method, path): (Method, &'static str),
        status: u16,
        body: &'static str,
    ) {
        self.state().instead.extend((0..times).map(|_| (method.clone(), path, status, body)));
    }

    /// Each call takes so long.
    pub(crate) fn slow(&self, by: Duration) -> &Self {
        self.state().slow = Some(by);
        self
    }

    pub(crate) fn clock(&self) -> impl Fn() -> SystemTime + Send + Sync + 'static {
        let start = self.state().start.unwrap();
        move || SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH) + start.elapsed()
    }

    pub(crate) fn created(&self) -> usize {
        self.state().batches.len()
    }

    pub(crate) fn calls_of(&self, method: &Method, end: &str) -> usize {
        self.state().calls.iter().filter(|(_, of, path)| of == method && path.ends_with(end)).count()
    }

    /// How often each row was done and billed, by its custom id.
    pub(crate) fn billed(&self) -> BTreeMap<String, usize> {
        let state = self.state();
        let mut billed = BTreeMap::new();
        for batch in &state.batches {
            for (at, (id, _)) in batch.rows.iter().enumerate() {
                if batch.is_done(at) {
                    *billed.entry(id.clone()).or_default() += 1;
                }
            }
        }
        billed
    }

    pub(crate) fn service(
        &self,
    ) -> impl tower::Service<
        Request<Full<Bytes>>,
        Response = Response<Full<Bytes>>,
        Error = std::io::Error,
        Future: Send,
    > + Clone
    + Send
    + 'static {
        let provider = self.clone();
        tower::service_fn(move |request: Request<Full<Bytes>>| {
            let provider = provider.clone();
            async move {
                let slow = provider.state().slow;
                if let Some(slow) = slow {
                    tokio::time::sleep(slow / 2).await;
                }
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let answer = provider.state().answer(Request::from_parts(head, body));
                if let Some(slow) = slow {
                    tokio::time::sleep(slow / 2).await;
                }
                answer.ok_or_else(|| std::io::Error::other("connection reset"))
            }
        })
    }
}

impl Batch {
    fn takes(&self) -> Duration {
        self.plan.takes.unwrap_or(Duration::from_secs(60))
    }

    fn is_ended(&self) -> bool {
        if self.cancelled.is_some_and(|at| at.elapsed() >= Duration::from_secs(30)) {
            return true;
        }
        !self.plan.stuck && self.created.elapsed() >= self.takes()
    }

    /// Whether a row was worked on.
    fn is_done(&self, at: usize) -> bool {
        if self.plan.stuck || self.plan.expires.is_some_and(|done| at >= done) {
            return false;
        }
        match self.cancelled {
            Some(cancelled) => cancelled - self.created >= self.takes(),
            None => self.created.elapsed() >= self.takes(),
        }
    }

    fn shown(&self, start: Instant, counts_late: bool) -> Value {
        let date = |at: Instant| {
            let at =
                SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH.saturating_add_signed(self.skew)) + (at - start);
            humantime::format_rfc3339_seconds(at).to_string()
        };
        let rows = self.rows.len();
        let (status, done) = match (self.is_ended(), self.cancelled) {
            (true, _) => ("ended", (0..rows).filter(|at| self.is_done(*at)).count()),
            (false, Some(_)) => ("canceling", 0),
            (false, None) => ("in_progress", 0),
        };
        let left = rows - done;
        let counts = match (status, self.cancelled) {
            ("ended", Some(_)) => {
                json!({"processing": 0, "succeeded": done, "errored": 0, "canceled": left, "expired": 0})
            }
            ("ended", None) => {
                json!({"processing": 0, "succeeded": done, "errored": 0, "canceled": 0, "expired": left})
            }
            _ if counts_late => json!({"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}),
            _ => json!({"processing": rows, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}),
        };
        json!({
            "id": self.id, "type": "message_batch", "processing_status": status, "request_counts": counts,
            "created_at": date(self.created), "expires_at": date(self.created + Duration::from_secs(24 * 3600)),
            "ended_at": null, "archived_at": if self.plan.archived { json!(date(self.created)) } else { Value::Null }, "cancel_initiated_at": null,
            "results_url": if status == "ended" { json!("https://elsewhere.example/results") } else { Value::Null },
        })
    }

    fn results(&mut self, forbidden: &[(&str, &str)]) -> Bytes {
        let mut lines: Vec<_> = (0..self.rows.len())
            .map(|at| {
                let (id, params) = &self.rows[at];
                let result = match (self.is_done(at), self.cancelled) {
                    (true, _) if forbidden.iter().any(|(key, model)| *key == self.key && params["model"] == *model) => {
                        json!({"type": "errored", "error": {"type": "error", "error": {"type": "permission_error", "message": "no access"}}})
                    }
                    (true, _) => result_of(params),
                    (false, Some(_)) => json!({"type": "canceled"}),
                    (false, None) => json!({"type": "expired"}),
                };
                json!({"custom_id": id, "result": result}).to_string() + "\n"
            })
            .collect();
        if self.plan.reversed {
            lines.reverse();
        }
        if self.plan.doubled {
            let error = |kind| json!({"type": "errored", "error": {"type": "error", "error": {"type": kind, "message": "as told"}}});
            let kinds = ["api_error", "invalid_request_error"].into_iter().cycle();
            let failed =
                self.rows.iter().zip(kinds).map(|((id, _), kind)| json!({"custom_id": id, "result": error(kind)}));
            lines.splice(0..0, failed.map(|line| line.to_string() + "\n").collect::<Vec<_>>());
        }
        if self.plan.cut > 0 {
            self.plan.cut -= 1;
            lines.truncate(3);
        }
        let all = lines.concat();
        if self.plan.torn && !self.torn {
            self.torn = true;
            return Bytes::copy_from_slice(&all.as_bytes()[..all.len() * 2 / 3]);
        }
        all.into()
    }
}

/// What a row comes to: its prompt says so.
fn result_of(params: &Value) -> Value {
    let prompt = params["messages"][0]["content"].as_str().unwrap();
    let error = |kind: &str| json!({"type": "errored", "error": {"type": "error", "error": {"type": kind, "message": format!("as told: {prompt}")}}});
    match prompt.split(' ').next().unwrap() {
        "invalid" => error("invalid_request_error"),
        "overloaded" => error("overloaded_error"),
        "failing" => error("api_error"),
        _ => json!({"type": "succeeded", "message": message(prompt)}),
    }
}

pub(crate) fn message(prompt: &str) -> Value {
    json!({
        "id": format!("msg_{prompt}"), "type": "message", "role": "assistant", "model": "claude-haiku-4-5",
        "content": [{"type": "text", "text": format!("answer to {prompt}")}],
        "stop_reason": "end_turn", "usage": {"input_tokens": 5, "output_tokens": 7},
    })
}

fn answer(status: u16, body: &Value) -> Option<Response<Full<Bytes>>> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    Some(response.body(Full::new(Bytes::from(body.to_string()))).unwrap())
}

fn refusal(status: u16, kind: &str) -> Option<Response<Full<Bytes>>> {
    answer(status, &json!({"type": "error", "error": {"type": kind, "message": "as told"}}))
}

impl State {
    pub(crate) fn unarchive(&mut self) {
        self.batches.iter_mut().for_each(|batch| batch.plan.archived = false);
    }

    fn answer(&mut self, request: Request<Bytes>) -> Option<Response<Full<Bytes>>> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let said = self.done(request);
        let is_it = |(of, end, ..): &(Method, &str, u16, &str)| *of == method && path.ends_with(end);
        let Some(at) = self.instead.iter().position(is_it) else { return said };
        let (.., status, body) = self.instead.remove(at).unwrap();
        Some(Response::builder().status(status).body(Full::new(Bytes::from(body))).unwrap())
    }

    fn done(&mut self, request: Request<Bytes>) -> Option<Response<Full<Bytes>>> {
        let (start, counts_late) = (self.start.unwrap(), self.counts_late);
        let forbidden = self.forbidden.clone();
        let key = request.headers()["x-api-key"].to_str().unwrap().to_owned();
        let path = request.uri().path().to_owned();
        let method = request.method().clone();
        self.calls.push((key.clone(), method.clone(), path.clone()));
        if let Some(at) = self.faults.iter().position(|(of, end, _)| of == method && path.ends_with(end)) {
            let (_, _, status) = self.faults.remove(at).unwrap();
            return if status == 0 { None } else { refusal(status, "api_error") };
        }
        if let Some(status) = self.dead.get(&key) {
            return refusal(*status, "authentication_error");
        }
        let parts: Vec<_> = path.trim_start_matches("/v1/messages").trim_start_matches('/').split('/').collect();
        match (&method, &parts[..]) {
            (&Method::POST, ["batches"]) => {
                let plan = self.plans.pop_front().unwrap_or_default();
                if let Some((status, body)) = &plan.refused {
                    return answer(*status, body);
                }
                if plan.swallowed {
                    return None;
                }
                let body: Value = serde_json::from_slice(request.body()).unwrap();
                let rows = body["requests"].as_array().unwrap().iter();
                let rows: Vec<_> =
                    rows.map(|row| (row["custom_id"].as_str().unwrap().to_owned(), row["params"].clone())).collect();
                assert!(!rows.is_empty());
                let is_poison = |(_, params): &(String, Value)| {
                    self.poison.is_some_and(|word| params["messages"][0]["content"].as_str().unwrap().contains(word))
                };
                if rows.iter().any(is_poison) {
                    return refusal(400, "invalid_request_error");
                }
                let id = format!("msgbatch_{}", self.batches.len() + 1);
                let lost = plan.lost;
                let created = Instant::now();
                let batch = Batch {
                    id,
                    key,
                    rows,
                    plan,
                    skew: self.skew,
                    created,
                    cancelled: None,
                    polls: vec![],
                    torn: false,
                };
                let shown = batch.shown(start, counts_late);
                self.batches.push(batch);
                if lost { None } else { answer(200, &shown) }
            }
            (&Method::GET, ["batches"]) => {
                let seen = |batch: &&Batch| batch.key == key && batch.created.elapsed() >= batch.plan.hidden;
                let mut all: Vec<_> = self.batches.iter().filter(seen).collect();
                if !self.lists_oldest_first {
                    all.reverse();
                }
                let query = request.uri().query().unwrap_or_default();
                let after = query.split_once("after_id=").filter(|_| !self.lists_same_page).map(|(_, id)| id);
                let from = after.map_or(0, |id| all.iter().position(|batch| batch.id == id).unwrap() + 1);
                let to = if self.page == 0 { all.len() } else { all.len().min(from + self.page) };
                let data: Vec<_> = all[from..to].iter().map(|batch| batch.shown(start, counts_late)).collect();
                answer(200, &json!({"data": data, "has_more": to < all.len(), "first_id": null, "last_id": null}))
            }
            (_, ["batches", id, rest @ ..]) => {
                let found = self.batches.iter_mut().find(|batch| batch.id == *id && batch.key == key);
                let Some(batch) = found.filter(|batch| batch.created.elapsed() >= batch.plan.hidden) else {
                    return refusal(404, "not_found_error");
                };
                match (&method, rest) {
                    (&Method::GET, []) => {
                        batch.polls.push(Instant::now());
                        answer(200, &batch.shown(start, counts_late))
                    }
                    (&Method::GET, ["results"]) if batch.is_ended() => {
                        let response = Response::builder().header("content-type", "application/x-jsonl");
                        Some(response.body(Full::new(batch.results(&forbidden))).unwrap())
                    }
                    (&Method::POST, ["cancel"]) if !self.uncancelled.is_empty() => {
                        let (status, body) = self.uncancelled.remove(0);
                        Some(Response::builder().status(status).body(Full::new(body.into())).unwrap())
                    }
                    (&Method::POST, ["cancel"]) => {
                        self.cancels += 1;
                        if batch.is_ended() {
                            return refusal(400, "invalid_request_error");
                        }
                        batch.cancelled.get_or_insert_with(Instant::now);
                        answer(200, &batch.shown(start, counts_late))
                    }
                    _ => refusal(404, "not_found_error"),
                }
            }
            (&Method::POST, [""]) => {
                let params: Value = serde_json::from_slice(request.body()).unwrap();
                let result = result_of(&params);
                match result["type"].as_str().unwrap() {
                    "succeeded" => answer(200, &result["message"]),
                    _ => {
                        let kind = result["error"]["error"]["type"].as_str().unwrap();
                        let status = [("invalid_request_error", 400), ("overloaded_error", 529), ("api_error", 500)];
                        let status = status.into_iter().find(|(of, _)| *of == kind).unwrap().1;
                        answer(status, &result["error"])
                    }
                }
            }
            _ => refusal(404, "not_found_error"),
        }
    }
}
