//! The board of an org for one model family: what each layer has written on it.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, Weak,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
    task::Waker,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    BuildError, Change, Circuit, Family, Hold, HoldReason, LimitCell, Meters, Org, OutReason, Snapshot, Tuning, Why,
    lock,
};

/// How many changes a board remembers: the last half minute of a provider that refuses every other second.
const HISTORY: usize = 32;

/// Half-life of the penalty that failures put on an org's load. It bridges the time until a circuit opens, and an org that failed too
/// rarely for that has to be found again within five seconds though its siblings have slots to spare: so it is short against those.
const PENALTY_HALF_LIFE: Duration = Duration::from_secs(1);
/// Beyond this a penalty does not grow: a demoted org is still found again within seven seconds.
const PENALTY_MAX: f64 = 16.0;

/// Half-life of what an org's health lacks. Nobody may ask one whose health is low, so it has to come back by itself; a circuit
/// keeps out whoever fails still.
const HEALTH_HALF_LIFE: Duration = Duration::from_secs(10);

pub(super) struct Board {
    pub(super) family: Family,
    born: Instant,
    /// What its calls in flight are measured by: limit × weight.
    share: AtomicU64,
    /// What the limiter counts.
    in_flight: AtomicUsize,
    /// What balancers count: calls given to it whose answer has not come.
    bound: AtomicUsize,
    waiting: AtomicUsize,
    headroom: AtomicU64,
    headroom_rate: AtomicU64,
    headroom_at: AtomicU64,
    penalty: AtomicU64,
    penalty_at: AtomicU64,
    health: AtomicU64,
    health_at: AtomicU64,
    pub(super) is_out: AtomicBool,
    /// Whether anything is in `refused`, so that whoever asks mostly need not lock.
    refuses_any: AtomicBool,
    quota_told: AtomicBool,
    revision: AtomicU64,
    slow: Mutex<Slow>,
}

/// What changes rarely, or is read rarely.
#[derive(Default)]
struct Slow {
    limit: Option<LimitCell>,
    hold: Option<Hold>,
    circuit: Circuit,
    /// When access comes back.
    parked: Option<Instant>,
    history: VecDeque<Change>,
    tuning: Tuning,
    meters: Option<Weak<dyn Meters>>,
    out: Option<OutReason>,
    /// Models that its key is not allowed.
    refused: Vec<Arc<str>>,
    on_out: Watchers,
    on_tuning: Watchers,
}

/// Who is woken whenever something happens, until it is taken out.
#[derive(Clone, Default)]
pub(super) struct Watchers(Vec<Waker>);

impl Watchers {
    pub(super) fn add(&mut self, waker: &Waker) {
        self.0.push(waker.clone());
    }

    /// The one that is taken out is for dropping under no lock.
    pub(super) fn remove(&mut self, waker: &Waker) -> Option<Waker> {
        let at = self.0.iter().position(|other| other.will_wake(waker))?;
        Some(self.0.swap_remove(at))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Never under a lock.
    pub(super) fn wake(self) {
        self.0.into_iter().for_each(Waker::wake);
    }
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

    fn weight(&self) -> f64 {
        self.tuning.weight.unwrap_or(1.0)
    }

    /// Without a limiter the bare number of calls is weighed.
    fn share(&self) -> f64 {
        self.limit.map_or(1.0, |cell| cell.limit) * self.weight()
    }
}

impl Org {
    /// How loaded it is for this handle's [`model_family`](Org::model_family), lower is better: `(in flight + 1) / (limit ×
    /// weight)`, then how little quota is left, then a penalty for recent failures that halves every second. Without a
    /// limiter the bare number of calls stands for the first.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.load_at(Instant::now)
    }

    /// Calls of this handle's model family that hold a slot; none where no limiter counts them.
    pub(crate) fn in_flight(&self) -> usize {
        self.board.in_flight()
    }

    /// The same at a time that is asked for only where it matters, once or twice.
    pub(crate) fn load_at(&self, now: impl Fn() -> Instant) -> f64 {
        let busy = self.board.in_flight() as f64 + 1.0;
        let share = f64::from_bits(self.board.share.load(Relaxed));
        // Headroom decides between orgs that are about equally busy.
        busy / share + 0.1 * (1.0 - self.board.headroom(&now)) + self.board.penalty(&now)
    }

    /// The least fraction left of any of its quotas, `0.0..=1.0`. It comes back by itself, as fast as the quota does, so
    /// that an org that was nearly spent and not asked since is not avoided for ever. Of a whole org, the least of all its
    /// families.
    #[must_use]
    pub fn headroom(&self) -> f64 {
        match self.whole {
            false => self.board.headroom(Instant::now),
            true => self.boards().iter().map(|board| board.headroom(Instant::now)).fold(1.0, f64::min),
        }
    }

    /// How well it has done lately, `0.0..=1.0`. What it lacks halves every ten seconds by itself, so that an org that failed and
    /// was not asked since is not avoided for ever. Of a whole org that of its worst family.
    #[must_use]
    pub fn health(&self) -> f64 {
        self.health_at(Instant::now)
    }

    /// The same at a time that is asked for only where it matters.
    pub(crate) fn health_at(&self, now: impl Fn() -> Instant) -> f64 {
        match self.whole {
            false => self.board.health(now),
            true => self.boards().iter().map(|board| board.health(&now)).fold(1.0, f64::min),
        }
    }

    /// Its circuit. Of a whole org that of the family that is worst off.
    #[must_use]
    pub fn circuit(&self) -> Circuit {
        if !self.whole {
            return self.board.circuit();
        }
        let circuits = self.boards().into_iter().map(|board| board.circuit());
        // The longest open one, else one that is probed.
        let worst = |circuit: &Circuit| match circuit {
            Circuit::Closed => (0, None),
            Circuit::HalfOpen => (1, None),
            Circuit::Open { until } => (2, Some(*until)),
        };
        circuits.max_by_key(worst).unwrap_or_default()
    }

    /// Counts the changes of what the board's rare cells say (limit, hold, out), so that a watcher can tell whether to
    /// look.
    #[must_use]
    pub fn revision(&self) -> u64 {
        match self.whole {
            false => self.board.revision.load(Relaxed),
            true => self.boards().iter().map(|board| board.revision.load(Relaxed)).sum(),
        }
    }

    /// The time before which it is not to be called, if it is held now. A whole org is held while every family that has a
    /// limiter and is not out is held, until the first of these holds ends.
    #[must_use]
    pub fn not_before(&self) -> Option<Instant> {
        self.hold().map(|hold| hold.until)
    }

    fn hold(&self) -> Option<Hold> {
        let now = Instant::now();
        if !self.whole {
            return self.board.hold(now);
        }
        let boards = self.boards();
        let limited = boards.iter().filter(|board| lock(&board.slow).limit.is_some() && !board.is_out.load(Relaxed));
        let holds: Option<Vec<_>> = limited.map(|board| board.hold(now)).collect();
        holds?.into_iter().min_by_key(|hold| hold.until)
    }

    /// Whether it admits no calls for now, or at all: it is [out](Org::is_out), its pool does without it, it is a
    /// [spare](Org::spare_of), it is held until [some time](Org::not_before), or its [circuit](Org::circuit) is open.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let (now, circuit) = (Instant::now(), self.circuit());
        let open = matches!(circuit, Circuit::Open { until } if until > now);
        open || self.is_out() || self.is_closed() || self.spare_of().is_some() || self.not_before().is_some()
    }

    /// All that is known now, of this handle's model family or of the whole org: see [`Snapshot`].
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let boards = if self.whole { self.boards() } else { vec![self.board.clone()] };
        let mut history: Vec<_> = boards.iter().flat_map(|board| lock(&board.slow).history.clone()).collect();
        history.sort_by_key(|change| change.at);
        history.drain(..history.len().saturating_sub(HISTORY));
        let meters: Vec<_> = boards.iter().filter_map(|board| lock(&board.slow).meters.as_ref()?.upgrade()).collect();
        let limits = boards.iter().filter_map(|board| lock(&board.slow).limit);
        let weight = lock(&self.board.slow).weight();
        Snapshot {
            name: self.identity.name.clone(),
            family: self.board.family.clone(),
            whole: self.whole,
            standing: self.standing(),
            in_flight: boards.iter().map(|board| board.in_flight()).sum(),
            waiting: boards.iter().map(|board| board.waiting.load(Relaxed)).sum(),
            limit: limits.reduce(LimitCell::and),
            health: self.health(),
            circuit: self.circuit(),
            hold: self.hold(),
            history,
            weight,
            quota_told: boards.iter().any(|board| board.quota_told.load(Relaxed)),
            headroom: self.headroom(),
            quota: meters.iter().flat_map(|meters| meters.read()).collect(),
            out: self.out_reason(),
            refused_models: self.refused_models(),
            organisation: self.organisation(),
            spare_of: self.spare_of(),
        }
    }

    // What layers write.

    pub(crate) fn write_limit(&self, cell: LimitCell, hold: Option<Hold>, changes: impl IntoIterator<Item = Change>) {
        let mut slow = lock(&self.board.slow);
        slow.limit = Some(cell);
        self.board.share.store(slow.share().to_bits(), Relaxed);
        slow.hold = hold;
        for change in changes {
            slow.remember(change);
        }
        self.board.revision.fetch_add(1, Relaxed);
    }

    /// True if [`tell_idle`](Org::tell_idle) is to be called, under no lock.
    pub(crate) fn write_in_flight(&self, in_flight: usize) -> bool {
        self.board.in_flight.store(in_flight, Relaxed);
        if in_flight > 0 {
            return false;
        }
        // Whoever waits notes that, then looks at the count; we store the count, then look whether somebody waits.
        fence(SeqCst);
        self.idle_is_awaited()
    }

    /// A balancer gives it a call.
    pub(crate) fn bind(&self) {
        self.board.bound.fetch_add(1, SeqCst);
    }

    /// The call's future has ended or was dropped. Under no lock: it may wake somebody.
    pub(crate) fn unbind(&self) {
        if self.board.bound.fetch_sub(1, SeqCst) == 1 && self.idle_is_awaited() {
            self.tell_idle();
        }
    }

    pub(crate) fn write_waiting(&self, waiting: usize) {
        self.board.waiting.store(waiting, Relaxed);
    }

    /// What is left now, and how much comes back in a second.
    pub(crate) fn write_headroom(&self, headroom: f64, per_second: f64, now: Instant) {
        let board = &self.board;
        board.headroom_at.store(board.since_birth(now), Relaxed);
        board.headroom_rate.store(per_second.to_bits(), Relaxed);
        board.headroom.store(headroom.clamp(0.0, 1.0).to_bits(), Relaxed);
    }

    /// The provider's answers tell its quota.
    pub(crate) fn write_quota_told(&self) {
        self.board.quota_told.store(true, Relaxed);
    }

    /// Whoever keeps account of its quota now.
    pub(crate) fn write_meters(&self, meters: Weak<dyn Meters>) {
        let _dropped_later = lock(&self.board.slow).meters.replace(meters);
    }

    pub(crate) fn quota_told(&self) -> bool {
        self.board.quota_told.load(Relaxed)
    }

    /// How well it does as of now.
    pub(crate) fn write_health(&self, health: f64) {
        let board = &self.board;
        board.health_at.store(board.since_birth(Instant::now()), Relaxed);
        board.health.store(health.clamp(0.0, 1.0).to_bits(), Relaxed);
    }

    /// Its circuit, and when access comes back if its quota is used up until a date. Afterwards [`tell`](Org::tell) of it, under no
    /// lock.
    pub(crate) fn write_circuit(&self, circuit: Circuit, parked: Option<Instant>) {
        let mut slow = lock(&self.board.slow);
        (slow.circuit, slow.parked) = (circuit, parked);
        self.board.revision.fetch_add(1, Relaxed);
    }

    pub(crate) fn add_penalty(&self, more: f64) {
        let board = &self.board;
        let now = Instant::now();
        let grown = (board.penalty(|| now) + more).min(PENALTY_MAX);
        board.penalty_at.store(board.since_birth(now), Relaxed);
        board.penalty.store(grown.to_bits(), Relaxed);
    }

    /// Its circuit keeps calls out instead.
    pub(crate) fn lift_penalty(&self) {
        self.board.penalty.store(0, Relaxed);
    }

    /// Changes what is set in `tuning`, for all model families: those that are live, at once, and those that come later.
    /// The last word on a setting counts, whether it was said here or by [`retune_family`](Org::retune_family).
    ///
    /// Running limits have changed, and whoever waits and has a slot now is woken, before this returns. It may be called
    /// from anywhere and before there is a limiter.
    ///
    /// # Errors
    /// Names what is out of range: `cap`, `floor`, `ceiling` or `weight`. Then nothing has changed.
    pub fn retune(&self, tuning: Tuning) -> Result<(), BuildError> {
        let boards: Vec<_> = {
            let families = lock(&self.identity.families);
            let mut all = lock(&self.identity.tuning);
            tuning.check(*all)?;
            *all = tuning.or(*all);
            // Still under both locks: a family that is made meanwhile is one or the other.
            families.values().for_each(|board| board.tune(tuning));
            families.values().cloned().collect()
        };
        tracing::info!(org = self.name(), ?tuning, "retuned");
        boards.iter().for_each(|board| board.tuned());
        Ok(())
    }

    /// Changes what is set in `tuning` for this handle's model family alone, as [`retune`](Org::retune) does for all.
    ///
    /// # Errors
    /// As [`retune`](Org::retune).
    pub fn retune_family(&self, tuning: Tuning) -> Result<(), BuildError> {
        {
            let _families = lock(&self.identity.families);
            tuning.check(lock(&self.board.slow).tuning)?;
            self.board.tune(tuning);
        }
        tracing::info!(org = self.name(), family = self.model_family().as_str(), ?tuning, "retuned");
        self.board.tuned();
        Ok(())
    }

    /// All that was tuned of it.
    pub(crate) fn tuning(&self) -> Tuning {
        lock(&self.board.slow).tuning
    }

    /// Wakes `waker` whenever the org is put out or brought back, until [`unwatch`](Org::unwatch).
    pub(crate) fn watch(&self, waker: &Waker) {
        lock(&self.board.slow).on_out.add(waker);
    }

    pub(crate) fn unwatch(&self, waker: &Waker) {
        let _dropped_later = lock(&self.board.slow).on_out.remove(waker);
    }

    /// Wakes `waker` whenever it is retuned, until [`unwatch_tuning`](Org::unwatch_tuning).
    pub(crate) fn watch_tuning(&self, waker: &Waker) {
        lock(&self.board.slow).on_tuning.add(waker);
    }

    pub(crate) fn unwatch_tuning(&self, waker: &Waker) {
        let _dropped_later = lock(&self.board.slow).on_tuning.remove(waker);
    }

    /// How many wakers are kept.
    #[cfg(test)]
    pub(crate) fn watchers(&self) -> usize {
        let slow = lock(&self.board.slow);
        slow.on_out.0.len() + slow.on_tuning.0.len() + self.identity_watchers()
    }
}

impl Board {
    pub(super) fn new(family: Family, is_out: bool, tuning: Tuning) -> Arc<Self> {
        let slow = Slow { tuning, ..Slow::default() };
        Arc::new(Board {
            family,
            born: Instant::now(),
            share: AtomicU64::new(slow.share().to_bits()),
            in_flight: AtomicUsize::new(0),
            bound: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            headroom: AtomicU64::new(1.0f64.to_bits()),
            headroom_rate: AtomicU64::new(0),
            headroom_at: AtomicU64::new(0),
            penalty: AtomicU64::new(0),
            penalty_at: AtomicU64::new(0),
            health: AtomicU64::new(1.0f64.to_bits()),
            health_at: AtomicU64::new(0),
            is_out: AtomicBool::new(is_out),
            refuses_any: AtomicBool::new(false),
            quota_told: AtomicBool::new(false),
            revision: AtomicU64::new(0),
            slow: Mutex::new(slow),
        })
    }

    fn since_birth(&self, now: Instant) -> u64 {
        let nanos = now.saturating_duration_since(self.born).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    /// Half of it is gone after every half-life; in the end all.
    fn penalty(&self, now: impl Fn() -> Instant) -> f64 {
        let last = f64::from_bits(self.penalty.load(Relaxed));
        if last == 0.0 {
            return 0.0;
        }
        let age = Duration::from_nanos(self.since_birth(now()).saturating_sub(self.penalty_at.load(Relaxed)));
        let left = last * (-age.as_secs_f64() / PENALTY_HALF_LIFE.as_secs_f64()).exp2();
        if left < 0.01 {
            self.penalty.store(0, Relaxed);
            return 0.0;
        }
        left
    }

    /// The one that ends last.
    fn hold(&self, now: Instant) -> Option<Hold> {
        let slow = lock(&self.slow);
        let parked = slow.parked.map(|until| Hold::new(until, HoldReason::OutOfQuota));
        slow.hold.into_iter().chain(parked).filter(|hold| hold.until > now).max_by_key(|hold| hold.until)
    }

    fn circuit(&self) -> Circuit {
        lock(&self.slow).circuit
    }

    fn health(&self, now: impl Fn() -> Instant) -> f64 {
        let last = f64::from_bits(self.health.load(Relaxed));
        if last >= 1.0 {
            return 1.0;
        }
        let age = Duration::from_nanos(self.since_birth(now()).saturating_sub(self.health_at.load(Relaxed)));
        1.0 - (1.0 - last) * (-age.as_secs_f64() / HEALTH_HALF_LIFE.as_secs_f64()).exp2()
    }

    fn headroom(&self, now: impl Fn() -> Instant) -> f64 {
        let last = f64::from_bits(self.headroom.load(Relaxed));
        if last >= 1.0 {
            return last;
        }
        let age = Duration::from_nanos(self.since_birth(now()).saturating_sub(self.headroom_at.load(Relaxed)));
        (last + f64::from_bits(self.headroom_rate.load(Relaxed)) * age.as_secs_f64()).min(1.0)
    }

    /// Without a limiter the balancers' count stands for its.
    fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed).max(self.bound.load(Relaxed))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.bound.load(SeqCst) == 0 && self.in_flight.load(SeqCst) == 0
    }

    pub(super) fn out(&self) -> Option<OutReason> {
        lock(&self.slow).out.clone()
    }

    /// False if it was out already.
    pub(super) fn put_out(&self, reason: &OutReason) -> bool {
        let mut slow = lock(&self.slow);
        let first = slow.out.is_none();
        slow.out.get_or_insert_with(|| reason.clone());
        first
    }

    pub(super) fn refused(&self) -> Vec<Arc<str>> {
        if self.refuses_any.load(SeqCst) { lock(&self.slow).refused.clone() } else { vec![] }
    }

    pub(super) fn refuses(&self, model: &str) -> bool {
        // As with `is_out`: first said, then whoever waits is called.
        self.refuses_any.load(SeqCst) && lock(&self.slow).refused.iter().any(|refused| **refused == *model)
    }

    pub(super) fn refuses_any(&self) -> bool {
        self.refuses_any.load(SeqCst)
    }

    /// How many it refuses now, if this one is news.
    pub(super) fn refuse(&self, model: &Arc<str>) -> Option<usize> {
        let mut slow = lock(&self.slow);
        if slow.refused.contains(model) {
            return None;
        }
        slow.refused.push(model.clone());
        self.refuses_any.store(true, SeqCst);
        self.revision.fetch_add(1, Relaxed);
        Some(slow.refused.len())
    }

    /// True if it refused any.
    pub(super) fn allow_all(&self) -> bool {
        let mut slow = lock(&self.slow);
        self.refuses_any.store(false, SeqCst);
        !std::mem::take(&mut slow.refused).is_empty()
    }

    pub(super) fn take_out(&self) -> bool {
        lock(&self.slow).out.take().is_some()
    }

    pub(super) fn mark_out(&self, out: bool) {
        self.is_out.store(out, SeqCst);
        self.revision.fetch_add(1, Relaxed);
    }

    /// Under no lock.
    pub(super) fn tell_out(&self) {
        let watchers = lock(&self.slow).on_out.clone();
        watchers.wake();
    }

    fn tune(&self, tuning: Tuning) {
        let mut slow = lock(&self.slow);
        slow.tuning = tuning.or(slow.tuning);
        self.share.store(slow.share().to_bits(), Relaxed);
        self.revision.fetch_add(1, Relaxed);
    }

    /// Under no lock.
    fn tuned(&self) {
        let watchers = lock(&self.slow).on_tuning.clone();
        watchers.wake();
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
        assert_eq!(change.to_string(), "25.0 to 20.0 slots: refused without a hint");
        let change = Change::new(Instant::now(), 10.0, 9.7, Why::PaceRefused);
        assert_eq!(change.to_string(), "10.0 to 9.7 calls/s: refused at this pace");
    }
}
