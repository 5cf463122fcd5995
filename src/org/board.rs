//! The board of an org for one model family: what each layer has written on it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::Waker,
    time::Duration,
};

use tokio::time::Instant;

use super::{Change, Family, Hold, LimitCell, Org, OutReason, Snapshot, Why, lock};

/// How many changes a board remembers: the last half minute of a provider that refuses every other second.
const HISTORY: usize = 32;

/// Half-life of the penalty that failures put on an org's load. Long against a call, short against a run.
const PENALTY_HALF_LIFE: Duration = Duration::from_secs(5);
/// Beyond this a penalty does not grow: a demoted org is still found again within half a minute.
const PENALTY_MAX: f64 = 16.0;

pub(super) struct Board {
    pub(super) family: Family,
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

impl Org {
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
    pub(super) fn new(family: Family, is_out: bool) -> Arc<Self> {
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
