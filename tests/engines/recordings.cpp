// The plug-in records a host's graph that comes again and launches it from then on, with the results of single calls.
//
//   recordings PLUGIN
//
// The program defines the functions of libnvbackend that it counts, which the plug-in then calls in their place. It is
// linked with the host's ggml and with libnvbackend.
#include <nvbackend.h>

#include <cstring>

#include "small_graph.hpp"

namespace {

int begun = 0, launched = 0, allocated = 0;
bool recordings_fail = false;

void expect(int begins, int launches, const char* text) {
  if (begun != begins || launched != launches) fail(text, 1000 * begun + launched);
}

void compute(Model& model) {
  if (model.compute() != GGML_STATUS_SUCCESS) fail("a graph failed", launched);
}

// What single calls give: a stream computes a graph that it sees for the first time so.
std::vector<float> by_single_calls(int number, const int32_t (&rows)[kTokens]) {
  ggml_backend_t backend = make_backend();
  std::vector<float> result;
  {
    Model model(backend, number);
    model.set_rows(rows);
    const int before = launched;
    compute(model);
    if (launched != before) fail("the first of a graph is launched", launched);
    result = model.result();
  }
  ggml_backend_free(backend);
  return result;
}

}  // namespace

extern "C" {

nvb_status nvb_graph_begin(nvb_graph* graph, nvb_stream* stream) {
  ++begun;
  if (recordings_fail) return NVB_ERROR_OUT_OF_MEMORY;
  static auto* function = original<decltype(nvb_graph_begin)>("nvb_graph_begin");
  return function(graph, stream);
}

nvb_status nvb_graph_launch(nvb_graph* graph, nvb_stream* stream) {
  ++launched;
  static auto* function = original<decltype(nvb_graph_launch)>("nvb_graph_launch");
  return function(graph, stream);
}

nvb_status nvb_memory_allocate(nvb_memory_manager* memory, size_t bytes, nvb_stream* stream, void** pointer) {
  ++allocated;
  static auto* function = original<decltype(nvb_memory_allocate)>("nvb_memory_allocate");
  return function(memory, bytes, stream, pointer);
}
}

int main(int count, char** arguments) {
  if (count < 2 || ggml_backend_load(arguments[1]) == nullptr) fail("PLUGIN", count);
  const int32_t some[kTokens] = {3, 0, 31, 7, 7}, others[kTokens] = {1, 30, 2, 2, 9};
  const std::vector<float> of_some = by_single_calls(0, some), of_others = by_single_calls(0, others);
  if (of_some == of_others) fail("the rows change nothing", 0);

  ggml_backend_t backend = make_backend();
  {
    Model model(backend, 0);
    compute(model);
    expect(0, 0, "a graph is recorded that came once");
    compute(model);
    expect(1, 1, "a graph that comes again is not recorded");
    if (model.result() != of_some) fail("a recorded graph gives something else", 0);
    model.set_rows(others);
    const int before = allocated;
    compute(model);
    expect(1, 2, "a recorded graph is not launched");
    if (allocated != before) fail("a later step allocates", allocated - before);
    if (model.result() != of_others) fail("a recorded graph does not read what the host wrote since", 0);
    // Memory that a weight reads may be written at every step.
    model.set_table(77);
    compute(model);
    expect(1, 3, "a recording is dropped where the host writes to a weight");
    if (model.result() == of_others) fail("a recorded graph does not read the weight that the host wrote", 0);
    model.set_table(1);
    compute(model);
    if (model.result() != of_others) fail("a weight that was written again gives something else", 0);

    // Another graph of the same stream, whose scratch memory is larger, takes that of the first away.
    Model larger(backend, 0, 64);
    compute(larger);
    expect(1, 4, "another graph is taken for the recorded one");
    compute(model);
    if (model.result() != of_others) fail("the graph gives something else after its scratch memory went", 0);
    compute(model);
    if (model.result() != of_others || launched < 5) fail("the graph is not recorded again", launched);
  }
  // Memory that another model has where the first had its own is not the first's.
  {
    Model model(backend, 1);
    const int before = launched;
    compute(model);
    if (launched != before) fail("a graph with another scale is taken for an earlier one", 0);
  }
  begun = launched = 0;
  recordings_fail = true;
  {
    Model model(backend, 2);
    std::vector<float> first;
    for (int step = 0; step < 9; ++step) {
      compute(model);
      if (step == 0) first = model.result();
      if (model.result() != first) fail("a graph that cannot be recorded gives something else", step);
    }
    // At the second, fourth and eighth.
    expect(3, 0, "recording is not tried after twice as many steps");
  }
  ggml_backend_free(backend);
  std::puts("a graph that comes again is recorded, launched, and made anew where its memory went");
  return 0;
}
