//! What an earlier output means for this input: one pass over both, sorted by id.

use std::{io, iter::Peekable};

use super::{bits::Bits, sorted::Record};
use crate::ending::Ending;

/// What a row says, packed into a number that sorts by the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) row: u64,
    pub(crate) ending: Ending,
    /// Whether the row has a fingerprint.
    pub(crate) printed: bool,
}

impl Mark {
    pub(crate) fn pack(self) -> u64 {
        let ending = match self.ending {
            Ending::Ok => 0,
            Ending::Terminal => 1,
            Ending::Redrivable => 2,
        };
        self.row << 3 | u64::from(self.printed) << 2 | ending
    }

    pub(crate) fn unpack(number: u64) -> Self {
        let ending = match number & 3 {
            0 => Ending::Ok,
            1 => Ending::Terminal,
            _ => Ending::Redrivable,
        };
        Mark { row: number >> 3, ending, printed: number & 4 != 0 }
    }
}

/// What becomes of an id that has a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Its row is kept.
    Kept(Ending),
    /// It is sent again: it has no answer yet.
    Again,
    /// It is sent again: another request has this id now.
    Changed,
}

impl Fate {
    /// Of an id with this row and this fingerprint, which now has the fingerprint `now`.
    pub(crate) fn of(mark: Mark, fingerprint: u128, now: u128, retry_failed: bool) -> Self {
        match mark.ending {
            _ if mark.printed && fingerprint != now => Fate::Changed,
            Ending::Redrivable => Fate::Again,
            Ending::Terminal if retry_failed => Fate::Again,
            ending => Fate::Kept(ending),
        }
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) ok: u64,
    pub(crate) terminal: u64,
    pub(crate) again: u64,
    pub(crate) changed: u64,
    /// Ids that the input does not have: their rows are kept.
    pub(crate) gone: u64,
    /// Rows of an id that has a better one.
    pub(crate) doubled: u64,
}

/// Both sides, joined.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Joined {
    pub(crate) found: Found,
    /// Items of the input that need not be sent.
    pub(crate) done: Bits,
    /// Rows of the output to be taken out.
    pub(crate) out: Bits,
    /// The first item that changed.
    pub(crate) changed: Option<u64>,
    /// The first item whose id was given before, and the first with that id.
    pub(crate) twice: Option<(u64, u64)>,
}

/// The better row of two with the same id, by what it is worth for a request with the fingerprint `now`, if there is one: its answer, a
/// refusal for good, no answer, another request's answer; of two alike, the later one.
pub(crate) fn better(row: &Record, now: Option<u128>) -> impl Ord + use<> {
    let mark = Mark::unpack(row.number);
    let ours = now.is_none_or(|now| !mark.printed || row.more == now);
    let worth = match mark.ending {
        Ending::Ok => 2,
        Ending::Terminal => 1,
        Ending::Redrivable => 0,
    };
    // Whether it is ours is more certain by the fingerprint.
    (ours, worth, now.is_some() && mark.printed, mark.row)
}

/// Joins the items of an input (number: the item's; more: the fingerprint) with the rows of an output (number: a [`Mark`]; more: the
/// fingerprint, if there is one), both sorted by id.
pub(crate) fn join(
    items: impl Iterator<Item = io::Result<Record>>,
    rows: impl Iterator<Item = io::Result<Record>>,
    retry_failed: bool,
) -> io::Result<Joined> {
    let (mut items, mut rows) = (items.peekable(), rows.peekable());
    let mut joined = Joined::default();
    loop {
        let key = match (head(&mut items)?, head(&mut rows)?) {
            (None, None) => return Ok(joined),
            (Some(item), Some(row)) => item.min(row),
            (Some(key), None) | (None, Some(key)) => key,
        };
        let item = next_of(&mut items, key)?;
        if let Some(first) = item {
            while let Some(second) = next_of(&mut items, key)? {
                let twice = (second.number, first.number);
                joined.twice = Some(joined.twice.map_or(twice, |known| known.min(twice)));
            }
        }
        let now = item.map(|item| item.more);
        let Some(mut best) = next_of(&mut rows, key)? else { continue };
        while let Some(row) = next_of(&mut rows, key)? {
            let worse = if better(&row, now) > better(&best, now) { std::mem::replace(&mut best, row) } else { row };
            joined.out.set(Mark::unpack(worse.number).row);
            joined.found.doubled += 1;
        }
        let Some(item) = item else {
            joined.found.gone += 1;
            continue;
        };
        let mark = Mark::unpack(best.number);
        match Fate::of(mark, best.more, item.more, retry_failed) {
            Fate::Kept(ending) => {
                joined.done.set(item.number);
                match ending {
                    Ending::Ok => joined.found.ok += 1,
                    _ => joined.found.terminal += 1,
                }
            }
            Fate::Again => {
                joined.out.set(mark.row);
                joined.found.again += 1;
            }
            Fate::Changed => {
                joined.out.set(mark.row);
                joined.found.changed += 1;
                joined.changed = Some(joined.changed.map_or(item.number, |known| known.min(item.number)));
            }
        }
    }
}

/// The key that comes next.
fn head(records: &mut Peekable<impl Iterator<Item = io::Result<Record>>>) -> io::Result<Option<u128>> {
    match records.next_if(Result::is_err) {
        Some(Err(error)) => Err(error),
        _ => Ok(records.peek().and_then(|record| record.as_ref().ok()).map(|record| record.key)),
    }
}

/// The next record, if it has this key.
fn next_of(records: &mut Peekable<impl Iterator<Item = io::Result<Record>>>, key: u128) -> io::Result<Option<Record>> {
    records.next_if(|record| record.as_ref().map_or(true, |record| record.key == key)).transpose()
}
