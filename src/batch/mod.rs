//! The provider's batch API: the same requests at half the price, answered within a day.

mod answer;
mod api;
mod builder;
mod course;
mod error;
mod file;
mod future;
mod handle;
mod law;
mod record;
mod route;
mod service;
mod state;
mod store;
mod wire;
mod works;

pub use self::{
    answer::{BatchBody, Batched},
    api::{
        Anthropic, ApiError, BatchApi, Bounds, Counts, Ending, Group, Match, OpenAi, Page, Remote, RemoteState, Row,
        RowEnd, RowError, RowResult, Submission, api_of, check_custom_id, lines,
    },
    builder::{BatchBuilder, BatchOpenError},
    error::{BatchError, BatchFailure, Remaining},
    future::BatchFuture,
    handle::{BatchHandle, BatchSnapshot, BatchStage, BatchView, OrgBatches, Shutdown},
    record::Token,
    route::{Choose, Route, RouteError, RouteFuture, Way},
    service::BatchService,
    store::{BatchChange, BatchRows, BatchStore, MemoryBatches},
};
