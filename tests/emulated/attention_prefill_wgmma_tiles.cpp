// The kernels of attention_prefill_wgmma.cpp, which csrc/instances.rs makes for the device.
#include "attention/sm90/attention_prefill_wgmma.cuh"

namespace nvb {
namespace prefill_wgmma {

#define NVB_TILE(TILE)                                                                             \
  template cudaError_t launch_tile<__half, tiles::TILE>(const Arguments&, int, const nvb_launch&); \
  template cudaError_t launch_tile<__nv_bfloat16, tiles::TILE>(const Arguments&, int, const nvb_launch&)
NVB_TILE(D64);
NVB_TILE(D64_SHORT);
NVB_TILE(D96);
NVB_TILE(D128);
NVB_TILE(D128_FULL);
NVB_TILE(D192);
NVB_TILE(D192_128);
NVB_TILE(D256);
NVB_TILE(D64_SCORES);
NVB_TILE(D128_SCORES);
NVB_TILE(D256_SCORES);

}  // namespace prefill_wgmma
}  // namespace nvb
