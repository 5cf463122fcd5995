//! A simulated provider of a language-model API: several organisations with their quotas, headers and faults.
//!
//! It is there to be called instead of the real one, and to say afterwards what really happened ([`Truth`]). It shares
//! no law with the rest of the crate, so that it can contradict it: only the name of the [`Dialect`] that both speak.
//!
//! - [`Sim::service`] is a tower `Service` in tokio's time: under a paused clock hours pass in milliseconds.
//! - [`Sim::serve`] is an HTTP/1.1 server on loopback.
//!
//! Both may be used at once: they are the same provider.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower::ServiceExt;
//! use tower_quota::sim::{Config, Dialect, OrgConfig, Sim};
//!
//! let config = Config::new(Dialect::Anthropic)
//!     .org(OrgConfig::new("one", "key-1").requests_per_minute(60.0));
//! let sim = Sim::new(config)?;
//! let provider = sim.service();
//! let mut statuses = Vec::new();
//! for item in 0..3 {
//!     let request = http::Request::post("/v1/messages")
//!         .header("x-api-key", "key-1")
//!         .body(format!("{{\"max_tokens\":16,\"item\":{item}}}"))?;
//!     let answer = provider.clone().oneshot(request).await?;
//!     statuses.push(answer.status().as_u16());
//! }
//! // The bucket holds two seconds' worth, that is two requests.
//! assert_eq!(statuses, [200, 200, 429]);
//! assert_eq!(sim.truth().throttled_429(), 1);
//! # Ok(())
//! # }
//! ```
//!
//! # What happens to a request
//!
//! It arrives when its body has been read whole. An unknown key gets a 401. Then its org decides, in this order and
//! under one lock:
//!
//! 1. `unauthorised`, `black_hole`, `overloaded`: answered at once, nothing charged.
//! 2. `max_concurrency` and the buckets (requests, input tokens, output tokens, tokens of both): a 429 at once unless the
//!    whole cost fits *now* in every one; a refusal charges nothing. Input costs a quarter of the body's bytes, rounded
//!    up; output is charged on arrival at the length the answer will have. An org has one set of buckets for all models: two
//!    families of one org meet in it, as two strangers on one key do.
//! 3. What the request [asks for itself](#errors-by-content): charged, an error at once.
//! 4. `error_5xx`, `reset`: charged, and over at once. `hang`: charged, and never over.
//! 5. Else a 200 after a latency, perhaps `truncate`d or `empty`. Asked for a `"stream"`, it comes as server-sent events
//!    spread over the latency: the head and the first of them after a part of it, the last at its end. What was used stands in
//!    Anthropic's `message_start` and `message_delta`; in OpenAI's last chunk, if `stream_options.include_usage` is set.
//!
//! What is over at once takes no time: a failing org is a fast one, the worst case for a load balancer. A client that
//! retries a refusal without a pause therefore spins under a paused clock.
//!
//! The headers say what the buckets held on arrival, after this request was charged, whatever comes later. The text
//! of an answer, `simulated answer <id>`, names its item: equal items get equal texts.
//!
//! # Errors by content
//!
//! `"metadata":{"simulate":"<word>"}` in a request's body decides its answer, the same at every time and by every path. Errors:
//! `invalid_request` (400), `not_found` (404), `too_large` (413), `forbidden` (403), `out_of_quota` (402; OpenAI 429
//! `insufficient_quota`), `rate_limited` (429 without a wait), `overloaded` (529; OpenAI 503), `api_error` (500), `timeout` (504).
//! Answers: `refusal`, `empty`, `max_tokens` (cut short), `in_band` (an error in a 200). Any other word is an invalid request; metadata of
//! another shape asks for nothing.
//!
//! # Batches
//!
//! | Anthropic | OpenAI |
//! |---|---|
//! | | `POST /v1/files` (a form with `purpose` `batch` and the `file`) |
//! | `POST /v1/messages/batches` | `POST /v1/batches` |
//! | `GET /v1/messages/batches/{id}` | `GET /v1/batches/{id}` |
//! | `POST /v1/messages/batches/{id}/cancel` | `POST /v1/batches/{id}/cancel` |
//! | `GET /v1/messages/batches/{id}/results` | `GET /v1/files/{id}/content` |
//! | `GET /v1/messages/batches?limit=&after_id=&before_id=` | `GET /v1/batches?limit=&after=` |
//! | | `GET` and `DELETE /v1/files/{id}` |
//!
//! Shapes, limits and checks are the real ones; [`BatchConfig`] says how long batches take and what goes wrong with them. Each of
//! these calls is a request like any other: it costs one of the org's requests and no tokens, has the quota's headers, and meets the
//! org's faults (`empty` and `in_band` excepted). What a call does is done when it arrives; its answer comes after the latency. Rows cost nothing
//! of the org's quota, and meet none of its faults. Only orgs with the `organization_id` of the one that created a batch or file see it.
//! The content of input files is not kept.
//!
//! A row is answered as the same body would be directly, if the bodies are equal byte by byte: the same text or error, and with
//! [`Config::lengths_by_item`] the same usage. Only ids differ. What it is billed for stands in [`OrgTruth::batch`] and
//! [`Truth::rows`]; [`Sim::row`] and [`Sim::batches`] tell of one.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use http_body_util::BodyExt;
//! use tower::ServiceExt;
//! use tower_quota::sim::{BatchConfig, BatchState, Config, Dialect, Latency, OrgConfig, Sim};
//!
//! let batch = BatchConfig::new().delay(Latency::new(600e3, 0.0)).row_overloaded(0.1).not_found_after_create_s(5.0);
//! let sim = Sim::new(Config::new(Dialect::Anthropic).batch(batch).org(OrgConfig::new("one", "key-1")))?;
//! let call = |method, path: String, body: String| {
//!     let request = http::Request::builder().method(method).uri(path).header("x-api-key", "key-1").body(body);
//!     let answer = sim.service().oneshot(request.expect("it is one"));
//!     async { answer.await.expect("no fault is set") }
//! };
//! let row = |i| format!(r#"{{"custom_id":"row-{i}","params":{{"model":"m","max_tokens":16,"messages":[{i}]}}}}"#);
//! let rows: Vec<String> = (0..100).map(row).collect();
//! let batches = "/v1/messages/batches".to_owned();
//! call("POST", batches.clone(), format!(r#"{{"requests":[{}]}}"#, rows.join(","))).await;
//!
//! let id = sim.batches()[0].id.clone();
//! assert_eq!(call("GET", format!("{batches}/{id}"), String::new()).await.status(), 404, "as yet");
//! tokio::time::sleep(std::time::Duration::from_secs(600)).await;
//! assert_eq!(sim.batches()[0].state, BatchState::Completed);
//! let results = call("GET", format!("{batches}/{id}/results"), String::new()).await.into_body().collect().await?.to_bytes();
//! assert_eq!(results.split(|byte| *byte == b'\n').count(), 101, "each line ends with a break");
//!
//! let batch = sim.truth().batch();
//! assert_eq!((batch.rows_succeeded + batch.rows_errored, batch.hidden, batch.results), (100, 1, 1));
//! assert_eq!(sim.truth().rows.billed_once, batch.rows_succeeded);
//! # Ok(())
//! # }
//! ```
//!
//! # From a file
//!
//! [`Config`] is `Deserialize`:
//!
//! ```
//! let config: tower_quota::sim::Config = toml::from_str(
//!     r#"
//!     dialect = "openai"
//!     seed = 7
//!     latency = { p50_ms = 80 }
//!
//!     [[orgs]]
//!     name = "one"
//!     key = "key-1"
//!     requests_per_minute = 600
//!     retry_after = "ms"
//!     error_5xx = 0.01
//!     schedule = [
//!         { at_s = 10, set = { quota_factor = 0.3 } },
//!         { at_s = 20, set = { black_hole = true } },
//!     ]
//!     "#,
//! )?;
//! // 20 at once and 100 in ten seconds; the rest at three a second.
//! assert_eq!(config.fluid_limit(120), Some(std::time::Duration::from_secs(10)));
//! # Ok::<(), toml::de::Error>(())
//! ```

mod batch;
mod bucket;
mod config;
mod draw;
mod fluid;
mod marker;
mod model;
mod server;
mod service;
mod truth;
mod wire;

pub use batch::{BatchConfig, BatchSeen, BatchState, BatchTruth, RowSeen, RowsTruth};
pub use config::{Change, Config, ConfigError, Headers, Key, OrgConfig, RetryAfter, Step};
pub use draw::{Chance, Latency};
pub use fluid::Cost;
pub use server::Server;
pub use service::{Sim, SimBody, SimError, SimFuture, SimService};
pub use truth::{BIN, Bin, Levels, OrgTruth, Truth};

pub use crate::org::Dialect;
