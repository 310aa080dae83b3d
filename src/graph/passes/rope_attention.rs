//! Norm, rotation and append of one new token join the attention that reads the rotated queries and the cache.
//!
//! One token alone: the tokens of a call may be several of one sequence, which sequences in device memory do not tell, and the
//! attention of the later ones would miss the earlier ones.

use super::{List, Pass};
use crate::device::DeviceKind;
use crate::error::Result;
use crate::graph::report::Exactness;
use crate::operation::access::Extent;
use crate::operation::attention::{AttentionDecode, DecodeRopeArguments};
use crate::operation::rope::Rope;
use crate::operation::Operation;

pub const PASS: Pass = Pass {
    name: "rope_attention",
    summary: "Lets the attention of one new token norm, rotate and append it.",
    exactness: Exactness::Exact,
    run,
};

fn run(list: &mut List) -> Result<()> {
    // On one H200 the fused kernel saves 0.2 to 2 us a layer beside stand-ins for the products, but whole steps of Gemma 3 ran at
    // 1.04 (270M, 1B Int4), 0.96 (1B BF16), 0.97 (4B BF16), 0.85 (4B Int8) and 0.79 (4B Int4) of the separate kernels' rate. So
    // it is for callers who ask for it, with the arguments of nvb_attention_decode.
    if list.executor.info().kind != DeviceKind::Cpu {
        return Ok(());
    }
    for place in list.places() {
        let Some(Operation::AttentionDecode(attention)) = list.op(place) else { continue };
        let queries = attention.query.region();
        let Some(writer) = list.last_writer(place, &queries) else { continue };
        let Some(Operation::Rope(rope)) = list.op(writer) else { continue };
        let Some(op) = fused(rope, attention) else { continue };
        if list.is_read_by_alone(writer, &queries, place) {
            list.fuse(writer, place, op.into(), Exactness::Exact)?;
        }
    }
    Ok(())
}

/// The attention that rotates and appends its token, of one that did not and the rope that did.
fn fused(rope: &Rope, attention: &AttentionDecode) -> Option<AttentionDecode> {
    let append = rope.append?;
    let same = rope.tokens == 1
        && rope.query_output == Some(attention.query)
        && rope.key_output.is_none()
        && append.cache == attention.cache
        && append.sequences == attention.rows.sequences
        && rope.positions == attention.rows.positions;
    if !same || attention.rope.is_some() || rope.query?.dtype != attention.query.dtype {
        return None;
    }
    let arguments = DecodeRopeArguments {
        key: rope.key?.tensor(),
        value: rope.value?.tensor(),
        query_norm: rope.query_norm,
        key_norm: rope.key_norm,
        query_scale: rope.query_scale,
        epsilon: rope.epsilon,
        weight_offset: rope.weight_offset,
        rotation: rope.rotation,
    };
    AttentionDecode { query: rope.query?, ..*attention }.with_rope(arguments).ok()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{kinds, Case, COLUMNS, M};
    use crate::operation::attention::{AttentionConfig, AttentionDecode, DecodeRows};
    use crate::operation::rope::{Append, Rope, RopeArguments, Rotation};
    use crate::operation::OperationKind::{AttentionDecode as Attention, Rope as Rotate, Softmax};
    use crate::tensor::{CacheLayer, DType, Tensor};

    const DIM: usize = 4;

    /// One matrix has a row of two queries, a key and a value, another one the cache, a third the output.
    struct Step {
        position: Tensor,
        other_position: Tensor,
        norm: Tensor,
        cache: CacheLayer,
        config: AttentionConfig,
    }

    fn part(of: M, first: usize, heads: usize) -> Tensor {
        let data = of.0.data.cast::<f32>().wrapping_add(first).cast();
        Tensor::new(data, DType::F32, &[1, heads, DIM])
    }

    impl Step {
        fn new(case: &Case) -> Step {
            let [_, _, cache] = case.matrices();
            let integer = |value: i32| Tensor::new(vec![value].leak().as_mut_ptr().cast(), DType::I32, &[1]);
            let norm = case.vector().0;
            let value = cache.0.data.cast::<f32>().wrapping_add(2 * COLUMNS).cast();
            Step {
                position: integer(2),
                other_position: integer(2),
                norm: Tensor::new(norm.data, DType::F32, &[DIM]),
                cache: CacheLayer::contiguous((cache.0.data, value), DType::F32, [1, 1, 4, DIM]),
                config: AttentionConfig::new(AttentionConfig {
                    query_heads: 2,
                    kv_heads: 1,
                    head_dim: DIM,
                    causal: true,
                    ..AttentionConfig::default()
                })
                .unwrap(),
            }
        }

        fn rope(&self, case: &Case) -> RopeArguments {
            let [row, _, _] = case.matrices();
            RopeArguments {
                query: Some(part(row, 0, 2)),
                query_output: Some(part(row, 0, 2)),
                query_norm: Some(self.norm),
                query_scale: 0.5,
                key: Some(part(row, 8, 1)),
                key_output: None,
                key_norm: Some(self.norm),
                value: Some(part(row, 12, 1)),
                epsilon: 1e-6,
                weight_offset: 1.0,
                positions: self.position,
                rotation: Some(Rotation { base: 100.0, position_scale: 1.0, rotary_dim: DIM }),
                append: Some(Append { cache: self.cache, sequences: None }),
            }
        }

        fn attention(&self, case: &Case, positions: Tensor) -> AttentionDecode {
            let [row, output, _] = case.matrices();
            let rows = DecodeRows { per_sequence: 1, positions, sequences: None, max_kv_length: 0 };
            AttentionDecode::new(self.config, part(row, 0, 2), self.cache, part(output, 0, 2), None, rows).unwrap()
        }
    }

    fn case(change: impl FnOnce(&Step, &mut RopeArguments)) -> (Case, Step) {
        let mut case = Case::new();
        let step = Step::new(&case);
        let mut rope = step.rope(&case);
        change(&step, &mut rope);
        // What a product would write, so that no launch reads the row of the one before.
        let [row, output, _] = case.matrices();
        case.softmax(output, row).push(Rope::new(rope).unwrap());
        (case, step)
    }

    #[test]
    fn rope_joins_the_attention_behind_it() {
        let (mut case, step) = case(|_, _| ());
        let attention = step.attention(&case, step.position);
        let [row, _, _] = case.matrices();
        case.push(attention).internal(row);
        assert_eq!(kinds(&case.optimised("rope_attention")), [Softmax, Attention]);
        case.expect_equal("rope_attention");
    }

    #[test]
    fn queries_that_somebody_may_read_stay_rotated() {
        let (mut case, step) = case(|_, _| ());
        let attention = step.attention(&case, step.position);
        case.push(attention);
        assert_eq!(kinds(&case.optimised("rope_attention")), [Softmax, Rotate, Attention], "they may be an output");
        let [row, output, _] = case.matrices();
        case.internal(row).softmax(row, output);
        assert_eq!(
            kinds(&case.optimised("rope_attention")),
            [Softmax, Rotate, Attention, Softmax],
            "the softmax reads them"
        );
    }

    type Change = Box<dyn FnOnce(&Step, &mut RopeArguments)>;

    #[test]
    fn what_is_not_the_same_token_or_cache_stays() {
        let mut changes: Vec<Change> = vec![
            Box::new(|step, rope| rope.positions = step.other_position),
            Box::new(|_, rope| {
                let sequence: &'static mut [i32] = vec![0].leak();
                let append = rope.append.as_mut().unwrap();
                append.sequences = Some(Tensor::new(sequence.as_mut_ptr().cast(), DType::I32, &[1]));
            }),
            Box::new(|_, rope| rope.key_output = rope.key),
            Box::new(|_, rope| rope.append.as_mut().unwrap().cache.capacity = 3),
        ];
        for (number, change) in changes.drain(..).enumerate() {
            let (mut case, step) = case(change);
            let attention = step.attention(&case, step.position);
            let [row, _, _] = case.matrices();
            case.push(attention).internal(row);
            assert_eq!(kinds(&case.optimised("rope_attention")), [Softmax, Rotate, Attention], "change {number}");
        }
    }

    #[test]
    fn an_operation_on_the_cache_in_between_keeps_them_apart() {
        let (mut case, step) = case(|_, _| ());
        let [row, _, cache] = case.matrices();
        // It reads the appended key and writes what the attention reads.
        let attention = step.attention(&case, step.position);
        case.softmax(cache, cache).push(attention).internal(row);
        assert_eq!(kinds(&case.optimised("rope_attention")), [Softmax, Rotate, Softmax, Attention]);
    }
}
