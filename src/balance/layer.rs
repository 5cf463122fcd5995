//! The balancing layer.

use std::{fmt, sync::Arc};

use tower_layer::Layer;

use super::{
    OrgBalance,
    table::{Check, Table},
};
use crate::org::{BuildError, Org, Orgs};

/// Calls made and not yet bound, by default, before the balancer is not ready: enough that a member that becomes ready
/// always finds a request waiting, few enough that waiting costs no memory worth naming.
pub const MAX_UNBOUND: usize = 1_024;

/// Balances over orgs: given the orgs, and a function that wraps the inner service into one org's stack.
#[derive(Clone)]
pub struct OrgBalanceLayer<F> {
    orgs: Orgs,
    max_unbound: usize,
    spares: bool,
    member: Arc<F>,
    check: Arc<Check>,
}

impl<F> OrgBalanceLayer<F> {
    /// `member` is called once for each org and model family, when the family is first asked for or the org joins, with the
    /// org's handle for that family and a clone of the inner service. It must not call the balancer, nor its
    /// [`Members`](super::Members).
    #[must_use]
    pub fn new(orgs: Orgs, member: F) -> Self {
        let (member, check) = (Arc::new(member), Arc::new(|_: &Org| Ok(())));
        OrgBalanceLayer { orgs, max_unbound: MAX_UNBOUND, spares: true, member, check }
    }

    /// What is asked before an org joins the running pool ([`Members::add`](super::Members::add)), since the function that
    /// makes members cannot fail. Default: every org may. The orgs given to [`new`](OrgBalanceLayer::new) are not asked
    /// about.
    #[must_use]
    pub fn check(mut self, check: impl Fn(&Org) -> Result<(), BuildError> + Send + Sync + 'static) -> Self {
        self.check = Arc::new(check);
        self
    }

    /// Whether a second key of an organisation, found out by the id that the answers name, is parked as a
    /// [spare](super#spares). Default true.
    ///
    /// Set it to false where the id says nothing of the quota: behind a gateway that names one id for all keys, or another
    /// with every answer; or where each key has a quota of its own within its organisation. Then every member takes calls.
    #[must_use]
    pub fn spares(mut self, spares: bool) -> Self {
        self.spares = spares;
        self
    }

    /// How many calls may be made and not yet bound to an org before the service is not ready. Retried calls do not count.
    /// Default 1,024.
    ///
    /// The calls of all model families count together, because readiness cannot see what it will be asked for: where the orgs
    /// are held for one family and its calls fill the bound, callers of the other families wait as well, until one of those
    /// calls is bound or dropped. So let what you keep alive of any one family stay below the bound, as
    /// [`Stack::live_bound`](crate::stack::Stack::live_bound) does with the default caps of up to four orgs, or raise it. The
    /// ready-made stack raises it to the largest of its live bounds.
    ///
    /// # Errors
    /// If it is 0.
    pub fn max_unbound(mut self, calls: usize) -> Result<Self, BuildError> {
        if calls == 0 {
            return Err(BuildError::new("max_unbound", "must be at least 1: nothing would ever be ready"));
        }
        self.max_unbound = calls;
        Ok(self)
    }
}

impl<S, M, F> Layer<S> for OrgBalanceLayer<F>
where
    S: Clone + Send + 'static,
    M: Clone + Send + 'static,
    F: Fn(&Org, S) -> M + Send + Sync + 'static,
{
    type Service = OrgBalance<M>;

    fn layer(&self, inner: S) -> Self::Service {
        let member = self.member.clone();
        let make = Box::new(move |org: &Org| member(org, inner.clone()));
        OrgBalance::new(Table::new(&self.orgs, self.max_unbound, self.spares, make, self.check.clone()))
    }
}

impl<F> fmt::Debug for OrgBalanceLayer<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrgBalanceLayer").field("orgs", &self.orgs).finish_non_exhaustive()
    }
}
