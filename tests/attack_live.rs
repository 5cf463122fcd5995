//! Attempts to break what may be done while calls run: from any thread, at any time, and from within a user's own code.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support;
mod support_balance;

use std::{
    any::Any,
    cell::Cell,
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::Full;
use support::{Probe, Reply, ask};
use tokio_test::task;
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::{AimdLimitLayer, Held, Settings},
    balance::{MemberError, Members, OrgBalance, OrgBalanceLayer},
    org::{Drained, Family, Org, Orgs, OutReason, Tuning},
    outcome::{ByStatus, Class, Classify, Error, Stamp, classify_fn},
    quota::{Cost, Estimate, QuotaHeaderLayer},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// On a thread of its own, since what fails here hangs.
fn within_reason(name: &str, attack: impl FnOnce() + Send + 'static) {
    let (send, done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        attack();
        send.send(()).unwrap();
    });
    // Long, for a machine that others use too.
    match done.recv_timeout(300 * SECOND) {
        Ok(()) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name} hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => std::panic::resume_unwind(thread.join().unwrap_err()),
    }
}

fn paused() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

// ---------------------------------------------------------------- 1. from within a user's own code

/// Does something at every event of the log.
struct AtEvents<F>(F);

impl<S: tracing::Subscriber, F: Fn(&str) + 'static> tracing_subscriber::Layer<S> for AtEvents<F> {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        (self.0)(&message.0);
    }
}

#[test]
fn whoever_reads_the_log_may_retune_the_org_it_is_about() {
    within_reason("a log that retunes", || {
        use tracing_subscriber::layer::SubscriberExt as _;
        let org = Org::new("a");
        let tuned = org.clone();
        let log = AtEvents(move |message: &str| {
            if message == "throttled" {
                tuned.retune(Tuning::new().cap(3)).unwrap();
            }
        });
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(log));
        paused().block_on(async {
            let refused = |_| Reply::Now(Ok(support::answer(429, &[("retry-after", "1")])));
            let limit = AimdLimitLayer::new(&org).layer(Probe::new(refused));
            assert_eq!(limit.oneshot(ask()).await.unwrap().status(), 429);
        });
        assert_eq!(org.snapshot().limit.unwrap().cap, 3);
    });
}

/// Who meddles, from wherever it is asked to.
#[derive(Clone, Default)]
struct Busybody(Arc<Desk>);

#[derive(Default)]
struct Desk {
    members: Mutex<Option<Members>>,
    /// All orgs there ever were.
    orgs: Mutex<Vec<Org>>,
    acts: AtomicUsize,
    drains: Mutex<Vec<Pin<Box<Drained>>>>,
    quiet: AtomicBool,
}

thread_local! {
    static MEDDLES: Cell<bool> = const { Cell::new(false) };
}

const NAMES: [&str; 3] = ["a", "b", "c"];

impl Busybody {
    fn org(&self, name: &str) -> Org {
        let org = Org::new(name).cap(2);
        self.0.orgs.lock().unwrap().push(org.clone());
        org
    }

    fn members(&self) -> Option<Members> {
        self.0.members.lock().unwrap().clone()
    }

    /// Does something to the pool, but not from within its own doing.
    fn meddle(&self) {
        if fastrand::u8(..8) > 0 || self.0.quiet.load(SeqCst) || MEDDLES.replace(true) {
            return;
        }
        if let Some(members) = self.members() {
            self.0.acts.fetch_add(1, SeqCst);
            self.change(&members, NAMES[fastrand::usize(..NAMES.len())]);
        }
        MEDDLES.set(false);
    }

    fn change(&self, members: &Members, name: &str) {
        let org = members.get(name);
        match fastrand::u8(..14) {
            0 => drop(members.disable(name)),
            1..=3 => drop(members.enable(name)),
            // One stays, so that calls wait and do not fail.
            4 if name != "a" => drop(members.remove(name)),
            5 | 6 => drop(members.add(self.org(name))),
            7 => {
                if let Ok(drain) = members.drain(name) {
                    let mut drain = Box::pin(drain);
                    let _ = drain.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(self.waker()))));
                    self.0.drains.lock().unwrap().push(drain);
                }
            }
            8 => {
                let drains = std::mem::take(&mut *self.0.drains.lock().unwrap());
                drop(drains);
            }
            9 => {
                if let Some(org) = org {
                    let tuning = Tuning::new().cap(fastrand::usize(1..6)).weight(fastrand::f64() + 0.1);
                    org.retune(tuning).unwrap();
                    org.family(&Family::new("x")).retune_family(Tuning::new().ceiling(MS)).unwrap();
                }
            }
            10 => {
                if let Some(org) = org.filter(|org| org.name() != "a") {
                    org.put_out(OutReason::OutOfQuota);
                    org.family(&Family::new("x")).put_family_out(OutReason::Unauthorised);
                }
            }
            11 | 12 => drop(org.map(|org| org.bring_back())),
            _ => {
                drop((members.snapshots(), members.waiting(), format!("{members:?}")));
                org.map(|org| (org.snapshot(), org.is_held(), org.load(), org.standing()));
            }
        }
    }

    fn waker(&self) -> MeddlingWaker {
        MeddlingWaker(self.clone(), None)
    }

    /// All there may be, enabled and in.
    fn put_right(&self) {
        self.0.quiet.store(true, SeqCst);
        let members = self.members().unwrap();
        for name in NAMES {
            let _ = members.add(self.org(name));
            members.enable(name).unwrap();
        }
    }
}

/// Meddles when it is woken, and when it is dropped.
struct MeddlingWaker(Busybody, Option<Waker>);

impl Wake for MeddlingWaker {
    fn wake(self: Arc<Self>) {
        self.0.meddle();
        self.1.iter().for_each(Waker::wake_by_ref);
    }
}

impl Drop for MeddlingWaker {
    fn drop(&mut self) {
        self.0.meddle();
    }
}

/// A client of one org, or an exchange, or a body: meddles in all that it does.
struct Meddler(Busybody);

impl Clone for Meddler {
    fn clone(&self) -> Self {
        self.0.meddle();
        Meddler(self.0.clone())
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.0.meddle();
    }
}

impl Service<Request<Full<Bytes>>> for Meddler {
    type Response = Response<MeddlingBody>;
    type Error = Infallible;
    type Future = Exchange;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.meddle();
        if fastrand::u8(..5) == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Exchange {
        self.0.meddle();
        Exchange { client: self.clone(), polls: fastrand::u8(..4) }
    }
}

struct Exchange {
    client: Meddler,
    polls: u8,
}

impl Future for Exchange {
    type Output = Result<Response<MeddlingBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.client.0.meddle();
        if self.polls > 0 {
            self.polls -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut response = Response::new(MeddlingBody(self.client.clone(), fastrand::u8(..3)));
        if fastrand::u8(..20) == 0 {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            response.headers_mut().insert("retry-after-ms", HeaderValue::from(fastrand::u16(..3)));
        } else if fastrand::bool() {
            let headers = response.headers_mut();
            headers.insert("anthropic-ratelimit-requests-limit", HeaderValue::from(6_000_000));
            headers.insert("anthropic-ratelimit-requests-remaining", HeaderValue::from(fastrand::u16(..100)));
        }
        Poll::Ready(Ok(response))
    }
}

struct MeddlingBody(Meddler, u8);

impl Body for MeddlingBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.0.meddle();
        if self.1 == 0 {
            return Poll::Ready(None);
        }
        self.1 -= 1;
        if fastrand::bool() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
    }
}

#[derive(Clone)]
struct MeddlingEstimate(Meddler);

impl<Req> Estimate<Req> for MeddlingEstimate {
    fn cost(&self, _: &Req) -> Cost {
        self.0.0.meddle();
        Cost::tokens(Some(fastrand::f64() * 100.0), None)
    }
}

/// Polls with another waker each time.
fn meddled<F: Future>(busybody: &Busybody, future: F) -> impl Future<Output = F::Output> + use<F> {
    let busybody = busybody.clone();
    let mut future = Box::pin(future);
    std::future::poll_fn(move |cx| {
        let waker = Waker::from(Arc::new(MeddlingWaker(busybody.clone(), Some(cx.waker().clone()))));
        future.as_mut().poll(&mut Context::from_waker(&waker))
    })
}

fn request(family: &str) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    request.extensions_mut().insert(Family::new(family));
    request
}

async fn one_call<M>(mut balance: OrgBalance<M>, family: &str) -> Result<(), Error>
where
    M: Service<Request<Full<Bytes>>, Response = Response<Held<MeddlingBody>>, Error = Infallible> + Clone,
{
    std::future::poll_fn(|cx| balance.poll_ready(cx)).await?;
    let response = balance.call(request(family)).await?;
    let mut body = response.into_body();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        frame.unwrap();
    }
    Ok(())
}

#[test]
fn a_pool_may_be_changed_from_anywhere_in_a_users_own_code_on_several_threads_and_comes_to_rest() {
    const TASKS: usize = 24;
    const CALLS: usize = 150;
    within_reason("a pool that is meddled with", || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
        let busybody = Busybody::default();
        let orgs = Orgs::new(NAMES.map(|name| busybody.org(name))).unwrap();
        let settings = Settings::builder().start(1.0).spread(MS).backoff(MS, 4 * MS).build().unwrap();
        let layer = {
            let busybody = busybody.clone();
            OrgBalanceLayer::new(orgs, move |org: &Org, client: Meddler| {
                let quota = QuotaHeaderLayer::new(org).estimate(MeddlingEstimate(Meddler(busybody.clone())));
                let classifier = Meddler(busybody.clone());
                let classify = move |result: Result<&Response<MeddlingBody>, &Infallible>| {
                    classifier.0.meddle();
                    ByStatus.classify(result)
                };
                let limit = AimdLimitLayer::with_settings(org, &settings).classify(classify_fn(classify));
                limit.layer(quota.layer(client))
            })
        };
        let balance = layer.max_unbound(8).unwrap().layer(Meddler(busybody.clone()));
        *busybody.0.members.lock().unwrap() = Some(balance.members());
        let (ok, none_left) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        runtime.block_on(async {
            // Whoever makes members must not meddle.
            busybody.0.quiet.store(true, SeqCst);
            one_call(balance.clone(), "x").await.unwrap();
            one_call(balance.clone(), "y").await.unwrap();
            busybody.0.quiet.store(false, SeqCst);
            let tasks: Vec<_> = (0..TASKS)
                .map(|task| {
                    let (balance, busybody, ok, none_left) =
                        (balance.clone(), busybody.clone(), ok.clone(), none_left.clone());
                    tokio::spawn(async move {
                        for _ in 0..CALLS {
                            let family = if task % 3 == 0 { "x" } else { "y" };
                            let mut call = Box::pin(meddled(&busybody, one_call(balance.clone(), family)));
                            // Some are dropped after a few polls.
                            let mut polls = if fastrand::u8(..4) == 0 { fastrand::usize(..6) } else { usize::MAX };
                            let result = std::future::poll_fn(|cx| {
                                if polls == 0 {
                                    return Poll::Ready(None);
                                }
                                polls -= 1;
                                call.as_mut().poll(cx).map(Some)
                            });
                            // Where all are disabled, somebody has to enable one.
                            match tokio::time::timeout(20 * MS, result).await {
                                Ok(Some(Ok(()))) => drop(ok.fetch_add(1, SeqCst)),
                                Ok(Some(Err(error))) => {
                                    assert_eq!(error.class(), Class::NoOrg, "{error}");
                                    none_left.fetch_add(1, SeqCst);
                                }
                                Ok(None) => {}
                                Err(_) => drop(busybody.members().unwrap().enable("a")),
                            }
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            busybody.put_right();
            let last = (0..100).map(|n| one_call(balance.clone(), if n % 2 == 0 { "x" } else { "y" }));
            for call in futures_util::future::join_all(last).await {
                call.unwrap();
            }
        });
        let drains = std::mem::take(&mut *busybody.0.drains.lock().unwrap());
        for drain in drains {
            // Whichever it is, it knows.
            assert!(task::spawn(drain).poll().is_ready());
        }
        println!(
            "{} acts, {} calls answered, {} had no org",
            busybody.0.acts.load(SeqCst),
            ok.load(SeqCst),
            none_left.load(SeqCst)
        );
        assert!(busybody.0.acts.load(SeqCst) > 1_000 && ok.load(SeqCst) > CALLS);
        for org in busybody.0.orgs.lock().unwrap().iter() {
            for org in org.families() {
                let now = org.snapshot();
                assert_eq!((now.in_flight, now.waiting), (0, 0), "{now:?}");
            }
        }
        drop(balance);
        *busybody.0.members.lock().unwrap() = None;
        assert_eq!(Arc::strong_count(&busybody.0), 1, "instances are left");
    });
}

/// Drops something, from within its second poll.
#[derive(Clone, Default)]
struct Dropper {
    victim: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    polls_before: Arc<AtomicUsize>,
    open: Arc<AtomicBool>,
}

impl Service<Request<u32>> for Dropper {
    type Response = Response<u32>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<u32>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.polls_before.load(SeqCst) > 0 {
            self.polls_before.fetch_sub(1, SeqCst);
        } else {
            let victim = self.victim.lock().unwrap().take();
            drop(victim);
        }
        if self.open.load(SeqCst) { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, request: Request<u32>) -> Self::Future {
        std::future::ready(Ok(Response::new(request.into_body())))
    }
}

#[test]
fn a_members_own_poll_may_drop_the_last_call_in_line() {
    for polls_before in 0..3 {
        within_reason("a poll that drops a call", move || {
            let dropper = Dropper::default();
            let layer = {
                let dropper = dropper.clone();
                OrgBalanceLayer::new(Orgs::new([Org::new("a")]).unwrap(), move |_: &Org, ()| dropper.clone())
            };
            let mut balance = layer.layer(());
            let mut first = task::spawn(balance.call(Request::new(1)));
            assert!(first.poll().is_pending());
            let mut victim = task::spawn(balance.call(Request::new(2)));
            assert!(victim.poll().is_pending());
            dropper.open.store(true, SeqCst);
            balance.members().enable("a").unwrap();
            assert!(first.is_woken());
            dropper.polls_before.store(polls_before, SeqCst);
            *dropper.victim.lock().unwrap() = Some(Box::new(victim));
            // The second poll is for whoever is next in line.
            assert!(first.poll().is_ready());
            dropper.victim.lock().unwrap().take();
            assert_eq!(balance.members().waiting()[&Family::default()], 0);
            assert!(task::spawn(balance.call(Request::new(3))).poll().is_ready());
        });
    }
}

// ---------------------------------------------------------------- 2. on real threads

/// Answers after a few polls; refuses some, with and without a hint; fails to be ready now and then.
#[derive(Clone)]
struct Moody {
    refuses: u8,
}

impl Service<u32> for Moody {
    type Response = Response<u32>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<u32>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: u32) -> Self::Future {
        let refuses = self.refuses;
        Box::pin(async move {
            for _ in 0..fastrand::u8(..4) {
                tokio::task::yield_now().await;
            }
            let mut response = Response::new(request);
            if fastrand::u8(..100) < refuses {
                *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
                if fastrand::bool() {
                    response.headers_mut().insert("retry-after-ms", HeaderValue::from(fastrand::u16(..3)));
                }
            }
            Ok(response)
        })
    }
}

#[test]
fn a_limit_that_is_retuned_and_refused_from_all_sides_forgets_nobody_and_never_admits_more_than_its_cap() {
    const TASKS: u32 = 40;
    const CALLS: u32 = 300;
    within_reason("a limit that is retuned", || {
        for refuses in [0, 1, 10] {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
            let org = Org::new("a").cap(4);
            let settings = Settings::builder()
                .start(1.0)
                .spread(Duration::ZERO)
                .backoff(MS, 2 * MS)
                .growth_per_second(1e9)
                .build()
                .unwrap();
            let layer = AimdLimitLayer::with_settings(&org, &settings).release_at_head();
            let limit = layer.layer(Moody { refuses });
            let over = Arc::new(AtomicBool::new(false));
            runtime.block_on(async {
                let tuner = tokio::spawn({
                    let (org, over) = (org.clone(), over.clone());
                    async move {
                        while !over.load(SeqCst) {
                            let tuning = Tuning::new().cap(fastrand::usize(1..9)).ceiling(fastrand::u32(1..4) * MS);
                            org.retune(tuning).unwrap();
                            let seen = org.snapshot();
                            assert!(seen.in_flight <= 8, "{seen:?}");
                            tokio::task::yield_now().await;
                        }
                    }
                });
                let tasks: Vec<_> = (0..TASKS)
                    .map(|_| {
                        let mut limit = limit.clone();
                        tokio::spawn(async move {
                            for n in 0..CALLS {
                                if fastrand::u8(..4) == 0 {
                                    // Comes, waits or has a slot, and goes.
                                    let mut passing = limit.clone();
                                    let poll = |cx: &mut Context<'_>| Poll::Ready(passing.poll_ready(cx).is_ready());
                                    if std::future::poll_fn(poll).await && fastrand::bool() {
                                        drop(passing.call(n));
                                    }
                                }
                                std::future::poll_fn(|cx| limit.poll_ready(cx)).await.unwrap();
                                assert_eq!(limit.call(n).await.unwrap().into_body(), n);
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await.unwrap();
                }
                over.store(true, SeqCst);
                tuner.await.unwrap();
            });
            let seen = org.snapshot();
            assert_eq!((seen.in_flight, seen.waiting), (0, 0), "{seen:?}");
        }
    });
}

// ---------------------------------------------------------------- 3. panics

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Ready,
    Call,
    Poll,
    Classify,
    Estimate,
    Clone,
}

/// Panics the so many-eth time that it comes to some place.
#[derive(Debug)]
struct Fuse(At, AtomicUsize);

impl Fuse {
    fn comes(&self, at: At) {
        if self.0 == at && self.1.fetch_sub(1, SeqCst) == 1 {
            std::panic::resume_unwind(Box::new("the fuse"));
        }
    }
}

struct Fused(Arc<Fuse>);

impl Clone for Fused {
    fn clone(&self) -> Self {
        self.0.comes(At::Clone);
        Fused(self.0.clone())
    }
}

impl Service<Request<Full<Bytes>>> for Fused {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Full<Bytes>>, Infallible>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.comes(At::Ready);
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Full<Bytes>>) -> Self::Future {
        self.0.comes(At::Call);
        let fuse = self.0.clone();
        Box::pin(async move {
            let mut polled = false;
            let again = |cx: &mut Context<'_>| {
                cx.waker().wake_by_ref();
                if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }
            };
            std::future::poll_fn(again).await;
            fuse.comes(At::Poll);
            Ok(Response::default())
        })
    }
}

#[derive(Clone)]
struct FusedEstimate(Arc<Fuse>);

impl<Req> Estimate<Req> for FusedEstimate {
    fn cost(&self, _: &Req) -> Cost {
        self.0.comes(At::Estimate);
        Cost::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_users_code_costs_its_own_call_and_nobody_elses() {
    for at in [At::Ready, At::Call, At::Poll, At::Classify, At::Estimate, At::Clone] {
        for nth in 1..12 {
            let why = format!("{at:?}, time {nth}");
            let fuse = Arc::new(Fuse(at, AtomicUsize::new(usize::MAX)));
            let orgs = Orgs::new([Org::new("a").cap(1)]).unwrap();
            let org = orgs.get("a").unwrap().clone();
            let in_member = fuse.clone();
            let layer = OrgBalanceLayer::new(orgs, move |org: &Org, client: Fused| {
                let (estimate, classifier) = (FusedEstimate(in_member.clone()), in_member.clone());
                let classify = move |result: Result<&Response<Full<Bytes>>, &Infallible>| {
                    classifier.comes(At::Classify);
                    ByStatus.classify(result)
                };
                let quota = QuotaHeaderLayer::new(org).estimate(estimate).layer(client);
                AimdLimitLayer::new(org).classify(classify_fn(classify)).layer(quota)
            });
            let balance = layer.layer(Fused(fuse.clone()));
            balance.clone().oneshot(request("x")).await.unwrap();
            fuse.1.store(nth, SeqCst);
            let mut calls: Vec<_> = (0..8)
                .map(|_| {
                    let mut balance = balance.clone();
                    let ready =
                        task::spawn(()).enter(|cx, _| Service::<Request<Full<Bytes>>>::poll_ready(&mut balance, cx));
                    assert!(ready.is_ready());
                    Some(task::spawn(balance.call(request("x"))))
                })
                .collect();
            let (mut panics, mut ended, mut first) = (0, 0, true);
            loop {
                let mut moved = false;
                for slot in &mut calls {
                    let Some(call) = slot else { continue };
                    if !first && !call.is_woken() {
                        continue;
                    }
                    moved = true;
                    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call.poll())) {
                        Ok(Poll::Pending) => continue,
                        Ok(Poll::Ready(result)) => {
                            result.unwrap();
                            ended += 1;
                        }
                        Err(_) => panics += 1,
                    }
                    // The drop of a call may have to put a clone in its place.
                    let gone = slot.take();
                    panics +=
                        usize::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(gone))).is_err());
                }
                first = false;
                if !moved {
                    break;
                }
            }
            fuse.1.store(usize::MAX, SeqCst);
            assert!(panics <= 1 && ended + 1 >= 8, "{why}: {ended} ended, {panics} panics");
            balance.clone().oneshot(request("x")).await.unwrap();
            let seen = org.family(&Family::new("x")).snapshot();
            assert_eq!((seen.in_flight, seen.waiting), (0, 0), "{why}");
        }
    }
}

// ---------------------------------------------------------------- 4. names, families, lines

#[test]
fn what_an_org_of_the_past_is_told_does_no_harm_to_its_namesake() {
    let desk = support_balance::Desk::new(&["a"], 2);
    let balance = desk.balance();
    let mut old = support_balance::call(&balance, 1);
    assert!(old.poll().is_pending());
    let gone = balance.members().remove("a").unwrap();
    let namesake = Org::new("a");
    balance.members().add(namesake.clone()).unwrap();
    assert_eq!(balance.members().add(gone.clone()), Err(MemberError::Twice { name: "a".into() }));
    let mut new = support_balance::call(&balance, 2);
    assert!(new.poll().is_pending());
    let mut drain = task::spawn(balance.members().drain("a").unwrap());
    assert!(drain.poll().is_pending());
    desk.hand("a").answer(1, 401);
    assert!(old.is_woken());
    let Poll::Ready(Ok(answer)) = old.poll() else { panic!("it has ended") };
    let stamp = answer.extensions().get::<Stamp>().unwrap();
    assert!(stamp.org.as_ref().unwrap().same_board(&gone.family(&Family::default())));
    assert_eq!((gone.is_out(), namesake.is_out()), (true, false));
    assert!(!drain.is_woken(), "it was another's call");
    desk.hand("a").answer(2, 200);
    assert!(new.poll().is_ready());
    assert!(drain.is_woken());
    assert!(matches!(drain.poll(), Poll::Ready(Ok(()))));
    // Nothing of it flies any more: it may come back, as it went.
    balance.members().remove("a").unwrap();
    balance.members().add(gone.clone()).unwrap();
    assert!(gone.is_out(), "its key was refused");
    let mut none = support_balance::call(&balance, 3);
    assert!(matches!(none.poll(), Poll::Ready(Err(error)) if error.class() == Class::NoOrg));
    balance.members().enable("a").unwrap();
    let mut last = support_balance::call(&balance, 4);
    assert!(last.poll().is_pending());
    assert!(desk.hand("a").has(4));
}

#[test]
fn three_hundred_families_in_line_hear_of_an_org_that_is_enabled_joins_is_brought_back_or_goes() {
    type Acts = [fn(&Members); 2];
    let acts: [(&str, Acts); 4] = [
        ("enabled", [|members| members.disable("a").unwrap(), |members| members.enable("a").unwrap()]),
        (
            "joins",
            [
                |members| {
                    members.add(Org::new("b")).unwrap();
                    members.disable("b").unwrap();
                    members.remove("a").unwrap();
                },
                |members| members.add(Org::new("c")).unwrap(),
            ],
        ),
        (
            "brought back",
            [
                |members| {
                    members.add(Org::new("b")).unwrap();
                    members.disable("b").unwrap();
                    members.get("a").unwrap().put_out(OutReason::OutOfQuota);
                },
                |members| assert!(members.get("a").unwrap().bring_back()),
            ],
        ),
        ("goes", [|members| members.disable("a").unwrap(), |members| drop(members.remove("a").unwrap())]),
    ];
    for (what, [before, after]) in acts {
        let desk = support_balance::Desk::new(&["a"], 1_000);
        let balance = desk.balance();
        before(&balance.members());
        let mut calls: std::collections::BTreeMap<_, _> = (0..900)
            .map(|id| {
                let mut call =
                    support_balance::call_with(&balance, support_balance::of_family(id, &format!("f{}", id % 300)));
                assert!(call.poll().is_pending());
                (id, call)
            })
            .collect();
        assert!(calls.values().all(|call| !call.is_woken()), "{what}");
        after(&balance.members());
        let ended = support_balance::settle(&mut calls);
        let bound = desk.hands().iter().map(|hand| hand.in_flight().len()).sum::<usize>();
        assert_eq!(bound + ended.len(), 900, "{what}");
        assert_eq!(ended.len(), if what == "goes" { 900 } else { 0 }, "{what}");
        drop(calls);
        desk.assert_at_rest();
    }
}

// ---------------------------------------------------------------- 5. who comes first

async fn hundredth_of_a_second(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    tokio::time::sleep(10 * MS).await;
    Ok(Response::new(request.into_body()))
}

/// How many calls of ten tasks that never rest are answered before one is that the runtime's own future waits for. A runtime
/// looks at that future after a whole batch of tasks, and whoever gives a slot back calls two.
fn answered_before<S>(service: impl FnOnce() -> S) -> usize
where
    S: Service<Request<Full<Bytes>>, Error: std::fmt::Debug, Future: Send> + Clone + Send + 'static,
{
    paused().block_on(async {
        let mut service = service();
        let answered = Arc::new(AtomicUsize::new(0));
        for _ in 0..10 {
            let (mut service, answered) = (service.clone(), answered.clone());
            tokio::spawn(async move {
                loop {
                    service.ready().await.unwrap().call(request("x")).await.unwrap();
                    answered.fetch_add(1, SeqCst);
                }
            });
        }
        tokio::time::sleep(SECOND).await;
        let before = answered.load(SeqCst);
        let call = async { service.ready().await.unwrap().call(request("x")).await.unwrap() };
        tokio::time::timeout(60 * SECOND, call).await.expect("it waits for ever");
        answered.load(SeqCst) - before
    })
}

#[test]
fn whoever_blocks_on_a_call_is_served_beside_tasks_that_never_rest() {
    let settings = Settings::builder().start(1.0).build().unwrap();
    let limit = AimdLimitLayer::with_settings(&Org::new("a").cap(1), &settings);
    let alone = answered_before(|| limit.layer(tower::service_fn(hundredth_of_a_second)));
    let orgs = Orgs::new([Org::new("a").cap(1)]).unwrap();
    let layer = OrgBalanceLayer::new(orgs, move |org: &Org, client| {
        AimdLimitLayer::with_settings(org, &settings).layer(client)
    });
    let balanced = answered_before(|| layer.layer(tower::service_fn(hundredth_of_a_second)));
    assert!(alone <= 20 && balanced <= 20, "{alone} and {balanced} went before it");
}
