//! Which batches were submitted although they could have been fuller, by what the provider saw.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tower_quota::sim::BatchSeen;

/// A batch that was not full, at whose creation there were rows that a later one had to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wasteful {
    /// Its place in the order of creation.
    pub(crate) at: usize,
    pub(crate) rows: usize,
    /// Rows that no batch had had until then.
    pub(crate) fresh: usize,
    /// Rows of batches of which the provider had said that they have ended; without an answer to them.
    pub(crate) again: usize,
}

/// Between what the provider says of one batch and the creation of another that takes its rows.
const MEANWHILE: Duration = Duration::from_secs(2);

/// Those of `made`, in the order of their creation, that were not full although rows for them were there.
pub(crate) fn wasteful(made: &[BatchSeen], most: usize) -> Vec<Wasteful> {
    let mut found = vec![];
    for (at, batch) in made.iter().enumerate().filter(|(_, batch)| batch.ids.len() < most) {
        // By their ids all rows of batches up to this one; whether they are there again.
        let mut there: HashMap<&str, bool> = HashMap::new();
        for earlier in &made[..=at] {
            let is_over = earlier.told.is_some_and(|told| told + MEANWHILE <= batch.created);
            for id in &earlier.ids {
                *there.entry(id).or_insert(true) &= is_over;
            }
        }
        let later: HashSet<_> = made[at + 1..].iter().flat_map(|later| &later.ids).map(String::as_str).collect();
        let fresh = later.iter().filter(|id| !there.contains_key(*id)).count();
        let again = later.iter().filter(|id| there.get(*id) == Some(&true)).count();
        if fresh + again > 0 {
            found.push(Wasteful { at, rows: batch.ids.len(), fresh, again });
        }
    }
    found
}
