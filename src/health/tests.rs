//! What only shows from inside: streams, whose ends are told by the judge, and what a call of a healthy org looks at.

use std::{convert::Infallible, sync::Mutex, time::Duration};

use http::{Request, Response};
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

use super::*;
use crate::{
    observe::Event,
    org::{Circuit, Org, OutReason},
    outcome::{Class, Ended, Outcome, Stamp, Tail},
};

type Client = BoxCloneService<Request<()>, Response<()>, Infallible>;

/// Answers with the head of a stream each time, and hands out its end.
fn streams(layer: &OrgHealthLayer) -> (OrgHealth<Client>, std::sync::Arc<Mutex<Vec<Tail>>>) {
    let tails = std::sync::Arc::new(Mutex::new(vec![]));
    let given = tails.clone();
    let client = Client::new(service_fn(move |_: Request<()>| {
        let tail = Tail::new();
        given.lock().unwrap().push(tail.clone());
        let mut stamp = Stamp::new(Outcome::of(Class::Ok));
        stamp.tail = Some(tail);
        let mut response = Response::new(());
        response.extensions_mut().insert(stamp);
        async { Ok(response) }
    }));
    (layer.layer(client), tails)
}

async fn call(service: &OrgHealth<Client>) {
    service.clone().oneshot(Request::new(())).await.unwrap();
}

fn end(tails: &Mutex<Vec<Tail>>, class: Option<Class>) {
    let tail = tails.lock().unwrap().pop().unwrap();
    let ended = Ended::new(None, class == Some(Class::Ok));
    tail.end(class.into_iter().fold(ended, |ended, class| ended.outcome(Outcome::of(class)))).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stream_counts_as_what_it_proves_to_be_at_its_end() {
    // What each of five streams ends as; whether the org has failed too often; and whether it is out.
    for (ends, fails, out) in [
        (Some(Class::Ok), false, None),
        (Some(Class::Overloaded), true, None),
        (Some(Class::Transport), true, None),
        (Some(Class::Throttled), false, None),
        (Some(Class::Unauthorised), false, Some(OutReason::Unauthorised)),
        (Some(Class::OutOfQuota), false, Some(OutReason::OutOfQuota)),
        (None, false, None),
    ] {
        let org = Org::new("a");
        let (service, tails) = streams(&OrgHealthLayer::new(&org));
        for _ in 0..5 {
            call(&service).await;
        }
        assert_eq!((org.circuit(), org.health()), (Circuit::Closed, 1.0), "{ends:?}: its head says nothing");
        for _ in 0..5 {
            end(&tails, ends);
        }
        assert_eq!(matches!(org.circuit(), Circuit::Open { .. }), fails, "{ends:?}");
        assert_eq!((org.health() < 1.0, org.out_reason()), (fails, out), "{ends:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_is_out_until_its_stream_has_ended() {
    for (ends, becomes) in [
        (Some(Class::Ok), "closed"),
        (Some(Class::Throttled), "closed"),
        (Some(Class::Overloaded), "open"),
        (None, "half-open"),
    ] {
        let org = Org::new("a");
        let breaker = CircuitBreaker::builder().consecutive(1).build().unwrap();
        let (service, tails) = streams(&OrgHealthLayer::with_breaker(&org, breaker));
        call(&service).await;
        end(&tails, Some(Class::Transport));
        tokio::time::advance(Duration::from_secs(1)).await;
        call(&service).await;
        let (mut waits, mut next) = (service.clone(), task::spawn(()));
        assert_pending!(next.enter(|cx, _| waits.poll_ready(cx)));
        assert_eq!(org.circuit(), Circuit::HalfOpen, "{ends:?}: the head is there");
        assert!(!next.is_woken());
        end(&tails, ends);
        assert_eq!(org.circuit().to_string(), becomes, "{ends:?}");
        assert_eq!(next.is_woken(), becomes != "open", "{ends:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_success_of_a_healthy_org_takes_no_lock_and_is_counted_all_the_same() {
    let org = Org::new("a");
    let layer =
        OrgHealthLayer::with_breaker(&org, CircuitBreaker::builder().consecutive(1_000).min_calls(10).build().unwrap());
    let statuses = std::sync::Arc::new(Mutex::new(vec![]));
    let next = statuses.clone();
    let service = layer.layer(Client::new(service_fn(move |_: Request<()>| {
        let status = next.lock().unwrap().pop().unwrap_or(200);
        async move { Ok(Response::builder().status(status).body(()).unwrap()) }
    })));
    layer.shared_gate_locked(|| {
        // A lock of it here would never come.
        let mut calling = task::spawn(service.clone().oneshot(Request::new(())));
        assert_ready!(calling.poll()).unwrap();
    });
    for _ in 0..9 {
        call(&service).await;
    }
    // Nine failures of nineteen calls are not half; ten of twenty are.
    for (failures, open) in [(9, false), (1, true)] {
        *statuses.lock().unwrap() = vec![500; failures];
        for _ in 0..failures {
            call(&service).await;
        }
        assert_eq!(matches!(org.circuit(), Circuit::Open { .. }), open, "{failures} more");
    }
}

#[tokio::test(start_paused = true)]
async fn what_becomes_of_a_circuit_is_told_in_order_and_under_no_lock() {
    let org = Org::new("a");
    let seen = std::sync::Arc::new(Mutex::new(vec![]));
    let breaker = CircuitBreaker::builder().consecutive(1).build().unwrap();
    let layer = OrgHealthLayer::with_breaker(&org, breaker);
    let statuses = std::sync::Arc::new(Mutex::new(vec![200, 500, 500]));
    let next = statuses.clone();
    let service = layer.layer(Client::new(service_fn(move |_: Request<()>| {
        let status = next.lock().unwrap().pop().unwrap_or(200);
        async move { Ok(Response::builder().status(status).body(()).unwrap()) }
    })));
    org.observe({
        let (seen, org, service) = (seen.clone(), org.clone(), service.clone());
        let service = Mutex::new(service);
        move |event: &Event| {
            // It may look at the org, and at the service.
            let mut service = service.lock().unwrap().clone();
            let _ = service.poll_ready(&mut std::task::Context::from_waker(std::task::Waker::noop()));
            seen.lock().unwrap().push((event.to_string(), org.circuit().to_string()));
        }
    });
    for _ in 0..3 {
        call(&service).await;
    }
    let seen = seen.lock().unwrap();
    let told: Vec<_> = seen.iter().map(|(event, now)| (event.as_str(), now.as_str())).collect();
    assert_eq!(
        told,
        [
            ("a (any): circuit open", "open"),
            ("a (any): circuit half-open", "half-open"),
            ("a (any): circuit open", "open"),
            ("a (any): circuit half-open", "half-open"),
            ("a (any): circuit closed", "closed"),
        ]
    );
}
