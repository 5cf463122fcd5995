//! A ready-made HTTP client to stand below [`auth`](crate::auth): hyper's, with what this use of it wants set.
//!
//! Any other client will do as well ([what it must be](crate::stack#what-goes-in); the example `reqwest_client` has reqwest).
//! Switch off its redirects, since a key must not follow one, and its own retries.
//!
//! This one's pool of connections is *not* bounded: it opens one for every call that finds none idle, and keeps every idle one
//! for a while. How many calls run at once is the limiter's business alone; a pool with a bound of its own would make calls
//! queue where no layer sees them, with their timeouts running.
//!
//! It speaks HTTP/1.1. Over HTTP/2 all calls to a host would share one connection, and those beyond the server's limit of
//! streams would queue inside it, unseen again. It follows no redirects, decompresses nothing, and uses no proxy.
//!
//! ```
//! use bytes::Bytes;
//! use http_body_util::Full;
//! use tower::ServiceBuilder;
//! use tower_quota::{auth::OrgAuthLayer, client, judge::JudgeLayer, org::{Credential, Org}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::org::BuildError> {
//! let org = Org::new("research").credential(Credential::new("sk-secret"));
//! let service = ServiceBuilder::new()
//!     .layer(JudgeLayer::new().scrub(&org))
//!     .layer(OrgAuthLayer::new(&org)?)
//!     .service(client::http::<Full<Bytes>>());
//! # let _ = service;
//! # Ok(())
//! # }
//! ```

use std::time::Duration;

use http_body::Body;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};

/// hyper's pooled client over plain TCP, for request bodies `B`. Made by [`http()`].
pub type HttpClient<B> = Client<HttpConnector, B>;

/// hyper's pooled client over TLS, for request bodies `B`. Made by [`https()`].
#[cfg(feature = "rustls")]
pub type HttpsClient<B> = Client<hyper_rustls::HttpsConnector<HttpConnector>, B>;

/// How long a connection may take to open. Opening one costs a few round trips; without a bound a host that swallows packets
/// is found out after minutes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a silent connection is probed, so that nobody on the way forgets one that waits minutes for its answer.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// A client for plain `http://`: a gateway of your own, a test server. A base URL that is `https://`, as every dialect's own is, fails
/// here: use `https` (feature `rustls`).
///
/// Must be called, and used, inside a tokio runtime: used outside of one it panics. Clones share one pool.
#[must_use]
pub fn http<B>() -> HttpClient<B>
where
    B: Body + Send,
    B::Data: Send,
{
    client(connector())
}

/// A client for `https://`, with ring and Mozilla's root certificates built in; `http://` is spoken too, where a base URL says
/// so.
///
/// Must be called, and used, inside a tokio runtime. Clones share one pool.
#[cfg(feature = "rustls")]
#[must_use]
pub fn https<B>() -> HttpsClient<B>
where
    B: Body + Send,
    B::Data: Send,
{
    let mut tcp = connector();
    tcp.enforce_http(false);
    // Named, since a default one exists only until some other crate turns on a second.
    let tls = hyper_rustls::HttpsConnectorBuilder::new()
        .with_provider_and_webpki_roots(rustls::crypto::ring::default_provider())
        .expect("ring speaks TLS 1.2 and 1.3");
    client(tls.https_or_http().enable_http1().wrap_connector(tcp))
}

fn connector() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp
}

fn client<C, B>(connector: C) -> Client<C, B>
where
    C: hyper_util::client::legacy::connect::Connect + Clone,
    B: Body + Send,
    B::Data: Send,
{
    // The timer closes what is idle for too long (90 seconds, by default).
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_max_idle_per_host(usize::MAX)
        .build(connector)
}
