//! How amounts and quotas are put into words.

use tower_quota::dialect::Resource;

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
