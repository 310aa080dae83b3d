// What every launcher receives besides its own argument struct, and the integer codes shared with Rust.
//
// A launcher is `extern "C" cudaError_t nvb_cuda_<operation>(const nvb_<operation>_params*, const nvb_launch*)
// noexcept`. It only enqueues on launch->stream: it never allocates, synchronises or reads host memory after it
// returns, so every launcher may be called while the stream is being captured. Rust (src/cuda/) checks shapes, dtypes
// and alignment before the call; a launcher answers cudaErrorInvalidValue for a combination that it has no kernel for.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

// Data types, the values of NVB_DTYPE_* in include/nvbackend.h.
enum nvb_dtype_code : uint32_t {
  NVB_F32 = 1,
  NVB_F16 = 2,
  NVB_BF16 = 3,
  NVB_I32 = 4,
  NVB_F8_E4M3 = 5,  // keys and values in a cache: largest 448, no infinity, 0x7f and 0xff are NaN
  NVB_F8_E5M2 = 6,  // the same, largest finite 57344, with infinities
  NVB_KV_INT8 = 7,  // rows of a cache with scales of their own, as are the two below: kv_row.cuh
  NVB_KV_Q8_0 = 8,
  NVB_KV_Q4_0 = 9,
};

// Activations, the values of NVB_ACTIVATION_*.
enum nvb_activation_code : uint32_t {
  NVB_NONE = 0,
  NVB_GELU_TANH = 1,
  NVB_GELU_ERF = 2,
  NVB_SILU = 3,
};

// The device as the launcher may use it. `capability` is 10 * major + minor; NVB_FORCE_ARCH lowers it, so a launcher
// must choose its kernel by this field and by nothing else.
struct nvb_launch {
  cudaStream_t stream;
  int32_t capability;
  int32_t multiprocessors;
  int32_t shared_bytes_per_block;  // the opt-in maximum
  int32_t l2_bytes;
};
