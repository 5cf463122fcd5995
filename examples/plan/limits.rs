//! The file of measured limits: which org allows how much of which model, and what was run when it was measured.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde::Deserialize;
use tower_quota::{
    dialect::Resource,
    plan::{Fleet, Latency, Limits, OrgPlan, Price},
};

use crate::prices::{Prices, Tokens};

/// The file that is used unless another one is given.
const MEASURED: &str = include_str!("measured-limits.json");

/// The file.
#[derive(Debug, Deserialize)]
pub(crate) struct Measured {
    /// Whence and when.
    pub(crate) source: String,
    orgs: BTreeMap<String, BTreeMap<String, Allowed>>,
    #[serde(default)]
    pub(crate) runs: Vec<Run>,
}

/// What an org answered when it was asked for a model.
#[derive(Debug, Deserialize)]
struct Allowed {
    status: u16,
    rpm: Option<f64>,
    itpm: Option<f64>,
    otpm: Option<f64>,
}

/// One run.
#[derive(Debug, Deserialize)]
pub(crate) struct Run {
    pub(crate) config: Config,
    pub(crate) wall_s: f64,
    pub(crate) per_org: Vec<PerOrg>,
}

/// What was run.
#[derive(Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) orgs: Vec<String>,
    pub(crate) model: String,
    pub(crate) n: u64,
    /// Calls in flight an org, one after the other.
    ramp: Vec<usize>,
}

impl Run {
    /// Calls in flight an org, one after the other, as far as it came.
    pub(crate) fn ramp(&self) -> &[usize] {
        let further = self.per_org.iter().filter_map(|org| org.ramp_ts.as_ref()).map(Vec::len).max().unwrap_or(0);
        &self.config.ramp[..self.config.ramp.len().min(further + 1)]
    }
}

/// How one org answered in it.
#[derive(Debug, Deserialize)]
pub(crate) struct PerOrg {
    pub(crate) label: String,
    p50_s: f64,
    p95_s: f64,
    /// When it went on to which number in flight.
    ramp_ts: Option<Vec<(f64, f64)>>,
}

impl Measured {
    /// This file, or that of the program.
    ///
    /// # Errors
    /// If it cannot be read; the text names it.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self, String> {
        let Some(path) = path else { return serde_json::from_str(MEASURED).map_err(|error| error.to_string()) };
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The models that some org serves.
    pub(crate) fn models(&self) -> Vec<&str> {
        let all = self.orgs.values().flatten();
        let mut served: Vec<_> = all.filter(|(_, allowed)| allowed.serves()).map(|(model, _)| model.as_str()).collect();
        served.sort_unstable();
        served.dedup();
        served
    }

    /// How an org's calls took in the first run that the client did not hold up, of those in which it took part.
    fn latency(&self, org: &str) -> Option<Latency> {
        let all = self.runs.iter().flat_map(|run| &run.per_org).filter(|of| of.label == org);
        // With a median of many seconds it was the client that was measured.
        let own = all.filter(|of| of.p50_s < 5.0).max_by(|a, b| a.p95_s.total_cmp(&b.p95_s))?;
        Some(Latency::new(Duration::from_secs_f64(own.p50_s), Duration::from_secs_f64(own.p95_s)))
    }

    /// All orgs with all that they serve.
    pub(crate) fn fleet(&self, prices: &Prices) -> Fleet {
        let mut fleet = Fleet::new();
        for (name, models) in &self.orgs {
            let latency = self.latency(name).unwrap_or_default();
            let served = models.iter().filter(|(_, allowed)| allowed.serves());
            let org = served
                .fold(OrgPlan::new(name), |org, (model, allowed)| org.serves(model, allowed.limits().latency(latency)));
            fleet = fleet.org(org);
        }
        let million = 1_000_000;
        for model in self.models() {
            let Some(price) = prices.of(model) else { continue };
            let input = price.cost(&Tokens { input: million, ..Tokens::default() });
            let output = price.cost(&Tokens { output: million, ..Tokens::default() });
            fleet = fleet.price(model, Price::per_million(input, output));
        }
        fleet
    }
}

impl Allowed {
    /// A refusal for want of quota (429) is an org that serves.
    fn serves(&self) -> bool {
        self.status == 200 || self.status == 429
    }

    fn limits(&self) -> Limits {
        let told =
            [(Resource::Requests, self.rpm), (Resource::InputTokens, self.itpm), (Resource::OutputTokens, self.otpm)];
        let told = told.into_iter().filter_map(|(resource, limit)| Some((resource, limit?)));
        told.fold(Limits::new(), |limits, (resource, limit)| limits.per_minute(resource, limit))
    }
}
