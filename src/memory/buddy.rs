//! Buddies over the units of a range: free runs are aligned powers of two, halved for a request and joined again when
//! both halves are free. What a request does not need of its power of two is free at once, so a block wastes less than
//! a unit.
//!
//! Memory behind units costs a mapping, so a request prefers runs that are backed in full, then those that are in part,
//! and within these the halves that are backed most.

use super::bitmap::Bitmaps;
use super::zeroed::Zeroed;

/// Which side of the range a request prefers: slabs gather at the end and large blocks at the start, where they leave
/// each other's runs whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Start,
    End,
}

/// Free runs by order; those of order k by their start divided by 2^k.
struct FreeRuns {
    orders: Bitmaps,
    /// Bit k: set k of `orders` is not empty.
    present: u32,
}

/// How much of a run has memory behind it; also the index of its list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backing {
    Full,
    Part,
    None,
}

pub struct Buddy {
    /// order + 1 of the free run that starts at a unit, 0 where none does.
    head: Zeroed<u8>,
    /// A bit for each unit that somebody has.
    taken: Zeroed<u64>,
    backed: BackedUnits,
    free: [FreeRuns; 3],
    free_units: usize,
    free_backed_units: usize,
}

/// Which units have memory behind them, with the sums over all aligned powers of two from 64 on.
struct BackedUnits {
    words: Zeroed<u64>,
    /// A binary tree: node 1 is the root, the words' counts are the leaves.
    sums: Zeroed<u32>,
}

impl BackedUnits {
    fn new(units: usize) -> BackedUnits {
        let words = units.div_ceil(64).next_power_of_two();
        BackedUnits { words: Zeroed::new(words), sums: Zeroed::new(2 * words) }
    }

    fn get(&self, unit: usize) -> bool {
        self.words[unit / 64] >> (unit % 64) & 1 != 0
    }

    /// Whether nothing is backed in the `SKIPPED` words from `first` on.
    fn is_empty(&self, first: usize) -> bool {
        let node = (self.words.len() + first) >> SKIPPED.trailing_zeros();
        self.words.len() >= SKIPPED && self.sums[node] == 0
    }

    fn all(&self, start: usize, units: usize) -> bool {
        let mut at = start;
        while at < start + units {
            let (word, bit) = (at / 64, at % 64);
            let length = (64 - bit).min(start + units - at);
            let mask = u64::MAX >> (64 - length) << bit;
            if self.words[word] & mask != mask {
                return false;
            }
            at += length;
        }
        true
    }

    /// Of the aligned run of 2^order units.
    fn count(&self, start: usize, order: usize) -> usize {
        if order < 6 {
            let mask = (1u64 << (1 << order)) - 1;
            (self.words[start / 64] >> (start % 64) & mask).count_ones() as usize
        } else {
            self.sums[(self.words.len() + start / 64) >> (order - 6)] as usize
        }
    }

    fn set(&mut self, start: usize, end: usize, value: bool) {
        let mut at = start;
        while at < end {
            let (word, bit) = (at / 64, at % 64);
            let length = (64 - bit).min(end - at);
            let mask = if length == 64 { u64::MAX } else { ((1 << length) - 1) << bit };
            self.words[word] = if value { self.words[word] | mask } else { self.words[word] & !mask };
            let mut node = self.words.len() + word;
            self.sums[node] = self.words[word].count_ones();
            while node > 1 {
                node /= 2;
                self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1];
            }
            at += length;
        }
    }
}

/// Words that are passed over at once where nothing is backed.
const SKIPPED: usize = 64;

/// Runs of set bits, word by word; the shortest of at least `wanted`.
struct Runs {
    wanted: usize,
    best: Option<(usize, usize)>,
    start: usize,
    length: usize,
}

impl Runs {
    /// `word` holds the bits from number `at` on.
    fn add_word(&mut self, mut at: usize, mut word: u64) {
        let end = at + 64;
        while at < end {
            if word == 0 {
                return self.end();
            }
            let zeros = word.trailing_zeros() as usize;
            if zeros > 0 {
                self.end();
                word >>= zeros;
                at += zeros;
            }
            let ones = word.trailing_ones() as usize;
            if self.length == 0 {
                self.start = at;
            }
            self.length += ones;
            word = word.checked_shr(ones as u32).unwrap_or(0);
            at += ones;
        }
    }

    fn end(&mut self) {
        if self.length >= self.wanted && self.best.is_none_or(|(_, shortest)| self.length < shortest) {
            self.best = Some((self.start, self.length));
        }
        self.length = 0;
    }
}

fn set_bits(words: &mut [u64], start: usize, count: usize, value: bool) {
    let mut at = start;
    while at < start + count {
        let (word, bit) = (at / 64, at % 64);
        let length = (64 - bit).min(start + count - at);
        let mask = u64::MAX >> (64 - length) << bit;
        words[word] = if value { words[word] | mask } else { words[word] & !mask };
        at += length;
    }
}

impl FreeRuns {
    fn new(units: usize) -> FreeRuns {
        let orders = (units.max(1).ilog2() + 1) as usize;
        FreeRuns { orders: Bitmaps::new((0..orders).map(|order| units >> order)), present: 0 }
    }

    fn insert(&mut self, order: usize, start: usize) {
        self.orders.insert(order, start >> order);
        self.present |= 1 << order;
    }

    fn remove(&mut self, order: usize, start: usize) {
        self.orders.remove(order, start >> order);
        if self.orders.is_empty(order) {
            self.present &= !(1 << order);
        }
    }

    fn longest(&self, order: usize, side: Side) -> Option<(usize, usize)> {
        let present = self.present & (u32::MAX.checked_shl(order as u32).unwrap_or(0));
        self.best((present != 0).then(|| present.ilog2())? as usize, side)
    }

    /// The smallest run of at least `order`.
    fn best(&self, order: usize, side: Side) -> Option<(usize, usize)> {
        let fitting = self.present.checked_shr(order as u32).unwrap_or(0);
        if fitting == 0 {
            return None;
        }
        let order = order + fitting.trailing_zeros() as usize;
        let start = if side == Side::Start { self.orders.first(order) } else { self.orders.last(order) };
        start.map(|start| (order, start << order))
    }
}

impl Buddy {
    pub fn new(units: usize) -> Buddy {
        let mut buddy = Buddy {
            head: Zeroed::new(units),
            taken: Zeroed::new(units.div_ceil(64)),
            backed: BackedUnits::new(units),
            free: std::array::from_fn(|_| FreeRuns::new(units)),
            free_units: 0,
            free_backed_units: 0,
        };
        buddy.add_runs(0, units);
        buddy
    }

    #[cfg(test)]
    pub fn free_units(&self) -> usize {
        self.free_units
    }

    /// Free units with physical memory behind them.
    pub fn free_backed_units(&self) -> usize {
        self.free_backed_units
    }

    /// Units of the largest aligned free run.
    pub fn largest_free_run(&self) -> usize {
        let present = self.free.iter().fold(0, |all, runs| all | runs.present);
        if present == 0 {
            0
        } else {
            1 << present.ilog2()
        }
    }

    pub fn is_backed(&self, unit: usize) -> bool {
        self.backed.get(unit)
    }

    pub fn all_backed(&self, start: usize, units: usize) -> bool {
        self.backed.all(start, units)
    }

    /// `units` > 0 that nobody else has and that all have memory behind them: of the run that comes first, or of the
    /// shortest that crosses the boundaries of buddies.
    pub fn take_backed(&mut self, units: usize, side: Side) -> Option<usize> {
        if self.free_backed_units < units {
            return None;
        }
        let wanted = units.next_power_of_two().ilog2() as usize;
        if self.free[Backing::Full as usize].best(wanted, side).is_some() {
            return self.take(units, side);
        }
        let part = &self.free[Backing::Part as usize];
        let run = [part.best(wanted, side), part.longest(wanted, side)]
            .into_iter()
            .flatten()
            .find_map(|(order, run)| self.backed_start(run, order, wanted, units, side));
        let start = run.or_else(|| {
            let (start, length) = self.shortest_backed_run(units)?;
            Some(if side == Side::Start { start } else { start + length - units })
        })?;
        self.carve(start, units);
        Some(start)
    }

    /// Where in a free run `units` are backed, if halving it towards the memory leads there.
    fn backed_start(&self, run: usize, order: usize, wanted: usize, units: usize, side: Side) -> Option<usize> {
        let (start, order) =
            (wanted..order).rev().fold((run, order), |(start, _), order| (self.fuller_half(start, order, side), order));
        let start = if side == Side::Start { start } else { start + (1 << order) - units };
        self.backed.all(start, units).then_some(start)
    }

    /// Of the two halves of 2^order units from `start` on, the one with more memory behind it, or the one on the side.
    fn fuller_half(&self, start: usize, order: usize, side: Side) -> usize {
        let upper = start + (1 << order);
        let (low, high) = (self.backed.count(start, order), self.backed.count(upper, order));
        if low > high || low == high && side == Side::Start {
            start
        } else {
            upper
        }
    }

    /// A walk over a bit a unit where anything is backed, less than a microsecond for the 70,000 units of 140 GB.
    fn shortest_backed_run(&self, units: usize) -> Option<(usize, usize)> {
        let mut runs = Runs { wanted: units, best: None, start: 0, length: 0 };
        for (i, chunk) in self.taken.chunks(SKIPPED).enumerate() {
            let first = i * SKIPPED;
            if self.backed.is_empty(first) {
                runs.end();
                continue;
            }
            for (j, taken) in chunk.iter().enumerate() {
                runs.add_word((first + j) * 64, !taken & self.backed.words[first + j]);
            }
        }
        runs.end();
        runs.best
    }

    /// Takes `units` from `start` on, all of them free.
    pub fn carve(&mut self, start: usize, units: usize) {
        let (mut at, end) = (start, start + units);
        while at < end {
            let (run, order) = self.free_run_around(at).expect("the units are free");
            let run_end = run + (1 << order);
            self.remove(run, order);
            if run < start {
                self.add_runs(run, start - run);
            }
            if run_end > end {
                self.add_runs(end, run_end - end);
            }
            at = run_end;
        }
        set_bits(&mut self.taken, start, units, true);
    }

    /// `units` > 0 that nobody else has, or `None` if no free run is long enough.
    pub fn take(&mut self, units: usize, side: Side) -> Option<usize> {
        let wanted = units.next_power_of_two().ilog2() as usize;
        let found = [Backing::Full, Backing::Part, Backing::None]
            .into_iter()
            .find_map(|backing| self.free[backing as usize].best(wanted, side));
        let (start, length) = match found {
            Some((order, start)) => (self.take_run(start, order, wanted, side), 1 << wanted),
            None => {
                let (start, length) = self.adjoining_run(units)?;
                let start = if side == Side::Start { start } else { start + length - units };
                self.carve(start, units);
                return Some(start);
            }
        };
        let (start, rest) = if side == Side::Start { (start, start + units) } else { (start + length - units, start) };
        self.add_runs(rest, length - units);
        set_bits(&mut self.taken, start, units, true);
        Some(start)
    }

    /// Halves a free run down to order `wanted`, keeping the half with more memory behind it, or the one on the wanted
    /// side.
    fn take_run(&mut self, mut start: usize, mut order: usize, wanted: usize, side: Side) -> usize {
        self.remove(start, order);
        while order > wanted {
            order -= 1;
            let kept = self.fuller_half(start, order, side);
            self.insert(2 * start + (1 << order) - kept, order);
            start = kept;
        }
        start
    }

    /// A run that crosses the boundaries of buddies. It takes a walk over the range, which beats a failure.
    fn adjoining_run(&self, units: usize) -> Option<(usize, usize)> {
        let (mut start, mut at) = (0, 0);
        while at < self.head.len() {
            match self.head[at] {
                0 => {
                    at += 1;
                    start = at;
                }
                order => {
                    at += 1 << (order - 1);
                    if at - start >= units {
                        return Some((start, at - start));
                    }
                }
            }
        }
        None
    }

    /// Gives back `units` from `start` on, all of them taken.
    pub fn give(&mut self, start: usize, units: usize) {
        set_bits(&mut self.taken, start, units, false);
        self.add_runs(start, units);
    }

    /// Makes free units the runs that they consist of.
    fn add_runs(&mut self, mut start: usize, mut units: usize) {
        while units > 0 {
            let aligned = if start == 0 { usize::BITS - 1 } else { start.trailing_zeros() };
            let order = aligned.min(units.ilog2()) as usize;
            self.insert_joined(start, order);
            start += 1 << order;
            units -= 1 << order;
        }
    }

    fn insert_joined(&mut self, mut start: usize, mut order: usize) {
        loop {
            let buddy = start ^ (1 << order);
            if self.head.get(buddy).is_none_or(|&head| usize::from(head) != order + 1) {
                break;
            }
            self.remove(buddy, order);
            start &= !(1 << order);
            order += 1;
        }
        self.insert(start, order);
    }

    fn backing(&self, start: usize, order: usize) -> (Backing, usize) {
        match self.backed.count(start, order) {
            0 => (Backing::None, 0),
            count if count == 1 << order => (Backing::Full, count),
            count => (Backing::Part, count),
        }
    }

    fn insert(&mut self, start: usize, order: usize) {
        let (backing, count) = self.backing(start, order);
        self.head[start] = order as u8 + 1;
        self.free[backing as usize].insert(order, start);
        self.free_units += 1 << order;
        self.free_backed_units += count;
    }

    fn remove(&mut self, start: usize, order: usize) {
        let (backing, count) = self.backing(start, order);
        self.head[start] = 0;
        self.free[backing as usize].remove(order, start);
        self.free_units -= 1 << order;
        self.free_backed_units -= count;
    }

    /// Notes whether units have physical memory behind them; they may be free or taken.
    pub fn set_backed(&mut self, start: usize, units: usize, backed: bool) {
        let mut at = start;
        while at < start + units {
            match self.free_run_around(at) {
                Some((run, order)) => {
                    self.remove(run, order);
                    let end = (run + (1 << order)).min(start + units);
                    self.backed.set(at, end, backed);
                    self.insert(run, order);
                    at = end;
                }
                None => {
                    self.backed.set(at, at + 1, backed);
                    at += 1;
                }
            }
        }
    }

    fn free_run_around(&self, unit: usize) -> Option<(usize, usize)> {
        (0..self.free[0].orders.count()).find_map(|order| {
            let start = unit & !((1usize << order) - 1);
            (usize::from(self.head[start]) == order + 1).then_some((start, order))
        })
    }

    /// Whether the whole run is free.
    pub fn is_free(&self, start: usize, units: usize) -> bool {
        let mut at = start;
        while at < start + units {
            let Some((run, order)) = self.free_run_around(at) else { return false };
            at = run + (1 << order);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_tail_of_a_power_of_two_stays_free() {
        let mut buddy = Buddy::new(64);
        let a = buddy.take(33, Side::Start).unwrap();
        assert_eq!((a, buddy.free_units()), (0, 31));
        let b = buddy.take(16, Side::End).unwrap();
        assert_eq!(b, 48);
        assert_eq!(buddy.take(15, Side::Start), Some(33), "15 units in one piece across buddies");
        assert_eq!(buddy.take(1, Side::Start), None);
    }

    #[test]
    fn backed_units_come_first_wherever_they_are() {
        let mut buddy = Buddy::new(1024);
        buddy.set_backed(40, 4, true);
        buddy.set_backed(900, 64, true);
        assert_eq!(buddy.free_backed_units(), 68);
        assert_eq!(buddy.take(32, Side::Start), Some(928), "the aligned 32 units within the 64");
        assert_eq!(buddy.take(16, Side::Start), Some(912));
        assert_eq!(buddy.take(4, Side::End), Some(908), "the smallest run with memory behind it");
        buddy.give(928, 32);
        buddy.set_backed(928, 32, false);
        assert_eq!(buddy.free_backed_units(), 16);
    }

    #[test]
    fn a_range_of_free_units_can_be_taken_out() {
        let mut buddy = Buddy::new(100);
        buddy.carve(13, 60);
        assert_eq!(buddy.free_units(), 40);
        assert!(buddy.is_free(0, 13) && buddy.is_free(73, 27) && !buddy.is_free(13, 1) && !buddy.is_free(72, 1));
        buddy.give(13, 60);
        assert_eq!((buddy.free_units(), buddy.largest_free_run()), (100, 64));
    }

    proptest! {
        /// Against a plain array of units: no unit is handed out twice, free counts agree, and what is given back joins.
        #[test]
        fn units_are_never_handed_out_twice(
            size in prop_oneof![1usize..300, 9000usize..9010],
            steps in prop::collection::vec((0usize..5, 1usize..40, any::<bool>()), 1..200),
        ) {
            let mut buddy = Buddy::new(size);
            let mut model = vec![false; size];
            let mut backed = vec![false; size];
            let mut taken: Vec<(usize, usize)> = Vec::new();
            for (kind, amount, flag) in steps {
                match kind {
                    0 | 1 => {
                        let side = if flag { Side::Start } else { Side::End };
                        let longest = model.split(|&used| used).map(<[bool]>::len).max().unwrap_or(0);
                        match buddy.take(amount, side) {
                            Some(start) => {
                                prop_assert!(model[start..start + amount].iter().all(|used| !used));
                                model[start..start + amount].fill(true);
                                taken.push((start, amount));
                            }
                            None => prop_assert!(longest < amount, "{amount} fit into {longest}"),
                        }
                    }
                    4 => {
                        let backed_free: Vec<bool> = (0..size).map(|unit| backed[unit] && !model[unit]).collect();
                        let longest = backed_free.split(|&free| !free).map(<[bool]>::len).max().unwrap_or(0);
                        match buddy.take_backed(amount, if flag { Side::Start } else { Side::End }) {
                            Some(start) => {
                                prop_assert!(backed_free[start..start + amount].iter().all(|free| *free));
                                model[start..start + amount].fill(true);
                                taken.push((start, amount));
                            }
                            None => prop_assert!(longest < amount, "{amount} fit into {longest}"),
                        }
                    }
                    2 if !taken.is_empty() => {
                        let (start, units) = taken.swap_remove(amount % taken.len());
                        buddy.give(start, units);
                        model[start..start + units].fill(false);
                    }
                    _ => {
                        let start = amount % size;
                        let units = (amount / 2).min(size - start);
                        buddy.set_backed(start, units, flag);
                        backed[start..start + units].fill(flag);
                    }
                }
                prop_assert_eq!(buddy.free_units(), model.iter().filter(|used| !**used).count());
                let free_backed = (0..size).filter(|&unit| !model[unit] && backed[unit]).count();
                prop_assert_eq!(buddy.free_backed_units(), free_backed);
                prop_assert_eq!(buddy.is_free(0, size), model.iter().all(|used| !used));
            }
            for (start, units) in taken {
                buddy.give(start, units);
            }
            prop_assert_eq!(buddy.largest_free_run(), 1 << size.ilog2());
        }
    }
}
