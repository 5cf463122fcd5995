//! A handle for whoever flushes, watches or shuts down.

use std::{fmt, future::poll_fn, sync::Arc, task::Poll, time::Duration};

use tokio::time::Instant;

use super::{
    Counts, RemoteBatch, Token,
    record::Phase,
    service::Owner,
    state::{Closing, Seen},
};
use crate::{journal::Key, outcome::Class};

/// A handle to a [`BatchService`](super::BatchService): what is in it, and how it ends. Cheap to clone.
///
/// It keeps the service's state alive, but drives nothing, except by [`shutdown`](BatchHandle::shutdown).
#[derive(Clone)]
pub struct BatchHandle {
    owner: Arc<Owner>,
}

impl BatchHandle {
    pub(super) fn new(owner: Arc<Owner>) -> Self {
        BatchHandle { owner }
    }

    /// Nobody else will come for now: what is gathered goes as soon as an org has a place, however little it is; only rows that may come back
    /// from a batch in a moment are waited for. Whoever waits for it sends it, so poll them.
    pub fn flush(&self) {
        self.owner.0.flush();
    }

    /// More requests will come, as long as what is returned lives: until then a batch that is not full waits for them, for thirty times
    /// [`linger`](super::BatchBuilder::linger) at most once an org has a place for it. For who reads an input that has an end; then
    /// [`flush`](BatchHandle::flush), which sends what is gathered even while this lives.
    pub fn expect_more(&self) -> MoreToCome {
        self.owner.0.lock().holds += 1;
        MoreToCome(self.owner.clone())
    }

    /// Whether a request of this key is in a batch, or was in one of an earlier process: sent any other way it might be paid for twice.
    #[must_use]
    pub fn holds(&self, key: &Key) -> bool {
        self.owner.0.holds(key)
    }

    /// What is left running if the process ends now, and billed: to have their answers, send the same requests again with the same store;
    /// else cancel them.
    #[must_use]
    pub fn running(&self) -> Vec<RemoteBatch> {
        self.owner.0.running()
    }

    /// Ends the service, and belongs at the end of every run: nothing more is taken, what was not submitted is handed back
    /// ([`Closed`](super::BatchFailure::Closed)), and so is whatever is in a batch that runs. Such batches are left running, or, with
    /// [`cancel_on_exit`](super::BatchBuilder::cancel_on_exit), cancelled; batches of earlier processes that nobody has asked for in this one
    /// are left as they are.
    ///
    /// It waits for calls that are under way, so that no submission is left in doubt; bound it with a timeout of yours. Dropped, it stays shut,
    /// and whoever is still polled goes on with it.
    pub async fn shutdown(&self) -> Shutdown {
        let shared = &self.owner.0;
        shared.close(if shared.cancel_on_exit { Closing::Cancelling } else { Closing::Leaving });
        let mut waiter = shared.works.waiter();
        poll_fn(|cx| {
            waiter.poll(cx);
            let mut state = shared.lock();
            if state.batches.is_empty() {
                return Poll::Ready(());
            }
            state.closers.extend(waiter.number());
            Poll::Pending
        })
        .await;
        let state = shared.lock();
        let told = Shutdown { cancelled: state.cancelled.clone(), left: state.left.clone() };
        drop(state);
        let list = |batches: &[RemoteBatch]| batches.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if !told.left.is_empty() {
            tracing::warn!(
                batches = list(&told.left),
                "left running, and billed: send the same requests again with the same store to have their answers"
            );
        }
        if !told.cancelled.is_empty() {
            tracing::warn!(batches = list(&told.cancelled), "cancelled");
        }
        told
    }

    /// What is in it now.
    #[must_use]
    pub fn snapshot(&self) -> BatchSnapshot {
        let shared = &self.owner.0;
        let state = shared.lock();
        let [gathered, queued, in_batches, answered, handed_back] = state.figures();
        let [submitted, resumed, ended] = state.batches_so_far;
        let now = Instant::now();
        let mut orgs: Vec<_> = shared
            .lines
            .iter()
            .zip(&state.orgs)
            .map(|(line, places)| OrgBatches { org: line.name.clone(), out: places.out, batches: vec![] })
            .collect();
        for (token, seen) in &state.batches {
            if let Some(org) = orgs.get_mut(seen.org) {
                org.batches.push(BatchView::of(*token, seen, now));
            }
        }
        drop(state);
        orgs.iter_mut().for_each(|org| org.batches.sort_by_key(|batch| std::cmp::Reverse(batch.age)));
        BatchSnapshot { orgs, submitted, resumed, ended, gathered, queued, in_batches, answered, handed_back }
    }
}

impl fmt::Debug for BatchHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchHandle").field("running", &self.running()).finish_non_exhaustive()
    }
}

/// While it lives more requests are expected; see [`BatchHandle::expect_more`].
#[must_use = "dropped, nothing more is expected"]
pub struct MoreToCome(Arc<Owner>);

impl Drop for MoreToCome {
    fn drop(&mut self) {
        let shared = &self.0.0;
        let mut state = shared.lock();
        state.holds = state.holds.saturating_sub(1);
        drop(state);
        shared.pump();
    }
}

impl fmt::Debug for MoreToCome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoreToCome").finish_non_exhaustive()
    }
}

/// How a service was ended.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shutdown {
    /// Batches that were cancelled: what they had done by then is billed.
    pub cancelled: Vec<RemoteBatch>,
    /// Batches that are left running, and are billed.
    pub left: Vec<RemoteBatch>,
}

/// What is in a batch service.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct BatchSnapshot {
    /// The orgs, in their order.
    pub orgs: Vec<OrgBatches>,
    /// Batches that were submitted, those included whose reply was lost and that were found.
    pub submitted: u64,
    /// Batches of earlier processes that were gone on with.
    pub resumed: u64,
    /// Those of both whose results were read to their end, and of which that is written down.
    pub ended: u64,
    /// Rows in chunks that are not full.
    pub gathered: u64,
    /// Rows that wait for an org to have a place.
    pub queued: u64,
    /// Rows in batches, those included that are being submitted.
    pub in_batches: u64,
    /// Rows that were answered.
    pub answered: u64,
    /// Rows that were handed back without an answer.
    pub handed_back: u64,
}

/// The batches of one org that are under way.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct OrgBatches {
    /// Its name.
    pub org: Arc<str>,
    /// Why it takes no more, if so.
    pub out: Option<Class>,
    /// Its batches, the oldest first.
    pub batches: Vec<BatchView>,
}

/// One batch.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct BatchView {
    /// Our name of it.
    pub token: Token,
    /// The provider's, once it is submitted.
    pub id: Option<Arc<str>>,
    /// How far it has come.
    pub stage: BatchStage,
    /// How many rows it has.
    pub rows: usize,
    /// How they stood when it was last asked about, as the provider counts.
    pub counts: Option<Counts>,
    /// Since it was about to be submitted.
    pub age: Duration,
    /// Until it is asked about again.
    pub next_poll: Option<Duration>,
    /// What went wrong last, if nothing went right since.
    pub trouble: Option<Arc<str>>,
}

/// How far a batch has come.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchStage {
    /// It is being submitted, or looked for.
    Submitting,
    /// The provider works on it.
    Running,
    /// It is being cancelled.
    Cancelling,
    /// Its results are read.
    Ended,
}

impl BatchView {
    fn of(token: Token, seen: &Seen, now: Instant) -> Self {
        BatchView {
            token,
            id: seen.id.clone(),
            stage: match seen.phase {
                Phase::Intent => BatchStage::Submitting,
                Phase::Submitted => BatchStage::Running,
                Phase::CancelIntent(_) | Phase::Cancelled(_) => BatchStage::Cancelling,
                Phase::Ended => BatchStage::Ended,
            },
            rows: seen.rows,
            counts: seen.counts,
            age: seen.age + now.saturating_duration_since(seen.since),
            next_poll: seen.next_poll.map(|at| at.saturating_duration_since(now)),
            trouble: seen.trouble.clone(),
        }
    }
}
