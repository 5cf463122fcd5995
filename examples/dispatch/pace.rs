//! How fast a run goes, now and since it began, and when it will be done. Pure.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// How long counts are remembered: what the time of the end is told by.
const MEMORY: Duration = Duration::from_secs(300);
/// What "now" means.
const NOW: Duration = Duration::from_secs(10);
/// Counts are remembered this far apart.
const STEP: Duration = Duration::from_secs(1);

/// What this run has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    /// Ids that have their line by this run: those of earlier runs say nothing of its rate.
    pub(crate) ids: u64,
    pub(crate) calls: u64,
    pub(crate) input_tokens: u64,
    pub(crate) output_tokens: u64,
}

/// The same, per minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) ids: f64,
    pub(crate) calls: f64,
    pub(crate) input_tokens: f64,
    pub(crate) output_tokens: f64,
}

/// Counts over time. Bounded, however long the run takes.
#[derive(Debug)]
pub(crate) struct Pace {
    started: Instant,
    /// The oldest first; the last one is the newest there is.
    seen: VecDeque<(Instant, Counted)>,
}

impl Pace {
    pub(crate) fn new(started: Instant) -> Self {
        Pace { started, seen: VecDeque::from([(started, Counted::default())]) }
    }

    /// Notes what is counted now.
    pub(crate) fn note(&mut self, now: Instant, counted: Counted) {
        // The newest takes the place of the last one, until that is old enough to stay.
        let stays = self
            .seen
            .iter()
            .nth_back(1)
            .is_none_or(|(before, _)| self.seen.back().is_some_and(|(last, _)| *last - *before >= STEP));
        if !stays {
            self.seen.pop_back();
        }
        self.seen.push_back((now, counted));
        while self.seen.len() > 2 && now - self.seen[1].0 >= MEMORY {
            self.seen.pop_front();
        }
    }

    /// Over the last ten seconds.
    pub(crate) fn now(&self) -> Rates {
        self.over(NOW)
    }

    /// Since the run began.
    pub(crate) fn average(&self) -> Rates {
        match self.seen.back() {
            Some(last) => between(&(self.started, Counted::default()), last),
            None => Rates::default(),
        }
    }

    /// How long so many more ids will take: as fast as in the last five minutes; where nothing was done in them, as in all.
    /// `None` before anything is done.
    pub(crate) fn left(&self, ids: u64) -> Option<Duration> {
        let rates = [self.over(MEMORY), self.average()];
        let rate = rates.into_iter().map(|rates| rates.ids).find(|rate| *rate > 0.0)?;
        Duration::try_from_secs_f64((ids as f64 / rate * 60.0).ceil()).ok()
    }

    fn over(&self, time: Duration) -> Rates {
        let Some(last) = self.seen.back() else { return Rates::default() };
        let from = self.seen.iter().rev().find(|(at, _)| last.0 - *at >= time).or(self.seen.front());
        from.map_or(Rates::default(), |from| between(from, last))
    }
}

fn between((from, before): &(Instant, Counted), (to, after): &(Instant, Counted)) -> Rates {
    let minutes = (*to - *from).as_secs_f64() / 60.0;
    let rate =
        |before: u64, after: u64| if minutes > 0.0 { after.saturating_sub(before) as f64 / minutes } else { 0.0 };
    Rates {
        ids: rate(before.ids, after.ids),
        calls: rate(before.calls, after.calls),
        input_tokens: rate(before.input_tokens, after.input_tokens),
        output_tokens: rate(before.output_tokens, after.output_tokens),
    }
}

/// How many ids there are, and how many of them have their answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids {
    /// Where that is known.
    pub(crate) total: Option<u64>,
    /// Answered by earlier runs.
    pub(crate) restored: u64,
    /// Answered by this one.
    pub(crate) here: u64,
}

impl Ids {
    pub(crate) fn done(&self) -> u64 {
        self.restored + self.here
    }

    pub(crate) fn left(&self) -> Option<u64> {
        Some(self.total?.saturating_sub(self.done()))
    }

    /// `131/1351 done (130 from before)`
    pub(crate) fn text(&self) -> String {
        let total = self.total.map(|total| format!("/{total}")).unwrap_or_default();
        let before = if self.restored > 0 { format!(" ({} from before)", self.restored) } else { String::new() };
        format!("{}{total} done{before}", self.done())
    }
}

/// A time to wait for, in two units at most: the rest is guesswork.
pub(crate) fn roughly(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}
