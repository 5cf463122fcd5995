//! The example `judge`: what its caller is promised, over real HTTP against the simulated provider.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

#[path = "../examples/judge/judge.rs"]
#[allow(dead_code, reason = "the example uses all of it")]
mod judge;

use std::{collections::BTreeMap, path::Path, time::Duration};

use judge::{Category, Item, Settings, Verdict, judge_all_with};
use tower_quota::{
    client,
    org::{Credential, Org, Orgs},
    outcome::BoxError,
    sim::{Chance, Change, Config, Dialect, Latency, OrgConfig, Server, Sim},
};

const ITEMS: usize = 200;

fn items() -> Vec<Item> {
    let item = |n: usize| Item { id: format!("{n}"), question: format!("{n}?"), answer: "Yes.".to_owned() };
    (0..ITEMS).map(item).collect()
}

fn org(name: &str) -> OrgConfig {
    OrgConfig::new(name, format!("key-of-{name}")).requests_per_minute(60_000.0).output_tokens_range([20, 60])
}

async fn serve(orgs: [OrgConfig; 2]) -> Server {
    let config = Config::new(Dialect::Anthropic).latency(Latency::new(5.0, 0.3));
    Sim::new(orgs.into_iter().fold(config, Config::org)).unwrap().serve().await.unwrap()
}

async fn judged(server: &Server, items: Vec<Item>, cache: &Path) -> Result<BTreeMap<String, Verdict>, BoxError> {
    let config = server.sim().config();
    let orgs = config
        .orgs
        .iter()
        .map(|org| Org::new(&org.name).credential(Credential::new(org.key.expose())).base_url(server.base_url()));
    let settings = Settings { orgs: Orgs::new(orgs).unwrap(), patience: Duration::from_millis(300) };
    judge_all_with(items, settings, cache, client::http()).await
}

fn of(verdicts: &BTreeMap<String, Verdict>, category: Category) -> usize {
    verdicts.values().filter(|verdict| verdict.category == category).count()
}

#[tokio::test]
async fn every_item_has_one_verdict_and_what_was_only_refused_is_sent_again() {
    // Both refuse for the first second, and name a wait that is longer than the patience.
    let refusing = |so: bool| Change { black_hole: Some(so.into()), ..Change::default() };
    let faulty = |name| org(name).at(0.0, refusing(true)).at(1.0, refusing(false));
    let server = serve(["a", "b"].map(|name| faulty(name).error_5xx(Chance(0.02)).empty(Chance(0.01)))).await;
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let verdicts = judged(&server, items(), &cache).await.unwrap();
    assert_eq!(verdicts.len(), ITEMS);
    assert_eq!(of(&verdicts, Category::RateLimitedExhausted), 0, "{verdicts:?}");
    let truth = server.truth();
    assert!(truth.throttled_429() > 0);
    let scored = of(&verdicts, Category::Ok);
    assert!(scored > ITEMS * 8 / 10, "a sixteenth of the simulated answers ends in no score: {scored}");

    // What has a score comes from the cache; the others are asked for again, three times each.
    let again = judged(&server, items(), &cache).await.unwrap();
    let more = server.truth().calls() - truth.calls();
    assert!(more <= 3 * (ITEMS - scored) as u64 + 20, "{more}");
    for (id, verdict) in verdicts.iter().filter(|(_, verdict)| verdict.category == Category::Ok) {
        assert_eq!(again[id].score, verdict.score);
        assert_eq!(again[id].org, None, "it is from the cache");
    }
}

#[tokio::test]
async fn an_answer_without_a_score_is_the_items_own_fault_and_is_not_kept() {
    let server = serve([org("a"), org("b")]).await;
    let folder = tempfile::tempdir().unwrap();
    let verdicts = judged(&server, items(), &folder.path().join("cache")).await.unwrap();
    let without = of(&verdicts, Category::Error);
    assert!(without > 0 && without + of(&verdicts, Category::Ok) == ITEMS, "{verdicts:?}");
    // Three attempts each, and no org is the worse for it.
    assert_eq!(server.truth().calls(), (ITEMS + 2 * without) as u64);
    assert_eq!(server.truth().throttled_429(), 0);
}

#[tokio::test]
async fn an_answer_that_was_cut_short_is_asked_for_again_and_never_kept() {
    // 128 tokens are asked for at most, so half of the answers do not fit.
    let server = serve(["a", "b"].map(|name| org(name).output_tokens_range([65, 192]))).await;
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let verdicts = judged(&server, items(), &cache).await.unwrap();
    let calls = server.truth().calls();
    let cut =
        verdicts.values().filter(|it| it.reason.as_ref().is_some_and(|why| why.contains("stopped early"))).count();
    let without = of(&verdicts, Category::Error);
    assert!(cut > 0 && without < ITEMS / 2, "three attempts get most of them whole: {cut}, {without}");
    assert!(calls > ITEMS as u64 + 2 * cut as u64, "{calls}");
    judged(&server, items(), &cache).await.unwrap();
    assert!(server.truth().calls() - calls >= without as u64, "none of them was in the cache");
}

#[tokio::test]
async fn a_dead_key_costs_no_item_and_no_keys_left_is_a_verdict_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let server = serve([org("a").unauthorised(Chance(1.0)), org("b")]).await;
    let verdicts = judged(&server, items(), &folder.path().join("one")).await.unwrap();
    assert_eq!(of(&verdicts, Category::TransportExhausted), 0, "{verdicts:?}");
    let server = serve(["a", "b"].map(|name| org(name).unauthorised(Chance(1.0)))).await;
    let verdicts = judged(&server, items(), &folder.path().join("none")).await.unwrap();
    assert_eq!(of(&verdicts, Category::TransportExhausted), ITEMS, "{verdicts:?}");
}

#[tokio::test]
async fn an_id_that_comes_twice_is_refused_before_anything_is_sent_and_nothing_is_nothing() {
    let server = serve([org("a"), org("b")]).await;
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let twice: Vec<_> = items().into_iter().chain(items().into_iter().take(1)).collect();
    let error = judged(&server, twice, &cache).await.unwrap_err();
    assert!(error.to_string().contains("twice"), "{error}");
    assert!(judged(&server, vec![], &cache).await.unwrap().is_empty());
    assert_eq!(server.truth().calls(), 0);
}
