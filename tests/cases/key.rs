//! The rows of keys and of whose quota they are.

use std::{collections::BTreeMap, time::Duration};

use http::Uri;
use tokio::time::Instant;
use tower::ServiceExt;
use tower_quota::{
    drive::{Drive, DriveError},
    org::{Credential, Dialect, Family, Org, Orgs, OutReason, Standing},
    outcome::{Class, Stamp},
    retry::RateLimitRetryLayer,
    sim::{Change, Config, Latency, OrgConfig, RetryAfter, Sim, Truth},
    stack::Stack,
};

use crate::{MS, Req, SECOND, after, open, post, say, stack, with, within};

/// What became of a run.
struct Ran {
    ok: usize,
    /// Good answers, by who gave them.
    by: BTreeMap<String, usize>,
    /// Ids that found no org, whose requests came back.
    none_left: usize,
    wall: Duration,
    truth: Truth,
    orgs: Orgs,
}

impl Ran {
    /// Calls that arrived with the key of this org of the provider.
    fn calls(&self, name: &str) -> u64 {
        self.truth.org(name).unwrap().calls
    }

    fn board(&self, name: &str) -> Org {
        self.orgs.get(name).unwrap().family(&Family::default())
    }

    fn seconds(&self) -> f64 {
        self.wall.as_secs_f64()
    }
}

fn provider(orgs: impl IntoIterator<Item = OrgConfig>) -> Config {
    orgs.into_iter().fold(Config::new(Dialect::Anthropic).latency(Latency::new(50.0, 0.0)), Config::org)
}

/// An org of the provider, with this key.
fn org(name: &str) -> OrgConfig {
    OrgConfig::new(name, format!("key-{name}"))
}

fn dead() -> Change {
    Change { unauthorised: Some(true.into()), ..Change::default() }
}

fn item(id: u64) -> Req {
    let mut request = post();
    request.headers_mut().insert("x-item-id", id.into());
    request
}

/// Sends `items` over a pool of orgs by their names, each with the key of an org of the provider, so many at once.
async fn run(
    config: Config,
    pool: &[(&str, &str)],
    shape: impl FnOnce(Stack) -> Stack,
    items: u64,
    bound: usize,
) -> Ran {
    fastrand::seed(7);
    let orgs = Orgs::new(pool.iter().map(|(name, of)| {
        let org = Org::new(name).credential(Credential::new(&format!("key-{of}")));
        org.base_url(Uri::from_static("http://provider.test"))
    }))
    .unwrap();
    let sim = Sim::new(config).unwrap();
    let service = shape(Stack::new(orgs.clone())).build(sim.service()).unwrap();
    let begin = Instant::now();
    let mut drive = Drive::iter(service, (0..items).map(|id| (id, item(id))), bound).unwrap();
    let (mut ok, mut by, mut none_left) = (0, BTreeMap::<String, usize>::new(), 0);
    while let Some((id, result)) = drive.next().await {
        match result {
            Ok(answer) => {
                assert_eq!(answer.status(), 200, "item {id}");
                ok += 1;
                let org = answer.extensions().get::<Stamp>().unwrap().org.clone().unwrap();
                *by.entry(org.name().to_owned()).or_default() += 1;
            }
            Err(DriveError::Service(error)) => {
                assert_eq!(error.class(), Some(Class::NoOrg), "item {id}: {error}");
                assert!(error.is_redrivable(), "item {id}");
                none_left += 1;
            }
            Err(error) => panic!("item {id}: {error}"),
        }
    }
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (ok as u64, 0), "none is lost, none is sent twice");
    for org in &orgs {
        let now = org.snapshot();
        assert_eq!((now.in_flight, now.waiting), (0, 0), "{now:?}");
    }
    Ran { ok, by, none_left, wall: begin.elapsed(), truth, orgs }
}

fn as_is(stack: Stack) -> Stack {
    stack
}

#[tokio::test(start_paused = true)]
async fn b43_a_dead_key_costs_what_was_in_flight_and_every_id_is_served() {
    // From when on A is refused, whose id it names; B serves, or is A's spare. The most calls that A may see then: its first
    // goes alone, later ones fly together.
    for (dies, ids, most) in [
        (Some(0.0), ["x", "y"], 1),
        (Some(0.0), ["x", "x"], 1),
        (Some(0.001), ["x", "y"], 25),
        (Some(0.2), ["x", "y"], 25),
        (Some(0.2), ["x", "x"], 25),
        (Some(1.0), ["x", "x"], 100),
        (None, ["x", "x"], 0),
    ] {
        let first = org("a").organization_id(ids[0]);
        let first = dies.into_iter().fold(first, |org, at| org.at(at, dead()));
        let config = provider([first, org("b").organization_id(ids[1])]);
        let ran = run(config, &[("a", "a"), ("b", "b")], as_is, 1_000, 20).await;
        let row = format!("dead from {dies:?}, {ids:?}");
        assert_eq!((ran.ok, ran.none_left), (1_000, 0), "{row}");
        let refused = ran.calls("a") - ran.by.get("a").copied().unwrap_or(0) as u64;
        assert!(refused <= most, "{row}: {refused} refused");
        assert_eq!(refused > 0, dies.is_some(), "{row}");
        let reason = ran.board("a").out_reason();
        assert_eq!(reason, dies.map(|_| OutReason::Unauthorised), "{row}");
        if dies.is_none_or(|at| at > 0.1) && ids[0] == ids[1] {
            // Both were known by then, and one was the other's spare.
            let standings = ["a", "b"].map(|name| ran.board(name).standing());
            assert!(standings.contains(&Standing::Spare), "{row}: {standings:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b44_a_dead_key_is_one_thing_and_one_that_was_merely_tried_another() {
    let hole = |until: f64| {
        let open = Change { black_hole: Some(false.into()), ..Change::default() };
        org("b").black_hole(true).at(until, open)
    };
    for (row, first, second, served) in [
        ("A dead, B refuses for two seconds", org("a").unauthorised(true), hole(2.0), true),
        (
            "A dead, B refuses without a hint",
            org("a").unauthorised(true),
            hole(2.0).retry_after(RetryAfter::None),
            true,
        ),
        ("A dead, B well", org("a").unauthorised(true), org("b"), true),
        ("A dead, B fails half the time", org("a").unauthorised(true), org("b").overloaded(0.5), true),
        ("both dead", org("a").unauthorised(true), org("b").unauthorised(true), false),
        (
            "both dead, and one organisation's",
            org("a").organization_id("x").unauthorised(true),
            org("b").organization_id("x").unauthorised(true),
            false,
        ),
    ] {
        let patient = |stack: Stack| stack.retry(RateLimitRetryLayer::builder().max_attempts(12).build().unwrap());
        let ran = run(provider([first, second]), &[("a", "a"), ("b", "b")], patient, 100, 5).await;
        assert_eq!((ran.ok, ran.none_left), if served { (100, 0) } else { (0, 100) }, "{row}");
        assert_eq!(ran.calls("a"), 1, "{row}: dead, it is never asked again");
        assert_eq!(ran.board("a").out_reason(), Some(OutReason::Unauthorised), "{row}");
        if served {
            assert!(!ran.board("b").is_out(), "{row}: refused, it is asked again");
        } else {
            assert_eq!((ran.calls("b"), ran.wall < SECOND), (1, true), "{row}: the run ends at once");
            assert_eq!(ran.board("b").out_reason(), Some(OutReason::Unauthorised), "{row}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b46_an_org_that_always_refuses_sees_a_few_probes_only() {
    // In what form A says when to come back, what it names, and the most calls that it may see. B takes ten a second.
    for (hint, wait, most) in [
        (RetryAfter::Seconds, 60.0, 4),
        (RetryAfter::Seconds, 5.0, 25),
        (RetryAfter::Seconds, 100_000.0, 2),
        (RetryAfter::None, 0.0, 15),
    ] {
        let bad = org("a").black_hole(true).black_hole_wait_s(wait).retry_after(hint);
        let ran =
            run(provider([bad, org("b").requests_per_minute(600.0)]), &[("a", "a"), ("b", "b")], as_is, 1_000, 20)
                .await;
        let row = format!("{hint:?} of {wait} s");
        assert_eq!((ran.ok, ran.by["b"]), (1_000, 1_000), "{row}");
        assert!((1..=most).contains(&ran.calls("a")), "{row}: {} probes in {:?}", ran.calls("a"), ran.wall);
    }
}

#[tokio::test(start_paused = true)]
async fn b46_an_org_without_credit_is_benched_for_the_run() {
    // What A is answered with, from which of its calls on; why it is out then; and the most calls that it may see more.
    for (status, from, reason, most) in [
        (402, 0, Some(OutReason::OutOfQuota), 1),
        (402, 1, Some(OutReason::OutOfQuota), 1 + 20),
        (402, 100, Some(OutReason::OutOfQuota), 1 + 20),
        (403, 100, Some(OutReason::Forbidden), 1 + 20),
        (401, 100, Some(OutReason::Unauthorised), 1 + 20),
        (200, 0, None, 1_000),
    ] {
        fastrand::seed(7);
        let orgs = crate::orgs(&[("a", 40), ("b", 40)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |org, nth| after(50 * MS, Ok(say(if org == "a" && nth >= from { status } else { 200 }))),
        );
        let mut drive = Drive::iter(service, (0..1_000).map(|id| (id, post())), 20).unwrap();
        while let Some((id, result)) = drive.next().await {
            assert_eq!(result.unwrap().status(), 200, "item {id}");
        }
        let row = format!("{status} from call {from} on");
        let refused = wire.of("a") - from;
        assert!((1..=most).contains(&refused), "{row}: {refused}");
        assert_eq!(crate::board(&orgs, "a").out_reason(), reason, "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn b47_a_refusal_sends_the_call_elsewhere_within_the_others_pace() {
    // How many B takes a second.
    for per_second in [5.0, 20.0, 100.0] {
        let bad = org("a").black_hole(true).black_hole_wait_s(60.0);
        let config = provider([bad, org("b").requests_per_minute(per_second * 60.0)]);
        let alone = provider([org("b").requests_per_minute(per_second * 60.0)]);
        let fluid = alone.fluid_limit(300).unwrap().as_secs_f64();
        let ran = run(config, &[("a", "a"), ("b", "b")], as_is, 300, 20).await;
        assert_eq!((ran.ok, ran.by["b"]), (300, 300));
        assert!(ran.seconds() < fluid * 1.1 + 1.5, "{per_second}/s: {:.1} s, fluid {fluid:.1} s", ran.seconds());
        assert!(ran.calls("a") <= 1 + ran.wall.as_secs() / 60 + 1, "{per_second}/s: {} probes", ran.calls("a"));
    }
}

#[tokio::test(start_paused = true)]
async fn b49_two_keys_of_one_organisation_are_one_quota() {
    // The keys that the pool has; those of one letter are one organisation's, with a quota of ten a second.
    for (pool, spares, quotas) in [
        (&[("k1", "x")][..], true, 1),
        (&[("k1", "x"), ("k2", "x")], true, 1),
        (&[("k1", "x"), ("k2", "x"), ("k3", "x")], true, 1),
        (&[("k1", "x"), ("k2", "y")], true, 2),
        (&[("k1", "x"), ("k2", "y"), ("k3", "x")], true, 2),
        (&[("k1", "x"), ("k2", "x")], false, 1),
    ] {
        let quota = |name: &str| org(name).organization_id(format!("org-{name}")).requests_per_minute(600.0);
        let config = provider([quota("x"), quota("y")]);
        let ran = run(config, pool, |stack| stack.spares(spares), 400, 40).await;
        let row = format!("{pool:?}, spares: {spares}");
        assert_eq!(ran.ok, 400, "{row}");
        let fluid = f64::from(400 - 20 * quotas) / f64::from(10 * quotas);
        assert!(
            (fluid - 0.2..fluid * 1.15 + 1.0).contains(&ran.seconds()),
            "{row}: {:.1} s, fluid {fluid} s",
            ran.seconds()
        );
        let throttled = ran.truth.throttled_429();
        let serving = pool.iter().filter(|(name, _)| ran.board(name).standing() == Standing::Enabled).count();
        if !spares {
            assert_eq!(serving, 2, "{row}");
            assert!(ran.by.values().all(|ok| *ok > 100), "{row}: both take their part: {:?}", ran.by);
            continue;
        }
        assert!(throttled <= 4, "{row}: {throttled} refused");
        assert_eq!(serving, usize::try_from(quotas).unwrap(), "{row}");
        for (name, _) in pool {
            let now = ran.board(name).snapshot();
            // Until its first answer nobody knows.
            let ok = ran.by.get(*name).copied().unwrap_or(0);
            assert!(now.spare_of.is_none() || ok <= 1, "{row}: {name} has served {ok}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b50_no_call_sleeps_out_a_hold_while_another_org_is_idle() {
    // For how many seconds A is spent, and whose quota B's is: with A's own it waits, as nothing else would help.
    for (wait, ids, least, most) in [
        (300, ["x", "y"], Duration::ZERO, SECOND),
        (1, ["x", "y"], Duration::ZERO, SECOND),
        (300, ["", ""], Duration::ZERO, SECOND),
        (30, ["x", "x"], 30 * SECOND, 31 * SECOND),
    ] {
        let orgs = crate::orgs(&[("a", 10), ("b", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |org, nth| {
                let refused = org == "a" && nth == 1;
                let mut answer = if refused { with(429, "retry-after", wait) } else { say(200) };
                let id = ids[usize::from(org == "b")];
                answer.headers_mut().insert("anthropic-organization-id", id.parse().unwrap());
                after(MS, Ok(answer))
            },
        );
        fastrand::seed(7);
        // Each answers once, so that its id is known; then it is A that serves, where they are one.
        let members = service.members();
        for (asked, quiet) in [("a", "b"), ("b", "a"), ("a", "b")] {
            members.enable(asked).unwrap();
            members.disable(quiet).unwrap();
            if wire.of(asked) == 0 {
                service.clone().oneshot(post()).await.unwrap();
            }
        }
        members.enable("b").unwrap();
        // Until A has refused one.
        let begin = Instant::now();
        while wire.of("a") < 2 {
            assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), 200);
        }
        let took = begin.elapsed();
        assert!(within(took, least, most), "{wait} s, {ids:?}: {took:?}");
        assert_eq!(wire.calls().last().unwrap().org == "a", ids == ["x", "x"], "{ids:?}: who served it");
    }
}
