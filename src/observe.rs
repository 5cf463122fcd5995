//! Told of what happens: cuts and holds, retries, orgs that are out, circuits that open, requests that are given up.
//!
//! The same is in the log (`tracing`), for people; an [`Observer`] is for programs: a panel, metrics, an alarm. It is told from
//! wherever the thing happens, in the caller's task and under no lock, so it may call back into whatever it likes, and must not
//! block. A panic in it is caught and logged: no call fails by it.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use std::sync::{Arc, Mutex};
//! use tower_quota::{observe::Event, org::{Org, OutReason}};
//!
//! let seen = Arc::new(Mutex::new(vec![]));
//! let org = Org::new("research");
//! org.observe({
//!     let seen = seen.clone();
//!     move |event: &Event| seen.lock().unwrap().push(event.to_string())
//! });
//! org.put_out(OutReason::Unauthorised);
//! assert_eq!(seen.lock().unwrap()[..], ["research is out: its key is refused: check or rotate it"]);
//! # }
//! ```

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use crate::{
    org::{Change, Circuit, Hold, Org, OutReason},
    outcome::Class,
};

/// Told of what happens. A closure `Fn(&Event)` is one.
pub trait Observer: Send + Sync + 'static {
    /// Something has happened. It must not block.
    fn event(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync + 'static> Observer for F {
    fn event(&self, event: &Event) {
        self(event);
    }
}

/// What has happened. Its `Display` is one line for people; no event has a key in it, nor anything of a request or an answer.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum Event {
    /// A limit or a pace has changed: a cut, or a step of its recovery. [`Change::why`] says which.
    Limit {
        /// Of which org and model family.
        org: Org,
        /// From what to what, and why.
        change: Change,
    },
    /// An org is held.
    Held {
        /// Which org, for which model family.
        org: Org,
        /// Until when, and why.
        hold: Hold,
    },
    /// An org is out: it is asked no more.
    Out {
        /// Which org. If its handle is that of the whole org, it is out for all model families.
        org: Org,
        /// Why.
        reason: OutReason,
    },
    /// An org was brought back.
    Back {
        /// Which org.
        org: Org,
    },
    /// An org's circuit has opened, is probed, or has closed.
    Circuit {
        /// Which org, for which model family.
        org: Org,
        /// What it is now.
        circuit: Circuit,
    },
    /// An attempt had no answer, and another will be made.
    Retry {
        /// The org that was asked, where a balancer has said so.
        org: Option<Org>,
        /// What its answer meant.
        class: Class,
        /// Wire calls made for this request so far.
        calls: u32,
        /// How long is waited up there; zero where the wait, if any, is below.
        wait: Duration,
    },
    /// A request was given up.
    Exhausted {
        /// The org that was asked last, where a balancer has said so.
        org: Option<Org>,
        /// What its answer meant.
        class: Class,
        /// Wire calls made for this request.
        calls: u32,
        /// By which bound, in words.
        reason: &'static str,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |org: &Option<Org>| org.as_ref().map(|org| format!(" by {}", org.name())).unwrap_or_default();
        match self {
            Event::Limit { org, change } => write!(f, "{}: {change}", Of(org)),
            Event::Held { org, hold } => write!(f, "{} is held: {}", Of(org), hold.reason),
            Event::Out { org, reason } => write!(f, "{} is out: {reason}", Of(org)),
            Event::Back { org } => write!(f, "{} is brought back", org.name()),
            Event::Circuit { org, circuit } => write!(f, "{}: circuit {circuit}", Of(org)),
            Event::Retry { org, class, calls, .. } => write!(f, "{class}{} at call {calls}: again", at(org)),
            Event::Exhausted { org, class, calls, reason } => {
                write!(f, "given up after {calls} calls, last {class}{}: {reason}", at(org))
            }
        }
    }
}

/// An org, and the model family where it is not the whole.
struct Of<'a>(&'a Org);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())?;
        if self.0.is_whole() { Ok(()) } else { write!(f, " ({})", self.0.model_family().as_str()) }
    }
}

/// Tells one observer. Under no lock.
pub(crate) fn tell(observer: &dyn Observer, event: &Event) {
    // Nothing of ours is in the closure.
    if catch_unwind(AssertUnwindSafe(|| observer.event(event))).is_err() {
        tracing::error!(%event, "an observer panicked");
    }
}

/// Those who are told, in the order in which they came.
#[derive(Clone, Default)]
pub(crate) struct Observers(Vec<Arc<dyn Observer>>);

impl Observers {
    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>) {
        self.0.push(observer);
    }

    /// Under no lock.
    pub(crate) fn tell(&self, event: &Event) {
        self.0.iter().for_each(|observer| tell(&**observer, event));
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.0.len())
    }
}
