//! The addresses of an operation's tensors, for whoever runs it on other memory.

use super::attention::DeviceLengths;
use super::block_rows::Direction;
use super::linear::LinearInput;
use super::quantized_rows::QuantizedRows;
use super::Operation;
use crate::tensor::{Heads, Matrix, Tensor};
use std::ffi::c_void;

/// What has an address that may be replaced.
trait Addressed {
    fn address(&mut self) -> &mut *mut c_void;
}

macro_rules! addressed {
    ($($type:ty),+) => {
        $(impl Addressed for $type {
            fn address(&mut self) -> &mut *mut c_void {
                &mut self.data
            }
        })+
    };
}
addressed!(Tensor, Matrix, Heads);

/// Calls a function with each address and with whether the work writes there.
struct Each<'a>(&'a mut dyn FnMut(&mut *mut c_void, bool));

impl Each<'_> {
    fn read<'o>(&mut self, operands: impl IntoIterator<Item = &'o mut (impl Addressed + 'o)>) {
        operands.into_iter().for_each(|operand| (self.0)(operand.address(), false));
    }

    fn write<'o>(&mut self, operands: impl IntoIterator<Item = &'o mut (impl Addressed + 'o)>) {
        operands.into_iter().for_each(|operand| (self.0)(operand.address(), true));
    }

    fn quantized(&mut self, rows: &mut QuantizedRows, written: bool) {
        (self.0)(&mut rows.data, written);
        let mut scales = rows.scales.cast();
        (self.0)(&mut scales, written && !rows.given_scales);
        rows.scales = scales.cast();
    }
}

impl Operation {
    /// Calls `each` with the address of every tensor that the caller gave, and with whether the work writes there. Weights and
    /// caches, which have owners, are not among them, nor are keys and values that attention reads by tables on the host.
    pub fn for_each_address(&mut self, each: &mut dyn FnMut(&mut *mut c_void, bool)) {
        let mut each = Each(each);
        match self {
            Operation::Embedding(op) => {
                each.read([&mut op.tokens]);
                each.write([&mut op.output]);
            }
            Operation::RmsNorm(op) => {
                each.read([&mut op.input]);
                each.read(&mut op.residual);
                each.read([&mut op.post_weight, &mut op.weight].into_iter().flatten());
                each.write([&mut op.residual_output, &mut op.output].into_iter().flatten());
                op.quantized_output.iter_mut().for_each(|rows| each.quantized(rows, true));
            }
            Operation::LayerNorm(op) => {
                each.read([&mut op.input]);
                each.read(&mut op.residual);
                each.read([&mut op.weight, &mut op.bias].into_iter().flatten());
                each.write([&mut op.residual_output, &mut op.output].into_iter().flatten());
            }
            Operation::GroupNorm(op) => {
                each.read([&mut op.input]);
                each.read([&mut op.weight, &mut op.bias].into_iter().flatten());
                each.write([&mut op.output]);
            }
            Operation::Linear(op) => {
                match &mut op.input {
                    LinearInput::Floats(input) => each.read([input]),
                    LinearInput::Quantized(rows) => each.quantized(rows, false),
                }
                each.read(&mut op.bias);
                each.read(&mut op.residual);
                each.write(&mut op.output);
                op.quantized_output.iter_mut().for_each(|rows| each.quantized(rows, true));
            }
            Operation::GroupedLinear(op) => {
                each.read([&mut op.input]);
                each.read([op.routing.tensor_mut()]);
                each.read(&mut op.bias);
                each.write([&mut op.output]);
            }
            Operation::Matmul(op) => {
                (each.0)(&mut op.a.data, false);
                (each.0)(&mut op.b.data, false);
                (each.0)(&mut op.output.data, true);
            }
            Operation::GatedActivation(op) => {
                each.read([&mut op.gate, &mut op.up]);
                each.write(&mut op.output);
                op.quantized_output.iter_mut().for_each(|rows| each.quantized(rows, true));
            }
            Operation::Rope(op) => {
                each.read([&mut op.query, &mut op.key, &mut op.value].into_iter().flatten());
                each.read([&mut op.query_norm, &mut op.key_norm].into_iter().flatten());
                each.read([&mut op.positions]);
                if let Some(append) = &mut op.append {
                    each.read(&mut append.sequences);
                }
                each.write([&mut op.query_output, &mut op.key_output].into_iter().flatten());
            }
            Operation::AttentionPrefill(op) => {
                each.read([&mut op.query]);
                each.read(op.lengths.iter_mut().flat_map(DeviceLengths::tensors_mut));
                each.read(op.terms.tensors_mut());
                op.tree.iter_mut().for_each(|tree| (each.0)(tree.address(), false));
                op.dropout.iter_mut().filter_map(|dropout| dropout.address()).for_each(|at| (each.0)(at, false));
                each.write([&mut op.output]);
                each.write(&mut op.lse);
            }
            Operation::AttentionDecode(op) => {
                each.read([&mut op.query]);
                each.read([&mut op.rows.positions]);
                each.read(&mut op.rows.sequences);
                if let Some(rope) = &mut op.rope {
                    each.read([&mut rope.key, &mut rope.value]);
                    each.read([&mut rope.query_norm, &mut rope.key_norm].into_iter().flatten());
                }
                each.read(op.terms.tensors_mut());
                each.write([&mut op.output]);
                each.write(&mut op.lse);
            }
            Operation::AttentionMerge(op) => {
                each.read([&mut op.outputs, &mut op.lses]);
                each.write([&mut op.output]);
                each.write(&mut op.lse);
            }
            Operation::Pointwise(op) => {
                each.read([&mut op.input]);
                each.read(&mut op.second);
                each.write([&mut op.output]);
            }
            Operation::ScatterRows(op) => {
                each.read([&mut op.input, &mut op.rows]);
                each.write([&mut op.output]);
            }
            Operation::BlockRows(op) => {
                let writes_blocks = op.direction == Direction::Encode;
                (each.0)(&mut op.floats.data, !writes_blocks);
                (each.0)(&mut op.blocks.data, writes_blocks);
                each.read(&mut op.rows);
            }
            Operation::RotaryEmbedding(op) => {
                each.read([&mut op.input, &mut op.positions]);
                each.read([&mut op.factors, &mut op.rows].into_iter().flatten());
                each.read(op.norm.as_mut().map(|norm| &mut norm.weight));
                each.write([&mut op.output]);
                for more in op.more.iter_mut().flatten() {
                    each.read([&mut more.input]);
                    each.read(&mut more.rows);
                    each.read(more.norm.as_mut().map(|norm| &mut norm.weight));
                    each.write([&mut more.output]);
                }
            }
            Operation::MaskedSoftmax(op) => {
                each.read([&mut op.input]);
                each.read([&mut op.mask, &mut op.sinks].into_iter().flatten());
                each.write([&mut op.output]);
            }
            Operation::Softmax(op) => {
                each.read([&mut op.input]);
                each.write([&mut op.output]);
            }
            Operation::SortRows(op) => {
                each.read([&mut op.input]);
                each.write([&mut op.output]);
            }
            Operation::SumRows(op) => {
                each.read([&mut op.input]);
                each.write([&mut op.output]);
            }
            Operation::L2Norm(op) => {
                each.read([&mut op.input]);
                each.write([&mut op.output]);
            }
            Operation::ConvertHeads(op) => {
                each.read([&mut op.input]);
                if let Some(scales) = &mut op.scales {
                    (each.0)(&mut scales.tensor.data, scales.written);
                }
                each.write([&mut op.output]);
            }
            Operation::Elementwise(op) => {
                each.read([&mut op.input]);
                each.read(&mut op.second);
                each.write([&mut op.output]);
            }
            Operation::Argmax(op) => {
                each.read([&mut op.logits]);
                each.write([&mut op.tokens]);
            }
            Operation::Sample(op) => {
                each.read([&mut op.logits]);
                each.read([&mut op.sequences, &mut op.positions].into_iter().flatten());
                each.write([&mut op.tokens]);
                each.write(&mut op.probabilities);
            }
            Operation::MemoryCopy(op) => {
                let mut source = op.source.cast_mut();
                (each.0)(&mut source, false);
                op.source = source;
                (each.0)(&mut op.destination, true);
            }
            Operation::MemoryFill(op) => (each.0)(&mut op.destination, true),
        }
    }

    /// Whether both are one pure function of the same inputs with outputs at the same places. `false` where that is not known.
    pub fn is_same_work(&self, other: &Operation) -> bool {
        macro_rules! same {
            ($($kind:ident),+) => {
                match (self, other) {
                    $((Operation::$kind(a), Operation::$kind(b)) => a == b,)+
                    _ => false,
                }
            };
        }
        same!(
            Embedding,
            RmsNorm,
            Linear,
            GatedActivation,
            Softmax,
            Elementwise,
            Argmax,
            LayerNorm,
            Matmul,
            GroupNorm,
            MemoryCopy,
            MemoryFill
        )
    }

    /// Whether each launch writes every byte of the outputs that `accesses` names, whatever the inputs hold.
    pub fn writes_all(&self) -> bool {
        match self {
            // Rows behind the last expert's stay, sequences may have no rows, a cache takes a few tokens, and a scatter some rows.
            Operation::GroupedLinear(_)
            | Operation::AttentionPrefill(_)
            | Operation::AttentionDecode(_)
            | Operation::ScatterRows(_) => false,
            Operation::BlockRows(op) => op.rows.is_none(),
            Operation::RotaryEmbedding(op) => op.parts().all(|(_, part)| part.rows.is_none()),
            Operation::Rope(op) => op.append.is_none(),
            // A row without columns has a scale all the same, which a GPU leaves as it was.
            Operation::GatedActivation(op) => op.gate.columns > 0,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::access::{Access, Each as EachAccess, Effect};
    use crate::operation::elementwise::{Elementwise, ElementwiseKind};
    use crate::operation::memory_fill::MemoryFill;
    use crate::operation::softmax::Softmax;
    use crate::tensor::DType;

    fn tensor(address: usize) -> Tensor {
        Tensor::new(address as *mut c_void, DType::F32, &[2, 8])
    }

    fn accesses(op: &Operation) -> Vec<Access> {
        let mut found = Vec::new();
        op.accesses(&mut EachAccess(|access| found.push(access)));
        found
    }

    #[test]
    fn replaced_addresses_are_those_of_the_accesses() {
        let add = Elementwise::new(ElementwiseKind::Add, tensor(1 << 16), Some(tensor(2 << 16)), tensor(3 << 16));
        let mut op: Operation = add.unwrap().into();
        op.for_each_address(&mut |address, written| {
            *address = address.wrapping_byte_add(if written { 1 << 20 } else { 1 << 24 });
        });
        let found: Vec<_> =
            accesses(&op).iter().map(|access| (access.region.start, access.effect == Effect::Write)).collect();
        let read = 1 << 24;
        assert_eq!(found, [(read + (1 << 16), false), (read + (2 << 16), false), ((1 << 20) + (3 << 16), true)]);
    }

    #[test]
    fn the_same_work_is_of_one_kind_with_equal_arguments() {
        let softmax = |scale| Operation::from(Softmax::new(tensor(1 << 16), tensor(2 << 16), scale).unwrap());
        assert!(softmax(1.0).is_same_work(&softmax(1.0)) && !softmax(1.0).is_same_work(&softmax(2.0)));
        assert!(!softmax(f32::MIN_POSITIVE).is_same_work(&softmax(0.0)));
        // SAFETY: it never runs.
        let fill = unsafe { MemoryFill::new((1 << 16) as *mut c_void, 0, 64) };
        assert!(!softmax(1.0).is_same_work(&fill.into()));
    }
}
