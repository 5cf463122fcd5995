//! What went wrong in the provider's own words, made fit for a log: short, on one line, no key in it. Pure.

use std::sync::Arc;

use super::{
    refusal::Words,
    scrub::{Keys, SCRUBBED},
};

/// The longest that is kept, in characters.
const LONGEST: usize = 300;

/// The largest request that Anthropic takes, in words: 32 MB for a message, as its documentation has it (256 MB for a batch, which
/// is another endpoint).
const ANTHROPICS_LIMIT: &str = "Anthropic takes 32 MB";

/// `type: message`, or as much as there is of it.
pub(super) fn words(words: &Words, keys: &Keys) -> Option<Arc<str>> {
    line(&spoken(words), "", keys)
}

/// The same of a request that is too large, with its size where that is known.
pub(super) fn too_large(words: &Words, sent: Option<u64>, keys: &Keys) -> Option<Arc<str>> {
    let mut facts = vec![];
    facts.extend(sent.map(|sent| format!("the request's body has {sent} bytes")));
    facts.extend(words.is_anthropic.then(|| ANTHROPICS_LIMIT.to_owned()));
    if facts.is_empty() {
        return self::words(words, keys);
    }
    line(&spoken(words), &format!(" ({})", facts.join("; ")), keys)
}

fn spoken(words: &Words) -> String {
    let kind = words.kind.as_deref().or(words.code.as_deref());
    [kind, words.message.as_deref()].into_iter().flatten().collect::<Vec<_>>().join(": ")
}

/// Any text as one line; what is to be kept whole stands at its end. `None` where nothing is left.
pub(super) fn line(text: &str, end: &str, keys: &Keys) -> Option<Arc<str>> {
    let text = looked_at(text);
    // First all on one line: what stands between the parts of a key must not come off after the search for it.
    let text: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c.is_control() || is_invisible(c))
        .filter(|word| !word.is_empty())
        .collect();
    let text = text.join(" ");
    let mut text = without_lookalikes(&keys.scrub_text(&text, 0));
    let room = LONGEST - end.len().min(LONGEST);
    if let Some((at, _)) = text.char_indices().nth(room) {
        // The last of them is the sign that something is left out.
        let cut = text[..at].char_indices().next_back().map_or(0, |(at, _)| at);
        text.truncate(cut);
        text.push('…');
    }
    text.push_str(end);
    let text = text.trim_start();
    // The stars or the end may have made what looks like a key of stars.
    if text.is_empty() || keys.are_in(text) {
        return None;
    }
    Some(text.into())
}

/// Of megabytes hardly anything is kept, so they are not looked at. What is looked at ends between words, not within a key.
fn looked_at(text: &str) -> &str {
    match text.char_indices().nth(20 * LONGEST) {
        Some((end, _)) => text[..end].rsplit_once(char::is_whitespace).map_or(&text[..end], |(words, _)| words),
        None => text,
    }
}

/// Marks that turn the direction of writing or take no room: a log shows something else than it holds.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Whatever looks like a key of the known forms is replaced: `sk-…` (Anthropic's and OpenAI's) and what follows `Bearer`.
fn without_lookalikes(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let starts_word = !clean.ends_with(|c: char| c.is_alphanumeric());
        let secret = match starts_word.then(|| secret_at(rest)).flatten() {
            Some(secret) => secret,
            None => {
                clean.push(c);
                rest = &rest[c.len_utf8()..];
                continue;
            }
        };
        clean.push_str(&rest[..secret.start]);
        clean.push_str(SCRUBBED);
        rest = &rest[secret.end..];
    }
    clean
}

/// Where in `text`, which a key begins with or its announcement, the key is.
fn secret_at(text: &str) -> Option<std::ops::Range<usize>> {
    let start = if text.starts_with("sk-") {
        0
    } else {
        let word = text.get(..BEARER.len()).filter(|word| word.eq_ignore_ascii_case(BEARER))?;
        word.len()
    };
    let token = &text[start..];
    let end = token.find(|c: char| !is_of_key(c)).unwrap_or(token.len());
    // A sentence may end with it, and "bearer of" is no key.
    let end = token[..end].trim_end_matches('.').len();
    (end >= SHORTEST || start == 0 && end > "sk-".len()).then_some(start..start + end)
}

const BEARER: &str = "bearer ";
/// A token is at least as long as this, in bytes.
const SHORTEST: usize = 8;

fn is_of_key(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '*' | '+' | '/' | '=' | '~' | '…')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::org::{Credential, Org};

    fn keys(key: &str) -> Keys {
        let keys = Keys::default();
        keys.add(&Org::new("a").credential(Credential::new(key)));
        keys
    }

    fn of(text: &str, key: &str) -> Option<String> {
        line(text, "", &keys(key)).map(|line| line.to_string())
    }

    #[test]
    fn no_key_is_told_and_nothing_that_looks_like_one() {
        for (text, told) in [
            ("Incorrect API key provided: sk-abc", "Incorrect API key provided: ***"),
            ("Incorrect API key provided: sk-abc. You can find", "Incorrect API key provided: ***. You can find"),
            ("sk-ant-api03-AbC_-9 and sk-proj-ab***yz!", "*** and ***!"),
            ("(sk-1)", "(***)"),
            ("key=\"sk-1\"", "key=\"***\""),
            ("Authorization: Bearer abcdefgh", "Authorization: Bearer ***"),
            ("authorization: BEARER abcdefgh.ijkl, no", "authorization: BEARER ***, no"),
            ("the bearer of news", "the bearer of news"),
            ("a task-force at risk-1", "a task-force at risk-1"),
            ("sk- alone", "sk- alone"),
            ("the key hunter2 is", "the key *** is"),
            ("hunter2hunter2", "******"),
            ("hunter\u{0}2", "hunter 2"),
            ("hunter\u{200b}2", "hunter 2"),
            (" a\n\tb\r\n\u{7f}c\u{85}d\u{202e}e ", "a b c d e"),
        ] {
            assert_eq!(of(text, "hunter2").as_deref(), Some(told), "{text}");
        }
        assert_eq!(of("", "k"), None);
        assert_eq!(of(" \n", "k"), None);
        assert_eq!(of("a", "*"), Some("a".to_owned()));
        assert_eq!(of("the k", "k*"), Some("the k".to_owned()));
        assert_eq!(of("a k b", "k"), Some("a *** b".to_owned()));
        assert_eq!(of("a * b", "*"), None, "stars are no cover for a star");
    }

    #[test]
    fn it_is_cut_at_300_characters_and_its_end_stays() {
        let told = |length: usize| of(&"é".repeat(length), "k").unwrap();
        assert_eq!(told(300), "é".repeat(300));
        assert_eq!(told(301), "é".repeat(299) + "…");
        let words =
            Words { kind: Some("a".into()), message: Some("é".repeat(999)), is_anthropic: true, ..Words::default() };
        let told = too_large(&words, Some(40_000_000), &Keys::default()).unwrap();
        assert_eq!(told.chars().count(), 300);
        assert!(
            told.ends_with("…é… (the request's body has 40000000 bytes; Anthropic takes 32 MB)")
                || told.ends_with("é… (the request's body has 40000000 bytes; Anthropic takes 32 MB)"),
            "{told}"
        );
        // A key that the cut would halve is gone before.
        let told = of(&format!("{}hunter2", "x".repeat(296)), "hunter2").unwrap();
        assert!(!told.contains("hun"), "{told}");
    }

    #[test]
    fn a_size_is_told_where_it_is_known_and_a_limit_where_it_is_documented() {
        let words = |is_anthropic| Words { message: Some("too large".into()), is_anthropic, ..Words::default() };
        for (is_anthropic, sent, told) in [
            (true, Some(9), "too large (the request's body has 9 bytes; Anthropic takes 32 MB)"),
            (true, None, "too large (Anthropic takes 32 MB)"),
            (false, Some(9), "too large (the request's body has 9 bytes)"),
            (false, None, "too large"),
        ] {
            assert_eq!(too_large(&words(is_anthropic), sent, &Keys::default()).as_deref(), Some(told));
        }
        assert_eq!(
            too_large(&Words::default(), Some(9), &Keys::default()).as_deref(),
            Some("(the request's body has 9 bytes)")
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_text_brings_a_key_through(
            key in prop_oneof!["sk-[a-z0-9]{1,6}", "[a-z*. ]{1,4}", "[*]{1,4}", "\\PC{1,3}"],
            pieces in prop::collection::vec(prop_oneof![Just(None), ".{0,6}".prop_map(Some)], 0..9),
            cut in any::<prop::sample::Index>(),
            end in prop_oneof![Just(""), Just(" (the request's body has 9 bytes)")],
        ) {
            let credential = Credential::new(&key);
            prop_assume!(!credential.reveal().is_empty());
            let at = key.char_indices().map(|(at, _)| at).collect::<Vec<_>>();
            let at = at[cut.index(at.len())];
            let pieces = pieces.into_iter().map(|piece| piece.unwrap_or_else(|| key.clone()));
            let text = pieces.collect::<Vec<_>>().join(&key[..at]);
            if let Some(told) = line(&text, end, &keys(&key)) {
                prop_assert!(!told.contains(credential.reveal()), "{told:?}");
                prop_assert!(told.chars().count() <= LONGEST && !told.chars().any(char::is_control));
            }
        }
    }
}
