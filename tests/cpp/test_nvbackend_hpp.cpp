// nvbackend.hpp: errors arrive as exceptions, handles move and destroy themselves in any order, operations reach the
// library. NVB_TEST_DEVICE names the device, "cpu" without it.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <nvbackend.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED  %s\n", what);
}

static_assert(!std::is_copy_constructible_v<nvb::backend> && std::is_nothrow_move_constructible_v<nvb::backend>);
static_assert(!std::is_copy_constructible_v<nvb::buffer> && std::is_nothrow_move_assignable_v<nvb::buffer>);
static_assert(!std::is_copy_constructible_v<nvb::host_buffer> && !std::is_copy_constructible_v<nvb::stream>);

const char* device() {
  const char* name = std::getenv("NVB_TEST_DEVICE");
  return name != nullptr ? name : "cpu";
}

void errors() {
  try {
    const nvb::backend backend("no such device");
    expect(false, "a device that does not exist is an error");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_CONFIGURATION, "the status is the library's");
    expect(error.detail().status == error.status(), "the detail belongs to the error");
    expect(std::string(error.what()).find("no such device") != std::string::npos, "the text names the value");
    expect(std::string(error.what()).find('\0') == std::string::npos, "the text ends before its NUL");
  }
  nvb::check(NVB_OK);
  try {
    nvb::tensor(nullptr, NVB_DTYPE_F32, {1, 2, 3, 4, 5});
    expect(false, "five axes are an error");
  } catch (const std::invalid_argument&) {
  }
}

void tensors() {
  float value = 0;
  const nvb_tensor tensor = nvb::tensor(&value, NVB_DTYPE_F32, {2, 3}, {8, 1});
  expect(tensor.data == &value && tensor.rank == 2, "a tensor keeps its memory and rank");
  expect(tensor.shape[0] == 2 && tensor.shape[1] == 3 && tensor.strides[0] == 8 && tensor.strides[1] == 1,
         "a tensor keeps its shape and strides");
  const nvb_quantized_rows rows = nvb::quantized_rows(&value, &value, NVB_WEIGHT_FORMAT_INT8, 2, 4);
  expect(rows.data == &value && rows.scales == &value && rows.rows == 2 && rows.columns == 4 && rows.row_stride == 0 &&
             rows.format == NVB_WEIGHT_FORMAT_INT8 && rows.given_scales == 0,
         "quantised rows keep what they are made of");
  expect(nvb::dtype_size(NVB_DTYPE_F32) == 4 && nvb::dtype_size(NVB_DTYPE_BF16) == 2 && nvb::dtype_size(99) == 0,
         "dtypes have their sizes");
}

void handles() {
  nvb::backend first(device());
  nvb_backend* pointer = first;
  nvb::backend second = std::move(first);
  expect(second.get() == pointer && first.get() == nullptr, "a move hands the object over");
  first = std::move(second);
  expect(first.get() == pointer, "an assignment hands it back");

  nvb::stream stream(first);
  nvb::event event(first), later(first);
  event.record();
  first.synchronize();
  event.record(stream);
  stream.wait(event);
  event.synchronize();
  later.record(stream);
  later.synchronize();
  expect(later.milliseconds_since(event) >= 0, "time passes between events");
  try {
    static_cast<void>(nvb::event(first).milliseconds_since(event));
    expect(false, "an event that was not recorded has no time");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_INVALID_ARGUMENT, "the status says so");
  }

  // Children outlive the backend.
  nvb::buffer buffer(first, 64, stream);
  stream.set_workspace(buffer.data(), 64);
  stream.set_workspace(nullptr, 0);
  nvb::memory_manager memory(first);
  const uint64_t allocated = memory.statistics().allocated;
  expect(allocated >= 64, "the block is counted");
  first = nvb::backend();
  expect(first.get() == nullptr, "an empty handle is fine");
  buffer = nvb::buffer();
  expect(memory.statistics().allocated < allocated, "the block is given back");
  stream.synchronize();
}

void memory() {
  const nvb::backend backend(device());
  nvb::stream stream(backend);
  auto options = nvb::make<nvb_memory_options>();
  options.limit = 64 << 20;
  options.margin = NVB_MEMORY_NONE;
  options.leak_tracking = NVB_LEAK_TRACKING_FULL;
  nvb::memory_manager manager(backend, options);
  void* block = manager.allocate(40 << 20, stream);
  try {
    manager.allocate(30 << 20, stream);
    expect(false, "the limit holds");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_OUT_OF_MEMORY && error.memory().requested == 30 << 20,
           "the error has the numbers");
    expect(error.memory().allocated == 40 << 20 && error.memory().limit == 64 << 20, "and the manager's state");
  }
  int calls = 0;
  {
    const nvb::reclaim_callback throws(manager, [&calls](uint64_t) -> uint64_t { throw std::runtime_error("no"); }, -1);
    const nvb::reclaim_callback gives(manager, [&](uint64_t bytes) -> uint64_t {
      ++calls;
      expect(bytes >= 30 << 20, "the callback hears how much");
      manager.free(std::exchange(block, nullptr), stream);
      return 40 << 20;
    });
    block = manager.allocate(50 << 20, stream);
  }
  expect(calls == 1 && manager.recovery_step_statistics(NVB_RECOVERY_STEP_CALLBACKS).helped == 1,
         "the callback has helped");
  expect(manager.leak_report().find("1 live blocks of 52428800 bytes\n") == 0, "the report has the block");
  expect(manager.snapshot().substr(0, 14) == "{\n\"version\": 1", "the snapshot is JSON");
  const std::string path = "/tmp/nvbackend_hpp_" + std::to_string(getpid()) + ".json";
  manager.write_snapshot(path);
  std::string written(15, '\0');
  std::ifstream(path).read(written.data(), 15);
  expect(written == "{\n\"version\": 1,", "the snapshot is a file, too");
  std::remove(path.c_str());
  manager.free(block, stream);
  manager.trim();
  expect(manager.statistics().reserved == 0, "trim gives all back");
  manager.set_limit(0);
  manager.check_available(1 << 20);
  block = manager.allocate(1 << 20, stream);
  const uint64_t slept = manager.sleep(true);
  expect(slept > 0 && manager.wake() == slept, "sleep and wake move the same memory");
  manager.free(block, stream);

  nvb::pool pool(manager, "requests");
  expect(pool.name() == "requests", "a pool has a name");
  pool.free(pool.allocate(100, stream), stream);
  {
    const nvb::pool_capture capture(pool, stream);
    manager.allocate(200, stream);
  }
  expect(pool.statistics().allocated == 200 && pool.clear() == 1, "the capture's block is the pool's");
  nvb::pool moved = std::move(pool);
  expect(moved.statistics().blocks == 0 && pool.get() == nullptr, "a pool moves");
  manager.query_device();
  manager.reset_peaks();
}

void operations() {
  const nvb::backend backend(device());
  nvb::stream stream(backend);
  const std::vector<float> input = {1, 2, 3, 4, 0, 0, 0, 0};
  std::vector<float> output(input.size());
  nvb::buffer memory(backend, input.size() * sizeof(float), stream);
  memory.upload(input.data(), memory.size(), stream);

  auto softmax = nvb::make<nvb_softmax_args>();
  softmax.input = softmax.output = nvb::tensor(memory.data(), NVB_DTYPE_F32, {2, 4});
  nvb::softmax(backend, softmax, stream);
  auto scale = nvb::make<nvb_elementwise_args>();
  scale.input = scale.output = softmax.output;
  scale.factor = 2;
  nvb::scale(backend, scale, stream);
  memory.download(output.data(), memory.size(), stream);
  stream.synchronize();
  expect(std::fabs(output[4] - 0.5F) < 1e-6F, "a row of equal numbers shares the probability");
  expect(std::fabs(output[3] / output[2] - std::exp(1.0F)) < 1e-4F, "neighbours differ by a factor of e");

  try {
    softmax.input.data = nullptr;
    nvb::softmax(backend, softmax, stream);
    expect(false, "a tensor without memory is an error");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_INVALID_ARGUMENT, "the status is the operation's");
  }

  nvb::host_buffer host(backend, 16);
  nvb::host_buffer other = std::move(host);
  expect(other.data() != nullptr && other.size() == 16 && host.data() == nullptr, "host memory moves");
}

// A matrix of a file becomes a weight, which reads back as the file says.
void weights() {
  const nvb::backend backend(device());
  nvb::stream stream(backend);
  const nvb::gguf file("tests/data/weights.gguf");
  expect(file.info().version == 3 && file.value("test.count").integer == 26, "metadata is read");
  expect(file.text("test.texts", 0) == "<pad>", "texts are read");
  const nvb_gguf_tensor matrix = file.tensor("q8_0"), wanted = file.tensor("q8_0.values");
  expect(std::string(file.tensor(0).name) == "q4_0", "tensors are numbered");
  nvb_weight_blocks blocks{};
  blocks.data = matrix.data;
  blocks.bytes = matrix.bytes;
  blocks.rows = matrix.shape[0];
  blocks.columns = matrix.shape[1];
  auto desc = nvb::make<nvb_weight_desc>();
  desc.blocks = &blocks;
  desc.part_count = 1;
  desc.source_format = matrix.source_format;
  const nvb::weight weight(backend, desc, stream);
  expect(weight.info().encoding == NVB_WEIGHT_FORMAT_INT8 && weight.info().relative_error == 0, "Q8_0 is kept");
  nvb::buffer values(backend, wanted.bytes);
  weight.dequantize(nvb::tensor(values.data(), NVB_DTYPE_F32, {blocks.rows, blocks.columns}), stream);
  std::vector<float> host(wanted.bytes / sizeof(float));
  values.download(host.data(), wanted.bytes, stream);
  stream.synchronize();
  expect(std::memcmp(host.data(), wanted.data, wanted.bytes) == 0, "the values are the file's");
}

// 0 is a preset, a null pointer and no device: each constructor takes it as what its place says.
void nothing_named() {
  const nvb::configuration inference(NVB_PRESET_INFERENCE), low_latency(NVB_PRESET_LOW_LATENCY),
      throughput(NVB_PRESET_THROUGHPUT), training(NVB_PRESET_TRAINING), development(NVB_PRESET_DEVELOPMENT);
  expect(nvb::configuration(0).json() == inference.json(), "0 is the first preset");
  expect(low_latency.json() != inference.json() && throughput.json() != inference.json() &&
             training.json() != inference.json() && development.json() != inference.json(),
         "every preset is made");
  for (uint32_t preset = NVB_PRESET_INFERENCE; preset <= NVB_PRESET_DEVELOPMENT; ++preset) {
    expect(nvb::configuration(preset).get() != nullptr, "a preset may be a variable");
  }
  const nvb::backend first(nullptr), second(NULL), third(0);
  expect(first.get() != nullptr && second.get() != nullptr && third.get() != nullptr, "no name is any device");
  // A pointer to a C object is taken over, and nullptr is an empty handle everywhere else.
  nvb::backend owner(nvb::backend(device()).release());
  expect(owner.get() != nullptr, "a backend is taken over");
  const nvb::configuration no_configuration(nullptr);
  const nvb::stream no_stream(nullptr);
  const nvb::event no_event(nullptr);
  const nvb::memory_manager no_manager(nullptr);
  const nvb::weight no_weight(nullptr);
  expect(!no_configuration && !no_stream && !no_event && !no_manager && !no_weight, "nullptr is an empty handle");
}

void configurations() {
  nvb::configuration configuration(NVB_PRESET_LOW_LATENCY);
  configuration.set("device", "cpu");
  configuration.apply_json(R"({"preset": "development", "device": "cpu", "threads": 1})");
  configuration.validate();
  expect(configuration.json().find("\"level\": \"debug\"") != std::string::npos, "the preset is in the JSON");
  nvb::backend backend(configuration);
  expect(nvb::backend(configuration.get()).get() != nullptr, "the pointer serves as well");
  expect(backend.device_info().multiprocessors == 1, "the configuration's threads are the backend's");
  expect(backend.metrics(NVB_OPERATION_LINEAR).calls == 0, "nothing has run");
  auto product = nvb::make<nvb_linear_case>();
  product.rows = 4;
  product.columns = product.depth = 128;
  product.format = NVB_WEIGHT_FORMAT_BF16;
  product.input_dtype = NVB_DTYPE_BF16;
  expect(backend.explain(product).find("the default") != std::string::npos, "an explanation");
  std::string operations;
  {
    nvb::stream_explanation explanation(backend.get(), nullptr,
                                        [&](const nvb_kernel_plan& plan) { operations += plan.kernel; });
    auto args = nvb::make<nvb_softmax_args>();
    float values[4] = {};
    args.input = args.output = nvb_tensor_2d(values, NVB_DTYPE_F32, 1, 4);
    nvb::check(nvb_softmax(backend.get(), &args, nullptr));
    expect(values[0] == 0.0f, "nothing runs");
  }
  expect(operations == "softmax", "how a call would run");
  float values[4] = {1, 1, 1, 1};
  auto args = nvb::make<nvb_softmax_args>();
  args.input = args.output = nvb_tensor_2d(values, NVB_DTYPE_F32, 1, 4);
  const auto softmax = [&] { nvb::check(nvb_softmax(backend, &args, nullptr)); };
  nvb::graph graph(backend.get());
  graph.record(nullptr, softmax);
  expect(graph.info().nodes == 1 && values[0] == 1.0f, "it is recorded and not run");
  expect(graph.describe(NVB_GRAPH_FORMAT_JSON).find("\"softmax\"") != std::string::npos, "its description");
  graph.launch(nullptr);
  expect(values[0] == 0.25f, "a launch runs it");
  {
    nvb::graph other(backend.get());
    other.share_workspace(graph);
    expect(graph.info().workspace_graphs == 2, "two graphs share a workspace");
    other.share_workspace(nullptr);
    expect(graph.info().workspace_graphs == 1, "and then do not");
  }
  try {
    graph.write_decisions("/tmp/nvb_no_decisions.json");
    expect(false, "there is nothing to keep");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_INVALID_ARGUMENT, "of a graph that was not optimised");
  }
  try {
    graph.read_decisions("/tmp", "key");
    expect(false, "a folder has no decisions");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_IO, "and is refused as a file");
  }
  nvb::graph stopped(backend.get());
  try {
    stopped.record(nullptr, [] { throw std::runtime_error("stop"); });
    expect(false, "an exception leaves the recording");
  } catch (const std::runtime_error&) {
    softmax();
    expect(stopped.get() == nullptr && values[0] == 0.25f, "which has ended");
  }
  int heard = 0;
  const auto stop = [&heard](const nvb_tune_progress& progress) {
    expect(progress.case_count == 1 && progress.name[0] != '\0', "the callback hears of a candidate");
    return ++heard < 1;
  };
  expect(backend.tune(&product, 1, stop).stopped == 1 && heard == 1, "the callback ends the tuning");
  try {
    backend.tune(&product, 1, [](const nvb_tune_progress&) -> bool { throw std::runtime_error("enough"); });
    expect(false, "an exception of the callback ends the tuning");
  } catch (const std::runtime_error& error) {
    expect(std::string(error.what()) == "enough", "and arrives at the caller");
  }
  auto options = nvb::make<nvb_tune_options>();
  options.rounds = 3;
  const auto go_on = [&heard](const nvb_tune_progress&) { return ++heard > 0; };
  expect(backend.tune(&product, 1, go_on, &options).tuned == 1 && heard > 1, "one case is tuned");
  expect(backend.tune(&product, 1).tuned == 1, "and again without a callback");
  expect(backend.explain(product).find("the tuned entry") != std::string::npos, "and explained");
  auto kernel = nvb::make<nvb_kernel_info>();
  nvb::check(nvb_kernel_get(backend, 0, &kernel));
  backend.override_kernel(NVB_OPERATION_LINEAR, kernel.name);
  backend.override_kernel(NVB_OPERATION_LINEAR, nullptr);
  nvb::stream_manager manager(backend, 2);
  nvb::stream first = manager.acquire(), second = manager.acquire();
  manager.synchronize();
  expect(first.get() != second.get(), "every user has a handle of their own");
  try {
    configuration.set("fp8", "perhaps");
    expect(false, "a value that is not allowed is an error");
  } catch (const nvb::error& error) {
    expect(error.status() == NVB_ERROR_CONFIGURATION, "the status says that it is the configuration");
  }
}

}  // namespace

int main() {
  try {
    errors();
    tensors();
    weights();
    handles();
    memory();
    operations();
    nothing_named();
    configurations();
  } catch (const std::exception& error) {
    std::printf("FAILED  unexpected: %s\n", error.what());
    return 1;
  }
  if (failures == 0) std::printf("ok\n");
  return failures == 0 ? 0 : 1;
}
