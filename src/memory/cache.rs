//! What a thread keeps for itself: its magazines, and how far it may go without looking at the manager.
//!
//! Allocating and freeing are a push or a pop under a lock that nobody else wants, except when memory is short, the
//! cache is trimmed, a stream ends or the thread does: then whoever needs the blocks empties the magazines.

use super::arena::Arena;
use super::batch::Batch;
use super::magazines::Magazines;
use super::order::Order;
use super::size_class::class_bytes;
use super::slab::{Block, SLACK_SHIFT, TRACKED};
use super::spin::SpinLock;
use super::statistics::Counters;
use super::sync::{AtomicBool, AtomicPtr, Ordering};
use std::ffi::c_void;

/// The key of blocks that were freed without a stream: they wait for all work. No stream has this handle.
pub const ALL_WORK_KEY: usize = usize::MAX;
/// The key of blocks that anybody may use at once.
pub const ANYBODY_KEY: usize = 0;

#[derive(Default)]
pub struct Inner {
    /// Who may use the cache; 0: nobody.
    token: u64,
    magazines: Magazines,
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
            self.inner.with(|inner| {
                (inner.token, inner.settings) = (token, settings);
                inner.magazines.set_capacity(settings.capacity);
            });
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
                receive(unsafe { &*self.arena }, inner.magazines.drain(|_| true));
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
            inner.magazines.drain(|_| true)
        })
    }

    /// Takes out the magazines of one stream, or all.
    pub fn drain(&self, label: Option<u32>) -> Vec<Batch> {
        self.inner.with(|inner| inner.magazines.drain(|order| label.is_none_or(|label| order.label() == label)))
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
            let Some(block) = inner.magazines.pop(key, class) else { return Taken::Empty };
            inner.settings.credit -= block_bytes as i64;
            block.begin_life(bytes, 0);
            // SAFETY: the token says that the arena lives.
            self.counters.allocated(bytes as u64, unsafe { &*self.arena });
            Taken::Block(block.address() as *mut c_void)
        })
    }

    /// Takes a block as `take` does, whatever the credit, and without beginning a life.
    pub fn take_block(&self, token: u64, key: usize, class: usize) -> Option<Block> {
        self.inner.with(|inner| {
            if inner.token != token {
                return None;
            }
            inner.magazines.pop(key, class)
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
        let Some(full) = inner.magazines.is_full(key, class) else { return Given::NewStream };
        if full && !may_spill {
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
        match inner.magazines.put(key, block) {
            Some(batch) => Given::Spilled(batch),
            None => Given::Done,
        }
    }

    /// Keeps a block that `give` would not take, after its life has ended. Returns a batch that must move on.
    pub fn give_block(&self, token: u64, key: usize, block: Block, bytes: usize) -> Result<Option<Batch>, Block> {
        self.inner.with(|inner| {
            if inner.token != token || inner.magazines.order(key).is_none() {
                return Err(block);
            }
            // SAFETY: the token says that the arena lives.
            self.counters.freed(bytes as u64, unsafe { &*self.arena });
            Ok(inner.magazines.put(key, block))
        })
    }

    /// Keeps blocks as `Magazines::keep` does, but nothing for others than the cache's owner.
    pub fn keep(&self, token: u64, key: usize, class: usize, blocks: Vec<Block>) -> (Vec<Block>, Vec<Batch>) {
        self.inner.with(|inner| {
            if inner.token != token {
                return (blocks, Vec::new());
            }
            inner.magazines.keep(key, class, blocks)
        })
    }

    /// What blocks that are freed on the stream wait for; `None`: there are no magazines for it.
    pub fn order_of(&self, token: u64, key: usize) -> Option<Order> {
        self.inner.with(|inner| if inner.token == token { inner.magazines.order(key).cloned() } else { None })
    }

    pub fn label_of(&self, token: u64, key: usize) -> Option<u32> {
        self.inner.with(|inner| inner.label_of(token, key))
    }

    /// Makes magazines for a stream.
    pub fn add_stream(&self, token: u64, key: usize, order: Order) {
        self.inner.with(|inner| {
            if inner.token == token {
                inner.magazines.add_stream(key, order);
            }
        });
    }
}

impl Inner {
    fn label_of(&mut self, token: u64, key: usize) -> Option<u32> {
        if self.token == token {
            self.magazines.order(key).map(Order::label)
        } else {
            None
        }
    }
}
