//! What makes two requests the same: a fingerprint. Pure.

use std::{borrow::Cow, fmt, sync::Arc};

use http::{HeaderName, Request, header};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::org::BuildError;

/// JSON that goes deeper is taken as bytes: each level is read once more for the one above it.
const DEPTH: usize = 64;

/// Names of parameters in a query that say who asks, not what.
const CREDENTIALS_IN_QUERY: [&str; 4] = ["key", "api_key", "api-key", "access_token"];

/// Headers that say who asks: a key is never part of a fingerprint.
const CREDENTIALS: [HeaderName; 6] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::COOKIE,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// A request extension: who wants the same request answered more than once gives each a salt of its own.
///
/// Without one, requests that are the same have the same answer, and only one of them is sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Salt(pub String);

/// The fingerprint of a request: a full SHA-256 of everything that its answer depends on, and of nothing that says who asks.
///
/// It covers the method, the host, path and query, [those headers](KeyHeaders) that change the answer, `accept-encoding`, the [`Salt`], and the
/// body. A body of JSON
/// is brought into one form: the order of members, blanks and the way in which a text is escaped make no difference. Everything
/// else does, the order of an array as well as the text of a number: `1` and `1.0` are two requests, since a miss costs a call and a
/// false hit is a wrong answer. So is a body that is no JSON, or names a member twice: it counts by its bytes, and with it its
/// `content-type` and `content-encoding`.
///
/// Parameters of the query that hold a key (`key`, `api_key`, `api-key`, `access_token`) are left out, and so is a user in the URI.
///
/// ```
/// use http::Request;
/// use tower_quota::journal::{Key, KeyHeaders};
///
/// let headers = KeyHeaders::default();
/// let key = |body: &str| Key::of(&Request::post("/v1/messages").body(()).unwrap(), body.as_bytes(), &headers);
/// assert_eq!(key(r#"{"model":"m","max_tokens":9}"#), key(r#"{ "max_tokens": 9, "model": "\u006d" }"#));
/// assert_ne!(key(r#"{"model":"m","max_tokens":9}"#), key(r#"{"model":"m","max_tokens":10}"#));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// The fingerprint of a request whose body is `body`; the request's own is not looked at.
    #[must_use]
    pub fn of<B>(request: &Request<B>, body: &[u8], headers: &KeyHeaders) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"tower-quota journal 1\0");
        text(&mut hash, request.method().as_str().as_bytes());
        place(&mut hash, request.uri());
        for name in &*headers.0 {
            all_of(&mut hash, request, name);
        }
        // In what form it may be answered.
        if !headers.0.contains(&header::ACCEPT_ENCODING) {
            all_of(&mut hash, request, &header::ACCEPT_ENCODING);
        }
        // No header has an empty name.
        text(&mut hash, b"");
        if let Some(Salt(salt)) = request.extensions().get() {
            hash.update(b"salt");
            text(&mut hash, salt.as_bytes());
        }
        let mut canonical = hash.clone();
        if json(&mut canonical, body).is_some() {
            return Key(canonical.finalize().into());
        }
        hash.update(b"bytes");
        for name in [header::CONTENT_TYPE, header::CONTENT_ENCODING] {
            all_of(&mut hash, request, &name);
        }
        text(&mut hash, b"");
        text(&mut hash, body);
        Key(hash.finalize().into())
    }

    /// A fingerprint that was written down.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Key(bytes)
    }

    /// Its 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// In hexadecimal.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// The request headers that change the answer. Default: `anthropic-version`, `anthropic-beta` and `openai-beta`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyHeaders(Arc<[HeaderName]>);

impl KeyHeaders {
    /// These, in whatever order.
    ///
    /// # Errors
    /// If one of them holds a key (`authorization`, `x-api-key` and the like).
    pub fn new(names: impl IntoIterator<Item = HeaderName>) -> Result<Self, BuildError> {
        let names: Vec<_> = names.into_iter().collect();
        match names.iter().find(|name| CREDENTIALS.contains(name)) {
            Some(name) => Err(BuildError::new(
                "key_headers",
                format!("`{name}` says who asks: the same request of another org would be another one"),
            )),
            None => Ok(KeyHeaders::sorted(names)),
        }
    }

    fn sorted(mut names: Vec<HeaderName>) -> Self {
        names.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        KeyHeaders(names.into())
    }
}

impl Default for KeyHeaders {
    fn default() -> Self {
        KeyHeaders::sorted(["anthropic-version", "anthropic-beta", "openai-beta"].map(HeaderName::from_static).into())
    }
}

/// With its length before it, so that no two lists of texts look the same.
fn text(hash: &mut Sha256, text: &[u8]) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

/// Where the request goes.
fn place(hash: &mut Sha256, uri: &http::Uri) {
    text(hash, uri.host().unwrap_or_default().to_ascii_lowercase().as_bytes());
    text(hash, uri.port().as_ref().map_or("", |port| port.as_str()).as_bytes());
    text(hash, uri.path().as_bytes());
    for parameter in uri.query().unwrap_or_default().split('&') {
        let name = parameter.split('=').next().unwrap_or_default();
        if !parameter.is_empty() && !CREDENTIALS_IN_QUERY.iter().any(|secret| secret.eq_ignore_ascii_case(name)) {
            text(hash, parameter.as_bytes());
        }
    }
    text(hash, b"");
}

/// A header with all its values, if it has any.
fn all_of<B>(hash: &mut Sha256, request: &Request<B>, name: &HeaderName) {
    let mut values = request.headers().get_all(name).iter();
    let Some(first) = values.next() else { return };
    text(hash, name.as_str().as_bytes());
    let Some(second) = values.next() else { return text(hash, first.as_bytes()) };
    // A list may come on one line or on several.
    let all: Vec<_> = [first, second].into_iter().chain(values).map(http::HeaderValue::as_bytes).collect();
    text(hash, &all.join(&b", "[..]));
}

/// The body in one form, if it is JSON, and `None` if it is not, or not of one meaning.
fn json(hash: &mut Sha256, body: &[u8]) -> Option<()> {
    hash.update(b"json");
    let body: &RawValue = serde_json::from_slice(body).ok()?;
    value(hash, body, DEPTH)
}

fn value(hash: &mut Sha256, raw: &RawValue, depth: usize) -> Option<()> {
    let depth = depth.checked_sub(1)?;
    let json = raw.get();
    match json.as_bytes().first()? {
        b'{' => {
            let Members(mut members) = serde_json::from_str(json).ok()?;
            members.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
            if members.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return None;
            }
            count(hash, b'{', members.len());
            for (name, of) in members {
                text(hash, name.as_bytes());
                value(hash, of, depth)?;
            }
        }
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(json).ok()?;
            count(hash, b'[', items.len());
            for item in items {
                value(hash, item, depth)?;
            }
        }
        b'"' => {
            let Text(decoded) = serde_json::from_str(json).ok()?;
            count(hash, b'"', decoded.len());
            hash.update(decoded.as_bytes());
        }
        _ => {
            count(hash, b'1', json.len());
            hash.update(json.as_bytes());
        }
    }
    Some(())
}

fn count(hash: &mut Sha256, kind: u8, count: usize) {
    let mut head = [kind; 9];
    head[1..].copy_from_slice(&(count as u64).to_le_bytes());
    hash.update(head);
}

/// An object's members as they stand, without a map's own idea of order and of names that come twice.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::with_capacity(8);
                while let Some((Text(name), value)) = map.next_entry()? {
                    members.push((name, value));
                }
                Ok(Members(members))
            }
        }
        json.deserialize_map(Visit)
    }
}

/// A text, borrowed where nothing in it is escaped.
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        json.deserialize_str(Visit)
    }
}

#[cfg(test)]
mod tests {
    use http::Method;
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn request() -> Request<()> {
        Request::post("/v1/messages").header("anthropic-version", "2023-06-01").body(()).unwrap()
    }

    fn of(request: &Request<()>, body: &str) -> Key {
        Key::of(request, body.as_bytes(), &KeyHeaders::default())
    }

    fn body(body: &str) -> Key {
        of(&request(), body)
    }

    #[test]
    fn the_order_of_members_blanks_and_escapes_make_no_difference() {
        let same = body(r#"{"model":"A","messages":[{"role":"user","content":"é/"}],"max_tokens":9}"#);
        for other in [
            r#"{"max_tokens":9,"messages":[{"content":"é/","role":"user"}],"model":"A"}"#,
            " {\n\"model\" : \"A\",\t\"messages\":[ {\"role\":\"user\",\"content\":\"é/\"} ],\"max_tokens\": 9 }\r\n",
            r#"{"\u006dodel":"\u0041","messages":[{"role":"user","content":"\u00e9\/"}],"max_tokens":9}"#,
        ] {
            assert_eq!(body(other), same, "{other}");
        }
    }

    #[test]
    fn every_change_of_a_body_is_another_request() {
        let bodies = [
            "",
            "{}",
            "[]",
            "null",
            "0",
            "1",
            "1.0",
            "1e0",
            "1E0",
            "true",
            "\"\"",
            "\"1\"",
            "\"null\"",
            "[1]",
            "[[1]]",
            "[1,2]",
            "[2,1]",
            "[12]",
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":1.0}"#,
            r#"{"a":[1]}"#,
            r#"{"b":1}"#,
            r#"{"a":1,"b":2}"#,
            r#"{"a":{"b":2}}"#,
            r#"{"a":{"b":2},"c":3}"#,
            r#"{"a":{"b":2,"c":3}}"#,
            r#"{"a":{},"b":{}}"#,
            r#"{"a":{"b":{}}}"#,
            r#"{"A":1}"#,
            r#"{"a":1,"a":1}"#,
            r#"{"a":1,"a":2}"#,
            r#"{"a":2,"a":1}"#,
            r#"[{"a":1,"a":2}]"#,
            r#"{"a":1"#,
            "{'a':1}",
            r#"{"a":1}x"#,
            r#""\ud800""#,
            r#""\ud801""#,
            "\"e\u{301}\"",
            "\"\u{e9}\"",
            r#"{"a":null}"#,
            "-0",
            "9007199254740993",
            "9007199254740992",
            "1e400",
            "1e401",
            "\u{feff}{}",
        ];
        let mut keys: Vec<_> = bodies.iter().map(|text| (body(text), text)).collect();
        keys.sort();
        for pair in keys.windows(2) {
            assert_ne!(pair[0].0, pair[1].0, "{} and {}", pair[0].1, pair[1].1);
        }
    }

    #[test]
    fn where_it_goes_and_what_changes_the_answer_count_and_who_asks_does_not() {
        let base = of(&request(), "{}");
        let with = |change: fn(&mut Request<()>)| {
            let mut request = request();
            change(&mut request);
            of(&request, "{}")
        };
        let uri = |uri: &str| {
            let mut request = request();
            *request.uri_mut() = uri.parse().unwrap();
            of(&request, "{}")
        };
        fn header(request: &mut Request<()>, name: &'static str, value: &'static str) {
            request.headers_mut().append(name, value.parse().unwrap());
        }
        for (what, same) in [
            ("a key", with(|r| header(r, "x-api-key", "sk-1"))),
            ("a token", with(|r| header(r, "authorization", "Bearer sk-1"))),
            ("an idempotency key", with(|r| header(r, "idempotency-key", "1"))),
            ("a content type of JSON", with(|r| header(r, "content-type", "application/json; charset=utf-8"))),
            ("a key in the query", uri("/v1/messages?key=sk-1&API_KEY=2&api-key=3&access_token=4")),
            ("an empty query", uri("/v1/messages?")),
        ] {
            assert_eq!(same, base, "{what}");
        }
        let others = [
            base,
            with(|r| *r.method_mut() = Method::PUT),
            with(|r| header(r, "anthropic-version", "2024-01-01")),
            with(|r| header(r, "anthropic-beta", "a")),
            with(|r| header(r, "anthropic-beta", "")),
            with(|r| header(r, "openai-beta", "a")),
            with(|r| r.headers_mut().clear()),
            with(|r| drop(r.extensions_mut().insert(Salt(String::new())))),
            with(|r| drop(r.extensions_mut().insert(Salt("1".into())))),
            uri("/v1/messages/count_tokens"),
            uri("/v1/messages?beta=true"),
            uri("/v1/messages?keys=1"),
            uri("/v1/messages?beta=true&key2=1"),
            uri("http://a.example/v1/messages"),
            uri("http://b.example/v1/messages"),
            uri("http://a.example:8080/v1/messages"),
        ];
        for (at, key) in others.iter().enumerate() {
            assert!(!others[..at].contains(key), "the {at}th");
        }
        assert_eq!(uri("http://user:word@A.example/v1/messages"), uri("https://a.example/v1/messages"));
        let lists = [
            with(|r| header(r, "anthropic-beta", "a, b")),
            with(|r| {
                header(r, "anthropic-beta", "a");
                header(r, "anthropic-beta", "b");
            }),
        ];
        assert_eq!(lists[0], lists[1]);
    }

    #[test]
    fn what_is_no_json_counts_with_its_type() {
        let typed = |kind: &'static str, body: &str| {
            let mut request = request();
            request.headers_mut().insert("content-type", kind.parse().unwrap());
            of(&request, body)
        };
        assert_ne!(typed("text/plain", "Hi"), typed("text/markdown", "Hi"));
        assert_eq!(typed("text/plain", "Hi"), typed("text/plain", "Hi"));
        assert_eq!(typed("text/plain", "{}"), typed("application/json", "{ }"));
    }

    #[test]
    fn depth_is_no_danger() {
        let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        assert_eq!(body(&nested(DEPTH)), body(&format!(" {}", nested(DEPTH))), "brought into one form");
        assert_ne!(body(&nested(DEPTH + 1)), body(&format!(" {}", nested(DEPTH + 1))), "taken as bytes");
        body(&nested(100_000));
    }

    #[test]
    fn a_header_that_holds_a_key_is_refused() {
        for name in CREDENTIALS {
            assert_eq!(KeyHeaders::new([name]).unwrap_err().field(), "key_headers");
        }
        let [a, b] = ["a", "b"].map(HeaderName::from_static);
        assert_eq!(KeyHeaders::new([a.clone(), b.clone(), a.clone()]), KeyHeaders::new([b, a]));
    }

    #[test]
    fn a_fingerprint_stays_the_same_over_versions() {
        // Written journals are read by it: a change here is a change of the format.
        assert_eq!(
            body(r#"{"model":"m","messages":[{"role":"user","content":"Hi"}],"max_tokens":64}"#).to_string(),
            "fe1858bd1c269a77a8f22dfba3941c778dd9520ff4f3c3dfd26b578820052474"
        );
    }

    /// Any JSON, its members in a random order.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c\"\\\\é\u{0}-\u{1f}]{0,4}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map("[a-d\"é]{0,2}", inner, 0..5)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// The same value, written another way.
    fn rewritten(value: &Value, turn: usize) -> String {
        let text = |text: &str| {
            let units = text.encode_utf16().map(|unit| format!("\\u{unit:04X}"));
            if turn % 2 == 0 { Value::from(text).to_string() } else { format!("\"{}\"", units.collect::<String>()) }
        };
        match value {
            Value::Object(map) => {
                let mut members: Vec<_> =
                    map.iter().map(|(name, of)| format!("{} : {}", text(name), rewritten(of, turn))).collect();
                if !members.is_empty() {
                    let by = turn % members.len();
                    members.rotate_left(by);
                }
                format!("{{ {} }}", members.join("\t,"))
            }
            Value::Array(items) => {
                format!("[ {} ]", items.iter().map(|item| rewritten(item, turn)).collect::<Vec<_>>().join(" ,\n"))
            }
            Value::String(string) => text(string),
            other => other.to_string(),
        }
    }

    proptest! {
        #[test]
        fn however_it_is_written_it_is_the_same(value in any_json(), turn in 0usize..10) {
            prop_assert_eq!(body(&value.to_string()), body(&rewritten(&value, turn)));
        }

        #[test]
        fn two_values_are_two_requests(one in any_json(), other in any_json()) {
            prop_assert_eq!(body(&one.to_string()) == body(&other.to_string()), one == other);
        }

        #[test]
        fn any_bytes_have_a_fingerprint(one: Vec<u8>, other: Vec<u8>) {
            let of = |body: &[u8]| Key::of(&request(), body, &KeyHeaders::default());
            prop_assert_eq!(of(&one), of(&one.clone()));
            let is_json = |body: &[u8]| serde_json::from_slice::<Value>(body).is_ok();
            prop_assert_eq!(of(&one) == of(&other), one == other || is_json(&one) && of(&one) == of(&other));
        }
    }
}
