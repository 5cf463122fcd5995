//! A pool of orgs.

use std::{fmt, sync::Arc};

use super::{Dialect, Org};

/// A pool: one provider's orgs, whose quotas add up. Never empty, no name twice, one dialect.
#[derive(Clone)]
pub struct Orgs(Arc<[Org]>);

/// Why a configuration is refused: which field, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError {
    field: String,
    problem: String,
}

impl BuildError {
    /// A refusal of `field` because of `problem`.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        BuildError { field: field.into(), problem: problem.into() }
    }

    /// The field or variable that is wrong.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.problem)
    }
}

impl std::error::Error for BuildError {}

impl Org {
    /// Whether it can be in a pool that speaks `dialect`.
    pub(crate) fn may_join(&self, dialect: Dialect) -> Result<(), BuildError> {
        if self.speaks() != dialect {
            let (its, pools) = (self.speaks().name(), dialect.name());
            let problem = format!("it speaks {its}, but the pool speaks {pools}: a pool holds one provider");
            return Err(BuildError::new(format!("org {:?}", self.name()), problem));
        }
        if self.own_cap() == Some(0) {
            let problem = "must be at least 1; to leave an org unused, remove it";
            return Err(BuildError::new(format!("org {:?}: cap", self.name()), problem));
        }
        Ok(())
    }
}

impl Orgs {
    /// A pool of these orgs.
    ///
    /// # Errors
    /// If there is none, if two share a name, if they speak different dialects, or if a cap is zero.
    pub fn new(orgs: impl IntoIterator<Item = Org>) -> Result<Self, BuildError> {
        let orgs: Arc<[Org]> = orgs.into_iter().collect();
        let Some(first) = orgs.first() else {
            return Err(BuildError::new("orgs", "at least one org is needed"));
        };
        for (i, org) in orgs.iter().enumerate() {
            if orgs[..i].iter().any(|other| other.name() == org.name()) {
                return Err(BuildError::new(format!("org {:?}", org.name()), "this name is given twice"));
            }
            org.may_join(first.speaks())?;
        }
        Ok(Orgs(orgs))
    }

    /// The orgs, in the order given.
    pub fn iter(&self) -> std::slice::Iter<'_, Org> {
        self.0.iter()
    }

    /// How many, at least one.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a pool is never empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The org of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Org> {
        self.iter().find(|org| org.name() == name)
    }

    /// The pool reduced to the org of that name.
    ///
    /// # Errors
    /// If there is no such org; the error names those there are.
    pub fn only(&self, name: &str) -> Result<Self, BuildError> {
        let org = self.get(name).cloned().ok_or_else(|| {
            let names: Vec<_> = self.iter().map(Org::name).collect();
            BuildError::new(format!("org {name:?}"), format!("no such org; there are: {}", names.join(", ")))
        })?;
        Orgs::new([org])
    }

    /// What API they speak.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.0[0].speaks()
    }
}

impl<'a> IntoIterator for &'a Orgs {
    type Item = &'a Org;
    type IntoIter = std::slice::Iter<'a, Org>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Orgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Org::name)).finish()
    }
}
