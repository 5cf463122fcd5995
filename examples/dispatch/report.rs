//! The final report: as text for people, as JSON for programs.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use serde::Serialize;
use tower_quota::{
    batch::Shutdown,
    org::{Org, Orgs, ResourceQuota, Snapshot},
};

use crate::{
    batches::{self, BatchReport, Batches},
    ending::Ending,
    output::Verdict,
    prices::{Prices, Tokens},
    resume::Restored,
    tally::{Histogram, Seen, Spent, Tally},
    words,
};

/// How many different errors are told apart; further ones are counted together.
const ERRORS: usize = 100;
/// How many of them are shown.
const SHOWN: usize = 5;

/// Counts what became of the ids. All of it is bounded, whatever the number of ids.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) outcomes: BTreeMap<&'static str, u64>,
    /// Answers that the journal had.
    from_journal: u64,
    ok_by_org: HashMap<Arc<str>, u64>,
    /// By the text with all numbers taken out: how often, and an example.
    errors: HashMap<String, ErrorCount>,
    other_errors: u64,
    /// How long ids that were sent have waited for it, all their attempts together.
    waiting: Histogram,
}

/// One kind of error.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ErrorCount {
    outcome: &'static str,
    error: String,
    count: u64,
    /// The id that met it first.
    example: String,
}

impl Counts {
    pub(crate) fn add(&mut self, custom_id: &str, verdict: &Verdict, seen: &Seen) {
        *self.outcomes.entry(verdict.outcome).or_default() += 1;
        self.from_journal += u64::from(verdict.restored);
        if seen.calls > 0 {
            self.waiting.add(seen.waited);
        }
        if verdict.outcome == "ok" {
            if let Some(org) = &seen.org {
                *self.ok_by_org.entry(org.clone()).or_default() += 1;
            }
        }
        let Some(error) = &verdict.error else { return };
        let error: String = error.chars().take(160).collect();
        // Request ids and times differ from error to error.
        let kind = format!("{} {}", verdict.outcome, error.replace(|c: char| c.is_ascii_digit(), ""));
        if let Some(known) = self.errors.get_mut(&kind) {
            known.count += 1;
        } else if self.errors.len() < ERRORS {
            let example = custom_id.chars().take(160).collect();
            self.errors.insert(kind, ErrorCount { outcome: verdict.outcome, error, count: 1, example });
        } else {
            self.other_errors += 1;
        }
    }

    pub(crate) fn all(&self) -> u64 {
        self.outcomes.values().sum()
    }

    pub(crate) fn ok_by(&self, org: &str) -> u64 {
        self.ok_by_org.get(org).copied().unwrap_or(0)
    }

    fn top_errors(&self) -> Vec<ErrorCount> {
        let mut errors: Vec<_> = self.errors.values().cloned().collect();
        errors.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.error.cmp(&b.error)));
        errors.truncate(SHOWN);
        errors
    }
}

/// How long a call took, in milliseconds, until the end of its answer.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Latency {
    p50: Option<f64>,
    p95: Option<f64>,
    p99: Option<f64>,
}

impl From<&Histogram> for Latency {
    fn from(histogram: &Histogram) -> Self {
        let at = |share| histogram.quantile(share).map(|took| round(took.as_secs_f64() * 1e3, 2));
        Latency { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
    }
}

/// One org's part.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct OrgReport {
    name: String,
    /// Ids answered `ok` by it.
    ok: u64,
    wire_calls: u64,
    http_429: u64,
    /// Calls by status.
    statuses: BTreeMap<u16, u64>,
    /// Calls without an answer.
    unanswered: u64,
    /// Concurrent calls allowed at the end, over all its model families.
    limit: f64,
    cap: usize,
    peak_in_flight: usize,
    /// How long it was held, to a quarter of a second.
    held_s: f64,
    latency_ms: Latency,
    /// What its calls used, the failed ones that say so included.
    tokens: Tokens,
    /// In dollars, of the models that have a price; `null` where none that was used has.
    cost_usd: Option<f64>,
    /// Why it is out, if it is: as a whole, or for some model family or model.
    out: Option<String>,
    /// Which org serves in its place, if it is a spare: two keys of one organisation are one quota.
    spare_of: Option<String>,
    families: BTreeMap<String, FamilyReport>,
}

/// One model family of an org.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FamilyReport {
    limit: f64,
    cap: usize,
    headroom: f64,
    /// The resource of which the least is left.
    binds: Option<&'static str>,
    /// Each resource that answers told of.
    quota: Vec<QuotaReport>,
    out: Option<String>,
}

/// One resource of a family's quota, at the end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct QuotaReport {
    resource: &'static str,
    limit_per_minute: f64,
    capacity: f64,
    /// By our own account.
    remaining: f64,
    /// By the provider's last word.
    said: Option<f64>,
    /// Remaining over capacity, `0.0..=1.0`.
    left: f64,
    /// What comes back, as observed.
    refill_per_minute: f64,
    reserved: f64,
    /// Whether somebody else spends too.
    shared: bool,
    estimate_to_actual: Option<f64>,
}

impl QuotaReport {
    fn new(quota: &ResourceQuota) -> Self {
        QuotaReport {
            resource: words::resource(quota.resource),
            limit_per_minute: round(quota.per_minute, 2),
            capacity: round(quota.capacity, 2),
            remaining: round(quota.remaining, 2),
            said: quota.said.map(|(figure, _)| round(figure, 2)),
            left: round(quota.headroom(), 4),
            refill_per_minute: round(quota.refill_per_minute, 2),
            reserved: round(quota.reserved, 2),
            shared: quota.shared,
            estimate_to_actual: quota.estimate_to_actual.map(|ratio| round(ratio, 3)),
        }
    }
}

impl FamilyReport {
    fn new(board: &Snapshot) -> Option<Self> {
        let limit = board.limit?;
        Some(FamilyReport {
            limit: round(limit.limit, 2),
            cap: limit.cap,
            headroom: round(board.headroom, 3),
            binds: board.binds().map(|quota| words::resource(quota.resource)),
            quota: board.quota.iter().map(QuotaReport::new).collect(),
            out: board.out.as_ref().map(ToString::to_string).or_else(|| words::refused(&board.refused_models)),
        })
    }

    /// Which quota binds first, and how good the estimates are; empty where no quota is told.
    fn text(&self) -> String {
        let Some(binds) = self.quota.iter().find(|quota| Some(quota.resource) == self.binds) else {
            return String::new();
        };
        let word = |quota: &QuotaReport| quota.resource.replace('_', " ");
        let mut text = format!("{} bind first: {:.0} % of {:.0} left", word(binds), binds.left * 100.0, binds.capacity);
        let ratios: Vec<_> = self
            .quota
            .iter()
            // A request is one request.
            .filter(|quota| quota.resource != "requests")
            .filter_map(|quota| Some(format!("{} {:.2}", word(quota), quota.estimate_to_actual?)))
            .collect();
        if !ratios.is_empty() {
            let _ = write!(text, "; estimate/actual: {}", ratios.join(", "));
        }
        text
    }
}

/// The whole report. The field names are kept stable.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Ids of the input: all of a file, or as many as were read of a stream.
    expected: u64,
    /// Lines of the input that were skipped, since nothing could be sent of them. They are no ids.
    bad_input: u64,
    ok: u64,
    /// Those that an earlier run has settled: they are counted as what they are too.
    restored: u64,
    /// Those that the journal has answered, so that nothing was sent.
    from_journal: u64,
    /// Ids refused for good.
    terminal: u64,
    /// Ids that may be sent again with hope.
    redrivable: u64,
    rate_limited: u64,
    /// Every other id that has a line.
    failed: u64,
    /// Ids without a line: expected less the lines there are.
    missing: u64,
    /// Lines beyond one for each id.
    duplicates: u64,
    /// Lines by outcome, those of an earlier run included.
    outcomes: BTreeMap<&'static str, u64>,
    wire_calls: u64,
    http_429: u64,
    /// Calls beyond the first of an id.
    retries: u64,
    /// Calls per id that was sent at all.
    amplification: f64,
    wall_s: f64,
    /// Ids answered a second, in this run.
    rate_per_s: f64,
    /// The most ids that were being worked on at once.
    peak_live: usize,
    peak_in_flight: usize,
    latency_ms: Latency,
    /// How long an id that was sent waited for that, all its attempts together: for a slot, for quota, in holds and pauses.
    waiting_ms: Latency,
    /// How long orgs were held, all together, to a quarter of a second each.
    held_s: f64,
    /// What all calls used, the failed ones that say so included.
    tokens: Tokens,
    /// Successes that do not say what they used, such as those that broke off.
    without_usage: u64,
    /// In dollars, of the models that have a price; `null` where none that was used has.
    cost_usd: Option<f64>,
    /// Models that were used and have no price.
    unpriced_models: Vec<String>,
    /// Which prices these are.
    prices: String,
    /// The least time in which the simulated provider could have taken as many requests.
    fluid_limit_s: Option<f64>,
    /// The time taken, over that.
    times_fluid_limit: Option<f64>,
    /// `ctrl-c`, `deadline`, `input` or `output`, where the run was ended early.
    ended_by: Option<&'static str>,
    pub(crate) exit_code: u8,
    orgs: Vec<OrgReport>,
    /// Of a run in batches. All tokens and costs but those of orgs are those of both paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    batches: Option<BatchReport>,
    /// The most frequent errors.
    errors: Vec<ErrorCount>,
    /// Errors that were not told apart, since there were too many kinds.
    other_errors: u64,
}

/// What a report is made from.
pub(crate) struct Facts<'a> {
    pub(crate) expected: u64,
    pub(crate) bad_input: u64,
    pub(crate) prices: &'a Prices,
    /// Lines written, by outcome.
    pub(crate) outcomes: &'a BTreeMap<&'static str, u64>,
    pub(crate) restored: &'a Restored,
    pub(crate) counts: &'a Counts,
    pub(crate) wall: Duration,
    pub(crate) peak_live: usize,
    pub(crate) fluid_limit: Option<Duration>,
    pub(crate) ended_by: Option<&'static str>,
    pub(crate) exit_code: u8,
    pub(crate) orgs: &'a Orgs,
    /// All families of all orgs, when the last call had ended.
    pub(crate) boards: &'a [Snapshot],
    pub(crate) all: &'a Tally,
    pub(crate) tallies: &'a HashMap<Arc<str>, Arc<Tally>>,
    pub(crate) held: &'a HashMap<Arc<str>, Duration>,
    pub(crate) batches: Option<&'a Batches>,
    /// How the batches were left, where the run was ended early.
    pub(crate) shutdown: Option<&'a Shutdown>,
}

impl Report {
    pub(crate) fn new(facts: &Facts<'_>) -> Self {
        let counts = facts.counts;
        let answered = facts.outcomes.get("ok").copied().unwrap_or(0);
        let mut outcomes = facts.outcomes.clone();
        for (outcome, count) in [("ok", &facts.restored.ok), ("terminal", &facts.restored.terminal)] {
            let count = count.load(Relaxed);
            if count > 0 {
                *outcomes.entry(outcome).or_default() += count;
            }
        }
        let of = |outcome| outcomes.get(outcome).copied().unwrap_or(0);
        let (ok, rate_limited, lines) = (of("ok"), of("rate_limited"), outcomes.values().sum::<u64>());
        let ended = |ending| {
            let of_it = outcomes.iter().filter(|(outcome, _)| Ending::of(outcome) == ending);
            of_it.map(|(_, count)| count).sum()
        };
        let sent = facts.all.firsts.load(Relaxed);
        let wire_calls = facts.all.calls.load(Relaxed);
        let wall_s = facts.wall.as_secs_f64();
        let Spent { tokens, cost, unpriced } =
            batches::spent(facts.all, facts.batches.map(|batches| &*batches.tally), facts.prices);
        let unsaid = |tally: &Tally| tally.unsaid.load(Relaxed);
        let fluid = facts.fluid_limit.map(|limit| limit.as_secs_f64());
        Report {
            expected: facts.expected,
            bad_input: facts.bad_input,
            ok,
            restored: facts.restored.all(),
            from_journal: facts.counts.from_journal,
            terminal: ended(Ending::Terminal),
            redrivable: ended(Ending::Redrivable),
            rate_limited,
            failed: lines - ok - rate_limited,
            missing: facts.expected.saturating_sub(lines),
            duplicates: lines.saturating_sub(facts.expected),
            outcomes,
            wire_calls,
            http_429: facts.all.http_429.load(Relaxed),
            retries: wire_calls - sent,
            amplification: round(wire_calls as f64 / sent.max(1) as f64, 4),
            wall_s: round(wall_s, 3),
            rate_per_s: if wall_s > 0.0 { round(answered as f64 / wall_s, 2) } else { 0.0 },
            peak_live: facts.peak_live,
            peak_in_flight: facts.all.peak_in_flight.load(Relaxed),
            latency_ms: Latency::from(&facts.all.latency),
            waiting_ms: Latency::from(&counts.waiting),
            held_s: round(facts.held.values().sum::<Duration>().as_secs_f64(), 2),
            tokens,
            without_usage: unsaid(facts.all) + facts.batches.map_or(0, |batches| unsaid(&batches.tally)),
            cost_usd: cost.map(|cost| round(cost, 6)),
            unpriced_models: unpriced.iter().map(ToString::to_string).collect(),
            prices: facts.prices.what.clone(),
            fluid_limit_s: fluid.map(|limit| round(limit, 3)),
            times_fluid_limit: fluid.filter(|limit| *limit > 0.0).map(|limit| round(wall_s / limit, 4)),
            ended_by: facts.ended_by,
            exit_code: facts.exit_code,
            orgs: facts.orgs.iter().map(|org| OrgReport::new(org, facts)).collect(),
            batches: facts.batches.map(|batches| BatchReport::new(batches, facts.shutdown, facts.all, facts.prices)),
            errors: counts.top_errors(),
            other_errors: counts.other_errors,
        }
    }

    /// Whether the output could not be written to its end.
    pub(crate) fn output_failed(&self) -> bool {
        self.ended_by == Some("output")
    }

    /// Of an input in which nothing could be sent.
    pub(crate) fn of_nothing(bad_input: u64, exit_code: u8) -> Self {
        Report { bad_input, exit_code, ..Report::default() }
    }

    /// The whole report, for people.
    pub(crate) fn text(&self) -> String {
        let mut text = self.line();
        // Writing to a string does not fail.
        let _ = self.write_details(&mut text);
        text
    }

    /// The report in one line.
    pub(crate) fn line(&self) -> String {
        let mut line = format!("{} of {} ok", self.ok, self.expected);
        if self.redrivable > 0 {
            let _ = write!(line, ", {} re-drivable", self.redrivable);
        }
        for (outcome, count) in self.outcomes.iter().filter(|(outcome, _)| **outcome != "ok") {
            let _ = write!(line, ", {count} {outcome}");
        }
        if self.restored > 0 {
            let _ = write!(line, ", {} from before", self.restored);
        }
        if self.from_journal > 0 {
            let _ = write!(line, ", {} from the journal", self.from_journal);
        }
        let _ = write!(line, ", {} missing", self.missing);
        if self.bad_input > 0 {
            let _ = write!(line, ", {} skipped", words::count(self.bad_input, "bad line"));
        }
        let _ = write!(line, ", in {:.2} s", self.wall_s);
        if let Some(by) = self.ended_by {
            let _ = write!(line, " (ended by {by})");
        }
        line
    }

    fn write_details(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text)?;
        if let (Some(limit), Some(times)) = (self.fluid_limit_s, self.times_fluid_limit) {
            writeln!(
                text,
                "  time     {:.2} s taken; the fluid limit is {limit:.2} s ({times:.3} times)",
                self.wall_s
            )?;
        }
        writeln!(text, "  rate     {:.1} ids/s, {:.0} a minute", self.rate_per_s, self.rate_per_s * 60.0)?;
        writeln!(
            text,
            "  wire     {} calls, {:.3} per id sent; {} were 429",
            self.wire_calls, self.amplification, self.http_429
        )?;
        if let Some(batches) = &self.batches {
            writeln!(text, "  batches  {}", batches.text())?;
        }
        writeln!(text, "  latency  {}", self.latency_ms.text())?;
        writeln!(text, "  waiting  {}; orgs were held for {:.1} s in all", self.waiting_ms.text(), self.held_s)?;
        if self.terminal + self.redrivable > 0 {
            writeln!(text, "  failed   {} for good, {} may be sent again", self.terminal, self.redrivable)?;
        }
        writeln!(text, "  tokens   {}", self.tokens_text())?;
        writeln!(text, "  cost     {}", self.cost_text())?;
        writeln!(text, "  peak     {} ids alive, {} calls in flight", self.peak_live, self.peak_in_flight)?;
        writeln!(
            text,
            "  {:<16} {:>9} {:>9} {:>6} {:>7} {:>9} {:>7} {:>9}  latency",
            "org", "ok", "calls", "429", "failed", "limit/cap", "held", "cost"
        )?;
        for org in &self.orgs {
            let failed = org.unanswered
                + org
                    .statuses
                    .iter()
                    .filter(|(status, _)| **status >= 400 && **status != 429)
                    .map(|(_, n)| n)
                    .sum::<u64>();
            let limit = format!("{:.0}/{}", org.limit, org.cap);
            writeln!(
                text,
                "  {:<16} {:>9} {:>9} {:>6} {failed:>7} {limit:>9} {:>6.1}s {:>9}  {}",
                org.name,
                org.ok,
                org.wire_calls,
                org.http_429,
                org.held_s,
                org.cost_usd.map_or("-".to_owned(), words::money),
                org.latency_ms.text()
            )?;
            if let Some(why) = &org.out {
                writeln!(text, "  {:<16} out: {why}", "")?;
            }
            if let Some(first) = &org.spare_of {
                writeln!(text, "  {:<16} spare of {first}: the same organisation, so one quota", "")?;
            }
            for (name, family) in &org.families {
                let quota = family.text();
                if !quota.is_empty() {
                    writeln!(text, "  {:<16} {name}: {quota}", "")?;
                }
            }
        }
        for error in &self.errors {
            writeln!(text, "  {} x {}: {} (first: {})", error.count, error.outcome, error.error, error.example)?;
        }
        Ok(())
    }
}

impl Report {
    fn tokens_text(&self) -> String {
        let mut text = format!("{} in", self.tokens.all_input());
        for (count, what) in [(self.tokens.cached, "from a cache"), (self.tokens.cache_written, "into a cache")] {
            if count > 0 {
                let _ = write!(text, ", {count} of them {what}");
            }
        }
        let _ = write!(text, "; {} out", self.tokens.output);
        if self.without_usage > 0 {
            let _ = write!(text, "; {} did not say", words::count(self.without_usage, "answer"));
        }
        text
    }

    fn cost_text(&self) -> String {
        let mut text = match self.cost_usd {
            Some(cost) => format!("{} ({})", words::money(cost), self.prices),
            None if self.unpriced_models.is_empty() => return words::money(0.0),
            None => format!("unknown ({})", self.prices),
        };
        if !self.unpriced_models.is_empty() {
            let names: Vec<_> = self.unpriced_models.iter().map(|model| name_of(model)).collect();
            let _ = write!(text, "; without a price, and not counted: {}", names.join(", "));
        }
        text
    }
}

fn name_of(model: &str) -> String {
    match model {
        "" => "requests that name no model".to_owned(),
        // A terminal may do what such a character says.
        _ => model.replace(char::is_control, "\u{fffd}"),
    }
}

impl Latency {
    fn text(&self) -> String {
        match (self.p50, self.p95, self.p99) {
            (Some(p50), Some(p95), Some(p99)) => format!("p50 {p50:.0} ms, p95 {p95:.0} ms, p99 {p99:.0} ms"),
            _ => "-".to_owned(),
        }
    }
}

impl OrgReport {
    fn new(org: &Org, facts: &Facts<'_>) -> Self {
        let name = org.name();
        let nothing = Arc::new(Tally::default());
        let tally = facts.tallies.get(name).unwrap_or(&nothing);
        let boards = facts.boards.iter().filter(|board| *board.name == *name);
        let spent = tally.spent(facts.prices);
        let families: BTreeMap<_, _> =
            boards.filter_map(|board| Some((board.family.to_string(), FamilyReport::new(board)?))).collect();
        OrgReport {
            name: name.to_owned(),
            ok: facts.counts.ok_by(name),
            wire_calls: tally.calls.load(Relaxed),
            http_429: tally.http_429.load(Relaxed),
            statuses: tally.statuses(),
            unanswered: tally.unanswered.load(Relaxed),
            limit: round(families.values().map(|family| family.limit).sum(), 2),
            cap: families.values().map(|family| family.cap).sum(),
            peak_in_flight: tally.peak_in_flight.load(Relaxed),
            held_s: round(facts.held.get(name).copied().unwrap_or_default().as_secs_f64(), 2),
            latency_ms: Latency::from(&tally.latency),
            tokens: spent.tokens,
            cost_usd: spent.cost.map(|cost| round(cost, 6)),
            out: org
                .families()
                .iter()
                .find_map(Org::out_reason)
                .map(|out| out.to_string())
                .or_else(|| words::refused(&org.refused_models())),
            spare_of: org.spare_of().map(|first| first.to_string()),
            families,
        }
    }
}

pub(crate) fn round(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}
