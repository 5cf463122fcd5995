//! How rows gather into chunks, and which org is given one.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{Chunk, End, Gathered, Line, Open, Place, Places, Shared, State, Wakes};
use crate::{
    batch::{BatchFailure, Group, Token, course::Course, law::Size},
    journal::Key,
    org::OutReason,
};

impl Shared {
    /// Rows of a batch that go into the next one.
    pub(in crate::batch) fn regather(self: &Arc<Self>, token: Token, rows: Vec<(Group, Gathered)>) {
        let mut state = self.lock();
        for (group, gathered) in rows {
            if state.free(token, gathered.key) {
                state.gather(group, gathered, self.most);
            }
        }
        drop(state);
        self.pump();
    }

    /// Chunks of a batch that is none wait again, before all others. One for which not all of its rows are wanted, or that never was full,
    /// gathers others first.
    pub(in crate::batch) fn requeue(self: &Arc<Self>, token: Token, chunks: impl IntoIterator<Item = Chunk>) {
        let mut state = self.lock();
        for mut chunk in chunks {
            chunk.rows.retain(|gathered| state.free(token, gathered.key));
            if chunk.rows.is_empty() {
                continue;
            }
            let size = chunk.rows.iter().fold(Size::default(), |size, row| size.with(row.weight, row.line.len()));
            if chunk.is_marked() || size.is_full(self.most) {
                state.closed.push_front(chunk);
                continue;
            }
            for row in chunk.rows {
                state.gather(chunk.group.clone(), row, self.most);
            }
            // What was flushed need not be flushed again.
            if let Some(open) = state.open.get_mut(&chunk.group) {
                open.flushed |= chunk.flushed;
            }
        }
    }

    /// Looks at a chunk when it may be due.
    pub(super) async fn linger(self: Arc<Self>, group: Group, number: u64, mut at: Instant) {
        loop {
            tokio::time::sleep_until(at).await;
            let mut state = self.lock();
            let State { ref mut open, ref orgs, holds, unsettled, .. } = *state;
            let of = |open: &&mut Open| open.number == number && open.timed == Some(at);
            let Some(open) = open.get_mut(&group).filter(of) else { return };
            let due = self.free_for(orgs, &group).map(|free| open.gathering(holds, unsettled).due(self.linger, free));
            // Without a place for it nothing is due; it is looked at when there is one.
            open.timed = due.filter(|due| *due > Instant::now());
            match open.timed {
                Some(due) => at = due,
                None => break,
            }
        }
        self.pump();
    }

    /// All that is gathered goes as soon as an org has a place.
    pub(in crate::batch) fn flush(self: &Arc<Self>) {
        self.lock().open.values_mut().for_each(|open| open.flushed = true);
        self.pump();
    }

    /// It is known of one batch more, or less, whether rows of it come back at once.
    pub(in crate::batch) fn unsettled(self: &Arc<Self>, more: bool) {
        let mut state = self.lock();
        state.unsettled = if more { state.unsettled + 1 } else { state.unsettled.saturating_sub(1) };
        drop(state);
        if !more {
            self.pump();
        }
    }

    /// Gives chunks to orgs that have a place, in turn.
    pub(in crate::batch) fn pump(self: &Arc<Self>) {
        let now = Instant::now();
        let (mut courses, mut wakes) = (vec![], Wakes::default());
        let mut lingers = vec![];
        let mut state = self.lock();
        loop {
            let is_live = |(line, places): (&Line, &Places)| places.out.is_none() && !line.org.is_out();
            let live: Vec<_> = self.lines.iter().zip(&state.orgs).map(is_live).collect();
            if state.closing.is_some() || !live.contains(&true) {
                while let Some(chunk) = state.any_chunk(|_| true) {
                    let failure = match state.closing {
                        Some(_) => BatchFailure::Closed(None),
                        None => BatchFailure::NoOrg { orgs: self.outs(&state, &chunk.group) },
                    };
                    wakes.0.extend(state.give_back(chunk, &failure));
                }
                break;
            }
            let refusing = self.lines.iter().any(|line| line.org.refuses_any());
            let nobodys = |group: &Group| {
                refusing && self.lines.iter().zip(&live).all(|(line, live)| !live || line.refuses(group))
            };
            while let Some(chunk) = state.any_chunk(nobodys) {
                let failure = BatchFailure::NoOrg { orgs: self.outs(&state, &chunk.group) };
                wakes.0.extend(state.give_back(chunk, &failure));
            }
            let free = |at: &usize| live[*at] && state.orgs[*at].is_free(self.in_flight, now);
            let count = live.len();
            let free: Vec<_> = (0..count).map(|step| (state.next_org + step) % count).filter(free).collect();
            for (org, places) in state.orgs.iter_mut().enumerate() {
                places.idle_since = free.contains(&org).then(|| places.idle_since.unwrap_or(now));
            }
            let mut given = free.into_iter().filter_map(|org| {
                let may = |group: &Group| !self.lines[org].refuses(group);
                let since = state.orgs[org].idle_since?;
                Some((org, state.next_chunk(self.linger, since, now, may)?))
            });
            let Some((org, mut chunk)) = given.next() else {
                lingers = state.times(self.linger, |orgs, group| self.free_for(orgs, group));
                break;
            };
            chunk.rows.retain(|gathered| state.is_wanted(gathered.key));
            if chunk.rows.is_empty() {
                continue;
            }
            state.next_org = (org + 1) % count;
            let token = Token::draw();
            for gathered in &chunk.rows {
                if let Some(row) = state.rows.get_mut(&gathered.key) {
                    row.place = Place::Batch(token);
                }
            }
            courses.push(Course::fresh(self.clone(), token, org, chunk, &mut state));
        }
        drop(state);
        wakes.wake(&self.works);
        for course in courses {
            self.works.add(course.run());
        }
        for (group, number, at) in lingers {
            self.works.add(self.clone().linger(group, number, at));
        }
    }

    /// Since when an org that takes these rows has had a place for them.
    pub(super) fn free_for(&self, orgs: &[Places], group: &Group) -> Option<Instant> {
        let takes = self.lines.iter().zip(orgs).filter(|(line, _)| !line.refuses(group));
        takes.filter_map(|(_, places)| places.idle_since).min()
    }

    /// Why no org takes these rows.
    pub(super) fn outs(&self, state: &State, group: &Group) -> Vec<(Arc<str>, Arc<str>)> {
        let why = |(line, places): (&Line, &Places)| {
            let refused = group.model().filter(|_| line.refuses(group));
            let why = match (places.out, refused) {
                (Some(class), _) => class.name().into(),
                (None, Some(model)) if !line.org.is_out() => OutReason::ForbiddenModel(model.into()).to_string().into(),
                _ => line.org.snapshot().out.map_or_else(|| "out".into(), |out| format!("{out:?}").into()),
            };
            (line.name.clone(), why)
        };
        self.lines.iter().zip(&state.orgs).map(why).collect()
    }

    /// An org's queue is full: no more for it until one of its batches ends, or some time has passed.
    pub(in crate::batch) fn crowded(self: &Arc<Self>, org: usize) {
        let mut state = self.lock();
        let Some(places) = state.orgs.get_mut(org) else { return };
        let wait = Duration::from_secs(60).saturating_mul(1 << places.crowded.min(4));
        places.crowded += 1;
        let until = Instant::now() + wait;
        places.full_until = Some(until);
        drop(state);
        let shared = self.clone();
        self.works.add(async move {
            tokio::time::sleep_until(until).await;
            shared.pump();
        });
    }
}

impl State {
    /// Puts a row into the open chunk of its group.
    pub(super) fn gather(&mut self, group: Group, gathered: Gathered, most: Size) {
        let (weight, bytes) = (gathered.weight, gathered.line.len());
        if self.open.get(&group).is_some_and(|open| !open.size.with(weight, bytes).fits(most)) {
            self.close(&group);
        }
        let now = Instant::now();
        let open = self.open.entry(group.clone()).or_insert_with(|| {
            self.opened += 1;
            let (size, number) = (Size::default(), self.opened);
            Open { rows: vec![], size, number, since: now, last: now, flushed: false, timed: None }
        });
        open.size = open.size.with(weight, bytes);
        open.last = now;
        open.rows.push(gathered);
        if open.size.is_full(most) {
            self.close(&group);
        }
    }

    pub(super) fn close(&mut self, group: &Group) {
        if let Some(open) = self.open.remove(group) {
            self.closed.push_back(Chunk::of(group.clone(), open.rows));
        }
    }

    /// The next one to go of those that may, where its org has had a place since `free`: a full one, else the oldest that has waited long
    /// enough.
    pub(super) fn next_chunk(
        &mut self,
        linger: Duration,
        free: Instant,
        now: Instant,
        may: impl Fn(&Group) -> bool,
    ) -> Option<Chunk> {
        let full = self.closed.iter().position(|chunk| may(&chunk.group));
        let since = full.map(|at| self.closed[at].since);
        let goes = |open: &Open| {
            let gathering = open.gathering(self.holds, self.unsettled);
            since.map_or_else(|| gathering.due(linger, free) <= now, |since| gathering.overdue(linger) < since)
        };
        let first =
            self.open.iter().filter(|(group, open)| may(group) && goes(open)).min_by_key(|(_, open)| open.since);
        if let Some(group) = first.map(|(group, _)| group.clone()) {
            let open = self.open.remove(&group)?;
            return Some(Chunk { flushed: open.flushed, ..Chunk::of(group, open.rows) });
        }
        self.closed.remove(full?)
    }

    /// Any that may, however full.
    pub(super) fn any_chunk(&mut self, may: impl Fn(&Group) -> bool) -> Option<Chunk> {
        if let Some(group) = self.open.keys().find(|group| may(group)).cloned() {
            self.close(&group);
        }
        let at = self.closed.iter().position(|chunk| may(&chunk.group))?;
        self.closed.remove(at)
    }

    /// Nobody takes it: its rows go back to who waits for them. Gives whom to wake.
    pub(super) fn give_back(&mut self, chunk: Chunk, failure: &BatchFailure) -> Vec<u64> {
        let end = |row: Gathered| self.end(row.key, None, End::Back(failure.clone(), Some(row.body))).1;
        chunk.rows.into_iter().flat_map(end).collect()
    }

    /// The chunks that are to be looked at earlier than it is set, and when. One without a place `free` for it is looked at when there is one.
    pub(super) fn times(
        &mut self,
        linger: Duration,
        free: impl Fn(&[Places], &Group) -> Option<Instant>,
    ) -> Vec<(Group, u64, Instant)> {
        let (holds, unsettled) = (self.holds, self.unsettled);
        let mut times = vec![];
        for (group, open) in &mut self.open {
            let Some(free) = free(&self.orgs, group) else { continue };
            let due = open.gathering(holds, unsettled).due(linger, free);
            if open.timed.is_none_or(|at| due < at) {
                open.timed = Some(due);
                times.push((group.clone(), open.number, due));
            }
        }
        times
    }

    /// Takes a row out of a batch, if it is still there and somebody waits for it: nobody has asked for it anew meanwhile.
    pub(super) fn free(&mut self, token: Token, key: Key) -> bool {
        let Some(row) = self.rows.get_mut(&key).filter(|row| row.place == Place::Batch(token) && row.end.is_none())
        else {
            return false;
        };
        if row.callers == 0 {
            self.rows.remove(&key);
            return false;
        }
        row.place = Place::Gathered;
        true
    }

    /// Whether somebody waits for a row; one for which nobody does is forgotten.
    pub(super) fn is_wanted(&mut self, key: Key) -> bool {
        let wanted = self.rows.get(&key).is_some_and(|row| row.callers > 0);
        if !wanted {
            self.rows.remove(&key);
        }
        wanted
    }
}
