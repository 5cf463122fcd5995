//! What is kept of a request while it is on its way: all that it takes to make it again.
//!
//! The first attempt *is* the caller's request, and most have no other. So what is kept is no request but its parts, in the form
//! that is cheapest to write down and to forget: header lines without an index, and of the extensions our own by themselves.

use http::{Extensions, HeaderName, HeaderValue, Method, Request, Uri, Version, header::Entry};

use super::{Deadline, IDEMPOTENCY_KEY, Shared, policy::Key};
use crate::{call::CallMemory, org::Family};

/// What attempts are made of: the request as the caller gave it, so that what is written on one never reaches the next.
pub(super) struct Kept<B> {
    method: Method,
    uri: Uri,
    version: Version,
    headers: Vec<(HeaderName, HeaderValue)>,
    extensions: Extended,
    body: B,
    /// The one that was made here, where the caller gave none.
    key: Option<Key>,
    memory: CallMemory,
}

enum Extended {
    /// Nothing but ours.
    Ours {
        family: Option<Family>,
        memory: bool,
    },
    Others(Extensions),
}

impl<B: Clone> Kept<B> {
    /// Makes a request the first attempt; what is kept for others.
    pub(super) fn first(request: &mut Request<B>, shared: &Shared) -> Self {
        let extensions = request.extensions();
        let (family, memory) = (extensions.get::<Family>(), extensions.get::<CallMemory>());
        let ours = usize::from(family.is_some()) + usize::from(memory.is_some());
        let mut kept = Kept {
            method: request.method().clone(),
            uri: request.uri().clone(),
            version: request.version(),
            headers: request.headers().iter().map(|(name, value)| (name.clone(), value.clone())).collect(),
            extensions: match extensions.len() > ours {
                true => Extended::Others(extensions.clone()),
                false => Extended::Ours { family: family.cloned(), memory: memory.is_some() },
            },
            body: request.body().clone(),
            key: None,
            // A request that comes with a memory keeps its age.
            memory: memory.cloned().unwrap_or_default(),
        };
        kept.sign(request, shared);
        kept
    }

    /// A further attempt.
    pub(super) fn again(&mut self, shared: &Shared) -> Request<B> {
        let copy = Kept {
            method: self.method.clone(),
            uri: self.uri.clone(),
            headers: self.headers.clone(),
            extensions: match &self.extensions {
                Extended::Ours { family, memory } => Extended::Ours { family: family.clone(), memory: *memory },
                Extended::Others(others) => Extended::Others(others.clone()),
            },
            body: self.body.clone(),
            memory: self.memory.clone(),
            ..*self
        };
        let mut attempt = copy.into_request();
        self.sign(&mut attempt, shared);
        attempt
    }

    /// What every attempt carries besides.
    fn sign(&mut self, attempt: &mut Request<B>, shared: &Shared) {
        let unsafe_method = matches!(self.method, Method::POST | Method::PATCH);
        if unsafe_method && shared.policy.idempotency_key {
            if let Entry::Vacant(place) = attempt.headers_mut().entry(&IDEMPOTENCY_KEY) {
                place.insert(self.key.get_or_insert_with(|| shared.dice.key()).header());
            }
        }
        attempt.extensions_mut().insert(self.memory.clone());
    }
}

impl<B> Kept<B> {
    /// What is remembered over all attempts.
    pub(super) fn memory(&self) -> &CallMemory {
        &self.memory
    }

    /// The request's own, if it brought one.
    pub(super) fn deadline(&self) -> Option<Deadline> {
        match &self.extensions {
            Extended::Ours { .. } => None,
            Extended::Others(others) => others.get().copied(),
        }
    }

    /// The key that went with every attempt, the caller's or ours.
    pub(super) fn idempotency_key(&self) -> Option<HeaderValue> {
        let given = || self.headers.iter().find(|(name, _)| *name == IDEMPOTENCY_KEY);
        self.key.map(Key::header).or_else(|| given().map(|(_, value)| value.clone()))
    }

    /// The request as the caller gave it.
    pub(super) fn into_request(self) -> Request<B> {
        let mut request = Request::new(self.body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        *request.version_mut() = self.version;
        let headers = request.headers_mut();
        // There may be more lines than a map has room for names: then it grows by itself, as far as it must.
        let _ = headers.try_reserve(self.headers.len());
        // Line by line, since a name may be there more than once.
        for (name, value) in self.headers {
            headers.append(name, value);
        }
        match self.extensions {
            Extended::Others(others) => *request.extensions_mut() = others,
            Extended::Ours { family, memory } => {
                if let Some(family) = family {
                    request.extensions_mut().insert(family);
                }
                if memory {
                    request.extensions_mut().insert(self.memory);
                }
            }
        }
        request
    }
}
