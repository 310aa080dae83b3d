//! The launch paths of `batch_invariant`: a kernel for every weight, number of rows and place of the input, and nothing
//! else to choose.

use crate::driver::{passes, works};
use crate::engine::{call, create_configured, tensor, versioned, Engine, Handle};
use crate::fake::Fake;
use nvbackend::capi::backend::*;
use nvbackend::capi::kernel::*;
use nvbackend::capi::memory::*;
use nvbackend::capi::operations::*;
use nvbackend::capi::products::*;
use nvbackend::capi::status::*;
use nvbackend::capi::tensor::*;
use nvbackend::capi::tuning::*;
use nvbackend::capi::weight::*;
use nvbackend::capi::workspace::*;
use std::cell::Cell;
use std::ffi::{c_char, CStr};
use std::path::Path;
use std::ptr::{null, null_mut};

const WIDTH: i64 = 256;

pub fn launches(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        let json = c"{\"device\": \"cuda:0\", \"batch_invariant\": true, \"quantized_activations\": true}";
        let backend = works(create_configured(json))?;
        let mut memory = Handle::new(nvb_memory_manager_destroy);
        works(call!(nvb_backend_get_memory_manager(backend.raw, 0, &mut memory.raw)))?;
        let engine = Engine { backend, memory, unreported: Cell::new(false) };
        let backend = engine.backend.raw;
        let stream = engine.stream().map_err(|failure| failure.to_string())?;
        let block = engine.block(4 << 20, stream.raw).map_err(|failure| failure.to_string())?;
        let host = vec![0u16; (WIDTH * WIDTH) as usize];
        let part = tensor(host.as_ptr().cast_mut().cast(), NVB_DTYPE_BF16, &[WIDTH, WIDTH]);
        let weights =
            [engine.weight(&[part], NVB_WEIGHT_STACKED, NVB_SOURCE_HOST), engine.quantized(&[part], NVB_SOURCE_HOST)];
        let families =
            [["linear_mma_16x32_ordered", "linear_mma_64x64"], ["linear_quantized_mma16", "linear_quantized_mma64"]];
        for (weight, names) in weights.into_iter().zip(families) {
            let weight = weight.map_err(|failure| failure.to_string())?;
            for rows in [0, 1, 16, 17, 40, 300] {
                for place in [0, 2] {
                    let at = block.pointer.wrapping_byte_add(place);
                    let mut args: nvb_linear_args = versioned();
                    args.input = tensor(at, NVB_DTYPE_BF16, &[rows, WIDTH]);
                    args.output = tensor(block.pointer.wrapping_byte_add(1 << 20), NVB_DTYPE_BF16, &[rows, WIDTH]);
                    args.weight = weight.raw;
                    let mut bytes = 0;
                    works(call!(nvb_linear_get_workspace_size(backend, &args, &mut bytes)))?;
                    let before = fake.books().launches;
                    works(call!(nvb_linear(backend, &args, stream.raw)))?;
                    let launched = fake.books().launches - before;
                    // The copy of an input that is not aligned, and the product.
                    let copied = rows > 0 && place != 0;
                    if launched != i64::from(rows > 0) + i64::from(copied) || (bytes > 0) != copied {
                        return Err(format!("{rows} rows at +{place}: {launched} launches, {bytes} bytes"));
                    }
                    if rows == 0 || place != 0 {
                        continue;
                    }
                    let text = explanation(backend, weight.raw, rows as u64)?;
                    let name = names[usize::from(rows > 32)];
                    let wanted = format!("runs {name}: batch_invariant is set");
                    if rows <= 16 && !text.contains(&format!("runs {}", names[0]))
                        || rows > 32 && !text.contains(&wanted)
                        || !text.contains("(options: batch_invariant is set)")
                    {
                        return Err(format!("{rows} rows: {text}"));
                    }
                }
            }
            let mut args: nvb_grouped_linear_args = versioned();
            args.input = tensor(block.pointer.wrapping_byte_add(2), NVB_DTYPE_BF16, &[3, WIDTH]);
            args.output = tensor(block.pointer.wrapping_byte_add(1 << 20), NVB_DTYPE_BF16, &[3, WIDTH / 2]);
            args.expert_offsets = tensor(block.pointer.wrapping_byte_add(2 << 20), NVB_DTYPE_I32, &[3]);
            args.weight = weight.raw;
            let before = fake.books().launches;
            works(call!(nvb_grouped_linear(backend, &args, stream.raw)))?;
            if fake.books().launches != before + 2 {
                return Err("an input that is not aligned was not copied for a grouped product".to_string());
            }
        }
        let refused = [
            call!(nvb_kernel_override(backend, NVB_OPERATION_LINEAR, c"linear_simt".as_ptr())),
            call!(nvb_tune_linear(backend, null(), 0, null(), None, null_mut(), null_mut())),
        ];
        for outcome in refused {
            match outcome {
                Err(failure)
                    if failure.status == NVB_ERROR_CONFIGURATION && failure.text.contains("batch_invariant") => {}
                other => return Err(format!("a choice: {other:?}")),
            }
        }
        works(call!(nvb_kernel_override(backend, NVB_OPERATION_LINEAR, null())))
    })?;
    Ok("float and INT4 weights, rows of every family".to_string())
}

fn explanation(backend: *const nvb_backend, weight: *const nvb_weight, rows: u64) -> Result<String, String> {
    let mut case: nvb_linear_case = versioned();
    (case.weight, case.rows, case.input_dtype) = (weight, rows, NVB_DTYPE_BF16);
    let mut text = [0 as c_char; 8192];
    works(call!(nvb_kernel_explain(backend, &case, text.as_mut_ptr(), text.len(), null_mut())))?;
    // SAFETY: closed with a NUL.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}
