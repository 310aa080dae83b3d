//! A week of serving on the host manager: weights that stay, sequences whose KV cache grows page by page and goes at once,
//! shared prefixes that are evicted, windows that roll, activations of every step, and a load that falls every night.
//!
//! Memory lost to fragmentation is, of the bytes that the manager holds, less those in whole free units, the part that no
//! live block has: rounding up, free blocks in slabs that are partly used, and what threads and depots keep. Whole free
//! units are not lost: any request may have them, and `trim` gives them back. It is taken at like points, at each noon,
//! when live blocks fill the server's budget. The limit is that budget and a twentieth, so that more than that cannot be
//! lost at any time without a request failing.
//!
//! `NVB_SERVING_OPERATIONS` (allocations and frees; 10⁹ for a week) makes it longer than the default run's few seconds.

use super::random::Random;
use super::sequence::executor;
use nvbackend::device::RawHandle;
use nvbackend::memory::options::Limit;
use nvbackend::memory::{MemoryManager, MemoryOptions};
use std::ffi::c_void;
use std::time::Instant;

const DAYS: u64 = 7;
/// Bytes in live blocks, which a step's last prompt passes by up to two hundredths. Nothing touches them.
const BUDGET: u64 = 24 << 30;
const LIMIT: u64 = BUDGET + BUDGET / 20;
const ADDRESSES: u64 = 4 * BUDGET;
/// Bytes of a page of 16 tokens in each cache: layers with full attention, with a window, an odd latent width, scales of an FP8 cache.
const PAGE_BYTES: [usize; 4] = [64 << 10, 320 << 10, 40_000, 1536];
/// The cache whose older pages are freed, and the pages that it keeps.
const WINDOWED: usize = 1;
const WINDOW_PAGES: usize = 16;
const PREFIXES: usize = 64;
/// The most of it that may be lost at the end.
const BOUND: f64 = 0.05;

type Pages = [Vec<*mut c_void>; PAGE_BYTES.len()];

struct Sequence {
    pages: Pages,
    /// Pages that are still to come.
    remaining: usize,
    prefix: Option<usize>,
}

#[derive(Default)]
struct Prefix {
    pages: Pages,
    users: usize,
    last_used: u64,
}

struct Server {
    manager: MemoryManager,
    random: Random,
    sequences: Vec<Sequence>,
    prefixes: Vec<Prefix>,
    live_bytes: u64,
    operations: u64,
    steps: u64,
    preempted: u64,
}

impl Server {
    fn allocate(&mut self, bytes: usize) -> *mut c_void {
        self.operations += 1;
        self.live_bytes += bytes as u64;
        self.manager.allocate(bytes, RawHandle::NULL).expect("enough memory")
    }

    fn free(&mut self, pointer: *mut c_void, bytes: usize) {
        self.operations += 1;
        self.live_bytes -= bytes as u64;
        self.manager.free(pointer, RawHandle::NULL).expect("a live block");
    }

    fn grow(&mut self, pages: &mut Pages) {
        for (cache, bytes) in PAGE_BYTES.into_iter().enumerate() {
            let page = self.allocate(bytes);
            pages[cache].push(page);
        }
        if pages[WINDOWED].len() > WINDOW_PAGES {
            let oldest = pages[WINDOWED].remove(0);
            self.free(oldest, PAGE_BYTES[WINDOWED]);
        }
    }

    fn drop_pages(&mut self, pages: &mut Pages) {
        for (cache, bytes) in PAGE_BYTES.into_iter().enumerate() {
            for page in std::mem::take(&mut pages[cache]) {
                self.free(page, bytes);
            }
        }
    }

    /// A new sequence: most prompts are short, a few fill pages by the hundred; two in three share a prefix.
    fn admit(&mut self) {
        let longest = 4 << self.random.index(7);
        let prompt = 1 + self.random.index(longest);
        let prefix = (self.random.index(3) > 0).then(|| {
            // The lower of two numbers: some prefixes are popular.
            let prefix = self.random.index(PREFIXES).min(self.random.index(PREFIXES));
            if self.prefixes[prefix].pages[0].is_empty() {
                let mut pages = Pages::default();
                for _ in 0..4 + prefix {
                    self.grow(&mut pages);
                }
                self.prefixes[prefix].pages = pages;
            }
            self.prefixes[prefix].users += 1;
            self.prefixes[prefix].last_used = self.steps;
            prefix
        });
        let remaining = 1 + self.random.index(128);
        let mut sequence = Sequence { pages: Pages::default(), remaining, prefix };
        for _ in 0..prompt {
            self.grow(&mut sequence.pages);
        }
        self.sequences.push(sequence);
    }

    fn end(&mut self, index: usize) {
        let mut sequence = self.sequences.swap_remove(index);
        self.drop_pages(&mut sequence.pages);
        if let Some(prefix) = sequence.prefix {
            self.prefixes[prefix].users -= 1;
        }
    }

    /// Frees the prefix that has been idle longest; `false` if all are in use.
    fn evict_prefix(&mut self) -> bool {
        let idle = |prefix: &&Prefix| prefix.users == 0 && !prefix.pages[0].is_empty();
        let Some(oldest) = self.prefixes.iter().filter(idle).map(|prefix| prefix.last_used).min() else { return false };
        let found = self.prefixes.iter().position(|prefix| idle(&prefix) && prefix.last_used == oldest);
        let mut pages = std::mem::take(&mut self.prefixes[found.expect("seen above")].pages);
        self.drop_pages(&mut pages);
        true
    }

    /// Temporaries of a step, freed in another order than they were allocated in.
    fn activations(&mut self) {
        let tokens = self.sequences.len().max(1) + self.random.index(512);
        let sizes =
            [tokens * 5120, tokens * 5120, tokens * 2 * 21_504, tokens * 6144, self.sequences.len().max(1) * 4096];
        let blocks = sizes.map(|bytes| (self.allocate(bytes), bytes));
        for i in [2, 0, 3, 1, 4] {
            self.free(blocks[i].0, blocks[i].1);
        }
    }

    /// All sequences go on by a page; sequences come while the load allows.
    fn step(&mut self, load: f64) {
        self.steps += 1;
        self.activations();
        while self.live_bytes < (BUDGET as f64 * load) as u64 {
            self.admit();
        }
        let mut index = 0;
        while index < self.sequences.len() {
            if self.sequences[index].remaining == 0 {
                self.end(index);
                continue;
            }
            self.sequences[index].remaining -= 1;
            let mut pages = std::mem::take(&mut self.sequences[index].pages);
            self.grow(&mut pages);
            self.sequences[index].pages = pages;
            index += 1;
        }
        while self.live_bytes > BUDGET {
            if !self.evict_prefix() {
                // The youngest has to come again later.
                self.preempted += 1;
                self.end(self.sequences.len() - 1);
            }
        }
    }

    /// (bytes held, bytes held but for whole free units, the part of these that is lost)
    fn loss(&self) -> (u64, u64, f64) {
        let statistics = self.manager.get_statistics();
        assert_eq!(statistics.allocated, self.live_bytes);
        let held = statistics.reserved - statistics.free_pages;
        (statistics.reserved, held, 1.0 - self.live_bytes as f64 / held as f64)
    }
}

#[test]
fn a_week_of_serving_loses_little_memory() {
    let operations =
        std::env::var("NVB_SERVING_OPERATIONS").map_or(100_000_000, |text| text.parse().expect("a number"));
    let options = MemoryOptions { limit: Limit::Bytes(LIMIT), range_bytes: ADDRESSES, ..MemoryOptions::default() };
    let manager = MemoryManager::new(executor(), options).expect("a manager");
    let mut server = Server {
        manager,
        random: Random(0x2545_f491_4f6c_dd1d),
        sequences: Vec::new(),
        prefixes: (0..PREFIXES).map(|_| Prefix::default()).collect(),
        live_bytes: 0,
        operations: 0,
        steps: 0,
        preempted: 0,
    };
    let weights: Vec<_> = (0..320)
        .map(|i| {
            let bytes = [73_400_320, 26_214_400, 10_240, 5_242_880][i % 4];
            (server.allocate(bytes), bytes)
        })
        .collect();
    let start = Instant::now();
    let mut losses = Vec::new();
    while server.operations < operations {
        let day = server.operations as f64 * DAYS as f64 / operations as f64;
        server.step(0.6 - 0.4 * (day * std::f64::consts::TAU).cos());
        if day >= losses.len() as f64 + 0.5 {
            let (reserved, held, lost) = server.loss();
            println!(
                "day {}: {} operations, {} sequences; MiB: {} live, {} held, {} not in free units; {:.2} % lost",
                losses.len() + 1,
                server.operations,
                server.sequences.len(),
                server.live_bytes >> 20,
                reserved >> 20,
                held >> 20,
                100.0 * lost
            );
            losses.push(lost);
        }
    }
    let statistics = server.manager.get_statistics();
    println!(
        "{} operations in {:.1} s, {:.0} ns each; at most {} MiB live and {} MiB held; {} sequences put off; recovery steps {:?}",
        server.operations,
        start.elapsed().as_secs_f64(),
        start.elapsed().as_nanos() as f64 / server.operations as f64,
        statistics.peak >> 20,
        statistics.peak_reserved >> 20,
        server.preempted,
        statistics.recovery_steps.map(|step| (step.tried, step.helped))
    );
    assert_eq!(losses.len() as u64, DAYS);
    let last = *losses.last().expect("seven days");
    assert!(last <= BOUND, "{:.2} % of the memory is lost at the end", 100.0 * last);

    while !server.sequences.is_empty() {
        server.end(0);
    }
    while server.evict_prefix() {}
    for (pointer, bytes) in weights {
        server.free(pointer, bytes);
    }
    server.manager.trim(0).expect("no failures");
    assert_eq!(server.manager.get_statistics().reserved, 0);
}
