// What an allocation costs among holes: holes of ((i mod 8) + 1) · 256 bytes, each behind a live separator of 256, the
// work of RMM's pool_fragmentation. A pair of 1 KiB, which most sides serve from what was just freed, and a burst of
// 256 blocks held at a time, which they cannot.
#include "measure.h"

namespace {

constexpr size_t kGranule = 256;
constexpr size_t kBytes = 1024;
constexpr int kBurst = 256;

class Holes {
 public:
  Holes(Allocator& side, int depth) : side_(side) {
    std::vector<void*> holes;
    for (int i = 0; i < depth; ++i) {
      holes.push_back(side.allocate(static_cast<size_t>(i % 8 + 1) * kGranule, 0));
      separators_.push_back(side.allocate(kGranule, 0));
    }
    for (void* hole : holes) side.release(hole, 0);
  }
  ~Holes() {
    for (void* separator : separators_) side_.release(separator, 0);
  }
  Holes(const Holes&) = delete;
  Holes& operator=(const Holes&) = delete;

 private:
  Allocator& side_;
  std::vector<void*> separators_;
};

double nanoseconds_of_pair(Allocator& side, int held) {
  const int rounds = 4096 / held;
  std::vector<void*> blocks(static_cast<size_t>(held));
  double start = now();
  for (int round = 0; round < rounds; ++round) {
    for (void*& block : blocks) block = side.allocate(kBytes, 0);
    for (void* block : blocks) side.release(block, 0);
  }
  return (now() - start) * 1e9 / (rounds * held);
}

}  // namespace

void bench_fragmentation(const Options& options, Allocator& ours, const Peers& peers) {
  const std::vector<Allocator*> sides = {&ours, peers.pool.get()};
  for (int held : {1, kBurst}) {
    const std::string work = held == 1 ? "pair" : "burst of " + std::to_string(held);
    std::vector<double> at_4096;
    for (int depth : {16, 256, 4096, 16384, 65536}) {
      std::vector<std::unique_ptr<Holes>> holes;
      for (Allocator* side : sides) {
        side->begin();
        holes.push_back(std::make_unique<Holes>(*side, depth));
      }
      const Medians medians =
          interleave(sides, options.samples(), [held](Allocator& side) { return nanoseconds_of_pair(side, held); });
      print_rows("memory fragmentation", work + " holes=" + std::to_string(depth), sides, medians, "ns",
                 Better::kLower);
      if (depth == 4096) at_4096 = medians.values;
      if (depth == 65536) {
        std::vector<double> values = medians.values;
        for (size_t i = 0; i < values.size(); ++i) values[i] /= at_4096[i];
        print_rows("memory fragmentation", work + " holes=65536 against 4096", sides, values, "times as long",
                   Better::kLower);
      }
      holes.clear();
      for (Allocator* side : sides) side->reset();
    }
  }
}
