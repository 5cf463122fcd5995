//! Org auth: sends every request to one org, with its key.
//!
//! It stands at the very bottom, below [`judge`](crate::judge) and right around the HTTP client, one for each org: everything
//! above deals with requests that belong to no org yet (`/v1/messages`), and no layer but this one touches a key.
//!
//! ```
//! use http::{Request, Response};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{auth::OrgAuthLayer, judge::JudgeLayer, org::{Credential, Org}};
//! # use bytes::Bytes;
//! # use http_body_util::Full;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let org = Org::new("research").credential(Credential::new("sk-secret"));
//! let client = service_fn(|request: Request<Full<Bytes>>| async move {
//!     assert_eq!(request.uri(), "https://api.anthropic.com/v1/messages");
//!     assert_eq!(request.headers()["x-api-key"], "sk-secret");
//!     assert!(!format!("{request:?}").contains("sk-secret"), "marked sensitive");
//!     Ok::<_, std::io::Error>(Response::new(Full::<Bytes>::default()))
//! });
//! let service = ServiceBuilder::new()
//!     .layer(JudgeLayer::new().scrub(&org))
//!     .layer(OrgAuthLayer::new(&org)?)
//!     .service(client);
//! service.oneshot(Request::post("/v1/messages").body(Full::default())?).await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Where a key can go
//!
//! Only to the org's own base URL. A request that names another scheme or host is sent to the base URL all the same, its `host`
//! header is taken off (the client sets the right one), and the layer follows no redirect: a 3xx is an answer like any other.
//! Nor must the client below follow any: turn that off where it is on by default, or it will carry the key along.
//!
//! # What it sets
//!
//! | dialect | set | set if absent | removed |
//! |---|---|---|---|
//! | Anthropic | `x-api-key` | `anthropic-version: 2023-06-01` | `authorization` |
//! | OpenAI | `authorization: Bearer …` | | `x-api-key` |
//!
//! A key that the request brings is overridden. For an org without a credential no header but `host` is touched, so that the
//! client below, or the request, may bring its own.
//!
//! The path of the base URL is put before that of the request. One segment is never doubled: where the base URL ends in `/v1`,
//! as those in use for OpenAI's API do, and the request's path begins with it too, it stands there once.

mod layer;
mod service;

pub use layer::OrgAuthLayer;
pub use service::OrgAuth;
