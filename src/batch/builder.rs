//! What may be said about a batch service, and how it is opened.

use std::{
    error::Error as StdError,
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    Anthropic, BatchApi, BatchBody, BatchChange, BatchRows, BatchService, BatchStore, OpenAi,
    law::{Law, Size},
    record::Record,
    state::{Line, Shared, State},
    store::AnyStore,
    wire::{Member, Wire},
    works::Works,
};
use crate::{
    aimd::AimdLimitLayer,
    auth::OrgAuthLayer,
    health::OrgHealthLayer,
    journal::{KeyHeaders, StoreError},
    judge::{Gather, JudgeLayer},
    org::{BuildError, Dialect, Family, Org, Orgs},
    outcome::{BoxError, Stamped},
    quota::QuotaHeaderLayer,
    stack,
};

/// Anthropic keeps results for 29 days; after that a record leads nowhere.
const KEPT: Duration = Duration::from_secs(29 * 24 * 3600);

impl BatchService<BatchBody> {
    /// Starts from the defaults: these orgs, in turn, and records in this store.
    pub fn builder(orgs: Orgs, store: impl BatchStore) -> BatchBuilder {
        BatchBuilder {
            api: match orgs.dialect() {
                Dialect::Anthropic => Arc::new(Anthropic),
                Dialect::OpenAi => Arc::new(OpenAi),
            },
            orgs,
            store: Box::new(store),
            law: Law::default(),
            chunk_rows: 1_000,
            chunk_bytes: None,
            in_flight: 4,
            linger: Duration::from_secs(2),
            timeout: Duration::from_secs(300),
            judge: JudgeLayer::new(),
            headers: KeyHeaders::default(),
            cancel_on_exit: false,
            wall: Box::new(SystemTime::now),
        }
    }
}

/// What may be said about a [`BatchService`].
#[must_use]
pub struct BatchBuilder {
    orgs: Orgs,
    api: Arc<dyn BatchApi>,
    store: Box<dyn AnyStore>,
    law: Law,
    chunk_rows: usize,
    chunk_bytes: Option<usize>,
    in_flight: usize,
    linger: Duration,
    timeout: Duration,
    judge: JudgeLayer,
    headers: KeyHeaders,
    cancel_on_exit: bool,
    wall: Box<dyn Fn() -> SystemTime + Send + Sync>,
}

impl BatchBuilder {
    /// How many rows a batch has at most. Default 1,000: batches of 8,000 were seen to starve for hours where those of 1,000 took minutes.
    /// At least 1, and no more than the provider takes.
    pub fn chunk_rows(mut self, rows: usize) -> Self {
        self.chunk_rows = rows;
        self
    }

    /// How many bytes a batch has at most. Default, and most: what the provider takes, less a margin.
    pub fn chunk_bytes(mut self, bytes: usize) -> Self {
        self.chunk_bytes = Some(bytes);
        self
    }

    /// How many batches an org has at once. Default 4; at least 1. Stay below the org's cap of queued requests.
    pub fn in_flight(mut self, batches: usize) -> Self {
        self.in_flight = batches;
        self
    }

    /// How long a batch that is not full waits for its next row, from its last one, or from when an org has a place for it. Default 2 s; at
    /// most an hour. It waits for thirty times as long at most: while rows come slowly, while
    /// [more are expected](super::BatchHandle::expect_more), and while it is not known of a batch of an earlier time, or of one that has
    /// ended or whose reply was lost, whether rows of it come back. [`flush`](super::BatchHandle::flush) sends it without waiting for rows.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// The waits between two questions about a batch: the first one, and the longest; each is half as long again as the one before.
    /// Default 30 s and 120 s. The first is at least 1 s, and no longer than the longest.
    pub fn poll(mut self, first: Duration, longest: Duration) -> Self {
        (self.law.poll_first, self.law.poll_longest) = (first, longest);
        self
    }

    /// How long after it has expired a batch is given up. Default 30 minutes; at most a week.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.law.grace = grace;
        self
    }

    /// After how long without a success a batch is taken for stuck: it is cancelled, and the rows that it has not done are handed back, to
    /// be sent directly. Default four hours; `None` for never. At least a second. For so long a batch is tried to be submitted, too, where the
    /// org throttles that, does not take the rows, or loses each reply and no batch is found.
    ///
    /// Anthropic may count no success before the whole batch has ended: there it is how long a batch may take.
    pub fn stuck_after(mut self, after: Option<Duration>) -> Self {
        self.law.stuck_after = after;
        self
    }

    /// How far apart the org's batches are listed twice before a batch whose reply was lost is taken for one that was never made, and is
    /// submitted again. Default a minute, since it may take that long until a new one is listed; at least a second, at most an hour.
    pub fn look_again(mut self, after: Duration) -> Self {
        self.law.look_again = after;
        self
    }

    /// How long a call about a batch may be without an answer, and its answer without a further piece, until it counts as broken off and is
    /// made again; one that may have submitted a batch is looked for instead. Default five minutes, for the sake of large uploads; at
    /// least a second, at most an hour.
    pub fn timeout(mut self, silent: Duration) -> Self {
        self.timeout = silent;
        self
    }

    /// Whether [`shutdown`](super::BatchHandle::shutdown) cancels the batches that run. Default false: they are left running, and billed.
    pub fn cancel_on_exit(mut self, cancel: bool) -> Self {
        self.cancel_on_exit = cancel;
        self
    }

    /// How the answer to a row is read: as the direct path's is, so give it the same. Default: [`JudgeLayer::new`]. It is gathered in any
    /// case, and the keys of all orgs are scrubbed.
    pub fn judge(mut self, judge: JudgeLayer) -> Self {
        self.judge = judge;
        self
    }

    /// The request headers that change the answer; give a journal that stands above
    /// [the same names](crate::journal::JournalBuilder::key_headers). Default: [`KeyHeaders::default`].
    pub fn key_headers(mut self, headers: KeyHeaders) -> Self {
        self.headers = headers;
        self
    }

    /// How the provider's batch API is spoken. Default: as the orgs' dialect has it.
    pub fn api(mut self, api: impl BatchApi) -> Self {
        self.api = Arc::new(api);
        self
    }

    /// What time it is, to be compared with what the provider says and with what an earlier process wrote. Default: the system's clock. For
    /// tests in virtual time.
    pub fn clock(mut self, now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.wall = Box::new(now);
        self
    }

    /// Reads the records of earlier processes, and is ready. Each org is asked through `client` with its own key, at its own limits: those
    /// of the model family `batches`, since providers count calls about batches apart.
    ///
    /// Without a [`Route`](super::Route) nothing says what body answers have: `let batch: BatchService = builder.open(client).await?`. The
    /// body of what `client` is sent has to be said too: `client::https::<Full<Bytes>>()`.
    ///
    /// # Errors
    /// See [`BatchOpenError`].
    pub async fn open<C, MB, CB, RB>(self, client: C) -> Result<BatchService<RB>, BatchOpenError>
    where
        C: Service<Request<MB>, Response = Response<CB>> + Clone + Send + 'static,
        C::Error: Into<BoxError>,
        C::Future: Send,
        MB: Body + From<Bytes> + Clone + Send + 'static,
        CB: Body + Send + Unpin + 'static,
        CB::Error: Into<BoxError>,
    {
        for org in &self.orgs {
            OrgAuthLayer::new(org)?;
        }
        let orgs = self.orgs.clone();
        self.open_with(client, |org, client| member(org, &orgs, client).expect("it was checked a moment ago")).await
    }

    /// The same with a service of its own for each org, made of a clone of `client`. It takes requests relative to the org's base URL,
    /// and gives answers as they come: where it gathers successes, results of a batch are held in memory whole.
    ///
    /// # Errors
    /// See [`BatchOpenError`].
    pub async fn open_with<C, M, MB, CB, RB>(
        self,
        client: C,
        member: impl Fn(&Org, C) -> M,
    ) -> Result<BatchService<RB>, BatchOpenError>
    where
        C: Clone,
        M: Service<Request<MB>, Response = Response<CB>> + Clone + Send + 'static,
        M::Error: Into<BoxError>,
        M::Future: Send,
        MB: From<Bytes> + Send + 'static,
        CB: Body + Send + 'static,
        CB::Error: Into<BoxError>,
    {
        self.check()?;
        let judge = self.orgs.iter().fold(self.judge.clone().gather(Gather::Whole), JudgeLayer::scrub);
        let line = |org: &Org| Line {
            org: org.clone(),
            name: org.name().into(),
            wire: Box::new(Member::new(member(org, client.clone()), self.timeout)) as Box<dyn Wire>,
            judge: judge.clone(),
        };
        let lines: Vec<_> = self.orgs.iter().map(line).collect();
        drop(client);
        self.load(lines).await
    }

    async fn load<RB>(self, lines: Vec<Line>) -> Result<BatchService<RB>, BatchOpenError> {
        let bounds = self.api.bounds();
        let state = State::of(lines.len());
        let shared = Shared {
            works: Arc::<Works>::default(),
            most: Size::most(self.chunk_rows, self.chunk_bytes.unwrap_or(bounds.bytes), bounds),
            api: self.api,
            store: self.store,
            lines,
            law: self.law,
            linger: self.linger,
            in_flight: self.in_flight,
            headers: self.headers,
            wall: self.wall,
            cancel_on_exit: self.cancel_on_exit,
            state: Mutex::new(state),
        };
        let now = (shared.wall)();
        let (mut records, mut gone) = (vec![], vec![]);
        for (token, bytes) in shared.store.load().await.map_err(BatchOpenError::Store)? {
            let record = Record::read(&bytes).filter(|record| record.token == token);
            let record = record.ok_or_else(|| {
                BatchOpenError::Store(StoreError::new(format!(
                    "the record of batch submission {token} cannot be read: it is damaged, or of a later version"
                )))
            })?;
            // By the provider's clock too: ours may have been wrong when it was written.
            let latest = record.expires.max(record.created).max(Some(record.since)).unwrap_or(record.since);
            let is_old = now.duration_since(latest).is_ok_and(|age| age > KEPT);
            if is_old { gone.push(token) } else { records.push(record) }
        }
        for token in gone {
            let change = BatchChange::new(token, None, BatchRows::Drop);
            shared.store.write(change).await.map_err(BatchOpenError::Store)?;
        }
        shared.remember(records);
        Ok(BatchService::new(shared))
    }

    fn check(&self) -> Result<(), BuildError> {
        let bounds = self.api.bounds();
        let second = Duration::from_secs(1);
        let Law { poll_first, poll_longest, grace, stuck_after, look_again, .. } = self.law;
        let hour = Duration::from_secs(3600);
        let checks = [
            ("chunk_rows", self.chunk_rows >= 1, "must be at least 1".to_owned()),
            ("chunk_rows", self.chunk_rows <= bounds.rows, format!("the provider takes at most {} rows", bounds.rows)),
            ("chunk_bytes", self.chunk_bytes != Some(0), "must be at least 1".to_owned()),
            (
                "chunk_bytes",
                self.chunk_bytes.is_none_or(|bytes| bytes <= bounds.bytes),
                format!("the provider takes at most {} bytes", bounds.bytes),
            ),
            ("in_flight", self.in_flight >= 1, "must be at least 1: nothing would ever be submitted".to_owned()),
            ("linger", self.linger <= hour, "must be at most an hour".to_owned()),
            ("timeout", self.timeout >= second, "must be at least a second".to_owned()),
            ("timeout", self.timeout <= hour, "must be at most an hour".to_owned()),
            ("poll", poll_first >= second, "the first wait must be at least a second".to_owned()),
            ("poll", poll_longest >= poll_first, "the longest wait must not be shorter than the first".to_owned()),
            ("poll", poll_longest <= hour, "the longest wait must be at most an hour".to_owned()),
            ("grace", grace <= Duration::from_secs(7 * 24 * 3600), "must be at most a week".to_owned()),
            (
                "stuck_after",
                stuck_after.is_none_or(|after| after >= second),
                "must be at least a second, or none".to_owned(),
            ),
            ("look_again", look_again >= second, "must be at least a second".to_owned()),
            ("look_again", look_again <= hour, "must be at most an hour".to_owned()),
        ];
        match checks.into_iter().find(|(_, fine, _)| !fine) {
            Some((field, _, problem)) => Err(BuildError::new(field, problem)),
            None => Ok(()),
        }
    }
}

/// The ready-made service of one of these orgs for calls about batches: its key, what answers mean, and its limits.
///
/// # Errors
/// If its base URL or credential cannot go into a request.
fn member<C: Clone>(org: &Org, orgs: &Orgs, client: C) -> Result<stack::Member<C>, BuildError> {
    let auth = OrgAuthLayer::new(org)?.layer(client);
    let org = org.family(&Family::new("batches"));
    // Successes are read as they come: results may be larger than what a judge gathers, and a batch has an `error` that is none.
    let judge = orgs.iter().fold(JudgeLayer::new().gather(Gather::ErrorsOnly), JudgeLayer::scrub);
    let judged = judge.layer(auth);
    let limited = AimdLimitLayer::new(&org).classify(Stamped).layer(QuotaHeaderLayer::new(&org).layer(judged));
    Ok(OrgHealthLayer::new(&org).classify(Stamped).layer(limited))
}

impl fmt::Debug for BatchBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchBuilder")
            .field("orgs", &self.orgs)
            .field("api", &self.api)
            .field("chunk_rows", &self.chunk_rows)
            .field("chunk_bytes", &self.chunk_bytes)
            .field("in_flight", &self.in_flight)
            .field("linger", &self.linger)
            .field("law", &self.law)
            .field("cancel_on_exit", &self.cancel_on_exit)
            .finish_non_exhaustive()
    }
}

/// Why a [`BatchService`] cannot be opened.
#[non_exhaustive]
#[derive(Debug)]
pub enum BatchOpenError {
    /// A setting is out of its range, or an org cannot be asked.
    Config(BuildError),
    /// The records cannot be read. Nothing was submitted: what they say might be paid for twice.
    Store(StoreError),
}

impl From<BuildError> for BatchOpenError {
    fn from(error: BuildError) -> Self {
        BatchOpenError::Config(error)
    }
}

impl fmt::Display for BatchOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchOpenError::Config(error) => error.fmt(f),
            BatchOpenError::Store(_) => f.write_str("the records of batches cannot be read, so nothing is submitted"),
        }
    }
}

impl StdError for BatchOpenError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            BatchOpenError::Config(error) => error.source(),
            BatchOpenError::Store(error) => Some(error),
        }
    }
}
