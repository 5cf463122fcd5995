//! The rows of tower's own contract.

use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    balance::OrgBalanceLayer,
    drive::Drive,
    org::Org,
    outcome::{ByStatus, Class},
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
};

use crate::{
    MS, SECOND, after, open, orgs, post, say, stack,
    support::{Probe, Reply, Script, answer, ask},
    within,
};

#[tokio::test(start_paused = true)]
async fn b145_every_waiter_is_woken_in_its_turn() {
    // Wherever one waits, so many wait, and one a second may go.
    for waiters in [1u32, 2, 3, 6, 7, 20] {
        for place in ["a slot", "a quota", "an org", "the gate", "the budget"] {
            let begin = Instant::now();
            let served = serve_one_a_second(place, waiters).await;
            let row = format!("{waiters} wait for {place}");
            assert_eq!(served.len(), waiters as usize, "{row}");
            let mut ends: Vec<_> = served.into_iter().map(|at| at - begin).collect();
            ends.sort_unstable();
            for (nth, end) in ends.into_iter().enumerate() {
                let most = (nth as u32 + 1) * (SECOND + 5 * MS) + SECOND;
                assert!(end <= most, "{row}: number {nth} is served after {end:?}");
            }
        }
    }
}

/// Lets `waiters` wait at one place that serves one a second, each with a task and so a waker of its own; when each was served.
async fn serve_one_a_second(place: &str, waiters: u32) -> Vec<Instant> {
    let org = Org::new("a").cap(1);
    let second = || Probe::new(|_| Reply::After(SECOND, answer(200, &[])));
    let settings = open().build().unwrap();
    match place {
        "a slot" => all(waiters, &AimdLimitLayer::with_settings(&org, &settings).layer(second())).await,
        "a quota" => {
            let told = [("anthropic-ratelimit-requests-limit", "60"), ("anthropic-ratelimit-requests-remaining", "0")];
            let probe = Probe::new(move |_| Reply::Now(Ok(answer(200, &told))));
            let mut service = QuotaHeaderLayer::new(&org).layer(probe);
            ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
            all(waiters, &service).await
        }
        "an org" | "the gate" => {
            let orgs = orgs(&[("a", 1)]);
            let layer = OrgBalanceLayer::new(orgs, move |org: &Org, probe: Probe| {
                AimdLimitLayer::with_settings(org, &settings).layer(probe)
            });
            let layer = if place == "the gate" { layer.max_unbound(1).unwrap() } else { layer };
            all(waiters, &layer.layer(second())).await
        }
        "the budget" => {
            // One token, and one more a second; each request needs one.
            let retry = RateLimitRetryLayer::builder()
                .classify(ByStatus)
                .backoff_base(MS)
                .retry_ratio(0.0)
                .min_retries_per_second(1.0)
                .build()
                .unwrap();
            // It begins with ten seconds' worth.
            let bad_first = |_: Request<Script>| {
                let mut first = true;
                move || Response::builder().status(if std::mem::take(&mut first) { 500 } else { 200 }).body(()).unwrap()
            };
            let seen = std::sync::Arc::new(std::sync::Mutex::new(std::collections::BTreeMap::new()));
            let service = retry.layer(service_fn(move |request: Request<Script>| {
                let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
                let answer = seen.lock().unwrap().entry(key).or_insert_with(|| bad_first(request))();
                std::future::ready(Ok::<_, std::io::Error>(answer))
            }));
            for _ in 0..10 {
                service.clone().oneshot(post_script()).await.unwrap();
            }
            all(waiters, &service).await
        }
        _ => unreachable!("{place}"),
    }
}

fn post_script() -> Request<Script> {
    Request::post("/").body(Script::default()).unwrap()
}

async fn all<S>(waiters: u32, service: &S) -> Vec<Instant>
where
    S: Service<Request<Script>> + Clone + 'static,
    S::Error: std::fmt::Debug,
{
    let tasks = tokio::task::LocalSet::new();
    let calls: Vec<_> = (0..waiters)
        .map(|_| {
            let service = service.clone();
            tasks.spawn_local(async move {
                drop(service.oneshot(post_script()).await.unwrap());
                Instant::now()
            })
        })
        .collect();
    let mut ends = vec![];
    tasks
        .run_until(async {
            for call in calls {
                let end = tokio::time::timeout(60 * SECOND, call).await;
                ends.extend(end.ok().map(Result::unwrap));
            }
        })
        .await;
    ends
}

#[tokio::test(start_paused = true)]
async fn b146_with_all_orgs_dead_the_run_ends_and_with_one_left_it_goes_on() {
    // What each org answers, after how many good answers; and how many of thirty items come through.
    for (a, b, good, answered) in [
        (401, 401, 0, 0),
        (403, 403, 0, 0),
        (402, 402, 0, 0),
        (401, 403, 0, 0),
        (401, 200, 0, 30),
        (200, 403, 0, 30),
        (200, 200, 0, 30),
        (401, 401, 5, 10),
        (401, 401, 15, 30),
    ] {
        let (service, wire) = stack(
            &orgs(&[("a", 10), ("b", 10)]),
            |stack| stack,
            move |org, nth| {
                let status = if nth < good {
                    200
                } else if org == "a" {
                    a
                } else {
                    b
                };
                after(MS, Ok(say(status)))
            },
        );
        let begin = Instant::now();
        let mut drive = Drive::iter(service, (0..30).map(|id| (id, post())), 1).unwrap();
        let (mut ok, mut none_left) = (0, 0);
        while let Some((id, result)) = drive.next().await {
            match result {
                Ok(answer) => {
                    assert_eq!(answer.status(), 200, "item {id}");
                    ok += 1;
                }
                Err(tower_quota::drive::DriveError::Service(error)) => {
                    assert_eq!(error.class(), Some(Class::NoOrg), "item {id}");
                    assert!(error.is_redrivable());
                    none_left += 1;
                }
                Err(error) => panic!("item {id}: {error}"),
            }
        }
        let row = format!("{a} and {b} after {good}");
        assert_eq!(ok + none_left, 30, "{row}");
        // Which org takes how many of the good ones is chance.
        assert!(if good == 0 { ok == answered } else { ok <= answered && ok >= good }, "{row}: {ok}");
        assert!(begin.elapsed() < SECOND, "{row}: {:?}", begin.elapsed());
        assert!(wire.len() <= ok + 2, "{row}: a dead key costs one call");
    }
}

#[tokio::test(start_paused = true)]
async fn b148_a_readied_service_that_is_dropped_gives_back_what_it_held() {
    for readied in [1, 2, 3, 10] {
        // Slots.
        let org = Org::new("a").cap(3);
        let probe = Probe::new(|_| Reply::Now(Ok(answer(200, &[]))));
        let limiter = AimdLimitLayer::with_settings(&org, &open().build().unwrap()).layer(probe.clone());
        limiter.clone().oneshot(ask()).await.unwrap();
        let mut services: Vec<_> = (0..readied).map(|_| task::spawn(limiter.clone())).collect();
        let mut ready = 0;
        for service in &mut services {
            let poll = service.enter(|cx, mut service| Service::<Request<Script>>::poll_ready(&mut *service, cx));
            ready += usize::from(poll.is_ready());
        }
        assert_eq!((ready, org.snapshot().in_flight), (readied.min(3), readied.min(3)), "no readiness without a slot");
        assert_eq!(org.snapshot().waiting, readied.saturating_sub(3));
        drop(services);
        assert_eq!((org.snapshot().in_flight, org.snapshot().waiting), (0, 0));
        // A quota.
        let told = [("anthropic-ratelimit-requests-limit", "60"), ("anthropic-ratelimit-requests-remaining", "30")];
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(200, &told))));
        let meter = QuotaHeaderLayer::new(&Org::new("b")).layer(probe);
        meter.clone().oneshot(ask()).await.unwrap();
        let free = |meter: &_| {
            let mut kept = vec![];
            loop {
                let mut service: task::Spawn<tower_quota::quota::QuotaHeader<Probe>> = task::spawn(Clone::clone(meter));
                let poll = service.enter(|cx, mut service| Service::<Request<Script>>::poll_ready(&mut *service, cx));
                if poll.is_pending() {
                    return kept.len();
                }
                kept.push(service);
            }
        };
        let before = free(&meter);
        assert!(before >= 20, "{before}");
        let mut services: Vec<_> = (0..readied).map(|_| task::spawn(meter.clone())).collect();
        for service in &mut services {
            assert_ready!(service.enter(|cx, mut service| Service::<Request<Script>>::poll_ready(&mut *service, cx)))
                .unwrap();
        }
        assert_eq!(free(&meter), before - readied);
        drop(services);
        assert_eq!(free(&meter), before);
    }
}

#[tokio::test(start_paused = true)]
async fn b149_the_retry_budget_refills_with_time() {
    // What a second brings, and how many retries are asked for at once: when the last one goes.
    for (per_second, retries, seconds) in [
        (0.1, 1, 0.0),
        (0.1, 2, 10.0),
        (0.1, 3, 20.0),
        (1.0, 10, 0.0),
        (1.0, 11, 1.0),
        (1.0, 15, 5.0),
        (10.0, 100, 0.0),
        (10.0, 101, 0.1),
        (10.0, 150, 5.0),
    ] {
        let retry = RateLimitRetryLayer::builder()
            .classify(ByStatus)
            .backoff_base(MS)
            .retry_ratio(0.0)
            .min_retries_per_second(per_second)
            .build()
            .unwrap();
        let begin = Instant::now();
        let calls: Vec<_> = (0..retries)
            .map(|_| {
                let mut first = true;
                let once = service_fn(move |_: Request<()>| {
                    let status = if std::mem::take(&mut first) { 500 } else { 200 };
                    std::future::ready(Response::builder().status(status).body(()))
                });
                let service = retry.layer(Once(once));
                tokio::spawn(async move {
                    service.oneshot(Request::new(())).await.unwrap();
                    begin.elapsed()
                })
            })
            .collect();
        let mut last = Duration::ZERO;
        for call in calls {
            last = last.max(call.await.unwrap());
        }
        let expected = Duration::from_secs_f64(seconds);
        let row = format!("{retries} at {per_second} a second: {last:?}");
        assert!(within(last, expected.saturating_sub(2 * MS), expected + 5 * MS), "{row}");
    }
}

/// A service whose clones go on where it stands: a retry readies a clone.
#[derive(Clone)]
struct Once<S>(S);

impl<S: Service<R>, R> Service<R> for Once<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.0.call(request)
    }
}

#[tokio::test(start_paused = true)]
async fn b145_a_wake_is_not_lost_though_nobody_is_there_to_hear_it() {
    // A slot comes free when so many have gone away again who waited.
    for gone in [0, 1, 2, 5] {
        let org = Org::new("a").cap(1);
        let settings: Settings = open().build().unwrap();
        let limiter = AimdLimitLayer::with_settings(&org, &settings)
            .layer(Probe::new(|_| Reply::After(SECOND, answer(200, &[]))));
        let mut flying = task::spawn(limiter.clone().oneshot(ask()));
        assert_pending!(flying.poll());
        let mut waiters: Vec<_> = (0..gone).map(|_| task::spawn(limiter.clone().oneshot(ask()))).collect();
        waiters.iter_mut().for_each(|waiter| assert_pending!(waiter.poll()));
        drop(waiters);
        sleep(SECOND + MS).await;
        assert_ready!(flying.poll()).unwrap();
        let mut late = task::spawn(limiter.clone().oneshot(ask()));
        assert_pending!(late.poll());
        assert_eq!(org.snapshot().in_flight, 1, "it has the slot at once");
        sleep(SECOND + MS).await;
        assert!(late.is_woken());
        assert_ready!(late.poll()).unwrap();
    }
}
