//! Which cache belongs to the calling thread, and what becomes of it when the thread ends.

use super::arena::Arena;
use super::cache::{Cache, Settings};
use crate::fork;
use crate::thread_end::ThreadEnd;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// A thread's hold on a cache. The token is what makes it valid.
#[derive(Clone)]
pub struct Claim {
    arena: u64,
    pub token: u64,
    pub cache: Arc<Cache>,
}

struct Claims {
    /// The claim used last, for arenas that a thread comes back to.
    recent: Cell<(u64, u64, *const Cache)>,
    all: RefCell<ManuallyDrop<Vec<Claim>>>,
    /// `fork::count` of the process that they were made in. Locks of a parent's caches may be held for ever.
    forks: Cell<u32>,
}

const NO_CLAIM: (u64, u64, *const Cache) = (0, 0, std::ptr::null());

thread_local! {
    static CLAIMS: Claims = const {
        Claims {
            recent: Cell::new(NO_CLAIM),
            all: RefCell::new(ManuallyDrop::new(Vec::new())),
            forks: Cell::new(0),
        }
    };
}
const _: () = assert!(!std::mem::needs_drop::<Claims>(), "it must answer after the thread's destructors");

static END: ThreadEnd = ThreadEnd::new(end_claims);

extern "C" fn end_claims(_: *mut c_void) {
    let all = CLAIMS.with(|claims| {
        claims.recent.set(NO_CLAIM);
        let all = claims.all.take();
        if claims.forks.get() == fork::count() {
            ManuallyDrop::into_inner(all)
        } else {
            Vec::new()
        }
    });
    for (shard, claim) in all.into_iter().enumerate() {
        claim.cache.disown(claim.token, |arena, batches| {
            // No event is recorded or asked for here: at the end of a process the driver may be gone already, and
            // others may wait for the cache's lock.
            batches.into_iter().for_each(|batch| arena.put_unasked(shard, batch));
        });
    }
}

/// Runs `body` with the thread's cache of the arena and the claim's token. `None`: it is called from within itself.
#[inline]
pub fn with_cache<R>(
    arena: &Arena,
    settings: impl FnOnce() -> Settings,
    body: impl FnOnce(&Cache, u64) -> R,
) -> Option<R> {
    // The claims leave the closure as a pointer, because the compiler does not inline a closure that does all of this.
    let claims = CLAIMS.with(std::ptr::from_ref);
    // SAFETY: the thread's own, which has no destructor and so lives as long as the thread.
    let claims = unsafe { &*claims };
    let (id, token, cache) = claims.recent.get();
    if id == arena.id() {
        // SAFETY: the claim in `all` keeps the cache alive, and only `claim` below and the thread's end remove any,
        // which replace `recent` as well.
        return Some(body(unsafe { &*cache }, token));
    }
    let (token, cache) = claims.claim(arena, settings)?;
    // SAFETY: the claim that was made just now keeps the cache alive.
    Some(body(unsafe { &*cache }, token))
}

/// The thread's claim on a cache of the arena, for callers that look it up by other means from now on. `None`: the
/// thread has no cache of it yet.
pub fn claim_of(arena: &Arena) -> Option<Claim> {
    let find = |claims: &Claims| {
        let all = claims.all.try_borrow().ok()?;
        all.iter().find(|claim| claim.arena == arena.id()).cloned()
    };
    CLAIMS.with(find)
}

impl Claims {
    #[cold]
    fn claim(&self, arena: &Arena, settings: impl FnOnce() -> Settings) -> Option<(u64, *const Cache)> {
        let mut all = self.all.try_borrow_mut().ok()?;
        if self.forks.replace(fork::count()) != fork::count() {
            *all = ManuallyDrop::new(Vec::new());
        }
        let id = arena.id();
        let at = match all.iter().position(|claim| claim.arena == id) {
            Some(at) => at,
            None => {
                if all.is_empty() {
                    END.expect();
                }
                // Claims that their arenas have ended are of no more use.
                all.retain(|claim| claim.cache.belongs_to(claim.token));
                static TOKENS: AtomicU64 = AtomicU64::new(1);
                let token = TOKENS.fetch_add(1, Ordering::Relaxed);
                all.push(Claim { arena: id, token, cache: adopt(arena, token, settings()) });
                all.len() - 1
            }
        };
        let claim = &all[at];
        let cache: *const Cache = &*claim.cache;
        self.recent.set((id, claim.token, cache));
        Some((claim.token, cache))
    }
}

/// A cache that another thread left behind, or a new one.
fn adopt(arena: &Arena, token: u64, settings: Settings) -> Arc<Cache> {
    if let Some(cache) = arena.caches().find(|cache| cache.claim(token, settings)) {
        // SAFETY: listed caches are references that the arena made with `Arc::into_raw` and keeps; this makes another.
        unsafe {
            Arc::increment_strong_count(cache);
            return Arc::from_raw(cache);
        }
    }
    let cache = Arc::new(Cache::new(arena));
    cache.claim(token, settings);
    arena.add_cache(cache.clone());
    cache
}
