//! No formatting of any public value, in any state, and no line of the log, shows a key.
//!
//! Which types there are, `docs/public-api.txt` says: each is shown below, or stands in the list of those that can hold no key.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

#[path = "secrets/plain.rs"]
mod plain;
#[path = "secrets/shown.rs"]
mod shown;

use std::{
    collections::BTreeSet,
    error::Error as StdError,
    fmt::Display,
    future::{Ready, ready},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use proptest::prelude::*;
use shown::Shown;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};
use tower_quota::{
    aimd::AimdLimitLayer,
    auth::OrgAuthLayer,
    balance::OrgBalanceLayer,
    batch::{
        BatchChange, BatchRows, BatchService, BatchStore, Batched, MemoryBatches, Route, RouteError, Token, Way, api_of,
    },
    call::CallMemory,
    drive::{Drive, DriveError},
    guard::{GuardLayer, SystemRole},
    headroom::HeadroomFile,
    health::OrgHealthLayer,
    journal::{FileStore, JournalError, JournalLayer, Key, Store, StoreError, Unkept},
    judge::JudgeLayer,
    observe::Event,
    org::{Credential, Dialect, Family, Org, Orgs, Tuning},
    outcome::{BoxError, Stamp, Stamped},
    quota::QuotaHeaderLayer,
    retry::{RateLimitRetryLayer, RetryError},
    sim::{BatchConfig, Config, OrgConfig, Sim},
    stack::Stack,
};

/// A client's own error that quotes what it was to send.
#[derive(Debug)]
struct Quotes(String);

impl Display for Quotes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "could not send {}", self.0)
    }
}

impl StdError for Quotes {}

/// A provider that says the key it was sent wherever it can.
fn echoing(dialect: Dialect, turn: usize) -> BoxCloneService<Request<Full<Bytes>>, Response<Full<Bytes>>, Quotes> {
    BoxCloneService::new(service_fn(move |request: Request<Full<Bytes>>| async move {
        let header = match dialect {
            Dialect::OpenAi => "authorization",
            _ => "x-api-key",
        };
        let key = request.headers().get(header).map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned());
        let key = key.unwrap_or_default().replace("Bearer ", "");
        let statuses = [200, 400, 401, 402, 403, 413, 429, 500, 529, 0, 1];
        let status = statuses[turn % statuses.len()];
        if status == 0 {
            return Err(Quotes(key));
        }
        if status == 1 {
            std::future::pending::<()>().await;
        }
        let text = serde_json::Value::from(format!("Incorrect API key provided: {key}. Bearer {key}"));
        let body = match status {
            200 => format!(r#"{{"type":"error","error":{{"type":"overloaded_error","message":{text}}}}}"#),
            _ => format!(r#"{{"error":{{"type":"invalid_request_error","code":"x","message":{text}}}}}"#),
        };
        Ok(Response::builder()
            .status(status)
            .header("retry-after-ms", "20")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .unwrap())
    }))
}

fn ask(dialect: Dialect) -> Request<Full<Bytes>> {
    let path = match dialect {
        Dialect::OpenAi => "/v1/chat/completions",
        _ => "/v1/messages",
    };
    let body = r#"{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"Hi"}]}"#;
    Request::post(path).body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
}

fn orgs(dialect: Dialect, key: &str) -> Orgs {
    let org = Org::new("a").credential(Credential::new(key)).dialect(dialect);
    Orgs::new([org.base_url(Uri::from_static("http://provider.test"))]).unwrap()
}

/// Everything there is to show, in whatever state this answer brings it to.
async fn shown(dialect: Dialect, key: &str, turn: usize) -> Shown {
    let mut shown = Shown::default();
    let orgs = orgs(dialect, key);
    let org = orgs.get("a").unwrap();
    let events = Arc::new(Mutex::new(vec![]));
    let tell = events.clone();
    org.observe(move |event: &Event| tell.lock().unwrap().push(event.clone()));

    shown.debug("Orgs", &orgs);
    shown.debug("Org", org);
    shown.debug("Credential", org.key().unwrap());
    shown.debug("header", &org.key().unwrap().header("Bearer "));
    shown.debug("OrgAuthLayer", &OrgAuthLayer::new(org).unwrap());
    shown.debug("JudgeLayer", &JudgeLayer::new().scrub(org));
    shown.debug("QuotaHeaderLayer", &QuotaHeaderLayer::new(org));
    shown.debug("AimdLimitLayer", &AimdLimitLayer::new(org));
    shown.debug("RateLimitRetryLayer", &RateLimitRetryLayer::new());
    shown.debug("Config", &Config::new(dialect).org(OrgConfig::new("a", key)));
    let stack = Stack::new(orgs.clone()).timeout(Duration::from_millis(100));
    shown.debug("Stack", &stack);

    // Each layer alone, before, during and after a call.
    let client = echoing(dialect, turn);
    let member = move |org: &Org, client| {
        let judged = JudgeLayer::new()
            .scrub(org)
            .timeout(Duration::from_millis(50))
            .layer(OrgAuthLayer::new(org).unwrap().layer(client));
        AimdLimitLayer::new(org).classify(Stamped).layer(QuotaHeaderLayer::new(org).layer(judged))
    };
    let mut lone = member(org, client.clone());
    shown.debug("AimdLimit", &lone);
    shown.debug("QuotaHeader", lone.get_ref());
    shown.debug("JudgeService", lone.get_ref().get_ref());
    shown.debug("OrgAuth", lone.get_ref().get_ref().get_ref());
    if let Ok(service) = ServiceExt::<Request<Full<Bytes>>>::ready(&mut lone).await {
        let call = service.call(ask(dialect));
        shown.debug("AimdFuture", &call);
        match call.await {
            Ok(answer) => {
                shown.debug("an answer", &answer);
                shown.debug("a stamp", &answer.extensions());
                shown.debug("Held", answer.body());
                shown.debug("Answer", answer.body().get_ref());
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                shown.debug("a body", &String::from_utf8_lossy(&body));
            }
            Err(error) => shown.error("a member's error", &error),
        }
    }
    alone(&mut shown, org, dialect, turn).await;
    let balance = OrgBalanceLayer::new(self::orgs(dialect, key), member);
    shown.debug("OrgBalanceLayer", &balance);
    let mut balance = balance.layer(client.clone());
    shown.debug("OrgBalance", &balance);
    let members = balance.members();
    shown.error("MemberError", &members.disable("nobody").unwrap_err());
    let call = balance.ready().await.unwrap().call(ask(dialect));
    shown.debug("BalanceFuture", &call);
    match call.await {
        Ok(answer) => {
            let stamp = answer.extensions().get::<Stamp>().unwrap();
            shown.debug("Stamp", stamp);
            shown.debug("Outcome", &stamp.outcome);
        }
        Err(error) => shown.error("an error of the balancer", &error),
    }
    shown.debug("Drained", &members.drain("a").unwrap());
    members.remove("a").unwrap();
    shown.error("NoOrgLeft", &balance.oneshot(ask(dialect)).await.unwrap_err());
    let retry = RateLimitRetryLayer::builder().patience(Duration::from_millis(200)).max_attempts(2).build().unwrap();
    let service = stack.retry(retry).build(client).unwrap();
    shown.debug("the stack", &service);
    shown.debug("Members", &service.members());
    let mut drive = Drive::iter(service, (0..2).map(|item| (item, ask(dialect))), 2).unwrap();
    shown.debug("Drive", &drive);
    while let Some((_, result)) = drive.next().await {
        match result {
            Ok(answer) => {
                shown.debug("an answer of the stack", &answer);
                shown.debug("its stamp", &answer.extensions().get::<tower_quota::outcome::Stamp>());
            }
            Err(error) => {
                shown.debug("an error of the stack", &error);
                shown.error("an error of the stack", &error);
                if let DriveError::Service(error) = error {
                    if let RetryError::Exhausted(exhausted) = &error {
                        exhausted.tried.iter().for_each(|tried| shown.debug("Tried", tried));
                    }
                    shown.debug("the request", &error.into_request().map(|request| request.headers().clone()));
                }
            }
        }
    }
    orgs.iter().chain(&org.families()).for_each(|org| board(&mut shown, org));
    for event in events.lock().unwrap().iter() {
        shown.debug("Event", event);
        shown.display("Event", event);
        match event {
            Event::Out { reason, .. } => {
                shown.debug("OutReason", reason);
                shown.display("OutReason", reason);
            }
            Event::Held { hold, .. } => {
                shown.debug("Hold", hold);
                shown.debug("HoldReason", &hold.reason);
            }
            Event::Limit { change, .. } => shown.debug("org::Change", change),
            Event::Circuit { circuit, .. } => shown.debug("Circuit", circuit),
            _ => {}
        }
    }
    simulated(&mut shown, dialect, key).await;
    misused(&mut shown, dialect, key);
    in_batches(&mut shown, dialect, key, turn).await;
    shown
}

/// A store that finds nothing, and can keep nothing.
#[derive(Clone, Debug, Default)]
struct Failing {
    at_once: bool,
}

impl Store for Failing {
    type Get = Ready<Result<Option<Bytes>, BoxError>>;
    type Put = Ready<Result<(), BoxError>>;

    fn get(&self, _: &Key) -> Self::Get {
        ready(Ok(None))
    }

    fn put(&self, _: Key, _: Bytes) -> Self::Put {
        ready(Err("no room".into()))
    }

    fn broken(&self) -> Option<StoreError> {
        self.at_once.then(|| StoreError::new("no room"))
    }
}

/// What the board says of an org.
fn board(shown: &mut Shown, org: &Org) {
    let seen = org.snapshot();
    shown.debug("Snapshot", &seen);
    shown.debug("Circuit", &seen.circuit);
    seen.quota.iter().for_each(|quota| shown.debug("ResourceQuota", quota));
    seen.limit.iter().for_each(|limit| shown.debug("LimitCell", limit));
    seen.history.iter().for_each(|change| shown.debug("org::Change", change));
    if let Some(error) = seen.out {
        shown.debug("OutReason", &error);
    }
    shown.debug("a family", &org.family(&Family::default()));
}

/// The layers that a member need not have, each around a provider that quotes; and what a caller holds while a call is on its way.
async fn alone(shown: &mut Shown, org: &Org, dialect: Dialect, turn: usize) {
    let client = || {
        let judged = JudgeLayer::new().scrub(org).timeout(Duration::from_millis(50));
        judged.layer(OrgAuthLayer::new(org).unwrap().layer(echoing(dialect, turn)))
    };
    shown.debug("JudgeFuture", &client().ready().await.unwrap().call(ask(dialect)));
    let health = OrgHealthLayer::new(org).classify(Stamped);
    shown.debug("OrgHealthLayer", &health);
    let mut health = health.layer(client());
    shown.debug("OrgHealth", &health);
    let call = ServiceExt::<Request<Full<Bytes>>>::ready(&mut health).await.unwrap().call(ask(dialect));
    shown.debug("HealthFuture", &call);
    if let Err(error) = call.await {
        shown.error("an error of the provider", &error);
    }
    let guard = GuardLayer::new(SystemRole);
    shown.debug("GuardLayer", &guard);
    let mut guard = guard.layer(client());
    shown.debug("Guard", &guard);
    let call = guard.ready().await.unwrap().call(ask(dialect));
    shown.debug("GuardFuture", &call);
    drop(call);
    let mut quota = QuotaHeaderLayer::new(org).layer(client());
    if let Ok(quota) = ServiceExt::<Request<Full<Bytes>>>::ready(&mut quota).await {
        let call = quota.call(ask(dialect));
        shown.debug("QuotaFuture", &call);
        drop(call);
    }
    let retry = RateLimitRetryLayer::builder().max_attempts(2).patience(Duration::from_millis(200));
    shown.debug("RateLimitRetryBuilder", &retry);
    let mut retry = retry.build().unwrap().layer(client());
    shown.debug("RateLimitRetry", &retry);
    let memory = CallMemory::new();
    let mut request = ask(dialect);
    request.extensions_mut().insert(memory.clone());
    let mut call = Box::pin(retry.ready().await.unwrap().call(request));
    shown.debug("RetryFuture, new", &*call);
    let early = tokio::time::timeout(Duration::from_millis(20), &mut call).await;
    shown.debug("RetryFuture", &*call);
    shown.debug("CallMemory", &memory);
    if early.is_err() {
        match call.await {
            Ok(_) => {}
            Err(error) => {
                if let RetryError::Exhausted(exhausted) = &error {
                    shown.debug("Cause", &exhausted.last);
                    shown.display("Cause", &exhausted.last);
                    shown.error("Exhausted", &**exhausted);
                }
                shown.error("an error of the retry", &error);
            }
        }
    }
}

/// What the provider says, were it ours.
async fn simulated(shown: &mut Shown, dialect: Dialect, key: &str) {
    let config = Config::new(dialect)
        .org(OrgConfig::new("a", key).requests_per_minute(6_000.0).batch(BatchConfig::new()).reset(0.5));
    shown.debug("sim::OrgConfig", &config.orgs[0]);
    shown.debug("sim::Key", &config.orgs[0].key);
    let twice = config.clone().org(OrgConfig::new("b", key));
    shown.error("sim::ConfigError", &Sim::new(twice).unwrap_err());
    let sim = Sim::new(config).unwrap();
    let service = sim.service();
    let mut request = ask(dialect);
    let auth = OrgAuthLayer::new(&Org::new("a").credential(Credential::new(key)).dialect(dialect)).unwrap();
    shown.debug("SimService", &service);
    for _ in 0..6 {
        *request.headers_mut() = http::HeaderMap::new();
        match auth.layer(service.clone()).oneshot(ask(dialect)).await {
            Ok(answer) => shown.debug("SimBody", answer.body()),
            Err(error) => shown.error("SimError", &error),
        }
    }
    let orgs = orgs(dialect, key);
    let retry = RateLimitRetryLayer::builder().max_attempts(20).build().unwrap();
    let stack = Stack::new(orgs.clone()).retry(retry).build(service.clone()).unwrap();
    for _ in 0..5 {
        stack.clone().oneshot(ask(dialect)).await.unwrap();
    }
    let org = orgs.get("a").unwrap();
    org.retune(Tuning::new().cap(5)).unwrap();
    orgs.iter().chain(&org.families()).for_each(|org| board(shown, org));
    headroom(shown, &orgs, key);
    let mut direct = service.clone();
    shown.debug("SimFuture", &direct.call(request));
    shown.debug("Sim", &sim);
    shown.debug("Server", &sim.serve().await.unwrap());
    shown.debug("Truth", &sim.truth());
    shown.debug("OrgTruth", &sim.truth().orgs[0]);
    let batch = BatchService::builder(orgs, MemoryBatches::new()).linger(Duration::from_millis(10));
    let batch: BatchService = batch.open::<_, Full<Bytes>, _, _>(sim.service()).await.unwrap();
    let handle = batch.handle();
    let answer = batch.oneshot(ask(dialect)).await.unwrap();
    shown.debug("Batched", answer.extensions().get::<Batched>().unwrap());
    shown.debug("RemoteBatch", &answer.extensions().get::<Batched>().unwrap().0);
    shown.display("RemoteBatch", &answer.extensions().get::<Batched>().unwrap().0);
    shown.debug("BatchBody", answer.body());
    shown.debug("BatchSeen", &sim.batches()[0]);
    shown.debug("Shutdown", &handle.shutdown().await);
}

/// What is told to other processes.
fn headroom(shown: &mut Shown, orgs: &Orgs, key: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("headroom.json");
    let file = HeadroomFile::new(&path);
    shown.debug("HeadroomFile", &file);
    for org in orgs.iter().chain(&orgs.get("a").unwrap().families()) {
        file.offer([org]).unwrap();
    }
    shown.debug("the file of the headroom", &std::fs::read_to_string(&path).unwrap());
    let headroom = tower_quota::headroom::read(&path).unwrap().unwrap();
    shown.debug("Headroom", &headroom);
    headroom.rows.iter().for_each(|row| shown.debug("headroom::Row", row));
    std::fs::write(&path, key).unwrap();
    shown.error("HeadroomError", &tower_quota::headroom::read(&path).unwrap_err());
}

/// What a caller may do wrong with a key at hand.
fn misused(shown: &mut Shown, dialect: Dialect, key: &str) {
    let org = |name: &str, key: &str| Org::new(name).credential(Credential::new(key)).dialect(dialect);
    shown.error("two orgs of one name", &Orgs::new([org("a", key), org("a", key)]).unwrap_err());
    for wrong in [format!("{key}\n"), format!("{key}\u{e9}"), format!(" {key}"), String::new()] {
        if let Err(error) =
            Orgs::new([org("a", &wrong)]).map(|orgs| orgs.iter().map(OrgAuthLayer::new).collect::<Result<Vec<_>, _>>())
        {
            shown.error(&format!("a key of the form {:?}", wrong.replace(key, "K")), &error);
        }
    }
    let quoted = toml::Value::from(key);
    for (wrong, text) in [
        ("a number", format!("[[org]]\nname = \"a\"\nkey = {quoted}\ncap = \"x\"\n")),
        ("a field", format!("[[org]]\nname = \"a\"\nkeys = {quoted}\n")),
        ("the end", format!("[[org]]\nname = \"a\"\nkey = {quoted} {quoted}\n")),
        ("a place", format!("key = {quoted}\n[[org]]\nname = \"a\"\n")),
    ] {
        shown.error(&format!("a file with {wrong} that is wrong"), &Orgs::from_toml(&text).unwrap_err());
    }
    let mut request = ask(dialect);
    request.headers_mut().insert("x-api-key", Credential::new(key).header("").unwrap());
    request.headers_mut().insert("authorization", Credential::new(key).header("Bearer ").unwrap());
    let row = api_of(dialect).row("row", &request.map(|_| Bytes::from_static(b"{\"model\":\"m\"}")));
    if let Ok(row) = &row {
        shown.debug("batch::Row", row);
        shown.debug("Group", &row.group);
        shown.display("Group", &row.group);
    }
    let get = Request::get("/v1/messages").body(Bytes::new()).unwrap();
    shown.error("RowError", &api_of(dialect).row("row", &get).unwrap_err());
}

/// The journal, the route and the batch path, at a provider that quotes the key in whatever it says of batches.
async fn in_batches(shown: &mut Shown, dialect: Dialect, key: &str, turn: usize) {
    let orgs = orgs(dialect, key);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.journal");
    let store = FileStore::open(&file).unwrap();
    shown.debug("FileStore", &store);
    shown.error("OpenError", &FileStore::open(&file).unwrap_err());
    let broken = folder.path().join("broken.journal");
    std::fs::write(&broken, key.repeat(200)).unwrap();
    shown.error("OpenError of what is no journal", &FileStore::open(&broken).unwrap_err());
    shown.debug("FileStoreBuilder", &FileStore::builder(&broken));
    shown.debug("FilePut", &store.put(Key::from_bytes([1; 32]), Bytes::from(key.to_owned())));
    shown.debug("FileAsk", &BatchStore::load(&store));
    let change = BatchChange::new(Token::from_bytes([1; 16]), Some(Bytes::from(key.to_owned())), BatchRows::Keep);
    shown.debug("BatchChange", &change);
    let kept = MemoryBatches::new();
    BatchStore::write(&kept, change).await.unwrap();
    shown.debug("MemoryBatches", &kept);
    let builder = BatchService::builder(orgs.clone(), MemoryBatches::new()).chunk_rows(0);
    let opened = builder.open::<_, Full<Bytes>, _, Full<Bytes>>(echoing(dialect, turn)).await;
    shown.error("BatchOpenError", &opened.unwrap_err());
    let org = orgs.get("a").unwrap();
    let client = JudgeLayer::new().scrub(org).timeout(Duration::from_secs(1));
    let client = client.layer(OrgAuthLayer::new(org).unwrap().layer(echoing(dialect, turn)));
    if let Ok(answer) = client.oneshot(ask(dialect)).await {
        let (head, body) = answer.into_parts();
        let answer = Response::from_parts(head, body.collect().await.unwrap().to_bytes());
        shown.error("ApiError", &api_of(dialect).created(&answer).unwrap_err());
    }
    let builder = BatchService::builder(orgs.clone(), MemoryBatches::new()).timeout(Duration::from_secs(5));
    shown.debug("BatchBuilder", &builder);
    let batch = builder.open(echoing(dialect, turn)).await.unwrap();
    let handle = batch.handle();
    shown.debug("BatchService", &batch);
    shown.debug("MoreToCome", &handle.expect_more());
    let retry = RateLimitRetryLayer::builder().patience(Duration::from_millis(200)).max_attempts(2).build().unwrap();
    let stack = Stack::new(orgs).timeout(Duration::from_millis(100)).retry(retry);
    let route = Route::new(stack.build(echoing(dialect, turn)).unwrap(), batch, Way::Batch);
    shown.debug("Route", &route);
    let mut other = route.clone();
    shown.debug("RouteFuture", &other.call(ask(dialect)));
    let mut batched = route.batch().clone();
    shown.debug("BatchFuture", &batched.call(ask(dialect)));
    let layer = JournalLayer::new(store);
    shown.debug("JournalLayer", &layer);
    shown.debug("JournalBuilder", &JournalLayer::builder(Failing::default()));
    let mut service = layer.layer(route);
    shown.debug("Journal", &service);
    let mut call = Box::pin(service.call(ask(dialect)));
    shown.debug("JournalFuture", &*call);
    // Some are tried for ever: what is shown meanwhile.
    for minutes in 0..3 {
        match tokio::time::timeout(Duration::from_secs(60), &mut call).await {
            Ok(Ok(answer)) => {
                shown.debug("an answer of the route", &answer);
                shown.debug("JournalBody", answer.body());
                break;
            }
            Ok(Err(error)) => {
                if let JournalError::Inner(route) = &error {
                    shown.error("RouteError", route);
                    if let RouteError::Batch(error) = route {
                        shown.error("BatchError", error);
                        shown.error("BatchFailure", error.failure());
                    }
                }
                shown.error("an error of the route", &error);
                break;
            }
            Err(_) => shown.debug(&format!("BatchSnapshot after {minutes} minutes"), &handle.snapshot()),
        }
    }
    drop(call);
    for at_once in [false, true] {
        let sound = service_fn(|_: Request<Full<Bytes>>| async {
            Ok::<_, Quotes>(Response::new(Full::new(Bytes::from_static(b"{}"))))
        });
        match JournalLayer::new(Failing { at_once }).layer(sound).oneshot(ask(dialect)).await {
            Ok(answer) => {
                let unkept = answer.extensions().get::<Unkept>().unwrap();
                shown.debug("Unkept", unkept);
                shown.error("StoreError", &unkept.0);
            }
            Err(error) => shown.error("JournalError", &error),
        }
    }
    let snapshot = handle.snapshot();
    for org in &snapshot.orgs {
        shown.debug("OrgBatches", org);
        org.batches.iter().for_each(|batch| shown.debug("BatchView", batch));
    }
    shown.debug("BatchHandle", &handle);
    shown.debug("BatchSnapshot", &handle.snapshot());
    shown.debug("Shutdown", &tokio::time::timeout(Duration::from_secs(600), handle.shutdown()).await);
    let bytes = std::fs::read(&file).unwrap();
    shown.debug("the journal's file", &String::from_utf8_lossy(&bytes));
}

/// Collects what is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The types that were shown.
fn no_key_shows(dialect: Dialect, key: &str, turn: usize) -> Result<BTreeSet<String>, TestCaseError> {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .without_time()
        .finish();
    let shown = tracing::subscriber::with_default(subscriber, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(shown(dialect, key, turn))
    });
    // A key may be quoted in the way of JSON, or of Debug.
    let quoted = serde_json::Value::from(key).to_string();
    let spellings = [key.to_owned(), quoted.trim_matches('"').to_owned(), key.escape_debug().to_string()];
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    for (what, text) in shown.texts.iter().map(|(what, text)| (what.as_str(), text)).chain([("the log", &logged)]) {
        for spelling in &spellings {
            prop_assert!(!text.contains(spelling.as_str()), "{what} shows the key {key:?}:\n{text}");
        }
    }
    Ok(shown.types)
}

/// The public types that have `Debug` or `Display`, as `module::Type`.
fn public_types() -> BTreeSet<String> {
    let api = include_str!("../docs/public-api.txt");
    let lines = api.lines().filter_map(|line| {
        line.split_once("core::fmt::Debug for ").or_else(|| line.split_once("core::fmt::Display for "))
    });
    lines.filter_map(|(_, name)| shown::public_name(name)).collect()
}

#[test]
fn what_a_key_looks_like_makes_no_difference_and_every_public_type_is_shown_or_can_hold_none() {
    let mut seen = BTreeSet::new();
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        for key in ["sk-ant-api03-abcdefgh", "sk-proj-0123456789", "plain-old-key", "with\"quotes\"and\\in-it"] {
            for turn in 0..11 {
                seen.extend(no_key_shows(dialect, key, turn).unwrap());
            }
        }
    }
    let public = public_types();
    assert!(public.len() > 150, "{}", public.len());
    let plain: Vec<_> = [plain::OF_OURS, plain::OF_THE_CALLER, plain::OF_SCRUBBED_WORDS].concat();
    let plain: BTreeSet<_> = plain.into_iter().map(str::to_owned).collect();
    let missing: Vec<_> = public.iter().filter(|name| !seen.contains(*name) && !plain.contains(*name)).collect();
    assert!(missing.is_empty(), "shown nowhere: {missing:#?}");
    let gone: Vec<_> = plain.difference(&public).collect();
    assert!(gone.is_empty(), "no longer public: {gone:#?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_key_shows_whatever_it_is_and_whatever_is_answered(
        // As a header may carry it, and long enough not to be found by chance.
        key in "[!-~]{12,40}",
        turn in 0usize..11,
        openai: bool,
    ) {
        no_key_shows(if openai { Dialect::OpenAi } else { Dialect::Anthropic }, &key, turn).map(drop)?;
    }
}
