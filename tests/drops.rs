//! Ten thousand requests that are dropped at random points: nothing leaks, nothing panics, and no org is blamed.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::time::{sleep, timeout};
use tower::{Service, ServiceExt};
use tower_quota::{
    judge::{Gather, JudgeLayer},
    org::{Circuit, Credential, Org, Orgs},
    sim::{Change, Config, Dialect, Latency, OrgConfig, Sim},
    stack::Stack,
};

const MS: Duration = Duration::from_millis(1);
const ORGS: [&str; 3] = ["a", "b", "c"];

fn ask(item: usize) -> Request<Full<Bytes>> {
    let stream = item % 2 == 0;
    let body = format!(
        r#"{{"model":"claude-haiku-4-5","max_tokens":8,"stream":{stream},"messages":[{{"role":"user","content":"{item}"}}]}}"#
    );
    Request::post("/v1/messages").header("x-item-id", item).body(Full::new(body.into())).unwrap()
}

fn pool() -> Orgs {
    Orgs::new(ORGS.map(|name| Org::new(name).credential(Credential::new(&format!("key-{name}"))))).unwrap()
}

fn provider(org: impl Fn(OrgConfig) -> OrgConfig) -> Sim {
    let orgs = ORGS.map(|name| {
        org(OrgConfig::new(name, format!("key-{name}")).requests_per_minute(12_000.0).latency(Latency::new(60.0, 0.5)))
    });
    Sim::new(orgs.into_iter().fold(Config::new(Dialect::Anthropic), Config::org)).unwrap()
}

/// One request, dropped at a point that is drawn: at once, some time on its way, with some of its body read, or not at all.
async fn dropped<S, B>(mut service: S, item: usize, mut rng: fastrand::Rng)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>>,
    B: http_body::Body + Unpin,
{
    let ready = timeout(rng.u32(1..400) * MS, service.ready()).await;
    let Ok(Ok(service)) = ready else { return };
    match rng.u8(0..8) {
        // A readiness that is never used.
        0 => return,
        // Never polled.
        1 => return drop(service.call(ask(item))),
        _ => {}
    }
    let answer = timeout(rng.u32(1..2_000) * MS / rng.u32(1..10), service.call(ask(item))).await;
    let Ok(Ok(answer)) = answer else { return };
    let mut body = answer.into_body();
    for _ in 0..rng.u8(0..8) {
        if !matches!(timeout(rng.u32(1..60) * MS, body.frame()).await, Ok(Some(Ok(_)))) {
            return;
        }
    }
}

/// Whatever was dropped, all counts are zero once nothing is in flight.
fn at_rest(orgs: &Orgs, sim: &Sim) {
    for org in orgs.iter().flat_map(Org::families) {
        let seen = org.snapshot();
        assert_eq!((seen.in_flight, seen.waiting), (0, 0), "{seen:?}");
        for quota in &seen.quota {
            assert!(quota.reserved.abs() < 1e-6, "{quota:?}");
        }
    }
    assert!(sim.truth().orgs.iter().all(|org| org.in_flight == 0));
}

/// Whoever was a probe and was dropped has given its place back: each org is asked again, and by and by trusted as before.
async fn all_are_trusted_again<S, B>(service: S, orgs: &Orgs, sim: &Sim, from: usize)
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error: std::fmt::Debug> + Clone,
    B: http_body::Body<Error: std::fmt::Debug>,
{
    let before = sim.truth();
    // So many at once that each org is needed.
    let calls = (from..from + 1_200).map(|item| {
        let service = service.clone();
        async move { service.oneshot(ask(item)).await.unwrap().into_body().collect().await.unwrap() }
    });
    stream::iter(calls).buffer_unordered(100).for_each(|_| std::future::ready(())).await;
    let after = sim.truth();
    for (org, (before, after)) in orgs.iter().flat_map(Org::families).zip(before.orgs.iter().zip(&after.orgs)) {
        let seen = org.snapshot();
        assert_eq!((seen.circuit, seen.out.is_none(), seen.hold.is_none()), (Circuit::Closed, true, true), "{seen:?}");
        assert!(seen.health > 0.99, "{seen:?}");
        assert!(after.ok - before.ok > 200, "{}: {} of 1,200", before.name, after.ok - before.ok);
    }
    at_rest(orgs, sim);
}

async fn run(sim: &Sim, gather: Gather, calls: usize) -> Orgs {
    let orgs = pool();
    let stack = Stack::new(orgs.clone()).judge(JudgeLayer::new().gather(gather)).timeout(Duration::from_secs(5));
    let service = stack.build(sim.service()).unwrap();
    fastrand::seed(calls as u64);
    let mut rng = fastrand::Rng::with_seed(7);
    let mut tasks = vec![];
    for item in 0..calls {
        if item % 100 == 0 {
            sleep(80 * MS).await;
        }
        tasks.push(tokio::spawn(dropped(service.clone(), item, rng.fork())));
    }
    for task in tasks {
        task.await.expect("nothing panics");
    }
    at_rest(&orgs, sim);
    // And all of it still works, once the provider does.
    sleep(Duration::from_secs(10)).await;
    for item in calls..calls + 30 {
        let answer = service.clone().oneshot(ask(item)).await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.into_body().collect().await.unwrap();
    }
    at_rest(&orgs, sim);
    all_are_trusted_again(service, &orgs, sim, calls + 30).await;
    orgs
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_dropped_requests_leave_nothing_and_no_org_is_punished() {
    for gather in [Gather::Whole, Gather::ErrorsOnly] {
        let sim = provider(|org| org);
        let orgs = run(&sim, gather, 10_000).await;
        let truth = sim.truth();
        let abandoned: Vec<_> = truth.orgs.iter().map(|org| (org.calls, org.abandoned)).collect();
        assert!(
            abandoned.iter().all(|(_, abandoned)| *abandoned > 300),
            "dropped on their way, of calls: {abandoned:?}"
        );
        for org in &orgs {
            let seen = org.snapshot();
            assert_eq!((seen.health, seen.out.is_none(), seen.hold.is_none()), (1.0, true, true), "{seen:?}");
            assert_eq!(seen.circuit, Circuit::Closed);
            assert_eq!(seen.limit.unwrap().throttled, 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn so_it_is_where_calls_fail_back_off_and_are_probes() {
    for gather in [Gather::Whole, Gather::ErrorsOnly] {
        // Well again from ten seconds on.
        let well = Change {
            error_5xx: Some(false.into()),
            overloaded: Some(false.into()),
            reset: Some(false.into()),
            hang: Some(false.into()),
            truncate: Some(false.into()),
            empty: Some(false.into()),
            in_band: Some(false.into()),
            ..Change::default()
        };
        let sim = provider(|org| {
            let often = if org.name == "a" { 0.9 } else { 0.05 };
            let org =
                org.error_5xx(often).overloaded(0.05).reset(0.05).hang(0.05).truncate(0.05).empty(0.05).in_band(0.05);
            org.at(10.0, well.clone())
        });
        run(&sim, gather, 10_000).await;
    }
}
