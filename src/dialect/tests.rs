//! What holds for all dialects; each has its own table in its own file.

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;

use super::*;

pub(super) const WALL: SystemTime = SystemTime::UNIX_EPOCH;

/// A header a line, as on the wire.
pub(super) fn headers(lines: &str) -> HeaderMap {
    let lines = lines.lines().filter(|line| !line.trim().is_empty());
    let header = |line: &str| {
        let (name, value) = line.split_once(':').expect("a line is `name: value`");
        let name: HeaderName = name.trim().parse().expect("the name is valid");
        (name, HeaderValue::from_str(value.trim()).expect("the value is visible ASCII"))
    };
    lines.map(header).collect()
}

/// What a header has for its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Of {
    Limit(Resource),
    Remaining(Resource),
    Reset(Resource),
    Nothing,
}

/// Each header alone, so that a swapped name cannot hide behind another; by its own dialect, and where all are read at once.
#[track_caller]
pub(super) fn every_name_has_its_own_place(dialect: &dyn ReadQuota, table: &[(&str, Of)]) {
    for (name, of) in table {
        let answer = headers(&format!("{name}: 17"));
        let seen = dialect.read(&answer, Some(WALL));
        for resource in Resource::ALL {
            let reading = Reading {
                limit: (*of == Of::Limit(resource)).then_some(17.0),
                remaining: (*of == Of::Remaining(resource)).then_some(17.0),
                reset: (*of == Of::Reset(resource)).then_some(Duration::from_secs(17)),
            };
            let expected = Some(reading).filter(|reading| *reading != Reading::default());
            assert_eq!(seen.get(resource), expected, "{name} {resource:?}");
            // Where nobody asks for resets there are none.
            let unasked = dialect.read(&answer, None).get(resource);
            assert_eq!(unasked, expected.filter(|reading| reading.reset.is_none()), "{name} {resource:?}");
        }
        if *of != Of::Nothing {
            assert_eq!(Detect.read(&answer, Some(WALL)), seen, "{name}");
            assert_eq!(Detect.read(&answer, None), dialect.read(&answer, None), "{name}");
        }
        assert!(NoHeaders.read(&answer, Some(WALL)).is_empty());
    }
}

#[test]
fn what_makes_no_sense_is_unknown() {
    for value in ["-1", "-0.5", "", "many", "NaN", "inf", "1e400", "8,000", "0x10", "-inf"] {
        for of in ["requests", "tokens"] {
            let answer = headers(&format!(
                "x-ratelimit-limit-{of}: {value}\nx-ratelimit-remaining-{of}: {value}\nx-ratelimit-reset-{of}: {value}\n\
                 anthropic-ratelimit-{of}-limit: {value}\nanthropic-ratelimit-{of}-remaining: {value}\n\
                 anthropic-ratelimit-{of}-reset: {value}\nx-ratelimit-renewalperiod-{of}: {value}\n\
                 x-ratelimit-remaining: {value}\nratelimit-reset: {value}"
            ));
            assert!(Detect.read(&answer, Some(WALL)).is_empty(), "{value:?}");
        }
    }
    let answer = headers("x-ratelimit-remaining-requests: -1\nx-ratelimit-limit-requests:  60 ");
    let reading = Detect.read(&answer, Some(WALL)).get(Resource::Requests).expect("a limit");
    assert_eq!((reading.limit, reading.remaining), (Some(60.0), None));
}

#[test]
fn of_what_remains_zero_is_a_figure_and_of_all_else_it_is_none() {
    for zero in ["0", "0.0", "000", "+0", "-0"] {
        let answer = headers(&format!(
            "x-ratelimit-limit-requests: {zero}\nx-ratelimit-remaining-requests: {zero}\nx-ratelimit-reset-requests: {zero}"
        ));
        let reading = Detect.read(&answer, Some(WALL)).get(Resource::Requests).expect("a figure");
        assert_eq!(reading, Reading { limit: None, remaining: Some(0.0), reset: None }, "{zero}");
        assert!(reading.remaining.is_some_and(f64::is_sign_positive));
    }
}

#[test]
fn of_a_repeated_header_the_most_restrictive_line_counts() {
    for (lines, expected) in [
        (&["7", "8"][..], Some(7.0)),
        (&["8", "7"], Some(7.0)),
        (&["-1", "many", "8", "7"], Some(7.0)),
        (&["7", "-1"], Some(7.0)),
        (&["-1", "many"], None),
    ] {
        for (name, reset) in [
            ("x-ratelimit-{}-requests", "x-ratelimit-reset-requests"),
            ("anthropic-ratelimit-requests-{}", "anthropic-ratelimit-requests-reset"),
        ] {
            for figure in ["limit", "remaining"] {
                let answer: String =
                    lines.iter().map(|value| format!("{}: {value}\n", name.replace("{}", figure))).collect();
                let reading = Detect.read(&headers(&answer), None).get(Resource::Requests).unwrap_or_default();
                let seen = if figure == "limit" { reading.limit } else { reading.remaining };
                assert_eq!(seen, expected, "{answer}");
            }
            let answer: String = lines.iter().map(|value| format!("{reset}: {value}\n")).collect();
            let seen =
                Detect.read(&headers(&answer), Some(WALL)).get(Resource::Requests).and_then(|reading| reading.reset);
            assert_eq!(
                seen,
                expected.map(|_| Duration::from_secs(if lines.contains(&"8") { 8 } else { 7 })),
                "{answer}"
            );
        }
    }
}

/// Requests: limit, what remains, and the reset in seconds.
fn requests(readings: Readings) -> (Option<f64>, Option<f64>, Option<u64>) {
    let reading = readings.get(Resource::Requests).unwrap_or_default();
    (reading.limit, reading.remaining, reading.reset.map(|reset| reset.as_secs()))
}

#[test]
fn where_two_dialects_disagree_the_most_restrictive_counts() {
    for (anthropic, openai, plain, expected) in [
        // What remains by each; what counts.
        (Some(5), Some(6), None, (Some(100.0), Some(5.0), Some(10))),
        (Some(6), Some(5), None, (Some(60.0), Some(5.0), Some(20))),
        (Some(5), Some(5), None, (Some(60.0), Some(5.0), Some(20))),
        (Some(5), None, None, (Some(100.0), Some(5.0), Some(10))),
        (None, Some(5), None, (Some(60.0), Some(5.0), Some(20))),
        (Some(5), Some(6), Some(7), (Some(100.0), Some(5.0), Some(10))),
        (Some(5), Some(6), Some(4), (Some(100.0), Some(4.0), Some(30))),
        (Some(6), Some(5), Some(4), (Some(60.0), Some(4.0), Some(30))),
        // What names no resource has no limit of its own.
        (None, None, Some(4), (None, Some(4.0), Some(30))),
    ] {
        let anthropic = anthropic.map(|left| {
            format!(
                "anthropic-ratelimit-requests-limit: 100\nanthropic-ratelimit-requests-remaining: {left}\n\
                 anthropic-ratelimit-requests-reset: 10"
            )
        });
        let openai = openai.map(|left| {
            format!(
                "x-ratelimit-limit-requests: 60\nx-ratelimit-remaining-requests: {left}\nx-ratelimit-reset-requests: 20"
            )
        });
        let plain =
            plain.map(|left| format!("x-ratelimit-limit: 3\nx-ratelimit-remaining: {left}\nx-ratelimit-reset: 30"));
        let mut lines: Vec<_> = [anthropic, openai, plain].into_iter().flatten().collect();
        for _ in 0..lines.len() {
            lines.rotate_left(1);
            let answer = headers(&lines.join("\n"));
            assert_eq!(requests(Detect.read(&answer, Some(WALL))), expected, "{lines:?}");
            // So it does where they are put together by hand.
            let three = ((Anthropic, OpenAi), Plain);
            assert_eq!(three.read(&answer, Some(WALL)), Detect.read(&answer, Some(WALL)));
        }
    }
}

#[cfg(feature = "ietf")]
#[test]
fn where_the_ietf_disagrees_with_the_others_the_most_restrictive_counts() {
    const POLICY: &str = "ratelimit-policy: \"m\";q=90;w=60";
    for (ietf, openai, expected) in [
        ("r=5;t=10", (0, 30), (Some(60.0), Some(0.0), Some(30))),
        ("r=0;t=10", (5, 30), (Some(90.0), Some(0.0), Some(10))),
        ("r=0;t=10", (0, 30), (Some(60.0), Some(0.0), Some(30))),
        ("r=0;t=50", (0, 30), (Some(60.0), Some(0.0), Some(50))),
        ("r=6;t=50", (5, 30), (Some(60.0), Some(5.0), Some(30))),
        ("r=4;t=50", (5, 30), (Some(90.0), Some(4.0), Some(50))),
    ] {
        let (remaining, reset) = openai;
        let openai = format!(
            "x-ratelimit-limit-requests: 60\nx-ratelimit-remaining-requests: {remaining}\nx-ratelimit-reset-requests: {reset}s"
        );
        for lines in [
            format!("{POLICY}\nratelimit: \"m\";{ietf}\n{openai}"),
            format!("{openai}\nratelimit: \"m\";{ietf}\n{POLICY}"),
        ] {
            assert_eq!(requests(Detect.read(&headers(&lines), Some(WALL))), expected, "{lines}");
        }
    }
    // A policy of requests says nothing of tokens.
    let readings = Detect.read(&headers("ratelimit: \"m\";r=0;t=5\nx-ratelimit-remaining-tokens: 9"), Some(WALL));
    assert_eq!(readings.get(Resource::Tokens).and_then(|tokens| tokens.remaining), Some(9.0));
}

#[test]
fn a_preset_reads_its_own_dialect_only() {
    let all = headers(
        "anthropic-ratelimit-requests-remaining: 1\nx-ratelimit-remaining-requests: 2\nx-rate-limit-remaining-requests: 3\n\
         x-ratelimit-remaining: 4\nratelimit: \"m\";r=5\nratelimit-policy: \"m\";q=60;w=60",
    );
    let left = |dialect: &dyn ReadQuota| requests(dialect.read(&all, Some(WALL))).1;
    assert_eq!(left(&Anthropic), Some(1.0));
    assert_eq!(left(&OpenAi), Some(2.0));
    assert_eq!(left(&Azure), Some(2.0));
    assert_eq!(left(&Plain), Some(4.0));
    #[cfg(feature = "ietf")]
    assert_eq!(left(&Ietf), Some(5.0));
    assert_eq!(left(&NoHeaders), None);
    assert_eq!(left(&Detect), Some(1.0));
    assert_eq!(left(&(OpenAi, Plain)), Some(2.0));
    assert_eq!(left(&(NoHeaders, Plain)), Some(4.0));
}

#[test]
fn the_organisation_is_named_by_either_dialect() {
    for (lines, expected) in [
        ("openai-organization: o\nanthropic-organization-id: a", Some("a")),
        ("anthropic-organization-id: a\nopenai-organization: o", Some("a")),
        ("openai-organization: o", Some("o")),
        ("anthropic-organization-id: a", Some("a")),
        ("openai-organization: o\nanthropic-organization-id:", Some("o")),
        ("openai-organization:", None),
        ("", None),
    ] {
        assert_eq!(organisation(&headers(lines)), expected, "{lines}");
    }
}

/// Any name that any dialect reads, and some that none does.
fn some_name() -> impl Strategy<Value = String> {
    let of = prop::sample::select(vec![
        "requests",
        "tokens",
        "input-tokens",
        "output-tokens",
        "project-tokens",
        "",
        "images",
    ]);
    let figure = prop::sample::select(vec!["limit", "remaining", "reset", "renewalperiod", "policy", ""]);
    prop_oneof![
        4 => (of, figure, 0..4).prop_map(|(of, figure, shape)| match shape {
            0 => format!("anthropic-ratelimit-{of}-{figure}"),
            1 => format!("x-ratelimit-{figure}-{of}"),
            2 => format!("x-rate-limit-{figure}-{of}"),
            _ => format!("x-ratelimit-{figure}"),
        }),
        2 => prop::sample::select(vec![
            "ratelimit", "ratelimit-policy", "ratelimit-limit", "ratelimit-remaining", "ratelimit-reset", "date",
        ]).prop_map(str::to_owned),
        1 => "[a-z][a-z-]{0,30}",
    ]
}

fn some_value() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => "[0-9]{1,16}",
        1 => "[0-9]{1,4}\\.[0-9]{1,20}",
        1 => "[0-9]e[0-9]{1,3}",
        2 => prop::sample::select(vec!["-", "-1", "0", "inf", "NaN", "2026-10-21T07:28:30Z", "1h", "ms", "s", " ", ", "]).prop_map(str::to_owned),
        3 => prop::sample::select(vec![
            "\"m\"", "m", ";r=", ";t=", ";q=", ";w=", ";qu=\"requests\"", ";qu=\"content-bytes\"", ";pk=:YQ==:", "limit=", "remaining=",
        ]).prop_map(str::to_owned),
    ];
    prop_oneof![
        6 => proptest::collection::vec(piece, 0..9).prop_map(|pieces| pieces.concat().into_bytes()),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
    ]
}

fn some_headers() -> impl Strategy<Value = HeaderMap> {
    proptest::collection::vec((some_name(), some_value()), 0..12).prop_map(|lines| {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_bytes(&value)) {
                headers.append(name, value);
            }
        }
        headers
    })
}

proptest! {
    #[test]
    fn nothing_panics_and_every_figure_makes_sense(headers in some_headers()) {
        #[cfg(feature = "ietf")]
        let ietf: &dyn ReadQuota = &Ietf;
        #[cfg(not(feature = "ietf"))]
        let ietf: &dyn ReadQuota = &NoHeaders;
        let dialects: [&dyn ReadQuota; 7] = [&Anthropic, &OpenAi, &Azure, &Plain, ietf, &NoHeaders, &Detect];
        for dialect in dialects {
            let asked = dialect.read(&headers, Some(WALL));
            let unasked = dialect.read(&headers, None);
            prop_assert_eq!(asked.is_empty(), Resource::ALL.iter().all(|resource| asked.get(*resource).is_none()));
            for resource in Resource::ALL {
                let reading = asked.get(resource).unwrap_or_default();
                prop_assert!(reading.limit.is_none_or(|limit| limit.is_finite() && limit > 0.0));
                prop_assert!(reading.remaining.is_none_or(|remaining| remaining.is_finite() && remaining >= 0.0));
                prop_assert!(reading.reset.is_none_or(|reset| !reset.is_zero()));
                // Who asks for no resets gets none, and all else just the same.
                let expected = Reading { reset: None, ..reading };
                prop_assert_eq!(unasked.get(resource).unwrap_or_default(), expected);
            }
        }
        let _ = exhausted(&headers, WALL);
    }

    #[test]
    fn all_at_once_leaves_no_more_than_any_one_alone(headers in some_headers()) {
        let all = Detect.read(&headers, Some(WALL));
        for dialect in [&Anthropic as &dyn ReadQuota, &OpenAi, &Azure, &Plain] {
            let alone = dialect.read(&headers, Some(WALL));
            for resource in Resource::ALL {
                let of = |readings: &Readings| readings.get(resource).unwrap_or_default();
                if let Some(left) = of(&alone).remaining {
                    prop_assert!(of(&all).remaining.is_some_and(|least| least <= left));
                }
                prop_assert!(of(&alone).limit.is_none() || of(&all).limit.is_some());
            }
        }
    }

    #[test]
    fn digits_are_read_as_any_number_is(
        value in prop_oneof![
            "[0-9]{1,40}",
            "0{0,20}[0-9]{1,17}",
            "[ \t]{0,2}[+-]?[0-9]{0,17}[.]?[0-9]{0,3}([eE][+-]?[0-9]{0,3})?[ \t]{0,2}",
        ].prop_map(String::into_bytes).boxed().prop_union(proptest::collection::vec(32u8..=255, 0..18).boxed()),
    ) {
        let Ok(header) = HeaderValue::from_bytes(&value) else { return Ok(()) };
        let plain = header.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
        prop_assert_eq!(amount(&header), plain.filter(|number| number.is_finite() && *number >= 0.0));
    }
}
