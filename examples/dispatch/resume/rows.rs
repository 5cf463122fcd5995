//! The output of an earlier run, row by row. Only a line feed ends a row: whatever else stands within a string is part of it.

use std::{
    borrow::Cow,
    io::{BufRead, Read},
};

use serde::Deserialize;

use crate::{ending::Ending, input::BadInput};

/// The longest row that is read: the largest answer, if every byte of it had to be escaped.
const LONGEST: u64 = 2 << 30;

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    custom_id: Cow<'a, str>,
    #[serde(borrow)]
    outcome: Cow<'a, str>,
    /// An earlier version wrote none.
    #[serde(borrow)]
    fingerprint: Option<Cow<'a, str>>,
}

/// One row, as far as it matters here.
#[derive(Debug, PartialEq)]
pub(crate) struct Row<'a> {
    pub(crate) custom_id: Cow<'a, str>,
    pub(crate) ending: Ending,
    pub(crate) fingerprint: Option<u128>,
    /// The byte at which it begins.
    pub(crate) at: u64,
    /// Without the line feed.
    pub(crate) bytes: usize,
}

/// How the file ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Tail {
    #[default]
    Whole,
    /// The last row is whole but for its line feed.
    Unterminated,
    /// What begins at this byte, on this line, was cut short while it was written.
    Torn { at: u64, line: u64 },
}

/// Reads rows.
pub(crate) struct Rows<R> {
    source: R,
    file: String,
    line: u64,
    /// Where the next line begins.
    at: u64,
    buffer: Vec<u8>,
    tail: Tail,
}

impl<R: BufRead> Rows<R> {
    /// Reads `source`, called `file` in errors.
    pub(crate) fn new(source: R, file: &str) -> Self {
        Rows { source, file: file.to_owned(), line: 0, at: 0, buffer: Vec::new(), tail: Tail::Whole }
    }

    /// How the file ends, once all rows were read.
    pub(crate) fn tail(&self) -> Tail {
        self.tail
    }

    /// Reads the next row and hands it to `make`; `None` at the end.
    ///
    /// # Errors
    /// At a row that is none, unless it is the last and lacks its line feed: that is how a row looks that was cut short.
    pub(crate) fn next_with<T>(&mut self, make: impl FnOnce(Row<'_>) -> T) -> Result<Option<T>, BadInput> {
        loop {
            self.buffer.clear();
            self.line += 1;
            let read = self.source.by_ref().take(LONGEST).read_until(b'\n', &mut self.buffer);
            let at = self.at;
            match read {
                Ok(0) => return Ok(None),
                Ok(bytes) => self.at += bytes as u64,
                Err(error) => return Err(self.bad(0, format!("cannot be read: {error}"))),
            }
            let whole = self.buffer.ends_with(b"\n");
            if whole {
                self.buffer.pop();
                if self.buffer.trim_ascii().is_empty() {
                    continue;
                }
            } else if self.buffer.len() as u64 == LONGEST {
                return Err(self.bad(0, format!("the line is longer than {} GiB", LONGEST >> 30)));
            }
            return match (row(&self.buffer, at), whole) {
                (Ok(row), whole) => {
                    self.tail = if whole { Tail::Whole } else { Tail::Unterminated };
                    Ok(Some(make(row)))
                }
                (Err(_), false) => {
                    self.tail = Tail::Torn { at, line: self.line };
                    Ok(None)
                }
                (Err((column, problem)), true) => Err(self.bad(column, problem)),
            };
        }
    }

    fn bad(&self, at: usize, problem: String) -> BadInput {
        let column = String::from_utf8_lossy(&self.buffer[..at.min(self.buffer.len())]).chars().count() + 1;
        let problem = format!(
            "{problem}. Nothing was sent or changed. Mend or delete the line, or begin anew with --fresh, which keeps this file as .old"
        );
        BadInput { file: self.file.clone(), place: Some((self.line, column)), problem }
    }
}

/// Reads one row; an error stands at a byte.
fn row(line: &[u8], at: u64) -> Result<Row<'_>, (usize, String)> {
    let text = std::str::from_utf8(line).map_err(|error| (error.valid_up_to(), "not UTF-8".to_owned()))?;
    // A struct would be read from an array as well.
    if !text.trim_start().starts_with('{') {
        return Err((0, "this is no row of an output: a JSON object must stand here".to_owned()));
    }
    let Fields { custom_id, outcome, fingerprint } = serde_json::from_str(text).map_err(|error| {
        let place = format!(" at line {} column {}", error.line(), error.column());
        let problem = error.to_string();
        let problem = problem.strip_suffix(&place).unwrap_or(&problem);
        (error.column().saturating_sub(1), format!("this is no row of an output: {problem}"))
    })?;
    let fingerprint = match fingerprint {
        None => None,
        Some(hex) if hex.len() == 32 && hex.bytes().all(|byte| byte.is_ascii_hexdigit()) => {
            u128::from_str_radix(&hex, 16).ok()
        }
        Some(_) => {
            let column = text.find("\"fingerprint\"").unwrap_or(0);
            return Err((column, "`fingerprint` must be 32 hexadecimal digits".to_owned()));
        }
    };
    Ok(Row { custom_id, ending: Ending::of(&outcome), fingerprint, at, bytes: line.len() })
}
