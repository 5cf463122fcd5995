//! The `usage` of nearly every answer, read in one pass: plain names, whole numbers, and objects of such as what is told in detail.
//! Whatever is written in another way is left to a parser that reads all there is. Pure.

use super::usage::Said;

/// What the object says that `text` begins with, and where that ends. `None` where it is not as plain as that.
pub(super) fn said(text: &[u8]) -> Option<(Said, usize)> {
    let mut said = Said::default();
    let mut reader = Reader { text, at: 0 };
    reader.object(|reader, name| {
        if matches!(name, b"input_tokens_details" | b"prompt_tokens_details") {
            said.cached_tokens = reader.details()?;
        } else {
            let count = reader.value()?;
            match said.count_of(name) {
                Some(place) => *place = count,
                None if is_plain(name) => {}
                None => return None,
            }
        }
        Some(())
    })?;
    Some((said, reader.at))
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// The next byte but for blanks.
    fn next(&mut self) -> Option<u8> {
        loop {
            match self.text.get(self.at) {
                Some(b' ' | b'\n' | b'\t' | b'\r') => self.at += 1,
                next => return next.copied(),
            }
        }
    }

    /// Goes past this byte, if it is the next one.
    fn past(&mut self, byte: u8) -> Option<()> {
        (self.next() == Some(byte)).then(|| self.at += 1)
    }

    /// An object, whose values are read by `field`, told their names.
    fn object(&mut self, mut field: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.past(b'{')?;
        if self.past(b'}').is_some() {
            return Some(());
        }
        loop {
            let name = self.text()?;
            self.past(b':')?;
            field(self, name)?;
            match self.next()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// A text up to the next quote. Unless it is compared with a [plain](is_plain) one, it is to be seen whether it is.
    fn text(&mut self) -> Option<&'a [u8]> {
        self.past(b'"')?;
        let rest = &self.text[self.at..];
        let text = &rest[..memchr::memchr(b'"', rest)?];
        self.at += text.len() + 1;
        Some(text)
    }

    /// Any value; what it counts, if it is a count.
    fn value(&mut self) -> Option<Option<u64>> {
        match self.next()? {
            b'{' => self.object(|reader, name| is_plain(name).then(|| reader.leaf())?.map(drop)).map(|()| None),
            _ => self.leaf(),
        }
    }

    /// What is told of the input in detail: how much of it was cached.
    fn details(&mut self) -> Option<Option<u64>> {
        if self.next()? != b'{' {
            return self.leaf().map(|_| None);
        }
        let mut cached = None;
        self.object(|reader, name| {
            let count = reader.leaf()?;
            if name == b"cached_tokens" {
                cached = count;
            } else if !is_plain(name) {
                return None;
            }
            Some(())
        })?;
        Some(cached)
    }

    /// A value with nothing in it; what it counts, if it is a count.
    fn leaf(&mut self) -> Option<Option<u64>> {
        let word = match self.next()? {
            b'0'..=b'9' => return self.count().map(Some),
            b'"' => return is_plain(self.text()?).then_some(None),
            b'n' => &b"null"[..],
            b't' => b"true",
            _ => b"false",
        };
        self.text[self.at..].starts_with(word).then(|| self.at += word.len()).map(|()| None)
    }

    fn count(&mut self) -> Option<u64> {
        let begin = self.at;
        let mut count: u64 = 0;
        while let Some(digit @ b'0'..=b'9') = self.text.get(self.at) {
            count = count.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.at += 1;
        }
        let digits = self.at - begin;
        // So many are never too large; and what begins with a zero is that zero.
        (digits <= 18 && (digits == 1 || self.text[begin] != b'0')).then_some(count)
    }
}

/// Without escapes, and all of it ASCII that can be seen.
fn is_plain(text: &[u8]) -> bool {
    text.iter().all(|byte| matches!(byte, b' '..=b'~') && *byte != b'\\')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What the parser finds that reads all there is.
    fn parsed(text: &str) -> Option<(Said, usize)> {
        let mut values = serde_json::Deserializer::from_str(text).into_iter();
        let said = values.next()?.ok()?;
        Some((said, values.byte_offset()))
    }

    #[test]
    fn usages_as_providers_write_them_are_read() {
        for text in [
            r#"{"input_tokens":412,"cache_creation_input_tokens":0,"cache_read_input_tokens":7,"output_tokens":17}"#,
            r#"{"input_tokens":4,"cache_creation":{"ephemeral_5m_input_tokens":0,"ephemeral_1h_input_tokens":9},"output_tokens":1,"service_tier":"standard"}}"#,
            r#"{"prompt_tokens":19,"completion_tokens":10,"total_tokens":29,"prompt_tokens_details":{"cached_tokens":3,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":0}},"system_fingerprint":null}"#,
            r#"{ "input_tokens" : 4 , "input_tokens_details" : { "cached_tokens" : 2 } , "output_tokens" : null }"#,
            "{}",
        ] {
            let read = said(text.as_bytes());
            assert!(read.is_some(), "{text}");
            assert_eq!(read, parsed(text), "{text}");
        }
    }

    #[test]
    fn what_is_not_plain_is_left_to_the_parser() {
        for text in [
            "",
            "{",
            "[]",
            r#"{"input_tokens"}"#,
            r#"{"input_tokens":}"#,
            r#"{"input_tokens":1"#,
            r#"{"input_tokens":1,}"#,
            r#"{"input_tokens":01}"#,
            r#"{"input_tokens":1.5}"#,
            r#"{"input_tokens":1e3}"#,
            r#"{"input_tokens":-1}"#,
            r#"{"input_tokens":1x}"#,
            r#"{"input_tokens":nulls}"#,
            r#"{"input_tokens":1000000000000000000}"#,
            r#"{"input\u005ftokens":1}"#,
            r#"{"é":1}"#,
            r#"{"a":[1]}"#,
            r#"{"a":{"b":{}}}"#,
            r#"{"a":"b"#,
            "{\"a\":\"\n\"}",
        ] {
            assert_eq!(said(text.as_bytes()), None, "{text}");
        }
    }

    fn piece() -> impl Strategy<Value = String> {
        let names = vec![
            "input_tokens",
            "prompt_tokens",
            "output_tokens",
            "completion_tokens",
            "cache_creation_input_tokens",
            "cache_read_input_tokens",
            "input_tokens_details",
            "prompt_tokens_details",
            "cached_tokens",
            "usage",
            "a",
            "\\u0061",
            "é",
            "",
        ];
        let value = prop_oneof![
            4 => (0..999_u64).prop_map(|count| count.to_string()),
            1 => any::<i64>().prop_map(|number| number.to_string()),
            1 => any::<u64>().prop_map(|number| number.to_string()),
            1 => prop::sample::select(vec!["null", "true", "false", "1.0", "1e2", "007", "-0", "0", "nul", "[]", "[1,{}]", "{}"])
                .prop_map(str::to_owned),
            1 => "\"[a-z{}:,\\\\\" ]{0,5}\"",
        ];
        let blank = || prop::sample::select(vec!["", "", "", " ", "\n\t", "\r", "\u{b}"]);
        let field = (prop::sample::select(names), blank(), blank(), value)
            .prop_map(|(name, before, after, value)| format!("\"{name}\"{before}:{after}{value}"));
        let fields = |field: BoxedStrategy<String>| {
            (prop::collection::vec(field, 0..5), blank(), prop::sample::select(vec!["}", "}", "}", "", ",}"]))
                .prop_map(|(fields, blank, end)| format!("{{{}{blank}{end}", fields.join(&format!("{blank},"))))
        };
        let details = (
            prop::sample::select(vec!["input_tokens_details", "prompt_tokens_details", "input_tokens", "x"]),
            fields(field.clone().boxed()),
        )
            .prop_map(|(name, details)| format!("\"{name}\":{details}"));
        fields(prop_oneof![3 => field, 1 => details].boxed())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        #[test]
        fn what_is_read_is_what_the_parser_reads(text in piece(), behind in "[ ,}\"a]{0,3}") {
            let text = text + &behind;
            if let Some(read) = said(text.as_bytes()) {
                prop_assert_eq!(Some(read), parsed(&text), "{}", text);
            }
        }

        #[test]
        fn one_byte_amiss_is_never_read_otherwise_than_by_the_parser(at in 0_usize..110, byte in 0x09_u8..0x7f) {
            let mut text = br#"{"input_tokens":412,"input_tokens_details":{"cached_tokens":7,"x":null},"b":"c","output_tokens":17}"#.to_vec();
            let at = at % text.len();
            text[at] = byte;
            let text = String::from_utf8(text).unwrap();
            if let Some(read) = said(text.as_bytes()) {
                prop_assert_eq!(Some(read), parsed(&text), "{}", text);
            }
        }
    }
}
