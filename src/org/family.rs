//! Which models share a quota.

use std::{
    cmp::Ordering,
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

/// Which models share a quota. A request names its family by this extension; without one it belongs to
/// [`Family::default`].
///
/// One that was made [of a model](Family::of_model) remembers which, since a key may be allowed one of them and not another: an org
/// that refuses it (403) is asked no more for that [`model`](Family::model), and is asked for the others. Two families are equal by their names,
/// whichever models they were made of.
#[derive(Clone)]
pub struct Family {
    name: Arc<str>,
    model: Option<Arc<str>>,
}

impl Family {
    /// A family by its name, as is.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Family { name: Arc::from(name), model: None }
    }

    /// The family of a model id: `sonnet`, `haiku` or `opus` where the id contains that word in any case; else the model's
    /// own id, lower case, without a trailing date (`gpt-4o-2024-08-06` is `gpt-4o`), since such providers count per model.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let model = model.trim().to_ascii_lowercase();
        if model.is_empty() {
            return Family::default();
        }
        let known = ["sonnet", "haiku", "opus"].into_iter().find(|known| model.contains(known));
        let name: Arc<str> = Arc::from(known.unwrap_or_else(|| without_date(&model)));
        let model = if *model == *name { name.clone() } else { Arc::from(model) };
        Family { name, model: Some(model) }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// The id of the model that it was [made of](Family::of_model), in lower case; `None` if it was made by its name.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub(crate) fn shared_model(&self) -> Option<Arc<str>> {
        self.model.clone()
    }

    /// The family alone, of no certain model.
    pub(super) fn bare(&self) -> Self {
        Family { name: self.name.clone(), model: None }
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Family {}

impl Hash for Family {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl PartialOrd for Family {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Family {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tuple = f.debug_tuple("Family");
        tuple.field(&self.name);
        if let Some(model) = &self.model {
            tuple.field(model);
        }
        tuple.finish()
    }
}

/// The id without the date at its end.
fn without_date(model: &str) -> &str {
    ["-0000-00-00", "-00000000", "-000000"]
        .iter()
        .find_map(|form| {
            let (stem, tail) = model.split_at_checked(model.len().checked_sub(form.len())?)?;
            let alike = |(is, should): (u8, u8)| is == should || should == b'0' && is.is_ascii_digit();
            (!stem.is_empty() && tail.bytes().zip(form.bytes()).all(alike)).then_some(stem)
        })
        .unwrap_or(model)
}

impl Default for Family {
    /// The family of requests that name none: `any`.
    fn default() -> Self {
        Family::new("any")
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_a_word_in_the_id_and_else_the_id_without_its_date() {
        for (model, family) in [
            ("claude-sonnet-4-5-20250929", "sonnet"),
            ("us.anthropic.claude-3-5-SONNET-20241022-v2:0", "sonnet"),
            ("claude-haiku-4-5", "haiku"),
            ("Claude-Opus-4-8", "opus"),
            ("gpt-4o-2024-08-06", "gpt-4o"),
            ("GPT-4o", "gpt-4o"),
            ("gpt-4o-mini", "gpt-4o-mini"),
            // Too few digits for a date.
            ("gpt-5", "gpt-5"),
            ("gpt-4-0613", "gpt-4-0613"),
            // Its version is not of the date.
            ("gpt-5-2026-01-01", "gpt-5"),
            ("o3-1-20260101", "o3-1"),
            ("m-260101", "m"),
            ("m\u{e9}-2026-01-0\u{e9}", "m\u{e9}-2026-01-0\u{e9}"),
            ("o3-1", "o3-1"),
            (" ", "any"),
            ("20250929", "20250929"),
        ] {
            assert_eq!(Family::of_model(model).as_str(), family, "{model:?}");
        }
    }

    #[test]
    fn a_family_remembers_its_model_and_is_the_same_without() {
        for (model, id) in [
            ("claude-sonnet-4-5-20250929", Some("claude-sonnet-4-5-20250929")),
            (" Claude-Sonnet-4-5 ", Some("claude-sonnet-4-5")),
            ("gpt-4o-2024-08-06", Some("gpt-4o-2024-08-06")),
            ("GPT-4o", Some("gpt-4o")),
            ("sonnet", Some("sonnet")),
            ("", None),
        ] {
            let family = Family::of_model(model);
            assert_eq!(family.model(), id, "{model:?}");
            assert_eq!(family.bare().model(), None);
            let same = [family.clone(), family.bare(), Family::new(family.as_str())];
            assert_eq!(std::collections::BTreeSet::from(same.clone()).len(), 1, "{model:?}");
            assert_eq!(std::collections::HashSet::from(same).len(), 1, "{model:?}");
        }
        assert_eq!(format!("{:?}", Family::of_model("claude-opus-4")), r#"Family("opus", "claude-opus-4")"#);
        assert_eq!(format!("{:?}", Family::new("opus")), r#"Family("opus")"#);
        assert_ne!(Family::of_model("claude-opus-4"), Family::of_model("claude-haiku-4"));
    }
}
