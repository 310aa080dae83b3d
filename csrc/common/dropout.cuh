// Which weights of attention are dropped (src/operation/attention/dropout.rs). Of 64 keys that begin at a multiple of
// 64, four blocks of philox4x32<7>, of the counters {number, row, head | offset high << 16, offset low} and the seed,
// have a byte each: key k that of block k / 64 * 4 + k % 8 / 2 at place k % 64 / 8 * 2 + k % 2, the least significant
// byte first. A weight is dropped where its byte is below the threshold, of 1 to 255. So the keys of one block are
// those of which a thread has the scores in the accumulators of mma and wgmma.
#pragma once

#include "philox.cuh"

namespace nvb {

inline constexpr int kDropoutKeys = 64;  // that four blocks of random numbers serve

__host__ __device__ inline uint32_t dropout_block(uint32_t key) {
  return key / 64 * 4 + key % 8 / 2;
}
__host__ __device__ inline uint32_t dropout_byte(uint32_t key) {
  return key % 64 / 8 * 2 + key % 2;
}

__host__ __device__ inline uint4 dropout_words(uint4 counter, uint2 seed) {
  return philox4x32<7>(counter, seed);
}

// The highest bit of each byte of `word` that is not below the threshold; the other bits are anything. The low seven
// bits reach those of the threshold where the sum carries into the eighth.
__host__ __device__ inline uint32_t kept_bytes(uint32_t word, uint32_t threshold) {
  const uint32_t carried = (word & 0x7f7f7f7fu) + (128 - (threshold & 127)) * 0x01010101u;
  const uint32_t either = threshold < 128 ? ~0u : 0u;
  return (word & carried) | (either & (word | carried));
}

// A mask for a pair of 16 bits each: ones where the bytes Pair * 2 and Pair * 2 + 1 have the highest bit.
template <int Pair>
__host__ __device__ inline uint32_t kept_pair(uint32_t bytes) {
#ifdef __CUDA_ARCH__
  uint32_t mask;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(bytes), "n"(Pair == 0 ? 0x9988 : 0xbbaa));
  return mask;
#else
  const uint32_t bits = bytes >> (16 * Pair + 7);
  return ((bits & 1) != 0 ? 0xffffu : 0u) | ((bits & 0x100) != 0 ? 0xffff0000u : 0u);
#endif
}

}  // namespace nvb
