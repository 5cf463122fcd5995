//! The input: requests, or prompts for one request, in the forms in which people have them.
//!
//! One request a line:
//! - Anthropic's batch form: `{"custom_id": "a", "params": {…}}`, posted to `/v1/messages`.
//! - OpenAI's batch form: `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}`.
//! - A request's body alone, perhaps with `metadata`: `{"model": "…", "messages": […], "metadata": {"row": 7}}`. It goes to
//!   `/v1/messages` or `/v1/chat/completions`, with `input` instead of `messages` to `/v1/embeddings`, or where `--path` says.
//!   `metadata` is not sent: it comes back with the answer.
//!
//! Or prompts, put into a request by `--template`:
//! - Plain text, one prompt a line.
//! - JSON arrays of strings: one for the whole file, or one a line. Each string is a request of its own, so that one that is
//!   refused costs no other.
//!
//! The first line says which form it is, and all lines must have that one. A body and a prompt have no id, so they get one:
//! `line-N`, by the line's number, blank lines counted; `list-L-I`, by the list's number and the string's index, from 0. Such
//! ids stay what they are while lines are changed in place or added at the end; a line that is put in or taken out shifts all
//! that follow. Where that matters, `metadata.custom_id` is a body's id.
//!
//! A body is sent as it was written, byte for byte. Blank lines, CRLF and a byte order mark are tolerated. Fields that are
//! not known are ignored. Every fault is named with its line and column; both count from 1, the column in characters.

mod archive;
mod list;
mod request;
pub(crate) mod survey;
mod template;

use std::{
    borrow::Cow,
    fmt,
    fs::File,
    io::{self, BufRead, Chain, Cursor, Read},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use http::uri::PathAndQuery;
use serde_json::value::RawValue;
use tower_quota::org::{Dialect, Family};

pub(crate) use self::{archive::unpacked, template::Template};
use self::{
    list::{Found, Lists},
    request::{Fault, Form, Parsed, fault, numbered, utf8},
};

/// The longest line that is read.
pub(crate) const MAX_LINE: u64 = 64 << 20;
/// How many bad lines are named, where they are skipped.
const NAMED: u64 = 10;

/// One request.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) custom_id: String,
    pub(crate) path: PathAndQuery,
    pub(crate) family: Family,
    pub(crate) body: Bytes,
    /// What comes back with the answer.
    pub(crate) metadata: Option<Box<RawValue>>,
    /// The row of an earlier run that its own is to replace at the end.
    pub(crate) replaces: Option<u64>,
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

/// How an input is to be read.
#[derive(Clone, Default)]
pub(crate) struct Reading {
    /// What the orgs speak; without it the first line, or the template, decides.
    pub(crate) dialect: Option<Dialect>,
    /// Where bodies go that stand alone, whatever they say.
    pub(crate) path: Option<PathAndQuery>,
    /// With it, the input is prompts.
    pub(crate) template: Option<Arc<Template>>,
    /// How prompts are written; without it the first line decides.
    pub(crate) prompts: Option<Prompts>,
    /// Where bad lines are counted; without it the first one ends the reading.
    pub(crate) skips: Option<Arc<Skips>>,
}

/// How prompts are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prompts {
    Text,
    List,
}

/// Counts the bad lines of an input, and names the first of them.
pub(crate) struct Skips {
    say: Box<dyn Fn(&str) + Send + Sync>,
    /// How many, and the place of the last one.
    seen: Mutex<(u64, (u64, usize))>,
}

impl Skips {
    /// Names bad lines by `say`.
    pub(crate) fn new(say: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Skips { say: Box::new(say), seen: Mutex::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// A file is read more than once: what was counted is not counted again.
    fn add(&self, bad: &BadInput) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, last) = &mut *seen;
        let place = bad.place.unwrap_or_default();
        if place <= *last {
            return;
        }
        (*count, *last) = (*count + 1, place);
        if *count <= NAMED {
            (self.say)(&format!("skipped: {bad}"));
        }
        if *count == NAMED {
            (self.say)("skipped: any more bad lines are only counted");
        }
    }
}

/// What is wrong with an input.
enum Trouble {
    /// With one line: others may be good.
    Line(BadInput),
    /// With all of it.
    Whole(BadInput),
}

/// A source of items: a file, or a stream that can be read only once.
pub(crate) struct Items<R> {
    /// What was read ahead to know the form, and the rest.
    source: Chain<Cursor<Vec<u8>>, R>,
    file: String,
    reading: Reading,
    line: u64,
    buffer: Vec<u8>,
    /// Where the buffer begins in its line.
    column: usize,
    /// What every line must speak, and the line that said so (0: the orgs or the template).
    dialect: Option<(Dialect, u64)>,
    /// The form that every line must have, and the line that said so (0: the command line).
    form: Option<(Form, u64)>,
    lists: Option<Lists>,
}

impl<R: BufRead> Items<R> {
    /// Reads `source`, called `file` in errors.
    pub(crate) fn new(source: R, file: &str, reading: Reading) -> Self {
        let dialect = reading.template.as_ref().map(|template| template.dialect).or(reading.dialect);
        Items {
            source: Cursor::new(Vec::new()).chain(source),
            file: file.to_owned(),
            reading,
            line: 0,
            buffer: Vec::new(),
            column: 1,
            dialect: dialect.map(|dialect| (dialect, 0)),
            form: None,
            lists: None,
        }
    }

    /// The API that the lines are for, once one has been read.
    pub(crate) fn dialect(&self) -> Option<Dialect> {
        self.dialect.map(|(dialect, _)| dialect)
    }

    fn bad(&self, at: usize, problem: String) -> BadInput {
        let text = text(&self.buffer, self.line);
        let column = String::from_utf8_lossy(&text[..at.min(text.len())]).chars().count() + self.column;
        BadInput { file: self.file.clone(), place: Some((self.line, column)), problem }
    }

    fn unreadable(&self, error: &io::Error) -> Trouble {
        // Before the first line, while its form is looked for, none has been counted.
        let place = Some((self.line.max(1), 1));
        Trouble::Whole(BadInput { file: self.file.clone(), place, problem: format!("cannot be read: {error}") })
    }

    /// Reads up to the next line that is not blank; false at the end.
    fn read_line(&mut self) -> Result<bool, Trouble> {
        loop {
            self.buffer.clear();
            self.line += 1;
            let read = (&mut self.source).take(MAX_LINE + 1).read_until(b'\n', &mut self.buffer);
            if let Err(error) = read {
                return Err(self.unreadable(&error));
            }
            if self.buffer.is_empty() {
                return Ok(false);
            }
            let whole = self.buffer.ends_with(b"\n");
            if whole {
                self.buffer.pop();
            }
            if self.buffer.len() as u64 > MAX_LINE {
                if !whole && self.reading.skips.is_some() {
                    self.skip_line().map_err(|error| self.unreadable(&error))?;
                }
                let place = Some((self.line, MAX_LINE as usize + 1));
                let problem = format!("the line is longer than {} MiB", MAX_LINE >> 20);
                return Err(Trouble::Line(BadInput { file: self.file.clone(), place, problem }));
            }
            if !text(&self.buffer, self.line).trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    /// Reads on to the end of the line, without keeping any of it.
    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let chunk = self.source.fill_buf()?;
            let end = chunk.iter().position(|byte| *byte == b'\n');
            let (taken, last) = (end.map_or(chunk.len(), |end| end + 1), end.is_some() || chunk.is_empty());
            self.source.consume(taken);
            if last {
                return Ok(());
            }
        }
    }

    /// Looks how prompts are written: a list begins with `[` and a string, or has `[` on a line of its own.
    fn look_ahead(&mut self) -> io::Result<Prompts> {
        let (ahead, source) = self.source.get_mut();
        let mut next = || -> io::Result<Option<u8>> {
            let Some(&byte) = source.fill_buf()?.first() else { return Ok(None) };
            source.consume(1);
            ahead.get_mut().push(byte);
            Ok(Some(byte))
        };
        let mut opened = false;
        // More blanks than this before the first prompt are no list.
        for _ in 0..1 << 16 {
            match (next()?, opened) {
                (Some(b' ' | b'\t' | b'\r'), _) | (Some(b'\n' | 0xef | 0xbb | 0xbf), false) => {}
                (Some(b'['), false) => opened = true,
                (Some(b'"' | b']' | b'\n') | None, true) => return Ok(Prompts::List),
                _ => break,
            }
        }
        Ok(Prompts::Text)
    }

    /// What is to be done before the first prompt.
    fn begin(&mut self) -> Result<(), Trouble> {
        if self.reading.template.is_none() || self.form.is_some() {
            return Ok(());
        }
        let prompts = match self.reading.prompts {
            Some(prompts) => prompts,
            None => self.look_ahead().map_err(|error| self.unreadable(&error))?,
        };
        let form = match prompts {
            Prompts::Text => Form::Text,
            Prompts::List => {
                self.lists = Some(Lists::new());
                Form::List
            }
        };
        self.form = Some((form, 0));
        Ok(())
    }

    /// Reads the next line, or the next string of a list; false at the end.
    fn read(&mut self) -> Result<bool, Trouble> {
        self.begin()?;
        let Some(lists) = &mut self.lists else { return self.read_line() };
        let found = lists.next(&mut self.source, &mut self.buffer);
        self.line = lists.line;
        match found {
            Ok(Found::End) => Ok(false),
            Ok(Found::Element(line, column)) => {
                (self.line, self.column) = (line, column);
                Ok(true)
            }
            Ok(Found::Broken(line, column, problem)) => {
                Err(Trouble::Whole(BadInput { file: self.file.clone(), place: Some((line, column)), problem }))
            }
            Err(error) => Err(self.unreadable(&error)),
        }
    }

    /// The first prompt must not look like a request: then it is the wrong file, or a template too much.
    fn must_be_a_prompt(&self) -> Result<(), Trouble> {
        let untold = self.reading.template.is_some() && self.reading.prompts.is_none() && self.lists.is_none();
        let line = text(&self.buffer, self.line).trim_ascii();
        if !untold || !line.starts_with(b"{") || serde_json::from_slice::<&RawValue>(line).is_err() {
            return Ok(());
        }
        let problem = "with --template a line is a prompt, but this one is a JSON object: leave --template out if it is a \
                       request by itself; if it is a prompt, say --form text";
        Err(Trouble::Whole(self.bad(0, problem.to_owned())))
    }

    /// Reads the next line and hands what it says to what is in `make`; `None` at the end.
    fn try_next<T, F: FnOnce(u64, Parsed<'_>) -> T>(&mut self, make: &mut Option<F>) -> Result<Option<T>, Trouble> {
        let first = self.form.is_none();
        if !self.read()? {
            return Ok(None);
        }
        if first {
            self.must_be_a_prompt()?;
        }
        let parsed = match parse(&self.buffer, self.line, self.lists.as_ref(), &self.reading, self.dialect()) {
            Ok(parsed) => parsed,
            Err(Fault { at, problem }) => return Err(Trouble::Line(self.bad(at, problem))),
        };
        if let Some(problem) = odd(&parsed, self.form, self.dialect) {
            return Err(Trouble::Whole(self.bad(parsed.form_at, problem)));
        }
        self.form.get_or_insert((parsed.form, self.line));
        self.dialect.get_or_insert((parsed.dialect, self.line));
        Ok(make.take().map(|make| make(self.line, parsed)))
    }

    /// Reads the next line and hands what it says to `make`; `None` at the end.
    fn next_with<T>(&mut self, make: impl FnOnce(u64, Parsed<'_>) -> T) -> Result<Option<T>, BadInput> {
        let mut make = Some(make);
        loop {
            match (self.try_next(&mut make), &self.reading.skips) {
                (Ok(made), _) => return Ok(made),
                (Err(Trouble::Line(bad)), Some(skips)) => skips.add(&bad),
                (Err(Trouble::Line(bad) | Trouble::Whole(bad)), _) => return Err(bad),
            }
        }
    }

    /// The next item; `None` at the end.
    ///
    /// # Errors
    /// At the first line that cannot be sent, unless such lines are skipped; and, in any case, where the input cannot be
    /// read on, and where a line has another form or API than those before it. What is read after
    /// an error is not to be trusted.
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
            body: Bytes::from(parsed.body.into_owned()),
            metadata: parsed.metadata.map(ToOwned::to_owned),
            replaces: None,
        }
    }
}

/// Reads what the buffer holds.
fn parse<'a>(
    buffer: &'a [u8],
    number: u64,
    lists: Option<&Lists>,
    reading: &Reading,
    dialect: Option<Dialect>,
) -> Result<Parsed<'a>, Fault> {
    let line = text(buffer, number);
    let Some(template) = &reading.template else {
        return request::parse(line, number, dialect, reading.path.as_ref()).map_err(|Fault { at, mut problem }| {
            if !line.trim_ascii_start().starts_with(b"{") {
                problem.push_str(" (prompts, as plain text or in lists, need --template)");
            }
            Fault { at, problem }
        });
    };
    let (form, custom_id, prompt) = match lists {
        Some(lists) => (Form::List, lists.id(), listed(buffer)?),
        None => (Form::Text, numbered(number), Cow::Borrowed(plain(line)?)),
    };
    let Template { dialect, path, model, .. } = &**template;
    let (dialect, path, model) = (*dialect, path.clone(), model.clone());
    let body = Cow::Owned(template.fill(&prompt));
    Ok(Parsed { custom_id, id_at: 0, form_at: 0, form, dialect, path, model, body, metadata: None })
}

/// Why a line that is good by itself does not go with the others.
fn odd(parsed: &Parsed<'_>, form: Option<(Form, u64)>, dialect: Option<(Dialect, u64)>) -> Option<String> {
    let this = parsed.form.words();
    match (form, dialect) {
        (Some((form, by)), _) if form != parsed.form => {
            let both = matches!((form, parsed.form), (Form::Batch(_), Form::Batch(_)));
            let why = if both { "a pool holds one provider" } else { "an input has one form" };
            Some(format!("this line is {this}, but line {by} is {}: {why}", form.words()))
        }
        (_, Some((dialect, _))) if dialect != parsed.dialect => {
            Some(format!("this line is {this}, but the orgs speak {}: a pool holds one provider", dialect.name()))
        }
        _ => None,
    }
}

/// A line without a byte order mark.
fn text(buffer: &[u8], line: u64) -> &[u8] {
    match line {
        1 => buffer.strip_prefix(b"\xef\xbb\xbf").unwrap_or(buffer),
        _ => buffer,
    }
}

/// A prompt that is a line.
fn plain(line: &[u8]) -> Result<&str, Fault> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    match line.iter().position(|byte| *byte == 0) {
        Some(at) => fault(at, "a NUL byte: this is no plain text in UTF-8"),
        None => utf8(line),
    }
}

/// A prompt that is a string in a list.
fn listed(element: &[u8]) -> Result<Cow<'_, str>, Fault> {
    let element = utf8(element)?;
    if !element.starts_with('"') {
        return fault(0, format!("a list holds strings, but here stands {}", request::standing(element, 0)));
    }
    serde_json::from_str(element).map(Cow::Owned).or_else(|error| {
        let place = format!(" at line {} column {}", error.line(), error.column());
        let problem = error.to_string();
        let problem = problem.strip_suffix(&place).unwrap_or(&problem);
        fault(error.column().saturating_sub(1), format!("the string is not valid JSON: {problem}"))
    })
}

/// Opens a file for [`Items`].
pub(crate) fn open(path: &Path, reading: &Reading) -> Result<Items<Box<dyn BufRead + Send>>, BadInput> {
    let name = path.display().to_string();
    match File::open(path).and_then(|file| unpacked(file, path)) {
        Ok(source) => Ok(Items::new(source, &name, reading.clone())),
        Err(error) => Err(BadInput { file: name, place: None, problem: error.to_string() }),
    }
}
