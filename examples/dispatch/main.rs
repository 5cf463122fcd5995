//! Sends many requests to a provider's API over all your organisations' quotas at once: a batch of any size in, one line per
//! id out. Ended at any instant and started again, it goes on where it was.
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
mod batches;
mod claim;
mod demo;
mod descriptors;
mod ending;
mod fingerprint;
mod forecast;
mod input;
mod kept;
mod output;
mod pace;
mod panel;
mod plan;
mod plot;
mod prices;
mod report;
mod resume;
mod route;
mod run;
mod samples;
mod source;
mod status;
mod tally;
mod whole;
mod wire;
mod words;

use std::{
    fmt,
    fs::File,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::Parser;
use tower_quota::org::{BuildError, Dialect, Family, Orgs};
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, OnBadInput, is_standard},
    batches::Setting,
    claim::Claim,
    forecast::Work,
    input::{BadInput, Reading, Skips, Template},
    output::Output,
    panel::{Stderr, say},
    plan::Plan,
    plot::Plot,
    prices::Prices,
    report::Report,
    resume::Resume,
    run::{Feed, Run},
    source::{Next, Source},
    status::Neighbours,
    whole::write_whole,
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

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        Failure::new(error)
    }
}

impl From<BadInput> for Failure {
    fn from(bad: BadInput) -> Self {
        Failure(bad.to_string())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    // What the journal's engine makes of a damaged file is caught, and the file is mended: nobody needs to read of it.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.location().is_some_and(|place| place.file().contains("/redb-")) {
            hook(panic);
        }
    }));
    if args.status {
        return ExitCode::from(status::print(args.headroom_file.or_else(status::from_env), args.json));
    }
    // How batches are left is said by this program.
    let quiet = if args.quiet { "error" } else { "warn,tower_quota::batch::handle=error" };
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
        claim: claim(args)?,
        resume: Resume::default(),
        fresh: true,
        skips: None,
    };
    let mut numbers = 1..=total;
    let next = move || Ok(numbers.next().map(|number| demo::item(dialect, number)));
    let code = job.run(args, Box::new(next)).await?;
    demo.server.shutdown().await;
    Ok(code)
}

/// Sends what the input holds.
async fn work(args: &Args, input: &Path) -> Result<u8, Failure> {
    let same = |a: &Path, b: &Path| a == b || whereabouts(a).is_some_and(|a| whereabouts(b).is_some_and(|b| a == b));
    let headroom_file = args.headroom_file.clone().or_else(status::from_env);
    let journal = kept::path(args);
    let tail = journal.as_deref().map(kept::tail);
    let files = [
        ("--input", Some(input)),
        ("--template", args.template.as_deref()),
        ("--orgs", args.orgs.as_deref()),
        ("--output", args.output.as_deref()),
        ("--ordered", args.ordered.as_deref()),
        ("--journal", journal.as_deref()),
        ("the journal's tail", tail.as_deref()),
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
    let dialect = orgs.as_ref().map(Orgs::dialect).or(spoken);
    if let (Some(dialect), Some(spoken)) = (dialect, spoken) {
        if dialect != spoken {
            return Err(Failure::new(format!("--dialect {}, but the orgs speak {}", spoken.name(), dialect.name())));
        }
    }

    if args.ordered.as_deref().is_some_and(is_standard) || args.ordered.is_some() && !can_hold(args.output.as_deref()) {
        return Err(Failure::new("--ordered copies a file into a file: neither it nor --output can be a stream"));
    }
    let claim = claim(args)?;

    let reading = reading(args, dialect)?;
    let skips = reading.skips.clone();
    let earlier = claim.as_ref().filter(|_| !args.fresh);
    let Source { dialect, families, total, work, what, next, resume } = Source::open(args, input, &reading, earlier)?;
    let Some(dialect) = dialect else {
        return nothing(args, claim, skips.map_or(0, |skips| skips.count())).await;
    };
    let orgs = match orgs {
        Some(orgs) => orgs,
        None => Orgs::from_env_for(dialect)
            .map_err(|error| Failure(format!("{error}; or name a file of orgs: --orgs FILE.toml")))?,
    };
    let (orgs, fresh) = (chosen(args, orgs)?, args.fresh);
    let job = Job { orgs, what, families, total, work, fluid_limit: None, headroom_file, claim, resume, fresh, skips };
    job.run(args, next).await
}

/// How the command line says that the input is read.
fn reading(args: &Args, dialect: Option<Dialect>) -> Result<Reading, Failure> {
    let template = match &args.template {
        Some(file) => Some(Arc::new(Template::load(file, dialect, args.path.clone())?)),
        None => None,
    };
    let quiet = args.quiet;
    let skips = match args.on_bad_input {
        OnBadInput::Stop => None,
        OnBadInput::Skip => Some(Arc::new(Skips::new(move |text| {
            if !quiet {
                say(text);
            }
        }))),
    };
    let (path, prompts) = (args.path.clone(), args.form.map(Into::into));
    Ok(Reading { dialect, path, template, prompts, skips })
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
    /// The output's file, if it is there.
    claim: Option<Claim>,
    resume: Resume,
    /// Whether an output that is there is set aside.
    fresh: bool,
    skips: Option<Arc<Skips>>,
}

impl Job {
    async fn run(self, args: &Args, mut next: Next) -> Result<u8, Failure> {
        let Job { orgs, what, families, total, work, fluid_limit, headroom_file, claim, mut resume, fresh, skips } =
            self;
        let prices = Prices::load(args.prices.as_deref()).map_err(|error| Failure(format!("--prices {error}")))?;
        // All that a bad command line may be is found before anything is moved or written.
        writable(args, headroom_file.as_deref())?;
        let mut batches = Setting::of(args)?;
        let limits = plan::known_limits(headroom_file.as_deref(), &orgs);
        let decided = route::decide(args, batches.as_ref(), work.as_ref(), &orgs, &limits, &prices)?;
        if let (Some(setting), Some(rows)) = (&mut batches, decided.rows) {
            setting.rows = rows;
        }
        let journal = if args.dry_run { None } else { kept::open(args, fresh)? };
        if batches.is_none() && kept::has_batches(journal.as_ref()).await? {
            // Of an earlier run: what they answer is paid for.
            batches = Some(Setting::new(args));
        }
        let wire = Wire::new(args, &orgs, &families, journal, batches.as_ref().map(|it| (it, &decided.ways))).await?;
        let output_name = args.output.as_deref().unwrap_or(Path::new("-"));
        if args.dry_run || !args.quiet {
            let found = resume.text(output_name);
            if !found.is_empty() {
                say(&found);
            }
            let (what, work, answered) = (&*what, work.as_ref(), resume.restored.all());
            let (orgs, prices, batches) = (&orgs, &prices, batches.as_ref().filter(|_| decided.ways.is_batch()));
            say(&Plan { what, answered, work, orgs, limits, fluid_limit, prices, batches }.line());
            decided.why.iter().for_each(|why| say(why));
        }
        if args.dry_run {
            let mut read = resume.restored.all();
            while next()?.is_some() {
                read += 1;
            }
            let (requests, are) = (words::count(read, "request"), if read == 1 { "is" } else { "are" });
            let bad = skips.map_or(0, |skips| skips.count());
            let and = if bad > 0 { format!(", {} skipped", words::count(bad, "bad line")) } else { String::new() };
            say(&format!("{requests} {are} good{and}; nothing was sent"));
            return Ok(u8::from(bad > 0));
        }
        let unwritable = |error: io::Error| Failure(format!("--output {}: {error}", output_name.display()));
        let mut claim = open_output(args, claim, fresh).map_err(unwritable)?;
        if let Some(claim) = &mut claim {
            resume.mend(claim).map_err(unwritable)?;
        }
        let output = start_output(args, claim.as_ref()).map_err(unwritable)?;
        let feed = Feed::new(total, next).map_err(Failure::new)?;
        let Args { deadline, grace, quiet, .. } = *args;
        let neighbours = headroom_file.map(|path| Neighbours::new(&path, &orgs));
        let restored = resume.restored.clone();
        // What went into no file is in no file.
        let again =
            claim.as_ref().filter(|_| args.input.is_some()).map(|_| resume::command::again(std::env::args_os()));
        let plot = args.plot.clone().map(Plot::new);
        let output_name = output_name.display().to_string();
        let run = Run {
            feed,
            output,
            output_name,
            orgs,
            wire,
            deadline,
            grace,
            quiet,
            fluid_limit,
            neighbours,
            restored,
            again,
            skips,
            prices,
            plot,
        };
        let mut report = run::run(run).await.map_err(Failure::new)?;
        if let Some(claim) = claim.as_mut().filter(|_| !report.output_failed()) {
            let ordered = args.ordered.as_deref().filter(|_| report.exit_code != 130);
            if let Err(error) = resume.close(claim, ordered) {
                say(&format!("error: {error}"));
                report.exit_code = report.exit_code.max(1);
            }
        }
        finish(args, report)
    }
}

/// Whether what is to be written can be: that is better known before anything is sent. What is there stays as it is.
fn writable(args: &Args, headroom_file: Option<&Path>) -> Result<(), Failure> {
    let (output, report) = (args.output.as_deref(), args.report.as_deref());
    let files = [
        ("--output", output),
        ("--ordered", args.ordered.as_deref()),
        ("--report", report),
        ("--plot", args.plot.as_deref()),
        ("--headroom-file", headroom_file),
    ];
    for (name, path) in files {
        let Some(path) = path.filter(|path| !is_standard(path)) else { continue };
        let tried = match std::fs::metadata(path) {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(_) => std::fs::OpenOptions::new().append(true).open(path).map(drop),
            Err(_) => std::fs::read_dir(folder_of(path)).map(drop),
        };
        tried.map_err(|error| Failure(format!("{name} {}: {error}", path.display())))?;
    }
    Ok(())
}

/// Where a file really is, or will be.
fn whereabouts(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().or_else(|| Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?)))
}

/// The folder in which a file is or will be.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether this output holds what was written to it: a file does, or will when it is there.
fn can_hold(output: Option<&Path>) -> bool {
    output.is_some_and(|path| !is_standard(path) && std::fs::metadata(path).map_or(true, |there| there.is_file()))
}

/// Claims the output's file, if it is there.
fn claim(args: &Args) -> Result<Option<Claim>, Failure> {
    let Some(path) = args.output.as_deref().filter(|path| !is_standard(path)) else { return Ok(None) };
    Claim::existing(path, args.dry_run).map_err(|error| Failure(format!("--output {}: {error}", path.display())))
}

/// Claims the output's file, if it is one that holds what is written to it.
fn open_output(args: &Args, claim: Option<Claim>, fresh: bool) -> io::Result<Option<Claim>> {
    match (claim, &args.output) {
        (Some(claim), _) if fresh => claim.set_aside().map(Some),
        (None, Some(path)) if can_hold(Some(path)) => Claim::fresh(path).map(Some),
        (claim, _) => Ok(claim),
    }
}

fn start_output(args: &Args, claim: Option<&Claim>) -> io::Result<Output> {
    let file = claim.map(Claim::file);
    let sink: Box<dyn Write + Send> = match (&file, &args.output) {
        (Some(file), _) => Box::new(file.clone()),
        (None, Some(path)) if !is_standard(path) => Box::new(File::options().write(true).open(path)?),
        // Answers to real requests go somewhere; those of the demonstration only where it is said.
        (None, None) if args.input.is_none() => Box::new(io::sink()),
        (None, _) => Box::new(io::stdout()),
    };
    Output::start(sink, file)
}

/// An input without a good line: nothing to send, so no orgs are needed.
async fn nothing(args: &Args, claim: Option<Claim>, bad_input: u64) -> Result<u8, Failure> {
    let exit_code = u8::from(bad_input > 0);
    say(match bad_input {
        0 => "the input is empty; nothing was sent",
        _ => "the input has no good line; nothing was sent",
    });
    if args.dry_run {
        return Ok(exit_code);
    }
    open_output(args, claim, args.fresh).map_err(|error| Failure(format!("--output: {error}")))?;
    finish(args, Report::of_nothing(bad_input, exit_code))
}

/// Reports, and says with what exit code to end.
fn finish(args: &Args, report: Report) -> Result<u8, Failure> {
    let text = if args.quiet { report.line() } else { report.text() };
    // A terminal does what such characters say, and ids and errors are others' words.
    say(&text.trim_end().replace(|c: char| c.is_control() && c != '\n', "\u{fffd}"));
    if let Some(path) = &args.report {
        let mut json = serde_json::to_vec_pretty(&report).map_err(Failure::new)?;
        json.push(b'\n');
        let written = write_whole(path, |file| file.write_all(&json));
        written.map_err(|error| Failure(format!("--report {}: {error}", path.display())))?;
    }
    Ok(report.exit_code)
}
