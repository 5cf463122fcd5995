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
        Family::new(without_date(&model))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
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
}
