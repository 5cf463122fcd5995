//! Which calls there are.

use http::{Method, Uri};

use crate::org::Dialect;

/// A call that manages batches or their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sim) enum Call {
    Create,
    Retrieve(String),
    Cancel(String),
    /// Anthropic's.
    Results(String),
    List(Page),
    /// OpenAI's files.
    Upload,
    File(String),
    Content(String),
    DeleteFile(String),
}

/// Which page of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::sim) struct Page {
    pub(super) limit: Option<usize>,
    pub(super) after: Option<String>,
    pub(super) before: Option<String>,
}

impl Page {
    fn read(query: &str) -> Self {
        let mut page = Page::default();
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match name {
                "limit" => page.limit = value.parse().ok(),
                "after" | "after_id" => page.after = Some(value.to_owned()),
                "before" | "before_id" => page.before = Some(value.to_owned()),
                _ => {}
            }
        }
        page
    }
}

/// What a request asks for, by its head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sim) enum Routed {
    Batch(Call),
    WrongMethod,
    /// Nothing that has to do with batches.
    Elsewhere,
}

impl Call {
    pub(in crate::sim) fn route(dialect: Dialect, method: &Method, uri: &Uri) -> Routed {
        let path = uri.path();
        let (root, is_files) = match dialect {
            Dialect::Anthropic => ("/v1/messages/batches", false),
            _ if path.starts_with("/v1/files") => ("/v1/files", true),
            _ => ("/v1/batches", false),
        };
        let Some(rest) = path.strip_prefix(root) else {
            return Routed::Elsewhere;
        };
        let segments: Vec<&str> = rest.split('/').collect();
        let calls = match (segments.as_slice(), is_files) {
            ([""], false) => {
                let page = Page::read(uri.query().unwrap_or_default());
                vec![(Method::POST, Call::Create), (Method::GET, Call::List(page))]
            }
            (["", id], false) => vec![(Method::GET, Call::Retrieve((*id).to_owned()))],
            (["", id, "cancel"], false) => vec![(Method::POST, Call::Cancel((*id).to_owned()))],
            (["", id, "results"], false) if dialect == Dialect::Anthropic => {
                vec![(Method::GET, Call::Results((*id).to_owned()))]
            }
            ([""], true) => vec![(Method::POST, Call::Upload)],
            (["", id], true) => {
                vec![(Method::GET, Call::File((*id).to_owned())), (Method::DELETE, Call::DeleteFile((*id).to_owned()))]
            }
            (["", id, "content"], true) => vec![(Method::GET, Call::Content((*id).to_owned()))],
            _ => return Routed::Elsewhere,
        };
        match calls.iter().find(|(with, _)| with == method) {
            Some((_, call)) => Routed::Batch(call.clone()),
            None => Routed::WrongMethod,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_methods_name_a_call_or_none() {
        let route = |dialect, method: &str, uri: &str| {
            Call::route(dialect, &Method::from_bytes(method.as_bytes()).unwrap(), &uri.parse().unwrap())
        };
        let (a, o) = (Dialect::Anthropic, Dialect::OpenAi);
        let page = Page { limit: Some(3), after: Some("x".into()), before: None };
        for (dialect, line, call) in [
            (a, "POST /v1/messages/batches", Call::Create),
            (a, "GET /v1/messages/batches?limit=3&after_id=x", Call::List(page.clone())),
            (a, "GET http://h/v1/messages/batches/b", Call::Retrieve("b".into())),
            (a, "GET /v1/messages/batches/b/results", Call::Results("b".into())),
            (a, "POST /v1/messages/batches/b/cancel", Call::Cancel("b".into())),
            (o, "POST /v1/batches", Call::Create),
            (o, "GET /v1/batches?after=x&limit=3", Call::List(page)),
            (o, "GET /v1/batches/b", Call::Retrieve("b".into())),
            (o, "POST /v1/batches/b/cancel", Call::Cancel("b".into())),
            (o, "POST /v1/files", Call::Upload),
            (o, "GET /v1/files/f", Call::File("f".into())),
            (o, "DELETE /v1/files/f", Call::DeleteFile("f".into())),
            (o, "GET /v1/files/f/content", Call::Content("f".into())),
        ] {
            let (method, uri) = line.split_once(' ').unwrap();
            assert_eq!(route(dialect, method, uri), Routed::Batch(call), "{line}");
        }
        assert_eq!(route(a, "DELETE", "/v1/messages/batches/b"), Routed::WrongMethod);
        assert_eq!(route(o, "GET", "/v1/batches/b/cancel"), Routed::WrongMethod);
        for (dialect, path) in [
            (a, "/v1/messages"),
            (a, "/v1/messages/batchesx"),
            (a, "/v1/batches"),
            (a, "/v1/files"),
            (o, "/v1/messages/batches"),
            (o, "/v1/batches/b/results"),
            (o, "/v1/chat/completions"),
        ] {
            assert_eq!(route(dialect, "POST", path), Routed::Elsewhere, "{path}");
        }
    }
}
