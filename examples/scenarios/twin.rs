//! A run in virtual time, in this process: the same scenario, the same copies and colleague, the provider called without
//! a wire. `tests/quotas.rs` runs these; a paused clock is asked for.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use http::{Response, Uri};
use tokio::time::{Instant, sleep};
use tower::{Service, service_fn};
use tower_quota::{
    outcome::BoxError,
    sim::{Sim, SimBody, SimError},
};

use super::{
    colleague,
    copy::{self, Call},
    measured::Measured,
    scenario::{Task, Variant},
};

/// A way to the provider: over many connections calls overtake one another.
pub(crate) fn wire(
    sim: &Sim,
    seed: u64,
) -> impl Service<Call, Response = Response<SimBody>, Error = SimError, Future: Send> + Clone + Send + Sync + 'static {
    let service = sim.service();
    let rng = Arc::new(Mutex::new(fastrand::Rng::with_seed(seed)));
    service_fn(move |call| {
        let mut service = service.clone();
        // The clock ticks in milliseconds, so a wait is one tick or two.
        let late = Duration::from_micros(rng.lock().unwrap_or_else(|e| e.into_inner()).u64(1..=2_000));
        async move {
            sleep(late).await;
            service.call(call).await
        }
    })
}

/// One run.
pub(crate) async fn run(variant: &Variant<'_>, run: u64) -> Result<Measured, BoxError> {
    let scenario = variant.scenario;
    let mut config = variant.provider(run);
    config.wall_start_s = config.wall_start_s.or(Some(1_700_000_000));
    fastrand::seed(config.seed);
    let sim = Sim::new(config.clone())?;
    let base_url = Uri::from_static("http://provider.test/");
    let origin = Instant::now();
    let colleague = scenario.colleague.clone().map(|colleague| {
        let (orders, client, base_url) = (colleague.orders(&config), wire(&sim, config.seed + 1_000), base_url.clone());
        tokio::spawn(async move { colleague::work(&orders, &base_url, client).await })
    });
    let copies: Vec<_> = (0..scenario.copies)
        .map(|copy| {
            let task: Task = variant.task(&config, scenario.requests, copy);
            let (client, base_url) = (wire(&sim, config.seed + copy), base_url.clone());
            tokio::spawn(async move {
                let begin_s = origin.elapsed().as_secs_f64();
                let report = copy::stacked(&task, &base_url, client).await?;
                Ok::<_, BoxError>(copy::CopyReport { begin_s, ..report })
            })
        })
        .collect();
    let mut reports = vec![];
    for copy in copies {
        reports.push(copy.await??);
    }
    let colleague = match colleague {
        Some(colleague) => Some(colleague.await?),
        None => None,
    };
    Ok(Measured::new(variant, &config, scenario.requests, &reports, colleague, &sim.truth()))
}
