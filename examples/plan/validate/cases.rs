//! Random workloads and fleets, each as the planner sees it and as the simulated provider is configured.

use std::time::Duration;

use tower_quota::{
    dialect::Resource,
    plan::{BatchModel, Fleet, Latency, Limits, Objective, OrgPlan, Price, Tokens, Workload},
    sim::{self, Config, Dialect, OrgConfig},
};

pub(crate) const MODEL: &str = "claude-sonnet-4-5";

/// A bucket of tokens holds so many calls at least: with fewer, what single calls cost decides, and that is another subject.
const FEW: f64 = 30.0;

/// One org.
#[derive(Clone, Debug)]
pub(crate) struct CaseOrg {
    pub(crate) cap: usize,
    p50_s: f64,
    sigma: f64,
    /// In calls a minute: requests, input tokens, output tokens.
    calls_a_minute: [Option<f64>; 3],
    burst_s: f64,
}

/// One workload over one fleet.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) n: u64,
    /// Of a larger job in batches.
    pub(crate) rows: u64,
    pub(crate) input: [u64; 2],
    pub(crate) output: [u64; 2],
    pub(crate) objective: Objective,
    /// Calls a second.
    pub(crate) client: Option<f64>,
    pub(crate) orgs: Vec<CaseOrg>,
    pub(crate) batch: BatchModel,
    /// Batches at work at once, of each org.
    lanes: usize,
}

/// What may be doubled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lever {
    Requests,
    Input,
    Output,
    Slots,
    Client,
}

impl Lever {
    pub(crate) const ALL: [Lever; 5] = [Lever::Requests, Lever::Input, Lever::Output, Lever::Slots, Lever::Client];

    /// The planner's word for it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Lever::Requests => "requests",
            Lever::Input => "input tokens",
            Lever::Output => "output tokens",
            Lever::Slots => "concurrency",
            Lever::Client => "client",
        }
    }
}

/// From the one to the other, each factor as likely.
fn between(rng: &mut fastrand::Rng, least: f64, most: f64) -> f64 {
    (least.ln() + rng.f64() * (most / least).ln()).exp()
}

fn range(rng: &mut fastrand::Rng, least: f64, most: f64) -> [u64; 2] {
    let mean = between(rng, least, most);
    let width = 0.9 * rng.f64();
    [(mean * (1.0 - width)) as u64 + 1, (mean * (1.0 + width)) as u64 + 1]
}

fn mean([least, most]: [u64; 2]) -> f64 {
    (least + most) as f64 / 2.0
}

impl Case {
    /// One of many: 1 to 4 orgs of 4 to 150 slots, latencies of 0.2 to 4 s (σ 0.2 to 0.7), each quota absent or 60 to 30,000 calls a minute
    /// in requests, input and output tokens apart, told to the token (rounded to thousands, small buckets look empty), buckets of 1 to 60 s, a fifth behind a client of 5 to 100 calls a second; batches of 1 to
    /// 10 min and up to 1 s a row (σ 0.2 to 0.9), 1 to 8 at once an org, wedged never or at 5,000 to 50,000 rows.
    pub(crate) fn random(seed: u64, n: std::ops::Range<u64>) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        let rng = &mut rng;
        let (input, output) = (range(rng, 60.0, 2_000.0), range(rng, 8.0, 600.0));
        let org = |rng: &mut fastrand::Rng| {
            let quota = |rng: &mut fastrand::Rng, chance: f64| {
                let calls = between(rng, 60.0, 30_000.0);
                (rng.f64() < chance).then_some(calls)
            };
            let calls_a_minute = [quota(rng, 0.9), quota(rng, 0.6), quota(rng, 0.6)];
            let tokens = calls_a_minute[1..].iter().flatten().copied().fold(f64::INFINITY, f64::min);
            CaseOrg {
                cap: between(rng, 4.0, 150.0) as usize,
                p50_s: between(rng, 0.2, 4.0),
                sigma: 0.2 + 0.5 * rng.f64(),
                calls_a_minute,
                burst_s: between(rng, 1.0, 60.0).max(FEW * 60.0 / tokens),
            }
        };
        let orgs = (0..rng.usize(1..=4)).map(|_| org(rng)).collect();
        let rate = between(rng, 5.0, 100.0);
        let client = (rng.f64() < 0.2).then_some(rate);
        let wedged = between(rng, 5_000.0, 50_000.0);
        let batch = BatchModel::default()
            .turnaround(
                Duration::from_secs_f64(between(rng, 60.0, 600.0)),
                Duration::from_secs_f64(between(rng, 0.02, 1.0)),
            )
            .sigma(0.2 + 0.7 * rng.f64())
            .wedge_rows(if rng.bool() { wedged } else { f64::INFINITY })
            .stuck_after(Duration::from_secs_f64(3_600.0 * between(rng, 1.0, 6.0)));
        Case {
            seed,
            n: rng.u64(n),
            rows: between(rng, 1_000.0, 300_000.0) as u64,
            input,
            output,
            objective: [Objective::Latency, Objective::Cost, Objective::Balanced][rng.usize(..3)],
            client,
            orgs,
            batch,
            lanes: rng.usize(1..=8),
        }
    }

    /// The same with one limit of all orgs doubled, its buckets too; `None` where no org has it.
    pub(crate) fn twice(&self, lever: Lever) -> Option<Case> {
        let mut case = self.clone();
        let mut found = false;
        match lever {
            Lever::Client => {
                case.client = case.client.map(|rate| 2.0 * rate);
                found = case.client.is_some();
            }
            Lever::Slots => {
                case.orgs.iter_mut().for_each(|org| org.cap *= 2);
                found = true;
            }
            lever => {
                for org in &mut case.orgs {
                    let quota = &mut org.calls_a_minute[lever as usize];
                    found |= quota.is_some();
                    *quota = quota.map(|calls| 2.0 * calls);
                }
            }
        }
        found.then_some(case)
    }

    pub(crate) fn workload(&self) -> Workload {
        let tokens = |range: [u64; 2]| Tokens::between(range[0] as f64, range[1] as f64);
        Workload::new(self.n, MODEL).input(tokens(self.input)).output(tokens(self.output)).objective(self.objective)
    }

    pub(crate) fn fleet(&self) -> Fleet {
        let costs = [1.0, mean(self.input), mean(self.output)];
        let resources = [Resource::Requests, Resource::InputTokens, Resource::OutputTokens];
        let mut fleet = Fleet::new().price(MODEL, Price::per_million(3.0, 15.0)).batch(self.batch.clone());
        fleet.client_rate = self.client;
        for (nth, org) in self.orgs.iter().enumerate() {
            let latency = Latency::lognormal(Duration::from_secs_f64(org.p50_s), org.sigma);
            let mut limits = Limits::new().cap(org.cap).latency(latency).burst(Duration::from_secs_f64(org.burst_s));
            for ((resource, calls), cost) in resources.into_iter().zip(org.calls_a_minute).zip(costs) {
                if let Some(calls) = calls {
                    limits = limits.per_minute(resource, calls * cost);
                }
            }
            fleet = fleet.org(OrgPlan::new(format!("org-{nth}")).serves(MODEL, limits).batches(self.lanes));
        }
        fleet
    }

    pub(crate) fn provider(&self) -> Config {
        let (input, output) = (mean(self.input), mean(self.output));
        let mut config =
            Config::new(Dialect::Anthropic).seed(self.seed).wall_start_s(1_700_000_000).round_tokens(false);
        for (nth, org) in self.orgs.iter().enumerate() {
            let mut provider = OrgConfig::new(format!("org-{nth}"), format!("key-{nth}"))
                .latency(sim::Latency::new(org.p50_s * 1e3, org.sigma))
                .capacity_s(org.burst_s)
                .output_tokens_range(self.output);
            let [requests, inputs, outputs] = org.calls_a_minute;
            provider.requests_per_minute = requests;
            provider.input_tokens_per_minute = inputs.map(|calls| calls * input);
            provider.output_tokens_per_minute = outputs.map(|calls| calls * output);
            config = config.org(provider);
        }
        config
    }
}
