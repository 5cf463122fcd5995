//! The judge: reads an answer once, says what it means, and stamps it for every layer above.
//!
//! It stands innermost, right around the HTTP client (only [`auth`](crate::auth) stands below it): what it says with
//! [`Stamp`](crate::outcome::Stamp) the limiter, the quota and the retry layers above act on, so none of them parses a body. It
//! also gathers the body there, for three reasons. A 429 may name its wait only in words, and a success its token usage only
//! in the body. A body that breaks off is found out while the call can still be retried. And an error body that is read to its
//! end leaves its connection reusable, where an unread one closes it: under a burst of 429s that is a storm of reconnects.
//!
//! **Timeouts:** a timeout layer of another crate below the judge sees only the head of an answer; a slow body is bounded only
//! by [`JudgeLayer::timeout`], which counts from the call to the end of what is gathered. Set one: a call that hangs keeps
//! its slot.
//!
//! ```
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_quota::{judge::JudgeLayer, outcome::{Class, Stamp}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::outcome::Error> {
//! // Any HTTP client: here one that always refuses, and says only in words for how long.
//! let client = service_fn(|_: Request<Full<Bytes>>| async {
//!     let body = r#"{"error":{"message":"Rate limit reached. Please try again in 8.71s."}}"#;
//!     Response::builder().status(429).body(Full::new(Bytes::from(body)))
//! });
//! // Limiter, balancer and retry would stand above, in front of the judge in this list.
//! let service = ServiceBuilder::new().layer(JudgeLayer::new()).service(client);
//!
//! let answer = service.oneshot(Request::new(Full::default())).await?;
//! let stamp = answer.extensions().get::<Stamp>().expect("the judge stamps every answer");
//! assert_eq!(stamp.outcome.class, Class::Throttled);
//! assert!(stamp.outcome.not_before.is_some() && stamp.whole);
//! assert!(answer.body().bytes().is_some_and(|body| body.starts_with(b"{\"error\"")));
//! # Ok(())
//! # }
//! ```
//!
//! # What it reads
//!
//! - The status and headers, by [`Outcome::of_head`](crate::outcome::Outcome::of_head).
//! - The body of a gathered refusal, if it is JSON: `error.code`, `error.type` and `error.message` of Anthropic, OpenAI and Azure.
//!   The status decides; a code or type that is known refines it (a 429 of `insufficient_quota` is
//!   [`OutOfQuota`](crate::outcome::Class::OutOfQuota), a 400 of `invalid_api_key` [`Unauthorised`](crate::outcome::Class::Unauthorised)), and a
//!   message does only where they say no more than the status, by the sentence that it begins with: "Your credit balance is too low…",
//!   "You have reached your specified API usage limits. You will regain access on 2026-11-01…" (the date is
//!   [`not_before`](crate::outcome::Outcome::not_before)), "Request too large… Limit 30000, Requested 45411" (only where more was asked for
//!   than the limit), "We could not parse the JSON body…". What a message quotes matches nothing, and a status that the body
//!   contradicts is believed.
//! - The text of a gathered 429, by [`hint::from_text`](crate::hint::from_text): it can only make the wait longer.
//! - A gathered 2xx, if it is JSON or server-sent events: whether it is an answer. See below.
//! - The token usage of the same: Anthropic's and OpenAI's `input_tokens`
//!   and `output_tokens`, OpenAI's `prompt_tokens` and `completion_tokens`. Anthropic's `cache_creation_input_tokens` are added
//!   to the input, since they count against the input quota; `cache_read_input_tokens` are not, since on current models they
//!   do not. What was read from a cache and what was written to one is told apart too, OpenAI's `cached_tokens` among it.
//!
//! What went wrong in the provider's own words is kept in [`Stamp::said`](crate::outcome::Stamp::said): `type: message`, in at most 300
//! characters, on one line, without the org's key ([`JudgeLayer::scrub`]) and without what looks like one. Of a request that
//! is too large it says how large it was.
//!
//! # Successes that are none
//!
//! The response stays as it is; its [`Stamp`](crate::outcome::Stamp) has another class, so it is retried, and what it used counts. One
//! of a final class (a 400 within a 200) comes to the caller with the status that it has: whoever goes by the status alone takes it for
//! an answer, so look at the stamp.
//!
//! | a 2xx, gathered | is |
//! |---|---|
//! | with an `error` at its top (a gateway's `{"error":{"code":502,…}}`), or an error event | what its `code` would be as a status, else what its `type` says, else [`Overloaded`](crate::outcome::Class::Overloaded) |
//! | with `choices` null or empty, with no text and no tool call in any choice or in `content`, of embeddings without one, without an event | [`Empty`](crate::outcome::Class::Empty), unless [`EmptyPolicy::Accept`] says otherwise, or it says itself why: `max_tokens`, `refusal` |
//! | JSON that begins and does not end; a stream of Anthropic's or OpenAI's without its last event (or, in a chat, a `finish_reason`) | [`Transport`](crate::outcome::Class::Transport) |
//! | refused by [`JudgeLayer::validate`] | [`Rejected`](crate::outcome::Class::Rejected) |
//!
//! Nothing that a model writes can be taken for any of it: within JSON its quotes are escaped. OpenAI's Responses API is looked at for
//! errors, not for emptiness.
//!
//! ```
//! # use bytes::Bytes; use http::{Request, Response}; use http_body_util::Full; use tower::{Layer, ServiceExt, service_fn};
//! use tower_quota::{judge::JudgeLayer, outcome::{Class, Stamp}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::outcome::Error> {
//! # let client = service_fn(|_: Request<Full<Bytes>>| async { Ok::<_, std::io::Error>(Response::new(Full::<Bytes>::from("yes, but"))) });
//! // Whoever asked for JSON has use for nothing else. The retry layer above asks again.
//! let layer = JudgeLayer::new().validate(|_head, body| {
//!     serde_json::from_slice::<serde_json::Value>(body)?;
//!     Ok(())
//! });
//! let answer = layer.layer(client).oneshot(Request::new(Full::default())).await?;
//! let stamp = answer.extensions().get::<Stamp>().expect("the judge stamps every answer");
//! assert_eq!(stamp.outcome.class, Class::Rejected);
//! assert_eq!(stamp.said.as_deref(), Some("expected value at line 1 column 1"));
//! # Ok(())
//! # }
//! ```
//!
//! # Streams
//!
//! A body that is handed through is read as it passes. Nothing is held back, copied or altered for it, and one of another content
//! type is not looked at. Usage is known when the stream has ended, has failed or is dropped: the stamp's
//! [`Tail`](crate::outcome::Tail) tells it then, together with whether all of it came.
//!
//! - In server-sent events Anthropic says the input in `message_start` and the output in `message_delta`; OpenAI says both in
//!   the last chunk, if the request has `"stream_options":{"include_usage":true}`, and in `response.completed`. What is said last counts, so
//!   of a stream that was cut off what was known by then is told.
//! - The last event is Anthropic's `message_stop`; OpenAI's `[DONE]`, `response.completed`, `response.incomplete` or
//!   `response.failed`. A stream of events without it is not complete.
//! - Of JSON that is handed through the last kilobyte is kept, and read if the body came whole. One that is no longer than that is looked
//!   at for an error, or nothing, too.
//! - What the stream as a whole means is told with it ([`Ended::outcome`](crate::outcome::Ended::outcome)): the class of the first error
//!   event (OpenAI's error chunks are some), whenever it came; [`Transport`](crate::outcome::Class::Transport) if it broke off, or if its kind is known and its last
//!   event did not come; [`Ok`](crate::outcome::Class::Ok) if it came whole. If whoever read it dropped it before, there is none: nobody
//!   is to blame. The caller has the error in the stream itself. [`JudgeLayer::validate`] is not asked.
//!
//! ```
//! # use bytes::Bytes; use http::{Request, Response}; use http_body_util::{BodyExt, Full};
//! # use tower::{Layer, ServiceExt, service_fn};
//! use tower_quota::{judge::{Gather, JudgeLayer}, outcome::{Stamp, Usage}};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tower_quota::outcome::Error> {
//! # let client = service_fn(|_: Request<Full<Bytes>>| async {
//! #     let events = "data: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":8}}\n\ndata: [DONE]\n\n";
//! #     Response::builder().header("content-type", "text/event-stream").body(Full::new(Bytes::from(events)))
//! # });
//! let service = JudgeLayer::new().gather(Gather::ErrorsOnly).layer(client);
//! let answer = service.oneshot(Request::new(Full::default())).await?;
//! let tail = answer.extensions().get::<Stamp>().and_then(|stamp| stamp.tail.clone()).expect("handed through");
//!
//! answer.into_body().collect().await?;
//! let ended = tail.ended().expect("it was read to its end");
//! assert_eq!((ended.usage, ended.complete), (Some(Usage::new(7, 8)), true));
//! # Ok(())
//! # }
//! ```
//!
//! It looks at the bytes as they come: where answers are compressed, a layer that decompresses belongs below it.
//!
//! # When the answer is not whole
//!
//! | | success | error status |
//! |---|---|---|
//! | the body breaks off, or the timeout passes | [`Class::Transport`](crate::outcome::Class::Transport), with the cause as source | the answer with what was read: a 429 is a 429 |
//! | the body is larger than the ceiling | handed through as a stream, nothing lost | the same |
//!
//! # When no answer comes
//!
//! | what happened | is |
//! |---|---|
//! | the connection was refused, reset, or timed out; TLS failed | [`Class::Transport`](crate::outcome::Class::Transport) |
//! | HTTP/2's `REFUSED_STREAM`, or a `GOAWAY` that leaves the request out (feature `http2`, and a client of your own that speaks it) | [`Class::Unprocessed`](crate::outcome::Class::Unprocessed), and nothing was sent |
//! | no file descriptor or port is left on this machine | [`Class::Local`](crate::outcome::Class::Local) |
//! | `client::http` for an `https` URL | the same; `said` says what to do, and so does the log, at once and at the level of errors |
//!
//! # Tower's contract
//!
//! `poll_ready` is the inner service's; nothing is reserved here. The layer holds nothing but the exchange: dropping the future
//! or the answer at any point drops the inner future or body and leaves nothing behind.

mod body;
mod counts;
mod fault;
mod future;
mod inband;
mod layer;
mod read;
mod refusal;
mod said;
mod scrub;
mod service;
mod sse;
mod usage;
mod watch;

pub use body::Answer;
pub use future::{Elapsed, JudgeFuture};
pub use layer::{BODY_CEILING, EmptyPolicy, Gather, JudgeLayer};
pub use service::JudgeService;
