//! How to test a stack of one's own, without a network and without waiting: step by step against a mock (tower-test and
//! tokio-test), and as a whole against the simulated provider in virtual time.
//!
//! ```sh
//! cargo test --example test_a_layer   # the tests at the end of this file; plain `cargo test` runs them too
//! cargo run --example test_a_layer    # the run against the simulated provider
//! ```
//!
//! Three things make it possible: the stack is a function of its client; every clock in it is tokio's, which a test may pause;
//! and `poll_ready` says by `Pending`, and by waking, all there is to see. For `cargo test` to run the tests of an example,
//! `Cargo.toml` has `test = true` for it.

use std::{error::Error, time::Duration};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower::ServiceBuilder;
use tower_quota::{
    aimd::AimdLimitLayer,
    auth::OrgAuthLayer,
    drive::Drive,
    health::OrgHealthLayer,
    judge::JudgeLayer,
    org::{BuildError, Credential, Org},
    outcome::Stamped,
    quota::QuotaHeaderLayer,
    sim::{Config, Dialect, OrgConfig, Sim, Truth},
    stack::Member,
};

/// The stack under test. It takes any client: hyper's in earnest, a mock or the simulated provider in a test.
fn one_org<S>(org: &Org, client: S) -> Result<Member<S>, BuildError> {
    Ok(ServiceBuilder::new()
        .layer(OrgHealthLayer::new(org).classify(Stamped))
        .layer(AimdLimitLayer::new(org).classify(Stamped))
        .layer(QuotaHeaderLayer::new(org))
        .layer(JudgeLayer::new().timeout(Duration::from_secs(60)).scrub(org))
        .layer(OrgAuthLayer::new(org)?)
        .service(client))
}

fn request(n: u64) -> Request<Full<Bytes>> {
    Request::post("/v1/messages").body(Full::new(Bytes::from(format!(r#"{{"item":{n}}}"#)))).expect("a literal path")
}

/// Drives requests to a provider that takes 600 a minute, and 20 more at first. Under a paused clock time passes only while
/// everybody waits for it, and then at once.
async fn ten_minutes() -> Result<(Duration, Truth), Box<dyn Error>> {
    let sim = Sim::new(Config::new(Dialect::Anthropic).org(OrgConfig::new("one", "key").requests_per_minute(600.0)))?;
    let service = one_org(&Org::new("one").credential(Credential::new("key")), sim.service())?;
    let mut drive = Drive::iter(service, (0..6_000).map(|n| (n, request(n))), 64)?;
    while let Some((n, result)) = drive.next().await {
        assert_eq!(result.map_err(|error| format!("request {n}: {error}"))?.status(), 200);
    }
    Ok((sim.elapsed(), sim.truth()))
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn Error>> {
    let (took, truth) = ten_minutes().await?;
    println!("{} requests took {took:.1?} of the provider's time; {} were refused", truth.ok(), truth.throttled_429());
    assert_eq!((truth.answered_once, truth.answered_more), (6_000, 0));
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::Response;
    use tokio::time::advance;
    use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
    use tower_quota::outcome::Class;
    use tower_test::mock::{self, Handle, Mock, Spawn};

    use super::*;

    type Req = Request<Full<Bytes>>;
    type Res = Response<Full<Bytes>>;

    type Mocked = Spawn<Member<Mock<Req, Res>>>;

    fn mocked(org: &Org) -> (Mocked, Handle<Req, Res>) {
        let (client, provider) = mock::pair();
        (Spawn::new(one_org(org, client).unwrap()), provider)
    }

    fn refusal() -> Res {
        Response::builder().status(429).header("retry-after", "30").body(Full::default()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_call_goes_alone_and_its_answer_lets_the_next_one_in() {
        let (mut first, mut provider) = mocked(&Org::new("one"));
        let mut second = first.clone();
        assert_ready_ok!(first.poll_ready());
        let mut call = task::spawn(first.call(request(1)));
        assert_pending!(call.poll());
        assert_pending!(second.poll_ready());

        let (_, respond) = provider.next_request().await.unwrap();
        respond.send_response(Response::new(Full::default()));
        assert!(call.is_woken());
        assert_eq!(assert_ready_ok!(call.poll()).status(), 200);
        assert!(second.is_woken());
        assert_ready_ok!(second.poll_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_refusal_it_is_not_ready_until_the_hint_has_passed() {
        let org = Org::new("one");
        let (mut service, mut provider) = mocked(&org);
        assert_ready_ok!(service.poll_ready());
        let mut call = task::spawn(service.call(request(1)));
        assert_pending!(call.poll());
        provider.next_request().await.unwrap().1.send_response(refusal());
        assert_eq!(assert_ready_ok!(call.poll()).status(), 429);

        assert!(org.is_held());
        assert_pending!(service.poll_ready());
        advance(Duration::from_secs(29)).await;
        assert!(!service.is_woken());
        advance(Duration::from_secs(2)).await;
        assert!(service.is_woken());
        assert_ready_ok!(service.poll_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_fails_after_the_timeout_and_gives_its_slot_back() {
        let org = Org::new("one");
        let (mut service, _provider) = mocked(&org);
        assert_ready_ok!(service.poll_ready());
        let mut call = task::spawn(service.call(request(1)));
        assert_pending!(call.poll());
        advance(Duration::from_secs(61)).await;
        assert!(call.is_woken());
        assert_eq!(assert_ready_err!(call.poll()).class(), Class::Transport);
        assert_eq!(org.snapshot().in_flight, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn ten_minutes_quota_is_spent_in_ten_minutes_and_not_crossed() {
        let (took, truth) = ten_minutes().await.unwrap();
        assert_eq!((truth.answered_once, truth.answered_more), (6_000, 0));
        assert_eq!(truth.throttled_429(), 0);
        assert!(took < Duration::from_secs(605), "{took:?}");
    }
}
