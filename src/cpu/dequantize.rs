//! Quantised weights as vectors of f32, 32 neighbouring elements of a row at a time.
//!
//! A value is formed the same way wherever it is needed, so a product that unpacks weights in registers and one that
//! unpacks them into memory first give the same bits. Scales of whole rows are left to the end of the product.

use super::row::vectors;
use crate::simd::{Kernel, Simd, VectorElement};
use crate::weight::blocks::{self, with_block_format, Block};
use crate::weight::{BlockFormat, Scales, WeightView, BLOCK};
use half::f16;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Neighbouring elements of a row that surely share their scale, and the unit in which Int4 is stored.
pub const CHUNK: usize = 32;

/// Most elements of a [`Slice`].
pub const SLICE: usize = 1024;

const SLICE_CHUNKS: usize = SLICE / CHUNK;

/// How the elements of one encoding become values. `SCALED`: a scale stands for some chunks of a row, not for all of it.
#[allow(clippy::missing_safety_doc)] // As for `Simd`: the level is supported, the pointers are valid.
pub trait Encoded: Copy {
    /// The size of a chunk.
    const BYTES: usize;
    const SCALED: bool;
    const ZERO_POINTS: bool = false;
    /// What a value read by `load` must be multiplied by, scales apart.
    const FACTOR: f32 = 1.0;

    /// What the elements of a chunk have in common.
    type Values<S: Simd>: Copy;
    unsafe fn values<S: Simd>(scale: *const f32, zero_point: *const f32) -> Self::Values<S>;
    /// The `i`th vector of a chunk.
    unsafe fn load<S: Simd>(values: Self::Values<S>, chunk: *const u8, i: usize) -> S::Vector;
}

/// `ZERO_POINTS`: scale · q + zero point, else scale · (q − 8).
#[derive(Clone, Copy)]
pub struct Int4<const ZERO_POINTS: bool>;

impl<const ZERO_POINTS: bool> Encoded for Int4<ZERO_POINTS> {
    const BYTES: usize = CHUNK / 2;
    const SCALED: bool = true;
    const ZERO_POINTS: bool = ZERO_POINTS;

    type Values<S: Simd> = S::Nibbles;

    #[inline(always)]
    unsafe fn values<S: Simd>(scale: *const f32, zero_point: *const f32) -> S::Nibbles {
        if ZERO_POINTS {
            S::nibbles(S::splat(scale.read()), S::splat(zero_point.read()))
        } else {
            S::symmetric_nibbles(S::splat(scale.read()))
        }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(values: S::Nibbles, chunk: *const u8, i: usize) -> S::Vector {
        // The low nibbles are the first half of the chunk, the high ones the second.
        let at = i * S::LANES;
        if at < CHUNK / 2 {
            S::load_low_nibbles(values, chunk.add(at))
        } else {
            S::load_high_nibbles(values, chunk.add(at - CHUNK / 2))
        }
    }
}

/// An encoding of one byte an element: `$load` reads a vector of them.
macro_rules! bytes {
    ($name:ident, $load:ident, $factor:expr) => {
        #[derive(Clone, Copy)]
        pub struct $name<const SCALED: bool>;

        impl<const SCALED: bool> Encoded for $name<SCALED> {
            const BYTES: usize = CHUNK;
            const SCALED: bool = SCALED;
            const FACTOR: f32 = $factor;

            type Values<S: Simd> = S::Vector;

            #[inline(always)]
            unsafe fn values<S: Simd>(scale: *const f32, _offset: *const f32) -> S::Vector {
                if SCALED {
                    S::splat(scale.read())
                } else {
                    S::zero()
                }
            }
            #[inline(always)]
            unsafe fn load<S: Simd>(scale: S::Vector, chunk: *const u8, i: usize) -> S::Vector {
                let value = S::$load(chunk.add(i * S::LANES).cast());
                if SCALED {
                    S::mul(value, scale)
                } else {
                    value
                }
            }
        }
    };
}

bytes!(Int8, load_i8, 1.0);
bytes!(E4m3, load_e4m3, 256.0);
bytes!(E5m2, load_e5m2, 1.0);
bytes!(Sfp, load_sfp, 1.0);

/// Runs `$body` with `$type` standing for the [`Encoded`] of a quantised weight.
macro_rules! with_encoding {
    ($weight:expr, $type:ident => $body:expr) => {{
        use $crate::cpu::dequantize as formats;
        use $crate::weight::Encoding as Of;
        let weight: &$crate::weight::WeightView = $weight;
        match (weight.encoding, weight.scales.group_size() != 0) {
            (Of::Int4, _) if weight.zero_points.is_null() => with_encoding!(@ formats::Int4<false>, $type => $body),
            (Of::Int4, _) => with_encoding!(@ formats::Int4<true>, $type => $body),
            (Of::Int8, false) => with_encoding!(@ formats::Int8<false>, $type => $body),
            (Of::Int8, true) => with_encoding!(@ formats::Int8<true>, $type => $body),
            (Of::Fp8E4m3, false) => with_encoding!(@ formats::E4m3<false>, $type => $body),
            (Of::Fp8E4m3, true) => with_encoding!(@ formats::E4m3<true>, $type => $body),
            (Of::Fp8E5m2, false) => with_encoding!(@ formats::E5m2<false>, $type => $body),
            (Of::Fp8E5m2, true) => with_encoding!(@ formats::E5m2<true>, $type => $body),
            (Of::Sfp, false) => with_encoding!(@ formats::Sfp<false>, $type => $body),
            (Of::Sfp, true) => with_encoding!(@ formats::Sfp<true>, $type => $body),
            (Of::Float(_) | Of::Blocks(_), _) => unreachable!("a float weight is read as it stands, blocks as theirs say"),
        }
    }};
    (@ $encoded:ty, $type:ident => $body:expr) => {{
        type $type = $encoded;
        $body
    }};
}
pub(super) use with_encoding;

/// The elements `k .. k + len` of one row, `k` a multiple of [`SLICE`] and `len` at most that.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    pub weight: &'a WeightView,
    pub row: usize,
    pub k: usize,
    pub len: usize,
}

/// The scales and zero points of a slice's groups in f32.
pub struct Factors {
    scales: MaybeUninit<[f32; SLICE_CHUNKS]>,
    zero_points: MaybeUninit<[f32; SLICE_CHUNKS]>,
}

impl Factors {
    pub const UNSET: Factors = Factors { scales: MaybeUninit::uninit(), zero_points: MaybeUninit::uninit() };

    /// # Safety
    /// The CPU has `S`; the weight is one of `E` in host memory, row-major, and the slice lies in it.
    #[inline(always)]
    pub unsafe fn set<S: Simd, E: Encoded>(&mut self, slice: &Slice) {
        if !E::SCALED {
            return;
        }
        let &Slice { weight, row, k, len } = slice;
        let (scales, zero_points) =
            (self.scales.as_mut_ptr().cast::<f32>(), self.zero_points.as_mut_ptr().cast::<f32>());
        let size = weight.scales.group_size();
        let (columns, group) = (weight.columns.div_ceil(size), k / size);
        match weight.scales {
            Scales::Groups { data, .. } => {
                let first = row * columns + group;
                for (at, lanes) in vectors::<S>(len.div_ceil(size)) {
                    // The memory's own look-ahead follows the quantised values, not this trickle.
                    S::prefetch(data.wrapping_add(first + columns + at).cast());
                    S::store(scales.add(at), f16::load_lanes::<S>(data.add(first + at), lanes));
                    if E::ZERO_POINTS {
                        S::prefetch(weight.zero_points.wrapping_add(first + columns + at).cast());
                        S::store(zero_points.add(at), f16::load_lanes::<S>(weight.zero_points.add(first + at), lanes));
                    }
                }
            }
            Scales::Blocks(data) => {
                let data = data.add(row / BLOCK * columns + group);
                for (at, lanes) in vectors::<S>(len.div_ceil(BLOCK)) {
                    let scale = f32::load_lanes::<S>(data.add(at), lanes);
                    S::store(scales.add(at), S::mul(scale, S::splat(E::FACTOR)));
                }
            }
            Scales::Rows(_) | Scales::None => unreachable!("a weight whose chunks have scales"),
        }
    }

    /// What the elements of a chunk have in common, by its group.
    ///
    /// # Safety
    /// The CPU has `S`, and the factors are set, if `E` has any, for a slice with this group.
    #[inline(always)]
    pub unsafe fn values<S: Simd, E: Encoded>(&self, group: usize) -> E::Values<S> {
        E::values::<S>(
            self.scales.as_ptr().cast::<f32>().add(group),
            self.zero_points.as_ptr().cast::<f32>().add(group),
        )
    }
}

impl Slice<'_> {
    /// log₂ of the chunks in a group; without groups 0, and the group does not matter.
    #[inline(always)]
    pub fn group_shift(&self) -> u32 {
        (self.weight.scales.group_size().max(CHUNK) / CHUNK).trailing_zeros()
    }

    #[inline(always)]
    pub fn data<E: Encoded>(&self) -> *const u8 {
        let first = self.row * self.weight.row_stride + self.k;
        self.weight.data.cast::<u8>().wrapping_add(first * E::BYTES / CHUNK)
    }

    /// Chunks that are in the slice from end to end, or stored so.
    #[inline(always)]
    pub fn whole_chunks<E: Encoded>(&self) -> usize {
        if E::BYTES < CHUNK {
            self.len.div_ceil(CHUNK)
        } else {
            self.len / CHUNK
        }
    }

    #[inline(always)]
    pub fn has_rest<E: Encoded>(&self) -> bool {
        self.whole_chunks::<E>() * CHUNK < self.len
    }

    /// What follows the whole chunks of an encoding of one byte an element, filled up with zeros.
    ///
    /// # Safety
    /// The slice lies in the weight.
    #[inline(always)]
    pub unsafe fn rest<E: Encoded>(&self) -> [u8; CHUNK] {
        let mut bytes = [0; CHUNK];
        let whole = self.len / CHUNK * CHUNK;
        std::ptr::copy_nonoverlapping(self.data::<E>().add(whole), bytes.as_mut_ptr(), self.len - whole);
        bytes
    }
}

/// Writes the values of a slice, and zeros up to a whole number of chunks; asks for the bytes `ahead` of those it reads.
pub struct Unpack<'a, E> {
    pub slice: Slice<'a>,
    pub to: *mut f32,
    pub ahead: usize,
    pub encoded: PhantomData<E>,
}

impl<E: Encoded> Kernel for Unpack<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Unpack { slice, to, ahead, .. } = self;
        let mut factors = Factors::UNSET;
        factors.set::<S, E>(&slice);
        let (whole, shift) = (slice.whole_chunks::<E>(), slice.group_shift());
        for chunk in 0..whole {
            let data = slice.data::<E>().add(chunk * E::BYTES);
            S::prefetch(data.wrapping_add(ahead));
            Self::chunk::<S>(factors.values::<S, E>(chunk >> shift), data, to.add(chunk * CHUNK));
        }
        if slice.has_rest::<E>() {
            let bytes = slice.rest::<E>();
            Self::chunk::<S>(factors.values::<S, E>(whole >> shift), bytes.as_ptr(), to.add(whole * CHUNK));
        }
    }
}

/// Writes the values of a slice of a weight of blocks.
///
/// # Safety
/// The CPU has `S`; the weight lies in host memory, the slice in it, and `to` has room for its elements.
#[inline(always)]
pub unsafe fn unpack_blocks<S: Simd>(format: BlockFormat, slice: Slice, to: *mut f32) {
    with_block_format!(format, F => S::call(UnpackBlocks::<F> { slice, to, format: PhantomData }))
}

struct UnpackBlocks<'a, F> {
    slice: Slice<'a>,
    to: *mut f32,
    format: PhantomData<F>,
}

impl<F: Block> Kernel for UnpackBlocks<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let UnpackBlocks { slice: Slice { weight, row, k, len }, to, .. } = self;
        let bytes = |elements: usize| elements / F::ELEMENTS * F::BYTES;
        let first = weight.data.cast::<u8>().add(bytes(row * weight.row_stride + k));
        let blocks = std::slice::from_raw_parts(first, bytes(len));
        blocks::decode::<F>(blocks, std::slice::from_raw_parts_mut(to, len));
    }
}

impl<E: Encoded> Unpack<'_, E> {
    #[inline(always)]
    unsafe fn chunk<S: Simd>(values: E::Values<S>, data: *const u8, to: *mut f32) {
        for i in 0..CHUNK / S::LANES {
            S::store(to.add(i * S::LANES), E::load::<S>(values, data, i));
        }
    }
}
