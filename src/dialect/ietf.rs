//! The fields of the IETF draft *RateLimit header fields for HTTP*, in its present form and in its earlier ones.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use sfv::{BareItem, Dictionary, Item, List, ListEntry, Parser};

use super::{ReadQuota, Reading, Readings, Resource, above_zero, amount, per_minute, reset, text};

/// `RateLimit` and `RateLimit-Policy`, structured fields of
/// [draft-ietf-httpapi-ratelimit-headers](https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/): of requests.
///
/// ```text
/// RateLimit-Policy: "minute";q=100;w=60, "day";q=1000;w=86400
/// RateLimit: "minute";r=0;t=20, "day";r=900;t=3000
/// ```
///
/// - An item of `RateLimit` is one policy's remainder (`r`) and the seconds until more is there (`t`, which may be missing). Its
///   limit is that of the policy of the same name (and partition key, where both have one): `q` per `w` seconds, reckoned per
///   minute; without a `w` it is unknown. Names may be quoted or bare.
/// - Of several policies, and of several lines, the most restrictive counts: see [`Reading::stricter`].
/// - A policy whose unit (`qu`) is not `"requests"`, the default, is not read: bytes are no requests, and a remainder of 0 concurrent
///   requests says no more than that all its slots are in use. In refusals a policy of any unit tells how long to wait.
/// - A line that is malformed counts for nothing, and spoils no other.
///
/// The earlier drafts are read too, since libraries send them: `RateLimit-Limit`, `-Remaining` and `-Reset`, each a header of its own;
/// `RateLimit: limit=100, remaining=50, reset=5`; and policies without a name, `RateLimit-Policy: 100;w=60`, or behind the number of
/// `RateLimit-Limit`. Of those the policy counts whose quota is the limit that the answer names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ietf;

impl ReadQuota for Ietf {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let policies = policies(headers);
        let remainders = remainders(headers).chain(Remainder::apart(headers, wall));
        let mut readings = Readings::default();
        let requests = readings.entry(Resource::Requests);
        let mut any = false;
        for remainder in remainders {
            any = true;
            let policy = policies.iter().find(|policy| policy.is_of(&remainder.name));
            if policy.is_none_or(|policy| policy.of_requests) {
                let limit = policy.and_then(|policy| policy.limit);
                let reset = remainder.reset.filter(|_| wall.is_some());
                *requests = requests.stricter(Reading { limit, remaining: Some(remainder.remaining), reset });
            }
        }
        if let ([policy], false) = (&policies[..], any) {
            // One alone tells a limit. Of several nobody knows which it is that binds.
            requests.limit = policy.limit.filter(|_| policy.of_requests);
        }
        readings
    }
}

/// Whether this header is one of those, in lower case, that only this dialect can read.
pub(super) fn is_one(name: &str) -> bool {
    name.strip_prefix("ratelimit").is_some_and(|rest| matches!(rest, "" | "-policy" | "-limit"))
}

/// The longest wait among the policies of which nothing remains, whatever their unit.
pub(super) fn exhausted(headers: &HeaderMap) -> Option<Duration> {
    let none_left = remainders(headers).filter(|remainder| remainder.remaining == 0.0);
    none_left.filter_map(|remainder| remainder.reset).max()
}

#[derive(Debug)]
enum Name {
    /// A policy's name, and its partition key.
    Policy(String, Option<Vec<u8>>),
    /// In earlier drafts: the policy of this quota.
    Quota(f64),
}

impl Name {
    fn of(item: &Item) -> Option<Self> {
        let name = match &item.bare_item {
            BareItem::String(name) => name.as_str(),
            BareItem::Token(name) => name.as_str(),
            quota => return number(quota).map(Name::Quota),
        };
        let key = match item.params.get("pk") {
            Some(BareItem::ByteSequence(key)) => Some(key.clone()),
            _ => None,
        };
        Some(Name::Policy(name.to_owned(), key))
    }
}

struct Policy {
    name: Name,
    /// Per minute.
    limit: Option<f64>,
    of_requests: bool,
}

impl Policy {
    fn of(item: &Item) -> Option<Self> {
        let name = Name::of(item)?;
        let window = above_zero(item.params.get("w").and_then(number));
        let quota = match name {
            // The number of `RateLimit-Limit` alone is no policy.
            Name::Quota(quota) => Some(quota).filter(|_| window.is_some())?,
            Name::Policy(..) => item.params.get("q").and_then(number)?,
        };
        let limit = window.and_then(|window| per_minute(quota, window));
        let of_requests = match item.params.get("qu") {
            None => true,
            Some(BareItem::String(unit)) => unit.as_str() == "requests",
            Some(_) => false,
        };
        Some(Policy { name, limit, of_requests })
    }

    fn is_of(&self, name: &Option<Name>) -> bool {
        match (&self.name, name) {
            (Name::Policy(ours, our_key), Some(Name::Policy(theirs, their_key))) => {
                ours == theirs && (our_key == their_key || our_key.is_none() || their_key.is_none())
            }
            (Name::Quota(ours), Some(Name::Quota(theirs))) => ours == theirs,
            _ => false,
        }
    }
}

/// No provider has so many policies; and each item is looked up among them.
const POLICIES: usize = 64;

fn policies(headers: &HeaderMap) -> Vec<Policy> {
    let lines = ["ratelimit-policy", "ratelimit-limit"].into_iter().flat_map(|name| headers.get_all(name));
    lines.filter_map(|line| items(text(line)?)).flatten().filter_map(|item| Policy::of(&item)).take(POLICIES).collect()
}

/// What remains by one policy.
struct Remainder {
    name: Option<Name>,
    remaining: f64,
    reset: Option<Duration>,
}

impl Remainder {
    fn of(item: &Item) -> Option<Self> {
        let remaining = item.params.get("r").and_then(number)?;
        Some(Remainder { name: Name::of(item), remaining, reset: item.params.get("t").and_then(seconds) })
    }

    /// In one earlier draft `RateLimit` is a dictionary.
    fn of_dictionary(line: &str) -> Option<Self> {
        let fields: Dictionary = Parser::new(line).parse().ok()?;
        let field = |name| match fields.get(name)? {
            ListEntry::Item(item) => Some(&item.bare_item),
            ListEntry::InnerList(_) => None,
        };
        let name = field("limit").and_then(number).map(Name::Quota);
        Some(Remainder {
            name,
            remaining: field("remaining").and_then(number)?,
            reset: field("reset").and_then(seconds),
        })
    }

    /// In others it is apart, a header a figure.
    fn apart(headers: &HeaderMap, wall: Option<SystemTime>) -> Option<Self> {
        let of = |name: &'static str| headers.get_all(name).iter();
        let remaining = of("ratelimit-remaining").filter_map(amount).reduce(f64::min)?;
        let limit = of("ratelimit-limit").filter_map(|line| items(text(line)?)?.into_iter().next()).next();
        let name = limit.and_then(|limit| number(&limit.bare_item)).map(Name::Quota);
        let reset = of("ratelimit-reset").filter_map(|value| reset(headers, value, wall)).max();
        Some(Remainder { name, remaining, reset })
    }
}

/// Each line is read by itself, which for well-formed lines is the same as merging them, and a malformed one then spoils no other.
fn remainders(headers: &HeaderMap) -> impl Iterator<Item = Remainder> {
    headers.get_all("ratelimit").iter().filter_map(text).flat_map(|line| match items(line) {
        Some(items) => items.iter().filter_map(Remainder::of).collect(),
        None => Vec::from_iter(Remainder::of_dictionary(line)),
    })
}

/// `None` where the line is no list.
fn items(line: &str) -> Option<Vec<Item>> {
    let list: List = Parser::new(line).parse().ok()?;
    let items = list.into_iter().filter_map(|entry| match entry {
        ListEntry::Item(item) => Some(item),
        ListEntry::InnerList(_) => None,
    });
    Some(items.collect())
}

fn number(item: &BareItem) -> Option<f64> {
    let number = match item {
        BareItem::Integer(number) => i64::from(*number) as f64,
        BareItem::Decimal(number) => f64::from(*number),
        _ => return None,
    };
    Some(number).filter(|number| *number >= 0.0)
}

fn seconds(item: &BareItem) -> Option<Duration> {
    Duration::try_from_secs_f64(number(item)?).ok().filter(|span| !span.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::tests::{WALL, headers};

    /// Limit per minute, what remains, and the reset in seconds.
    type Figures = (Option<f64>, Option<f64>, Option<u64>);

    #[track_caller]
    fn check(table: &[(&str, Option<Figures>)]) {
        for (lines, expected) in table {
            let readings = Ietf.read(&headers(lines), Some(WALL));
            let expected = expected.map(|(limit, remaining, reset)| {
                let reset = reset.map(Duration::from_secs);
                Reading { limit, remaining, reset }
            });
            assert_eq!(readings.get(Resource::Requests), expected, "{lines}");
            for resource in [Resource::InputTokens, Resource::OutputTokens, Resource::Tokens] {
                assert_eq!(readings.get(resource), None, "{lines}");
            }
            // Where nobody asks for resets there are none, and all else is the same.
            let unasked = Ietf.read(&headers(lines), None).get(Resource::Requests).unwrap_or_default();
            assert_eq!(unasked, Reading { reset: None, ..expected.unwrap_or_default() }, "{lines}");
        }
    }

    #[test]
    fn a_remainder_has_the_limit_of_its_policy_reckoned_per_minute() {
        check(&[
            ("ratelimit: \"m\";r=50;t=30", Some((None, Some(50.0), Some(30)))),
            ("ratelimit: \"m\";r=50", Some((None, Some(50.0), None))),
            ("ratelimit: m;r=50;t=30", Some((None, Some(50.0), Some(30)))),
            (
                "ratelimit-policy: \"m\";q=100;w=60\nratelimit: \"m\";r=50;t=30",
                Some((Some(100.0), Some(50.0), Some(30))),
            ),
            (
                "ratelimit: \"m\";r=50;t=30\nratelimit-policy: \"m\";q=100;w=10",
                Some((Some(600.0), Some(50.0), Some(30))),
            ),
            ("ratelimit: \"m\";r=50\nratelimit-policy: m;q=100;w=6000", Some((Some(1.0), Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"m\";q=100", Some((None, Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"m\";q=100;w=0", Some((None, Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"m\";q=0;w=60", Some((None, Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"m\";q=-1;w=60", Some((None, Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"m\";w=60", Some((None, Some(50.0), None))),
            ("ratelimit: \"m\";r=50\nratelimit-policy: \"M\";q=100;w=60", Some((None, Some(50.0), None))),
            // Partition keys.
            (
                "ratelimit: a;r=5;pk=:YQ==:\nratelimit-policy: a;q=1;w=60;pk=:Yg==:, a;q=2;w=60;pk=:YQ==:",
                Some((Some(2.0), Some(5.0), None)),
            ),
            ("ratelimit: a;r=5;pk=:YQ==:\nratelimit-policy: a;q=1;w=60;pk=:Yg==:", Some((None, Some(5.0), None))),
            ("ratelimit: a;r=5;pk=:YQ==:\nratelimit-policy: a;q=1;w=60", Some((Some(1.0), Some(5.0), None))),
            ("ratelimit: a;r=5\nratelimit-policy: a;q=1;w=60;pk=:YQ==:", Some((Some(1.0), Some(5.0), None))),
            // A policy alone, and two.
            ("ratelimit-policy: \"m\";q=100;w=60", Some((Some(100.0), None, None))),
            ("ratelimit-policy: \"m\";q=100;w=60, \"h\";q=100;w=3600", None),
            ("ratelimit-policy: \"m\";q=100;w=60;qu=\"content-bytes\"", None),
        ]);
    }

    #[test]
    fn of_several_policies_and_lines_the_most_restrictive_counts() {
        const BOTH: &str = "ratelimit-policy: \"minute\";q=100;w=60, \"day\";q=1440;w=86400";
        for (minute, day, expected) in [
            ("r=0;t=20", "r=900;t=3000", (Some(100.0), Some(0.0), Some(20))),
            ("r=899;t=20", "r=900;t=3000", (Some(100.0), Some(899.0), Some(20))),
            ("r=901;t=20", "r=900;t=3000", (Some(1.0), Some(900.0), Some(3000))),
            ("r=5;t=20", "r=5;t=3000", (Some(1.0), Some(5.0), Some(3000))),
            ("r=0", "r=0;t=3000", (Some(1.0), Some(0.0), Some(3000))),
            ("t=20", "r=900;t=3000", (Some(1.0), Some(900.0), Some(3000))),
        ] {
            for lines in [
                format!("{BOTH}\nratelimit: \"day\";{day}, \"minute\";{minute}"),
                format!("{BOTH}\nratelimit: \"minute\";{minute}, \"day\";{day}"),
                format!("ratelimit: \"minute\";{minute}\n{BOTH}\nratelimit: \"day\";{day}"),
                format!("ratelimit: minute;{minute}\nratelimit: \"a;r=1;t=9\nratelimit: day;{day}\n{BOTH}"),
            ] {
                check(&[(&lines, Some(expected))]);
            }
        }
        check(&[(
            "ratelimit: \"minute\";r=5\nratelimit-policy: \"day\";q=1440;w=86400\nratelimit-policy: \"minute\";q=100;w=60",
            Some((Some(100.0), Some(5.0), None)),
        )]);
    }

    #[test]
    fn what_is_not_requests_is_not_read() {
        for (unit, is_read) in [
            ("", true),
            (";qu=\"requests\"", true),
            (";qu=\"content-bytes\"", false),
            (";qu=\"concurrent-requests\"", false),
            (";qu=\"acme-units\"", false),
            (";qu=requests", false), // it must be a string
            (";qu=1", false),
        ] {
            let lines = format!("ratelimit-policy: \"m\";q=60;w=60{unit}\nratelimit: \"m\";r=0;t=20");
            check(&[(&lines, is_read.then_some((Some(60.0), Some(0.0), Some(20))))]);
            assert_eq!(exhausted(&headers(&lines)), Some(Duration::from_secs(20)), "but its wait is a wait");
        }
    }

    #[test]
    fn what_is_malformed_is_not_read() {
        for lines in [
            "ratelimit:",
            "ratelimit: \"m\"",
            "ratelimit: \"m\";t=20",
            "ratelimit: \"m\";r=-1;t=20",
            "ratelimit: \"m\";r=\"0\";t=20",
            "ratelimit: \"m;r=0;t=20",
            "ratelimit: (\"a\" \"b\");r=0;t=20",
            "ratelimit: \"m\";r=0;t=20,",
            "ratelimit: 100, 50",
            "ratelimit: remaining=many, reset=5",
            "ratelimit: remaining=(1 2), reset=5",
            "ratelimit: limit=5, reset=5",
            "ratelimit-policy: 100",
            "ratelimit-policy: x",
            "ratelimit-limit: 100",
            "ratelimit-reset: 5",
        ] {
            check(&[(lines, None)]);
        }
    }

    #[test]
    fn earlier_drafts_are_read_too() {
        const TWO: &str = "ratelimit-policy: 1000;w=3600, 100;w=60";
        check(&[
            ("ratelimit: limit=100, remaining=50, reset=5", Some((None, Some(50.0), Some(5)))),
            ("ratelimit: remaining=0", Some((None, Some(0.0), None))),
            (&format!("ratelimit: limit=100, remaining=50, reset=5\n{TWO}"), Some((Some(100.0), Some(50.0), Some(5)))),
            (
                &format!("ratelimit: limit=1000, remaining=50, reset=5\n{TWO}"),
                Some((Some(1000.0 / 60.0), Some(50.0), Some(5))),
            ),
            (&format!("ratelimit: limit=7, remaining=50\n{TWO}"), Some((None, Some(50.0), None))),
            (
                &format!("ratelimit-limit: 100\nratelimit-remaining: 50\nratelimit-reset: 5\n{TWO}"),
                Some((Some(100.0), Some(50.0), Some(5))),
            ),
            (
                "ratelimit-limit: 100, 10;w=1, 100;w=60\nratelimit-remaining: 50\nratelimit-reset: 5",
                Some((Some(100.0), Some(50.0), Some(5))),
            ),
            ("ratelimit-limit: 100\nratelimit-remaining: 50\nratelimit-reset: 5", Some((None, Some(50.0), Some(5)))),
            ("ratelimit-remaining: 50", Some((None, Some(50.0), None))),
            ("ratelimit-policy: 100;w=60", Some((Some(100.0), None, None))),
        ]);
    }

    #[test]
    fn a_flood_of_policies_is_not_looked_up_in() {
        // Quadratic work over it would take minutes.
        let policies: Vec<_> = (0..50_000).map(|n| format!("p{n};q={};w=60", n + 1)).collect();
        let remainders: Vec<_> = (0..50_000).map(|n| format!("p{n};r={}", 100_000 - n)).collect();
        let flood = |last: usize| {
            headers(&format!(
                "ratelimit-policy: {}\nratelimit: {}",
                policies.join(", "),
                remainders[..=last].join(", ")
            ))
        };
        for (last, limit) in [(62, Some(63.0)), (63, Some(64.0)), (64, Some(64.0)), (49_999, Some(64.0))] {
            let requests = Ietf.read(&flood(last), None).get(Resource::Requests).expect("it is told");
            assert_eq!(requests.limit, limit, "{last}");
            assert_eq!(requests.remaining, Some((100_000 - last) as f64));
        }
    }

    #[test]
    fn only_its_own_headers_are_its_own() {
        for (name, expected) in [
            ("ratelimit", true),
            ("ratelimit-policy", true),
            ("ratelimit-limit", true),
            ("ratelimit-remaining", false),
            ("ratelimit-reset", false),
            ("ratelimits", false),
            ("x-ratelimit", false),
            ("rate", false),
        ] {
            assert_eq!(is_one(name), expected, "{name}");
        }
    }
}
