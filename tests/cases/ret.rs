//! The rows of retries.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_quota::{
    call::Tried,
    drive::{Drive, DriveError},
    org::Family,
    outcome::{Class, Purse},
    retry::{Deadline, Exhaustion, RateLimitRetryLayer, RetryError},
};

use crate::{MS, SECOND, after, board, open, orgs, post, reset, say, stack, with, within};

#[tokio::test(start_paused = true)]
async fn b86_there_is_one_owner_of_retries() {
    // Attempts allowed, orgs, what is always answered; and the calls that the wire sees.
    for attempts in [1, 2, 4, 5, 6] {
        for names in [&["a"][..], &["a", "b", "c"]] {
            for (status, calls) in
                [(500, attempts), (503, attempts), (529, attempts), (408, attempts), (400, 1), (413, 1)]
            {
                let caps: Vec<_> = names.iter().map(|name| (*name, 10)).collect();
                let retry = RateLimitRetryLayer::builder().max_attempts(attempts).build().unwrap();
                let (service, wire) =
                    stack(&orgs(&caps), |stack| stack.retry(retry), move |_, _| async move { Ok(say(status)) });
                let ended = service.oneshot(post()).await;
                assert_eq!(wire.len(), calls as usize, "{attempts} attempts, {} orgs, {status}", names.len());
                match ended {
                    Ok(answer) => {
                        assert_eq!((answer.status().as_u16(), calls), (status, 1), "a final refusal is an answer")
                    }
                    Err(RetryError::Exhausted(exhausted)) => {
                        assert_eq!((exhausted.wire_calls, exhausted.reason), (calls, Exhaustion::Attempts));
                        let of = |tried: &Tried| (wire.of(tried.org.name()) as u32, tried.attempts, tried.failures);
                        assert!(exhausted.tried.iter().all(|tried| matches!(of(tried), (n, a, f) if n == a && a == f)));
                        assert_eq!(exhausted.tried.iter().map(|tried| tried.attempts).sum::<u32>(), calls);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b88_the_defaults_outlast_a_window_of_refusals() {
    // 429s for so many seconds, none of them with a hint.
    for (seconds, answered) in
        [(0, true), (1, true), (59, true), (60, true), (61, true), (300, true), (560, true), (640, false)]
    {
        for names in [&["a"][..], &["a", "b"]] {
            let caps: Vec<_> = names.iter().map(|name| (*name, 10)).collect();
            let begin = Instant::now();
            let (service, _) = stack(
                &orgs(&caps),
                |stack| stack,
                move |_, _| async move { Ok(say(if begin.elapsed() < seconds * SECOND { 429 } else { 200 })) },
            );
            let row = format!("{seconds} s, {} orgs", names.len());
            match service.oneshot(post()).await {
                Ok(answer) => assert!(answered && answer.status() == 200, "{row}"),
                Err(error) => {
                    assert!(!answered && error.is_rate_limited() && error.is_redrivable(), "{row}: {error}");
                    assert!(within(begin.elapsed(), 560 * SECOND, 640 * SECOND), "{row}: {:?}", begin.elapsed());
                }
            }
        }
    }
}

/// Waiting for its turn is no other thing than waiting for a refusal to pass.
#[tokio::test(start_paused = true)]
async fn b88_a_turn_is_waited_for_while_anything_goes_on() {
    // For so long another call has the only slot; every so often a call of another family is served; and what becomes of it.
    for (seconds, served_every, answered) in [
        (1, None, true),
        (599, None, true),
        (601, None, false),
        (599, Some(100), true),
        (601, Some(100), true),
        (3_600, Some(100), true),
        (3_600, Some(599), true),
        (3_600, Some(601), false),
    ] {
        let (service, _) = stack(
            &orgs(&[("a", 1)]),
            |stack| stack.limit(open().build().unwrap()),
            move |_, nth| after(if nth == 0 { seconds * SECOND } else { Duration::ZERO }, Ok(say(200))),
        );
        let row = format!("{seconds} s, others served every {served_every:?} s");
        let mut other = tokio_test::task::spawn(service.clone().oneshot(post()));
        assert!(other.poll().is_pending());
        // Whoever has the slot is not part of it: its answer would be progress.
        let begin = Instant::now();
        let mut waits = tokio_test::task::spawn(service.clone().oneshot(post()));
        let mut next = served_every.unwrap_or(u32::MAX);
        let ended = loop {
            if let std::task::Poll::Ready(ended) = waits.poll() {
                break ended;
            }
            if begin.elapsed() >= SECOND * next {
                next += served_every.unwrap_or(u32::MAX);
                let mut haiku = post();
                haiku.extensions_mut().insert(Family::new("haiku"));
                service.clone().oneshot(haiku).await.unwrap();
            }
            let _ = other.is_woken() && other.poll().is_ready();
            tokio::time::advance(SECOND / 2).await;
        };
        match ended {
            Ok(answer) => assert!(answered && answer.status() == 200, "{row}"),
            Err(error) => {
                assert!(!answered && error.is_rate_limited() && error.is_redrivable(), "{row}: {error}");
                let RetryError::Exhausted(exhausted) = error else { panic!("{row}: {error}") };
                assert_eq!((exhausted.reason, exhausted.wire_calls), (Exhaustion::Stalled, 0), "{row}");
                assert!(within(begin.elapsed(), 600 * SECOND, 1_202 * SECOND), "{row}: {:?}", begin.elapsed());
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b89_a_deadline_covers_queue_holds_backoff_and_call() {
    // What keeps an item, for how long; a deadline of five seconds; and whether the item comes through.
    for (kept_by, seconds, answered) in [
        ("a hold", 4, true),
        ("a hold", 6, false),
        ("a hold", 60, false),
        ("a backoff", 4, true),
        ("a backoff", 6, false),
        ("a backoff", 60, false),
        ("the queue", 4, true),
        ("the queue", 6, false),
        ("the queue", 60, false),
        ("the call", 4, true),
        ("the call", 6, false),
        ("the call", 60, false),
    ] {
        // The run's, or the item's own, from the layer or with the request.
        for whose in ["the run's", "the layer's", "the request's"] {
            if (kept_by, whose) == ("the queue", "the layer's") {
                continue; // Whoever has the slot has it too, and gives it back in time.
            }
            let orgs = orgs(&[("a", 1)]);
            let (service, _) = stack(
                &orgs,
                |stack| {
                    let exact = RateLimitRetryLayer::builder().backoff_base(MS);
                    let exact = if whose == "the layer's" { exact.deadline(5 * SECOND) } else { exact };
                    stack.limit(open().build().unwrap()).retry(exact.build().unwrap())
                },
                move |_, nth| async move {
                    match kept_by {
                        "a hold" if nth == 0 => Ok(with(429, "retry-after", seconds)),
                        "a backoff" if nth == 0 => Ok(with(503, "retry-after", seconds)),
                        "the queue" | "the call" if nth == 0 => after(seconds * SECOND, Ok(say(200))).await,
                        _ => Ok(say(200)),
                    }
                },
            );
            let row = format!("{kept_by} for {seconds} s, {whose} deadline");
            if kept_by == "the queue" {
                // Another one has the only slot.
                let mut other = tokio::spawn(service.clone().oneshot(post()));
                tokio::select! { _ = &mut other => panic!("{row}"), () = sleep(MS) => {} }
            }
            let begin = Instant::now();
            let mut request = post();
            if whose == "the request's" {
                request.extensions_mut().insert(Deadline(begin + 5 * SECOND));
            }
            let mut drive = Drive::iter(service, [(7, request)], 4).unwrap();
            if whose == "the run's" {
                drive = drive.deadline(begin + 5 * SECOND);
            }
            let (id, result) = drive.next().await.unwrap();
            assert_eq!(id, 7, "{row}: its id comes back, so that it can be sent again");
            match result {
                Ok(answer) => assert!(answered && answer.status() == 200, "{row}"),
                Err(DriveError::Deadline) => assert!(!answered && whose == "the run's", "{row}"),
                Err(DriveError::Service(RetryError::Exhausted(exhausted))) => {
                    assert!(!answered && exhausted.reason == Exhaustion::Deadline, "{row}: {exhausted}");
                    assert!(exhausted.is_redrivable() && !exhausted.is_rate_limited(), "{row}");
                    let last = match kept_by {
                        "a hold" => Class::Throttled,
                        "a backoff" => Class::Overloaded,
                        "the queue" => Class::Local,
                        _ => Class::Transport,
                    };
                    assert_eq!(exhausted.last.class, last, "{row}");
                    assert_eq!(exhausted.wire_calls, u32::from(kept_by != "the queue"), "{row}");
                    assert_eq!(exhausted.request.uri(), "/v1/messages");
                }
                Err(error) => panic!("{row}: {error}"),
            }
            if !answered {
                assert!(within(begin.elapsed(), 5 * SECOND, 5 * SECOND + 2 * MS), "{row}: {:?}", begin.elapsed());
            }
            assert!(drive.next().await.is_none());
            let kept = if kept_by == "the queue" && !answered { 1 } else { 0 };
            assert_eq!(board(&orgs, "a").snapshot().in_flight, kept, "{row}: nothing of it is left");
            assert_eq!(board(&orgs, "a").snapshot().waiting, 0, "{row}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn b44_who_was_tried_is_the_calls_own_and_who_is_dead_is_everybodys() {
    // How A answers, B always with a 500; whether a second call asks A again; and what of it is a failure.
    for (status, asked_again, is_failure) in
        [(401, false, false), (403, false, false), (429, true, false), (500, true, true)]
    {
        let (mut asked, mut again) = (false, false);
        for seed in 0..20 {
            fastrand::seed(seed);
            let (service, wire) = stack(
                &orgs(&[("a", 10), ("b", 10)]),
                |stack| stack.limit(open().build().unwrap()),
                move |org, _| {
                    let answer = match status {
                        _ if org == "b" => say(500),
                        429 => with(429, "retry-after", 1),
                        status => say(status),
                    };
                    async move { Ok(answer) }
                },
            );
            for call in 0..2 {
                let before = [wire.of("a"), wire.of("b")];
                let error = service.clone().oneshot(post()).await.unwrap_err();
                let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
                for (name, before) in ["a", "b"].into_iter().zip(before) {
                    let of = exhausted.tried.iter().find(|tried| tried.org.name() == name);
                    let (attempts, failures) = of.map_or((0, 0), |tried| (tried.attempts, tried.failures));
                    assert_eq!(attempts as usize, wire.of(name) - before, "{status}: it says what this call has seen");
                    assert_eq!(failures, if name == "b" || is_failure { attempts } else { 0 }, "{status}");
                }
                if wire.of("a") > before[0] {
                    again |= asked && call == 1 && before[0] > 0;
                    asked = true;
                }
            }
        }
        assert!(asked, "{status}");
        assert_eq!(again, asked_again, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn b91_exhaustion_keeps_the_first_and_the_last_cause_and_counts_per_class() {
    type Row = (&'static [u16], Class, Class, &'static [(Class, u32)], Exhaustion, bool);
    // The answers in turn (0: no answer at all; the last for ever), under eight calls and five attempts.
    let rows: [Row; 7] = [
        (
            &[500, 500, 429],
            Class::Overloaded,
            Class::Throttled,
            &[(Class::Throttled, 6), (Class::Overloaded, 2)],
            Exhaustion::Calls,
            true,
        ),
        (
            &[429, 500],
            Class::Throttled,
            Class::Overloaded,
            &[(Class::Throttled, 1), (Class::Overloaded, 5)],
            Exhaustion::Attempts,
            false,
        ),
        (&[500], Class::Overloaded, Class::Overloaded, &[(Class::Overloaded, 5)], Exhaustion::Attempts, false),
        (&[429], Class::Throttled, Class::Throttled, &[(Class::Throttled, 8)], Exhaustion::Calls, true),
        (
            &[0, 500, 429],
            Class::Transport,
            Class::Throttled,
            &[(Class::Throttled, 6), (Class::Overloaded, 1), (Class::Transport, 1)],
            Exhaustion::Calls,
            true,
        ),
        (
            &[500, 0],
            Class::Overloaded,
            Class::Transport,
            &[(Class::Overloaded, 1), (Class::Transport, 4)],
            Exhaustion::Attempts,
            false,
        ),
        (
            &[529, 408, 0],
            Class::Overloaded,
            Class::Transport,
            &[(Class::Overloaded, 2), (Class::Transport, 3)],
            Exhaustion::Attempts,
            false,
        ),
    ];
    for (answers, first, last, counts, reason, rate_limited) in rows {
        let retry = RateLimitRetryLayer::builder().max_calls(8).build().unwrap();
        let (service, wire) = stack(
            &orgs(&[("a", 10)]),
            |stack| stack.retry(retry),
            move |_, nth| async move {
                match answers[nth.min(answers.len() - 1)] {
                    0 => reset(),
                    status => Ok(say(status)),
                }
            },
        );
        let error = service.oneshot(post()).await.unwrap_err();
        assert_eq!(error.is_rate_limited(), rate_limited, "{answers:?}");
        let RetryError::Exhausted(exhausted) = error else { panic!("{answers:?}: {error}") };
        assert_eq!((exhausted.first.class, exhausted.last.class), (first, last), "{answers:?}");
        assert_eq!(exhausted.counts.iter().collect::<Vec<_>>(), counts, "{answers:?}");
        assert_eq!(exhausted.reason, reason, "{answers:?}");
        assert_eq!(exhausted.wire_calls as usize, wire.len(), "{answers:?}");
        assert_eq!(exhausted.last.org.as_deref(), Some("a"), "{answers:?}");
        let errors: u32 = exhausted.counts.paid_by(Purse::Errors);
        let tried: Vec<_> = exhausted.tried.iter().map(|t| (t.org.name(), t.attempts, t.failures)).collect();
        assert_eq!(tried, [("a", exhausted.wire_calls, errors)], "{answers:?}");
        assert_eq!(exhausted.waited, exhausted.elapsed, "{answers:?}: all answers came at once");
        assert!(
            exhausted.to_string().starts_with(if rate_limited { "rate limited " } else { "failed 5 times " }),
            "{exhausted}"
        );
        assert!(errors <= 5 && exhausted.elapsed > Duration::ZERO);
    }
}
