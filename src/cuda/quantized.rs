//! A quantised weight as kernels receive it.

use super::prelude::*;
use crate::weight::{BlockFormat, Encoding, Scales, WeightView};

/// `nvb_encoding_code` of csrc/common/quantized.h.
#[repr(u32)]
enum EncodingCode {
    Fp8E4m3 = 1,
    Fp8E5m2 = 2,
    Int8 = 3,
    Int4 = 4,
    Sfp = 5,
}

/// `nvb_block_code` of csrc/common/quantized.h.
#[repr(u32)]
enum BlockCode {
    Q4_0 = 16,
    Q4_1 = 17,
    Q5_0 = 18,
    Q5_1 = 19,
    Q8_0 = 20,
    Q2K = 21,
    Q3K = 22,
    Q4K = 23,
    Q5K = 24,
    Q6K = 25,
    Iq4Nl = 26,
    Iq4Xs = 27,
    Mxfp4 = 28,
}

/// `nvb_scale_code` of csrc/common/quantized.h.
#[repr(u32)]
enum ScaleCode {
    Rows = 1,
    Groups = 2,
    Blocks = 3,
}

/// An [`EncodingCode`] or a [`BlockCode`]; `None` for floats.
pub(super) fn encoding_code(encoding: Encoding) -> Option<u32> {
    let code = match encoding {
        Encoding::Float(_) => return None,
        Encoding::Fp8E4m3 => EncodingCode::Fp8E4m3,
        Encoding::Fp8E5m2 => EncodingCode::Fp8E5m2,
        Encoding::Int8 => EncodingCode::Int8,
        Encoding::Int4 => EncodingCode::Int4,
        Encoding::Sfp => EncodingCode::Sfp,
        Encoding::Blocks(format) => return Some(block_code(format)),
    };
    Some(code as u32)
}

pub(super) fn block_code(format: BlockFormat) -> u32 {
    let code = match format {
        BlockFormat::Q4_0 => BlockCode::Q4_0,
        BlockFormat::Q4_1 => BlockCode::Q4_1,
        BlockFormat::Q5_0 => BlockCode::Q5_0,
        BlockFormat::Q5_1 => BlockCode::Q5_1,
        BlockFormat::Q8_0 => BlockCode::Q8_0,
        BlockFormat::Q2K => BlockCode::Q2K,
        BlockFormat::Q3K => BlockCode::Q3K,
        BlockFormat::Q4K => BlockCode::Q4K,
        BlockFormat::Q5K => BlockCode::Q5K,
        BlockFormat::Q6K => BlockCode::Q6K,
        BlockFormat::Iq4Nl => BlockCode::Iq4Nl,
        BlockFormat::Iq4Xs => BlockCode::Iq4Xs,
        BlockFormat::Mxfp4 => BlockCode::Mxfp4,
    };
    code as u32
}

/// A [`ScaleCode`] or 0, the size of a group, and the scales.
pub(super) fn scale_code(scales: Scales) -> (u32, u32, *const c_void) {
    match scales {
        Scales::None => (0, 0, std::ptr::null()),
        Scales::Rows(data) => (ScaleCode::Rows as u32, 0, data.cast()),
        Scales::Groups { size, data } => (ScaleCode::Groups as u32, size as u32, data.cast()),
        Scales::Blocks(data) => (ScaleCode::Blocks as u32, 0, data.cast()),
    }
}

/// `nvb_quantized_matrix` of csrc/common/quantized.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct QuantizedMatrix {
    data: *const c_void,
    scales: *const c_void,
    zero_points: *const c_void,
    rows: i64,
    columns: i64,
    row_bytes: i64,
    encoding: u32,
    scale_kind: u32,
    group: u32,
    reserved: u32,
}

impl QuantizedMatrix {
    /// `None` for a float weight.
    pub fn of(weight: &WeightView) -> Option<QuantizedMatrix> {
        let (scale_kind, group, scales) = scale_code(weight.scales);
        Some(QuantizedMatrix {
            data: weight.data,
            scales,
            zero_points: weight.zero_points.cast(),
            rows: weight.rows as i64,
            columns: weight.columns as i64,
            row_bytes: weight.encoding.bytes(weight.row_stride) as i64,
            encoding: encoding_code(weight.encoding)?,
            scale_kind,
            group,
            reserved: 0,
        })
    }
}

// Without rows: no such output.
mirror! {
    /// `nvb_quantized_output` of csrc/common/quantized_output.h.
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(super) struct QuantizedOutput of(rows: Option<QuantizedRows>) {
        data: *mut c_void = rows.map_or(std::ptr::null_mut(), |rows| rows.data),
        scales: *mut f32 = rows.map_or(std::ptr::null_mut(), |rows| rows.scales),
        row_bytes: i64 = rows.map_or(0, |rows| rows.row_stride as i64),
        encoding: u32 = rows.and_then(|rows| encoding_code(rows.encoding)).unwrap_or(0),
        given_scales: u32 = rows.is_some_and(|rows| rows.given_scales).into(),
    }
}
