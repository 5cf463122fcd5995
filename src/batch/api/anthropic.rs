//! Anthropic's Message Batches.

use bytes::Bytes;
use http::{Request, Response};

use super::{ApiError, BatchApi, Bounds, Group, Match, Page, Remote, Row, RowError, RowResult, Submission};

/// Anthropic's Message Batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anthropic;

#[allow(unused_variables, clippy::todo, reason = "to come")]
impl BatchApi for Anthropic {
    fn bounds(&self) -> Bounds {
        Bounds::new(100_000, 250_000_000)
    }

    fn row(&self, custom_id: &str, request: &Request<Bytes>) -> Result<Row, RowError> {
        todo!()
    }

    fn upload(&self, token: &str, rows: &[Bytes]) -> Option<Request<Bytes>> {
        todo!()
    }

    fn uploaded(&self, answer: &Response<Bytes>) -> Result<String, ApiError> {
        todo!()
    }

    fn create(&self, group: &Group, token: &str, file: Option<&str>, rows: &[Bytes]) -> Request<Bytes> {
        todo!()
    }

    fn created(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        todo!()
    }

    fn retrieve(&self, id: &str) -> Request<Bytes> {
        todo!()
    }

    fn retrieved(&self, answer: &Response<Bytes>) -> Result<Remote, ApiError> {
        todo!()
    }

    fn cancel(&self, id: &str) -> Request<Bytes> {
        todo!()
    }

    fn list(&self, after: Option<&str>) -> Request<Bytes> {
        todo!()
    }

    fn listed(&self, answer: &Response<Bytes>) -> Result<Page, ApiError> {
        todo!()
    }

    fn matches(&self, remote: &Remote, submission: &Submission<'_>) -> Match {
        todo!()
    }

    fn results(&self, remote: &Remote) -> Vec<Request<Bytes>> {
        todo!()
    }

    fn result(&self, line: &[u8]) -> Result<Option<RowResult>, ApiError> {
        todo!()
    }
}
