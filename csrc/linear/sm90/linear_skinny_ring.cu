// The plan of linear_skinny_ring, and its kernels: a ring a warp or a ring a block, short and long parts of k.
#include "linear_skinny_ring.cuh"

namespace nvb {
namespace skinny_ring {

// Against a ring a block, a ring a warp took 5 to 7 % less at 20480 x 2560, 32768 x 2560 and 128256 x 4096, 1 % less at
// 14336 x 4096, 3 % more at 8192 x 5120, but a fifth more at 262144 x 2560.
bool has_own_rings(const nvb_linear_params& p) {
  return p.k <= 5120 && (p.k > 2560 || p.n <= 65536);
}

template <int Units, bool Own, typename Use>
bool with_slots(const nvb_linear_params& p, const nvb_launch& launch, const Use& use) {
  using std::bool_constant;
  using std::integral_constant;
  SkinnyRingPlan plan;
  for (int slots = 3; slots >= 2; --slots) {
    if (!make_plan<Units, Own>(p, launch, slots, plan)) continue;
    use(integral_constant<int, Units>{}, bool_constant<Own>{}, plan);
    return true;
  }
  return false;
}

// Calls `use` with the kernel's two constants and the plan; false if there is none.
template <typename Use>
bool with_plan(const nvb_linear_params& p, const nvb_launch& launch, const Use& use) {
  const bool is_short = p.k <= 10 * kWarps * kUnit;
  if (has_own_rings(p)) return is_short ? with_slots<10, true>(p, launch, use) : with_slots<20, true>(p, launch, use);
  return is_short ? with_slots<10, false>(p, launch, use) : with_slots<20, false>(p, launch, use);
}

}  // namespace skinny_ring

bool linear_skinny_ring_supports(const nvb_linear_params& params, const nvb_launch& launch) {
  return params.n >= 1 && params.m >= 1 && skinny_ring::with_plan(params, launch, [](auto, auto, const auto&) {});
}

template <typename T>
cudaError_t launch_linear_skinny_ring(const nvb_linear_params& params, const nvb_launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  skinny_ring::with_plan(params, launch, [&](auto units, auto own, const skinny_ring::SkinnyRingPlan& plan) {
    error = skinny_ring::launch_plan<T, decltype(units)::value, decltype(own)::value>(params, launch, plan);
  });
  return error;
}

template cudaError_t launch_linear_skinny_ring<__half>(const nvb_linear_params&, const nvb_launch&);
template cudaError_t launch_linear_skinny_ring<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&);

}  // namespace nvb
