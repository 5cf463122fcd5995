//! The journal seen from outside: what is kept, what is shared, what is sent, and what a file survives.

#![cfg(feature = "journal")]
#![allow(clippy::unwrap_used, reason = "a test may panic, and so may its helpers")]

#[path = "journal/file.rs"]
mod file;
mod support;

use std::{
    collections::HashMap,
    future::Ready,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use support::{Probe, Reply, Script, Step, answer};
use tokio::sync::oneshot;
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceExt};
use tower_quota::{
    journal::{Journal, JournalError, JournalLayer, Key, Restored, Salt, Store, StoreError, Unkept},
    outcome::{BoxError, Class, Outcome, Stamp},
};

/// In memory; puts are held until they are let go.
#[derive(Clone, Default)]
struct Shelf(Arc<Mutex<Shelved>>);

#[derive(Default)]
struct Shelved {
    entries: HashMap<Key, Bytes>,
    puts: usize,
    held: Option<Vec<oneshot::Sender<Result<(), BoxError>>>>,
    full: bool,
}

impl Shelf {
    fn held() -> Self {
        let shelf = Shelf::default();
        shelf.0.lock().unwrap().held = Some(vec![]);
        shelf
    }

    fn full() -> Self {
        let shelf = Shelf::default();
        shelf.0.lock().unwrap().full = true;
        shelf
    }

    fn let_go(&self, result: impl Fn() -> Result<(), BoxError>) {
        for put in self.0.lock().unwrap().held.iter_mut().flat_map(|held| held.drain(..)).collect::<Vec<_>>() {
            let _ = put.send(result());
        }
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().entries.len()
    }

    fn puts(&self) -> usize {
        self.0.lock().unwrap().puts
    }
}

struct Put(oneshot::Receiver<Result<(), BoxError>>);

impl Future for Put {
    type Output = Result<(), BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|put| put.unwrap_or_else(|_| Err("let go of".into())))
    }
}

impl Store for Shelf {
    type Get = Ready<Result<Option<Bytes>, BoxError>>;
    type Put = Put;

    fn get(&self, key: &Key) -> Self::Get {
        std::future::ready(Ok(self.0.lock().unwrap().entries.get(key).cloned()))
    }

    fn put(&self, key: Key, entry: Bytes) -> Put {
        let mut shelf = self.0.lock().unwrap();
        let (done, put) = oneshot::channel();
        shelf.puts += 1;
        if shelf.full {
            let _ = done.send(Err("no space left on device".into()));
            return Put(put);
        }
        shelf.entries.insert(key, entry);
        match &mut shelf.held {
            Some(held) => held.push(done),
            None => drop(done.send(Ok(()))),
        }
        Put(put)
    }

    fn broken(&self) -> Option<StoreError> {
        let shelf = self.0.lock().unwrap();
        (shelf.full && shelf.puts > 0).then(|| StoreError::new("no space left on device"))
    }
}

const GOOD: &str = r#"{"type":"message","content":[{"type":"text","text":"Hi"}],"stop_reason":"end_turn"}"#;

fn ask(text: &str) -> Request<Full<Bytes>> {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}"}}]}}"#);
    Request::post("/v1/messages").body(body.into()).unwrap()
}

/// An answer with this body, as the judge has it.
fn said(status: u16, class: Class, body: &'static str) -> Response<Script> {
    let mut response =
        answer(status, &[("content-type", "application/json"), ("request-id", "req_1"), ("x-quota", "7")])
            .map(|_| Script::new([Step::Data(body)]));
    response.extensions_mut().insert(Stamp::new(Outcome::of(class)));
    response
}

fn good() -> Probe {
    Probe::new(|_| Reply::Now(Ok(said(200, Class::Ok, GOOD))))
}

/// Answers when it is let to.
fn slow() -> Probe {
    Probe::new(|_| Reply::Released)
}

type Over = Journal<Probe, Shelf>;

fn over(probe: &Probe, shelf: &Shelf) -> Over {
    JournalLayer::new(shelf.clone()).layer(probe.clone())
}

fn how<B>(response: &Response<B>) -> Option<Restored> {
    response.extensions().get().copied()
}

async fn text<B: http_body::Body<Error: std::fmt::Debug>>(response: Response<B>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn what_was_answered_is_not_sent_again() {
    let (probe, shelf) = (good(), Shelf::default());
    let first = over(&probe, &shelf).oneshot(ask("a")).await.unwrap();
    assert_eq!((how(&first), first.headers()["x-quota"].to_str().unwrap()), (None, "7"), "the answer as it came");
    assert_eq!(text(first).await, GOOD);
    let second = over(&probe, &shelf).oneshot(ask("a")).await.unwrap();
    assert_eq!((how(&second), second.status().as_u16(), probe.calls()), (Some(Restored::Kept), 200, 1));
    assert_eq!(second.headers()["request-id"], "req_1");
    assert!(!second.headers().contains_key("x-quota"), "that was of its time");
    let stamp = second.extensions().get::<Stamp>().unwrap();
    assert!(stamp.outcome.class == Class::Ok && stamp.org.is_none() && stamp.usage.is_none() && stamp.whole);
    assert_eq!(text(second).await, GOOD);
    over(&probe, &shelf).oneshot(ask("b")).await.unwrap();
    let mut salted = ask("a");
    salted.extensions_mut().insert(Salt("2".to_owned()));
    over(&probe, &shelf).oneshot(salted).await.unwrap();
    assert_eq!((probe.calls(), shelf.len()), (3, 3));
}

#[tokio::test]
async fn a_hit_readies_nothing_below_and_a_miss_readies_what_it_calls() {
    let (probe, shelf) = (good(), Shelf::default());
    let mut service = task::spawn(over(&probe, &shelf));
    for _ in 0..3 {
        assert_ready_ok!(
            service.enter(|cx, mut service| Service::<Request<Full<Bytes>>>::poll_ready(&mut *service, cx))
        );
    }
    assert_eq!(probe.readies(), 0, "always ready");
    // The probe panics when it is called and was not ready; its clones are not.
    service.call(ask("a")).await.unwrap();
    assert_eq!(probe.readies(), 1);
    probe.close(true);
    let hit = service.clone().oneshot(ask("a")).await.unwrap();
    assert_eq!((how(&hit), probe.readies()), (Some(Restored::Kept), 1));
    let mut miss = task::spawn(service.call(ask("b")));
    assert_pending!(miss.poll());
    probe.close(false);
    assert!(miss.is_woken());
    assert_ready_ok!(miss.poll());
}

#[tokio::test]
async fn an_answer_is_handed_up_only_when_it_is_kept() {
    let (probe, shelf) = (good(), Shelf::held());
    let mut call = task::spawn(over(&probe, &shelf).oneshot(ask("a")));
    assert_pending!(call.poll());
    assert_eq!((probe.calls(), shelf.puts()), (1, 1), "it has come, and is on its way to the disk");
    shelf.let_go(|| Ok(()));
    assert!(call.is_woken());
    assert_eq!(how(&assert_ready_ok!(call.poll())), None);
}

#[tokio::test]
async fn the_same_request_at_once_is_sent_once_and_all_have_the_answer() {
    let (probe, shelf) = (slow(), Shelf::default());
    let service = over(&probe, &shelf);
    let mut calls: Vec<_> = (0..5).map(|_| task::spawn(service.clone().oneshot(ask("a")))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    assert_eq!(probe.calls(), 1);
    probe.release(0, Ok(said(200, Class::Ok, GOOD)));
    assert!(calls[0].is_woken() && !calls[1].is_woken());
    let mut shared = vec![];
    for call in &mut calls {
        assert!(call.is_woken());
        let response = assert_ready_ok!(call.poll());
        shared.push(how(&response));
        assert_eq!(text(response).await, GOOD);
    }
    assert_eq!(shared, [None].into_iter().chain([Some(Restored::Shared); 4]).collect::<Vec<_>>());
    assert_eq!((probe.calls(), shelf.puts()), (1, 1));
}

#[tokio::test]
async fn what_is_not_kept_is_shared_all_the_same() {
    let (probe, shelf) = (slow(), Shelf::default());
    let service = over(&probe, &shelf);
    let mut calls = [(); 2].map(|()| task::spawn(service.clone().oneshot(ask("a"))));
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    probe.release(0, Ok(said(400, Class::Terminal, r#"{"error":{"message":"no"}}"#)));
    for (call, how_) in calls.iter_mut().zip([None, Some(Restored::Shared)]) {
        let response = assert_ready_ok!(call.poll());
        assert_eq!((how(&response), response.status().as_u16()), (how_, 400));
        assert_eq!(response.extensions().get::<Stamp>().unwrap().outcome.class, Class::Terminal);
    }
    assert_eq!((probe.calls(), shelf.len()), (1, 0));
    let mut again = task::spawn(service.oneshot(ask("a")));
    assert_pending!(again.poll());
    assert_eq!(probe.calls(), 2, "and it is sent again");
}

#[tokio::test]
async fn when_the_one_that_was_sent_is_dropped_another_is_sent() {
    let (probe, shelf) = (slow(), Shelf::default());
    let service = over(&probe, &shelf);
    let mut calls: Vec<_> = (0..3).map(|_| task::spawn(service.clone().oneshot(ask("a")))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    drop(calls.remove(0));
    assert_eq!(probe.futures(), 0);
    assert!(calls.iter().all(task::Spawn::is_woken));
    // The one that would be next is never polled: that holds up nobody.
    assert_pending!(calls[1].poll());
    assert_eq!((probe.calls(), probe.futures()), (2, 1));
    probe.release(1, Ok(said(200, Class::Ok, GOOD)));
    assert_eq!(how(&assert_ready_ok!(calls[1].poll())), None);
    assert_eq!(how(&assert_ready_ok!(calls[0].poll())), Some(Restored::Shared));
}

#[tokio::test]
async fn after_an_error_the_next_sends_for_itself() {
    let (probe, shelf) = (slow(), Shelf::default());
    let service = over(&probe, &shelf);
    let mut calls: Vec<_> = (0..3).map(|_| task::spawn(service.clone().oneshot(ask("a")))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    probe.release(0, Err(io::Error::other("gone")));
    let error = assert_ready!(calls[0].poll()).unwrap_err();
    assert!(matches!(error, JournalError::Inner(error) if error.to_string() == "gone"));
    assert!(calls[1].is_woken() && calls[2].is_woken());
    assert_pending!(calls[2].poll());
    assert_pending!(calls[1].poll());
    assert_eq!(probe.calls(), 2, "one at a time");
    probe.release(1, Ok(said(200, Class::Ok, GOOD)));
    assert_ready_ok!(calls[2].poll());
    assert_ready_ok!(calls[1].poll());
    assert_eq!(probe.calls(), 2);
}

#[tokio::test]
async fn an_answer_that_has_come_is_kept_and_given_to_others_though_its_own_call_is_dropped() {
    let (probe, shelf) = (good(), Shelf::held());
    let service = over(&probe, &shelf);
    let mut calls: Vec<_> = (0..2).map(|_| task::spawn(service.clone().oneshot(ask("a")))).collect();
    for call in &mut calls {
        assert_pending!(call.poll());
    }
    drop(calls.remove(0));
    assert!(calls[0].is_woken());
    assert_pending!(calls[0].poll());
    shelf.let_go(|| Ok(()));
    let answered = assert_ready_ok!(calls[0].poll());
    assert_eq!((how(&answered), probe.calls()), (Some(Restored::Shared), 1));
    assert_eq!(text(answered).await, GOOD);
}

#[tokio::test]
async fn dropped_at_any_point_it_leaves_nothing_behind() {
    let (probe, shelf) = (slow(), Shelf::held());
    let service = over(&probe, &shelf);
    drop(service.clone().oneshot(ask("a")));
    // Before the readiness, in the call, in the body, in the put.
    probe.close(true);
    let mut call = task::spawn(service.clone().oneshot(ask("a")));
    assert_pending!(call.poll());
    drop(call);
    probe.close(false);
    let mut call = task::spawn(service.clone().oneshot(ask("a")));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!(probe.futures(), 0);
    let mut call = task::spawn(service.clone().oneshot(ask("a")));
    assert_pending!(call.poll());
    let half = said(200, Class::Ok, GOOD).map(|_| Script::new([Step::Data("{"), Step::Hang]));
    probe.release(1, Ok(half));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!((probe.futures(), probe.open()), (0, 0));
    let mut call = task::spawn(service.clone().oneshot(ask("a")));
    assert_pending!(call.poll());
    probe.release(2, Ok(said(200, Class::Ok, GOOD)));
    assert_pending!(call.poll());
    assert_eq!((shelf.puts(), probe.open()), (1, 0), "nothing below is held while it is written");
    drop(call);
    // After all that, it is as it was; and that last one was kept.
    assert_eq!(how(&service.oneshot(ask("a")).await.unwrap()), Some(Restored::Kept));
}

#[tokio::test]
async fn b124_what_is_no_finished_answer_is_never_kept() {
    // Failures, empty and cut-off answers.
    let shelf = Shelf::default();
    for (status, class, body) in [
        (401, Class::Unauthorised, r#"{"error":{"type":"authentication_error"}}"#),
        (403, Class::Forbidden, "{}"),
        (429, Class::Throttled, "{}"),
        (500, Class::Overloaded, "{}"),
        (200, Class::Overloaded, r#"{"type":"error","error":{"type":"overloaded_error"}}"#),
        (200, Class::Empty, r#"{"choices":[]}"#),
        (200, Class::Rejected, GOOD),
        (200, Class::Ok, r#"{"type":"message","content":[{"text":"Hi"}],"stop_reason":"max_tokens"}"#),
        (200, Class::Ok, r#"{"choices":[{"finish_reason":"length","message":{"content":"Hi"}}]}"#),
        (200, Class::Ok, r#"{"status":"incomplete","output":[]}"#),
    ] {
        let probe = Probe::new(move |_| Reply::Now(Ok(said(status, class, body))));
        let response = over(&probe, &shelf).oneshot(ask("a")).await.unwrap();
        assert_eq!((response.status().as_u16(), text(response).await), (status, body.to_owned()));
        assert_eq!(shelf.puts(), 0, "{status} {body}");
    }
}

#[tokio::test]
async fn b125_an_unreadable_entry_is_a_miss() {
    // Half an entry, one of another key, rubbish.
    let (probe, shelf) = (good(), Shelf::default());
    over(&probe, &shelf).oneshot(ask("a")).await.unwrap();
    over(&probe, &shelf).oneshot(ask("b")).await.unwrap();
    let entries: Vec<_> = shelf.0.lock().unwrap().entries.clone().into_iter().collect();
    let [(one, first), (other, second)] = &entries[..] else { panic!() };
    for wrong in [first.slice(..first.len() / 2), second.clone(), Bytes::from_static(b"rubbish"), Bytes::new()] {
        shelf.0.lock().unwrap().entries = HashMap::from([(*one, wrong), (*other, second.clone())]);
        let before = probe.calls();
        for text in ["a", "b"] {
            assert_eq!(over(&probe, &shelf).oneshot(ask(text)).await.unwrap().status(), 200);
        }
        assert_eq!(probe.calls(), before + 1);
    }
}

#[tokio::test]
async fn when_nothing_can_be_kept_what_is_paid_is_handed_up_and_nothing_more_is_sent() {
    let (probe, shelf) = (slow(), Shelf::full());
    let service = over(&probe, &shelf);
    let mut calls = [(); 2].map(|()| task::spawn(service.clone().oneshot(ask("a"))));
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    probe.release(0, Ok(said(200, Class::Ok, GOOD)));
    for call in &mut calls {
        let response = assert_ready_ok!(call.poll());
        let Unkept(why) = response.extensions().get().unwrap();
        assert_eq!(std::error::Error::source(why).unwrap().to_string(), "no space left on device");
        assert_eq!(text(response).await, GOOD);
    }
    let error = service.oneshot(ask("b")).await.unwrap_err();
    assert!(error.to_string().contains("nothing is sent"), "{error}");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "no space left on device");
    assert!(matches!(error, JournalError::Store(_)));
    assert_eq!((probe.calls(), probe.readies()), (1, 1));
}

#[tokio::test]
async fn who_waits_for_what_is_below_while_the_store_breaks_is_not_sent() {
    let (probe, shelf) = (slow(), Shelf::full());
    let service = over(&probe, &shelf);
    let mut first = task::spawn(service.clone().oneshot(ask("a")));
    assert_pending!(first.poll());
    probe.close(true);
    let mut second = task::spawn(service.oneshot(ask("b")));
    assert_pending!(second.poll());
    probe.release(0, Ok(said(200, Class::Ok, GOOD)));
    assert!(assert_ready_ok!(first.poll()).extensions().get::<Unkept>().is_some());
    probe.close(false);
    assert!(second.is_woken());
    assert!(matches!(assert_ready_err!(second.poll()), JournalError::Store(_)));
    assert_eq!(probe.calls(), 1);
}

#[tokio::test]
async fn a_stream_is_handed_through_as_it_comes_and_those_who_wait_send_for_themselves() {
    let (answers, shelf) = (Arc::new(Mutex::new(vec![])), Shelf::default());
    let provider = tower::service_fn({
        let answers = answers.clone();
        move |_: Request<Full<Bytes>>| {
            let (send, receive) = oneshot::channel();
            answers.lock().unwrap().push(send);
            async move { receive.await.map_err(io::Error::other) }
        }
    });
    let service = JournalLayer::new(shelf.clone()).layer(provider);
    let mut calls = [(); 3].map(|()| task::spawn(service.clone().oneshot(ask("a"))));
    calls.iter_mut().for_each(|call| assert_pending!(call.poll()));
    let first = stream::iter([Ok::<_, io::Error>(Frame::data(Bytes::from_static(b"data: {}\n\n")))]);
    let events = StreamBody::new(first.chain(stream::pending()));
    let response = Response::builder().header("content-type", "text/event-stream").body(events).unwrap();
    let send = answers.lock().unwrap().remove(0);
    assert!(send.send(response).is_ok());
    let mut body = assert_ready_ok!(calls[0].poll()).into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "data: {}\n\n");
    assert_pending!(calls[1].poll());
    assert_pending!(calls[2].poll());
    assert_eq!((answers.lock().unwrap().len(), shelf.puts()), (2, 0), "at once, not one after the other");
}

#[tokio::test]
async fn what_is_larger_than_the_ceiling_or_breaks_off_is_handed_through_whole() {
    let parts = |last| {
        let part = || Step::Data("0123456789");
        let steps = [part(), part(), last];
        let mut response = answer(200, &[]).map(|_| Script::new(steps).coy());
        response.extensions_mut().insert(Stamp::new(Outcome::of(Class::Ok)));
        response
    };
    let shelf = Shelf::default();
    let layer = JournalLayer::builder(shelf.clone()).ceiling(15).build().unwrap();
    let probe = Probe::new(move |_| Reply::Now(Ok(parts(Step::Data("!")))));
    let response = layer.layer(probe).oneshot(ask("a")).await.unwrap();
    assert_eq!(text(response).await, "01234567890123456789!");
    let probe = Probe::new(move |_| Reply::Now(Ok(parts(Step::Break))));
    let mut body = over(&probe, &shelf).oneshot(ask("a")).await.unwrap().into_body();
    for _ in 0..2 {
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "0123456789");
    }
    assert!(body.frame().await.unwrap().is_err() && body.frame().await.is_none());
    assert_eq!(shelf.puts(), 0);
}

#[tokio::test]
async fn what_cannot_be_read_beforehand_and_other_methods_pass_through() {
    let (probe, shelf) = (good(), Shelf::default());
    let streamed = || Request::post("/v1/messages").body(Script::new([Step::Hang])).unwrap();
    for _ in 0..2 {
        let response = over(&probe, &shelf).oneshot(streamed()).await.unwrap();
        assert_eq!(text(response).await, GOOD);
        let mut get = ask("a");
        *get.method_mut() = Method::GET;
        over(&probe, &shelf).oneshot(get).await.unwrap();
    }
    assert_eq!((probe.calls(), shelf.puts()), (4, 0));
}

#[tokio::test]
async fn a_finished_call_that_is_kept_keeps_nothing() {
    let (probe, shelf) = (good(), Shelf::default());
    let mut call = task::spawn(over(&probe, &shelf).call(ask("a")));
    drop(assert_ready_ok!(call.poll()));
    assert_eq!((probe.futures(), probe.open()), (0, 0));
    let mut other = task::spawn(over(&probe, &shelf).call(ask("a")));
    assert_ready_ok!(other.poll());
}

#[test]
fn a_header_that_holds_a_key_and_a_ceiling_beyond_an_entry_are_refused() {
    let builder = || JournalLayer::builder(Shelf::default());
    assert_eq!(builder().key_headers([http::header::AUTHORIZATION]).build().unwrap_err().field(), "key_headers");
    assert_eq!(builder().ceiling(u64::MAX).build().unwrap_err().field(), "ceiling");
}

#[tokio::test]
async fn who_decides_what_is_kept_may_be_another() {
    let (probe, shelf) = (good(), Shelf::default());
    let asked = Arc::new(AtomicUsize::new(0));
    let keep = {
        let asked = asked.clone();
        move |_: &http::response::Parts, body: &[u8]| {
            asked.fetch_add(1, SeqCst);
            body.is_empty()
        }
    };
    let layer = JournalLayer::builder(shelf.clone()).keep(keep).build().unwrap();
    layer.layer(probe.clone()).oneshot(ask("a")).await.unwrap();
    assert_eq!((shelf.len(), asked.load(SeqCst)), (0, 1));
}

#[tokio::test]
async fn a_waker_may_ask_again_whatever_wakes_it() {
    /// Asks again where it is woken.
    struct Asks(Mutex<Option<Over>>);

    impl Wake for Asks {
        fn wake(self: Arc<Self>) {
            let Some(service) = self.0.lock().unwrap().take() else { return };
            let mut call = task::spawn(service.oneshot(ask("a")));
            let _ = call.poll();
        }
    }

    let (probe, shelf) = (slow(), Shelf::default());
    let service = over(&probe, &shelf);
    for ends in [false, true] {
        let mut leader = task::spawn(service.clone().oneshot(ask("a")));
        assert_pending!(leader.poll());
        let asks = Arc::new(Asks(Mutex::new(Some(service.clone()))));
        let mut waits = Box::pin(service.clone().oneshot(ask("a")));
        assert!(waits.as_mut().poll(&mut Context::from_waker(&Waker::from(asks.clone()))).is_pending());
        if ends {
            probe.release(probe.calls() - 1, Ok(said(200, Class::Ok, GOOD)));
            assert_ready_ok!(leader.poll());
        } else {
            drop(leader);
        }
        assert!(asks.0.lock().unwrap().is_none(), "it was woken, and nothing hangs");
    }
}

#[tokio::test]
async fn over_the_whole_stack_a_second_run_sends_nothing_and_takes_no_slot() {
    use tower_quota::{
        journal::FileStore,
        org::{Credential, Family, Org, Orgs},
        sim::{Config, Dialect, OrgConfig, Sim},
        stack::Stack,
    };

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.journal");
    let org = OrgConfig::new("a", "key-a").requests_per_minute(600_000.0);
    let server = Sim::new(Config::new(Dialect::Anthropic).org(org)).unwrap().serve().await.unwrap();
    let base = server.base_url();
    let family = Family::of_model("m");
    let ask = |number: usize| {
        let body = format!(r#"{{"model":"m","max_tokens":4096,"messages":[{{"role":"user","content":"{number}?"}}]}}"#);
        Request::post("/v1/messages").extension(family.clone()).body(Full::new(Bytes::from(body))).unwrap()
    };
    for run in 0..2 {
        let org = Org::new("a").credential(Credential::new("key-a")).base_url(base.clone());
        let stack = Stack::new(Orgs::new([org.clone()]).unwrap());
        let service =
            JournalLayer::new(FileStore::open(&path).unwrap()).layer(stack.build(tower_quota::client::http()).unwrap());
        // Each prompt three times at once.
        let asked = (0..90).map(|number| service.clone().oneshot(ask(number / 3)));
        let answers = futures_util::future::join_all(asked).await;
        let mut by = HashMap::<_, usize>::new();
        for answer in answers {
            let answer = answer.unwrap();
            assert_eq!(answer.status(), 200);
            *by.entry(how(&answer)).or_default() += 1;
        }
        assert_eq!(server.truth().ok(), 30, "run {run}");
        let sent = by.get(&None).copied().unwrap_or_default();
        let kept = by.get(&Some(Restored::Kept)).copied().unwrap_or_default();
        assert!(if run == 0 { sent == 30 && kept == 0 } else { sent == 0 && kept >= 30 }, "{by:?}");
        if run == 1 {
            assert_eq!(org.family(&family).snapshot().in_flight, 0);
        }
    }
}
