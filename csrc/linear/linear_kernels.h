// The host side of each kernel family, for the dispatcher in linear.cu. Parameters are valid (linear.cu checks them).
#pragma once

#include "linear.h"

namespace nvb {

// linear_gemv.cuh: 1 ≤ m ≤ 8, W of dtype Weight; picks the aligned or the element-wise form.
template <typename Weight>
cudaError_t launch_linear_gemv(const nvb_linear_params& params, const nvb_launch& launch);
bool linear_gemv_is_aligned(const nvb_linear_params& params);

// linear_gemv_ring.cu: m = 1, compute capability 9.0; x and W of dtype T, aligned; what linear_gemv_ring_supports.
template <typename T>
cudaError_t launch_linear_gemv_ring(const nvb_linear_params& params, const nvb_launch& launch);
bool linear_gemv_ring_supports(const nvb_linear_params& params, const nvb_launch& launch);

// linear_skinny.cuh: 1 ≤ m ≤ 8 on tensor cores; x and W of dtype T, aligned.
template <typename T>
cudaError_t launch_linear_skinny(const nvb_linear_params& params, const nvb_launch& launch);

// linear_skinny_ring.cu: 1 ≤ m ≤ 8 on tensor cores, compute capability 9.0; x and W of dtype T, aligned; what
// linear_skinny_ring_supports.
template <typename T>
cudaError_t launch_linear_skinny_ring(const nvb_linear_params& params, const nvb_launch& launch);
bool linear_skinny_ring_supports(const nvb_linear_params& params, const nvb_launch& launch);

// linear_mma.cuh: any m on tensor cores; x and W of dtype T, aligned.
enum class MmaTile { k16x32, k16x32Ordered, k32x32, k64x64, k128x128 };
template <typename T>
cudaError_t launch_linear_mma(const nvb_linear_params& params, const nvb_launch& launch, MmaTile tile);

// linear_simt.cu: everything.
cudaError_t launch_linear_simt(const nvb_linear_params& params, const nvb_launch& launch);

}  // namespace nvb
