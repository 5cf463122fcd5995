//! The law of one org's quota: a bucket a resource, and a ledger of calls whose answers are still to be believed. Pure.

use std::{collections::VecDeque, task::Waker, time::Duration};

use tokio::time::Instant;

use super::{
    bucket::{Bucket, FAR, Said, Seconds},
    cost::Cost,
    dialect::{Readings, Resource},
};
use crate::{gate::Admission, org::Org, outcome::Usage};

/// One figure for each resource, in the order of [`Resource::ALL`].
pub(crate) type PerResource = [f64; Resource::ALL.len()];

/// How much of what was learnt of a call's usual cost is replaced by the next answer's.
const LEARN: f64 = 0.2;

/// No call has so many tokens. Beyond some such bound sums lose what is small.
const TOKENS_MAX: f64 = 1e9;

/// So many calls are remembered at most. Where no answer tells a quota, none is known to be counted, and one that never ends
/// would keep all that were sent after it. An answer that so many calls were sent after is too old to be believed.
const REMEMBERED: usize = 1 << 16;

pub(crate) struct Quota {
    org: Org,
    buckets: [Bucket; Resource::ALL.len()],
    /// Calls in the order they were sent, from `first` on.
    ledger: VecDeque<Entry>,
    first: u64,
    /// No call before this one is open.
    first_open: u64,
    spent: PerResource,
    usual: Usual,
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
    cost: PerResource,
    /// All sent up to and including this call.
    spent: PerResource,
}

/// What calls have used lately.
#[derive(Clone, Copy, Debug, Default)]
struct Usual {
    input: f64,
    output: f64,
}

impl Quota {
    pub(crate) fn new(org: Org, guard: Duration, now: Instant) -> Self {
        Quota {
            org,
            buckets: std::array::from_fn(|_| Bucket::new(0.0)),
            ledger: VecDeque::new(),
            first: 0,
            first_open: 0,
            spent: PerResource::default(),
            usual: Usual::default(),
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

    fn price(&self, cost: Cost) -> PerResource {
        // An estimate that makes no sense (an average over nothing is NaN) is none: it must not spoil what is known.
        let sound = |tokens: &f64| tokens.is_finite() && *tokens >= 0.0;
        let input = cost.input_tokens.filter(sound).unwrap_or(self.usual.input).min(TOKENS_MAX);
        let output = cost.output_tokens.filter(sound).unwrap_or(self.usual.output).min(TOKENS_MAX);
        let mut price = PerResource::default();
        price[Resource::Requests.index()] = 1.0;
        price[Resource::InputTokens.index()] = input;
        price[Resource::OutputTokens.index()] = output;
        price[Resource::Tokens.index()] = input + output;
        price
    }

    fn each(&mut self, costs: &PerResource, mut act: impl FnMut(&mut Bucket, f64)) {
        for (bucket, cost) in self.buckets.iter_mut().zip(costs) {
            act(bucket, *cost);
        }
    }

    fn latest(&self, costs: &PerResource, at: impl Fn(&Bucket, f64) -> Seconds) -> Seconds {
        self.buckets.iter().zip(costs).map(|(bucket, cost)| at(bucket, *cost)).fold(0.0, f64::max)
    }

    /// The reservation becomes a call of this cost. Sent at once if it is covered; else it stays taken off, and the time is
    /// told when it will be covered.
    pub(crate) fn call(
        &mut self,
        reserved: &PerResource,
        cost: Cost,
        now: Instant,
    ) -> (PerResource, Result<u64, Instant>) {
        let price = self.price(cost);
        let seconds = self.seconds(now);
        for ((bucket, reserved), cost) in self.buckets.iter_mut().zip(reserved).zip(&price) {
            bucket.true_up(*reserved, *cost, seconds);
        }
        let sent = self.send_covered(price, now);
        self.unsent += usize::from(sent.is_err());
        (price, sent)
    }

    /// Sends a call that waits, if it is covered by now; or tells when.
    pub(crate) fn send(&mut self, cost: PerResource, now: Instant) -> Result<u64, Instant> {
        let sent = self.send_covered(cost, now);
        self.unsent -= usize::from(sent.is_ok());
        sent
    }

    /// Sends a call whose cost has been taken off, if it is covered; or tells when.
    fn send_covered(&mut self, cost: PerResource, now: Instant) -> Result<u64, Instant> {
        let seconds = self.seconds(now);
        let at = self.latest(&cost, |bucket, cost| bucket.covered_at(cost, seconds));
        if at > seconds { Err(self.instant(at, now)) } else { Ok(self.sent(cost, seconds)) }
    }

    /// When the next may be admitted.
    fn opens(&self, now: Seconds) -> Seconds {
        let usual = self.price(Cost::default());
        self.latest(&usual, |bucket, cost| bucket.opens_at(cost, self.unsent > 0, now))
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
        self.each(&cost, Bucket::sent);
        for (spent, cost) in self.spent.iter_mut().zip(&cost) {
            *spent += cost;
        }
        if self.ledger.len() == REMEMBERED {
            self.forget(1);
        }
        self.ledger.push_back(Entry { sent: now, closed: false, cost, spent: self.spent });
        self.first + self.ledger.len() as u64 - 1
    }

    fn position(&self, call: u64) -> Option<usize> {
        usize::try_from(call.checked_sub(self.first)?).ok().filter(|i| *i < self.ledger.len())
    }

    /// An answer was read. `refused`: the provider did not count the call.
    pub(crate) fn answered(
        &mut self,
        call: u64,
        readings: &Readings,
        refused: bool,
        usage: Option<Usage>,
        now: Instant,
    ) {
        let now = self.seconds(now);
        if let Some(usage) = usage {
            self.learn_usual(usage);
        }
        let Some(position) = self.position(call) else { return };
        let asked = self.ledger[position].cost;
        if refused {
            self.refund(position, now);
        }
        if readings.is_empty() {
            self.closed(call, now);
            return;
        }
        if Resource::ALL.iter().any(|resource| readings.get(*resource).is_some_and(|said| said.remaining.is_some())) {
            self.org.write_quota_told();
        }
        let (sent, spent) = (self.ledger[position].sent, self.ledger[position].spent);
        // What the call itself cost, where that is known: an estimate may be far off, and would be learnt as capacity for good.
        let used = usage.unwrap_or_default();
        let used = Cost::tokens(Some(used.input_tokens as f64), Some(used.output_tokens as f64));
        let own = if refused { PerResource::default() } else { self.price(used) };
        // Arrivals over many connections are permuted: what was sent just before may have come in after.
        let sure = sent - self.guard;
        let from = self.ledger.partition_point(|entry| entry.sent <= sure);
        // All from there on, but for this one.
        let uncounted: PerResource = match self.ledger.get(from) {
            Some(first) => std::array::from_fn(|i| {
                let own = if from <= position { self.ledger[position].cost[i] } else { 0.0 };
                self.spent[i] - (first.spent[i] - first.cost[i]) - own
            }),
            None => PerResource::default(),
        };
        for resource in Resource::ALL {
            let Some(reading) = readings.get(resource) else { continue };
            let i = resource.index();
            let remaining = reading.remaining.map(|remaining| match resource {
                Resource::Requests => remaining,
                // Token figures come rounded to thousands; half of one may not be there.
                _ if remaining as u64 % 1000 == 0 => (remaining - 500.0).max(0.0),
                _ => remaining,
            });
            let others = self.ledger.range(from..).enumerate().filter(|(nth, _)| from + nth != position);
            self.buckets[i].learn(
                Said {
                    per_minute: reading.limit,
                    remaining,
                    reset: reading.reset.map(|reset| reset.as_secs_f64()),
                    sent,
                    own: own[i],
                    asked: asked[i],
                    spent: spent[i],
                    uncounted: uncounted[i],
                },
                others.map(|(_, entry)| (entry.sent, entry.cost[i])),
                self.guard,
                now,
            );
        }
        // Whatever was sent clearly before this call is counted in what its answer says.
        self.forget(from);
        self.closed(call, now);
        let each = self.buckets.iter().map(|bucket| bucket.headroom(now));
        let (headroom, per_second) = each.fold((1.0, 0.0), |least, one| if one.0 < least.0 { one } else { least });
        self.org.write_headroom(headroom, per_second);
    }

    fn refund(&mut self, position: usize, now: Seconds) {
        let cost = std::mem::take(&mut self.ledger[position].cost);
        self.each(&cost, |bucket, cost| bucket.refund(cost, now));
        for (spent, cost) in self.spent.iter_mut().zip(&cost) {
            *spent -= cost;
        }
        for entry in self.ledger.range_mut(position..) {
            for (spent, cost) in entry.spent.iter_mut().zip(&cost) {
                *spent -= cost;
            }
        }
    }

    /// No answer of this call will be read any more. It is kept while one that was sent at about the same time may still be.
    pub(crate) fn close(&mut self, call: u64, now: Instant) {
        self.closed(call, self.seconds(now));
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
        self.ledger.drain(..n);
        self.first += n as u64;
        self.first_open = self.first_open.max(self.first);
    }

    /// Whether an announced reset has told how large a bucket is.
    pub(crate) fn is_sized(&self) -> bool {
        self.buckets.iter().any(Bucket::is_sized)
    }

    /// The provider's own id for the org. The org, if that is news: to be told under no lock.
    pub(crate) fn identify(&self, id: &str) -> Option<Org> {
        self.org.write_organisation(id).then(|| self.org.clone())
    }

    fn learn_usual(&mut self, usage: Usage) {
        for (usual, used) in
            [(&mut self.usual.input, usage.input_tokens as f64), (&mut self.usual.output, usage.output_tokens as f64)]
        {
            let used = used.min(TOKENS_MAX);
            *usual = if *usual == 0.0 { used } else { *usual + LEARN * (used - *usual) };
        }
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

impl Admission for Quota {
    /// What was reserved: the usual cost, since the request is not known yet.
    type Grant = PerResource;

    fn admit(&mut self, now: Instant) -> Option<PerResource> {
        let now = self.seconds(now);
        if self.opens(now) > now {
            return None;
        }
        let usual = self.price(Cost::default());
        self.each(&usual, |bucket, cost| bucket.reserve(cost, now));
        Some(usual)
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
