//! The layer.

use tower_layer::Layer;

use super::Guard;

/// Wraps a service in a [`Guard`]. See the [module](super) for where it stands.
#[derive(Clone, Copy, Debug)]
pub struct GuardLayer<C> {
    check: Option<C>,
}

impl<C> GuardLayer<C> {
    /// Every request is shown to `check`.
    #[must_use]
    pub const fn new(check: C) -> Self {
        GuardLayer { check: Some(check) }
    }

    /// No request is looked at.
    #[must_use]
    pub const fn open() -> Self {
        GuardLayer { check: None }
    }
}

impl<S, C: Clone> Layer<S> for GuardLayer<C> {
    type Service = Guard<S, C>;

    fn layer(&self, inner: S) -> Self::Service {
        Guard::new(inner, self.check.clone())
    }
}
