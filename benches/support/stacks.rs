//! The stacks and layers that are compared.

use std::{
    fmt::Debug,
    future::{Ready, ready},
};

use http::{Response, StatusCode};
use tower::{
    Layer, Service, ServiceBuilder,
    balance::p2c::Balance,
    buffer::Buffer,
    discover::ServiceList,
    limit::ConcurrencyLimit,
    load::{CompleteOnResponse, PendingRequests},
    retry::{Policy, Retry},
};
use tower_quota::{
    aimd::{AimdLimitLayer, Settings},
    auth::OrgAuthLayer,
    balance::OrgBalanceLayer,
    health::OrgHealthLayer,
    judge::JudgeLayer,
    org::{Credential, Org, Orgs},
    outcome::{ByStatus, Class, Outcome, classify_fn},
    quota::QuotaHeaderLayer,
    retry::RateLimitRetryLayer,
    stack::{Stack, Stacked},
};

use super::{
    callers::Consume,
    wire::{Ask, Body, Plain, Wire, request, request_of_family},
};

/// What callers can call.
pub(crate) trait Callable<Q>:
    Service<Q, Response: Consume + Send, Error: Debug + Send, Future: Send> + Clone + Send + 'static
{
}

impl<Q, S> Callable<Q> for S where
    S: Service<Q, Response: Consume + Send, Error: Debug + Send, Future: Send> + Clone + Send + 'static
{
}

/// Slots of all orgs together.
pub(crate) const SLOTS: usize = 300;
/// Calls that may be made and not yet bound: our balancer's default, and the bound of tower's buffer.
pub(crate) const UNBOUND: usize = 1_024;

/// The slots of each of so many orgs, [`SLOTS`] together.
pub(crate) fn caps(orgs: usize) -> Vec<usize> {
    (0..orgs).map(|i| SLOTS / orgs + usize::from(i < SLOTS % orgs)).collect()
}

/// Orgs with keys and caps.
pub(crate) fn orgs(count: usize) -> Orgs {
    let orgs = caps(count)
        .into_iter()
        .enumerate()
        .map(|(i, cap)| Org::new(&format!("org-{i}")).credential(Credential::new(&format!("sk-bench-{i}"))).cap(cap));
    Orgs::new(orgs).unwrap()
}

/// Limits that begin at their caps.
pub(crate) fn settings() -> Settings {
    Settings::builder().start(1.0).build().unwrap()
}

/// The whole stack, as it comes.
pub(crate) fn ours(count: usize, wire: Wire) -> Stacked<Wire> {
    Stack::new(orgs(count)).limit(settings()).build_with(move |org| wire.of_org(org.name())).unwrap()
}

/// tower's parts: Retry, Buffer, p2c Balance by pending requests, ConcurrencyLimit. To be called in the runtime that the
/// callers run in: the buffer's worker is spawned there.
pub(crate) fn tower(count: usize, wire: Wire) -> impl Callable<Ask> {
    let members: Vec<_> = caps(count)
        .into_iter()
        .map(|cap| PendingRequests::new(ConcurrencyLimit::new(wire.clone(), cap), CompleteOnResponse::default()))
        .collect();
    let balance = Balance::new(ServiceList::new::<Ask>(members));
    Retry::new(Again(4), Buffer::new(balance, UNBOUND))
}

/// The least a policy can be: a refusal or an error is tried again a few times, at once.
#[derive(Clone)]
pub(crate) struct Again(u32);

impl<E> Policy<Ask, Response<Body>, E> for Again {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Ask, result: &mut Result<Response<Body>, E>) -> Option<Ready<()>> {
        let again = match result {
            Ok(response) => response.status() == StatusCode::TOO_MANY_REQUESTS || response.status().is_server_error(),
            Err(_) => true,
        };
        if !again || self.0 == 0 {
            return None;
        }
        self.0 -= 1;
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Ask) -> Option<Ask> {
        Some(request.clone())
    }
}

/// Our limit around a service that is not HTTP, its slots given back at the head.
pub(crate) fn limiter(slots: usize, turns: u32) -> impl Callable<u64> {
    AimdLimitLayer::with_settings(&Org::new("lone").cap(slots), &settings())
        .classify(classify_fn(|result| Outcome::of(if result.is_ok() { Class::Ok } else { Class::Transport })))
        .release_at_head()
        .layer(Plain(turns))
}

/// Tower's limit around the same.
pub(crate) fn concurrency_limit(slots: usize, turns: u32) -> impl Callable<u64> {
    ConcurrencyLimit::new(Plain(turns), slots)
}

/// Our limit around the provider, its slots given back at the end of the body.
pub(crate) fn http_limiter(slots: usize, wire: Wire) -> impl Callable<Ask> {
    AimdLimitLayer::with_settings(&Org::new("lone").cap(slots), &settings()).layer(wire)
}

/// Is shown each layer alone.
pub(crate) trait Visit {
    fn visit(&mut self, name: &str, service: impl Callable<Ask>, request: Ask);
}

/// Every layer alone around the provider, ours and then tower's; first the provider alone. To be called in a runtime.
pub(crate) fn each_layer(wire: &Wire, visitor: &mut impl Visit) {
    let org = || orgs(3).iter().next().unwrap().clone();
    let lone = || org().cap(SLOTS);
    visitor.visit("wire", wire.clone(), request());
    visitor.visit("auth", OrgAuthLayer::new(&org()).unwrap().layer(wire.clone()), request());
    visitor.visit("judge", JudgeLayer::new().scrub(&org()).layer(wire.clone()), request());
    visitor.visit("quota", QuotaHeaderLayer::new(&org()).layer(wire.clone()), request());
    visitor.visit("aimd", AimdLimitLayer::with_settings(&lone(), &settings()).layer(wire.clone()), request());
    visitor.visit("health", OrgHealthLayer::new(&lone()).layer(wire.clone()), request());
    for count in [3, 32] {
        let balance = OrgBalanceLayer::new(orgs(count), |_: &Org, wire| wire).layer(wire.clone());
        visitor.visit(&format!("balance, {count} orgs"), balance, request_of_family());
    }
    let retry = RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap();
    visitor.visit("retry", retry.layer(wire.clone()), request());
    visitor.visit("whole stack, 3 orgs", ours(3, wire.clone()), request_of_family());
    visitor.visit("tower's ConcurrencyLimit", ConcurrencyLimit::new(wire.clone(), SLOTS), request());
    visitor.visit("tower's Buffer", Buffer::new(wire.clone(), UNBOUND), request());
    for count in [3, 32] {
        // A balance is no `Clone`; callers share it through a buffer.
        visitor.visit(&format!("tower's Buffer, Balance, {count} orgs"), balanced(count, wire), request());
    }
    visitor.visit("tower's Retry", ServiceBuilder::new().retry(Again(4)).service(wire.clone()), request());
    visitor.visit("tower's parts, 3 orgs", tower(3, wire.clone()), request());
}

fn balanced(count: usize, wire: &Wire) -> impl Callable<Ask> {
    let members: Vec<_> =
        (0..count).map(|_| PendingRequests::new(wire.clone(), CompleteOnResponse::default())).collect();
    Buffer::new(Balance::new(ServiceList::new::<Ask>(members)), UNBOUND)
}
