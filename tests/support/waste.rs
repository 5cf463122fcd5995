//! Which batches were submitted although others could have been fuller, by what the provider saw.
//!
//! A row is *there* if no batch has had it, or if the provider has said of all that had it that they have ended, and it is sent again later.
//! A batch that is not full is wasteful if rows that were there when it was created went into a later one that is not full either: together
//! they would have filled one. They need not be those of the later one, if each full batch between could have handed on as many as it had
//! been given. Where none is wasteful, every batch that is not full has gone when nothing else could have filled it: as many batches are
//! submitted as are needed.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use tower_quota::sim::BatchSeen;

/// Between what the provider says of one batch and the creation of another that takes its rows.
const MEANWHILE: Duration = Duration::from_secs(2);

/// Two that were not full, by their places in the order of creation and their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wasteful {
    pub(crate) first: (usize, u64),
    pub(crate) later: (usize, u64),
}

/// Those of `made`, in the order of their creation, that are wasteful, where `most` rows fill one.
pub(crate) fn wasteful(made: &[BatchSeen], most: usize) -> Vec<Wasteful> {
    let is_full = |at: usize| made[at].rows >= most as u64;
    let of = |at: usize| (at, made[at].rows);
    let mut found = vec![];
    for first in (0..made.len()).filter(|at| !is_full(*at)) {
        let (mut reached, mut next) = (BTreeSet::new(), vec![first]);
        while let Some(at) = next.pop() {
            next.extend(takers(made, at).into_iter().filter(|taker| reached.insert(*taker) && is_full(*taker)));
        }
        let later = reached.into_iter().find(|at| !is_full(*at));
        found.extend(later.map(|later| Wasteful { first: of(first), later: of(later) }));
    }
    found
}

/// The later ones that took rows that were there when this one was created.
fn takers(made: &[BatchSeen], at: usize) -> Vec<usize> {
    // By their ids all rows of batches up to this one.
    let mut there: HashMap<&str, bool> = HashMap::new();
    for earlier in &made[..=at] {
        let is_over = earlier.told.is_some_and(|told| told + MEANWHILE <= made[at].created);
        for id in &earlier.ids {
            *there.entry(id).or_insert(true) &= is_over;
        }
    }
    let is_there = |id: &String| there.get(id.as_str()).copied().unwrap_or(true);
    (at + 1..made.len()).filter(|later| made[*later].ids.iter().any(is_there)).collect()
}
