//! A twentieth of the mission over real HTTP on loopback, the client a process of its own that is killed with SIGKILL midway and begun
//! again over its journal. Caps, quotas and latencies are the whole mission's: so the rate is too, and only the time is shorter.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use http::Uri;
use tokio::time::Instant;
use tower_quota::{
    client,
    journal::FileStore,
    outcome::BoxError,
    sim::{Server, Sim},
};

use super::{
    earlier, ours,
    run::Run,
    show, spoken,
    work::{MISSION, Work},
    yes,
};

const PART: u64 = 20;

/// Ours, killed and resumed; then the earlier rules through a process that manages so many calls a minute.
pub(crate) fn run(plateaus: &[f64]) -> Result<bool, BoxError> {
    let work = Work::new(MISSION / PART);
    println!("{} calls over HTTP, {} orgs, {} in flight an org at most\n", work.calls, work.orgs, work.cap);
    println!("{:<52} {:>10} {:>8} {:>7} {:>6} {:>6} {:>9}", "", "wall", "calls", "429s", "lost", "twice", "cost");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let folder = tempfile::tempdir()?;

    let server = runtime.block_on(Sim::new(work.provider())?.serve())?;
    let whole = spawn(&server, &work, &folder.path().join("whole.journal"))?;
    let whole = counted(whole, &server)?;
    show("ours, in one go", &whole);

    // A fresh provider, with full buckets.
    let server = runtime.block_on(Sim::new(work.provider())?.serve())?;
    let journal = folder.path().join("killed.journal");
    let begin = Instant::now();
    let mut child = spawn(&server, &work, &journal)?;
    let until = whole.wall.mul_f64(0.2 + 0.6 * fastrand::Rng::with_seed(7).f64());
    std::thread::sleep(until);
    child.kill()?;
    child.wait()?;
    let calls = server.truth().calls();
    let mut killed = counted(spawn(&server, &work, &journal)?, &server)?;
    let truth = server.truth();
    killed.wall = begin.elapsed();
    show("ours, killed midway and resumed", &killed);
    let abandoned: u64 = truth.orgs.iter().map(|org| org.abandoned).sum();
    println!(
        "    SIGKILL after {}; then {} calls; paid twice: {abandoned} that were on their way, {} that were answered and not yet kept",
        spoken(until),
        truth.calls() - calls,
        truth.answered_more
    );
    // What was on its way through the journal when the process died is sent again: as a provider sees it, it was answered before.
    let bound = (2 * work.orgs * work.cap) as u64;
    let again = abandoned + killed.twice <= bound;
    let each =
        [&whole, &killed].iter().all(|run| run.lost == 0 && run.once == work.calls && run.different == work.calls);

    for &per_minute in plateaus {
        let server = runtime.block_on(Sim::new(work.provider())?.serve())?;
        let base_url = server.base_url();
        let going = earlier::go(&work, &base_url, client::http(), Some(per_minute));
        let (answers, wall) = runtime.block_on(going)?;
        let run = Run::new(wall, &answers, &server.truth());
        show(&format!("earlier rules, a process of {per_minute} a minute"), &run);
        println!("    {:.2} × ours in one go", run.wall.as_secs_f64() / whole.wall.as_secs_f64());
    }
    let rate = whole.once as f64 / whole.wall.as_secs_f64() * 60.0;
    println!(
        "\nours: {rate:.0} calls a minute from one process, start and end counted; caps allow it in {}",
        spoken(work.by_caps())
    );
    println!(
        "every id exactly one answer, paid twice no more than were alive: {}",
        yes(each && again && whole.twice == 0)
    );
    Ok(each && again && whole.twice == 0)
}

fn spawn(server: &Server, work: &Work, journal: &Path) -> Result<Child, BoxError> {
    let child = Command::new(std::env::current_exe()?)
        .arg("--client")
        .arg(server.base_url().to_string())
        .arg(serde_json::to_string(work)?)
        .arg(journal)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    Ok(child)
}

/// What the client says, with what the server has counted since it was started.
fn counted(child: Child, server: &Server) -> Result<Run, BoxError> {
    let said = child.wait_with_output()?;
    if !said.status.success() {
        return Err("the client failed: its own words are above".into());
    }
    let client: Run = serde_json::from_slice(&said.stdout)?;
    let truth = server.truth();
    let theirs = Run::new(client.wall, &super::run::Answers::new(0), &truth);
    let Run { wall, once, lost, different, failed, first_failure, .. } = client;
    Ok(Run { wall, once, lost, different, failed, first_failure, ..theirs })
}

/// The client process.
pub(crate) fn client(base_url: &str, work: &str, journal: &str) -> Result<bool, BoxError> {
    let work: Work = serde_json::from_str(work)?;
    let base_url: Uri = base_url.parse()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let store = FileStore::open(journal)?;
    let went = runtime.block_on(ours::go(&work, &base_url, client::http(), Some(store), None))?;
    let run = Run::new(went.wall.max(Duration::from_nanos(1)), &went.answers, &Default::default());
    println!("{}", serde_json::to_string(&run)?);
    Ok(true)
}
