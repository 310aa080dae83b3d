//! The magazines of one thread: free blocks by the stream that they were freed on and their class, up to a number of bytes
//! in all.

use super::batch::Batch;
use super::order::Order;
use super::size_class::{class_bytes, magazine_capacity, CLASSES};
use super::slab::Block;

/// How many allocations before its own a block's word is fetched from the processor that wrote it last. A whole batch's
/// words at once hold up whoever takes it: with 16 threads, each passing blocks to the next on a stream of its own,
/// that is 3 % slower.
const WORDS_AHEAD: usize = 4;

#[derive(Default)]
pub struct Magazines {
    /// Index of the stream that was used last.
    recent: usize,
    streams: Vec<StreamMagazines>,
    bytes: usize,
    /// Bytes that all together may hold.
    capacity: usize,
}

/// Magazines of blocks that were freed on one stream.
struct StreamMagazines {
    key: usize,
    order: Order,
    /// The thread has allocated from them since there last was no room. Else they only collect what others allocated.
    used: bool,
    magazines: [Vec<Block>; CLASSES],
}

impl Magazines {
    pub fn set_capacity(&mut self, bytes: usize) {
        self.capacity = bytes;
    }

    #[inline]
    fn find(&mut self, key: usize) -> Option<&mut StreamMagazines> {
        if self.streams.get(self.recent).is_none_or(|stream| stream.key != key) {
            self.recent = self.streams.iter().position(|stream| stream.key == key)?;
        }
        self.streams.get_mut(self.recent)
    }

    /// Makes magazines for a stream, unless there are some.
    pub fn add_stream(&mut self, key: usize, order: Order) {
        if self.find(key).is_none() {
            let magazines = std::array::from_fn(|_| Vec::new());
            self.streams.push(StreamMagazines { key, order, used: false, magazines });
        }
    }

    /// What the blocks of a stream wait for. `None`: there are no magazines for it.
    pub fn order(&mut self, key: usize) -> Option<&Order> {
        self.find(key).map(|stream| &stream.order)
    }

    /// Whether another block of the class would make a batch move on. `None`: there are no magazines for the stream.
    #[inline]
    pub fn is_full(&mut self, key: usize, class: usize) -> Option<bool> {
        let no_room = self.bytes + class_bytes(class) > self.capacity;
        self.find(key).map(|stream| no_room || stream.magazines[class].len() == magazine_capacity(class))
    }

    /// The block that was added last.
    #[inline]
    pub fn pop(&mut self, key: usize, class: usize) -> Option<Block> {
        let stream = self.find(key)?;
        stream.used = true;
        let magazine = &mut stream.magazines[class];
        let block = magazine.pop()?;
        if let Some(soon) = magazine.iter().rev().nth(WORDS_AHEAD - 1) {
            soon.prepare();
        }
        if let Some(next) = magazine.last() {
            block.precede(next);
        }
        self.bytes -= class_bytes(class);
        Some(block)
    }

    /// Adds a free block. Without magazines for the stream, or where one is full, a batch must move on: of a full magazine
    /// the older half.
    #[inline]
    pub fn put(&mut self, key: usize, block: Block) -> Option<Batch> {
        let class = block.slab().class();
        let stream = self.find(key)?;
        let magazine = &mut stream.magazines[class];
        if magazine.len() < magazine_capacity(class) {
            magazine.push(block);
            self.bytes += class_bytes(class);
            return if self.bytes > self.capacity { self.make_room() } else { None };
        }
        let blocks: Vec<Block> = magazine.drain(..magazine_capacity(class) / 2).collect();
        magazine.push(block);
        let order = stream.order.clone();
        self.bytes -= (blocks.len() - 1) * class_bytes(class);
        Some(Batch { class, blocks, order })
    }

    /// Keeps blocks that may be used on the stream. Returns those that do not fit, and batches that had to make room: of
    /// streams that the thread does not allocate on.
    pub fn keep(&mut self, key: usize, class: usize, mut blocks: Vec<Block>) -> (Vec<Block>, Vec<Batch>) {
        let mut evicted = Vec::new();
        if self.find(key).is_none() {
            return (blocks, evicted);
        }
        while self.bytes + blocks.len() * class_bytes(class) > self.capacity {
            let Some(batch) = self.evict(|stream| usize::from(!stream.used && stream.key != key)) else { break };
            evicted.push(batch);
        }
        let room = self.capacity.saturating_sub(self.bytes) / class_bytes(class);
        let Some(stream) = self.find(key) else { return (blocks, evicted) };
        let magazine = &mut stream.magazines[class];
        let room = room.min(magazine_capacity(class).saturating_sub(magazine.len()));
        let rest = blocks.split_off(room.min(blocks.len()));
        let kept = blocks.len();
        blocks.iter().rev().take(WORDS_AHEAD).for_each(Block::prepare);
        magazine.append(&mut blocks);
        self.bytes += kept * class_bytes(class);
        (rest, evicted)
    }

    /// What the thread allocates from it would have to fetch back, so that goes for a quarter of its bytes.
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

    /// Takes out the magazines of the streams whose order is wanted.
    pub fn drain(&mut self, wanted: impl Fn(&Order) -> bool) -> Vec<Batch> {
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
        let slab = Slab::new(CLASS).unwrap();
        slab.place(std::ptr::null(), 1 << 40, 0, slab_units(CLASS));
        slab
    }

    /// Room for `capacity` blocks of two streams, of which the thread allocates on the first.
    fn magazines(capacity: usize) -> Magazines {
        let mut magazines = Magazines::default();
        magazines.set_capacity(capacity * class_bytes(CLASS));
        magazines.add_stream(OWN, Order::AllWork);
        magazines.add_stream(OTHERS, Order::AllWork);
        magazines
    }

    fn blocks(slab: &Slab, indices: std::ops::Range<u32>) -> Vec<Block> {
        indices.map(|index| Block::new(slab, index)).collect()
    }

    fn held(magazines: &mut Magazines, key: usize) -> usize {
        magazines.find(key).map_or(0, |stream| stream.magazines[CLASS].len())
    }

    fn set_used(magazines: &mut Magazines, key: usize, used: bool) {
        magazines.find(key).expect("added").used = used;
    }

    #[test]
    fn what_the_thread_does_not_allocate_from_is_let_go_first() {
        for (used, evicted) in [(true, OTHERS), (false, OWN)] {
            let (slab, mut magazines) = (slab(), magazines(8));
            assert!(magazines.keep(OWN, CLASS, blocks(&slab, 0..5)).0.is_empty());
            set_used(&mut magazines, OWN, used);
            let batches: Vec<Batch> =
                blocks(&slab, 5..9).into_iter().filter_map(|block| magazines.put(OTHERS, block)).collect();
            let [batch] = &batches[..] else { panic!("{} batches", batches.len()) };
            assert_eq!(batch.blocks.len(), if evicted == OWN { 5 } else { 4 });
            assert_eq!(held(&mut magazines, evicted), 0);
            assert_eq!(magazines.bytes, (9 - batch.blocks.len()) * class_bytes(CLASS));
        }
    }

    #[test]
    fn what_is_kept_makes_room_among_streams_that_the_thread_does_not_allocate_on() {
        for used in [false, true] {
            let (slab, mut magazines) = (slab(), magazines(8));
            assert!(magazines.keep(OTHERS, CLASS, blocks(&slab, 0..6)).0.is_empty());
            set_used(&mut magazines, OTHERS, used);
            let (rest, evicted) = magazines.keep(OWN, CLASS, blocks(&slab, 6..10));
            let left = (held(&mut magazines, OWN), held(&mut magazines, OTHERS));
            let expected = if used { (2, 0, (2, 6)) } else { (0, 1, (4, 0)) };
            assert_eq!((rest.len(), evicted.len(), left), expected);
        }
    }

    #[test]
    fn as_many_are_kept_as_there_is_room_for() {
        let (slab, mut magazines) = (slab(), magazines(8));
        assert_eq!(magazines.keep(24, CLASS, blocks(&slab, 0..3)).0.len(), 3, "no magazines for the stream");
        assert_eq!(magazines.keep(OWN, CLASS, blocks(&slab, 0..20)).0.len(), 12);
        assert_eq!(magazines.is_full(OWN, CLASS), Some(true));
        assert_eq!(magazines.pop(OWN, CLASS).map(|block| block.index()), Some(7));
        assert_eq!(magazines.is_full(OWN, CLASS), Some(false));
        assert!(magazines.pop(OTHERS, CLASS).is_none() && magazines.is_full(24, CLASS).is_none());
    }
}
