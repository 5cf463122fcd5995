//! What a run will take, as far as that can be known before the first call. Pure.

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use serde::Deserialize;
use tower_quota::{dialect::Resource, org::Family};

use crate::prices::{Prices, Tokens};

/// Bytes of a request that are a token of input, roughly.
const BYTES_A_TOKEN: u64 = 4;
/// So many requests are all looked into, and then one of so many.
const ALL: u64 = 4096;
const SHARE: u64 = 16;
/// How many models are told apart; further ones are counted together.
const MODELS: usize = 64;
/// What those are called. No table has a price for it.
pub(crate) const OTHERS: &str = "(others)";

/// What a request says of its own cost.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Asked<'a> {
    #[serde(borrow, default)]
    pub(crate) model: Option<Cow<'a, str>>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    max_output_tokens: Option<u64>,
    /// How many answers are wanted.
    n: Option<u64>,
}

impl<'a> Asked<'a> {
    /// Of a body that is no such object: nothing.
    pub(crate) fn of(body: &'a [u8]) -> Self {
        serde_json::from_slice(body).unwrap_or_default()
    }

    /// The most tokens that may come back.
    fn most(&self) -> Option<u64> {
        let most = self.max_tokens.max(self.max_completion_tokens).max(self.max_output_tokens)?;
        Some(most.saturating_mul(self.n.unwrap_or(1).max(1)))
    }
}

/// What is asked of one model.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    requests: u64,
    bytes: u64,
    /// The most output of all that have a bound.
    output: u64,
    /// Requests that do not bound it.
    unbounded: u64,
}

impl Load {
    fn input_tokens(&self) -> u64 {
        self.bytes.div_ceil(BYTES_A_TOKEN)
    }
}

/// All that is to be sent.
#[derive(Debug, Default)]
pub(crate) struct Work {
    models: BTreeMap<String, Load>,
    /// How many of all are left, if not all.
    left: Option<u64>,
}

impl Work {
    /// So many requests with such a body.
    pub(crate) fn add(&mut self, body: &[u8], requests: u64) {
        let asked = Asked::of(body);
        let model = asked.model.as_deref().unwrap_or_default();
        let load = match self.models.get_mut(model) {
            Some(load) => load,
            None => {
                let model = if self.models.len() < MODELS { model } else { OTHERS };
                self.models.entry(model.to_owned()).or_default()
            }
        };
        load.requests += requests;
        load.bytes += requests * body.len() as u64;
        match asked.most() {
            Some(most) => load.output = load.output.saturating_add(most.saturating_mul(requests)),
            None => load.unbounded += requests,
        }
    }

    /// One request with this body, the one of this number from 0. Of many, one in sixteen stands for all: to look into each takes a fifth of
    /// the time in which a long input is read.
    pub(crate) fn sample(&mut self, number: u64, body: &[u8]) {
        match number {
            ..ALL => self.add(body, 1),
            _ if number % SHARE == 0 => self.add(body, SHARE),
            _ => {}
        }
    }

    /// Leaves `left` of `all` requests, as if they were like the others.
    pub(crate) fn keep(&mut self, left: u64, all: u64) {
        let share = |figure: u64| (u128::from(figure) * u128::from(left)).div_ceil(u128::from(all.max(1))) as u64;
        self.left = Some(left);
        for load in self.models.values_mut() {
            let Load { requests, bytes, output, unbounded } = *load;
            *load = Load {
                requests: share(requests),
                bytes: share(bytes),
                output: share(output),
                unbounded: share(unbounded),
            };
        }
    }

    /// What is left of each model.
    pub(crate) fn shares(&self) -> impl Iterator<Item = Share<'_>> {
        self.models.iter().filter(|(_, load)| load.requests > 0).map(|(model, load)| {
            let each = |figure: u64| figure as f64 / load.requests as f64;
            let output =
                (load.unbounded < load.requests).then(|| load.output as f64 / (load.requests - load.unbounded) as f64);
            Share { model, requests: load.requests, input: each(load.input_tokens()), output }
        })
    }

    pub(crate) fn requests(&self) -> u64 {
        self.left.unwrap_or_else(|| self.models.values().map(|load| load.requests).sum())
    }

    /// The most that it costs, in dollars, by estimated input and the largest output; else why that is not known.
    pub(crate) fn cost(&self, prices: &Prices) -> Result<f64, String> {
        let mut cost = 0.0;
        for (model, load) in &self.models {
            let Some(price) = prices.of(model) else {
                return Err(format!(
                    "no price for {}",
                    if model.is_empty() { "a request without model" } else { model }
                ));
            };
            if load.unbounded > 0 && price.output > 0.0 {
                return Err(format!("{} of {model} set no max_tokens", load.unbounded));
            }
            cost += price.cost(&Tokens { input: load.input_tokens(), output: load.output, ..Tokens::default() });
        }
        Ok(cost)
    }

    /// How long it takes at these limits, an empty bucket assumed, and output left out; `None` where none of some family's limits is
    /// known. Families run side by side.
    pub(crate) fn time(&self, limits: &[Limit]) -> Option<Duration> {
        let mut families: BTreeMap<Family, Load> = BTreeMap::new();
        for (model, load) in &self.models {
            let family = families.entry(Family::of_model(model)).or_default();
            family.requests += load.requests;
            family.bytes += load.bytes;
        }
        let mut longest = 0.0_f64;
        for (family, load) in &families {
            // Requests a minute, over all orgs; of each the limit that binds.
            let mut orgs: BTreeMap<&str, f64> = BTreeMap::new();
            for limit in limits.iter().filter(|limit| limit.family == *family) {
                let each = match limit.resource {
                    Resource::Requests => 1.0,
                    Resource::InputTokens | Resource::Tokens => {
                        load.input_tokens() as f64 / load.requests.max(1) as f64
                    }
                    // Nobody knows how much of the bound will be used.
                    _ => continue,
                };
                let rate = limit.per_minute / each.max(f64::MIN_POSITIVE);
                let least = orgs.entry(&limit.org).or_insert(rate);
                *least = least.min(rate);
            }
            let rate: f64 = orgs.values().sum();
            if rate <= 0.0 {
                return None;
            }
            longest = longest.max(load.requests as f64 / rate);
        }
        Duration::try_from_secs_f64(longest * 60.0).ok()
    }
}

/// What is asked of one model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share<'a> {
    pub(crate) model: &'a str,
    pub(crate) requests: u64,
    /// Tokens of a prompt, on average and estimated.
    pub(crate) input: f64,
    /// The most tokens of an answer, on average; `None` where none is bounded.
    pub(crate) output: Option<f64>,
}

/// A limit that somebody knows.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) org: String,
    pub(crate) family: Family,
    pub(crate) resource: Resource,
    pub(crate) per_minute: f64,
}
