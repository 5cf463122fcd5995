//! Which way requests go: as it is told, or as the planner says of what is not answered yet.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use http::Request;
use tower_quota::{
    aimd::Caps,
    batch::Way,
    org::{Family, Orgs},
    plan::{self, BatchModel, Fleet, Limits, OrgPlan, Plan, PlanError, Price, Route, Tokens, Workload},
};

use crate::{
    Failure,
    args::{Args, RouteArg},
    batches::Setting,
    forecast::{Limit, Share, Work},
    prices::Prices,
    tally::Model,
};

/// A request extension: it is in a batch already, and goes no other way, or it might be paid for twice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InBatch;

/// The way of each request.
#[derive(Clone, Debug)]
pub(crate) struct Ways {
    /// Of models that nothing is said of.
    others: Way,
    models: Arc<HashMap<Arc<str>, ModelWay>>,
}

/// The way of a model's requests.
#[derive(Debug)]
struct ModelWay {
    /// So many of so many go in batches, evenly among the others.
    batch: u64,
    of: u64,
    seen: AtomicU64,
}

impl ModelWay {
    fn next(&self) -> Way {
        let n = u128::from(self.seen.fetch_add(1, Relaxed));
        let before = |n: u128| n * u128::from(self.batch) / u128::from(self.of.max(1));
        if before(n + 1) > before(n) { Way::Batch } else { Way::Direct }
    }
}

impl From<Way> for Ways {
    fn from(way: Way) -> Self {
        Ways { others: way, models: Arc::default() }
    }
}

impl Ways {
    /// Whether all go in batches.
    pub(crate) fn is_batch(&self) -> bool {
        self.others == Way::Batch && self.models.is_empty()
    }

    pub(crate) fn of<B>(&self, request: &Request<B>) -> Way {
        let extensions = request.extensions();
        if extensions.get::<InBatch>().is_some() {
            return Way::Batch;
        }
        let model = extensions.get::<Model>().and_then(|Model(model)| self.models.get(model));
        model.map_or(self.others, ModelWay::next)
    }
}

/// What was decided, and why, a line for each model.
pub(crate) struct Decided {
    pub(crate) ways: Ways,
    /// The rows of a batch, if something goes in batches.
    pub(crate) rows: Option<usize>,
    pub(crate) why: Vec<String>,
}

/// What goes which way.
///
/// # Errors
/// If the environment names a cap that is none.
pub(crate) fn decide(
    args: &Args,
    setting: Option<&Setting>,
    work: Option<&Work>,
    orgs: &Orgs,
    limits: &[Limit],
    prices: &Prices,
) -> Result<Decided, Failure> {
    let told = |way: Way| Decided { ways: way.into(), rows: None, why: vec![] };
    let (Some(RouteArg::Auto), Some(setting)) = (args.route, setting) else {
        return Ok(told(if args.route == Some(RouteArg::Batch) { Way::Batch } else { Way::Direct }));
    };
    let Some(work) = work else {
        let why = vec!["route: direct, since nobody knows how long a stream is".to_owned()];
        return Ok(Decided { why, ..told(Way::Direct) });
    };
    let caps = if args.cap.is_some() { Caps::default() } else { Caps::from_env()? };
    let batch = BatchModel::default().poll(setting.longest_poll()).stuck_after(setting.stuck_after);
    let batch = args.batch_rows.into_iter().fold(batch, |batch, rows| batch.chunk(rows.get() as u64));
    let (mut models, mut why, mut rows) = (HashMap::new(), vec![], None);
    for share in work.shares() {
        let Share { model, requests, input, output } = share;
        let family = Family::of_model(model);
        let mut fleet = Fleet::new().batch(batch.clone());
        if let Some(price) = prices.of(model) {
            fleet = fleet.price(model, Price::per_million(price.input, price.output));
        }
        for org in orgs {
            let known = limits.iter().filter(|limit| limit.org == org.name() && limit.family == family);
            let allowed = Limits::new().cap(caps.of(&org.family(&family)));
            let allowed = known.fold(allowed, |allowed, limit| allowed.per_minute(limit.resource, limit.per_minute));
            fleet = fleet.org(OrgPlan::new(org.name()).serves(model, allowed).batches(setting.in_flight));
        }
        let mut wanted = Workload::new(requests, model).input(Tokens::fixed(input)).objective(args.objective());
        if let Some(output) = output {
            wanted = wanted.output(Tokens::fixed(output));
        }
        wanted = args.deadline.into_iter().fold(wanted, Workload::deadline);
        let plan: Option<Plan> = match plan::plan(&wanted, &fleet) {
            Ok(plan) => Some(plan),
            Err(error) => {
                why.push(format!("route: {model}: {error}"));
                match error {
                    PlanError::Deadline { soonest, .. } => Some(*soonest),
                    _ => None,
                }
            }
        };
        let batch = match plan.as_ref().map(|plan| plan.route) {
            Some(Route::Batch) => requests,
            Some(Route::Split { batch, .. }) => batch,
            _ => 0,
        };
        if let Some(plan) = plan {
            why.push(format!("route: {model}: {plan}"));
            rows = rows.max(plan.chunk.filter(|_| batch > 0));
        }
        models.insert(model.into(), ModelWay { batch, of: requests, seen: AtomicU64::new(0) });
    }
    let ways = Ways { others: Way::Direct, models: Arc::new(models) };
    Ok(Decided { ways, rows: rows.and_then(|rows| usize::try_from(rows).ok()), why })
}
