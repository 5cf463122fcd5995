//! The provider's batch API as one more service: the same requests and answers, at about half the price, within a day.
//!
//! A [`BatchService`] gathers requests, submits them as batches, asks how these stand, reads their results, and answers each caller as the
//! direct path would have. A [`Route`] stands in front of both paths: it chooses one for each request, and sends directly what came to
//! nothing in a batch.
//!
//! ```text
//! journal       (optional) answered before? then from the file
//!   route       which way
//!     direct:   the ready-made stack, or one of yours
//!     batch:    gathers, submits, polls, harvests
//!       per org: its key, what answers mean, its limits
//!         any HTTP client
//! ```
//!
//! **Where it stands:** beside the retry, not under it: a row takes minutes to hours, and what a batch could not answer goes into the next one
//! by itself. Below the [`journal`](crate::journal), which keeps the answers. Only [`drive`](crate::drive), or whatever bounds the requests
//! alive, stands above: give it [`live_bound`](BatchService::live_bound), or batches do not fill, and tell the service that
//! [more is expected](BatchHandle::expect_more) while an input is read. Where a [`Route`] sends some requests each
//! way, add the bound of the direct path: with that of the batches alone, direct requests stand in line behind rows that wait for hours.
//!
//! **Is it worth it?** Batches cost about half (Anthropic's and OpenAI's prices of 2025; look at yours) and do not count on the quotas of
//! direct calls. They are answered "within 24 hours": often in minutes, sometimes not for hours, and a batch may get stuck.
//!
//! **What is left running is billed.** Dropping callers, or the whole service, leaves its batches at the provider as they are; the log says
//! which, and so does [`BatchHandle::running`]. The same requests in a later process, with the same store, are answered by those batches. To
//! cancel them, set [`cancel_on_exit`](BatchBuilder::cancel_on_exit) and await [`shutdown`](BatchHandle::shutdown). A batch that has ended
//! answers too, as long as its record is kept: its results are fetched again, and nothing is billed.
//!
//! **At the end await [`shutdown`](BatchHandle::shutdown)**, also where every row is answered: that the last batch has ended is written
//! only while somebody polls. Without it nothing is lost, but the next process looks at that batch once more.
//!
//! ```
//! use bytes::Bytes;
//! use http::Request;
//! use http_body_util::Full;
//! use tower::ServiceExt;
//! use tower_quota::{
//!     batch::{BatchService, Route, Way},
//!     drive::Drive,
//!     journal::FileStore,
//!     org::{Credential, Org, Orgs},
//!     stack::Stack,
//! };
//! # use tower_quota::{org::Dialect, sim::{Config, OrgConfig, Sim}};
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let sim = Sim::new(Config::new(Dialect::Anthropic).org(OrgConfig::new("research", "sk-1")))?;
//! # let client = || {
//! #     let sim = sim.clone();
//! #     tower::service_fn(move |request: Request<Full<Bytes>>| sim.service().oneshot(request))
//! # };
//! # let folder = tempfile::tempdir()?;
//! let orgs = Orgs::new([Org::new("research").credential(Credential::new("sk-1"))])?;
//! let store = FileStore::open(folder.path().join("batches.journal"))?;
//! // `client()` is any HTTP client: `tower_quota::client::https()`, say.
//! let batch = BatchService::builder(orgs.clone(), store).chunk_rows(1_000).open(client()).await?;
//! let (handle, bound) = (batch.handle(), batch.live_bound());
//! let service = Route::new(Stack::new(orgs).build(client())?, batch, Way::Batch);
//!
//! let ask = |row: usize| {
//!     let body = format!(r#"{{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{{"role":"user","content":"{row}?"}}]}}"#);
//!     (row, Request::post("/v1/messages").body(Full::new(Bytes::from(body))).expect("a literal path"))
//! };
//! let mut drive = Drive::iter(service, (0..2).map(ask), bound)?;
//! while let Some((row, result)) = drive.next().await {
//!     match result {
//!         Ok(answer) => println!("{row}: {}", answer.status()),
//!         Err(error) => println!("{row}: {error}"), // typed, with the request in it
//!     }
//! }
//! handle.shutdown().await; // what is still to be written down of the last batch
//! # assert_eq!((handle.snapshot().answered, sim.truth().batch().rows_succeeded), (2, 2));
//! # Ok(()) }
//! ```
//!
//! # What becomes of a row
//!
//! | | |
//! |---|---|
//! | answered, by a success or by a refusal for good | the answer, stamped by the same [judge](crate::judge), with [`Batched`] in its extensions |
//! | answered by what may pass (overloaded, an error of the server's, nothing in it) | into the next batch, once |
//! | expired, cancelled by others, missing in the results | into the next batch, once |
//! | not answered by two batches | [`BatchFailure::Unanswered`], with the request |
//! | in a batch without a success for [four hours](BatchBuilder::stuck_after) | that is cancelled; what it had done is kept, the others are [`BatchFailure::Stuck`] |
//! | no request for a batch, or too large for one | [`BatchFailure::Row`] |
//! | in a batch that is refused as a whole | the batch is split until the row that is to blame stands alone: [`BatchFailure::Refused`] |
//! | in a batch for which the org's queue is full | it waits for another batch to end, and goes in smaller ones if need be |
//! | counted by the batch as a success, and not in its results however often these are read | [`BatchFailure::Unread`]: the batch stays recorded, and is read again when it is asked for again |
//! | to be submitted to an org that is dead | to a sibling |
//! | in a batch of an org that has died | [`BatchFailure::OrgOut`]: the batch stays recorded, and answers when the key is mended |
//!
//! A provider that cannot be reached is asked again, after a second at first, then up to a minute apart. Callers wait;
//! [`BatchView::trouble`] says why, and a [deadline](crate::drive) of the caller's is what bounds it.
//!
//! The same request of two callers at once is one row: give each a [`Salt`](crate::journal::Salt) to have them answered one by one.
//!
//! # Nothing is paid for twice
//!
//! Each step is [written](BatchStore) before it is made: that a batch is to be submitted, with its rows, before it is; its id after; that it is to be cancelled
//! before it is. A row is named by the [fingerprint](crate::journal::Key) of its request, so the same request finds its batch again. Where the reply to a submission was
//! lost, with the process or without, the org's batches are looked through: one that is ours for certain is taken; one that may be
//! (Anthropic keeps no mark of ours) has to end first, and the ids in its results say so; only when none is found twice, a minute apart, is it
//! submitted again. Records are kept as long as Anthropic keeps results, 29 days.
//!
//! A journal's file that is damaged is salvaged with the records of its batches, of which each stands in it twice.
//!
//! Known limits: a journal's file that is cut short, or damaged so much that both records of a batch are, has lost that batch, whose rows are
//! submitted anew: a warning says how many records were saved. Two processes that submit batches of the
//! same size to one org at Anthropic within an hour may, after a lost reply, wait for one another's batches to end; one that is
//! [stuck](BatchBuilder::stuck_after) is not waited for longer, and the rows are handed back as [`BatchFailure::Unlisted`]. An idle
//! service drives nothing: keep polling whoever waits.
//!
//! # Tower's contract
//!
//! `poll_ready` is always ready and reserves nothing; clones share everything. No task is spawned: batches are driven by whichever caller is
//! polled, and go on at the same point with another one when that is dropped. A caller is woken for its own answer, and now and then to drive; one
//! that was woken and is not polled holds up nobody, since the next event calls another. Once its batch is submitted a request's body
//! is in the store alone.

mod answer;
mod api;
mod builder;
mod course;
mod error;
mod file;
mod future;
mod handle;
mod law;
mod record;
mod route;
mod service;
mod state;
mod store;
mod wire;
mod works;

pub use self::{
    answer::{BatchBody, Batched},
    api::{
        Anthropic, ApiError, BatchApi, Bounds, Counts, Ending, Group, Match, OpenAi, Page, Remote, RemoteState, Row,
        RowEnd, RowError, RowResult, Submission, api_of, check_custom_id, lines,
    },
    builder::{BatchBuilder, BatchOpenError},
    error::{BatchError, BatchFailure, RemoteBatch},
    future::BatchFuture,
    handle::{BatchHandle, BatchSnapshot, BatchStage, BatchView, MoreToCome, OrgBatches, Shutdown},
    record::Token,
    route::{Choose, Route, RouteError, RouteFuture, Way},
    service::BatchService,
    store::{BatchChange, BatchRows, BatchStore, MemoryBatches},
};
