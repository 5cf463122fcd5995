//! The cost per call of the stack and its parts, as ratios to what they replace, measured side by side in one run.
//!
//! ```text
//! cargo bench --bench ratios                     all points
//! cargo bench --bench ratios -- stack/512 1t     those whose name contains every one of these
//!                               --quick          shorter rounds
//!                               --rounds 15      default 9, or 5 when quick
//!                               --report-only    exit 0 though a bar is missed
//!                               --turns 3        how often the provider goes round before it answers; default 2
//!                               --cpu            processor time instead of time, where others use the machine too
//!                               --only ours      one side alone, for a profiler: ours, theirs or floor
//!                               --calls 100000   how many calls then
//! ```
//!
//! Exit code 1 when a bar is missed. `benches/README.md` says what is compared.

mod support;

use std::{process::ExitCode, rc::Rc, time::Duration};

use tower::limit::ConcurrencyLimit;

use support::{
    callers::{Callers, Clock},
    loopback::{self, Provider},
    stacks::{self, Callable},
    wire::{Plain, Wire, request, request_of_family},
};

/// Makes about so many calls and says how long one took, in nanoseconds.
type Side = Box<dyn FnMut(usize) -> f64>;

/// Two sides to be measured against each other, and what the callers and the provider cost without either.
struct Contest {
    ours: Side,
    theirs: Side,
    floor: Option<Side>,
}

/// One line of the table.
struct Point {
    name: String,
    /// The most that ours may cost, in theirs.
    bar: f64,
    set_up: Box<dyn FnOnce() -> Contest>,
}

struct Options {
    filters: Vec<String>,
    quick: bool,
    rounds: usize,
    report_only: bool,
    turns: u32,
    clock: Clock,
    only: Option<String>,
    calls: usize,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Options {
            filters: vec![],
            quick: false,
            rounds: 0,
            report_only: false,
            turns: 2,
            clock: Clock::Wall,
            only: None,
            calls: 100_000,
        };
        while let Some(arg) = args.next() {
            let mut number = || args.next().and_then(|n| n.parse().ok()).ok_or(format!("{arg} takes a number"));
            match arg.as_str() {
                // What cargo adds.
                "--bench" => {}
                "--quick" => options.quick = true,
                "--cpu" => options.clock = Clock::Processor,
                "--report-only" => options.report_only = true,
                "--rounds" => options.rounds = number()?,
                "--calls" => options.calls = number()?,
                "--turns" => options.turns = u32::try_from(number()?).map_err(|error| error.to_string())?,
                "--only" => options.only = Some(args.next().ok_or("--only takes a side")?),
                flag if flag.starts_with('-') => return Err(format!("unknown option {flag}")),
                filter => options.filters.push(filter.to_owned()),
            }
        }
        if options.rounds == 0 {
            options.rounds = if options.quick { 5 } else { 9 };
        }
        Ok(options)
    }
}

fn main() -> ExitCode {
    if std::env::args().any(|arg| arg == loopback::SERVE) {
        loopback::serve();
        return ExitCode::SUCCESS;
    }
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("ratios: {error}");
            return ExitCode::from(2);
        }
    };
    let mut points = points(&options);
    points.retain(|point| options.filters.iter().all(|filter| point.name.contains(filter.as_str())));
    if points.is_empty() {
        eprintln!("ratios: no point has such a name");
        return ExitCode::from(2);
    }
    if let Some(side) = &options.only {
        for point in points {
            let mut contest = (point.set_up)();
            let side = match side.as_str() {
                "ours" => &mut contest.ours,
                "theirs" => &mut contest.theirs,
                _ => contest.floor.as_mut().unwrap_or(&mut contest.ours),
            };
            println!("{:<28} {:>9.0} ns a call", point.name, side(options.calls));
        }
        return ExitCode::SUCCESS;
    }
    println!(
        "{:<28} {:>9} {:>9} {:>9} {:>7}  {:<13} {:>5}  verdict",
        "point", "floor ns", "ours ns", "theirs ns", "ratio", "(least, most)", "bar"
    );
    let mut missed = 0;
    let mut all = 0;
    for point in points {
        all += 1;
        missed += usize::from(!measure(point, &options));
    }
    println!("{} of {all} met", all - missed);
    if missed == 0 || options.report_only { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the sides in turn, and prints the median of the rounds' ratios. True if the bar is met.
fn measure(point: Point, options: &Options) -> bool {
    let mut contest = (point.set_up)();
    let round = Duration::from_millis(if options.quick { 20 } else { 60 }).as_nanos() as f64;
    let calls = |side: &mut Side| {
        // Twice: the first run grows what grows, and finds the caches cold.
        let first = side(2_000);
        (round / side((round / 4.0 / first) as usize)) as usize
    };
    let (our_calls, their_calls) = (calls(&mut contest.ours), calls(&mut contest.theirs));
    let (mut ours, mut theirs, mut floors, mut ratios) = (vec![], vec![], vec![], vec![]);
    for turn in 0..options.rounds {
        // Whoever goes first has no advantage of it.
        let (a, b) = if turn % 2 == 0 {
            let a = (contest.ours)(our_calls);
            (a, (contest.theirs)(their_calls))
        } else {
            let b = (contest.theirs)(their_calls);
            ((contest.ours)(our_calls), b)
        };
        ours.push(a);
        theirs.push(b);
        ratios.push(a / b);
        if let Some(floor) = &mut contest.floor {
            floors.push(floor(their_calls));
        }
    }
    let ratio = median(&mut ratios);
    let met = ratio <= point.bar;
    println!(
        "{:<28} {:>9} {:>9.0} {:>9.0} {:>7.3}  ({:.2}, {:.2})  {:>5.2}  {}",
        point.name,
        if floors.is_empty() { "-".to_owned() } else { format!("{:.0}", median(&mut floors)) },
        median(&mut ours),
        median(&mut theirs),
        ratio,
        ratios.first().unwrap_or(&0.0),
        ratios.last().unwrap_or(&0.0),
        point.bar,
        if met { "met" } else { "MISSED" }
    );
    met
}

/// Sorts, and gives the middle one.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn points(options: &Options) -> Vec<Point> {
    let mut points = vec![];
    let how = (options.turns, options.clock);
    let mut point = |name: String, bar: f64, set_up: Box<dyn FnOnce() -> Contest>| {
        points.push(Point { name, bar, set_up });
    };
    for threads in [1, 2] {
        for orgs in [3, 32] {
            for callers in CALLERS {
                point(
                    format!("stack/{callers}/{threads}t/{orgs} orgs"),
                    if callers <= stacks::SLOTS { 0.7 } else { 1.0 },
                    Box::new(move || stack(callers, threads, orgs, how)),
                );
            }
        }
    }
    for threads in [1, 2] {
        for callers in CALLERS {
            point(format!("limiter/{callers}/{threads}t"), 1.5, Box::new(move || limiter(callers, threads, how)));
        }
    }
    for threads in [1, 2] {
        for callers in CALLERS {
            point(
                format!("limiter, http/{callers}/{threads}t"),
                1.5,
                Box::new(move || http_limiter(callers, threads, how)),
            );
        }
    }
    for threads in [1, 2] {
        for callers in [2_048, 8_192] {
            point(format!("waiters/{callers}/{threads}t"), 1.25, Box::new(move || waiters(callers, threads, how)));
        }
    }
    for threads in [1, 2] {
        for callers in [64, 512] {
            point(format!("loopback/{callers}/{threads}t"), 1.0 / 0.9, Box::new(move || loopback(callers, threads)));
        }
    }
    points
}

const CALLERS: [usize; 4] = [1, 8, 64, 512];

/// The whole stack against tower's parts.
fn stack(callers: usize, threads: usize, orgs: usize, (turns, clock): (u32, Clock)) -> Contest {
    let on = Rc::new(Callers::new(threads, clock));
    let _in_runtime = on.enter();
    contended(&on, callers, orgs, turns);
    Contest {
        ours: side(&on, callers, stacks::ours(orgs, Wire::new(turns)), request_of_family()),
        theirs: side(&on, callers, stacks::tower(orgs, Wire::new(turns)), request()),
        floor: Some(side(&on, callers, Wire::new(turns), request())),
    }
}

/// Both sides let as many calls run at once as there are slots for, and no more: else the comparison is none.
fn contended(on: &Callers, callers: usize, orgs: usize, turns: u32) {
    if turns == 0 {
        return;
    }
    let expected = callers.min(stacks::SLOTS);
    let (wire, gauge) = Wire::gauged(turns);
    on.run(&stacks::ours(orgs, wire), &request_of_family(), callers, 50);
    let (wire, theirs) = Wire::gauged(turns);
    on.run(&stacks::tower(orgs, wire), &request(), callers, 50);
    for (whose, peak) in [("ours", gauge.peak()), ("theirs", theirs.peak())] {
        assert!(peak <= expected, "{whose}: {peak} calls at once, beyond {expected}");
        if peak < expected {
            println!("  {whose}: never more than {peak} calls at once, of {expected}");
        }
    }
}

/// Our limit alone against tower's.
fn limiter(callers: usize, threads: usize, (turns, clock): (u32, Clock)) -> Contest {
    let on = Rc::new(Callers::new(threads, clock));
    let _in_runtime = on.enter();
    Contest {
        ours: side(&on, callers, stacks::limiter(stacks::SLOTS, turns), 1),
        theirs: side(&on, callers, stacks::concurrency_limit(stacks::SLOTS, turns), 1),
        floor: Some(side(&on, callers, Plain(turns), 1)),
    }
}

/// The same where answers are HTTP, and a slot is kept until the body has ended.
fn http_limiter(callers: usize, threads: usize, (turns, clock): (u32, Clock)) -> Contest {
    let on = Rc::new(Callers::new(threads, clock));
    let _in_runtime = on.enter();
    Contest {
        ours: side(&on, callers, stacks::http_limiter(stacks::SLOTS, Wire::new(turns)), request()),
        theirs: side(&on, callers, ConcurrencyLimit::new(Wire::new(turns), stacks::SLOTS), request()),
        floor: Some(side(&on, callers, Wire::new(turns), request())),
    }
}

/// The whole stack with many waiters against itself with few, either without what so many callers cost by themselves: more
/// tasks find colder caches.
fn waiters(callers: usize, threads: usize, (turns, clock): (u32, Clock)) -> Contest {
    let on = Rc::new(Callers::new(threads, clock));
    let _in_runtime = on.enter();
    let service = stacks::ours(3, Wire::new(turns));
    let net = |callers| {
        let mut gross = side(&on, callers, service.clone(), request_of_family());
        let mut floor = side(&on, callers, Wire::new(turns), request());
        Box::new(move |calls| gross(calls) - floor(calls)) as Side
    };
    Contest { ours: net(callers), theirs: net(512), floor: Some(side(&on, callers, Wire::new(turns), request())) }
}

/// The whole stack over real HTTP against the client alone, with as many calls at once. A rate is meant, the provider's share
/// included, so it is always the time that is measured.
fn loopback(callers: usize, threads: usize) -> Contest {
    let provider = Provider::start();
    let on = Rc::new(Callers::new(threads, Clock::Wall));
    let _in_runtime = on.enter();
    let bare = loopback::bare_request(&provider.base_url);
    let mut ours = side(&on, callers, loopback::ours(&provider.base_url), request_of_family());
    Contest {
        theirs: side(&on, callers.min(stacks::SLOTS), loopback::bare(), bare),
        // The provider lives as long as one of the sides.
        ours: Box::new(move |calls| {
            let _ = &provider;
            ours(calls)
        }),
        floor: None,
    }
}

fn side<S, Q>(on: &Rc<Callers>, callers: usize, service: S, request: Q) -> Side
where
    S: Callable<Q>,
    Q: Clone + Send + 'static,
{
    let on = on.clone();
    Box::new(move |calls| {
        // Fewer, and beginning and end would be all that is measured.
        let each = calls.div_ceil(callers).max(8);
        on.run(&service, &request, callers, each).as_nanos() as f64 / (each * callers) as f64
    })
}
