//! The one line before the first call: what is to be done, over what, how long it takes and what it costs, as far as that is known.

use std::{collections::BTreeMap, fmt::Write as _, path::Path, time::Duration};

use tower_quota::{
    headroom,
    org::{Family, Orgs},
};

use crate::{
    batches::Setting,
    forecast::{Limit, Work},
    pace::roughly,
    prices::{BATCH_SHARE, Prices},
    words,
};

/// What a run is about to do.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// The input, in words.
    pub(crate) what: &'a str,
    /// Ids that earlier runs have answered.
    pub(crate) answered: u64,
    /// What is to be sent; `None` for a stream.
    pub(crate) work: Option<&'a Work>,
    pub(crate) orgs: &'a Orgs,
    /// What the orgs' limits were when somebody last looked.
    pub(crate) limits: Vec<Limit>,
    /// What the simulated provider allows at best, in the demonstration.
    pub(crate) fluid_limit: Option<Duration>,
    pub(crate) prices: &'a Prices,
    /// How it goes in batches, if it does.
    pub(crate) batches: Option<&'a Setting>,
}

impl Plan<'_> {
    pub(crate) fn line(&self) -> String {
        let mut line = format!("plan: {}; ", self.what);
        // Writing to a string does not fail.
        let _ = match self.work {
            Some(work) => write!(line, "{} answered already, {} to send; ", self.answered, work.requests()),
            None => write!(line, "answered already and to send: unknown; "),
        };
        let over: Vec<_> = self.orgs.iter().map(|org| format!("{} at {}", org.name(), org.reached_at())).collect();
        let _ = write!(line, "over {}; limits: {}; ", over.join(", "), self.limits_text());
        if let Some(Setting { rows, in_flight, .. }) = self.batches {
            let at_once = rows.saturating_mul(*in_flight).saturating_mul(self.orgs.len());
            let _ =
                write!(line, "in batches of at most {rows}, {in_flight} at once an org, so {at_once} ids at once; ");
            let _ = match self.work.map(|work| work.cost(self.prices)) {
                Some(Ok(cost)) => {
                    let cost = words::money(cost * BATCH_SHARE);
                    write!(
                        line,
                        "time: a batch may take a day; cost: at most about {cost} (half of {})",
                        self.prices.what
                    )
                }
                Some(Err(why)) => write!(line, "time: a batch may take a day; cost: unknown ({why})"),
                None => write!(line, "time: a batch may take a day; cost: unknown"),
            };
            return line;
        }
        let time = self.work.and_then(|work| work.time(&self.limits));
        let _ = match (time, self.fluid_limit) {
            (_, Some(limit)) => write!(line, "time: at least {:.1} s; ", limit.as_secs_f64()),
            (Some(time), None) => write!(line, "time: about {}; ", roughly(time)),
            (None, None) => write!(line, "time: unknown; "),
        };
        let _ = match self.work.map(|work| work.cost(self.prices)) {
            Some(Ok(cost)) => write!(line, "cost: at most about {} ({})", words::money(cost), self.prices.what),
            Some(Err(why)) => write!(line, "cost: unknown ({why})"),
            None => write!(line, "cost: unknown"),
        };
        line
    }

    fn limits_text(&self) -> String {
        let mut known: BTreeMap<(&str, &Family), Vec<String>> = BTreeMap::new();
        for limit in &self.limits {
            let said = format!("{} {}", words::about(limit.per_minute), words::short(limit.resource));
            known.entry((&limit.org, &limit.family)).or_default().push(said);
        }
        let mut said: Vec<_> =
            known.iter().map(|((org, family), limits)| format!("{org} {family} {}", limits.join(" "))).collect();
        let unknown = self.orgs.iter().filter(|org| self.limits.iter().all(|limit| limit.org != org.name()));
        let unknown: Vec<_> = unknown.map(|org| org.name()).collect();
        if known.is_empty() {
            return "unknown until the first answer".to_owned();
        }
        if !unknown.is_empty() {
            said.push(format!("of {} unknown until the first answer", unknown.join(", ")));
        }
        said.join(", ")
    }
}

/// The limits of these orgs that the headroom file tells; none where it cannot be read, which is said when it is to be written.
pub(crate) fn known_limits(file: Option<&Path>, orgs: &Orgs) -> Vec<Limit> {
    let Some(Ok(Some(headroom))) = file.map(headroom::read) else { return Vec::new() };
    let ours = headroom.rows.into_iter().filter(|row| {
        orgs.iter().any(|org| org.name() == row.org && org.speaks() == row.api) && row.limit_per_minute > 0.0
    });
    let limit = |row: headroom::Row| Limit {
        org: row.org,
        family: row.family,
        resource: row.resource,
        per_minute: row.limit_per_minute,
    };
    ours.map(limit).collect()
}
