//! Where the tokens of a KV cache lie, as kernels are told: csrc/common/kv_placement.h.

use crate::error::{Error, Result};
use crate::tensor::Placement;

/// `NVB_KV_MAX_PAGES` of csrc/common/kv_placement.h.
const MAX_PAGES: usize = 1 << 23;
/// Places that a row's number leaves to each block.
const BLOCK_PLACES: usize = 256;

/// `nvb_kv_placement` of csrc/common/kv_placement.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KvPlacement {
    pages: *const i32,
    page_row_stride: i64,
    block_stride: i64,
    page_tokens: i32,
    page_count: i32,
    ring_tokens: i32,
    reserved: i32,
}

impl KvPlacement {
    pub const CONTIGUOUS: KvPlacement = KvPlacement {
        pages: std::ptr::null(),
        page_row_stride: 0,
        block_stride: 0,
        page_tokens: 0,
        page_count: 0,
        ring_tokens: 0,
        reserved: 0,
    };

    /// Refuses a pool of more pages than kernels take.
    pub fn check(placement: &Placement) -> Result<()> {
        match placement {
            Placement::Paged(table) if table.pages > MAX_PAGES => {
                Err(Error::unsupported(format!("a pool of {} pages; kernels take {MAX_PAGES}", table.pages))
                    .with_limit(table.pages as u64, MAX_PAGES as u64))
            }
            _ => Ok(()),
        }
    }

    /// Of a placement that was checked before it runs.
    pub fn of(placement: &Placement, token_stride: usize) -> KvPlacement {
        match placement {
            Placement::Contiguous => KvPlacement::CONTIGUOUS,
            Placement::Ring { tokens } => KvPlacement {
                block_stride: (BLOCK_PLACES * token_stride) as i64,
                ring_tokens: *tokens as i32,
                ..KvPlacement::CONTIGUOUS
            },
            Placement::Paged(table) => KvPlacement {
                pages: table.entries,
                page_row_stride: table.row_stride as i64,
                block_stride: table.page_stride as i64,
                page_tokens: table.page_tokens as i32,
                page_count: table.pages as i32,
                ..KvPlacement::CONTIGUOUS
            },
        }
    }
}
