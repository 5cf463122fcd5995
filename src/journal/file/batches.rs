//! What is kept of batches: their records, and the bodies of their rows, in tables beside those of the entries.
//!
//! All of it is sealed as an entry is, under a key that says of what it is, so that a salvage finds it without the tables. Before the
//! content stands the number of the change that wrote it (8 bytes, little-endian), and of the one that wrote the bodies that go with it
//! (8, 0 for none): freed pages keep what was there before, and of several versions the highest number counts.
//!
//! A record stands in two tables that are written together: the damage of one is seen by the other, and mended by it.

use std::collections::HashMap;

#[cfg(feature = "batch")]
use bytes::{BufMut, Bytes, BytesMut};
#[cfg(feature = "batch")]
use redb::ReadableDatabase;
use redb::{AccessGuard, Database, ReadableTable, TableDefinition, TableHandle, WriteTransaction};

use super::tables::Fault;
use crate::journal::seal;

type Records = TableDefinition<'static, [u8; 16], &'static [u8]>;

/// Records by their tokens, and the same once more.
const RECORDS: [Records; 2] = [TableDefinition::new("batches"), TableDefinition::new("batches again")];
/// The bodies of rows by token and place.
const BODIES: TableDefinition<([u8; 16], u32), &[u8]> = TableDefinition::new("batch rows");

/// The place of a record.
const RECORD: u32 = u32::MAX;
/// So many bytes stand before the content.
const HEAD: usize = 16;

pub(super) fn names() -> [&'static str; 3] {
    let [records, copies] = &RECORDS;
    [records.name(), copies.name(), BODIES.name()]
}

pub(super) fn make(making: &WriteTransaction) -> Result<(), redb::Error> {
    for records in RECORDS {
        making.open_table(records)?;
    }
    making.open_table(BODIES)?;
    Ok(())
}

/// What was sealed, opened.
struct Kept<'a> {
    change: u64,
    /// The change that wrote the bodies that go with it.
    bodies: u64,
    #[cfg_attr(not(feature = "batch"), expect(dead_code, reason = "only salvaged"))]
    content: &'a [u8],
}

fn open<'a>(sealed: &'a [u8], token: &[u8; 16], place: u32) -> Result<Kept<'a>, Fault> {
    let kept = seal::open(sealed).filter(|(key, _)| *key == seal::batch_key(token, place)).and_then(|(_, kept)| {
        let (change, rest) = kept.split_first_chunk()?;
        let (bodies, content) = rest.split_first_chunk()?;
        Some(Kept { change: u64::from_le_bytes(*change), bodies: u64::from_le_bytes(*bodies), content })
    });
    kept.ok_or_else(damaged)
}

fn damaged() -> Fault {
    Fault::Damaged("what it keeps of batches is out of order".to_owned())
}

/// The largest record or body.
#[cfg(feature = "batch")]
pub(super) const MOST: usize = seal::CONTENT_MAX - HEAD;

/// All records. They are few, and all of them are looked at, so that damage shows before anything is submitted.
#[cfg(feature = "batch")]
pub(super) fn load(database: &Database) -> Result<Vec<([u8; 16], Bytes)>, Fault> {
    let reading = database.begin_read()?;
    let [records, copies] = RECORDS.map(|records| reading.open_table(records));
    let (records, copies) = (records?, copies?);
    let mut copies = copies.iter()?;
    let mut found = vec![];
    for record in records.iter()? {
        let ((token, record), (of, copy)) = (record?, copies.next().ok_or_else(damaged)??);
        if token.value() != of.value() || record.value() != copy.value() {
            return Err(damaged());
        }
        let kept = open(record.value(), &token.value(), RECORD)?;
        found.push((token.value(), Bytes::copy_from_slice(kept.content)));
    }
    if copies.next().is_some() { Err(damaged()) } else { Ok(found) }
}

/// The body of a row, if it is there.
#[cfg(feature = "batch")]
pub(super) fn body(database: &Database, token: &[u8; 16], place: u32) -> Result<Option<Bytes>, Fault> {
    let reading = database.begin_read()?;
    let Some(body) = reading.open_table(BODIES)?.get((*token, place))? else { return Ok(None) };
    Ok(Some(Bytes::copy_from_slice(open(body.value(), token, place)?.content)))
}

/// A record from now on, or none, and the bodies that go with it: as they are, or these. All of it or nothing, and on the disk.
#[cfg(feature = "batch")]
pub(super) fn write(
    database: &Database,
    token: &[u8; 16],
    record: Option<&Bytes>,
    bodies: Option<&[Bytes]>,
) -> Result<(), Fault> {
    let mut writing = database.begin_write()?;
    writing.set_quick_repair(true);
    {
        let before = match writing.open_table(RECORDS[0])?.get(token)? {
            Some(record) => open(record.value(), token, RECORD).map(|kept| (kept.change, kept.bodies))?,
            None => (0, 0),
        };
        let change = before.0.saturating_add(1);
        let with = match bodies {
            None => before.1,
            Some([]) => 0,
            Some(_) => change,
        };
        let record = record.map(|record| sealed(token, RECORD, change, with, record));
        for records in RECORDS {
            let mut records = writing.open_table(records)?;
            match &record {
                Some(record) => drop(records.insert(token, &record[..])?),
                None => drop(records.remove(token)?),
            }
            given_back(records.get(token)?, record.as_deref())?;
        }
        let mut rows = writing.open_table(BODIES)?;
        if bodies.is_some() {
            rows.retain_in((*token, 0)..=(*token, u32::MAX), |_, _| false)?;
        }
        for (place, body) in (0..RECORD).zip(bodies.unwrap_or_default()) {
            let body = sealed(token, place, change, change, body);
            rows.insert((*token, place), &body[..])?;
            given_back(rows.get((*token, place))?, Some(&body))?;
        }
    }
    writing.commit()?;
    Ok(())
}

#[cfg(feature = "batch")]
fn sealed(token: &[u8; 16], place: u32, change: u64, bodies: u64, content: &[u8]) -> Bytes {
    let mut kept = BytesMut::with_capacity(HEAD + content.len());
    kept.put_u64_le(change);
    kept.put_u64_le(bodies);
    kept.put_slice(content);
    seal::seal(&seal::batch_key(token, place), &kept)
}

/// A tree that is damaged takes what it does not give back.
#[cfg(feature = "batch")]
fn given_back(found: Option<AccessGuard<&[u8]>>, written: Option<&[u8]>) -> Result<(), Fault> {
    if found.as_ref().map(AccessGuard::value) == written { Ok(()) } else { Err(damaged()) }
}

/// What a salvage has found, unless a later version was found before.
///
/// A record that there was no more may come back so, or one that was never committed. Neither leads to anything that is paid for: a batch
/// that has ended is read again, and one that there is none of is looked for before its rows go into another. A token is drawn once, so
/// that what was removed never gets a second life with lower numbers.
pub(super) fn keep(saving: &WriteTransaction, token: &[u8; 16], place: u32, found: &[u8]) -> Result<(), Fault> {
    let Ok(kept) = open(found, token, place) else { return Ok(()) };
    let is_later = |before: Option<AccessGuard<&[u8]>>| {
        before.is_none_or(|before| open(before.value(), token, place).is_ok_and(|before| before.change < kept.change))
    };
    if place == RECORD {
        for records in RECORDS {
            let mut records = saving.open_table(records)?;
            if is_later(records.get(token)?) {
                records.insert(token, found)?;
            }
        }
    } else {
        let mut bodies = saving.open_table(BODIES)?;
        if is_later(bodies.get((*token, place))?) {
            bodies.insert((*token, place), found)?;
        }
    }
    Ok(())
}

/// Once all is found: bodies that go with no record are nobody's. How many records there are.
pub(super) fn tidy(database: &Database) -> Result<u64, Fault> {
    let writing = database.begin_write()?;
    let mut bodies_of = HashMap::new();
    for record in writing.open_table(RECORDS[0])?.iter()? {
        let (token, record) = record?;
        bodies_of.insert(token.value(), open(record.value(), &token.value(), RECORD)?.bodies);
    }
    writing.open_table(BODIES)?.retain(|(token, place), body| {
        open(body, &token, place).is_ok_and(|body| bodies_of.get(&token) == Some(&body.change))
    })?;
    writing.commit()?;
    Ok(bodies_of.len() as u64)
}
