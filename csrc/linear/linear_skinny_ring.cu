// Which plan linear_skinny_ring takes, and its kernels: up to 8 and up to 16 tokens, short and long parts of k.
#include "linear_skinny_ring.cuh"

namespace nvb {
namespace skinny_ring {

constexpr bool kOwnRings = false;
constexpr int kMostSlots = 4;
constexpr int kEarlySlots = kMostSlots;
constexpr int kSharedBytes = 112 << 10;  // leaves room beside it for a block of the grid before or of the next

template <int Tiles, int Units>
using Kernel = Shape<Tiles, Units, 8, kOwnRings>;

// As many slots as leave room for another grid; two if there is none.
template <typename Shape>
bool make_plan_of(const nvb_linear_params& p, const nvb_launch& launch, int cluster, SkinnyRingPlan& plan) {
  for (int slots = kMostSlots; slots >= 2; --slots) {
    if (!make_plan<Shape>(p, launch, cluster, slots, kEarlySlots, plan)) continue;
    if (plan.bytes <= kSharedBytes || slots == 2) return true;
  }
  return false;
}

// Calls `use` with the shape and the plan in the smallest clusters that do; false if there are none.
template <int Tiles, typename Use>
bool with_plan(const nvb_linear_params& p, const nvb_launch& launch, const Use& use) {
  SkinnyRingPlan plan;
  for (int cluster = 1; cluster <= 4; cluster *= 2) {
    if (make_plan_of<Kernel<Tiles, 10>>(p, launch, cluster, plan)) return use(Kernel<Tiles, 10>{}, plan), true;
    if (make_plan_of<Kernel<Tiles, 20>>(p, launch, cluster, plan)) return use(Kernel<Tiles, 20>{}, plan), true;
  }
  return false;
}

template <typename Use>
bool with_plan(const nvb_linear_params& p, const nvb_launch& launch, const Use& use) {
  return p.m <= 8 ? with_plan<1>(p, launch, use) : with_plan<2>(p, launch, use);
}

}  // namespace skinny_ring

bool linear_skinny_ring_takes(const nvb_linear_params& params, const nvb_launch& launch) {
  return params.n >= 1 && params.m >= 1 &&
         skinny_ring::with_plan(params, launch, [](auto, const skinny_ring::SkinnyRingPlan&) {});
}

template <typename T>
cudaError_t launch_linear_skinny_ring(const nvb_linear_params& params, const nvb_launch& launch) {
  cudaError_t error = cudaErrorInvalidValue;
  skinny_ring::with_plan(params, launch, [&](auto shape, const skinny_ring::SkinnyRingPlan& plan) {
    error = skinny_ring::launch_plan<T, decltype(shape)>(params, launch, plan);
  });
  return error;
}

template cudaError_t launch_linear_skinny_ring<__half>(const nvb_linear_params&, const nvb_launch&);
template cudaError_t launch_linear_skinny_ring<__nv_bfloat16>(const nvb_linear_params&, const nvb_launch&);

}  // namespace nvb
