//! What an answer says of its buckets.

use std::time::Duration;

use super::least;

/// What a provider meters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Calls.
    Requests,
    /// Tokens of the prompt.
    InputTokens,
    /// Tokens of the answer.
    OutputTokens,
    /// Tokens of both, counted together.
    Tokens,
}

impl Resource {
    /// Every resource, in the order of [`Resource::index`].
    pub const ALL: [Self; 4] = [Self::Requests, Self::InputTokens, Self::OutputTokens, Self::Tokens];

    /// Those that are counted in tokens.
    pub(crate) const TOKENS: [Self; 3] = [Self::InputTokens, Self::OutputTokens, Self::Tokens];

    /// The place of this resource in [`Resource::ALL`], for tables by resource.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// By the name that most headers have for it.
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "requests" => Self::Requests,
            "input-tokens" => Self::InputTokens,
            "output-tokens" => Self::OutputTokens,
            "tokens" => Self::Tokens,
            _ => return None,
        })
    }
}

/// What one answer says of one resource. A field is `None` where the answer says nothing, or nothing that makes sense.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Reading {
    /// What the provider allows per minute. Above zero.
    pub limit: Option<f64>,
    /// What may still be spent now.
    pub remaining: Option<f64>,
    /// How long until the bucket is full again (by the IETF's word: until more is there), counted from the answer's `Date`.
    /// Above zero and not capped.
    pub reset: Option<Duration>,
}

impl Reading {
    /// The stricter of two things that are said of one resource.
    ///
    /// The one that leaves less counts, with its own limit and its own reset, since what is left in one bucket, what comes
    /// back to another and when a third is full have nothing to do with each other. Where it does not tell its limit, the
    /// other's will do; and so will the other's reset, if nothing says what that one leaves. Where both leave as much, or
    /// neither says what it leaves, each figure counts by itself: the lower limit, the longer reset.
    ///
    /// ```
    /// use tower_quota::dialect::Reading;
    ///
    /// let reading = |limit, remaining| {
    ///     let mut reading = Reading::default();
    ///     (reading.limit, reading.remaining) = (limit, remaining);
    ///     reading
    /// };
    /// let (minute, day) = (reading(Some(100.0), Some(0.0)), reading(Some(0.7), Some(900.0)));
    /// assert_eq!(minute.stricter(day), minute);
    /// assert_eq!(reading(None, Some(5.0)).stricter(day), reading(Some(0.7), Some(5.0)));
    /// assert_eq!(reading(Some(60.0), None).stricter(day), day);
    /// ```
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        let (lead, rest) = match (self.remaining, other.remaining) {
            (Some(ours), Some(theirs)) if ours < theirs => (self, other),
            (Some(ours), Some(theirs)) if theirs < ours => (other, self),
            (Some(_), None) => (self, other),
            (None, Some(_)) => (other, self),
            (remaining, _) => {
                let limit = least(self.limit, other.limit);
                return Reading { limit, remaining, reset: self.reset.max(other.reset) };
            }
        };
        let reset = lead.reset.or(rest.reset.filter(|_| rest.remaining.is_none()));
        Reading { limit: lead.limit.or(rest.limit), remaining: lead.remaining, reset }
    }

    /// Whether it says nothing at all.
    fn is_empty(&self) -> bool {
        self.limit.is_none() && self.remaining.is_none() && self.reset.is_none()
    }
}

/// What one answer says of every resource.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Readings([Reading; Resource::ALL.len()]);

impl Readings {
    /// What the answer says of this resource; `None` where it says nothing of it.
    #[must_use]
    pub fn get(&self, resource: Resource) -> Option<Reading> {
        Some(self.0[resource.index()]).filter(|reading| !reading.is_empty())
    }

    /// What the answer says of this resource, to be written: for dialects.
    pub fn entry(&mut self, resource: Resource) -> &mut Reading {
        &mut self.0[resource.index()]
    }

    /// Whether the answer says nothing about any resource.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Reading::is_empty)
    }

    /// Without figures that make no sense. Ours never have any; those of a foreign dialect may.
    #[must_use]
    pub(crate) fn sound(mut self) -> Self {
        let is_sound = |figure: &f64| figure.is_finite() && *figure >= 0.0;
        for reading in &mut self.0 {
            reading.limit = reading.limit.filter(is_sound);
            reading.remaining = reading.remaining.filter(is_sound);
        }
        self
    }

    /// Of each resource the [stricter](Reading::stricter) of both.
    #[must_use]
    pub fn stricter(mut self, other: Self) -> Self {
        if self.is_empty() {
            return other;
        }
        for (ours, theirs) in self.0.iter_mut().zip(other.0) {
            *ours = ours.stricter(theirs);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(limit: impl Into<Option<u32>>, remaining: impl Into<Option<u32>>, reset: u64) -> Reading {
        let figure = |figure: Option<u32>| figure.map(f64::from);
        let reset = Some(Duration::from_secs(reset)).filter(|reset| !reset.is_zero());
        Reading { limit: figure(limit.into()), remaining: figure(remaining.into()), reset }
    }

    #[test]
    fn an_index_is_the_place_in_the_list() {
        for (place, resource) in Resource::ALL.into_iter().enumerate() {
            assert_eq!(resource.index(), place);
        }
    }

    #[test]
    fn the_stricter_is_the_same_whichever_comes_first() {
        let nothing = reading(None, None, 0);
        for (one, other, expected) in [
            // What leaves less counts, with all it says.
            (reading(100, 0, 20), reading(1, 900, 3000), reading(100, 0, 20)),
            (reading(100, 899, 20), reading(1, 900, 3000), reading(100, 899, 20)),
            (reading(100, 901, 20), reading(1, 900, 3000), reading(1, 900, 3000)),
            // ... and with the other's limit, where it has none; but not with the other's reset.
            (reading(None, 0, 0), reading(1, 900, 3000), reading(1, 0, 0)),
            (reading(None, 0, 7), reading(1, 900, 3000), reading(1, 0, 7)),
            // As much: each figure by itself.
            (reading(100, 5, 20), reading(1, 5, 30), reading(1, 5, 30)),
            (reading(1, 5, 20), reading(100, 5, 30), reading(1, 5, 30)),
            (reading(None, 0, 20), reading(None, 0, 0), reading(None, 0, 20)),
            // Nobody knows what one leaves: it completes the other.
            (reading(60, 5, 0), reading(1, None, 30), reading(60, 5, 30)),
            (reading(None, 5, 9), reading(60, None, 30), reading(60, 5, 9)),
            (reading(60, None, 9), reading(50, None, 30), reading(50, None, 30)),
            (reading(60, 5, 9), nothing, reading(60, 5, 9)),
            (nothing, nothing, nothing),
        ] {
            assert_eq!(one.stricter(other), expected, "{one:?} {other:?}");
            assert_eq!(other.stricter(one), expected, "{other:?} {one:?}");
            for (place, resource) in Resource::ALL.into_iter().enumerate() {
                let (mut ours, mut theirs) = (Readings::default(), Readings::default());
                (*ours.entry(resource), *theirs.entry(resource)) = (one, other);
                let both = ours.stricter(theirs);
                for (other, resource) in Resource::ALL.into_iter().enumerate() {
                    let expected = Some(expected).filter(|_| other == place && expected != nothing);
                    assert_eq!(both.get(resource), expected);
                }
                assert_eq!(both.is_empty(), expected == nothing);
            }
        }
    }
}
