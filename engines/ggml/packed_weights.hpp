// Weights of a host's model whose blocks the library has packed where they lie: Q4_0, Q4_1 and Q8_0, which take the
// same bytes in the order that its products read fastest. The host does not see it: what it reads, writes or computes
// with otherwise has its blocks back first.
//
// Rows of several tensors that lie one behind the other are packed as one where products may be done as one; a tensor
// among them is a slice of that.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "device.hpp"
#include "graph_key.hpp"

namespace nvb_ggml {

class PackedWeights {
 public:
  explicit PackedWeights(DeviceState& device) : device_(device) {}

  LayoutLock hold() { return LayoutLock(layout_); }

  // Packs what the graph's products read, and puts back what else it touches; `held` is let go meanwhile. The status of
  // what could not be put back; what could not be packed is read as it is.
  nvb_status prepare(Graph* graph, LayoutLock& held);
  // Puts back the blocks that share a byte with either (NULL: none), which the host reads or writes while it holds what
  // this returns. If that fails, the device is marked as failed.
  LayoutLock hold_blocks(const void* one, const void* other, size_t bytes);
  // Memory that goes: its weights are no more. Nobody uses them.
  void forget(const void* start, size_t bytes);

  // With `layout` held:
  // Whether blocks at this address are packed.
  bool holds(const void* address) const { return count_.load() != 0 && region_at(address) != nullptr; }
  // The rows as the library has them; NULL if they are not packed, or not as whole tiles.
  Weight rows(const WeightKey& key) const;
  // Whether the rows are all in one packed weight, or none of them is packed.
  bool are_together(const void* start, size_t bytes) const;

 private:
  struct Region {
    WeightKey key;
    Weight weight;
    const char* end() const {
      return static_cast<const char*>(key.data) + key.row_bytes * static_cast<size_t>(key.rows);
    }
  };
  struct Wishes {
    std::vector<WeightKey> to_pack;
    std::vector<const void*> to_put_back;
  };

  const Region* region_at(const void* address) const;
  bool overlaps(const void* start, size_t bytes) const;
  bool is_refused(const void* start, size_t bytes) const;
  bool can_be_packed(const Tensor& weight) const;
  Wishes read(Graph* graph) const;
  void pack(const WeightKey& key);
  nvb_status put_back(std::map<const char*, Region>::iterator region);
  bool put_back_all(const void* start, size_t bytes);

  DeviceState& device_;
  std::shared_mutex layout_;
  std::map<const char*, Region> regions_;       // by their first byte
  std::map<const char*, const char*> refused_;  // what stays as it is: ends by the first bytes
  std::atomic<size_t> count_{0};                // of regions
};

}  // namespace nvb_ggml
