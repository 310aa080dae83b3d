// nvb_cuda_linear: checks the parameters and picks the kernel, the first row of the table that fits.
#include "../common/linear_epilogue.cuh"
#include "../common/vector.cuh"
#include "linear_kernels.h"
#include "linear_table.h"

namespace nvb {
namespace {

constexpr int64_t kMaxK = int64_t{1} << 30;  // the kernels step along k in 32 bits

bool is_valid(const nvb_linear_params& p) {
  const bool dtypes = float_dtype_bytes(p.input_dtype) != 0 && float_dtype_bytes(p.weight_dtype) != 0 &&
                      float_dtype_bytes(p.output_dtype) != 0 &&
                      (p.bias == nullptr || float_dtype_bytes(p.bias_dtype) != 0) && is_valid_residual(p) &&
                      (p.input_dtype == p.weight_dtype || p.input_dtype == NVB_F32);
  return dtypes && p.m >= 0 && p.n >= 0 && p.k >= 0 && p.k <= kMaxK && p.gated <= 1 && (p.gated == 0 || p.n % 2 == 0) &&
         p.activation <= NVB_SILU;
}

// Rows of x and W start 16-byte aligned, and k is whole vectors of W. The stride of a single row is never used.
bool rows_are_aligned(const nvb_linear_params& p) {
  const int input_bytes = float_dtype_bytes(p.input_dtype);
  const int weight_bytes = float_dtype_bytes(p.weight_dtype);
  return p.k * weight_bytes % 16 == 0 && is_aligned16(p.input, p.m == 1 ? 0 : p.input_stride, input_bytes) &&
         is_aligned16(p.weight, p.n == 1 ? 0 : p.weight_stride, weight_bytes);
}

bool fits_tensor_cores(const nvb_linear_params& p, const nvb_launch& launch) {
  return launch.capability >= 80 && p.input_dtype == p.weight_dtype && p.weight_dtype != NVB_F32 && rows_are_aligned(p);
}

int64_t tiles(const nvb_linear_params& p, int64_t block_m, int64_t block_n) {
  return ((p.m + block_m - 1) / block_m) * ((p.n + block_n - 1) / block_n);
}

using Params = const nvb_linear_params&;
using Launch = const nvb_launch&;

struct Kernel {
  const char* name;
  bool (*fits)(Params, Launch);
  cudaError_t (*launch)(Params, Launch);
  bool (*supports)(Params, Launch) = nullptr;  // where the kernel can do more than it is chosen for
};

cudaError_t launch_gemv(Params p, Launch launch) {
  if (p.weight_dtype == NVB_F16) return launch_linear_gemv<__half>(p, launch);
  if (p.weight_dtype == NVB_BF16) return launch_linear_gemv<__nv_bfloat16>(p, launch);
  return launch_linear_gemv<float>(p, launch);
}

bool supports_ring(Params p, Launch launch) {
  return launch.capability >= 90 && p.m == 1 && fits_tensor_cores(p, launch) && linear_gemv_ring_supports(p, launch);
}

// Measured from 1536 x 1152 to 3840 x 15360, and with few short rows: Gemma 3 270M, whose qkv product has 1536 x 640
// and gate and up 4096 x 640, takes 515 µs a replayed step with this kernel for both and 568 with linear_gemv, which
// asks for W in L2 alone before its wait. Heads of 262144 rows of 640, 1152 and 2560 save 7 to 11 µs of 96, 149 and 309
// in such a step; longer rows were as fast by linear_gemv.
bool fits_ring(Params p, Launch launch) {
  constexpr int64_t kMost = int64_t{1} << 26;  // elements
  if (!supports_ring(p, launch) || p.k < 512) return false;
  if (p.n * p.k > kMost) return p.k <= 2560 && launch.capability == 90;
  return p.k >= 1024 || p.n <= 8192;
}

cudaError_t launch_ring(Params p, Launch launch) {
  return p.weight_dtype == NVB_F16 ? launch_linear_gemv_ring<__half>(p, launch)
                                   : launch_linear_gemv_ring<__nv_bfloat16>(p, launch);
}

bool supports_skinny_ring(Params p, Launch launch) {
  return launch.capability >= 90 && p.m <= 8 && fits_tensor_cores(p, launch) && linear_skinny_ring_supports(p, launch);
}

// Where it was measured to take less time than linear_gemv (2 rows) and linear_skinny (linear_skinny_ring.cuh has the
// figures): 4 to 11 % from 10240 x 2560 to 28672 x 4096 (1 % at 20480 x 2560 and 2 rows); 1 to 14 % for larger weights,
// but nothing at 2 rows; 4 to 10 % from 2560 x 10240 to 5120 x 8192, in clusters. Smaller weights had nothing to gain.
bool fits_skinny_ring(Params p, Launch launch) {
  constexpr int64_t kLeast = int64_t{10240} * 2560;
  constexpr int64_t kMost = int64_t{1} << 26;  // at 2 rows and in clusters
  if (!supports_skinny_ring(p, launch)) return false;
  const int64_t elements = p.n * p.k;
  if (elements < kLeast) return false;
  if (p.k >= 8192) return p.m >= 3 && elements <= kMost;
  return p.k >= 2048 && p.k <= 5120 && p.m >= (elements <= kMost ? 2 : 3);
}

cudaError_t launch_skinny_ring(Params p, Launch launch) {
  return p.weight_dtype == NVB_F16 ? launch_linear_skinny_ring<__half>(p, launch)
                                   : launch_linear_skinny_ring<__nv_bfloat16>(p, launch);
}

bool supports_skinny(Params p, Launch launch) {
  return p.m <= 8 && fits_tensor_cores(p, launch);
}

// From three tokens on the f32 units would issue more instructions than tensor cores need (linear_skinny.cuh). At two,
// linear_gemv reads faster unless its blocks end in a short second or third wave: 4096 x 2560 takes it 9.8 µs and
// 13824 x 1152 14.1, where linear_skinny needs 7.6 and 12.3. One wave does for 2560 x 2048, and a long one for larger
// weights (15.7 and 15.8 for 2560 x 10240).
bool fits_skinny(Params p, Launch launch) {
  const bool short_waves = launch.capability >= 90 && p.n >= 4096 && p.k >= 1024 && p.n * p.k <= int64_t{1} << 24;
  return supports_skinny(p, launch) && p.m >= (short_waves ? 2 : 3);
}

cudaError_t launch_skinny(Params p, Launch launch) {
  return p.weight_dtype == NVB_F16 ? launch_linear_skinny<__half>(p, launch)
                                   : launch_linear_skinny<__nv_bfloat16>(p, launch);
}

template <MmaTile Tile>
cudaError_t launch_mma(Params p, Launch launch) {
  return p.weight_dtype == NVB_F16 ? launch_linear_mma<__half>(p, launch, Tile)
                                   : launch_linear_mma<__nv_bfloat16>(p, launch, Tile);
}

// The dispatcher does not choose this kernel; it is asked for by name alone.
bool never(Params, Launch) {
  return false;
}

// Larger tiles read x and W fewer times, smaller ones give every multiprocessor work: a tile is taken once it fills a
// good part of the device.
constexpr Kernel kKernels[] = {
    {"linear_skinny_ring", fits_skinny_ring, launch_skinny_ring, supports_skinny_ring},
    {"linear_skinny", fits_skinny, launch_skinny, supports_skinny},
    {"linear_gemv_ring", fits_ring, launch_ring, supports_ring},
    {"linear_gemv", [](Params p, Launch) { return p.m <= 8 && rows_are_aligned(p); }, launch_gemv},
    {"linear_gemv_unaligned", [](Params p, Launch) { return p.m <= 8; }, launch_gemv},
    {"linear_mma_16x32", [](Params p, Launch l) { return p.m <= 16 && fits_tensor_cores(p, l); },
     launch_mma<MmaTile::k16x32>, fits_tensor_cores},
    {"linear_mma_16x32_ordered", never, launch_mma<MmaTile::k16x32Ordered>, fits_tensor_cores},
    {"linear_mma_128x128",
     [](Params p, Launch l) { return fits_tensor_cores(p, l) && tiles(p, 128, 128) * 4 >= l.multiprocessors * 3; },
     launch_mma<MmaTile::k128x128>, fits_tensor_cores},
    {"linear_mma_64x64",
     [](Params p, Launch l) {
       return p.m > 32 && fits_tensor_cores(p, l) && tiles(p, 64, 64) * 2 >= l.multiprocessors;
     },
     launch_mma<MmaTile::k64x64>, fits_tensor_cores},
    {"linear_mma_32x32", fits_tensor_cores, launch_mma<MmaTile::k32x32>},
    {"linear_simt", [](Params, Launch) { return true; }, launch_linear_simt},
};

const Kernel& choose(Params params, Launch launch) {
  const Kernel* kernel = kKernels;
  while (!kernel->fits(params, launch)) ++kernel;
  return *kernel;
}

bool is_kernel(int32_t index) {
  return index >= 0 && index < static_cast<int32_t>(sizeof kKernels / sizeof *kKernels);
}

bool supports(int32_t index, Params params, Launch launch) {
  const Kernel& kernel = kKernels[index];
  return (kernel.supports != nullptr ? kernel.supports : kernel.fits)(params, launch);
}

}  // namespace

bool linear_gemv_is_aligned(const nvb_linear_params& params) {
  return rows_are_aligned(params);
}

}  // namespace nvb

extern "C" cudaError_t nvb_cuda_linear(const nvb_linear_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params)) return cudaErrorInvalidValue;
  if (params->m == 0 || params->n == 0) return cudaSuccess;
  return nvb::choose(*params, *launch).launch(*params, *launch);
}

extern "C" const char* nvb_cuda_linear_kernel_name(const nvb_linear_params* params, const nvb_launch* launch) noexcept {
  if (!nvb::is_valid(*params) || params->m == 0 || params->n == 0) return "none";
  return nvb::choose(*params, *launch).name;
}

extern "C" const char* nvb_cuda_linear_kernel_at(int32_t index) noexcept {
  return nvb::is_kernel(index) ? nvb::kKernels[index].name : nullptr;
}

extern "C" int32_t nvb_cuda_linear_kernel_supports(int32_t index, const nvb_linear_params* params,
                                                   const nvb_launch* launch) noexcept {
  return nvb::is_kernel(index) && nvb::is_valid(*params) && nvb::supports(index, *params, *launch);
}

extern "C" cudaError_t nvb_cuda_linear_launch(int32_t index, const nvb_linear_params* params,
                                              const nvb_launch* launch) noexcept {
  if (!nvb_cuda_linear_kernel_supports(index, params, launch)) return cudaErrorInvalidValue;
  if (params->m == 0 || params->n == 0) return cudaSuccess;
  return nvb::kKernels[index].launch(*params, *launch);
}
