//! What really happened to batches, counted where it happened.

use std::time::Duration;

/// What an org's batches came to. Rows are counted when they are finished, not when somebody looks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchTruth {
    /// Batches created, those included whose reply was lost and those that failed at validation.
    pub created: u64,
    /// Batches that failed at validation. Their rows are counted nowhere.
    pub failed: u64,
    /// Batches that were cancelled.
    pub cancelled: u64,
    /// Batches that expired.
    pub expired: u64,
    /// Batches that completed.
    pub completed: u64,
    /// Rows of all batches but those that failed.
    pub rows: u64,
    /// Rows that were answered: those that are billed.
    pub rows_succeeded: u64,
    /// Rows that met an error.
    pub rows_errored: u64,
    /// Rows that a cancelled batch left undone.
    pub rows_canceled: u64,
    /// Rows that an expired batch left undone.
    pub rows_expired: u64,
    /// Rows submitted although another batch of any org had the same `custom_id` and had not ended.
    pub rows_again_while_open: u64,
    /// Rows submitted although a row of the same `custom_id` was billed already, to any org.
    pub rows_again_after_billed: u64,
    /// Input tokens of the rows that succeeded.
    pub input_tokens: u64,
    /// Output tokens of the same.
    pub output_tokens: u64,
    /// Replies to `create` that were lost.
    pub lost_replies: u64,
    /// Times a batch was asked for by its id and shown.
    pub polls: u64,
    /// Times it was there and a 404 was said.
    pub hidden: u64,
    /// Times batches were listed.
    pub lists: u64,
    /// Times results, or an output or error file, were fetched.
    pub results: u64,
    /// Files uploaded.
    pub uploads: u64,
    /// The most batches that were open at once.
    pub peak_open: u64,
    /// The most rows that were in them.
    pub peak_open_rows: u64,
}

impl BatchTruth {
    pub(in crate::sim) fn with(&self, other: &BatchTruth) -> BatchTruth {
        macro_rules! sums {
            ($($sum:ident),*; $($peak:ident),*) => {
                BatchTruth { $($sum: self.$sum + other.$sum,)* $($peak: self.$peak.max(other.$peak),)* }
            };
        }
        sums!(
            created, failed, cancelled, expired, completed, rows, rows_succeeded, rows_errored, rows_canceled,
            rows_expired, rows_again_while_open, rows_again_after_billed, input_tokens, output_tokens, lost_replies,
            polls, hidden, lists, results, uploads;
            peak_open, peak_open_rows
        )
    }
}

/// The rows of all orgs' batches by their `custom_id`. Batches that failed at validation do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowsTruth {
    /// Ids that were in one batch.
    pub submitted_once: u64,
    /// Ids that were in more.
    pub submitted_more: u64,
    /// Ids of which one row succeeded: those billed once.
    pub billed_once: u64,
    /// Ids of which more did: those billed twice or more.
    pub billed_more: u64,
}

/// What became of one `custom_id`, in all batches of all orgs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowSeen {
    /// In so many batches it was.
    pub submitted: u32,
    /// In so many of them it succeeded.
    pub billed: u32,
    /// So many of them have not ended.
    pub open: u32,
}

/// Where a batch stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchState {
    /// Not yet ended, nor cancelled.
    Open,
    /// Cancelled and not yet ended.
    Cancelling,
    /// Ended with all its rows done.
    Completed,
    /// Ended by the time it may take.
    Expired,
    /// Ended by a call that cancelled it.
    Cancelled,
    /// Ended at validation.
    Failed,
}

/// One batch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchSeen {
    /// Its id.
    pub id: String,
    /// The name of the org that created it.
    pub org: String,
    /// Where it stands.
    pub state: BatchState,
    /// When it was created, since the start.
    pub created: Duration,
    /// When it ends, if nobody cancels it; or ended.
    pub ends: Duration,
    /// When that it has ended was first said, to who asked for it or for its results.
    pub told: Option<Duration>,
    /// How many rows it has.
    pub rows: u64,
    /// Their `custom_id`s, as they were handed in.
    pub ids: Vec<String>,
    /// So many of them succeeded up to now.
    pub succeeded: u64,
    /// So many of them met an error.
    pub errored: u64,
    /// Whether the reply to its creation was lost.
    pub lost_reply: bool,
}
