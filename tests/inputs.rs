//! The forms in which `dispatch` takes its input, and what may be wrong with one: its reader by itself. The program as a whole
//! is in `tests/dispatch.rs`.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::{
    io::{self, BufRead, BufReader, Cursor, Read, Write},
    path::Path,
    sync::{Arc, Mutex},
};

use flate2::{Compression, write::GzEncoder};
use proptest::prelude::*;
use serde_json::{Value, json};
use tower_quota::org::{Dialect, Family};

/// The reader by itself, since a program's parts cannot be reached from outside.
#[path = "../examples/dispatch/input/mod.rs"]
#[allow(dead_code)]
mod input;

use input::{BadInput, Items, MAX_LINE, Prompts, Reading, Skips, Template, survey::survey, unpacked};

/// What is read of an input: id, path, body and metadata of each item, and how it ends.
type Told = (Vec<[String; 4]>, Option<BadInput>);

fn told(mut items: Items<impl BufRead>) -> Told {
    let mut all = Vec::new();
    loop {
        match items.next_item() {
            Ok(None) => return (all, None),
            Err(bad) => return (all, Some(bad)),
            Ok(Some(item)) => {
                let body = String::from_utf8(item.body.to_vec()).unwrap();
                let metadata = item.metadata.map_or(String::new(), |metadata| metadata.get().to_owned());
                all.push([item.custom_id, item.path.to_string(), body, metadata]);
            }
        }
    }
}

fn read(text: impl AsRef<[u8]>, reading: &Reading) -> Told {
    told(Items::new(Cursor::new(text.as_ref()), "x", reading.clone()))
}

/// All items of an input that is good.
fn good(text: impl AsRef<[u8]>, reading: &Reading) -> Vec<[String; 4]> {
    let (items, bad) = read(text, reading);
    assert!(bad.is_none(), "{}", bad.unwrap());
    items
}

fn ids(items: &[[String; 4]]) -> Vec<&str> {
    items.iter().map(|item| item[0].as_str()).collect()
}

fn template(text: &str) -> Result<Template, BadInput> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    Template::load(file.path(), None, None)
}

/// For prompts, in Anthropic's dialect.
fn prompts() -> Reading {
    let text = r#"{"model":"claude-haiku-4-5","messages":[{"role":"user","content":"Say {{prompt}}!"}]}"#;
    Reading { template: Some(Arc::new(template(text).unwrap())), ..Reading::default() }
}

/// Bad lines skipped, and what is said of them.
fn skipping(reading: Reading) -> (Reading, Arc<Skips>, Arc<Mutex<Vec<String>>>) {
    let said = Arc::new(Mutex::new(Vec::new()));
    let here = said.clone();
    let skips = Arc::new(Skips::new(move |text| here.lock().unwrap().push(text.to_owned())));
    (Reading { skips: Some(skips.clone()), ..reading }, skips, said)
}

/// What the prompt of this item was.
fn prompt_of(item: &[String; 4]) -> String {
    let body: Value = serde_json::from_str(&item[2]).unwrap();
    let content = body["messages"][0]["content"].as_str().unwrap().to_owned();
    content.strip_prefix("Say ").unwrap().strip_suffix('!').unwrap().to_owned()
}

/// A form, how it is read, and a line of it by its number, in which a string says `word`.
struct Form {
    name: &'static str,
    reading: fn() -> Reading,
    line: fn(usize, &str) -> String,
}

/// The forms in which a line is an item.
const FORMS: [Form; 4] = [
    Form {
        name: "anthropic",
        reading: Reading::default,
        line: |n, word| format!(r#"{{"custom_id":"id-{n}","params":{{"model":"m","say":"{word}"}}}}"#),
    },
    Form {
        name: "openai",
        reading: Reading::default,
        line: |n, word| {
            format!(r#"{{"custom_id":"id-{n}","method":"POST","url":"/v1/x","body":{{"model":"m","say":"{word}"}}}}"#)
        },
    },
    Form {
        name: "body",
        reading: Reading::default,
        line: |n, word| format!(r#"{{"model":"m","messages":[],"say":"{word}","metadata":{{"custom_id":"id-{n}"}}}}"#),
    },
    Form { name: "text", reading: prompts, line: |n, word| format!("prompt {n} {word}") },
];

#[test]
fn the_first_line_says_which_form_an_input_has() {
    let anthropic = r#"{"custom_id":"a","params":{"model":"m"}}"#;
    let openai = r#"{"custom_id":"a","method":"POST","url":"/v1/responses","body":{"model":"m"}}"#;
    let chat = r#"{"model":"gpt-4o","messages":[]}"#;
    let claude = r#"{"model":"claude-sonnet-4-5","messages":[]}"#;
    let embed = r#"{"model":"text-embedding-3-small","input":["a","b"]}"#;
    let none = Reading::default;
    for (text, reading, id, path, body) in [
        (anthropic, none(), "a", "/v1/messages", r#"{"model":"m"}"#),
        (openai, none(), "a", "/v1/responses", r#"{"model":"m"}"#),
        (chat, none(), "line-1", "/v1/chat/completions", chat),
        (claude, none(), "line-1", "/v1/messages", claude),
        (embed, none(), "line-1", "/v1/embeddings", embed),
    ] {
        assert_eq!(good(text, &reading), [[id, path, body, ""].map(str::to_owned)], "{text}");
    }
    for (text, ids, says) in [
        ("one\ntwo", &["line-1", "line-2"][..], &["one", "two"][..]),
        (r#"["one","two"]"#, &["list-1-0", "list-1-1"], &["one", "two"]),
        ("[\n  \"one\",\n  \"two\"\n]\n", &["list-1-0", "list-1-1"], &["one", "two"]),
        ("[\"one\",\"two\"]\n[]\n[\"three\"]\n", &["list-1-0", "list-1-1", "list-3-0"], &["one", "two", "three"]),
        ("\n \n [ ] \n[\"one\"]", &["list-2-0"], &["one"]),
        // No list, though it begins like one.
        ("[INST] one", &["line-1"], &["[INST] one"]),
        ("[ 1 ] one\n[\"two\"]", &["line-1", "line-2"], &["[ 1 ] one", "[\"two\"]"]),
        ("{braces} one", &["line-1"], &["{braces} one"]),
    ] {
        let items = good(text, &prompts());
        assert_eq!(self::ids(&items), ids, "{text}");
        assert_eq!(items.iter().map(prompt_of).collect::<Vec<_>>(), says, "{text}");
        assert!(items.iter().all(|item| item[1] == "/v1/messages"));
    }
}

#[test]
fn the_command_line_beats_what_the_first_line_looks_like() {
    let said = |form| Reading { prompts: Some(form), ..prompts() };
    assert_eq!(ids(&good("[\"one\"]\ntwo", &said(Prompts::Text))), ["line-1", "line-2"]);
    assert_eq!(ids(&good("{\"a\":1}", &said(Prompts::Text))), ["line-1"]);
    let (_, bad) = read("one", &said(Prompts::List));
    let bad = bad.unwrap().to_string();
    assert_eq!(bad, "x: line 1, column 1: expected a list of strings, but here stands `one`");
}

#[test]
fn a_request_where_prompts_are_expected_is_no_prompt() {
    for form in &FORMS[..3] {
        let (items, bad) = read((form.line)(1, ""), &prompts());
        let bad = bad.unwrap().to_string();
        assert!(items.is_empty() && bad.contains("--form text") && bad.contains("--template"), "{bad}");
    }
    let (_, bad) = read("one\n{\"a\":1}\n", &prompts());
    assert!(bad.is_none(), "later lines are what the first one is");
    for text in ["a prompt", "[\"a prompt\"]"] {
        let (_, bad) = read(text, &Reading::default());
        assert!(bad.unwrap().problem.contains("--template"), "{text}");
    }
}

#[test]
fn metadata_is_not_sent_and_all_else_is_byte_for_byte() {
    for (line, body, metadata) in [
        (r#"{"messages":[],"model":"m","metadata":{"row":7}}"#, r#"{"messages":[],"model":"m"}"#, r#"{"row":7}"#),
        (r#"{"metadata":{"row":7},"messages":[],"model":"m"}"#, r#"{"messages":[],"model":"m"}"#, r#"{"row":7}"#),
        (r#"{"messages":[], "metadata" : [1, 2] , "model":"m"}"#, r#"{"messages":[] , "model":"m"}"#, "[1, 2]"),
        (r#" { "metadata":"}\",{" , "messages":[],"model":"m"} "#, r#"{ "messages":[],"model":"m"}"#, r#""}\",{""#),
        (r#"{"model":"m","messages":[],"met\u0061data":1.50}"#, r#"{"model":"m","messages":[]}"#, "1.50"),
        (r#"{"model":"m","metadata":null,"messages":[]}"#, r#"{"model":"m","messages":[]}"#, "null"),
        (
            r#"{"model":"m","messages":[{"metadata":1}],"metadata":2,"n":12345678901234567890.10}"#,
            r#"{"model":"m","messages":[{"metadata":1}],"n":12345678901234567890.10}"#,
            "2",
        ),
        (r#"{"model":"m","messages":[{"metadata":1}]}"#, r#"{"model":"m","messages":[{"metadata":1}]}"#, ""),
    ] {
        let items = good(line, &Reading::default());
        assert_eq!((items[0][2].as_str(), items[0][3].trim()), (body, metadata), "{line}");
        assert!(serde_json::from_str::<Value>(&items[0][2]).is_ok());
    }
    let batch = r#"{"custom_id":"a","params":{"model":"m","metadata":{"user_id":"u"}},"metadata":1}"#;
    let items = good(batch, &Reading::default());
    assert_eq!(
        items[0][2..],
        [r#"{"model":"m","metadata":{"user_id":"u"}}"#, ""],
        "a batch line has no metadata of ours"
    );
}

#[test]
fn a_body_goes_where_its_api_and_its_question_say() {
    let path = |text: &str| Some(text.parse().unwrap());
    let (anthropic, openai) = (Some(Dialect::Anthropic), Some(Dialect::OpenAi));
    let (chat, embed) = (r#"{"model":"claude-x","messages":[]}"#, r#"{"model":"m","input":"a"}"#);
    for (dialect, said, line, to) in [
        (anthropic, None, chat, Ok("/v1/messages")),
        (openai, None, chat, Ok("/v1/chat/completions")),
        (None, None, r#"{"model":"CLAUDE-3","messages":[]}"#, Ok("/v1/messages")),
        (openai, None, r#"{"messages":[]}"#, Ok("/v1/chat/completions")),
        (None, None, r#"{"messages":[]}"#, Err((1, "--dialect"))),
        (openai, None, embed, Ok("/v1/embeddings")),
        (anthropic, None, embed, Err((22, "embeddings"))),
        (openai, path("/v1/responses"), embed, Ok("/v1/responses")),
        (openai, path("/v1/completions"), r#"{"model":"m","prompt":"a"}"#, Ok("/v1/completions")),
        (openai, None, r#"{"model":"m","prompt":"a"}"#, Err((1, "neither"))),
        (openai, None, r#"{"model":"m","messages":[],"stream":true}"#, Err((37, "`stream`"))),
        (openai, None, r#"{"model":1,"messages":[]}"#, Err((10, "`model`"))),
        (openai, None, r#"{"custom_id":"a","messages":[]}"#, Err((14, "metadata.custom_id"))),
        (openai, None, "{}", Err((1, "neither"))),
    ] {
        let (items, bad) = read(line, &Reading { dialect, path: said, ..Reading::default() });
        match to {
            Ok(to) => assert_eq!(items[0][1], to, "{line}"),
            Err((column, why)) => {
                let bad = bad.unwrap();
                assert_eq!(bad.place, Some((1, column)), "{line}: {bad}");
                assert!(bad.problem.contains(why), "{line}: {bad}");
            }
        }
    }
}

#[test]
fn an_id_of_our_own_is_the_lines_number_and_survives_what_does_not_move_the_line() {
    let body = |n: usize| format!(r#"{{"model":"m","messages":[{n}]}}"#);
    let lines = |numbers: &[usize]| numbers.iter().map(|n| body(*n) + "\n").collect::<String>();
    let before = good(lines(&[1, 2, 3]), &Reading::default());
    assert_eq!(ids(&before), ["line-1", "line-2", "line-3"]);
    assert_eq!(good(lines(&[1, 2, 3, 4]), &Reading::default())[..3], before, "a line added at the end");
    assert_eq!(ids(&good(lines(&[1, 9, 3]), &Reading::default())), ids(&before), "a line changed");
    let blank = format!("{}\n\n{}", body(1), body(2));
    assert_eq!(ids(&good(blank, &Reading::default())), ["line-1", "line-3"], "as an editor counts");

    let named = |metadata: &str| format!(r#"{{"model":"m","messages":[],"metadata":{metadata}}}"#);
    for (metadata, id) in [
        (r#"{"custom_id":"mine","row":1}"#, Ok("mine")),
        (r#"{"row":1}"#, Ok("line-1")),
        (r#"{"custom_id":null}"#, Ok("line-1")),
        (r#""mine""#, Ok("line-1")),
        (r#"{"custom_id":7}"#, Err(52)),
        (r#"{"custom_id":""}"#, Err(52)),
    ] {
        let (items, bad) = read(named(metadata), &Reading::default());
        match id {
            Ok(id) => assert_eq!(items[0][0], id, "{metadata}"),
            Err(column) => assert_eq!(bad.unwrap().place, Some((1, column)), "{metadata}"),
        }
    }
    let twice = [named(r#"{"custom_id":"line-2"}"#), named("{}")].join("\n");
    assert_eq!(
        ids(&good(twice, &Reading::default())),
        ["line-2", "line-2"],
        "ours are ids as any other: they can come twice"
    );
}

#[test]
fn what_is_odd_about_lines_is_the_same_in_every_form() {
    for Form { name, reading, line } in &FORMS {
        let reading = reading();
        let (a, b) = (line(1, "\u{2028}é"), line(2, ""));
        let plain = good(format!("{a}\n{b}\n"), &reading);
        assert_eq!(plain.len(), 2, "{name}");
        assert!(plain[0][2].contains("\u{2028}é"), "{name}: no end of line for JSON");
        for (what, text) in [
            ("no last line feed", format!("{a}\n{b}")),
            ("a byte order mark", format!("\u{feff}{a}\n{b}\n")),
            ("carriage returns", format!("{a}\r\n{b}\r\n")),
            ("blank lines at the end", format!("{a}\n{b}\n\n \r\n\t\n")),
        ] {
            assert_eq!(good(text, &reading), plain, "{name}: {what}");
        }
        let blank = good(format!("\u{feff}\n \r\n{a}\n\n{b}\n"), &reading);
        assert_eq!(blank.iter().map(|item| &item[2]).collect::<Vec<_>>(), [&plain[0][2], &plain[1][2]], "{name}");

        // A fault is where it stands.
        for (what, bytes) in [("NUL", &b"\0"[..]), ("no UTF-8", b"\xff"), ("half a character", b"\xc3")] {
            let word = line(2, "WORD");
            let (before, after) = word.split_once("WORD").unwrap();
            let bad = [format!("{a}\n{before}").as_bytes(), bytes, after.as_bytes(), b"\n"].concat();
            let (items, bad) = read(bad, &reading);
            let (line, at) = bad.unwrap().place.unwrap();
            assert_eq!((items.len(), line), (1, 2), "{name}: {what}");
            assert_eq!(at, before.chars().count() + 1, "{name}: {what}");
        }
    }
}

#[test]
fn lists_take_the_same_odd_things() {
    let plain = good("[\"a\u{2028}\",\"b\\u0000\"]", &prompts());
    assert_eq!(plain.iter().map(prompt_of).collect::<Vec<_>>(), ["a\u{2028}", "b\0"]);
    for text in [
        "\u{feff}[\"a\u{2028}\",\"b\\u0000\"]",
        "[\r\n\"a\u{2028}\" ,\r\n\t\"b\\u0000\"\r\n]\r\n\r\n",
        "\n\n[\"a\u{2028}\",\n\n\"b\\u0000\"]",
    ] {
        assert_eq!(good(text, &prompts()), plain, "{text:?}");
    }
    for (text, good, place, why) in [
        (&b"[\"a\",\n\"b"[..], 1, (2, 2), "EOF"),
        (b"[\"a\"", 1, (1, 5), "no `]`"),
        (b"[\"a\",", 1, (1, 6), "no `]`"),
        (b"[\"a\",]", 1, (1, 6), "expected a string, but here stands `]`"),
        (b"[\"a\" \"b\"]", 1, (1, 6), "expected `,` or `]`"),
        (b"[\"a\"] x", 1, (1, 7), "expected a list of strings"),
        (b"[\"a\",[\"b\"]]", 1, (1, 6), "expected a string"),
        (b"[\"\xc3\xa9\",\n \"b\\q\"]", 1, (2, 5), "invalid escape"),
        (b"[\"\xc3\xa9\", null]", 1, (1, 7), "here stands `null`"),
        (b"[\"a\", \"b\0\"]", 1, (1, 9), "control character"),
        (b"[\"a\", \"b\xff\"]", 1, (1, 9), "not UTF-8"),
        (b"[\"a\", \"\\ud800\"]", 1, (1, 14), "hex escape"),
    ] {
        let (items, bad) = read(text, &prompts());
        let bad = bad.unwrap();
        assert_eq!((items.len(), bad.place), (good, Some(place)), "{bad}");
        assert!(bad.problem.contains(why), "{bad}");
    }
}

#[test]
fn a_line_beyond_the_bound_is_refused_in_every_form_and_can_be_skipped() {
    for Form { name, reading, line } in &FORMS {
        let (reading, skips, said) = skipping(reading());
        let (a, c) = (line(1, ""), line(3, ""));
        let text = |repeat: u64| {
            let long = BufReader::with_capacity(1 << 20, io::repeat(b'x')).take(repeat);
            Cursor::new(format!("{a}\n")).chain(long).chain(Cursor::new(format!("\n{c}\n")))
        };
        let stop = Reading { skips: None, ..reading.clone() };
        let (items, bad) = told(Items::new(text(MAX_LINE + 1), "x", stop));
        assert_eq!(items.len(), 1, "{name}");
        let bad = bad.unwrap().to_string();
        assert_eq!(bad, "x: line 2, column 67108865: the line is longer than 64 MiB", "{name}");

        let (items, bad) = told(Items::new(text(MAX_LINE + 70_000), "x", reading));
        assert!(bad.is_none());
        assert_eq!((items.len(), skips.count()), (2, 1), "{name}");
        assert_eq!(
            said.lock().unwrap()[..],
            [format!("skipped: {bad}", bad = "x: line 2, column 67108865: the line is longer than 64 MiB")]
        );
    }
}

#[test]
fn a_string_of_a_list_beyond_the_bound_is_refused() {
    let long = Cursor::new("[\"a\", \"").chain(BufReader::with_capacity(1 << 20, io::repeat(b'x')));
    let (items, bad) = told(Items::new(long, "x", prompts()));
    assert_eq!(items.len(), 1);
    assert_eq!(bad.unwrap().to_string(), "x: line 1, column 7: the string is longer than 64 MiB");
}

#[test]
fn ten_bad_lines_are_named_and_all_are_counted_once() {
    let (reading, skips, said) = skipping(Reading::default());
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for n in 0..40 {
        writeln!(file, "{}", if n % 2 == 0 { "{".to_owned() } else { (FORMS[0].line)(n, "") }).unwrap();
    }
    let name = file.path().display();
    assert_eq!(survey(file.path(), &reading, |_, _, _, _| Ok(())).unwrap().items, 20);
    let mut items = input::open(file.path(), &reading).unwrap();
    while items.next_item().unwrap().is_some() {}
    assert_eq!(skips.count(), 20, "read twice, counted once");
    let said = said.lock().unwrap();
    assert_eq!(said.len(), 11);
    for (n, said) in said[..10].iter().enumerate() {
        assert!(said.starts_with(&format!("skipped: {name}: line {}, column 1: ", 2 * n + 1)), "{said}");
    }
    assert_eq!(said[10], "skipped: any more bad lines are only counted");
}

#[test]
fn bad_strings_of_a_list_are_skipped_and_shift_no_index() {
    let (reading, skips, _) = skipping(prompts());
    let items = good(r#"["a", null, "b\q", 7, true, -1.5e3, "c"] ["d", NaN]"#, &reading);
    assert_eq!(ids(&items), ["list-1-0", "list-1-6", "list-2-0"]);
    assert_eq!(items.iter().map(prompt_of).collect::<Vec<_>>(), ["a", "c", "d"]);
    assert_eq!(skips.count(), 6);
}

/// Fails after some bytes.
struct Failing(usize);

impl Read for Failing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = buffer.len().min(self.0);
        buffer[..n].fill(b'\n');
        self.0 -= n;
        if n == 0 { Err(io::Error::other("the disk is gone")) } else { Ok(n) }
    }
}

#[test]
fn what_is_no_fault_of_a_line_is_not_skipped() {
    let [anthropic, openai, body] = [0, 1, 2].map(|form: usize| (FORMS[form].line)(form, ""));
    for (text, line, why) in [
        ([&*anthropic, &*openai].join("\n"), 2, "a pool holds one provider"),
        ([&*openai, &*anthropic].join("\n"), 2, "a pool holds one provider"),
        ([&*anthropic, &*body].join("\n"), 2, "an input has one form"),
        ([&*body, "{", &*openai].join("\n"), 3, "an input has one form"),
    ] {
        let (reading, ..) = skipping(Reading::default());
        let (items, bad) = read(&text, &reading);
        let bad = bad.unwrap();
        assert_eq!((items.len(), bad.place.unwrap().0), (1, line), "{bad}");
        assert!(bad.problem.contains(why), "{bad}");
    }
    let (reading, skips, _) = skipping(Reading { dialect: Some(Dialect::Anthropic), ..Reading::default() });
    let (_, bad) = read(&openai, &reading);
    assert!(bad.unwrap().problem.contains("the orgs speak anthropic"));

    let (_, bad) = told(Items::new(BufReader::new(Failing(7)), "x", reading));
    assert_eq!(bad.unwrap().to_string(), "x: line 8, column 1: cannot be read: the disk is gone");
    assert_eq!(skips.count(), 0);
}

#[test]
fn a_template_is_checked_before_anything_is_read() {
    for (text, place, why) in [
        ("{\n  \"model\": \"m\",\n  \"messages\": [{{prompt}}]\n}", Some((3, 17)), "not valid JSON"),
        ("{\"model\":\"m\",\"messages\":[\"{{ prompt }}\"]}", Some((1, 1)), "{{prompt}}"),
        ("\u{feff}\n {\"model\":\"m\",\"stream\":true,\"messages\":[\"{{prompt}}\"]}", Some((2, 24)), "`stream`"),
        ("[\"{{prompt}}\"]", Some((1, 1)), "JSON object"),
        ("{\"model\":\"m\",\"question\":\"{{prompt}}\"}", Some((1, 1)), "neither"),
        ("{\"messages\":[\"{{prompt}}\"]}", Some((1, 1)), "--dialect"),
        ("{\"model\":\"m\",\"messages\":[\"{{prompt}}\"]", Some((1, 38)), "ends too early"),
        ("", Some((1, 1)), "JSON object"),
    ] {
        let bad = template(text).unwrap_err();
        assert_eq!(bad.place, place, "{bad}");
        assert!(bad.problem.contains(why) && bad.file.starts_with("--template "), "{bad}");
    }
    let bad = Template::load(Path::new("/nowhere/t.json"), None, None).unwrap_err();
    assert!(bad.to_string().starts_with("--template /nowhere/t.json: "), "{bad}");
}

#[test]
fn every_place_of_a_template_takes_the_prompt() {
    let text = "{\n \"model\": \"gpt-4o\",\n \"messages\": [\"{{prompt}}\", \"{{prompt}} {{prompt}}\"] }\n";
    let template = template(text).unwrap();
    assert_eq!((template.dialect, template.path.as_str()), (Dialect::OpenAi, "/v1/chat/completions"));
    assert_eq!(Family::of_model(&template.model), Family::new("gpt-4o"));
    let body: Value = serde_json::from_str(&template.fill("\"\\\t{{prompt}}\u{1}")).unwrap();
    let prompt = "\"\\\t{{prompt}}\u{1}";
    assert_eq!(body["messages"], json!([prompt, format!("{prompt} {prompt}")]));
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn zstd(text: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Two frames that the program `zstd` made: ten lines with the ids `a0` to `a9`, and `b0` to `b9`.
const ZSTD: [&[u8]; 2] = [
    b"\x28\xb5\x2f\xfd\x64\xd6\x00\x75\x02\x00\x82\x03\x0d\x11\x90\x7d\x12\xb1\x48\xe9\x44\xba\x7b\x0a\xbb\x3c\x7e\x3f\x4f\xe7\x12\x4b\x25\x74\x4c\x21\x03\xec\xed\xf0\xe5\x97\xce\x99\x4b\xf8\xe8\x74\xcd\xfc\xce\xb7\x5f\x3d\xb8\x78\x67\xfe\x62\x9b\x14\xdf\xec\x5c\x07\x0a\x20\xd0\x9b\x03\x8d\x6c\xde\x26\xdb\x94\x99\xb7\xc9\x36\x65\xf3\x8e\xc9\x2e\x3b\xa9\x07\x07\x0b\x23\xa4",
    b"\x28\xb5\x2f\xfd\x64\xd6\x00\x9d\x02\x00\x84\x03\x7b\x22\x63\x75\x73\x74\x6f\x6d\x5f\x69\x64\x22\x3a\x22\x62\x30\x22\x2c\x22\x70\x61\x72\x61\x6d\x73\x22\x3a\x7b\x22\x6d\x6f\x64\x65\x6c\x22\x3a\x22\x63\x6c\x61\x75\x64\x65\x22\x7d\x7d\x0a\x31\x32\x33\x34\x35\x36\x37\x38\x39\x0a\x00\xa0\x91\x81\x79\x03\x93\x0d\x4c\x19\x98\x37\x30\xd9\xc0\x94\x81\x79\x03\x93\x5d\x76\x4a\x0f\xad\xe8\x35\x2b",
];

/// Reads an archive as a file of this name.
fn unpack(bytes: &[u8], name: &str) -> Told {
    match unpacked(Cursor::new(bytes.to_vec()), Path::new(name)) {
        Ok(source) => told(Items::new(source, name, Reading::default())),
        Err(error) => (vec![], Some(BadInput { file: name.to_owned(), place: None, problem: error.to_string() })),
    }
}

/// Lines of a few hundred bytes that do not shrink to nothing.
fn lines(n: usize) -> String {
    (0..n).map(|n| (FORMS[0].line)(n, &format!("{:x}", (n as u128 + 1) * 0x9e37_79b9_7f4a_7c15_9e37)) + "\n").collect()
}

#[test]
fn archives_are_read_through_whatever_tells_them() {
    let text = lines(3_000);
    let plain = good(&text, &Reading::default());
    let (start, end) = text.split_at(text.len() / 2);
    let joined = [gzip(start.as_bytes()), gzip(b""), gzip(end.as_bytes())].concat();
    let skippable = b"\x53\x2a\x4d\x18\x05\0\0\0hello";
    let frames = [&zstd(start.as_bytes())[..], skippable, &zstd(end.as_bytes()), skippable].concat();
    for (bytes, name) in [
        (text.as_bytes(), "in.jsonl"),
        (&gzip(text.as_bytes()), "in.jsonl.gz"),
        (&gzip(text.as_bytes()), "in.GZ"),
        (&gzip(text.as_bytes()), "-"),
        (&joined, "in.gz"),
        (&zstd(text.as_bytes()), "in.jsonl.zst"),
        (&zstd(text.as_bytes()), "in"),
        (&frames, "in.zst"),
    ] {
        let (items, bad) = unpack(bytes, name);
        assert!(bad.is_none(), "{name}: {}", bad.unwrap());
        assert_eq!(items, plain, "{name}");
    }
    let (items, bad) = unpack(&ZSTD.concat(), "in.zst");
    assert!(bad.is_none());
    let expected = ["a", "b"].map(|letter| (0..10).map(move |n| format!("{letter}{n}"))).into_iter().flatten();
    assert_eq!(ids(&items), expected.collect::<Vec<_>>());
    for empty in [gzip(b""), zstd(b"")] {
        assert_eq!(unpack(&empty, "-").0.len(), 0);
    }
}

#[test]
fn a_name_that_promises_an_archive_must_hold_one() {
    for (bytes, name, what) in [
        (lines(1).into_bytes(), "in.gz", "in.gz: the name ends in .gz, but the content is no gzip archive"),
        (gzip(b"x"), "in.zst", "in.zst: the name ends in .zst, but the content is no zstd archive"),
        (vec![], "in.gz", "no gzip archive"),
        (vec![0x1f], "in.gz", "no gzip archive"),
    ] {
        let (items, bad) = unpack(&bytes, name);
        assert!(items.is_empty());
        assert!(bad.as_ref().unwrap().to_string().contains(what), "{}", bad.unwrap());
    }
    // What begins as an archive does and is none is a text.
    let (_, bad) = unpack(b"\x28\xb5\x2f{", "-");
    assert_eq!(bad.unwrap().place, Some((1, 2)));
}

#[test]
fn an_archive_that_is_cut_off_anywhere_is_an_error_that_says_where() {
    let (text, first) = (lines(60), lines(20));
    let joined = [gzip(first.as_bytes()), gzip(&text.as_bytes()[first.len()..])].concat();
    let frames = [zstd(first.as_bytes()), zstd(&text.as_bytes()[first.len()..])].concat();
    for (whole, member, name) in [
        (gzip(text.as_bytes()), usize::MAX, "in.gz"),
        (joined, gzip(first.as_bytes()).len(), "in.gz"),
        (frames, zstd(first.as_bytes()).len(), "in.zst"),
        (ZSTD.concat(), ZSTD[0].len(), "in.zst"),
    ] {
        let mut good_lines = 0;
        // Shorter than what tells the archive it is no archive; after a whole member nobody can tell.
        for cut in (4..whole.len()).filter(|cut| *cut != member) {
            let (items, bad) = unpack(&whole[..cut], name);
            let bad = bad.unwrap_or_else(|| panic!("{name} cut at {cut} of {} passes", whole.len()));
            assert!(bad.problem.contains(&format!("cut off: it ends after {cut} bytes")), "{cut}: {bad}");
            assert_eq!(bad.place, Some((items.len() as u64 + 1, 1)), "{bad}");
            good_lines = good_lines.max(items.len());
        }
        assert!(good_lines > 0, "{name}: what came whole was read");
    }
}

/// Flips a bit: what comes then is an error, or what stood there.
fn damaged(whole: &[u8], name: &str, at: usize, bit: u8) -> Result<(), TestCaseError> {
    let mut bytes = whole.to_vec();
    bytes[at] ^= 1 << bit;
    let (items, bad) = unpack(&bytes, name);
    if bad.is_none() {
        prop_assert_eq!(items, unpack(whole, name).0, "{}: bit {} of byte {}", name, bit, at);
    }
    Ok(())
}

#[test]
fn a_flipped_bit_anywhere_is_an_error_or_changes_nothing() {
    let text = lines(4);
    for (whole, name) in
        [(gzip(text.as_bytes()), "in.gz"), (zstd(text.as_bytes()), "in.zst"), (ZSTD.concat(), "in.zst")]
    {
        for at in 0..whole.len() {
            for bit in 0..8 {
                damaged(&whole, name, at, bit).unwrap();
            }
        }
    }
}

#[test]
fn a_zstd_archive_that_asks_for_too_much_memory_is_refused() {
    // A window of 3.75 TiB.
    let (_, bad) = unpack(b"\x28\xb5\x2f\xfd\x00\xff\x01\x00\x00", "in.zst");
    assert!(bad.unwrap().problem.contains("damaged"));
    // One of 128 MiB, as `zstd --long=27` makes them.
    let (_, bad) = unpack(b"\x28\xb5\x2f\xfd\x00\x88\x01\x00\x00", "in.zst");
    assert!(bad.unwrap().problem.to_lowercase().contains("window"));
}

/// Gives a byte, and says then that there is no more for now: who asks again would wait.
struct Interactive(Vec<u8>);

impl Read for Interactive {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        assert!(!self.0.is_empty(), "it waits for more than it needs");
        buffer[0] = self.0.remove(0);
        Ok(1)
    }
}

#[test]
fn the_first_prompt_of_a_pipe_waits_for_no_more_than_its_line() {
    for text in ["a\n", "(\n", "[a\n"] {
        let source = unpacked(Interactive(text.as_bytes().to_vec()), Path::new("-")).unwrap();
        let item = Items::new(source, "x", prompts()).next_item().unwrap().unwrap();
        assert_eq!(item.custom_id, "line-1");
    }
    let source = unpacked(Interactive(b"[\"a\"".to_vec()), Path::new("-")).unwrap();
    assert_eq!(Items::new(source, "x", prompts()).next_item().unwrap().unwrap().custom_id, "list-1-0");
}

/// One way of reading after another.
fn way(number: usize) -> Reading {
    let reading = match number / 2 {
        0 => Reading::default(),
        1 => Reading { path: Some("/v1/x".parse().unwrap()), ..Reading::default() },
        2 => prompts(),
        _ => Reading { prompts: Some(Prompts::List), ..prompts() },
    };
    if number % 2 == 0 { reading } else { skipping(reading).0 }
}

/// Bytes that are anything, and bytes that are nearly something.
fn inputs() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        &b"\""[..],
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b"\n",
        b"\r",
        b" ",
        b"\\",
        b"\0",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xc3\xa9",
        b"{\"model\":\"m\",\"messages\":[]",
        b",\"metadata\":",
        b"\"metadata\":{\"custom_id\":",
        b"\"custom_id\":\"a\"",
        b",\"params\":{}",
        b"null",
        b"1.5",
        b"\"a\"",
        b"\\u0061",
        b"\\ud800",
        b"{\"input\":[\"a\"],\"model\":\"\"}\n",
        b"\x1f\x8b",
        b"\x28\xb5\x2f\xfd",
        b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
    ]);
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat()),
    ]
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in inputs(), number in 0usize..8, name in prop::sample::select(vec!["-", "in.gz", "in.zst"]), small in 1usize..9) {
        let magic: &[u8] = match name { "in.gz" => b"\x1f\x8b\x08\0\0\0\0\0\0\x03", "in.zst" => b"\x28\xb5\x2f\xfd", _ => b"" };
        let bytes = [magic, &bytes].concat();
        if let Ok(source) = unpacked(Cursor::new(bytes), Path::new(name)) {
            let (_, bad) = told(Items::new(BufReader::with_capacity(small, source), "x", way(number)));
            prop_assert!(bad.is_none_or(|bad| bad.place.is_some_and(|(line, column)| line >= 1 && column >= 1)));
        }
    }

    #[test]
    fn any_prompt_comes_back_out_of_its_body(prompt in "\\PC*") {
        let (items, bad) = read(format!("x\n{prompt}x"), &prompts());
        prop_assert!(bad.is_none());
        prop_assert_eq!(prompt_of(&items[1]), format!("{prompt}x"));
    }

    #[test]
    fn any_lists_come_back_string_by_string(
        lists in prop::collection::vec(prop::collection::vec(any::<String>(), 0..5), 1..4),
        pretty in any::<bool>(),
        small in 1usize..40,
    ) {
        let write = if pretty { serde_json::to_string_pretty } else { serde_json::to_string };
        let text: String = lists.iter().map(|list| write(list).unwrap() + "\n").collect();
        let reading = Reading { prompts: Some(Prompts::List), ..prompts() };
        let (items, bad) = told(Items::new(BufReader::with_capacity(small, Cursor::new(text)), "x", reading));
        prop_assert!(bad.is_none());
        let expected: Vec<_> = lists.iter().enumerate().flat_map(|(l, list)| {
            list.iter().enumerate().map(move |(i, prompt)| (format!("list-{}-{i}", l + 1), prompt.clone()))
        }).collect();
        let found: Vec<_> = items.iter().map(|item| (item[0].clone(), prompt_of(item))).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn taking_metadata_out_changes_nothing_else(
        members in prop::collection::btree_map("[a-z\"\\\\é]{1,4}", any::<i32>(), 0..4),
        at in any::<prop::sample::Index>(),
        metadata in prop_oneof![Just(json!({"custom_id": "i", "a": [1, "}"]})), Just(json!("\",")), Just(Value::Null)],
        blanks in "[ \t\r]{0,2}",
    ) {
        let member = |name: &str, value: &Value| format!("{blanks}{}{blanks}:{blanks}{value}{blanks}", json!(name));
        let mut parts: Vec<_> = members.iter().map(|(name, value)| member(name, &json!(value))).collect();
        parts.push(member("model", &json!("m")));
        parts.push(member("messages", &json!([])));
        let whole: Value = serde_json::from_str(&format!("{{{}}}", parts.join(","))).unwrap();
        parts.insert(at.index(parts.len() + 1), member("metadata", &metadata));
        let items = good(format!("{{{}}}", parts.join(",")), &Reading::default());
        prop_assert_eq!(serde_json::from_str::<Value>(&items[0][2]).unwrap(), whole);
        prop_assert_eq!(serde_json::from_str::<Value>(&items[0][3]).unwrap(), metadata);
    }
}

proptest! {
    // Each reads two large archives.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn damage_to_an_archive_is_an_error_or_changes_nothing(at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let text = lines(300);
        for (whole, name) in [(gzip(text.as_bytes()), "in.gz"), (zstd(text.as_bytes()), "in.zst")] {
            damaged(&whole, name, at.index(whole.len()), bit)?;
        }
    }
}
