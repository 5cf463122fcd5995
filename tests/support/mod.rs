//! A service that checks how it is used and answers as told, and a body that does as it is told.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep},
};
use tower::Service;

/// One thing a [`Script`] does.
#[derive(Clone, Debug)]
pub enum Step {
    Data(&'static str),
    Trailers,
    Break,
    /// Pending, for good: whoever tests drops it.
    Hang,
}

/// A body that does as it is told. Its clones of `alive` tell whether it has been dropped.
#[derive(Clone, Debug, Default)]
pub struct Script {
    pub steps: VecDeque<Step>,
    /// Never says that it has ended, as a stream of unknown length does: one more poll finds out.
    pub coy: bool,
    pub alive: Arc<()>,
}

impl Script {
    pub fn new(steps: impl IntoIterator<Item = Step>) -> Self {
        Script { steps: steps.into_iter().collect(), ..Script::default() }
    }

    pub fn coy(mut self) -> Self {
        self.coy = true;
        self
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.steps.pop_front() {
            None => Poll::Ready(None),
            Some(Step::Data(text)) => Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(text.as_bytes()))))),
            Some(Step::Trailers) => Poll::Ready(Some(Ok(Frame::trailers(HeaderMap::new())))),
            Some(Step::Break) => Poll::Ready(Some(Err(io::ErrorKind::ConnectionReset.into()))),
            Some(Step::Hang) => {
                self.steps.push_front(Step::Hang);
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        !self.coy && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.steps.len() as u64)
    }
}

/// What a [`Probe`] does with a call.
#[derive(Debug)]
pub enum Reply {
    /// Answers at the first poll.
    Now(io::Result<Response<Script>>),
    /// Answers after a while.
    After(Duration, Response<Script>),
    /// Answers when [`Probe::release`] says so.
    Released,
}

/// A whole answer of this status with these headers.
pub fn answer(status: u16, headers: &[(&'static str, &str)]) -> Response<Script> {
    let mut response = Response::new(Script::default());
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in headers {
        response.headers_mut().append(*name, value.parse().unwrap());
    }
    response
}

/// The same with a body.
pub fn streaming(steps: impl IntoIterator<Item = Step>) -> Response<Script> {
    Response::new(Script::new(steps))
}

pub fn ask() -> Request<Script> {
    Request::new(Script::default())
}

type Answers = dyn Fn(usize) -> Reply + Send + Sync;

struct Shared {
    answers: Box<Answers>,
    calls: AtomicUsize,
    readies: AtomicUsize,
    open: AtomicUsize,
    most: AtomicUsize,
    closed: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
    futures: AtomicUsize,
    held: Mutex<BTreeMap<usize, oneshot::Sender<io::Result<Response<Script>>>>>,
    times: Mutex<Vec<Instant>>,
}

/// A service whose `call` panics unless this very instance was made ready, and whose clone is not ready.
pub struct Probe {
    shared: Arc<Shared>,
    ready: bool,
}

impl Probe {
    /// Answers call `n`, counted from 0, as `answers` says.
    pub fn new(answers: impl Fn(usize) -> Reply + Send + Sync + 'static) -> Self {
        let shared = Shared {
            answers: Box::new(answers),
            calls: AtomicUsize::new(0),
            readies: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            waiting: Mutex::default(),
            futures: AtomicUsize::new(0),
            held: Mutex::default(),
            times: Mutex::default(),
        };
        Probe { shared: Arc::new(shared), ready: false }
    }

    /// Answers 200 without a body, at once.
    pub fn good() -> Self {
        Probe::new(|_| Reply::Now(Ok(answer(200, &[]))))
    }

    /// Answers the first call at once, the others when released.
    pub fn held_after_the_first() -> Self {
        Probe::new(|n| if n == 0 { Reply::Now(Ok(answer(200, &[]))) } else { Reply::Released })
    }

    pub fn calls(&self) -> usize {
        self.shared.calls.load(SeqCst)
    }

    /// How often an instance became ready.
    pub fn readies(&self) -> usize {
        self.shared.readies.load(SeqCst)
    }

    /// Calls made whose future has neither finished nor been dropped.
    pub fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// Futures that have not been dropped, finished or not.
    pub fn futures(&self) -> usize {
        self.shared.futures.load(SeqCst)
    }

    /// The most that were open at once.
    pub fn most(&self) -> usize {
        self.shared.most.load(SeqCst)
    }

    /// When calls were made.
    pub fn times(&self) -> Vec<Instant> {
        self.shared.times.lock().unwrap().clone()
    }

    /// From now on no instance becomes ready, or again all do.
    pub fn close(&self, closed: bool) {
        self.shared.closed.store(closed, SeqCst);
        if !closed {
            for waker in self.shared.waiting.lock().unwrap().drain(..) {
                waker.wake();
            }
        }
    }

    /// Answers call `n`, which waits for it.
    pub fn release(&self, n: usize, answer: io::Result<Response<Script>>) {
        let held = self.shared.held.lock().unwrap().remove(&n).expect("this call waits");
        // The call may have been dropped meanwhile.
        let _ = held.send(answer);
    }
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Probe { shared: self.shared.clone(), ready: false }
    }
}

impl std::fmt::Debug for Probe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probe").field("ready", &self.ready).finish_non_exhaustive()
    }
}

impl<B> Service<Request<B>> for Probe {
    type Response = Response<Script>;
    type Error = io::Error;
    type Future = ProbeFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.shared.closed.load(SeqCst) {
            self.shared.waiting.lock().unwrap().push(cx.waker().clone());
            return Poll::Pending;
        }
        if !self.ready {
            self.ready = true;
            self.shared.readies.fetch_add(1, SeqCst);
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> ProbeFuture {
        assert!(std::mem::take(&mut self.ready), "this instance was not made ready");
        let n = self.shared.calls.fetch_add(1, SeqCst);
        self.shared.times.lock().unwrap().push(Instant::now());
        let open = self.shared.open.fetch_add(1, SeqCst) + 1;
        self.shared.most.fetch_max(open, SeqCst);
        let reply = match (self.shared.answers)(n) {
            Reply::Now(answer) => Waiting::Now(Some(answer)),
            Reply::After(wait, answer) => Waiting::After(Box::pin(tokio::time::sleep(wait)), Some(answer)),
            Reply::Released => {
                let (send, receive) = oneshot::channel();
                self.shared.held.lock().unwrap().insert(n, send);
                Waiting::Released(receive)
            }
        };
        self.shared.futures.fetch_add(1, SeqCst);
        ProbeFuture { alive: Alive(self.shared.clone()), reply, open: Some(Open(self.shared.clone())) }
    }
}

struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, SeqCst);
    }
}

enum Waiting {
    Now(Option<io::Result<Response<Script>>>),
    After(Pin<Box<Sleep>>, Option<Response<Script>>),
    Released(oneshot::Receiver<io::Result<Response<Script>>>),
}

struct Alive(Arc<Shared>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.futures.fetch_sub(1, SeqCst);
    }
}

pub struct ProbeFuture {
    alive: Alive,
    reply: Waiting,
    open: Option<Open>,
}

impl Future for ProbeFuture {
    type Output = io::Result<Response<Script>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.reply {
            Waiting::Now(answer) => answer.take().expect("polled once"),
            Waiting::After(sleep, answer) => {
                std::task::ready!(sleep.as_mut().poll(cx));
                Ok(answer.take().expect("polled once"))
            }
            Waiting::Released(receive) => std::task::ready!(Pin::new(receive).poll(cx)).expect("the probe is alive"),
        };
        self.open = None;
        Poll::Ready(answer)
    }
}
