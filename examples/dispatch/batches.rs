//! The batch path: how it is set, when what is gathered goes, and what is told of it.

use std::{
    fmt::Write as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use http::Request;
use serde::Serialize;
use tower_quota::{
    batch::{BatchBuilder, BatchHandle, BatchOpenError, BatchService, BatchStage, MemoryBatches, MoreToCome, Shutdown},
    journal::{FileStore, Key, KeyHeaders},
    org::Orgs,
};

use crate::{
    Failure,
    args::{Args, RouteArg},
    pace::roughly,
    prices::{BATCH_SHARE, Prices, Tokens},
    report::round,
    route::{InBatch, Ways},
    tally::{Spent, Tally},
    wire::in_one_line,
    words,
};

/// So many batches are named.
const NAMED: usize = 10;

/// What the command line says of batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) rows: usize,
    pub(crate) in_flight: usize,
    linger: Duration,
    poll: Duration,
    pub(crate) stuck_after: Duration,
    look_again: Option<Duration>,
    cancel_on_exit: bool,
}

impl Setting {
    /// `None` where all goes directly.
    ///
    /// # Errors
    /// If something is said of batches, and there are none; or there is nowhere to keep their records.
    pub(crate) fn of(args: &Args) -> Result<Option<Self>, Failure> {
        if args.objective.is_some() && args.route != Some(RouteArg::Auto) {
            return Err(Failure::new("--objective needs --route auto: nothing else is decided"));
        }
        if !matches!(args.route, Some(RouteArg::Batch | RouteArg::Auto)) {
            let said = [
                ("--batch-rows", args.batch_rows.is_some()),
                ("--batch-in-flight", args.batch_in_flight.is_some()),
                ("--batch-linger", args.batch_linger.is_some()),
                ("--batch-poll", args.batch_poll.is_some()),
                ("--batch-stuck-after", args.batch_stuck_after.is_some()),
                ("--cancel-on-exit", args.cancel_on_exit),
            ];
            return match said.iter().find(|(_, said)| *said) {
                Some((name, _)) => {
                    Err(Failure::new(format!("{name} needs --route batch or auto: nothing else goes in batches")))
                }
                None => Ok(None),
            };
        }
        if args.no_journal {
            return Err(Failure::new(
                "--no-journal and --route batch or auto: what is known of batches is kept in the journal, and a batch that is forgotten is \
                 paid for twice; leave out --no-journal",
            ));
        }
        let is_demo = args.input.is_none();
        if !is_demo && !args.dry_run && crate::kept::path(args).is_none() {
            return Err(Failure::new(
                "--route batch or auto, but the output is no file: what is known of batches is kept in a journal, so name one: --journal FILE",
            ));
        }
        Ok(Some(Setting::new(args)))
    }

    /// As it is said, or else by default.
    pub(crate) fn new(args: &Args) -> Self {
        Setting {
            rows: args.batch_rows.map_or(1_000, |rows| rows.get()),
            in_flight: args.batch_in_flight.map_or(4, |batches| batches.get()),
            linger: args.batch_linger.unwrap_or(Duration::from_secs(2)),
            // The demonstration's batches take seconds.
            poll: args.batch_poll.unwrap_or(Duration::from_secs(if args.input.is_none() { 1 } else { 30 })),
            stuck_after: args.batch_stuck_after.unwrap_or(Duration::from_secs(4 * 3600)),
            look_again: args.batch_look_again,
            cancel_on_exit: args.cancel_on_exit,
        }
    }

    /// The longest pause between two questions about a batch.
    pub(crate) fn longest_poll(&self) -> Duration {
        self.poll.saturating_mul(4)
    }

    /// The service as it is set, still to be opened. Without a journal, as in the demonstration, its records end with the process.
    pub(crate) fn builder(&self, orgs: &Orgs, journal: Option<&FileStore>) -> BatchBuilder {
        let builder = match journal {
            Some(store) => BatchService::builder(orgs.clone(), store.clone()),
            None => BatchService::builder(orgs.clone(), MemoryBatches::new()),
        };
        let builder = builder.chunk_rows(self.rows).in_flight(self.in_flight).linger(self.linger);
        let builder = builder.poll(self.poll, self.longest_poll()).stuck_after(Some(self.stuck_after));
        self.look_again.into_iter().fold(builder, BatchBuilder::look_again).cancel_on_exit(self.cancel_on_exit)
    }
}

/// Why there is no batch path, by the names of the command line.
pub(crate) fn failure(error: &BatchOpenError) -> Failure {
    let BatchOpenError::Config(wrong) = error else { return Failure::new(in_one_line(error)) };
    let flag = match wrong.field() {
        "chunk_rows" => "--batch-rows",
        "in_flight" => "--batch-in-flight",
        "linger" => "--batch-linger",
        "poll" => "--batch-poll",
        "stuck_after" => "--batch-stuck-after",
        _ => return Failure::new(wrong),
    };
    Failure::new(format!("{flag}: {wrong}"))
}

/// The batch path of a run.
pub(crate) struct Batches {
    pub(crate) handle: BatchHandle,
    pub(crate) arrivals: Arrivals,
    /// Calls about batches, and what their rows used.
    pub(crate) tally: Arc<Tally>,
    pub(crate) cancel_on_exit: bool,
    pub(crate) ways: Ways,
}

impl Batches {
    /// A request that comes: what is in a batch already is marked, and it is known to be on its way.
    pub(crate) fn admit<B>(&self, request: &mut Request<B>, body: &[u8]) {
        if !self.ways.is_batch() && self.handle.holds(&Key::of(request, body, &KeyHeaders::default())) {
            request.extensions_mut().insert(InBatch);
        }
        request.extensions_mut().insert(self.arrivals.arrival());
    }

    /// Where they stand, in one line.
    pub(crate) fn text(&self) -> String {
        let now = self.handle.snapshot();
        let under_way = || now.orgs.iter().flat_map(|org| &org.batches);
        let running = under_way().filter(|batch| batch.stage != BatchStage::Submitting).count();
        let mut text = format!("batches: {} submitted", now.submitted);
        if now.resumed > 0 {
            let _ = write!(text, " and {} from before", now.resumed);
        }
        let _ = write!(text, ", {running} in progress, {} done", now.ended);
        if let Some(oldest) = under_way().map(|batch| batch.age).max() {
            let _ = write!(text, ", oldest {}", roughly(oldest));
        }
        let _ = write!(text, "; rows: {} gathered, {} queued, {} in batches", now.gathered, now.queued, now.in_batches);
        for org in &now.orgs {
            if let Some(why) = org.out {
                let _ = write!(text, "; {} OUT of batches: {why}", org.org);
            }
        }
        if let Some(trouble) = under_way().find_map(|batch| batch.trouble.as_ref()) {
            let short: String = trouble.chars().take(100).collect();
            let _ = write!(text, "; last trouble: {short}");
        }
        text
    }

    /// What becomes of what runs now, when the run is ended early; `None` if nothing runs.
    pub(crate) fn stopping(&self) -> Option<String> {
        let running = self.handle.running();
        if running.is_empty() {
            return None;
        }
        let (count, names) = (batches(running.len()), named(&running));
        Some(match self.cancel_on_exit {
            true => format!("{count} at the provider will be cancelled: {names}"),
            false => format!("{count} at the provider will be left running, and billed: {names}"),
        })
    }
}

fn batches(count: usize) -> String {
    format!("{count} {}", if count == 1 { "batch" } else { "batches" })
}

fn named(all: &[impl ToString]) -> String {
    let mut names: Vec<_> = all.iter().take(NAMED).map(ToString::to_string).collect();
    if all.len() > NAMED {
        names.push(format!("and {} more", all.len() - NAMED));
    }
    names.join(", ")
}

/// How the batches of a run that was ended early were left, in words; nothing if none ran.
pub(crate) fn left(shutdown: &Shutdown, again: Option<&str>) -> Vec<String> {
    let mut said = vec![];
    if !shutdown.cancelled.is_empty() {
        let (count, names) = (batches(shutdown.cancelled.len()), named(&shutdown.cancelled));
        said.push(format!("{count} cancelled; what was done by then is billed: {names}"));
    }
    if !shutdown.left.is_empty() {
        let (count, names) = (batches(shutdown.left.len()), named(&shutdown.left));
        said.push(format!("{count} left running, and billed: {names}"));
    }
    if let (false, Some(again)) = (said.is_empty(), again) {
        said.push(format!("to have what they answer, at no further cost: {again}"));
    }
    said
}

/// Who is on the way to the batches. While the input of a file has not ended, more are expected; once it has and nobody is on the way, nothing
/// more comes to what is gathered, and it goes.
#[derive(Clone)]
pub(crate) struct Arrivals(Arc<Coming>);

struct Coming {
    handle: BatchHandle,
    coming: AtomicUsize,
    ended: AtomicBool,
    more: Mutex<Option<MoreToCome>>,
}

impl Coming {
    fn all_are_there(&self) {
        self.handle.flush();
        let more = self.more.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(more);
    }
}

impl Arrivals {
    pub(crate) fn new(handle: BatchHandle) -> Self {
        let (coming, ended) = (AtomicUsize::new(0), AtomicBool::new(false));
        Arrivals(Arc::new(Coming { handle, coming, ended, more: Mutex::new(None) }))
    }

    /// The input has an end, and is read without pauses.
    pub(crate) fn expected(&self) {
        *self.0.more.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.0.handle.expect_more());
    }

    /// One more is on its way.
    pub(crate) fn arrival(&self) -> Arrival {
        self.0.coming.fetch_add(1, SeqCst);
        Arrival(Arc::new(One { coming: self.0.clone(), arrived: AtomicBool::new(false) }))
    }

    /// The input has ended.
    pub(crate) fn ended(&self) {
        self.0.ended.store(true, SeqCst);
        if self.0.coming.load(SeqCst) == 0 {
            self.0.all_are_there();
        }
    }
}

/// One on its way: a request extension. It has come when that is said, or when the request is gone.
#[derive(Clone)]
pub(crate) struct Arrival(Arc<One>);

struct One {
    coming: Arc<Coming>,
    arrived: AtomicBool,
}

impl Arrival {
    pub(crate) fn arrived(&self) {
        self.0.arrived();
    }
}

impl One {
    fn arrived(&self) {
        if !self.arrived.swap(true, SeqCst)
            && self.coming.coming.fetch_sub(1, SeqCst) == 1
            && self.coming.ended.load(SeqCst)
        {
            self.coming.all_are_there();
        }
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.arrived();
    }
}

/// What was used and spent over both paths: rows of batches at their share of the price.
pub(crate) fn spent(direct: &Tally, batch: Option<&Tally>, prices: &Prices) -> Spent {
    let mut spent = direct.spent(prices);
    if let Some(batch) = batch {
        let batch = batch.spent(prices);
        spent.tokens += batch.tokens;
        spent.cost = match (spent.cost, batch.cost) {
            (None, None) => None,
            (direct, batch) => Some(direct.unwrap_or(0.0) + batch.unwrap_or(0.0) * BATCH_SHARE),
        };
        let more = batch.unpriced.into_iter().filter(|model| !spent.unpriced.contains(model)).collect::<Vec<_>>();
        spent.unpriced.extend(more);
    }
    spent
}

/// The batch path's part of the report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BatchReport {
    submitted: u64,
    /// Batches of earlier runs that were gone on with.
    resumed: u64,
    /// Of both, those whose results were read to their end.
    ended: u64,
    /// Batches that were left running, and are billed.
    left: Vec<String>,
    cancelled: Vec<String>,
    /// Calls about batches.
    calls: u64,
    calls_429: u64,
    /// Ids answered, errors included, by path.
    rows: ByPath<u64>,
    tokens: ByPath<Tokens>,
    /// What part of the list price a batch costs.
    share_of_price: f64,
    /// In dollars, of the models that have a price.
    cost_usd: ByPath<Option<f64>>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct ByPath<T> {
    direct: T,
    batch: T,
}

impl BatchReport {
    pub(crate) fn new(batches: &Batches, shutdown: Option<&Shutdown>, direct: &Tally, prices: &Prices) -> Self {
        let now = batches.handle.snapshot();
        let names = |all: &[_]| all.iter().map(ToString::to_string).collect();
        let left = match shutdown {
            Some(shutdown) => names(&shutdown.left),
            None => names(&batches.handle.running()),
        };
        let (one, other) = (direct.spent(prices), batches.tally.spent(prices));
        let money = |cost: f64| round(cost, 6);
        BatchReport {
            submitted: now.submitted,
            resumed: now.resumed,
            ended: now.ended,
            left,
            cancelled: shutdown.map_or_else(Vec::new, |shutdown| names(&shutdown.cancelled)),
            calls: batches.tally.calls.load(Relaxed),
            calls_429: batches.tally.http_429.load(Relaxed),
            rows: ByPath { direct: direct.firsts.load(Relaxed), batch: batches.tally.rows.load(Relaxed) },
            tokens: ByPath { direct: one.tokens, batch: other.tokens },
            share_of_price: BATCH_SHARE,
            cost_usd: ByPath { direct: one.cost.map(money), batch: other.cost.map(|cost| money(cost * BATCH_SHARE)) },
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = format!("{} submitted", self.submitted);
        if self.resumed > 0 {
            let _ = write!(text, ", {} from before", self.resumed);
        }
        let _ = write!(text, ", {} done, by {}", self.ended, words::count(self.calls, "call"));
        let _ = write!(text, "; ids: {} in batches, {} directly", self.rows.batch, self.rows.direct);
        let cost = |cost: Option<f64>| cost.map_or("-".to_owned(), words::money);
        let _ =
            write!(text, "; cost: {} in batches, {} directly", cost(self.cost_usd.batch), cost(self.cost_usd.direct));
        text
    }
}
