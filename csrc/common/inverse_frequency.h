// Inverse frequencies of rotary position embeddings, on the host.
//
// They are computed by the powf that the CPU executor calls: one unit in the last place of a frequency is 0.006 radians
// at position 100,000.
#pragma once

#include <cmath>

namespace nvb {

// Pairs of the widest head.
inline constexpr int kMaxRotaryPairs = 256;

// 1 / base^(2i / rotary_dim) for i < rotary_dim / 2, at most kMaxRotaryPairs of them. A model alternates between one or
// two bases, so each thread keeps the last few tables.
inline const float* inverse_frequencies(float base, int rotary_dim) {
  struct Table {
    float base;
    int rotary_dim;
    float values[kMaxRotaryPairs];
  };
  constexpr int kTables = 4;
  thread_local Table tables[kTables];
  thread_local int next = 0;
  for (const Table& table : tables) {
    if (table.base == base && table.rotary_dim == rotary_dim) return table.values;
  }
  Table& table = tables[next];
  next = (next + 1) % kTables;
  table.base = base;
  table.rotary_dim = rotary_dim;
  for (int i = 0; i < rotary_dim / 2; ++i) {
    table.values[i] = 1.0f / std::pow(base, static_cast<float>(2 * i) / static_cast<float>(rotary_dim));
  }
  return table.values;
}

}  // namespace nvb
