//! What is kept of a batch's rows: enough to answer them, not their bodies.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher as _};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::sim::marker::Marker;
use crate::sim::model::{Ask, input_tokens};
use crate::sim::service::item_of;
use crate::sim::wire::{Asked, inputs};

#[derive(Debug)]
pub(super) struct Row {
    pub(super) custom_id: Box<str>,
    pub(super) item: u64,
    max_tokens: Option<u64>,
    body_bytes: u32,
    /// What an embeddings request wants embedded.
    pub(super) inputs: u32,
    model: u32,
    pub(super) marker: Option<Marker>,
}

impl Row {
    pub(super) fn ask(&self, puts_out: bool) -> Ask {
        Ask {
            body_bytes: self.body_bytes as usize,
            max_tokens: self.max_tokens,
            puts_out,
            item: self.item,
            marker: self.marker,
        }
    }

    pub(super) fn input_tokens(&self) -> u64 {
        input_tokens(self.body_bytes as usize)
    }
}

#[derive(Debug, Default)]
pub(super) struct Rows {
    pub(super) rows: Vec<Row>,
    models: Vec<Box<str>>,
    pub(super) input_tokens: u64,
}

impl Rows {
    pub(super) fn model(&self, row: &Row) -> &str {
        &self.models[row.model as usize]
    }

    fn push(&mut self, custom_id: &str, body: &RawValue, embeddings: bool) {
        let body = body.get().as_bytes();
        let asked = Asked::read(body);
        let model = self.models.iter().position(|known| **known == asked.model).unwrap_or_else(|| {
            self.models.push(asked.model.as_ref().into());
            self.models.len() - 1
        });
        let row = Row {
            custom_id: custom_id.into(),
            item: item_of(body),
            max_tokens: asked.max_tokens(),
            // A body never has more than a batch, which has no more than some hundred million bytes.
            body_bytes: body.len() as u32,
            inputs: if embeddings { inputs(body) as u32 } else { 0 },
            model: model as u32,
            marker: asked.marker(),
        };
        self.input_tokens += row.input_tokens();
        self.rows.push(row);
    }
}

/// A `custom_id`, as a number.
pub(super) fn hashed(custom_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(custom_id.as_bytes());
    hasher.finish()
}

/// Reads the body of Anthropic's `create`: the rows, or what is wrong with one of them, for which the whole batch is refused.
pub(super) fn read_requests(body: &[u8], most: usize) -> Result<Rows, String> {
    #[derive(Deserialize)]
    struct Create<'a> {
        #[serde(borrow)]
        requests: Vec<Request<'a>>,
    }
    #[derive(Deserialize)]
    struct Request<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        params: &'a RawValue,
    }
    let create: Create<'_> = serde_json::from_slice(body).map_err(|error| format!("requests: {error}"))?;
    if create.requests.is_empty() {
        return Err("requests: List should have at least 1 item after validation, not 0".into());
    }
    if create.requests.len() > most {
        let found = create.requests.len();
        return Err(format!("requests: List should have at most {most} items after validation, not {found}"));
    }
    let mut seen = HashSet::with_capacity(create.requests.len());
    let mut rows = Rows { rows: Vec::with_capacity(create.requests.len()), ..Rows::default() };
    for (i, request) in create.requests.iter().enumerate() {
        let id = request.custom_id.as_bytes();
        if id.is_empty() || id.len() > 64 || !id.iter().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(b)) {
            return Err(format!("requests.{i}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'"));
        }
        if !request.params.get().starts_with('{') {
            return Err(format!("requests.{i}.params: Input should be a valid dictionary"));
        }
        if !seen.insert(&request.custom_id) {
            return Err(format!("requests.{i}.custom_id: custom_id must be unique within a batch"));
        }
        rows.push(&request.custom_id, request.params, false);
    }
    Ok(rows)
}

/// What is wrong with a line of a file, from line 1 on; or with all of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Problem {
    pub(super) code: &'static str,
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

/// OpenAI's endpoints that have batches.
pub(super) const CHAT: &str = "/v1/chat/completions";
pub(super) const EMBEDDINGS: &str = "/v1/embeddings";

/// The rows as they were handed in; of a file that was uploaded it is judged when a batch is made of it.
#[derive(Debug, Default)]
pub(super) struct Input {
    pub(super) rows: Rows,
    /// What all rows ask for; that of the first.
    pub(super) url: Option<&'static str>,
    pub(super) problems: Vec<Problem>,
}

/// How many problems are told.
const TOLD: usize = 100;

/// Reads OpenAI's input file.
pub(super) fn read_jsonl(file: &[u8]) -> Input {
    #[derive(Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        custom_id: Cow<'a, str>,
        #[serde(borrow)]
        method: Cow<'a, str>,
        #[serde(borrow)]
        url: Cow<'a, str>,
        #[serde(borrow)]
        body: &'a RawValue,
    }
    let mut input = Input::default();
    let mut seen = HashSet::new();
    for (i, line) in file.split(|b| *b == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut wrong = |code, message: String| {
            if input.problems.len() < TOLD {
                input.problems.push(Problem { code, line: Some(i + 1), message });
            }
        };
        let line: Line<'_> = match serde_json::from_slice(line) {
            Ok(line) => line,
            Err(error) => {
                wrong("invalid_json_line", format!("This line is not parseable as a request: {error}"));
                continue;
            }
        };
        let url = [CHAT, EMBEDDINGS].into_iter().find(|known| *known == line.url && line.method == "POST");
        let Some(url) = url else {
            wrong("invalid_request", "This line asks for no endpoint that has batches".into());
            continue;
        };
        if url != *input.url.get_or_insert(url) {
            wrong("url_mismatch", "The URL provided for this line is not that of the first".into());
        } else if !seen.insert(hashed(&line.custom_id)) {
            wrong("duplicate_custom_id", "The custom_id of this line is that of an earlier one".into());
        } else {
            input.rows.push(&line.custom_id, line.body, url == EMBEDDINGS);
        }
    }
    if input.rows.rows.is_empty() && input.problems.is_empty() {
        input.problems.push(Problem { code: "empty_file", line: None, message: "The input file is empty".into() });
    }
    input
}
