//! Builds tests/fake_driver, opens it and calls its control functions (tests/fake_driver/fake_driver.h).

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// `fake_books`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Books {
    pub contexts: i64,
    pub blocks: i64,
    pub bytes: i64,
    pub host_blocks: i64,
    pub ranges: i64,
    pub mappings: i64,
    pub physicals: i64,
    pub pools: i64,
    pub streams: i64,
    pub events: i64,
    pub graphs: i64,
    pub calls: i64,
    pub calls_after_sticky: i64,
    pub faults: i64,
    pub launches: i64,
    pub violations: i64,
    pub waits: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    Once = 0,
    Forever = 1,
    Sticky = 2,
}

#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub enum Setting {
    DriverVersion = 0,
    Devices = 1,
    Capability = 2,
    Pools = 3,
    MemoryBytes = 4,
    Polls = 5,
    InitStatus = 6,
    RetainStatus = 7,
    Peers = 8,
    Virtual = 9,
    RangeBytes = 10,
    Unmaps = 11,
}

/// The fake driver that is open in this process.
pub struct Fake {
    library: usize,
}

static FAKE: OnceLock<Fake> = OnceLock::new();

/// The one that `Fake::open` opened; none before that.
pub fn fake() -> Option<&'static Fake> {
    FAKE.get()
}

/// Compiles the fake driver into the test's own folder.
pub fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_driver");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_libcuda.so");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-std=c11", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&file);
    command.args(
        ["control.c", "device.c", "graph.c", "memory.c", "stream.c", "virtual_memory.c"].map(|name| root.join(name)),
    );
    command.args(["-ldl", "-lpthread"]);
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
    file
}

impl Fake {
    /// Opens the file and makes it the library's driver as well, which opens it with its first call.
    pub fn open(file: &Path) -> &'static Fake {
        std::env::set_var("NVB_LIBCUDA", file);
        FAKE.get_or_init(|| {
            let name = CString::new(file.as_os_str().as_bytes()).unwrap();
            // SAFETY: a NUL-terminated path; the fake driver has no initialisers.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            assert!(!library.is_null(), "{} does not open", file.display());
            Fake { library: library as usize }
        })
    }

    /// The function behind a name; `F` must be its type.
    pub unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        // SAFETY: an open library and a NUL-terminated name.
        let address = unsafe { libc::dlsym(self.library as *mut c_void, name.as_ptr()) };
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: function pointers have the size of an address, and the type is the caller's promise.
        (!address.is_null()).then(|| unsafe { std::mem::transmute_copy(&address) })
    }

    pub fn books(&self) -> Books {
        let mut books = Books::default();
        // SAFETY: the types of fake_driver.h, here and below.
        unsafe {
            let get: extern "C" fn(*mut Books) = self.function(c"fake_get_books").unwrap();
            get(&mut books);
        }
        books
    }

    fn text(&self, name: &CStr) -> String {
        // SAFETY: three functions of this type; their strings are the library's.
        unsafe {
            let get: extern "C" fn() -> *const c_char = self.function(name).unwrap();
            CStr::from_ptr(get()).to_str().unwrap().to_owned()
        }
    }

    pub fn violation(&self) -> String {
        self.text(c"fake_violation")
    }

    pub fn fault_function(&self) -> String {
        self.text(c"fake_fault_function")
    }

    pub fn functions_called(&self) -> Vec<String> {
        self.text(c"fake_functions_called").lines().map(str::to_owned).collect()
    }

    pub fn fail(&self, call: i64, status: i32, mode: Mode) {
        // SAFETY: as above.
        unsafe {
            let fail: extern "C" fn(i64, c_int, c_int) = self.function(c"fake_fail").unwrap();
            fail(call, status, mode as c_int);
        }
    }

    pub fn set(&self, setting: Setting, value: i64) {
        // SAFETY: as above.
        unsafe {
            let set: extern "C" fn(c_int, i64) = self.function(c"fake_set").unwrap();
            set(setting as c_int, value);
        }
    }

    /// What an engine that uses CUDA itself does: the device's context is current in this thread from now on.
    pub fn make_context_current(&self, device: i32) -> usize {
        let mut context = 0usize;
        // SAFETY: the driver's types of these functions.
        unsafe {
            let init: extern "C" fn(u32) -> c_int = self.function(c"cuInit").unwrap();
            let retain: extern "C" fn(*mut usize, c_int) -> c_int = self.function(c"cuDevicePrimaryCtxRetain").unwrap();
            let set_current: extern "C" fn(usize) -> c_int = self.function(c"cuCtxSetCurrent").unwrap();
            self.set(Setting::Devices, 1 + i64::from(device));
            assert_eq!((init(0), retain(&mut context, device), set_current(context)), (0, 0, 0));
        }
        context
    }

    /// This thread's calls are taken as those of a new thread.
    pub fn restore_capture_mode(&self) {
        // SAFETY: the driver's type of this function.
        unsafe {
            let set_mode: extern "C" fn(*mut c_int) -> c_int =
                self.function(c"cuThreadExchangeStreamCaptureMode").unwrap();
            assert_eq!(set_mode(&mut 0), 0);
        }
    }

    pub fn capture_mode(&self) -> i32 {
        // SAFETY: as above.
        unsafe {
            let get: extern "C" fn() -> c_int = self.function(c"fake_capture_mode").unwrap();
            get()
        }
    }

    pub fn current_context(&self) -> usize {
        // SAFETY: as above.
        unsafe {
            let get: extern "C" fn() -> usize = self.function(c"fake_current_context").unwrap();
            get()
        }
    }
}
