//! Headers that name no resource.

use std::time::SystemTime;

use http::HeaderMap;

use super::{Clock, Figure, ReadQuota, Readings, Resource};

/// `x-ratelimit-{remaining,reset}`, and `ratelimit-{remaining,reset}` of the IETF's earlier drafts: of requests.
///
/// `x-ratelimit-limit` and `ratelimit-limit` are not read: a limit per second, hour or day looks just the same, and a rate that is
/// made up crosses a quota or leaves it idle. So these headers pace nothing by themselves. They count where another dialect tells
/// a limit and these leave less, and in refusals, where they say how long to wait.
#[cfg_attr(
    feature = "ietf",
    doc = "\nWhere a `RateLimit-Policy` tells the window, as the earlier drafts have it too, [`Ietf`](super::Ietf) reads the limit."
)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Plain;

impl ReadQuota for Plain {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let mut readings = Readings::default();
        for (name, value) in headers {
            if let Some(figure) = figure(name.as_str()) {
                readings.entry(Resource::Requests).note(figure, value, Clock { headers, wall });
            }
        }
        readings
    }
}

pub(super) fn figure(name: &str) -> Option<Figure> {
    Some(match name {
        "x-ratelimit-remaining" | "ratelimit-remaining" => Figure::Remaining,
        "x-ratelimit-reset" | "ratelimit-reset" => Figure::Reset,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{Of, every_name_has_its_own_place};

    #[test]
    fn every_header_goes_to_its_own_place() {
        every_name_has_its_own_place(
            &Plain,
            &[
                ("x-ratelimit-remaining", Of::Remaining(Resource::Requests)),
                ("x-ratelimit-reset", Of::Reset(Resource::Requests)),
                ("ratelimit-remaining", Of::Remaining(Resource::Requests)),
                ("ratelimit-reset", Of::Reset(Resource::Requests)),
                // Per what?
                ("x-ratelimit-limit", Of::Nothing),
                ("ratelimit-limit", Of::Nothing),
                ("x-ratelimit-remaining-requests", Of::Nothing),
                ("x-rate-limit-remaining", Of::Nothing),
                ("ratelimit-reset-after", Of::Nothing),
                ("ratelimit", Of::Nothing),
                ("ratelimit-policy", Of::Nothing),
            ],
        );
    }
}
