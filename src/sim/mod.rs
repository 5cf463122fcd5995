//! A simulated provider of a language-model API: several organisations with their quotas, headers and faults.
//!
//! It is there to be called instead of the real one, and to say afterwards what really happened ([`Truth`]).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_quota::sim::{Config, Dialect, OrgConfig, Sim};
//! use tower::ServiceExt;
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

mod model;
mod server;
mod service;
mod truth;
mod wire;

pub use model::{
    Chance, Change, Config, ConfigError, Cost, Dialect, Headers, Key, Latency, OrgConfig, RetryAfter, Step,
};
pub use server::Server;
pub use service::{Sim, SimBody, SimError, SimFuture, SimService};
pub use truth::{BIN, Bin, OrgTruth, Truth};
