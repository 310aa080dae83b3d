//! What the operations of a list read and none of them writes: kernels of a captured list may load it while the grids before
//! them still run (csrc/common/constant_reads.h).

use super::access::{add_cache, Access, Each, Effect};
use super::attention::AttentionDecode;
use super::Operation;
use crate::tensor::{CacheLayer, Tensor};

/// `NVB_CONSTANT_WEIGHTS` of csrc/common/constant_reads.h.
pub const CONSTANT_WEIGHTS: u32 = 1;
/// `NVB_CONSTANT_POSITIONS` of csrc/common/constant_reads.h.
pub const CONSTANT_POSITIONS: u32 = 2;

/// `NVB_CONSTANT_OLDER_KEYS` of csrc/common/constant_reads.h.
pub const CONSTANT_OLDER_KEYS: u32 = 4;
/// `NVB_CONSTANT_KEYS` of csrc/common/constant_reads.h.
pub const CONSTANT_KEYS: u32 = 8;

/// The bit of an argument; 0 for those that no kernel loads early.
fn bit(name: &str) -> u32 {
    match name {
        "weight" | "post_weight" | "bias" | "query_norm" | "key_norm" => CONSTANT_WEIGHTS,
        "positions" | "sequences" | "page_table" => CONSTANT_POSITIONS,
        _ => 0,
    }
}

/// The rows of a cache that an operation appends.
#[derive(Clone, Copy)]
struct Appended {
    cache: CacheLayer,
    positions: Tensor,
    sequences: Option<Tensor>,
}

impl Appended {
    fn by(op: &Operation) -> Option<Appended> {
        match op {
            Operation::Rope(op) => {
                let append = op.append?;
                Some(Appended { cache: append.cache, positions: op.positions, sequences: append.sequences })
            }
            Operation::AttentionDecode(op) if op.rope.is_some() => Some(Appended::of_rows(op)),
            _ => None,
        }
    }

    /// The newest rows that a decode sees.
    fn of_rows(op: &AttentionDecode) -> Appended {
        Appended { cache: op.cache, positions: op.rows.positions, sequences: op.rows.sequences }
    }

    /// Whether the numbers in device memory are the same, whatever they are.
    fn is(&self, other: &Appended) -> bool {
        let address = |tensor: &Option<Tensor>| tensor.map(|tensor| tensor.data);
        self.cache == other.cache
            && self.positions.data == other.positions.data
            && self.positions.shape == other.positions.shape
            && address(&self.sequences) == address(&other.sequences)
    }
}

/// The bytes that a list writes.
pub struct Written {
    /// Spans that lie apart from each other, in ascending order.
    joined: Vec<(usize, usize)>,
    /// The spans of all writes, in ascending order of their starts, if some operation appends to a cache.
    single: Vec<(usize, usize)>,
    appended: Vec<Appended>,
}

impl Written {
    pub fn by<'a>(operations: impl IntoIterator<Item = &'a Operation>) -> Written {
        let mut spans = Vec::new();
        let mut appended = Vec::new();
        for op in operations {
            appended.extend(Appended::by(op));
            op.accesses(&mut Each(|access| {
                if access.effect == Effect::Write && !access.region.is_empty() {
                    spans.push((access.region.start, access.region.end()));
                }
            }));
        }
        spans.sort_unstable();
        let single = if appended.is_empty() { Vec::new() } else { spans.clone() };
        spans.dedup_by(|next, kept| {
            let joins = next.0 <= kept.1;
            if joins {
                kept.1 = kept.1.max(next.1);
            }
            joins
        });
        Written { joined: spans, single, appended }
    }

    fn meets(&self, start: usize, end: usize) -> bool {
        let behind = self.joined.partition_point(|span| span.0 < end);
        behind > 0 && self.joined[behind - 1].1 > start
    }

    /// How many operations of the list write to some of the bytes.
    fn writers(&self, start: usize, end: usize) -> usize {
        let behind = self.single.partition_point(|span| span.0 < end);
        self.single[..behind].iter().filter(|span| span.1 > start).count()
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
        match op {
            Operation::AttentionDecode(op) => constant | self.constant_keys(op, constant & CONSTANT_POSITIONS != 0),
            _ => constant,
        }
    }

    fn constant_keys(&self, op: &AttentionDecode, constant_positions: bool) -> u32 {
        let mut written = false;
        add_cache(
            &mut Each(|access| written |= self.meets(access.region.start, access.region.end())),
            &op.cache,
            Effect::Read,
        );
        if !written {
            return CONSTANT_KEYS | CONSTANT_OLDER_KEYS;
        }
        // Two rows of one sequence could be old and new to each other: only of one sequence is it known that they are not.
        let newest = Appended::of_rows(op);
        if op.rope.is_none() && (op.sequence_count() != 1 || !constant_positions) {
            return 0;
        }
        let appends = match op.rope {
            Some(_) => 1,
            None => self.appended.iter().filter(|appended| appended.is(&newest)).count(),
        };
        let mut alone = appends > 0;
        let mut append = Each(|access: Access| {
            if access.effect == Effect::Write {
                alone &= self.writers(access.region.start, access.region.end()) == appends;
            }
        });
        add_cache(&mut append, &op.cache, Effect::Write);
        if alone {
            CONSTANT_OLDER_KEYS
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::attention::{AttentionConfig, DecodeRopeArguments, DecodeRows};
    use crate::operation::memory_fill::MemoryFill;
    use crate::operation::rms_norm::RmsNorm;
    use crate::operation::rope::{Append, Rope, RopeArguments};
    use crate::tensor::DType;

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
        let every = all | CONSTANT_OLDER_KEYS | CONSTANT_KEYS;
        assert_eq!(Written::by([&attention]).constant_reads(&attention), every, "nothing appends");
        let filled = fill(&mut cache[31..]);
        assert_eq!(Written::by([&filled, &attention]).constant_reads(&attention), all, "a fill of one value");
    }

    #[test]
    fn older_keys_are_constant_where_the_rows_of_the_decode_are_appended() {
        let (mut row, mut output, mut cache) = ([1f32; 16], [0f32; 8], [0f32; 64]);
        let (mut position, mut other_position, mut sequence) = ([1i32], [1i32], [1i32]);
        let [positions, other_positions, sequences] = [&mut position, &mut other_position, &mut sequence]
            .map(|number| Tensor::new(number.as_mut_ptr().cast(), DType::I32, &[1]));
        let config =
            AttentionConfig { query_heads: 2, kv_heads: 1, head_dim: 4, causal: true, ..AttentionConfig::default() };
        let config = AttentionConfig::new(config).unwrap();
        let (key, value) = cache.split_at_mut(32);
        let data = (key.as_mut_ptr().cast(), value.as_mut_ptr().cast());
        let layer = CacheLayer::contiguous(data, DType::F32, [2, 1, 4, 4]);
        let (query, new_key, new_value) = (
            Tensor::of(&mut row[..8], &[1, 2, 4]),
            Tensor::of(&mut row[8..12], &[1, 1, 4]),
            Tensor::of(&mut row[12..], &[1, 1, 4]),
        );
        let append = |positions: Tensor, sequences: Option<Tensor>| -> Operation {
            let arguments = RopeArguments {
                query: None,
                query_output: None,
                query_norm: None,
                query_scale: 1.0,
                key: Some(new_key),
                key_output: None,
                key_norm: None,
                value: Some(new_value),
                positions,
                epsilon: 1e-6,
                weight_offset: 0.0,
                rotation: None,
                append: Some(Append { cache: layer, sequences }),
            };
            Rope::new(arguments).unwrap().into()
        };
        let step: Operation = {
            let rows = DecodeRows { per_sequence: 1, positions, sequences: Some(sequences), max_kv_length: 0 };
            AttentionDecode::new(config, query, layer, Tensor::of(&mut output, &[1, 2, 4]), None, rows).unwrap().into()
        };
        let constant = |others: &[Operation]| Written::by(others.iter().chain([&step])).constant_reads(&step);
        let all = CONSTANT_WEIGHTS | CONSTANT_POSITIONS;
        let own = || append(positions, Some(sequences));
        assert_eq!(constant(&[own()]), all | CONSTANT_OLDER_KEYS);
        assert_eq!(constant(&[own(), own()]), all | CONSTANT_OLDER_KEYS, "the same row twice");
        assert_eq!(constant(&[append(other_positions, Some(sequences))]), all, "at another position, perhaps");
        assert_eq!(constant(&[append(positions, None)]), all, "of another sequence, perhaps");
        assert_eq!(constant(&[own(), append(other_positions, Some(sequences))]), all, "another beside it");
        // SAFETY: it never runs.
        let advance = unsafe { MemoryFill::new(positions.data, 0, 4) }.into();
        assert_eq!(constant(&[own(), advance]), CONSTANT_WEIGHTS, "positions that change between the two");
    }
}
