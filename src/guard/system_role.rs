//! A system prompt where Anthropic's API has no place for one.

use std::sync::LazyLock; // a search is made once: a constant that takes a while
use std::{error::Error, fmt};

use http::Request;
use http_body::Body;
use memchr::memmem::Finder;
use serde_json::Value;

use super::Check;
use crate::{frame, outcome::BoxError};

/// Refuses a message of the role `system` within `messages`, which Anthropic's API takes as a field of its own, `system`.
///
/// It reads bodies that give all of themselves at once and in one piece, as a `Full<Bytes>` does; others pass. So does what is no JSON:
/// the provider will say so.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRole;

impl<B: Body + Clone> Check<Request<B>> for SystemRole {
    fn check(&self, request: &Request<B>) -> Result<(), BoxError> {
        match frame::whole(request.body(), misplaced) {
            Some(index) => Err(SystemRoleInMessages { index }.into()),
            None => Ok(()),
        }
    }
}

/// A message of the role `system` is among a request's `messages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemRoleInMessages {
    index: usize,
}

impl SystemRoleInMessages {
    /// Which of the messages, counted from zero.
    #[must_use]
    pub const fn index(&self) -> usize {
        self.index
    }
}

impl fmt::Display for SystemRoleInMessages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "messages[{}] has the role `system`, which this API does not take there: put its text into the field `system`",
            self.index
        )
    }
}

impl Error for SystemRoleInMessages {}

// Built once: building it takes as long as a search.
static SYSTEM: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"system\""));

/// The first message whose role is `system`.
fn misplaced(body: &[u8]) -> Option<usize> {
    // On the way of every call, and prompts may be long: most never say the word, and of those that do few as a value.
    let is_value = |at: usize| body[..at].trim_ascii_end().ends_with(b":");
    if !SYSTEM.find_iter(body).any(is_value) {
        return None;
    }
    let request: Value = serde_json::from_slice(body).ok()?;
    request
        .get("messages")?
        .as_array()?
        .iter()
        .position(|message| message.get("role").is_some_and(|role| role == "system"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::Full;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_system_message_among_the_messages_is_found_and_nothing_else_is() {
        for (body, found) in [
            (r#"{"messages":[{"role":"system","content":"x"}]}"#, Some(0)),
            (r#"{"messages":[{"role":"user","content":"x"},{"content":"x","role" : "system"}]}"#, Some(1)),
            (r#"{"system":"x","messages":[{"role":"user"},{"role":"system"},{"role":"system"}]}"#, Some(1)),
            // Where it belongs, and where it is something else.
            (r#"{"system":"x","messages":[{"role":"user","content":"x"}]}"#, None),
            (r#"{"system":[{"type":"text","text":"x"}],"messages":[]}"#, None),
            (r#"{"messages":[{"role":"user","content":"\"role\":\"system\""}]}"#, None),
            (r#"{"messages":[{"role":"user","content":"system"}]}"#, None),
            (r#"{"messages":[{"role":"user","content":[{"role":"system"}]}]}"#, None),
            (r#"{"metadata":{"role":"system"},"messages":[{"role":"user"}]}"#, None),
            (r#"{"messages":[{"role":"systems"},{"role":"System"},{"kind":"system"}]}"#, None),
            (r#"{"messages":{"role":"system"}}"#, None),
            (r#"{"messages":["system",{"role":"user"}],"role":"system"}"#, None),
            // Whatever is no object is no message, and does not end the search.
            (r#"{"messages":[null,"system",7,{"role":"system"}]}"#, Some(3)),
            (r#"[{"messages":[{"role":"system"}]}]"#, None),
            (r#"{"messages":[{"role":"system"}"#, None),
            ("", None),
        ] {
            assert_eq!(misplaced(body.as_bytes()), found, "{body}");
        }
    }

    #[test]
    fn the_reason_says_which_and_what_to_do() {
        let request = Request::new(Full::new(Bytes::from_static(br#"{"messages":[{},{"role":"system"}]}"#)));
        let why = SystemRole.check(&request).unwrap_err();
        assert_eq!(why.downcast_ref::<SystemRoleInMessages>().unwrap().index(), 1);
        assert!(why.to_string().contains("messages[1]") && why.to_string().contains("field `system`"), "{why}");
    }

    proptest! {
        #[test]
        fn what_is_found_is_the_first_message_that_has_the_role(roles in prop::collection::vec(any::<bool>(), 0..6), text: String) {
            let messages: Vec<_> =
                roles.iter().map(|system| json!({"content": text, "role": if *system { "system" } else { "user" }})).collect();
            let body = json!({"system": text, "messages": messages}).to_string();
            prop_assert_eq!(misplaced(body.as_bytes()), roles.iter().position(|system| *system));
        }
    }
}
