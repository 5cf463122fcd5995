//! Somebody else's program on the key of one org: a plain loop with a ledger of its own. It uses nothing of this crate,
//! reads no quota header and knows of nobody else.

use std::{error::Error, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};
use tower::{Service, ServiceExt};

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// `x-api-key`.
    pub(crate) key: String,
    pub(crate) per_second: f64,
    pub(crate) from_s: f64,
    pub(crate) to_s: f64,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ColleagueReport {
    pub(crate) calls: u64,
    pub(crate) ok: u64,
    pub(crate) refused: u64,
}

/// What it may spend: so many a second, and two at once, so that a timer that rings late costs it nothing.
struct Ledger {
    per_second: f64,
    left: f64,
    at: Instant,
}

impl Ledger {
    const MOST: f64 = 2.0;

    fn write_up(&mut self, now: Instant) {
        self.left = (self.left + (now - self.at).as_secs_f64() * self.per_second).min(Self::MOST);
        self.at = now;
    }

    /// Takes one off, or says when one will be there.
    fn spend(&mut self, now: Instant) -> Result<(), Instant> {
        self.write_up(now);
        if self.left >= 1.0 {
            self.left -= 1.0;
            return Ok(());
        }
        Err(now + Duration::from_secs_f64((1.0 - self.left) / self.per_second))
    }
}

/// Sends from its coming until its going and waits for the last answers. What is refused is counted, and nothing else
/// is done about it: its work is endless.
pub(crate) async fn work<C, B>(orders: &Orders, base_url: &Uri, client: C) -> ColleagueReport
where
    C: Service<Request<Full<Bytes>>, Response = Response<B>> + Clone,
    B: Body<Data = Bytes>,
    C::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let begin = Instant::now();
    let (from, to) = (begin + Duration::from_secs_f64(orders.from_s), begin + Duration::from_secs_f64(orders.to_s));
    let url = format!("{base_url}v1/messages");
    let mut report = ColleagueReport::default();
    let mut ledger = Ledger { per_second: orders.per_second, left: 1.0, at: from };
    let mut flying = FuturesUnordered::new();
    let mut next = from;
    loop {
        tokio::select! {
            () = sleep_until(next), if next < to => match ledger.spend(Instant::now()) {
                Err(later) => next = later,
                Ok(()) => {
                    report.calls += 1;
                    let body = format!(r#"{{"max_tokens":64,"messages":[],"from":"a colleague","n":{}}}"#, report.calls);
                    let request = Request::post(&url).header("x-api-key", &orders.key).body(Full::new(Bytes::from(body)));
                    let request = request.expect("a URL of the provider and a key of its own");
                    let client = client.clone();
                    flying.push(async move {
                        let answer = client.oneshot(request).await.ok()?;
                        let status = answer.status().as_u16();
                        answer.into_body().collect().await.ok()?;
                        Some(status)
                    });
                }
            },
            Some(status) = flying.next() => match status {
                Some(200) => report.ok += 1,
                Some(429) => report.refused += 1,
                other => eprintln!("the colleague met {other:?}"),
            },
            else => return report,
        }
    }
}
