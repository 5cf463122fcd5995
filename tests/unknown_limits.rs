//! The limiter where nothing tells the limit: the whole stack against the simulated provider, in virtual time.
//!
//! The figures are printed: `cargo test --test unknown_limits -- --nocapture`.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tokio::time::Instant;
use tower_quota::{
    drive::Drive,
    org::{Change as Moved, Credential, Family, Org, Orgs, Why},
    sim::{Change, Config, Dialect, Headers, Latency, OrgConfig, RetryAfter, Sim, Truth},
    stack::Stack,
};

/// What a run came to.
struct Run {
    wall: f64,
    /// Of the fluid limit.
    ratio: f64,
    refused: f64,
    truth: Truth,
    orgs: Orgs,
}

impl Run {
    /// Good answers a second, and the part of calls refused, between these seconds.
    fn window(&self, from: f64, to: f64) -> (f64, f64) {
        let (mut ok, mut refused) = (0, 0);
        for org in &self.truth.orgs {
            for bin in org.timeline.iter().take((to * 10.0) as usize).skip((from * 10.0) as usize) {
                ok += bin.ok;
                refused += bin.throttled_429;
            }
        }
        (ok as f64 / (to.min(self.wall) - from), refused as f64 / (ok + refused).max(1) as f64)
    }

    fn history(&self) -> Vec<Moved> {
        self.orgs.iter().flat_map(|org| org.snapshot().history).collect()
    }
}

fn config(retry_after: RetryAfter, orgs: usize, each: impl Fn(OrgConfig) -> OrgConfig) -> Config {
    let mut config = Config::new(Dialect::Anthropic).headers(Headers::None);
    for i in 0..orgs {
        config = config.org(each(OrgConfig::new(format!("org-{i}"), format!("key-{i}")).retry_after(retry_after)));
    }
    config
}

/// Runs the whole stack until every item is answered well, once.
async fn run(config: Config, requests: u64, offered: usize) -> Run {
    let family = Family::new("sonnet");
    let orgs = config.orgs.iter().map(|org| Org::new(&org.name).credential(Credential::new(org.key.expose())));
    let orgs = Orgs::new(orgs).unwrap();
    let fluid = config.fluid_limit(requests).unwrap().as_secs_f64();
    let sim = Sim::new(config).unwrap();
    let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
    let of_model = family.clone();
    let items = (0..requests).map(move |item| {
        let mut request = Request::post("/v1/messages").body(Full::new(Bytes::from(format!("{item}")))).unwrap();
        request.extensions_mut().insert(of_model.clone());
        (item, request)
    });
    let begin = Instant::now();
    let mut drive = Drive::iter(service, items, offered).unwrap();
    let mut ok = 0;
    while let Some((_, result)) = drive.next().await {
        assert!(result.unwrap().status().is_success());
        ok += 1;
    }
    assert_eq!(ok, requests);
    let wall = begin.elapsed().as_secs_f64();
    let truth = sim.truth();
    assert_eq!((truth.answered_once, truth.answered_more), (requests, 0));
    let orgs = Orgs::new(orgs.iter().map(|org| org.family(&family))).unwrap();
    Run { wall, ratio: wall / fluid, refused: truth.throttled_429() as f64 / truth.calls() as f64, truth, orgs }
}

const NAMES: &str =
    "run                                        wall s     of the limit   429s    after the start: a second, 429s";

fn show(name: &str, run: &Run, apart: f64) {
    let (rate, refused) = run.window(apart, run.wall);
    println!(
        "{name:<42} {:>8.1}  {:.4} x  {:.3} %  after {apart} s: {rate:.2}, {:.3} %",
        run.wall,
        run.ratio,
        run.refused * 100.0,
        refused * 100.0
    );
}

/// With a hold of a second and more for each refusal the shortest runs cost most: one hold is a twentieth of 20 s.
#[tokio::test(start_paused = true)]
async fn a_concurrency_limit_is_found_and_kept() {
    println!("{NAMES}");
    for (retry_after, seconds, most) in [(RetryAfter::None, 20.0, 1.08), (RetryAfter::Seconds, 60.0, 1.10)] {
        for latency in [20.0, 80.0, 320.0] {
            let orgs = if latency < 50.0 { 1 } else { 2 };
            let config = config(retry_after, orgs, |org| org.max_concurrency(20)).latency(Latency::new(latency, 0.3));
            let rate = 20.0 * orgs as f64 / config.latency.mean().as_secs_f64();
            let run = run(config, (rate * seconds) as u64, 600).await;
            show(&format!("20 at once, {latency} ms, {retry_after:?}"), &run, 10.0);
            assert!(run.ratio <= most, "{}", run.ratio);
            assert!(run.refused <= 0.01, "{}", run.refused);
            assert!(run.orgs.iter().all(|org| org.snapshot().limit.unwrap().pace.is_none()), "it is no rate");
        }
    }
}

/// Its answers tell quotas, which are not what refuses.
#[tokio::test(start_paused = true)]
async fn a_concurrency_limit_beside_quotas_that_are_told_is_found_and_kept() {
    println!("{NAMES}");
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        // The slots allow so many a second; the quota half as much again, or a tenth more.
        for (latency, seconds, quota) in [(20.0, 20.0, 1.5), (80.0, 60.0, 1.5), (80.0, 60.0, 1.1), (320.0, 60.0, 1.5)] {
            let rate = 20.0 / Latency::new(latency, 0.3).mean().as_secs_f64();
            let org = |org: OrgConfig| org.max_concurrency(20).requests_per_minute(rate * 60.0 * quota).capacity_s(2.0);
            let config = config(retry_after, 1, org).headers(Headers::All).latency(Latency::new(latency, 0.3));
            let run = run(config, (rate * seconds) as u64, 600).await;
            show(&format!("20 at once, quota {quota} x, {latency} ms, {retry_after:?}"), &run, 10.0);
            assert!(run.ratio <= 1.10, "{}", run.ratio);
            assert!(run.refused <= 0.005, "{}", run.refused);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_low_concurrency_limit_is_not_taken_for_a_rate() {
    println!("{NAMES}");
    for most in [1, 2, 3, 5] {
        let config = config(RetryAfter::None, 1, |org| org.max_concurrency(most)).latency(Latency::new(80.0, 0.3));
        let rate = most as f64 / config.latency.mean().as_secs_f64();
        let run = run(config, (rate * 60.0) as u64, 100).await;
        show(&format!("{most} at once, 80 ms"), &run, 10.0);
        assert!(run.ratio <= 1.08, "{}", run.ratio);
        assert!(run.refused <= 0.015, "{}", run.refused);
        assert!(!run.history().iter().any(|moved| moved.why.is_pace()), "{:?}", run.history());
    }
}

#[tokio::test(start_paused = true)]
async fn ten_a_second_are_paced() {
    println!("{NAMES}");
    for (retry_after, ratio, most) in [(RetryAfter::Seconds, 1.08, 0.03), (RetryAfter::None, 1.15, 0.05)] {
        for latency in [20.0, 50.0, 150.0, 320.0] {
            let config =
                config(retry_after, 3, |org| org.requests_per_minute(600.0)).latency(Latency::new(latency, 0.3));
            let run = run(config, 3_000, 300).await;
            show(&format!("10 a second, {latency} ms, {retry_after:?}"), &run, 10.0);
            let (rate, refused) = run.window(10.0, run.wall);
            assert!(30.0 / rate <= ratio && refused <= most, "{rate} a second, {refused}");
            assert!(run.ratio <= ratio, "{}", run.ratio);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn twenty_six_a_minute_are_paced() {
    println!("{NAMES}");
    for (retry_after, ratio, most) in [(RetryAfter::Seconds, 1.10, 0.03), (RetryAfter::None, 1.20, 0.05)] {
        for capacity in [2.0, 60.0] {
            let config = config(retry_after, 1, |org| org.requests_per_minute(26.0).capacity_s(capacity));
            let run = run(config, 1_200, 300).await;
            show(&format!("26 a minute, bucket {capacity} s, {retry_after:?}"), &run, 180.0);
            let (rate, refused) = run.window(180.0, run.wall);
            assert!(26.0 / 60.0 / rate <= ratio && refused <= most, "{rate} a second, {refused}");
            assert!(run.ratio <= ratio, "{}", run.ratio);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_doubled_limit_is_used_within_half_a_minute() {
    println!("{NAMES}");
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        let change = Change { max_concurrency: Some(40), ..Change::default() };
        let config = config(retry_after, 1, |org| org.max_concurrency(20).at(20.0, change.clone()))
            .latency(Latency::new(80.0, 0.3));
        let rate = 40.0 / config.latency.mean().as_secs_f64();
        let run = run(config, (rate * 70.0) as u64, 600).await;
        show(&format!("20 at once, 40 after 20 s, {retry_after:?}"), &run, 20.0);
        let used = run.window(50.0, run.wall - 1.0).0 / rate;
        assert!(used >= 0.9, "{used}");
    }
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        let change = Change { quota_factor: Some(2.0), ..Change::default() };
        let config = config(retry_after, 1, |org| org.requests_per_minute(600.0).at(40.0, change.clone()));
        let run = run(config, 1_600, 300).await;
        show(&format!("10 a second, 20 after 40 s, {retry_after:?}"), &run, 40.0);
        let used = run.window(70.0, run.wall - 1.0).0 / 20.0;
        assert!(used >= 0.9, "{used}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_halved_limit_costs_two_cuts() {
    println!("{NAMES}");
    let halved = |orgs: &Orgs, start: Instant, at: f64, within: f64, pace: bool| -> Vec<Moved> {
        let moved = orgs.iter().flat_map(|org| org.snapshot().history);
        let down =
            moved.filter(|moved| moved.to < moved.from && moved.why.is_pace() == pace && moved.why != Why::Refined);
        down.filter(|moved| (at..at + within).contains(&(moved.at - start).as_secs_f64())).collect()
    };
    for latency in [20.0, 80.0, 320.0] {
        let change = Change { max_concurrency: Some(10), ..Change::default() };
        let config = config(RetryAfter::None, 1, |org| org.max_concurrency(20).at(10.0, change.clone()))
            .latency(Latency::new(latency, 0.3));
        let rate = 10.0 / config.latency.mean().as_secs_f64();
        let start = Instant::now();
        let run = run(config, (rate * 60.0) as u64, 600).await;
        show(&format!("20 at once, 10 after 10 s, {latency} ms"), &run, 10.0);
        // A second later it rests at what fits; then it probes again.
        let cuts = halved(&run.orgs, start, 10.0, 1.0, false);
        assert!(cuts.len() <= 2 && cuts.last().unwrap().to <= 10.0, "{cuts:?}");
        assert!(run.ratio <= 1.08, "{}", run.ratio);
    }
    let change = Change { quota_factor: Some(0.5), ..Change::default() };
    for (retry_after, seed) in
        [RetryAfter::None, RetryAfter::Seconds].into_iter().flat_map(|r| (1..=8).map(move |s| (r, s)))
    {
        fastrand::seed(seed);
        let config = config(retry_after, 1, |org| org.requests_per_minute(600.0).at(40.0, change.clone())).seed(seed);
        let start = Instant::now();
        let run = run(config, 600, 300).await;
        show(&format!("10 a second, 5 after 40 s, {retry_after:?}"), &run, 40.0);
        let refused = run.window(40.0, run.wall).1;
        assert!(refused <= 0.06, "{refused}");
        let cuts = halved(&run.orgs, start, 40.0, 10.0, true);
        // The first may be a probe's own, just before it would have fallen to the new rate.
        let needed = 1 + cuts.iter().position(|cut| cut.to <= 5.5).unwrap();
        assert!(needed <= 3, "{cuts:?}");
    }
}

/// A provider that holds for half a minute and then admits five a second.
#[tokio::test(start_paused = true)]
async fn a_thousand_who_wait_out_a_hold_do_not_come_back_as_a_herd() {
    let reopened = Change { black_hole: Some(false.into()), ..Change::default() };
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        for capacity in [1.0, 5.0, 10.0] {
            let mut config = config(retry_after, 1, |org| {
                let org =
                    org.requests_per_minute(300.0).requests_capacity(capacity).black_hole(true).black_hole_wait_s(30.0);
                let hint = Change { retry_after: Some(retry_after), ..Change::default() };
                org.retry_after(RetryAfter::Seconds).at(29.9, reopened.clone()).at(29.9, hint)
            });
            config.record_arrivals = true;
            let run = run(config, 1_000, 1_000).await;
            let arrivals = &run.truth.orgs[0].arrivals;
            assert!(arrivals[1].as_secs_f64() >= 30.0, "{:?}", arrivals[1]);
            let at_once = run.truth.orgs[0].timeline[300..310].iter().map(|bin| bin.throttled_429).sum::<u64>();
            let (rate, refused) = run.window(100.0, run.wall);
            println!(
                "1,000 after a hold, bucket {capacity}, {retry_after:?}: {at_once} refused in the first second, then {rate:.2} a second, {:.3} % refused",
                refused * 100.0
            );
            assert!(at_once <= 2, "{at_once}");
            // One call at a time teaches little at once.
            assert!(rate >= if capacity > 1.0 { 4.5 } else { 3.0 }, "{rate}");
        }
    }
}

/// Refusals that come whatever the pace must not drive it down without end.
#[tokio::test(start_paused = true)]
async fn refusals_at_random_do_not_stop_the_run() {
    println!("{NAMES}");
    for chance in [0.01, 0.05, 0.2] {
        let config = config(RetryAfter::None, 1, |org| org.max_concurrency(90).black_hole(chance));
        let run = run(config, 5_000, 200).await;
        show(&format!("{:.0} in a hundred refused at random", chance * 100.0), &run, 10.0);
        // One call at a time would be twenty a second.
        assert!(run.wall <= 1_500.0, "{}", run.wall);
    }
}
