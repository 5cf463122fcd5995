//! The stacks that are compared.

use std::future::{Ready, ready};

use http::{Response, StatusCode};
use tower::{
    BoxError, Service,
    balance::p2c::Balance,
    buffer::Buffer,
    discover::ServiceList,
    limit::ConcurrencyLimit,
    load::{CompleteOnResponse, PendingRequests},
    retry::{Policy, Retry},
};
use tower_quota::{
    aimd::Settings,
    org::{Credential, Org, Orgs},
    stack::{Stack, Stacked},
};

use super::wire::{Ask, Body, Wire};

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
    let orgs = caps(count).into_iter().enumerate().map(|(i, cap)| {
        Org::new(&format!("org-{i}")).credential(Credential::new(&format!("sk-bench-{i}"))).cap(cap)
    });
    Orgs::new(orgs).unwrap()
}

/// Limits that begin at their caps.
pub(crate) fn settings() -> Settings {
    Settings::builder().start(1.0).build().unwrap()
}

/// The whole stack, as it comes.
pub(crate) fn ours(count: usize, wire: Wire) -> Stacked<Wire> {
    Stack::new(orgs(count)).limit(settings()).build(wire).unwrap()
}

/// tower's parts: Retry, Buffer, p2c Balance by pending requests, ConcurrencyLimit. To be called in the runtime that the
/// callers run in: the buffer's worker is spawned there.
pub(crate) fn tower(
    count: usize,
    wire: Wire,
) -> impl Service<Ask, Response = Response<Body>, Error = BoxError, Future: Send> + Clone + Send + 'static {
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
