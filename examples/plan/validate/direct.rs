//! The direct path as it really goes: the ready-made stack against the simulated provider, in virtual time.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tokio::time::{Instant, sleep_until};
use tower::{Service, service_fn};
use tower_quota::{
    drive::Drive,
    org::{Credential, Family, Org, Orgs},
    outcome::BoxError,
    sim::Sim,
    stack::Stack,
};

use super::cases::{Case, MODEL};

/// How long all of it takes, and the part of calls that were refused. The clock must be paused.
pub(crate) async fn run(case: &Case) -> Result<(f64, f64), BoxError> {
    fastrand::seed(case.seed);
    let sim = Sim::new(case.provider())?;
    let orgs = case.orgs.iter().enumerate().map(|(nth, org)| {
        Org::new(&format!("org-{nth}")).credential(Credential::new(&format!("key-{nth}"))).cap(org.cap)
    });
    let stack = Stack::new(Orgs::new(orgs)?);
    let family = Family::of_model(MODEL);
    let bound = stack.live_bound(&family);
    // A client that gets out so many calls a second and no more.
    let next = Arc::new(Mutex::new(Instant::now()));
    let gap = case.client.map(|rate| Duration::from_secs_f64(1.0 / rate));
    let provider = sim.service();
    let client = service_fn(move |call: Request<Full<Bytes>>| {
        let mut provider = provider.clone();
        let next = next.clone();
        async move {
            if let Some(gap) = gap {
                let turn = {
                    let mut next = next.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    let turn = (*next).max(Instant::now());
                    *next = turn + gap;
                    turn
                };
                sleep_until(turn).await;
            }
            provider.call(call).await
        }
    });
    let service = stack.build(client)?;
    let (input, most, seed) = (case.input, case.output[1], case.seed);
    let items = (0..case.n).map(move |item| {
        let mut rng = fastrand::Rng::with_seed(seed ^ item.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut body =
            format!(r#"{{"model":"{MODEL}","max_tokens":{most},"messages":[{{"role":"user","content":"{item} "#);
        let bytes = 4 * rng.u64(input[0]..=input[1]) as usize;
        body.extend(std::iter::repeat_n('x', bytes.saturating_sub(body.len() + 4)));
        body.push_str("\"}]}");
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = http::Uri::from_static("/v1/messages");
        request.extensions_mut().insert(family.clone());
        (item, request)
    });
    let begin = Instant::now();
    let mut drive = Drive::iter(service, items, bound)?;
    let mut answered = 0;
    while let Some((item, result)) = drive.next().await {
        let answer = result.map_err(|error| format!("item {item}: {error}"))?;
        if !answer.status().is_success() {
            return Err(format!("item {item}: {}", answer.status()).into());
        }
        answered += 1;
    }
    if answered != case.n {
        return Err(format!("{answered} of {}", case.n).into());
    }
    let truth = sim.truth();
    Ok((begin.elapsed().as_secs_f64(), truth.throttled_429() as f64 / truth.calls().max(1) as f64))
}
