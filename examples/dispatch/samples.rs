//! Samples of something that goes on for nobody knows how long, in bounded memory. Pure.

/// At most so many samples, evenly apart: when there are as many, every other one goes, and from then on half as many are taken.
#[derive(Debug)]
pub(crate) struct Samples<T> {
    kept: Vec<T>,
    most: usize,
    ticks: u64,
    /// Every so many ticks are kept.
    stride: u64,
}

impl<T> Samples<T> {
    /// At least two.
    pub(crate) fn new(most: usize) -> Self {
        Samples { kept: Vec::new(), most: most.max(2), ticks: 0, stride: 1 }
    }

    /// Takes a sample, or not; to be called at regular intervals.
    pub(crate) fn tick(&mut self, sample: impl FnOnce() -> T) {
        let tick = self.ticks;
        self.ticks += 1;
        if tick % self.stride != 0 {
            return;
        }
        if self.kept.len() >= self.most {
            self.halve();
            if tick % self.stride != 0 {
                return;
            }
        }
        self.kept.push(sample());
    }

    /// Takes the last sample, whenever that is.
    pub(crate) fn last(&mut self, sample: T) {
        if self.kept.len() >= self.most {
            self.halve();
        }
        self.kept.push(sample);
    }

    fn halve(&mut self) {
        let mut nth = 0;
        self.kept.retain(|_| {
            nth += 1;
            nth % 2 == 1
        });
        self.stride *= 2;
    }

    pub(crate) fn kept(&self) -> &[T] {
        &self.kept
    }
}
