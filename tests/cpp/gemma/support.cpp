#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

extern char** environ;

namespace gemma_test {
namespace {

constexpr int kCommandSeconds = 60;

uint16_t bf16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float bf16_value(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The test models hold numbers from 2^-14 to 2 alone, so that subnormals and infinities need no code; smaller ones
// become 0.
uint16_t f16_bits(float value) {
  if (std::fabs(value) < 0x1p-14F) return 0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += 0xFFF + (bits >> 13 & 1);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | ((bits >> 13 & 0x3FFFF) - ((127 - 15) << 10)));
}

float f16_value(uint16_t half) {
  if ((half & 0x7FFF) == 0) return 0;
  const uint32_t bits =
      static_cast<uint32_t>(half & 0x8000) << 16 | (static_cast<uint32_t>(half & 0x7FFF) + ((127 - 15) << 10)) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::string element_bytes(double value, const std::string& dtype) {
  const float single = static_cast<float>(value);
  const uint16_t half = dtype == "F16" ? f16_bits(single) : bf16_bits(single);
  return dtype == "F32" ? std::string(reinterpret_cast<const char*>(&single), 4)
                        : std::string(reinterpret_cast<const char*>(&half), 2);
}

}  // namespace

int run_tests(const std::vector<Test>& tests) {
  int failed = 0;
  for (const Test& test : tests) {
    try {
      test.run();
      std::printf("ok      %s\n", test.name.c_str());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED  %s: %s\n", test.name.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%zu passed, %d failed\n", tests.size() - static_cast<size_t>(failed), failed);
  return failed == 0 ? 0 : 1;
}

std::string test_device() {
  const char* device = std::getenv("NVB_TEST_DEVICE");
  return device != nullptr ? device : "cpu";
}

double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  require(a.size() == b.size(), a.size(), " values where ", b.size(), " are expected");
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    require(std::isfinite(a[i]), "value ", i, " is ", a[i]);
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "gemma-test-XXXXXX").string();
  require(mkdtemp(name.data()) != nullptr, name, ": ", std::strerror(errno));
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.good(), path, " cannot be read");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  file.close();
  require(file.good(), path, " cannot be written");
}

TestTensor random_tensor(const std::vector<int64_t>& shape, double mean, double deviation, const std::string& dtype,
                         uint64_t seed) {
  TestTensor tensor{shape, {}};
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal(mean, deviation);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(normal(generator));
    tensor.values.push_back(dtype == "F32"   ? value
                            : dtype == "F16" ? f16_value(f16_bits(value))
                                             : bf16_value(bf16_bits(value)));
  }
  return tensor;
}

std::string safetensors_bytes(const TestTensors& tensors, const std::string& dtype, size_t padding) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    for (const double value : tensor.values) data += element_bytes(value, dtype);
    header[name] = {{"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return safetensors_bytes(header.dump() + std::string(padding, ' '), data);
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> 8 * i & 255);
  return bytes + header + data;
}

CommandResult run_command(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  const std::string output = folder.path("output"), errors = folder.path("errors");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT, 0600);
  posix_spawn_file_actions_addopen(&actions, 2, errors.c_str(), O_WRONLY | O_CREAT, 0600);
  std::vector<char*> pointers;
  for (const std::string& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  pid_t child = 0;
  const int failure = posix_spawn(&child, pointers[0], &actions, nullptr, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  require(failure == 0, arguments[0], " cannot be started: ", std::strerror(failure));
  int status = 0;
  pid_t ended = 0;
  for (const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(kCommandSeconds);
       (ended = waitpid(child, &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < deadline;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (ended == 0) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    require(false, arguments[0], " did not end within ", kCommandSeconds, " s; it said: ", read_file(errors));
  }
  require(ended == child, "waitpid failed");
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, read_file(output), read_file(errors)};
}

}  // namespace gemma_test
