//! Pools from the environment and from a file.

use http::{
    Uri,
    uri::{Authority, Scheme},
};

/// The scheme and authority of a base URL, if it has both and nothing that cannot be part of one. A refusal quotes nothing of
/// it.
pub(crate) fn check_base_url(uri: &Uri) -> Result<(Scheme, Authority), &'static str> {
    let (Some(scheme), Some(authority)) = (uri.scheme(), uri.authority()) else {
        return Err("must be a whole URL with scheme and host, such as https://api.anthropic.com");
    };
    if authority.as_str().contains('@') {
        return Err("must not carry a user name or password");
    }
    if uri.query().is_some() {
        return Err("must not have a query");
    }
    Ok((scheme.clone(), authority.clone()))
}
