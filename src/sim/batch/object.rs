//! A batch and a file as JSON.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::desk::Batch;
use super::fate::Phase;
use super::rows::Problem;

/// The times and addresses of a reply.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) now: Duration,
    /// The wall clock at the start.
    pub(super) wall: SystemTime,
    /// Where the provider is called.
    pub(super) base: String,
}

impl Frame {
    fn rfc3339(&self, at: Duration) -> String {
        humantime::format_rfc3339_micros(self.wall + at).to_string()
    }

    pub(super) fn unix(&self, at: Duration) -> u64 {
        (self.wall + at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
    }
}

impl Batch {
    fn age(&self, frame: &Frame) -> Duration {
        frame.now.saturating_sub(self.created)
    }

    pub(super) fn anthropic(&self, frame: &Frame, live_counts: bool) -> Value {
        let phase = self.fate.phase(self.age(frame));
        let has_ended = phase.has_ended();
        let total = self.rows().len();
        let (succeeded, errored) = if has_ended || live_counts { (self.succeeded, self.errored) } else { (0, 0) };
        let rest = total - succeeded - errored;
        let of_rest = |is_so: bool| if is_so { rest } else { 0 };
        let status = match phase {
            Phase::Cancelling => "canceling",
            _ if has_ended => "ended",
            _ => "in_progress",
        };
        json!({
            "id": self.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {
                "processing": of_rest(!has_ended),
                "succeeded": succeeded,
                "errored": errored,
                "canceled": of_rest(phase == Phase::Cancelled),
                "expired": of_rest(phase == Phase::Expired),
            },
            "ended_at": has_ended.then(|| frame.rfc3339(self.created + self.fate.ends())),
            "created_at": frame.rfc3339(self.created),
            "expires_at": frame.rfc3339(self.created + self.fate.expires),
            "archived_at": null,
            "cancel_initiated_at": self.fate.cancelled.map(|age| frame.rfc3339(self.created + age)),
            "results_url": has_ended.then(|| format!("{}/v1/messages/batches/{}/results", frame.base, self.id)),
        })
    }

    pub(super) fn openai(&self, frame: &Frame) -> Value {
        let age = self.age(frame);
        let phase = self.fate.phase(age);
        let status = match phase {
            Phase::Validating => "validating",
            Phase::Failed => "failed",
            Phase::InProgress => "in_progress",
            Phase::Finalizing => "finalizing",
            Phase::Cancelling => "cancelling",
            Phase::Completed => "completed",
            Phase::Expired => "expired",
            Phase::Cancelled => "cancelled",
        };
        let ends = self.fate.ends();
        let when = |is_so: bool, age: Duration| is_so.then(|| frame.unix(self.created + age));
        let until_cancelled = age.min(self.fate.cancelled.unwrap_or(Duration::MAX));
        let is_valid = !self.fate.refused && until_cancelled >= self.fate.validated();
        let [output, errors] = self.file_ids(phase);
        let total = if is_valid { self.rows().len() } else { 0 };
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.input.url,
            "errors": (phase == Phase::Failed).then(|| json!({
                "object": "list",
                "data": self.problems.iter().map(Problem::json).collect::<Vec<_>>(),
            })),
            "input_file_id": self.input_file,
            "completion_window": "24h",
            "status": status,
            "output_file_id": output,
            "error_file_id": errors,
            "created_at": frame.unix(self.created),
            "in_progress_at": when(is_valid, self.fate.validated()),
            "expires_at": frame.unix(self.created + self.fate.expires),
            "finalizing_at": when(matches!(phase, Phase::Finalizing | Phase::Completed), self.fate.finalizing()),
            "completed_at": when(phase == Phase::Completed, ends),
            "failed_at": when(phase == Phase::Failed, ends),
            "expired_at": when(phase == Phase::Expired, ends),
            "cancelling_at": self.fate.cancelled.map(|age| frame.unix(self.created + age)),
            "cancelled_at": when(phase == Phase::Cancelled, ends),
            "request_counts": { "total": total, "completed": self.succeeded, "failed": self.errored },
            "metadata": self.metadata,
        })
    }
}

impl Problem {
    fn json(&self) -> Value {
        json!({ "code": self.code, "line": self.line, "message": self.message, "param": null })
    }
}
