//! The validation of the mission: 141,600 judge calls over three orgs as they were measured, by the earlier dispatcher's rules and by ours.
//!
//! ```sh
//! cargo run --release --example validation              # in virtual time: three to four minutes
//! cargo run --release --example validation -- --http    # a twentieth over real HTTP on loopback, killed with SIGKILL midway: two minutes
//! cargo run --release --example validation -- --http --earlier   # and the earlier rules over the same wire: eight minutes more
//! ```
//!
//! What is measured, what is modelled and how far the figures go: `docs/validation.md`. Exit code 1 if an id has not exactly one answer,
//! or the path that the mission took then is not five times as slow as ours.

mod batches;
mod earlier;
mod loopback;
mod ours;
mod run;
mod simulated;
mod work;

use std::{process::ExitCode, time::Duration};

use tower_quota::outcome::BoxError;

use run::Run;
use work::{MISSION, Work, dollars};

/// What one Python process managed, in calls a minute, as published: 8,000 calls over one org with up to 800 in flight; a job of 39,512 calls in
/// 18 minutes; 4,000 calls over two orgs with up to 200 in flight each. `docs/validation.md` has the sources.
const PROCESS: [f64; 3] = [1_414.0, 2_195.0, 3_206.0];

/// What the mission took then, as published.
const PUBLISHED: Duration = Duration::from_secs(14 * 3_600);

/// How much longer the earlier path is to take than ours.
const BAR: f64 = 5.0;

fn main() -> ExitCode {
    match validate(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("validation: {error}");
            ExitCode::from(2)
        }
    }
}

fn validate(args: &[String]) -> Result<bool, BoxError> {
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => virtually(&Work::new(MISSION)),
        ["--seed", seed] => virtually(&Work { seed: seed.parse()?, ..Work::new(MISSION) }),
        ["--calls", calls] => virtually(&Work::new(calls.parse()?)),
        ["--http"] => loopback::run(&[]),
        ["--http", "--earlier"] => loopback::run(&[PROCESS[0], PROCESS[2]]),
        ["--client", base_url, work, journal] => loopback::client(base_url, work, journal),
        _ => Err("usage: validation [--calls N | --seed N | --http [--earlier]]".into()),
    }
}

/// One run on a clock of its own.
fn in_virtual_time<T>(run: impl Future<Output = Result<T, BoxError>>) -> Result<T, BoxError> {
    tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build()?.block_on(run)
}

fn virtually(work: &Work) -> Result<bool, BoxError> {
    println!("{} calls, {} orgs, {} in flight an org at most\n", work.calls, work.orgs, work.cap);
    println!("{:<52} {:>10} {:>8} {:>7} {:>6} {:>6} {:>9}", "", "wall", "calls", "429s", "lost", "twice", "cost");
    let mut whole = true;
    let mut tell = |what: &str, run: &Run| {
        show(what, run);
        whole &= run.lost == 0 && run.twice == 0 && run.different == run.once;
    };

    let ours = in_virtual_time(simulated::ours(work))?;
    tell("ours", &ours);
    let mut earlier = vec![];
    for per_minute in PROCESS {
        let run = in_virtual_time(simulated::earlier(work, Some(per_minute)))?;
        tell(&format!("earlier rules, a process of {per_minute} a minute"), &run);
        earlier.push((per_minute, run));
    }
    let unbound = in_virtual_time(simulated::earlier(work, None))?;
    show("earlier rules, a process without a ceiling", &unbound);

    let wide = Work { cap: 300, ..work.clone() };
    let ours_wide = in_virtual_time(simulated::ours(&wide))?;
    tell("ours, caps of 300: the quota binds", &ours_wide);
    let earlier_wide = in_virtual_time(simulated::earlier(&wide, None))?;
    show("earlier rules, caps of 300, no ceiling", &earlier_wide);

    // Anywhere in the middle of it, and the same at each run of a seed.
    let until = ours.wall.mul_f64(0.2 + 0.6 * fastrand::Rng::with_seed(6 + work.seed).f64());
    let folder = tempfile::tempdir()?;
    let resumed = in_virtual_time(simulated::resumed(work, until, &folder.path().join("answers.journal")))?;
    tell("ours with a journal, killed midway and resumed", &resumed.run);
    println!(
        "    killed after {}: {} answered, {} alive; then {} calls; {} were on their way and paid for twice",
        spoken(resumed.until),
        resumed.before,
        resumed.alive,
        resumed.after,
        resumed.abandoned
    );
    let again = resumed.abandoned <= resumed.alive as u64;

    println!("\nwhat binds ours: caps allow it in {}, quotas in {}", spoken(work.by_caps()), spoken(work.by_quotas()));
    println!("with caps of 300: caps {}, quotas {}", spoken(wide.by_caps()), spoken(wide.by_quotas()));

    let one_org = Work { calls: 2_500, orgs: 1, ..work.clone() };
    let check = in_virtual_time(simulated::earlier(&one_org, None))?;
    println!(
        "\nthe model against what was measured: 2,500 calls over one org took {} here, 48.9 s then",
        spoken(check.wall)
    );

    println!(
        "\nthe earlier batch path, 8,000 rows a batch, four at once (a model: see examples/validation/batches.rs)"
    );
    println!("{:<52} {:>10} {:>10} {:>10}", "", "p10", "median", "p90");
    for (what, stuck, escape) in [
        ("one batch in ten stuck, no escape", 0.1, None),
        ("one in ten stuck, given up after four hours", 0.1, Some(PROCESS[0])),
        ("none stuck", 0.0, None),
    ] {
        let spread = batches::spread(batches::Model { stuck, escape_per_minute: escape }, work.seed);
        let [p10, median, p90] = [spread.p10, spread.median, spread.p90].map(spoken);
        println!("{what:<52} {p10:>10} {median:>10} {p90:>10}");
    }
    println!("{:<52} {:>10} {:>10}", "as published", "", spoken(PUBLISHED));
    let half = dollars(ours.input_tokens, ours.output_tokens) / 2.0;
    println!(
        "at half the price: ${half:.0} instead of ${:.0}. Time and cost are two figures: neither pays for the other",
        half * 2.0
    );

    println!("\nearlier ÷ ours, same tier, model, caps and number of calls; the bar is {BAR}");
    let ratio = |wall: Duration, ours: &Run| wall.as_secs_f64() / ours.wall.as_secs_f64();
    let tell =
        |what: &str, ratio: f64| println!("{what:<52} {ratio:>10.2}  {}", if ratio >= BAR { "met" } else { "missed" });
    // The path that was taken then.
    let published = ratio(PUBLISHED, &ours);
    tell("batches of 8,000, as published", published);
    for (per_minute, run) in &earlier {
        tell(&format!("direct, a process of {per_minute} a minute"), ratio(run.wall, &ours));
    }
    tell("direct, a process without a ceiling", ratio(unbound.wall, &ours));
    for (per_minute, run) in &earlier {
        tell(&format!("a process of {per_minute} a minute, ours with caps of 300"), ratio(run.wall, &ours_wide));
    }
    println!(
        "batches of 8,000 would be {BAR} × as slow as ours if each took {}",
        spoken(batches::a_batch_in(ours.wall.mul_f64(BAR)))
    );
    println!("\nevery id exactly one answer: {}", yes(whole && again));
    Ok(whole && again && (published >= BAR || work.calls != MISSION))
}

fn show(what: &str, run: &Run) {
    let cost = dollars(run.input_tokens, run.output_tokens);
    let wall = spoken(run.wall);
    println!(
        "{what:<52} {wall:>10} {:>8} {:>7} {:>6} {:>6} {:>9}",
        run.calls,
        run.refused,
        run.lost,
        run.twice,
        format!("${cost:.2}")
    );
    if let Some(failure) = &run.first_failure {
        println!("    {} without an answer, the first: {failure}", run.failed);
    }
}

fn yes(so: bool) -> &'static str {
    if so { "yes" } else { "NO" }
}

fn spoken(span: Duration) -> String {
    let s = span.as_secs_f64();
    match s {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7_200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3_600.0),
    }
}
