//! How batches go, and what goes wrong with them.

use serde::Deserialize;

use crate::sim::config::setters;
use crate::sim::draw::{Chance, Latency};

/// How an org's batches go, and what goes wrong with them.
///
/// Every field has a default; unknown fields are refused. Without any set, a batch takes about a minute and every row of it is
/// answered. What happens to a batch is drawn when it is created, from the seed, the org and the batch's number in it: direct calls
/// move none of these draws. A stuck batch is stuck first of all; then it may expire; else it completes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BatchConfig {
    /// How long a batch takes, whatever its size; default a median of 60 s with σ = 0.3. In OpenAI's dialect the first twentieth is
    /// `validating`, the last `finalizing`.
    pub delay: Latency,
    /// And longer by this for each row, in milliseconds; default 0.
    pub delay_per_row_ms: f64,
    /// A batch makes no progress at all; in the end it expires.
    pub stuck: Chance,
    /// A batch with more rows than this is stuck; default none.
    pub starve_above: Option<usize>,
    /// A batch expires, having finished a part of its rows. So does one that takes longer than it may.
    pub expired: Chance,
    /// The part of its rows that such a batch finishes, from 0 to 1; default a half.
    pub expired_part: f64,
    /// A batch expires so many seconds after it was created; default a day.
    pub expires_after_s: f64,
    /// Every row of a batch is an error of the provider's (`api_error`, status 500), which may be sent again.
    pub all_error: Chance,
    /// A row is an invalid request. Decided by the item: sent again, it is one again; sent directly, it is not.
    pub row_invalid: Chance,
    /// A row is an error of the provider's (`api_error`, status 500), which may be sent again.
    pub row_api_error: Chance,
    /// A row meets an overloaded provider (529; 503 in OpenAI's dialect) and may be sent again.
    pub row_overloaded: Chance,
    /// Rows are finished, and stand in the results, in another order than they came; default true.
    pub shuffle: bool,
    /// For so many seconds a new batch is a 404 to whoever asks for it by its id; default 0.
    pub not_found_after_create_s: f64,
    /// For so many seconds a new batch stands in no list; default 0.
    pub not_listed_after_create_s: f64,
    /// A call that asks for a batch by its id gets a 404, though the batch is there.
    pub not_found: Chance,
    /// A batch is created, but the reply is lost: the connection is dropped.
    pub lost_reply: Chance,
    /// How long a cancelled batch is still `canceling`, in seconds; default 1.
    pub cancel_takes_s: f64,
    /// Anthropic's `request_counts` move while a batch runs; default false, as its reference says: all rows are `processing` until the
    /// batch has ended. OpenAI's always move.
    pub counts_while_running: bool,
    /// So many rows may be in the org's batches that have not ended; default no limit. A batch too many is a 429 in Anthropic's dialect;
    /// in OpenAI's it is created and `failed` at validation with `token_limit_exceeded`.
    pub queue_rows: Option<u64>,
    /// So many input tokens likewise; default no limit.
    pub queue_tokens: Option<u64>,
    /// The most rows of a batch; default 100,000 (OpenAI 50,000).
    pub max_rows: Option<usize>,
    /// The most bytes of a batch's body (OpenAI: of a file); default 256 MB (OpenAI 200 MB), of 1024 × 1024 bytes each.
    pub max_bytes: Option<usize>,
}

impl Default for BatchConfig {
    fn default() -> Self {
        BatchConfig {
            delay: Latency::new(60_000.0, 0.3),
            delay_per_row_ms: 0.0,
            stuck: Chance::default(),
            starve_above: None,
            expired: Chance::default(),
            expired_part: 0.5,
            expires_after_s: 86_400.0,
            all_error: Chance::default(),
            row_invalid: Chance::default(),
            row_api_error: Chance::default(),
            row_overloaded: Chance::default(),
            shuffle: true,
            not_found_after_create_s: 0.0,
            not_listed_after_create_s: 0.0,
            not_found: Chance::default(),
            lost_reply: Chance::default(),
            cancel_takes_s: 1.0,
            counts_while_running: false,
            queue_rows: None,
            queue_tokens: None,
            max_rows: None,
            max_bytes: None,
        }
    }
}

const YEAR_S: f64 = 365.0 * 86_400.0;

impl BatchConfig {
    /// Batches that take about a minute and succeed.
    pub fn new() -> Self {
        BatchConfig::default()
    }

    setters! {
        /// Sets [`delay`](Self::delay).
        delay: Latency => delay;
        /// Sets [`delay_per_row_ms`](Self::delay_per_row_ms).
        delay_per_row_ms: f64 => delay_per_row_ms;
        /// Sets [`stuck`](Self::stuck).
        stuck: impl Into<Chance> => stuck.into();
        /// Sets [`starve_above`](Self::starve_above).
        starve_above: usize => Some(starve_above);
        /// Sets [`expired`](Self::expired).
        expired: impl Into<Chance> => expired.into();
        /// Sets [`expired_part`](Self::expired_part).
        expired_part: f64 => expired_part;
        /// Sets [`expires_after_s`](Self::expires_after_s).
        expires_after_s: f64 => expires_after_s;
        /// Sets [`all_error`](Self::all_error).
        all_error: impl Into<Chance> => all_error.into();
        /// Sets [`row_invalid`](Self::row_invalid).
        row_invalid: impl Into<Chance> => row_invalid.into();
        /// Sets [`row_api_error`](Self::row_api_error).
        row_api_error: impl Into<Chance> => row_api_error.into();
        /// Sets [`row_overloaded`](Self::row_overloaded).
        row_overloaded: impl Into<Chance> => row_overloaded.into();
        /// Sets [`shuffle`](Self::shuffle).
        shuffle: bool => shuffle;
        /// Sets [`not_found_after_create_s`](Self::not_found_after_create_s).
        not_found_after_create_s: f64 => not_found_after_create_s;
        /// Sets [`not_listed_after_create_s`](Self::not_listed_after_create_s).
        not_listed_after_create_s: f64 => not_listed_after_create_s;
        /// Sets [`not_found`](Self::not_found).
        not_found: impl Into<Chance> => not_found.into();
        /// Sets [`lost_reply`](Self::lost_reply).
        lost_reply: impl Into<Chance> => lost_reply.into();
        /// Sets [`cancel_takes_s`](Self::cancel_takes_s).
        cancel_takes_s: f64 => cancel_takes_s;
        /// Sets [`counts_while_running`](Self::counts_while_running).
        counts_while_running: bool => counts_while_running;
        /// Sets [`queue_rows`](Self::queue_rows).
        queue_rows: u64 => Some(queue_rows);
        /// Sets [`queue_tokens`](Self::queue_tokens).
        queue_tokens: u64 => Some(queue_tokens);
        /// Sets [`max_rows`](Self::max_rows).
        max_rows: usize => Some(max_rows);
        /// Sets [`max_bytes`](Self::max_bytes).
        max_bytes: usize => Some(max_bytes);
    }

    pub(in crate::sim) fn validate(&self) -> Result<(), String> {
        self.delay.validate("delay").map_err(|wrong| wrong.0)?;
        for (name, value) in [
            ("delay_per_row_ms", self.delay_per_row_ms),
            ("expires_after_s", self.expires_after_s),
            ("not_found_after_create_s", self.not_found_after_create_s),
            ("not_listed_after_create_s", self.not_listed_after_create_s),
            ("cancel_takes_s", self.cancel_takes_s),
        ] {
            // No date of a reply may overflow.
            if !(0.0..=YEAR_S).contains(&value) {
                return Err(format!("{name} must be zero or more, and at most a year"));
            }
        }
        for (name, value) in [
            ("stuck", self.stuck.0),
            ("expired", self.expired.0),
            ("expired_part", self.expired_part),
            ("all_error", self.all_error.0),
            ("row_invalid", self.row_invalid.0),
            ("row_api_error", self.row_api_error.0),
            ("row_overloaded", self.row_overloaded.0),
            ("not_found", self.not_found.0),
            ("lost_reply", self.lost_reply.0),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!("{name} must lie between 0 and 1"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        let sound = BatchConfig::new;
        assert_eq!(sound().validate(), Ok(()));
        for (name, bad) in [
            ("delay", sound().delay(Latency::new(-1.0, 0.0))),
            ("delay_per_row_ms", sound().delay_per_row_ms(f64::NAN)),
            ("expires_after_s", sound().expires_after_s(f64::INFINITY)),
            ("not_found_after_create_s", sound().not_found_after_create_s(-1.0)),
            ("not_listed_after_create_s", sound().not_listed_after_create_s(-1.0)),
            ("cancel_takes_s", sound().cancel_takes_s(-1.0)),
            ("stuck", sound().stuck(1.5)),
            ("expired", sound().expired(-0.5)),
            ("expired_part", sound().expired_part(f64::NAN)),
            ("all_error", sound().all_error(2.0)),
            ("row_invalid", sound().row_invalid(2.0)),
            ("row_api_error", sound().row_api_error(2.0)),
            ("row_overloaded", sound().row_overloaded(2.0)),
            ("not_found", sound().not_found(2.0)),
            ("lost_reply", sound().lost_reply(2.0)),
        ] {
            let wrong = bad.validate().unwrap_err();
            assert!(wrong.starts_with(name), "{name}: {wrong}");
        }
    }
}
