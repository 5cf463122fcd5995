//! What stands around every entry, so that it can be told from anything else wherever it is found. Pure.
//!
//! `magic (8) | length of the content (4, little-endian) | key (32) | checksum (16) | content`. The checksum is of key and content: an
//! entry under another key is none.

use bytes::{BufMut, Bytes, BytesMut};
use sha2::{Digest, Sha256};

use super::Key;

/// No text has it, and no other file.
pub(super) const MAGIC: [u8; 8] = *b"\xf7TQent\x01\n";
const LENGTH: usize = MAGIC.len();
const KEY: usize = LENGTH + 4;
const CHECKSUM: usize = KEY + 32;
/// The length of all that stands before the content.
pub(super) const HEAD: usize = CHECKSUM + 16;

/// What begins the key of what is kept of a batch: no request has such a fingerprint, by a chance of one in 2⁹⁶.
const OF_BATCH: [u8; 12] = *b"\xf7TQbatch\x01\0\0\n";

/// The key of what is kept of a batch under a place.
pub(super) fn batch_key(token: &[u8; 16], place: u32) -> Key {
    let mut key = [0; 32];
    key[..12].copy_from_slice(&OF_BATCH);
    key[12..28].copy_from_slice(token);
    key[28..].copy_from_slice(&place.to_be_bytes());
    Key::from_bytes(key)
}

/// The batch and the place that a key stands for, if it is no fingerprint.
pub(super) fn batch_of(key: &Key) -> Option<([u8; 16], u32)> {
    let (token, place) = key.as_bytes().strip_prefix(&OF_BATCH)?.split_first_chunk()?;
    Some((*token, u32::from_be_bytes(place.try_into().ok()?)))
}

/// The largest content: its length is told in four bytes, and the file's engine takes 3 GiB.
pub(super) const CONTENT_MAX: usize = 1 << 30;

/// An entry's content with its head.
pub(super) fn seal(key: &Key, content: &[u8]) -> Bytes {
    let mut sealed = BytesMut::with_capacity(HEAD + content.len());
    sealed.put_slice(&MAGIC);
    sealed.put_u32_le(u32::try_from(content.len()).unwrap_or(u32::MAX));
    sealed.put_slice(key.as_bytes());
    sealed.put_slice(&checksum(key, content));
    sealed.put_slice(content);
    sealed.freeze()
}

/// The content of the entry that begins `bytes` and its key, if it is whole; something else may follow it.
pub(super) fn open(bytes: &[u8]) -> Option<(Key, &[u8])> {
    let (key, length, checksum_of) = head(bytes)?;
    let content = bytes.get(HEAD..HEAD.checked_add(length)?)?;
    (checksum(&key, content) == checksum_of).then_some((key, content))
}

/// What the head says that begins `bytes`: the key, the length of the content, and its checksum.
pub(super) fn head(bytes: &[u8]) -> Option<(Key, usize, [u8; 16])> {
    let head = bytes.get(..HEAD)?;
    if head[..LENGTH] != MAGIC {
        return None;
    }
    let length = u32::from_le_bytes(head[LENGTH..KEY].try_into().ok()?) as usize;
    let key = Key::from_bytes(head[KEY..CHECKSUM].try_into().ok()?);
    (length <= CONTENT_MAX).then_some((key, length, head[CHECKSUM..].try_into().ok()?))
}

fn checksum(key: &Key, content: &[u8]) -> [u8; 16] {
    let mut hash = Sha256::new();
    hash.update(b"tower-quota entry 1\0");
    hash.update(key.as_bytes());
    hash.update(content);
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    short
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_sealed_is_opened_and_nothing_that_differs_in_one_bit(
            key: [u8; 32], content: Vec<u8>, rest: Vec<u8>, at: prop::sample::Index, bit in 0u8..8,
        ) {
            let key = Key::from_bytes(key);
            let sealed = seal(&key, &content);
            let followed = [&sealed[..], &rest].concat();
            prop_assert_eq!(open(&followed), Some((key, &content[..])));
            let mut damaged = sealed.to_vec();
            damaged[at.index(sealed.len())] ^= 1 << bit;
            prop_assert_eq!(open(&damaged), None);
            prop_assert_eq!(open(&sealed[..at.index(sealed.len())]), None);
        }

        #[test]
        fn the_key_of_what_is_kept_of_a_batch_says_of_which_and_is_no_other(token: [u8; 16], place: u32, other: [u8; 32]) {
            prop_assert_eq!(batch_of(&batch_key(&token, place)), Some((token, place)));
            prop_assert_eq!(batch_of(&Key::from_bytes(other)), None);
        }

        #[test]
        fn any_bytes_can_be_looked_at(bytes: Vec<u8>, magic: bool) {
            let bytes = if magic { [&MAGIC[..], &bytes].concat() } else { bytes };
            prop_assert_eq!(open(&bytes), None);
        }
    }
}
