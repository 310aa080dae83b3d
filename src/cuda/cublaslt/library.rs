//! The library itself: its file, looked for once, and the functions of cublasLt.h that products call.

use super::{Code, Handle, HeuristicResult};
use crate::error::{Error, Result};
use libloading::os::unix::{Library, Symbol, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// Newest first; the one that matches the statically linked runtime is preferred.
const FILES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// A function for each line: the field, the name in cublasLt.h, the parameters. All return a status.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($parameter:ty),*);)+) => {
        pub(super) struct Functions {
            $(pub(super) $field: Symbol<unsafe extern "C" fn($($parameter),*) -> Code>,)+
            // Last: the functions point into it.
            _library: Library,
        }

        impl Functions {
            fn load(library: Library) -> Result<Functions> {
                let missing =
                    |name: &[u8], error| Error::unsupported(format!("{}: {error}", String::from_utf8_lossy(name)));
                Ok(Functions {
                    // SAFETY: the field's type is the function's type in cublasLt.h.
                    $($field: unsafe { library.get($name) }.map_err(|error: libloading::Error| missing($name, error))?,)+
                    _library: library,
                })
            }
        }
    };
}

functions! {
    create = b"cublasLtCreate": fn(*mut Handle);
    matmul_desc_create = b"cublasLtMatmulDescCreate": fn(*mut Handle, c_int, c_int);
    matmul_desc_destroy = b"cublasLtMatmulDescDestroy": fn(Handle);
    matmul_desc_set = b"cublasLtMatmulDescSetAttribute": fn(Handle, c_int, *const c_void, usize);
    layout_create = b"cublasLtMatrixLayoutCreate": fn(*mut Handle, c_int, u64, u64, i64);
    layout_destroy = b"cublasLtMatrixLayoutDestroy": fn(Handle);
    layout_set = b"cublasLtMatrixLayoutSetAttribute": fn(Handle, c_int, *const c_void, usize);
    preference_create = b"cublasLtMatmulPreferenceCreate": fn(*mut Handle);
    preference_destroy = b"cublasLtMatmulPreferenceDestroy": fn(Handle);
    preference_set = b"cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, *const c_void, usize);
    heuristic = b"cublasLtMatmulAlgoGetHeuristic": fn(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut HeuristicResult, *mut c_int
    );
    algorithm_check = b"cublasLtMatmulAlgoCheck": fn(
        Handle, Handle, Handle, Handle, Handle, Handle, *const u64, *mut HeuristicResult
    );
    algorithm_capability = b"cublasLtMatmulAlgoCapGetAttribute": fn(*const u64, c_int, *mut c_void, usize, *mut usize);
    algorithm_get = b"cublasLtMatmulAlgoConfigGetAttribute": fn(*const u64, c_int, *mut c_void, usize, *mut usize);
    algorithm_set = b"cublasLtMatmulAlgoConfigSetAttribute": fn(*mut u64, c_int, *const c_void, usize);
    matmul = b"cublasLtMatmul": fn(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
        Handle, *mut c_void, Handle, *const u64, *mut c_void, usize, *mut c_void
    );
    destroy = b"cublasLtDestroy": fn(Handle);
}

/// The library is looked for once and stays open: opening it, or looking in vain, costs more than all else that a backend's
/// creation does. The log says what was found.
pub(super) fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(open).as_ref()
}

fn open() -> Option<Functions> {
    for file in FILES {
        // SAFETY: NVIDIA's library; its initialisers do nothing but set up the library.
        match unsafe { Library::open(Some(file), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => match Functions::load(library) {
                Ok(functions) => {
                    log::info!(target: "nvbackend::cuda", "{file} found: large products use it");
                    return Some(functions);
                }
                Err(error) => log::warn!(target: "nvbackend::cuda", "{file} is not usable: {error}"),
            },
            Err(error) => log::debug!(target: "nvbackend::cuda", "{file}: {error}"),
        }
    }
    log::info!(target: "nvbackend::cuda", "cuBLASLt was not found ({}): own kernels do all products", FILES.join(", "));
    None
}
