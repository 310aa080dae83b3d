// Places in a stream's own memory for results of a graph, each in use from one work to another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace nvb_ggml {

// Own memory that is in use until the work `last`.
struct Live {
  size_t at, bytes, last;
};

// The lowest gap among what is still to be read at `place`, as the last of `live`.
inline size_t place_among(std::vector<Live>& live, size_t place, size_t last, size_t wanted) {
  live.erase(std::remove_if(live.begin(), live.end(), [&](const Live& one) { return one.last < place; }), live.end());
  std::sort(live.begin(), live.end(), [](const Live& one, const Live& other) { return one.at < other.at; });
  const size_t bytes = (wanted + 255) / 256 * 256;
  size_t at = 0;
  for (const Live& one : live) {
    if (at + bytes <= one.at) break;
    at = std::max(at, one.at + one.bytes);
  }
  live.push_back({at, bytes, last});
  return at;
}

}  // namespace nvb_ggml
