//! `--template`: a request's body with a place for the prompt.

use std::path::Path;

use http::uri::PathAndQuery;
use tower_quota::org::Dialect;

use super::{
    BadInput,
    request::{self, Fault},
};

/// Where the prompt goes. In JSON it can stand only within a string.
const PLACEHOLDER: &str = "{{prompt}}";

/// A request's body with a place for the prompt.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) dialect: Dialect,
    pub(crate) path: PathAndQuery,
    pub(crate) model: String,
    /// What stands before, between and after the places: at least two.
    parts: Vec<String>,
}

impl Template {
    /// Reads one from a file. `dialect` is what the orgs speak, `path` where `--path` says that requests go.
    pub(crate) fn load(file: &Path, dialect: Option<Dialect>, path: Option<PathAndQuery>) -> Result<Self, BadInput> {
        let name = format!("--template {}", file.display());
        let bad = |place, problem| BadInput { file: name.clone(), place, problem };
        let bytes = std::fs::read(file).map_err(|error| bad(None, error.to_string()))?;
        Template::parse(&bytes, dialect, path).map_err(|Fault { at, problem }| {
            let before = String::from_utf8_lossy(&bytes[..at.min(bytes.len())]);
            let line = before.matches('\n').count() as u64 + 1;
            let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
            bad(Some((line, column)), problem)
        })
    }

    fn parse(bytes: &[u8], dialect: Option<Dialect>, path: Option<PathAndQuery>) -> Result<Self, Fault> {
        let text = request::utf8(bytes)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let skipped = bytes.len() - text.len();
        let whole = request::whole(text, "the template", dialect, path)
            .map_err(|Fault { at, problem }| Fault { at: skipped + at, problem })?;
        let parts: Vec<_> = text.trim().split(PLACEHOLDER).map(str::to_owned).collect();
        if parts.len() < 2 {
            let problem = format!("no string of it holds {PLACEHOLDER}, so every request would be the same");
            return Err(Fault { at: skipped, problem });
        }
        Ok(Template { dialect: whole.dialect, path: whole.path, model: whole.model, parts })
    }

    /// The body for a prompt.
    pub(crate) fn fill(&self, prompt: &str) -> String {
        let quoted = serde_json::to_string(prompt).expect("a string serialises");
        self.parts.join(&quoted[1..quoted.len() - 1])
    }
}
