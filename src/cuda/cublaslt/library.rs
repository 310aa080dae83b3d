//! The library itself: its file, looked for once, and the functions of cublasLt.h that products call.

use super::{Code, Handle, HeuristicResult};
use crate::error::{Error, Result};
use libloading::os::unix::{Library, Symbol, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// Newest first; the one that matches the statically linked runtime is preferred.
const FILES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

pub(super) struct Functions {
    pub(super) create: Symbol<unsafe extern "C" fn(*mut Handle) -> Code>,
    pub(super) matmul_desc_create: Symbol<unsafe extern "C" fn(*mut Handle, c_int, c_int) -> Code>,
    pub(super) matmul_desc_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    pub(super) matmul_desc_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    pub(super) layout_create: Symbol<unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> Code>,
    pub(super) layout_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    pub(super) layout_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    pub(super) preference_create: Symbol<unsafe extern "C" fn(*mut Handle) -> Code>,
    pub(super) preference_destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    pub(super) preference_set: Symbol<unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> Code>,
    #[allow(clippy::type_complexity)]
    pub(super) heuristic: Symbol<
        unsafe extern "C" fn(
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            Handle,
            c_int,
            *mut HeuristicResult,
            *mut c_int,
        ) -> Code,
    >,
    #[allow(clippy::type_complexity)]
    pub(super) algorithm_check: Symbol<
        unsafe extern "C" fn(Handle, Handle, Handle, Handle, Handle, Handle, *const u64, *mut HeuristicResult) -> Code,
    >,
    pub(super) algorithm_capability:
        Symbol<unsafe extern "C" fn(*const u64, c_int, *mut c_void, usize, *mut usize) -> Code>,
    pub(super) algorithm_get: Symbol<unsafe extern "C" fn(*const u64, c_int, *mut c_void, usize, *mut usize) -> Code>,
    pub(super) algorithm_set: Symbol<unsafe extern "C" fn(*mut u64, c_int, *const c_void, usize) -> Code>,
    #[allow(clippy::type_complexity)]
    pub(super) matmul: Symbol<
        unsafe extern "C" fn(
            Handle,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *const c_void,
            Handle,
            *const c_void,
            *const c_void,
            Handle,
            *mut c_void,
            Handle,
            *const u64,
            *mut c_void,
            usize,
            *mut c_void,
        ) -> Code,
    >,
    pub(super) destroy: Symbol<unsafe extern "C" fn(Handle) -> Code>,
    // Last: the functions point into it.
    _library: Library,
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

impl Functions {
    fn load(library: Library) -> Result<Functions> {
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the field's type is the function's type in cublasLt.h.
                unsafe { library.get($name) }
                    .map_err(|error| Error::unsupported(format!("{}: {error}", String::from_utf8_lossy($name))))?
            };
        }
        Ok(Functions {
            create: function!(b"cublasLtCreate"),
            matmul_desc_create: function!(b"cublasLtMatmulDescCreate"),
            matmul_desc_destroy: function!(b"cublasLtMatmulDescDestroy"),
            matmul_desc_set: function!(b"cublasLtMatmulDescSetAttribute"),
            layout_create: function!(b"cublasLtMatrixLayoutCreate"),
            layout_destroy: function!(b"cublasLtMatrixLayoutDestroy"),
            layout_set: function!(b"cublasLtMatrixLayoutSetAttribute"),
            preference_create: function!(b"cublasLtMatmulPreferenceCreate"),
            preference_destroy: function!(b"cublasLtMatmulPreferenceDestroy"),
            preference_set: function!(b"cublasLtMatmulPreferenceSetAttribute"),
            heuristic: function!(b"cublasLtMatmulAlgoGetHeuristic"),
            algorithm_check: function!(b"cublasLtMatmulAlgoCheck"),
            algorithm_capability: function!(b"cublasLtMatmulAlgoCapGetAttribute"),
            algorithm_get: function!(b"cublasLtMatmulAlgoConfigGetAttribute"),
            algorithm_set: function!(b"cublasLtMatmulAlgoConfigSetAttribute"),
            matmul: function!(b"cublasLtMatmul"),
            destroy: function!(b"cublasLtDestroy"),
            _library: library,
        })
    }
}
