//! Buddies over the units of a range: free runs are aligned powers of two, halved for a request and joined again when
//! both halves are free. What a request does not need of its power of two is free at once, so a block wastes less than
//! a unit.
//!
//! Memory behind units costs a mapping, so what is free and backed is found by its length first, whatever its alignment.
//! A request that must map prefers buddies that are backed in part, and within these the halves that are backed most.

use super::bitmap::Bitmaps;
use super::free_memory::{FreeMemory, Run};
use super::zeroed::{Zeroed, Zeros};

/// Which side of its region a request prefers. Slabs gather at the end and large blocks at the start, so that where one kind
/// borrows from the other's region (`regions.rs`), they leave each other's runs whole.
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
    memory: FreeMemory,
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
    fn new(zeros: &Zeros, units: usize) -> BackedUnits {
        let words = units.div_ceil(64).next_power_of_two();
        BackedUnits { words: zeros.table(words), sums: zeros.table(2 * words) }
    }

    fn get(&self, unit: usize) -> bool {
        self.words[unit / 64] >> (unit % 64) & 1 != 0
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

    /// The bits that are set in the aligned run of 2^order units.
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
    fn new(zeros: &Zeros, units: usize) -> FreeRuns {
        let orders = (units.max(1).ilog2() + 1) as usize;
        FreeRuns { orders: Bitmaps::new(zeros, (0..orders).map(|order| units >> order)), present: 0 }
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
    pub fn new(zeros: &Zeros, units: usize) -> Buddy {
        let mut buddy = Buddy {
            head: zeros.table(units),
            taken: zeros.table(units.div_ceil(64)),
            backed: BackedUnits::new(zeros, units),
            free: std::array::from_fn(|_| FreeRuns::new(zeros, units)),
            memory: FreeMemory::new(zeros, units),
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

    /// Units of the longest free run with memory behind it.
    pub fn longest_backed_run(&self) -> usize {
        self.memory.longest()
    }

    pub fn is_backed(&self, unit: usize) -> bool {
        self.backed.get(unit)
    }

    pub fn all_backed(&self, start: usize, units: usize) -> bool {
        self.backed.all(start, units)
    }

    /// `units` > 0 that nobody else has and that all have memory behind them. On the side of slabs those of the last
    /// buddies that fit, so that slabs gather; on the other those of a run that is hardly longer.
    pub fn take_backed(&mut self, units: usize, side: Side) -> Option<usize> {
        let wanted = units.next_power_of_two().ilog2() as usize;
        if side == Side::End && self.free[Backing::Full as usize].best(wanted, side).is_some() {
            return self.take(units, side);
        }
        let (run, length) = self.memory.find(units)?;
        let start = if side == Side::Start { run } else { run + length - units };
        self.memory.remove((run, length), (start, units));
        self.carve(start, units);
        Some(start)
    }

    /// The one of the two halves of 2^order units from `start` on that has more memory behind it, or the one on the
    /// side.
    fn fuller_half(&self, start: usize, order: usize, side: Side) -> usize {
        let upper = start + (1 << order);
        let (low, high) = (self.backed.count(start, order), self.backed.count(upper, order));
        if low > high || low == high && side == Side::Start {
            start
        } else {
            upper
        }
    }

    /// Units that are free and backed: 64 from a multiple of 64 on.
    fn memory_word(&self, word: usize) -> u64 {
        !self.taken[word] & self.backed.words[word]
    }

    fn has_memory(&self, unit: usize) -> bool {
        self.memory_word(unit / 64) >> (unit % 64) & 1 != 0
    }

    /// The run of free memory that holds a unit of it.
    fn run_around(&self, unit: usize) -> Run {
        let (mut word, bit) = (unit / 64, unit % 64);
        // Units without memory, those above `unit` shifted out.
        let below = (!self.memory_word(word)) << (63 - bit);
        let mut start = unit + 1 - (below.leading_zeros() as usize).min(bit + 1);
        while start == word * 64 && word > 0 {
            word -= 1;
            start -= (!self.memory_word(word)).leading_zeros() as usize;
        }
        (start, self.memory.length(start))
    }

    /// Each run of the units that `word` says, within `units` from `start` on.
    fn runs(start: usize, units: usize, word: impl Fn(usize) -> u64) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for unit in start..start + units {
            if word(unit / 64) >> (unit % 64) & 1 == 0 {
                continue;
            }
            match runs.last_mut() {
                Some((first, length)) if *first + *length == unit => *length += 1,
                _ => runs.push((unit, 1)),
            }
        }
        runs
    }

    /// Notes that free units got memory, or lost it.
    fn add_memory(&mut self, (start, length): Run) {
        let end = start + length;
        let joins = [start > 0 && self.has_memory(start - 1), end < self.head.len() && self.has_memory(end)];
        self.memory.add((start, length), joins);
    }

    fn remove_memory(&mut self, part: Run) {
        let run = self.run_around(part.0);
        self.memory.remove(run, part);
    }

    /// Takes out of the list what is free and backed among the units, before they are taken.
    fn remove_memory_of(&mut self, start: usize, units: usize) {
        if self.backed.all(start, units) {
            return self.remove_memory((start, units));
        }
        for run in Buddy::runs(start, units, |word| self.memory_word(word)) {
            self.remove_memory(run);
        }
    }

    /// Takes `units` from `start` on, all of them free.
    pub fn take_at(&mut self, start: usize, units: usize) {
        self.remove_memory_of(start, units);
        self.carve(start, units);
    }

    /// Takes units as `take_at` does which the list of free memory does not hold any more.
    fn carve(&mut self, start: usize, units: usize) {
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
                self.take_at(start, units);
                return Some(start);
            }
        };
        let (start, rest) = if side == Side::Start { (start, start + units) } else { (start + length - units, start) };
        self.add_runs(rest, length - units);
        self.remove_memory_of(start, units);
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
        self.add_runs(start, units);
        if self.backed.all(start, units) {
            set_bits(&mut self.taken, start, units, false);
            return self.add_memory((start, units));
        }
        for (first, length) in Buddy::runs(start, units, |word| self.backed.words[word]) {
            set_bits(&mut self.taken, first, length, false);
            self.add_memory((first, length));
        }
        set_bits(&mut self.taken, start, units, false);
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
        let change =
            |word: usize| !self.taken[word] & if backed { !self.backed.words[word] } else { self.backed.words[word] };
        let changes = Buddy::runs(start, units, change);
        if !backed {
            changes.iter().for_each(|&run| self.remove_memory(run));
        }
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
        if backed {
            changes.iter().for_each(|&run| self.add_memory(run));
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
        let mut buddy = Buddy::new(&Zeros::none(), 64);
        let a = buddy.take(33, Side::Start).unwrap();
        assert_eq!((a, buddy.free_units()), (0, 31));
        let b = buddy.take(16, Side::End).unwrap();
        assert_eq!(b, 48);
        assert_eq!(buddy.take(15, Side::Start), Some(33), "15 units in one piece across buddies");
        assert_eq!(buddy.take(1, Side::Start), None);
    }

    #[test]
    fn backed_units_come_first_wherever_they_are() {
        let mut buddy = Buddy::new(&Zeros::none(), 1024);
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
        let mut buddy = Buddy::new(&Zeros::none(), 100);
        buddy.take_at(13, 60);
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
            let mut buddy = Buddy::new(&Zeros::none(), size);
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
