//! What the journal's file costs: puts a second, time and memory of opening it again after a kill, the fingerprint of a request.
//!
//! `cargo bench --features journal --bench journal -- [ENTRIES [AT_ONCE]]`: figures for docs/architecture.md, not ratios.
#![allow(clippy::unwrap_used, missing_docs, reason = "a bench")]
#![allow(clippy::disallowed_types, reason = "real time is what is measured")]

use std::{
    env, fs,
    path::Path,
    process::{self, Command},
    time::Instant,
};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_quota::journal::{FileStore, Journal, JournalLayer, Key, KeyHeaders, Restored, Salt};

/// Six hundred bytes, of which 32 differ.
fn answer(number: u64) -> Bytes {
    let head = format!(r#"{{"id":"{number:032}","choices":[{{"finish_reason":"stop","message":{{"content":""#);
    let text = "a".repeat(600 - head.len() - 6);
    format!(r#"{head}{text}"}}}}]}}"#).into()
}

fn request(number: u64) -> Request<Full<Bytes>> {
    let text = "b".repeat(200);
    let body = format!(
        r#"{{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{{"role":"user","content":"{number}: {text}"}}]}}"#
    );
    Request::builder().method(Method::POST).uri("/v1/messages").body(body.into()).unwrap()
}

/// Memory now and at its peak, and what was written to the disk.
fn memory() -> String {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let told = [read("/proc/self/status"), read("/proc/self/io")].concat();
    let lines =
        told.lines().filter(|line| ["VmHWM", "RssAnon", "write_bytes"].iter().any(|name| line.starts_with(name)));
    lines.map(|line| line.replace(['\t', ' '], "")).collect::<Vec<_>>().join(", ")
}

/// All requests, so many at once; how many were answered from the file.
async fn all<S>(service: Journal<S, FileStore>, entries: u64, at_once: u64) -> u64
where
    S: tower::Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>, Future: Send> + Clone + Send + 'static,
    S::Error: std::fmt::Debug + Send + Sync,
{
    let callers = (0..at_once).map(|caller| {
        let service = service.clone();
        tokio::spawn(async move {
            let mut kept = 0;
            for number in (caller..entries).step_by(usize::try_from(at_once).unwrap()) {
                let answered = service.clone().oneshot(request(number)).await.unwrap();
                kept += u64::from(answered.extensions().get() == Some(&Restored::Kept));
            }
            kept
        })
    });
    let callers: Vec<_> = callers.collect();
    let mut kept = 0;
    for caller in callers {
        kept += caller.await.unwrap();
    }
    kept
}

fn run(path: &Path, entries: u64, at_once: u64, killed: bool) {
    let began = Instant::now();
    let store = FileStore::open(path).unwrap();
    let opened = began.elapsed();
    let answers = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let service = JournalLayer::new(store).layer(service_fn(move |_| {
        let number = answers.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        async move { Ok::<_, std::convert::Infallible>(Response::new(Full::new(answer(number)))) }
    }));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let began = Instant::now();
    let kept = runtime.block_on(all(service, entries, at_once));
    let took = began.elapsed();
    println!(
        "opened in {opened:.1?}; {entries} requests, {at_once} at once, {kept} of them kept: {took:.1?}, {:.0} a second; {}; the file {} MB",
        entries as f64 / took.as_secs_f64(),
        memory(),
        fs::metadata(path).unwrap().len() >> 20,
    );
    if killed {
        // As a kill would: nothing is closed.
        process::abort();
    }
}

fn main() {
    let arguments: Vec<_> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [path, entries, at_once] = &arguments[..] {
        return run(path.as_ref(), entries.parse().unwrap(), at_once.parse().unwrap(), true);
    }
    let number = |at: usize, default: u64| arguments.get(at).map_or(default, |argument| argument.parse().unwrap());
    let (entries, at_once) = (number(0, 1_000_000), number(1, 256));

    let headers = KeyHeaders::default();
    let began = Instant::now();
    let mut request = request(7);
    request.extensions_mut().insert(Salt("a".to_owned()));
    let body = r#"{"model":"claude-haiku-4-5","max_tokens":64,"messages":[{"role":"user","content":""}]}"#;
    let body = body.replace("\"\"", &format!("\"{}\"", "b".repeat(214)));
    for _ in 0..1_000_000 {
        std::hint::black_box(Key::of(&request, std::hint::black_box(body.as_bytes()), &headers));
    }
    println!("fingerprint of {} bytes: {:.2} µs", body.len(), began.elapsed().as_secs_f64());

    let folder = tempfile::tempdir_in(env::var("JOURNAL_BENCH_DIR").unwrap_or_else(|_| ".".to_owned())).unwrap();
    let path = folder.path().join("bench.journal");
    // Filled by a process that is killed, then read by one that is killed too: each opening finds a file that was not closed.
    for _ in 0..2 {
        let arguments = [path.to_str().unwrap().to_owned(), entries.to_string(), at_once.to_string()];
        Command::new(env::current_exe().unwrap()).args(arguments).status().unwrap();
    }
}
