//! The rows of the circuit breaker.

use std::time::Duration;

use http::Request;
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::AimdLimitLayer,
    health::{CircuitBreaker, OrgHealthLayer},
    observe::Event,
    org::{Circuit, Org},
    retry::RateLimitRetryLayer,
    stack::Stack,
};

use crate::{
    MS, SECOND, after, board, open, orgs, post, say, stack,
    support::{Probe, Reply, Script, answer, ask},
    within,
};

/// A stack whose circuits open at the first failure, and that tries once.
fn nervous(stack: Stack, probes: usize) -> Stack {
    let once = RateLimitRetryLayer::builder().max_attempts(1).build().unwrap();
    let breaker = CircuitBreaker::builder().consecutive(1).probes(probes).build().unwrap();
    stack.limit(open().build().unwrap()).retry(once).breaker(move |_| Box::new(breaker.clone()))
}

#[tokio::test(start_paused = true)]
async fn b82_half_open_admits_so_many_probes_until_one_settles() {
    // How many may probe at once, how many wait, and how many calls go before the first is answered.
    for (probes, waiting, calls) in
        [(1, 1, 1), (1, 2, 1), (1, 100, 1), (2, 1, 1), (2, 2, 2), (2, 3, 2), (2, 100, 2), (5, 100, 5)]
    {
        let orgs = orgs(&[("a", 200)]);
        let (service, wire) = stack(
            &orgs,
            |stack| nervous(stack, probes),
            |_, nth| async move {
                match nth {
                    0 => Ok(say(200)),
                    1 => Ok(say(500)),
                    _ => after(10 * SECOND, Ok(say(200))).await,
                }
            },
        );
        service.clone().oneshot(post()).await.unwrap();
        service.clone().oneshot(post()).await.unwrap_err();
        let begin = Instant::now();
        let tasks: Vec<_> = (0..waiting).map(|_| tokio::spawn(service.clone().oneshot(post()))).collect();
        let row = format!("{probes} probes, {waiting} waiting");
        for (at, seen) in [(490, 0), (610, calls), (5_000, calls), (10_490, calls), (10_700, waiting)] {
            sleep(at * MS - begin.elapsed()).await;
            assert_eq!(wire.len() - 2, seen, "{row}: after {at} ms");
            assert_eq!(
                board(&orgs, "a").circuit() == Circuit::HalfOpen,
                seen == calls && at < 10_500,
                "{row}: {at} ms"
            );
        }
        for task in tasks {
            assert_eq!(task.await.unwrap().unwrap().status(), 200, "{row}");
        }
        assert_eq!(board(&orgs, "a").circuit(), Circuit::Closed);
    }
}

#[tokio::test(start_paused = true)]
async fn b83_a_probe_that_never_settles_gives_its_place_back() {
    // What becomes of the probe, which is sent and then not answered for a second; and when the next one goes.
    for (fate, least, most) in [
        ("dropped", Duration::ZERO, Duration::ZERO),
        ("aborted", Duration::ZERO, Duration::ZERO),
        ("answered", 500 * MS, 501 * MS),
        ("refused", 500 * MS, 501 * MS),
        // A failure: the next cooldown.
        ("timed out", 1_500 * MS, 1_710 * MS),
        ("failed", 1_500 * MS, 1_710 * MS),
    ] {
        let orgs = orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| nervous(stack, 1).timeout(if fate == "timed out" { SECOND } else { 60 * SECOND }),
            move |_, nth| async move {
                match (nth, fate) {
                    (0, _) => Ok(say(500)),
                    (1, "answered") => after(SECOND, Ok(say(200))).await,
                    (1, "refused") => after(SECOND, Ok(say(400))).await,
                    (1, "failed") => after(SECOND, Ok(say(503))).await,
                    (1, _) => std::future::pending().await,
                    _ => Ok(say(200)),
                }
            },
        );
        service.clone().oneshot(post()).await.unwrap_err();
        sleep(700 * MS).await;
        let mut probe = tokio_test::task::spawn(service.clone().oneshot(post()));
        let task = if fate == "aborted" { Some(tokio::spawn(service.clone().oneshot(post()))) } else { None };
        if task.is_none() {
            assert!(probe.poll().is_pending());
        }
        tokio::task::yield_now().await;
        assert_eq!(wire.len(), 2, "{fate}: it is out");
        let next = tokio::spawn(service.clone().oneshot(post()));
        sleep(500 * MS).await;
        assert_eq!(wire.len(), 2, "{fate}: and it alone");
        let begin = Instant::now();
        match (fate, task) {
            ("dropped", _) => drop(probe),
            (_, Some(task)) => task.abort(),
            _ => drop(probe.await),
        }
        assert_eq!(next.await.unwrap().unwrap().status(), 200, "{fate}");
        let waited = wire.calls().last().unwrap().at - begin;
        assert!(within(waited, least, most), "{fate}: {waited:?}");
        assert_eq!(board(&orgs, "a").circuit(), Circuit::Closed);
    }
}

#[tokio::test(start_paused = true)]
async fn b85_what_is_no_failure_of_the_provider_opens_no_circuit() {
    // What a thousand calls are answered with, in turns; and whether the circuit opens.
    for (statuses, opens) in [
        (&[200][..], false),
        (&[400], false),
        (&[404], false),
        (&[413], false),
        (&[422], false),
        (&[429], false),
        (&[429, 400], false),
        // A failure now and then is none of too many.
        (&[500, 200, 200], false),
        (&[400, 500, 200, 429, 200, 200], false),
        (&[500, 200], true),
        (&[500], true),
        (&[529], true),
        (&[408], true),
    ] {
        let org = Org::new("a").cap(20);
        let opened = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        org.observe({
            let opened = opened.clone();
            move |event: &Event| {
                let is_open = matches!(event, Event::Circuit { circuit: Circuit::Open { .. }, .. });
                opened.fetch_add(usize::from(is_open), std::sync::atomic::Ordering::SeqCst);
            }
        });
        let probe = Probe::new(move |n| Reply::Now(Ok(answer(statuses[n % statuses.len()], &[]))));
        let limit = AimdLimitLayer::with_settings(&org, &open().build().unwrap());
        let mut service = OrgHealthLayer::new(&org).layer(limit.layer(probe));
        let begin = Instant::now();
        for _ in 0..1_000 {
            let ready = ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
            ready.call(ask()).await.unwrap();
        }
        let opened = opened.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(opened > 0, opens, "{statuses:?}: opened {opened} times");
        if !opens {
            assert_eq!(org.circuit(), Circuit::Closed, "{statuses:?}");
        }
        let limit = org.snapshot().limit.unwrap();
        let refusals = (0..1_000).filter(|n| statuses[n % statuses.len()] == 429).count();
        assert_eq!(limit.throttled, refusals as u64, "{statuses:?}");
        // What refuses every lone call is asked twice a minute.
        assert!(statuses != [429] || begin.elapsed() > 20_000 * SECOND, "the limiter is down: {:?}", begin.elapsed());
    }
}
