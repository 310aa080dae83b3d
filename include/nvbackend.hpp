// nvbackend.hpp: C++17 over nvbackend.h, header-only. Handles that destroy themselves, errors as exceptions, nothing
// else.
//
// Every class here is a pointer to the C object behind it and converts to that pointer, so the C functions take these
// objects as they are and every rule of nvbackend.h (threads, streams, memory spaces) holds unchanged. There is no
// second ABI: all of it is compiled into the caller.
//
//   nvb::backend backend("auto");
//   nvb::stream stream(backend);
//   nvb::buffer x(backend, rows * width * sizeof(float));
//   auto args = nvb::make<nvb_softmax_args>();
//   args.input = args.output = nvb::tensor(x.data(), NVB_DTYPE_F32, {rows, width});
//   nvb::softmax(backend, args, stream);
//   stream.synchronize();
#ifndef NVBACKEND_HPP
#define NVBACKEND_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "nvbackend.h"
#include "nvbackend_core.hpp"
#include "nvbackend_operations.hpp"

namespace nvb {

// What the fields of a backend start from; nvbackend.h lists them.
class configuration : public handle<nvb_configuration, nvb_configuration_destroy> {
 public:
  using handle::handle;
  explicit configuration(uint32_t preset) { check(nvb_configuration_create(preset, &pointer_)); }

  void set(const char* field, const char* value) { check(nvb_configuration_set(pointer_, field, value)); }
  void apply_json(const char* json) { check(nvb_configuration_apply_json(pointer_, json)); }
  void validate() const { check(nvb_configuration_validate(pointer_)); }
  std::string json() const {
    std::size_t needed = 0;
    check(nvb_configuration_get_json(pointer_, nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(nvb_configuration_get_json(pointer_, text.data(), text.size(), nullptr));
    text.resize(needed - 1);  // the closing NUL
    return text;
  }
};

// A device with its kernels and memory. The other objects keep what they need of it, so any order of destruction is
// fine, with one exception: `host_buffer`.
class backend : public handle<nvb_backend, nvb_backend_destroy> {
 public:
  backend() noexcept = default;
  // These two are templates, so that nullptr, NULL and 0 mean no device rather than no backend or no configuration.
  template <typename P, std::enable_if_t<std::is_same_v<P, nvb_backend*>, int> = 0>
  explicit backend(P pointer) noexcept : handle(pointer) {}
  template <typename P,
            std::enable_if_t<std::is_same_v<std::remove_const_t<std::remove_pointer_t<P>>, nvb_configuration>, int> = 0>
  explicit backend(P configured) : backend(options_of(configured)) {}
  explicit backend(const configuration& configured) : backend(configured.get()) {}
  explicit backend(const nvb_backend_options& options) { check(nvb_backend_create(&options, &pointer_)); }
  // "auto", "cpu", "cuda" or "cuda:N"; nullptr: "auto".
  explicit backend(const char* device) {
    auto options = make<nvb_backend_options>();
    options.device = device;
    check(nvb_backend_create(&options, &pointer_));
  }

  // Waits for the default stream, that of calls whose stream is nullptr.
  void synchronize() const { check(nvb_backend_synchronize(pointer_)); }

  // The configuration that runs, as JSON.
  std::string configuration_json() const {
    return copy_text(nvb_backend_get_configuration_json, static_cast<const nvb_backend*>(pointer_));
  }

  nvb_operation_metrics metrics(uint32_t operation) const {
    auto metrics = make<nvb_operation_metrics>();
    check(nvb_backend_get_metrics(pointer_, operation, &metrics));
    return metrics;
  }

  nvb_device_info device_info() const {
    auto info = make<nvb_device_info>();
    check(nvb_backend_get_device_info(pointer_, &info));
    return info;
  }

  // Which kernel the product would run, and why.
  std::string explain(const nvb_linear_case& product) const {
    std::size_t needed = 0;
    check(nvb_kernel_explain(pointer_, &product, nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(nvb_kernel_explain(pointer_, &product, text.data(), text.size(), &needed));
    text.resize(std::min(needed, text.size()) - 1);  // the closing NUL; other threads may tune meanwhile
    return text;
  }
  // nullptr ends it.
  void override_kernel(uint32_t operation, const char* name) const {
    check(nvb_kernel_override(pointer_, operation, name));
  }
  // `progress` hears of each candidate and returns whether to go on; the tuning ends with an exception of it, too,
  // which arrives here.
  nvb_tune_report tune(const nvb_linear_case* cases, std::size_t count,
                       const std::function<bool(const nvb_tune_progress&)>& progress = {},
                       const nvb_tune_options* options = nullptr) const {
    auto report = make<nvb_tune_report>();
    tune_listener listener{progress, nullptr};
    const nvb_tune_callback callback = progress ? tune_listener::call : nullptr;
    const nvb_status status = nvb_tune_linear(pointer_, cases, count, options, callback, &listener, &report);
    if (listener.thrown) std::rethrow_exception(listener.thrown);
    check(status);
    return report;
  }

 private:
  static nvb_backend_options options_of(const nvb_configuration* configured) {
    // The C function takes NULL for the defaults; whoever names a configuration means one.
    if (configured == nullptr) check(nvb_configuration_validate(configured));
    auto options = make<nvb_backend_options>();
    options.configuration = configured;
    return options;
  }

  struct tune_listener {
    const std::function<bool(const nvb_tune_progress&)>& function;
    std::exception_ptr thrown;

    // No exception may pass through the library, which is not C++.
    static uint32_t call(const nvb_tune_progress* progress, void* listener) noexcept {
      auto& self = *static_cast<tune_listener*>(listener);
      try {
        return self.function(*progress) ? 0 : 1;
      } catch (...) {
        self.thrown = std::current_exception();
        return 1;
      }
    }
  };
};

class memory_manager : public handle<nvb_memory_manager, nvb_memory_manager_destroy> {
 public:
  using handle::handle;
  explicit memory_manager(const nvb_backend* backend, uint32_t index = 0) {
    check(nvb_backend_get_memory_manager(backend, index, &pointer_));
  }
  // A manager of its own beside the backend's.
  memory_manager(const nvb_backend* backend, const nvb_memory_options& options) {
    check(nvb_memory_manager_create(backend, &options, &pointer_));
  }

  void* allocate(std::size_t bytes, nvb_stream* stream) const {
    void* block = nullptr;
    check(nvb_memory_allocate(pointer_, bytes, stream, &block));
    return block;
  }
  void free(void* block, nvb_stream* stream) const { check(nvb_memory_free(pointer_, block, stream)); }
  void free(void* const* blocks, size_t count, nvb_stream* stream) const {
    check(nvb_memory_free_many(pointer_, blocks, count, stream));
  }
  void check_available(uint64_t bytes) const { check(nvb_memory_check_available(pointer_, bytes)); }
  void set_limit(uint64_t bytes) const { check(nvb_memory_set_limit(pointer_, bytes)); }

  // Each returns the bytes that were given back or taken.
  uint64_t trim(uint64_t keep = 0) const {
    uint64_t bytes = 0;
    check(nvb_memory_trim(pointer_, keep, &bytes));
    return bytes;
  }
  uint64_t sleep(bool keep_content) const {
    uint64_t bytes = 0;
    check(nvb_memory_sleep(pointer_, keep_content ? 1 : 0, &bytes));
    return bytes;
  }
  uint64_t wake() const {
    uint64_t bytes = 0;
    check(nvb_memory_wake(pointer_, &bytes));
    return bytes;
  }

  nvb_memory_statistics statistics() const {
    auto statistics = make<nvb_memory_statistics>();
    check(nvb_memory_get_statistics(pointer_, &statistics));
    return statistics;
  }
  nvb_memory_recovery_step_statistics recovery_step_statistics(uint32_t step) const {
    auto statistics = make<nvb_memory_recovery_step_statistics>();
    check(nvb_memory_get_recovery_step_statistics(pointer_, step, &statistics));
    return statistics;
  }
  // Asks the driver, for the statistics' numbers of the device.
  void query_device() const { check(nvb_memory_query_device(pointer_, nullptr, nullptr)); }
  void reset_peaks() const { check(nvb_memory_reset_peaks(pointer_)); }
  std::string leak_report() const { return copy_text(nvb_memory_get_leak_report, pointer_); }
  std::string snapshot() const { return copy_text(nvb_memory_get_snapshot, pointer_); }
  // Writes the snapshot into a file.
  void write_snapshot(const std::string& path) const { check(nvb_memory_write_snapshot(pointer_, path.c_str())); }
};

// Blocks that are counted by themselves and end with the pool, or all at once.
class pool : public handle<nvb_pool, nvb_pool_destroy> {
 public:
  using handle::handle;
  pool(nvb_memory_manager* memory, const char* name) { check(nvb_pool_create(memory, name, &pointer_)); }

  void* allocate(std::size_t bytes, nvb_stream* stream) const {
    void* block = nullptr;
    check(nvb_pool_allocate(pointer_, bytes, stream, &block));
    return block;
  }
  void free(void* block, nvb_stream* stream) const { check(nvb_pool_free(pointer_, block, stream)); }
  void free(void* const* blocks, size_t count, nvb_stream* stream) const {
    check(nvb_pool_free_many(pointer_, blocks, count, stream));
  }
  // Returns how many blocks there were.
  uint64_t clear() {
    uint64_t blocks = 0;
    check(nvb_pool_clear(pointer_, &blocks));
    return blocks;
  }

  nvb_pool_statistics statistics() const {
    auto statistics = make<nvb_pool_statistics>();
    check(nvb_pool_get_statistics(pointer_, &statistics));
    return statistics;
  }
  std::string name() const { return copy_text(nvb_pool_get_name, pointer_); }
};

// What is allocated on `stream` while this lives comes from the pool. It begins before the stream's capture and ends
// after.
class pool_capture {
 public:
  pool_capture(nvb_pool* pool, nvb_stream* stream) : pool_(pool), stream_(stream) {
    check(nvb_pool_begin_capture(pool, stream));
  }
  pool_capture(const pool_capture&) = delete;
  pool_capture& operator=(const pool_capture&) = delete;
  // A failure is in nvb_last_error_message; a destructor has no one to tell.
  ~pool_capture() { static_cast<void>(nvb_pool_end_capture(pool_, stream_)); }

 private:
  nvb_pool* pool_;
  nvb_stream* stream_;
};

// While this lives, operations on `stream` (nullptr: the backend's default stream) do not run; `function` hears how
// each would. It must not throw and not queue on the stream.
class stream_explanation {
 public:
  stream_explanation(const nvb_backend* backend, nvb_stream* stream,
                     std::function<void(const nvb_kernel_plan&)> function)
      : backend_(backend),
        stream_(stream),
        function_(std::make_unique<std::function<void(const nvb_kernel_plan&)>>(std::move(function))) {
    check(nvb_stream_explain(backend, stream, call, function_.get()));
  }
  stream_explanation(const stream_explanation&) = delete;
  stream_explanation& operator=(const stream_explanation&) = delete;
  ~stream_explanation() { static_cast<void>(nvb_stream_explain(backend_, stream_, nullptr, nullptr)); }

 private:
  static void call(const nvb_kernel_plan* plan, void* function) noexcept {
    (*static_cast<std::function<void(const nvb_kernel_plan&)>*>(function))(*plan);
  }

  const nvb_backend* backend_;
  nvb_stream* stream_;
  std::unique_ptr<std::function<void(const nvb_kernel_plan&)>> function_;
};

// Operations that are recorded once and launched often.
class graph : public handle<nvb_graph, nvb_graph_destroy> {
 public:
  using handle::handle;
  explicit graph(const nvb_backend* backend) { check(nvb_graph_create(backend, &pointer_)); }

  void begin(nvb_stream* stream) { check(nvb_graph_begin(pointer_, stream)); }
  void end(nvb_stream* stream) { check(nvb_graph_end(pointer_, stream)); }
  // Records what `calls` queues on the stream. After an exception of its the recording has ended, and
  // this owns no graph any more.
  template <typename Calls>
  void record(nvb_stream* stream, Calls&& calls) {
    begin(stream);
    try {
      calls();
    } catch (...) {
      const graph ended(std::move(*this));
      throw;
    }
    end(stream);
  }
  void launch(nvb_stream* stream) { check(nvb_graph_launch(pointer_, stream)); }
  // Launches with the workspace of `other` from now on; NULL: with one of its own.
  void share_workspace(nvb_graph* other) { check(nvb_graph_share_workspace(pointer_, other)); }

  // What optimisations and conversions decided, for the same list recorded again; `key` names the values of weights.
  void write_decisions(const std::string& path, const std::string& key = {}) const {
    check(nvb_graph_write_decisions(pointer_, path.c_str(), key.c_str()));
  }
  void read_decisions(const std::string& path, const std::string& key = {}, nvb_stream* stream = nullptr) {
    check(nvb_graph_read_decisions(pointer_, path.c_str(), key.c_str(), stream));
  }

  nvb_graph_info info() const {
    auto info = make<nvb_graph_info>();
    check(nvb_graph_get_info(pointer_, &info));
    return info;
  }
  // `format` is NVB_GRAPH_FORMAT_…
  std::string describe(uint32_t format = NVB_GRAPH_FORMAT_TEXT) const { return text(nvb_graph_describe, format); }

  // Measures each node on `stream`; `profiled` tells.
  void profile(nvb_stream* stream, uint32_t launches = 0) {
    auto options = make<nvb_graph_profile_options>();
    options.launches = launches;
    options.stream = stream;
    check(nvb_graph_profile(pointer_, &options));
  }
  std::string profiled(uint32_t format = NVB_GRAPH_FORMAT_TEXT) const { return text(nvb_graph_get_profile, format); }

  // What `device` lacks for the graph; empty for its own.
  nvb_graph_validation validate(const std::string& device = {}) {
    auto validation = make<nvb_graph_validation>();
    check(nvb_graph_validate(pointer_, device.c_str(), &validation));
    return validation;
  }
  // Of the last validation, errors first.
  nvb_graph_finding finding(uint32_t index) const {
    auto finding = make<nvb_graph_finding>();
    check(nvb_graph_get_finding(pointer_, index, &finding));
    return finding;
  }

 private:
  template <typename Give>
  std::string text(Give give, uint32_t format) const {
    std::size_t needed = 0;
    check(give(pointer_, format, nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(give(pointer_, format, text.data(), text.size(), nullptr));
    text.resize(needed - 1);
    return text;
  }
};

// Asks `function` for bytes when an allocation of `memory` finds none; it returns how many it freed. Destroy it before
// the manager's handle. An exception in it counts as nothing freed.
class reclaim_callback {
 public:
  reclaim_callback(nvb_memory_manager* memory, std::function<uint64_t(uint64_t)> function, int32_t priority = 0)
      : memory_(memory), function_(std::make_unique<std::function<uint64_t(uint64_t)>>(std::move(function))) {
    check(nvb_memory_add_reclaim_callback(memory, call, function_.get(), priority, &id_));
  }
  reclaim_callback(const reclaim_callback&) = delete;
  reclaim_callback& operator=(const reclaim_callback&) = delete;
  ~reclaim_callback() { static_cast<void>(nvb_memory_remove_reclaim_callback(memory_, id_)); }

 private:
  static uint64_t call(uint64_t bytes, void* function) noexcept {
    try {
      return (*static_cast<std::function<uint64_t(uint64_t)>*>(function))(bytes);
    } catch (...) {
      return 0;
    }
  }

  nvb_memory_manager* memory_;
  std::unique_ptr<std::function<uint64_t(uint64_t)>> function_;
  uint64_t id_ = 0;
};

class event : public handle<nvb_event, nvb_event_destroy> {
 public:
  using handle::handle;
  explicit event(const nvb_backend* backend) { check(nvb_event_create(backend, &pointer_)); }

  // nullptr: on the default stream of the event's backend.
  void record(nvb_stream* stream = nullptr) { check(nvb_event_record(pointer_, stream)); }
  void synchronize() { check(nvb_event_synchronize(pointer_)); }
  // Both events have been recorded and have finished.
  float milliseconds_since(nvb_event* start) const {
    float milliseconds = 0;
    check(nvb_event_get_elapsed(start, pointer_, &milliseconds));
    return milliseconds;
  }
};

class stream : public handle<nvb_stream, nvb_stream_destroy> {
 public:
  using handle::handle;
  explicit stream(const nvb_backend* backend, int32_t priority = 0) {
    check(nvb_stream_create(backend, priority, &pointer_));
  }

  void synchronize() { check(nvb_stream_synchronize(pointer_)); }
  void wait(nvb_event* event) { check(nvb_stream_wait_event(pointer_, event)); }
  // nullptr and 0 take it away again.
  void set_workspace(void* data, std::size_t bytes) { check(nvb_stream_set_workspace(pointer_, data, bytes)); }
};

// Streams of one device, given out by load; a stream goes back when it is destroyed.
class stream_manager : public handle<nvb_stream_manager, nvb_stream_manager_destroy> {
 public:
  using handle::handle;
  explicit stream_manager(const nvb_backend* backend, uint32_t streams_per_priority = 0) {
    auto options = make<nvb_stream_manager_options>();
    options.streams_per_priority = streams_per_priority;
    check(nvb_stream_manager_create(backend, &options, &pointer_));
  }

  stream acquire(int32_t priority = 0) {
    nvb_stream* least_loaded = nullptr;
    check(nvb_stream_manager_acquire(pointer_, priority, &least_loaded));
    return stream(least_loaded);
  }
  void synchronize() { check(nvb_stream_manager_synchronize(pointer_)); }
};

class weight : public handle<nvb_weight, nvb_weight_destroy> {
 public:
  using handle::handle;
  weight(const nvb_backend* backend, const nvb_weight_desc& desc, nvb_stream* stream = nullptr) {
    check(nvb_weight_create(backend, &desc, stream, &pointer_));
  }

  nvb_weight_info info() const {
    auto info = make<nvb_weight_info>();
    check(nvb_weight_get_info(pointer_, &info));
    return info;
  }
  void dequantize(const nvb_tensor& output, nvb_stream* stream = nullptr) const {
    check(nvb_weight_dequantize(pointer_, &output, stream));
  }
  // Rows of it in the same memory, which the two keep together.
  weight slice(uint64_t first_row, uint64_t rows) const {
    nvb_weight* part = nullptr;
    check(nvb_weight_slice(pointer_, first_row, rows, &part));
    return weight(part);
  }
  void restore_blocks(nvb_stream* stream = nullptr) { check(nvb_weight_restore_blocks(pointer_, stream)); }
};

// A GGUF file; what its structs point at lives as long as it.
class gguf : public handle<nvb_gguf, nvb_gguf_destroy> {
 public:
  using handle::handle;
  explicit gguf(const std::string& path) { check(nvb_gguf_open(path.c_str(), &pointer_)); }
  gguf(const void* data, size_t bytes) { check(nvb_gguf_open_memory(data, bytes, &pointer_)); }

  nvb_gguf_info info() const {
    auto info = make<nvb_gguf_info>();
    check(nvb_gguf_get_info(pointer_, &info));
    return info;
  }
  nvb_gguf_tensor tensor(size_t index) const {
    auto tensor = make<nvb_gguf_tensor>();
    check(nvb_gguf_get_tensor(pointer_, index, &tensor));
    return tensor;
  }
  nvb_gguf_tensor tensor(const std::string& name) const {
    auto tensor = make<nvb_gguf_tensor>();
    check(nvb_gguf_find_tensor(pointer_, name.c_str(), &tensor));
    return tensor;
  }
  nvb_gguf_value value(const std::string& key) const {
    auto value = make<nvb_gguf_value>();
    check(nvb_gguf_find_value(pointer_, key.c_str(), &value));
    return value;
  }
  std::string text(const std::string& key, size_t index) const {
    const char* data = nullptr;
    size_t bytes = 0;
    check(nvb_gguf_get_text(pointer_, key.c_str(), index, &data, &bytes));
    return std::string(data, bytes);
  }
};

class kv_cache : public handle<nvb_kv_cache, nvb_kv_cache_destroy> {
 public:
  using handle::handle;
  kv_cache(const nvb_backend* backend, const nvb_kv_cache_options& options) {
    check(nvb_kv_cache_create(backend, &options, &pointer_));
  }

  uint64_t bytes() const {
    uint64_t bytes = 0;
    check(nvb_kv_cache_get_bytes(pointer_, &bytes));
    return bytes;
  }

  void reserve(uint32_t sequence, uint32_t tokens, nvb_stream* stream) const {
    check(nvb_kv_cache_reserve(pointer_, sequence, tokens, stream));
  }
  void truncate(uint32_t sequence, uint32_t tokens, nvb_stream* stream) const {
    check(nvb_kv_cache_truncate(pointer_, sequence, tokens, stream));
  }
  void release_sequence(uint32_t sequence, nvb_stream* stream) const {
    check(nvb_kv_cache_release(pointer_, sequence, stream));
  }
  void fork(uint32_t from, uint32_t to, uint32_t tokens, nvb_stream* stream) const {
    check(nvb_kv_cache_fork(pointer_, from, to, tokens, stream));
  }
  void copy(uint32_t from, uint32_t to, uint32_t tokens, nvb_stream* stream) const {
    check(nvb_kv_cache_copy(pointer_, from, to, tokens, stream));
  }

  uint32_t length(uint32_t sequence) const {
    uint32_t tokens = 0;
    check(nvb_kv_cache_get_length(pointer_, sequence, &tokens));
    return tokens;
  }
  nvb_kv_cache_usage usage() const {
    auto usage = make<nvb_kv_cache_usage>();
    check(nvb_kv_cache_get_usage(pointer_, &usage));
    return usage;
  }
};

class attention : public handle<nvb_attention, nvb_attention_destroy> {
 public:
  using handle::handle;
  attention(const nvb_backend* backend, const nvb_attention_options& options) {
    check(nvb_attention_create(backend, &options, &pointer_));
  }

  void prefill(const nvb_attention_prefill_args& args, nvb_stream* stream) const {
    check(nvb_attention_prefill(pointer_, &args, stream));
  }
  void decode(const nvb_attention_decode_args& args, nvb_stream* stream) const {
    check(nvb_attention_decode(pointer_, &args, stream));
  }
};

// Memory ----------------------------------------------------------------------------------------------------------

// A block of device memory. Freeing waits for the device, so the block may be destroyed while work that uses it runs.
class buffer {
 public:
  buffer() noexcept = default;
  // At least 1 byte; `stream` may use the block at once, other streams after an event.
  buffer(const nvb_backend* backend, std::size_t bytes, nvb_stream* stream = nullptr)
      : memory_(backend), bytes_(bytes) {
    check(nvb_memory_allocate(memory_, bytes, stream, &data_));
  }
  buffer(buffer&& other) noexcept
      : memory_(std::move(other.memory_)),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~buffer() {
    if (data_ != nullptr) nvb_memory_free(memory_, data_, nullptr);
  }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

  // Queue a copy of the first `bytes`; the host memory stays valid until `stream` has passed it.
  void upload(const void* source, std::size_t bytes, nvb_stream* stream) {
    check(nvb_memory_copy(memory_, data_, source, bytes, NVB_COPY_HOST_TO_DEVICE, stream));
  }
  void download(void* destination, std::size_t bytes, nvb_stream* stream) const {
    check(nvb_memory_copy(memory_, destination, data_, bytes, NVB_COPY_DEVICE_TO_HOST, stream));
  }

 private:
  memory_manager memory_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Host memory that copies run fastest with. Destroy it before the backend, and after the copies that use it.
class host_buffer {
 public:
  host_buffer() noexcept = default;
  host_buffer(const nvb_backend* backend, std::size_t bytes) : backend_(backend), bytes_(bytes) {
    check(nvb_host_allocate(backend, bytes, &data_));
  }
  host_buffer(host_buffer&& other) noexcept
      : backend_(other.backend_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  host_buffer& operator=(host_buffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~host_buffer() {
    if (data_ != nullptr) nvb_host_free(backend_, data_, bytes_);
  }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return bytes_; }

 private:
  const nvb_backend* backend_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace nvb

#endif  // NVBACKEND_HPP
