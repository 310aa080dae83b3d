// cluster_places.h, by the runtime's calculator for a kernel that shared memory limits.
#include <algorithm>
#include <atomic>

#include "cluster_places.h"

namespace nvb {
namespace {

constexpr int kMostBlocks = 16;     // of a cluster
constexpr int kPortableBlocks = 8;  // that every device of 9.0 and later has
constexpr int kDevices = 64;

__global__ void occupant() {}  // never launched

// 0: the calculator has no answer.
int ask(const nvb_launch& launch, int cluster) {
  if (cudaFuncSetAttribute(occupant, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes_per_block) !=
      cudaSuccess) {
    return 0;
  }
  if (cluster > kPortableBlocks &&
      cudaFuncSetAttribute(occupant, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
    return 0;
  }
  cudaLaunchAttribute shape;
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim.x = static_cast<unsigned>(cluster);
  shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(cluster * std::max(launch.multiprocessors, 1)));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes_per_block);
  config.attrs = &shape;
  config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, occupant, &config) == cudaSuccess ? clusters : 0;
}

}  // namespace

int cluster_places(const nvb_launch& launch, int cluster) {
  if (cluster > kPortableBlocks && launch.capability < 90) return 0;
  if (cluster <= 1 || launch.capability < 90) return std::max(launch.multiprocessors / std::max(cluster, 1), 1);
  static std::atomic<int> answers[kDevices][kMostBlocks];  // and one; 0: not asked yet
  int device = 0;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess && device >= 0 && device < kDevices && cluster <= kMostBlocks;
  std::atomic<int>* const answer = known ? &answers[device][cluster - 1] : nullptr;
  const int earlier = known ? answer->load(std::memory_order_relaxed) : 0;
  if (earlier > 0) return earlier - 1;
  int places = known ? ask(launch, cluster) : 0;
  if (places <= 0) {
    static_cast<void>(cudaGetLastError());
    places = cluster > kPortableBlocks ? 0 : std::max(launch.multiprocessors * 85 / 100 / cluster, 1);
  }
  // The first answer stays: products are divided by it, and their sums should not change from one call to the next.
  int first = 0;
  const bool kept = known && !answer->compare_exchange_strong(first, places + 1, std::memory_order_relaxed);
  return kept ? first - 1 : places;
}

}  // namespace nvb
