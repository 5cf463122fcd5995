//! Our side: the ready-made stack and the driver, with a journal around where a run may be killed.

use std::{path::Path, pin::Pin, time::Duration};

use bytes::Bytes;
use http::{Response, Uri};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep, sleep_until};
use tower::{Layer, Service};
use tower_quota::{
    drive::Drive,
    journal::{FileStore, JournalLayer, Key, Store, StoreError},
    org::{Credential, Family, Org, Orgs},
    outcome::{BoxError, Class, Stamp},
    stack::{Stack, Stacked},
};

use super::{
    run::Answers,
    work::{Call, MODEL, Work},
};

/// The longest that one attempt may take: far beyond the tail.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How one go at the work ended.
#[derive(Debug)]
pub(crate) struct Went {
    pub(crate) answers: Answers,
    pub(crate) wall: Duration,
    /// Requests alive when it was dropped.
    pub(crate) alive: usize,
}

/// Does the work; dropped as it is at `until`, if that comes first.
pub(crate) async fn go<C, B, St>(
    work: &Work,
    base_url: &Uri,
    client: C,
    journal: Option<St>,
    until: Option<Instant>,
) -> Result<Went, BoxError>
where
    C: Service<Call, Response = Response<B>, Error: Into<BoxError>, Future: Send + 'static>
        + Clone
        + Send
        + Sync
        + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
    St: Store,
{
    let (stack, bound) = stack(work, base_url, client)?;
    match journal {
        Some(store) => drive(JournalLayer::new(store).layer(stack), work, bound, until).await,
        None => drive(stack, work, bound, until).await,
    }
}

fn stack<C: Clone + Send + 'static>(work: &Work, base_url: &Uri, client: C) -> Result<(Stacked<C>, usize), BoxError> {
    let orgs = work
        .keys()
        .into_iter()
        .map(|(name, key)| Org::new(&name).credential(Credential::new(&key)).base_url(base_url.clone()).cap(work.cap));
    let stack = Stack::new(Orgs::new(orgs)?).timeout(TIMEOUT);
    let bound = stack.live_bound(&Family::of_model(MODEL));
    Ok((stack.build(client)?, bound))
}

async fn drive<S, B>(service: S, work: &Work, bound: usize, until: Option<Instant>) -> Result<Went, BoxError>
where
    S: Service<Call, Response = Response<B>, Error: std::fmt::Display>,
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    let family = Family::of_model(MODEL);
    let items = work.items().map(move |(id, mut request)| {
        request.extensions_mut().insert(family.clone());
        (id, request)
    });
    let mut drive = Drive::iter(service, items, bound)?;
    let mut answers = Answers::new(work.calls);
    let begin = Instant::now();
    let late = async {
        match until {
            Some(until) => sleep_until(until).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(late);
    loop {
        let next = tokio::select! {
            biased;
            () = &mut late => break,
            next = drive.next() => next,
        };
        let Some((id, result)) = next else { break };
        match result {
            Ok(answer) if is_ok(&answer) => {
                let body = answer.into_body().collect().await.map_err(Into::into)?.to_bytes();
                answers.good(id, &body);
            }
            Ok(answer) => answers.bad(format!("{id}: {}", answer.status())),
            Err(error) => answers.bad(format!("{id}: {error}")),
        }
    }
    Ok(Went { answers, wall: begin.elapsed(), alive: drive.live() })
}

fn is_ok<B>(answer: &Response<B>) -> bool {
    let class = answer.extensions().get::<Stamp>().map(|stamp| stamp.outcome.class);
    answer.status().is_success() && class == Some(Class::Ok)
}

/// A journal in a real file under a clock that is paused. The disk is reckoned at 250 ms, so that many share a sync, and after these the
/// clock stands still until it truly has the entry: else the run would be over before the first was written.
#[derive(Clone)]
pub(crate) struct Paused(FileStore);

impl Paused {
    pub(crate) fn open(file: &Path) -> Result<Self, BoxError> {
        Ok(Paused(FileStore::builder(file).linger(Duration::ZERO).open()?))
    }
}

impl Store for Paused {
    type Get = <FileStore as Store>::Get;
    type Put = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

    fn get(&self, key: &Key) -> Self::Get {
        self.0.get(key)
    }

    fn put(&self, key: Key, entry: Bytes) -> Self::Put {
        let put = self.0.put(key, entry);
        Box::pin(async move {
            sleep(Duration::from_millis(250)).await;
            // Tokio's clock does not move by itself while something blocks.
            let runtime = tokio::runtime::Handle::current();
            tokio::task::spawn_blocking(move || runtime.block_on(put)).await?
        })
    }

    fn broken(&self) -> Option<StoreError> {
        self.0.broken()
    }
}
