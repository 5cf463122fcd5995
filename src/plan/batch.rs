//! The batch path: so many batches over few lanes, each as long as chance makes it, and a few wedged. Pure arithmetic in seconds,
//! without a loop over batches.
//!
//! A lane is one batch of one org; the next batch begins when one has ended. When the last of them begins follows from renewal
//! theory; when all have ended is the largest of what is then still at work. A wedged batch keeps its lane until it is given up, and
//! its rows go direct. How many are wedged is Poisson's, and each number has a plan of its own.

use super::{
    fleet::BatchModel,
    spread::{Spread, evenly, normal, normal_quantile, zero, zeros},
};

/// Rows a batch that are tried. An earlier dispatcher's default is among them.
const CHUNKS: [u64; 8] = [100, 250, 500, 1_000, 2_000, 4_000, 8_000, 16_000];
/// The smallest is taken that is no more than this worse than the best.
const NEARLY: f64 = 1.05;
/// Of a queue's cap this part is ours: colleagues have the rest.
const OURS: f64 = 0.9;
/// Bytes of a row besides its prompt, and of a token of that.
const ROW_BYTES: f64 = 400.0;
const TOKEN_BYTES: f64 = 4.0;
/// Numbers of wedged batches that are told apart, one by one where few are expected, else as quantiles.
const WEDGED: usize = 12;
const QUANTILES: usize = 8;
/// How exactly times are found, as a part of them.
const CLOSE: f64 = 1e-5;

/// How a workload is cut into batches, whatever its number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    pub(crate) chunk: u64,
    /// Batches at work at once, of each org.
    pub(crate) each: Vec<usize>,
    model: BatchModel,
    /// Full batches.
    full: Renewals,
    /// How long the rows of one wedged batch take on the direct path.
    redo: f64,
}

impl Lanes {
    /// `orgs` are batches at once and queue cap; `None` if none takes a batch.
    pub(crate) fn new(orgs: &[(usize, u64)], model: &BatchModel, input_p95: f64) -> Option<Self> {
        let by_bytes = (model.max_bytes as f64 / (ROW_BYTES + TOKEN_BYTES * input_p95)) as u64;
        let queue =
            |(most, rows): &(usize, u64)| if *most == 0 { 0 } else { (*rows as f64 * OURS) as u64 / *most as u64 };
        let most = model.max_rows.min(by_bytes).min(orgs.iter().map(queue).max()?);
        if most == 0 {
            return None;
        }
        // Seconds of a lane for a row that comes back from a batch, those of wedged ones included.
        let price = |rows: u64| {
            let (rows, wedged) = (rows as f64, model.wedged(rows as f64));
            (turnaround(model, rows).mean() + model.stuck_after.as_secs_f64() * wedged / (1.0 - wedged)) / rows
        };
        let chunks = || CHUNKS.into_iter().chain([most]).filter(|chunk| *chunk <= most);
        let best = chunks().map(price).fold(f64::INFINITY, f64::min);
        let chosen = chunks().filter(|chunk| price(*chunk) <= best * NEARLY).min()?;
        let chunk = model.chunk.map_or(chosen, |chunk| chunk.min(most));
        let fits = |(most, rows): &(usize, u64)| (*most).min(((*rows as f64 * OURS) as u64 / chunk) as usize);
        let each: Vec<_> = orgs.iter().map(fits).collect();
        let full = Renewals::new(turnaround(model, chunk as f64), each.iter().sum::<usize>() as f64);
        Some(Lanes { chunk, each, model: model.clone(), full, redo: 0.0 })
    }

    /// What the rows of one wedged batch take when they are sent direct.
    pub(crate) fn redo(mut self, seconds: f64) -> Self {
        self.redo = seconds;
        self
    }

    pub(crate) fn all(&self) -> usize {
        self.each.iter().sum()
    }

    pub(crate) fn batches(&self, rows: u64) -> u64 {
        rows.div_ceil(self.chunk)
    }

    /// How often each lane is used.
    pub(crate) fn passes(&self, rows: u64) -> u64 {
        self.batches(rows).div_ceil(self.all() as u64)
    }

    /// The part of rows that is expected in wedged batches.
    pub(crate) fn wedged(&self, rows: u64) -> f64 {
        self.model.wedged(rows.min(self.chunk) as f64)
    }

    pub(crate) fn run(&self, rows: u64) -> Batches {
        let size = rows.min(self.chunk) as f64;
        let (batches, lanes) = (self.batches(rows) as f64, self.all() as f64);
        // What is left over is a smaller batch, and the last.
        let left = rows - (rows - 1) / self.chunk * self.chunk;
        let last = turnaround(&self.model, left as f64);
        let batch = if rows < self.chunk { last } else { self.full.batch };
        let first = lanes.min(batches);
        let later = batches - first;
        let begins = self.full.ended(later);
        let full_begins = self.full.ended(later - 1.0);
        let first_end = self.full.first.min(begins);
        let deviation = self.full.deviation(later, begins);
        let mut run = Batches {
            batch,
            last,
            full_begins,
            batches,
            lanes,
            first,
            begins,
            first_end,
            deviation,
            stuck: self.model.stuck_after.as_secs_f64(),
            redo: self.redo,
            wedged: Vec::new(),
        };
        let counts = wedged(batches * self.model.wedged(size));
        run.wedged = counts.into_iter().map(|(count, chance)| (count, chance, run.begins_with(count))).collect();
        run
    }
}

/// How long a batch takes until a poll finds it ended.
fn turnaround(model: &BatchModel, rows: f64) -> Spread {
    let plain = Spread::lognormal(model.median(rows), model.sigma);
    // Pauses between polls grow by half, from 30 s to the longest: about a third of what has passed.
    let pause = (plain.mean() / 3.0).max(30.0).min(model.poll.as_secs_f64());
    Spread::of_moments(plain.mean() + pause / 2.0, (plain.variance() + pause * pause / 12.0).sqrt())
}

/// How many are wedged, and how likely that is: Poisson's, cut off, or a few quantiles where the mean is large.
fn wedged(mean: f64) -> Vec<(f64, f64)> {
    if mean > 4.0 {
        let part = 1.0 / QUANTILES as f64;
        let at = |i: usize| (mean + mean.sqrt() * normal_quantile((i as f64 + 0.5) * part)).max(0.0);
        return (0..QUANTILES).map(|i| (at(i), part)).collect();
    }
    let mut chance = (-mean).exp();
    let mut all = Vec::with_capacity(WEDGED);
    for count in 0..WEDGED {
        if chance < 1e-4 && count as f64 > mean {
            break;
        }
        all.push((count as f64, chance));
        chance *= mean / (count + 1) as f64;
    }
    all
}

/// Batches one after the other in each of some lanes.
#[derive(Clone, Debug)]
struct Renewals {
    batch: Spread,
    lanes: f64,
    /// Of one, of two, ... in a row: the logarithm's mean and standard deviation.
    sums: Vec<(f64, f64)>,
    /// The first has ended.
    first: f64,
}

/// From so many a lane on the time is a line.
const STEADY: f64 = 10.0;

impl Renewals {
    fn new(batch: Spread, lanes: f64) -> Self {
        let sum = |count: usize| batch.times(count as f64).logarithm();
        let mut all = Renewals { batch, lanes, sums: (1..=(STEADY * 1.6) as usize + 3).map(sum).collect(), first: 0.0 };
        all.first = all.ended(1.0);
        all
    }

    /// When so many have ended, in all lanes.
    fn ended(&self, count: f64) -> f64 {
        if count <= 0.0 {
            return 0.0;
        }
        let (mean, each) = (self.batch.mean(), (count - 0.4) / self.lanes);
        if each > STEADY {
            return mean * (each + (1.0 - self.batch.cv().powi(2)) / 2.0);
        }
        // How many have ended in a lane by then: the sum over the chances that at least one has, at least two, ...
        let sums = &self.sums[..(each * 1.6) as usize + 3];
        let by = |at: f64| {
            let ln = at.ln();
            let chances = sums.iter().map(|(mu, sigma)| (ln - mu) / sigma).take_while(|z| *z > -6.0);
            chances.map(|z| if z > 6.0 { 1.0 } else { normal(z) }).sum::<f64>()
        };
        let most = mean * (each + 6.0);
        zero(0.0, most, most * CLOSE / 4.0, |at| by(at) - each)
    }

    /// The standard deviation of the time at which so many have ended.
    fn deviation(&self, count: f64, ended: f64) -> f64 {
        if count <= 0.0 {
            return 0.0;
        }
        let Renewals { batch, lanes, .. } = self;
        let part = count / (lanes + 1.0);
        let deviation = if part < 0.8 {
            // The spread of one of few in order.
            let width = batch.mean() * 1e-3;
            let density = (batch.below(ended + width) - batch.below(ended - width)) / (2.0 * width);
            (part * (1.0 - part) / (lanes + 2.0)).sqrt() / density.max(1e-12)
        } else {
            (batch.variance() * count).sqrt() / lanes
        };
        deviation.min(ended)
    }
}

/// So many batches.
#[derive(Debug)]
pub(crate) struct Batches {
    batch: Spread,
    /// The last batch may be smaller.
    last: Spread,
    batches: f64,
    lanes: f64,
    /// Begun at once.
    first: f64,
    /// The last begins.
    begins: f64,
    /// The one before it begins.
    full_begins: f64,
    /// The first has ended.
    first_end: f64,
    deviation: f64,
    stuck: f64,
    redo: f64,
    /// How many may be wedged, how likely that is, and when the last begins then.
    wedged: Vec<(f64, f64, f64)>,
}

impl Batches {
    /// When the last begins if so many lanes are lost for a while.
    fn begins_with(&self, wedged: f64) -> f64 {
        if self.begins == 0.0 || wedged == 0.0 {
            return self.begins;
        }
        let mut begins = self.begins;
        for _ in 0..4 {
            // One that begins at once keeps its lane for the whole time that it is stuck, one that begins later for what is left.
            let whole = self.stuck.min(begins);
            let part =
                if begins < self.stuck { begins / 2.0 } else { self.stuck * (1.0 - self.stuck / (2.0 * begins)) };
            let at_once = self.first / self.batches;
            let lost = at_once * whole + (1.0 - at_once) * part;
            let lost = (wedged * (lost - self.batch.mean().min(lost))).min(0.9 * self.lanes * begins);
            begins = self.begins + lost / self.lanes;
        }
        begins
    }

    /// The chance that all have ended by `x`, if so many are wedged and the last begins then; as its logarithm, turned round.
    fn late(&self, wedged: f64, begins: f64, x: f64) -> f64 {
        let left = x - self.stuck - self.redo;
        if x <= begins || wedged > 0.0 && left < 0.0 {
            return f64::INFINITY;
        }
        let all = |count: f64, chance: f64| if count > 0.0 && chance < 1.0 { -count * chance.ln() } else { 0.0 };
        let sound = (1.0 - wedged / self.batches).max(0.0);
        let later = self.batches - self.first;
        // The last begins for sure, and so does the one before it; those before that, evenly.
        let mut ends = self.last.below(x - begins);
        let full = self.first - if later > 0.0 { 0.0 } else { 1.0 };
        let mut late = all(full * sound, self.batch.below(x));
        if later > 1.0 && ends > 0.0 {
            let scale = begins / self.begins.max(1e-9);
            let (from, until) = (self.first_end * scale, self.full_begins * scale);
            let (longer, going) = self.batch.going_on(x - until);
            ends *= 1.0 - longer;
            if later > 2.0 && until > from {
                late += (later - 2.0) * sound / (until - from) * (self.batch.going_on(x - from).1 - going);
            }
        }
        late += all(sound, ends);
        if wedged > 0.0 {
            let at_once = self.first / self.batches;
            let then = if begins > 0.0 { (left / begins).clamp(0.0, 1.0) } else { 1.0 };
            late += all(wedged, at_once + (1.0 - at_once) * then);
        }
        late
    }

    /// The chance that all have ended by `x`.
    pub(crate) fn below(&self, x: f64) -> f64 {
        let mut sum = 0.0;
        for (wedged, chance, begins) in &self.wedged {
            // Three points of a normal (Gauss and Hermite).
            let off = self.deviation * 3.0_f64.sqrt();
            let at = |off: f64| (-self.late(*wedged, (begins + off).max(0.0), x)).exp();
            sum += chance * if self.deviation > 0.0 { (at(-off) + 4.0 * at(0.0) + at(off)) / 6.0 } else { at(0.0) };
        }
        sum
    }

    /// They have hardly ever ended earlier.
    fn least(&self) -> f64 {
        self.batch.quantile(1e-4)
    }

    /// The times by which all have ended, with these chances, which rise.
    pub(crate) fn quantiles<const N: usize>(&self, parts: [f64; N]) -> [f64; N] {
        let most = self.begins * 3.0 + self.batch.far() + self.stuck + self.redo;
        let by = |ln: f64| evenly(self.below(ln.exp()));
        zeros(self.least().ln(), most.ln(), CLOSE, parts.map(evenly), by).map(f64::exp)
    }

    /// The mean.
    pub(crate) fn mean(&self) -> f64 {
        let most = self.begins * 2.0 + self.batch.far();
        let by = |ln: f64| std::f64::consts::LN_2.ln() - self.late(0.0, self.begins, ln.exp()).max(0.0).ln();
        let median = zero(self.least().ln(), most.ln(), CLOSE, by).exp();
        self.wedged.iter().map(|(wedged, chance, begins)| chance * self.mean_with(*wedged, *begins, median)).sum()
    }

    fn mean_with(&self, wedged: f64, begins: f64, median: f64) -> f64 {
        if wedged == 0.0 {
            return median;
        }
        // The last of the wedged begins, of so many at random times.
        let last = begins * (1.0 - (self.first / self.batches).powf(wedged)) * wedged / (wedged + 1.0);
        (median + begins - self.begins).max(last + self.stuck + self.redo)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_is_a_thousand_by_the_defaults_and_smaller_where_the_queue_is() {
        let model = BatchModel::default();
        let chunk = |queue| Lanes::new(&[(4, queue)], &model, 400.0).map(|lanes| (lanes.chunk, lanes.all()));
        assert_eq!(chunk(100_000), Some((1_000, 4)));
        assert_eq!(chunk(2_000), Some((450, 4)), "nine tenths of the queue, in four");
        assert_eq!(chunk(3), None);
        assert!(Lanes::new(&[(0, 100_000)], &model, 400.0).is_none());
        let never = BatchModel::default().wedge_rows(f64::INFINITY);
        assert!(Lanes::new(&[(4, 1_000_000)], &never, 400.0).unwrap().chunk > 1_000);
        let heavy = Lanes::new(&[(4, 1_000_000)], &model, 250_000.0).unwrap();
        assert!(heavy.chunk as f64 * 1e6 <= 200e6, "{} rows of a megabyte", heavy.chunk);
    }

    #[test]
    fn one_batch_takes_what_a_batch_takes() {
        let model = BatchModel::default().wedge_rows(f64::INFINITY).poll(std::time::Duration::ZERO);
        let lanes = Lanes::new(&[(4, 8_000)], &model, 400.0).unwrap();
        let run = lanes.run(500);
        let [median, late] = run.quantiles([0.5, 0.9]);
        assert!((median - 300.0).abs() < 1.0, "{median}");
        assert!(late / median > 1.8);
    }

    #[test]
    fn quantiles_at_a_jump_are_in_order_and_at_it() {
        // More than half of all runs have a wedged batch, and none of those is over before it is given up and its rows are answered.
        let model = BatchModel::default().wedge_rows(3_000.0).chunk(1_000);
        let lanes = Lanes::new(&[(8, 100_000)], &model, 400.0).unwrap();
        for redo in 1..200 {
            let jump = 4.0 * 3_600.0 + f64::from(redo);
            let times = lanes.clone().redo(f64::from(redo)).run(8_000).quantiles([0.1, 0.5, 0.6, 0.9]);
            assert!(times.is_sorted(), "{times:?}");
            let off = times.map(|time| time - jump);
            assert!(off[1..].iter().all(|off| (-1e-6..=jump * CLOSE * 1.01).contains(off)), "{times:?}: {jump}");
        }
    }

    #[test]
    fn a_normal_is_cut_at_its_quantiles_where_many_are_wedged() {
        let sum = |mean: f64| wedged(mean).iter().map(|(count, chance)| count * chance).sum::<f64>();
        for mean in [0.0, 0.3, 3.9, 4.1, 50.0] {
            assert!((sum(mean) - mean).abs() < 0.02 * mean + 1e-3, "{mean}: {}", sum(mean));
        }
    }
}
