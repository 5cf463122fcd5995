//! The classes, and the one table of what each implies. Pure.

use std::fmt;

use http::StatusCode;

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
/// | [`Forbidden`](Class::Forbidden) | `forbidden` | elsewhere | | | model | | | yes |
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
/// hint has passed. *Out*: the org is asked no more, for all models or for this one ([`Out`]). *Breaker*: it is a
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
    /// Of the model; of its family, where the request does not say which model it is of ([`Family::model`](crate::org::Family::model)).
    Model,
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
            Class::Forbidden =>        row(Purse::Elsewhere, N,   N,    Out::Model,  N,  N,    Y),
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
    /// A redirect is no answer, and nobody here follows one: a key would go with it. 529 is Anthropic's "overloaded": no org's quota is behind it, so it is not a throttle. 409 is retried by the
    /// providers' own SDKs, so it counts as passing.
    #[must_use]
    pub const fn of_status(status: StatusCode) -> Class {
        match status.as_u16() {
            200..=299 => Class::Ok,
            429 => Class::Throttled,
            402 => Class::OutOfQuota,
            401 => Class::Unauthorised,
            403 => Class::Forbidden,
            408 | 409 => Class::Overloaded,
            413 => Class::TooLarge,
            300..=499 => Class::Terminal,
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let source = include_str!("class.rs");
        let yes = |yes: bool| if yes { "yes" } else { "" };
        let rows = Class::ALL.map(|class| {
            let implies = class.implies();
            let purse = format!("{:?}", implies.purse).to_lowercase();
            let out = [(Out::No, ""), (Out::Model, "model"), (Out::Org, "org")];
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
}
