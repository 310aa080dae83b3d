// The kernels of attention_prefill_fp8.cpp, which csrc/instances.rs makes for the device.
#include "attention/sm90/attention_prefill_fp8.cuh"

namespace nvb {
namespace prefill_fp8 {

#define NVB_TILE(TILE)                                                                                    \
  template cudaError_t launch_tile<__nv_fp8_e4m3, tiles::TILE>(const Arguments&, int, const nvb_launch&); \
  template cudaError_t launch_tile<__nv_fp8_e5m2, tiles::TILE>(const Arguments&, int, const nvb_launch&)
NVB_TILE(D64);
NVB_TILE(D128);
NVB_TILE(D128_LONG);
NVB_TILE(D256);

}  // namespace prefill_fp8
}  // namespace nvb
