//! The float types that tensors hold, loaded into f32 vectors and rounded back out of them.

use super::Simd;
use crate::tensor::Element;
use half::{bf16, f16};

/// A float type in memory, a vector at a time. Every load is exact; every store rounds to nearest even.
#[allow(clippy::missing_safety_doc)] // As for `Simd`: the level is supported, the pointer is valid for the lanes.
pub trait VectorElement: Element {
    unsafe fn load<S: Simd>(pointer: *const Self) -> S::Vector;
    unsafe fn load_partial<S: Simd>(pointer: *const Self, count: usize) -> S::Vector;
    unsafe fn store<S: Simd>(pointer: *mut Self, vector: S::Vector);
    unsafe fn store_partial<S: Simd>(pointer: *mut Self, vector: S::Vector, count: usize);

    /// A whole vector or part of one.
    #[inline(always)]
    unsafe fn load_lanes<S: Simd>(pointer: *const Self, lanes: usize) -> S::Vector {
        if lanes == S::LANES {
            Self::load::<S>(pointer)
        } else {
            Self::load_partial::<S>(pointer, lanes)
        }
    }
    #[inline(always)]
    unsafe fn store_lanes<S: Simd>(pointer: *mut Self, vector: S::Vector, lanes: usize) {
        if lanes == S::LANES {
            Self::store::<S>(pointer, vector)
        } else {
            Self::store_partial::<S>(pointer, vector, lanes)
        }
    }
}

impl VectorElement for f32 {
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
}

impl VectorElement for f16 {
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
}

impl VectorElement for bf16 {
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
}

/// Runs `$body` with `$type` standing for the Rust type of a float dtype.
macro_rules! with_float {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F32 => {
                type $type = f32;
                $body
            }
            $crate::tensor::DType::F16 => {
                type $type = half::f16;
                $body
            }
            $crate::tensor::DType::Bf16 => {
                type $type = half::bf16;
                $body
            }
            $crate::tensor::DType::I32 => unreachable!("a validated descriptor holds float tensors here"),
        }
    };
}
pub(crate) use with_float;
