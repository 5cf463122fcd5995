//! Headroom for neighbours: written now and then during a run, printed by `--status`.

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use serde::Serialize;
use tokio::task::JoinHandle;
use tower_quota::{
    headroom::{self, HeadroomError, HeadroomFile, Row},
    org::Orgs,
};

use crate::{panel::say, words};

/// Names the file where the command line does not.
const VARIABLE: &str = "TOWER_QUOTA_HEADROOM_FILE";

/// The file that the environment names.
pub(crate) fn from_env() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Writes the file during a run, where a disk that hangs keeps nobody.
pub(crate) struct Neighbours {
    file: Arc<HeadroomFile>,
    orgs: Orgs,
    writing: Option<JoinHandle<()>>,
    warned: Arc<AtomicBool>,
}

impl Neighbours {
    pub(crate) fn new(path: &Path, orgs: &Orgs) -> Self {
        let file = Arc::new(HeadroomFile::new(path));
        Neighbours { file, orgs: orgs.clone(), writing: None, warned: Arc::default() }
    }

    /// To be called often: the file is written every few seconds at most.
    pub(crate) fn tick(&mut self) {
        if self.writing.as_ref().is_some_and(|writing| !writing.is_finished()) {
            return;
        }
        let (file, orgs, warned) = (self.file.clone(), self.orgs.clone(), self.warned.clone());
        self.writing = Some(tokio::task::spawn_blocking(move || {
            if let Err(error) = file.offer(&orgs) {
                // A run does not end because of it, and once is enough to be told.
                if !warned.swap(true, Relaxed) {
                    tracing::warn!("--headroom-file {}: {error}", file.path().display());
                }
            }
        }));
    }

    /// The last offer, while the orgs' accounts are still kept.
    pub(crate) async fn close(mut self) {
        for _ in 0..2 {
            if let Some(writing) = self.writing.take() {
                // One that panicked has said so.
                let _ = writing.await;
            }
            self.tick();
        }
        if let Some(writing) = self.writing {
            let _ = writing.await;
        }
    }
}

/// A row, with its age.
#[derive(Debug, Serialize)]
struct Told<'a> {
    org: &'a str,
    api: &'static str,
    family: &'a str,
    resource: &'static str,
    /// What was left when the provider said so.
    remaining: f64,
    /// The most that there can be, as far as is known.
    capacity: f64,
    /// The one over the other, `0.0..=1.0`.
    left: f64,
    limit_per_minute: f64,
    observed_at: String,
    age_s: u64,
    /// `fresh` (less than a minute old), `stale` (less than an hour) or `very stale`.
    state: String,
    writer_pid: u32,
}

impl<'a> Told<'a> {
    fn new(row: &'a Row) -> Self {
        Told {
            org: &row.org,
            api: row.api.name(),
            family: row.family.as_str(),
            resource: words::resource(row.resource),
            remaining: row.remaining,
            capacity: row.capacity,
            left: (row.left() * 1e4).round() / 1e4,
            limit_per_minute: row.limit_per_minute,
            observed_at: humantime::format_rfc3339_millis(row.observed_at).to_string(),
            age_s: row.age().as_secs(),
            state: row.freshness().to_string(),
            writer_pid: row.writer_pid,
        }
    }

    fn cells(&self) -> [String; 10] {
        let age = humantime::format_duration(Duration::from_secs(self.age_s));
        [
            shown(self.org),
            self.api.to_owned(),
            shown(self.family),
            self.resource.replace('_', " "),
            format!("{:.0}", self.remaining),
            format!("{:.0}", self.capacity),
            format!("{:.0} %", self.left * 100.0),
            format!("{:.0}", self.limit_per_minute),
            age.to_string(),
            self.state.clone(),
        ]
    }
}

/// A name that comes from a file, without what would make a terminal do something.
fn shown(name: &str) -> String {
    name.replace(char::is_control, "\u{fffd}")
}

const HEAD: [&str; 10] = ["org", "api", "family", "resource", "remaining", "of", "left", "a minute", "age", "state"];
/// Which columns are figures, and stand to the right.
const FIGURES: std::ops::Range<usize> = 4..8;

/// Prints what the file says. Exit code 0, also where there is no file; 1 where it cannot be read.
pub(crate) fn print(path: Option<PathBuf>, json: bool) -> u8 {
    let found = match &path {
        None => {
            say(&format!("no headroom file is named: give --headroom-file FILE, or set {VARIABLE}"));
            None
        }
        Some(path) => match headroom::read(path) {
            Ok(None) => {
                let how = "a run with --headroom-file writes one once an answer has told its quota";
                say(&format!("{}: there is no headroom file; {how}", path.display()));
                None
            }
            Ok(found) => found,
            Err(error) => {
                let what_to_do = match &error {
                    HeadroomError::Io(_) => "name a file that may be read",
                    HeadroomError::Version(_) => "read it with the program that wrote it, or a later one",
                    _ => "name another file, or remove this one: the next run writes it anew",
                };
                say(&format!("error: {}: {error}; {what_to_do}", path.display()));
                return 1;
            }
        },
    };
    let headroom = found.unwrap_or_default();
    let rows: Vec<_> = headroom.rows.iter().map(Told::new).collect();
    let text = if json {
        let text = serde_json::json!({ "file": path.map(|path| path.display().to_string()), "rows": rows });
        format!("{text:#}\n")
    } else if rows.is_empty() {
        String::new()
    } else {
        table(&rows)
    };
    // A reader that has gone away has seen enough.
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            say(&format!("error: standard output: {error}"));
            1
        }
        _ => 0,
    }
}

fn table(rows: &[Told<'_>]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(Told::cells));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<_> = line
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| match FIGURES.contains(&column) {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}
