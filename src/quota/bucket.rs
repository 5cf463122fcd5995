//! One resource of a quota: how much is left, how fast it comes back, and when the next call may go. Pure.
//!
//! A bucket is known only through answers. What one says about what remains was true when its call arrived, so every call
//! sent after it, or too close before it to tell, is counted as not yet counted there.

use crate::outcome::HINT_CEILING;

/// A moment, or a span of time, in seconds: a moment since its ledger's beginning. A double keeps nanoseconds apart for a hundred
/// days, and sums of it are a tenth of the work that clock readings make.
pub(crate) type Seconds = f64;

/// Below this part of the capacity calls are paced. 15 % was enough in a simulation with one copy of us.
const MARK: f64 = 0.15;
/// The same while somebody else spends too: with two copies on one key, 30 % brought refusals from 12 % to 0.6 %.
const SHARED_MARK: f64 = 0.30;
/// ... and at least so many usual calls' worth, or the whole bucket where that is less.
const MARK_CALLS: f64 = 6.0;
/// ... and, while we are alone, at most so much of the refill: half the mark is never spent, and what a large bucket keeps
/// unspent would be idle quota.
const MARK_SPAN: Seconds = 0.2;
/// A net refill below this part of the announced one means that somebody else spends too.
const SHARED_BELOW: f64 = 0.9;
/// The refill is observed over at least so long, and over so many usual calls' worth, or so many times what figures are
/// rounded to: less is noise.
const OBSERVED_SPAN: Seconds = 1.0;
const OBSERVED_CALLS: f64 = 60.0;
/// What has been the same for so many such spans, over at least so many answers, and is no less than so many usual calls, is a
/// bucket that is full, however much more was once seen in it ...
const FLAT_SPANS: f64 = 3.0;
const FLAT_ANSWERS: usize = 6;
const FLAT_CALLS: f64 = 2.0;
/// ... unless we have spent more than this part of the refill: copies of us that share a quota keep it level between them.
const FLAT_SPENT: f64 = 0.125;
/// A pace may catch up so much lateness: timers ring up to a millisecond late, and tasks later still.
const SLACK: Seconds = 0.004;

#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    /// Announced refill per second; `None` until an answer has said so: then nothing is limited.
    announced: Option<f64>,
    /// Observed refill per second, never above the announced one.
    refill: f64,
    /// Somebody else spends too.
    shared: bool,
    /// The largest level seen; providers do not announce it.
    capacity: f64,
    /// What the bucket would hold at the announced reset: for reports only, since resets are rounded.
    full: f64,
    /// What is left, all that was reserved or sent already taken off. Below zero while a call waits that does not fit.
    level: f64,
    /// The moment for which `level` holds.
    at: Seconds,
    /// Reserved, not sent yet.
    pending: f64,
    /// By so many. None means nothing, whatever a sum of fractions leaves over: a bucket that seems never to be full
    /// would keep a call that is larger waiting.
    reservations: usize,
    /// The pace: no call before.
    next: Seconds,
    /// When something was last reserved or learnt.
    touched: Seconds,
    /// When the call was sent whose answer `level` rests on; or says that there is no such bucket, where none is announced.
    reference: Option<Seconds>,
    /// What the provider said then remains, and when it was read.
    said: Option<(f64, Seconds)>,
    window: Option<Window>,
    /// How long answers have found the same in it.
    flat: Option<Flat>,
    /// What a call costs on average.
    usual: f64,
    /// What figures are rounded to, as far as is known.
    grain: f64,
}

/// Where an observation of the refill began.
#[derive(Clone, Copy, Debug)]
struct Window {
    sent: Seconds,
    remaining: f64,
    spent: f64,
}

/// A time through which every answer found nearly the same.
#[derive(Clone, Copy, Debug)]
struct Flat {
    since: Seconds,
    spent: f64,
    least: f64,
    most: f64,
    answers: usize,
}

/// What an answer says of one bucket, and what its reader knows of the calls around it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    /// The announced limit per minute.
    pub(crate) per_minute: Option<f64>,
    /// What remained when the call arrived.
    pub(crate) remaining: Option<f64>,
    /// When the call was sent.
    pub(crate) sent: Seconds,
    /// What the call itself cost, as far as is known for sure; 0 if it was refused.
    pub(crate) own: f64,
    /// What it would have cost.
    pub(crate) asked: f64,
    /// How long after it the bucket is full again, by what it says.
    pub(crate) reset: Option<Seconds>,
    /// All that was ever sent and not refused, up to and including this call.
    pub(crate) spent: f64,
    /// What the calls cost together that the answer says nothing certain about.
    pub(crate) uncounted: f64,
}

impl Bucket {
    pub(crate) fn new(now: Seconds) -> Self {
        Bucket {
            announced: None,
            refill: 0.0,
            shared: false,
            capacity: 0.0,
            full: 0.0,
            level: 0.0,
            at: now,
            pending: 0.0,
            reservations: 0,
            next: now,
            touched: now,
            reference: None,
            said: None,
            window: None,
            flat: None,
            usual: 1.0,
            grain: 1.0,
        }
    }

    /// A bucket whose figures may come rounded.
    pub(crate) fn rounded(mut self, grain: f64) -> Self {
        self.grain = grain;
        self
    }

    /// What a call costs on average.
    pub(crate) fn usually(&mut self, cost: f64) {
        if cost > 0.0 {
            self.usual = cost;
        }
    }

    pub(crate) fn is_sized(&self) -> bool {
        self.full > 0.0
    }

    pub(crate) fn known(&self) -> bool {
        self.announced.is_some() && self.reference.is_some()
    }

    /// Brings the level up to `now`.
    fn refresh(&mut self, now: Seconds) {
        if now > self.at {
            self.level = self.level_at(now);
            self.at = now;
        }
    }

    fn level_at(&self, now: Seconds) -> f64 {
        (self.level + self.refill * (now - self.at).max(0.0)).min(self.capacity - self.pending)
    }

    fn mark(&self) -> f64 {
        let part =
            if self.shared { SHARED_MARK * self.capacity } else { (MARK * self.capacity).min(self.refill * MARK_SPAN) };
        part.max((MARK_CALLS * self.usual).min(self.capacity)).max(f64::MIN_POSITIVE)
    }

    /// The fraction left, 1 where nothing is known; and how much of it comes back in a second.
    pub(crate) fn headroom(&self, now: Seconds) -> (f64, f64) {
        if !self.known() {
            return (1.0, 0.0);
        }
        let mut full = self.capacity.max(self.full);
        if full <= 0.0 {
            // Nothing was ever seen in it: a minute's worth will do.
            full = self.announced.unwrap_or(1.0) * 60.0;
        }
        let dt = (now - self.at).max(0.0);
        (((self.level + self.refill * dt) / full).clamp(0.0, 1.0), self.refill / full)
    }

    /// When a call of this cost fits and its turn has come; at or before `now` if it may go. Far away if it takes an event:
    /// what is reserved must be sent or given back first.
    ///
    /// What would take longer than [`BELIEVED`] is not believed blindly, as hints are not: a figure may be wrong, and nothing but
    /// another answer puts it right. So one call goes whenever so much time has passed without any.
    ///
    /// Where calls wait to be sent (`after_others`), they are covered before it by a head start: their timers ring beside the
    /// alarm, and whoever is admitted in between makes them wait again.
    ///
    /// `large` is what few calls exceed: the request is not known yet, and one that does not fit would keep all others waiting.
    pub(crate) fn opens_at(&self, cost: f64, large: f64, after_others: bool, now: Seconds) -> Seconds {
        if !self.known() {
            return now;
        }
        // What comes back while whoever may go first is late, or as much as there can be.
        let head_start = if after_others { (self.refill * SLACK).min(self.capacity - self.pending) } else { 0.0 };
        // One that is larger than the bucket goes when the bucket is full; none goes while a call waits that does not fit.
        let fits =
            self.fits_at(cost.max(large).max(head_start).max(0.0).min(self.capacity), now).min(self.touched + BELIEVED);
        if cost <= 0.0 {
            return fits;
        }
        // The pace keeps a reserve. Once that is there again the pace has done its work, however dear the last call was.
        let calm = if self.shared { self.capacity } else { self.mark().min(self.capacity) };
        fits.max(self.next.min(self.fits_at(calm, now)).min(self.touched + BELIEVED))
    }

    fn fits_at(&self, need: f64, now: Seconds) -> Seconds {
        let missing = need - self.level_at(now);
        if missing <= 0.0 {
            return now;
        }
        if need > self.capacity - self.pending {
            return now + FAR;
        }
        // A millisecond is the timer's grain, so a rounding error of the level is never worth another turn.
        let wait = missing / self.refill.max(f64::MIN_POSITIVE) + 1e-6;
        now + wait.min(FAR)
    }

    /// Takes `cost` off, to be sent soon.
    pub(crate) fn reserve(&mut self, cost: f64, now: Seconds) {
        self.refresh(now);
        self.pace(cost, now);
        self.level -= cost;
        self.pending += cost;
        self.reservations += 1;
        self.touched = now;
    }

    /// What was reserved turns out to cost something else.
    pub(crate) fn true_up(&mut self, reserved: f64, cost: f64, now: Seconds) {
        self.refresh(now);
        self.pace(cost - reserved, now);
        self.level -= cost - reserved;
        self.pending += cost - reserved;
    }

    /// Gives back what was reserved and never sent.
    pub(crate) fn give_back(&mut self, cost: f64, now: Seconds) {
        self.refresh(now);
        self.pace(-cost, now);
        self.level += cost;
        self.end_reservation(cost);
    }

    fn end_reservation(&mut self, cost: f64) {
        self.reservations = self.reservations.saturating_sub(1);
        self.pending = if self.reservations == 0 { 0.0 } else { self.pending - cost };
    }

    /// When a call may be sent whose cost has been taken off already: when it is covered, or the bucket is as full as it gets.
    pub(crate) fn covered_at(&self, cost: f64, now: Seconds) -> Seconds {
        if !self.known() {
            return now;
        }
        self.fits_at(f64::min(0.0, self.capacity - self.pending.max(cost)), now).min(self.touched + BELIEVED)
    }

    /// What was reserved is sent.
    pub(crate) fn sent(&mut self, cost: f64, now: Seconds) {
        // While it was reserved less fitted in, and what ran over is gone.
        self.refresh(now);
        self.end_reservation(cost);
        // One that was larger than the bucket: no provider runs up a debt of more than a bucket.
        self.level = self.level.max(-self.capacity - self.pending);
    }

    /// The provider refused the call, so it did not count it.
    pub(crate) fn refund(&mut self, cost: f64, now: Seconds) {
        self.refresh(now);
        self.level = (self.level + cost).min(self.capacity - self.pending);
    }

    /// What was sent at one cost has proved to have another, and no answer has been believed yet that counts it.
    pub(crate) fn settle(&mut self, taken: f64, used: f64, now: Seconds) {
        self.refresh(now);
        self.pace(used - taken, now);
        self.level = (self.level + taken - used).min(self.capacity - self.pending);
    }

    fn pace(&mut self, cost: f64, now: Seconds) {
        if !self.known() {
            return;
        }
        let mark = self.mark();
        if !self.shared && self.level >= mark {
            // A burst is spent, not saved.
            self.next = self.next.min(now);
            return;
        }
        let rate = 2.0 * self.refill * (self.level / mark).clamp(0.05, 1.0);
        if rate <= 0.0 {
            return;
        }
        self.next = (self.next.max(now - SLACK) + (cost / rate).clamp(-FAR, FAR)).max(now - SLACK);
    }

    /// Learns from an answer: true if what is left is now reckoned from what it says. `uncounted` are the calls that it says nothing certain about: when each was sent, in this
    /// order, and its cost. They are looked at one by one only where it makes a difference.
    pub(crate) fn learn(
        &mut self,
        said: Said,
        uncounted: impl Iterator<Item = (Seconds, f64)>,
        guard: Seconds,
        now: Seconds,
    ) -> bool {
        if self.announced.is_none() {
            if self.reference.is_some_and(|reference| reference > said.sent) {
                // A later one has said that there is none.
                return false;
            }
            self.reference = None;
        }
        if let Some(per_minute) = said.per_minute.filter(|limit| PLAUSIBLE.contains(limit)) {
            self.announce(per_minute / 60.0, now);
        }
        let Some(figure) = said.remaining.map(|remaining| remaining.min(*PLAUSIBLE.end())) else { return false };
        // Of integers a remainder costs next to nothing. Figures are below 10^15.
        if self.grain > 1.0 && (figure.fract() != 0.0 || figure as u64 % self.grain as u64 != 0) {
            self.grain = 1.0;
        }
        // Of a figure that is rounded, half a grain may not be there.
        let remaining = if self.grain > 1.0 { (figure - self.grain / 2.0).max(0.0) } else { figure };
        if self.announced.is_none() {
            return false;
        }
        // More than there can have been is no word on how much there is; nor is what has emptied the bucket, for it may have been
        // larger.
        let possible = self.capacity.max(self.announced.unwrap_or(0.0) * 60.0);
        let own = if remaining > 0.0 && said.own <= possible { said.own } else { 0.0 };
        let mut capacity = self.capacity.max(remaining + own);
        if capacity <= 0.0 {
            // Nothing was ever seen in it; one call at least it must hold.
            capacity = said.asked;
        }
        self.capacity = capacity;
        // Answers overtake one another: the one whose call was sent last knows best.
        if self.reference.is_some_and(|reference| reference > said.sent) {
            return false;
        }
        self.reference = Some(said.sent);
        self.said = Some((figure, now));
        self.touched = now;
        self.observe(remaining, &said);
        if let Some(reset) = said.reset {
            // Rounded up to the second by some.
            self.full = remaining + self.refill * (reset - 1.0).clamp(0.0, FAR);
        }
        // It came back since the call arrived, which was no earlier than it was sent. Step by step, since what a full bucket
        // does not take is lost.
        let at = (said.sent + guard).min(now);
        let unspent = remaining + self.refill * (now - at);
        // Never more than there is; and just that, unless it could have overflowed on the way.
        let least = unspent.min(capacity) - said.uncounted;
        let level = if unspent <= capacity || least >= capacity / 2.0 {
            least
        } else {
            let (mut level, mut at) = (remaining, at);
            for (sent, cost) in uncounted {
                level = (level + self.refill * (sent - at).max(0.0)).min(capacity) - cost;
                at = at.max(sent);
            }
            (level + self.refill * (now - at)).min(capacity)
        };
        self.level = level - self.pending;
        self.at = now;
        // The pace is set by what is left: one that was set too slow, knowing less, is set anew.
        let mark = self.mark();
        if !self.shared && self.level >= mark {
            self.next = self.next.min(now);
        }
        true
    }

    /// An answer to a call that was sent then says that there is no such bucket: true unless that is known to be old. Nothing is
    /// limited then, until another tells of one.
    pub(crate) fn is_none(&mut self, sent: Seconds, now: Seconds) -> bool {
        if self.reference.is_some_and(|reference| reference > sent) {
            return false;
        }
        if self.announced.is_some() {
            let Bucket { pending, reservations, usual, grain, .. } = *self;
            *self = Bucket { level: -pending, pending, reservations, usual, grain, ..Bucket::new(now) };
        }
        self.reference = Some(sent);
        true
    }

    fn announce(&mut self, rate: f64, now: Seconds) {
        if self.announced == Some(rate) {
            return;
        }
        if let Some(old) = self.announced {
            // A quota that shrinks shrinks its burst with it, until we see otherwise. That a larger one holds more is to be seen
            // first: a bucket thought too large is never seen full.
            self.refresh(now);
            // Nor does any hold less than one whole, which it would then never be seen to hold.
            self.capacity = (self.capacity * (rate / old)).max(1.0).min(self.capacity);
            self.full *= rate / old;
            self.level = self.level.min(self.capacity - self.pending);
        }
        self.announced = Some(rate);
        self.refill = rate;
        self.shared = false;
        self.window = None;
        self.next = self.next.min(now);
    }

    /// Watches what comes back against what we spend.
    fn observe(&mut self, remaining: f64, said: &Said) {
        let Some(announced) = self.announced else { return };
        // What the bucket held before the call, rounded down by one unit: of a bucket of two requests one is half.
        let held = (remaining + said.own - self.grain).max(remaining);
        if held >= 0.9 * self.capacity || self.capacity < 2.0 * said.own {
            // Nearly full, or too small to tell: what overflows is not seen, and nobody spends much. To take it for somebody
            // else's would make us slower, and so more overflow.
            self.refill = announced;
            self.shared = false;
            self.window = None;
            self.flat = None;
            return;
        }
        if self.shared && self.is_flat(held, said) {
            // Somebody said too much once, or it was another bucket then.
            self.capacity = held + self.grain;
            self.refill = announced;
            self.shared = false;
            (self.window, self.flat) = (None, None);
            return;
        }
        let begin = Window { sent: said.sent, remaining, spent: said.spent };
        let Some(window) = self.window else {
            self.window = Some(begin);
            return;
        };
        let span = said.sent - window.sent;
        if span < OBSERVED_SPAN || span * announced < OBSERVED_CALLS * self.usual.max(self.grain) {
            return;
        }
        let came_back = (remaining - window.remaining + said.spent - window.spent) / span;
        let seen = came_back.clamp(0.1 * announced, announced);
        self.refill = (self.refill + seen) / 2.0;
        self.shared = self.refill < SHARED_BELOW * announced;
        self.window = Some(begin);
    }

    /// Whether answers have found the same for so long that it must be full.
    fn is_flat(&mut self, held: f64, said: &Said) -> bool {
        let unit = self.usual.max(self.grain);
        let begin = Flat { since: said.sent, spent: said.spent, least: held, most: held, answers: 0 };
        let flat = self.flat.get_or_insert(begin);
        (flat.least, flat.most, flat.answers) = (flat.least.min(held), flat.most.max(held), flat.answers + 1);
        if flat.most - flat.least >= unit || held < FLAT_CALLS * unit {
            self.flat = None;
            return false;
        }
        let span = said.sent - flat.since;
        let came_back = span * self.announced.unwrap_or(0.0);
        let is_long = span >= FLAT_SPANS * OBSERVED_SPAN && came_back >= FLAT_SPANS * OBSERVED_CALLS * unit;
        is_long && flat.answers >= FLAT_ANSWERS && said.spent - flat.spent <= FLAT_SPENT * came_back
    }

    /// All that is known of it, for reports.
    pub(crate) fn meter(&self, now: Seconds) -> Option<Meter> {
        self.known().then(|| Meter {
            per_minute: self.announced.map_or(0.0, |announced| announced * 60.0),
            capacity: self.capacity,
            remaining: self.level_at(now),
            said: self.said,
            refill: self.refill,
            shared: self.shared,
            reserved: self.pending,
        })
    }

    #[cfg(test)]
    pub(crate) fn state(&self) -> (f64, f64, f64, bool) {
        (self.capacity, self.level, self.refill, self.shared)
    }
}

/// What is known of a bucket at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    pub(crate) per_minute: f64,
    pub(crate) capacity: f64,
    pub(crate) remaining: f64,
    pub(crate) said: Option<(f64, Seconds)>,
    pub(crate) refill: f64,
    pub(crate) shared: bool,
    pub(crate) reserved: f64,
}

/// Figures outside make no sense, and would make figures that are no numbers.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 1e-3..=1e15;

/// The longest wait that is believed without another answer: as long as for hints.
const BELIEVED: Seconds = HINT_CEILING.as_secs() as Seconds;

/// Further away than any quota's window; keeps moments in range.
pub(super) const FAR: Seconds = 86_400.0;
