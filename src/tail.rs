//! What an answer that is handed through as a stream proves to be once it has ended: told to whoever listens.

use std::{
    any::Any,
    fmt, mem,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex, PoisonError},
};

use crate::outcome::{Outcome, Usage};

/// What is known of a stream once no more of it will be read.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// What the call used, as far as the stream has said. One that is not [`complete`](Ended::complete) may have used more;
    /// `None` where it has said nothing.
    pub usage: Option<Usage>,
    /// Whether all of it came: a stream of server-sent events up to its terminal event, whatever became of it then; any
    /// other body to its end. Not so if it broke off, or was dropped before.
    pub complete: bool,
    /// What the stream as a whole means: [`Class::Ok`](crate::outcome::Class::Ok), the class of an error event in it,
    /// [`Class::Transport`](crate::outcome::Class::Transport) if it broke off. `None` if whoever read it dropped it before its end:
    /// then nobody is to blame.
    pub outcome: Option<Outcome>,
}

impl Ended {
    /// So much used, by a stream that came whole or did not.
    #[must_use]
    pub const fn new(usage: Option<Usage>, complete: bool) -> Self {
        Ended { usage, complete, outcome: None }
    }

    /// The same, with what it means.
    #[must_use]
    pub const fn outcome(mut self, outcome: Outcome) -> Self {
        self.outcome = Some(outcome);
        self
    }
}

/// The end of an answer that is handed through as a stream, in its [`Stamp`](crate::outcome::Stamp). Clones are of the same end.
///
/// ```
/// # use http::Response;
/// use tower_quota::outcome::Stamp;
/// # let response = Response::new(());
/// if let Some(tail) = response.extensions().get::<Stamp>().and_then(|stamp| stamp.tail.as_ref()) {
///     tail.on_end(|ended| println!("used {:?}, complete: {}", ended.usage, ended.complete));
/// }
/// ```
#[derive(Clone)]
pub struct Tail {
    state: Arc<Mutex<State>>,
}

type Listener = Box<dyn FnOnce(&Ended) + Send>;

enum State {
    Open(Vec<Listener>),
    Ended(Ended),
}

impl Tail {
    /// The end of a stream that has not ended.
    pub(crate) fn new() -> Self {
        Tail { state: Arc::new(Mutex::new(State::Open(vec![]))) }
    }

    /// Calls `listener` once: when the body has ended, has failed or is dropped, whichever comes first, from where that
    /// happens; at once, if it has happened already. Listeners are called in the order in which they came, without a lock, and
    /// must not block. A body that is leaked never ends.
    ///
    /// # Panics
    /// One that panics does so for whoever reads the body to its end, after all others have been called. Where the body is
    /// dropped nobody is told of the panic, since bodies are dropped in panics too, and a second one would end the process.
    pub fn on_end(&self, listener: impl FnOnce(&Ended) + Send + 'static) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *state {
            State::Open(listeners) => listeners.push(Box::new(listener)),
            State::Ended(ended) => {
                let ended = *ended;
                drop(state);
                listener(&ended);
            }
        }
    }

    /// What is known, once it has ended.
    #[must_use]
    pub fn ended(&self) -> Option<Ended> {
        match &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Open(_) => None,
            State::Ended(ended) => Some(*ended),
        }
    }

    /// It has ended: to be called once. The first panic of a listener is handed back.
    pub(crate) fn end(&self, ended: Ended) -> Result<(), Box<dyn Any + Send>> {
        let before = mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Ended(ended));
        let State::Open(listeners) = before else { return Ok(()) };
        let mut told = Ok(());
        for listener in listeners {
            // Nothing of ours is in the closure, and a panic in it must not keep the word from those who come after.
            told = told.and(panic::catch_unwind(AssertUnwindSafe(|| listener(&ended))));
        }
        told
    }
}

impl fmt::Debug for Tail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tail").field(&self.ended()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const ENDED: Ended = Ended::new(Some(Usage::new(1, 2)), true);

    #[test]
    fn every_listener_is_told_once_in_order_and_at_once_if_it_is_late() {
        let tail = Tail::new();
        let (tell, told) = mpsc::channel();
        let listen = |tail: &Tail, name| {
            let tell = tell.clone();
            tail.on_end(move |ended| tell.send((name, *ended)).unwrap());
        };
        listen(&tail, "first");
        listen(&tail.clone(), "second");
        assert_eq!((tail.ended(), told.try_recv().is_err()), (None, true));
        tail.end(ENDED).unwrap();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [("first", ENDED), ("second", ENDED)]);
        listen(&tail, "late");
        tail.end(Ended::new(None, false)).unwrap();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [("late", ENDED)], "and it ends once");
        assert_eq!(Arc::strong_count(&tail.state), 1);
    }

    #[test]
    fn a_listener_may_use_the_tail() {
        let tail = Tail::new();
        let (tell, told) = mpsc::channel();
        let within = tail.clone();
        tail.on_end(move |_| {
            let late = within.clone();
            within.on_end(move |ended| tell.send((late.ended(), *ended)).unwrap());
        });
        tail.end(ENDED).unwrap();
        assert_eq!(told.recv().unwrap(), (Some(ENDED), ENDED));
    }

    #[test]
    fn a_listener_that_panics_keeps_the_word_from_nobody() {
        let tail = Tail::new();
        let (tell, told) = mpsc::channel();
        tail.on_end(|_| panic!("first"));
        tail.on_end(|_| panic!("second"));
        tail.on_end(move |ended| tell.send(*ended).unwrap());
        let ending = tail.end(ENDED).unwrap_err();
        assert_eq!(ending.downcast_ref(), Some(&"first"));
        assert_eq!((told.recv().unwrap(), tail.ended()), (ENDED, Some(ENDED)));

        let late = panic::catch_unwind(|| tail.on_end(|_| panic!("late"))).unwrap_err();
        assert_eq!((late.downcast_ref(), tail.ended()), (Some(&"late"), Some(ENDED)));
    }
}
