//! The tables in `docs/` cannot rot: every test they name exists, and no trap, no case and no cell is left out.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The layers of the matrix, from the wire up.
const LAYERS: [&str; 11] =
    ["judge", "auth", "quota", "aimd", "health", "balance", "guard", "retry", "journal", "drive", "stack"];
const CONTRACTS: usize = 9;
const TRAPS: usize = 30;
/// The cases, by family. Ids have gaps.
const CASES: [(&str, &[u32]); 17] = [
    ("RA", &[1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28]),
    ("CL", &[29, 31, 32, 34, 35, 37, 38, 40, 41]),
    ("KEY", &[43, 44, 46, 47, 49, 50]),
    ("STR", &[42, 52, 53, 55, 56, 58]),
    ("SEC", &[142]),
    ("TOK", &[92, 94, 95, 97, 98, 100]),
    ("LIM", &[59, 61, 62, 64, 65, 67, 68, 70, 71]),
    ("RT", &[73, 74, 76, 77, 79, 80]),
    ("CB", &[82, 83, 85]),
    ("RET", &[86, 88, 89, 91]),
    ("CACHE", &[124, 125]),
    ("NET", &[131, 133, 134]),
    ("OBS", &[136, 137, 139, 140]),
    ("TWR", &[143, 145, 146, 148, 149]),
    ("RES", &[116, 118, 119, 121, 122]),
    ("MEM", &[127, 128, 130]),
    ("BAT", &[101, 103, 104, 106, 107, 109, 110, 112, 113, 115]),
];

/// The tables of `docs/from-other-tools.md`: heading, what ids begin with, how many.
const RULES: [(&str, &str, usize); 3] = [
    ("The earlier dispatcher's rules", "", 67),
    ("Where the earlier dispatcher was weak", "W", 24),
    ("The multi-source client's rules", "S", 10),
];

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The cells of a table's rows, without its head.
fn rows(table: &str) -> Vec<Vec<&str>> {
    let rows =
        table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| id ") && !line.starts_with("| |"));
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// The tests that a cell names: `file::name` in backticks.
fn named(cell: &str) -> Vec<(&str, &str)> {
    cell.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::")).collect()
}

/// The names of the tests in a file, those that macros make included.
fn tests_of(source: &str) -> BTreeSet<&str> {
    let name = |line: &str, from: usize| {
        let rest = &line[from..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        from..from + end
    };
    let mut found = BTreeSet::new();
    // Whether the attributes above say that it is a test; and within which macro we are.
    let (mut is_test, mut within) = (false, "");
    for line in source.lines() {
        let code = line.trim_start();
        if ["both! {", "twins! {", "scenarios! {"].contains(&line) {
            within = line;
        } else if line.starts_with('}') {
            within = "";
        }
        if code.starts_with("#[test]") || code.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(at) =
            code.find("fn ").filter(|at| code[..*at].split_whitespace().all(|word| word == "async"))
        {
            let span = name(code, at + 3);
            // `both!` makes two tests of each function that is handed a maker.
            if is_test || within == "both! {" && code[span.end..].starts_with("(make)") {
                found.insert(&code[span]);
            }
            is_test = false;
        } else if ["twins! {", "scenarios! {"].contains(&within) && code.contains(": \"") {
            found.insert(&code[name(code, 0)]);
        } else if !code.starts_with("#[") && !code.starts_with("//") {
            is_test = false;
        }
    }
    found
}

/// Every test that is named in this cell exists; gives how many.
#[track_caller]
fn all_exist(what: &str, cell: &str, sources: &mut BTreeMap<String, String>) -> usize {
    let named = named(cell);
    for (file, test) in &named {
        let source = sources.entry((*file).to_owned()).or_insert_with(|| read(file));
        assert!(tests_of(source).contains(test), "{what} names a test that is not there: {file}::{test}");
    }
    named.len()
}

#[test]
fn the_reader_of_tests_knows_a_test_when_it_sees_one() {
    let source = r#"
fn helper() {}
#[test]
fn plain() {}
    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "x")]
    async fn paused() {
        fn inner() {}
    }
// #[test]
fn commented() {}
both! {
    async fn twice(make) {
        let closure = |make| ();
    }
    fn not(other) {}
}
async fn once(make) {}
twins! {
    scenario: "file.toml",
}
scenarios! {
    run: "file";
}
let no: "twin";
proptest! {
    #[test]
    fn property(
        x in 0..1,
    ) {}
}
"#;
    let expected = BTreeSet::from(["plain", "paused", "twice", "scenario", "run", "property"]);
    assert_eq!(tests_of(source), expected);
    assert_eq!(named("`a/b.rs::c`, not `this`, but `d.rs::e`"), [("a/b.rs", "c"), ("d.rs", "e")]);
}

#[test]
fn every_trap_has_a_test() {
    let text = read("docs/traps.md");
    let mut sources = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for row in rows(&text) {
        let [id, trap, tests, fails] = row[..] else { panic!("{row:?}") };
        assert!(!trap.is_empty() && !fails.is_empty(), "{id} says all there is to say");
        assert!(seen.insert(id.to_owned()), "{id} stands there twice");
        assert!(all_exist(id, tests, &mut sources) >= 1, "{id} has no test");
    }
    assert_eq!(seen, (1..=TRAPS).map(|n| format!("P{n}")).collect());
}

#[test]
fn every_case_has_a_test() {
    let text = read("docs/cases.md");
    let mut sources = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for row in rows(&text) {
        let [id, case, tests, fails] = row[..] else { panic!("{row:?}") };
        assert!(!case.is_empty() && !fails.is_empty(), "{id} says all there is to say");
        assert!(seen.insert(id.to_owned()), "{id} stands there twice");
        assert!(all_exist(id, tests, &mut sources) >= 1, "{id} has no test");
    }
    let label = |id: u32, family: &str| format!("B{id:02} {family}");
    let expected = CASES.iter().flat_map(|(family, ids)| ids.iter().map(move |id| label(*id, family)));
    assert_eq!(seen, expected.collect());
}

#[test]
fn every_test_of_a_trap_or_a_case_stands_in_its_table() {
    for (doc, files) in [
        ("docs/traps.md", &["tests/traps.rs"][..]),
        (
            "docs/cases.md",
            &[
                "tests/cases/cb.rs",
                "tests/cases/cl.rs",
                "tests/cases/key.rs",
                "tests/cases/ra.rs",
                "tests/hint.rs",
                "tests/cases/tok.rs",
                "tests/cases/lim.rs",
                "tests/cases/rt.rs",
                "tests/cases/sec.rs",
                "tests/cases/str.rs",
                "tests/cases/ret.rs",
                "tests/cases/net.rs",
                "tests/cases/twr.rs",
                "tests/dispatch/resuming.rs",
                "tests/dispatch/memory.rs",
                "tests/dispatch/report.rs",
            ],
        ),
    ] {
        let text = read(doc);
        for file in files {
            let source = read(file);
            for test in tests_of(&source) {
                let labelled = test.starts_with(['p', 'b']) && test[1..].starts_with(|c: char| c.is_ascii_digit());
                assert!(!labelled || text.contains(&format!("`{file}::{test}`")), "{doc} does not name {file}::{test}");
            }
        }
    }
}

#[test]
fn every_rule_of_the_earlier_tools_has_a_test_or_a_reason() {
    let text = read("docs/from-other-tools.md");
    let mut sources = BTreeMap::new();
    for (heading, prefix, count) in RULES {
        let (_, table) = text.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("{heading}"));
        let table = table.split("\n## ").next().unwrap();
        let mut seen = vec![];
        for row in rows(table) {
            let [id, rule, ours, tests] = row[..] else { panic!("{row:?}") };
            assert!(!rule.is_empty() && ours.len() > 5, "{id} says what became of it");
            let waived = ours.strip_prefix("waived: ").is_some_and(|reason| reason.len() > 10);
            let found = all_exist(id, tests, &mut sources);
            assert!(found >= 1 || waived, "{id} has neither a test nor a reason");
            seen.push(id.to_owned());
        }
        assert_eq!(seen, (1..=count).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>(), "{heading}");
    }
}

#[test]
fn every_layer_keeps_every_contract_or_says_why_it_need_not() {
    let text = read("docs/contracts.md");
    let mut sources = BTreeMap::new();
    let mut sections: BTreeMap<&str, &str> = BTreeMap::new();
    for section in text.split("\n## ").skip(1) {
        let (layer, table) = section.split_once('\n').unwrap();
        assert!(sections.insert(layer.trim(), table).is_none(), "{layer} stands there twice");
    }
    assert_eq!(sections.keys().copied().collect::<BTreeSet<_>>(), BTreeSet::from(LAYERS));
    for (layer, table) in sections {
        let rows = rows(table);
        let numbers: Vec<_> = rows.iter().map(|row| row[0].to_owned()).collect();
        assert_eq!(numbers, (1..=CONTRACTS).map(|n| n.to_string()).collect::<Vec<_>>(), "{layer}");
        for row in rows {
            let [number, cell] = row[..] else { panic!("{layer}: {row:?}") };
            let tests = all_exist(&format!("{layer}, {number}"), cell, &mut sources);
            let reason = cell.strip_prefix("n/a: ").is_some_and(|reason| reason.len() > 10);
            assert!(tests >= 1 || reason, "{layer}, {number}: neither a test nor a reason");
        }
    }
}
