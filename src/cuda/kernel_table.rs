//! The tables of kernels in csrc/, whose rows the registry names.

use crate::registry::{Family, KernelId};
use std::ffi::{c_char, CStr};
use std::sync::OnceLock;

extern "C" {
    fn nvb_cuda_linear_kernel_at(index: i32) -> *const c_char;
    fn nvb_cuda_linear_quantized_kernel_at(index: i32) -> *const c_char;
    fn nvb_cuda_attention_prefill_kernel_at(index: i32) -> *const c_char;
    fn nvb_cuda_attention_decode_kernel_at(index: i32) -> *const c_char;
}

/// The kernels' names, in the order of each table.
pub(crate) fn tables() -> [(Family, Vec<String>); 4] {
    let names = |at: unsafe extern "C" fn(i32) -> *const c_char| {
        (0..)
            // SAFETY: any index may be asked for.
            .map(|index| unsafe { at(index) })
            .take_while(|name| !name.is_null())
            .map(text)
            .collect()
    };
    [
        (Family::FloatKernel, names(nvb_cuda_linear_kernel_at)),
        (Family::QuantizedKernel, names(nvb_cuda_linear_quantized_kernel_at)),
        (Family::AttentionPrefill, names(nvb_cuda_attention_prefill_kernel_at)),
        (Family::AttentionDecode, names(nvb_cuda_attention_decode_kernel_at)),
    ]
}

/// A launcher's name of a kernel.
pub(super) fn text(name: *const c_char) -> String {
    // SAFETY: the launchers return static strings.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The row of each kernel of the registry that has one.
fn rows() -> &'static [Option<i32>] {
    static ROWS: OnceLock<Vec<Option<i32>>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let tables = tables();
        let row = |id: KernelId| {
            let kernel = id.kernel();
            let (_, names) = tables.iter().find(|(family, _)| *family == kernel.family)?;
            names.iter().position(|name| name == kernel.name).map(|row| row as i32)
        };
        (0..).map_while(KernelId::from_index).map(row).collect()
    })
}

/// The kernel's row in its table.
pub(super) fn row(kernel: KernelId) -> Option<i32> {
    rows()[kernel.index()]
}

/// The kernel of a row.
pub(super) fn kernel(family: Family, row: i32) -> Option<KernelId> {
    let index = (0..rows().len()).find(|&index| {
        rows()[index] == Some(row) && KernelId::from_index(index).is_some_and(|id| id.kernel().family == family)
    })?;
    KernelId::from_index(index)
}
