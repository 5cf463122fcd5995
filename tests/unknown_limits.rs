//! The limiter where nothing tells the limit: the whole stack against the simulated provider, in virtual time.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tokio::time::Instant;
use tower_quota::{
    drive::Drive,
    org::{Credential, Family, Org, Orgs},
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
    cuts: Vec<tower_quota::org::Change>,
}

impl Run {
    /// The parts of calls answered and refused from `from` seconds on, and the rate of good answers.
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
}

fn config(retry_after: RetryAfter, orgs: usize, each: impl Fn(OrgConfig) -> OrgConfig) -> Config {
    let seed = std::env::var("SEED").map_or(0, |seed| seed.parse().unwrap());
    let mut config = Config::new(Dialect::Anthropic).headers(Headers::None).seed(seed);
    for i in 0..orgs {
        config = config.org(each(OrgConfig::new(format!("org-{i}"), format!("key-{i}")).retry_after(retry_after)));
    }
    config
}

async fn run(name: &str, config: Config, requests: u64, offered: usize) -> Option<Run> {
    if std::env::var("ONLY").is_ok_and(|only| !name.contains(&only)) {
        return None;
    }
    let family = Family::new("sonnet");
    let orgs = config.orgs.iter().map(|org| Org::new(&org.name).credential(Credential::new(org.key.expose())));
    let orgs = Orgs::new(orgs).unwrap();
    let fluid = config.fluid_limit(requests).unwrap().as_secs_f64();
    let sim = Sim::new(config).unwrap();
    let service = Stack::new(orgs.clone()).build(sim.service()).unwrap();
    let family_ = family.clone();
    let items = (0..requests).map(move |item| {
        let mut request = Request::post("/v1/messages").body(Full::new(Bytes::from(format!("{item}")))).unwrap();
        request.extensions_mut().insert(family_.clone());
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
    let cuts = orgs.iter().flat_map(|org| org.snapshot().history).collect();
    Some(Run { wall, ratio: wall / fluid, refused: truth.throttled_429() as f64 / truth.calls() as f64, truth, orgs, cuts })
}

fn show(name: &str, run: &Run, apart: f64) {
    let (rate, refused) = run.window(apart, run.wall);
    println!(
        "{name:<44} {:>8.1} s  {:.4} x  {:.3} %   after {apart} s: {rate:.2}/s {:.3} %",
        run.wall,
        run.ratio,
        run.refused * 100.0,
        refused * 100.0
    );
    if std::env::var_os("SHOW").is_some() {
        for org in &run.orgs {
            for change in org.snapshot().history.iter().rev().take(12).rev() {
                println!("      {change}");
            }
        }
        for org in &run.truth.orgs {
            for second in org.timeline.chunks(10).take(60) {
                let (ok, no) = second.iter().fold((0, 0), |sum, bin| (sum.0 + bin.ok, sum.1 + bin.throttled_429));
                print!("{ok}{} ", if no > 0 { format!("!{no}") } else { String::new() });
            }
            println!();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn concurrency() {
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        for latency in [20.0, 80.0, 320.0] {
            for seconds in [20.0, 60.0] {
                let config = config(retry_after, 3, |org| org.max_concurrency(20)).latency(Latency::new(latency, 0.3));
                let rate = 3.0 * 20.0 / config.latency.mean().as_secs_f64();
                let name = format!("concurrency {latency} ms {retry_after:?}");
                let Some(run) = run(&name, config, (rate * seconds) as u64, 600).await else { continue };
                show(&name, &run, 10.0);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn small_concurrency() {
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        for latency in [20.0, 320.0] {
            for most in [1, 2, 3, 5, 50, 99] {
                let config = config(retry_after, 1, |org| org.max_concurrency(most)).latency(Latency::new(latency, 0.3));
                let rate = most as f64 / config.latency.mean().as_secs_f64();
                let name = format!("concurrency {most} {latency} ms {retry_after:?}");
                let Some(run) = run(&name, config, (rate * 60.0) as u64, 600).await else { continue };
                show(&name, &run, 10.0);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn throttled() {
    for retry_after in [RetryAfter::Seconds, RetryAfter::None] {
        for capacity in [0.2, 2.0, 60.0] {
            for latency in [20.0, 50.0, 150.0, 320.0, 1500.0] {
                let config = config(retry_after, 3, |org| org.requests_per_minute(600.0).capacity_s(capacity))
                    .latency(Latency::new(latency, 0.3));
                let name = format!("10/s {latency} ms, capacity {capacity} s {retry_after:?}");
                let Some(run) = run(&name, config, 3000, 300).await else { continue };
                show(&name, &run, 10.0);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn throttled_minute() {
    for retry_after in [RetryAfter::Seconds, RetryAfter::None] {
        for capacity in [2.0, 10.0, 60.0] {
            let config = config(retry_after, 1, |org| org.requests_per_minute(26.0).capacity_s(capacity));
            let name = format!("26/min, capacity {capacity} s {retry_after:?}");
            let Some(run) = run(&name, config, 1200, 300).await else { continue };
            show(&name, &run, 180.0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn steps() {
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        for latency in [20.0, 80.0, 320.0] {
            for (to, seconds) in [(40, 60.0), (10, 30.0)] {
                let change = Change { max_concurrency: Some(to), ..Change::default() };
                let config = config(retry_after, 1, |org| org.max_concurrency(20).at(20.0, change.clone()))
                    .latency(Latency::new(latency, 0.3));
                let rate = 20.0 / config.latency.mean().as_secs_f64();
                let name = format!("20 to {to}, {latency} ms {retry_after:?}");
                let Some(run) = run(&name, config, (rate * (20.0 + to as f64 / 20.0 * seconds)) as u64, 600).await else { continue };
                show(&name, &run, 10.0);
                for from in [20.0, 30.0, 40.0, 50.0, 60.0] {
                    let (ok, refused) = run.window(from, from + 10.0);
                    println!("      {from} s: {:.3} of it, {:.3} %", ok / (rate * to as f64 / 20.0), refused * 100.0);
                }
                println!("      cuts: {:?}", run.cuts.iter().filter(|c| c.to < c.from).map(|c| (c.from, c.to)).collect::<Vec<_>>());
            }
        }
        for (factor, seconds) in [(2.0, 60.0), (0.5, 60.0)] {
            let change = Change { quota_factor: Some(factor), ..Change::default() };
            let config = config(retry_after, 1, |org| org.requests_per_minute(600.0).at(40.0, change.clone()));
            let name = format!("10/s times {factor} {retry_after:?}");
            let Some(run) = run(&name, config, (400.0 + 10.0 * factor * seconds) as u64, 300).await else { continue };
            show(&name, &run, 10.0);
            for from in [40.0, 50.0, 60.0, 70.0, 80.0] {
                let (ok, refused) = run.window(from, from + 10.0);
                println!("      {from} s: {:.3} of it, {:.3} %", ok / (10.0 * factor), refused * 100.0);
            }
            println!("      cuts: {:?}", run.cuts.iter().filter(|c| c.to < c.from).map(|c| (c.from, c.to)).collect::<Vec<_>>());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn random() {
    for retry_after in [RetryAfter::None, RetryAfter::Seconds] {
        for chance in [0.002, 0.01, 0.05, 0.2] {
            let config = config(retry_after, 3, |org| org.max_concurrency(90).black_hole(chance).black_hole_wait_s(1.0));
            let name = format!("random {chance} {retry_after:?}");
            let Some(run) = run(&name, config, 20_000, 600).await else { continue };
            show(&name, &run, 10.0);
        }
    }
}
