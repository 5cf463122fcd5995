//! What was formatted, and of what types it was.

use std::{
    any::type_name,
    collections::{BTreeMap, BTreeSet},
    error::Error as StdError,
    fmt::{Debug, Display},
};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower_quota::{
    balance::NoOrgLeft,
    batch::{ApiError, BatchError},
    journal::StoreError,
    retry::Exhausted,
};

/// Texts by what they are of.
#[derive(Default)]
pub(crate) struct Shown {
    pub(crate) texts: BTreeMap<String, String>,
    /// Public types of the crate, as `module::Type`.
    pub(crate) types: BTreeSet<String>,
}

impl Shown {
    pub(crate) fn debug<T: Debug>(&mut self, what: &str, value: &T) {
        self.is_of::<T>();
        self.texts.insert(what.to_owned(), format!("{value:?}\n{value:#?}"));
    }

    pub(crate) fn display<T: Display>(&mut self, what: &str, value: &T) {
        self.is_of::<T>();
        self.texts.insert(format!("{what}, for people"), format!("{value}\n{value:#}"));
    }

    /// With all its sources.
    pub(crate) fn error<E: StdError + 'static>(&mut self, what: &str, error: &E) {
        self.is_of::<E>();
        let mut next = Some(error as &(dyn StdError + 'static));
        let mut depth = 0;
        while let Some(error) = next {
            self.debug(&format!("{what} {depth}"), &error);
            self.display(&format!("{what} {depth}"), &error);
            self.is_one_of(error);
            next = error.source();
            depth += 1;
        }
    }

    /// A source says its type to whoever asks for it.
    fn is_one_of(&mut self, error: &(dyn StdError + 'static)) {
        macro_rules! one_of {
            ($($known:ty),*) => {
                $(if error.is::<$known>() {
                    self.is_of::<$known>();
                })*
            };
        }
        one_of!(NoOrgLeft, ApiError, StoreError, Exhausted<Request<Full<Bytes>>>, BatchError<Request<Full<Bytes>>>);
    }

    fn is_of<T>(&mut self) {
        self.types.extend(public_name(type_name::<T>()));
    }
}

/// `tower_quota::aimd::service::AimdLimit<S>` is `aimd::AimdLimit`: its module is the one it is reached by.
pub(crate) fn public_name(name: &str) -> Option<String> {
    let own = name.trim_start_matches('&').strip_prefix("tower_quota::")?;
    let path = own.split('<').next()?;
    let (module, _) = path.split_once("::")?;
    let (_, name) = path.rsplit_once("::")?;
    Some(format!("{module}::{name}"))
}
