//! Rows of a cache whose scales lie beside their values: a key or a value of one token and head in INT8, Q8_0 or Q4_0.
//!
//! A row is bytes: the values, from the next multiple of four bytes the scales, and zeros up to a multiple of 16 bytes, so that
//! every row can be copied in bulk.
//!
//! - `KvInt8`: a signed byte an element, and one f32 for the row: max |x| / 127. The byte is x / scale, to nearest, ties to even.
//! - `KvQ8_0`: as above in blocks of 32 elements, whose scales are f16.
//! - `KvQ4_0`: blocks of 32 elements in 16 bytes, element i in the low and i + 16 in the high half of byte i, and an f16 scale
//!   each: m / −8, m being the element of the largest magnitude, the positive one of two. A half is ⌊x / scale + 8.5⌋, at
//!   most 15, and stands for (half − 8) · scale.
//!
//! A scale in f16 is rounded before it divides, and is at most 65504; values saturate. A row or block with an element that is
//! not finite has the scale NaN. These are ggml's blocks but for that rounding, with scales apart from values.

use super::DType;
use half::f16;

/// Elements of a block of Q8_0 and Q4_0.
pub const BLOCK: usize = 32;
/// What a row's bytes are a multiple of, and its address.
pub const ROW_ALIGNMENT: usize = 16;

impl DType {
    /// Whether it is a format of rows with scales of their own, which only caches have. Its "elements" are bytes.
    pub fn is_kv_row(self) -> bool {
        matches!(self, DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0)
    }

    /// What `dim` elements of a key or value take in a cache, in units of [`DType::size`].
    pub fn row_units(self, dim: usize) -> usize {
        match self.is_kv_row() {
            true => (scales_at(self, dim) + scales_of(self, dim)).next_multiple_of(ROW_ALIGNMENT),
            false => dim,
        }
    }

    pub fn row_bytes(self, dim: usize) -> usize {
        self.row_units(dim) * self.size()
    }
}

/// Where the scales of a row begin.
#[inline(always)]
fn scales_at(dtype: DType, dim: usize) -> usize {
    let values = if dtype == DType::KvQ4_0 { dim.div_ceil(BLOCK) * (BLOCK / 2) } else { dim };
    values.next_multiple_of(4)
}

/// Bytes of a row's scales.
fn scales_of(dtype: DType, dim: usize) -> usize {
    if dtype == DType::KvInt8 {
        size_of::<f32>()
    } else {
        dim.div_ceil(BLOCK) * size_of::<f16>()
    }
}

/// Elements that share a scale.
#[inline(always)]
fn block_of(dtype: DType, dim: usize) -> usize {
    if dtype == DType::KvInt8 {
        dim.max(1)
    } else {
        BLOCK
    }
}

/// Rounds `from`, a whole key or value, to the row at `to`.
///
/// # Safety
/// `to` has `dtype.row_bytes(from.len())` writable bytes, and is aligned to 4.
pub unsafe fn pack(dtype: DType, from: &[f32], to: *mut u8) {
    let dim = from.len();
    std::slice::from_raw_parts_mut(to, dtype.row_bytes(dim)).fill(0);
    let scales = to.add(scales_at(dtype, dim));
    for (b, block) in from.chunks(block_of(dtype, dim)).enumerate() {
        let largest = largest(block);
        match dtype {
            DType::KvInt8 => {
                let scale = if largest.is_finite() { largest.abs() / 127.0 } else { f32::NAN };
                scales.cast::<f32>().write(scale);
                pack_bytes(block, scale, to);
            }
            DType::KvQ8_0 => {
                let scale = half_scale(largest.abs() / 127.0);
                scales.cast::<f16>().add(b).write(scale);
                pack_bytes(block, scale.to_f32(), to.add(b * BLOCK));
            }
            _ => {
                let scale = half_scale(largest / -8.0);
                scales.cast::<f16>().add(b).write(scale);
                pack_halves(block, scale.to_f32(), to.add(b * (BLOCK / 2)));
            }
        }
    }
}

/// The element of the largest magnitude, the positive one of two; NaN before infinities before all others.
#[inline(always)]
fn largest(block: &[f32]) -> f32 {
    let order = |x: &f32| (x.to_bits() << 1) | u32::from(x.to_bits() >> 31 == 0);
    let most = block.iter().map(order).max().unwrap_or(1);
    f32::from_bits((most >> 1) | ((most & 1 ^ 1) << 31))
}

#[inline(always)]
fn half_scale(scale: f32) -> f16 {
    if !scale.is_finite() {
        return f16::NAN;
    }
    f16::from_f32(scale.clamp(-65504.0, 65504.0))
}

/// Whether values can be divided by it: not where all are 0, or too small for a scale, or one is not finite.
#[inline(always)]
fn divides(scale: f32) -> bool {
    scale != 0.0 && !scale.is_nan()
}

#[inline(always)]
unsafe fn pack_bytes(block: &[f32], scale: f32, to: *mut u8) {
    if divides(scale) {
        for (i, &x) in block.iter().enumerate() {
            to.cast::<i8>().add(i).write((x / scale).round_ties_even().clamp(-127.0, 127.0) as i8);
        }
    }
}

#[inline(always)]
unsafe fn pack_halves(block: &[f32], scale: f32, to: *mut u8) {
    let half = |i: usize| match block.get(i) {
        Some(&x) if divides(scale) => (x / scale + 8.5).floor().clamp(0.0, 15.0) as u8,
        _ => 8,
    };
    for i in 0..BLOCK / 2 {
        to.add(i).write(half(i) | half(i + BLOCK / 2) << 4);
    }
}

/// Writes the `dim` elements of the row at `from` to `to`.
///
/// # Safety
/// A whole row is readable, and `dim` floats are writable.
#[inline(always)]
pub unsafe fn unpack(dtype: DType, from: *const u8, dim: usize, to: *mut f32) {
    let scales = from.add(scales_at(dtype, dim));
    if dtype == DType::KvInt8 {
        let scale = scales.cast::<f32>().read_unaligned();
        for i in 0..dim {
            to.add(i).write(f32::from(from.cast::<i8>().add(i).read()) * scale);
        }
        return;
    }
    for first in (0..dim).step_by(BLOCK) {
        let count = BLOCK.min(dim - first);
        let scale = scales.cast::<f16>().add(first / BLOCK).read_unaligned().to_f32();
        if dtype == DType::KvQ8_0 {
            for i in first..first + count {
                to.add(i).write(f32::from(from.cast::<i8>().add(i).read()) * scale);
            }
            continue;
        }
        let bytes = from.add(first / 2);
        let (low, high) = (count.min(BLOCK / 2), count.saturating_sub(BLOCK / 2));
        for i in 0..low {
            to.add(first + i).write((f32::from(bytes.add(i).read() & 15) - 8.0) * scale);
        }
        for i in 0..high {
            to.add(first + BLOCK / 2 + i).write((f32::from(bytes.add(i).read() >> 4) - 8.0) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [DType; 3] = [DType::KvInt8, DType::KvQ8_0, DType::KvQ4_0];

    fn round(dtype: DType, x: &[f32]) -> Vec<f32> {
        // Words, so that the row is aligned; poisoned, so that what is not written shows.
        let mut row = vec![0xaaaa_aaaau32; dtype.row_bytes(x.len()) / 4 + 1];
        let mut back = vec![f32::NAN; x.len()];
        // SAFETY: both are as large as the row and the elements.
        unsafe {
            pack(dtype, x, row.as_mut_ptr().cast());
            unpack(dtype, row.as_ptr().cast(), x.len(), back.as_mut_ptr());
        }
        assert_eq!(row.last(), Some(&0xaaaa_aaaa), "{dtype}: nothing is written behind a row");
        back
    }

    #[test]
    fn rows_take_the_bytes_that_the_header_says() {
        for (dim, bytes) in [(128, [144, 144, 80]), (64, [80, 80, 48]), (256, [272, 272, 144]), (1, [16, 16, 32])] {
            assert_eq!(FORMATS.map(|dtype| dtype.row_bytes(dim)), bytes, "{dim}");
        }
        assert_eq!(DType::Bf16.row_bytes(128), 256);
    }

    #[test]
    fn elements_come_back_within_half_a_step() {
        for dtype in FORMATS {
            for dim in [1, 2, 16, 17, 31, 32, 33, 63, 128, 576] {
                let x: Vec<f32> = (0..dim).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
                let back = round(dtype, &x);
                for (first, block) in x.chunks(block_of(dtype, dim)).enumerate() {
                    let first = first * block_of(dtype, dim);
                    let most = block.iter().fold(0f32, |most, x| most.max(x.abs()));
                    // Half a step of the scale, and in Q4_0 a whole one of the largest element of the other sign; a scale in F16 is
                    // off by up to 2^-12 of itself, and so is every code times it.
                    let bound = match dtype {
                        DType::KvQ4_0 => most / 8.0 * 1.01,
                        DType::KvQ8_0 => most / 254.0 * 1.07,
                        _ => most / 254.0 * 1.001,
                    };
                    for (i, x) in block.iter().enumerate() {
                        assert!(
                            (back[first + i] - x).abs() <= bound,
                            "{dtype} of {dim}: {x} became {}",
                            back[first + i]
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn extremes_are_kept_and_special_values_are_told() {
        for dtype in FORMATS {
            assert!(round(dtype, &[0.0; 40]).iter().all(|&x| x == 0.0), "{dtype}");
            for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = [1.0; 64];
                x[40] = special;
                let back = round(dtype, &x);
                assert!(back[40].is_nan(), "{dtype}: {special} became {}", back[40]);
                assert_eq!(back[0].is_nan(), dtype == DType::KvInt8, "{dtype}: a block of its own is not touched");
            }
            // Too small for a scale: gone. Too large for one in f16: saturated.
            assert!(round(dtype, &[1e-44; 8]).iter().all(|&x| x.abs() <= 2e-44), "{dtype}");
            let large = round(dtype, &[3e38, -3e38, 0.0]);
            assert!(large.iter().all(|x| x.is_finite()) && large[0] > 0.0 && large[1] < 0.0, "{dtype}: {large:?}");
        }
        assert_eq!(round(DType::KvQ4_0, &[-8.0, 7.0, 1.0]), [-8.0, 7.0, 1.0]);
        // Of two magnitudes the positive one is exact.
        assert_eq!(round(DType::KvQ4_0, &[-8.0, 8.0]), [-7.0, 8.0]);
        assert_eq!(round(DType::KvInt8, &[127.0, -127.0, 0.5, 1.5]), [127.0, -127.0, 0.0, 2.0]);
    }

    #[test]
    fn halves_lie_as_in_ggml() {
        let x: Vec<f32> = (0..32).map(|i| (i % 16) as f32 - 8.0).collect();
        let mut row = [0u32; 8];
        // SAFETY: a row of 32 elements has 32 bytes.
        unsafe { pack(DType::KvQ4_0, &x, row.as_mut_ptr().cast()) };
        let bytes: Vec<u8> = row.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!((0..16).all(|i| bytes[i] == (i | i << 4) as u8), "{bytes:?}");
        assert_eq!(f16::from_le_bytes([bytes[16], bytes[17]]).to_f32(), 1.0);
        assert!(bytes[18..].iter().all(|&byte| byte == 0));
    }
}
