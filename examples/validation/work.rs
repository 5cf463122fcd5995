//! The work that both are given: judge calls of the mission's size, and the provider they go to, as it was measured.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde::{Deserialize, Serialize};
use tower_quota::sim::{Chance, Config, Cost, Dialect, Latency, OrgConfig};

pub(crate) type Call = Request<Full<Bytes>>;

/// The calls of the mission: those of the published run that took about 14 hours.
pub(crate) const MISSION: u64 = 141_600;

/// The same model for all, priced by [`PRICES`].
pub(crate) const MODEL: &str = "claude-sonnet-4-5";

/// Shortest and longest prompt and answer, in tokens; all between equally likely.
const PROMPT: [u64; 2] = [120, 400];
const ANSWER: [u64; 2] = [64, 256];

/// The latency that was measured at 100 calls in flight: p50 1.52 s, p95 3.50 s (2,500 calls). A lognormal through 1.5 s and 3.5 s has
/// σ = ln(3.5 / 1.5) / 1.645.
const LATENCY_MS: f64 = 1_500.0;
const SIGMA: f64 = 0.515;

/// How often a call is answered 529: 11 of the 14,500 measured calls failed, and what with was not published.
const OVERLOADED: f64 = 0.001;

/// Name, requests, input tokens and output tokens a minute: sonnet 4.5 as three orgs announced it.
const ORGS: [(&str, [f64; 3]); 3] =
    [("high_prio", [30_000.0, 10e6, 1.0e6]), ("batch", [90_000.0, 8e6, 0.8e6]), ("low_prio", [30_000.0, 15e6, 1.2e6])];

/// What a bucket holds, in seconds of its refill: 2,500 calls in 49 s left 29,923 of 30,000 requests, so it held a minute.
const CAPACITY_S: f64 = 60.0;

const PRICES: &str = include_str!("../dispatch/prices.toml");

/// So many calls over some of the orgs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Work {
    pub(crate) calls: u64,
    /// How many of the orgs, from the first.
    pub(crate) orgs: usize,
    /// Calls in flight an org.
    pub(crate) cap: usize,
    pub(crate) seed: u64,
}

impl Work {
    /// With the earlier dispatcher's cap for sonnet.
    pub(crate) fn new(calls: u64) -> Self {
        Work { calls, orgs: ORGS.len(), cap: 100, seed: 1 }
    }

    pub(crate) fn provider(&self) -> Config {
        let mut config = Config::new(Dialect::Anthropic)
            .seed(self.seed)
            .wall_start_s(1_700_000_000)
            .latency(Latency::new(LATENCY_MS, SIGMA));
        for (name, [requests, input, output]) in &ORGS[..self.orgs] {
            let org = OrgConfig::new(*name, key(name))
                .requests_per_minute(*requests)
                .input_tokens_per_minute(*input)
                .output_tokens_per_minute(*output)
                .capacity_s(CAPACITY_S)
                .output_tokens_range(ANSWER)
                .overloaded(Chance(OVERLOADED));
            config = config.org(org);
        }
        config
    }

    /// Names and keys.
    pub(crate) fn keys(&self) -> Vec<(String, String)> {
        ORGS[..self.orgs].iter().map(|(name, _)| ((*name).to_owned(), key(name))).collect()
    }

    /// The items with their requests, made as they are taken.
    pub(crate) fn items(&self) -> impl Iterator<Item = (u64, Call)> + Send + Unpin + use<> {
        let work = self.clone();
        (0..self.calls).map(move |id| (id, work.request(id)))
    }

    /// A judge call: its prompt is as long as its tokens say, at four bytes each, the JSON around it included.
    pub(crate) fn request(&self, id: u64) -> Call {
        let body = |text: &str| {
            let most = ANSWER[1];
            format!(r#"{{"model":"{MODEL}","max_tokens":{most},"messages":[{{"role":"user","content":"{text}"}}]}}"#)
        };
        let mut text = format!("Is completion {id} aligned? Answer 0 to 100.");
        let mut rng = fastrand::Rng::with_seed(self.seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let missing = (4 * rng.u64(PROMPT[0]..=PROMPT[1]) as usize).saturating_sub(body(&text).len());
        text.extend(" word".chars().cycle().take(missing));
        Request::post("/v1/messages")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body(&text))))
            .expect("a literal path and header")
    }

    /// The least time in which so many calls can be made with so many in flight, their latency being what it is.
    pub(crate) fn by_caps(&self) -> Duration {
        let at_once = (self.orgs * self.cap) as f64;
        Duration::from_secs_f64(self.calls as f64 * Latency::new(LATENCY_MS, SIGMA).mean().as_secs_f64() / at_once)
    }

    /// The least time in which the quotas allow so many calls, bursts counted.
    pub(crate) fn by_quotas(&self) -> Duration {
        let mean = |[from, to]: [u64; 2]| (from + to) as f64 / 2.0;
        let cost = Cost { input_tokens: mean(PROMPT), output_tokens: mean(ANSWER) };
        self.provider().fluid_limit_for(self.calls, cost).unwrap_or_default()
    }
}

fn key(name: &str) -> String {
    format!("validation-key-of-{name}")
}

/// What tokens cost by the list, in dollars; a batch costs half of it.
pub(crate) fn dollars(input_tokens: u64, output_tokens: u64) -> f64 {
    #[derive(Deserialize)]
    struct Prices {
        model: Vec<Price>,
    }
    #[derive(Deserialize)]
    struct Price {
        name: String,
        input: f64,
        output: f64,
    }
    let prices: Prices = toml::from_str(PRICES).expect("the table of `dispatch`, which its tests read");
    let price = prices.model.iter().find(|price| price.name == MODEL).expect("the model is in the table");
    (input_tokens as f64 * price.input + output_tokens as f64 * price.output) / 1e6
}
