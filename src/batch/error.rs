//! Why a request has no answer from a batch.

use std::{error::Error as StdError, fmt, sync::Arc};

use http::{Request, StatusCode};

use super::RowError;
use crate::{
    journal::StoreError,
    outcome::{BoxError, Class},
};

/// Why there is no answer from a batch; it hands the request back wherever that can be had.
///
/// Display speaks to people: what happened, to which batch of which org, what to do.
pub struct BatchError<Req>(Box<Failed<Req>>);

/// On the heap: errors are rare, and every answer that may be one would carry it.
struct Failed<Req> {
    failure: BatchFailure,
    request: Option<Req>,
}

/// What happened to a request that has no answer from a batch.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum BatchFailure {
    /// It can be no row of a batch. Nothing was sent.
    Row(RowError),
    /// Its body could not be read. Nothing was sent.
    Body(Arc<BoxError>),
    /// The store does not work, so that nothing is submitted.
    Store(StoreError),
    /// No org is left that takes batches. Nothing of it was sent.
    NoOrg {
        /// Each org, and why it is out.
        orgs: Vec<(Arc<str>, Arc<str>)>,
    },
    /// The provider refused the batch as a whole. Nothing of it was done.
    Refused {
        /// The org.
        org: Arc<str>,
        /// The status, where there was an answer with one.
        status: Option<StatusCode>,
        /// In the provider's words.
        said: Arc<str>,
    },
    /// Its batch could not be submitted in the time in which it would have been taken for [stuck](super::BatchBuilder::stuck_after): the
    /// org throttled that, did not take the rows, or lost each reply, and no batch was found. Nothing of it was done.
    Unsubmitted {
        /// The org.
        org: Arc<str>,
        /// What the last attempt came to.
        said: Arc<str>,
    },
    /// Its batch got nowhere and was cancelled; this row was not done.
    Stuck(RemoteBatch),
    /// It was in two batches, and has no answer of either.
    Unanswered {
        /// The last one.
        batch: RemoteBatch,
        /// What the last end of it means: how the direct path would class it.
        class: Class,
        /// In the provider's words, or ours.
        said: Arc<str>,
    },
    /// Its batch is submitted, and the org does not answer for it any more: its key is refused, or its credit is spent.
    OrgOut {
        /// Which one. It may still be worked on.
        batch: RemoteBatch,
        /// Why the org is out.
        class: Class,
    },
    /// Its batch has not ended though its time is long up.
    Deadline(RemoteBatch),
    /// Its batch is not there any more.
    Vanished(RemoteBatch),
    /// Its batch has ended, and its results cannot be read. They may have been paid for, so nothing is submitted again by itself.
    Unread {
        /// Which one.
        batch: RemoteBatch,
        /// Why they cannot be read.
        said: Arc<str>,
    },
    /// The reply to its submission was lost, and the org's batches, or their results, cannot be looked through, or one that may be it is
    /// [stuck](super::BatchBuilder::stuck_after): whether there is a batch is not known, and nothing is submitted again.
    Unlisted {
        /// The org.
        org: Arc<str>,
        /// Why they cannot be listed.
        said: Arc<str>,
    },
    /// The service was shut down; with the batch that the row is in, if that was submitted.
    Closed(Option<RemoteBatch>),
    /// The work on its batch ended in a panic.
    Broken(Option<RemoteBatch>),
}

/// A batch that was submitted.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteBatch {
    /// The org that it was submitted to, and that alone can see it.
    pub org: Arc<str>,
    /// Its id there.
    pub id: Arc<str>,
}

impl fmt::Display for RemoteBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {} of org {}", self.id, self.org)
    }
}

impl BatchFailure {
    /// Whether it may be sent on the direct path now: certainly no batch answers it, and it would not be paid for twice.
    #[must_use]
    pub fn goes_direct(&self) -> bool {
        match self {
            BatchFailure::Row(RowError::NotBatchable(_))
            | BatchFailure::NoOrg { .. }
            | BatchFailure::Refused { .. }
            | BatchFailure::Unsubmitted { .. }
            | BatchFailure::Stuck(_)
            | BatchFailure::Unanswered { .. } => true,
            BatchFailure::Row(_)
            | BatchFailure::Body(_)
            | BatchFailure::Store(_)
            | BatchFailure::OrgOut { .. }
            | BatchFailure::Deadline(_)
            | BatchFailure::Vanished(_)
            | BatchFailure::Unread { .. }
            | BatchFailure::Unlisted { .. }
            | BatchFailure::Closed(_)
            | BatchFailure::Broken(_) => false,
        }
    }

    /// Whether the same request may be sent again later with hope. One whose batch still runs is then answered by that.
    #[must_use]
    pub fn is_redrivable(&self) -> bool {
        !matches!(self, BatchFailure::Row(_) | BatchFailure::Body(_))
    }

    /// What it means in the one table.
    #[must_use]
    pub fn class(&self) -> Class {
        match self {
            BatchFailure::Row(RowError::TooLarge { .. }) => Class::TooLarge,
            BatchFailure::Row(_) | BatchFailure::Refused { .. } => Class::Terminal,
            BatchFailure::NoOrg { .. } => Class::NoOrg,
            BatchFailure::Unanswered { class, .. } | BatchFailure::OrgOut { class, .. } => *class,
            BatchFailure::Unsubmitted { .. }
            | BatchFailure::Stuck(_)
            | BatchFailure::Deadline(_)
            | BatchFailure::Vanished(_) => Class::Overloaded,
            BatchFailure::Unread { .. } | BatchFailure::Unlisted { .. } => Class::Transport,
            BatchFailure::Body(_) | BatchFailure::Store(_) | BatchFailure::Closed(_) | BatchFailure::Broken(_) => {
                Class::Local
            }
        }
    }
}

impl fmt::Display for BatchFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const AGAIN: &str = "send the same request again later and it is answered by that batch, not paid for twice";
        match self {
            BatchFailure::Row(error) => error.fmt(f),
            BatchFailure::Body(_) => f.write_str("the request's body cannot be read, so nothing was sent"),
            BatchFailure::Store(_) => f.write_str("the records of batches cannot be kept, so nothing is submitted"),
            BatchFailure::NoOrg { orgs } => {
                f.write_str("no org is left that takes batches")?;
                orgs.iter().try_for_each(|(org, why)| write!(f, "; {org}: {why}"))
            }
            BatchFailure::Refused { org, status, said } => {
                write!(f, "org {org} refused the batch as a whole")?;
                status.iter().try_for_each(|status| write!(f, " ({status})"))?;
                if said.is_empty() { Ok(()) } else { write!(f, ": {said}") }
            }
            BatchFailure::Unsubmitted { org, said } => {
                write!(f, "org {org} has taken no batch for long ({said}), so none was submitted; it may be sent again")
            }
            BatchFailure::Stuck(batch) => write!(f, "{batch} got nowhere and was cancelled; it may be sent again"),
            BatchFailure::Unanswered { batch, said, .. } => {
                write!(f, "no answer from two batches, last {batch}: {said}; it may be sent again")
            }
            BatchFailure::OrgOut { batch, class } => {
                write!(
                    f,
                    "{batch} is submitted and may be billed, but the org is out ({class}): mend its key, then {AGAIN}"
                )
            }
            BatchFailure::Deadline(batch) => write!(f, "{batch} has not ended in its time: {AGAIN}"),
            BatchFailure::Vanished(batch) => {
                write!(f, "{batch} is not there any more (404); what it did may be billed")
            }
            BatchFailure::Unread { batch, said } => {
                write!(f, "{batch} has ended, and its results cannot be read ({said}): they may be billed; {AGAIN}")
            }
            BatchFailure::Unlisted { org, said } => {
                write!(
                    f,
                    "the reply to a submission to org {org} was lost, and whether there is a batch is not known ({said}): look there; {AGAIN}"
                )
            }
            BatchFailure::Closed(Some(batch)) => write!(f, "the service was shut down; {batch} is submitted: {AGAIN}"),
            BatchFailure::Closed(None) => f.write_str("the service was shut down before it was submitted"),
            BatchFailure::Broken(Some(batch)) => write!(f, "the work on {batch} failed by a fault of ours: {AGAIN}"),
            BatchFailure::Broken(None) => f.write_str("the work on its batch failed by a fault of ours"),
        }
    }
}

impl StdError for BatchFailure {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            BatchFailure::Store(error) => Some(error),
            BatchFailure::Body(error) => Some(&***error),
            _ => None,
        }
    }
}

impl<Req> BatchError<Req> {
    pub(super) fn new(failure: BatchFailure, request: Option<Req>) -> Self {
        BatchError(Box::new(Failed { failure, request }))
    }

    /// What happened.
    #[must_use]
    pub fn failure(&self) -> &BatchFailure {
        &self.0.failure
    }

    /// The request as the caller gave it; `None` if its body could not be read, or not be read again.
    #[must_use]
    pub fn request(&self) -> Option<&Req> {
        self.0.request.as_ref()
    }

    /// The request as the caller gave it, if it can be had.
    #[must_use]
    pub fn into_request(self) -> Option<Req> {
        self.0.request
    }

    /// Whether the same request may be sent again later with hope: see [`BatchFailure::is_redrivable`].
    #[must_use]
    pub fn is_redrivable(&self) -> bool {
        self.0.failure.is_redrivable()
    }

    /// What it means in the one table.
    #[must_use]
    pub fn class(&self) -> Class {
        self.0.failure.class()
    }
}

impl<B> fmt::Debug for BatchError<Request<B>> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Method and path only: a header, a query or a body may hold a key.
        let request = self.0.request.as_ref().map(|request| format!("{} {}", request.method(), request.uri().path()));
        f.debug_struct("BatchError").field("failure", &self.0.failure).field("request", &request).finish()
    }
}

impl<Req> fmt::Display for BatchError<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.failure.fmt(f)
    }
}

impl<B> StdError for BatchError<Request<B>> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.failure.source()
    }
}
