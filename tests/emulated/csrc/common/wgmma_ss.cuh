// In the place of csrc/common/wgmma_ss.cuh: what a pipeline of bulk tensor copies is made of.
#pragma once

#include "wgmma.cuh"

namespace nvb {

template <int Stages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

inline void prefetch_tensor_map(const CUtensorMap*) {}
inline void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
  emulated::copy(shared, map, {x, y, z}, barrier);
}
inline void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z, int w, uint64_t* barrier) {
  emulated::copy(shared, map, {x, y, z, w}, barrier);
}

}  // namespace nvb
