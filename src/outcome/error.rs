//! The error of the stack from the judge upward.

use std::{error::Error as StdError, fmt};

use super::{BoxError, Class, Outcome, Stamp};
use crate::org::Org;

/// The error of the stack from the judge upward: what happened, at which org, and the cause as
/// [`source`](StdError::source).
pub struct Error {
    // On the heap: errors are rare, and every answer that may be one would carry it.
    stamp: Box<Stamp>,
    source: BoxError,
}

impl Error {
    /// An error with its meaning and its cause.
    pub fn new(outcome: Outcome, source: impl Into<BoxError>) -> Self {
        Error { stamp: Box::new(Stamp::new(outcome)), source: source.into() }
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
            Class::OutOfQuota => "quota or credit is used up",
            Class::Unauthorised => "the key is refused",
            Class::Forbidden => "the key is not allowed this model",
            Class::Rejected => "the answer was rejected by the caller's check",
            Class::Empty => "the answer was empty",
            Class::Garbled => "the provider could not read the request whole",
            Class::TooLarge => "the request is too large",
            Class::Terminal => "refused for good",
            Class::Ok => "answered",
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

/// An error and its sources in one line.
pub(crate) fn in_one_line(error: &(dyn StdError + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        line.push_str(": ");
        line.push_str(&error.to_string());
        next = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_source_and_survives_boxing() {
        let error = Error::new(Outcome::of(Class::Local), "too many open files");
        let back = Error::from_box(Box::new(error));
        assert_eq!(back.class(), Class::Local);
        assert_eq!(back.source().unwrap().to_string(), "too many open files");
        assert_eq!(Error::from_box("reset".into()).class(), Class::Transport);
    }
}
