//! The earlier dispatcher's direct path: an independent small model of its published rules. The numbers in comments are those of
//! `docs/from-other-tools.md`.
//!
//! Two things are not as they were. Its gate looked every 20 ms whether there was room; here whoever waits is told at once, which only
//! favours it. And its ceiling, one Python process, is a queue in front of the wire: each call takes its turn there, at so many a minute, with
//! its slot held. That was measured: with more calls in flight their latency grew, and their rate did not.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Response, Uri, uri::PathAndQuery};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};
use tower::Service;
use tower_quota::outcome::BoxError;

use super::{
    run::Answers,
    work::{Call, Work},
};

/// 22: how long the chosen org is asked before the next best is.
const REPICK: Duration = Duration::from_millis(80);
/// 13, 14, 15.
const FLOOR: usize = 4;
const STEP: usize = 4;
/// 20.
const LOW: f64 = 0.15;
/// 29, 30.
const REFUSALS: u32 = 6;
const ATTEMPTS: i32 = 5;

struct Gate {
    in_flight: usize,
    effective: usize,
    /// 17: it only grows.
    held_until: Option<Instant>,
    headroom: f64,
}

struct Org {
    key: HeaderValue,
    gate: Mutex<Gate>,
    bell: Notify,
}

/// The dispatcher.
struct Dispatcher<C> {
    orgs: Vec<Org>,
    cap: usize,
    client: C,
    base_url: Uri,
    /// 21: ties rotate.
    turn: Mutex<usize>,
    /// The process's own ceiling: the time between two calls, and when the next may go.
    process: Option<(Duration, Mutex<Instant>)>,
}

/// How an item ended.
enum Ended {
    Ok(Bytes),
    Failed(&'static str),
}

/// Does the work under the earlier rules, at most `per_minute` calls a minute through the process. Gives the answers and the time.
pub(crate) async fn go<C, B>(
    work: &Work,
    base_url: &Uri,
    client: C,
    per_minute: Option<f64>,
) -> Result<(Answers, Duration), BoxError>
where
    C: Service<Call, Response = Response<B>> + Clone,
    B: Body<Data = Bytes>,
{
    let orgs = work.keys().into_iter().map(|(_, key)| {
        // 13: a quarter of the cap at first.
        let effective = work.cap.min((work.cap / 4).max(FLOOR));
        let gate = Gate { in_flight: 0, effective, held_until: None, headroom: 1.0 };
        Ok(Org { key: key.parse()?, gate: Mutex::new(gate), bell: Notify::new() })
    });
    let begin = Instant::now();
    let dispatcher = Dispatcher {
        orgs: orgs.collect::<Result<_, BoxError>>()?,
        cap: work.cap,
        client,
        base_url: base_url.clone(),
        turn: Mutex::new(0),
        process: per_minute.map(|rate| (Duration::from_secs_f64(60.0 / rate), Mutex::new(begin))),
    };
    let mut answers = Answers::new(work.calls);
    // 18: twice what all caps allow.
    let live = (work.orgs * work.cap * 2).max(1);
    let dispatcher = &dispatcher;
    let mut ended = stream::iter(work.items())
        .map(|(id, request)| async move { (id, dispatcher.item(request).await) })
        .buffer_unordered(live);
    while let Some((id, ended)) = ended.next().await {
        match ended {
            Ended::Ok(body) => answers.good(id, &body),
            Ended::Failed(why) => answers.bad(why.to_owned()),
        }
    }
    Ok((answers, begin.elapsed()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C, B> Dispatcher<C>
where
    C: Service<Call, Response = Response<B>> + Clone,
    B: Body<Data = Bytes>,
{
    async fn item(&self, request: Call) -> Ended {
        let (mut refusals, mut attempt) = (0, 0);
        loop {
            // 29: after a 429 it picks again.
            let org = self.acquire().await;
            let mut left = Slot { org: &self.orgs[org], cap: self.cap, clean: false };
            self.take_turn().await;
            let answer = self.send(org, &request).await;
            match answer {
                Some((status, headers, body)) if status.is_success() => {
                    left.read(&headers);
                    left.clean = true;
                    return Ended::Ok(body);
                }
                Some((status, headers, _)) if status.as_u16() == 429 => {
                    left.cut(&headers);
                    refusals += 1;
                    if refusals >= REFUSALS {
                        return Ended::Failed("rate_limited_exhausted");
                    }
                }
                // 31.
                Some((status, ..)) if !status.is_server_error() => return Ended::Failed("error"),
                _ => {
                    attempt += 1;
                    if attempt >= ATTEMPTS {
                        return Ended::Failed("transport_exhausted");
                    }
                    // 30, with the slot held.
                    sleep(Duration::from_secs_f64(1.5_f64.powi(attempt))).await;
                }
            }
        }
    }

    /// 21, 22: by score, each for 80 ms; then the best, for as long as it takes.
    async fn acquire(&self) -> usize {
        let order = self.order();
        for &org in &order {
            if self.orgs[org].admit(Some(REPICK)).await {
                return org;
            }
        }
        let best = self.order()[0];
        self.orgs[best].admit(None).await;
        best
    }

    fn order(&self) -> Vec<usize> {
        let count = self.orgs.len();
        let first = {
            let mut turn = lock(&self.turn);
            *turn = (*turn + 1) % count;
            *turn
        };
        let mut order: Vec<usize> = (0..count).map(|n| (first + n) % count).collect();
        let score = |org: usize| {
            let gate = lock(&self.orgs[org].gate);
            gate.headroom.min(gate.effective as f64 / self.cap as f64)
        };
        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        order
    }

    async fn take_turn(&self) {
        let Some((each, next)) = &self.process else { return };
        let at = {
            let mut next = lock(next);
            let at = (*next).max(Instant::now());
            *next = at + *each;
            at
        };
        sleep_until(at).await;
    }

    async fn send(&self, org: usize, request: &Call) -> Option<(http::StatusCode, HeaderMap, Bytes)> {
        let mut request = request.clone();
        let mut to = self.base_url.clone().into_parts();
        to.path_and_query = Some(PathAndQuery::from_static("/v1/messages"));
        *request.uri_mut() = Uri::from_parts(to).ok()?;
        request.headers_mut().insert("x-api-key", self.orgs[org].key.clone());
        let mut client = self.client.clone();
        std::future::poll_fn(|cx| client.poll_ready(cx)).await.ok()?;
        let (head, body) = client.call(request).await.ok()?.into_parts();
        Some((head.status, head.headers, body.collect().await.ok()?.to_bytes()))
    }
}

impl Org {
    /// Whether it was admitted within that time. 12: in flight ≤ effective ≤ cap.
    async fn admit(&self, within: Option<Duration>) -> bool {
        let deadline = within.map(|within| Instant::now() + within);
        loop {
            let told = self.bell.notified();
            tokio::pin!(told);
            told.as_mut().enable();
            let held = {
                let mut gate = lock(&self.gate);
                let held = gate.held_until.filter(|until| *until > Instant::now());
                if held.is_none() && gate.in_flight < gate.effective {
                    gate.in_flight += 1;
                    return true;
                }
                held
            };
            let at = |time: Option<Instant>| async move {
                match time {
                    Some(time) => sleep_until(time).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = told => {}
                () = at(held) => {}
                // 23: who leaves has no slot.
                () = at(deadline) => return false,
            }
        }
    }
}

/// A slot that is held; given back on drop.
struct Slot<'a> {
    org: &'a Org,
    cap: usize,
    clean: bool,
}

impl Slot<'_> {
    /// 19: the least fraction that remains, folded in by half.
    fn read(&self, headers: &HeaderMap) {
        let figure = |name: &str| headers.get(name)?.to_str().ok()?.parse::<f64>().ok();
        let fractions = ["requests", "output-tokens", "input-tokens"].iter().filter_map(|what| {
            let remaining = figure(&format!("anthropic-ratelimit-{what}-remaining"))?;
            let limit = figure(&format!("anthropic-ratelimit-{what}-limit"))?;
            (limit > 0.0).then(|| (remaining / limit).clamp(0.0, 1.0))
        });
        if let Some(least) = fractions.min_by(f64::total_cmp) {
            let mut gate = lock(&self.org.gate);
            gate.headroom = 0.5 * gate.headroom + 0.5 * least;
        }
    }

    /// 15, 17.
    fn cut(&self, headers: &HeaderMap) {
        let wait = headers.get("retry-after").and_then(|wait| wait.to_str().ok()?.parse::<f64>().ok());
        let until = wait.and_then(|wait| Some(Instant::now() + Duration::try_from_secs_f64(wait).ok()?));
        let mut gate = lock(&self.org.gate);
        gate.effective = (gate.effective / 2).max(FLOOR);
        gate.held_until = gate.held_until.max(until);
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        let free = {
            let mut gate = lock(&self.org.gate);
            gate.in_flight -= 1;
            // 14, 20.
            if self.clean && gate.headroom >= LOW {
                gate.effective = (gate.effective + STEP).min(self.cap);
            }
            gate.effective.saturating_sub(gate.in_flight)
        };
        for _ in 0..free {
            self.org.bell.notify_one();
        }
    }
}
