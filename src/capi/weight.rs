//! Weights: matrices in the layout that products read.

use super::prelude::*;
use super::tensor::{convert, device_tensor, nvb_tensor};
use super::weight_blocks::{
    block_format_of, kept_blocks_of, nvb_weight_blocks, source_format_of, source_of, NVB_SOURCE_FORMAT_TENSOR,
};
use crate::allocation::{collected, with_room};
use crate::loading::{Source, Weight};
use crate::memory::expect_awake;
use crate::tensor::DType;
use crate::weight::rows::RowSource;
use crate::weight::{Arrangement, Encoding, Format, Granularity, WeightView};
use std::sync::atomic::{AtomicBool, Ordering};

/// A matrix [N, K] of a model, or several, one below the other or with alternating rows, in the device's layout.
///
/// Threads: calls that take `const nvb_weight *` may run at once from many threads.
pub struct nvb_weight {
    _private: [u8; 0],
}

/// `nvb_weight_desc.arrangement`: the parts stand one below the other, as Q, K and V of one product.
pub const NVB_WEIGHT_STACKED: u32 = 0;
/// `nvb_weight_desc.arrangement`: two parts of one shape, gate and up, whose rows alternate in the weight (row 0 of gate, row
/// 0 of up, row 1 of gate, …); products with it are gated (GeGLU, SwiGLU).
pub const NVB_WEIGHT_GATED: u32 = 1;
/// `nvb_weight_desc.source`: the parts are host memory, copied before the call returns.
pub const NVB_SOURCE_HOST: u32 = 0;
/// `nvb_weight_desc.source`: the parts are device memory, copied before the call returns.
pub const NVB_SOURCE_DEVICE: u32 = 1;
/// `nvb_weight_desc.source`: the one part is device memory (on the CPU: any memory, such as a mapped file) that is read
/// in place and outlives the weight.
pub const NVB_SOURCE_BORROWED: u32 = 2;
/// `nvb_weight_desc.source`: the one part is Q4_0, Q4_1 or Q8_0 in device memory, 16-byte aligned and without gaps, rows a
/// multiple of 16 and columns of 64, and becomes INT4, INT4 with zero points or INT8 in its place: the same bytes in the order
/// that products read fastest, from which `nvb_weight_restore_blocks` makes the very bits again. `format` is
/// `NVB_WEIGHT_FORMAT_AS_IS`. The memory outlives the weight, and the caller neither reads nor writes it until the blocks were
/// put back; a weight that is destroyed before leaves it packed. On an error, such as a scale that is not finite or no memory
/// for a copy meanwhile, the blocks are as they were.
pub const NVB_SOURCE_IN_PLACE: u32 = 3;

/// `nvb_weight_desc.format`: as the parts have it: floats as they are, quantised values in the format that keeps them
/// (Q4_0, AWQ, GPTQ: INT4; Q4_K: INT4 with zero points, its scales rounded to f16; Q8_0: INT8; SFP: SFP).
pub const NVB_WEIGHT_FORMAT_AS_IS: u32 = 0;
/// bfloat16.
pub const NVB_WEIGHT_FORMAT_BF16: u32 = 1;
/// IEEE 754 binary16.
pub const NVB_WEIGHT_FORMAT_F16: u32 = 2;
/// 8-bit floats, 3 bits of mantissa, no infinities, largest value 448, times f32 scales.
pub const NVB_WEIGHT_FORMAT_FP8_E4M3: u32 = 3;
/// 8-bit floats, 2 bits of mantissa, largest value 57344, times f32 scales.
pub const NVB_WEIGHT_FORMAT_FP8_E5M2: u32 = 4;
/// scale · q, q in −127 … 127; f32 scales for rows, f16 for groups.
pub const NVB_WEIGHT_FORMAT_INT8: u32 = 5;
/// scale · (q − 8), q in 0 … 15, or scale · q + zero point; f16 scales and zero points.
pub const NVB_WEIGHT_FORMAT_INT4: u32 = 6;
/// IEEE 754 binary32.
pub const NVB_WEIGHT_FORMAT_F32: u32 = 7;

/// The blocks of GGUF as the file has them, bit for bit (Q4_0 to Q6_K, IQ4_NL, IQ4_XS, MXFP4: `source_format`): 4.5 bits an element
/// for Q4_K. From host or device memory, or `NVB_SOURCE_BORROWED` in memory that the caller has laid them into. Products of up to
/// 16 rows on a GPU of compute capability 8.0 or newer round an input to multiples of 2⁻²² of the power of two above the largest of
/// each 256 elements.
pub const NVB_WEIGHT_FORMAT_BLOCKS: u32 = 8;
/// gemma.cpp's switching floating point in a byte, largest value 1.875, times f32 scales of tensors or rows: what SFP has,
/// bit for bit. Products read it; with F16 activations, on a GPU, by its plain kernel or as floats.
pub const NVB_WEIGHT_FORMAT_SFP: u32 = 9;

/// `granularity`: groups if `group_size` is given; else rows for FP8 and INT8, groups of 32 for INT4.
pub const NVB_GRANULARITY_DEFAULT: u32 = 0;
/// `granularity`: one scale for each part.
pub const NVB_GRANULARITY_TENSOR: u32 = 1;
/// `granularity`: one scale for each row (output channel).
pub const NVB_GRANULARITY_ROWS: u32 = 2;
/// `granularity`: one scale for `group_size` neighbouring elements of a row (INT8, INT4).
pub const NVB_GRANULARITY_GROUPS: u32 = 3;
/// `granularity`: one scale for a block of 128 × 128 (FP8).
pub const NVB_GRANULARITY_BLOCKS: u32 = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_weight_desc {
    pub struct_size: usize,
    /// `part_count` tensors [Nᵢ, K] of one float dtype, not empty, at most 65,536. NULL with another `source_format`.
    pub parts: *const nvb_tensor,
    pub part_count: usize,
    /// `NVB_WEIGHT_…`
    pub arrangement: u32,
    /// `NVB_SOURCE_…`
    pub source: u32,
    /// What the weight is kept in, `NVB_WEIGHT_FORMAT_…`. Floats are rounded to the nearest quantised value, ties to
    /// even.
    pub format: u32,
    /// How far a scale of `format` reaches, `NVB_GRANULARITY_…`
    pub granularity: u32,
    /// 32, 64 or 128 for groups; 0: 32.
    pub group_size: u32,
    /// 1: a zero point beside each scale, so that a group spans its smallest to its largest value (INT4).
    pub zero_points: u32,
    /// 1: searches for the scale, and the zero point, with the smallest squared error: ranges narrower and wider than
    /// that of the values, each with the least-squares fit to its quantised values (INT8, INT4). Takes up to ten times
    /// as long; on CUDA the host does it for INT8, and the GPU for INT4.
    pub clipping: u32,
    /// What the parts are, `NVB_SOURCE_FORMAT_…`
    pub source_format: u32,
    /// `part_count` matrices in place of `parts`, unless `source_format` is `NVB_SOURCE_FORMAT_TENSOR`. The array is host
    /// memory; so are the matrices, but where `format` or `source` says otherwise.
    pub blocks: *const nvb_weight_blocks,
}
versioned!(nvb_weight_desc { parts, blocks });

#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_weight_info {
    pub struct_size: usize,
    /// N, of all parts together.
    pub rows: u64,
    /// K
    pub columns: u64,
    /// Columns of a product with this weight: N, or N / 2 if gated.
    pub output_columns: u64,
    /// Device memory that the weight owns; 0 if borrowed.
    pub bytes: u64,
    /// `NVB_DTYPE_…`; 0 if quantised.
    pub dtype: u32,
    /// 1 if gated.
    pub gated: u32,
    /// What the weight is kept in, `NVB_WEIGHT_FORMAT_…`: that of `nvb_weight_desc.format`, or what
    /// `NVB_WEIGHT_FORMAT_AS_IS` came to. Never 0.
    pub encoding: u32,
    /// `NVB_GRANULARITY_…`; 0 for floats and for blocks.
    pub granularity: u32,
    /// Elements of a row that share a scale in memory; 0: all of them. INT4 stores the scale of a row for each 128 elements.
    pub group_size: u32,
    /// 1 if zero points stand beside the scales.
    pub zero_points: u32,
    /// Bytes of scales and zero points, within `bytes`.
    pub scale_bytes: u64,
    /// ‖weight − source‖ / ‖source‖ of what the parts' values were turned into; 0 where nothing was lost.
    pub relative_error: f64,
    /// `NVB_SOURCE_FORMAT_GGUF_…` of a weight of `NVB_WEIGHT_FORMAT_BLOCKS`, or made by `NVB_SOURCE_IN_PLACE`; else 0.
    pub source_format: u32,
    /// 0
    pub reserved: u32,
}
versioned!(nvb_weight_info);

pub struct WeightObject {
    pub weight: Weight,
    pub backend: Arc<Backend>,
    /// Whose memory a slice reads.
    parent: Option<Arc<WeightObject>>,
    /// Whether the blocks were put back.
    restored: AtomicBool,
}

impl WeightObject {
    fn new(weight: Weight, backend: Arc<Backend>, parent: Option<Arc<WeightObject>>) -> WeightObject {
        WeightObject { weight, backend, parent, restored: AtomicBool::new(false) }
    }

    /// Refuses a weight whose memory is its caller's blocks again.
    fn expect_whole(&self) -> Result<()> {
        let restored = self.restored.load(Ordering::Acquire);
        match &self.parent {
            _ if restored => Err(Error::invalid("the weight's blocks were put back; create it anew")),
            Some(parent) => parent.expect_whole(),
            None => Ok(()),
        }
    }
}

static WEIGHTS: Table<WeightObject> = Table::new("weight", 5);

/// The weight behind a handle, kept alive by the first of the pair while a call uses the second.
pub(super) fn weight_of(backend: &Backend, weight: *const nvb_weight) -> Result<(Arc<WeightObject>, WeightView)> {
    let object = WEIGHTS.get(weight)?;
    super::backend::expect_same_backend(backend, object.backend.executor(), "weight")?;
    object.expect_whole()?;
    let view = object.weight.view();
    Ok((object, view))
}

/// Finds a weight as `weight_of` does, for a call that reads it.
pub(super) fn weight_to_read(backend: &Backend, weight: *const nvb_weight) -> Result<(Arc<WeightObject>, WeightView)> {
    let found = weight_of(backend, weight)?;
    expect_awake(found.1.data).map_err(|error| error.context("the weight"))?;
    Ok(found)
}

/// How far a scale reaches, with the default of the encoding.
pub(super) fn granularity_of(encoding: Encoding, granularity: u32, group_size: u32) -> Result<Granularity> {
    let groups = Granularity::Groups(if group_size == 0 { 32 } else { group_size as usize });
    match granularity {
        NVB_GRANULARITY_GROUPS => Ok(groups),
        NVB_GRANULARITY_DEFAULT if group_size != 0 || encoding == Encoding::Int4 => Ok(groups),
        _ if group_size != 0 => {
            Err(Error::invalid(format!("group_size is {group_size}, but granularity {granularity} has no groups")))
        }
        NVB_GRANULARITY_DEFAULT | NVB_GRANULARITY_ROWS => Ok(Granularity::Rows),
        NVB_GRANULARITY_TENSOR => Ok(Granularity::Tensor),
        NVB_GRANULARITY_BLOCKS => Ok(Granularity::Blocks),
        other => Err(Error::invalid(format!("granularity is {other}; NVB_GRANULARITY_… (0 to 4) is needed"))),
    }
}

/// Lists of the parts are made before the parts are looked at, and a caller's number must not be more than memory holds.
fn expect_part_count(count: usize) -> Result<()> {
    const MOST: usize = 1 << 16;
    if count <= MOST {
        return Ok(());
    }
    Err(Error::invalid(format!("part_count is {count}; at most {MOST} are supported"))
        .with_limit(count as u64, MOST as u64))
}

/// What the weight shall be kept in; `None`: as it is.
pub(super) fn format_of(desc: &nvb_weight_desc) -> Result<Option<Format>> {
    let (zero_points, clipping) = (flag("zero_points", desc.zero_points)?, flag("clipping", desc.clipping)?);
    let encoding = match desc.format {
        NVB_WEIGHT_FORMAT_AS_IS => None,
        NVB_WEIGHT_FORMAT_BF16 => Some(Encoding::Float(DType::Bf16)),
        NVB_WEIGHT_FORMAT_F16 => Some(Encoding::Float(DType::F16)),
        NVB_WEIGHT_FORMAT_F32 => Some(Encoding::Float(DType::F32)),
        NVB_WEIGHT_FORMAT_FP8_E4M3 => Some(Encoding::Fp8E4m3),
        NVB_WEIGHT_FORMAT_FP8_E5M2 => Some(Encoding::Fp8E5m2),
        NVB_WEIGHT_FORMAT_INT8 => Some(Encoding::Int8),
        NVB_WEIGHT_FORMAT_INT4 => Some(Encoding::Int4),
        NVB_WEIGHT_FORMAT_SFP => Some(Encoding::Sfp),
        NVB_WEIGHT_FORMAT_BLOCKS => {
            return Err(Error::invalid(
                "format is NVB_WEIGHT_FORMAT_BLOCKS, which blocks of one GGUF format alone become",
            ))
        }
        other => return Err(Error::invalid(format!("format is {other}; NVB_WEIGHT_FORMAT_… (0 to 9) is needed"))),
    };
    match encoding {
        Some(encoding) if !encoding.is_float() => {
            let granularity = granularity_of(encoding, desc.granularity, desc.group_size)?;
            Format::new(encoding, granularity, zero_points, clipping).map(Some)
        }
        _ if desc.granularity != 0 || desc.group_size != 0 || zero_points || clipping => Err(Error::invalid(
            "granularity, group_size, zero_points and clipping belong to a format that is quantised, which `format` is not",
        )),
        encoding => Ok(encoding.map(|encoding| Format { encoding, ..Format::float(DType::F32) })),
    }
}

/// # Safety
/// The pointers of `desc` are as the header says.
unsafe fn weight_from_tensors(
    backend: &Backend,
    desc: &nvb_weight_desc,
    arrangement: Arrangement,
    source: Source,
    stream: &crate::stream::Stream,
) -> Result<Weight> {
    if !desc.blocks.is_null() {
        return Err(Error::invalid("`blocks` is given, but source_format is NVB_SOURCE_FORMAT_TENSOR"));
    }
    if source == Source::InPlace {
        return Err(Error::invalid("tensors are not packed in their place; Q4_0, Q4_1 and Q8_0 are"));
    }
    let format = format_of(desc)?;
    expect_part_count(desc.part_count)?;
    // SAFETY: `part_count` tensors, by the header's contract.
    let parts = unsafe { slice("parts", desc.parts, desc.part_count)? };
    let mut tensors = with_room(parts.len(), "the parts of a weight")?;
    for (i, part) in parts.iter().enumerate() {
        let name = format!("parts[{i}]");
        let tensor = convert(&name, part)?;
        if source != Source::Host {
            backend.check_memory(&name, &tensor)?;
        }
        tensors.push(tensor);
    }
    Weight::new(backend.memory(), &tensors, arrangement, source, format, stream)
}

/// # Safety
/// The pointers of `desc` are as the header says.
unsafe fn weight_from_blocks(
    backend: &Backend,
    desc: &nvb_weight_desc,
    arrangement: Arrangement,
    source: Source,
    stream: &crate::stream::Stream,
) -> Result<Weight> {
    if !desc.parts.is_null() {
        return Err(Error::invalid(format!(
            "`parts` is given, but source_format {} takes `blocks`",
            desc.source_format
        )));
    }
    expect_part_count(desc.part_count)?;
    // SAFETY: `part_count` of them with the memory that they describe, by the header's contract.
    let blocks = unsafe { slice("blocks", desc.blocks, desc.part_count)? };
    if desc.format == NVB_WEIGHT_FORMAT_BLOCKS {
        return weight_of_blocks(backend, desc, blocks, arrangement, source, stream);
    }
    if source == Source::InPlace {
        return weight_in_place(backend, desc, blocks, arrangement, stream);
    }
    if source != Source::Host {
        return Err(Error::invalid(format!(
            "source is {}; blocks that become another format are host memory (NVB_SOURCE_HOST), or do so in their place \
             (NVB_SOURCE_IN_PLACE)",
            desc.source
        )));
    }
    let format = format_of(desc)?;
    let mut sources: Vec<Box<dyn RowSource + '_>> = with_room(blocks.len(), "the parts of a weight")?;
    for (i, part) in blocks.iter().enumerate() {
        // SAFETY: as above.
        let source = unsafe { source_of(part, desc.source_format) };
        sources.push(source.map_err(|error| error.context(format_args!("blocks[{i}]")))?);
    }
    let parts = collected(sources.iter().map(|source| source.as_ref() as &dyn RowSource), "the parts of a weight")?;
    Weight::import(backend.memory(), &parts, arrangement, format, stream)
}

/// A weight that takes the place of its blocks.
fn weight_in_place(
    backend: &Backend,
    desc: &nvb_weight_desc,
    blocks: &[nvb_weight_blocks],
    arrangement: Arrangement,
    stream: &crate::stream::Stream,
) -> Result<Weight> {
    let options = [desc.format, desc.granularity, desc.group_size, desc.zero_points, desc.clipping];
    if options.iter().any(|&option| option != 0) {
        return Err(Error::invalid(
            "blocks become one format in their place: format, granularity, group_size, zero_points and clipping must be 0",
        ));
    }
    let [part] = blocks else {
        return Err(Error::invalid(format!("{} parts; one is packed in its place", blocks.len())));
    };
    if arrangement != Arrangement::Stacked {
        return Err(Error::invalid("a weight that is packed in its place cannot be gated"));
    }
    let named = |error: Error| error.context("blocks[0]");
    let (format, columns, rows) = kept_blocks_of(part, desc.source_format).map_err(named)?;
    let bytes = (rows.rows - 1) * rows.pitch + rows.row_bytes;
    backend.check_range(|| "`data` of blocks[0]".to_string(), rows.data.cast(), bytes)?;
    expect_awake(rows.data.cast_mut().cast()).map_err(named)?;
    Weight::pack_in_place(backend.memory(), format, columns, &rows, stream).map_err(named)
}

/// A weight that keeps the blocks as they are.
fn weight_of_blocks(
    backend: &Backend,
    desc: &nvb_weight_desc,
    blocks: &[nvb_weight_blocks],
    arrangement: Arrangement,
    source: Source,
    stream: &crate::stream::Stream,
) -> Result<Weight> {
    if source == Source::InPlace {
        return Err(Error::invalid("blocks that are kept are read where they lie by NVB_SOURCE_BORROWED"));
    }
    if desc.granularity != 0 || desc.group_size != 0 || desc.zero_points != 0 || desc.clipping != 0 {
        return Err(Error::invalid(
            "granularity, group_size, zero_points and clipping do not belong to blocks that are kept",
        ));
    }
    let mut kept = with_room(blocks.len(), "the parts of a weight")?;
    let mut first = None;
    for (i, part) in blocks.iter().enumerate() {
        let named = |error: Error| error.context(format_args!("blocks[{i}]"));
        let (format, columns, rows) = kept_blocks_of(part, desc.source_format).map_err(named)?;
        let (common, width) = *first.get_or_insert((format, columns));
        if (common, width) != (format, columns) {
            return Err(named(Error::invalid(format!(
                "{format} of {columns} columns; the weight is {common} of {width} columns"
            ))));
        }
        if source != Source::Host {
            let bytes = (rows.rows - 1) * rows.pitch + rows.row_bytes;
            backend.check_range(|| format!("`data` of blocks[{i}]"), rows.data.cast(), bytes)?;
        }
        kept.push(rows);
    }
    let Some((format, columns)) = first else { return Err(Error::invalid("a weight needs at least one part")) };
    Weight::from_blocks(backend.memory(), format, columns, &kept, arrangement, source, stream)
}

/// Creates a weight and waits until its parts have been read. `stream` orders the copies; NULL: the default stream. Parts
/// that are converted travel in pieces of some 32 MiB; a GPU quantises floats itself, and what is left to the host is worked
/// on by as many threads as there are cores.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` (which part and why; for a value or a scale that is not finite also its row and
/// column), `NVB_ERROR_OUT_OF_MEMORY`.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_create(
    backend: *const nvb_backend,
    desc: *const nvb_weight_desc,
    stream: *mut nvb_stream,
    weight: *mut *mut nvb_weight,
) -> nvb_status {
    guard!(nvb_weight_create, {
        let backend = BACKENDS.get(backend)?.backend.clone();
        expect_out("weight", weight)?;
        // SAFETY: a struct with its size set, by the header's contract.
        let desc = unsafe { read(desc)? };
        let arrangement = match desc.arrangement {
            NVB_WEIGHT_STACKED => Arrangement::Stacked,
            NVB_WEIGHT_GATED => Arrangement::Gated,
            other => return Err(Error::invalid(format!("arrangement is {other}; NVB_WEIGHT_… (0 or 1) is needed"))),
        };
        let source = match desc.source {
            NVB_SOURCE_HOST => Source::Host,
            NVB_SOURCE_DEVICE => Source::Device,
            NVB_SOURCE_BORROWED => Source::Borrowed,
            NVB_SOURCE_IN_PLACE => Source::InPlace,
            other => return Err(Error::invalid(format!("source is {other}; NVB_SOURCE_… (0 to 3) is needed"))),
        };
        let stream = stream_of(&backend, stream)?;
        stream.expect_unrecorded("the making of a weight")?;
        // SAFETY: the header's contract.
        let created = unsafe {
            if desc.source_format == NVB_SOURCE_FORMAT_TENSOR {
                weight_from_tensors(&backend, &desc, arrangement, source, &stream)?
            } else {
                weight_from_blocks(&backend, &desc, arrangement, source, &stream)?
            }
        };
        let handle = WEIGHTS.insert(Arc::new(WeightObject::new(created, backend, None)))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("weight", weight, handle) }
    })
}

/// Destroys the handle; NULL is fine. Waits for the device before the memory is given back.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_destroy(weight: *mut nvb_weight) -> nvb_status {
    guard!(nvb_weight_destroy, { WEIGHTS.remove(weight) })
}

/// Writes the weight's values to `output`, [N, K] of any float dtype in device memory, and waits for them: rows as the
/// weight has them (gated: gate and up alternate), columns in the order of an input. Not for use while the stream is captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for an output of another shape.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_dequantize(
    weight: *const nvb_weight,
    output: *const nvb_tensor,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_weight_dequantize, {
        let object = WEIGHTS.get(weight)?;
        let stream = stream_of(&object.backend, stream)?;
        stream.expect_unrecorded("a dequantised weight, which is waited for")?;
        // SAFETY: NULL or a tensor, by the header's contract.
        let output = unsafe { output.as_ref() }.ok_or_else(|| Error::invalid("`output` is NULL"))?;
        let output = device_tensor(&object.backend, "output", output)?;
        object.expect_whole()?;
        expect_awake(object.weight.view().data).map_err(|error| error.context("the weight"))?;
        object.weight.dequantize(object.backend.memory(), &output, &stream)
    })
}

/// Fills `info`; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_get_info(weight: *const nvb_weight, info: *mut nvb_weight_info) -> nvb_status {
    guard!(nvb_weight_get_info, {
        let object = WEIGHTS.get(weight)?;
        let (view, format) = (object.weight.view(), object.weight.format());
        let value = nvb_weight_info {
            struct_size: 0,
            rows: view.rows as u64,
            columns: view.columns as u64,
            output_columns: view.output_columns() as u64,
            bytes: object.weight.bytes() as u64,
            dtype: view.dtype().map_or(0, |dtype| dtype as u32),
            gated: view.gated.into(),
            encoding: match format.encoding {
                Encoding::Float(DType::F32) => NVB_WEIGHT_FORMAT_F32,
                Encoding::Float(DType::F16) => NVB_WEIGHT_FORMAT_F16,
                Encoding::Float(_) => NVB_WEIGHT_FORMAT_BF16,
                Encoding::Fp8E4m3 => NVB_WEIGHT_FORMAT_FP8_E4M3,
                Encoding::Fp8E5m2 => NVB_WEIGHT_FORMAT_FP8_E5M2,
                Encoding::Int8 => NVB_WEIGHT_FORMAT_INT8,
                Encoding::Int4 => NVB_WEIGHT_FORMAT_INT4,
                Encoding::Sfp => NVB_WEIGHT_FORMAT_SFP,
                Encoding::Blocks(_) => NVB_WEIGHT_FORMAT_BLOCKS,
            },
            granularity: match format.granularity {
                _ if !format.encoding.has_scales() => NVB_GRANULARITY_DEFAULT,
                Granularity::Tensor => NVB_GRANULARITY_TENSOR,
                Granularity::Rows => NVB_GRANULARITY_ROWS,
                Granularity::Groups(_) => NVB_GRANULARITY_GROUPS,
                Granularity::Blocks => NVB_GRANULARITY_BLOCKS,
            },
            group_size: view.scales.group_size() as u32,
            zero_points: format.zero_points.into(),
            scale_bytes: object.weight.scale_bytes() as u64,
            relative_error: object.weight.relative_error(),
            source_format: object.weight.block_format().map_or(0, source_format_of),
            reserved: 0,
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}

/// Writes to `*bytes` what [rows, columns] of GGUF's blocks take, in a file and as a weight of `NVB_WEIGHT_FORMAT_BLOCKS`.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a format that is none of GGUF's (`source_format`, `NVB_SOURCE_FORMAT_GGUF_…`), and for
/// columns that are no whole number of blocks.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_get_block_bytes(
    source_format: u32,
    rows: i64,
    columns: i64,
    bytes: *mut usize,
) -> nvb_status {
    guard!(nvb_weight_get_block_bytes, {
        expect_out("bytes", bytes)?;
        let format = block_format_of(source_format).ok_or_else(|| {
            Error::invalid(format!("source_format is {source_format}; NVB_SOURCE_FORMAT_GGUF_… is needed"))
        })?;
        let (rows_count, columns_count) = match (usize::try_from(rows), usize::try_from(columns)) {
            (Ok(rows), Ok(columns)) if columns.is_multiple_of(format.elements()) => (rows, columns),
            _ => {
                return Err(Error::invalid(format!(
                    "{format} of [{rows}, {columns}]; rows of a multiple of {} elements are needed",
                    format.elements()
                )))
            }
        };
        let size = format
            .bytes(columns_count)
            .checked_mul(rows_count)
            .filter(|&size| isize::try_from(size).is_ok())
            .ok_or_else(|| Error::invalid(format!("the size of {format} of [{rows}, {columns}] overflows")))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("bytes", bytes, size) }
    })
}

/// Copies the blocks of a weight of `NVB_WEIGHT_FORMAT_BLOCKS`, or of one made by `NVB_SOURCE_IN_PLACE`, to host memory of `bytes`,
/// those of `nvb_weight_get_block_bytes`: the very bits that it was made from, rows in the weight's order and without gaps. Waits
/// for the stream. Not for use while it is captured.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a weight of another kind or another size.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_read_blocks(
    weight: *const nvb_weight,
    blocks: *mut c_void,
    bytes: usize,
    stream: *mut nvb_stream,
) -> nvb_status {
    guard!(nvb_weight_read_blocks, {
        let object = WEIGHTS.get(weight)?;
        let stream = stream_of(&object.backend, stream)?;
        stream.expect_unrecorded("the blocks of a weight, which are waited for")?;
        expect_out("blocks", blocks)?;
        if bytes > isize::MAX as usize {
            return Err(Error::invalid(format!("bytes is {bytes}, more than memory has")));
        }
        object.expect_whole()?;
        expect_awake(object.weight.view().data).map_err(|error| error.context("the weight"))?;
        // SAFETY: checked for NULL, memory of this size by the header's contract.
        let blocks = unsafe { std::slice::from_raw_parts_mut(blocks.cast::<u8>(), bytes) };
        object.weight.read_blocks(object.backend.memory(), blocks, &stream)
    })
}

/// Puts the blocks of a weight that was made by `NVB_SOURCE_IN_PLACE` back to where they were, bit for bit, and waits for that.
/// The caller has waited for what still reads the weight. From then on the memory is the caller's, and calls refuse the weight
/// and its slices, which wait to be destroyed; a recorded graph that names them must not be launched.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a weight of another kind, a slice, and a weight whose blocks were put back;
/// `NVB_ERROR_OUT_OF_MEMORY` if there is none for a copy meanwhile, and the weight is as it was.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_restore_blocks(weight: *mut nvb_weight, stream: *mut nvb_stream) -> nvb_status {
    guard!(nvb_weight_restore_blocks, {
        let object = WEIGHTS.get(weight)?;
        let stream = stream_of(&object.backend, stream)?;
        stream.expect_unrecorded("the blocks of a weight, which are waited for")?;
        if object.parent.is_some() {
            return Err(Error::invalid("a slice's blocks are put back with those of the whole weight"));
        }
        object.expect_whole()?;
        expect_awake(object.weight.view().data).map_err(|error| error.context("the weight"))?;
        // Of two threads one puts them back.
        if object.restored.swap(true, Ordering::AcqRel) {
            return object.expect_whole();
        }
        object.weight.restore_blocks(object.backend.memory(), &stream).inspect_err(|_| {
            object.restored.store(false, Ordering::Release);
        })
    })
}

/// Makes a weight of rows `first_row` to `first_row + rows - 1` of another, such as the queries of a fused q, k and v. It reads the
/// other's memory, which lives as long as one of them does, and is destroyed as any weight. Queues nothing and allocates nothing
/// on the device.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for rows that the weight has not; for a slice that does not begin and end at multiples of 16
/// rows (128 with scales of blocks), or at the weight's end; and for a gated weight, whose rows alternate.
#[no_mangle]
pub unsafe extern "C" fn nvb_weight_slice(
    weight: *const nvb_weight,
    first_row: u64,
    rows: u64,
    slice: *mut *mut nvb_weight,
) -> nvb_status {
    guard!(nvb_weight_slice, {
        let object = WEIGHTS.get(weight)?;
        expect_out("slice", slice)?;
        object.expect_whole()?;
        let extent = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let made = object.weight.slice(extent(first_row), extent(rows))?;
        let backend = object.backend.clone();
        let handle = WEIGHTS.insert(Arc::new(WeightObject::new(made, backend, Some(object))))?;
        // SAFETY: checked for NULL, valid by the header's contract.
        unsafe { write_out("slice", slice, handle) }
    })
}
