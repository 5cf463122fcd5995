//! Pools from the environment and from TOML. No test touches the process environment.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io,
    sync::{Arc, Mutex},
};

use tower_quota::org::{BuildError, Dialect, Orgs};

const SECRET: &str = "sk-ant-secret-0123456789";

fn vars(vars: &[(&str, &str)]) -> Vec<(String, String)> {
    vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn names(orgs: &Orgs) -> Vec<String> {
    orgs.iter().map(|org| org.name().to_owned()).collect()
}

fn keys(orgs: &Orgs) -> Vec<&str> {
    orgs.iter().map(|org| org.key().unwrap().reveal()).collect()
}

fn refusal(result: Result<Orgs, BuildError>) -> String {
    let error = result.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    error.to_string()
}

/// What is logged meanwhile.
fn logged<T>(run: impl FnOnce() -> T) -> (T, String) {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Log {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(text)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let value = tracing::subscriber::with_default(subscriber, run);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    (value, text)
}

// The environment.

#[test]
fn variables_name_the_orgs_in_a_fixed_order() {
    for (given, dialect, expected) in [
        (vec![("ANTHROPIC_API_KEY", "1")], Dialect::Anthropic, vec!["main"]),
        (vec![("ANTHROPIC_BATCH_KEY", "1")], Dialect::Anthropic, vec!["batch"]),
        (vec![("ANTHROPIC_API_KEY_LOW_PRIO", "1")], Dialect::Anthropic, vec!["low_prio"]),
        (
            vec![
                ("ANTHROPIC_API_KEY_ZULU", "1"),
                ("ANTHROPIC_API_KEY_ALPHA", "2"),
                ("ANTHROPIC_BATCH_KEY", "3"),
                ("ANTHROPIC_API_KEY_2", "4"),
                ("ANTHROPIC_API_KEY", "5"),
                ("PATH", "/bin"),
            ],
            Dialect::Anthropic,
            vec!["main", "batch", "2", "alpha", "zulu"],
        ),
        (
            vec![("OPENAI_API_KEY_B", "1"), ("OPENAI_BATCH_KEY", "2"), ("OPENAI_API_KEY", "3")],
            Dialect::OpenAi,
            vec!["main", "batch", "b"],
        ),
        // Neither another program's variables, nor what only looks alike.
        (
            vec![
                ("MY_ANTHROPIC_API_KEY", "1"),
                ("ANTHROPIC_API_KEYS", "2"),
                ("OPENAI_API_KEY", "3"),
                ("OPENAI_ORG_ID", "4"),
            ],
            Dialect::OpenAi,
            vec!["main"],
        ),
    ] {
        let orgs = Orgs::from_lookup(vars(&given), None).unwrap();
        assert_eq!(
            (orgs.dialect(), names(&orgs)),
            (dialect, expected.iter().map(|name| name.to_string()).collect()),
            "{given:?}"
        );
        let reversed = given.iter().rev().copied().collect::<Vec<_>>();
        assert_eq!(names(&Orgs::from_lookup(vars(&reversed), None).unwrap()), names(&orgs));
        assert!(orgs.iter().all(|org| org.reached_at() == dialect.default_base_url() && org.own_cap().is_none()));
    }
}

#[test]
fn a_blank_variable_is_absent_and_blanks_around_a_key_are_cut_off() {
    let given = [("ANTHROPIC_API_KEY", ""), ("ANTHROPIC_BATCH_KEY", " \t\r\n"), ("ANTHROPIC_API_KEY_A", "  sk-1\r\n")];
    let orgs = Orgs::from_lookup(vars(&given), None).unwrap();
    assert_eq!((names(&orgs), keys(&orgs)), (vec!["a".to_owned()], vec!["sk-1"]));
    let other = [("ANTHROPIC_API_KEY", " "), ("OPENAI_API_KEY", "sk-1")];
    assert_eq!(Orgs::from_lookup(vars(&other), None).unwrap().dialect(), Dialect::OpenAi);
}

#[test]
fn no_key_at_all_names_the_variables() {
    let text = refusal(Orgs::from_lookup(vars(&[("ANTHROPIC_BASE_URL", "http://x"), ("OPENAI_API_KEY", " ")]), None));
    for variable in
        ["ANTHROPIC_API_KEY,", "ANTHROPIC_BATCH_KEY", "ANTHROPIC_API_KEY_<TAG>", "OPENAI_API_KEY,", "OPENAI_BATCH_KEY"]
    {
        assert!(text.contains(variable), "{text}");
    }
    let text = refusal(Orgs::from_lookup(vars(&[("OPENAI_API_KEY", "sk-1")]), Some(Dialect::Anthropic)));
    assert!(text.contains("ANTHROPIC_API_KEY") && !text.contains("OPENAI"), "{text}");
}

#[test]
fn keys_of_both_providers_must_be_chosen_from() {
    let both = vars(&[("ANTHROPIC_API_KEY", SECRET), ("OPENAI_API_KEY_B", SECRET)]);
    let text = refusal(Orgs::from_lookup(both.clone(), None));
    assert!(text.contains("one provider") && text.contains("from_env_for"), "{text}");
    assert_eq!(names(&Orgs::from_lookup(both.clone(), Some(Dialect::Anthropic)).unwrap()), ["main"]);
    assert_eq!(names(&Orgs::from_lookup(both, Some(Dialect::OpenAi)).unwrap()), ["b"]);
}

#[test]
fn one_key_in_two_variables_is_one_org_and_one_warning() {
    let given = [
        ("ANTHROPIC_API_KEY", SECRET),
        ("ANTHROPIC_BATCH_KEY", "sk-2"),
        ("ANTHROPIC_API_KEY_A", " sk-ant-secret-0123456789 "),
    ];
    let (orgs, log) = logged(|| Orgs::from_lookup(vars(&given), None).unwrap());
    assert_eq!(names(&orgs), ["main", "batch"]);
    assert_eq!(log.matches("WARN").count(), 1, "{log}");
    assert!(log.contains("ANTHROPIC_API_KEY_A") && log.contains("\"main\"") && log.contains("\"a\""), "{log}");
    assert!(!log.contains("secret"), "{log}");
    let (_, log) = logged(|| Orgs::from_lookup(vars(&given[..2]), None).unwrap());
    assert_eq!(log, "");
}

#[test]
fn a_variable_that_cannot_be_what_it_should_is_refused_by_name() {
    for (given, field) in [
        (vec![("ANTHROPIC_API_KEY", "secret\nsecret")], "ANTHROPIC_API_KEY: "),
        (vec![("ANTHROPIC_API_KEY_X", "secret\u{fffd}")], "ANTHROPIC_API_KEY_X: "),
        (vec![("ANTHROPIC_API_KEY_", SECRET)], "ANTHROPIC_API_KEY_: "),
        (vec![("ANTHROPIC_API_KEY", SECRET), ("ANTHROPIC_API_KEY_MAIN", "sk-2")], "ANTHROPIC_API_KEY_MAIN: "),
        (vec![("ANTHROPIC_API_KEY_Low", SECRET), ("ANTHROPIC_API_KEY_LOW", "sk-2")], "ANTHROPIC_API_KEY_Low: "),
        (vec![("OPENAI_API_KEY", SECRET), ("OPENAI_BASE_URL", "secret.example/v1")], "OPENAI_BASE_URL: "),
        (vec![("OPENAI_API_KEY", SECRET), ("OPENAI_BASE_URL", "http://u:secret@x/")], "OPENAI_BASE_URL: "),
        (vec![("OPENAI_API_KEY", SECRET), ("OPENAI_BASE_URL", "http://not a secret")], "OPENAI_BASE_URL: "),
    ] {
        let text = refusal(Orgs::from_lookup(vars(&given), None));
        assert!(text.starts_with(field), "{text}");
    }
}

#[test]
fn base_urls_are_honoured_for_their_own_provider() {
    let given = [
        ("ANTHROPIC_API_KEY", "sk-1"),
        ("ANTHROPIC_API_KEY_A", "sk-2"),
        ("ANTHROPIC_BASE_URL", " http://127.0.0.1:4000/x "),
        ("OPENAI_BASE_URL", "nonsense"),
    ];
    let orgs = Orgs::from_lookup(vars(&given), None).unwrap();
    assert!(orgs.iter().all(|org| org.reached_at() == "http://127.0.0.1:4000/x"));
    let blank = [("ANTHROPIC_API_KEY", "sk-1"), ("ANTHROPIC_BASE_URL", " ")];
    let orgs = Orgs::from_lookup(vars(&blank), None).unwrap();
    assert_eq!(orgs.iter().next().unwrap().reached_at(), "https://api.anthropic.com");
}

#[test]
fn the_example_file_names_the_variables_that_are_read() {
    let example = include_str!("../.env.example");
    let lines = example.lines().map(|line| line.trim_start_matches("# ")).filter_map(|line| line.split_once('='));
    let filled = lines.filter(|(name, _)| name.starts_with("ANTHROPIC_")).enumerate().map(|(i, (name, value))| {
        (name.to_owned(), if value.is_empty() { format!("sk-{i}") } else { value.to_owned() })
    });
    let orgs = Orgs::from_lookup(filled, None).unwrap();
    assert_eq!(names(&orgs), ["main", "batch", "low_prio"]);
}

// TOML.

const TOML: &str = r#"
dialect = "openai"
base_url = "http://127.0.0.1:4000/v1"

[[org]]
name = "research"
key = " sk-ant-secret-0123456789 "
cap = 40

[[org]]
name = "batch"
key_env = "BATCH_KEY"
base_url = "https://gate.way"
"#;

fn env(variable: &str) -> Option<String> {
    match variable {
        "BATCH_KEY" => Some(" sk-batch ".to_owned()),
        "BLANK" => Some(" \n".to_owned()),
        "BROKEN" => Some("sk\nsecret".to_owned()),
        _ => None,
    }
}

fn toml(text: &str) -> Result<Orgs, BuildError> {
    Orgs::from_toml_with(text, env)
}

#[test]
fn a_file_says_all_there_is_to_say_of_an_org() {
    let orgs = toml(TOML).unwrap();
    assert_eq!(
        (names(&orgs), keys(&orgs)),
        (vec!["research".to_owned(), "batch".to_owned()], vec![SECRET, "sk-batch"])
    );
    assert_eq!(orgs.dialect(), Dialect::OpenAi);
    let org = |name| orgs.get(name).unwrap();
    assert_eq!((org("research").own_cap(), org("batch").own_cap()), (Some(40), None));
    assert_eq!(org("research").reached_at(), "http://127.0.0.1:4000/v1");
    assert_eq!(org("batch").reached_at(), "https://gate.way");

    let least = toml("[[org]]\nname = 'a'\nkey = 'k'").unwrap();
    assert_eq!(
        (least.dialect(), least.get("a").unwrap().reached_at()),
        (Dialect::Anthropic, Dialect::Anthropic.default_base_url())
    );
}

#[test]
fn the_same_key_twice_is_one_org_and_one_warning() {
    let text = "[[org]]\nname = 'a'\nkey = 'sk-secret'\n[[org]]\nname = 'b'\nkey = 'sk-secret'";
    let (orgs, log) = logged(|| toml(text).unwrap());
    assert_eq!(names(&orgs), ["a"]);
    assert!(log.contains("\"a\"") && log.contains("\"b\"") && !log.contains("secret"), "{log}");
}

#[test]
fn what_is_wrong_is_named_by_field_and_org() {
    let org = |fields: &str| format!("[[org]]\nname = 'good'\nkey = 'sk-secret-1'\n[[org]]\n{fields}");
    for (text, expected) in [
        ("".to_owned(), "org: "),
        ("org = 'secret'".to_owned(), "org: must be written as [[org]]"),
        ("org = ['secret']".to_owned(), "org: must be written as [[org]]"),
        ("[org]\nname = 'a'".to_owned(), "org: must be written as [[org]]"),
        ("org = []".to_owned(), "orgs: at least one"),
        (format!("orgs = 1\n{TOML}"), "orgs: is not known"),
        ("dialect = 'secret'".to_owned(), "dialect: "),
        ("dialect = 7".to_owned(), "dialect: must be a string"),
        ("base_url = 'secret'".to_owned(), "base_url: "),
        ("base_url = 'https://secret@x'".to_owned(), "base_url: "),
        (org("key = 'sk-secret'"), "org #2: name: is missing"),
        (org("name = ' '\nkey = 'sk-secret'"), "org #2: name: is blank"),
        (org("name = 1\nkey = 'sk-secret'"), "org #2: name: must be a string"),
        (org("name = 'good'\nkey = 'sk-secret-2'"), "org #2: names the org \"good\", as org #1 does already"),
        (org("name = 'b'"), "org \"b\": key: is missing"),
        (org("name = 'b'\nkey = 'sk-secret'\nkey_env = 'BATCH_KEY'"), "org \"b\": key: give either"),
        (org("name = 'b'\nkey = ''"), "org \"b\": key: is blank"),
        (org("name = 'b'\nkey = \"sk\\nsecret\""), "org \"b\": key: has characters"),
        (org("name = 'b'\nkey = ['sk-secret']"), "org \"b\": key: must be a string"),
        (org("name = 'b'\nkey_env = 'ABSENT'"), "org \"b\": key_env: the variable ABSENT is not set"),
        (org("name = 'b'\nkey_env = 'BLANK'"), "org \"b\": key_env: the variable BLANK is not set"),
        (org("name = 'b'\nkey_env = 'BROKEN'"), "org \"b\": key_env: has characters"),
        (org("name = 'b'\nkey_env = 'sk-secret'"), "org \"b\": key_env: the variable it names is not set"),
        (org("name = 'b'\nkey = 'sk-secret'\nbase_url = 'secret'"), "org \"b\": base_url: must be a whole URL"),
        (org("name = 'b'\nkey = 'sk-secret'\ncap = 0"), "org \"b\": cap: "),
        (org("name = 'b'\nkey = 'sk-secret'\ncap = -1"), "org \"b\": cap: "),
        (org("name = 'b'\nkey = 'sk-secret'\ncap = 1.5"), "org \"b\": cap: "),
        (org("name = 'b'\nkey = 'sk-secret-2'\ncap = 'secret'"), "org \"b\": cap: "),
        (org("name = 'b'\nkey = 'sk-secret'\ncaps = 1"), "org \"b\": caps: is not known"),
        (org("name = 'b'\nsk-secret-0123456789 = 'key'"), "org \"b\": a field: is not known"),
        ("[[org]]\nname = 'a'\nkey = sk-secret".to_owned(), "line 3, column 7: "),
        ("[[org]]\nname = 'a'\nkey = 'sk-secret".to_owned(), "line 3, column "),
        ("[[org]]\nname = 'ä'\nkey = 'sk-secret' x".to_owned(), "line 3, column 19: "),
        ("[[org]]\nname = 'ä' x".to_owned(), "line 2, column 12: "),
    ] {
        let error = refusal(toml(&text));
        assert!(error.starts_with(expected), "{text}\n{error}");
    }
}

#[test]
fn no_damage_to_a_file_makes_an_error_print_a_key() {
    let check = |text: &str| {
        if let Err(error) = toml(text) {
            let printed = format!("{error} {error:?}");
            // Not even a piece of it.
            assert!(!printed.contains("0123") && !printed.contains("secret"), "{text}\n{printed}");
        }
    };
    for (at, _) in TOML.char_indices() {
        check(&TOML[..at]);
        check(&format!("{}{}", &TOML[..at], &TOML[at + 1..]));
        for noise in ["\"", "'", "\n", "=", "[", "]", "{", ".", "#", "\\", "\0", "x", "ß", "= 1 ", "\"\"\""] {
            check(&format!("{}{noise}{}", &TOML[..at], &TOML[at..]));
        }
    }
}

#[test]
fn a_file_is_named_in_its_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("orgs.toml");
    assert!(refusal(Orgs::from_toml_file(&path)).contains("orgs.toml"));
    std::fs::write(&path, "[[org]]\nname = 'a'\nkey = 'sk-secret'").unwrap();
    assert_eq!(names(&Orgs::from_toml_file(&path).unwrap()), ["a"]);
    std::fs::write(&path, "[[org]]\nname = 'a'\nkey = 'sk-secret'\ncap = 0").unwrap();
    let error = refusal(Orgs::from_toml_file(&path));
    assert!(error.contains("orgs.toml: org \"a\": cap: "), "{error}");
}

#[test]
fn no_formatting_of_a_pool_prints_a_key() {
    let orgs = toml(TOML).unwrap();
    let org = orgs.get("research").unwrap();
    let printed = format!("{orgs:?} {org:?} {:?} {:?}", org.key(), org.snapshot());
    assert!(!printed.contains("secret"), "{printed}");
}
