//! Version, ABI number and what this build holds.

use super::prelude::*;

/// Grows with every release that changes the ABI incompatibly. The SONAME is libnvbackend.so.0.MINOR, from 1.0 on .MAJOR.
pub const NVB_ABI_VERSION: u32 = 3;

/// What was compiled into the library.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct nvb_build_info {
    pub struct_size: usize,
    /// 1 if the CUDA executor is in this build.
    pub cuda: u32,
    /// The toolkit's version that compiled the kernels, 1000 · major + 10 · minor; 0 without CUDA.
    pub cuda_toolkit_version: u32,
    /// Architectures with kernels in this build, such as "80;90a"; empty without CUDA.
    pub architectures: [c_char; 96],
}
versioned!(nvb_build_info);

/// The release as "major.minor.patch"; lives as long as the library.
#[no_mangle]
pub unsafe extern "C" fn nvb_version_string() -> *const c_char {
    // No guard: a constant.
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The release as 10000 · major + 100 · minor + patch; compare with `NVB_VERSION_NUMBER` of the header.
#[no_mangle]
pub unsafe extern "C" fn nvb_version_number() -> u32 {
    // No guard: constants.
    let part = |text: &str| text.bytes().fold(0u32, |number, digit| number * 10 + u32::from(digit - b'0'));
    part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

/// The library's `NVB_ABI_VERSION`; an engine that was compiled with another one must not go on.
#[no_mangle]
pub unsafe extern "C" fn nvb_abi_version() -> u32 {
    // No guard: a constant.
    NVB_ABI_VERSION
}

/// Fills `info`; set its `struct_size` first.
#[no_mangle]
pub unsafe extern "C" fn nvb_get_build_info(info: *mut nvb_build_info) -> nvb_status {
    guard!(nvb_get_build_info, {
        let value = nvb_build_info {
            struct_size: 0,
            cuda: cfg!(feature = "cuda") as u32,
            cuda_toolkit_version: option_env!("NVB_BUILD_CUDA_VERSION").and_then(|text| text.parse().ok()).unwrap_or(0),
            architectures: fixed_text(option_env!("NVB_BUILD_ARCHITECTURES").unwrap_or("")),
        };
        // SAFETY: the header asks for a struct with its size set.
        unsafe { write(info, &value) }
    })
}
