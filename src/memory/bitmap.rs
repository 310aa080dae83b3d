//! A set of small numbers whose least and greatest member are found in a few steps: bits, above them bits that say which
//! words of the level below are not empty, and so on up to one word.

use super::zeroed::Zeroed;

pub struct Bitmap {
    words: Zeroed<u64>,
    /// Where each level begins in `words`; the lowest comes first.
    levels: Vec<usize>,
}

impl Bitmap {
    /// Of numbers below `size`.
    pub fn new(size: usize) -> Bitmap {
        let mut levels = vec![0];
        let mut width = size.div_ceil(64).max(1);
        let mut total = width;
        while width > 1 {
            levels.push(total);
            width = width.div_ceil(64);
            total += width;
        }
        Bitmap { words: Zeroed::new(total), levels }
    }

    pub fn is_empty(&self) -> bool {
        self.words[self.levels[self.levels.len() - 1]] == 0
    }

    /// `number` is not in the set.
    #[inline]
    pub fn insert(&mut self, mut number: usize) {
        for &level in &self.levels {
            let word = &mut self.words[level + number / 64];
            let was_empty = *word == 0;
            *word |= 1 << (number % 64);
            if !was_empty {
                return;
            }
            number /= 64;
        }
    }

    /// `number` is in the set.
    #[inline]
    pub fn remove(&mut self, mut number: usize) {
        for &level in &self.levels {
            let word = &mut self.words[level + number / 64];
            *word &= !(1 << (number % 64));
            if *word != 0 {
                return;
            }
            number /= 64;
        }
    }

    pub fn first(&self) -> Option<usize> {
        self.descend(|word| word.trailing_zeros() as usize)
    }

    pub fn last(&self) -> Option<usize> {
        self.descend(|word| 63 - word.leading_zeros() as usize)
    }

    #[inline]
    fn descend(&self, choose: impl Fn(u64) -> usize) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        Some(self.levels.iter().rev().fold(0, |at, &level| at * 64 + choose(self.words[level + at])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(
            size in prop::sample::select(vec![1usize, 2, 63, 64, 65, 4096, 4097, 300_000]),
            numbers in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
        ) {
            let (mut bitmap, mut model) = (Bitmap::new(size), BTreeSet::new());
            for number in numbers {
                let number = number.index(size);
                if model.remove(&number) {
                    bitmap.remove(number);
                } else {
                    model.insert(number);
                    bitmap.insert(number);
                }
                prop_assert_eq!(bitmap.first(), model.first().copied());
                prop_assert_eq!(bitmap.last(), model.last().copied());
            }
        }
    }
}
