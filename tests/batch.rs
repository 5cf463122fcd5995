//! Batches: against a provider in virtual time that does what it is told to.

#![cfg(feature = "batch")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "batch/provider.rs"]
mod provider;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Either, Full};
use provider::{Plan, Provider};
use serde_json::{Value, json};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::Held,
    batch::{
        Anthropic, ApiError, BatchApi, BatchBody, BatchBuilder, BatchChange, BatchError, BatchFailure, BatchFuture,
        BatchOpenError, BatchService, BatchStage, BatchStore, Batched, Bounds, Group, Match, MemoryBatches, Page,
        Remote, RemoteState, Route, RouteError, Row, RowError, RowResult, Submission, Token, Way,
    },
    journal::{Key, KeyHeaders, Restored},
    judge::Answer,
    org::{Credential, Org, Orgs},
    outcome::{BoxError, Class, Stamp},
    retry::RateLimitRetryLayer,
    stack::Stack,
};

type Body = Full<Bytes>;
type Future = BatchFuture<Body, BatchBody>;
type Spawned = task::Spawn<Future>;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn orgs(names: &[&str]) -> Orgs {
    Orgs::new(names.iter().map(|name| Org::new(name).credential(Credential::new(&format!("sk-{name}"))))).unwrap()
}

fn builder(provider: &Provider, names: &[&str], store: &impl BatchStore) -> BatchBuilder {
    BatchService::builder(orgs(names), store.clone()).clock(provider.clock())
}

async fn service(provider: &Provider, names: &[&str], store: &impl BatchStore) -> BatchService {
    builder(provider, names, store).chunk_rows(10).open(provider.service()).await.unwrap()
}

fn ask(prompt: &str) -> Request<Body> {
    let body = json!({"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": prompt}]});
    let request = Request::post("/v1/messages").header("anthropic-version", "2023-06-01").header("x-mine", prompt);
    request.body(Full::new(Bytes::from(body.to_string()))).unwrap()
}

fn said(body: &Bytes) -> String {
    let body: Value = serde_json::from_slice(body).unwrap();
    body["content"][0]["text"].as_str().unwrap_or_default().to_owned()
}

fn said_by(answer: &Response<BatchBody>) -> String {
    assert_eq!(answer.status(), 200);
    said(answer.body().bytes().unwrap())
}

/// Starts one row for each prompt, each polled once.
fn rows(service: &BatchService, prompts: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<Spawned> {
    let mut service = service.clone();
    let call = |prompt| {
        assert_ready!(task::spawn(()).enter(|cx, _| Service::<Request<Body>>::poll_ready(&mut service, cx))).unwrap();
        let mut row = task::spawn(service.call(ask(prompt)));
        assert_pending!(row.poll());
        row
    };
    let prompts: Vec<_> = prompts.into_iter().collect();
    prompts.iter().map(AsRef::as_ref).map(call).collect()
}

/// The same, none of them polled yet: what is known is told at once.
fn again(service: &BatchService, prompts: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<Spawned> {
    prompts.into_iter().map(|prompt| task::spawn(service.clone().call(ask(prompt.as_ref())))).collect()
}

fn prompts(count: usize) -> Vec<String> {
    (0..count).map(|row| format!("row {row}")).collect()
}

/// Polls whoever is woken, and lets time pass when nobody is, until all are done or so much time has passed.
async fn run<F: std::future::Future>(rows: &mut [task::Spawn<F>], within: Duration) -> Vec<Option<F::Output>> {
    let end = tokio::time::Instant::now() + within;
    let mut done: Vec<_> = rows.iter().map(|_| None).collect();
    let mut first = true;
    loop {
        let mut polled = false;
        for (row, done) in rows.iter_mut().zip(&mut done) {
            if done.is_none() && (row.is_woken() || first) {
                polled = true;
                if let std::task::Poll::Ready(output) = row.poll() {
                    *done = Some(output);
                }
            }
        }
        first = false;
        if done.iter().all(Option::is_some) || tokio::time::Instant::now() >= end {
            return done;
        }
        if !polled {
            // Time goes on to the next timer.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
}

async fn answers(rows: &mut [Spawned], within: Duration) -> Vec<Response<BatchBody>> {
    let all = run(rows, within).await;
    all.into_iter().map(|end| end.expect("it has ended").expect("it is answered")).collect()
}

async fn errors(rows: &mut [Spawned], within: Duration) -> Vec<BatchError<Request<Body>>> {
    let all = run(rows, within).await;
    all.into_iter().map(|end| end.expect("it has ended").expect_err("it is not answered")).collect()
}

#[tokio::test(start_paused = true)]
async fn requests_are_answered_out_of_batches_in_whatever_order_they_come() {
    let provider = Provider::new();
    provider.plan([Plan { reversed: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(25));
    let answers = answers(&mut rows, secs(600)).await;
    for (row, answer) in answers.iter().enumerate() {
        assert_eq!(said_by(answer), format!("answer to row {row}"));
        let stamp = answer.extensions().get::<Stamp>().unwrap();
        assert_eq!((stamp.outcome.class, stamp.usage.unwrap().output_tokens), (Class::Ok, 7));
        assert_eq!(stamp.org.as_ref().unwrap().name(), "a");
        assert!(answer.extensions().get::<Batched>().unwrap().0.id.starts_with("msgbatch_"));
    }
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [10, 10, 5]);
    assert!(provider.billed().values().all(|times| *times == 1));
    let now = service.handle().snapshot();
    assert_eq!((now.gathered, now.queued, now.in_batches, now.answered, now.handed_back), (0, 0, 0, 25, 0));
    assert_eq!((now.submitted, now.resumed, now.ended), (3, 0, 3));
}

#[tokio::test(start_paused = true)]
async fn finished_rows_of_an_expired_batch_are_kept_and_the_others_go_into_the_next_one() {
    let provider = Provider::new();
    provider.plan([Plan { expires: Some(1), ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    answers(&mut rows, secs(600)).await;
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [10, 9]);
    assert_eq!(provider.billed().values().sum::<usize>(), 10);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_two_batches_have_not_answered_is_handed_back_as_it_was_given() {
    let provider = Provider::new();
    provider.plan([(); 2].map(|()| Plan { expires: Some(0), ..Plan::default() }));
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(3));
    for (row, error) in errors(&mut rows, secs(600)).await.into_iter().enumerate() {
        assert!(error.is_redrivable() && error.failure().goes_direct());
        let text = error.to_string();
        assert!(text.contains("two batches") && text.contains("msgbatch_2 of org a"), "{text}");
        let (given, back) = (ask(&format!("row {row}")), error.into_request().unwrap());
        assert_eq!((given.headers(), given.uri()), (back.headers(), back.uri()));
        use http_body_util::BodyExt;
        assert_eq!(
            given.into_body().collect().await.unwrap().to_bytes(),
            back.into_body().collect().await.unwrap().to_bytes()
        );
    }
    assert_eq!(provider.created(), 2);
}

#[tokio::test(start_paused = true)]
async fn errors_for_good_are_answers_and_those_that_may_pass_are_sent_again() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, ["invalid 1", "overloaded 1", "failing 1", "fine 1"]);
    let ends = run(&mut rows, secs(600)).await;
    let [invalid, overloaded, failing, fine] = ends.try_into().unwrap();
    let invalid = invalid.unwrap().unwrap();
    assert_eq!(invalid.status(), StatusCode::BAD_REQUEST);
    assert_eq!(invalid.extensions().get::<Stamp>().unwrap().outcome.class, Class::Terminal);
    assert!(std::str::from_utf8(invalid.body().bytes().unwrap()).unwrap().contains("as told: invalid 1"));
    for error in [overloaded, failing] {
        let error = error.unwrap().unwrap_err();
        assert!(
            matches!(error.failure(), BatchFailure::Unanswered { class: Class::Overloaded, said, .. } if said.contains("as told")),
            "{error}"
        );
    }
    assert_eq!(said_by(&fine.unwrap().unwrap()), "answer to fine 1");
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [4, 2]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_not_to_be_seen_at_first_is_waited_for_and_one_that_never_is_ends_in_an_error() {
    let provider = Provider::new();
    provider.plan([Plan { hidden: secs(55), ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, ["row 1"]);
    answers(&mut some, secs(600)).await;
    provider.plan([Plan { hidden: secs(1 << 20), ..Plan::default() }]);
    let mut some = rows(&service, ["row 2"]);
    let [error] = errors(&mut some, secs(1_200)).await.try_into().unwrap();
    assert!(matches!(error.failure(), BatchFailure::Vanished(batch) if &*batch.id == "msgbatch_2"), "{error}");
    assert!(!error.failure().goes_direct(), "it may be billed");
    assert_eq!(provider.created(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_batch_whose_reply_was_lost_is_found_and_not_submitted_again() {
    for hidden in [0, 40] {
        let provider = Provider::new();
        provider.plan([Plan { lost: true, hidden: secs(hidden), takes: Some(secs(300)), ..Plan::default() }]);
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut rows = rows(&service, prompts(10));
        answers(&mut rows, secs(3_600)).await;
        assert_eq!(provider.created(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_failure_that_may_have_come_late_a_batch_is_looked_for() {
    for status in [500, 502, 503, 504] {
        let provider = Provider::new();
        provider.instead(1, (Method::POST, "batches"), status, "");
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut rows = rows(&service, prompts(10));
        answers(&mut rows, secs(3_600)).await;
        assert_eq!((provider.created(), provider.calls_of(&Method::POST, "batches")), (1, 1), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_batch_is_found_whatever_the_providers_clock_says_and_however_it_lists() {
    type Change = fn(&mut provider::State);
    let cases: [(&str, Change); 5] = [
        ("its clock is half an hour behind", |state| state.skew = -1_800),
        ("its clock is half an hour ahead", |state| state.skew = 1_800),
        ("old ones come first", |state| (state.lists_oldest_first, state.page) = (true, 2)),
        ("its rows are not counted at first", |state| state.counts_late = true),
        ("pages are short", |state| state.page = 1),
    ];
    for (case, change) in cases {
        let provider = Provider::new();
        // Some that are old, and of another size.
        let old = service(&provider, &["a"], &MemoryBatches::new()).await;
        for row in 0..3 {
            let mut some = rows(&old, [format!("old {row}")]);
            old.handle().flush();
            answers(&mut some, secs(600)).await;
        }
        tokio::time::sleep(secs(12 * 3_600)).await;
        change(&mut provider.state());
        provider.plan([Plan { lost: true, takes: Some(secs(300)), ..Plan::default() }]);
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut some = rows(&service, prompts(10));
        answers(&mut some, secs(3_600)).await;
        assert_eq!(provider.created(), 4, "{case}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_not_all_batches_can_be_listed_a_lost_one_is_not_submitted_again() {
    for stuck in [false, true] {
        let provider = Provider::new();
        let other = service(&provider, &["a"], &MemoryBatches::new()).await;
        for row in 0..60 {
            let mut some = rows(&other, [format!("other {row}")]);
            other.handle().flush();
            answers(&mut some, secs(600)).await;
        }
        let created = provider.created();
        {
            let mut state = provider.state();
            // The lost one is on the last page, or no page leads to the next.
            (state.page, state.lists_oldest_first, state.lists_same_page) = (1, true, stuck);
        }
        provider.plan([Plan { lost: true, ..Plan::default() }]);
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut some = again(&service, prompts(10));
        for error in errors(&mut some, secs(3_600)).await {
            assert!(matches!(error.failure(), BatchFailure::Unlisted { .. }), "{error}");
        }
        assert_eq!(provider.created(), created + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_anybody_submits_hours_later_is_not_waited_for() {
    let provider = Provider::new();
    provider.plan([Plan { swallowed: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(10));
    run(&mut some, secs(1)).await;
    // By its own clock.
    provider.state().skew = 2 * 3_600;
    provider.plan([Plan { takes: Some(secs(9_000)), ..Plan::default() }]);
    let other = self::service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut others = rows(&other, (0..10).map(|row| format!("other {row}")));
    run(&mut others, secs(5)).await;
    provider.state().skew = 0;
    answers(&mut some, secs(600)).await;
    assert_eq!(provider.created(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_is_not_found_twice_was_not_submitted_and_is_now() {
    let provider = Provider::new();
    provider.plan([Plan { swallowed: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    answers(&mut rows, secs(3_600)).await;
    assert_eq!(provider.created(), 1);
    let state = provider.state();
    let looks: Vec<_> = state.calls.iter().map(|(_, method, path)| format!("{method} {path}")).take(4).collect();
    assert_eq!(
        looks,
        [
            "POST /v1/messages/batches",
            "GET /v1/messages/batches",
            "GET /v1/messages/batches",
            "POST /v1/messages/batches"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn anothers_batch_of_the_same_size_is_not_taken_for_the_lost_one() {
    let provider = Provider::new();
    provider.plan([Plan { takes: Some(secs(100)), ..Plan::default() }, Plan { swallowed: true, ..Plan::default() }]);
    let other = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut others = rows(&other, (0..10).map(|row| format!("other {row}")));
    tokio::time::sleep(secs(3)).await;
    run(&mut others, secs(1)).await;
    assert_eq!(provider.created(), 1);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut own = rows(&service, prompts(10));
    answers(&mut own, secs(3_600)).await;
    answers(&mut others, secs(3_600)).await;
    assert_eq!(provider.created(), 2);
    assert!(provider.billed().values().all(|times| *times == 1));
}

#[tokio::test(start_paused = true)]
async fn failures_of_calls_about_batches_never_end_the_run() {
    let provider = Provider::new();
    for status in [429, 529, 503] {
        provider.fault(Method::POST, "batches", status);
    }
    for status in [0, 500, 429, 529, 0] {
        provider.fault(Method::GET, "msgbatch_1", status);
        provider.fault(Method::GET, "results", status);
    }
    provider.plan([Plan { torn: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    answers(&mut rows, secs(3_600)).await;
    assert_eq!(provider.created(), 1);
    assert!(provider.billed().values().all(|times| *times == 1));
}

#[tokio::test(start_paused = true)]
async fn calls_that_are_never_answered_are_made_again_and_a_submission_is_looked_for() {
    for (method, end) in [(Method::POST, "batches"), (Method::GET, "msgbatch_1"), (Method::GET, "results")] {
        let provider = Provider::new();
        let hangs = Arc::new(AtomicBool::new(true));
        let (inner, seen) = (provider.service(), hangs.clone());
        let wire = service_fn(move |request: Request<Body>| {
            let is_it = *request.method() == method && request.uri().path().ends_with(end);
            let hangs = is_it && seen.swap(false, SeqCst);
            let answer = inner.clone().oneshot(request);
            async move {
                let answer = answer.await;
                if hangs {
                    std::future::pending::<()>().await;
                }
                answer
            }
        });
        let builder = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).timeout(secs(30));
        let service: BatchService = builder.open(wire).await.unwrap();
        let mut some = rows(&service, prompts(10));
        answers(&mut some, secs(3_600)).await;
        assert!(!hangs.load(SeqCst), "{end}");
        assert_eq!(provider.created(), 1, "{end}");
    }
}

/// A body of which nothing comes.
struct Silent;

impl http_body::Body for Silent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[tokio::test(start_paused = true)]
async fn results_that_fall_silent_are_asked_for_again() {
    let provider = Provider::new();
    let hangs = Arc::new(AtomicBool::new(true));
    let (inner, seen) = (provider.service(), hangs.clone());
    let wire = service_fn(move |request: Request<Body>| {
        let hangs = request.uri().path().ends_with("results") && seen.swap(false, SeqCst);
        let answer = inner.clone().oneshot(request);
        async move {
            let both = |body| if hangs { Either::Left(Silent) } else { Either::Right(body) };
            answer.await.map(|answer| answer.map(both))
        }
    });
    let builder = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).timeout(secs(30));
    let service: BatchService = builder.open(wire).await.unwrap();
    let mut some = rows(&service, prompts(10));
    answers(&mut some, secs(3_600)).await;
    assert_eq!((provider.created(), provider.calls_of(&Method::GET, "results")), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn results_that_cannot_be_had_are_not_paid_for_again_and_are_read_once_they_can() {
    let provider = Provider::new();
    for _ in 0..6 {
        provider.fault(Method::GET, "results", 404);
    }
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(10));
    for error in errors(&mut some, secs(3_600)).await {
        assert!(matches!(error.failure(), BatchFailure::Unread { .. }), "{error}");
        assert!(error.to_string().contains("batch msgbatch_1 of org a has ended"), "{error}");
        assert!(!error.failure().goes_direct() && error.is_redrivable() && error.request().is_some());
    }
    for prompt in prompts(10) {
        service.clone().oneshot(ask(&prompt)).await.unwrap();
    }
    assert_eq!(provider.created(), 1);
}

const RESULTS: (Method, &str) = (Method::GET, "results");

/// What is no file of results, though it is a success: a gateway's page, nothing, a report of an error, a piece that ends with its line.
const NO_RESULTS: [(u16, &str); 5] = [
    (200, "<html>\n<body>Please wait</body>\n</html>\n"),
    (200, ""),
    (204, ""),
    (200, "{\"error\":{\"type\":\"api_error\"}}\n"),
    (200, "{\"custom_id\":\n"),
];

#[tokio::test(start_paused = true)]
async fn results_that_are_none_are_asked_for_again() {
    for (status, body) in NO_RESULTS {
        let provider = Provider::new();
        provider.instead(2, RESULTS, status, body);
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut some = rows(&service, prompts(10));
        answers(&mut some, secs(3_600)).await;
        assert_eq!((provider.created(), provider.calls_of(&Method::GET, "results")), (1, 3), "{status} {body}");
    }
    let provider = Provider::new();
    provider.plan([Plan { cut: 2, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(10));
    answers(&mut some, secs(3_600)).await;
    assert_eq!((provider.created(), provider.calls_of(&Method::GET, "results")), (1, 3));
}

#[tokio::test(start_paused = true)]
async fn of_two_lines_about_a_row_the_success_counts() {
    let provider = Provider::new();
    provider.plan([Plan { doubled: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(10));
    for (row, answer) in answers(&mut some, secs(600)).await.iter().enumerate() {
        assert_eq!(said_by(answer), format!("answer to row {row}"));
    }
    assert_eq!(provider.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn rows_that_were_counted_and_are_not_in_the_results_are_not_paid_for_again() {
    let none = |times, (status, body)| {
        let provider = Provider::new();
        provider.instead(times, RESULTS, status, body);
        (provider, 10)
    };
    let planned = |plan: Plan, unread| {
        let provider = Provider::new();
        provider.plan([plan]);
        (provider, unread)
    };
    let mut cases: Vec<_> = NO_RESULTS.map(|answer| none(6, answer)).into();
    cases.push(planned(Plan { cut: 6, ..Plan::default() }, 7));
    cases.push(planned(Plan { archived: true, ..Plan::default() }, 10));
    for (case, (provider, unread)) in cases.into_iter().enumerate() {
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut some = rows(&service, prompts(10));
        let ends: Vec<_> =
            run(&mut some, secs(3_600)).await.into_iter().map(|end| end.expect("it has ended")).collect();
        let errors: Vec<_> = ends.into_iter().filter_map(Result::err).collect();
        assert_eq!(errors.len(), unread, "case {case}");
        for error in errors {
            assert!(matches!(error.failure(), BatchFailure::Unread { .. }), "case {case}: {error}");
            assert!(!error.failure().goes_direct() && error.request().is_some());
        }
        provider.state().unarchive();
        for prompt in prompts(10).into_iter().skip(10 - unread) {
            let answer = service.clone().oneshot(ask(&prompt)).await.unwrap();
            assert_eq!(said_by(&answer), format!("answer to {prompt}"));
        }
        assert_eq!(provider.created(), 1, "case {case}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_batch_is_refuted_by_anothers_rows_alone() {
    for (status, body) in NO_RESULTS {
        for times in [2, 6] {
            let provider = Provider::new();
            provider.plan([Plan { lost: true, ..Plan::default() }]);
            provider.instead(times, RESULTS, status, body);
            let service = service(&provider, &["a"], &MemoryBatches::new()).await;
            let mut some = rows(&service, prompts(10));
            if times == 6 {
                for error in errors(&mut some, secs(3_600)).await {
                    assert!(matches!(error.failure(), BatchFailure::Unlisted { .. }), "{error}");
                }
                some = again(&service, prompts(10));
            }
            answers(&mut some, secs(3_600)).await;
            assert_eq!(provider.created(), 1, "{status} {body}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_batch_whose_results_cannot_be_had_is_not_submitted_again() {
    let provider = Provider::new();
    provider.plan([Plan { lost: true, ..Plan::default() }]);
    for _ in 0..6 {
        provider.fault(Method::GET, "results", 404);
    }
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(10));
    for error in errors(&mut some, secs(3_600)).await {
        assert!(matches!(error.failure(), BatchFailure::Unlisted { .. }), "{error}");
    }
    for prompt in prompts(10) {
        service.clone().oneshot(ask(&prompt)).await.unwrap();
    }
    assert_eq!(provider.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_rows_of_an_org_that_dies_before_they_are_submitted_go_to_a_sibling() {
    let provider = Provider::new();
    provider.state().dead.insert("sk-a".into(), 401);
    let service = service(&provider, &["a", "b"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(30));
    answers(&mut some, secs(3_600)).await;
    assert!(provider.state().batches.iter().all(|batch| batch.key == "sk-b"));
    assert_eq!(provider.calls_of(&Method::POST, "batches"), 3 + 1, "the dead one is asked once");
    let now = service.handle().snapshot();
    assert_eq!(now.orgs.iter().map(|org| org.out).collect::<Vec<_>>(), [Some(Class::Unauthorised), None]);
    provider.state().dead.insert("sk-b".into(), 403);
    let mut more = rows(&service, ["more"]);
    let [error] = errors(&mut more, secs(60)).await.try_into().unwrap();
    let text = error.to_string();
    assert!(text.contains("a: unauthorised") && text.contains("b: forbidden"), "{text}");
    assert!(error.failure().goes_direct() && error.request().is_some());
}

/// A row of this model.
fn row_of(service: &BatchService, model: &str, prompt: &str) -> Spawned {
    let body = String::from_utf8(ask(prompt).into_body().into_inner().unwrap().to_vec()).unwrap();
    let request = ask(prompt).map(|_| Body::from(body.replace("claude-haiku-4-5", model)));
    task::spawn(service.clone().call(request))
}

/// Rows of this model, each polled once.
fn rows_of(service: &BatchService, model: &str, prompts: &[String]) -> Vec<Spawned> {
    let call = |prompt: &String| {
        let mut row = row_of(service, model, prompt);
        assert_pending!(row.poll());
        row
    };
    prompts.iter().map(call).collect()
}

#[tokio::test(start_paused = true)]
async fn rows_of_a_model_that_an_org_refuses_go_to_a_sibling_and_its_other_models_stay() {
    const OLD: &str = "claude-haiku-4-0";
    const NEW: &str = "claude-haiku-4-5";
    let provider = Provider::new();
    provider.state().forbidden.push(("sk-a", OLD));
    let orgs = orgs(&["a", "b"]);
    let service = BatchService::builder(orgs.clone(), MemoryBatches::new()).clock(provider.clock()).chunk_rows(10);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let of = |key: &str, model: &str, from: usize| {
        let state = provider.state();
        let batches = state.batches[from..].iter().filter(|batch| batch.key == key);
        let rows = batches.flat_map(|batch| &batch.rows);
        rows.filter(|(_, params)| params["model"] == model).count()
    };
    // Each in a batch of its own, in turn: one of the old model's goes to a, is refused there, and goes to b.
    let mut first = rows_of(&service, OLD, &prompts(20));
    first.extend(rows_of(&service, NEW, &prompts(20)));
    answers(&mut first, secs(3_600)).await;
    assert_eq!((of("sk-a", OLD, 0), of("sk-b", OLD, 0)), (10, 20));
    assert_eq!((of("sk-a", NEW, 0), of("sk-b", NEW, 0)), (10, 10));
    let a = orgs.get("a").unwrap();
    assert_eq!(a.refused_models().iter().map(|model| &**model).collect::<Vec<_>>(), [OLD]);
    assert!(!a.families().iter().any(Org::is_out));
    // From then on it is known, and takes no turn from the other model.
    let submitted = provider.created();
    let later: Vec<_> = (0..40).map(|row| format!("later {row}")).collect();
    let mut more = rows_of(&service, OLD, &later);
    more.extend(rows_of(&service, NEW, &later));
    answers(&mut more, secs(3_600)).await;
    assert_eq!((of("sk-a", OLD, submitted), of("sk-b", OLD, submitted)), (0, 40));
    assert!(of("sk-a", NEW, submitted) >= 10, "{}", of("sk-a", NEW, submitted));
    // Refused everywhere, it is handed back, and says by whom; the direct path may still have it.
    provider.state().forbidden.push(("sk-b", OLD));
    let last: Vec<_> = (0..2).map(|row| format!("last {row}")).collect();
    let mut refused = rows_of(&service, OLD, &last[..1]);
    let [error] = errors(&mut refused, secs(3_600)).await.try_into().unwrap();
    assert!(matches!(error.failure(), BatchFailure::NoOrg { .. }), "{error}");
    let submitted = provider.created();
    let error =
        assert_ready!(row_of(&service, OLD, &last[1]).poll(), "nobody is waited for who refuses it").unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("a: its key is not allowed {OLD}")), "{text}");
    assert!(text.contains(&format!("b: its key is not allowed {OLD}")), "{text}");
    assert!(error.failure().goes_direct() && error.request().is_some());
    assert_eq!(provider.created(), submitted, "and nothing is submitted for it");
    // Brought back, it is asked again.
    provider.state().forbidden.clear();
    assert!(a.bring_back());
    answers(&mut rows_of(&service, OLD, &last[1..]), secs(3_600)).await;
    assert_eq!(of("sk-a", OLD, submitted), 1);
}

#[tokio::test(start_paused = true)]
async fn the_batch_of_an_org_that_dies_stays_recorded_and_is_found_again() {
    let provider = Provider::new();
    let store = MemoryBatches::new();
    let first = service(&provider, &["a"], &store).await;
    let mut some = rows(&first, prompts(10));
    run(&mut some, secs(10)).await;
    provider.state().dead.insert("sk-a".into(), 401);
    for error in errors(&mut some, secs(3_600)).await {
        let text = error.to_string();
        assert!(text.contains("batch msgbatch_1 of org a is submitted and may be billed"), "{text}");
        assert!(!error.failure().goes_direct() && error.is_redrivable() && error.request().is_some());
    }
    // In the same process too it is not submitted again.
    let again = first.clone().oneshot(ask("row 1")).await.unwrap_err();
    assert!(matches!(again.failure(), BatchFailure::OrgOut { .. }), "{again}");
    drop(first);
    provider.state().dead.clear();
    let second = service(&provider, &["a"], &store).await;
    let mut some = rows(&second, prompts(10));
    answers(&mut some, secs(3_600)).await;
    assert_eq!(provider.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_row_for_which_a_whole_batch_is_refused_is_found_and_handed_back() {
    let provider = Provider::new();
    provider.state().poison = Some("row 7");
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    let ends = run(&mut rows, secs(3_600)).await;
    for (row, end) in ends.into_iter().enumerate() {
        match end.unwrap() {
            Ok(answer) => assert_eq!(said_by(&answer), format!("answer to row {row}")),
            Err(error) => {
                assert_eq!(row, 7);
                assert!(matches!(error.failure(), BatchFailure::Refused { status: Some(StatusCode::BAD_REQUEST), .. }));
                assert!(error.failure().goes_direct() && error.request().is_some());
            }
        }
    }
    assert_eq!(provider.billed().values().sum::<usize>(), 9);
}

// What is stuck, and the two ways.

/// The direct path: the same provider.
fn route(
    provider: &Provider,
    service: &BatchService,
) -> impl Service<Request<Body>, Response = Response<BatchBody>, Error = RouteError<BoxError, Request<Body>>> + Clone {
    let client = provider.service();
    let direct = tower::service_fn(move |mut request: Request<Body>| {
        let client = client.clone();
        async move {
            use http_body_util::BodyExt;
            request.headers_mut().insert("x-api-key", "sk-direct".parse().unwrap());
            let (head, body) = client.oneshot(request).await?.into_parts();
            Ok::<_, BoxError>(Response::from_parts(head, BatchBody::from(body.collect().await?.to_bytes())))
        }
    });
    Route::new(direct, service.clone(), Way::Batch)
}

#[tokio::test(start_paused = true)]
async fn a_stuck_batch_is_cancelled_once_and_its_rows_finish_on_the_direct_path() {
    let provider = Provider::new();
    provider.plan([Plan { stuck: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let route = route(&provider, &service);
    let mut rows: Vec<_> = (0..10).map(|row| task::spawn(route.clone().oneshot(ask(&format!("row {row}"))))).collect();
    let before = run(&mut rows, secs(4 * 3_600 - 300)).await;
    assert!(before.iter().all(Option::is_none) && provider.state().cancels == 0, "not before four hours");
    for (row, end) in run(&mut rows, secs(900)).await.into_iter().enumerate() {
        assert_eq!(said_by(&end.expect("it has ended").unwrap()), format!("answer to row {row}"));
    }
    assert_eq!((provider.created(), provider.state().cancels), (1, 1));
    assert_eq!(provider.calls_of(&Method::POST, "/v1/messages"), 10);
    assert!(provider.billed().is_empty());
}

#[tokio::test(start_paused = true)]
async fn without_a_direct_path_the_rows_of_a_stuck_batch_are_handed_back() {
    let provider = Provider::new();
    provider.plan([Plan { stuck: true, ..Plan::default() }]);
    let service = builder(&provider, &["a"], &MemoryBatches::new()).stuck_after(Some(secs(600)));
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut rows = rows(&service, ["row 1"]);
    let [error] = errors(&mut rows, secs(1_200)).await.try_into().unwrap();
    assert!(matches!(error.failure(), BatchFailure::Stuck(batch) if &*batch.id == "msgbatch_1"));
    assert!(error.failure().goes_direct() && error.request().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lost_batch_that_may_be_a_stuck_one_is_not_waited_for_longer_than_that() {
    let provider = Provider::new();
    provider.plan([Plan { lost: true, stuck: true, ..Plan::default() }]);
    let service = builder(&provider, &["a"], &MemoryBatches::new()).stuck_after(Some(secs(600)));
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut some = rows(&service, prompts(3));
    assert!(run(&mut some, secs(590)).await.iter().all(Option::is_none));
    for error in errors(&mut some, secs(200)).await {
        assert!(matches!(error.failure(), BatchFailure::Unlisted { .. }), "{error}");
        assert!(error.to_string().contains("batch msgbatch_1 may be it, and has not ended"), "{error}");
        assert!(!error.failure().goes_direct() && error.request().is_some());
    }
    // It is anybody's: it is neither cancelled nor submitted again. Once it has ended it is certain.
    assert_eq!((provider.created(), provider.state().cancels), (1, 0));
    provider.state().batches[0].cancelled = Some(tokio::time::Instant::now());
    answers(&mut again(&service, prompts(3)), secs(3_600)).await;
    assert_eq!((provider.created(), provider.state().cancels), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_did_not_happen_is_made_again() {
    // Refused though it runs, never answered, answered by a page: what it was is seen at the next poll.
    for answer in [(404, ""), (200, "<html>"), (500, "")] {
        let provider = Provider::new();
        provider.plan([Plan { stuck: true, ..Plan::default() }]);
        provider.state().uncancelled = vec![answer; 2];
        let service = builder(&provider, &["a"], &MemoryBatches::new()).stuck_after(Some(secs(600)));
        let service: BatchService = service.open(provider.service()).await.unwrap();
        let mut some = rows(&service, ["row 1"]);
        let [error] = errors(&mut some, secs(1_800)).await.try_into().unwrap();
        assert!(matches!(error.failure(), BatchFailure::Stuck(_)), "{error}");
        assert_eq!(provider.calls_of(&Method::POST, "cancel"), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn at_an_exit_a_batch_is_told_as_cancelled_only_if_it_is() {
    let provider = Provider::new();
    provider.state().uncancelled = vec![(500, ""); 40];
    let open = builder(&provider, &["a"], &MemoryBatches::new()).cancel_on_exit(true);
    let service: BatchService = open.open(provider.service()).await.unwrap();
    let mut some = rows(&service, prompts(3));
    run(&mut some, secs(10)).await;
    let told = service.handle().shutdown().await;
    assert_eq!((told.cancelled.len(), told.left.len()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_somebody_else_made_is_not_taken_for_ours() {
    let provider = Provider::new();
    provider.plan([Plan { stuck: true, ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(3));
    run(&mut rows, secs(30)).await;
    provider.state().batches[0].cancelled = Some(tokio::time::Instant::now());
    answers(&mut rows, secs(900)).await;
    assert_eq!((provider.created(), provider.state().cancels), (2, 0), "its rows go into the next batch");
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_does_not_end_in_its_time_is_asked_about_once_more_and_given_up() {
    let provider = Provider::new();
    provider.plan([Plan { stuck: true, ..Plan::default() }]);
    let service = builder(&provider, &["a"], &MemoryBatches::new()).stuck_after(None);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut rows = rows(&service, ["row 1"]);
    let begin = tokio::time::Instant::now();
    let [error] = errors(&mut rows, secs(26 * 3_600)).await.try_into().unwrap();
    assert!(matches!(error.failure(), BatchFailure::Deadline(_)) && !error.failure().goes_direct(), "{error}");
    let last = *provider.state().batches[0].polls.last().unwrap() - begin;
    assert!(last >= secs(24 * 3_600 + 1_800) && last < secs(24 * 3_600 + 1_810), "{last:?}");
}

#[tokio::test(start_paused = true)]
async fn rows_that_an_org_takes_for_no_batch_go_directly_after_a_while() {
    let provider = Provider::new();
    provider.state().faults.extend((0..200).map(|_| (Method::POST, "/v1/messages/batches", 429)));
    let store = MemoryBatches::new();
    let service = builder(&provider, &["a"], &store).chunk_rows(10).stuck_after(Some(secs(600)));
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut some = rows(&service, prompts(10));
    let started = tokio::time::Instant::now();
    for error in errors(&mut some, secs(3_600)).await {
        assert!(matches!(error.failure(), BatchFailure::Unsubmitted { .. }), "{error}");
        assert!(error.failure().goes_direct() && error.failure().is_redrivable());
        assert!(error.to_string().starts_with("org a has taken no batch for long (429 Too Many Requests)"), "{error}");
    }
    assert!((secs(600)..secs(720)).contains(&started.elapsed()), "{:?}", started.elapsed());
    assert!(store.load().await.unwrap().is_empty(), "nothing is recorded of it");
    provider.state().faults.clear();
    let mut some = rows(&service, prompts(10));
    answers(&mut some, secs(600)).await;
    assert_eq!(provider.created(), 1);
    assert!(provider.billed().values().all(|times| *times == 1));
}

#[tokio::test(start_paused = true)]
async fn calls_that_fail_for_ever_end_when_the_batchs_time_is_up() {
    type Is = fn(&BatchFailure) -> bool;
    let cases: [(&'static str, bool, Is); 3] = [
        ("msgbatch_1", false, |failure| matches!(failure, BatchFailure::Deadline(_))),
        ("results", false, |failure| matches!(failure, BatchFailure::Unread { .. })),
        ("batches", true, |failure| matches!(failure, BatchFailure::Unlisted { .. })),
    ];
    for (path, lost, is_it) in cases {
        let provider = Provider::new();
        provider.plan([Plan { lost, ..Plan::default() }]);
        provider.instead(5_000, (Method::GET, path), 500, "");
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut some = rows(&service, prompts(3));
        let before = run(&mut some, secs(24 * 3_600)).await;
        assert!(before.iter().all(Option::is_none), "{path}: before");
        for error in errors(&mut some, secs(2 * 3_600)).await {
            assert!(is_it(error.failure()) && error.request().is_some(), "{path}: {error}");
        }
        provider.state().instead.clear();
        answers(&mut again(&service, prompts(3)), secs(3_600)).await;
        assert_eq!(provider.created(), 1, "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_no_batch_takes_goes_directly() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let body = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "row 1"}]}).to_string();
    let request = || Request::post("/v1/messages").body(Full::new(Bytes::from(body.clone()))).unwrap();
    let error = service.clone().oneshot(request()).await.unwrap_err();
    assert!(matches!(error.failure(), BatchFailure::Row(_)) && error.request().is_some());
    let answer = route(&provider, &service).oneshot(request()).await.unwrap();
    assert_eq!(said_by(&answer), "answer to row 1");
    assert_eq!(provider.created(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_row_too_large_is_refused_alone() {
    let provider = Provider::new();
    let service = builder(&provider, &["a"], &MemoryBatches::new()).api(Narrow::new(0, 1_000));
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let large = ask(&"x".repeat(1_000));
    let mut rows = rows(&service, prompts(10));
    let error = route(&provider, &service).oneshot(large).await.unwrap_err();
    let RouteError::Batch(error) = error else { panic!("{error}") };
    assert_eq!((error.class(), error.is_redrivable()), (Class::TooLarge, false));
    answers(&mut rows, secs(600)).await;
    assert_eq!(provider.created(), 1);
}

// Who waits, and who is woken.

#[tokio::test(start_paused = true)]
async fn one_of_those_who_wait_is_woken_for_an_event_and_each_for_its_own_answer() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    let woken = |rows: &[Spawned]| rows.iter().filter(|row| row.is_woken()).count();
    // The chunk is full: its course goes as far as the first wait.
    for _ in 0..20 {
        rows.iter_mut().filter(|row| row.is_woken()).for_each(|row| assert_pending!(row.poll()));
        tokio::task::yield_now().await;
    }
    assert_eq!((provider.created(), woken(&rows)), (1, 0), "nobody has anything to do");
    run(&mut rows, secs(5)).await;
    tokio::time::sleep(secs(29)).await;
    assert_eq!(woken(&rows), 1, "for the first poll");
    run(&mut rows, secs(20)).await;
    assert_eq!(woken(&rows), 0);
    tokio::time::sleep(secs(60)).await;
    assert_eq!(woken(&rows), 1);
    let first = rows.iter().position(task::Spawn::is_woken).unwrap();
    for _ in 0..20 {
        if rows[first].is_woken() && rows[first].poll().is_ready() {
            break;
        }
    }
    assert_eq!(woken(&rows[..first]) + woken(&rows[first + 1..]), 9, "each has its answer");
}

#[tokio::test(start_paused = true)]
async fn whoever_drives_may_be_dropped_at_any_point_and_another_goes_on() {
    // Each call takes ten seconds, so that drops fall into every step: the linger, the create, polls, the results.
    for nth in 0..16 {
        let provider = Provider::new();
        provider.slow(secs(10));
        let service = service(&provider, &["a"], &MemoryBatches::new()).await;
        let mut rows = rows(&service, prompts(4));
        let (mut answered, mut calls, mut dropped) = (0, 0, 0);
        for _ in 0..600 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let Some(at) = rows.iter().position(task::Spawn::is_woken) else { continue };
            if calls >= nth && dropped < 3 && rows.len() > 1 {
                // Called, and never polled.
                drop(rows.remove(at));
                dropped += 1;
            } else if rows[at].poll().is_ready() {
                drop(rows.remove(at));
                answered += 1;
            }
            calls += 1;
        }
        assert_eq!((rows.len(), answered + dropped), (0, 4), "from call {nth}");
        assert!(answered > 0 && provider.created() == 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_nobody_waits_for_any_more_is_not_submitted_and_what_is_runs_on() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(9));
    some.truncate(8);
    run(&mut some, secs(5)).await;
    assert_eq!(provider.state().batches[0].rows.len(), 8);
    drop(some);
    let mut again = rows(&service, prompts(8));
    answers(&mut again, secs(600)).await;
    assert_eq!(provider.created(), 1, "they are answered by the batch that runs");
}

#[tokio::test(start_paused = true)]
async fn the_same_request_of_two_callers_is_one_row_and_counts_once() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, ["row 1", "row 1"]);
    let [one, two] = answers(&mut rows, secs(600)).await.try_into().unwrap();
    assert_eq!((said_by(&one), said_by(&two)), ("answer to row 1".to_owned(), "answer to row 1".to_owned()));
    let mut told: Vec<_> = [&one, &two]
        .iter()
        .map(|answer| {
            (
                answer.extensions().get::<Restored>().copied(),
                answer.extensions().get::<Stamp>().unwrap().usage.is_some(),
            )
        })
        .collect();
    told.sort_by_key(|(shared, _)| shared.is_some());
    assert_eq!(told, [(None, true), (Some(Restored::Shared), false)]);
    assert_eq!(provider.state().batches[0].rows.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_nobody_took_is_read_again_for_who_asks_again() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut some = rows(&service, prompts(2));
    run(&mut some[..1], secs(600)).await;
    assert!(some[1].is_woken());
    drop(some);
    let mut again = [task::spawn(service.clone().call(ask("row 1")))];
    answers(&mut again, secs(600)).await;
    assert_eq!((provider.created(), provider.calls_of(&Method::GET, "results")), (1, 2));
}

/// Records of which each takes three seconds, as a body does.
#[derive(Clone)]
struct Slow(MemoryBatches);

impl BatchStore for Slow {
    type Load = <MemoryBatches as BatchStore>::Load;
    type Row = Pin<Box<dyn std::future::Future<Output = Result<Option<Bytes>, BoxError>> + Send>>;
    type Write = Pin<Box<dyn std::future::Future<Output = Result<(), BoxError>> + Send>>;

    fn load(&self) -> Self::Load {
        self.0.load()
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        let row = self.0.row(token, place);
        Box::pin(async {
            tokio::time::sleep(secs(3)).await;
            row.await
        })
    }

    fn write(&self, change: BatchChange) -> Self::Write {
        let written = self.0.write(change);
        Box::pin(async {
            tokio::time::sleep(secs(3)).await;
            written.await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn who_is_handed_back_and_asks_again_at_once_finds_the_same_batch() {
    let provider = Provider::new();
    for _ in 0..6 {
        provider.fault(Method::GET, "results", 404);
    }
    let service = service(&provider, &["a"], &Slow(MemoryBatches::new())).await;
    let mut some = rows(&service, prompts(3));
    let [error] = errors(&mut some[..1], secs(3_600)).await.try_into().unwrap();
    assert!(matches!(error.failure(), BatchFailure::Unread { .. }), "{error}");
    // The others have yet to be handed back.
    some[0] = task::spawn(service.clone().call(ask("row 0")));
    errors(&mut some, secs(3_600)).await;
    assert_eq!(provider.created(), 1);
    answers(&mut again(&service, prompts(3)), secs(3_600)).await;
    assert_eq!(provider.created(), 1);
}

/// Records that cannot always be read.
#[derive(Clone, Default)]
struct Broken(MemoryBatches, Arc<AtomicBool>);

impl BatchStore for Broken {
    type Load = std::future::Ready<Result<Vec<(Token, Bytes)>, BoxError>>;
    type Row = <MemoryBatches as BatchStore>::Row;
    type Write = <MemoryBatches as BatchStore>::Write;

    fn load(&self) -> Self::Load {
        match self.1.load(SeqCst) {
            true => std::future::ready(Err("no".into())),
            false => self.0.load(),
        }
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        self.0.row(token, place)
    }

    fn write(&self, change: BatchChange) -> Self::Write {
        self.0.write(change)
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_cannot_be_read_just_now_is_not_one_that_is_gone() {
    let provider = Provider::new();
    let store = Broken::default();
    let service = service(&provider, &["a"], &store).await;
    let mut some = rows(&service, prompts(2));
    run(&mut some[..1], secs(600)).await;
    drop(some);
    store.1.store(true, SeqCst);
    for _ in 0..2 {
        let [error] = errors(&mut again(&service, ["row 1"]), secs(600)).await.try_into().unwrap();
        assert!(matches!(error.failure(), BatchFailure::Store(_)), "{error}");
    }
    store.1.store(false, SeqCst);
    answers(&mut again(&service, ["row 1"]), secs(600)).await;
    assert_eq!(provider.created(), 1);
}

#[tokio::test(start_paused = true)]
async fn after_a_panic_the_batch_stands_and_answers_who_asks_again() {
    for created in [true, false] {
        let provider = Provider::new();
        let api = Narrow::new(0, 1_000);
        api.panics(if created { "retrieved" } else { "created" });
        let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).api(api.clone());
        let service: BatchService = service.open(provider.service()).await.unwrap();
        let mut some = again(&service, prompts(2));
        let mut ends = [None, None];
        for _ in 0..1_000 {
            for (row, end) in some.iter_mut().zip(&mut ends) {
                if end.is_none() {
                    let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| row.poll()));
                    if let Ok(Poll::Ready(of)) = polled {
                        *end = Some(of.expect_err("it is not answered"));
                    }
                }
            }
            if ends.iter().all(Option::is_some) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        drop(some);
        for error in ends.into_iter().flatten() {
            assert!(matches!(error.failure(), BatchFailure::Broken(_)), "{error}");
        }
        answers(&mut again(&service, prompts(2)), secs(3_600)).await;
        assert_eq!(provider.created(), 1, "created: {created}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_leaves_and_asks_again_at_whatever_moment_has_the_answer_of_the_same_batch() {
    // Calls take eight seconds, so that moments fall into the create, a poll, and the results.
    for resumed in [false, true] {
        for leaves in (0..130).step_by(5) {
            for after in [1, 2, 7, 30] {
                let provider = Provider::new();
                provider.slow(secs(8)).plan([Plan { takes: Some(secs(40)), ..Plan::default() }]);
                let store = Slow(MemoryBatches::new());
                let mut service = service(&provider, &["a"], &store).await;
                let mut some = rows(&service, prompts(10));
                if resumed {
                    run(&mut some, secs(20)).await;
                    drop((some, service));
                    service = self::service(&provider, &["a"], &store).await;
                    some = rows(&service, prompts(2));
                }
                let mut ends: Vec<_> = some.iter().map(|_| None).collect();
                for second in 0..400 {
                    if second == leaves && ends[1].is_none() {
                        some[1] = task::spawn(service.clone().call(ask("nobody asks")));
                    }
                    if second == leaves + after && ends[1].is_none() {
                        some[1] = task::spawn(service.clone().call(ask("row 1")));
                        if let std::task::Poll::Ready(end) = some[1].poll() {
                            ends[1] = Some(end);
                        }
                    }
                    let away = second >= leaves && second < leaves + after;
                    for (row, (some, end)) in some.iter_mut().zip(&mut ends).enumerate() {
                        if end.is_none() && some.is_woken() && !(away && row == 1) {
                            if let std::task::Poll::Ready(of) = some.poll() {
                                *end = Some(of);
                            }
                        }
                    }
                    tokio::time::sleep(secs(1)).await;
                }
                for (row, end) in ends.into_iter().enumerate() {
                    assert!(end.is_some(), "{row} of {leaves} + {after} has not ended");
                    let end = end.unwrap();
                    assert_eq!(said_by(&end.unwrap()), format!("answer to row {row}"));
                }
                assert_eq!(
                    provider.created(),
                    1,
                    "left after {leaves} s, came back after {after} s, resumed: {resumed}"
                );
                assert!(provider.billed().values().all(|times| *times == 1));
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_on_several_threads_are_all_answered() {
    let provider = Provider::new();
    let takes = Some(Duration::from_millis(300));
    provider.plan([(); 60].map(|()| Plan { takes, ..Plan::default() }));
    let service = builder(&provider, &["a", "b"], &MemoryBatches::new()).chunk_rows(20).poll(secs(1), secs(1));
    let service: BatchService = service.linger(Duration::from_millis(50)).open(provider.service()).await.unwrap();
    let callers: Vec<_> = (0..400)
        .map(|row| {
            let service = service.clone();
            tokio::spawn(async move {
                let answer = service.oneshot(ask(&format!("row {row}")));
                // Some are impatient, once.
                match row % 7 {
                    0 => tokio::time::timeout(Duration::from_millis(row % 90), answer).await.ok(),
                    _ => Some(answer.await),
                }
            })
        })
        .collect();
    for (row, caller) in callers.into_iter().enumerate() {
        if let Some(end) = caller.await.unwrap() {
            assert_eq!(said_by(&end.unwrap()), format!("answer to row {row}"));
        } else {
            assert_eq!(row % 7, 0);
        }
    }
    assert!(provider.billed().values().all(|times| *times == 1));
}

// Gathering, orgs and bounds.

#[tokio::test(start_paused = true)]
async fn a_chunk_goes_when_it_is_full_or_has_waited_or_is_flushed() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut full = rows(&service, prompts(10));
    run(&mut full, Duration::ZERO).await;
    assert_eq!(provider.created(), 1, "full");
    let mut some = rows(&service, ["more 1"]);
    run(&mut some, Duration::from_millis(1_500)).await;
    assert_eq!(provider.created(), 1);
    run(&mut some, secs(1)).await;
    assert_eq!(provider.created(), 2, "it has waited for two seconds");
    let mut some = rows(&service, ["more 2"]);
    service.handle().flush();
    run(&mut some, Duration::ZERO).await;
    assert_eq!(provider.created(), 3, "flushed");
}

#[tokio::test(start_paused = true)]
async fn a_chunk_waits_for_the_next_row_from_its_last_one_and_not_for_ever() {
    let provider = Provider::new();
    let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(1_000);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut some = vec![];
    let started = tokio::time::Instant::now();
    while provider.created() == 0 {
        some.extend(rows(&service, [format!("row {}", some.len())]));
        run(&mut some, Duration::from_millis(1_500)).await;
    }
    // Thirty times the two seconds that are waited for a row.
    assert_eq!((some.len(), started.elapsed()), (40, secs(60)));
    let mut few = rows(&service, ["few 1"]);
    run(&mut few, Duration::from_millis(1_500)).await;
    few.extend(rows(&service, ["few 2"]));
    run(&mut few, Duration::from_millis(1_500)).await;
    assert_eq!(provider.created(), 1);
    run(&mut few, Duration::from_millis(500)).await;
    assert_eq!(provider.created(), 2, "a pause of two seconds");
}

#[tokio::test(start_paused = true)]
async fn while_more_rows_are_expected_a_chunk_waits_for_them_and_not_for_ever() {
    let provider = Provider::new();
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let handle = service.handle();
    let more = handle.expect_more();
    let mut some = rows(&service, ["row 1"]);
    run(&mut some, secs(50)).await;
    assert_eq!(provider.created(), 0);
    run(&mut some, secs(11)).await;
    assert_eq!(provider.created(), 1, "they did not come");
    some.extend(rows(&service, ["row 2"]));
    run(&mut some, secs(1)).await;
    drop(more);
    run(&mut some, Duration::from_millis(500)).await;
    assert_eq!(provider.created(), 1);
    run(&mut some, Duration::from_millis(500)).await;
    assert_eq!(provider.created(), 2, "none are expected any more");
    let _more = handle.expect_more();
    some.extend(rows(&service, ["row 3"]));
    handle.flush();
    run(&mut some, Duration::ZERO).await;
    assert_eq!(provider.created(), 3, "it is said that none come");
}

#[tokio::test(start_paused = true)]
async fn when_a_place_comes_free_a_chunk_waits_for_the_rows_that_come_then() {
    let provider = Provider::new();
    provider.plan([Plan { takes: Some(secs(900)), ..Plan::default() }]);
    let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).in_flight(1);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut first = rows(&service, prompts(10));
    run(&mut first, secs(10)).await;
    let mut few = rows(&service, ["few 1", "few 2", "few 3"]);
    run(&mut few, secs(600)).await;
    assert_eq!(provider.created(), 1, "there is no place");
    answers(&mut first, secs(1_200)).await;
    run(&mut few, secs(1)).await;
    assert_eq!(provider.created(), 1);
    few.extend(rows(&service, (0..7).map(|row| format!("more {row}"))));
    run(&mut few, Duration::ZERO).await;
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [10, 10]);
}

#[tokio::test(start_paused = true)]
async fn a_row_of_a_kind_that_is_rare_goes_though_full_chunks_of_others_never_end() {
    let provider = Provider::new();
    let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).in_flight(1);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut others = rows(&service, prompts(10));
    run(&mut others, secs(1)).await;
    let mut request = ask("rare");
    request.headers_mut().insert("anthropic-beta", http::HeaderValue::from_static("another"));
    let mut rare = vec![task::spawn(service.clone().call(request))];
    let mut came = 10;
    while run(&mut rare, secs(5)).await[0].is_none() {
        // Two full chunks wait for a place at any time.
        let queued = usize::try_from(service.handle().snapshot().queued).unwrap();
        others.extend(rows(&service, (queued..20).map(|row| format!("other {}", came + row))));
        came += 20;
        let done = run(&mut others, Duration::ZERO).await;
        let mut done = done.iter().map(Option::is_some);
        others.retain(|_| !done.next().unwrap());
        assert!(provider.created() < 8, "it waits for ever");
    }
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert!(sizes.contains(&1), "{sizes:?}");
}

#[tokio::test(start_paused = true)]
async fn a_row_that_would_make_a_chunk_too_large_begins_the_next_one() {
    let provider = Provider::new();
    // Rows of nearly 500 bytes: two go together, and three do not.
    let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).chunk_bytes(1_200);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let large: Vec<_> = (0..5).map(|row| format!("row {row} {}", "x".repeat(300))).collect();
    let mut rows = rows(&service, &large);
    run(&mut rows, Duration::ZERO).await;
    assert_eq!(provider.created(), 2, "two are as full as they get, and the fifth row waits for more");
    answers(&mut rows, secs(600)).await;
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [2, 2, 1]);
}

#[tokio::test(start_paused = true)]
async fn chunks_go_to_the_orgs_in_turn_and_no_org_has_more_than_its_places() {
    let provider = Provider::new();
    let service = builder(&provider, &["a", "b"], &MemoryBatches::new()).chunk_rows(10).in_flight(2);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    assert_eq!(service.live_bound(), 60, "with those that are gathered meanwhile");
    let mut rows = rows(&service, prompts(75));
    run(&mut rows, secs(10)).await;
    let keys = |from: usize| provider.state().batches[from..].iter().map(|batch| batch.key.clone()).collect::<Vec<_>>();
    assert_eq!(keys(0), ["sk-a", "sk-b", "sk-a", "sk-b"]);
    let now = service.handle().snapshot();
    assert_eq!(
        (now.gathered, now.queued, now.in_batches),
        (5, 30, 40),
        "what is not full waits for more while no org has a place"
    );
    for org in &now.orgs {
        assert_eq!(org.batches.len(), 2);
        for batch in &org.batches {
            assert_eq!((batch.stage, batch.rows), (BatchStage::Running, 10));
            assert!(batch.id.is_some() && batch.next_poll.unwrap() <= secs(33) && batch.age >= secs(9));
            assert_eq!(batch.counts.unwrap().processing, 10);
        }
    }
    answers(&mut rows, secs(600)).await;
    assert_eq!(provider.created(), 8);
    assert_eq!(keys(4).iter().filter(|key| *key == "sk-a").count(), 2);
}

#[tokio::test(start_paused = true)]
async fn batches_are_asked_about_ever_more_rarely() {
    let provider = Provider::new();
    provider.plan([Plan { takes: Some(secs(900)), ..Plan::default() }]);
    let service = service(&provider, &["a"], &MemoryBatches::new()).await;
    let mut rows = rows(&service, prompts(10));
    answers(&mut rows, secs(1_200)).await;
    let state = provider.state();
    let polls = &state.batches[0].polls;
    for (pair, expected) in polls.windows(2).zip([45.0, 67.5, 101.25, 120.0, 120.0, 120.0]) {
        let wait = (pair[1] - pair[0]).as_secs_f64();
        assert!((wait / expected - 1.0).abs() <= 0.11, "{wait} s, not {expected} s");
    }
    assert!(polls.len() <= 11);
}

#[tokio::test(start_paused = true)]
async fn settings_out_of_range_are_refused_by_name() {
    let provider = Provider::new();
    let names = ["a"];
    let base = || builder(&provider, &names, &MemoryBatches::new());
    for (field, wrong) in [
        ("chunk_rows", base().chunk_rows(0)),
        ("chunk_rows", base().chunk_rows(100_001)),
        ("chunk_bytes", base().chunk_bytes(0)),
        ("chunk_bytes", base().chunk_bytes(256_000_001)),
        ("in_flight", base().in_flight(0)),
        ("linger", base().linger(secs(3_601))),
        ("timeout", base().timeout(secs(0))),
        ("poll", base().poll(Duration::ZERO, secs(120))),
        ("poll", base().poll(secs(60), secs(30))),
        ("stuck_after", base().stuck_after(Some(Duration::from_millis(999)))),
        ("look_again", base().look_again(Duration::from_millis(999))),
        ("grace", base().grace(secs(1 << 30))),
    ] {
        let opened: Result<BatchService, _> = wrong.open(provider.service()).await;
        let Err(BatchOpenError::Config(error)) = opened else { panic!("{field}") };
        assert_eq!(error.field(), field);
    }
}

/// Anthropic, where the first batches fail, since the org's queue is full, and rows are small.
#[derive(Clone, Debug)]
struct Narrow {
    crowded: Arc<AtomicUsize>,
    most: usize,
    /// What panics, once.
    panics: Arc<Mutex<Option<&'static str>>>,
    /// What has ended has failed.
    fails: bool,
    /// Of a full queue it tells when a batch is to be created, and not of a batch that has failed.
    tells_at_once: bool,
}

impl Narrow {
    fn new(crowded: usize, most: usize) -> Self {
        Narrow { crowded: Arc::new(crowded.into()), most, panics: Arc::default(), fails: false, tells_at_once: false }
    }

    fn panics(&self, name: &'static str) {
        *self.panics.lock().unwrap() = Some(name);
    }

    fn is_in(&self, name: &str) {
        let panics = self.panics.lock().unwrap().take_if(|panics| *panics == name);
        assert!(panics.is_none(), "as told");
    }
}

macro_rules! as_anthropic {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)+) => {
        $(fn $name(&self, $($arg: $type),*) -> $out { Anthropic.$name($($arg),*) })+
    };
}

impl BatchApi for Narrow {
    as_anthropic! {
        bounds() -> Bounds;
        upload(token: &str, rows: &[Bytes]) -> Option<Request<Bytes>>;
        uploaded(answer: &Response<Bytes>) -> Result<String, ApiError>;
        create(group: &Group, token: &str, file: Option<&str>, rows: &[Bytes]) -> Request<Bytes>;
        retrieve(id: &str) -> Request<Bytes>;
        cancel(id: &str) -> Request<Bytes>;
        list(after: Option<&str>) -> Request<Bytes>;
        listed(answer: &Response<Bytes>) -> Result<Page, ApiError>;
        matches(remote: &Remote, submission: &Submission<'_>) -> Match;
        results(remote: &Remote) -> Vec<Request<Bytes>>;
        result(line: &[u8]) -> Result<Option<RowResult>, ApiError>;
    }

    fn row(&self, custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError> {
        let (bytes, most) = (request.body().len(), self.most);
        if bytes > most { Err(RowError::TooLarge { bytes, most }) } else { Anthropic.row(custom_id, request) }
    }

    fn retrieved(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        self.is_in("retrieved");
        let mut remote = Anthropic.retrieved(answer)?;
        if self.fails && matches!(remote.state, RemoteState::Ended(_)) {
            remote.state = RemoteState::Failed { reason: "as told".to_owned(), queue_full: false, rows: vec![] };
        }
        Ok(remote)
    }

    fn created(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        self.is_in("created");
        let mut remote = Anthropic.created(answer)?;
        if self.crowded.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            let reason = "token_limit_exceeded".to_owned();
            if self.tells_at_once {
                return Err(ApiError::QueueFull(reason));
            }
            remote.state = RemoteState::Failed { reason, queue_full: true, rows: vec![] };
        }
        Ok(remote)
    }
}

#[tokio::test(start_paused = true)]
async fn rows_wait_for_room_in_the_orgs_queue_and_go_in_smaller_batches() {
    for tells_at_once in [false, true] {
        let provider = Provider::new();
        // The provider in this test works on what it says has failed: it never does, in truth.
        provider.plan([(); 3].map(|()| Plan { stuck: true, ..Plan::default() }));
        let api = Narrow { tells_at_once, ..Narrow::new(3, 1_000) };
        let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(8).api(api);
        let service: BatchService = service.open(provider.service()).await.unwrap();
        let mut rows = rows(&service, prompts(8));
        answers(&mut rows, secs(3_600)).await;
        let created: Vec<_> = provider.state().batches.iter().map(|batch| batch.created).collect();
        let waits: Vec<_> = created.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
        assert_eq!((&waits[..3], waits[4]), (&[60, 120, 0][..], 0), "longer each time");
        assert!((60..95).contains(&waits[3]), "or until a batch is seen to have ended: {waits:?}");
        let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
        assert_eq!(sizes, [8, 8, 4, 4, 2, 2]);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_failed_batch_has_done_is_read_and_not_paid_for_again() {
    for archived in [false, true] {
        let provider = Provider::new();
        provider
            .plan([Plan { expires: Some(4), archived, ..Plan::default() }, Plan { stuck: true, ..Plan::default() }]);
        let api = Narrow { fails: true, ..Narrow::new(0, 1_000) };
        let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).api(api);
        let service: BatchService = service.open(provider.service()).await.unwrap();
        let mut some = rows(&service, prompts(10));
        let ends = run(&mut some, secs(600)).await;
        let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
        if archived {
            let is_unread =
                |end: Result<_, BatchError<_>>| matches!(end.unwrap_err().failure(), BatchFailure::Unread { .. });
            assert!(ends.into_iter().all(|end| is_unread(end.expect("it has ended"))));
            assert_eq!(sizes, [10]);
        } else {
            let answered = ends.into_iter().flatten().filter(Result::is_ok).count();
            assert_eq!((answered, &sizes[..]), (4, &[10, 6][..]));
        }
    }
}

// The end of a process.

#[tokio::test(start_paused = true)]
async fn a_later_process_goes_on_wherever_an_earlier_one_was_killed_and_submits_nothing_twice() {
    for (plan, latest) in [
        (Plan { takes: Some(secs(40)), ..Plan::default() }, 100),
        (Plan { takes: Some(secs(40)), lost: true, ..Plan::default() }, 100),
        (Plan { takes: Some(secs(40)), expires: Some(4), hidden: secs(20), ..Plan::default() }, 160),
    ] {
        // Rows that go into another batch are in none for two seconds.
        let step = if plan.expires.is_some() { 1_300 } else { 2_900 };
        for millis in (0..latest * 1_000).step_by(step) {
            let provider = Provider::new();
            provider.slow(secs(2)).plan([plan.clone(), Plan { takes: Some(secs(40)), ..Plan::default() }]);
            let store = MemoryBatches::new();
            let first = service(&provider, &["a"], &store).await;
            let mut some = rows(&first, prompts(10));
            run(&mut some, Duration::from_millis(millis)).await;
            // Nothing of it is polled again.
            drop((some, first));
            tokio::time::sleep(secs(millis % 100)).await;
            let second = service(&provider, &["a"], &store).await;
            let mut some = rows(&second, prompts(10));
            answers(&mut some, secs(6 * 3_600)).await;
            let billed = provider.billed();
            assert_eq!(billed.len(), 10);
            assert!(billed.values().all(|times| *times == 1), "killed after {millis} ms: {billed:?} {plan:?}");
            assert_eq!(
                provider.created(),
                if plan.expires.is_some() { 2 } else { 1 },
                "killed after {millis} ms, {plan:?}"
            );
        }
    }
}

/// The provider's clock, `by` so many seconds behind.
fn behind(provider: &Provider, by: &Arc<AtomicUsize>) -> impl Fn() -> SystemTime + Send + Sync + 'static {
    let (clock, by) = (provider.clock(), by.clone());
    move || clock() - secs(by.load(SeqCst) as u64)
}

#[tokio::test(start_paused = true)]
async fn of_a_row_that_was_in_two_batches_the_later_one_counts_though_the_clock_was_set_back() {
    let (provider, store, by) = (Provider::new(), MemoryBatches::new(), Arc::new(AtomicUsize::new(0)));
    provider.plan([Plan { expires: Some(1), ..Plan::default() }, Plan { takes: Some(secs(900)), ..Plan::default() }]);
    let open = builder(&provider, &["a"], &store).chunk_rows(10).clock(behind(&provider, &by));
    let first: BatchService = open.open(provider.service()).await.unwrap();
    let mut some = rows(&first, prompts(10));
    run(&mut some, secs(10)).await;
    by.store(3_600, SeqCst);
    run(&mut some, secs(200)).await;
    assert_eq!(provider.created(), 2);
    drop((some, first));
    let next = service(&provider, &["a"], &store).await;
    answers(&mut rows(&next, prompts(10).into_iter().skip(1)), secs(3_600)).await;
    assert_eq!(provider.created(), 2);
}

#[tokio::test(start_paused = true)]
async fn who_goes_on_with_an_earlier_batch_of_a_row_does_not_take_it_out_of_the_later_one() {
    let (provider, store) = (Provider::new(), MemoryBatches::new());
    let takes = Some(secs(900));
    provider.plan([Plan { expires: Some(0), takes, ..Plan::default() }, Plan { takes, ..Plan::default() }]);
    let open = async || service(&provider, &["a"], &store).await;
    let first = open().await;
    let mut some = rows(&first, prompts(10));
    run(&mut some, secs(10)).await;
    drop((some, first));
    // Half of its rows go into the next one.
    let second = open().await;
    let mut some = rows(&second, prompts(5));
    run(&mut some, secs(1_100)).await;
    assert_eq!(provider.created(), 2);
    drop((some, second));
    // One of the others is asked for first.
    let third = open().await;
    answers(&mut rows(&third, ["row 5"]), secs(3_600)).await;
    answers(&mut rows(&third, prompts(5)), secs(3_600)).await;
    let sizes: Vec<_> = provider.state().batches.iter().map(|batch| batch.rows.len()).collect();
    assert_eq!(sizes, [10, 5, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_record_of_a_time_when_the_clock_was_wrong_is_not_taken_for_old() {
    let (provider, store) = (Provider::new(), MemoryBatches::new());
    provider.plan([Plan { takes: Some(secs(900)), ..Plan::default() }]);
    let years = Arc::new(AtomicUsize::new(usize::try_from(provider::EPOCH).unwrap() - 60));
    let open = builder(&provider, &["a"], &store).chunk_rows(10).clock(behind(&provider, &years));
    let first: BatchService = open.open(provider.service()).await.unwrap();
    let mut some = rows(&first, prompts(10));
    run(&mut some, secs(10)).await;
    drop((some, first));
    let next = service(&provider, &["a"], &store).await;
    answers(&mut rows(&next, prompts(10)), secs(3_600)).await;
    assert_eq!((provider.created(), provider.state().cancels), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stuck_batch_is_cancelled_once_wherever_the_process_was_killed() {
    for second in 600..660 {
        let provider = Provider::new();
        provider.slow(secs(4)).plan([Plan { stuck: true, ..Plan::default() }]);
        let store = MemoryBatches::new();
        let open = async || -> BatchService {
            builder(&provider, &["a"], &store).stuck_after(Some(secs(600))).open(provider.service()).await.unwrap()
        };
        let first = open().await;
        let mut some = rows(&first, prompts(3));
        run(&mut some, secs(second)).await;
        drop((some, first));
        let second = open().await;
        let mut rows = rows(&second, prompts(3));
        let ends = run(&mut rows, secs(3_600)).await;
        for end in ends {
            // One that was cancelled and read by the first process goes into another batch.
            match end.expect("it has ended") {
                Ok(answer) => assert!(said_by(&answer).starts_with("answer")),
                Err(error) => assert!(matches!(error.failure(), BatchFailure::Stuck(_)), "{error}"),
            }
        }
        assert!((1..=2).contains(&provider.state().cancels));
        assert!(provider.billed().values().all(|times| *times == 1));
    }
}

#[tokio::test(start_paused = true)]
async fn with_the_service_shut_down_batches_are_left_or_cancelled_as_told() {
    for cancels in [false, true] {
        let provider = Provider::new();
        let store = MemoryBatches::new();
        let open = builder(&provider, &["a"], &store).chunk_rows(10).in_flight(1).cancel_on_exit(cancels);
        let service: BatchService = open.open(provider.service()).await.unwrap();
        let mut some = rows(&service, prompts(25));
        run(&mut some, secs(10)).await;
        let handle = service.handle();
        assert_eq!(handle.running().len(), 1);
        let told = handle.shutdown().await;
        let (all, none) = if cancels { (&told.cancelled, &told.left) } else { (&told.left, &told.cancelled) };
        assert_eq!((all.len(), none.len()), (1, 0));
        assert_eq!(all[0].to_string(), "batch msgbatch_1 of org a");
        let errors = errors(&mut some, secs(1)).await;
        let in_batch = errors.iter().filter(|error| matches!(error.failure(), BatchFailure::Closed(Some(_)))).count();
        assert_eq!((in_batch, errors.iter().filter(|error| error.request().is_some()).count()), (10, 25));
        let late = service.clone().oneshot(ask("late")).await.unwrap_err();
        assert!(matches!(late.failure(), BatchFailure::Closed(None)) && late.is_redrivable());
        assert_eq!((provider.created(), provider.state().cancels), (1, usize::from(cancels)));
        drop((some, handle, service));
        let service = builder(&provider, &["a"], &store).open::<_, _, _, BatchBody>(provider.service()).await.unwrap();
        let mut some = rows(&service, prompts(10));
        answers(&mut some, secs(3_600)).await;
        assert_eq!(provider.created(), if cancels { 2 } else { 1 });
        assert!(provider.billed().values().all(|times| *times == 1));
    }
}

#[tokio::test(start_paused = true)]
async fn the_same_requests_come_to_the_same_ends_on_both_paths() {
    let provider = Provider::new();
    let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(100);
    let service: BatchService<Held<Answer<Full<Bytes>>>> = service.open(provider.service()).await.unwrap();
    let prompt = |row: usize| match row % 15 {
        0 => format!("invalid {row}"),
        5 => format!("overloaded {row}"),
        10 => format!("failing {row}"),
        _ => format!("row {row}"),
    };
    let retry = RateLimitRetryLayer::builder().max_attempts(2).build().unwrap();
    let direct = Stack::new(orgs(&["a"])).retry(retry).build(provider.service()).unwrap();
    let mut ends = BTreeMap::<usize, Vec<String>>::new();
    for way in [Way::Direct, Way::Batch] {
        let route = Route::new(direct.clone(), service.clone(), way);
        let mut rows: Vec<_> = (0..500).map(|row| task::spawn(route.clone().oneshot(ask(&prompt(row))))).collect();
        for (row, end) in run(&mut rows, secs(6 * 3_600)).await.into_iter().enumerate() {
            let end = match end.expect("it has ended") {
                Ok(answer) => {
                    let stamp = answer.extensions().get::<Stamp>().unwrap();
                    format!(
                        "{} {:?} {:?} {:?}",
                        answer.status(),
                        stamp.outcome.class,
                        stamp.usage,
                        answer.body().get_ref().bytes()
                    )
                }
                Err(RouteError::Direct(error)) => format!("direct {:?} {}", error.class(), error.is_redrivable()),
                Err(RouteError::Batch(error)) => format!("batch {:?} {}", error.class(), error.is_redrivable()),
                Err(error) => panic!("{error}"),
            };
            ends.entry(row).or_default().push(end);
        }
    }
    for (row, ends) in &ends {
        assert_eq!(ends[0], ends[1], "row {row}");
    }
    assert_eq!(ends.values().filter(|ends| !ends[0].starts_with("200 OK Ok")).count(), 100);
}

#[tokio::test(start_paused = true)]
async fn what_stands_in_a_batch_is_held_by_this_process_and_by_the_next() {
    let provider = Provider::new();
    let store = MemoryBatches::new();
    let key = |prompt: &str| {
        let request = ask(prompt);
        let body = request.body().clone().collect().now_or_never().unwrap().unwrap().to_bytes();
        Key::of(&request, &body, &KeyHeaders::default())
    };
    let first = service(&provider, &["a"], &store).await;
    let mut waiting = rows(&first, ["one"]);
    first.handle().flush();
    assert!(first.handle().holds(&key("one")) && !first.handle().holds(&key("two")));
    run(&mut waiting, secs(1)).await;
    assert_eq!(first.handle().running().len(), 1);
    drop((waiting, first));
    let next = service(&provider, &["a"], &store).await;
    assert!(next.handle().holds(&key("one")) && !next.handle().holds(&key("two")));
    answers(&mut rows(&next, ["one"]), secs(600)).await;
    assert_eq!(provider.state().batches.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_chunk_that_only_an_org_without_a_place_takes_waits_for_that_place_and_not_in_a_loop() {
    const OLD: &str = "claude-haiku-4-0";
    let provider = Provider::new();
    provider.plan([Plan { takes: Some(secs(900)), ..Plan::default() }]);
    let orgs = orgs(&["a", "b"]);
    let service = BatchService::builder(orgs.clone(), MemoryBatches::new());
    let service = service.clock(provider.clock()).chunk_rows(10).in_flight(1);
    let service: BatchService = service.open(provider.service()).await.unwrap();
    orgs.get("a").unwrap().put_model_out(OLD);
    // The only place of b is taken, and a is free.
    let mut first = rows_of(&service, OLD, &prompts(10));
    run(&mut first, secs(10)).await;
    assert_eq!(provider.state().batches[0].key, "sk-b");
    let mut few = row_of(&service, OLD, "few");
    assert_pending!(few.poll());
    tokio::time::advance(secs(3)).await;
    let mut polls = 0;
    while few.is_woken() {
        assert_pending!(few.poll());
        polls += 1;
        assert!(polls < 100, "it is woken again and again");
        tokio::task::yield_now().await;
    }
    answers(&mut first, secs(1_200)).await;
    let mut few = vec![few];
    answers(&mut few, secs(600)).await;
    let keys: Vec<_> = provider.state().batches.iter().map(|batch| batch.key.clone()).collect();
    assert_eq!(keys, ["sk-b", "sk-b"]);
}

/// Answers what is created with this, as a proxy may that has forwarded it.
fn lying(
    provider: &Provider,
    status: u16,
    header: Option<(&'static str, &'static str)>,
) -> impl tower::Service<Request<Body>, Response = Response<Body>, Error = std::io::Error, Future: Send>
+ Clone
+ Send
+ 'static {
    let inner = provider.service();
    let times = Arc::new(AtomicUsize::new(0));
    service_fn(move |request: Request<Body>| {
        let mut inner = inner.clone();
        let times = times.clone();
        async move {
            let creates = request.method() == Method::POST && request.uri().path().ends_with("/batches");
            let answer = inner.call(request).await?;
            if creates && times.fetch_add(1, SeqCst) == 0 {
                let body = json!({"type": "error", "error": {"type": "api_error", "message": "as told"}});
                let mut answer = Response::builder().status(status).header("content-type", "application/json");
                if let Some((name, value)) = header {
                    answer = answer.header(name, value);
                }
                return Ok(answer.body(Full::new(Bytes::from(body.to_string()))).unwrap());
            }
            Ok(answer)
        }
    })
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_is_said_to_be_final_may_have_made_a_batch_all_the_same() {
    let mut faults = vec![];
    let last = Some(("x-should-retry", "false"));
    let answers = [500, 501, 502, 503, 504, 505, 520, 524, 408, 409].map(|status| [(status, None), (status, last)]);
    for (status, header) in answers.into_iter().flatten() {
        let provider = Provider::new();
        let store = MemoryBatches::new();
        let service = builder(&provider, &["a"], &store).chunk_rows(10);
        let service: BatchService = service.open(lying(&provider, status, header)).await.unwrap();
        let mut some = rows(&service, prompts(10));
        let ends = run(&mut some, secs(7_200)).await;
        let back = ends.iter().filter(|end| matches!(end, Some(Err(error)) if error.failure().goes_direct())).count();
        let most = provider.billed().values().max().copied();
        if back > 0 || most != Some(1) {
            faults.push((status, header, back, most, provider.created()));
        }
    }
    assert!(faults.is_empty(), "{faults:?}");
}

#[tokio::test(start_paused = true)]
async fn rows_whose_submissions_all_come_to_nothing_are_handed_back_after_a_while() {
    for status in [500, 503, 0] {
        let provider = Provider::new();
        provider.state().faults.extend((0..2_000).map(|_| (Method::POST, "/v1/messages/batches", status)));
        let service = builder(&provider, &["a"], &MemoryBatches::new()).chunk_rows(10).stuck_after(Some(secs(600)));
        let service: BatchService = service.open(provider.service()).await.unwrap();
        let mut some = rows(&service, prompts(10));
        let started = tokio::time::Instant::now();
        for error in errors(&mut some, secs(24 * 3_600)).await {
            assert!(matches!(error.failure(), BatchFailure::Unsubmitted { .. }), "{error}");
            assert!(error.request().is_some());
        }
        assert!((secs(600)..secs(900)).contains(&started.elapsed()), "{:?}", started.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn flushed_rows_of_an_org_that_dies_are_flushed_at_the_next() {
    let provider = Provider::new();
    provider.state().dead.insert("sk-a".to_owned(), 401);
    let service = builder(&provider, &["a", "b"], &MemoryBatches::new()).chunk_rows(1_000).linger(secs(3_600));
    let service: BatchService = service.open(provider.service()).await.unwrap();
    let mut some = rows(&service, prompts(3));
    service.handle().flush();
    answers(&mut some, secs(600)).await;
}
