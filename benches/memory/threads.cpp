// Threads that allocate and free at once: throughput, and the time of single calls. Each thread holds 64 blocks of 256
// B to 256 KiB and replaces one after the other at random; or it passes what it allocates to the next thread, which
// frees it on the stream that it was made for, one by one or in one call for all that have arrived. All threads use one
// stream, or each its own.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <thread>

#include "measure.h"

namespace {

constexpr size_t kHeld = 64;
constexpr int kMostThreads = 16;

struct Setting {
  int threads;
  enum Frees { kSameThread, kNextThread, kNextThreadMany } frees;
  bool private_streams;

  int stream(int thread) const { return private_streams ? 1 + thread : 0; }
};

size_t random_size(Random& random) {
  return (size_t{256} << random.below(10)) + random.below(256);
}

// Counts of nanoseconds, sixteen buckets to a doubling.
class Histogram {
 public:
  void add(double nanoseconds) {
    int bucket = nanoseconds < 1 ? 0 : static_cast<int>(std::log2(nanoseconds) * 16);
    ++counts_[static_cast<size_t>(std::min(bucket, kBuckets - 1))];
  }
  void add(const Histogram& other) {
    for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  }
  // The middle of the bucket below which `part` of the counts lie.
  double quantile(double part) const {
    uint64_t total = 0, below = 0;
    for (uint64_t count : counts_) total += count;
    for (size_t i = 0; i < counts_.size(); ++i) {
      below += counts_[i];
      if (static_cast<double>(below) >= part * static_cast<double>(total)) {
        return std::exp2((static_cast<double>(i) + 0.5) / 16);
      }
    }
    return 0;
  }

 private:
  static constexpr int kBuckets = 16 * 36;
  std::array<uint64_t, kBuckets> counts_{};
};

// Blocks on their way from one thread to another, a handful at a time, so that what is measured is the allocator and
// not the two threads' struggle for the ring's counters.
class Ring {
 public:
  static constexpr size_t kMost = 32;
  static constexpr size_t kCapacity = 512;

  size_t room() const {
    return blocks_.size() - (tail_.load(std::memory_order_relaxed) - head_.load(std::memory_order_acquire));
  }
  // `count` is at most `room()`.
  void push(void* const* blocks, size_t count) {
    size_t tail = tail_.load(std::memory_order_relaxed);
    for (size_t i = 0; i < count; ++i) blocks_[(tail + i) % blocks_.size()] = blocks[i];
    tail_.store(tail + count, std::memory_order_release);
  }
  size_t pop(void** blocks, size_t most) {
    size_t head = head_.load(std::memory_order_relaxed);
    size_t count = std::min(most, tail_.load(std::memory_order_acquire) - head);
    for (size_t i = 0; i < count; ++i) blocks[i] = blocks_[(head + i) % blocks_.size()];
    head_.store(head + count, std::memory_order_release);
    return count;
  }

 private:
  alignas(128) std::atomic<size_t> head_{0};
  alignas(128) std::atomic<size_t> tail_{0};
  alignas(128) std::array<void*, kCapacity> blocks_{};
};

// One thread's count of calls, on a cache line of its own, and their times if they are wanted.
struct alignas(128) Tally {
  uint64_t calls = 0;
  Histogram times;
};

template <class Call>
auto timed(Tally& tally, bool wanted, Call call) {
  ++tally.calls;
  if (!wanted) return call();
  double start = now();
  auto result = call();
  tally.times.add((now() - start) * 1e9);
  return result;
}

class Run {
 public:
  Run(Allocator& side, const Setting& setting, bool with_times)
      : side_(side), setting_(setting), with_times_(with_times) {}

  // Calls per second.
  double measure(double seconds) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < setting_.threads; ++thread) {
      threads.emplace_back([this, thread] {
        side_.attach();
        setting_.frees == Setting::kSameThread ? replace(thread) : pass_on(thread);
      });
    }
    while (ready_.load() < setting_.threads) std::this_thread::yield();
    double start = now();
    go_.store(true, std::memory_order_release);
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop_.store(true);
    double elapsed = now() - start;
    for (std::thread& thread : threads) thread.join();
    for (int thread = 0; thread < setting_.threads; ++thread) {
      void* block;
      while (rings_[thread].pop(&block, 1) > 0) side_.release(block, setting_.stream(thread));
    }
    uint64_t calls = 0;
    for (const Tally& tally : tallies_) calls += tally.calls;
    return static_cast<double>(calls) / elapsed;
  }

  Histogram times() const {
    Histogram all;
    for (const Tally& tally : tallies_) all.add(tally.times);
    return all;
  }

 private:
  void* allocate(int thread, size_t bytes) {
    return timed(tallies_[thread], with_times_, [&] { return side_.allocate(bytes, setting_.stream(thread)); });
  }
  // `owner`: the thread that allocated it, whose stream it is.
  void release(int thread, void* block, int owner) {
    timed(tallies_[thread], with_times_, [&] {
      side_.release(block, setting_.stream(owner));
      return 0;
    });
  }

  // Counts as many calls as blocks; its time is a block's share.
  void release_many(int thread, void* const* blocks, size_t count, int owner) {
    if (count == 0) return;
    double start = with_times_ ? now() : 0;
    side_.release_many(blocks, count, setting_.stream(owner));
    tallies_[thread].calls += count;
    if (with_times_) tallies_[thread].times.add((now() - start) * 1e9 / static_cast<double>(count));
  }

  void replace(int thread) {
    Random random(static_cast<uint64_t>(thread) + 1);
    std::array<void*, kHeld> held;
    for (void*& block : held) block = side_.allocate(random_size(random), setting_.stream(thread));
    wait_for_start();
    while (!stop_.load(std::memory_order_relaxed)) {
      for (int i = 0; i < 32; ++i) {
        void*& block = held[random.below(kHeld)];
        release(thread, block, thread);
        block = allocate(thread, random_size(random));
      }
    }
    for (void* block : held) side_.release(block, setting_.stream(thread));
  }

  void pass_on(int thread) {
    Random random(static_cast<uint64_t>(thread) + 1);
    const int before = (thread + setting_.threads - 1) % setting_.threads;
    Ring& mine = rings_[before];
    Ring& next = rings_[thread];
    const bool many = setting_.frees == Setting::kNextThreadMany;
    wait_for_start();
    void* blocks[Ring::kCapacity];
    while (!stop_.load(std::memory_order_relaxed)) {
      const size_t made = std::min(Ring::kMost, next.room());
      for (size_t i = 0; i < made; ++i) blocks[i] = allocate(thread, random_size(random));
      next.push(blocks, made);
      const size_t taken = mine.pop(blocks, many ? Ring::kCapacity : Ring::kMost);
      if (many) {
        release_many(thread, blocks, taken, before);
      } else {
        for (size_t i = 0; i < taken; ++i) release(thread, blocks[i], before);
      }
      if (made + taken == 0) std::this_thread::yield();
    }
  }

  void wait_for_start() {
    ready_.fetch_add(1);
    while (!go_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

  Allocator& side_;
  const Setting setting_;
  const bool with_times_;
  std::atomic<int> ready_{0};
  std::atomic<bool> go_{false}, stop_{false};
  std::array<Tally, kMostThreads> tallies_{};
  std::array<Ring, kMostThreads> rings_{};
};

// Calls per second by count of threads, side and round. Like the sides, the counts of threads take turns: a virtual
// machine's one thread may run 1.5 times as fast some seconds later, and what is compared should be of one round.
using Rates = std::vector<std::vector<std::vector<double>>>;

Rates measure_rates(const Options& options, const std::vector<Allocator*>& sides, const std::vector<int>& counts,
                    Setting setting, double seconds) {
  Rates rates(counts.size(), std::vector<std::vector<double>>(sides.size()));
  for (int round = -1; round < (options.quick ? 1 : 5); ++round) {
    for (size_t count = 0; count < counts.size(); ++count) {
      setting.threads = counts[count];
      for (size_t side = 0; side < sides.size(); ++side) {
        sides[side]->begin();
        const double rate = std::make_unique<Run>(*sides[side], setting, false)->measure(seconds);
        if (round >= 0) rates[count][side].push_back(rate);
      }
    }
  }
  return rates;
}

void print_rates(const std::string& what, const std::vector<Allocator*>& sides, const std::vector<int>& counts,
                 const Rates& rates) {
  for (size_t count = 0; count < counts.size(); ++count) {
    std::vector<double> millions, against_one;
    for (size_t side = 0; side < sides.size(); ++side) {
      millions.push_back(1e-6 * median(rates[count][side]));
      std::vector<double> ratios;
      for (size_t round = 0; round < rates[count][side].size(); ++round) {
        ratios.push_back(rates[count][side][round] / rates[0][side][round]);
      }
      against_one.push_back(median(ratios));
    }
    const std::string threads = "threads=" + std::to_string(counts[count]) + " " + what;
    print_rows("memory threads", threads, sides, millions, "million calls/s", Better::kHigher);
    if (count > 0) {
      print_rows("memory threads", threads + " against 1", sides, against_one, "times as many", Better::kHigher);
    }
  }
}

}  // namespace

void bench_threads(const Options& options, Allocator& ours, const Peers& peers) {
  const std::vector<Allocator*> sides = {&ours, peers.pool.get()};
  const double seconds = options.quick ? 0.02 : 0.2;
  const std::vector<int> counts = options.quick ? std::vector<int>{1, 4} : std::vector<int>{1, 2, 4, 8, 16};
  const std::pair<Setting::Frees, const char*> ways[] = {
      {Setting::kSameThread, "same thread"},
      {Setting::kNextThread, "next thread"},
      {Setting::kNextThreadMany, "next thread, all that arrived"},
  };
  for (auto [frees, way] : ways) {
    for (bool private_streams : {false, true}) {
      const std::string what = std::string("frees=") + way + " streams=" + (private_streams ? "private" : "shared");
      Setting setting{0, frees, private_streams};
      print_rates(what, sides, counts, measure_rates(options, sides, counts, setting, seconds));
      // A second pass, since reading the clock twice a call costs more than many calls do.
      for (int threads : counts) {
        setting.threads = threads;
        std::vector<Histogram> times(sides.size());
        for (size_t i = 0; i < sides.size(); ++i) {
          sides[i]->begin();
          auto run = std::make_unique<Run>(*sides[i], setting, true);
          run->measure(seconds);
          times[i] = run->times();
        }
        for (auto [name, part] : {std::pair{"p50", 0.5}, {"p99", 0.99}, {"p99.9", 0.999}}) {
          std::vector<double> quantiles;
          for (const Histogram& of_side : times) quantiles.push_back(of_side.quantile(part));
          print_rows("memory threads", "threads=" + std::to_string(threads) + " " + what + " " + name, sides, quantiles,
                     "ns", Better::kLower);
        }
      }
      for (Allocator* side : sides) side->reset();
    }
  }
}
