//! One copy of our program: the items and the ready-made stack over whatever client it is given.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body::Body;
use http_body_util::Full;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tower::Service;
use tower_quota::{
    drive::Drive,
    org::{Credential, Dialect, Family, Org, Orgs},
    outcome::{BoxError, Class, Stamp},
    retry::RateLimitRetryLayer,
    stack::Stack,
};

use super::scenario::Task;

pub(crate) type Call = Request<Full<Bytes>>;

/// The width of a bin of [`CopyReport::answered`].
pub(crate) const BIN: Duration = Duration::from_millis(100);

#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub(crate) struct CopyReport {
    /// Since some moment that all copies of a run know.
    pub(crate) begin_s: f64,
    pub(crate) wall_s: f64,
    pub(crate) ok: u64,
    /// Good answers per [`BIN`] since its begin.
    pub(crate) answered: Vec<u64>,
    pub(crate) peak_live: usize,
    pub(crate) peak_kib: u64,
    pub(crate) cpu_s: f64,
}

impl Task {
    fn place(&self) -> (&'static str, &'static str) {
        match (self.openai, self.embeddings) {
            (false, _) => ("/v1/messages", "claude-sonnet-4-5"),
            (true, false) => ("/v1/chat/completions", "gpt-4o"),
            (true, true) => ("/v1/embeddings", "text-embedding-3-small"),
        }
    }

    pub(crate) fn family(&self) -> Family {
        Family::of_model(self.place().1)
    }

    pub(crate) fn dialect(&self) -> Dialect {
        if self.openai { Dialect::OpenAi } else { Dialect::Anthropic }
    }

    /// The items with their requests, made as they are taken.
    pub(crate) fn items(&self) -> impl Iterator<Item = (u64, Call)> + Send + Unpin + use<> {
        let task = self.clone();
        let family = self.family();
        (self.items.0..self.items.1).map(move |item| {
            let mut request = task.request(item);
            request.extensions_mut().insert(family.clone());
            (item, request)
        })
    }

    /// One item's request. A prompt is as long as its tokens say at four bytes each, the JSON around it included.
    pub(crate) fn request(&self, item: u64) -> Call {
        let (path, model) = self.place();
        let most = self.max_tokens;
        let stream = if self.stream { r#","stream":true"# } else { "" };
        let body = |text: &str| match self.embeddings {
            true => format!(r#"{{"model":"{model}","input":"{text}"}}"#),
            false => format!(
                r#"{{"model":"{model}","max_tokens":{most}{stream},"messages":[{{"role":"user","content":"{text}"}}]}}"#
            ),
        };
        let mut text = format!("judge item {item}");
        if let Some([shortest, longest]) = self.prompt_tokens {
            // Its own draw, so that an item is the same in whichever order and by whichever copy it is sent.
            let mut rng = fastrand::Rng::with_seed(self.seed ^ item.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let bytes = 4 * rng.u64(shortest..=longest) as usize;
            let missing = bytes.saturating_sub(body(&text).len());
            text.extend(" word".chars().cycle().take(missing));
        }
        Request::post(path)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body(&text))))
            .expect("a literal path and header")
    }

    pub(crate) fn pool(&self, base_url: &Uri) -> Result<Orgs, BoxError> {
        let orgs = self.orgs.iter().map(|(name, key)| {
            let org = Org::new(name).credential(Credential::new(key)).base_url(base_url.clone());
            self.cap.into_iter().fold(org.dialect(self.dialect()), Org::cap)
        });
        Ok(Orgs::new(orgs)?)
    }

    /// How many calls to keep alive.
    pub(crate) fn bound(&self, stack: &Stack) -> usize {
        self.offered.unwrap_or_else(|| stack.live_bound(&self.family()))
    }
}

/// Does the task through the ready-made stack.
pub(crate) async fn stacked<C, B>(task: &Task, base_url: &Uri, client: C) -> Result<CopyReport, BoxError>
where
    C: Service<Call, Response = Response<B>, Error: Into<BoxError>, Future: Send + 'static> + Clone + Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    let stack = Stack::new(task.pool(base_url)?);
    let timeout = task.timeout_s.map(Duration::try_from_secs_f64).transpose()?;
    let stack = timeout.into_iter().fold(stack, Stack::timeout);
    let retry =
        task.attempts.map(|attempts| RateLimitRetryLayer::builder().max_attempts(attempts).build()).transpose()?;
    let stack = retry.into_iter().fold(stack, Stack::retry);
    let bound = task.bound(&stack);
    drive(stack.build(client)?, task, bound).await
}

/// The bare client's answers are not judged.
fn is_ok<B>(answer: &Response<B>) -> bool {
    let class = answer.extensions().get::<Stamp>().map(|stamp| stamp.outcome.class);
    answer.status().is_success() && class.is_none_or(|class| class == Class::Ok)
}

/// Does the task through this service.
pub(crate) async fn drive<S, B>(service: S, task: &Task, bound: usize) -> Result<CopyReport, BoxError>
where
    S: Service<Call, Response = Response<B>, Error: std::fmt::Display>,
{
    let mut drive = Drive::iter(service, task.items(), bound)?;
    let begin = Instant::now();
    let mut report = CopyReport::default();
    let mut shown = 0;
    while let Some((item, result)) = drive.next().await {
        match result {
            Ok(answer) if is_ok(&answer) => {
                report.ok += 1;
                let bin = (begin.elapsed().as_millis() / BIN.as_millis()) as usize;
                if report.answered.len() <= bin {
                    report.answered.resize(bin + 1, 0);
                }
                report.answered[bin] += 1;
            }
            Ok(answer) => {
                let class = answer.extensions().get::<Stamp>().map(|stamp| stamp.outcome.class);
                eprintln!("item {item}: {} {class:?}", answer.status());
            }
            Err(error) => {
                shown += 1;
                if shown <= 5 {
                    eprintln!("item {item}: {error}");
                }
            }
        }
    }
    report.wall_s = begin.elapsed().as_secs_f64();
    report.peak_live = drive.peak_live();
    Ok(report)
}
