//! What of a request can stand in a row: its path, its body on one line. Pure.

use std::collections::HashMap;

use bytes::Bytes;
use http::{HeaderName, Method, Request, header::CONTENT_ENCODING};
use serde_json::value::RawValue;

use super::RowError;
use crate::org::Family;

/// The members of a JSON object as they stand. Of a name that comes twice the last counts, as in most parsers.
pub(super) type Members<'a> = HashMap<String, &'a RawValue>;

/// A body that may be that of a row.
pub(super) struct Body<'a> {
    pub(super) text: &'a [u8],
    pub(super) members: Members<'a>,
}

impl<'a> Body<'a> {
    /// The body of a request whose path the caller has looked at.
    ///
    /// A row has no place for headers: those of the provider's own (`prefix`) that are not `shared` by the whole batch would be lost.
    /// More bytes than `most` are not even looked at.
    pub(super) fn of(
        request: &'a Request<Bytes>,
        prefix: &str,
        shared: &[HeaderName],
        most: usize,
    ) -> Result<Self, RowError> {
        let refused = |why: String| Err(RowError::NotBatchable(why));
        if request.method() != Method::POST {
            return refused(format!("its method is {}, not POST", request.method()));
        }
        if let Some(name) =
            request.headers().keys().find(|name| name.as_str().starts_with(prefix) && !shared.contains(name))
        {
            return refused(format!("a row cannot carry its header `{name}`"));
        }
        if request.headers().get(CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return refused("its body is compressed".to_owned());
        }
        let text = request.body().trim_ascii();
        if text.len() > most {
            return Err(RowError::TooLarge { bytes: text.len(), most });
        }
        let members: Members<'a> = match serde_json::from_slice(text) {
            Ok(members) => members,
            Err(error) => return refused(format!("its body is no JSON object: {error}")),
        };
        match members.get("stream").map(|stream| stream.get()) {
            None | Some("false" | "null") => Ok(Body { text, members }),
            Some(_) => refused("it asks for a stream".to_owned()),
        }
    }

    pub(super) fn model(&self) -> Option<String> {
        serde_json::from_str(self.members.get("model")?.get()).ok()
    }

    /// The body on one line: the line feeds of JSON are blanks, since those within a text are escaped.
    pub(super) fn push_onto(&self, line: &mut Vec<u8>) {
        line.extend(self.text.iter().map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { *byte }));
    }
}

/// Whose quota the request uses: the family that it names, else that of its model.
pub(super) fn family(request: &Request<Bytes>, model: Option<&str>) -> Family {
    let named = request.extensions().get().cloned();
    named.unwrap_or_else(|| model.map_or_else(Family::default, Family::of_model))
}

/// `line`, unless it is too large for any batch.
pub(super) fn fitting(line: Vec<u8>, most: usize) -> Result<Bytes, RowError> {
    if line.len() < most { Ok(line.into()) } else { Err(RowError::TooLarge { bytes: line.len(), most }) }
}
