//! Observers: what they are told, and that nothing they do fails a call.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    observe::Event,
    org::{Credential, Family, Org, Orgs, OutReason, Tuning},
    outcome::Class,
    retry::RateLimitRetryLayer,
    stack::Stack,
};

type Seen = Arc<Mutex<Vec<Event>>>;

fn watched(org: &Org) -> Seen {
    let seen = Seen::default();
    let tell = seen.clone();
    org.observe(move |event: &Event| tell.lock().unwrap().push(event.clone()));
    seen
}

fn taken(seen: &Seen) -> Vec<Event> {
    std::mem::take(&mut *seen.lock().unwrap())
}

/// A provider that answers with these statuses in turn, then with 200.
fn provider(
    statuses: &'static [u16],
) -> impl tower::Service<Request<()>, Response = Response<String>, Error = http::Error, Future: Send> + Clone {
    let turn = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    service_fn(move |_: Request<()>| {
        let status = statuses.get(turn.fetch_add(1, std::sync::atomic::Ordering::SeqCst)).copied().unwrap_or(200);
        async move { Response::builder().status(status).header("retry-after", "30").body(String::new()) }
    })
}

#[tokio::test(start_paused = true)]
async fn a_cut_a_hold_and_the_recovery_are_told_with_their_org_and_family() {
    let org = Org::new("research").cap(8);
    let seen = watched(&org);
    let settings = Settings::builder().start(0.5).build().unwrap();
    let family = org.family(&Family::new("haiku"));
    let client = AimdLimitLayer::with_settings(&family, &settings).layer(provider(&[200, 429]));
    client.clone().oneshot(Request::new(())).await.unwrap();
    taken(&seen);
    client.clone().oneshot(Request::new(())).await.unwrap();
    let events = taken(&seen);
    let held = events.iter().find_map(|event| match event {
        Event::Held { org, hold } => Some((org.clone(), *hold)),
        _ => None,
    });
    let (org_told, hold) = held.unwrap();
    assert_eq!((org_told.name(), org_told.model_family().as_str()), ("research", "haiku"));
    assert_eq!(Some(hold), family.snapshot().hold);
    assert_eq!(events.iter().filter(|event| matches!(event, Event::Held { .. })).count(), 1);
    let texts: Vec<_> = events.iter().map(Event::to_string).collect();
    assert!(texts.iter().any(|text| text == "research (haiku) is held: refused with a hint"), "{texts:?}");
    let changes = |events: &[Event], down: bool| {
        let is_one = |event: &&Event| match event {
            Event::Limit { org, change } => {
                org.model_family().as_str() == "haiku"
                    && (if down { change.to < change.from } else { change.to > change.from })
            }
            _ => false,
        };
        events.iter().filter(is_one).count()
    };
    assert_eq!((changes(&events, true), changes(&events, false)), (1, 0), "one cut: {events:?}");
    // After the hold it recovers, step by step, where more is wanted than it allows.
    tokio::time::advance(std::time::Duration::from_secs(31)).await;
    let wanted = (0..200).map(|_| client.clone().oneshot(Request::new(())));
    futures_util::future::join_all(wanted).await;
    let after = taken(&seen);
    assert!(changes(&after, false) > 0, "{after:?}");
}

#[tokio::test(start_paused = true)]
async fn an_org_that_is_out_is_told_once_and_again_when_it_is_back() {
    let org = Org::new("research");
    let seen = watched(&org);
    let haiku = org.family(&Family::new("haiku"));
    haiku.put_family_out(OutReason::Forbidden);
    haiku.put_family_out(OutReason::Forbidden);
    org.put_out(OutReason::Unauthorised);
    org.put_out(OutReason::OutOfQuota);
    assert!(org.bring_back());
    let texts: Vec<_> = taken(&seen).iter().map(Event::to_string).collect();
    assert_eq!(
        texts,
        [
            "research (haiku) is out: its key is not allowed this model: ask for access, or remove it",
            "research is out: its key is refused: check or rotate it",
            "research is brought back",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn whoever_is_told_may_call_back_into_the_org() {
    let org = Org::new("research").cap(8);
    let again = org.clone();
    let seen = Seen::default();
    let tell = seen.clone();
    org.observe(move |event: &Event| {
        tell.lock().unwrap().push(event.clone());
        let _ = again.snapshot();
        if matches!(event, Event::Held { .. }) {
            again.retune(Tuning::new().cap(4)).unwrap();
            again.put_out(OutReason::Disabled("it was held".into()));
        }
    });
    let client = AimdLimitLayer::new(&org).layer(provider(&[429]));
    client.oneshot(Request::new(())).await.unwrap();
    assert!(org.is_out());
    assert_eq!(org.snapshot().limit.unwrap().cap, 4);
    assert!(taken(&seen).iter().any(|event| matches!(event, Event::Out { .. })));
}

#[tokio::test(start_paused = true)]
async fn an_observer_that_panics_fails_no_call_and_keeps_no_word_from_the_others() {
    let org = Org::new("research").cap(8);
    org.observe(|_: &Event| panic!("no observer"));
    let seen = watched(&org);
    let client = AimdLimitLayer::new(&org).layer(provider(&[429]));
    assert_eq!(client.clone().oneshot(Request::new(())).await.unwrap().status(), 429);
    assert!(taken(&seen).iter().any(|event| matches!(event, Event::Held { .. })));
    org.put_out(OutReason::Unauthorised);
    assert_eq!(taken(&seen).len(), 1);
    assert_eq!(org.snapshot().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn a_stack_tells_of_retries_circuits_and_requests_that_are_given_up() {
    let seen = Seen::default();
    let tell = seen.clone();
    let orgs = Orgs::new([Org::new("research").credential(Credential::new("sk-1"))]).unwrap();
    let retry = RateLimitRetryLayer::builder().max_attempts(6).build().unwrap();
    let stack = Stack::new(orgs).retry(retry).observe(move |event: &Event| tell.lock().unwrap().push(event.clone()));
    let broken = service_fn(async |_: Request<Full<Bytes>>| {
        Response::builder().status(500).body(Full::new(Bytes::from_static(b"sk-1 is broken")))
    });
    let service = stack.build(broken).unwrap();
    let request = Request::post("/v1/messages").body(Full::new(Bytes::from_static(b"{}"))).unwrap();
    service.oneshot(request).await.unwrap_err();
    let events = taken(&seen);
    let count = |of: fn(&Event) -> bool| events.iter().filter(|event| of(event)).count();
    assert_eq!(count(|event| matches!(event, Event::Retry { class: Class::Overloaded, org: Some(_), .. })), 5);
    assert_eq!(count(|event| matches!(event, Event::Exhausted { calls: 6, .. })), 1);
    // Open, and probed by the last of the calls.
    let circuits: Vec<_> = events
        .iter()
        .filter_map(|event| if let Event::Circuit { circuit, .. } = event { Some(circuit.to_string()) } else { None })
        .collect();
    assert_eq!(circuits, ["open", "half-open", "open"]);
    assert!(events.iter().all(|event| !event.to_string().contains("sk-1")));
}
