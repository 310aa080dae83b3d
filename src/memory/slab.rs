//! Slabs: runs of units cut into blocks of one class, or one large block. All that is known about blocks is kept on the
//! host, because device memory cannot be read from here.

use super::arena::Arena;
use super::remote::{Linked, RemoteList};
use super::size_class::{class_bytes, slab_blocks, slab_units, GRANULE, LARGE};
use super::sync::{prefetch_for_write, zero_words, AtomicPtr, AtomicU16, AtomicU32, Ordering, LINE_BYTES};
use std::cell::UnsafeCell;
use std::sync::atomic::AtomicUsize;

/// A block's word while a caller has it: bit 0; the bytes by which the block exceeds the request: from bit 8 on.
pub const LIVE: u32 = 1;
/// The leak tracker knows the block.
pub const TRACKED: u32 = 2;
pub const SLACK_SHIFT: u32 = 8;

const NO_INDEX: u16 = u16::MAX;

/// Only what never changes is read without care: slabs are recycled within their class, and a pointer that a caller
/// frees twice may name one that has another life by now.
pub struct Slab {
    class: usize,
    count: u32,
    /// ⌈2³² / granules of a block⌉, to divide by multiplying.
    reciprocal: u64,
    base: AtomicUsize,
    unit: AtomicU32,
    units: AtomicU32,
    arena: AtomicPtr<Arena>,
    /// The block at an index has the word at `index << spread`.
    words: Box<[AtomicU32]>,
    spread: u32,
    links: Box<[AtomicU16]>,
    shared: Shared,
}

/// What threads write while others read the above: on lines of its own, so that they do not take it away from each other.
#[repr(align(128))]
struct Shared {
    remote: RemoteList,
    pending: AtomicPtr<Slab>,
    /// Where the list of large blocks has this one; of the holder of that list's lock.
    place_in_list: AtomicUsize,
    local: UnsafeCell<Local>,
}

/// Blocks that threads hold side by side would share the cache lines of their words, and whoever allocates or frees one
/// would take the line from the others; on lines of their own, a block passed between threads costs one transfer. Words
/// take at most a 32nd of what they stand for, so those of blocks from 2 KiB on stand alone, and every one has room for its
/// successor. With sixteen threads beside an H200 that is a tenth faster than a 128th; a 16th is no faster.
const fn word_spread(class: usize) -> u32 {
    const WORD_BYTES: usize = 4;
    if class == LARGE {
        return 0;
    }
    let room = class_bytes(class) / 32;
    let bytes = if room < LINE_BYTES { room } else { LINE_BYTES };
    (bytes / WORD_BYTES).ilog2()
}

fn line_of(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word) as usize / LINE_BYTES
}

/// What the class's lock guards.
pub struct Local {
    free: u16,
    /// Blocks from this one on were never handed out.
    fresh: u32,
    /// Blocks outside: live, in a magazine, in the depot or on the remote list.
    pub outstanding: u32,
    /// Whether the class lists the slab as having blocks to give.
    pub listed: bool,
}

/// A name of a block: its slab's address, which ends in `ADDRESS_ZEROS` zero bits, moved up by as many, and its index in the
/// bits below. Eight of them share a line, and a batch of 64 comes from another processor in eight.
#[derive(Clone, Copy)]
pub struct Block(u64);

const ADDRESS_ZEROS: u32 = align_of::<Slab>().ilog2();
const _: () = assert!(slab_blocks(0) <= 1 << (2 * ADDRESS_ZEROS), "the smallest blocks' indices fit");

impl Linked for Slab {
    fn link(&self) -> &AtomicPtr<Slab> {
        &self.shared.pending
    }
}

impl Slab {
    /// `None`: there is no memory for its tables.
    pub fn new(class: usize) -> Option<Slab> {
        let count = if class == LARGE { 1 } else { slab_blocks(class) };
        let granules = if class == LARGE { 1 } else { class_bytes(class) / GRANULE };
        let mut links = Vec::new();
        if class != LARGE {
            links.try_reserve_exact(count).ok()?;
            links.resize_with(count, || AtomicU16::new(0));
        }
        Some(Slab {
            class,
            count: count as u32,
            reciprocal: (1u64 << 32).div_ceil(granules as u64),
            base: AtomicUsize::new(0),
            unit: AtomicU32::new(0),
            units: AtomicU32::new(0),
            arena: AtomicPtr::new(std::ptr::null_mut()),
            words: zero_words(count << word_spread(class))?,
            spread: word_spread(class),
            links: links.into_boxed_slice(),
            shared: Shared {
                remote: RemoteList::new(),
                pending: AtomicPtr::new(std::ptr::null_mut()),
                place_in_list: AtomicUsize::new(0),
                local: UnsafeCell::new(Local { free: NO_INDEX, fresh: 0, outstanding: 0, listed: false }),
            },
        })
    }

    /// A new life at another place, known to nobody yet but callers with stale addresses.
    pub fn place(&self, arena: *const Arena, base: usize, unit: usize, units: usize) {
        self.arena.store(arena.cast_mut(), Ordering::Relaxed);
        self.base.store(base, Ordering::Relaxed);
        self.unit.store(unit as u32, Ordering::Relaxed);
        self.units.store(units as u32, Ordering::Relaxed);
        // SAFETY: no class lists the slab, so nobody else reaches this part.
        unsafe { *self.local() = Local { free: NO_INDEX, fresh: 0, outstanding: 0, listed: false } };
    }

    pub fn set_place(&self, place: usize) {
        self.shared.place_in_list.store(place, Ordering::Relaxed);
    }

    pub fn get_place(&self) -> usize {
        self.shared.place_in_list.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn class(&self) -> usize {
        self.class
    }

    pub fn is_large(&self) -> bool {
        self.class == LARGE
    }

    #[inline]
    pub fn arena(&self) -> *const Arena {
        self.arena.load(Ordering::Relaxed)
    }

    pub fn unit(&self) -> usize {
        self.unit.load(Ordering::Relaxed) as usize
    }

    pub fn units(&self) -> usize {
        self.units.load(Ordering::Relaxed) as usize
    }

    /// The first `units` of a large slab stay its own.
    pub fn shorten(&self, units: usize) {
        self.units.store(units as u32, Ordering::Relaxed);
    }

    pub fn count(&self) -> u32 {
        self.count
    }

    #[inline]
    pub fn block_bytes(&self) -> usize {
        if self.class == LARGE {
            self.units() * super::page_table::UNIT_BYTES
        } else {
            class_bytes(self.class)
        }
    }

    #[inline]
    pub fn word(&self, index: u32) -> &AtomicU32 {
        &self.words[(index as usize) << self.spread]
    }

    /// Beside a word with room: how many lines from it the word lies of the block that was to be allocated next.
    #[inline]
    fn successor(&self, index: u32) -> Option<&AtomicU32> {
        (self.spread > 0).then(|| &self.words[((index as usize) << self.spread) + 1])
    }

    #[inline]
    fn successors_line(&self, index: u32) -> Option<usize> {
        let distance = self.successor(index)?.load(Ordering::Relaxed) as i32;
        Some(line_of(self.word(index)).wrapping_add_signed(distance as isize))
    }

    /// The block was freed. What was allocated next in its class is likely to be freed next, by the same thread: its word is
    /// asked for now, so that it has arrived by then, though another processor wrote it.
    #[inline]
    pub fn prepare_successor(&self, index: u32) {
        if let Some(line) = self.successors_line(index) {
            prefetch_for_write((line * LINE_BYTES) as *const AtomicU32);
        }
    }

    #[inline]
    pub fn address(&self, index: u32) -> usize {
        self.base.load(Ordering::Relaxed) + index as usize * self.block_bytes()
    }

    /// The block that an address of this slab lies in, and the offset from its start.
    #[inline]
    pub fn locate(&self, address: usize) -> Option<(u32, usize)> {
        let offset = address.wrapping_sub(self.base.load(Ordering::Relaxed));
        if self.class == LARGE {
            return (offset < self.block_bytes()).then_some((0, offset));
        }
        if offset >= slab_units(self.class) * super::page_table::UNIT_BYTES {
            return None;
        }
        let index = ((offset / GRANULE) as u64 * self.reciprocal) >> 32;
        (index < self.count.into()).then(|| (index as u32, offset - index as usize * class_bytes(self.class)))
    }

    /// Marks a block as free and returns its word. `None`, and nothing has changed: the block was not live, or has one
    /// of the flags of `unless`.
    #[inline]
    pub fn end_life(&self, index: u32, unless: u32) -> Option<u32> {
        let cell = self.word(index);
        if unless == 0 {
            // One exchange takes the line over once; a look first would fetch it twice when another thread had it. A
            // word that is not live is 0.
            let word = cell.swap(0, Ordering::AcqRel);
            return (word & LIVE != 0).then_some(word);
        }
        let word = cell.load(Ordering::Relaxed);
        let free_to_end = word & LIVE != 0 && word & unless == 0;
        (free_to_end && cell.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()).then_some(word)
    }

    pub fn live_bytes(&self, index: u32) -> Option<usize> {
        let word = self.word(index).load(Ordering::Acquire);
        (word & LIVE != 0).then(|| self.block_bytes() - (word >> SLACK_SHIFT) as usize)
    }

    /// Gives a block back from anywhere; `true` if the slab must now be announced to its class.
    pub fn give_back(&self, index: u32) -> bool {
        self.shared.remote.push(&self.links, index as u16)
    }

    /// # Safety
    /// The caller holds the class's lock.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn local(&self) -> &mut Local {
        // SAFETY: the lock's holder is the only one to call this.
        unsafe { &mut *self.shared.local.get() }
    }

    /// Collects what was given back.
    ///
    /// # Safety
    /// The conditions of `local` hold.
    pub unsafe fn collect(&self) {
        // SAFETY: by the caller's word.
        let local = unsafe { self.local() };
        self.shared.remote.drain(&self.links, |index| {
            self.links[index as usize].store(local.free, Ordering::Relaxed);
            local.free = index;
            local.outstanding -= 1;
        });
    }

    /// Takes up to `wanted` blocks; `false` if the slab has none left.
    ///
    /// # Safety
    /// The conditions of `local` hold.
    pub unsafe fn take(&self, wanted: usize, blocks: &mut Vec<Block>) -> bool {
        // SAFETY: by the caller's word.
        let local = unsafe { self.local() };
        for _ in 0..wanted {
            let index = if local.free != NO_INDEX {
                let index = local.free;
                local.free = self.links[index as usize].load(Ordering::Relaxed);
                index.into()
            } else if local.fresh < self.count {
                local.fresh += 1;
                local.fresh - 1
            } else {
                return false;
            };
            local.outstanding += 1;
            blocks.push(Block::new(self, index));
        }
        local.free != NO_INDEX || local.fresh < self.count
    }
}

impl Block {
    /// The one block of a large slab.
    pub fn large(slab: &Slab) -> Block {
        Block::new(slab, 0)
    }

    pub fn new(slab: &Slab, index: u32) -> Block {
        let address = std::ptr::from_ref(slab).expose_provenance() as u64;
        debug_assert!(address.leading_zeros() >= ADDRESS_ZEROS, "processors of today have 57 bits of address at most");
        Block(address << ADDRESS_ZEROS | u64::from(index))
    }

    #[inline]
    pub fn slab(&self) -> &Slab {
        let address = (self.0 >> (2 * ADDRESS_ZEROS) << ADDRESS_ZEROS) as usize;
        // SAFETY: `new`'s; slabs live as long as the manager, and blocks are only kept inside it.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }

    #[inline]
    pub fn index(&self) -> u32 {
        (self.0 & ((1 << (2 * ADDRESS_ZEROS)) - 1)) as u32
    }

    #[inline]
    pub fn address(&self) -> usize {
        self.slab().address(self.index())
    }

    /// The block's life begins or ends soon. Another thread wrote its word last, and fetching it meanwhile hides a part of
    /// what would hold up the exchange, or the first store.
    #[inline]
    pub fn prepare(&self) {
        prefetch_for_write(self.slab().word(self.index()));
    }

    /// `next` is what the thread would allocate next in the class. Only a hint, which may be wrong or from an older life.
    #[inline]
    pub fn precede(&self, next: &Block) {
        if let Some(distance) = self.slab().successor(self.index()) {
            let lines = line_of(next.slab().word(next.index())).wrapping_sub(line_of(self.slab().word(self.index())));
            // The distance of slabs 128 GiB apart is cut off and leads anywhere, which a prefetch may.
            distance.store(lines as u32, Ordering::Relaxed);
        }
    }

    /// Marks the block as live with `requested` of its bytes.
    #[inline]
    pub fn begin_life(&self, requested: usize, flags: u32) {
        let slack = (self.slab().block_bytes() - requested) as u32;
        // Relaxed: the caller passes the address on, and with it the order.
        self.slab().word(self.index()).store(slack << SLACK_SHIFT | flags | LIVE, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::size_class::CLASSES;
    use super::*;

    #[test]
    fn addresses_find_their_blocks_in_every_class() {
        for class in 0..CLASSES {
            let slab = Slab::new(class).unwrap();
            slab.place(std::ptr::null(), 1 << 40, 0, slab_units(class));
            for index in [0, 1, slab.count() / 2, slab.count() - 1] {
                let index = index.min(slab.count() - 1);
                let start = slab.address(index);
                assert_eq!(slab.locate(start), Some((index, 0)));
                let last = class_bytes(class) - 1;
                assert_eq!(slab.locate(start + last), Some((index, last)));
            }
            let end = slab.address(slab.count());
            assert_eq!(slab.locate(end), None, "the waste behind the last block is no block");
            assert_eq!(slab.locate((1 << 40) - 1), None);
        }
    }

    #[test]
    fn a_block_names_its_slab_and_index() {
        for class in [0, 10, CLASSES - 1] {
            let slab = Slab::new(class).unwrap();
            for index in [0, 1, slab.count() - 1] {
                let block = Block::new(&slab, index);
                assert!(std::ptr::eq(block.slab(), &slab));
                assert_eq!(block.index(), index);
            }
        }
    }

    #[test]
    fn a_block_leads_to_its_successor_in_either_direction() {
        let slabs = [Slab::new(10).unwrap(), Slab::new(10).unwrap()];
        assert!(slabs[0].spread > 0, "the class has room beside its words");
        let block = |slab: usize, index| Block::new(&slabs[slab], index);
        for (first, next) in [((0, 0), (0, 1)), ((0, 5), (0, 2)), ((0, 1), (1, 3)), ((1, 3), (0, 1))] {
            let (first, next) = (block(first.0, first.1), block(next.0, next.1));
            first.precede(&next);
            let line = line_of(next.slab().word(next.index()));
            assert_eq!(first.slab().successors_line(first.index()), Some(line));
        }
        assert_eq!(Slab::new(LARGE).unwrap().successors_line(0), None, "a large slab has one block");
    }

    #[test]
    fn blocks_are_taken_once_and_come_back() {
        let slab = Slab::new(10).unwrap();
        slab.place(std::ptr::null(), 1 << 40, 0, 1);
        let mut blocks = Vec::new();
        // SAFETY: one thread, so it stands in for the lock's holder.
        unsafe {
            assert!(!slab.take(usize::MAX, &mut blocks));
            assert_eq!(blocks.len() as u32, slab.count());
            assert!(slab.give_back(3) && !slab.give_back(5));
            slab.collect();
            assert_eq!(slab.local().outstanding, slab.count() - 2);
            blocks.clear();
            assert!(!slab.take(3, &mut blocks));
        }
        let mut taken: Vec<u32> = blocks.iter().map(Block::index).collect();
        taken.sort();
        assert_eq!(taken, [3, 5]);
        blocks[0].begin_life(100, 0);
        assert_eq!(slab.live_bytes(blocks[0].index()), Some(100));
        assert!(slab.end_life(blocks[0].index(), 0).is_some());
        assert!(slab.end_life(blocks[0].index(), 0).is_none());
    }
}
