//! What a run came to, for the next plan.

use std::time::Duration;

use super::{Fleet, Latency, Tokens, Workload, plan};

/// What a direct run came to. What is not known is `None`, and stays as it was.
///
/// Calls are counted, and their time is taken, between the stack and the client, for instance by a layer of yours
/// ([`Stack::build_with`](crate::stack::Stack::build_with)); tokens are in the answers' [`Stamp`](crate::outcome::Stamp)s.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Measured {
    /// Rows that were sent, and answered in the end.
    pub rows: u64,
    /// Wire calls that this took, refused and failed ones included.
    pub calls: u64,
    /// From the first call to the last answer.
    pub wall: Duration,
    /// Median and 95th percentile of a call that was answered; one that is refused takes no slot for long.
    pub latency: Option<(Duration, Duration)>,
    /// The same of single orgs, by name: they go before.
    pub latency_of: Vec<(String, (Duration, Duration))>,
    /// Input tokens of a call, in the mean.
    pub input: Option<f64>,
    /// Output tokens of a call, in the mean.
    pub output: Option<f64>,
}

/// A run that took so much longer than the latest it should have, with all that was measured in place, was held up by its client.
const HELD_UP: f64 = 1.1;

impl Measured {
    /// So many rows answered by so many calls in this time.
    #[must_use]
    pub fn new(rows: u64, calls: u64, wall: Duration) -> Self {
        Measured { rows, calls, wall, ..Measured::default() }
    }

    /// Sets [`latency`](Self::latency).
    #[must_use]
    pub fn latency(mut self, p50: Duration, p95: Duration) -> Self {
        self.latency = Some((p50, p95));
        self
    }

    /// Adds to [`latency_of`](Self::latency_of).
    #[must_use]
    pub fn latency_of(mut self, org: impl Into<String>, p50: Duration, p95: Duration) -> Self {
        self.latency_of.push((org.into(), (p50, p95)));
        self
    }

    /// Sets [`input`](Self::input) and [`output`](Self::output).
    #[must_use]
    pub fn tokens(mut self, input: f64, output: f64) -> Self {
        (self.input, self.output) = (Some(input), Some(output));
        self
    }

    /// Rows answered a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rows as f64 / self.wall.as_secs_f64().max(1e-9)
    }

    /// The workload and the fleet with what was measured in place of what was assumed: tokens (their 95th percentile in proportion), calls a
    /// row, latencies. And if the
    /// run was held up by something that the model knows no limit for, the client's rate: the next plan goes no faster.
    #[must_use]
    pub fn apply(&self, work: &Workload, fleet: &Fleet) -> (Workload, Fleet) {
        let (mut work, mut fleet) = (work.clone(), fleet.clone());
        if self.rows == 0 {
            return (work, fleet);
        }
        work.calls_a_row = (self.calls as f64 / self.rows as f64).max(1.0);
        for (tokens, measured) in [(&mut work.input, self.input), (&mut work.output, self.output)] {
            if let Some(mean) = measured {
                // As spread out as was assumed.
                let wide = if tokens.mean > 0.0 { tokens.p95 / tokens.mean } else { 1.0 };
                *tokens = Tokens::new(mean, mean * wide);
            }
        }
        for org in &mut fleet.orgs {
            let own = self.latency_of.iter().find(|(name, _)| *name == org.name).map(|(_, latency)| *latency);
            let Some((p50, p95)) = own.or(self.latency) else { continue };
            for (_, limits) in &mut org.models {
                let Latency { tail_share, tail_p50, .. } = limits.latency;
                limits.latency = Latency::new(p50, p95).tail(tail_share, tail_p50);
            }
        }
        fleet.client_rate = None;
        let again = Workload { n: self.rows, deadline: None, ..work.clone() };
        if plan(&again, &fleet).is_ok_and(|plan| self.wall > plan.direct.time.p90.mul_f64(HELD_UP)) {
            fleet.client_rate = Some(self.calls as f64 / self.wall.as_secs_f64());
        }
        (work, fleet)
    }
}
