//! What tokens cost: a table of prices per million tokens, the one beside this file or the user's own.

use std::{collections::HashMap, ops::AddAssign, path::Path};

use serde::{Deserialize, Serialize};
use tower_quota::outcome::Usage;

/// The table that is used unless another one is given.
const LIST: &str = include_str!("prices.toml");

/// What part of the list price a batch costs, at Anthropic and at OpenAI.
pub(crate) const BATCH_SHARE: f64 = 0.5;

/// Tokens that calls used. Of the input each token is in one of the first three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Tokens {
    /// Input that no cache had to do with.
    pub(crate) input: u64,
    /// Input that was read from a cache.
    pub(crate) cached: u64,
    /// Input that was written to a cache.
    pub(crate) cache_written: u64,
    pub(crate) output: u64,
}

impl Tokens {
    /// Input of all kinds.
    pub(crate) fn all_input(&self) -> u64 {
        self.input + self.cached + self.cache_written
    }
}

impl From<Usage> for Tokens {
    fn from(usage: Usage) -> Self {
        Tokens {
            input: usage.uncached_tokens,
            cached: usage.cache_read_tokens,
            cache_written: usage.cache_write_tokens,
            output: usage.output_tokens,
        }
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, more: Tokens) {
        let Tokens { input, cached, cache_written, output } = more;
        for (sum, more) in [
            (&mut self.input, input),
            (&mut self.cached, cached),
            (&mut self.cache_written, cache_written),
            (&mut self.output, output),
        ] {
            // What a provider says is not ours to trust.
            *sum = sum.saturating_add(more);
        }
    }
}

/// Dollars per million tokens of one model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price {
    pub(crate) input: f64,
    cached_input: f64,
    cache_write: f64,
    pub(crate) output: f64,
}

impl Price {
    /// In dollars.
    pub(crate) fn cost(&self, tokens: &Tokens) -> f64 {
        let Tokens { input, cached, cache_written, output } = *tokens;
        let parts = [
            (input, self.input),
            (cached, self.cached_input),
            (cache_written, self.cache_write),
            (output, self.output),
        ];
        parts.iter().map(|(tokens, price)| *tokens as f64 * price).sum::<f64>() / 1e6
    }
}

/// The file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    dated: String,
    #[serde(default)]
    model: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    input: f64,
    cached_input: Option<f64>,
    cache_write: Option<f64>,
    output: f64,
}

/// A table of prices.
#[derive(Clone, Debug)]
pub(crate) struct Prices {
    /// What they are and of when, for people.
    pub(crate) what: String,
    models: HashMap<String, Price>,
}

impl Prices {
    /// The table of this file, or without one that of the program.
    ///
    /// # Errors
    /// If it cannot be read, or a price in it is none; the text names the file and the model.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self, String> {
        let (text, what) = match path {
            None => (LIST.to_owned(), "list prices".to_owned()),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
                (text, format!("prices of {}", path.display()))
            }
        };
        Self::parse(&text, &what).map_err(|error| match path {
            Some(path) => format!("{}: {error}", path.display()),
            None => error,
        })
    }

    fn parse(text: &str, what: &str) -> Result<Self, String> {
        let Table { dated, model } = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        let mut models = HashMap::new();
        for Entry { name, input, cached_input, cache_write, output } in model {
            let price = Price {
                input,
                cached_input: cached_input.unwrap_or(input),
                cache_write: cache_write.unwrap_or(input),
                output,
            };
            for price in [price.input, price.cached_input, price.cache_write, price.output] {
                if !price.is_finite() || price < 0.0 {
                    return Err(format!("model {name:?}: {price} is no price: dollars per million tokens, at least 0"));
                }
            }
            if models.insert(name.clone(), price).is_some() {
                return Err(format!("model {name:?} stands there twice"));
            }
        }
        Ok(Prices { what: format!("{what}, dated {dated}: check yours"), models })
    }

    /// The price of a model: of its own name, or of that without the date.
    pub(crate) fn of(&self, model: &str) -> Option<&Price> {
        self.models.get(model).or_else(|| self.models.get(undated(model)?))
    }
}

/// A model's name without the date or the `-latest` at its end; `None` where there is none.
fn undated(model: &str) -> Option<&str> {
    let digits = |text: &str, lengths: &[usize]| {
        let mut parts = text.split('-');
        lengths.iter().all(|length| {
            parts.next().is_some_and(|part| part.len() == *length && part.bytes().all(|byte| byte.is_ascii_digit()))
        }) && parts.next().is_none()
    };
    if let Some(name) = model.strip_suffix("-latest") {
        return Some(name);
    }
    for (length, lengths) in [(8, &[8][..]), (10, &[4, 2, 2])] {
        let Some((name, date)) = model.len().checked_sub(length).and_then(|at| model.split_at_checked(at)) else {
            continue;
        };
        if digits(date, lengths) {
            return name.strip_suffix(['-', '@']).filter(|name| !name.is_empty());
        }
    }
    None
}
