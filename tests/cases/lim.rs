//! The limiter's rows.

use std::{io, time::Duration};

use http::Request;
use tokio::time::{Instant, sleep, timeout};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::{AimdLimit, AimdLimitLayer, Settings},
    drive::Drive,
    health::CircuitBreaker,
    org::Org,
    outcome::Class,
    quota::{QuotaHeader, QuotaHeaderLayer},
    retry::RateLimitRetryLayer,
};

use crate::{
    MS, QUOTA, SECOND, board, open, orgs, post, reset, say, stack,
    support::{Probe, Reply, Script, answer, ask},
    with,
};

/// A limiter over a meter, so that an answer may tell the quota.
type Limited = AimdLimit<QuotaHeader<Probe>>;

fn limited(org: &Org, settings: &Settings, probe: &Probe) -> Limited {
    AimdLimitLayer::with_settings(org, settings).layer(QuotaHeaderLayer::new(org).layer(probe.clone()))
}

async fn ready(service: &mut Limited) -> &mut Limited {
    ServiceExt::<Request<Script>>::ready(service).await.unwrap()
}

fn limit(org: &Org) -> f64 {
    org.snapshot().limit.unwrap().limit
}

#[tokio::test(start_paused = true)]
async fn b59_a_burst_of_refusals_is_one_cut() {
    // A hundred in flight: how many of them are refused, whether with a hint, whether answers tell the quota, the limit then.
    for (refused, hinted, told, expected) in [
        (0, true, true, 100.0),
        (1, true, true, 50.0),
        (2, true, true, 50.0),
        (99, true, true, 50.0),
        (100, true, true, 50.0),
        (0, false, true, 100.0),
        (1, false, true, 90.0),
        (2, false, true, 90.0),
        (100, false, true, 90.0),
        // Where nothing tells the quota, the point of refusal does: what is left in flight fits. Half at most.
        (1, false, false, 99.0),
        (2, false, false, 98.0),
        (49, false, false, 51.0),
        (50, false, false, 50.0),
        (51, false, false, 50.0),
        (100, false, false, 50.0),
        (1, true, false, 99.0),
        (100, true, false, 50.0),
    ] {
        let row = format!("{refused} refused, hinted {hinted}, told {told}");
        let org = Org::new("a").cap(100);
        let quota = if told { &QUOTA[..] } else { &[] };
        let probe = Probe::new(move |n| if n == 0 { Reply::Now(Ok(answer(200, quota))) } else { Reply::Released });
        let mut service = limited(&org, &open().build().unwrap(), &probe);
        ready(&mut service).await.call(ask()).await.unwrap();
        let mut calls = vec![];
        for _ in 0..100 {
            calls.push(ready(&mut service).await.call(ask()));
        }
        let hint = if hinted { &[("retry-after", "5")][..] } else { &[] };
        for (n, call) in calls.drain(..refused).enumerate() {
            probe.release(n + 1, Ok(answer(429, hint)));
            call.await.unwrap();
        }
        assert_eq!(limit(&org), expected, "{row}");
        assert_eq!(org.snapshot().limit.unwrap().epoch, u64::from(refused > 0), "{row}");
        assert_eq!(org.is_held(), hinted && refused > 0, "{row}");
        if told && hinted && refused > 0 {
            // The next refusal belongs to another epoch: another cut.
            drop(calls);
            let sound = ready(&mut service).await.call(ask());
            probe.release(101, Ok(answer(200, quota)));
            sound.await.unwrap();
            let next = ready(&mut service).await.call(ask());
            probe.release(102, Ok(answer(429, hint)));
            next.await.unwrap();
            assert_eq!(limit(&org), expected / 2.0, "{row}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b61_growth_is_bounded_by_time_however_quick_the_answers() {
    // By what it may grow in a second, after how long, and what four slots may have become by then.
    for (growth, millis, most) in [
        (2.0, 500, 6.0),
        (2.0, 1_000, 8.0),
        (2.0, 2_000, 16.0),
        (4.0, 1_000, 16.0),
        (16.0, 500, 16.0),
        (16.0, 1_000, 64.0),
    ] {
        let org = Org::new("a").cap(100);
        let settings = Settings::builder().start(0.04).growth_per_second(growth).build().unwrap();
        let probe = Probe::new(|_| Reply::After(MS, answer(200, &[])));
        let service = limited(&org, &settings, &probe);
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..100 {
            let mut service = service.clone();
            tasks.spawn_local(async move {
                loop {
                    ready(&mut service).await.call(ask()).await.unwrap();
                }
            });
        }
        assert!(timeout(millis * MS, tasks).await.is_err());
        let seen = limit(&org);
        assert!((most / 2.0 - 1.0..=most).contains(&seen), "{seen} after {millis} ms at {growth} a second");
    }
}

#[tokio::test(start_paused = true)]
async fn b62_a_limit_grows_only_if_it_was_reached() {
    // So many callers for twenty slots, for ten windows.
    for (callers, grows) in [(1, false), (2, false), (18, false), (19, false), (20, true), (21, true)] {
        let org = Org::new("a").cap(80);
        let probe = Probe::new(|_| Reply::After(100 * MS, answer(200, &[])));
        let service = limited(&org, &Settings::default(), &probe);
        let mut first = service.clone();
        ready(&mut first).await.call(ask()).await.unwrap();
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..callers {
            let mut service = service.clone();
            tasks.spawn_local(async move {
                loop {
                    ready(&mut service).await.call(ask()).await.unwrap();
                }
            });
        }
        assert!(timeout(1_050 * MS, tasks).await.is_err());
        assert_eq!(limit(&org) > 20.0, grows, "{callers} callers: {}", limit(&org));
    }
    // Two calls a second, for ten minutes.
    let org = Org::new("a").cap(80);
    let probe = Probe::new(|_| Reply::Now(Ok(answer(200, &[]))));
    let mut service = limited(&org, &Settings::default(), &probe);
    for _ in 0..1_200 {
        ready(&mut service).await.call(ask()).await.unwrap();
        sleep(500 * MS).await;
    }
    assert_eq!(limit(&org), 20.0);
}

#[tokio::test(start_paused = true)]
async fn b64_every_attempt_is_one_permit_and_one_sample() {
    // What the first request is answered with before it goes through: each is a call, and takes a slot for itself only.
    for failures in [&[][..], &[500], &[500, 503], &[500, 503, 529], &[503, 503, 503, 503]] {
        let orgs = orgs(&[("a", 1)]);
        let answers = failures.to_vec();
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| {
                let answer = answers
                    .get(nth / 2)
                    .filter(|_| nth % 2 == 0)
                    .map_or(say(200), |status| with(*status, "retry-after", 10));
                async { Ok(answer) }
            },
        );
        let begin = Instant::now();
        let mut first = task::spawn(service.clone().oneshot(post()));
        for n in 0..failures.len() {
            assert_pending!(first.poll());
            let seen = board(&orgs, "a").snapshot();
            assert_eq!((seen.in_flight, seen.waiting), (0, 0), "{failures:?}, {n}: no permit while it backs off");
            // Another one goes between.
            assert!(service.clone().oneshot(post()).await.is_ok());
            assert_eq!(wire.len(), 2 * (n + 1));
            while !first.is_woken() {
                tokio::time::advance(SECOND).await;
            }
        }
        assert_eq!(first.await.unwrap().status(), 200);
        assert_eq!(wire.len(), 2 * failures.len() + 1, "{failures:?}");
        assert!(begin.elapsed() >= 10 * SECOND * failures.len() as u32);
    }
}

#[tokio::test(start_paused = true)]
async fn b65_no_slot_is_held_while_a_request_backs_off() {
    // The first answer; and whether a second request, over the one slot, is served at once.
    type Row = (&'static str, fn() -> crate::Answer, bool);
    let rows: [Row; 8] = [
        ("500", || Ok(say(500)), true),
        ("503 and five seconds", || Ok(with(503, "retry-after", 5)), true),
        ("529 and five seconds", || Ok(with(529, "retry-after", 5)), true),
        ("408", || Ok(say(408)), true),
        ("a reset", reset, true),
        ("a machine without files", || Err(io::Error::from_raw_os_error(24).into()), true),
        // The org itself is not to be called: that is a hold, and no slot.
        ("429 and five seconds", || Ok(with(429, "retry-after", 5)), false),
        ("429", || Ok(say(429)), false),
    ];
    for (row, first_answer, at_once) in rows {
        let orgs = orgs(&[("a", 1)]);
        let slow = RateLimitRetryLayer::builder().backoff_base(5 * SECOND).build().unwrap();
        let (service, _) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()).retry(slow),
            move |_, nth| async move { if nth == 0 { first_answer() } else { Ok(say(200)) } },
        );
        let mut first = task::spawn(service.clone().oneshot(post()));
        assert_pending!(first.poll());
        assert_eq!(board(&orgs, "a").snapshot().in_flight, 0, "{row}");
        let mut second = task::spawn(service.oneshot(post()));
        assert_eq!(second.poll().is_ready(), at_once, "{row}");
        drop(second);
        assert_eq!(first.await.unwrap().status(), 200, "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn b67_whatever_times_out_leaves_its_slot_free() {
    // So many calls that get no answer, and who gives them up.
    for who in ["the judge", "a timeout around", "the caller"] {
        for calls in [0, 1, 19, 20, 21] {
            let orgs = orgs(&[("a", 1)]);
            let once = RateLimitRetryLayer::builder().max_attempts(1).build().unwrap();
            let (service, wire) = stack(
                &orgs,
                |stack| {
                    let calm = CircuitBreaker::builder().consecutive(1_000).min_calls(1_000).build().unwrap();
                    let stack =
                        stack.limit(open().build().unwrap()).retry(once).breaker(move |_| Box::new(calm.clone()));
                    if who == "the judge" { stack.timeout(SECOND) } else { stack }
                },
                move |_, nth| async move {
                    if nth < calls {
                        std::future::pending::<()>().await;
                    }
                    Ok(say(200))
                },
            );
            for _ in 0..calls {
                let call = service.clone().oneshot(post());
                match who {
                    "the judge" => assert_eq!(call.await.unwrap_err().class(), Some(Class::Transport)),
                    "a timeout around" => assert!(timeout(SECOND, call).await.is_err()),
                    _ => assert_pending!(task::spawn(call).poll()),
                }
            }
            let mut ok = task::spawn(service.oneshot(post()));
            assert_eq!(assert_ready!(ok.poll()).unwrap().status(), 200, "{calls} given up by {who}");
            assert_eq!(wire.len(), calls + 1);
            assert_eq!(board(&orgs, "a").snapshot().in_flight, 0);
            assert_eq!(limit(&board(&orgs, "a")), 1.0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b68_a_cut_never_raises_a_limit() {
    for cap in [1, 2, 3, 4] {
        for floor in [1, 2, 3, 5] {
            for hint in [None, Some("1")] {
                let org = Org::new("a").cap(cap);
                let settings = open().floor(floor).build().unwrap();
                let probe = Probe::new(move |n| {
                    let refusal = hint.map_or(answer(429, &[]), |hint| answer(429, &[("retry-after", hint)]));
                    Reply::After(100 * MS, if n % 7 == 3 { refusal } else { answer(200, &[]) })
                });
                let service = limited(&org, &settings, &probe);
                let mut least = f64::INFINITY;
                let tasks = tokio::task::LocalSet::new();
                for _ in 0..20 {
                    let mut service = service.clone();
                    tasks.spawn_local(async move {
                        loop {
                            ready(&mut service).await.call(ask()).await.unwrap();
                        }
                    });
                }
                let watch = async {
                    for _ in 0..200 {
                        sleep(100 * MS).await;
                        let now = limit(&org);
                        least = least.min(now);
                        assert!(now <= cap as f64, "cap {cap}, floor {floor}: {now}");
                    }
                };
                tokio::select! { () = watch => {}, () = tasks => {} }
                assert!(probe.most() <= cap, "cap {cap}, floor {floor}: {}", probe.most());
                assert!(least >= floor.min(cap) as f64, "cap {cap}, floor {floor}: {least}");
                assert!(probe.calls() > 7);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b70_who_waits_for_a_slot_is_counted_on_the_board() {
    for waiters in [0, 1, 2, 3, 100] {
        let org = Org::new("a").cap(2);
        let probe = Probe::new(|_| Reply::Released);
        let service = limited(&org, &open().build().unwrap(), &probe);
        let mut holder = service.clone();
        ready(&mut holder).await;
        let mut waiting: Vec<_> = (0..waiters).map(|_| task::spawn(service.clone())).collect();
        for service in &mut waiting {
            assert_pending!(service.enter(|cx, mut service| Service::<Request<Script>>::poll_ready(&mut *service, cx)));
        }
        let seen = org.snapshot();
        assert_eq!((seen.in_flight, seen.waiting), (1, waiters));
        waiting.pop();
        assert_eq!(org.snapshot().waiting, waiters.saturating_sub(1));
        drop(waiting);
        assert_eq!(org.snapshot().waiting, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn b71_capacity_is_reached_in_a_few_round_trips() {
    // From four slots; the cap; and in how many windows of clean answers it is reached, and not before.
    for (cap, windows) in [(255, 6), (256, 6), (257, 7), (400, 7), (512, 7), (513, 8)] {
        let org = Org::new("a").cap(cap);
        let settings = Settings::builder().start(4.0 / cap as f64).build().unwrap();
        let probe = Probe::new(|_| Reply::Released);
        let mut service = limited(&org, &settings, &probe);
        let first = ready(&mut service).await.call(ask());
        probe.release(0, Ok(answer(200, &[])));
        first.await.unwrap();
        let mut sent = 1;
        for window in 1..=windows {
            assert!(limit(&org) < cap as f64, "{cap}: reached before window {window}");
            let mut calls = vec![];
            while let std::task::Poll::Ready(ready) = std::future::poll_fn(|cx| {
                std::task::Poll::Ready(Service::<Request<Script>>::poll_ready(&mut service, cx))
            })
            .await
            {
                ready.unwrap();
                calls.push(service.call(ask()));
            }
            sleep(100 * MS).await;
            for call in calls {
                probe.release(sent, Ok(answer(200, &[])));
                sent += 1;
                call.await.unwrap();
            }
        }
        assert_eq!(limit(&org), cap as f64, "{cap} in {windows}");
    }
}

/// A run that the limiter's rows end with: whatever was refused on the way, nothing is lost.
#[tokio::test(start_paused = true)]
async fn whatever_the_limiter_did_every_item_is_answered() {
    let orgs = orgs(&[("a", 10)]);
    let (service, _) = stack(
        &orgs,
        |stack| stack,
        |_, nth| {
            crate::after(
                Duration::from_millis(20),
                Ok(if nth % 11 == 10 { with(429, "retry-after-ms", 50) } else { say(200) }),
            )
        },
    );
    let mut drive = Drive::iter(service, (0..300).map(|id| (id, post())), 30).unwrap();
    let mut done = std::collections::BTreeSet::new();
    while let Some((id, result)) = drive.next().await {
        assert_eq!(result.unwrap().status(), 200);
        assert!(done.insert(id));
    }
    assert_eq!(done.len(), 300);
}
