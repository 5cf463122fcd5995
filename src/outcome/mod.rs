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

mod class;
mod classify;
mod error;
mod stamp;

use std::{
    error::Error as StdError,
    time::{Duration, SystemTime},
};

use http::{HeaderMap, StatusCode};
use tokio::time::Instant;

pub(crate) use self::error::in_one_line;
pub use self::{
    class::{Class, Implies, Out, Purse},
    classify::{ByStatus, Classify, ClassifyFn, Stamped, classify_fn},
    error::Error,
    stamp::{Stamp, Usage},
};
use crate::hint;
pub use crate::tail::{Ended, Tail};

/// A boxed error, as tower uses it.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// The longest wait that is believed at once, unless a layer is told otherwise: five minutes. A longer hint is not
/// obeyed blindly (clients that did looked hung for days); the org is asked again, by one call, whenever this has passed.
pub const HINT_CEILING: Duration = Duration::from_secs(300);

/// A longer ceiling is taken as this one, so that adding a believed wait to the clock cannot overflow.
pub(crate) const CEILING_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

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
            (204, Class::Ok),
            (302, Class::Terminal),
            (304, Class::Terminal),
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
}
