//! Sequences on their way to page-locked host memory and back, on a stream of their own.
//!
//! An image is a sequence's memory as it lies in the cache, without what lies between: of pages each page, of every layer; else of
//! each layer the keys, then the values of each head, one token behind the other. A ring's tokens lie as in the ring.

use super::sequences::{expect_held, expect_no_capture, Queue, Sequences};
use super::{KvCache, KvCacheOptions, Memory};
use crate::device::{CopyKind, RowsCopy};
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Page-locked memory for one image, and the stream that its copies run on.
pub struct Swap {
    stream: Stream,
    memory: *mut c_void,
    bytes: usize,
    /// Tokens that the memory has room for.
    capacity: usize,
    state: Mutex<State>,
}

// SAFETY: page-locked memory of this object alone, read and written by copies of its stream and under its lock.
unsafe impl Send for Swap {}
// SAFETY: as above.
unsafe impl Sync for Swap {}

/// What sequences a cache has images of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Held {
    pub tokens: usize,
    /// See `Sequences`: of a ring the most tokens that the sequence had.
    pub most: usize,
    pub bytes: usize,
}

struct State {
    held: Option<(Held, KvCacheOptions)>,
    /// Behind the last copies; what the work waits for.
    done: Event,
    /// In front of them, on the work's stream.
    ready: Event,
}

/// Memory of a cache that lies evenly in an image: `rows` rows of `bytes` bytes, whose starts lie a step apart.
struct Part {
    first: *mut c_void,
    step: usize,
    bytes: usize,
    rows: usize,
}

impl Swap {
    /// Room for any `tokens` tokens of a sequence of the cache; `like` names the device.
    pub fn new(cache: &KvCache, tokens: usize, like: &Stream) -> Result<Swap> {
        cache.expect_library()?;
        cache.check_tokens(tokens)?;
        let executor = like.executor();
        let (stream, done, ready) = (Stream::new(executor, 0)?, Event::new(executor)?, Event::new(executor)?);
        // Of a ring all of it, whatever the sequence holds at the moment.
        let bytes = cache.image_bytes(cache.options.ring_tokens().unwrap_or(tokens))?;
        let memory = executor
            .host_allocate(bytes.max(1))
            .map_err(|error| error.context(format_args!("page-locked memory for {tokens} tokens of a KV cache")))?;
        let state = Mutex::new(State { held: None, done, ready });
        Ok(Swap { stream, memory, bytes, capacity: tokens, state })
    }

    /// Bytes of page-locked memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Tokens of the image; 0: there is none.
    pub fn tokens(&self) -> usize {
        self.lock().held.map_or(0, |held| held.0.tokens)
    }

    /// Work queued on `stream` from now on waits for the copies.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        stream.wait(&self.lock().done)
    }

    /// The host waits for the copies.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image, once its copies have finished.
    ///
    /// # Safety
    /// No copy to the memory is queued while the slice is in use, and there is no other such slice.
    #[allow(clippy::mut_from_ref)] // The memory is no part of `self`, and the caller promises that the slice is the only one.
    pub(super) unsafe fn image(&self) -> Result<(Held, &mut [u8])> {
        self.synchronize()?;
        let Some((held, _)) = self.lock().held else { return Err(nothing()) };
        // SAFETY: the caller's contract; the memory has at least these bytes.
        Ok((held, unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), held.bytes) }))
    }

    /// Takes what `fill` writes for the image of a sequence of the cache. Nothing is copied.
    pub(super) fn set(&self, cache: &KvCache, held: Held, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        self.synchronize()?;
        assert!(held.bytes <= self.bytes, "the memory was made for it");
        // SAFETY: no copy is under way, and the memory has at least these bytes.
        fill(unsafe { std::slice::from_raw_parts_mut(self.memory.cast(), held.bytes) })?;
        self.lock().held = Some((held, cache.options));
        Ok(())
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // Copies may be under way. What fails here has failed them too.
        if let Err(error) = self.synchronize() {
            log::debug!(target: "nvbackend::memory", "while a swap was destroyed: {error}");
        }
        // SAFETY: allocated with this size, and no copy uses it any more.
        unsafe { self.stream.executor().host_free(self.memory, self.bytes.max(1)) };
    }
}

fn nothing() -> Error {
    Error::invalid("the swap holds no sequence").with_advice("nvb_kv_swap_out copies one to it")
}

impl KvCache {
    /// Copies the sequence, behind what is queued on `stream`. The sequence stays as it is.
    pub fn swap_out(&self, swap: &Swap, sequence: usize, stream: &Stream) -> Result<()> {
        self.check_sequence("sequence", sequence)?;
        expect_no_capture(stream)?;
        let sequences = self.lock();
        let (tokens, most) = (sequences.held(sequence), sequences.most(sequence));
        if tokens == 0 {
            return Err(Error::invalid(format!("sequence {sequence} holds no tokens")));
        }
        if tokens > swap.capacity {
            return Err(Error::invalid(format!(
                "sequence {sequence} holds {tokens} tokens; the swap has room for {}",
                swap.capacity
            ))
            .with_limit(tokens as u64, swap.capacity as u64));
        }
        let mut state = swap.lock();
        state.ready.record(stream)?;
        swap.stream.wait(&state.ready)?;
        state.held = None;
        let mut at = 0;
        self.for_each_part(&sequences, sequence, tokens, most, &mut |part| {
            let (to, kind) = (swap.memory.wrapping_byte_add(at), CopyKind::DeviceToHost);
            at += part.bytes * part.rows;
            debug_assert!(at <= swap.bytes);
            let Part { first, step, bytes, rows } = part;
            let copy = RowsCopy { to, to_step: bytes, from: first, from_step: step, bytes, rows, kind };
            // SAFETY: the part lies in the cache; the image has room, and copies of one stream run in turn.
            unsafe { swap.stream.executor().copy_rows(&copy, swap.stream.raw()) }
        })?;
        state.done.record(&swap.stream)?;
        state.held = Some((Held { tokens, most, bytes: at }, self.options));
        Ok(())
    }

    /// Gives `sequence`, which must be empty, what the swap holds: room at once, on `stream`, and then the tokens, behind what is
    /// queued there.
    pub fn swap_in(&self, swap: &Swap, sequence: usize, stream: &Stream, queue: Queue<'_>) -> Result<()> {
        self.check_sequence("sequence", sequence)?;
        expect_no_capture(stream)?;
        let Some((held, options)) = swap.lock().held else { return Err(nothing()) };
        if !self.has_images_of(&options) {
            return Err(Error::invalid("the swap holds a sequence of a cache of other layers, heads, dtypes or pages"));
        }
        self.check_tokens(held.tokens)?;
        let there = self.lock().held(sequence);
        if there != 0 {
            return Err(Error::invalid(format!("sequence {sequence} holds {there} tokens already"))
                .with_advice("release it with nvb_kv_cache_release first"));
        }
        self.reserve(sequence, held.tokens, stream, queue)?;
        let copied = || -> Result<()> {
            let mut sequences = self.lock();
            sequences.set_most(sequence, held.most);
            let state = swap.lock();
            state.ready.record(stream)?;
            swap.stream.wait(&state.ready)?;
            let mut at = 0;
            self.for_each_part(&sequences, sequence, held.tokens, held.most, &mut |part| {
                let (from, kind) = (swap.memory.wrapping_byte_add(at), CopyKind::HostToDevice);
                at += part.bytes * part.rows;
                let Part { first, step, bytes, rows } = part;
                let copy = RowsCopy { to: first, to_step: step, from, from_step: bytes, bytes, rows, kind };
                // SAFETY: as in `swap_out`; the part is the sequence's own.
                unsafe { swap.stream.executor().copy_rows(&copy, swap.stream.raw()) }
            })?;
            debug_assert_eq!(at, held.bytes);
            state.done.record(&swap.stream)
        };
        copied().inspect_err(|_| {
            // Nothing of it was to be seen yet.
            let _ = self.truncate(sequence, 0, stream, queue);
        })
    }

    /// Bytes of an image of so many tokens.
    pub fn image_bytes(&self, tokens: usize) -> Result<usize> {
        let (key, value) = self.options.row_bytes();
        let bytes = match self.options.page_tokens {
            0 => {
                let rows = self.options.ring_tokens().map_or(tokens, |ring| ring.min(tokens));
                [rows, self.options.kv_heads, self.options.layers]
                    .iter()
                    .try_fold(key + value, |a, b| a.checked_mul(*b))
            }
            page => tokens.div_ceil(page).checked_mul(self.page_bytes()),
        };
        bytes.ok_or_else(|| Error::invalid(format!("an image of {tokens} tokens of {:?} overflows", self.options)))
    }

    /// Whether an image of a cache of these options is one of this cache.
    pub(super) fn has_images_of(&self, other: &KvCacheOptions) -> bool {
        let of = |options: &KvCacheOptions| {
            let KvCacheOptions { layers, kv_heads, head_dim, values_in_keys, dtype, page_tokens, .. } = *options;
            let dims = (layers, kv_heads, head_dim, options.value_dim(), page_tokens);
            (dims, values_in_keys, dtype, options.value_dtype(), options.ring_tokens())
        };
        of(&self.options) == of(other)
    }

    /// Calls `part` with each part of a sequence's memory, in the order of the image. The heads of a layer's keys, or values, are
    /// one part: a copy for each head would reach a third of the rate at 256 tokens.
    fn for_each_part(
        &self,
        sequences: &Sequences,
        sequence: usize,
        tokens: usize,
        most: usize,
        part: &mut dyn FnMut(Part) -> Result<()>,
    ) -> Result<()> {
        let Memory::Library { allocation, .. } = &self.memory else { return self.expect_library() };
        if let Some(pages) = sequences.pages() {
            let bytes = self.page_bytes();
            let mut row = pages.row(sequence)[..tokens.div_ceil(pages.page_tokens())].iter();
            return row.try_for_each(|&page| {
                let first = allocation.pointer().wrapping_byte_add(page as usize * bytes);
                part(Part { first, step: bytes, bytes, rows: 1 })
            });
        }
        let rows = self.options.ring_tokens().map_or(tokens, |ring| ring.min(most));
        for layer in 0..self.options.layers {
            let layer = self.layer(layer)?;
            let views = [layer.key_view(), layer.value_view()];
            for view in &views[..if self.options.values_in_keys { 1 } else { 2 }] {
                let size = view.dtype.size();
                part(Part {
                    first: view.data.wrapping_byte_add(view.origin(sequence) * size),
                    step: view.head_stride * size,
                    bytes: rows * view.dtype.row_bytes(view.dim),
                    rows: layer.heads,
                })?;
            }
        }
        Ok(())
    }

    /// Makes zeros of what an image holds behind its tokens: a last page may have been another sequence's.
    pub(super) fn clear_behind(&self, image: &mut [u8], tokens: usize) {
        let page_tokens = self.options.page_tokens;
        if page_tokens == 0 || tokens.is_multiple_of(page_tokens) {
            return;
        }
        let (key, value) = self.options.row_bytes();
        let layout = self.options.layout().expect("checked at creation");
        let page = &mut image[tokens / page_tokens * self.page_bytes()..];
        let first = tokens % page_tokens;
        for layer in page.chunks_mut(layout.layer_bytes()) {
            let (keys, values) = layer.split_at_mut(layout.key_bytes);
            for (part, row) in [(keys, key), (values, value)] {
                let whole = page_tokens * row * self.options.kv_heads;
                for head in part[..whole].chunks_mut((page_tokens * row).max(1)) {
                    head[first * row..].fill(0);
                }
                part[whole..].fill(0);
            }
        }
    }

    pub(super) fn expect_held_tokens(&self, sequence: usize) -> Result<usize> {
        self.check_sequence("sequence", sequence)?;
        let held = self.lock().held(sequence);
        expect_held(sequence, 1, held)?;
        Ok(held)
    }
}
