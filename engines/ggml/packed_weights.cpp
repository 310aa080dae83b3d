#include "packed_weights.hpp"

#include <algorithm>
#include <functional>
#include <set>

#include "tensor.hpp"

namespace nvb_ggml {
namespace {

// The tiles of packed rows.
constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 64;

bool has_packed_layout(int32_t type) {
  return type == TYPE_Q4_0 || type == TYPE_Q4_1 || type == TYPE_Q8_0;
}

// Whether the operation reads this source as a weight, by `DeviceState::weight`.
bool is_read_as_weight(Op op, size_t source) {
  return source == 0 && (op == Op::MatMul || op == Op::GetRows);
}

bool is_matrix(const Tensor& tensor) {
  return is_contiguous(tensor) && tensor.ne[2] == 1 && tensor.ne[3] == 1;
}

WeightKey key_of(const Tensor& tensor) {
  const TypeTraits type = traits(tensor.type);
  const size_t row_bytes = type.bytes * static_cast<size_t>(tensor.ne[0] / type.block);
  return {tensor.data, tensor.type, tensor.ne[1], tensor.ne[0], row_bytes};
}

size_t bytes_of(const WeightKey& key) {
  return key.row_bytes * static_cast<size_t>(key.rows);
}

}  // namespace

const PackedWeights::Region* PackedWeights::region_at(const void* address) const {
  const char* at = static_cast<const char*>(address);
  auto next = regions_.upper_bound(at);
  if (next == regions_.begin()) return nullptr;
  const Region& region = std::prev(next)->second;
  return at < region.end() ? &region : nullptr;
}

bool PackedWeights::overlaps(const void* start, size_t bytes) const {
  if (bytes == 0) return false;
  const char* end = static_cast<const char*>(start) + bytes;
  const auto next = regions_.lower_bound(static_cast<const char*>(start));
  return region_at(start) != nullptr || (next != regions_.end() && next->first < end);
}

bool PackedWeights::are_together(const void* start, size_t bytes) const {
  if (count_.load() == 0 || !overlaps(start, bytes)) return true;
  const Region* region = region_at(start);
  return region != nullptr && static_cast<const char*>(start) + bytes <= region->end();
}

Weight PackedWeights::rows(const WeightKey& key) const {
  const Region* region = count_.load() == 0 ? nullptr : region_at(key.data);
  if (region == nullptr) return nullptr;
  const WeightKey& whole = region->key;
  const size_t offset = static_cast<size_t>(static_cast<const char*>(key.data) - static_cast<const char*>(whole.data));
  if (key.type != whole.type || key.columns != whole.columns || key.row_bytes != whole.row_bytes) return nullptr;
  if (offset % whole.row_bytes != 0) return nullptr;
  const auto first = static_cast<int64_t>(offset / whole.row_bytes);
  if (first + key.rows > whole.rows) return nullptr;
  if (first == 0 && key.rows == whole.rows) return region->weight;
  nvb_weight* slice = nullptr;
  const auto count = static_cast<uint64_t>(key.rows);
  if (nvb_weight_slice(region->weight.get(), static_cast<uint64_t>(first), count, &slice) != NVB_OK) return nullptr;
  return Weight(slice, WeightDestroyer());
}

bool PackedWeights::is_refused(const void* start, size_t bytes) const {
  const char *first = static_cast<const char*>(start), *end = first + bytes;
  for (const auto& [from, to] : refused_) {
    if (from < end && first < to) return true;
  }
  return false;
}

bool PackedWeights::can_be_packed(const Tensor& weight) const {
  const Host& host = device_.host();
  return has_packed_layout(weight.type) && host.op(weight) == Op::None && weight.view_source == nullptr &&
         is_matrix(weight) && weight.ne[0] > 0 && weight.ne[1] > 0 && weight.ne[1] % kRows == 0 &&
         weight.ne[0] % kColumns == 0 && host.holds_weights(weight.buffer) &&
         device_.owns(weight.data, bytes_of(key_of(weight))) && !is_refused(weight.data, bytes_of(key_of(weight))) &&
         !overlaps(weight.data, bytes_of(key_of(weight)));
}

PackedWeights::Wishes PackedWeights::read(Graph* graph) const {
  const Host& host = device_.host();
  const bool packs = device_.packs_weights();
  Wishes wishes;
  const auto put_back = [&](const Tensor& tensor) {
    if (count_.load() != 0 && overlaps(tensor.data, host.bytes(tensor))) wishes.to_put_back.push_back(tensor.data);
  };
  // Weights by the input that multiplies them, and those that somebody reads as blocks.
  std::map<const Tensor*, std::vector<const Tensor*>> products;
  std::set<const void*> others;
  for (int index = 0, count = host.nodes(graph); index < count; ++index) {
    const Tensor& node = *host.node(graph, index);
    if (!is_work(host, node)) continue;
    const Op op = host.op(node);
    put_back(node);
    for (size_t i = 0; i < MAX_SOURCES; ++i) {
      const Tensor* source = node.source[i];
      if (source == nullptr || !has_packed_layout(source->type)) continue;
      if (!is_read_as_weight(op, i)) {
        others.insert(source->view_source != nullptr ? source->view_source->data : source->data);
        put_back(*source);
      } else if (count_.load() != 0 && region_at(source->data) != nullptr) {
        if (!is_matrix(*source) || rows(key_of(*source)) == nullptr) put_back(*source);
      } else if (packs && op == Op::MatMul && can_be_packed(*source)) {
        products[node.source[1]].push_back(source);
      }
    }
  }
  std::set<const void*> taken;
  for (auto& [input, weights] : products) {
    const auto is_lower = [](const Tensor* one, const Tensor* other) {
      return std::less<const void*>()(one->data, other->data);
    };
    std::sort(weights.begin(), weights.end(), is_lower);
    WeightKey run = {};
    const auto finish = [&] {
      if (run.data != nullptr) wishes.to_pack.push_back(run);
      run = {};
    };
    for (const Tensor* weight : weights) {
      if (others.count(weight->data) != 0 || !taken.insert(weight->data).second) continue;
      const WeightKey key = key_of(*weight);
      const bool follows = run.data != nullptr && run.type == key.type && run.columns == key.columns &&
                           static_cast<const char*>(run.data) + bytes_of(run) == key.data;
      if (follows) {
        run.rows += key.rows;
      } else {
        finish();
        run = key;
      }
    }
    finish();
  }
  return wishes;
}

nvb_status PackedWeights::prepare(Graph* graph, LayoutLock& held) {
  if (!device_.packs_weights() && count_.load() == 0) return NVB_OK;
  const Wishes first = read(graph);
  if (first.to_pack.empty() && first.to_put_back.empty()) return NVB_OK;
  nvb_status status = NVB_OK;
  held.unlock();
  {
    const std::unique_lock<std::shared_mutex> alone(layout_);
    // Another stream may have been here.
    const Wishes wishes = read(graph);
    device_.wait_for_all();
    for (const void* address : wishes.to_put_back) {
      for (auto region = regions_.begin(); region != regions_.end();) {
        const bool touched = region->first <= address && address < region->second.end();
        const auto one = region++;
        if (!touched) continue;
        // All of it, or a graph that does without would pack it again in turn with this one.
        refused_[one->first] = one->second.end();
        const nvb_status done = put_back(one);
        if (status == NVB_OK) status = done;
      }
    }
    if (!wishes.to_pack.empty()) {
      for (const WeightKey& key : wishes.to_pack) pack(key);
      // The copies that packing took are as large as the largest weight.
      device_.trim();
    }
  }
  held.lock();
  return status;
}

void PackedWeights::pack(const WeightKey& key) {
  nvb_weight* weight = nullptr;
  if (device_.pack(key, &weight) != NVB_OK) {
    // No memory for a copy, or a scale that is not finite: products read the blocks. Of several weights the first stays
    // as it is, and the others are tried without it the next time.
    refused_[static_cast<const char*>(key.data)] = static_cast<const char*>(key.data) + key.row_bytes;
    return;
  }
  device_.drop_weights(key.data, bytes_of(key));
  regions_.emplace(static_cast<const char*>(key.data), Region{key, Weight(weight, WeightDestroyer())});
  count_.store(regions_.size());
}

nvb_status PackedWeights::put_back(std::map<const char*, Region>::iterator region) {
  device_.drop_weights(region->second.key.data, bytes_of(region->second.key));
  const nvb_status status = device_.put_back(region->second.weight.get());
  if (status != NVB_OK) return status;
  regions_.erase(region);
  count_.store(regions_.size());
  return NVB_OK;
}

LayoutLock PackedWeights::hold_blocks(const void* one, const void* other, size_t bytes) {
  for (;;) {
    LayoutLock held(layout_);
    const auto is_packed = [&](const void* start) { return start != nullptr && overlaps(start, bytes); };
    if (count_.load() == 0 || (!is_packed(one) && !is_packed(other))) return held;
    held.unlock();
    // A stream that computes may pack them again before they are held.
    const std::unique_lock<std::shared_mutex> alone(layout_);
    device_.wait_for_all();
    const bool done = put_back_all(one, bytes) && put_back_all(other, bytes);
    if (!done) return LayoutLock();
  }
}

bool PackedWeights::put_back_all(const void* start, size_t bytes) {
  if (start == nullptr) return true;
  bool done = true;
  const char *first = static_cast<const char*>(start), *end = first + bytes;
  for (auto region = regions_.begin(); region != regions_.end();) {
    const bool touched = region->first < end && first < region->second.end();
    const auto one = region++;
    if (touched) done = put_back(one) == NVB_OK && done;
  }
  return done;
}

void PackedWeights::forget(const void* start, size_t bytes) {
  const std::unique_lock<std::shared_mutex> alone(layout_);
  const char *first = static_cast<const char*>(start), *end = first + bytes;
  refused_.erase(refused_.lower_bound(first), refused_.lower_bound(end));
  for (auto region = regions_.begin(); region != regions_.end();) {
    const bool touched = region->first < end && first < region->second.end();
    region = touched ? regions_.erase(region) : std::next(region);
  }
  count_.store(regions_.size());
}

}  // namespace nvb_ggml
