//! A pool of which most orgs fail most calls: what a request's third attempt is worth.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{Caps, Settings},
    drive::Drive,
    observe::Event,
    org::{Circuit, Credential, Org, Orgs},
    outcome::BoxError,
    retry::RateLimitRetryLayer,
    sim::{Config, Dialect, Latency, OrgConfig, Sim, SimBody},
    stack::Stack,
};

/// The part of calls that each org fails.
const POOL: [(&str, f64); 5] = [("good", 0.1), ("fair", 0.15), ("bad", 0.9), ("worse", 0.9), ("worst", 0.95)];
const SLOTS: usize = 20;

/// The statuses that each item was answered with, attempt by attempt.
type Attempts = Arc<Mutex<BTreeMap<u64, Vec<u16>>>>;

fn watched(
    sim: &Sim,
    attempts: &Attempts,
) -> impl Service<Request<Full<Bytes>>, Response = Response<SimBody>, Error = BoxError, Future: Send> + Clone + Send + 'static
{
    let (service, attempts) = (sim.service(), attempts.clone());
    service_fn(move |request: Request<Full<Bytes>>| {
        let (service, attempts) = (service.clone(), attempts.clone());
        async move {
            let item = request.headers()["x-item-id"].to_str()?.parse()?;
            let answer = service.oneshot(request).await?;
            attempts.lock().unwrap().entry(item).or_default().push(answer.status().as_u16());
            Ok(answer)
        }
    })
}

#[tokio::test(start_paused = true)]
async fn third_attempts_are_answered_though_most_orgs_fail_most_calls() {
    let config = POOL.into_iter().fold(Config::new(Dialect::Anthropic), |config, (name, fails)| {
        let latency = Latency::new(50.0, 0.3);
        config.org(OrgConfig::new(name, format!("key-{name}")).latency(latency).error_5xx(fails))
    });
    let sim = Sim::new(config).unwrap();
    let orgs = POOL.map(|(name, _)| Org::new(name).credential(Credential::new(&format!("key-{name}"))));
    let settings = Settings::builder().caps(Caps::default().family("any", SLOTS).unwrap()).build().unwrap();
    let attempts = Attempts::default();
    let stack = Stack::new(Orgs::new(orgs).unwrap()).limit(settings);
    let service = stack.build(watched(&sim, &attempts)).unwrap();
    fastrand::seed(5);
    // What the good two answer of the calls that come, and are made again, fills 70 % of their slots.
    let each = Duration::from_secs_f64(0.05 / (2.0 * SLOTS as f64) / 0.7 * 1.15);
    let mut calls = vec![];
    for item in 0..12_000_u64 {
        sleep(each).await;
        let request = Request::post("/v1/messages").header("x-item-id", item);
        let request = request.body(Full::new(Bytes::from(format!("{{\"n\":{item}}}")))).unwrap();
        calls.push(tokio::spawn(service.clone().oneshot(request)));
    }
    let mut failed = 0;
    for call in calls {
        failed += usize::from(call.await.unwrap().is_err());
    }
    let attempts = attempts.lock().unwrap();
    let of = |nth: usize| {
        let made: Vec<_> = attempts.values().filter_map(|all| all.get(nth)).collect();
        (made.iter().filter(|status| ***status == 200).count(), made.len())
    };
    let shares: Vec<_> = sim.truth().orgs.iter().map(|org| (org.name.clone(), org.calls)).collect();
    println!("first {:?}, second {:?}, third {:?}; {failed} failed; {shares:?}", of(0), of(1), of(2));
    let (answered, made) = of(2);
    assert!(made > 50, "{made} third attempts are too few to tell");
    assert!(answered * 100 >= made * 80, "{answered} of {made} third attempts");
}

/// What fails is answered at once here, and what succeeds after 50 ms: of the first answers to forty calls all may be failures.
#[tokio::test(start_paused = true)]
async fn an_org_that_fails_a_part_of_its_calls_stays_open_though_failures_come_first() {
    for (fails, most) in [(0.1, 0.005), (0.2, 0.02), (0.3, 0.1)] {
        let latency = Latency::new(50.0, 0.3);
        let config = Config::new(Dialect::Anthropic).latency(latency).unlimited(true);
        let config =
            config.org(OrgConfig::new("some", "key-some").error_5xx(fails)).org(OrgConfig::new("none", "key-none"));
        let sim = Sim::new(config).unwrap();
        let orgs = ["some", "none"].map(|name| Org::new(name).credential(Credential::new(&format!("key-{name}"))));
        let orgs = Orgs::new(orgs).unwrap();
        let open = Arc::new(Mutex::new((Duration::ZERO, None)));
        let seen = open.clone();
        orgs.get("some").unwrap().observe(move |event: &Event| {
            if let Event::Circuit { circuit, .. } = event {
                let (open, since) = &mut *seen.lock().unwrap();
                match circuit {
                    Circuit::Closed => *open += since.take().map_or(Duration::ZERO, |since: Instant| since.elapsed()),
                    _ => *since = since.or(Some(Instant::now())),
                }
            }
        });
        let retry = RateLimitRetryLayer::builder().max_attempts(50).min_retries_per_second(1e6).build().unwrap();
        let service = Stack::new(orgs).retry(retry).build(sim.service()).unwrap();
        fastrand::seed(5);
        let begin = Instant::now();
        let items = (0..60_000_u64).map(|item| {
            let request = Request::post("/v1/messages").header("x-item-id", item).body(Full::<Bytes>::default());
            (item, request.unwrap())
        });
        let mut drive = Drive::iter(service, items, 400).unwrap();
        while let Some((_, result)) = drive.next().await {
            result.unwrap();
        }
        let part = open.lock().unwrap().0.div_duration_f64(begin.elapsed());
        println!("{fails} fail: open for {:.2} % of {:?}", part * 100.0, begin.elapsed());
        assert!(part <= most, "{fails}: {part}");
    }
}
