//! Takes a key out of what is kept. Pure.

use bytes::Bytes;

/// What stands in place of a key.
pub(super) const SCRUBBED: &str = "***";

/// The body with this key replaced wherever it stands, however it is quoted; `None` if it is not in it. The key is not empty.
pub(super) fn scrub(body: &[u8], key: &str) -> Option<Bytes> {
    let mut clean = None;
    for key in spellings(key) {
        let body = clean.as_deref().unwrap_or(body);
        clean = without(body, key.as_bytes()).or(clean);
    }
    clean
}

/// A key as it is, and as JSON and Rust quote it.
pub(super) fn spellings(key: &str) -> Vec<String> {
    let json = serde_json::Value::from(key).to_string();
    let mut all = vec![key.to_owned(), json[1..json.len() - 1].to_owned(), key.escape_debug().to_string()];
    all.dedup();
    // The longest first: it may have a shorter one in it.
    all.sort_by_key(|key| std::cmp::Reverse(key.len()));
    all
}

fn without(body: &[u8], secret: &[u8]) -> Option<Bytes> {
    let mut clean = Vec::new();
    let mut rest = body;
    while let Some(at) = rest.windows(secret.len()).position(|window| window == secret) {
        clean.extend_from_slice(&rest[..at]);
        clean.extend_from_slice(SCRUBBED.as_bytes());
        rest = &rest[at + secret.len()..];
    }
    if clean.is_empty() {
        return None;
    }
    clean.extend_from_slice(rest);
    Some(Bytes::from(clean))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_occurrence_of_a_secret_is_replaced_and_only_those() {
        for (body, expected) in [
            ("key sk-1 and sk-1", Some("key *** and ***")),
            ("sk-1", Some("***")),
            ("sk-1sk-1", Some("******")),
            ("ssk-1x", Some("s***x")),
            ("sk-", None),
            ("", None),
        ] {
            assert_eq!(scrub(body.as_bytes(), "sk-1").as_deref(), expected.map(str::as_bytes), "{body}");
        }
        assert_eq!(scrub(b"\xff\xfesk-1", "sk-1").as_deref(), Some(&b"\xff\xfe***"[..]), "whatever the bytes are");
    }

    #[test]
    fn a_key_is_found_as_it_is_quoted_too() {
        for (body, key) in [(r#"{"key":"a\"b\\c"}"#, r#"a"b\c"#), (r#"a"b\c"#, r#"a"b\c"#)] {
            let clean = scrub(body.as_bytes(), key).unwrap();
            assert!(clean.windows(3).any(|part| part == b"***") && !clean.contains(&b'b'), "{clean:?}");
        }
    }
}
