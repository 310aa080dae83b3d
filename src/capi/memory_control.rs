//! Keeping a memory manager within bounds: limits, giving memory back, and asking the engine for it.

use super::memory::{nvb_memory_manager, MEMORY_MANAGERS};
use super::memory_statistics::write_optional;
use super::prelude::*;

/// Asks the engine to free memory because an allocation finds none. `bytes` is what the allocation takes in all, not what
/// it lacks: nobody knows how much of what is free lies where it can be used. Sizes are rounded up as the manager takes
/// memory, to 2 MiB at least where blocks are pooled. Returns how many bytes it freed; 0: it has nothing to spare. Freeing
/// less than `bytes` may do: the allocation is tried again after each answer above 0.
///
/// Called on the allocating thread without any of the library's locks held. It may call the library, `nvb_memory_free`
/// above all; an allocation inside it that finds no memory asks no callback again. It does not throw, does not wait for
/// the allocating thread, and frees on streams whose work has passed or that the allocation's stream waits for anyway.
pub type nvb_reclaim_callback = Option<unsafe extern "C" fn(bytes: u64, user_data: *mut c_void) -> u64>;

/// Whether `bytes` could be had now without waiting for anybody or asking the engine; if not, the error that an
/// allocation would give, with all its numbers. With `spill` every size can be had as far as is known. Nothing is
/// reserved: another thread may be faster. Where it would say no, it first sends home what threads keep for their next
/// allocations.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY`, `NVB_ERROR_MEMORY_ALLOCATION` (the manager sleeps).
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_check_available(memory: *mut nvb_memory_manager, bytes: u64) -> nvb_status {
    guard!(nvb_memory_check_available, { MEMORY_MANAGERS.get(memory)?.memory().check_available(bytes) })
}

/// Waits for the device's work and gives back memory that no live block needs, down to `keep` bytes held. `released`, if
/// not NULL, receives the bytes given back: 0 while a capture runs, which must not wait.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_trim(memory: *mut nvb_memory_manager, keep: u64, released: *mut u64) -> nvb_status {
    guard!(nvb_memory_trim, {
        let bytes = MEMORY_MANAGERS.get(memory)?.memory().trim(keep)?;
        // SAFETY: NULL or valid, by the header's contract.
        unsafe { write_optional(released, bytes) };
        Ok(())
    })
}

/// Waits for the device's work and gives all physical memory back, so that an idle engine leaves the device to others.
/// Every block stays allocated at its address, but none may be used before `nvb_memory_wake`: calls that would work on
/// one, and on a weight or a KV cache in this memory, return `NVB_ERROR_INVALID_ARGUMENT`. `keep_content` 1: what live
/// blocks hold is copied to main memory and comes back with `nvb_memory_wake`; 0: it is lost. `released`, if not
/// NULL, receives the bytes given back. Until then allocations fail; blocks may be freed.
/// Errors: `NVB_ERROR_UNSUPPORTED` without pooling (a small limit, an allocator of the engine's, no virtual memory),
/// `NVB_ERROR_INVALID_ARGUMENT` if it is asleep already or a capture runs, `NVB_ERROR_OUT_OF_MEMORY` if main memory
/// cannot take the content; nothing has changed then.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_sleep(
    memory: *mut nvb_memory_manager,
    keep_content: u32,
    released: *mut u64,
) -> nvb_status {
    guard!(nvb_memory_sleep, {
        let object = MEMORY_MANAGERS.get(memory)?;
        if keep_content > 1 {
            return Err(Error::invalid(format!("keep_content is {keep_content}; 0 or 1 is needed")));
        }
        let bytes = object.memory().sleep(keep_content == 1)?;
        // SAFETY: NULL or valid, by the header's contract.
        unsafe { write_optional(released, bytes) };
        Ok(())
    })
}

/// Takes back the memory that `nvb_memory_sleep` gave away, at the same addresses, with the content if that was kept.
/// `taken`, if not NULL, receives the bytes.
/// Errors: `NVB_ERROR_OUT_OF_MEMORY` if the device has them no more: it sleeps on, and the call may be tried again;
/// `NVB_ERROR_INVALID_ARGUMENT` if it is awake.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_wake(memory: *mut nvb_memory_manager, taken: *mut u64) -> nvb_status {
    guard!(nvb_memory_wake, {
        let bytes = MEMORY_MANAGERS.get(memory)?.memory().wake()?;
        // SAFETY: NULL or valid, by the header's contract.
        unsafe { write_optional(taken, bytes) };
        Ok(())
    })
}

/// From now on the manager may hold `bytes` of its memory; 0: no limit. What it holds already stays, until
/// `nvb_memory_trim` or an allocation that finds none gives it back.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_set_limit(memory: *mut nvb_memory_manager, bytes: u64) -> nvb_status {
    guard!(nvb_memory_set_limit, {
        MEMORY_MANAGERS.get(memory)?.memory().set_limit(bytes);
        Ok(())
    })
}

/// The engine's data, handed back to its callback only.
struct UserData(*mut c_void);

// SAFETY: the header's contract: the callback may be called from any thread.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

impl UserData {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Adds a callback that is asked for memory when an allocation finds none, those with a lower `priority` first: give
/// cheap things to spare a low one, and what costs work to make again a high one. Each is asked at most four times by
/// one allocation. It belongs to the manager, not to the handle, and stays until it is removed or the manager is gone.
/// `id` receives what `nvb_memory_remove_reclaim_callback` wants.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_add_reclaim_callback(
    memory: *mut nvb_memory_manager,
    callback: nvb_reclaim_callback,
    user_data: *mut c_void,
    priority: i32,
    id: *mut u64,
) -> nvb_status {
    guard!(nvb_memory_add_reclaim_callback, {
        let object = MEMORY_MANAGERS.get(memory)?;
        expect_out("id", id)?;
        let callback = callback.ok_or_else(|| Error::invalid("`callback` is NULL"))?;
        let user_data = UserData(user_data);
        let reclaim = move |bytes| {
            // SAFETY: the engine's function, with the data that it came with.
            unsafe { callback(bytes, user_data.get()) }
        };
        let added = object.memory().add_reclaim(priority, Box::new(reclaim));
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("id", id, added) }
    })
}

/// Removes a callback. It is not called any more once this returns, because calls under way in other threads are waited
/// for, so do not hold what it waits for. Inside a reclaim callback nothing is waited for.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for an id that is none.
#[no_mangle]
pub unsafe extern "C" fn nvb_memory_remove_reclaim_callback(memory: *mut nvb_memory_manager, id: u64) -> nvb_status {
    guard!(nvb_memory_remove_reclaim_callback, { MEMORY_MANAGERS.get(memory)?.memory().remove_reclaim(id) })
}
