//! The bounded driver: what it takes, what it holds, and that every id comes out once.

use std::{
    cell::Cell,
    collections::BTreeSet,
    convert::Infallible,
    error::Error as StdError,
    future::{Future, Ready, pending, ready},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
    time::Duration,
};

use futures_core::Stream;
use http::{Request, Response};
use tokio::time::Instant;
use tokio_test::{assert_pending, assert_ready, task};
use tower::{Service, ServiceBuilder, limit::ConcurrencyLimitLayer};
use tower_quota::{
    drive::{Drive, DriveError},
    outcome::{BoxError, ByStatus, Class, Outcome},
    retry::RateLimitRetryLayer,
};

/// Counts what happens to it. Each call takes as many milliseconds as it is told; `open` readiness permits are there.
#[derive(Clone, Default)]
struct Probe {
    open: Option<Rc<Cell<usize>>>,
    asked: Rc<Cell<usize>>,
    called: Rc<Cell<usize>>,
    alive: Rc<Cell<usize>>,
    peak: Rc<Cell<usize>>,
}

fn bump(cell: &Cell<usize>) -> usize {
    cell.set(cell.get() + 1);
    cell.get()
}

struct Alive(Rc<Cell<usize>>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Service<u64> for Probe {
    type Response = u64;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<u64, Infallible>>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        bump(&self.asked);
        match &self.open {
            Some(open) if open.get() == 0 => Poll::Pending,
            _ => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, millis: u64) -> Self::Future {
        if let Some(open) = &self.open {
            open.set(open.get().checked_sub(1).expect("called without readiness"));
        }
        bump(&self.called);
        self.peak.set(self.peak.get().max(bump(&self.alive)));
        let alive = Alive(self.alive.clone());
        Box::pin(async move {
            if millis > 0 {
                tokio::time::sleep(Duration::from_millis(millis)).await;
            }
            drop(alive);
            Ok(millis)
        })
    }
}

/// An input that is never ready and counts how often it is asked.
struct Silent(Rc<Cell<usize>>);

impl Stream for Silent {
    type Item = (u64, u64);

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        bump(&self.0);
        Poll::Pending
    }
}

fn numbered(n: u64, millis: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..n).map(move |id| (id, millis))
}

async fn ids<S, I, R>(drive: &mut Drive<S, I, u64, R>) -> Vec<(u64, &'static str)>
where
    S: Service<R>,
    I: Stream<Item = (u64, R)>,
{
    let mut ids = Vec::new();
    while let Some((id, result)) = drive.next().await {
        ids.push((
            id,
            match result {
                Ok(_) => "ok",
                Err(DriveError::Service(_)) => "service",
                Err(DriveError::Stopped) => "stopped",
                Err(DriveError::Deadline) => "deadline",
                Err(_) => unreachable!("no other"),
            },
        ));
    }
    ids
}

#[tokio::test(start_paused = true)]
async fn a_hundred_thousand_items_need_no_more_than_the_bound() {
    let probe = Probe::default();
    let read = Rc::new(Cell::new(0));
    let (counted, called) = (read.clone(), probe.called.clone());
    let input = (0..100_000u64).inspect(move |_| {
        let ahead = bump(&counted) - called.get();
        assert_eq!(ahead, 1, "the input is read one item ahead of what is called");
    });
    let mut drive = Drive::iter(probe.clone(), input.map(|id| (id, id % 3)), 64).unwrap();
    let mut seen = vec![false; 100_000];
    while let Some((id, result)) = drive.next().await {
        assert_eq!(result, Ok(id % 3));
        assert!(!std::mem::replace(&mut seen[id as usize], true), "{id} came twice");
        assert!(drive.live() <= 64);
    }
    assert!(seen.into_iter().all(|seen| seen), "every id came");
    assert_eq!((probe.peak.get(), drive.peak_live(), drive.live()), (64, 64, 0));
    assert!(drive.next().await.is_none(), "and nothing comes after the end");
}

#[tokio::test(start_paused = true)]
async fn a_waiting_item_counts_as_alive() {
    let open = Rc::new(Cell::new(3));
    let probe = Probe { open: Some(open.clone()), ..Probe::default() };
    let mut drive = task::spawn(Drive::iter(probe.clone(), numbered(100, 5), 10).unwrap());
    assert_pending!(drive.poll_next());
    assert_eq!((probe.called.get(), drive.live()), (3, 4), "three in flight, one taken and waiting for readiness");
    open.set(100);
    assert_pending!(drive.poll_next());
    assert_eq!((probe.called.get(), drive.live()), (10, 10));
}

#[tokio::test(start_paused = true)]
async fn readiness_is_not_asked_for_before_there_is_work() {
    let (probe, polled) = (Probe::default(), Rc::new(Cell::new(0)));
    let mut drive = task::spawn(Drive::new(probe.clone(), Silent(polled.clone()), 4).unwrap());
    assert_pending!(drive.poll_next());
    assert_eq!((polled.get(), probe.asked.get()), (1, 0), "a slot is not reserved for work that may not come");
}

#[tokio::test(start_paused = true)]
async fn the_input_is_not_polled_while_nothing_can_be_taken() {
    let polled = Rc::new(Cell::new(0));
    let (counted, probe) = (polled.clone(), Probe::default());
    let input = numbered(10, 1_000).inspect(move |_| {
        bump(&counted);
    });
    let mut drive = task::spawn(Drive::iter(probe, input, 2).unwrap());
    for _ in 0..5 {
        assert_pending!(drive.poll_next());
        assert_eq!(polled.get(), 2);
    }
    tokio::time::advance(Duration::from_millis(1_001)).await;
    assert!(drive.is_woken(), "by the call that finished");
    assert_ready!(drive.poll_next());
}

#[tokio::test(start_paused = true)]
async fn it_waits_for_readiness_with_the_item_in_hand_and_calls_in_the_poll_that_finds_it() {
    let (mock, mut handle) = tower_test::mock::pair::<u64, u64>();
    handle.allow(0);
    let mut drive = task::spawn(Drive::iter(mock, numbered(1, 7), 4).unwrap());
    assert_pending!(drive.poll_next());
    assert_eq!(drive.live(), 1);
    handle.allow(1);
    assert!(drive.is_woken());
    assert_pending!(drive.poll_next());
    let (request, answer) = handle.next_request().await.unwrap();
    assert_eq!(request, 7);
    answer.send_response(8);
    assert!(drive.is_woken());
    assert!(matches!(drive.poll_next(), Poll::Ready(Some((0, Ok(8))))));
    assert!(matches!(drive.poll_next(), Poll::Ready(None)));
}

#[tokio::test(start_paused = true)]
async fn an_input_that_never_ends_does_not_keep_results_back() {
    for bound in [1, 10, usize::MAX] {
        let probe = Probe::default();
        let mut drive = Drive::iter(probe.clone(), (0..).map(|id| (id, 0)), bound).unwrap();
        for results in 1..=1_000 {
            drive.next().await.unwrap().1.unwrap();
            assert_eq!(probe.called.get(), results, "no more is admitted than whoever polls can keep up with");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_large_bound_is_filled_without_keeping_the_thread() {
    let probe = Probe::default();
    let mut drive = task::spawn(Drive::iter(probe.clone(), numbered(300, 50), 1_000).unwrap());
    for called in [128, 256] {
        assert_pending!(drive.poll_next());
        assert_eq!(probe.called.get(), called);
        assert!(drive.is_woken(), "it comes back for the rest");
    }
    assert_pending!(drive.poll_next());
    assert_eq!(probe.called.get(), 300);
    assert!(!drive.is_woken());
}

#[tokio::test(start_paused = true)]
async fn results_come_as_they_complete() {
    let input = [(0, 30), (1, 10), (2, 20)];
    let mut drive = Drive::iter(Probe::default(), input, 3).unwrap();
    assert_eq!(ids(&mut drive).await, [(1, "ok"), (2, "ok"), (0, "ok")]);
}

#[tokio::test(start_paused = true)]
async fn stopped_it_admits_no_more_and_finishes_what_is_in_flight() {
    let probe = Probe { open: Some(Rc::new(Cell::new(2))), ..Probe::default() };
    let mut drive = Drive::iter(probe.clone(), numbered(1_000, 50), 8).unwrap();
    {
        let mut next = task::spawn(drive.next());
        assert_pending!(next.poll());
    }
    drive.stop();
    assert_eq!(ids(&mut drive).await, [(2, "stopped"), (0, "ok"), (1, "ok")]);
    assert_eq!(probe.called.get(), 2);
}

#[tokio::test(start_paused = true)]
async fn aborted_it_drops_what_is_in_flight_and_names_each() {
    let probe = Probe { open: Some(Rc::new(Cell::new(3))), ..Probe::default() };
    let mut drive = Drive::iter(probe.clone(), numbered(1_000, 50), 8).unwrap();
    assert!(drive.next().await.unwrap().1.is_ok());
    drive.abort();
    assert_eq!((probe.alive.get(), drive.live()), (0, 0), "at once, whether polled or not");
    let rest: BTreeSet<_> = ids(&mut drive).await.into_iter().collect();
    assert_eq!(rest.len(), 3, "two in flight and one taken: {rest:?}");
    assert!(rest.iter().all(|(_, end)| *end == "stopped"), "{rest:?}");
    assert_eq!(probe.called.get(), 3);
}

#[tokio::test(start_paused = true)]
async fn at_the_deadline_every_id_comes_out_and_nothing_more_is_sent() {
    // Readiness for two; the calls would take a minute, as would the hold that keeps the rest waiting.
    let probe = Probe { open: Some(Rc::new(Cell::new(2))), ..Probe::default() };
    let began = Instant::now();
    let drive = Drive::iter(probe.clone(), numbered(1_000, 60_000), 8).unwrap();
    let mut drive = drive.deadline(began + Duration::from_secs(5));
    let out = ids(&mut drive).await;
    assert!(began.elapsed() <= Duration::from_millis(5_001), "{:?}", began.elapsed());
    assert_eq!(out.len(), 1_000);
    assert!(out.iter().all(|(_, end)| *end == "deadline"));
    assert_eq!(out.iter().map(|(id, _)| id).collect::<BTreeSet<_>>().len(), 1_000);
    assert_eq!((probe.called.get(), probe.alive.get()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn the_deadline_wakes_who_waits_and_spares_what_was_done() {
    let began = Instant::now();
    let input = [(0, 1_000), (1, 9_000)];
    let drive = Drive::iter(Probe::default(), input, 8).unwrap().deadline(began + Duration::from_secs(5));
    let mut drive = task::spawn(drive);
    assert_pending!(drive.poll_next());
    tokio::time::advance(Duration::from_millis(1_001)).await;
    assert!(matches!(drive.poll_next(), Poll::Ready(Some((0, Ok(1_000))))));
    assert_pending!(drive.poll_next());
    tokio::time::advance(Duration::from_secs(4)).await;
    assert!(drive.is_woken());
    assert!(matches!(drive.poll_next(), Poll::Ready(Some((1, Err(DriveError::Deadline))))));
    assert!(matches!(drive.poll_next(), Poll::Ready(None)));
}

#[tokio::test(start_paused = true)]
async fn stopped_before_the_deadline_it_reads_no_further() {
    let drive = Drive::iter(Probe::default(), numbered(100, 60_000), 2).unwrap();
    let mut drive = drive.deadline(Instant::now() + Duration::from_secs(5));
    {
        let mut next = task::spawn(drive.next());
        assert_pending!(next.poll());
    }
    drive.stop();
    assert_eq!(ids(&mut drive).await, [(0, "deadline"), (1, "deadline")]);
}

/// Fails its readiness on every second item.
struct Fickle(usize);

impl Service<u64> for Fickle {
    type Response = u64;
    type Error = std::io::Error;
    type Future = Ready<Result<u64, std::io::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
        self.0 += 1;
        Poll::Ready(if self.0 % 2 == 0 { Err(std::io::Error::other("closed")) } else { Ok(()) })
    }

    fn call(&mut self, request: u64) -> Self::Future {
        ready(Ok(request))
    }
}

#[tokio::test(start_paused = true)]
async fn failed_readiness_costs_the_item_in_hand_and_no_other() {
    let mut drive = Drive::iter(Fickle(0), numbered(10, 0), 4).unwrap();
    let mut out = ids(&mut drive).await;
    out.sort_unstable();
    let expected: Vec<_> = (0..10).map(|id| (id, if id % 2 == 0 { "ok" } else { "service" })).collect();
    assert_eq!(out, expected);
}

#[tokio::test(start_paused = true)]
async fn a_panic_goes_through_and_the_others_go_on() {
    let panicking = tower::service_fn(|id: u64| async move {
        assert_ne!(id, 1, "number one");
        Ok::<_, Infallible>(id)
    });
    let mut drive = task::spawn(Drive::iter(panicking, (0..4).map(|id| (id, id)), 4).unwrap());
    let (mut out, mut panics) = (Vec::new(), 0);
    loop {
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drive.poll_next())) {
            Ok(Poll::Ready(Some((id, _)))) => out.push(id),
            Ok(Poll::Ready(None)) => break,
            Ok(Poll::Pending) => assert!(drive.is_woken(), "nothing is stuck"),
            Err(_) => panics += 1,
        }
    }
    assert_eq!((out, panics), (vec![0, 2, 3], 1));
}

#[tokio::test(start_paused = true)]
async fn dropped_it_drops_what_is_in_flight() {
    let probe = Probe::default();
    let mut drive = task::spawn(Drive::iter(probe.clone(), numbered(10, 50), 4).unwrap());
    assert_pending!(drive.poll_next());
    assert_eq!(probe.alive.get(), 4);
    drop(drive);
    assert_eq!(probe.alive.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn over_one_slot_and_a_retry_layer_nothing_deadlocks() {
    // The first answer of each item is a refusal; a reservation kept for work to come would block its retry for ever.
    let refused = std::cell::RefCell::new(BTreeSet::new());
    let provider = tower::service_fn(move |request: Request<u64>| {
        let status = if refused.borrow_mut().insert(*request.body()) { 429 } else { 200 };
        ready(Ok::<_, Infallible>(Response::builder().status(status).body(()).unwrap()))
    });
    let provider = Rc::new(std::cell::RefCell::new(provider));
    let provider = tower::service_fn(move |request| provider.borrow_mut().call(request));
    let service = ServiceBuilder::new()
        .layer(RateLimitRetryLayer::builder().classify(ByStatus).build().unwrap())
        .layer(ConcurrencyLimitLayer::new(1))
        .service(provider);
    let mut drive = Drive::iter(service, (0..100).map(|id| (id, Request::new(id))), 10).unwrap();
    let out = tokio::time::timeout(Duration::from_secs(60), ids(&mut drive)).await.expect("it comes to an end");
    assert_eq!(out.iter().filter(|(_, end)| *end == "ok").count(), 100);
}

#[test]
fn a_bound_of_zero_is_refused_by_name() {
    let refused = Drive::iter(Probe::default(), numbered(1, 0), 0).unwrap_err();
    assert_eq!(refused.field(), "bound");
}

#[test]
fn its_error_speaks_for_itself_and_keeps_the_source() {
    let inner = tower_quota::outcome::Error::from_box("connection reset".into());
    let error = DriveError::Service(inner);
    assert_eq!(error.to_string(), "no whole answer");
    assert_eq!(error.source().unwrap().to_string(), "connection reset");
    assert!(DriveError::<Infallible>::Deadline.source().is_none());

    // Boxed, it is what the service's error was.
    let inner = tower_quota::outcome::Error::new(Outcome::of(Class::Transport), "connection reset");
    let boxed = DriveError::Service(BoxError::from(inner)).into_box();
    assert!(boxed.is::<tower_quota::outcome::Error>());
    assert_eq!(boxed.source().unwrap().to_string(), "connection reset");
    assert_eq!(DriveError::<BoxError>::Stopped.into_box().to_string(), DriveError::<Infallible>::Stopped.to_string());
}

#[test]
fn it_travels_between_threads_where_its_parts_do() {
    fn travels<T: Send>(_: &T) {}
    let service = tower::service_fn(|(): ()| pending::<Result<(), Infallible>>());
    travels(&Drive::iter(service, [(0, ())], 1).unwrap());
}
