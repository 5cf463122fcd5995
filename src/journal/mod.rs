//! Answers that are kept: what was answered is not sent again.
//!
//! A [`JournalLayer`] keeps the good answers of a service in a [`Store`], under a [fingerprint](Key) of what was asked. The same request
//! later, in this run or another, is answered from there: nothing is sent, and no slot is taken. While one is under way, those that are the same
//! wait for its answer and are not sent either; give each a [`Salt`] to have them answered one by one.
//!
//! | | |
//! |---|---|
//! | looked at | POSTs whose body is there at once, as that of a `Full<Bytes>` is; others pass through |
//! | kept | what is [`Finished`]: class [`Ok`](crate::outcome::Class::Ok), and not cut short; or what a [`Keep`] of yours says |
//! | of it | status, `content-type`, ids and versions among the headers, the whole body |
//! | shared, not kept | what was gathered and is not to be kept, a refusal for instance |
//! | neither | an error; a stream that is handed through; a body over the [ceiling](JournalBuilder::ceiling) |
//!
//! **An answer is handed up only when it is kept**, so a process that is killed loses none that a caller has seen. If it cannot be kept, it is
//! handed up with an [`Unkept`] in its extensions, since it was paid for; from then on the store is
//! [broken](Store::broken), and a request that it does not know fails with [`JournalError::Store`] before anything is sent.
//!
//! **What is in the file** is what the provider said, as it came. The layer knows no org's key: where a provider may quote one in an answer that
//! is good, a [`Keep`] of yours says no. Requests are not in it, only their fingerprints; these have no host where requests have only a path,
//! so two providers want two files.
//!
//! **Where it stands:** around the whole stack, above the retry: below that it would keep answers attempt by attempt, and its callers would have
//! waited for a slot before they are answered from the file. Only [`drive`](crate::drive), or whatever bounds the requests alive, stands above.
//! So it is no part of the ready-made [`stack`](crate::stack):
//!
//! ```
//! use bytes::Bytes;
//! use http::Request;
//! use http_body_util::Full;
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_quota::{journal::{FileStore, JournalLayer, Restored}, org::{Credential, Org, Orgs}, stack::Stack};
//! # use http::Response;
//! # fn client() -> impl Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>, Error = std::io::Error, Future: Send> + Clone + Send + Sync + 'static {
//! #     tower::service_fn(async |_: Request<Full<Bytes>>| Ok(Response::new(Full::new(Bytes::from_static(
//! #         br#"{"type":"message","content":[{"type":"text","text":"Hello."}],"stop_reason":"end_turn"}"#)))))
//! # }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let file = folder.path().join("answers.journal");
//! let ask = || Request::post("/v1/messages").body(Full::new(Bytes::from_static(
//!     br#"{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{"role":"user","content":"Hello?"}]}"#)));
//! for run in 1..=2 {
//!     let stack = Stack::new(Orgs::new([Org::new("a").credential(Credential::new("sk-a"))])?);
//!     let store = FileStore::open(&file)?;
//!     let service = ServiceBuilder::new().layer(JournalLayer::new(store)).service(stack.build(client())?);
//!     let answer = service.oneshot(ask()?).await?;
//!     // The first run sends it, the second one does not.
//!     assert_eq!(answer.extensions().get(), (run == 2).then_some(&Restored::Kept));
//! }
//! # Ok(()) }
//! ```
//!
//! # Tower's contract
//!
//! `poll_ready` is always ready and reserves nothing. What is below is readied inside the response future, only for what is to be sent, on
//! an instance that belongs to that future; the instance that was readied is the one that is called. The future may be dropped at any await
//! point: see [`JournalFuture`]. No task is spawned; an open [`FileStore`] has one writer thread, joined when its last clone is dropped.

mod body;
mod entry;
mod file;
mod flight;
mod future;
mod keep;
mod key;
mod layer;
mod seal;
mod service;
mod store;

#[cfg(feature = "batch")]
pub use self::file::FileAsk;
pub use self::{
    body::JournalBody,
    file::{FilePut, FileStore, FileStoreBuilder, OpenError},
    future::JournalFuture,
    keep::{Finished, Keep},
    key::{Key, KeyHeaders, Salt},
    layer::{BODY_CEILING, JournalBuilder, JournalLayer},
    service::{Journal, JournalError},
    store::{Store, StoreError},
};

/// A response extension: the answer is not from a call that was made for this request. If its status is of success it carries a
/// [`Stamp`](crate::outcome::Stamp) too, without an org and without usage, so that nothing is counted twice.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Restored {
    /// It was kept: nothing was sent.
    Kept,
    /// It is that of a call that was made for the same request at the same time.
    Shared,
}

/// A response extension: the answer is good and paid for, but the store could not keep it. A later run will send its request again.
#[derive(Clone, Debug)]
pub struct Unkept(pub StoreError);
