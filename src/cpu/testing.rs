//! What the operations' tests share: random tensors, error norms, and threads.

use super::threads::Threads;
use crate::tensor::fp8::{E4m3, E5m2};
use crate::tensor::{DType, Element, Tensor};
use half::{bf16, f16};
use std::sync::OnceLock;

pub use crate::simd::testing::at_every_level;

/// More threads than most tests have tasks, so that they share in every way.
pub fn threads() -> &'static Threads {
    static THREADS: OnceLock<Threads> = OnceLock::new();
    THREADS.get_or_init(|| Threads::new(3).unwrap())
}

/// Owned memory of any dtype.
pub struct Buffer {
    bytes: Vec<u32>,
    pub dtype: DType,
    pub len: usize,
}

impl Buffer {
    pub fn from(dtype: DType, values: &[f32]) -> Buffer {
        let mut buffer = Buffer { bytes: vec![0; values.len()], dtype, len: values.len() };
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: the memory has 4 bytes for each element.
            unsafe {
                match dtype {
                    DType::F32 => buffer.pointer::<f32>().add(i).write(value),
                    DType::F16 => buffer.pointer::<f16>().add(i).write(f16::from_f32(value)),
                    DType::Bf16 => buffer.pointer::<bf16>().add(i).write(bf16::from_f32(value)),
                    DType::I32 => buffer.pointer::<i32>().add(i).write(value as i32),
                    DType::F8E4m3 => buffer.pointer::<E4m3>().add(i).write(E4m3::from_f32(value)),
                    DType::F8E5m2 => buffer.pointer::<E5m2>().add(i).write(E5m2::from_f32(value)),
                    DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => unreachable!("rows have no elements of their own"),
                }
            }
        }
        buffer
    }

    fn pointer<T>(&mut self) -> *mut T {
        self.bytes.as_mut_ptr().cast()
    }

    /// Uniform values in −1 … 1.
    pub fn random(dtype: DType, len: usize, seed: u64) -> Buffer {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let values: Vec<f32> = (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / 8_388_608.0 - 1.0
            })
            .collect();
        Buffer::from(dtype, &values)
    }

    /// NaN everywhere, so that what is not written shows.
    pub fn poisoned(dtype: DType, len: usize) -> Buffer {
        Buffer::from(dtype, &vec![f32::NAN; len])
    }

    pub fn tensor(&mut self, shape: &[usize]) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), self.len);
        Tensor::new(self.pointer(), self.dtype, shape)
    }

    pub fn values(&self) -> Vec<f32> {
        let pointer = self.bytes.as_ptr();
        // SAFETY: the memory has 4 bytes for each element.
        (0..self.len)
            .map(|i| unsafe {
                match self.dtype {
                    DType::F32 => pointer.cast::<f32>().add(i).read(),
                    DType::F16 => pointer.cast::<f16>().add(i).read().to_f32(),
                    DType::Bf16 => Element::to_f32(pointer.cast::<bf16>().add(i).read()),
                    DType::I32 => pointer.cast::<i32>().add(i).read() as f32,
                    DType::F8E4m3 => pointer.cast::<E4m3>().add(i).read().to_f32(),
                    DType::F8E5m2 => pointer.cast::<E5m2>().add(i).read().to_f32(),
                    DType::KvInt8 | DType::KvQ8_0 | DType::KvQ4_0 => unreachable!("rows have no elements of their own"),
                }
            })
            .collect()
    }
}

/// What ‖actual − expected‖ / ‖expected‖ may be for results of a dtype.
pub fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 5e-3,
    }
}

/// Compares by norm, and NaN and infinities place by place.
pub fn assert_close(actual: &Buffer, expected: &Buffer, what: &str) {
    let (actual_values, expected_values) = (actual.values(), expected.values());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (i, (&a, &e)) in actual_values.iter().zip(&expected_values).enumerate() {
        if a.is_finite() && e.is_finite() {
            difference += f64::from(a - e).powi(2);
            norm += f64::from(e).powi(2);
        } else {
            assert!(a == e || (a.is_nan() && e.is_nan()), "{what}: element {i} is {a} instead of {e}");
        }
    }
    let error = difference.sqrt() / norm.sqrt().max(f64::MIN_POSITIVE);
    assert!(difference == 0.0 || error < bound(actual.dtype), "{what}: relative error {error:e}");
}
