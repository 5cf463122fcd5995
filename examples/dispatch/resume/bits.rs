//! One bit of each row: 125 KB a million.

/// Bits by number; those never set are not set.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Bits {
    words: Vec<u64>,
    ones: u64,
}

impl Bits {
    pub(crate) fn get(&self, at: u64) -> bool {
        self.words.get((at / 64) as usize).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    pub(crate) fn set(&mut self, at: u64) {
        let word = (at / 64) as usize;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.ones += u64::from(!self.get(at));
        self.words[word] |= 1 << (at % 64);
    }

    /// Sets what is set in the other.
    pub(crate) fn add(&mut self, other: &Bits) {
        self.words.resize(self.words.len().max(other.words.len()), 0);
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word |= other);
        self.ones = self.words.iter().map(|word| u64::from(word.count_ones())).sum();
    }

    /// How many are set.
    pub(crate) fn ones(&self) -> u64 {
        self.ones
    }
}
