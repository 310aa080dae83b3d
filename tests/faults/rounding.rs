//! Which products round their input to 8 bits, as a configuration has it.

use crate::driver::{passes, works};
use crate::engine::{call, create_configured, versioned};
use crate::fake::Fake;
use nvbackend::capi::kernel::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::tuning::*;
use nvbackend::capi::weight::*;
use std::ffi::{c_char, CStr};
use std::path::Path;
use std::ptr::null_mut;

/// `fp8` "off" keeps inputs from FP8 and leaves INT8 to `quantized_activations`.
pub fn fp8_off(file: &Path) -> Result<String, String> {
    let cases = [
        (c"{\"device\": \"cuda:0\", \"quantized_activations\": true}", [true, true, true]),
        (c"{\"device\": \"cuda:0\", \"quantized_activations\": true, \"fp8\": \"off\"}", [false, false, true]),
        (c"{\"device\": \"cuda:0\", \"fp8\": \"off\"}", [false, false, false]),
    ];
    for (json, expected) in cases {
        passes(|| {
            Fake::open(file);
            let backend = works(create_configured(json))?;
            let formats = [NVB_WEIGHT_FORMAT_FP8_E4M3, NVB_WEIGHT_FORMAT_FP8_E5M2, NVB_WEIGHT_FORMAT_INT8];
            for (format, expected) in formats.into_iter().zip(expected) {
                let mut case: nvb_linear_case = versioned();
                (case.rows, case.columns, case.depth) = (512, 1024, 1024);
                (case.input_dtype, case.format, case.bias) = (NVB_DTYPE_BF16, format, 1);
                let mut text = [0 as c_char; 8192];
                works(call!(nvb_kernel_explain(backend.raw, &case, text.as_mut_ptr(), text.len(), null_mut())))?;
                // SAFETY: closed with a NUL.
                let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
                // The key that tuning has for the case.
                if text.contains("rounded_input\"") != expected {
                    return Err(format!(
                        "format {format} with {json:?}, whose input may be rounded: {expected}; {text}"
                    ));
                }
            }
            Ok(())
        })?;
    }
    Ok("FP8 and INT8 weights".to_owned())
}
