//! The classes an answer can have, and what each one implies: one table.
//!
//! Whatever reads an answer says what it means *once*, as an [`Outcome`]; every layer above acts on that word. In the
//! ready-made stack the judge says it and leaves it in the answer's extensions as a [`Stamp`]. A layer that stands alone
//! in a foreign stack asks a [`Classify`] instead; [`ByStatus`] is the preset for HTTP.
//!
//! Every `Instant` in this crate is a `tokio::time::Instant`, so that a paused clock drives tests.
//!
//! ```
//! use tower_quota::outcome::{Class, Purse};
//!
//! let throttled = Class::Throttled.implies();
//! assert_eq!(throttled.purse, Purse::Throttles);
//! assert!(throttled.cuts && !throttled.breaker, "a 429 goes to the limiter, never to the breaker");
//! ```

use std::{error::Error as StdError, fmt, sync::Arc, time::Duration, time::SystemTime};

use http::{HeaderMap, Response, StatusCode};
use tokio::time::Instant;

use crate::{hint, org::Org};

pub use crate::tail::{Ended, Tail};

/// A boxed error, as tower uses it.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// The longest wait that is believed at once, unless a layer is told otherwise: five minutes. A longer hint is not
/// obeyed blindly (clients that did looked hung for days); the org is asked again, by one call, whenever this has passed.
pub const HINT_CEILING: Duration = Duration::from_secs(300);

/// A longer ceiling is taken as this one, so that adding a believed wait to the clock cannot overflow.
pub(crate) const CEILING_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// What an answer, or the lack of one, means.
///
/// What each implies, as [`implies`](Class::implies) has it:
///
/// | class | name | purse | cuts | holds | out | breaker | stored | re-driven |
/// |---|---|---|---|---|---|---|---|---|
/// | [`Ok`](Class::Ok) | `ok` | closed | | | | | yes | |
/// | [`Throttled`](Class::Throttled) | `throttled` | throttles | yes | yes | | | | yes |
/// | [`ThrottledRequest`](Class::ThrottledRequest) | `throttled_request` | throttles | | | | | | yes |
/// | [`OutOfQuota`](Class::OutOfQuota) | `out_of_quota` | elsewhere | | | org | | | yes |
/// | [`Unauthorised`](Class::Unauthorised) | `unauthorised` | elsewhere | | | org | | | yes |
/// | [`Forbidden`](Class::Forbidden) | `forbidden` | elsewhere | | | family | | | yes |
/// | [`Overloaded`](Class::Overloaded) | `overloaded` | errors | | | | yes | | yes |
/// | [`Transport`](Class::Transport) | `transport` | errors | | | | yes | | yes |
/// | [`Unprocessed`](Class::Unprocessed) | `unprocessed` | throttles | | | | | | yes |
/// | [`Empty`](Class::Empty) | `empty` | errors | | | | | | yes |
/// | [`Rejected`](Class::Rejected) | `rejected` | errors | | | | | | yes |
/// | [`Garbled`](Class::Garbled) | `garbled` | once | | | | | | |
/// | [`TooLarge`](Class::TooLarge) | `too_large` | closed | | | | | | |
/// | [`Terminal`](Class::Terminal) | `terminal` | closed | | | | | | |
/// | [`Local`](Class::Local) | `local` | errors | | | | | | yes |
/// | [`NoOrg`](Class::NoOrg) | `no_org` | closed | | | | | | yes |
///
/// *Purse*: whose purse pays for another attempt ([`Purse`]). *Cuts*: the org's limit is cut. *Holds*: the org is held until the
/// hint has passed. *Out*: the org is asked no more, for all models or for the model family ([`Out`]). *Breaker*: it is a
/// failure of the org's, for its circuit and its health. *Stored*: the answer may be given again for the same request.
/// *Re-driven*: the same request may be sent again later with hope.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Answered.
    Ok,
    /// The org refuses more for now (429).
    Throttled,
    /// This one request is refused for now; the org takes others.
    ThrottledRequest,
    /// The org's money or hard quota is used up (402, `billing_error`, `insufficient_quota`).
    OutOfQuota,
    /// The org's key is not accepted (401).
    Unauthorised,
    /// The org's key is not accepted for this model (403).
    Forbidden,
    /// The provider failed or is overloaded (5xx, 529, 408, 409): it may pass. An org's limit has nothing to do with it.
    Overloaded,
    /// No whole answer arrived: connection, timeout, body or stream cut short. The provider may have counted the call.
    Transport,
    /// The connection says that the request was not processed (HTTP/2 `REFUSED_STREAM`, or `GOAWAY` before it): nobody has
    /// counted it, and it is safe to send it again.
    Unprocessed,
    /// An answer with nothing in it. The org is healthy.
    Empty,
    /// The caller's own check refused the answer; the org is healthy.
    Rejected,
    /// The provider could not read the request whole (400, "could not parse the JSON body"): perhaps it was cut short on its
    /// way. Sent once more.
    Garbled,
    /// The request can never fit (413, or a 429 that asks for more than the limit).
    TooLarge,
    /// The provider refuses this request for good (other 4xx).
    Terminal,
    /// Something on this machine failed before anything was sent.
    Local,
    /// No org is left that may be asked.
    NoOrg,
}

/// Whose purse pays for another attempt.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purse {
    /// There is no other attempt.
    Closed,
    /// The purse of errors: few attempts, exponential backoff, a budget shared by all calls.
    Errors,
    /// The purse of 429s: not an attempt; bounded by time.
    Throttles,
    /// Free, but only to another org: this one is out.
    Elsewhere,
    /// One more attempt, whatever else has failed; of this class there is no third.
    Once,
}

/// Of what an org is asked no more.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Out {
    /// It is still asked.
    No,
    /// Of the model family.
    Family,
    /// Of anything.
    Org,
}

/// What a [`Class`] implies. Made by [`Class::implies`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Implies {
    /// Whose purse pays for another attempt.
    pub purse: Purse,
    /// Whether the limit is cut (once per congestion epoch).
    pub cuts: bool,
    /// Whether the org is held until the answer's hint has passed.
    pub holds: bool,
    /// Of what the org is out: not asked again in this run, or not before the time that the answer names.
    pub out: Out,
    /// Whether a circuit breaker counts it as a failure, and the balancer as a reason to look elsewhere.
    pub breaker: bool,
    /// Whether the answer may be kept and given again for the same request.
    pub may_store: bool,
    /// Whether the same request may be sent again later with hope.
    pub redrivable: bool,
}

impl Class {
    /// Every class, in the order of the table.
    pub const ALL: [Class; 16] = [
        Class::Ok,
        Class::Throttled,
        Class::ThrottledRequest,
        Class::OutOfQuota,
        Class::Unauthorised,
        Class::Forbidden,
        Class::Overloaded,
        Class::Transport,
        Class::Unprocessed,
        Class::Empty,
        Class::Rejected,
        Class::Garbled,
        Class::TooLarge,
        Class::Terminal,
        Class::Local,
        Class::NoOrg,
    ];

    /// The one table: see [`Class`].
    #[rustfmt::skip]
    #[must_use]
    pub const fn implies(self) -> Implies {
        const fn row(purse: Purse, cuts: bool, holds: bool, out: Out, breaker: bool, may_store: bool, redrivable: bool) -> Implies {
            Implies { purse, cuts, holds, out, breaker, may_store, redrivable }
        }
        const Y: bool = true;
        const N: bool = false;
        match self {
            //                              purse            cuts holds out      breaker store redrivable
            Class::Ok =>               row(Purse::Closed,    N,   N,    Out::No,     N,  Y,    N),
            Class::Throttled =>        row(Purse::Throttles, Y,   Y,    Out::No,     N,  N,    Y),
            Class::ThrottledRequest => row(Purse::Throttles, N,   N,    Out::No,     N,  N,    Y),
            Class::OutOfQuota =>       row(Purse::Elsewhere, N,   N,    Out::Org,    N,  N,    Y),
            Class::Unauthorised =>     row(Purse::Elsewhere, N,   N,    Out::Org,    N,  N,    Y),
            Class::Forbidden =>        row(Purse::Elsewhere, N,   N,    Out::Family, N,  N,    Y),
            Class::Overloaded =>       row(Purse::Errors,    N,   N,    Out::No,     Y,  N,    Y),
            Class::Transport =>        row(Purse::Errors,    N,   N,    Out::No,     Y,  N,    Y),
            Class::Unprocessed =>      row(Purse::Throttles, N,   N,    Out::No,     N,  N,    Y),
            Class::Empty =>            row(Purse::Errors,    N,   N,    Out::No,     N,  N,    Y),
            Class::Rejected =>         row(Purse::Errors,    N,   N,    Out::No,     N,  N,    Y),
            Class::Garbled =>          row(Purse::Once,      N,   N,    Out::No,     N,  N,    N),
            Class::TooLarge =>         row(Purse::Closed,    N,   N,    Out::No,     N,  N,    N),
            Class::Terminal =>         row(Purse::Closed,    N,   N,    Out::No,     N,  N,    N),
            Class::Local =>            row(Purse::Errors,    N,   N,    Out::No,     N,  N,    Y),
            Class::NoOrg =>            row(Purse::Closed,    N,   N,    Out::No,     N,  N,    Y),
        }
    }

    /// The class of an HTTP status alone.
    ///
    /// 529 is Anthropic's "overloaded": no org's quota is behind it, so it is not a throttle. 409 is retried by the
    /// providers' own SDKs, so it counts as passing.
    #[must_use]
    pub const fn of_status(status: StatusCode) -> Class {
        match status.as_u16() {
            200..=399 => Class::Ok,
            429 => Class::Throttled,
            402 => Class::OutOfQuota,
            401 => Class::Unauthorised,
            403 => Class::Forbidden,
            408 | 409 => Class::Overloaded,
            413 => Class::TooLarge,
            400..=499 => Class::Terminal,
            _ => Class::Overloaded,
        }
    }

    /// A short fixed name, for logs and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Class::Ok => "ok",
            Class::Throttled => "throttled",
            Class::ThrottledRequest => "throttled_request",
            Class::OutOfQuota => "out_of_quota",
            Class::Unauthorised => "unauthorised",
            Class::Forbidden => "forbidden",
            Class::Overloaded => "overloaded",
            Class::Transport => "transport",
            Class::Unprocessed => "unprocessed",
            Class::Empty => "empty",
            Class::Rejected => "rejected",
            Class::Garbled => "garbled",
            Class::TooLarge => "too_large",
            Class::Terminal => "terminal",
            Class::Local => "local",
            Class::NoOrg => "no_org",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an answer means, and when the provider may be asked again.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The class.
    pub class: Class,
    /// The provider's "not before", already under the reader's ceiling; `None` when it named no useful time. Of
    /// [`Class::OutOfQuota`] when the org's access comes back, under no ceiling but a year.
    pub not_before: Option<Instant>,
}

impl Outcome {
    /// An outcome without a hint.
    #[must_use]
    pub const fn of(class: Class) -> Self {
        Outcome { class, not_before: None }
    }

    /// The same outcome with a time before which the provider wants no further call.
    #[must_use]
    pub const fn not_before(mut self, at: Option<Instant>) -> Self {
        self.not_before = at;
        self
    }

    /// Reads a status and its headers: the preset behind [`ByStatus`] and the first step of every judge.
    ///
    /// `x-should-retry: true` makes a final refusal ([`Class::Terminal`]) passing; `false` makes a passing failure
    /// ([`Class::Overloaded`]) final; it never touches throttling or a refused key. gRPC's `grpc-retry-pushback-ms` forbids another
    /// attempt where it is negative or no number ([gRFC A6](https://github.com/grpc/proposal/blob/master/A6-client-retries.md)):
    /// then a passing failure and a throttle are final. The hint is read from 429s and from passing failures (a 503 may name its
    /// wait too), and is at most `ceiling`, and a year.
    #[must_use]
    pub fn of_head(status: StatusCode, headers: &HeaderMap, ceiling: Duration) -> Self {
        let class = Class::of_status(status);
        if class == Class::Ok {
            return Outcome::of(class);
        }
        let (class, wait) = Outcome::settle(class, headers, ceiling);
        Outcome::of(class).not_before(wait.map(|wait| Instant::now() + wait))
    }

    /// What the headers make of a refusal that means `class` by its status, or by its body: its final class, and how long to wait.
    pub(crate) fn settle(mut class: Class, headers: &HeaderMap, ceiling: Duration) -> (Class, Option<Duration>) {
        match headers.get("x-should-retry").map(http::HeaderValue::as_bytes) {
            Some(b"true") if class == Class::Terminal => class = Class::Overloaded,
            Some(b"false") if class == Class::Overloaded => class = Class::Terminal,
            _ => {}
        }
        if matches!(class, Class::Overloaded | Class::Throttled) && hint::pushed_back(headers) {
            class = Class::Terminal;
        }
        let wait = match class {
            Class::Throttled | Class::ThrottledRequest => hint::from_headers(headers, SystemTime::now(), ceiling),
            // A failing server's bucket headers say nothing about when it works again; a Retry-After does.
            Class::Overloaded => hint::retry_after(headers, SystemTime::now(), ceiling),
            _ => None,
        };
        (class, wait.map(|wait| wait.min(CEILING_MAX)))
    }
}

/// Says what a response or an error means: the only question a lone layer asks of its surroundings.
///
/// Implement it for your own response and error types to use [`aimd`](crate::aimd) around something that is not HTTP, or to
/// judge otherwise than this crate does. One that asks [`Stamped`] or [`ByStatus`] for most answers hands on their
/// [`stamp`](Classify::stamp) and [`head`](Classify::head) as well. Layers want it `Clone`. A closure will do, in
/// [`classify_fn`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what a `Result<{Res}, {E}>` means",
    label = "is no `Classify<{Res}, {E}>`",
    note = "`ByStatus` reads any `http::Response`; `Stamped`, the default of `retry`, only where errors are `outcome::Error`, as above a judge",
    note = "for others say it yourself: `.classify(classify_fn(|result| …))` on the layer, or a type that implements `Classify<{Res}, {E}>`"
)]
pub trait Classify<Res, E> {
    /// Classifies a result. Called once per attempt, on the caller's task; must not block.
    fn classify(&self, result: Result<&Res, &E>) -> Outcome;

    /// The judge's [`Stamp`] on the result, where it carries one: which org was asked, and whether it is held below. Without
    /// it [`retry`](crate::retry) sleeps out every hint itself. Default: none.
    fn stamp<'a>(&self, _result: Result<&'a Res, &'a E>) -> Option<&'a Stamp> {
        None
    }

    /// Status and headers, where the result has them: for reports, never for decisions. Default: none.
    fn head<'a>(&self, _result: Result<&'a Res, &'a E>) -> Option<(StatusCode, &'a HeaderMap)> {
        None
    }
}

/// A classifier from a closure. Made by [`classify_fn`].
#[derive(Clone, Copy)]
pub struct ClassifyFn<F>(F);

/// A closure as a classifier; its types are inferred from what it does, or from where it is used:
///
/// ```
/// use tower_quota::outcome::{Class, Classify, Outcome, classify_fn};
///
/// #[derive(Debug)]
/// enum DbError {
///     TooManyConnections,
///     Deadlock,
/// }
///
/// let classify = classify_fn(|result| {
///     Outcome::of(match result {
///         Ok(_) => Class::Ok,
///         Err(DbError::TooManyConnections) => Class::Throttled,
///         Err(DbError::Deadlock) => Class::Overloaded,
///     })
/// });
/// let rows: Result<Vec<u64>, _> = Err(DbError::TooManyConnections);
/// assert_eq!(classify.classify(rows.as_ref()).class, Class::Throttled);
/// ```
///
/// Where neither tells them, write them out: `classify_fn::<Rows, DbError, _>(…)`.
pub const fn classify_fn<Res, E, F>(classify: F) -> ClassifyFn<F>
where
    F: Fn(Result<&Res, &E>) -> Outcome,
{
    ClassifyFn(classify)
}

impl<Res, E, F> Classify<Res, E> for ClassifyFn<F>
where
    F: Fn(Result<&Res, &E>) -> Outcome,
{
    fn classify(&self, result: Result<&Res, &E>) -> Outcome {
        (self.0)(result)
    }
}

impl<F> fmt::Debug for ClassifyFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClassifyFn").finish_non_exhaustive()
    }
}

/// Classifies by HTTP status and headers, or by the judge's [`Stamp`] where the answer carries one. Any error is
/// [`Class::Transport`]. Hints are believed up to [`HINT_CEILING`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ByStatus;

impl<B, E> Classify<Response<B>, E> for ByStatus {
    fn classify(&self, result: Result<&Response<B>, &E>) -> Outcome {
        match result {
            Ok(response) => of_response(response),
            Err(_) => Outcome::of(Class::Transport),
        }
    }

    fn stamp<'a>(&self, result: Result<&'a Response<B>, &'a E>) -> Option<&'a Stamp> {
        result.ok()?.extensions().get()
    }

    fn head<'a>(&self, result: Result<&'a Response<B>, &'a E>) -> Option<(StatusCode, &'a HeaderMap)> {
        result.ok().map(|response| (response.status(), response.headers()))
    }
}

/// Classifies by the judge's [`Stamp`], and errors by the [`Outcome`] that [`Error`] carries: what the layers of the
/// ready-made stack use. An answer without a stamp is read by status and headers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stamped;

impl<B> Classify<Response<B>, Error> for Stamped {
    fn classify(&self, result: Result<&Response<B>, &Error>) -> Outcome {
        match result {
            Ok(response) => of_response(response),
            Err(error) => error.outcome(),
        }
    }

    fn stamp<'a>(&self, result: Result<&'a Response<B>, &'a Error>) -> Option<&'a Stamp> {
        match result {
            Ok(response) => response.extensions().get(),
            Err(error) => Some(error.stamp()),
        }
    }

    fn head<'a>(&self, result: Result<&'a Response<B>, &'a Error>) -> Option<(StatusCode, &'a HeaderMap)> {
        result.ok().map(|response| (response.status(), response.headers()))
    }
}

fn of_response<B>(response: &Response<B>) -> Outcome {
    match response.extensions().get::<Stamp>() {
        Some(stamp) => stamp.outcome,
        None => Outcome::of_head(response.status(), response.headers(), HINT_CEILING),
    }
}

/// Tokens that the provider says a call used.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Input (prompt) tokens.
    pub input_tokens: u64,
    /// Output (completion) tokens.
    pub output_tokens: u64,
}

impl Usage {
    /// So many input and output tokens.
    #[must_use]
    pub const fn new(input_tokens: u64, output_tokens: u64) -> Self {
        Usage { input_tokens, output_tokens }
    }
}

/// What layers tell one another about an answer: written into the response's extensions by the judge, completed by the
/// balancer with who served it.
///
/// ```
/// # use http::Response;
/// use tower_quota::outcome::Stamp;
/// # let response = Response::new(());
/// if let Some(stamp) = response.extensions().get::<Stamp>() {
///     println!("{:?} by {:?}", stamp.outcome.class, stamp.org.as_ref().map(|org| org.name()));
/// }
/// ```
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Stamp {
    /// What the answer means.
    pub outcome: Outcome,
    /// Whether the body was gathered whole: nothing more will come over the wire, so its slot is free already.
    pub whole: bool,
    /// What the call used, where the answer says so and was gathered whole. Of one that is handed through as a stream its
    /// [`tail`](Stamp::tail) tells.
    pub usage: Option<Usage>,
    /// The end of an answer that is handed through as a stream; `None` for one that was gathered whole.
    pub tail: Option<Tail>,
    /// The org that served it; set by the balancer.
    pub org: Option<Org>,
    /// Whether that org does not admit calls for now (held, or out): whoever retries need not sleep, the next attempt waits
    /// below or goes elsewhere. Set by the balancer.
    pub held_below: bool,
    /// Nothing of the call was sent (no connection came about), or nothing of it was processed: no provider has counted it.
    pub unsent: bool,
    /// What went wrong in the provider's own words, or in those of the caller's check: short, on one line, no key in it.
    pub said: Option<Arc<str>>,
}

impl Stamp {
    /// A stamp that says only what the answer means.
    #[must_use]
    pub const fn new(outcome: Outcome) -> Self {
        Stamp {
            outcome,
            whole: false,
            usage: None,
            tail: None,
            org: None,
            held_below: false,
            unsent: false,
            said: None,
        }
    }
}

/// The error of the stack from the judge upward: what happened, at which org, and the cause as
/// [`source`](StdError::source).
pub struct Error {
    stamp: Stamp,
    source: BoxError,
}

impl Error {
    /// An error with its meaning and its cause.
    pub fn new(outcome: Outcome, source: impl Into<BoxError>) -> Self {
        Error { stamp: Stamp::new(outcome), source: source.into() }
    }

    /// Takes an `Error` out of a box unchanged; any other error becomes the source of a [`Class::Transport`] one.
    pub fn from_box(error: BoxError) -> Self {
        match error.downcast::<Error>() {
            Ok(error) => *error,
            Err(source) => Error::new(Outcome::of(Class::Transport), source),
        }
    }

    /// What it means.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        self.stamp.outcome
    }

    /// The class alone.
    #[must_use]
    pub fn class(&self) -> Class {
        self.stamp.outcome.class
    }

    /// The org that was asked, once a balancer has said so.
    #[must_use]
    pub fn org(&self) -> Option<&Org> {
        self.stamp.org.as_ref()
    }

    /// All that is known of the answer that did not come.
    #[must_use]
    pub fn stamp(&self) -> &Stamp {
        &self.stamp
    }

    /// The same with another cause.
    pub(crate) fn caused_by(self, source: impl Into<BoxError>) -> Self {
        Error { stamp: self.stamp, source: source.into() }
    }

    pub(crate) fn stamp_mut(&mut self) -> &mut Stamp {
        &mut self.stamp
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("outcome", &self.stamp.outcome)
            .field("org", &self.stamp.org.as_ref().map(Org::name))
            .field("source", &self.source)
            .finish()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.class() {
            Class::Transport => "no whole answer",
            Class::Local => "failed before anything was sent",
            Class::NoOrg => "no org left to ask",
            Class::Overloaded => "the provider is failing",
            Class::Throttled | Class::ThrottledRequest => "rate limited",
            Class::Unprocessed => "the connection was closed before the request was processed",
            other => other.name(),
        };
        match &self.stamp.org {
            Some(org) => write!(f, "{what} (org {})", org.name()),
            None => f.write_str(what),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(status: u16, name: &'static str, value: &str) -> Outcome {
        let mut headers = HeaderMap::new();
        if !name.is_empty() {
            headers.insert(name, value.parse().unwrap());
        }
        Outcome::of_head(StatusCode::from_u16(status).unwrap(), &headers, HINT_CEILING)
    }

    #[test]
    fn statuses_map_to_classes() {
        for (status, class) in [
            (200, Class::Ok),
            (304, Class::Ok),
            (400, Class::Terminal),
            (401, Class::Unauthorised),
            (402, Class::OutOfQuota),
            (403, Class::Forbidden),
            (409, Class::Overloaded),
            (404, Class::Terminal),
            (408, Class::Overloaded),
            (413, Class::TooLarge),
            (422, Class::Terminal),
            (429, Class::Throttled),
            (500, Class::Overloaded),
            (503, Class::Overloaded),
            (529, Class::Overloaded),
        ] {
            assert_eq!(head(status, "", "").class, class, "{status}");
        }
    }

    #[test]
    fn x_should_retry_moves_only_between_passing_and_final() {
        assert_eq!(head(400, "x-should-retry", "true").class, Class::Overloaded);
        assert_eq!(head(500, "x-should-retry", "false").class, Class::Terminal);
        assert_eq!(head(429, "x-should-retry", "false").class, Class::Throttled);
        assert_eq!(head(401, "x-should-retry", "true").class, Class::Unauthorised);
        assert_eq!(head(200, "x-should-retry", "true").class, Class::Ok);
        assert_eq!(head(500, "x-should-retry", "maybe").class, Class::Overloaded);
    }

    #[test]
    fn a_pushback_forbids_another_attempt_or_names_the_wait() {
        let name = "grpc-retry-pushback-ms";
        for (value, throttled, overloaded) in [
            ("-1", Class::Terminal, Class::Terminal),
            ("soon", Class::Terminal, Class::Terminal),
            ("", Class::Terminal, Class::Terminal),
            ("1.5", Class::Terminal, Class::Terminal),
            ("0", Class::Throttled, Class::Overloaded),
            ("1500", Class::Throttled, Class::Overloaded),
        ] {
            assert_eq!(
                (head(429, name, value).class, head(503, name, value).class),
                (throttled, overloaded),
                "{value}"
            );
        }
        assert_eq!(head(401, name, "-1").class, Class::Unauthorised);
        assert_eq!(head(402, name, "-1").class, Class::OutOfQuota);
        assert_eq!(head(200, name, "-1").class, Class::Ok);
        assert!(head(503, name, "1500").not_before.is_some());
        assert!(head(503, name, "0").not_before.is_none());
    }

    #[test]
    fn only_passing_refusals_carry_a_hint() {
        assert!(head(429, "retry-after", "2").not_before.is_some());
        assert!(head(503, "retry-after", "2").not_before.is_some());
        assert!(head(200, "retry-after", "2").not_before.is_none());
        assert!(head(401, "retry-after", "2").not_before.is_none());
    }

    #[test]
    fn no_throttle_ever_touches_the_error_purse_and_no_error_is_stored() {
        for class in Class::ALL {
            let implies = class.implies();
            assert_eq!(implies.may_store, class == Class::Ok);
            if implies.cuts || implies.holds {
                assert_eq!(implies.purse, Purse::Throttles, "{class}");
                assert!(!implies.breaker, "{class}");
            }
            assert_eq!(implies.out != Out::No, implies.purse == Purse::Elsewhere, "{class}");
        }
    }

    #[test]
    fn the_table_that_is_read_is_the_one_that_is_acted_on() {
        let source = include_str!("outcome.rs");
        let yes = |yes: bool| if yes { "yes" } else { "" };
        let rows = Class::ALL.map(|class| {
            let implies = class.implies();
            let purse = format!("{:?}", implies.purse).to_lowercase();
            let out = [(Out::No, ""), (Out::Family, "family"), (Out::Org, "org")];
            let out = out.into_iter().find(|(out, _)| *out == implies.out).unwrap().1;
            let flags = [implies.breaker, implies.may_store, implies.redrivable].map(yes);
            let cells =
                [class.name(), &purse, yes(implies.cuts), yes(implies.holds), out, flags[0], flags[1], flags[2]];
            let cells = cells.map(|cell| if cell.is_empty() { " ".to_owned() } else { format!(" {cell} ") });
            format!(
                "/// | [`{class:?}`](Class::{class:?}) |{}|",
                cells.join("|").replacen(class.name(), &format!("`{class}`"), 1)
            )
        });
        assert!(source.contains(&rows.join("\n")), "the table should read\n{}", rows.join("\n"));
    }

    #[test]
    fn an_error_keeps_its_source_and_survives_boxing() {
        let error = Error::new(Outcome::of(Class::Local), "too many open files");
        let back = Error::from_box(Box::new(error));
        assert_eq!(back.class(), Class::Local);
        assert_eq!(back.source().unwrap().to_string(), "too many open files");
        assert_eq!(Error::from_box("reset".into()).class(), Class::Transport);
    }
}
