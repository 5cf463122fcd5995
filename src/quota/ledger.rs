//! The law of one org's quota: a bucket a resource, and a ledger of calls whose answers are still to be believed. Pure.

use std::{collections::VecDeque, ops::Deref, task::Waker, time::Duration};

use tokio::time::Instant;

use super::{
    bucket::{Bucket, FAR, Said, Seconds},
    cost::{Cost, TooLarge},
    experience::Experience,
};
use crate::{
    dialect::{Readings, Resource},
    gate::Admission,
    org::{Org, ResourceQuota},
    outcome::Usage,
};

/// One figure for each resource, in the order of [`Resource::ALL`].
pub(crate) type PerResource = [f64; Resource::ALL.len()];

/// Token figures come rounded to thousands by some.
const GRAIN: f64 = 1_000.0;

/// So many calls are remembered at most. Where no answer tells a quota, none is known to be counted, and one that never ends
/// would keep all that were sent after it. An answer that so many calls were sent after is too old to be believed.
const REMEMBERED: usize = 1 << 16;

/// A bucket that no answer has mentioned for so long keeps no call in the ledger.
const MENTIONED: Seconds = 10.0;

pub(crate) struct Quota {
    org: Org,
    buckets: [Bucket; Resource::ALL.len()],
    /// For each bucket the call whose answer it rests on, and the first call that this answer says nothing certain about.
    rests_on: [Option<Reference>; Resource::ALL.len()],
    /// Calls in the order they were sent, from `first` on.
    ledger: VecDeque<Entry>,
    first: u64,
    /// No call before this one is open.
    first_open: u64,
    /// What all calls were taken to cost when they were sent, and what has come off that since.
    spent: PerResource,
    corrected: PerResource,
    /// So that a sum over many calls is not made anew for each answer.
    since: Since,
    experience: Experience,
    /// Whether some bucket counts tokens: else nobody need know what calls use.
    meters_tokens: bool,
    /// More than so much no request may cost.
    hard: [Option<f64>; Resource::ALL.len()],
    /// Calls that proved dearer than what was reserved for them, and wait in their own futures until they are covered.
    unsent: usize,
    guard: Seconds,
    /// From here on all times are counted.
    began: Instant,
    /// Calls that wait in their own futures, to be woken when more is there than time alone brings.
    impatient: Vec<Waker>,
}

struct Entry {
    sent: Seconds,
    /// Its answer has been read, or will not be.
    closed: bool,
    /// What it costs, as far as is known now.
    cost: PerResource,
    /// How much less it costs than it was taken to when it was sent.
    corrected: PerResource,
    /// What all sent up to and including this call were taken to cost then.
    spent: PerResource,
}

#[derive(Clone, Copy)]
struct Reference {
    call: u64,
    from: u64,
    read: Seconds,
}

/// What has come off a call and all that were sent after it.
#[derive(Default)]
struct Since {
    call: u64,
    corrected: PerResource,
}

/// What was reserved: the usual cost, since the request is not known yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) cost: PerResource,
    /// Some bucket counts tokens, so what the request will cost is worth an estimate.
    pub(crate) meters_tokens: bool,
    /// Some request may be larger than anything that is ever taken.
    pub(crate) has_hard: bool,
}

impl Deref for Grant {
    type Target = PerResource;

    fn deref(&self) -> &PerResource {
        &self.cost
    }
}

/// What an answer says of its own call.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Verdict {
    /// The provider did not count it.
    pub(crate) uncounted: bool,
    /// What it used.
    pub(crate) usage: Option<Usage>,
    /// What its input was estimated at.
    pub(crate) estimate: Option<f64>,
    /// What it used is told later, when its body ends.
    pub(crate) told_later: bool,
}

impl Quota {
    pub(crate) fn new(org: Org, guard: Duration, quantile: f64, now: Instant) -> Self {
        Quota {
            org,
            buckets: Resource::ALL.map(|resource| match resource {
                Resource::Requests => Bucket::new(0.0),
                _ => Bucket::new(0.0).rounded(GRAIN),
            }),
            rests_on: [None; Resource::ALL.len()],
            ledger: VecDeque::new(),
            first: 0,
            first_open: 0,
            spent: PerResource::default(),
            corrected: PerResource::default(),
            since: Since::default(),
            experience: Experience::new(quantile),
            meters_tokens: false,
            hard: [None; Resource::ALL.len()],
            unsent: 0,
            guard: guard.as_secs_f64(),
            began: now,
            impatient: vec![],
        }
    }

    fn seconds(&self, now: Instant) -> Seconds {
        now.saturating_duration_since(self.began).as_secs_f64()
    }

    /// The first moment of the clock that is not before `at`.
    fn instant(&self, at: Seconds, now: Instant) -> Instant {
        // It may be rounded down by a nanosecond.
        let since = Duration::try_from_secs_f64(at).ok().map(|since| since + Duration::from_nanos(1));
        since.and_then(|since| self.began.checked_add(since)).unwrap_or(now + Duration::from_secs_f64(FAR))
    }

    fn each(&mut self, costs: &PerResource, mut act: impl FnMut(&mut Bucket, f64)) {
        for (bucket, cost) in self.buckets.iter_mut().zip(costs) {
            act(bucket, *cost);
        }
    }

    fn latest(&self, costs: &PerResource, at: impl Fn(&Bucket, f64) -> Seconds) -> Seconds {
        self.buckets.iter().zip(costs).map(|(bucket, cost)| at(bucket, *cost)).fold(0.0, f64::max)
    }

    /// Whether a request can never be served, however long it waits.
    pub(crate) fn too_large(&self, cost: &Cost) -> Option<TooLarge> {
        let least = self.experience.least(cost);
        let each = Resource::ALL.into_iter().zip(self.hard).zip(least);
        each.filter_map(|((resource, limit), least)| Some((resource, limit?, least)))
            .find(|(_, limit, least)| least > limit)
            .map(|(resource, limit, least)| TooLarge::new(resource, limit, least))
    }

    pub(crate) fn set_quantile(&mut self, quantile: f64) {
        self.experience = Experience::new(if quantile.is_nan() { 1.0 } else { quantile.clamp(0.5, 1.0) });
    }

    /// No request of more than `limit` is ever served.
    pub(crate) fn set_hard(&mut self, resource: Resource, limit: f64) {
        self.hard[resource.index()] = Some(limit);
    }

    /// The reservation becomes a call of this cost. Sent at once if it is covered; else it stays taken off, and the time is
    /// told when it will be covered.
    pub(crate) fn call(
        &mut self,
        reserved: &PerResource,
        cost: &Cost,
        now: Instant,
    ) -> (PerResource, Result<u64, Instant>) {
        let price = self.experience.price(cost);
        if self.meters_tokens {
            self.experience.asked(&price);
        }
        let seconds = self.seconds(now);
        for ((bucket, reserved), cost) in self.buckets.iter_mut().zip(reserved).zip(&price) {
            bucket.true_up(*reserved, *cost, seconds);
        }
        let sent = self.send_covered(price, seconds, now);
        self.unsent += usize::from(sent.is_err());
        (price, sent)
    }

    /// Sends a call that waits, if it is covered by now; or tells when.
    pub(crate) fn send(&mut self, cost: PerResource, now: Instant) -> Result<u64, Instant> {
        let sent = self.send_covered(cost, self.seconds(now), now);
        self.unsent -= usize::from(sent.is_ok());
        sent
    }

    /// Sends a call whose cost has been taken off, if it is covered; or tells when.
    fn send_covered(&mut self, cost: PerResource, seconds: Seconds, now: Instant) -> Result<u64, Instant> {
        let at = self.latest(&cost, |bucket, cost| bucket.covered_at(cost, seconds));
        if at > seconds { Err(self.instant(at, now)) } else { Ok(self.sent(cost, seconds)) }
    }

    /// When the next may be admitted.
    fn opens(&self, now: Seconds) -> Seconds {
        let (usual, large) = (self.experience.usual(), self.experience.large());
        let each = self.buckets.iter().zip(usual.iter().zip(large));
        each.map(|(bucket, (usual, large))| bucket.opens_at(*usual, *large, self.unsent > 0, now)).fold(0.0, f64::max)
    }

    /// Remembers whom to wake when more is there than time alone brings.
    pub(crate) fn wake_when_more(&mut self, waker: &Waker) {
        if !self.impatient.iter().any(|other| other.will_wake(waker)) {
            self.impatient.push(waker.clone());
        }
    }

    /// Those who are to look again, now that more may be there. To be woken outside the lock.
    #[must_use]
    pub(crate) fn impatient(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.impatient)
    }

    /// What was reserved is not used, or a call that waits is given up (`unsent`).
    pub(crate) fn give_back(&mut self, cost: &PerResource, unsent: bool, now: Instant) {
        self.unsent -= usize::from(unsent);
        let now = self.seconds(now);
        self.each(cost, |bucket, cost| bucket.give_back(cost, now));
    }

    /// Writes a call down as sent now.
    fn sent(&mut self, cost: PerResource, now: Seconds) -> u64 {
        self.each(&cost, |bucket, cost| bucket.sent(cost, now));
        for (spent, cost) in self.spent.iter_mut().zip(&cost) {
            *spent += cost;
        }
        if self.ledger.len() == REMEMBERED {
            self.forget(1);
        }
        let entry = Entry { sent: now, closed: false, cost, corrected: PerResource::default(), spent: self.spent };
        self.ledger.push_back(entry);
        self.first + self.ledger.len() as u64 - 1
    }

    fn position(&self, call: u64) -> Option<usize> {
        usize::try_from(call.checked_sub(self.first)?).ok().filter(|i| *i < self.ledger.len())
    }

    /// An answer was read. True if it says itself that there was quota for what this call was to cost.
    pub(crate) fn answered(&mut self, call: u64, readings: &Readings, verdict: Verdict, at: Instant) -> bool {
        let within = self.position(call).is_some_and(|position| is_within(&self.ledger[position].cost, readings));
        let now = self.seconds(at);
        self.meters_tokens |= Resource::TOKENS.iter().any(|resource| readings.get(*resource).is_some());
        self.settle(call, verdict, now);
        let Some(position) = self.position(call) else { return within };
        if !readings.is_empty() {
            self.learn(position, readings, verdict, now);
            let each = self.buckets.iter().map(|bucket| bucket.headroom(now));
            let (headroom, per_second) = each.fold((1.0, 0.0), |least, one| if one.0 < least.0 { one } else { least });
            self.org.write_headroom(headroom, per_second, at);
        }
        if !verdict.told_later {
            self.closed(call, now);
        }
        within
    }

    /// No answer of this call will be read any more. It is kept while one that was sent at about the same time may still be.
    pub(crate) fn close(&mut self, call: u64, verdict: Verdict, now: Instant) {
        let now = self.seconds(now);
        self.settle(call, verdict, now);
        self.closed(call, now);
    }

    /// What a call costs is known, now or at last.
    fn settle(&mut self, call: u64, verdict: Verdict, now: Seconds) {
        let position = self.position(call);
        let used = if verdict.uncounted {
            PerResource::default()
        } else {
            let Some(usage) = verdict.usage.filter(|_| self.meters_tokens) else { return };
            let taken = position.map(|position| self.ledger[position].cost);
            self.experience.used(usage, verdict.estimate, taken.as_ref());
            let usual = *self.experience.usual();
            self.each(&usual, Bucket::usually);
            Experience::cost_of(usage)
        };
        let Some(position) = position else { return };
        let entry = &mut self.ledger[position];
        let taken = std::mem::replace(&mut entry.cost, used);
        for i in 0..used.len() {
            let less = taken[i] - used[i];
            if less == 0.0 {
                continue;
            }
            entry.corrected[i] += less;
            self.corrected[i] += less;
            if call >= self.since.call {
                self.since.corrected[i] += less;
            }
            // What is left has it taken off, unless it rests on an answer that counts the call, or on its own.
            if self.rests_on[i].is_none_or(|rests_on| call >= rests_on.from && call != rests_on.call) {
                match verdict.uncounted {
                    true => self.buckets[i].refund(less, now),
                    false => self.buckets[i].settle(taken[i], used[i], now),
                }
            }
        }
    }

    fn learn(&mut self, position: usize, readings: &Readings, verdict: Verdict, now: Seconds) {
        if Resource::ALL.iter().any(|resource| readings.get(*resource).is_some_and(|said| said.remaining.is_some())) {
            self.org.write_quota_told();
        }
        let Entry { sent, cost, corrected, spent, .. } = self.ledger[position];
        // What the call itself cost, where that is known: an estimate may be far off, and would be learnt as capacity for good.
        let own = match verdict {
            Verdict { uncounted: true, .. } => PerResource::default(),
            _ => Experience::cost_of(verdict.usage.unwrap_or_default()),
        };
        // Arrivals over many connections are permuted: what was sent just before may have come in after.
        let sure = sent - self.guard;
        let from = self.first_sent_after(sure);
        // All from there on, but for this one.
        let uncounted = self.uncounted(from, position);
        for resource in Resource::ALL {
            let Some(reading) = readings.get(resource) else { continue };
            let i = resource.index();
            if resource == Resource::Tokens && is_sum(readings) {
                // No bucket, so no call is taken off it.
                if self.buckets[i].is_none(sent, now) {
                    self.rests_on[i] = None;
                }
                continue;
            }
            let others = self.ledger.range(from..).enumerate().filter(|(nth, _)| from + nth != position);
            let believed = self.buckets[i].learn(
                Said {
                    per_minute: reading.limit,
                    remaining: reading.remaining,
                    reset: reading.reset.map(|reset| reset.as_secs_f64()),
                    sent,
                    own: own[i],
                    asked: cost[i] + corrected[i],
                    // Corrections come a little before or after the answers they belong to; over a second that is little.
                    spent: spent[i] - self.corrected[i],
                    uncounted: uncounted[i],
                },
                others.map(|(_, entry)| (entry.sent, entry.cost[i])),
                self.guard,
                now,
            );
            if believed {
                let call = self.first + position as u64;
                self.rests_on[i] = Some(Reference { call, from: self.first + from as u64, read: now });
            }
        }
        // Whatever was sent clearly before the calls that all buckets rest on is counted in what they know.
        let mentioned = self.rests_on.iter().flatten().filter(|rests_on| now - rests_on.read < MENTIONED);
        if let Some(from) = mentioned.map(|rests_on| rests_on.from).min() {
            self.forget(usize::try_from(from.saturating_sub(self.first)).unwrap_or(usize::MAX).min(self.ledger.len()));
        }
    }

    /// What the calls from one on cost together, but for the one at `except`.
    fn uncounted(&mut self, from: usize, except: usize) -> PerResource {
        let Some(first) = self.ledger.get(from) else { return PerResource::default() };
        let before: PerResource = std::array::from_fn(|i| first.spent[i] - first.cost[i] - first.corrected[i]);
        let own = if from <= except { self.ledger[except].cost } else { PerResource::default() };
        self.look_since(from);
        std::array::from_fn(|i| self.spent[i] - before[i] - self.since.corrected[i] - own[i])
    }

    /// The first call that was sent later than this. Mostly it is a few further than the one that was asked for last; else it is
    /// searched by halves.
    fn first_sent_after(&self, time: Seconds) -> usize {
        let (calls, last) = (self.ledger.len(), self.position(self.since.call).unwrap_or(self.ledger.len()));
        let is_it =
            |at: usize| (at == 0 || self.ledger[at - 1].sent <= time) && (at == calls || self.ledger[at].sent > time);
        let by_halves = || self.ledger.partition_point(|entry| entry.sent <= time);
        let near = (last..=calls.min(last + 4)).find(|at| is_it(*at));
        debug_assert!(near.is_none_or(|at| at == by_halves()));
        near.unwrap_or_else(by_halves)
    }

    /// Nearly always a few calls further than the last time.
    fn look_since(&mut self, from: usize) {
        let at = self.position(self.since.call).unwrap_or(self.ledger.len());
        for (step, range) in [(-1.0, at..from), (1.0, from..at)] {
            for entry in self.ledger.range(range.start.min(range.end)..range.end) {
                for (since, corrected) in self.since.corrected.iter_mut().zip(&entry.corrected) {
                    *since += step * corrected;
                }
            }
        }
        self.since.call = self.first + from as u64;
    }

    fn closed(&mut self, call: u64, now: Seconds) {
        if let Some(position) = self.position(call) {
            self.ledger[position].closed = true;
        }
        while self.position(self.first_open).is_some_and(|open| self.ledger[open].closed) {
            self.first_open += 1;
        }
        // What is before the first open call was sent before any answer yet to be read; what is long before it, is counted.
        // Where none is open, the next is sent now at the earliest.
        let open = self.position(self.first_open);
        let earliest = open.map_or(now, |open| self.ledger[open].sent);
        let sure = earliest - self.guard;
        let done = self.ledger.range(..open.unwrap_or(self.ledger.len()));
        let settled = done.take_while(|entry| entry.sent < sure).count();
        self.forget(settled);
    }

    /// Drops the first `n` calls of the ledger. Their answers may still come; they are older than what is known.
    fn forget(&mut self, n: usize) {
        if self.position(self.since.call).is_none_or(|at| at < n) {
            self.look_since(n);
        }
        self.ledger.drain(..n);
        self.first += n as u64;
        self.first_open = self.first_open.max(self.first);
        if self.ledger.is_empty() {
            // What rounding has left over.
            self.since.corrected = PerResource::default();
        }
    }

    /// Whether an announced reset has told how large a bucket is.
    pub(crate) fn is_sized(&self) -> bool {
        self.buckets.iter().any(Bucket::is_sized)
    }

    /// The provider's own id for the org. The org, if that is news: to be told under no lock.
    pub(crate) fn identify(&self, id: &str) -> Option<Org> {
        self.org.write_organisation(id).then(|| self.org.clone())
    }

    /// All that is known of its buckets, for reports.
    pub(crate) fn meters(&self, now: Instant) -> Vec<ResourceQuota> {
        let seconds = self.seconds(now);
        let family = self.org.model_family();
        let each = Resource::ALL.into_iter().zip(&self.buckets);
        each.filter_map(|(resource, bucket)| {
            let meter = bucket.meter(seconds)?;
            let mut quota = ResourceQuota::new(resource, family);
            quota.per_minute = meter.per_minute;
            quota.capacity = meter.capacity;
            quota.remaining = meter.remaining;
            quota.said = meter.said.map(|(figure, at)| (figure, self.instant(at, now)));
            quota.refill_per_minute = meter.refill * 60.0;
            quota.shared = meter.shared;
            quota.reserved = meter.reserved + self.in_flight(resource);
            quota.estimate_to_actual = self.experience.taken_to_used(resource);
            Some(quota)
        })
        .collect()
    }

    /// What is sent and not answered.
    fn in_flight(&self, resource: Resource) -> f64 {
        self.ledger.iter().filter(|entry| !entry.closed).map(|entry| entry.cost[resource.index()]).sum()
    }

    #[cfg(test)]
    pub(crate) fn bucket(&self, resource: Resource) -> &Bucket {
        &self.buckets[resource.index()]
    }

    #[cfg(test)]
    pub(crate) fn headroom_of(&self, resource: Resource, now: Instant) -> f64 {
        self.bucket(resource).headroom(self.seconds(now)).0
    }

    #[cfg(test)]
    pub(crate) fn ledger_len(&self) -> usize {
        self.ledger.len()
    }
}

/// Whether something is said of what remains, and nothing that is said is less than this cost.
fn is_within(cost: &PerResource, readings: &Readings) -> bool {
    let mut remaining = Resource::ALL
        .into_iter()
        .zip(cost)
        .filter_map(|(resource, cost)| Some((readings.get(resource)?.remaining?, cost)));
    let mut told = false;
    remaining.all(|(remaining, cost)| {
        told = true;
        remaining >= *cost
    }) && told
}

/// Whether what is said of tokens is just the sum of what is said of input and output, or the one of them that is told. Then a
/// call takes no more off it than off these; a bucket of both has less left than that as soon as it binds.
fn is_sum(readings: &Readings) -> bool {
    let figures = |resource| readings.get(resource).and_then(|said| said.limit.zip(said.remaining));
    let Some((limit, remaining)) = figures(Resource::Tokens) else { return false };
    let parts = [Resource::InputTokens, Resource::OutputTokens];
    if parts.iter().any(|resource| readings.get(*resource).is_some() && figures(*resource).is_none()) {
        return false;
    }
    let told = parts.into_iter().filter_map(figures);
    let (number, limits, remains) = told.fold((0, 0.0, 0.0), |sum, one| (sum.0 + 1, sum.1 + one.0, sum.2 + one.1));
    // Of two, each and their sum may be rounded.
    let grain = if is_rounded(remaining) && is_rounded(remains) { GRAIN } else { 1.0 };
    let rounding = if number == 2 { grain } else { 0.0 };
    number > 0 && (limit - limits).abs() <= 1.0 && (remaining - remains).abs() <= rounding
}

/// Whether a figure is a multiple of the grain: reckoned in integers, which costs next to nothing. One that is beyond them is no
/// figure that anybody rounds.
fn is_rounded(figure: f64) -> bool {
    let whole = figure as u64;
    whole as f64 == figure && whole % GRAIN as u64 == 0
}

impl Admission for Quota {
    type Grant = Grant;

    fn admit(&mut self, now: Instant) -> Option<Grant> {
        let now = self.seconds(now);
        if self.opens(now) > now {
            return None;
        }
        let usual = *self.experience.usual();
        self.each(&usual, |bucket, cost| bucket.reserve(cost, now));
        let has_hard = self.hard.iter().any(Option::is_some);
        Some(Grant { cost: usual, meters_tokens: self.meters_tokens, has_hard })
    }

    fn free(&self, now: Instant) -> usize {
        // One at a time: what the next may do depends on this one.
        usize::from(self.opens_at(now).is_none())
    }

    fn opens_at(&self, now: Instant) -> Option<Instant> {
        let seconds = self.seconds(now);
        let at = self.opens(seconds);
        (at > seconds).then(|| self.instant(at, now))
    }

    fn waiting(&mut self, _waiters: usize) {}
}
