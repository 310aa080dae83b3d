//! What the operations of a list read and none of them writes: kernels of a captured list may load it while the grids before
//! them still run (csrc/common/constant_reads.h).

use super::access::{add_cache, Access, Each, Effect};
use super::attention::AttentionDecode;
use super::Operation;

/// `NVB_CONSTANT_WEIGHTS` of csrc/common/constant_reads.h.
pub const CONSTANT_WEIGHTS: u32 = 1;
/// `NVB_CONSTANT_POSITIONS` of csrc/common/constant_reads.h.
pub const CONSTANT_POSITIONS: u32 = 2;

/// `NVB_CONSTANT_OLDER_KEYS` of csrc/common/constant_reads.h.
pub const CONSTANT_OLDER_KEYS: u32 = 4;

/// The bit of an argument; 0 for those that no kernel loads early.
fn bit(name: &str) -> u32 {
    match name {
        "weight" | "post_weight" | "bias" | "query_norm" | "key_norm" => CONSTANT_WEIGHTS,
        "positions" | "sequences" | "page_table" => CONSTANT_POSITIONS,
        _ => 0,
    }
}

/// The attention that appends to the cache that it reads.
fn own_cache(op: &Operation) -> Option<&AttentionDecode> {
    match op {
        Operation::AttentionDecode(op) => op.rope.is_some().then_some(op),
        _ => None,
    }
}

/// The bytes that a list writes.
pub struct Written {
    /// Spans that lie apart from each other, in ascending order.
    joined: Vec<(usize, usize)>,
    /// The spans of all writes, in ascending order of their starts, if some operation appends to a cache that it reads.
    single: Vec<(usize, usize)>,
}

impl Written {
    pub fn by<'a>(operations: impl IntoIterator<Item = &'a Operation>) -> Written {
        let mut spans = Vec::new();
        let mut appends = false;
        for op in operations {
            appends |= own_cache(op).is_some();
            op.accesses(&mut Each(|access| {
                if access.effect == Effect::Write && !access.region.is_empty() {
                    spans.push((access.region.start, access.region.end()));
                }
            }));
        }
        spans.sort_unstable();
        let single = if appends { spans.clone() } else { Vec::new() };
        spans.dedup_by(|next, kept| {
            let joins = next.0 <= kept.1;
            if joins {
                kept.1 = kept.1.max(next.1);
            }
            joins
        });
        Written { joined: spans, single }
    }

    fn meets(&self, start: usize, end: usize) -> bool {
        let behind = self.joined.partition_point(|span| span.0 < end);
        behind > 0 && self.joined[behind - 1].1 > start
    }

    /// Whether the list writes to the bytes just once.
    fn meets_once(&self, start: usize, end: usize) -> bool {
        let behind = self.single.partition_point(|span| span.0 < end);
        self.single[..behind].iter().filter(|span| span.1 > start).count() == 1
    }

    /// The bits of the arguments of which the list writes no byte. Gaps of a region count as written with it.
    pub fn constant_reads(&self, op: &Operation) -> u32 {
        let mut constant = CONSTANT_WEIGHTS | CONSTANT_POSITIONS;
        op.accesses(&mut Each(|access| {
            let reads = access.effect != Effect::Write && !access.region.is_empty();
            if reads && self.meets(access.region.start, access.region.end()) {
                constant &= !bit(access.name);
            }
        }));
        match own_cache(op) {
            Some(op) if self.alone_appends(op) => constant | CONSTANT_OLDER_KEYS,
            _ => constant,
        }
    }

    /// Whether no other operation of the list writes to the cache.
    fn alone_appends(&self, op: &AttentionDecode) -> bool {
        let mut alone = true;
        let mut written = Each(|access: Access| {
            if access.effect == Effect::Write {
                alone &= self.meets_once(access.region.start, access.region.end());
            }
        });
        add_cache(&mut written, &op.cache, Effect::Write);
        alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::attention::{AttentionConfig, DecodeRopeArguments, DecodeRows};
    use crate::operation::memory_fill::MemoryFill;
    use crate::operation::rms_norm::RmsNorm;
    use crate::tensor::{CacheLayer, DType, Tensor};

    fn fill(values: &mut [f32]) -> Operation {
        // SAFETY: it never runs.
        unsafe { MemoryFill::new(values.as_mut_ptr().cast(), 0, size_of_val(values)) }.into()
    }

    #[test]
    fn spans_are_joined_and_their_ends_are_outside() {
        let mut values = [0f32; 16];
        let base = values.as_ptr() as usize;
        let list = [fill(&mut values[8..12]), fill(&mut values[0..4]), fill(&mut values[2..6])];
        let written = Written::by(&list);
        assert_eq!(written.joined, [(base, base + 24), (base + 32, base + 48)]);
        let meets = |from: usize, to: usize| written.meets(base + 4 * from, base + 4 * to);
        assert!(meets(0, 1) && meets(5, 6) && meets(5, 9) && meets(0, 16) && meets(11, 16));
        assert!(!meets(6, 8) && !meets(12, 16));
        assert!(!Written::by(&[]).meets(base, base + 64));
    }

    #[test]
    fn what_any_node_writes_is_not_constant() {
        let (mut input, mut output, mut weight, mut post) = ([1f32; 8], [0f32; 8], [1f32; 8], [1f32; 8]);
        let norm: Operation = RmsNorm {
            input: Tensor::of(&mut input, &[1, 8]),
            post_weight: Some(Tensor::of(&mut post, &[8])),
            residual: None,
            residual_output: None,
            weight: Some(Tensor::of(&mut weight, &[8])),
            output: Some(Tensor::of(&mut output, &[1, 8])),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: 0.0,
        }
        .validated()
        .unwrap()
        .into();
        let constant = |others: &[Operation]| Written::by(others.iter().chain([&norm])).constant_reads(&norm);
        let all = CONSTANT_WEIGHTS | CONSTANT_POSITIONS;
        assert_eq!(constant(&[]), all);
        assert_eq!(constant(&[fill(&mut input), fill(&mut output)]), all, "what is computed with need not be constant");
        assert_eq!(constant(&[fill(&mut weight[7..])]), CONSTANT_POSITIONS);
        assert_eq!(constant(&[fill(&mut post[..1])]), CONSTANT_POSITIONS);
    }

    #[test]
    fn older_keys_are_constant_where_their_reader_alone_appends() {
        let (mut row, mut output, mut cache, mut other) = ([1f32; 16], [0f32; 8], [0f32; 32], [0f32; 32]);
        let mut position = [1i32];
        let positions = Tensor::new(position.as_mut_ptr().cast(), DType::I32, &[1]);
        let config =
            AttentionConfig { query_heads: 2, kv_heads: 1, head_dim: 4, causal: true, ..AttentionConfig::default() };
        let config = AttentionConfig::new(config).unwrap();
        let mut decode = |cache: &mut [f32; 32]| -> Operation {
            let (key, value) = cache.split_at_mut(16);
            let layer =
                CacheLayer::contiguous((key.as_mut_ptr().cast(), value.as_mut_ptr().cast()), DType::F32, [1, 1, 4, 4]);
            let rows = DecodeRows { per_sequence: 1, positions, sequences: None, max_kv_length: 0 };
            let query = Tensor::of(&mut row[..8], &[1, 2, 4]);
            let op =
                AttentionDecode::new(config, query, layer, Tensor::of(&mut output, &[1, 2, 4]), None, rows).unwrap();
            let rope = DecodeRopeArguments {
                key: Tensor::of(&mut row[8..12], &[1, 1, 4]),
                value: Tensor::of(&mut row[12..], &[1, 1, 4]),
                query_norm: None,
                key_norm: None,
                query_scale: 1.0,
                epsilon: 1e-6,
                weight_offset: 0.0,
                rotation: None,
            };
            op.with_rope(rope).unwrap().into()
        };
        let (step, next, elsewhere) = (decode(&mut cache), decode(&mut cache), decode(&mut other));
        let constant = |others: &[Operation]| Written::by(others.iter().chain([&step])).constant_reads(&step);
        let all = CONSTANT_WEIGHTS | CONSTANT_POSITIONS;
        assert_eq!(constant(&[]), all | CONSTANT_OLDER_KEYS);
        assert_eq!(constant(std::slice::from_ref(&elsewhere)), all | CONSTANT_OLDER_KEYS, "another cache");
        assert_eq!(constant(std::slice::from_ref(&next)), all, "the step behind it appends too");
        assert_eq!(constant(&[fill(&mut cache[31..])]), all, "a fill of one value");
        let Operation::AttentionDecode(op) = step else { panic!("it is one") };
        let attention: Operation = AttentionDecode { rope: None, ..op }.into();
        assert_eq!(Written::by([&attention]).constant_reads(&attention), all, "it appends nothing");
    }
}
