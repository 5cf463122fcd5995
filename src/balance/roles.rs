//! Which of several keys of one organisation serves a model family, and which are spares. Pure.

use std::sync::Arc;

/// What is known of a member of a family's fleet.
#[derive(Clone, Debug, Default)]
pub(super) struct Key<'a> {
    /// The organisation that its quota is counted on; None where no answer has told.
    pub(super) id: Option<&'a str>,
    /// Whose id was known first is lower.
    pub(super) rank: u64,
    /// Somebody has disabled it.
    pub(super) closed: bool,
    /// Its key is refused, its credit used up.
    pub(super) out: bool,
    /// Models that its key is not allowed.
    pub(super) refused: Vec<Arc<str>>,
    /// It takes calls now.
    pub(super) serves: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It takes calls, while it is not out.
    Serves,
    /// It takes none, because of the member of this number.
    SpareOf(usize),
    /// It takes none, because somebody said so.
    Closed,
}

/// What each is to be. Of those that share an id one serves: whoever is alive, of these whoever is allowed the most models, of these
/// whoever does already, of these the one whose id was known first. So whoever comes back while another serves is that one's spare, and no two serve
/// even while this is looked up.
///
/// Whoever else is allowed a model that this one is not serves too: else nobody would be asked for it.
///
/// Where none is alive the last one that was stays in its place; whichever comes back first gets it.
pub(super) fn roles(keys: &[Key<'_>]) -> Vec<Role> {
    let role = |key: &Key<'_>, at: usize| {
        if key.closed {
            return Role::Closed;
        }
        if key.id.is_none() {
            return Role::Serves;
        }
        let alike = || keys.iter().enumerate().filter(|(_, other)| other.id == key.id && !other.closed);
        let first = alike().min_by_key(|(_, other)| (other.out, other.refused.len(), !other.serves, other.rank));
        let Some((first, serving)) = first.filter(|(first, _)| *first != at) else { return Role::Serves };
        // What nobody is asked for of those who serve so far.
        let mut lacking = serving.refused.clone();
        for (other_at, other) in alike().filter(|(other_at, other)| *other_at != first && !other.out) {
            let before = lacking.len();
            lacking.retain(|model| other.refused.contains(model));
            if other_at == at && lacking.len() < before {
                return Role::Serves;
            }
        }
        Role::SpareOf(first)
    };
    keys.iter().enumerate().map(|(at, key)| role(key, at)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Role::*, *};

    fn key(id: &'static str, rank: u64) -> Key<'static> {
        Key { id: Some(id), rank, ..Key::default() }
    }

    fn serves(id: &'static str, rank: u64) -> Key<'static> {
        Key { serves: true, ..key(id, rank) }
    }

    fn out(key: Key<'static>) -> Key<'static> {
        Key { out: true, ..key }
    }

    fn closed(key: Key<'static>) -> Key<'static> {
        Key { closed: true, serves: false, ..key }
    }

    #[test]
    fn of_one_id_one_serves() {
        let none = || Key { serves: true, ..Key::default() };
        for (row, keys, expected) in [
            ("ids differ", vec![serves("x", 0), serves("y", 1)], vec![Serves, Serves]),
            ("one is not known", vec![serves("x", 0), none()], vec![Serves, Serves]),
            ("neither is known", vec![none(), none()], vec![Serves, Serves]),
            ("both are found to be one", vec![serves("x", 0), serves("x", 1)], vec![Serves, SpareOf(0)]),
            ("the second was known first", vec![serves("x", 1), serves("x", 0)], vec![SpareOf(1), Serves]),
            ("a third", vec![serves("x", 0), key("x", 1), serves("x", 2)], vec![Serves, SpareOf(0), SpareOf(0)]),
            (
                "two pairs",
                vec![serves("x", 0), serves("y", 1), key("x", 2), key("y", 3)],
                vec![Serves, Serves, SpareOf(0), SpareOf(1)],
            ),
            ("the first is out", vec![out(serves("x", 0)), key("x", 1)], vec![SpareOf(1), Serves]),
            ("the first is disabled", vec![closed(key("x", 0)), key("x", 1)], vec![Closed, Serves]),
            (
                "two spares, one takes over",
                vec![out(serves("x", 0)), key("x", 2), key("x", 1)],
                vec![SpareOf(2), SpareOf(2), Serves],
            ),
            ("the first is back: who serves stays", vec![key("x", 0), serves("x", 1)], vec![SpareOf(1), Serves]),
            ("both out: who served last stays", vec![out(key("x", 0)), out(serves("x", 1))], vec![SpareOf(1), Serves]),
            ("and of these one is back", vec![key("x", 0), out(serves("x", 1))], vec![Serves, SpareOf(0)]),
            ("all disabled", vec![closed(key("x", 0)), closed(key("x", 1))], vec![Closed, Closed]),
            ("one disabled, one out", vec![closed(key("x", 0)), out(key("x", 1))], vec![Closed, Serves]),
        ] {
            assert_eq!(roles(&keys), expected, "{row}");
        }
    }

    #[test]
    fn whoever_is_allowed_more_models_serves_and_whoever_is_allowed_one_that_it_is_not_serves_too() {
        let refuses = |key: Key<'static>, models: &[&str]| Key {
            refused: models.iter().map(|model| Arc::from(*model)).collect(),
            ..key
        };
        for (row, keys, expected) in [
            ("it refuses one", vec![refuses(serves("x", 0), &["m"]), key("x", 1)], vec![SpareOf(1), Serves]),
            (
                "so does the spare",
                vec![refuses(serves("x", 0), &["m"]), refuses(key("x", 1), &["m"])],
                vec![Serves, SpareOf(0)],
            ),
            ("another", vec![refuses(serves("x", 0), &["m"]), refuses(key("x", 1), &["n"])], vec![Serves, Serves]),
            (
                "a third is not needed",
                vec![refuses(serves("x", 0), &["m"]), refuses(key("x", 1), &["n"]), refuses(key("x", 2), &["n"])],
                vec![Serves, Serves, SpareOf(0)],
            ),
            (
                "a dead one serves nobody",
                vec![refuses(serves("x", 0), &["m"]), out(key("x", 1))],
                vec![Serves, SpareOf(0)],
            ),
            ("nor a disabled one", vec![refuses(serves("x", 0), &["m"]), closed(key("x", 1))], vec![Serves, Closed]),
            ("alone", vec![refuses(serves("x", 0), &["m"])], vec![Serves]),
        ] {
            assert_eq!(roles(&keys), expected, "{row}");
        }
    }

    proptest! {
        #[test]
        fn no_model_is_refused_by_all_who_serve_that_one_who_is_alive_allows(
            keys in proptest::collection::vec((any::<(bool, bool)>(), 0..8u8), 0..6),
        ) {
            let models = ["m", "n", "o"];
            let mut keys: Vec<_> = keys
                .iter()
                .enumerate()
                .map(|(rank, ((out, serves), refused))| Key {
                    out: *out,
                    serves: *serves,
                    refused: (0..3).filter(|bit| refused >> bit & 1 == 1).map(|bit| Arc::from(models[bit])).collect(),
                    ..key("x", rank as u64)
                })
                .collect();
            for _ in 0..2 {
                let found = roles(&keys);
                for model in models {
                    let allows = |key: &Key<'_>| !key.out && !key.refused.contains(&Arc::from(model));
                    let is_served = keys.iter().zip(&found).any(|(key, role)| *role == Serves && allows(key));
                    prop_assert_eq!(is_served, keys.iter().any(allows), "{}", model);
                }
                // Where all are allowed alike one serves.
                if keys.iter().filter(|key| !key.out).all(|key| key.refused == keys[0].refused) && !keys.is_empty() && !keys[0].out {
                    prop_assert_eq!(found.iter().filter(|role| **role == Serves).count(), 1);
                }
                keys.iter_mut().zip(&found).for_each(|(key, role)| key.serves = *role == Serves);
            }
        }

        #[test]
        fn of_whoever_is_alive_exactly_one_serves_and_what_is_settled_stays(
            keys in proptest::collection::vec((0..4usize, any::<(bool, bool, bool)>()), 0..8),
        ) {
            let mut keys: Vec<_> = keys
                .iter()
                .enumerate()
                .map(|(rank, (id, (closed, out, serves)))| Key {
                    refused: vec![],
                    id: [None, Some("x"), Some("y"), Some("z")][*id],
                    rank: rank as u64,
                    closed: *closed,
                    out: *out,
                    serves: *serves && !*closed,
                })
                .collect();
            let found = roles(&keys);
            for id in ["x", "y", "z"] {
                let of_id = || keys.iter().zip(&found).filter(|(key, _)| key.id == Some(id) && !key.closed);
                let serving: Vec<_> = of_id().filter(|(_, role)| **role == Serves).collect();
                prop_assert_eq!(serving.len(), usize::from(of_id().count() > 0));
                prop_assert!(serving.iter().all(|(key, _)| !key.out) || of_id().all(|(key, _)| key.out));
            }
            for (key, role) in keys.iter().zip(&found) {
                prop_assert_eq!(key.closed, *role == Closed);
                if let SpareOf(of) = role {
                    prop_assert!(found[*of] == Serves && keys[*of].id == key.id && key.id.is_some());
                }
            }
            for (key, role) in keys.iter_mut().zip(&found) {
                key.serves = *role == Serves;
            }
            prop_assert_eq!(roles(&keys), found);
        }
    }
}
