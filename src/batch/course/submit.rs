//! A batch is submitted, or it is said why there is none.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Course, FETCHES,
    calls::{Called, Patience},
};
use crate::{
    batch::{
        ApiError, BatchFailure, BatchRows, Remote,
        record::Phase,
        state::{Chunk, End},
    },
    journal::StoreError,
    outcome::Class,
};

/// What came of a submission.
enum Created {
    Batch(Box<Remote>),
    Not(Not),
    Unknown,
}

/// Why there is certainly no batch.
enum Not {
    Out(Class),
    Crowded(String),
    Refused(ApiError),
    /// It was tried for too long.
    Late(String),
    Unwritten(StoreError),
    Closing,
}

impl Course {
    pub(super) async fn submit(&mut self, mut chunk: Chunk) {
        let bodies = chunk.rows.iter().map(|row| row.body.clone()).collect();
        if let Err(error) = self.write(BatchRows::Put(bodies)).await {
            for row in chunk.rows {
                self.end(row.key, End::Back(BatchFailure::Store(error.clone()), Some(row.body)));
            }
            return;
        }
        // What is in the store need not be here.
        chunk.rows.iter_mut().for_each(|row| row.body = Bytes::new());
        tracing::debug!(batch = %self.name(), rows = chunk.rows.len(), "about to submit a batch");
        match self.create(&chunk).await {
            Created::Batch(remote) => {
                drop(chunk);
                self.adopt(&remote).await;
                self.follow(Some(*remote)).await;
            }
            Created::Not(not) => self.not_created(chunk, not).await,
            Created::Unknown => {
                tracing::warn!(batch = %self.name(), "the reply to a submission was lost: looks for the batch");
                let found = self.find().await;
                self.found(found, Some(chunk)).await;
            }
        }
    }

    async fn create(&mut self, chunk: &Chunk) -> Created {
        let api = self.shared.api.clone();
        let token = self.record.token.to_string();
        let lines: Vec<_> = chunk.rows.iter().map(|row| row.line.clone()).collect();
        // So long it may take until it is given up; each failure below says for certain that there is no batch.
        let until = self.shared.law.stuck_after.and_then(|after| Instant::now().checked_add(after));
        let mut failed = 0;
        if let Some(upload) = api.upload(&token, &lines) {
            let file = loop {
                let answer = match self.call_until(&upload, Patience { until, ..Patience::default() }).await {
                    Called::Answer(answer) => answer,
                    Called::Out(class) => return Created::Not(Not::Out(class)),
                    Called::Late(said) => return Created::Not(Not::Late(said)),
                    Called::Unknown | Called::Closing => return Created::Not(Not::Closing),
                };
                match api.uploaded(&answer) {
                    Ok(file) => break file,
                    // One file too many is not billed.
                    Err(ApiError::Unreadable(why)) => {
                        failed += 1;
                        if failed >= FETCHES && until.is_some_and(|until| Instant::now() >= until) {
                            return Created::Not(Not::Late(why));
                        }
                        if self.pause(failed, None, &why).await {
                            return Created::Not(Not::Closing);
                        }
                    }
                    Err(error) => return Created::Not(not(error)),
                }
            };
            self.record.file = Some(file);
            // Where a batch keeps no token it is found by its file.
            if let Err(error) = self.write(BatchRows::Keep).await {
                return Created::Not(Not::Unwritten(error));
            }
        }
        let create = api.create(&chunk.group, &token, self.record.file.as_deref(), &lines);
        drop(lines);
        let answer = match self.call_until(&create, Patience { once: true, until, ..Patience::default() }).await {
            Called::Answer(answer) => answer,
            Called::Out(class) => return Created::Not(Not::Out(class)),
            Called::Late(said) => return Created::Not(Not::Late(said)),
            Called::Closing => return Created::Not(Not::Closing),
            Called::Unknown => return Created::Unknown,
        };
        match api.created(&answer) {
            Ok(remote) => Created::Batch(Box::new(remote)),
            Err(ApiError::Unreadable(why)) => {
                self.trouble(&why);
                Created::Unknown
            }
            Err(error) => Created::Not(not(error)),
        }
    }

    /// Nothing is at the provider: its rows go elsewhere, or wait, or are handed back.
    async fn not_created(&mut self, mut chunk: Chunk, not: Not) {
        self.fill(&mut chunk).await;
        let org = self.shared.lines[self.org].name.clone();
        // Before its rows are in another one.
        self.void().await;
        match not {
            Not::Out(class) => {
                self.org_is_out(class);
                self.shared.requeue(self.record.token, [chunk]);
            }
            Not::Crowded(said) => {
                tracing::info!(org = &*org, said, "the org's queue of batches is full: its rows wait");
                self.met_a_full_queue = true;
                self.shared.crowded(self.org);
                self.requeue_smaller(chunk);
            }
            Not::Refused(error) => self.refused(chunk, &error.to_string(), status_of(&error)),
            Not::Late(said) => {
                tracing::warn!(org = &*org, said, "a batch could not be submitted for long: its rows are handed back");
                let said: Arc<str> = said.into();
                for row in chunk.rows {
                    let failure = BatchFailure::Unsubmitted { org: org.clone(), said: said.clone() };
                    self.end(row.key, End::Back(failure, Some(row.body)));
                }
            }
            Not::Unwritten(error) => {
                for row in chunk.rows {
                    self.end(row.key, End::Back(BatchFailure::Store(error.clone()), Some(row.body)));
                }
            }
            Not::Closing => {
                for row in chunk.rows {
                    self.end(row.key, End::Back(BatchFailure::Closed(None), Some(row.body)));
                }
            }
        }
    }

    pub(super) fn requeue_smaller(&self, mut chunk: Chunk) {
        chunk.crowded += 1;
        if chunk.crowded > 1 && chunk.rows.len() > 1 {
            self.shared.requeue(self.record.token, chunk.halves().into_iter().rev());
        } else {
            self.shared.requeue(self.record.token, [chunk]);
        }
    }

    /// One row may be to blame: it is looked for.
    pub(super) fn refused(&self, chunk: Chunk, said: &str, status: Option<http::StatusCode>) {
        let org = self.shared.lines[self.org].name.clone();
        tracing::warn!(org = &*org, rows = chunk.rows.len(), said, "a batch was refused as a whole");
        let may_split = || chunk.splits.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        if chunk.rows.len() > 1 && may_split() {
            self.shared.requeue(self.record.token, chunk.halves().into_iter().rev());
            return;
        }
        let said: Arc<str> = said.into();
        for row in chunk.rows {
            let failure = BatchFailure::Refused { org: org.clone(), status, said: said.clone() };
            self.end(row.key, End::Back(failure, Some(row.body)));
        }
    }

    pub(super) async fn adopt(&mut self, remote: &Remote) {
        let id: Arc<str> = remote.id.as_str().into();
        self.record.id = Some(remote.id.clone());
        self.record.created = remote.created_at;
        self.record.expires = remote.expires_at;
        self.record.phase = Phase::Submitted;
        {
            let mut state = self.shared.lock();
            state.known.insert(id.clone(), self.record.token);
            state.batches_so_far[0] += 1;
            self.record.keys.iter().for_each(|key| state.not_in_vain(*key));
            if let Some(seen) = state.batches.get_mut(&self.record.token) {
                (seen.id, seen.phase) = (Some(id), Phase::Submitted);
            }
        }
        // Without it the intent leads there.
        self.written(BatchRows::Keep).await;
        tracing::info!(batch = %self.name(), rows = self.record.keys.len(), "a batch is submitted");
    }
}

fn not(error: ApiError) -> Not {
    match error {
        ApiError::QueueFull(said) => Not::Crowded(said),
        error => Not::Refused(error),
    }
}

fn status_of(error: &ApiError) -> Option<http::StatusCode> {
    match error {
        ApiError::Refused { status, .. } => Some(*status),
        ApiError::TooLarge => Some(http::StatusCode::PAYLOAD_TOO_LARGE),
        ApiError::NotFound => Some(http::StatusCode::NOT_FOUND),
        _ => None,
    }
}
