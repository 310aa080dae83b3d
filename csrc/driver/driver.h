// The CUDA driver, opened on first use.
//
// The `cust` crate links libcuda.so.1, which exists only where an NVIDIA driver is installed; a library that needs it
// does not even load elsewhere. This folder defines every `cu*` function that cust or src/ names as a hidden trampoline
// (trampolines_<machine>.S) that looks the real function up when it is first called. `-lcuda` itself resolves to the
// empty linker script lib64/libcuda.so, which .cargo/config.toml shows to cust's build script.
//
// Where there is no driver every call returns CUDA_ERROR_NO_DEVICE; a function that an older driver lacks returns
// CUDA_ERROR_NOT_FOUND; a status that is newer than cust's enum becomes CUDA_ERROR_UNKNOWN, because a Rust enum must
// not hold a value that it does not name, and nvb_driver_unnamed_status has its number.
//
// The environment variable NVB_LIBCUDA names another file to open instead of libcuda.so.1 (tests use it for a fake
// driver). It is read once, with the first call, and never in a set-user-id process.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

// 1 if the driver's library is open, 0 if it could not be opened. Opens it if nothing has yet. Any thread.
int nvb_driver_loaded(void);

// Why it is not: the dynamic loader's message, which names the file. Empty if it is open. Lives as long as the process.
const char* nvb_driver_error(void);

// The driver's function of this name, or null if it lacks it or is not open. For functions newer than the trampolines.
// Any thread.
void* nvb_driver_function(const char* name);

// 1 if the driver has a function of this name, 0 if it lacks it or is not open. Any thread.
int nvb_driver_has(const char* name);

// The number behind the CUDA_ERROR_UNKNOWN that a call of this thread has just returned; 0 if the driver said exactly
// that.
int nvb_driver_unnamed_status(void);

#ifdef __cplusplus
}
#endif
