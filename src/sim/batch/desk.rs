//! All batches and files of the provider, and the calls that manage them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::call::{Call, Page};
use super::config::BatchConfig;
use super::fate::{Fate, Phase, mix};
use super::lines::{Answers, Lines, Which};
use super::multipart;
use super::object::Frame;
use super::rows::{CHAT, EMBEDDINGS, Input, Problem, Row, hashed, read_jsonl, read_requests};
use super::truth::{BatchSeen, BatchState, BatchTruth, RowSeen, RowsTruth};
use crate::org::Dialect;
use crate::sim::config::Config;
use crate::sim::model::Lengths;
use crate::sim::wire::Failure;

const MIB: usize = 1 << 20;

/// What a call is answered with.
#[derive(Debug)]
pub(in crate::sim) enum Answer {
    Json(Value),
    Lines(Box<Lines>),
    Failure(Failure<'static>),
    /// It is done, and nobody is told.
    Lost,
}

/// Who calls, and when.
#[derive(Clone, Debug)]
pub(in crate::sim) struct Rules {
    /// The place of the org.
    pub(in crate::sim) place: usize,
    pub(in crate::sim) lengths: Lengths,
    pub(in crate::sim) now: Duration,
    /// The wall clock at the start.
    pub(in crate::sim) wall: SystemTime,
    /// Where the provider is called.
    pub(in crate::sim) base: String,
}

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) id: String,
    place: usize,
    pub(super) created: Duration,
    pub(super) fate: Fate,
    pub(super) input: Arc<Input>,
    pub(super) input_file: Option<String>,
    pub(super) problems: Vec<Problem>,
    pub(super) metadata: Value,
    order: Arc<[u32]>,
    answers: Answers,
    /// The rows counted up to now, and what they were.
    counted: usize,
    pub(super) succeeded: usize,
    pub(super) errored: usize,
    /// When that it has ended was first said, to who asked for it or for its results.
    told: Option<Duration>,
}

impl Batch {
    pub(super) fn rows(&self) -> &[Row] {
        &self.input.rows.rows
    }

    /// Output and error file of a batch that has ended: those that have something in them.
    pub(super) fn file_ids(&self, phase: Phase) -> [Option<String>; 2] {
        let is_there = phase.has_ended() && phase != Phase::Failed;
        let id = |kind: &str, lines: usize| (is_there && lines > 0).then(|| format!("file-{kind}-{}", self.id));
        [id("output", self.succeeded), id("error", self.rows().len() - self.succeeded)]
    }
}

#[derive(Debug)]
struct File {
    place: usize,
    filename: String,
    bytes: usize,
    created: Duration,
    input: Arc<Input>,
    is_deleted: bool,
}

/// All of it, for all orgs.
#[derive(Debug)]
pub(in crate::sim) struct Desk {
    dialect: Dialect,
    seed: u64,
    configs: Vec<BatchConfig>,
    names: Vec<String>,
    /// Orgs of one organization id see each other's batches: the first of them stands for all.
    owners: Vec<usize>,
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    batches: Vec<Batch>,
    /// Those that have not ended.
    open: Vec<usize>,
    files: Vec<File>,
    truths: Vec<BatchTruth>,
    /// By the hash of their `custom_id`.
    rows: HashMap<u64, RowSeen>,
    /// How often items were answered.
    answers: HashMap<u64, u32>,
    rng: fastrand::Rng,
}

/// What is read of a call's body before anything is locked.
enum Read {
    Nothing,
    Rows(Input),
    Upload { filename: String, bytes: usize, input: Input },
    Create { input_file: String, endpoint: &'static str, metadata: Value },
}

impl Desk {
    pub(in crate::sim) fn new(config: &Config) -> Self {
        let orgs = &config.orgs;
        let first = |id: &str| orgs.iter().position(|org| org.id() == id).expect("it is one of them");
        Desk {
            dialect: config.dialect,
            seed: config.seed,
            configs: orgs.iter().map(|org| org.batch.clone().unwrap_or_else(|| config.batch.clone())).collect(),
            names: orgs.iter().map(|org| org.name.clone()).collect(),
            owners: orgs.iter().map(|org| first(org.id())).collect(),
            book: Mutex::new(Book {
                batches: Vec::new(),
                open: Vec::new(),
                files: Vec::new(),
                truths: vec![BatchTruth::default(); orgs.len()],
                rows: HashMap::new(),
                answers: HashMap::new(),
                rng: fastrand::Rng::with_seed(mix(config.seed, 0)),
            }),
        }
    }

    /// All that happened up to `now` is counted.
    fn book(&self, now: Duration) -> MutexGuard<'_, Book> {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.advance(now);
        book
    }

    /// What happened up to `now`: per org, by `custom_id`, and the answers per item added to `answers`.
    pub(in crate::sim) fn report(
        &self,
        now: Duration,
        answers: &mut HashMap<u64, u32>,
    ) -> (Vec<BatchTruth>, RowsTruth) {
        let book = self.book(now);
        for (&item, &count) in &book.answers {
            *answers.entry(item).or_default() += count;
        }
        let mut rows = RowsTruth::default();
        for row in book.rows.values() {
            rows.submitted_once += u64::from(row.submitted == 1);
            rows.submitted_more += u64::from(row.submitted > 1);
            rows.billed_once += u64::from(row.billed == 1);
            rows.billed_more += u64::from(row.billed > 1);
        }
        (book.truths.clone(), rows)
    }

    pub(in crate::sim) fn row(&self, now: Duration, custom_id: &str) -> RowSeen {
        self.book(now).rows.get(&hashed(custom_id)).copied().unwrap_or_default()
    }

    pub(in crate::sim) fn batches(&self, now: Duration) -> Vec<BatchSeen> {
        let book = self.book(now);
        let seen = |batch: &Batch| BatchSeen {
            id: batch.id.clone(),
            org: self.names[batch.place].clone(),
            state: match batch.fate.phase(now.saturating_sub(batch.created)) {
                Phase::Validating | Phase::InProgress | Phase::Finalizing => BatchState::Open,
                Phase::Cancelling => BatchState::Cancelling,
                Phase::Completed => BatchState::Completed,
                Phase::Expired => BatchState::Expired,
                Phase::Cancelled => BatchState::Cancelled,
                Phase::Failed => BatchState::Failed,
            },
            created: batch.created,
            ends: batch.created.saturating_add(batch.fate.ends()),
            rows: batch.rows().len() as u64,
            told: batch.told,
            ids: batch.rows().iter().map(|row| row.custom_id.to_string()).collect(),
            succeeded: batch.succeeded as u64,
            errored: batch.errored as u64,
            lost_reply: batch.fate.lost_reply,
        };
        book.batches.iter().map(seen).collect()
    }

    /// Answers a call that was let in.
    pub(in crate::sim) fn answer(&self, call: &Call, headers: &HeaderMap, body: &[u8], rules: Rules) -> Answer {
        let read = match self.read(call, headers, body, &self.configs[rules.place]) {
            Ok(read) => read,
            Err(failure) => return Answer::Failure(failure),
        };
        let Rules { place, lengths, now, wall, base } = rules;
        let frame = Frame { now, wall, base };
        let mut book = self.book(now);
        let visit = Visit { desk: self, book: &mut book, place, lengths, frame };
        visit.answer(call, read).unwrap_or_else(Answer::Failure)
    }

    fn read(
        &self,
        call: &Call,
        headers: &HeaderMap,
        body: &[u8],
        config: &BatchConfig,
    ) -> Result<Read, Failure<'static>> {
        match (call, self.dialect) {
            (Call::Create, Dialect::Anthropic) => {
                let most = config.max_bytes.unwrap_or(256 * MIB);
                if body.len() > most {
                    return Err(Failure::too_large(format!("Request exceeds the maximum size of {most} bytes")));
                }
                let rows = read_requests(body, config.max_rows.unwrap_or(100_000)).map_err(invalid)?;
                Ok(Read::Rows(Input { rows, ..Input::default() }))
            }
            (Call::Create, _) => {
                #[derive(Deserialize)]
                struct Create {
                    input_file_id: String,
                    endpoint: String,
                    completion_window: String,
                    #[serde(default)]
                    metadata: Value,
                }
                let create: Create = serde_json::from_slice(body).map_err(|error| invalid(error.to_string()))?;
                if create.completion_window != "24h" {
                    return Err(invalid("Invalid value for 'completion_window': only '24h' is supported"));
                }
                let endpoint = [CHAT, EMBEDDINGS].into_iter().find(|known| *known == create.endpoint);
                let endpoint = endpoint.ok_or_else(|| invalid("Invalid value for 'endpoint'"))?;
                Ok(Read::Create { input_file: create.input_file_id, endpoint, metadata: create.metadata })
            }
            (Call::Upload, _) => {
                let fields = multipart::fields(headers, body).ok_or_else(|| invalid("This is no whole form"))?;
                let field = |name: &str| fields.iter().find(|field| field.name == name);
                if field("purpose").is_none_or(|purpose| purpose.content != b"batch") {
                    return Err(invalid("Invalid value for 'purpose': only 'batch' is simulated"));
                }
                let file = field("file").ok_or_else(|| invalid("Missing required parameter: 'file'"))?;
                let most = config.max_bytes.unwrap_or(200 * MIB);
                if file.content.len() > most {
                    return Err(Failure::too_large(format!("The file is larger than {most} bytes")));
                }
                let filename = file.filename.unwrap_or("file.jsonl").to_owned();
                Ok(Read::Upload { filename, bytes: file.content.len(), input: read_jsonl(file.content) })
            }
            _ => Ok(Read::Nothing),
        }
    }
}

fn invalid(message: impl Into<String>) -> Failure<'static> {
    Failure::invalid(StatusCode::BAD_REQUEST, message.into())
}

fn not_found(what: &str, id: &str) -> Failure<'static> {
    let message = format!("No {what} found with id '{id}'.");
    Failure::new(StatusCode::NOT_FOUND, "not_found_error", ("invalid_request_error", "not_found"), message)
}

impl Book {
    fn advance(&mut self, now: Duration) {
        let Book { batches, open, truths, rows, answers, .. } = self;
        open.retain(|&index| {
            let batch = &mut batches[index];
            let truth = &mut truths[batch.place];
            let age = now.saturating_sub(batch.created);
            for nth in batch.counted..batch.fate.done(age) {
                let place = batch.order[nth];
                let row = &batch.input.rows.rows[place as usize];
                let marker = batch.fate.marker(place, row);
                if marker.is_some_and(|marker| marker.failure(batch.answers.dialect).is_some()) {
                    batch.errored += 1;
                    truth.rows_errored += 1;
                } else {
                    batch.succeeded += 1;
                    truth.rows_succeeded += 1;
                    let is_chat = batch.input.url != Some(EMBEDDINGS);
                    truth.input_tokens += row.input_tokens();
                    truth.output_tokens += batch.answers.lengths.of_item(batch.answers.seed, row.ask(is_chat)).0;
                    rows.entry(hashed(&row.custom_id)).or_default().billed += 1;
                    if marker.is_none_or(|marker| marker.answers()) {
                        *answers.entry(row.item).or_default() += 1;
                    }
                }
                batch.counted = nth + 1;
            }
            let phase = batch.fate.phase(age);
            if !phase.has_ended() {
                return true;
            }
            let left = (batch.rows().len() - batch.counted) as u64;
            match phase {
                Phase::Completed => truth.completed += 1,
                Phase::Expired => {
                    truth.expired += 1;
                    truth.rows_expired += left;
                }
                Phase::Cancelled => truth.rows_canceled += left,
                _ => return false,
            }
            for row in batch.rows() {
                rows.entry(hashed(&row.custom_id)).or_default().open -= 1;
            }
            false
        });
    }
}

/// One call at the desk.
struct Visit<'a> {
    desk: &'a Desk,
    book: &'a mut Book,
    place: usize,
    lengths: Lengths,
    frame: Frame,
}

impl Visit<'_> {
    fn answer(mut self, call: &Call, read: Read) -> Result<Answer, Failure<'static>> {
        match (call, read) {
            (_, Read::Rows(input)) => self.create(input.into(), None, Value::Null, Vec::new()),
            (_, Read::Create { input_file, endpoint, metadata }) => self.create_of(input_file, endpoint, metadata),
            (_, Read::Upload { filename, bytes, input }) => {
                self.truth().uploads += 1;
                let (place, created) = (self.place, self.frame.now);
                self.book.files.push(File { place, filename, bytes, created, input: input.into(), is_deleted: false });
                Ok(Answer::Json(self.file(self.book.files.len() - 1)))
            }
            (Call::Retrieve(id), _) => {
                let index = self.find(id)?;
                self.truth().polls += 1;
                self.tell(index);
                Ok(Answer::Json(self.object(index)))
            }
            (Call::Cancel(id), _) => self.cancel(id),
            (Call::Results(id), _) => {
                let index = self.find(id)?;
                if !self.phase(index).has_ended() {
                    return Err(invalid(format!("Batch {id} has not ended: its results are not there yet")));
                }
                self.truth().results += 1;
                self.tell(index);
                Ok(Answer::Lines(Box::new(self.lines(index, Which::All))))
            }
            (Call::List(page), _) => self.list(page),
            (Call::File(id), _) => match self.results_file(id) {
                Some(lines) => {
                    let batch = &self.book.batches[lines.batch as usize - 1];
                    let created = batch.created + batch.fate.ends();
                    Ok(Answer::Json(self.file_object(id, lines.bytes(), created, "results.jsonl", "batch_output")))
                }
                None => Ok(Answer::Json(self.file(self.find_file(id)?))),
            },
            (Call::Content(id), _) => match self.results_file(id) {
                Some(lines) => {
                    self.truth().results += 1;
                    self.tell(lines.batch as usize - 1);
                    Ok(Answer::Lines(Box::new(lines)))
                }
                None => {
                    self.find_file(id)?;
                    Err(invalid("The content of input files is not kept"))
                }
            },
            (Call::DeleteFile(id), _) => {
                let index = self.find_file(id)?;
                self.book.files[index].is_deleted = true;
                Ok(Answer::Json(json!({ "id": id, "object": "file", "deleted": true })))
            }
            (Call::Create | Call::Upload, Read::Nothing) => Err(invalid("Nothing was handed in")),
        }
    }

    fn truth(&mut self) -> &mut BatchTruth {
        &mut self.book.truths[self.place]
    }

    fn config(&self) -> &BatchConfig {
        &self.desk.configs[self.place]
    }

    fn is_ours(&self, place: usize) -> bool {
        self.desk.owners[place] == self.desk.owners[self.place]
    }

    fn age(&self, index: usize) -> Duration {
        self.frame.now.saturating_sub(self.book.batches[index].created)
    }

    fn phase(&self, index: usize) -> Phase {
        self.book.batches[index].fate.phase(self.age(index))
    }

    /// Somebody asked for this batch, or for its results.
    fn tell(&mut self, index: usize) {
        if self.phase(index).has_ended() {
            self.book.batches[index].told.get_or_insert(self.frame.now);
        }
    }

    fn object(&self, index: usize) -> Value {
        let batch = &self.book.batches[index];
        match self.desk.dialect {
            Dialect::Anthropic => batch.anthropic(&self.frame, self.config().counts_while_running),
            _ => batch.openai(&self.frame),
        }
    }

    fn lines(&self, index: usize, which: Which) -> Lines {
        let batch = &self.book.batches[index];
        Lines {
            batch: index as u64 + 1,
            input: batch.input.clone(),
            order: batch.order.clone(),
            fate: batch.fate.clone(),
            answers: batch.answers.clone(),
            phase: self.phase(index),
            done: batch.counted,
            which,
            next: 0,
        }
    }

    fn create_of(
        &mut self,
        input_file: String,
        endpoint: &'static str,
        metadata: Value,
    ) -> Result<Answer, Failure<'static>> {
        let file = self.find_file(&input_file)?;
        let input = self.book.files[file].input.clone();
        let mut problems = input.problems.clone();
        let problem = |code, message: String| Problem { code, line: None, message };
        if input.url.is_some_and(|url| url != endpoint) {
            problems.push(problem("url_mismatch", format!("The requests do not ask for {endpoint}")));
        }
        let most = self.config().max_rows.unwrap_or(50_000);
        if input.rows.rows.len() > most {
            problems.push(problem("too_many_tasks", format!("The file has more than {most} requests")));
        }
        self.create(input, Some(input_file), metadata, problems)
    }

    /// What the org may not have in its queue beside what is there.
    fn is_queue_full(&self, input: &Input) -> Option<String> {
        let ours = self.book.open.iter().map(|&index| &self.book.batches[index]).filter(|b| self.is_ours(b.place));
        let (mut rows, mut tokens) = (input.rows.rows.len() as u64, input.rows.input_tokens);
        for batch in ours.filter(|batch| !batch.fate.refused) {
            rows += batch.rows().len() as u64;
            tokens += batch.input.rows.input_tokens;
        }
        let over = |limit: Option<u64>, asked: u64, what: &str| {
            let limit = limit.filter(|limit| asked > *limit)?;
            let model = input.rows.rows.first().map_or("", |row| input.rows.model(row));
            Some(format!(
                "Enqueued {what} limit reached for {model} in organization {}. Limit: {limit} enqueued {what}s. \
                 Please try again once some in_progress batches have been completed.",
                self.desk.names[self.place]
            ))
        };
        let config = self.config();
        over(config.queue_tokens, tokens, "token").or_else(|| over(config.queue_rows, rows, "request"))
    }

    fn create(
        &mut self,
        input: Arc<Input>,
        input_file: Option<String>,
        metadata: Value,
        mut problems: Vec<Problem>,
    ) -> Result<Answer, Failure<'static>> {
        let is_anthropic = self.desk.dialect == Dialect::Anthropic;
        if problems.is_empty() {
            if let Some(message) = self.is_queue_full(&input) {
                if is_anthropic {
                    return Err(Failure::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", ("", ""), message));
                }
                problems.push(Problem { code: "token_limit_exceeded", line: None, message });
            }
        }
        let Desk { seed, ref configs, dialect, .. } = *self.desk;
        let index = self.book.batches.len();
        let number = self.truth().created;
        let own = mix(mix(seed, self.place as u64 + 1), number);
        let mut fate = Fate::draw(&configs[self.place], seed, own, input.rows.rows.len());
        fate.refused = !problems.is_empty();
        let truth = self.truth();
        truth.created += 1;
        truth.lost_replies += u64::from(fate.lost_reply);
        if fate.refused {
            truth.failed += 1;
        } else {
            truth.rows += input.rows.rows.len() as u64;
            for row in &input.rows.rows {
                let seen = self.book.rows.entry(hashed(&row.custom_id)).or_default();
                let truth = &mut self.book.truths[self.place];
                truth.rows_again_while_open += u64::from(seen.open > 0);
                truth.rows_again_after_billed += u64::from(seen.billed > 0);
                seen.submitted += 1;
                seen.open += 1;
            }
        }
        let is_lost = fate.lost_reply;
        self.book.batches.push(Batch {
            id: format!("{}_sim{:016x}", if is_anthropic { "msgbatch" } else { "batch" }, index + 1),
            place: self.place,
            created: self.frame.now,
            order: fate.order().into(),
            fate,
            input,
            input_file,
            problems,
            metadata,
            answers: Answers { dialect, seed, lengths: self.lengths },
            counted: 0,
            succeeded: 0,
            errored: 0,
            told: None,
        });
        self.book.open.push(index);
        let Book { batches, open, .. } = &*self.book;
        let ours = open.iter().map(|&index| &batches[index]).filter(|b| b.place == self.place && !b.fate.refused);
        let (batches, rows) = ours.fold((0, 0), |(n, rows), batch| (n + 1, rows + batch.rows().len() as u64));
        let truth = self.truth();
        truth.peak_open = truth.peak_open.max(batches);
        truth.peak_open_rows = truth.peak_open_rows.max(rows);
        // Some may be over at once.
        self.book.advance(self.frame.now);
        Ok(if is_lost { Answer::Lost } else { Answer::Json(self.object(index)) })
    }

    fn find(&mut self, id: &str) -> Result<usize, Failure<'static>> {
        let index = id.rsplit_once("_sim").and_then(|(_, number)| usize::from_str_radix(number, 16).ok());
        let index = index.and_then(|number| number.checked_sub(1));
        let index = index.filter(|&index| {
            self.book.batches.get(index).is_some_and(|batch| batch.id == id && self.is_ours(batch.place))
        });
        let index = index.ok_or_else(|| not_found("batch", id))?;
        let is_new = self.age(index).as_secs_f64() < self.config().not_found_after_create_s;
        let chance = self.config().not_found;
        if is_new || chance.strikes(&mut self.book.rng) {
            self.truth().hidden += 1;
            return Err(not_found("batch", id));
        }
        Ok(index)
    }

    fn cancel(&mut self, id: &str) -> Result<Answer, Failure<'static>> {
        let index = self.find(id)?;
        let phase = self.phase(index);
        match phase {
            // Once more is no harm.
            Phase::Cancelling | Phase::Cancelled => {}
            _ if phase.has_ended() => {
                let (status, what) = match self.desk.dialect {
                    Dialect::Anthropic => (StatusCode::BAD_REQUEST, "has ended"),
                    _ => (StatusCode::CONFLICT, "has a final status"),
                };
                return Err(Failure::invalid(status, format!("Batch {id} cannot be cancelled: it {what}")));
            }
            _ => {
                self.truth().cancelled += 1;
                let age = self.age(index);
                self.book.batches[index].fate.cancelled = Some(age);
                self.book.advance(self.frame.now);
            }
        }
        Ok(Answer::Json(self.object(index)))
    }

    fn list(&mut self, page: &Page) -> Result<Answer, Failure<'static>> {
        self.truth().lists += 1;
        let hidden = self.config().not_listed_after_create_s;
        let newest_first: Vec<usize> = (0..self.book.batches.len())
            .rev()
            .filter(|&index| self.is_ours(self.book.batches[index].place))
            .filter(|&index| self.age(index).as_secs_f64() >= hidden)
            .collect();
        let is_anthropic = self.desk.dialect == Dialect::Anthropic;
        let most = if is_anthropic { 1000 } else { 100 };
        let limit = page.limit.unwrap_or(20).clamp(1, most);
        let place_of = |id: &String| {
            let place = newest_first.iter().position(|&index| self.book.batches[index].id == *id);
            place.ok_or_else(|| invalid(format!("There is no batch {id} to list from")))
        };
        let (from, to) = match (&page.after, &page.before) {
            (Some(id), _) => (place_of(id)? + 1, newest_first.len()),
            (None, Some(id)) => (place_of(id)?.saturating_sub(limit), place_of(id)?),
            (None, None) => (0, newest_first.len()),
        };
        let end = to.min(from + limit);
        let has_more = if page.after.is_none() && page.before.is_some() { from > 0 } else { end < to };
        let shown = &newest_first[from..end];
        let id = |index: Option<&usize>| index.map(|&index| self.book.batches[index].id.clone());
        let mut list = json!({
            "data": shown.iter().map(|&index| self.object(index)).collect::<Vec<_>>(),
            "has_more": has_more,
            "first_id": id(shown.first()),
            "last_id": id(shown.last()),
        });
        if !is_anthropic {
            list["object"] = "list".into();
        }
        Ok(Answer::Json(list))
    }

    fn find_file(&self, id: &str) -> Result<usize, Failure<'static>> {
        let index = id.strip_prefix("file-sim").and_then(|number| usize::from_str_radix(number, 16).ok());
        let is_there = |file: &File| !file.is_deleted && self.is_ours(file.place);
        let index =
            index.and_then(|number| number.checked_sub(1)).filter(|&i| self.book.files.get(i).is_some_and(is_there));
        index.ok_or_else(|| not_found("file", id))
    }

    /// The output or error file of this id, if its batch is there and has ended.
    fn results_file(&self, id: &str) -> Option<Lines> {
        let batch_id = id.strip_prefix("file-output-").or_else(|| id.strip_prefix("file-error-"))?;
        let index = self.book.batches.iter().position(|batch| batch.id == batch_id)?;
        let batch = &self.book.batches[index];
        let [output, errors] = batch.file_ids(self.phase(index));
        let which = match id {
            _ if !self.is_ours(batch.place) => return None,
            _ if output.as_deref() == Some(id) => Which::Answers,
            _ if errors.as_deref() == Some(id) => Which::Errors,
            _ => return None,
        };
        Some(self.lines(index, which))
    }

    fn file(&self, index: usize) -> Value {
        let File { bytes, created, ref filename, .. } = self.book.files[index];
        self.file_object(&format!("file-sim{:016x}", index + 1), bytes as u64, created, filename, "batch")
    }

    fn file_object(&self, id: &str, bytes: u64, created: Duration, filename: &str, purpose: &str) -> Value {
        json!({
            "id": id,
            "object": "file",
            "bytes": bytes,
            "created_at": self.frame.unix(created),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        })
    }
}
