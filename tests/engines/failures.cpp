// What hosts of ggml may do to the plug-in that goes wrong, or goes on for long: allocations that fail while a graph
// runs, two contexts in two threads, and loading, using and unloading it a thousand times.
//
//   failures PLUGIN [--threads]     --threads: the two threads alone, as under ThreadSanitizer
//
// The program defines the functions of libnvbackend that allocate, which the plug-in then calls in their place, and
// fails the ones it counts to. It is linked with the host's ggml and with libnvbackend.
#include <nvbackend.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "small_graph.hpp"

namespace {

// Of the allocations to come, the first that fails, counted from 1, or 0 for none; and whether all after it fail.
std::atomic<int> failing{0};
std::atomic<bool> failing_for_ever{false};
std::atomic<int> counted{0};

bool fails_now() {
  const int wanted = failing.load();
  if (wanted == 0) return false;
  const int number = ++counted;
  return failing_for_ever.load() ? number >= wanted : number == wanted;
}

std::vector<float> expected_result() {
  ggml_backend_t backend = make_backend();
  std::vector<float> expected;
  {
    Model model(backend, 0);
    if (model.compute() != GGML_STATUS_SUCCESS) fail("the graph failed", 0);
    expected = model.result();
  }
  ggml_backend_free(backend);
  double sum = 0.0;
  for (const float value : expected) sum += value;
  // A softmax's rows add up to 1.
  if (!(std::fabs(sum - kTokens * kHeads) < 1e-3)) fail("the result is no softmax", static_cast<int>(sum));
  return expected;
}

// Fails each allocation of a graph in turn. The graph of a model that failed, and one of the same stream, then give
// what the stream's first gave.
int fail_allocations(bool for_ever) {
  int number = 1;
  for (;; ++number) {
    ggml_backend_t backend = make_backend();
    bool failed = false;
    {
      // Another scale, so that the attention is made anew.
      const int variant = number + (for_ever ? 1000 : 0);
      Model model(backend, variant);
      counted = 0;
      failing_for_ever = for_ever;
      failing = number;
      const ggml_status status = model.compute();
      failing = 0;
      failed = status != GGML_STATUS_SUCCESS;
      if (failed && status != GGML_STATUS_ALLOC_FAILED) fail("the status is not that of an allocation", number);
      if (counted >= number && !failed) fail("a failed allocation was not reported", number);
      if (model.compute() != GGML_STATUS_SUCCESS) fail("the graph fails after the failure", number);
      const std::vector<float> after = model.result();
      Model fresh(backend, variant);
      if (fresh.compute() != GGML_STATUS_SUCCESS) fail("another graph fails after the failure", number);
      if (after != fresh.result()) fail("other results after the failure", number);
    }
    ggml_backend_free(backend);
    if (!failed) return number - 1;
    if (number > 1000) fail("there is no end of allocations", number);
  }
}

void two_threads(const std::vector<float>& expected) {
  std::thread threads[2];
  for (std::thread& thread : threads) {
    thread = std::thread([&expected] {
      ggml_backend_t backend = make_backend();
      for (int round = 0; round < 20; ++round) {
        Model model(backend, 0);
        for (int step = 0; step < 5; ++step) {
          if (model.compute() != GGML_STATUS_SUCCESS || model.result() != expected)
            fail("two threads disturb each other", round);
        }
      }
      ggml_backend_free(backend);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

long resident_kib() {
  long pages = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr || std::fscanf(file, "%ld %ld", &pages, &resident) != 2) fail("no /proc/self/statm", 0);
  std::fclose(file);
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

// KiB that the process has grown by between the hundredth and the thousandth time.
long load_a_thousand_times(const char* plugin, const std::vector<float>& expected) {
  long before = 0;
  for (int round = 0; round < 1000; ++round) {
    if (round == 100) before = resident_kib();
    ggml_backend_reg_t registration = ggml_backend_load(plugin);
    if (registration == nullptr) fail("the plug-in is not loaded", round);
    ggml_backend_t backend = make_backend();
    {
      Model model(backend, 0);
      if (model.compute() != GGML_STATUS_SUCCESS || model.result() != expected) fail("another result", round);
    }
    ggml_backend_free(backend);
    ggml_backend_unload(registration);
  }
  return resident_kib() - before;
}

}  // namespace

extern "C" {

nvb_status nvb_memory_allocate(nvb_memory_manager* memory, size_t bytes, nvb_stream* stream, void** pointer) {
  if (fails_now()) return NVB_ERROR_OUT_OF_MEMORY;
  static auto* function = original<decltype(nvb_memory_allocate)>("nvb_memory_allocate");
  return function(memory, bytes, stream, pointer);
}

nvb_status nvb_weight_create(const nvb_backend* backend, const nvb_weight_desc* desc, nvb_stream* stream,
                             nvb_weight** weight) {
  if (fails_now()) return NVB_ERROR_OUT_OF_MEMORY;
  static auto* function = original<decltype(nvb_weight_create)>("nvb_weight_create");
  return function(backend, desc, stream, weight);
}

nvb_status nvb_attention_create(const nvb_backend* backend, const nvb_attention_options* options,
                                nvb_attention** attention) {
  if (fails_now()) return NVB_ERROR_OUT_OF_MEMORY;
  static auto* function = original<decltype(nvb_attention_create)>("nvb_attention_create");
  return function(backend, options, attention);
}
}

int main(int count, char** arguments) {
  if (count < 2) fail("PLUGIN", count);
  if (ggml_backend_load(arguments[1]) == nullptr) fail("the plug-in is not loaded", 0);
  ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  const std::vector<float> expected = expected_result();
  if (count > 2 && std::strcmp(arguments[2], "--threads") == 0) {
    two_threads(expected);
    std::puts("two threads with a context each");
    return 0;
  }
  const int once = fail_allocations(false), for_ever = fail_allocations(true);
  // Two weights, an attention and its scratch memory.
  if (once < 4 || for_ever != once) fail("too few allocations were seen", once);
  two_threads(expected);
  const long grown = load_a_thousand_times(arguments[1], expected);
  if (grown > 1024) fail("the process grows by so many KiB", static_cast<int>(grown));
  std::printf("%d allocations of a graph failed in turn, once and for ever; two threads; 1,000 times loaded: %ld KiB\n",
              once, grown);
  return 0;
}
