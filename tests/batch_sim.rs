//! Batches against the simulated provider, of both dialects, in virtual time: what goes wrong is mixed, and its own count is believed.

#![cfg(all(feature = "batch", feature = "sim"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/waste.rs"]
mod waste;

use std::{
    cell::Cell,
    future::{Ready, ready},
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use serde_json::json;
use tower::{Service, ServiceExt};
use tower_quota::{
    aimd::Held,
    batch::{
        ApiError, BatchApi, BatchBuilder, BatchChange, BatchFailure, BatchService, BatchStore, Bounds, Group, Match,
        MemoryBatches, OpenAi, Page, Remote, Route, RouteError, Row, RowError, RowResult, Submission, Token, Way,
    },
    drive::{Drive, DriveError},
    journal::FileStore,
    judge::Answer,
    org::{Credential, Dialect, Org, Orgs},
    outcome::{BoxError, Class, Error, Stamp},
    retry::{RateLimitRetryLayer, RetryError},
    sim::{BatchConfig, Config, Latency, OrgConfig, Sim, SimBody, SimError},
    stack::Stack,
};

type Body = Full<Bytes>;
type AnswerBody = Held<Answer<SimBody>>;

const WALL: u64 = 1_800_000_000;

fn sim(dialect: Dialect, batch: BatchConfig) -> Sim {
    sim_of(dialect, 7, batch)
}

fn sim_of(dialect: Dialect, seed: u64, batch: BatchConfig) -> Sim {
    let config = Config::new(dialect)
        .seed(seed)
        .latency(Latency::new(300.0, 0.3))
        .wall_start_s(WALL)
        .lengths_by_item(true)
        .batch(batch)
        .org(OrgConfig::new("a", "sk-a"))
        .org(OrgConfig::new("b", "sk-b"));
    let sim = Sim::new(config).unwrap();
    sim.start();
    sim
}

fn orgs(dialect: Dialect) -> Orgs {
    let of = |name: &str| Org::new(name).credential(Credential::new(&format!("sk-{name}"))).dialect(dialect);
    Orgs::new(["a", "b"].map(of)).unwrap()
}

fn client(
    sim: &Sim,
) -> impl Service<Request<Body>, Response = Response<SimBody>, Error = SimError, Future: Send> + Clone + Send + Sync + 'static
{
    let sim = sim.clone();
    tower::service_fn(move |request: Request<Body>| sim.service().oneshot(request))
}

fn builder(sim: &Sim, store: impl BatchStore) -> BatchBuilder {
    let clock = sim.clone();
    let now = move || SystemTime::UNIX_EPOCH + Duration::from_secs(WALL) + clock.elapsed();
    BatchService::builder(orgs(sim.config().dialect), store).clock(now)
}

fn ask(dialect: Dialect, row: usize, word: Option<&str>) -> Request<Body> {
    let (path, model) = match dialect {
        Dialect::Anthropic => ("/v1/messages", "claude-haiku-4-5"),
        _ => ("/v1/chat/completions", "gpt-4o-mini"),
    };
    let mut body =
        json!({"model": model, "max_tokens": 99, "messages": [{"role": "user", "content": format!("item {row}")}]});
    if let Some(word) = word {
        body["metadata"] = json!({"simulate": word});
    }
    Request::post(path).body(Full::new(Bytes::from(body.to_string()))).unwrap()
}

type Ended = Result<Response<AnswerBody>, DriveError<RouteError<RetryError<Request<Body>, Error>, Request<Body>>>>;

/// The reply to its submission was lost, and what may be its batch is stuck: it is to be asked for again.
fn is_in_doubt(failure: &BatchFailure) -> bool {
    matches!(failure, BatchFailure::Unlisted { .. })
}

/// What a request came to, without what differs between two calls.
fn end(end: Ended) -> String {
    match end {
        Ok(answer) => {
            let stamp = answer.extensions().get::<Stamp>().unwrap();
            let mut body: serde_json::Value = serde_json::from_slice(answer.body().get_ref().bytes().unwrap()).unwrap();
            for id in ["id", "request_id", "created"] {
                body.as_object_mut().unwrap().remove(id);
            }
            format!("{} {:?} {:?} {body}", answer.status(), stamp.outcome.class, stamp.usage)
        }
        Err(DriveError::Service(error)) => {
            eprintln!("{error}");
            match error {
                RouteError::Direct(error) => format!("error {:?}", error.class().unwrap()),
                RouteError::Batch(error) => format!("error {:?}", error.class()),
                error => panic!("{error}"),
            }
        }
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(start_paused = true)]
async fn every_row_has_one_answer_and_is_billed_once_whatever_goes_wrong_with_batches() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let batch = BatchConfig::new()
            .stuck(0.1)
            .expired(0.15)
            .expires_after_s(6.0 * 3_600.0)
            .all_error(0.05)
            .row_api_error(0.03)
            .row_overloaded(0.03)
            .not_found_after_create_s(20.0)
            .not_listed_after_create_s(30.0)
            .lost_reply(0.1)
            // Three in a row would be a batch that is gone.
            .not_found(0.003);
        let sim = sim(dialect, batch);
        let service: BatchService<AnswerBody> =
            builder(&sim, MemoryBatches::new()).chunk_rows(100).open(client(&sim)).await.unwrap();
        let direct = Stack::new(orgs(dialect)).build(client(&sim)).unwrap();
        let route = Route::new(direct, service.clone(), Way::Batch);
        let bound = service.live_bound();
        let mut seen = vec![0; 4_000];
        let mut left: Vec<_> = (0..4_000).collect();
        while !left.is_empty() {
            let asked = left.clone().into_iter().map(|row| (row, ask(dialect, row, None)));
            let mut drive = Drive::iter(route.clone(), asked, bound).unwrap();
            left.clear();
            while let Some((row, result)) = drive.next().await {
                if matches!(&result, Err(DriveError::Service(RouteError::Batch(error))) if is_in_doubt(error.failure()))
                {
                    left.push(row);
                    continue;
                }
                let said = end(result);
                assert!(said.starts_with("200 OK Ok"), "row {row}: {said}");
                seen[row] += 1;
            }
            assert!(left.is_empty() || dialect == Dialect::Anthropic && left.len() <= 400, "{}", left.len());
            tokio::time::sleep(Duration::from_secs(3_600)).await;
        }
        assert!(seen.iter().all(|times| *times == 1));
        let (truth, batch) = (sim.truth(), sim.truth().batch());
        assert_eq!((truth.answered_once, truth.answered_more, truth.rows.billed_more), (4_000, 0, 0), "{batch:?}");
        assert_eq!((batch.rows_again_while_open, batch.rows_again_after_billed), (0, 0));
        assert!(batch.lost_replies > 0 && batch.expired > 0 && batch.cancelled > 0 && batch.hidden > 0, "{batch:?}");
        assert!(truth.rows.billed_once < 4_000, "some went directly");
        let now = service.handle().snapshot();
        assert_eq!((now.gathered, now.queued, now.in_batches), (0, 0, 0));
        assert!(now.orgs.iter().all(|org| org.batches.is_empty() && org.out.is_none()));
        eprintln!("{dialect:?}: {} batches for 4,000 rows, {} s, {batch:?}", batch.created, sim.elapsed().as_secs());
    }
}

#[tokio::test(start_paused = true)]
async fn as_many_batches_are_submitted_as_are_needed() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let batch = BatchConfig::new().not_found_after_create_s(20.0).not_listed_after_create_s(30.0).lost_reply(0.3);
        let sim = sim(dialect, batch);
        let service: BatchService<AnswerBody> =
            builder(&sim, MemoryBatches::new()).chunk_rows(100).open(client(&sim)).await.unwrap();
        let mut drive =
            Drive::iter(service.clone(), (0..3_000).map(|row| (row, ask(dialect, row, None))), service.live_bound())
                .unwrap();
        let mut answered = 0;
        while let Some((_, result)) = drive.next().await {
            answered += usize::from(result.unwrap().status().is_success());
        }
        let batch = sim.truth().batch();
        assert_eq!((answered, batch.created, batch.rows_succeeded), (3_000, 30, 3_000));
        assert!(batch.lost_replies > 3 && batch.peak_open <= 4);
    }
}

#[tokio::test(start_paused = true)]
async fn rows_that_cannot_be_uploaded_go_directly_after_a_while() {
    let sim = sim(Dialect::OpenAi, BatchConfig::new());
    let inner = client(&sim);
    let broken = tower::service_fn(move |request: Request<Body>| {
        let inner = inner.clone();
        async move {
            if request.uri().path().ends_with("/files") {
                return Err(BoxError::from("the connection is reset"));
            }
            inner.oneshot(request).await.map_err(BoxError::from)
        }
    });
    let builder = builder(&sim, MemoryBatches::new()).chunk_rows(50).stuck_after(Some(Duration::from_secs(600)));
    let service: BatchService<AnswerBody> = builder.open(broken).await.unwrap();
    let bound = service.live_bound();
    let route = Route::new(Stack::new(orgs(Dialect::OpenAi)).build(client(&sim)).unwrap(), service, Way::Batch);
    let asked = (0..100).map(|row| (row, ask(Dialect::OpenAi, row, None)));
    let mut drive = Drive::iter(route, asked, bound).unwrap();
    while let Some((row, result)) = drive.next().await {
        assert!(end(result).starts_with("200 OK"), "{row}");
    }
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more, truth.batch().created), (100, 0, 0));
    assert!((600..720).contains(&sim.elapsed().as_secs()), "{:?}", sim.elapsed());
}

/// Some lives, each ended at some time, and a last one; a row is asked for until it is answered.
async fn lives(dialect: Dialect, seed: u64, batch: BatchConfig, expects: bool) -> Sim {
    const ROWS: usize = 500;
    let (sim, store, mut rng) = (sim_of(dialect, seed, batch), MemoryBatches::new(), fastrand::Rng::with_seed(seed));
    let mut answered = vec![false; ROWS];
    while answered.contains(&false) {
        let builder = builder(&sim, store.clone()).chunk_rows(50).in_flight(rng.usize(1..4));
        let service: BatchService<AnswerBody> = builder.open(client(&sim)).await.unwrap();
        let direct = Stack::new(orgs(dialect)).build(client(&sim)).unwrap();
        let route = Route::new(direct, service.clone(), Way::Batch);
        let handle = service.handle();
        let mut more = expects.then(|| handle.expect_more());
        let mut left: Vec<_> = (0..ROWS).rev().filter(|row| !answered[*row]).collect();
        let is_read = Cell::new(false);
        let asked = std::iter::from_fn(|| {
            is_read.set(left.is_empty());
            left.pop().map(|row| (row, ask(dialect, row, None)))
        });
        let mut drive = Drive::iter(route, asked, service.live_bound() + 50).unwrap();
        let life = tokio::time::sleep(Duration::from_secs(rng.u64(0..300)));
        tokio::pin!(life);
        loop {
            tokio::select! {
                () = &mut life => break,
                next = drive.next() => match next {
                    Some((row, result)) => {
                        assert!(!answered[row], "it has one answer");
                        answered[row] = result.is_ok();
                    }
                    None => break,
                },
                // By then all that was read has come.
                () = tokio::time::sleep(Duration::from_secs(1)), if more.is_some() => {
                    if is_read.get() {
                        handle.flush();
                        more = None;
                    }
                }
            }
        }
    }
    sim
}

#[tokio::test(start_paused = true)]
async fn no_batch_is_smaller_than_it_might_be_whenever_the_process_ends() {
    let (mut created, mut needless) = (0, vec![]);
    for seed in 0..8 {
        let dialect = if seed % 2 == 0 { Dialect::Anthropic } else { Dialect::OpenAi };
        let batch = BatchConfig::new().expired(0.15).expires_after_s(600.0).all_error(0.05).row_api_error(0.03);
        let batch = batch.not_found_after_create_s(20.0).not_listed_after_create_s(30.0).lost_reply(0.1);
        let sim = lives(dialect, seed, batch, seed % 4 < 2).await;
        let truth = sim.truth();
        assert_eq!((truth.answered_once, truth.answered_more), (500, 0));
        let found = waste::wasteful(&sim.batches(), 50);
        created += truth.batch().created;
        needless.extend(found.into_iter().map(|waste| (seed, waste)));
    }
    eprintln!("{created} batches for {} rows", 8 * 500);
    assert!(needless.is_empty(), "{needless:?}");
}

#[tokio::test(start_paused = true)]
async fn the_same_requests_come_to_the_same_ends_directly_and_in_batches() {
    const WORDS: [&str; 10] = [
        "invalid_request",
        "not_found",
        "too_large",
        "overloaded",
        "api_error",
        "timeout",
        "refusal",
        "empty",
        "max_tokens",
        "in_band",
    ];
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let mut ends = vec![];
        for way in [Way::Direct, Way::Batch] {
            let sim = sim(dialect, BatchConfig::new());
            let service: BatchService<AnswerBody> =
                builder(&sim, MemoryBatches::new()).chunk_rows(100).open(client(&sim)).await.unwrap();
            let retry = RateLimitRetryLayer::builder().max_attempts(2).build().unwrap();
            let direct = Stack::new(orgs(dialect)).retry(retry).build(client(&sim)).unwrap();
            // What two batches have not answered is not asked for directly here: the ends are compared.
            let mut this: Vec<Option<String>> = vec![None; 500];
            let rows = (0..500).map(|row| {
                // A fifth of them. Those that take an org out come last.
                let word = (row % 5 == 0).then(|| WORDS[row / 5 % 10]);
                (row, ask(dialect, row, word))
            });
            match way {
                Way::Direct => {
                    let mut drive = Drive::iter(Route::new(direct, service, way), rows, 400).unwrap();
                    while let Some((row, result)) = drive.next().await {
                        this[row] = Some(end(result));
                    }
                }
                _ => {
                    let mut drive = Drive::iter(service, rows, 400).unwrap();
                    while let Some((row, result)) = drive.next().await {
                        let result = result.map_err(|error| match error {
                            DriveError::Service(error) => DriveError::Service(RouteError::Batch(error)),
                            error => panic!("{error}"),
                        });
                        this[row] = Some(end(result));
                    }
                }
            }
            ends.push(this);
        }
        let (batch, direct) = (ends.pop().unwrap(), ends.pop().unwrap());
        let mut others = 0;
        for (row, (direct, batch)) in direct.iter().zip(&batch).enumerate() {
            assert_eq!(direct, batch, "{dialect:?}, row {row}");
            others += usize::from(!direct.as_ref().unwrap().starts_with("200 OK Ok"));
        }
        // A refusal and what was cut short are answers.
        assert_eq!(others, 80);
        for class in [Class::Terminal, Class::TooLarge, Class::Overloaded, Class::Empty] {
            assert!(direct.iter().flatten().any(|end| end.contains(&format!("{class:?}"))), "{class}");
        }
    }
}

/// A file whose thread is waited for in place: a clock that stands still would else run on meanwhile.
#[derive(Clone)]
struct InPlace(FileStore);

fn in_place<T>(asked: impl Future<Output = Result<T, BoxError>>) -> Ready<Result<T, BoxError>> {
    let mut asked = std::pin::pin!(asked);
    loop {
        if let Poll::Ready(done) = asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return ready(done);
        }
        std::thread::yield_now();
    }
}

impl BatchStore for InPlace {
    type Load = Ready<Result<Vec<(Token, Bytes)>, BoxError>>;
    type Row = Ready<Result<Option<Bytes>, BoxError>>;
    type Write = Ready<Result<(), BoxError>>;

    fn load(&self) -> Self::Load {
        in_place(self.0.load())
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        in_place(self.0.row(token, place))
    }

    fn write(&self, change: BatchChange) -> Self::Write {
        in_place(self.0.write(change))
    }
}

#[tokio::test(start_paused = true)]
async fn a_run_that_is_killed_again_and_again_loses_and_pays_nothing() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let batch = BatchConfig::new()
            .expired(0.1)
            .expires_after_s(3_600.0)
            .not_found_after_create_s(10.0)
            .not_listed_after_create_s(20.0)
            .lost_reply(0.1);
        let sim = sim(dialect, batch);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("batches.journal");
        let mut answered = vec![false; 600];
        fastrand::seed(3);
        for kill in 0.. {
            let store = InPlace(FileStore::open(&path).unwrap());
            let service: BatchService<AnswerBody> =
                builder(&sim, store).chunk_rows(50).open(client(&sim)).await.unwrap();
            // A journal above would hold these.
            let rows: Vec<_> =
                (0..600).filter(|row| !answered[*row]).map(|row| (row, ask(dialect, row, None))).collect();
            let mut drive = Drive::iter(service, rows, 400).unwrap();
            let life = Duration::from_millis(if kill < 25 { fastrand::u64(1..40_000) } else { 1 << 40 });
            let end = tokio::time::Instant::now() + life;
            while let Ok(Some((row, result))) = tokio::time::timeout_at(end, drive.next()).await {
                match result {
                    Ok(answer) => assert!(answer.status().is_success() && !std::mem::replace(&mut answered[row], true)),
                    Err(error) => eprintln!("{kill} {row}: {error}"),
                }
            }
            drop(drive);
            if answered.iter().all(|answered| *answered) {
                assert!(kill > 5, "killed {kill} times only");
                break;
            }
            assert!(kill < 40);
        }
        let (truth, batch) = (sim.truth(), sim.truth().batch());
        assert_eq!((truth.rows.billed_once, truth.rows.billed_more), (600, 0), "{batch:?}");
        assert_eq!((batch.rows_again_while_open, batch.rows_again_after_billed), (0, 0), "{batch:?}");
    }
}

/// OpenAI's way at a provider that keeps no metadata: a batch is known by its file alone.
#[derive(Debug)]
struct Unmarked;

macro_rules! as_openai {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)+) => {
        $(fn $name(&self, $($arg: $type),*) -> $out { OpenAi.$name($($arg),*) })+
    };
}

impl BatchApi for Unmarked {
    as_openai! {
        bounds() -> Bounds;
        row(custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError>;
        upload(token: &str, rows: &[Bytes]) -> Option<Request<Bytes>>;
        uploaded(answer: &Response<Bytes>) -> Result<String, ApiError>;
        create(group: &Group, token: &str, file: Option<&str>, rows: &[Bytes]) -> Request<Bytes>;
        created(answer: &Response<Bytes>) -> Result<Remote, ApiError>;
        retrieve(id: &str) -> Request<Bytes>;
        retrieved(answer: &Response<Bytes>) -> Result<Remote, ApiError>;
        cancel(id: &str) -> Request<Bytes>;
        list(after: Option<&str>) -> Request<Bytes>;
        listed(answer: &Response<Bytes>) -> Result<Page, ApiError>;
        results(remote: &Remote) -> Vec<Request<Bytes>>;
        result(line: &[u8]) -> Result<Option<RowResult>, ApiError>;
    }

    fn matches(&self, remote: &Remote, submission: &Submission<'_>) -> Match {
        let mut remote = remote.clone();
        remote.token = None;
        OpenAi.matches(&remote, submission)
    }
}

#[tokio::test(start_paused = true)]
async fn a_later_process_finds_a_batch_by_the_file_that_was_uploaded_for_it() {
    let sim = sim(Dialect::OpenAi, BatchConfig::new());
    let store = MemoryBatches::new();
    // It is done, and the process ends before the reply comes.
    let wire = sim.clone();
    let silent = tower::service_fn(move |request: Request<Body>| {
        let is_create = request.uri().path() == "/v1/batches" && request.method() == http::Method::POST;
        let answer = wire.service().oneshot(request);
        async move {
            let answer = answer.await;
            if is_create {
                std::future::pending::<()>().await;
            }
            answer
        }
    });
    let first: BatchService = builder(&sim, store.clone()).api(Unmarked).chunk_rows(5).open(silent).await.unwrap();
    let asked = || (0..5).map(|row| (row, ask(Dialect::OpenAi, row, None)));
    let mut drive = Drive::iter(first, asked(), 5).unwrap();
    let nothing = tokio::time::timeout(Duration::from_secs(60), drive.next()).await;
    assert!(nothing.is_err() && sim.truth().batch().created == 1);
    drop(drive);
    let next: BatchService = builder(&sim, store).api(Unmarked).chunk_rows(5).open(client(&sim)).await.unwrap();
    let mut drive = Drive::iter(next, asked(), 5).unwrap();
    while let Some((row, result)) = drive.next().await {
        assert!(result.unwrap_or_else(|error| panic!("{row}: {error}")).status().is_success());
    }
    assert_eq!(sim.truth().batch().created, 1);
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_is_damaged_while_batches_run_pays_nothing_twice() {
    for dialect in [Dialect::Anthropic, Dialect::OpenAi] {
        let sim = sim(dialect, BatchConfig::new().not_listed_after_create_s(20.0));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("batches.journal");
        let mut answered = vec![false; 300];
        fastrand::seed(5);
        for kill in 0..12 {
            let store = InPlace(FileStore::open(&path).unwrap());
            let service: BatchService<AnswerBody> =
                builder(&sim, store).chunk_rows(50).open(client(&sim)).await.unwrap();
            let rows: Vec<_> =
                (0..300).filter(|row| !answered[*row]).map(|row| (row, ask(dialect, row, None))).collect();
            let mut drive = Drive::iter(service, rows, 300).unwrap();
            let life = Duration::from_millis(if kill < 11 { fastrand::u64(1..8_000) } else { 1 << 40 });
            let end = tokio::time::Instant::now() + life;
            while let Ok(Some((row, result))) = tokio::time::timeout_at(end, drive.next()).await {
                assert!(result.unwrap().status().is_success() && !std::mem::replace(&mut answered[row], true));
            }
            drop(drive);
            // What its engine needs to find anything.
            let mut file = std::fs::read(&path).unwrap();
            file[..512].fill(0);
            std::fs::write(&path, file).unwrap();
        }
        assert!(answered.iter().all(|answered| *answered));
        let (truth, batch) = (sim.truth(), sim.truth().batch());
        assert_eq!((truth.rows.billed_once, truth.rows.billed_more), (300, 0), "{batch:?}");
        assert_eq!((batch.rows_again_while_open, batch.rows_again_after_billed), (0, 0), "{batch:?}");
    }
}
