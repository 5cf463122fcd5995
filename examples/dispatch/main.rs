//! Sends many requests to a provider's API over all your organisations' quotas at once: a batch of any size in, one line per
//! id out.
//!
//! ```text
//! cargo run --release --example dispatch                       # a demonstration against a simulated provider
//! cargo run --release --example dispatch -- --input requests.jsonl --output answers.jsonl --orgs orgs.toml
//! cargo run --release --example dispatch -- --status --headroom-file headroom.json
//! ```
//!
//! `--help` says all the rest. Data goes to standard output only with `--output -`; progress, warnings and the report go to
//! standard error.

mod args;
mod demo;
mod descriptors;
mod forecast;
mod input;
mod output;
mod pace;
mod panel;
mod plan;
mod plot;
mod prices;
mod report;
mod run;
mod samples;
mod status;
mod tally;
mod wire;
mod words;

use std::{
    fmt,
    fs::File,
    io::{self, BufReader, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Parser;
use tower_quota::org::{Dialect, Family, Orgs};
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, is_standard},
    forecast::Work,
    input::{
        BadInput, Item, Items,
        survey::{Survey, survey},
    },
    output::{Output, write_atomically},
    panel::{Stderr, say},
    plan::Plan,
    plot::Plot,
    prices::Prices,
    report::Report,
    run::{Feed, Run},
    status::Neighbours,
    wire::Wire,
};

/// Why a run does not begin. Exit code 2.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(problem: impl fmt::Display) -> Self {
        Failure(problem.to_string())
    }
}

impl From<BadInput> for Failure {
    fn from(bad: BadInput) -> Self {
        Failure(bad.to_string())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.status {
        return ExitCode::from(status::print(args.headroom_file.or_else(status::from_env), args.json));
    }
    let quiet = if args.quiet { "error" } else { "warn" };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(quiet));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| Stderr);
    log.with_ansi(std::io::stderr().is_terminal()).without_time().with_target(false).init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("error: no runtime: {error}"));
            return ExitCode::from(2);
        }
    };
    match runtime.block_on(dispatch(&args)) {
        Ok(code) => ExitCode::from(code),
        Err(Failure(problem)) => {
            say(&format!("error: {problem}"));
            ExitCode::from(2)
        }
    }
}

async fn dispatch(args: &Args) -> Result<u8, Failure> {
    match &args.input {
        None => demonstrate(args).await,
        Some(input) => work(args, input).await,
    }
}

/// Sends made-up requests to the simulated provider.
async fn demonstrate(args: &Args) -> Result<u8, Failure> {
    let demo = demo::start(args).await?;
    let (dialect, total) = (demo.orgs.dialect(), args.demo_requests.unwrap_or(demo::REQUESTS));
    let mut work = Work::default();
    work.add(&demo::item(dialect, total).body, total);
    let job = Job {
        orgs: chosen(args, demo.orgs)?,
        what: format!("{} to a simulated provider at {}", words::count(total, "request"), demo.server.addr()),
        families: vec![demo::item(dialect, 1).family],
        total: Some(total),
        work: Some(work),
        fluid_limit: demo.fluid_limit,
        // Its orgs are nobody's neighbours, unless somebody asks.
        headroom_file: args.headroom_file.clone(),
    };
    let mut numbers = 1..=total;
    let next = move || Ok(numbers.next().map(|number| demo::item(dialect, number)));
    let code = job.run(args, Box::new(next)).await?;
    demo.server.shutdown().await;
    Ok(code)
}

/// Sends what the input holds.
async fn work(args: &Args, input: &Path) -> Result<u8, Failure> {
    let same = |a: &Path, b: &Path| a == b || a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    let headroom_file = args.headroom_file.clone().or_else(status::from_env);
    let files = [
        ("--input", Some(input)),
        ("--orgs", args.orgs.as_deref()),
        ("--output", args.output.as_deref()),
        ("--report", args.report.as_deref()),
        ("--prices", args.prices.as_deref()),
        ("--plot", args.plot.as_deref()),
        ("--headroom-file", headroom_file.as_deref()),
    ];
    for (i, (name, path)) in files.iter().enumerate() {
        for (other, earlier) in &files[..i] {
            if let (Some(path), Some(earlier)) = (path, earlier) {
                if !is_standard(path) && same(path, earlier) {
                    return Err(Failure(format!("{name} and {other} are the same file")));
                }
            }
        }
    }
    let orgs = match &args.orgs {
        Some(path) => Some(Orgs::from_toml_file(path).map_err(Failure::new)?),
        None => None,
    };
    let spoken = args.dialect.map(Dialect::from);
    let form = orgs.as_ref().map(Orgs::dialect).or(spoken);
    if let (Some(form), Some(spoken)) = (form, spoken) {
        if form != spoken {
            return Err(Failure::new(format!("--dialect {}, but the orgs speak {}", spoken.name(), form.name())));
        }
    }

    let Source { form, families, total, work, what, next } = Source::open(input, form)?;
    let Some(form) = form else { return nothing(args).await };
    let orgs = match orgs {
        Some(orgs) => orgs,
        None => Orgs::from_env_for(form)
            .map_err(|error| Failure(format!("{error}; or name a file of orgs: --orgs FILE.toml")))?,
    };
    let job = Job { orgs: chosen(args, orgs)?, what, families, total, work, fluid_limit: None, headroom_file };
    job.run(args, next).await
}

/// Gives the next item; may block.
type Next = Box<dyn FnMut() -> Result<Option<Item>, BadInput> + Send>;

/// The input, opened, and a file also checked.
struct Source {
    /// `None` where there is not a single line.
    form: Option<Dialect>,
    /// Those of a file; of a stream that of the first line.
    families: Vec<Family>,
    /// How many items a file has.
    total: Option<u64>,
    /// What they ask for.
    work: Option<Work>,
    /// All this for people.
    what: String,
    next: Next,
}

impl Source {
    fn open(input: &Path, form: Option<Dialect>) -> Result<Self, Failure> {
        // Only a file can be read twice: a pipe may have a name too.
        if !is_standard(input) && std::fs::metadata(input).is_ok_and(|metadata| metadata.is_file()) {
            let mut work = Work::default();
            let Survey { items: total, bytes, form, families } =
                survey(input, form, |body| work.add(body.as_bytes(), 1))?;
            let (requests, size) = (words::count(total, "request"), words::size(bytes));
            let mut what = format!("{requests}, {size}, from {}", input.display());
            for (family, count) in families.iter().take(8) {
                what.push_str(&format!(", {count} {family}"));
            }
            let mut items = input::open(input, form)?;
            let next = Box::new(move || items.next_item());
            let families = families.into_keys().collect();
            return Ok(Source { form, families, total: Some(total), work: Some(work), what, next });
        }
        let name = if is_standard(input) { "standard input".to_owned() } else { input.display().to_string() };
        let source: Box<dyn io::Read + Send> = if is_standard(input) {
            Box::new(io::stdin())
        } else {
            Box::new(File::open(input).map_err(|error| Failure(format!("{name}: {error}")))?)
        };
        let mut items = Items::new(BufReader::with_capacity(1 << 16, source), &name, form).refusing_duplicates();
        let mut first = items.next_item()?;
        let families = first.iter().map(|item| item.family.clone()).collect();
        let form = first.as_ref().and_then(|_| items.form());
        let next = Box::new(move || first.take().map_or_else(|| items.next_item(), |item| Ok(Some(item))));
        Ok(Source { form, families, total: None, work: None, what: format!("unknown requests from {name}"), next })
    }
}

/// The orgs that the command line leaves, with what it says of them.
fn chosen(args: &Args, orgs: Orgs) -> Result<Orgs, Failure> {
    let orgs = match &args.single_org {
        Some(name) => orgs.only(name).map_err(Failure::new)?,
        None => orgs,
    };
    let changed = orgs.iter().cloned().map(|mut org| {
        if let Some(base_url) = &args.base_url {
            org = org.base_url(base_url.clone());
        }
        if let Some(cap) = args.cap {
            org = org.cap(cap.get());
        }
        org
    });
    Orgs::new(changed).map_err(Failure::new)
}

/// What is to be done.
struct Job {
    orgs: Orgs,
    what: String,
    families: Vec<Family>,
    total: Option<u64>,
    /// What is to be sent; `None` for a stream.
    work: Option<Work>,
    fluid_limit: Option<Duration>,
    headroom_file: Option<PathBuf>,
}

impl Job {
    async fn run(self, args: &Args, mut next: Next) -> Result<u8, Failure> {
        let Job { orgs, what, families, total, work, fluid_limit, headroom_file } = self;
        let prices = Prices::load(args.prices.as_deref()).map_err(|error| Failure(format!("--prices {error}")))?;
        // Before the output is touched: an org that cannot be used is a bad command line.
        let wire = Wire::new(args, &orgs, &families).map_err(Failure::new)?;
        writable(args, headroom_file.as_deref())?;
        if args.dry_run || !args.quiet {
            let limits = plan::known_limits(headroom_file.as_deref(), &orgs);
            let (what, work) = (&*what, work.as_ref());
            say(&Plan { what, answered: 0, work, orgs: &orgs, limits, fluid_limit, prices: &prices }.line());
        }
        if args.dry_run {
            let mut read = 0u64;
            while next()?.is_some() {
                read += 1;
            }
            let (requests, are) = (words::count(read, "request"), if read == 1 { "is" } else { "are" });
            say(&format!("{requests} {are} good; nothing was sent"));
            return Ok(0);
        }
        let output = open_output(args)?;
        let feed = Feed::new(total, next).map_err(Failure::new)?;
        let Args { deadline, grace, quiet, .. } = *args;
        let neighbours = headroom_file.map(|path| Neighbours::new(&path, &orgs));
        let plot = args.plot.clone().map(Plot::new);
        let run = Run { feed, output, orgs, wire, deadline, grace, quiet, fluid_limit, neighbours, prices, plot };
        finish(args, run::run(run).await.map_err(Failure::new)?)
    }
}

/// Whether what is to be written can be: that is better known before anything is sent. What is there stays as it is.
fn writable(args: &Args, headroom_file: Option<&Path>) -> Result<(), Failure> {
    let (output, report, plot) = (args.output.as_deref(), args.report.as_deref(), args.plot.as_deref());
    let files = [("--output", output), ("--report", report), ("--plot", plot), ("--headroom-file", headroom_file)];
    for (name, path) in files {
        let Some(path) = path.filter(|path| !is_standard(path)) else { continue };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let tried = match std::fs::metadata(path) {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(_) => std::fs::OpenOptions::new().append(true).open(path).map(drop),
            Err(_) => std::fs::read_dir(folder).map(drop),
        };
        tried.map_err(|error| Failure(format!("{name} {}: {error}", path.display())))?;
    }
    Ok(())
}

fn open_output(args: &Args) -> Result<Output, Failure> {
    // Answers to real requests go somewhere; those of the demonstration only where it is said.
    let path = args.output.as_deref().or(args.input.as_ref().map(|_| Path::new("-")));
    Output::open(path)
        .map_err(|error| Failure(format!("--output {}: {error}", path.unwrap_or(Path::new("-")).display())))
}

/// An empty input: nothing to send, so no orgs are needed.
async fn nothing(args: &Args) -> Result<u8, Failure> {
    say("the input is empty; nothing was sent");
    if args.dry_run {
        return Ok(0);
    }
    open_output(args)?.close().await.result.map_err(Failure::new)?;
    finish(args, Report::default())
}

/// Reports, and says with what exit code to end.
fn finish(args: &Args, report: Report) -> Result<u8, Failure> {
    let text = if args.quiet { report.line() } else { report.text() };
    say(text.trim_end());
    if let Some(path) = &args.report {
        let mut json = serde_json::to_vec_pretty(&report).map_err(Failure::new)?;
        json.push(b'\n');
        let written = write_atomically(path, &json);
        written.map_err(|error| Failure(format!("--report {}: {error}", path.display())))?;
    }
    Ok(report.exit_code)
}
