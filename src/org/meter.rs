//! What is known of an org's quota, resource by resource.

use tokio::time::Instant;

use super::Family;
use crate::dialect::Resource;

/// What is known of one resource of an org's quota at one moment. Tokens, or calls where the resource is
/// [`Resource::Requests`].
///
/// ```
/// # use tower_quota::org::Org;
/// # let org = Org::new("research");
/// let snapshot = org.snapshot();
/// if let Some(binds) = snapshot.binds() {
///     println!("{} has {:.0} of {:.0} {:?} left", snapshot.name, binds.remaining, binds.capacity, binds.resource);
/// }
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceQuota {
    /// What is metered.
    pub resource: Resource,
    /// Of which model family.
    pub family: Family,
    /// What the provider allows per minute.
    pub per_minute: f64,
    /// The most that the bucket holds, as far as is known: the largest level seen.
    pub capacity: f64,
    /// What is left by our own account: what the provider said last, plus the refill since, minus what it cannot have counted
    /// yet. Below zero while a call waits that does not fit.
    pub remaining: f64,
    /// What the provider said last, and when.
    pub said: Option<(f64, Instant)>,
    /// What comes back per minute, as observed; never more than `per_minute`, less where somebody else spends too.
    pub refill_per_minute: f64,
    /// Whether somebody else spends too.
    pub shared: bool,
    /// What is reserved for calls that are about to be sent, and for those that are not answered.
    pub reserved: f64,
    /// What calls were taken to cost ÷ what they used, lately; `None` where answers do not say what they used. Of output tokens it
    /// is above 1 by intent, since few calls may exceed what they are taken to cost.
    pub estimate_to_actual: Option<f64>,
}

impl ResourceQuota {
    pub(crate) fn new(resource: Resource, family: &Family) -> Self {
        ResourceQuota {
            resource,
            family: family.clone(),
            per_minute: 0.0,
            capacity: 0.0,
            remaining: 0.0,
            said: None,
            refill_per_minute: 0.0,
            shared: false,
            reserved: 0.0,
            estimate_to_actual: None,
        }
    }

    /// The fraction that is left, `0.0..=1.0`.
    #[must_use]
    pub fn headroom(&self) -> f64 {
        if self.capacity > 0.0 { (self.remaining / self.capacity).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// Whoever keeps account of an org's quota. Asked only when somebody wants to know, so that a call pays nothing for it.
pub(crate) trait Meters: Send + Sync {
    /// Under no lock of the board.
    fn read(&self) -> Vec<ResourceQuota>;
}
