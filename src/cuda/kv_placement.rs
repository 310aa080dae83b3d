//! Where the tokens of a KV cache lie, as kernels are told: csrc/common/kv_placement.h.

use crate::kv_cache::MAX_PAGES;
use crate::tensor::{CacheLayer, Placement};

/// `NVB_KV_MAX_PAGES` of csrc/common/kv_placement.h.
const PAGES: usize = 1 << 23;
const _: () = assert!(MAX_PAGES <= PAGES);
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

/// Elements from one sequence to the next, where sequences have blocks of their own.
pub(super) fn sequence_stride(cache: &CacheLayer) -> i64 {
    match cache.placement {
        Placement::Paged(_) => 0,
        _ => cache.sequence_stride as i64,
    }
}
