//! The ready-made composition: the layers in their order, with good defaults, around any HTTP client.
//!
//! ```text
//! retry          two purses: errors, and 429s apart
//!   org balance  the less loaded of two ready orgs; one line a model family
//!     per org and model family:
//!     org health     dead orgs are out, failing ones are not ready
//!     aimd limit     slots
//!     quota header   pace
//!     judge          reads the answer once, says what it means
//!     org auth       the org's key and base URL
//!       your client
//! ```
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use http::Response; use http_body_util::Full; use bytes::Bytes;
//! # let client = tower::service_fn(async |_: http::Request<Full<Bytes>>| Ok::<_, std::io::Error>(Response::new(Full::new(Bytes::from("hi")))));
//! use http::Request;
//! use tower::{Service, ServiceExt};
//! use tower_quota::{org::{Credential, Org, Orgs}, stack::Stack};
//!
//! let orgs = Orgs::new([
//!     Org::new("research").credential(Credential::new("sk-1")),
//!     Org::new("batch").credential(Credential::new("sk-2")),
//! ])?;
//! let mut service = Stack::new(orgs).build(client)?;
//!
//! let request = Request::post("/v1/messages").body(Full::new(Bytes::from("{}")))?;
//! let answer = service.ready().await?.call(request).await?;
//! assert!(answer.status().is_success());
//! # Ok(()) }
//! ```
//!
//! # What goes in
//!
//! The client is any `Service<Request<B>, Response = Response<RB>> + Clone + Send + 'static` whose errors go into a
//! [`BoxError`](crate::outcome::BoxError), with `RB: Body + Unpin` whose errors do too. `B` is `Clone` besides, since a retried
//! request is sent again (`Full<Bytes>` is cheap to clone), and a `Body`, since its length is an estimate of its cost. Where one
//! of these is missing the stack is built all the same, but is no `Service`. A plain `ready` then only says that bounds are not met;
//! name the request, `ServiceExt::<Request<MyBody>>::ready(&mut service)`, and the compiler says which.
//!
//! # What comes back
//!
//! `Ok` is any answer that another attempt would not better: a success, or a terminal refusal such as a 400. Its body is a
//! [`Held`](crate::aimd::Held) (it keeps the slot) around an [`Answer`](crate::judge::Answer) (what the judge gathered) around your
//! client's own. Gathered, as by default, its bytes are there without waiting; else read it like any body:
//!
//! ```
//! # use http::{Request, Response}; use http_body_util::Full; use bytes::Bytes; use tower::{Service, ServiceExt};
//! # use tower_quota::{judge::{Gather, JudgeLayer}, org::{Org, Orgs}, outcome::Stamp, stack::Stack};
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let client = tower::service_fn(async |_: Request<Full<Bytes>>| Ok::<_, std::io::Error>(Response::new(Full::new(Bytes::from("hi")))));
//! # let request = || Request::new(Full::new(Bytes::new()));
//! # let orgs = Orgs::new([Org::new("research")])?;
//! # let mut service = Stack::new(orgs.clone()).build(client)?;
//! let answer = service.ready().await?.call(request()).await?;
//! let bytes: Option<&Bytes> = answer.body().get_ref().bytes(); // None where it was not gathered
//! # assert_eq!(bytes.ok_or("gathered")?, "hi");
//! # let served_by = answer.extensions().get::<Stamp>().and_then(|stamp| stamp.org.clone());
//! # assert_eq!(served_by.ok_or("signed")?.name(), "research");
//!
//! // Successes as they come, server-sent events for example; their slot is kept to the end of the stream:
//! use http_body_util::BodyExt;
//! # let client = tower::service_fn(async |_: Request<Full<Bytes>>| Ok::<_, std::io::Error>(Response::new(Full::new(Bytes::from("hi")))));
//! let streaming = JudgeLayer::new().gather(Gather::ErrorsOnly);
//! let mut service = Stack::new(orgs).judge(streaming).build(client)?;
//! let mut answer = service.ready().await?.call(request()).await?;
//! while let Some(frame) = answer.body_mut().frame().await {
//!     let data = frame?.into_data();
//!     # assert_eq!(data.map_err(|_| "no trailers here")?, "hi");
//! }
//! # Ok(()) }
//! ```
//!
//! An error is a [`RetryError`](crate::retry::RetryError): exhausted, with the request in it, or the inner
//! [`Error`](crate::outcome::Error). A body that breaks off fails with an `Error` too. Who served it is in the answer's [`Stamp`](crate::outcome::Stamp).
//!
//! What an org is doing is kept per model family, and `org.snapshot()` sums it up; of the requests that carry one [`Family`]
//! look at `org.family(&family).snapshot()`.
//!
//! # A stack of your own
//!
//! Each layer stands alone too. Compose your own where this one does not fit; what can be wrong with an org is asked before,
//! since the function that makes members cannot fail (and of orgs that join later by
//! [`check`](crate::balance::OrgBalanceLayer::check)):
//!
//! ```
//! # use http::{Request, Response}; use http_body_util::Full; use bytes::Bytes;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let client = tower::service_fn(async |_: Request<Full<Bytes>>| Ok::<_, std::io::Error>(Response::new(Full::new(Bytes::from("hi")))));
//! # let orgs = tower_quota::org::Orgs::new([tower_quota::org::Org::new("research")])?;
//! use tower::{Layer, Service, ServiceBuilder, ServiceExt};
//! use tower_quota::{
//!     aimd::AimdLimitLayer, auth::OrgAuthLayer, balance::OrgBalanceLayer, health::OrgHealthLayer, judge::JudgeLayer, org::Org,
//!     outcome::Stamped, quota::QuotaHeaderLayer, retry::RateLimitRetryLayer,
//! };
//!
//! let check = |org: &Org| OrgAuthLayer::new(org).map(drop);
//! orgs.iter().try_for_each(check)?;
//! let member = |org: &Org, client| {
//!     let auth = OrgAuthLayer::new(org).expect("every org is checked before");
//!     ServiceBuilder::new()
//!         .layer(OrgHealthLayer::new(org).classify(Stamped))
//!         .layer(AimdLimitLayer::new(org).classify(Stamped))
//!         .layer(QuotaHeaderLayer::new(org))
//!         .layer(JudgeLayer::new().scrub(org))
//!         .layer(auth)
//!         .service(client)
//! };
//! let mut service = ServiceBuilder::new()
//!     .layer(RateLimitRetryLayer::builder().max_attempts(3).build()?)
//!     .layer(OrgBalanceLayer::new(orgs, member).check(check))
//!     .service(client);
//! # let request = Request::post("/v1/messages").body(Full::new(Bytes::from("{}")))?;
//! let answer = service.ready().await?.call(request).await?;
//! # assert!(answer.status().is_success());
//! # Ok(()) }
//! ```
//!
//! A layer that boxes errors, such as tower's timeout, goes below the judge or above the retry; or anywhere, with
//! `.map_err(Error::from_box)` above it: [errors of ours keep their class](crate::outcome::Error::from_box). One that makes up answers, such
//! as tower-http's timeout, wants a body that has a `Default`: it goes above the judge, whose [`Answer`](crate::judge::Answer)
//! has one whatever the client's bodies are (and there it bounds the gathering too). The example `custom_stack` has one, and a
//! classifier of its own.

use std::{fmt, sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    aimd::{AimdLimit, AimdLimitLayer, Settings},
    auth::{OrgAuth, OrgAuthLayer},
    balance::{MAX_UNBOUND, Members, OrgBalance, OrgBalanceLayer},
    dialect::ReadQuota,
    guard::{Guard, GuardLayer, SystemRole},
    health::{Breaker, CircuitBreaker, OrgHealth, OrgHealthLayer},
    judge::{JudgeLayer, JudgeService},
    observe::Observer,
    org::{BuildError, Dialect, Family, Org, Orgs},
    outcome::Stamped,
    quota::{QuotaHeader, QuotaHeaderLayer},
    retry::{RateLimitRetry, RateLimitRetryLayer},
};

/// One org's stack for one model family, around the client `S`.
pub type Member<S> = OrgHealth<AimdLimit<QuotaHeader<JudgeService<OrgAuth<S>>>, Stamped>, Stamped>;

/// The whole stack around the client `S`. Its pool is changed while it runs through
/// [`members`](RateLimitRetry::members).
pub type Stacked<S> = RateLimitRetry<Guard<OrgBalance<Member<S>>, SystemRole>>;

type MakeBreaker = dyn Fn(&Org) -> Box<dyn Breaker> + Send + Sync;

/// Builds the ready-made stack.
#[derive(Clone)]
pub struct Stack {
    orgs: Orgs,
    breaker: Arc<MakeBreaker>,
    limit: Settings,
    dialect: Option<Arc<dyn ReadQuota>>,
    judge: JudgeLayer,
    timeout: Option<Duration>,
    spares: bool,
    guard: bool,
    retry: RateLimitRetryLayer,
}

impl Stack {
    /// A stack over these orgs, with every layer's defaults.
    #[must_use]
    pub fn new(orgs: Orgs) -> Self {
        let (judge, retry) = (JudgeLayer::new(), RateLimitRetryLayer::new());
        let guard = orgs.dialect() == Dialect::Anthropic;
        Stack {
            orgs,
            breaker: Arc::new(|_| Box::new(CircuitBreaker::default())),
            limit: Settings::default(),
            dialect: None,
            judge,
            timeout: None,
            spares: true,
            guard,
            retry,
        }
    }

    /// When the circuit of an org and model family opens, and for how long. Default: a [`CircuitBreaker`] for each.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tower_quota::{health::CircuitBreaker, org::{Org, Orgs}, stack::Stack};
    /// let breaker = CircuitBreaker::builder().consecutive(3).build()?;
    /// let stack = Stack::new(Orgs::new([Org::new("research")])?).breaker(move |_| Box::new(breaker.clone()));
    /// # let _ = stack;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn breaker(mut self, of_org: impl Fn(&Org) -> Box<dyn Breaker> + Send + Sync + 'static) -> Self {
        self.breaker = Arc::new(of_org);
        self
    }

    /// How limits move and how high they may go.
    #[must_use]
    pub fn limit(mut self, settings: Settings) -> Self {
        self.limit = settings;
        self
    }

    /// Whose quota headers are read. Default: [all](crate::dialect::Detect).
    #[must_use]
    pub fn dialect(mut self, dialect: impl ReadQuota + 'static) -> Self {
        self.dialect = Some(Arc::new(dialect));
        self
    }

    /// How answers are read: what is gathered, up to what size. The keys of all orgs are scrubbed in any case.
    #[must_use]
    pub fn judge(mut self, judge: JudgeLayer) -> Self {
        self.judge = judge;
        self
    }

    /// The longest that one attempt may take, from its call until its answer has been read; until its head, where the body is
    /// not gathered. Default: the [judge](Stack::judge)'s own, which has none unless told; set here, whether before or after
    /// the judge, it counts instead.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Whether a second key of an organisation is parked as a [spare](crate::balance#spares). Default true; see
    /// [`OrgBalanceLayer::spares`].
    #[must_use]
    pub fn spares(mut self, spares: bool) -> Self {
        self.spares = spares;
        self
    }

    /// Whether a message of the role `system` within `messages` is refused before anything is sent: see
    /// [`guard`](crate::guard). Default: for orgs that speak Anthropic's API.
    #[must_use]
    pub fn guard(mut self, guard: bool) -> Self {
        self.guard = guard;
        self
    }

    /// Tells `observer` of what happens to its orgs and its requests: see [`observe`](crate::observe). May be said several times;
    /// the orgs tell it as long as they live, the requests of the [retry](Stack::retry) that is set by then.
    #[must_use]
    pub fn observe(mut self, observer: impl Observer) -> Self {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        self.orgs.iter().for_each(|org| org.observe_shared(observer.clone()));
        self.retry = self.retry.tells(observer);
        self
    }

    /// How calls are retried.
    #[must_use]
    pub fn retry(mut self, retry: RateLimitRetryLayer) -> Self {
        self.retry = retry;
        self
    }

    /// Twice the most calls that these orgs take at once for one model family: how many logical requests a driver should
    /// keep alive, so that every slot finds a request waiting and memory does not grow with the queue.
    #[must_use]
    pub fn live_bound(&self, family: &Family) -> usize {
        let caps = self.orgs.iter().map(|org| self.limit.caps().of(&org.family(family)));
        caps.fold(0, usize::saturating_add).saturating_mul(2)
    }

    /// The stack around `client`. Clone the service for every task that calls it; all clones share limits, quotas and line.
    ///
    /// # Errors
    /// If an org's base URL or credential cannot go into a request; the error names the org.
    pub fn build<S>(self, client: S) -> Result<Stacked<S>, BuildError>
    where
        S: Clone + Send + 'static,
    {
        self.compose(client, |_, client| client)
    }

    /// The stack around a client of its own for each org and model family: for connections of its own, another way out, or
    /// something that counts an org's calls directly above the wire. `client` is called when a family is first asked for.
    ///
    /// # Errors
    /// As [`build`](Stack::build).
    pub fn build_with<S>(self, client: impl Fn(&Org) -> S + Send + Sync + 'static) -> Result<Stacked<S>, BuildError>
    where
        S: Clone + Send + 'static,
    {
        self.compose((), move |org, ()| client(org))
    }

    fn compose<C, S>(
        self,
        client: C,
        of_org: impl Fn(&Org, C) -> S + Send + Sync + 'static,
    ) -> Result<Stacked<S>, BuildError>
    where
        C: Clone + Send + 'static,
        S: Clone + Send + 'static,
    {
        // What can be wrong is said now, not when a model family is first asked for.
        let check = |org: &Org| OrgAuthLayer::new(org).map(drop);
        self.orgs.iter().try_for_each(check)?;
        // As many as a driver keeps alive of one family, or the orgs' slots would not all find a call waiting.
        let live = self.limit.caps().families().chain([Family::default()]).map(|family| self.live_bound(&family)).max();
        let Stack { orgs, breaker, limit, dialect, judge, timeout, spares, guard, retry } = self;
        let judge = timeout.into_iter().fold(judge, JudgeLayer::timeout);
        // One org's provider, or a gateway before it, may quote what was meant for another.
        let keys = judge.keys();
        orgs.iter().for_each(|org| keys.add(org));
        let balance = OrgBalanceLayer::new(orgs, move |org: &Org, client: C| {
            let auth = OrgAuthLayer::new(org).expect("every org is checked before it is a member");
            let client = auth.layer(of_org(org, client));
            keys.add(org);
            let judged = judge.clone().scrub_all(&keys).layer(client);
            let meter = dialect.clone().into_iter().fold(QuotaHeaderLayer::new(org), QuotaHeaderLayer::dialect);
            let metered = meter.layer(judged);
            let limited = AimdLimitLayer::with_settings(org, &limit).classify(Stamped).layer(metered);
            OrgHealthLayer::with_breaker(org, breaker(org)).classify(Stamped).layer(limited)
        });
        let balance = balance.check(check).spares(spares).max_unbound(live.unwrap_or(0).max(MAX_UNBOUND))?;
        let guard = if guard { GuardLayer::new(SystemRole) } else { GuardLayer::open() };
        Ok(retry.layer(guard.layer(balance.layer(client))))
    }
}

impl<M: Clone + Send + 'static> RateLimitRetry<OrgBalance<M>> {
    /// A handle to the pool while the stack runs: orgs join, go, are disabled and drained.
    #[must_use]
    pub fn members(&self) -> Members {
        self.get_ref().members()
    }
}

impl<M: Clone + Send + 'static, G> RateLimitRetry<Guard<OrgBalance<M>, G>> {
    /// A handle to the pool while the stack runs: orgs join, go, are disabled and drained.
    #[must_use]
    pub fn members(&self) -> Members {
        self.get_ref().get_ref().members()
    }
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("orgs", &self.orgs).field("limit", &self.limit).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use bytes::Bytes;
    use http::{Request, Response};
    use http_body_util::Full;
    use tower::{ServiceExt, service_fn};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stack_that_is_dropped_leaves_no_waker_on_the_boards_of_its_orgs() {
        let orgs = Orgs::new([Org::new("a"), Org::new("b")]).unwrap();
        let wire =
            service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())));
        let kept = || orgs.iter().map(Org::watchers).collect::<Vec<_>>();
        let stack = Stack::new(orgs.clone()).build(wire).unwrap();
        stack.clone().oneshot(Request::post("/v1/messages").body(Full::default()).unwrap()).await.unwrap();
        assert_eq!(
            kept(),
            [3, 3],
            "told of its being out: the line, and who looks for spares; of its tuning: the limiter"
        );
        stack.members().remove("b").unwrap();
        assert_eq!(kept()[0], 3);
        drop(stack);
        assert_eq!(kept(), [0, 0]);
    }
}
