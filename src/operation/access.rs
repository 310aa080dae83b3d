//! Which memory an operation reads and writes, for whoever orders, fuses or refuses operations.

use super::Operation;
use crate::error::{Error, Result};
use crate::operation::quantized_rows::QuantizedRows;
use crate::tensor::{CacheLayer, DType, Heads, Matrix, Tensor};
use crate::weight::WeightView;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// Rows of bytes at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    pub start: usize,
    pub rows: usize,
    pub row_bytes: usize,
    /// From one row to the next, in bytes; 0 repeats one row.
    pub stride: usize,
    /// `false`: not all of these bytes are touched, as where heads lie apart from each other.
    pub exact: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    Read,
    /// The work reads each element before it writes the one of the named output, which may be the very same region.
    ReadBefore(&'static [&'static str]),
    Write,
}

#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// The argument's name.
    pub name: &'static str,
    pub region: Region,
    pub effect: Effect,
}

/// Addresses below it are nobody's memory: of calls that ask about shapes alone.
const FIRST_MEMORY: usize = 4096;

impl Region {
    pub(super) fn bytes(start: *const c_void, bytes: usize) -> Region {
        Region { start: start as usize, rows: 1, row_bytes: bytes, stride: 0, exact: true }
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0 || self.row_bytes == 0 || self.start < FIRST_MEMORY
    }

    /// The address behind the last byte.
    pub fn end(&self) -> usize {
        let last = self.rows.saturating_sub(1).saturating_mul(self.stride);
        self.start.saturating_add(last).saturating_add(self.row_bytes)
    }

    /// Whether the two share a byte. Regions that are not exact share none that is known.
    pub fn overlaps(&self, other: &Region) -> bool {
        if self.end() <= other.start || other.end() <= self.start || self.is_empty() || other.is_empty() {
            return false;
        }
        if !self.exact || !other.exact {
            return false;
        }
        let (few, many) = if self.rows <= other.rows { (self, other) } else { (other, self) };
        if few.stride == many.stride && few.stride >= few.row_bytes.max(many.row_bytes) {
            // Both are columns of one matrix, as queries, keys and values of one product are.
            let offset = (few.start as isize - many.start as isize).rem_euclid(few.stride as isize) as usize;
            return offset < many.row_bytes || offset + few.row_bytes > few.stride;
        }
        (0..few.rows).any(|row| many.meets(few.start + row * few.stride, few.row_bytes))
    }

    /// Whether a row shares a byte with these.
    fn meets(&self, start: usize, bytes: usize) -> bool {
        if self.end() <= start || start + bytes <= self.start {
            return false;
        }
        if self.stride <= self.row_bytes {
            return true;
        }
        // The last row that begins before the end of the bytes.
        let row = ((start + bytes - 1 - self.start) / self.stride).min(self.rows - 1);
        self.start + row * self.stride + self.row_bytes > start
    }
}

/// What lies in memory.
pub trait Extent {
    /// The first address, and how many bytes there are to the last; cheaper than the region.
    fn extent(&self) -> (usize, usize);
    fn region(&self) -> Region;
    /// Its dtype and extents, "bf16[4, 256]".
    fn form(&self) -> String {
        format!("{} bytes", self.extent().1)
    }
    /// Of its elements, where they have one.
    fn dtype(&self) -> Option<DType> {
        None
    }
}

impl Extent for Region {
    fn extent(&self) -> (usize, usize) {
        (self.start, if self.is_empty() { 0 } else { self.end() - self.start })
    }

    fn region(&self) -> Region {
        *self
    }
}

impl Extent for Matrix {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let last = self.rows.saturating_sub(1) * self.row_stride + self.columns;
        (self.data as usize, if self.rows == 0 { 0 } else { last * self.dtype.size() })
    }

    fn region(&self) -> Region {
        let size = self.dtype.size();
        let (row_bytes, stride) = (self.columns * size, self.row_stride * size);
        Region { start: self.data as usize, rows: self.rows, row_bytes, stride, exact: true }.joined()
    }

    fn form(&self) -> String {
        format!("{}[{}, {}]", self.dtype, self.rows, self.columns)
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }
}

impl Extent for QuantizedRows {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        (self.data as usize, self.span_bytes())
    }

    fn region(&self) -> Region {
        let &QuantizedRows { data, rows, columns, row_stride, .. } = self;
        Region { start: data as usize, rows, row_bytes: columns, stride: row_stride, exact: true }.joined()
    }
}

impl Extent for Tensor {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        (self.data as usize, self.span_bytes())
    }

    fn region(&self) -> Region {
        Region { exact: self.is_contiguous(), ..Region::bytes(self.data, self.span_bytes()) }
    }

    fn form(&self) -> String {
        self.to_string()
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }
}

impl Extent for Heads {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let &Heads { data, dtype, tokens, heads, head_dim, token_stride, head_stride } = self;
        let last = tokens.saturating_sub(1) * token_stride + heads.saturating_sub(1) * head_stride + head_dim;
        (data as usize, if tokens * heads == 0 { 0 } else { last * dtype.size() })
    }

    fn region(&self) -> Region {
        let &Heads { data, dtype, tokens, heads, head_dim, token_stride, head_stride } = self;
        let size = dtype.size();
        let region = |rows, columns, stride| {
            let (row_bytes, stride) = (columns * size, stride * size);
            Region { start: data as usize, rows, row_bytes, stride, exact: true }.joined()
        };
        if head_stride == head_dim || heads == 1 {
            region(tokens, heads * head_dim, token_stride)
        } else if token_stride == head_dim || tokens == 1 {
            region(heads, tokens * head_dim, head_stride)
        } else {
            Region { exact: false, ..Region::bytes(data, self.extent().1) }
        }
    }

    fn form(&self) -> String {
        format!("{}[{}, {}, {}]", self.dtype, self.tokens, self.heads, self.head_dim)
    }

    fn dtype(&self) -> Option<DType> {
        Some(self.dtype)
    }
}

impl Region {
    /// Rows that lie one behind the other are one.
    pub(super) fn joined(self) -> Region {
        match self.stride == self.row_bytes && self.rows > 0 {
            true => Region { rows: 1, row_bytes: self.rows * self.row_bytes, stride: 0, ..self },
            false => self,
        }
    }

    /// What a weight reads, without its scales.
    pub fn of_weight(weight: &WeightView) -> Region {
        let bytes = weight.encoding.bytes(weight.rows * weight.columns);
        Region { exact: weight.row_stride == weight.columns, ..Region::bytes(weight.data, bytes) }
    }
}

/// Whom `Operation::accesses` tells what the work reads and writes.
pub trait Visit {
    fn add(&mut self, name: &'static str, of: &impl Extent, effect: Effect);

    #[inline]
    fn read(&mut self, name: &'static str, of: Option<&impl Extent>) {
        if let Some(of) = of {
            self.add(name, of, Effect::Read);
        }
    }

    #[inline]
    fn read_before(&mut self, name: &'static str, of: Option<&impl Extent>, outputs: &'static [&'static str]) {
        if let Some(of) = of {
            self.add(name, of, Effect::ReadBefore(outputs));
        }
    }

    #[inline]
    fn write(&mut self, name: &'static str, of: Option<&impl Extent>) {
        if let Some(of) = of {
            self.add(name, of, Effect::Write);
        }
    }

    #[inline]
    fn read_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        if let Some(rows) = rows {
            self.add(name, rows, Effect::Read);
            self.add(name, &scales(rows), Effect::Read);
        }
    }

    #[inline]
    fn write_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        if let Some(rows) = rows {
            self.add(name, rows, Effect::Write);
            self.add(name, &scales(rows), if rows.given_scales { Effect::Read } else { Effect::Write });
        }
    }

    #[inline]
    fn read_weight(&mut self, name: &'static str, weight: &WeightView) {
        self.add(name, &Region::of_weight(weight), Effect::Read);
    }

    /// A layer of a cache, of which the work knows alone what it touches.
    #[inline]
    fn cache(&mut self, layer: &CacheLayer, effect: Effect) {
        add_cache(self, layer, effect);
    }

    /// A range that may have gaps.
    fn read_range(&mut self, name: &'static str, start: *const c_void, bytes: usize) {
        self.add(name, &Region { exact: false, ..Region::bytes(start, bytes) }, Effect::Read);
    }
}

/// Tells of a layer's memory.
#[inline]
pub fn add_cache<V: Visit + ?Sized>(visit: &mut V, layer: &CacheLayer, effect: Effect) {
    let (key_bytes, value_bytes) = (layer.key_span_bytes(), layer.value_span_bytes());
    for (name, scales) in layer.scales() {
        visit.read(name, scales.as_ref());
    }
    if let Some(table) = layer.page_table() {
        // Keys and values lie between each other where a page has both.
        let start = layer.key.min(layer.value);
        let end = (layer.key as usize + key_bytes).max(layer.value as usize + value_bytes);
        let bytes = end - start as usize;
        visit.add("the cache's pages", &Region { exact: false, ..Region::bytes(start, bytes) }, effect);
        return visit.read("page_table", Some(&table.tensor()));
    }
    for (name, data, bytes) in
        [("the cache's keys", layer.key, key_bytes), ("the cache's values", layer.value, value_bytes)]
    {
        visit.add(name, &Region { exact: false, ..Region::bytes(data, bytes) }, effect);
    }
}

/// Hands everything on.
pub struct Each<F: FnMut(Access)>(pub F);

impl<F: FnMut(Access)> Visit for Each<F> {
    fn add(&mut self, name: &'static str, of: &impl Extent, effect: Effect) {
        (self.0)(Access { name, region: of.region(), effect });
    }
}

/// What an operation may have at most.
const MOST_READS: usize = 16;
const MOST_WRITES: usize = 6;

/// Addresses from the first byte to the one behind the last, of which eager calls compare no more.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
    name: &'static str,
    /// What it may lie in the place of.
    outputs: &'static [&'static str],
}

/// The first of an array, which is not filled before: eager calls have few of them.
struct SpanList<const MOST: usize> {
    spans: [MaybeUninit<Span>; MOST],
    count: usize,
}

impl<const MOST: usize> SpanList<MOST> {
    fn new() -> SpanList<MOST> {
        SpanList { spans: [const { MaybeUninit::uninit() }; MOST], count: 0 }
    }

    #[inline]
    fn push(&mut self, span: Span) {
        self.spans[self.count].write(span);
        self.count += 1;
    }

    #[inline]
    fn list(&self) -> &[Span] {
        // SAFETY: `push` has written the first `count`, which are no more than the array has.
        unsafe { std::slice::from_raw_parts(self.spans.as_ptr().cast(), self.count) }
    }
}

struct Spans {
    reads: SpanList<MOST_READS>,
    writes: SpanList<MOST_WRITES>,
}

impl Visit for Spans {
    #[inline(always)]
    fn add(&mut self, name: &'static str, of: &impl Extent, effect: Effect) {
        let (start, bytes) = of.extent();
        if bytes == 0 || start < FIRST_MEMORY {
            return;
        }
        let span = Span { start, end: start.saturating_add(bytes), name, outputs: &[] };
        match effect {
            Effect::Write => self.writes.push(span),
            Effect::Read => self.reads.push(span),
            Effect::ReadBefore(outputs) => self.reads.push(Span { outputs, ..span }),
        }
    }
}

impl Span {
    #[inline]
    fn touches(&self, other: &Span) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// Whether `written` may replace it: an output has the extents of what it may replace, so the same span is the same
    /// region.
    fn may_be(&self, written: &Span) -> bool {
        (self.start, self.end) == (written.start, written.end) && self.outputs.contains(&written.name)
    }
}

impl Spans {
    /// Whether it is seen from the spans alone that outputs lie where they may.
    #[inline]
    fn are_apart(&self) -> bool {
        let (reads, writes) = (self.reads.list(), self.writes.list());
        writes.iter().enumerate().all(|(at, written)| {
            !writes[..at].iter().any(|other| written.touches(other))
                && reads.iter().all(|read| !written.touches(read) || read.may_be(written))
        })
    }
}

fn scales(rows: &QuantizedRows) -> Region {
    Region::bytes(rows.scales.cast(), rows.rows * size_of::<f32>())
}

impl Operation {
    /// Refuses outputs that share a byte with what the work reads or with each other, unless the work allows for it.
    #[inline]
    pub fn expect_apart(&self) -> Result<()> {
        let mut spans = Spans { reads: SpanList::new(), writes: SpanList::new() };
        self.accesses(&mut spans);
        if spans.are_apart() {
            return Ok(());
        }
        self.expect_regions_apart()
    }

    #[cold]
    fn expect_regions_apart(&self) -> Result<()> {
        let mut all = [None; MOST_READS + MOST_WRITES];
        let mut count = 0;
        self.accesses(&mut Each(|access| {
            all[count] = Some(access);
            count += 1;
        }));
        let all = || all.iter().flatten();
        for (at, written) in all().enumerate().filter(|(_, access)| access.effect == Effect::Write) {
            let clashes = |(place, other): &(usize, &Access)| {
                let in_place = matches!(other.effect, Effect::ReadBefore(outputs) if outputs.contains(&written.name))
                    && other.region == written.region;
                let second = other.effect == Effect::Write && *place >= at;
                !second && !in_place && written.region.overlaps(&other.region)
            };
            if let Some((_, other)) = all().enumerate().find(clashes) {
                return Err(Error::invalid(format!("`{}` overlaps `{}`", written.name, other.name))
                    .with_advice("give the output memory of its own"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(start: usize, rows: usize, row_bytes: usize, stride: usize) -> Region {
        Region { start, rows, row_bytes, stride, exact: true }.joined()
    }

    #[test]
    fn columns_of_one_matrix_lie_apart() {
        let (query, key) = (rows(8192, 10, 64, 192), rows(8192 + 64, 10, 64, 192));
        assert!(!query.overlaps(&key) && !key.overlaps(&query) && query.overlaps(&query));
        assert!(query.overlaps(&rows(8192 + 63, 10, 64, 192)) && query.overlaps(&rows(8192 + 191, 10, 64, 192)));
        assert!(rows(8192, 10, 64, 64).overlaps(&rows(8192 + 639, 1, 1, 1)));
        assert!(!rows(8192, 10, 64, 64).overlaps(&rows(8192 + 640, 1, 1, 1)));
        assert!(!rows(0, 10, 64, 64).overlaps(&rows(0, 10, 64, 64)), "nobody's memory");
    }

    proptest! {
        #[test]
        fn overlaps_are_those_of_the_bytes(
            a in (0usize..100, 0usize..6, 0usize..12, 0usize..24),
            b in (0usize..100, 0usize..6, 0usize..12, 0usize..24),
        ) {
            let region = |(start, count, bytes, gap): (usize, usize, usize, usize)| {
                // Rows of one matrix overlap only where they repeat one.
                rows(FIRST_MEMORY + start, count, bytes, if gap == 0 { 0 } else { bytes + gap - 1 })
            };
            let bytes = |region: &Region| -> Vec<usize> {
                let of_row = |row: usize| {
                    let start = region.start + row * region.stride;
                    start..start + region.row_bytes
                };
                (0..region.rows).flat_map(of_row).collect()
            };
            let (a, b) = (region(a), region(b));
            let shared = bytes(&a).iter().any(|byte| bytes(&b).contains(byte));
            prop_assert_eq!(a.overlaps(&b), shared);
            prop_assert_eq!(b.overlaps(&a), shared);
        }
    }
}
