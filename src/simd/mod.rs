//! Vectors of f32 whose width the machine decides.
//!
//! A computation is written once, generic over [`Simd`], as a [`Kernel`]; [`dispatch`] runs it compiled for the widest
//! instruction set that this CPU has. Everything that a kernel calls must be `#[inline(always)]`: only code inlined
//! into the entry point of its level is compiled with that level's instructions.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The BF16 of an SFP byte. Without the sign its bits are exponent and mantissa: with bit 6 clear 4 and 2 from 2^-23 on, else 3
/// and 3 from 2^-7 on. Moved to their places in a BF16, the fields of the right kind are the smaller number; 0 is zero.
#[inline(always)]
pub fn sfp_bits(byte: u8) -> u16 {
    let size = u16::from(byte & 0x7f);
    let magnitude = (0x3400 + (size << 5)).min(0x3800 + (size << 4));
    if size == 0 {
        0
    } else {
        magnitude | u16::from(byte & 0x80) << 8
    }
}

/// The methods of a level, of which all are `#[inline(always)]`; one that is an expression is `name(…) -> … = expression;`.
macro_rules! methods {
    () => {};
    ($name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? = $body:expr; $($rest:tt)*) => {
        methods! { $name($($argument: $type),*) $(-> $result)? { $body } $($rest)* }
    };
    ($name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? { $($body:tt)* } $($rest:tt)*) => {
        #[inline(always)]
        unsafe fn $name($($argument: $type),*) $(-> $result)? {
            $($body)*
        }
        methods! { $($rest)* }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod element;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
pub(crate) mod testing;

pub use element::VectorElement;
pub(crate) use element::{with_float, with_kv};

/// A vector of [`Simd::LANES`] f32 values and what can be done with it.
///
/// # Safety
/// Every function may be called only on a CPU that has the level's instructions, and the functions that take a pointer
/// only with one that is valid for `LANES` (or `count`) elements. No alignment is required.
#[allow(clippy::missing_safety_doc)] // The one rule above holds for all of them.
pub trait Simd: Copy + Send + Sync + 'static {
    /// f32 values in a vector.
    const LANES: usize;
    /// Most rows of the left operand in a register tile of `cpu/dot_tile.rs`: with four columns it fills the registers.
    const DOT_ROWS: usize;
    /// Most rows in a register tile of `cpu/outer_tile.rs`, beside [`Simd::OUTER_VECTORS`] vectors.
    const OUTER_ROWS: usize;
    /// Vectors in a row of a register tile of `cpu/outer_tile.rs`.
    const OUTER_VECTORS: usize;

    type Vector: Copy;
    /// What [`Simd::nibbles`] prepares.
    type Nibbles: Copy;

    unsafe fn splat(value: f32) -> Self::Vector;
    #[inline(always)]
    unsafe fn zero() -> Self::Vector {
        Self::splat(0.0)
    }

    unsafe fn load(pointer: *const f32) -> Self::Vector;
    unsafe fn store(pointer: *mut f32, vector: Self::Vector);
    /// Loads 16 bits a lane, each the upper half of an f32.
    unsafe fn load_bf16(pointer: *const u16) -> Self::Vector;
    /// Loads 16 bits a lane, each an IEEE half.
    unsafe fn load_f16(pointer: *const u16) -> Self::Vector;
    /// Loads a signed byte a lane.
    unsafe fn load_i8(pointer: *const i8) -> Self::Vector;
    /// Loads an FP8 E4M3 number a lane (the variant without infinities, whose 0x7f and 0xff are NaN), divided by 256.
    unsafe fn load_e4m3(pointer: *const u8) -> Self::Vector;
    /// Loads an FP8 E5M2 number a lane.
    unsafe fn load_e5m2(pointer: *const u8) -> Self::Vector;
    /// Loads an SFP number a lane: gemma.cpp's, which are those of BF16 in a byte.
    #[inline(always)]
    unsafe fn load_sfp(pointer: *const u8) -> Self::Vector {
        let mut lanes = [0u16; 16];
        for (i, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            *lane = sfp_bits(pointer.add(i).read());
        }
        Self::load_bf16(lanes.as_ptr())
    }
    /// Prepares to turn numbers q of 4 bits into scale · q + offset. The products must be exact in f32, as those with a
    /// scale of 16 bits are; then every level gives the same values.
    unsafe fn nibbles(scale: Self::Vector, offset: Self::Vector) -> Self::Nibbles;
    /// Prepares to turn numbers q of 4 bits into scale · (q − 8).
    #[inline(always)]
    unsafe fn symmetric_nibbles(scale: Self::Vector) -> Self::Nibbles {
        Self::nibbles(scale, Self::mul(scale, Self::splat(-8.0)))
    }
    /// The values of the low halves of a byte a lane.
    unsafe fn load_low_nibbles(values: Self::Nibbles, pointer: *const u8) -> Self::Vector;
    /// The values of the high halves of a byte a lane.
    unsafe fn load_high_nibbles(values: Self::Nibbles, pointer: *const u8) -> Self::Vector;
    /// Rounds to nearest even, as the next two do.
    unsafe fn store_bf16(pointer: *mut u16, vector: Self::Vector);
    unsafe fn store_f16(pointer: *mut u16, vector: Self::Vector);

    /// Loads the first `count < LANES` lanes; the others are 0 and their memory is not read.
    #[inline(always)]
    unsafe fn load_partial(pointer: *const f32, count: usize) -> Self::Vector {
        let mut lanes = [0f32; 16];
        std::ptr::copy_nonoverlapping(pointer, lanes.as_mut_ptr(), count);
        Self::load(lanes.as_ptr())
    }
    #[inline(always)]
    unsafe fn load_bf16_partial(pointer: *const u16, count: usize) -> Self::Vector {
        let mut lanes = [0u16; 16];
        std::ptr::copy_nonoverlapping(pointer, lanes.as_mut_ptr(), count);
        Self::load_bf16(lanes.as_ptr())
    }
    #[inline(always)]
    unsafe fn load_f16_partial(pointer: *const u16, count: usize) -> Self::Vector {
        let mut lanes = [0u16; 16];
        std::ptr::copy_nonoverlapping(pointer, lanes.as_mut_ptr(), count);
        Self::load_f16(lanes.as_ptr())
    }
    /// Stores the first `count < LANES` lanes; memory past them is not written.
    #[inline(always)]
    unsafe fn store_partial(pointer: *mut f32, vector: Self::Vector, count: usize) {
        let mut lanes = [0f32; 16];
        Self::store(lanes.as_mut_ptr(), vector);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), pointer, count);
    }
    #[inline(always)]
    unsafe fn store_bf16_partial(pointer: *mut u16, vector: Self::Vector, count: usize) {
        let mut lanes = [0u16; 16];
        Self::store_bf16(lanes.as_mut_ptr(), vector);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), pointer, count);
    }
    #[inline(always)]
    unsafe fn store_f16_partial(pointer: *mut u16, vector: Self::Vector, count: usize) {
        let mut lanes = [0u16; 16];
        Self::store_f16(lanes.as_mut_ptr(), vector);
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), pointer, count);
    }

    unsafe fn add(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn sub(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn mul(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn div(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// a · b + c, fused where the level has it.
    unsafe fn fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// a · b + c with one rounding at every level.
    #[inline(always)]
    unsafe fn exact_fma(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        Self::fma(a, b, c)
    }
    /// The larger; if either is NaN, `b` or NaN. So `max(bound, x)` keeps a NaN in `x`.
    unsafe fn max(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The smaller; if either is NaN, `b` or NaN.
    unsafe fn min(a: Self::Vector, b: Self::Vector) -> Self::Vector;
    unsafe fn abs(a: Self::Vector) -> Self::Vector;
    /// |magnitude| with the sign of `sign`.
    unsafe fn copysign(magnitude: Self::Vector, sign: Self::Vector) -> Self::Vector;
    /// To the nearest integer, ties to even.
    unsafe fn round(a: Self::Vector) -> Self::Vector;
    /// a < b ? x : y, lane by lane; a NaN selects `y`.
    unsafe fn select_less(a: Self::Vector, b: Self::Vector, x: Self::Vector, y: Self::Vector) -> Self::Vector;
    /// 0, 1, 2, …
    #[inline(always)]
    unsafe fn lane_numbers() -> Self::Vector {
        const NUMBERS: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];
        Self::load(NUMBERS.as_ptr())
    }
    /// The first `count` lanes of `a`, the others of `rest`.
    #[inline(always)]
    unsafe fn first(count: usize, a: Self::Vector, rest: Self::Vector) -> Self::Vector {
        Self::select_less(Self::lane_numbers(), Self::splat(count as f32), a, rest)
    }
    /// a · 2^exponent with one rounding; `exponent` is integral and within ±250.
    unsafe fn scale_by_power(a: Self::Vector, exponent: Self::Vector) -> Self::Vector;

    /// The sum of the lanes. The order of the additions is the same as in [`Simd::sum4`].
    unsafe fn sum(a: Self::Vector) -> f32;
    /// The four sums of four vectors' lanes.
    unsafe fn sum4(vectors: [Self::Vector; 4]) -> [f32; 4];
    unsafe fn max_lane(a: Self::Vector) -> f32;

    /// The even and the odd elements of `a` followed by `b`.
    unsafe fn deinterleave(a: Self::Vector, b: Self::Vector) -> (Self::Vector, Self::Vector);
    /// Transposes the `LANES` × `LANES` block whose rows are `rows[0..LANES]` in place.
    unsafe fn transpose(rows: &mut [Self::Vector; 16]);

    /// Runs a kernel as a function of its own instead of a part of the caller, to keep hot loops apart and code small.
    unsafe fn call<K: Kernel>(kernel: K) -> K::Output;

    /// Asks for the cache line at `pointer`; any address may be given.
    unsafe fn prefetch(pointer: *const u8);
}

/// A computation over vectors, with its arguments.
pub trait Kernel {
    type Output;
    /// Does the work. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the kernel's own pointers are valid.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// An instruction set that the library has code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// Whether this CPU (and its operating system) has it.
    pub fn is_supported(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Level::Neon => std::arch::is_aarch64_feature_detected!("neon"),
        }
    }

    /// All in the order of their numbers, the plainest first.
    const ALL: &[Level] = &[
        Level::Portable,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
        #[cfg(target_arch = "aarch64")]
        Level::Neon,
    ];

    /// The levels that this CPU has, the plainest first.
    pub fn supported() -> impl DoubleEndedIterator<Item = Level> {
        Level::ALL.iter().copied().filter(|level| level.is_supported())
    }

    /// The widest that this CPU has.
    pub fn best() -> Level {
        Level::supported().next_back().unwrap_or(Level::Portable)
    }

    /// What [`dispatch`] runs at: the best, found once, unless a test forced another.
    fn current() -> Level {
        match CURRENT.load(Ordering::Relaxed) {
            0 => {
                let best = Level::best();
                // What a test forces meanwhile stays.
                let _ = CURRENT.compare_exchange(0, best as usize + 1, Ordering::Relaxed, Ordering::Relaxed);
                best
            }
            number => Level::ALL[number - 1],
        }
    }

    /// Makes all kernels of this process run at this level, which is supported, so that tests reach each of them.
    pub fn force(self) -> Level {
        CURRENT.store(self as usize + 1, Ordering::Relaxed);
        self
    }

    /// Runs a kernel at this level.
    ///
    /// # Safety
    /// The level is supported and the kernel's own pointers are valid.
    pub unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Level::Portable => portable::run(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::run(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::run(kernel),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => neon::run(kernel),
        }
    }
}

/// One more than the number of the level that kernels run at; 0: not known yet.
static CURRENT: AtomicUsize = AtomicUsize::new(0);

/// Runs a kernel at the best level.
///
/// # Safety
/// The kernel's own pointers are valid.
#[inline]
pub unsafe fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    Level::current().run(kernel)
}
