//! How a limit moves, and how high it may go.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    org::{BuildError, Family, Org},
    outcome::HINT_CEILING,
};

/// How a limit moves. Made by [`Settings::builder`]; the defaults suit providers that announce their limits.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) caps: Caps,
    pub(crate) floor: usize,
    pub(crate) start: f64,
    pub(crate) cut: f64,
    pub(crate) bare_cut: f64,
    pub(crate) step: f64,
    pub(crate) ceiling: Duration,
    pub(crate) spread: Duration,
    pub(crate) backoff: Duration,
    pub(crate) backoff_max: Duration,
    pub(crate) growth: f64,
    pub(crate) idle: Duration,
    pub(crate) rest: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            caps: Caps::default(),
            floor: 1,
            start: 0.25,
            cut: 0.5,
            bare_cut: 0.9,
            step: 1.0,
            ceiling: HINT_CEILING,
            spread: Duration::from_millis(50),
            backoff: Duration::from_millis(250),
            backoff_max: Duration::from_secs(30),
            growth: 1024.0,
            idle: Duration::from_secs(5),
            rest: Duration::from_secs(10),
        }
    }
}

impl Settings {
    /// The caps these settings go by.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// Starts from the defaults.
    #[must_use]
    pub fn builder() -> SettingsBuilder {
        SettingsBuilder { settings: Settings::default() }
    }
}

/// Builds [`Settings`]; what is wrong is said by [`build`](SettingsBuilder::build).
#[derive(Clone, Debug)]
pub struct SettingsBuilder {
    settings: Settings,
}

impl SettingsBuilder {
    /// The highest limit, by org and family. Default: [`Caps::default`].
    #[must_use]
    pub fn caps(mut self, caps: Caps) -> Self {
        self.settings.caps = caps;
        self
    }

    /// The lowest limit, at least 1. Default 1. A cap below it wins.
    #[must_use]
    pub fn floor(mut self, floor: usize) -> Self {
        self.settings.floor = floor;
        self
    }

    /// The fraction of the cap to start from, in `(0, 1]`. Default 0.25, the earlier dispatcher's.
    #[must_use]
    pub fn start(mut self, fraction: f64) -> Self {
        self.settings.start = fraction;
        self
    }

    /// What a hinted 429 multiplies the limit by, in `(0, 1)`, where answers tell the quota. Default 0.5.
    #[must_use]
    pub fn cut(mut self, factor: f64) -> Self {
        self.settings.cut = factor;
        self
    }

    /// What a 429 without a hint makes of the number in flight, in `(0, 1)`, where answers tell the quota. Default 0.9. Where
    /// they do not, the point of refusal itself is the measure.
    #[must_use]
    pub fn bare_cut(mut self, factor: f64) -> Self {
        self.settings.bare_cut = factor;
        self
    }

    /// Slots added per full, clean window after the first cut, where answers tell the quota. Default 1.
    #[must_use]
    pub fn step(mut self, slots: f64) -> Self {
        self.settings.step = slots;
        self
    }

    /// The longest hold; a longer hint parks the org, and one call probes it each time this has passed. Default 5 minutes.
    #[must_use]
    pub fn hold_ceiling(mut self, ceiling: Duration) -> Self {
        self.settings.ceiling = ceiling;
        self
    }

    /// A hold ends up to this much later, at random, so that several processes do not come back at one instant; never
    /// earlier. Default 50 ms.
    #[must_use]
    pub fn spread(mut self, spread: Duration) -> Self {
        self.settings.spread = spread;
        self
    }

    /// The first pause after a 429 without a hint that even a lone call got; it doubles up to `max`, plus up to a quarter
    /// at random. Default 250 ms and 30 s.
    #[must_use]
    pub fn backoff(mut self, first: Duration, max: Duration) -> Self {
        self.settings.backoff = first;
        self.settings.backoff_max = max;
        self
    }

    /// By what calls in flight may multiply within a second, above 1: providers refuse a sharp rise whatever the level.
    /// Default 1,024, that is a doubling each 100 ms: no round trip of a real call is much shorter, so it bounds what quick
    /// answers would make explode, and nothing else. Set less for a provider that refuses sooner: 2 doubles once a second.
    ///
    /// What was in use less than [`idle`](SettingsBuilder::idle) ago may be taken up again at once.
    #[must_use]
    pub fn growth_per_second(mut self, factor: f64) -> Self {
        self.settings.growth = factor;
        self
    }

    /// When fewer calls than the starting fraction of the cap have been in flight for so long, the next burst begins with that
    /// fraction again and grows from there; the limit itself stays. Default 5 s, above zero.
    #[must_use]
    pub fn idle(mut self, after: Duration) -> Self {
        self.settings.idle = after;
        self
    }

    /// The longest rest below a point of refusal before it is probed again, where nothing tells the limit; above zero. It is
    /// twice what has passed since the refusal before, at least a second, and at least twenty times a hint, so that a probe that
    /// is answered by a hold costs no more than a twentieth. Default 10 s: capacity that is added is found within half a
    /// minute.
    #[must_use]
    pub fn rest(mut self, longest: Duration) -> Self {
        self.settings.rest = longest;
        self
    }

    /// The settings.
    ///
    /// # Errors
    /// Names the field that is out of range.
    pub fn build(self) -> Result<Settings, BuildError> {
        let s = &self.settings;
        let open = |field: &str, value: f64| {
            if value.is_finite() && 0.0 < value && value < 1.0 {
                Ok(())
            } else {
                Err(BuildError::new(field, format!("{value} is not between 0 and 1")))
            }
        };
        open("cut", s.cut)?;
        open("bare_cut", s.bare_cut)?;
        if s.start != 1.0 {
            open("start", s.start)?;
        }
        if s.floor == 0 {
            return Err(BuildError::new("floor", "must be at least 1: a limit of 0 would never be left"));
        }
        if !(s.step.is_finite() && s.step > 0.0) {
            return Err(BuildError::new("step", format!("{} is not a positive number", s.step)));
        }
        if !(s.growth.is_finite() && s.growth > 1.0) {
            return Err(BuildError::new("growth_per_second", format!("{} is not a number above 1", s.growth)));
        }
        for (field, value) in [("hold_ceiling", s.ceiling), ("idle", s.idle), ("rest", s.rest)] {
            if value.is_zero() {
                return Err(BuildError::new(field, "must be longer than zero"));
            }
        }
        if s.backoff.is_zero() || s.backoff_max < s.backoff {
            return Err(BuildError::new(
                "backoff",
                "the first pause must be longer than zero and not longer than the longest",
            ));
        }
        Ok(self.settings)
    }
}

/// The most concurrent calls by model family: manners, not API limits.
///
/// Defaults: sonnet 100, haiku 120, opus 40, any other 40. They are those of the earlier dispatcher, whose single process ran
/// 2,500 calls at 100 in flight without a refusal (p50 1.5 s).
///
/// What was tuned wins ([`Tuning::cap`](crate::org::Tuning::cap)), then what was set for a family here, then the org's own
/// cap ([`Org::cap`]), then the default.
#[derive(Clone, Debug, Default)]
pub struct Caps {
    families: BTreeMap<Family, usize>,
}

/// The prefix of the variables read by [`Caps::from_env`].
const VARIABLE: &str = "TOWER_QUOTA_CAP_";

impl Caps {
    /// Reads `TOWER_QUOTA_CAP_<FAMILY>` (`TOWER_QUOTA_CAP_SONNET=80`) from the environment; other families keep their
    /// defaults. `_` in the variable stands for any of `-`, `.` and `_` in the family's name.
    ///
    /// # Errors
    /// Names the variable that is no whole number of at least 1.
    pub fn from_env() -> Result<Self, BuildError> {
        Caps::from_pairs(std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))))
    }

    /// The same from given pairs.
    ///
    /// # Errors
    /// As [`Caps::from_env`].
    pub fn from_pairs<K: AsRef<str>, V: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, BuildError> {
        let mut caps = Caps::default();
        for (name, value) in pairs {
            let (name, value) = (name.as_ref(), value.as_ref().trim());
            let Some(family) = name.strip_prefix(VARIABLE).filter(|family| !family.is_empty()) else { continue };
            if value.is_empty() {
                continue;
            }
            match value.parse() {
                Ok(cap) if cap >= 1 => caps.families.insert(Family::new(&spelling(family)), cap),
                _ => return Err(BuildError::new(name, format!("{value:?} is not a whole number of at least 1"))),
            };
        }
        Ok(caps)
    }

    /// Sets the cap of one family.
    ///
    /// # Errors
    /// If it is 0.
    pub fn family(mut self, family: &str, cap: usize) -> Result<Self, BuildError> {
        if cap == 0 {
            return Err(BuildError::new(format!("cap of {family}"), "must be at least 1"));
        }
        self.families.insert(Family::new(&spelling(family)), cap);
        Ok(self)
    }

    /// The cap of an org's handle: at least 1.
    #[must_use]
    pub fn of(&self, org: &Org) -> usize {
        let family = org.model_family().as_str();
        let set = self.families.get(&Family::new(&spelling(family))).copied();
        org.tuning().cap.or(set).or(org.own_cap()).unwrap_or(match family {
            "sonnet" => 100,
            "haiku" => 120,
            _ => 40,
        })
    }

    /// The families that have a cap of their own, by default or by what was set.
    pub(crate) fn families(&self) -> impl Iterator<Item = Family> + '_ {
        ["sonnet", "haiku"].map(Family::new).into_iter().chain(self.families.keys().cloned())
    }
}

fn spelling(family: &str) -> String {
    family.to_ascii_lowercase().replace(['-', '.'], "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn org(family: &str) -> Org {
        Org::new("a").family(&Family::of_model(family))
    }

    #[test]
    fn caps_come_from_the_family_unless_something_nearer_says_otherwise() {
        let defaults = Caps::default();
        for (model, cap) in
            [("claude-sonnet-4-5", 100), ("claude-HAIKU-4-5", 120), ("claude-opus-4-8", 40), ("gpt-4o", 40), ("", 40)]
        {
            assert_eq!(defaults.of(&org(model)), cap, "{model}");
        }
        let caps =
            Caps::from_pairs([("TOWER_QUOTA_CAP_SONNET", " 7 "), ("TOWER_QUOTA_CAP_GPT_4O", "9"), ("X", "1")]).unwrap();
        assert_eq!(caps.of(&org("claude-sonnet-4-5")), 7);
        assert_eq!(caps.of(&org("gpt-4o-2024-08-06")), 9);
        let own = Org::new("b").cap(3).family(&Family::new("haiku"));
        assert_eq!(caps.of(&own), 3, "the org's own cap beats the default");
        assert_eq!(caps.family("haiku", 5).unwrap().of(&own), 5, "what is set for the family beats the org's");
    }

    #[test]
    fn a_bad_cap_names_its_variable() {
        for bad in ["0", "-1", "many", "1.5"] {
            let error = Caps::from_pairs([("TOWER_QUOTA_CAP_OPUS", bad)]).unwrap_err();
            assert_eq!(error.field(), "TOWER_QUOTA_CAP_OPUS");
        }
        assert!(Caps::from_pairs([("TOWER_QUOTA_CAP_OPUS", "  ")]).is_ok(), "blank is absent");
        assert!(Caps::default().family("opus", 0).is_err());
    }

    #[test]
    fn a_bad_setting_names_its_field() {
        let b = Settings::builder;
        for (builder, field) in [
            (b().cut(0.0), "cut"),
            (b().cut(1.0), "cut"),
            (b().cut(f64::NAN), "cut"),
            (b().bare_cut(-0.5), "bare_cut"),
            (b().start(0.0), "start"),
            (b().start(1.1), "start"),
            (b().floor(0), "floor"),
            (b().step(0.0), "step"),
            (b().step(f64::INFINITY), "step"),
            (b().hold_ceiling(Duration::ZERO), "hold_ceiling"),
            (b().growth_per_second(1.0), "growth_per_second"),
            (b().growth_per_second(f64::NAN), "growth_per_second"),
            (b().idle(Duration::ZERO), "idle"),
            (b().rest(Duration::ZERO), "rest"),
            (b().backoff(Duration::ZERO, Duration::from_secs(1)), "backoff"),
            (b().backoff(Duration::from_secs(2), Duration::from_secs(1)), "backoff"),
        ] {
            assert_eq!(builder.build().unwrap_err().field(), field);
        }
        assert!(b().start(1.0).build().is_ok());
    }
}
