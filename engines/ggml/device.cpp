// Devices: creating their backends, memory, copies, and the weights and attentions that operations share.
#include "device.hpp"

#include "packed_weights.hpp"
#include "tensor.hpp"

#include <cctype>
#include <cstdlib>
#include <cstring>

namespace nvb_ggml {
namespace {

// Views of a cache that grows are weights of their own, so the list is emptied when it has grown this long.
constexpr size_t kMostWeights = 8192;

// A step of a decode has nine inputs, of which the mask is the largest, and each would wait some 10 us for its copy.
constexpr size_t kMostStaged = 64 << 10;
constexpr size_t kStagingBytes = 1 << 20;

std::string last_error() {
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  return text;
}

}  // namespace

bool is_on(const char* variable, bool otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::strcmp(value, "0") != 0;
}

bool DeviceState::rounds_to_halves() const {
  return is_on("NVB_GGML_NARROW", !is_cpu());
}

bool DeviceState::packs_weights() const {
  return is_on("NVB_GGML_PACK", !is_cpu());
}

BufferState::BufferState(DeviceState& device, void* base, size_t bytes, bool owned)
    : device_(device), base_(base), bytes_(bytes), owned_(owned) {
  if (owned) device.add_buffer(base, bytes);
}

BufferState::~BufferState() {
  device_.forget(base_, bytes_);
  if (owned_) device_.free(base_);
}

DeviceState::DeviceState(const Host& host, std::string name)
    : host_(host), name_(std::move(name)), packed_(std::make_unique<PackedWeights>(*this)) {}

std::unique_ptr<DeviceState> DeviceState::create(const Host& host, const std::string& selector, std::string name) {
  std::unique_ptr<DeviceState> device(new DeviceState(host, std::move(name)));
  nvb_memory_options memory;
  nvb_memory_options_init(&memory);
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = selector.c_str();
  nvb_configuration* configuration = nullptr;
  nvb_status status = nvb_configuration_create(NVB_PRESET_INFERENCE, &configuration);
  if (status == NVB_OK) {
    if (const char* limit = std::getenv("NVB_GGML_MEMORY_LIMIT")) {
      status = nvb_configuration_set(configuration, "memory.limit", limit);
    }
  }
  options.configuration = configuration;
  if (status == NVB_OK) status = nvb_backend_create(&options, &device->backend_);
  nvb_configuration_destroy(configuration);
  if (status == NVB_OK) status = nvb_backend_get_memory_manager(device->backend_, 0, &device->memory_);
  nvb_device_info_init(&device->info_);
  if (status == NVB_OK) status = nvb_backend_get_device_info(device->backend_, &device->info_);
  if (status == NVB_OK) status = nvb_stream_create(device->backend_, 0, &device->copies_);
  if (status == NVB_OK && !device->is_cpu()) {
    void* staging = nullptr;
    status = nvb_host_allocate(device->backend_, kStagingBytes, &staging);
    device->staging_ = static_cast<char*>(staging);
    if (status == NVB_OK) status = nvb_event_create(device->backend_, &device->staged_event_);
  }
  if (!device->succeeded(status, selector.c_str())) return nullptr;
  for (char* at = device->info_.pci_bus_id; *at != '\0'; ++at) *at = static_cast<char>(std::tolower(*at));
  return device;
}

DeviceState::~DeviceState() {
  weights_.clear();
  packed_.reset();
  for (const auto& entry : attentions_) nvb_attention_destroy(entry.second);
  for (nvb_stream* stream : streams_) nvb_stream_destroy(stream);
  if (copies_ != nullptr) succeeded(nvb_stream_synchronize(copies_), "ending the copies");
  nvb_stream_destroy(copies_);
  nvb_event_destroy(staged_event_);
  if (staging_ != nullptr) free_host(staging_, kStagingBytes);
  nvb_memory_manager_destroy(memory_);
  nvb_backend_destroy(backend_);
}

bool DeviceState::succeeded(nvb_status status, const char* what) const {
  if (status == NVB_OK) return true;
  host_.log(LOG_ERROR, "nvbackend: %s: %s: %s\n", what, nvb_status_name(status), last_error().c_str());
  return false;
}

void DeviceState::fail_unless(nvb_status status, const char* what) {
  if (!succeeded(status, what)) failed_ = true;
}

void DeviceState::get_memory(size_t* free, size_t* total) const {
  uint64_t device_free = 0, device_total = 0;
  *free = *total = 0;
  nvb_memory_statistics statistics;
  nvb_memory_statistics_init(&statistics);
  if (nvb_memory_query_device(memory_, &device_free, &device_total) != NVB_OK) return;
  if (nvb_memory_get_statistics(memory_, &statistics) != NVB_OK) return;
  // What the manager holds and nobody uses is free for this host; a limit bounds both.
  uint64_t available = device_free + statistics.cached;
  if (statistics.limit != 0) {
    const uint64_t left = statistics.limit > statistics.allocated ? statistics.limit - statistics.allocated : 0;
    available = available < left ? available : left;
    device_total = device_total < statistics.limit ? device_total : statistics.limit;
  }
  *free = available < device_total ? available : device_total;
  *total = device_total;
}

void* DeviceState::allocate(size_t bytes) {
  void* pointer = nullptr;
  const nvb_status status = nvb_memory_allocate(memory_, bytes == 0 ? 1 : bytes, nullptr, &pointer);
  return succeeded(status, "allocating a buffer") ? pointer : nullptr;
}

void DeviceState::free(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The block may be used anew at once, so nothing that other streams have queued may still read it.
  for (nvb_stream* stream : streams_) succeeded(nvb_stream_synchronize(stream), "waiting to free a buffer");
  succeeded(nvb_stream_synchronize(copies_), "waiting to free a buffer");
  succeeded(nvb_memory_free(memory_, pointer, nullptr), "freeing a buffer");
}

void* DeviceState::allocate_host(size_t bytes) {
  void* pointer = nullptr;
  const nvb_status status = nvb_host_allocate(backend_, bytes == 0 ? 1 : bytes, &pointer);
  return succeeded(status, "allocating host memory") ? pointer : nullptr;
}

void DeviceState::free_host(void* pointer, size_t bytes) {
  succeeded(nvb_host_free(backend_, pointer, bytes == 0 ? 1 : bytes), "freeing host memory");
}

// Copies by way of the staging memory, without a wait; false if it cannot. The mutex is held.
bool DeviceState::stage(void* to, const void* from, size_t bytes) {
  if (staging_ == nullptr || bytes > kMostStaged) return false;
  if (staged_ + bytes > kStagingBytes) {
    if (nvb_stream_synchronize(copies_) != NVB_OK) return false;
    staged_ = 0;
  }
  char* const place = staging_ + staged_;
  std::memcpy(place, from, bytes);
  if (nvb_memory_copy(memory_, to, place, bytes, NVB_COPY_HOST_TO_DEVICE, copies_) != NVB_OK) return false;
  staged_ += (bytes + 255) / 256 * 256;
  stagings_.fetch_add(1, std::memory_order_release);
  return true;
}

void DeviceState::order_after_copies(nvb_stream* stream) {
  if (stagings_.load(std::memory_order_acquire) == 0) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t all = stagings_.load(std::memory_order_relaxed);
  uint64_t& ordered = ordered_[stream];
  if (ordered == all) return;
  nvb_status status = nvb_event_record(staged_event_, copies_);
  if (status == NVB_OK) status = nvb_stream_wait_event(stream, staged_event_);
  fail_unless(status, "ordering a stream behind copies");
  ordered = all;
}

void DeviceState::copy(void* to, const void* from, size_t bytes, uint32_t kind) {
  if (bytes == 0) return;
  const LayoutLock blocks = hold_blocks(to, from, bytes, kind);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (kind == NVB_COPY_HOST_TO_DEVICE && stage(to, from, bytes)) return;
  nvb_status status = nvb_memory_copy(memory_, to, from, bytes, kind, copies_);
  if (status == NVB_OK) status = nvb_stream_synchronize(copies_);
  fail_unless(status, "copying a tensor");
}

// Blocks that a copy of the host's reads or writes lie as the host knows them until it has been queued.
LayoutLock DeviceState::hold_blocks(const void* to, const void* from, size_t bytes, uint32_t kind) {
  return packed_->hold_blocks(kind == NVB_COPY_DEVICE_TO_HOST ? nullptr : to,
                              kind == NVB_COPY_HOST_TO_DEVICE ? nullptr : from, bytes);
}

void DeviceState::fill(void* to, uint8_t value, size_t bytes) {
  if (bytes == 0) return;
  const LayoutLock blocks = packed_->hold_blocks(to, nullptr, bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  nvb_status status = nvb_memory_fill(memory_, to, value, bytes, copies_);
  if (status == NVB_OK) status = nvb_stream_synchronize(copies_);
  fail_unless(status, "filling a tensor");
}

nvb_status DeviceState::queue_copy(void* to, const void* from, size_t bytes, uint32_t kind, nvb_stream* stream) {
  return bytes == 0 ? static_cast<nvb_status>(NVB_OK) : nvb_memory_copy(memory_, to, from, bytes, kind, stream);
}

nvb_status DeviceState::queue_allocate(size_t bytes, nvb_stream* stream, void** memory) const {
  return nvb_memory_allocate(memory_, bytes, stream, memory);
}

nvb_status DeviceState::queue_free(void* memory, nvb_stream* stream) const {
  return nvb_memory_free(memory_, memory, stream);
}

void DeviceState::copy_async(void* to, const void* from, size_t bytes, uint32_t kind, nvb_stream* stream) {
  const LayoutLock blocks = hold_blocks(to, from, bytes, kind);
  order_after_copies(stream);
  fail_unless(queue_copy(to, from, bytes, kind, stream), "copying a tensor");
}

nvb_stream* DeviceState::create_stream() {
  nvb_stream* stream = nullptr;
  if (!succeeded(nvb_stream_create(backend_, 0, &stream), "creating a stream")) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.insert(stream);
  return stream;
}

void DeviceState::destroy_stream(nvb_stream* stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.erase(stream);
  ordered_.erase(stream);
  succeeded(nvb_stream_synchronize(stream), "ending a stream");
  nvb_stream_destroy(stream);
}

Weight DeviceState::weight(const WeightKey& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = weights_.find(key);
  if (found != weights_.end()) return found->second;
  if (weights_.size() >= kMostWeights) weights_.clear();
  if (packed_->holds(key.data)) {
    Weight rows = packed_->rows(key);
    if (rows != nullptr) weights_[key] = rows;
    return rows;
  }
  nvb_weight* weight = nullptr;
  if (borrow(key, &weight) != NVB_OK) return nullptr;
  return weights_[key] = Weight(weight, WeightDestroyer());
}

// A tensor is read where it lies, and blocks as the file has them.
nvb_status DeviceState::borrow(const WeightKey& key, nvb_weight** weight) const {
  return create_weight(key, NVB_SOURCE_BORROWED, weight);
}

nvb_status DeviceState::pack(const WeightKey& key, nvb_weight** weight) const {
  return create_weight(key, NVB_SOURCE_IN_PLACE, weight);
}

nvb_status DeviceState::create_weight(const WeightKey& key, uint32_t source, nvb_weight** weight) const {
  const TypeTraits type = traits(key.type);
  nvb_weight_desc desc;
  nvb_weight_desc_init(&desc);
  desc.part_count = 1;
  desc.source = source;
  nvb_tensor part = nvb_tensor_2d(const_cast<void*>(key.data), type.dtype, key.rows, key.columns);
  part.strides[0] = static_cast<int64_t>(key.row_bytes / type.bytes);
  part.strides[1] = 1;
  nvb_weight_blocks blocks;
  std::memset(&blocks, 0, sizeof blocks);
  if (type.blocks == 0) {
    desc.parts = &part;
  } else {
    blocks.data = key.data;
    blocks.rows = key.rows;
    blocks.columns = key.columns;
    blocks.row_stride = static_cast<int64_t>(key.row_bytes / type.bytes) * type.block;
    blocks.bytes =
        key.row_bytes * static_cast<size_t>(key.rows - 1) + type.bytes * static_cast<size_t>(key.columns / type.block);
    desc.blocks = &blocks;
    desc.source_format = type.blocks;
    if (source == NVB_SOURCE_BORROWED) desc.format = NVB_WEIGHT_FORMAT_BLOCKS;
  }
  return nvb_weight_create(backend_, &desc, nullptr, weight);
}

const nvb_attention* DeviceState::attention(const AttentionKey& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = attentions_.find(key);
  if (found != attentions_.end()) return found->second;
  nvb_attention_options options;
  nvb_attention_options_init(&options);
  options.query_heads = key.query_heads;
  options.kv_heads = key.kv_heads;
  options.head_dim = key.head_dim;
  options.value_dim = key.value_dim;
  options.scale = key.scale;
  options.soft_cap = key.soft_cap;
  options.bidirectional = 1;
  nvb_attention* attention = nullptr;
  if (nvb_attention_create(backend_, &options, &attention) != NVB_OK) return nullptr;
  return attentions_[key] = attention;
}

nvb_status DeviceState::put_back(nvb_weight* weight) {
  const nvb_status status = nvb_weight_restore_blocks(weight, copies_);
  fail_unless(status, "putting a weight's blocks back");
  return status;
}

void DeviceState::wait_for_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (nvb_stream* stream : streams_) fail_unless(nvb_stream_synchronize(stream), "waiting for a stream");
  fail_unless(nvb_stream_synchronize(copies_), "waiting for copies");
}

void DeviceState::trim() {
  succeeded(nvb_memory_trim(memory_, 0, nullptr), "giving memory back");
}

void DeviceState::add_buffer(const void* start, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  buffers_[static_cast<const char*>(start)] = bytes;
}

bool DeviceState::owns(const void* start, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* first = static_cast<const char*>(start);
  const auto next = buffers_.upper_bound(first);
  if (next == buffers_.begin()) return false;
  const auto& [base, size] = *std::prev(next);
  return first + bytes <= base + size;
}

void DeviceState::forget(const void* start, size_t bytes) {
  packed_->forget(start, bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    buffers_.erase(static_cast<const char*>(start));
  }
  drop_weights(start, bytes);
}

void DeviceState::drop_weights(const void* start, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const char* end = static_cast<const char*>(start) + bytes;
  for (auto at = weights_.begin(); at != weights_.end();) {
    const char* first = static_cast<const char*>(at->first.data);
    const char* last = first + at->first.row_bytes * static_cast<size_t>(at->first.rows);
    const bool touched = first < end && static_cast<const char*>(start) < last;
    if (touched) ++weights_version_;
    at = touched ? weights_.erase(at) : std::next(at);
  }
}

}  // namespace nvb_ggml
