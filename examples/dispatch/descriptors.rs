//! File descriptors: every call takes one, and a process may have so many.

/// Those for output, reports, name look-ups and whatever else opens a file now and then.
#[cfg(unix)]
const SPARE: u64 = 16;

/// How many calls may run at once, `each` of them taking so many descriptors, where that is fewer than `calls`. The soft limit is
/// raised as far as it has to be and may be; `None` says that there are enough.
#[cfg(unix)]
pub(crate) fn room(calls: usize, each: usize) -> Option<Room> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let own = std::fs::read_dir("/dev/fd").map_or(SPARE, |open| open.count() as u64) + SPARE;
    // A connection that is opened while another one becomes free is kept: a quarter more than calls.
    let needed = own.saturating_add((calls.saturating_mul(each) as u64).saturating_mul(5).div_ceil(4));
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // No limit is `None`.
    let mut may = current?;
    if may < needed {
        let wanted = maximum.map_or(needed, |hard| hard.min(needed));
        if wanted > may && setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok() {
            may = wanted;
        }
    }
    (may < needed).then(|| Room { may, calls: (may.saturating_sub(own) as usize * 4 / 5 / each).max(1) })
}

#[cfg(not(unix))]
pub(crate) fn room(_: usize, _: usize) -> Option<Room> {
    None
}

/// What there is too little of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Descriptors that this process may have.
    pub(crate) may: u64,
    /// Calls that they allow at once.
    pub(crate) calls: usize,
}

/// The largest cap that brings the sum of all caps down to `room`; never below 1.
pub(crate) fn level(caps: &[usize], room: usize) -> usize {
    let mut sorted = caps.to_vec();
    sorted.sort_unstable();
    let mut left = room;
    for (nth, cap) in sorted.iter().enumerate() {
        let share = left / (sorted.len() - nth);
        if *cap > share {
            return share.max(1);
        }
        left -= cap;
    }
    sorted.last().copied().unwrap_or(1).max(1)
}
