//! Azure OpenAI's headers, and those of GitHub Models, which is Azure too.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue};

use super::{Clock, ReadQuota, Readings, Resource, amount, openai, per_minute, reset};

/// [OpenAI's](super::OpenAi) headers, with the seconds that a limit is for, `x-ratelimit-renewalperiod-<of>`, and under the name of
/// `x-rate-limit-*` besides.
///
/// - **`-1` is unknown.** Where Azure does not know, it sends a limit and a remainder of `-1` and a reset of `0`
///   ([openai-dotnet#838](https://github.com/openai/openai-dotnet/issues/838)): all three say nothing. A limit of `0` says nothing
///   either, since no call would have been answered under it.
/// - **A remainder of `0` is a figure**, even beside a limit of `-1`. In a refusal it says which bucket is empty. In any other
///   answer it is without effect until a limit has been told, and then costs a short pause, where not to believe it would cost a
///   refusal.
/// - **Most answers tell what remains and no limit**
///   ([azure-rest-api-specs#26884](https://github.com/Azure/azure-rest-api-specs/issues/26884)). Then quotas are not paced, and the
///   limit is found by refusals. What remains of requests is counted per ten seconds or so, not per minute; it is what may be
///   spent now in any case.
/// - **`x-rate-limit-reset-<of>`** has taken the place of `Retry-After` in some refusals
///   ([openai-python#937](https://github.com/openai/openai-python/issues/937)), so [`hint::reset`](crate::hint::reset) takes it for a
///   wait whatever remains. Others of that spelling are read as OpenAI's are.
/// - The milliseconds of `retry-after-ms` and `x-ms-retry-after-ms` are waits: [`hint`](crate::hint) reads them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Azure;

impl ReadQuota for Azure {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let mut said = Said::default();
        for (name, value) in headers {
            if let Some(name) = after_prefix(name.as_str()) {
                said.note(name, value, Clock { headers, wall });
            }
        }
        said.read()
    }
}

pub(super) fn after_prefix(name: &str) -> Option<&str> {
    name.strip_prefix("x-ratelimit-").or_else(|| name.strip_prefix("x-rate-limit-"))
}

/// The longest wait that a refusal names in the place of `Retry-After`.
pub(super) fn refused(headers: &HeaderMap, wall: SystemTime) -> Option<Duration> {
    let names = ["x-rate-limit-reset-requests", "x-rate-limit-reset-tokens"];
    let values = names.into_iter().flat_map(|name| headers.get_all(name));
    values.filter_map(|value| reset(headers, value, Some(wall))).max()
}

/// What was read so far.
#[derive(Default)]
pub(super) struct Said {
    said: openai::Said,
    /// The seconds that limits are for, where any is told; 0 where it is not.
    periods: Option<[f64; Resource::ALL.len()]>,
}

impl Said {
    /// Reads one header more, by its name after the prefix.
    pub(super) fn note(&mut self, name: &str, value: &HeaderValue, clock: Clock<'_>) {
        let Some(of) = name.strip_prefix("renewalperiod-") else { return self.said.note(name, value, clock) };
        if let (Some(resource), Some(seconds)) = (Resource::named(of), amount(value)) {
            // The longest makes the lowest limit.
            let period = &mut self.periods.get_or_insert_default()[resource.index()];
            *period = period.max(seconds);
        }
    }

    pub(super) fn read(self) -> Readings {
        let mut readings = self.said.read();
        for (resource, period) in Resource::ALL.into_iter().zip(self.periods.into_iter().flatten()) {
            let limit = &mut readings.entry(resource).limit;
            *limit = limit.and_then(|limit| if period > 0.0 { per_minute(limit, period) } else { Some(limit) });
        }
        readings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::{
        Reading, openai,
        tests::{Of, WALL, every_name_has_its_own_place, headers},
    };

    #[test]
    fn every_header_goes_to_its_own_place() {
        every_name_has_its_own_place(&Azure, &openai::tests::NAMES);
        every_name_has_its_own_place(
            &Azure,
            &[
                ("x-rate-limit-limit-requests", Of::Limit(Resource::Requests)),
                ("x-rate-limit-remaining-requests", Of::Remaining(Resource::Requests)),
                ("x-rate-limit-reset-requests", Of::Reset(Resource::Requests)),
                ("x-rate-limit-limit-tokens", Of::Limit(Resource::Tokens)),
                ("x-rate-limit-remaining-tokens", Of::Remaining(Resource::Tokens)),
                ("x-rate-limit-reset-tokens", Of::Reset(Resource::Tokens)),
                // By themselves they say nothing; nor do waits, and names that are not for figures.
                ("x-ratelimit-renewalperiod-requests", Of::Nothing),
                ("x-ratelimit-renewalperiod-tokens", Of::Nothing),
                ("x-ratelimit-remaining", Of::Nothing),
                ("x-ratelimit-key", Of::Nothing),
                ("x-ratelimit-abusepenalty-active", Of::Nothing),
                ("x-rate-limit-limit", Of::Nothing),
                ("retry-after-ms", Of::Nothing),
                ("x-ms-retry-after-ms", Of::Nothing),
            ],
        );
    }

    #[test]
    fn minus_one_and_zero_are_unknown_but_for_what_remains() {
        // Limit, remaining and reset as they are sent, and as they are understood.
        for (limit, remaining, reset, expected) in [
            ("-1", "-1", "0", None),
            ("-1", "-1", "-1", None),
            ("0", "-1", "0", None),
            ("-1", "0", "0", Some((None, Some(0.0), None))),
            ("-1", "0", "55", Some((None, Some(0.0), Some(55)))),
            ("-1", "1", "0", Some((None, Some(1.0), None))),
            ("0", "0", "55", Some((None, Some(0.0), Some(55)))),
            ("1", "0", "0", Some((Some(1.0), Some(0.0), None))),
            ("1", "-1", "1", Some((Some(1.0), None, Some(1)))),
            ("20000", "19999", "3", Some((Some(20_000.0), Some(19_999.0), Some(3)))),
        ] {
            for of in ["requests", "tokens"] {
                let answer = headers(&format!(
                    "x-ratelimit-limit-{of}: {limit}\nx-ratelimit-remaining-{of}: {remaining}\nx-ratelimit-reset-{of}: {reset}"
                ));
                let resource = Resource::named(of).expect("it is one");
                let expected = expected.map(|(limit, remaining, reset)| {
                    let reset = reset.map(Duration::from_secs);
                    Reading { limit, remaining, reset }
                });
                assert_eq!(Azure.read(&answer, Some(WALL)).get(resource), expected, "{limit} {remaining} {reset}");
            }
        }
    }

    #[test]
    fn a_limit_is_for_its_renewal_period() {
        for (periods, limit) in [
            (&[][..], 1000.0),
            (&["60"], 1000.0),
            (&["10"], 6000.0),
            (&["3600"], 1000.0 / 60.0),
            (&["0"], 1000.0),
            (&["-1"], 1000.0),
            (&["a while"], 1000.0),
            (&["10", "60"], 1000.0),
            (&["60", "10"], 1000.0),
            (&["60", "-1"], 1000.0),
        ] {
            let periods = periods.iter().map(|period| format!("\nx-ratelimit-renewalperiod-requests: {period}"));
            let lines = periods.fold("x-ratelimit-limit-requests: 1000".to_owned(), |lines, line| lines + &line);
            let readings = Azure.read(&headers(&format!("x-ratelimit-limit-tokens: 7\n{lines}")), None);
            let seen = |resource| readings.get(resource).and_then(|reading| reading.limit);
            assert_eq!(seen(Resource::Requests), Some(limit), "{lines}");
            assert_eq!(seen(Resource::Tokens), Some(7.0), "of another resource");
        }
    }

    #[test]
    fn a_reset_in_the_place_of_retry_after_is_a_wait_whatever_remains() {
        for (lines, seconds) in [
            ("x-rate-limit-reset-tokens: 55\nx-ratelimit-remaining-requests: 9", Some(55)),
            ("x-rate-limit-reset-tokens: 55\nx-ratelimit-remaining-tokens: 2675", Some(55)),
            ("x-rate-limit-reset-requests: 3\nx-rate-limit-reset-tokens: 55", Some(55)),
            ("x-rate-limit-reset-requests: 55\nx-rate-limit-reset-tokens: 3", Some(55)),
            ("x-rate-limit-reset-tokens: 3\nx-rate-limit-reset-tokens: 55", Some(55)),
            ("x-rate-limit-reset-tokens: 0", None),
            ("x-rate-limit-reset-tokens: -1", None),
            ("x-ratelimit-reset-tokens: 55", None),
            ("x-rate-limit-reset: 55", None),
        ] {
            assert_eq!(refused(&headers(lines), WALL), seconds.map(Duration::from_secs), "{lines}");
        }
    }
}
