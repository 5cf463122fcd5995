//! A batch whose reply was lost is looked for.

use std::{collections::HashSet, ops::ControlFlow, time::SystemTime};

use super::{Course, FETCHES, calls::Called, watch::Over};
use crate::{
    batch::{
        BatchFailure, Match, Remote, RemoteState, Submission, Token,
        api::SKEW,
        law::jittered,
        record,
        state::{Chunk, End},
    },
    journal::Key,
    outcome::Class,
};

/// So many pages of an org's batches are looked through for a lost one.
const PAGES: usize = 50;

/// What came of the search for a batch whose reply was lost.
pub(super) enum Found {
    Batch(Box<Remote>),
    Nothing,
    Out(Class),
    /// The org's batches cannot be listed.
    Unlisted(String),
    Closing,
}

impl Course {
    /// Where a lost reply leads to.
    pub(super) async fn found(&mut self, found: Found, chunk: Option<Chunk>) {
        match found {
            Found::Batch(remote) => {
                drop(chunk);
                self.adopt(&remote).await;
                self.follow(Some(*remote)).await;
            }
            Found::Nothing => {
                tracing::info!(batch = %self.name(), "it was not submitted: its rows go into another batch");
                let chunk = match chunk {
                    Some(mut chunk) => {
                        self.fill(&mut chunk).await;
                        Some(chunk)
                    }
                    None => self.rebuilt().await,
                };
                self.void().await;
                let chunk = chunk.and_then(|chunk| self.without_late(chunk));
                self.shared.requeue(self.record.token, chunk);
            }
            Found::Out(class) => {
                self.org_is_out(class);
                let batch = self.remaining();
                self.hand_back_all(&BatchFailure::OrgOut { batch, class }).await;
            }
            Found::Unlisted(said) => {
                let org = self.shared.lines[self.org].name.clone();
                self.hand_back_all(&BatchFailure::Unlisted { org, said: said.into() }).await;
            }
            Found::Closing => {
                self.shared.lock().left.push(self.remaining());
                self.hand_back_all(&BatchFailure::Closed(Some(self.remaining()))).await;
            }
        }
    }

    /// Rows whose submissions have come to nothing for so long that others would be in vain are handed back.
    fn without_late(&self, mut chunk: Chunk) -> Option<Chunk> {
        let Some(after) = self.shared.law.stuck_after else { return Some(chunk) };
        let org = &self.shared.lines[self.org].name;
        let is_late =
            |key| self.shared.lock().in_vain_since(key, self.clock.at).is_some_and(|at| at.elapsed() >= after);
        let (late, rows) = chunk.rows.into_iter().partition::<Vec<_>, _>(|row| is_late(row.key));
        for row in late {
            let failure = BatchFailure::Unsubmitted { org: org.clone(), said: "each reply was lost".into() };
            self.end(row.key, End::Back(failure, Some(row.body)));
        }
        chunk.rows = rows;
        (!chunk.rows.is_empty()).then_some(chunk)
    }

    pub(super) async fn find(&mut self) -> Found {
        self.unsettle();
        let (mut refuted, mut looks, mut wait) = (HashSet::new(), 0, None);
        let until = (self.shared.wall)();
        loop {
            let candidates = match self.look(&refuted, until).await {
                Ok(candidates) => candidates,
                Err(found) => return found,
            };
            if candidates.is_empty() {
                looks += 1;
                // It may take a while until a batch is listed.
                if looks >= 2 {
                    return Found::Nothing;
                }
                if self.nap(self.shared.law.look_again).await {
                    return Found::Closing;
                }
                continue;
            }
            let (mut runs, mut stuck) = (false, None);
            for remote in candidates {
                if self.ending_of(&remote).is_some() {
                    match self.holds_ours(&remote).await {
                        Ok(true) => return Found::Batch(Box::new(remote)),
                        Ok(false) => drop(refuted.insert(remote.id)),
                        Err(found) => return found,
                    }
                } else if matches!(remote.state, RemoteState::Failed { .. }) {
                    refuted.insert(remote.id);
                } else if self.shared.law.is_stuck(self.age(), &remote) {
                    stuck = Some(remote.id);
                } else {
                    runs = true;
                }
            }
            if let (false, Some(id)) = (runs, stuck) {
                // It may be another's, so that it is not cancelled.
                return Found::Unlisted(format!("batch {id} may be it, and has not ended"));
            }
            if runs {
                self.trouble("its reply was lost; a batch that may be it has to end before that is certain");
                wait = Some(self.shared.law.next_poll(wait));
                if self.nap(jittered(wait.unwrap_or_default(), fastrand::f64())).await {
                    return Found::Closing;
                }
            }
        }
    }

    /// Looks through the org's batches: those that may be it, if none is it for certain.
    async fn look(&mut self, refuted: &HashSet<String>, until: SystemTime) -> Result<Vec<Remote>, Found> {
        let api = self.shared.api.clone();
        let oldest = self.record.since.checked_sub(SKEW);
        let (mut candidates, mut after, mut failed) = (vec![], None::<String>, 0);
        // Where they are listed newest first no page after an old one has what is looked for.
        let (mut pages, mut last, mut falls, mut rises) = (0, None, false, false);
        loop {
            let answer = match self.call(&api.list(after.as_deref())).await {
                Called::Answer(answer) => answer,
                Called::Out(class) => return Err(Found::Out(class)),
                Called::Late(said) => return Err(Found::Unlisted(said)),
                Called::Unknown | Called::Closing => return Err(Found::Closing),
            };
            let page = match api.listed(&answer) {
                Ok(page) => page,
                Err(error) => {
                    failed += 1;
                    if failed >= FETCHES {
                        return Err(Found::Unlisted(error.to_string()));
                    }
                    if self.pause(failed, None, &error.to_string()).await {
                        return Err(Found::Closing);
                    }
                    continue;
                }
            };
            pages += 1;
            for remote in page.batches {
                falls |= last.is_some() && remote.created_at < last;
                rises |= remote.created_at.is_none() || last.is_some() && remote.created_at > last;
                last = remote.created_at;
                let other = |token: &Token| *token != self.record.token;
                if refuted.contains(&remote.id) || self.shared.lock().known.get(&*remote.id).is_some_and(other) {
                    continue;
                }
                let token = self.record.token.to_string();
                let submission = Submission {
                    token: &token,
                    file: self.record.file.as_deref(),
                    since: self.record.since,
                    until,
                    rows: self.record.keys.len(),
                };
                match api.matches(&remote, &submission) {
                    Match::Certain => return Err(Found::Batch(Box::new(remote))),
                    Match::Perhaps => candidates.push(remote),
                    Match::No => {}
                }
            }
            let is_past = falls && !rises && last.is_some_and(|last| oldest.is_some_and(|oldest| last < oldest));
            match page.next {
                None => return Ok(candidates),
                Some(_) if is_past => return Ok(candidates),
                Some(next) if pages < PAGES && after.as_ref() != Some(&next) => after = Some(next),
                // Those that were seen may hold it.
                Some(_) if !candidates.is_empty() => return Ok(candidates),
                Some(_) => return Err(Found::Unlisted(format!("after {pages} pages there are more of them"))),
            }
        }
    }

    /// Whether a row of ours is in its results. That none is has to be read: it is not known of a page of a gateway, or of nothing.
    async fn holds_ours(&mut self, remote: &Remote) -> Result<bool, Found> {
        let api = self.shared.api.clone();
        let keys: HashSet<Key> = self.record.keys.iter().copied().collect();
        for fetched in 1..=FETCHES {
            let (mut found, mut strangers, mut unreadable) = (false, false, false);
            for request in api.results(remote) {
                let mut look = |line: &[u8]| {
                    match api.result(line) {
                        Ok(Some(row)) if record::key_of(&row.custom_id).is_some_and(|key| keys.contains(&key)) => {
                            found = true;
                            return ControlFlow::Break(());
                        }
                        Ok(Some(_)) => strangers = true,
                        Ok(None) => {}
                        Err(_) => unreadable = true,
                    }
                    ControlFlow::Continue(true)
                };
                match self.lines_of(&request, &mut look).await {
                    Ok(()) => {}
                    Err(Over::Out(class)) => return Err(Found::Out(class)),
                    Err(Over::Unread(said)) => return Err(Found::Unlisted(said)),
                    Err(_) => return Err(Found::Closing),
                }
                if found {
                    return Ok(true);
                }
            }
            if strangers && !unreadable {
                return Ok(false);
            }
            if fetched < FETCHES
                && self.pause(fetched, None, "the results of what may be it do not say whose they are").await
            {
                return Err(Found::Closing);
            }
        }
        Err(Found::Unlisted(format!("the results of batch {} do not say whose they are", remote.id)))
    }
}
