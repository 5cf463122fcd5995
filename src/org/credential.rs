//! What an org is let in by, and how the key travels.

use std::{fmt, sync::Arc};

use http::{HeaderValue, Uri};
use serde::de::{Deserialize, Deserializer, Error};

/// A secret that no formatting prints.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential(Arc<str>);

impl Credential {
    /// Wraps a secret. Surrounding blanks are cut off, since a pasted key often brings some.
    #[must_use]
    pub fn new(secret: &str) -> Self {
        Credential(Arc::from(secret.trim()))
    }

    /// The secret itself. Whoever calls this sees to it that it goes nowhere but onto the wire.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// A header value marked sensitive, so that HTTP/2 does not index it and `Debug` does not print it.
    ///
    /// # Errors
    /// If the secret has characters that no header may carry.
    pub fn header(&self, prefix: &str) -> Result<HeaderValue, http::header::InvalidHeaderValue> {
        let mut value = HeaderValue::from_str(&format!("{prefix}{}", self.0))?;
        value.set_sensitive(true);
        Ok(value)
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(***)")
    }
}

/// Which provider's API an org speaks: how the key travels and what the bodies look like. In a file it stands by its
/// [`name`](Dialect::name).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `x-api-key` and `anthropic-version`; default base URL `https://api.anthropic.com`.
    #[default]
    Anthropic,
    /// `authorization: Bearer`; default base URL `https://api.openai.com`.
    OpenAi,
}

impl Dialect {
    /// The short name used in configuration: `anthropic` or `openai`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Anthropic => "anthropic",
            Dialect::OpenAi => "openai",
        }
    }

    /// Where the provider is reached unless an org says otherwise.
    #[must_use]
    pub fn default_base_url(self) -> Uri {
        Uri::from_static(match self {
            Dialect::Anthropic => "https://api.anthropic.com",
            Dialect::OpenAi => "https://api.openai.com",
        })
    }
}

impl<'de> Deserialize<'de> for Dialect {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let all = [Dialect::Anthropic, Dialect::OpenAi];
        let named = all.into_iter().find(|dialect| dialect.name() == name);
        named.ok_or_else(|| Error::unknown_variant(&name, &["anthropic", "openai"]))
    }
}
