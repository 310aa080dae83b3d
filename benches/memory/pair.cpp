// One thread that allocates a block and frees it, over and over: the way that an engine's temporaries go.
#include "measure.h"

namespace {

double nanoseconds_of_pair(Allocator& side, size_t bytes, int pairs) {
  double start = now();
  for (int i = 0; i < pairs; ++i) side.release(side.allocate(bytes, 0), 0);
  return (now() - start) * 1e9 / pairs;
}

// How many pairs last about this long.
int pairs_within(Allocator& side, size_t bytes, double seconds) {
  double each = nanoseconds_of_pair(side, bytes, 4) * 1e-9;
  double wanted = seconds / each;
  return wanted < 4 ? 4 : wanted > 50000 ? 50000 : static_cast<int>(wanted);
}

}  // namespace

void bench_pair(const Options& options, Allocator& ours, const Peers& peers) {
  std::vector<Allocator*> sides = {&ours, peers.pool.get()};
  if (peers.default_pool) sides.push_back(peers.default_pool.get());
  if (peers.plain) sides.push_back(peers.plain.get());
  const int samples = options.quick ? 5 : 51;
  for (size_t bytes : {size_t{256}, 4 * kKiB, kMiB, 2 * kMiB, 64 * kMiB}) {
    const Medians medians = interleave(sides, samples, [bytes](Allocator& side) {
      return nanoseconds_of_pair(side, bytes, pairs_within(side, bytes, 4e-3));
    });
    print_rows("memory pair", "bytes=" + std::to_string(bytes), sides, medians, "ns", Better::kLower);
  }
  for (Allocator* side : sides) side->reset();
}
