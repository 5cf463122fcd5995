//! When a batch is asked about, given up, or taken for stuck, and when a chunk is full. Pure: what time it is comes from outside.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::{Bounds, Remote, RemoteState};

/// Anthropic and OpenAI give a batch a day; one that does not say so is given an hour more.
const LIFETIME_UNTOLD: Duration = Duration::from_secs(25 * 3600);

/// The first wait after a failed call, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// By how much a wait between polls is drawn shorter or longer.
const JITTER: f64 = 0.1;

/// For so many times as long as for its next row a chunk that is not full waits in all.
const PATIENCE: u32 = 30;

/// What a batch goes by.
#[derive(Clone, Debug)]
pub(super) struct Law {
    pub(super) poll_first: Duration,
    pub(super) poll_longest: Duration,
    pub(super) poll_growth: f64,
    /// After it has expired.
    pub(super) grace: Duration,
    /// For so long after its creation it may not be there yet.
    pub(super) unseen_at_first: Duration,
    /// For so long it may not be there later.
    pub(super) unseen_later: Duration,
    /// Without a success for so long it is stuck; `None` if it never is.
    pub(super) stuck_after: Option<Duration>,
    /// How far apart a lost batch is looked for twice.
    pub(super) look_again: Duration,
}

impl Default for Law {
    fn default() -> Self {
        Law {
            poll_first: Duration::from_secs(30),
            poll_longest: Duration::from_secs(120),
            poll_growth: 1.5,
            grace: Duration::from_secs(30 * 60),
            unseen_at_first: Duration::from_secs(60),
            unseen_later: Duration::from_secs(180),
            stuck_after: Some(Duration::from_secs(4 * 3600)),
            look_again: Duration::from_secs(60),
        }
    }
}

impl Law {
    /// How long to wait until the next poll, after a wait of `last`; before it is [drawn](jittered).
    pub(super) fn next_poll(&self, last: Option<Duration>) -> Duration {
        match last {
            None => self.poll_first,
            Some(last) => last.mul_f64(self.poll_growth).min(self.poll_longest),
        }
    }

    /// When a batch is given up.
    pub(super) fn deadline(&self, created: SystemTime, expires: Option<SystemTime>) -> SystemTime {
        let end = expires.and_then(|expires| expires.checked_add(self.grace));
        end.or_else(|| created.checked_add(LIFETIME_UNTOLD)).unwrap_or(created)
    }

    /// Whether a batch of this age will get nowhere. One whose rows are not counted is not known to.
    pub(super) fn is_stuck(&self, age: Duration, remote: &Remote) -> bool {
        let idle = remote.counts.is_some_and(|counts| counts.succeeded == 0);
        self.stuck_after.is_some_and(|after| age >= after) && idle && remote.state == RemoteState::Processing
    }

    /// Whether a batch may be there though it is not seen: `age` after its creation, and `unseen` after it was first missed.
    pub(super) fn may_appear(&self, age: Duration, unseen: Duration) -> bool {
        age <= self.unseen_at_first || unseen <= self.unseen_later
    }
}

/// The wait before another attempt at a call that has failed `failed` times, at least `hint`. `drawn` is in `0.0..1.0`.
pub(super) fn backoff(failed: u32, hint: Option<Duration>, drawn: f64) -> Duration {
    let (first, longest) = BACKOFF;
    let span = first.saturating_mul(1u32.checked_shl(failed.saturating_sub(1)).unwrap_or(u32::MAX)).min(longest);
    hint.unwrap_or_default().max(span.mul_f64(0.5 + drawn / 2.0))
}

/// A wait made a little shorter or longer. `drawn` is in `0.0..1.0`.
pub(super) fn jittered(span: Duration, drawn: f64) -> Duration {
    span.mul_f64(1.0 - JITTER + 2.0 * JITTER * drawn)
}

/// What is known of a chunk that is not full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathering {
    /// When its first row came, and its last one.
    pub(super) since: Instant,
    pub(super) last: Instant,
    /// It is said that nobody else will come.
    pub(super) flushed: bool,
    /// It is said that others will.
    pub(super) held: bool,
    /// Rows may come back in a moment.
    pub(super) unsettled: bool,
}

impl Gathering {
    /// When it goes, if an org has had a place for it since `free`.
    pub(super) fn due(&self, linger: Duration, free: Instant) -> Instant {
        let longest = linger.saturating_mul(PATIENCE);
        let at_last = after(self.since.max(free), longest);
        match self {
            Gathering { unsettled: true, .. } => at_last,
            Gathering { flushed: true, .. } => self.since,
            Gathering { held: true, .. } => at_last,
            _ => after(self.last.max(free), linger).min(at_last),
        }
    }

    /// From when on it goes before what is closed later, full or not: it may be of a kind that is rare.
    pub(super) fn overdue(&self, linger: Duration) -> Instant {
        after(self.since, linger.saturating_mul(PATIENCE))
    }
}

fn after(from: Instant, span: Duration) -> Instant {
    // As good as never.
    from.checked_add(span).unwrap_or_else(|| from + Duration::from_secs(1 << 30))
}

/// How much a chunk holds, or may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: usize,
    /// As the provider counts rows.
    pub(super) weight: usize,
    pub(super) bytes: usize,
}

impl Size {
    /// The most of one chunk.
    pub(super) fn most(rows: usize, bytes: usize, bounds: Bounds) -> Self {
        Size { rows, weight: bounds.rows, bytes: bytes.min(bounds.bytes) }
    }

    /// With one more row, and the byte that separates it from the next.
    pub(super) fn with(self, weight: usize, bytes: usize) -> Self {
        Size {
            rows: self.rows.saturating_add(1),
            weight: self.weight.saturating_add(weight),
            bytes: self.bytes.saturating_add(bytes).saturating_add(1),
        }
    }

    /// Whether so much may go together. One row always may: what is too large for any batch was refused before.
    pub(super) fn fits(self, most: Size) -> bool {
        self.rows <= 1 || self.rows <= most.rows && self.weight <= most.weight && self.bytes <= most.bytes
    }

    /// Whether no further row can fit.
    pub(super) fn is_full(self, most: Size) -> bool {
        !self.with(1, 0).fits(most)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::Counts;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn at(secs: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(secs)
    }

    #[test]
    fn polls_come_ever_more_rarely_and_every_two_minutes_at_least() {
        let law = Law::default();
        let mut last = None;
        let waits: Vec<_> = (0..6)
            .map(|_| {
                last = Some(law.next_poll(last));
                last.unwrap().as_secs_f64()
            })
            .collect();
        assert_eq!(waits, [30.0, 45.0, 67.5, 101.25, 120.0, 120.0]);
    }

    #[test]
    fn a_batch_is_given_up_half_an_hour_after_it_has_expired_or_a_day_and_an_hour_after_it_was_made() {
        let law = Law::default();
        assert_eq!(law.deadline(at(0), Some(at(86_400))), at(86_400 + 1_800));
        assert_eq!(law.deadline(at(7), None), at(7 + 25 * 3_600));
    }

    #[test]
    fn a_batch_is_stuck_after_four_hours_without_a_success_if_its_rows_are_counted() {
        let law = Law::default();
        let remote = |state, counts| {
            let mut remote = Remote::new("b", state);
            remote.counts = counts;
            remote
        };
        let idle = Counts { processing: 10, ..Counts::default() };
        let busy = Counts { succeeded: 1, ..idle };
        let is_stuck = |age, state, counts| law.is_stuck(secs(age), &remote(state, counts));
        use RemoteState::{Canceling, Processing};
        assert!(is_stuck(4 * 3_600, Processing, Some(idle)));
        assert!(!is_stuck(4 * 3_600 - 1, Processing, Some(idle)), "before");
        assert!(!is_stuck(4 * 3_600, Processing, Some(busy)), "with a success");
        assert!(!is_stuck(4 * 3_600, Processing, None), "not counted");
        assert!(!is_stuck(4 * 3_600, Canceling, Some(idle)), "it is cancelled already");
        let never = Law { stuck_after: None, ..Law::default() };
        assert!(!never.is_stuck(secs(1 << 30), &remote(Processing, Some(idle))));
    }

    fn gathering(now: Instant, last: u64) -> Gathering {
        let last = now + secs(last);
        Gathering { since: now, last, flushed: false, held: false, unsettled: false }
    }

    #[tokio::test(start_paused = true)]
    async fn a_chunk_goes_so_long_after_its_last_row_or_after_a_place_was_there_for_it() {
        let now = Instant::now();
        let due = |gathering: Gathering, free: u64| (gathering.due(secs(2), now + secs(free)) - now).as_secs();
        assert_eq!(due(gathering(now, 5), 1), 7);
        assert_eq!(due(gathering(now, 5), 100), 102, "rows come when a batch has ended");
        assert_eq!(due(gathering(now, 59), 0), 60, "and not for ever");
        let (held, flushed) =
            (Gathering { held: true, ..gathering(now, 5) }, Gathering { flushed: true, ..gathering(now, 5) });
        assert_eq!(due(held, 3), 63, "more are expected, but they do not come");
        assert_eq!(due(flushed, 3), 0);
        assert_eq!(due(Gathering { flushed: true, ..held }, 3), 0);
        assert_eq!(due(Gathering { unsettled: true, ..flushed }, 3), 63, "rows may come back at once");
    }

    #[test]
    fn a_batch_may_be_unseen_for_a_minute_after_its_creation_and_for_three_later() {
        let law = Law::default();
        assert!(law.may_appear(secs(60), secs(60)));
        assert!(law.may_appear(secs(3_600), secs(180)));
        assert!(!law.may_appear(secs(3_600), secs(181)));
    }

    proptest! {
        #[test]
        fn no_wait_is_longer_than_told_nor_shorter_than_the_first(drawn in 0.0f64..1.0, polls in 0usize..50, failed in 0u32..200, hint in 0u64..1_000) {
            let law = Law::default();
            let mut last = None;
            for _ in 0..=polls {
                let next = law.next_poll(last);
                prop_assert!(last.is_none_or(|last| next >= last));
                last = Some(next);
            }
            let wait = jittered(last.unwrap(), drawn);
            prop_assert!(wait >= law.poll_first.mul_f64(0.89) && wait <= law.poll_longest.mul_f64(1.11));
            let wait = backoff(failed, Some(secs(hint)), drawn);
            prop_assert!(wait >= secs(hint) && wait <= secs(hint.max(60)));
            prop_assert!(backoff(failed, None, drawn) >= Duration::from_millis(500));
        }

        #[test]
        fn no_row_waits_for_ever(last in 0u64..1_000, free in 0u64..1_000, linger in 0u64..3_600, said in any::<[bool; 3]>()) {
            let now = Instant::now();
            let [flushed, held, unsettled] = said;
            let gathering = Gathering { flushed, held, unsettled, ..gathering(now, last) };
            let due = gathering.due(secs(linger), now + secs(free));
            prop_assert!(due <= now + secs(free + linger * u64::from(PATIENCE)));
            prop_assert!(flushed || due >= now + secs(free + linger), "nor does it go before a place was there for so long");
            prop_assert_eq!(gathering.overdue(secs(linger)), now + secs(linger * u64::from(PATIENCE)));
        }

        #[test]
        fn chunks_hold_as_much_as_fits_and_never_more(rows in prop::collection::vec((1usize..4, 0usize..400), 0..200), most_rows in 1usize..20, most_bytes in 1usize..1_000) {
            let most = Size::most(most_rows, most_bytes, Bounds::new(20, 800));
            let (mut chunks, mut open, mut count) = (vec![], Size::default(), 0);
            for (weight, bytes) in &rows {
                let with = open.with(*weight, *bytes);
                if with.fits(most) {
                    open = with;
                } else {
                    prop_assert!(open.rows > 0);
                    chunks.push((open, Size::default().with(*weight, *bytes)));
                    open = Size::default().with(*weight, *bytes);
                }
                count += 1;
                if open.is_full(most) {
                    chunks.push((open, Size::default().with(1, 0)));
                    open = Size::default();
                }
            }
            for (chunk, next) in &chunks {
                prop_assert!(chunk.rows == 1 || chunk.rows <= most_rows && chunk.weight <= 20 && chunk.bytes <= most_bytes.min(800));
                let both = Size { rows: chunk.rows + next.rows, weight: chunk.weight + next.weight, bytes: chunk.bytes + next.bytes };
                prop_assert!(!both.fits(most), "it would have held more");
            }
            prop_assert_eq!(chunks.iter().map(|(chunk, _)| chunk.rows).sum::<usize>() + open.rows, count);
        }
    }
}
