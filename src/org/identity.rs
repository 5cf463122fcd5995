//! Whose quota an org's key is counted on: the provider's own id for it, from its answers; and which org of its pool
//! serves in its place, where two have one id.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{
            AtomicBool,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::Waker,
};

use super::{Family, Org, board::Watchers, lock};

/// The cell of an identity.
#[derive(Default)]
pub(super) struct Cell {
    /// The id that was named first: nearly every answer names it again, and then no lock is taken.
    first: OnceLock<Arc<str>>,
    /// Whether another was named since.
    changed: AtomicBool,
    now: Mutex<Option<Arc<str>>>,
    /// Whether it is a spare at all, so that whoever asks mostly need not lock.
    is_spare: AtomicBool,
    spare: Mutex<Spare>,
    watchers: Mutex<Watchers>,
}

/// What a balancer says of an org whose quota is another member's too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spare {
    /// Which org serves in its place, by model family.
    pub(crate) of: BTreeMap<Family, Arc<str>>,
    /// Whether it serves no family at all.
    pub(crate) everywhere: bool,
}

impl Org {
    /// The org of the pool that serves in its place, if it is a [spare](super::Standing::Spare): both have one organisation
    /// id, so one quota. Of the whole org, if it serves no model family.
    #[must_use]
    pub fn spare_of(&self) -> Option<Arc<str>> {
        let cell = &self.identity.quota;
        if !cell.is_spare.load(SeqCst) {
            return None;
        }
        let spare = lock(&cell.spare);
        match self.whole {
            false => spare.of.get(self.model_family()).cloned(),
            true => spare.of.values().next().filter(|_| spare.everywhere).cloned(),
        }
    }

    /// The provider's own id for it, if an answer has named one.
    pub(crate) fn organisation(&self) -> Option<Arc<str>> {
        lock(&self.identity.quota.now).clone()
    }

    /// An answer names the provider's own id for the org; an empty one says nothing. True if that is news, which is then to be
    /// told by [`tell_identity`](Org::tell_identity), under no lock.
    pub(crate) fn write_organisation(&self, id: &str) -> bool {
        let cell = &self.identity.quota;
        let first = cell.first.get();
        if !cell.changed.load(Relaxed) && first.is_some_and(|first| **first == *id) || id.is_empty() {
            return false;
        }
        let mut now = lock(&cell.now);
        if now.as_deref() == Some(id) {
            return false;
        }
        let id: Arc<str> = Arc::from(id);
        *now = Some(id.clone());
        if cell.first.set(id).is_err() {
            cell.changed.store(true, Relaxed);
        }
        true
    }

    /// What the balancer makes of it.
    pub(crate) fn write_spare(&self, spare: Spare) {
        let cell = &self.identity.quota;
        let mut now = lock(&cell.spare);
        cell.is_spare.store(!spare.of.is_empty(), SeqCst);
        *now = spare;
    }

    /// Wakes `waker` whenever its organisation id is learnt or changes, and whenever it is put out or brought back in any
    /// family, until [`unwatch_identity`](Org::unwatch_identity).
    pub(crate) fn watch_identity(&self, waker: &Waker) {
        lock(&self.identity.quota.watchers).add(waker);
    }

    pub(crate) fn unwatch_identity(&self, waker: &Waker) {
        let _dropped_later = lock(&self.identity.quota.watchers).remove(waker);
    }

    /// Whoever watches looks. Under no lock.
    pub(crate) fn tell_identity(&self) {
        let watchers = lock(&self.identity.quota.watchers).clone();
        watchers.wake();
    }

    /// How many watch.
    #[cfg(test)]
    pub(super) fn identity_watchers(&self) -> usize {
        lock(&self.identity.quota.watchers).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_news_once_and_an_empty_one_never() {
        let org = Org::new("a");
        let named = |id| (org.write_organisation(id), org.organisation());
        assert_eq!(named(""), (false, None));
        assert_eq!(named("x"), (true, Some("x".into())));
        assert_eq!(named("x"), (false, Some("x".into())));
        assert_eq!(named(""), (false, Some("x".into())), "no word is no other word");
        assert_eq!(named("y"), (true, Some("y".into())), "it changes");
        assert_eq!(named("y"), (false, Some("y".into())));
        assert_eq!(named("x"), (true, Some("x".into())), "and changes back");
        assert_eq!(named("x"), (false, Some("x".into())));
    }

    #[test]
    fn a_spare_of_some_families_is_no_spare_as_a_whole() {
        let org = Org::new("a");
        let [sonnet, haiku] = ["sonnet", "haiku"].map(|name| org.family(&Family::new(name)));
        let of = BTreeMap::from([(Family::new("sonnet"), Arc::from("b"))]);
        org.write_spare(Spare { of: of.clone(), everywhere: false });
        assert_eq!((sonnet.spare_of().as_deref(), haiku.spare_of(), org.spare_of()), (Some("b"), None, None));
        org.write_spare(Spare { of, everywhere: true });
        assert_eq!((haiku.spare_of(), org.spare_of().as_deref()), (None, Some("b")));
        org.write_spare(Spare::default());
        assert_eq!((sonnet.spare_of(), org.spare_of()), (None, None));
    }
}
