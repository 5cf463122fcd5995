//! How a request that waits is given up: by the stall verdict, by its deadline, by being dropped; and what is said of it then.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support_balance;

use std::{
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use support_balance::{Balance, Broken, Desk, Guarded, Req, answer, of_family};
use tokio::time::{Instant, advance};
use tokio_test::task::{self, Spawn};
use tower::{Layer, Service};
use tower_quota::{
    balance::OrgBalance,
    observe::Event,
    outcome::{Class, Error},
    retry::{
        Deadline, Exhausted, Exhaustion, RateLimitRetry, RateLimitRetryBuilder, RateLimitRetryLayer, RetryError,
        RetryFuture,
    },
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(600);

type Retry = RateLimitRetry<Balance>;
type Call = Spawn<RetryFuture<OrgBalance<Guarded>, u32, tower_quota::outcome::Stamped>>;
type Ended = Result<Response<u32>, RetryError<Req, Error>>;

fn build(shape: impl FnOnce(RateLimitRetryBuilder) -> RateLimitRetryBuilder) -> RateLimitRetryLayer {
    shape(RateLimitRetryLayer::builder().seed(1)).build().unwrap()
}

fn call_with(service: &Retry, request: Req) -> Call {
    let mut service = service.clone();
    let ready = task::spawn(()).enter(|cx, _| service.poll_ready(cx));
    assert!(matches!(ready, Poll::Ready(Ok(()))));
    let mut call = task::spawn(service.call(request));
    assert!(call.poll().is_pending());
    call
}

fn call(service: &Retry, id: u32) -> Call {
    call_with(service, Request::new(id))
}

#[track_caller]
fn given_up(ended: Poll<Ended>) -> Exhausted<Req> {
    match ended {
        Poll::Ready(Err(RetryError::Exhausted(exhausted))) => *exhausted,
        other => panic!("{other:?}"),
    }
}

/// Nothing wakes it before the time; then it is given up.
#[track_caller]
fn ends(call: &mut Call) -> Exhausted<Req> {
    assert!(call.is_woken(), "its time has come");
    given_up(call.poll())
}

// The stall verdict.

#[tokio::test(start_paused = true)]
async fn who_waits_for_its_turn_is_given_up_when_nothing_goes_on_for_as_long() {
    let desk = Desk::new(&["a"], 0);
    let service = build(|b| b).layer(desk.balance());
    let mut call = call(&service, 7);
    advance(PATIENCE - 2 * MS).await;
    assert!(!call.is_woken());
    advance(3 * MS).await;
    let exhausted = ends(&mut call);
    assert_eq!(exhausted.reason, Exhaustion::Stalled);
    assert!(exhausted.is_rate_limited() && exhausted.is_redrivable());
    assert_eq!((exhausted.wire_calls, exhausted.tried.len()), (0, 0));
    assert_eq!(exhausted.last.class, Class::Local, "nothing was sent");
    assert!(exhausted.waited >= PATIENCE && exhausted.waited == exhausted.elapsed);
    assert_eq!(exhausted.to_string(), "waited 10m for its turn while nothing got anywhere: try again later");
    assert_eq!(exhausted.into_request().into_body(), 7);
    desk.assert_at_rest();
}

#[tokio::test(start_paused = true)]
async fn who_waits_while_others_are_served_goes_on_waiting() {
    let desk = Desk::new(&["a"], 0);
    desk.hand_of("a", "haiku").slots(1);
    let service = build(|b| b).layer(desk.balance());
    let mut waits = call(&service, 1);
    for n in 2..5 {
        // Through another clone, of another family.
        let mut served = call_with(&service, of_family(n, "haiku"));
        advance(PATIENCE - SECOND).await;
        desk.hand_of("a", "haiku").answer(n, 200);
        assert!(served.poll().is_ready());
        assert!(waits.poll().is_pending(), "nor is it given up for being looked at");
    }
    advance(PATIENCE - 2 * MS).await;
    if waits.is_woken() {
        // The time that was set before there was progress.
        assert!(waits.poll().is_pending());
    }
    assert!(!waits.is_woken());
    advance(3 * MS).await;
    assert_eq!(ends(&mut waits).reason, Exhaustion::Stalled);
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_no_progress() {
    let desk = Desk::new(&["a"], 0);
    desk.hand_of("a", "haiku").slots(1);
    let service = build(|b| b.max_attempts(1)).layer(desk.balance());
    let mut waits = call(&service, 1);
    let mut other = call_with(&service, of_family(2, "haiku"));
    advance(PATIENCE / 2).await;
    desk.hand_of("a", "haiku").answer(2, 500);
    assert!(other.poll().is_ready());
    advance(PATIENCE / 2 + MS).await;
    assert_eq!(ends(&mut waits).reason, Exhaustion::Stalled);
}

#[tokio::test(start_paused = true)]
async fn who_has_an_org_is_waited_for_without_a_timer() {
    let desk = Desk::new(&["a"], 1);
    let service = build(|b| b).layer(desk.balance());
    let (mut first, mut second) = (call(&service, 1), call(&service, 2));
    advance(SECOND).await;
    desk.hand("a").answer(1, 200);
    assert!(first.poll().is_ready());
    assert!(second.is_woken());
    assert!(second.poll().is_pending(), "it has the slot, after it had waited for it");
    advance(10 * PATIENCE).await;
    assert!(!second.is_woken(), "nobody looks at the clock for it");
    desk.hand("a").answer(2, 200);
    assert!(second.poll().is_ready());
}

#[tokio::test(start_paused = true)]
async fn the_window_of_who_was_refused_begins_with_the_refusal() {
    let desk = Desk::new(&["a"], 1);
    let service = build(|b| b).layer(desk.balance());
    let mut call = call(&service, 1);
    advance(PATIENCE).await;
    // It took its time, and that is no waiting.
    desk.hand("a").slots(0);
    desk.hand("a").answer(1, 429);
    assert!(call.poll().is_pending());
    let refused = Instant::now();
    while !call.is_woken() {
        advance(10 * MS).await;
    }
    assert!(call.poll().is_pending(), "it waits for its turn again");
    let back = Instant::now();
    advance(PATIENCE - (back - refused) - 2 * MS).await;
    assert!(!call.is_woken());
    advance(3 * MS).await;
    let exhausted = ends(&mut call);
    assert_eq!((exhausted.reason, exhausted.last.class), (Exhaustion::Stalled, Class::Throttled));
    assert_eq!(exhausted.wire_calls, 1);
    assert!(exhausted.waited >= PATIENCE && exhausted.waited < PATIENCE + SECOND, "{:?}", exhausted.waited);
    assert!(exhausted.elapsed >= 2 * PATIENCE);
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_leaps_over_the_window_is_no_wait() {
    let desk = Desk::new(&["a"], 0);
    let service = build(|b| b).layer(desk.balance());
    let mut call = call(&service, 1);
    advance(6 * PATIENCE).await;
    assert!(call.is_woken());
    assert!(call.poll().is_pending(), "what was to happen meanwhile has had no time to");
    advance(PATIENCE - 2 * MS).await;
    assert!(!call.is_woken());
    advance(3 * MS).await;
    assert_eq!(ends(&mut call).reason, Exhaustion::Stalled);
    desk.assert_at_rest();
}

// Deadlines.

#[tokio::test(start_paused = true)]
async fn a_deadline_covers_whatever_a_request_waits_for_and_gives_it_up_at_once() {
    // What keeps it; the answer of its first call, if it has one; the calls until then, whether it waits, and the last cause.
    for (kept_by, slots, refusal, calls, waits, last) in [
        ("the queue", 0, None, 0, true, Class::Local),
        ("the call", 1, None, 1, false, Class::Transport),
        ("a backoff", 1, Some(503), 1, true, Class::Overloaded),
        ("a hint", 1, Some(429), 1, true, Class::Throttled),
        ("the budget", 1, Some(500), 1, true, Class::Overloaded),
    ] {
        let desk = Desk::new(&["a"], slots);
        let poor = |b: RateLimitRetryBuilder| b.retry_ratio(0.0).min_retries_per_second(0.01);
        let service = build(|b| poor(b).deadline(5 * SECOND)).layer(desk.balance());
        if kept_by == "the budget" {
            // Another has had the only token.
            let mut other = call(&service, 2);
            desk.hand("a").answer(2, 500);
            assert!(other.poll().is_pending());
            advance(SECOND).await;
            assert!(other.poll().is_pending());
            desk.hand("a").answer(2, 200);
            assert!(other.poll().is_ready());
        }
        let mut call = call(&service, 1);
        if let Some(status) = refusal {
            let mut refusal = answer(1, status);
            if kept_by != "the budget" {
                refusal.headers_mut().insert("retry-after", "60".parse().unwrap());
            }
            desk.hand("a").end(1, Ok(refusal));
            assert!(call.poll().is_pending());
        }
        if kept_by == "the budget" {
            advance(SECOND).await;
            assert!(call.poll().is_pending(), "the backoff is over");
            advance(4 * SECOND - 2 * MS).await;
        } else {
            advance(5 * SECOND - 2 * MS).await;
        }
        assert!(!call.is_woken(), "{kept_by}");
        advance(3 * MS).await;
        let exhausted = ends(&mut call);
        assert_eq!(exhausted.reason, Exhaustion::Deadline, "{kept_by}");
        assert!(exhausted.is_redrivable() && !exhausted.is_rate_limited(), "{kept_by}");
        assert_eq!((exhausted.wire_calls, exhausted.last.class), (calls, last), "{kept_by}");
        assert_eq!(exhausted.waited, if waits { exhausted.elapsed } else { Duration::ZERO }, "{kept_by}");
        let text = exhausted.to_string();
        assert!(text.starts_with("not done by its deadline, after 5s, last: ") && !text.contains('\n'), "{text}");
        desk.assert_at_rest();
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_deadlines_the_earlier_one_counts() {
    for (of_layer, of_request, ends_at) in [(5u32, 60u32, 5u32), (60, 5, 5), (5, 6, 5), (6, 5, 5), (60, 0, 0)] {
        let desk = Desk::new(&["a"], 0);
        let service = build(|b| b.deadline(of_layer * SECOND)).layer(desk.balance());
        let begin = Instant::now();
        let mut request = Request::new(1);
        request.extensions_mut().insert(Deadline(begin + of_request * SECOND));
        let error = service.clone().call(request).await.unwrap_err();
        assert!(matches!(error, RetryError::Exhausted(e) if e.reason == Exhaustion::Deadline));
        assert_eq!(begin.elapsed().as_secs(), u64::from(ends_at), "{of_layer} s and {of_request} s");
        desk.assert_at_rest();
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_after_the_deadline() {
    let desk = Desk::new(&["a"], 1);
    let service = build(|b| b).layer(desk.balance());
    let by = |at: Instant| {
        let mut request = Request::new(1);
        request.extensions_mut().insert(Deadline(at));
        request
    };
    // It is over before the first poll.
    let mut late = service.clone();
    let mut late = task::spawn(late.call(by(Instant::now())));
    assert_eq!(given_up(late.poll()).wire_calls, 0);
    assert_eq!(desk.hand("a").counts().calls, 0);

    // It is over before a backoff that is looked at late.
    let mut call = call_with(&service, by(Instant::now() + 5 * SECOND));
    desk.hand("a").answer(1, 500);
    assert!(call.poll().is_pending());
    advance(10 * SECOND).await;
    assert_eq!(given_up(call.poll()).last.class, Class::Overloaded);
    assert_eq!(desk.hand("a").counts().calls, 1);

    // An answer that is there is not lost because it is looked at late.
    let mut call = call_with(&service, by(Instant::now() + 5 * SECOND));
    desk.hand("a").answer(1, 200);
    advance(10 * SECOND).await;
    assert!(matches!(call.poll(), Poll::Ready(Ok(_))));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_frees_what_it_had_for_whoever_is_next() {
    let desk = Desk::new(&["a"], 1);
    let service = build(|b| b).layer(desk.balance());
    let mut request = Request::new(1);
    request.extensions_mut().insert(Deadline(Instant::now() + 5 * SECOND));
    let mut first = call_with(&service, request);
    let (mut second, third) = (call(&service, 2), call(&service, 3));
    advance(5 * SECOND + MS).await;
    assert!(!second.is_woken());
    let again = ends(&mut first).into_request();
    assert!(second.is_woken(), "the slot is free");
    assert!(second.poll().is_pending());
    assert!(desk.hand("a").has(2));
    assert_eq!(again.extensions().get::<Deadline>().copied(), Some(Deadline(Instant::now() - MS)));
    drop((second, third));
    desk.assert_at_rest();
}

// Dropped.

#[tokio::test(start_paused = true)]
async fn dropped_while_it_waits_it_frees_its_place_and_wakes_nobody_else_than_who_is_next() {
    let desk = Desk::new(&["a"], 0);
    let service = build(|b| b).layer(desk.balance());

    // For its turn, and called: its turn goes on to the next who was not called.
    let mut line: Vec<_> = (1..=4).map(|id| call(&service, id)).collect();
    desk.hand("a").slots(1);
    let woken = |line: &[Call]| line.iter().map(|call| call.is_woken()).collect::<Vec<_>>();
    assert_eq!(woken(&line), [true, true, false, false]);
    drop(line.remove(0));
    assert_eq!(woken(&line), [true, true, false]);
    desk.hand("a").slots(0);
    // Not called: nobody is woken.
    assert!(line[0].poll().is_pending() && line[1].poll().is_pending());
    drop(line.remove(2));
    assert_eq!(woken(&line), [false, false]);
    drop(line);
    desk.assert_at_rest();

    // In its call: the slot is free at once.
    desk.hand("a").slots(1);
    let (first, mut second) = (call(&service, 5), call(&service, 6));
    assert!(desk.hand("a").has(5));
    drop(first);
    assert!(second.is_woken());
    assert!(second.poll().is_pending());
    assert!(desk.hand("a").has(6));

    // Backing off: it had nothing, and nobody is woken.
    desk.hand("a").answer(6, 500);
    assert!(second.poll().is_pending());
    let mut third = call(&service, 7);
    desk.hand("a").answer(7, 500);
    assert!(third.poll().is_pending());
    drop(second);
    assert!(!third.is_woken());
    drop(third);
    desk.assert_at_rest();
    advance(2 * PATIENCE).await;
    desk.assert_at_rest();
}

// What is said in the end.

#[tokio::test(start_paused = true)]
async fn the_error_says_which_orgs_were_tried_how_often_and_how_long_it_waited() {
    let desk = Desk::new(&["a", "b"], 1);
    let service = build(|b| b.max_attempts(3)).layer(desk.balance());
    desk.hand("b").slots(0);
    let mut call = call(&service, 1);
    let mut in_calls = Duration::ZERO;
    // A refusal, two errors, and an error of the other.
    for (org, status) in [("a", 429), ("a", 500), ("a", 0), ("b", 503)] {
        assert!(desk.hand(org).has(1), "{org}");
        advance(7 * SECOND).await;
        in_calls += 7 * SECOND;
        if (org, status) == ("a", 0) {
            desk.hand("a").slots(0);
            desk.hand("b").slots(1);
        }
        match status {
            0 => desk.hand(org).end(1, Err(Broken("reset"))),
            status => desk.hand(org).answer(1, status),
        }
        let ended = call.poll();
        if org == "b" {
            let exhausted = given_up(ended);
            let tried: Vec<_> = exhausted.tried.iter().map(|t| (t.org.name(), t.attempts, t.failures)).collect();
            assert_eq!(tried, [("a", 3, 2), ("b", 1, 1)]);
            assert_eq!(exhausted.waited, exhausted.elapsed - in_calls);
            assert!(exhausted.waited > Duration::ZERO);
            assert_eq!((exhausted.first.status.unwrap().as_u16(), exhausted.last.status.unwrap().as_u16()), (429, 503));
            assert_eq!(exhausted.wire_calls, 4);
            return;
        }
        while !call.is_woken() {
            advance(10 * MS).await;
        }
        assert!(call.poll().is_pending());
    }
}

#[tokio::test(start_paused = true)]
async fn who_observes_is_told_of_retries_and_of_what_is_given_up_and_breaks_nothing() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let seen = told.clone();
    let desk = Desk::new(&["a"], 1);
    let layer = build(|b| {
        b.max_attempts(2)
            .observer(|_: &Event| panic!("an observer's own fault"))
            .observer(move |event: &Event| seen.lock().unwrap().push(event.clone()))
    });
    let service = layer.layer(desk.balance());
    let mut call = call(&service, 1);
    desk.hand("a").answer(1, 500);
    assert!(call.poll().is_pending());
    advance(SECOND).await;
    assert!(call.poll().is_pending(), "the panic has failed nothing");
    desk.hand("a").answer(1, 503);
    assert_eq!(given_up(call.poll()).reason, Exhaustion::Attempts);
    let told = told.lock().unwrap();
    let [Event::Retry { org, class, calls: 1, wait, .. }, gave_up] = &told[..] else { panic!("{told:?}") };
    assert_eq!((org.as_ref().unwrap().name(), *class), ("a", Class::Overloaded));
    assert!(*wait > Duration::ZERO && *wait <= SECOND / 2);
    assert_eq!(gave_up.to_string(), "given up after 2 calls, last overloaded by a: no attempt left");
}
