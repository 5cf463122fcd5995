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
//! 3. `error_5xx`, `reset`: charged, and over at once. `hang`: charged, and never over.
//! 4. Else a 200 after a latency, perhaps `truncate`d or `empty`. Asked for a `"stream"`, it comes as server-sent events
//!    spread over the latency: the head and the first of them after a part of it, the last at its end. What was used stands in
//!    Anthropic's `message_start` and `message_delta`; in OpenAI's last chunk, if `stream_options.include_usage` is set.
//!
//! What is over at once takes no time: a failing org is a fast one, the worst case for a load balancer. A client that
//! retries a refusal without a pause therefore spins under a paused clock.
//!
//! The headers say what the buckets held on arrival, after this request was charged, whatever comes later. The text
//! of an answer, `simulated answer <id>`, names its item: equal items get equal texts.
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

mod bucket;
mod config;
mod draw;
mod fluid;
mod model;
mod server;
mod service;
mod truth;
mod wire;

pub use config::{Change, Config, ConfigError, Headers, Key, OrgConfig, RetryAfter, Step};
pub use draw::{Chance, Latency};
pub use fluid::Cost;
pub use server::Server;
pub use service::{Sim, SimBody, SimError, SimFuture, SimService};
pub use truth::{BIN, Bin, Levels, OrgTruth, Truth};

pub use crate::org::Dialect;
