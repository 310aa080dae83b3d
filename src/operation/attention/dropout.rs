//! Dropout of a prefill's weights: which of them become 0 is a function of a seed, an offset and the weight's place, so that no mask
//! is stored and a backward pass finds the same one.
//!
//! Key k has byte k mod 64 / 8 · 2 + k mod 2 of Philox4x32 with seven rounds (Salmon et al. 2011) under the seed as key and the
//! counter [k / 64 · 4 + k mod 8 / 2, row, head | offset high << 16, offset low], with the row counted over all sequences and the query
//! head's number. Of probabilities there are 255, t / 256. A weight is dropped where its byte is below t; the
//! others, a share of 1 − t / 256 on average, are divided by that share. The lse and the sum that weights are divided by know
//! nothing of it. Bytes, because the generator with a word for each weight costs more than the two products of attention do; seven
//! rounds, the fewest that pass all tests of the paper, as in FlashAttention; and the keys of one block are those of which a thread has the
//! scores on tensor cores (csrc/common/dropout.cuh).

use crate::error::{Error, Result};
use crate::operation::access::Visit;
use crate::tensor::{DType, Tensor};
use std::ffi::c_void;

/// The largest offset, and one more.
pub const OFFSETS: u64 = 1 << 48;
/// Keys that four blocks of the generator serve.
pub const DROPOUT_KEYS: usize = 64;
/// Of the generator.
const ROUNDS: usize = 7;
/// Heads whose number has room in a counter.
pub const MAX_DROPOUT_HEADS: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// A weight is dropped where its byte is below; at least 1.
    pub threshold: u8,
    /// What the others are multiplied by.
    pub scale: f32,
    pub seed: u64,
    pub offset: u64,
    /// Of i32 [2], the low and the high word of what is added to `offset`, read when the work runs; null: nothing is. A tensor's
    /// shape and strides would make every operation larger.
    device_offset: *mut c_void,
}

// SAFETY: a view carries an address, and every dereference is an unsafe act of an executor that was handed the view.
unsafe impl Send for Dropout {}
// SAFETY: as above; the view itself is immutable.
unsafe impl Sync for Dropout {}

impl Dropout {
    /// `None` with a probability of 0.
    pub fn new(
        probability: f32,
        seed: u64,
        offset: u64,
        device_offset: Option<Tensor>,
        heads: usize,
    ) -> Result<Option<Dropout>> {
        if !(0.0..1.0).contains(&probability) {
            return Err(Error::invalid(format!("dropout is {probability}; 0 or more, and less than 1, is needed")));
        }
        if offset >= OFFSETS {
            return Err(Error::invalid(format!("dropout_offset is {offset}; it has to be less than 2^48"))
                .with_limit(offset, OFFSETS - 1));
        }
        if heads > MAX_DROPOUT_HEADS {
            return Err(Error::invalid(format!("dropout of {heads} heads; up to {MAX_DROPOUT_HEADS} have a number"))
                .with_limit(heads as u64, MAX_DROPOUT_HEADS as u64));
        }
        if let Some(tensor) = &device_offset {
            tensor.expect_dtype("dropout_device_offset", DType::I32)?;
            tensor.expect_shape("dropout_device_offset", &[2])?;
            tensor.expect_readable("dropout_device_offset")?;
        }
        if probability == 0.0 {
            return Ok(None);
        }
        // The nearest of the probabilities that there are.
        let threshold = (probability * 256.0).round().clamp(1.0, 255.0) as u8;
        let device_offset = device_offset.map_or(std::ptr::null_mut(), |tensor| tensor.data);
        let scale = 256.0 / (256.0 - f32::from(threshold));
        Ok(Some(Dropout { threshold, scale, seed, offset, device_offset }))
    }

    pub fn device_offset(&self) -> Option<Tensor> {
        (!self.device_offset.is_null()).then(|| Tensor::new(self.device_offset, DType::I32, &[2]))
    }

    /// Of the offset in device memory, if there is one.
    pub fn address(&mut self) -> Option<&mut *mut c_void> {
        (!self.device_offset.is_null()).then_some(&mut self.device_offset)
    }

    /// The offset of a run, for an executor that computes on the host.
    pub fn run_offset(&self) -> u64 {
        let added = self.device_offset().map_or(0, |tensor| {
            // SAFETY: a validated tensor of two words in host memory.
            let [low, high] = unsafe { tensor.data.cast::<[u32; 2]>().read_unaligned() };
            u64::from(high) << 32 | u64::from(low)
        });
        self.offset.wrapping_add(added) % OFFSETS
    }

    /// The bytes of keys `keys` · 64 and on, at the offset of a run.
    #[inline]
    pub fn bytes(&self, run_offset: u64, row: u32, head: u32, keys: u32) -> [u8; DROPOUT_KEYS] {
        let blocks: [[u32; 4]; 4] = std::array::from_fn(|pair| {
            let counter = [keys * 4 + pair as u32, row, head | ((run_offset >> 32) as u32) << 16, run_offset as u32];
            philox::<ROUNDS>(counter, [self.seed as u32, (self.seed >> 32) as u32])
        });
        std::array::from_fn(|key| {
            let byte = key / 8 * 2 + key % 2;
            blocks[key % 8 / 2][byte / 4].to_le_bytes()[byte % 4]
        })
    }

    pub fn accesses(&self, visit: &mut impl Visit) {
        visit.read("dropout_device_offset", self.device_offset().as_ref());
    }
}

/// Philox4x32 (Salmon, Moraes, Dror and Shaw 2011), by default of ten rounds.
pub fn philox<const ROUNDS: usize>(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let first = u64::from(counter[0]) * 0xd251_1f53;
        let second = u64::from(counter[2]) * 0xcd9e_8d57;
        counter = [
            (second >> 32) as u32 ^ counter[1] ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ counter[3] ^ key[1],
            first as u32,
        ];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(probability: f32) -> Option<Dropout> {
        Dropout::new(probability, 7, 0, None, 8).unwrap()
    }

    #[test]
    fn the_kept_share_and_its_scale_belong_together() {
        assert_eq!(of(0.0), None);
        let half = of(0.5).unwrap();
        assert_eq!((half.threshold, half.scale), (128, 2.0));
        assert_eq!(of(0.25).unwrap().scale, 4.0 / 3.0);
        for (probability, threshold) in [(1e-20, 1), (1.4 / 256.0, 1), (1.6 / 256.0, 2), (0.1, 26), (0.9999, 255)] {
            assert_eq!(of(probability).unwrap().threshold, threshold, "{probability}");
        }
        for wrong in [-0.1, 1.0, 2.0, f32::NAN, f32::INFINITY] {
            assert!(Dropout::new(wrong, 0, 0, None, 8).unwrap_err().message.contains("dropout"), "{wrong}");
        }
        assert!(Dropout::new(0.5, 0, OFFSETS, None, 8).is_err() && Dropout::new(0.5, 0, OFFSETS - 1, None, 8).is_ok());
        assert!(Dropout::new(0.5, 0, 0, None, MAX_DROPOUT_HEADS + 1).is_err());
    }

    #[test]
    fn every_part_of_the_place_counts() {
        let dropout = of(0.5).unwrap();
        let first = dropout.bytes(1, 2, 3, 4);
        for other in [(0, 2, 3, 4), (1 + (1 << 32), 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)] {
            assert_ne!(dropout.bytes(other.0, other.1, other.2, other.3), first, "{other:?}");
        }
        assert_ne!(Dropout { seed: 7 + (1 << 32), ..dropout }.bytes(1, 2, 3, 4), first);
        let mut words = [5u32, 1];
        let with = Dropout { offset: OFFSETS - 3, device_offset: words.as_mut_ptr().cast(), ..dropout };
        assert_eq!(with.run_offset(), (1 << 32) + 2);
    }

    #[test]
    fn philox_matches_its_authors_vectors() {
        // Random123, kat_vectors: philox4x32 7 and 10.
        assert_eq!(philox::<7>([0; 4], [0; 2]), [0x5f6f_b709, 0x0d89_3f64, 0x4f12_1f81, 0x4f73_0a48]);
        assert_eq!(philox::<10>([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox::<10>([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox::<10>([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
