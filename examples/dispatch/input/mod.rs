//! The input: one request a line, in the form that the providers' batch APIs take.
//!
//! - Anthropic: `{"custom_id": "a", "params": {…}}`, posted to `/v1/messages`.
//! - OpenAI: `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}`.
//!
//! The body is sent as it was written, byte for byte. Blank lines, CRLF and a byte order mark are tolerated. Fields that are
//! not known are ignored. Every fault is named with its line and column; both count from 1, the column in characters.

pub(crate) mod survey;

use std::{
    fmt,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use bytes::Bytes;
use http::uri::PathAndQuery;
use serde::Deserialize;
use serde_json::{error::Category, value::RawValue};
use tower_quota::org::{Dialect, Family};

/// The longest line that is read.
pub(crate) const MAX_LINE: u64 = 64 << 20;

/// One request.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) custom_id: String,
    pub(crate) path: PathAndQuery,
    pub(crate) family: Family,
    pub(crate) body: Bytes,
}

/// Why the input is refused, and where.
#[derive(Clone, Debug)]
pub(crate) struct BadInput {
    pub(crate) file: String,
    /// The line and the column; `None` where the file as a whole is meant.
    pub(crate) place: Option<(u64, usize)>,
    pub(crate) problem: String,
}

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Some((line, column)) => write!(f, "{}: line {line}, column {column}: {}", self.file, self.problem),
            None => write!(f, "{}: {}", self.file, self.problem),
        }
    }
}

/// A fault within a line, at a byte.
#[derive(Debug, PartialEq)]
struct Fault {
    at: usize,
    problem: String,
}

fn fault<T>(at: usize, problem: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { at, problem: problem.into() })
}

/// The two forms side by side. A member that is `null` counts as absent.
#[derive(Deserialize)]
struct Members<'a> {
    #[serde(borrow)]
    custom_id: Option<&'a RawValue>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(borrow)]
    url: Option<&'a RawValue>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

/// What is read of the provider's own request.
#[derive(Deserialize)]
struct Known<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
}

/// A line, read in place.
struct Parsed<'a> {
    custom_id: String,
    /// The byte at which the id stands.
    id_at: usize,
    /// The byte at which what tells the form stands.
    form_at: usize,
    form: Dialect,
    path: PathAndQuery,
    model: String,
    body: &'a str,
}

/// Reads one object; `text` lies within the line, at byte `start`.
fn object<'a, T: Deserialize<'a>>(text: &'a str, start: usize, what: &str) -> Result<T, Fault> {
    // A struct would be read from an array as well.
    let blank = text.len() - text.trim_start().len();
    if !text[blank..].starts_with('{') {
        return fault(start + blank, format!("{what} must be a JSON object"));
    }
    serde_json::from_str(text).map_err(|error| {
        // Where it is has a place of its own.
        let place = format!(" at line {} column {}", error.line(), error.column());
        let problem = error.to_string();
        let problem = problem.strip_suffix(&place).unwrap_or(&problem);
        let at = error.column().saturating_sub(1);
        let problem = match error.classify() {
            Category::Syntax => format!("{what} is not valid JSON: {problem}, but here stands {}", standing(text, at)),
            Category::Eof => format!("{what} is not valid JSON: it ends too early ({problem})"),
            _ => format!("{what}: {problem}"),
        };
        Fault { at: start + at, problem }
    })
}

/// What stands at a byte: some characters, in quotes.
fn standing(text: &str, at: usize) -> String {
    let mut from = at.min(text.len());
    while !text.is_char_boundary(from) {
        from -= 1;
    }
    let rest = &text[from..];
    let shown: String = rest.chars().take(16).collect();
    let more = if shown.len() < rest.len() { "…" } else { "" };
    // A terminal may do what such a character says.
    format!("`{}{more}`", shown.replace(char::is_control, "\u{fffd}"))
}

fn parse(line: &[u8]) -> Result<Parsed<'_>, Fault> {
    let line = match std::str::from_utf8(line) {
        Ok(line) => line,
        Err(error) => return fault(error.valid_up_to(), "not UTF-8"),
    };
    // A raw value borrows from the line, so its place is the distance between the two.
    let place = |value: &RawValue| value.get().as_ptr() as usize - line.as_ptr() as usize;
    let string = |value: Option<&'_ RawValue>, name: &str| -> Result<(String, usize), Fault> {
        let Some(value) = value else { return fault(0, format!("`{name}` is missing")) };
        match serde_json::from_str::<String>(value.get()) {
            Ok(text) => Ok((text, place(value))),
            Err(_) => fault(place(value), format!("`{name}` must be a string")),
        }
    };

    let members: Members<'_> = object(line, 0, "the line")?;
    let (custom_id, id_at) = string(members.custom_id, "custom_id")?;
    if custom_id.is_empty() {
        return fault(id_at, "`custom_id` is empty");
    }
    let (form, form_at, name, raw, path) = match (members.params, members.body) {
        (Some(_), Some(body)) => {
            return fault(place(body), "both `params` (Anthropic's form) and `body` (OpenAI's form)");
        }
        (None, None) => {
            return fault(0, "neither `params` (Anthropic's form) nor `body` (OpenAI's form)");
        }
        (Some(params), None) => {
            if let Some(other) = members.method.or(members.url) {
                return fault(place(other), "`method` and `url` do not go with `params`: they are OpenAI's form");
            }
            let path = PathAndQuery::from_static("/v1/messages");
            (Dialect::Anthropic, place(params), "params", params, path)
        }
        (None, Some(body)) => {
            let (method, at) = string(members.method, "method")?;
            if method != "POST" {
                return fault(at, "`method` must be POST");
            }
            let (url, at) = string(members.url, "url")?;
            if !url.starts_with('/') {
                return fault(at, "`url` must be a path that starts with `/`");
            }
            match PathAndQuery::try_from(url) {
                Ok(path) => (Dialect::OpenAi, place(body), "body", body, path),
                Err(error) => return fault(at, format!("`url`: {error}")),
            }
        }
    };

    let known: Known<'_> = object(raw.get(), place(raw), &format!("`{name}`"))?;
    match known.stream.map(|stream| (stream.get(), stream)) {
        None | Some(("false", _)) => {}
        Some(("true", stream)) => {
            return fault(place(stream), "`stream` must not be true: the answer is gathered whole");
        }
        Some((_, stream)) => return fault(place(stream), "`stream` must be a boolean"),
    }
    let model = match known.model {
        None => String::new(),
        model => string(model, "model")?.0,
    };
    Ok(Parsed { custom_id, id_at, form_at, form, path, model, body: raw.get() })
}

/// A source of items: a file, or a stream that can be read only once.
pub(crate) struct Items<R> {
    source: R,
    file: String,
    line: u64,
    buffer: Vec<u8>,
    /// The form that every line must have, and the line that said so (0: the orgs).
    form: Option<(Dialect, u64)>,
}

impl<R: BufRead> Items<R> {
    /// Reads `source`, called `file` in errors. `form` is what the orgs speak; without it the first line decides.
    pub(crate) fn new(source: R, file: &str, form: Option<Dialect>) -> Self {
        let form = form.map(|form| (form, 0));
        Items { source, file: file.to_owned(), line: 0, buffer: Vec::new(), form }
    }

    /// The form of the lines, once one has been read.
    pub(crate) fn form(&self) -> Option<Dialect> {
        self.form.map(|(form, _)| form)
    }

    fn bad(&self, at: usize, problem: String) -> BadInput {
        let text = text(&self.buffer, self.line);
        let column = String::from_utf8_lossy(&text[..at.min(text.len())]).chars().count() + 1;
        BadInput { file: self.file.clone(), place: Some((self.line, column)), problem }
    }

    /// Reads up to the next line that is not blank; false at the end.
    fn read_line(&mut self) -> Result<bool, BadInput> {
        loop {
            self.buffer.clear();
            self.line += 1;
            let read = (&mut self.source).take(MAX_LINE + 1).read_until(b'\n', &mut self.buffer);
            if let Err(error) = read {
                return Err(self.bad(0, format!("cannot be read: {error}")));
            }
            if self.buffer.is_empty() {
                return Ok(false);
            }
            if self.buffer.ends_with(b"\n") {
                self.buffer.pop();
            }
            if self.buffer.len() as u64 > MAX_LINE {
                let place = Some((self.line, MAX_LINE as usize + 1));
                let problem = format!("the line is longer than {} MiB", MAX_LINE >> 20);
                return Err(BadInput { file: self.file.clone(), place, problem });
            }
            if !text(&self.buffer, self.line).trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    /// Reads the next line and hands what it says to `make`; `None` at the end.
    fn next_with<T>(&mut self, make: impl FnOnce(u64, Parsed<'_>) -> T) -> Result<Option<T>, BadInput> {
        if !self.read_line()? {
            return Ok(None);
        }
        let parsed = match parse(text(&self.buffer, self.line)) {
            Ok(parsed) => parsed,
            Err(Fault { at, problem }) => return Err(self.bad(at, problem)),
        };
        let form = match self.form {
            Some((form, by)) if form != parsed.form => {
                let said = match by {
                    0 => format!("the orgs speak {}", form.name()),
                    line => format!("line {line} is in {}'s", form.name()),
                };
                let problem =
                    format!("this line is in {}'s form, but {said}: a pool holds one provider", parsed.form.name());
                return Err(self.bad(parsed.form_at, problem));
            }
            Some(known) => known,
            None => (parsed.form, self.line),
        };
        let made = make(self.line, parsed);
        self.form = Some(form);
        Ok(Some(made))
    }

    /// The next item; `None` at the end.
    ///
    /// # Errors
    /// At the first line that cannot be sent. What is read after an error is not to be trusted.
    pub(crate) fn next_item(&mut self) -> Result<Option<Item>, BadInput> {
        self.next_with(|_, parsed| Item::from(parsed))
    }
}

impl From<Parsed<'_>> for Item {
    fn from(parsed: Parsed<'_>) -> Self {
        Item {
            custom_id: parsed.custom_id,
            path: parsed.path,
            family: Family::of_model(&parsed.model),
            body: Bytes::copy_from_slice(parsed.body.as_bytes()),
        }
    }
}

/// A line without a byte order mark.
fn text(buffer: &[u8], line: u64) -> &[u8] {
    match line {
        1 => buffer.strip_prefix(b"\xef\xbb\xbf").unwrap_or(buffer),
        _ => buffer,
    }
}

/// Opens a file for [`Items`].
pub(crate) fn open(path: &Path, form: Option<Dialect>) -> Result<Items<BufReader<File>>, BadInput> {
    let name = path.display().to_string();
    match File::open(path) {
        Ok(file) => Ok(Items::new(BufReader::with_capacity(1 << 16, file), &name, form)),
        Err(error) => Err(BadInput { file: name, place: None, problem: error.to_string() }),
    }
}
