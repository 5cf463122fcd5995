//! The command that goes on where a run has ended.

use std::ffi::OsString;

/// The same command line, to be pasted into a shell, without what would begin anew.
pub(crate) fn again(args: impl IntoIterator<Item = OsString>) -> String {
    let words = args.into_iter().map(|word| word.to_string_lossy().into_owned());
    let words: Vec<_> = words.filter(|word| word != "--fresh").map(|word| quoted(&word)).collect();
    words.join(" ")
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "_-./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
