//! Where the tokens of a KV cache lie, as kernels are told: csrc/common/kv_placement.h.

use crate::kv_cache::MAX_PAGES;
use crate::tensor::{KvView, Placement};

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
    value_block_stride: i64,
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
        value_block_stride: 0,
        page_tokens: 0,
        page_count: 0,
        ring_tokens: 0,
        reserved: 0,
    };

    /// Of a layer's keys and values, which share all but the strides.
    pub fn of(key: &KvView, value: &KvView) -> KvPlacement {
        KvPlacement { value_block_stride: KvPlacement::of_keys(value).block_stride, ..KvPlacement::of_keys(key) }
    }

    /// Where the values are nobody's concern, or lie as the keys do.
    pub fn of_keys(key: &KvView) -> KvPlacement {
        let placement = match &key.placement {
            Placement::Contiguous => KvPlacement::CONTIGUOUS,
            Placement::Ring { tokens } => KvPlacement {
                block_stride: (BLOCK_PLACES * key.token_stride) as i64,
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
        };
        KvPlacement { value_block_stride: placement.block_stride, ..placement }
    }
}

/// Elements from one sequence to the next, where sequences have blocks of their own.
pub(super) fn sequence_stride(view: &KvView) -> i64 {
    match view.placement {
        Placement::Paged(_) => 0,
        _ => view.sequence_stride as i64,
    }
}
