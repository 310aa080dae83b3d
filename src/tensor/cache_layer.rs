//! Keys and values in memory, of one tensor or of a layer of a cache: one after the other, in a ring, or in pages.

use super::{DType, Tensor};
use crate::error::{Error, Result};
use std::ffi::c_void;
use std::ops::Range;

/// The widest heads that kernels take: of queries and keys, and of values.
pub const MAX_HEAD_DIM: usize = 576;
pub const MAX_VALUE_DIM: usize = 512;

/// Where a sequence's tokens lie, behind its origin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Placement {
    /// Token t lies at t · token_stride.
    Contiguous,
    /// Token t lies at (t mod `tokens`) · token_stride, where a later token takes the place of an earlier one.
    Ring {
        tokens: usize,
    },
    Paged(PageTable),
}

/// Which page has which tokens: entry t / page_tokens of the sequence's row names the page of token t.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PageTable {
    /// i32 [sequences, columns], in device memory. An entry outside 0 .. `pages` is no page.
    pub entries: *const i32,
    pub sequences: usize,
    pub columns: usize,
    /// Entries from one sequence's row to the next.
    pub row_stride: usize,
    pub page_tokens: usize,
    /// Elements from one page to the next.
    pub page_stride: usize,
    pub pages: usize,
}

impl PageTable {
    /// The table as a tensor, for whoever compares what work reads and writes.
    pub fn tensor(&self) -> Tensor {
        let table = Tensor::new(self.entries.cast_mut().cast(), DType::I32, &[self.sequences, self.columns]);
        table.with_strides(&[self.row_stride, 1])
    }
}

/// Keys or values in memory. A sequence begins at its origin: elements from `data` on, or entries of the page table.
#[derive(Debug, Clone, Copy)]
pub struct KvView {
    pub data: *mut c_void,
    pub dtype: DType,
    /// Elements of a key or value.
    pub dim: usize,
    /// f32, one a head, in device memory: an element is its head's scale times what is stored. NULL: 1.
    pub scales: *const f32,
    /// From one head's scale to the next: 0 where all have one.
    pub scale_stride: usize,
    /// From one sequence's origin to the next: in elements, or in entries of the page table. Of a tensor whose sequences lie one
    /// after the other, from one token to the next.
    pub sequence_stride: usize,
    pub token_stride: usize,
    pub head_stride: usize,
    pub placement: Placement,
}

// SAFETY: an address and its description, dereferenced only by executors.
unsafe impl Send for KvView {}
// SAFETY: as above.
unsafe impl Sync for KvView {}

/// One head's keys or values of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct KvHead {
    view: KvView,
    origin: usize,
    /// In elements.
    head: usize,
}

impl KvView {
    /// A head's scale, which executors that compute on the host read.
    #[inline(always)]
    pub fn scale(&self, head: usize) -> f32 {
        match self.scales.is_null() {
            true => 1.0,
            // SAFETY: a validated view has a scale for each head, in host memory for an executor that reads it here.
            false => unsafe { *self.scales.add(head * self.scale_stride) },
        }
    }

    pub fn origin(&self, sequence: usize) -> usize {
        sequence * self.sequence_stride
    }

    #[inline]
    pub fn head(&self, origin: usize, head: usize) -> KvHead {
        KvHead { view: *self, origin, head: head * self.head_stride }
    }

    /// Refuses tokens whose table entry names no page. Views without pages have a place for every token.
    ///
    /// # Safety
    /// A page table lies in host memory, and the tokens and the origin within it.
    pub unsafe fn check_pages(&self, origin: usize, tokens: Range<usize>) -> Result<()> {
        let Placement::Paged(table) = &self.placement else { return Ok(()) };
        if tokens.is_empty() {
            return Ok(());
        }
        for entry in tokens.start / table.page_tokens..=(tokens.end - 1) / table.page_tokens {
            // SAFETY: the caller's contract.
            let page = unsafe { *table.entries.add(origin + entry) };
            if page < 0 || page as usize >= table.pages {
                let sequence = origin.checked_div(table.row_stride).unwrap_or(0);
                let token = (entry * table.page_tokens).max(tokens.start);
                return Err(Error::invalid(format!(
                    "the page table has page {page} for position {token} of sequence {sequence}; the pool has {} pages",
                    table.pages
                ))
                .with_limit(page.max(0) as u64, table.pages as u64)
                .with_advice("nvb_kv_cache_reserve takes the pages before tokens are appended"));
            }
        }
        Ok(())
    }
}

impl KvHead {
    /// The address of a token, and how many tokens from it on lie `token_stride` apart.
    ///
    /// # Safety
    /// A page table lies in host memory and names a page for the token.
    #[inline(always)]
    pub unsafe fn run(&self, token: usize) -> (*mut c_void, usize) {
        let KvView { data, dtype, token_stride, placement, .. } = &self.view;
        let (elements, tokens) = match placement {
            Placement::Contiguous => (self.origin + token * token_stride, usize::MAX),
            Placement::Ring { tokens } => {
                let place = token % tokens;
                (self.origin + place * token_stride, tokens - place)
            }
            Placement::Paged(table) => {
                let (entry, place) = (token / table.page_tokens, token % table.page_tokens);
                // SAFETY: the caller's contract.
                let page = unsafe { *table.entries.add(self.origin + entry) } as usize;
                (page * table.page_stride + place * token_stride, table.page_tokens - place)
            }
        };
        (data.wrapping_byte_add((elements + self.head) * dtype.size()), tokens)
    }
}

/// One layer's keys and values as executors see them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheLayer {
    pub key: *mut c_void,
    pub value: *mut c_void,
    /// Of the keys. Strides and "elements" of a format of rows ([`DType::is_kv_row`]) are bytes.
    pub dtype: DType,
    pub value_dtype: DType,
    /// As of a [`KvView`].
    pub key_scales: *const f32,
    pub value_scales: *const f32,
    pub sequences: usize,
    pub heads: usize,
    /// No position of a sequence reaches this.
    pub capacity: usize,
    /// Of a key.
    pub head_dim: usize,
    pub value_dim: usize,
    /// From one sequence's origin to the next: in elements, or in entries of the page table.
    pub sequence_stride: usize,
    /// Of the keys, in elements.
    pub head_stride: usize,
    /// Of the keys, in elements.
    pub token_stride: usize,
    pub placement: Placement,
    pub value_strides: ValueStrides,
}

/// Where values lie, which have other strides than keys where they have another dim. In elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValueStrides {
    /// From one block to the next: a sequence, or a page.
    pub block: usize,
    pub head: usize,
    pub token: usize,
}

// SAFETY: addresses and their description, dereferenced only by executors.
unsafe impl Send for CacheLayer {}
// SAFETY: as above.
unsafe impl Sync for CacheLayer {}

impl CacheLayer {
    /// A layer of [sequences, heads, capacity, head_dim], contiguous, with values as wide as keys.
    pub fn contiguous(
        addresses: (*mut c_void, *mut c_void),
        dtype: DType,
        [sequences, heads, capacity, head_dim]: [usize; 4],
    ) -> CacheLayer {
        CacheLayer::of_dims(addresses, (dtype, dtype), [sequences, heads, capacity], (head_dim, head_dim))
    }

    /// A contiguous layer of heads of keys and of values of these dtypes and dims.
    pub fn of_dims(
        (key, value): (*mut c_void, *mut c_void),
        (dtype, value_dtype): (DType, DType),
        [sequences, heads, capacity]: [usize; 3],
        (head_dim, value_dim): (usize, usize),
    ) -> CacheLayer {
        let (key_row, value_row) = (dtype.row_units(head_dim), value_dtype.row_units(value_dim));
        CacheLayer {
            key,
            value,
            dtype,
            value_dtype,
            key_scales: std::ptr::null(),
            value_scales: std::ptr::null(),
            sequences,
            heads,
            capacity,
            head_dim,
            value_dim,
            sequence_stride: heads * capacity * key_row,
            head_stride: capacity * key_row,
            token_stride: key_row,
            placement: Placement::Contiguous,
            value_strides: ValueStrides {
                block: heads * capacity * value_row,
                head: capacity * value_row,
                token: value_row,
            },
        }
    }

    pub fn key_view(&self) -> KvView {
        let &CacheLayer { key, dtype, key_scales, sequence_stride, token_stride, head_stride, placement, .. } = self;
        KvView {
            data: key,
            dtype,
            dim: self.head_dim,
            scales: key_scales,
            scale_stride: 1,
            sequence_stride,
            token_stride,
            head_stride,
            placement,
        }
    }

    pub fn value_view(&self) -> KvView {
        let ValueStrides { block, head, token } = self.value_strides;
        let (sequence_stride, placement) = match self.placement {
            Placement::Paged(table) => (table.row_stride, Placement::Paged(PageTable { page_stride: block, ..table })),
            placement => (block, placement),
        };
        KvView {
            data: self.value,
            dtype: self.value_dtype,
            dim: self.value_dim,
            scales: self.value_scales,
            scale_stride: 1,
            sequence_stride,
            token_stride: token,
            head_stride: head,
            placement,
        }
    }

    /// Whether a value is the first elements of its key.
    pub fn has_values_in_keys(&self) -> bool {
        self.key == self.value
    }

    /// The layer whose keys are this one's values, and whose values nobody uses: for whoever writes either alone.
    pub fn values_as_keys(&self) -> CacheLayer {
        let KvView { data, dtype, scales, sequence_stride, token_stride, head_stride, placement, .. } =
            self.value_view();
        CacheLayer {
            key: data,
            dtype,
            key_scales: scales,
            head_dim: self.value_dim,
            sequence_stride,
            token_stride,
            head_stride,
            placement,
            ..*self
        }
    }

    /// Whether keys and values have the same dtype, dims and strides.
    pub fn is_uniform(&self) -> bool {
        let (key, value) = (self.key_view(), self.value_view());
        (key.dtype, key.dim, key.sequence_stride, key.head_stride, key.token_stride, key.placement)
            == (value.dtype, value.dim, value.sequence_stride, value.head_stride, value.token_stride, value.placement)
    }

    /// Whether keys or values have a format of rows, or are of two dtypes, which only some kernels read.
    pub fn has_kv_rows(&self) -> bool {
        self.dtype.is_kv_row() || self.value_dtype != self.dtype
    }

    /// Bytes of a key and a value together.
    pub fn token_bytes(&self) -> usize {
        self.dtype.row_bytes(self.head_dim) + self.value_dtype.row_bytes(self.value_dim)
    }

    pub fn origin(&self, sequence: usize) -> usize {
        sequence * self.sequence_stride
    }

    /// The scales of keys and of values, where there are any.
    pub fn scales(&self) -> [(&'static str, Option<Tensor>); 2] {
        let of = |scales: *const f32| {
            (!scales.is_null()).then(|| Tensor::new(scales.cast_mut().cast(), DType::F32, &[self.heads]))
        };
        [("key_scales", of(self.key_scales)), ("value_scales", of(self.value_scales))]
    }

    pub fn page_table(&self) -> Option<&PageTable> {
        match &self.placement {
            Placement::Paged(table) => Some(table),
            _ => None,
        }
    }

    /// Bytes from the first key to one past the last.
    pub fn key_span_bytes(&self) -> usize {
        self.span_bytes(&self.key_view())
    }

    /// Bytes from the first value to one past the last.
    pub fn value_span_bytes(&self) -> usize {
        self.span_bytes(&self.value_view())
    }

    fn span_bytes(&self, view: &KvView) -> usize {
        let (blocks, block_stride, tokens) = match &view.placement {
            Placement::Contiguous => (self.sequences, view.sequence_stride, self.capacity),
            Placement::Ring { tokens } => (self.sequences, view.sequence_stride, *tokens),
            Placement::Paged(table) => (table.pages, table.page_stride, table.page_tokens),
        };
        let last = (blocks - 1) * block_stride + (self.heads - 1) * view.head_stride + (tokens - 1) * view.token_stride;
        (last + view.dtype.row_units(view.dim)) * view.dtype.size()
    }

    /// Refuses a tensor that addresses are read from where an append could write over it.
    #[inline]
    pub fn expect_apart(&self, name: &str, tensor: &Tensor) -> Result<()> {
        for (written, data, dtype, span) in [
            ("the cache's keys", self.key, self.dtype, self.key_span_bytes()),
            ("the cache's values", self.value, self.value_dtype, self.value_span_bytes()),
        ] {
            tensor.expect_apart(name, written, &Tensor::new(data, dtype, &[span / dtype.size()]))?;
        }
        Ok(())
    }

    pub fn check_sequence(&self, sequence: i32) -> Result<usize> {
        if sequence >= 0 && (sequence as usize) < self.sequences {
            return Ok(sequence as usize);
        }
        Err(Error::invalid(format!("sequence {sequence}; the cache has {} sequences", self.sequences))
            .with_limit(sequence.max(0) as u64, self.sequences as u64))
    }

    pub fn check_position(&self, position: i32) -> Result<usize> {
        if position >= 0 && (position as usize) < self.capacity {
            return Ok(position as usize);
        }
        Err(Error::invalid(format!("position {position}; the cache holds {} tokens a sequence", self.capacity))
            .with_limit(position.max(0) as u64, self.capacity as u64))
    }

    /// Refuses rows that look back further than a ring still holds: `rows` of a sequence, the last of them at
    /// `length` − 1, through a window (0: none).
    pub fn check_window(&self, rows: usize, length: usize, window: usize) -> Result<()> {
        let Placement::Ring { tokens } = self.placement else { return Ok(()) };
        if length <= tokens || (window > 0 && rows + window - 1 <= tokens) || rows == 0 {
            return Ok(());
        }
        let wanted = if window == 0 { length } else { (rows + window - 1).min(length) };
        Err(Error::invalid(format!(
            "{rows} query rows at length {length} with a window of {window} read {wanted} tokens back; the ring keeps {tokens}"
        ))
        .with_limit(wanted as u64, tokens as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(placement: Placement) -> CacheLayer {
        let layer = CacheLayer::contiguous((4096 as *mut c_void, 8192 as *mut c_void), DType::F32, [2, 3, 5, 4]);
        CacheLayer { placement, ..layer }
    }

    /// Element offsets of tokens from the first key, and how many follow.
    fn runs(layer: &CacheLayer, sequence: usize, head: usize, tokens: &[usize]) -> Vec<(usize, usize)> {
        let head = layer.key_view().head(layer.origin(sequence), head);
        // SAFETY: the tables of these tests are in host memory and name pages.
        let run = |&token: &usize| unsafe { head.run(token) };
        tokens.iter().map(run).map(|(address, tokens)| ((address as usize - 4096) / 4, tokens)).collect()
    }

    #[test]
    fn tokens_lie_where_the_placement_says() {
        assert_eq!(runs(&layer(Placement::Contiguous), 1, 2, &[3]), [(60 + 40 + 12, usize::MAX)]);
        let ring = layer(Placement::Ring { tokens: 5 });
        assert_eq!(runs(&ring, 1, 0, &[0, 4, 5, 13]), [(60, 5), (76, 1), (60, 5), (72, 2)]);
        let entries = [7, 1, -1, 2, 9, 0];
        let table = PageTable {
            entries: entries.as_ptr(),
            sequences: 2,
            columns: 3,
            row_stride: 3,
            page_tokens: 5,
            page_stride: 100,
            pages: 8,
        };
        let paged = CacheLayer { sequence_stride: 3, capacity: 15, ..layer(Placement::Paged(table)) };
        assert_eq!(runs(&paged, 0, 1, &[0, 6]), [(720, 5), (100 + 20 + 4, 4)]);
        assert_eq!(runs(&paged, 1, 0, &[4, 14]), [(216, 1), (16, 1)]);
        // SAFETY: as above.
        let check = |sequence: usize, tokens| unsafe { paged.key_view().check_pages(paged.origin(sequence), tokens) };
        assert!(check(0, 0..10).is_ok() && check(0, 10..10).is_ok() && check(1, 10..15).is_ok());
        let error = check(0, 3..11).unwrap_err();
        assert!(error.message.contains("page -1 for position 10 of sequence 0"), "{error}");
        assert!(check(1, 0..15).unwrap_err().message.contains("page 9 for position 5 of sequence 1"));
        assert_eq!(paged.key_span_bytes(), 4 * (700 + 2 * 20 + 4 * 4 + 4));
    }

    #[test]
    fn a_ring_refuses_what_it_no_longer_holds() {
        let ring = layer(Placement::Ring { tokens: 5 });
        assert!(ring.check_window(5, 5, 0).is_ok() && ring.check_window(2, 100, 4).is_ok());
        assert!(ring.check_window(2, 100, 5).is_err() && ring.check_window(1, 6, 0).is_err());
        assert!(ring.check_window(0, 100, 0).is_ok() && layer(Placement::Contiguous).check_window(9, 9, 0).is_ok());
    }
}
