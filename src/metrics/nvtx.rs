//! NVTX ranges around operations, for whoever is profiled: Nsight Systems and Nsight Compute show them by name.
//!
//! A profiler announces itself by naming its library in NVTX_INJECTION64_PATH. That library asks for our table of
//! function pointers and fills it in (the protocol of NVTX 3, nvtxTypes.h and nvtxInit.h). Without a profiler a range
//! costs one load.

use crate::fork::PerProcess;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::OnceLock;

/// `NvtxFunctionPointer`, filled in by the profiler.
type Slot = AtomicPtr<c_void>;

/// Entries of the largest module: 0 is invalid, the others are functions.
const MOST_ENTRIES: usize = 16;
/// `NVTX_CBID_CORE_…`
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;
/// `NVTX_CB_MODULE_…`: of invalid, core, CUDA, OpenCL, CUDA runtime, core 2 and synchronisation, how many entries each has. A
/// profiler may want to see all of them, though only functions of the core are called here.
const MODULE_CORE: usize = 1;
const MODULES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const TABLE_CALLBACKS: u32 = 1;
const TABLE_VERSION: u32 = 3;

static SLOTS: [[Slot; MOST_ENTRIES]; MODULES.len()] =
    [const { [const { AtomicPtr::new(std::ptr::null_mut()) }; MOST_ENTRIES] }; MODULES.len()];

/// The profiler reads an array of pointers to a module's slots, the first and one past the last being NULL.
struct Tables([[*const Slot; MOST_ENTRIES + 1]; MODULES.len()]);
// SAFETY: addresses of statics.
unsafe impl Sync for Tables {}

static TABLES: Tables = Tables({
    let mut tables = [[std::ptr::null(); MOST_ENTRIES + 1]; MODULES.len()];
    let mut module = 0;
    while module < MODULES.len() {
        let mut place = 1;
        while place < MODULES[module] {
            tables[module][place] = &SLOTS[module][place] as *const Slot;
            place += 1;
        }
        module += 1;
    }
    tables
});

/// `NvtxExportTableCallbacks`
#[repr(C)]
struct Callbacks {
    struct_size: usize,
    get_module_function_table: extern "C" fn(c_int, *mut *const *const Slot, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { struct_size: size_of::<Callbacks>(), get_module_function_table };
static VERSION: VersionInfo =
    VersionInfo { struct_size: size_of::<VersionInfo>(), version: 3, reserved: 0, set_injection_version };

extern "C" fn get_module_function_table(module: c_int, table: *mut *const *const Slot, size: *mut c_uint) -> c_int {
    let Some(module) = usize::try_from(module).ok().filter(|&module| module >= MODULE_CORE && module < MODULES.len())
    else {
        return 0;
    };
    // SAFETY: NULL or valid for writing, by NVTX's contract.
    unsafe {
        if !size.is_null() {
            size.write(MODULES[module] as c_uint);
        }
        if !table.is_null() {
            table.write(TABLES.0[module].as_ptr());
        }
    }
    1
}

/// NVTX asks for it and has no use for it yet.
extern "C" fn set_injection_version(_version: u32) {}

extern "C" fn get_export_table(id: u32) -> *const c_void {
    match id {
        TABLE_CALLBACKS => (&raw const CALLBACKS).cast(),
        TABLE_VERSION => (&raw const VERSION).cast(),
        _ => std::ptr::null(),
    }
}

type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;

/// Whether a profiler took the table. Asked for once a process.
fn attached() -> bool {
    static ATTACHED: PerProcess<OnceLock<bool>> = PerProcess::new(OnceLock::new);
    *ATTACHED.get_or_init(|| {
        // A process that runs with another user's rights opens no file that its environment names.
        // SAFETY: no pointers.
        if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 {
            return false;
        }
        let Some(path) = std::env::var("NVTX_INJECTION64_PATH").ok().and_then(|path| CString::new(path).ok()) else {
            return false;
        };
        let Some(initialize) = open(&path) else {
            log::warn!(target: "nvbackend::metrics", "no NVTX ranges: {path:?} is no profiler's library");
            return false;
        };
        // SAFETY: the function that a profiler's library exports for this call.
        unsafe { initialize(get_export_table) != 0 }
    })
}

fn open(path: &CStr) -> Option<Initialize> {
    // SAFETY: NUL-terminated strings; the library stays open, as it keeps our table.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_LAZY);
        if library.is_null() {
            return None;
        }
        let symbol = libc::dlsym(library, c"InitializeInjectionNvtx2".as_ptr());
        (!symbol.is_null()).then(|| std::mem::transmute::<*mut c_void, Initialize>(symbol))
    }
}

/// Ends when dropped, in the thread that began it.
pub struct Range {
    pushed: bool,
}

/// Begins a range named `label` in this thread, if a profiler is attached.
pub fn range(label: &'static CStr) -> Range {
    Range { pushed: attached() && push(label) }
}

fn push(label: &CStr) -> bool {
    let function = SLOTS[MODULE_CORE][RANGE_PUSH_A].load(Ordering::Acquire);
    if function.is_null() {
        return false;
    }
    // SAFETY: the profiler's nvtxRangePushA.
    unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_int>(function)(label.as_ptr())
    };
    true
}

impl Drop for Range {
    fn drop(&mut self) {
        let function = SLOTS[MODULE_CORE][RANGE_POP].load(Ordering::Acquire);
        if self.pushed && !function.is_null() {
            // SAFETY: the profiler's nvtxRangePop; the range was begun.
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(function)() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn pushed(text: *const c_char) -> c_int {
        SEEN.lock().unwrap().push(CStr::from_ptr(text).to_str().unwrap().to_string());
        0
    }

    unsafe extern "C" fn popped() -> c_int {
        SEEN.lock().unwrap().push("end".to_string());
        0
    }

    /// What a profiler does with the table.
    unsafe extern "C" fn profiler(export_table: extern "C" fn(u32) -> *const c_void) -> c_int {
        assert!(export_table(2).is_null());
        let version = &*export_table(TABLE_VERSION).cast::<VersionInfo>();
        assert_eq!((version.struct_size, version.version), (24, 3));
        (version.set_injection_version)(3);
        let callbacks = &*export_table(TABLE_CALLBACKS).cast::<Callbacks>();
        let (mut table, mut size) = (std::ptr::null(), 0);
        for unknown in [-1, 0, 7] {
            assert_eq!((callbacks.get_module_function_table)(unknown, &mut table, &mut size), 0);
        }
        for module in (1..7).rev() {
            assert_eq!((callbacks.get_module_function_table)(module, &mut table, &mut size), 1);
            assert!((*table).is_null() && !(*table.add(1)).is_null() && (*table.add(size as usize)).is_null());
        }
        assert_eq!(size, 16, "the core's");
        (**table.add(RANGE_PUSH_A)).store(pushed as *mut c_void, Ordering::Release);
        (**table.add(RANGE_POP)).store(popped as *mut c_void, Ordering::Release);
        1
    }

    #[test]
    fn a_profiler_sees_ranges_begin_and_end() {
        assert!(!push(c"before"), "nobody listens");
        assert_eq!(unsafe { profiler(get_export_table) }, 1);
        let range = Range { pushed: push(c"nvbackend::linear") };
        drop(range);
        drop(Range { pushed: false });
        assert_eq!(*SEEN.lock().unwrap(), ["nvbackend::linear", "end"]);
        assert!(open(c"/no/such/profiler.so").is_none());
        assert!(open(c"libc.so.6").is_none(), "a library that is no profiler's");
    }
}
