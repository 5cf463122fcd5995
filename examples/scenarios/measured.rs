//! What a run came to, and whether that meets the bars.

use std::time::Duration;

use tower_quota::sim::{BIN, Config, OrgTruth, Truth};

use super::{
    colleague::ColleagueReport,
    copy::{self, CopyReport},
    scenario::{Scenario, Variant, fluid, without},
};

/// One run, or the median of several.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) wall: Duration,
    pub(crate) fluid: Option<Duration>,
    pub(crate) ratio: Option<f64>,
    pub(crate) refused: f64,
    /// The same in the start that is reported apart.
    pub(crate) refused_at_first: f64,
    pub(crate) lost: u64,
    pub(crate) twice: u64,
    /// Of calls that were let in, those that a fault took away: each is made again, and costs quota twice.
    pub(crate) wasted: u64,
    /// All faults, and those of them after which nobody knows whether there was an answer.
    pub(crate) faults: u64,
    /// As many as the scenario's own rates make of that many calls.
    pub(crate) expected: f64,
    pub(crate) ambiguous: u64,
    pub(crate) refused_keys: u64,
    pub(crate) live: usize,
    pub(crate) memory: Option<f64>,
    pub(crate) rate: Option<f64>,
    pub(crate) black_hole: Option<(u64, u64)>,
    /// Until the first copy is done: the part of the quota all used, and each copy's share.
    pub(crate) shared: Option<(f64, Vec<f64>)>,
    pub(crate) colleague: Option<ColleagueReport>,
    pub(crate) requests: u64,
    pub(crate) calls: u64,
    pub(crate) peak_kib: u64,
    /// Processor time a call of the client process, and of the bare one, in microseconds.
    pub(crate) cpu_us: Option<(f64, f64)>,
    /// Good answers and refusals of each org.
    pub(crate) orgs: Vec<(String, u64, u64)>,
}

impl Measured {
    /// `requests` were asked for, and of that came this.
    pub(crate) fn new(
        variant: &Variant<'_>,
        config: &Config,
        requests: u64,
        copies: &[CopyReport],
        colleague: Option<ColleagueReport>,
        truth: &Truth,
    ) -> Self {
        let scenario = variant.scenario;
        let begin = copies.iter().map(|copy| copy.begin_s).fold(f64::INFINITY, f64::min);
        let end = copies.iter().map(|copy| copy.begin_s + copy.wall_s).fold(0.0, f64::max);
        let wall = Duration::try_from_secs_f64(end - begin).unwrap_or_default();
        let left = match (&scenario.colleague, colleague) {
            (Some(theirs), Some(did)) => without(config, &theirs.org, did.ok, theirs.from_s, theirs.to_s),
            _ => config.clone(),
        };
        let (input, output) =
            truth.orgs.iter().fold((0, 0), |sum, org| (sum.0 + org.input_tokens, sum.1 + org.output_tokens));
        let fluid_of = |calls: u64| {
            let part = |tokens: u64| (tokens as f64 * calls as f64 / requests.max(1) as f64) as u64;
            fluid(&left, calls, part(input), part(output))
        };
        let sum = |of: fn(&OrgTruth) -> u64| truth.orgs.iter().map(of).sum::<u64>();
        let ambiguous = sum(|org| org.resets + org.abandoned + org.truncated);
        let wasted = ambiguous + sum(|org| org.empty + org.in_band + errors(org, 500));
        let refused_keys = sum(|org| errors(org, 401));
        let overloaded = sum(|org| errors(org, 529) + errors(org, 503));
        // What waits for the last attempt's end, in vain, is no quota's fault.
        let timeout = Duration::try_from_secs_f64(scenario.timeout_s.unwrap_or(0.0)).unwrap_or_default();
        let limit = fluid_of(requests + wasted);
        let theirs = colleague.unwrap_or_default();
        let answered = if colleague.is_some() { requests } else { truth.answered_once + truth.answered_more };
        // What the colleague counted and never came in was not ours either.
        let calls = truth.calls().saturating_sub(theirs.calls);
        Measured {
            wall,
            fluid: limit,
            ratio: limit
                .filter(|limit| !limit.is_zero())
                .map(|limit| wall.saturating_sub(timeout).div_duration_f64(limit)),
            refused: match colleague {
                Some(_) => truth.throttled_429().saturating_sub(theirs.refused) as f64 / calls.max(1) as f64,
                None => refused(truth, scenario.after_s, f64::INFINITY),
            },
            refused_at_first: refused(truth, 0.0, scenario.after_s),
            // By our account, and by the provider's: an empty answer is none.
            lost: requests - copies.iter().map(|copy| copy.ok).sum::<u64>().min(answered),
            twice: truth.answered_more,
            wasted,
            faults: wasted + overloaded + refused_keys + truth.throttled_429(),
            expected: truth.orgs.iter().map(|org| org.calls as f64 * fault_rate(config, &org.name)).sum(),
            ambiguous,
            refused_keys,
            live: copies.iter().map(|copy| copy.peak_live).max().unwrap_or(0),
            memory: None,
            rate: None,
            black_hole: scenario.bars.black_hole.as_ref().map(|bar| black_hole(truth, &bar.org)),
            shared: (copies.len() > 1).then(|| {
                // In whole bins, as far as all work.
                let ends = copies.iter().map(|copy| copy.begin_s + copy.wall_s - begin);
                let bin = copy::BIN.as_secs_f64();
                let bins = (ends.fold(f64::INFINITY, f64::min) / bin) as usize;
                let done = |copy: &CopyReport| {
                    let late = ((copy.begin_s - begin) / bin).round() as usize;
                    copy.answered.iter().take(bins.saturating_sub(late)).sum::<u64>()
                };
                let each: Vec<u64> = copies.iter().map(done).collect();
                let all: u64 = each.iter().sum();
                let limit = fluid_of(all).unwrap_or_default().as_secs_f64();
                let shares = each.iter().map(|one| *one as f64 / all.max(1) as f64).collect();
                (limit / (bins as f64 * bin), shares)
            }),
            colleague,
            requests,
            calls,
            peak_kib: copies.first().map_or(0, |copy| copy.peak_kib),
            cpu_us: None,
            orgs: truth.orgs.iter().map(|org| (org.name.clone(), org.ok, org.throttled_429)).collect(),
        }
    }

    /// How far the smallest share is below the largest, as a part of it.
    pub(crate) fn unequal(&self) -> Option<f64> {
        let (_, shares) = self.shared.as_ref()?;
        let largest = shares.iter().copied().fold(0.0, f64::max);
        Some(1.0 - shares.iter().copied().fold(largest, f64::min) / largest)
    }

    pub(crate) fn colleague_refused(&self) -> Option<f64> {
        self.colleague.map(|colleague| colleague.refused as f64 / colleague.calls.max(1) as f64)
    }

    /// Calls, as times of the items and the faults that were to be expected.
    pub(crate) fn wire(&self) -> f64 {
        self.calls as f64 / (self.requests as f64 + self.expected).max(1.0)
    }

    /// What no table of all scenarios has a column for.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = vec![];
        if let Some((together, shares)) = &self.shared {
            let shares: Vec<_> = shares.iter().map(|share| format!("{:.1}", share * 100.0)).collect();
            notes.push(format!("together {:.2} % of the quota, shares {}", together * 100.0, shares.join(" : ")));
        }
        if self.wasted + self.refused_keys > 0 {
            notes.push(format!(
                "{} faults ({:.0} expected), {} of them wasted quota, {} left open whether there was an answer; {} keys refused; {:.3} calls for each of an item or an expected fault",
                self.faults, self.expected, self.wasted, self.ambiguous, self.refused_keys, self.wire()
            ));
        }
        if let (Some(colleague), Some(refused)) = (self.colleague, self.colleague_refused()) {
            notes.push(format!("the colleague: {} calls, {:.3} % refused", colleague.calls, refused * 100.0));
        }
        notes
    }

    /// Each org's good answers and refusals.
    pub(crate) fn by_org(&self) -> String {
        let each = self.orgs.iter().map(|(name, ok, refused)| format!("{name} {ok}!{refused}"));
        each.collect::<Vec<_>>().join(" ")
    }
}

/// What of the bars was missed by these runs, by their medians.
pub(crate) fn missed(scenario: &Scenario, runs: &[Measured]) -> Vec<String> {
    let bars = &scenario.bars;
    let mut missed = vec![];
    // What must never happen is asked of every run, not of the median.
    for (what, count) in [
        ("lost", runs.iter().map(|run| run.lost).sum::<u64>()),
        (
            "answered twice",
            runs.iter().map(|run| run.twice.saturating_sub(bars.wire.map_or(0, |_| run.ambiguous))).sum(),
        ),
    ] {
        if count > 0 {
            missed.push(format!("{count} {what}"));
        }
    }
    let live = runs.iter().map(|run| run.live).max().unwrap_or(0);
    let hole = runs.iter().filter_map(|run| run.black_hole).fold((0, 0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
    let of = |figure: &dyn Fn(&Measured) -> Option<f64>| median(runs.iter().filter_map(figure));
    for (what, is, bar) in [
        ("ratio", of(&|run| run.ratio), bars.ratio),
        ("refused", of(&|run| Some(run.refused)), bars.refused),
        ("the colleague's refused", of(&|run| run.colleague_refused()), bars.colleague_refused),
        ("shares' difference", of(&|run| run.unequal()), bars.unequal),
        ("calls", of(&|run| Some(run.wire())), bars.wire),
        ("refused keys", of(&|run| Some(run.refused_keys as f64)), bars.refused_keys.map(|keys| keys as f64)),
        ("live", Some(live as f64), bars.live.map(|live| live as f64)),
        ("memory", of(&|run| run.memory), bars.memory),
        ("black hole's first second", Some(hole.0 as f64), bars.black_hole.as_ref().map(|b| b.first_second as f64)),
        ("black hole's later seconds", Some(hole.1 as f64), bars.black_hole.as_ref().map(|b| b.each_second as f64)),
    ] {
        match (is, bar) {
            (Some(is), Some(bar)) if is > bar => missed.push(format!("{what} {is:.4} > {bar}")),
            (None, Some(bar)) => missed.push(format!("{what} was not measured, and has the bar {bar}")),
            _ => {}
        }
    }
    for (what, is, bar) in [
        ("together", of(&|run| run.shared.as_ref().map(|shared| shared.0)), bars.together),
        ("rate", of(&|run| run.rate), bars.rate),
    ] {
        match (is, bar) {
            (Some(is), Some(bar)) if is < bar => missed.push(format!("{what} {is:.4} < {bar}")),
            (None, Some(bar)) => missed.push(format!("{what} was not measured, and has the bar {bar}")),
            _ => {}
        }
    }
    missed
}

fn errors(org: &OrgTruth, status: u16) -> u64 {
    org.errors.get(&status).copied().unwrap_or(0)
}

/// The part of an org's calls that its scenario lets fail, as it begins.
fn fault_rate(config: &Config, org: &str) -> f64 {
    let Some(org) = config.orgs.iter().find(|each| each.name == org) else { return 0.0 };
    let chances =
        [org.unauthorised, org.overloaded, org.error_5xx, org.reset, org.hang, org.truncate, org.empty, org.in_band];
    chances.iter().map(|chance| chance.0).sum::<f64>().min(1.0)
}

pub(crate) fn median<T: PartialOrd + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    values.get(values.len() / 2).copied()
}

/// The part of calls answered between these seconds that were refused.
fn refused(truth: &Truth, from: f64, to: f64) -> f64 {
    let bin = |seconds: f64| (seconds / BIN.as_secs_f64()) as usize;
    let bins = truth.orgs.iter().flat_map(|org| org.timeline.iter().take(bin(to)).skip(bin(from)));
    let (ok, refused) = bins.fold((0, 0), |sum, bin| (sum.0 + bin.ok, sum.1 + bin.throttled_429));
    refused as f64 / (ok + refused).max(1) as f64
}

/// Calls to a black hole in its first second, and the most in any second after.
fn black_hole(truth: &Truth, org: &str) -> (u64, u64) {
    let Some(org) = truth.org(org) else { return (u64::MAX, u64::MAX) };
    let first = org.first_call.unwrap_or_default();
    let mut seconds = std::collections::BTreeMap::new();
    for arrival in &org.arrivals {
        *seconds.entry(arrival.saturating_sub(first).as_secs()).or_insert(0) += 1;
    }
    let first_second = seconds.remove(&0).unwrap_or(0);
    (first_second, seconds.into_values().max().unwrap_or(0))
}
