//! The command line.

use std::{num::NonZeroU32, num::NonZeroUsize, path::PathBuf, time::Duration};

use clap::{Parser, ValueEnum};
use http::{Uri, uri::PathAndQuery};
use tower_quota::{org::Dialect, plan::Objective};

use crate::input::Prompts;

/// Sends many requests to a provider's API, over all your organisations' quotas at once.
///
/// Without arguments it starts a simulated provider on this machine and sends 6,000 requests to it. With --input it does
/// real work: one request or prompt a line in, one JSON answer a line out.
///
/// Exit code: 0 if every id was answered `ok`; 1 if some were not, or bad lines were skipped; 2 for a bad command line or input, naming
/// file, line and column, or for damage to the output; 130 after Ctrl-C, which prints the command that goes on. With --status: 0, also where
/// there is no file; 1 if the file cannot be read.
#[derive(Debug, Parser)]
#[command(name = "dispatch", version, max_term_width = 100)]
pub(crate) struct Args {
    /// Requests or prompts, one a line; `-` reads standard input.
    ///
    /// A request is a line of Anthropic's or OpenAI's batch form, or a body alone, such as {"model": …, "messages": […]}. A body may
    /// have `metadata`, which is not sent and comes back with the answer; its id is `metadata.custom_id`, or else `line-N`. With
    /// --template lines are prompts.
    ///
    /// A name that ends in .gz or .zst is read as such an archive; elsewhere, also on standard input, the first bytes tell.
    ///
    /// A file is read twice: all of it is checked before anything is sent. Standard input is checked as it comes, and a bad
    /// line ends the admission of requests. To find an id given twice, ids are sorted or looked up in a temporary file, beside the
    /// output if there is room; memory does not grow with the input, but for a bit of each line.
    #[arg(long, value_name = "FILE|-")]
    pub(crate) input: Option<PathBuf>,

    /// A request's body with {{prompt}} in a string of it: each line of the input is a prompt for it, or each string of lists.
    ///
    /// Lists are JSON arrays of strings: one for the whole file, or one a line. Answers have the ids `line-N` by the line's number, or
    /// `list-L-I` by the list's number and the string's index, from 0. Lines put in or taken out shift the ids of those that follow.
    #[arg(long, value_name = "FILE.json", requires = "input")]
    pub(crate) template: Option<PathBuf>,

    /// How prompts are written. Else the first line of the input tells: a list begins with a bracket and a string.
    #[arg(long, value_enum, requires = "template")]
    pub(crate) form: Option<PromptForm>,

    /// Where bodies and templates are posted. Else they tell: `messages` go to /v1/messages or /v1/chat/completions, `input` goes
    /// to /v1/embeddings.
    #[arg(long, value_name = "PATH", requires = "input", value_parser = path)]
    pub(crate) path: Option<PathAndQuery>,

    /// What a bad line does: `stop` ends the run, `skip` names it and goes on; of more than ten the rest is only counted.
    ///
    /// An input that cannot be read on, lines of several forms and an id that comes twice end the run in any case.
    #[arg(long, value_enum, requires = "input", default_value_t)]
    pub(crate) on_bad_input: OnBadInput,

    /// Where answers go, one a line in the order they come; `-` is standard output, the default with --input.
    ///
    /// A file that is there already is gone on with: what it answers is not sent again, if the request is the same; what it says was
    /// refused for good is not, unless --retry-failed asks for it; all else is. Rows to be sent again are taken out first, a row
    /// that was cut short is cut off, and any other damage is an error, with file, line and column. In the end every id has one row. Without
    /// --input it gets the demonstration's answers, always afresh.
    #[arg(long, value_name = "FILE|-")]
    pub(crate) output: Option<PathBuf>,

    /// Begin anew: an output that is there is kept under the same name with `.old` added, or `.old.2` and so on where that is taken.
    #[arg(long, requires = "input")]
    pub(crate) fresh: bool,

    /// Send again also what the output says was refused for good.
    #[arg(long, requires = "input")]
    pub(crate) retry_failed: bool,

    /// At the end write a copy of the output here, in the order of the input. It holds the input's ids only, and is not written when
    /// Ctrl-C ended the run.
    #[arg(long, value_name = "FILE", requires = "input", requires = "output")]
    pub(crate) ordered: Option<PathBuf>,

    /// Where answers are kept before their lines are written, so that none that was paid for is lost however the run ends. Default: the output's name
    /// with `.journal` added, where the output is a file.
    ///
    /// It may be thrown away when a run is complete.
    #[arg(long, value_name = "FILE", requires = "input", conflicts_with = "no_journal")]
    pub(crate) journal: Option<PathBuf>,

    /// Keep no journal: what was answered in the moment before the program is killed is sent again.
    #[arg(long, requires = "input")]
    pub(crate) no_journal: bool,

    /// Ids that ask the same share one answer, within a run and from the journal. Else each id is asked for by itself, as a provider's batch API does.
    #[arg(long, requires = "input", conflicts_with = "no_journal")]
    pub(crate) share_answers: bool,

    /// The orgs: base_url, dialect, and for each [[org]] name, key or key_env, base_url, cap. Without it they are read from
    /// the environment.
    #[arg(long, value_name = "FILE.toml", requires = "input")]
    pub(crate) orgs: Option<PathBuf>,

    /// Where every org is reached, whatever the file or the environment says.
    #[arg(long, value_name = "URL", requires = "input", value_parser = base_url)]
    pub(crate) base_url: Option<Uri>,

    /// The API spoken: by the simulated provider, or by the orgs from the environment. Else the first line of the input tells, or
    /// the template; of a body alone the model tells: `claude` in its name is Anthropic's API, another one OpenAI's.
    #[arg(long, value_enum)]
    pub(crate) dialect: Option<Speech>,

    /// Use only this org.
    #[arg(long, value_name = "NAME")]
    pub(crate) single_org: Option<String>,

    /// The most concurrent calls per org and model family. Else TOWER_QUOTA_CAP_<FAMILY> from the environment, the org's
    /// own cap from the file, or a default for the family.
    #[arg(long, value_name = "N", value_parser = at_least_one::<NonZeroUsize>)]
    pub(crate) cap: Option<NonZeroUsize>,

    /// How often a request may fail before it ends as `transient`; a 429 does not count. Default 5.
    #[arg(long, value_name = "N", value_parser = at_least_one::<NonZeroU32>)]
    pub(crate) max_attempts: Option<NonZeroU32>,

    /// How long one attempt may take: 30s, 5m, or plain seconds.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10m")]
    pub(crate) timeout: Duration,

    /// How long one request may go on being answered by 429s, while nothing else gets on either; then it ends as
    /// `rate_limited`. Default 10m.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) patience: Option<Duration>,

    /// How long the whole run may take, counted from the first request. What is not answered by then ends as `deadline`.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) deadline: Option<Duration>,

    /// How long calls in flight may go on after the first Ctrl-C; then they end as `cancelled`. A second Ctrl-C ends at once.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,

    /// Which way requests go: each at once, or in the provider's batches, at half the price and within a day. Default direct.
    ///
    /// `auto` decides for each model by what is not answered yet, and says why: see --objective. What it knows of limits is in the headroom
    /// file.
    ///
    /// What is known of batches is kept in the journal: a run that was ended, however, goes on with the batches that it had submitted, whatever
    /// is said here, and none is paid for twice. What no batch answers goes directly.
    #[arg(long, value_enum)]
    pub(crate) route: Option<RouteArg>,

    /// What `--route auto` is good at. Default balanced.
    #[arg(long, value_enum)]
    pub(crate) objective: Option<ObjectiveArg>,

    /// The most rows of a batch. Default 1000, or as the planner says: much larger ones were seen to starve for hours.
    #[arg(long, value_name = "N", value_parser = at_least_one::<NonZeroUsize>)]
    pub(crate) batch_rows: Option<NonZeroUsize>,

    /// How many batches an org has at once. Default 4.
    #[arg(long, value_name = "N", value_parser = at_least_one::<NonZeroUsize>)]
    pub(crate) batch_in_flight: Option<NonZeroUsize>,

    /// How long a batch that is not full waits for its next row. Default 2s; while a file is read, thirty times as long, and at its end it
    /// goes at once.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) batch_linger: Option<Duration>,

    /// How long after its submission a batch is first asked about; later up to four times as rarely. Default 30s; at least 1s.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) batch_poll: Option<Duration>,

    /// After how long without a success a batch is cancelled, and what it has not done is sent directly. Default 4h.
    ///
    /// Anthropic counts no success before a batch has ended: there it is how long a batch may take.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) batch_stuck_after: Option<Duration>,

    /// How long to wait until a batch whose submission was not answered is looked for again.
    #[arg(long, value_name = "TIME", value_parser = duration, hide = true, requires = "route")]
    pub(crate) batch_look_again: Option<Duration>,

    /// When the run is ended early, cancel the batches that run. Else they go on, and are billed; the same command has their answers.
    #[arg(long)]
    pub(crate) cancel_on_exit: bool,

    /// Write the final report here too, as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) report: Option<PathBuf>,

    /// What tokens cost: `dated`, and for each [[model]] name, input, cached_input, cache_write, output, in dollars per million.
    /// Without it the list prices that this program came with, which may be old.
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) prices: Option<PathBuf>,

    /// Draw the run here at its end: per org limit, calls in flight, rate, quota left and 429s over time.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Tell neighbours here, every five seconds at most, what is left of each org's quotas: names, figures and their age, never a
    /// key. Several programs may name the same file. Else TOWER_QUOTA_HEADROOM_FILE from the environment, with --input and
    /// --status; else no such file is written.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) headroom_file: Option<PathBuf>,

    /// Print what the headroom file says, and send nothing: what remained of each quota when the provider said so, and whether that is
    /// fresh (less than a minute old), stale (less than an hour) or very stale.
    #[arg(long, conflicts_with_all = ["input", "output", "fresh", "retry_failed", "ordered", "report", "prices", "plot", "dry_run", "route", "single_org", "demo_requests", "demo_unlimited", "seed"])]
    pub(crate) status: bool,

    /// The same as JSON.
    #[arg(long, requires = "status")]
    pub(crate) json: bool,

    /// Check everything, say in one line what would be done, how long it takes and what it costs at most, as far as that can be
    /// known, and send nothing. Limits are known from the headroom file, if there is one.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// No progress; at the end one line.
    #[arg(long, short)]
    pub(crate) quiet: bool,

    /// How many requests the demonstration sends. Default 6000.
    // No default for clap to see: an argument that is always there would undo what others require.
    #[arg(long, value_name = "N", conflicts_with_all = ["input", "orgs", "base_url"])]
    pub(crate) demo_requests: Option<u64>,

    /// The demonstration's provider has no quota.
    #[arg(long, conflicts_with_all = ["input", "orgs", "base_url"])]
    pub(crate) demo_unlimited: bool,

    /// The seed of the demonstration's provider. Default 1.
    #[arg(long, value_name = "N", conflicts_with_all = ["input", "orgs", "base_url"])]
    pub(crate) seed: Option<u64>,
}

/// A [`Dialect`], as an argument.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Speech {
    /// `/v1/messages`.
    Anthropic,
    /// `/v1/chat/completions`.
    Openai,
}

impl From<Speech> for Dialect {
    fn from(speech: Speech) -> Self {
        match speech {
            Speech::Anthropic => Dialect::Anthropic,
            Speech::Openai => Dialect::OpenAi,
        }
    }
}

/// Which way requests go, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RouteArg {
    /// Each at once.
    Direct,
    /// In batches.
    Batch,
    /// As the planner says of what is not answered yet.
    Auto,
}

/// What a plan is to be good at, as an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ObjectiveArg {
    /// The least time.
    Latency,
    /// The least money.
    Cost,
    /// Twice as long for half the price is an even trade.
    Balanced,
}

impl Args {
    pub(crate) fn objective(&self) -> Objective {
        match self.objective {
            Some(ObjectiveArg::Latency) => Objective::Latency,
            Some(ObjectiveArg::Cost) => Objective::Cost,
            _ => Objective::Balanced,
        }
    }
}

/// How prompts are written, as an argument.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PromptForm {
    /// Plain text, one a line.
    Text,
    /// JSON arrays of strings.
    List,
}

impl From<PromptForm> for Prompts {
    fn from(form: PromptForm) -> Self {
        match form {
            PromptForm::Text => Prompts::Text,
            PromptForm::List => Prompts::List,
        }
    }
}

/// What a bad line does.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(crate) enum OnBadInput {
    /// It ends the run: of a file before anything is sent.
    #[default]
    Stop,
    /// It is named, counted and left out.
    Skip,
}

fn at_least_one<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| "must be a number, at least 1".to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    let duration = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?,
        Err(_) => {
            humantime::parse_duration(text).map_err(|_| "no time such as 30s, 5m, or plain seconds".to_owned())?
        }
    };
    if duration.is_zero() {
        return Err("must be more than zero".to_owned());
    }
    // Far from where adding it to the clock would overflow.
    if duration > Duration::from_secs(10 * 365 * 24 * 3600) {
        return Err("must be at most ten years".to_owned());
    }
    Ok(duration)
}

fn path(text: &str) -> Result<PathAndQuery, String> {
    match text.parse::<PathAndQuery>() {
        Ok(path) if text.starts_with('/') => Ok(path),
        _ => Err("no path that begins with /".to_owned()),
    }
}

fn base_url(text: &str) -> Result<Uri, String> {
    match text.parse::<Uri>() {
        Ok(uri) if matches!(uri.scheme_str(), Some("http" | "https")) && uri.authority().is_some() => Ok(uri),
        _ => Err("no address that begins with http:// or https://".to_owned()),
    }
}

/// Whether the path means a standard stream.
pub(crate) fn is_standard(path: &std::path::Path) -> bool {
    path.as_os_str() == "-"
}
