//! The rows of the wire.

use std::{error::Error as _, io};

use tokio_test::{assert_pending, task};
use tower::ServiceExt;
use tower_quota::{
    drive::Drive,
    outcome::{Class, Error},
    retry::{RateLimitRetryLayer, RetryError},
};

use crate::{Answer, MS, SECOND, after, board, open, orgs, post, reset, say, stack, with};

#[tokio::test(start_paused = true)]
async fn b131_the_time_in_the_queue_is_not_the_calls_time() {
    // Forty calls of a second over so many slots, under a timeout: how many come through, and in how many seconds.
    for (slots, timeout, answered, seconds) in [
        (1, 1_500, 40, 40),
        (1, 1_001, 40, 40),
        (1, 999, 0, 0),
        (10, 1_001, 40, 5),
        (40, 1_001, 40, 2),
        (41, 1_001, 40, 2),
    ] {
        let orgs = orgs(&[("a", slots)]);
        let once = RateLimitRetryLayer::builder().max_attempts(1).build().unwrap();
        let (service, wire) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()).retry(once).timeout(timeout * MS),
            |_, _| after(SECOND, Ok(say(200))),
        );
        let begin = tokio::time::Instant::now();
        let mut drive = Drive::iter(service, (0..40).map(|id| (id, post())), 40).unwrap();
        let (mut ok, mut failed) = (0, 0);
        while let Some((_, result)) = drive.next().await {
            match result {
                Ok(_) => ok += 1,
                Err(_) => failed += 1,
            }
        }
        assert_eq!((ok, failed), (answered, 40 - answered), "{slots} slots, {timeout} ms");
        assert_eq!(wire.len(), 40);
        let took = begin.elapsed().as_secs();
        assert!(seconds == 0 || took == seconds, "{slots} slots, {timeout} ms: {took} s");
    }
}

#[tokio::test(start_paused = true)]
async fn b133_what_this_machine_lacks_is_no_orgs_fault() {
    // What fails; what that means; whether the org is thought the worse of.
    type Row = (&'static str, fn() -> io::Error, Class, bool);
    let rows: [Row; 7] = [
        ("no file is left to this process", || io::Error::from_raw_os_error(24), Class::Local, false),
        ("no file is left to this machine", || io::Error::from_raw_os_error(23), Class::Local, false),
        ("no port is left", || io::ErrorKind::AddrNotAvailable.into(), Class::Local, false),
        ("refused", || io::ErrorKind::ConnectionRefused.into(), Class::Transport, true),
        ("reset", || io::ErrorKind::ConnectionReset.into(), Class::Transport, true),
        ("timed out", || io::ErrorKind::TimedOut.into(), Class::Transport, true),
        ("its neighbour by number", || io::Error::from_raw_os_error(25), Class::Transport, true),
    ];
    for (row, fault, class, blamed) in rows {
        let orgs = orgs(&[("a", 10)]);
        let once = RateLimitRetryLayer::builder().max_attempts(1).build().unwrap();
        let (service, _) = stack(
            &orgs,
            |stack| stack.limit(open().build().unwrap()).retry(once),
            // As a client wraps it.
            move |_, nth| async move { if nth == 0 { Ok(say(200)) } else { Err(io::Error::other(fault()).into()) } },
        );
        service.clone().oneshot(post()).await.unwrap();
        let org = board(&orgs, "a");
        let before = (org.load(), org.snapshot().limit.unwrap());
        let error = service.oneshot(post()).await.unwrap_err();
        assert_eq!(error.class(), Some(class), "{row}");
        let RetryError::Exhausted(exhausted) = &error else { panic!("{row}: {error}") };
        assert_eq!(exhausted.wire_calls, u32::from(class != Class::Local), "{row}");
        assert!(error.is_redrivable() && !error.is_rate_limited(), "{row}");
        assert!(error.source().is_some_and(|source| source.is::<Error>()), "{row}");
        assert_eq!(org.load() > before.0, blamed, "{row}");
        assert_eq!(org.snapshot().limit.unwrap(), before.1, "{row}");
        assert!(!org.is_held() && !org.is_out(), "{row}");
    }
}

/// Set where this very program is run again, with hardly any file descriptors to its name.
#[cfg(unix)]
const POOR: &str = "TOWER_QUOTA_TEST_IS_POOR";

#[cfg(unix)]
#[test]
fn b133_a_process_without_descriptors_blames_no_org() {
    let again = r#"ulimit -n 64 && exec "$0" --exact net::the_process_without_descriptors --nocapture"#;
    let ended = std::process::Command::new("sh")
        .arg("-c")
        .arg(again)
        .arg(std::env::current_exe().unwrap())
        .env(POOR, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ended.stderr));
}

/// What the one above runs. By itself it has descriptors enough, and shows nothing.
#[cfg(unix)]
#[tokio::test]
async fn the_process_without_descriptors() {
    use bytes::Bytes;
    use http::{Request, Response};
    use http_body_util::Full;
    use tower_quota::{org::Org, stack::Stack};

    if std::env::var_os(POOR).is_none() {
        return;
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let answer =
                hyper::service::service_fn(|_| async { Ok::<_, io::Error>(Response::new(Full::new(Bytes::new()))) });
            let io = hyper_util::rt::TokioIo::new(stream);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(io, answer));
        }
    });
    let orgs = tower_quota::org::Orgs::new([Org::new("a").base_url(base)]).unwrap();
    let retry = RateLimitRetryLayer::builder().max_attempts(2).backoff_base(MS).build().unwrap();
    let service = Stack::new(orgs.clone()).retry(retry).build(tower_quota::client::http()).unwrap();
    let ask = || Request::post("/v1/messages").body(Full::new(Bytes::from_static(b"{}"))).unwrap();

    let mut all = Vec::new();
    let none_left = loop {
        match std::fs::File::open("/dev/null") {
            Ok(file) => all.push(file),
            Err(error) => break error,
        }
    };
    assert_eq!(none_left.raw_os_error(), Some(24));
    let error = service.clone().oneshot(ask()).await.unwrap_err();
    assert_eq!(error.class(), Some(Class::Local), "{error}");
    let RetryError::Exhausted(exhausted) = error else { panic!("{error}") };
    assert_eq!(exhausted.wire_calls, 0);
    assert_eq!(board(&orgs, "a").load(), 1.0 / 10.0, "one of a quarter of forty, and no penalty");
    drop(all);
    assert_eq!(service.oneshot(ask()).await.unwrap().status(), 200);
}

#[tokio::test(start_paused = true)]
async fn b134_what_was_sent_counts_and_what_was_not_does_not() {
    // What each attempt meets, and how many of them may have been billed.
    type Fault = fn() -> Answer;
    let local: Fault = || Err(io::Error::from_raw_os_error(24).into());
    let failing: Fault = || Ok(say(500));
    let refusing: Fault = || Ok(with(429, "retry-after", 1));
    let cut: Fault = reset;
    let rows: [(&[Fault], u32); 6] = [
        (&[local, local, local, local, local], 0),
        (&[local, cut, local, local, local], 1),
        (&[cut, cut, cut, cut, cut], 5),
        (&[local, cut, refusing, cut, local, local], 3),
        (&[failing, local, failing, local, cut], 3),
        (&[refusing, refusing, local, local, local, local, cut], 3),
    ];
    for (number, (faults, sent)) in rows.into_iter().enumerate() {
        let faults = faults.to_vec();
        let (service, wire) =
            stack(&orgs(&[("a", 10)]), |stack| stack, move |_, nth| std::future::ready(faults[nth]()));
        let error = service.oneshot(post()).await.unwrap_err();
        let RetryError::Exhausted(exhausted) = error else { panic!("row {number}: {error}") };
        assert_eq!(exhausted.wire_calls, sent, "row {number}");
        // All attempts carry one key, by which the provider can tell that they are one.
        let keys: Vec<_> = wire.calls().iter().map(|call| call.headers.get("idempotency-key").cloned()).collect();
        assert!(keys[0].is_some() && keys.iter().all(|key| *key == keys[0]), "row {number}: {keys:?}");
        assert_eq!(exhausted.idempotency_key, keys[0], "row {number}: it is told, for a later run");
    }
}

#[tokio::test(start_paused = true)]
async fn b134_a_call_that_is_given_up_is_dropped_and_not_sent_again() {
    for polls in [1, 2] {
        let (service, wire) = stack(&orgs(&[("a", 10)]), |stack| stack, |_, _| after(SECOND, reset()));
        let mut call = task::spawn(service.oneshot(post()));
        for _ in 0..polls {
            assert_pending!(call.poll());
        }
        drop(call);
        tokio::time::advance(60 * SECOND).await;
        assert_eq!(wire.len(), 1);
    }
}
