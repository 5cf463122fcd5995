//! A copy of the output in the order of the input.

use std::{
    io::{self, BufReader, Read, Seek, SeekFrom},
    path::Path,
};

use super::{
    id_key,
    rows::Rows,
    sorted::{Record, Sorter},
};
use crate::{
    claim::{CHUNK, Claim},
    input::BadInput,
    whole::write_whole,
};

/// Writes the rows of these ids, in the order of their items, to `path`. `order` is sorted by id; the number is the
/// item's.
pub(crate) fn write_ordered(
    path: &Path,
    claim: &Claim,
    order: impl Iterator<Item = io::Result<Record>>,
) -> io::Result<()> {
    let mut rows = Rows::new(BufReader::with_capacity(CHUNK, claim.read()?), &claim.name());
    let mut by_id = Sorter::new(claim.folder());
    let bad = |bad: BadInput| io::Error::other(bad.to_string());
    while let Some(pushed) = rows
        .next_with(|row| by_id.push(Record { key: id_key(&row.custom_id), number: row.at, more: row.bytes as u128 }))
        .map_err(bad)?
    {
        pushed?;
    }
    let mut by_item = Sorter::new(claim.folder());
    let mut by_id = by_id.finish();
    let mut rows = by_id.iter()?;
    let mut row = rows.next().transpose()?;
    for item in order {
        let item = item?;
        while row.is_some_and(|row| row.key < item.key) {
            row = rows.next().transpose()?;
        }
        if let Some(row) = row.filter(|row| row.key == item.key) {
            by_item.push(Record { key: u128::from(item.number), number: row.number, more: row.more })?;
        }
    }
    let mut source = claim.read()?;
    let mut by_item = by_item.finish();
    write_whole(path, |file| {
        let mut line = Vec::new();
        for row in by_item.iter()? {
            let row = row?;
            source.seek(SeekFrom::Start(row.number))?;
            line.resize(row.more as usize, 0);
            source.read_exact(&mut line)?;
            line.push(b'\n');
            file.write_all(&line)?;
        }
        Ok(())
    })
}
