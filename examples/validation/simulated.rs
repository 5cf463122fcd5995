//! Runs in virtual time: the provider called without a wire, under a clock that is paused.

use std::{path::Path, time::Duration};

use http::Uri;
use tokio::time::Instant;
use tower_quota::{outcome::BoxError, sim::Sim};

use super::{
    earlier,
    ours::{self, Paused},
    run::Run,
    work::Work,
};

fn base_url() -> Uri {
    Uri::from_static("http://provider.test/")
}

/// The earlier rules.
pub(crate) async fn earlier(work: &Work, per_minute: Option<f64>) -> Result<Run, BoxError> {
    let sim = Sim::new(work.provider())?;
    let (answers, wall) = earlier::go(work, &base_url(), sim.service(), per_minute).await?;
    Ok(Run::new(wall, &answers, &sim.truth()))
}

/// Ours, from beginning to end.
pub(crate) async fn ours(work: &Work) -> Result<Run, BoxError> {
    fastrand::seed(work.seed);
    let sim = Sim::new(work.provider())?;
    let went = ours::go(work, &base_url(), sim.service(), None::<Paused>, None).await?;
    Ok(Run::new(went.wall, &went.answers, &sim.truth()))
}

/// Ours, dropped after `until` and begun again with what the journal has.
#[derive(Debug)]
pub(crate) struct Resumed {
    /// Both parts together.
    pub(crate) run: Run,
    pub(crate) until: Duration,
    /// Ids that the first part had answered, and that were alive when it was dropped.
    pub(crate) before: u64,
    pub(crate) alive: usize,
    /// Calls of the second part, by the provider's count.
    pub(crate) after: u64,
    /// Calls that were on their way when it was dropped: paid for, and sent again.
    pub(crate) abandoned: u64,
}

pub(crate) async fn resumed(work: &Work, until: Duration, file: &Path) -> Result<Resumed, BoxError> {
    fastrand::seed(work.seed);
    let sim = Sim::new(work.provider())?;
    let begin = Instant::now();
    let first = ours::go(work, &base_url(), sim.service(), Some(Paused::open(file)?), Some(begin + until)).await?;
    let calls = sim.truth().calls();
    // All is gone but the file and the provider.
    let second = ours::go(work, &base_url(), sim.service(), Some(Paused::open(file)?), None).await?;
    let truth = sim.truth();
    Ok(Resumed {
        run: Run::new(first.wall + second.wall, &second.answers, &truth),
        until,
        before: first.answers.once(),
        alive: first.alive,
        after: truth.calls() - calls,
        abandoned: truth.orgs.iter().map(|org| org.abandoned).sum(),
    })
}
