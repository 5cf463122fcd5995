//! One line that is a request by itself: of a batch, or a body alone.

use std::borrow::Cow;

use http::uri::PathAndQuery;
use serde::{Deserialize, Deserializer};
use serde_json::{error::Category, value::RawValue};
use tower_quota::org::Dialect;

/// A fault within a line, at a byte.
#[derive(Debug, PartialEq)]
pub(super) struct Fault {
    pub(super) at: usize,
    pub(super) problem: String,
}

pub(super) fn fault<T>(at: usize, problem: impl Into<String>) -> Result<T, Fault> {
    Err(Fault { at, problem: problem.into() })
}

/// How the lines of an input are written. All of them in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// A provider's batch form.
    Batch(Dialect),
    /// A request's body alone.
    Body,
    /// A prompt.
    Text,
    /// Lists of prompts, in JSON.
    List,
}

impl Form {
    /// `this line is …`.
    pub(super) fn words(self) -> String {
        match self {
            Form::Batch(dialect) => format!("in {}'s form", dialect.name()),
            Form::Body => "a request's body alone".to_owned(),
            Form::Text => "a prompt".to_owned(),
            Form::List => "a list of prompts".to_owned(),
        }
    }
}

/// All forms of a request side by side. A member that is `null` counts as absent.
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
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "also_null")]
    metadata: Option<&'a RawValue>,
}

/// What is read of the provider's own request.
#[derive(Deserialize)]
struct Known<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    #[serde(borrow)]
    stream: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Tag<'a> {
    #[serde(borrow)]
    custom_id: Option<&'a RawValue>,
}

fn also_null<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// A line, read in place.
pub(super) struct Parsed<'a> {
    pub(super) custom_id: String,
    /// The byte at which the id stands.
    pub(super) id_at: usize,
    /// The byte at which what tells the form stands.
    pub(super) form_at: usize,
    pub(super) form: Form,
    pub(super) dialect: Dialect,
    pub(super) path: PathAndQuery,
    pub(super) model: String,
    pub(super) body: Cow<'a, str>,
    /// What stands beside the request, is not sent, and comes back with the answer.
    pub(super) metadata: Option<&'a RawValue>,
}

pub(super) fn utf8(bytes: &[u8]) -> Result<&str, Fault> {
    std::str::from_utf8(bytes).or_else(|error| fault(error.valid_up_to(), "not UTF-8"))
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
        let lines_before = error.line().saturating_sub(1);
        let line_at: usize = text.split_inclusive('\n').take(lines_before).map(str::len).sum();
        let mut at = line_at + error.column().saturating_sub(1);
        if problem.starts_with("control character") {
            // It is not always told to the byte.
            at += text.bytes().skip(at).position(|byte| byte < b' ').unwrap_or(0);
        }
        let problem = match error.classify() {
            Category::Syntax => format!("{what} is not valid JSON: {problem}, but here stands {}", standing(text, at)),
            Category::Eof => format!("{what} is not valid JSON: it ends too early ({problem})"),
            _ => format!("{what}: {problem}"),
        };
        Fault { at: start + at, problem }
    })
}

/// What stands at a byte: some characters, in quotes.
pub(super) fn standing(text: &str, at: usize) -> String {
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

/// Where a value stands in the text that it was read from: it borrows from it.
fn place(text: &str, value: &RawValue) -> usize {
    value.get().as_ptr() as usize - text.as_ptr() as usize
}

fn string(text: &str, value: Option<&RawValue>, name: &str) -> Result<(String, usize), Fault> {
    let Some(value) = value else { return fault(0, format!("`{name}` is missing")) };
    let at = place(text, value);
    match serde_json::from_str::<String>(value.get()) {
        Ok(string) => Ok((string, at)),
        Err(_) => fault(at, format!("`{name}` must be a string")),
    }
}

fn id(text: &str, value: Option<&RawValue>, name: &str) -> Result<(String, usize), Fault> {
    let (id, at) = string(text, value, name)?;
    if id.is_empty() {
        return fault(at, format!("`{name}` is empty"));
    }
    Ok((id, at))
}

/// A request's body, looked at.
struct Looked<'a> {
    model: String,
    messages: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
}

/// Looks at a body, which lies within `line`.
fn look<'a>(line: &'a str, body: &'a str, what: &str) -> Result<Looked<'a>, Fault> {
    let start = body.as_ptr() as usize - line.as_ptr() as usize;
    let known: Known<'_> = object(body, start, what)?;
    match known.stream.map(|stream| (stream.get(), stream)) {
        None | Some(("false", _)) => {}
        Some(("true", stream)) => {
            return fault(place(line, stream), "`stream` must not be true: the answer is gathered whole");
        }
        Some((_, stream)) => return fault(place(line, stream), "`stream` must be a boolean"),
    }
    let model = match known.model {
        None => String::new(),
        model => string(line, model, "model")?.0,
    };
    Ok(Looked { model, messages: known.messages, input: known.input })
}

/// A body that says by itself where it goes.
pub(super) struct Whole {
    pub(super) dialect: Dialect,
    pub(super) path: PathAndQuery,
    pub(super) model: String,
}

/// Reads a body that stands alone. `dialect` is what is known of the API, `path` where requests go whatever the body says.
pub(super) fn whole(
    text: &str,
    what: &str,
    dialect: Option<Dialect>,
    path: Option<PathAndQuery>,
) -> Result<Whole, Fault> {
    let Looked { model, messages, input } = look(text, text, what)?;
    let dialect = match dialect {
        Some(dialect) => dialect,
        None if model.to_ascii_lowercase().contains("claude") => Dialect::Anthropic,
        // Other models are many, and so are the servers that speak OpenAI's API.
        None if !model.is_empty() => Dialect::OpenAi,
        None => return fault(0, "no `model` tells which API this is for: say it by --dialect"),
    };
    let path = match (path, dialect, messages, input) {
        (Some(path), ..) => path,
        (None, Dialect::Anthropic, Some(_), _) => PathAndQuery::from_static("/v1/messages"),
        (None, Dialect::Anthropic, None, Some(input)) => {
            return fault(place(text, input), "`input` asks for embeddings, which Anthropic's API does not have");
        }
        (None, _, Some(_), _) => PathAndQuery::from_static("/v1/chat/completions"),
        (None, _, None, Some(_)) => PathAndQuery::from_static("/v1/embeddings"),
        (None, _, None, None) => {
            return fault(0, format!("{what} has neither `messages` nor `input`: say by --path where it goes"));
        }
    };
    Ok(Whole { dialect, path, model })
}

/// Reads line number `number`. `dialect` is what is known of the API, `path` where bodies go that stand alone.
pub(super) fn parse<'a>(
    line: &'a [u8],
    number: u64,
    dialect: Option<Dialect>,
    path: Option<&PathAndQuery>,
) -> Result<Parsed<'a>, Fault> {
    let line = utf8(line)?;
    let members: Members<'_> = object(line, 0, "the line")?;
    let batch = [members.custom_id, members.params, members.method, members.url, members.body];
    if batch.iter().all(Option::is_none) && (members.messages.or(members.input).is_some() || path.is_some()) {
        return alone(line, number, members.metadata, dialect, path);
    }
    if batch.iter().all(Option::is_none) {
        let problem = "neither a line of a batch (with `custom_id`) nor a request's body (with `messages` or `input`)";
        return fault(0, problem);
    }

    let (custom_id, id_at) = id(line, members.custom_id, "custom_id")?;
    let (dialect, form_at, name, body, path) = match (members.params, members.body) {
        (Some(_), Some(body)) => {
            return fault(place(line, body), "both `params` (Anthropic's form) and `body` (OpenAI's form)");
        }
        (None, None) if members.messages.or(members.input).is_some() => {
            let problem = "`custom_id` beside a body that stands alone: there it is `metadata.custom_id`";
            return fault(id_at, problem);
        }
        (None, None) => {
            return fault(0, "neither `params` (Anthropic's form) nor `body` (OpenAI's form)");
        }
        (Some(params), None) => {
            if let Some(other) = members.method.or(members.url) {
                let problem = "`method` and `url` do not go with `params`: they are OpenAI's form";
                return fault(place(line, other), problem);
            }
            let path = PathAndQuery::from_static("/v1/messages");
            (Dialect::Anthropic, place(line, params), "params", params.get(), path)
        }
        (None, Some(body)) => {
            let (method, at) = string(line, members.method, "method")?;
            if method != "POST" {
                return fault(at, "`method` must be POST");
            }
            let (url, at) = string(line, members.url, "url")?;
            if !url.starts_with('/') {
                return fault(at, "`url` must be a path that starts with `/`");
            }
            match PathAndQuery::try_from(url) {
                Ok(path) => (Dialect::OpenAi, place(line, body), "body", body.get(), path),
                Err(error) => return fault(at, format!("`url`: {error}")),
            }
        }
    };
    let model = look(line, body, &format!("`{name}`"))?.model;
    let (form, body) = (Form::Batch(dialect), Cow::Borrowed(body));
    Ok(Parsed { custom_id, id_at, form_at, form, dialect, path, model, body, metadata: None })
}

/// A line that is a body, perhaps with `metadata` of our own.
fn alone<'a>(
    line: &'a str,
    number: u64,
    metadata: Option<&'a RawValue>,
    dialect: Option<Dialect>,
    path: Option<&PathAndQuery>,
) -> Result<Parsed<'a>, Fault> {
    let Whole { dialect, path, model } = whole(line, "the line", dialect, path.cloned())?;
    let given = match metadata.filter(|metadata| metadata.get().starts_with('{')) {
        Some(metadata) => object::<Tag<'_>>(metadata.get(), place(line, metadata), "`metadata`")?.custom_id,
        None => None,
    };
    let (custom_id, id_at) = match given {
        Some(given) => id(line, Some(given), "metadata.custom_id")?,
        None => (numbered(number), 0),
    };
    let body = match metadata {
        Some(metadata) => Cow::Owned(without(line, metadata).trim().to_owned()),
        None => Cow::Borrowed(line.trim()),
    };
    Ok(Parsed { custom_id, id_at, form_at: 0, form: Form::Body, dialect, path, model, body, metadata })
}

/// The id of a line that has none of its own.
pub(super) fn numbered(line: u64) -> String {
    format!("line-{line}")
}

/// The line without this member of its object; all else byte for byte.
fn without(line: &str, member: &RawValue) -> String {
    let mut end = place(line, member) + member.get().len();
    // Back over `"name" :`. The name has no quote in it, however it is written.
    let before = line[..place(line, member)].trim_end().trim_end_matches(':').trim_end();
    let name = before.strip_suffix('"').and_then(|before| before.rfind('"')).unwrap_or(0);
    let mut start = line[..name].trim_end().len();
    if line[..start].ends_with(',') {
        start -= 1;
    } else if let Some(rest) = line[end..].trim_start().strip_prefix(',') {
        end = line.len() - rest.len();
    }
    [&line[..start], &line[end..]].concat()
}
