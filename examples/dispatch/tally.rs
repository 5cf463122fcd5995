//! What is counted: calls over the wire by a layer directly above the client, answers by the run.

use std::{
    collections::BTreeMap,
    future::{Future, pending},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;
use tower::{Layer, Service};
use tower_quota::outcome::{Stamp, Usage};

use crate::{
    forecast::OTHERS,
    prices::{Prices, Tokens},
};

/// Durations in buckets, each four per cent wider than the one before, from a microsecond to beyond an hour: a percentile
/// is right to two per cent, in fixed memory.
#[derive(Debug)]
pub(crate) struct Histogram(Vec<AtomicU64>);

const STEP: f64 = 1.04;
const BUCKETS: usize = 600;

impl Default for Histogram {
    fn default() -> Self {
        Histogram((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Histogram {
    pub(crate) fn add(&self, duration: Duration) {
        let micros = duration.as_secs_f64() * 1e6;
        let bucket = (micros.max(1.0).ln() / STEP.ln()) as usize;
        self.0[bucket.min(BUCKETS - 1)].fetch_add(1, Relaxed);
    }

    /// The duration that this share of all did not exceed; `None` where nothing was added.
    pub(crate) fn quantile(&self, share: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.0.iter().map(|bucket| bucket.load(Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let rank = (share * total as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        let bucket = counts.iter().position(|count| {
            below += count;
            below >= rank
        })?;
        // The middle of the bucket, as ratios go.
        Some(Duration::from_secs_f64(STEP.powf(bucket as f64 + 0.5) / 1e6))
    }
}

/// Calls over the wire.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: AtomicU64,
    /// Those that were the first of their id.
    pub(crate) firsts: AtomicU64,
    pub(crate) http_429: AtomicU64,
    /// Calls without an answer, those given up included.
    pub(crate) unanswered: AtomicU64,
    /// Calls by status.
    statuses: Mutex<BTreeMap<u16, u64>>,
    in_flight: AtomicUsize,
    pub(crate) peak_in_flight: AtomicUsize,
    /// From sending until the end of the answer.
    pub(crate) latency: Histogram,
    /// What all calls used, the failed ones that say so included, by model.
    used: Mutex<BTreeMap<Arc<str>, Tokens>>,
    /// Rows that were answered out of batches.
    pub(crate) rows: AtomicU64,
    /// Answers of a status of success that do not say what they used.
    pub(crate) unsaid: AtomicU64,
    /// Once set, nothing more is sent.
    stopped: AtomicBool,
}

/// How many models are told apart; further ones are counted together.
const MODELS: usize = 64;

/// What calls used and cost.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) tokens: Tokens,
    /// In dollars, of the models that have a price; `None` where none that was used has.
    pub(crate) cost: Option<f64>,
    /// The models that have none.
    pub(crate) unpriced: Vec<Arc<str>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tally {
    pub(crate) fn statuses(&self) -> BTreeMap<u16, u64> {
        lock(&self.statuses).clone()
    }

    /// What was used so far, and its cost.
    pub(crate) fn spent(&self, prices: &Prices) -> Spent {
        let mut spent = Spent::default();
        for (model, tokens) in lock(&self.used).iter() {
            spent.tokens += *tokens;
            match prices.of(model) {
                Some(price) => spent.cost = Some(spent.cost.unwrap_or(0.0) + price.cost(tokens)),
                None => spent.unpriced.push(model.clone()),
            }
        }
        spent
    }

    /// A row was answered out of a batch; `ok` if by a success.
    pub(crate) fn row(&self, model: Option<&Model>, usage: Option<Usage>, ok: bool) {
        self.rows.fetch_add(1, Relaxed);
        match (usage, model) {
            (Some(usage), Some(Model(model))) => self.used(model, usage.into()),
            _ if ok => drop(self.unsaid.fetch_add(1, Relaxed)),
            _ => {}
        }
    }

    fn used(&self, model: &Arc<str>, tokens: Tokens) {
        let mut used = lock(&self.used);
        let known = used.contains_key(model) || used.len() < MODELS;
        let model = if known { model.clone() } else { OTHERS.into() };
        *used.entry(model).or_default() += tokens;
    }

    /// Calls that were sent and whose answer has not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// Sends nothing more: calls from now on never end. To be set on the count of all.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    fn start(&self, first: bool) {
        self.calls.fetch_add(1, Relaxed);
        self.firsts.fetch_add(u64::from(first), Relaxed);
        let now = self.in_flight.fetch_add(1, Relaxed) + 1;
        self.peak_in_flight.fetch_max(now, Relaxed);
    }

    fn end(&self, status: Option<u16>, took: Duration) {
        self.in_flight.fetch_sub(1, Relaxed);
        let Some(status) = status else {
            self.unanswered.fetch_add(1, Relaxed);
            return;
        };
        self.latency.add(took);
        *lock(&self.statuses).entry(status).or_default() += 1;
        if status == 429 {
            self.http_429.fetch_add(1, Relaxed);
        }
    }
}

/// What one id has seen of the wire: a request extension, which every attempt of the request carries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tries(Arc<Mutex<Seen>>);

#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) calls: u32,
    /// The org called last.
    pub(crate) org: Option<Arc<str>>,
    /// The status of that call, if it was answered.
    pub(crate) status: Option<u16>,
    /// The batch that answered it, if one did: without a call of its own.
    pub(crate) batch: Option<Arc<str>>,
    /// The time from its admission to its first call, and from the end of each call to the next one.
    pub(crate) waited: Duration,
    /// When it began to wait.
    since: Instant,
}

impl Default for Seen {
    fn default() -> Self {
        Seen { calls: 0, org: None, status: None, batch: None, waited: Duration::ZERO, since: Instant::now() }
    }
}

impl Tries {
    /// Counts a call to this org; true if it is the first of the id.
    fn start(&self, org: &Arc<str>) -> bool {
        let mut seen = lock(&self.0);
        seen.calls += 1;
        (seen.org, seen.status) = (Some(org.clone()), None);
        let waited = seen.since.elapsed();
        seen.waited += waited;
        seen.calls == 1
    }

    fn end(&self) {
        lock(&self.0).since = Instant::now();
    }

    /// It was answered out of this batch.
    pub(crate) fn batched(&self, org: Arc<str>, batch: Arc<str>, status: u16) {
        let mut seen = lock(&self.0);
        (seen.org, seen.batch, seen.status) = (Some(org), Some(batch), Some(status));
    }

    pub(crate) fn seen(&self) -> Seen {
        lock(&self.0).clone()
    }
}

/// Which model a request names: a request extension.
#[derive(Clone, Debug)]
pub(crate) struct Model(pub(crate) Arc<str>);

/// Counts an org's calls, and what they used. It stands directly above the client, with only a judge between the two that hands
/// everything through: so it sees each attempt by itself, whatever layers above make of it.
#[derive(Clone, Debug)]
pub(crate) struct CountLayer {
    pub(crate) org: Arc<str>,
    /// The org's own count, and that of all.
    pub(crate) tallies: [Arc<Tally>; 2],
}

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;

    fn layer(&self, inner: S) -> Count<S> {
        Count { inner, layer: self.clone() }
    }
}

/// The service of [`CountLayer`].
#[derive(Clone, Debug)]
pub(crate) struct Count<S> {
    inner: S,
    layer: CountLayer,
}

/// A call that is counted as ended however it ends.
struct Running {
    tallies: [Arc<Tally>; 2],
    tries: Option<Tries>,
    started: Instant,
    status: Option<u16>,
}

impl Running {
    fn answered(&mut self, status: u16) {
        self.status = Some(status);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for tally in &self.tallies {
            tally.end(self.status, self.started.elapsed());
        }
        if let Some(tries) = &self.tries {
            tries.end();
        }
    }
}

impl<S, B, RB> Service<Request<B>> for Count<S>
where
    S: Service<Request<B>, Response = Response<RB>>,
    S::Future: Send + 'static,
{
    type Response = Response<CountedBody<RB>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let tallies = self.layer.tallies.clone();
        let tries = request.extensions().get::<Tries>().cloned();
        let model = request.extensions().get::<Model>().cloned();
        let started = match tallies.iter().any(|tally| tally.stopped.load(Relaxed)) {
            true => None,
            false => {
                let first = tries.as_ref().is_some_and(|tries| tries.start(&self.layer.org));
                for tally in &tallies {
                    tally.start(first);
                }
                let running = Running { tallies, tries: tries.clone(), started: Instant::now(), status: None };
                Some((running, self.inner.call(request)))
            }
        };
        Box::pin(async move {
            let (mut running, call) = match started {
                Some(started) => started,
                None => pending().await,
            };
            let response = call.await?;
            let status = response.status().as_u16();
            running.answered(status);
            if let Some(tries) = &tries {
                lock(&tries.0).status = Some(status);
            }
            let tail = response.extensions().get::<Stamp>().and_then(|stamp| stamp.tail.clone());
            if let Some(tail) = tail.filter(|_| response.status().is_success()) {
                let tallies = running.tallies.clone();
                tail.on_end(move |ended| match (ended.usage, model) {
                    (Some(usage), Some(Model(model))) => {
                        tallies.iter().for_each(|tally| tally.used(&model, usage.into()));
                    }
                    _ => tallies.iter().for_each(|tally| {
                        tally.unsaid.fetch_add(1, Relaxed);
                    }),
                });
            }
            Ok(response.map(|body| CountedBody { body, running: Some(running) }))
        })
    }
}

/// The body of an answer, whose call ends with it.
pub(crate) struct CountedBody<B> {
    body: B,
    running: Option<Running>,
}

impl<B: Body + Unpin> Body for CountedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            self.running = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
