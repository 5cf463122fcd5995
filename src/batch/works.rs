//! Works that many wait for: driven by whichever of those who wait is polled. Nothing is spawned.
//!
//! A work is a future that is kept here, not in the future of whoever polls it: when that one is dropped, at whatever await point of the
//! work, the next one goes on from there. An event of a work (an answer, a timer) calls one of those who wait: not all, which may be
//! thousands. It is the one that was polled last, since somebody is likely to be at it still; while it is not polled, the next event calls
//! another one, and the one that was polled longest ago as well. One that was called and is dropped calls the next.
//!
//! Its lock is held over nothing of others': no future is polled or dropped under it, and no waker cloned, woken or dropped.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Wake, Waker},
};

/// How many works are polled for one poll of a waiter, before other tasks are let run.
const AT_ONCE: usize = 64;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// All works, and all who wait.
#[derive(Default)]
pub(super) struct Works(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// What is not finished.
    tasks: HashMap<u64, Arc<Task>>,
    /// What is to be polled.
    queue: VecDeque<Arc<Task>>,
    waiters: BTreeMap<u64, Slot>,
    /// Those that were not called, by when they were polled.
    uncalled: BTreeSet<(u64, u64)>,
    /// Somebody was called, and nobody has been polled since.
    outstanding: bool,
    /// How many take from the queue now: they will see what is put into it.
    driving: usize,
    next: u64,
    closed: bool,
}

struct Slot {
    /// None if it was called.
    waker: Option<Waker>,
    polled: u64,
}

struct Task {
    number: u64,
    works: Weak<Works>,
    queued: AtomicBool,
    cell: Mutex<Cell>,
}

struct Cell {
    /// `None` while it is polled, and once it has ended.
    work: Option<Work>,
    /// It was to be polled while it was.
    again: bool,
    ended: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Works {
    /// A new work. It is polled by whoever is polled next.
    pub(super) fn add(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let work: Work = Box::pin(work);
        let mut inner = lock(&self.0);
        if inner.closed {
            drop(inner);
            return;
        }
        inner.next += 1;
        let number = inner.next;
        let cell = Mutex::new(Cell { work: Some(work), again: false, ended: false });
        let task = Arc::new(Task { number, works: Arc::downgrade(self), queued: AtomicBool::new(true), cell });
        inner.tasks.insert(number, task.clone());
        inner.queue.push_back(task);
        let called = inner.call();
        drop(inner);
        called.into_iter().flatten().for_each(Waker::wake);
    }

    /// One who waits, from its first poll.
    pub(super) fn waiter(self: &Arc<Self>) -> Waiter {
        Waiter { works: self.clone(), number: None }
    }

    /// Wakes these, whatever else they are called for.
    pub(super) fn wake(&self, numbers: &[u64]) {
        let mut inner = lock(&self.0);
        let mut wakers = Vec::with_capacity(numbers.len());
        for number in numbers {
            wakers.extend(inner.take(*number));
        }
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// All works are polled once more: something that they look at has changed.
    pub(super) fn stir(&self) {
        let tasks: Vec<_> = lock(&self.0).tasks.values().cloned().collect();
        tasks.iter().for_each(Wake::wake_by_ref);
    }

    /// Drops all works where they stand; there are no more.
    pub(super) fn close(&self) {
        let mut inner = lock(&self.0);
        inner.closed = true;
        let tasks = mem::take(&mut inner.tasks);
        let queue = mem::take(&mut inner.queue);
        drop(inner);
        for task in tasks.values() {
            let mut cell = lock(&task.cell);
            cell.ended = true;
            let work = cell.work.take();
            drop(cell);
            drop(work);
        }
        drop(queue);
    }

    /// How many works are not finished.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.0).tasks.len()
    }

    fn drive(&self, cx: &mut Context<'_>) {
        lock(&self.0).driving += 1;
        let driver = Driver(self);
        for _ in 0..AT_ONCE {
            let mut inner = lock(&self.0);
            let Some(task) = inner.queue.pop_front() else {
                // Under the same lock as the look into the queue: what comes after it calls somebody.
                inner.driving -= 1;
                drop(inner);
                mem::forget(driver);
                return;
            };
            drop(inner);
            task.run(self);
        }
        drop(driver);
        cx.waker().wake_by_ref();
    }
}

/// However it ends, by a panic in a work too, others are called for what is left.
struct Driver<'a>(&'a Works);

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        let mut inner = lock(&self.0.0);
        inner.driving -= 1;
        let called = if inner.queue.is_empty() { [None, None] } else { inner.call() };
        drop(inner);
        called.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Inner {
    /// Whom to wake for an event, unless somebody is at it.
    fn call(&mut self) -> [Option<Waker>; 2] {
        if self.driving > 0 {
            return [None, None];
        }
        let last = self.uncalled.last().copied().and_then(|(_, number)| self.take(number));
        let first = if self.outstanding { self.uncalled.first().copied() } else { None };
        let first = first.and_then(|(_, number)| self.take(number));
        self.outstanding = true;
        [last, first]
    }

    fn take(&mut self, number: u64) -> Option<Waker> {
        let slot = self.waiters.get_mut(&number)?;
        let waker = slot.waker.take()?;
        self.uncalled.remove(&(slot.polled, number));
        Some(waker)
    }
}

impl Task {
    fn run(self: &Arc<Self>, works: &Works) {
        self.queued.store(false, SeqCst);
        let mut cell = lock(&self.cell);
        let Some(mut work) = cell.work.take() else {
            cell.again = !cell.ended;
            return;
        };
        drop(cell);
        // A work that panics has ended.
        let ending = Ending { task: self, works };
        let waker = Waker::from(self.clone());
        if work.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            return;
        }
        mem::forget(ending);
        let mut cell = lock(&self.cell);
        if cell.ended {
            drop(cell);
            drop(work);
            return;
        }
        cell.work = Some(work);
        let again = mem::take(&mut cell.again);
        drop(cell);
        if again {
            self.wake_by_ref();
        }
    }
}

struct Ending<'a> {
    task: &'a Task,
    works: &'a Works,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        lock(&self.task.cell).ended = true;
        let task = lock(&self.works.0).tasks.remove(&self.task.number);
        drop(task);
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(works) = self.works.upgrade() else { return };
        let mut inner = lock(&works.0);
        if inner.closed {
            return;
        }
        if !self.queued.swap(true, SeqCst) {
            inner.queue.push_back(self.clone());
        }
        // Even if it was in the queue: whoever was called for that may not be polled.
        let called = inner.call();
        drop(inner);
        called.into_iter().flatten().for_each(Waker::wake);
    }
}

/// One who waits. Dropped, it calls another if something is left to do.
pub(super) struct Waiter {
    works: Arc<Works>,
    number: Option<u64>,
}

impl Waiter {
    /// Drives all works as far as they go now. Whatever happens next calls it, or another one.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) {
        let waker = cx.waker().clone();
        let mut inner = lock(&self.works.0);
        let number = *self.number.get_or_insert_with(|| {
            inner.next += 1;
            inner.next
        });
        inner.next += 1;
        let polled = inner.next;
        let before = inner.waiters.insert(number, Slot { waker: Some(waker), polled });
        if let Some(before) = &before {
            inner.uncalled.remove(&(before.polled, number));
        }
        inner.uncalled.insert((polled, number));
        inner.outstanding = false;
        drop(inner);
        drop(before);
        self.works.drive(cx);
    }

    /// Under which [`Works::wake`] knows it, once it was polled.
    pub(super) const fn number(&self) -> Option<u64> {
        self.number
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut inner = lock(&self.works.0);
        let own = inner.waiters.remove(&number);
        if let Some(own) = &own {
            inner.uncalled.remove(&(own.polled, number));
        }
        let called = if inner.queue.is_empty() { [None, None] } else { inner.call() };
        drop(inner);
        drop(own);
        called.into_iter().flatten().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        panic::{AssertUnwindSafe, catch_unwind},
        sync::atomic::AtomicUsize,
        task::Poll,
    };

    use tokio::sync::oneshot;
    use tokio_test::task;

    use super::*;

    fn polled(waiter: &mut task::Spawn<Waiter>) {
        waiter.enter(|cx, mut waiter| waiter.poll(cx));
    }

    fn waiters<const N: usize>(works: &Arc<Works>) -> [task::Spawn<Waiter>; N] {
        let mut waiters = [(); N].map(|()| task::spawn(works.waiter()));
        waiters.iter_mut().for_each(polled);
        waiters
    }

    #[test]
    fn an_event_calls_who_was_polled_last_and_the_next_event_others() {
        let works = Arc::<Works>::default();
        let (a, one) = oneshot::channel::<()>();
        let (b, two) = oneshot::channel::<()>();
        works.add(async { drop(one.await) });
        works.add(async { drop(two.await) });
        let [first, second, mut third, fourth] = waiters(&works);
        let woken = |waiters: [&task::Spawn<Waiter>; 4]| waiters.map(task::Spawn::is_woken);
        a.send(()).unwrap();
        assert_eq!(woken([&first, &second, &third, &fourth]), [false, false, false, true]);
        b.send(()).unwrap();
        let both = "the one that was called is not polled";
        assert_eq!(woken([&first, &second, &third, &fourth]), [true, false, true, true], "{both}");
        polled(&mut third);
        assert_eq!(works.count(), 0, "it drives what the other one was called for");
        drop((first, second, fourth));
    }

    #[test]
    fn whoever_was_called_and_is_dropped_calls_the_next() {
        let works = Arc::<Works>::default();
        let (a, one) = oneshot::channel::<()>();
        let done = Arc::new(AtomicUsize::new(0));
        let seen = done.clone();
        works.add(async move {
            drop(one.await);
            seen.fetch_add(1, SeqCst);
        });
        let [mut first, second, third] = waiters(&works);
        a.send(()).unwrap();
        assert!(third.is_woken() && !second.is_woken());
        drop(third);
        assert!(second.is_woken());
        drop(second);
        assert!(first.is_woken());
        polled(&mut first);
        assert_eq!(done.load(SeqCst), 1);
    }

    #[test]
    fn a_work_that_nobody_waits_for_is_driven_by_who_comes_next() {
        let works = Arc::<Works>::default();
        let (a, one) = oneshot::channel::<()>();
        works.add(async { drop(one.await) });
        drop(waiters::<1>(&works));
        a.send(()).unwrap();
        assert_eq!(works.count(), 1);
        let _new = waiters::<1>(&works);
        assert_eq!(works.count(), 0);
    }

    #[test]
    fn a_work_that_wakes_itself_goes_on_and_one_that_never_rests_lets_others_run() {
        let works = Arc::<Works>::default();
        let polls = Arc::new(AtomicUsize::new(0));
        let seen = polls.clone();
        works.add(poll_fn(move |cx| {
            cx.waker().wake_by_ref();
            if seen.fetch_add(1, SeqCst) < 100 { Poll::Pending } else { Poll::Ready(()) }
        }));
        let [mut waiter] = waiters(&works);
        assert_eq!(polls.load(SeqCst), AT_ONCE);
        assert!(waiter.is_woken());
        polled(&mut waiter);
        assert_eq!((polls.load(SeqCst), works.count()), (101, 0));
    }

    #[test]
    fn a_work_that_panics_is_gone_and_the_others_go_on() {
        let works = Arc::<Works>::default();
        let (a, one) = oneshot::channel::<()>();
        works.add(async { panic!("as it was told") });
        works.add(async { drop(one.await) });
        let mut first = task::spawn(works.waiter());
        assert!(catch_unwind(AssertUnwindSafe(|| polled(&mut first))).is_err());
        let [second] = waiters(&works);
        assert_eq!(works.count(), 1);
        drop(first);
        a.send(()).unwrap();
        assert!(second.is_woken());
    }

    #[test]
    fn closed_it_drops_all_works_and_takes_no_more() {
        let works = Arc::<Works>::default();
        let held = Arc::new(());
        for _ in 0..2 {
            let held = held.clone();
            works.add(async move {
                std::future::pending::<()>().await;
                drop(held);
            });
        }
        let _waiters = waiters::<2>(&works);
        works.close();
        assert_eq!(Arc::strong_count(&held), 1);
        works.add(async {});
        assert_eq!(works.count(), 0);
    }
}
