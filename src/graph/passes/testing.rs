//! Small lists for the tests of passes: matrices of 4 × 8 floats, operations on them, and a comparison of what the recorded and the
//! optimised list leave in memory.

use crate::cpu::CpuExecutor;
use crate::device::{CopyKind, RawHandle};
use crate::executor::Executor;
use crate::graph::fingerprint;
use crate::graph::optimize::{Level, Optimized, Options, Subject};
use crate::graph::passes::ALL;
use crate::graph::region::Ranges;
use crate::graph::workspace::Workspace;
use crate::graph::Recorded;
use crate::memory::{MemoryManager, MemoryOptions};
use crate::operation::access::Extent;
use crate::operation::elementwise::{Elementwise, ElementwiseKind};
use crate::operation::embedding::Embedding;
use crate::operation::gated_activation::GatedActivation;
use crate::operation::layer_norm::LayerNorm;
use crate::operation::linear::{Linear, LinearTensors};
use crate::operation::matmul::Matmul;
use crate::operation::memory_copy::MemoryCopy;
use crate::operation::memory_fill::MemoryFill;
use crate::operation::rms_norm::RmsNorm;
use crate::operation::softmax::Softmax;
use crate::operation::{Activation, Operation, OperationKind};
use crate::stream::Stream;
use crate::tensor::{DType, Matrix, Tensor};
use crate::weight::WeightView;
use std::cell::RefCell;
use std::sync::Arc;

pub const ROWS: usize = 4;
pub const COLUMNS: usize = 8;
const ELEMENTS: usize = ROWS * COLUMNS;

thread_local! {
    /// Memory of the test's thread, which no test gives back.
    static NUMBERS: RefCell<u32> = const { RefCell::new(1) };
}

fn random(count: usize) -> &'static mut [f32] {
    let next = || {
        NUMBERS.with_borrow_mut(|state| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (*state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
    };
    (0..count).map(|_| next()).collect::<Vec<_>>().leak()
}

/// A matrix of a test.
#[derive(Clone, Copy)]
pub struct M(pub Matrix);

impl M {
    pub fn part(self, first: usize, count: usize) -> M {
        M(self.0.part(first, count))
    }

    /// The first half of its memory as BF16.
    pub fn bf16(self) -> M {
        M(Matrix { dtype: DType::Bf16, ..self.0 })
    }

    pub fn tensor(self) -> Tensor {
        let Matrix { data, dtype, rows, columns, row_stride } = self.0;
        Tensor::new(data, dtype, &[rows, columns]).with_strides(&[row_stride, 1])
    }
}

pub struct Case {
    executor: Arc<dyn Executor>,
    operations: Vec<Operation>,
    internal: Vec<std::ops::Range<usize>>,
    matrices: [M; 3],
}

pub fn kinds(optimized: &Optimized) -> Vec<OperationKind> {
    optimized.nodes.iter().map(|node| node.op.kind()).collect()
}

impl Case {
    pub fn new() -> Case {
        thread_local! {
            static MATRICES: [M; 3] = [0; 3].map(|_| {
                let data = random(ELEMENTS).as_mut_ptr().cast();
                M(Matrix { data, dtype: DType::F32, rows: ROWS, columns: COLUMNS, row_stride: COLUMNS })
            });
        }
        let executor: Arc<dyn Executor> = Arc::new(CpuExecutor::new(1).unwrap());
        let matrices = MATRICES.with(|matrices| *matrices);
        Case { executor, operations: Vec::new(), internal: Vec::new(), matrices }
    }

    /// The same three in all cases of a thread.
    pub fn matrices(&self) -> [M; 3] {
        self.matrices
    }

    pub fn weight(&self) -> WeightView {
        WeightView::float(random(COLUMNS * COLUMNS).as_mut_ptr().cast(), DType::F32, COLUMNS, COLUMNS, COLUMNS, false)
    }

    /// One row that serves for all.
    pub fn vector(&self) -> M {
        let data = random(COLUMNS).as_mut_ptr().cast();
        M(Matrix { data, dtype: DType::F32, rows: ROWS, columns: COLUMNS, row_stride: 0 })
    }

    pub fn internal(&mut self, matrix: M) -> &mut Case {
        self.internal.push(matrix.0.region().span());
        self
    }

    pub fn push(&mut self, op: impl Into<Operation>) -> &mut Case {
        let op = op.into();
        op.expect_apart().unwrap();
        self.operations.push(op);
        self
    }

    pub fn fill(&mut self, to: M, byte: u8) -> &mut Case {
        // SAFETY: a test's memory, which stays.
        self.push(unsafe { MemoryFill::new(to.0.data, byte, to.0.rows * to.0.columns * to.0.dtype.size()) })
    }

    pub fn copy(&mut self, from: M, to: M) -> &mut Case {
        let bytes = to.0.rows * to.0.columns * to.0.dtype.size();
        // SAFETY: a test's memory, which stays.
        self.push(unsafe { MemoryCopy::new(to.0.data, from.0.data, bytes, CopyKind::DeviceToDevice) })
    }

    pub fn softmax(&mut self, from: M, to: M) -> &mut Case {
        self.push(Softmax::new(from.tensor(), to.tensor(), 1.0).unwrap())
    }

    fn elementwise(&mut self, kind: ElementwiseKind, from: M, second: Option<M>, to: M) -> &mut Case {
        self.push(Elementwise::new(kind, from.tensor(), second.map(M::tensor), to.tensor()).unwrap())
    }

    pub fn add(&mut self, one: M, other: M, to: M) -> &mut Case {
        self.elementwise(ElementwiseKind::Add, one, Some(other), to)
    }

    pub fn scale(&mut self, from: M, factor: f32, to: M) -> &mut Case {
        self.elementwise(ElementwiseKind::Scale(factor), from, None, to)
    }

    pub fn convert(&mut self, from: M, to: M) -> &mut Case {
        self.elementwise(ElementwiseKind::Convert, from, None, to)
    }

    pub fn activation(&mut self, from: M, activation: Activation, to: M) -> &mut Case {
        self.elementwise(ElementwiseKind::Activation(activation), from, None, to)
    }

    pub fn linear(&mut self, from: M, weight: &WeightView, to: M) -> &mut Case {
        let tensors =
            LinearTensors { input: Some(from.tensor()), output: Some(to.tensor()), ..LinearTensors::default() };
        self.push(Linear::new(tensors, *weight, Activation::None).unwrap())
    }

    pub fn linear_with_residual(&mut self, from: M, weight: &WeightView, residual: M, to: M) -> &mut Case {
        let (input, residual, output) = (Some(from.tensor()), Some(residual.tensor()), Some(to.tensor()));
        let tensors = LinearTensors { input, residual, output, ..LinearTensors::default() };
        self.push(Linear::new(tensors, *weight, Activation::None).unwrap())
    }

    pub fn gated(&mut self, gate: M, up: M, to: M) -> &mut Case {
        let op = GatedActivation::new(gate.tensor(), up.tensor(), Activation::Silu, Some(to.tensor()), None);
        self.push(op.unwrap())
    }

    pub fn embedding(&mut self, table: &WeightView, scale: f32, to: M) -> &mut Case {
        let tokens: &'static mut [i32] = vec![1, 0, 3, 2].leak();
        let tokens = Tensor::new(tokens.as_mut_ptr().cast(), DType::I32, &[ROWS]);
        self.push(Embedding::new(tokens, *table, scale, to.tensor()).unwrap())
    }

    pub fn matmul(&mut self, from: M, alpha: f32, to: M) -> &mut Case {
        let other = Tensor::new(random(COLUMNS * COLUMNS).as_mut_ptr().cast(), DType::F32, &[COLUMNS, COLUMNS]);
        self.push(Matmul::new(from.tensor(), other, false, false, alpha, to.tensor()).unwrap())
    }

    fn rms_norm(&mut self, input: M, residual: Option<M>, sum: Option<M>, output: Option<M>) -> &mut Case {
        let weight = Tensor::new(random(COLUMNS).as_mut_ptr().cast(), DType::F32, &[COLUMNS]);
        let norm = RmsNorm {
            input: input.tensor(),
            post_weight: None,
            residual: residual.map(M::tensor),
            residual_output: sum.map(M::tensor),
            weight: Some(weight),
            output: output.map(M::tensor),
            quantized_output: None,
            epsilon: 1e-6,
            weight_offset: 1.0,
        };
        self.push(norm.validated().unwrap())
    }

    pub fn norm(&mut self, from: M, to: M) -> &mut Case {
        self.rms_norm(from, None, None, Some(to))
    }

    pub fn norm_with_sum(&mut self, from: M, residual: M, sum: M, to: M) -> &mut Case {
        self.rms_norm(from, Some(residual), Some(sum), Some(to))
    }

    pub fn sum_alone(&mut self, from: M, residual: M, sum: M) -> &mut Case {
        self.rms_norm(from, Some(residual), Some(sum), None)
    }

    pub fn layer_norm(&mut self, from: M, to: M) -> &mut Case {
        let norm = LayerNorm {
            input: from.tensor(),
            residual: None,
            residual_output: None,
            weight: None,
            bias: None,
            output: Some(to.tensor()),
            epsilon: 1e-5,
        };
        self.push(norm.validated().unwrap())
    }

    /// By the passes of these names, with commas between them, all of which may be as inexact as at O2.
    pub fn optimised(&self, passes: &str) -> Optimized {
        self.optimised_at(passes, 2)
    }

    pub fn optimised_at(&self, passes: &str, level: u32) -> Optimized {
        let operations = self.operations.iter().map(|op| (op.clone(), None)).collect();
        let recorded = Arc::new(Recorded::new(operations).unwrap());
        let internal = Ranges::of(self.internal.clone());
        let memory = MemoryManager::new(self.executor.clone(), MemoryOptions::default()).unwrap();
        let workspace = Workspace::new(&self.executor, &Arc::new(memory));
        let subject = Subject { recorded: &recorded, internal: &internal, workspace: &workspace, passes: ALL };
        let options = Options {
            enabled: passes.split(',').map(str::to_string).collect(),
            // No error of an approximate rewrite exceeds it.
            maximum_error: if level == 3 { 1e30 } else { 0.0 },
            ..Options::of(Level::from_code(level).unwrap())
        };
        let stream = Stream::new(&self.executor, 0).unwrap();
        subject.optimize(&options, &stream).unwrap()
    }

    pub fn fingerprint(&self) -> u64 {
        let operations = self.operations.iter().map(|op| (op.clone(), None)).collect();
        let recorded = Recorded::new(operations).unwrap();
        fingerprint::of(&recorded.nodes, &Ranges::of(self.internal.clone())).unwrap()
    }

    /// What the list leaves in the matrices, which then have again what they had.
    fn result(&self, operations: &[Operation]) -> Vec<Vec<f32>> {
        // SAFETY: memory of this thread, and no reference to it lives across the calls.
        let read = |matrix: &M| unsafe { std::slice::from_raw_parts(matrix.0.data.cast::<f32>(), ELEMENTS) }.to_vec();
        let before: Vec<_> = self.matrices.iter().map(read).collect();
        operations.iter().for_each(|op| self.executor.run(op, RawHandle::NULL).unwrap());
        let after = self.matrices.iter().map(read).collect();
        for (matrix, values) in self.matrices.iter().zip(before) {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), matrix.0.data.cast(), ELEMENTS) };
        }
        after
    }

    /// The values of matrices that are not internal, of the recorded list and of the optimised one.
    fn results(&self, passes: &str, level: u32) -> Vec<(Vec<f32>, Vec<f32>)> {
        let optimized: Vec<_> = self.optimised_at(passes, level).nodes.into_iter().map(|node| node.op).collect();
        let is_output = |matrix: &M| !self.internal.iter().any(|range| range.contains(&(matrix.0.data as usize)));
        let outputs = self.matrices.map(|matrix| is_output(&matrix));
        let pairs = self.result(&self.operations).into_iter().zip(self.result(&optimized));
        pairs.zip(outputs).filter(|(_, is_output)| *is_output).map(|(pair, _)| pair).collect()
    }

    /// The exact rewrites leave the very same bits.
    pub fn expect_equal(&self, passes: &str) {
        for (recorded, optimized) in self.results(passes, 1) {
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&recorded), bits(&optimized), "{recorded:?} became {optimized:?}");
        }
    }

    /// All rewrites leave nearly the same.
    pub fn expect_close(&self, passes: &str, bound: f32) {
        for (recorded, optimized) in self.results(passes, 3) {
            for (recorded, optimized) in recorded.iter().zip(&optimized) {
                let off = (recorded - optimized).abs();
                assert!(off <= bound * recorded.abs().max(1.0), "{recorded} became {optimized}");
            }
        }
    }
}
