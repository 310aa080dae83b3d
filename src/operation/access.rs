//! Which memory an operation reads and writes, for whoever orders, fuses or refuses operations.

use crate::attention::kv_cache::CacheLayer;
use crate::error::{Error, Result};
use crate::ops::quantized_rows::QuantizedRows;
use crate::tensor::{Heads, Matrix, Tensor};
use crate::weight::WeightView;
use std::ffi::c_void;

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
    fn bytes(start: *const c_void, bytes: usize) -> Region {
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

impl From<&Matrix> for Region {
    fn from(matrix: &Matrix) -> Region {
        let size = matrix.dtype.size();
        let (row_bytes, stride) = (matrix.columns * size, matrix.row_stride * size);
        Region { start: matrix.data as usize, rows: matrix.rows, row_bytes, stride, exact: true }.joined()
    }
}

impl From<&QuantizedRows> for Region {
    fn from(rows: &QuantizedRows) -> Region {
        let &QuantizedRows { data, rows, columns, row_stride, .. } = rows;
        Region { start: data as usize, rows, row_bytes: columns, stride: row_stride, exact: true }.joined()
    }
}

impl From<&Tensor> for Region {
    fn from(tensor: &Tensor) -> Region {
        Region { exact: tensor.is_contiguous(), ..Region::bytes(tensor.data, tensor.span_bytes()) }
    }
}

impl From<&Heads> for Region {
    fn from(heads: &Heads) -> Region {
        let &Heads { data, dtype, tokens, heads, head_dim, token_stride, head_stride } = heads;
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
            let last = tokens.saturating_sub(1) * token_stride + heads.saturating_sub(1) * head_stride + head_dim;
            let bytes = if tokens * heads == 0 { 0 } else { last * size };
            Region { exact: false, ..Region::bytes(data, bytes) }
        }
    }
}

impl Region {
    /// Rows that lie one behind the other are one.
    fn joined(self) -> Region {
        match self.stride == self.row_bytes && self.rows > 0 {
            true => Region { rows: 1, row_bytes: self.rows * self.row_bytes, stride: 0, ..self },
            false => self,
        }
    }

    /// What a weight reads, without its scales.
    fn of_weight(weight: &WeightView) -> Region {
        let bytes = (weight.rows * weight.columns * weight.encoding.bits()).div_ceil(8);
        Region { exact: weight.row_stride == weight.columns, ..Region::bytes(weight.data, bytes) }
    }
}

/// What an operation tells `Operation::accesses`.
pub enum Visit<'a> {
    All(&'a mut dyn FnMut(Access)),
    /// First and last address alone, which eager calls compare.
    Spans(&'a mut Spans),
}

/// The addresses from the first byte to the one behind the last.
type Span = (usize, usize);

/// What an operation may have at most.
const MOST_READS: usize = 12;
const MOST_WRITES: usize = 6;

pub struct Spans {
    reads: [(Span, &'static [&'static str]); MOST_READS],
    writes: [(Span, &'static str); MOST_WRITES],
    read_count: usize,
    write_count: usize,
}

impl Visit<'_> {
    pub fn visit(&mut self, name: &'static str, region: Region, effect: Effect) {
        match self {
            Visit::All(visit) => visit(Access { name, region, effect }),
            Visit::Spans(_) if region.is_empty() => {}
            Visit::Spans(spans) => spans.add(name, (region.start, region.end()), effect),
        }
    }

    #[inline]
    fn tell<T: Extent>(&mut self, name: &'static str, of: Option<&T>, effect: Effect)
    where
        for<'t> Region: From<&'t T>,
    {
        match (self, of) {
            (_, None) => {}
            (Visit::All(visit), Some(of)) => visit(Access { name, region: of.into(), effect }),
            (Visit::Spans(spans), Some(of)) => {
                let (start, bytes) = of.extent();
                if bytes != 0 && start >= FIRST_MEMORY {
                    spans.add(name, (start, start.saturating_add(bytes)), effect);
                }
            }
        }
    }

    pub fn read<T: Extent>(&mut self, name: &'static str, of: Option<&T>)
    where
        for<'t> Region: From<&'t T>,
    {
        self.tell(name, of, Effect::Read);
    }

    pub fn read_before<T: Extent>(&mut self, name: &'static str, of: Option<&T>, outputs: &'static [&'static str])
    where
        for<'t> Region: From<&'t T>,
    {
        self.tell(name, of, Effect::ReadBefore(outputs));
    }

    pub fn write<T: Extent>(&mut self, name: &'static str, of: Option<&T>)
    where
        for<'t> Region: From<&'t T>,
    {
        self.tell(name, of, Effect::Write);
    }

    pub fn read_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        if let Some(rows) = rows {
            self.tell(name, Some(rows), Effect::Read);
            self.visit(name, scales(rows), Effect::Read);
        }
    }

    pub fn write_quantized(&mut self, name: &'static str, rows: Option<&QuantizedRows>) {
        if let Some(rows) = rows {
            self.tell(name, Some(rows), Effect::Write);
            self.visit(name, scales(rows), if rows.given_scales { Effect::Read } else { Effect::Write });
        }
    }

    pub fn read_weight(&mut self, name: &'static str, weight: &WeightView) {
        self.visit(name, Region::of_weight(weight), Effect::Read);
    }

    /// A layer of a cache, of which the work knows alone what it touches.
    pub fn cache(&mut self, layer: &CacheLayer, effect: Effect) {
        let bytes = layer.slots * layer.slot_stride * layer.dtype.size();
        for (name, data) in [("the cache's keys", layer.key), ("the cache's values", layer.value)] {
            self.visit(name, Region { exact: false, ..Region::bytes(data, bytes) }, effect);
        }
    }

    /// A range that may have gaps.
    pub fn read_range(&mut self, name: &'static str, start: *const c_void, bytes: usize) {
        self.visit(name, Region { exact: false, ..Region::bytes(start, bytes) }, Effect::Read);
    }
}

impl Spans {
    #[inline]
    fn add(&mut self, name: &'static str, span: Span, effect: Effect) {
        match effect {
            Effect::Write => {
                self.writes[self.write_count] = (span, name);
                self.write_count += 1;
            }
            Effect::Read => {
                self.reads[self.read_count] = (span, &[]);
                self.read_count += 1;
            }
            Effect::ReadBefore(outputs) => {
                self.reads[self.read_count] = (span, outputs);
                self.read_count += 1;
            }
        }
    }

    /// Whether it is seen from the spans alone that outputs lie where they may.
    fn are_apart(&self) -> bool {
        let (reads, writes) = (&self.reads[..self.read_count], &self.writes[..self.write_count]);
        let touch = |a: Span, b: Span| a.0 < b.1 && b.0 < a.1;
        writes.iter().enumerate().all(|(at, &(written, name))| {
            let others = writes[..at].iter().all(|&(other, _)| !touch(written, other));
            // An output has the extents of what it may replace, so the same span is the same region.
            let may = |&(read, outputs): &(Span, &'static [&'static str])| {
                !touch(written, read) || (written == read && outputs.contains(&name))
            };
            others && reads.iter().all(may)
        })
    }
}

/// Address and length of what a view spans; cheaper than its region.
pub trait Extent {
    fn extent(&self) -> (usize, usize);
}

impl Extent for Matrix {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let last = self.rows.saturating_sub(1) * self.row_stride + self.columns;
        (self.data as usize, if self.rows == 0 { 0 } else { last * self.dtype.size() })
    }
}

impl Extent for QuantizedRows {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let last = self.rows.saturating_sub(1) * self.row_stride + self.columns;
        (self.data as usize, if self.rows == 0 { 0 } else { last })
    }
}

impl Extent for Tensor {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let bytes = match self.rank {
            1 if self.strides[0] == 1 => self.shape[0] * self.dtype.size(),
            _ => self.span_bytes(),
        };
        (self.data as usize, bytes)
    }
}

impl Extent for Heads {
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let &Heads { data, dtype, tokens, heads, head_dim, token_stride, head_stride } = self;
        let last = tokens.saturating_sub(1) * token_stride + heads.saturating_sub(1) * head_stride + head_dim;
        (data as usize, if tokens * heads == 0 { 0 } else { last * dtype.size() })
    }
}

fn scales(rows: &QuantizedRows) -> Region {
    Region::bytes(rows.scales.cast(), rows.rows * size_of::<f32>())
}

/// Refuses outputs that share a byte with what the work reads or with each other, unless the work allows for it.
#[inline]
pub fn expect_apart(accesses: impl Fn(&mut Visit<'_>)) -> Result<()> {
    const NOTHING: (Span, &[&str]) = ((0, 0), &[]);
    let mut spans =
        Spans { reads: [NOTHING; MOST_READS], writes: [((0, 0), ""); MOST_WRITES], read_count: 0, write_count: 0 };
    accesses(&mut Visit::Spans(&mut spans));
    if spans.are_apart() {
        return Ok(());
    }
    expect_regions_apart(&accesses)
}

#[cold]
fn expect_regions_apart(accesses: &dyn Fn(&mut Visit<'_>)) -> Result<()> {
    let mut all = [None; MOST_READS + MOST_WRITES];
    let mut count = 0;
    accesses(&mut Visit::All(&mut |access| {
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
