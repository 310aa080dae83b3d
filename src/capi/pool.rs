//! Pools: blocks of a memory manager that are counted by themselves and can be freed all at once.

use super::memory::{nvb_memory_manager, MEMORY_MANAGERS};
use super::memory_statistics::write_optional;
use super::prelude::*;
use super::shortcut::{self, Owner};
use crate::memory::{Blocks, Pool};
use crate::stream::Stream;

/// Blocks with a name, a count and an end of their own: those of a request, of a layer, of a graph. They come out of the
/// manager's memory and limit, in slabs that no other pool shares, and go back to it when the pool is cleared.
///
/// Threads: every call may run at once from many threads, but for `nvb_pool_clear` and `nvb_pool_destroy`, during which
/// no other thread uses the pool or its blocks.
pub struct nvb_pool {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_pool_statistics {
    pub struct_size: usize,
    /// Bytes in live blocks, as requested.
    pub allocated: u64,
    /// The largest `allocated` so far.
    pub peak: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Allocations so far.
    pub allocations: u64,
    /// Frees so far.
    pub frees: u64,
    /// Allocations refused so far.
    pub failures: u64,
}
versioned!(nvb_pool_statistics);

/// A pool and the backend whose streams it understands.
pub struct PoolObject {
    pool: Pool,
    backend: Arc<Backend>,
}

impl Owner for PoolObject {
    const KIND: usize = 11;

    fn table() -> &'static Table<PoolObject> {
        &POOLS
    }

    fn backend(&self) -> &Backend {
        &self.backend
    }

    fn blocks(&self) -> &dyn Blocks {
        &self.pool
    }
}

pub(super) static POOLS: Table<PoolObject> = Table::new("pool", PoolObject::KIND);

fn pool_and_stream(pool: *mut nvb_pool, stream: *mut nvb_stream) -> Result<(Arc<PoolObject>, Arc<Stream>)> {
    let object = POOLS.get(pool)?;
    let stream = stream_of(&object.backend, stream)?;
    Ok((object, stream))
}

/// Creates an empty pool. `name` (not empty) stands in reports and snapshots. The pool keeps what it needs of the
/// manager alive.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_create(
    memory: *mut nvb_memory_manager,
    name: *const c_char,
    pool: *mut *mut nvb_pool,
) -> nvb_status {
    guard!(nvb_pool_create, {
        let object = MEMORY_MANAGERS.get(memory)?;
        expect_out("pool", pool)?;
        // SAFETY: a NUL-terminated string or NULL, by the header's contract.
        let name = unsafe { text("name", name)? };
        let created = PoolObject { pool: Pool::new(object.memory(), &name)?, backend: object.backend().clone() };
        let handle = POOLS.insert(Arc::new(created))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pool", pool, handle) }
    })
}

/// Frees every block of the pool and destroys the handle; NULL is fine. Waits for the device's work, unless a capture
/// runs: then the blocks wait for it.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_destroy(pool: *mut nvb_pool) -> nvb_status {
    guard!(nvb_pool_destroy, { POOLS.remove(pool) })
}

/// Allocates a block of this pool as `nvb_memory_allocate` does.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_allocate(
    pool: *mut nvb_pool,
    bytes: usize,
    stream: *mut nvb_stream,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(
        nvb_pool_allocate,
        || {
            // SAFETY: NULL or valid, by the header's contract.
            unsafe { shortcut::allocate_by_shortcut::<PoolObject, _>(pool, stream, bytes, pointer) }
        },
        {
            expect_out("pointer", pointer)?;
            let block = shortcut::allocate::<PoolObject, _>(pool, stream, bytes)?;
            // SAFETY: checked for NULL, valid by the header's contract.
            unsafe { pointer.write(block) };
            Ok(())
        }
    )
}

/// Allocates a block of this pool as `nvb_memory_allocate_aligned` does.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_allocate_aligned(
    pool: *mut nvb_pool,
    bytes: usize,
    alignment: usize,
    stream: *mut nvb_stream,
    pointer: *mut *mut c_void,
) -> nvb_status {
    guard!(nvb_pool_allocate_aligned, {
        let (object, stream) = pool_and_stream(pool, stream)?;
        expect_out("pointer", pointer)?;
        let block = object.pool.allocate_aligned(bytes, alignment, stream.raw())?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("pointer", pointer, block) }
    })
}

/// Frees as `nvb_memory_free` does, but blocks of this pool only (`nvb_memory_free` takes those of pools too).
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a pointer that is no live block of this pool.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_free(
    pool: *mut nvb_pool,
    pointer: *mut c_void,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_pool_free, || shortcut::free_by_shortcut::<PoolObject, _>(pool, stream, pointer), {
        shortcut::free::<PoolObject, _>(pool, stream, pointer)
    })
}

/// Frees each of `count` blocks as `nvb_pool_free` does, such as the pages of a sequence that has ended; NULL among
/// them is fine. It is the faster way for blocks that another thread allocated. On an error the blocks before the one
/// that it names (`pointers[i]`) have been freed, that one and those behind it have not.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_free_many(
    pool: *mut nvb_pool,
    pointers: *const *mut c_void,
    count: usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_pool_free_many, {
        // SAFETY: `count` pointers, by the header's contract.
        let pointers = unsafe { slice("pointers", pointers, count)? };
        shortcut::free_many::<PoolObject, _>(pool, stream, pointers)
    })
}

/// Waits for the device's work and frees every block of the pool, which goes on empty; in a capture the blocks wait for
/// the work instead. `freed`, if not NULL, receives how many there were.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_clear(pool: *mut nvb_pool, freed: *mut u64) -> nvb_status {
    guard!(nvb_pool_clear, {
        let blocks = POOLS.get(pool)?.pool.clear()?;
        // SAFETY: NULL or valid, by the header's contract.
        unsafe { write_optional(freed, blocks) };
        Ok(())
    })
}

/// Fills `statistics`; set its `struct_size` first. Takes no lock.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_get_statistics(
    pool: *mut nvb_pool,
    statistics: *mut nvb_pool_statistics,
) -> nvb_status {
    guard!(nvb_pool_get_statistics, {
        let values = POOLS.get(pool)?.pool.statistics();
        let value = copied!(nvb_pool_statistics from values {
            allocated, peak, blocks, allocations, frees, failures
        });
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(statistics, &value) }
    })
}

/// Copies the pool's name; `text`, `capacity` and `needed` as in `nvb_memory_get_leak_report`.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_get_name(
    pool: *mut nvb_pool,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> nvb_status {
    guard!(nvb_pool_get_name, {
        let object = POOLS.get(pool)?;
        // SAFETY: the caller's buffer and pointer, by the header's contract.
        unsafe { give_text(object.pool.name(), text, capacity, needed) }
    })
}

/// From now on, until `nvb_pool_end_capture`, what is allocated on `stream` from the manager comes from this pool, and no
/// memory of the pool goes elsewhere before it is destroyed, so a graph's addresses stay its own: destroy the graph
/// first. Weights and KV caches that are created meanwhile lie outside of it. Call it before the stream's capture
/// (`cudaStreamBeginCapture`) begins. While it lasts, the manager asks no event and gives no memory back, on any stream.
/// Does not synchronise.
/// A capture that the manager has not been told of is invalidated, in each of CUDA's capture modes, by what waits for
/// the whole device meanwhile, on any thread: frees without a stream, allocations that find memory short, clearing,
/// trimming, sleeping, and the end of a backend with the last of its children, which invalidates the others as well.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a stream whose allocations are captured already, and for a wrapped
/// default stream, which CUDA does not capture.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_begin_capture(pool: *mut nvb_pool, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_pool_begin_capture, {
        let (object, stream) = pool_and_stream(pool, stream)?;
        object.pool.begin_capture(stream.raw())
    })
}

/// Ends what `nvb_pool_begin_capture` began on `stream`, after the stream's capture has ended.
#[no_mangle]
pub unsafe extern "C" fn nvb_pool_end_capture(pool: *mut nvb_pool, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_pool_end_capture, {
        let (object, stream) = pool_and_stream(pool, stream)?;
        object.pool.end_capture(stream.raw())
    })
}
