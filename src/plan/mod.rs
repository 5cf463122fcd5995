//! How long, at what cost, which limit binds: at once over all orgs, or in the provider's batches at half the price.
//!
//! [`plan`] answers before the first call, from figures: what is to be done (a [`Workload`]) and what there is to do it with (a
//! [`Fleet`]). It is pure arithmetic, well under a millisecond, and the same every time.
//!
//! **The route is decided on the unanswered remainder.** What a journal or an earlier run has answered is not sent again, so
//! [`Workload::n`] is what is left.
//!
//! ```
//! use std::time::Duration;
//! use tower_quota::{
//!     dialect::Resource,
//!     plan::{Fleet, Limits, Objective, OrgPlan, Price, Route, Workload, plan},
//! };
//!
//! let limits = Limits::new()
//!     .per_minute(Resource::Requests, 30_000.0)
//!     .per_minute(Resource::InputTokens, 10e6)
//!     .per_minute(Resource::OutputTokens, 1e6);
//! let fleet = Fleet::new()
//!     .org(OrgPlan::new("research").serves("claude-sonnet-4-5", limits))
//!     .price("claude-sonnet-4-5", Price::per_million(3.0, 15.0));
//!
//! let work = Workload::new(20_000, "claude-sonnet-4-5").objective(Objective::Latency);
//! let quick = plan(&work, &fleet)?;
//! assert_eq!(quick.route, Route::Direct);
//! assert_eq!(quick.binds.to_string(), "concurrency (research)");
//! println!("{quick}"); // N=20000 | route=direct | objective=latency | binds=concurrency (research) | time=… | cost=… | …
//!
//! let cheap = plan(&work.objective(Objective::Cost), &fleet)?;
//! assert_eq!((cheap.route, cheap.chunk), (Route::Batch, Some(1_000)));
//! assert!(cheap.cost < quick.cost && cheap.time.median > quick.time.median);
//! # Ok::<(), tower_quota::plan::PlanError>(())
//! ```
//!
//! # What the model has in it
//!
//! *Direct.* Each org lets through what its slots and its quota buckets do: the first call alone, then a quarter of the cap, doubled
//! with each window of answers ([`aimd`](crate::aimd)); at first what the buckets hold, then what comes back. Little's law ties
//! slots to latency. When the last call is sent, those in flight end, each with what is left of its own time: that is the tail. A client
//! process that is slower than all this sends what it is behind with at its own rate.
//!
//! *Batches.* Rows are cut into batches, and batches run in lanes (batches at work at once, over all orgs). A batch takes
//! a lognormal time that grows with its rows, and is *wedged* with a chance that grows with their square: it never begins, keeps its
//! lane until it is given up, and its rows go direct. The rows a batch are those that cost a lane least time, this included.
//!
//! What stays out: faults and refusals (but for [`Workload::calls_a_row`]), colleagues on the same keys, and the hours of the day.
//!
//! # What decides
//!
//! | objective | the way |
//! |---|---|
//! | [`Latency`](Objective::Latency) | direct, unless batches are clearly sooner |
//! | [`Cost`](Objective::Cost) | batches, unless there are fewer rows than [`BatchModel::least_rows`] |
//! | [`Balanced`](Objective::Balanced) | batches from the *crossover* on: where their mean time × cost comes below that of the direct path |
//!
//! With a deadline the way must keep it nine times in ten. If the preferred one does not, both ways at once do what they can
//! ([`Route::Split`]), then the other one; if nothing does, that is an error which has the soonest plan in it.
//!
//! # What to do with a plan
//!
//! | | |
//! |---|---|
//! | [`Plan::route`] | `batch::Way::Direct` or `batch::Way::Batch` for a `batch::Route`; for [`Route::Split`] a closure that sends the first so many each way |
//! | [`Plan::chunk`] | `BatchBuilder::chunk_rows` |
//! | [`OrgShare::batches`] | `BatchBuilder::in_flight`: one figure for all orgs, the largest |
//! | [`OrgShare::concurrency`] | [`Org::cap`](crate::org::Org::cap), where it is not so already |
//! | [`Plan::time`], [`Plan::cost`], [`Plan::binds`], [`Plan::why`] | for whoever has to wait and pay |
//!
//! # From what was measured
//!
//! [`Measured`] is what a direct run came to. It corrects workload and fleet, so that the next plan predicts from it. Of batches replace
//! [`BatchModel::turnaround`] and its like by what you saw.

mod batch;
mod decision;
mod direct;
mod fleet;
mod measured;
mod spread;
mod workload;

use std::time::Duration;

use batch::Lanes;
pub use decision::{Binds, Estimate, Forecast, OrgShare, Plan, PlanError, Route};
use direct::{Curves, Lever, Member, Pool};
pub use fleet::{BatchModel, Fleet, Latency, Limits, OrgPlan, Price};
pub use measured::Measured;
pub use workload::{Objective, Tokens, Workload};

/// How likely a deadline must be kept.
const SURE: f64 = 0.9;
/// What an estimate tells.
const RANGE: [f64; 3] = [1.0 - SURE, 0.5, SURE];
/// Batches are clearly sooner if they take less than this part.
const CLEARLY: f64 = 0.9;
/// What doubling a limit must shorten a run by for it to bind.
const NOTICED: f64 = 0.05;
/// No crossover is looked for beyond so many rows.
const MOST_ROWS: f64 = 1e9;

/// The best way through a workload with a fleet.
///
/// # Errors
/// A figure that cannot be meant; no org that serves the model; a deadline that no way is likely to keep.
pub fn plan(work: &Workload, fleet: &Fleet) -> Result<Plan, PlanError> {
    work.check()?;
    fleet.check(&work.model)?;
    let pool = pool(work, fleet).ok_or_else(|| PlanError::NoOrg { model: work.model.clone() })?;
    let lanes = lanes(work, fleet);
    let curves = pool.curves();
    let lanes = lanes.map(|lanes| {
        let redo = curves.run(lanes.chunk as f64 * work.calls_a_row).median();
        lanes.redo(redo)
    });
    let desk = Desk { work, fleet, curves: &curves, pool: &pool, lanes };
    desk.decide()
}

/// The orgs that serve the model and have room for a call of it.
fn pool(work: &Workload, fleet: &Fleet) -> Option<Pool> {
    let cost = work.cost();
    let member = |org: &OrgPlan| {
        let limits = org.limits(&work.model)?;
        let burst = limits.burst.as_secs_f64();
        let mut buckets = [None; 4];
        for ((bucket, per_minute), cost) in buckets.iter_mut().zip(limits.per_minute).zip(cost) {
            let Some(rate) = per_minute.map(|limit| limit / 60.0).filter(|_| cost > 0.0) else { continue };
            // A bucket of requests holds one at least; what no bucket holds never goes.
            let holds = if cost == 1.0 { (rate * burst).max(1.0) } else { rate * burst / cost };
            if holds < 1.0 {
                return None;
            }
            *bucket = Some((holds, rate / cost));
        }
        Some(Member {
            name: org.name.clone(),
            slots: limits.slots(&work.model) as f64,
            latency: limits.latency.spread(),
            buckets,
        })
    };
    let members: Vec<_> = fleet.orgs.iter().filter_map(member).collect();
    let (input, output) = (work.input, work.output);
    let both = (input.mean * input.cv()).hypot(output.mean * output.cv()) / (input.mean + output.mean).max(1.0);
    let tokens_cv = [0.0, input.cv(), output.cv(), both];
    let client = fleet.client_rate.unwrap_or(f64::INFINITY);
    (!members.is_empty()).then_some(Pool { members, client, tokens_cv })
}

fn lanes(work: &Workload, fleet: &Fleet) -> Option<Lanes> {
    let takes = |org: &OrgPlan| if org.limits(&work.model).is_some() { org.batches } else { 0 };
    let orgs: Vec<_> = fleet.orgs.iter().map(|org| (takes(org), org.queue_rows)).collect();
    Lanes::new(&orgs, &fleet.batch, work.input.p95)
}

/// All that a decision looks at.
struct Desk<'a> {
    work: &'a Workload,
    fleet: &'a Fleet,
    pool: &'a Pool,
    curves: &'a Curves<'a>,
    lanes: Option<Lanes>,
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

impl Desk<'_> {
    fn calls(&self, rows: u64) -> f64 {
        rows as f64 * self.work.calls_a_row
    }

    /// What a row costs in batches, for what it costs direct: those of wedged batches are paid in full.
    fn batch_price(&self, lanes: &Lanes, rows: u64) -> f64 {
        let wedged = lanes.wedged(rows);
        self.fleet.batch.discount * (1.0 - wedged) + wedged
    }

    fn dollars(&self, rows: u64) -> Option<f64> {
        let (input, output) = (self.work.input.mean, self.work.output.mean);
        Some(self.fleet.dollars(&self.work.model, input, output)? * rows as f64)
    }

    fn direct(&self) -> Forecast {
        let n = self.work.n;
        if n == 0 {
            return Forecast { time: Estimate::default(), cost: self.dollars(0), binds: Binds::Nothing };
        }
        let run = self.curves.run(self.calls(n));
        let time = run.quantiles(RANGE);
        Forecast { time: estimate(time, None), cost: self.dollars(n), binds: self.direct_binds(time[1]) }
    }

    /// What shortens the run most when it is doubled.
    fn direct_binds(&self, now: f64) -> Binds {
        let calls = self.calls(self.work.n);
        let mut best = (None, now * (1.0 - NOTICED));
        for lever in self.pool.levers() {
            if let Some(then) = self.curves.relieved(lever, calls, best.1) {
                best = (Some(lever), then);
            }
        }
        let Some(lever) = best.0 else { return Binds::Latency };
        // Of those that it stops in the long run, the one that would do most.
        let stopped = self.pool.members.iter().filter(|member| member.steady().1 == lever);
        let most = stopped.max_by(|a, b| a.steady().0.total_cmp(&b.steady().0));
        let org = most.unwrap_or(&self.pool.members[0]).name.clone();
        match lever {
            Lever::Resource(resource) => Binds::Quota { resource, org },
            Lever::Slots => Binds::Concurrency { org },
            Lever::Client => Binds::Client,
        }
    }

    fn batch(&self, lanes: &Lanes) -> Forecast {
        let n = self.work.n;
        if n == 0 {
            return Forecast { time: Estimate::default(), cost: self.dollars(0), binds: Binds::Nothing };
        }
        let run = lanes.run(n);
        let cost = self.dollars(n).map(|dollars| dollars * self.batch_price(lanes, n));
        let sound = (lanes.batches(n) as f64 * (-lanes.wedged(n)).ln_1p()).exp();
        let full = || self.fleet.orgs.iter().zip(&lanes.each).any(|(org, lanes)| *lanes > 0 && *lanes < org.batches);
        let binds = if sound < 0.5 {
            Binds::WedgedBatch
        } else if lanes.passes(n) <= 1 {
            Binds::BatchTurnaround
        } else if full() {
            Binds::BatchQueue
        } else {
            Binds::BatchesInFlight
        };
        Forecast { time: estimate(run.quantiles(RANGE), Some(run.mean())), cost, binds }
    }

    /// Whether batches are the better half of an even trade: twice as long for half the price is one.
    fn trades(&self, lanes: &Lanes, rows: u64) -> bool {
        let batch = lanes.run(rows).mean() * self.batch_price(lanes, rows);
        // Its median is later: to know that, it need not be found.
        !self.curves.run(self.calls(rows)).ends_by(batch, 0.5)
    }

    /// From how many rows on it is.
    fn crossover(&self, lanes: &Lanes) -> Option<u64> {
        let least = self.fleet.batch.least_rows.max(1) as f64;
        if !self.trades(lanes, MOST_ROWS as u64) {
            return None;
        }
        if self.trades(lanes, least as u64) {
            return Some(least as u64);
        }
        Some(spread::rising(least.ln(), MOST_ROWS.ln(), 16, |ln| self.trades(lanes, ln.exp() as u64)).exp() as u64)
    }

    fn decide(&self) -> Result<Plan, PlanError> {
        let direct = self.direct();
        let Some(lanes) = &self.lanes else {
            let plan = self.plan(Route::Direct, &direct, None, None, "no org takes batches".to_owned());
            return self.in_time(plan);
        };
        let batch = self.batch(lanes);
        let crossover = self.crossover(lanes);
        let n = self.work.n;
        let times = batch.time.mean.as_secs_f64() / direct.time.mean.as_secs_f64().max(1e-9);
        let price = self.batch_price(lanes, n);
        let trade = format!("in batches it takes {} the time for {:.0} % of the price", factor(times), price * 100.0);
        let few = n < self.fleet.batch.least_rows;
        let (route, why) = match self.work.objective {
            _ if few => {
                (Route::Direct, format!("fewer than {} rows are not worth a batch", self.fleet.batch.least_rows))
            }
            Objective::Latency if times < CLEARLY => (Route::Batch, format!("batches are sooner: {trade}")),
            Objective::Latency => (Route::Direct, trade),
            Objective::Cost if price >= 1.0 => (Route::Direct, "batches are not cheaper".to_owned()),
            Objective::Cost => (Route::Batch, trade),
            Objective::Balanced => {
                let from = crossover.map_or("no number pays".to_owned(), |from| format!("it pays from {from} rows on"));
                let is = crossover.is_some_and(|from| n >= from);
                (if is { Route::Batch } else { Route::Direct }, format!("{trade}; {from}"))
            }
        };
        let plan = |route, why| self.plan(route, &direct, Some(&batch), crossover, why);
        let preferred = plan(route, why);
        let Some(deadline) = self.work.deadline.filter(|deadline| preferred.time.p90 > *deadline) else {
            return Ok(preferred);
        };
        let limit = deadline.as_secs_f64();
        // What is left of the saving comes before speed, unless speed is what is wanted.
        let other = if route == Route::Direct { Route::Batch } else { Route::Direct };
        let fits = |route: Route| if route == Route::Direct { direct.time.p90 } else { batch.time.p90 } <= deadline;
        let split =
            (self.work.objective != Objective::Latency || !fits(other)).then(|| self.split(lanes, limit)).flatten();
        if let Some((to_batch, time)) = split {
            let why = format!("the deadline leaves time for {to_batch} rows in batches");
            let mut plan = plan(Route::Split { direct: n - to_batch, batch: to_batch }, why);
            plan.time = time;
            let batched = self.dollars(to_batch).map(|dollars| dollars * self.batch_price(lanes, to_batch));
            plan.cost = self.dollars(n - to_batch).zip(batched).map(|(direct, batch)| direct + batch);
            plan.binds = Binds::Deadline;
            return Ok(plan);
        }
        if fits(other) && !(few && other == Route::Batch) {
            return Ok(plan(
                other,
                format!("{} would miss the deadline", if route == Route::Direct { "direct" } else { "batches" }),
            ));
        }
        let soonest = if direct.time.p90 <= batch.time.p90 { Route::Direct } else { Route::Batch };
        let soonest = Box::new(plan(soonest, "the soonest".to_owned()));
        Err(PlanError::Deadline { deadline, soonest })
    }

    fn in_time(&self, plan: Plan) -> Result<Plan, PlanError> {
        match self.work.deadline {
            Some(deadline) if plan.time.p90 > deadline => {
                Err(PlanError::Deadline { deadline, soonest: Box::new(plan) })
            }
            _ => Ok(plan),
        }
    }

    /// How many rows go in batches so that both ways end in time, and when: as many as can, or where speed is wanted as few.
    fn split(&self, lanes: &Lanes, deadline: f64) -> Option<(u64, Estimate)> {
        // Both must keep it.
        let each = SURE.sqrt();
        let n = self.work.n;
        let whole = |count: u64| count.saturating_mul(lanes.chunk).min(n - 1);
        let in_time = |rows: u64| rows == 0 || lanes.run(rows).below(deadline) >= each;
        let direct_in_time = |rows: u64| self.curves.run(self.calls(n - rows)).quantile_by(each, deadline);
        let most = lanes.batches(n - 1);
        let rows = if self.work.objective == Objective::Latency {
            whole(spread::first(most, |count| direct_in_time(whole(count))))
        } else {
            whole(spread::first(most + 1, |count| !in_time(whole(count))) - 1)
        };
        if rows < self.fleet.batch.least_rows.max(1) || !in_time(rows) || !direct_in_time(rows) {
            return None;
        }
        let (batch, direct) = (lanes.run(rows), self.curves.run(self.calls(n - rows)));
        let of_each = RANGE.map(f64::sqrt);
        let (batch, direct) = (batch.quantiles(of_each), direct.quantiles(of_each));
        let later = [0, 1, 2].map(|i| batch[i].max(direct[i]));
        // Both were seen to keep it: what is beyond is only how exactly times are found.
        debug_assert!(later[2] <= deadline * (1.0 + 1e-4), "{later:?} by {deadline}");
        let later = later.map(|time| time.min(deadline));
        Some((rows, estimate(later, None)))
    }

    fn plan(
        &self,
        route: Route,
        direct: &Forecast,
        batch: Option<&Forecast>,
        crossover: Option<u64>,
        why: String,
    ) -> Plan {
        let n = self.work.n;
        let to_direct = match route {
            Route::Direct => n,
            Route::Batch => 0,
            Route::Split { direct, .. } => direct,
        };
        let to_batch = n - to_direct;
        let taken = if route == Route::Direct { direct } else { batch.unwrap_or(direct) };
        let throttle = (self.pool.client / self.pool.rate()).min(1.0);
        let in_flight = |member: &Member| {
            let (rate, _) = member.steady();
            (rate * throttle * member.latency.mean() - 1e-6).ceil().min(member.slots).min(to_direct as f64) as usize
        };
        let mut batches = vec![0; self.fleet.orgs.len()];
        if let Some(lanes) = &self.lanes {
            // One after the other, as they are dealt out.
            let mut left = lanes.batches(to_batch).min(lanes.all() as u64);
            while left > 0 {
                for (dealt, most) in batches.iter_mut().zip(&lanes.each) {
                    if *dealt < *most && left > 0 {
                        (*dealt, left) = (*dealt + 1, left - 1);
                    }
                }
            }
        }
        let org = |(org, batches): (&OrgPlan, usize)| {
            let member = self.pool.members.iter().find(|member| member.name == org.name);
            let share = OrgShare { name: org.name.clone(), concurrency: member.map_or(0, in_flight), batches };
            (share.concurrency + share.batches > 0).then_some(share)
        };
        Plan {
            n,
            model: self.work.model.clone(),
            objective: self.work.objective,
            route,
            orgs: self.fleet.orgs.iter().zip(batches).filter_map(org).collect(),
            chunk: self.lanes.as_ref().map(|lanes| lanes.chunk.min(to_batch)).filter(|_| to_batch > 0),
            time: taken.time,
            cost: taken.cost,
            binds: taken.binds.clone(),
            crossover,
            direct: direct.clone(),
            batch: batch.cloned(),
            why,
        }
    }
}

fn estimate([p10, median, p90]: [f64; 3], mean: Option<f64>) -> Estimate {
    // Swanson's mean of three quantiles.
    let mean = mean.unwrap_or(0.3 * p10 + 0.4 * median + 0.3 * p90);
    Estimate { p10: seconds(p10), median: seconds(median), p90: seconds(p90), mean: seconds(mean) }
}

/// `1.4 times`, `120 times`.
fn factor(times: f64) -> String {
    if times < 9.95 { format!("{times:.1} times") } else { format!("{times:.0} times") }
}

#[cfg(test)]
mod tests;
