//! The batch path: so many batches over few lanes, each as long as chance makes it, and a few wedged. Pure arithmetic in seconds,
//! without a loop over batches.
//!
//! A lane is one batch of one org; the next batch begins when one has ended. When the last of them begins follows from renewal
//! theory; when all have ended is the largest of what is then still at work. A wedged batch keeps its lane until it is given up, and
//! its rows go direct. How many are wedged is Poisson's, and each number has a plan of its own.

use super::{
    fleet::BatchModel,
    spread::{Spread, normal_quantile, rising},
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

/// How a workload is cut into batches, whatever its number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Lanes {
    pub(crate) chunk: u64,
    /// Batches at work at once, of each org.
    pub(crate) each: Vec<usize>,
    model: BatchModel,
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
        Some(Lanes { chunk, each: orgs.iter().map(fits).collect(), model: model.clone(), redo: 0.0 })
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
        let batch = turnaround(&self.model, size);
        let first = lanes.min(batches);
        let later = batches - first;
        let (begins, first_end, deviation) = begun(&batch, lanes, later);
        // What is left over is a smaller batch, and the last.
        let left = rows - (rows - 1) / self.chunk * self.chunk;
        let last = turnaround(&self.model, left as f64);
        let full_begins = begun(&batch, lanes, later - 1.0).0;
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

/// When the last of so many later batches begins, when the first of them does, and the standard deviation of the former.
fn begun(batch: &Spread, lanes: f64, later: f64) -> (f64, f64, f64) {
    if later <= 0.0 {
        return (0.0, 0.0, 0.0);
    }
    let (mean, cv2) = (batch.mean(), batch.cv().powi(2));
    let nth = |count: f64| {
        let each = (count - 0.4) / lanes;
        if each > 10.0 {
            return mean * (each + (1.0 - cv2) / 2.0);
        }
        // How many have ended in a lane by then: the sum over the chances that at least one has, at least two, ...
        let sums: Vec<Spread> = (1..=(each * 1.6) as usize + 3).map(|count| batch.times(count as f64)).collect();
        let ended = |at: f64| sums.iter().map(|sum| sum.below(at)).sum::<f64>();
        rising(0.0, mean * (each + 6.0), 18, |at| ended(at) >= each)
    };
    let last = nth(later);
    let part = later / (lanes + 1.0);
    let deviation = if part < 0.8 {
        // The spread of one of few in order.
        let width = mean * 1e-3;
        let density = (batch.below(last + width) - batch.below(last - width)) / (2.0 * width);
        (part * (1.0 - part) / (lanes + 2.0)).sqrt() / density.max(1e-12)
    } else {
        (batch.variance() * later).sqrt() / lanes
    };
    (last, nth(1.0).min(last), deviation.min(last))
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

    /// The chance that all have ended by `x`, if so many are wedged and the last begins then.
    fn ended(&self, wedged: f64, begins: f64, x: f64) -> f64 {
        let sound = (1.0 - wedged / self.batches).max(0.0);
        let later = self.batches - self.first;
        // The last begins for sure, and so does the one before it; those before that, evenly.
        let mut all = self.last.below(x - begins).powf(sound);
        let full = self.first - if later > 0.0 { 0.0 } else { 1.0 };
        all *= self.batch.below(x).powf(full * sound);
        if later > 1.0 && all > 0.0 {
            let scale = begins / self.begins.max(1e-9);
            let (from, until) = (self.first_end * scale, self.full_begins * scale);
            all *= self.batch.below(x - until).powf(sound);
            if later > 2.0 && until > from {
                let going = self.batch.going_on(x - from) - self.batch.going_on(x - until);
                all *= (-(later - 2.0) * sound / (until - from) * going).exp();
            }
        }
        if wedged > 0.0 {
            let left = x - self.stuck - self.redo;
            let at_once = self.first / self.batches;
            let then = if begins > 0.0 { (left / begins).clamp(0.0, 1.0) } else { 1.0 };
            let begun = if left < 0.0 { 0.0 } else { at_once + (1.0 - at_once) * then };
            all *= begun.powf(wedged);
        }
        all
    }

    /// The chance that all have ended by `x`.
    fn below(&self, x: f64) -> f64 {
        let mut sum = 0.0;
        for (wedged, chance, begins) in &self.wedged {
            // Three points of a normal (Gauss and Hermite).
            let off = self.deviation * 3.0_f64.sqrt();
            let at = |off: f64| self.ended(*wedged, (begins + off).max(0.0), x);
            sum += chance * if self.deviation > 0.0 { (at(-off) + 4.0 * at(0.0) + at(off)) / 6.0 } else { at(0.0) };
        }
        sum
    }

    /// The time by which all have ended, with this chance.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let most = self.begins * 3.0 + self.batch.far() + self.stuck + self.redo;
        rising(self.batch.quantile(1e-4).ln(), most.ln(), 20, |ln| self.below(ln.exp()) >= part).exp()
    }

    /// The mean.
    pub(crate) fn mean(&self) -> f64 {
        let most = self.begins * 2.0 + self.batch.far();
        let median = rising(0.0, most, 16, |x| self.ended(0.0, self.begins, x) >= 0.5);
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
        assert!((run.quantile(0.5) - 300.0).abs() < 1.0, "{}", run.quantile(0.5));
        assert!(run.quantile(0.9) / run.quantile(0.5) > 1.8);
    }

    #[test]
    fn a_normal_is_cut_at_its_quantiles_where_many_are_wedged() {
        let sum = |mean: f64| wedged(mean).iter().map(|(count, chance)| count * chance).sum::<f64>();
        for mean in [0.0, 0.3, 3.9, 4.1, 50.0] {
            assert!((sum(mean) - mean).abs() < 0.02 * mean + 1e-3, "{mean}: {}", sum(mean));
        }
    }
}
