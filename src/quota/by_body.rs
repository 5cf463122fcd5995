//! What a request's body tells of its cost.

use std::sync::LazyLock; // a search is made once: a constant that takes a while

use http::Request;
use http_body::Body;
use memchr::memmem::Finder;

use super::cost::{Cost, Estimate};
use crate::frame;

/// The default estimate: reads the request's body.
///
/// - **Input:** a token for every four bytes, the rule of thumb that providers give for English text. It is off by a factor for
///   other text, and by a large one for images in base64; the quota learns that factor from what answers say they used.
/// - **Output:** what calls have used lately, at most what the body allows: the largest of its `max_tokens`,
///   `max_completion_tokens` and `max_output_tokens`, times `n`. Only a whole number up to 10⁹ is believed, and only in the
///   body's outermost object; a body without a bound, as for embeddings, has none.
///
/// A [`Cost`] in the request's extensions is taken as said instead, and the body is not looked at.
///
/// The body is `Clone` because a clone of it is asked for its first frame: it must be a body of its own, as for a retry. That
/// costs nothing for a `Full<Bytes>`. One whose length is not known, or that does not give all at once and in one piece, is
/// estimated by its length alone. Take [`ByBytes`](super::ByBytes) for bodies that are not `Clone`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByBody;

impl<B: Body + Clone> Estimate<Request<B>> for ByBody {
    fn cost(&self, request: &Request<B>) -> Cost {
        if let Some(said) = Cost::said(request.extensions()) {
            return said;
        }
        let hint = request.body().size_hint();
        match hint.exact() {
            None => Cost::of_bytes(hint.lower()),
            Some(0) => Cost::default(),
            Some(bytes) => Cost::of_bytes(bytes).output_bound(frame::whole(request.body(), most_output)),
        }
    }
}

/// The most output tokens that a request's body allows: the largest bound that it names, for each of its choices.
fn most_output(body: &[u8]) -> Option<f64> {
    let is_bound =
        |name: &[u8]| matches!(name, b"\"max_tokens\"" | b"\"max_completion_tokens\"" | b"\"max_output_tokens\"");
    let most = self::most(body, &MAX, is_bound)?;
    let choices = self::most(body, &N, |_| true).unwrap_or(1).max(1);
    Some(most as f64 * choices as f64)
}

static MAX: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"max_"));
static N: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"n\""));

/// The largest count among the fields of a body's outermost object whose name, with its quotes, `is` one that is asked for; all
/// of those begin with `prefix` (a quote, and no escapes).
///
/// This is on the way of every call, and a prompt may be long. To search for a name takes half an instruction for a byte, to
/// parse several; so only what is found is asked where it stands, which is counted from the nearer end. In what is JSON, an
/// unescaped quote before a letter begins a string, since none ends there. Of what is not JSON anything may be said.
fn most(body: &[u8], prefix: &Finder<'_>, is: impl Fn(&[u8]) -> bool) -> Option<u64> {
    let mut place = Placed { body, from_start: Depth { text: body, at: 0, depth: 0 }, from_end: None };
    let (mut most, mut from) = (None, 0);
    while let Some(at) = prefix.find(&body[from..]) {
        let at = from + at;
        from = at + prefix.needle().len();
        most = most.max(place.count_at(at, &is));
    }
    most
}

/// Places in a body, asked for from its start to its end.
struct Placed<'a> {
    body: &'a [u8],
    from_start: Depth<'a>,
    from_end: Option<(Depth<'a>, i64)>,
}

impl Placed<'_> {
    /// The count of the field whose name begins here, if it is one of the outermost object's.
    fn count_at(&mut self, at: usize, is: impl Fn(&[u8]) -> bool) -> Option<u64> {
        let body = self.body;
        if at > 0 && body[at - 1] == b'\\' {
            return None;
        }
        let quote = at + 1 + memchr::memchr(b'"', &body[at + 1..])?;
        if !is(&body[at..=quote]) {
            return None;
        }
        let count = count(body[quote + 1..].trim_ascii_start().strip_prefix(b":")?)?;
        let depth = if at <= body.len() / 2 {
            self.from_start.at(at)?
        } else {
            // Begun at the first that is nearer to the end: there all is closed.
            let (from_end, outside) = self.from_end.get_or_insert_with(|| {
                let begin = Depth { text: body, at, depth: 0 };
                let mut end = begin;
                (begin, end.at(body.len()).unwrap_or(i64::MAX))
            });
            from_end.at(at)?.checked_sub(*outside)?
        };
        (depth == 1).then_some(count)
    }
}

/// A whole number of at most 10⁹ in the place of a value.
fn count(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii_start();
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let ends = matches!(value[digits..].trim_ascii_start().first(), Some(b',' | b'}'));
    let count = std::str::from_utf8(&value[..digits]).ok()?.parse().ok()?;
    (ends && count <= COUNT_MAX).then_some(count)
}

/// No answer has so many tokens.
const COUNT_MAX: u64 = 1_000_000_000;

/// How many objects and arrays a place in JSON is in, counted from another place outside any string.
#[derive(Clone, Copy)]
struct Depth<'a> {
    text: &'a [u8],
    at: usize,
    depth: i64,
}

impl Depth<'_> {
    /// Goes on to `place`; `None` if that is within a string.
    fn at(&mut self, place: usize) -> Option<i64> {
        while self.at < place {
            match self.text[self.at] {
                b'"' => self.at = self.string_end()?,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth -= 1,
                _ => {}
            }
            self.at += 1;
        }
        (self.at == place).then_some(self.depth)
    }

    /// Where the string ends that begins here.
    fn string_end(&self) -> Option<usize> {
        let begin = self.at + 1;
        memchr::memchr_iter(b'"', &self.text[begin..]).map(|quote| begin + quote).find(|quote| {
            let escapes = self.text[begin..*quote].iter().rev().take_while(|byte| **byte == b'\\').count();
            escapes % 2 == 0
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        convert::Infallible,
        pin::Pin,
        task::{Context, Poll},
    };

    use bytes::Bytes;
    use http_body::{Frame, SizeHint};
    use http_body_util::{Empty, Full};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::quota::ByBytes;

    fn bound(body: &str) -> Option<f64> {
        most_output(body.as_bytes())
    }

    #[test]
    fn the_largest_spelling_of_the_bound_counts_times_n() {
        for (body, expected) in [
            (r#"{"max_tokens":100}"#, Some(100.0)),
            (r#"{"max_completion_tokens":100}"#, Some(100.0)),
            (r#"{"max_output_tokens":100}"#, Some(100.0)),
            // B94
            (r#"{"max_tokens":1,"max_completion_tokens":10000}"#, Some(10_000.0)),
            (r#"{"max_completion_tokens":10000,"max_tokens":1}"#, Some(10_000.0)),
            (r#"{"max_tokens":null,"max_completion_tokens":7}"#, Some(7.0)),
            (r#"{"n":3,"max_tokens":100}"#, Some(300.0)),
            (r#"{"max_tokens":100,"n":3}"#, Some(300.0)),
            (r#"{"max_tokens":100,"n":0}"#, Some(100.0)),
            (r#"{"max_tokens":100,"n":null}"#, Some(100.0)),
            (r#"{"max_tokens":100,"n":-3}"#, Some(100.0)),
            (r#"{"n":3}"#, None),
            ("{ \"max_tokens\" :\n 100 ,\t\"n\" : 2 }\n", Some(200.0)),
            (r#"{"model":"m","messages":[{"content":"Hi"}],"max_tokens":100,"tools":[{}]}"#, Some(100.0)),
            // What no answer may have is no bound.
            (r#"{"max_tokens":1000000000}"#, Some(1e9)),
            (r#"{"max_tokens":1000000001}"#, None),
            (r#"{"max_tokens":99999999999999999999999}"#, None),
            (r#"{"max_tokens":-1}"#, None),
            (r#"{"max_tokens":NaN}"#, None),
            (r#"{"max_tokens":"100"}"#, None),
            (r#"{"max_tokens":1.5}"#, None),
            (r#"{"max_tokens":1e3}"#, None),
            (r#"{"max_tokens":true}"#, None),
            (r#"{"max_tokens":{"max_tokens":5}}"#, None),
            (r#"{"max_tokens":[5]}"#, None),
            (r#"{"max_tokens":0}"#, Some(0.0)),
            // Other names, and the right one elsewhere.
            (r#"{"max_tool_calls":5,"max_tokens_":6,"xmax_tokens":7,"max_":8}"#, None),
            (r#"{"input":"max_tokens","stop":["max_tokens",":5"]}"#, None),
            (r#"{"metadata":{"max_tokens":5}}"#, None),
            (r#"{"max_tokens":5,"tools":[{"properties":{"max_tokens":9,"n":9}}]}"#, Some(5.0)),
            (r#"{"tools":[{"properties":{"max_tokens":9,"n":9}}],"max_tokens":5}"#, Some(5.0)),
            (r#"[{"max_tokens":5}]"#, None),
            // Text that only looks like it.
            (r#"{"prompt":"{\"max_tokens\":9}","max_tokens":5}"#, Some(5.0)),
            (r#"{"prompt":",\\\"max_tokens\":9,","z":1}"#, None),
            (r#"{"prompt":"\\","max_tokens":5,"z":"\\"}"#, Some(5.0)),
            (r#"{"a\"max_tokens":5,"z":"a long text"}"#, None),
            (r#"{"z":"a long text","a\"max_tokens":5}"#, None),
            (r#"{"prompt":"}{][","max_tokens":5,"z":"}]"}"#, Some(5.0)),
            // No JSON, or not all of it.
            ("", None),
            ("max_tokens", None),
            (r#""max_"#, None),
            (r#"{"max_tokens""#, None),
            (r#"{"max_tokens":"#, None),
            (r#"{"max_tokens":5"#, None),
        ] {
            assert_eq!(bound(body), expected, "{body}");
        }
    }

    fn estimate<B: Body + Clone>(body: B) -> Cost {
        ByBody.cost(&Request::new(body))
    }

    #[test]
    fn input_is_a_token_for_four_bytes_and_output_is_bounded_never_named() {
        let cost = estimate(Full::new(Bytes::from(r#"{"max_tokens":4096,"messages":[]}"#)));
        assert_eq!(cost, Cost::tokens(Some(9.0), None).output_bound(Some(4096.0)));
        let embedding = estimate(Full::new(Bytes::from(r#"{"model":"e","input":["a","b"]}"#)));
        assert_eq!(embedding, Cost::tokens(Some(8.0), None));
        assert_eq!(estimate(String::from("abcd")), Cost::tokens(Some(1.0), None));
        assert_eq!(estimate(Empty::<Bytes>::new()), Cost::default());
    }

    #[test]
    fn what_the_caller_says_is_taken_as_said() {
        let said = Cost::tokens(Some(7.0), None).output_bound(Some(8.0));
        let request = |body: &'static str| Request::builder().extension(said).body(body.to_owned()).unwrap();
        let request = request(r#"{"max_tokens":100}"#);
        assert_eq!(ByBody.cost(&request), said.exact());
        assert_eq!(ByBytes.cost(&request), said.exact());
        assert_eq!(ByBytes.cost(&Request::new(String::from("abcde"))), Cost::tokens(Some(2.0), None));
    }

    /// Gives its parts one by one, and waits where one is empty.
    #[derive(Clone)]
    struct Parts {
        parts: VecDeque<&'static [u8]>,
        least: u64,
        most: Option<u64>,
    }

    impl Body for Parts {
        type Data = &'static [u8];
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Self::Data>, Infallible>>> {
            match self.parts.pop_front() {
                Some([]) => Poll::Pending,
                part => Poll::Ready(part.map(|part| Ok(Frame::data(part)))),
            }
        }

        fn is_end_stream(&self) -> bool {
            self.parts.is_empty()
        }

        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(self.least);
            self.most.into_iter().for_each(|most| hint.set_upper(most));
            hint
        }
    }

    #[test]
    fn a_body_that_does_not_give_all_at_once_is_estimated_by_its_length() {
        let body = |parts: &[&'static [u8]], least, most| {
            estimate(Parts { parts: parts.iter().copied().collect(), least, most })
        };
        let by_length = Cost::tokens(Some(25.0), None);
        let json: &[u8] = br#"{"max_tokens":100}"#;
        let read = body(&[json], 100, Some(100));
        assert_eq!(read, by_length.output_bound(Some(100.0)), "or else nothing is shown below");
        assert_eq!(body(&[b"", json], 100, Some(100)), by_length, "it waits");
        assert_eq!(body(&[json, b" "], 100, Some(100)), by_length, "there is more");
        assert_eq!(body(&[json], 100, Some(101)), by_length, "nobody knows how much there is");
        assert_eq!(body(&[json], 100, None), by_length);
        assert_eq!(body(&[json], 0, None), Cost::default());
    }

    fn request() -> impl Strategy<Value = Value> {
        let name = prop::sample::select(vec![
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "n",
            "max_",
            "a",
            "\"max_tokens\":5,",
            "a\"max_tokens",
            "\\\"n\":2}",
        ]);
        let leaf = prop_oneof![
            3 => (0..99_u32).prop_map(Value::from),
            1 => any::<f64>().prop_map(Value::from),
            1 => name.clone().prop_map(Value::from),
            1 => "[a-z\"{}:\\\\,\\[\\]]{0,9}".prop_map(Value::from),
            1 => Just(Value::Null),
        ];
        leaf.prop_recursive(4, 40, 6, move |inner| {
            prop_oneof![
                1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                3 => prop::collection::vec((name.clone(), inner), 0..6)
                    .prop_map(|fields| fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn what_is_found_is_what_the_outermost_object_says(request in request(), pretty: bool) {
            let text = if pretty { serde_json::to_string_pretty(&request) } else { serde_json::to_string(&request) };
            let count = |name: &str| request.get(name)?.as_u64().filter(|count| *count <= COUNT_MAX);
            let most = ["max_tokens", "max_completion_tokens", "max_output_tokens"].into_iter().filter_map(count).max();
            let expected = most.map(|most| (most * count("n").unwrap_or(1).max(1)) as f64);
            prop_assert_eq!(bound(&text.unwrap()), expected);
        }

        #[test]
        fn whatever_the_bytes_are_nothing_breaks(text in "(\"max_tokens\"|\"n\"|[\"\\\\:,{}\\[\\]0-9 x]){0,40}") {
            let _ = bound(&text);
        }
    }

    #[test]
    fn many_nested_names_cost_no_more_than_a_look_at_each() {
        // Would each be counted from an end anew, this took minutes.
        let tools: Vec<_> = (0..100_000).map(|_| json!({"max_tokens": 9, "n": 9})).collect();
        assert_eq!(bound(&json!({"a": tools, "max_tokens": 5, "z": tools}).to_string()), Some(5.0));
    }
}
