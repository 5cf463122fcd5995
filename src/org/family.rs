//! Which models share a quota.

use std::{fmt, sync::Arc};

/// Which models share a quota. A request names its family by this extension; without one it belongs to
/// [`Family::default`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Family(Arc<str>);

impl Family {
    /// A family by its name, as is.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Family(Arc::from(name))
    }

    /// The family of a model id: `sonnet`, `haiku` or `opus` where the id contains that word in any case; else the model's
    /// own id, lower case, without a trailing date (`gpt-4o-2024-08-06` is `gpt-4o`), since such providers count per model.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let model = model.trim().to_ascii_lowercase();
        for known in ["sonnet", "haiku", "opus"] {
            if model.contains(known) {
                return Family::new(known);
            }
        }
        if model.is_empty() {
            return Family::default();
        }
        // What is left when a tail of digits and dashes with at least six digits is cut off.
        let stem = model.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
        let digits = model[stem.len()..].bytes().filter(u8::is_ascii_digit).count();
        let dated = model[stem.len()..].starts_with('-') && digits >= 6;
        Family::new(if dated && !stem.is_empty() { stem } else { &model })
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Family {
    /// The family of requests that name none: `any`.
    fn default() -> Self {
        Family::new("any")
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
            ("o3-1", "o3-1"),
            (" ", "any"),
            ("20250929", "20250929"),
        ] {
            assert_eq!(Family::of_model(model).as_str(), family, "{model:?}");
        }
    }
}
