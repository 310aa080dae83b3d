//! What sequences hold: tokens that were reserved, the pages that have them, and how both are shared, copied and given back.
//!
//! Each call queues its copies on a stream first, and takes effect on the host only when all of them are queued.

use super::pages::{Pages, Taking};
use super::table::DeviceTable;
use super::{zeros, KvCache, KvCacheOptions, Memory};
use crate::device::CopyKind;
use crate::error::{Error, Result};
use crate::operation::memory_copy::MemoryCopy;
use crate::stream::Stream;

pub(super) struct Sequences {
    /// Tokens that each sequence has been given room for.
    tokens: Vec<u32>,
    /// Of a ring: the most that the sequence ever had since it was empty. Tokens this much less the ring's length are gone.
    most: Vec<u32>,
    pages: Option<Pages>,
}

/// What a cache holds at the moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// Sequences that hold tokens, and the tokens of all.
    pub sequences: usize,
    pub tokens: usize,
    /// 0 of caches without pages, as what follows.
    pub pages: usize,
    pub free_pages: usize,
    pub shared_pages: usize,
    pub page_bytes: usize,
}

/// Queues a copy on the call's stream.
pub type Queue<'a> = &'a mut dyn FnMut(MemoryCopy) -> Result<()>;

impl Sequences {
    pub fn new(sequences: usize, pages: Option<Pages>) -> Result<Sequences> {
        let (tokens, most) =
            (zeros(sequences, "the sequences of a KV cache")?, zeros(sequences, "the sequences of a KV cache")?);
        Ok(Sequences { tokens, most, pages })
    }

    pub fn held(&self, sequence: usize) -> usize {
        self.tokens[sequence] as usize
    }

    pub fn most(&self, sequence: usize) -> usize {
        self.most[sequence] as usize
    }

    pub fn set_most(&mut self, sequence: usize, tokens: usize) {
        self.most[sequence] = tokens as u32;
    }

    pub fn pages(&self) -> Option<&Pages> {
        self.pages.as_ref()
    }

    fn set(&mut self, sequence: usize, tokens: usize) {
        self.tokens[sequence] = tokens as u32;
        self.most[sequence] = if tokens == 0 { 0 } else { self.most[sequence].max(tokens as u32) };
    }
}

impl KvCache {
    /// Room for `tokens` tokens of the sequence, those that it holds included.
    pub fn reserve(&self, sequence: usize, tokens: usize, stream: &Stream, queue: Queue<'_>) -> Result<()> {
        self.check_sequence("sequence", sequence)?;
        self.check_tokens(tokens)?;
        let mut sequences = self.lock();
        let held = sequences.held(sequence);
        if tokens <= held {
            return Ok(());
        }
        if let (Some(pages), Some(table)) = (&mut sequences.pages, self.table()) {
            let taking = pages.plan(sequence, held, tokens)?;
            if taking.columns.0 < taking.columns.1 {
                pages.take(sequence, &taking);
                let queued = self.queue_taken(pages, table, sequence, &taking, stream, queue);
                if let Err(error) = queued {
                    pages.undo(sequence, &taking);
                    return Err(error);
                }
            }
        }
        sequences.set(sequence, tokens);
        Ok(())
    }

    /// The copy of a page that was shared, and the entries of the pages that were taken.
    fn queue_taken(
        &self,
        pages: &Pages,
        table: &DeviceTable,
        sequence: usize,
        taking: &Taking,
        stream: &Stream,
        queue: Queue<'_>,
    ) -> Result<()> {
        expect_no_capture(stream)?;
        let entries = pages.entries(sequence, taking.columns.0..taking.columns.1);
        if let Some(copied) = taking.copied {
            self.copy_page(copied as i32, entries[0], queue)?;
        }
        table.update(sequence, taking.columns.0..taking.columns.1, Some(entries), stream, queue)
    }

    /// Forgets the tokens from `tokens` on.
    pub fn truncate(&self, sequence: usize, tokens: usize, stream: &Stream, queue: Queue<'_>) -> Result<()> {
        self.check_sequence("sequence", sequence)?;
        let mut sequences = self.lock();
        let held = sequences.held(sequence);
        expect_held(sequence, tokens, held)?;
        self.check_ring(&sequences, sequence, tokens)?;
        if let (Some(pages), Some(table)) = (&mut sequences.pages, self.table()) {
            let (kept, had) = (tokens.div_ceil(pages.page_tokens()), held.div_ceil(pages.page_tokens()));
            if kept < had {
                expect_no_capture(stream)?;
                table.update(sequence, kept..had, None, stream, queue)?;
                pages.give(sequence, kept..had);
            }
        }
        sequences.set(sequence, tokens);
        Ok(())
    }

    /// Lets `to`, which must be empty, begin with the first `tokens` tokens of `from`: whole pages are shared, what the last
    /// one has is copied.
    pub fn fork(&self, from: usize, to: usize, tokens: usize, stream: &Stream, queue: Queue<'_>) -> Result<()> {
        let Some(table) = self.table() else {
            self.expect_library()?;
            return Err(Error::unsupported("a fork shares pages, and this KV cache has none")
                .with_advice("create it with page_tokens, or use nvb_kv_cache_copy"));
        };
        self.duplicate(from, to, tokens, stream, queue, Some(table))
    }

    /// Copies the first `tokens` tokens of `from` to `to`, which must be empty.
    pub fn copy(&self, from: usize, to: usize, tokens: usize, stream: &Stream, queue: Queue<'_>) -> Result<()> {
        self.duplicate(from, to, tokens, stream, queue, None)
    }

    /// `sharing`: the table of pages that are shared instead of copied.
    fn duplicate(
        &self,
        from: usize,
        to: usize,
        tokens: usize,
        stream: &Stream,
        queue: Queue<'_>,
        sharing: Option<&DeviceTable>,
    ) -> Result<()> {
        self.check_sequence("from", from)?;
        self.check_sequence("to", to)?;
        self.check_tokens(tokens)?;
        if from == to {
            return Err(Error::invalid(format!("from and to are both {from}; two sequences are needed")));
        }
        let mut sequences = self.lock();
        if sequences.held(to) != 0 {
            return Err(Error::invalid(format!("sequence {to} holds {} tokens already", sequences.held(to)))
                .with_advice("release it with nvb_kv_cache_release first"));
        }
        if self.options.page_tokens > 0 || self.options.ring_tokens().is_some() {
            expect_held(from, tokens, sequences.held(from))?;
            self.check_ring(&sequences, from, tokens)?;
        }
        match (&mut sequences.pages, self.table()) {
            (Some(pages), Some(table)) if tokens > 0 => {
                expect_no_capture(stream)?;
                let (all, whole) = (tokens.div_ceil(pages.page_tokens()), tokens / pages.page_tokens());
                let shared = if sharing.is_some() { whole } else { 0 };
                pages.expect_free(to, all - shared, tokens)?;
                let taking = Taking { columns: (shared, all), copied: None };
                pages.share(from, to, shared);
                pages.take(to, &taking);
                let queued = (shared..all)
                    .try_for_each(|column| self.copy_page(pages.row(from)[column], pages.row(to)[column], queue))
                    .and_then(|()| table.update(to, 0..all, Some(pages.entries(to, 0..all)), stream, queue));
                if let Err(error) = queued {
                    pages.give(to, 0..all);
                    return Err(error);
                }
            }
            (None, _) if tokens > 0 => self.copy_blocks(from, to, tokens, queue)?,
            _ => {}
        }
        let most = sequences.most[from];
        sequences.set(to, tokens);
        if tokens > 0 {
            // What the ring of `from` has lost, its copy has too.
            sequences.most[to] = most.max(tokens as u32);
        }
        Ok(())
    }

    pub fn tokens(&self, sequence: usize) -> Result<usize> {
        self.check_sequence("sequence", sequence)?;
        Ok(self.lock().held(sequence))
    }

    pub fn usage(&self) -> Usage {
        let sequences = self.lock();
        let pages = sequences.pages.as_ref();
        Usage {
            sequences: sequences.tokens.iter().filter(|&&tokens| tokens > 0).count(),
            tokens: sequences.tokens.iter().map(|&tokens| tokens as usize).sum(),
            pages: pages.map_or(0, Pages::total),
            free_pages: pages.map_or(0, Pages::free),
            shared_pages: pages.map_or(0, Pages::shared),
            page_bytes: pages.map_or(0, |_| self.page_bytes()),
        }
    }

    fn table(&self) -> Option<&DeviceTable> {
        match &self.memory {
            Memory::Library { pages, .. } => pages.as_ref(),
            Memory::Engine(_) => None,
        }
    }

    pub(super) fn page_bytes(&self) -> usize {
        self.options.layers * self.options.layout().expect("checked at creation").layer_bytes()
    }

    /// Every layer's keys and values of a page lie together.
    fn copy_page(&self, from: i32, to: i32, queue: Queue<'_>) -> Result<()> {
        let Memory::Library { allocation, .. } = &self.memory else { unreachable!("the engine copies its own pages") };
        let bytes = self.page_bytes();
        let page = |page: i32| allocation.pointer().wrapping_byte_add(page as usize * bytes);
        // SAFETY: both pages lie in the allocation, which whoever destroys the cache frees behind the work.
        queue(unsafe { MemoryCopy::new(page(to), page(from), bytes, CopyKind::DeviceToDevice) })
    }

    /// From the first head's first token to the last head's last, in each layer: what lies between belongs to nobody.
    fn copy_blocks(&self, from: usize, to: usize, tokens: usize, queue: Queue<'_>) -> Result<()> {
        for layer in 0..self.options.layers {
            let layer = self.layer(layer)?;
            let tokens = self.options.ring_tokens().map_or(tokens, |ring| ring.min(tokens));
            let parts = [layer.key_view(), layer.value_view()];
            for view in &parts[..if self.options.values_in_keys { 1 } else { 2 }] {
                let last = (layer.heads - 1) * view.head_stride + (tokens - 1) * view.token_stride;
                let bytes = last * view.dtype.size() + view.dtype.row_bytes(view.dim);
                let block = |sequence| view.data.wrapping_byte_add(view.origin(sequence) * view.dtype.size());
                // SAFETY: both blocks lie in the layer.
                queue(unsafe { MemoryCopy::new(block(to), block(from), bytes, CopyKind::DeviceToDevice) })?;
            }
        }
        Ok(())
    }

    /// Refuses caches whose sequences the engine keeps.
    pub(super) fn expect_library(&self) -> Result<()> {
        match &self.memory {
            Memory::Library { .. } => Ok(()),
            Memory::Engine(_) => Err(Error::unsupported(
                "the engine owns the memory of this KV cache, and keeps its sequences and pages itself",
            )),
        }
    }

    pub(super) fn check_sequence(&self, name: &str, sequence: usize) -> Result<()> {
        self.expect_library()?;
        let sequences = self.options.sequences;
        if sequence < sequences {
            return Ok(());
        }
        Err(Error::invalid(format!("{name} is {sequence}; the cache has {sequences} sequences"))
            .with_limit(sequence as u64, sequences as u64))
    }

    pub(super) fn check_tokens(&self, tokens: usize) -> Result<()> {
        let KvCacheOptions { capacity, .. } = self.options;
        if tokens <= capacity {
            return Ok(());
        }
        Err(Error::invalid(format!("tokens is {tokens}; the cache holds up to {capacity} tokens a sequence"))
            .with_limit(tokens as u64, capacity as u64))
    }

    /// The next token would stand at `tokens`, and sees a window of keys, all of which the ring must still hold.
    fn check_ring(&self, sequences: &Sequences, sequence: usize, tokens: usize) -> Result<()> {
        let Some(ring) = self.options.ring_tokens() else { return Ok(()) };
        let seen = (tokens + 1).saturating_sub(self.options.window);
        let gone = (sequences.most[sequence] as usize).saturating_sub(ring);
        if tokens == 0 || gone <= seen {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "sequence {sequence} cannot begin again at {tokens}: the window there begins at {seen}, and the ring of {ring} \
             tokens has lost those before {gone}"
        ))
        .with_limit(tokens as u64, (gone + self.options.window - 1) as u64))
    }
}

pub(super) fn expect_held(sequence: usize, tokens: usize, held: usize) -> Result<()> {
    if tokens <= held {
        return Ok(());
    }
    Err(Error::invalid(format!("tokens is {tokens}; sequence {sequence} holds {held}"))
        .with_limit(tokens as u64, held as u64))
}

/// A recorded change of a table would be made again by every replay.
pub(super) fn expect_no_capture(stream: &Stream) -> Result<()> {
    if stream.executor().stream_is_capturing(stream.raw())? {
        return Err(Error::invalid("pages or sequences of a KV cache change, and the stream is being captured")
            .with_advice(
                "reserve pages before the capture, or between replays: a captured step reads the newest table",
            ));
    }
    Ok(())
}
