//! Tensors as C passes them.

use super::prelude::*;
use super::weight::{NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_WEIGHT_FORMAT_INT8};
use crate::memory::tensor_bytes;
use crate::operation::quantized_rows::QuantizedRows;
use crate::tensor::{DType, Tensor, MAX_RANK};
use crate::weight::Encoding;

/// `nvb_tensor.dtype`: IEEE 754 binary32.
pub const NVB_DTYPE_F32: u32 = 1;
/// `nvb_tensor.dtype`: IEEE 754 binary16.
pub const NVB_DTYPE_F16: u32 = 2;
/// `nvb_tensor.dtype`: bfloat16.
pub const NVB_DTYPE_BF16: u32 = 3;
/// `nvb_tensor.dtype`: 32-bit signed integer (tokens, positions, sequences).
pub const NVB_DTYPE_I32: u32 = 4;
/// FP8 E4M3 (OCP, without infinities; largest 448): queries, keys and values of attention, which have scales. `nvb_convert_heads`
/// writes them; no other operation takes them.
pub const NVB_DTYPE_FP8_E4M3: u32 = 5;
/// FP8 E5M2 (largest finite 57344): as `NVB_DTYPE_FP8_E4M3`.
pub const NVB_DTYPE_FP8_E5M2: u32 = 6;
/// Keys or values of a cache in INT8 with a scale for each token and head; no operation's tensor, as are the two below. A row, the
/// key or value of `dim` elements of one token and head, is so many bytes:
/// - the values: a signed byte an element; of `NVB_DTYPE_KV_Q4_0` 16 bytes for every 32 elements;
/// - from the next multiple of 4 bytes the scales: one f32; of `_KV_Q8_0` and `_KV_Q4_0` one f16 for every 32 elements;
/// - zeros up to a multiple of 16 bytes, at which every row begins.
///
/// An element is its scale times its value. The scale is max |x| / 127 of those that share it, and a value is x / scale, to
/// nearest, ties to even. Where one of them is not finite the scale is NaN.
/// For 128 elements a row has 144 bytes, for 64 it has 80.
pub const NVB_DTYPE_KV_INT8: u32 = 7;
/// As `NVB_DTYPE_KV_INT8`, with an f16 scale for every 32 elements, which is rounded before it divides and is at most 65504; values
/// saturate. These are the numbers of ggml's blocks Q8_0.
pub const NVB_DTYPE_KV_Q8_0: u32 = 8;
/// As `NVB_DTYPE_KV_Q8_0` in 4 bits, as in ggml's blocks Q4_0: the scale is m / −8, m being the element of the largest magnitude and
/// the positive one of two; byte i of a block has element i in its low and i + 16 in its high half; a half is
/// ⌊x / scale + 8.5⌋, 0 to 15, and its value half − 8. For 128 elements a row has 80 bytes, for 64 it has 48.
pub const NVB_DTYPE_KV_Q4_0: u32 = 9;

/// A view of memory that the caller owns: of the backend's device, unless a call says host. Passed by value inside
/// argument structs; an all-zero tensor stands for "absent" where a call says optional.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvb_tensor {
    /// The first element. Aligned to the element's size; 16-byte alignment of rows runs fastest.
    pub data: *mut c_void,
    /// `NVB_DTYPE_…`
    pub dtype: u32,
    /// 1 to 4.
    pub rank: u32,
    /// Elements along each axis, outermost first; entries past `rank` are ignored. 0 makes an empty tensor.
    pub shape: [i64; 4],
    /// In elements; all 0 means contiguous (row-major). The innermost must be 1 unless a call takes any strides. Those of an
    /// empty tensor do not matter.
    pub strides: [i64; 4],
}

/// Activations in 8 bits: value = scales[row] · q. Passed by value inside argument structs; an all-zero one stands for
/// "absent". The memory is the caller's, on the backend's device.
///
/// Written, a row of x gets the scale max |x| / 448 (FP8 E4M3) or max |x| / 127 (INT8) and the quantised values nearest
/// to x / scale, ties to even; x is in f32, before the rounding of any tensor that it is stored to as well. A row of
/// zeros gets the scale 0, a row with NaN the scale NaN, one with an infinity an infinite one. Without columns no scale
/// is written.
///
/// With `given_scales` the scales of rows to be written are read instead: the quantised values nearest to x / scale, or
/// the largest of their range. A calibrated model's one scale of a tensor is written to all of `scales` once. NaN
/// becomes NaN in FP8 and −127 in INT8; a scale that is 0, infinite or NaN, or so small that 1 / scale is infinite,
/// makes the quantised values of finite values 0.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvb_quantized_rows {
    /// Quantised values, one byte each. Rows on 16-byte boundaries with a multiple of 16 columns run fastest.
    pub data: *mut c_void,
    /// f32 [rows]
    pub scales: *mut f32,
    /// The leading axes of the tensor that this stands for, folded.
    pub rows: i64,
    pub columns: i64,
    /// Bytes from one row to the next; 0: `columns`.
    pub row_stride: i64,
    /// `NVB_WEIGHT_FORMAT_FP8_E4M3` or `NVB_WEIGHT_FORMAT_INT8`
    pub format: u32,
    /// 0, or 1: whoever writes the quantised values leaves `scales` as they are. Those of an input are always given.
    pub given_scales: u32,
}

const _: () = assert!(MAX_RANK == 4);

impl nvb_tensor {
    pub(super) fn contiguous(data: *mut c_void, dtype: DType, extents: &[usize]) -> nvb_tensor {
        let mut shape = [0; 4];
        for (to, &extent) in shape.iter_mut().zip(extents) {
            *to = extent as i64;
        }
        nvb_tensor { data, dtype: dtype as u32, rank: extents.len() as u32, shape, strides: [0; 4] }
    }
}

/// Writes the bytes of a contiguous tensor of `rank` extents (host memory) to `bytes`.
/// Errors: `NVB_ERROR_INVALID_ARGUMENT` for a dtype or rank that is none, and for a size that overflows or is 0.
#[no_mangle]
pub unsafe extern "C" fn nvb_tensor_bytes(dtype: u32, rank: u32, shape: *const i64, bytes: *mut usize) -> nvb_status {
    guard!(nvb_tensor_bytes, {
        // SAFETY: `rank` extents, by the header's contract.
        let (dtype, extents) = unsafe { tensor_shape(dtype, rank, shape)? };
        let value = tensor_bytes(dtype, &extents)?;
        // SAFETY: NULL is checked; otherwise valid by the header's contract.
        unsafe { write_out("bytes", bytes, value) }
    })
}

/// What a tensor to come is described by.
///
/// # Safety
/// `shape` is NULL or has `rank` extents.
pub(super) unsafe fn tensor_shape(dtype: u32, rank: u32, shape: *const i64) -> Result<(DType, Vec<usize>)> {
    let dtype = DType::from_code(dtype)
        .ok_or_else(|| Error::invalid(format!("dtype is {dtype}; NVB_DTYPE_… (1 to 6) is needed")))?;
    if rank == 0 || rank as usize > MAX_RANK {
        return Err(Error::invalid(format!("rank is {rank}; 1 to {MAX_RANK} is needed")));
    }
    // SAFETY: the caller's contract.
    let shape = unsafe { slice("shape", shape, rank as usize)? };
    let extent = |&value: &i64| usize::try_from(value).map_err(|_| Error::invalid(format!("an extent is {value}")));
    Ok((dtype, shape.iter().map(extent).collect::<Result<_>>()?))
}

/// What a call's tensors are read for.
#[derive(Clone, Copy)]
pub(super) enum Reading<'a> {
    /// Work on them, which must lie in this backend's memory.
    Memory(&'a Backend),
    /// Their shapes: nothing is read or written, and NULL stands for an aligned address.
    Shape,
}

/// An address that nobody reads, with the alignment of every allocation.
const NOWHERE: usize = 256;

impl Reading<'_> {
    pub(super) fn tensor(self, name: &str, tensor: &nvb_tensor) -> Result<Tensor> {
        match self {
            Reading::Memory(backend) => device_tensor(backend, name, tensor),
            Reading::Shape if tensor.data.is_null() && !is_absent(tensor) => {
                convert(name, &nvb_tensor { data: NOWHERE as *mut c_void, ..*tensor })
            }
            Reading::Shape => convert(name, tensor),
        }
    }

    /// Reads a tensor as `optional` does; where only shapes are read it lies apart from the others.
    pub(super) fn optional_apart(self, name: &str, tensor: &nvb_tensor) -> Result<Option<Tensor>> {
        let found = self.optional(name, tensor)?;
        Ok(match self {
            Reading::Shape if tensor.data.is_null() => {
                found.map(|tensor| Tensor { data: (2 * NOWHERE) as *mut c_void, ..tensor })
            }
            _ => found,
        })
    }

    pub(super) fn optional(self, name: &str, tensor: &nvb_tensor) -> Result<Option<Tensor>> {
        if is_absent(tensor) {
            return Ok(None);
        }
        self.tensor(name, tensor).map(Some)
    }

    /// One of any strides, the innermost too, that may be absent.
    pub(super) fn optional_strided(self, name: &str, tensor: &nvb_tensor) -> Result<Option<Tensor>> {
        match self {
            Reading::Memory(backend) => optional_strided_device_tensor(backend, name, tensor),
            Reading::Shape if is_absent(tensor) => Ok(None),
            Reading::Shape => convert_strided(name, tensor).map(Some),
        }
    }

    pub(super) fn quantized_rows(self, name: &str, rows: &nvb_quantized_rows) -> Result<Option<QuantizedRows>> {
        if let Reading::Memory(backend) = self {
            return optional_quantized_rows(backend, name, rows);
        }
        let mut found = quantized_rows(name, rows)?;
        if let Some(rows) = &mut found {
            let or_nowhere = |data: *mut c_void| if data.is_null() { NOWHERE as *mut c_void } else { data };
            rows.data = or_nowhere(rows.data);
            rows.scales = or_nowhere(rows.scales.cast()).cast();
        }
        Ok(found)
    }
}

/// A required tensor that lies in the backend's memory.
pub(super) fn device_tensor(backend: &Backend, name: &str, tensor: &nvb_tensor) -> Result<Tensor> {
    let tensor = convert(name, tensor)?;
    backend.check_memory(name, &tensor)?;
    Ok(tensor)
}

#[inline]
pub(super) fn optional_device_tensor(backend: &Backend, name: &str, tensor: &nvb_tensor) -> Result<Option<Tensor>> {
    if is_absent(tensor) {
        return Ok(None);
    }
    device_tensor(backend, name, tensor).map(Some)
}

/// Rows in 8 bits that lie in the backend's memory, if they are given. Whether a NULL is one too many is the operation's
/// to say.
pub(super) fn optional_quantized_rows(
    backend: &Backend,
    name: &str,
    rows: &nvb_quantized_rows,
) -> Result<Option<QuantizedRows>> {
    let Some(rows) = quantized_rows(name, rows)? else { return Ok(None) };
    if rows.rows > 0 && rows.columns > 0 && !rows.data.is_null() && !rows.scales.is_null() {
        let scale_bytes = rows.rows * size_of::<f32>();
        let of = |what: &str| format!("{what}`{name}` [{}, {}]", rows.rows, rows.columns);
        backend.check_range(|| of(""), rows.data, rows.span_bytes())?;
        backend.check_range(|| of("the scales of "), rows.scales.cast(), scale_bytes)?;
    }
    Ok(Some(rows))
}

/// What they say of themselves.
fn quantized_rows(name: &str, rows: &nvb_quantized_rows) -> Result<Option<QuantizedRows>> {
    let &nvb_quantized_rows { data, scales, rows, columns, row_stride, format, given_scales } = rows;
    if data.is_null() && scales.is_null() && format == 0 {
        return Ok(None);
    }
    if given_scales > 1 {
        return Err(Error::invalid(format!("given_scales of `{name}` is {given_scales}; 0 or 1 is needed")));
    }
    let encoding = match format {
        NVB_WEIGHT_FORMAT_FP8_E4M3 => Encoding::Fp8E4m3,
        NVB_WEIGHT_FORMAT_INT8 => Encoding::Int8,
        other => {
            return Err(Error::invalid(format!(
            "`{name}` has the format {other}; NVB_WEIGHT_FORMAT_FP8_E4M3 (3) or NVB_WEIGHT_FORMAT_INT8 (5) is needed"
        )))
        }
    };
    let extent = |what: &str, value: i64| {
        usize::try_from(value).map_err(|_| Error::invalid(format!("`{name}` has {what} of {value}")))
    };
    let (rows, columns) = (extent("a number of rows", rows)?, extent("a number of columns", columns)?);
    let row_stride = match extent("a row stride", row_stride)? {
        0 => columns,
        stride => stride,
    };
    let span = rows.max(1).checked_mul(row_stride.max(columns)).filter(|&bytes| bytes <= isize::MAX as usize);
    let scale_bytes = rows.checked_mul(size_of::<f32>()).filter(|&bytes| bytes <= isize::MAX as usize);
    if span.is_none() || scale_bytes.is_none() {
        return Err(Error::invalid(format!("the size of `{name}` [{rows}, {columns}] overflows")));
    }
    Ok(Some(QuantizedRows { data, scales, given_scales: given_scales == 1, encoding, rows, columns, row_stride }))
}

#[inline]
fn is_absent(tensor: &nvb_tensor) -> bool {
    tensor.data.is_null() && tensor.dtype == 0 && tensor.rank == 0
}

/// A required tensor of any strides that lies in the backend's memory.
pub(super) fn strided_device_tensor(backend: &Backend, name: &str, tensor: &nvb_tensor) -> Result<Tensor> {
    let tensor = convert_strided(name, tensor)?;
    tensor.expect_address(name)?;
    backend.check_memory(name, &tensor)?;
    Ok(tensor)
}

/// One that may be absent.
pub(super) fn optional_strided_device_tensor(
    backend: &Backend,
    name: &str,
    tensor: &nvb_tensor,
) -> Result<Option<Tensor>> {
    if is_absent(tensor) {
        return Ok(None);
    }
    strided_device_tensor(backend, name, tensor).map(Some)
}

/// Checks everything that a tensor says of itself. Inlined where it is called, which saves a copy of the tensor.
#[inline(always)]
pub(super) fn convert(name: &str, tensor: &nvb_tensor) -> Result<Tensor> {
    let converted = convert_strided(name, tensor)?;
    converted.expect_readable(name)?;
    Ok(converted)
}

/// Checks shape, dtype and size, and leaves the address and the innermost stride alone.
#[inline(always)]
fn convert_strided(name: &str, tensor: &nvb_tensor) -> Result<Tensor> {
    if is_absent(tensor) {
        return Err(Error::invalid(format!("tensor `{name}` is missing")));
    }
    let dtype = DType::from_code(tensor.dtype).ok_or_else(|| {
        Error::invalid(format!("tensor `{name}` has dtype {}; NVB_DTYPE_… (1 to 6) is needed", tensor.dtype))
    })?;
    let rank = tensor.rank as usize;
    if rank == 0 || rank > MAX_RANK {
        return Err(Error::invalid(format!("tensor `{name}` has rank {rank}; 1 to {MAX_RANK} is needed")));
    }
    let (shape, strides) = (&tensor.shape[..rank], &tensor.strides[..rank]);
    let extent = |what: &str, value: i64| {
        usize::try_from(value).map_err(|_| Error::invalid(format!("tensor `{name}` has a {what} of {value}")))
    };
    // The span in bytes must fit an address, strides included.
    let overflow = || Error::invalid(format!("the size of tensor `{name}` {shape:?} overflows"));
    let fits = |bytes: Option<usize>| bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(overflow);
    let mut converted = Tensor { data: tensor.data, dtype, rank, shape: [1; MAX_RANK], strides: [1; MAX_RANK] };
    let mut elements = 1usize;
    for axis in (0..rank).rev() {
        (converted.shape[axis], converted.strides[axis]) = (extent("shape", shape[axis])?, elements);
        // An extent of 0 excuses no other, because strides are products of them.
        elements = elements.checked_mul(converted.shape[axis].max(1)).ok_or_else(overflow)?;
    }
    fits(elements.checked_mul(dtype.size()))?;
    if strides.iter().any(|&stride| stride != 0) {
        let mut last = 0usize;
        let mut given = [1; MAX_RANK];
        for axis in 0..rank {
            given[axis] = extent("stride", strides[axis])?;
            let reach = converted.shape[axis].saturating_sub(1).checked_mul(given[axis]).ok_or_else(overflow)?;
            last = last.checked_add(reach).ok_or_else(overflow)?;
        }
        fits(last.checked_mul(dtype.size()))?;
        // Nothing lies in an empty tensor to be stepped over, so no operation need look at its strides.
        if !converted.is_empty() {
            converted.strides = given;
        }
    }
    Ok(converted)
}
