//! Progress, on standard error only: lines redrawn in place on a terminal, else a plain line now and then.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::Instant;
use tower_quota::org::{Circuit, Family, Hold, HoldReason, Org, Orgs, Snapshot};

use crate::{
    batches::{self, Batches},
    pace::{Counted, Ids, Pace, Rates, roughly},
    prices::Prices,
    report::Counts,
    tally::{Spent, Tally},
    words::{self, about, money},
};

/// How often the panel is redrawn, and the boards are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How often a plain line is written in the first minute,
const PLAIN: Duration = Duration::from_secs(2);
/// and after it.
const PLAIN_LATER: Duration = Duration::from_secs(30);
/// A hold that goes on for longer is worth a warning.
const LONG_HOLD: Duration = Duration::from_secs(60);
/// A bucket of which the provider said that no more was left than this is what a refusal was for.
const EMPTY: f64 = 0.1;

/// Where the run stands.
pub(crate) struct Standing<'a> {
    /// How many ids there are, where that is known.
    pub(crate) total: Option<u64>,
    /// How many an earlier run has settled.
    pub(crate) restored: u64,
    pub(crate) counts: &'a Counts,
    pub(crate) live: usize,
    pub(crate) all: &'a Tally,
    /// Each org's own count, by its name.
    pub(crate) tallies: &'a HashMap<Arc<str>, Arc<Tally>>,
    pub(crate) prices: &'a Prices,
    pub(crate) orgs: &'a Orgs,
    pub(crate) stopping: Option<&'a str>,
    pub(crate) batches: Option<&'a Batches>,
}

enum Face {
    Quiet,
    Plain {
        next: Instant,
    },
    Drawn {
        bars: MultiProgress,
        head: ProgressBar,
        rates: ProgressBar,
        batches: Option<ProgressBar>,
        rows: HashMap<(Arc<str>, Family), ProgressBar>,
    },
}

/// Shows progress, and keeps what only watching can tell: the rates, and how long orgs were held.
pub(crate) struct Panel {
    face: Face,
    started: Instant,
    ticked: Instant,
    pace: Pace,
    /// Each org's own.
    paces: HashMap<Arc<str>, Pace>,
    held: HashMap<Arc<str>, Duration>,
    /// Boards of whose long hold has been told.
    told: HashSet<(Arc<str>, Family)>,
}

/// Says something on standard error. That nobody listens there is no reason to stop.
pub(crate) fn say(text: &str) {
    let bars = TERMINAL.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let write = || {
        let _ = writeln!(io::stderr(), "{text}");
    };
    match bars {
        Some(bars) => bars.suspend(write),
        None => write(),
    }
}

/// The terminal's lines while they are drawn: whoever else writes there must have them put aside.
static TERMINAL: Mutex<Option<MultiProgress>> = Mutex::new(None);

/// Standard error as a sink for the log.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        say(String::from_utf8_lossy(text).trim_end());
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Panel {
    pub(crate) fn new(quiet: bool) -> Self {
        let now = Instant::now();
        let face = if quiet {
            Face::Quiet
        } else if io::stderr().is_terminal() {
            let bars = MultiProgress::new();
            let head = bars.add(ProgressBar::no_length());
            let rates = bars.add(ProgressBar::no_length());
            rates.set_style(style("  {wide_msg}"));
            *TERMINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(bars.clone());
            Face::Drawn { bars, head, rates, batches: None, rows: HashMap::new() }
        } else {
            Face::Plain { next: now + PLAIN }
        };
        let (pace, paces) = (Pace::new(now), HashMap::new());
        Panel { face, started: now, ticked: now, pace, paces, held: HashMap::new(), told: HashSet::new() }
    }

    /// How long each org was held, as far as the ticks have seen.
    pub(crate) fn held(&self) -> &HashMap<Arc<str>, Duration> {
        &self.held
    }

    /// Looks at the boards and shows what they say; to be called every [`TICK`].
    pub(crate) fn tick(&mut self, standing: &Standing<'_>) {
        let now = Instant::now();
        let boards = boards(standing.orgs);
        let since = now - self.ticked;
        self.ticked = now;
        // Once for an org, however many of its families are held.
        let held: HashSet<&Arc<str>> =
            boards.iter().filter(|board| board.hold.is_some()).map(|board| &board.name).collect();
        for org in held {
            *self.held.entry(org.clone()).or_default() += since;
        }
        self.tell_long_holds(&boards, now);
        let batch = standing.batches.map(|batches| &*batches.tally);
        let spent = batches::spent(standing.all, batch, standing.prices);
        self.pace.note(now, Counted { ids: standing.counts.all(), ..counted(standing.all, &spent) });
        for (org, tally) in standing.tallies {
            let pace = self.paces.entry(org.clone()).or_insert_with(|| Pace::new(self.started));
            pace.note(now, counted(tally, &tally.spent(standing.prices)));
        }
        let rows = self.rows(&boards, now);
        let (summary, rates) = (self.summary(now, standing), self.rates(standing, &spent));
        let batches = standing.batches.map(Batches::text);
        match &mut self.face {
            Face::Quiet => {}
            Face::Plain { next } => {
                if now < *next {
                    return;
                }
                *next = now + if now - self.started < Duration::from_secs(60) { PLAIN } else { PLAIN_LATER };
                let mut text = format!("{summary} | {rates}");
                if let Some(batches) = batches {
                    let _ = write!(text, " | {batches}");
                }
                for row in rows {
                    let _ = write!(text, " | {row}");
                }
                say(&text);
            }
            Face::Drawn { bars, head, rates: second, batches: third, rows: drawn } => {
                if let Some(total) = standing.total {
                    head.set_style(style("{bar:24} {wide_msg}"));
                    head.set_length(total);
                    head.set_position(standing.restored + standing.counts.all());
                } else {
                    head.set_style(style("{wide_msg}"));
                }
                head.set_message(summary);
                second.set_message(rates);
                if let Some(batches) = batches {
                    let line = third.get_or_insert_with(|| {
                        let line = bars.insert(2, ProgressBar::no_length());
                        line.set_style(style("  {wide_msg}"));
                        line
                    });
                    line.set_message(batches);
                }
                for (board, row) in boards.iter().zip(rows) {
                    let bar = drawn.entry((board.name.clone(), board.family.clone())).or_insert_with(|| {
                        let bar = bars.add(ProgressBar::no_length());
                        bar.set_style(style("  {wide_msg}"));
                        bar
                    });
                    bar.set_message(row);
                }
            }
        }
    }

    fn summary(&self, now: Instant, standing: &Standing<'_>) -> String {
        let ids = Ids { total: standing.total, restored: standing.restored, here: standing.counts.all() };
        let mut text = format!("{}: {}", roughly(now - self.started), ids.text());
        for (outcome, count) in &standing.counts.outcomes {
            let _ = write!(text, ", {count} {outcome}");
        }
        let _ = write!(text, "; {} alive, {} in flight", standing.live, standing.all.in_flight());
        if let Some(left) = ids.left().and_then(|left| self.pace.left(left)) {
            let _ = write!(text, "; ETA {}", roughly(left));
        }
        if let Some(why) = standing.stopping {
            let _ = write!(text, " [{why}]");
        }
        text
    }

    /// What goes over the wire and what it costs: now, and on average since the run began.
    fn rates(&self, standing: &Standing<'_>, spent: &Spent) -> String {
        let (now, average): (Rates, Rates) = (self.pace.now(), self.pace.average());
        let (calls, firsts) = (standing.all.calls.load(Relaxed), standing.all.firsts.load(Relaxed));
        let (retries, refused) = (calls.saturating_sub(firsts), standing.all.http_429.load(Relaxed));
        let word = if retries == 1 { "retry" } else { "retries" };
        let both = |of: fn(&Rates) -> f64| format!("{} (avg {})", about(of(&now)), about(of(&average)));
        let calls = both(|rates| rates.calls);
        let (input, output) = (both(|rates| rates.input_tokens), both(|rates| rates.output_tokens));
        let cost = cost(standing, spent);
        // What a narrow terminal cuts off comes last.
        format!("calls/min {calls}, {retries} {word}, {refused} x 429, {cost}, tokens/min in {input}, out {output}")
    }

    /// A row for each board; how fast an org goes is in its first.
    fn rows(&self, boards: &[Snapshot], now: Instant) -> Vec<String> {
        let mut seen = HashSet::new();
        let names: Vec<String> = boards.iter().map(name_of).collect();
        let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let rows = boards.iter().zip(&names).map(|(board, name)| {
            let first = seen.insert(board.name.clone());
            format!("{name:<width$} {}", row(board, self.paces.get(&board.name).filter(|_| first), now))
        });
        rows.collect()
    }

    /// A run that stands still is told why, once a hold.
    fn tell_long_holds(&mut self, boards: &[Snapshot], now: Instant) {
        for board in boards {
            let key = (board.name.clone(), board.family.clone());
            match board.hold.filter(|hold| hold.until - now > LONG_HOLD) {
                Some(hold) if self.told.insert(key) => tracing::warn!(
                    org = %board.name, family = board.family.as_str(),
                    "org is held for another {}: {}", roughly(hold.until - now), hold.reason
                ),
                Some(_) => {}
                None if board.hold.is_none() => drop(self.told.remove(&(board.name.clone(), board.family.clone()))),
                None => {}
            }
        }
    }

    /// Takes the drawn lines away, to make room for the report.
    pub(crate) fn close(&self) {
        *TERMINAL.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Face::Drawn { bars, .. } = &self.face {
            // A terminal that has gone away needs no clearing.
            let _ = bars.clear();
        }
    }
}

/// The boards that calls have been made by, each of an org and a model family.
pub(crate) fn boards(orgs: &Orgs) -> Vec<Snapshot> {
    let boards = orgs.iter().flat_map(Org::families).map(|org| org.snapshot());
    boards.filter(|board| board.limit.is_some()).collect()
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// The cost so far, and of the whole run if it goes on like this.
fn cost(standing: &Standing<'_>, spent: &Spent) -> String {
    let Some(cost) = spent.cost else {
        return if spent.unpriced.is_empty() { money(0.0) } else { "cost unknown".to_owned() };
    };
    let mut text = money(cost);
    let here = standing.counts.all();
    let left = standing.total.map(|total| total.saturating_sub(standing.restored + here));
    if let Some(left) = left.filter(|left| *left > 0 && here > 0) {
        let _ = write!(text, " of some {}", money(cost * (here + left) as f64 / here as f64));
    }
    if !spent.unpriced.is_empty() {
        text.push_str(" and what has no price");
    }
    text
}

fn counted(tally: &Tally, spent: &Spent) -> Counted {
    Counted {
        ids: 0,
        calls: tally.calls.load(Relaxed),
        input_tokens: spent.tokens.all_input(),
        output_tokens: spent.tokens.output,
    }
}

/// The org, and its model family where there is one.
fn name_of(board: &Snapshot) -> String {
    match board.family == Family::default() {
        true => board.name.to_string(),
        false => format!("{} {}", board.name, board.family),
    }
}

/// One board: limit/cap, why it is held, in flight, how fast, which quota binds first; or that it is a spare or out.
fn row(board: &Snapshot, pace: Option<&Pace>, now: Instant) -> String {
    if let Some(why) = &board.out {
        return format!("OUT: {why}");
    }
    if let Some(first) = &board.spare_of {
        return format!("spare of {first}, {} in flight", board.in_flight);
    }
    let mut text = board.limit.map(|limit| format!("{:.0}/{}", limit.limit, limit.cap)).unwrap_or_default();
    if let Some(hold) = board.hold {
        let _ = write!(text, " {}", held(board, hold, now));
    }
    match board.circuit {
        Circuit::Open { until } => {
            let left = until.saturating_duration_since(now).as_secs_f64().ceil();
            let _ = write!(text, " breaker open {left:.0}s");
        }
        Circuit::HalfOpen => text.push_str(" breaker half-open"),
        _ => {}
    }
    let _ = write!(text, ", {} in flight", board.in_flight);
    if let Some(pace) = pace {
        let _ = write!(text, ", {}/min", about(pace.now().calls));
    }
    if let Some(quota) = board.binds() {
        let _ = write!(text, ", {} {:.0} % left", words::short(quota.resource), quota.headroom() * 100.0);
    }
    if let Some(why) = words::refused(&board.refused_models) {
        let _ = write!(text, ", {why}");
    }
    text
}

/// `hold 14s (429 otpm)`: how much longer, and what for.
fn held(board: &Snapshot, hold: Hold, now: Instant) -> String {
    let seconds = hold.until.saturating_duration_since(now).as_secs_f64().ceil();
    let left = board.quota.iter().filter_map(|quota| Some((quota, quota.said?.0 / quota.capacity)));
    let empty = left.filter(|(_, left)| *left <= EMPTY).min_by(|(_, one), (_, other)| one.total_cmp(other));
    let bucket = empty.map(|(quota, _)| format!(" {}", words::short(quota.resource))).unwrap_or_default();
    let reason = match hold.reason {
        HoldReason::Hint => format!("429{bucket}"),
        HoldReason::Backoff => format!("429{bucket}, no hint"),
        HoldReason::Parked => format!("429{bucket}, parked"),
        HoldReason::OutOfQuota => "quota used up".to_owned(),
        other => other.to_string(),
    };
    format!("hold {seconds:.0}s ({reason})")
}
