//! Callers: tasks that each make one call after another.

use std::{fmt::Debug, hint::black_box, time::Duration};

use http::Response;
use http_body_util::BodyExt;
use tokio::{runtime::Runtime, task::JoinSet, time::Instant};
use tower::{Service, ServiceExt};

/// A runtime with so many threads that run callers.
pub(crate) fn runtime(threads: usize) -> Runtime {
    let mut builder = match threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().unwrap()
}

/// What a caller does with an answer before it makes its next call: it reads it to its end.
pub(crate) trait Consume {
    fn consume(self) -> impl Future<Output = ()> + Send;
}

impl<B> Consume for Response<B>
where
    B: http_body::Body<Data: Send> + Send,
    B::Error: Debug,
{
    async fn consume(self) {
        black_box(self.into_body().collect().await.unwrap().to_bytes());
    }
}

impl Consume for u64 {
    async fn consume(self) {
        black_box(self);
    }
}

/// Lets `callers` tasks make `each` calls one after another, through clones of `service`, and says how long that took.
pub(crate) fn run<S, Q>(runtime: &Runtime, service: &S, request: &Q, callers: usize, each: usize) -> Duration
where
    S: Service<Q, Response: Consume + Send, Error: Debug + Send, Future: Send> + Clone + Send + 'static,
    Q: Clone + Send + 'static,
{
    runtime.block_on(async {
        let begin = Instant::now();
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let (service, request) = (service.clone(), request.clone());
            tasks.spawn(caller(service, request, each));
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        begin.elapsed()
    })
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
