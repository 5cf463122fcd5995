//! A file read as a whole before anything is sent.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io::BufRead,
    path::Path,
};

use tower_quota::org::{Dialect, Family};

use super::{BadInput, Items, hash, open};

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

/// How many ids are compared in full where hashes agree: one pair that is the same is enough to refuse the file.
const SUSPECTS: usize = 1024;

/// Reads a whole file before anything is sent: every line must be good, and no id given twice. The search for duplicates
/// costs 8 bytes an id (a list of hashes, which may be twice as long while it grows), given back before this returns. `each` sees
/// every body.
pub(crate) fn survey(path: &Path, form: Option<Dialect>, mut each: impl FnMut(&str)) -> Result<Survey, BadInput> {
    let mut survey = Survey::default();
    let mut hashes = Vec::new();
    let mut items = open(path, form)?;
    while let Some(()) = items.next_with(|_, parsed| {
        survey.items += 1;
        survey.bytes += parsed.body.len() as u64;
        each(parsed.body);
        *survey.families.entry(Family::of_model(&parsed.model)).or_default() += 1;
        hashes.push(hash(&parsed.custom_id));
    })? {}
    survey.form = items.form().filter(|_| survey.items > 0);

    hashes.sort_unstable();
    let twice = hashes.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    let suspects: HashSet<u64> = twice.take(SUSPECTS).collect();
    drop(hashes);
    if !suspects.is_empty() {
        refuse_duplicates(open(path, form)?, &suspects)?;
    }
    Ok(survey)
}

fn refuse_duplicates(mut items: Items<impl BufRead>, suspects: &HashSet<u64>) -> Result<(), BadInput> {
    let mut first: HashMap<String, u64> = HashMap::new();
    let mut twice = None;
    while let Some(()) = items.next_with(|line, parsed| {
        if suspects.contains(&hash(&parsed.custom_id)) {
            let problem = format!("`custom_id` {:?}", parsed.custom_id);
            if let Some(earlier) = first.insert(parsed.custom_id, line) {
                twice = Some((parsed.id_at, format!("{problem} was given on line {earlier} already")));
            }
        }
    })? {
        if let Some((at, problem)) = twice {
            return Err(items.bad(at, problem));
        }
    }
    Ok(())
}
