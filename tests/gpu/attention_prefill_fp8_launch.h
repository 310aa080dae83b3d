// Launches a case of FP8 with the kernel's own launcher, which can be given dtypes and scales that nobody else has yet.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_FP8_LAUNCH_H
#define NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_FP8_LAUNCH_H
#include "attention_prefill_cases.h"
namespace nvb {
namespace prefill_fp8 {
struct Scales {
  const float *query = nullptr, *key = nullptr, *value = nullptr;
  int query_stride = 0, key_stride = 0, value_stride = 0;
};
cudaError_t launch_prefill_fp8(const nvb_attention_prefill_params& p, int value_dim, bool is_e5m2, const Scales& scales,
                               const nvb_launch& launch);
}
}
namespace attention_cases {
inline cudaError_t launch_fp8(const nvb_attention_prefill_params& p, const Case& test, const float* scales,
                              const nvb_launch& launch) {
  nvb::prefill_fp8::Scales s;
  if (test.scales) s = {scales, scales + test.kv_heads, scales + 2 * test.kv_heads, 1, 1, 1};
  return nvb::prefill_fp8::launch_prefill_fp8(p, test.value_dim, test.dtype == kE5m2, s, launch);
}
}
#endif
