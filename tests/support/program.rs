//! The example program `dispatch`, as tests start it.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::OnceLock,
    time::SystemTime,
};

use tokio::process::Command;

/// The program, built from what stands there now: `cargo test --test dispatch` alone would not build it.
pub(crate) fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let program = profile.join("examples").join(format!("dispatch{}", std::env::consts::EXE_SUFFIX));
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let built = program.metadata().and_then(|it| it.modified());
        if built.is_err()
            || built.is_ok_and(|built| newest(&root.join("src")).max(newest(&root.join("examples"))) > built)
        {
            let mut cargo = std::process::Command::new(env!("CARGO"));
            cargo.args(["build", "--example", "dispatch"]).current_dir(root);
            if profile.ends_with("release") {
                cargo.arg("--release");
            }
            assert!(cargo.status().unwrap().success());
        }
        program
    })
}

fn newest(path: &Path) -> SystemTime {
    let own = path.metadata().unwrap().modified().unwrap();
    match path.is_dir() {
        false => own,
        true => std::fs::read_dir(path).unwrap().map(|entry| newest(&entry.unwrap().path())).max().unwrap_or(own),
    }
}

/// The program with these arguments, without what the environment might tell it. It is killed when it is dropped.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("ANTHROPIC_")
            || name.starts_with("OPENAI_")
            || name.starts_with("TOWER_QUOTA_")
            || name == "RUST_LOG"
        {
            command.env_remove(name);
        }
    }
    command
}
