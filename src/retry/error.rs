//! How a request ends that cannot be answered.

use std::{any::Any, error::Error as StdError, fmt, sync::Arc, time::Duration};

use http::{HeaderValue, Request, StatusCode};
use tokio::time::Instant;

use super::{Counts, Exhaustion};
use crate::{
    call::Tried,
    outcome::{self, BoxError, Class, Purse},
};

/// Why there is no answer.
///
/// Display speaks to people: what happened, which org, what to do. [`source`](StdError::source) of an exhausted request is
/// the last inner error, if the last attempt ended in one and not in a response.
#[non_exhaustive]
pub enum RetryError<Req, E> {
    /// Every attempt that was allowed has been made, or it has waited for too long. Holds the request, to be sent again later.
    Exhausted(Box<Exhausted<Req>>),
    /// The inner service's own error, of a class that is not retried, or from its readiness.
    Inner(E),
}

impl<Req, E> RetryError<Req, E> {
    /// Whether 429s or waiting for its turn ended it: try again later, nothing is wrong with the request.
    #[must_use]
    pub fn is_rate_limited(&self) -> bool {
        matches!(self, RetryError::Exhausted(exhausted) if exhausted.is_rate_limited())
    }

    /// The request as the caller gave it, if it was retried to exhaustion.
    #[must_use]
    pub fn into_request(self) -> Option<Req> {
        match self {
            RetryError::Exhausted(exhausted) => Some(exhausted.into_request()),
            RetryError::Inner(_) => None,
        }
    }

    /// The same with another inner error.
    #[must_use]
    pub fn map_inner<F>(self, change: impl FnOnce(E) -> F) -> RetryError<Req, F> {
        match self {
            RetryError::Exhausted(exhausted) => RetryError::Exhausted(exhausted),
            RetryError::Inner(error) => RetryError::Inner(change(error)),
        }
    }
}

impl<Req, E: 'static> RetryError<Req, E> {
    /// The class of the last answer; `None` for an inner error that is not this crate's [`Error`](outcome::Error).
    #[must_use]
    pub fn class(&self) -> Option<Class> {
        match self {
            RetryError::Exhausted(exhausted) => Some(exhausted.last.class),
            RetryError::Inner(error) => (error as &dyn Any).downcast_ref::<outcome::Error>().map(outcome::Error::class),
        }
    }

    /// Whether the same request may be sent again later with hope. False where the class is not known.
    #[must_use]
    pub fn is_redrivable(&self) -> bool {
        match self {
            RetryError::Exhausted(exhausted) => exhausted.is_redrivable(),
            RetryError::Inner(_) => self.class().is_some_and(|class| class.implies().redrivable),
        }
    }
}

/// A request that was retried until a bound, and what is known of its way.
#[non_exhaustive]
pub struct Exhausted<Req> {
    /// The request as the caller gave it: method, URI, headers, extensions and body unchanged.
    pub request: Req,
    /// The `idempotency-key` that went with every attempt, the caller's or one made here. To keep it over a later run, set
    /// it on the request.
    pub idempotency_key: Option<HeaderValue>,
    /// What failed first. Where nothing has failed, because it was never its turn, that: of class
    /// [`Local`](Class::Local), for nothing was sent.
    pub first: Cause,
    /// What failed last; a call that was dropped at the deadline is of class [`Transport`](Class::Transport).
    pub last: Cause,
    /// How many answers of each class, and how many calls that had none.
    pub counts: Counts,
    /// Calls that went over the wire.
    pub wire_calls: u32,
    /// The orgs that were asked and did not answer, in the order in which they were first asked; empty without a balancer. A
    /// call that was dropped at the deadline is not in it.
    pub tried: Vec<Tried>,
    /// The time in which no org had a call of it: waiting for its turn, holds, backoff.
    pub waited: Duration,
    /// The last wait a provider named, as it said it: under no ceiling where its headers said it.
    pub last_hint: Option<Duration>,
    /// The time that wait ends, under the reader's ceiling.
    pub not_before: Option<Instant>,
    /// From the first call to the end.
    pub elapsed: Duration,
    /// Which bound ended it.
    pub reason: Exhaustion,
    pub(super) source: Option<BoxError>,
}

impl<Req> Exhausted<Req> {
    /// Whether 429s or waiting for its turn ended it: try again later, nothing is wrong with the request. Not if it was its
    /// deadline.
    #[must_use]
    pub fn is_rate_limited(&self) -> bool {
        match self.reason {
            Exhaustion::Stalled => true,
            Exhaustion::Deadline => false,
            _ => self.last.class.implies().purse == Purse::Throttles,
        }
    }

    /// Whether it may be sent again later with hope.
    #[must_use]
    pub fn is_redrivable(&self) -> bool {
        // Whoever ran out of time was not refused.
        matches!(self.reason, Exhaustion::Stalled | Exhaustion::Deadline) || self.last.class.implies().redrivable
    }

    /// The request as the caller gave it.
    #[must_use]
    pub fn into_request(self) -> Req {
        self.request
    }
}

/// What was wrong with one answer.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// What it meant.
    pub class: Class,
    /// Its HTTP status, if there was an answer.
    pub status: Option<StatusCode>,
    /// The org that was asked, where a balancer has said so.
    pub org: Option<Arc<str>>,
    /// In words, on one line: the status, or the error with its sources; then what the provider said, where the judge found
    /// that ([`Stamp::said`](crate::outcome::Stamp::said): short, without a key). Never a body.
    pub message: String,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        // An error names its org itself.
        match &self.org {
            Some(org) if self.status.is_some() => write!(f, " (org {org})"),
            _ => Ok(()),
        }
    }
}

/// Rounded as one would say it.
pub(super) fn spoken(span: Duration) -> humantime::FormattedDuration {
    let rounded = if span < Duration::from_secs(1) {
        Duration::from_millis(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
    } else {
        Duration::from_secs(span.as_secs())
    };
    humantime::format_duration(rounded)
}

impl<Req> fmt::Display for Exhausted<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let times = |n: u32| if n == 1 { "once".to_owned() } else { format!("{n} times") };
        let over = spoken(self.elapsed);
        let refused = self.counts.paid_by(Purse::Throttles);
        if self.reason == Exhaustion::Deadline {
            return write!(f, "not done by its deadline, after {over}, last: {}; it may be sent again", self.last);
        }
        if !self.is_rate_limited() {
            let failed = times(self.counts.paid_by(Purse::Errors));
            return match self.reason {
                Exhaustion::Calls => {
                    write!(f, "gave up after {} calls over {over}, last: {}", self.wire_calls, self.last)
                }
                _ => write!(f, "failed {failed} over {over}, last: {}; it may be sent again", self.last),
            };
        }
        match refused {
            0 => write!(f, "waited {over} for its turn while nothing got anywhere")?,
            _ => write!(f, "rate limited {} over {over}", times(refused))?,
        }
        if let Some(org) = &self.last.org {
            write!(f, ", last by org {org}")?;
        }
        f.write_str(": try again later")?;
        match self.last_hint {
            Some(hint) => write!(f, " (the provider asked for {})", spoken(hint)),
            None => Ok(()),
        }
    }
}

/// Method and path only: a header, a query or a body may hold a key.
struct Named<'a, B>(&'a Request<B>);

impl<B> fmt::Debug for Named<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0.method(), self.0.uri().path())
    }
}

impl<B> fmt::Debug for Exhausted<Request<B>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exhausted")
            .field("request", &Named(&self.request))
            .field("reason", &self.reason)
            .field("first", &self.first)
            .field("last", &self.last)
            .field("counts", &self.counts)
            .field("wire_calls", &self.wire_calls)
            .field("tried", &self.tried)
            .field("waited", &self.waited)
            .field("last_hint", &self.last_hint)
            .field("elapsed", &self.elapsed)
            .finish_non_exhaustive()
    }
}

impl<B> StdError for Exhausted<Request<B>> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|error| error as _)
    }
}

impl<B, E: fmt::Debug> fmt::Debug for RetryError<Request<B>, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetryError::Exhausted(exhausted) => exhausted.fmt(f),
            RetryError::Inner(error) => f.debug_tuple("Inner").field(error).finish(),
        }
    }
}

impl<Req, E: fmt::Display> fmt::Display for RetryError<Req, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetryError::Exhausted(exhausted) => exhausted.fmt(f),
            RetryError::Inner(error) => error.fmt(f),
        }
    }
}

impl<B, E: StdError> StdError for RetryError<Request<B>, E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            RetryError::Exhausted(exhausted) => exhausted.source(),
            RetryError::Inner(error) => error.source(),
        }
    }
}
