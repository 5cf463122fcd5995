//! The law as it is told: by single rules, by runs against a provider, by whatever comes.

mod memory;
mod properties;
mod rules;
mod runs;

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

use super::{
    Cost,
    ledger::{Quota, Verdict},
};
use crate::{
    dialect::{Detect, ReadQuota, Readings, Resource},
    gate::Admission,
    org::Org,
    outcome::Usage,
};

const GUARD: Duration = Duration::from_millis(5);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// What an answer says, as its headers would.
fn said(lines: &[(&'static str, f64)]) -> Readings {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(format!("anthropic-ratelimit-{name}").as_bytes()).unwrap();
        headers.insert(name, HeaderValue::from_str(&value.to_string()).unwrap());
    }
    Detect.read(&headers, Some(std::time::SystemTime::UNIX_EPOCH))
}

fn requests(limit: f64, remaining: f64) -> Readings {
    said(&[("requests-limit", limit), ("requests-remaining", remaining)])
}

fn verdict(uncounted: bool, usage: Option<Usage>) -> Verdict {
    Verdict { uncounted, usage, ..Verdict::default() }
}

/// The provider: whoever comes in finds the level of that moment.
struct Provider {
    rate: f64,
    capacity: f64,
    level: f64,
    at: Instant,
}

impl Provider {
    fn new(rate: f64, span: f64, now: Instant) -> Self {
        Provider { rate, capacity: rate * span, level: rate * span, at: now }
    }

    fn set(&mut self, rate: f64, now: Instant) {
        self.refill(now);
        self.capacity *= rate / self.rate;
        self.level = self.level.min(self.capacity);
        self.rate = rate;
    }

    fn refill(&mut self, now: Instant) {
        let dt = now.saturating_duration_since(self.at).as_secs_f64();
        self.level = (self.level + self.rate * dt).min(self.capacity);
        self.at = self.at.max(now);
    }

    /// Whether the call is refused, and what remains.
    fn arrive(&mut self, now: Instant) -> (bool, f64) {
        self.refill(now);
        let refused = self.level < 1.0;
        if !refused {
            self.level -= 1.0;
        }
        (refused, self.level.max(0.0).floor())
    }
}

struct Law {
    quota: Quota,
    now: Instant,
}

impl Law {
    fn new() -> Self {
        let now = Instant::now();
        Law { quota: Quota::new(Org::new("a"), GUARD, 0.95, now), now }
    }

    /// One that has had an answer to its first call.
    fn told(lines: &[(&'static str, f64)]) -> Self {
        let mut law = Law::new();
        let call = law.call(Cost::default()).unwrap();
        law.wait(100 * MS);
        law.answer(call, &said(lines));
        law
    }

    fn wait(&mut self, span: Duration) {
        self.now += span;
    }

    fn admits(&mut self) -> bool {
        self.quota.admit(self.now).is_some()
    }

    /// How many are admitted at this moment.
    fn admitted(&mut self) -> usize {
        (0..100_000).take_while(|_| self.admits()).count()
    }

    fn call(&mut self, cost: Cost) -> Result<u64, Instant> {
        let reserved = self.quota.admit(self.now).expect("admitted");
        self.quota.call(&reserved, &cost, self.now).1
    }

    fn answer(&mut self, call: u64, readings: &Readings) {
        self.quota.answered(call, readings, verdict(false, None), self.now);
    }

    fn level(&self, resource: Resource) -> f64 {
        self.quota.bucket(resource).state().1
    }

    fn capacity(&self, resource: Resource) -> f64 {
        self.quota.bucket(resource).state().0
    }

    fn admits_and_sends(&mut self, tokens: f64) -> bool {
        self.quota.admit(self.now).is_some_and(|reserved| {
            self.quota.call(&reserved, &Cost::tokens(Some(tokens), Some(0.0)), self.now).1.is_ok()
        })
    }
}
