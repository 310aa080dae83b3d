// Which weights of attention are dropped (src/operation/attention/dropout.rs): byte k % 16 of the four words of
// philox4x32_10({k / 16, row, head | offset high << 16, offset low}, seed), least significant byte first, is below the
// threshold, of 1 to 255, where that of key k is.
#pragma once

#include "philox.cuh"

namespace nvb {

inline constexpr int kDropoutKeys = 16;  // of a block of random numbers

// A bit for each of the four bytes of a word that is not below the threshold. Two bytes each are added in 16 bits to
// what the threshold lacks of 256, and carry where they reach it.
__device__ __forceinline__ uint32_t kept_of_word(uint32_t word, uint32_t threshold) {
  const uint32_t lacking = (256 - threshold) * 0x00010001u;
  const uint32_t even = (word & 0x00ff00ffu) + lacking, odd = (word >> 8 & 0x00ff00ffu) + lacking;
  const uint32_t carries = (even & 0x01000100u) | (odd & 0x01000100u) << 1;
  return (carries >> 8 | carries >> 22) & 0xf;
}

// The same for the 16 keys of a block.
__device__ __forceinline__ uint32_t kept_keys(const uint4& words, uint32_t threshold) {
  return kept_of_word(words.x, threshold) | kept_of_word(words.y, threshold) << 4 |
         kept_of_word(words.z, threshold) << 8 | kept_of_word(words.w, threshold) << 12;
}

}  // namespace nvb
