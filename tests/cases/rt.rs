//! The rows of balancing and holds.

use std::time::Duration;

use http::Request;
use tokio::time::{Instant, advance};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::AimdLimitLayer,
    drive::Drive,
    org::{Circuit, Credential, Org, Orgs},
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    sim::{Change, Config, Latency, OrgConfig, Sim},
    stack::Stack,
};

use crate::{
    Answer, Call, MS, SECOND, after, board, open, orgs, post, reset, say, stack,
    support::{Probe, Reply, Script, answer, ask},
    told, with, within,
};

#[tokio::test(start_paused = true)]
async fn b73_a_lone_org_is_not_benched_for_long() {
    // So many refusals in a row, each with these seconds named; and then the pause before the next call.
    let ms = Duration::from_millis;
    for (refusals, hint, least, most) in [
        (1, None, ms(250), ms(314)),
        (2, None, ms(500), ms(627)),
        (3, None, ms(1_000), ms(1_252)),
        (4, None, ms(2_000), ms(2_502)),
        (1, Some("5"), ms(5_000), ms(5_002)),
        (2, Some("5"), ms(5_000), ms(5_002)),
        (1, Some("0"), ms(250), ms(314)),
        (2, Some("0"), ms(500), ms(627)),
        (1, Some("-1"), ms(250), ms(314)),
    ] {
        let orgs = orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| async move {
                if nth >= refusals {
                    return Ok(say(200));
                }
                Ok(hint.map_or(say(429), |hint| with(429, "retry-after", hint)))
            },
        );
        assert_eq!(service.oneshot(post()).await.unwrap().status(), 200);
        let gaps = wire.gaps();
        assert_eq!(gaps.len(), refusals);
        let last = gaps[refusals - 1];
        assert!(within(last, least, most), "{refusals} of {hint:?}: {last:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn b74_the_pause_has_a_ceiling_and_a_good_answer_ends_its_growth() {
    let orgs = orgs(&[("a", 10)]);
    let (service, wire) = stack(
        &orgs,
        |stack| stack.limit(open().build().unwrap()),
        |_, nth| async move { Ok(told(say(if nth < 20 || nth == 21 { 429 } else { 200 }))) },
    );
    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), 200);
    }
    let gaps = wire.gaps();
    assert_eq!(wire.len(), 23);
    // The pause after so many refusals in a row.
    let ms = Duration::from_millis;
    for (refusals, least, most) in [
        (1, ms(250), ms(314)),
        (6, ms(8_000), ms(10_002)),
        (7, ms(16_000), ms(20_002)),
        (8, ms(30_000), ms(37_502)),
        (9, ms(30_000), ms(37_502)),
        (20, ms(30_000), ms(37_502)),
    ] {
        assert!(within(gaps[refusals - 1], least, most), "{refusals}: {:?}", gaps[refusals - 1]);
    }
    assert!(within(gaps[21], ms(250), ms(314)), "after a good answer it begins anew: {:?}", gaps[21]);
    // What the provider names has a ceiling too: five minutes.
    for (hint, seconds) in [(299, 299), (300, 300), (301, 300), (999_999, 300)] {
        let orgs = crate::orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| async move { Ok(if nth == 0 { with(429, "retry-after", hint) } else { say(200) }) },
        );
        assert_eq!(service.oneshot(post()).await.unwrap().status(), 200);
        assert!(within(wire.gaps()[0], seconds * SECOND, seconds * SECOND + 2 * MS), "{hint}: {:?}", wire.gaps());
    }
}

#[tokio::test(start_paused = true)]
async fn b76_at_once_goes_only_what_has_a_sibling_to_go_to() {
    // Orgs; and when the second call goes that the first was refused with five seconds for.
    for (names, wait) in [(&["a"][..], 5), (&["a", "b"], 0), (&["a", "b", "c"], 0)] {
        let caps: Vec<_> = names.iter().map(|name| (*name, 10)).collect();
        let orgs = orgs(&caps);
        let first = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |_, _| {
                let refuse = first.swap(false, std::sync::atomic::Ordering::SeqCst);
                async move { Ok(if refuse { with(429, "retry-after", 5) } else { say(200) }) }
            },
        );
        assert_eq!(service.oneshot(post()).await.unwrap().status(), 200);
        let calls = wire.calls();
        assert_eq!(calls.len(), 2);
        assert!(within(wire.gaps()[0], wait * SECOND, wait * SECOND + 2 * MS), "{names:?}: {:?}", wire.gaps());
        assert_eq!(calls[0].org == calls[1].org, names.len() == 1);
    }
}

/// Two keys of one organisation are no siblings.
#[tokio::test(start_paused = true)]
async fn b76_a_second_key_of_the_same_organisation_is_no_sibling() {
    // The ids that they name, and whether they have named them before a quota is spent for five seconds: then how many calls
    // go before these have passed, and when the one that was refused is served.
    for (ids, known, early, wait) in [
        (["x", "x"], true, 1, 5),
        (["x", "y"], true, 2, 0),
        (["", ""], true, 2, 0),
        (["x", ""], true, 2, 0),
        // Nobody knows yet: the other one is asked once, and names its id with its own refusal.
        (["x", "x"], false, 2, 5),
        (["x", "y"], false, 2, 0),
    ] {
        fastrand::seed(7);
        let orgs = orgs(&[("a", 10), ("b", 10)]);
        let begin = Instant::now();
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |org, _| {
                // The first second is for getting to know them. What is spent is spent for whoever asks for the same.
                let spent = begin.elapsed() >= SECOND && begin.elapsed() < 6 * SECOND;
                let refused = spent && (org == "a" || ids == ["x", "x"]);
                let mut answer = if refused { with(429, "retry-after", 5) } else { say(200) };
                let id = ids[usize::from(org == "b")];
                answer.headers_mut().insert("anthropic-organization-id", id.parse().unwrap());
                async move { Ok(answer) }
            },
        );
        let members = service.members();
        members.disable("b").unwrap();
        for (asked, quiet) in [("a", "b"), ("b", "a"), ("a", "b")].into_iter().filter(|_| known) {
            members.enable(asked).unwrap();
            members.disable(quiet).unwrap();
            if wire.of(asked) == 0 {
                assert_eq!(service.clone().oneshot(post()).await.unwrap().status(), 200);
            }
        }
        advance(SECOND).await;
        // It goes to A, which is spent; meanwhile B may take calls.
        let sent = Instant::now();
        let mut call = tokio_test::task::spawn(service.clone().oneshot(post()));
        assert!(call.poll().is_pending());
        members.enable("b").unwrap();
        assert_eq!(call.await.unwrap().status(), 200);
        let row = format!("{ids:?}, known: {known}");
        assert!(within(sent.elapsed(), wait * SECOND, wait * SECOND + 2 * MS), "{row}: {:?}", sent.elapsed());
        let calls = wire.calls().into_iter().filter(|call| sent <= call.at && call.at < sent + 5 * SECOND);
        assert_eq!(calls.count(), early, "{row}");
    }
}

#[tokio::test(start_paused = true)]
async fn b77_an_org_that_fails_fast_attracts_next_to_nothing() {
    // What it answers, and how fast; its sibling answers well in a second, and has slots to spare.
    type Row = (&'static str, fn() -> Answer);
    let rows: [Row; 7] = [
        ("500", || Ok(say(500))),
        ("503", || Ok(say(503))),
        ("529", || Ok(say(529))),
        ("408", || Ok(say(408))),
        ("a reset", reset),
        ("429", || Ok(say(429))),
        ("401", || Ok(say(401))),
    ];
    // How fast, how many are wanted at once, and a seed. With ten at once, so ten calls a second, the one probe in five seconds
    // that finds it again would be 2 % already.
    let shapes = [(0, 20, 7), (1, 20, 8), (1, 40, 7), (10, 20, 9)];
    for (row, fails) in rows {
        for (millis, bound, seed) in shapes {
            fastrand::seed(seed);
            let orgs = orgs(&[("a", 40), ("b", 40)]);
            let (service, wire) = stack(
                &orgs,
                |stack| stack.limit(open().build().unwrap()),
                move |org, nth| {
                    let bad = org == "a";
                    // Each is well at first, so that both have been sounded.
                    let answer = if bad && nth > 0 { fails() } else { Ok(say(200)) };
                    after(if bad { millis * MS } else { SECOND }, answer)
                },
            );
            for _ in 0..2 {
                let (one, two) = (service.clone().oneshot(post()), service.clone().oneshot(post()));
                let answers = tokio::join!(one, two);
                assert!(answers.0.unwrap().status() == 200 && answers.1.unwrap().status() == 200);
                if wire.of("a") > 0 && wire.of("b") > 0 {
                    break;
                }
            }
            let before = (wire.of("a"), wire.len());
            let begin = Instant::now();
            let mut drive = Drive::iter(service, (0..1_000).map(|id| (id, post())), bound).unwrap();
            while let Some((_, result)) = drive.next().await {
                result.unwrap();
            }
            let row = format!("{row} after {millis} ms, {bound} at once");
            let calls = wire.calls().split_off(before.1);
            let (later, at_once): (Vec<_>, Vec<_>) = calls.iter().partition(|call| call.at >= begin + SECOND);
            let bad = |calls: &[&Call]| calls.iter().filter(|call| call.org == "a").count();
            assert!(bad(&later) * 50 < later.len(), "{row}: {} of {} after the first second", bad(&later), later.len());
            // What it was given while it was well, and a probe or two.
            assert!(bad(&at_once) <= bound / 2 + 3, "{row}: {} in the first second", bad(&at_once));
            assert!(wire.of("a") >= 2, "{row}: it was tried");
        }
    }
}

/// Too few failures to open a circuit, or to distrust it: the penalty alone keeps calls away.
#[tokio::test(start_paused = true)]
async fn b77_an_org_that_fails_now_and_then_is_asked_less() {
    // Every which call of A fails; B answers all, and both have slots to spare. Of a hundred calls A has at least, and at most.
    for (every, least, most) in [(usize::MAX, 45, 55), (10, 2, 20), (4, 1, 10)] {
        fastrand::seed(7);
        let orgs = orgs(&[("a", 40), ("b", 40)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            move |org, nth| {
                let fails = org == "a" && nth % every == every - 1;
                after(100 * MS, Ok(say(if fails { 500 } else { 200 })))
            },
        );
        let mut drive = Drive::iter(service, (0..1_000).map(|id| (id, post())), 20).unwrap();
        while let Some((_, result)) = drive.next().await {
            result.unwrap();
        }
        let (bad, all) = (wire.of("a"), wire.len());
        assert!(bad * 100 >= least * all && bad * 100 <= most * all, "every {every}: {bad} of {all}");
        assert_eq!(board(&orgs, "a").circuit(), Circuit::Closed, "every {every}");
    }
}

/// One org fails at once, one is slow, one is good; and the first recovers.
#[tokio::test(start_paused = true)]
async fn b77_an_org_that_fails_is_left_alone_and_comes_back_within_five_seconds() {
    let overloaded = |p: f64| Change { overloaded: Some(p.into()), ..Change::default() };
    let fails = |p: f64| Change { error_5xx: Some(p.into()), ..Change::default() };
    let resets = |p: f64| Change { reset: Some(p.into()), ..Change::default() };
    // How it fails, from when until when.
    type Row<'a> = (&'a str, &'a dyn Fn(f64) -> Change, f64, f64);
    let rows: [Row<'_>; 5] = [
        ("529", &overloaded, 0.0, 8.0),
        ("529", &overloaded, 3.0, 16.0),
        ("529", &overloaded, 3.0, 6.3),
        ("500", &fails, 3.0, 6.3),
        ("a reset", &resets, 3.0, 6.3),
    ];
    // How many calls are wanted at once: its siblings have 20 slots.
    let shapes = [(10, 7), (10, 8), (10, 9), (20, 7), (60, 7), (60, 8)];
    for ((fault, change, from, until), (bound, seed)) in rows.iter().flat_map(|row| shapes.map(|shape| (*row, shape))) {
        fastrand::seed(seed);
        let row = format!("{fault} from {from} s to {until} s, {bound} at once");
        let org =
            |name: &str, millis: f64| OrgConfig::new(name, format!("key-{name}")).latency(Latency::new(millis, 0.0));
        let config = Config::new(tower_quota::org::Dialect::Anthropic)
            .record_arrivals(true)
            .org(org("bad", 200.0).at(from, change(1.0)).at(until, change(0.0)))
            .org(org("slow", 2_000.0))
            .org(org("good", 200.0));
        let orgs = Orgs::new(["bad", "slow", "good"].map(|name| {
            let org = Org::new(name).credential(Credential::new(&format!("key-{name}"))).cap(10);
            org.base_url(http::Uri::from_static("http://provider.test"))
        }))
        .unwrap();
        let sim = Sim::new(config).unwrap();
        let patient = RateLimitRetryLayer::builder().max_attempts(20).build().unwrap();
        let service = Stack::new(orgs).retry(patient).build(sim.service()).unwrap();
        let end = until + 8.0;
        let begin = Instant::now();
        let items = (0u64..).take_while(move |_| begin.elapsed().as_secs_f64() < end).map(|id| {
            let mut request = post();
            request.headers_mut().insert("x-item-id", id.into());
            (id, request)
        });
        let mut drive = Drive::iter(service, items, bound).unwrap();
        let mut items = 0;
        while let Some((id, result)) = drive.next().await {
            assert_eq!(result.unwrap_or_else(|error| panic!("{row}: item {id}: {error}")).status(), 200, "{row}");
            items += 1;
        }
        let truth = sim.truth();
        assert_eq!((truth.answered_once, truth.answered_more), (items, 0), "{row}: none is lost");
        let calls = |name: Option<&str>, from: f64, until: f64| {
            let orgs = truth.orgs.iter().filter(|org| name.is_none_or(|name| org.name == name));
            let arrivals = orgs.flat_map(|org| &org.arrivals).map(Duration::as_secs_f64);
            arrivals.filter(|at| (from..until).contains(at)).count()
        };
        let (bad, all) = (calls(Some("bad"), from + 1.0, until), calls(None, from + 1.0, until));
        assert!(bad * 50 < all, "{row}: {bad} of {all} while it fails");
        assert!(bad >= 1, "{row}: it was tried");
        let back = calls(Some("bad"), until, until + 5.0);
        assert!(back >= 2, "{row}: asked {back} times within five seconds of its recovery");
        let (bad, all) = (calls(Some("bad"), until + 5.0, end), calls(None, until + 5.0, end));
        assert!(bad * 6 > all, "{row}: {bad} of {all} once it has recovered");
    }
}

#[tokio::test(start_paused = true)]
async fn b79_headroom_comes_back_by_the_announced_reset_though_nobody_asks() {
    // What remains of 1,000, when the provider says it is full, and the headroom half-way and then.
    for (remaining, reset, now, half) in [
        (0, 20, 0.0..0.001, 0.4..0.6),
        (10, 20, 0.005..0.1, 0.4..0.65),
        (500, 10, 0.3..0.8, 0.5..0.95),
        (0, 2, 0.0..0.001, 0.4..1.01),
        (0, 3_600, 0.0..0.001, 0.45..0.55),
    ] {
        let org = Org::new("a");
        let (remaining, wait) = (remaining.to_string(), format!("{reset}s"));
        let probe = Probe::new(move |_| {
            let headers = [
                ("anthropic-ratelimit-requests-limit", "1000"),
                ("anthropic-ratelimit-requests-remaining", &*remaining),
                ("anthropic-ratelimit-requests-reset", &*wait),
            ];
            Reply::Now(Ok(answer(200, &headers)))
        });
        let mut service = QuotaHeaderLayer::new(&org).layer(probe);
        ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
        assert!(now.contains(&org.headroom()), "{reset}: {} now", org.headroom());
        advance(reset * SECOND / 2).await;
        assert!(half.contains(&org.headroom()), "{reset}: {} half-way", org.headroom());
        advance(reset * SECOND / 2).await;
        assert!(org.headroom() >= 0.9, "{reset}: {} at the reset", org.headroom());
        advance(2 * reset * SECOND).await;
        assert_eq!(org.headroom(), 1.0);
    }
}

#[tokio::test(start_paused = true)]
async fn b80_those_who_waited_out_a_hold_do_not_start_at_once() {
    // Who waits, the cap, and how many start within each tenth of a second (a call's length) after the hold.
    for (waiters, cap, starts) in [
        (1, 50, &[1][..]),
        (2, 50, &[1, 1]),
        (200, 50, &[1, 1, 2, 4, 8, 16, 32, 50]),
        (200, 1, &[1, 1, 1, 1, 1]),
        (200, 4, &[1, 1, 2, 4, 4, 4]),
    ] {
        let org = Org::new("a").cap(cap);
        let settings = open().build().unwrap();
        let probe = Probe::new(|n| match n {
            0 => Reply::Now(Ok(answer(429, &[("retry-after", "30")]))),
            _ => Reply::After(100 * MS, answer(200, &[])),
        });
        let service = AimdLimitLayer::with_settings(&org, &settings).layer(probe.clone());
        let begin = Instant::now();
        let mut first = service.clone();
        ServiceExt::<Request<Script>>::ready(&mut first).await.unwrap().call(ask()).await.unwrap();
        let tasks = tokio::task::LocalSet::new();
        for _ in 0..waiters {
            let mut service = service.clone();
            tasks.spawn_local(async move {
                ServiceExt::<Request<Script>>::ready(&mut service).await.unwrap().call(ask()).await.unwrap();
            });
        }
        tasks.await;
        let times: Vec<_> = probe.times().into_iter().skip(1).map(|at| at - begin).collect();
        assert_eq!(times.len(), waiters);
        assert!(times.iter().all(|at| *at >= 30 * SECOND), "none before the time");
        assert!(probe.most() <= cap);
        let mut seen = vec![0; starts.len()];
        for at in &times {
            // A timer may ring a millisecond late.
            let tenth = (at.as_millis() - times[0].as_millis() + 20) as usize / 100;
            if tenth < seen.len() {
                seen[tenth] += 1;
            }
        }
        assert_eq!(seen, starts, "{waiters} waiters, cap {cap}");
    }
}

/// The hold is the org's, so whoever comes later meets it too.
#[tokio::test(start_paused = true)]
async fn b80_who_comes_during_a_hold_waits_for_its_rest() {
    for (comes, waits) in [(0, 30_000), (1, 29_999), (29_999, 1), (30_000, 0), (31_000, 0)] {
        let orgs: Orgs = orgs(&[("a", 10)]);
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()),
            |_, nth| async move { Ok(if nth == 0 { with(429, "retry-after", 30) } else { say(200) }) },
        );
        let mut first = tokio_test::task::spawn(service.clone().oneshot(post()));
        assert!(first.poll().is_pending());
        drop(first);
        assert!(board(&orgs, "a").is_held());
        advance(comes * MS).await;
        let came = Instant::now();
        service.oneshot(post()).await.unwrap();
        let waited = came.elapsed();
        assert!(within(waited, waits * MS, (waits + 2) * MS), "came at {comes} ms: {waited:?}");
        assert_eq!(wire.len(), 2);
    }
}
