//! Headroom for neighbours: a small file that says what is left of each org's quotas, for other programs and for people.
//!
//! Programs that spend the same orgs' quotas without knowing of each other can look here first. Several may share one file: each
//! writes what its own providers' answers told it, and keeps what the others wrote. It holds names and figures, and never a key.
//!
//! [`HeadroomFile::offer`] is for being called often, at every tick of whatever ticks: it writes at most once in five seconds.
//! [`read`] is the other side.
//!
//! ```
//! use tower_quota::{headroom::{self, HeadroomFile}, org::{Credential, Org, Orgs}};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("headroom.json");
//! let orgs = Orgs::new([Org::new("research").credential(Credential::new("sk-secret"))])?;
//! let file = HeadroomFile::new(&path);
//! assert!(!file.offer(&orgs)?, "no answer has told anything yet");
//!
//! match headroom::read(&path)? {
//!     None => println!("nobody has written anything"),
//!     Some(headroom) => for row in headroom.rows {
//!         println!("{} {} {:?}: {} left, {}", row.org, row.family, row.resource, row.remaining, row.freshness());
//!     },
//! }
//! # Ok(()) }
//! ```
//!
//! # The file
//!
//! JSON, a row for each org, model family and resource:
//!
//! ```json
//! {"format":"tower-quota headroom","version":1,"rows":[
//! {"api":"anthropic","capacity":1000,"family":"sonnet","limit_per_minute":1000,"observed_at":"2026-01-31T12:00:00.250Z",
//!  "org":"research","remaining":730,"resource":"requests","writer_pid":4711}
//! ]}
//! ```
//!
//! It is replaced whole, by a rename, so a reader never sees half of it. Two programs that write in the same instant: what the
//! earlier had to say may be missing until it writes again.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt, fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use crate::{
    dialect::Resource,
    org::{Dialect, Family, Org},
};

/// The least time between two writes, unless said otherwise.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Up to this age a row is [`Freshness::Fresh`]: quotas are counted by the minute.
const FRESH: Duration = Duration::from_secs(60);
/// Up to this age it is [`Freshness::Stale`].
const STALE: Duration = Duration::from_secs(3600);
/// Beyond this age a row is dropped, so that orgs that are gone do not stay for ever.
const KEPT: Duration = Duration::from_secs(24 * 3600);
/// The largest file that is read: thousands of rows.
const LARGEST: u64 = 1 << 20;

const FORMAT: &str = "tower-quota headroom";
/// To be raised also when there is one more API or resource: who knows fewer must not write over it.
const VERSION: u64 = 1;
/// How every file of ours begins, also one that was cut off.
const BEGINNING: &str = "{\"format\":\"tower-quota headroom\",";

/// A file that orgs' headroom is written to, now and then. See the [module](self).
#[derive(Debug)]
pub struct HeadroomFile {
    path: PathBuf,
    interval: Duration,
    /// When it was last written, or tried to be.
    tried: Mutex<Option<Instant>>,
}

impl HeadroomFile {
    /// A file at this path, written at most once in [`INTERVAL`]. Its folder must exist; nothing is touched yet.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        HeadroomFile { path: path.into(), interval: INTERVAL, tried: Mutex::default() }
    }

    /// The least time between two writes. With zero every offer is written.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what is left of these orgs' quotas, if something is known of them and the interval has passed since the last write.
    /// True if it was written.
    ///
    /// Offer before the stack is dropped: what is known of the quotas goes with it. An offer within the interval is not written, also
    /// if it is the last; a new `HeadroomFile` of the same path writes at once.
    ///
    /// A row is what the provider's last answer said, and when; of the same row the newer stays, whoever wrote it. Rows older
    /// than a day are dropped.
    ///
    /// This blocks for as long as reading and replacing a file of a few hundred bytes takes, once an interval; else it returns at
    /// once. Async code on a disk that may hang calls it in `spawn_blocking`; the library starts no task or thread.
    ///
    /// A file there that was cut off is replaced. One that is something else is first renamed to the same name with `.old` added.
    ///
    /// # Errors
    /// If the file can neither be read nor replaced, if it is no regular file, if a later version wrote it, or if it is something
    /// else and `.old` is there already. The file is then as it was, and the next try is an interval away.
    pub fn offer<'a>(&self, orgs: impl IntoIterator<Item = &'a Org>) -> io::Result<bool> {
        let (now, wall) = (Instant::now(), SystemTime::now());
        if !self.is_due(*self.tried(), now) {
            return Ok(false);
        }
        let ours = told(orgs, now, wall);
        if ours.is_empty() || !self.take_turn(now) {
            return Ok(false);
        }
        let theirs = match load(&self.path)? {
            None => Vec::new(),
            Some(bytes) => match parse(&bytes) {
                Ok(rows) => rows,
                Err(HeadroomError::Malformed(_)) => {
                    if !is_torn(&bytes) {
                        set_aside(&self.path)?;
                    }
                    Vec::new()
                }
                Err(error) => return Err(error.into()),
            },
        };
        replace(&self.path, &text(&merge(theirs, ours, wall)))?;
        Ok(true)
    }

    fn tried(&self) -> MutexGuard<'_, Option<Instant>> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_due(&self, tried: Option<Instant>, now: Instant) -> bool {
        tried.is_none_or(|tried| now.saturating_duration_since(tried) >= self.interval)
    }

    /// One that fails counts too: a full disk is not tried at every tick.
    fn take_turn(&self, now: Instant) -> bool {
        let mut tried = self.tried();
        let due = self.is_due(*tried, now);
        if due {
            *tried = Some(now);
        }
        due
    }
}

/// What a headroom file says.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Headroom {
    /// By org, API, family and resource, in this order.
    pub rows: Vec<Row>,
}

/// What is left of one resource of an org's quota for one model family, by a provider's word.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The org's name, as its writer calls it.
    pub org: String,
    /// Whose API: orgs of two providers may share a name.
    pub api: Dialect,
    /// The model family.
    pub family: Family,
    /// What is metered.
    pub resource: Resource,
    /// What the provider allows per minute.
    pub limit_per_minute: f64,
    /// The most that the quota holds, as far as its writer has seen.
    pub capacity: f64,
    /// What was left, as the provider said. Above [`capacity`](Self::capacity) at times, where the provider rounds.
    pub remaining: f64,
    /// When it said so, by its writer's clock.
    pub observed_at: SystemTime,
    /// The process that wrote it.
    pub writer_pid: u32,
}

/// How far a [`Row`] can be trusted, by its age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Freshness {
    /// Less than a minute old.
    Fresh,
    /// Less than an hour old: its minute is over.
    Stale,
    /// Older.
    VeryStale,
}

impl fmt::Display for Freshness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Freshness::Fresh => "fresh",
            Freshness::Stale => "stale",
            Freshness::VeryStale => "very stale",
        })
    }
}

impl Row {
    /// How old it is now. One from the future, by a clock that was wrong, is not old at all.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age_at(SystemTime::now())
    }

    fn age_at(&self, wall: SystemTime) -> Duration {
        wall.duration_since(self.observed_at).unwrap_or_default()
    }

    /// Whether it is fresh now.
    #[must_use]
    pub fn freshness(&self) -> Freshness {
        Freshness::of(self.age())
    }

    /// The fraction that was left, `0.0..=1.0`.
    #[must_use]
    pub fn left(&self) -> f64 {
        if self.capacity > 0.0 { (self.remaining / self.capacity).clamp(0.0, 1.0) } else { 0.0 }
    }

    fn key(&self) -> (&str, &'static str, &Family, usize) {
        (&self.org, self.api.name(), &self.family, self.resource.index())
    }

    fn to_json(&self) -> Value {
        json!({
            "org": self.org,
            "api": self.api.name(),
            "family": self.family.as_str(),
            "resource": name(self.resource),
            "limit_per_minute": number(self.limit_per_minute),
            "capacity": number(self.capacity),
            "remaining": number(self.remaining),
            "observed_at": humantime::format_rfc3339_millis(self.observed_at).to_string(),
            "writer_pid": self.writer_pid,
        })
    }

    fn from_json(row: &Value) -> Option<Row> {
        let text = |field: &str| row.get(field)?.as_str();
        let figure = |field: &str| row.get(field)?.as_f64().filter(|figure| figure.is_finite());
        Some(Row {
            org: text("org")?.to_owned(),
            api: APIS.into_iter().find(|api| Some(api.name()) == text("api"))?,
            family: Family::new(text("family")?),
            resource: Resource::ALL.into_iter().find(|resource| Some(name(*resource)) == text("resource"))?,
            limit_per_minute: figure("limit_per_minute")?,
            capacity: figure("capacity")?,
            remaining: figure("remaining")?,
            observed_at: humantime::parse_rfc3339(text("observed_at")?).ok()?,
            writer_pid: row.get("writer_pid")?.as_u64()?.try_into().ok()?,
        })
    }
}

impl Freshness {
    fn of(age: Duration) -> Self {
        match age {
            age if age < FRESH => Freshness::Fresh,
            age if age < STALE => Freshness::Stale,
            _ => Freshness::VeryStale,
        }
    }
}

const APIS: [Dialect; 2] = [Dialect::Anthropic, Dialect::OpenAi];

/// A resource's name in the file.
const fn name(resource: Resource) -> &'static str {
    match resource {
        Resource::Requests => "requests",
        Resource::InputTokens => "input_tokens",
        Resource::OutputTokens => "output_tokens",
        Resource::Tokens => "tokens",
    }
}

/// Whole numbers without a point: there are tools that take them for something else.
fn number(figure: f64) -> Value {
    // Up to here every whole number is one of both kinds.
    if figure.fract() == 0.0 && (0.0..=9e15).contains(&figure) { json!(figure as u64) } else { json!(figure) }
}

/// Why a headroom file cannot be read.
#[non_exhaustive]
#[derive(Debug)]
pub enum HeadroomError {
    /// The file cannot be opened or read.
    Io(io::Error),
    /// It is no headroom file, or a broken one: in which way.
    Malformed(String),
    /// It is of a version that this crate does not know.
    Version(u64),
}

impl fmt::Display for HeadroomError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeadroomError::Io(error) => write!(f, "{error}"),
            HeadroomError::Malformed(problem) => write!(f, "no headroom file, or a broken one: {problem}"),
            HeadroomError::Version(version) => write!(f, "a headroom file of version {version}; known is {VERSION}"),
        }
    }
}

impl std::error::Error for HeadroomError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            HeadroomError::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<HeadroomError> for io::Error {
    fn from(error: HeadroomError) -> Self {
        match error {
            HeadroomError::Io(error) => error,
            error => io::Error::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// Reads a headroom file; `None` where there is none. Blocks, as [`HeadroomFile::offer`] does.
///
/// # Errors
/// If the file is there and cannot be read, or is no headroom file of this version.
pub fn read(path: impl AsRef<Path>) -> Result<Option<Headroom>, HeadroomError> {
    match load(path.as_ref()).map_err(HeadroomError::Io)? {
        None => Ok(None),
        Some(bytes) => Ok(Some(Headroom { rows: parse(&bytes)? })),
    }
}

/// What answers have told of these orgs.
fn told<'a>(orgs: impl IntoIterator<Item = &'a Org>, now: Instant, wall: SystemTime) -> Vec<Row> {
    let mut rows = Vec::new();
    for org in orgs {
        let label = label(org);
        for quota in org.snapshot().quota {
            let Some((remaining, said)) = quota.said else { continue };
            let observed_at = wall.checked_sub(now.saturating_duration_since(said)).unwrap_or(wall);
            rows.push(Row {
                org: label.clone(),
                api: org.speaks(),
                family: quota.family,
                resource: quota.resource,
                limit_per_minute: quota.per_minute,
                capacity: quota.capacity,
                remaining,
                // What cannot be written as a date must not make it panic.
                observed_at: observed_at.max(SystemTime::UNIX_EPOCH),
                writer_pid: std::process::id(),
            });
        }
    }
    rows.retain(|row| [row.limit_per_minute, row.capacity, row.remaining].iter().all(|figure| figure.is_finite()));
    rows
}

/// An org's name; should somebody call it by its key, without that.
fn label(org: &Org) -> String {
    match org.key().map(|key| key.reveal()) {
        // Shorter ones are no secret, and might be part of a word.
        Some(key) if key.len() >= 8 => org.name().replace(key, "***"),
        _ => org.name().to_owned(),
    }
}

/// Of each row the newer, and none that is too old. One from the future gives way: else a clock that once was wrong would have the
/// last word.
fn merge(theirs: Vec<Row>, ours: Vec<Row>, wall: SystemTime) -> Vec<Row> {
    let mut newest: BTreeMap<_, Row> = BTreeMap::new();
    for row in theirs.into_iter().chain(ours) {
        let (org, api, family, resource) = row.key();
        let key = (org.to_owned(), api, family.clone(), resource);
        let stays =
            newest.get(&key).is_some_and(|other| other.observed_at > row.observed_at && other.observed_at <= wall);
        if !stays {
            newest.insert(key, row);
        }
    }
    let far = |row: &Row| row.observed_at.duration_since(wall).is_ok_and(|ahead| ahead > KEPT);
    newest.into_values().filter(|row| row.age_at(wall) <= KEPT && !far(row)).collect()
}

fn text(rows: &[Row]) -> String {
    let rows: Vec<_> = rows.iter().map(|row| row.to_json().to_string()).collect();
    format!("{BEGINNING}\"version\":{VERSION},\"rows\":[\n{}\n]}}\n", rows.join(",\n"))
}

fn parse(bytes: &[u8]) -> Result<Vec<Row>, HeadroomError> {
    let malformed = |problem: String| HeadroomError::Malformed(problem);
    let file: Map<String, Value> = serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))?;
    if file.get("format").and_then(Value::as_str) != Some(FORMAT) {
        return Err(malformed(format!("`format` is not {FORMAT:?}")));
    }
    match file.get("version").and_then(Value::as_u64) {
        Some(VERSION) => {}
        Some(version) => return Err(HeadroomError::Version(version)),
        None => return Err(malformed("`version` is no number".to_owned())),
    }
    let Some(rows) = file.get("rows").and_then(Value::as_array) else {
        return Err(malformed("`rows` is no list".to_owned()));
    };
    let row = |(i, row)| {
        Row::from_json(row)
            .ok_or_else(|| malformed(format!("row {} lacks a field, or has one that makes no sense", i + 1)))
    };
    rows.iter().enumerate().map(row).collect()
}

/// Whether it may be thrown away: empty, as a crash can leave a file, or the beginning of one of ours.
fn is_torn(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0 || byte.is_ascii_whitespace()) || bytes.starts_with(BEGINNING.as_bytes())
}

/// The bytes; `None` where there is no file.
fn load(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match fs::metadata(path) {
        // A pipe would keep us waiting, and a device be replaced by a file.
        Ok(metadata) if !metadata.is_file() => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(_) => fs::File::open(path),
        Err(error) => Err(error),
    };
    let file = match file {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Whoever named the wrong file gets it back.
fn set_aside(path: &Path) -> io::Result<()> {
    let old = beside(path, ".old");
    if fs::symlink_metadata(&old).is_ok() {
        let problem = format!("it is no headroom file, and {} is there already", old.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    tracing::warn!(path = %path.display(), old = %old.display(), "not a headroom file: renamed");
    fs::rename(path, old)
}

/// All of it at once: a reader sees the old text or the new. A crash of the machine may leave an empty file, which is no loss.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    // The process may have a second one for the same path.
    let temporary = beside(path, &format!(".{}-{:08x}.tmp", std::process::id(), fastrand::u32(..)));
    let mut file = fs::File::create_new(&temporary)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // Half a file is of no use to anybody.
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests;
