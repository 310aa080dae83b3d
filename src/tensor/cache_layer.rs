//! Keys and values in memory, of one tensor or of a layer of a cache.

use super::DType;
use crate::error::{Error, Result};
use std::ffi::c_void;

/// The widest head that kernels take.
pub const MAX_HEAD_DIM: usize = 512;

/// Keys or values in memory: element (span offset + token · token_stride + head · head_stride + i).
#[derive(Debug, Clone, Copy)]
pub struct KvView {
    pub data: *mut c_void,
    pub dtype: DType,
    pub token_stride: usize,
    pub head_stride: usize,
}

// SAFETY: an address and its description, dereferenced only by executors.
unsafe impl Send for KvView {}
// SAFETY: as above.
unsafe impl Sync for KvView {}

impl KvView {
    /// Where the key or value of a token and head of the sequence at `offset` starts, and how many tokens from this one on,
    /// itself included, lie `token_stride` elements apart. Readers reach tokens by this alone.
    #[inline]
    pub fn run(&self, offset: usize, token: usize, head: usize) -> (*const c_void, usize) {
        let element = offset + token * self.token_stride + head * self.head_stride;
        (self.data.cast::<u8>().wrapping_add(element * self.dtype.size()).cast(), usize::MAX)
    }
}

/// One layer's keys and values as executors see them.
#[derive(Debug, Clone, Copy)]
pub struct CacheLayer {
    pub key: *mut c_void,
    pub value: *mut c_void,
    pub dtype: DType,
    pub slots: usize,
    pub heads: usize,
    pub capacity: usize,
    pub head_dim: usize,
    /// In elements.
    pub slot_stride: usize,
    pub head_stride: usize,
}

// SAFETY: addresses and their description, dereferenced only by executors.
unsafe impl Send for CacheLayer {}
// SAFETY: as above.
unsafe impl Sync for CacheLayer {}

impl CacheLayer {
    pub fn key_view(&self) -> KvView {
        KvView { data: self.key, dtype: self.dtype, token_stride: self.head_dim, head_stride: self.head_stride }
    }

    pub fn value_view(&self) -> KvView {
        KvView { data: self.value, ..self.key_view() }
    }

    pub fn check_slot(&self, slot: i32) -> Result<usize> {
        if slot >= 0 && (slot as usize) < self.slots {
            return Ok(slot as usize);
        }
        Err(Error::invalid(format!("cache slot {slot}; the cache has {} slots", self.slots))
            .with_limit(slot.max(0) as u64, self.slots as u64))
    }

    pub fn check_position(&self, position: i32) -> Result<usize> {
        if position >= 0 && (position as usize) < self.capacity {
            return Ok(position as usize);
        }
        Err(Error::invalid(format!("position {position}; the cache holds {} tokens a sequence", self.capacity))
            .with_limit(position.max(0) as u64, self.capacity as u64))
    }
}
