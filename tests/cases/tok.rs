//! The rows of tokens.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};

use tokio_test::task;
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    drive::Drive,
    org::{Credential, Dialect, Org, Orgs},
    outcome::{Class, Outcome, Stamp, Usage},
    quota::{Cost, QuotaHeaderLayer},
    sim::{self, Config, Latency, OrgConfig, Sim},
    stack::Stack,
};

use crate::{Body, Client, MS, Req, after, say};

/// Sends calls of so many tokens at most, of which answers have 150 to 250; gives the time it took ÷ what the quota of output
/// tokens needs, and the part refused.
async fn spent(max_tokens: Option<u64>, per_minute: f64) -> (f64, f64) {
    const CALLS: u64 = 400;
    let org = OrgConfig::new("a", "key-a").output_tokens_per_minute(per_minute).capacity_s(60.0);
    let org = org.output_tokens_range([150, 250]);
    let config = Config::new(Dialect::Anthropic).latency(Latency::new(100.0, 0.3)).org(org);
    let fluid = config.fluid_limit_for(CALLS, sim::Cost { input_tokens: 0.0, output_tokens: 200.0 }).unwrap();
    let sim = Sim::new(config).unwrap();
    let orgs = Orgs::new([Org::new("a").credential(Credential::new("key-a"))]).unwrap();
    let service = Stack::new(orgs).build(sim.service()).unwrap();
    let request = move |id| {
        let max_tokens = max_tokens.map_or(String::new(), |most| format!(r#","max_tokens":{most}"#));
        let body = format!(r#"{{"model":"claude-sonnet-4-5"{max_tokens},"messages":[]}}"#);
        (id, http::Request::post("/v1/messages").body(Body::from(body)).unwrap())
    };
    let begin = tokio::time::Instant::now();
    let mut drive = Drive::iter(service, (0..CALLS).map(request), 200).unwrap();
    while let Some((_, result)) = drive.next().await {
        assert!(result.unwrap().status().is_success());
    }
    let truth = sim.truth();
    (begin.elapsed().div_duration_f64(fluid), truth.throttled_429() as f64 / truth.calls() as f64)
}

#[tokio::test(start_paused = true)]
async fn b92_output_is_reserved_as_it_comes_and_not_as_it_might() {
    // What a call may have at most; what it has is 200 on average whatever it says.
    for max_tokens in [Some(250), Some(4_096), Some(64_000), None] {
        let (ratio, refused) = spent(max_tokens, 20_000.0).await;
        assert!(ratio <= 1.0 / 0.8, "at most {max_tokens:?}: {ratio:.3} times as long as the quota needs");
        assert!(refused < 0.01, "at most {max_tokens:?}: {refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn b95_a_hundred_at_once_are_admitted_no_more_than_fits() {
    // Each needs a hundred tokens; how many are left, and how many fit; the last six of them are paced.
    for (left, fit) in [(1_001, 10), (1_099, 10), (901, 9), (101, 1), (99, 0)] {
        let org = Org::new("a");
        let sent = Arc::new(AtomicUsize::new(0));
        let on_the_way = sent.clone();
        let client = Client::new(tower::service_fn(move |request: Req| {
            let mut answer = say(200);
            let headers = answer.headers_mut();
            headers.insert("x-ratelimit-limit-tokens", 6_000.into());
            headers.insert("x-ratelimit-remaining-tokens", left.into());
            // The first tells, and what it used; the others stay on the way.
            let first = request.extensions().get::<Cost>().is_none();
            let mut stamp = Stamp::new(Outcome::of(Class::Ok));
            stamp.usage = Some(Usage::new(50, 50));
            answer.extensions_mut().insert(stamp);
            on_the_way.fetch_add(usize::from(!first), Relaxed);
            after(if first { Duration::ZERO } else { 1_000_000 * MS }, Ok(answer))
        }));
        let layer = QuotaHeaderLayer::new(&org);
        let service = layer.layer(client);
        service.clone().oneshot(Req::default()).await.unwrap();
        let dear = || {
            let mut request = Req::default();
            request.extensions_mut().insert(Cost::tokens(Some(100.0), Some(0.0)));
            request
        };
        let mut services: Vec<_> = (0..100).map(|_| task::spawn(service.clone())).collect();
        let mut calls = vec![];
        // All are polled before any is called, and again, as long as somebody moves.
        loop {
            let mut admitted = vec![];
            for mut service in std::mem::take(&mut services) {
                match service.enter(|cx, mut service| Service::<Req>::poll_ready(&mut *service, cx)) {
                    Poll::Ready(result) => {
                        result.unwrap();
                        admitted.push(service);
                    }
                    Poll::Pending => services.push(service),
                }
            }
            if admitted.is_empty() {
                break;
            }
            for service in &mut admitted {
                let mut call = task::spawn(service.call(dear()));
                assert!(call.poll().is_pending());
                calls.push(call);
            }
        }
        let sent = sent.load(Relaxed);
        assert!(sent <= fit && sent + 6 >= fit, "{sent} of those {fit} that fit in {left}");
    }
}
