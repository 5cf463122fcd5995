//! The direct path: when so many calls are all answered, as a fluid. Pure arithmetic in seconds, without a loop over calls.
//!
//! An org admits what its slots and its buckets let through: a curve of few straight pieces and jumps. Slots open as the limiter
//! opens them: one call alone, then a quarter of the cap, doubled with each window of answers. The curves of all orgs together
//! reach `n` when the last call is sent; then the calls in flight end, each with what is left of its own time.

use super::spread::{Spread, evenly, normal_quantile, zero, zeros};
use crate::{aimd, dialect::Resource};

/// Faster than this the limiter does not double.
const DOUBLING: f64 = 0.1;
/// What is nothing, in calls and tokens.
const NOTHING: f64 = 1e-9;
/// How exactly times are found, as a part of what calls take.
const CLOSE: f64 = 1e-5;

/// One org, as far as it matters to one kind of call.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) slots: f64,
    pub(crate) latency: Spread,
    /// Of each resource, in calls: how many fit at once, and how many come back a second.
    pub(crate) buckets: [Option<(f64, f64)>; 4],
}

/// All of them, and the client.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    pub(crate) members: Vec<Member>,
    /// Calls a second that the client gets out at most.
    pub(crate) client: f64,
    /// The spread of what a call costs, for those bound by tokens.
    pub(crate) tokens_cv: [f64; 4],
}

/// What could be doubled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lever {
    Resource(Resource),
    Slots,
    Client,
}

/// A stretch of time: so many calls at its start, and then so many a second until the next stretch.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: f64,
    jump: f64,
    rate: f64,
}

impl Member {
    /// What the slots alone would let through, if the first call is answered at `opened`.
    fn offered(&self, opened: f64) -> Vec<Piece> {
        let mean = self.latency.mean();
        // Calls that begin together end apart: the flow of those that follow begins so much late (renewal theory).
        let late = mean * ((1.0 - self.latency.cv().powi(2)) / 2.0).max(0.0);
        let mut pieces = vec![Piece { from: 0.0, jump: 1.0, rate: 0.0 }];
        // Widths in whole slots, as the limiter counts; they join the flow when their first calls have ended.
        let mut limit = (self.slots * aimd::Settings::default().start).max(1.0).min(self.slots);
        let (mut width, mut flowing, mut at) = (0.0, 0.0, opened);
        loop {
            let wider = limit.floor();
            pieces.push(Piece { from: at, jump: wider - width, rate: flowing / mean });
            pieces.push(Piece { from: at + late, jump: 0.0, rate: wider / mean });
            if limit >= self.slots {
                return pieces;
            }
            // Until as many have been answered as the limit is.
            let window = if flowing == 0.0 { mean + late } else { mean + late * (1.0 - width / wider) };
            (width, flowing) = (wider, wider);
            at += window.max(DOUBLING).max(late);
            limit = (limit * 2.0).min(self.slots);
        }
    }

    /// What gets through the buckets of it.
    fn admitted(&self, opened: f64) -> Vec<Piece> {
        let offered = self.offered(opened);
        if self.buckets.iter().all(Option::is_none) {
            return offered;
        }
        let mut level = self.buckets.map(|bucket| bucket.map_or(f64::INFINITY, |(most, _)| most));
        let refill = self.buckets.map(|bucket| bucket.map_or(f64::INFINITY, |(_, refill)| refill));
        let mut waiting = 0.0;
        let mut pieces = Vec::with_capacity(offered.len() + 4);
        for (nth, piece) in offered.iter().enumerate() {
            let until = offered.get(nth + 1).map_or(f64::INFINITY, |next| next.from);
            let mut at = piece.from;
            let wanted = piece.jump + waiting;
            let jump = level.iter().copied().fold(wanted, f64::min).max(0.0);
            level.iter_mut().for_each(|level| *level -= jump);
            waiting = wanted - jump;
            let mut jump = Some(jump);
            // A bucket empties or fills, or the queue ends: few such moments in a piece.
            for _ in 0..16 {
                let binding = (0..4).filter(|i| level[*i] <= NOTHING).map(|i| refill[i]).fold(f64::INFINITY, f64::min);
                let wish = if waiting > NOTHING { f64::INFINITY } else { piece.rate };
                // What waits goes as fast as what is not empty allows; where nothing is, nothing waits.
                let rate = if binding.is_finite() { wish.min(binding) } else { piece.rate };
                pieces.push(Piece { from: at, jump: jump.take().unwrap_or(0.0), rate });
                let mut next = until;
                if waiting > NOTHING && rate > piece.rate {
                    next = next.min(at + waiting / (rate - piece.rate));
                }
                for (level, refill) in level.iter().zip(&refill) {
                    if level.is_finite() && *level > NOTHING && rate > *refill {
                        next = next.min(at + level / (rate - refill));
                    }
                }
                let span = next - at;
                if !span.is_finite() {
                    break;
                }
                waiting = (waiting + (piece.rate - rate) * span).max(0.0);
                for (level, bucket) in level.iter_mut().zip(self.buckets) {
                    if let Some((most, refill)) = bucket {
                        *level = (*level + (refill - rate) * span).clamp(0.0, most);
                    }
                }
                at = next;
                if at >= until {
                    break;
                }
            }
        }
        pieces
    }

    /// What it gets through in the long run, a second, and what stops it there.
    pub(crate) fn steady(&self) -> (f64, Lever) {
        let slots = (self.slots / self.latency.mean(), Lever::Slots);
        let buckets = Resource::ALL.into_iter().zip(self.buckets);
        let buckets = buckets.filter_map(|(resource, bucket)| Some((bucket?.1, Lever::Resource(resource))));
        buckets.fold(slots, |least, one| if one.0 < least.0 { one } else { least })
    }

    fn twice(&mut self, lever: Lever) {
        match lever {
            Lever::Slots => self.slots *= 2.0,
            Lever::Resource(resource) => {
                if let Some((most, refill)) = &mut self.buckets[resource.index()] {
                    (*most, *refill) = (*most * 2.0, *refill * 2.0);
                }
            }
            Lever::Client => {}
        }
    }
}

impl Pool {
    /// When each org's first call, which goes alone, is answered: by the order in which they are expected.
    fn openings(&self) -> Vec<f64> {
        let mut order: Vec<usize> = (0..self.members.len()).collect();
        let medians: Vec<f64> = self.members.iter().map(|member| member.latency.quantile(0.5)).collect();
        order.sort_by(|a, b| medians[*a].total_cmp(&medians[*b]));
        let (least, most) = medians.iter().fold((f64::INFINITY, 0.0_f64), |(l, m), x| (l.min(*x), m.max(*x)));
        let mut openings = vec![0.0; self.members.len()];
        for (nth, member) in order.into_iter().enumerate() {
            // The median of the nth: so many less a half are expected to be answered, but for what the sum of chances is askew.
            let answered = |x: f64| {
                let chances = self.members.iter().map(|member| member.latency.below(x));
                let (sum, variance, askew) = chances.fold((0.0, 1e-9, 0.0), |(sum, variance, askew), p| {
                    let own = p * (1.0 - p);
                    (sum + p, variance + own, askew + own * (1.0 - 2.0 * p))
                });
                sum - askew / (6.0 * variance)
            };
            let half = nth as f64 + 0.5;
            openings[member] =
                zero((least / 30.0).ln(), (most * 30.0).ln(), 1e-6, |ln| answered(ln.exp()) - half).exp();
        }
        openings
    }

    /// The curves are the same for every `n`.
    pub(crate) fn curves(&self) -> Curves<'_> {
        self.opened(self.openings())
    }

    fn opened(&self, openings: Vec<f64>) -> Curves<'_> {
        let each = self.members.iter().zip(&openings);
        let curves: Vec<_> = each.map(|(member, opened)| member.admitted(*opened)).collect();
        let corners = corners(&curves);
        Curves { pool: self, openings, curves, corners }
    }

    fn twice(&self, lever: Lever) -> Pool {
        let mut pool = self.clone();
        if lever == Lever::Client {
            pool.client *= 2.0;
        }
        pool.members.iter_mut().for_each(|member| member.twice(lever));
        pool
    }

    /// Calls a second in the long run, the client left out.
    pub(crate) fn rate(&self) -> f64 {
        self.members.iter().map(|member| member.steady().0).sum()
    }

    /// What could be doubled, and would matter to some org.
    pub(crate) fn levers(&self) -> impl Iterator<Item = Lever> + '_ {
        let told = |resource: &Resource| self.members.iter().any(|member| member.buckets[resource.index()].is_some());
        let resources = Resource::ALL.into_iter().filter(told).map(Lever::Resource).collect::<Vec<_>>();
        resources.into_iter().chain([Lever::Slots]).chain(self.client.is_finite().then_some(Lever::Client))
    }
}

/// What each org admits by when, whatever `n` is.
#[derive(Debug)]
pub(crate) struct Curves<'a> {
    pool: &'a Pool,
    openings: Vec<f64>,
    curves: Vec<Vec<Piece>>,
    /// All orgs' together: when, the jump then, and by how much the rate changes.
    corners: Vec<(f64, f64, f64)>,
}

/// So many calls sent over these curves.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    curves: &'a Curves<'a>,
    /// When the last is admitted.
    sent: f64,
    /// The part of the jumps at that moment that is still needed.
    last: f64,
    /// From then on the client is behind, if it is at the end.
    keeps_up: f64,
    /// When the client sends the last.
    end: f64,
}

fn corners(curves: &[Vec<Piece>]) -> Vec<(f64, f64, f64)> {
    let mut corners = Vec::with_capacity(curves.iter().map(Vec::len).sum());
    for curve in curves {
        let mut before = 0.0;
        for piece in curve {
            corners.push((piece.from, piece.jump, piece.rate - before));
            before = piece.rate;
        }
    }
    corners.sort_by(|a, b| a.0.total_cmp(&b.0));
    corners
}

impl Curves<'_> {
    /// So many calls. All orgs' curves together tell when they are admitted. The client sends what is admitted after some moment at its
    /// own rate at best: the last call waits for the worst of these moments.
    pub(crate) fn run(&self, n: f64) -> Run<'_> {
        let (mut sum, mut rate, mut at) = (0.0, 0.0_f64, 0.0);
        let each = 1.0 / self.pool.client;
        let (mut keeps_up, mut behind) = (0.0, 0.0_f64);
        let mut corners = self.corners.iter().copied().peekable();
        while let Some((from, mut jump, mut turn)) = corners.next() {
            while let Some((_, more, by)) = corners.next_if(|next| next.0 <= from) {
                (jump, turn) = (jump + more, turn + by);
            }
            let more = rate * (from - at);
            if sum + more >= n {
                break;
            }
            (sum, at) = (sum + more, from);
            if at - sum * each > behind {
                (keeps_up, behind) = (at, at - sum * each);
            }
            if sum + jump >= n {
                let end = at.max(behind + n * each);
                return Run { curves: self, sent: at, last: (n - sum) / jump, keeps_up, end };
            }
            sum += jump;
            rate = (rate + turn).max(0.0);
        }
        let sent = at + (n - sum) / rate;
        Run { curves: self, sent, last: 1.0, keeps_up, end: sent.max(behind + n * each) }
    }

    /// The median time of so many calls with one limit doubled, if it is less than this.
    pub(crate) fn relieved(&self, lever: Lever, n: f64, than: f64) -> Option<f64> {
        // When first calls are answered has nothing to do with limits.
        let pool = self.pool.twice(lever);
        let curves = pool.opened(self.openings.clone());
        let run = curves.run(n);
        run.ends_by(than, 0.5).then(|| run.median()).filter(|median| *median < than)
    }
}

impl Run<'_> {
    /// When the client sends what is admitted then.
    fn sends(&self, at: f64) -> f64 {
        if at >= self.sent {
            self.end
        } else if at <= self.keeps_up {
            at
        } else {
            at + (at - self.keeps_up) / (self.sent - self.keeps_up) * (self.end - self.sent)
        }
    }

    /// How many calls are expected to be unanswered at `x`, sent or not. Each of many is late with a small chance: the chance that none
    /// is, is Poisson's.
    fn late(&self, x: f64) -> f64 {
        let mut late = 0.0;
        let Curves { pool, curves, .. } = self.curves;
        for (member, curve) in pool.members.iter().zip(curves) {
            // What began then: the chance that it goes on, and what of a flow that began then does.
            let since = |at: f64| member.latency.going_on(x - at);
            let mut from = 0.0;
            let mut begun = since(0.0);
            for (nth, piece) in curve.iter().enumerate().take_while(|(_, piece)| piece.from <= self.sent) {
                let until = curve.get(nth + 1).map_or(f64::INFINITY, |next| next.from).min(self.sent);
                if piece.jump > 0.0 {
                    let part = if piece.from >= self.sent { self.last } else { 1.0 };
                    late += piece.jump * part * begun.0;
                }
                if until > piece.from {
                    let sends = self.sends(until);
                    let then = since(sends);
                    late += piece.rate * (until - piece.from) / (sends - from) * (begun.1 - then.1);
                    (from, begun) = (sends, then);
                }
            }
        }
        late
    }

    /// Whether everything but the latest calls is done by `x`, with this chance.
    pub(crate) fn ends_by(&self, x: f64, part: f64) -> bool {
        self.late(x) <= -part.ln()
    }

    /// When everything but the latest calls is done, by which they are late: with these chances, which rise.
    fn ends<const N: usize>(&self, parts: [f64; N]) -> [f64; N] {
        let most = self.curves.pool.members.iter().map(|member| member.latency.far()).fold(0.0, f64::max);
        // Its logarithm falls about evenly with that of the time.
        let early = |ln: f64| -self.late(self.end + ln.exp()).max(0.0).ln();
        zeros((most * CLOSE).ln(), most.ln(), CLOSE, parts.map(evenly), early).map(|ln| ln.exp() + self.end)
    }

    /// How far the moment of the last sending is off: what calls take and what tokens they cost add up at random.
    fn deviation(&self) -> f64 {
        let (mut rate, mut variance) = (0.0, 0.0);
        for member in &self.curves.pool.members {
            let (own, lever) = member.steady();
            let cv = match lever {
                Lever::Slots => member.latency.cv(),
                Lever::Resource(resource) => self.curves.pool.tokens_cv[resource.index()],
                Lever::Client => 0.0,
            };
            // The first call, which goes alone, delays all that its org admits.
            variance +=
                own * self.end * cv * cv + own * own * member.latency.variance().min(self.end * self.end / 12.0);
            rate += own;
        }
        if self.end > self.sent { 0.0 } else { variance.sqrt() / rate }
    }

    /// The median time until all is answered.
    pub(crate) fn median(&self) -> f64 {
        let [median] = self.ends([0.5]);
        median
    }

    /// Whether a quantile above the median is no later than `by`.
    pub(crate) fn quantile_by(&self, part: f64, by: f64) -> bool {
        let (median, drift) = (self.median(), normal_quantile(part) * self.deviation());
        // What is left for the tail when drift has had its part.
        let left = (by - median).powi(2) - drift * drift;
        by >= median && left >= 0.0 && self.ends_by(median + left.sqrt(), part)
    }

    /// The times by which all is answered, with these chances: one below a half, that or more, and more again.
    pub(crate) fn quantiles(&self, parts: [f64; 3]) -> [f64; 3] {
        let [low, middle, high] = parts;
        let [low, median, middle, high] = self.ends([low, 0.5, middle, high]);
        let deviation = self.deviation();
        let drift = parts.map(|part| normal_quantile(part) * deviation);
        let early = (median - low).hypot(drift[0]);
        [
            (median - early).max(0.0),
            median + (middle - median).hypot(drift[1]),
            median + (high - median).hypot(drift[2]),
        ]
    }
}
