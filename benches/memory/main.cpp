// bench_memory: what allocation costs, beside what one would use instead, in the same process and run.
//
//   bench_memory [--device DEVICE] [--quick] [--only NAME]...
//   bench_memory [--device DEVICE] --soak SECONDS
//
// NAME is pair, threads, random or fragmentation; without it all of them run. Each row is one line of JSON on standard
// output, which benches/record.py records; the same for people goes to standard error. Ratios above 1: ours is better.
// --soak runs 16 threads under limits that force every recovery step of the out-of-memory ladder instead, and ends
// with status 1 if anything was wrong.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../row.h"
#include "measure.h"

namespace {

[[noreturn]] void usage() {
  std::fprintf(stderr,
               "usage: bench_memory [--device DEVICE] [--quick] [--only pair|threads|random|fragmentation]...\n"
               "       bench_memory [--device DEVICE] --soak SECONDS\n");
  std::exit(2);
}

Options parse(int count, char** arguments) {
  Options options;
  const std::vector<std::string> names = {"pair", "threads", "random", "fragmentation"};
  for (int i = 1; i < count; ++i) {
    const char* value = i + 1 < count ? arguments[i + 1] : nullptr;
    if (std::strcmp(arguments[i], "--quick") == 0) {
      options.quick = true;
      continue;
    }
    if (value == nullptr) usage();
    if (std::strcmp(arguments[i], "--device") == 0) {
      options.device = value;
    } else if (std::strcmp(arguments[i], "--only") == 0 && std::count(names.begin(), names.end(), value) == 1) {
      options.only.push_back(value);
    } else if (std::strcmp(arguments[i], "--soak") == 0 && std::atof(value) > 0) {
      options.soak_seconds = std::atof(value);
    } else {
      usage();
    }
    ++i;
  }
  return options;
}

// The clock of a machine that was idle takes its time to rise.
void warm_up() {
  volatile uint64_t counter = 0;
  for (double start = now(); now() - start < 1.0;) counter = counter + 1;
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  Device device(options.device);
  std::fprintf(stderr, "%s, %u cores\n", device.info.name, std::thread::hardware_concurrency());
  if (options.soak_seconds > 0) return soak(device, options.soak_seconds) ? 0 : 1;
  print_run(&device.info);
  std::unique_ptr<Allocator> ours = make_ours(device);
  const Peers peers = make_peers(device);
  ours->attach();
  peers.pool->attach();
  const auto wanted = [&options](const char* name) {
    return options.only.empty() || std::count(options.only.begin(), options.only.end(), name) > 0;
  };
  if (!options.quick) warm_up();
  if (wanted("pair")) bench_pair(options, *ours, peers);
  if (wanted("fragmentation")) bench_fragmentation(options, *ours, peers);
  if (wanted("random")) bench_random_allocations(options, device, *ours, peers);
  if (wanted("threads")) bench_threads(options, *ours, peers);
  return 0;
}
