//! What a refusal means by the words of its body: tables, and how they are read. Pure.
//!
//! The status decides first. The provider's own words for it (`error.code`, `error.type`) refine it where they equal a
//! word of the table; a sentence (`error.message`) does only where they say no more than the status does, and only by its beginning:
//! what else is in a message may be a quotation of the prompt.

use std::time::SystemTime;

use http::StatusCode;
use serde_json::Value;

use crate::outcome::Class;

/// The words that decide.
const DECISIVE: &[(&str, Class)] = &[
    ("authentication_error", Class::Unauthorised),     // Anthropic
    ("invalid_api_key", Class::Unauthorised),          // OpenAI
    ("permission_error", Class::Forbidden),            // Anthropic
    ("billing_error", Class::OutOfQuota),              // Anthropic
    ("insufficient_quota", Class::OutOfQuota),         // OpenAI
    ("billing_hard_limit_reached", Class::OutOfQuota), // OpenAI
    ("billing_not_active", Class::OutOfQuota),         // OpenAI
    ("request_too_large", Class::TooLarge),            // Anthropic
    ("overloaded_error", Class::Overloaded),           // Anthropic
    ("api_error", Class::Overloaded),                  // Anthropic
    ("timeout_error", Class::Overloaded),              // Anthropic
    ("server_error", Class::Overloaded),               // OpenAI
    ("server_is_overloaded", Class::Overloaded),       // OpenAI
    ("slow_down", Class::Overloaded),                  // OpenAI
    ("context_length_exceeded", Class::Terminal),      // OpenAI
    ("content_policy_violation", Class::Terminal),     // OpenAI
    ("model_not_found", Class::Terminal),              // OpenAI
    ("not_found_error", Class::Terminal),              // Anthropic
];

/// The words that say what the status says, and leave it to the sentence which kind of it this is.
const GENERAL: &[(&str, Class)] = &[
    ("rate_limit_error", Class::Throttled),     // Anthropic
    ("rate_limit_exceeded", Class::Throttled),  // OpenAI
    ("invalid_request_error", Class::Terminal), // both
];

/// What a word or a sentence may make of a status, by what the status alone means. Of any other the status is believed: a 529 is
/// no throttle and a 429 no failure, whatever the body says.
const MAY_BE: &[(Class, &[Class])] = &[
    (Class::Throttled, &[Class::OutOfQuota, Class::ThrottledRequest, Class::TooLarge]),
    (BAD_REQUEST, &[Class::OutOfQuota, Class::Unauthorised, Class::Forbidden, Class::TooLarge, Class::Garbled]),
    (Class::Forbidden, &[Class::OutOfQuota]),
];

/// A 400: all that a provider has no better status for. Other final statuses (404, 422) are what they are.
const BAD_REQUEST: Class = Class::Terminal;

/// The sentences, by how they begin, each with what the status alone means.
///
/// "You exceeded your current quota, please check your plan and billing details" is not among them: Gemini says so of a quota
/// per minute.
const SENTENCES: &[(Class, &str, Class)] = &[
    (BAD_REQUEST, "Your credit balance is too low to access", Class::OutOfQuota), // Anthropic
    (BAD_REQUEST, USAGE_LIMITS[0], Class::OutOfQuota),
    (BAD_REQUEST, USAGE_LIMITS[1], Class::OutOfQuota),
    (BAD_REQUEST, "We could not parse the JSON body of your request", Class::Garbled), // OpenAI
    // Anthropic's parser on a request that was cut short; what else it finds wrong is wrong with the request itself.
    (BAD_REQUEST, "The request body is not valid JSON: unexpected end of data", Class::Garbled),
    (BAD_REQUEST, "The request body is not valid JSON: EOF while parsing", Class::Garbled),
    (Class::Throttled, "Extra usage is required for long context requests", Class::ThrottledRequest), // Anthropic
    (Class::Throttled, "The long context beta is not yet available for this subscription", Class::ThrottledRequest),
];

/// Anthropic's monthly limit, of an organisation and of a workspace. The date on which it ends follows.
const USAGE_LIMITS: [&str; 2] =
    ["You have reached your specified API usage limits", "You have reached your specified workspace API usage limits"];

/// OpenAI's sentences with the limit and what was asked for: `Limit 30000, Requested 45411`, or `Limit 30000, Used 100, Requested
/// 45411`.
const TELLING_LIMITS: [&str; 2] = ["Request too large for ", "Rate limit reached for "];

/// The words of an error, as far as they are there.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Words {
    pub(super) kind: Option<String>,
    pub(super) code: Option<String>,
    pub(super) message: Option<String>,
    /// Anthropic's envelope: `{"type":"error","error":{…}}`.
    pub(super) is_anthropic: bool,
}

impl Words {
    /// The words of a refusal's body; `None` if there are none.
    pub(super) fn of_body(body: &[u8]) -> Option<Words> {
        if body.trim_ascii_start().first() != Some(&b'{') {
            return None;
        }
        let body: Value = serde_json::from_slice(body).ok()?;
        let words = match &body["error"] {
            Value::Null => Words::of(&body),
            error => Words { is_anthropic: body["type"] == "error", ..Words::of(error) },
        };
        (words != Words::default()).then_some(words)
    }

    /// The words of an error object, or of an error that is a mere sentence.
    pub(super) fn of(error: &Value) -> Words {
        let word = |name| match &error[name] {
            Value::String(word) if !word.is_empty() => Some(word.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
        let message = word("message").or_else(|| error.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
        Words { kind: word("type"), code: word("code"), message, is_anthropic: false }
    }

    fn decisive(&self) -> Option<Class> {
        self.find(DECISIVE)
    }

    fn find(&self, table: &[(&str, Class)]) -> Option<Class> {
        let words = [&self.code, &self.kind].into_iter().flatten();
        words.filter_map(|word| table.iter().find(|(known, _)| known == word)).map(|(_, class)| *class).next()
    }

    /// When access comes back, if that is what the sentence says.
    pub(super) fn regained(&self) -> Option<SystemTime> {
        let message = self.message.as_deref()?;
        let rest = USAGE_LIMITS.iter().find_map(|begin| message.strip_prefix(begin))?;
        let rest = rest.split_once("regain access on ")?.1;
        let date = rest.get(..10)?;
        let time = rest[10..].strip_prefix(" at ").and_then(|time| time.get(..5)).unwrap_or("00:00");
        humantime::parse_rfc3339_weak(&format!("{date} {time}:00")).ok()
    }
}

/// What a refusal of this status means.
pub(super) fn class(status: StatusCode, words: &Words) -> Class {
    let by_status = Class::of_status(status);
    if by_status == BAD_REQUEST && status != StatusCode::BAD_REQUEST {
        return by_status;
    }
    let may_be = MAY_BE.iter().find(|(class, _)| *class == by_status).map_or(&[][..], |(_, classes)| classes);
    if may_be.is_empty() {
        return by_status;
    }
    let found = match words.decisive() {
        Some(class) => Some(class),
        None => words.message.as_deref().and_then(|message| by_sentence(by_status, message)),
    };
    found.filter(|class| may_be.contains(class)).unwrap_or(by_status)
}

/// What an error means that came with a success. Its number is read as the status it ought to have had; without one its words
/// decide. One that says neither may pass: it is most often a gateway's.
pub(super) fn class_in_band(words: &Words) -> Class {
    let code = words.code.as_deref().and_then(|code| code.parse::<u16>().ok());
    let code = code.filter(|code| (400..600).contains(code)).and_then(|code| StatusCode::from_u16(code).ok());
    if let Some(status) = code {
        return class(status, words);
    }
    match words.decisive().or_else(|| words.find(GENERAL)) {
        Some(Class::Throttled) => class(StatusCode::TOO_MANY_REQUESTS, words),
        Some(Class::Terminal) if words.decisive().is_none() => class(StatusCode::BAD_REQUEST, words),
        Some(class) => class,
        None => Class::Overloaded,
    }
}

fn by_sentence(by_status: Class, message: &str) -> Option<Class> {
    let found = SENTENCES.iter().find(|(status, begin, _)| *status == by_status && message.starts_with(begin));
    if let Some((_, _, class)) = found {
        return Some(*class);
    }
    (by_status == Class::Throttled && never_fits(message)).then_some(Class::TooLarge)
}

/// Whether more was asked for than there ever is. The sentence alone says nothing: it is the same where it would have fitted a
/// little later.
fn never_fits(message: &str) -> bool {
    let asked = || {
        TELLING_LIMITS.iter().find(|begin| message.starts_with(*begin))?;
        let (limit, rest) = number(message.split_once(": Limit ")?.1)?;
        let rest = match rest.strip_prefix(", Used ") {
            Some(used) => number(used)?.1,
            None => rest,
        };
        let (requested, _) = number(rest.strip_prefix(", Requested ")?)?;
        Some(requested > limit)
    };
    asked().unwrap_or(false)
}

/// The number at the head of `text`, with commas between thousands or without, and what follows it.
fn number(text: &str) -> Option<(u64, &str)> {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut digits = String::new();
    let mut end = 0;
    while is_digit(end) || bytes.get(end) == Some(&b',') && (1..=3).all(|ahead| is_digit(end + ahead)) {
        if is_digit(end) {
            digits.push(char::from(bytes[end]));
        }
        end += 1;
    }
    Some((digits.parse().ok()?, &text[end..]))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn anthropic(status: u16, kind: &str, message: &str) -> Class {
        let body = serde_json::json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": "r"});
        read(status, &body.to_string())
    }

    fn openai(status: u16, kind: &str, code: &str, message: &str) -> Class {
        let body = serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
        read(status, &body.to_string())
    }

    fn read(status: u16, body: &str) -> Class {
        class(StatusCode::from_u16(status).unwrap(), &Words::of_body(body.as_bytes()).unwrap_or_default())
    }

    #[test]
    fn anthropics_refusals_mean_what_they_say() {
        let invalid = "invalid_request_error";
        for (status, kind, message, class) in [
            (429, "rate_limit_error", "This request would exceed your rate limit", Class::Throttled),
            (529, "overloaded_error", "Overloaded", Class::Overloaded),
            (500, "api_error", "Internal server error", Class::Overloaded),
            (401, "authentication_error", "invalid x-api-key", Class::Unauthorised),
            (403, "permission_error", "no access to this model", Class::Forbidden),
            (402, "billing_error", "", Class::OutOfQuota),
            (403, "billing_error", "", Class::OutOfQuota),
            (400, "billing_error", "", Class::OutOfQuota),
            (413, "request_too_large", "Request exceeds the maximum size", Class::TooLarge),
            (404, "not_found_error", "model: x", Class::Terminal),
            (400, invalid, "max_tokens: Field required", Class::Terminal),
            (400, invalid, "prompt is too long: 208310 tokens > 200000 maximum", Class::Terminal),
            (400, invalid, "Your credit balance is too low to access the Anthropic API.", Class::OutOfQuota),
            (400, invalid, "Your credit balance is too low to access the Claude API.", Class::OutOfQuota),
            (400, invalid, "You have reached your specified API usage limits.", Class::OutOfQuota),
            (400, invalid, "You have reached your specified workspace API usage limits.", Class::OutOfQuota),
            // A sentence counts only as one, at its beginning, with the status that it comes with, and where the type says no more.
            (400, invalid, "prompt mentions usage credits", Class::Terminal),
            (400, invalid, "prompt: Your credit balance is too low to access the API", Class::Terminal),
            (400, invalid, "your credit balance is too low to access the API", Class::Terminal),
            (400, "not_found_error", "Your credit balance is too low to access the API", Class::Terminal),
            (422, invalid, "Your credit balance is too low to access the API", Class::Terminal),
            (429, "rate_limit_error", "Your credit balance is too low to access the API", Class::Throttled),
            (500, "api_error", "Your credit balance is too low to access the API", Class::Overloaded),
            (429, "rate_limit_error", "Extra usage is required for long context requests.", Class::ThrottledRequest),
            (
                429,
                invalid,
                "The long context beta is not yet available for this subscription.",
                Class::ThrottledRequest,
            ),
            (400, invalid, "The long context beta is not yet available for this subscription.", Class::Terminal),
            (429, "rate_limit_error", "No extra usage is required for long context requests", Class::Throttled),
            (400, invalid, "The request body is not valid JSON: unexpected end of data: line 1", Class::Garbled),
            (400, invalid, "The request body is not valid JSON: no low surrogate in string", Class::Terminal),
        ] {
            assert_eq!(anthropic(status, kind, message), class, "{status} {kind} {message}");
        }
    }

    #[test]
    fn openais_refusals_mean_what_they_say() {
        let (invalid, parse) = ("invalid_request_error", "We could not parse the JSON body of your request");
        for (status, kind, code, message, class) in [
            (429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota", Class::OutOfQuota),
            (429, "tokens", "insufficient_quota", "", Class::OutOfQuota),
            (429, "insufficient_quota", "", "", Class::OutOfQuota),
            (429, "tokens", "rate_limit_exceeded", "Rate limit reached", Class::Throttled),
            (429, "requests", "", "You exceeded your current quota, please check your plan", Class::Throttled),
            (429, "", "", "", Class::Throttled),
            (500, "server_error", "server_error", "The server had an error", Class::Overloaded),
            (503, "server_error", "server_is_overloaded", "", Class::Overloaded),
            (401, invalid, "invalid_api_key", "Incorrect API key provided: sk-abc", Class::Unauthorised),
            (400, invalid, "invalid_api_key", "", Class::Unauthorised),
            (400, invalid, "context_length_exceeded", "This model's maximum context", Class::Terminal),
            (400, invalid, "context_length_exceeded", parse, Class::Terminal),
            (404, invalid, "model_not_found", "", Class::Terminal),
            (400, invalid, "", &format!("{parse}. (HINT: This likely means you aren't …)"), Class::Garbled),
            (400, "", "", parse, Class::Garbled),
            (400, invalid, "", &format!("tool: {parse}"), Class::Terminal),
            (422, invalid, "", parse, Class::Terminal),
            (500, "", "", parse, Class::Overloaded),
            // What contradicts the status is not believed.
            (429, "server_error", "server_error", "", Class::Throttled),
            (429, invalid, "invalid_api_key", "", Class::Throttled),
            (400, "tokens", "rate_limit_exceeded", "", Class::Terminal),
            (400, "server_error", "", "", Class::Terminal),
            (500, "", "insufficient_quota", "", Class::Overloaded),
            (529, "", "rate_limit_exceeded", "", Class::Overloaded),
            (408, "", "insufficient_quota", "", Class::Overloaded),
            (409, "", "invalid_api_key", "", Class::Overloaded),
            (401, "", "insufficient_quota", "", Class::Unauthorised),
            (404, "", "invalid_api_key", "", Class::Terminal),
            (413, "", "rate_limit_exceeded", "", Class::TooLarge),
        ] {
            assert_eq!(openai(status, kind, code, message), class, "{status} {kind} {code} {message}");
        }
    }

    #[test]
    fn too_large_is_what_asks_for_more_than_the_limit() {
        let head = "Request too large for gpt-4o in organization org-x on tokens per min (TPM): ";
        for (tail, class) in [
            ("Limit 30000, Requested 45411. The input or output tokens must be reduced", Class::TooLarge),
            ("Limit 30000, Requested 30001", Class::TooLarge),
            ("Limit 30000, Requested 30000", Class::Throttled),
            ("Limit 250000, Requested 546.", Class::Throttled),
            ("Limit 30,000, Requested 45,411.", Class::TooLarge),
            ("Limit 1,000,000, Requested 45,411.", Class::Throttled),
            ("Limit 30000, Used 29000, Requested 2000.", Class::Throttled),
            ("Limit 30000, Used 29000, Requested 30001.", Class::TooLarge),
            ("Limit 30000", Class::Throttled),
            ("Limit , Requested 45411", Class::Throttled),
            ("Limit 30000, Requested many", Class::Throttled),
            ("Limit 99999999999999999999, Requested 1", Class::Throttled),
            ("limit 30000, requested 45411", Class::Throttled),
        ] {
            assert_eq!(openai(429, "tokens", "rate_limit_exceeded", &format!("{head}{tail}")), class, "{tail}");
        }
        let reached = "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 0, Requested 30001";
        assert_eq!(openai(429, "tokens", "rate_limit_exceeded", reached), Class::TooLarge);
        let quoted = format!("You said: {head}Limit 30000, Requested 45411");
        assert_eq!(openai(429, "tokens", "rate_limit_exceeded", &quoted), Class::Throttled);
        assert_eq!(openai(400, "tokens", "", &format!("{head}Limit 30000, Requested 45411")), Class::Terminal);
    }

    #[test]
    fn whatever_a_body_is_a_status_has_its_class() {
        for body in [
            "",
            "null",
            "[]",
            "{}",
            "{\"error\":null}",
            "{\"error\":[]}",
            "{\"error\":{\"type\":7,\"code\":{},\"message\":[]}}",
            "{\"error\":{\"type\":\"insufficient_quota\"",
            "<html>insufficient_quota</html>",
            "insufficient_quota",
            "{\"message\":\"insufficient_quota\"}",
            "\u{feff}{}",
        ] {
            for status in [400, 401, 429, 500] {
                let by_status = Class::of_status(StatusCode::from_u16(status).unwrap());
                assert_eq!(read(status, body), by_status, "{status} {body}");
            }
        }
        assert_eq!(read(429, " {\"error\":{\"code\":\"insufficient_quota\"}} "), Class::OutOfQuota);
    }

    #[test]
    fn an_error_within_a_success_has_the_status_that_it_names() {
        for (error, class) in [
            (r#"{"code":502,"message":"Provider returned error"}"#, Class::Overloaded),
            (r#"{"code":"504"}"#, Class::Overloaded),
            (r#"{"code":529}"#, Class::Overloaded),
            (r#"{"code":429}"#, Class::Throttled),
            (r#"{"code":429,"type":"insufficient_quota"}"#, Class::OutOfQuota),
            (r#"{"code":401}"#, Class::Unauthorised),
            (r#"{"code":402}"#, Class::OutOfQuota),
            (r#"{"code":403}"#, Class::Forbidden),
            (r#"{"code":400,"message":"bad"}"#, Class::Terminal),
            (r#"{"code":400,"message":"We could not parse the JSON body of your request"}"#, Class::Garbled),
            (r#"{"code":413}"#, Class::TooLarge),
            (r#"{"code":200}"#, Class::Overloaded),
            (r#"{"code":399}"#, Class::Overloaded),
            (r#"{"code":600}"#, Class::Overloaded),
            (r#"{"code":-1}"#, Class::Overloaded),
            (r#"{"type":"overloaded_error","message":"Overloaded"}"#, Class::Overloaded),
            (r#"{"type":"rate_limit_error"}"#, Class::Throttled),
            (
                r#"{"type":"rate_limit_error","message":"Extra usage is required for long context requests."}"#,
                Class::ThrottledRequest,
            ),
            (r#"{"code":"rate_limit_exceeded"}"#, Class::Throttled),
            (r#"{"code":"insufficient_quota"}"#, Class::OutOfQuota),
            (r#"{"type":"authentication_error"}"#, Class::Unauthorised),
            (r#"{"type":"permission_error"}"#, Class::Forbidden),
            (r#"{"type":"invalid_request_error","message":"bad"}"#, Class::Terminal),
            (r#"{"type":"invalid_request_error","code":"context_length_exceeded"}"#, Class::Terminal),
            (
                r#"{"type":"invalid_request_error","message":"Your credit balance is too low to access the API"}"#,
                Class::OutOfQuota,
            ),
            (r#"{"code":"server_error"}"#, Class::Overloaded),
            (r#"{"message":"anything"}"#, Class::Overloaded),
            (r#""anything""#, Class::Overloaded),
        ] {
            assert_eq!(class_in_band(&Words::of(&serde_json::from_str(error).unwrap())), class, "{error}");
        }
    }

    #[test]
    fn the_date_of_the_usage_limits_is_read_and_no_other() {
        let day = |days: u64| Some(UNIX_EPOCH + Duration::from_secs(days * 86_400));
        for (message, date) in [
            (
                "You have reached your specified API usage limits. You will regain access on 2026-11-01 at 00:00 UTC.",
                day(20_758),
            ),
            (
                "You have reached your specified workspace API usage limits. You will regain access on 2026-11-01 at 00:00 UTC.",
                day(20_758),
            ),
            ("You have reached your specified API usage limits. You will regain access on 2026-11-01.", day(20_758)),
            (
                "You have reached your specified API usage limits. You will regain access on 2026-11-02 at 00:00 UTC",
                day(20_759),
            ),
            (
                "You have reached your specified API usage limits. You will regain access on 2026-11-01 at 06:30 UTC.",
                day(20_758).map(|day| day + Duration::from_secs(6 * 3_600 + 1_800)),
            ),
            ("You have reached your specified API usage limits.", None),
            ("You have reached your specified API usage limits. You will regain access on Sunday.", None),
            (
                "You have reached your specified API usage limits. You will regain access on 2026-13-01 at 00:00 UTC.",
                None,
            ),
            (
                "You have reached your specified API usage limits. You will regain access on 2026-11-01 at 2\u{e9}:00",
                None,
            ),
            ("You have reached your specified API usage limits. You will regain access on 2026-11-0\u{e9}", None),
            ("You will regain access on 2026-11-01 at 00:00 UTC.", None),
        ] {
            let words = Words { message: Some(message.to_owned()), ..Words::default() };
            assert_eq!(words.regained(), date, "{message}");
        }
    }
}
