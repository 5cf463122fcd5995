//! A file read as a whole before anything is sent.

use std::{collections::BTreeMap, io::BufRead, path::Path};

use http::uri::PathAndQuery;
use tower_quota::org::{Dialect, Family};

use super::{BadInput, Item, Items, Reading, open};

/// What a whole file holds.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    pub(crate) items: u64,
    /// Bytes of all bodies.
    pub(crate) bytes: u64,
    /// `None` where the file is empty.
    pub(crate) form: Option<Dialect>,
    pub(crate) families: BTreeMap<Family, u64>,
}

/// Reads a whole file before anything is sent: every line must be good. `visit` sees each item: its number, counted from 0, its id, its
/// path and its body.
pub(crate) fn survey(
    path: &Path,
    reading: &Reading,
    mut visit: impl FnMut(u64, &str, &PathAndQuery, &str) -> Result<(), BadInput>,
) -> Result<Survey, BadInput> {
    let mut survey = Survey::default();
    let mut items = open(path, reading)?;
    while let Some(visited) = items.next_with(|_, parsed| {
        let number = survey.items;
        survey.items += 1;
        survey.bytes += parsed.body.len() as u64;
        *survey.families.entry(Family::of_model(&parsed.model)).or_default() += 1;
        visit(number, &parsed.custom_id, &parsed.path, &parsed.body)
    })? {
        visited?;
    }
    survey.form = items.dialect().filter(|_| survey.items > 0);
    Ok(survey)
}

/// Where an item stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) line: u64,
    /// The byte at which its id stands.
    id_at: usize,
}

impl<R: BufRead> Items<R> {
    /// The next item, and where it stands; `None` at the end.
    pub(crate) fn next_placed(&mut self) -> Result<Option<(Item, Place)>, BadInput> {
        self.next_with(|line, parsed| {
            let place = Place { line, id_at: parsed.id_at };
            (Item::from(parsed), place)
        })
    }

    /// The fault of the item that was read last: its id was given on this line too.
    pub(crate) fn given_twice(&self, id: &str, place: Place, earlier: u64) -> BadInput {
        self.bad(place.id_at, format!("`custom_id` {id:?} was given on line {earlier} already"))
    }
}

/// The fault of a file in which the items of these numbers have one id.
pub(crate) fn twice(path: &Path, reading: &Reading, second: u64, first: u64) -> BadInput {
    let find = || {
        let mut items = open(path, reading)?;
        let (mut number, mut earlier) = (0, 0);
        while let Some((item, place)) = items.next_placed()? {
            if number == first {
                earlier = place.line;
            }
            if number == second {
                return Ok(items.given_twice(&item.custom_id, place, earlier));
            }
            number += 1;
        }
        Ok(BadInput {
            file: path.display().to_string(),
            place: None,
            problem: "it has changed while it was read".into(),
        })
    };
    find().unwrap_or_else(|bad| bad)
}

/// The id of the item of this number.
pub(crate) fn id_of(path: &Path, reading: &Reading, number: u64) -> Result<String, BadInput> {
    let mut items = open(path, reading)?;
    for _ in 0..number {
        items.next_with(|_, _| ())?;
    }
    Ok(items.next_item()?.map(|item| item.custom_id).unwrap_or_default())
}
