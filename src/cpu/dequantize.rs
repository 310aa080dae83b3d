//! Quantised weights as vectors of f32, 32 neighbouring elements of a row at a time.
//!
//! A value is formed the same way wherever it is needed, so a product that unpacks weights in registers and one that
//! unpacks them into memory first give the same bits. Scales of whole rows are left to the end of the product.

use super::row::vectors;
use super::simd::{Kernel, Simd, VectorElement};
use crate::weight::{Scales, WeightView, BLOCK};
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
    /// Of a chunk.
    const BYTES: usize;
    const SCALED: bool;
    /// What a value read by `load` must be multiplied by, scales apart.
    const FACTOR: f32 = 1.0;

    /// What the elements of a chunk have in common.
    type Values<S: Simd>: Copy;
    unsafe fn values<S: Simd>(scale: f32, offset: f32) -> Self::Values<S>;
    /// The `i`th vector of a chunk.
    unsafe fn load<S: Simd>(values: Self::Values<S>, chunk: *const u8, i: usize) -> S::Vector;
}

#[derive(Clone, Copy)]
pub struct Int4;

impl Encoded for Int4 {
    const BYTES: usize = CHUNK / 2;
    const SCALED: bool = true;

    type Values<S: Simd> = S::Nibbles;

    #[inline(always)]
    unsafe fn values<S: Simd>(scale: f32, offset: f32) -> S::Nibbles {
        S::nibbles(S::splat(scale), S::splat(offset))
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
            unsafe fn values<S: Simd>(scale: f32, _offset: f32) -> S::Vector {
                S::splat(scale)
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

/// Runs `$body` with `$type` standing for the [`Encoded`] of a quantised weight.
macro_rules! with_encoding {
    ($weight:expr, $type:ident => $body:expr) => {{
        use $crate::cpu::dequantize::{E4m3, E5m2, Int4, Int8};
        use $crate::weight::{Encoding, Scales};
        let weight: &$crate::weight::WeightView = $weight;
        match (weight.encoding, matches!(weight.scales, Scales::Rows(_))) {
            (Encoding::Int4, _) => {
                type $type = Int4;
                $body
            }
            (Encoding::Int8, true) => {
                type $type = Int8<false>;
                $body
            }
            (Encoding::Int8, false) => {
                type $type = Int8<true>;
                $body
            }
            (Encoding::Fp8E4m3, true) => {
                type $type = E4m3<false>;
                $body
            }
            (Encoding::Fp8E4m3, false) => {
                type $type = E4m3<true>;
                $body
            }
            (Encoding::Fp8E5m2, true) => {
                type $type = E5m2<false>;
                $body
            }
            (Encoding::Fp8E5m2, false) => {
                type $type = E5m2<true>;
                $body
            }
            (Encoding::Float(_), _) => unreachable!("a float weight is read as it stands"),
        }
    }};
}
pub(super) use with_encoding;

/// The elements `k .. k + len` of one row, `k` a multiple of [`SLICE`] and `len` at most that.
pub struct Slice {
    data: *const u8,
    len: usize,
    /// Of each group in the slice; not set beyond, nor where one scale stands for the row.
    scales: MaybeUninit<[f32; SLICE_CHUNKS]>,
    offsets: MaybeUninit<[f32; SLICE_CHUNKS]>,
    /// log₂ of the chunks in a group.
    shift: u32,
}

impl Slice {
    /// # Safety
    /// The CPU has `S`; the weight is one of `E` in host memory, row-major, and the elements are in it.
    #[inline(always)]
    pub unsafe fn new<S: Simd, E: Encoded>(weight: &WeightView, row: usize, k: usize, len: usize) -> Slice {
        let mut slice = Slice {
            data: weight.data.cast::<u8>().add((row * weight.row_stride + k) * E::BYTES / CHUNK),
            len,
            scales: MaybeUninit::uninit(),
            offsets: MaybeUninit::uninit(),
            shift: 0,
        };
        let size = weight.scales.group_size();
        if !E::SCALED || size == 0 {
            return slice;
        }
        slice.shift = (size / CHUNK).ilog2();
        let (columns, group) = (weight.columns.div_ceil(size), k / size);
        let (scales, offsets) = (slice.scales.as_mut_ptr().cast::<f32>(), slice.offsets.as_mut_ptr().cast::<f32>());
        for (at, lanes) in vectors::<S>(len.div_ceil(size)) {
            let scale = match weight.scales {
                Scales::Groups { data, .. } => f16::load_lanes::<S>(data.add(row * columns + group + at), lanes),
                Scales::Blocks(data) => f32::load_lanes::<S>(data.add(row / BLOCK * columns + group + at), lanes),
                Scales::Rows(_) | Scales::None => S::zero(),
            };
            let offset = if weight.offsets.is_null() {
                S::mul(scale, S::splat(-8.0))
            } else {
                f16::load_lanes::<S>(weight.offsets.add(row * columns + group + at), lanes)
            };
            S::store(scales.add(at), S::mul(scale, S::splat(E::FACTOR)));
            S::store(offsets.add(at), offset);
        }
        slice
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

    #[inline(always)]
    pub fn data<E: Encoded>(&self, chunk: usize) -> *const u8 {
        self.data.wrapping_add(chunk * E::BYTES)
    }

    /// What follows the whole chunks, filled up with zeros.
    ///
    /// # Safety
    /// There is such a rest.
    #[inline(always)]
    pub unsafe fn rest(&self) -> [u8; CHUNK] {
        let mut bytes = [0; CHUNK];
        std::ptr::copy_nonoverlapping(self.data.add(self.len / CHUNK * CHUNK), bytes.as_mut_ptr(), self.len % CHUNK);
        bytes
    }

    /// # Safety
    /// The CPU has `S`, and the slice was made for `E`, with `chunk` in it.
    #[inline(always)]
    pub unsafe fn values<S: Simd, E: Encoded>(&self, chunk: usize) -> E::Values<S> {
        if !E::SCALED {
            return E::values::<S>(1.0, 0.0);
        }
        let group = chunk >> self.shift;
        let (scales, offsets) = (self.scales.as_ptr().cast::<f32>(), self.offsets.as_ptr().cast::<f32>());
        E::values::<S>(scales.add(group).read(), offsets.add(group).read())
    }
}

/// Writes the values of a slice, and zeros up to a whole number of chunks; asks for the bytes `ahead` of those it reads.
pub struct Unpack<'a, E> {
    pub slice: &'a Slice,
    pub to: *mut f32,
    pub ahead: usize,
    pub encoded: PhantomData<E>,
}

impl<E: Encoded> Kernel for Unpack<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Unpack { slice, to, ahead, .. } = self;
        let whole = slice.whole_chunks::<E>();
        for chunk in 0..whole {
            let data = slice.data::<E>(chunk);
            S::prefetch(data.wrapping_add(ahead));
            Self::chunk::<S>(slice.values::<S, E>(chunk), data, to.add(chunk * CHUNK));
        }
        if slice.has_rest::<E>() {
            Self::chunk::<S>(slice.values::<S, E>(whole), slice.rest().as_ptr(), to.add(whole * CHUNK));
        }
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
