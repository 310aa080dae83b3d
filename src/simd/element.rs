//! The float types that tensors hold, loaded into f32 vectors and rounded back out of them.

use super::Simd;
use crate::tensor::fp8::{E4m3, E5m2};
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

macro_rules! vector_element {
    ($type:ty, $load:ident, $load_partial:ident, $store:ident, $store_partial:ident) => {
        impl VectorElement for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(pointer: *const $type) -> S::Vector {
                S::$load(pointer.cast())
            }
            #[inline(always)]
            unsafe fn load_partial<S: Simd>(pointer: *const $type, count: usize) -> S::Vector {
                S::$load_partial(pointer.cast(), count)
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(pointer: *mut $type, vector: S::Vector) {
                S::$store(pointer.cast(), vector)
            }
            #[inline(always)]
            unsafe fn store_partial<S: Simd>(pointer: *mut $type, vector: S::Vector, count: usize) {
                S::$store_partial(pointer.cast(), vector, count)
            }
        }
    };
}
vector_element!(f32, load, load_partial, store, store_partial);
vector_element!(f16, load_f16, load_f16_partial, store_f16, store_f16_partial);
vector_element!(bf16, load_bf16, load_bf16_partial, store_bf16, store_bf16_partial);

/// A byte an element: loaded by the level, rounded one by one, which only an append to a cache does.
macro_rules! vector_byte {
    ($type:ty, $load:ident, $factor:expr) => {
        impl VectorElement for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(pointer: *const $type) -> S::Vector {
                S::mul(S::$load(pointer.cast()), S::splat($factor))
            }
            #[inline(always)]
            unsafe fn load_partial<S: Simd>(pointer: *const $type, count: usize) -> S::Vector {
                let mut lanes = [0u8; 16];
                std::ptr::copy_nonoverlapping(pointer.cast(), lanes.as_mut_ptr(), count);
                Self::load::<S>(lanes.as_ptr().cast())
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(pointer: *mut $type, vector: S::Vector) {
                Self::store_partial::<S>(pointer, vector, S::LANES)
            }
            #[inline(always)]
            unsafe fn store_partial<S: Simd>(pointer: *mut $type, vector: S::Vector, count: usize) {
                let mut lanes = [0f32; 16];
                S::store(lanes.as_mut_ptr(), vector);
                for (at, &value) in lanes.iter().enumerate().take(count) {
                    pointer.add(at).write(<$type>::from_f32(value));
                }
            }
        }
    };
}
vector_byte!(E4m3, load_e4m3, 256.0);
vector_byte!(E5m2, load_e5m2, 1.0);

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
            _ => unreachable!("a validated descriptor holds float tensors here"),
        }
    };
}
pub(crate) use with_float;

/// Runs `$body` with `$type` standing for the Rust type of keys and values in a cache.
macro_rules! with_kv {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::tensor::DType::F8E4m3 => {
                type $type = $crate::tensor::fp8::E4m3;
                $body
            }
            $crate::tensor::DType::F8E5m2 => {
                type $type = $crate::tensor::fp8::E5m2;
                $body
            }
            _ => $crate::simd::with_float!($dtype, $type => $body),
        }
    };
}
pub(crate) use with_kv;
