//! Going on where an earlier run has ended: what its output holds is not sent again.
//!
//! An id is the same as before if its request is: by the `fingerprint` of its row, or by the id alone where a row has none. Both sides
//! are sorted by id on disk and joined in one pass, so memory holds no more than a bit of each item and a bit of each row. Of a
//! stream nothing is known beforehand: its ids are looked up in a file as they come.

pub(crate) mod bits;
pub(crate) mod command;
pub(crate) mod join;
pub(crate) mod ordered;
pub(crate) mod rewrite;
pub(crate) mod rows;
pub(crate) mod seen;
pub(crate) mod sorted;

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, BufReader},
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use self::{
    bits::Bits,
    join::{Fate, Found, Joined, Mark, join},
    rows::{Rows, Tail},
    seen::{Met, Seen},
    sorted::{Record, Sorted, Sorter},
};
use crate::{
    claim::{CHUNK, Claim},
    ending::Ending,
    fingerprint::fingerprint,
    input::{
        BadInput, Item, Items, Reading,
        survey::{Place, Survey, id_of, survey, twice},
    },
};

/// An id by which both sides are sorted. Two ids are taken for one if their 128 bits agree: among a billion with a probability below one
/// in 10^20.
pub(crate) fn id_key(id: &str) -> u128 {
    let half = |side: u8| {
        let mut hasher = DefaultHasher::new();
        (side, id).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(0) << 64 | half(1)
}

/// Ids that need no call, since an earlier run has settled them. They are this run's too, but cost it no time.
#[derive(Debug, Default)]
pub(crate) struct Restored {
    pub(crate) ok: AtomicU64,
    pub(crate) terminal: AtomicU64,
    /// Rows that there is another of by now.
    replaced: Mutex<Bits>,
}

impl Restored {
    pub(crate) fn all(&self) -> u64 {
        self.ok.load(Relaxed) + self.terminal.load(Relaxed)
    }

    /// An id has its new row.
    pub(crate) fn replace(&self, row: Option<u64>) {
        if let Some(row) = row {
            self.replaced.lock().unwrap_or_else(PoisonError::into_inner).set(row);
        }
    }

    fn add(&self, ending: Ending) {
        let count = if ending == Ending::Ok { &self.ok } else { &self.terminal };
        count.fetch_add(1, Relaxed);
    }
}

/// The rows of an earlier output, sorted by id.
struct Earlier {
    rows: Sorted,
    count: u64,
    tail: Tail,
}

impl Earlier {
    fn read(claim: &Claim) -> Result<Self, BadInput> {
        let name = claim.name();
        let unread = |error: io::Error| BadInput { file: name.clone(), place: None, problem: error.to_string() };
        let source = claim.read().map_err(unread)?;
        let mut rows = Rows::new(BufReader::with_capacity(CHUNK, source), &name);
        let mut sorter = Sorter::new(claim.folder());
        let mut count = 0;
        while let Some(pushed) = rows.next_with(|row| {
            let mark = Mark { row: count, ending: row.ending, printed: row.fingerprint.is_some() };
            let more = row.fingerprint.unwrap_or_default();
            sorter.push(Record { key: id_key(&row.custom_id), number: mark.pack(), more })
        })? {
            pushed.map_err(unsorted)?;
            count += 1;
        }
        Ok(Earlier { rows: sorter.finish(), count, tail: rows.tail() })
    }
}

fn unsorted(error: io::Error) -> BadInput {
    let file = "a temporary file, to sort ids".to_owned();
    BadInput { file, place: None, problem: error.to_string() }
}

/// What an earlier run has left, and what is to be done about it.
#[derive(Default)]
pub(crate) struct Resume {
    pub(crate) restored: Arc<Restored>,
    /// What was found of a file's ids; of a stream only what its output alone tells.
    pub(crate) found: Found,
    /// How many rows the earlier output has; `None` where there is none.
    rows: Option<u64>,
    tail: Tail,
    /// Rows to be taken out before anything is sent.
    out: Bits,
    /// The first id whose request has changed.
    changed: Option<String>,
    /// The ids of a file, for the copy in its order.
    order: Option<Sorted>,
    /// The ids of a stream.
    seen: Option<Arc<Mutex<Seen>>>,
    /// How many items are to be sent, of a file.
    sending: Option<u64>,
}

/// What is asked for on the command line.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wish {
    pub(crate) retry_failed: bool,
    /// Whether a copy in order is wanted.
    pub(crate) ordered: bool,
}

/// A file's items that are to be sent.
pub(crate) struct Sending {
    done: Bits,
    number: u64,
    left: u64,
}

impl Sending {
    /// Whether the next item is to be sent.
    pub(crate) fn wants(&mut self) -> bool {
        let wanted = !self.done.get(self.number);
        self.number += 1;
        self.left -= u64::from(wanted);
        wanted
    }

    /// Whether there are none any more.
    pub(crate) fn is_over(&self) -> bool {
        self.left == 0
    }
}

impl Resume {
    /// Reads a whole file, and at the same time what an earlier run has left. No id may be given twice. `each` sees every body with its number, from 0.
    pub(crate) fn of_file(
        input: &Path,
        reading: &Reading,
        claim: Option<&Claim>,
        folder: &Path,
        wish: Wish,
        mut each: impl FnMut(u64, &str),
    ) -> Result<(Survey, Sending, Self), BadInput> {
        let mut items = Sorter::new(folder);
        let (surveyed, earlier) = std::thread::scope(|scope| {
            let earlier = claim.map(|claim| scope.spawn(|| Earlier::read(claim)));
            let surveyed = survey(input, reading, |number, id, path, body| {
                each(number, body);
                let more = if claim.is_some() { fingerprint(path, body.as_bytes()) } else { 0 };
                items.push(Record { key: id_key(id), number, more }).map_err(unsorted)
            });
            (surveyed, earlier.map(|thread| thread.join().expect("reading rows does not panic")))
        });
        let survey = surveyed?;
        let mut items = items.finish();
        let mut earlier = earlier.transpose()?;
        let joined = match &mut earlier {
            Some(earlier) => items.iter().and_then(|items| join(items, earlier.rows.iter()?, wish.retry_failed)),
            None => items.iter().and_then(|items| join(items, std::iter::empty(), wish.retry_failed)),
        };
        let Joined { found, done, out, changed, twice: doubly } = joined.map_err(unsorted)?;
        if let Some((second, first)) = doubly {
            return Err(twice(input, reading, second, first));
        }
        let changed = match changed {
            Some(number) => Some(id_of(input, reading, number)?),
            None => None,
        };
        let left = survey.items - done.ones();
        let restored =
            Arc::new(Restored { ok: found.ok.into(), terminal: found.terminal.into(), replaced: Mutex::default() });
        let resume = Resume {
            restored,
            found,
            rows: earlier.as_ref().map(|earlier| earlier.count),
            tail: earlier.map(|earlier| earlier.tail).unwrap_or_default(),
            out,
            changed,
            order: wish.ordered.then_some(items),
            seen: None,
            sending: Some(left),
        };
        Ok((survey, Sending { done, number: 0, left }, resume))
    }

    /// Reads what an earlier run has left, for an input that can be read only once.
    pub(crate) fn of_stream(claim: Option<&Claim>, folder: &Path, wish: Wish) -> Result<Self, BadInput> {
        let mut earlier = claim.map(Earlier::read).transpose()?;
        let rows = earlier.as_mut().map(|earlier| &mut earlier.rows);
        let seen = Seen::new(folder, rows, wish.retry_failed).map_err(unsorted)?;
        Ok(Resume {
            rows: earlier.as_ref().map(|earlier| earlier.count),
            found: Found { doubled: seen.doubled(), ..Found::default() },
            tail: earlier.map(|earlier| earlier.tail).unwrap_or_default(),
            seen: Some(Arc::new(Mutex::new(seen))),
            ..Resume::default()
        })
    }

    /// The items of a stream that are to be sent, `first` among them. An id that comes twice is a fault.
    pub(crate) fn new_items<R: io::BufRead>(
        &self,
        mut items: Items<R>,
        mut first: Option<(Item, Place)>,
    ) -> impl FnMut() -> Result<Option<Item>, BadInput> + use<R> {
        let (seen, restored) = (self.seen.clone(), self.restored.clone());
        move || {
            loop {
                let next = match first.take() {
                    Some(first) => Some(first),
                    None => items.next_placed()?,
                };
                let Some((mut item, place)) = next else { return Ok(None) };
                let Some(seen) = &seen else { return Ok(Some(item)) };
                let print = fingerprint(&item.path, &item.body);
                let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                match seen.meet(id_key(&item.custom_id), print, place.line).map_err(unsorted)? {
                    Met::New(_) => {
                        item.replaces = seen.replaced();
                        return Ok(Some(item));
                    }
                    Met::Kept(Fate::Kept(ending)) => restored.add(ending),
                    Met::Kept(_) => {}
                    Met::Twice { line } => return Err(items.given_twice(&item.custom_id, place, line)),
                }
            }
        }
    }

    /// How many items are to be sent; `None` of a stream.
    pub(crate) const fn sending(&self) -> Option<u64> {
        self.sending
    }

    /// What was found, for people; empty where there was no output.
    pub(crate) fn text(&self, output: &Path) -> String {
        use crate::words::{count, thousands};
        let Some(rows) = self.rows.filter(|rows| *rows > 0 || self.tail != Tail::Whole) else { return String::new() };
        let Found { ok, terminal, again, changed, gone, doubled } = self.found;
        let [ok, failed, again] = [ok, terminal, again].map(thousands);
        let mut lines = vec![match self.sending {
            Some(left) => format!(
                "found {ok} answered, {failed} failed for good, {again} to be sent again, {} changed; sending {}",
                thousands(changed),
                thousands(left)
            ),
            None => format!(
                "found {} in {}; what is answered there is not sent again",
                count(rows, "row"),
                output.display()
            ),
        }];
        if let Some(first) = &self.changed {
            let requests = if changed == 1 { "request has" } else { "requests have" };
            lines.push(format!(
                "{} {requests} changed since, and are sent again: {first:?} is the first",
                thousands(changed)
            ));
        }
        if gone > 0 {
            lines.push(format!("{} that the input does not have: kept", count(gone, "id")));
        }
        if doubled > 0 {
            lines.push(format!("{} of an id that has a better one: taken out", count(doubled, "row")));
        }
        if let Tail::Torn { line, .. } = self.tail {
            let place = format!("{}: line {line}", output.display());
            lines.push(format!("{place} was cut short while it was written: it is cut off, and its id is sent again"));
        }
        lines.join("\n")
    }

    /// Makes the output ready to be gone on with.
    pub(crate) fn mend(&self, claim: &mut Claim) -> io::Result<()> {
        match self.tail {
            Tail::Whole => {}
            Tail::Unterminated => claim.append(b"\n")?,
            Tail::Torn { at, .. } => claim.cut(at)?,
        }
        if self.out.ones() > 0 { rewrite::take_out(claim, &self.out) } else { Ok(()) }
    }

    /// Makes the output what it is to be at the end: takes out rows that there are better ones of by now, and writes the copy in order.
    pub(crate) fn close(&mut self, claim: &mut Claim, ordered: Option<&Path>) -> io::Result<()> {
        let seen = self.seen.clone();
        let mut seen = seen.as_ref().map(|seen| seen.lock().unwrap_or_else(PoisonError::into_inner));
        let mut out = self.restored.replaced.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seen) = &seen {
            out.add(seen.out());
        }
        if out.ones() > 0 {
            let name = claim.name();
            rewrite::take_out(claim, &out).map_err(|error| naming("--output", &name, &error))?;
        }
        drop(out);
        let Some(path) = ordered else { return Ok(()) };
        let written = match (&mut self.order, &mut seen) {
            (Some(order), _) => order.iter().and_then(|order| ordered::write_ordered(path, claim, order)),
            (None, Some(seen)) => seen.order().and_then(|order| ordered::write_ordered(path, claim, order)),
            (None, None) => Ok(()),
        };
        written.map_err(|error| naming("--ordered", &path.display().to_string(), &error))
    }
}

fn naming(argument: &str, file: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{argument} {file}: {error}"))
}
