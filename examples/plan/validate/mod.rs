//! Plans against simulated runs: random workloads and fleets, the direct path through the real stack in virtual time, the batch path
//! drawn batch by batch.

pub(crate) mod bars;
pub(crate) mod batch;
pub(crate) mod cases;
pub(crate) mod direct;

use tower_quota::{
    outcome::BoxError,
    plan::{BatchModel, Objective, Plan, Route, plan},
};

use self::{
    batch::{Ended, Provider},
    cases::{Case, Lever},
};

/// What doubling a limit must shorten a run by for it to bind.
const NOTICED: f64 = 0.05;
/// Two limits whose doubling shortens a run alike, within this part of it, bind alike: runs differ by chance.
const ALIKE: f64 = 0.02;
/// Runs of the batch path for each case.
const DRAWS: u64 = 50;

/// One run with the clock paused.
///
/// # Errors
/// If there is no runtime to be had.
pub(crate) fn in_virtual_time<T>(run: impl Future<Output = T>) -> Result<T, BoxError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?;
    Ok(runtime.block_on(run))
}

/// One case, as predicted and as it went.
#[derive(Debug)]
pub(crate) struct Judged {
    case: Case,
    plan: Plan,
    /// Direct, in seconds.
    direct_s: f64,
    /// The part of direct calls that were refused.
    pub(crate) refused: f64,
    /// How long it is with each limit doubled.
    relieved: Vec<(Lever, f64)>,
    /// As many rows in batches.
    same: Vec<Ended>,
    /// More rows in batches: the part of draws that was within the predicted range.
    pub(crate) within: f64,
}

impl Judged {
    /// Predicts, then runs. With `levers` each limit is doubled in turn.
    ///
    /// # Errors
    /// If a run fails.
    pub(crate) fn new(case: Case, levers: bool) -> Result<Self, BoxError> {
        let (work, fleet) = (case.workload(), case.fleet());
        let plan_of_it = plan(&work, &fleet)?;
        let (direct_s, refused) = in_virtual_time(direct::run(&case))??;
        let mut relieved = vec![];
        for lever in Lever::ALL.into_iter().filter(|_| levers) {
            if let Some(twice) = case.twice(lever) {
                relieved.push((lever, in_virtual_time(direct::run(&twice))??.0));
            }
        }
        let provider = Provider { model: case.batch.clone(), starves_above: None, direct: case.n as f64 / direct_s };
        let mut rng = fastrand::Rng::with_seed(case.seed);
        let in_batches = |rows: u64| {
            let mut work = work.clone().objective(Objective::Cost);
            work.n = rows;
            plan(&work, &fleet)
        };
        let draw = |plan: &Plan, rng: &mut fastrand::Rng| {
            let lanes = plan.orgs.iter().map(|org| org.batches).sum();
            batch::run(&provider, plan.n, plan.chunk.unwrap_or(plan.n), lanes, rng)
        };
        let small = in_batches(case.n)?;
        let same = (0..DRAWS).map(|_| draw(&small, &mut rng)).collect();
        let large = in_batches(case.rows)?;
        let range = large.time.p10.as_secs_f64()..=large.time.p90.as_secs_f64();
        let within = (0..DRAWS).filter(|_| range.contains(&draw(&large, &mut rng).wall_s)).count();
        let within = within as f64 / DRAWS as f64;
        Ok(Judged { case, plan: plan_of_it, direct_s, refused, relieved, same, within })
    }

    /// How far the predicted median is off, as a part of the true time.
    pub(crate) fn off(&self) -> f64 {
        self.plan.direct.time.median.as_secs_f64() / self.direct_s - 1.0
    }

    /// What really binds, and whether the plan says so; the second also where another limit binds alike.
    pub(crate) fn binds(&self) -> (&'static str, bool, bool) {
        let best = self.relieved.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let enough = best.filter(|(_, wall)| *wall < self.direct_s * (1.0 - NOTICED));
        let truth = enough.map_or("latency", |(lever, _)| lever.name());
        let said = self.plan.direct.binds.name();
        let least = best.map_or(self.direct_s, |(_, wall)| *wall).min(self.direct_s);
        let of_said =
            self.relieved.iter().find(|(lever, _)| lever.name() == said).map_or(self.direct_s, |(_, wall)| *wall);
        let threshold = if said == "latency" { NOTICED } else { 0.0 };
        let alike = of_said - least <= self.direct_s * (ALIKE + threshold);
        (truth, truth == said, alike)
    }

    /// How much worse the chosen route is than the better of the two, by what the objective counts.
    pub(crate) fn regret(&self) -> f64 {
        let draws = self.same.len() as f64;
        let time = self.same.iter().map(|ended| ended.wall_s).sum::<f64>() / draws;
        let full = self.same.iter().map(|ended| ended.went_direct).sum::<u64>() as f64 / draws / self.case.n as f64;
        let money = full + (1.0 - full) * self.case.batch.discount;
        let (direct, batch) = match self.plan.objective {
            Objective::Latency => (self.direct_s, time),
            Objective::Cost => (1.0, money),
            _ => (self.direct_s, time * money),
        };
        let chosen = if self.plan.route == Route::Batch { batch } else { direct };
        chosen / direct.min(batch) - 1.0
    }

    /// The case in a line.
    pub(crate) fn line(&self) -> String {
        let (truth, right, alike) = self.binds();
        format!(
            "{:>4} n={:<5} direct {:>7.1} s, said {:>7.1} ({:+.1} %), 429s {:.2} %; binds {truth}, said {}{}; {} {} {:+.1} %; in range {:.2}",
            self.case.seed,
            self.case.n,
            self.direct_s,
            self.plan.direct.time.median.as_secs_f64(),
            self.off() * 100.0,
            self.refused * 100.0,
            self.plan.direct.binds.name(),
            if right {
                ""
            } else if alike {
                " (alike)"
            } else {
                " (WRONG)"
            },
            self.plan.objective.name(),
            self.plan.route.name(),
            self.regret() * 100.0,
            self.within,
        )
    }
}

/// A provider that never begins a batch of more than 4,000 rows: in how many of so many runs of 24,000 rows some batch had to be given
/// up, in batches of 8,000 and in the planner's own.
///
/// # Errors
/// The planner's.
pub(crate) fn starved(runs: u64) -> Result<(u64, u64), BoxError> {
    let case = Case::random(1, 1_000..1_001);
    let model = BatchModel::default();
    let mut work = case.workload().objective(Objective::Cost);
    work.n = 24_000;
    let provider =
        Provider { model: model.clone().wedge_rows(f64::INFINITY), starves_above: Some(4_000), direct: 50.0 };
    let stalled = |chunk: Option<u64>| -> Result<u64, BoxError> {
        let model = chunk.into_iter().fold(model.clone(), BatchModel::chunk);
        let plan = plan(&work, &case.fleet().batch(model))?;
        let lanes = plan.orgs.iter().map(|org| org.batches).sum();
        let mut rng = fastrand::Rng::with_seed(7);
        let runs = (0..runs).map(|_| batch::run(&provider, plan.n, plan.chunk.unwrap_or(plan.n), lanes, &mut rng));
        Ok(runs.filter(|ended| ended.went_direct > 0).count() as u64)
    };
    Ok((stalled(Some(8_000))?, stalled(None)?))
}
