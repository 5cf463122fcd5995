//! Refuses, before anything is sent, what no provider would take.
//!
//! A request that can only be refused costs a call, and where a provider passes over what is wrong with it instead, a whole run of
//! answers to another question. A [`Check`] looks at every request; one that it refuses ends at once in an
//! [`Error`](crate::outcome::Error) of class [`Terminal`](crate::outcome::Class::Terminal), with the reason as its source.
//!
//! **Where it stands:** above the balancer, so that a refused request asks for no org; below the retry, whose purse for such an error
//! is closed. In the ready-made stack it is there for orgs that speak Anthropic's API, with [`SystemRole`].
//!
//! **Cancel safety:** the future is the inner service's own, or a refusal that holds nothing.
//!
//! **Readiness** is the inner service's own. Refusing a request uses up no readiness, so it is there for the next one.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use tower::{Layer, ServiceExt, service_fn};
//! use tower_quota::{guard::{GuardLayer, SystemRole}, outcome::{Class, Error}};
//!
//! let client = GuardLayer::new(SystemRole).layer(service_fn(async |_: Request<Full<Bytes>>| Ok::<_, Error>(Response::new("sent"))));
//! let ask = |messages: &str| {
//!     let body = format!(r#"{{"model":"claude-haiku-4-5","max_tokens":64,"messages":{messages}}}"#);
//!     Request::post("/v1/messages").body(Full::new(Bytes::from(body)))
//! };
//!
//! let refused = client.clone().oneshot(ask(r#"[{"role":"system","content":"Be brief."}]"#)?).await.unwrap_err();
//! assert_eq!(refused.class(), Class::Terminal);
//! assert!(std::error::Error::source(&refused).ok_or("a reason")?.to_string().starts_with("messages[0] has the role `system`"));
//! assert_eq!(client.oneshot(ask(r#"[{"role":"user","content":"Hi"}]"#)?).await?.body(), &"sent");
//! # Ok(()) }
//! ```

mod layer;
mod service;
mod system_role;

pub use self::{
    layer::GuardLayer,
    service::{Guard, GuardFuture},
    system_role::{SystemRole, SystemRoleInMessages},
};
use crate::outcome::BoxError;

/// Looks at a request before anything of it is sent.
///
/// A closure `Fn(&Req) -> Result<(), BoxError>` is one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not check a `{Req}`",
    note = "`SystemRole` reads bodies that are `Clone`; in the ready-made stack, `Stack::guard(false)` does without it"
)]
pub trait Check<Req> {
    /// Whether the request may be sent.
    ///
    /// # Errors
    /// Why it may not, and what to do: the source of the error that the caller gets. No key belongs in it.
    fn check(&self, request: &Req) -> Result<(), BoxError>;
}

impl<Req, F: Fn(&Req) -> Result<(), BoxError>> Check<Req> for F {
    fn check(&self, request: &Req) -> Result<(), BoxError> {
        self(request)
    }
}
