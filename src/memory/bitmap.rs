//! Sets of small numbers whose least and greatest member are found in a few steps: bits, above them bits that say which
//! words of the level below are not empty, and so on up to one word. All sets share one table.

use super::zeroed::{Zeroed, Zeros};

pub struct Bitmaps {
    words: Zeroed<u64>,
    /// Where each level of a set begins in `words`; the lowest comes first.
    sets: Vec<Vec<usize>>,
}

impl Bitmaps {
    /// Set k is of numbers below the k-th size.
    pub fn new(zeros: &Zeros, sizes: impl Iterator<Item = usize>) -> Bitmaps {
        let mut total = 0;
        let sets = sizes.map(|size| {
            let mut levels = Vec::new();
            let mut width = size;
            loop {
                width = width.div_ceil(64).max(1);
                levels.push(total);
                total += width;
                if width == 1 {
                    return levels;
                }
            }
        });
        let sets = sets.collect();
        Bitmaps { words: zeros.table(total), sets }
    }

    pub fn count(&self) -> usize {
        self.sets.len()
    }

    pub fn is_empty(&self, set: usize) -> bool {
        let levels = &self.sets[set];
        self.words[levels[levels.len() - 1]] == 0
    }

    /// `number` is not in the set.
    #[inline]
    pub fn insert(&mut self, set: usize, mut number: usize) {
        for &level in &self.sets[set] {
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
    pub fn remove(&mut self, set: usize, mut number: usize) {
        for &level in &self.sets[set] {
            let word = &mut self.words[level + number / 64];
            *word &= !(1 << (number % 64));
            if *word != 0 {
                return;
            }
            number /= 64;
        }
    }

    pub fn first(&self, set: usize) -> Option<usize> {
        self.descend(set, |word| word.trailing_zeros() as usize)
    }

    pub fn last(&self, set: usize) -> Option<usize> {
        self.descend(set, |word| 63 - word.leading_zeros() as usize)
    }

    #[inline]
    fn descend(&self, set: usize, choose: impl Fn(u64) -> usize) -> Option<usize> {
        if self.is_empty(set) {
            return None;
        }
        Some(self.sets[set].iter().rev().fold(0, |at, &level| at * 64 + choose(self.words[level + at])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn they_are_sets(
            size in prop::sample::select(vec![1usize, 2, 63, 64, 65, 4096, 4097, 300_000]),
            numbers in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
        ) {
            let (mut bitmaps, mut model) = (Bitmaps::new(&Zeros::none(), [100, size, 5000].into_iter()), BTreeSet::new());
            bitmaps.insert(0, 99);
            bitmaps.insert(2, 0);
            for number in numbers {
                let number = number.index(size);
                if model.remove(&number) {
                    bitmaps.remove(1, number);
                } else {
                    model.insert(number);
                    bitmaps.insert(1, number);
                }
                prop_assert_eq!(bitmaps.first(1), model.first().copied());
                prop_assert_eq!(bitmaps.last(1), model.last().copied());
            }
            prop_assert_eq!((bitmaps.first(0), bitmaps.last(2)), (Some(99), Some(0)), "neighbours are untouched");
        }
    }
}
