//! `attention` and `tensor_cores` of a configuration by what runs: the names of the kernels that are launched.

use crate::driver::{passes, works};
use crate::engine::{call, create_configured, Engine, Handle};
use crate::fake::Fake;
use crate::{operations, runtime};
use nvbackend::capi::backend::*;
use nvbackend::capi::memory::*;
use std::cell::Cell;
use std::ffi::CStr;
use std::path::Path;

/// Parts of the names of kernels that use Tensor Cores.
const TENSOR_CORES: [&str; 5] =
    ["mma", "skinny", "attention_decode_short", "attention_decode_ring", "quantized_decode"];

/// The kernels of every operation, run once each by a backend of this configuration.
fn launched(file: &Path, json: &CStr) -> Result<Vec<String>, String> {
    Fake::open(file);
    let backend = works(create_configured(json))?;
    let mut memory = Handle::new(nvb_memory_manager_destroy);
    works(call!(nvb_backend_get_memory_manager(backend.raw, 0, &mut memory.raw)))?;
    let engine = Engine { backend, memory, unreported: Cell::new(false) };
    runtime::launched();
    works(operations::run(&engine))?;
    Ok(runtime::launched())
}

pub fn by_configuration(file: &Path) -> Result<String, String> {
    let uses_tensor_cores = |name: &&String| TENSOR_CORES.iter().any(|part| name.contains(part));
    let is_attention = |name: &&String| name.contains("attention_");
    // The configuration, and whether attention and products use Tensor Cores.
    let cases = [
        (c"{\"device\": \"cuda:0\", \"vendor_libraries\": false}", true, true),
        (c"{\"device\": \"cuda:0\", \"vendor_libraries\": false, \"attention\": \"plain\"}", false, true),
        (c"{\"device\": \"cuda:0\", \"tensor_cores\": \"off\"}", false, false),
    ];
    for (json, attention, products) in cases {
        passes(|| {
            let names = launched(file, json)?;
            let (of_attention, others): (Vec<&String>, Vec<&String>) = names.iter().partition(is_attention);
            if of_attention.len() < 2 || others.iter().filter(|name| name.contains("linear")).count() == 0 {
                return Err(format!("{json:?}: prefill, decode or linear launched nothing: {names:?}"));
            }
            let all = of_attention.iter().copied().all(|name| uses_tensor_cores(&name) == attention);
            if !all || others.iter().copied().any(|name| uses_tensor_cores(&name)) != products {
                return Err(format!(
                    "{json:?}, with Tensor Cores in attention: {attention}, in products: {products}; {names:?}"
                ));
            }
            Ok(())
        })?;
    }
    Ok("attention and products with and without Tensor Cores".to_owned())
}
