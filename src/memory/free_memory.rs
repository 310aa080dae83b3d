//! Runs of free units with memory behind them, whatever their alignment, by length: finding one, giving one back and
//! joining it with its neighbours take a few steps however many there are.

use super::zeroed::{Zeroed, Zeros};

/// Shorter runs have a list for each length, longer ones sixteen for each doubling.
const EXACT: usize = 64;
const SUBDIVISIONS: usize = 16;
const LISTS: usize = EXACT + 26 * SUBDIVISIONS;
/// Runs of a list that are looked at; the request's own list may hold shorter ones too.
const TRIES: usize = 8;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Default)]
struct Links {
    next: u32,
    previous: u32,
}

pub struct FreeMemory {
    /// The length of each run, at its first and its last unit.
    lengths: Zeroed<u32>,
    /// By a run's first unit.
    links: Zeroed<Links>,
    /// Two kilobytes, boxed: what holds them is made by value, on stacks that may be small.
    lists: Box<[u32]>,
    present: [u64; LISTS.div_ceil(64)],
}

// SAFETY: plain numbers.
unsafe impl super::zeroed::Zeroable for Links {}

/// A run: its first unit and their number.
pub type Run = (usize, usize);

fn list_of(length: usize) -> usize {
    if length < EXACT {
        return length;
    }
    let exponent = length.ilog2() as usize;
    let part = length >> (exponent - SUBDIVISIONS.ilog2() as usize) & (SUBDIVISIONS - 1);
    EXACT + (exponent - EXACT.ilog2() as usize) * SUBDIVISIONS + part
}

impl FreeMemory {
    pub fn new(zeros: &Zeros, units: usize) -> FreeMemory {
        let (lengths, links) = (zeros.table(units), zeros.table(units));
        FreeMemory { lengths, links, lists: vec![NONE; LISTS].into(), present: [0; LISTS.div_ceil(64)] }
    }

    /// The length of the run that starts at a unit.
    pub fn length(&self, start: usize) -> usize {
        self.lengths[start] as usize
    }

    /// Adds a run. `joins`: whether the units before and behind it belong to runs.
    pub fn add(&mut self, (mut start, mut length): Run, joins: [bool; 2]) {
        if joins[0] {
            let before = self.lengths[start - 1] as usize;
            self.unlink((start - before, before));
            (start, length) = (start - before, length + before);
        }
        if joins[1] {
            let behind = self.lengths[start + length] as usize;
            self.unlink((start + length, behind));
            length += behind;
        }
        self.link((start, length));
    }

    /// Takes `part` out of the run that holds it.
    pub fn remove(&mut self, run: Run, part: Run) {
        self.unlink(run);
        if part.0 > run.0 {
            self.link((run.0, part.0 - run.0));
        }
        let (end, run_end) = (part.0 + part.1, run.0 + run.1);
        if run_end > end {
            self.link((end, run_end - end));
        }
    }

    /// A run of at least `length` that is hardly longer than it must be, and of a few such the first in the range.
    pub fn find(&self, length: usize) -> Option<Run> {
        let list = list_of(length);
        if list >= LISTS {
            return None;
        }
        self.first_of(list, length).or_else(|| self.first_of(self.next_list(list + 1)?, length))
    }

    /// Length of the longest run; 0: there is none.
    pub fn longest(&self) -> usize {
        let last = self.present.iter().rposition(|&word| word != 0);
        let Some(word) = last else { return 0 };
        let mut at = self.lists[word * 64 + self.present[word].ilog2() as usize];
        let mut longest = 0;
        while at != NONE {
            longest = longest.max(self.lengths[at as usize] as usize);
            at = self.links[at as usize].next;
        }
        longest
    }

    fn first_of(&self, list: usize, length: usize) -> Option<Run> {
        let mut found: Option<Run> = None;
        let mut at = self.lists[list];
        for _ in 0..TRIES {
            if at == NONE {
                break;
            }
            let run = (at as usize, self.lengths[at as usize] as usize);
            if run.1 >= length && found.is_none_or(|(first, _)| run.0 < first) {
                found = Some(run);
            }
            at = self.links[at as usize].next;
        }
        found
    }

    /// The first list from `list` on that is not empty.
    fn next_list(&self, list: usize) -> Option<usize> {
        let mut word = list / 64;
        let mut bits = self.present.get(word)? & (u64::MAX << (list % 64));
        while bits == 0 {
            word += 1;
            bits = *self.present.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn link(&mut self, (start, length): Run) {
        let list = list_of(length);
        let next = self.lists[list];
        self.lengths[start] = length as u32;
        self.lengths[start + length - 1] = length as u32;
        self.links[start] = Links { next, previous: NONE };
        if next != NONE {
            self.links[next as usize].previous = start as u32;
        }
        self.lists[list] = start as u32;
        self.present[list / 64] |= 1 << (list % 64);
    }

    fn unlink(&mut self, (start, length): Run) {
        let Links { next, previous } = self.links[start];
        if next != NONE {
            self.links[next as usize].previous = previous;
        }
        if previous != NONE {
            self.links[previous as usize].next = next;
            return;
        }
        let list = list_of(length);
        self.lists[list] = next;
        if next == NONE {
            self.present[list / 64] &= !(1 << (list % 64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_what_they_say() {
        let mut last = 0;
        for length in 1..100_000 {
            let list = list_of(length);
            assert!(list == last || list == last + 1, "length {length}");
            last = list;
        }
        assert!(list_of(u32::MAX as usize) < LISTS);
    }

    #[test]
    fn runs_join_and_the_shortest_that_fits_is_found() {
        let mut free = FreeMemory::new(&Zeros::none(), 1000);
        free.add((0, 10), [false, false]);
        free.add((20, 300), [false, false]);
        free.add((500, 70), [false, false]);
        assert_eq!(free.find(11), Some((500, 70)));
        assert_eq!(free.find(71), Some((20, 300)));
        assert_eq!((free.find(301), free.find(usize::MAX)), (None, None));
        assert_eq!((free.longest(), FreeMemory::new(&Zeros::none(), 1000).longest()), (300, 0));
        free.add((10, 10), [true, true]);
        assert_eq!(free.find(301), Some((0, 320)));
        free.remove((0, 320), (100, 50));
        assert_eq!((free.find(71), free.find(150), free.find(171)), (Some((0, 100)), Some((150, 170)), None));
        free.remove((0, 100), (0, 100));
        assert_eq!(free.find(71), Some((150, 170)));
    }
}
