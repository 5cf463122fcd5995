//! An org: a name, a credential, where it is reached, and its *board*.
//!
//! The board has one cell a layer (limit, hold, quota, identity, out), written by that layer and read by the balancer, by
//! whoever watches, and by you. Quota, limit and hold are kept per org *and* model [`Family`], because that is how
//! providers count: [`Org::family`] gives the same org's handle for another family, with a board of its own.
//!
//! ```
//! use tower_quota::org::{Credential, Family, Org};
//!
//! let org = Org::new("research").credential(Credential::new("sk-secret"));
//! assert_eq!(format!("{:?}", org.key()), "Some(Credential(***))", "no formatting prints a key");
//! let haiku = org.family(&Family::of_model("claude-haiku-4-5"));
//! assert_eq!(haiku.name(), "research");
//! assert_eq!(haiku.snapshot().in_flight, 0);
//! ```

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::Waker,
    time::Duration,
};

use http::{HeaderValue, Uri};
use tokio::time::Instant;

/// A secret that no formatting prints.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(Arc<str>);

impl Credential {
    /// Wraps a secret. Surrounding blanks are cut off, since a pasted key often brings some.
    #[must_use]
    pub fn new(secret: &str) -> Self {
        Credential(Arc::from(secret.trim()))
    }

    /// The secret itself. Whoever calls this sees to it that it goes nowhere but onto the wire.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// A header value marked sensitive, so that HTTP/2 does not index it and `Debug` does not print it.
    ///
    /// # Errors
    /// If the secret has characters that no header may carry.
    pub fn header(&self, prefix: &str) -> Result<HeaderValue, http::header::InvalidHeaderValue> {
        let mut value = HeaderValue::from_str(&format!("{prefix}{}", self.0))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(***)")
    }
}

/// Which models share a quota. A request names its family by this extension; without one it belongs to
/// [`Family::default`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Family(Arc<str>);

impl Family {
    /// A family by its name, as is.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Family(Arc::from(name))
    }

    /// The family of a model id: `sonnet`, `haiku` or `opus` where the id contains that word in any case; else the model's
    /// own id, lower case, without a trailing date (`gpt-4o-2024-08-06` is `gpt-4o`), since such providers count per model.
    #[must_use]
    pub fn of_model(model: &str) -> Self {
        let model = model.trim().to_ascii_lowercase();
        for known in ["sonnet", "haiku", "opus"] {
            if model.contains(known) {
                return Family::new(known);
            }
        }
        if model.is_empty() {
            return Family::default();
        }
        // What is left when a tail of digits and dashes with at least six digits is cut off.
        let stem = model.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
        let digits = model[stem.len()..].bytes().filter(u8::is_ascii_digit).count();
        let dated = model[stem.len()..].starts_with('-') && digits >= 6;
        Family::new(if dated && !stem.is_empty() { stem } else { &model })
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Family {
    /// The family of requests that name none: `any`.
    fn default() -> Self {
        Family::new("any")
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which provider's API an org speaks: how the key travels and what the bodies look like.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `x-api-key` and `anthropic-version`; default base URL `https://api.anthropic.com`.
    #[default]
    Anthropic,
    /// `authorization: Bearer`; default base URL `https://api.openai.com`.
    OpenAi,
}

impl Dialect {
    /// The short name used in configuration: `anthropic` or `openai`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Anthropic => "anthropic",
            Dialect::OpenAi => "openai",
        }
    }

    /// Where the provider is reached unless an org says otherwise.
    #[must_use]
    pub fn default_base_url(self) -> Uri {
        Uri::from_static(match self {
            Dialect::Anthropic => "https://api.anthropic.com",
            Dialect::OpenAi => "https://api.openai.com",
        })
    }
}

/// Why an org is not asked any more.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OutReason {
    /// Its key is refused (401), or not allowed this model (403).
    Unauthorised,
    /// Its money or hard quota is used up.
    OutOfQuota,
    /// Somebody said so through [`Org::put_out`].
    Disabled(Arc<str>),
}

impl fmt::Display for OutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OutReason::Unauthorised => f.write_str("its key is refused: check or rotate it"),
            OutReason::OutOfQuota => f.write_str("its quota or credit is used up"),
            OutReason::Disabled(why) => f.write_str(why),
        }
    }
}

/// Why an org is held.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldReason {
    /// The provider named a time.
    Hint,
    /// It refused without naming a time, when one call alone was already too many.
    Backoff,
    /// The provider named a time beyond the ceiling: the org is parked, and asked by one call now and then.
    Parked,
}

impl fmt::Display for HoldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HoldReason::Hint => "429 with a hint",
            HoldReason::Backoff => "429 without a hint",
            HoldReason::Parked => "429 with a hint beyond the ceiling",
        })
    }
}

/// An org that is not to be called before some time.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// When the next call may go.
    pub until: Instant,
    /// Why.
    pub reason: HoldReason,
}

impl Hold {
    pub(crate) const fn new(until: Instant, reason: HoldReason) -> Self {
        Hold { until, reason }
    }
}

/// The limiter's cell of a board.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimitCell {
    /// Concurrent calls allowed now, as the law has it (a real number).
    pub limit: f64,
    /// The most it may ever be.
    pub cap: usize,
    /// How many congestion epochs have begun: cuts and holds.
    pub epoch: u64,
    /// Throttled answers seen.
    pub throttled: u64,
    /// Calls started a second at most, where even one call at a time proved too many.
    pub pace: Option<f64>,
}

/// Why a limit or a pace changed.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// Full, clean windows: consecutive ones are one change.
    Grown,
    /// A 429 without a hint.
    Refused,
    /// A 429 with a hint.
    Held,
    /// More refusals of the burst that the last change was for: it came nearer to what had fitted.
    Refined,
    /// Refused again before anything that was sent after the last change was answered: the limit has dropped.
    RefusedAgain,
    /// Calls were refused though almost nothing else was in flight: it is the rate that is limited, so starts are paced.
    PaceBegan,
    /// A pace was kept for a while without a refusal: consecutive ones are one change.
    PaceGrown,
    /// A 429 though paced.
    PaceRefused,
    /// Starts no longer waited for the pace: slots limit alone.
    PaceEnded,
    /// Slower calls were refused as often: it is not the rate that is limited, so slots limit alone.
    PaceFutile,
}

impl Why {
    /// Whether the change speaks of the pace, in calls a second, and not of the limit, in slots.
    #[must_use]
    pub const fn is_pace(self) -> bool {
        matches!(self, Why::PaceBegan | Why::PaceGrown | Why::PaceRefused | Why::PaceEnded | Why::PaceFutile)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Grown => "full and clean",
            Why::Refused => "429 without a hint",
            Why::Held => "429 with a hint",
            Why::Refined => "more of the same burst refused",
            Why::RefusedAgain => "429 again, nothing answered since",
            Why::PaceBegan => "429 with almost nothing in flight: the rate is limited",
            Why::PaceGrown => "pace kept without a 429",
            Why::PaceRefused => "429 at this pace",
            Why::PaceEnded => "pace no longer binds",
            Why::PaceFutile => "slower calls were refused as often",
        })
    }
}

/// One change of a limit or of a pace.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// When: for growth the last step of it.
    pub at: Instant,
    /// From what: slots, or calls a second where [`Why::is_pace`]. A pace that begins comes from infinity.
    pub from: f64,
    /// To what. A pace that ends goes to infinity.
    pub to: f64,
    /// Why.
    pub why: Why,
}

impl Change {
    pub(crate) const fn new(at: Instant, from: f64, to: f64, why: Why) -> Self {
        Change { at, from, to, why }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.why.is_pace() { "calls/s" } else { "slots" };
        write!(f, "{:.1} to {:.1} {unit}: {}", self.from, self.to, self.why)
    }
}

/// How many changes a board remembers: the last half minute of a provider that refuses every other second.
const HISTORY: usize = 32;

/// All that a board says at one moment.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The org's name.
    pub name: Arc<str>,
    /// The model family.
    pub family: Family,
    /// Calls in flight, reservations included.
    pub in_flight: usize,
    /// Services that wait for one of its slots.
    pub waiting: usize,
    /// The limiter's cell; `None` where no limiter writes this board.
    pub limit: Option<LimitCell>,
    /// The hold, if one is open.
    pub hold: Option<Hold>,
    /// The last 32 changes of limit and pace, oldest first.
    pub history: Vec<Change>,
    /// Whether the provider's answers tell its quota; where they do not, the limiter has to find out.
    pub quota_told: bool,
    /// The least fraction left of any of its quotas, `0.0..=1.0`; 1 where nothing is known.
    pub headroom: f64,
    /// Why it is out, if it is.
    pub out: Option<OutReason>,
    /// The provider's own id for the org, from its answers: two keys with one id share one quota.
    pub organisation: Option<Arc<str>>,
}

struct Identity {
    name: Arc<str>,
    credential: Option<Credential>,
    base_url: Option<Uri>,
    dialect: Dialect,
    cap: Option<usize>,
    organisation: Mutex<Option<Arc<str>>>,
    out: Mutex<Option<OutReason>>,
    families: Mutex<BTreeMap<Family, Arc<Board>>>,
}

/// Half-life of the penalty that failures put on an org's load. Long against a call, short against a run.
const PENALTY_HALF_LIFE: Duration = Duration::from_secs(5);
/// Beyond this a penalty does not grow: a demoted org is still found again within half a minute.
const PENALTY_MAX: f64 = 16.0;

struct Board {
    family: Family,
    born: Instant,
    limit: AtomicU64,
    in_flight: AtomicUsize,
    waiting: AtomicUsize,
    headroom: AtomicU64,
    headroom_rate: AtomicU64,
    headroom_at: AtomicU64,
    penalty: AtomicU64,
    penalty_at: AtomicU64,
    is_out: AtomicBool,
    quota_told: AtomicBool,
    revision: AtomicU64,
    slow: Mutex<Slow>,
}

/// What changes rarely, or is read rarely.
#[derive(Default)]
struct Slow {
    limit: Option<LimitCell>,
    hold: Option<Hold>,
    history: VecDeque<Change>,
    out: Option<OutReason>,
    watchers: Vec<Waker>,
}

impl Slow {
    /// Steps of one growth, and of one burst of refusals, are one change.
    fn remember(&mut self, change: Change) {
        if let Some(last) = self.history.back_mut() {
            let steps = matches!(change.why, Why::Grown | Why::PaceGrown | Why::Refined);
            if steps && last.why == change.why {
                last.at = change.at;
                last.to = change.to;
                return;
            }
        }
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(change);
    }
}

/// A handle to an org, for one model family. Cheap to clone; all clones show the same board.
#[derive(Clone)]
pub struct Org {
    identity: Arc<Identity>,
    board: Arc<Board>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Org {
    /// An org by its name, without a credential: enough where the client below brings its own.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Org::with(Identity {
            name: Arc::from(name),
            credential: None,
            base_url: None,
            dialect: Dialect::default(),
            cap: None,
            organisation: Mutex::default(),
            out: Mutex::default(),
            families: Mutex::default(),
        })
    }

    fn with(identity: Identity) -> Self {
        let board = Board::new(Family::default(), false);
        lock(&identity.families).insert(Family::default(), board.clone());
        Org { identity: Arc::new(identity), board }
    }

    /// Before an org is shared its parts may be set; a clone made earlier keeps the old ones and is another org.
    fn rebuild(self, change: impl FnOnce(&mut Identity)) -> Self {
        let old = &self.identity;
        let mut identity = Identity {
            name: old.name.clone(),
            credential: old.credential.clone(),
            base_url: old.base_url.clone(),
            dialect: old.dialect,
            cap: old.cap,
            organisation: Mutex::default(),
            out: Mutex::default(),
            families: Mutex::default(),
        };
        change(&mut identity);
        Org::with(identity)
    }

    /// Sets the credential. A building step: it makes a new org with a fresh board.
    #[must_use]
    pub fn credential(self, credential: Credential) -> Self {
        self.rebuild(|identity| identity.credential = Some(credential))
    }

    /// Sets where the org is reached: scheme, host, and a path prefix if any. A building step.
    #[must_use]
    pub fn base_url(self, base_url: Uri) -> Self {
        self.rebuild(|identity| identity.base_url = Some(base_url))
    }

    /// Sets the API it speaks. A building step.
    #[must_use]
    pub fn dialect(self, dialect: Dialect) -> Self {
        self.rebuild(|identity| identity.dialect = dialect)
    }

    /// Sets the most concurrent calls, instead of the family's default. A building step.
    #[must_use]
    pub fn cap(self, cap: usize) -> Self {
        self.rebuild(|identity| identity.cap = Some(cap))
    }

    /// The name, for people.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.identity.name
    }

    pub(crate) fn shared_name(&self) -> Arc<str> {
        self.identity.name.clone()
    }

    /// The credential, if it has one.
    #[must_use]
    pub fn key(&self) -> Option<&Credential> {
        self.identity.credential.as_ref()
    }

    /// Where it is reached: its own base URL, else its dialect's.
    #[must_use]
    pub fn reached_at(&self) -> Uri {
        self.identity.base_url.clone().unwrap_or_else(|| self.identity.dialect.default_base_url())
    }

    /// The API it speaks.
    #[must_use]
    pub fn speaks(&self) -> Dialect {
        self.identity.dialect
    }

    /// The most concurrent calls it was given, if any.
    #[must_use]
    pub fn own_cap(&self) -> Option<usize> {
        self.identity.cap
    }

    /// The model family of this handle.
    #[must_use]
    pub fn model_family(&self) -> &Family {
        &self.board.family
    }

    /// The same org for another model family, with that family's board.
    #[must_use]
    pub fn family(&self, family: &Family) -> Org {
        let mut families = lock(&self.identity.families);
        let out = lock(&self.identity.out).is_some();
        let board = families.entry(family.clone()).or_insert_with(|| Board::new(family.clone(), out)).clone();
        Org { identity: self.identity.clone(), board }
    }

    /// The handles of all families that were asked for so far.
    #[must_use]
    pub fn families(&self) -> Vec<Org> {
        let families = lock(&self.identity.families);
        families.values().map(|board| Org { identity: self.identity.clone(), board: board.clone() }).collect()
    }

    /// Whether both handles show the same board.
    #[must_use]
    pub fn same_board(&self, other: &Org) -> bool {
        Arc::ptr_eq(&self.board, &other.board)
    }

    /// How loaded it is, lower is better: `(in flight + 1) / limit`, then how little quota is left, then a penalty for
    /// recent failures that halves every five seconds. Without a limiter the bare number of calls stands for the first.
    #[must_use]
    pub fn load(&self) -> f64 {
        let busy = self.board.in_flight.load(Relaxed) as f64 + 1.0;
        let limit = f64::from_bits(self.board.limit.load(Relaxed));
        let use_ = if limit > 0.0 { busy / limit } else { busy };
        // Headroom decides between orgs that are about equally busy.
        use_ + 0.1 * (1.0 - self.headroom()) + self.penalty()
    }

    /// The least fraction left of any of its quotas, `0.0..=1.0`. It comes back by itself, as fast as the quota does, so that an
    /// org that was nearly spent and not asked since is not avoided for ever.
    #[must_use]
    pub fn headroom(&self) -> f64 {
        let board = &self.board;
        let last = f64::from_bits(board.headroom.load(Relaxed));
        if last >= 1.0 {
            return last;
        }
        let age = Duration::from_nanos(board.since_birth().saturating_sub(board.headroom_at.load(Relaxed)));
        (last + f64::from_bits(board.headroom_rate.load(Relaxed)) * age.as_secs_f64()).min(1.0)
    }

    /// Counts the changes of what the board's rare cells say (limit, hold, out), so that a watcher can tell whether to look.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.board.revision.load(Relaxed)
    }

    /// The time before which it is not to be called, if it is held now.
    #[must_use]
    pub fn not_before(&self) -> Option<Instant> {
        let hold = lock(&self.board.slow).hold?;
        (hold.until > Instant::now()).then_some(hold.until)
    }

    /// Whether it admits no calls for now, or at all.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.is_out() || self.not_before().is_some()
    }

    /// Whether it is out, for this family or as a whole.
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.board.is_out.load(Relaxed)
    }

    /// Why it is out, if it is.
    #[must_use]
    pub fn out_reason(&self) -> Option<OutReason> {
        if !self.is_out() {
            return None;
        }
        let own = lock(&self.board.slow).out.clone();
        own.or_else(|| lock(&self.identity.out).clone())
    }

    /// Takes the org out of the run, for all families: no further call goes to it, and its waiting calls go to siblings.
    /// Says so once in the log, by name.
    pub fn put_out(&self, reason: OutReason) {
        {
            let mut out = lock(&self.identity.out);
            if out.is_some() {
                return;
            }
            *out = Some(reason.clone());
        }
        tracing::warn!(org = self.name(), %reason, "org is out");
        let boards: Vec<_> = lock(&self.identity.families).values().cloned().collect();
        for board in boards {
            board.mark_out();
        }
    }

    /// Takes the org out for this model family alone.
    pub fn put_family_out(&self, reason: OutReason) {
        {
            let mut slow = lock(&self.board.slow);
            if slow.out.is_some() {
                return;
            }
            slow.out = Some(reason.clone());
        }
        tracing::warn!(org = self.name(), family = self.model_family().as_str(), %reason, "org is out for this model family");
        self.board.mark_out();
    }

    /// All that the board says now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let out = self.out_reason();
        let slow = lock(&self.board.slow);
        Snapshot {
            name: self.identity.name.clone(),
            family: self.board.family.clone(),
            in_flight: self.board.in_flight.load(Relaxed),
            waiting: self.board.waiting.load(Relaxed),
            limit: slow.limit,
            hold: slow.hold.filter(|hold| hold.until > Instant::now()),
            history: slow.history.iter().copied().collect(),
            quota_told: self.quota_told(),
            headroom: self.headroom(),
            out,
            organisation: lock(&self.identity.organisation).clone(),
        }
    }

    // What layers write.

    pub(crate) fn write_limit(&self, cell: LimitCell, hold: Option<Hold>, changes: impl IntoIterator<Item = Change>) {
        self.board.limit.store(cell.limit.to_bits(), Relaxed);
        let mut slow = lock(&self.board.slow);
        slow.limit = Some(cell);
        slow.hold = hold;
        for change in changes {
            slow.remember(change);
        }
        self.board.revision.fetch_add(1, Relaxed);
    }

    pub(crate) fn write_in_flight(&self, in_flight: usize) {
        self.board.in_flight.store(in_flight, Relaxed);
    }

    pub(crate) fn write_waiting(&self, waiting: usize) {
        self.board.waiting.store(waiting, Relaxed);
    }

    /// What is left now, and how much comes back in a second.
    pub(crate) fn write_headroom(&self, headroom: f64, per_second: f64) {
        let board = &self.board;
        board.headroom_at.store(board.since_birth(), Relaxed);
        board.headroom_rate.store(per_second.to_bits(), Relaxed);
        board.headroom.store(headroom.clamp(0.0, 1.0).to_bits(), Relaxed);
    }

    /// The provider's answers tell its quota.
    pub(crate) fn write_quota_told(&self) {
        self.board.quota_told.store(true, Relaxed);
    }

    pub(crate) fn quota_told(&self) -> bool {
        self.board.quota_told.load(Relaxed)
    }

    pub(crate) fn write_organisation(&self, id: &str) {
        let mut organisation = lock(&self.identity.organisation);
        if organisation.as_deref() != Some(id) {
            *organisation = Some(Arc::from(id));
        }
    }

    pub(crate) fn add_penalty(&self) {
        let board = &self.board;
        let grown = (self.penalty() + 1.0).min(PENALTY_MAX);
        board.penalty_at.store(board.since_birth(), Relaxed);
        board.penalty.store(grown.to_bits(), Relaxed);
    }

    fn penalty(&self) -> f64 {
        let board = &self.board;
        let last = f64::from_bits(board.penalty.load(Relaxed));
        if last == 0.0 {
            return 0.0;
        }
        let age = Duration::from_nanos(board.since_birth().saturating_sub(board.penalty_at.load(Relaxed)));
        let now = last * (-age.as_secs_f64() / PENALTY_HALF_LIFE.as_secs_f64()).exp2();
        if now < 0.01 {
            board.penalty.store(0, Relaxed);
            return 0.0;
        }
        now
    }

    /// Wakes `waker` whenever the org is put out. It is kept for the board's life.
    pub(crate) fn watch(&self, waker: Waker) {
        lock(&self.board.slow).watchers.push(waker);
    }
}

impl Board {
    fn new(family: Family, is_out: bool) -> Arc<Self> {
        Arc::new(Board {
            family,
            born: Instant::now(),
            limit: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            headroom: AtomicU64::new(1.0f64.to_bits()),
            headroom_rate: AtomicU64::new(0),
            headroom_at: AtomicU64::new(0),
            penalty: AtomicU64::new(0),
            penalty_at: AtomicU64::new(0),
            is_out: AtomicBool::new(is_out),
            quota_told: AtomicBool::new(false),
            revision: AtomicU64::new(0),
            slow: Mutex::default(),
        })
    }

    fn since_birth(&self) -> u64 {
        let nanos = Instant::now().saturating_duration_since(self.born).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    fn mark_out(&self) {
        self.is_out.store(true, std::sync::atomic::Ordering::SeqCst);
        self.revision.fetch_add(1, Relaxed);
        let watchers = lock(&self.slow).watchers.clone();
        for watcher in watchers {
            watcher.wake();
        }
    }
}

impl fmt::Debug for Org {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Org")
            .field("name", &self.name())
            .field("family", &self.board.family.as_str())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Orgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Org::name)).finish()
    }
}

/// A pool: one provider's orgs, whose quotas add up. Never empty, no name twice, one dialect.
#[derive(Clone)]
pub struct Orgs(Arc<[Org]>);

/// Why a configuration is refused: which field, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    field: String,
    problem: String,
}

impl BuildError {
    /// A refusal of `field` because of `problem`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        BuildError { field: field.into(), problem: problem.into() }
    }

    /// The field or variable that is wrong.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for BuildError {}

impl Orgs {
    /// A pool of these orgs.
    ///
    /// # Errors
    /// If there is none, if two share a name, if they speak different dialects, or if a cap is zero.
    pub fn new(orgs: impl IntoIterator<Item = Org>) -> Result<Self, BuildError> {
        let orgs: Arc<[Org]> = orgs.into_iter().collect();
        let Some(first) = orgs.first() else {
            return Err(BuildError::new("orgs", "at least one org is needed"));
        };
        for (i, org) in orgs.iter().enumerate() {
            if orgs[..i].iter().any(|other| other.name() == org.name()) {
                return Err(BuildError::new(format!("org {:?}", org.name()), "this name is given twice"));
            }
            if org.speaks() != first.speaks() {
                return Err(BuildError::new(
                    format!("org {:?}", org.name()),
                    format!(
                        "it speaks {}, but {:?} speaks {}: a pool holds one provider",
                        org.speaks().name(),
                        first.name(),
                        first.speaks().name()
                    ),
                ));
            }
            if org.own_cap() == Some(0) {
                return Err(BuildError::new(
                    format!("org {:?}: cap", org.name()),
                    "must be at least 1; to leave an org unused, remove it",
                ));
            }
        }
        Ok(Orgs(orgs))
    }

    /// The orgs, in the order given.
    pub fn iter(&self) -> std::slice::Iter<'_, Org> {
        self.0.iter()
    }

    /// How many, at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a pool is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The org of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Org> {
        self.iter().find(|org| org.name() == name)
    }

    /// The pool reduced to the org of that name.
    ///
    /// # Errors
    /// If there is no such org; the error names those there are.
    pub fn only(&self, name: &str) -> Result<Self, BuildError> {
        let org = self.get(name).cloned().ok_or_else(|| {
            let names: Vec<_> = self.iter().map(Org::name).collect();
            BuildError::new(format!("org {name:?}"), format!("no such org; there are: {}", names.join(", ")))
        })?;
        Orgs::new([org])
    }

    /// What API they speak.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.0[0].speaks()
    }
}

impl<'a> IntoIterator for &'a Orgs {
    type Item = &'a Org;
    type IntoIter = std::slice::Iter<'a, Org>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(steps: &[(f64, f64, Why)]) -> Vec<(f64, f64, Why)> {
        let org = Org::new("a");
        let now = Instant::now();
        for (from, to, why) in steps {
            org.write_limit(LimitCell::default(), None, [Change::new(now, *from, *to, *why)]);
        }
        org.snapshot().history.iter().map(|change| (change.from, change.to, change.why)).collect()
    }

    #[test]
    fn steps_of_one_growth_are_one_change() {
        let steps = [(1.0, 2.0, Why::Grown), (2.0, 4.0, Why::Grown), (4.0, 3.0, Why::Refused), (3.0, 4.0, Why::Grown)];
        assert_eq!(history(&steps), [(1.0, 4.0, Why::Grown), (4.0, 3.0, Why::Refused), (3.0, 4.0, Why::Grown)]);
        let refused = [(4.0, 3.0, Why::Refused), (3.0, 2.0, Why::Refused)];
        assert_eq!(history(&refused), refused, "cuts stay apart");
    }

    #[test]
    fn a_board_remembers_the_last_changes_only() {
        let steps: Vec<_> = (0..100).map(|i| (f64::from(i), f64::from(i) - 1.0, Why::Refused)).collect();
        assert_eq!(history(&steps), steps[100 - HISTORY..]);
    }

    #[test]
    fn a_change_says_what_and_why() {
        let change = Change::new(Instant::now(), 25.0, 20.0, Why::Refused);
        assert_eq!(change.to_string(), "25.0 to 20.0 slots: 429 without a hint");
        let change = Change::new(Instant::now(), 10.0, 9.7, Why::PaceRefused);
        assert_eq!(change.to_string(), "10.0 to 9.7 calls/s: 429 at this pace");
    }
}
