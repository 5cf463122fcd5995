//! The guard: what is refused before anything is sent.
#![allow(clippy::unwrap_used)] // helpers outside of test functions

use std::{
    error::Error as _,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio_test::{assert_pending, assert_ready, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_quota::{
    guard::{GuardLayer, SystemRole, SystemRoleInMessages},
    org::{Credential, Dialect, Org, Orgs},
    outcome::{BoxError, Class, Error},
    retry::RetryError,
    sim::{Config, OrgConfig, Sim},
    stack::Stack,
};
use tower_test::mock;

type Ask = Request<Full<Bytes>>;

fn ask(messages: &str) -> Ask {
    let body = format!(r#"{{"model":"claude-haiku-4-5","max_tokens":8,"messages":{messages}}}"#);
    Request::post("/v1/messages").body(Full::new(Bytes::from(body))).unwrap()
}

const MISPLACED: &str = r#"[{"role":"user","content":"Hi"},{"role":"system","content":"Be brief."}]"#;
const FINE: &str = r#"[{"role":"user","content":"Hi"}]"#;

#[tokio::test(start_paused = true)]
async fn what_is_refused_reaches_no_org_and_the_error_says_why() {
    for (dialect, guard, sent) in [
        (Dialect::Anthropic, None, false),
        (Dialect::Anthropic, Some(false), true),
        // There it is allowed.
        (Dialect::OpenAi, None, true),
        (Dialect::OpenAi, Some(true), false),
    ] {
        let sim = Sim::new(Config::new(dialect).org(OrgConfig::new("a", "key-a"))).unwrap();
        let org = Org::new("a").credential(Credential::new("key-a")).dialect(dialect);
        let stack = Stack::new(Orgs::new([org]).unwrap());
        let stack = guard.into_iter().fold(stack, Stack::guard);
        let service = stack.build(sim.service()).unwrap();
        let path = if dialect == Dialect::Anthropic { "/v1/messages" } else { "/v1/chat/completions" };
        let mut request = ask(MISPLACED);
        *request.uri_mut() = path.parse().unwrap();
        let answer = service.oneshot(request).await;
        assert_eq!(sim.truth().calls(), u64::from(sent), "{dialect:?} {guard:?}");
        if sent {
            answer.unwrap();
            continue;
        }
        let Err(RetryError::Inner(error)) = answer else { panic!("it is not retried") };
        assert_eq!((error.class(), error.org().is_none()), (Class::Terminal, true));
        let why = error.source().unwrap().downcast_ref::<SystemRoleInMessages>().unwrap();
        assert_eq!(why.index(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_cannot_be_looked_into_passes() {
    let service =
        GuardLayer::new(SystemRole).layer(service_fn(async |_: Request<Parts>| Ok::<_, Error>(Response::new(()))));
    let halves = [&br#"{"messages":[{"role":"#[..], &br#""system"}]}"#[..]].map(Bytes::from_static);
    service.oneshot(Request::new(Parts(halves.into()))).await.unwrap();
}

#[derive(Clone)]
struct Parts(std::collections::VecDeque<Bytes>);

impl http_body::Body for Parts {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.pop_front().map(|part| Ok(http_body::Frame::data(part))))
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_is_that_of_the_service_below_and_a_refusal_does_not_use_it_up() {
    let (inner, mut handle) = mock::pair::<Ask, &'static str>();
    let inner = inner.map_err(Error::from_box);
    let mut guard = GuardLayer::new(SystemRole).layer(inner);
    let mut waiter = task::spawn(());
    handle.allow(0);
    assert_pending!(waiter.enter(|cx, _| guard.poll_ready(cx)));
    handle.allow(1);
    assert!(waiter.is_woken());
    assert_ready_ok!(waiter.enter(|cx, _| guard.poll_ready(cx)));
    let mut refused = task::spawn(guard.call(ask(MISPLACED)));
    assert!(assert_ready!(refused.poll()).is_err());
    assert_ready_ok!(waiter.enter(|cx, _| guard.poll_ready(cx)));
    let mut sent = task::spawn(guard.call(ask(FINE)));
    assert_pending!(sent.poll());
    let (_, answer) = handle.next_request().await.unwrap();
    answer.send_response("sent");
    assert!(sent.is_woken());
    assert_eq!(assert_ready_ok!(sent.poll()), "sent");
}

#[tokio::test(start_paused = true)]
async fn a_check_of_the_users_sees_every_request_once() {
    let seen = Arc::new(AtomicUsize::new(0));
    let check = {
        let seen = seen.clone();
        move |request: &Request<()>| match seen.fetch_add(1, SeqCst) {
            _ if request.uri().path() == "/delete" => Err(BoxError::from("nothing is deleted here")),
            _ => Ok(()),
        }
    };
    let service = GuardLayer::new(check).layer(service_fn(async |_: Request<()>| Ok::<_, Error>(Response::new(()))));
    for (path, refused) in [("/", false), ("/delete", true), ("/", false)] {
        let request = Request::get(path).body(()).unwrap();
        let answer = service.clone().oneshot(request).await;
        assert_eq!(answer.err().map(|error| error.source().unwrap().to_string()).is_some(), refused);
    }
    assert_eq!(seen.load(SeqCst), 3);
}
