//! Attempts to break what may be done while calls run: from any thread, at any time, and from within a user's own code.

#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

mod support;
mod support_balance;

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, mpsc},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use support::{Probe, Reply, ask};
use tokio_test::task;
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    aimd::AimdLimitLayer,
    org::{Org, Tuning},
};

const SECOND: Duration = Duration::from_secs(1);

/// On a thread of its own, since what fails here hangs.
fn within_reason(name: &str, attack: impl FnOnce() + Send + 'static) {
    let (send, done) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        attack();
        send.send(()).unwrap();
    });
    match done.recv_timeout(60 * SECOND) {
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
