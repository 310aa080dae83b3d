// Philox4x32, the counter-based random generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
// as 1, 2, 3" (SC'11): rounds of two 32x32->64 multiplications; the key grows by a Weyl constant between rounds. Ten
// are the paper's default, seven the fewest that pass all of its tests. The same (counter, key) gives the same four
// words on every machine.
//
// Known answers of ten rounds, from the vectors published with the paper's library (counter; key; result):
//   00000000 00000000 00000000 00000000; 00000000 00000000; 6627e8d5 e169c58d bc57ac4c 9b00dbd8
//   ffffffff ffffffff ffffffff ffffffff; ffffffff ffffffff; 408f276d 41c83b0e a20bc7c6 6d5451fd
//   243f6a88 85a308d3 13198a2e 03707344; a4093822 299f31d0; d16cfe09 94fdcceb 5001e420 24126ea1
#pragma once

#include <stdint.h>
#include <vector_types.h>

namespace nvb {

template <int Rounds>
__host__ __device__ inline uint4 philox4x32(uint4 counter, uint2 key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;  // the golden ratio
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1
  for (int round = 0; round < Rounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter.x;
    const uint64_t product1 = kMultiplier1 * counter.z;
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key.x, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key.y, static_cast<uint32_t>(product0)};
    key.x += kWeyl0;
    key.y += kWeyl1;
  }
  return counter;
}

}  // namespace nvb
