//! Prompts as JSON arrays of strings: one array for the whole file, or several, such as one a line.
//!
//! They are read string by string, since one line may hold all of a large file.

use std::io::{self, BufRead};

use super::{MAX_LINE, request::standing};

/// Where in the lists the reader is.
#[derive(Debug, Default)]
enum Within {
    #[default]
    Nothing,
    /// After `[`.
    Start,
    /// After an element.
    Element,
    /// After `,`.
    Comma,
}

/// A reader of lists.
#[derive(Debug)]
pub(super) struct Lists {
    within: Within,
    /// Lists begun.
    list: u64,
    /// Elements of this list.
    elements: u64,
    /// The line and column of what comes next.
    pub(super) line: u64,
    pub(super) column: usize,
}

/// What is found next.
#[derive(Debug, PartialEq)]
pub(super) enum Found {
    /// A string, or another value in its place, as written; with the line and column where it begins.
    Element(u64, usize),
    End,
    /// What is no list of strings, at this line and column. It cannot be told where to go on.
    Broken(u64, usize, String),
}

impl Lists {
    pub(super) fn new() -> Self {
        Lists { within: Within::Nothing, list: 0, elements: 0, line: 1, column: 1 }
    }

    /// The id of the element that was found last: which list, counted from 1, and which of its strings, counted from 0 as an
    /// answer's `index` is.
    pub(super) fn id(&self) -> String {
        format!("list-{}-{}", self.list, self.elements.saturating_sub(1))
    }

    /// Finds the next element and puts it into `buffer`.
    pub(super) fn next(&mut self, source: &mut impl BufRead, buffer: &mut Vec<u8>) -> io::Result<Found> {
        buffer.clear();
        loop {
            let Some(&byte) = source.fill_buf()?.first() else {
                return Ok(match self.within {
                    Within::Nothing => Found::End,
                    _ => Found::Broken(self.line, self.column, "the list ends too early: no `]` closes it".to_owned()),
                });
            };
            self.within = match (&self.within, byte) {
                (_, b'\n') => {
                    source.consume(1);
                    (self.line, self.column) = (self.line + 1, 1);
                    continue;
                }
                (_, b' ' | b'\t' | b'\r') => {
                    source.consume(1);
                    self.column += 1;
                    continue;
                }
                // A byte order mark.
                (Within::Nothing, 0xef | 0xbb | 0xbf) if self.list == 0 && (self.line, self.column) == (1, 1) => {
                    source.consume(1);
                    continue;
                }
                (Within::Nothing, b'[') => {
                    self.list += 1;
                    self.elements = 0;
                    Within::Start
                }
                (Within::Start | Within::Element, b']') => Within::Nothing,
                (Within::Element, b',') => Within::Comma,
                (Within::Start | Within::Comma, byte)
                    if byte == b'"' || byte == b'-' || byte.is_ascii_alphanumeric() =>
                {
                    let place = (self.line, self.column);
                    if !self.element(source, buffer)? {
                        let problem = format!("the string is longer than {} MiB", MAX_LINE >> 20);
                        return Ok(Found::Broken(place.0, place.1, problem));
                    }
                    self.elements += 1;
                    self.within = Within::Element;
                    return Ok(Found::Element(place.0, place.1));
                }
                (within, _) => {
                    let expected = match within {
                        Within::Nothing => "a list of strings",
                        Within::Start => "a string or `]`",
                        Within::Comma => "a string",
                        Within::Element => "`,` or `]`",
                    };
                    let start = source.fill_buf()?;
                    let start = &start[..start.len().min(64)];
                    let start = String::from_utf8_lossy(start.split(|byte| *byte == b'\n').next().unwrap_or(start));
                    let problem = format!("expected {expected}, but here stands {}", standing(&start, 0));
                    return Ok(Found::Broken(self.line, self.column, problem));
                }
            };
            source.consume(1);
            self.column += 1;
        }
    }

    /// Takes a string up to its closing quote, or the end of the line, where no string goes on; another value up to what
    /// separates it from the next. False if it is too long.
    fn element(&mut self, source: &mut impl BufRead, buffer: &mut Vec<u8>) -> io::Result<bool> {
        let mut escaped = false;
        loop {
            let chunk = source.fill_buf()?;
            let string = buffer.first().or(chunk.first()) == Some(&b'"');
            let begun = usize::from(string && buffer.is_empty());
            // Where it ends, and whether with a byte of its own.
            let mut end = None;
            for (i, &byte) in chunk.iter().enumerate().skip(begun) {
                match byte {
                    b'\n' => end = Some((i, 0)),
                    b',' | b']' | b' ' | b'\t' | b'\r' if !string => end = Some((i, 0)),
                    b'"' if string && !escaped => end = Some((i, 1)),
                    _ => escaped = string && byte == b'\\' && !escaped,
                }
                if end.is_some() {
                    break;
                }
            }
            let taken = end.map_or(chunk.len(), |(at, own)| at + own);
            let last = end.is_some() || chunk.is_empty();
            buffer.extend_from_slice(&chunk[..taken]);
            // A byte that goes on with a character is no column of its own.
            self.column += chunk[..taken].iter().filter(|byte| **byte & 0xc0 != 0x80).count();
            source.consume(taken);
            if buffer.len() as u64 > MAX_LINE {
                return Ok(false);
            }
            if last {
                return Ok(true);
            }
        }
    }
}
