//! No formatting of any public value, in any state, and no line of the log, shows a key.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::{
    collections::BTreeMap,
    error::Error as StdError,
    fmt::{Debug, Display},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use proptest::prelude::*;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};
use tower_quota::{
    aimd::AimdLimitLayer,
    auth::OrgAuthLayer,
    balance::OrgBalanceLayer,
    batch::{BatchService, MemoryBatches, Route, Way},
    drive::{Drive, DriveError},
    guard::{GuardLayer, SystemRole},
    headroom::HeadroomFile,
    health::OrgHealthLayer,
    journal::{FileStore, JournalLayer},
    judge::JudgeLayer,
    observe::Event,
    org::{Credential, Dialect, Family, Org, Orgs},
    outcome::Stamped,
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    sim::{Config, OrgConfig},
    stack::Stack,
};

/// What was formatted, by what it is.
#[derive(Default)]
struct Shown(BTreeMap<String, String>);

impl Shown {
    fn debug(&mut self, what: &str, value: &dyn Debug) {
        self.0.insert(what.to_owned(), format!("{value:?}\n{value:#?}"));
    }

    fn display(&mut self, what: &str, value: &dyn Display) {
        self.0.insert(format!("{what}, for people"), format!("{value}\n{value:#}"));
    }

    /// With all its sources.
    fn error(&mut self, what: &str, error: &(dyn StdError + 'static)) {
        let mut next = Some(error);
        let mut depth = 0;
        while let Some(error) = next {
            self.debug(&format!("{what} {depth}"), &error);
            self.display(&format!("{what} {depth}"), &error);
            next = error.source();
            depth += 1;
        }
    }
}

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

fn ask() -> Request<Full<Bytes>> {
    let body = r#"{"model":"m","max_tokens":8,"messages":[{"role":"user","content":"Hi"}]}"#;
    Request::post("/v1/messages").body(Full::new(Bytes::from_static(body.as_bytes()))).unwrap()
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
    shown.debug("Credential", &org.key());
    shown.debug("header", &org.key().unwrap().header("Bearer "));
    shown.debug("OrgAuthLayer", &OrgAuthLayer::new(org));
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
    shown.debug("member", &lone.get_ref().get_ref());
    if let Ok(service) = ServiceExt::<Request<Full<Bytes>>>::ready(&mut lone).await {
        let call = service.call(ask());
        shown.debug("a member's call", &format_args!("{:?}", std::any::type_name_of_val(&call)));
        match call.await {
            Ok(answer) => {
                shown.debug("an answer", &answer);
                shown.debug("a stamp", &answer.extensions());
                let body = answer.into_body().collect().await.unwrap().to_bytes();
                shown.debug("a body", &String::from_utf8_lossy(&body));
            }
            Err(error) => shown.error("a member's error", &error),
        }
    }
    let balance = OrgBalanceLayer::new(orgs.clone(), member);
    shown.debug("OrgBalanceLayer", &balance);

    let retry = RateLimitRetryLayer::builder().patience(Duration::from_millis(200)).max_attempts(2).build().unwrap();
    let service = stack.retry(retry).build(client).unwrap();
    shown.debug("the stack", &service);
    shown.debug("Members", &service.members());
    let mut drive = Drive::iter(service, (0..2).map(|item| (item, ask())), 2).unwrap();
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
                    shown.debug("the request", &error.into_request().map(|request| request.headers().clone()));
                }
            }
        }
    }
    for org in orgs.iter().chain(&org.families()) {
        shown.debug("Snapshot", &org.snapshot());
        shown.debug("a family", &org.family(&Family::default()));
    }
    for event in events.lock().unwrap().iter() {
        shown.debug("Event", event);
        shown.display("Event", event);
    }
    shown.debug("HeadroomFile", &HeadroomFile::new("headroom.json"));
    in_batches(&mut shown, dialect, key, turn).await;
    shown
}

/// The journal, the route and the batch path, at a provider that quotes the key in whatever it says of batches.
async fn in_batches(shown: &mut Shown, dialect: Dialect, key: &str, turn: usize) {
    let orgs = orgs(dialect, key);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("answers.journal");
    let store = FileStore::open(&file).unwrap();
    shown.debug("FileStore", &store);
    shown.error("OpenError", &FileStore::open(&file).unwrap_err());
    shown.debug("OrgHealthLayer", &OrgHealthLayer::new(orgs.get("a").unwrap()));
    shown.debug("GuardLayer", &GuardLayer::new(SystemRole));
    let builder = BatchService::builder(orgs.clone(), MemoryBatches::new()).timeout(Duration::from_secs(5));
    shown.debug("BatchBuilder", &builder);
    let batch = builder.open(echoing(dialect, turn)).await.unwrap();
    let handle = batch.handle();
    shown.debug("BatchService", &batch);
    let retry = RateLimitRetryLayer::builder().patience(Duration::from_millis(200)).max_attempts(2).build().unwrap();
    let stack = Stack::new(orgs).timeout(Duration::from_millis(100)).retry(retry);
    let route = Route::new(stack.build(echoing(dialect, turn)).unwrap(), batch, Way::Batch);
    let service = JournalLayer::new(store).layer(route);
    shown.debug("Journal", &service);
    let mut call = Box::pin(service.oneshot(ask()));
    // Some are tried for ever: what is shown meanwhile.
    for minutes in 0..3 {
        match tokio::time::timeout(Duration::from_secs(60), &mut call).await {
            Ok(Ok(answer)) => {
                shown.debug("an answer of the route", &answer);
                break;
            }
            Ok(Err(error)) => {
                shown.error("an error of the route", &error);
                break;
            }
            Err(_) => shown.debug(&format!("BatchSnapshot after {minutes} minutes"), &handle.snapshot()),
        }
    }
    drop(call);
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

fn no_key_shows(dialect: Dialect, key: &str, turn: usize) -> Result<(), TestCaseError> {
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
    prop_assert!(!shown.0.is_empty());
    for (what, text) in shown.0.iter().map(|(what, text)| (what.as_str(), text)).chain([("the log", &logged)]) {
        for spelling in &spellings {
            prop_assert!(!text.contains(spelling.as_str()), "{what} shows the key {key:?}:\n{text}");
        }
    }
    Ok(())
}

#[test]
fn what_a_key_looks_like_makes_no_difference() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        for key in ["sk-ant-api03-abcdefgh", "sk-proj-0123456789", "plain-old-key", "with\"quotes\"and\\in-it"] {
            for turn in 0..11 {
                no_key_shows(dialect, key, turn).unwrap();
            }
        }
    }
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
        no_key_shows(if openai { Dialect::OpenAi } else { Dialect::Anthropic }, &key, turn)?;
    }
}
