//! What a request asks for, as one figure: two rows of one id belong together only if it is the same.

use std::sync::LazyLock;

use http::{Method, Request, uri::PathAndQuery};
use tower_quota::journal::{Key, KeyHeaders};

/// The first half of the journal's key of a request to this path with this body: the order of a body's members does not count, nor
/// do blanks between them.
pub(crate) fn fingerprint(path: &PathAndQuery, body: &[u8]) -> u128 {
    static HEADERS: LazyLock<KeyHeaders> = LazyLock::new(KeyHeaders::default);
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = path.clone().into();
    let mut half = [0; 16];
    half.copy_from_slice(&Key::of(&request, body, &HEADERS).as_bytes()[..16]);
    u128::from_be_bytes(half)
}
