//! What is kept of batches: their records, and the bodies of their rows, in tables beside those of the entries.
//!
//! All of it is sealed as an entry is, under a key that says of what it is, so that a salvage finds it without the tables. Before the
//! content stands the number of the change that wrote it (8 bytes, little-endian), of the one that wrote the bodies that go with it (8, 0 for
//! none), and how many of these there are (4): freed pages keep what was there before, and of several versions the highest number counts.
//!
//! A record stands in two tables that are written together: the damage of one is seen by the other, and mended by it.

use std::collections::HashMap;

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
const HEAD: usize = 20;

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
    /// Of which none may be missing.
    rows: u32,
    content: &'a [u8],
}

fn open<'a>(sealed: &'a [u8], token: &[u8; 16], place: u32) -> Result<Kept<'a>, Fault> {
    let kept = seal::open(sealed).filter(|(key, _)| *key == seal::batch_key(token, place)).and_then(|(_, kept)| {
        let (change, rest) = kept.split_first_chunk()?;
        let (bodies, rest) = rest.split_first_chunk()?;
        let (rows, content) = rest.split_first_chunk()?;
        let [change, bodies] = [change, bodies].map(|number| u64::from_le_bytes(*number));
        Some(Kept { change, bodies, rows: u32::from_le_bytes(*rows), content })
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

/// The body of a row, if it is there; where it should be, and is not, that is damage.
#[cfg(feature = "batch")]
pub(super) fn body(database: &Database, token: &[u8; 16], place: u32) -> Result<Option<Bytes>, Fault> {
    let reading = database.begin_read()?;
    if let Some(body) = reading.open_table(BODIES)?.get((*token, place))? {
        return Ok(Some(Bytes::copy_from_slice(open(body.value(), token, place)?.content)));
    }
    match reading.open_table(RECORDS[0])?.get(token)? {
        Some(record) if place < open(record.value(), token, RECORD)?.rows => Err(damaged()),
        _ => Ok(None),
    }
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
        let (before, mut bodies_of, mut count) = match writing.open_table(RECORDS[0])?.get(token)? {
            Some(record) => open(record.value(), token, RECORD).map(|kept| (kept.change, kept.bodies, kept.rows))?,
            None => (0, 0, 0),
        };
        let change = before.saturating_add(1);
        if let Some(bodies) = bodies {
            bodies_of = if bodies.is_empty() { 0 } else { change };
            count = u32::try_from(bodies.len()).unwrap_or(RECORD);
        }
        let record = record
            .map(|record| sealed(token, RECORD, &Kept { change, bodies: bodies_of, rows: count, content: record }));
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
            let body = sealed(token, place, &Kept { change, bodies: change, rows: 0, content: body });
            rows.insert((*token, place), &body[..])?;
            given_back(rows.get((*token, place))?, Some(&body))?;
        }
    }
    writing.commit()?;
    // One bit says which of the two last commits counts: both have it.
    let mut again = database.begin_write()?;
    again.set_quick_repair(true);
    again.commit()?;
    Ok(())
}

fn sealed(token: &[u8; 16], place: u32, kept: &Kept) -> Bytes {
    let mut content = BytesMut::with_capacity(HEAD + kept.content.len());
    content.put_u64_le(kept.change);
    content.put_u64_le(kept.bodies);
    content.put_u32_le(kept.rows);
    content.put_slice(kept.content);
    seal::seal(&seal::batch_key(token, place), &content)
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

/// Once all is found: bodies that go with no record are nobody's, and those that are lost are not missed any more. How many records there
/// are.
pub(super) fn tidy(database: &Database) -> Result<u64, Fault> {
    let writing = database.begin_write()?;
    let mut found = HashMap::new();
    for record in writing.open_table(RECORDS[0])?.iter()? {
        let (token, record) = record?;
        found.insert(token.value(), (open(record.value(), &token.value(), RECORD)?.bodies, 0));
    }
    writing.open_table(BODIES)?.retain(|(token, place), body| {
        let of = found
            .get_mut(&token)
            .filter(|(bodies, _)| open(body, &token, place).is_ok_and(|body| body.change == *bodies));
        of.map(|(_, rows)| *rows += 1).is_some()
    })?;
    for records in RECORDS {
        let mut records = writing.open_table(records)?;
        for (token, (_, rows)) in &found {
            let lost = |record: AccessGuard<&[u8]>| {
                let kept = open(record.value(), token, RECORD).ok().filter(|kept| kept.rows > *rows)?;
                Some(sealed(token, RECORD, &Kept { change: kept.change.saturating_add(1), rows: 0, ..kept }))
            };
            let lessened = records.get(token)?.and_then(lost);
            if let Some(record) = lessened {
                records.insert(token, &record[..])?;
            }
        }
    }
    writing.commit()?;
    Ok(found.len() as u64)
}

#[cfg(feature = "batch")]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fresh() -> Database {
        let database = Database::builder().create_with_backend(redb::backends::InMemoryBackend::new()).unwrap();
        let making = database.begin_write().unwrap();
        make(&making).unwrap();
        making.commit().unwrap();
        database
    }

    fn record(change: u64, bodies: u64) -> (u32, Bytes) {
        let rows = if bodies == 1 { 3 } else { 2 };
        (
            RECORD,
            sealed(&[1; 16], RECORD, &Kept { change, bodies, rows, content: format!("record {change}").as_bytes() }),
        )
    }

    fn row(place: u32, change: u64) -> (u32, Bytes) {
        let content = format!("row {place} {change}");
        (place, sealed(&[1; 16], place, &Kept { change, bodies: change, rows: 0, content: content.as_bytes() }))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn of_several_versions_the_last_one_counts_in_whatever_order_they_are_found(
            found in Just(vec![
                record(1, 1), row(0, 1), row(1, 1), row(2, 1), record(2, 1), record(3, 3), row(0, 3), row(1, 3), record(4, 3), record(4, 3),
            ]).prop_shuffle(),
        ) {
            let database = fresh();
            let saving = database.begin_write().unwrap();
            for (place, found) in &found {
                keep(&saving, &[1; 16], *place, found).unwrap();
            }
            // Somebody else's, under its name; and the body of a row of a batch that there is none of.
            keep(&saving, &[2; 16], RECORD, &record(9, 0).1).unwrap();
            keep(&saving, &[3; 16], 0, &sealed(&[3; 16], 0, &Kept { change: 1, bodies: 1, rows: 0, content: b"nobody's" })).unwrap();
            saving.commit().unwrap();
            prop_assert_eq!(tidy(&database).unwrap(), 1);
            prop_assert_eq!(load(&database).unwrap(), [([1; 16], Bytes::from_static(b"record 4"))]);
            let bodies = [0, 1, 2].map(|place| body(&database, &[1; 16], place).unwrap());
            // The third one is of an earlier change, which had more of them.
            prop_assert_eq!(bodies, [Some(Bytes::from_static(b"row 0 3")), Some(Bytes::from_static(b"row 1 3")), None]);
            prop_assert_eq!(body(&database, &[3; 16], 0).unwrap(), None);
            // It goes on from there.
            write(&database, &[1; 16], Some(&Bytes::from_static(b"next")), None).unwrap();
            let reading = database.begin_read().unwrap();
            let next = reading.open_table(RECORDS[1]).unwrap().get([1; 16]).unwrap().unwrap();
            let next = open(next.value(), &[1; 16], RECORD).unwrap();
            prop_assert_eq!((next.change, next.bodies, next.rows, next.content), (5, 3, 2, &b"next"[..]));
        }
    }
}
