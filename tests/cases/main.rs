//! What goes wrong for people who do this job, as tables: each row with its neighbours, the values just before and just after
//! the boundary. The ids are this project's own labels; `docs/cases.md` says what each row is about.
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

#[path = "../support/mod.rs"]
mod support;

mod cb;
mod cl;
mod key;
mod lim;
mod net;
mod ra;
mod ret;
mod rt;
mod sec;
mod str;
mod tok;
mod twr;

use std::{
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};
use tower_quota::{
    aimd::{Settings, SettingsBuilder},
    org::{Family, Org, Orgs},
    stack::{Stack, Stacked},
};

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

type Body = Full<Bytes>;
type Req = Request<Body>;
type Answer = Result<Response<Body>, BoxError>;
type Client = BoxCloneSyncService<Req, Response<Body>, BoxError>;

/// One call that went over the wire.
#[derive(Clone, Debug)]
struct Call {
    org: String,
    at: Instant,
    headers: HeaderMap,
}

/// What the wire saw.
#[derive(Clone, Default)]
struct Wire(Arc<Mutex<Vec<Call>>>);

impl Wire {
    fn calls(&self) -> Vec<Call> {
        self.0.lock().unwrap().clone()
    }

    fn of(&self, org: &str) -> usize {
        self.calls().iter().filter(|call| call.org == org).count()
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The pauses between calls.
    fn gaps(&self) -> Vec<Duration> {
        self.calls().windows(2).map(|pair| pair[1].at - pair[0].at).collect()
    }
}

/// A stack whose orgs answer by a function of the org's name and of the number of the call at that org, from 0.
fn stack<A>(
    orgs: &Orgs,
    shape: impl FnOnce(Stack) -> Stack,
    answers: impl Fn(&str, usize) -> A + Clone + Send + Sync + 'static,
) -> (Stacked<Client>, Wire)
where
    A: Future<Output = Answer> + Send + 'static,
{
    let wire = Wire::default();
    let seen = wire.clone();
    let service = shape(Stack::new(orgs.clone())).build_with(move |org| {
        let (seen, answers, name) = (seen.clone(), answers.clone(), org.name().to_owned());
        Client::new(service_fn(move |request: Req| {
            let nth = seen.of(&name);
            let call = Call { org: name.clone(), at: Instant::now(), headers: request.headers().clone() };
            seen.0.lock().unwrap().push(call);
            answers(&name, nth)
        }))
    });
    (service.unwrap(), wire)
}

fn orgs(orgs: &[(&str, usize)]) -> Orgs {
    Orgs::new(orgs.iter().map(|(name, cap)| Org::new(name).cap(*cap))).unwrap()
}

/// The board that requests without a family write.
fn board(orgs: &Orgs, name: &str) -> Org {
    orgs.get(name).unwrap().family(&Family::default())
}

fn post() -> Req {
    Request::post("/v1/messages").body(Body::from("{}")).unwrap()
}

fn say(status: u16) -> Response<Body> {
    Response::builder().status(status).body(Body::default()).unwrap()
}

fn with(status: u16, name: &'static str, value: impl ToString) -> Response<Body> {
    Response::builder().status(status).header(name, value.to_string()).body(Body::default()).unwrap()
}

/// The same, and it tells a quota that nothing here ever reaches.
fn told(mut response: Response<Body>) -> Response<Body> {
    for (name, value) in QUOTA {
        response.headers_mut().insert(name, value.parse().unwrap());
    }
    response
}

const QUOTA: [(&str, &str); 2] =
    [("anthropic-ratelimit-requests-limit", "60000000"), ("anthropic-ratelimit-requests-remaining", "900000")];

fn reset() -> Answer {
    Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into())
}

async fn after(wait: Duration, answer: Answer) -> Answer {
    tokio::time::sleep(wait).await;
    answer
}

/// Limits that start at their caps, and holds that end to the point.
fn open() -> SettingsBuilder {
    Settings::builder().start(1.0).spread(Duration::ZERO)
}

fn within(seen: Duration, least: Duration, most: Duration) -> bool {
    least <= seen && seen <= most
}
