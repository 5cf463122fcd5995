//! A judge caller moved over: it builds its requests, reads and checks the answers, keeps them, and sends again only what was refused for
//! want of quota or failed on its way. What its callers see, [`judge::judge_all`], is as it was.
//!
//! With keys in the environment (`ANTHROPIC_API_KEY`, ...) three items are judged in earnest; without, four hundred over real HTTP by a
//! provider that is simulated on loopback. That one refuses everything at first, and fails now and then.
//!
//! ```sh
//! cargo run --example judge
//! ```

mod judge;

use std::{collections::BTreeMap, time::Duration};

use judge::{Category, Item, Settings, Verdict, judge_all, judge_all_with};
use tower_quota::{
    client,
    org::{Credential, Org, Orgs},
    outcome::BoxError,
    sim::{Chance, Change, Config, Dialect, OrgConfig, Sim},
};

const ITEMS: usize = 400;

fn items(count: usize) -> Vec<Item> {
    (0..count)
        .map(|n| Item {
            id: format!("draw-{n:03}"),
            question: format!("What is {n} plus {n}?"),
            answer: format!("It is {}.", n + n),
        })
        .collect()
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    if Orgs::from_env().is_ok() {
        let verdicts = judge_all(items(3)).await?;
        tell(&verdicts);
        return Ok(());
    }
    let org = |name: &str| {
        let refusing = |so: bool| Change { black_hole: Some(so.into()), ..Change::default() };
        OrgConfig::new(name, format!("key-of-{name}"))
            .requests_per_minute(12_000.0)
            .output_tokens_p50(40.0)
            .error_5xx(Chance(0.02))
            .empty(Chance(0.01))
            .reset(Chance(0.01))
            .at(0.0, refusing(true))
            .at(1.0, refusing(false))
    };
    let server = Sim::new(Config::new(Dialect::Anthropic).org(org("high-prio")).org(org("batch")))?.serve().await?;
    let folder = tempfile::tempdir()?;
    let cache = folder.path().join("judge.journal");
    let judge = async || {
        let orgs = ["high-prio", "batch"].map(|name| {
            Org::new(name).credential(Credential::new(&format!("key-of-{name}"))).base_url(server.base_url())
        });
        // What is refused is given up soon, to show that it is sent again.
        let settings = Settings { orgs: Orgs::new(orgs)?, patience: Duration::from_millis(300) };
        judge_all_with(items(ITEMS), settings, &cache, client::http()).await
    };

    let verdicts = judge().await?;
    tell(&verdicts);
    let truth = server.truth();
    let (calls, refused) = (truth.calls(), truth.throttled_429());
    println!("{calls} calls, of which {refused} were refused with a 429");
    assert_eq!(verdicts.len(), ITEMS, "every id has its verdict");
    let scored = verdicts.values().filter(|verdict| verdict.category == Category::Ok).count();
    assert!(refused > 0 && scored > ITEMS * 4 / 5, "what was refused was sent again");

    // Again: what has a score is in the cache, and what had none is asked for once more.
    let again = judge().await?;
    let more = server.truth().calls() - calls;
    println!("again: {more} calls");
    assert!(more < (ITEMS - scored) as u64 * 4, "nothing that was scored is sent again");
    assert!(again.values().filter(|verdict| verdict.org.is_none()).count() >= scored);
    Ok(())
}

fn tell(verdicts: &BTreeMap<String, Verdict>) {
    let mut counts = BTreeMap::new();
    for verdict in verdicts.values() {
        *counts.entry(verdict.category).or_insert(0) += 1;
    }
    let mean = verdicts.values().filter_map(|verdict| verdict.score).sum::<f64>()
        / verdicts.values().filter(|verdict| verdict.score.is_some()).count().max(1) as f64;
    println!("{} verdicts: {counts:?}, mean score {mean:.2}", verdicts.len());
    for (id, verdict) in verdicts.iter().filter(|(_, verdict)| verdict.score.is_none()).take(3) {
        println!("  {id}: {}", verdict.reason.as_deref().unwrap_or_default());
    }
}
