//! Progress, on standard error only: lines redrawn in place on a terminal, else a plain line every two seconds.

use std::{
    collections::{HashMap, VecDeque},
    fmt::Write as _,
    io::{self, IsTerminal, Write},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use tokio::time::Instant;
use tower_quota::org::{Family, Org, Orgs, Snapshot};

use crate::{report::Counts, words};

/// How often the panel is redrawn, and the boards are looked at.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How often a plain line is written.
const PLAIN: Duration = Duration::from_secs(2);
/// What "now" means in the rate.
const WINDOW: Duration = Duration::from_secs(5);

/// Where the run stands.
#[derive(Debug)]
pub(crate) struct Standing<'a> {
    /// How many ids there are, where that is known.
    pub(crate) total: Option<u64>,
    /// How many an earlier run has settled.
    pub(crate) restored: u64,
    pub(crate) counts: &'a Counts,
    pub(crate) live: usize,
    pub(crate) http_429: u64,
    pub(crate) orgs: &'a Orgs,
    pub(crate) stopping: Option<&'a str>,
}

enum Face {
    Quiet,
    Plain { next: Instant },
    Drawn { bars: MultiProgress, head: ProgressBar, rows: HashMap<(Arc<str>, Family), ProgressBar> },
}

/// Shows progress, and keeps what only watching can tell: the rate, and how long orgs were held.
pub(crate) struct Panel {
    face: Face,
    started: Instant,
    ticked: Instant,
    /// When so many ids were done.
    done: VecDeque<(Instant, u64)>,
    held: HashMap<Arc<str>, Duration>,
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
            *TERMINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(bars.clone());
            Face::Drawn { bars, head, rows: HashMap::new() }
        } else {
            Face::Plain { next: now + PLAIN }
        };
        Panel { face, started: now, ticked: now, done: VecDeque::new(), held: HashMap::new() }
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
        for board in boards.iter().filter(|board| board.hold.is_some()) {
            *self.held.entry(board.name.clone()).or_default() += since;
        }
        self.done.push_back((now, standing.counts.all()));
        while self.done.len() > 2 && now - self.done[0].0 > WINDOW {
            self.done.pop_front();
        }
        let summary = self.summary(now, standing);
        match &mut self.face {
            Face::Quiet => {}
            Face::Plain { next } => {
                if now < *next {
                    return;
                }
                *next = now + PLAIN;
                let mut text = summary;
                for board in &boards {
                    let _ = write!(text, " | {}", row(board, now));
                }
                say(&text);
            }
            Face::Drawn { bars, head, rows } => {
                if let Some(total) = standing.total {
                    head.set_style(style("{bar:30} {msg}"));
                    head.set_length(total);
                    head.set_position(standing.restored + standing.counts.all());
                } else {
                    head.set_style(style("{msg}"));
                }
                head.set_message(summary);
                for board in &boards {
                    let bar = rows.entry((board.name.clone(), board.family.clone())).or_insert_with(|| {
                        let bar = bars.add(ProgressBar::no_length());
                        bar.set_style(style("  {msg}"));
                        bar
                    });
                    bar.set_message(row(board, now));
                }
            }
        }
    }

    fn summary(&self, now: Instant, standing: &Standing<'_>) -> String {
        let done = standing.counts.all();
        let elapsed = now - self.started;
        let rate = match (self.done.front(), self.done.back()) {
            (Some((from, before)), Some((to, after))) if to > from => {
                (after - before) as f64 / (*to - *from).as_secs_f64()
            }
            _ => 0.0,
        };
        let mut text = format!("{:.0} s: {}", elapsed.as_secs_f64(), standing.restored + done);
        if let Some(total) = standing.total {
            let _ = write!(text, "/{total}");
        }
        if standing.restored > 0 {
            let _ = write!(text, ", {} from before", standing.restored);
        }
        for (outcome, count) in &standing.counts.outcomes {
            let _ = write!(text, ", {count} {outcome}");
        }
        let _ = write!(text, "; {} alive, {rate:.0}/s, {} x 429", standing.live, standing.http_429);
        // As fast as now; in a hold, when nothing comes, as on average.
        let pace = if rate > 0.0 { rate } else { done as f64 / elapsed.as_secs_f64().max(0.001) };
        if let Some(total) = standing.total.filter(|_| pace > 0.0) {
            let left = Duration::from_secs_f64((total.saturating_sub(standing.restored + done) as f64 / pace).ceil());
            let _ = write!(text, ", ETA {}", humantime::format_duration(left));
        }
        if let Some(why) = standing.stopping {
            let _ = write!(text, " [{why}]");
        }
        text
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

/// One board: limit/cap, in flight, which quota binds first, and why it is held, a spare or out.
fn row(board: &Snapshot, now: Instant) -> String {
    let mut text = board.name.to_string();
    if board.family != Family::default() {
        let _ = write!(text, " {}", board.family);
    }
    if let Some(why) = &board.out {
        let _ = write!(text, " OUT: {why}");
        return text;
    }
    if let Some(first) = &board.spare_of {
        let _ = write!(text, " spare of {first}, {} in flight", board.in_flight);
        return text;
    }
    if let Some(limit) = board.limit {
        let _ = write!(text, " {:.0}/{}", limit.limit, limit.cap);
    }
    let _ = write!(text, ", {} in flight", board.in_flight);
    let _ = match board.binds() {
        Some(quota) => {
            let resource = words::resource(quota.resource).replace('_', " ");
            write!(text, ", {resource} {:.0} % left", quota.headroom() * 100.0)
        }
        None => write!(text, ", headroom {:.0} %", board.headroom * 100.0),
    };
    if let Some(hold) = board.hold {
        let _ = write!(text, ", held {:.1} s more ({})", (hold.until - now).as_secs_f64(), hold.reason);
    }
    text
}
