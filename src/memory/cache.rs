//! What a thread keeps for itself: for each stream and class a magazine of free blocks.
//!
//! Allocating and freeing are a push or a pop under a lock that nobody else wants, except when memory is short, the
//! cache is trimmed, a stream ends or the thread does: then whoever needs the blocks empties the magazines.

use super::arena::Arena;
use super::batch::Batch;
use super::order::Order;
use super::size_class::{class_bytes, magazine_capacity, CLASSES};
use super::slab::{Block, SLACK_SHIFT, TRACKED};
use super::spin::SpinLock;
use super::statistics::Counters;
use super::sync::{AtomicBool, AtomicPtr, Ordering};
use std::ffi::c_void;

/// The key of blocks that were freed without a stream: they wait for all work. No stream has this handle.
pub const ALL_WORK_KEY: usize = usize::MAX;
/// The key of blocks that anybody may use at once.
pub const ANYBODY_KEY: usize = 0;

/// So many allocations before its own a block's word is fetched from the processor that wrote it last. A whole batch's words
/// at once hold up whoever takes it: with 16 threads, each passing blocks to the next on a stream of its own, that is 3 %
/// slower.
const WORDS_AHEAD: usize = 4;

/// Magazines of blocks that were freed on one stream.
struct StreamMagazines {
    key: usize,
    order: Order,
    /// The thread has allocated from them since the cache last was full. Else they only collect what others allocated.
    used: bool,
    magazines: [Vec<Block>; CLASSES],
}

#[derive(Default)]
pub struct Inner {
    /// Who may use the cache; 0: nobody.
    token: u64,
    /// Index of the stream that was used last.
    recent: usize,
    streams: Vec<StreamMagazines>,
    bytes: usize,
    settings: Settings,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Settings {
    /// Bytes that all magazines together may hold.
    pub capacity: usize,
    /// Bytes until an allocation must take the long way, because the leak tracker wants to see it.
    pub credit: i64,
    /// All allocations take the long way, because they are traced.
    pub slow_allocations: bool,
    /// All frees do, because they are traced or overwritten.
    pub slow_frees: bool,
    /// Blocks may carry `TRACKED`; their frees take the long way.
    pub tracked: bool,
}

#[repr(align(128))]
pub struct Cache {
    arena: *const Arena,
    inner: SpinLock<Inner>,
    pub counters: Counters,
    /// The next cache of the arena; written before the cache is listed.
    pub next: AtomicPtr<Cache>,
    claimed: AtomicBool,
}

// SAFETY: the arena is read only while the token says that the cache is in use, and then it lives.
unsafe impl Send for Cache {}
// SAFETY: as above; the rest is locked or atomic.
unsafe impl Sync for Cache {}

pub enum Taken {
    Block(*mut c_void),
    /// The magazine is empty.
    Empty,
    /// Take the long way.
    Slow,
    /// The cache is no longer the caller's.
    Stale,
}

pub enum Given {
    Done,
    /// A magazine or the cache was full; this batch must move on.
    Spilled(Batch),
    /// There are no magazines for the stream yet: `add_stream` and come again.
    NewStream,
    /// Take the long way.
    Slow,
    /// Not the start of a live block.
    NotLive,
    /// Not a small block of this cache's arena.
    Elsewhere,
    /// The cache is no longer the caller's.
    Stale,
}

impl Cache {
    pub fn new(arena: *const Arena) -> Cache {
        Cache {
            arena,
            inner: SpinLock::new(Inner::default()),
            counters: Counters::default(),
            next: AtomicPtr::new(std::ptr::null_mut()),
            claimed: AtomicBool::new(false),
        }
    }

    /// Makes the cache the caller's if it is nobody's. `token` is not 0 and was never used before.
    pub fn claim(&self, token: u64, settings: Settings) -> bool {
        let free = !self.claimed.swap(true, Ordering::AcqRel);
        if free {
            self.inner.with(|inner| (inner.token, inner.settings) = (token, settings));
        }
        free
    }

    pub fn belongs_to(&self, token: u64) -> bool {
        self.inner.with(|inner| inner.token == token)
    }

    /// Ends the claim and hands what the magazines held to `receive`, while nobody can take the arena away.
    pub fn disown(&self, token: u64, receive: impl FnOnce(&Arena, Vec<Batch>)) {
        self.inner.with(|inner| {
            if inner.token == token {
                inner.token = 0;
                // SAFETY: the arena ends every claim before it goes, and this one had not been ended.
                receive(unsafe { &*self.arena }, inner.drain(|_| true));
                self.claimed.store(false, Ordering::Release);
            }
        });
    }

    /// Ends any claim, as the arena does before it goes.
    pub fn close(&self, arena: &Arena) -> Vec<Batch> {
        self.inner.with(|inner| {
            inner.token = 0;
            self.counters.empty(arena);
            self.claimed.store(false, Ordering::Release);
            inner.drain(|_| true)
        })
    }

    /// Takes out the magazines of one stream, or all.
    pub fn drain(&self, label: Option<u32>) -> Vec<Batch> {
        self.inner.with(|inner| inner.drain(|order| label.is_none_or(|label| order.label() == label)))
    }

    /// Takes over which ways the settings say are long.
    pub fn set_slow(&self, settings: Settings) {
        self.inner.with(|inner| {
            inner.settings.slow_allocations = settings.slow_allocations;
            inner.settings.slow_frees = settings.slow_frees;
        });
    }

    /// A block of `class` that may be used on the stream at once, for a request of `bytes`.
    #[inline]
    pub fn take(&self, token: u64, key: usize, class: usize, bytes: usize) -> Taken {
        self.inner.with(|inner| {
            if inner.token != token {
                return Taken::Stale;
            }
            let block_bytes = class_bytes(class);
            if inner.settings.slow_allocations || inner.settings.credit < block_bytes as i64 {
                return Taken::Slow;
            }
            let Some(stream) = inner.find(key) else { return Taken::Empty };
            stream.used = true;
            let magazine = &mut stream.magazines[class];
            let Some(block) = magazine.pop() else { return Taken::Empty };
            if let Some(soon) = magazine.iter().rev().nth(WORDS_AHEAD - 1) {
                soon.prepare();
            }
            if let Some(next) = magazine.last() {
                block.precede(next);
            }
            inner.settings.credit -= block_bytes as i64;
            inner.bytes -= block_bytes;
            block.begin_life(bytes, 0);
            // SAFETY: the token says that the arena lives.
            self.counters.allocated(bytes as u64, unsafe { &*self.arena });
            Taken::Block(block.address() as *mut c_void)
        })
    }

    /// As `take`, whatever the credit, and without beginning a life.
    pub fn take_block(&self, token: u64, key: usize, class: usize) -> Option<Block> {
        self.inner.with(|inner| {
            if inner.token != token {
                return None;
            }
            let block = inner.find(key)?.magazines[class].pop()?;
            inner.bytes -= class_bytes(class);
            Some(block)
        })
    }

    /// Counts an allocation that did not come from `take`.
    pub fn count_allocated(&self, bytes: usize, arena: &Arena) {
        self.inner.with(|_| self.counters.allocated(bytes as u64, arena));
    }

    pub fn flush_counters(&self, arena: &Arena) {
        self.inner.with(|_| self.counters.flush(arena));
    }

    /// Counts a block that never was in a magazine. Returns the label of the stream, as `label_of`.
    pub fn count_freed(&self, token: u64, key: usize, bytes: usize, arena: &Arena) -> Option<u32> {
        self.inner.with(|inner| {
            self.counters.freed(bytes as u64, arena);
            inner.label_of(token, key)
        })
    }

    /// Whether an allocation that did not come from `take` uses up the credit, which then is renewed.
    pub fn spend_credit(&self, token: u64, bytes: usize, renewed: i64) -> bool {
        self.inner.with(|inner| {
            let spent = inner.token == token && inner.settings.credit < bytes as i64;
            inner.settings.credit = if spent { renewed } else { inner.settings.credit.saturating_sub(bytes as i64) };
            spent
        })
    }

    /// Frees the block at `address`. Where that makes a batch move on, the caller must be able to (`may_spill`).
    #[inline]
    pub fn give(&self, token: u64, key: usize, address: usize, may_spill: bool) -> Given {
        self.inner.with(|inner| {
            if inner.token != token {
                return Given::Stale;
            }
            // SAFETY: the token says that the arena lives, and with it its pages.
            match self.locate(unsafe { &*self.arena }, address) {
                Ok(block) => self.take_back(inner, key, block, may_spill),
                Err(refusal) => refusal,
            }
        })
    }

    /// Frees blocks as `give` would that may not spill, up to the first that it would not take. Returns their number.
    ///
    /// Blocks that come from other threads are what is freed by the dozen, and each of their words must be fetched from
    /// the processor that wrote it. Here the next ones are under way while the first is waited for.
    pub fn give_many(&self, token: u64, key: usize, addresses: &[*mut c_void]) -> usize {
        const AHEAD: usize = 16;
        self.inner.with(|inner| {
            let mut done = 0;
            for chunk in addresses.chunks(AHEAD) {
                if inner.token != token {
                    break;
                }
                let mut blocks = [None; AHEAD];
                for (block, address) in blocks.iter_mut().zip(chunk) {
                    // SAFETY: the token says that the arena lives, and with it its pages.
                    *block = self.locate(unsafe { &*self.arena }, *address as usize).ok();
                    block.iter().for_each(Block::prepare);
                }
                for block in &blocks[..chunk.len()] {
                    let Some(block) = block else { return done };
                    if !matches!(self.take_back(inner, key, *block, false), Given::Done) {
                        return done;
                    }
                    done += 1;
                }
            }
            done
        })
    }

    /// The small block of the arena that starts at the address.
    #[inline]
    fn locate(&self, arena: &Arena, address: usize) -> Result<Block, Given> {
        let slab = arena.table().find(address).ok_or(Given::Elsewhere)?;
        if slab.arena() != self.arena || slab.is_large() {
            return Err(Given::Elsewhere);
        }
        match slab.locate(address) {
            Some((index, 0)) => Ok(Block::new(slab, index)),
            _ => Err(Given::NotLive),
        }
    }

    #[inline]
    fn take_back(&self, inner: &mut Inner, key: usize, block: Block, may_spill: bool) -> Given {
        if inner.settings.slow_frees {
            return Given::Slow;
        }
        let (slab, index) = (block.slab(), block.index());
        let class = slab.class();
        let Some(stream) = inner.find(key) else { return Given::NewStream };
        let full = stream.magazines[class].len() == magazine_capacity(class);
        if !may_spill && (full || inner.bytes + class_bytes(class) > inner.settings.capacity) {
            return Given::Slow;
        }
        let unless = if inner.settings.tracked { TRACKED } else { 0 };
        let Some(word) = slab.end_life(index, unless) else {
            return if slab.live_bytes(index).is_some() { Given::Slow } else { Given::NotLive };
        };
        slab.prepare_successor(index);
        let bytes = class_bytes(class) - (word >> SLACK_SHIFT) as usize;
        // SAFETY: callers have checked the token, which says that the arena lives.
        self.counters.freed(bytes as u64, unsafe { &*self.arena });
        match inner.put(key, block) {
            Some(batch) => Given::Spilled(batch),
            None => Given::Done,
        }
    }

    /// Keeps a block that `give` would not take, after its life has ended. Returns a batch that must move on.
    pub fn give_block(&self, token: u64, key: usize, block: Block, bytes: usize) -> Result<Option<Batch>, Block> {
        self.inner.with(|inner| {
            if inner.token != token || inner.find(key).is_none() {
                return Err(block);
            }
            // SAFETY: the token says that the arena lives.
            self.counters.freed(bytes as u64, unsafe { &*self.arena });
            Ok(inner.put(key, block))
        })
    }

    /// Keeps blocks that may be used on the stream. Returns those that do not fit, and batches that had to make room: of
    /// streams that the thread does not allocate on.
    pub fn keep(&self, token: u64, key: usize, class: usize, mut blocks: Vec<Block>) -> (Vec<Block>, Vec<Batch>) {
        self.inner.with(|inner| {
            let mut evicted = Vec::new();
            if inner.token != token || inner.find(key).is_none() {
                return (blocks, evicted);
            }
            while inner.bytes + blocks.len() * class_bytes(class) > inner.settings.capacity {
                let idle = |stream: &StreamMagazines| usize::from(!stream.used && stream.key != key);
                let Some(batch) = inner.evict(idle) else { break };
                evicted.push(batch);
            }
            let room = inner.settings.capacity.saturating_sub(inner.bytes) / class_bytes(class);
            let Some(stream) = inner.find(key) else { return (blocks, evicted) };
            let magazine = &mut stream.magazines[class];
            let room = room.min(magazine_capacity(class).saturating_sub(magazine.len()));
            let rest = blocks.split_off(room.min(blocks.len()));
            let kept = blocks.len();
            blocks.iter().rev().take(WORDS_AHEAD).for_each(Block::prepare);
            magazine.append(&mut blocks);
            inner.bytes += kept * class_bytes(class);
            (rest, evicted)
        })
    }

    /// What blocks that are freed on the stream wait for; `None`: there are no magazines for it.
    pub fn order_of(&self, token: u64, key: usize) -> Option<Order> {
        self.inner.with(|inner| if inner.token == token { inner.find(key).map(|it| it.order.clone()) } else { None })
    }

    pub fn label_of(&self, token: u64, key: usize) -> Option<u32> {
        self.inner.with(|inner| inner.label_of(token, key))
    }

    /// Makes magazines for a stream.
    pub fn add_stream(&self, token: u64, key: usize, order: Order) {
        self.inner.with(|inner| {
            if inner.token == token && inner.find(key).is_none() {
                let magazines = std::array::from_fn(|_| Vec::new());
                inner.streams.push(StreamMagazines { key, order, used: false, magazines });
            }
        });
    }
}

impl Inner {
    #[inline]
    fn find(&mut self, key: usize) -> Option<&mut StreamMagazines> {
        if self.streams.get(self.recent).is_none_or(|stream| stream.key != key) {
            self.recent = self.streams.iter().position(|stream| stream.key == key)?;
        }
        self.streams.get_mut(self.recent)
    }

    fn label_of(&mut self, token: u64, key: usize) -> Option<u32> {
        if self.token == token {
            self.find(key).map(|stream| stream.order.label())
        } else {
            None
        }
    }

    /// Adds a free block to the magazines of `key`, which exist. A full magazine gives its older half away; a full cache
    /// the magazine that holds most.
    #[inline]
    fn put(&mut self, key: usize, block: Block) -> Option<Batch> {
        let class = block.slab().class();
        let stream = self.find(key)?;
        let magazine = &mut stream.magazines[class];
        if magazine.len() < magazine_capacity(class) {
            magazine.push(block);
            self.bytes += class_bytes(class);
            return if self.bytes > self.settings.capacity { self.make_room() } else { None };
        }
        let blocks: Vec<Block> = magazine.drain(..magazine_capacity(class) / 2).collect();
        magazine.push(block);
        let order = stream.order.clone();
        self.bytes -= (blocks.len() - 1) * class_bytes(class);
        Some(Batch { class, blocks, order })
    }

    /// The cache is full. What the thread allocates from it would have to fetch back, so that goes for a quarter of its
    /// bytes.
    fn make_room(&mut self) -> Option<Batch> {
        let batch = self.evict(|stream| if stream.used { 1 } else { 4 });
        self.streams.iter_mut().for_each(|stream| stream.used = false);
        batch
    }

    /// Takes out the magazine whose bytes times the weight of its stream are most. `None`: all weigh nothing.
    fn evict(&mut self, weight: impl Fn(&StreamMagazines) -> usize) -> Option<Batch> {
        let weights = self.streams.iter().enumerate().flat_map(|(at, stream)| {
            let (weight, magazines) = (weight(stream), stream.magazines.iter().enumerate());
            magazines.map(move |(class, magazine)| (magazine.len() * class_bytes(class) * weight, at, class))
        });
        let (_, at, class) = weights.max().filter(|(weight, ..)| *weight > 0)?;
        let stream = &mut self.streams[at];
        let blocks: Vec<Block> = stream.magazines[class].drain(..).collect();
        self.bytes -= blocks.len() * class_bytes(class);
        Some(Batch { class, blocks, order: stream.order.clone() })
    }

    fn drain(&mut self, wanted: impl Fn(&Order) -> bool) -> Vec<Batch> {
        let mut batches = Vec::new();
        let mut bytes = 0;
        self.streams.retain_mut(|stream| {
            if !wanted(&stream.order) {
                return true;
            }
            for (class, magazine) in stream.magazines.iter_mut().enumerate() {
                if !magazine.is_empty() {
                    let blocks = std::mem::take(magazine);
                    bytes += blocks.len() * class_bytes(class);
                    batches.push(Batch { class, blocks, order: stream.order.clone() });
                }
            }
            false
        });
        self.bytes -= bytes;
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::super::size_class::slab_units;
    use super::super::slab::Slab;
    use super::*;

    const CLASS: usize = 20;
    const OWN: usize = 8;
    const OTHERS: usize = 16;

    fn slab() -> Slab {
        let slab = Slab::new(CLASS);
        slab.place(std::ptr::null(), 1 << 40, 0, slab_units(CLASS));
        slab
    }

    /// A cache with room for `capacity` blocks and magazines for two streams, of which the thread allocates on the first.
    fn cache(capacity: usize) -> Cache {
        let cache = Cache::new(std::ptr::null());
        assert!(cache.claim(1, Settings { capacity: capacity * class_bytes(CLASS), ..Settings::default() }));
        cache.add_stream(1, OWN, Order::AllWork);
        cache.add_stream(1, OTHERS, Order::AllWork);
        cache
    }

    fn blocks(slab: &Slab, indices: std::ops::Range<u32>) -> Vec<Block> {
        indices.map(|index| Block::new(slab, index)).collect()
    }

    fn held(cache: &Cache, key: usize) -> usize {
        cache.inner.with(|inner| inner.find(key).map_or(0, |stream| stream.magazines[CLASS].len()))
    }

    #[test]
    fn a_full_cache_lets_go_of_what_the_thread_does_not_allocate_from() {
        for (used, evicted) in [(true, OTHERS), (false, OWN)] {
            let (slab, cache) = (slab(), cache(8));
            assert!(cache.keep(1, OWN, CLASS, blocks(&slab, 0..5)).0.is_empty());
            cache.inner.with(|inner| inner.find(OWN).expect("added").used = used);
            let batches: Vec<Batch> = (5..9)
                .filter_map(|index| cache.inner.with(|inner| inner.put(OTHERS, Block::new(&slab, index))))
                .collect();
            let [batch] = &batches[..] else { panic!("{} batches", batches.len()) };
            assert_eq!(held(&cache, evicted), 0);
            assert_eq!(batch.blocks.len(), if evicted == OWN { 5 } else { 4 });
            assert_eq!(cache.inner.with(|inner| inner.bytes), (9 - batch.blocks.len()) * class_bytes(CLASS));
        }
    }

    #[test]
    fn what_is_kept_makes_room_among_streams_that_the_thread_does_not_allocate_on() {
        for used in [false, true] {
            let (slab, cache) = (slab(), cache(8));
            assert!(cache.keep(1, OTHERS, CLASS, blocks(&slab, 0..6)).0.is_empty());
            cache.inner.with(|inner| inner.find(OTHERS).expect("added").used = used);
            let (rest, evicted) = cache.keep(1, OWN, CLASS, blocks(&slab, 6..10));
            let expected = if used { (2, 0, 2, 6) } else { (0, 1, 4, 0) };
            assert_eq!((rest.len(), evicted.len(), held(&cache, OWN), held(&cache, OTHERS)), expected);
        }
    }

    #[test]
    fn nobody_elses_cache_keeps_anything() {
        let (slab, cache) = (slab(), cache(8));
        assert_eq!(cache.keep(2, OWN, CLASS, blocks(&slab, 0..3)).0.len(), 3, "another claim's token");
        assert_eq!(cache.keep(1, 24, CLASS, blocks(&slab, 0..3)).0.len(), 3, "no magazines for the stream");
        assert_eq!(cache.keep(1, OWN, CLASS, blocks(&slab, 0..20)).0.len(), 12, "as many as there is room for");
    }
}
