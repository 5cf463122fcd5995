//! The output: one JSON line per id, in the order in which answers come.
//!
//! A thread of its own writes, always whole lines, and whatever has piled up at once; so lines appear as they come and the
//! run never waits for a disk. The queue before it is bounded: a reader that is slower than the provider slows the run.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
};

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, value::RawValue};
use tokio::sync::mpsc;
use tower_quota::org::Orgs;

use crate::{claim::CHUNK, tally::Seen};

/// How many lines may wait to be written.
const QUEUE: usize = 256;

/// What became of one id.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// One word: `ok`, `rate_limited`, `transient`, `terminal`, …
    pub(crate) outcome: &'static str,
    /// The body, where a whole answer came.
    pub(crate) body: Option<Bytes>,
    /// Why it is not `ok`.
    pub(crate) error: Option<String>,
    /// Whether it comes out of the journal: nothing was sent.
    pub(crate) restored: bool,
}

impl Verdict {
    /// There is no answer.
    pub(crate) fn without_answer(outcome: &'static str, error: impl Into<String>) -> Self {
        Verdict { outcome, body: None, error: Some(error.into()), restored: false }
    }
}

#[derive(Serialize)]
struct Fields<'a> {
    custom_id: &'a str,
    /// What was asked, so that the next run sees whether it has changed.
    fingerprint: &'a str,
    outcome: &'a str,
    /// The org that was called last.
    org: Option<&'a str>,
    /// Calls made over the wire for it alone.
    attempts: u32,
    /// The batch that has answered it, if one has.
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<&'a str>,
    /// The status of the last call, if it was answered.
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Box<RawValue>>,
    /// What stood beside the request in the input.
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Box<RawValue>>,
}

/// Takes keys out of what providers echo.
#[derive(Clone, Default)]
pub(crate) struct Scrubber(Vec<String>);

impl Scrubber {
    /// The keys of these orgs.
    pub(crate) fn of(orgs: &Orgs) -> Self {
        Scrubber::new(orgs.iter().filter_map(|org| org.key()).map(|key| key.reveal()))
    }

    /// Keys shorter than eight characters are no secret, and might be a word of the answer.
    pub(crate) fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Scrubber(keys.into_iter().filter(|key| key.len() >= 8).map(str::to_owned).collect())
    }

    /// Whether a key stands in this body, also written with the escapes of JSON.
    pub(crate) fn finds(&self, body: &[u8]) -> bool {
        let text = String::from_utf8_lossy(body);
        self.0.iter().any(|key| text.contains(key.as_str())) || self.unescaped(&text).is_some()
    }

    /// The JSON without keys, where one stands in it in such a way that its text does not show it.
    fn unescaped(&self, text: &str) -> Option<String> {
        if self.0.is_empty() || !(text.contains("\\/") || text.contains("\\u")) {
            return None;
        }
        let mut value: Value = serde_json::from_str(text).ok()?;
        self.scrub_within(&mut value).then(|| value.to_string())
    }

    fn scrub_within(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => {
                let clean = self.scrub(text.clone());
                let found = clean != *text;
                *text = clean;
                found
            }
            Value::Array(items) => items.iter_mut().fold(false, |found, item| self.scrub_within(item) | found),
            Value::Object(members) => members.values_mut().fold(false, |found, item| self.scrub_within(item) | found),
            _ => false,
        }
    }

    pub(crate) fn scrub(&self, mut text: String) -> String {
        for key in &self.0 {
            if text.contains(key.as_str()) {
                text = text.replace(key.as_str(), "***");
            }
        }
        text
    }
}

/// The line of an id, with its line feed.
pub(crate) fn line(
    custom_id: &str,
    fingerprint: u128,
    metadata: Option<&RawValue>,
    verdict: &Verdict,
    seen: &Seen,
    scrubber: &Scrubber,
) -> Line {
    let fields = Fields {
        custom_id,
        fingerprint: &format!("{fingerprint:032x}"),
        outcome: verdict.outcome,
        org: seen.org.as_deref(),
        attempts: seen.calls,
        batch: seen.batch.as_deref(),
        status: seen.status,
        error: verdict.error.as_deref(),
        response: verdict.body.as_ref().map(|body| json(body, scrubber)),
        metadata: metadata.map(|metadata| json(metadata.get().as_bytes(), scrubber)),
    };
    let mut text = serde_json::to_vec(&fields).expect("strings, numbers and valid JSON serialise");
    text.push(b'\n');
    Line { outcome: verdict.outcome, text }
}

/// The body as JSON on one line, as it came; what is no JSON becomes a string.
fn json(body: &[u8], scrubber: &Scrubber) -> Box<RawValue> {
    let text = String::from_utf8_lossy(body);
    // In JSON a line feed can stand only between values: inside a string it is written `\n`.
    let value = match serde_json::from_str::<&RawValue>(&text) {
        Ok(value) => {
            let value = scrubber.scrub(value.get().replace(['\n', '\r'], " "));
            scrubber.unescaped(&value).unwrap_or(value)
        }
        Err(_) => return string(&scrubber.scrub(text.into_owned())),
    };
    serde_json::from_str(&value).unwrap_or_else(|_| string(&value))
}

fn string(text: &str) -> Box<RawValue> {
    serde_json::value::to_raw_value(text).expect("a string serialises")
}

/// A line that is to be written.
pub(crate) struct Line {
    pub(crate) outcome: &'static str,
    pub(crate) text: Vec<u8>,
}

/// Where lines go.
pub(crate) struct Output {
    queue: mpsc::Sender<Line>,
    thread: JoinHandle<Written>,
    writing: Arc<Mutex<()>>,
}

/// What the writer says at the end.
#[derive(Debug)]
pub(crate) struct Written {
    /// Lines written, by outcome.
    pub(crate) outcomes: BTreeMap<&'static str, u64>,
    pub(crate) result: io::Result<()>,
}

impl Output {
    /// Starts the thread that writes to `sink`. What a `file` has taken is on the disk when the output is closed.
    pub(crate) fn start(mut sink: Box<dyn Write + Send>, file: Option<Arc<File>>) -> io::Result<Self> {
        let (queue, lines) = mpsc::channel(QUEUE);
        let writing = Arc::new(Mutex::new(()));
        let lock = writing.clone();
        let write = move || {
            let mut outcomes = BTreeMap::new();
            let result = write_all(&mut sink, lines, &mut outcomes, &lock);
            let result = result.and_then(|()| file.map_or(Ok(()), |file| file.sync_data()));
            Written { outcomes, result }
        };
        let thread = std::thread::Builder::new().name("output".to_owned()).spawn(write)?;
        Ok(Output { queue, thread, writing })
    }

    /// Where lines are handed in. It is closed when the output cannot be written any more.
    pub(crate) fn queue(&self) -> &mpsc::Sender<Line> {
        &self.queue
    }

    /// Held while lines are being written: whoever holds it may end the process without cutting one in two.
    pub(crate) fn lock(&self) -> Arc<Mutex<()>> {
        self.writing.clone()
    }

    /// Waits until everything is written.
    pub(crate) async fn close(self) -> Written {
        drop(self.queue);
        let thread = self.thread;
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(written)) => written,
            _ => Written { outcomes: BTreeMap::new(), result: Err(io::Error::other("the writer panicked")) },
        }
    }
}

fn write_all(
    sink: &mut dyn Write,
    mut lines: mpsc::Receiver<Line>,
    outcomes: &mut BTreeMap<&'static str, u64>,
    lock: &Mutex<()>,
) -> io::Result<()> {
    let mut chunk = Vec::with_capacity(CHUNK);
    let mut written = Vec::new();
    while let Some(line) = lines.blocking_recv() {
        let mut next = Some(line);
        while let Some(Line { outcome, text }) = next {
            chunk.extend_from_slice(&text);
            written.push(outcome);
            next = if chunk.len() < CHUNK { lines.try_recv().ok() } else { None };
        }
        let _whole = lock.lock().unwrap_or_else(PoisonError::into_inner);
        sink.write_all(&chunk)?;
        // Standard output keeps a tail back; an error may show only here.
        sink.flush()?;
        for outcome in written.drain(..) {
            *outcomes.entry(outcome).or_default() += 1;
        }
        chunk.clear();
    }
    Ok(())
}
