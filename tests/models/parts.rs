//! The files of src/memory, unchanged, over loom's atomics in the place of std's (`sync`), and over stand-ins for what they
//! merely name.
// A part of each file is all that the models call.
#![allow(dead_code, unused_imports, clippy::new_without_default)]

#[path = "../../src/memory/batch.rs"]
pub mod batch;
#[path = "../../src/memory/cache.rs"]
pub mod cache;
#[path = "../../src/memory/depot.rs"]
pub mod depot;
#[path = "../../src/memory/magazines.rs"]
pub mod magazines;
#[path = "../../src/memory/remote.rs"]
pub mod remote;
#[path = "../../src/memory/ring.rs"]
pub mod ring;
#[path = "../../src/memory/size_class.rs"]
pub mod size_class;
#[path = "../../src/memory/slab.rs"]
pub mod slab;
#[path = "../../src/memory/spin.rs"]
pub mod spin;

pub mod sync {
    pub use loom::cell::UnsafeCell;
    pub use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};

    /// Lines play no part in a model: words stand side by side.
    pub const LINE_BYTES: usize = 4;

    pub fn zero_words(count: usize) -> Option<Box<[AtomicU32]>> {
        Some((0..count).map(|_| AtomicU32::new(0)).collect())
    }

    pub fn prefetch_for_write<T>(_address: *const T) {}

    /// Any other thread may go on: without that a model would spin for ever.
    pub fn relax(_spins: u32) {
        loom::thread::yield_now();
    }
}

pub mod page_table {
    use super::slab::Slab;

    pub const UNIT_BYTES: usize = 2 << 20;

    /// One slab.
    pub struct PageTable(pub Slab);

    impl PageTable {
        pub fn find(&self, address: usize) -> Option<&Slab> {
            self.0.locate(address).map(|_| &self.0)
        }
    }
}

pub mod order {
    #[derive(Clone)]
    pub struct Order(pub u32);

    impl Order {
        pub fn label(&self) -> u32 {
            self.0
        }
    }
}

pub mod arena {
    use super::page_table::PageTable;
    use loom::sync::atomic::{AtomicBool, Ordering};

    pub struct Arena {
        pub table: PageTable,
        pub alive: AtomicBool,
    }

    impl Arena {
        pub fn table(&self) -> &PageTable {
            assert!(self.alive.load(Ordering::Relaxed), "the arena is used after its end");
            &self.table
        }
    }
}

pub mod statistics {
    use super::arena::Arena;

    #[derive(Default)]
    pub struct Counters {}

    impl Counters {
        pub fn allocated(&self, _bytes: u64, arena: &Arena) {
            arena.table();
        }
        pub fn freed(&self, _bytes: u64, arena: &Arena) {
            arena.table();
        }
        pub fn flush(&self, arena: &Arena) {
            arena.table();
        }
        pub fn empty(&self, arena: &Arena) {
            arena.table();
        }
    }
}
