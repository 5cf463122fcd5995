//! One run: items in, lines out, and an end that is right whatever happens on the way.

use std::{
    future::{Future, pending},
    io,
    pin::Pin,
    process::exit,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Poll, ready},
    time::Duration,
};

use futures_util::stream;
use serde_json::value::RawValue;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, MissedTickBehavior},
};
use tower_quota::{
    batch::Shutdown,
    drive::{Drive, DriveError},
    org::{BuildError, Orgs},
};

use crate::{
    batches::{self, Batches},
    fingerprint::fingerprint,
    input::{BadInput, Item, Skips},
    kept,
    output::{Line, Output, Scrubber, Verdict, line},
    panel::{Panel, Standing, TICK, boards, say},
    plot::Plot,
    prices::Prices,
    report::{Counts, Facts, Report},
    resume::Restored,
    status::Neighbours,
    tally::Tries,
    wire::{self, Wire},
    words,
};

/// So long after the last call in flight has ended nothing comes any more.
const SETTLED: Duration = Duration::from_millis(100);
/// The end of the batch path, awaited.
type Closing = Pin<Box<dyn Future<Output = Shutdown> + Send>>;
/// How many items may be read ahead.
const AHEAD: usize = 64;

/// Where items come from: a channel that a thread fills, since reading may block.
pub(crate) struct Feed {
    items: mpsc::Receiver<Result<(Item, u128), BadInput>>,
    /// How many there are, those that need no call included; `None` for a stream, whose end nobody knows.
    total: Option<u64>,
}

impl Feed {
    /// Items as `next` says, until it says `None` or an error.
    ///
    /// # Errors
    /// If no thread can be had.
    pub(crate) fn new(
        total: Option<u64>,
        mut next: impl FnMut() -> Result<Option<Item>, BadInput> + Send + 'static,
    ) -> io::Result<Self> {
        let (queue, items) = mpsc::channel(AHEAD);
        let read = move || {
            while let Some(item) = next().transpose() {
                let item = item.map(|item| {
                    let print = fingerprint(&item.path, &item.body);
                    (item, print)
                });
                let last = item.is_err();
                // Once the run has ended nobody wants more.
                if queue.blocking_send(item).is_err() || last {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("input".to_owned()).spawn(read)?;
        Ok(Feed { items, total })
    }
}

/// All that a run needs.
pub(crate) struct Run {
    pub(crate) feed: Feed,
    pub(crate) output: Output,
    /// What people call it.
    pub(crate) output_name: String,
    pub(crate) orgs: Orgs,
    pub(crate) wire: Wire,
    pub(crate) deadline: Option<Duration>,
    /// How long calls in flight may go on after the first Ctrl-C.
    pub(crate) grace: Duration,
    pub(crate) quiet: bool,
    /// What the simulated provider could do at best, in the demonstration.
    pub(crate) fluid_limit: Option<Duration>,
    /// Who is told of the orgs' headroom.
    pub(crate) neighbours: Option<Neighbours>,
    /// What an earlier run has settled.
    pub(crate) restored: Arc<Restored>,
    /// The command that goes on where this run ends, if one does.
    pub(crate) again: Option<String>,
    /// Who counts the input's bad lines, where they are skipped.
    pub(crate) skips: Option<Arc<Skips>>,
    pub(crate) prices: Prices,
    pub(crate) plot: Option<Plot>,
}

/// Why a run ends before its input does.
#[derive(Debug)]
enum Early {
    CtrlC,
    Deadline,
    Input(BadInput),
    Output,
    /// Nothing more can be kept, for this reason.
    Journal(String),
}

impl Early {
    const fn name(&self) -> &'static str {
        match self {
            Early::CtrlC => "ctrl-c",
            Early::Deadline => "deadline",
            Early::Input(_) => "input",
            Early::Output => "output",
            Early::Journal(_) => "journal",
        }
    }

    /// The verdict on an id that is not answered because of it.
    fn verdict(early: Option<&Early>) -> Verdict {
        match early {
            Some(Early::Deadline) => Verdict::without_answer("deadline", "the deadline of the run has passed"),
            _ => Verdict::without_answer("cancelled", "the run was ended before this was answered"),
        }
    }
}

/// An id that is being worked on.
struct Live {
    custom_id: String,
    fingerprint: u128,
    replaces: Option<u64>,
    metadata: Option<Box<RawValue>>,
    tries: Tries,
}

/// Counts verdicts and turns them into lines.
struct Desk<'a> {
    counts: Counts,
    scrubber: &'a Scrubber,
    restored: &'a Restored,
}

impl Desk<'_> {
    fn settle(&mut self, live: &Live, mut verdict: Verdict) -> Line {
        let seen = live.tries.seen();
        verdict.error = verdict.error.map(|error| self.scrubber.scrub(error));
        self.counts.add(&live.custom_id, &verdict, &seen);
        self.restored.replace(live.replaces);
        line(&live.custom_id, live.fingerprint, live.metadata.as_deref(), &verdict, &seen, self.scrubber)
    }
}

/// Runs to the end.
pub(crate) async fn run(run: Run) -> Result<Report, BuildError> {
    let Run {
        feed,
        output,
        output_name,
        orgs,
        wire,
        deadline,
        grace,
        quiet,
        fluid_limit,
        mut neighbours,
        restored,
        again,
        skips,
        prices,
        mut plot,
    } = run;
    let Feed { mut items, total } = feed;
    let scrubber = Scrubber::of(&orgs);
    let mut desk = Desk { counts: Counts::default(), scrubber: &scrubber, restored: &restored };
    let mut panel = Panel::new(quiet);
    let mut interrupts = Interrupts::listen(&output);

    let (journal, shared, batches) = (wire.journal, wire.shared, wire.batches);
    if let (Some(batches), Some(_)) = (&batches, total) {
        batches.arrivals.expected();
    }
    let salt = |live: &Live| (!shared).then(|| live.custom_id.clone());
    let mut received = 0u64;
    let mut bad = None;
    let requests = stream::poll_fn(|cx| {
        let next = ready!(items.poll_recv(cx));
        if !matches!(next, Some(Ok(_))) {
            batches.iter().for_each(|batches| batches.arrivals.ended());
        }
        Poll::Ready(match next {
            None => None,
            Some(Ok((item, fingerprint))) => {
                received += 1;
                let live = Live {
                    custom_id: item.custom_id,
                    fingerprint,
                    metadata: item.metadata,
                    replaces: item.replaces,
                    tries: Tries::default(),
                };
                let body = item.body.clone();
                let mut request = wire::request(item.path, item.family, item.body, live.tries.clone(), salt(&live));
                batches.iter().for_each(|batches| batches.admit(&mut request, &body));
                Some((live, request))
            }
            // Nothing more comes after it; what was sent finishes.
            Some(Err(error)) => {
                bad = Some(error);
                None
            }
        })
    });
    let started = Instant::now();
    let mut drive = Drive::new(wire.service, requests, wire.bound)?;
    let mut early = None;
    // A stream comes once.
    let with = if total.is_none() { ", with the same input" } else { "" };
    let mut deadline_at = deadline.map(|deadline| started + deadline);
    let mut stopping = false;
    let mut grace_ends = None;
    // The end of the batch path, while it is awaited, and how it was.
    let mut closing: Option<Closing> = None;
    let mut shutdown = None;
    // A line that waits for a slow reader. While it does, no result is taken.
    let mut unwritten: Option<Line> = None;
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = interrupts.first(), if !stopping => {
                stopping = true;
                early.get_or_insert(Early::CtrlC);
                wire.all.stop();
                grace_ends = Some(Instant::now() + grace);
                let (calls, grace) = (wire.all.in_flight(), humantime::format_duration(grace));
                let (calls, have) = (words::count(calls as u64, "call"), if calls == 1 { "has" } else { "have" });
                say(&format!("stopping: {calls} in flight {have} {grace} to end; Ctrl-C again ends at once"));
                if let Some(batches) = &batches {
                    batches.stopping().iter().for_each(|text| say(text));
                    closing.get_or_insert_with(|| close(batches));
                }
                if let Some(again) = &again {
                    say(&format!("to go on later{with}: {again}"));
                }
            }
            how = closed(&mut closing), if closing.is_some() => {
                closing = None;
                shutdown = Some(how);
            }
            () = at(grace_ends) => {
                grace_ends = None;
                drive.abort();
            }
            () = at(deadline_at) => {
                deadline_at = None;
                early.get_or_insert(Early::Deadline);
                match &batches {
                    // It is to be known how they are left.
                    Some(batches) => {
                        stopping = true;
                        wire.all.stop();
                        grace_ends = Some(Instant::now() + grace);
                        closing.get_or_insert_with(|| close(batches));
                    }
                    None => drive.abort(),
                }
            }
            _ = tick.tick() => {
                if let (None, Some(problem)) = (&early, kept::broken(journal.as_ref())) {
                    say(&format!("error: {problem}. Nothing more is sent"));
                    stopping = true;
                    early = Some(Early::Journal(problem));
                    wire.all.stop();
                    grace_ends = Some(Instant::now() + grace);
                    closing = batches.as_ref().map(close);
                }
                panel.tick(&Standing {
                    total,
                    restored: restored.all(),
                    counts: &desk.counts,
                    live: drive.live(),
                    all: &wire.all,
                    tallies: &wire.tallies,
                    prices: &prices,
                    orgs: &orgs,
                    stopping: early.as_ref().map(Early::name),
                    batches: batches.as_ref(),
                });
                if let Some(plot) = &mut plot {
                    plot.tick(&boards(&orgs), &wire.tallies);
                }
                if let Some(neighbours) = &mut neighbours {
                    neighbours.tick();
                }
            }
            permit = output.queue().reserve(), if unwritten.is_some() => match (permit, unwritten.take()) {
                (Ok(permit), Some(line)) => permit.send(line),
                _ => {
                    early.get_or_insert(Early::Output);
                    break;
                }
            },
            result = drive.next(), if unwritten.is_none() => match result {
                Some((live, Ok(mut verdict) | Err(DriveError::Service(mut verdict)))) => {
                    if verdict.outcome == "cancelled" && matches!(early, Some(Early::Deadline)) {
                        verdict.outcome = "deadline";
                    }
                    unwritten = Some(desk.settle(&live, verdict));
                }
                Some((live, Err(_))) => unwritten = Some(desk.settle(&live, Early::verdict(early.as_ref()))),
                None => break,
            },
            // What waits behind the last call in flight will not be sent any more. An answer may yet be on its way through the journal.
            () = tokio::time::sleep(SETTLED), if stopping && wire.all.in_flight() == 0 && unwritten.is_none() && closing.is_none() => drive.abort(),
        }
    }
    let peak_live = drive.peak_live();
    if let (Some(batches), None) = (&batches, &shutdown) {
        // Where the output ended the run they run still; else the last one's record is to be written to its end.
        shutdown = tokio::time::timeout(grace, close(batches)).await.ok();
    }
    if let Some(shutdown) = &shutdown {
        batches::left(shutdown, again.as_deref()).iter().for_each(|text| say(text));
    }
    // With the service go the accounts of the orgs' quotas.
    let boards = boards(&orgs);
    if let Some(plot) = &mut plot {
        plot.last(&boards, &wire.tallies);
    }
    if let Some(neighbours) = neighbours {
        neighbours.close().await;
    }
    drop(drive);
    if let Some(bad) = bad {
        early.get_or_insert(Early::Input(bad));
    }

    // Of a stream, what was read still gets its line; of a file, every id.
    if matches!(early, Some(Early::CtrlC | Early::Deadline)) {
        if total.is_none() {
            items.close();
        }
        while let Some(Ok((item, fingerprint))) = items.recv().await {
            received += 1;
            let unsent = Live {
                custom_id: item.custom_id,
                fingerprint,
                metadata: item.metadata,
                replaces: item.replaces,
                tries: Tries::default(),
            };
            let line = desk.settle(&unsent, Early::verdict(early.as_ref()));
            if output.queue().send(line).await.is_err() {
                break;
            }
        }
    }
    let written = output.close().await;
    let wall = started.elapsed();
    panel.close();
    if let Some(plot) = plot {
        plot.close();
    }

    let expected = total.unwrap_or(0).max(received + restored.all());
    let ok = written.outcomes.get("ok").copied().unwrap_or(0) + restored.ok.load(Relaxed);
    let bad_input = skips.map_or(0, |skips| skips.count());
    let exit_code = match &early {
        Some(Early::CtrlC) => 130,
        Some(Early::Input(bad)) => {
            say(&format!("error: {bad}"));
            2
        }
        Some(Early::Journal(problem)) => {
            let go_on = again.iter().map(|again| format!("; make room and go on: {again}")).collect::<String>();
            say(&format!("error: {problem}. What was answered has its line{go_on}"));
            1
        }
        // Also what is written last must have reached the disk.
        _ if ok == expected && bad_input == 0 && written.result.is_ok() => 0,
        _ => 1,
    };
    match written.result {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => say("nobody reads the output any more"),
        Err(error) => {
            let lines = words::count(written.outcomes.values().sum(), "line");
            let go_on = match &again {
                Some(again) => format!("; make room and go on{with}: {again}"),
                None => String::new(),
            };
            say(&format!(
                "error: {output_name} cannot be written: {error}. Nothing more is sent; {lines} of this run are in it{go_on}"
            ));
        }
    }
    Ok(Report::new(&Facts {
        expected,
        bad_input,
        prices: &prices,
        outcomes: &written.outcomes,
        restored: &restored,
        counts: &desk.counts,
        wall,
        peak_live,
        fluid_limit,
        ended_by: early.as_ref().map(Early::name),
        exit_code,
        orgs: &orgs,
        boards: &boards,
        all: &wire.all,
        tallies: &wire.tallies,
        held: panel.held(),
        batches: batches.as_ref(),
        shutdown: shutdown.as_ref(),
    }))
}

/// Ends the batch path: what it holds is handed back.
fn close(batches: &Batches) -> Closing {
    let handle = batches.handle.clone();
    Box::pin(async move { handle.shutdown().await })
}

/// Waits for that end; for ever where it is not awaited.
async fn closed(closing: &mut Option<Closing>) -> Shutdown {
    match closing {
        Some(closing) => closing.await,
        None => pending().await,
    }
}

/// Waits until then; for ever where there is no then.
async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => pending().await,
    }
}

/// Ctrl-C, and what asks a program politely to end.
struct Interrupts(watch::Receiver<bool>);

impl Interrupts {
    /// Listens. The second one ends the process at once, wherever it is, but between two lines of output.
    fn listen(output: &Output) -> Self {
        let (came, interrupts) = watch::channel(false);
        let writing = output.lock();
        tokio::spawn(async move {
            let mut signals = Signals::new();
            signals.next().await;
            came.send_replace(true);
            signals.next().await;
            say("ended at once: ids without a line are not done");
            // A reader that does not read keeps the writer, but not us.
            for _ in 0..50 {
                if let Ok(_whole) = writing.try_lock() {
                    exit(130);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            exit(130);
        });
        Interrupts(interrupts)
    }

    /// Waits for the first.
    async fn first(&mut self) {
        if self.0.wait_for(|came| *came).await.is_err() {
            pending().await
        }
    }
}

#[cfg(unix)]
struct Signals(Option<[tokio::signal::unix::Signal; 2]>);

#[cfg(unix)]
impl Signals {
    fn new() -> Self {
        use tokio::signal::unix::{SignalKind, signal};
        let [interrupt, terminate] = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
        Signals(interrupt.ok().zip(terminate.ok()).map(|(interrupt, terminate)| [interrupt, terminate]))
    }

    async fn next(&mut self) {
        match &mut self.0 {
            Some([interrupt, terminate]) => tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            },
            None => pending().await,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Self {
        Signals
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            pending().await
        }
    }
}
