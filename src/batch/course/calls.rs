//! How calls about a batch are made, and made again.

use std::{future::poll_fn, ops::ControlFlow, pin::pin, task::Poll, time::Duration};

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use tokio::time::Instant;

use super::{Course, FETCHES, watch::Over};
use crate::{
    batch::{
        ApiError, law,
        wire::{self, Verdict},
    },
    outcome::{BoxError, Class, in_one_line},
};

/// How a call is made.
#[derive(Default)]
pub(super) struct Patience {
    /// Not again where it may have been done.
    pub(super) once: bool,
    /// Even if the service closes.
    pub(super) closing: bool,
    /// Until when it may fail.
    pub(super) until: Option<Instant>,
}

/// What came of a call.
pub(super) enum Called {
    Answer(Response<Bytes>),
    Out(Class),
    /// It may have been done.
    Unknown,
    /// It has failed for too long.
    Late(String),
    Closing,
}

impl Course {
    /// Makes a call about a batch until it is answered, or the batch's time is up.
    pub(super) async fn call(&self, request: &Request<Bytes>) -> Called {
        self.call_until(request, Patience { until: Some(self.patience()), ..Patience::default() }).await
    }

    /// Even if the service closes meanwhile.
    pub(super) async fn call_anyhow(&self, request: &Request<Bytes>) -> Called {
        let patience = Patience { until: Some(self.patience()), closing: true, ..Patience::default() };
        self.call_until(request, patience).await
    }

    /// Until when calls about a batch may fail. One of long ago is given some time too.
    fn patience(&self) -> Instant {
        self.deadline().max(Instant::now() + self.shared.law.grace)
    }

    pub(super) async fn call_until(
        &self,
        request: &Request<Bytes>,
        Patience { once, closing, until }: Patience,
    ) -> Called {
        let mut failed = 0;
        loop {
            let line = &self.shared.lines[self.org];
            let (verdict, said) = match line.wire.send(request.clone()).await {
                Ok(answer) => {
                    let verdict = Verdict::of_answer(&answer);
                    let status = answer.status();
                    match (verdict, wire::gathered(answer).await) {
                        (Verdict::Read, Ok(_)) if once && Verdict::leaves_open(status) => {
                            (Verdict::Again { not_before: None, maybe_done: true }, status.to_string())
                        }
                        (Verdict::Read, Ok(answer)) => return Called::Answer(answer),
                        // A throttle is waited out here; for a place in its queue the rows need not wait at this org.
                        (Verdict::Again { .. }, Ok(answer)) if once && self.is_crowded(&answer) => {
                            return Called::Answer(answer);
                        }
                        (Verdict::Read, Err(error)) => {
                            (Verdict::Again { not_before: None, maybe_done: true }, in_one_line(&*error))
                        }
                        (verdict, _) => (verdict, status.to_string()),
                    }
                }
                Err(error) => (Verdict::of_error(&error), in_one_line(&error)),
            };
            match verdict {
                Verdict::Again { maybe_done: true, .. } if once => {
                    self.trouble(&said);
                    return Called::Unknown;
                }
                Verdict::Again { not_before, .. } => {
                    failed += 1;
                    if failed >= FETCHES && until.is_some_and(|until| Instant::now() >= until) {
                        return Called::Late(said);
                    }
                    if self.pause(failed, not_before, &said).await && !closing {
                        return Called::Closing;
                    }
                    // It would go round without a pause.
                    if self.is_closing() && failed > 3 {
                        return Called::Closing;
                    }
                }
                Verdict::Out(class) => return Called::Out(class),
                Verdict::Read => {}
            }
        }
    }

    fn is_crowded(&self, answer: &Response<Bytes>) -> bool {
        matches!(self.shared.api.created(answer), Err(ApiError::QueueFull(_)))
    }

    /// Reads a file of results line by line. `read` says whether a line told anything; where the last one did not, the file was cut off.
    pub(super) async fn lines_of(
        &self,
        request: &Request<Bytes>,
        read: &mut (dyn FnMut(&[u8]) -> ControlFlow<(), bool> + Send),
    ) -> Result<(), Over> {
        let (mut failed, mut refused, until) = (0, 0, self.patience());
        loop {
            let line = &self.shared.lines[self.org];
            let mut not_before = None;
            let said = match line.wire.send(request.clone()).await {
                Ok(answer) if answer.status().is_success() => match lines_in(answer.into_body(), read).await {
                    Ok(None) => return Ok(()),
                    Ok(Some(cut)) => {
                        refused += 1;
                        cut.to_owned()
                    }
                    Err(error) => in_one_line(&*error),
                },
                Ok(answer) => {
                    match Verdict::of_answer(&answer) {
                        Verdict::Out(class) => return Err(Over::Out(class)),
                        Verdict::Again { not_before: at, .. } => not_before = at,
                        Verdict::Read => refused += 1,
                    }
                    answer.status().to_string()
                }
                Err(error) => {
                    match Verdict::of_error(&error) {
                        Verdict::Out(class) => return Err(Over::Out(class)),
                        Verdict::Again { not_before: at, .. } => not_before = at,
                        Verdict::Read => refused += 1,
                    }
                    in_one_line(&error)
                }
            };
            failed += 1;
            if refused >= FETCHES || failed >= FETCHES && Instant::now() >= until {
                // They were paid for: nothing of it is sent again.
                return Err(Over::Unread(said));
            }
            if self.pause(failed, not_before, &said).await {
                return Err(Over::Closing);
            }
        }
    }

    /// Waits before another attempt; true if the service closes.
    pub(super) async fn pause(&self, failed: u32, not_before: Option<Instant>, said: &str) -> bool {
        self.trouble(said);
        let hint = not_before.map(|at| at.saturating_duration_since(Instant::now()));
        self.nap(law::backoff(failed, hint, fastrand::f64())).await
    }

    /// Sleeps; true if the service closes.
    pub(super) async fn nap(&self, span: Duration) -> bool {
        let mut sleep = pin!(tokio::time::sleep(span));
        poll_fn(|cx| {
            if self.is_closing() {
                return Poll::Ready(true);
            }
            sleep.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    pub(super) fn is_closing(&self) -> bool {
        self.shared.lock().closing.is_some()
    }
}

/// Gives each line to `read`; says so if they are cut off: if the last one told nothing, or has no end.
async fn lines_in(
    mut body: wire::WireBody,
    read: &mut (dyn FnMut(&[u8]) -> ControlFlow<(), bool> + Send),
) -> Result<Option<&'static str>, BoxError> {
    let (mut rest, mut searched) = (BytesMut::new(), 0);
    while let Some(data) = wire::next_data(&mut body).await? {
        rest.extend_from_slice(&data);
        while let Some(at) = memchr::memchr(b'\n', &rest[searched..]) {
            let line = rest.split_to(searched + at + 1);
            searched = 0;
            if read(&line[..line.len() - 1]).is_break() {
                return Ok(None);
            }
        }
        searched = rest.len();
        if searched > wire::GATHERED_MOST {
            return Ok(Some("a line of the results is too long"));
        }
    }
    if rest.is_empty() {
        return Ok(None);
    }
    Ok(match read(&rest) {
        ControlFlow::Continue(false) => Some("the results end before their end"),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    #[tokio::test]
    async fn a_line_without_an_end_is_not_kept_for_ever() {
        static PIECE: [u8; 1 << 20] = [b'x'; 1 << 20];
        let pieces = std::iter::repeat_with(|| Ok(http_body::Frame::data(Bytes::from_static(&PIECE)))).take(80);
        let body = Box::pin(StreamBody::new(futures_util::stream::iter(pieces)).map_err(|error: BoxError| error));
        let mut lines = 0;
        let mut read = |_: &[u8]| {
            lines += 1;
            ControlFlow::Continue(true)
        };
        assert_eq!(lines_in(body, &mut read).await.unwrap(), Some("a line of the results is too long"));
        assert_eq!(lines, 0);
    }
}
