//! How a provider's batch API is spoken: the requests to make and what their answers say. Nothing is sent here, and no clock is read.

mod anthropic;
mod body;
mod openai;
mod read;
#[cfg(test)]
mod tests;
mod wire;

use std::{
    error::Error as StdError,
    fmt,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};

pub use self::{anthropic::Anthropic, openai::OpenAi};
use crate::org::{Dialect, Family};

/// One provider's batch API. [`Anthropic`] and [`OpenAi`] are two; [`api_of`] finds the one that an org speaks.
///
/// Every request is relative to the org's base URL and without a key: both are the work of [`auth`](crate::auth) below. Answers are
/// handed in gathered whole, whatever their status. Nothing here panics on what a provider sends.
pub trait BatchApi: fmt::Debug + Send + Sync + 'static {
    /// How much a batch may hold.
    fn bounds(&self) -> Bounds;

    /// The request as a row of a batch, and with which other rows it may share one.
    ///
    /// # Errors
    /// If it can never be a row: see [`RowError`]. The direct path may still take it.
    fn row(&self, custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError>;

    /// The upload of these rows as a file, where that is a step of its own (OpenAI); `None` where [`create`](BatchApi::create) carries them
    /// (Anthropic). The file's name is the token.
    fn upload(&self, token: &str, rows: &[Bytes]) -> Option<Request<Bytes>>;

    /// The id of the uploaded file.
    ///
    /// # Errors
    /// See [`ApiError`].
    fn uploaded(&self, answer: &Response<Bytes>) -> Result<String, ApiError>;

    /// The creation of a batch. `rows` are all of `group`, each with a custom id that no other has.
    ///
    /// `token` is ours and of this submission alone, to find the batch again if the reply is lost: see [`matches`](BatchApi::matches).
    /// OpenAI takes up to 512 characters of it; Anthropic has no place for it. `file` is what [`uploaded`](BatchApi::uploaded) gave; where
    /// it is needed and missing, the provider will refuse.
    fn create(&self, group: &Group, token: &str, file: Option<&str>, rows: &[Bytes]) -> Request<Bytes>;

    /// The created batch.
    ///
    /// # Errors
    /// See [`ApiError`]. After [`ApiError::Unreadable`] it is not known whether there is a batch, as after a lost reply.
    fn created(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError>;

    /// Asks how a batch stands.
    fn retrieve(&self, id: &str) -> Request<Bytes>;

    /// How a batch stands: of the answer to [`retrieve`](BatchApi::retrieve) or to [`cancel`](BatchApi::cancel).
    ///
    /// # Errors
    /// See [`ApiError`].
    fn retrieved(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError>;

    /// Asks the provider to cancel a batch. One that has ended refuses it ([`ApiError::Refused`]): retrieve it then.
    fn cancel(&self, id: &str) -> Request<Bytes>;

    /// Asks for a page of the org's batches, newest first; `after` is the last page's [`next`](Page::next).
    fn list(&self, after: Option<&str>) -> Request<Bytes>;

    /// A page of the org's batches.
    ///
    /// # Errors
    /// See [`ApiError`]. One entry that has no id makes the whole page unreadable: it might be the one that is looked for.
    fn listed(&self, answer: &Response<Bytes>) -> Result<Page, ApiError>;

    /// Whether this may be the batch of a submission whose reply was lost.
    fn matches(&self, remote: &Remote, submission: &Submission<'_>) -> Match;

    /// What to fetch of a batch that has ended, each answer a file of [`lines`]: OpenAI's output *and* error file, Anthropic's results.
    /// Empty where there is nothing: it failed at validation, or nothing was answered, or it is so old that its results are gone.
    fn results(&self, remote: &Remote) -> Vec<Request<Bytes>>;

    /// One line of a file of results, without its line feed; `None` if it is blank. Rows come in any order.
    ///
    /// # Errors
    /// [`ApiError::Unreadable`] if the line does not tell whose it is, as one does that was cut off. A line that tells it, and nothing
    /// else, is a [`RowEnd::Missing`].
    fn result(&self, line: &[u8]) -> Result<Option<RowResult>, ApiError>;
}

/// The batch API of this dialect.
#[must_use]
pub fn api_of(dialect: Dialect) -> &'static dyn BatchApi {
    match dialect {
        Dialect::Anthropic => &Anthropic,
        Dialect::OpenAi => &OpenAi,
    }
}

/// How much a batch may hold.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// The most that the [weights](Row::weight) of a batch's rows may come to.
    pub rows: usize,
    /// The most bytes, each row counted with one byte more than it has. Below the documented figure by a margin, in which all the rest of
    /// the request finds room.
    pub bytes: usize,
}

impl Bounds {
    /// These.
    #[must_use]
    pub const fn new(rows: usize, bytes: usize) -> Self {
        Bounds { rows, bytes }
    }
}

/// A request as a row of a batch. Made by [`BatchApi::row`].
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq)]
pub struct Row {
    /// With which other rows it may share a batch.
    pub group: Group,
    /// As it stands in the upload, without what separates it from the next. There is no line feed in it.
    pub bytes: Bytes,
    /// For how many rows it counts in [`Bounds::rows`]: one, but of embeddings the number of inputs.
    pub weight: usize,
}

impl Row {
    /// A row of weight one.
    #[must_use]
    pub fn new(group: Group, bytes: Bytes) -> Self {
        Row { group, bytes, weight: 1 }
    }
}

impl fmt::Debug for Row {
    /// Says how much there is, never what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Row({}, {} bytes, weight {})", self.group, self.bytes.len(), self.weight)
    }
}

/// What rows must have in common to share a batch: where they go, what version of the API they want, and whose quota they use.
///
/// It can always be made again from a row's request, so nobody need keep it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    path: String,
    query: Option<String>,
    headers: Vec<(HeaderName, HeaderValue)>,
    family: Family,
    model: Option<String>,
}

impl Group {
    /// The group of requests to this path that use the quota of this family.
    #[must_use]
    pub fn new(path: impl Into<String>, family: Family) -> Self {
        Group { path: path.into(), query: None, headers: Vec::new(), family, model: None }
    }

    /// With this query, which the creation of the batch carries too.
    #[must_use]
    pub fn with_query(mut self, query: impl Into<String>) -> Self {
        self.query = Some(query.into());
        self
    }

    /// With these headers of the request, in this order, which the creation of the batch carries too. Never one that holds a key.
    #[must_use]
    pub fn with_headers(mut self, headers: &HeaderMap, names: &[HeaderName]) -> Self {
        for name in names {
            self.headers.extend(headers.get_all(name).iter().map(|value| (name.clone(), value.clone())));
        }
        self
    }

    /// All of this one model: no org is given the batch that [refuses it](crate::org::Org::put_model_out).
    #[must_use]
    pub fn with_model(mut self, model: impl Into<String>) -> Self {
        self.model = Some(model.into());
        self
    }

    /// Whose quota they use.
    #[must_use]
    pub fn family(&self) -> &Family {
        &self.family
    }

    /// Where the requests go.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its query.
    #[must_use]
    pub fn query(&self) -> Option<&str> {
        self.query.as_deref()
    }

    /// The headers that all rows share, and that the creation of their batch carries.
    #[must_use]
    pub fn headers(&self) -> &[(HeaderName, HeaderValue)] {
        &self.headers
    }

    /// The model of all of them, where that is known.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path, self.model.as_deref().unwrap_or(self.family.as_str()))
    }
}

/// Why a request can be no row.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowError {
    /// The provider does not take such a request in a batch: another method or path, a body that is no JSON object, one that wants a
    /// stream. The direct path can have it.
    NotBatchable(String),
    /// It is larger than a batch may be: it can never go.
    TooLarge {
        /// What it has.
        bytes: usize,
        /// What a batch may have.
        most: usize,
    },
    /// The custom id is none: see [`check_custom_id`].
    CustomId,
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowError::NotBatchable(why) => write!(f, "no request for a batch: {why}"),
            RowError::TooLarge { bytes, most } => {
                write!(f, "a request of {bytes} bytes fits into no batch, which may have {most}")
            }
            RowError::CustomId => f.write_str("a custom id has 1 to 64 letters, digits, `_` and `-`"),
        }
    }
}

impl StdError for RowError {}

/// Checks a custom id before anything is sent: providers refuse the whole batch for one that they do not like. Allowed are 1 to 64
/// letters (a-z, A-Z), digits, `_` and `-`.
///
/// # Errors
/// [`RowError::CustomId`].
pub fn check_custom_id(custom_id: &str) -> Result<(), RowError> {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if (1..=64).contains(&custom_id.len()) && custom_id.bytes().all(known) { Ok(()) } else { Err(RowError::CustomId) }
}

/// Why an answer is not what was asked for.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiError {
    /// There is no such batch or file, or it is not to be seen yet, or not by this org (404).
    NotFound,
    /// The org's queue of batches is full: it passes when another batch ends.
    QueueFull(String),
    /// The upload is too large (413). A smaller batch may go.
    TooLarge,
    /// Refused. The status means here what it means for any other call.
    Refused {
        /// The answer's status.
        status: StatusCode,
        /// In the provider's words, or empty. The judge's, where it has read the answer; else no more than the error's type and code.
        said: String,
    },
    /// A success that says nothing useful: a page of HTML, a body cut short. What was wrong with it.
    Unreadable(String),
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ApiError::NotFound => f.write_str("the batch or file is not there (404)"),
            ApiError::QueueFull(said) => write!(f, "the org's queue of batches is full: {said}"),
            ApiError::TooLarge => f.write_str("the batch is too large (413)"),
            ApiError::Refused { status, said } if said.is_empty() => write!(f, "refused: {status}"),
            ApiError::Refused { status, said } => write!(f, "refused: {status}: {said}"),
            ApiError::Unreadable(why) => write!(f, "the answer cannot be read: {why}"),
        }
    }
}

impl StdError for ApiError {}

/// A batch as the provider describes it.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its id.
    pub id: String,
    /// How it stands.
    pub state: RemoteState,
    /// How its rows stand, as the provider counts; `None` where it does not (yet). Never a substitute for the rows themselves.
    ///
    /// Anthropic documents that rows count as processing until the whole batch has ended: that none has succeeded says no more than that.
    pub counts: Option<Counts>,
    /// When it was created, by the provider's clock.
    pub created_at: Option<SystemTime>,
    /// When the provider gives up, by its clock. `None` where it names no time, or one that cannot be: not after the batch was created, or
    /// more than 30 days after.
    pub expires_at: Option<SystemTime>,
    /// The token that it was created with, where the provider keeps one.
    pub token: Option<String>,
    /// The file that it was created from, where there is one.
    pub input: Option<String>,
    /// Where its results are, in the words of its [`BatchApi`].
    pub files: Vec<String>,
}

impl Remote {
    /// One of which no more is known.
    #[must_use]
    pub fn new(id: impl Into<String>, state: RemoteState) -> Self {
        Remote {
            id: id.into(),
            state,
            counts: None,
            created_at: None,
            expires_at: None,
            token: None,
            input: None,
            files: Vec::new(),
        }
    }
}

/// How a batch stands.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteState {
    /// It is being worked on, or checked before. Also what a state is taken for that is not known.
    Processing,
    /// It was cancelled, and has not ended yet.
    Canceling,
    /// It has ended, and [its results](BatchApi::results) can be fetched. Rows that these do not name ended as the batch did.
    Ended(Ending),
    /// It was refused as a whole before any row was worked on.
    Failed {
        /// In the provider's words: types and codes, since messages may quote a key.
        reason: String,
        /// The org's queue of batches was full: no row is to blame, and it passes when another batch ends.
        queue_full: bool,
        /// The places, from 0, of the rows that it was refused for, in order, as far as the provider names them.
        rows: Vec<usize>,
    },
}

/// How a batch ended, and with it each row that its results do not name.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// All rows were worked on. A row that is not named is [missing](RowEnd::Missing).
    Completed,
    /// Time was up.
    Expired,
    /// It was cancelled.
    Canceled,
}

/// Rows, by how they stand.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Still to be worked on.
    pub processing: u64,
    /// Answered with a success.
    pub succeeded: u64,
    /// Answered with an error.
    pub failed: u64,
    /// Not worked on, since the batch was cancelled.
    pub canceled: u64,
    /// Not worked on in time.
    pub expired: u64,
}

impl Counts {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Counts { processing, succeeded, failed, canceled, expired } = *self;
        [processing, succeeded, failed, canceled, expired].into_iter().fold(0, u64::saturating_add)
    }

    /// Counts one more row that was seen.
    pub fn add(&mut self, end: &RowEnd) {
        let count = match end {
            RowEnd::Answered(answer) if answer.status().is_success() => &mut self.succeeded,
            RowEnd::Answered(_) | RowEnd::Missing(_) => &mut self.failed,
            RowEnd::Expired => &mut self.expired,
            RowEnd::Canceled => &mut self.canceled,
        };
        *count = count.saturating_add(1);
    }
}

/// A page of an org's batches.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The batches, newest first.
    pub batches: Vec<Remote>,
    /// What to ask for the next page with; `None` on the last. A provider may err: stop where it names the same one again.
    pub next: Option<String>,
}

/// A submission whose reply was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission<'a> {
    /// Its token.
    pub token: &'a str,
    /// The file that was uploaded for it, if that is known.
    pub file: Option<&'a str>,
    /// When it was begun, by our clock.
    pub since: SystemTime,
    /// By when the batch was created, if it was, by our clock.
    pub until: SystemTime,
    /// How many rows it had.
    pub rows: usize,
}

/// By how much a provider's clock and ours may differ, where a batch is looked for by its time. Wide, since results make it certain.
pub(super) const SKEW: Duration = Duration::from_secs(3600);

/// Whether a batch is the one of a submission.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Match {
    /// It is.
    Certain,
    /// It may be: it is of that time, and has as many rows. Once it has ended, the ids in its results tell. Leave out those that are known to
    /// be another submission's.
    Perhaps,
    /// It is not.
    No,
}

/// How one row of a batch ended.
#[derive(Clone, Debug)]
pub struct RowResult {
    /// The row's custom id.
    pub custom_id: String,
    /// How it ended.
    pub end: RowEnd,
}

/// How a row ended.
#[non_exhaustive]
#[derive(Clone)]
pub enum RowEnd {
    /// With the answer that a direct call would have got: status, body and the headers that matter.
    Answered(Response<Bytes>),
    /// It was not worked on in time.
    Expired,
    /// It was not worked on, since the batch was cancelled.
    Canceled,
    /// There is no answer: why, in the provider's words or ours.
    Missing(String),
}

impl fmt::Debug for RowEnd {
    /// Says of an answer how much there is, never what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowEnd::Answered(answer) => write!(f, "Answered({}, {} bytes)", answer.status(), answer.body().len()),
            RowEnd::Expired => f.write_str("Expired"),
            RowEnd::Canceled => f.write_str("Canceled"),
            RowEnd::Missing(why) => f.debug_tuple("Missing").field(why).finish(),
        }
    }
}

/// The lines of a file of results: split at line feeds alone, since JSON may have every other separator of Unicode in it.
pub fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
}
