//! What is kept of a batch, and how it is written. Pure.
//!
//! `version (1) | phase (1) | why cancelled (1) | token (16) | order (8) | since, created, expires (8 each, milliseconds) | org | id | file |
//! path | query | headers | keys`; texts with their length before them, all numbers little-endian. No key of an org is in it: of a request's
//! headers only those are kept that its [`Group`] names. The bodies of its rows stand apart, under the token and their place.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use bytes::{BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Request, request};

use super::Group;
use crate::{journal::Key, org::Family};

const VERSION: u8 = 2;

/// The name of one submission: ours, drawn, and of no other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token([u8; 16]);

impl Token {
    pub(super) fn draw() -> Self {
        Token(fastrand::u128(..).to_le_bytes())
    }

    /// One that was written down.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Token(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// In hexadecimal.
impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({self})")
    }
}

/// How far a batch has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is about to be submitted, or was.
    Intent,
    /// It has an id.
    Submitted,
    /// It is about to be cancelled, or was.
    CancelIntent(Why),
    /// The provider has said that it cancels it.
    Cancelled(Why),
    /// Its results were read.
    Ended,
}

/// Why we cancel one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Stuck,
    Exit,
}

/// A batch as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Record {
    pub(super) token: Token,
    pub(super) phase: Phase,
    /// Of the records that a row is in the one with the highest counts: clocks are set back.
    pub(super) order: u64,
    /// When it was about to be submitted, by our clock.
    pub(super) since: SystemTime,
    /// By the provider's clock.
    pub(super) created: Option<SystemTime>,
    pub(super) expires: Option<SystemTime>,
    pub(super) org: String,
    pub(super) id: Option<String>,
    pub(super) file: Option<String>,
    pub(super) head: RowHead,
    /// Of its rows, in the order in which they were submitted.
    pub(super) keys: Vec<Key>,
}

/// What all rows of a batch have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RowHead {
    path: String,
    query: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl RowHead {
    pub(super) fn of(group: &Group) -> Self {
        RowHead {
            path: group.path().to_owned(),
            query: group.query().map(str::to_owned),
            headers: group.headers().to_vec(),
        }
    }

    /// A row's request, as far as a batch is concerned.
    pub(super) fn request(&self, body: Bytes) -> Option<Request<Bytes>> {
        let uri = match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        };
        let mut request = Request::post(uri).body(body).ok()?;
        *request.headers_mut() = self.headers.iter().cloned().collect::<HeaderMap>();
        Some(request)
    }
}

/// A request as its row is made of it: with a body, and without what no row looks at.
pub(super) fn lean(head: &request::Parts, body: Bytes) -> Request<Bytes> {
    let mut request = Request::new(body);
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.headers_mut() = head.headers.clone();
    if let Some(family) = head.extensions.get::<Family>() {
        request.extensions_mut().insert(family.clone());
    }
    request
}

/// The id of a row in its batch.
pub(super) fn custom_id(key: Key) -> String {
    key.to_string()
}

/// The key of a row by its id; `None` if we have not given it.
pub(super) fn key_of(custom_id: &str) -> Option<Key> {
    if custom_id.len() != 64 {
        return None;
    }
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(custom_id.as_bytes().chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(Key::from_bytes(bytes))
}

impl Record {
    pub(super) fn write(&self) -> Bytes {
        let mut out = Vec::with_capacity(256 + self.keys.len() * 32);
        let (phase, why) = match self.phase {
            Phase::Intent => (1, None),
            Phase::Submitted => (2, None),
            Phase::CancelIntent(why) => (3, Some(why)),
            Phase::Cancelled(why) => (4, Some(why)),
            Phase::Ended => (5, None),
        };
        out.put_slice(&[VERSION, phase]);
        out.put_u8(why.map_or(0, |why| if why == Why::Stuck { 1 } else { 2 }));
        out.put_slice(self.token.as_bytes());
        out.put_u64_le(self.order);
        [Some(self.since), self.created, self.expires].into_iter().for_each(|at| out.put_u64_le(millis(at)));
        text(&mut out, Some(self.org.as_bytes()));
        text(&mut out, self.id.as_deref().map(str::as_bytes));
        text(&mut out, self.file.as_deref().map(str::as_bytes));
        text(&mut out, Some(self.head.path.as_bytes()));
        text(&mut out, self.head.query.as_deref().map(str::as_bytes));
        count(&mut out, self.head.headers.len());
        for (name, value) in &self.head.headers {
            text(&mut out, Some(name.as_str().as_bytes()));
            text(&mut out, Some(value.as_bytes()));
        }
        count(&mut out, self.keys.len());
        self.keys.iter().for_each(|key| out.put_slice(key.as_bytes()));
        out.into()
    }

    /// What was written; `None` if the bytes are anything else, or of a version to come.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let [version, phase, why] = take(&mut rest)?;
        let why = match why {
            1 => Why::Stuck,
            _ => Why::Exit,
        };
        let phase = match phase {
            1 => Phase::Intent,
            2 => Phase::Submitted,
            3 => Phase::CancelIntent(why),
            4 => Phase::Cancelled(why),
            5 => Phase::Ended,
            _ => return None,
        };
        if version != VERSION {
            return None;
        }
        let token = Token(take(&mut rest)?);
        let order = u64::from_le_bytes(take(&mut rest)?);
        let [since, created, expires] = [(); 3].map(|()| Some(time(u64::from_le_bytes(take(&mut rest)?))));
        let (since, created, expires) = (since??, created?, expires?);
        let org = read_string(&mut rest)??;
        let id = read_string(&mut rest)?;
        let file = read_string(&mut rest)?;
        let path = read_string(&mut rest)??;
        let query = read_string(&mut rest)?;
        let mut headers = vec![];
        for _ in 0..read_count(&mut rest)? {
            let name = HeaderName::from_bytes(read_text(&mut rest)??).ok()?;
            headers.push((name, HeaderValue::from_bytes(read_text(&mut rest)??).ok()?));
        }
        let count = read_count(&mut rest)?;
        if count.checked_mul(32) != Some(rest.len()) {
            return None;
        }
        let mut keys = Vec::with_capacity(count);
        for _ in 0..count {
            keys.push(Key::from_bytes(take(&mut rest)?));
        }
        let head = RowHead { path, query, headers };
        Some(Record { token, phase, order, since, created, expires, org, id, file, head, keys })
    }
}

/// After the epoch; 0 for none.
fn millis(at: Option<SystemTime>) -> u64 {
    let span = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    span.map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

fn time(millis: u64) -> Option<SystemTime> {
    (millis > 0).then(|| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis)))?
}

fn count(out: &mut Vec<u8>, count: usize) {
    out.put_u32_le(u32::try_from(count).unwrap_or(u32::MAX));
}

fn text(out: &mut Vec<u8>, text: Option<&[u8]>) {
    match text {
        None => out.put_u32_le(u32::MAX),
        Some(text) => {
            count(out, text.len());
            out.put_slice(text);
        }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*taken)
}

fn read_count(rest: &mut &[u8]) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(take(rest)?)).ok()
}

fn read_text<'a>(rest: &mut &'a [u8]) -> Option<Option<&'a [u8]>> {
    let length = u32::from_le_bytes(take(rest)?);
    if length == u32::MAX {
        return Some(None);
    }
    let (text, left) = rest.split_at_checked(usize::try_from(length).ok()?)?;
    *rest = left;
    Some(Some(text))
}

fn read_string(rest: &mut &[u8]) -> Option<Option<String>> {
    match read_text(rest)? {
        None => Some(None),
        Some(text) => Some(Some(String::from_utf8(text.to_vec()).ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_rows_id_is_its_key_and_no_other_text_is_one() {
        let key = Key::from_bytes(std::array::from_fn(|at| u8::try_from(at * 7).unwrap()));
        assert_eq!(key_of(&custom_id(key)), Some(key));
        assert_eq!(custom_id(key).len(), 64);
        super::super::check_custom_id(&custom_id(key)).unwrap();
        for other in ["", "a/b", &"A".repeat(64), &"a".repeat(65), &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(key_of(other), None, "{other}");
        }
    }

    fn phases() -> impl Strategy<Value = Phase> {
        let why = || prop_oneof![Just(Why::Stuck), Just(Why::Exit)];
        prop_oneof![
            Just(Phase::Intent),
            Just(Phase::Submitted),
            why().prop_map(Phase::CancelIntent),
            why().prop_map(Phase::Cancelled),
            Just(Phase::Ended),
        ]
    }

    proptest! {
        #[test]
        fn it_is_read_as_it_was_written(
            token: [u8; 16], phase in phases(), order: u64, since in 1u64..1 << 44, created: Option<u32>, expires: Option<u32>,
            org: String, id: Option<String>, file: Option<String>, query: Option<String>, value in "[ -~]{0,9}", keys: Vec<[u8; 32]>,
            at: prop::sample::Index,
        ) {
            let later = |secs: u32| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::from(secs) + 1);
            let headers = vec![(HeaderName::from_static("anthropic-beta"), HeaderValue::from_str(&value).unwrap()); 2];
            let record = Record {
                token: Token(token), phase, order, since: SystemTime::UNIX_EPOCH + Duration::from_millis(since),
                created: created.map(later), expires: expires.map(later), org, id, file,
                head: RowHead { path: "/v1/messages".to_owned(), query, headers },
                keys: keys.into_iter().map(Key::from_bytes).collect(),
            };
            let written = record.write();
            prop_assert_eq!(Record::read(&written), Some(record));
            prop_assert_eq!(Record::read(&written[..at.index(written.len())]), None);
            prop_assert_eq!(Record::read(&[&written[..], b"x"].concat()), None);
        }

        #[test]
        fn any_bytes_can_be_looked_at(bytes: Vec<u8>) {
            let _ = Record::read(&[&[VERSION, 1, 0][..], &bytes].concat());
            let _ = Record::read(&bytes);
        }
    }
}
