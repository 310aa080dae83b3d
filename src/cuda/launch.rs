//! What crosses from Rust to every launcher.

use crate::device::RawHandle;
use crate::tensor::{DType, Matrix, Tensor};
use std::ffi::c_void;

/// `mirror! { … struct Params of(op: &X) { field: type = value, … } with pattern = value; … }`: a struct that crosses to a
/// launcher, each field beside its value, and `Params::of`, which fills it. A field without a value has that of its name;
/// what `with` binds serves several. A field stands on one line, as build_script/arguments.rs reads it.
macro_rules! mirror {
    (
        $(#[$attribute:meta])*
        $vis:vis struct $name:ident of($($argument:ident: $type:ty),*) {
            $($field_vis:vis $field:ident: $kind:ty $(= $value:expr)?,)*
        }
        $(with $pattern:pat = $bound:expr;)*
    ) => {
        $(#[$attribute])*
        $vis struct $name {
            $($field_vis $field: $kind,)*
        }

        impl $name {
            #[inline]
            $vis fn of($($argument: $type),*) -> $name {
                $(let $pattern = $bound;)*
                $name { $($field $(: $value)?,)* }
            }
        }
    };
}
pub(super) use mirror;

/// The address of an operand that may be absent.
pub(super) fn data_of(matrix: Option<Matrix>) -> *mut c_void {
    matrix.map_or(std::ptr::null_mut(), |matrix| matrix.data)
}

pub(super) fn stride_of(matrix: Option<Matrix>) -> i64 {
    matrix.map_or(0, |matrix| matrix.row_stride as i64)
}

/// What is absent still names a dtype that has a kernel.
pub(super) fn dtype_of(matrix: Option<Matrix>) -> u32 {
    matrix.map_or(DType::F32, |matrix| matrix.dtype) as u32
}

/// Extents or strides as C has them.
pub(super) fn integers<const N: usize>(values: [usize; N]) -> [i64; N] {
    values.map(|value| value as i64)
}

pub(super) fn vector_of(tensor: Option<Tensor>) -> *mut c_void {
    tensor.map_or(std::ptr::null_mut(), |tensor| tensor.data)
}

pub(super) fn vector_dtype_of(tensor: Option<Tensor>) -> u32 {
    tensor.map_or(DType::F32, |tensor| tensor.dtype) as u32
}

/// `nvb_launch` of csrc/common/launch.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Launch {
    pub stream: *mut c_void,
    pub capability: i32,
    pub multiprocessors: i32,
    pub shared_bytes_per_block: i32,
    pub l2_bytes: i32,
}

impl Launch {
    pub fn on(mut self, stream: RawHandle) -> Launch {
        self.stream = stream.0;
        self
    }
}

// SAFETY: a description of the device; the stream handle may be used from any thread.
unsafe impl Send for Launch {}
// SAFETY: as above.
unsafe impl Sync for Launch {}
