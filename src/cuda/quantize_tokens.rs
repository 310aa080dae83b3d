//! Activations to quantised values with a scale a row: what a product of quantised values begins with, and what a
//! product in 8 bits ends with.

use super::prelude::*;
use super::quantized::QuantizedOutput;

mirror! {
    /// `nvb_quantize_tokens_params` of csrc/quantize/quantize_tokens.h.
    #[repr(C)]
    struct Params of(values: &Matrix, output: Option<Matrix>, quantized: &QuantizedRows) {
        values: *const c_void = values.data,
        output: *mut c_void = data_of(output),
        rows: i64 = values.rows as i64,
        columns: i64 = values.columns as i64,
        code_columns: i64 = quantized.columns as i64,
        values_stride: i64 = values.row_stride as i64,
        output_stride: i64 = stride_of(output),
        values_dtype: u32 = values.dtype as u32,
        output_dtype: u32 = dtype_of(output),
        quantized_output: QuantizedOutput = QuantizedOutput::of(Some(*quantized)),
    }
}

extern "C" {
    fn nvb_cuda_quantize_tokens(params: *const Params, launch: *const Launch) -> i32;
}

/// Queues the quantised values of `values`, whose rows may be longer than they are by zeros, and the values rounded to
/// `output`, if it is there. NaN in a row makes its scale NaN. The context is current.
///
/// # Safety
/// All of it is in device memory, quantised values and output writable; nothing overlaps anything else.
pub(super) unsafe fn run(
    executor: &CudaExecutor,
    values: &Matrix,
    output: Option<Matrix>,
    quantized: &QuantizedRows,
    stream: RawHandle,
) -> Result<()> {
    let params = Params::of(values, output, quantized);
    executor.check_launch(nvb_cuda_quantize_tokens(&params, &executor.launch_on(stream)), "quantising activations")
}
