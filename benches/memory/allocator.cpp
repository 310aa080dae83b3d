#include "allocator.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "driver.h"

void fail(const std::string& text) {
  std::fprintf(stderr, "bench_memory: %s\n", text.c_str());
  std::exit(1);
}

void expect(nvb_status status, const char* what) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  fail(std::string(what) + ": " + text);
}

Device::Device(const char* name) {
  nvb_backend_options options;
  nvb_backend_options_init(&options);
  options.device = name;
  expect(nvb_backend_create(&options, &backend), "nvb_backend_create");
  expect(nvb_backend_get_memory_manager(backend, 0, &memory), "nvb_backend_get_memory_manager");
  nvb_device_info_init(&info);
  expect(nvb_backend_get_device_info(backend, &info), "nvb_backend_get_device_info");
  streams.resize(kStreams);
  if (is_cuda()) {
    const Driver& driver = Driver::get();
    driver.attach(info.ordinal);
    raw_streams.resize(kStreams);
    for (int i = 0; i < kStreams; ++i) {
      driver.expect(driver.stream_create(&raw_streams[i], Driver::kNonBlocking), "cuStreamCreate");
      expect(nvb_stream_wrap(backend, raw_streams[i], &streams[i]), "nvb_stream_wrap");
    }
  } else {
    for (nvb_stream*& stream : streams) expect(nvb_stream_create(backend, 0, &stream), "nvb_stream_create");
  }
}

Device::~Device() {
  for (nvb_stream* stream : streams) expect(nvb_stream_destroy(stream), "nvb_stream_destroy");
  for (void* stream : raw_streams) Driver::get().expect(Driver::get().stream_destroy(stream), "cuStreamDestroy");
  expect(nvb_memory_manager_destroy(memory), "nvb_memory_manager_destroy");
  expect(nvb_backend_destroy(backend), "nvb_backend_destroy");
}

uint64_t Device::free_bytes() const {
  uint64_t free_bytes = 0;
  expect(nvb_memory_query_device(memory, &free_bytes, nullptr), "nvb_memory_query_device");
  return free_bytes;
}

namespace {

class Ours final : public Allocator {
 public:
  explicit Ours(const Device& device) : memory_(device.memory), streams_(device.streams) {}
  const char* name() const override { return "nvbackend"; }

  void* allocate(size_t bytes, int stream) override {
    void* block = nullptr;
    nvb_status status = nvb_memory_allocate(memory_, bytes, streams_[stream], &block);
    if (status != NVB_OK) expect(status, "nvb_memory_allocate");
    return block;
  }

  void release(void* block, int stream) override {
    nvb_status status = nvb_memory_free(memory_, block, streams_[stream]);
    if (status != NVB_OK) expect(status, "nvb_memory_free");
  }

  void release_many(void* const* blocks, size_t count, int stream) override {
    nvb_status status = nvb_memory_free_many(memory_, blocks, count, streams_[stream]);
    if (status != NVB_OK) expect(status, "nvb_memory_free_many");
  }

  void reset() override { expect(nvb_memory_trim(memory_, 0, nullptr), "nvb_memory_trim"); }

 private:
  nvb_memory_manager* memory_;
  const std::vector<nvb_stream*>& streams_;
};

class Malloc final : public Allocator {
 public:
  const char* name() const override { return "malloc, free"; }

  void* allocate(size_t bytes, int) override {
    void* block = std::malloc(bytes);
    // Without this use of the block the compiler may leave the pair out.
    __asm__ volatile("" : : "r"(block) : "memory");
    if (block == nullptr) fail("malloc: no memory");
    return block;
  }

  void release(void* block, int) override { std::free(block); }
};

// The device's own pool, with the bytes that it keeps when the device is synchronised set before each sample.
class Pool final : public Allocator {
 public:
  Pool(const Device& device, const char* name, uint64_t threshold)
      : streams_(device.raw_streams), ordinal_(device.info.ordinal), name_(name), threshold_(threshold) {
    driver_.expect(driver_.get_default_pool(&pool_, ordinal_), "cuDeviceGetDefaultMemPool");
  }
  const char* name() const override { return name_; }
  void attach() override { driver_.attach(ordinal_); }

  void begin() override {
    driver_.expect(driver_.pool_set_attribute(pool_, Driver::kReleaseThreshold, &threshold_), "cuMemPoolSetAttribute");
  }

  void* allocate(size_t bytes, int stream) override {
    uint64_t block = 0;
    int status = driver_.allocate_async(&block, bytes, streams_[stream]);
    if (status != 0) driver_.expect(status, "cuMemAllocAsync");
    return reinterpret_cast<void*>(block);
  }

  void release(void* block, int stream) override {
    int status = driver_.free_async(reinterpret_cast<uint64_t>(block), streams_[stream]);
    if (status != 0) driver_.expect(status, "cuMemFreeAsync");
  }

  void reset() override {
    for (void* stream : streams_) driver_.expect(driver_.stream_synchronize(stream), "cuStreamSynchronize");
    driver_.expect(driver_.pool_trim(pool_, 0), "cuMemPoolTrimTo");
  }

 private:
  const Driver& driver_ = Driver::get();
  const std::vector<void*>& streams_;
  int ordinal_;
  const char* name_;
  uint64_t threshold_;
  void* pool_ = nullptr;
};

class Plain final : public Allocator {
 public:
  explicit Plain(const Device& device) : ordinal_(device.info.ordinal) {}
  const char* name() const override { return "cuMemAlloc, cuMemFree"; }
  void attach() override { driver_.attach(ordinal_); }

  void* allocate(size_t bytes, int) override {
    uint64_t block = 0;
    int status = driver_.allocate(&block, bytes);
    if (status != 0) driver_.expect(status, "cuMemAlloc");
    return reinterpret_cast<void*>(block);
  }

  void release(void* block, int) override {
    int status = driver_.free(reinterpret_cast<uint64_t>(block));
    if (status != 0) driver_.expect(status, "cuMemFree");
  }

 private:
  const Driver& driver_ = Driver::get();
  int ordinal_;
};

template <class Function>
void load(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) fail(std::string("libcuda.so.1 lacks ") + name);
}

}  // namespace

const Driver& Driver::get() {
  static const Driver driver;
  return driver;
}

Driver::Driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  load(library, "cuInit", init);
  load(library, "cuDevicePrimaryCtxRetain", retain_context);
  load(library, "cuCtxSetCurrent", set_context);
  load(library, "cuStreamCreate", stream_create);
  load(library, "cuStreamDestroy_v2", stream_destroy);
  load(library, "cuStreamSynchronize", stream_synchronize);
  load(library, "cuDeviceGetDefaultMemPool", get_default_pool);
  load(library, "cuMemPoolSetAttribute", pool_set_attribute);
  load(library, "cuMemPoolTrimTo", pool_trim);
  load(library, "cuMemAllocAsync", allocate_async);
  load(library, "cuMemFreeAsync", free_async);
  load(library, "cuMemAlloc_v2", allocate);
  load(library, "cuMemFree_v2", free);
  expect(init(0), "cuInit");
}

void Driver::expect(int status, const char* what) const {
  if (status != 0) fail(std::string(what) + " returned " + std::to_string(status));
}

void Driver::attach(int ordinal) const {
  // One reference for the process, which keeps it to its end.
  static void* context = [this, ordinal] {
    void* retained = nullptr;
    expect(retain_context(&retained, ordinal), "cuDevicePrimaryCtxRetain");
    return retained;
  }();
  expect(set_context(context), "cuCtxSetCurrent");
}

std::unique_ptr<Allocator> make_ours(const Device& device) {
  return std::make_unique<Ours>(device);
}

Peers make_peers(const Device& device) {
  Peers peers;
  if (!device.is_cuda()) {
    peers.pool = std::make_unique<Malloc>();
    return peers;
  }
  peers.pool =
      std::make_unique<Pool>(device, "cuMemAllocAsync, cuMemFreeAsync, release threshold at its maximum", ~0ull);
  peers.default_pool = std::make_unique<Pool>(device, "cuMemAllocAsync, cuMemFreeAsync, default release threshold", 0);
  peers.plain = std::make_unique<Plain>(device);
  return peers;
}
