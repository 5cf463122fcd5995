//! What is kept of an answer, and how it is written. Pure.

use bytes::{BufMut, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{Key, seal};

/// The version of what stands in the content; another one is unreadable, so a miss.
const VERSION: u8 = 1;

/// The headers that are kept. What tells of quotas, connections and cookies was of its time.
const KEPT: [&str; 9] = [
    "content-encoding",
    "content-type",
    "request-id",
    "x-request-id",
    "anthropic-organization-id",
    "openai-model",
    "openai-organization",
    "openai-version",
    "x-ms-region",
];

/// An answer as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Entry {
    /// What is kept of an answer.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap, body: Bytes) -> Self {
        let mut kept = HeaderMap::new();
        for name in KEPT {
            let name = HeaderName::from_static(name);
            for value in headers.get_all(&name) {
                kept.append(name.clone(), value.clone());
            }
        }
        Entry { status, headers: kept, body }
    }

    /// As it is written; `None` if it is too large for that.
    pub(super) fn write(&self, key: &Key) -> Option<Bytes> {
        let mut content = Vec::with_capacity(128 + self.body.len());
        content.put_u8(VERSION);
        content.put_u16_le(self.status.as_u16());
        content.put_u16_le(u16::try_from(self.headers.len()).ok()?);
        for (name, value) in &self.headers {
            for text in [name.as_str().as_bytes(), value.as_bytes()] {
                content.put_u32_le(u32::try_from(text.len()).ok()?);
                content.put_slice(text);
            }
        }
        content.put_slice(&self.body);
        (content.len() <= seal::CONTENT_MAX).then(|| seal::seal(key, &content))
    }

    /// What was written under `key`; `None` if the bytes are anything else.
    pub(super) fn read(key: &Key, bytes: &Bytes) -> Option<Self> {
        let (of, content) = seal::open(bytes)?;
        if of != *key || seal::HEAD + content.len() != bytes.len() {
            return None;
        }
        let mut rest = content;
        let [version] = take::<1>(&mut rest)?;
        if version != VERSION {
            return None;
        }
        let status = StatusCode::from_u16(u16::from_le_bytes(take(&mut rest)?)).ok()?;
        let mut headers = HeaderMap::new();
        for _ in 0..u16::from_le_bytes(take(&mut rest)?) {
            let name = HeaderName::from_bytes(text(&mut rest)?).ok()?;
            headers.try_append(name, HeaderValue::from_bytes(text(&mut rest)?).ok()?).ok()?;
        }
        Some(Entry { status, headers, body: bytes.slice(bytes.len() - rest.len()..) })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*taken)
}

fn text<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_le_bytes(take(rest)?) as usize;
    let (text, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: Key = Key::from_bytes([7; 32]);

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn what_tells_of_its_time_is_not_kept() {
        let all = headers(&[
            ("content-type", "application/json"),
            ("request-id", "req_1"),
            ("set-cookie", "a=b"),
            ("content-length", "2"),
            ("anthropic-ratelimit-requests-remaining", "3"),
            ("retry-after", "4"),
        ]);
        let entry = Entry::of(StatusCode::OK, &all, Bytes::from_static(b"{}"));
        assert_eq!(entry.headers, headers(&[("content-type", "application/json"), ("request-id", "req_1")]));
    }

    #[test]
    fn an_entry_under_another_key_or_of_another_version_is_none() {
        let entry = Entry { status: StatusCode::OK, headers: HeaderMap::new(), body: Bytes::from_static(b"{}") };
        let written = entry.write(&KEY).unwrap();
        assert_eq!(Entry::read(&KEY, &written), Some(entry));
        assert_eq!(Entry::read(&Key::from_bytes([8; 32]), &written), None);
        assert_eq!(Entry::read(&KEY, &Bytes::from([&written[..], b"x"].concat())), None, "followed by something");
        assert_eq!(Entry::read(&KEY, &seal::seal(&KEY, &[VERSION + 1, 200, 0, 0, 0])), None);
        assert!(Entry::read(&KEY, &seal::seal(&KEY, &[VERSION, 200, 0, 0, 0])).is_some());
    }

    proptest! {
        #[test]
        fn it_is_read_as_it_was_written(
            status in 100u16..1000, id in "[ -~]{0,20}", also in "[ -~]{0,20}", body: Vec<u8>, at: prop::sample::Index, bit in 0u8..8,
        ) {
            let mut headers = HeaderMap::new();
            for value in [id, also] {
                headers.append("x-request-id", HeaderValue::from_str(&value).unwrap());
            }
            let entry = Entry::of(StatusCode::from_u16(status).unwrap(), &headers, body.into());
            let written = entry.write(&KEY).unwrap();
            prop_assert_eq!(Entry::read(&KEY, &written), Some(entry));
            let mut damaged = written.to_vec();
            damaged[at.index(written.len())] ^= 1 << bit;
            prop_assert_eq!(Entry::read(&KEY, &damaged.into()), None);
            prop_assert_eq!(Entry::read(&KEY, &written.slice(..at.index(written.len()))), None);
        }

        #[test]
        fn whatever_is_sealed_is_read_or_refused(content: Vec<u8>, version: bool) {
            let content = if version { [&[VERSION, 200, 0][..], &content].concat() } else { content };
            let _ = Entry::read(&KEY, &seal::seal(&KEY, &content));
            let _ = Entry::read(&KEY, &content.into());
        }
    }
}
