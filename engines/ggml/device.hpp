// A device of the plug-in: a backend of libnvbackend with its memory, and what is made once and used by every stream of
// it.
#pragma once

#include <nvbackend.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <vector>

#include "host.hpp"

namespace nvb_ggml {

class DeviceState;
class PackedWeights;

// What a stream holds while it queues a graph, and a copy until it is queued: no weight is packed or put back
// meanwhile.
using LayoutLock = std::shared_lock<std::shared_mutex>;

// What a variable of the environment turns on or, by "0", off; for tests and for finding what is at fault.
bool is_on(const char* variable, bool otherwise);

// Memory that a host allocated as one buffer, in which it places its tensors.
class BufferState {
 public:
  // `owned`: the memory goes back with the buffer; else it is the host's, such as a mapped file.
  BufferState(DeviceState& device, void* base, size_t bytes, bool owned);
  ~BufferState();
  BufferState(const BufferState&) = delete;
  BufferState& operator=(const BufferState&) = delete;

  DeviceState& device() { return device_; }
  void* base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  DeviceState& device_;
  void* base_;
  size_t bytes_;
  bool owned_;
};

// A matrix as nvb_weight_create is asked for it: the address and format of its rows.
struct WeightKey {
  const void* data;
  int32_t type;
  int64_t rows;
  int64_t columns;
  size_t row_bytes;
  bool operator<(const WeightKey& other) const {
    const auto all = [](const WeightKey& key) {
      return std::tie(key.data, key.type, key.rows, key.columns, key.row_bytes);
    };
    return all(*this) < all(other);
  }
};

struct WeightDestroyer {
  void operator()(nvb_weight* weight) const { nvb_weight_destroy(weight); }
};
using Weight = std::shared_ptr<nvb_weight>;

struct AttentionKey {
  uint32_t query_heads, kv_heads, head_dim, value_dim;
  float scale, soft_cap;
  bool operator<(const AttentionKey& other) const {
    const auto all = [](const AttentionKey& key) {
      return std::tie(key.query_heads, key.kv_heads, key.head_dim, key.value_dim, key.scale, key.soft_cap);
    };
    return all(*this) < all(other);
  }
};

class DeviceState {
 public:
  // "cpu" or "cuda:N". NULL, with a line in the host's log, if there is no backend on it.
  static std::unique_ptr<DeviceState> create(const Host& host, const std::string& selector, std::string name);
  ~DeviceState();

  const Host& host() const { return host_; }
  const char* name() const { return name_.c_str(); }
  const char* description() const { return info_.name; }
  // NULL on the CPU.
  const char* pci_id() const { return info_.pci_bus_id[0] == '\0' ? nullptr : info_.pci_bus_id; }
  bool is_cpu() const { return info_.kind == NVB_DEVICE_CPU; }
  // Whether products round F32 inputs to 16 bits, as tensor cores want them: on GPUs, but where NVB_GGML_NARROW says
  // otherwise.
  bool rounds_to_halves() const;
  const nvb_backend* backend() const { return backend_; }
  // Whether blocks of a model's weights are packed: on GPUs, but where NVB_GGML_PACK says otherwise.
  bool packs_weights() const;
  void get_memory(size_t* free, size_t* total) const;

  void* allocate(size_t bytes);
  void free(void* pointer);
  void* allocate_host(size_t bytes);
  void free_host(void* pointer, size_t bytes);

  // Copies and fills that have happened when they return, as far as the host and this device's streams can tell: little
  // that goes to a GPU waits in page-locked memory, and streams wait for it (`order_after_copies`). On failure the
  // device is marked (see `failed`).
  void copy(void* to, const void* from, size_t bytes, uint32_t kind);
  void fill(void* to, uint8_t value, size_t bytes);
  // Lets what comes on the stream follow the copies that are on their way. To be called before anything is queued
  // there.
  void order_after_copies(nvb_stream* stream);
  // Queues a copy on a stream, within a graph.
  nvb_status queue_copy(void* to, const void* from, size_t bytes, uint32_t kind, nvb_stream* stream);
  // Memory in the order of a stream.
  nvb_status queue_allocate(size_t bytes, nvb_stream* stream, void** memory) const;
  nvb_status queue_free(void* memory, nvb_stream* stream) const;
  // A copy of the host's in the order of a stream, for which no error can be reported.
  void copy_async(void* to, const void* from, size_t bytes, uint32_t kind, nvb_stream* stream);

  // Weights and attentions are made when they are first used. A weight reads the tensor in place, so it stays while the
  // host writes there, as it does before each step where a table of rows is what an earlier node computed; `forget`
  // drops those of memory that goes. NULL: the last error of libnvbackend says why.
  Weight weight(const WeightKey& key);
  const nvb_attention* attention(const AttentionKey& key);
  void forget(const void* start, size_t bytes);
  PackedWeights& packed() const { return *packed_; }
  // Of packed weights, which see to it that nobody uses what changes: packs blocks in their place, puts them back, and
  // lets go of the weights that read them.
  nvb_status pack(const WeightKey& key, nvb_weight** weight) const;
  nvb_status put_back(nvb_weight* weight);
  void drop_weights(const void* start, size_t bytes);
  // Waits until no stream has work.
  void wait_for_all();
  // Gives back what no tensor needs.
  void trim();
  // Whether these bytes lie in one buffer that the host allocated here.
  bool owns(const void* start, size_t bytes) const;
  void add_buffer(const void* start, size_t bytes);
  // Another number after weights were dropped.
  uint64_t weights_version() const { return weights_version_.load(std::memory_order_relaxed); }

  nvb_stream* create_stream();
  void destroy_stream(nvb_stream* stream);

  // Notes that what cannot report an error to the host failed, such as a copy, so that a graph would not read what the
  // host wrote. The next graph fails in its place, and ends that.
  void fail_unless(nvb_status status, const char* what);
  bool take_failure() { return failed_.exchange(false); }
  // Whether `status` is a success; else its text goes to the host's log.
  bool succeeded(nvb_status status, const char* what) const;

 private:
  DeviceState(const Host& host, std::string name);
  nvb_status borrow(const WeightKey& key, nvb_weight** weight) const;
  nvb_status create_weight(const WeightKey& key, uint32_t source, nvb_weight** weight) const;
  bool stage(void* to, const void* from, size_t bytes);
  LayoutLock hold_blocks(const void* to, const void* from, size_t bytes, uint32_t kind);

  const Host& host_;
  std::string name_;
  nvb_device_info info_ = {};
  nvb_backend* backend_ = nullptr;
  nvb_memory_manager* memory_ = nullptr;
  // Copies that the host waits for go on it. It orders them with work of other streams by waiting for those itself, as
  // it does for every back end, so one that copies a step's inputs does not wait for the rest of the device.
  nvb_stream* copies_ = nullptr;
  // Page-locked memory for what the host gives, used in turn; NULL on the CPU.
  char* staging_ = nullptr;
  size_t staged_ = 0;
  nvb_event* staged_event_ = nullptr;
  // Counts the copies from there, and what of them each stream waits for.
  std::atomic<uint64_t> stagings_{0};
  std::map<nvb_stream*, uint64_t> ordered_;
  // Of that stream and of what is below.
  mutable std::mutex mutex_;
  std::map<WeightKey, Weight> weights_;
  std::atomic<uint64_t> weights_version_{0};
  std::map<AttentionKey, nvb_attention*> attentions_;
  std::set<nvb_stream*> streams_;
  std::map<const char*, size_t> buffers_;  // bytes by the first
  std::unique_ptr<PackedWeights> packed_;
  std::atomic<bool> failed_{false};
};

}  // namespace nvb_ggml
