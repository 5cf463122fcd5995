//! A batch is asked about until it ends, and cancelled where it gets nowhere.

use std::collections::HashSet;

use tokio::time::Instant;

use super::{Course, calls::Called};
use crate::{
    batch::{
        ApiError, BatchFailure, BatchRows, Ending, Remote, RemoteState,
        law::jittered,
        record::{Phase, Why},
        state::{Closing, End},
    },
    outcome::Class,
};

/// How the watch over a batch ends.
pub(super) enum Over {
    Ended(Box<Remote>, Ending),
    Failed { reason: String, queue_full: bool, rows: Vec<usize> },
    Out(Class),
    Deadline,
    Vanished,
    Unread(String),
    Closing,
}

impl Course {
    pub(super) async fn follow(&mut self, first: Option<Remote>) {
        let over = match self.watch(first).await {
            Over::Ended(remote, ending) => {
                self.unsettle();
                match self.harvest(&remote, ending).await {
                    Ok(()) => return,
                    Err(over) => over,
                }
            }
            over => over,
        };
        match over {
            Over::Failed { reason, queue_full, rows } => self.failed(&reason, queue_full, &rows).await,
            Over::Out(class) => {
                self.org_is_out(class);
                let batch = self.remaining();
                tracing::warn!(%batch, %class, "the org is out, but its batch may still be worked on and billed");
                self.hand_back_all(&BatchFailure::OrgOut { batch, class }).await;
            }
            Over::Deadline | Over::Ended(..) => {
                tracing::warn!(batch = %self.name(), "a batch has not ended in its time");
                self.hand_back_all(&BatchFailure::Deadline(self.remaining())).await;
            }
            Over::Unread(said) => {
                tracing::warn!(batch = %self.name(), said, "a batch has ended, and its results cannot be had");
                self.hand_back_all(&BatchFailure::Unread { batch: self.remaining(), said: said.into() }).await;
            }
            Over::Vanished => {
                tracing::warn!(batch = %self.name(), "a batch is not there any more");
                self.hand_back_all(&BatchFailure::Vanished(self.remaining())).await;
            }
            Over::Closing => {
                let cancels = self.shared.lock().closing == Some(Closing::Cancelling);
                let why = match self.record.phase {
                    Phase::Submitted => Some(Why::Exit),
                    Phase::CancelIntent(why) => Some(why),
                    _ => None,
                };
                if let Some(why) = why.filter(|_| cancels) {
                    let _ = self.cancel(why).await;
                }
                {
                    let is_cancelled = matches!(self.record.phase, Phase::Cancelled(_));
                    let mut state = self.shared.lock();
                    let list = if is_cancelled { &mut state.cancelled } else { &mut state.left };
                    list.push(self.remaining());
                }
                self.hand_back_all(&BatchFailure::Closed(Some(self.remaining()))).await;
            }
        }
    }

    async fn watch(&mut self, first: Option<Remote>) -> Over {
        let (mut remote, mut wait, mut unseen, mut asked) = (first, None, None, false);
        asked |= remote.is_some();
        let mut deadline = self.deadline();
        loop {
            if let Some(now) = &remote {
                self.saw(now);
                deadline = self.deadline();
                if let Some(ending) = self.ending_of(now) {
                    return Over::Ended(Box::new(now.clone()), ending);
                }
                if let RemoteState::Failed { reason, queue_full, rows } = &now.state {
                    let (reason, queue_full, rows) = (reason.clone(), *queue_full, rows.clone());
                    return Over::Failed { reason, queue_full, rows };
                }
                let is_stuck = self.record.phase == Phase::Submitted && self.shared.law.is_stuck(self.age(), now);
                let why = match self.record.phase {
                    // It was interrupted between the intent and the call.
                    Phase::CancelIntent(why) if now.state == RemoteState::Processing => Some(why),
                    _ => is_stuck.then_some(Why::Stuck),
                };
                if let Some(why) = why {
                    if let Err(over) = self.cancel(why).await {
                        return over;
                    }
                    wait = None;
                }
            }
            if self.is_closing() {
                return Over::Closing;
            }
            let now = Instant::now();
            if asked && now >= deadline {
                return Over::Deadline;
            }
            if asked {
                let next = self.shared.law.next_poll(wait);
                wait = Some(next);
                let next = now + jittered(next, fastrand::f64());
                // Once more at the very end.
                let next = next.min(deadline);
                self.settle();
                self.shared.see(self.record.token, |seen| seen.next_poll = Some(next));
                if self.nap(next - now).await {
                    return Over::Closing;
                }
            }
            asked = true;
            let id = self.record.id.clone().unwrap_or_default();
            let answer = match self.call(&self.shared.api.retrieve(&id)).await {
                Called::Answer(answer) => answer,
                Called::Out(class) => return Over::Out(class),
                Called::Late(_) => return Over::Deadline,
                Called::Unknown | Called::Closing => return Over::Closing,
            };
            remote = match self.shared.api.retrieved(&answer) {
                Ok(now) => {
                    unseen = None;
                    Some(now)
                }
                Err(ApiError::NotFound) => {
                    let since = *unseen.get_or_insert_with(Instant::now);
                    if !self.shared.law.may_appear(self.age(), since.elapsed()) {
                        return Over::Vanished;
                    }
                    self.trouble("the batch is not there (404); it may appear");
                    None
                }
                Err(error) => {
                    self.trouble(&error.to_string());
                    None
                }
            };
        }
    }

    /// Cancels it: never before the intent is written, and not again once the provider has said that it does.
    async fn cancel(&mut self, why: Why) -> Result<(), Over> {
        let before = std::mem::replace(&mut self.record.phase, Phase::CancelIntent(why));
        if let Err(error) = self.write(BatchRows::Keep).await {
            self.record.phase = before;
            self.trouble(&format!("it is not cancelled: {error}"));
            return Ok(());
        }
        self.shared.see(self.record.token, |seen| seen.phase = Phase::CancelIntent(why));
        tracing::warn!(batch = %self.name(), age = ?self.age(), ?why, "cancels a batch");
        let id = self.record.id.clone().unwrap_or_default();
        match self.call_anyhow(&self.shared.api.cancel(&id)).await {
            Called::Out(class) => return Err(Over::Out(class)),
            Called::Answer(answer) if self.shared.api.retrieved(&answer).is_ok() => {}
            // One that has ended meanwhile refuses it: how it stands is seen at the next poll.
            _ => return Ok(()),
        }
        self.record.phase = Phase::Cancelled(why);
        self.written(BatchRows::Keep).await;
        self.shared.see(self.record.token, |seen| seen.phase = Phase::Cancelled(why));
        Ok(())
    }

    /// How it has ended, if there may be results: one that has failed may have some too.
    pub(super) fn ending_of(&self, remote: &Remote) -> Option<Ending> {
        match remote.state {
            RemoteState::Ended(ending) => Some(ending),
            RemoteState::Failed { .. } => {
                let has_done = remote.counts.is_some_and(|counts| counts.succeeded > 0);
                (has_done || !self.shared.api.results(remote).is_empty()).then_some(Ending::Completed)
            }
            _ => None,
        }
    }

    fn saw(&mut self, remote: &Remote) {
        self.record.created = remote.created_at.or(self.record.created);
        self.record.expires = remote.expires_at.or(self.record.expires);
        tracing::debug!(batch = %self.name(), state = ?remote.state, counts = ?remote.counts, "a batch was asked about");
        self.shared.see(self.record.token, |seen| {
            seen.counts = remote.counts;
            seen.trouble = None;
        });
    }

    /// It was refused before any row was worked on.
    async fn failed(&mut self, reason: &str, queue_full: bool, blamed: &[usize]) {
        let chunk = self.rebuilt().await;
        self.void().await;
        let Some(mut chunk) = chunk else { return };
        if queue_full {
            tracing::info!(batch = %self.name(), reason, "the org's queue of batches is full: its rows wait");
            self.met_a_full_queue = true;
            self.shared.crowded(self.org);
            self.requeue_smaller(chunk);
            return;
        }
        let blamed: HashSet<_> = blamed.iter().filter_map(|place| self.record.keys.get(*place)).collect();
        if blamed.is_empty() {
            self.refused(chunk, reason, None);
            return;
        }
        let org = self.shared.lines[self.org].name.clone();
        let (guilty, rows): (Vec<_>, Vec<_>) = chunk.rows.into_iter().partition(|row| blamed.contains(&row.key));
        chunk.rows = rows;
        for row in guilty {
            let failure = BatchFailure::Refused { org: org.clone(), status: None, said: reason.into() };
            self.end(row.key, End::Back(failure, Some(row.body)));
        }
        self.shared.requeue(self.record.token, [chunk]);
    }
}
