//! The health layer alone, and over the limiter: its circuit, its probes, dead and parked orgs, and tower's contract; over a
//! service that checks how it is used.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    io,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use support::{Probe, Reply, Script, answer, ask};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    health::{Breaker, CircuitBreaker, OrgHealth, OrgHealthLayer},
    judge::JudgeLayer,
    observe::Event,
    org::{Circuit, Family, HoldReason, Org, OutReason},
    outcome::{ByStatus, Class, Classify, Outcome, classify_fn},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// A guarded probe, on a mock task that knows whether it was woken.
type Guarded = tower_test::mock::Spawn<OrgHealth<Probe>>;

fn guarded(layer: &OrgHealthLayer, probe: &Probe) -> Guarded {
    Guarded::new(layer.layer(probe.clone()))
}

fn poll(service: &mut Guarded) -> Poll<io::Result<()>> {
    service.poll_ready::<Request<Script>>()
}

fn readied(layer: &OrgHealthLayer, probe: &Probe) -> Guarded {
    let mut service = guarded(layer, probe);
    assert_ready!(poll(&mut service)).unwrap();
    service
}

fn waiter(layer: &OrgHealthLayer, probe: &Probe) -> Guarded {
    let mut service = guarded(layer, probe);
    assert_pending!(poll(&mut service));
    service
}

/// A circuit that the first failure opens, with so many probes.
fn nervous(org: &Org, probes: usize) -> OrgHealthLayer {
    let breaker = CircuitBreaker::builder().consecutive(1).probes(probes).build().unwrap();
    OrgHealthLayer::with_breaker(org, breaker)
}

/// Fails at first, then answers when released.
fn fails_then_held() -> Probe {
    Probe::new(|n| if n == 0 { Reply::Now(Ok(answer(500, &[]))) } else { Reply::Released })
}

/// Opens the circuit by the first call.
async fn open(layer: &OrgHealthLayer, probe: &Probe) -> Instant {
    drop(readied(layer, probe).call(ask()).await);
    Instant::now()
}

fn is_open(org: &Org) -> bool {
    matches!(org.circuit(), Circuit::Open { .. })
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_for_an_open_circuit_is_woken_by_time_alone_and_one_of_them_passes() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    let mut waiters: Vec<_> = (0..10).map(|_| waiter(&layer, &probe)).collect();
    advance(499 * MS).await;
    assert!(waiters.iter_mut().all(|waiter| !waiter.is_woken()), "not before its time");
    advance(110 * MS).await;
    let woken: Vec<_> = waiters.iter().map(Guarded::is_woken).collect();
    assert_eq!(woken.iter().filter(|woken| **woken).count(), 2, "one more than can pass");
    assert!(woken[0] && woken[1], "the oldest");
    assert_ready!(poll(&mut waiters[0])).unwrap();
    assert_pending!(poll(&mut waiters[1]));
    assert_eq!(org.circuit(), Circuit::HalfOpen);
}

#[tokio::test(start_paused = true)]
async fn a_good_probe_lets_all_who_wait_pass() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    advance(SECOND).await;
    let mut first = readied(&layer, &probe);
    let mut call = task::spawn(first.call(ask()));
    assert_pending!(call.poll());
    let mut waiters: Vec<_> = (0..10).map(|_| waiter(&layer, &probe)).collect();
    probe.release(1, Ok(answer(200, &[])));
    assert!(waiters.iter().all(|waiter| !waiter.is_woken()), "its answer is not read");
    assert_ready!(call.poll()).unwrap();
    assert_eq!(org.circuit(), Circuit::Closed);
    for waiter in &mut waiters {
        assert!(waiter.is_woken());
        assert_ready!(poll(waiter)).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_probe_opens_it_for_twice_as_long_and_four_seconds_at_most() {
    let org = Org::new("a");
    let probe = Probe::new(|_| Reply::Now(Ok(answer(500, &[]))));
    let layer = nervous(&org, 1);
    let mut service = guarded(&layer, &probe);
    for _ in 0..8 {
        let readied = ServiceExt::<Request<Script>>::ready(service.get_mut()).await.unwrap();
        drop(readied.call(ask()).await);
    }
    let times = probe.times();
    let gaps: Vec<_> = times.windows(2).map(|two| two[1] - two[0]).collect();
    for (gap, least) in gaps.iter().zip([500, 1_000, 2_000, 4_000, 4_000, 4_000, 4_000]) {
        assert!(least * MS <= *gap && *gap <= least * MS * 6 / 5 + 2 * MS, "{gaps:?}");
        assert!(*gap < 5 * SECOND, "an org that has recovered is asked within five seconds");
    }
}

/// A probe that is reserved, or out.
#[tokio::test(start_paused = true)]
async fn whatever_is_dropped_gives_a_probes_place_back_and_wakes_the_next() {
    for called in [false, true] {
        let org = Org::new("a");
        let (layer, probe) = (nervous(&org, 1), fails_then_held());
        open(&layer, &probe).await;
        advance(SECOND).await;
        let mut first = readied(&layer, &probe);
        let call = called.then(|| task::spawn(first.call(ask())));
        let mut next = waiter(&layer, &probe);
        let health = org.health();
        drop((first, call));
        assert!(next.is_woken(), "{called}");
        assert_ready!(poll(&mut next)).unwrap();
        assert_eq!((org.circuit(), org.health()), (Circuit::HalfOpen, health), "{called}: nothing was learnt");
    }
}

#[tokio::test(start_paused = true)]
async fn a_called_waiter_that_is_dropped_hands_its_call_on() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    let mut waiters: Vec<_> = (0..4).map(|_| waiter(&layer, &probe)).collect();
    advance(SECOND).await;
    assert!(!waiters[2].is_woken());
    drop(waiters.remove(0));
    assert!(waiters[1].is_woken());
    drop(waiters.remove(0));
    assert_ready!(poll(&mut waiters[0])).unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_circuit_keeps_its_time_though_its_only_waiter_is_dropped() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    drop(waiter(&layer, &probe));
    let mut later = waiter(&layer, &probe);
    advance(SECOND).await;
    assert!(later.is_woken());
    assert_ready!(poll(&mut later)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_second_poll_ready_keeps_the_one_probe() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 2), fails_then_held());
    open(&layer, &probe).await;
    advance(SECOND).await;
    let mut service = readied(&layer, &probe);
    for _ in 0..5 {
        assert_ready!(poll(&mut service)).unwrap();
    }
    let _other = readied(&layer, &probe);
    waiter(&layer, &probe);
}

#[tokio::test(start_paused = true)]
async fn a_clone_starts_without_a_probe() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    advance(SECOND).await;
    let service = readied(&layer, &probe);
    let mut clone = Guarded::new(service.get_ref().clone());
    assert_pending!(poll(&mut clone));
    drop(clone);
    drop(service);
    readied(&layer, &probe);
}

#[tokio::test(start_paused = true)]
async fn the_inner_service_is_made_ready_first_and_while_it_is_not_no_probe_is_kept() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    advance(SECOND).await;
    probe.close(true);
    let mut waits = waiter(&layer, &probe);
    assert!(is_open(&org), "nobody probes");
    probe.close(false);
    assert!(waits.is_woken());
    let mut other = readied(&layer, &probe);
    assert_pending!(poll(&mut waits));
    let mut call = task::spawn(other.call(ask()));
    assert_pending!(call.poll());
}

#[tokio::test(start_paused = true)]
async fn a_circuit_that_opens_takes_back_no_readiness_and_counts_its_call_no_second_time() {
    let org = Org::new("a");
    let probe = Probe::new(|_| Reply::Now(Ok(answer(500, &[]))));
    let layer = nervous(&org, 1);
    let mut ready: Vec<_> = (0..5).map(|_| readied(&layer, &probe)).collect();
    drop(ready[0].call(ask()).await);
    let (circuit, health) = (org.circuit(), org.health());
    for service in &mut ready[1..] {
        assert_ready!(poll(service)).unwrap();
        drop(service.call(ask()).await);
    }
    assert_eq!((org.circuit(), org.health()), (circuit, health));
    assert!(org.load() < 1.5, "no penalty keeps the probe away: {}", org.load());
    assert_eq!(probe.calls(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_finished_future_that_is_still_held_keeps_nothing() {
    let org = Org::new("a");
    let (layer, probe) = (nervous(&org, 1), fails_then_held());
    open(&layer, &probe).await;
    advance(SECOND).await;
    let mut call = task::spawn(readied(&layer, &probe).call(ask()));
    assert_pending!(call.poll());
    probe.release(1, Ok(answer(429, &[])));
    drop(assert_ready!(call.poll()).unwrap());
    assert_eq!((probe.open(), probe.futures()), (0, 0));
    readied(&layer, &probe);
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn any_answer_to_a_probe_proves_life_and_what_says_nothing_makes_room_for_the_next() {
    let by_status = |result: Result<&Response<Script>, &io::Error>| match result {
        Err(_) => Outcome::of(Class::Local),
        Ok(response) if response.status() == 418 => Outcome::of(Class::Unprocessed),
        Ok(_) => Classify::classify(&ByStatus, result),
    };
    for (status, becomes) in [
        (Some(200), "closed"),
        (Some(400), "closed"),
        (Some(404), "closed"),
        (Some(413), "closed"),
        (Some(429), "closed"),
        (Some(401), "closed"),
        (Some(418), "half-open"),
        (None, "half-open"),
        (Some(500), "open"),
        (Some(529), "open"),
        (Some(408), "open"),
    ] {
        let org = Org::new("a");
        let probe = Probe::new(move |n| {
            let status = if n == 0 { Some(500) } else { status };
            Reply::Now(status.map(|status| answer(status, &[])).ok_or_else(|| io::ErrorKind::Other.into()))
        });
        let mut service = nervous(&org, 1).classify(classify_fn(by_status)).layer(probe);
        for _ in 0..2 {
            let _ = ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await;
        }
        assert_eq!(org.circuit().to_string(), becomes, "{status:?}");
        if becomes == "closed" {
            assert!(org.health() >= 0.5, "{status:?}: it may be asked like others: {}", org.health());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn health_falls_with_failures_rises_with_successes_and_heeds_nothing_else() {
    let org = Org::new("a");
    let statuses = [500, 503, 429, 400, 413, 401, 200, 200];
    let probe = Probe::new(move |n| Reply::Now(Ok(answer(statuses.get(n).copied().unwrap_or(200), &[]))));
    let layer = OrgHealthLayer::new(&org);
    let mut seen = vec![org.health()];
    for _ in 0..statuses.len() {
        drop(layer.layer(probe.clone()).oneshot(ask()).await);
        seen.push(org.health());
    }
    let near = |one: f64, other: f64| (one - other).abs() < 1e-9;
    let expected = [1.0, 0.85, 0.7225, 0.7225, 0.7225, 0.7225, 0.7225, 0.764_125, 0.799_506_25];
    assert!(seen.iter().zip(expected).all(|(seen, expected)| near(*seen, expected)), "{seen:?}");
    // What it lacks halves in ten seconds, and an answer then counts from there.
    advance(10 * SECOND).await;
    assert!(near(org.health(), 1.0 - 0.200_493_75 / 2.0), "{}", org.health());
    drop(layer.layer(probe.clone()).oneshot(ask()).await);
    assert!(near(org.health(), 1.0 - 0.200_493_75 / 2.0 * 0.85), "{}", org.health());
    for _ in 0..30 {
        drop(layer.layer(probe.clone()).oneshot(ask()).await);
    }
    assert_eq!((org.health(), org.snapshot().health), (1.0, 1.0));
}

#[tokio::test(start_paused = true)]
async fn a_failure_weighs_on_the_load_and_a_refusal_does_not() {
    for (status, weighs) in [
        (200, false),
        (500, true),
        (503, true),
        (529, true),
        (408, true),
        (429, false),
        (400, false),
        (404, false),
        (413, false),
    ] {
        let org = Org::new("a");
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(status, &[]))));
        drop(OrgHealthLayer::new(&org).layer(probe).oneshot(ask()).await);
        assert_eq!(org.load() > 1.9, weighs, "{status}: {}", org.load());
    }
}

#[tokio::test(start_paused = true)]
async fn failures_in_a_row_weigh_ever_more_and_a_success_ends_the_row() {
    // What is answered, one call after the other, and what the last one adds to the load.
    for (answers, adds) in [
        (&[500][..], 1.0),
        (&[500, 500], 2.0),
        (&[500, 500, 500], 4.0),
        (&[500, 500, 500, 500], 4.0),
        (&[500, 200, 500], 1.0),
        (&[500, 500, 200, 500], 1.0),
        (&[500, 500, 200, 500, 500], 2.0),
        // Nothing was learnt of it.
        (&[500, 429, 500], 2.0),
        (&[500, 400, 500], 2.0),
        (&[500, 200], 0.0),
    ] {
        let org = Org::new("a");
        let probe = Probe::new(move |n| Reply::Now(Ok(answer(answers[n], &[]))));
        let layer = OrgHealthLayer::new(&org);
        let mut before = 0.0;
        for _ in answers {
            before = org.load();
            drop(layer.layer(probe.clone()).oneshot(ask()).await);
        }
        assert_eq!(org.load() - before, adds, "{answers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_that_fails_passes_up_and_weighs_on_the_load_alone() {
    #[derive(Clone)]
    struct Broken;

    impl Service<Request<Script>> for Broken {
        type Response = Response<Script>;
        type Error = io::Error;
        type Future = std::future::Ready<io::Result<Response<Script>>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn call(&mut self, _: Request<Script>) -> Self::Future {
            unreachable!("it is never ready")
        }
    }

    let org = Org::new("a");
    let mut service = OrgHealthLayer::new(&org).layer(Broken);
    for _ in 0..10 {
        let error = ServiceExt::<Request<Script>>::ready(&mut service).await.map(drop).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
    assert!(org.load() > 10.0, "{}", org.load());
    assert_eq!((org.circuit(), org.health()), (Circuit::Closed, 1.0));
}

#[tokio::test(start_paused = true)]
async fn a_refused_key_is_out_and_a_refused_model_is_out_for_its_family() {
    for (status, out, reason) in [
        (401, true, Some(OutReason::Unauthorised)),
        (402, true, Some(OutReason::OutOfQuota)),
        (403, false, Some(OutReason::Forbidden)),
        (400, false, None),
        (404, false, None),
        (429, false, None),
    ] {
        let org = Org::new("a");
        let opus = org.family(&Family::new("opus"));
        let probe = Probe::new(move |_| Reply::Now(Ok(answer(status, &[]))));
        let layer = OrgHealthLayer::new(&opus);
        for _ in 0..2 {
            drop(layer.layer(probe.clone()).oneshot(ask()).await);
        }
        assert_eq!((org.is_out(), opus.out_reason()), (out, reason), "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_model_is_out_alone_where_the_request_says_which_it_is() {
    // Of which families requests are, each answered with a 403; for which models the org is out then; and whether for the family.
    let of = Family::of_model;
    for (asked, models, out) in [
        (vec![of("claude-opus-4-1")], &["claude-opus-4-1"][..], None),
        (vec![of("claude-opus-4-1"), of(" Claude-Opus-4-1 ")], &["claude-opus-4-1"], None),
        (vec![of("claude-opus-4-1"), of("claude-opus-4-0")], &["claude-opus-4-1", "claude-opus-4-0"], None),
        (vec![Family::new("opus")], &[], Some(OutReason::Forbidden)),
        (vec![of("claude-opus-4-1"), Family::new("opus")], &["claude-opus-4-1"], Some(OutReason::Forbidden)),
    ] {
        let org = Org::new("a");
        let told = Arc::new(Mutex::new(vec![]));
        let tell = told.clone();
        org.observe(move |event: &Event| tell.lock().unwrap().push(event.to_string()));
        let opus = org.family(&of("claude-opus-4-5"));
        assert_eq!(opus.model_family().model(), None, "a board is of no certain model");
        let layer = OrgHealthLayer::new(&opus);
        for family in asked.iter().chain(&asked) {
            let mut request = ask();
            request.extensions_mut().insert(family.clone());
            let probe = Probe::new(|_| Reply::Now(Ok(answer(403, &[]))));
            drop(layer.layer(JudgeLayer::new().layer(probe)).oneshot(request).await);
        }
        let shown = [opus.refused_models(), opus.snapshot().refused_models, org.snapshot().refused_models];
        for shown in shown {
            assert_eq!(shown.iter().map(|model| &**model).collect::<Vec<_>>(), models, "{asked:?}");
        }
        assert_eq!((opus.out_reason(), org.is_out()), (out.clone(), false), "{asked:?}");
        let mut said: Vec<_> = models
            .iter()
            .map(|model| format!("a (opus) is out: its key is not allowed {model}: ask for access, or remove it"))
            .collect();
        said.extend(out.map(|out| format!("a (opus) is out: {out}")));
        assert_eq!(*told.lock().unwrap(), said, "once each");
        assert!(org.bring_back());
        assert!(!org.bring_back() && opus.refused_models().is_empty() && !opus.is_out(), "{asked:?}");
        assert_eq!(told.lock().unwrap()[said.len()..], ["a is brought back"]);
    }
}

#[test]
fn an_org_that_refuses_ever_more_models_of_a_family_is_out_for_it() {
    let opus = Org::new("a").family(&Family::new("opus"));
    for model in 0..63 {
        opus.put_model_out(&format!("claude-opus-{model}"));
        assert!(!opus.is_out());
    }
    opus.put_model_out("claude-opus-63");
    assert_eq!(opus.out_reason(), Some(OutReason::Forbidden));
}

#[tokio::test(start_paused = true)]
async fn an_org_whose_quota_comes_back_on_a_date_is_held_until_then_and_asked_by_one_call() {
    let date = Instant::now() + 7_200 * SECOND;
    let classify = classify_fn(move |result: Result<&Response<Script>, &io::Error>| match result {
        Ok(response) if response.status() == 402 => Outcome::of(Class::OutOfQuota).not_before(Some(date)),
        _ => Classify::classify(&ByStatus, result),
    });
    let org = Org::new("a").family(&Family::default());
    let probe = Probe::new(|n| if n == 0 { Reply::Now(Ok(answer(402, &[]))) } else { Reply::Released });
    let layer = OrgHealthLayer::new(&org).classify(classify);
    let mut service = tower_test::mock::Spawn::new(layer.layer(probe.clone()));
    assert_ready!(service.poll_ready::<Request<Script>>()).unwrap();
    drop(service.call(ask()).await);
    let hold = org.snapshot().hold.unwrap();
    assert_eq!((hold.until, hold.reason), (date, HoldReason::OutOfQuota));
    assert!(org.is_held() && !org.is_out() && org.circuit() == Circuit::Closed && org.health() == 1.0);
    let mut waiters: Vec<_> = (0..5).map(|_| tower_test::mock::Spawn::new(layer.layer(probe.clone()))).collect();
    for waiter in &mut waiters {
        assert_pending!(waiter.poll_ready::<Request<Script>>());
    }
    advance(7_199 * SECOND).await;
    assert!(waiters.iter().all(|waiter| !waiter.is_woken()));
    advance(SECOND + MS).await;
    assert!(waiters[0].is_woken() && !org.is_held());
    assert_ready!(waiters[0].poll_ready::<Request<Script>>()).unwrap();
    assert_pending!(waiters[1].poll_ready::<Request<Script>>());
    let mut first = task::spawn(waiters[0].call(ask()));
    assert_pending!(first.poll());
    probe.release(1, Ok(answer(200, &[])));
    assert_ready!(first.poll()).unwrap();
    for waiter in &mut waiters[1..] {
        assert!(waiter.is_woken());
        assert_ready!(waiter.poll_ready::<Request<Script>>()).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn over_a_limiter_who_waits_keeps_a_slot_and_gives_it_back() {
    let org = Org::new("a").cap(2);
    let settings = Settings::builder().start(1.0).build().unwrap();
    let limit = AimdLimitLayer::with_settings(&org, &settings);
    let probe =
        Probe::new(|n| if n == 0 { Reply::Now(Ok(answer(200, &[]))) } else { Reply::Now(Ok(answer(500, &[]))) });
    let service = nervous(&org, 1).layer(limit.layer(probe));
    for _ in 0..2 {
        drop(service.clone().oneshot(ask()).await);
    }
    let mut waiting = task::spawn(service.clone().oneshot(ask()));
    assert_pending!(waiting.poll());
    assert_eq!(org.snapshot().in_flight, 1);
    drop(waiting);
    assert_eq!(org.snapshot().in_flight, 0);
}

/// A breaker of somebody's own is obeyed, and told what it needs to know.
#[tokio::test(start_paused = true)]
async fn another_breaker_may_be_brought() {
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Logs(Arc<Mutex<Vec<String>>>);

    impl Breaker for Logs {
        fn succeeded(&mut self, calls: u64, _: Instant, _: Instant) {
            self.0.lock().unwrap().push(format!("{calls} well"));
        }

        fn failed(&mut self, now: Instant) -> Option<Instant> {
            self.0.lock().unwrap().push("failed".into());
            Some(now + 10 * SECOND)
        }

        fn probe_failed(&mut self, now: Instant) -> Instant {
            self.0.lock().unwrap().push("probe failed".into());
            now + 20 * SECOND
        }

        fn closed(&mut self, _: Instant) {
            self.0.lock().unwrap().push("closed".into());
        }
    }

    let (org, log) = (Org::new("a"), Logs::default());
    let boxed: Box<dyn Breaker> = Box::new(log.clone());
    let statuses = [200, 200, 200, 429, 500, 500, 200, 200, 500];
    let probe = Probe::new(move |n| Reply::Now(Ok(answer(statuses[n], &[]))));
    let mut service = OrgHealthLayer::with_breaker(&org, boxed).layer(probe.clone());
    for _ in statuses {
        drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await);
    }
    let told = ["3 well", "failed", "probe failed", "closed", "1 well", "1 well", "failed"];
    assert_eq!(log.0.lock().unwrap()[..], told);
    let times = probe.times();
    let gap = |n: usize| times[n] - times[n - 1];
    assert!(
        gap(5) >= 10 * SECOND && gap(5) < 11 * SECOND && gap(6) >= 20 * SECOND && gap(6) < 21 * SECOND,
        "{times:?}"
    );
}
