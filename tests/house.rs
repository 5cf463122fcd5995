//! The house keeps its floors apart: no layer reaches into another, and the ground reaches into none.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Each in a folder of its own.
const LAYERS: [&str; 9] = ["aimd", "auth", "balance", "guard", "health", "journal", "judge", "quota", "retry"];
/// What layers stand on.
const GROUND: [&str; 11] =
    ["call", "dialect", "frame", "gate", "hint", "line", "observe", "org", "outcome", "pool", "tail"];
/// What stands on the layers.
const ABOVE: [&str; 6] = ["batch", "client", "drive", "headroom", "plan", "stack"];

/// The sources of a module, its own file or all files of its folder, with comments and tests taken out.
fn sources(module: &str) -> Vec<(PathBuf, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = vec![];
    let mut folders = vec![src.join(module)];
    let file = src.join(format!("{module}.rs"));
    if file.exists() {
        found.push(file);
    }
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                // Tests that are a folder.
                folders.extend((!path.ends_with("tests")).then_some(path));
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no module {module}");
    found.into_iter().map(|path| (path.clone(), code(&fs::read_to_string(path).unwrap()))).collect()
}

/// The code alone: tests stand at the end of a file, and no string here holds `//`.
fn code(source: &str) -> String {
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    source.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The modules of the crate that this code names: `crate::a::…` and `crate::{a, b::…}`.
fn names(code: &str) -> Vec<String> {
    let mut found = vec![];
    let tight: String = code.chars().filter(|c| !c.is_whitespace()).collect();
    for (at, _) in tight.match_indices("crate::") {
        let rest = &tight[at + "crate::".len()..];
        let Some(list) = rest.strip_prefix('{') else {
            found.push(first_word(rest));
            continue;
        };
        let mut depth = 0;
        let mut start = true;
        for (i, c) in list.char_indices() {
            if start {
                found.push(first_word(&list[i..]));
            }
            start = depth == 0 && c == ',';
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                _ => {}
            }
        }
    }
    found
}

fn first_word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

#[track_caller]
fn never_names(module: &str, forbidden: &[&str]) {
    for (path, code) in sources(module) {
        for name in names(&code) {
            assert!(!forbidden.contains(&name.as_str()), "{} reaches into `{name}`", path.display());
        }
    }
}

#[test]
fn the_reader_of_imports_sees_every_form() {
    let code =
        "use crate::aimd::Law; use crate::{\n org::{Hold, LimitCell},\n quota,\n hint }; fn f() { crate::retry::go() }";
    assert_eq!(names(code), ["aimd", "org", "quota", "hint", "retry"]);
    assert_eq!(
        names(&self::code("// crate::aimd\nuse crate::line;\n#[cfg(test)]\nmod tests { use crate::aimd; }")),
        ["line"]
    );
}

#[test]
fn no_layer_reaches_into_another_or_above() {
    for layer in LAYERS {
        let forbidden: Vec<_> =
            LAYERS.into_iter().filter(|other| *other != layer).chain(ABOVE).chain(["sim"]).collect();
        never_names(layer, &forbidden);
    }
}

#[test]
fn the_ground_reaches_into_no_layer() {
    let forbidden: Vec<_> = LAYERS.into_iter().chain(ABOVE).chain(["sim"]).collect();
    for module in GROUND {
        never_names(module, &forbidden);
    }
}

#[test]
fn the_simulated_provider_uses_nothing_of_the_crate_but_the_name_of_a_dialect() {
    for (path, code) in sources("sim") {
        let code = code.replace("crate::org::Dialect;", "");
        let used: Vec<_> = names(&code).into_iter().filter(|name| name != "sim").collect();
        assert!(used.is_empty(), "{} uses {used:?}", path.display());
    }
}

#[test]
fn no_module_goes_up_by_more_than_its_own_folder() {
    for module in LAYERS.into_iter().chain(["sim"]) {
        for (path, code) in sources(module) {
            assert!(!code.contains("super::super"), "{} goes out of its folder", path.display());
            if path.ends_with("mod.rs") {
                assert!(!code.contains("super::"), "{} goes out of its folder", path.display());
            }
        }
    }
}

#[test]
fn layers_and_ground_spawn_nothing_and_read_no_other_clock() {
    for module in LAYERS.into_iter().chain(GROUND).chain(ABOVE) {
        for (path, code) in sources(module) {
            // The one exception: an open journal has one writer thread, joined when it is closed.
            let is_writer = path.ends_with("journal/file/writer.rs");
            let code = if is_writer { code.replace("thread::", "").replace(".spawn(", "") } else { code };
            let tight: String = code.chars().filter(|c| !c.is_whitespace()).collect();
            for forbidden in ["spawn(", "spawn_local(", "spawn_blocking(", "thread::", "std::time::Instant"] {
                assert!(!tight.contains(forbidden), "{} has `{forbidden}`", path.display());
            }
            for (at, _) in tight.match_indices("std::time::{") {
                let list = tight[at..].split('}').next().unwrap();
                assert!(!list.contains("Instant"), "{} imports the clock that cannot be paused", path.display());
            }
        }
    }
}
