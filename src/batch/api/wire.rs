//! Makes requests: paths, queries, bodies. Pure.

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Uri, header::CONTENT_TYPE};

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// More of an id than this goes on no wire; ids that are longer are not read either.
pub(super) const ID_MOST: usize = 512;

/// A request without a body.
pub(super) fn bare(method: Method, uri: &str) -> Request<Bytes> {
    let mut request = Request::new(Bytes::new());
    *request.method_mut() = method;
    *request.uri_mut() = uri.parse().unwrap_or_else(|_| without_query(uri));
    request
}

/// A request with a body of this type.
pub(super) fn post(uri: &str, kind: HeaderValue, body: Bytes) -> Request<Bytes> {
    let mut request = bare(Method::POST, uri);
    request.headers_mut().insert(CONTENT_TYPE, kind);
    *request.body_mut() = body;
    request
}

/// Only the query of a foreign group can be none: without it the provider will say what is missing.
fn without_query(uri: &str) -> Uri {
    let path = uri.split('?').next().unwrap_or("/");
    path.parse().expect("paths are literals with percent-encoded ids in them")
}

/// Text as a part of a path or a query: all but letters, digits, `-`, `_` and `~` is percent-encoded, so it can neither leave its part
/// nor be a `..`.
pub(super) fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes().take(ID_MOST) {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'~') {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_id_stays_within_its_part_of_the_path() {
        for (id, expected) in [
            ("msgbatch_01-a", "msgbatch_01-a"),
            ("../files", "%2E%2E%2Ffiles"),
            ("a?b#c d", "a%3Fb%23c%20d"),
            ("é", "%C3%A9"),
            ("", ""),
        ] {
            assert_eq!(encoded(id), expected, "{id}");
        }
    }

    #[test]
    fn an_id_that_is_too_long_for_a_path_is_cut() {
        let uri = format!("/v1/batches/{}", encoded(&"a".repeat(100_000)));
        assert_eq!(bare(Method::GET, &uri).uri().path().len(), "/v1/batches/".len() + ID_MOST);
    }

    #[test]
    fn a_query_that_is_none_is_left_out() {
        assert_eq!(bare(Method::GET, "/v1/a?b=c").uri(), "/v1/a?b=c");
        assert_eq!(bare(Method::GET, "/v1/a?b c").uri(), "/v1/a");
    }

    proptest! {
        #[test]
        fn any_id_makes_a_request(id: String) {
            let uri = format!("/v1/batches/{}/cancel", encoded(&id));
            let request = bare(Method::POST, &uri);
            prop_assert_eq!(request.uri().path(), uri);
            prop_assert_eq!(request.uri().query(), None);
        }
    }
}
