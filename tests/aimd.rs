//! The limiter alone: its slots, its line, its holds, and tower's contract; over a service that checks how it is used.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::{
    collections::VecDeque,
    future::{Future, Ready, ready},
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use http_body::Body;
use http_body_util::BodyExt;
use support::{Probe, Reply, Script, Step, answer, ask, streaming};
use tokio::time::{Instant, advance, sleep, timeout};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimit, AimdLimitLayer, AtBodyEnd, AtHead, Release, Settings},
    org::{HoldReason, Org},
    outcome::{ByStatus, Class, Outcome, Stamp, classify_fn},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// A limiter over the probe, on a mock task that knows whether it was woken.
type Limited<R = AtBodyEnd> = tower_test::mock::Spawn<AimdLimit<Probe, ByStatus, R>>;
type Make<R> = fn(AimdLimitLayer) -> AimdLimitLayer<ByStatus, R>;

fn whole() -> tower_quota::aimd::SettingsBuilder {
    Settings::builder().start(1.0).spread(Duration::ZERO)
}

/// A limiter that starts at its cap once sounded.
fn full(cap: usize) -> (Org, AimdLimitLayer) {
    let org = Org::new("a").cap(cap);
    let layer = AimdLimitLayer::with_settings(&org, &whole().build().unwrap());
    (org, layer)
}

fn limited<R>(layer: &AimdLimitLayer<ByStatus, R>, probe: &Probe) -> Limited<R> {
    Limited::new(layer.layer(probe.clone()))
}

fn poll<R: Release<Response<Script>>>(service: &mut Limited<R>) -> Poll<io::Result<()>> {
    service.poll_ready::<Request<Script>>()
}

/// The first call, which goes alone.
async fn sound<R: Release<Response<Script>>>(layer: &AimdLimitLayer<ByStatus, R>, probe: &Probe) {
    let mut service = limited(layer, probe);
    assert_ready!(poll(&mut service)).unwrap();
    drop(service.call(ask()).await);
}

fn readied<R: Release<Response<Script>>>(layer: &AimdLimitLayer<ByStatus, R>, probe: &Probe) -> Limited<R> {
    let mut service = limited(layer, probe);
    assert_ready!(poll(&mut service)).unwrap();
    service
}

fn waiter<R: Release<Response<Script>>>(layer: &AimdLimitLayer<ByStatus, R>, probe: &Probe) -> Limited<R> {
    let mut service = limited(layer, probe);
    assert_pending!(poll(&mut service));
    service
}

/// How many would be admitted now.
fn free<R: Release<Response<Script>>>(layer: &AimdLimitLayer<ByStatus, R>, probe: &Probe) -> usize {
    let mut reserved = vec![];
    loop {
        let mut service = limited(layer, probe);
        if poll(&mut service).is_pending() {
            return reserved.len();
        }
        reserved.push(service);
    }
}

fn in_flight(org: &Org) -> usize {
    org.snapshot().in_flight
}

fn limit(org: &Org) -> f64 {
    org.snapshot().limit.unwrap().limit
}

fn epoch(org: &Org) -> u64 {
    org.snapshot().limit.unwrap().epoch
}

fn woken<R>(waiters: &[Limited<R>]) -> Vec<bool> {
    waiters.iter().map(Limited::is_woken).collect()
}

fn throttled(seconds: &str) -> Response<Script> {
    answer(429, &[("retry-after", seconds)])
}

/// Each of these holds whether a slot is kept until the head or until the end of the body.
macro_rules! both {
    ($(async fn $name:ident($make:ident) $body:block)*) => {
        mod either {
            use super::*;
            $(pub(super) async fn $name<R: Release<Response<Script>> + 'static>($make: Make<R>) $body)*
        }
        mod at_head {
            use super::*;
            $(#[tokio::test(start_paused = true)] async fn $name() { either::$name::<AtHead>(AimdLimitLayer::release_at_head).await; })*
        }
        mod at_body_end {
            use super::*;
            $(#[tokio::test(start_paused = true)] async fn $name() { either::$name::<AtBodyEnd>(|layer| layer).await; })*
        }
    };
}

both! {
    async fn a_second_poll_ready_keeps_the_one_reservation(make) {
        let (org, layer) = full(3);
        let (layer, probe) = (make(layer), Probe::good());
        sound(&layer, &probe).await;
        let mut service = readied(&layer, &probe);
        for _ in 0..5 {
            assert_ready!(poll(&mut service)).unwrap();
        }
        assert_eq!(in_flight(&org), 1);
        assert_eq!(free(&layer, &probe), 2);
        drop(service.call(ask()).await);
        assert_eq!(in_flight(&org), 0);
    }

    async fn a_clone_starts_without_a_reservation(make) {
        let (org, layer) = full(3);
        let (layer, probe) = (make(layer), Probe::good());
        sound(&layer, &probe).await;
        let first = readied(&layer, &probe);
        let mut clone = first.clone();
        assert_eq!(in_flight(&org), 1);
        assert_ready!(poll(&mut clone)).unwrap();
        assert_eq!(in_flight(&org), 2);
        drop(clone);
        assert_eq!(in_flight(&org), 1);
        drop(first);
        assert_eq!(in_flight(&org), 0);
    }

    async fn a_clone_of_a_waiter_does_not_wait(make) {
        let (org, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        let holder = readied(&layer, &probe);
        let waiting = waiter(&layer, &probe);
        let clone = waiting.clone();
        assert_eq!(org.snapshot().waiting, 1);
        drop(waiting);
        assert_eq!(org.snapshot().waiting, 0);
        drop((clone, holder));
    }

    async fn whatever_is_dropped_gives_its_slot_back_wakes_a_waiter_and_moves_no_limit(make) {
        let (org, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::held_after_the_first());
        sound(&layer, &probe).await;
        for stage in ["reserved", "unpolled", "flying", "answered", "body begun"] {
            let mut service = readied(&layer, &probe);
            let mut waiting = waiter(&layer, &probe);
            assert_eq!((in_flight(&org), org.snapshot().waiting), (1, 1), "{stage}");
            if stage == "reserved" {
                drop(service);
            } else {
                let n = probe.calls();
                let mut call = task::spawn(service.call(ask()));
                assert!(!waiting.is_woken(), "{stage}");
                if stage != "unpolled" {
                    assert!(call.poll().is_pending());
                    assert_eq!(probe.open(), 1);
                    assert!(!waiting.is_woken(), "{stage}");
                }
                if stage.starts_with("answered") || stage.starts_with("body") {
                    probe.release(n, Ok(streaming([Step::Data("a"), Step::Hang])));
                    let response = assert_ready!(call.poll()).unwrap();
                    drop(response);
                    // Held, and kept: it is done.
                    std::mem::forget(call);
                } else {
                    drop(call);
                }
            }
            assert!(waiting.is_woken(), "{stage}");
            assert_eq!(in_flight(&org), 0, "{stage}");
            assert_eq!(probe.open(), 0, "{stage}");
            assert_ready!(poll(&mut waiting)).unwrap();
            assert_eq!((in_flight(&org), org.snapshot().waiting), (1, 0), "{stage}");
            drop(waiting);
            assert_eq!(in_flight(&org), 0, "{stage}");
            assert_eq!((limit(&org), epoch(&org)), (1.0, 0), "{stage}");
        }
    }

    async fn a_finished_future_that_is_still_held_keeps_nothing(make) {
        let (org, layer) = full(2);
        let (layer, probe) = (make(layer), Probe::good());
        let mut service = readied(&layer, &probe);
        let mut call = task::spawn(service.call(ask()));
        let response = assert_ready!(call.poll()).unwrap();
        assert_eq!(in_flight(&org), 0, "an answer without a body keeps nothing either");
        assert_eq!(probe.futures(), 0, "nor is the future inside kept");
        assert_eq!(free(&layer, &probe), 2);
        drop((response, call));
    }

    async fn into_inner_gives_a_reserved_slot_back(make) {
        let (org, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        let service = readied(&layer, &probe);
        let waiting = waiter(&layer, &probe);
        let _inner = service.into_inner().into_inner();
        assert!(waiting.is_woken());
        assert_eq!(in_flight(&org), 0);
    }

    async fn free_and_in_flight_are_the_limit(make) {
        let (org, layer) = full(7);
        let (layer, probe) = (make(layer), Probe::held_after_the_first());
        sound(&layer, &probe).await;
        let mut rng = fastrand::Rng::with_seed(11);
        let mut reserved: Vec<Limited<R>> = vec![];
        let mut flying = vec![];
        for _ in 0..2_000 {
            match rng.u8(..5) {
                0 | 1 => {
                    let mut service = limited(&layer, &probe);
                    let _ = poll(&mut service);
                    reserved.push(service);
                }
                2 if !reserved.is_empty() => {
                    let at = rng.usize(..reserved.len());
                    let mut service = reserved.swap_remove(at);
                    if poll(&mut service).is_ready() {
                        flying.push(service.call(ask()));
                    }
                }
                3 if !reserved.is_empty() => drop(reserved.swap_remove(rng.usize(..reserved.len()))),
                4 if !flying.is_empty() => drop(flying.swap_remove(rng.usize(..flying.len()))),
                _ => {}
            }
            for service in &mut reserved {
                let _ = poll(service);
            }
            let ready = reserved.iter_mut().filter_map(|service| poll(service).is_ready().then_some(())).count();
            assert_eq!(in_flight(&org), ready + flying.len());
            assert!(in_flight(&org) == 7 || org.snapshot().waiting == 0, "nobody waits while one is free");
            assert_eq!(free(&layer, &probe), 7 - in_flight(&org));
        }
        drop((reserved, flying));
        assert_eq!((in_flight(&org), free(&layer, &probe)), (0, 7));
    }

    async fn waiters_are_served_in_the_order_they_came(make) {
        let (_, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::new(|_| Reply::After(10 * MS, answer(200, &[]))));
        let order = Arc::new(Mutex::new(vec![]));
        let tasks = tokio::task::LocalSet::new();
        for n in 0..20 {
            let (mut service, order) = (limited(&layer, &probe).into_inner(), order.clone());
            tasks.spawn_local(async move {
                sleep(n * MS / 100).await;
                ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                order.lock().unwrap().push(n);
                drop(service.call(ask()).await);
            });
        }
        tasks.await;
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
        assert_eq!(probe.most(), 1);
    }

    async fn a_newcomer_takes_nothing_from_one_that_was_called(make) {
        let (_, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        let holder = readied(&layer, &probe);
        let mut first = waiter(&layer, &probe);
        drop(holder);
        assert!(first.is_woken());
        let mut newcomer = waiter(&layer, &probe);
        assert_ready!(poll(&mut first)).unwrap();
        assert_pending!(poll(&mut newcomer));
    }

    async fn an_abandoned_waiter_delays_nobody(make) {
        let (org, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        let holder = readied(&layer, &probe);
        let abandoned = waiter(&layer, &probe);
        let mut second = waiter(&layer, &probe);
        drop(holder);
        assert!(abandoned.is_woken() && second.is_woken());
        for _ in 0..3 {
            assert_ready!(poll(&mut second)).unwrap();
            let mut third = waiter(&layer, &probe);
            drop(second);
            assert!(third.is_woken());
            assert_ready!(poll(&mut third)).unwrap();
            second = third;
        }
        drop(second);
        // It comes at last, and finds its place kept.
        let mut abandoned = abandoned;
        assert_ready!(poll(&mut abandoned)).unwrap();
        assert_eq!(in_flight(&org), 1);
    }

    async fn a_called_waiter_that_is_dropped_hands_its_call_on(make) {
        let (_, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        let holder = readied(&layer, &probe);
        let mut waiters: Vec<_> = (0..4).map(|_| waiter(&layer, &probe)).collect();
        drop(holder);
        assert_eq!(woken(&waiters), [true, true, false, false]);
        drop(waiters.drain(..2));
        assert_eq!(woken(&waiters), [true, true]);
        assert_ready!(poll(&mut waiters[0])).unwrap();
        assert_pending!(poll(&mut waiters[1]));
    }

    async fn an_event_wakes_one_more_than_it_frees_and_no_others(make) {
        let (_, layer) = full(4);
        let (layer, probe) = (make(layer), Probe::good());
        let mut waiters: Vec<_> = vec![];
        let first = readied(&layer, &probe);
        waiters.extend((0..20).map(|_| waiter(&layer, &probe)));
        let mut first = first;
        let answer = first.call(ask()).await;
        drop(answer);
        assert_eq!(woken(&waiters).iter().filter(|woken| **woken).count(), 5, "the depth is sounded: four may go");
        for service in &mut waiters[..4] {
            assert_ready!(poll(service)).unwrap();
        }
        assert_pending!(poll(&mut waiters[4]));
        drop(waiters.remove(0));
        assert_eq!(woken(&waiters[3..]).iter().filter(|woken| **woken).count(), 2);
        drop(waiters.remove(0));
        assert_eq!(woken(&waiters[2..]).iter().filter(|woken| **woken).count(), 3, "two are free, three were called");
    }

    async fn a_cut_while_others_wait_wakes_nobody_until_there_is_room(make) {
        let (org, layer) = full(4);
        let (layer, probe) = (make(layer), Probe::held_after_the_first());
        sound(&layer, &probe).await;
        let mut calls: Vec<_> =
            (0..4).map(|_| task::spawn(readied(&layer, &probe).call(ask()))).collect();
        for call in &mut calls {
            assert!(call.poll().is_pending());
        }
        let mut waiting = waiter(&layer, &probe);
        probe.release(1, Ok(answer(429, &[])));
        drop(assert_ready!(calls[0].poll()));
        assert_eq!((limit(&org), in_flight(&org)), (3.0, 3));
        assert!(!waiting.is_woken());
        assert_pending!(poll(&mut waiting));
        probe.release(2, Ok(answer(200, &[])));
        drop(assert_ready!(calls[1].poll()));
        assert!(waiting.is_woken());
        assert_ready!(poll(&mut waiting)).unwrap();
    }

    async fn reservations_made_before_a_cut_are_the_only_overshoot(make) {
        let (org, layer) = full(10);
        let (layer, probe) = (make(layer), Probe::new(|n| Reply::Now(Ok(if n == 1 { throttled("30") } else { answer(200, &[]) }))));
        sound(&layer, &probe).await;
        let mut reserved: Vec<_> = (0..5).map(|_| readied(&layer, &probe)).collect();
        let refused = readied(&layer, &probe).call(ask());
        drop(refused.await);
        assert!(org.is_held());
        assert_eq!(free(&layer, &probe), 0);
        let before = probe.calls();
        for service in &mut reserved {
            assert_ready!(poll(service)).unwrap();
            drop(service.call(ask()).await);
            assert_pending!(poll(service), "its next call waits as everybody's");
        }
        assert_eq!(probe.calls() - before, 5);
        assert_eq!(in_flight(&org), 0);
        advance(29 * SECOND).await;
        assert_eq!(free(&layer, &probe), 0, "good answers from before the hold do not end it");
    }

    async fn the_inner_service_is_made_ready_first_and_while_it_is_not_no_slot_is_kept(make) {
        let (org, layer) = full(1);
        let (layer, probe) = (make(layer), Probe::good());
        probe.close(true);
        let mut service = waiter(&layer, &probe);
        assert_eq!((in_flight(&org), org.snapshot().waiting), (0, 0));
        probe.close(false);
        assert!(service.is_woken());
        let before = probe.readies();
        let holder = readied(&layer, &probe);
        assert_eq!(probe.readies(), before + 1);
        assert_pending!(poll(&mut service));
        assert_eq!(probe.readies(), before + 2, "ready below, though no slot is free");
        assert_pending!(poll(&mut service));
        drop(holder);
        assert_ready!(poll(&mut service)).unwrap();
        assert_eq!(probe.readies(), before + 2);
    }

    async fn failures_give_the_slot_back_and_cut_nothing(make) {
        let (org, layer) = full(2);
        let probe = Probe::new(|n| {
            Reply::Now(match n {
                0 => Ok(answer(200, &[])),
                1 => Err(io::ErrorKind::ConnectionReset.into()),
                n => Ok(answer([400, 401, 403, 404, 408, 413, 500, 503, 529][n - 2], &[("retry-after", "60")])),
            })
        });
        let layer = make(layer);
        sound(&layer, &probe).await;
        for _ in 0..10 {
            let mut service = readied(&layer, &probe);
            drop(service.call(ask()).await);
            assert_eq!((in_flight(&org), limit(&org), epoch(&org)), (0, 2.0, 0));
            assert!(!org.is_held(), "only a 429 holds an org");
        }
        assert_eq!(probe.calls(), 11);
        assert_eq!(free(&layer, &probe), 2);
    }

    async fn twenty_timeouts_leave_every_slot_free(make) {
        let (org, layer) = full(2);
        let (layer, probe) = (make(layer), Probe::held_after_the_first());
        sound(&layer, &probe).await;
        for _ in 0..20 {
            let mut service = limited(&layer, &probe).into_inner();
            let call = async { ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await };
            assert!(timeout(SECOND, call).await.is_err());
        }
        assert_eq!((in_flight(&org), limit(&org)), (0, 2.0));
        assert_eq!(free(&layer, &probe), 2);
    }

    async fn a_hold_ends_with_its_hint(make) {
        let (org, layer) = full(4);
        let (layer, probe) = (make(layer), Probe::new(|n| Reply::Now(Ok(if n == 0 { throttled("30") } else { answer(200, &[]) }))));
        let start = Instant::now();
        sound(&layer, &probe).await;
        let hold = org.snapshot().hold.unwrap();
        assert_eq!((hold.reason, hold.until), (HoldReason::Hint, start + 30 * SECOND));
        let mut service = limited(&layer, &probe).into_inner();
        ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
        let waited = start.elapsed();
        assert!((30_000..=30_002).contains(&waited.as_millis()), "{waited:?}");
        assert!(!org.is_held() && org.snapshot().hold.is_none());
    }

    async fn a_hold_that_is_prolonged_while_others_wait_ends_later(make) {
        let (_, layer) = full(4);
        let probe = Probe::new(|n| match n {
            0 => Reply::Now(Ok(answer(200, &[]))),
            1 => Reply::Now(Ok(throttled("30"))),
            2 => Reply::After(20 * SECOND, throttled("40")),
            _ => Reply::Now(Ok(answer(200, &[]))),
        });
        let layer = make(layer);
        sound(&layer, &probe).await;
        let start = Instant::now();
        let (mut first, mut second) = (readied(&layer, &probe), readied(&layer, &probe));
        drop(first.call(ask()).await);
        let late = second.call(ask());
        let mut service = limited(&layer, &probe).into_inner();
        let (_, ()) = tokio::join!(async { drop(late.await) }, async {
            ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
        });
        let waited = start.elapsed();
        assert!((60_000..=60_002).contains(&waited.as_millis()), "{waited:?}");
    }

    async fn the_hold_keeps_its_time_though_its_only_waiter_is_dropped(make) {
        let (_, layer) = full(4);
        let (layer, probe) = (make(layer), Probe::new(|_| Reply::Now(Ok(throttled("30")))));
        sound(&layer, &probe).await;
        drop(waiter(&layer, &probe));
        let mut later = waiter(&layer, &probe);
        let last = waiter(&layer, &probe);
        drop(last);
        advance(29 * SECOND).await;
        assert!(!later.is_woken());
        advance(SECOND + MS).await;
        assert!(later.is_woken());
        assert_ready!(poll(&mut later)).unwrap();
    }

    async fn a_thousand_wait_out_a_hold_and_do_not_come_back_as_a_herd(make) {
        let (org, layer) = full(100);
        let probe = Probe::new(|n| match n {
            0 => Reply::Now(Ok(throttled("30"))),
            _ => Reply::After(100 * MS, answer(200, &[])),
        });
        let layer = make(layer);
        let start = Instant::now();
        sound(&layer, &probe).await;
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..1_000 {
            let mut service = limited(&layer, &probe).into_inner();
            tasks.spawn_local(async move {
                ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                drop(service.call(ask()).await);
            });
        }
        tasks.await;
        let times: Vec<_> = probe.times().into_iter().skip(1).map(|at| at - start).collect();
        assert_eq!(times.len(), 1_000);
        let before = |at: Duration| times.iter().filter(|time| **time < at).count();
        assert_eq!(before(30 * SECOND), 0);
        assert_eq!(before(30 * SECOND + 50 * MS), 1, "one goes first");
        assert_eq!(before(30 * SECOND + 250 * MS), 4, "one, one, two: by doubling");
        assert!(probe.most() <= 100);
        assert_eq!((in_flight(&org), org.snapshot().waiting), (0, 0));
    }

    async fn retry_after_zero_is_no_hint_and_does_not_reset_the_pause(make) {
        for zero in [throttled("0"), answer(429, &[]), throttled("-1"), throttled("soon"), throttled("Wed, 21 Oct 2015 07:28:00 GMT")] {
            let (org, layer) = full(40);
            let zero = Mutex::new(zero);
            let probe = Probe::new(move |_| Reply::Now(Ok(zero.lock().unwrap().clone())));
            let layer = make(layer);
            let start = Instant::now();
            let tasks = tokio::task::LocalSet::new();
            for _ in 0..40 {
                let mut service = limited(&layer, &probe).into_inner();
                tasks.spawn_local(async move {
                    loop {
                        ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                        drop(service.call(ask()).await);
                    }
                });
            }
            assert!(timeout(60 * SECOND, tasks).await.is_err());
            let times: Vec<_> = probe.times().into_iter().map(|at| at - start).collect();
            let within = |from: u32, to: u32| times.iter().filter(|at| (from * SECOND..to * SECOND).contains(*at)).count();
            assert!((1..=4).contains(&within(0, 1)), "{times:?}");
            assert!(within(1, 20) <= 6, "{times:?}");
            assert!(within(20, 60) <= 3 && within(20, 60) >= 1, "{times:?}");
            assert_eq!(probe.most(), 1);
            assert_eq!(org.snapshot().limit.unwrap().throttled as usize, times.len());
        }
    }

    async fn one_bare_refusal_is_no_long_bench(make) {
        let (org, layer) = full(40);
        let (layer, probe) = (make(layer), Probe::new(|n| Reply::Now(Ok(answer(if n == 0 { 429 } else { 200 }, &[])))));
        sound(&layer, &probe).await;
        assert_eq!(org.snapshot().hold.unwrap().reason, HoldReason::Backoff);
        let start = Instant::now();
        let mut service = limited(&layer, &probe).into_inner();
        ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
        assert!((250 * MS..=314 * MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert_eq!(limit(&org), 40.0, "a call that went alone says nothing about how many may go together");
    }

    async fn a_hint_beyond_the_ceiling_parks_the_org_and_a_probe_reopens_it(make) {
        for hint in ["999999", "13262"] {
            let (org, layer) = full(10);
            let hint = hint.to_owned();
            let probe = Probe::new(move |n| Reply::Now(Ok(if n < 3 { throttled(&hint) } else { answer(200, &[]) })));
            let layer = make(layer);
            let start = Instant::now();
            sound(&layer, &probe).await;
            assert_eq!(org.snapshot().hold.unwrap().reason, HoldReason::Parked);
            for _ in 0..3 {
                let mut service = limited(&layer, &probe).into_inner();
                ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                assert_eq!(free(&layer, &probe), 0, "one probe at a time");
                drop(service.call(ask()).await);
            }
            let times: Vec<_> = probe.times().into_iter().map(|at| (at - start).as_secs()).collect();
            assert_eq!(times, [0, 300, 600, 900]);
            assert!(!org.is_held());
            assert_eq!(free(&layer, &probe), 1, "open again, and growing from one");
        }
    }

    async fn a_minute_is_waited_out(make) {
        let (_, layer) = full(10);
        let (layer, probe) = (make(layer), Probe::new(|n| Reply::Now(Ok(if n == 0 { throttled("61") } else { answer(200, &[]) }))));
        let start = Instant::now();
        sound(&layer, &probe).await;
        let mut service = limited(&layer, &probe).into_inner();
        drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap());
        assert_eq!(start.elapsed().as_secs(), 61);
        assert_eq!(probe.calls(), 2);
    }

    async fn a_burst_of_refusals_is_one_cut_and_growth_resumes_after_it(make) {
        let (org, layer) = full(100);
        let probe = Probe::new(|n| match n {
            0 => Reply::Now(Ok(answer(200, &[]))),
            1..=100 => Reply::After(MS * u32::try_from(10 * n).unwrap(), throttled("5")),
            _ => Reply::After(10 * MS, answer(200, &[])),
        });
        let layer = make(layer);
        sound(&layer, &probe).await;
        let start = Instant::now();
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..200 {
            let mut service = limited(&layer, &probe).into_inner();
            tasks.spawn_local(async move {
                loop {
                    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                    drop(service.call(ask()).await);
                }
            });
        }
        assert!(timeout(6_500 * MS, tasks).await.is_err());
        let cell = org.snapshot().limit.unwrap();
        assert_eq!((cell.epoch, cell.throttled), (1, 100), "a hundred refusals, one epoch");
        assert!((50.0..100.0).contains(&cell.limit), "halved once, and grown since: {}", cell.limit);
        let times: Vec<_> = probe.times().into_iter().map(|at| at - start).collect();
        let resumed = times[101];
        assert!((5_990..=6_005).contains(&resumed.as_millis()), "the last hint wins: {resumed:?}");
        assert!(times.len() > 500);
    }

    async fn the_limit_stands_still_while_it_is_not_reached(make) {
        let org = Org::new("a").cap(80);
        let layer = make(AimdLimitLayer::with_settings(&org, &Settings::default()));
        let probe = Probe::new(|_| Reply::After(300 * MS, answer(200, &[])));
        for _ in 0..1_200 {
            let mut service = limited(&layer, &probe).into_inner();
            drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await);
            sleep(200 * MS).await;
        }
        assert_eq!(limit(&org), 20.0);
    }

    async fn from_four_to_four_hundred_in_ten_round_trips(make) {
        let org = Org::new("a").cap(400);
        let settings = Settings::builder().start(0.01).build().unwrap();
        let layer = make(AimdLimitLayer::with_settings(&org, &settings));
        let probe = Probe::new(|_| Reply::After(100 * MS, answer(200, &[])));
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..500 {
            let mut service = limited(&layer, &probe).into_inner();
            tasks.spawn_local(async move {
                loop {
                    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                    drop(service.call(ask()).await);
                }
            });
        }
        assert!(timeout(1_050 * MS, tasks).await.is_err());
        assert_eq!(limit(&org), 400.0);
        assert!(probe.most() <= 400);
    }

    async fn a_cut_never_raises_a_limit_of_one(make) {
        let org = Org::new("a").cap(1);
        let settings = Settings::builder().floor(3).spread(Duration::ZERO).build().unwrap();
        let layer = make(AimdLimitLayer::with_settings(&org, &settings));
        let probe = Probe::new(|n| Reply::After(100 * MS, if n % 5 == 3 { throttled("1") } else { answer(200, &[]) }));
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..20 {
            let mut service = limited(&layer, &probe).into_inner();
            tasks.spawn_local(async move {
                loop {
                    ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap();
                    drop(service.call(ask()).await);
                }
            });
        }
        assert!(timeout(30 * SECOND, tasks).await.is_err());
        assert_eq!((probe.most(), limit(&org)), (1, 1.0));
        // A lone call that is refused after others were served starts a pace.
        assert!(probe.calls() > 30, "{}", probe.calls());
    }

    async fn a_caller_that_sleeps_before_it_retries_keeps_no_slot_and_every_attempt_is_a_sample(make) {
        let (org, layer) = full(1);
        let layer = make(layer);
        let probe = Probe::new(|n| Reply::After(10 * MS, answer(if (1..3).contains(&n) { 503 } else { 200 }, &[])));
        sound(&layer, &probe).await;
        let start = Instant::now();
        let retrying = async {
            let mut service = limited(&layer, &probe).into_inner();
            for _ in 0..3 {
                drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await);
                sleep(10 * SECOND).await;
            }
        };
        let other = async {
            sleep(5 * MS).await;
            let mut service = limited(&layer, &probe).into_inner();
            for _ in 0..10 {
                drop(ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await);
            }
            assert!(start.elapsed() < 150 * MS, "{:?}", start.elapsed());
        };
        tokio::join!(retrying, other);
        assert_eq!(probe.calls(), 1 + 3 + 10);
        assert_eq!((in_flight(&org), limit(&org)), (0, 1.0));
    }

    async fn the_longest_settings_overflow_nothing(make) {
        let settings = whole()
            .hold_ceiling(Duration::MAX)
            .spread(Duration::MAX)
            .backoff(Duration::MAX / 2, Duration::MAX)
            .build()
            .unwrap();
        for status in [answer(429, &[]), throttled("30")] {
            let org = Org::new("a").cap(4);
            let layer = make(AimdLimitLayer::with_settings(&org, &settings));
            let reply = Mutex::new(status);
            let probe = Probe::new(move |_| Reply::Now(Ok(reply.lock().unwrap().clone())));
            sound(&layer, &probe).await;
            assert!(org.is_held());
            drop(waiter(&layer, &probe));
        }
    }
}

#[tokio::test(start_paused = true)]
#[should_panic(expected = "`poll_ready` must say that a slot is reserved before `call`")]
async fn calling_a_clone_that_was_not_made_ready_panics() {
    let (_, layer) = full(4);
    let service = readied(&layer, &Probe::good());
    drop(service.clone().call(ask()));
}

// When a body gives its slot back.

/// A limiter of one slot, and an answer whose body is this script.
async fn streamed(body: Script) -> (Org, Response<tower_quota::aimd::Held<Script>>) {
    let (org, layer) = full(1);
    let body = Mutex::new(Some(Response::new(body)));
    let probe = Probe::new(move |_| Reply::Now(Ok(body.lock().unwrap().take().unwrap())));
    let mut service = readied(&layer, &probe);
    let response = service.call(ask()).await.unwrap();
    (org, response)
}

#[tokio::test(start_paused = true)]
async fn the_end_that_a_body_announces_gives_the_slot_back_without_a_further_poll() {
    let (org, mut response) = streamed(Script::new([Step::Data("a"), Step::Data("b")])).await;
    assert_eq!(in_flight(&org), 1);
    assert!(response.frame().await.unwrap().unwrap().is_data());
    assert_eq!(in_flight(&org), 1);
    assert_eq!(response.frame().await.unwrap().unwrap().into_data().unwrap(), "b");
    assert_eq!(in_flight(&org), 0);
    assert!(response.body().is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_announce_its_end_gives_the_slot_back_at_its_end() {
    let (org, mut response) = streamed(Script::new([Step::Data("a")]).coy()).await;
    assert!(response.frame().await.unwrap().is_ok());
    assert_eq!(in_flight(&org), 1);
    assert!(response.frame().await.is_none());
    assert_eq!(in_flight(&org), 0);
}

#[tokio::test(start_paused = true)]
async fn trailers_are_an_end_whether_announced_or_not() {
    for body in [Script::new([Step::Data("a"), Step::Trailers]), Script::new([Step::Data("a"), Step::Trailers]).coy()] {
        let (org, mut response) = streamed(body).await;
        assert!(response.frame().await.unwrap().unwrap().is_data());
        assert_eq!(in_flight(&org), 1);
        assert!(response.frame().await.unwrap().unwrap().is_trailers());
        assert_eq!(in_flight(&org), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_breaks_gives_the_slot_back_though_it_is_kept() {
    let (org, mut response) = streamed(Script::new([Step::Data("a"), Step::Break, Step::Hang])).await;
    assert!(response.frame().await.unwrap().is_ok());
    assert!(response.frame().await.unwrap().is_err());
    assert_eq!(in_flight(&org), 0);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_pending_keeps_its_slot_until_it_is_dropped() {
    let (org, response) = streamed(Script::new([Step::Data("a"), Step::Hang])).await;
    let mut reading = task::spawn(response.into_body());
    assert!(assert_ready!(reading.enter(|cx, body| body.poll_frame(cx))).is_some());
    for _ in 0..3 {
        assert_pending!(reading.enter(|cx, body| body.poll_frame(cx)));
        advance(3_600 * SECOND).await;
        assert_eq!(in_flight(&org), 1);
    }
    drop(reading);
    assert_eq!(in_flight(&org), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_a_body_keeps_no_slot() {
    let (org, response) = streamed(Script::default()).await;
    assert_eq!(in_flight(&org), 0);
    drop(response);
    assert_eq!(in_flight(&org), 0);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_was_gathered_whole_keeps_no_slot_and_its_body() {
    let (org, layer) = full(1);
    for whole in [true, false] {
        let probe = Probe::new(move |_| {
            let mut response = streaming([Step::Data("a")]);
            let mut stamp = Stamp::new(Outcome::of(Class::Ok));
            stamp.whole = whole;
            response.extensions_mut().insert(stamp);
            Reply::Now(Ok(response))
        });
        let response = readied(&layer, &probe).call(ask()).await.unwrap();
        assert_eq!(in_flight(&org), usize::from(!whole));
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "a");
        assert_eq!(in_flight(&org), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_passes_unchanged_and_can_be_taken_out() {
    let script = Script::new([Step::Data("a"), Step::Data("b"), Step::Trailers]);
    let alive = Arc::downgrade(&script.alive);
    let (org, response) = streamed(script).await;
    assert_eq!(response.body().size_hint().exact(), Some(3), "the body's own hint");
    assert!(!response.body().is_end_stream());
    assert_eq!(response.body().get_ref().steps.len(), 3);
    let inner = response.into_body().into_inner();
    assert_eq!((in_flight(&org), inner.steps.len()), (0, 3));
    drop(inner);
    assert!(alive.upgrade().is_none());
}

#[tokio::test(start_paused = true)]
async fn at_the_head_the_slot_is_free_while_the_body_is_read() {
    let (org, layer) = full(1);
    let probe = Probe::new(|_| Reply::Now(Ok(streaming([Step::Data("a"), Step::Hang]))));
    let response: Response<Script> = readied(&layer.release_at_head(), &probe).call(ask()).await.unwrap();
    assert_eq!((in_flight(&org), response.body().steps.len()), (0, 2));
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_read_at_its_head_and_not_when_its_body_ends() {
    let (org, layer) = full(8);
    let probe = Probe::new(|n| {
        if n == 0 {
            return Reply::Now(Ok(answer(200, &[])));
        }
        let mut refusal = streaming([Step::Hang]);
        *refusal.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
        refusal.headers_mut().insert("retry-after", "30".parse().unwrap());
        Reply::Now(Ok(refusal))
    });
    sound(&layer, &probe).await;
    let response = readied(&layer, &probe).call(ask()).await.unwrap();
    assert!(org.is_held());
    // It went alone, so it says nothing about how many may go together.
    assert_eq!((in_flight(&org), limit(&org)), (1, 8.0));
    drop(response);
    assert_eq!((in_flight(&org), limit(&org)), (0, 8.0));
}

// Beyond HTTP.

#[derive(Debug)]
struct Busy(Duration);

#[tokio::test(start_paused = true)]
async fn a_service_that_is_not_http_is_limited_by_a_closure() {
    let org = Org::new("a").cap(4);
    let layer = AimdLimitLayer::with_settings(&org, &whole().build().unwrap())
        .classify(classify_fn(|result| match result {
            Ok(_) => Outcome::of(Class::Ok),
            Err(Busy(wait)) => Outcome::of(Class::Throttled).not_before(Some(Instant::now() + *wait)),
        }))
        .release_at_head();
    let mut service = layer.layer(service_fn(|n: u32| -> Ready<Result<u32, Busy>> {
        ready(if n < 100 { Ok(n + 1) } else { Err(Busy(5 * SECOND)) })
    }));
    assert_eq!(service.ready().await.unwrap().call(1).await.unwrap(), 2);
    assert!(service.ready().await.unwrap().call(100).await.is_err());
    assert!(org.is_held());
    assert_eq!(limit(&org), 4.0, "a call that went alone says nothing about how many may go together");
    let start = Instant::now();
    assert_eq!(service.ready().await.unwrap().call(2).await.unwrap(), 3);
    assert!((5_000..=5_002).contains(&start.elapsed().as_millis()));
    assert_eq!(in_flight(&org), 0);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_poll_ready_passes_and_takes_no_slot() {
    #[derive(Clone)]
    struct Fails(Arc<AtomicUsize>);
    impl Service<()> for Fails {
        type Response = ();
        type Error = &'static str;
        type Future = Ready<Result<(), &'static str>>;
        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(if self.0.fetch_add(1, SeqCst) == 0 { Err("not now") } else { Ok(()) })
        }
        fn call(&mut self, (): ()) -> Self::Future {
            ready(Ok(()))
        }
    }
    let (org, layer) = full(1);
    let layer = layer
        .classify(classify_fn(|result| Outcome::of(if result.is_ok() { Class::Ok } else { Class::Transport })))
        .release_at_head();
    let mut service = layer.layer(Fails(Arc::default()));
    assert_eq!(service.ready().await.err(), Some("not now"));
    assert_eq!(in_flight(&org), 0);
    service.ready().await.unwrap().call(()).await.unwrap();
    assert_eq!(in_flight(&org), 0);
}

// Runtimes.

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

async fn ready_within_a_minute(service: &mut Limited) {
    let ready = std::future::poll_fn(|cx| {
        // On the task that polls this, not on the mock one.
        Service::<Request<Script>>::poll_ready(service.get_mut(), cx)
    });
    timeout(60 * SECOND, ready).await.expect("woken at the end of the hold").unwrap();
}

#[test]
fn a_limiter_outlives_the_runtime_that_kept_its_time() {
    for first_waiter in ["dropped", "kept", "none"] {
        for first_runtime in ["ended", "idle"] {
            let (org, layer) = full(4);
            let probe = Probe::new(|n| Reply::Now(Ok(if n == 0 { throttled("30") } else { answer(200, &[]) })));
            let first = runtime();
            let mut kept = first.block_on(async {
                sound(&layer, &probe).await;
                match first_waiter {
                    "none" => None,
                    "dropped" => {
                        drop(waiter(&layer, &probe));
                        None
                    }
                    _ => Some(waiter(&layer, &probe)),
                }
            });
            let first = (first_runtime == "idle").then_some(first);
            let second = runtime();
            second.block_on(async {
                let mut service = limited(&layer, &probe);
                if let Some(kept) = &mut kept {
                    ready_within_a_minute(kept).await;
                    drop(kept.call(ask()).await);
                }
                ready_within_a_minute(&mut service).await;
                drop(service.call(ask()).await);
            });
            assert_eq!(in_flight(&org), 0, "{first_waiter} {first_runtime}");
            drop(first);
        }
    }
}

#[test]
fn a_waiter_moves_on_to_another_runtime_when_the_one_that_kept_the_time_ends() {
    let (_, layer) = full(4);
    let probe = Probe::new(|n| Reply::Now(Ok(if n == 0 { throttled("30") } else { answer(200, &[]) })));
    let (first, second) = (runtime(), runtime());
    first.block_on(sound(&layer, &probe));
    let mut here = second.block_on(async { waiter(&layer, &probe) });
    let there = first.block_on(async { waiter(&layer, &probe) });
    drop(first);
    assert!(here.is_woken(), "called to keep the time itself");
    second.block_on(ready_within_a_minute(&mut here));
    drop(there);
}

#[test]
fn a_slot_may_be_given_back_outside_any_runtime() {
    let (org, layer) = full(1);
    let probe = Probe::held_after_the_first();
    let runtime = runtime();
    let (service, mut waiting) = runtime.block_on(async {
        sound(&layer, &probe).await;
        (readied(&layer, &probe), waiter(&layer, &probe))
    });
    drop(service);
    assert!(waiting.is_woken());
    assert_ready!(poll(&mut waiting)).unwrap();
    assert_eq!(in_flight(&org), 1);
}

#[test]
fn a_slot_given_back_outside_any_runtime_during_a_hold_loses_nobody() {
    let (_, layer) = full(2);
    let probe = Probe::new(|n| Reply::Now(Ok(if n == 1 { throttled("30") } else { answer(200, &[]) })));
    let runtime = runtime();
    let (reserved, mut waiting) = runtime.block_on(async {
        sound(&layer, &probe).await;
        let (mut refused, reserved) = (readied(&layer, &probe), readied(&layer, &probe));
        let waiting = waiter(&layer, &probe);
        drop(refused.call(ask()).await);
        (reserved, waiting)
    });
    drop(reserved);
    runtime.block_on(ready_within_a_minute(&mut waiting));
}

#[test]
fn a_hold_that_begins_outside_any_runtime_calls_a_waiter_to_keep_its_time() {
    let (_, layer) = full(1);
    let probe = Probe::new(|n| Reply::Now(Ok(if n == 0 { throttled("30") } else { answer(200, &[]) })));
    let runtime = runtime();
    let (mut service, mut waiting) = runtime.block_on(async { (readied(&layer, &probe), waiter(&layer, &probe)) });
    let mut call = task::spawn(service.call(ask()));
    drop(assert_ready!(call.poll()));
    assert!(waiting.is_woken());
    runtime.block_on(async {
        assert_pending!(poll(&mut waiting));
        assert!(!waiting.is_woken(), "held");
        ready_within_a_minute(&mut waiting).await;
    });
}

// Against tower's own limiter.

#[tokio::test(start_paused = true)]
async fn with_a_fixed_limit_it_admits_exactly_what_towers_limiter_admits() {
    #[derive(Clone, Copy, PartialEq)]
    enum Is {
        Fresh,
        Waiting,
        Ready,
    }

    /// What one limiter did at each step: how many services are ready, how many wait, how many calls fly.
    async fn run<S>(clones: usize, new: impl Fn() -> S, probe: Probe, seed: u64) -> Vec<(usize, usize, usize)>
    where
        S: Service<Request<Script>, Error = io::Error>,
    {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut services: Vec<_> = (0..clones).map(|_| (tower_test::mock::Spawn::new(new()), Is::Fresh)).collect();
        let mut flying: VecDeque<(usize, S::Future)> = VecDeque::new();
        let mut seen = vec![];
        for _ in 0..400 {
            let (step, k) = (rng.u8(..7), rng.usize(..1_000));
            // The k-th of those that are so: which service it is may differ, how many there are must not.
            let pick = |services: &[(_, Is)], what| {
                let those: Vec<_> = (0..clones).filter(|i| services[*i].1 == what).collect();
                (!those.is_empty()).then(|| those[k % those.len()])
            };
            match step {
                0..=2 => {
                    if let Some(i) = pick(&services, Is::Fresh) {
                        let ready = services[i].0.poll_ready::<Request<Script>>().is_ready();
                        services[i].1 = if ready { Is::Ready } else { Is::Waiting };
                    }
                }
                3 => {
                    if let Some(i) = pick(&services, Is::Ready) {
                        flying.push_back((probe.calls(), services[i].0.call(ask())));
                        services[i].1 = Is::Fresh;
                    }
                }
                4 | 5 if !flying.is_empty() => {
                    let (n, call) = flying.remove(k % flying.len()).unwrap();
                    if step == 4 {
                        probe.release(n, Ok(answer(200, &[])));
                        drop(call.await);
                    }
                }
                _ => {
                    if let Some(i) = pick(&services, if k % 2 == 0 { Is::Ready } else { Is::Waiting }) {
                        services[i] = (tower_test::mock::Spawn::new(new()), Is::Fresh);
                    }
                }
            }
            // Whoever was woken comes.
            for (service, is) in &mut services {
                if *is == Is::Waiting && service.is_woken() && service.poll_ready::<Request<Script>>().is_ready() {
                    *is = Is::Ready;
                }
            }
            let count = |what| services.iter().filter(|(_, is)| *is == what).count();
            seen.push((count(Is::Ready), count(Is::Waiting), flying.len()));
        }
        seen
    }

    let mut contended = 0;
    for seed in 0..100 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (cap, clones) = (rng.usize(1..5), rng.usize(1..9));
        let org = Org::new("a").cap(cap);
        let layer = AimdLimitLayer::with_settings(&org, &whole().floor(cap).build().unwrap());
        let probe = Probe::held_after_the_first();
        sound(&layer, &probe).await;
        let ours = layer.layer(probe.clone());
        let ours = run(clones, || ours.clone(), probe, seed).await;
        let probe = Probe::new(|_| Reply::Released);
        let theirs = tower::limit::GlobalConcurrencyLimitLayer::new(cap).layer(probe.clone());
        // Outside the coop budget, which tokio's semaphore obeys.
        let theirs = tokio::task::unconstrained(run(clones, || theirs.clone(), probe, seed)).await;
        for (step, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            assert_eq!(ours, theirs, "seed {seed}, step {step}: (ready, waiting, flying)");
        }
        contended += ours.iter().filter(|(_, waiting, _)| *waiting > 0).count();
        assert_eq!(in_flight(&org), 0);
    }
    assert!(contended > 5_000, "the test is of waiting: {contended}");
}

#[test]
fn what_is_sent_between_tasks_can_be() {
    fn check<T: Send + Sync + Unpin>(_: &T) {}
    let (_, layer) = full(1);
    let service = layer.layer(Probe::good());
    check(&service);
    fn future<S: Service<Request<Script>>>(_: &S)
    where
        S::Future: Future + Send,
        S::Response: Send,
    {
    }
    future(&service);
}
