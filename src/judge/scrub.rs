//! Takes keys out of what is kept and told.

use std::{
    borrow::Cow,
    sync::{Arc, PoisonError, RwLock},
};

use bytes::Bytes;

use crate::org::{Credential, Org};

/// What stands in place of a key.
pub(super) const SCRUBBED: &str = "***";

/// Keys that are told nowhere: an org's own, and in a stack those of all its orgs, also of such as join later. All clones are one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Keys(Arc<RwLock<Vec<Credential>>>);

impl Keys {
    /// The same keys, and from now on others.
    pub(crate) fn apart(&self) -> Self {
        Keys(Arc::new(RwLock::new(self.all())))
    }

    /// Adds an org's key, if it has one.
    pub(crate) fn add(&self, org: &Org) {
        let Some(key) = org.key().filter(|key| !key.reveal().is_empty()) else { return };
        // Nothing that can panic runs under this lock.
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if !keys.contains(key) {
            keys.push(key.clone());
            // The longest first: it may have a shorter one in it.
            keys.sort_by_key(|key| std::cmp::Reverse(key.reveal().len()));
        }
    }

    fn all(&self) -> Vec<Credential> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The body without any key of at least so many bytes; `None` if there is none in it.
    pub(super) fn scrub(&self, body: &[u8], shortest: usize) -> Option<Bytes> {
        let mut clean = None;
        for key in self.all().iter().filter(|key| key.reveal().len() >= shortest) {
            clean = scrub(clean.as_deref().unwrap_or(body), key.reveal()).or(clean);
        }
        clean
    }

    /// The same of a text.
    pub(super) fn scrub_text<'a>(&self, text: &'a str, shortest: usize) -> Cow<'a, str> {
        match self.scrub(text.as_bytes(), shortest) {
            // A key ends where a character ends, so what is left is text still.
            Some(clean) => String::from_utf8_lossy(&clean).into_owned().into(),
            None => text.into(),
        }
    }

    /// Whether any stands in it.
    pub(super) fn are_in(&self, text: &str) -> bool {
        self.scrub(text.as_bytes(), 0).is_some()
    }
}

/// The body with this key replaced wherever it stands, however it is written; `None` if it is not in it. The key is not empty.
fn scrub(body: &[u8], key: &str) -> Option<Bytes> {
    let mut clean = None;
    for key in quoted(key) {
        let body = clean.as_deref().unwrap_or(body);
        clean = without(body, key.as_bytes()).or(clean);
    }
    clean
}

/// A key as it is, and as JSON and Rust quote it.
fn quoted(key: &str) -> Vec<String> {
    let json = serde_json::Value::from(key).to_string();
    let mut all = vec![key.to_owned(), json[1..json.len() - 1].to_owned(), key.escape_debug().to_string()];
    all.dedup();
    // The longest first: it may have a shorter one in it.
    all.sort_by_key(|key| std::cmp::Reverse(key.len()));
    all
}

fn without(body: &[u8], secret: &[u8]) -> Option<Bytes> {
    let mut clean = Vec::new();
    let (mut copied, mut at) = (0, 0);
    while at < body.len() {
        let Some(length) = starts_with(&body[at..], secret) else {
            at += 1;
            continue;
        };
        clean.extend_from_slice(&body[copied..at]);
        clean.extend_from_slice(SCRUBBED.as_bytes());
        at += length;
        copied = at;
    }
    if copied == 0 {
        return None;
    }
    clean.extend_from_slice(&body[copied..]);
    Some(Bytes::from(clean))
}

/// How long the secret is that the text begins with, if it does: each byte as it is, or encoded.
fn starts_with(text: &[u8], secret: &[u8]) -> Option<usize> {
    if !matches!(text.first(), Some(first) if *first == secret[0] || matches!(first, b'%' | b'\\')) {
        return None;
    }
    // A key may itself have in it what looks encoded.
    if text.starts_with(secret) {
        return Some(secret.len());
    }
    let mut length = 0;
    for byte in secret {
        length += written(&text[length..], *byte)?;
    }
    Some(length)
}

/// How many bytes of the text write this one: `%2d`, `\u002d`, `\/`, or itself.
fn written(text: &[u8], byte: u8) -> Option<usize> {
    let digit = |digit: u8| char::from(digit).to_digit(16);
    let is_hex = |high: u8, low: u8| matches!((digit(high), digit(low)), (Some(high), Some(low)) if high << 4 | low == u32::from(byte));
    match text {
        [b'%', high, low, ..] if is_hex(*high, *low) => Some(3),
        [b'\\', b'u', b'0', b'0', high, low, ..] if byte.is_ascii() && is_hex(*high, *low) => Some(6),
        [b'\\', b'/', ..] if byte == b'/' => Some(2),
        [first, ..] if *first == byte => Some(1),
        _ => None,
    }
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
    fn a_key_is_found_however_much_of_it_is_encoded() {
        for (body, key, expected) in [
            ("?key=a%2Bb&c", "a+b", Some("?key=***&c")),
            ("?key=a%2bb&c", "a+b", Some("?key=***&c")),
            ("%61%2B%62", "a+b", Some("***")),
            (r"a\u002bb", "a+b", Some("***")),
            (r"a\/b", "a/b", Some("***")),
            ("a%2Bb%", "a+b", Some("***%")),
            // Its neighbours: another byte, half an escape, a sign of a number, and nothing more.
            ("a%2Cb", "a+b", None),
            ("a%2", "a+b", None),
            ("a%+bb", "a\u{b}b", None),
            ("a%", "a+b", None),
            (r"a\u002", "a+b", None),
            // What looks encoded may be the key itself.
            ("x a%2Bb x", "a%2Bb", Some("x *** x")),
            ("x a%252Bb x", "a%2Bb", Some("x *** x")),
            ("x a%2Bb x", "a%2Bc", None),
        ] {
            let clean = scrub(body.as_bytes(), key);
            assert_eq!(clean.as_deref(), expected.map(str::as_bytes), "{key} in {body}");
        }
    }

    #[test]
    fn of_two_keys_the_longer_one_goes_first_and_each_is_known_once() {
        let org = |key: &str| Org::new("a").credential(Credential::new(key));
        let keys = Keys::default();
        for key in ["sk-1", "sk-12", "sk-1", " "] {
            keys.add(&org(key));
        }
        keys.add(&Org::new("b"));
        let apart = keys.apart();
        apart.add(&org("sk-3"));
        assert_eq!((keys.all().len(), apart.all().len()), (2, 3));
        assert_eq!(keys.scrub_text("sk-12 sk-1 sk-3", 0), "*** *** sk-3");
        assert_eq!(keys.scrub_text("sk-12 sk-1 sk-3", 5), "*** sk-1 sk-3");
        assert!(keys.are_in("sk%2d1") && !keys.are_in("sk-3"));
        assert!(!format!("{keys:?}").contains("sk"));
    }

    #[test]
    fn a_key_is_found_as_it_is_quoted_too() {
        for (body, key) in [(r#"{"key":"a\"b\\c"}"#, r#"a"b\c"#), (r#"a"b\c"#, r#"a"b\c"#)] {
            let clean = scrub(body.as_bytes(), key).unwrap();
            assert!(clean.windows(3).any(|part| part == b"***") && !clean.contains(&b'b'), "{clean:?}");
        }
    }
}
