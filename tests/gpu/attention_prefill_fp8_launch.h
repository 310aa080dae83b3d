// The launcher of FP8, which can be given dtypes that nobody else has yet.
#ifndef NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_FP8_LAUNCH_H
#define NVBACKEND_TESTS_GPU_ATTENTION_PREFILL_FP8_LAUNCH_H
#include "attention_prefill_cases.h"
namespace nvb {
namespace prefill_fp8 {
cudaError_t launch_prefill_fp8(const nvb_attention_prefill_params& p, bool is_e5m2, const nvb_launch& launch);
}
}
#endif
