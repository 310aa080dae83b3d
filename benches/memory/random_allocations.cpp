// Random allocations and frees of one thread on one stream, the work of RMM's benchmark of that name: at most 2 N steps
// with N allocations, 73 % of them allocations of 1 byte to M MiB, uniform; the others free a random live block, and so
// do allocations that would pass the cap on live bytes. What is left is freed at the end, inside the time.
#include <algorithm>

#include "measure.h"

namespace {

constexpr uint64_t kCap = 16000 * kMiB;
constexpr uint64_t kAllocatePercent = 73;

// bytes > 0: allocate; 0: free the live block at `victim`, whose place the last one takes.
struct Step {
  size_t bytes;
  size_t victim;
};

// Drawn beforehand, so that every side does the same and drawing is not timed.
std::vector<Step> draw(int allocations, size_t largest, uint64_t cap) {
  Random random(static_cast<uint64_t>(allocations) * 31 + largest);
  std::vector<Step> steps;
  std::vector<size_t> live;
  uint64_t live_bytes = 0;
  int allocated = 0;
  for (int i = 0; i < 2 * allocations && allocated < allocations; ++i) {
    size_t bytes = 1 + random.below(largest);
    bool allocate = live.empty() || (random.below(100) < kAllocatePercent && live_bytes + bytes <= cap);
    if (allocate) {
      live.push_back(bytes);
      live_bytes += bytes;
      ++allocated;
      steps.push_back({bytes, 0});
    } else {
      size_t victim = random.below(live.size());
      live_bytes -= live[victim];
      live[victim] = live.back();
      live.pop_back();
      steps.push_back({0, victim});
    }
  }
  for (size_t left = live.size(); left > 0; --left) steps.push_back({0, left - 1});
  return steps;
}

void run(Allocator& side, const std::vector<Step>& steps, std::vector<void*>& live) {
  for (const Step& step : steps) {
    if (step.bytes > 0) {
      live.push_back(side.allocate(step.bytes, 0));
    } else {
      side.release(live[step.victim], 0);
      live[step.victim] = live.back();
      live.pop_back();
    }
  }
}

// The work over and over for 20 ms, as RMM's harness repeats it: a single run of a thousand allocations measures how
// cold the other side has left the caches. Returns the mean of a run.
double milliseconds_of(Allocator& side, const std::vector<Step>& steps, std::vector<void*>& live) {
  double start = now(), end = start;
  int runs = 0;
  do {
    run(side, steps, live);
    ++runs;
    end = now();
  } while (end - start < 0.02);
  return (end - start) * 1e3 / runs;
}

}  // namespace

void bench_random_allocations(const Options& options, const Device& device, Allocator& ours, const Peers& peers) {
  // Each side keeps what it had, and none of them reuses as tightly as the sum of live bytes says.
  uint64_t cap = std::min<uint64_t>(kCap, device.free_bytes() / (device.is_cuda() ? 4 : 8) / kMiB * kMiB);
  for (int allocations : {1000, 10000, 100000}) {
    if (options.quick && allocations > 1000) continue;
    for (size_t mib : {1, 4, 64, 256, 1024}) {
      std::vector<Step> steps = draw(allocations, mib * kMiB, cap);
      std::vector<Allocator*> sides = {&ours, peers.pool.get()};
      if (allocations == 1000) {
        // They grow with the bytes, from microseconds to milliseconds a call.
        if (peers.default_pool) sides.push_back(peers.default_pool.get());
        if (peers.plain) sides.push_back(peers.plain.get());
      }
      std::vector<void*> live;
      live.reserve(steps.size());
      // A run of the last case takes the device's own pool half a minute.
      const int samples = options.quick || (allocations == 100000 && mib == 1024) ? 1 : 5;
      const Medians medians =
          interleave(sides, samples, [&](Allocator& side) { return milliseconds_of(side, steps, live); });
      std::string what = "allocations=" + std::to_string(allocations) + " largest=" + std::to_string(mib) +
                         " MiB cap=" + std::to_string(cap / kMiB) + " MiB";
      print_rows("memory random allocations", what, sides, medians, "ms", Better::kLower);
      for (Allocator* side : sides) side->reset();
    }
  }
}
