// C = alpha * op(A) * op(B) over a batch, op(X) = X or its transpose.
#pragma once

#include "../common/launch.h"

// op(A) [m, k], op(B) [k, n], C [m, n] for each of batch[0] * batch[1] matrices. Rows as they lie in memory are
// contiguous, with a stride between them; a transposed A lies as [k, m], a transposed B as [n, k]. Batch strides of A
// and B may be 0. Sums in f32, one rounding when C is stored.
//
// Supported: A and B of one float dtype, C of any; any extents up to 2^31 - 1, strides and alignment; at most 65535
// matrices along batch[0] * batch[1] and 65535 * 64 rows. C must not overlap A or B. The tensor-core kernel takes F16
// and BF16 from compute capability 8.0 on, everything else a plain kernel.
struct nvb_matmul_params {
  const void* a;
  const void* b;
  void* output;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t batch[2];
  int64_t a_batch_strides[2];  // in elements; so are all strides
  int64_t b_batch_strides[2];
  int64_t output_batch_strides[2];
  int64_t a_stride;
  int64_t b_stride;
  int64_t output_stride;
  uint32_t dtype;
  uint32_t output_dtype;
  uint32_t transpose_a;  // 0 or 1
  uint32_t transpose_b;  // 0 or 1
  float alpha;
  uint32_t reserved;
};

extern "C" {
cudaError_t nvb_cuda_matmul(const nvb_matmul_params* params, const nvb_launch* launch) noexcept;

// The kernel that nvb_cuda_matmul would run, a static string; "none" for what it answers without a kernel.
const char* nvb_cuda_matmul_kernel_name(const nvb_matmul_params* params, const nvb_launch* launch) noexcept;
}
