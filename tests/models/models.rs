//! Models of the lock-free parts: loom runs every interleaving, and every value that a weaker order would let a thread read.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use nvbackend_models::arena::Arena;
use nvbackend_models::cache::{Cache, Given, Settings, Taken};
use nvbackend_models::depot::Depot;
use nvbackend_models::order::Order;
use nvbackend_models::page_table::PageTable;
use nvbackend_models::remote::{Linked, PendingStack, RemoteList};
use nvbackend_models::ring::Ring;
use nvbackend_models::size_class::{slab_units, CLASSES};
use nvbackend_models::slab::{Block, Slab};
use nvbackend_models::spin::SpinLock;

/// Memory whose every access loom checks against every other: two that no order parts fail the model.
struct Watched(UnsafeCell<u32>);

// SAFETY: loom checks the accesses, which is the point.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    fn new() -> Watched {
        Watched(UnsafeCell::new(0))
    }

    fn add(&self) -> u32 {
        self.0.with_mut(|value| {
            // SAFETY: loom has checked that nobody else is here.
            unsafe {
                *value += 1;
                *value
            }
        })
    }
}

fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn a_spin_lock_lets_one_thread_in() {
    explore(3, || {
        let lock = Arc::new(SpinLock::new(0));
        let outside = Arc::new(Watched::new());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (lock, outside) = (lock.clone(), outside.clone());
                thread::spawn(move || {
                    lock.with(|count| {
                        *count += 1;
                        assert_eq!(outside.add(), *count);
                    });
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(lock.with(|count| *count), 2);
    });
}

#[test]
fn a_depot_passes_each_item_to_one_thread() {
    explore(3, || {
        let depot = Arc::new(Depot::new(2));
        let putters: Vec<_> = (0..2u32)
            .map(|number| {
                let depot = depot.clone();
                thread::spawn(move || {
                    let item = Box::new(Watched::new());
                    item.add();
                    assert!(depot.put(0, number, item).is_ok(), "there are two slots");
                })
            })
            .collect();
        // What was written into an item before it was put is there for its taker, who may write again.
        let take = |shard| depot.take(shard, |_| true).map(|item| assert_eq!(item.add(), 2)).is_some();
        // Loom looks for races between neighbouring accesses only; the pause brings a taker behind a putter.
        thread::yield_now();
        let early = take(1);
        putters.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(take(0));
        assert!(take(0) != early, "two items in all");
        assert!(!take(0));
    });
}

#[test]
fn an_item_of_a_depot_has_one_taker() {
    explore(3, || {
        let depot = Arc::new(Depot::new(1));
        assert!(depot.put(0, 1, Box::new(7)).is_ok());
        let other = depot.clone();
        let taker = thread::spawn(move || other.take(0, |_| true));
        let mine = depot.take(0, |label| label == 1);
        let theirs = taker.join().unwrap();
        assert!(mine.is_some() != theirs.is_some(), "one of the two has it");
        assert_eq!(mine.or(theirs).as_deref(), Some(&7));
    });
}

#[test]
fn a_full_depot_gives_the_item_back() {
    explore(3, || {
        let depot = Arc::new(Depot::new(1));
        let other = depot.clone();
        let putter = thread::spawn(move || other.put(0, 1, Box::new(1)).is_ok());
        let mine = depot.put(0, 2, Box::new(2)).is_ok();
        let theirs = putter.join().unwrap();
        assert!(mine || theirs, "one finds the slot free");
        assert!(!(mine && theirs), "there is one slot");
        assert_eq!(depot.take(0, |_| true).map(|item| *item), Some(if mine { 2 } else { 1 }));
    });
}

#[test]
fn a_remote_list_loses_no_block_and_announces_once() {
    explore(3, || {
        let list = Arc::new(RemoteList::new());
        let links: Arc<Vec<AtomicU16>> = Arc::new((0..3).map(|_| AtomicU16::new(0)).collect());
        let blocks: Arc<Vec<Watched>> = Arc::new((0..3).map(|_| Watched::new()).collect());
        let threads: Vec<_> = [vec![0u16, 1], vec![2]]
            .into_iter()
            .map(|indices| {
                let (list, links, blocks) = (list.clone(), links.clone(), blocks.clone());
                thread::spawn(move || {
                    let mut announcements = 0;
                    for index in indices {
                        blocks[usize::from(index)].add();
                        announcements += usize::from(list.push(&links, index));
                    }
                    announcements
                })
            })
            .collect();
        let mut seen = Vec::new();
        let mut drains = 0;
        let drain = |seen: &mut Vec<u16>| {
            let before = seen.len();
            list.drain(&links, |index| {
                assert_eq!(blocks[usize::from(index)].add(), 2, "drained after it was given back, and once");
                seen.push(index);
            });
            usize::from(seen.len() > before)
        };
        drains += drain(&mut seen);
        let announcements: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        drains += drain(&mut seen);
        seen.sort();
        assert_eq!(seen, [0, 1, 2]);
        assert_eq!(announcements, drains, "every list that somebody finds was announced by whoever began it");
    });
}

struct Node {
    link: loom::sync::atomic::AtomicPtr<Node>,
    content: Watched,
}

impl Linked for Node {
    fn link(&self) -> &loom::sync::atomic::AtomicPtr<Node> {
        &self.link
    }
}

#[test]
fn a_pending_stack_hands_over_every_item_with_its_content() {
    explore(3, || {
        let node = || Node { link: loom::sync::atomic::AtomicPtr::new(std::ptr::null_mut()), content: Watched::new() };
        let nodes: Arc<Vec<Node>> = Arc::new((0..3).map(|_| node()).collect());
        let stack = Arc::new(PendingStack::new());
        let threads: Vec<_> = [0..2, 2..3]
            .into_iter()
            .map(|indices| {
                let (stack, nodes) = (stack.clone(), nodes.clone());
                thread::spawn(move || {
                    for node in &nodes[indices] {
                        node.content.add();
                        // SAFETY: each node is pushed once here, and the nodes outlive the stack.
                        unsafe { stack.push(node) };
                    }
                })
            })
            .collect();
        let mut seen = 0;
        let mut again = false;
        let mut each = |node: *const Node| {
            // SAFETY: one of `nodes`.
            let node = unsafe { &*node };
            node.content.add();
            seen += 1;
            if !again {
                // What was drained may be pushed at once.
                again = true;
                // SAFETY: it left the stack just now.
                unsafe { stack.push(node) };
            }
        };
        stack.drain(&mut each);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        stack.drain(&mut each);
        stack.drain(&mut each);
        assert_eq!(seen, 4, "three nodes, the first one twice");
    });
}

#[test]
fn a_ring_gives_whole_records_while_writers_overtake_each_other() {
    explore(2, || {
        let ring = Arc::new(Ring::<2>::new(1).unwrap());
        let writers: Vec<_> = [1u64, 2]
            .into_iter()
            .map(|value| {
                let ring = ring.clone();
                thread::spawn(move || ring.write([value, value]))
            })
            .collect();
        for record in ring.read().unwrap() {
            assert_eq!(record[0], record[1], "half of one record and half of another");
            assert_ne!(record[0], 0, "a record that nobody has written");
        }
        let written = writers.into_iter().map(|thread| thread.join().unwrap()).filter(|&it| it).count();
        assert!(written >= 1 && ring.written() == 2);
    });
}

fn slab() -> Slab {
    // The class with the fewest blocks: two.
    let class = CLASSES - 1;
    let slab = Slab::new(class).unwrap();
    slab.place(std::ptr::null(), 1 << 40, 0, slab_units(class));
    slab
}

#[test]
fn a_block_that_two_threads_free_ends_once() {
    explore(3, || {
        let slab = Arc::new(slab());
        Block::new(&slab, 0).begin_life(100, 0);
        let other = slab.clone();
        let thread = thread::spawn(move || other.end_life(0, 0).is_some());
        let mine = slab.end_life(0, 0).is_some();
        assert!(mine != thread.join().unwrap(), "one of the two frees it, the other one is told");
        assert_eq!(slab.live_bytes(0), None);
    });
}

#[test]
fn blocks_that_come_home_are_collected_under_the_lock_of_their_class() {
    explore(3, || {
        let slab = Arc::new(slab());
        let lock = Arc::new(Mutex::new(()));
        let mut blocks = Vec::new();
        // SAFETY: no other thread knows the slab yet.
        unsafe { slab.take(2, &mut blocks) };
        assert_eq!(blocks.len(), 2);
        let content: Arc<Vec<Watched>> = Arc::new((0..2).map(|_| Watched::new()).collect());
        let threads: Vec<_> = (0..2u32)
            .map(|index| {
                let (slab, lock, content) = (slab.clone(), lock.clone(), content.clone());
                thread::spawn(move || {
                    content[index as usize].add();
                    slab.give_back(index);
                    let _guard = lock.lock().unwrap();
                    let mut taken = Vec::new();
                    // SAFETY: the lock is held.
                    unsafe {
                        slab.collect();
                        slab.take(1, &mut taken);
                    }
                    for block in &taken {
                        content[block.index() as usize].add();
                    }
                    taken.len()
                })
            })
            .collect();
        let taken: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(taken, 2, "each finds at least the block that it gave back itself");
        // SAFETY: the threads are gone.
        assert_eq!(unsafe { slab.local().outstanding }, 2);
    });
}

/// A cache over an arena of one slab, with a magazine for key 0.
fn cache() -> (Arc<Arena>, Arc<Cache>) {
    let arena = Arc::new(Arena { table: PageTable(slab()), alive: AtomicBool::new(true) });
    let pointer: *const Arena = &*arena;
    arena.table.0.place(pointer, 1 << 40, 0, slab_units(CLASSES - 1));
    (arena, Arc::new(Cache::new(pointer)))
}

fn settings() -> Settings {
    Settings { capacity: 64 << 20, credit: i64::MAX, slow_allocations: false, slow_frees: false, tracked: false }
}

#[test]
fn one_thread_claims_a_cache_and_the_next_one_after_it_lets_go() {
    explore(3, || {
        let (arena, cache) = cache();
        let holders = Arc::new(Watched::new());
        let threads: Vec<_> = [1u64, 2]
            .into_iter()
            .map(|token| {
                let (cache, holders, arena) = (cache.clone(), holders.clone(), arena.clone());
                thread::spawn(move || {
                    let _keep = arena;
                    if !cache.claim(token, settings()) {
                        return 0;
                    }
                    holders.add();
                    cache.add_stream(token, 0, Order(0));
                    assert!(cache.belongs_to(token));
                    cache.disown(token, |_, _| {});
                    assert!(!cache.belongs_to(token));
                    1
                })
            })
            .collect();
        let claims: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert!(claims >= 1, "the first one finds it free");
    });
}

#[test]
fn a_drain_takes_what_its_thread_does_not() {
    explore(3, || {
        let (arena, cache) = cache();
        assert!(cache.claim(1, settings()));
        cache.add_stream(1, 0, Order(0));
        let slab = &arena.table.0;
        let mut blocks = Vec::new();
        // SAFETY: no other thread knows the slab yet.
        unsafe { slab.take(2, &mut blocks) };
        assert!(cache.keep(1, 0, CLASSES - 1, blocks).0.is_empty());
        let (other, keep) = (cache.clone(), arena.clone());
        let drainer = thread::spawn(move || {
            let _keep = keep;
            other.drain(None).into_iter().map(|batch| batch.blocks.len()).sum::<usize>()
        });
        let taken = match cache.take(1, 0, CLASSES - 1, 1000) {
            Taken::Block(pointer) => {
                let given = cache.give(1, 0, pointer as usize, false);
                assert!(matches!(given, Given::Done | Given::NewStream), "it is live, and this thread's");
                // Without magazines, which the drain took along, the block stays live.
                usize::from(matches!(given, Given::NewStream))
            }
            Taken::Empty => 0,
            _ => panic!("the cache is this thread's"),
        };
        let drained = drainer.join().unwrap();
        let left: usize = cache.drain(None).into_iter().map(|batch| batch.blocks.len()).sum();
        assert_eq!(taken + drained + left, 2);
    });
}

#[test]
fn a_closed_cache_never_leads_to_its_arena() {
    explore(3, || {
        let (arena, cache) = cache();
        assert!(cache.claim(1, settings()));
        cache.add_stream(1, 0, Order(0));
        let address = arena.table.0.address(0);
        Block::new(&arena.table.0, 0).begin_life(1000, 0);
        let (other, keep) = (cache.clone(), arena.clone());
        let user = thread::spawn(move || {
            let _keep = keep;
            // Looks into the arena, unless the cache is stale; so does `disown`.
            let given = matches!(other.give(1, 0, address, false), Given::Done);
            let mut kept = 0;
            other.disown(1, |arena, batches| {
                arena.table();
                kept = batches.len();
            });
            (given, kept)
        });
        let batches = cache.close(&arena);
        arena.alive.store(false, Ordering::Relaxed);
        let (given, kept) = user.join().unwrap();
        assert_eq!(batches.len() + kept, usize::from(given), "what came before the end is handed over, once");
    });
}
