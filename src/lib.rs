//! Composable [tower] layers that keep many organisations' API quotas busy without crossing one.
//!
//! You hold several organisations' keys for an API that allows so many requests and tokens a minute per organisation, and
//! a hundred thousand calls to make. In this order: nothing is lost, nothing that was answered is sent twice, no quota is
//! crossed, no quota is left idle.
//!
//! # One idea
//!
//! An org that must not be called now *is not ready*. A slot that is not free, a hold after a 429, a quota nearly used up:
//! each is a `Pending` from `poll_ready`, and nothing else. So the balancer picks among orgs that have a slot *now*; a 429
//! holds the org, not the request; live work tracks capacity, not the length of the queue; and nobody polls in a loop.
//!
//! # The stack
//!
//! ```text
//! drive              a bound on logical requests alive
//! (journal)          answered before? then from the file, and nothing is sent (optional)
//!   retry            two purses: errors, and 429s apart; hands the request back when it cannot go on
//!     org balance    the less loaded of two ready orgs; one line a model family; no Buffer, no task
//!       per member (an org × a model family):
//!       health       out when dead, not ready while it fails, then probed
//!       aimd limit   slots: cut on 429, grown while full and clean, held on the hint
//!       quota header pace by what the provider says remains
//!       judge        reads the answer once, says what it means, stamps it for everyone above
//!       org auth     key header and base URL
//!         any HTTP client
//! ```
//!
//! The order matters: a limiter *around* a retry would hold its slot through the backoff and see only the last answer; a
//! retry *inside* the balancer could not go to another org. Every line is a [`Layer`](tower_layer::Layer) of its own: useful
//! in a foreign stack, tested alone. [`stack`] composes them with good defaults.
//!
//! # The whole job
//!
#![cfg_attr(feature = "client", doc = "```no_run")]
#![cfg_attr(not(feature = "client"), doc = "```ignore")]
//! use bytes::Bytes;
//! use http::Request;
//! use http_body_util::Full;
//! use tower_quota::{drive::Drive, org::{Family, Orgs}, stack::Stack};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let stack = Stack::new(Orgs::from_env()?); // ANTHROPIC_API_KEY, ANTHROPIC_BATCH_KEY, ANTHROPIC_API_KEY_<TAG>
//! let family = Family::of_model("claude-haiku-4-5");
//! let bound = stack.live_bound(&family);
//! let service = stack.build(tower_quota::client::https())?; // feature `rustls`; or any client of yours
//!
//! let items = (0..100_000).map(move |item| {
//!     let body = format!(r#"{{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{{"role":"user","content":"{item}?"}}]}}"#);
//!     let request = Request::post("/v1/messages").extension(family.clone()).body(Full::new(Bytes::from(body)));
//!     (item, request.expect("a literal path"))
//! });
//! let mut drive = Drive::iter(service, items, bound)?;
//! while let Some((item, result)) = drive.next().await {
//!     match result {
//!         Ok(answer) => println!("{item}: {}", answer.status()),
//!         Err(error) => println!("{item}: {error}"), // typed; rate limited is not failed
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! # Where to look
//!
//! | you want | look at |
//! |---|---|
//! | the ready-made composition | [`stack`] |
//! | one layer in a stack of your own | [`aimd`], [`quota`], [`health`], [`balance`], [`retry`], [`judge`], [`auth`] |
//! | the orgs, their keys, what each is doing now | [`org`] |
//! | to change limits, weights and the pool while it runs | [`balance`](balance#live-control) |
//! | to refuse what no provider would take, before it is sent | [`guard`] |
//! | what an answer means, and what that implies | [`outcome`] |
//! | every way a provider says "not before" | [`hint`] |
//! | every way a provider tells a quota, and one of your own | [`dialect`] |
//! | not to send again what was answered, in this run or an earlier one | `journal` (feature `journal`) |
//! | the same requests at half the price, within a day | `batch` (feature `batch`) |
//! | a stream of requests in, outcomes out | [`drive`] |
//! | to know beforehand how long it takes, what it costs, and whether batches are the better way | [`plan`] |
//! | to be told of cuts, holds, retries, dead orgs | [`observe`] |
//! | to tell other programs what is left of the quotas | [`headroom`] |
//! | a provider to test against | `sim` (feature `sim`) |
//! | whole programs: hyper, reqwest, streaming, one layer alone, tests | `examples/` |
//!
//! # Features
//!
//! None is on by default. `client`: a ready-made hyper client; `rustls`: the same with HTTPS; `http2`: what HTTP/2 says was not
//! processed is told from what broke, where a client of yours speaks it; `config`: pools from TOML; `ietf`: the IETF `RateLimit` fields as one more [dialect](dialect); `journal`: answers kept in a file (this one and `batch` need Rust 1.90, all others 1.85); `batch`: the provider's batch API; `sim`: the simulated provider.
//!
//! [tower]: https://docs.rs/tower

#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod aimd;
pub mod auth;
pub mod balance;
#[cfg(feature = "batch")]
pub mod batch;
pub mod call;
#[cfg(feature = "client")]
pub mod client;
pub mod dialect;
pub mod drive;
mod frame;
mod gate;
pub mod guard;
pub mod headroom;
pub mod health;
pub mod hint;
#[cfg(feature = "journal")]
pub mod journal;
pub mod judge;
mod line;
pub mod observe;
pub mod org;
pub mod outcome;
pub mod plan;
mod pool;
pub mod quota;
pub mod retry;
#[cfg(feature = "sim")]
pub mod sim;
pub mod stack;
mod tail;

/// The README's programs compile: they are tests of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
