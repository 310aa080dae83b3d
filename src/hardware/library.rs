//! The libraries that are used where they are present: which file the dynamic loader gives for each, and its version.

use std::ffi::{c_char, c_int, c_void, CStr, CString};

/// A library's file names, newest first, and a function that it exports.
pub struct Candidate {
    pub name: &'static str,
    /// An environment variable that names the file to open instead.
    variable: Option<&'static str>,
    pub files: &'static [&'static str],
    symbol: &'static CStr,
    version: Version,
}

/// How a library tells its version.
#[derive(Clone, Copy)]
enum Version {
    Unknown,
    /// `size_t f(void)`
    Returned,
    /// `int f(int *)`, 0 for success
    Written,
}

pub const CANDIDATES: [Candidate; 4] = [
    Candidate {
        name: "CUDA driver",
        variable: Some("NVB_LIBCUDA"),
        files: &["libcuda.so.1"],
        symbol: c"cuDriverGetVersion",
        version: Version::Written,
    },
    Candidate {
        name: "NVML",
        variable: None,
        files: &["libnvidia-ml.so.1"],
        symbol: c"nvmlInit_v2",
        version: Version::Unknown,
    },
    Candidate {
        name: "cuBLASLt",
        variable: None,
        files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        symbol: c"cublasLtGetVersion",
        version: Version::Returned,
    },
    Candidate {
        name: "NCCL",
        variable: None,
        files: &["libnccl.so.2", "libnccl.so"],
        symbol: c"ncclGetVersion",
        version: Version::Written,
    },
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    pub name: String,
    /// Empty: not found.
    pub path: String,
    /// The number that the library gives; 0 if it gives none.
    pub version: i32,
    /// Why it is not there: the dynamic loader's words.
    pub reason: String,
}

/// Opens the first file that the loader finds, and asks. The library stays open: one that brings its own C++ runtime loses
/// the 72,704 bytes that this takes when it is loaded, with each time that it is closed.
pub fn look_up(candidate: &Candidate) -> Library {
    let mut library =
        Library { name: candidate.name.to_string(), path: String::new(), version: 0, reason: String::new() };
    let named = candidate.variable.and_then(trusted_variable);
    let files = named.as_deref().map_or(candidate.files.to_vec(), |file| vec![file]);
    for file in files {
        match open(file) {
            Ok(handle) => {
                describe(handle, candidate, file, &mut library);
                library.reason.clear();
                return library;
            }
            Err(reason) if library.reason.is_empty() => library.reason = reason,
            Err(_) => {}
        }
    }
    library
}

/// The variable's value, unless this process runs with another user's rights.
fn trusted_variable(name: &str) -> Option<String> {
    // SAFETY: no pointers.
    let untrusted = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    std::env::var(name).ok().filter(|value| !untrusted && !value.is_empty())
}

fn open(file: &str) -> Result<*mut c_void, String> {
    let file = CString::new(file).expect("neither file names nor the environment hold a NUL");
    // SAFETY: a NUL-terminated name; these libraries' constructors are made to run in any process.
    unsafe {
        let handle = libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        if !handle.is_null() {
            return Ok(handle);
        }
        let reason = libc::dlerror();
        if reason.is_null() {
            return Err("the dynamic loader gave no reason".to_string());
        }
        Err(CStr::from_ptr(reason).to_string_lossy().into_owned())
    }
}

fn describe(handle: *mut c_void, candidate: &Candidate, file: &str, library: &mut Library) {
    library.path = file.to_string();
    // SAFETY: an open handle and a NUL-terminated name.
    let symbol = unsafe { libc::dlsym(handle, candidate.symbol.as_ptr()) };
    if symbol.is_null() {
        return;
    }
    let mut place = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a valid pointer; on success the file's name is a string that lives as long as the library is open.
    unsafe {
        if libc::dladdr(symbol, place.as_mut_ptr()) != 0 {
            let path: *const c_char = place.assume_init().dli_fname;
            if !path.is_null() {
                let path = CStr::from_ptr(path).to_string_lossy();
                library.path =
                    std::fs::canonicalize(&*path).map_or(path.to_string(), |path| path.display().to_string());
            }
        }
    }
    library.version = match candidate.version {
        Version::Unknown => 0,
        // SAFETY: cublasLtGetVersion is `size_t (void)`.
        Version::Returned => unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> usize>(symbol)() as i32 },
        Version::Written => {
            let mut version = 0;
            // SAFETY: cuDriverGetVersion and ncclGetVersion are `int (int *)`, and need no initialisation.
            let status =
                unsafe { std::mem::transmute::<*mut c_void, extern "C" fn(&mut c_int) -> c_int>(symbol)(&mut version) };
            if status == 0 {
                version
            } else {
                0
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_there_has_a_path() {
        let c_library = Candidate {
            name: "C",
            variable: None,
            files: &["no_such.so", "libc.so.6"],
            symbol: c"getpid",
            version: Version::Unknown,
        };
        let found = look_up(&c_library);
        assert!(found.path.starts_with('/') && found.path.contains("libc"), "{}", found.path);
        assert_eq!(found.reason, "");
    }

    #[test]
    fn a_library_that_is_not_says_why() {
        let missing = Candidate {
            name: "none",
            variable: None,
            files: &["libnvbackend_none.so.7", "x.so"],
            symbol: c"x",
            version: Version::Unknown,
        };
        let found = look_up(&missing);
        assert!(found.path.is_empty() && found.reason.contains("libnvbackend_none.so.7"), "{}", found.reason);
    }
}
