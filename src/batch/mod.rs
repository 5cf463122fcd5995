//! The provider's batch API: the same requests at half the price, answered within a day.
//!
//! [`BatchApi`] says how one provider's batch API is spoken: which requests to make, and what their answers say. It sends nothing
//! itself.

mod api;

pub use self::api::{
    Anthropic, ApiError, BatchApi, Bounds, Counts, Ending, Group, Match, OpenAi, Page, Remote, RemoteState, Row,
    RowEnd, RowError, RowResult, Submission, api_of, check_custom_id, lines,
};
