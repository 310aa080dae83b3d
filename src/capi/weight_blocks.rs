//! Weights from the quantised formats of files: the matrices as the files have them.

use super::prelude::*;
use super::weight::granularity_of;
use crate::loading::PartRows;
use crate::tensor::DType;
use crate::weight::awq::awq;
use crate::weight::byte_rows::ByteRows;
use crate::weight::gguf::GgufRows;
use crate::weight::gptq::{gptq, GptqTensors, GptqVersion};
use crate::weight::grouped::FloatBytes;
use crate::weight::rows::{expect_bytes, RowSource};
use crate::weight::sfp::{I8Rows, SfpRows};
use crate::weight::{BlockFormat, Encoding};

/// `nvb_weight_desc.source_format`: float tensors, in `parts`.
pub const NVB_SOURCE_FORMAT_TENSOR: u32 = 0;
/// GGUF: blocks of 32 in 18 bytes. Kept exactly (INT4, groups of 32).
pub const NVB_SOURCE_FORMAT_GGUF_Q4_0: u32 = 1;
/// GGUF: blocks of 256 in 144 bytes. Quantised values kept, scales and minima rounded to f16 (INT4 with zero points,
/// groups of 32).
pub const NVB_SOURCE_FORMAT_GGUF_Q4_K: u32 = 2;
/// GGUF: blocks of 32 in 34 bytes. Kept exactly (INT8, groups of 32).
pub const NVB_SOURCE_FORMAT_GGUF_Q8_0: u32 = 3;
/// AutoAWQ's GEMM layout, 4 bits: `data` qweight i32 [K][N / 8], `zeros` qzeros i32 [K / group][N / 8] (NULL: all 8), `scales`
/// [K / group][N]. Quantised values kept (INT4); zero points −scale · zero rounded to f16 unless all zeros are 8.
pub const NVB_SOURCE_FORMAT_AWQ: u32 = 4;
/// GPTQ, 4 bits: `data` qweight i32 [K / 8][N], `zeros` qzeros i32 [groups][N / 8] (NULL: all 8), `scales` [groups][N], `order`
/// g_idx i32 [K] (NULL: in order). Quantised values kept as for AWQ; columns that g_idx reorders are sorted by group,
/// and products permute their input.
pub const NVB_SOURCE_FORMAT_GPTQ: u32 = 5;
/// gemma.cpp's switching floating point, a byte an element, and a scale. Kept exactly (SFP, a scale for each part).
pub const NVB_SOURCE_FORMAT_SFP: u32 = 6;
/// gemma.cpp's I8: groups of 128 elements in 132 bytes. Quantised values kept where all zeros are 0 and K is a multiple
/// of 128 (INT8, groups of 128), else quantised again.
pub const NVB_SOURCE_FORMAT_I8: u32 = 7;
/// GGUF: blocks of 256 in 210 bytes. Quantised again (INT8, groups of 32).
pub const NVB_SOURCE_FORMAT_GGUF_Q6_K: u32 = 8;
/// FP8 E4M3 values [N, K] of finite values, with scales that multiply them.
pub const NVB_SOURCE_FORMAT_FP8_E4M3: u32 = 9;
/// FP8 E5M2 values [N, K] of finite values, with scales that multiply them.
pub const NVB_SOURCE_FORMAT_FP8_E5M2: u32 = 10;
/// Signed 8-bit values [N, K] with scales that multiply them.
pub const NVB_SOURCE_FORMAT_INT8: u32 = 11;

/// GGUF: blocks of 32 in 20 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q4_1: u32 = 12;
/// GGUF: blocks of 32 in 22 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q5_0: u32 = 13;
/// GGUF: blocks of 32 in 24 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q5_1: u32 = 14;
/// GGUF: blocks of 256 in 84 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q2_K: u32 = 15;
/// GGUF: blocks of 256 in 110 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q3_K: u32 = 16;
/// GGUF: blocks of 256 in 176 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_Q5_K: u32 = 17;
/// GGUF: blocks of 32 in 18 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_IQ4_NL: u32 = 18;
/// GGUF: blocks of 256 in 136 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_IQ4_XS: u32 = 19;
/// GGUF: blocks of 32 in 17 bytes. Quantised again (INT8, groups of 32), unless kept as blocks.
pub const NVB_SOURCE_FORMAT_GGUF_MXFP4: u32 = 20;

/// The numbers of GGUF's blocks.
const BLOCK_FORMATS: &[(u32, BlockFormat)] = &[
    (NVB_SOURCE_FORMAT_GGUF_Q4_0, BlockFormat::Q4_0),
    (NVB_SOURCE_FORMAT_GGUF_Q4_1, BlockFormat::Q4_1),
    (NVB_SOURCE_FORMAT_GGUF_Q5_0, BlockFormat::Q5_0),
    (NVB_SOURCE_FORMAT_GGUF_Q5_1, BlockFormat::Q5_1),
    (NVB_SOURCE_FORMAT_GGUF_Q8_0, BlockFormat::Q8_0),
    (NVB_SOURCE_FORMAT_GGUF_Q2_K, BlockFormat::Q2K),
    (NVB_SOURCE_FORMAT_GGUF_Q3_K, BlockFormat::Q3K),
    (NVB_SOURCE_FORMAT_GGUF_Q4_K, BlockFormat::Q4K),
    (NVB_SOURCE_FORMAT_GGUF_Q5_K, BlockFormat::Q5K),
    (NVB_SOURCE_FORMAT_GGUF_Q6_K, BlockFormat::Q6K),
    (NVB_SOURCE_FORMAT_GGUF_IQ4_NL, BlockFormat::Iq4Nl),
    (NVB_SOURCE_FORMAT_GGUF_IQ4_XS, BlockFormat::Iq4Xs),
    (NVB_SOURCE_FORMAT_GGUF_MXFP4, BlockFormat::Mxfp4),
];

/// The block format of a `NVB_SOURCE_FORMAT_…`.
pub(super) fn block_format_of(source_format: u32) -> Option<BlockFormat> {
    BLOCK_FORMATS.iter().find(|(code, _)| *code == source_format).map(|(_, format)| *format)
}

/// The `NVB_SOURCE_FORMAT_…` of a block format.
pub(super) fn source_format_of(format: BlockFormat) -> u32 {
    BLOCK_FORMATS.iter().find(|(_, known)| *known == format).map_or(0, |(code, _)| *code)
}

/// A matrix [N, K] in the format of a file: host memory (such as a mapped file) of any alignment, little-endian, read before
/// the call returns. Sizes are checked, and so is every scale, before a weight exists. Zero what a format has not. For
/// `NVB_WEIGHT_FORMAT_BLOCKS` and `NVB_SOURCE_IN_PLACE` it is memory as `nvb_weight_desc.source` says, whose sizes are checked, and
/// of the latter the scales.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvb_weight_blocks {
    pub data: *const c_void,
    /// The size of `data`; the other sizes are those of the memory in front of them. What exceeds the matrix is not
    /// read.
    pub bytes: usize,
    /// N
    pub rows: i64,
    /// K
    pub columns: i64,
    /// SFP, FP8, INT8 and blocks that are kept: elements from one row to the next, of blocks a whole number; 0: K.
    pub row_stride: i64,
    /// AWQ, GPTQ, FP8, INT8. Of the latter two [1], [N], [N][⌈K / group⌉] or [⌈N / 128⌉][⌈K / 128⌉], as `granularity` says;
    /// such that scale · q is never more than an f32 holds. Those of groups are kept as f16, which must hold them: of
    /// AWQ and GPTQ their products with the zeros too, unless all zeros are 8.
    pub scales: *const c_void,
    pub scale_bytes: usize,
    /// AWQ, GPTQ
    pub zeros: *const c_void,
    pub zero_bytes: usize,
    /// GPTQ's g_idx
    pub order: *const c_void,
    pub order_bytes: usize,
    /// The dtype of `scales`, `NVB_DTYPE_…`; 0: F16 for AWQ and GPTQ, F32 for FP8 and INT8.
    pub scale_dtype: u32,
    /// AWQ, GPTQ: elements of K with a scale, a multiple of 32; 0: all of K. INT8 in groups: 32, 64 or 128.
    pub group_size: u32,
    /// FP8, INT8: how far a scale reaches, `NVB_GRANULARITY_…`
    pub granularity: u32,
    /// GPTQ: 1 if `zeros` are stored less one, 2 if not, 0: find out. Zeros that are all 7 or all 8 are symmetric whatever
    /// this says.
    pub version: u32,
    /// `NVB_SOURCE_FORMAT_…` of this matrix where it is not the desc's; 0: the desc's.
    pub source_format: u32,
    /// SFP: the tensor's scale; 0: 1. The largest value, 1.875 times it, must be finite.
    pub scale: f32,
    /// 0
    pub reserved: [u64; 4],
}

fn extent(name: &str, value: i64) -> Result<usize> {
    let extent = usize::try_from(value).ok().filter(|&extent| extent > 0 && extent <= i32::MAX as usize);
    extent.ok_or_else(|| Error::invalid(format!("{name} is {value}; 1 to {} is needed", i32::MAX)))
}

/// A matrix of blocks that are kept as they are, whose memory is not looked at: its format, columns and rows. `format` is that
/// of the desc.
pub(super) fn kept_blocks_of(blocks: &nvb_weight_blocks, format: u32) -> Result<(BlockFormat, usize, PartRows)> {
    let code = if blocks.source_format == 0 { format } else { blocks.source_format };
    let format = block_format_of(code)
        .ok_or_else(|| Error::invalid(format!("source_format is {code}; GGUF's blocks alone are kept as they are")))?;
    if blocks.reserved != [0; 4] {
        return Err(Error::invalid("`reserved` is not 0"));
    }
    let (rows, columns) = (extent("rows", blocks.rows)?, extent("columns", blocks.columns)?);
    let stride = if blocks.row_stride == 0 { columns } else { extent("row_stride", blocks.row_stride)? };
    let elements = format.elements();
    if !columns.is_multiple_of(elements) || !stride.is_multiple_of(elements) || stride < columns {
        return Err(Error::invalid(format!(
            "{format} of {columns} columns, {stride} from row to row: multiples of {elements} are needed, and rows that do not \
             overlap"
        )));
    }
    let (row_bytes, pitch) = (format.bytes(columns), format.bytes(stride));
    let needed = pitch.checked_mul(rows - 1).and_then(|before| before.checked_add(row_bytes));
    expect_bytes(format.name(), blocks.bytes, needed, rows, columns)?;
    if blocks.data.is_null() {
        return Err(Error::invalid("`data` is NULL"));
    }
    Ok((format, columns, PartRows { data: blocks.data.cast(), rows, row_bytes, pitch }))
}

/// # Safety
/// The pointers are NULL or readable for the sizes beside them, for as long as the source is used.
pub(super) unsafe fn source_of(blocks: &nvb_weight_blocks, format: u32) -> Result<Box<dyn RowSource + '_>> {
    if blocks.reserved != [0; 4] {
        return Err(Error::invalid("`reserved` is not 0"));
    }
    let (rows, columns) = (extent("rows", blocks.rows)?, extent("columns", blocks.columns)?);
    // SAFETY: the caller's contract.
    let (data, scales, zeros, order) = unsafe {
        (
            slice("data", blocks.data.cast::<u8>(), blocks.bytes)?,
            slice("scales", blocks.scales.cast::<u8>(), blocks.scale_bytes)?,
            slice("zeros", blocks.zeros.cast::<u8>(), blocks.zero_bytes)?,
            slice("order", blocks.order.cast::<u8>(), blocks.order_bytes)?,
        )
    };
    let given = |pointer: *const c_void, bytes| (!pointer.is_null()).then_some(bytes);
    let floats = |default: DType| match blocks.scale_dtype {
        0 => Ok(FloatBytes { bytes: scales, dtype: default }),
        code => match DType::from_code(code).filter(|dtype| dtype.is_float()) {
            Some(dtype) => Ok(FloatBytes { bytes: scales, dtype }),
            None => Err(Error::invalid(format!("scale_dtype is {code}; a float NVB_DTYPE_… (1 to 3) is needed"))),
        },
    };
    let row_stride = || match blocks.row_stride {
        0 => Ok(columns),
        stride => extent("row_stride", stride),
    };
    let (zeros, order) = (given(blocks.zeros, zeros), given(blocks.order, order));
    let group_size = blocks.group_size as usize;
    let format = if blocks.source_format == 0 { format } else { blocks.source_format };
    let byte_rows = |encoding| -> Result<Box<dyn RowSource + '_>> {
        let granularity = granularity_of(encoding, blocks.granularity, blocks.group_size)?;
        let scales = floats(DType::F32)?;
        Ok(Box::new(ByteRows::new(encoding, granularity, rows, columns, row_stride()?, data, scales)?))
    };
    match format {
        NVB_SOURCE_FORMAT_AWQ => Ok(Box::new(awq(rows, columns, group_size, data, zeros, floats(DType::F16)?)?)),
        NVB_SOURCE_FORMAT_GPTQ => {
            let version = match blocks.version {
                0 => GptqVersion::Inspect,
                1 => GptqVersion::V1,
                2 => GptqVersion::V2,
                other => return Err(Error::invalid(format!("version is {other}; 0, 1 or 2 is needed"))),
            };
            let scales = floats(DType::F16)?;
            let (weights, group_index) = (data, order);
            Ok(Box::new(gptq(GptqTensors { rows, columns, group_size, weights, zeros, scales, group_index, version })?))
        }
        NVB_SOURCE_FORMAT_SFP => {
            let scale = if blocks.scale == 0.0 { 1.0 } else { blocks.scale };
            Ok(Box::new(SfpRows::new(rows, columns, row_stride()?, data, scale)?))
        }
        NVB_SOURCE_FORMAT_I8 => Ok(Box::new(I8Rows::new(rows, columns, data)?)),
        NVB_SOURCE_FORMAT_FP8_E4M3 => byte_rows(Encoding::Fp8E4m3),
        NVB_SOURCE_FORMAT_FP8_E5M2 => byte_rows(Encoding::Fp8E5m2),
        NVB_SOURCE_FORMAT_INT8 => byte_rows(Encoding::Int8),
        other => match block_format_of(other) {
            Some(kind) => Ok(Box::new(GgufRows::new(kind, rows, columns, data)?)),
            None => Err(Error::invalid(format!("source_format is {other}; NVB_SOURCE_FORMAT_… (1 to 20) is needed"))),
        },
    }
}
