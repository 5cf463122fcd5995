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
//! - The text of a gathered 429, by [`hint::from_text`](crate::hint::from_text): it can only make the wait longer.
//! - The token usage of a 2xx whose content type is JSON or that of server-sent events: Anthropic's and OpenAI's `input_tokens`
//!   and `output_tokens`, OpenAI's `prompt_tokens` and `completion_tokens`. Anthropic's `cache_creation_input_tokens` are added
//!   to the input, since they count against the input quota; `cache_read_input_tokens` are not, since on current models they
//!   do not.
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
//! - Of JSON that is handed through the last kilobyte is kept, and read if the body came whole.
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
//! # Tower's contract
//!
//! `poll_ready` is the inner service's; nothing is reserved here. The layer holds nothing but the exchange: dropping the future
//! or the answer at any point drops the inner future or body and leaves nothing behind.

mod body;
mod future;
mod inband;
mod layer;
mod read;
mod refusal;
mod said;
mod service;
mod sse;
mod watch;

pub use body::Answer;
pub use future::{Elapsed, JudgeFuture};
pub use layer::{BODY_CEILING, EmptyPolicy, Gather, JudgeLayer};
pub use service::JudgeService;
