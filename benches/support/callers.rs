//! Callers: tasks that each make one call after another.

use std::{fmt::Debug, hint::black_box, time::Duration};

use http::Response;
use http_body_util::BodyExt;
use rustix::time::{ClockId, clock_gettime};
use tokio::{
    runtime::{EnterGuard, Runtime},
    task::JoinSet,
};
use tower::{Service, ServiceExt};

use super::stacks::Callable;

/// Where callers run, and what is counted as their time.
pub(crate) struct Callers {
    runtime: Runtime,
    clock: Clock,
}

/// What is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Clock {
    /// The time that passes.
    #[default]
    Wall,
    /// The processor time of the whole process: on a machine that others use too it is the steadier one. What two threads lose
    /// by waiting for each other is not in it.
    Processor,
}

impl Clock {
    fn now(self) -> Duration {
        let id = match self {
            Clock::Wall => ClockId::Monotonic,
            Clock::Processor => ClockId::ProcessCPUTime,
        };
        clock_gettime(id).try_into().unwrap()
    }
}

impl Callers {
    /// So many threads that run callers.
    pub(crate) fn new(threads: usize, clock: Clock) -> Self {
        let mut builder = match threads {
            1 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        if threads > 1 {
            builder.worker_threads(threads);
        }
        Callers { runtime: builder.enable_all().build().unwrap(), clock }
    }

    /// For what spawns something of its own.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Lets `callers` tasks make `each` calls one after another, through clones of `service`, and says how long that took.
    pub(crate) fn run<Q>(&self, service: &impl Callable<Q>, request: &Q, callers: usize, each: usize) -> Duration
    where
        Q: Clone + Send + 'static,
    {
        self.runtime.block_on(async {
            let begin = self.clock.now();
            let mut tasks = JoinSet::new();
            for _ in 0..callers {
                let (service, request) = (service.clone(), request.clone());
                tasks.spawn(caller(service, request, each));
            }
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
            self.clock.now() - begin
        })
    }
}

/// What a caller does with an answer before it makes its next call: it reads it to its end.
pub(crate) trait Consume {
    fn consume(self) -> impl Future<Output = ()> + Send;
}

impl<B> Consume for Response<B>
where
    B: http_body::Body<Data: Send, Error: Send> + Send + Unpin,
    B::Error: Debug,
{
    async fn consume(self) {
        let mut body = self.into_body();
        while let Some(frame) = body.frame().await {
            black_box(frame.unwrap());
        }
    }
}

impl Consume for u64 {
    async fn consume(self) {
        black_box(self);
    }
}

async fn caller<S, Q>(mut service: S, request: Q, calls: usize)
where
    S: Service<Q, Response: Consume, Error: Debug>,
    Q: Clone,
{
    for _ in 0..calls {
        let answer = service.ready().await.unwrap().call(request.clone()).await.unwrap();
        answer.consume().await;
    }
}
