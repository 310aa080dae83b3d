//! Rows of a file's blocks as plain tensors.

use super::backend::arguments;
use super::prelude::*;
use super::tensor::{nvb_tensor, optional_strided_device_tensor, strided_device_tensor};
use super::weight_blocks::block_format_of;
use crate::operation::block_rows::{BlockRows, BlockTensor, Direction};

/// `direction`: blocks become floats.
pub const NVB_BLOCKS_DECODE: u32 = 0;
/// `direction`: floats become blocks, of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or IQ4_NL.
pub const NVB_BLOCKS_ENCODE: u32 = 1;

/// Rows of GGUF's blocks over one to four axes, in device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvb_block_tensor {
    pub data: *mut c_void,
    /// `NVB_SOURCE_FORMAT_GGUF_…`
    pub source_format: u32,
    /// 1 to 4
    pub rank: u32,
    /// Outermost first; the last in elements, a whole number of blocks.
    pub shape: [i64; 4],
    /// In bytes; all 0: contiguous. The last is not looked at: the blocks of a row follow one another.
    pub strides: [i64; 4],
}

/// Decode: floats[.., t] = blocks[.., rows[.., t]]. Encode: blocks[.., rows[.., t]] = floats[.., t]. Without `rows` row t meets row t.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_block_rows_args {
    pub struct_size: usize,
    /// [.., T, width], any float dtype, any strides.
    pub floats: nvb_tensor,
    /// [.., R, width] with the extents of `floats` in front; without `rows` R is T.
    pub blocks: nvb_block_tensor,
    /// Optional, I32 [.., T] in device memory, any strides: the low halves of 64-bit numbers are a tensor with a stride of 2. An
    /// extent in front that divides that of `floats` repeats. A row whose number is none of the blocks' is left out on CUDA, and
    /// an error on the CPU.
    pub rows: nvb_tensor,
    /// `NVB_BLOCKS_…`
    pub direction: u32,
    /// Must be 0.
    pub reserved: u32,
}
versioned!(nvb_block_rows_args);

fn block_tensor(backend: &Backend, tensor: &nvb_block_tensor) -> Result<BlockTensor> {
    let format = block_format_of(tensor.source_format).ok_or_else(|| {
        Error::invalid(format!("`blocks` have the format {}; NVB_SOURCE_FORMAT_GGUF_… is needed", tensor.source_format))
    })?;
    let rank = tensor.rank as usize;
    if rank == 0 || rank > 4 {
        return Err(Error::invalid(format!("`blocks` have rank {rank}; 1 to 4 is needed")));
    }
    let extent = |what: &str, value: i64| {
        usize::try_from(value).map_err(|_| Error::invalid(format!("`blocks` have a {what} of {value}")))
    };
    let overflow = || Error::invalid(format!("the size of `blocks` {:?} overflows", &tensor.shape[..rank]));
    let (mut shape, mut strides) = ([1usize; 4], [0usize; 4]);
    for (to, &from) in shape[4 - rank..].iter_mut().zip(&tensor.shape[..rank]) {
        *to = extent("shape", from)?;
    }
    if !shape[3].is_multiple_of(format.elements()) {
        return Err(Error::invalid(format!(
            "rows of {} elements in {format}; a multiple of {} is needed",
            shape[3],
            format.elements()
        )));
    }
    let is_contiguous = tensor.strides[..rank].iter().all(|&stride| stride == 0);
    let mut next = format.bytes(shape[3]);
    for axis in (0..3).rev() {
        let given = (axis + rank).checked_sub(4).map_or(0, |at| tensor.strides[at]);
        strides[axis] = if is_contiguous { next } else { extent("stride", given)? };
        next =
            next.checked_mul(shape[axis].max(1)).filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(overflow)?;
    }
    let mut span = format.bytes(shape[3]);
    for axis in 0..3 {
        let reach = shape[axis].saturating_sub(1).checked_mul(strides[axis]);
        span = reach.and_then(|reach| span.checked_add(reach)).ok_or_else(overflow)?;
    }
    if span > isize::MAX as usize {
        return Err(overflow());
    }
    let [outer, inner, rows, _] = strides;
    let found = BlockTensor { data: tensor.data, format, shape, strides: [outer, inner, rows] };
    if found.span_bytes() > 0 && tensor.data.is_null() {
        return Err(Error::invalid("`blocks` have no memory"));
    }
    backend.check_range(
        || format!("`blocks` {:?} of {format}", &tensor.shape[..rank]),
        tensor.data,
        found.span_bytes(),
    )?;
    Ok(found)
}

/// Queues a conversion of rows of blocks to floats, or of floats to blocks: values are those of the format's definition, in f32
/// and rounded once to the dtype; what is encoded has the scales and roundings of ggml's reference. Does not allocate or
/// synchronise; may be captured: the numbers are read when the work runs.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT`; `NVB_ERROR_UNSUPPORTED` for a format that floats are not made into.
#[no_mangle]
pub unsafe extern "C" fn nvb_block_rows(
    backend: *const nvb_backend,
    args: *const nvb_block_rows_args,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_block_rows, {
        arguments!(backend, args, stream);
        expect_reserved(args.reserved)?;
        let direction = match args.direction {
            NVB_BLOCKS_DECODE => Direction::Decode,
            NVB_BLOCKS_ENCODE => Direction::Encode,
            other => return Err(Error::invalid(format!("direction is {other}; NVB_BLOCKS_… (0 or 1) is needed"))),
        };
        let floats = strided_device_tensor(&backend, "floats", &args.floats)?;
        let blocks = block_tensor(&backend, &args.blocks)?;
        let rows = optional_strided_device_tensor(&backend, "rows", &args.rows)?;
        backend.queue(BlockRows::new(direction, floats, blocks, rows)?, &stream)
    })
}
