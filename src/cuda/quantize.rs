//! `quantize` on CUDA: weights from float parts.

use super::prelude::*;
use super::quantized::QuantizedMatrix;
use crate::device::{CopyKind, Device};
use crate::operation::quantize::{Quantize, Quantized};
use crate::weight::stripe::SquaredError;
use crate::weight::{Arrangement, Encoding, Format, Granularity};

/// `nvb_quantize_part` of csrc/quantize/quantize.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Part {
    data: *const c_void,
    rows: i64,
    stride: i64,
}

/// `nvb_quantize_report` of csrc/quantize/quantize.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Report {
    difference: f64,
    norm: f64,
    flags: u32,
    maxima: [u32; MAX_PARTS],
    reserved: u32,
}

mirror! {
    /// `nvb_quantize_params` of csrc/quantize/quantize.h.
    #[repr(C)]
    struct Params of(op: &Quantize, matrix: QuantizedMatrix, parts: [Part; MAX_PARTS], report: *mut Report) {
        matrix: QuantizedMatrix,
        parts: [Part; MAX_PARTS],
        report: *mut Report,
        part_count: u32 = op.parts.len() as u32,
        gated: u32 = (op.arrangement == Arrangement::Gated).into(),
        per_tensor: u32 = (op.format.granularity == Granularity::Tensor).into(),
        input_dtype: u32 = op.parts[0].dtype as u32,
        clipping: u32 = op.format.clipping.into(),
        reserved: u32 = 0,
    }
}

const MAX_PARTS: usize = 4;

extern "C" {
    fn nvb_cuda_quantize(params: *const Params, launch: *const Launch) -> i32;
}

fn part(matrix: &Matrix) -> Part {
    Part { data: matrix.data, rows: matrix.rows as i64, stride: matrix.row_stride as i64 }
}

/// Scales of Int4 that stand for a whole row, the search for an Int8 clipping range, and SFP are left to the host.
pub(super) fn supports(format: &Format, parts: usize) -> bool {
    let int4 = format.encoding == Encoding::Int4;
    let groups = matches!(format.granularity, Granularity::Groups(_));
    let floats = format.encoding.is_float() || format.encoding == Encoding::Sfp;
    (1..=MAX_PARTS).contains(&parts) && !floats && (!int4 || groups) && (!format.clipping || int4)
}

/// Waits for the stream, because the caller wants to know what was lost.
pub(super) fn run(executor: &CudaExecutor, op: &Quantize, stream: RawHandle) -> Result<Quantized> {
    let (format, count) = (op.format, op.parts.len());
    let Some(matrix) = QuantizedMatrix::of(&op.weight).filter(|_| supports(&format, count)) else {
        return Err(Error::unsupported(format!("CUDA has no kernel that makes {format} of {count} parts")));
    };
    let _guard = executor.enter()?;
    let scratch = executor.scratch(stream);
    // Who makes a weight allocates anyway.
    let mut scratch = scratch.lock_own(executor, stream);
    let on_device = scratch.get(WorkspaceUse::Kernel, size_of::<Report>())?;
    let mut parts = [part(&op.parts[0]); MAX_PARTS];
    for (to, from) in parts.iter_mut().zip(&op.parts) {
        *to = part(from);
    }
    let params = Params::of(op, matrix, parts, on_device.cast());
    let mut report = Report::default();
    // SAFETY: the descriptor was validated, and the context is current; the copy is waited for.
    unsafe {
        executor.fill(on_device, 0, size_of::<Report>(), stream)?;
        executor.check_launch(nvb_cuda_quantize(&params, &executor.launch_on(stream)), "quantize")?;
        let to = (&raw mut report).cast();
        executor.copy(to, on_device, size_of::<Report>(), CopyKind::DeviceToHost, stream)?;
    }
    executor.stream_synchronize(stream)?;
    let lost = SquaredError { difference: report.difference, norm: report.norm };
    Ok(if report.flags == 0 { Quantized::Done(lost) } else { Quantized::Refused })
}
