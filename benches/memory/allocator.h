// The sides of a comparison: each allocates and frees on numbered streams, and is called alike.
#pragma once
#include <nvbackend.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// Ends the program with a text on standard error and status 1.
[[noreturn]] void fail(const std::string& text);
// Fails with the library's own words unless the status is NVB_OK.
void expect(nvb_status status, const char* what);

constexpr size_t kKiB = 1 << 10;
constexpr size_t kMiB = 1 << 20;

class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual const char* name() const = 0;
  // Before the first call of each thread.
  virtual void attach() {}
  // Before each sample.
  virtual void begin() {}
  virtual void* allocate(size_t bytes, int stream) = 0;
  virtual void release(void* block, int stream) = 0;
  // Many blocks in one call, where the side has such a call.
  virtual void release_many(void* const* blocks, size_t count, int stream) {
    for (size_t i = 0; i < count; ++i) release(blocks[i], stream);
  }
  // Waits for the streams and gives back what is cached.
  virtual void reset() {}
};

// A backend with its memory manager and the streams that all sides use. Stream 0 is the shared one.
struct Device {
  nvb_backend* backend = nullptr;
  nvb_memory_manager* memory = nullptr;
  nvb_device_info info{};
  std::vector<nvb_stream*> streams;
  // `streams` as the driver knows them; empty on the CPU.
  std::vector<void*> raw_streams;

  explicit Device(const char* name);
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device();
  bool is_cuda() const { return info.kind == NVB_DEVICE_CUDA; }
  // Bytes that are free on the device; on the CPU, available main memory.
  uint64_t free_bytes() const;
};

constexpr int kStreams = 17;

std::unique_ptr<Allocator> make_ours(const Device& device);

// What an engine would use instead. On CUDA: the device's stream-ordered pool that keeps what it has (`pool`), the same
// as it comes (`default_pool`), and plain allocation (`plain`). On the CPU: malloc, as `pool`.
struct Peers {
  std::unique_ptr<Allocator> pool, default_pool, plain;
};
Peers make_peers(const Device& device);
