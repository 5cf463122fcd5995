//! The files beside this one: what runs, against what, and which bars are to be met.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tower_quota::sim::{Change, Config, Cost, Dialect};

use super::colleague::Orders;

/// A scenario file.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    pub(crate) about: String,
    /// How many, over all copies.
    pub(crate) requests: u64,
    #[serde(default = "anthropic")]
    pub(crate) dialects: Vec<Dialect>,
    /// One variant each.
    #[serde(default = "short")]
    pub(crate) max_tokens: Vec<u64>,
    /// The shortest and the longest prompt in tokens, drawn by the item's number; default some 25, all alike.
    pub(crate) prompt_tokens: Option<[u64; 2]>,
    /// Embeddings instead of messages.
    #[serde(default)]
    pub(crate) embeddings: bool,
    #[serde(default)]
    pub(crate) bars: Bars,
    /// The start, reported apart: what must be found out there is not held against the bars.
    #[serde(default)]
    pub(crate) after_s: f64,
    /// Runs the bare client and a tenth of the items beside, for the bars that compare.
    #[serde(default)]
    pub(crate) against_bare: bool,
    /// The most calls in flight an org, instead of the default.
    pub(crate) cap: Option<usize>,
    /// How long one attempt may take. What the last one waits for in vain is not held against the ratio.
    pub(crate) timeout_s: Option<f64>,
    /// Attempts that may end in an error, instead of the default.
    pub(crate) attempts: Option<u32>,
    /// Answers as streams.
    #[serde(default)]
    pub(crate) stream: bool,
    /// How many logical requests a copy keeps alive, instead of twice what the orgs take at once.
    pub(crate) offered: Option<usize>,
    /// So many client processes share the requests and the orgs.
    #[serde(default = "one")]
    pub(crate) copies: u64,
    pub(crate) colleague: Option<Colleague>,
    /// Hours long over HTTP: it runs in virtual time only (`tests/quotas.rs`).
    #[serde(default)]
    pub(crate) virtual_only: bool,
    pub(crate) provider: Config,
}

fn anthropic() -> Vec<Dialect> {
    vec![Dialect::Anthropic]
}

fn short() -> Vec<u64> {
    vec![64]
}

fn one() -> u64 {
    1
}

/// Somebody else on the key of one org, who knows nothing of us and paces itself.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Colleague {
    pub(crate) org: String,
    pub(crate) requests_per_minute: f64,
    /// Comes and goes, in seconds.
    pub(crate) from_s: f64,
    pub(crate) to_s: f64,
}

impl Colleague {
    pub(crate) fn orders(&self, config: &Config) -> Orders {
        let org = config.orgs.iter().find(|org| org.name == self.org);
        Orders {
            key: org.map(|org| org.key.expose().to_owned()).unwrap_or_default(),
            per_second: self.requests_per_minute / 60.0,
            from_s: self.from_s,
            to_s: self.to_s,
        }
    }
}

/// What must be met; what is absent is not asked.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Bars {
    /// The most times the fluid limit.
    pub(crate) ratio: Option<f64>,
    /// The most 429s, as a part of all calls of ours.
    pub(crate) refused: Option<f64>,
    /// The most 429s of the colleague, as a part of its calls.
    pub(crate) colleague_refused: Option<f64>,
    /// Until the first copy is done: the least part of the quota that all together use, and how far the smallest share
    /// may be below the largest, as a part of it.
    pub(crate) together: Option<f64>,
    pub(crate) unequal: Option<f64>,
    /// This org refuses everything: the most calls in its first second, and in any second after.
    pub(crate) black_hole: Option<BlackHole>,
    /// The most calls, as times of the items and the faults that the rates let expect. Then an item may be answered twice where a fault left open
    /// whether it was.
    pub(crate) wire: Option<f64>,
    /// The most calls that are refused for want of a key, of any org.
    pub(crate) refused_keys: Option<u64>,
    /// The most logical requests alive.
    pub(crate) live: Option<usize>,
    /// The most peak memory against a tenth of the items.
    pub(crate) memory: Option<f64>,
    /// The least rate against the bare client.
    pub(crate) rate: Option<f64>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlackHole {
    pub(crate) org: String,
    pub(crate) first_second: u64,
    pub(crate) each_second: u64,
}

/// One scenario in one dialect with one `max_tokens`: what one run is made of.
#[derive(Clone)]
pub(crate) struct Variant<'a> {
    pub(crate) name: String,
    pub(crate) scenario: &'a Scenario,
    pub(crate) dialect: Dialect,
    pub(crate) max_tokens: u64,
}

impl Scenario {
    pub(crate) fn variants(&self, stem: &str) -> Vec<Variant<'_>> {
        let all = self.dialects.iter().flat_map(|dialect| self.max_tokens.iter().map(|most| (*dialect, *most)));
        all.map(|(dialect, max_tokens)| {
            let most = if self.max_tokens.len() > 1 { format!(", {max_tokens}") } else { String::new() };
            Variant { name: format!("{stem} ({}{most})", dialect.name()), scenario: self, dialect, max_tokens }
        })
        .collect()
    }
}

impl Variant<'_> {
    /// The provider of the n-th run.
    pub(crate) fn provider(&self, run: u64) -> Config {
        let mut config = self.scenario.provider.clone();
        config.dialect = self.dialect;
        config.seed += run;
        config
    }

    /// What the n-th copy is to do.
    pub(crate) fn task(&self, config: &Config, requests: u64, copy: u64) -> Task {
        let (from, to) = (requests * copy / self.scenario.copies, requests * (copy + 1) / self.scenario.copies);
        Task {
            openai: self.dialect == Dialect::OpenAi,
            embeddings: self.scenario.embeddings,
            items: (from, to),
            seed: config.seed,
            max_tokens: self.max_tokens,
            prompt_tokens: self.scenario.prompt_tokens,
            timeout_s: self.scenario.timeout_s,
            attempts: self.scenario.attempts,
            stream: self.scenario.stream,
            cap: self.scenario.cap,
            offered: self.scenario.offered,
            orgs: config.orgs.iter().map(|org| (org.name.clone(), org.key.expose().to_owned())).collect(),
        }
    }
}

/// What one copy of our program is to do.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) openai: bool,
    pub(crate) embeddings: bool,
    /// From the first, up to but not including the second.
    pub(crate) items: (u64, u64),
    pub(crate) seed: u64,
    pub(crate) max_tokens: u64,
    pub(crate) prompt_tokens: Option<[u64; 2]>,
    pub(crate) timeout_s: Option<f64>,
    pub(crate) attempts: Option<u32>,
    pub(crate) stream: bool,
    pub(crate) cap: Option<usize>,
    pub(crate) offered: Option<usize>,
    /// Names and keys.
    pub(crate) orgs: Vec<(String, String)>,
}

/// The provider with what a colleague took of one org's requests taken off: `taken` calls between these seconds. Its
/// bucket holds what it did.
pub(crate) fn without(config: &Config, org: &str, taken: u64, from_s: f64, to_s: f64) -> Config {
    let mut config = config.clone();
    if let Some(org) = config.orgs.iter_mut().find(|candidate| candidate.name == org) {
        if let Some(rate) = org.requests_per_minute {
            org.requests_capacity.get_or_insert((rate / 60.0 * org.capacity_s).max(1.0));
            let left = (rate - taken as f64 * 60.0 / (to_s - from_s)).max(0.0);
            let set = |rate| Change { requests_per_minute: Some(rate), ..Change::default() };
            *org = org.clone().at(from_s, set(left)).at(to_s, set(rate));
        }
    }
    config
}

/// The least time for so many calls that used so many tokens in all, each org having had its part of the long and the short.
pub(crate) fn fluid(config: &Config, calls: u64, input_tokens: u64, output_tokens: u64) -> Option<Duration> {
    let each = |tokens: u64| tokens as f64 / calls.max(1) as f64;
    config.fluid_limit_for(calls, Cost { input_tokens: each(input_tokens), output_tokens: each(output_tokens) })
}
