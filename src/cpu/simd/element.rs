//! The float types that tensors hold, loaded into f32 vectors and rounded back out of them.

use super::Simd;
use half::{bf16, f16};

/// A float type in memory. Every load is exact; every store rounds to nearest even.
#[allow(clippy::missing_safety_doc)] // As for `Simd`: the level is supported, the pointer is valid for the lanes.
pub trait Element: Copy + Send + Sync + 'static {
    unsafe fn load<S: Simd>(pointer: *const Self) -> S::Vector;
    unsafe fn load_partial<S: Simd>(pointer: *const Self, count: usize) -> S::Vector;
    unsafe fn store<S: Simd>(pointer: *mut Self, vector: S::Vector);
    unsafe fn store_partial<S: Simd>(pointer: *mut Self, vector: S::Vector, count: usize);
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(pointer: *const f32) -> S::Vector {
        S::load(pointer)
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(pointer: *const f32, count: usize) -> S::Vector {
        S::load_partial(pointer, count)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(pointer: *mut f32, vector: S::Vector) {
        S::store(pointer, vector)
    }
    #[inline(always)]
    unsafe fn store_partial<S: Simd>(pointer: *mut f32, vector: S::Vector, count: usize) {
        S::store_partial(pointer, vector, count)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(pointer: *const f16) -> S::Vector {
        S::load_f16(pointer.cast())
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(pointer: *const f16, count: usize) -> S::Vector {
        S::load_f16_partial(pointer.cast(), count)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(pointer: *mut f16, vector: S::Vector) {
        S::store_f16(pointer.cast(), vector)
    }
    #[inline(always)]
    unsafe fn store_partial<S: Simd>(pointer: *mut f16, vector: S::Vector, count: usize) {
        S::store_f16_partial(pointer.cast(), vector, count)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f16 {
        f16::from_f32(value)
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(pointer: *const bf16) -> S::Vector {
        S::load_bf16(pointer.cast())
    }
    #[inline(always)]
    unsafe fn load_partial<S: Simd>(pointer: *const bf16, count: usize) -> S::Vector {
        S::load_bf16_partial(pointer.cast(), count)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(pointer: *mut bf16, vector: S::Vector) {
        S::store_bf16(pointer.cast(), vector)
    }
    #[inline(always)]
    unsafe fn store_partial<S: Simd>(pointer: *mut bf16, vector: S::Vector, count: usize) {
        S::store_bf16_partial(pointer.cast(), vector, count)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}
