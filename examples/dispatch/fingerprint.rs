//! What a request asks for, as one figure: two rows of one id belong together only if it is the same.

use http::uri::PathAndQuery;

/// Over the path and the body; the order of a body's members does not count, nor do blanks between them.
pub(crate) fn fingerprint(path: &PathAndQuery, body: &[u8]) -> u128 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    (path.as_str(), body).hash(&mut hasher);
    u128::from(hasher.finish())
}
