//! What it means that no answer came. Pure.

use std::{error::Error as StdError, io};

use crate::outcome::{BoxError, Class, Error, Outcome};

/// What it means that no answer came: [`Class::Transport`], unless the connection says that the request was not processed, or it is
/// the fault of this machine: it had no socket to spare for the call, or the client does not speak what the URL wants. No org is
/// to blame for those. Where no connection came about, nothing was sent.
pub(super) fn fault(error: BoxError) -> Error {
    let mut error = Error::from_box(error);
    if error.class() != Class::Transport {
        return error;
    }
    let (mut class, mut unsent, mut said) = (Class::Transport, false, None);
    let mut cause = error.source();
    while let Some(found) = cause {
        let io = found.downcast_ref::<io::Error>();
        if io.is_some_and(is_local) {
            class = Class::Local;
        } else if is_unprocessed(found) {
            class = Class::Unprocessed;
        } else if is_connect(found) && found.source().is_some_and(|why| why.to_string() == NOT_HTTP) {
            class = Class::Local;
            said = Some(WRONG_CLIENT.into());
        }
        unsent |= class != Class::Transport || io.is_some_and(is_unconnected) || is_connect(found);
        // What an `io::Error` was made from is not among its sources.
        let made_from =
            found.downcast_ref().and_then(io::Error::get_ref).map(|inner| inner as &(dyn StdError + 'static));
        cause = made_from.or_else(|| found.source());
    }
    let stamp = error.stamp_mut();
    stamp.unsent = unsent;
    stamp.said = said;
    if class != Class::Transport {
        stamp.outcome = Outcome::of(class);
    }
    error
}

/// What hyper-util's plain connector says of a URL that begins with `https`. Its error has no other mark.
const NOT_HTTP: &str = "invalid URL, scheme is not http";

const WRONG_CLIENT: &str = "the HTTP client speaks no https, and the org's base URL wants it: take `client::https` (feature `rustls`), or a client of your own that does";

/// Whether the other side says that it has not processed the request: HTTP/2's `REFUSED_STREAM`, or a `GOAWAY` that leaves it out
/// (h2 tells only those streams of it that were left out; those that were not, and are lost with the connection, see it broken).
#[cfg(feature = "http2")]
fn is_unprocessed(error: &(dyn StdError + 'static)) -> bool {
    error.downcast_ref::<h2::Error>().is_some_and(|error| {
        error.is_remote() && (error.is_go_away() || error.reason() == Some(h2::Reason::REFUSED_STREAM))
    })
}

#[cfg(not(feature = "http2"))]
fn is_unprocessed(_: &(dyn StdError + 'static)) -> bool {
    false
}

/// Nobody was reached.
fn is_unconnected(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
}

#[cfg(feature = "client")]
fn is_connect(error: &(dyn StdError + 'static)) -> bool {
    error.downcast_ref().is_some_and(hyper_util::client::legacy::Error::is_connect)
}

#[cfg(not(feature = "client"))]
fn is_connect(_: &(dyn StdError + 'static)) -> bool {
    false
}

fn is_local(error: &io::Error) -> bool {
    let out_of_files = match error.raw_os_error() {
        Some(code) if cfg!(unix) => code == 23 || code == 24, // ENFILE, EMFILE: the same numbers on every Unix
        Some(code) if cfg!(windows) => code == 10024,         // WSAEMFILE
        _ => false,
    };
    // A connection that finds no free local port.
    out_of_files || error.kind() == io::ErrorKind::AddrNotAvailable
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Wrapped(io::Error);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("client error (Connect)")
        }
    }

    impl StdError for Wrapped {
        fn source(&self) -> Option<&(dyn StdError + 'static)> {
            Some(&self.0)
        }
    }

    fn class(error: io::Error) -> Class {
        fault(Box::new(Wrapped(error))).class()
    }

    #[test]
    fn a_machine_out_of_sockets_is_local_and_any_other_fault_is_transport() {
        #[cfg(unix)]
        assert_eq!([23, 24].map(|code| class(io::Error::from_raw_os_error(code))), [Class::Local; 2]);
        assert_eq!(class(io::ErrorKind::AddrNotAvailable.into()), Class::Local);
        assert_eq!(class(io::ErrorKind::ConnectionRefused.into()), Class::Transport);
        let terminal = Error::new(Outcome::of(Class::Rejected), io::Error::from(io::ErrorKind::AddrNotAvailable));
        assert_eq!(fault(Box::new(terminal)).class(), Class::Rejected, "what is said already stays");
    }
}
