//! The layer, and what it prepares once.

use std::sync::Arc;

use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{AUTHORIZATION, HOST},
    uri::{Authority, PathAndQuery, Scheme},
};
use tower_layer::Layer;

use super::OrgAuth;
use crate::{
    org::{BuildError, Dialect, Org},
    pool::{check_base_url, check_key},
};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");
/// The version of Anthropic's API that this crate is written for, and the newest there is.
const VERSION: HeaderValue = HeaderValue::from_static("2023-06-01");

/// Sends requests to one org, with its key. See the [module](super) for where it stands and why.
#[derive(Clone, Debug)]
pub struct OrgAuthLayer {
    address: Arc<Address>,
}

/// Where an org is, and what it wants to see: prepared once, at build.
#[derive(Debug)]
pub(super) struct Address {
    scheme: Scheme,
    authority: Authority,
    /// Without a slash at its end; empty for none.
    prefix: String,
    dialect: Dialect,
    key: Option<HeaderValue>,
}

impl OrgAuthLayer {
    /// A layer for this org, by its credential, base URL and dialect.
    ///
    /// # Errors
    /// If the base URL is no whole address of a server, or the credential is blank or has characters that no key has (a
    /// blank, a control character, anything beyond ASCII).
    /// The error names the org, and neither its key nor its base URL.
    pub fn new(org: &Org) -> Result<Self, BuildError> {
        let refused = |field: &str, problem: &str| BuildError::new(format!("org {:?}: {field}", org.name()), problem);
        let dialect = org.speaks();
        let prefix = match dialect {
            Dialect::Anthropic => "",
            Dialect::OpenAi => "Bearer ",
        };
        let key = match org.key() {
            None => None,
            Some(key) => {
                check_key(key).map_err(|problem| refused("key", problem))?;
                Some(key.header(prefix).map_err(|_| refused("key", "has characters that no header may carry"))?)
            }
        };
        let base = org.reached_at();
        let (scheme, authority) = check_base_url(&base).map_err(|problem| refused("base_url", problem))?;
        let prefix = base.path().trim_end_matches('/').to_owned();
        Ok(OrgAuthLayer { address: Arc::new(Address { scheme, authority, prefix, dialect, key }) })
    }
}

impl<S> Layer<S> for OrgAuthLayer {
    type Service = OrgAuth<S>;

    fn layer(&self, inner: S) -> Self::Service {
        OrgAuth::new(inner, self.address.clone())
    }
}

impl Address {
    /// Puts in the key, and takes out what names another server or has another key.
    pub(super) fn sign(&self, headers: &mut HeaderMap) {
        headers.remove(HOST);
        let Some(key) = &self.key else { return };
        let (mine, other) = match self.dialect {
            Dialect::Anthropic => (X_API_KEY, AUTHORIZATION),
            Dialect::OpenAi => (AUTHORIZATION, X_API_KEY),
        };
        headers.insert(mine, key.clone());
        headers.remove(other);
        if self.dialect == Dialect::Anthropic {
            headers.entry(ANTHROPIC_VERSION).or_insert(VERSION);
        }
    }

    /// The request's path and query, at this address.
    pub(super) fn place(&self, uri: &Uri) -> Uri {
        // Neither a bare host nor the `*` of OPTIONS names a path.
        let asked = uri.path_and_query().filter(|asked| asked.path() != "*").cloned();
        let asked = asked.unwrap_or_else(|| PathAndQuery::from_static("/"));
        let path = if self.prefix.is_empty() { asked } else { self.prefixed(asked) };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).expect("scheme, authority and path together are always a URI")
    }

    fn prefixed(&self, asked: PathAndQuery) -> PathAndQuery {
        let versioned = asked.path() == "/v1" || asked.path().starts_with("/v1/");
        let prefix = if versioned { self.prefix.strip_suffix("/v1").unwrap_or(&self.prefix) } else { &self.prefix };
        // Only a path beyond 64 KiB does not fit; the right server will say so.
        PathAndQuery::try_from(format!("{prefix}{asked}")).unwrap_or(asked)
    }
}
