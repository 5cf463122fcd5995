//! An org: a name, a credential, where it is reached, and its *board*.
//!
//! The board has one cell a layer (limit, hold, quota, health, identity, out), written by that layer and read by the balancer, by
//! whoever watches, and by you. Quota, limit and hold are kept per org *and* model [`Family`], because that is how
//! providers count: [`Org::family`] gives the same org's handle for one family, with a board of its own. The handle that
//! [`Org::new`] made is read for the whole org, all families together.
//!
//! Whose quota a key is counted on is said by the answers: they name the provider's own id for the org
//! ([`Snapshot::organisation`]), not the key. Two keys of one organisation are one quota, so in a pool the second is a *spare*
//! ([`Standing::Spare`], [`Org::spare_of`]), which takes over when the first dies: see [`balance`](crate::balance#spares).
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_quota::{aimd::AimdLimitLayer, org::{Credential, Family, Org}};
//!
//! let org = Org::new("research").credential(Credential::new("sk-secret"));
//! assert_eq!(format!("{:?}", org.key()), "Some(Credential(***))", "no formatting prints a key");
//!
//! let haiku = org.family(&Family::of_model("claude-haiku-4-5"));
//! let mut client = AimdLimitLayer::new(&haiku).layer(service_fn(async |_: http::Request<String>| {
//!     Ok::<_, std::io::Error>(http::Response::new(String::new()))
//! }));
//! client.ready().await?; // a slot is reserved
//! let sonnet = org.family(&Family::of_model("claude-sonnet-4-5"));
//! assert_eq!([&haiku, &sonnet, &org].map(|org| org.snapshot().in_flight), [1, 0, 1]);
//! # Ok(()) }
//! ```

mod board;
mod credential;
mod family;
mod identity;
mod meter;
mod observers;
mod orgs;
mod snapshot;
mod standing;
mod tuning;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use http::Uri;

use self::board::Board;
pub use self::{
    credential::{Credential, Dialect},
    family::Family,
    meter::ResourceQuota,
    orgs::{BuildError, Orgs},
    snapshot::{Change, Circuit, Hold, HoldReason, LimitCell, OutReason, Snapshot, Why},
    standing::{Drained, EnabledAgain, Standing},
    tuning::Tuning,
};
pub(crate) use self::{identity::Spare, meter::Meters, standing::Membership};

struct Identity {
    name: Arc<str>,
    credential: Option<Credential>,
    base_url: Option<Uri>,
    dialect: Dialect,
    cap: Option<usize>,
    quota: identity::Cell,
    /// For families that come later.
    tuning: Mutex<Tuning>,
    out: Mutex<Option<OutReason>>,
    standing: standing::Cell,
    families: Mutex<BTreeMap<Family, Arc<Board>>>,
    observers: observers::Cell,
}

/// A handle to an org: to the whole of it, as made by [`new`](Org::new) and the building steps, or to one model family of it,
/// as made by [`family`](Org::family). Cheap to clone; all clones show the same.
///
/// A handle to the whole *reads* all families together: [`snapshot`](Org::snapshot), [`is_held`](Org::is_held),
/// [`not_before`](Org::not_before), [`headroom`](Org::headroom), [`is_out`](Org::is_out). What is made for it (a limiter, a
/// quota) and what is done to one family through it counts for the family of requests that name none.
#[derive(Clone)]
pub struct Org {
    identity: Arc<Identity>,
    board: Arc<Board>,
    /// It is read for all families.
    whole: bool,
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
            quota: identity::Cell::default(),
            tuning: Mutex::default(),
            out: Mutex::default(),
            standing: standing::Cell::default(),
            families: Mutex::default(),
            observers: observers::Cell::default(),
        })
    }

    fn with(identity: Identity) -> Self {
        let board = Board::new(Family::default(), false, *lock(&identity.tuning));
        lock(&identity.families).insert(Family::default(), board.clone());
        Org { identity: Arc::new(identity), board, whole: true }
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
            quota: identity::Cell::default(),
            tuning: Mutex::new(*lock(&old.tuning)),
            out: Mutex::default(),
            standing: standing::Cell::default(),
            families: Mutex::default(),
            observers: observers::Cell::default(),
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

    /// The model family of this handle; of one to the whole org, the family of requests that name none.
    #[must_use]
    pub fn model_family(&self) -> &Family {
        &self.board.family
    }

    /// The same org for one model family, with that family's board.
    #[must_use]
    pub fn family(&self, family: &Family) -> Org {
        let mut families = lock(&self.identity.families);
        let out = lock(&self.identity.out).is_some();
        let tuning = *lock(&self.identity.tuning);
        let board = match families.get(family) {
            Some(board) => board.clone(),
            None => families.entry(family.bare()).or_insert(Board::new(family.bare(), out, tuning)).clone(),
        };
        Org { identity: self.identity.clone(), board, whole: false }
    }

    /// The handles of all families that were asked for so far. [`Family::default`], `any`, may be among them with nothing known.
    #[must_use]
    pub fn families(&self) -> Vec<Org> {
        let of = |board| Org { identity: self.identity.clone(), board, whole: false };
        self.boards().into_iter().map(of).collect()
    }

    /// The boards of all families.
    fn boards(&self) -> Vec<Arc<Board>> {
        lock(&self.identity.families).values().cloned().collect()
    }

    /// Whether this handle is read for all families together.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole
    }

    /// The handle of the whole org.
    fn of_whole(&self) -> Org {
        Org { identity: self.identity.clone(), board: self.board.clone(), whole: true }
    }

    /// Whether both handles show the same board.
    #[must_use]
    pub fn same_board(&self, other: &Org) -> bool {
        Arc::ptr_eq(&self.board, &other.board)
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
