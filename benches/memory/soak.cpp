// Sixteen threads that allocate, write, pass on, check and free under limits which force every recovery step of the
// out-of-memory ladder. Each block carries a number in its first and last bytes, written and read back on its stream
// with nothing waited for in between: whoever gets a block too early, or two at once, leaves another number there.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

#include "measure.h"

namespace {

constexpr int kThreads = 16;
constexpr size_t kHeld = 48;
constexpr size_t kMark = 16;
constexpr size_t kReadings = 512;
constexpr size_t kSpares = 64;

struct Block {
  void* pointer = nullptr;
  size_t bytes = 0;
  int stream = 0;
  size_t manager = 0;
  nvb_pool* pool = nullptr;
  uint8_t mark = 0;
};

std::atomic<uint64_t> violations{0};

void violate(const std::string& text) {
  if (violations.fetch_add(1) < 20) std::fprintf(stderr, "violation: %s\n", text.c_str());
}

void check(nvb_status status, const char* what) {
  if (status == NVB_OK) return;
  char text[1024];
  nvb_last_error_message(text, sizeof text);
  violate(std::string(what) + ": " + text);
}

// A manager with what its reclaim callback may free: blocks that threads had no more use for.
struct Manager {
  nvb_memory_manager* memory = nullptr;
  const Device* device = nullptr;
  std::mutex lock;
  std::vector<Block> spares;
  std::atomic<uint64_t> reclaimed{0};

  static uint64_t reclaim(uint64_t bytes, void* self) {
    Manager& manager = *static_cast<Manager*>(self);
    uint64_t freed = 0;
    while (freed < bytes) {
      Block block;
      {
        std::lock_guard<std::mutex> guard(manager.lock);
        if (manager.spares.empty()) break;
        block = manager.spares.back();
        manager.spares.pop_back();
      }
      check(nvb_memory_free(manager.memory, block.pointer, manager.device->streams[block.stream]),
            "free in a callback");
      freed += block.bytes;
    }
    manager.reclaimed += freed;
    return freed;
  }
};

struct Soak {
  const Device& device;
  std::array<Manager, 3> managers;
  // Blocks on their way to whichever thread looks first.
  std::array<std::atomic<Block*>, 64> mail{};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> operations{0}, refused{0}, checked{0};
};

// What was read from blocks, to be compared when the stream has come that far.
struct Readings {
  const Device& device;
  uint8_t* bytes = nullptr;
  std::array<Block, kReadings> blocks;
  size_t count = 0;

  explicit Readings(const Device& device) : device(device) {
    void* pointer = nullptr;
    expect(nvb_host_allocate(device.backend, kReadings * 2 * kMark, &pointer), "nvb_host_allocate");
    bytes = static_cast<uint8_t*>(pointer);
  }
  Readings(const Readings&) = delete;
  Readings& operator=(const Readings&) = delete;
  ~Readings() { expect(nvb_host_free(device.backend, bytes, kReadings * 2 * kMark), "nvb_host_free"); }
};

class Worker {
 public:
  Worker(Soak& soak, int number) : soak_(soak), number_(number), random_(number + 1), readings_(soak.device) {
    expect(nvb_event_create(soak.device.backend, &event_), "nvb_event_create");
  }

  void run() {
    while (!soak_.stop.load(std::memory_order_relaxed)) step();
    while (!held_.empty()) release(take_held());
    compare();
    expect(nvb_event_destroy(event_), "nvb_event_destroy");
  }

 private:
  size_t random_size() {
    uint64_t kind = random_.below(100);
    if (kind < 70) return kMark + random_.below(64 * kKiB);
    if (kind < 90) return kMark + random_.below(kMiB);
    if (kind < 99) return kMiB + random_.below(15 * kMiB);
    return 16 * kMiB + random_.below(48 * kMiB);
  }

  nvb_stream* stream(int index) const { return soak_.device.streams[index]; }

  void step() {
    soak_.operations.fetch_add(1, std::memory_order_relaxed);
    uint64_t kind = random_.below(1000);
    Manager& manager = soak_.managers[random_.below(soak_.managers.size())];
    if (kind < 480) {
      allocate(nullptr, random_.below(soak_.managers.size()));
    } else if (kind < 900) {
      if (!held_.empty()) release(take_held());
    } else if (kind < 960) {
      pass_on();
    } else if (kind < 985) {
      spare();
    } else if (kind < 993) {
      use_pool(random_.below(soak_.managers.size()));
    } else if (kind < 995) {
      check(nvb_memory_trim(manager.memory, random_.below(2) * 32 * kMiB, nullptr), "trim");
    } else {
      nvb_memory_statistics statistics;
      nvb_memory_statistics_init(&statistics);
      check(nvb_memory_get_statistics(manager.memory, &statistics), "statistics");
      if (statistics.limit > 0 && statistics.reserved > statistics.limit) violate("more is held than the limit allows");
    }
    while (held_.size() > kHeld) release(take_held());
  }

  Block take_held() {
    size_t index = random_.below(held_.size());
    Block block = held_[index];
    held_[index] = held_.back();
    held_.pop_back();
    return block;
  }

  // Marks both ends of a new block. False if there was no memory.
  bool allocate(nvb_pool* pool, size_t manager) {
    Block block;
    block.bytes = random_size();
    // A stream of one's own mostly, now and then the one that all use.
    block.stream = random_.below(4) == 0 ? 0 : 1 + number_;
    block.manager = manager;
    block.pool = pool;
    block.mark = static_cast<uint8_t>(1 + random_.below(255));
    nvb_memory_manager* memory = soak_.managers[manager].memory;
    size_t alignment = size_t{256} << random_.below(8);
    nvb_status status =
        pool != nullptr ? nvb_pool_allocate(pool, block.bytes, stream(block.stream), &block.pointer)
        : random_.below(16) == 0
            ? nvb_memory_allocate_aligned(memory, block.bytes, alignment, stream(block.stream), &block.pointer)
            : nvb_memory_allocate(memory, block.bytes, stream(block.stream), &block.pointer);
    if (status == NVB_ERROR_OUT_OF_MEMORY) {
      soak_.refused.fetch_add(1, std::memory_order_relaxed);
      for (size_t i = held_.size() / 2; i > 0; --i) release(take_held());
      return false;
    }
    check(status, "allocate");
    if (status != NVB_OK) return false;
    check(nvb_memory_fill(memory, block.pointer, block.mark, kMark, stream(block.stream)), "fill");
    check(nvb_memory_fill(memory, end_of(block), block.mark, kMark, stream(block.stream)), "fill");
    held_.push_back(block);
    return true;
  }

  static uint8_t* end_of(const Block& block) { return static_cast<uint8_t*>(block.pointer) + block.bytes - kMark; }

  void read(const Block& block) {
    if (readings_.count == kReadings) compare();
    nvb_memory_manager* memory = soak_.managers[block.manager].memory;
    uint8_t* to = readings_.bytes + readings_.count * 2 * kMark;
    check(nvb_memory_copy(memory, to, block.pointer, kMark, NVB_COPY_DEVICE_TO_HOST, stream(block.stream)), "copy");
    check(nvb_memory_copy(memory, to + kMark, end_of(block), kMark, NVB_COPY_DEVICE_TO_HOST, stream(block.stream)),
          "copy");
    readings_.blocks[readings_.count++] = block;
  }

  void compare() {
    for (nvb_stream* each : soak_.device.streams) check(nvb_stream_synchronize(each), "synchronize");
    for (size_t i = 0; i < readings_.count; ++i) {
      for (size_t at = 0; at < 2 * kMark; ++at) {
        if (readings_.bytes[i * 2 * kMark + at] == readings_.blocks[i].mark) continue;
        violate("a block holds what another owner wrote");
        break;
      }
    }
    soak_.checked.fetch_add(readings_.count, std::memory_order_relaxed);
    readings_.count = 0;
  }

  // Queues the last look at the block and frees it behind that: on its stream, or on one that waits for it.
  void release(Block block) {
    read(block);
    nvb_stream* on = stream(block.stream);
    if (random_.below(8) == 0) {
      check(nvb_event_record(event_, on), "record");
      on = stream(1 + number_);
      check(nvb_stream_wait_event(on, event_), "wait");
    }
    if (block.pool != nullptr && random_.below(2) == 0) {
      check(nvb_pool_free(block.pool, block.pointer, on), "free to a pool");
    } else {
      check(nvb_memory_free(soak_.managers[block.manager].memory, block.pointer, on), "free");
    }
  }

  // Leaves a block to another thread, and takes what was left to this one.
  void pass_on() {
    if (held_.empty()) return;
    std::atomic<Block*>& place = soak_.mail[random_.below(soak_.mail.size())];
    std::unique_ptr<Block> received(place.exchange(new Block(take_held()), std::memory_order_acq_rel));
    if (received) release(*received);
  }

  void spare() {
    if (held_.empty()) return;
    Block block = take_held();
    Manager& manager = soak_.managers[block.manager];
    {
      std::lock_guard<std::mutex> guard(manager.lock);
      if (manager.spares.size() < kSpares) {
        manager.spares.push_back(block);
        return;
      }
    }
    release(block);
  }

  void use_pool(size_t manager) {
    nvb_pool* pool = nullptr;
    check(nvb_pool_create(soak_.managers[manager].memory, "soak", &pool), "create a pool");
    if (pool == nullptr) return;
    std::vector<Block> others;
    others.swap(held_);
    for (int i = 0; i < 12; ++i) allocate(pool, manager);
    while (held_.size() > 4) release(take_held());
    for (const Block& block : held_) read(block);
    uint64_t left = held_.size(), freed = 0;
    held_.swap(others);
    if (random_.below(2) == 0) {
      check(nvb_pool_clear(pool, &freed), "clear a pool");
      if (freed != left) violate("a pool had other blocks than were left in it");
    }
    check(nvb_pool_destroy(pool), "destroy a pool");
  }

  Soak& soak_;
  int number_;
  Random random_;
  Readings readings_;
  nvb_event* event_ = nullptr;
  std::vector<Block> held_;
};

// One manager whose callbacks free, one that waits for other threads and then spills, and one that watches everything.
void create_managers(Soak& soak) {
  const uint64_t unit = (soak.device.is_cuda() ? 256 : 96) * kMiB;
  // The one that waits and spills has least: its last recovery steps are reached when the callbacks have nothing left.
  constexpr std::array<uint64_t, 3> units = {4, 2, 3};
  for (size_t i = 0; i < soak.managers.size(); ++i) {
    nvb_memory_options options;
    nvb_memory_options_init(&options);
    options.limit = units[i] * unit;
    options.margin = NVB_MEMORY_NONE;
    options.range_bytes = 64 * unit;
    if (i == 1) {
      options.wait_microseconds = 2000;
      options.spill = NVB_SPILL_PINNED;
    }
    if (i == 2) {
      options.leak_tracking = NVB_LEAK_TRACKING_SAMPLED;
      options.trace_events = 4096;
      options.zero_on_free = NVB_SWITCH_ON;
      options.thread_cache_bytes = kMiB;
    }
    Manager& manager = soak.managers[i];
    manager.device = &soak.device;
    expect(nvb_memory_manager_create(soak.device.backend, &options, &manager.memory), "nvb_memory_manager_create");
    uint64_t id = 0;
    expect(nvb_memory_add_reclaim_callback(manager.memory, Manager::reclaim, &manager, 0, &id), "a reclaim callback");
  }
}

struct RecoveryStep {
  std::string name;
  uint64_t tried = 0;
};

// Frees what is left, looks whether anything stayed behind, and prints and adds up the recovery steps.
void finish(Soak& soak, std::array<RecoveryStep, NVB_RECOVERY_STEP_COUNT>& steps) {
  for (std::atomic<Block*>& place : soak.mail) {
    std::unique_ptr<Block> block(place.load());
    if (block == nullptr) continue;
    check(nvb_memory_free(soak.managers[block->manager].memory, block->pointer, soak.device.streams[block->stream]),
          "free at the end");
  }
  for (size_t i = 0; i < soak.managers.size(); ++i) {
    Manager& manager = soak.managers[i];
    Manager::reclaim(~uint64_t{0}, &manager);
    nvb_memory_statistics statistics;
    nvb_memory_statistics_init(&statistics);
    check(nvb_memory_trim(manager.memory, 0, nullptr), "trim at the end");
    check(nvb_memory_get_statistics(manager.memory, &statistics), "statistics at the end");
    if (statistics.blocks != 0 || statistics.allocated != 0) violate("something is live after all was freed");
    if (statistics.spilled != 0) violate("something is still spilled");
    if (statistics.reserved != 0) violate("memory is held after the last trim");
    if (statistics.allocations != statistics.frees) violate("allocations and frees differ");
    std::fprintf(stderr, "manager %zu, limit %llu MiB: %llu allocations, %llu refused; recovery steps tried/helped:", i,
                 static_cast<unsigned long long>(statistics.limit / kMiB),
                 static_cast<unsigned long long>(statistics.allocations),
                 static_cast<unsigned long long>(statistics.failures));
    for (uint32_t step = 0; step < NVB_RECOVERY_STEP_COUNT; ++step) {
      nvb_memory_recovery_step_statistics of_step;
      nvb_memory_recovery_step_statistics_init(&of_step);
      check(nvb_memory_get_recovery_step_statistics(manager.memory, step, &of_step), "recovery step statistics");
      steps[step].name = of_step.name;
      steps[step].tried += of_step.tried;
      std::fprintf(stderr, " %s %llu/%llu%s", of_step.name, static_cast<unsigned long long>(of_step.tried),
                   static_cast<unsigned long long>(of_step.helped), step + 1 < NVB_RECOVERY_STEP_COUNT ? "," : "\n");
    }
    check(nvb_memory_manager_destroy(manager.memory), "destroy a manager");
  }
}

}  // namespace

bool soak(const Device& device, double seconds) {
  auto soak = std::unique_ptr<Soak>(new Soak{device, {}, {}, {}, {}, {}, {}});
  create_managers(*soak);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&soak, i] { std::make_unique<Worker>(*soak, i)->run(); });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  soak->stop.store(true);
  for (std::thread& thread : threads) thread.join();
  for (nvb_stream* stream : device.streams) check(nvb_stream_synchronize(stream), "synchronize at the end");
  std::array<RecoveryStep, NVB_RECOVERY_STEP_COUNT> steps;
  finish(*soak, steps);
  for (uint32_t step = 0; step < NVB_RECOVERY_STEP_COUNT; ++step) {
    // On the CPU a call has finished when it returns, so no work is ever waited for.
    bool on_this_device = device.is_cuda() || (step != NVB_RECOVERY_STEP_PASSED_WORK && step != NVB_RECOVERY_STEP_WAIT);
    if (on_this_device && steps[step].tried == 0) violate("never tried: " + steps[step].name);
  }
  std::fprintf(
      stderr, "%.0f s: %llu operations, %llu blocks checked, %llu requests refused, %llu violations\n", seconds,
      static_cast<unsigned long long>(soak->operations.load()), static_cast<unsigned long long>(soak->checked.load()),
      static_cast<unsigned long long>(soak->refused.load()), static_cast<unsigned long long>(violations.load()));
  return violations.load() == 0;
}
