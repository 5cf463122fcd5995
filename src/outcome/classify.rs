//! Who says what a response or an error means: a trait, and its presets.

use std::fmt;

use http::{HeaderMap, Response, StatusCode};

use super::{Class, Error, HINT_CEILING, Outcome, Stamp};

/// Says what a response or an error means: the only question a lone layer asks of its surroundings.
///
/// Implement it for your own response and error types to use [`aimd`](crate::aimd) around something that is not HTTP, or to
/// judge otherwise than this crate does. One that asks [`Stamped`] or [`ByStatus`] for most answers hands on their
/// [`stamp`](Classify::stamp) and [`head`](Classify::head) as well. Layers want it `Clone`. A closure will do, in
/// [`classify_fn`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what a `Result<{Res}, {E}>` means",
    label = "is no `Classify<{Res}, {E}>`",
    note = "`ByStatus` reads any `http::Response`; `Stamped`, the default of `retry`, only where errors are `outcome::Error`, as above a judge",
    note = "for others say it yourself: `.classify(classify_fn(|result| …))` on the layer, or a type that implements `Classify<{Res}, {E}>`"
)]
pub trait Classify<Res, E> {
    /// Classifies a result. Called once per attempt, on the caller's task; must not block.
    fn classify(&self, result: Result<&Res, &E>) -> Outcome;

    /// The judge's [`Stamp`] on the result, where it carries one: which org was asked, and whether it is held below. Without
    /// it [`retry`](crate::retry) sleeps out every hint itself. Default: none.
    fn stamp<'a>(&self, _result: Result<&'a Res, &'a E>) -> Option<&'a Stamp> {
        None
    }

    /// Status and headers, where the result has them: for reports, never for decisions. Default: none.
    fn head<'a>(&self, _result: Result<&'a Res, &'a E>) -> Option<(StatusCode, &'a HeaderMap)> {
        None
    }
}

/// A classifier from a closure. Made by [`classify_fn`].
#[derive(Clone, Copy)]
pub struct ClassifyFn<F>(F);

/// A closure as a classifier; its types are inferred from what it does, or from where it is used:
///
/// ```
/// use tower_quota::outcome::{Class, Classify, Outcome, classify_fn};
///
/// #[derive(Debug)]
/// enum DbError {
///     TooManyConnections,
///     Deadlock,
/// }
///
/// let classify = classify_fn(|result| {
///     Outcome::of(match result {
///         Ok(_) => Class::Ok,
///         Err(DbError::TooManyConnections) => Class::Throttled,
///         Err(DbError::Deadlock) => Class::Overloaded,
///     })
/// });
/// let rows: Result<Vec<u64>, _> = Err(DbError::TooManyConnections);
/// assert_eq!(classify.classify(rows.as_ref()).class, Class::Throttled);
/// ```
///
/// Where neither tells them, write them out: `classify_fn::<Rows, DbError, _>(…)`.
pub const fn classify_fn<Res, E, F>(classify: F) -> ClassifyFn<F>
where
    F: Fn(Result<&Res, &E>) -> Outcome,
{
    ClassifyFn(classify)
}

impl<Res, E, F> Classify<Res, E> for ClassifyFn<F>
where
    F: Fn(Result<&Res, &E>) -> Outcome,
{
    fn classify(&self, result: Result<&Res, &E>) -> Outcome {
        (self.0)(result)
    }
}

impl<F> fmt::Debug for ClassifyFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClassifyFn").finish_non_exhaustive()
    }
}

/// Classifies by HTTP status and headers, or by the judge's [`Stamp`] where the answer carries one. Any error is
/// [`Class::Transport`]. Hints are believed up to [`HINT_CEILING`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ByStatus;

impl<B, E> Classify<Response<B>, E> for ByStatus {
    fn classify(&self, result: Result<&Response<B>, &E>) -> Outcome {
        match result {
            Ok(response) => of_response(response),
            Err(_) => Outcome::of(Class::Transport),
        }
    }

    fn stamp<'a>(&self, result: Result<&'a Response<B>, &'a E>) -> Option<&'a Stamp> {
        result.ok()?.extensions().get()
    }

    fn head<'a>(&self, result: Result<&'a Response<B>, &'a E>) -> Option<(StatusCode, &'a HeaderMap)> {
        result.ok().map(|response| (response.status(), response.headers()))
    }
}

/// Classifies by the judge's [`Stamp`], and errors by the [`Outcome`] that [`Error`] carries: what the layers of the
/// ready-made stack use. An answer without a stamp is read by status and headers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stamped;

impl<B> Classify<Response<B>, Error> for Stamped {
    fn classify(&self, result: Result<&Response<B>, &Error>) -> Outcome {
        match result {
            Ok(response) => of_response(response),
            Err(error) => error.outcome(),
        }
    }

    fn stamp<'a>(&self, result: Result<&'a Response<B>, &'a Error>) -> Option<&'a Stamp> {
        match result {
            Ok(response) => response.extensions().get(),
            Err(error) => Some(error.stamp()),
        }
    }

    fn head<'a>(&self, result: Result<&'a Response<B>, &'a Error>) -> Option<(StatusCode, &'a HeaderMap)> {
        result.ok().map(|response| (response.status(), response.headers()))
    }
}

fn of_response<B>(response: &Response<B>) -> Outcome {
    match response.extensions().get::<Stamp>() {
        Some(stamp) => stamp.outcome,
        None => Outcome::of_head(response.status(), response.headers(), HINT_CEILING),
    }
}
