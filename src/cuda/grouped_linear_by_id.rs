//! `grouped_linear` of many rows that name their experts: the rows are sorted by expert on the device and brought together,
//! multiplied as tokens that lie sorted are, and put back. No number comes to the host, so that a captured graph serves every
//! routing. Blocks of files become floats of the input's dtype for that, where no kernel takes them in the order of the experts.

use super::dequantize;
use super::grouped_linear::{family, family_of, launch, workspace_bytes, Params, PLAIN_FAMILY, SORTED_BLOCKS_FAMILY};
use super::linear_quantized::ordered_stride;
use super::prelude::*;
use crate::operation::grouped_linear::{GroupedLinear, Routing};
use crate::tensor::Tensor;
use crate::weight::{Encoding, WeightView};
use std::ptr::{null_mut, NonNull};

mirror! {
    /// `nvb_grouped_linear_sort_params` of csrc/grouped_linear/grouped_linear_sort.h.
    #[repr(C)]
    struct SortParams of(ids: &Tensor, experts: usize, order: *mut i32, expert_offsets: *mut i32) {
        expert_ids: *const c_void = ids.data,
        order: *mut i32,
        expert_offsets: *mut i32,
        rows: i64 = (ids.shape[0] * ids.shape[1]) as i64,
        used: i64 = ids.shape[1] as i64,
        token_stride: i64 = ids.strides[0] as i64,
        used_stride: i64 = ids.strides[1] as i64,
        experts: i32 = experts as i32,
        reserved: u32 = 0,
    }
}

mirror! {
    /// `nvb_grouped_linear_move_params` of csrc/grouped_linear/grouped_linear_sort.h.
    #[repr(C)]
    struct MoveParams of(input: &Matrix, output: &Matrix, order: *const i32, sorted_rows: *const i32) {
        input: *const c_void = input.data,
        output: *mut c_void = output.data,
        order: *const i32,
        sorted_rows: *const i32,
        rows: i64 = output.rows as i64,
        row_bytes: i64 = (input.columns * input.dtype.size()) as i64,
        input_stride: i64 = (input.row_stride * input.dtype.size()) as i64,
        output_stride: i64 = (output.row_stride * output.dtype.size()) as i64,
        used: i64 = (output.rows / input.rows) as i64,
        back: u32 = 0,
        reserved: u32 = 0,
    }
}

extern "C" {
    fn nvb_cuda_grouped_linear_sort(params: *const SortParams, launch: *const Launch) -> i32;
    fn nvb_cuda_grouped_linear_move(params: *const MoveParams, launch: *const Launch) -> i32;
}

/// `NVB_MOST_SORTED_EXPERTS` of csrc/grouped_linear/grouped_linear_sort.h.
const MOST_EXPERTS: usize = 1024;

/// From this number of rows on sorting pays: it and two moves of rows take some 15 µs, in which the kernels that go row by
/// row read experts of a usual size for 20 to 40 rows.
const LEAST_ROWS: usize = 32;

/// From this number of rows on blocks are multiplied in the order of their experts as they lie. 128 rows of 128 experts of 768 x
/// 2048 in Q4_K take 51 µs on an H200 then, with 8 for the order; row by row an estimate of 95, and 32 rows would take as long both ways.
const LEAST_ROWS_OF_BLOCKS: usize = 64;

/// Up to this number of rows for each expert, on the average, blocks are decoded in the product's kernel, which does it again
/// for each 64 rows: of those experts 4,096 rows take 124 µs and 8,192 202, where decoding to memory takes 77, the product of floats 120
/// to 190, and moving rows there and back some 10.
const MOST_ROWS_OF_AN_EXPERT: usize = 80;

/// From this number of rows for each expert, on the average, decoding all experts pays. An element of an expert is written in
/// 16 bits and read again, 4.6 bytes with its blocks' own at some 3.5 TB/s: 1.3 ps. Row by row it is read for each row,
/// 0.56 bytes of Q4_K at some 1.2 TB/s: 0.47 ps, less what L2 still has of another row. These are estimates for an H200.
const LEAST_ROWS_OF_AN_EXPERT: usize = 4;

/// The experts that are decoded at a time have up to this many bytes, or are one. Larger slices are more scratch, of which L2
/// keeps less for the product; smaller ones cost a launch and the end of a launch each, some 10 µs for 30 of reading.
const SLICE_BYTES: usize = 128 << 20;

/// Rows that are sorted and moved at a time, so that scratch has a bound; with so many the experts' decoding, which is done
/// for each part, is a small share of the work.
const MOST_ROWS: usize = 1 << 16;

/// How many rows are multiplied in the order of their experts.
pub(super) enum SortedPlan {
    /// Rows are moved, and kernels of sorted rows read the weight as it lies.
    Floats,
    /// Rows are moved, and the rows of so many experts at a time become floats.
    Decoded(usize),
    /// Rows are staged in this order for a kernel that decodes blocks itself and stores where rows belong.
    Blocks,
}

impl SortedPlan {
    /// `None` where rows are computed one by one: few of them, a dtype or weight that tensor cores do not take, or rows that
    /// must be the same to the bit in every batch, and so have one family of kernels. The context is current.
    pub fn of(executor: &CudaExecutor, op: &GroupedLinear) -> Option<SortedPlan> {
        let Routing::Ids(ids) = op.routing else { return None };
        let rows = op.output.rows;
        let is_many = rows >= LEAST_ROWS && ids.shape[1] <= MOST_ROWS;
        let is_half = matches!(op.input.dtype, DType::F16 | DType::Bf16);
        let is_empty = op.weight.rows == 0 || op.weight.columns == 0;
        if executor.batch_invariant || !is_many || !is_half || is_empty || op.experts > MOST_EXPERTS {
            return None;
        }
        // Scratch is aligned, which is what a kernel is chosen by.
        let sorted = Sorted { input: null_mut(), output: null_mut(), expert_offsets: null_mut() };
        let floats = sorted.product(op, rows);
        if family(executor, &floats) != PLAIN_FAMILY {
            return Some(SortedPlan::Floats);
        }
        if !matches!(op.weight.encoding, Encoding::Blocks(_)) {
            return None;
        }
        let stays_in_blocks = rows >= LEAST_ROWS_OF_BLOCKS
            && rows <= MOST_ROWS_OF_AN_EXPERT * op.experts
            && family_of(executor, &sorted.blocks(op, NonNull::dangling().as_ptr())) == SORTED_BLOCKS_FAMILY;
        if stays_in_blocks {
            return Some(SortedPlan::Blocks);
        }
        let is_worth_decoding = rows >= LEAST_ROWS_OF_AN_EXPERT * op.experts
            && family(executor, &decoded(&floats, 0, op.experts, null_mut())) != PLAIN_FAMILY;
        if !is_worth_decoding {
            return None;
        }
        let slices = (op.experts * expert_bytes(op)).div_ceil(SLICE_BYTES);
        Some(SortedPlan::Decoded(op.experts.div_ceil(slices)))
    }

    /// At most what `run` asks of the stream's scratch.
    pub fn workspace(&self, op: &GroupedLinear) -> Workspace {
        let rows = op.output.rows.min(most_rows(op));
        let lists = Workspace::none().with(WorkspaceUse::Kernel, list_bytes(op.experts, rows));
        let bytes = |matrix: &Matrix| rows * ordered_stride(matrix) * matrix.dtype.size();
        let moved = lists.with(WorkspaceUse::Input, bytes(&op.input)).with(WorkspaceUse::Product, bytes(&op.output));
        match *self {
            SortedPlan::Floats => moved,
            SortedPlan::Decoded(experts) => moved.with(WorkspaceUse::Weight, experts * expert_bytes(op)),
            SortedPlan::Blocks => {
                let part = part_of(op, 0, rows);
                lists.with(WorkspaceUse::Input, workspace_bytes(&Params::of(&part)))
            }
        }
    }

    pub fn run(&self, executor: &CudaExecutor, op: &GroupedLinear, stream: RawHandle) -> Result<()> {
        let workspace = self.workspace(op);
        let scratch = executor.scratch(stream);
        let mut scratch = scratch.lock(executor, stream, || workspace)?;
        let mut block = |usage| scratch.get(usage, workspace.of(usage));
        let sorted = Sorted {
            input: block(WorkspaceUse::Input)?,
            output: block(WorkspaceUse::Product)?,
            expert_offsets: block(WorkspaceUse::Kernel)?.cast(),
        };
        let weight = block(WorkspaceUse::Weight)?;
        let most = most_rows(op);
        for first in (0..op.output.rows).step_by(most) {
            let part = part_of(op, first, most.min(op.output.rows - first));
            self.run_part(executor, &part, (sorted, weight), stream)?;
        }
        Ok(())
    }

    fn run_part(
        &self,
        executor: &CudaExecutor,
        op: &GroupedLinear,
        (sorted, weight): (Sorted, *mut c_void),
        stream: RawHandle,
    ) -> Result<()> {
        let launch_on = executor.launch_on(stream);
        let (sorted_rows, order) = (sorted.expert_offsets.wrapping_add(op.experts), sorted.order(op));
        let sort = SortParams::of(op.routing.tensor(), op.experts, order, sorted.expert_offsets);
        // SAFETY: the descriptor was validated, the lists have room for its rows and experts, and the context is current.
        executor.check_launch(unsafe { nvb_cuda_grouped_linear_sort(&sort, &launch_on) }, "sorting rows by expert")?;
        if let SortedPlan::Blocks = self {
            return launch(executor, &sorted.blocks(op, order), stream);
        }
        let product = sorted.product(op, op.output.rows);
        let gather = MoveParams::of(&op.input, &product.input, order, sorted_rows);
        // SAFETY: as above; the order has rows of the output, and the block room for as many of the input.
        executor.check_launch(unsafe { nvb_cuda_grouped_linear_move(&gather, &launch_on) }, "gathering rows")?;
        if let SortedPlan::Decoded(experts) = *self {
            for first in (0..op.experts).step_by(experts) {
                let count = experts.min(op.experts - first);
                let rows = first * op.expert_rows()..(first + count) * op.expert_rows();
                // SAFETY: the rows are the weight's, and the block holds so many experts.
                unsafe { dequantize::rows(executor, &op.weight, &rows, (weight, op.input.dtype), stream)? };
                let mut params = Params::of(&decoded(&product, first, count, weight));
                params.all_experts = op.experts as i32;
                launch(executor, &params, stream)?;
            }
        } else {
            launch(executor, &Params::of(&product), stream)?;
        }
        let back = MoveParams { back: 1, ..MoveParams::of(&product.output, &op.output, order, sorted_rows) };
        // SAFETY: as above; the rows that are put back were written by the products.
        executor.check_launch(unsafe { nvb_cuda_grouped_linear_move(&back, &launch_on) }, "putting rows back")
    }
}

/// Where rows in the order of their experts lie.
#[derive(Clone, Copy)]
struct Sorted {
    input: *mut c_void,
    output: *mut c_void,
    /// Behind them lies the order.
    expert_offsets: *mut i32,
}

impl Sorted {
    fn order(&self, op: &GroupedLinear) -> *mut i32 {
        self.expert_offsets.wrapping_add(op.experts + 1)
    }

    /// The same product of `rows` rows in the order of their experts.
    fn product(&self, op: &GroupedLinear, rows: usize) -> GroupedLinear {
        let in_order = |matrix: &Matrix, data| Matrix { data, rows, row_stride: ordered_stride(matrix), ..*matrix };
        let expert_offsets = Tensor::new(self.expert_offsets.cast(), DType::I32, &[op.experts + 1]);
        GroupedLinear {
            input: in_order(&op.input, self.input),
            output: in_order(&op.output, self.output),
            routing: Routing::Offsets(expert_offsets),
            ..*op
        }
    }

    /// The same product of rows that stay where they are, by their order; `input` is its workspace.
    fn blocks(&self, op: &GroupedLinear, order: *mut i32) -> Params {
        let used = op.routing.tensor().shape[1] as i64;
        let expert_offsets = Tensor::new(self.expert_offsets.cast(), DType::I32, &[op.experts + 1]);
        let mut params = Params::of(&GroupedLinear { routing: Routing::Offsets(expert_offsets), ..*op });
        (params.order, params.used, params.workspace) = (order, used, self.input);
        params
    }
}

/// Of a product of sorted rows that of `count` experts from `first` on, with their weights as floats in `data`.
fn decoded(product: &GroupedLinear, first: usize, count: usize, data: *mut c_void) -> GroupedLinear {
    let (columns, rows) = (product.weight.columns, product.expert_rows());
    let from = |tensor: &Tensor, elements: usize, extent: usize| {
        let data = tensor.data.wrapping_byte_add(elements * tensor.dtype.size());
        Tensor::new(data, tensor.dtype, &[extent])
    };
    GroupedLinear {
        weight: WeightView::float(data, product.input.dtype, count * rows, columns, columns, product.weight.gated),
        experts: count,
        routing: Routing::Offsets(from(product.routing.tensor(), first, count + 1)),
        bias: product.bias.map(|bias| from(&bias, first * rows, count * rows)),
        ..*product
    }
}

/// `rows` rows of the output from `first` on, which are those of whole tokens.
fn part_of(op: &GroupedLinear, first: usize, rows: usize) -> GroupedLinear {
    let (ids, sharing) = (op.routing.tensor(), op.output.rows / op.input.rows);
    let used = ids.shape[1];
    let mut part = *ids;
    part.data = ids.data.wrapping_byte_add(first / used * ids.strides[0] * ids.dtype.size());
    part.shape[0] = rows / used;
    GroupedLinear {
        input: op.input.part(first / sharing, rows / sharing),
        output: op.output.part(first, rows),
        routing: Routing::Ids(part),
        ..*op
    }
}

/// Those of as many whole tokens as `MOST_ROWS` has.
fn most_rows(op: &GroupedLinear) -> usize {
    let used = op.routing.tensor().shape[1];
    MOST_ROWS / used * used
}

/// Of an expert's weight as floats.
fn expert_bytes(op: &GroupedLinear) -> usize {
    op.expert_rows() * op.weight.columns * op.input.dtype.size()
}

/// Of the experts' offsets, and the order behind them.
fn list_bytes(experts: usize, rows: usize) -> usize {
    (experts + 1 + rows) * size_of::<i32>()
}
