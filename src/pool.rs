//! Pools from the environment and, with the feature `config`, from a file.

use std::collections::BTreeMap;

use http::{
    Uri,
    uri::{Authority, Scheme},
};

use crate::org::{BuildError, Credential, Dialect, Org, Orgs};

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

/// Whether a key can be one: what is pasted, or read in the wrong encoding, often cannot.
pub(crate) fn check_key(key: &Credential) -> Result<(), &'static str> {
    if key.reveal().is_empty() {
        return Err("is blank");
    }
    if !key.reveal().bytes().all(|c| c.is_ascii_graphic()) {
        return Err("has characters that no key has, such as a blank, a line break or a letter beyond ASCII");
    }
    Ok(())
}

/// One provider's variables.
struct Variables {
    dialect: Dialect,
    key: &'static str,
    batch_key: &'static str,
    tagged_key: &'static str,
    base_url: &'static str,
}

const PROVIDERS: [Variables; 2] = [
    Variables {
        dialect: Dialect::Anthropic,
        key: "ANTHROPIC_API_KEY",
        batch_key: "ANTHROPIC_BATCH_KEY",
        tagged_key: "ANTHROPIC_API_KEY_",
        base_url: "ANTHROPIC_BASE_URL",
    },
    Variables {
        dialect: Dialect::OpenAi,
        key: "OPENAI_API_KEY",
        batch_key: "OPENAI_BATCH_KEY",
        tagged_key: "OPENAI_API_KEY_",
        base_url: "OPENAI_BASE_URL",
    },
];

impl Variables {
    fn listed(&self) -> String {
        format!("{}, {} or {}<TAG>", self.key, self.batch_key, self.tagged_key)
    }

    /// The variables that hold a key, with the names of their orgs: the main one, that for batches, and the tagged ones in the
    /// order of their tags.
    fn keys<'a>(&self, vars: &'a BTreeMap<String, String>) -> Vec<(&'a str, String, &'a str)> {
        let untagged = [(self.key, "main"), (self.batch_key, "batch")].into_iter().filter_map(|(variable, org)| {
            let (variable, key) = vars.get_key_value(variable)?;
            Some((variable.as_str(), org.to_owned(), key.as_str()))
        });
        let tagged = vars.iter().filter_map(|(variable, key)| {
            let tag = variable.strip_prefix(self.tagged_key)?;
            Some((variable.as_str(), tag.to_ascii_lowercase(), key.as_str()))
        });
        untagged.chain(tagged).collect()
    }

    fn orgs(&self, vars: &BTreeMap<String, String>) -> Result<Orgs, BuildError> {
        let base_url = vars.get(self.base_url).map(|text| base_url(self.base_url, text)).transpose()?;
        let mut pool = Pool::default();
        for (variable, name, key) in self.keys(vars) {
            if name.is_empty() {
                return Err(BuildError::new(variable, "has no tag after the last underscore: it names the org"));
            }
            let mut org = Org::new(&name).dialect(self.dialect).credential(credential(variable, key)?);
            if let Some(base_url) = &base_url {
                org = org.base_url(base_url.clone());
            }
            pool.add(variable, org)?;
        }
        pool.orgs()
    }
}

/// The pool as it is read: each org with where it was named.
#[derive(Default)]
struct Pool(Vec<(String, Org)>);

impl Pool {
    /// Adds an org, unless its key is there already: that is the same quota a second time, not more of it.
    fn add(&mut self, place: &str, org: Org) -> Result<(), BuildError> {
        if let Some((first, same)) = self.0.iter().find(|(_, other)| org.key().is_some() && other.key() == org.key()) {
            tracing::warn!(
                kept = same.name(),
                left_out = org.name(),
                "{place} holds the same key as {first}: it adds no quota and is left out"
            );
            return Ok(());
        }
        if let Some((first, _)) = self.0.iter().find(|(_, other)| other.name() == org.name()) {
            return Err(BuildError::new(place, format!("names the org {:?}, as {first} does already", org.name())));
        }
        self.0.push((place.to_owned(), org));
        Ok(())
    }

    fn orgs(self) -> Result<Orgs, BuildError> {
        Orgs::new(self.0.into_iter().map(|(_, org)| org))
    }
}

/// A key that can be one. `field` says where it was read; the key itself is never quoted.
fn credential(field: &str, key: &str) -> Result<Credential, BuildError> {
    let credential = Credential::new(key);
    check_key(&credential).map_err(|problem| BuildError::new(field, problem))?;
    Ok(credential)
}

fn base_url(field: &str, text: &str) -> Result<Uri, BuildError> {
    // The parser's own words would add nothing, and a URL may hold a password.
    let uri: Uri = text.trim().parse().map_err(|_| BuildError::new(field, "is not a URL"))?;
    check_base_url(&uri).map_err(|problem| BuildError::new(field, problem))?;
    Ok(uri)
}

impl Orgs {
    /// The pool that the environment describes.
    ///
    /// | variable | org |
    /// |---|---|
    /// | `ANTHROPIC_API_KEY` | `main` |
    /// | `ANTHROPIC_BATCH_KEY` | `batch` |
    /// | `ANTHROPIC_API_KEY_<TAG>` | the tag in lower case: `ANTHROPIC_API_KEY_LOW_PRIO` is `low_prio` |
    /// | `ANTHROPIC_BASE_URL` | where all of them are reached |
    ///
    /// In this order, tags by name; and the same with `OPENAI_` for OpenAI. A blank variable counts as absent, and blanks around
    /// a value are cut off. A key that stands in two variables is one quota, not two: the first is kept, and a warning names
    /// both variables.
    ///
    /// # Errors
    /// If there is no key, or keys of both providers (then choose with [`from_env_for`](Self::from_env_for)), or if a variable
    /// cannot be what it should. Errors name variables, never their values.
    ///
    /// ```no_run
    /// use tower_quota::org::Orgs;
    ///
    /// let orgs = Orgs::from_env()?;
    /// for org in &orgs {
    ///     println!("{}", org.name());
    /// }
    /// # Ok::<(), tower_quota::org::BuildError>(())
    /// ```
    pub fn from_env() -> Result<Self, BuildError> {
        Self::from_lookup(environment(), None)
    }

    /// As [`from_env`](Self::from_env), but of this provider's variables alone.
    ///
    /// # Errors
    /// If there is no key of this provider, or a variable cannot be what it should.
    pub fn from_env_for(dialect: Dialect) -> Result<Self, BuildError> {
        Self::from_lookup(environment(), Some(dialect))
    }

    /// As [`from_env`](Self::from_env), from any variables: of one provider, or of the only one that has keys.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env) and [`from_env_for`](Self::from_env_for).
    ///
    /// ```
    /// use tower_quota::org::Orgs;
    ///
    /// let vars = [("ANTHROPIC_API_KEY_LOW_PRIO", "sk-2"), ("ANTHROPIC_API_KEY", "sk-1"), ("ANTHROPIC_BATCH_KEY", " ")];
    /// let orgs = Orgs::from_lookup(vars.map(|(name, value)| (name.into(), value.into())), None)?;
    /// assert_eq!(format!("{orgs:?}"), r#"["main", "low_prio"]"#);
    /// # Ok::<(), tower_quota::org::BuildError>(())
    /// ```
    pub fn from_lookup(
        vars: impl IntoIterator<Item = (String, String)>,
        dialect: Option<Dialect>,
    ) -> Result<Self, BuildError> {
        let vars: BTreeMap<_, _> = vars.into_iter().filter(|(_, value)| !value.trim().is_empty()).collect();
        let asked: Vec<_> = PROVIDERS.iter().filter(|it| dialect.is_none_or(|asked| asked == it.dialect)).collect();
        let found: Vec<_> = asked.iter().filter(|it| !it.keys(&vars).is_empty()).collect();
        match found[..] {
            [provider] => provider.orgs(&vars),
            [] => {
                let listed: Vec<_> = asked.iter().map(|it| it.listed()).collect();
                Err(BuildError::new("environment", format!("no API key: set {}", listed.join("; or "))))
            }
            _ => Err(BuildError::new(
                "environment",
                "it has keys of both Anthropic and OpenAI, and a pool holds one provider: choose with \
                 Orgs::from_env_for(Dialect::Anthropic) or Orgs::from_env_for(Dialect::OpenAi)",
            )),
        }
    }
}

/// What is not Unicode stays visible as such, so that a key that cannot be one is refused rather than missed.
fn environment() -> impl Iterator<Item = (String, String)> {
    let lossy = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (lossy(name), lossy(value)))
}

#[cfg(feature = "config")]
mod config {
    use std::path::Path;

    use toml::{Table, Value};

    use super::{Pool, base_url, credential};
    use crate::org::{BuildError, Dialect, Org, Orgs};

    /// No field's name is as long as this; what is may be a key in the wrong place, and is not quoted.
    const LONGEST_FIELD: usize = 16;

    impl Orgs {
        /// The pool that a TOML text describes.
        ///
        /// | field | |
        /// |---|---|
        /// | `dialect` | `"anthropic"` (default) or `"openai"` |
        /// | `base_url` | where the orgs are reached, instead of the dialect's own URL |
        /// | `[[org]]` `name` | for people: logs, reports, errors |
        /// | `[[org]]` `key` or `key_env` | the key, or the environment variable that holds it; exactly one of the two |
        /// | `[[org]]` `base_url` | where this one is reached |
        /// | `[[org]]` `cap` | the most concurrent calls, at least 1 |
        ///
        /// An org whose key is there already is left out with a warning: one key is one quota.
        ///
        /// # Errors
        /// If the text is not TOML (by line and column), or a field is unknown, missing or of the wrong kind (by field and org).
        /// No error quotes a value of the file, so none quotes a key.
        ///
        /// ```
        /// use tower_quota::org::Orgs;
        ///
        /// let orgs = Orgs::from_toml(r#"
        ///     dialect = "anthropic"
        ///
        ///     [[org]]
        ///     name = "research"
        ///     key = "sk-secret"
        ///     cap = 40
        /// "#)?;
        /// assert_eq!(orgs.get("research").and_then(|org| org.own_cap()), Some(40));
        /// # Ok::<(), tower_quota::org::BuildError>(())
        /// ```
        pub fn from_toml(text: &str) -> Result<Self, BuildError> {
            Self::from_toml_with(text, |variable| {
                std::env::var_os(variable).map(|key| key.to_string_lossy().into_owned())
            })
        }

        /// As [`from_toml`](Self::from_toml), with the given look-up for `key_env` instead of the process environment.
        ///
        /// # Errors
        /// As [`from_toml`](Self::from_toml).
        pub fn from_toml_with(text: &str, mut env: impl FnMut(&str) -> Option<String>) -> Result<Self, BuildError> {
            let table: Table = text.parse().map_err(|error| syntax(text, &error))?;
            let file = Fields { of: String::new(), table: &table };
            file.only(&["dialect", "base_url", "org"])?;
            let dialect = match file.text("dialect")? {
                None => Dialect::default(),
                Some("anthropic") => Dialect::Anthropic,
                Some("openai") => Dialect::OpenAi,
                Some(_) => return Err(file.refuse("dialect", "must be \"anthropic\" or \"openai\"")),
            };
            let shared_url = file.base_url()?;
            let orgs = match table.get("org") {
                None => return Err(file.refuse("org", "at least one [[org]] is needed")),
                Some(Value::Array(orgs)) => orgs,
                Some(_) => return Err(file.refuse("org", "must be written as [[org]], once for each org")),
            };
            let mut pool = Pool::default();
            for (i, org) in orgs.iter().enumerate() {
                let Value::Table(table) = org else {
                    return Err(file.refuse("org", "must be written as [[org]], once for each org"));
                };
                let mut fields = Fields { of: format!("org #{}: ", i + 1), table };
                let Some(name) = fields.text("name")? else { return Err(fields.refuse("name", "is missing")) };
                if name.trim().is_empty() {
                    return Err(fields.refuse("name", "is blank"));
                }
                fields.of = format!("org {name:?}: ");
                let org = fields.org(name, dialect, &mut env)?;
                let org = match fields.base_url()?.or_else(|| shared_url.clone()) {
                    Some(url) => org.base_url(url),
                    None => org,
                };
                pool.add(&format!("org #{}", i + 1), org)?;
            }
            pool.orgs()
        }

        /// As [`from_toml`](Self::from_toml), from a file.
        ///
        /// # Errors
        /// If the file cannot be read, and as [`from_toml`](Self::from_toml). Errors name the file.
        pub fn from_toml_file(path: impl AsRef<Path>) -> Result<Self, BuildError> {
            let refuse = |problem: String| BuildError::new(path.as_ref().display().to_string(), problem);
            let text = std::fs::read_to_string(&path).map_err(|error| refuse(error.to_string()))?;
            Self::from_toml(&text).map_err(|error| refuse(error.to_string()))
        }
    }

    /// The parser's message and the place, but not its picture of the line: that may hold a key.
    fn syntax(text: &str, error: &toml::de::Error) -> BuildError {
        let at = error.span().map_or(text.len(), |span| span.start);
        let before = text.get(..at).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        BuildError::new(format!("line {line}, column {column}"), error.message().to_owned())
    }

    /// A table of the file, and how errors name it.
    struct Fields<'a> {
        of: String,
        table: &'a Table,
    }

    impl<'a> Fields<'a> {
        fn refuse(&self, field: &str, problem: &str) -> BuildError {
            BuildError::new(format!("{}{field}", self.of), problem)
        }

        fn only(&self, known: &[&str]) -> Result<(), BuildError> {
            let Some(unknown) = self.table.keys().find(|field| !known.contains(&field.as_str())) else { return Ok(()) };
            let shown = if unknown.len() < LONGEST_FIELD { unknown } else { "a field" };
            Err(self.refuse(shown, &format!("is not known here; known are {}", known.join(", "))))
        }

        fn text(&self, field: &str) -> Result<Option<&'a str>, BuildError> {
            match self.table.get(field) {
                None => Ok(None),
                Some(Value::String(text)) => Ok(Some(text)),
                Some(_) => Err(self.refuse(field, "must be a string")),
            }
        }

        fn base_url(&self) -> Result<Option<http::Uri>, BuildError> {
            self.text("base_url")?.map(|text| base_url(&format!("{}base_url", self.of), text)).transpose()
        }

        fn org(
            &self,
            name: &str,
            dialect: Dialect,
            env: &mut impl FnMut(&str) -> Option<String>,
        ) -> Result<Org, BuildError> {
            self.only(&["name", "key", "key_env", "base_url", "cap"])?;
            let key = match (self.text("key")?, self.text("key_env")?) {
                (Some(key), None) => credential(&format!("{}key", self.of), key)?,
                (None, Some(variable)) => {
                    let key = env(variable).unwrap_or_default();
                    if key.trim().is_empty() {
                        // Whoever wrote the key itself here finds it quoted nowhere.
                        let named = variable.bytes().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == b'_');
                        let shown = if named { variable } else { "it names" };
                        return Err(self.refuse("key_env", &format!("the variable {shown} is not set, or blank")));
                    }
                    credential(&format!("{}key_env", self.of), &key)?
                }
                (None, None) => return Err(self.refuse("key", "is missing; give key or key_env")),
                (Some(_), Some(_)) => return Err(self.refuse("key", "give either key or key_env, not both")),
            };
            let org = Org::new(name).dialect(dialect).credential(key);
            match self.table.get("cap") {
                None => Ok(org),
                Some(Value::Integer(cap)) if *cap >= 1 => Ok(org.cap(usize::try_from(*cap).unwrap_or(usize::MAX))),
                Some(_) => {
                    Err(self.refuse("cap", "must be a whole number, at least 1; to leave an org unused, remove it"))
                }
            }
        }
    }
}
