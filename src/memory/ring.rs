//! A ring that many threads write fixed-size records into without waiting; the newest overwrite the oldest.

use super::sync::{AtomicU64, Ordering};

struct Slot<const WORDS: usize> {
    /// 2 · n + 2 once record n is complete, odd while one is being written.
    state: AtomicU64,
    words: [AtomicU64; WORDS],
}

pub struct Ring<const WORDS: usize> {
    next: AtomicU64,
    slots: Box<[Slot<WORDS>]>,
}

impl<const WORDS: usize> Ring<WORDS> {
    /// Holds `capacity` > 0 records; `None`: there is no memory for them.
    pub fn new(capacity: usize) -> Option<Ring<WORDS>> {
        let slot = || Slot { state: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        let mut slots = Vec::new();
        slots.try_reserve_exact(capacity).ok()?;
        slots.resize_with(capacity, slot);
        Some(Ring { next: AtomicU64::new(0), slots: slots.into_boxed_slice() })
    }

    /// Returns `false` if the record was lost, because a slower thread is still writing where it belongs.
    pub fn write(&self, record: [u64; WORDS]) -> bool {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let slot = &self.slots[number as usize % self.slots.len()];
        let state = slot.state.load(Ordering::Relaxed);
        let newer = state > 2 * number;
        if state % 2 == 1
            || newer
            || slot.state.compare_exchange(state, 2 * number + 1, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        for (word, value) in slot.words.iter().zip(record) {
            // Release: a reader that sees this word also sees the odd state before it.
            word.store(value, Ordering::Release);
        }
        slot.state.store(2 * number + 2, Ordering::Release);
        true
    }

    /// Records ever written.
    pub fn written(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// The complete records, oldest first; `None`: there is no memory for them.
    pub fn read(&self) -> Option<Vec<[u64; WORDS]>> {
        let end = self.written();
        let first = end.saturating_sub(self.slots.len() as u64);
        let mut records = Vec::new();
        records.try_reserve_exact((end - first) as usize).ok()?;
        for number in first..end {
            let slot = &self.slots[number as usize % self.slots.len()];
            if slot.state.load(Ordering::Acquire) != 2 * number + 2 {
                continue;
            }
            // Acquire: the state is read again after the words.
            let record = std::array::from_fn(|i| slot.words[i].load(Ordering::Acquire));
            if slot.state.load(Ordering::Relaxed) == 2 * number + 2 {
                records.push(record);
            }
        }
        Some(records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_records_stay() {
        let ring = Ring::<2>::new(4).unwrap();
        for i in 0..6 {
            assert!(ring.write([i, i * 10]));
        }
        assert_eq!(ring.read().unwrap(), [[2, 20], [3, 30], [4, 40], [5, 50]]);
        assert_eq!(ring.written(), 6);
    }

    #[test]
    fn records_are_never_torn() {
        let ring = Ring::<3>::new(8).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let ring = &ring;
                scope.spawn(move || {
                    for i in 0..5000 {
                        ring.write([thread << 32 | i; 3]);
                    }
                });
            }
            for _ in 0..200 {
                assert!(ring.read().unwrap().iter().all(|record| record[0] == record[1] && record[1] == record[2]));
            }
        });
    }
}
