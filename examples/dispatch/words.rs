//! How amounts and quotas are put into words.

use std::sync::Arc;

use tower_quota::dialect::Resource;

/// The models that an org is not asked for, if there are any.
pub(crate) fn refused(models: &[Arc<str>]) -> Option<String> {
    (!models.is_empty()).then(|| format!("its key is not allowed {}", models.join(", ")))
}

/// `1 request`, `2 requests`.
pub(crate) fn count(n: u64, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// `1,216`.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes in three digits or so.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => count(bytes, "byte"),
        1_000..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// A resource's name for programs.
pub(crate) const fn resource(resource: Resource) -> &'static str {
    match resource {
        Resource::Requests => "requests",
        Resource::InputTokens => "input_tokens",
        Resource::OutputTokens => "output_tokens",
        Resource::Tokens => "tokens",
        _ => "other",
    }
}

/// The same for a narrow place, as limits are spoken of: requests and tokens per minute.
pub(crate) const fn short(resource: Resource) -> &'static str {
    match resource {
        Resource::Requests => "rpm",
        Resource::InputTokens => "itpm",
        Resource::OutputTokens => "otpm",
        Resource::Tokens => "tpm",
        _ => "other",
    }
}

/// Dollars; of little money more digits are said.
pub(crate) fn money(dollars: f64) -> String {
    match dollars {
        0.0 => "$0".to_owned(),
        ..0.01 => format!("${dollars:.6}"),
        ..0.1 => format!("${dollars:.4}"),
        ..1.0 => format!("${dollars:.3}"),
        _ => format!("${dollars:.2}"),
    }
}

/// A count in three digits or so: `950`, `12.3k`, `4.5M`.
pub(crate) fn about(count: f64) -> String {
    match count {
        ..999.5 => format!("{count:.0}"),
        ..99_950.0 => format!("{:.1}k", count / 1e3),
        ..999_500.0 => format!("{:.0}k", count / 1e3),
        _ => format!("{:.1}M", count / 1e6),
    }
}
